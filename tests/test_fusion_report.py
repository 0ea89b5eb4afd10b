"""Fusion on whole models: settings, what they change, and the report of what was missed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.passes import PIPELINE
from rlx_jax.lowering.inspect.fusion_report import FusionReport
from rlx_jax.runtime.model import CompiledModel
from tests.opening import opened
from tests.oracles.checkpoints import FIXTURES

FUSION = [p.name for p in PIPELINE if p.kind == "fusion"]
LLAMA, BERT = FIXTURES / "llama" / "gqa_plain_attnbias_v5", FIXTURES / "bert" / "bare_v5"


def profile(merge: Any = "auto", unfuse: Any = "auto", **fusion: Any) -> rlx.CompileProfile:
    """A profile with these settings for fusion."""
    return rlx.CompileProfile().replace(fusion=fusion, backend={"cpu": {"merge": merge, "unfuse_regions": unfuse}})


def report(checkpoint: Path, **settings: Any) -> FusionReport:
    """The report of the forward program."""
    return looked_at(checkpoint, **settings).template("forward").fusion


def looked_at(checkpoint: Path, **settings: Any) -> CompiledModel:
    """The model of a checkpoint; nothing is compiled."""
    return opened(rlx.from_pretrained(checkpoint), profile=profile(**settings))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("checkpoint", [LLAMA, BERT], ids=["llama", "bert"])
def test_a_model_with_each_pass_on_and_off(checkpoint: Path) -> None:
    """All off, all on, all but one: ops that are compositions change no bit. Direct and fusable: the same numbers."""

    def model(**settings: Any) -> Any:
        return rlx.compile(rlx.from_pretrained(checkpoint), profile=profile(**settings))

    def logits(model: Any) -> np.ndarray:
        return np.asarray(model(np.arange(10, dtype=np.int32).reshape(2, 5)))

    plain = logits(model(policy="fusable", skip=True))
    on = model(policy="fusable", unfuse=False)
    np.testing.assert_array_equal(logits(on), plain)
    changed = []
    for name in FUSION:
        without = model(policy="fusable", unfuse=False, disable=[name])
        if without.text("mir") != on.text("mir"):  # else it is the same program
            changed.append(name)
            np.testing.assert_array_equal(logits(without), plain, err_msg=f"without {name}")
    other = "fuse_residual_layer_norm" if checkpoint == BERT else "mark_elementwise_regions"
    assert changed == ["fuse_matmul_bias_act", other]
    np.testing.assert_allclose(logits(model()), plain, rtol=0, atol=2e-6 * np.abs(plain).max())


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("checkpoint", [LLAMA, BERT], ids=["llama", "bert"])
def test_direct_and_fusable_end_in_the_same_ops(checkpoint: Path, merge: bool) -> None:
    """One policy writes fused ops, with the other the passes find them."""
    direct, fusable = (report(checkpoint, merge=merge, policy=p) for p in ("direct", "fusable"))
    assert direct.fused_matmul_bias_act == fusable.fused_matmul_bias_act > 0
    for name in ("matmul_after", "fused_swiglu", "fused_residual_ln", "fused_residual_rms_norm", "silu", "mul"):
        assert getattr(direct, name) == getattr(fusable, name), name
    assert fusable.nodes_after < fusable.nodes_before


def test_what_fuses_in_a_llama_and_in_a_bert() -> None:
    """The residual stream of a Llama is read again after its norm, so only BERT's norms take in their sums."""
    llama, bert = report(LLAMA, merge=True), report(BERT)
    assert (llama.fused_swiglu, llama.silu, llama.fused_residual_rms_norm) == (1, 0, 0)
    assert (bert.fused_matmul_bias_act, bert.fused_residual_ln, bert.matmul_after) == (6, 2, 0)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("policy", ["direct", "fusable"])
def test_llama_and_bert_are_clean(policy: str, merge: bool) -> None:
    """Projections without a bias are no misses. All programs."""
    settings: Any = {"policy": policy, "merge": merge, "assert_clean": True}
    for checkpoint, programs in ((LLAMA, ("forward", "prefill", "extend")), (BERT, ("forward",))):
        for program in programs:
            assert looked_at(checkpoint, **settings).template(program).fusion.clean


# -- the report and its contract ---------------------------------------------------------------

