"""Stages that contain stages, streams, what stages promise of themselves, and the one place that holds them to it.

A stage needs only `emit`. Attention stages also say what they would keep in a cache, feed-forward stages how wide they
are inside, norms their epsilon; `run_stage`, through which all stages of a flow run, holds the first two against what
the stage has written, and `BuiltModel.contracts` lists them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Boundary, Node
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import DimLike, TensorType, tensor_type
from rlx_jax.trace.boundaries import run_as_block
from rlx_jax.trace.checks import check_count, check_takes
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = [
    "AttentionStage", "BlockAsLayer", "BlockStage", "Custom", "DualStream", "FfnStage", "Homogeneous",
    "KvCacheContract", "LayerComposition", "LayerStage", "LoadStream", "Named", "NormStage", "Pair", "Repeat",
    "Sequence", "SideOutput", "Single", "StageArtifacts", "StageContract", "StoreStream", "bind_inputs_to_streams",
    "emit_attention", "emit_layer",
]  # fmt: skip

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


def check_stages(stages: Iterable[BlockStage], where: str) -> tuple[BlockStage, ...]:
    """The stages, each of which has an `emit`.

    Raises:
        GraphError: one has not, or this is no list of stages.
    """
    if not isinstance(stages, Iterable):
        raise GraphError(f"{where}: expected a list of stages, got {type(stages).__name__}")
    found = tuple(stages)
    for stage in found:
        if isinstance(stage, type):
            raise GraphError(f"{where}: {stage.__name__} is a class, not a stage: make one, {stage.__name__}(...)")
        if not callable(getattr(stage, "emit", None)):
            hint = "; blocks.Custom(fn) is one of a function (emit, x), in which emit.jax(f, x) calls one of JAX"
            raise GraphError(
                f"{where}: {shown(stage)} is not a stage: it has no emit(emit, value){hint * callable(stage)}"
            )
    return found


@dataclass(frozen=True)
class Named:
    """Add a segment to the block path of everything inside.

    A layer of a Repeat that is called by its number, `layer3`, adds none: `layers.3` says it already. With `again` the
    block is the one that a stage before has under this name, as a projection behind attention belongs to it.
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
    """Stages from left to right."""

    stages: tuple[BlockStage, ...]

    def __init__(self, stages: Iterable[BlockStage]) -> None:
        object.__setattr__(self, "stages", check_stages(stages, "Sequence"))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        for stage in self.stages:
            value = run_stage(stage, emit, value)
        return value


@dataclass(frozen=True)
class Repeat:
    """`count` layers, layer i made by `stage_for_index(i)`; their path is `{name}.{i}`.

    Layers that differ in their parameters only become one region of the compiled program; around those that differ in
    more, several.
    """

    count: int
    stage_for_index: Callable[[int], BlockStage]
    name: str = "layers"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        check_count(self.count, f"{emit.path}: Repeat: the number of layers, before the layer,", 0)
        if not callable(self.stage_for_index):
            found = type(self.stage_for_index).__name__
            raise GraphError(f"{emit.path}: Repeat takes a function index → stage, got {found}: lambda i: ...")
        nested = emit.repeating
        emit.repeating = True
        bounds = [len(emit.builder.nodes)]
        with emit.stage(), emit.scope(self.name):
            for index in range(self.count):
                value = run_as_block(emit, partial(self._layer, index, emit), value)
                bounds.append(len(emit.builder.nodes))
        emit.repeating = nested
        if not nested:  # a repeat inside a repeat is part of the outer body
            emit.state.repeats.append(bounds)
        return value

    def _layer(self, index: int, emit: Emit, value: FlowValue | None) -> FlowValue | None:
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
    """Any function `(emit, value) → value`. `name` is its segment of the block path.

    `token_wise` says that it treats every token alone; where that cannot be proved it is checked by slicing.
    """

    fn: Callable[[Emit, Any], FlowValue | None]
    name: str | None = None
    token_wise: bool = False

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        builder = emit.builder
        name = self.name or getattr(self.fn, "__name__", "custom").replace("<lambda>", "custom")
        with builder.at(replace(builder.origin, token_wise=self.token_wise)), emit.stage(), emit.scope(name):
            check_takes(self.fn, ("emit", "x"), emit.path)
            with emit.users_code():
                out = self.fn(emit, value)
            if out is not None and not isinstance(out, FlowValue):
                raise GraphError(
                    f"{emit.path}: a custom stage returns a FlowValue or None, got {type(out).__name__}; "
                    "emit.constant(array) makes one of a small array, emit.output(name, value) names further outputs"
                )
            if out is None:
                emit.state.left_none = emit.path
            return out


