"""`LlamaDecoderBlock` and its stages: operands, every kind of mask, grouped heads, biases; fused = composed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.blocks import (
    BlockStage,
    LlamaDecoder,
    LlamaDecoderSpec,
    MaskKind,
    RopeTables,
    llama_prefill_layer_composed,
    llama_prefill_layer_fused,
)
from rlx_jax.errors import GraphError, ShapeError, UnboundInputError
from rlx_jax.ir.graph import TypeCache
from rlx_jax.ir.hir import LlamaDecoderBlock
from rlx_jax.ir.types import TensorType, tensor_type

HIDDEN, FFN, DIM = 12, 20, 4
BATCH, SEQ = 2, 5
THETA = 10000.0
Weights = dict[str, np.ndarray]

MASKS = {
    "none": MaskKind.NONE,
    "causal": MaskKind.CAUSAL,
    "sliding_window": MaskKind.sliding_window(2),
    "custom": MaskKind.CUSTOM,
    "bias": MaskKind.BIAS,
}


# -- the reference -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer, its weights, and what the layer means."""

    heads: int
    kv_heads: int
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden: int = HIDDEN
    dim: int = DIM
    index: int = 0

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.index}"

    def spec(self, mask: MaskKind | str = "causal", eps: float = 1e-5) -> LlamaDecoderSpec:
        """The spec of the stages."""
        return LlamaDecoderSpec(
            num_heads=self.heads, head_dim=self.dim, num_kv_heads=self.kv_heads, eps=eps, mask=mask,
            attention_bias=self.attention_bias, mlp_bias=self.mlp_bias,
        )  # fmt: skip

    def weights(self, seed: int = 0) -> Weights:
        """Random weights under Hugging Face's keys."""
        rng = np.random.default_rng(seed)
        q, kv, h = self.heads * self.dim, self.kv_heads * self.dim, self.hidden
        attn = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        mlp = {"gate": (FFN, h), "up": (FFN, h), "down": (h, FFN)}
        out: Weights = {}
        for part, shapes, bias in (("self_attn", attn, self.attention_bias), ("mlp", mlp, self.mlp_bias)):
            for name, shape in shapes.items():
                key = f"{self.prefix}.{part}.{name}_proj"
                out[f"{key}.weight"] = rng.standard_normal(shape) / math.sqrt(shape[1])
                if bias:
                    out[f"{key}.bias"] = rng.standard_normal(shape[0]) / 3
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{self.prefix}.{name}.weight"] = 1 + rng.standard_normal(h) / 4
        return {key: value.astype(np.float32) for key, value in out.items()}

    def reference(self, weights: Weights, x: np.ndarray, mask: MaskKind, given: Any = None) -> np.ndarray:
        """h = x + attn(rms(x)) Wo, y = h + (silu(rms(h) Wg) ⊙ rms(h) Wu) Wd, in float64."""
        w = {key.removeprefix(f"{self.prefix}."): value.astype(np.float64) for key, value in weights.items()}

        def linear(name: str, x: np.ndarray) -> np.ndarray:
            return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

        def rms(name: str, x: np.ndarray) -> np.ndarray:
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

        x = x.astype(np.float64)
        a = rms("input_layernorm", x)
        q, k, v = (linear(f"self_attn.{n}_proj", a) for n in "qkv")
        h = x + linear("self_attn.o_proj", self._attend(rotate(q, self.dim), rotate(k, self.dim), v, mask, given))
        m = rms("post_attention_layernorm", h)
        gate = linear("mlp.gate_proj", m)
        return h + linear("mlp.down_proj", gate / (1 + np.exp(-gate)) * linear("mlp.up_proj", m))

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: MaskKind, given: Any) -> np.ndarray:
        out = np.zeros(q.shape)
        seq = q.shape[1]
        ahead = np.arange(seq)[None] - np.arange(seq)[:, None]  # key − query
        for b in range(len(q)):
            for n in range(self.heads):
                here = slice(n * self.dim, (n + 1) * self.dim)
                shared = n // (self.heads // self.kv_heads)
                there = slice(shared * self.dim, (shared + 1) * self.dim)
                scores = q[b, :, here] @ k[b, :, there].T / math.sqrt(self.dim)
                if mask.kind == "bias":
                    scores = scores + given[b, n]
                if mask.kind in ("causal", "sliding_window", "custom"):  # a keep mask is AND-ed with causality
                    scores = np.where(ahead <= 0, scores, -np.inf)
                if mask.window is not None:
                    scores = np.where(ahead > -mask.window, scores, -np.inf)
                if mask.kind == "custom":
                    scores = np.where(given[b][None] >= 0.5, scores, -np.inf)
                top = scores.max(-1, keepdims=True)
                e = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
                total = e.sum(-1, keepdims=True)
                out[b, :, here] = e / np.where(total == 0, 1.0, total) @ v[b, :, there]
        return out


