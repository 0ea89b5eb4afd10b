"""`VerifyLoop`: speculative decoding. A step proposes drafts, verifies them in one program, and accepts some.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". A step feeds a row's last token and
k drafts after it to `verify`. Its k + 1 logits equal plain decoding's as long as all drafts before them are
accepted. So each accepted draft saves a step of plain decoding, and the logits after the last accepted draft give one
more token. The state also caches rejected drafts; its length excludes them, and later tokens overwrite them.

The source of drafts is a `Drafter`; `drafters.py` has one class for each source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, Shardings, StateArrays
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.generate.decode import NOT_FINITE, STOPPED, Array, RequestRows, Sizes, TokenChooser, ends_row
from rlx_jax.generate.sampler import SamplerValues, SamplingSteps, choose_tokens, finite_rows, sample, warp_logits
from rlx_jax.generate.token_history import TokenHistory, adjust_logits
from rlx_jax.ir.paths import per_token_key
from rlx_jax.lowering.inspect.hlo import DRAFTING, SAMPLER
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import LENGTH

# Prefix of the drafter's arrays in the state of the loop. Block paths have no slash, so that names cannot clash.
DRAFTER_PREFIX = "draft/"


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
    def from_steps(steps: int, ids: Array, is_valid: Array, logits: Array | None) -> Drafts:
        """Return the drafts of the first `steps` of n steps.

        Args:
            ids: `[n, B]` int32.
            is_valid: `[n, B]` bool, whether they are valid; from the first invalid one on, none is.
            logits: `[n, B, V]`, or None.
        """
        logits = None if logits is None else logits[:steps].swapaxes(0, 1)
        return Drafts(ids[:steps].T, is_valid[:steps].sum(axis=0, dtype=jnp.int32), logits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DrafterState:
    """The data of a drafter in the loop.

    Attributes:
        params: its parameters.
        carry: small arrays that it carries from step to step.
        state: the state of its model, which is updated in place.
    """

    params: Any
    carry: Any
    state: StateArrays


@dataclass(frozen=True)
class DraftStep:
    """One step of the loop before its drafts are verified.

    Attributes:
        rows: the rows of the request.
        state_lengths: `[B]`, number of tokens in the model's state, which does not include the token chosen last.
        sampling_steps, sampler_values, stop_mask: how tokens are chosen.
    """

    rows: RequestRows
    state_lengths: Array
    sampling_steps: SamplingSteps
    sampler_values: SamplerValues
    stop_mask: Array

    @property
    def draft_limit(self) -> Array:
        """Return the number of useful drafts per row, `[B]`: n − 1 for a row with n tokens left, and 0 for one that has
        ended. The n-th token comes from the logits after the last draft."""
        return jnp.where(self.rows.running, self.rows.remaining - 1, 0)


@dataclass(frozen=True)
class VerifiedTokens:
    """The result of a step.

    Attributes:
        ids: `[B, k + 1]` int32, the token at each position.
        is_emitted: `[B, k + 1]` bool, whether the row takes that token.
        is_finite: `[B, k + 1]` bool, whether its logits were finite.
        is_accepted: `[B, k + 1]` bool, whether it is an accepted draft.
        num_emitted: `[B]` int32, number of tokens that each row takes.
        hidden: `[B, k + 1, H]`, the inputs of the model's head, if the drafter uses them.
    """

    ids: Array
    is_emitted: Array
    is_finite: Array
    is_accepted: Array
    num_emitted: Array
    hidden: Array | None = None


def choose_draft(
    draft_step: DraftStep, history: TokenHistory, logits: Array
) -> tuple[Array, Array, Array | None, TokenHistory]:
    """Choose the next draft of each row.

    Args:
        history: the tokens of the rows, their drafts so far included.
        logits: `[B, V]`, logits of the draft model.

    Returns:
        ids `[B]` int32; whether the logits are finite, `[B]` bool; the logits of the distribution that the draft was
        sampled from, None if it was not sampled; and `history` with the draft.
    """
    sampling, values = draft_step.sampling_steps, draft_step.sampler_values
    adjusted_logits = adjust_logits(sampling, values, logits, history, draft_step.stop_mask)
    draft_logits = warp_logits(sampling, values, adjusted_logits) if sampling.do_sample else None
    ids = jnp.argmax(adjusted_logits, axis=-1).astype(jnp.int32)
    if draft_logits is not None:
        keys = jax.vmap(jax.random.fold_in)(draft_step.rows.keys, history.num_new)
        ids = sample(draft_logits, jax.vmap(lambda key: jax.random.fold_in(key, DRAFT_KEY))(keys))
    return ids, finite_rows(adjusted_logits), draft_logits, history.append(ids, jnp.ones_like(ids, bool))


@dataclass(frozen=True)
class Drafter:
    """Base class of sources of drafts; its own methods serve a source without a model.

    A request has a drafter on the host; the loop has what `bind` returns, with functions of arrays. The latter is
    compared by value, as it is part of the key of the compiled loop.

    Attributes:
        source_name: the argument `speculative=` in words, for reports.
        needs_hidden: whether it reads hidden states: the inputs of the model's head for each token.
        reads_tokens: whether it reads the tokens of the history of the rows.
        tokens: number of drafts per step, at least 1.
        max_positions: the longest sequence that it supports, in tokens; None for no limit.
    """

    source_name: ClassVar[str]
    needs_hidden: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False

    tokens: int
    max_positions: int | None = None

    def bind(self, sizes: Mapping[str, int]) -> Drafter:
        """Return the drafter that the loop is compiled with, for these sizes of `batch` and `context`.

        It has no parameters, so that a compiled loop keeps none alive.
        """
        return self

    def params(self) -> Any:
        """Return its parameters; None if it has none."""

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Return the initial `DrafterState.carry` and `DrafterState.state`, after prefill.

        Args:
            prompts: ids of each row.
            first: `[B, 1]`, the tokens chosen after the prompts.
            hidden: the hidden states of the prompts, one `[B, S, H]` for each chunk, if it reads them.
        """
        return None, {}

    def lir(self) -> Lir | None:
        """Return the program that it runs inside of the loop, with a separate state; None if it runs none."""
        return None

    def shardings(self) -> Shardings | None:
        """Return the sharding of that program's parameters and state over several devices; only called if `lir` returns
        a program."""
        return None

    def propose(self, drafter_state: DrafterState, draft_step: DraftStep) -> tuple[Drafts, DrafterState]:
        """Propose up to `tokens` drafts per row."""
        raise NotImplementedError

    def accept(self, drafter_state: DrafterState, draft_step: DraftStep, verified: VerifiedTokens) -> DrafterState:
        """Update the drafter for the tokens that the rows took in this step."""
        return drafter_state


