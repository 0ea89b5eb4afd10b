"""The loop that generates several tokens a step: drafts are proposed, read in one program, and judged.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". A step reads a row's last token and
k drafts behind it with `verify`. Its k + 1 logits are those of plain decoding as long as the drafts before them are
kept, so each kept draft is a token that plain decoding would have taken a step for, and the logits behind the last of
them give one token more. What the state holds of other drafts is written over: its length says what counts.

Where drafts come from is a `Drafter`: one class for each source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, Shardings, StateArrays
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, Array, Choosing, Rows, Sizes
from rlx_jax.generate.sampler import Knobs, Method, adjusted, choose, draw, finite_rows, sharpened
from rlx_jax.ir.graph import every_key
from rlx_jax.lowering.inspect.hlo import DRAFTING, SAMPLER
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import LENGTH

# What the names of a source's arrays begin with among those of the state; block paths have no slash.
OWN = "draft/"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Tokens that a row may go on with.

    Attributes:
        ids: `[B, k]` int32.
        count: `[B]` int32, how many of them there are, from 0 to k.
        logits: `[B, k, V]` float32, of the distributions that they were drawn from; None where they were not drawn.
    """

    ids: Any
    count: Any
    logits: Any = None

    @staticmethod
    def of_steps(steps: int, ids: Array, fine: Array, logits: Array | None) -> Drafts:
        """Those of the first `steps`: ids `[n, B]`, whether they are drafts, `[n, B]` bool, and logits `[n, B, V]`."""
        logits = None if logits is None else logits[:steps].swapaxes(0, 1)
        return Drafts(ids[:steps].T, fine[:steps].sum(axis=0, dtype=jnp.int32), logits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Own:
    """What a source has of its own: parameters, small arrays that are kept from step to step, and a state that is
    updated in place."""

    params: Any
    kept: Any
    state: StateArrays


@dataclass(frozen=True)
class Turn:
    """One step, before its drafts are read: the rows, the tokens `held` `[B]` by the state, which lack the one chosen
    last, how tokens are chosen, and how many drafts a row has `room` `[B]` for."""

    rows: Rows
    held: Array
    method: Method
    knobs: Knobs

    @property
    def room(self) -> Array:
        """A row that may get n more tokens has use for n − 1 drafts; none where it has ended."""
        return jnp.where(self.rows.running, self.rows.left - 1, 0)


@dataclass(frozen=True)
class Judged:
    """What became of a step: tokens `chosen` `[B, k + 1]` int32, whether the row takes them `now`, whether their logits
    were finite (`fine`) and which of them are drafts that are `kept`, `[B, k + 1]` bool; how many it takes `[B]` int32.
    `hidden` `[B, k + 1, H]`: what the model's head read for each of them, where the source asks for it.
    """

    chosen: Array
    now: Array
    fine: Array
    kept: Array
    count: Array
    hidden: Array | None = None


def choose_draft(turn: Turn, seen: Array, logits: Array, number: Array) -> tuple[Array, Array, Array | None, Array]:
    """How a model's logits become drafts, one after the other: logits `[B, V]` and what a row holds with the drafts so
    far, `seen` → draft `number` of each row `[B]` int32, whether its logits are finite `[B]` bool, those of the
    distribution that it was drawn from, if it was, and what the row holds with it."""
    method, knobs, rows = turn.method, turn.knobs, turn.rows
    ready = adjusted(method, knobs, logits, seen)
    wanted = sharpened(method, knobs, ready) if method.draws else None
    ids = jnp.argmax(ready, axis=-1).astype(jnp.int32)
    if wanted is not None:
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.new + number)
        ids = draw(wanted, jax.vmap(lambda key: jax.random.fold_in(key, DRAFT))(keys))
    if method.penalised:
        seen = seen.at[jnp.arange(seen.shape[0], dtype=jnp.int32), ids].set(True)
    return ids, finite_rows(ready), wanted, seen


class Drafter(Protocol):
    """Where drafts come from: on the host for a request, and `bound` to sizes as functions of arrays in the loop.

    What is `bound` is compared by value, as it is a part of the compiled loop.
    """

    @property
    def asked(self) -> str:
        """What `speculative=` was."""

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states: what the model's head reads of each token."""

    @property
    def tokens(self) -> int:
        """Drafts a step, at least 1."""

    @property
    def positions(self) -> int | None:
        """The longest sequence that it knows, in tokens."""

    def bound(self, sizes: Mapping[str, int]) -> Drafter:
        """What the loop is compiled with, for this `batch` and `context`: without the parameters."""

    def params(self) -> Any:
        """Its parameters."""

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """What it keeps, and its state, where the prompts have been read and `first` `[B, 1]` is chosen; `hidden` are
        the prompts' hidden states `[B, S, H]`, part by part, if it reads them."""

    def lir(self) -> Lir | None:
        """The program that it runs inside of the loop, with its own state, if it does."""

    def shardings(self) -> Shardings | None:
        """Where that program has its parameters and state on several devices; not called without one."""

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """Up to `tokens` drafts a row."""

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """Go on from the tokens that were taken."""