def rotate(x: np.ndarray, dim: int, theta: float = THETA) -> np.ndarray:
    """Half-split rotary embedding of packed heads, position t at row t."""
    half = dim // 2
    angles = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    c, s = np.cos(angles), np.sin(angles)
    wide = x.reshape(*x.shape[:2], -1, dim)
    first, second = wide[..., :half], wide[..., half:]
    return np.concatenate([first * c - second * s, second * c + first * s], -1).reshape(x.shape)


def inputs_for(layer: Layer, mask: MaskKind, seed: int = 1) -> tuple[np.ndarray, Any]:
    """A random `[B,S,H]`, and the mask operand where the kind takes one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, SEQ, layer.hidden)).astype(np.float32)
    if mask.kind == "custom":
        return x, np.array([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1]], np.int32)
    if mask.kind == "bias":
        bias = rng.standard_normal((BATCH, layer.heads, SEQ, SEQ)).astype(np.float32)
        bias[:, :, 1, 3] = -np.inf
        bias[0, 0, 2] = -np.inf  # a row that may read nothing
        return x, bias
    return x, None


def compiled(
    stages: Sequence[BlockStage], weights: Weights, layer: Layer, mask: MaskKind, policy: str, merge: bool = False
) -> Any:
    """A model of `stages` over `x`, with an input `mask` where the kind takes one."""
    flow = rlx.ModelFlow("layer").input("x", ("batch", "seq", layer.hidden))
    if mask.kind == "custom":
        flow = flow.input("mask", ("batch", "seq"), dtype="int32")
    if mask.kind == "bias":
        flow = flow.input("mask", ("batch", layer.heads, "seq", "seq"))
    profile = rlx.CompileProfile().replace(fusion={"policy": policy}, backend={"cpu": {"merge": merge}})
    return rlx.compile(flow.stage(*stages), weights, profile=profile)


def call(model: Any, x: np.ndarray, given: Any) -> np.ndarray:
    """The output as NumPy."""
    return np.asarray(model(x) if given is None else model(x, given))


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = 3e-6) -> None:
    """Within `tolerance` of the reference's largest entry."""
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


# -- operands ----------------------------------------------------------------------------------


