"""One spelling of the ops: every method stands on `Emit` and on `GraphModule`, and writes the same MIR on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, LayerStack, ModelFlow
from rlx_jax.errors import DTypeError, GraphError, ShapeError, UnsupportedError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph as GraphIR
from rlx_jax.ir.ops.control import CustomVjp, Scan, Switch, While
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.layer_stack import Stages
from rlx_jax.trace.compat import SpecBuilders
from rlx_jax.trace.emit import Emit
from rlx_jax.trace.writer import Writer
from tests.op_cases import OpCase
from tests.test_op_numbers import CASES
from tests.test_spec_ir_forms import BUILDERS

Inputs = dict[str, tuple[tuple[int | str, ...], str]]
INPUTS: Inputs = {
    "x": (("batch", "seq", 8), "f32"), "y": (("batch", "seq", 8), "f32"), "w": ((8, 6), "f32"), "wt": ((6, 8), "f32"),
    "v": ((6, 8), "f32"), "b": ((6,), "f32"), "g": ((8,), "f32"), "ids": (("batch", "seq"), "i32"),
    "at": (("batch",), "i32"), "keep": (("batch", "seq"), "f32"), "cos": ((1, "seq", 2), "f32"),
    "sin": ((1, "seq", 2), "f32"), "sq": ((8, 8), "f32"),
    "img": (("batch", 4, 6, 5), "f32"), "k": ((4, 2, 3, 3), "f32"), "c": ((4,), "f32"),
    "grid": (("batch", 3, 3, 2), "f32"),
}  # fmt: skip
"""What the calls below read, under these names."""

TOPICS = [c for c in SpecBuilders.__mro__ if issubclass(c, Writer)]
"""The classes that define ops, each with a topic of its own."""

FUNCTIONS = (
    "floor", "ceil", "trunc", "sign", "square", "reciprocal", "cbrt", "expm1", "log1p", "exp2", "log2", "asin",
    "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "relu6", "selu", "mish", "log_sigmoid",
    "soft_sign", "quick_gelu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh", "swish", "elu", "celu",
    "leaky_relu", "squareplus", "thresholded_relu",
)  # fmt: skip
WHOLE = (
    "rem", "bitwise_and", "bitwise_or", "bitwise_xor",
)  # fmt: skip
Call = Callable[[Any, Any], Any]


def test_a_method_is_written_once() -> None:
    """Topics stand on each other: a helper of one name in two of them would be taken for the other."""
    for topic in TOPICS:
        below = [c for c in topic.__mro__[1:] if c in TOPICS and c is not Writer]
        for name in (n for n in vars(topic) if not n.startswith("__") and topic is not Writer):
            assert not [c for c in below if name in vars(c)], f"{topic.__name__}.{name}"


def each(names: tuple[str, ...], operands: Callable[[Any], tuple[Any, ...]], **options: Any) -> dict[str, Call]:
    """Calls of several methods with the same operands."""

    def call(name: str) -> Call:
        return lambda m, i: getattr(m, name)(*operands(i), **options)

    return {name: call(name) for name in names}


CALLS: dict[str, Call] = {
    # appending, and what goes beside values
    "add_node": lambda m, i: m.add_node(MatMul(), i.x, i.w), "add_all": lambda m, i: m.add_all(hir.Split((2, 6)), i.x),
    "jax": lambda m, i: m.jax(jnp.sinh, i.x),
    # arithmetic
    "binary": lambda m, i: m.binary("mul", i.x, 2.5), "pow": lambda m, i: m.pow(i.x, 2),
    "maximum": lambda m, i: m.maximum(i.x, 0), "minimum": lambda m, i: m.minimum(0.5, i.x),
    "compare": lambda m, i: m.compare("ge", i.x, i.y), "ne": lambda m, i: m.ne(i.ids, 3),
    "le": lambda m, i: m.le(0, i.x), "gt": lambda m, i: m.gt(i.x, i.y), "ge": lambda m, i: m.ge(i.x, i.y),
    "where": lambda m, i: m.where(m.gt(i.x, 0), 1.0, i.y),
    # functions of one value
    "sigmoid": lambda m, i: m.sigmoid(i.x), "gelu_tanh": lambda m, i: m.gelu_tanh(i.x),
    "softplus": lambda m, i: m.softplus(i.x), "log": lambda m, i: m.log(i.x), "rsqrt": lambda m, i: m.rsqrt(i.x),
    "abs": lambda m, i: m.abs(i.x), "tan": lambda m, i: m.tan(i.x), "atan": lambda m, i: m.atan(i.x),
    "round": lambda m, i: m.round(i.x), **each(FUNCTIONS, lambda i: (i.x,)),
    "parametric": lambda m, i: m.parametric("elu", i.x, 0.5), "shrink": lambda m, i: m.shrink(i.x, lambd=1, bias=0.5),
    # whole numbers, bits, truth
    **each(WHOLE, lambda i: (i.ids, 3)),
    # along axes
    "max": lambda m, i: m.max(i.x, 1), "min": lambda m, i: m.min(i.x), "prod": lambda m, i: m.prod(i.x, -2),
    "log_softmax": lambda m, i: m.log_softmax(i.x), "sort": lambda m, i: m.sort(i.x, descending=True),
    # images
    "conv": lambda m, i: m.conv(i.img, i.k, i.c, padding="SAME", window_strides=2, feature_group_count=2),
    **each(("conv1d", "conv2d", "conv3d"), lambda i: (i.img, i.k), feature_group_count=2),
    **each(("conv_transpose", "conv_transpose2d"), lambda i: (i.img, i.k), strides=2, padding=(1, (0, 1))),
    "max_pool": lambda m, i: m.max_pool(i.img, 2), "lp_pool": lambda m, i: m.lp_pool(i.img, 2, p=3),
    "avg_pool": lambda m, i: m.avg_pool(i.img, (3, 2), padding=1, ceil_mode=True, count_include_pad=True),
    "argmax_pool": lambda m, i: m.argmax_pool(i.img, 2, padding=1),
    "depth_to_space": lambda m, i: m.depth_to_space(i.img, 2, "CRD"),
    "space_to_depth": lambda m, i: m.space_to_depth(m.resize_nearest_2x(i.img), 2),
    "local_response_norm": lambda m, i: m.local_response_norm(i.img, 3, k=2.0),
    "global_max_pool": lambda m, i: m.global_max_pool(i.img), "global_avg_pool": lambda m, i: m.global_avg_pool(i.img),
    "resize": lambda m, i: m.resize(i.img, ("batch", 4, 9, 5), "cubic", antialias=False),
    "grid_sample": lambda m, i: m.grid_sample(i.img, i.grid, padding="border"),
    "standardize": lambda m, i: m.standardize(i.img, (1, 2)), "instance_norm": lambda m, i: m.instance_norm(i.img, i.c),
    "batch_norm": lambda m, i: m.batch_norm(i.img, mean=i.c, var=i.c, beta=i.c),
    "lp_normalize": lambda m, i: m.lp_normalize(i.x, 1),
    # few bits
    **each(("quantize", "quantize_per_channel", "dequantize", "dequantize_per_channel"), lambda i: (i.img, i.c, 3),
           axis=1),
    "fake_quantize": lambda m, i: m.fake_quantize(i.img, i.c, axis=1, ste="clipped"),
    "quantized_matmul": lambda m, i: m.quantized_matmul(i.x, m.cast(i.w, "i8"), 0.5, 1),
    "unpack_nibbles": lambda m, i: m.unpack_nibbles(m.cast(i.ids, "u8"), ("batch", "seq", 2)),
    "moving_scale": lambda m, i: m.moving_scale(i.img, i.c, decay=0.9, axis=1),
    # spectra and systems
    **each(("fft", "rfft"), lambda i: (i.x, 6), norm="ortho"), "ifft": lambda m, i: m.ifft(m.fft(i.x)),
    "irfft": lambda m, i: m.irfft(m.rfft(i.x), 7), "solve": lambda m, i: m.solve(m.eye(3), m.ones((3, 2))),
    "inv": lambda m, i: m.inv(m.eye(3)), "det": lambda m, i: m.det(m.eye(3)),
    # choices and loops
    "switch": lambda m, i: m.switch(m.argmax(i.x), [m.sin, lambda v: m.mul(v, i.y)], i.x),
    "cond": lambda m, i: m.cond(m.any(i.ids), lambda v: m.linear(v, i.w), lambda v: m.mm(v, i.w), i.x),
    "while_loop": lambda m, i: m.while_loop(lambda v: m.any(m.gt(v, 1)), lambda v: m.mul(v, 0.5), i.x),
    "scan": lambda m, i: m.scan(lambda c, v: (m.add(c, v), (m.mul(c, i.b), v)), i.b, i.w),
    "fori_loop": lambda m, i: m.fori_loop(1, 4, lambda k, v: m.mul(v, m.cast(k, "f32")), i.x),
    "custom_vjp": lambda m, i: m.custom_vjp(m.round, lambda v, out, g: g, i.x),
    "stop_gradient": lambda m, i: m.stop_gradient(i.x), "sinusoids": lambda m, i: m.sinusoids(i.b, 8),
    # shapes
    "reshape": lambda m, i: m.reshape(i.x, ("batch", "seq", 2, 4)), "transpose": lambda m, i: m.transpose(i.x),
    "slice": lambda m, i: m.slice(i.x, np.s_[:, -1, None, 2:5]), "narrow": lambda m, i: m.narrow(i.x, -1, 2, 3),
    "shard": lambda m, i: m.shard(i.x, "batch", None, "ffn"), "concat": lambda m, i: m.concat([i.x, i.y]),
    "broadcast_to": lambda m, i: m.broadcast_to(i.g, ("batch", m.shape(i.x).shape[1], 8)),
    "gather": lambda m, i: m.gather(i.w, i.ids), "take_row": lambda m, i: m.take_row(i.x, i.at),
    "repeat_heads": lambda m, i: m.repeat_heads(i.x, heads=2, times=3), "iota": lambda m, i: m.iota(i.x, -2),
    "full_like": lambda m, i: m.full_like(i.x, 7, "i32"), "zeros_like": lambda m, i: m.zeros_like(i.ids),
    "ones_like": lambda m, i: m.ones_like(i.x, "bool"),
    "put_along_axis": lambda m, i: m.put_along_axis(i.x, m.argsort(i.y), i.y, -1),
    # products, norms, feed-forward
    "layer_norm": lambda m, i: m.layer_norm(i.x, i.g, i.g),
    "gated_ffn": lambda m, i: m.gated_ffn(gate=i.x, up=i.y, activation="gelu_tanh"),
    "fused_swiglu": lambda m, i: m.fused_swiglu(i.x, gate_first=False),
    "route": lambda m, i: m.route(i.x, i.g, top_k=3, scores="sigmoid", normalise=False, scale=2.0),
    "experts": lambda m, i: m.experts(
        i.x, *m.route(m.linear(i.x, i.w), top_k=2), gate=m.stack([i.w] * 6), up=m.stack([i.w] * 6),
        down=m.stack([i.v] * 6), activation="gelu_tanh",
    ),
    # attention, positions, tokens, layers
    "cross_attention": lambda m, i: m.cross_attention(i.x, i.x, i.y, heads=2, mask=i.keep, scale=0.3),
    "rotary": lambda m, i: m.rope(i.x, m.rotary(i.ids, head_dim=4, n_rot=2, style="interleaved"), head_dim=4),
    "recurrent": lambda m, i: m.recurrent(lambda h, x, g: (h + x * g, h), i.x, i.g, init=np.ones(8, "f4")),
    "causal_window": lambda m, i: m.causal_window(i.x, 3), "positions": lambda m, i: m.positions(i.x),
    "rope_angles": lambda m, i: m.rope_angles(i.ids, (1.0, 0.1)), "embed": lambda m, i: m.embed(i.w, i.ids),
    "last_token": lambda m, i: m.last_token(i.x, i.at),
    "fused_attention_block": lambda m, i: m.fused_attention_block(
        i.x, m.concat([i.sq] * 3, 1), i.sq, i.keep, heads=2, head_dim=4, rope=(i.cos, i.sin)
    ),
    "fused_transformer_layer": lambda m, i: m.fused_transformer_layer(
        i.x, m.concat([i.sq] * 3, 1), i.sq, i.g, i.g, i.w, i.v, i.g, i.g, i.keep,
        heads=2, head_dim=4, intermediate=6, has_bias=False,
    ),
    "first_token": lambda m, i: m.first_token(i.x),
    # state spaces, and names of the specification
    "gated_delta": lambda m, i: m.gated_delta(i.x, i.y, i.x, *gates(m, i, 4), key_heads=2, value_heads=4, unit=1e-6),
    "causal_conv": lambda m, i: m.causal_conv(i.x, m.transpose(i.v, (1, 0)), i.g),
    "time_steps": lambda m, i: m.time_steps(i.x, i.g, i.g, low=0.1, high=2.0),
}  # fmt: skip


def gates(m: Any, i: Any, count: int) -> list[Any]:
    """g and beta of so many heads."""
    return [m.narrow(x, -1, 0, count) for x in (i.x, i.y)]


class Named:
    """Values by attribute."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def as_tuple(made: Any) -> tuple[Any, ...]:
    """The values that a call made."""
    return tuple(v for part in made for v in as_tuple(part)) if isinstance(made, tuple) else (made,)


