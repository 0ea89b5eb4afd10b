"""What stages promise, held against what is built; and compositions of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import (
    AttentionStage,
    FfnStage,
    Homogeneous,
    LayerComposition,
    LlamaDecoderSpec,
    NormStage,
    Pair,
    SelfAttnPrefillSpec,
    Single,
    StageArtifacts,
)
from rlx_jax.errors import GraphError
from rlx_jax.models.llama import LlamaConfig, weight_specs

CONFIG = LlamaConfig(17, 8, 12, 2, 4, 2, 6, (1.0, 0.1, 0.01))
SPEC = LlamaDecoderSpec(4, 6, 2)
PREFIX = "model.layers.0"


def x_flow() -> rlx.ModelFlow:
    """A flow over `x` `[batch, seq, 8]` with the weights of a small Llama."""
    return rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).with_weights(weight_specs(CONFIG))


def inside(fn: Any) -> Any:
    """What `fn(emit, x)` returns while a flow is traced."""
    found: list[Any] = []

    def stage(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
        found.append(fn(emit, x))
        return x

    x_flow().custom(stage).build()
    return found[0]


def texts(shape: tuple[Any, ...]) -> list[str]:
    """A shape to compare: symbolic dimensions do not compare with numbers."""
    return [str(d) for d in shape]


@pytest.mark.parametrize(
    "stage, slots",
    [
        (blocks.LlamaDecoder.layer(0, SPEC), "context"),
        (blocks.SelfAttnPrefill(SelfAttnPrefillSpec.hf_layer(PREFIX, 4, 6, 2)), "context"),
        (blocks.LlamaDecoder.layer(0, replace(SPEC, mask="sliding:5")), "context_5"),
        (blocks.Qwen3Decoder.layer(0, blocks.Qwen3DecoderSpec(4, 2, 6, qk_norm=False, mask="sliding:5")), "context_5"),
    ],
)
def test_the_cache_contract_is_the_cache(stage: AttentionStage, slots: str) -> None:
    """`[B, T, K·D]`, which the derived program holds as `[B, T, K, D]`: 2 heads of 6, not the query's 4."""
    contract = inside(lambda emit, x: stage.cache_contract(emit, x.type.shape))
    flow = x_flow().stage(stage)
    if isinstance(stage, blocks.SelfAttnPrefill):  # its packed context goes through the output projection
        flow = flow.linear(f"{PREFIX}.self_attn.o_proj.weight")
    state = cache_types(flow)
    assert sorted(slot for _, slot in state) == ["k", "v"]
    for (_, slot), shape in state.items():
        merged = [*texts(shape[:2]), str(shape[2] * shape[3])]
        assert texts(getattr(contract, slot)) == merged == ["batch", slots, "12"]


