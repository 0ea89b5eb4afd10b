"""Fusion passes: each fires on its pattern and not beside it, and changes no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from rlx_jax.ir.graph import Builder, Graph, Leaf, StateLeaf, StateRead, TypeCache, Value
from rlx_jax.ir.ops.contract import MatMul
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Unary
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.interpret import Env, interpret
from rlx_jax.lowering.passes import CLEANING, FUSION, PASSES
from rlx_jax.profiles.schema import FusionPass

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


def fused(name: str, build: Build, dtype: str = "f32") -> list[str]:
    """The ops that one pass leaves. Executed op by op, the program gives the same bits as before."""
    before, types = graph_of(build, dtype), TypeCache()
    after = verify(PASSES["dce"](verify(PASSES[name](before, types), "mir", name, types), types), "mir", "dce", types)
    for want, got in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(got, want)
    return [n.op.text() for n in after.nodes if not isinstance(n.op, Leaf)]


def test_names() -> None:
    """The profile knows the fusion passes, and no others."""
    assert set(get_args(FusionPass)) == set(PASSES) - set(CLEANING) == set().union(*FUSION.values())


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
    after = PASSES["fuse_matmul_bias_act"](graph, b.types)
    assert after.nodes[after.outputs[0].node].op == FusedMatMulBiasAct(f32_result=True)
    np.testing.assert_array_equal(run(after)[0], run(graph)[0])


@pytest.mark.parametrize("kind", UNARY)
def test_every_function_is_an_activation(kind: str) -> None:
    """None is left out."""
    ops = fused("fuse_matmul_bias_act", lambda b, v: b(Unary(kind), b(ADD, product(b, v), v["b"])))
    assert ops == [f"fused_mm_bias_{kind}"]
