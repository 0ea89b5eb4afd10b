"""The table of passes: each has a name, can be stopped after, switched off, printed and run alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.passes import PIPELINE, pass_named

OPTIONAL = [p.name for p in PIPELINE if p.kind != "program"]
W = {name: np.random.default_rng(i).standard_normal((8, 8)).astype("f4") for i, name in enumerate("qkv")}


def profile(merge: bool = True, disable: Sequence[str] = (), **tables: Any) -> rlx.CompileProfile:
    """The default, merging."""
    return rlx.CompileProfile().replace(
        fusion={"disable": list(disable)}, backend={"cpu": {"merge": merge, "weight_layout": "in_out"}}, **tables
    )


def three(emit: Any, x: Any) -> Any:
    q, k, v = (emit.linear(x, name) for name in "qkv")
    return emit.tanh(q) * k + v


FLOW = rlx.ModelFlow("m").input("x", ("batch", 8)).custom_named("mix", three)


def compiled(**settings: Any) -> Any:
    """The model."""
    return rlx.compile(FLOW, W, profile=profile(**settings))


def test_every_pass_of_a_program_is_timed_counted_and_printed() -> None:
    """In the order of the table; each can be stopped after."""
    model = compiled(passes={"verbose": False})
    report = model.report()
    ran = list(report.nodes)
    assert ran == [p.name for p in PIPELINE if p.name in ran]
    assert {"expand", "merge_linears", "orient", "derive", "lower", "cse", "dce"} <= set(ran)
    assert set(ran) < set(report.seconds) and "build" in report.seconds
    texts = {name: model.text(str(pass_named(name).level), after=name) for name in ran}
    assert texts["expand"].count("= linear(") == 3 and texts["merge_linears"].count("= linear(") == 1
    assert texts["merge_linears"].startswith("hir @m (") and "after=merge_linears" in texts["merge_linears"]
    body = texts["dce"].partition("\n")[2]
    assert body == model.text("mir").partition("\n")[2]


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("name", OPTIONAL)
def test_each_pass_can_be_switched_off(name: str) -> None:
    """By its name; the numbers stay."""
    x = np.ones((2, 8))
    model = compiled(disable=[name])
    assert name not in model.report().nodes
    q, k, v = (x @ W[n].T.astype("f8") for n in "qkv")
    np.testing.assert_allclose(model(x), np.tanh(q) * k + v, rtol=1e-5, atol=1e-5)
