"""`VerifyLoop`: speculative decoding. A step proposes drafts, verifies them in one program, and accepts some.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". A step feeds a row's last token and
k drafts after it to `verify`. Its k + 1 logits equal plain decoding's as long as all drafts before them are
accepted. So each accepted draft saves a step of plain decoding, and the logits after the last accepted draft give one
more token. The state also caches rejected drafts; its length excludes them, and later tokens overwrite them.

The source of drafts is a `Drafter`; `drafters.py` has one class for each source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, Shardings, StateArrays
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, Array, Choosing, RequestRows, Sizes
from rlx_jax.generate.sampler import SamplerValues, SamplingSteps, adjusted, choose, draw, finite_rows, sharpened
from rlx_jax.ir.state_leaf import every_key
from rlx_jax.lowering.inspect.hlo import DRAFTING, SAMPLER
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import LENGTH

# Prefix of the drafter's arrays in the state of the loop. Block paths have no slash, so that names cannot clash.
OWN = "draft/"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Proposed next tokens of each row.

    Attributes:
        ids: `[B, k]` int32.
        count: `[B]` int32, number of valid drafts in a row, from 0 to k.
        logits: `[B, k, V]` float32, logits of the distributions that the drafts were sampled from; None where the
            drafts were not sampled.
    """

    ids: Any
    count: Any
    logits: Any = None

    @staticmethod
    def of_steps(steps: int, ids: Array, fine: Array, logits: Array | None) -> Drafts:
        """Return the drafts of the first `steps` of n steps.

        Args:
            ids: `[n, B]` int32.
            fine: `[n, B]` bool, whether they are valid; from the first invalid one on, none is.
            logits: `[n, B, V]`, or None.
        """
        logits = None if logits is None else logits[:steps].swapaxes(0, 1)
        return Drafts(ids[:steps].T, fine[:steps].sum(axis=0, dtype=jnp.int32), logits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrafterState:
    """The data of a drafter in the loop.

    Attributes:
        params: its parameters.
        kept: small arrays that it carries from step to step.
        state: the state of its model, which is updated in place.
    """

    params: Any
    kept: Any
    state: StateArrays


@dataclass(frozen=True)
class DraftStep:
    """One step of the loop before its drafts are verified.

    Attributes:
        rows: the rows of the request.
        held: `[B]`, number of tokens in the model's state, which does not include the token chosen last.
        method, knobs: how tokens are chosen.
    """

    rows: RequestRows
    held: Array
    method: SamplingSteps
    knobs: SamplerValues

    @property
    def room(self) -> Array:
        """Return the number of useful drafts per row, `[B]`: n − 1 for a row with n tokens left, and 0 for one that has
        ended. The n-th token comes from the logits after the last draft."""
        return jnp.where(self.rows.running, self.rows.left - 1, 0)


@dataclass(frozen=True)
class VerifiedTokens:
    """The result of a step.

    Attributes:
        chosen: `[B, k + 1]` int32, the token at each position.
        now: `[B, k + 1]` bool, whether the row takes that token.
        fine: `[B, k + 1]` bool, whether its logits were finite.
        kept: `[B, k + 1]` bool, whether it is an accepted draft.
        count: `[B]` int32, number of tokens that each row takes.
        hidden: `[B, k + 1, H]`, the inputs of the model's head, if the drafter uses them.
    """

    chosen: Array
    now: Array
    fine: Array
    kept: Array
    count: Array
    hidden: Array | None = None


def choose_draft(
    turn: DraftStep, seen: Array, logits: Array, number: Array
) -> tuple[Array, Array, Array | None, Array]:
    """Choose the next draft of each row.

    Args:
        seen: `[B, V]` bool, tokens of the row, its drafts so far included.
        logits: `[B, V]`, logits of the draft model.
        number: index of the draft, from 0 on.

    Returns:
        ids `[B]` int32; whether the logits are finite, `[B]` bool; the logits of the distribution that the draft was
        sampled from, None if it was not sampled; and `seen` with the draft.
    """
    method, knobs, rows = turn.method, turn.knobs, turn.rows
    adjusted_logits = adjusted(method, knobs, logits, seen)
    draft_logits = sharpened(method, knobs, adjusted_logits) if method.draws else None
    ids = jnp.argmax(adjusted_logits, axis=-1).astype(jnp.int32)
    if draft_logits is not None:
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.new + number)
        ids = draw(draft_logits, jax.vmap(lambda key: jax.random.fold_in(key, DRAFT))(keys))
    if method.penalised:
        seen = seen.at[jnp.arange(seen.shape[0], dtype=jnp.int32), ids].set(True)
    return ids, finite_rows(adjusted_logits), draft_logits, seen


