"""Stages that contain stages: Named, Sequence, Repeat, Custom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlx_jax.blocks.contracts import BlockStage as BlockStage
from rlx_jax.blocks.contracts import run_stage
from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.types import tensor_type
from rlx_jax.trace.boundaries import run_as_block
from rlx_jax.trace.checks import check_count, check_takes
from rlx_jax.trace.emit import Emit, FlowValue


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
