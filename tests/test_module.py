"""`GraphModule`: one builder surface at HIR, MIR and LIR; what a level lacks is a typed error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, GraphStage
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.errors import (
    DanglingRefError,
    DTypeError,
    GraphError,
    LevelError,
    MissingWeightError,
    NameCollisionError,
    RlxWarning,
    ShapeError,
    UnexpectedWeightError,
    WeightShapeError,
)
from rlx_jax.ir import hir
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Unary

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8)).astype(np.float32)
W = RNG.standard_normal((8, 8)).astype(np.float32)


def linear_module() -> GraphModule:
    """`x · w`, `[2, 8] · [8, 8]`."""
    return Graph.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))


def compiled(module: Any, weights: Any = None) -> Any:
    """`rlx.compile`, untyped: inputs are given by name."""
    return rlx.compile(module, weights)


def run(module: Any, weights: Any, *inputs: Any) -> np.ndarray:
    """Compile and call."""
    return np.asarray(rlx.compile(module, weights)(*inputs))


# -- opening and levels ------------------------------------------------------------------------


def test_levels_of_the_examples() -> None:
    """The three ways to open a module, and where each stands."""
    assert Graph is GraphModule
    assert str(Graph.hir("m").stage) == "hir" == str(GraphStage.HIR) and Graph.hir("m").name == "m"

    def norm(m: GraphModule) -> Any:
        x = m.input("x", (2, 8))
        return m.rms_norm(x, x, x, 1e-5)

    assert Graph.define("m", norm).stage == GraphStage.HIR
    module = linear_module()
    assert module.stage == GraphStage.HIR and len(module) == 3
    lowered = module.lower()
    assert lowered.stage == GraphStage.MIR and len(lowered) >= 3
    assert lowered.lower() is lowered and module.stage == GraphStage.HIR
    raw = Graph.mir("raw")
    raw.set_outputs([raw.input("x", (4,))])
    assert len(raw) == 1 and raw.stage == GraphStage.MIR


def test_conversions_go_down_and_never_up() -> None:
    """into_* lowers on the way; as_* says None for another level; there is no way back."""
    module = linear_module()
    planned = Graph.from_lir(module.into_lir())
    at_mir = module.lower()
    assert planned.stage == GraphStage.LIR
    for m, hir_, mir, lir in ((module, 1, 0, 0), (at_mir, 0, 1, 0), (planned, 0, 1, 1)):
        assert [m.as_hir() is not None, m.as_mir() is not None, m.as_lir() is not None] == [hir_, mir, lir]
        assert (m.as_graph() is None) == (m.as_mir() is None)
    for m in (at_mir, planned):
        with pytest.raises(LevelError, match="no way back"):
            m.into_hir()
        assert [n.op for n in m.into_graph().nodes][-1] == MatMul() == m.graph.nodes[-1].op
        with pytest.raises(LevelError, match="fusion policy"):
            m.with_fusion_policy("fusable")
        assert m.fusion_policy is None
    with pytest.raises(LevelError, match="no MIR graph"):
        module.graph  # noqa: B018
    assert [type(n.op) for n in module.into_mir().nodes][-1] is MatMul
    with pytest.raises(LevelError, match="planned already"):
        planned.into_lir(batch=2)
    assert planned.into_lir().plan == module.into_lir().plan


def test_a_module_compiles_at_every_level() -> None:
    """With weights by key, and with init."""
    module = linear_module()
    for m in (module, module.lower(), Graph.from_lir(module.into_lir())):
        np.testing.assert_allclose(run(m, {"w": W}, X), X @ W, rtol=1e-5, atol=1e-5)
        model: Any = rlx.compile(m)
        params = model.init(0)
        np.testing.assert_allclose(model.apply(params, X), X @ np.asarray(params["w"]), rtol=1e-5, atol=1e-5)
        with pytest.raises(MissingWeightError):
            rlx.compile(m, {})
        with pytest.raises(WeightShapeError, match="expected"):
            rlx.compile(m, {"w": W[:4]})


def test_lir_runs_as_it_was_planned() -> None:
    """The plan decides: a profile is refused, and options stay."""
    profile = rlx.CompileProfile().replace(layers={"roll": "scan"})
    with pytest.warns(RlxWarning, match="layers.roll = 'scan' has no effect: no layers repeat"):
        planned = Graph.from_lir(linear_module().into_lir(profile))
    assert planned.plan is not None and planned.plan.scan
    assert rlx.compile(planned, {"w": W}).settings.plan.scan
    with pytest.raises(LevelError, match="takes no profile"):
        rlx.compile(planned, {"w": W}, profile=profile)


def test_symbolic_sizes_are_given_on_the_way_to_lir() -> None:
    """A module with symbols compiles for any size; LIR has one."""
    module = Graph.hir("m")
    x = module.input_batch_seq("x", 8)
    module.set_outputs([module.linear(x, module.param("w", (8, 4)))])
    assert str(module.shape(x)) == "f32[batch,seq,8]"
    lir = module.into_lir(batch=2, seq=3)
    assert str(lir.graph.type(lir.graph.outputs[0])) == "f32[2,3,4]"
    with pytest.raises(GraphError, match="seq"):
        module.into_lir(batch=2)
    assert run(module, {"w": W[:, :4]}, np.ones((5, 6, 8), np.float32)).shape == (5, 6, 4)


def test_a_flow_travels_through_modules() -> None:
    """flow → module at each level → compiled again: the same numbers, layers still rolled."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).repeat_layers(3, lambda i: rlx.blocks.Linear(f"w{i}", False))
    weights = {f"w{i}": RNG.standard_normal((8, 8)).astype(np.float32) for i in range(3)}
    built = flow.build(weights)
    want = run(flow, weights, X)
    module = built.into_graph_module()
    for m in (module, module.lower(), Graph.from_lir(module.into_lir(batch=2))):
        assert any(n.op.regions() for n in m.builder.nodes)
        np.testing.assert_array_equal(run(m, weights, X), want)


