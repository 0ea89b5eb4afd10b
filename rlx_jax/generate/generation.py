"""The generation loop: read the prompts of a request, then take its tokens block by block from the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.errors import NumericsError
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, FirstTokens, LogProbs, Rows, new_rows
from rlx_jax.generate.decode_state import fits, fork_of, fork_rows, moved_state
from rlx_jax.generate.request import Before, LanguageModel, Request, settled, stopped_at
from rlx_jax.generate.request_plan import RequestPlan, plan_request, prompt_blocks
from rlx_jax.generate.speculative import OWN
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.runtime.report import RequestReport, Speculated
from rlx_jax.runtime.sequence_state import LENGTH, as_state

AnyArray = Any


@dataclass(frozen=True)
class Completion:
    """One answer, with what the model says of it: natural logarithms of probabilities, before a sampler changes them.

    Attributes:
        text: up to the first stop string; None where the prompt was ids.
        tokens: all new ids.
        token_logprobs: of each of them.
        top: for each of them the likeliest ids at its place with their log-probabilities, the likeliest first.
    """

    text: str | None
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass
class NewTokens:
    """The new tokens of each row, as the host has them so far. `grown` are rows that the last block added to, and how
    many tokens; `failed` has the step at which a row's logits were not finite; `ended` are rows that the host ended,
    and grow no more."""

    rows: list[list[int]]
    failed: dict[int, int] = field(default_factory=dict)
    grown: dict[int, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    speculated: Speculated | None = None
    log_probs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    top: dict[int, list[tuple[tuple[int, float], ...]]] = field(default_factory=lambda: defaultdict(list))
    report: RequestReport | None = None

    def append(self, block: np.ndarray[Any, Any], told: LogProbs | None = None) -> None:
        """Add a block, and the log-probabilities of its tokens."""
        block = block.copy()
        block[self.ended] = STOPPED  # computed ahead, before they were ended
        counts = (block >= 0).sum(axis=1)
        self.grown = {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
        for i in self.grown:
            kept = block[i] >= 0
            self.rows[i].extend(block[i][kept].tolist())
            if told is not None:
                self.log_probs[i].extend(told.chosen[i][kept].tolist())
                pairs = zip(told.ids[i][kept].tolist(), told.likeliest[i][kept].tolist(), strict=True)
                self.top[i].extend(tuple(zip(ids, values, strict=True)) for ids, values in pairs)
        self.failed |= {int(i): len(self.rows[i]) for i in np.flatnonzero((block == NOT_FINITE).any(axis=1))}

    def end(self, row: int, count: int) -> None:
        """End a row after its first `count` tokens, whatever came behind them."""
        for values in (self.rows[row], self.log_probs[row], self.top[row]):
            del values[count:]
        self.failed.pop(row, None)
        self.ended.append(row)

    def failure(self, outputs: Sequence[Any], n: int | None = None) -> NumericsError:
        """The error for rows that failed, with what there is of all of them: `outputs`."""
        answers = n or 1
        which = [f"prompts[{i // answers}]{'' if n is None else f' (answer {i % n})'}" for i in self.failed]
        more = f" and {len(which) - 8} more" if len(which) > 8 else ""
        return NumericsError(
            f"the logits, after logit_bias if any, are not finite of {', '.join(which[:8])}{more}, first behind "
            f"{min(self.failed.values())} new tokens; `outputs` of this error has what came before, and the other "
            "answers whole",
            self.failed,
            outputs,
        )


@dataclass(eq=False)
class Generation:
    """Tokens of a request, block by block: `[count, n]` int32, `STOPPED` where a row has none.

    `NOT_FINITE` stands where a row's logits were not, and ended it. The next block is computed while the host looks at
    the last one; only the first token does not wait for the loop to compile. Each `turn` of a block, of which the first
    one has one and the others `steps`, gives a token at least to every row that runs. `inputs` are those of the loop.
    `told` is what the device tells of the tokens, if it does, and `log_probs` that of the last block on the host.
    `marked` is what was kept of the state at the request's mark, and `blocks` are those that the host has seen, where
    somebody goes on from them: other streams may go on for as long as they like.
    """

    decode: BoundProgram
    count: int
    budget: int
    steps: int
    inputs: dict[str, Any]
    state: StateArrays
    tokens: AnyArray
    slots: int
    turns: int = 1
    speculated: Speculated | None = None
    told: LogProbs | None = None
    log_probs: LogProbs | None = None
    marked: StateArrays | None = None
    blocks: list[np.ndarray[Any, Any]] | None = None
    seen: AnyArray = None  # the last of them on the device

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        done = 0
        while True:
            tokens, rows, counts, told = self.tokens, self.inputs["rows"], self.inputs.get("counts"), self.told
            done += self.turns
            last, ahead = done >= self.budget, self.decode.is_compiled
            if ahead and not last:
                self._advance()
            block, counts, self.log_probs = jax.device_get((tokens, counts, told))
            if counts is not None:
                self.speculated = Speculated(*counts.tolist())
            self.seen = tokens
            if self.blocks is not None:
                self.blocks.append(block.copy())  # the device's own buffer is larger
            yield block[: self.count]
            if last or not jax.device_get(rows.running).any():
                return
            if not ahead:
                self._advance()

    def stop(self, rows: Iterable[int]) -> None:
        """End rows that the host has seen enough of."""
        running = np.array(jax.device_get(self.inputs["rows"].running))
        running[list(rows)] = False
        self.inputs["rows"] = replace(self.inputs["rows"], running=running)

    def chosen(self, row: int) -> list[int]:
        """All tokens that the device chose for a row, those that the host was not shown among them. The state has them
        all but for the last, which it has where the row was ended by the host."""
        unseen = [] if self.seen is self.tokens else [jax.device_get(self.tokens)]
        assert self.blocks is not None
        found = np.concatenate([block[row] for block in (*self.blocks, *unseen)])
        ids: list[int] = found[found >= 0].tolist()
        return ids

    def _advance(self) -> None:
        (self.tokens, self.inputs["rows"], *after), self.state = self.decode(self.inputs, self.state)
        if self.told is not None:
            (self.told,) = after
        else:
            self.inputs |= dict(zip(("kept", "counts"), after, strict=False))
        self.turns = self.steps


# -- from a request to its answers -------------------------------------------------------------


def blocks(lm: LanguageModel, request: Request, new: NewTokens) -> Iterator[None]:
    """Generate: the new tokens of each row are appended to `new`, block by block."""
    if not (request.rows and request.budget):
        return
    clock = lm.model.programs.clock()
    first: tuple[float, int] | None = None
    others = len(request.rows) - 1  # of what is shared, the first prompt is read
    cached = sum(request.before.lengths) if request.before else request.shared * others
    generation = start(plan_request(lm, request))
    generation.blocks = None if request.ended is None else []
    try:
        for block in generation:
            new.append(block, generation.log_probs)
            new.speculated = generation.speculated
            if request.words:
                counts = {i: stopped_at(lm.decode, new.rows[i], n, request.words) for i, n in new.grown.items()}
                done = {i: count for i, count in counts.items() if count is not None}
                for i, count in done.items():
                    new.end(i, count)
                if done:
                    generation.stop(done)
            seconds, compiled = clock()
            tokens = sum(map(len, new.rows))
            first = first or (seconds, tokens)
            new.report = RequestReport(
                "prompts", len(request.rows), sum(map(len, request.rows)), first[0], tokens, first[1],
                seconds - first[0], compiled, cached, request.reread,
            )  # fmt: skip
            yield
    finally:
        if request.ended is not None:
            request.ended(generation)


def answered(lm: LanguageModel, request: Request, new: NewTokens) -> list[Any]:
    """Generate, and return what each prompt gets.

    Raises:
        NumericsError: logits of a row were not finite; `outputs` has what there is.
    """
    for _ in blocks(lm, request, new):
        pass
    rows: list[Any] = [lm.text(ids, request.words) for ids in new.rows] if request.text else [*new.rows]
    if request.logprobs is not None:
        texts = rows if request.text else [None] * len(rows)
        rows = [
            Completion(text, tuple(ids), tuple(new.log_probs[i]), tuple(top[: request.logprobs] for top in new.top[i]))
            for i, (text, ids) in enumerate(zip(texts, new.rows, strict=True))
        ]
    n = request.n
    outputs = rows if n is None else [rows[at : at + n] for at in range(0, len(rows), n)]
    if new.failed:
        raise new.failure(outputs, n)
    return outputs


def pieces(lm: LanguageModel, request: Request, new: NewTokens) -> Iterator[Any]:
    """The new text of a request of one row as it comes, or its ids; joined together they are what `generate` gives."""
    (ids,), sent = new.rows, 0
    for _ in blocks(lm, request, new):
        known: Any = settled(lm.decode(ids), request.words) if request.text else ids
        if piece := known[sent:]:
            yield from [piece] if request.text else piece
            sent = len(known)
    answer = lm.text(ids, request.words) if request.text else ids
    if request.text and answer[sent:]:
        yield answer[sent:]
    if new.failed:
        raise new.failure([answer])


# -- reading the prompts -----------------------------------------------------------------------


def start(plan: RequestPlan) -> Generation:
    """Read the prompts, each with at least one token, and choose the first new one of each row."""
    request, sizes, loop = plan.request, plan.sizes, plan.loop
    programs, n = loop.model.programs, request.n or 1
    knobs, ends = jax.device_put((plan.knobs, plan.ends), programs.whole)  # once, not with every block
    before = read_shared(plan) if request.shared else request.before
    held: Sequence[int] = [0] * len(request.rows) if before is None else before.lengths
    state: StateArrays = {} if before is None else state_behind(plan.readers[0], before)
    live = np.arange(sizes.batch) < len(request.rows) * n
    rows = start_rows(plan, live)
    first: AnyArray = np.full((sizes.batch, 1), STOPPED, np.int32)
    told, marked, hidden = None, None, []
    rest = [prompt[count:] for prompt, count in zip(request.rows, held, strict=True)]
    inputs = request.inputs.padded(plan.read) if request.inputs.arrays else {}
    for block in prompt_blocks(plan.readers, plan.parts, rest, plan.read, inputs, state):
        state, logits, now = block.state, block.logits, block.now
        hidden += [] if block.hidden is None else [block.hidden]
        if request.mark is not None and held[0] + block.read == request.mark.at:
            marked = {name: jnp.copy(state[name]) for name in request.mark.leaves}
        if not now.any():
            continue
        if n > 1:
            fork = fork_of(sizes.batch, n, len(request.rows))
            logits = programs.call(fork_rows, logits, fork, static=(0,), at=programs.whole)
            now = now[fork] & live
        arguments = (logits, rows, now, first, knobs, ends, told)
        first, rows, told = programs.call(FirstTokens(plan.method, plan.top), *arguments, at=programs.whole)
    if n > 1:
        state = moved_state(loop, state, fork_of(sizes.batch, n, len(request.rows)))
    given = {"rows": rows, "knobs": knobs, "ends": ends}
    if (drafter := request.drafter) is not None:
        kept, own = drafter.start(programs, sizes, request.rows, first, tuple(hidden))
        state |= {OWN + name: array for name, array in own.items()}
        given |= {"params": drafter.params(), "kept": kept, "counts": np.zeros(3, np.int32)}
    return Generation(
        loop, len(request.rows) * n, request.budget, programs.settings.loop.steps, given, state, first, sizes.slots,
        told=told, marked=marked,
    )  # fmt: skip


def start_rows(plan: RequestPlan, live: np.ndarray[Any, Any]) -> Rows:
    """The rows of the request, `live` ones, of which each has the tokens of its prompt."""
    request, programs = plan.request, plan.loop.model.programs
    seen = np.zeros((len(live), len(plan.ends) if plan.method.penalised else 0), bool)
    if plan.method.penalised:
        for row in np.flatnonzero(live):
            seen[row, list(request.rows[row // (request.n or 1)])] = True
    arguments = (random_key("seed", request.seed), live, np.int32(request.budget), seen)
    rows: Rows = programs.call(new_rows, *arguments, static=(plan.method.draws,), at=programs.whole)
    return rows


def read_shared(plan: RequestPlan) -> Before:
    """What all prompts begin with, read once."""
    request = plan.request
    prompt = [request.rows[0][: request.shared]]
    *_, last = prompt_blocks(plan.shared_readers, plan.shared, prompt, plan.alone, {})
    every = len(request.rows)
    return Before(last.state, (0,) * every, (request.shared,) * every, plan.sizes.slots)


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
