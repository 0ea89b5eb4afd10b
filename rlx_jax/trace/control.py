"""Choices, loops and gradients of one's own, as methods: bodies are functions of values.

A body is traced once, and may use all methods and any value or weight of the program around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Node, Value
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While, in_tensor_ops
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.rounding import Rounding
from rlx_jax.trace.writer import Body, V, is_number

Branch = Callable[..., Any]


def _flat(made: Any) -> tuple[Any, ...]:
    """One value, or a tuple or list of them."""
    return tuple(made) if isinstance(made, tuple | list) else (made,)


class Control(Rounding[V]):
    """Bodies that run once, some times, or not at all."""

    def _trace(
        self, what: str, fn: Branch, given: Sequence[TensorType], captures: dict[Value, int] | None
    ) -> tuple[Graph, bool]:
        """The body that `fn` writes when called with values of these types; whether it gives one value alone.

        `captures` are values of the program around it, by the number of the body's input; None: there may be none.
        """
        if not callable(fn):
            raise GraphError(f"{self.path}: {what} takes a function of values, got {shown(fn)}")
        outer = self.builder
        inner = Builder(f"the body of {what}", outer.types, outer.here)
        inner.inputs = list(outer.inputs)
        body = Body(inner, outer, len(given), captures, what)
        before, self._bodies, self.builder = self._bodies, (*self._bodies, body), inner
        try:
            made = fn(*(self.wrap(inner.leaf(BodyInput(i, type=t))) for i, t in enumerate(given)))
            outputs = [self.own(v) for v in _flat(made)]
            inner.inputs = []
            graph = inner.finish(outputs)
            if graph.writes:
                raise GraphError(f"{self.path}: {what}: a body has no state of its own; carry it")

            def operands(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
                if not isinstance(node.op, Leaf) or isinstance(node.op, Constant | BodyInput):
                    return None
                index = body.number(outer.leaf(node.op))  # a weight, or an input of the program
                return (b.leaf(BodyInput(index, type=node.op.type)),)

            graph = rewrite(in_tensor_ops(graph, outer.types), everywhere(operands), outer.types)
        finally:
            self._bodies, self.builder = before, outer
        return graph, not isinstance(made, tuple | list)

    def _values(self, captures: dict[Value, int]) -> list[V]:
        """The values of the program that bodies read, in order."""
        return [self.wrap(v) for v in captures]

    def _made(self, results: Sequence[V], alone: bool) -> Any:
        return results[0] if alone else tuple(results)

    def switch(self, index: V, branches: Sequence[Branch], *operands: V) -> Any:
        """`branches[index](*operands)`, as `lax.switch`: one branch runs; an index out of range is the nearest.

        Branches give a value, or a tuple of values, of the same types.
        """
        types = [self.type_of(v) for v in operands]
        captures: dict[Value, int] = {}
        traced = [self._trace("switch", fn, types, captures) for fn in branches]
        if not traced:
            raise GraphError(f"{self.path}: switch: there are no branches")
        results = [tuple(map(str, (graph.type(v) for v in graph.outputs))) for graph, _ in traced]
        if len(set(results)) > 1 or len({alone for _, alone in traced}) > 1:
            told = " and ".join(f"({', '.join(r)})" for r in dict.fromkeys(results))
            raise ShapeError(f"{self.path}: branches give values of the same types, got {told}")
        at = self.cast(index, "i32")
        made = self.add_all(Switch(tuple(g for g, _ in traced)), at, *operands, *self._values(captures))
        return self._made(made, traced[0][1])

    def cond(self, pred: V, true_fn: Branch, false_fn: Branch, *operands: V) -> Any:
        """`true_fn(*operands)` where `pred`, of rank 0, is not 0, else `false_fn(*operands)`: one of them runs."""
        if self.type_of(pred).rank:
            raise ShapeError(
                f"{self.path}: cond: the condition is one bool or number, got {self.type_of(pred)}; where(…) "
                "chooses for each entry"
            )
        truth = pred if self.type_of(pred).dtype == np.bool_ else self.ne(pred, 0)
        return self.switch(truth, (false_fn, true_fn), *operands)

    def while_loop(self, cond_fun: Branch, body_fun: Branch, init_val: Any) -> Any:
        """`body_fun` of a value, or of a tuple, while `cond_fun` of it gives True: `lax.while_loop`.

        How often it runs is known when it runs, so it has no reverse-mode gradient; `scan` and `fori_loop` have.
        """
        alone, carried = not isinstance(init_val, tuple | list), _flat(init_val)
        types = [self.type_of(v) for v in carried]
        captures: dict[Value, int] = {}
        again, _ = self._trace("while_loop", lambda *c: cond_fun(self._made(c, alone)), types, captures)
        body, _ = self._trace("while_loop", lambda *c: body_fun(self._made(c, alone)), types, captures)
        self._check_carried("while_loop", types, body)
        made = self.add_all(While(len(types), again, body), *carried, *self._values(captures))
        return self._made(made, alone)

    def _check_carried(self, what: str, types: Sequence[TensorType], body: Graph, more: int = 0) -> None:
        """A step gives what it takes, and `more` values beside."""
        after = [body.type(v) for v in body.outputs[: len(body.outputs) - more]]
        if after != list(types):
            enters, leaves = (", ".join(map(str, t)) for t in (types, after))
            raise ShapeError(
                f"{self.path}: {what}: ({enters}) enter a step, ({leaves}) leave it; it returns values of the types "
                "that it takes"
            )

    def scan(
        self, f: Branch, init: Any, xs: Any = None, *, length: int | None = None, reverse: bool = False
    ) -> tuple[Any, Any]:
        """`carry, y = f(carry, x)` for each entry x of the first axis of `xs`: the last carry and the ys, stacked.

        As `lax.scan`: `init` and `xs` are values, or tuples of values, and so is what `f` takes and gives; without xs
        it runs `length` times, and y may be None.
        """
        carried, cut = _flat(init), () if xs is None else _flat(xs)
        types = [self.type_of(v) for v in carried]
        for t in (self.type_of(v) for v in cut):
            if not t.rank:
                raise ShapeError(f"{self.path}: scan: what is cut has a first axis, got {t}")
        entries = [TensorType(t.shape[1:], t.dtype) for t in (self.type_of(v) for v in cut)]
        shape: dict[str, bool] = {}
        stacks: list[int] = []

        def step(*given: V) -> tuple[Any, ...]:
            carry, x = given[: len(carried)], given[len(carried) :]
            one_x = None if xs is None else self._made(x, not isinstance(xs, tuple | list))
            made = f(self._made(carry, not isinstance(init, tuple | list)), one_x)
            if not isinstance(made, tuple | list) or len(made) != 2:
                raise GraphError(f"{self.path}: scan: f gives (carry, y), got {shown(made)}")
            after, y = made
            shape.update(none=y is None, one=not isinstance(y, tuple | list))
            more = () if y is None else _flat(y)
            stacks.append(len(more))
            return (*_flat(after), *more)

        captures: dict[Value, int] = {}
        body, _ = self._trace("scan", step, [*types, *entries], captures)
        self._check_carried("scan", types, body, stacks[0])
        op = Scan(len(carried), len(cut), body, length, reverse)
        made = self.add_all(op, *carried, *cut, *self._values(captures))
        last = self._made(made[: len(carried)], not isinstance(init, tuple | list))
        stacked = made[len(carried) :]
        return last, None if shape["none"] else self._made(stacked, shape["one"])

    def fori_loop(self, lower: int, upper: int, body_fun: Branch, init_val: Any) -> Any:
        """`val = body_fun(i, val)` for i from `lower` to `upper` − 1, both ints: `lax.fori_loop`, by `scan`."""
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in (lower, upper)) or upper <= lower:
            raise GraphError(f"{self.path}: fori_loop: ints, the lower first; got {shown(lower)} and {shown(upper)}")
        many = isinstance(init_val, tuple | list)

        def step(carry: Any, _: Any) -> tuple[Any, None]:
            i, *val = carry
            after = body_fun(i, tuple(val) if many else val[0])
            return (self.add(i, 1), *_flat(after)), None

        (_, *last), _ = self.scan(step, (self.constant(lower, "i32"), *_flat(init_val)), length=upper - lower)
        return self._made(last, not many)

    def custom_vjp(self, fun: Branch, bwd: Branch, *operands: V) -> Any:
        """`fun(*operands)`, whose gradient is `bwd(*operands, *outputs, *gradients)`: one for each operand.

        Both read nothing beside what they are given.
        """
        types = [self.type_of(v) for v in operands]
        for value in operands:
            if is_number(value):
                raise GraphError(f"{self.path}: custom_vjp takes values, got {shown(value)}")
        forward, alone = self._trace("custom_vjp", fun, types, None)
        out = [forward.type(v) for v in forward.outputs]
        backward, _ = self._trace("custom_vjp", bwd, [*types, *out, *out], None)
        return self._made(self.add_all(CustomVjp(forward, backward), *operands), alone)

    def stop_gradient(self, x: V) -> V:
        """x, which no gradient goes through."""
        return self.activation("stop_gradient", x)
