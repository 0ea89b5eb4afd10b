"""Names that only the specification uses: one table of aliases and small constructors, exported by `rlx_jax.blocks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx_jax.blocks.control import Custom
from rlx_jax.blocks.streams import DualStream
from rlx_jax.trace.emit import Emit, FlowValue

StageFunction = Callable[[Emit, Any], FlowValue | None]

FlowCtx = Emit
dual_stream_stage = DualStream


def plugin(fn: StageFunction) -> Custom:
    """Return the stage of a function `(emit, value) → value`."""
    return Custom(fn)


def plugin_named(name: str, fn: StageFunction) -> Custom:
    """Return the same with a segment in the block path."""
    return Custom(fn, name)


class PluginStage:
    """The two constructors of a Custom stage."""

    new = staticmethod(plugin)
    named = staticmethod(plugin_named)
