"""`TokenHistory`: the earlier tokens of rows, and how penalties, bans and a bias change the logits by them.

`check_processors` traces and checks the user's functions `logits_processor` before a program runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RequestError, RlxError, listing
from rlx_jax.generate.sampler import LARGEST, LogitsProcessor, SamplerValues, SamplingSteps
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.user_functions import (
    MAX_CAPTURED,
    callbacks,
    captured_arrays,
    captured_names,
    fingerprint,
    is_consumed,
    trace_error,
    trace_uncached,
)
from rlx_jax.runtime.programs import Programs

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenHistory:
    """The earlier tokens of rows, in the forms that the steps of a sampler read.

    Attributes:
        num_new: `[B]` int32, number of tokens chosen so far.
        seen: `[B, V]` bool, the tokens of prompt and answer; `[B, 0]` without a repetition penalty.
        counts: `[B, V]` int32, how often each token was chosen; `[B, 0]` without a presence or frequency penalty.
        tokens: `[B, T]` int32, prompt and answer, padded with -1; `[B, 0]` where no step reads them.
    """

    num_new: Any
    seen: Any
    counts: Any
    tokens: Any

    def append(self, ids: Array, active: Array) -> TokenHistory:
        """Return the history with more tokens.

        Args:
            ids: `[B]`, or `[B, N]` for several tokens of each row.
            active: bool of the same shape, the ones to append; in a row they come first.
        """
        added = active.astype(jnp.int32)
        num_new = self.num_new + (added if active.ndim == 1 else added.sum(axis=1, dtype=jnp.int32))
        seen, counts, tokens = self.seen, self.counts, self.tokens
        batch = num_new.shape[0]
        ids, added, rows = (x.reshape(batch, -1) for x in (ids, added, jnp.arange(batch, dtype=jnp.int32)))
        if seen.shape[1]:
            seen = seen.at[rows, ids].max(added.astype(bool))
        if counts.shape[1]:
            counts = counts.at[rows, ids].add(added)
        if tokens.shape[1]:
            index = self.lengths()[:, None] + jnp.cumsum(added, axis=1) - 1
            index = jnp.where(added > 0, index, tokens.shape[1])  # an index past the end is dropped
            tokens = tokens.at[rows, index].set(ids, mode="drop")
        return TokenHistory(num_new, seen, counts, tokens)

    def lengths(self) -> Array:
        """Return the number of `tokens` of each row, `[B]` int32."""
        lengths: Array = (self.tokens >= 0).sum(axis=1, dtype=jnp.int32)
        return lengths

    def before_each(self, ids: Array) -> TokenHistory:
        """Return the histories before each of N + 1 tokens, of which `ids` `[B, N]` are the first, as `B · (N + 1)`
        rows."""
        steps = [self]
        for i in range(ids.shape[1]):
            steps.append(steps[-1].append(ids[:, i], jnp.ones_like(ids[:, i], bool)))

        def join(*parts: Array) -> Array:
            return jnp.stack(parts, axis=1).reshape(ids.shape[0] * len(parts), *parts[0].shape[1:])

        history: TokenHistory = jax.tree.map(join, *steps)
        return history


def adjust_logits(
    steps: SamplingSteps, values: SamplerValues, logits: Array, history: TokenHistory, stop_mask: Array
) -> Array:
    """Return the logits `[B, V]` float32 after bias, penalties, bans and functions of the user.

    Args:
        history: the earlier tokens of the rows.
        stop_mask: as in `TokenChooser.choose_next`.
    """
    if steps.biased:
        logits = logits + jnp.atleast_2d(values.bias)
    if steps.penalised:
        penalised = jnp.where(logits > 0, logits / values.penalty, logits * values.penalty)
        logits = jnp.where(history.seen, penalised, logits)
    if steps.counted:
        counts = history.counts.astype(jnp.float32)
        logits = logits - values.frequency * counts - values.presence * jnp.minimum(counts, 1.0)
    logits = jnp.minimum(logits, LARGEST) if steps.changes_logits else logits
    if steps.delayed:
        is_early = history.num_new[:, None] < values.min_tokens
        if stop_mask.ndim == 1:
            logits = jnp.where(is_early & stop_mask[None], -jnp.inf, logits)
        else:
            logits = ban_tokens(logits, stop_mask, is_early & (stop_mask >= 0))
    if steps.bad_words > (0, 0):
        logits = ban_sequences(logits, values.bad_words.reshape(-1, *values.bad_words.shape[-2:]), history)
    for number, processor in enumerate(steps.processors, 1):
        (processed,) = jax.tree.leaves(processor(logits, history.tokens))
        logits = jnp.where(values.processor == number, processed, logits)
    return logits


def ban_tokens(logits: Array, ids: Array, banned: Array) -> Array:
    """Return the logits `[B, V]` with -inf for those of the ids `[B, K]` that are banned, `[B, K]` bool."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    # The index past the vocabulary is dropped; -1 would be its last token.
    return logits.at[rows, jnp.where(banned, ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def ban_sequences(logits: Array, words: Array, history: TokenHistory) -> Array:
    """Return the logits `[B, V]` with -inf for tokens that would complete a sequence.

    Args:
        words: the sequences `[B or 1, W, L]`, padded with -1 on the left.
    """
    words = jnp.broadcast_to(words, (logits.shape[0], *words.shape[1:]))
    *_, width = words.shape
    index = history.lengths()[:, None] + jnp.arange(1 - width, 0, dtype=jnp.int32)[None]
    latest = jnp.take_along_axis(history.tokens, index, axis=1, mode="clip")
    latest = jnp.where(index >= 0, latest, -2)  # before the first token: equal to nothing
    prefix, last = words[:, :, :-1], words[:, :, -1]
    matches = ((prefix == latest[:, None]) | (prefix < 0)).all(axis=-1)
    return ban_tokens(logits, last, matches & (last >= 0))


def check_processors(
    programs: Programs, processors: Iterable[LogitsProcessor], batches: Iterable[int], vocab_size: int, max_tokens: int
) -> None:
    """Check the functions of a request; none of its programs has run yet.

    A program has what a function captures as constants. So the function is traced again for each request, and compared
    with its first trace.

    Args:
        batches: the numbers of rows that programs call the functions with.

    Raises:
        RequestError: a function fails, returns anything else than logits, calls Python at run time, captures values
            that a program cannot have, or differs from its first trace.
    """
    for processor, batch in ((processor, batch) for processor in processors for batch in batches):
        label = f"logits_processor {getattr(processor, '__name__', type(processor).__name__)}"
        types = (
            TensorType((batch, vocab_size), np.dtype(np.float32)), TensorType((batch, max_tokens), np.dtype(np.int32)),
        )  # fmt: skip
        try:
            closed_jaxpr = trace_uncached(processor, types)
        except (RlxError, RecursionError):
            raise
        except Exception as error:  # whatever the function or JAX raises
            raise RequestError(str(trace_error(label, types, error))) from error
        results = [TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in closed_jaxpr.out_avals]
        if results != [types[0]]:
            raise RequestError(f"{label} returns {', '.join(map(str, results)) or 'nothing'}; expected {types[0]}")
        if impure := sorted({*(type(e).__name__ for e in closed_jaxpr.effects), *callbacks(closed_jaxpr.jaxpr)}):
            raise RequestError(f"{label} has side effects, {listing(impure)}; expected a pure function")
        arrays = list(captured_arrays(closed_jaxpr))
        if any(isinstance(array, jax.core.Tracer) or is_consumed(array) for array in arrays):
            raise RequestError(f"{label} captures an array of another trace, or one that an earlier call consumed")
        if (size := sum(array.nbytes for array in arrays)) > MAX_CAPTURED:
            raise RequestError(f"{label} captures {size:,} bytes of arrays; at most {MAX_CAPTURED:,} are possible")
        content = fingerprint(closed_jaxpr)
        if content != programs.request_keys((check_processors, processor, types), lambda: content):  # noqa: B023
            raise RequestError(f"{label}: what it captures{captured_names(processor)} has changed; pass a new function")
