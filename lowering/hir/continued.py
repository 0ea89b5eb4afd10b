"""Whether a block that carries a state is the same in pieces: prefill, then extend, then forward's numbers.

A user's step needs no trial: one pure function that was traced once runs in every program (`TokenStep`), and blocks of
this package are held to their formulas by tests. A block of a plugin is tried on random numbers, as in `slices`: two
rows of five tokens, read whole and in ragged pieces, one of which is a single token. All of them are tried in one
program of XLA, and equal ones once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Hir, Op, TypeCache
from rlx_jax.ir.plugins import is_ours
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.hir.slices import QUICK, Asked, random_array, try_together
from rlx_jax.lowering.lower import as_function

ROWS, TOKENS = 2, 5
PIECES = ((3, (3, 2)), (1, (1, 1)), (2, (1, 2)))
"""The width of each piece, and how many of its tokens each row has."""


def is_tried(op: Any) -> bool:
    """Whether it is a plugin's."""
    return not is_ours(type(op))


def try_blocks(graph: Graph, types: TypeCache, is_carried: Callable[[Op], bool]) -> None:
    """Try together those that carry a state, as far as it is not known of them yet."""
    try_together(graph, types, differing, _tried, lambda node, _: is_carried(node.op) and is_tried(node.op))


def differing(types: TypeCache, op: Hir, operands: tuple[TensorType, ...]) -> str:
    """What differs between the pieces and the whole; empty if nothing does."""
    return _tried(types, [(op, operands)])[0]


def _tried(types: TypeCache, asked: list[Asked]) -> list[str]:
    drawn = [[random_array(_bound(t, TOKENS)) for t in operands] for _, operands in asked]

    def results(drawn: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [_both(types, op, kinds, arrays) for (op, kinds), arrays in zip(asked, drawn, strict=True)]

    with jax.ensure_compile_time_eval():
        found = jax.device_get(jax.jit(results, compiler_options=QUICK)(drawn))
    return [_difference(*pair) for pair in found]


def _bound(t: TensorType, tokens: int) -> TensorType:
    return t.bind({**dict.fromkeys(t.symbols, 2), "batch": ROWS, "seq": tokens})


def _both(types: TypeCache, op: Any, kinds: Sequence[TensorType], arrays: list[Any]) -> tuple[Any, Any]:
    """The results of the whole, and those of the pieces by piece."""
    bound = tuple(_bound(t, TOKENS) for t in kinds)
    whole = jax.tree.leaves(as_function(op, bound, types)(*arrays))
    leaves = [np.zeros((ROWS, *s.type.shape), s.type.dtype) for s in op.slots(*bound)]
    length, made = np.zeros(ROWS, np.int32), []
    for number, (width, counts) in enumerate(PIECES):
        new = np.array(counts, np.int32)
        piece = [_piece(a, t, length, width) for a, t in zip(arrays, kinds, strict=True)]
        given = [*piece, *leaves, length, new]
        block = hir.Carried(op, len(leaves), fresh=not number)
        shapes = tuple(TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in given)
        out = jax.tree.leaves(as_function(block, shapes, types)(*given))
        made.append(out[: len(whole)])
        leaves, length = out[len(whole) :], length + new
    return whole, made


def _piece(array: Any, kind: TensorType, length: np.ndarray[Any, Any], width: int) -> Any:
    """The next tokens of each row; what has none, whole."""
    if "seq" not in kind.symbols:
        return array
    at = np.minimum(length[:, None] + np.arange(width), TOKENS - 1)
    return array[np.arange(ROWS)[:, None], at]


def _difference(whole: list[Any], pieces: list[list[Any]]) -> str:
    length = np.zeros(ROWS, np.int64)
    for (_, counts), made in zip(PIECES, pieces, strict=True):
        for number, (want, got) in enumerate(zip(whole, made, strict=True)):
            for row, count in enumerate(counts):
                expected, found = want[row, length[row] : length[row] + count], got[row, :count]
                if not np.allclose(expected, found, rtol=1e-3, atol=1e-4, equal_nan=True):
                    at = f"tokens {length[row]} to {length[row] + count - 1} of a row"
                    return f"result {number} of {at} read in pieces is another than read whole"
        length += np.array(counts)
    return ""
