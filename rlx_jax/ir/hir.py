"""HIR: the blocks that stages write. `expand` is a block's meaning, its shape rule and its `fusable` lowering.

Whatever depends on the sequence is one of these blocks, so that `derive` has one rule for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from rlx_jax.errors import ArityError, GraphError, ShapeError, did_you_mean, quote
from rlx_jax.ir.graph import Builder, Hir, Origin, Value, constant
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep, RopeOp, RopeTable, check_heads
from rlx_jax.ir.ops.contract import LayerNormOp, MatMul, RmsNormOp
from rlx_jax.ir.ops.pointwise import UNARY, Binary, CastTo, Unary
from rlx_jax.ir.ops.shaping import Gather, Iota, Narrow, RepeatHeads, Reshape, Slice, TakeRow, merge_axes, split_axis
from rlx_jax.ir.types import DimLike, TensorType, symbol


def check_arity(op: str, got: int, *expected: int) -> None:
    """Raise `ArityError` with op, expected, got."""
    if got not in expected:
        raise ArityError(op, " or ".join(map(str, expected)), got)


# -- masks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskKind:
    """Which keys a query reads: `MaskKind.NONE`, `.CAUSAL`, `.sliding_window(w)`, `.CUSTOM` (a keep mask), `.BIAS`."""

    kind: str
    window: int | None = None
    NONE: ClassVar[MaskKind]
    CAUSAL: ClassVar[MaskKind]
    CUSTOM: ClassVar[MaskKind]
    BIAS: ClassVar[MaskKind]

    @staticmethod
    def sliding_window(window: int) -> MaskKind:
        """Causal, and only the last `window` keys, the query's own included."""
        if window < 1:
            raise GraphError(f"a sliding window keeps at least 1 key, got {window}")
        return MaskKind("sliding_window", window)

    @property
    def operand(self) -> str:
        """The extra operand: `keep`, `bias` or none."""
        return {"custom": "keep", "bias": "bias"}.get(self.kind, "")

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


MASK_KINDS = {kind: MaskKind(kind) for kind in ("none", "causal", "custom", "bias")}
MaskKind.NONE, MaskKind.CAUSAL = MASK_KINDS["none"], MASK_KINDS["causal"]
MaskKind.CUSTOM, MaskKind.BIAS = MASK_KINDS["custom"], MASK_KINDS["bias"]


def mask_kind(mask: MaskKind | str) -> MaskKind:
    """A `MaskKind` from itself or from text: "none", "causal", "custom", "bias", "sliding:4".

    >>> str(mask_kind("sliding:4"))
    'sliding_window(4)'
    """
    if isinstance(mask, MaskKind):
        return mask
    name, _, window = str(mask).lower().partition(":")
    if name in ("sliding", "sliding_window", "slidingwindow") and window.isdigit():
        return MaskKind.sliding_window(int(window))
    if name not in MASK_KINDS or window:
        raise GraphError(f"unknown mask kind {quote(mask)}{did_you_mean(name, [*MASK_KINDS, 'sliding:N'])}")
    return MASK_KINDS[name]


# -- token-wise blocks -------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear(Hir):
    """`act(x · w [+ b])`. x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]` (`contract=1`); b `[out]`."""

    contract: int = 0
    bias: bool = False
    activation: str = ""
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        check_arity("linear", len(operands), 3 if self.bias else 2)
        if self.activation and self.activation not in UNARY:
            raise GraphError(f"linear: unknown activation {quote(self.activation)}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, w = operands[:2]
        y = b(MatMul(self.contract, f32_result=self.f32_result), x, w)
        y = b(Binary("add"), y, operands[2]) if self.bias else y
        return b(Unary(self.activation), y) if self.activation else y

    def text(self) -> str:
        act = f"+{self.activation}" if self.activation else ""
        return f"linear{'[+bias]' if self.bias else ''}{act}"


@dataclass(frozen=True)
class Split(Hir):
    """Cut the last axis into consecutive `sizes`: what is left of several Linears that were merged."""

    sizes: tuple[int, ...]

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        rank = b.type(operands[0]).rank
        return tuple(
            b(Narrow(rank - 1, start, size), operands[0]) for start, size in zip(starts, self.sizes, strict=True)
        )


@dataclass(frozen=True)
class GatedFfn(Hir):
    """`act(gate) ⊙ up`: the middle of SwiGLU (silu) and GeGLU (gelu_tanh). gate and up `[…, F]`."""

    activation: str = "silu"

    def check(self, *operands: TensorType) -> None:
        check_arity("gated_ffn", len(operands), 2)

    def expand(self, b: Builder, *operands: Value) -> Value:
        gate, up = operands
        return b(Binary("mul"), b(Unary(self.activation), gate), up)


@dataclass(frozen=True)
class RmsNorm(Hir):
    """`x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]`. x `[…, H]`, γ and β `[H]`; the offset is 1 in Gemma."""

    eps: float
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_arity("rms_norm", len(operands), 2, 3)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RmsNormOp(self.eps, self.offset), *operands)


