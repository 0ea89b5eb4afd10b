"""Attention stages: AttnMask and SelfAttnPrefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.control import check_hidden
from rlx_jax.blocks.norm import head_norm
from rlx_jax.blocks.rope import rope_tables_for
from rlx_jax.errors import GraphError, WeightShapeError, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind, mask_kind
from rlx_jax.ir.ops.pointwise import FullLike, Unary
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue


class SideOutputs:
    """The names of the side outputs that stages give, in their order: K first, then V, layer by layer.

    A name is the same in every build, so that a flow may be built again: names are not repeated.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def inner(self) -> SideOutputs:
        """Return the collection itself, which stages take."""
        return self

    def add(self, *names: str) -> None:
        """Append names that are not in it."""
        self._names |= dict.fromkeys(names)

    def drain(self) -> tuple[str, ...]:
        """Return the names, and forget them."""
        names, self._names = tuple(self._names), {}
        return names

    def is_empty(self) -> bool:
        """Return whether there are no names."""
        return not self._names


@dataclass(frozen=True)
class AttnMask:
    """Register a keep mask `[B, S]` (1 keeps a key, less than ½ drops it) as `attn_mask`.

    `batch` and `seq` are checked against the mask when given.
    """

    input_name: str | None = None
    batch: int | str | None = None
    seq: int | str | None = None

    @staticmethod
    def ones(batch: int | str | None = None, seq: int | str | None = None) -> AttnMask:
        """Keep every key of the active value `[B, S, …]`."""
        return AttnMask(None, batch, seq)

    @staticmethod
    def from_input(name: str, batch: int | str | None = None, seq: int | str | None = None) -> AttnMask:
        """A declared input."""
        return AttnMask(name, batch, seq)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        if self.input_name is not None:
            given = emit.flow_input(self.input_name)
            check_hidden(emit, given, (self.batch, self.seq), "AttnMask")
            emit.set_named("attn_mask", given)
            return value
        rows = emit.require(value, "AttnMask")
        while rows.ndim > 2:
            rows = rows[..., 0]
        check_hidden(emit, rows, (self.batch, self.seq), "AttnMask")
        emit.set_named("attn_mask", emit.add_node(FullLike(1.0, np.dtype(np.float32)), rows))
        return value


@dataclass(frozen=True)
class SelfAttnPrefillSpec:
    """Keys and sizes of a SelfAttnPrefill. Weights `[N·D, H]`, `[K·D, H]`, `[K·D, H]`; biases are optional.

    With `q_norm_key` and `k_norm_key`, weights `[D]`, queries and keys go through an RMSNorm of each head before the
    rotation; `qk_norm_offset` is added to both weights. `rope_theta` is the base used when no RopeTables stage ran;
    `rope` names the RopeTables to read, where a flow has several. `n_rot` columns of each head are rotated: None is
    all, 0 is none (NoPE). `gated`: q's weight is `[N·2D, H]`, for each head D rows of the query and then D of a gate;
    the context is multiplied with its sigmoid (Qiu et al., arXiv:2505.06708). `sinks_key`: a weight `[N]`, the sinks
    of `emit.attention`.
    """

    q_key: str
    k_key: str
    v_key: str
    num_heads: int
    head_dim: int
    num_kv_heads: int
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    biases: tuple[str, str, str] | None = None
    mask_input: str | None = None
    rope_theta: float = 10000.0
    q_norm_key: str | None = None
    k_norm_key: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_offset: float = 0.0
    rope: str = ""
    n_rot: int | None = None
    gated: bool = False
    sinks_key: str | None = None

    @staticmethod
    def hf_layer(
        prefix: str, num_heads: int, head_dim: int, num_kv_heads: int, bias: bool = False, qk_norm: bool = False
    ) -> SelfAttnPrefillSpec:
        """`{prefix}.self_attn.{q,k,v}_proj.weight`, and their biases; `{prefix}.self_attn.{q,k}_norm.weight`."""
        q, k, v = (f"{prefix}.self_attn.{n}_proj" for n in "qkv")
        biases = (f"{q}.bias", f"{k}.bias", f"{v}.bias") if bias else None
        q_norm, k_norm = (f"{prefix}.self_attn.{n}_norm.weight" if qk_norm else None for n in "qk")
        return SelfAttnPrefillSpec(
            f"{q}.weight", f"{k}.weight", f"{v}.weight", num_heads, head_dim, num_kv_heads, biases=biases,
            q_norm_key=q_norm, k_norm_key=k_norm,
        )  # fmt: skip

    def block(self, mask: MaskKind) -> hir.Attention:
        """The attention itself."""
        return hir.attention(
            self.num_heads, self.num_kv_heads, mask, scale=self.score_scale, softcap=self.attn_logit_softcap,
            sinks=self.sinks_key is not None,
        )  # fmt: skip

    def sinks(self, emit: Emit) -> tuple[FlowValue, ...]:
        """The sinks, if there are any."""
        if self.sinks_key is None:
            return ()
        return (emit.param(self.sinks_key, (self.num_heads,), roles=("heads",)),)


