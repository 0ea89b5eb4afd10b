"""One request in flight: its rows on the device, its tokens block by block on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import NumericsError
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, DecodeLoop, ReadPrompt, Rows, start_rows
from rlx_jax.generate.requests import pad_rows
from rlx_jax.generate.sampler import Knobs, Sampler
from rlx_jax.model import CompiledModel
from rlx_jax.state import State

MAX_ENDS = 8  # ids that end a row, padded to this many so that their number compiles nothing


@dataclass(frozen=True)
class Plan:
    """What a request asks for, checked: sizes, how to choose, when to stop.

    Attributes:
        width: tokens that prompts are padded to.
        slots: of the cache.
        budget: new tokens of each row, at least 1.
        steps: tokens that one dispatch of the loop gives.
        early: see `DecodeLoop`.
    """

    sampler: Sampler
    ends: tuple[int, ...]
    seed: int
    width: int
    slots: int
    budget: int
    steps: int
    early: bool


def generate(model: CompiledModel, vocab_size: int, prompts: Sequence[Sequence[int]], plan: Plan) -> Generation:
    """Read the prompts, each with at least one token, and choose the first new one of each."""
    method, knobs = plan.sampler.method(vocab_size), plan.sampler.knobs(vocab_size)
    ids = model.compiler.flow.inputs[0].name
    prefill, extend = (replace(model, program=program) for program in ("prefill", "extend"))
    size = -(-max(len(plan.ends), 1) // MAX_ENDS) * MAX_ENDS
    ends = np.full(size, -1, np.int32)
    ends[: len(plan.ends)] = plan.ends
    knobs, ends = jax.device_put((knobs, ends))  # once, not with every block
    batch = len(prompts)
    inputs = {
        "tokens": pad_rows(prompts, plan.width),
        "lengths": np.array([len(p) for p in prompts], np.int32),
        "rows": start_rows(batch, plan.budget, method, vocab_size, plan.seed),
        "knobs": knobs,
        "ends": ends,
    }
    around = ReadPrompt(ids, method)
    state = prefill.init_state(batch, plan.slots)
    (tokens, rows), state = prefill.run_around(around, {"batch": batch, "seq": plan.width}, inputs, state)
    loop = DecodeLoop(ids, method, plan.steps, plan.early)
    return Generation(extend, loop, knobs, ends, plan.budget, rows, state, tokens)


@dataclass(eq=False)
class Generation:
    """Tokens of a request, block by block: `[B, n]` int32, `STOPPED` where a row had ended before.

    The next block is computed while the host looks at the last one.
    """

    extend: CompiledModel
    loop: DecodeLoop
    knobs: Knobs
    ends: Any
    budget: int
    rows: Rows
    state: State
    tokens: jax.Array

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        done = 0
        while True:
            tokens, rows = self.tokens, self.rows
            last = done + tokens.shape[1] >= self.budget
            if not last:
                self._advance()
            block = np.asarray(tokens)
            _check_finite(block, done)
            yield block
            if last or not np.asarray(rows.running).any():
                return
            done += block.shape[1]

    def stop(self, rows: Iterable[int]) -> None:
        """End rows that the host has seen enough of."""
        running = np.asarray(self.rows.running).copy()
        running[list(rows)] = False
        self.rows = replace(self.rows, running=running)

    def _advance(self) -> None:
        inputs = {"rows": self.rows, "knobs": self.knobs, "ends": self.ends}
        sizes = {"batch": len(self.rows.ids), "seq": 1}
        (self.tokens, self.rows), self.state = self.extend.run_around(self.loop, sizes, inputs, self.state)


def _check_finite(block: np.ndarray[Any, Any], step: int) -> None:
    rows, columns = np.nonzero(block == NOT_FINITE)
    if len(rows):
        raise NumericsError(
            f"the logits of step {step + int(columns.min())} are not finite in rows {rows[:8].tolist()}"
        )


def append(new: list[list[int]], block: np.ndarray[Any, Any]) -> None:
    """Add a block to the new tokens of each row."""
    for ids, row in zip(new, block, strict=True):
        ids.extend(int(t) for t in row if t != STOPPED)
