"""Choices, loops, gradients of one's own, and what carries a state along the sequence, as methods.

Bodies are functions of values: a body is traced once, and may use all methods and any value or weight of the program
around it. A step of `recurrent` is a JAX function of one row and one token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, RlxError, ShapeError, first_line, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Node, Value, located
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While, in_tensor_ops
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.ir.user_functions import traced_step
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.image_ops import Images
from rlx_jax.trace.parameters import F32, WeightKey
from rlx_jax.trace.writer import Body, V, is_number

Branch = Callable[..., Any]


def wide(t: TensorType, lead: int = 0) -> TensorType:
    """What a step is given of a value: without its `lead` first axes, floats as f32."""
    return TensorType(t.shape[lead:], F32 if is_float(t.dtype) else t.dtype)


def step_name(step: Any) -> str:
    """What a step is called that was given no name."""
    return str(getattr(step, "__name__", "step")).replace("<lambda>", "step")


def _flat(made: Any) -> tuple[Any, ...]:
    """One value, or a tuple or list of them."""
    return tuple(made) if isinstance(made, tuple | list) else (made,)


class Control(Images[V]):
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

    # -- blocks that carry a state -------------------------------------------------------------

    def recurrent(
        self, step: Callable[..., Any], x: Any, *params: Any, init: Any, unroll: int | None = None, label: str = ""
    ) -> Any:
        """`state, y_t = step(state, x_t, *params)` for each token of each row, from `init`; every y, `[B, S, …]`.

        The step is a JAX function of ONE row and ONE token, on arrays, and pure: it is traced once. It is given, and
        its state is, f32 where a value is a narrower float; floating y come in the dtype of x.

        Args:
            x: a value `[B, S, …]`, or a tuple, list or dict of them; the step gets `x_t` in the same form.
            params: weights by key or value, or values without batch and tokens, or pytrees of them.
            init: the state before the first token: an array or number, a value without batch (a learned start), or a
                pytree of them. Its form and types are those of every state.
            unroll: tokens that the loop takes in one turn; None: 1, and on GPUs 8 where the step is small.
            label: what dumps and messages call the step; its own name otherwise.

        Raises:
            GraphError: the step is not pure, gives a state of another form or type, or reads what another trace
                computes; the message names the stage and the leaf.
            ShapeError: an x is not `[B, S, …]`, or a parameter has the batch or the tokens as an axis.
        """
        name = label or step_name(step)
        where = f"{self.path}: recurrent({name})"
        if not callable(step):
            raise GraphError(f"{self.path}: recurrent takes a function step(state, x_t, *params), got {shown(step)}")
        if unroll is not None:
            check_count(unroll, f"{where}: unroll")
        xs, x_form = jax.tree.flatten(x)
        weights, weights_form = jax.tree.flatten(params)
        starts, state_form = jax.tree_util.tree_flatten_with_path(init)
        self._check_tokens(where, xs)
        weights = [self.weight(w) for w in weights]
        self._check_shared(where, "parameter", weights, xs[0])
        slots, learned = self._slots(where, starts, xs[0], len(xs) + len(weights))
        types = [self.type_of(v) for v in (*xs, *weights)]
        given = [s.type for s in slots] + [wide(t, 2 * (i < len(xs))) for i, t in enumerate(types)]
        forms = (state_form, x_form, weights_form)
        fn = _of_leaves(step, name, [s.name for s in slots], len(xs), given, forms)
        with located(self.builder.here):
            traced = traced_step(name, fn, given)
        self.captured.record(where, tuple(given), (traced.text, traced.captured), step)
        block = hir.Recurrent(traced, slots, len(xs), unroll)
        return jax.tree.unflatten(traced.y_form, self.add_all(block, *xs, *weights, *learned))

    def gated_delta(
        self,
        q: V,
        k: V,
        v: V,
        g: V,
        beta: V,
        *,
        key_heads: int,
        value_heads: int,
        scale: float | None = None,
        unit: float | None = None,
    ) -> V:
        """Return the gated delta rule over packed heads: q, k `[B, S, Hk·K]`, v `[B, S, Hv·V]`, g and beta `[B, S, Hv]`
        → `[B, S, Hv·V]`. See `hir.GatedDelta`."""
        return self.add_node(hir.GatedDelta(key_heads, value_heads, scale, unit), q, k, v, g, beta)

    def causal_conv(self, x: V, w: V | WeightKey, bias: V | WeightKey | None = None) -> V:
        """Return each channel convolved with its own window of the last J tokens: x `[B, S, C]`, w `[C, J]` or
        `[C, 1, J]`, bias `[C]` → `[B, S, C]`. Rows before the first token are zeros; prefill and extend carry them."""
        weights = [self.weight(value) for value in (w, bias) if value is not None]
        return self.add_node(hir.CausalConv(bias is not None), x, *weights)

    def selective_scan(self, x: V, dt: V, a: V, b: V, c: V, *, groups: int = 1) -> V:
        """Return a selective scan over packed heads: x `[B, S, H·P]`, dt `[B, S, H]`, a `[H]` or `[H, n]`, b and c
        `[B, S, G·n]` → `[B, S, H·P]`. See `SelectiveScanOp`."""
        heads = self.type_of(dt).shape[-1] if self.type_of(dt).rank else 0
        if not is_static(heads):
            raise ShapeError(f"{self.path}: selective_scan: dt is [B, S, H] with known heads, got {self.type_of(dt)}")
        return self.add_node(hir.SelectiveScan(int(heads), groups), x, dt, a, b, c)

    def time_steps(self, t: V, bias: V, a_log: V, *, low: float = 0.0, high: float | None = None) -> tuple[V, V]:
        """Return `clip(softplus(t + bias), low, high)` `[B, S, H]` and `−exp(a_log)` `[H]`, both f32: t `[B, S, H]`,
        bias and a_log `[H]`. They are the dt and a of `selective_scan`, and their product is the g of `gated_delta`."""
        step, rate = self.add_all(hir.TimeSteps(low, high), t, bias, a_log)
        return step, rate

    def causal_window(self, x: V, width: int) -> V:
        """The last `width` tokens up to each, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`.

        Raises:
            GraphError: the width is no int of at least 1. ShapeError: x is not `[B, S, …]`.
        """
        return self.add_node(hir.CausalWindow(check_count(width, f"{self.path}: width")), x)

    def _check_tokens(self, where: str, xs: Sequence[Any]) -> None:
        """What is read is values `[B, S, …]` of one batch and as many tokens."""
        if not xs:
            raise GraphError(f"{where}: x is a value [B, S, …], or a tuple or dict of them; there are none")
        types = [self.type_of(v) for v in xs]
        for t in types:
            if t.rank < 2 or t.shape[:2] != types[0].shape[:2]:
                raise ShapeError(f"{where}: x is [B, S, …], got {', '.join(map(str, types))}")
            _check_static(where, "x", t, t.shape[2:])

    def _check_shared(self, where: str, what: str, values: Sequence[Any], x: Any) -> None:
        """What every row and token reads has neither as an axis."""
        lead = {str(d) for d in self.type_of(x).shape[:2] if not isinstance(d, int)}
        for number, value in enumerate(values):
            t = self.type_of(value)
            if found := sorted(lead & t.symbols):
                raise ShapeError(
                    f"{where}: {what} {number} is {t}: every row and token reads the same one; give what has "
                    f"{' and '.join(found)} as an axis as a part of x, [B, S, …]"
                )
            _check_static(where, f"{what} {number}", t, t.shape)

    def _slots(
        self, where: str, starts: Sequence[Any], x: Any, first: int
    ) -> tuple[tuple[hir.StateSlot, ...], list[Any]]:
        """The slots of a state that starts so, and the values among the starts; those are operands from `first` on."""
        slots: list[hir.StateSlot] = []
        learned: list[Any] = []
        for path, start in starts:
            name = re.sub(r"\W+", "_", jax.tree_util.keystr(path)).strip("_") or "state"
            name = f"state_{name}" if name[0].isdigit() else name
            if is_number(start) or isinstance(start, np.ndarray | jax.Array):
                array = _start_array(f"{where}: init leaf {name}", start)
                zeros = not array.array.any()
                slots.append(hir.StateSlot(name, array.type, initial=None if zeros else array))
            elif isinstance(start, str):
                raise GraphError(f"{where}: init is {shown(start)}; expected arrays, such as np.zeros(8, 'f4')")
            else:
                self._check_shared(where, f"init leaf {name}, number", [start], x)
                slots.append(hir.StateSlot(name, wide(self.type_of(start)), initial=first + len(learned)))
                learned.append(start)
        if not slots:
            raise GraphError(f"{where}: init has no arrays; what carries no state treats tokens alone: use emit.jax")
        return tuple(slots), learned


def _check_static(where: str, what: str, t: TensorType, sizes: Sequence[Any]) -> None:
    """A step is traced once, for arrays of one size."""
    if not all(map(is_static, sizes)):
        raise ShapeError(f"{where}: {what} is {t}: beside batch and tokens every size is a number")


def _start_array(where: str, start: Any) -> Constant:
    """An initial value of the state, floats as f32."""
    try:
        found = small_constant(start)
    except GraphError as error:
        raise type(error)(f"{where}: {error}") from error
    return small_constant(found.array, F32) if is_float(found.type.dtype) else found


def _of_leaves(
    step: Callable[..., Any], label: str, names: Sequence[str], tokens: int, given: Sequence[TensorType], forms: Any
) -> Callable[..., tuple[list[Any], Any]]:
    """Return a user's `step(state, x_t, *params) -> (state, y_t)` on pytrees as a function of their leaves.

    Args:
        names: of the leaves of the state. tokens: how many leaves x has. given: the types of all leaves.
        forms: the pytrees of the state, of x and of the parameters.
    """
    where, n = f"recurrent({label})", len(names)
    parts = (slice(n), slice(n, n + tokens), slice(n + tokens, None))

    def call(*arrays: Any) -> tuple[list[Any], Any]:
        state, x, params = (jax.tree.unflatten(f, arrays[part]) for f, part in zip(forms, parts, strict=True))
        try:
            made = step(state, x, *params)
        except RlxError as error:
            raise GraphError(
                f"{where} reads a value or a weight of the flow: give it as one of the parameters ({first_line(error)})"
            ) from error
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise GraphError(f"{where}: expected the step to return a pair, (state, y_t), got {shown(made)}")
        if not jax.tree.leaves(made[1]):
            raise GraphError(f"{where} gives no y; it returns (state, y_t)")
        return keep(made[0]), made[1]

    def keep(after: Any) -> list[Any]:
        """Return the leaves of the next state, which have the types that they had."""
        form = jax.tree.structure(after)
        if form != forms[0]:
            raise GraphError(f"{where}: the state enters as {forms[0]} and leaves as {form}")
        kept = [jnp.asarray(leaf) for leaf in jax.tree.leaves(after)]
        for name, want, leaf in zip(names, given, kept, strict=False):
            found = TensorType(tuple(leaf.shape), np.dtype(leaf.dtype))
            if found != want:
                which = "the state" if name == "state" else f"leaf {name} of the state"
                raise GraphError(
                    f"{where}: {which} enters as {want} and leaves as {found}: a state keeps its type; cast it, or "
                    "begin with an init of that type"
                )
        return kept

    return call