def operand_types(block: LlamaDecoderBlock, mask: str = "") -> list[TensorType]:
    """The 14 operands in the order of the spec, weights `[in, out]`, then the mask."""
    h, q, kv = HIDDEN, block.heads * block.head_dim, block.kv_heads * block.head_dim
    x = ("batch", "seq", h)
    table = (1, "seq", block.head_dim // 2)
    shapes: list[tuple[Any, ...]] = [
        x, (h,), (h,), (h, q), (h, kv), (h, kv), (q, h), (h,), (h,), (h, FFN), (h, FFN), (FFN, h), table, table,
    ]  # fmt: skip
    if mask == "custom":
        shapes.append(("batch", "seq"))
    if mask == "bias":
        shapes.append(("batch", block.heads, "seq", "seq"))
    return [tensor_type(shape, "f32", "operand") for shape in shapes]


def block_of(mask: str, heads: int = 4, kv_heads: int = 2, **kwargs: Any) -> LlamaDecoderBlock:
    """A block with the mask called `mask`."""
    return LlamaDecoderBlock(heads, DIM, kv_heads, 1e-5, MASKS[mask], **kwargs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_14_operands_or_15_with_a_mask(mask: str, kv_heads: int) -> None:
    """The result has the type of x."""
    block = block_of(mask, kv_heads=kv_heads)
    types = operand_types(block, mask)
    assert len(types) == (15 if mask in ("custom", "bias") else 14)
    assert TypeCache().infer(block, tuple(types)) == (types[0],)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("got", [0, 1, 13, 14, 15, 16])
def test_any_other_count_is_an_arity_error(mask: str, got: int) -> None:
    """Which names the op, the number expected and the number got."""
    block = block_of(mask)
    expected = 15 if mask in ("custom", "bias") else 14
    if got == expected:
        return
    types = operand_types(block, mask)
    given = (types + types[-1:] * 16)[:got]
    with pytest.raises(GraphError) as caught:
        TypeCache().infer(block, tuple(given))
    message = str(caught.value)
    assert "llama_decoder_block" in message
    assert re.findall(r"\d+", message)[:2] == [str(expected), str(got)]


def test_biases_are_named_operands_after_these() -> None:
    """In the order of `biases`, after the mask; unknown names are errors."""
    names = ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias")
    widths = dict(zip(names, (16, 8, 8, HIDDEN, FFN, FFN, HIDDEN), strict=True))
    for mask in ("causal", "custom"):
        for biases in (names[:3], names[4:], names, ("down_bias", "q_bias")):
            block = block_of(mask, biases=biases)
            types = operand_types(block, mask)
            rest = [tensor_type((widths[n],), "f32", n) for n in biases]
            assert TypeCache().infer(block, (*types, *rest)) == (types[0],)
            with pytest.raises(GraphError, match="llama_decoder_block"):
                TypeCache().infer(block, (*types, *rest[:-1]))
    with pytest.raises(GraphError, match="z_bias"):
        TypeCache().infer(block_of("causal", biases=("z_bias",)), (*operand_types(block_of("causal")), rest[0]))


def test_heads_are_a_multiple_of_key_heads() -> None:
    """An error from the block, from the stage and from the composed layer."""
    block = block_of("causal", heads=4, kv_heads=3)
    with pytest.raises(GraphError, match=r"4.*3"):
        TypeCache().infer(block, tuple(operand_types(block)))
    layer = Layer(4, 3)
    for make in (llama_prefill_layer_fused, llama_prefill_layer_composed):
        with pytest.raises(GraphError, match=r"4.*3"):
            compiled([make(0, layer.spec())], layer.weights(), layer, MaskKind.CAUSAL, "direct")


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12])
def test_a_wrong_operand_is_a_shape_error(number: int) -> None:
    """Each operand with one more on its last axis."""
    block = block_of("causal")
    types = operand_types(block)
    t = types[number]
    types[number] = TensorType((*t.shape[:-1], t.shape[-1] + 1), t.dtype)
    with pytest.raises(ShapeError):
        TypeCache().infer(block, tuple(types))


