"""Check that a node treats tokens, or rows of the batch, independently, and that blocks with a state may run in chunks.

Independence is proved by `tokenwise`, or tested on random numbers if there is no proof or if a proof may miss a case.

For a block with a state, prefill followed by extend has to compute what forward computes. A user-defined step needs no
test, because every program runs the same pure function, traced once (`TokenStep`). The test suite compares blocks of
this package with their formulas. Blocks of plugins are tested here: two rows of five tokens, in full and in ragged
chunks, one of which is a single token. All blocks of a graph run in one XLA program, and equal ones once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from rlx_jax.errors import first_line
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Hir, Leaf, Mir, Node, Op, TypeCache
from rlx_jax.ir.ops.custom import ExportedCall, JaxFn
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.queries import is_builtin
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.user_functions import formula_key
from rlx_jax.lowering.hir.tokenwise import Verdict, token_wise, token_wise_graph
from rlx_jax.lowering.lower import as_function, as_graph

# Sizes of the symbolic dims in a test; every other dim is 2.
SLICE_TEST_SIZES = {"batch": 4, "seq": 5}

# A test program runs once on a few numbers, so its compile time is all that matters.
FAST_COMPILE = {"xla_backend_optimization_level": 0}

T = TypeVar("T")
TypedOp = tuple[Op, tuple[TensorType, ...]]


def cache_results(
    graph: Graph, types: TypeCache, analysis: Callable[..., T],
    run_tests: Callable[[TypeCache, list[TypedOp]], list[T]], is_needed: Callable[[Node, tuple[TensorType, ...]], bool],
) -> None:  # fmt: skip
    """Compute an analysis of several nodes in one XLA program, since compilation takes most of the time.

    Args:
        graph: the graph with its regions.
        types: the cache of results; it receives the new ones.
        analysis: the function, under which results are cached by op and operands.
        run_tests: computes a list of results at once.
        is_needed: whether a node needs the analysis.
    """
    nodes = ((node, tuple(map(inner.type, node.inputs))) for inner, node in graph.walk())
    candidates = dict.fromkeys((node.op, operands) for node, operands in nodes if is_needed(node, operands))
    unknown = [candidate for candidate in candidates if not types.is_cached(analysis, *candidate)]
    if len(unknown) < 2:
        return  # a single node is tested on demand
    try:
        results = run_tests(types, unknown)
    except Exception:  # one of them fails at these sizes; the test on demand will report which one
        return
    for result, candidate in zip(results, unknown, strict=True):
        types.store(result, analysis, *candidate)


def slice_failures(types: TypeCache, op: Op, operands: tuple[TensorType, ...]) -> dict[str, str]:
    """Return the dims along which the op on a slice differs from the slice of the op's result, on random numbers.

    Returns:
        For each such dim a description of the failure; empty if there is none.
    """
    try:
        return run_slice_tests(types, [(op, operands)])[0]
    except Exception as error:
        return dict.fromkeys(tested_dims(operands), f"it fails on slices of {SLICE_TEST_SIZES}: {first_line(error)}")


def tested_dims(operands: tuple[TensorType, ...]) -> tuple[str, ...]:
    """Return the dims of `SLICE_TEST_SIZES` that occur in the operands."""
    return tuple(dim for dim in SLICE_TEST_SIZES if any(dim in t.symbols for t in operands))


def run_slice_tests(types: TypeCache, typed_ops: list[TypedOp]) -> list[dict[str, str]]:
    """Return the result of `slice_failures` for each op, computed by one XLA program."""
    random_operands = [[random_array(_bind_sizes(t, SLICE_TEST_SIZES)) for t in operands] for _, operands in typed_ops]
    plans = [list(_test_slices(operands)) for _, operands in typed_ops]
    functions = [as_function(op, operands, types) for op, operands in typed_ops]

    def results(random_operands: list[list[Any]]) -> list[list[list[Any]]]:
        return [
            [jax.tree.leaves(fn(*(_take(a, axis, entries) for a, axis in zip(arrays, axes, strict=True))))
             for _, axes, entries in [("", (None,) * len(arrays), slice(None)), *slices]]
            for fn, arrays, slices in zip(functions, random_operands, plans, strict=True)
        ]  # fmt: skip

    with jax.ensure_compile_time_eval():  # programs may be derived while a user's function is traced
        outputs = jax.jit(results, compiler_options=FAST_COMPILE)(random_operands)
    differences = []
    for (op, operands), slices, (full, *parts) in zip(typed_ops, plans, outputs, strict=True):
        result_types = types.infer(op, operands)
        failing_dims = (
            dim
            for (dim, _, entries), part in zip(slices, parts, strict=True)
            for full_result, sliced_result, t in zip(full, part, result_types, strict=True)
            if not _is_close(_take(np.asarray(full_result), _axis(t, dim), entries), np.asarray(sliced_result))
        )
        differences.append({dim: f"a slice along {dim!r} alone gives other numbers" for dim in failing_dims})
    return differences


def _test_slices(operands: tuple[TensorType, ...]) -> Iterator[tuple[str, tuple[int | None, ...], slice]]:
    """Yield the slices to test along each dim: the dim, its axis in each operand, and the range of it."""
    for dim in tested_dims(operands):
        size, axes = SLICE_TEST_SIZES[dim], tuple(_axis(t, dim) for t in operands)
        # The first and the last entry alone have size 1, where a squeeze or a branch may behave differently.
        yield from ((dim, axes, entries) for entries in (slice(0, 1), slice(size - 1, size), slice(1, size - 1)))


def _axis(t: TensorType, dim: str) -> int | None:
    """Return the axis of a dim in a type, or None."""
    return next((i for i, size in enumerate(t.shape) if str(size) == dim), None)


def random_array(t: TensorType) -> np.ndarray[Any, Any]:
    """Return a random array of a type: normally distributed floats; integers and bools are 0 or 1."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, t.shape) if t.dtype.kind in "biu" else rng.standard_normal(t.shape)
    return values.astype(t.dtype)


