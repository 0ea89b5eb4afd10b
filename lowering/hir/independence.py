"""Check that a node treats tokens, or rows of the batch, independently, and that blocks with a state may run in chunks.

Independence is proved by `tokenwise`, or tested on random numbers if there is no proof or if a proof may miss a case.

For a block with a state, prefill followed by extend has to compute what forward computes. A user-defined step needs no
test, because every program runs the same pure function, traced once (`TokenStep`). The test suite compares blocks of
this package with their formulas. Blocks of plugins are tested here: two rows of five tokens, in full and in ragged
chunks, one of which is a single token. All blocks of a graph run in one XLA program, and equal ones once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from rlx_jax.errors import first_line
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Hir, Leaf, Node, Op, TypeCache
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.plugins import is_ours
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.hir.tokenwise import Verdict, token_wise
from rlx_jax.lowering.lower import as_function

# Sizes of the symbolic dims in a test; every other dim is 2.
SIZES = {"batch": 4, "seq": 5}

# A test program runs once on a few numbers, so its compile time is all that matters.
QUICK = {"xla_backend_optimization_level": 0}

T = TypeVar("T")
Asked = tuple[Op, tuple[TensorType, ...]]


def try_together(
    graph: Graph,
    types: TypeCache,
    question: Callable[..., T],
    tried: Callable[[TypeCache, list[Asked]], list[T]],
    wanted: Callable[[Node, tuple[TensorType, ...]], bool],
) -> None:
    """Compute an analysis of several nodes in one XLA program, since compilation takes most of the time.

    Args:
        graph: the graph with its regions.
        types: the cache of results; it receives the new ones.
        question: the function, under which results are cached by op and operands.
        tried: computes a list of results at once.
        wanted: whether a node needs the analysis.
    """
    nodes = ((node, tuple(map(inner.type, node.inputs))) for inner, node in graph.walk())
    candidates = dict.fromkeys((node.op, operands) for node, operands in nodes if wanted(node, operands))
    unknown = [candidate for candidate in candidates if not types.is_known(question, *candidate)]
    if len(unknown) < 2:
        return  # a single node is tested on demand
    try:
        answers = tried(types, unknown)
    except Exception:  # one of them fails at these sizes; the test on demand will report which one
        return
    for answer, candidate in zip(answers, unknown, strict=True):
        types.tell(answer, question, *candidate)


def differing(types: TypeCache, op: Op, operands: tuple[TensorType, ...]) -> dict[str, str]:
    """Return the dims along which the op on a slice differs from the slice of the op's result, on random numbers.

    Returns:
        For each such dim a description of the failure; empty if there is none.
    """
    try:
        return tried(types, [(op, operands)])[0]
    except Exception as error:
        return dict.fromkeys(dims_of(operands), f"it fails on slices of {SIZES}: {first_line(error)}")


def dims_of(operands: tuple[TensorType, ...]) -> tuple[str, ...]:
    """Return the dims of `SIZES` that occur in the operands."""
    return tuple(dim for dim in SIZES if any(dim in t.symbols for t in operands))


def tried(types: TypeCache, asked: list[Asked]) -> list[dict[str, str]]:
    """Return the result of `differing` for each op, computed by one XLA program."""
    drawn = [[random_array(_bound(t, SIZES)) for t in operands] for _, operands in asked]
    plans = [list(_cuts(operands)) for _, operands in asked]
    functions = [as_function(op, operands, types) for op, operands in asked]

    def results(drawn: list[list[Any]]) -> list[list[list[Any]]]:
        return [
            [jax.tree.leaves(fn(*(_cut(a, axis, keep) for a, axis in zip(arrays, axes, strict=True))))
             for _, axes, keep in [("", (None,) * len(arrays), slice(None)), *cuts]]
            for fn, arrays, cuts in zip(functions, drawn, plans, strict=True)
        ]  # fmt: skip

    with jax.ensure_compile_time_eval():  # programs may be derived while a user's function is traced
        outputs = jax.jit(results, compiler_options=QUICK)(drawn)
    differences = []
    for (op, operands), cuts, (full, *parts) in zip(asked, plans, outputs, strict=True):
        result_types = types.infer(op, operands)
        failing_dims = (
            dim
            for (dim, _, keep), part in zip(cuts, parts, strict=True)
            for full_result, sliced_result, t in zip(full, part, result_types, strict=True)
            if not _equal(_cut(np.asarray(full_result), _axis(t, dim), keep), np.asarray(sliced_result))
        )
        differences.append({dim: f"a slice along {dim!r} alone gives other numbers" for dim in failing_dims})
    return differences


def _cuts(operands: tuple[TensorType, ...]) -> Iterator[tuple[str, tuple[int | None, ...], slice]]:
    """Yield the slices to test along each dim: the dim, its axis in each operand, and the range of it."""
    for dim in dims_of(operands):
        size, axes = SIZES[dim], tuple(_axis(t, dim) for t in operands)
        # The first and the last entry alone have size 1, where a squeeze or a branch may behave differently.
        yield from ((dim, axes, keep) for keep in (slice(0, 1), slice(size - 1, size), slice(1, size - 1)))


def _axis(t: TensorType, dim: str) -> int | None:
    """Return the axis of a dim in a type, or None."""
    return next((i for i, size in enumerate(t.shape) if str(size) == dim), None)


def random_array(t: TensorType) -> np.ndarray[Any, Any]:
    """Return a random array of a type: normally distributed floats; integers and bools are 0 or 1."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, t.shape) if t.dtype.kind in "biu" else rng.standard_normal(t.shape)
    return values.astype(t.dtype)