@pytest.mark.parametrize("contract", [0, 1])
def test_weights_in_either_orientation(contract: int) -> None:
    """`[in, out]`, or the checkpoint's `[out, in]`."""
    block = block_of("causal", contract=contract)
    types = operand_types(block)
    weights = (3, 4, 5, 6, 9, 10, 11)
    if contract:
        types = [TensorType(t.shape[::-1], t.dtype) if i in weights else t for i, t in enumerate(types)]
    assert TypeCache().infer(block, tuple(types)) == (types[0],)


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["plain", "grouped"])
@pytest.mark.parametrize("mask", MASKS)
def test_each_mask_kind(mask: str, kv_heads: int, policy: str) -> None:
    """The fused stage against the formulas."""
    layer, kind = Layer(4, kv_heads), MASKS[mask]
    weights, (x, given) = layer.weights(), inputs_for(layer, kind)
    stage = LlamaDecoder.layer(0, layer.spec(kind), mask_input="mask" if kind.operand else None)
    got = call(compiled([stage], weights, layer, kind, policy), x, given)
    assert_close(got, layer.reference(weights, x, kind, given))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "custom"])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(4, 2, attention_bias=True),
        Layer(4, 1, mlp_bias=True),
        Layer(2, 2, attention_bias=True, mlp_bias=True),
        Layer(3, 1, hidden=8, dim=6),  # a head width that is not hidden / heads
    ],
    ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.attention_bias:d}{s.mlp_bias:d}",
)
@pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
def test_biases_and_widths(layer: Layer, mask: str, merge: bool) -> None:
    """Against the formulas, with projections merged and not."""
    kind = MASKS[mask]
    weights, (x, given) = layer.weights(3), inputs_for(layer, kind)
    stage = LlamaDecoder.layer(0, layer.spec(kind), mask_input="mask" if kind.operand else None)
    got = call(compiled([stage], weights, layer, kind, "direct", merge), x, given)
    assert_close(got, layer.reference(weights, x, kind, given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "policy"), [*((mask, "fusable") for mask in MASKS), ("causal", "direct"), ("bias", "direct")]
)
def test_fused_is_composed(mask: str, policy: str) -> None:
    """From one checkpoint, equal bits under `fusable`, within 2e-6 under `direct`; composed keeps the mask."""
    layer, kind = Layer(4, 2, attention_bias=True, mlp_bias=True), MASKS[mask]
    weights, (x, given) = layer.weights(4), inputs_for(layer, kind)
    name = "mask" if kind.operand else None
    fused = llama_prefill_layer_fused(0, layer.spec(kind), mask_input=name)
    composed = llama_prefill_layer_composed(0, layer.spec(kind), mask_input=name)
    tables = RopeTables.theta(DIM, THETA)
    one, other = (call(compiled([tables, s], weights, layer, kind, policy), x, given) for s in (fused, composed))
    if policy == "fusable":
        np.testing.assert_array_equal(one, other)
    assert_close(one, other.astype(np.float64), 2e-6)
    assert_close(one, layer.reference(weights, x, kind, given))


def test_policies_agree() -> None:
    """`direct` groups the queries, `fusable` repeats the keys: the same numbers, another program."""
    layer = Layer(4, 1)
    weights, (x, _) = layer.weights(5), inputs_for(layer, MaskKind.CAUSAL)
    models = [
        compiled([LlamaDecoder.layer(0, layer.spec())], weights, layer, MaskKind.CAUSAL, p)
        for p in ("direct", "fusable")
    ]
    one, other = (call(m, x, None) for m in models)
    assert_close(one, other.astype(np.float64), 2e-6)
    texts = [m.text("mir") for m in models]
    assert "repeat_heads" in texts[1] and "repeat_heads" not in texts[0]


def test_fused_is_one_block_and_composed_is_many() -> None:
    """The summary of HIR says which."""
    layer = Layer(4, 2)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", HIDDEN)).rope_tables(RopeTables.theta(DIM))
    fused = rlx.compile(flow.llama_prefill_layer(0, layer.spec()), layer.weights()).text("hir")
    composed = rlx.compile(flow.llama_prefill_layer_composed(0, layer.spec()), layer.weights()).text("hir")
    assert "llama_decoder_block(heads=4, dim=4, kv=2" in fused and "LlamaDecoderBlock=1" in fused
    assert "llama_decoder_block" not in composed and "Attention=1" in composed


def test_epsilon_and_theta_are_read() -> None:
    """The spec's `eps` reaches both norms, and `rope_theta` counts where no tables were made."""
    layer = Layer(4, 2)
    weights, (x, _) = layer.weights(6), inputs_for(layer, MaskKind.CAUSAL)
    base = LlamaDecoder.layer(0, layer.spec())
    plain = call(compiled([base], weights, layer, MaskKind.CAUSAL, "direct"), x, None)
    for other in (
        replace(base, spec=layer.spec(eps=0.5)),
        replace(base, spec=replace(layer.spec(), rope_theta=7.0)),
    ):
        got = call(compiled([other], weights, layer, MaskKind.CAUSAL, "direct"), x, None)
        assert np.abs(got - plain).max() > 1e-3
    tables = compiled([RopeTables.theta(DIM, 7.0), base], weights, layer, MaskKind.CAUSAL, "direct")
    np.testing.assert_allclose(call(tables, x, None), got, atol=2e-6)


