"""Stages that contain other stages, streams, and the contracts by which stages describe themselves.

A stage needs only `emit`. Attention stages also declare their cache, feed-forward stages their inner width and norms
their epsilon. Every stage of a flow runs through `run_stage`, which checks the first two against the nodes that the
stage wrote; `BuiltModel.contracts` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError, check_integer, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Node
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import DimLike, TensorType, tensor_type
from rlx_jax.trace.captures import run_as_block
from rlx_jax.trace.checks import check_signature
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = [
    "AttentionStage", "BlockAsLayer", "BlockStage", "Custom", "DualStream", "FfnStage", "KvCacheContract",
    "LayerStage", "LoadStream", "Named", "NormStage", "Repeat", "Sequence", "SideOutput", "StageArtifacts",
    "StageContract", "StoreStream", "bind_inputs_to_streams", "emit_attention", "emit_layer",
]  # fmt: skip

# -- contracts of stages -------------------------------------------------------------------------


@dataclass(frozen=True)
class StageArtifacts:
    """Types of what a layer produces: the active value, and each side output by name."""

    hidden: TensorType
    side_outputs: tuple[tuple[str, TensorType], ...] = ()

    @staticmethod
    def hidden_only(hidden: TensorType) -> StageArtifacts:
        """Return artifacts without side outputs."""
        return StageArtifacts(hidden)

    def with_side(self, name: str, side: TensorType) -> StageArtifacts:
        """Return these artifacts with one more side output."""
        return StageArtifacts(self.hidden, (*self.side_outputs, (name, side)))


@dataclass(frozen=True)
class KvCacheContract:
    """Types of the keys and values of one attention, `[B, T, K·D]` each.

    T is the number of cached and new tokens, K the number of key/value heads, D their width.
    """

    k: TensorType
    v: TensorType

    @staticmethod
    def packed(hidden: TensorType, width: int, past: DimLike | None = None) -> KvCacheContract:
        """Return the contract for keys and values of `width` K·D.

        Args:
            hidden: type of the hidden value `[B, S, H]`.
            width: K·D.
            past: number of cached tokens that precede the S new ones; None for no cache.
        """
        batch, seq = hidden.shape[:2]
        num_keys = seq if past is None else past + seq
        kv_type = TensorType((batch, num_keys, width), hidden.dtype)
        return KvCacheContract(kv_type, kv_type)


@runtime_checkable
class LayerStage(Protocol):
    """A stage that reports what it produces; `BlockAsLayer` adapts any stage to this interface."""

    @property
    def name(self) -> str: ...
    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
        """Return the value and the types of what the stage produces."""
        ...


@runtime_checkable
class AttentionStage(Protocol):
    """A stage with attention, which declares the cache that it would need."""

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """Return the keys and values to cache for an input `[B, S, H]`."""
        ...


@runtime_checkable
class FfnStage(Protocol):
    """A feed-forward stage, which declares its inner width."""

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """Return the inner shape `[…, F]` for an input `[…, H]`."""
        ...


@runtime_checkable
class NormStage(Protocol):
    """A norm, which declares its epsilon and its kind."""

    @property
    def eps(self) -> float: ...
    @property
    def norm(self) -> str:
        """The kind of norm, `rms` or `layer`."""
        ...


@dataclass(frozen=True)
class StageContract:
    """The contract that one stage of a flow declared, and its block path."""

    path: str
    stage: str
    artifacts: StageArtifacts
    cache: KvCacheContract | None = None
    intermediate: tuple[DimLike, ...] | None = None
    eps: float | None = None


class BlockStage(Protocol):
    """Interface of every stage: write HIR and return the next active value, or None to have no active value."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None: ...


# -- running stages and checking their contracts -------------------------------------------------


