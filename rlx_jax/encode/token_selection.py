"""Results for tokens of texts, where a task reads each token, or each mask, in place of one vector for a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.dataclasses import dataclass
from rlx_jax.encode.vector_layers import unit_length
from rlx_jax.text.request_checks import Ids

# Names of the inputs with the indices of the selected tokens of each row `[rows, number]`, and with the labels that a
# request chooses among.
SELECTED, TARGETS = "selected", "targets"
Mask = np.ndarray[Any, np.dtype[np.bool_]]
# The number of the best labels is rounded up to this times a power of two.
BEST_STEP = 8


@dataclass(frozen=True)
class TokenSelection:
    """The tokens that a request returns results of.

    Attributes:
        token_id: those with this id, such as a mask; None: all.
        num_best: return this many of the largest probabilities and their labels, in place of the logits; 0: the logits.
        targets: the `num_best` labels to return instead; the last ones may be repeated.
    """

    token_id: int | None = None
    num_best: int = 0
    targets: tuple[int, ...] = ()

    def width(self, num_labels: int) -> int:
        """Return the number of values of a result."""
        return 2 * self.num_best or num_labels

    def counts(self, rows: Sequence[Ids]) -> list[int]:
        """Return the number of results of each text."""
        lengths = [*map(len, rows)]
        if self.token_id is None or not rows:
            return lengths
        begins = np.cumsum([0, *lengths[:-1]])
        counts: list[int] = np.add.reduceat(np.concatenate(rows) == self.token_id, begins, dtype=np.int64).tolist()
        return counts

    def number(self, rows: Sequence[Sequence[Ids]], few: int, most: int) -> int:
        """Return how many tokens of each row of these texts a call selects, some of which may be of no text.

        It is `few` or `most` if that suffices, else a power of two of `most`: so few programs are compiled, and few
        products with a vocabulary are computed in vain.
        """
        begins = np.cumsum([0, *map(len, rows[:-1])])
        count = int(np.add.reduceat(self.counts([*chain.from_iterable(rows)]), begins).max())
        return few if count <= few else bucket_size(count, most, None)

    def inputs(self, tokens: Ids, valid: Mask, number: int) -> dict[str, Ids]:
        """Return the inputs that select among the valid `tokens` `[rows, width]` of a call."""
        inputs = {SELECTED: first_indices((tokens == self.token_id) & valid, number)}
        return inputs | ({TARGETS: np.array(self.targets, np.int32)} if self.targets else {})


def first_indices(is_selected: Mask, number: int) -> Ids:
    """Return the indices of the selected tokens of each row, and of others after these: `[rows, number]`."""
    return np.argsort(~is_selected, axis=1, kind="stable")[:, :number].astype(np.int32)


def select_results(
    num_best: int, outputs: jax.Array, indices: jax.Array, targets: jax.Array | None = None
) -> jax.Array:
    """Return the results `[B, N, D]` of the tokens at `indices` `[B, N]` from the outputs of all tokens `[B, S, D]`."""
    return best_labels(num_best, take_tokens(outputs, indices), targets)


def take_tokens(outputs: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the outputs `[B, S, D]` of the tokens of each row at `indices` `[B, N]`: `[B, N, D]`."""
    return jnp.take_along_axis(outputs, indices[..., None], axis=1)


def best_labels(num_best: int, logits: jax.Array, targets: jax.Array | None = None) -> jax.Array:
    """Return the largest probabilities for logits `[…, labels]`, then their labels: `[…, 2·num_best]` float32.

    With `targets` those of these labels, in their order; without `num_best`, the logits. A float32 represents every id
    of a vocabulary exactly.
    """
    logits = logits.astype(jnp.float32)
    if not num_best:
        return logits
    if targets is None:
        values, labels = jax.lax.top_k(logits, num_best)
    else:
        values, labels = logits[..., targets], jnp.broadcast_to(targets, (*logits.shape[:-1], len(targets)))
    probabilities = jnp.exp(values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return jnp.concatenate([probabilities, labels.astype(jnp.float32)], axis=-1)


@dataclass(frozen=True)
class TokenResults:
    """Wrap a program so that it returns the results of the tokens at `SELECTED`, `[rows, number, D]` float32.

    Attributes:
        number: the number of tokens of a row.
        from_all: whether the program returns the outputs of all tokens, not of those at `SELECTED`.
        normalize: whether outputs are divided by their Euclidean lengths.
        num_best: see `TokenSelection`.
        has_targets: whether there is the input `TARGETS`.
    """

    number: int
    from_all: bool
    normalize: bool = False
    num_best: int = 0
    has_targets: bool = False

    def __call__(self, run: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            others = {TARGETS, SELECTED} if self.from_all else {TARGETS}
            model_inputs = {name: value for name, value in inputs.items() if name not in others}
            (outputs, *_), state = run(params, state, model_inputs)
            values = take_tokens(outputs, inputs[SELECTED]) if self.from_all else outputs
            results = best_labels(self.num_best, values, inputs.get(TARGETS))
            return (unit_length(results) if self.normalize else results,), state

        return function