@dataclass(frozen=True)
class SelfAttnPrefill:
    """Rotary self-attention of a normalised `[B,S,H]`: the packed context `[B,S,N·D]`, before the output projection.

    With `kv_name` the keys (rotated) and values, `[B,S,K·D]`, are the side outputs `{kv_name}.k` and `.v`, which
    `kv_sink` collects. Errors name `stage`, which may be a layer that this is part of.
    """

    spec: SelfAttnPrefillSpec
    kv_name: str | None = None
    stage: str = "SelfAttnPrefill"
    kv_sink: SideOutputs | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        context, k, v = self_attention(emit, emit.require(value, self.stage), self.spec, self.stage)
        if self.kv_name is not None:
            side_outputs(emit, self.kv_name, k, v, self.kv_sink)
        return context

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)


def self_attention(
    emit: Emit, x: FlowValue, spec: SelfAttnPrefillSpec, stage: str
) -> tuple[FlowValue, FlowValue, FlowValue]:
    """The context `[B,S,N·D]` of a normalised `x`, with the keys (rotated) and values `[B,S,K·D]` that it reads."""
    with emit.scope("self_attn"):
        x = emit.block_input(x)
        q, k, v, *gate = projections(emit, x, spec)
        check_heads(emit, spec, stage, q, k, v)
        mask = mask_kind(spec.mask)
        extra = mask_operand(emit, mask, spec.mask_input, stage)
        context = emit.add_node(spec.block(mask), q, k, v, *extra, *spec.sinks(emit))
        return gated(emit, context, *gate), k, v


def gated(emit: Emit, context: FlowValue, *gate: FlowValue) -> FlowValue:
    """The context times the sigmoid of its gate, if there is one."""
    return context * emit.add_node(Unary("sigmoid"), *gate) if gate else context


def side_outputs(emit: Emit, name: str, k: FlowValue, v: FlowValue, sink: SideOutputs | None = None) -> None:
    """Make keys and values outputs of the flow, `{name}.k` and `{name}.v`; `sink` collects the names."""
    emit.output(f"{name}.k", k)
    emit.output(f"{name}.v", v)
    if not isinstance(sink, SideOutputs | None):
        raise GraphError(f"{emit.path}: side outputs are collected by a blocks.SideOutputs, got {shown(sink)}")
    if sink is not None:
        sink.add(f"{name}.k", f"{name}.v")


def kv_name(prefix: str, index: int | None) -> str:
    """Return the name of the side outputs of a layer, `kv.3` of `model.layers.3`.

    Raises:
        GraphError: there is no index, and the prefix ends in none.
    """
    number = prefix.rpartition(".")[2] if index is None else str(index)
    if not number.isdecimal():
        raise GraphError(f"{prefix}: expected a prefix that ends in the number of the layer, or layer_idx=")
    return f"kv.{number}"