@dataclass(frozen=True)
class LayerNorm(Hir):
    """`(x − mean x)(var x + ε)^(−1/2) ⊙ γ + β`. x `[…, H]`, γ and β `[H]`."""

    eps: float

    def check(self, *operands: TensorType) -> None:
        check_arity("layer_norm", len(operands), 3)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(LayerNormOp(self.eps), *operands)


@dataclass(frozen=True)
class Embed(Hir):
    """`E[ids]`: E `[V, H]`, ids `[…]` integers in `[0, V)` → `[…, H]`."""

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Gather(), *operands)


# -- blocks that know the sequence -------------------------------------------------------------


@dataclass(frozen=True)
class Positions(Hir):
    """The absolute position of each token of `x` `[B, S, …]`: int32 `[1, S]`, 0 … S−1 in the forward program.

    With a second operand `past` `[B, P, …]` the tokens stand behind those: P … P+S−1.
    """

    def check(self, *operands: TensorType) -> None:
        check_arity("positions", len(operands), 1, 2)

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, *past = operands
        steps = b(Reshape((1, -1)), b(Iota(1), x))
        if not past:
            return steps
        last = b(Narrow(0, -1, 1), b(Iota(1), past[0]))
        start = b(Binary("add"), last, b.scalar(1, last))
        return b(Binary("add"), b(Reshape((1, 1)), start), steps)


@dataclass(frozen=True)
class RopeAngles(Hir):
    """cos and sin for positions `[B|1, S]`: two f32 `[B|1, S, R/2]`. See `RopeTable`."""

    inv_freq: tuple[float, ...]
    factor: float = 1.0

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return b.add(RopeTable(self.inv_freq, self.factor), *operands)

    def text(self) -> str:
        return f"rope_angles(n_rot={2 * len(self.inv_freq)})"


@dataclass(frozen=True)
class RopeRows(Hir):
    """Rows of given f32 tables `[T, W]` at positions `[B|1, S]`: cos and sin `[B|1, S, W]`."""

    width: int
    cos: bytes
    sin: bytes

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        tables = (np.frombuffer(data, np.float32).reshape(-1, self.width) for data in (self.cos, self.sin))
        cos, sin = (b(Gather(), b.leaf(constant(table, np.float32)), *operands) for table in tables)
        return cos, sin

    @property
    def rows(self) -> int:
        """Positions the tables know."""
        return len(self.cos) // (4 * self.width)

    def text(self) -> str:
        return f"rope_rows({self.rows} positions, width={self.width})"


@dataclass(frozen=True)
class Rope(Hir):
    """Rotary embedding of packed heads. x `[B,S,N·D]`, cos and sin `[B|1,S,R/2]`. See `RopeOp`."""

    head_dim: int
    n_rot: int

    def check(self, *operands: TensorType) -> None:
        check_arity("rope", len(operands), 3)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RopeOp(self.head_dim, self.n_rot), *operands)


@dataclass(frozen=True)
class Attention(Hir):
    """Attention over packed heads: q `[B,S,N·D]`, k and v `[B,T,K·D]`, then `keep` and `bias` as in `extra`.

    `expand` repeats each key/value head N/K times; the `direct` rule groups the queries instead.
    With `last` q is `[B,1,N·D]`, the query of the last token, whose row alone is wanted (written by `derive`).
    """

    heads: int
    kv_heads: int
    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    extra: tuple[str, ...] = ()
    last: bool = False

    def check(self, *operands: TensorType) -> None:
        check_arity("attention", len(operands), 3 + len(self.extra))
        check_heads(self.heads, self.kv_heads)

    def op(self, kv_heads: int, extra: tuple[str, ...] = ()) -> AttentionOp:
        """The MIR op over `kv_heads` heads."""
        return AttentionOp(self.heads, kv_heads, self.causal, self.window, self.scale, self.softcap, self.extra + extra)

    def expand(self, b: Builder, *operands: Value) -> Value:
        q, k, v, *rest = operands
        times = self.heads // self.kv_heads
        if times > 1:
            k, v = (b(RepeatHeads(self.kv_heads, times), x) for x in (k, v))
        return b(self.op(self.heads), q, k, v, *rest)