def test_the_policy_of_a_module_is_used() -> None:
    """Direct fuses the bias, fusable does not; a profile given to compile wins."""
    module = Graph.define(
        "m", lambda m: m.linear_fused(m.input("x", (2, 8)), m.param("w", (8, 8)), m.param("b", (8,)), activation="gelu")
    )
    assert module.fusion_policy == "direct" and "fused_mm_bias_gelu" in str(module.lower())
    assert module.with_fusion_policy("fusable") is module and "fused_mm_bias" not in str(module.lower())
    weights = {"w": W, "b": W[0]}
    assert compiled(module, weights).settings.policy == "fusable"
    assert rlx.compile(module, weights, profile=rlx.CompileProfile()).settings.policy == "direct"
    with pytest.raises(GraphError, match="direct, fusable"):
        module.with_fusion_policy("best")


# -- builders ----------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normed(x: np.ndarray) -> np.ndarray:
    """x over its root mean square."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)


A = RNG.standard_normal((2, 3, 4)).astype(np.float32)
B = RNG.standard_normal((2, 3, 4)).astype(np.float32)
V = np.abs(RNG.standard_normal(4)).astype(np.float32)

PRIMITIVES: dict[str, tuple[Callable[[GraphModule, Any, Any, Any], Any], Callable[[], np.ndarray]]] = {
    "mm": (lambda m, a, b, v: m.mm(a, m.transpose_(b, (0, 2, 1))), lambda: A @ B.transpose(0, 2, 1)),
    "add": (lambda m, a, b, v: m.add(a, v), lambda: A + V),
    "sub": (lambda m, a, b, v: m.sub(a, b), lambda: A - B),
    "mul": (lambda m, a, b, v: m.mul(a, b), lambda: A * B),
    "div": (lambda m, a, b, v: m.div(a, v), lambda: A / V),
    "max": (lambda m, a, b, v: m.binary("max", a, b), lambda: np.maximum(A, B)),
    "gelu": (lambda m, a, b, v: m.gelu(a), lambda: np.asarray(jax.nn.gelu(A, approximate=False))),
    "gelu_approx": (lambda m, a, b, v: m.gelu_approx(a), lambda: np.asarray(jax.nn.gelu(A, approximate=True))),
    "silu": (lambda m, a, b, v: m.silu(a), lambda: A / (1 + np.exp(-A))),
    "relu": (lambda m, a, b, v: m.relu(a), lambda: np.maximum(A, 0)),
    "exp": (lambda m, a, b, v: m.exp(a), lambda: np.exp(A)),
    "sqrt": (lambda m, a, b, v: m.sqrt(v), lambda: np.sqrt(V)),
    "neg": (lambda m, a, b, v: m.neg(a), lambda: -A),
    "tanh": (lambda m, a, b, v: m.tanh(a), lambda: np.tanh(A)),
    "ln": (
        lambda m, a, b, v: m.ln(a, v, v),
        lambda: (A - A.mean(-1, keepdims=True)) / np.sqrt(A.var(-1, keepdims=True) + 1e-5) * V + V,
    ),
    "sum": (lambda m, a, b, v: m.sum(a, (0, 2)), lambda: A.sum((0, 2))),
    "mean": (lambda m, a, b, v: m.mean(a, 1, keepdims=True), lambda: A.mean(1, keepdims=True)),
    "reduce": (lambda m, a, b, v: m.reduce("max", a, -1), lambda: A.max(-1)),
    "sm": (lambda m, a, b, v: m.sm(a), lambda: softmax(A)),
    "cumsum": (lambda m, a, b, v: m.cumsum(a, 0), lambda: np.cumsum(A, 0)),
    "reshape": (lambda m, a, b, v: m.reshape_(a, (2, -1)), lambda: A.reshape(2, 12)),
    "narrow": (lambda m, a, b, v: m.narrow_(a, 1, -2, 2), lambda: A[:, -2:]),
    "concat": (lambda m, a, b, v: m.concat_([a, b], 1), lambda: np.concatenate([A, B], 1)),
    "eq": (lambda m, a, b, v: m.eq(a, a), lambda: A == A),
    "lt": (lambda m, a, b, v: m.lt(a, b), lambda: A < B),
    "where": (lambda m, a, b, v: m.where(m.lt(a, b), a, b), lambda: np.minimum(A, B)),
    "cast": (lambda m, a, b, v: m.cast(a, "i32"), lambda: A.astype(np.int32)),
    "gather": (lambda m, a, b, v: m.gather_(a, m.constant([1, 0, 1], "i32")), lambda: A[[1, 0, 1]]),
}


@pytest.mark.parametrize("level", ["hir", "mir"])
def test_primitives_are_their_formulas(level: str) -> None:
    """Every tensor op builder, all in one module at either level, against NumPy."""
    module = Graph.hir("all") if level == "hir" else Graph.mir("all")
    values = module.input("a", (2, 3, 4)), module.input("b", (2, 3, 4)), module.input("v", (4,))
    outs = {name: build(module, *values) for name, (build, _) in PRIMITIVES.items()}
    module.set_outputs(list(outs.values()), [f"out_{name}" for name in outs])
    got = rlx.compile(module)(A, B, V)
    for name, (_, want) in PRIMITIVES.items():
        assert got[f"out_{name}"].dtype == want().dtype, name
        np.testing.assert_allclose(got[f"out_{name}"], want(), rtol=2e-5, atol=2e-5, err_msg=name)


def test_blocks_are_their_formulas() -> None:
    """Block builders against NumPy, under both policies."""
    module = Graph.hir("blocks")
    x, r, g = module.input("x", (2, 8)), module.input("r", (2, 8)), module.param("g", (8,))
    up, gate, down = (module.param(n, s) for n, s in (("up", (8, 12)), ("gate", (8, 12)), ("down", (12, 8))))
    first, second = module.shared_linear_pair(x, up, module.param("k", (8, 4)))
    outs = [
        module.swiglu_ffn(x, up=up, gate=gate, down=down, out_shape=(2, 8)),
        module.residual_rms_norm(x, r, g),
        module.linear(x, up, activation="relu"),
        first,
        second,
    ]
    module.set_outputs(outs)
    weights = {
        name: RNG.standard_normal(shape).astype(np.float32)
        for name, shape in {"g": (8,), "up": (8, 12), "gate": (8, 12), "down": (12, 8), "k": (8, 4)}.items()
    }
    w, r_value = weights, X[::-1].copy()
    silu = X @ w["gate"] / (1 + np.exp(-(X @ w["gate"])))
    want = [
        (silu * (X @ w["up"])) @ w["down"], normed(X + r_value) * w["g"], np.maximum(X @ w["up"], 0),
        X @ w["up"], X @ w["k"],
    ]  # fmt: skip
    for policy in ("direct", "fusable"):
        got = rlx.compile(module.with_fusion_policy(policy), weights)(X, r_value)
        for g_, w_ in zip(got.values(), want, strict=True):
            np.testing.assert_allclose(g_, w_, rtol=1e-4, atol=1e-4)


def test_attention_and_rope_blocks() -> None:
    """Grouped heads, a keep mask, scale and cap; and a rotation by hand."""
    module = Graph.hir("attn")
    q, k, v = (module.input(n, (1, 3, w)) for n, w in (("q", 8), ("k", 4), ("v", 4)))
    keep, cos, sin = module.input("keep", (1, 3)), module.input("cos", (1, 3, 2)), module.input("sin", (1, 3, 2))
    outs = [
        module.attention(q, k, v, heads=2, head_dim=4),
        module.attention(q, k, v, heads=2, head_dim=4, causal=True),
        module.attention_kind(q, k, v, heads=2, head_dim=4),
        module.attention_(q, k, v, mask_value=keep, heads=2, head_dim=4),
        module.attention_kind_opts(q, k, v, heads=2, head_dim=4, mask="none", scale=0.25, softcap=2.0),
        module.rope(q, cos, sin, head_dim=4),
        module.rope_n(q, cos, sin, head_dim=4, n_rot=2),
    ]
    module.set_outputs(outs)
    values = {
        n: RNG.standard_normal(s).astype(np.float32) for n, s in (("q", (1, 3, 8)), ("k", (1, 3, 4)), ("v", (1, 3, 4)))
    }
    angle = RNG.standard_normal((1, 3, 2)).astype(np.float32)
    got = list(
        compiled(module)(**values, keep=np.array([[1, 0, 1]], "f4"), cos=np.cos(angle), sin=np.sin(angle)).values()
    )
    heads = values["q"].reshape(3, 2, 4).transpose(1, 0, 2)
    scores = heads @ values["k"][0].T
    causal = np.where(np.tril(np.ones((3, 3))), scores * 0.5, -np.inf)
    kept = np.where(np.array([1, 0, 1]), scores * 0.5, -np.inf)
    capped = 2 * np.tanh(scores * 0.25 / 2)
    for i, s in enumerate((scores * 0.5, causal, causal, kept, capped)):
        want = (softmax(s) @ values["v"][0]).transpose(1, 0, 2).reshape(1, 3, 8)
        np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)
    z = values["q"].reshape(1, 3, 2, 4)
    c, s = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    full = np.concatenate([z[..., :2] * c - z[..., 2:] * s, z[..., 2:] * c + z[..., :2] * s], -1)
    np.testing.assert_allclose(got[5], full.reshape(1, 3, 8), rtol=1e-5, atol=1e-5)
    part = np.concatenate(
        [
            z[..., :1] * c[..., :1] - z[..., 1:2] * s[..., :1],
            z[..., 1:2] * c[..., :1] + z[..., :1] * s[..., :1],
            z[..., 2:],
        ],
        -1,
    )
    np.testing.assert_allclose(got[6], part.reshape(1, 3, 8), rtol=1e-5, atol=1e-5)


def test_a_decoder_block_equals_its_parts() -> None:
    """`llama_decoder_block` and the same layer from small blocks."""

    def inputs(m: GraphModule) -> dict[str, Any]:
        shapes = {"ln1_g": (8,), "ln1_b": (8,), "q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8), "ln2_g": (8,),
                  "ln2_b": (8,), "gate": (8, 6), "up": (8, 6), "down": (6, 8)}  # fmt: skip
        tables = {n: m.input(n, (1, "seq", 2)) for n in ("cos", "sin")}
        return {"x": m.input("x", ("batch", "seq", 8)), **{n: m.param(n, s) for n, s in shapes.items()}, **tables}

    def whole(m: GraphModule) -> Any:
        given = inputs(m)
        return m.llama_decoder_block(*(given[n] for n in hir.DECODER_OPERANDS), heads=2, head_dim=4, kv_heads=1)

    def parts(m: GraphModule) -> Any:
        v = inputs(m)
        a = m.rms_norm(v["x"], v["ln1_g"], v["ln1_b"])
        q, k = (m.rope(m.linear(a, v[n]), v["cos"], v["sin"], head_dim=4) for n in "qk")
        h = m.add(v["x"], m.linear(m.attention(q, k, m.linear(a, v["v"]), heads=2, causal=True), v["o"]))
        normed = m.rms_norm(h, v["ln2_g"], v["ln2_b"])
        return m.add(h, m.swiglu_ffn(normed, up=v["up"], gate=v["gate"], down=v["down"]))

    modules = Graph.define("whole", whole), Graph.define("parts", parts)
    weights = {k: RNG.standard_normal(s.shape).astype(np.float32) / 3 for k, s in modules[0].build().params.items()}
    tables = {n: RNG.standard_normal((1, 5, 2)).astype(np.float32) for n in ("cos", "sin")}
    x = RNG.standard_normal((2, 5, 8)).astype(np.float32)
    a, b = (np.asarray(compiled(m, weights)(x=x, **tables)) for m in modules)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_blocks_need_hir() -> None:
    """Each block builder of a MIR and of a LIR module is a LevelError that says so, and leaves no node behind."""
    mir = Graph.mir("raw")
    x = mir.input("x", (2, 8))
    mir.set_outputs([x])
    for m in (mir, Graph.from_lir(mir.into_lir())):
        (x,) = m.outputs
        sizes = {"heads": 2, "head_dim": 4, "mask": "none"}
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
            "linear": ((x, x), {}), "linear_fused": ((x, x, x), {}), "shared_linear_pair": ((x, x, x), {}),
            "swiglu_ffn": ((x,), {"up": x, "gate": x, "down": x}), "residual_rms_norm": ((x, x, x), {}),
            "rms_norm": ((x, x, x, 1e-5), {}), "attention": ((x, x, x), sizes), "rope": ((x, x, x), {"head_dim": 4}),
            "rope_n": ((x, x, x), {"head_dim": 4, "n_rot": 2}), "hir_mir": ((Unary("relu"), [x]), {}),
        }  # fmt: skip
        for name, (operands, options) in calls.items():
            with pytest.raises(LevelError, match=f"HIR block; module 'raw' is at {m.stage}"):
                getattr(m, name)(*operands, **options)
        with pytest.raises(LevelError, match="llama_decoder_block is a HIR block"):
            m.llama_decoder_block(x, heads=2, head_dim=4, kv_heads=1)
        assert len(m) == 1
        m.set_outputs([m.relu(m.add(x, m.constant(np.ones(8))))])  # tensor ops, inputs and outputs are for every level
        np.testing.assert_array_equal(run(m, {}, -X), np.maximum(1 - X, 0))


def test_builders_that_come_later_are_absent() -> None:
    """No method that can only fail."""
    assert not hasattr(GraphModule, "dequant_matmul")


def test_hir_mir_and_declared_shapes() -> None:
    """A tensor op at HIR; a declared shape is checked; names of symbols stand for themselves."""
    m = Graph.hir("m")
    x = m.input("x", ("batch", "seq", 8))
    y = m.hir_mir(Unary("relu"), [x], ("batch", "seq", 8))
    assert str(m.shape(m.reshape_(y, ("batch", "seq", 2, 4)))) == "f32[batch,seq,2,4]"
    with pytest.raises(ShapeError, match=r"declared f32\[batch,8\], inferred f32\[batch,seq,8\]"):
        m.hir_mir(Unary("relu"), [x], ("batch", 8))
    with pytest.raises(ShapeError, match="declared"):
        m.linear(x, m.param("w", (8, 4)), out_shape=("batch", "seq", 5))
    with pytest.raises(ShapeError, match="last axis"):
        m.linear(x, m.param("v", (4, 8)))
    with pytest.raises(DTypeError):
        m.add(x, m.cast(x, "bf16"))
    m.set_outputs([y])
    assert "mir(relu)(h0)" in str(m)


def test_arguments_that_mean_nothing() -> None:
    """Each is a typed error before any op is made."""
    m: Any = Graph.hir("m")
    x = m.input("x", ("batch", 3, 8))
    scalar, opened = m.constant(1.0), type(m)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: m.attention(x, scalar, x, heads=2, head_dim=4), "q, k and v are"),
        (lambda: m.attention(x, x, x, heads=2, head_dim=3), "with D = 3"),
        (lambda: m.attention(x, x, x, heads=2, head_dim=0), "with D = 0"),
        (lambda: m.attention(x, x, x, heads=2, head_dim=3, mask="none"), "k is"),
        (lambda: m.attention(x, x, x, heads=2, head_dim=4, mask="cause"), "mask kind"),
        (lambda: m.attention(x, x, x, heads=2, head_dim=4, mask="custom"), "operands"),
        (lambda: m.reshape_(x, (2.5, -1)), "an identifier"),
        (lambda: m.reshape_(x, ("seq", 3, 8)), "cannot"), (lambda: m.activation("sin h", x), "unknown function"),
        (lambda: m.add_node("relu", x), "expected an op"), (lambda: m.mm(x, None), "value of this module"),
        (lambda: m.input("not a name", (2,)), "identifier"), (lambda: m.param("w", (2**62,)), "2147483647"),
        (lambda: m.concat_([], 0), "concat"), (lambda: m.cast(x, "f99"), "dtype"), (lambda: m.sum(x, 7), "no axis 7"),
        (lambda: opened.from_lir(m), "planned program"), (lambda: opened.from_graph(m), "expected a graph"),
        (lambda: m.finish_hir(x).into_lir(btach=2), "did you mean 'batch'"), (lambda: m.into_lir(batch=-1), "between"),
    ]  # fmt: skip
    for call, message in calls:
        with pytest.raises(GraphError, match=message):
            call()
    assert len(m) == 2


def test_names_and_values_of_others() -> None:
    """Twice the same input, one key with two shapes, a value from nowhere."""
    m = Graph.hir("m")
    x = m.input("x", (2, 8))
    with pytest.raises(NameCollisionError, match="'x'"):
        m.input("x", (3,))
    w = m.param("w", (8, 8))
    assert m.param("w", (8, 8)) == w
    with pytest.raises(NameCollisionError, match="'w'"):
        m.param("w", (8, 4))
    for wrong in (dataclasses.replace(x, node=99), dataclasses.replace(x, index=1), dataclasses.replace(x, node=-1)):
        with pytest.raises(DanglingRefError):
            m.relu(wrong)
        with pytest.raises(DanglingRefError):
            m.set_outputs([wrong])
    with pytest.raises(GraphError, match="value of this module"):
        m.relu(2.0)
    with pytest.raises(GraphError, match="no outputs"):
        m.lower()


def test_named_blocks_are_in_the_path() -> None:
    """`named` and `block` name what they build; errors and dumps say where."""
    m = Graph.hir("net")
    x = m.input("x", (2, 8))
    y = m.named("first", lambda m: m.named("act", lambda m: m.relu(x)))
    m.finish_hir(GraphModule.block(m, "second", lambda m: m.tanh(y)))
    assert "// first.act" in str(m) and "// second" in str(m)
    assert m.node_label(y) == "first.act" and m.node_label(m.outputs[0]) == "second"
    assert m.lower().node_label(m.outputs[0]) == "second"
    with pytest.raises(ShapeError, match="^third: "):
        m.named("third", lambda m: m.linear(x, x))


# -- BuiltModel --------------------------------------------------------------------------------


def test_a_built_model_opens_up() -> None:
    """The parts of a built flow, and back."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).linear("w", transpose=False).custom(lambda e, x: e.relu(x))
    built = flow.with_profile(rlx.CompileProfile.preset("encoder")).build({"w": W})
    assert built.params == {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    assert built.output_names == ("output",) and str(built.primary_shape) == "(batch, 8)"
    assert built.profile == rlx.CompileProfile.preset("encoder")
    graph, params = built.into_parts()
    assert params == built.params and [n.op for n in graph.nodes][-1] == Unary("relu")
    assert built.lower().stage == GraphStage.MIR and built.into_graph_parts()[1] == params
    want = np.maximum(X @ W, 0)
    for again in (
        built,
        BuiltModel.from_hir(built.into_hir(), {"w": W}),
        BuiltModel.from_graph(built.into_graph(), {"w": W}),
    ):
        np.testing.assert_allclose(run(again, None, X), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(LevelError):
        BuiltModel.from_graph(built.into_graph()).into_parts()
    with pytest.raises(GraphError, match="no outputs"):
        BuiltModel.from_hir(dataclasses.replace(graph, outputs=(), output_names=()))


def test_extra_outputs_of_a_built_model() -> None:
    """The first output and what is asked for; earlier extras are dropped."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).linear("w", transpose=False).custom(lambda e, x: e.relu(x))
    built = flow.build({"w": W})
    linear = rlx_value(built, hir.Linear)
    more = built.with_extra_hir_outputs([linear])
    assert more.output_names == ("output", "extra0")
    got = rlx.compile(more)(X)
    np.testing.assert_allclose(got["extra0"], X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["output"], np.maximum(X @ W, 0), rtol=1e-5, atol=1e-5)
    assert more.with_extra_hir_outputs([]).output_names == ("output",)
    with pytest.raises(LevelError):
        BuiltModel.from_graph(built.into_graph()).with_extra_hir_outputs([])


def rlx_value(built: BuiltModel, kind: type) -> Any:
    """The value of the only node of a kind."""
    from rlx_jax.ir.graph import Value

    (number,) = (i for i, n in enumerate(built.hir.nodes) if isinstance(n.op, kind))
    return Value(number)


def test_a_planned_module_takes_the_weights_of_what_was_planned() -> None:
    """Those too that nothing needs, which the plan has dropped, as it has inputs that nothing reads; and no others."""

    def two(m: GraphModule) -> Any:
        m.linear(m.input("x", (2, 8)), m.param("unused", (8, 8)))
        return m.linear(m.input("y", (2, 8)), m.param("w", (8, 8)))

    x, weights = np.ones((2, 8), np.float32), {k: np.ones((8, 8), np.float32) for k in ("unused", "w")}
    planned = GraphModule.from_lir(GraphModule.define("two", two).into_lir())
    for module in (planned, GraphModule.from_json(planned.to_json())):
        np.testing.assert_array_equal(rlx.compile(module, weights)(x), np.full((2, 8), 8.0, np.float32))
        with pytest.raises(UnexpectedWeightError, match="'other'"):
            rlx.compile(module, {**weights, "other": weights["w"]})
