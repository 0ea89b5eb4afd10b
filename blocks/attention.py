"""Attention stages: AttnMask, SelfAttnPrefill, and SelfAttnDecode over cached keys and values that are inputs.

A causal flow needs no decode stages: the compiler derives `program="explicit"`, a program over cached tokens, from it,
and `prefill` and `extend`, which write a cache of fixed size in place. BindDecodeInputs marks a flow as explicit and
checks its inputs; SelfAttnDecode writes the same block as the derivation. Cached keys are rotated. Letters: B batch,
S new tokens, P cached tokens, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx_jax.blocks.control import KvCacheContract, check_hidden
from rlx_jax.blocks.layer import LayerSpec
from rlx_jax.blocks.linear import head_norm
from rlx_jax.blocks.positions import rope_tables_for
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import GraphError, ShapeError, check_integer, shown
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind, mask_kind
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.flow_value import DecodeBindings

__all__ = ["AttnMask", "BindDecodeInputs", "DecodeRopeParams", "SelfAttnDecode", "SelfAttnPrefill", "SideOutputs"]


class SideOutputs:
    """Ordered collection of the names of side outputs: K, then V, layer by layer.

    Names are unique. A flow that is built again adds the same names, and the collection does not repeat them.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def inner(self) -> SideOutputs:
        """Return the collection itself; stages accept it as their sink."""
        return self

    def add(self, *names: str) -> None:
        """Append the names that are not yet in the collection."""
        self._names |= dict.fromkeys(names)  # a dict is an ordered set

    def drain(self) -> tuple[str, ...]:
        """Return the names and clear the collection."""
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
        """Return a mask of ones, which keeps every token of the active value `[B, S, …]`."""
        return AttnMask(None, batch, seq)

    @staticmethod
    def from_input(name: str, batch: int | str | None = None, seq: int | str | None = None) -> AttnMask:
        """Return a mask that reads the declared input `name`."""
        return AttnMask(name, batch, seq)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        keeps_all = self.input_name is None
        mask = emit.require(value, "AttnMask") if self.input_name is None else emit.flow_input(self.input_name)
        while keeps_all and mask.ndim > 2:
            mask = mask[..., 0]  # only the shape [B, S] of the active value counts: ones_like takes its type
        check_hidden(emit, mask, (self.batch, self.seq), "AttnMask")
        emit.set_named("attn_mask", emit.ones_like(mask, "f32") if keeps_all else mask)
        return value


@dataclass(frozen=True)
class SelfAttnPrefill:
    """Rotary self-attention of a normalised `[B,S,H]`; returns the context `[B,S,N·D]` before the output projection.

    Args:
        spec: the layer's record, of which the stage reads the options of attention. Its keys are complete, without
            `{}`: pass `spec.under(prefix)`.
        kv_name: the rotated keys and the values, `[B,S,K·D]`, become the side outputs `{kv_name}.k` and `.v`.
        stage: name for error messages, such as the name of the layer that contains this stage.
        kv_sink: collects the names of the side outputs.
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
                add_side_outputs(emit, self.kv_name, k, v, self.kv_sink)
            return context

        with emit.scope("self_attn"):
            return Heads(emit, self.spec, emit.require(value, self.stage)).attention(attend)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the types of keys and values, `[B, S, K·D]`."""
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim)


