"""One request in flight: its rows on the device, its tokens block by block on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.settings import Loop
from rlx_jax.errors import NumericsError
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, DecodeLoop, FirstTokens, LogProbs, Rows, StartRows
from rlx_jax.generate.forking import ForkRows, fork_of, forked_state
from rlx_jax.generate.request_inputs import NONE, RequestInputs
from rlx_jax.generate.sampler import Knobs, Method, Sampler
from rlx_jax.generate.speculative import OWN, DraftSource, VerifyLoop
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import RequestReport, Speculated
from rlx_jax.text.requests import pad_rows

AnyArray = Any


class DraftPlan(Protocol):
    """Where the drafts of a request come from, on the host."""

    @property
    def hidden(self) -> bool:
        """Whether the source reads hidden states: what the model's head reads of each token."""

    @property
    def tokens(self) -> int:
        """Drafts a step, at least 1."""

    @property
    def positions(self) -> int | None:
        """The longest sequence that the source knows, in tokens."""

    def source(self, sizes: Mapping[str, int]) -> DraftSource:
        """What the loop is compiled with, for this `batch` and `context`."""

    def params(self) -> Any:
        """The parameters of the source."""

    def start(
        self, programs: Programs, plan: RequestPlan, prompts: Sequence[Sequence[int]], first: AnyArray,
        hidden: tuple[AnyArray, ...],
    ) -> tuple[Any, StateArrays]:  # fmt: skip
        """What the source keeps, and its state, where the prompts have been read and `first` `[B, 1]` is chosen;
        `hidden` are the prompts' hidden states `[B, S, H]`, part by part, if it reads them."""


@dataclass(frozen=True)
class Request:
    """One call of `generate` or `stream`, checked: prompts as ids, each with at least one; new tokens for each; how to
    choose them; ids and texts that end a row; what it brings beside tokens; how many answers each prompt gets, whose
    rows stand together; the `top` likeliest tokens to tell of at each step, or None to tell nothing."""

    rows: tuple[tuple[int, ...], ...]
    budget: int
    sampler: Sampler
    ends: tuple[int, ...]
    words: tuple[str, ...]
    seed: int
    inputs: RequestInputs = NONE
    drafts: DraftPlan | None = None
    answers: int = 1
    top: int | None = None

    @property
    def drawn_from(self) -> int | None:
        """The seed of the draws; None where nothing is drawn, or from a key that the caller has."""
        return int(self.seed) if self.sampler.temperature and not isinstance(self.seed, jax.Array) else None


