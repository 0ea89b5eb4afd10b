"""One spelling of the ops: every method stands on `Emit` and on `GraphModule`, and writes the same MIR on both."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, ModelFlow
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Graph as GraphIR
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While
from rlx_jax.ir.ops.pointwise import COMPARE, UNARY
from rlx_jax.ir.ops.reduce import REDUCE
from tests.op_cases import OpCase
from tests.test_op_numbers import CASES
from tests.test_spec_ir_forms import BUILDERS

Call = Callable[[Any, Any], Any]


def as_tuple(made: Any) -> tuple[Any, ...]:
    """The values that a call made."""
    return tuple(v for part in made for v in as_tuple(part)) if isinstance(made, tuple) else (made,)


def nodes_of(graph: Any) -> list[Any]:
    """Ops, operands, types and outputs: what a program is, but for names of places. Of a body the same in its place."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return nodes_of(value) if isinstance(value, GraphIR) else value

    def what(op: Any) -> Any:
        return (type(op), *map(plain, vars(op).values())) if isinstance(op, Switch | While | Scan | CustomVjp) else op

    return [(what(n.op), n.inputs, n.types) for n in graph.nodes] + list(graph.outputs)


def by_module(case: OpCase) -> list[Any]:
    m: Any = Graph.hir("m")
    m.set_outputs(as_tuple(case.call(m, *(m.input(f"i{n}", *t) for n, t in enumerate(case.types)))))
    return nodes_of(m.lower().graph)


def by_emit(case: OpCase) -> list[Any]:
    flow = ModelFlow("m")
    for n, (shape, dtype) in enumerate(case.types):
        flow = flow.input(f"i{n}", shape, dtype)

    def stage(emit: Any, x: Any) -> Any:
        made = as_tuple(case.call(emit, *(emit.flow_input(f"i{n}") for n in range(len(case.types)))))
        for number, value in enumerate(made[1:]):
            emit.output(f"o{number}", value)
        return made[0]

    return nodes_of(flow.custom(stage).build().into_graph_module().lower().graph)


def test_both_surfaces_write_the_same_mir() -> None:
    """With the calls of the tables of numbers."""
    for name, case in (CASES | BUILDERS).items():
        if case.arrays:
            assert by_emit(case) == by_module(case), name


def test_every_function_has_a_builder_of_its_name() -> None:
    """One of one value, of two, a comparison or a reduction writes its own kind."""
    named = {
        "maximum": "max", "minimum": "min", "floor_divide": "floor_div", "trunc_divide": "trunc_div", "fmod": "rem",
        "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "left_shift": "shift_left",
        "right_shift": "shift_right",
    }  # fmt: skip
    m: Any = Graph.hir("m")
    x, n = m.input("x", (2, 8)), m.input("n", (2, 8), "i32")
    calls: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(UNARY, lambda name: getattr(m, name)(x)),
        **dict.fromkeys(REDUCE, lambda name: getattr(m, name)(n if name in ("any", "all") else x, 1)),
        **dict.fromkeys(COMPARE, lambda name: getattr(m, name)(x, x)),
    }  # fmt: skip
    for name, call in calls.items():
        assert m.node(call(name)).op.kind == name
    for name in ("add", "sub", "mul", "div", "pow", "atan2", "mod", "rem", *named):
        pair = (n, n) if "bit" in name or "shift" in name else (x, x)
        assert m.node(getattr(m, name)(*pair)).op.kind == named.get(name, name)


def module() -> tuple[GraphModule, Any]:
    m = Graph.hir("m")
    return m, m.input("x", ("batch", 3, 8))


def test_constants_keep_their_dtype() -> None:
    """64-bit ones become 32-bit, as inputs do."""
    m, _ = module()
    for value, dtype in (
        (np.float16(1), "f16"), (np.arange(3), "i32"), (np.ones(2), "f32"), ([1, 2], "i32"), (1, "i32"), (1.0, "f32"),
        (True, "bool"), (np.zeros(2, np.uint8), "u8"), (np.uint64(7), "u32"), (jnp.ones(2, jnp.bfloat16), "bf16"),
        ([[1.5], [2]], "f32"),
    ):  # fmt: skip
        assert str(m.shape(m.constant(value))).split("[")[0] == dtype, value


def test_where_of_two_numbers() -> None:
    m, x = module()
    for numbers, dtype in (((1, 0), "i32"), ((1, 0.5), "f32"), ((True, False), "bool")):
        assert str(m.shape(m.where(m.gt(x, 0), *numbers))) == f"{dtype}[batch,3,8]"


def test_broadcast_to_symbolic_sizes() -> None:
    """Sizes are those of x or of an input; the value is NumPy's."""
    m = Graph.hir("m")
    x, row = m.input("x", ("batch", "seq", 2)), m.input("row", (1, 2))
    m.set_outputs([m.broadcast_to(row, m.shape(x).shape), m.broadcast_to(m.narrow(x, 1, 0, 1), ("batch", "seq", 2)),
                   m.broadcast_to(row, (3, 1, 2))])  # fmt: skip
    xs, rows = np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.array([[5, 6]], np.float32)
    a, b, c = (np.asarray(v) for v in rlx.compile(m)(xs, rows).values())
    np.testing.assert_array_equal(a, np.broadcast_to(rows, (2, 3, 2)))
    np.testing.assert_array_equal(b, np.broadcast_to(xs[:, :1], (2, 3, 2)))
    np.testing.assert_array_equal(c, np.broadcast_to(rows, (3, 1, 2)))
    for value, shape, message in ((x, ("batch", 4, 2), "broadcast"), (x, ("seq", "batch", 2), "broadcast"),
                                  (row, ("rows", 2), "no input .* rows"), (x, (2,), "broadcast")):  # fmt: skip
        with pytest.raises(ShapeError, match=message):
            m.broadcast_to(value, shape)
    assert Graph.from_json(m.to_json()).to_json() == m.to_json()


x_flow: Any = ModelFlow("m").linear
"""What the specification does not give by position: see `rlx_jax.trace.checks` for what it does."""


def test_arguments_that_could_change_places_have_names() -> None:
    with pytest.raises(TypeError, match="positional"):
        x_flow("w", True, "b")


def test_orientation_of_weights() -> None:
    """A value is `[in, out]`, the key of a weight what a checkpoint stores; `transpose` says what else."""
    x, w = np.eye(2, dtype=np.float32), np.array([[1, 2], [3, 4]], np.float32)
    cases: dict[str, tuple[Call, Any]] = {
        "value": (lambda e, x: e.linear(x, e.param("w")), w),
        "value, turned": (lambda e, x: e.linear(x, e.param("w"), transpose=True), w.T),
        "key": (lambda e, x: e.linear(x, "w"), w.T),
        "key, as it is": (lambda e, x: e.linear(x, "w", transpose=False), w),
    }  # fmt: skip
    for name, (fn, want) in cases.items():
        got = rlx.compile(ModelFlow("m").input("x", (2, 2)).custom(fn), {"w": w})(x)
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=name)
    m, v = module()
    with pytest.raises(GraphError, match="'w' is a key"):
        m.linear(v, "w")