@dataclass(frozen=True)
class Heads:
    """Builder of the packed heads of one attention of a normalised `x` `[B,S,H]`: q `[B,S,N·D]`, k and v `[B,S,K·D]`.

    With `any_heads` the weights determine the number of heads, and the spec's number is ignored.
    """

    emit: Emit
    spec: LayerSpec
    x: FlowValue
    any_heads: bool = False

    def attention(self, attend: Callable[[FlowValue, FlowValue, FlowValue], FlowValue]) -> FlowValue:
        """Write projections, norms, rotation and attention, and return the context `[B,S,N·D]`.

        `attend` writes the attention over q, k and v and returns its context.
        """
        x = self.emit.block_input(self.x)
        gate: list[FlowValue] = []  # one value if the spec has a gate, else none
        heads = {name: self.project(name, x) for name in "qkv"}
        if self.spec.gated:
            heads["q"], *gate = self._query_and_gate(heads["q"])
        heads = self.rotate(heads)
        context = attend(heads["q"], heads["k"], heads["v"])
        return context * self.emit.add_node(Unary("sigmoid"), *gate) if gate else context

    def project(self, name: str, x: FlowValue) -> FlowValue:
        """Write the projection q, k or v. The spec determines its width, or with `any_heads` the weight."""
        spec, columns = self.spec, None if self.any_heads else self.spec.columns(name)
        with self.emit.scope(f"{name}_proj"):
            return self.emit.linear(x, spec.weight(name), spec.bias(name), roles=spec.roles(name), columns=columns)

    def rotate(self, heads: dict[str, FlowValue]) -> dict[str, FlowValue]:
        """Return the heads with queries and keys normalised and rotated, as far as the spec has norms and rotation."""
        emit, s, result = self.emit, self.spec, dict(heads)
        eps = s.eps if s.qk_norm_eps is None else s.qk_norm_eps
        offset = float(s.zero_centred) if s.qk_norm_offset is None else s.qk_norm_offset
        for name, key in (("q", s.keys.q_norm), ("k", s.keys.k_norm)):
            if s.qk_norm is not None and key is not None and name in result:
                head_dim = s.head_dim if s.qk_norm == "heads" else None
                result[name] = head_norm(emit, result[name], key, head_dim, eps, offset)
        n_rot = s.head_dim if s.n_rot is None else s.n_rot
        if n_rot != 0:
            cos, sin = rope_tables_for(emit, self.x, n_rot, s.rope_theta, s.rope, s.head_dim)
            rope = hir.Rope(s.head_dim, n_rot)
            result |= {name: emit.add_node(rope, result[name], cos, sin) for name in result if name != "v"}
        return result

    def _query_and_gate(self, q: FlowValue) -> tuple[FlowValue, FlowValue]:
        """Split a projection of queries and gates, `[B,S,N·2D]`, into packed queries and gates, `[B,S,N·D]` each."""
        n, d = self.spec.num_heads, self.spec.head_dim
        query, gate = self.emit.split(q.reshape(*q.shape[:-1], n, 2 * d), 2)
        packed = (*q.shape[:-1], n * d)
        return query.reshape(packed), gate.reshape(packed)


def sinks(emit: Emit, spec: LayerSpec) -> tuple[FlowValue, ...]:
    """Return the weight `[N]` of attention sinks as a tuple of one, or an empty tuple where the spec has none."""
    return (emit.param(spec.keys.sinks, (spec.num_heads,), roles=("heads",)),) if spec.sinks else ()


def add_side_outputs(emit: Emit, name: str, k: FlowValue, v: FlowValue, sink: SideOutputs | None = None) -> None:
    """Declare keys and values as side outputs of the flow, `{name}.k` and `{name}.v`; `sink` collects the names."""
    emit.output(f"{name}.k", k)
    emit.output(f"{name}.v", v)
    if not isinstance(sink, SideOutputs | None):
        raise GraphError(f"{emit.path}: expected a blocks.SideOutputs to collect side outputs, got {shown(sink)}")
    if sink is not None:
        sink.add(f"{name}.k", f"{name}.v")


def kv_name(prefix: str, index: int | None) -> str:
    """Return the common name of a layer's side outputs: `kv.3` for the prefix `model.layers.3`.

    Args:
        prefix: the layer's prefix, which ends in its number unless `index` is given.
        index: the layer's number, or None to read it from the prefix.

    Raises:
        GraphError: `index` is None and the prefix does not end in a number.
    """
    number = prefix.rpartition(".")[2] if index is None else str(index)
    if not number.isdecimal():
        raise GraphError(f"{prefix}: expected a prefix that ends in the number of the layer, or layer_idx=")
    return f"kv.{number}"


def mask_operand(emit: Emit, mask: MaskKind, input_name: str | None, stage: str) -> tuple[FlowValue, ...]:
    """Return the mask operand that a mask kind needs, as a tuple of one, or an empty tuple if it needs none.

    The operand is the declared input `input_name`, or without a name the register `attn_mask` of an AttnMask stage.

    Raises:
        GraphError: an input is named for a mask without operand, or neither source exists.
    """
    if not mask.operand:
        if input_name is not None:
            raise GraphError(f"{emit.path}: {stage} has mask_input={input_name!r}, but mask {mask} takes no operand")
        return ()
    if input_name is not None:
        return (emit.flow_input(input_name),)
    if "attn_mask" in emit.state.named:
        return (emit.named("attn_mask"),)
    raise GraphError(f"{emit.path}: {stage} with mask {mask} needs mask_input=, the name of a declared input")