WEIGHTS = {
    "w": np.eye(8, dtype="f4"), "v": np.ones((8, 8), "f4"), "b": np.ones(8, "f4"), "row": np.ones((1, 8), "f4"),
}  # fmt: skip
MISSES: dict[str, tuple[Callable[[Any, Any], Any], Any, list[str]]] = {
    "a product read twice": (
        lambda e, x: (y := x @ e.param("w")) * (y + e.param("b")), {}, ["matmul_bias_act MultiConsumer"],
    ),
    "a bias of rank 2": (
        lambda e, x: x @ e.param("w") + e.param("row"), {}, ["matmul_bias_act BiasRankTooHigh{2}"],
    ),
    "two products with their own activations": (
        lambda e, x: e.linear(x, "w", activation="tanh") * e.linear(x, "v"),
        {"merge": True},
        ["shared_input_matmul NotFused"],
    ),
    "a gate and its product": (
        lambda e, x: e.silu(x @ e.param("w")) * (x @ e.param("v")),
        {"merge": True},
        ["shared_input_matmul NotFused", "swiglu SwigluNotMerged"],
    ),
    "a gate that is read again": (
        lambda e, x: (g := e.silu(x[..., :4])) * x[..., 4:] + g, {}, ["swiglu MultiConsumer"],
    ),
    "a miss in a region of pointwise ops": (
        lambda e, x: (y := x @ e.param("w")) * e.tanh(y + e.param("b")),
        {"unfuse": False},
        ["matmul_bias_act MultiConsumer"],
    ),
    "none: a product without a bias": (lambda e, x: e.tanh(x @ e.param("w")), {"merge": True}, []),
    "none: a residual": (lambda e, x: x @ e.param("w") + x, {}, []),
    "none: the pass is off": (
        lambda e, x: (y := x @ e.param("w")) * (y + e.param("b")), {"disable": ["fuse_matmul_bias_act"]}, [],
    ),
    "none: no fusion at all": (lambda e, x: (y := x @ e.param("w")) * (y + e.param("b")), {"skip": True}, []),
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
    with pytest.raises(rlx.errors.FusionError, match=f"m: fusion contract violated: {len(want)} missed") as caught:
        fusion(assert_clean=True)
    assert caught.value.report == found and str(found) in str(caught.value)
    assert isinstance(caught.value, rlx.errors.GraphError)


def test_the_text_of_a_report() -> None:
    """Layers that repeat count once; each miss has its place and a hint."""

    def stage(emit: Any, x: Any) -> Any:
        with emit.scope("mixer"):
            y = x @ emit.param("w")
            return emit.tanh(y * (y + emit.param("b")))

    model: Any = rlx.compile(flow_of(stage, repeat=True), {k: WEIGHTS[k] for k in ("w", "b")})
    text = str(model.report().fusion)
    assert text.splitlines()[:2] == [
        "fusion report:",
        "  nodes=9→9 matmul=1→1 fused_mm_act=0 fused_swiglu=0 fused_residual=0 elementwise_region=0 "
        "missed_mm_act=1 missed_swiglu=0 missed_shared_mm=0",
    ]
    assert text.splitlines()[2] == "missed patterns:"
    assert "  matmul_bias_act @ %2 (layers.{i}.stage.mixer) — MultiConsumer → use the product once" in text
    printed = " ".join(str(model.report()).split())
    assert "fuse_matmul_bias_act 9," in printed and model.report().fusion.summary in printed
    assert "not fused: matmul_bias_act @" in printed


# -- the settings ------------------------------------------------------------------------------


def mir(flow: Any, **settings: Any) -> str:
    """The text of the program."""
    model: Any = rlx.compile(flow, profile=profile(**settings))
    return str(model.text("mir"))


def shapes(*keys: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights without data: a program for another platform than this one is only looked at."""
    return {k: jax.ShapeDtypeStruct(WEIGHTS[k].shape, WEIGHTS[k].dtype) for k in keys}


def test_settings_show_in_the_program() -> None:
    """skip, disable, skip_fusion, unfuse_regions and the target each change the text."""

    def stage(emit: Any, x: Any) -> Any:
        y = emit.silu(x @ emit.param("w") + emit.param("b"))
        return emit.tanh(emit.silu(y[..., :4]) * y[..., 4:])

    flow = flow_of(stage).with_weights(shapes("w", "b"))
    default = mir(flow)
    assert "fused_mm_bias_silu" in default and "fused_swiglu" in default and "ew_region" not in default
    for off in (mir(flow, skip=True), str(rlx.compile(flow, profile=rlx.CompileProfile().replace(
        backend={"cpu": {"skip_fusion": True}})).text("mir"))):  # fmt: skip
        assert "fused" not in off
    only = mir(flow, disable=["fuse_swiglu"])
    assert "fused_mm_bias_silu" in only and "fused_swiglu" not in only
    assert "ew_region(in=2, steps=3: silu mul tanh)" in mir(flow, disable=["fuse_swiglu"], unfuse=False)
    for target in ("cuda", "rocm", "tpu"):
        text = mir(flow, target=target)
        assert "ew_region(in=2, steps=3: silu mul tanh)" in text and "fused_mm_bias_silu" in text, target


def test_targets_do_without_some_passes() -> None:
    """As the table says."""
    summed = flow_of(lambda e, x: e.rms_norm(e.tanh(x) + x, "b", eps=1e-5)).with_weights(shapes("b"))
    texts = {target: mir(summed, target=target) for target in ("cpu", "cuda", "rocm", "tpu")}
    assert [target for target, text in texts.items() if "fused_residual_rms" in text] == ["cpu", "cuda", "rocm"]


def test_flops_leave_out_what_nothing_needs() -> None:
    """Without dce the product that a fused op took in stays in the graph."""
    flow = flow_of(lambda e, x: x @ e.param("w") + e.param("b"))
    kept = rlx.CompileProfile().replace(passes={"dce": False})
    model: Any = rlx.compile(flow, {k: WEIGHTS[k] for k in ("w", "b")}, profile=kept)
    model.lower(np.ones((3, 8), "f4"))
    assert all(f"= {op}(" in model.text("mir") for op in ("matmul", "fused_mm_bias"))
    assert model.report().flops == 2 * 3 * 8 * 8