@dataclass(frozen=True)
class SideOutput:
    """What `inner` makes of the active value is the side output `name` of the flow; the active value stays."""

    name: str
    inner: BlockStage

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.stage():
            found = emit.require(self.inner.emit(emit, value), f"SideOutput {self.name}")
        emit.output(self.name, found)
        return value


def check_hidden(emit: Emit, x: FlowValue, shape: tuple[int | str | None, ...] | None, stage: str) -> None:
    """Hold a value against the sizes that a stage was given; None is any size.

    A number agrees with a symbolic size that the flow is bound to.

    Raises:
        ShapeError: block path, stage, both types.
    """
    if shape is None:
        return
    known = x.type.shape if len(shape) == x.ndim else shape
    sizes = [have if size is None else size for size, have in zip(shape, known, strict=True)]
    want = tensor_type(sizes, x.dtype, f"{emit.path}: {stage}")
    bound = x.type.bind(emit.binding).shape
    if any(size not in pair for size, *pair in zip(want.shape, x.type.shape, bound, strict=True)):
        raise ShapeError(f"{emit.path}: {stage}: the input is {x.type}, its spec says {want}")


# The stage of a layer, from its name and its number among the layers of that name.
Build = Callable[[str, int], BlockStage]


def structural_hash(composition: LayerComposition) -> int:
    """64 bits, equal for equal compositions in every process: of the SHA-256 of how the composition is written."""
    return int.from_bytes(hashlib.sha256(repr(composition).encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Single:
    """One layer."""

    name: str

    def depth_hint(self) -> int:
        """How many layers there are."""
        return 1

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """`build(name, 0)`, without a segment of its own in the block path."""
        return build(self.name, 0)


@dataclass(frozen=True)
class Homogeneous:
    """`count` layers of one kind; block paths `{layer_name}.{i}`."""

    layer_name: str
    count: int

    def depth_hint(self) -> int:
        """How many layers there are."""
        return self.count

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """A Repeat, so that layers which differ in their parameters only become one region."""
        return Repeat(self.count, partial(build, self.layer_name), self.layer_name)


@dataclass(frozen=True)
class Pair:
    """One composition after another."""

    head: LayerComposition
    tail: LayerComposition

    def depth_hint(self) -> int:
        """How many layers there are."""
        return self.head.depth_hint() + self.tail.depth_hint()

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """A Sequence of both."""
        return Sequence([self.head.to_flow_stage(build), self.tail.to_flow_stage(build)])


LayerComposition = Single | Homogeneous | Pair


@dataclass(frozen=True)
class StoreStream:
    """Keep the active value as stream `name`; it stays active."""

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
    """`a, b = fn(emit, a, b)` on two streams; the active value passes by. `name` is a segment of the block path."""

    name: str
    stream_a: str
    stream_b: str
    fn: Callable[[Emit, Any, Any], tuple[FlowValue, FlowValue]]

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope(self.name):
            a, b = emit.stream(self.stream_a), emit.stream(self.stream_b)
            with emit.users_code():
                pair = self.fn(emit, a, b)
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(v, FlowValue) for v in pair)):
                raise GraphError(f"{emit.path}: a DualStream's function returns both streams, got {pair!r}")
        emit.set_stream(self.stream_a, pair[0])
        emit.set_stream(self.stream_b, pair[1])
        return value


def bind_inputs_to_streams(pairs: Iterable[tuple[str, str]]) -> Custom:
    """Keep declared inputs as streams: pairs (input, stream). The active value passes by."""
    bound = tuple(pairs)

    def bind(emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "bind_inputs_to_streams")
        for name, stream in bound:
            emit.set_stream(stream, emit.flow_input(name))
        return x

    return Custom(bind, "bind_inputs_to_streams")