ROPE_INPUTS = {"rope_cos", "rope_sin"}

# -- the inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BindDecodeInputs:
    """Declare that the flow's tokens continue a cached sequence, and check the inputs that hold the cache.

    Inputs: `past_k_{i}` and `past_v_{i}` `[B, P, K·D]` for each layer i, with rotated keys. With `use_custom_mask` also
    `mask` `[B, P+S]` over cached and new keys: 1 keeps a key, less than ½ drops it; causality applies in addition.
    Positions of new tokens start at P in every stage that reads them, so a RopeTables stage may run before or after
    this one. In a flow without RopeTables, the inputs `rope_cos` and `rope_sin` `[S, D/2]` (or `[B, S, D/2]`) hold the
    rows of the new tokens. Writes `emit.state.decode`, a `DecodeBindings`.

    Raises:
        UnboundInputError: an input is not declared; the message names the first. Missing tables raise where a layer
            reads them and no stage wrote any.
        ShapeError: an input has another shape.
    """

    num_layers: int
    use_custom_mask: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "BindDecodeInputs")
        check_integer(f"{emit.path}: BindDecodeInputs: num_layers", self.num_layers, error_class=GraphError)
        with emit.scope("decode_inputs"):
            emit.state.program = "explicit"
            _bind_tables(emit, x)
            mask = emit.optional_input("mask") if self.use_custom_mask else None
            past_k, past_v = _bind_past(emit, x, self.num_layers)
            keys = past_k[0].type.shape[1] + x.type.shape[1]
            if mask is not None and (mask.ndim != 2 or mask.type.shape[1] != keys):
                raise ShapeError(
                    f"{emit.path}: input mask is {mask.type}; expected [{x.type.shape[0]},{keys}]: cached and new "
                    "tokens, such as ('batch', 'past + seq')"
                )
            state = emit.state
            state.decode = DecodeBindings(state.rope_cos, state.rope_sin, mask, past_k, past_v)
        return x


def _bind_tables(emit: Emit, x: FlowValue) -> None:
    """Bind the inputs that hold rope tables, unless a stage wrote the registers or no such input is declared.

    Raises:
        ShapeError: the tables do not have one row for each token of `x`.
    """
    if emit.state.rope_cos is None and not ROPE_INPUTS.isdisjoint(emit.state.inputs):
        rows = [emit.flow_input(name) for name in ("rope_cos", "rope_sin")]
        emit.state.rope_cos, emit.state.rope_sin = (row[None] if row.ndim == 2 else row for row in rows)
    cos = emit.state.rope_cos
    if cos is not None and (cos.ndim not in (2, 3) or cos.type.shape[-2] != x.type.shape[1]):
        raise ShapeError(
            f"{emit.path}: the rope tables are {cos.type} for {x.type.shape[1]} new tokens; expected one row for "
            "each, at its position: slice them, or use a RopeTables stage"
        )


def _bind_past(emit: Emit, x: FlowValue, layers: int) -> list[tuple[FlowValue, ...]]:
    """Return the cached keys of every layer, then the cached values of every layer.

    Raises:
        ShapeError: an input is not of floats `[B, P, K·D]`, has another batch than `x`, or another P than layer 0.
    """
    first_type = emit.flow_input("past_k_0").type
    for name in (f"past_{kind}_{i}" for i in range(layers) for kind in "kv"):
        past = emit.flow_input(name)
        if past.ndim != 3 or not is_float(past.dtype) or past.type.shape[0] != x.type.shape[0]:
            raise ShapeError(
                f"{emit.path}: input {name} is {past.type}; expected floats [{x.type.shape[0]}, P, K·D]: keys or "
                "values of P earlier tokens"
            )
        if past.type.shape[1] != first_type.shape[1]:
            raise ShapeError(
                f"{emit.path}: input {name} is {past.type}, past_k_0 is {first_type}: "
                "expected as many cached tokens in every layer"
            )
    return [tuple(emit.flow_input(f"past_{kind}_{i}") for i in range(layers)) for kind in "kv"]