def _cut(array: Any, axis: int | None, keep: slice) -> Any:
    """Return a slice of an array along an axis; the full array if the axis is None."""
    return array if axis is None else array[(slice(None),) * axis + (keep,)]


def _equal(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    return want.shape == got.shape and np.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True)


def why_not_alone(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Return why a node may mix entries along `dim`; empty if it treats each independently.

    The result is cached for all programs. A node that its author declared token-wise is tested instead of proved.
    """
    verdict = types.ask(prove, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    return types.ask(differing, node.op, operands).get(dim, "") if asks_slices(types, node, operands, dim) else ""


def why_rows_mix(graph: Graph, types: TypeCache) -> str:
    """Return which stage may mix rows of the batch, and why; empty if all are proved to treat them independently."""
    for inner, node in graph.walk():
        operands = tuple(inner.type(v) for v in node.inputs)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        if any("batch" in t.symbols for t in (*operands, *node.types)):
            if reason := why_not_alone(types, node, operands, "batch"):
                return f"{path_text(node.origin.path)}: {node.op.text()} is not proved to treat rows alone: {reason}"
    return ""


def prove(types: TypeCache, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """Return the proof's verdict on one op along `dim`."""
    return token_wise(as_function(op, operands, types), [t.spec for t in operands], dim)


def asks_slices(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Return whether a node has to be tested on slices along `dim`.

    A declared claim is tested if there is no proof. A JAX closure is tested in spite of its proof, as it may branch on
    a size of 1, which the proof on symbolic sizes does not cover.
    """
    is_proved = types.ask(prove, node.op, operands, dim).token_wise
    return isinstance(node.op, JaxFn) if is_proved else node.origin.token_wise


def try_slices(graph: Graph, types: TypeCache, ruled: Callable[[Op], object]) -> None:
    """Test all nodes of a graph without a rule that need a test on slices, in one XLA program."""

    def wanted(node: Node, operands: tuple[TensorType, ...]) -> bool:
        if isinstance(node.op, Leaf) or node.op.regions() or ruled(node.op):
            return False
        return any(asks_slices(types, node, operands, dim) for dim in dims_of(operands))

    try_together(graph, types, differing, tried, wanted)


ROWS, TOKENS = 2, 5
WHOLE = {"batch": ROWS, "seq": TOKENS}
# The width of each chunk, and the number of valid tokens of each row in it.
PIECES = ((3, (3, 2)), (1, (1, 1)), (2, (1, 2)))


def try_blocks(graph: Graph, types: TypeCache, is_carried: Callable[[Op], bool]) -> None:
    """Test all blocks of plugins that carry a state, in one XLA program."""

    def wanted(node: Node, _: tuple[TensorType, ...]) -> bool:
        return is_carried(node.op) and not is_ours(type(node.op))

    try_together(graph, types, pieces_differ, _tried_in_pieces, wanted)


def pieces_differ(types: TypeCache, op: Hir, operands: tuple[TensorType, ...]) -> str:
    """Return a description of the first difference between a run in chunks and a full run; empty if there is none."""
    return _tried_in_pieces(types, [(op, operands)])[0]


def _tried_in_pieces(types: TypeCache, asked: list[Asked]) -> list[str]:
    """Return the result of `pieces_differ` for each block, computed by one XLA program."""
    drawn = [[random_array(_bound(t, WHOLE)) for t in operands] for _, operands in asked]

    def results(drawn: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [_both(types, op, kinds, arrays) for (op, kinds), arrays in zip(asked, drawn, strict=True)]

    with jax.ensure_compile_time_eval():
        outputs = jax.device_get(jax.jit(results, compiler_options=QUICK)(drawn))
    return [_difference(*pair) for pair in outputs]


def _bound(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    """Return a type with numbers for its symbols: `sizes`, and 2 for every other."""
    return t.bind({**dict.fromkeys(t.symbols, 2), **sizes})


def _both(types: TypeCache, op: Any, kinds: Sequence[TensorType], arrays: list[Any]) -> tuple[Any, Any]:
    """Return the results of a block on all tokens at once, and its results on each chunk."""
    bound = tuple(_bound(t, WHOLE) for t in kinds)
    full_results = jax.tree.leaves(as_function(op, bound, types)(*arrays))
    leaves = [np.zeros((ROWS, *s.type.shape), s.type.dtype) for s in op.slots(*bound)]
    length, chunk_results = np.zeros(ROWS, np.int32), []
    for number, (width, counts) in enumerate(PIECES):
        new = np.array(counts, np.int32)
        chunk = [_piece(a, t, length, width) for a, t in zip(arrays, kinds, strict=True)]
        block_operands = [*chunk, *leaves, length, new]
        block = hir.Carried(op, len(leaves), fresh=not number)
        shapes = tuple(TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in block_operands)
        out = jax.tree.leaves(as_function(block, shapes, types)(*block_operands))
        chunk_results.append(out[: len(full_results)])
        leaves, length = out[len(full_results) :], length + new
    return full_results, chunk_results


def _piece(array: Any, kind: TensorType, length: np.ndarray[Any, Any], width: int) -> Any:
    """Return the next `width` tokens of each row; an operand without a token axis stays as it is.

    A row may have fewer valid tokens than the chunk. The block has to ignore the tokens after them.
    """
    if "seq" not in kind.symbols:
        return array
    indices = np.minimum(length[:, None] + np.arange(width), TOKENS - 1)
    return array[np.arange(ROWS)[:, None], indices]


def _difference(whole: list[Any], pieces: list[list[Any]]) -> str:
    """Compare the valid tokens of each chunk with the full run; return the first difference or an empty string."""
    length = np.zeros(ROWS, np.int64)
    for (_, counts), chunk_results in zip(PIECES, pieces, strict=True):
        for number, (want, got) in enumerate(zip(whole, chunk_results, strict=True)):
            for row, count in enumerate(counts):
                expected, actual = want[row, length[row] : length[row] + count], got[row, :count]
                if not np.allclose(expected, actual, rtol=1e-3, atol=1e-4, equal_nan=True):
                    tokens = f"tokens {length[row]} to {length[row] + count - 1} of a row"
                    return f"result {number} of {tokens} read in pieces is another than read whole"
        length += np.array(counts)
    return ""