def mir_of(module: GraphModule) -> list[Any]:
    """Ops, operands and types of the lowered module: what a program is, but for names of places."""
    return nodes_of(module.lower().graph)


def nodes_of(graph: Any) -> list[Any]:
    """Nodes and outputs; of a body the same in the place of its graph."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return nodes_of(value) if isinstance(value, GraphIR) else value

    def what(op: Any) -> Any:
        return (type(op), *map(plain, vars(op).values())) if isinstance(op, Switch | While | Scan | CustomVjp) else op

    return [(what(n.op), n.inputs, n.types) for n in graph.nodes] + list(graph.outputs)


class Called:
    """A module that notes in `names` what is asked of it."""

    def __init__(self, module: GraphModule, names: set[str]) -> None:
        self.module, self.names = module, names

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.module, name)


def by_module(call: Call, inputs: Inputs = INPUTS, names: set[str] | None = None) -> list[Any]:
    m = Graph.hir("m")
    values = Named({n: m.input(n, shape, dtype) for n, (shape, dtype) in inputs.items()})
    m.set_outputs(as_tuple(call(m if names is None else Called(m, names), values)))
    return mir_of(m)


def by_emit(call: Call, inputs: Inputs = INPUTS) -> list[Any]:
    flow = ModelFlow("m")
    for name, (shape, dtype) in inputs.items():
        flow = flow.input(name, shape, dtype)

    def stage(emit: Any, x: Any) -> Any:
        made = as_tuple(call(emit, Named({n: emit.flow_input(n) for n in inputs})))
        for number, value in enumerate(made[1:]):
            emit.output(f"o{number}", value)
        return made[0]

    return mir_of(flow.custom(stage).build().into_graph_module())


def of_case(case: OpCase) -> tuple[Call, Inputs]:
    """The call of a table of numbers, and what it reads."""
    inputs: Inputs = {f"i{n}": t for n, t in enumerate(case.types)}
    return lambda m, i: case.call(m, *(getattr(i, n) for n in inputs)), inputs or {"x": ((2,), "f32")}


EVERY: dict[str, tuple[Call, Inputs]] = {
    **{name: (call, INPUTS) for name, call in CALLS.items()},
    **{f"{name}, numbers": of_case(case) for name, case in CASES.items()},
    **{f"{name}, by position": of_case(case) for name, case in BUILDERS.items()},
}


def test_every_op_stands_in_a_table() -> None:
    """A method that is added to the builders is called here, or where its numbers are."""
    own = {"own", "wrap", "weight", "lift", "shape", "type_of", "path", "level", "inside", "builder", "captured"}
    elsewhere = {"nonzero", "custom_op"}  # refused; of a plugin: tests/test_spec_ir_forms.py
    called = set[str]()
    for call, inputs in EVERY.values():
        by_module(call, inputs, called)
    methods = {n for c in TOPICS for n in vars(c) if not n.startswith("_")} - own - elsewhere
    assert methods <= called, "a call of each method stands in CALLS of this file, or in a table of numbers"


@pytest.mark.parametrize("name", EVERY)
def test_both_surfaces_write_the_same_mir(name: str) -> None:
    assert by_emit(*EVERY[name]) == by_module(*EVERY[name])


def test_every_op_is_reachable_from_the_package() -> None:
    """What has no method is appended by `add_node`, and its class stands in `rlx.ops`."""
    assert all(getattr(rlx.ops, op.__name__) is op for op in rlx.ops.OPS)


def test_no_surface_spells_an_op_again() -> None:
    """The mixins alone define ops and stages; the one exception names the output of a flow too."""
    for surface, mixins in ((Emit, TOPICS), (GraphModule, TOPICS), (ModelFlow, (Stages,)),
                            (LayerStack, (Stages,))):  # fmt: skip
        shared = {n for c in mixins for n in vars(c) if not n.startswith("_")}
        again = shared & {n for n in vars(surface) if not n.startswith("_")}
        assert again <= {"own", "wrap", "weight", "add_all", "builder", "level", "lm_head", "where", "stage"}, surface


def test_a_stack_takes_what_a_flow_takes() -> None:
    """Every stage method of a flow is one of a LayerStack, and they make the same stage."""
    for name in ("embed", "rms_norm", "linear", "store_stream"):
        (stage,) = getattr(ModelFlow("m").input("x", (2,)), name)("key")._stages
        assert getattr(LayerStack.named("s"), name)("key").items == (stage,)
    assert len(LayerStack.named("s").lm_head(8, 4).repeat_layers(2, lambda i: rlx.blocks.ResidualSave()).items) == 2


# -- what beside values may stand --------------------------------------------------------------


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
SWAPPED: dict[str, Call] = {
    "gated_ffn": lambda m, x: m.gated_ffn(x, x), "repeat_heads": lambda m, x: m.repeat_heads(x, 2, 3),
    "top_k": lambda m, x: m.top_k(x, 2, -1, False), "experts": lambda m, x: m.experts(x, x, x, x, x, x),
}  # fmt: skip
"""What the specification does not give by position: see `rlx_jax.trace.spec_calls` for what it does."""


@pytest.mark.parametrize("name", SWAPPED)
def test_arguments_that_could_change_places_have_names(name: str) -> None:
    with pytest.raises(GraphError, match=rf"{name}: takes .*positional arguments?.*; expected {name}\("):
        SWAPPED[name](*module())


def test_a_stage_names_what_could_change_places() -> None:
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


REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    "eps as a weight": (lambda m, x: m.rms_norm(x, x, 1e-5), GraphError, "eps="),
    "an op to add": (lambda m, x: m.add(MatMul(), x), GraphError, "add_node"),
    "several results": (lambda m, x: m.add_node(hir.Split((2, 6)), x), GraphError, "2 results: add_all"),
    "numbers only": (lambda m, x: m.add(1, 2), GraphError, "one of them must be a value"),
    "an array beside": (lambda m, x: m.add(x, np.ones(8)), GraphError, "constant"),
    "a size beside": (lambda m, x: m.mul(x, m.shape(x).shape[0]), GraphError, "sizes are not values"),
    "a fraction": (lambda m, x: m.add(m.cast(x, "i32"), 0.5), DTypeError, "0.5"),
    "too large": (lambda m, x: m.mul(m.cast(x, "u8"), 300), DTypeError, "300"),
    "infinite": (lambda m, x: m.lt(m.cast(x, "i32"), float("inf")), DTypeError, "inf"),
    "an axis": (lambda m, x: m.softmax(x, 3), ShapeError, "no axis 3"),
    "a bool axis": (lambda m, x: m.sum(x, True), ShapeError, "no axis True"),
    "a reshape": (lambda m, x: m.reshape(x, 24), ShapeError, "24"),
    "a name": (lambda m, x: m.reshape(x, ("seq", 24)), ShapeError, "seq"),
    "a key of a slice": (lambda m, x: m.slice(x, "a"), GraphError, "'a'"),
    "no list": (lambda m, x: m.concat([]), GraphError, "no values"),
    "full of what does not fit": (lambda m, x: m.full_like(x, 300, "u8"), DTypeError, "300"),
    "a shape of numbers": (lambda m, x: m.nonzero(x), UnsupportedError, "shape that depends on the numbers"),
    "no elements": (lambda m, x: m.slice(x, np.s_[:, 3:]), ShapeError, r"\[batch,0,8\], which has no elements"),
    "no elements of a constant": (lambda m, x: m.arange(3, 1), GraphError, r"shape \[0\] has no elements"),
    "k over the axis": (lambda m, x: m.top_k(x, 9), ShapeError, "between 1 and the size of axis 2"),
    "an axis that is not 1": (lambda m, x: m.squeeze(x, 1), ShapeError, "axis 1 of f32.batch,3,8. is not 1"),
    "an axis twice": (lambda m, x: m.sum(x, (1, -2)), ShapeError, "stands twice"),
    "bits of floats": (lambda m, x: m.bitwise_and(x, x), DTypeError, "whole numbers or bools"),
    "a float index": (lambda m, x: m.take(x, x, 0), DTypeError, "indices are integers"),
    "a mode": (lambda m, x: m.take(x, m.constant([0]), 1, mode="raise"), GraphError, "fill, wrap, clip"),
    "a kind of scatter": (lambda m, x: m.scatter(x, m.constant([[[0]]]), x, 0, kind="sub"), GraphError, "'sub'"),
    "a mode of padding": (lambda m, x: m.pad(x, 1, "mean"), ShapeError, "'mean'; expected one of constant"),
    "widths of other axes": (lambda m, x: m.pad(x, ((1, 1), (2, 2))), ShapeError, "before, after"),
    "values beside a mode": (lambda m, x: m.pad(x, 1, "edge", constant_values=2), ShapeError, "mode 'constant'"),
    "a value as a slope": (lambda m, x: m.leaky_relu(x, x), GraphError, "takes a number beside x"),
    "an order of a norm": (lambda m, x: m.norm(x, 0), GraphError, "ord is a number over 0"),
    "terms of another count": (lambda m, x: m.einsum("ab,bc->ac", x), ShapeError, "reads 2 operands, got 1"),
    "numbers of axes": (lambda m, x: m.dot_general(x, x, ((2,), (2,))), ShapeError, "contracted of lhs"),
    "a step of 0": (lambda m, x: m.arange(0, 3, 0), GraphError, "step is 0"),
    "a shift that is none": (lambda m, x: m.roll(x, 1.5, 1), ShapeError, "whole number for each axis"),
    "unequal parts": (lambda m, x: m.split(x, 2, 1), ShapeError, "2 equal parts do not make up axis 1"),
    "parts of a symbolic axis": (lambda m, x: m.split(x, 2, 0), ShapeError, "2 equal parts do not make up axis 0"),
    "a constant over 4 bits": (lambda m, x: m.constant([8], "i4"), DTypeError, "i4 cannot hold 8"),
    "64 bits": (lambda m, x: m.cast(x, "i64"), DTypeError, "i64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_on_both_surfaces(name: str) -> None:
    """The same error, and no node is left behind."""
    call, kind, message = REFUSED[name]
    m, x = module()
    with pytest.raises(kind, match=message):
        call(m, x)
    assert all(not isinstance(n.op, hir.Split) for n in m.builder.nodes)
    with pytest.raises(kind, match=message):
        ModelFlow("m").input("x", ("batch", 3, 8)).custom(call).build()


def test_a_symbolic_size_is_not_compared_with_a_number() -> None:
    """JAX's own answer is a silent False."""
    m, x = module()
    assert m.shape(x).shape[1] == 3 and m.shape(x).shape[0] == "batch" and m.shape(x) == m.shape(x)
    with pytest.raises(ShapeError, match="batch cannot be compared with 1"):
        m.shape(x).shape[0] == 1  # noqa: B015
