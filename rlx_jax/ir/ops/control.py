"""Choices and loops that run as such: `lax.switch`, `lax.while_loop`, `lax.scan`; and gradients that a user wrote.

A body is a graph whose `BodyInput` i is the i-th value it is given. It is closed: what it reads of the program around
it is an operand. It computes in the dtypes that it was written in, whatever the precision of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.errors import GraphError, ShapeError, wrong_arity
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Hir, Mir, Node, TypeCache, Value, as_values
from rlx_jax.ir.ops.custom import traced_flops
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.traits import ELEMENTWISE
from rlx_jax.ir.types import TensorType, is_float, is_static, short_name

LOOP = replace(ELEMENTWISE, numeric="compute", narrows=0, flops=traced_flops)


def run_body(body: Graph, operands: Sequence[Array]) -> tuple[Array, ...]:
    """The outputs of a body; floats come in the dtypes that it was written for."""
    values: dict[Value, Array] = {}
    for number, node in enumerate(body.nodes):
        match node.op:
            case BodyInput(index=index, type=t):
                x = operands[index]
                found: Any = (x.astype(t.dtype) if is_float(t.dtype) else x,)
            case Constant() as leaf:
                found = (jnp.asarray(leaf.array),)
            case Mir() as op:
                out = op.eval(*(values[v] for v in node.inputs))
                found = tuple(out) if isinstance(out, tuple | list) else (out,)
            case op:
                raise GraphError(f"a body cannot run {op.text()}")
        values.update({Value(number, i): x for i, x in enumerate(found)})
    return tuple(values[v] for v in body.outputs)


def in_tensor_ops(graph: Graph, types: TypeCache) -> Graph:
    """The same body with blocks as the ops that they stand for."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        return as_values(node.op.expand(b, *inputs)) if isinstance(node.op, Hir) else None

    while any(isinstance(node.op, Hir) for node in graph.nodes):
        graph = rewrite(graph, everywhere(fn), types)
    return graph


def _check_given(op: Mir, bodies: Sequence[Graph], given: Sequence[TensorType], own: int = 0) -> None:
    """The bodies are given what they were written for, up to the dtype of floats. `own`: operands before those."""
    leaves = [node.op for body in bodies for node in body.nodes if isinstance(node.op, BodyInput)]
    needed = max((leaf.index + 1 for leaf in leaves), default=0)
    if len(given) < needed:
        raise wrong_arity(op.name(), f"{needed + own} or more", len(given) + own)
    for leaf in leaves:
        have, want = given[leaf.index], leaf.type
        both_floats = is_float(have.dtype) and is_float(want.dtype)
        if have.rank != want.rank or (have.dtype != want.dtype and not both_floats):
            raise ShapeError(f"{op.name()}: a body takes {want}, got {have}")


