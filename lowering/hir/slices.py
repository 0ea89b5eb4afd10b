"""What slices say of a function: a test on random numbers, where there is no proof, or where one may not see all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from rlx_jax.errors import first_line
from rlx_jax.ir.graph import Graph, Node, Op, TypeCache
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lower import as_function

SIZES = {"batch": 4, "seq": 5}
"""What the dims are where a function is tried; every other is 2."""

QUICK = {"xla_backend_optimization_level": 0}
"""A program that runs once, on a few numbers: what it takes is its compile."""

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
    drawn = [
        [random_array(t.bind({**dict.fromkeys(t.symbols, 2), **SIZES})) for t in operands] for _, operands in asked
    ]
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
