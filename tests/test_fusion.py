"""Fusion passes: each fires on its pattern and not beside it, and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.passes import Job, pass_named
from rlx_jax.compiler.settings import plain
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Leaf, Origin, StateLeaf, StateRead, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Compare, Unary, Where
from rlx_jax.ir.ops.shape import Narrow, Slice
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from rlx_jax.lowering.lir.interpret import Env, interpret

ADD, MUL = Binary("add"), Binary("mul")
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (2, 3, 8), "y": (2, 3, 8), "z": (2, 3, 6), "u": (2, 3, 16), "one": (2, 1, 8), "first": (1, 3, 8),
    "w": (8, 6), "wt": (6, 8), "w8": (8, 8), "b": (6,), "g": (8,), "h": (8,), "b1": (1, 6), "s": (),
}  # fmt: skip
"""Operands that the graphs below may use, by name."""

Build = Callable[[Builder, dict[str, Value]], Any]


def graph_of(build: Build, dtype: str = "f32") -> Graph:
    """A MIR graph; `build` returns its outputs."""
    b = Builder("g", TypeCache())
    values = {name: b.input(name, tensor_type(shape, dtype, name)) for name, shape in SHAPES.items()}
    out = build(b, values)
    out = out if isinstance(out, tuple) else (out,)
    return b.finish(out, [f"o{i}" for i in range(len(out))])


def run(graph: Graph) -> list[np.ndarray]:
    """Outputs, then what the state became, for random operands."""
    rng = np.random.default_rng(3)
    arrays = {i.input: rng.standard_normal(i.type.shape).astype(i.type.dtype) for i in graph.inputs}
    env = Env({}, arrays, {r.leaf.key(None): np.zeros(r.type.shape, r.type.dtype) for r in graph.state_reads()})
    return [np.asarray(a) for a in (*interpret(graph, env), *env.state.values())]


def passed(name: str, graph: Graph, types: TypeCache) -> Graph:
    """The graph after one pass of the table, verified."""
    return pass_named(name)(graph, Job(plain(), types)).graph


def fused(name: str, build: Build, dtype: str = "f32") -> list[str]:
    """The ops that one pass leaves. Executed op by op, the program gives the same bits as before."""
    before, types = graph_of(build, dtype), TypeCache()
    after = passed("dce", passed(name, before, types), types)
    for want, got in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(got, want)
    return [n.op.text() for n in after.nodes if not isinstance(n.op, Leaf)]


# -- bias and activation into the product ------------------------------------------------------


def product(b: Builder, v: dict[str, Value], w: str = "w") -> Value:
    """x · w"""
    return b(MatMul(int(w == "wt")), v["x"], v[w])


MATMUL: dict[str, tuple[Build, list[str]]] = {
    "bias": (lambda b, v: b(ADD, product(b, v), v["b"]), ["fused_mm_bias"]),
    "bias first, stored [out, in]": (lambda b, v: b(ADD, v["b"], product(b, v, "wt")), ["fused_mm_bias(contract=1)"]),
    "activation": (lambda b, v: b(Unary("gelu"), b(ADD, product(b, v), v["b"])), ["fused_mm_bias_gelu"]),
    "the second function stays": (
        lambda b, v: b(Unary("tanh"), b(Unary("silu"), b(ADD, product(b, v), v["b"]))),
        ["fused_mm_bias_silu", "tanh"],
    ),
    "a pinned product": (
        lambda b, v: b(ADD, b(MatMul(0, "highest"), v["x"], v["w"]), v["b"]),
        ["fused_mm_bias(precision=highest)"],
    ),
    "no activation of a value that is an output": (
        lambda b, v: (y := b(ADD, product(b, v), v["b"]), b(Unary("gelu"), y)),
        ["fused_mm_bias", "gelu"],
    ),
    "no activation of a value that is read twice": (
        lambda b, v: b(MUL, y := b(ADD, product(b, v), v["b"]), b(Unary("sigmoid"), y)),
        ["fused_mm_bias", "sigmoid", "mul"],
    ),
    "an unread copy is no reader": (
        lambda b, v: (y := product(b, v), b(Unary("exp"), y), b(ADD, y, v["b"]))[-1],
        ["fused_mm_bias"],
    ),
    "not a product that is an output": (
        lambda b, v: (y := product(b, v), b(ADD, y, v["b"])),
        ["matmul", "add"],
    ),
    "not a product that is read twice": (
        lambda b, v: (y := product(b, v), b(MUL, b(ADD, y, v["b"]), y))[1],
        ["matmul", "add", "mul"],
    ),
    "not a residual": (lambda b, v: b(ADD, product(b, v), v["z"]), ["matmul", "add"]),
    "not a bias of rank 2": (lambda b, v: b(ADD, product(b, v), v["b1"]), ["matmul", "add"]),
    "not a scalar": (lambda b, v: b(ADD, product(b, v), v["s"]), ["matmul", "add"]),
    "not a product with a bias": (lambda b, v: b(MUL, product(b, v), v["b"]), ["matmul", "mul"]),
    "not an activation alone": (lambda b, v: b(Unary("relu"), product(b, v)), ["matmul", "relu"]),
}


@pytest.mark.parametrize("case", MATMUL)
def test_matmul_bias_act(case: str) -> None:
    """The pattern, and what is only near it."""
    build, want = MATMUL[case]
    assert fused("fuse_matmul_bias_act", build) == want


def test_a_product_that_is_written_to_the_state_stays() -> None:
    """A write reads it too."""
    leaf = StateLeaf(("here",), "slot")

    def build(b: Builder, v: dict[str, Value]) -> Value:
        y = product(b, v)
        old = b.leaf(StateRead(leaf, type=b.type(y)))
        b.writes.append((leaf, y))
        return b(MUL, b(ADD, y, v["b"]), old)

    assert fused("fuse_matmul_bias_act", build) == ["matmul", "add", "mul"]


def test_a_product_with_an_f32_result_keeps_it() -> None:
    """Its bias is f32 then."""
    b = Builder("g", TypeCache())
    x, w, bias = (
        b.input(n, TensorType(s, as_dtype(d)))
        for n, s, d in (("x", (2, 8), "bf16"), ("w", (8, 6), "bf16"), ("b", (6,), "f32"))
    )
    graph = b.finish([b(ADD, b(MatMul(f32_result=True), x, w), bias)], ["out"])
    after = passed("fuse_matmul_bias_act", graph, b.types)
    assert after.nodes[after.outputs[0].node].op == FusedMatMulBiasAct(f32_result=True)
    np.testing.assert_array_equal(run(after)[0], run(graph)[0])


def test_a_bias_of_an_f32_result_in_bf16() -> None:
    """Operands in bf16, sums and the bias in f32: what float64 says of the rounded numbers."""
    rng = np.random.default_rng(0)
    x, w, bias = (rng.normal(size=shape).astype("f4") for shape in ((3, 8), (5, 8), (5,)))
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).custom(
        lambda emit, x: emit.add_node(hir.Linear(1, bias=True, f32_result=True), x, emit.param("w"), emit.param("b"))
    )  # fmt: skip
    model = rlx.compile(flow, {"w": w, "b": bias}, profile=rlx.CompileProfile().replace(precision={"compute": "bf16"}))
    x, w, bias = (value.astype(ml_dtypes.bfloat16).astype("f8") for value in (x, w, bias))
    np.testing.assert_allclose(np.asarray(model(x.astype("f4"))), x @ w.T + bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", UNARY)
def test_every_function_is_an_activation(kind: str) -> None:
    """None is left out."""
    ops = fused("fuse_matmul_bias_act", lambda b, v: b(Unary(kind), b(ADD, product(b, v), v["b"])))
    assert ops == [f"fused_mm_bias_{kind}"]


# -- residuals into norms ----------------------------------------------------------------------


def ln(b: Builder, v: dict[str, Value], x: Value) -> Value:
    """layer_norm(x)"""
    return b(LayerNormOp(1e-5), x, v["g"], v["h"])


def rms(b: Builder, v: dict[str, Value], x: Value, *beta: Value) -> Value:
    """rms_norm(x)"""
    return b(RmsNormOp(1e-5), x, v["g"], *beta)


LN, RMS = "fused_residual_ln(eps=1e-05)", "fused_residual_rms(eps=1e-05)"
RESIDUAL: dict[str, tuple[str, Build, list[str]]] = {
    "ln": ("layer_norm", lambda b, v: ln(b, v, b(ADD, v["x"], v["y"])), [LN]),
    "rms": ("rms_norm", lambda b, v: rms(b, v, b(ADD, v["x"], v["y"])), [RMS]),
    "rms with beta": ("rms_norm", lambda b, v: rms(b, v, b(ADD, v["x"], v["y"]), v["h"]), [RMS]),
    "an offset": (
        "rms_norm",
        lambda b, v: b(RmsNormOp(1e-5, 1.0), b(ADD, v["x"], v["y"]), v["g"]),
        ["fused_residual_rms(eps=1e-05, offset=1)"],
    ),
    "a bias first": (
        "layer_norm",
        lambda b, v: ln(b, v, b(ADD, b(ADD, v["x"], v["h"]), v["y"])),
        ["fused_residual_bias_ln(eps=1e-05)"],
    ),
    "a bias in the second term": (
        "rms_norm",
        lambda b, v: rms(b, v, b(ADD, v["y"], b(ADD, v["h"], v["x"]))),
        ["fused_residual_bias_rms(eps=1e-05)"],
    ),
    "a biased sum that is an output": (
        "layer_norm",
        lambda b, v: (t := b(ADD, v["x"], v["h"]), ln(b, v, b(ADD, t, v["y"]))),
        ["add", LN],
    ),
    "a sum of three": (
        "layer_norm", lambda b, v: ln(b, v, b(ADD, b(ADD, v["x"], v["y"]), v["x"])), ["add", LN],
    ),
    "not the other norm": (
        "layer_norm", lambda b, v: rms(b, v, b(ADD, v["x"], v["y"])), ["add", "rms_norm(eps=1e-05)"],
    ),
    "not a sum that is read again": (
        "rms_norm",
        lambda b, v: b(MUL, t := b(ADD, v["x"], v["y"]), rms(b, v, t)),
        ["add", "rms_norm(eps=1e-05)", "mul"],
    ),
    "not a sum that is an output": (
        "layer_norm", lambda b, v: (t := b(ADD, v["x"], v["y"]), ln(b, v, t)), ["add", "layer_norm(eps=1e-05)"],
    ),
    "not a broadcast over rows": (
        "layer_norm", lambda b, v: ln(b, v, b(ADD, v["x"], v["one"])), ["add", "layer_norm(eps=1e-05)"],
    ),
    "not a bias": ("rms_norm", lambda b, v: rms(b, v, b(ADD, v["x"], v["h"])), ["add", "rms_norm(eps=1e-05)"]),
    "not a product": ("rms_norm", lambda b, v: rms(b, v, b(MUL, v["x"], v["y"])), ["mul", "rms_norm(eps=1e-05)"]),
}  # fmt: skip


@pytest.mark.parametrize("case", RESIDUAL)
def test_residual_norms(case: str) -> None:
    """The pattern, and what is only near it."""
    norm, build, want = RESIDUAL[case]
    assert fused(f"fuse_residual_{norm}", build) == want


# -- gates -------------------------------------------------------------------------------------


def half(b: Builder, x: Value, start: int, length: int = 8) -> Value:
    """Elements of the last axis."""
    return b(Narrow(2, start, length), x)


def gate(
    b: Builder, v: dict[str, Value], gate_at: int = 0, up_at: int = 8, kind: str = "silu", swap: bool = False
) -> Value:
    """act(u[…, gate_at:+8]) · u[…, up_at:+8]"""
    factors = (b(Unary(kind), half(b, v["u"], gate_at)), half(b, v["u"], up_at))
    return b(MUL, *(factors[::-1] if swap else factors))


def sliced(b: Builder, v: dict[str, Value], *keys: Any) -> Value:
    """silu(u[first key]) · u[second key]"""
    first, second = (b(Slice(key), v["u"]) for key in keys)
    return b(MUL, b(Unary("silu"), first), second)


ALL = (None, None, None)
LOW, HIGH = (None, 8, None), (8, None, None)
GATED = "fused_swiglu(gate_first=true)"
SWIGLU: dict[str, tuple[Build, list[str]]] = {
    "gate first": (gate, [GATED]),
    "factors swapped": (lambda b, v: gate(b, v, swap=True), [GATED]),
    "up first": (lambda b, v: gate(b, v, 8, 0), ["fused_swiglu(gate_first=false)"]),
    "geglu": (lambda b, v: gate(b, v, kind="gelu_tanh"), ["fused_swiglu(gate_first=true, activation=gelu_tanh)"]),
    "a start from the end": (lambda b, v: gate(b, v, 0, -8), [GATED]),
    "slices": (lambda b, v: sliced(b, v, (..., LOW), (..., HIGH)), [GATED]),
    "slices of all axes": (lambda b, v: sliced(b, v, (ALL, ALL, (-8, None, None)), (ALL, ALL, (0, 8, 1))),
                           ["fused_swiglu(gate_first=false)"]),
    "not halves of two values": (
        lambda b, v: b(MUL, b(Unary("silu"), half(b, v["u"], 0)), half(b, b(Unary("neg"), v["u"]), 8)),
        ["narrow(2, 0, 8)", "silu", "neg", "narrow(2, 8, 8)", "mul"],
    ),
    "not one half twice": (lambda b, v: gate(b, v, 0, 0), ["narrow(2, 0, 8)", "silu", "narrow(2, 0, 8)", "mul"]),
    "not parts that overlap": (lambda b, v: gate(b, v, 0, 4), ["narrow(2, 0, 8)", "silu", "narrow(2, 4, 8)", "mul"]),
    "not another function": (
        lambda b, v: gate(b, v, kind="exp"), ["narrow(2, 0, 8)", "exp", "narrow(2, 8, 8)", "mul"],
    ),
    "not another axis": (
        lambda b, v: b(MUL, b(Unary("silu"), b(Narrow(0, 0, 1), v["u"])), b(Narrow(0, 1, 1), v["u"])),
        ["narrow(0, 0, 1)", "silu", "narrow(0, 1, 1)", "mul"],
    ),
    "not every second element": (
        lambda b, v: sliced(b, v, (..., (0, None, 2)), (..., (1, None, 2))),
        ["slice[..., 0::2]", "slice[..., 1::2]", "silu", "mul"],
    ),
    "not a gate that is an output": (
        lambda b, v: (g := b(Unary("silu"), half(b, v["u"], 0)), b(MUL, g, half(b, v["u"], 8))),
        ["narrow(2, 0, 8)", "silu", "narrow(2, 8, 8)", "mul"],
    ),
    "not a half that is read again": (
        lambda b, v: b(ADD, b(MUL, b(Unary("silu"), x := half(b, v["u"], 0)), half(b, v["u"], 8)), x),
        ["narrow(2, 0, 8)", "silu", "narrow(2, 8, 8)", "mul", "add"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SWIGLU)
def test_swiglu(case: str) -> None:
    """The pattern, and what is only near it."""
    build, want = SWIGLU[case]
    assert fused("fuse_swiglu", build) == want


# -- regions -----------------------------------------------------------------------------------


def tanh(b: Builder, x: Value) -> Value:
    """tanh x"""
    return b(Unary("tanh"), x)


def long_chain(b: Builder, v: dict[str, Value], steps: int) -> Value:
    """tanh … tanh(x)"""
    x = v["x"]
    for _ in range(steps):
        x = tanh(b, x)
    return x


REGIONS: dict[str, tuple[Build, list[str]]] = {
    "a chain": (lambda b, v: tanh(b, b(MUL, v["x"], v["y"])), ["ew_region(in=2, steps=2: mul tanh)"]),
    "a tree": (
        lambda b, v: b(ADD, b(MUL, v["x"], v["y"]), tanh(b, v["x"])), ["ew_region(in=2, steps=3: mul tanh add)"],
    ),
    "scalars and leading axes": (
        lambda b, v: b(ADD, b(MUL, b(MUL, v["x"], v["g"]), v["s"]), v["first"]),
        ["ew_region(in=4, steps=3: mul mul add)"],
    ),
    "a choice": (
        lambda b, v: b(Where(), b(Compare("gt"), v["x"], v["y"]), v["x"], b(MUL, v["y"], v["s"])),
        ["ew_region(in=3, steps=3: gt mul where)"],
    ),
    "up to 32 steps": (
        lambda b, v: long_chain(b, v, 34),
        [f"ew_region(in=1, steps=32: {'tanh ' * 31}tanh)", "ew_region(in=1, steps=2: tanh tanh)"],
    ),
    "an end where a value is read twice": (
        lambda b, v: b(ADD, x := tanh(b, tanh(b, v["x"])), tanh(b, x)),
        ["ew_region(in=1, steps=2: tanh tanh)", "ew_region(in=1, steps=2: tanh add)"],
    ),
    "an end where a value is an output": (
        lambda b, v: (x := tanh(b, tanh(b, v["x"])), tanh(b, x)), ["ew_region(in=1, steps=2: tanh tanh)", "tanh"],
    ),
    "not one op": (lambda b, v: tanh(b, v["x"]), ["tanh"]),
    "not over a broadcast of an inner axis": (
        lambda b, v: tanh(b, b(ADD, v["x"], v["one"])), ["add", "tanh"],
    ),
    "not an inner axis later": (lambda b, v: b(ADD, tanh(b, v["x"]), v["one"]), ["tanh", "add"]),
    "not a smaller value": (lambda b, v: b(ADD, v["x"], tanh(b, v["g"])), ["tanh", "add"]),
    "not across a product": (
        lambda b, v: tanh(b, b(MatMul(), tanh(b, v["x"]), v["w"])), ["tanh", "matmul", "tanh"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REGIONS)
def test_regions(case: str) -> None:
    """Marked; and what comes back from a region is what went in."""
    build, want = REGIONS[case]
    assert fused("mark_elementwise_regions", build) == want
    graph, types = graph_of(build), TypeCache()
    again = graph
    for name in ("mark_elementwise_regions", "unfuse_elementwise_regions", "dce"):
        again = passed(name, again, types)
    assert sorted(n.op.text() for n in again.nodes) == sorted(n.op.text() for n in passed("dce", graph, types).nodes)
    for got, expected in zip(run(again), run(graph), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_region_stays_in_one_block() -> None:
    """So that scopes and reports name the right one."""

    def build(b: Builder, v: dict[str, Value]) -> Value:
        with b.at(Origin(("first",))):
            x = tanh(b, tanh(b, v["x"]))
        with b.at(Origin(("second",))):
            return tanh(b, tanh(b, x))

    assert fused("mark_elementwise_regions", build) == ["ew_region(in=1, steps=2: tanh tanh)"] * 2
