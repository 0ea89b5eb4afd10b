"""Explicit decode: stages that read cached keys and values as inputs, and give the longer ones as outputs.

Any causal flow decodes without these, by the programs derived from it (`prefill`, `extend`), whose cache has a fixed
size and is written in place. Here the cache grows by concatenation, and every value is an input or an output of the
flow. Keys are cached rotated. Letters: B batch, S new tokens, P cached ones, K key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx_jax.blocks.attention import SelfAttnPrefillSpec, check_heads, projections, side_outputs
from rlx_jax.blocks.contracts import KvCacheContract, Shape
from rlx_jax.blocks.rope import positions_of
from rlx_jax.emit import DecodeBindings, Emit, FlowValue
from rlx_jax.errors import GraphError, ShapeError, UnboundStreamError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import mask_kind
from rlx_jax.ir.types import is_float, path_text

# -- the inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BindDecodeInputs:
    """Find the cached keys and values of every layer among the flow's inputs, and put positions behind them.

    Inputs: `past_k_{i}` and `past_v_{i}` `[B, P, K·D]` for each layer i, the keys rotated. With `use_custom_mask` also
    `mask` `[B, P+S]` over cached and new keys: 1 keeps a key, less than ½ drops it, and causality holds besides.
    The rope tables are those of an earlier stage: RopeTables makes its own again, at positions P … P+S−1 or those of
    the input `position_ids` `[B, S]`; others are taken as they are. Without any, the inputs `rope_cos` and `rope_sin`
    `[S, D/2]` (or `[B, S, D/2]`) are the rows of the new tokens.

    Raises:
        UnboundInputError: names the first input that is not declared. ShapeError: one has another shape.
    """

    num_layers: int
    use_custom_mask: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "BindDecodeInputs")
        if isinstance(self.num_layers, bool) or not isinstance(self.num_layers, int) or self.num_layers < 1:
            raise GraphError(f"{emit.path}: BindDecodeInputs of {self.num_layers!r} layers; expected at least 1")
        with emit.scope("decode_inputs"):
            ready = emit.state.rope_cos is not None or bool(emit.state.rope_tables)
            given = None if ready else (_rows(emit, "rope_cos"), _rows(emit, "rope_sin"))
            mask = emit.optional_input("mask") if self.use_custom_mask else None
            past = tuple((_past(emit, f"past_k_{i}", x), _past(emit, f"past_v_{i}", x)) for i in range(self.num_layers))
            _check_lengths(emit, past)
            _check_mask(emit, mask, x, past[0][0])
            among_kept = None if mask is None else emit.cumsum((mask.astype("float32") >= 0.5).astype("int32"), 1) - 1
            emit.state.decode = DecodeBindings(past, mask, among_kept, self.use_custom_mask)
            _count_on(emit, x)
            _place_tables(emit, x, given)
        return x


def _rows(emit: Emit, name: str) -> FlowValue:
    """An input of rope rows as `[B|1, S, D/2]`."""
    rows = emit.flow_input(name)
    return rows[None] if rows.ndim == 2 else rows


def _past(emit: Emit, name: str, x: FlowValue) -> FlowValue:
    """The input `name`, if it can hold cached keys or values for rows of `x`."""
    past = emit.flow_input(name)
    if past.ndim != 3 or not is_float(past.dtype) or past.type.shape[0] != x.type.shape[0]:
        raise ShapeError(
            f"{emit.path}: input {name} is {past.type}; expected floats [{x.type.shape[0]}, P, K·D]: keys or values of "
            "P earlier tokens"
        )
    return past


def _check_lengths(emit: Emit, past: tuple[tuple[FlowValue, FlowValue], ...]) -> None:
    """Every layer caches the same number of tokens."""
    first = past[0][0].type
    for i, pair in enumerate(past):
        for name, value in zip("kv", pair, strict=True):
            if value.type.shape[1] != first.shape[1]:
                raise ShapeError(
                    f"{emit.path}: input past_{name}_{i} is {value.type}, past_k_0 is {first}: "
                    "expected as many cached tokens in every layer"
                )


def _check_mask(emit: Emit, mask: FlowValue | None, x: FlowValue, past: FlowValue) -> None:
    """The mask covers cached and new tokens."""
    keys = past.type.shape[1] + x.type.shape[1]
    if mask is not None and (mask.ndim != 2 or mask.type.shape[1] != keys):
        raise ShapeError(
            f"{emit.path}: input mask is {mask.type}; expected [{x.type.shape[0]},{keys}]: cached and new tokens, such "
            "as ('batch', 'past + seq')"
        )


def _count_on(emit: Emit, x: FlowValue) -> None:
    """Where `position_ids` are counted by default, count from behind the cache."""
    ids = emit.state.inputs.get("position_ids")
    if ids is not None and isinstance(emit.builder.nodes[ids.value.node].op, hir.Positions):
        for node in emit.builder.nodes:
            if ids.value in node.inputs and not isinstance(node.op, hir.RopeAngles | hir.RopeRows):
                reader = path_text(node.origin.path)
                raise GraphError(f"{emit.path}: {reader} read position_ids from 0 on: put BindDecodeInputs before it")
        del emit.state.inputs["position_ids"]
        emit.state.inputs["position_ids"] = positions_of(emit, x)


def _place_tables(emit: Emit, x: FlowValue, given: tuple[FlowValue, FlowValue] | None) -> None:
    """Put the rope tables of the new tokens into the registers."""
    state = emit.state
    if given is not None:
        state.rope_cos, state.rope_sin = given
    made, state.rope_tables = state.rope_tables, []
    for stage, cos in made:
        if any(cos is register for register in (state.rope_cos, *state.named.values())):  # not overwritten since
            stage.emit(emit, x)
    rows = state.rope_cos
    if rows is not None and (rows.ndim != 3 or rows.type.shape[1] != x.type.shape[1]):
        raise ShapeError(
            f"{emit.path}: the rope tables are {rows.type} for {x.type.shape[1]} new tokens; expected one row for "
            "each, that of its position: slice them, or let a RopeTables stage make them"
        )


@dataclass(frozen=True, eq=False)
class DecodeRopeParams:
    """cos and sin of the new tokens, given as data `[S, half_dim]`: their positions are fixed with the flow."""

    cos: Any = field(repr=False)
    sin: Any = field(repr=False)
    half_dim: int = 0

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("rotary_emb"):
            emit.state.rope_cos, emit.state.rope_sin = (self._constant(emit, n) for n in ("cos", "sin"))
        return value

    def _constant(self, emit: Emit, name: str) -> FlowValue:
        data = np.asarray(getattr(self, name), np.float32)
        if self.half_dim < 1 or not data.size or data.size % self.half_dim:
            raise ShapeError(
                f"{emit.path}: DecodeRopeParams: {name} has shape {list(data.shape)}, expected [S, {self.half_dim}]"
            )
        return emit.constant(data.reshape(1, -1, self.half_dim))


# -- attention over cached and new keys ----------------------------------------------------------


def cached(emit: Emit, index: int, stage: str) -> tuple[FlowValue, FlowValue]:
    """The cached keys and values of layer `index`."""
    bindings = emit.state.decode
    if bindings is None:
        raise UnboundStreamError(f"{emit.path}: {stage} reads cached keys: put BindDecodeInputs before it")
    if not 0 <= index < len(bindings.past):
        raise GraphError(
            f"{emit.path}: {stage} of layer {index}, and BindDecodeInputs bound {len(bindings.past)} layers"
        )
    return bindings.past[index]


@dataclass(frozen=True)
class SelfAttnDecode:
    """SelfAttnPrefill with cached keys and values in front of the new ones: normalised `[B,S,H]` → `[B,S,N·D]`.

    `K' = concat(past_k, rope(x Wk))`, `V' = concat(past_v, x Wv)`; query i of S reads the keys up to P + i, or the
    last w of those in a sliding window, in which keys that the mask drops take no place. Side outputs
    `kv.{layer}.k` and `kv.{layer}.v` `[B, P+S, K·D]`.
    """

    spec: SelfAttnPrefillSpec
    layer: int
    use_custom_mask: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "SelfAttnDecode")
        with emit.scope("self_attn"):
            past = cached(emit, self.layer, "SelfAttnDecode")
            q, *new = projections(emit, x, self.spec)
            check_heads(emit, self.spec, "SelfAttnDecode", q, *new)
            k, v = (self._grown(emit, name, *pair) for name, *pair in zip("kv", past, new, strict=True))
            side_outputs(emit, f"kv.{self.layer}", k, v)
            block, keep = self._block(emit)
            return emit.add(block, q, k, v, *keep)

    def _grown(self, emit: Emit, name: str, past: FlowValue, new: FlowValue) -> FlowValue:
        if past.type.shape[2] != new.type.shape[2]:
            raise ShapeError(
                f"{emit.path}: input past_{name}_{self.layer} is {past.type}, the new ones are {new.type}: "
                f"expected width {new.type.shape[2]}, K·D"
            )
        return emit.concat([past, new], axis=1)

    def _block(self, emit: Emit) -> tuple[hir.Attention, list[FlowValue]]:
        """The attention, and the keep mask where there is one, with the positions that a window is measured by."""
        mask, bindings = mask_kind(self.spec.mask), emit.state.decode
        if mask.kind not in ("causal", "sliding_window"):
            raise GraphError(
                f"{emit.path}: mask {mask}; decode is causal or in a sliding window; use_custom_mask adds a keep mask"
            )
        block = self.spec.block(mask)
        if not self.use_custom_mask or bindings is None or (bindings.mask is None and bindings.use_custom_mask):
            return block, []
        if bindings.mask is None or bindings.key_positions is None:
            raise GraphError(
                f"{emit.path}: use_custom_mask, and no mask is bound: BindDecodeInputs(…, use_custom_mask=True)"
            )
        if block.window is None:
            return replace(block, extra=("keep",)), [bindings.mask]
        return replace(block, extra=("keep", "key_positions")), [bindings.mask, bindings.key_positions]

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, P+S, K·D]` of an input `[B, S, H]`."""
        past, _ = cached(emit, self.layer, "SelfAttnDecode")
        shape = (hidden[0], past.type.shape[1] + hidden[1], self.spec.num_kv_heads * self.spec.head_dim)
        return KvCacheContract(shape, shape)
