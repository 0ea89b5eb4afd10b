"""Self-attention with its projections, as most families have it; and activations as stages."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.control import KvCacheContract
from rlx_jax.blocks.linear import module_of
from rlx_jax.blocks.positions import check_tables, positions_of, registers
from rlx_jax.errors import GraphError, WeightShapeError, quote, shown
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.param import Parts, Role
from rlx_jax.ir.types import DimLike, TensorType, is_static
from rlx_jax.trace.attention import Rotary, Window
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart, stored_key

__all__ = ["Activation", "SelfAttention"]

# Keys of q, k and v.
Three = tuple[WeightKey, WeightKey, WeightKey]


@dataclass(frozen=True)
class SelfAttention:
    """`softmax(mask(scale · q kᵀ) + bias) v Wo + bo` with q, k, v = x Wq + bq, x Wk + bk, x Wv + bv: `[B,S,H]` → same.

    Weights are `[out, in]`, or `[in, out]` without `transpose`: q `[N·D, H]`, k and v `[K·D, H]`, `out` `[H, N·D]`.

    Args:
        qkv: their keys, or one key of all three, one behind the other. `qkv_bias` alike, if there is one.
        out: the projection behind; None leaves the context `[B,S,N·D]`. `out_bias`: its bias.
        heads: N. `kv_heads`: K, N by default: it is not read from the weights. `head_dim`: D, by default H / N.
        causal: a token reads those up to its own; else all.
        window: as in `emit.attention`: a distance, or (before, behind).
        mask_input: an input that keeps keys, as `mask` of `emit.attention`; it may be absent. Without a name the mask
            of an `AttnMask` stage before is read, if there is one.
        sinks: the key of a score of each head `[N]` that takes part in the softmax, as in `emit.attention`.
        bias: the name of a registered value (`emit.set_named`) that is added to the scores.
        rope_theta: turn q and k at the tokens' positions, by this base; `n_rot` columns of each head (None
            is all, 0 is none), as `rope_style` says. `rope`: by the RopeTables of that name instead, "" for those
            without a name.
        name: the block path of the whole.
        init: how the matrices are drawn where no source has them, as `emit.param` takes it.

    Raises:
        GraphError: options that contradict. WeightShapeError: a weight of another width than the heads have.
    """

    qkv: str | Three
    out: str | None
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: str | Three | None = None
    out_bias: str | None = None
    transpose: bool = True
    causal: bool = False
    window: Window = None
    mask_input: str | None = None
    bias: str | None = None
    scale: float | None = None
    softcap: float | None = None
    rope_theta: float | None = None
    rope: str | None = None
    n_rot: int | None = None
    rope_style: str = "half"
    name: str = "self_attn"
    sinks: WeightKey | None = None
    init: Init | None = None

    @staticmethod
    def hf(
        prefix: str, heads: int, *, names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj"),
        bias: bool = True, head_dim: int | None = None, causal: bool = False, mask_input: str | None = None,
    ) -> SelfAttention:  # fmt: skip
        """Keys `{prefix}.{name}.weight` and, with `bias`, `.bias`, of q, k, v and out, or of qkv and out."""
        if len(names) not in (2, 4):
            raise GraphError(f"{prefix}: SelfAttention.hf: names are those of q, k, v and out, or of qkv and out")
        *inner, out = (f"{prefix}.{name}.weight" for name in names)
        *biases, out_bias = (f"{prefix}.{name}.bias" if bias else None for name in names)
        return SelfAttention(
            _keys(inner), out, heads, head_dim=head_dim, qkv_bias=_keys([b for b in biases if b]) if bias else None,
            out_bias=out_bias, causal=causal, mask_input=mask_input,
        )  # fmt: skip

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """What it keeps for an input `[B, S, H]`."""
        return KvCacheContract.packed(hidden, self.key_heads * self._width(emit, hidden))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "SelfAttention")
        with emit.scope(self.name):
            check_count(self.key_heads, f"{emit.path}: SelfAttention: kv_heads")
            x = emit.block_input(x)
            width = self._width(emit, x.type)
            q, k, v = self._projections(emit, x, width)
            bias = None if self.bias is None else emit.named(self.bias)
            context = emit.attention(
                q, k, v, heads=self.heads, kv_heads=self.key_heads, causal=self.causal, window=self.window,
                mask=self._mask(emit), bias=bias, scale=self.scale, softcap=self.softcap,
                rope=self._rotary(emit, x, width), sinks=self.sinks,
            )  # fmt: skip
            if self.out is None:
                if self.out_bias is not None:
                    raise GraphError(f"{emit.path}: SelfAttention has out_bias={self.out_bias!r} and no out=")
                return context
            return self._linear(emit, context, self.out, self.out_bias, ("hidden", "heads"), x.type.shape[-1])

    @property
    def key_heads(self) -> int:
        """The number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    # -- the parts ---------------------------------------------------------------------------

    def _width(self, emit: Emit, hidden: TensorType) -> int:
        if self.head_dim is not None:
            return self.head_dim
        size = hidden.shape[-1]
        if not is_static(size) or self.heads < 1 or size % self.heads:
            raise GraphError(f"{emit.path}: SelfAttention: {hidden} is not whole in {self.heads} heads; give head_dim=")
        return int(size) // self.heads

    def _projections(self, emit: Emit, x: FlowValue, width: int) -> tuple[FlowValue, ...]:
        columns = (self.heads * width, *(self.key_heads * width,) * 2)
        one = isinstance(self.qkv, str)
        if self.qkv_bias is not None and isinstance(self.qkv_bias, str) != one:
            what = f"one weight {quote(self.qkv)} has one bias" if one else "three weights have three biases"
            raise GraphError(f"{emit.path}: SelfAttention: {what}, got {shown(self.qkv_bias)}")
        shared = "heads" if self.kv_heads is None or (one and self.key_heads == self.heads) else "kv_heads"
        roles: tuple[Role, ...] = ("heads", shared, shared)
        if one and shared == "kv_heads":  # the axis of the stored weight is several
            roles = (Parts(tuple(zip(columns, ("heads", shared, shared), strict=True))),) * 3
        keys = self._three(self.qkv, columns, 0 if self.transpose else 1)
        biases = (None, None, None) if self.qkv_bias is None else self._three(self.qkv_bias, columns)
        return tuple(
            self._linear(emit, x, key, bias, (role, "hidden"), wide, (name,) if isinstance(key, WeightPart) else ())
            for name, key, bias, role, wide in zip("qkv", keys, biases, roles, columns, strict=True)
        )

    def _three(self, keys: str | Three, columns: tuple[int, ...], axis: int = 0) -> tuple[WeightKey, ...]:
        """Keys of q, k and v: of one that has all three, its parts along an axis."""
        parts = columns if self.key_heads != self.heads else 3
        return WeightPart.split(keys, parts, axis) if isinstance(keys, str) else keys

    def _linear(
        self,
        emit: Emit,
        x: FlowValue,
        key: WeightKey,
        bias: WeightKey | None,
        roles: tuple[Role, Role],
        columns: DimLike,
        inner: tuple[str, ...] = (),
    ) -> FlowValue:
        """A product with a stored weight, `columns` wide; `roles` are those of `[out, in]`. `inner` is its block inside
        of that of the weight, where it is one of several that are stored as one: `c_attn.q`."""
        with emit.scope(module_of(stored_key(key)), *inner):
            stored = roles if self.transpose else roles[::-1]
            try:
                return emit.linear(
                    x, key, bias, transpose=self.transpose, roles=stored, columns=columns, init=self.init
                )  # fmt: skip
            except WeightShapeError as error:
                raise WeightShapeError(f"{error}{self._heads_text(emit, key, x, columns)}") from error

    def _heads_text(self, emit: Emit, key: WeightKey, x: FlowValue, columns: DimLike) -> str:
        """What to say of a weight of another width than the heads have, and of one as wide as fewer key heads are.
        They are not guessed from it: of another number of heads, and so another width of each, it would be as many as
        fit, and the numbers others."""
        if key == self.out:
            return ""
        width = self._width(emit, x.type)
        text = f"; {columns} columns for {self.heads} query and {self.key_heads} key heads of {width}"
        if self.kv_heads is not None or isinstance(self.qkv, str) or key not in self.qkv[1:] or emit.weights is None:
            return text
        stored = emit.weights.spec(stored_key(key)).shape[0 if self.transpose else -1]
        kv, rest = divmod(stored // (key.count if isinstance(key, WeightPart) else 1), width)
        return text if rest or not kv or self.heads % kv else f"{text}; of fewer key heads say so: kv_heads={kv}"

    def _mask(self, emit: Emit) -> FlowValue | None:
        if self.mask_input is not None:
            return emit.optional_input(self.mask_input)
        return emit.state.named.get("attn_mask")

    def _rotary(self, emit: Emit, x: FlowValue, width: int) -> Rotary[FlowValue] | None:
        if self.rope_theta is not None and self.rope is not None:
            raise GraphError(f"{emit.path}: SelfAttention: rope_theta makes tables, rope={self.rope!r} names some; one")
        if self.n_rot == 0:
            return None
        if self.rope_theta is not None:
            with emit.scope("rotary_emb"):
                at = positions_of(emit, x)
                return emit.rotary(
                    at, head_dim=width, theta=self.rope_theta, n_rot=self.n_rot, style=self.rope_style
                )  # fmt: skip
        if self.rope is None:
            if self.n_rot is not None or self.rope_style != "half":
                raise GraphError(f"{emit.path}: SelfAttention: n_rot and rope_style go with rope_theta or rope")
            return None
        if self.rope:
            cos, sin = (emit.named(register) for register in registers(self.rope))
        elif emit.state.rope_cos is not None and emit.state.rope_sin is not None:
            cos, sin = emit.state.rope_cos, emit.state.rope_sin
            check_tables(emit, cos, width)
        else:
            raise GraphError(f'{emit.path}: SelfAttention: rope="" reads a RopeTables stage, and none ran before')
        return Rotary(cos, sin, width if self.n_rot is None else self.n_rot, self.rope_style)


def head_width(where: str, hidden_size: int, num_heads: int) -> int:
    """Hidden / heads."""
    if num_heads < 1 or hidden_size % num_heads:
        raise GraphError(f"{where}: hidden size {hidden_size} is not a multiple of {num_heads} heads")
    return hidden_size // num_heads


def _keys(keys: list[str]) -> str | Three:
    """One key, or those of q, k and v."""
    if len(keys) == 1:
        return keys[0]
    q, k, v = keys
    return q, k, v


@dataclass(frozen=True)
class Activation:
    """A function of each element, by its name in `UNARY`: relu, gelu, gelu_tanh, silu …"""

    kind: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        return emit.add_node(Unary(self.kind), emit.require(value, f"Activation({self.kind})"))
