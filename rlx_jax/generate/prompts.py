"""Reading the prompts of a request, part by part, behind nothing or behind a state that holds their first tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.generate.decode import STOPPED, FirstTokens, LogProbs, Rows, StartRows
from rlx_jax.generate.forking import ForkRows, fits, fork_of, moved_state
from rlx_jax.generate.plan import AnyArray, Before, PromptPart, RequestPlan
from rlx_jax.generate.sampler import Knobs
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Variant, state_shardings
from rlx_jax.runtime.state import LENGTH, as_state
from rlx_jax.text.requests import pad_rows


@dataclass(frozen=True)
class Readers:
    """What the programs that read prompts have in common: rows, slots and other sizes, and their variant."""

    model: CompiledModel
    sizes: Mapping[str, int]
    variant: Variant

    def bound(self, widths: Sequence[int], behind: bool = False) -> list[BoundProgram]:
        """The programs for so many tokens each, one after the other: `prefill` first, if there is no state `behind`
        which they read."""
        blocks = [{**self.sizes, "seq": width} for width in widths]
        first = [] if behind else [self.model.as_program("prefill").reader(blocks.pop(0), self.variant)]
        extend = self.model.as_program("extend")
        return [*first, *(extend.bound(block, variant=self.variant) for block in blocks)]


class PromptBlock(NamedTuple):
    """What reading a part of the prompts gives: logits `[B, 1, V]` of the last tokens, the state, and the rows whose
    prompts end there `[B]` bool; hidden states `[B, S, H]` of all tokens, where the program gives them; and how many
    tokens of each prompt were read by then, at most."""

    logits: AnyArray
    state: StateArrays
    now: np.ndarray[Any, Any]
    hidden: AnyArray
    read: int


def prompt_blocks(
    readers: Sequence[BoundProgram], parts: Sequence[PromptPart], prompts: Sequence[Sequence[int]], batch: int,
    beside: Mapping[str, Any], state: StateArrays | None = None,
) -> Iterator[PromptBlock]:  # fmt: skip
    """Read the prompts, part by part, behind the `state`. `beside` is what comes with the tokens. A row that holds
    nothing reads one."""
    ids = readers[0].model.first_input
    filled = [*prompts, *([0] for _ in range(batch - len(prompts)))]
    lengths, live = np.array([len(p) for p in filled]), np.arange(batch) < len(prompts)
    state = {} if state is None else state
    at = 0
    for reader, (width, count) in zip(readers, parts, strict=True):
        new = np.clip(lengths - at, 0, count)
        tokens = pad_rows([p[at : at + count] for p in filled], width)
        (logits, *others), state = reader({ids: tokens, "lengths": new.astype(np.int32), **beside}, state)
        hidden = others[0] if reader.key.hidden else None
        at += count
        yield PromptBlock(logits, state, live & (at - count < lengths) & (lengths <= at), hidden, at)
        beside = {}  # from now on it is in the state


def as_parts(widths: Sequence[int]) -> tuple[PromptPart, ...]:
    """Programs that read as many tokens as they can."""
    return tuple(PromptPart(width, width) for width in widths)


# -- the state that prompts are read behind ----------------------------------------------------


def state_behind(reader: BoundProgram, before: Before) -> StateArrays:
    """The state for the programs that read the rest of the prompts; idle rows hold nothing.

    Raises:
        SessionStateError: somebody consumed it since the request was made.
    """
    as_state(before.arrays).check_alive()
    sizes, model = dict(reader.key.binding), reader.model
    rows, lengths = (np.zeros(sizes["batch"], np.int32) for _ in range(2))
    rows[: len(before.rows)], lengths[: len(before.rows)] = before.rows, before.lengths
    if not before.consumed or not fits(reader, before.arrays) or before.rows != tuple(range(len(before.rows))):
        return moved_state(reader, before.arrays, rows, lengths)
    division = model.programs.division
    template = model.programs.template(reader.key.symbolic)
    at = None if division is None else state_shardings(template, sizes, division)[LENGTH]
    return {**before.arrays, LENGTH: jax.device_put(lengths, at)}


def read_shared(plan: RequestPlan, prompts: Sequence[Sequence[int]], readers: Readers) -> Before:
    """What all prompts begin with, read once."""
    alone = Readers(readers.model, {**readers.sizes, "batch": plan.alone}, replace(readers.variant, hidden=False))
    count = sum(part.tokens for part in plan.shared)
    programs = alone.bound([part.width for part in plan.shared])
    *_, last = prompt_blocks(programs, plan.shared, [prompts[0][:count]], plan.alone, {})
    every = len(prompts)
    return Before(last.state, (0,) * every, (count,) * every, plan.slots)


# -- the first tokens --------------------------------------------------------------------------


class PromptsRead(NamedTuple):
    """The rows, the state after the prompts, the first tokens `[B, 1]`, what is told of them, and hidden states of the
    prompts' parts, if they are asked for; what the plan's mark wants kept of the state.

    With several answers a prompt the state is that of the prompts, and rows and tokens are those of the answers."""

    rows: Rows
    state: StateArrays
    first: AnyArray
    told: LogProbs | None
    hidden: tuple[AnyArray, ...]
    marked: StateArrays | None


def read_prompts(
    readers: Readers, plan: RequestPlan, prompts: Sequence[Sequence[int]], knobs: Knobs, ends: AnyArray
) -> PromptsRead:
    """Read the prompts, and choose the first token of each row."""
    programs = readers.model.programs
    bound = readers.bound([part.width for part in plan.parts], bool(plan.before or plan.shared))
    before = read_shared(plan, prompts, readers) if plan.shared else plan.before
    held = [0] * len(prompts) if before is None else before.lengths
    behind = None if before is None else state_behind(bound[0], before)
    fork = fork_of(plan.batch, plan.answers, len(prompts))
    live = np.arange(plan.batch) < len(prompts) * plan.answers
    rows = start_rows(readers.model, plan, prompts, fork, live)
    first: AnyArray = np.full((plan.batch, 1), STOPPED, np.int32)
    state: StateArrays = {}
    told: LogProbs | None = None
    marked: StateArrays | None = None
    hidden: tuple[AnyArray, ...] = ()
    read = plan.reading["batch"]
    rest = [prompt[count:] for prompt, count in zip(prompts, held, strict=True)]
    for block in prompt_blocks(bound, plan.parts, rest, read, plan.inputs.padded(read), behind):
        state, logits, now = block.state, block.logits, block.now
        hidden += () if block.hidden is None else (block.hidden,)
        if plan.mark is not None and held[0] + block.read == plan.mark.at:
            marked = {name: jnp.copy(state[name]) for name in plan.mark.leaves}
        if not now.any():
            continue
        if plan.answers > 1:
            logits, now = programs.call(ForkRows(0), logits, fork, at=programs.whole), now[fork] & live
        chosen = (logits, rows, now, first, knobs, ends, told)
        first, rows, told = programs.call(FirstTokens(plan.method, plan.top), *chosen, at=programs.whole)
    return PromptsRead(rows, state, first, told, hidden, marked)


def start_rows(
    model: CompiledModel, plan: RequestPlan, prompts: Sequence[Sequence[int]], fork: np.ndarray[Any, Any],
    live: np.ndarray[Any, Any],
) -> Rows:  # fmt: skip
    """The rows of the request, `live` ones, of which each has the tokens of its prompt."""
    seen = np.zeros((plan.batch, len(plan.ends) if plan.method.penalised else 0), bool)
    if plan.method.penalised:
        for row, prompt in zip(np.flatnonzero(live), fork, strict=False):
            seen[row, list(prompts[prompt])] = True
    start = (random_key("seed", plan.seed), live, np.int32(plan.budget), seen)
    rows: Rows = model.programs.call(StartRows(plan.method.draws), *start, at=model.programs.whole)
    return rows
