"""Streams: values kept under a name, for models that carry more than one (image and text tokens, a skip)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlx_jax.blocks.control import Custom
from rlx_jax.errors import GraphError
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = ["DualStream", "LoadStream", "StoreStream", "bind_inputs_to_streams"]


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
