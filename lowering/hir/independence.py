"""Whether a node treats tokens, or rows of the batch, alone, and whether a block that carries a state is the same in
pieces: by the proof of `tokenwise`, or by tests on random numbers, where there is no proof or where one may not see
all.

Of a block with a state prefill, then extend, have to give forward's numbers. A user's step needs no trial: one pure
function that was traced once runs in every program (`TokenStep`), and blocks of this package are held to their formulas
by tests. A block of a plugin is tried: two rows of five tokens, read whole and in ragged pieces, one of which is a
single token. All of them are tried in one program of XLA, and equal ones once.
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

# What the dims are where a function is tried; every other is 2.
SIZES = {"batch": 4, "seq": 5}

# A program that runs once, on a few numbers: what it takes is its compile.
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
    """Answer `question` for all nodes that are `wanted`, as far as it is not known of them yet, by `tried` in one
    program: its compile takes most of the time."""
    nodes = ((node, tuple(map(inner.type, node.inputs))) for inner, node in graph.walk())
    asked = dict.fromkeys((node.op, operands) for node, operands in nodes if wanted(node, operands))
    new = [a for a in asked if not types.is_known(question, *a)]
    if len(new) < 2:
        return  # one is tried where it stands
    try:
        answers = tried(types, new)
    except Exception:  # one of them fails at these sizes: that is said of the one, where it stands
        return
    for answer, a in zip(answers, new, strict=True):
        types.tell(answer, question, *a)


def differing(types: TypeCache, op: Op, operands: tuple[TensorType, ...]) -> dict[str, str]:
    """The dims along which the op of a slice is not the slice of the op, on random numbers, and what it is instead."""
    try:
        return tried(types, [(op, operands)])[0]
    except Exception as error:
        return dict.fromkeys(dims_of(operands), f"it fails on slices of {SIZES}: {first_line(error)}")


def dims_of(operands: tuple[TensorType, ...]) -> tuple[str, ...]:
    """Those of `SIZES` that operands have."""
    return tuple(dim for dim in SIZES if any(dim in t.symbols for t in operands))


def tried(types: TypeCache, asked: list[Asked]) -> list[dict[str, str]]:
    """`differing` for each, evaluated by one program. At once, as a program may be derived inside a trace."""
    drawn = [[random_array(_bound(t, SIZES)) for t in operands] for _, operands in asked]
    plans = [list(_cuts(operands)) for _, operands in asked]
    functions = [as_function(op, operands, types) for op, operands in asked]

    def results(drawn: list[list[Any]]) -> list[list[list[Any]]]:
        return [
            [jax.tree.leaves(fn(*(_cut(a, axis, keep) for a, axis in zip(arrays, axes, strict=True))))
             for _, axes, keep in [("", (None,) * len(arrays), slice(None)), *cuts]]
            for fn, arrays, cuts in zip(functions, drawn, plans, strict=True)
        ]  # fmt: skip

    with jax.ensure_compile_time_eval():
        found = jax.jit(results, compiler_options=QUICK)(drawn)
    out = []
    for (op, operands), cuts, (full, *parts) in zip(asked, plans, found, strict=True):
        made = types.infer(op, operands)
        differ = (
            dim
            for (dim, _, keep), part in zip(cuts, parts, strict=True)
            for whole, piece, t in zip(full, part, made, strict=True)
            if not _equal(_cut(np.asarray(whole), _axis(t, dim), keep), np.asarray(piece))
        )
        out.append({dim: f"a slice along {dim!r} alone gives other numbers" for dim in differ})
    return out


def _cuts(operands: tuple[TensorType, ...]) -> Iterator[tuple[str, tuple[int | None, ...], slice]]:
    """Slices along each dim: the dim, its axis in each operand, and what to keep of it."""
    for dim in dims_of(operands):
        size, axes = SIZES[dim], tuple(_axis(t, dim) for t in operands)
        yield from ((dim, axes, keep) for keep in (slice(0, 1), slice(size - 1, size), slice(1, size - 1)))


def _axis(t: TensorType, dim: str) -> int | None:
    return next((i for i, size in enumerate(t.shape) if str(size) == dim), None)


def random_array(t: TensorType) -> np.ndarray[Any, Any]:
    """Numbers of a type: normal ones, 0 and 1 where they are whole."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2, t.shape) if t.dtype.kind in "biu" else rng.standard_normal(t.shape)
    return drawn.astype(t.dtype)


