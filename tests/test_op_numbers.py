"""What the builders of ops compute, against NumPy; `Emit` and `GraphModule` write the same MIR."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, ModelFlow
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Graph as GraphIR
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While
from rlx_jax.ir.ops.pointwise import COMPARE, UNARY
from rlx_jax.ir.ops.reduce import REDUCE
from tests.op_cases import OpCase, check_all
from tests.oracles.op_formulas import running
from tests.test_spec_ir_forms import BUILDERS

RNG = np.random.default_rng(5)
X = RNG.standard_normal((2, 5, 4))
Y = RNG.standard_normal((2, 5, 4))
ODD = np.array([[np.nan, np.inf, -np.inf, 0.0], [-0.0, 1.5, -2.5, 3e38]])
WHOLE = np.array([[7, -7, 6, -6], [5, -5, 0, 1]])
BY = np.array([[3, 3, -4, -4], [2, 2, 5, -1]])
IDS = np.array([[0, 2, -1], [3, 3, 1]])
TIES = np.array([[3, 1, 3, 2, 1], [0, 0, 0, 0, 0]])


def f8(dtype: Any, saturate: bool) -> OpCase:
    """A cast to a float of 8 bits, read back."""
    x = np.array([0.3, -1.7, 449.0, 465.0, 1e6, -1e6, np.inf, np.nan])
    held = np.clip(x, -float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).max)) if saturate else x
    want = held.astype(np.float32).astype(dtype).astype(np.float64)
    name = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}[np.dtype(dtype).name]
    return OpCase(lambda m, x: m.cast(m.cast(x, name, saturate=saturate), "f32"), [x], want)


CASES: dict[str, OpCase] = {
    "isnan": OpCase(lambda m, x: m.isnan(x), [ODD], np.isnan),
    "isinf": OpCase(lambda m, x: m.isinf(x), [ODD], np.isinf),
    "isfinite": OpCase(lambda m, x: m.isfinite(x), [ODD], np.isfinite),
    "an infinity": OpCase(lambda m, x: m.eq(x, -math.inf), [ODD], np.isneginf),
    "clip": OpCase(lambda m, x, y: m.clip(x, y, 0.5), [X, Y], lambda x, y: np.minimum(np.maximum(x, y), 0.5)),
    "clip of one side": OpCase(lambda m, x: m.clip(x, max=0.25), [X], lambda x: np.minimum(x, 0.25)),
    "clip of whole numbers": OpCase(lambda m, x: m.clip(x, -5, 5), [WHOLE], lambda x: np.clip(x, -5, 5)),
    "prelu": OpCase(lambda m, x, y: m.prelu(x, y), [X, Y[0, 0]], lambda x, y: np.where(x >= 0, x, x * y)),
    "elu": OpCase(lambda m, x: m.elu(x, 0.7), [X], lambda x: np.where(x > 0, x, 0.7 * np.expm1(x))),
    "leaky_relu": OpCase(lambda m, x: m.leaky_relu(x, 0.3), [X], lambda x: np.where(x >= 0, x, 0.3 * x)),
    "mod of floats": OpCase(lambda m, a, b: m.mod(a, b), [WHOLE / 4, BY / 8], lambda a, b: a - b * np.floor(a / b)),
    "not of bits": OpCase(lambda m, a: m.bitwise_not(a), [WHOLE.astype(np.uint8)], np.invert),
    "xor of bools": OpCase(lambda m, a, b: m.logical_xor(a, b), [X > 0, Y], lambda a, b: a != (b != 0)),
    "and of numbers": OpCase(lambda m, a, b: m.logical_and(a, b), [WHOLE, BY], lambda a, b: (a != 0) & (b != 0)),
    "or beside a number": OpCase(lambda m, a: m.logical_or(a, False), [WHOLE], lambda a: a != 0),
    "not of numbers": OpCase(lambda m, a: m.logical_not(a), [WHOLE], lambda a: a == 0),
    "shift of bytes": OpCase(lambda m, a: m.left_shift(a, 3), [WHOLE.astype(np.uint8)], lambda a: a << 3),
    "f8_e4m3": f8(ml_dtypes.float8_e4m3fn, False), "f8_e4m3 saturated": f8(ml_dtypes.float8_e4m3fn, True),
    "f8_e5m2": f8(ml_dtypes.float8_e5m2, False), "f8_e5m2 saturated": f8(ml_dtypes.float8_e5m2, True),
    "4 bits": OpCase(lambda m, x: tuple(m.cast(m.cast(x, d, saturate=True), "i32") for d in ("i4", "u4")),
        [np.array([-20, -8, 3, 7, 8, 15, 99])], lambda x: (np.clip(x, -8, 7), np.clip(x, 0, 15))),
    "4 bits of floats": OpCase(lambda m, x: m.cast(m.quantize(x, 0.5, dtype="i4"), "i32"), [np.array([0.25, -9, 3.4])],
        np.array([0, -8, 7])),
    "constants of 4 bits": OpCase(lambda m, x: m.add(x, m.cast(m.bitwise_not(m.constant([0, 5], "u4")), "i32")),
        [np.array([1, 2])], np.array([16, 12])),
    "f8_e4m3fnuz": OpCase(lambda m, x: m.cast(m.cast(x, "f8_e4m3fnuz", saturate=True), "f32"),
        [np.array([300.0, 17, -1])], np.array([240.0, 16, -1])),
    "var": OpCase(lambda m, x: m.var(x, (0, 2), ddof=1), [X], lambda x: x.var((0, 2), ddof=1)),
    "std": OpCase(lambda m, x: m.std(x, -1, keepdims=True), [X], lambda x: x.std(-1, keepdims=True)),
    "var far from 0": OpCase(lambda m, x: m.var(x, -1), [X + 1000], lambda x: x.var(-1), tolerance=1e-3),
    "logsumexp of large numbers": OpCase(lambda m, x: m.logsumexp(x, 1), [X + 200], lambda x: np.log(np.exp(x).sum(1))),
    "norm 2": OpCase(lambda m, x: m.norm(x, axis=(0, 1), keepdims=True), [X],
        lambda x: np.sqrt((x * x).sum((0, 1), keepdims=True))),
    "norm of the largest": OpCase(lambda m, x: m.norm(x, math.inf), [X], lambda x: np.abs(x).max()),
    "all": OpCase(lambda m, x: m.all(x, 1, keepdims=True), [WHOLE], lambda x: x.all(1, keepdims=True)),
    "argmax of all, axes kept": OpCase(lambda m, x: m.argmax(x, keepdims=True), [X], lambda x: x.argmax(keepdims=True)),
    "argmin, the last": OpCase(lambda m, x: m.argmin(x, -1, last=True), [TIES], np.array([4, 4])),
    "argmin, the first": OpCase(lambda m, x: m.argmin(x, -1), [TIES], np.array([1, 0])),
    "argsort of ties": OpCase(lambda m, x: m.argsort(x, descending=True), [TIES], np.argsort(-TIES, kind="stable")),
    "top_k of ties": OpCase(lambda m, x: m.top_k(x, 3), [TIES],
        (np.array([[3, 3, 2], [0, 0, 0]]), np.array([[0, 2, 3], [0, 1, 2]]))),
    "top_k, the smallest": OpCase(lambda m, x: m.top_k(x, 2, 0, largest=False), [TIES.T], symbolic=False,
        want=(np.array([[1, 0], [1, 0]]), np.array([[1, 0], [4, 1]]))),
    "cumsum from the end": OpCase(lambda m, x: m.cumsum(x, 1, reverse=True), [X],
        lambda x: running(np.sum, x, 1, reverse=True)),
    "cumprod": OpCase(lambda m, x: m.cumprod(x, 1, exclusive=True), [X],
        lambda x: running(np.prod, x, 1, True, nothing=1)),
    "cummin without itself": OpCase(lambda m, x: m.cummin(x, exclusive=True), [X],
        lambda x: running(np.min, x, 2, True, nothing=np.inf)),
    "squeeze": OpCase(lambda m, x: m.squeeze(m.expand_dims(x, (1, 3))), [X], lambda x: x),
    "split": OpCase(lambda m, x: m.split(x, (3, 2), 1), [X], lambda x: (x[:, :3], x[:, 3:])),
    "split in equal parts": OpCase(lambda m, x: m.split(x, 2), [X], lambda x: (x[..., :2], x[..., 2:])),
    "swapaxes": OpCase(lambda m, x: m.swapaxes(x, 0, -1), [X], lambda x: x.swapaxes(0, -1)),
    "moveaxis": OpCase(lambda m, x: m.moveaxis(x, (0, 1), (-1, 0)), [X], lambda x: np.moveaxis(x, (0, 1), (-1, 0))),
    "stack": OpCase(lambda m, x, y: m.stack([x, y], -1), [X, Y], lambda x, y: np.stack([x, y], -1)),
    "flip": OpCase(lambda m, x: m.flip(x), [X], np.flip),
    "roll": OpCase(lambda m, x: m.roll(x, (7, -1), (1, 2)), [X], lambda x: np.roll(x, (7, -1), (1, 2))),
    "roll of a symbolic axis": OpCase(lambda m, x: m.roll(x, -1, 0), [X], lambda x: np.roll(x, -1, 0)),
    "pad by one number": OpCase(lambda m, x: m.pad(x, 2, constant_values=-1), [X],
        lambda x: np.pad(x, 2, constant_values=-1)),
    "pad that cuts": OpCase(lambda m, x: m.pad(x, ((0, 0), (-2, 1), (1, -1)), "edge"), [X],
        lambda x: np.pad(x[:, 2:, :-1], ((0, 0), (0, 1), (1, 0)), "edge")),
    "tile with new axes": OpCase(lambda m, x: m.tile(x, (3, 1, 1, 2)), [X], lambda x: np.tile(x, (3, 1, 1, 2))),
    "repeat": OpCase(lambda m, x: m.repeat(x, 3, 0), [X], lambda x: x.repeat(3, 0)),
    "tril": OpCase(lambda m, x: m.tril(x, -1), [X], lambda x: np.tril(x, -1)),
    "triu by a value": OpCase(lambda m, x, k: m.triu(x, k), [X, np.array(2)], lambda x, k: np.triu(x, k)),
    "triu of bools": OpCase(lambda m, x: m.triu(x), [X > 0], np.triu),
    "take": OpCase(lambda m, x, i: m.take(x, i, 2), [X, IDS], lambda x, i: np.take(x, i, 2)),
    "take out of range": OpCase(lambda m, x, i: m.take(x, i, -1), [X, np.array([0, 9, -9])], lambda x,
        i: np.stack([x[..., 0], 0 * x[..., 0] + np.nan, 0 * x[..., 0] + np.nan], -1)),
    "take around": OpCase(lambda m, x, i: m.take(x, i, 1, mode="wrap"), [X, np.array([7, -6])], lambda x,
        i: x[:, [2, 4]]),
    "take_along_axis": OpCase(lambda m, x, i: m.take_along_axis(x, i, 1), [X[:, :, 0], IDS], lambda x,
        i: np.take_along_axis(x, i, 1)),
    "gather_nd": OpCase(lambda m, x, i: m.gather_nd(x, i), [X, np.array([[1, -1], [0, 2]])], lambda x,
        i: x[[1, 0], [-1, 2]]),
    "scatter": OpCase(lambda m, x, i, u: m.scatter(x, i, u, 1, kind="add"), [X[:, :, 0], IDS, Y[:, :3, 0]], lambda x, i,
        u: scattered(x, i, u)),
    "scatter out of range": OpCase(lambda m, x, i, u: m.scatter(x, i, u, 1), [X[:, :, 0], IDS * 0 + 9, Y[:, :3, 0]],
        lambda x, i, u: x),
    "scatter_nd": OpCase(lambda m, x, i, u: m.scatter_nd(x, i, u, kind="max"), [X, np.array([[1], [-1]]), Y], lambda x,
        i, u: np.stack([x[0], np.maximum(np.maximum(x[1], u[0]), u[1])])),
    "segment_sum": OpCase(lambda m, x, i: m.segment_sum(x, i, 4), [X[0], np.array([0, 3, 3, 0, 9])], symbolic=False,
        want=lambda x, i: np.stack([x[0] + x[3], 0 * x[0], 0 * x[0], x[1] + x[2]])),
    "segment_sum of negative ids": OpCase(lambda m, x, i: m.segment_sum(x, i, 200),
        [X[0], np.array([0, -1, 2, -128, -3], np.int8)], symbolic=False, want=lambda x,
            i: np.stack([x[0], 0 * x[0], x[2], *[0 * x[0]] * 197])),
    "one_hot": OpCase(lambda m, i: m.one_hot(i, 4, axis=0), [IDS],
        lambda i: (i[None] == np.arange(4)[:, None, None]) * 1.0),
    "one_hot of whole numbers": OpCase(lambda m, i: m.one_hot(i, 3, "i8"), [IDS],
        lambda i: np.int8(i[..., None] == np.arange(3))),
    "arange": OpCase(lambda m: (m.arange(3), m.arange(1.5, 0, -0.5)), [], (np.arange(3), np.arange(1.5, 0, -0.5))),
    "eye": OpCase(lambda m: m.eye(3, 4, -1, dtype="i32"), [], np.eye(3, 4, -1, dtype=np.int32)),
    "full": OpCase(lambda m, x: m.full(("n2", 3), 2.5), [X], np.full((2, 3), 2.5)),
    "ones": OpCase(lambda m, x: (m.ones(3), m.zeros((2, 2), "bool")), [X], (np.ones(3), np.zeros((2, 2), bool))),
    "einsum": OpCase(lambda m, x, y: m.einsum("bsh,bth->bst", x, y), [X, Y], lambda x, y: x @ y.swapaxes(1, 2)),
    "dot_general": OpCase(lambda m, x, y: m.dot_general(x, y, (((1, 2), (1, 2)), ((0,), (0,)))), [X, Y], lambda x,
        y: (x * y).sum((1, 2))),
    "dot_general, free axes": OpCase(lambda m, x, y: m.dot_general(x, y, (((-1,), (-1,)), ((), ()))), [X, Y], lambda x,
        y: np.einsum("abc,dec->abde", x, y)),
    "outer": OpCase(lambda m, x, y: m.outer(x, y), [X[0, 0], Y[0, :, 0]], np.multiply.outer),
    "integer_matmul": OpCase(lambda m, a, b, z: m.integer_matmul(a, b, z),
        [np.array([[200, 3], [7, 255]], np.uint8), np.array([[-128, 4], [5, 127]], np.int8), np.uint8(128)], lambda a,
            b, z: (a.astype(int) - 128) @ b.astype(int), symbolic=False),
    "a product of bytes in i32": OpCase(lambda m, a, b: m.einsum("ij,jk->ik", a, b, preferred_element_type="i32"),
        [np.full((2, 2), 100, np.int8)] * 2, np.full((2, 2), 20000), symbolic=False),
    "lora_matmul": OpCase(lambda m, x, w, a, b: m.lora_matmul(x, w, a, b, scale=0.5),
        [X, Y[0, :4], Y[0, :4, :2], Y[1, :2]], lambda x, w, a, b: x @ (w + 0.5 * a @ b), symbolic=False),
}  # fmt: skip


def scattered(x: np.ndarray, i: np.ndarray, u: np.ndarray) -> np.ndarray:
    """x[b, i[b, j]] += u[b, j], one by one."""
    out = x.copy()
    for b, j in np.ndindex(*i.shape):
        out[b, i[b, j]] += u[b, j]
    return out


def test_numbers(subtests: pytest.Subtests) -> None:
    check_all(CASES, subtests)


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
