"""One request in flight: its rows on the device, its tokens block by block on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.errors import NumericsError
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, DecodeLoop, LogProbs
from rlx_jax.generate.forking import fork_of, moved_state
from rlx_jax.generate.plan import AnyArray, Request, RequestPlan
from rlx_jax.generate.prompts import Readers, read_prompts
from rlx_jax.generate.speculative import OWN, VerifyLoop
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.runtime.report import RequestReport, Speculated


def generate(model: CompiledModel, prompts: Sequence[Sequence[int]], plan: RequestPlan) -> Generation:
    """Read the prompts, each with at least one token, and choose the first new one of each.

    Raises:
        RequestError: one of the programs is not compiled, and the profile wants that told; nothing has run.
    """
    sizes, given = {**plan.inputs.sizes, **plan.sizes}, plan.inputs.given
    logits, ids, drafts = model.output_names[:1], model.first_input, plan.drafts
    if drafts is None:
        loop = DecodeLoop(plan.method, ids, plan.loop.steps, plan.loop.early, plan.top)
        variant = Variant(outputs=logits, given=given)
        decode = model.as_program("extend").bound({**sizes, "seq": 1}, loop, variant)
        readers = Readers(model, {**sizes, **plan.reading}, variant)
    else:
        verify, variant = model.as_program("verify"), Variant(True, logits, given, drafts.tokens, drafts.hidden)
        back = model.programs.template(verify.key(given, logits)).taken_back
        checking = VerifyLoop(plan.method, ids, plan.loop.steps, drafts.source(plan.sizes), drafts.tokens, back)
        width = {**sizes, "seq": drafts.tokens + 1}
        decode = verify.bound(width, checking, replace(variant, last_only=False))
        readers = Readers(model, sizes, variant)
    knobs, ends = jax.device_put((plan.knobs, plan.ends), model.programs.whole)  # once, not with every block
    rows, state, first, told, hidden, marked = read_prompts(readers, plan, prompts, knobs, ends)
    if plan.answers > 1:
        state = moved_state(decode, state, fork_of(plan.batch, plan.answers, len(prompts)))
    inputs = {"rows": rows, "knobs": knobs, "ends": ends}
    if drafts is not None:
        kept, own = drafts.start(model.programs, plan, prompts, first, hidden)
        state |= {OWN + name: array for name, array in own.items()}
        inputs |= {"params": drafts.params(), "kept": kept, "counts": np.zeros(3, np.int32)}
    return Generation(
        decode, len(prompts) * plan.answers, plan.budget, plan.loop.steps, inputs, state, first, plan.slots,
        told=told, marked=marked,
    )  # fmt: skip


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
