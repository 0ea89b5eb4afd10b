"""SelfAttention, a stage of attention with its projections for most families, and Activation, an elementwise stage."""

from __future__ import annotations

from rlx_jax.blocks.control import KvCacheContract
from rlx_jax.blocks.linear import module_of
from rlx_jax.blocks.positions import check_tables, positions_of, register_names
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, WeightShapeError, check_integer, quote, shown
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.param import Parts, Role
from rlx_jax.ir.types import DimLike, Init, TensorType, is_static
from rlx_jax.trace.attention import Rotary, Window
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart, stored_key

__all__ = ["Activation", "SelfAttention"]

QkvKeys = tuple[WeightKey, WeightKey, WeightKey]
# Keys of their biases; None for no bias.
BiasKeys = tuple[WeightKey | None, WeightKey | None, WeightKey | None]


@dataclass(frozen=True)
class SelfAttention:
    """Self-attention with its projections, `[B,S,H]` → same.

        softmax(mask(scale · q kᵀ) + bias) v Wo + bo        q, k, v = x Wq + bq, x Wk + bk, x Wv + bv

    Weights are `[out, in]`, or `[in, out]` without `transpose`: q `[N·D, H]`, k and v `[K·D, H]`, `out` `[H, N·D]`.

    Args:
        qkv: keys of q, k and v, or one key of a fused weight with all three in this order.
        qkv_bias: keys of their biases, three or one as in `qkv`; None for no biases, or among three for no bias.
        out: key of the output projection; None returns the context `[B,S,N·D]`.
        out_bias: key of its bias.
        heads: N.
        kv_heads: K, by default N. It is never derived from the weights.
        head_dim: D, by default H / N.
        causal: each token attends to itself and earlier tokens only.
        window: as in `emit.attention`: keys at less than this distance, or (number of keys before, number after).
        mask_input: name of an input with a keep mask, as `mask` of `emit.attention`; the input may be absent. By
            default the mask of an earlier `AttnMask` stage applies, if there is one.
        sinks: key of one score per head, `[N]`, that takes part in the softmax, as in `emit.attention`.
        bias: name of a registered value (`emit.set_named`) that is added to the scores.
        rope_theta: rotate q and k at the tokens' positions with this base.
        rope: rotate by the RopeTables of this name instead; "" for RopeTables without a name.
        n_rot: number of columns of each head that are rotated; None is all, 0 is none.
        rope_style: how columns pair up, as in `emit.rotary`.
        name: segment of the block path.
        init: initializer of matrices that no source has, as in `emit.param`.

    Raises:
        GraphError: options contradict each other.
        WeightShapeError: a weight has another width than the heads.
    """

    qkv: str | QkvKeys
    out: str | None
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: str | BiasKeys | None = None
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
        """Return the stage with the keys `{prefix}.{name}.weight` and, with `bias`, `{prefix}.{name}.bias`.

        Args:
            prefix: prefix of the attention's modules.
            heads: number of query heads.
            names: modules of q, k, v and out, or of a fused qkv and out.
            bias: whether all projections have biases.
            head_dim, causal, mask_input: as in `SelfAttention`.

        Raises:
            GraphError: `names` has neither two nor four names.
        """
        if len(names) not in (2, 4):
            raise GraphError(f"{prefix}: SelfAttention.hf: expected names of q, k, v and out, or of qkv and out")
        *inner, out = (f"{prefix}.{name}.weight" for name in names)
        *biases, out_bias = (f"{prefix}.{name}.bias" if bias else None for name in names)
        return SelfAttention(
            _keys(inner), out, heads, head_dim=head_dim, qkv_bias=_keys([b for b in biases if b]) if bias else None,
            out_bias=out_bias, causal=causal, mask_input=mask_input,
        )  # fmt: skip

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the keys and values to cache for an input `[B, S, H]`."""
        return KvCacheContract.packed(hidden, self.key_heads * self._head_dim(emit, hidden))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "SelfAttention")
        with emit.scope(self.name):
            check_integer(f"{emit.path}: SelfAttention: kv_heads", self.key_heads, error_class=GraphError)
            x = emit.block_input(x)
            width = self._head_dim(emit, x.type)
            q, k, v = self._projections(emit, x, width)
            bias = None if self.bias is None else emit.named(self.bias)
            context = emit.attention(
                q, k, v, heads=self.heads, kv_heads=self.key_heads, causal=self.causal, window=self.window,
                mask=self._mask(emit), bias=bias, scale=self.scale, softcap=self.softcap,
                rope=self._rotary(emit, x, width), sinks=self.sinks,
            )  # fmt: skip
            if self.out is None:
                if self.out_bias is not None:
                    raise GraphError(f"{emit.path}: SelfAttention has out_bias={self.out_bias!r} but no out=")
                return context
            return self._linear(emit, context, self.out, self.out_bias, ("hidden", "heads"), x.type.shape[-1])

    @property
    def key_heads(self) -> int:
        """The number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def _head_dim(self, emit: Emit, hidden: TensorType) -> int:
        """Return D, the width of a head.

        Raises:
            GraphError: `head_dim` is not set, and H is symbolic or not a multiple of N.
        """
        if self.head_dim is not None:
            return self.head_dim
        size = hidden.shape[-1]
        if not is_static(size) or self.heads < 1 or size % self.heads:
            raise GraphError(f"{emit.path}: {hidden} does not split into {self.heads} heads; give head_dim=")
        return int(size) // self.heads

    def _projections(self, emit: Emit, x: FlowValue, width: int) -> tuple[FlowValue, ...]:
        """Return q `[B,S,N·D]`, k and v `[B,S,K·D]`, for heads of `width` D."""
        columns = (self.heads * width, *(self.key_heads * width,) * 2)
        is_fused = isinstance(self.qkv, str)
        if self.qkv_bias is not None and isinstance(self.qkv_bias, str) != is_fused:
            expected = f"one weight {quote(self.qkv)} has one bias" if is_fused else "three weights have three biases"
            raise GraphError(f"{emit.path}: SelfAttention: {expected}, got {shown(self.qkv_bias)}")
        # As many key heads as query heads are sharded like them, unless the user declared grouped heads.
        kv_role = "heads" if self.kv_heads is None or (is_fused and self.key_heads == self.heads) else "kv_heads"
        roles: tuple[Role, ...] = ("heads", kv_role, kv_role)
        if is_fused and kv_role == "kv_heads":  # the stored axis has segments with different roles
            roles = (Parts(tuple(zip(columns, ("heads", kv_role, kv_role), strict=True))),) * 3
        keys = self._qkv_keys(self.qkv, columns, 0 if self.transpose else 1)
        biases: tuple[WeightKey | None, ...] = (None, None, None)
        if self.qkv_bias is not None:
            biases = self._qkv_keys(self.qkv_bias, columns) if isinstance(self.qkv_bias, str) else self.qkv_bias
        return tuple(
            self._linear(emit, x, key, bias, (role, "hidden"), size, (name,) if isinstance(key, WeightPart) else ())
            for name, key, bias, role, size in zip("qkv", keys, biases, roles, columns, strict=True)
        )

    def _qkv_keys(self, keys: str | QkvKeys, columns: tuple[int, ...], axis: int = 0) -> tuple[WeightKey, ...]:
        """Return the keys of q, k and v; for a fused weight, its parts along `axis`, of widths `columns`."""
        parts = columns if self.key_heads != self.heads else 3
        return WeightPart.split(keys, parts, axis) if isinstance(keys, str) else keys

    def _linear(
        self, emit: Emit, x: FlowValue, key: WeightKey, bias: WeightKey | None, roles: tuple[Role, Role],
        columns: DimLike, inner: tuple[str, ...] = (),
    ) -> FlowValue:  # fmt: skip
        """Write the product of `x` and a stored weight.

        Args:
            x: value `[B,S,in]`.
            key, bias: keys of the weight and, optionally, its bias.
            roles: roles of the axes `[out, in]`.
            columns: width of the result.
            inner: segments of the block path below the block of the weight. They distinguish the parts of a fused
                weight, such as `c_attn.q`.

        Raises:
            WeightShapeError: the weight has another width; the message explains which heads this width would fit.
        """
        with emit.scope(module_of(stored_key(key)), *inner):
            stored_roles = roles if self.transpose else roles[::-1]
            try:
                return emit.linear(
                    x, key, bias, transpose=self.transpose, roles=stored_roles, columns=columns, init=self.init
                )  # fmt: skip
            except WeightShapeError as error:
                raise WeightShapeError(f"{error}{self._heads_text(emit, key, x, columns)}") from error

    def _heads_text(self, emit: Emit, key: WeightKey, x: FlowValue, columns: DimLike) -> str:
        """Return the end of the message about a weight that has another width than the heads.

        A separate key or value weight with the width of fewer heads gets a hint to set `kv_heads`. The stage does not
        infer the number itself: with a wrong `heads`, hence a wrong head width, some number of key heads would often
        fit, and the model would silently compute other values.
        """
        if key == self.out:
            return ""
        width = self._head_dim(emit, x.type)
        text = f"; {columns} columns for {self.heads} query and {self.key_heads} key heads of {width}"
        # The hint is for separate k and v weights with kv_heads unset; elsewhere the width does not tell the mistake.
        if self.kv_heads is not None or isinstance(self.qkv, str) or key not in self.qkv[1:] or emit.weights is None:
            return text
        stored_width = emit.weights.spec(stored_key(key)).shape[0 if self.transpose else -1]
        kv, rest = divmod(stored_width // (key.count if isinstance(key, WeightPart) else 1), width)
        return text if rest or not kv or self.heads % kv else f"{text}; for fewer key heads give kv_heads={kv}"

    def _mask(self, emit: Emit) -> FlowValue | None:
        """Return the keep mask from the named input or from an AttnMask stage, or None if there is none."""
        if self.mask_input is not None:
            return emit.optional_input(self.mask_input)
        return emit.state.named.get("attn_mask")

    def _rotary(self, emit: Emit, x: FlowValue, width: int) -> Rotary[FlowValue] | None:
        """Return the rotation of q and k for heads of `width`, or None if there is none.

        Raises:
            GraphError: the options contradict each other, or the named tables do not exist.
        """
        if self.rope_theta is not None and self.rope is not None:
            raise GraphError(f"{emit.path}: SelfAttention: give either rope_theta= or rope={self.rope!r}")
        if self.n_rot == 0:
            return None
        if self.rope_theta is not None:
            with emit.scope("rotary_emb"):
                positions = positions_of(emit, x)
                return emit.rotary(
                    positions, head_dim=width, theta=self.rope_theta, n_rot=self.n_rot, style=self.rope_style
                )  # fmt: skip
        if self.rope is None:
            if self.n_rot is not None or self.rope_style != "half":
                raise GraphError(f"{emit.path}: SelfAttention: n_rot and rope_style go with rope_theta or rope")
            return None
        if self.rope:
            cos, sin = (emit.named(register) for register in register_names(self.rope))
        elif emit.state.rope_cos is not None and emit.state.rope_sin is not None:
            cos, sin = emit.state.rope_cos, emit.state.rope_sin
            check_tables(emit, cos, width)  # named tables are the user's choice; unnamed ones are checked
        else:
            raise GraphError(f'{emit.path}: SelfAttention: rope="" reads a RopeTables stage, and none ran before')
        return Rotary(cos, sin, width if self.n_rot is None else self.n_rot, self.rope_style)


def head_width(where: str, hidden_size: int, num_heads: int) -> int:
    """Return the width of a head, hidden size / heads.

    Raises:
        GraphError: the hidden size is not a multiple of the number of heads; the message begins with `where`.
    """
    if num_heads < 1 or hidden_size % num_heads:
        raise GraphError(f"{where}: hidden size {hidden_size} is not a multiple of {num_heads} heads")
    return hidden_size // num_heads


def _keys(keys: list[str]) -> str | QkvKeys:
    """Return a list of one key as that key, and a list of three as a tuple."""
    if len(keys) == 1:
        return keys[0]
    q, k, v = keys
    return q, k, v


@dataclass(frozen=True)
class Activation:
    """Apply an elementwise function by its name in `UNARY`: relu, gelu, gelu_tanh, silu, …"""

    kind: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        return emit.add_node(Unary(self.kind), emit.require(value, f"Activation({self.kind})"))