@dataclass(frozen=True, eq=False)
class DecodeRopeParams:
    """Rope tables of the new tokens as constants `[S, half_dim]`; the positions are therefore fixed in the flow."""

    cos: Any = field(repr=False)
    sin: Any = field(repr=False)
    half_dim: int = 0

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("rotary_emb"):
            emit.state.rope_cos, emit.state.rope_sin = (self._constant(emit, n) for n in ("cos", "sin"))
        return value

    def _constant(self, emit: Emit, name: str) -> FlowValue:
        """Return the table `cos` or `sin` as a constant `[1, S, half_dim]`, after checking its size."""
        data = np.asarray(getattr(self, name), np.float32)
        if self.half_dim < 1 or not data.size or data.size % self.half_dim:
            raise ShapeError(f"{emit.path}: {name} has shape {list(data.shape)}, expected [S, {self.half_dim}]")
        return emit.constant(data.reshape(1, -1, self.half_dim))


# -- attention over cached and new keys ----------------------------------------------------------


def check_cached(emit: Emit, index: int, stage: str) -> None:
    """Check that layer `index` has a cache.

    Either BindDecodeInputs bound it, or the compiler builds the whole flow as the program `explicit`.

    Raises:
        GraphError: the flow is not explicit, or BindDecodeInputs bound fewer layers.
    """
    if emit.state.program != "explicit":
        raise GraphError(f"{emit.path}: {stage} reads cached keys: put BindDecodeInputs before it")
    bound = 0 if emit.state.decode is None else len(emit.state.decode.past_k)
    if index < 0 or bound and index >= bound:
        raise GraphError(f"{emit.path}: {stage} of layer {index}, but BindDecodeInputs bound {bound} layers")


def cached_inputs(emit: Emit, index: int, new: list[FlowValue]) -> list[FlowValue]:
    """Return the cached keys and values of layer `index`, `[B, P, K·D]` each.

    Args:
        index: number of the layer.
        new: the layer's new keys and values, `[B, S, K·D]`, which the cached ones precede.

    Raises:
        ShapeError: a cached input has another width than the new value.
    """
    past = []
    for kind, x in zip("kv", new, strict=True):
        name, (batch, _, width) = f"past_{kind}_{index}", x.type.shape
        past.append(emit.input(name, (batch, "past", width)))
        if past[-1].type.shape[2] != width:
            raise ShapeError(f"{emit.path}: input {name} is {past[-1].type}; expected width {width} as {x.type}")
    return past


@dataclass(frozen=True)
class SelfAttnDecode:
    """SelfAttnPrefill over cached and new keys: normalised `[B,S,H]` → `[B,S,N·D]`.

    `K' = concat(past_k, rope(x Wk))`, `V' = concat(past_v, x Wv)`. Query i of S reads the keys up to P + i, or the last
    w of them in a sliding window; the window does not count keys that the mask drops. The side outputs `kv.{layer}.k`
    and `kv.{layer}.v` are `[B, P+S, K·D]`; `kv_out` collects their names.
    """

    spec: LayerSpec
    layer: int
    use_custom_mask: bool = False
    kv_out: SideOutputs | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, mask = emit.require(value, "SelfAttnDecode"), mask_kind(self.spec.mask)

        def attend(q: FlowValue, k: FlowValue, v: FlowValue) -> FlowValue:
            past_kv, keep = cached_inputs(emit, self.layer, [k, v]), self._keep_mask(emit)
            block = hir.GrowingAttention(self.spec.block(mask), keep=bool(keep))
            context, grown_k, grown_v = emit.add_all(block, q, k, v, *past_kv, *keep, *sinks(emit, self.spec))
            add_side_outputs(emit, f"kv.{self.layer}", grown_k, grown_v, self.kv_out)
            return context

        with emit.scope("self_attn"):
            check_cached(emit, self.layer, "SelfAttnDecode")
            if mask.kind not in ("causal", "sliding_window"):
                raise GraphError(
                    f"{emit.path}: decode needs a causal or sliding-window mask, got {mask}; use_custom_mask "
                    "adds a keep mask"
                )
            return Heads(emit, self.spec, x).attention(attend)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the types of keys and values, `[B, P+S, K·D]`."""
        past = emit.flow_input(f"past_k_{self.layer}").type.shape[1]
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim, past)

    def _keep_mask(self, emit: Emit) -> list[FlowValue]:
        """Return the keep mask as a list of one, or an empty list if there is none."""
        mask = emit.optional_input("mask") if self.use_custom_mask else None
        if mask is None:
            return []
        if emit.state.decode is not None and emit.state.decode.mask is None:
            raise GraphError(f"{emit.path}: use_custom_mask without a mask: BindDecodeInputs(…, use_custom_mask=True)")
        return [mask]
