"""Handle the output `pooled` of a flow: one vector for each row, which the model itself computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    spec = built.hir.type(built.hir.outputs[names.index(output)])
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