def emit_layer(stage: BlockStage, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
    """Run a stage as a layer.

    Returns:
        The stage's value, or its input where the stage returns None, and its artifacts. Side outputs are the values
        that the stage passed to `emit.output`.
    """
    known_outputs = set(emit.state.outputs)
    result = stage.emit(emit, value)
    active = value if result is None else result
    sides = tuple((name, side.type) for name, side in emit.state.outputs.items() if name not in known_outputs)
    return active, StageArtifacts(active.type, sides)


def emit_attention(
    stage: AttentionStage, emit: Emit, value: FlowValue
) -> tuple[FlowValue, StageArtifacts, KvCacheContract]:
    """Run an attention stage and return its value, its artifacts and its cache contract."""
    layer: Any = stage
    return *emit_layer(layer, emit, value), stage.cache_contract(emit, value.type)


def run_stage(stage: BlockStage, emit: Emit, value: FlowValue | None) -> FlowValue | None:
    """Run a stage of a flow and check the contract that it declares.

    Raises:
        GraphError: the cache or the inner shape differs from the declared one; the message names the stage and both.
    """
    return run_as_block(emit, lambda active: _run_with_contract(stage, emit, active), value)


def _run_with_contract(stage: BlockStage, emit: Emit, value: FlowValue | None) -> FlowValue | None:
    """Run a stage and compare the nodes that it writes with its contract."""
    # What `AttentionStage`, `FfnStage` and `NormStage` add to a stage: `isinstance` of a protocol takes longer.
    cache_of, inner_of = getattr(stage, "cache_contract", None), getattr(stage, "intermediate_shape", None)
    eps = getattr(stage, "eps", None) if hasattr(stage, "norm") else None
    start, num_contracts = len(emit.builder.nodes), len(emit.state.contracts)
    with emit.stage():
        if value is None or cache_of is inner_of is eps is None:
            return stage.emit(emit, value)
        hidden = value.type
        out, artifacts = emit_layer(stage, emit, value)
    written = emit.builder.nodes[start:]
    name = type(stage).__name__
    cache = cache_of(emit, hidden) if cache_of else None
    inner_shape = inner_of(emit, hidden) if inner_of else None
    if cache is not None:
        caches = list(cache_contracts(emit, written))
        if cache not in caches:
            expected, *actual = (f"{c.k}, {c.v}" for c in (cache, *caches))
            written_caches = " and ".join(actual) or "no attention"
            raise GraphError(f"{_path(written)}: {name} declares a cache {expected}, but writes {written_caches}")
    if inner_shape is not None and not any(t.shape == inner_shape for node in written for t in node.types):
        raise GraphError(f"{_path(written)}: {name} writes no value of its inner shape {list(inner_shape)}")
    if cache is not None and any(inner.cache for inner in emit.state.contracts[num_contracts:]):
        return out  # the attention inside is listed by itself
    emit.state.contracts.append(StageContract(_path(written), name, artifacts, cache, inner_shape, eps))
    return out


def cache_contracts(emit: Emit, nodes: list[Node]) -> Iterator[KvCacheContract]:
    """Yield the types of the keys and values of every attention among `nodes`."""
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
    """Return the longest block path that contains all of the nodes.

    Parameters, inputs and block boundaries do not count: their paths may lie outside of the stage.
    """
    paths = [node.origin.path for node in nodes if node.inputs and not isinstance(node.op, Boundary)]
    shared = paths[0] if paths else ()
    for path in paths:
        shared = shared[: next((i for i, (a, b) in enumerate(zip(shared, path, strict=False)) if a != b), len(path))]
    return path_text(shared)


@dataclass(frozen=True)
class BlockAsLayer:
    """Adapter that gives any stage the interface of a LayerStage."""

    block: BlockStage
    name: str = "block"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        return self.block.emit(emit, value)

    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
        """Return the value and the artifacts of the block; a block that returns None yields its input."""
        return emit_layer(self.block, emit, value)


def check_stages(stages: Iterable[BlockStage], where: str) -> tuple[BlockStage, ...]:
    """Return the stages as a tuple, after checking that each has an `emit`.

    Raises:
        GraphError: `stages` is not iterable, or one of them is a class or has no `emit`; the message begins with
            `where`.
    """
    if not isinstance(stages, Iterable):
        raise GraphError(f"{where}: expected a list of stages, got {type(stages).__name__}")
    checked = tuple(stages)
    for stage in checked:
        if isinstance(stage, type):
            raise GraphError(f"{where}: {stage.__name__} is a class, not a stage: make one, {stage.__name__}(...)")
        if not callable(getattr(stage, "emit", None)):
            hint = "; blocks.Custom(fn) wraps a function (emit, x), in which emit.jax(f, x) calls a JAX function"
            raise GraphError(f"{where}: {shown(stage)} is not a stage: no emit(emit, value){hint * callable(stage)}")
    return checked


@dataclass(frozen=True)
class Named:
    """Add a segment to the block path of everything inside.

    A layer of a Repeat with the name `layer{i}` adds no segment, because `layers.{i}` already has its number. With
    `again` the stage continues the block of an earlier stage with this name; an output projection that follows
    attention belongs to the attention's block in this way.
    """

    name: str
    inner: BlockStage
    again: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        numbers = [segment for segment in emit.builder.origin.path if isinstance(segment, int)]
        if numbers and self.name == f"layer{numbers[-1]}":
            return run_stage(self.inner, emit, value)
        with emit.stage(), emit.scope(self.name, again=self.again):
            return run_stage(self.inner, emit, value)


@dataclass(frozen=True)
class Sequence:
    """Run stages in order, each on the value of the one before."""

    stages: tuple[BlockStage, ...]

    def __init__(self, stages: Iterable[BlockStage]) -> None:
        object.__setattr__(self, "stages", check_stages(stages, "Sequence"))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        for stage in self.stages:
            value = run_stage(stage, emit, value)
        return value


@dataclass(frozen=True)
class Repeat:
    """Run `count` layers, layer i built by `stage_for_index(i)`; their block paths are `{name}.{i}`.

    Consecutive layers that differ only in their parameters become one region of the compiled program. A layer that
    differs in more splits the stack into several regions.
    """

    count: int
    stage_for_index: Callable[[int], BlockStage]
    name: str = "layers"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        check_integer(f"{emit.path}: Repeat: the first argument, the number of layers,", self.count, 0, GraphError)
        if not callable(self.stage_for_index):
            type_name = type(self.stage_for_index).__name__
            raise GraphError(f"{emit.path}: Repeat takes a function index → stage, got {type_name}: lambda i: ...")
        is_nested = emit.in_repeat
        emit.in_repeat = True
        node_bounds = [len(emit.builder.nodes)]
        with emit.stage(), emit.scope(self.name):
            for index in range(self.count):
                value = run_as_block(emit, partial(self._layer, index, emit), value)
                node_bounds.append(len(emit.builder.nodes))
        emit.in_repeat = is_nested
        if not is_nested:  # a repeat inside a repeat is part of the outer body
            emit.state.repeats.append(node_bounds)
        return value

    def _layer(self, index: int, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        """Build and run layer `index`, and return its value."""
        stage = self.stage_for_index(index)
        if not callable(getattr(stage, "emit", None)):
            raise GraphError(
                f"{emit.path}: the function that makes the layers returned {shown(stage)} for layer {index}; expected "
                "a stage (a LayerStack becomes one by .build())"
            )
        with emit.stage(), emit.scope(index):
            return run_stage(stage, emit, value)


@dataclass(frozen=True)
class Custom:
    """Stage of a function `(emit, value) → value`; `name` is its segment of the block path.

    `token_wise` declares that the function computes every token independently of the others. Where the compiler cannot
    prove this it checks it by slicing.
    """

    fn: Callable[[Emit, Any], FlowValue | None]
    name: str | None = None
    token_wise: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        builder = emit.builder
        name = self.name or getattr(self.fn, "__name__", "custom").replace("<lambda>", "custom")
        with builder.origin_scope(replace(builder.origin, token_wise=self.token_wise)), emit.stage(), emit.scope(name):
            check_signature(self.fn, ("emit", "x"), emit.path)
            with emit.user_code():
                out = self.fn(emit, value)
            if out is not None and not isinstance(out, FlowValue):
                raise GraphError(
                    f"{emit.path}: a custom stage returns a FlowValue or None, got {type(out).__name__}; "
                    "emit.constant(array) makes one from a small array, emit.output(name, value) adds outputs"
                )
            if out is None:
                emit.state.last_none_stage = emit.path  # a later stage that needs a value names this path in its error
            return out


@dataclass(frozen=True)
class SideOutput:
    """Make the result of `inner` the side output `name` of the flow; the active value is unchanged."""

    name: str
    inner: BlockStage

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.stage():
            side = emit.require(self.inner.emit(emit, value), f"SideOutput {self.name}")
        emit.output(self.name, side)
        return value


def check_hidden(emit: Emit, x: FlowValue, shape: tuple[int | str | None, ...] | None, stage: str) -> None:
    """Check a value against the sizes that the user gave a stage.

    Args:
        x: the value.
        shape: expected sizes; None in place of a size accepts any size, None in place of the shape skips the check. A
            number also agrees with a symbolic size that the flow binds to that number.
        stage: name of the stage, for the message.

    Raises:
        ShapeError: the sizes differ; the message has the block path, the stage and both types.
    """
    if shape is None:
        return
    actual = x.type.shape if len(shape) == x.ndim else shape  # of another rank: the comparison below reports it
    sizes = [have if size is None else size for size, have in zip(shape, actual, strict=True)]
    expected = tensor_type(sizes, x.dtype, f"{emit.path}: {stage}")
    bound = x.type.bind(emit.binding).shape
    if any(size not in pair for size, *pair in zip(expected.shape, x.type.shape, bound, strict=True)):
        raise ShapeError(f"{emit.path}: {stage}: the input is {x.type}, but the spec declares {expected}")


@dataclass(frozen=True)
class StoreStream:
    """Store the active value as stream `name`; it remains the active value."""

    name: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "StoreStream")
        emit.set_stream(self.name, x)
        return x


@dataclass(frozen=True)
class LoadStream:
    """Make stream `name` the active value."""

    name: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        return emit.stream(self.name)


@dataclass(frozen=True)
class DualStream:
    """Update two streams by a function: `a, b = fn(emit, a, b)`; the active value is unchanged.

    `name` is a segment of the block path.
    """

    name: str
    stream_a: str
    stream_b: str
    fn: Callable[[Emit, Any, Any], tuple[FlowValue, FlowValue]]

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope(self.name):
            a, b = emit.stream(self.stream_a), emit.stream(self.stream_b)
            with emit.user_code():
                pair = self.fn(emit, a, b)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(v, FlowValue) for v in pair)):
                raise GraphError(f"{emit.path}: the function of a DualStream returns both streams, got {pair!r}")
        emit.set_stream(self.stream_a, pair[0])
        emit.set_stream(self.stream_b, pair[1])
        return value


def bind_inputs_to_streams(pairs: Iterable[tuple[str, str]]) -> Custom:
    """Return a stage that stores declared inputs as streams; the active value is unchanged.

    Args:
        pairs: (name of the input, name of the stream).
    """
    stream_pairs = tuple(pairs)  # `pairs` may be a generator, and a flow may be built more than once

    def bind(emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "bind_inputs_to_streams")
        for name, stream in stream_pairs:
            emit.set_stream(stream, emit.flow_input(name))
        return x

    return Custom(bind, "bind_inputs_to_streams")