class LoopState(NamedTuple):
    """The carry of the loop.

    Attributes:
        step: number of steps done.
        rows: the rows of the request.
        state: the state of the model and, with the prefix `DRAFTER_PREFIX`, of the drafter.
        drafter_carry: `DrafterState.carry`.
        counts: the counts of `VerifyLoop`.
        out: the tokens so far.
    """

    step: Array
    rows: RequestRows
    state: StateArrays
    drafter_carry: Any
    counts: Array
    out: Array


@dataclass(frozen=True)
class VerifyLoop(TokenChooser):
    """Wrapper of the program `verify`: propose, verify and accept drafts, `steps` times or until every row has ended.

    Inputs: `rows`, `sampler_values`, `stop_mask`; the drafter's `params` and `drafter_carry`; and `counts` `[3]` int32:
    drafts verified, drafts accepted, steps. Outputs: (tokens `[B, steps · (drafts + 1)]`, rows, drafter_carry, counts),
    state. The tokens of a row are padded with `STOPPED`. Rows that are slots have the operands of `DecodeLoop`.

    Attributes:
        ids_input: name of the token input of `verify`.
        steps: number of steps.
        drafter: the bound drafter.
        rollback_arrays: arrays of the state that every token changes and that have no position axis, such as recurrent
            states, with the axis of their rows. `verify` returns them after each token, as rejecting a draft must undo
            it.
        stop_width, max_tokens: as in `DecodeLoop`.
    """

    ids_input: str
    steps: int
    drafter: Drafter
    rollback_arrays: tuple[tuple[str, int], ...] = ()
    stop_width: int = 0
    max_tokens: int = 0

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it; see `rlx_jax.compiler.executable.HasRequestArguments`."""
        drafts = {"speculative": self.drafter.source_name, "draft_tokens": str(self.drafter.tokens)}
        return {"samplers": self.sampling_steps.text, **drafts}

    def companions(self) -> Mapping[str, Lir]:
        """Return the companion program of the drafter, if any; see `rlx_jax.compiler.executable.HasCompanions`."""
        lir = self.drafter.lir()
        return {} if lir is None else {DRAFTER_PREFIX: lir}

    def companion_shardings(self) -> Shardings | None:
        """Return the shardings of the drafter's data; see `rlx_jax.compiler.executable.HasCompanions`."""
        # The drafter's parameters are an input of the loop, and its state a part of the loop's state.
        shardings = None if self.drafter.lir() is None else self.drafter.shardings()
        if shardings is None:
            return None
        state = {DRAFTER_PREFIX + name: sharding for name, sharding in shardings.state.items()}
        return replace(shardings, params={}, state=state, inputs={"params": dict(shardings.params)})

    def __call__(self, verify: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            rows = inputs["rows"]
            out = jnp.full((rows.ids.shape[0], self.steps * (self.drafter.tokens + 1)), STOPPED, jnp.int32)
            start = LoopState(jnp.int32(0), rows, state, inputs["drafter_carry"], inputs["counts"], out)

            def step(loop: LoopState) -> LoopState:
                return self.step(lambda state, verify_inputs: verify(params, state, verify_inputs), inputs, loop)

            least = inputs["min_running"] if self.stop_width else 0
            end = lax.while_loop(lambda loop: (loop.step < self.steps) & (loop.rows.running.sum() > least), step, start)
            return (end.out, end.rows, end.drafter_carry, end.counts), end.state

        return function

    def step(self, verify: Callable[..., Any], inputs: Mapping[str, Any], loop: LoopState) -> LoopState:
        """Run one step: propose drafts, verify them, and accept some. `verify` maps state and inputs to outputs and
        state."""
        rows, sampler_values, stop_mask = loop.rows, inputs["sampler_values"], inputs["stop_mask"]
        model_state = {name: array for name, array in loop.state.items() if not name.startswith(DRAFTER_PREFIX)}
        names = [name for name in loop.state if name.startswith(DRAFTER_PREFIX)]
        draft_arrays = {name.removeprefix(DRAFTER_PREFIX): loop.state[name] for name in names}
        draft_step = DraftStep(rows, model_state[LENGTH], self.sampling_steps, sampler_values, stop_mask)
        with jax.named_scope(DRAFTING):
            before = DrafterState(inputs["params"], loop.drafter_carry, draft_arrays)
            drafts, drafter_state = self.drafter.propose(before, draft_step)
        drafts = replace(drafts, count=jnp.clip(drafts.count, 0, draft_step.draft_limit))
        verify_inputs = {
            self.ids_input: jnp.concatenate([rows.ids[:, None], drafts.ids], axis=1),
            "lengths": jnp.where(rows.running, drafts.count + 1, 0),
        }
        outputs, model_state = verify(model_state, verify_inputs)
        with jax.named_scope(SAMPLER):
            verified = self.verify_drafts(outputs[0], rows, drafts, sampler_values, stop_mask)
        verified = replace(verified, hidden=outputs[1] if len(outputs) > 1 else None)
        # The cache past this length, of rejected drafts, is overwritten later.
        model_state[LENGTH] = draft_step.state_lengths + verified.num_emitted
        for name, axis in self.rollback_arrays:
            after_each = model_state.pop(per_token_key(name))
            model_state[name] = state_after_tokens(model_state[name], after_each, verified.num_emitted, axis)
        drafter_state = self.drafter.accept(drafter_state, draft_step, verified)
        state = model_state | {DRAFTER_PREFIX + name: array for name, array in drafter_state.state.items()}
        tokens = jnp.where(verified.is_emitted, jnp.where(verified.is_finite, verified.ids, NOT_FINITE), STOPPED)
        out = lax.dynamic_update_slice(loop.out, tokens, (jnp.int32(0), loop.step * (self.drafter.tokens + 1)))
        counts = (drafts.count.sum(dtype=jnp.int32), verified.is_accepted.sum(dtype=jnp.int32), jnp.int32(1))
        rows, total = self.update_rows(rows, verified, stop_mask), loop.counts + jnp.stack(counts)
        return LoopState(loop.step + 1, rows, state, drafter_state.carry, total, out)

    def verify_drafts(
        self, logits: Array, rows: RequestRows, drafts: Drafts, sampler_values: SamplerValues, stop_mask: Array
    ) -> VerifiedTokens:
        """Decide which tokens the rows take, by the logits `[B, k + 1, V]` after the last token and each draft."""
        batch, width, vocab = logits.shape
        flat, ended = logits.reshape(-1, vocab), partial(ends_row, stop_mask)
        if self.stop_width:  # a value for each of the tokens of a row
            repeat = partial(jnp.repeat, repeats=width, axis=0, total_repeat_length=batch * width)
            sampler_values, stop_mask = jax.tree.map(repeat, (sampler_values, stop_mask))
        history = rows.history.before_each(drafts.ids)
        adjusted_logits = adjust_logits(self.sampling_steps, sampler_values, flat, history, stop_mask)
        is_draft = jnp.arange(width, dtype=jnp.int32)[None] < drafts.count[:, None]
        ids = jnp.pad(drafts.ids, ((0, 0), (0, 1)))
        keys = self.token_keys(rows, width)
        if drafts.logits is None:
            # Choose the token as plain decoding does, random draw included, and accept a draft that equals it. This is
            # the rule below for a draft distribution with all its mass on the draft.
            chosen = choose_tokens(self.sampling_steps, sampler_values, adjusted_logits, keys).reshape(batch, width)
            is_accepted = is_draft & (chosen == ids)
        else:
            target_logits = warp_logits(self.sampling_steps, sampler_values, adjusted_logits).reshape(logits.shape)
            chosen, is_accepted = rejection_sample(target_logits, ids, is_draft, drafts.logits, keys)
        is_finite = self.is_finite(flat, adjusted_logits, chosen.reshape(-1)).reshape(batch, width)
        numbers = 1 + jnp.arange(width, dtype=jnp.int32)[None]
        is_last = ended(chosen) | (numbers >= rows.remaining[:, None]) | ~is_finite
        # A row takes a token if it accepted all drafts before it and none of them ended the row.
        accepted = jnp.cumprod((is_accepted & ~is_last).astype(jnp.int32), axis=1)
        is_emitted = rows.running[:, None] & jnp.pad(accepted[:, :-1], ((0, 0), (1, 0)), constant_values=1).astype(bool)
        is_accepted, count = is_accepted & is_emitted & is_finite, is_emitted.sum(axis=1, dtype=jnp.int32)
        return VerifiedTokens(chosen, is_emitted, is_finite, is_accepted, count)

    def token_keys(self, rows: RequestRows, width: int) -> Array:
        """Return the random keys of the next `width` tokens of each row, `[B · width]`: the keys of plain decoding."""
        keys: Array = rows.keys
        if self.sampling_steps.do_sample:
            numbers = rows.history.num_new[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, numbers).reshape(-1)
        return keys

    def update_rows(self, rows: RequestRows, verified: VerifiedTokens, stop_mask: Array) -> RequestRows:
        """Return the rows after they took their tokens."""
        # The last token that each row took, which the next step feeds.
        last_index = jnp.maximum(verified.num_emitted - 1, 0)[:, None]
        last_ids = jnp.take_along_axis(verified.ids, last_index, axis=1, mode="clip")[:, 0]
        remaining = rows.remaining - verified.num_emitted
        invalid = (verified.is_emitted & ~verified.is_finite).any(axis=1)
        return replace(
            rows,
            ids=jnp.where(rows.running, last_ids, rows.ids),
            running=rows.running & ~(ends_row(stop_mask, last_ids) | (remaining <= 0) | invalid),
            remaining=remaining,
            history=rows.history.append(verified.ids, verified.is_emitted),
        )


def state_after_tokens(before: Array, after_each: Array, count: Array, axis: int) -> Array:
    """Select a state array after the first `count` `[B]` of S tokens.

    Args:
        before: the array `[B, …]` before the tokens.
        after_each: the array after each of the tokens, `[B, S, …]`, with the token axis right after the row axis.
        axis: the row axis, 0 in these shapes.
    """
    index = count.reshape((-1, *(1,) * (after_each.ndim - axis - 1)))
    index = jnp.expand_dims(index, tuple(range(axis)))
    selected = jnp.take_along_axis(after_each, jnp.maximum(index - 1, 0), axis=axis + 1, mode="clip")
    return jnp.where(jnp.squeeze(index, axis + 1) > 0, jnp.squeeze(selected, axis + 1), before)


def rejection_sample(
    target_logits: Array, ids: Array, is_draft: Array, draft_logits: Array, keys: Array
) -> tuple[Array, Array]:
    """Speculative sampling: accept drafts or replace them, so that tokens follow the target distribution.

    Draft x, sampled from q, is accepted with probability min(1, p(x) / q(x)). A rejected draft is replaced by a sample
    from max(p − q, 0), and where there is no draft, the token is a sample from p. Leviathan et al. 2023, algorithm 1.

    Args:
        target_logits: `[B, k + 1, V]`, logits of the target distribution p.
        ids: `[B, k + 1]`, the drafts, padded.
        is_draft: `[B, k + 1]` bool, where there is a draft.
        draft_logits: `[B, k, V]`, logits of the draft distribution q.
        keys: `[B · (k + 1)]` random keys.

    Returns:
        tokens `[B, k + 1]`, distributed as p whatever the drafts are, and which of them are accepted drafts.
    """
    shape = ids.shape
    p = jax.nn.softmax(target_logits, axis=-1)
    q = jnp.pad(jax.nn.softmax(draft_logits, axis=-1), ((0, 0), (0, 1), (0, 0)))
    at_p, at_q = (jnp.take_along_axis(x, ids[..., None], axis=-1, mode="clip")[..., 0] for x in (p, q))
    uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, ACCEPT_KEY)))(keys).reshape(shape)
    is_accepted = is_draft & (uniform * at_q < at_p)
    rest = jnp.maximum(p - q, 0.0)
    has_rest = is_draft & (rest.sum(axis=-1) > 0)  # otherwise p and q are equal up to rounding, and p serves as well
    logits = jnp.where(has_rest[..., None], jnp.log(rest), target_logits)
    replacement = sample(logits.reshape(-1, logits.shape[-1]), keys)
    return jnp.where(is_accepted, ids, replacement.reshape(shape)), is_accepted


# Constants folded into the key of a token: for accepting its draft, and for sampling the draft. The key itself is for
# sampling the token, as in plain decoding.
ACCEPT_KEY, DRAFT_KEY = 1, 2
