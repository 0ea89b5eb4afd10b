"""The methods for branches, loops, custom gradients, and blocks that carry a state along the sequence.

A body is a function of values. It is traced once, and may use all methods and any value or weight of the program around
it. The step of `recurrent` is a JAX function of one row and one token instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, RlxError, ShapeError, check_integer, first_line, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Value, locate_errors
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While, lower_body
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.region import replace_ops
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.ir.user_functions import trace_step
from rlx_jax.trace.image_ops import Images
from rlx_jax.trace.parameters import F32, WeightKey
from rlx_jax.trace.writer import Body, V, is_integer, is_number

Branch = Callable[..., Any]


def step_type(t: TensorType, num_leading: int = 0) -> TensorType:
    """Return the type of a value inside a step: without its first `num_leading` axes, and f32 for floats."""
    return TensorType(t.shape[num_leading:], F32 if is_float(t.dtype) else t.dtype)


def step_name(step: Any) -> str:
    """Return the default name of a step function."""
    return str(getattr(step, "__name__", "step")).replace("<lambda>", "step")


def leaf_paths(form: Any) -> str:
    """Return the paths of the leaves of a structure as text. Lists and tuples have the same paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(form, range(form.num_leaves)))
    return ", ".join(jax.tree_util.keystr(path) or "a value" for path, _ in leaves) or "no values"


