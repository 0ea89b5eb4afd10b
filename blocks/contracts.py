"""What stages promise of themselves, and the one place that holds them to it.

A stage needs only `emit`. Attention stages also say what they would keep in a cache, feed-forward stages how wide they
are inside, norms their epsilon; `run_stage`, through which all stages of a flow run, holds the first two against what
the stage has written, and `ModelFlow.contracts` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Node
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.trace.boundaries import run_as_block
from rlx_jax.trace.emit import Emit, FlowValue

# -- what a stage leaves -------------------------------------------------------------------------


@dataclass(frozen=True)
class StageArtifacts:
    """What a layer leaves: the type of the active value, and of each side output by name."""

    hidden: TensorType
    side_outputs: tuple[tuple[str, TensorType], ...] = ()

    @staticmethod
    def hidden_only(hidden: TensorType) -> StageArtifacts:
        """Without side outputs."""
        return StageArtifacts(hidden)

    def with_side(self, name: str, side: TensorType) -> StageArtifacts:
        """And one more side output."""
        return StageArtifacts(self.hidden, (*self.side_outputs, (name, side)))


@dataclass(frozen=True)
class KvCacheContract:
    """The keys and values of one attention, `[B, T, K·D]` each: T keys seen, K key/value heads of width D."""

    k: TensorType
    v: TensorType

    @staticmethod
    def packed(hidden: TensorType, width: int, past: DimLike | None = None) -> KvCacheContract:
        """Both of `width` K·D, for the tokens of a hidden value `[B, S, H]` behind `past` cached ones."""
        batch, seq = hidden.shape[:2]
        keys = seq if past is None else past + seq
        both = TensorType((batch, keys, width), hidden.dtype)
        return KvCacheContract(both, both)


@runtime_checkable
class LayerStage(Protocol):
    """A stage that reports what it leaves; `BlockAsLayer` makes one of any stage."""

    @property
    def name(self) -> str: ...
    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
        """Return the value and what the stage leaves."""
        ...


@runtime_checkable
class AttentionStage(Protocol):
    """A stage with attention over a cache that it could have."""

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """What it keeps for an input `[B, S, H]`."""
        ...


@runtime_checkable
class FfnStage(Protocol):
    """A feed-forward stage."""

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """The shape inside, `[…, F]`, for an input `[…, H]`."""
        ...


@runtime_checkable
class NormStage(Protocol):
    """A norm."""

    @property
    def eps(self) -> float: ...
    @property
    def norm(self) -> str:
        """`rms` or `layer`."""
        ...


@dataclass(frozen=True)
class StageContract:
    """What one stage of a flow promised, and where it stands."""

    path: str
    stage: str
    artifacts: StageArtifacts
    cache: KvCacheContract | None = None
    intermediate: tuple[DimLike, ...] | None = None
    eps: float | None = None


class BlockStage(Protocol):
    """What a stage is: it writes HIR and says what the active value is next (None: unchanged kinds say so)."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None: ...


# -- holding it to that --------------------------------------------------------------------------


def emit_layer(stage: BlockStage, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
    """Run a stage as a layer: its value, or its input where it returns none, and what it leaves.

    The side outputs are those that it gave to `emit.output`.
    """
    before = set(emit.state.outputs)
    out = stage.emit(emit, value)
    found = value if out is None else out
    sides = tuple((name, side.type) for name, side in emit.state.outputs.items() if name not in before)
    return found, StageArtifacts(found.type, sides)


def emit_attention(
    stage: AttentionStage, emit: Emit, value: FlowValue
) -> tuple[FlowValue, StageArtifacts, KvCacheContract]:
    """Run an attention stage; return its value, what it leaves, and what it would keep in a cache."""
    layer: Any = stage
    return *emit_layer(layer, emit, value), stage.cache_contract(emit, value.type)


def run_stage(stage: BlockStage, emit: Emit, value: FlowValue | None) -> FlowValue | None:
    """Run a stage of a flow, and hold it to what it promises.

    Raises:
        GraphError: it keeps or computes other shapes than it says; the message names it and both.
    """
    return run_as_block(emit, lambda active: _run(stage, emit, active), value)


def _run(stage: BlockStage, emit: Emit, value: FlowValue | None) -> FlowValue | None:
    """Run a stage and compare what it writes with what it promises."""
    promises = isinstance(stage, AttentionStage | FfnStage | NormStage) and value is not None
    start, listed = len(emit.builder.nodes), len(emit.state.contracts)
    with emit.stage():
        if not promises or value is None:
            return stage.emit(emit, value)
        hidden = value.type
        out, artifacts = emit_layer(stage, emit, value)
    written = emit.builder.nodes[start:]
    name = type(stage).__name__
    cache = stage.cache_contract(emit, hidden) if isinstance(stage, AttentionStage) else None
    inside = stage.intermediate_shape(emit, hidden) if isinstance(stage, FfnStage) else None
    if cache is not None:
        found = list(kept(emit, written))
        if cache not in found:
            promised, *others = (f"{c.k}, {c.v}" for c in (cache, *found))
            writes = " and ".join(others) or "no attention"
            raise GraphError(f"{_path(written)}: {name} promises a cache {promised}, and writes {writes}")
    if inside is not None and not any(t.shape == inside for node in written for t in node.types):
        raise GraphError(f"{_path(written)}: {name} promises to be {list(inside)} inside, and writes no such value")
    if cache is not None and any(inner.cache for inner in emit.state.contracts[listed:]):
        return out  # the attention inside is listed by itself
    eps = stage.eps if isinstance(stage, NormStage) else None
    emit.state.contracts.append(StageContract(_path(written), name, artifacts, cache, inside, eps))
    return out


def kept(emit: Emit, nodes: list[Node]) -> Iterator[KvCacheContract]:
    """The keys and values of every attention among `nodes`."""
    for node in nodes:
        op = node.op
        if isinstance(op, hir.Attention):
            k, v = (emit.builder.type(value) for value in node.inputs[1:3])
            yield KvCacheContract(k, v)
        elif isinstance(op, hir.GrowingAttention):
            yield KvCacheContract(*node.types[1:3])
        elif isinstance(op, hir.LlamaDecoderBlock):
            yield KvCacheContract.packed(emit.builder.type(node.inputs[0]), op.kv_heads * op.head_dim)


def _path(nodes: list[Node]) -> str:
    """The block path that most of the nodes share."""
    paths = [node.origin.path for node in nodes if node.inputs and not isinstance(node.op, Boundary)]
    shared = paths[0] if paths else ()
    for path in paths:
        shared = shared[: next((i for i, (a, b) in enumerate(zip(shared, path, strict=False)) if a != b), len(path))]
    return path_text(shared)


@dataclass(frozen=True)
class BlockAsLayer:
    """Any stage under the interface of a layer: `name` is `block`, and `emit_layer` says what it leaves."""

    block: BlockStage
    name: str = "block"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        return self.block.emit(emit, value)

    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
        """The value and what the block leaves; a block that returns nothing yields its input."""
        return emit_layer(self.block, emit, value)