def _kept(op: Mir, before: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
    """What a loop carries on, as it came in: in its dtype."""
    for place, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.shape != b.shape or (a.dtype != b.dtype and not (is_float(a.dtype) and is_float(b.dtype))):
            raise ShapeError(
                f"{op.name()}: value {place} enters as {short_name(a.dtype)}{list(a.shape)}, leaves as "
                f"{short_name(b.dtype)}{list(b.shape)}"
            )
    return tuple(b.astype(a.dtype) for a, b in zip(before, after, strict=True))


@dataclass(frozen=True)
class Switch(Mir):
    """The outputs of branch number `index`, an integer of rank 0 that is held to `0 … n − 1`.

    The other operands are what the branches are given. Branches give values of the same types. One of them runs; a
    gradient goes through that one.
    """

    traits = LOOP

    branches: tuple[Graph, ...]

    def declaration(self) -> str:
        if not self.branches:
            raise GraphError("switch: there are no branches")
        return "index:int[] *"

    def check(self, *operands: TensorType) -> None:
        _check_given(self, self.branches, operands[1:], own=1)

    def eval(self, index: Array, *given: Array) -> tuple[Array, ...]:
        return tuple(lax.switch(index, [lambda *a, g=g: run_body(g, a) for g in self.branches], *given))

    def text(self) -> str:
        return f"switch({', '.join(_size(b) for b in self.branches)})"


@dataclass(frozen=True)
class While(Mir):
    """`body` again and again while `cond` gives True: the first `carries` operands, then what both read beside them.

    Both are given all operands. `cond` gives one bool of rank 0, `body` the next carries, of their types. No gradient
    goes backwards through it (`Scan` has one): how often it runs is known when it runs.
    """

    traits = LOOP

    carries: int
    cond: Graph
    body: Graph

    def check(self, *operands: TensorType) -> None:
        _check_given(self, (self.cond, self.body), operands)
        again = [self.cond.type(v) for v in self.cond.outputs]
        if len(again) != 1 or again[0].rank or again[0].dtype != jnp.bool_:
            raise ShapeError(f"while: the condition gives one bool of rank 0, got {', '.join(map(str, again))}")
        if not 1 <= self.carries <= len(operands) or len(self.body.outputs) != self.carries:
            raise ShapeError(f"while: {self.carries} values are carried, the body gives {len(self.body.outputs)}")

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        rest = operands[self.carries :]

        def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            return _kept(self, carry, run_body(self.body, (*carry, *rest)))

        return lax.while_loop(lambda c: run_body(self.cond, (*c, *rest))[0], step, operands[: self.carries])

    def text(self) -> str:
        return f"while({_size(self.cond)}, {_size(self.body)})"


@dataclass(frozen=True)
class Scan(Mir):
    """`body` once for each entry of the first axis: the first `carries` operands, then `slices` that are cut along it.

    Further operands are the same in every step. The body is given carries, entries and these; it gives the next
    carries, then what is stacked. Results: the last carries, then the stacks. Without slices it runs `length` times;
    `reverse` starts at the end.
    """

    traits = LOOP

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
            raise ShapeError(f"scan: the first axes of what is cut are one size, got {', '.join(map(str, xs))}")
        if (self.length is None) == (not xs) or (self.length is not None and self.length < 1):
            raise ShapeError(f"scan: length is an int of at least 1 where nothing is cut, else None; got {self.length}")
        if len(self.body.outputs) < self.carries:
            raise ShapeError(f"scan: {self.carries} values are carried, the body gives {len(self.body.outputs)}")
        entries = [TensorType(x.shape[1:], x.dtype) for x in xs]
        rest = operands[self.carries + self.slices :]
        _check_given(self, (self.body,), (*operands[: self.carries], *entries, *rest))

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        xs = operands[self.carries : self.carries + self.slices]
        rest = operands[self.carries + self.slices :]

        def step(carry: tuple[Array, ...], x: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            out = run_body(self.body, (*carry, *x, *rest))
            return _kept(self, carry, out[: self.carries]), out[self.carries :]

        last, stacked = lax.scan(step, operands[: self.carries], xs, length=self.length, reverse=self.reverse)
        return (*last, *stacked)

    def text(self) -> str:
        notes = [f"length={self.length}"] * (self.length is not None) + ["reverse"] * self.reverse
        return f"scan({', '.join([_size(self.body), *notes])})"


@dataclass(frozen=True)
class CustomVjp(Mir):
    """The outputs of `forward`, with the gradient of `backward`.

    `backward` is given the operands, the outputs, and the gradient of each output; it gives that of each operand, of
    its type. Gradients of whole numbers are dropped.
    """

    traits = LOOP

    forward: Graph
    backward: Graph

    def check(self, *operands: TensorType) -> None:
        _check_given(self, (self.forward,), operands)
        out = [self.forward.type(v) for v in self.forward.outputs]
        _check_given(self, (self.backward,), (*operands, *out, *out))
        if len(self.backward.outputs) != len(operands):
            raise wrong_arity("the backward of custom_vjp", f"{len(operands)} gradients", len(self.backward.outputs))

    def eval(self, *operands: Array) -> tuple[Array, ...]:
        @jax.custom_vjp
        def call(*xs: Array) -> tuple[Array, ...]:
            return run_body(self.forward, xs)

        def forward(*xs: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            out = run_body(self.forward, xs)
            return out, (*xs, *out)

        def backward(kept: tuple[Array, ...], gradients: tuple[Array, ...]) -> tuple[Any, ...]:
            found = run_body(self.backward, (*kept, *gradients))
            for place, (x, g) in enumerate(zip(operands, found, strict=True)):
                if x.shape != g.shape:
                    raise ShapeError(f"custom_vjp: operand {place} is {list(x.shape)}, its gradient {list(g.shape)}")
            return tuple(g.astype(x.dtype) if is_float(x.dtype) else None for x, g in zip(operands, found, strict=True))

        call.defvjp(forward, backward)
        return call(*operands)

    def text(self) -> str:
        return f"custom_vjp({_size(self.forward)}, {_size(self.backward)})"


def _size(body: Graph) -> str:
    return f"{len(body.nodes)} nodes"


@dataclass(frozen=True)
class PairBias(Mir):
    """What each head adds to the scores of a query at one position and a key at another: `body` of the positions of
    queries `[S, 1]` and of keys `[1, T]`, both int32, then of what it reads beside them, for each row.

    Operands: positions of queries `[B|1, S]` and of keys `[B|1, T]`, then the others. Result: f32
    `[B|1, N|1, S|1, T|1]`.
    """

    traits = LOOP
    operands = "rows:int[_,S] slots:int[_,T] *"

    body: Graph

    def check(self, *operands: TensorType) -> None:
        _check_given(self, (self.body,), operands)
        if len(self.body.outputs) != 1 or self.body.type(self.body.outputs[0]).rank > 3:
            raise ShapeError("pair_bias: a body gives one value, [N, S, T] or fewer axes")

    def eval(self, rows: Array, slots: Array, *given: Array) -> Array:
        def of_row(row: Array, slot: Array) -> Array:
            (bias,) = run_body(self.body, (row[:, None], slot[None, :], *given))
            return bias.reshape((1,) * (3 - bias.ndim) + bias.shape).astype(jnp.float32)

        axes = tuple(None if is_static(p.shape[0]) and p.shape[0] == 1 else 0 for p in (rows, slots))
        if axes == (None, None):
            return of_row(rows[0], slots[0])[None]
        return jax.vmap(of_row, axes)(*(p if axis == 0 else p[0] for p, axis in zip((rows, slots), axes, strict=True)))

    def text(self) -> str:
        return f"pair_bias({_size(self.body)})"