class Control(Images[V]):
    """Branches, loops, custom gradients and recurrences."""

    def _trace(
        self, op_name: str, fn: Branch, arg_types: Sequence[TensorType], captures: dict[Value, int] | None
    ) -> tuple[Graph, Any]:
        """Trace `fn` with arguments of these types, and return its graph and the structure of its results.

        `captures` collects the values of the outer program that `fn` reads, with their input numbers in the body. None
        forbids captures.
        """
        if not callable(fn):
            raise GraphError(f"{self.path}: {op_name} takes a function of values, got {shown(fn)}")
        outer = self.builder
        inner = Builder(f"the body of {op_name}", outer.types, outer.current_origin)
        inner.inputs = list(outer.inputs)
        body = Body(inner, outer, len(arg_types), captures, op_name)
        # With the inner builder in place, all methods that `fn` calls write into the body.
        outer_bodies, self._bodies, self.builder = self._bodies, (*self._bodies, body), inner
        try:
            result = fn(*(self.wrap(inner.leaf(BodyInput(i, type=t))) for i, t in enumerate(arg_types)))
            leaves, form = jax.tree.flatten(result, is_leaf=lambda leaf: leaf is None)  # None is refused as no value
            outputs = [self.unwrap(v) for v in leaves]
            inner.inputs = []  # inputs of the program become captures below
            graph = inner.finish(outputs)
            if graph.writes:
                raise GraphError(f"{self.path}: {op_name}: a body has no state; add it to the carry")

            def to_operand(op: Leaf) -> Leaf:
                if isinstance(op, Constant | BodyInput):
                    return op
                index = body.capture_number(outer.leaf(op))  # a weight, or an input of the program
                return BodyInput(index, type=op.type)

            graph = replace_ops(lower_body(graph, outer.types), Leaf, to_operand, outer.types)
        finally:
            self._bodies, self.builder = outer_bodies, outer
        return graph, form

    def _captured_values(self, captures: dict[Value, int]) -> list[V]:
        """Return the captured values in order."""
        return [self.wrap(v) for v in captures]

    def switch(self, index: V, branches: Sequence[Branch], *operands: V) -> Any:
        """Return `branches[index](*operands)`, as `lax.switch`: one branch runs, and the index is clamped to the range.

        All branches return a value, or a pytree of values, of the same types.
        """
        types = [self.type_of(v) for v in operands]
        captures: dict[Value, int] = {}
        traced = [self._trace("switch", fn, types, captures) for fn in branches]
        if not traced:
            raise GraphError(f"{self.path}: switch: there are no branches")
        results = [tuple(map(str, graph.output_types)) for graph, _ in traced]
        forms = dict.fromkeys(leaf_paths(form) for _, form in traced)
        if len(set(results)) > 1 or len(forms) > 1:
            type_texts = " and ".join(f"({', '.join(r)})" for r in dict.fromkeys(results))
            structures = "" if len(forms) == 1 else f" as {' and as '.join(forms)}"
            raise ShapeError(f"{self.path}: branches return values of the same types, got {type_texts}{structures}")
        number = self.cast(index, "i32")
        values = self.add_all(Switch(tuple(g for g, _ in traced)), number, *operands, *self._captured_values(captures))
        return jax.tree.unflatten(traced[0][1], values)

    def cond(self, pred: V, true_fn: Branch, false_fn: Branch, *operands: V) -> Any:
        """Return `true_fn(*operands)` if `pred`, of rank 0, is not 0, else `false_fn(*operands)`; only one runs."""
        if self.type_of(pred).rank:
            raise ShapeError(
                f"{self.path}: cond: the condition is one bool or number, got {self.type_of(pred)}; where(…) "
                "selects for each entry"
            )
        truth = pred if self.type_of(pred).dtype == np.bool_ else self.ne(pred, 0)
        return self.switch(truth, (false_fn, true_fn), *operands)  # False is index 0

    def while_loop(self, cond_fun: Branch, body_fun: Branch, init_val: Any) -> Any:
        """Apply `body_fun` to a value, or a pytree of them, while `cond_fun` of it is True, as `lax.while_loop`; return
        the last.

        The number of iterations is known only at run time, so there is no reverse-mode gradient. `scan` and `fori_loop`
        have one.
        """
        carried, form = jax.tree.flatten(init_val)
        types = [self.type_of(v) for v in carried]
        captures: dict[Value, int] = {}
        condition, _ = self._trace("while_loop", lambda *c: cond_fun(jax.tree.unflatten(form, c)), types, captures)
        body, new_form = self._trace("while_loop", lambda *c: body_fun(jax.tree.unflatten(form, c)), types, captures)
        self._check_carry_types("while_loop", types, body, (form, new_form))
        results = self.add_all(While(len(types), condition, body), *carried, *self._captured_values(captures))
        return jax.tree.unflatten(form, results)

    def _check_carry_types(
        self, op_name: str, types: Sequence[TensorType], body: Graph, forms: Sequence[Any], num_extra: int = 0
    ) -> None:
        """Check that a step returns values of the types that it takes, followed by `num_extra` other values.

        `forms` are the structures of what it takes and returns.
        """
        out_types = body.output_types[: len(body.outputs) - num_extra]
        if out_types != tuple(types):
            enter, leave = (", ".join(map(str, t)) for t in (types, out_types))
            raise ShapeError(
                f"{self.path}: {op_name}: a step takes ({enter}) and returns ({leave}); it must return values "
                "of the types that it takes"
            )
        enter, leave = map(leaf_paths, forms)  # values of other keys would be mistaken for those that it takes
        if enter != leave:
            raise ShapeError(
                f"{self.path}: {op_name}: a step takes the values {enter} and returns {leave}; it must return the "
                "structure that it takes"
            )

    def scan(
        self, f: Branch, init: Any, xs: Any = None, *, length: int | None = None, reverse: bool = False
    ) -> tuple[Any, Any]:
        """Run `carry, y = f(carry, x)` for each x along the first axis of `xs`, and return the last carry and stacked
        ys.

        As in `lax.scan`, `init` and `xs` are values or pytrees of values, and so are the arguments and results of `f`.
        Without xs it runs `length` times. y may be None.
        """
        (init_values, carry_form), (x_values, x_form) = jax.tree.flatten(init), jax.tree.flatten(xs)
        num_carried, types = len(init_values), [self.type_of(v) for v in init_values]
        for t in (self.type_of(v) for v in x_values):
            if not t.rank:
                raise ShapeError(f"{self.path}: scan: xs need a first axis, got {t}")
        entries = [TensorType(t.shape[1:], t.dtype) for t in (self.type_of(v) for v in x_values)]
        forms: list[Any] = []  # the structures of the next carry and of y are known only once `f` is traced

        def step(*args: V) -> tuple[Any, ...]:
            carry, x = args[:num_carried], args[num_carried:]
            results = f(jax.tree.unflatten(carry_form, carry), jax.tree.unflatten(x_form, x))
            if not isinstance(results, tuple | list) or len(results) != 2:
                raise GraphError(f"{self.path}: scan: f returns (carry, y), got {shown(results)}")
            (next_carry, next_form), (y_values, y_form) = map(jax.tree.flatten, results)
            forms[:] = next_form, y_form
            return (*next_carry, *y_values)

        captures: dict[Value, int] = {}
        body, _ = self._trace("scan", step, [*types, *entries], captures)
        next_form, y_form = forms
        self._check_carry_types("scan", types, body, (carry_form, next_form), y_form.num_leaves)
        op = Scan(num_carried, len(x_values), body, length, reverse)
        results = self.add_all(op, *init_values, *x_values, *self._captured_values(captures))
        last_carry = jax.tree.unflatten(carry_form, results[:num_carried])
        return last_carry, jax.tree.unflatten(y_form, results[num_carried:])

    def fori_loop(self, lower: int, upper: int, body_fun: Branch, init_val: Any) -> Any:
        """Run `val = body_fun(i, val)` for i in `lower` … `upper` − 1, both ints, as `lax.fori_loop`, by `scan`."""
        if not is_integer(lower) or not is_integer(upper) or upper <= lower:
            raise GraphError(
                f"{self.path}: fori_loop: expected ints, the lower first; got {shown(lower)} and {shown(upper)}"
            )

        def step(carry: Any, _: Any) -> tuple[Any, None]:
            i, val = carry
            return (self.add(i, 1), body_fun(i, val)), None

        # A body has no access to the loop counter, so that i is part of the carry.
        (_, last_val), _ = self.scan(step, (self.constant(lower, "i32"), init_val), length=int(upper - lower))
        return last_val

    def custom_vjp(self, fun: Branch, bwd: Branch, *operands: V) -> Any:
        """Return `fun(*operands)` with a custom gradient: `bwd(*operands, *outputs, *gradients)` returns one per
        operand.

        Neither function may read other values than its arguments.
        """
        types = [self.type_of(v) for v in operands]
        for value in operands:
            if is_number(value):
                raise GraphError(f"{self.path}: custom_vjp takes values, got {shown(value)}")
        forward, form = self._trace("custom_vjp", fun, types, None)
        out_types = forward.output_types
        backward, _ = self._trace("custom_vjp", bwd, [*types, *out_types, *out_types], None)
        return jax.tree.unflatten(form, self.add_all(CustomVjp(forward, backward), *operands))

    def stop_gradient(self, x: V) -> V:
        """Return x with a gradient of zero."""
        return self.activation("stop_gradient", x)

    def recurrent(
        self, step: Callable[..., Any], x: Any, *params: Any, init: Any, unroll: int | None = None, label: str = ""
    ) -> Any:
        """Run `state, y_t = step(state, x_t, *params)` for each token of each row, from `init`; return all y,
        `[B, S, …]`.

        The step is a pure JAX function on arrays of ONE row and ONE token, and is traced once. Its floating arguments
        and its state are f32, also for narrower floats; floating y are cast to the dtype of x.

        Args:
            x: a value `[B, S, …]`, or a tuple, list or dict of them; the step gets `x_t` in the same form.
            params: weights by key or value, or values without batch and tokens, or pytrees of them.
            init: the state before the first token: an array or number, a value without batch (a learned start), or a
                pytree of them. Every state has its structure and types.
            unroll: tokens per loop iteration; by default 1, and 8 on GPUs if the step is small.
            label: name of the step in dumps and messages; by default the function's name.

        Raises:
            GraphError: the step is not pure, returns a state of another structure or type, or reads a value of another
                trace; the message names the stage and the leaf.
            ShapeError: an x is not `[B, S, …]`, or a parameter has the batch or the tokens as an axis.
        """
        name = label or step_name(step)
        where = f"{self.path}: recurrent({name})"
        if not callable(step):
            raise GraphError(f"{self.path}: recurrent takes a function step(state, x_t, *params), got {shown(step)}")
        if unroll is not None:
            check_integer(f"{where}: unroll", unroll, error_class=GraphError)
        xs, x_form = jax.tree.flatten(x)
        weights, weights_form = jax.tree.flatten(params)
        init_leaves, state_form = jax.tree_util.tree_flatten_with_path(init)
        self._check_tokens(where, xs)
        weights = [self.weight(w) for w in weights]
        self._check_shared(where, "parameter", weights, xs[0])
        slots, learned = self._state_slots(where, init_leaves, xs[0], len(xs) + len(weights))
        types = [self.type_of(v) for v in (*xs, *weights)]
        leaf_types = [s.type for s in slots] + [step_type(t, 2 * (i < len(xs))) for i, t in enumerate(types)]
        forms = (state_form, x_form, weights_form)
        fn = _flatten_step(step, name, [s.name for s in slots], len(xs), leaf_types, forms)
        with locate_errors(self.builder.current_origin):
            step_trace = trace_step(name, fn, leaf_types)
        self.captured.record(where, tuple(leaf_types), (step_trace.text, step_trace.captured), step)
        block = hir.Recurrent(step_trace, slots, len(xs), unroll)
        return jax.tree.unflatten(step_trace.y_treedef, self.add_all(block, *xs, *weights, *learned))

    def gated_delta(
        self, q: V, k: V, v: V, g: V, beta: V, *, key_heads: int, value_heads: int, scale: float | None = None,
        unit: float | None = None,
    ) -> V:  # fmt: skip
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
        """Return the last `width` tokens up to each token, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`.

        Raises:
            GraphError: the width is no int of at least 1. ShapeError: x is not `[B, S, …]`.
        """
        return self.add_node(hir.CausalWindow(check_integer(f"{self.path}: width", width, error_class=GraphError)), x)

    def _check_tokens(self, where: str, xs: Sequence[Any]) -> None:
        """Check that the x of a recurrence are values `[B, S, …]` with equal batch and tokens."""
        if not xs:
            raise GraphError(f"{where}: x is a value [B, S, …], or a tuple or dict of them; there are none")
        types = [self.type_of(v) for v in xs]
        for t in types:
            if t.rank < 2 or t.shape[:2] != types[0].shape[:2]:
                raise ShapeError(f"{where}: x is [B, S, …], got {', '.join(map(str, types))}")
            _check_static(where, "x", t, t.shape[2:])

    def _check_shared(self, where: str, label: str, values: Sequence[Any], x: Any) -> None:
        """Check that values shared by all rows and tokens have no batch or token axis."""
        x_symbols = {str(d) for d in self.type_of(x).shape[:2] if not isinstance(d, int)}
        for number, value in enumerate(values):
            t = self.type_of(value)
            if shared_symbols := sorted(x_symbols & t.symbols):
                raise ShapeError(
                    f"{where}: {label} {number} is {t}: all rows and tokens read the same one; pass a value "
                    f"with the axis {' and '.join(shared_symbols)} as a part of x, [B, S, …]"
                )
            _check_static(where, f"{label} {number}", t, t.shape)

    def _state_slots(
        self, where: str, init_leaves: Sequence[Any], x: Any, first: int
    ) -> tuple[tuple[hir.StateSlot, ...], list[Any]]:
        """Return the slots of a state with these initial leaves, and the leaves that are values.

        The values become operands of the op, numbered from `first`.
        """
        slots: list[hir.StateSlot] = []
        learned: list[Any] = []
        for path, start in init_leaves:
            name = re.sub(r"\W+", "_", jax.tree_util.keystr(path)).strip("_") or "state"
            name = f"state_{name}" if name[0].isdigit() else name
            if is_number(start) or isinstance(start, np.ndarray | jax.Array):
                array = _init_constant(f"{where}: init leaf {name}", start)
                zeros = not array.array.any()
                slots.append(hir.StateSlot(name, array.type, initial=None if zeros else array))
            elif isinstance(start, str):
                raise GraphError(f"{where}: init is {shown(start)}; expected arrays, such as np.zeros(8, 'f4')")
            else:
                self._check_shared(where, f"init leaf {name}, number", [start], x)
                slots.append(hir.StateSlot(name, step_type(self.type_of(start)), initial=first + len(learned)))
                learned.append(start)
        if not slots:
            raise GraphError(f"{where}: init has no arrays; use emit.jax for a step without a state")
        return tuple(slots), learned