def cache_types(flow: rlx.ModelFlow) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Shapes of the caches of the derived program."""
    with pytest.warns(rlx.errors.RlxWarning, match="nothing reads them"):
        model = rlx.compile(flow, program="extend", strict=False)
    state = model.compiler.template("extend").state
    return {key: t.shape for key, t in state.items() if key[1] != "length"}


@pytest.mark.parametrize(
    "stage, widest",
    [
        (blocks.SwiGlu.hf_mlp(PREFIX), 12),
        (blocks.GeGlu.hf_mlp(PREFIX), 12),
        (blocks.GeluFfn("up", "up_b", "down", "down_b"), 20),
    ],
    ids=["SwiGlu", "GeGlu", "GeluFfn"],
)
def test_the_intermediate_shape_is_the_widest_value(stage: FfnStage, widest: int) -> None:
    """Held against every value the stage makes."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        key: rng.standard_normal(spec.shape).astype("f4")
        for key, spec in weight_specs(CONFIG).items()
        if ".mlp." in key
    }
    weights |= {"up": np.ones((20, 8), "f4"), "up_b": np.ones(20, "f4")}
    weights |= {"down": np.ones((8, 20), "f4"), "down_b": np.ones(8, "f4")}
    said: list[Any] = []

    def ask(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue | None:
        said.append(stage.intermediate_shape(emit, x.type.shape))
        return stage.emit(emit, x)

    graph = x_flow().custom(ask).build(weights).hir
    made = {tuple(texts(t.shape)) for _, node in graph.walk() for t in node.types if t.rank == 3}
    assert texts(said[0]) == ["batch", "seq", str(widest)]
    assert made == {("batch", "seq", "8"), ("batch", "seq", str(widest))}


def test_norms_say_their_epsilon() -> None:
    norms: list[NormStage] = [
        blocks.RmsNorm("g", 1e-3),
        blocks.LayerNorm("g", "b", 1e-4),
        blocks.GemmaRmsNorm("g", 1e-2),
    ]
    assert [norm.eps for norm in norms] == [1e-3, 1e-4, 1e-2]


def test_a_block_as_a_layer() -> None:
    """It reports the shape it leaves and the side outputs it gave, in order; nothing returned is nothing changed."""

    def widen(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
        emit.output("sum", x.sum(axis=-1))
        emit.output("twice", x + x)
        return emit.concat([x, x])

    def check(emit: rlx.Emit, x: rlx.FlowValue) -> None:
        emit.output("before", x)
        layer: blocks.LayerStage = blocks.BlockAsLayer(blocks.Custom(widen))
        value, artifacts = layer.emit_layer(emit, x)
        assert layer.name == "block" and value.shape[2] == 16
        expected = StageArtifacts.hidden_only(value.type.shape)
        batch, seq, _ = x.type.shape
        assert artifacts == expected.with_side("sum", (batch, seq)).with_side("twice", (batch, seq, 8))
        same, artifacts = blocks.BlockAsLayer(blocks.Custom(lambda emit, x: None)).emit_layer(emit, x)
        assert same is x and artifacts == StageArtifacts.hidden_only(x.type.shape)

    inside(check)


# -- compositions ------------------------------------------------------------------------------

KEY = 3126292069848458932
STACK = Pair(Single("embed"), Pair(Homogeneous("block", 3), Single("norm")))


def build(name: str, index: int) -> blocks.BlockStage:
    """Linears whose key says which layer asked."""
    return blocks.Linear(f"{name}.{index}.weight", shape=(8, 8))


def test_depth_and_stage() -> None:
    """The layers in order; equal ones are one region, under their own name."""
    assert [c.depth_hint() for c in (STACK, Single("a"), Homogeneous("a", 7))] == [5, 1, 7]
    built = rlx.ModelFlow("m").input("x", ("batch", 8)).stage(STACK.to_flow_stage(build)).build()
    keys = ("embed.0", "block.0", "block.1", "block.2", "norm.0")
    assert built.keys_read == tuple(f"{key}.weight" for key in keys)
    assert any(node.op.text().startswith("repeat(count=3") for node in built.hir.nodes)


def test_cache_keys() -> None:
    """Equal for equal compositions, in every process (hence the number); different for every change of structure."""
    others: list[LayerComposition] = [
        Single("a"), Single("b"), Homogeneous("a", 1), Homogeneous("a", 2), Pair(Single("a"), Single("b")),
        Pair(Single("b"), Single("a")), Pair(Homogeneous("a", 1), Single("b")), STACK,
    ]  # fmt: skip
    assert len({c.cache_key() for c in others}) == len(others)
    assert Pair(Single("a"), Single("b")).cache_key() == Pair(Single("a"), Single("b")).cache_key()
    assert Pair(Single("a"), Single("b")).cache_key() == KEY


def test_a_count_is_a_whole_number() -> None:
    with pytest.raises(GraphError, match="expected a whole number"):
        rlx.ModelFlow("m").input("x", (8,)).stage(Homogeneous("a", -1).to_flow_stage(build)).build()
