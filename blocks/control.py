"""Stages that contain stages: Named, Sequence, Repeat, Custom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlx_jax.emit import Emit, FlowValue
from rlx_jax.errors import GraphError, RlxError, shown
from rlx_jax.ir.graph import first_line


class BlockStage(Protocol):
    """What a stage is: it writes HIR and says what the active value is next (None: unchanged kinds say so)."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None: ...


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
            raise GraphError(f"{where}: {shown(stage)} is not a stage: it has no emit(emit, value)")
    return found


@dataclass(frozen=True)
class Named:
    """Add a segment to the block path of everything inside."""

    name: str
    inner: BlockStage

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope(self.name):
            return self.inner.emit(emit, value)


@dataclass(frozen=True)
class Sequence:
    """Stages from left to right."""

    stages: tuple[BlockStage, ...]

    def __init__(self, stages: Iterable[BlockStage]) -> None:
        object.__setattr__(self, "stages", check_stages(stages, "Sequence"))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        for stage in self.stages:
            value = stage.emit(emit, value)
        return value


@dataclass(frozen=True)
class Repeat:
    """`count` layers, layer i made by `stage_for_index(i)`; their path is `{name}.{i}`.

    Layers that differ in their parameters only become one region of the compiled program.
    A `Named` layer is entered without its own segment: the index names it already.
    """

    count: int
    stage_for_index: Callable[[int], BlockStage]
    name: str = "layers"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise GraphError(f"{emit.path}: Repeat of {self.count!r} layers; expected a whole number")
        if not callable(self.stage_for_index):
            found = type(self.stage_for_index).__name__
            raise GraphError(f"{emit.path}: Repeat takes a function index → stage, got {found}: lambda i: ...")
        nested = emit.repeating
        emit.repeating = True
        bounds = [len(emit.builder.nodes)]
        for index in range(self.count):
            stage = self.stage_for_index(index)
            inner = stage.inner if isinstance(stage, Named) else stage
            if not callable(getattr(inner, "emit", None)):
                raise GraphError(
                    f"{emit.path}: layer {index} is {type(inner).__name__}, not a stage "
                    "(a LayerStack becomes one by .build())"
                )
            with emit.scope(self.name, index):
                value = inner.emit(emit, value)
            bounds.append(len(emit.builder.nodes))
        emit.repeating = nested
        if not nested:  # a repeat inside a repeat is part of the outer body
            emit.state.repeats.append(bounds)
        return value


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
        with builder.at(replace(builder.origin, token_wise=self.token_wise)), emit.scope(name):
            try:
                out = self.fn(emit, value)
            except RlxError as error:
                error.locate(emit.path)
                raise
            except Exception as error:
                if "FlowValue" not in str(error):
                    error.add_note(f"in the custom stage {emit.path}")
                    raise
                raise GraphError(
                    f"{emit.path}: {first_line(error)}; a FlowValue takes operators and the functions of emit: "
                    "use emit.jax(fn, value) for JAX functions and emit.constant(array) for small arrays"
                ) from error
            if out is not None and not isinstance(out, FlowValue):
                raise GraphError(f"{emit.path}: a custom stage returns a FlowValue or None, got {type(out).__name__}")
            if out is None:
                emit.state.left_none = emit.path
            return out
