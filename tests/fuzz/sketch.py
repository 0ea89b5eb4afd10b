"""A graph while it grows: every value is known with its numbers and what rounding may have done to them.

So a random graph is safe by construction. An op is kept only if its results are finite, of moderate size, and do not
hang on a rounding error: each operand is moved by its error and by one unit in the last place, in several ways, and
what that changes is the error of the result. An integer or a bool must not change at all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.ir import hir
from rlx_jax.ir import ops as o
from rlx_jax.ir.graph import (
    BodyInput,
    Builder,
    Graph,
    Leaf,
    Mir,
    Op,
    Param,
    StateLeaf,
    StateRead,
    TypeCache,
    Value,
    constant,
)
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import LayerIndex, Origin, Path
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import TensorType, as_dtype, is_float, is_static, symbol
from tests.fuzz import meaning
from tests.fuzz.meaning import Array, Feeds
from tests.op_table import SIZES

F32, BF16, F16, I32, BOOL = (as_dtype(name) for name in ("f32", "bf16", "f16", "i32", "bool"))
UNIT = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-8}
"""Rounding error of one operation, relative; twice the best possible, for functions that are not rounded correctly."""
CAP = {F32: 1e-4, F16: 0.05, BF16: 0.1}
"""Error of a value that is still worth comparing, relative to its largest entry."""
LARGEST = {F32: 1e3, F16: 1e2, BF16: 1e3}
MAX_ELEMENTS = 256
MAX_RANK = 5

MOVES = (
    o.Reshape, o.Transpose, o.Narrow, o.SplitLast, o.Slice, o.CutAxis, o.Expand, o.Concat, o.Gather, o.TakeRow, o.Where,
    o.RepeatHeads, o.Shard, o.CacheUpdate, o.RingStep, o.Compare, o.FullLike,
)  # fmt: skip
"""Ops that compute nothing: exact operands give exact results."""

NORMS = (o.LayerNormOp, o.RmsNormOp, o.FusedResidualLayerNorm, o.FusedResidualRmsNorm, hir.LayerNorm, hir.RmsNorm)
BLOCKS = (
    o.RopeTable, hir.RopeAngles, hir.LlamaDecoderBlock, o.AttentionOp, hir.Attention, hir.CachedAttention,
    hir.GrowingAttention,
)  # fmt: skip
COMPOSED = (*NORMS, *BLOCKS)
INNER_STEPS = 8
"""Ops that round several times between their operands and their results: early on, as if an operand was off by more,
and at the end."""


@dataclass(frozen=True)
class Known:
    """A value with its numbers (float64 where floating), and how far a rounded computation may be from them."""

    value: Value
    type: TensorType
    array: Array
    error: float = 0.0

    @property
    def is_float(self) -> bool:
        return is_float(self.type.dtype)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.type.shape

    @property
    def margin(self) -> Array | float:
        """How far each entry may be off when an op reads it."""
        return self.error + UNIT[self.type.dtype] * np.abs(self.array) if self.is_float else 0.0


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


def exact_op(op: Op, results: Sequence[Array], types: Sequence[TensorType]) -> bool:
    """Whether exact operands give these results exactly."""
    if isinstance(op, o.CastTo):
        return all(np.array_equal(r.astype(t.dtype).astype(r.dtype), r) for r, t in zip(results, types, strict=True))
    if isinstance(op, o.Unary | o.Binary | o.Reduce):
        return op.kind in ("neg", "abs", "relu", "round", "max", "min")
    return isinstance(op, MOVES)


def move(operands: Sequence[Known], rng: np.random.Generator) -> Iterator[list[Array]]:
    """The operands' numbers, each moved by its margin: up and down in turn, entry by entry up and down, at random.

    A norm does not see a row that moves as a whole, so neighbours have to move apart too.
    """
    for first in (1.0, -1.0):
        signs = itertools.cycle((first, -first))
        yield [k.array + next(signs) * k.margin if k.is_float else k.array for k in operands]
        yield [k.array + first * checkered(k.array.shape) * k.margin if k.is_float else k.array for k in operands]
    yield [k.array + rng.choice((-1.0, 1.0), k.array.shape) * k.margin if k.is_float else k.array for k in operands]


def checkered(shape: tuple[int, ...]) -> Array:
    """1 and -1 in turn along every axis."""
    return 1.0 - 2.0 * (np.indices(shape).sum(axis=0) % 2)


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
    wanted: list[Known] = field(default_factory=list)
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

    def dim(self) -> int:
        return int(self.choice((4, 2, 3)))

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
        known = Known(value, t, meaning.wide(array))
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
        known = Known(self.b.leaf(op), op.type, meaning.wide(op.array))
        self.values.append(known)
        return known

    def add(self, op: Op, *operands: Known) -> tuple[Known, ...]:
        """Append a node and know its results; () if it is not safe."""
        types = self.b.types.infer(op, tuple(k.type for k in operands))
        measured = self.measure(lambda *arrays: meaning.apply(op, types, *arrays), operands, types, op)
        if measured is None:
            return ()
        values = self.b.add(op, *(k.value for k in operands))
        known = tuple(Known(v, t, a, e) for v, t, (a, e) in zip(values, types, measured, strict=True))
        self.values.extend(known)
        return known

    def one(self, op: Op, *operands: Known | None) -> Known | None:
        """As `add` for an op with one result; None where an operand is missing or the op is not safe."""
        given = [k for k in operands if k is not None]
        added = self.add(op, *given) if len(given) == len(operands) else ()
        return added[0] if added else None

    def measure(
        self, fn: Callable[..., Sequence[Array]], operands: Sequence[Known], types: Sequence[TensorType], op: Op
    ) -> list[tuple[Array, float]] | None:
        """Results and their errors; None if a result is too large, too uncertain or hangs on a rounding error."""
        if isinstance(op, o.ElementwiseRegion):
            return self.measure_steps(op, operands)
        with np.errstate(all="ignore"):
            results = fn(*(k.array for k in operands))
            if not all(self.moderate(r, t) for r, t in zip(results, types, strict=True)):
                return None
            if all(k.error == 0 for k in operands) and exact_op(op, results, types):
                return [(r, 0.0) for r in results]
            changes = [0.0] * len(results)
            for arrays in move(operands, self.rng):
                for i, (r, other) in enumerate(zip(results, fn(*arrays), strict=True)):
                    changes[i] = max(changes[i], difference(r, other))
        out = []
        for r, t, change in zip(results, types, changes, strict=True):
            scale = float(np.abs(r).max(initial=0.0)) if is_float(t.dtype) else 0.0
            scale = max(scale, before_gelu(op, types, operands))
            early, steps = (2, INNER_STEPS) if isinstance(op, COMPOSED) else (1, 1)
            error = early * change + steps * UNIT[t.dtype] * (scale + 1e-4) if is_float(t.dtype) else change
            if not error <= (CAP[t.dtype] * max(scale, 0.1) if is_float(t.dtype) else 0.0):
                return None
            out.append((r, error))
        return out

    def measure_steps(self, op: o.ElementwiseRegion, operands: Sequence[Known]) -> list[tuple[Array, float]] | None:
        """`measure` of a region: every step rounds, and a later one may leave little but that."""
        values = list(operands)
        for step in op.steps:
            given = [values[i] for i in step.operands]
            types = self.b.types.infer(step.op, tuple(k.type for k in given))
            measured = self.measure(functools.partial(meaning.apply, step.op, types), given, types, step.op)
            if measured is None:
                return None
            values.append(Known(Value(-1), types[0], *measured[0]))
        return [(values[-1].array, values[-1].error)]

    def moderate(self, array: Array, t: TensorType) -> bool:
        """Whether a value is finite, small in number and in size."""
        if array.size > MAX_ELEMENTS or array.ndim > MAX_RANK:
            return False
        largest = LARGEST.get(t.dtype, 1e5)
        return t.dtype == BOOL or bool(np.all(np.abs(array) <= largest))

    def body(self, operands: Sequence[Known], count: int) -> Sketch:
        """A region's body with these operands; it shares names and arrays with the graph around it."""
        b = Builder("body", self.b.types, Origin(("layers", LayerIndex(1, 0))))
        inner = Sketch(self.rng, b, self.feeds, self.names, self.palette, count)
        for i, k in enumerate(operands):
            inner.values.append(Known(b.leaf(BodyInput(i, type=k.type)), k.type, k.array, k.error))
        return inner

    def repeat(self, inner: Sketch, operands: Sequence[Known], carries: int, outputs: Sequence[Known]) -> None:
        """Close a body and append its region, unless it is not safe."""
        inner.write_state()
        graph = inner.b.finish([k.value for k in outputs])
        op = Repeat(inner.iterations, carries, graph)
        types = self.b.types.infer(op, tuple(k.type for k in operands))
        keys = [leaf.key(i) for leaf, _ in graph.writes for i in range(op.count)]
        state_types = [graph.type(v) for _, v in graph.writes for _ in range(op.count)]

        def run(*arrays: Array, rounded: bool = False) -> tuple[Array, ...]:
            once = meaning.Run(self.feeds, rounded)
            with np.errstate(all="ignore"):  # what is not finite is told from the numbers
                return (*once.repeat(op, arrays), *(once.written[key] for key in keys))

        # What one iteration adds to the error enters with the operands.
        inside = [max(before.error, after.error) for before, after in zip(operands, outputs, strict=False)]
        inside += [k.error for k in operands[len(inside) :]]
        wider = [Known(k.value, k.type, k.array, e) for k, e in zip(operands, inside, strict=True)]
        measured = self.measure(run, wider, (*types, *state_types), op)
        if measured is None:
            return
        own = max((k.error for k in (*outputs, *inner.state.values())), default=0.0) * op.count
        # Later iterations round other numbers than the first.
        rough = run(*(k.array for k in operands), rounded=True)
        own += 4 * max((difference(a, r) for (a, _), r in zip(measured, rough, strict=True)), default=0.0)
        if not all(own <= CAP[t.dtype] for t in (*types, *state_types) if is_float(t.dtype)):
            return
        values = self.b.add(op, *(k.value for k in operands))
        known = [
            Known(values[i] if i < len(values) else values[0], t, a, e + own if is_float(t.dtype) else 0.0)
            for i, (t, (a, e)) in enumerate(zip((*types, *state_types), measured, strict=True))
        ]
        self.values.extend(known[: len(values)])
        self.state.update(zip(keys, known[len(values) :], strict=True))

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
        outputs = [*self.wanted]
        for k in self.values:
            if self.draw(8) < (7 if k.value not in read and k.value.node not in leaves else 1):
                outputs.append(k)
        outputs = outputs or [self.values[-1]]
        if self.coin(4):
            outputs.append(self.choice(outputs))
        names = [f"o{i}" for i in range(len(outputs))]
        graph = self.b.finish([k.value for k in outputs], names)
        return Case(graph, self.feeds, tuple(outputs), dict(self.state), self.b.types)


def before_gelu(op: Op, types: Sequence[TensorType], operands: Sequence[Known]) -> float:
    """The largest number that an op's GELU is taken of: `1 + erf` rounds by one, however small the result is."""
    if isinstance(op, o.Unary) and op.kind == "gelu":
        return float(np.abs(operands[0].array).max(initial=0.0))
    if getattr(op, "activation", "") != "gelu":
        return 0.0
    plain = dataclasses.replace(op, activation="")  # type: ignore[type-var]
    return max(float(np.abs(r).max(initial=0.0)) for r in meaning.apply(plain, types, *(k.array for k in operands)))


def difference(a: Array, b: Array) -> float:
    """The largest difference of two arrays of one shape."""
    if a.dtype == BOOL:
        return float((a != b).any())
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
