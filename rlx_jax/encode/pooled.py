"""The output `pooled` of a flow: one vector for each row, made by the model itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, NumericsError, RequestError, listing, shown
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import id_list
from rlx_jax.text.token_model import check_positions

POOLED = "pooled"

Vectors = np.ndarray[Any, np.dtype[np.float32]]


def pooled_width(model: CompiledModel) -> int:
    """The width of the vectors.

    Raises:
        GraphError: there is no such output, or it is not `[batch, width]`.
    """
    names, built = model.output_names, model.template().built
    if POOLED not in names:
        raise GraphError(
            f"{model.name}: embed needs an output {POOLED!r} [batch, width]: emit.output({POOLED!r}, vector)"
        )
    found = built.hir.type(built.hir.outputs[names.index(POOLED)])
    if len(found.shape) != 2 or not isinstance(found.shape[1], int):
        raise GraphError(f"{model.name}: the output {POOLED!r} is {found}; expected [batch, width], its width a number")
    return found.shape[1]


def pooled_of(outputs: Any) -> Any:
    """The vectors among what a call gave."""
    return outputs[POOLED] if isinstance(outputs, dict) else outputs


def check_finite(vectors: Vectors, what: str) -> None:
    """Refuse vectors that are not finite.

    Raises:
        NumericsError: names them.
    """
    failed = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if failed.size:
        named = listing((f"{what}[{i}]" for i in failed), 8)
        message = f"embed: {failed.size} of {len(vectors)} vectors are not finite: {named}"
        raise NumericsError(message, dict.fromkeys(failed.tolist(), 0), [*vectors])


def check_padding(padding: Any, vocab_size: int, positions: int | None) -> tuple[int, int] | None:
    """Tokens and id of padding.

    Raises:
        RequestError: no two integers. SequenceLengthError: over the positions. TokenIdError: no id.
    """
    if padding is None:
        return None
    if not isinstance(padding, tuple) or len(padding) != 2:
        raise RequestError(f"padding is {shown(padding)}; expected (tokens, id)")
    tokens = whole_number("padding[0]", padding[0], 1)
    check_positions(tokens, positions, "padding[0]")
    return tokens, id_list([padding[1]], vocab_size, "padding[1:]")[0]
