"""Explicit decode with the inputs and layers that the spec names: cached keys and values come in, longer ones go out.

Any causal flow has this program without these stages (`program="explicit"`, derived), and `prefill` and `extend`, whose
cache has a fixed size and is written in place. BindDecodeInputs says that its flow is explicit and checks the inputs;
SelfAttnDecode writes the block that the derivation writes. Keys are cached rotated. Letters: B batch, S new tokens, P
cached ones, K key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.blocks.attention import Heads, SideOutputs, side_outputs, sinks
from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.layer import LayerSpec
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import mask_kind
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.flow_state import DecodeBindings

# The inputs that may hold rope tables.
TABLES = {"rope_cos", "rope_sin"}

# -- the inputs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BindDecodeInputs:
    """Say that the flow's tokens stand behind cached ones, and check the inputs that hold the cache.

    Inputs: `past_k_{i}` and `past_v_{i}` `[B, P, K·D]` for each layer i, the keys rotated. With `use_custom_mask` also
    `mask` `[B, P+S]` over cached and new keys: 1 keeps a key, less than ½ drops it, and causality holds besides.
    Positions count on behind the cache wherever they are read, so RopeTables may stand before this stage or after it.
    Without any, the inputs `rope_cos` and `rope_sin` `[S, D/2]` (or `[B, S, D/2]`) are the rows of the new tokens.
    Writes `emit.state.decode`, a `DecodeBindings`.

    Raises:
        UnboundInputError: names the first input that is not declared; of the tables, where a layer reads them and no
            stage made any. ShapeError: one has another shape.
    """

    num_layers: int
    use_custom_mask: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "BindDecodeInputs")
        check_count(self.num_layers, f"{emit.path}: BindDecodeInputs: num_layers")
        with emit.scope("decode_inputs"):
            emit.state.program = "explicit"
            _bind_tables(emit)
            _check_tables(emit, x)
            mask = emit.optional_input("mask") if self.use_custom_mask else None
            past_k, past_v = _bind_past(emit, x, self.num_layers)
            if mask is not None:
                _check_mask(emit, mask, x)
            state = emit.state
            state.decode = DecodeBindings(state.rope_cos, state.rope_sin, mask, past_k, past_v)
        return x


def _bind_tables(emit: Emit) -> None:
    """Bind the inputs that hold rope tables, unless a stage wrote the registers or no such input is declared."""
    if emit.state.rope_cos is None and not TABLES.isdisjoint(emit.state.inputs):
        rows = [emit.flow_input(name) for name in ("rope_cos", "rope_sin")]
        emit.state.rope_cos, emit.state.rope_sin = (row[None] if row.ndim == 2 else row for row in rows)


def _check_tables(emit: Emit, x: FlowValue) -> None:
    rows = emit.state.rope_cos
    if rows is not None and (rows.ndim not in (2, 3) or rows.type.shape[-2] != x.type.shape[1]):
        raise ShapeError(
            f"{emit.path}: the rope tables are {rows.type} for {x.type.shape[1]} new tokens; expected one row for "
            "each, that of its position: slice them, or let a RopeTables stage make them"
        )


def _bind_past(emit: Emit, x: FlowValue, layers: int) -> list[tuple[FlowValue, ...]]:
    """Return the cached keys, then the cached values, of every layer: for the rows of `x`, all of as many tokens."""
    first = emit.flow_input("past_k_0").type
    for name in (f"past_{kind}_{i}" for i in range(layers) for kind in "kv"):
        past = emit.flow_input(name)
        if past.ndim != 3 or not is_float(past.dtype) or past.type.shape[0] != x.type.shape[0]:
            raise ShapeError(
                f"{emit.path}: input {name} is {past.type}; expected floats [{x.type.shape[0]}, P, K·D]: keys or "
                "values of P earlier tokens"
            )
        if past.type.shape[1] != first.shape[1]:
            raise ShapeError(
                f"{emit.path}: input {name} is {past.type}, past_k_0 is {first}: "
                "expected as many cached tokens in every layer"
            )
    return [tuple(emit.flow_input(f"past_{kind}_{i}") for i in range(layers)) for kind in "kv"]


def _check_mask(emit: Emit, mask: FlowValue, x: FlowValue) -> None:
    """The mask covers cached and new tokens."""
    keys = emit.flow_input("past_k_0").type.shape[1] + x.type.shape[1]
    if mask.ndim != 2 or mask.type.shape[1] != keys:
        raise ShapeError(
            f"{emit.path}: input mask is {mask.type}; expected [{x.type.shape[0]},{keys}]: cached and new tokens, such "
            "as ('batch', 'past + seq')"
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


def check_cached(emit: Emit, index: int, stage: str) -> None:
    """Layer `index` has a cache: BindDecodeInputs bound it, or without that stage the flow is `explicit` as a whole."""
    if emit.state.program != "explicit":
        raise GraphError(f"{emit.path}: {stage} reads cached keys: put BindDecodeInputs before it")
    bound = 0 if emit.state.decode is None else len(emit.state.decode.past_k)
    if index < 0 or bound and index >= bound:
        raise GraphError(f"{emit.path}: {stage} of layer {index}, and BindDecodeInputs bound {bound} layers")


def cached(emit: Emit, index: int, new: list[FlowValue]) -> list[FlowValue]:
    """The cached keys and values of layer `index`, in front of the `new` ones `[B, S, K·D]`."""
    past = []
    for kind, x in zip("kv", new, strict=True):
        name, (batch, _, width) = f"past_{kind}_{index}", x.type.shape
        past.append(emit.input(name, (batch, "past", width)))
        if past[-1].type.shape[2] != width:
            raise ShapeError(
                f"{emit.path}: input {name} is {past[-1].type}, the new ones are {x.type}: expected width {width}, K·D"
            )
    return past


@dataclass(frozen=True)
class SelfAttnDecode:
    """SelfAttnPrefill with cached keys and values in front of the new ones: normalised `[B,S,H]` → `[B,S,N·D]`.

    `K' = concat(past_k, rope(x Wk))`, `V' = concat(past_v, x Wv)`; query i of S reads the keys up to P + i, or the
    last w of those in a sliding window, in which keys that the mask drops take no place. Side outputs
    `kv.{layer}.k` and `kv.{layer}.v` `[B, P+S, K·D]`, which `kv_out` collects.
    """

    spec: LayerSpec
    layer: int
    use_custom_mask: bool = False
    kv_out: SideOutputs | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, mask = emit.require(value, "SelfAttnDecode"), mask_kind(self.spec.mask)

        def attend(q: FlowValue, k: FlowValue, v: FlowValue) -> FlowValue:
            past, keep = cached(emit, self.layer, [k, v]), self._keep(emit)
            block = hir.GrowingAttention(self.spec.block(mask), keep=bool(keep))
            context, grown_k, grown_v = emit.add_all(block, q, k, v, *past, *keep, *sinks(emit, self.spec))
            side_outputs(emit, f"kv.{self.layer}", grown_k, grown_v, self.kv_out)
            return context

        with emit.scope("self_attn"):
            check_cached(emit, self.layer, "SelfAttnDecode")
            if mask.kind not in ("causal", "sliding_window"):
                raise GraphError(
                    f"{emit.path}: mask {mask}; decode is causal or in a sliding window; use_custom_mask adds a keep "
                    "mask"
                )
            return Heads(emit, self.spec, x).attention("SelfAttnDecode", attend)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Keys and values `[B, P+S, K·D]`."""
        past = emit.flow_input(f"past_k_{self.layer}").type.shape[1]
        return KvCacheContract.packed(hidden, self.spec.num_kv_heads * self.spec.head_dim, past)

    def _keep(self, emit: Emit) -> list[FlowValue]:
        """The keep mask where there is one."""
        mask = emit.optional_input("mask") if self.use_custom_mask else None
        if mask is None:
            return []
        if emit.state.decode is not None and emit.state.decode.mask is None:
            raise GraphError(
                f"{emit.path}: use_custom_mask, and no mask is bound: BindDecodeInputs(…, use_custom_mask=True)"
            )
        return [mask]
