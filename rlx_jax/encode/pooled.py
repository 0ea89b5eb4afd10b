"""One vector for each row: the output `pooled` of a flow, which the model itself computes, and the pooling modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, NumericsError, RequestError, listing, shown
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import id_list
from rlx_jax.text.token_model import check_positions

POOLED = "pooled"

Vectors = np.ndarray[Any, np.dtype[np.float32]]


def pooled_width(model: CompiledModel, output: str = POOLED) -> int:
    """Return the width of the vectors, which are an output of the model.

    Raises:
        GraphError: there is no such output, or it is not `[batch, width]`.
    """
    names, built = model.output_names, model.template().built
    if output not in names:
        user = "embed" if output == POOLED else "logits"
        raise GraphError(f"{model.name}: {user} needs an output {output!r} [batch, width]: emit.output(name, vector)")
    spec = built.hir.output_types[names.index(output)]
    if len(spec.shape) != 2 or not isinstance(spec.shape[1], int):
        raise GraphError(f"{model.name}: the output {output!r} is {spec}; expected [batch, width], its width a number")
    return spec.shape[1]


def get_pooled(outputs: Any, output: str = POOLED) -> Any:
    """Return the vectors among the outputs of a call."""
    return outputs[output] if isinstance(outputs, dict) else outputs


def softmax(logits: Vectors, axis: int = -1) -> Vectors:
    """Return the probabilities of logits along an axis."""
    weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]


def check_finite(vectors: Vectors | list[Vectors], label: str, index: Callable[[int], int] = int) -> None:
    """Check that all vectors, or the several vectors of all texts, are finite.

    Args:
        vectors: the vectors.
        label, index: the name of the argument, and the index in it of what a vector is of.

    Raises:
        NumericsError: names those that are not.
    """
    is_finite = [np.isfinite(v).all() for v in vectors] if isinstance(vectors, list) else np.isfinite(vectors).all(1)
    failed = np.flatnonzero(~np.array(is_finite, bool)).tolist()
    if failed:
        rows = dict.fromkeys(map(index, failed), 0)
        names = listing((f"{label}[{i}]" for i in rows), 8)
        message = f"{len(failed)} of {len(vectors)} results are not finite: {names}"
        raise NumericsError(message, rows, [*vectors])


def check_padding(padding: Any, vocab_size: int, positions: int | None) -> tuple[int, int] | None:
    """Return the number of tokens and the id of padding, checked.

    Raises:
        RequestError: not two integers. SequenceLengthError: more tokens than positions. TokenIdError: no valid id.
    """
    if padding is None:
        return None
    if not isinstance(padding, tuple) or len(padding) != 2:
        raise RequestError(f"padding is {shown(padding)}; expected (tokens, id)")
    tokens = check_integer("padding[0]", padding[0], 1)
    check_positions(tokens, positions, "padding[0]")
    return tokens, id_list([padding[1]], vocab_size, "padding[1:]")[0]


# -- pooling modes -----------------------------------------------------------------------------

# A mode maps tokens `[B, S, H]` float32 to `[B, H]`, the pool of the tokens where keep `[B, S]` is True, or zeros if
# there are none; the other tokens are finite. position `[B, S]` is the number of a token within its text, from 0.


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