def attention(
    heads: int,
    kv_heads: int,
    mask: MaskKind,
    causal_keep: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Attention:
    """`Attention` for a mask kind. A keep mask is AND-ed with causality where the block is causal (`causal_keep`)."""
    causal = mask.kind in ("causal", "sliding_window") or (mask.kind == "custom" and causal_keep)
    extra = (mask.operand,) if mask.operand else ()
    return Attention(heads, kv_heads, causal, mask.window, scale, softcap, extra)


def cache_slots(window: int | None) -> DimLike:
    """The dimension that counts the slots of a cache: `context`, or that of a ring for a window."""
    return symbol("context" if window is None else f"context_{window}")


@dataclass(frozen=True)
class CachedAttention(Hir):
    """Attention over a cache that this call extends (written by `derive`, never by a stage).

    Operands: q `[B,S,N·D]`, k and v `[B,S,K·D]`, the key and value caches `[B,T,K,D]`, start `[B]`
    (tokens already in the cache) and lengths `[B]` (new valid tokens). The caches may have a dtype of their own.
    Results: the context, and both caches with the new rows written at `start`.
    With `block_only` the cache is empty before the call, so attention stays inside the block.
    With `ring` the cache holds the last T tokens only, T at least the window (see `RingStep`).
    Where `attend.last`, q is `[B,1,N·D]`, the query of each row's last valid token.
    """

    attend: Attention
    block_only: bool = False
    ring: bool = False

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return self.grouped(b, self.attend.heads // self.attend.kv_heads, *operands)

    def grouped(self, b: Builder, times: int, *operands: Value) -> tuple[Value, ...]:
        """The block with keys and values repeated `times` times before attention."""
        q, k, v, cache_k, cache_v, start, lengths = operands
        kv_heads = self.attend.kv_heads
        split = split_axis(3, 2, (kv_heads, -1))
        new_k, new_v = (_as_dtype(b, b(split, x), b.type(cache_k).dtype) for x in (k, v))
        extra: tuple[str, ...] = ()
        rows: tuple[Value, ...] = ()
        if self.ring:
            keys, at, cache_k = b.add(RingStep(), cache_k, new_k, start, lengths)
            values, _, cache_v = b.add(RingStep(), cache_v, new_v, start, lengths)
            extra, rows = ("key_positions",), (at,)
        else:
            update = CacheUpdate(fresh=self.block_only)
            keys = cache_k = b(update, cache_k, new_k, start, lengths)
            values = cache_v = b(update, cache_v, new_v, start, lengths)
        if self.block_only:
            extra, rows = (), ()
        else:
            k, v = (_as_dtype(b, b(merge_axes(4, 2), x), b.type(q).dtype) for x in (keys, values))
        if self.attend.last or not self.block_only:
            extra, rows = ("positions", *extra), (self._positions(b, q, start, lengths), *rows)
        if times > 1:
            k, v = (b(RepeatHeads(kv_heads, times), x) for x in (k, v))
        return b(self.attend.op(kv_heads * times, extra), q, k, v, *rows), cache_k, cache_v

    def _positions(self, b: Builder, q: Value, start: Value, lengths: Value) -> Value:
        """Where the queries stand among the keys, `[B,S]`. That of a row without new tokens reads something all the
        same."""
        if not self.attend.last:
            return b(Binary("add"), b(Reshape((-1, 1)), start), b(Reshape((1, -1)), b(Iota(1), q)))
        one = b.scalar(1, lengths)
        behind = b(Binary("sub"), b(Binary("max"), lengths, one), one)
        return b(Reshape((-1, 1)), behind if self.block_only else b(Binary("add"), start, behind))

    def text(self) -> str:
        notes = [", block_only"] * self.block_only + [", ring"] * self.ring
        return f"cached_{self.attend.text()}{''.join(notes)}"


def _as_dtype(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
    return value if b.type(value).dtype == dtype else b(CastTo(dtype), value)


@dataclass(frozen=True)
class LastToken(Hir):
    """The last token of each row: x `[B,S,…]` → `[B,1,…]`; with an index operand `[B]`, row `index[b]`."""

    def expand(self, b: Builder, *operands: Value) -> Value:
        if len(operands) == 2:
            return b(TakeRow(), *operands)
        return b(Narrow(1, -1, 1), operands[0])


@dataclass(frozen=True)
class FirstToken(Hir):
    """The first token, position axis dropped: x `[B,S,H]` → `[B,H]`."""

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Slice(((None, None, None), 0)), operands[0])


# -- composites --------------------------------------------------------------------------------

DECODER_OPERANDS = ("x", "ln1_g", "ln1_b", "q", "k", "v", "o", "ln2_g", "ln2_b", "gate", "up", "down", "cos", "sin")
DECODER_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True)
class LlamaDecoderBlock(Hir):
    """One pre-norm Llama layer (Touvron et al. 2023): h = x + attn(rms(x))·Wo, y = h + swiglu(rms(h)).

    Operands: the 14 of `DECODER_OPERANDS`; `mask` if the mask kind is custom (`[B,T]` keep mask, AND-ed with
    causality) or bias (`[B,N,S,T]`); then one operand for each name in `biases`.
    Weights are `[in, out]` (`contract=0`) or the checkpoint's `[out, in]` (`contract=1`); norms `[H]`.
    """

    heads: int
    head_dim: int
    kv_heads: int
    eps: float
    mask: MaskKind = field(default=MASK_KINDS["causal"])
    contract: int = 0
    biases: tuple[str, ...] = ()

    def check(self, *operands: TensorType) -> None:
        expected = 14 + bool(self.mask.operand)
        if len(operands) != expected + len(self.biases):
            detail = f" (mask {self.mask}{f', biases {list(self.biases)}' if self.biases else ''})"
            raise ArityError("llama_decoder_block", str(expected + len(self.biases)), len(operands), detail)
        unknown = [n for n in self.biases if n not in DECODER_BIASES]
        if unknown:
            raise GraphError(f"llama_decoder_block: unknown biases {unknown}, known are {list(DECODER_BIASES)}")
        check_heads(self.heads, self.kv_heads)
        self._check_weights(dict(zip(DECODER_OPERANDS, operands, strict=False)))

    def _check_weights(self, t: dict[str, TensorType]) -> None:
        hidden, q, kv = t["x"].shape[-1], self.heads * self.head_dim, self.kv_heads * self.head_dim
        ffn = t["gate"].shape[1 - self.contract] if t["gate"].rank == 2 else 0
        want = {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "o": (q, hidden)}
        want |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        for name, shape in want.items():
            shape = shape if self.contract == 0 else shape[::-1]
            if t[name].shape != shape:
                raise ShapeError(
                    f"llama_decoder_block: operand {name} is {t[name]}, expected {list(shape)} "
                    f"for {self.heads}/{self.kv_heads} heads of width {self.head_dim} and x {t['x']}"
                )

    def expand(self, b: Builder, *operands: Value) -> Value:
        v = dict(zip(DECODER_OPERANDS, operands, strict=False))
        extra = operands[14 : 14 + bool(self.mask.operand)]
        bias = dict(zip(self.biases, operands[14 + len(extra) :], strict=True))
        norm = RmsNorm(self.eps)
        origin = b.origin

        def linear(part: str, name: str, x: Value) -> Value:
            with b.at(_inside(origin, part)):
                given = (bias[f"{name}_bias"],) if f"{name}_bias" in bias else ()
                return b(Linear(self.contract, bias=bool(given)), x, v[name], *given)

        with b.at(_inside(origin, "input_layernorm")):
            a = b(norm, v["x"], v["ln1_g"], v["ln1_b"])
        q, k, value = (linear(f"self_attn.{n}_proj", n, a) for n in "qkv")
        with b.at(_inside(origin, "self_attn")):
            rope = Rope(self.head_dim, self.head_dim)
            q, k = b(rope, q, v["cos"], v["sin"]), b(rope, k, v["cos"], v["sin"])
            context = b(attention(self.heads, self.kv_heads, self.mask, causal_keep=True), q, k, value, *extra)
        h = b(Binary("add"), v["x"], linear("self_attn.o_proj", "o", context))
        with b.at(_inside(origin, "post_attention_layernorm")):
            m = b(norm, h, v["ln2_g"], v["ln2_b"])
        gate, up = linear("mlp.gate_proj", "gate", m), linear("mlp.up_proj", "up", m)
        with b.at(_inside(origin, "mlp")):
            f = b(GatedFfn("silu"), gate, up)
        return b(Binary("add"), h, linear("mlp.down_proj", "down", f))

    def text(self) -> str:
        return (
            f"llama_decoder_block(heads={self.heads}, dim={self.head_dim}, kv={self.kv_heads}, "
            f"eps={self.eps:g}, mask={self.mask})"
        )


def _inside(origin: Origin, part: str) -> Origin:
    """The same origin, one block deeper."""
    return replace(origin, path=(*origin.path, *part.split(".")))


COMPOSITES: tuple[type[Hir], ...] = (LlamaDecoderBlock,)
"""Blocks that `expand` into other HIR blocks, before programs are derived."""
