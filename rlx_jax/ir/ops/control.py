"""Control flow as ops: `lax.switch`, `lax.while_loop`, `lax.scan`, custom gradients, and user-defined score biases.

The bodies of these ops are graphs; `BodyInput` i of a body is its i-th argument. A body is closed: every outer value
that it reads is an operand of the op. It computes in the dtypes with which it was traced, regardless of the program's
precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError, wrong_arity
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Hir, Mir, Node, TypeCache, Value, as_values
from rlx_jax.ir.operands import ELEMENTWISE
from rlx_jax.ir.ops.custom import traced_flops
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.ir.types import TensorType, is_float, is_static, short_name

# No operand is narrowed, because bodies have fixed dtypes.
LOOP = replace(ELEMENTWISE, numeric="compute", narrows=0, flops=traced_flops)


def run_body(body: Graph, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Evaluate a body and return its outputs; floating operands are cast to the dtypes of the body's inputs.

    Raises:
        GraphError: the body contains an op that has no `eval`, such as a block.
    """
    values: dict[Value, Array] = {}
    for node_index, node in enumerate(body.nodes):
        match node.op:
            case BodyInput(index=index, type=t):
                x = operands[index]
                results: Any = (x.astype(t.dtype) if is_float(t.dtype) else x,)
            case Constant() as leaf:
                results = (jnp.asarray(leaf.array),)
            case Mir() as op:
                result = op.eval(*(values[v] for v in node.inputs))
                results = tuple(result) if isinstance(result, tuple | list) else (result,)
            case op:
                raise GraphError(f"a body cannot run {op.text()}")
        values.update({Value(node_index, i): x for i, x in enumerate(results)})
    return tuple(values[v] for v in body.outputs)