def _cut(array: Any, axis: int | None, keep: slice) -> Any:
    return array if axis is None else array[(slice(None),) * axis + (keep,)]


def _equal(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> bool:
    return want.shape == got.shape and np.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True)


def why_not_alone(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Why a node may not treat every entry along `dim` alone; empty if it does. Found out once for all programs."""
    verdict = types.ask(prove, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    return types.ask(differing, node.op, operands).get(dim, "") if asks_slices(types, node, operands, dim) else ""


def why_rows_mix(graph: Graph, types: TypeCache) -> str:
    """Which stage may mix rows of the batch, and why; empty if every one is proved to treat them alone."""
    for inner, node in graph.walk():
        operands = tuple(inner.type(v) for v in node.inputs)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        if any("batch" in t.symbols for t in (*operands, *node.types)):
            if reason := why_not_alone(types, node, operands, "batch"):
                return f"{path_text(node.origin.path)}: {node.op.text()} is not proved to treat rows alone: {reason}"
    return ""


def prove(types: TypeCache, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """The verdict on one op."""
    return token_wise(as_function(op, operands, types), [t.spec for t in operands], dim)


def asks_slices(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Whether slices along `dim` have a say: for a claim that is not proved, and for a closure, which may branch on a
    size of 1, which a symbol hides from the proof."""
    proved = types.ask(prove, node.op, operands, dim).token_wise
    return isinstance(node.op, JaxFn) if proved else node.origin.token_wise


def try_slices(graph: Graph, types: TypeCache, ruled: Callable[[Op], object]) -> None:
    """Try together all nodes of a graph that slices will be asked of: those without a rule."""

    def wanted(node: Node, operands: tuple[TensorType, ...]) -> bool:
        if isinstance(node.op, Leaf) or node.op.regions() or ruled(node.op):
            return False
        return any(asks_slices(types, node, operands, dim) for dim in dims_of(operands))

    try_together(graph, types, differing, tried, wanted)


ROWS, TOKENS = 2, 5
WHOLE = {"batch": ROWS, "seq": TOKENS}
# The width of each piece, and how many of its tokens each row has.
PIECES = ((3, (3, 2)), (1, (1, 1)), (2, (1, 2)))


def try_blocks(graph: Graph, types: TypeCache, is_carried: Callable[[Op], bool]) -> None:
    """Try together those that carry a state, as far as it is not known of them yet."""

    def wanted(node: Node, _: tuple[TensorType, ...]) -> bool:
        return is_carried(node.op) and not is_ours(type(node.op))

    try_together(graph, types, pieces_differ, _tried_in_pieces, wanted)


def pieces_differ(types: TypeCache, op: Hir, operands: tuple[TensorType, ...]) -> str:
    """What differs between the pieces and the whole; empty if nothing does."""
    return _tried_in_pieces(types, [(op, operands)])[0]


def _tried_in_pieces(types: TypeCache, asked: list[Asked]) -> list[str]:
    drawn = [[random_array(_bound(t, WHOLE)) for t in operands] for _, operands in asked]

    def results(drawn: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [_both(types, op, kinds, arrays) for (op, kinds), arrays in zip(asked, drawn, strict=True)]

    with jax.ensure_compile_time_eval():
        found = jax.device_get(jax.jit(results, compiler_options=QUICK)(drawn))
    return [_difference(*pair) for pair in found]


def _bound(t: TensorType, sizes: Mapping[str, int]) -> TensorType:
    return t.bind({**dict.fromkeys(t.symbols, 2), **sizes})


def _both(types: TypeCache, op: Any, kinds: Sequence[TensorType], arrays: list[Any]) -> tuple[Any, Any]:
    """The results of the whole, and those of the pieces by piece."""
    bound = tuple(_bound(t, WHOLE) for t in kinds)
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
