"""A graph while it grows: every value is known with its numbers, in float64.

So a random graph is safe by construction: an op is kept only if its results are finite, few and of moderate size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.errors import RlxError
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Leaf, Mir, Op, Param, StateRead, TypeCache, Value, constant
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import LayerIndex, Origin, Path, StateLeaf
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import TensorType, as_dtype, is_float, is_static, symbol
from tests.ops import SIZES, evaluate
from tests.ops.evaluate import Feeds
from tests.ops.sample import Array

F32, BF16, F16, I32, BOOL = (as_dtype(name) for name in ("f32", "bf16", "f16", "i32", "bool"))
LARGEST = {F32: 1e3, F16: 1e2, BF16: 1e3}
MAX_ELEMENTS = 256
MAX_RANK = 5


@dataclass(frozen=True)
class Known:
    """A value with its numbers: float64 where floating; `fixed` if constants alone make it."""

    value: Value
    type: TensorType
    array: Array
    fixed: bool = False

    @property
    def is_float(self) -> bool:
        return is_float(self.type.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.type.shape


@dataclass(frozen=True, repr=False)
class Case:
    """A finished random graph: what it is fed, and what it gives."""

    graph: Graph
    feeds: Feeds
    outputs: tuple[Known, ...]
    state: dict[str, Known]
    types: TypeCache

    def __repr__(self) -> str:
        return dump(
            self.graph, "mir" if all(isinstance(n.op, Leaf | Mir | Repeat) for n in self.graph.nodes) else "hir"
        )


def plain(dim: Any) -> bool:
    """Whether a dimension is a number or one symbol, not a sum of them."""
    return is_static(dim) or str(dim) in SIZES


def size(dim: Any) -> int:
    """A plain dimension as a number."""
    return SIZES[str(dim)] if not is_static(dim) else int(dim)


@dataclass
class Sketch:
    """A graph under construction, or a region's body (`iterations` > 0)."""

    rng: np.random.Generator
    b: Builder
    feeds: Feeds = field(default_factory=Feeds)
    names: Iterator[int] = field(default_factory=itertools.count)
    palette: tuple[int | str, ...] = (2, 3, 4)
    iterations: int = 0
    values: list[Known] = field(default_factory=list)
    reads: list[tuple[StateLeaf, Known]] = field(default_factory=list)
    state: dict[str, Known] = field(default_factory=dict)

    def draw(self, n: int) -> int:
        """A number below `n`."""
        return int(self.rng.integers(n))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.draw(len(options))]

    def coin(self, n: int = 2) -> bool:
        """True once in `n`."""
        return self.draw(n) == 0

    def pick(self, fits: Callable[[Known], bool]) -> Known | None:
        """A value that fits, the newest first."""
        found = [k for k in reversed(self.values) if fits(k)]
        return self.choice(found) if found else None

    def dims(self, rank: int) -> tuple[Any, ...]:
        """The last `rank` dimensions of the palette, a few of them 1. Few shapes mean few types to infer."""
        shape = (2, 2, *self.palette)[-rank:] if rank else ()
        return tuple(1 if self.coin(12) else symbol(d) if isinstance(d, str) else d for d in shape)

    def numbers(self, shape: tuple[int, ...], dtype: Any, low: int, high: int, positive: bool) -> Array:
        """Random numbers of a dtype; half of the floating arrays have few different ones."""
        if dtype == BOOL:
            return self.rng.random(shape) < 0.5
        if dtype.kind in "iu":
            return self.rng.integers(low, high, shape).astype(dtype)
        x = self.rng.standard_normal(shape) if self.rng.random() < 0.5 else self.rng.integers(-6, 7, shape) / 4
        return np.asarray(np.abs(x) + 0.5 if positive else x).astype(dtype)

    def leaf(
        self, shape: tuple[Any, ...], dtype: Any, low: int = -3, high: int = 4, positive: bool = False, kind: str = ""
    ) -> Known:
        """A new input, parameter, constant or state leaf."""
        t, n = TensorType(shape, dtype), next(self.names)
        concrete = tuple(map(size, shape))
        kinds = ["param"] * 14 if self.iterations else ["input", "param"] * 7
        kinds += ["state", "state", "constant"]
        if t.symbols:
            kinds = ["state"] if self.iterations else ["input", "state"]
        kind = kind if kind in kinds else self.choice(kinds)
        array = self.numbers(concrete, dtype, low, high, positive)
        if kind == "input":
            self.feeds.inputs[f"x{n}"] = array
            value = self.b.input(f"x{n}", t)
        elif kind == "constant":
            value = self.b.leaf(constant(array, dtype))
        elif kind == "param":
            names = [f"w{n}.{i}" for i in range(self.iterations)] or [f"w{n}"]
            arrays = [array, *(self.numbers(concrete, dtype, low, high, positive) for _ in names[1:])]
            self.feeds.weights.update(zip(names, arrays, strict=True))
            value = self.b.leaf(Param(tuple(Key(name, t) for name in names), type=t))
        else:
            path: Path = ("layers", LayerIndex(1, 0)) if self.iterations else ("cache",)
            leaf = StateLeaf(path, f"s{n}")
            for i in range(max(self.iterations, 1)):
                self.feeds.state[leaf.key(i)] = self.numbers(concrete, dtype, low, high, positive) if i else array
            value = self.b.leaf(StateRead(leaf, type=t))
        known = Known(value, t, evaluate.wide(array), kind == "constant")
        self.values.append(known)
        if kind == "state":
            self.reads.append((leaf, known))
        return known

    def scalar(self, number: float, dtype: Any) -> Known:
        """A rank-0 constant."""
        return self.constant(np.asarray(number), dtype)

    def constant(self, array: Array, dtype: Any) -> Known:
        """A constant with these numbers."""
        op = constant(array, dtype)
        known = Known(self.b.leaf(op), op.type, evaluate.wide(op.array), True)
        self.values.append(known)
        return known

    def add(self, op: Op, *operands: Known) -> tuple[Known, ...]:
        """Append a node and know its results; () if the types do not go together, or they are not moderate."""
        try:
            types = self.b.types.infer(op, tuple(k.type for k in operands))
        except RlxError:
            return ()
        with np.errstate(all="ignore"):
            results = evaluate.apply(op, types, *(k.array for k in operands))
        if not all(map(moderate, results, types)):
            return ()
        if fixed := all(k.fixed for k in operands):
            results = tuple(map(evaluate.rounded, results, types))
        values = self.b.add(op, *(k.value for k in operands))
        known = tuple(Known(v, t, a, fixed) for v, t, a in zip(values, types, results, strict=True))
        self.values.extend(known)
        return known

    def one(self, op: Op, *operands: Known | None) -> Known | None:
        """As `add` for an op with one result; None where an operand is missing or the op is not safe."""
        given = [k for k in operands if k is not None]
        added = self.add(op, *given) if len(given) == len(operands) else ()
        return added[0] if added else None

    def body(self, operands: Sequence[Known], count: int) -> Sketch:
        """A region's body with these operands; it shares names and arrays with the graph around it."""
        b = Builder("body", self.b.types, Origin(("layers", LayerIndex(1, 0))))
        inner = Sketch(self.rng, b, self.feeds, self.names, self.palette, count)
        for i, k in enumerate(operands):
            inner.values.append(Known(b.leaf(BodyInput(i, type=k.type)), k.type, k.array, k.fixed))
        return inner

    def repeat(self, inner: Sketch, operands: Sequence[Known], carries: int, outputs: Sequence[Known]) -> None:
        """Close a body and append its region, unless what it gives is not moderate."""
        inner.write_state()
        graph = inner.b.finish([k.value for k in outputs])
        op = Repeat(inner.iterations, carries, graph)
        types = self.b.types.infer(op, tuple(k.type for k in operands))
        run = evaluate.Run(self.feeds)
        with np.errstate(all="ignore"):
            results = run.repeat(op, [(k.array, k.fixed) for k in operands])
        state = {leaf.key(i): graph.type(v) for leaf, v in graph.writes for i in range(op.count)}
        every = (*(array for array, _ in results), *map(run.written.__getitem__, state))
        if all(map(moderate, every, (*types, *state.values()))):
            values = self.b.add(op, *(k.value for k in operands))
            self.values.extend(Known(v, t, *r) for v, t, r in zip(values, types, results, strict=True))
            self.state |= {key: Known(values[0], t, run.written[key]) for key, t in state.items()}

    def write_state(self) -> None:
        """Write most of the leaves that were read, with a value of the right type."""
        for leaf, before in self.reads:
            after = self.pick(lambda k, t=before.type: k.type == t)  # type: ignore[misc]
            if after is not None and not self.coin(4):
                self.b.writes.append((leaf, after.value))
                self.state[leaf.key(0)] = after

    def finish(self) -> Case:
        """Most values that nothing reads become outputs, and some that are read: by name, twice, or straight from
        an input."""
        self.write_state()
        read = {v for node in self.b.nodes for v in node.inputs}
        leaves = {i for i, node in enumerate(self.b.nodes) if isinstance(node.op, Leaf)}
        outputs: list[Known] = []
        for k in self.values:
            if self.draw(8) < (7 if k.value not in read and k.value.node not in leaves else 1):
                outputs.append(k)
        outputs = outputs or [self.values[-1]]
        if self.coin(4):
            outputs.append(self.choice(outputs))
        names = [f"o{i}" for i in range(len(outputs))]
        graph = self.b.finish([k.value for k in outputs], names)
        return Case(graph, self.feeds, tuple(outputs), dict(self.state), self.b.types)


def moderate(array: Array, t: TensorType) -> bool:
    """Whether a value is finite, small in number and in size."""
    if array.size > MAX_ELEMENTS or array.ndim > MAX_RANK:
        return False
    return t.dtype == BOOL or bool(np.all(np.abs(array) <= LARGEST.get(t.dtype, 1e5)))


def difference(a: Array, b: Array) -> float:
    """The largest difference of two arrays of one shape."""
    if a.dtype == BOOL:
        return float((a != b).any())
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