@dataclass(frozen=True)
class RequestPlan:
    """How a request runs, every size chosen.

    Attributes:
        method, knobs: how to choose tokens.
        ends: `[V]` bool, ids that end a row.
        batch: rows of the programs, at least those of the request; the others hold nothing.
        widths: tokens of the programs that read the prompts, one after the other.
        slots: of the cache.
        budget: new tokens of each row, at least 1.
        loop: see `DecodeLoop`.
        inputs: what the request brings beside tokens; the first program that reads prompts takes it.
        drafts: where drafts come from; None for plain decoding.
        answers, top: as in `Request`.
        read: rows of the programs that read the prompts, where each has several answers.
    """

    method: Method
    knobs: Knobs
    ends: np.ndarray[Any, Any]
    seed: int
    batch: int
    widths: tuple[int, ...]
    slots: int
    budget: int
    loop: Loop
    inputs: RequestInputs = NONE
    drafts: DraftPlan | None = None
    answers: int = 1
    top: int | None = None
    read: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Rows and slots."""
        return {"batch": self.batch, "context": self.slots}

    @property
    def reading(self) -> dict[str, int]:
        """Rows and slots of the programs that read the prompts."""
        return self.sizes if self.answers == 1 else {"batch": self.read, "context": self.slots}


def generate(model: CompiledModel, prompts: Sequence[Sequence[int]], plan: RequestPlan) -> Generation:
    """Read the prompts, each with at least one token, and choose the first new one of each.

    Raises:
        RecompileError: one of the programs is not compiled, and the profile wants that told; nothing has run.
    """
    sizes, given = {**plan.inputs.sizes, **plan.sizes}, plan.inputs.given
    logits, ids, drafts = model.output_names[:1], model.flow.inputs[0].name, plan.drafts
    if drafts is None:
        loop = DecodeLoop(plan.method, ids, plan.loop.steps, plan.loop.early, plan.top)
        decode = model.as_program("extend").bound({**sizes, "seq": 1}, loop, outputs=logits, given=given)
        readers = bound_readers(model, plan.widths, {**sizes, **plan.reading}, given)
    else:
        verify, spare = model.as_program("verify"), drafts.tokens
        back = model.programs.template(verify.key(given, logits)).taken_back
        checking = VerifyLoop(plan.method, ids, plan.loop.steps, drafts.source(plan.sizes), drafts.tokens, back)
        width = {**sizes, "seq": drafts.tokens + 1}
        decode = verify.bound(width, checking, False, logits, given, spare, drafts.hidden)
        readers = bound_readers(model, plan.widths, sizes, given, spare, drafts.hidden)
    knobs, ends = jax.device_put((plan.knobs, plan.ends), model.programs.whole)  # once, not with every block
    rows, state, first, told, hidden = read_prompts(readers, plan, prompts, knobs, ends)
    if plan.answers > 1:
        state = forked_state(decode, state, plan.answers, len(prompts))
    inputs = {"rows": rows, "knobs": knobs, "ends": ends}
    if drafts is not None:
        kept, own = drafts.start(model.programs, plan, prompts, first, hidden)
        state |= {OWN + name: array for name, array in own.items()}
        inputs |= {"params": drafts.params(), "kept": kept, "counts": np.zeros(3, np.int32)}
    return Generation(
        decode, len(prompts) * plan.answers, plan.budget, plan.loop.steps, inputs, state, first, told=told
    )


def bound_readers(
    model: CompiledModel, widths: Sequence[int], sizes: Mapping[str, int], given: frozenset[str] = frozenset(),
    spare: int = 0, hidden: bool = False,
) -> list[BoundProgram]:  # fmt: skip
    """The programs that read prompts, so many tokens each; with `hidden` they give hidden states too."""
    logits = model.output_names[:1]
    first, *others = ({**sizes, "seq": width} for width in widths)
    extend = model.as_program("extend")
    return [
        model.as_program("prefill").reader(first, True, logits, given, spare, hidden),
        *(extend.bound(block, None, True, logits, given, spare, hidden) for block in others),
    ]


class PromptBlock(NamedTuple):
    """What reading a part of the prompts gives: logits `[B, 1, V]` of the last tokens, the state, and the rows whose
    prompts end there `[B]` bool; hidden states `[B, S, H]` of all tokens, where the program gives them."""

    logits: AnyArray
    state: StateArrays
    now: np.ndarray[Any, Any]
    hidden: AnyArray = None


def prompt_blocks(
    readers: Sequence[BoundProgram], widths: Sequence[int], prompts: Sequence[Sequence[int]], batch: int,
    beside: Mapping[str, Any],
) -> Iterator[PromptBlock]:  # fmt: skip
    """Read the prompts, part by part. `beside` is what comes with the tokens. A row that holds nothing reads one."""
    ids = readers[0].model.flow.inputs[0].name
    filled = [*prompts, *([0] for _ in range(batch - len(prompts)))]
    lengths, live = np.array([len(p) for p in filled]), np.arange(batch) < len(prompts)
    state: StateArrays = {}
    at = 0
    for reader, width in zip(readers, widths, strict=True):
        new = np.clip(lengths - at, 0, width)
        tokens = pad_rows([p[at : at + width] for p in filled], width)
        (logits, *others), state = reader({ids: tokens, "lengths": new.astype(np.int32), **beside}, state)
        hidden = others[0] if reader.key.hidden else None
        yield PromptBlock(logits, state, live & (at < lengths) & (lengths <= at + width), hidden)
        beside = {}  # from now on it is in the state
        at += width


class PromptsRead(NamedTuple):
    """The rows, the state after the prompts, the first tokens `[B, 1]`, what is told of them, and hidden states of the
    prompts' parts, if they are asked for.

    With several answers a prompt the state is that of the prompts, and rows and tokens are those of the answers."""

    rows: Rows
    state: StateArrays
    first: AnyArray
    told: LogProbs | None
    hidden: tuple[AnyArray, ...]


def read_prompts(
    readers: Sequence[BoundProgram], plan: RequestPlan, prompts: Sequence[Sequence[int]], knobs: Knobs, ends: AnyArray
) -> PromptsRead:
    """Read the prompts, and choose the first token of each row."""
    programs = readers[0].model.programs
    fork = fork_of(plan.batch, plan.answers, len(prompts))
    live = np.arange(plan.batch) < len(prompts) * plan.answers
    seen = np.zeros((plan.batch, len(plan.ends) if plan.method.penalised else 0), bool)
    if plan.method.penalised:
        for row, prompt in zip(np.flatnonzero(live), fork, strict=False):
            seen[row, list(prompts[prompt])] = True
    start = (random_key("seed", plan.seed), live, np.int32(plan.budget), seen)
    rows = programs.call(StartRows(plan.method.draws), *start, at=programs.whole)
    first: AnyArray = np.full((plan.batch, 1), STOPPED, np.int32)
    state: StateArrays = {}
    told: LogProbs | None = None
    hidden: tuple[AnyArray, ...] = ()
    read = plan.reading["batch"]
    for block in prompt_blocks(readers, plan.widths, prompts, read, plan.inputs.padded(read)):
        state, logits, now = block.state, block.logits, block.now
        hidden += () if block.hidden is None else (block.hidden,)
        if not now.any():
            continue
        if plan.answers > 1:
            logits, now = programs.call(ForkRows(0), logits, fork, at=programs.whole), now[fork] & live
        chosen = (logits, rows, now, first, knobs, ends, told)
        first, rows, told = programs.call(FirstTokens(plan.method, plan.top), *chosen, at=programs.whole)
    return PromptsRead(rows, state, first, told, hidden)


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
    log_probs: list[list[float]] = field(default_factory=list)
    top: list[list[tuple[tuple[int, float], ...]]] = field(default_factory=list)
    report: RequestReport | None = None

    @staticmethod
    def of(request: Request) -> NewTokens:
        """None so far."""
        rows: list[list[int]] = [[] for _ in range(len(request.rows) * request.answers)]
        if request.top is None:
            return NewTokens(rows)
        return NewTokens(rows, log_probs=[[] for _ in rows], top=[[] for _ in rows])

    def append(self, block: np.ndarray[Any, Any], told: LogProbs | None = None) -> None:
        """Add a block, and what is told of its tokens."""
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
        del self.rows[row][count:]
        for told in (self.log_probs, self.top):
            if told:
                del told[row][count:]
        self.failed.pop(row, None)
        self.ended.append(row)

    def check(self, outputs: Sequence[Any], n: int | None = None) -> None:
        """Raise the error for rows that failed, with what there is of all of them: `outputs`.

        Raises:
            NumericsError.
        """
        if self.failed:
            answers = n or 1
            which = [f"prompts[{i // answers}]{'' if n is None else f' (answer {i % n})'}" for i in self.failed]
            more = f" and {len(which) - 8} more" if len(which) > 8 else ""
            raise NumericsError(
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
    """

    decode: BoundProgram
    count: int
    budget: int
    steps: int
    inputs: dict[str, Any]
    state: StateArrays
    tokens: AnyArray
    turns: int = 1
    speculated: Speculated | None = None
    told: LogProbs | None = None
    log_probs: LogProbs | None = None

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

    def _advance(self) -> None:
        (self.tokens, self.inputs["rows"], *after), self.state = self.decode(self.inputs, self.state)
        if self.told is not None:
            (self.told,) = after
        else:
            self.inputs |= dict(zip(("kept", "counts"), after, strict=False))
        self.turns = self.steps