def test_two_layers_and_zero_beta() -> None:
    """Layers in a row, with the ZeroBeta stage that older flows declare; its zeros are no parameter."""
    first, second = Layer(4, 2), Layer(4, 2, index=1)
    weights = first.weights(7) | second.weights(8)
    x, _ = inputs_for(first, MaskKind.CAUSAL)
    flow = (
        rlx.ModelFlow("two").input("x", ("batch", "seq", HIDDEN))
        .zero_beta(HIDDEN).rope_tables(RopeTables.theta(DIM, THETA))
        .llama_prefill_layer(0, first.spec()).llama_decoder_layer(1, second.spec())
    )  # fmt: skip
    model: Any = rlx.compile(flow, weights)
    want = second.reference(second.weights(8), first.reference(first.weights(7), x, MaskKind.CAUSAL), MaskKind.CAUSAL)
    assert_close(np.asarray(model(x)), want)
    assert set(model.params) == set(weights)


# -- errors of the stage -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["custom", "bias"])
@pytest.mark.parametrize("make", [llama_prefill_layer_fused, llama_prefill_layer_composed])
def test_a_mask_kind_with_an_operand_needs_mask_input(mask: str, make: Any) -> None:
    """The message says which argument to give."""
    layer = Layer(4, 2)
    stages = [RopeTables.theta(DIM), make(0, layer.spec(MASKS[mask]))]
    with pytest.raises(GraphError, match="mask_input"):
        compiled(stages, layer.weights(), layer, MASKS[mask], "direct")


def test_a_mask_input_that_nothing_reads_is_refused() -> None:
    """A causal layer takes no operand."""
    layer = Layer(4, 2)
    with pytest.raises(GraphError, match="mask_input"):
        compiled([LlamaDecoder.layer(0, layer.spec(), "mask")], layer.weights(), layer, MaskKind.CAUSAL, "direct")


def test_an_undeclared_mask_input_is_named() -> None:
    """With a suggestion."""
    layer = Layer(4, 2)
    stage = LlamaDecoder.layer(0, layer.spec("custom"), "maks")
    with pytest.raises(UnboundInputError, match=r"maks.*mask"):
        compiled([stage], layer.weights(), layer, MaskKind.CUSTOM, "direct")


@pytest.mark.parametrize("shape", [("batch", "seq", 1), ("batch", SEQ + 1), (3, "seq")])
def test_a_mask_of_the_wrong_shape_is_refused(shape: tuple[Any, ...]) -> None:
    """Before anything runs."""
    layer = Layer(4, 2)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", HIDDEN)).input("mask", shape)
    with pytest.raises(ShapeError, match="mask"):
        rlx.compile(flow.stage(LlamaDecoder.layer(0, layer.spec("custom"), "mask")), layer.weights())


def test_hidden_shape_is_checked() -> None:
    """Where the spec gives it."""
    layer = Layer(4, 2)
    good = replace(layer.spec(), hidden_shape=("batch", "seq", HIDDEN))
    compiled([LlamaDecoder.layer(0, good)], layer.weights(), layer, MaskKind.CAUSAL, "direct")
    bad = replace(layer.spec(), hidden_shape=("batch", "seq", HIDDEN + 1))
    with pytest.raises(ShapeError, match="LlamaDecoder"):
        compiled([LlamaDecoder.layer(0, bad)], layer.weights(), layer, MaskKind.CAUSAL, "direct")


@pytest.mark.parametrize("mask", ["sliding:0", "slid", "window", "", "causal:3"])
def test_unknown_mask_kinds_are_refused(mask: str) -> None:
    """By name."""
    layer = Layer(4, 2)
    with pytest.raises(GraphError):
        compiled([LlamaDecoder.layer(0, layer.spec(mask))], layer.weights(), layer, MaskKind.CAUSAL, "direct")


def test_mask_kinds_by_text() -> None:
    """`sliding:2` is `MaskKind.sliding_window(2)`."""
    layer = Layer(4, 2)
    weights, (x, _) = layer.weights(), inputs_for(layer, MaskKind.CAUSAL)
    one, other = (
        call(compiled([LlamaDecoder.layer(0, layer.spec(m))], weights, layer, MaskKind.CAUSAL, "direct"), x, None)
        for m in ("sliding:2", MaskKind.sliding_window(2))
    )
    np.testing.assert_array_equal(one, other)