def _take(array: Any, axis: int | None, entries: slice) -> Any:
    """Return a slice of an array along an axis; the full array if the axis is None."""
    return array if axis is None else array[(slice(None),) * axis + (entries,)]


def _is_close(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> bool:
    return expected.shape == actual.shape and np.allclose(expected, actual, rtol=1e-4, atol=1e-5, equal_nan=True)


def why_not_independent(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Return why a node may mix entries along `dim`; empty if it treats each independently.

    The result is cached for all programs. A node that its author declared token-wise is tested instead of proved.
    """
    verdict = types.cached(prove, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    if not needs_slice_test(types, node, operands, dim):
        return ""
    return types.cached(slice_failures, node.op, operands).get(dim, "")


def why_rows_mix(graph: Graph, types: TypeCache) -> str:
    """Return which stage may mix rows of the batch, and why; empty if all are proved to treat them independently."""
    for inner, node in graph.walk():
        operands = tuple(inner.type(v) for v in node.inputs)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        if isinstance(node.op, ExportedCall):
            return node.op.rows_mix
        if any("batch" in t.symbols for t in (*operands, *node.types)):
            if reason := why_not_independent(types, node, operands, "batch"):
                where = f"{path_text(node.origin.path)}: {node.op.text()}"
                return f"{where} is not proved to treat rows independently: {reason}"
    return ""


def prove(types: TypeCache, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """Return the proof's verdict on one op along `dim`; for an op with plain values, cached for the process."""
    if isinstance(op, Mir | Hir) and op.traits.stored and not op.regions():
        return _cached_proof(op, operands, dim, formula_key(op))
    return token_wise(as_function(op, operands, types), [t.spec for t in operands], dim)


@functools.lru_cache(2**13)
def _cached_proof(op: Op, operands: tuple[TensorType, ...], dim: str, formula: Hashable) -> Verdict:
    """Return the proof's verdict; `formula` is in the cache key because the verdict depends on it."""
    graph = _cached_graph(op, operands, formula)
    if all(isinstance(n.op, Leaf) or (isinstance(n.op, Mir) and n.op.traits.stored) for n in graph.nodes):
        return token_wise_graph(graph, dim)
    return token_wise(as_function(op, operands, TypeCache()), [t.spec for t in operands], dim)


@functools.lru_cache(2**7)  # a graph is needed again for the other dim, soon after
def _cached_graph(op: Op, operands: tuple[TensorType, ...], formula: Hashable) -> Graph:
    """Return the computation of one op as tensor ops; `formula` is as in `_cached_proof`."""
    return as_graph(op, operands, TypeCache())


def needs_slice_test(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Return whether a node has to be tested on slices along `dim`.

    A declared claim is tested if there is no proof. A JAX closure is tested in spite of its proof, as it may branch on
    a size of 1, which the proof on symbolic sizes does not cover.
    """
    if not (isinstance(node.op, JaxFn) or node.origin.token_wise):
        return False  # without the time of a proof
    is_proved = types.cached(prove, node.op, operands, dim).token_wise
    return isinstance(node.op, JaxFn) if is_proved else node.origin.token_wise


def cache_slice_tests(graph: Graph, types: TypeCache, has_rule: Callable[[Op], object]) -> None:
    """Test all nodes of a graph without a rule that need a test on slices, in one XLA program."""

    def is_needed(node: Node, operands: tuple[TensorType, ...]) -> bool:
        if isinstance(node.op, Leaf) or node.op.regions() or has_rule(node.op):
            return False
        return any(needs_slice_test(types, node, operands, dim) for dim in tested_dims(operands))

    cache_results(graph, types, slice_failures, run_slice_tests, is_needed)


ROWS, TOKENS = 2, 5
CHUNK_TEST_SIZES = {"batch": ROWS, "seq": TOKENS}
# The width of each chunk, and the number of valid tokens of each row in it.
CHUNKS = ((3, (3, 2)), (1, (1, 1)), (2, (1, 2)))


def cache_chunk_tests(graph: Graph, types: TypeCache, is_carried: Callable[[Op], bool]) -> None:
    """Test all blocks of plugins that carry a state, in one XLA program."""

    def is_needed(node: Node, _: tuple[TensorType, ...]) -> bool:
        return is_carried(node.op) and not is_builtin(type(node.op))

    cache_results(graph, types, chunk_failure, run_chunk_tests, is_needed)


def chunk_failure(types: TypeCache, op: Hir, operands: tuple[TensorType, ...]) -> str:
    """Return a description of the first difference between a run in chunks and a full run; empty if there is none."""
    return run_chunk_tests(types, [(op, operands)])[0]


def run_chunk_tests(types: TypeCache, typed_ops: list[TypedOp]) -> list[str]:
    """Return the result of `chunk_failure` for each block, computed by one XLA program."""
    random_operands = [[random_array(_bind_sizes(t, CHUNK_TEST_SIZES)) for t in operands] for _, operands in typed_ops]

    def results(random_operands: list[list[Any]]) -> list[tuple[Any, Any]]:
        pairs = zip(typed_ops, random_operands, strict=True)
        return [_run_both_ways(types, op, operand_types, arrays) for (op, operand_types), arrays in pairs]

    with jax.ensure_compile_time_eval():
        outputs = jax.device_get(jax.jit(results, compiler_options=FAST_COMPILE)(random_operands))
    return [_difference(*pair) for pair in outputs]


def _bind_sizes(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    """Return a type with numbers for its symbols: `sizes`, and 2 for every other."""
    return t.bind({**dict.fromkeys(t.symbols, 2), **sizes})


def _run_both_ways(
    types: TypeCache, op: Any, operand_types: Sequence[TensorType], arrays: list[Any]
) -> tuple[Any, Any]:
    """Return the results of a block on all tokens at once, and its results on each chunk."""
    bound = tuple(_bind_sizes(t, CHUNK_TEST_SIZES) for t in operand_types)
    full_results = jax.tree.leaves(as_function(op, bound, types)(*arrays))
    leaves = [np.zeros((ROWS, *s.type.shape), s.type.dtype) for s in op.slots(*bound)]
    length, chunk_results = np.zeros(ROWS, np.int32), []
    for number, (width, counts) in enumerate(CHUNKS):
        new = np.array(counts, np.int32)
        chunk = [_next_chunk(a, t, length, width) for a, t in zip(arrays, operand_types, strict=True)]
        block_operands = [*chunk, *leaves, length, new]
        block = hir.Carried(op, len(leaves), fresh=not number)
        shapes = tuple(TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in block_operands)
        out = jax.tree.leaves(as_function(block, shapes, types)(*block_operands))
        chunk_results.append(out[: len(full_results)])
        leaves, length = out[len(full_results) :], length + new
    return full_results, chunk_results


def _next_chunk(array: Any, operand_type: TensorType, length: np.ndarray[Any, Any], width: int) -> Any:
    """Return the next `width` tokens of each row; an operand without a token axis stays as it is.

    A row may have fewer valid tokens than the chunk. The block has to ignore the tokens after them.
    """
    if "seq" not in operand_type.symbols:
        return array
    indices = np.minimum(length[:, None] + np.arange(width), TOKENS - 1)
    return array[np.arange(ROWS)[:, None], indices]


def _difference(full_results: list[Any], results_by_chunk: list[list[Any]]) -> str:
    """Compare the valid tokens of each chunk with the full run; return the first difference or an empty string."""
    length = np.zeros(ROWS, np.int64)
    for (_, counts), chunk_results in zip(CHUNKS, results_by_chunk, strict=True):
        for number, (full, chunk) in enumerate(zip(full_results, chunk_results, strict=True)):
            for row, count in enumerate(counts):
                expected, actual = full[row, length[row] : length[row] + count], chunk[row, :count]
                if not np.allclose(expected, actual, rtol=1e-3, atol=1e-4, equal_nan=True):
                    tokens = f"tokens {length[row]} to {length[row] + count - 1} of a row"
                    return f"result {number} of {tokens} differs between a run in chunks and a full run"
        length += np.array(counts)
    return ""
