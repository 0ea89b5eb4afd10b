"""A pytest plugin that makes one stage wrong: `RLX_PERTURB=RmsNorm pytest -p tests.perturbed …`.

What the stage returns is scaled and shifted, or, where it lets the active value pass, whatever it wrote: registers,
streams, side outputs, the value that it remembers. A test of that stage has to notice.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from rlx_jax import blocks
from rlx_jax.ir.types import is_float
from rlx_jax.trace.emit import Emit, FlowState, FlowValue


def wrong(emit: Emit, value: FlowValue) -> FlowValue:
    """Another value of the same type: no norm behind it takes the difference out again, and no mask keeps."""
    if not is_float(value.dtype):
        return emit.zeros_like(value)
    return value * 0.4 + 0.01


def written(state: FlowState) -> Iterator[tuple[Any, Any, FlowValue]]:
    """Every place of the registers that holds a value: where, under which key, and the value."""
    for f in fields(state):
        held = getattr(state, f.name)
        if isinstance(held, FlowValue):
            yield state, f.name, held
        elif isinstance(held, dict) and f.name != "inputs":
            yield from ((held, key, value) for key, value in held.items() if isinstance(value, FlowValue))


def perturb(emits: Callable[..., Any]) -> Callable[..., Any]:
    """The stage's `emit`, whose effect is wrong."""

    @functools.wraps(emits)
    def emit_wrong(self: Any, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        before = {(id(place), key): held for place, key, held in written(emit.state)}
        out: FlowValue | None = emits(self, emit, value)
        if out is not None and out is not value:
            return wrong(emit, out)
        for place, key, held in list(written(emit.state)):
            if before.get((id(place), key)) is not held:
                if isinstance(place, dict):
                    place[key] = wrong(emit, held)
                else:
                    setattr(place, key, wrong(emit, held))
        return out

    return emit_wrong


def pytest_configure(config: Any) -> None:
    """Patch the stage that the environment names."""
    stage: Any = getattr(blocks, os.environ["RLX_PERTURB"])
    stage.emit = perturb(stage.emit)