def lower_body(graph: Graph, types: TypeCache) -> Graph:
    """Return a body with its HIR blocks expanded to tensor ops."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return as_values(node.op.expand(b, *inputs)) if isinstance(node.op, Hir) else None

    # An expansion may contain further blocks.
    while any(isinstance(node.op, Hir) for node in graph.nodes):
        graph = rewrite(graph, everywhere(fn), types)
    return graph


def _check_body_operands(
    op: Mir, bodies: Sequence[Graph], operands: Sequence[TensorType], num_preceding: int = 0
) -> None:
    """Check that operands match the inputs of the bodies in rank and dtype; any float matches any other float.

    Args:
        op: the op, for messages.
        bodies: its bodies.
        operands: types of the values that the bodies receive.
        num_preceding: number of operands of the op that precede these.

    Raises:
        ShapeError: a type does not match. The error of `wrong_arity`: there are too few operands.
    """
    leaves = [node.op for body in bodies for node in body.nodes if isinstance(node.op, BodyInput)]
    num_required = max((leaf.index + 1 for leaf in leaves), default=0)
    if len(operands) < num_required:
        raise wrong_arity(op.name(), f"{num_required + num_preceding} or more", len(operands) + num_preceding)
    for leaf in leaves:
        actual, expected = operands[leaf.index], leaf.type
        both_floats = is_float(actual.dtype) and is_float(expected.dtype)
        if actual.rank != expected.rank or (actual.dtype != expected.dtype and not both_floats):
            raise ShapeError(f"{op.name()}: a body takes {expected}, got {actual}")


def _cast_carries(op: Mir, before: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
    """Return the carries after an iteration, cast to their dtypes before it.

    Raises:
        ShapeError: a carry changed its shape, or its dtype other than between floats.
    """
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.shape != b.shape or (a.dtype != b.dtype and not (is_float(a.dtype) and is_float(b.dtype))):
            raise ShapeError(
                f"{op.name()}: value {index} enters as {short_name(a.dtype)}{list(a.shape)}, leaves as "
                f"{short_name(b.dtype)}{list(b.shape)}"
            )
    return tuple(b.astype(a.dtype) for a, b in zip(before, after, strict=True))


@dataclass(frozen=True)
class Switch(Mir):
    """Run branch `index` and return its outputs; `index` is an integer of rank 0, clamped to `0 … n − 1`.

    The other operands are the arguments of the branches. All branches return values of the same types. Only one branch
    runs, and gradients pass through that one.
    """

    traits = LOOP

    branches: tuple[Graph, ...]

    def declaration(self) -> str:
        if not self.branches:
            raise GraphError("switch: there are no branches")
        return "index:int[] *"

    def check(self, *operands: TensorType) -> None:
        _check_body_operands(self, self.branches, operands[1:], num_preceding=1)

    def eval(self, index: Array, *arguments: Array) -> tuple[Array, ...]:
        # `g=g` binds each graph at its definition; a plain closure would run the last one for every index.
        return tuple(lax.switch(index, [lambda *a, g=g: run_body(g, a) for g in self.branches], *arguments))

    def text(self) -> str:
        return f"switch({', '.join(f'{len(graph.nodes)} nodes' for graph in self.branches)})"


@dataclass(frozen=True)
class While(Mir):
    """Run `body` while `cond` returns True; the results are the last carries.

    The first `carries` operands are the initial carries; the others are constants of the loop. `cond` and `body`
    receive the carries and the constants. `cond` returns one bool of rank 0, `body` the next carries, with unchanged
    types. The op has no reverse-mode gradient, because the number of iterations is unknown in advance; `Scan` has one.
    """

    traits = LOOP
    notation = "while({cond}, {body})"

    carries: int
    cond: Graph
    body: Graph

    def check(self, *operands: TensorType) -> None:
        _check_body_operands(self, (self.cond, self.body), operands)
        results = self.cond.output_types
        if len(results) != 1 or results[0].rank or results[0].dtype != jnp.bool_:
            raise ShapeError(f"while: the condition returns one bool of rank 0, got {', '.join(map(str, results))}")
        if not 1 <= self.carries <= len(operands) or len(self.body.outputs) != self.carries:
            raise ShapeError(f"while: {self.carries} values are carried, the body returns {len(self.body.outputs)}")

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        constants = operands[self.carries :]

        def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            return _cast_carries(self, carry, run_body(self.body, (*carry, *constants)))

        return lax.while_loop(lambda c: run_body(self.cond, (*c, *constants))[0], step, operands[: self.carries])


@dataclass(frozen=True)
class Scan(Mir):
    """Run `body` once for each entry of the first axis of some operands.

    The first `carries` operands are the initial carries, the next `slices` operands are iterated along their first
    axis, and the others are constants of the loop. The body receives carries, entries and constants, and returns the
    next carries, then values to stack. Results: the last carries, then the stacks. Without slices the body runs
    `length` times; `reverse` starts at the end.
    """

    traits = LOOP
    notation = "scan({body}{length?, length=*}{reverse?, reverse})"

    carries: int
    slices: int
    body: Graph
    length: int | None = None
    reverse: bool = False

    def check(self, *operands: TensorType) -> None:
        xs = operands[self.carries : self.carries + self.slices]
        if self.carries < 0 or self.slices < 0 or len(operands) < self.carries + self.slices:
            raise wrong_arity("scan", f"{self.carries + self.slices} or more", len(operands))
        if any(not x.rank for x in xs) or len({x.shape[0] for x in xs}) > 1:
            raise ShapeError(
                f"scan: the first axes of the sliced operands have one size, got {', '.join(map(str, xs))}"
            )
        if (self.length is None) == (not xs) or (self.length is not None and self.length < 1):
            raise ShapeError(
                f"scan: length is an int of at least 1 without sliced operands, else None; got {self.length}"
            )
        if len(self.body.outputs) < self.carries:
            raise ShapeError(f"scan: {self.carries} values are carried, the body returns {len(self.body.outputs)}")
        entries = [TensorType(x.shape[1:], x.dtype) for x in xs]
        constants = operands[self.carries + self.slices :]
        _check_body_operands(self, (self.body,), (*operands[: self.carries], *entries, *constants))

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        xs = operands[self.carries : self.carries + self.slices]
        constants = operands[self.carries + self.slices :]

        def step(carry: tuple[Array, ...], x: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            out = run_body(self.body, (*carry, *x, *constants))
            return _cast_carries(self, carry, out[: self.carries]), out[self.carries :]

        last_carries, stacked = lax.scan(step, operands[: self.carries], xs, length=self.length, reverse=self.reverse)
        return (*last_carries, *stacked)


@dataclass(frozen=True)
class CustomVjp(Mir):
    """Return the outputs of `forward`, with the custom gradient `backward`.

    `backward` receives the operands, the outputs and the gradient of each output. It returns the gradient of each
    operand, with the operand's type; gradients of integer operands are ignored.
    """

    traits = LOOP
    notation = "custom_vjp({forward}, {backward})"

    forward: Graph
    backward: Graph

    def check(self, *operands: TensorType) -> None:
        _check_body_operands(self, (self.forward,), operands)
        out = self.forward.output_types
        _check_body_operands(self, (self.backward,), (*operands, *out, *out))
        if len(self.backward.outputs) != len(operands):
            raise wrong_arity("the backward of custom_vjp", f"{len(operands)} gradients", len(self.backward.outputs))

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        @jax.custom_vjp
        def call(*xs: Array) -> tuple[Array, ...]:
            return run_body(self.forward, xs)

        def forward(*xs: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            out = run_body(self.forward, xs)
            return out, (*xs, *out)

        def backward(residuals: tuple[Array, ...], gradients: tuple[Array, ...]) -> tuple[Any, ...]:
            grads = run_body(self.backward, (*residuals, *gradients))
            for index, (x, g) in enumerate(zip(operands, grads, strict=True)):
                if x.shape != g.shape:
                    raise ShapeError(f"custom_vjp: operand {index} is {list(x.shape)}, its gradient {list(g.shape)}")
            # None, because JAX accepts no gradient array for an integer operand.
            return tuple(g.astype(x.dtype) if is_float(x.dtype) else None for x, g in zip(operands, grads, strict=True))

        call.defvjp(forward, backward)
        return call(*operands)


@dataclass(frozen=True)
class PairBias(Mir):
    """Compute a user-defined bias of attention scores from the positions of queries and keys.

    For each row of the batch, `body` receives the positions of queries `[S, 1]` and of keys `[1, T]`, both int32, then
    the other operands. Operands: positions of queries `[B|1, S]` and of keys `[B|1, T]`, then the others. Result: f32
    `[B|1, N|1, S|1, T|1]`.
    """

    traits = LOOP
    operands = "rows:int[_,S] slots:int[_,T] *"
    notation = "pair_bias({body})"

    body: Graph

    def check(self, *operands: TensorType) -> None:
        _check_body_operands(self, (self.body,), operands)
        if len(self.body.outputs) != 1 or self.body.output_types[0].rank > 3:
            raise ShapeError("pair_bias: the body returns one value, [N, S, T] or fewer axes")

    def eval(self, rows: Array, slots: Array, *arguments: Array) -> Array:
        def row_bias(row: Array, slot: Array) -> Array:
            (bias,) = run_body(self.body, (row[:, None], slot[None, :], *arguments))
            return bias.reshape((1,) * (3 - bias.ndim) + bias.shape).astype(jnp.float32)

        axes = tuple(None if is_static(p.shape[0]) and p.shape[0] == 1 else 0 for p in (rows, slots))
        if axes == (None, None):  # vmap needs at least one mapped axis
            return row_bias(rows[0], slots[0])[None]
        return jax.vmap(row_bias, axes)(
            *(p if axis == 0 else p[0] for p, axis in zip((rows, slots), axes, strict=True))
        )
