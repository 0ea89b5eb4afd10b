"""The modes of pooling: how the vectors of a text's tokens become one.

A mode maps tokens `[B, S, H]` float32 to `[B, H]`: of those where keep `[B, S]` is True, zeros if there is none; the
others are finite. position `[B, S]` is the number of a token within its text, from 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def _token_at(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    """Return the token vector of each row at its position `[B]`; zeros for a row without tokens to keep."""
    token = jnp.take_along_axis(tokens, position[:, None, None], axis=1)[:, 0, :]
    return jnp.where(jnp.any(keep, axis=1, keepdims=True), token, 0.0)


def _sum(tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted sum of the tokens of each row.

    As a product of matrices, because a masked sum for each of the many texts of a row reads all tokens of the row.
    """
    return jnp.einsum("bs,bsh->bh", weights.astype(jnp.float32), tokens, precision=jax.lax.Precision.HIGHEST)


def first_token(keep: jax.Array) -> jax.Array:
    """Return the position `[B]` of the first token to keep in each row."""
    return jnp.argmax(keep, axis=1)


def _count(keep: jax.Array) -> jax.Array:
    """Return the number of tokens `[B, 1]` float32, at least 1e-9 so that an empty row divides zeros, not by zero."""
    return jnp.maximum(jnp.sum(keep.astype(jnp.float32), axis=1, keepdims=True), 1e-9)


def _cls(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    return _token_at(tokens, keep, first_token(keep))


def _last(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    # argmax finds the first True, which in the reversed row is the last.
    return _token_at(tokens, keep, keep.shape[1] - 1 - jnp.argmax(keep[:, ::-1], axis=1))


def _max(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.where(keep[:, :, None], tokens, -jnp.inf), axis=1)
    # A row without tokens gives zeros, not -inf.
    return jnp.where(jnp.any(keep, axis=1, keepdims=True), largest, 0.0)


def _mean(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    return _sum(tokens, keep) / _count(keep)


def _mean_sqrt_len(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    return _sum(tokens, keep) / jnp.sqrt(_count(keep))


def _weighted_mean(tokens: jax.Array, keep: jax.Array, position: jax.Array) -> jax.Array:
    weights = jnp.where(keep, position + 1, 0).astype(jnp.float32)
    total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1e-9)
    return _sum(tokens, weights) / total


def _splade(x: jax.Array, logarithms: int) -> jax.Array:
    """Return log(1 + relu(x)), or log(1 + log(1 + relu(x)))."""
    x = jax.nn.relu(x)
    for _ in range(logarithms):
        x = jnp.log1p(x)
    return x


POOLING_MODES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
    # The function is monotonic, so that it is computed once for each value of the result.
    "splade_max": lambda tokens, keep, position: _splade(_max(tokens, keep, position), 1),
    "splade_max_log1p": lambda tokens, keep, position: _splade(_max(tokens, keep, position), 2),
    "splade_sum": lambda tokens, keep, _: _sum(_splade(tokens, 1), keep),
    "splade_sum_log1p": lambda tokens, keep, _: _sum(_splade(tokens, 2), keep),
}
