"""What changes with another profile: in the settings, and in a program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import ProfileError
from rlx_jax.profiles import Change, CompileProfile
from tests import divided

AUTO = CompileProfile()
FIELDS: dict[str, tuple[dict[str, Any], set[Change]]] = {
    "nothing, but the name": ({"name": "other"}, set()),
    "a value": ({"precision": {"compute": "bf16"}}, {Change("precision.compute", "auto", "bf16")}),
    "a list": ({"fusion": {"disable": ["cse", "dce"]}}, {Change("fusion.disable", "[]", "[cse, dce]")}),
    "a table in a table": ({"backend": {"cpu": {"merge": True}}}, {Change("backend.cpu.merge", "auto", "true")}),
    "a class of ops": ({"precision": {"classes": {"compute": "bf16"}, "mixed": "custom"}},
        {Change("precision.classes.compute", "f32", "bf16"), Change("precision.mixed", "none", "custom")}),
    "an option of XLA": ({"backend": {"cpu": {"compiler_options": {"xla_one": True}}}},
        {Change("backend.cpu.compiler_options.xla_one", "unset", "true")}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_settings_that_differ(name: str) -> None:
    """Each by its path, and the other way round."""
    changes, wanted = FIELDS[name]
    other = AUTO.replace(**changes)
    found = AUTO.diff(other)
    assert set(found.fields) == wanted and found.program is None and bool(found) == bool(wanted)
    assert set(other.diff(AUTO).fields) == {Change(c.what, c.theirs, c.ours) for c in wanted}
    assert all(change.what in str(found) for change in wanted)


@pytest.fixture(scope="module")
def model() -> Any:
    """Of which nothing is compiled."""
    return rlx.compile(divided.recipe("llama"), divided.recipe("llama").shapes())


IN_THE_PROGRAM: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "a pass": ({"passes": {"cse": False}}, {"pass cse": ("runs", "does not run")}),
    "dtypes": (
        {"precision": {"compute": "bf16"}},
        {
            "pass precision": ("does not run", "runs"),
            **dict.fromkeys(("compute dtype", "parameters in"), ("f32", "bf16")),
        },
    ),
    "parameters that are one": (
        {"backend": {"cpu": {"merge": True}}},
        {"pass merge_linears": ("does not run", "runs"), "ops mat_mul": ("8", "5")},
    ),
    "layers": ({"layers": {"roll": "scan"}}, {"layers": ("one after the other", "one loop")}),
    "inputs": ({"donation": {"inputs": ["input_ids"]}}, {"inputs consumed": ("none", "input_ids")}),
    "options": (
        {"backend": {"cpu": {"compiler_options": {"xla_one": True}}}},
        {"options of XLA": ("none", "xla_one yes")},
    ),
    "what a forward program has not": (
        {"donation": {"state": False}, "precision": {"kv": "bf16"}, "buckets": {"prompt": [8]}},
        {},
    ),
    "what auto means": ({"layers": {"roll": "unroll"}, "precision": {"compute": "f32"}}, {}),
}


@pytest.mark.parametrize("name", IN_THE_PROGRAM)
def test_what_changes_in_a_program(model: Any, name: str) -> None:
    """By what is made of the flow: settings without effect there change nothing."""
    changes, wanted = IN_THE_PROGRAM[name]
    found = AUTO.diff(AUTO.replace(**changes), model)
    told = {change.what: (change.ours, change.theirs) for change in found.program or ()}
    assert {what: told.get(what) for what in wanted} == wanted and bool(told) == bool(wanted)
    assert ("the program is the same" in str(found)) == (not wanted)
    assert all(change.ours != change.theirs for change in found.program or ())
    assert max(map(len, str(found).splitlines())) <= 80
    assert model.report().compiles == 0


def test_programs_with_a_state_and_sizes(model: Any) -> None:
    """Of the program that is asked; how ops run where its sizes are known."""
    step = model.as_program("extend")
    changes = AUTO.diff(AUTO.replace(donation={"state": False}), step).program
    assert changes == (Change("state updated in place", "yes", "no"),)
    other = AUTO.replace(fusion={"target": "h200"}, precision={"compute": "bf16"}, attention={"implementation": "xla"})
    assert not [c for c in AUTO.diff(other, model).program or () if c.what.startswith("runs")]
    model.text("lir", np.ones((2, 5), np.int32))
    (runs,) = [c for c in AUTO.diff(other, model).program or () if c.what == "runs attention"]
    assert "heads_first (faster on a CPU)" in runs.ours and "asked for" in runs.theirs


def test_presets_and_files(tmp_path: Any) -> None:
    """What `profile=` takes is taken here, and nothing else; only a model has a program."""
    (tmp_path / "mine.rlx.toml").write_text('[layers]\nroll = "scan"\n', "utf-8")
    for other in (tmp_path / "mine.rlx.toml", str(tmp_path / "mine.rlx.toml"), AUTO.replace(layers={"roll": "scan"})):
        assert AUTO.diff(other).fields == (Change("layers.roll", "auto", "scan"),)
    assert str(AUTO.diff("auto")) == "auto and auto have the same settings"
    assert CompileProfile.auto().diff("llama32_decode").theirs == "llama32_decode"
    with pytest.raises(ProfileError, match="diff: profile is 3; expected a CompileProfile"):
        AUTO.diff(3)  # type: ignore[arg-type]
    flow = rlx.ModelFlow("m").input("x", ("n", 4)).linear("w")
    with pytest.raises(ProfileError, match="fusion.disable: unknown pass 'cze'"):
        AUTO.diff(AUTO.replace(fusion={"disable": ["cze"]}), rlx.compile(flow, {"w": np.ones((4, 4), np.float32)}))
