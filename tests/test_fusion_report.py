"""Fusion: what the passes leave to XLA, what merging fuses, and the report of what was missed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.passes import LEFT_TO_XLA, PIPELINE
from rlx_jax.ir import hir
from rlx_jax.lowering.fusion import FusionReport
from rlx_jax.runtime.model import CompiledModel
from tests.opening import opened
from tests.oracles.checkpoints import FIXTURES

LLAMA, BERT = FIXTURES / "llama" / "gqa_plain_attnbias_v5", FIXTURES / "bert" / "bare_v5"


def profile(merge: Any = "auto", **fusion: Any) -> rlx.CompileProfile:
    """A profile with these settings for fusion."""
    return rlx.CompileProfile().replace(fusion=fusion, backend={"cpu": {"merge": merge}})


def report(checkpoint: Path, **settings: Any) -> FusionReport:
    """The report of the forward program."""
    return looked_at(checkpoint, **settings).template("forward").fusion


def looked_at(checkpoint: Path, **settings: Any) -> CompiledModel:
    """The model of a checkpoint; nothing is compiled."""
    return opened(rlx.from_pretrained(checkpoint), profile=profile(**settings))


def test_passes_that_leave_their_ops_to_xla() -> None:
    """Each has a row and a name, and the program after it is the one before."""
    model: Any = rlx.compile(flow_of(lambda e, x: e.silu(x @ e.param("w") + e.param("b"))), WEIGHTS_OF_A_BIAS)
    for name in LEFT_TO_XLA:
        before = PIPELINE[[p.name for p in PIPELINE].index(name) - 1].name
        assert model.text("mir", after=name) == model.text("mir", after=before)
        assert name in model.report().fusion.left_to_xla and name in str(model.report().fusion)


def test_a_bias_of_an_f32_result_in_bf16() -> None:
    """Operands in bf16, sums and the bias in f32: what float64 says of the rounded numbers."""
    rng = np.random.default_rng(0)
    x, w, bias = (rng.normal(size=shape).astype("f4") for shape in ((3, 8), (5, 8), (5,)))
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).custom(
        lambda emit, x: emit.add_node(hir.Linear(1, bias=True, f32_result=True), x, emit.param("w"), emit.param("b"))
    )  # fmt: skip
    model = rlx.compile(flow, {"w": w, "b": bias}, profile=rlx.CompileProfile().replace(precision={"compute": "bf16"}))
    x, w, bias = (value.astype(ml_dtypes.bfloat16).astype("f8") for value in (x, w, bias))
    np.testing.assert_allclose(np.asarray(model(x.astype("f4"))), x @ w.T + bias, rtol=0, atol=1e-5)


def test_fused_ops_of_a_llama_and_of_a_bert() -> None:
    """The direct policy writes a Linear with a bias as one op; with the other it is a product and a sum."""
    llama, bert = report(LLAMA, merge=True), report(BERT)
    assert (llama.fused_swiglu, llama.silu, llama.fused_residual_rms_norm) == (0, 1, 0)
    assert (bert.fused_matmul_bias_act, bert.fused_residual_ln, bert.matmul_after) == (6, 0, 0)
    assert report(BERT, policy="fusable").matmul_after == 6
    assert [place.by for place in llama.fused] == ["merge_linears"] * len(llama.fused) and llama.fused


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
def test_matches_and_near_matches_of_a_llama_and_of_a_bert() -> None:
    """With the default profile: what XLA fuses, and why a pre-norm layer has no fused norm."""

    def counts(sites: Any) -> dict[str, int]:
        return dict(Counter(f"{site.pattern} {site.reason}{site.detail}" for site in sites))

    llama, bert, plain = report(LLAMA), report(BERT), report(BERT, policy="fusable")
    assert counts(llama.matched_by_xla)["swiglu LeftToXla"] == 1 and llama.clean
    assert counts(llama.near) == {
        "attention_block Causal": 1, "matmul_bias_act BiasRankTooHigh{3}": 1, "residual_rms_norm MultiConsumer": 1,
    }  # fmt: skip
    assert counts(bert.matched_by_xla)["residual_ln LeftToXla"] == 3 and not bert.near
    assert counts(bert.matched_by_xla)["attention_block LeftToXla"] == 1
    assert counts(plain.matched_by_xla)["matmul_bias_act LeftToXla"] == 6
    assert "swiglu x 1" in str(llama) and "residual_rms_norm x 1 — MultiConsumer" in str(llama)
    assert all(site.node.startswith("%") and site.context != "—" for site in llama.near)
    assert not report(LLAMA, disable=["fuse_swiglu", "mark_elementwise_regions"]).matched_by_xla


@pytest.mark.parametrize(("policy", "merge"), [("direct", True), ("fusable", False)])
def test_llama_and_bert_are_clean(policy: str, merge: bool) -> None:
    """Projections without a bias are no misses. All programs."""
    settings: Any = {"policy": policy, "merge": merge, "assert_clean": True}
    for checkpoint, programs in ((LLAMA, ("forward", "prefill", "extend")), (BERT, ("forward",))):
        for program in programs:
            assert looked_at(checkpoint, **settings).template(program).fusion.clean


def test_a_norm_and_its_reshape_are_one_op_or_two() -> None:
    """The pattern is in the report, the op that it equals is not, and the numbers are the same."""
    x, weights = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("f4"), {"g": np.arange(8, dtype="f4")}
    stages: list[Callable[[Any, Any], Any]] = [
        lambda e, v: e.reshape(e.rms_norm(v, e.param("g")), (-1, 8)) @ e.param("g"),
        lambda e, v: e.add_node(rlx.ops.FusedRmsNormReshape(1e-5), v, e.param("g")) @ e.param("g"),
    ]
    flows = [rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).custom(stage) for stage in stages]
    two, one = (rlx.compile(flow, weights) for flow in flows)
    assert np.array_equal(two(x), one(x))
    assert [s.pattern for s in two.report().fusion.matched_by_xla] == ["rms_norm_reshape"]
    assert not one.report().fusion.matched_by_xla and "fused_rms_reshape(eps=1e-05)" in one.text("mir")


WEIGHTS = {
    "w": np.eye(8, dtype="f4"), "v": np.ones((8, 8), "f4"), "b": np.ones(8, "f4"),
}  # fmt: skip
WEIGHTS_OF_A_BIAS = {key: WEIGHTS[key] for key in ("w", "b")}
MISSES: dict[str, tuple[Callable[[Any, Any], Any], Any, list[str]]] = {
    "two products with their own activations": (
        lambda e, x: e.linear(x, "w", activation="tanh") * e.linear(x, "v"),
        {"merge": True},
        ["shared_input_matmul NotFused"],
    ),
    "a gate and its product": (
        lambda e, x: e.silu(x @ e.param("w")) * (x @ e.param("v")),
        {"merge": True},
        ["shared_input_matmul NotFused"],
    ),
    "a product that is read without its bias too": (
        lambda e, x: e.tanh((y := x @ e.param("w")) + e.param("b")) * y, {}, ["matmul_bias_act MultiConsumer"],
    ),
    "a gate of another input": (
        lambda e, x: e.silu(x @ e.param("w")) * (e.tanh(x) @ e.param("v")), {}, ["swiglu SwigluNotSharedInput"],
    ),
    "none: a product without a bias": (lambda e, x: e.tanh(x @ e.param("w")), {"merge": True}, []),
    "none: a residual": (lambda e, x: x @ e.param("w") + x, {}, []),
    "none: projections are kept apart": (
        lambda e, x: e.silu(x @ e.param("w")) * (x @ e.param("v")), {"merge": False}, [],
    ),
    "none: a weight used twice": (
        lambda e, x: (x @ e.param("w")) * (x @ e.param("v")) * (e.tanh(x) @ e.param("w")), {"merge": True}, [],
    ),
}  # fmt: skip


def flow_of(stage: Callable[[Any, Any], Any], repeat: bool = False) -> rlx.ModelFlow:
    """A flow over x [batch, 8] of this stage, or of two layers of it."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 8))
    return flow.repeat_layers(2, lambda i: rlx.blocks.Custom(stage)) if repeat else flow.custom(stage)


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("case", MISSES)
def test_misses(case: str) -> None:
    """A pattern counts if its pass ran and could not fuse it, and `assert_clean` refuses it."""
    stage, settings, want = MISSES[case]
    flow = flow_of(stage)
    weights = {key: WEIGHTS[key] for key in flow.build(WEIGHTS).keys_read}

    def fusion(**more: Any) -> FusionReport:
        model = opened(flow, weights, profile(**settings, **more))
        return model.template("forward").fusion

    found = fusion()
    assert [f"{m.pattern} {m.reason}{m.detail}" for m in found.missed] == want
    if found.clean:
        assert fusion(assert_clean=True) == found
        return
    with pytest.raises(rlx.errors.FusionError, match=f"m: .*{len(want)} missed") as caught:
        fusion(assert_clean=True)
    assert caught.value.report == found and str(found) in str(caught.value)
    assert isinstance(caught.value, rlx.errors.GraphError)


def test_flops_leave_out_what_nothing_needs() -> None:
    """Without dce a product that nothing reads stays in the graph."""
    flow = flow_of(lambda e, x: (x @ e.param("v"), x @ e.param("w") + e.param("b"))[1])
    kept = rlx.CompileProfile().replace(passes={"dce": False})
    model: Any = rlx.compile(flow, WEIGHTS, profile=kept)
    model.lower(np.ones((3, 8), "f4"))
    assert model.text("mir").count("= matmul(") == 2
    assert model.report().flops == 2 * 3 * 8 * 8
