"""Attention stages: AttnMask and SelfAttnPrefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.control import check_hidden
from rlx_jax.blocks.layer import LayerSpec
from rlx_jax.blocks.norm import head_norm
from rlx_jax.blocks.rope import rope_tables_for
from rlx_jax.errors import GraphError, shown
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
class SelfAttnPrefill:
    """Rotary self-attention of a normalised `[B,S,H]`: the packed context `[B,S,N·D]`, before the output projection.

    It reads what a layer's record says of attention, under keys without `{}`: `spec.under(prefix)`. With `kv_name` the
    keys (rotated) and values, `[B,S,K·D]`, are the side outputs `{kv_name}.k` and `.v`, which `kv_sink` collects.
    Errors name `stage`, which may be a layer that this is part of.
    """

    spec: LayerSpec
    kv_name: str | None = None
    stage: str = "SelfAttnPrefill"
    kv_sink: SideOutputs | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        def attend(q: FlowValue, k: FlowValue, v: FlowValue) -> FlowValue:
            mask = mask_kind(self.spec.mask)
            extra = mask_operand(emit, mask, self.spec.mask_input, self.stage)
            context = emit.add_node(self.spec.block(mask), q, k, v, *extra, *sinks(emit, self.spec))
            if self.kv_name is not None:
                side_outputs(emit, self.kv_name, k, v, self.kv_sink)
            return context

        with emit.scope("self_attn"):
            return Heads(emit, self.spec, emit.require(value, self.stage)).attention(self.stage, attend)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)


@dataclass(frozen=True)
class Heads:
    """The packed heads of one attention of a normalised `x` `[B,S,H]`: q `[B,S,N·D]`, k and v `[B,S,K·D]`.

    With `any_heads` their number is that of the weights, whatever the spec says.
    """

    emit: Emit
    spec: LayerSpec
    x: FlowValue
    any_heads: bool = False

    def attention(self, stage: str, attend: Callable[[FlowValue, FlowValue, FlowValue], FlowValue]) -> FlowValue:
        """Write the whole up to its context: `attend` writes attention over the heads; errors name `stage`."""
        gate: list[FlowValue] = []

        def rotate(heads: dict[str, FlowValue]) -> dict[str, FlowValue]:
            if self.spec.gated:
                heads["q"], *gate[:] = self._query_and_gate(heads["q"])
            return self.rotated(heads)

        emit, read = self.emit, replace(self, x=self.emit.block_input(self.x))
        context = hir.write_attention(read.x, project=read.project, rotate=rotate, attend=attend)
        return context * emit.add_node(Unary("sigmoid"), *gate) if gate else context

    def project(self, name: str, x: FlowValue) -> FlowValue:
        """Write the projection q, k or v, as wide as the spec says, or with `any_heads` as its weight is."""
        spec, columns = self.spec, None if self.any_heads else self.spec.columns(name)
        with self.emit.scope(f"{name}_proj"):
            return self.emit.linear(x, spec.weight(name), spec.bias(name), roles=spec.roles(name), columns=columns)

    def rotated(self, heads: dict[str, FlowValue]) -> dict[str, FlowValue]:
        """Write the norms and the rotation of queries and keys, where there are any."""
        emit, s, made = self.emit, self.spec, dict(heads)
        eps = s.eps if s.qk_norm_eps is None else s.qk_norm_eps
        offset = float(s.zero_centred) if s.qk_norm_offset is None else s.qk_norm_offset
        for name, key in (("q", s.keys.q_norm), ("k", s.keys.k_norm)):
            if s.qk_norm is not None and key is not None and name in made:
                made[name] = head_norm(emit, made[name], key, s.head_dim if s.qk_norm == "heads" else None, eps, offset)
        n_rot = s.head_dim if s.n_rot is None else s.n_rot
        if n_rot != 0:
            cos, sin = rope_tables_for(emit, self.x, n_rot, s.rope_theta, s.rope, s.head_dim)
            rope = hir.Rope(s.head_dim, n_rot)
            made |= {name: emit.add_node(rope, made[name], cos, sin) for name in made if name != "v"}
        return made

    def keys_and_values(self) -> tuple[FlowValue, FlowValue]:
        """Write the keys, normed and rotated, and the values alone."""
        made = self.rotated({name: self.project(name, self.x) for name in "kv"})
        return made["k"], made["v"]

    def _query_and_gate(self, q: FlowValue) -> tuple[FlowValue, FlowValue]:
        """Return both of every head, packed `[B,S,N·D]`."""
        n, d = self.spec.num_heads, self.spec.head_dim
        query, gate = self.emit.split(q.reshape(*q.shape[:-1], n, 2 * d), 2)
        packed = (*q.shape[:-1], n * d)
        return query.reshape(packed), gate.reshape(packed)


def sinks(emit: Emit, spec: LayerSpec) -> tuple[FlowValue, ...]:
    """The sinks of an attention, if there are any."""
    return (emit.param(spec.keys.sinks, (spec.num_heads,), roles=("heads",)),) if spec.sinks else ()


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