def projections(emit: Emit, x: FlowValue, spec: SelfAttnPrefillSpec, wanted: str = "qkv") -> list[FlowValue]:
    """Packed heads of a normalised `[B,S,H]`: q `[B,S,N·D]`, k and v `[B,S,K·D]`; q and k normed and rotated. Behind
    those wanted, the gate of q `[B,S,N·D]` where there is one."""
    s = spec
    keys = dict(zip("qkv", (s.q_key, s.k_key, s.v_key), strict=True))
    biases = dict(zip("qkv", s.biases or (None, None, None), strict=True))
    kv, hidden, made = s.num_kv_heads * s.head_dim, x.type.shape[-1], {}
    wide = s.num_heads * s.head_dim * (1 + s.gated)
    emit.suppose({s.q_key: (wide, hidden), s.k_key: (kv, hidden), s.v_key: (kv, hidden)})
    for name in wanted:
        with emit.scope(f"{name}_proj"):
            roles = ("heads" if name == "q" else "kv_heads", "hidden")
            made[name] = emit.linear(x, keys[name], biases[name], roles=roles)
    gate: list[FlowValue] = []
    if s.gated and "q" in made:
        made["q"], *gate = _query_and_gate(emit, made["q"], s)
    for name, key in (("q", s.q_norm_key), ("k", s.k_norm_key)):
        if key is not None and name in made:
            made[name] = head_norm(emit, made[name], key, s.head_dim, s.qk_norm_eps, s.qk_norm_offset)
    n_rot = s.head_dim if s.n_rot is None else s.n_rot
    if n_rot != 0:
        cos, sin = rope_tables_for(emit, x, n_rot, s.rope_theta, s.rope, s.head_dim)
        rope = hir.Rope(s.head_dim, n_rot)
        made |= {name: emit.add_node(rope, made[name], cos, sin) for name in wanted if name != "v"}
    return [*(made[name] for name in wanted), *gate]


def _query_and_gate(emit: Emit, q: FlowValue, spec: SelfAttnPrefillSpec) -> tuple[FlowValue, FlowValue]:
    """Both of every head, packed `[B,S,N·D]`."""
    n, d = spec.num_heads, spec.head_dim
    if q.type.shape[-1] != 2 * n * d:
        raise WeightShapeError(
            f"{emit.path}: weight {quote(spec.q_key)} gives {q.type}; expected {2 * n * d} columns, {n} heads of a "
            f"query and a gate of width {d}"
        )
    heads = q.reshape(*q.shape[:-1], n, 2 * d)
    query, gate = emit.split(heads, 2)
    packed = (*q.shape[:-1], n * d)
    return query.reshape(packed), gate.reshape(packed)


def check_heads(emit: Emit, spec: SelfAttnPrefillSpec, stage: str, q: FlowValue, k: FlowValue, v: FlowValue) -> None:
    """Hold the widths of the projections against the spec.

    Raises:
        WeightShapeError: block path, weight, expected heads, got.
    """
    s = spec
    for key, heads, value in ((s.q_key, s.num_heads, q), (s.k_key, s.num_kv_heads, k), (s.v_key, s.num_kv_heads, v)):
        if value.type.shape[-1] != heads * s.head_dim:
            raise WeightShapeError(
                f"{emit.path}: {stage}: weight {quote(key)} gives {value.type}; expected {heads * s.head_dim} columns, "
                f"{heads} heads of width {s.head_dim}"
            )


def mask_operand(emit: Emit, mask: MaskKind, input_name: str | None, stage: str) -> tuple[FlowValue, ...]:
    """The mask operand that a mask kind needs, from a declared input or the `attn_mask` register."""
    if not mask.operand:
        if input_name is not None:
            raise GraphError(f"{emit.path}: {stage} has mask_input={input_name!r}, its mask {mask} takes no operand")
        return ()
    if input_name is not None:
        return (emit.flow_input(input_name),)
    if "attn_mask" in emit.state.named:
        return (emit.named("attn_mask"),)
    raise GraphError(f"{emit.path}: {stage} with mask {mask} needs mask_input=, the name of a declared input")
