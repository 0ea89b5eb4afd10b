"""Stages that carry a state along the sequence: a step of one's own, and the last tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.recurrence import step_name


@dataclass(frozen=True)
class Recurrent:
    """`state, y_t = step(state, x_t, *params)` along the tokens: x `[B, S, …]` → y `[B, S, …]`.

    `keys` name the weights that the step is given behind the token, each as stored; `init` is the state before the
    first token. See `emit.recurrent`, which takes several values and a learned start too.
    """

    step: Callable[..., Any]
    keys: tuple[str, ...] = ()
    init: Any = field(default=None, kw_only=True)
    unroll: int | None = field(default=None, kw_only=True)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "Recurrent")
        with emit.stage(), emit.scope(step_name(self.step)), emit.users_code():
            y: FlowValue = emit.recurrent(self.step, x, *self.keys, init=self.init, unroll=self.unroll)
        return y


@dataclass(frozen=True)
class CausalWindow:
    """The last `width` tokens up to each, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`."""

    width: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "CausalWindow")
        with emit.stage(), emit.scope("causal_window"):
            return emit.causal_window(x, self.width)