class Drafter(Protocol):
    """A source of drafts.

    A request has a drafter on the host; the loop has what `bound` returns, with functions of arrays. The latter is
    compared by value, as it is part of the key of the compiled loop.
    """

    @property
    def asked(self) -> str:
        """Return the argument `speculative=` in words, for reports."""

    @property
    def hidden(self) -> bool:
        """Return whether it reads hidden states: the inputs of the model's head for each token."""

    @property
    def tokens(self) -> int:
        """Return the number of drafts per step, at least 1."""

    @property
    def positions(self) -> int | None:
        """Return the longest sequence that it supports, in tokens; None for no limit."""

    def bound(self, sizes: Mapping[str, int]) -> Drafter:
        """Return the drafter that the loop is compiled with, for these sizes of `batch` and `context`.

        It has no parameters, so that a compiled loop keeps none alive.
        """

    def params(self) -> Any:
        """Return its parameters; None if it has none."""

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Return the initial `Own.kept` and `Own.state`, after prefill.

        Args:
            prompts: ids of each row.
            first: `[B, 1]`, the tokens chosen after the prompts.
            hidden: the hidden states of the prompts, one `[B, S, H]` for each chunk, if it reads them.
        """

    def lir(self) -> Lir | None:
        """Return the program that it runs inside of the loop, with a separate state; None if it runs none."""

    def shardings(self) -> Shardings | None:
        """Return the sharding of that program's parameters and state over several devices; only called if `lir` returns
        a program."""

    def propose(self, own: DrafterState, turn: DraftStep) -> tuple[Drafts, DrafterState]:
        """Propose up to `tokens` drafts per row."""

    def accept(self, own: DrafterState, turn: DraftStep, judged: VerifiedTokens) -> DrafterState:
        """Update the drafter for the tokens that the rows took in this step."""


class LoopState(NamedTuple):
    """The carry of the loop: steps done, the rows, the state of the model and, prefixed by `OWN`, of the drafter, the
    drafter's `kept`, the counts of drafts, and the tokens so far."""

    at: Array
    rows: RequestRows
    state: StateArrays
    kept: Any
    counts: Array
    out: Array