class SoFar(NamedTuple):
    """What the loop carries: steps done, the rows, the state of the model and, under `OWN`, of the source, what it
    keeps, the counts, the tokens."""

    at: Array
    rows: Rows
    state: StateArrays
    kept: Any
    counts: Array
    out: Array


@dataclass(frozen=True)
class VerifyLoop(Choosing):
    """Around `verify`: propose drafts, read them, take those that hold, `steps` times or until every row has ended.

    Inputs: `rows`, `knobs`, `ends`, and of the source `params`, `kept` and `counts` `[3]` int32: drafts read, drafts
    taken, steps. Outputs: (tokens `[B, steps · (drafts + 1)]`, rows, kept, counts), state. Where a row got fewer tokens
    `STOPPED` stands behind them. `carried`: arrays of the state that `verify` gives after each token, and the axis of
    their rows.
    """

    ids_input: str
    steps: int
    drafter: Drafter
    carried: tuple[tuple[str, int], ...] = ()

    def arguments(self) -> Mapping[str, str]:
        """See `rlx_jax.compiler.executable.SaysArguments`."""
        drafts = {"speculative": self.drafter.asked, "draft_tokens": str(self.drafter.tokens)}
        return {"samplers": self.method.text, **drafts}

    def beside(self) -> Mapping[str, Lir]:
        """See `rlx_jax.compiler.executable.RunsOthers`."""
        lir = self.drafter.lir()
        return {} if lir is None else {OWN: lir}

    def divided(self) -> Shardings | None:
        """See `rlx_jax.compiler.executable.RunsOthers`."""
        at = None if self.drafter.lir() is None else self.drafter.shardings()
        if at is None:
            return None
        state = {OWN + name: sharding for name, sharding in at.state.items()}
        return replace(at, params={}, state=state, inputs={"params": dict(at.params)})

    def __call__(self, verify: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            rows = inputs["rows"]
            out = jnp.full((rows.ids.shape[0], self.steps * (self.drafter.tokens + 1)), STOPPED, jnp.int32)
            start = SoFar(jnp.int32(0), rows, state, inputs["kept"], inputs["counts"], out)

            def step(now: SoFar) -> SoFar:
                return self.step(lambda state, fed: verify(params, state, fed), inputs, now)

            end = lax.while_loop(lambda now: (now.at < self.steps) & now.rows.running.any(), step, start)
            return (end.out, end.rows, end.kept, end.counts), end.state

        return function

    def step(self, verify: Callable[..., Any], inputs: Mapping[str, Any], before: SoFar) -> SoFar:
        """Propose, read and judge once. `verify`: state and inputs → outputs and state."""
        rows, knobs, ends = before.rows, inputs["knobs"], inputs["ends"]
        main = {name: array for name, array in before.state.items() if not name.startswith(OWN)}
        own = {name[len(OWN) :]: array for name, array in before.state.items() if name.startswith(OWN)}
        turn = Turn(rows, main[LENGTH], self.method, knobs)
        with jax.named_scope(DRAFTING):
            drafts, mine = self.drafter.propose(Own(inputs["params"], before.kept, own), turn)
        drafts = replace(drafts, count=jnp.clip(drafts.count, 0, turn.room))
        fed = {
            self.ids_input: jnp.concatenate([rows.ids[:, None], drafts.ids], axis=1),
            "lengths": jnp.where(rows.running, drafts.count + 1, 0),
        }
        outputs, main = verify(main, fed)
        with jax.named_scope(SAMPLER):
            judged = self.judge(outputs[0], rows, drafts, knobs, ends)
        judged = replace(judged, hidden=outputs[1] if len(outputs) > 1 else None)
        main[LENGTH] = turn.held + judged.count
        for name, axis in self.carried:
            main[name] = after_tokens(main[name], main.pop(every_key(name)), judged.count, axis)
        mine = self.drafter.accept(mine, turn, judged)
        state = main | {OWN + name: array for name, array in mine.state.items()}
        shown = jnp.where(judged.now, jnp.where(judged.fine, judged.chosen, NOT_FINITE), STOPPED)
        out = lax.dynamic_update_slice(before.out, shown, (jnp.int32(0), before.at * (self.drafter.tokens + 1)))
        one = jnp.stack([drafts.count.sum(dtype=jnp.int32), judged.kept.sum(dtype=jnp.int32), jnp.int32(1)])
        return SoFar(before.at + 1, self.after(rows, judged, ends), state, mine.kept, before.counts + one, out)

    def judge(self, logits: Array, rows: Rows, drafts: Drafts, knobs: Knobs, ends: Array) -> Judged:
        """Logits `[B, k + 1, V]` behind the last token and each draft → which tokens the rows take."""
        batch, width, vocab = logits.shape
        flat = logits.reshape(-1, vocab)
        ready = adjusted(self.method, knobs, flat, self.seen_by(rows, drafts).reshape(batch * width, -1))
        here = jnp.arange(width, dtype=jnp.int32)[None] < drafts.count[:, None]
        ids = jnp.pad(drafts.ids, ((0, 0), (0, 1)))
        keys = self.keys(rows, width)
        if drafts.logits is None:
            # The token of plain decoding, draw included: a draft that is the same is kept. That is the rule below for a
            # distribution that is certain of the draft.
            chosen = choose(self.method, knobs, ready, keys).reshape(batch, width)
            kept = here & (chosen == ids)
        else:
            wanted = sharpened(self.method, knobs, ready).reshape(logits.shape)
            chosen, kept = weighed(wanted, ids, here, drafts.logits, keys)
        fine = self.finite(flat, ready, chosen.reshape(-1)).reshape(batch, width)
        numbers = 1 + jnp.arange(width, dtype=jnp.int32)[None]
        ended = ends[chosen] | (numbers >= rows.left[:, None]) | ~fine
        on = jnp.cumprod((kept & ~ended).astype(jnp.int32), axis=1)
        now = rows.running[:, None] & jnp.pad(on[:, :-1], ((0, 0), (1, 0)), constant_values=1).astype(bool)
        return Judged(chosen, now, fine, kept & now & fine, now.sum(axis=1, dtype=jnp.int32))

    def seen_by(self, rows: Rows, drafts: Drafts) -> Array:
        """What a row holds before each of its k + 1 tokens, `[B, k + 1, V]` bool; `[B, k + 1, 0]` without a penalty."""
        seen = [rows.seen]
        for i in range(drafts.ids.shape[1]):
            numbers = jnp.arange(rows.seen.shape[0], dtype=jnp.int32)
            seen.append(seen[-1].at[numbers, drafts.ids[:, i]].set(True) if self.method.penalised else rows.seen)
        return jnp.stack(seen, axis=1)

    def keys(self, rows: Rows, width: int) -> Array:
        """The keys of a row's next `width` tokens, `[B · width]`."""
        keys: Array = rows.keys
        if self.method.draws:
            numbers = rows.new[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, numbers).reshape(-1)
        return keys

    def after(self, rows: Rows, judged: Judged, ends: Array) -> Rows:
        """The rows with the tokens that they took."""
        last = jnp.take_along_axis(judged.chosen, jnp.maximum(judged.count - 1, 0)[:, None], axis=1, mode="clip")[:, 0]
        left = rows.left - judged.count
        broken = (judged.now & ~judged.fine).any(axis=1)
        seen = rows.seen
        if self.method.penalised:
            numbers = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
            seen = seen.at[numbers, judged.chosen].max(judged.now)
        ids, running = jnp.where(rows.running, last, rows.ids), rows.running & ~(ends[last] | (left <= 0) | broken)
        return replace(rows, ids=ids, running=running, left=left, new=rows.new + judged.count, seen=seen)


def after_tokens(before: Array, every: Array, count: Array, axis: int) -> Array:
    """A state after `count` `[B]` of some tokens: `before` `[B, …]` them and after `every` `[B, S, …]` of them. The
    rows are at `axis`."""
    at = count.reshape((-1, *(1,) * (every.ndim - axis - 1)))
    at = jnp.expand_dims(at, tuple(range(axis)))
    after = jnp.take_along_axis(every, jnp.maximum(at - 1, 0), axis=axis + 1, mode="clip")
    return jnp.where(jnp.squeeze(at, axis + 1) > 0, jnp.squeeze(after, axis + 1), before)


def weighed(wanted: Array, ids: Array, here: Array, drawn: Array, keys: Array) -> tuple[Array, Array]:
    """Speculative sampling: tokens `[B, k + 1]`, distributed as the softmax p of `wanted` `[B, k + 1, V]` whatever the
    drafts are, and which of them are drafts.

    Draft x, drawn from q, the softmax of `drawn` `[B, k, V]`, is kept with probability min(1, p(x) / q(x)); in place of
    one that is not, a token is drawn from max(p − q, 0), and where there is no draft (`here` `[B, k + 1]`) from p.
    `ids` `[B, k + 1]`, `keys` `[B · (k + 1)]`. Leviathan et al. 2023, algorithm 1.
    """
    shape = ids.shape
    p = jax.nn.softmax(wanted, axis=-1)
    q = jnp.pad(jax.nn.softmax(drawn, axis=-1), ((0, 0), (0, 1), (0, 0)))
    at_p, at_q = (jnp.take_along_axis(x, ids[..., None], axis=-1, mode="clip")[..., 0] for x in (p, q))
    luck = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, LUCK)))(keys).reshape(shape)
    kept = here & (luck * at_q < at_p)
    rest = jnp.maximum(p - q, 0.0)
    some = here & (rest.sum(axis=-1) > 0)  # else p and q are one, but for rounding
    other = draw(jnp.where(some[..., None], jnp.log(rest), wanted).reshape(-1, wanted.shape[-1]), keys)
    return jnp.where(kept, ids, other.reshape(shape)), kept


# What the key of a token is folded with: to keep a draft or not, and to draw it. Its own noise is the key's.
LUCK, DRAFT = 1, 2