def _check_static(where: str, label: str, t: TensorType, sizes: Sequence[Any]) -> None:
    """Check that all sizes of an array in a step are static, because the step is traced only once."""
    if not all(map(is_static, sizes)):
        raise ShapeError(f"{where}: {label} is {t}: every size except batch and tokens is a number")


def _init_constant(where: str, start: Any) -> Constant:
    """Return an initial value of the state as a constant; floats become f32."""
    try:
        start_constant = small_constant(start)
    except GraphError as error:
        raise type(error)(f"{where}: {error}") from error
    return small_constant(start_constant.array, F32) if is_float(start_constant.type.dtype) else start_constant


def _flatten_step(
    step: Callable[..., Any], label: str, names: Sequence[str], num_x: int, types: Sequence[TensorType], forms: Any
) -> Callable[..., tuple[list[Any], Any]]:
    """Return a user's `step(state, x_t, *params) -> (state, y_t)` on pytrees as a function of their leaves.

    Args:
        names: names of the leaves of the state.
        num_x: number of leaves of x.
        types: types of all leaves.
        forms: pytree structures of the state, of x and of the parameters.
    """
    where, n = f"recurrent({label})", len(names)
    parts = (slice(n), slice(n, n + num_x), slice(n + num_x, None))

    def call(*arrays: Any) -> tuple[list[Any], Any]:
        state, x, params = (jax.tree.unflatten(f, arrays[part]) for f, part in zip(forms, parts, strict=True))
        try:
            result = step(state, x, *params)
        except RlxError as error:
            raise GraphError(
                f"{where} reads a value or a weight of the flow: pass it as one of the parameters ({first_line(error)})"
            ) from error
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise GraphError(f"{where}: expected the step to return a pair, (state, y_t), got {shown(result)}")
        if not jax.tree.leaves(result[1]):
            raise GraphError(f"{where} returns no y; it must return (state, y_t)")
        return check_state(result[0]), result[1]

    def check_state(next_state: Any) -> list[Any]:
        """Return the leaves of the next state, after checking that its structure and types are unchanged."""
        form = jax.tree.structure(next_state)
        if form != forms[0]:
            raise GraphError(f"{where}: the step takes a state {forms[0]} and returns {form}")
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(next_state)]
        for name, slot, leaf in zip(names, types, leaves, strict=False):
            leaf_type = TensorType(tuple(leaf.shape), np.dtype(leaf.dtype))
            if leaf_type != slot:
                which = "the state" if name == "state" else f"leaf {name} of the state"
                raise GraphError(
                    f"{where}: the step takes {which} as {slot} and returns {leaf_type}: a state keeps its type; "
                    "cast it, or use an init of that type"
                )
        return leaves

    return call