@dataclass(frozen=True)
class VerifyLoop(Choosing):
    """Wrapper of the program `verify`: propose, verify and accept drafts, `steps` times or until every row has ended.

    Inputs: `rows`, `knobs`, `ends`; `params` and `kept` of the drafter; and `counts` `[3]` int32: drafts verified,
    drafts accepted, steps. Outputs: (tokens `[B, steps · (drafts + 1)]`, rows, kept, counts), state. The tokens of a
    row are padded with `STOPPED`.

    Attributes:
        ids_input: name of the token input of `verify`.
        steps: number of steps.
        drafter: the bound drafter.
        carried: arrays of the state that every token changes and that have no position axis, such as recurrent states,
            with the axis of their rows. `verify` returns them after each token, as rejecting a draft must undo it.
    """

    ids_input: str
    steps: int
    drafter: Drafter
    carried: tuple[tuple[str, int], ...] = ()

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it; see `rlx_jax.compiler.executable.SaysArguments`."""
        drafts = {"speculative": self.drafter.asked, "draft_tokens": str(self.drafter.tokens)}
        return {"samplers": self.method.text, **drafts}

    def beside(self) -> Mapping[str, Lir]:
        """Return the companion program of the drafter, if it has one; see `rlx_jax.compiler.executable.RunsOthers`."""
        lir = self.drafter.lir()
        return {} if lir is None else {OWN: lir}

    def divided(self) -> Shardings | None:
        """Return the shardings of the drafter's data; see `rlx_jax.compiler.executable.RunsOthers`."""
        # The drafter's parameters are an input of the loop, and its state a part of the loop's state.
        shardings = None if self.drafter.lir() is None else self.drafter.shardings()
        if shardings is None:
            return None
        state = {OWN + name: sharding for name, sharding in shardings.state.items()}
        return replace(shardings, params={}, state=state, inputs={"params": dict(shardings.params)})

    def __call__(self, verify: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            rows = inputs["rows"]
            out = jnp.full((rows.ids.shape[0], self.steps * (self.drafter.tokens + 1)), STOPPED, jnp.int32)
            start = LoopState(jnp.int32(0), rows, state, inputs["kept"], inputs["counts"], out)

            def step(now: LoopState) -> LoopState:
                return self.step(lambda state, fed: verify(params, state, fed), inputs, now)

            end = lax.while_loop(lambda now: (now.at < self.steps) & now.rows.running.any(), step, start)
            return (end.out, end.rows, end.kept, end.counts), end.state

        return function

    def step(self, verify: Callable[..., Any], inputs: Mapping[str, Any], before: LoopState) -> LoopState:
        """Run one step: propose drafts, verify them, and accept some. `verify` maps state and inputs to outputs and
        state."""
        rows, knobs, ends = before.rows, inputs["knobs"], inputs["ends"]
        main = {name: array for name, array in before.state.items() if not name.startswith(OWN)}
        draft_state = {name[len(OWN) :]: array for name, array in before.state.items() if name.startswith(OWN)}
        turn = DraftStep(rows, main[LENGTH], self.method, knobs)
        with jax.named_scope(DRAFTING):
            drafts, own = self.drafter.propose(DrafterState(inputs["params"], before.kept, draft_state), turn)
        drafts = replace(drafts, count=jnp.clip(drafts.count, 0, turn.room))
        verify_inputs = {
            self.ids_input: jnp.concatenate([rows.ids[:, None], drafts.ids], axis=1),
            "lengths": jnp.where(rows.running, drafts.count + 1, 0),
        }
        outputs, main = verify(main, verify_inputs)
        with jax.named_scope(SAMPLER):
            judged = self.judge(outputs[0], rows, drafts, knobs, ends)
        judged = replace(judged, hidden=outputs[1] if len(outputs) > 1 else None)
        main[LENGTH] = turn.held + judged.count  # the cache past this length, of rejected drafts, is overwritten later
        for name, axis in self.carried:
            main[name] = after_tokens(main[name], main.pop(every_key(name)), judged.count, axis)
        own = self.drafter.accept(own, turn, judged)
        state = main | {OWN + name: array for name, array in own.state.items()}
        tokens = jnp.where(judged.now, jnp.where(judged.fine, judged.chosen, NOT_FINITE), STOPPED)
        out = lax.dynamic_update_slice(before.out, tokens, (jnp.int32(0), before.at * (self.drafter.tokens + 1)))
        new_counts = jnp.stack([drafts.count.sum(dtype=jnp.int32), judged.kept.sum(dtype=jnp.int32), jnp.int32(1)])
        return LoopState(
            before.at + 1, self.after(rows, judged, ends), state, own.kept, before.counts + new_counts, out
        )

    def judge(
        self, logits: Array, rows: RequestRows, drafts: Drafts, knobs: SamplerValues, ends: Array
    ) -> VerifiedTokens:
        """Decide which tokens the rows take, by the logits `[B, k + 1, V]` after the last token and each draft."""
        batch, width, vocab = logits.shape
        flat = logits.reshape(-1, vocab)
        adjusted_logits = adjusted(self.method, knobs, flat, self.seen_by(rows, drafts).reshape(batch * width, -1))
        is_draft = jnp.arange(width, dtype=jnp.int32)[None] < drafts.count[:, None]
        ids = jnp.pad(drafts.ids, ((0, 0), (0, 1)))
        keys = self.keys(rows, width)
        if drafts.logits is None:
            # Choose the token as plain decoding does, random draw included, and accept a draft that equals it. This is
            # the rule below for a draft distribution with all its mass on the draft.
            chosen = choose(self.method, knobs, adjusted_logits, keys).reshape(batch, width)
            is_kept = is_draft & (chosen == ids)
        else:
            target_logits = sharpened(self.method, knobs, adjusted_logits).reshape(logits.shape)
            chosen, is_kept = weighed(target_logits, ids, is_draft, drafts.logits, keys)
        fine = self.finite(flat, adjusted_logits, chosen.reshape(-1)).reshape(batch, width)
        numbers = 1 + jnp.arange(width, dtype=jnp.int32)[None]
        ended = ends[chosen] | (numbers >= rows.left[:, None]) | ~fine
        # A row takes a token if it accepted all drafts before it and none of them ended the row.
        accepted = jnp.cumprod((is_kept & ~ended).astype(jnp.int32), axis=1)
        now = rows.running[:, None] & jnp.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1).astype(bool)
        return VerifiedTokens(chosen, now, fine, is_kept & now & fine, now.sum(axis=1, dtype=jnp.int32))

    def seen_by(self, rows: RequestRows, drafts: Drafts) -> Array:
        """Return the tokens seen before each of the k + 1 tokens, `[B, k + 1, V]` bool, for the repetition penalty;
        `[B, k + 1, 0]` without a penalty."""
        seen = [rows.seen]
        for i in range(drafts.ids.shape[1]):
            numbers = jnp.arange(rows.seen.shape[0], dtype=jnp.int32)
            seen.append(seen[-1].at[numbers, drafts.ids[:, i]].set(True) if self.method.penalised else rows.seen)
        return jnp.stack(seen, axis=1)

    def keys(self, rows: RequestRows, width: int) -> Array:
        """Return the random keys of the next `width` tokens of each row, `[B · width]`: the keys of plain decoding."""
        keys: Array = rows.keys
        if self.method.draws:
            numbers = rows.new[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, numbers).reshape(-1)
        return keys

    def after(self, rows: RequestRows, judged: VerifiedTokens, ends: Array) -> RequestRows:
        """Return the rows after they took their tokens."""
        # The last token that each row took, which the next step feeds.
        tail = jnp.take_along_axis(judged.chosen, jnp.maximum(judged.count - 1, 0)[:, None], axis=1, mode="clip")[:, 0]
        left = rows.left - judged.count
        invalid = (judged.now & ~judged.fine).any(axis=1)
        seen = rows.seen
        if self.method.penalised:
            numbers = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
            seen = seen.at[numbers, judged.chosen].max(judged.now)
        ids, running = jnp.where(rows.running, tail, rows.ids), rows.running & ~(ends[tail] | (left <= 0) | invalid)
        return replace(rows, ids=ids, running=running, left=left, new=rows.new + judged.count, seen=seen)


