"""The value of a graph in NumPy float64: a loop over the nodes.

Floating values are float64 whatever their dtype, so a graph before and after a pass agrees to the last digits;
integers and bools are themselves. Nothing here calls `eval`, `expand` or the interpreter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx_jax.ir.boxes import box_index
from rlx_jax.ir.graph import BodyInput, Constant, Graph, Input, Leaf, Node, Op, Param, StateRead
from rlx_jax.ir.param import (
    Cast,
    DecodedBox,
    Dequantized,
    Joined,
    Key,
    Program,
    Sliced,
    Stack,
    Strided,
    Transposed,
    Zeros,
)
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import TensorType, is_float
from tests.ops.sample import MEANING, Array

Value = tuple[Array, bool]


@dataclass
class Feeds:
    """Arrays for the leaves of a graph: inputs by name, weights by key, state by (block path, slot)."""

    inputs: dict[str, Array] = field(default_factory=dict)
    weights: dict[str, Array] = field(default_factory=dict)
    state: dict[str, Array] = field(default_factory=dict)


def wide(array: Array) -> Array:
    """Floats as float64."""
    return array.astype(np.float64) if is_float(array.dtype) else array


def apply(op: Op, types: Sequence[TensorType], *operands: Array) -> tuple[Array, ...]:
    """The results of one op, in the dtypes it declares."""
    out = MEANING[type(op)](op, *operands)
    results = out if isinstance(out, tuple) else (out,)
    pairs = zip(results, types, strict=True)
    return tuple(np.asarray(r, np.float64 if is_float(t.dtype) else t.dtype) for r, t in pairs)


def rounded(array: Array, t: TensorType) -> Array:
    """A value as its dtype holds it."""
    return wide(array.astype(t.dtype))


def weight(program: Program, weights: dict[str, Array]) -> Array:
    """The array that a parameter program makes of the weights."""
    match program:
        case Key(key=key):
            return weights[key]
        case Transposed(of=of):
            return weight(of, weights).T
        case Cast(of=of, dtype=dtype):
            return weight(of, weights).astype(dtype)
        case Sliced():
            return weight(program.of, weights)[program.index]
        case Dequantized():
            return weight(program.of, weights)
        case Stack(parts=parts):
            return np.stack([weight(p, weights) for p in parts])
        case Zeros(type=t):
            return np.zeros(t.shape, t.dtype)
        case DecodedBox(bounds=bounds):
            (part,) = program.parts
            return weight(part, weights)[box_index(bounds)]
        case Joined() | Strided():  # zeros, too
            return np.concatenate([weight(p, weights) for p in program.parts], axis=program.axis)
    raise TypeError(program)


@dataclass
class Run:
    """One evaluation: the leaves, and the state as it is written.

    What constants alone make is rounded to its dtype, as it is where it is folded. So each value is a pair: the array,
    and whether constants alone make it.
    """

    feeds: Feeds
    written: dict[str, Array] = field(default_factory=dict)

    def leaf(self, op: Leaf, iteration: int | None, operands: Sequence[Value]) -> Value:
        match op:
            case Input(input=name):
                return wide(self.feeds.inputs[name]), False
            case Param(programs=programs):
                return wide(weight(programs[(iteration or 0) % len(programs)], self.feeds.weights)), False
            case Constant(data=data):
                return wide(np.frombuffer(data, op.type.dtype).reshape(op.type.shape)), True
            case StateRead(leaf=leaf):
                return wide(self.feeds.state[leaf.key(iteration)]), False
            case BodyInput(index=index):
                return operands[index]
        raise TypeError(op)

    def graph(self, graph: Graph, iteration: int | None, operands: Sequence[Value]) -> tuple[Value, ...]:
        """The outputs of a graph or of one iteration of a region."""
        values: list[tuple[Value, ...]] = []
        for node in graph.nodes:
            values.append(self.node(node, iteration, operands, [values[v.node][v.index] for v in node.inputs]))
        self.written.update({leaf.key(iteration): values[v.node][v.index][0] for leaf, v in graph.writes})
        return tuple(values[v.node][v.index] for v in graph.outputs)

    def node(
        self, node: Node, iteration: int | None, operands: Sequence[Value], inputs: Sequence[Value]
    ) -> tuple[Value, ...]:
        if isinstance(node.op, Leaf):
            return (self.leaf(node.op, iteration, operands),)
        if isinstance(node.op, Repeat):
            return self.repeat(node.op, inputs)
        results, fixed = apply(node.op, node.types, *(array for array, _ in inputs)), all(known for _, known in inputs)
        return tuple((rounded(r, t) if fixed else r, fixed) for r, t in zip(results, node.types, strict=True))

    def repeat(self, op: Repeat, inputs: Sequence[Value]) -> tuple[Value, ...]:
        """The final carries, then side output by side output, each of all iterations."""
        carried, shared = tuple(inputs[: op.carries]), tuple(inputs[op.carries :])
        sides = []
        for i in range(op.count):
            out = self.graph(op.body, i, (*carried, *shared))
            carried, side = out[: op.carries], out[op.carries :]
            sides.append(side)
        return (*carried, *(step[i] for i in range(len(sides[0])) for step in sides))


def evaluate(graph: Graph, feeds: Feeds) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """Outputs and written state of a graph."""
    run = Run(feeds)
    with np.errstate(all="ignore"):
        return tuple(array for array, _ in run.graph(graph, None, ())), run.written