def after_tokens(before: Array, every: Array, count: Array, axis: int) -> Array:
    """Select a state array after the first `count` `[B]` of S tokens.

    Args:
        before: the array `[B, …]` before the tokens.
        every: the array after each of the tokens, `[B, S, …]`, with the token axis right after the row axis.
        axis: the row axis, 0 in these shapes.
    """
    index = count.reshape((-1, *(1,) * (every.ndim - axis - 1)))
    index = jnp.expand_dims(index, tuple(range(axis)))
    selected = jnp.take_along_axis(every, jnp.maximum(index - 1, 0), axis=axis + 1, mode="clip")
    return jnp.where(jnp.squeeze(index, axis + 1) > 0, jnp.squeeze(selected, axis + 1), before)


def weighed(wanted: Array, ids: Array, here: Array, drawn: Array, keys: Array) -> tuple[Array, Array]:
    """Speculative sampling: accept drafts or replace them, so that tokens follow the target distribution.

    Draft x, sampled from q, is accepted with probability min(1, p(x) / q(x)). A rejected draft is replaced by a sample
    from max(p − q, 0), and where there is no draft, the token is a sample from p. Leviathan et al. 2023, algorithm 1.

    Args:
        wanted: `[B, k + 1, V]`, logits of the target distribution p.
        ids: `[B, k + 1]`, the drafts, padded.
        here: `[B, k + 1]` bool, where there is a draft.
        drawn: `[B, k, V]`, logits of the draft distribution q.
        keys: `[B · (k + 1)]` random keys.

    Returns:
        tokens `[B, k + 1]`, distributed as p whatever the drafts are, and which of them are accepted drafts.
    """
    shape = ids.shape
    p = jax.nn.softmax(wanted, axis=-1)
    q = jnp.pad(jax.nn.softmax(drawn, axis=-1), ((0, 0), (0, 1), (0, 0)))
    at_p, at_q = (jnp.take_along_axis(x, ids[..., None], axis=-1, mode="clip")[..., 0] for x in (p, q))
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, LUCK)))(keys).reshape(shape)
    is_kept = here & (uniform * at_q < at_p)
    rest = jnp.maximum(p - q, 0.0)
    has_rest = here & (rest.sum(axis=-1) > 0)  # otherwise p and q are equal up to rounding, and p serves as well
    replacement = draw(jnp.where(has_rest[..., None], jnp.log(rest), wanted).reshape(-1, wanted.shape[-1]), keys)
    return jnp.where(is_kept, ids, replacement.reshape(shape)), is_kept


# Constants folded into the key of a token: for accepting its draft, and for sampling the draft. The key itself is for
# sampling the token, as in plain decoding.
LUCK, DRAFT = 1, 2
