"""`GraphModule`: one builder surface at each level, questions to graphs, and graphs put into each other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, GraphStage, errors
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Value
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.quantization import Scale, insert_q_dq
from tests.oracles.comparing import assert_close
from tests.small import compiled

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8)).astype(np.float32)
W = RNG.standard_normal((8, 8)).astype(np.float32)


def linear_module() -> GraphModule:
    """`x · w`, `[2, 8] · [8, 8]`."""
    return Graph.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))


def run(module: Any, weights: Any, *inputs: Any) -> np.ndarray:
    """Compile and call."""
    return np.asarray(rlx.compile(module, weights)(*inputs))


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
        with pytest.raises(errors.GraphError, match="no way back"):
            m.into_hir()
        assert [n.op for n in m.into_graph().nodes][-1] == MatMul() == m.graph.nodes[-1].op
        with pytest.raises(errors.GraphError, match="fusion policy"):
            m.with_fusion_policy("fusable")
        assert m.fusion_policy is None
    with pytest.raises(errors.GraphError, match="no MIR graph"):
        module.graph  # noqa: B018
    assert [type(n.op) for n in module.into_mir().nodes][-1] is MatMul
    with pytest.raises(errors.GraphError, match="planned already"):
        planned.into_lir(batch=2)
    assert planned.into_lir().plan == module.into_lir().plan


def test_inputs_and_texts_of_every_level() -> None:
    """`input` and `param` are at each; LIR prints its name, and all of it by `inspect`."""
    module = linear_module()
    for m in (module, module.lower(), Graph.from_lir(module.into_lir())):
        count = len(m)
        assert (m.input("y", (2,)).node, m.param("v", (2,)).node, len(m)) == (count, count + 1, count + 2)
        assert (str(m) == m.inspect()) == (m.stage != GraphStage.LIR)
    assert str(m) == "lir @m" and m.inspect().startswith("lir @m {\n  fingerprint: ")
    assert Graph.from_mir(module.into_mir()).stage == GraphStage.MIR


def test_lir_runs_as_it_was_planned() -> None:
    """The plan decides: a profile is refused, and options stay."""
    profile = rlx.CompileProfile().replace(layers={"roll": "scan"})
    with pytest.warns(errors.RlxWarning, match="layers.roll.*'scan'"):
        planned = Graph.from_lir(linear_module().into_lir(profile))
    assert planned.plan is not None and planned.plan.scan
    assert rlx.compile(planned, {"w": W}).settings.plan.scan
    with pytest.raises(errors.GraphError, match="takes no profile"):
        rlx.compile(planned, {"w": W}, profile=profile)


def test_symbolic_sizes_are_given_on_the_way_to_lir() -> None:
    """A module with symbols compiles for any size; LIR has one."""
    module = Graph.hir("m")
    x = module.input_batch_seq("x", 8)
    module.set_outputs([module.linear(x, module.param("w", (8, 4)))])
    assert str(module.shape(x)) == "f32[batch,seq,8]"
    lir = module.into_lir(batch=2, seq=3)
    assert str(lir.graph.type(lir.graph.outputs[0])) == "f32[2,3,4]"
    with pytest.raises(errors.GraphError, match="seq"):
        module.into_lir(batch=2)
    assert run(module, {"w": W[:, :4]}, np.ones((5, 6, 8), np.float32)).shape == (5, 6, 4)


def test_the_policy_of_a_module_is_used() -> None:
    """Direct fuses the bias, fusable does not; a profile given to compile wins."""
    module = Graph.define(
        "m", lambda m: m.linear_fused(m.input("x", (2, 8)), m.param("w", (8, 8)), m.param("b", (8,)), activation="gelu")
    )
    assert module.fusion_policy == "direct" and "fused_mm_bias_gelu" in str(module.lower())
    assert module.with_fusion_policy("fusable") is module and "fused_mm_bias" not in str(module.lower())
    weights = {"w": W, "b": W[0]}
    assert compiled(module, weights).settings.profile.fusion.policy == "fusable"
    assert rlx.compile(module, weights, profile=rlx.CompileProfile()).settings.profile.fusion.policy == "direct"
    with pytest.raises(errors.GraphError, match="direct, fusable"):
        module.with_fusion_policy("best")


def test_hir_mir_and_declared_shapes() -> None:
    """A tensor op at HIR; a declared shape is checked; names of symbols stand for themselves."""
    m: Any = Graph.hir("m")
    x = m.input("x", ("batch", "seq", 8))
    y = m.hir_mir(Unary("relu"), [x], ("batch", "seq", 8))
    assert str(m.shape(m.reshape_(y, ("batch", "seq", 2, 4)))) == "f32[batch,seq,2,4]"
    with pytest.raises(errors.ShapeError, match=r"f32\[batch,8\].*f32\[batch,seq,8\]"):
        m.hir_mir(Unary("relu"), [x], ("batch", 8))
    with pytest.raises(errors.ShapeError, match="declared"):
        m.linear(x, m.param("w", (8, 4)), out_shape=("batch", "seq", 5))
    m.set_outputs([y])
    assert "mir(relu)(h0)" in str(m)


def test_a_built_model_opens_up() -> None:
    """The parts of a built flow, and back. Of outputs the first and what is asked for; earlier extras are dropped."""
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
    with pytest.raises(errors.GraphError):
        BuiltModel.from_graph(built.into_graph()).into_parts()
    with pytest.raises(errors.GraphError, match="no outputs"):
        BuiltModel.from_hir(dataclasses.replace(graph, outputs=(), output_names=()))
    (linear,) = (Value(i) for i, n in enumerate(built.hir.nodes) if isinstance(n.op, hir.Linear))
    more = built.with_extra_hir_outputs([linear])
    assert more.output_names == ("output", "extra0")
    got = rlx.compile(more)(X)
    np.testing.assert_allclose(got["extra0"], X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["output"], np.maximum(X @ W, 0), rtol=1e-5, atol=1e-5)
    assert more.with_extra_hir_outputs([]).output_names == ("output",)
    with pytest.raises(errors.GraphError):
        BuiltModel.from_graph(built.into_graph()).with_extra_hir_outputs([])


def test_a_planned_module_takes_the_weights_of_what_was_planned() -> None:
    """Those too that nothing needs, which the plan has dropped, as it has inputs that nothing reads; and no others."""

    def two(m: GraphModule) -> Any:
        m.linear(m.input("x", (2, 8)), m.param("unused", (8, 8)))
        return m.linear(m.input("y", (2, 8)), m.param("w", (8, 8)))

    x, weights = np.ones((2, 8), np.float32), {k: np.ones((8, 8), np.float32) for k in ("unused", "w")}
    planned = GraphModule.from_lir(GraphModule.define("two", two).into_lir())
    for module in (planned, GraphModule.from_json(planned.to_json())):
        np.testing.assert_array_equal(rlx.compile(module, weights)(x), np.full((2, 8), 8.0, np.float32))
        with pytest.raises(errors.UnexpectedWeightError, match="'other'"):
            rlx.compile(module, {**weights, "other": weights["w"]})


ROWS = RNG.normal(size=(3, 8)).astype("f4")
WEIGHTS = {
    name: RNG.normal(size=shape).astype("f4")
    for name, shape in {"up": (8, 6), "gate": (8, 6), "down": (6, 8), "b": (6,), "g": (8,)}.items()
}


def diamond() -> tuple[GraphModule, Any, Any, Any]:
    m = Graph.hir("m")
    x = m.input("x", ("batch", "seq", 4))
    a = m.relu(x)
    b = m.add(a, m.exp(a))
    m.set_outputs([b, a])
    return m, x, a, b


def test_questions_to_a_graph() -> None:
    m, x, a, b = diamond()
    assert [m.node_label(v) for v in m.users(x)] == [m.node_label(a)] and len(m.users(a)) == 2 and m.users(b) == ()
    assert (m.use_count(x), m.use_count(a), m.use_count(b)) == (1, 3, 1)
    order = m.topo_order()
    place = {v.node: i for i, v in enumerate(order)}
    graph = m.finish()
    assert all(place[v.node] < i for i, w in enumerate(order) for v in graph.nodes[w.node].inputs)
    assert m.reverse_topo() == order[::-1] and len(order) == len(m)
    assert m.dynamic_symbols == ("batch", "seq") and m.has_dynamic_dims
    half = m.bind(seq=5)
    assert half.dynamic_symbols == ("batch",) and m.has_dynamic_dims and str(half.stage) == "hir"
    whole = half.bind(batch=2).lower()
    assert not whole.has_dynamic_dims and "f32[2,5,4]" in whole.inspect() and str(whole.stage) == "mir"
    x_value = RNG.normal(size=(2, 5, 4)).astype("f4")
    relu = np.maximum(x_value, 0)
    assert_close(rlx.compile(whole)(x_value)["output0"], relu + np.exp(relu))
    with pytest.raises(GraphError, match="'sep'.*'batch', 'seq'.*'seq'"):
        m.bind(sep=3)
    with pytest.raises(ShapeError, match="0"):
        m.bind(seq=0)
    with pytest.raises(GraphError, match="its sizes are bound already"):
        GraphModule.from_lir(whole.into_lir()).bind(seq=5)


def inner() -> GraphModule:
    def build(m: GraphModule) -> Any:
        x, y = m.input("x", (3, 8)), m.input("y", (3, 6))
        return m.named("block", lambda m: m.add(m.linear(x, m.param("mlp.up", (8, 6))), y))

    return Graph.define("inner", build)


def test_a_graph_inside_another() -> None:
    """Twice in one: with its own weight, and with a value in its place."""
    m = Graph.hir("outer")
    a, b = m.input("a", (3, 8)), m.input("b", (3, 6))
    (first,) = m.inline(inner(), {"x": a, "y": b})
    (second,) = m.inline(inner(), {"x": a, "y": first}, {"mlp.up": m.param("other", (8, 6))})
    m.set_outputs([second])
    y = RNG.normal(size=(3, 6)).astype("f4")
    got = rlx.compile(m, {"mlp.up": WEIGHTS["up"], "other": WEIGHTS["gate"]})(ROWS, y)
    assert_close(got, (ROWS.astype("f8") @ WEIGHTS["up"] + y + ROWS @ WEIGHTS["gate"]).astype("f4"))
    assert "block" in m.inspect()


def test_weights_that_calls_give() -> None:
    m = inner().promote_params_to_inputs(["mlp.up"])
    assert [i.name for i in m.inputs] == ["x", "y", "mlp_up"] and m.build().params == {}
    y = RNG.normal(size=(3, 6)).astype("f4")
    assert_close(rlx.compile(m)(ROWS, y, WEIGHTS["up"]), (ROWS.astype("f8") @ WEIGHTS["up"] + y).astype("f4"))
    with pytest.raises(GraphError, match="'mlp.down'.*'mlp.up'"):
        inner().promote_params_to_inputs(["mlp.down"])
    clash = Graph.define("m", lambda m: m.linear(m.input("x", (3, 8)), m.param("x", (8, 6))))
    with pytest.raises(GraphError, match="cannot become the input 'x'"):
        clash.promote_params_to_inputs(["x"])


def test_rounded_values_are_what_all_readers_get() -> None:
    """An input, a weight and a value that is an output too, by the formula; the others stay."""

    def build(m: GraphModule) -> tuple[Any, ...]:
        x, w = m.input("x", (3, 8)), m.param("up", (8, 6))
        y = m.linear(x, w)
        m.set_outputs([m.relu(y), y])
        return x, w, y

    m = Graph.hir("m")
    x, w, y = build(m)
    record = {x: Scale(np.float32(0.05), np.int64(3)), w: Scale(0.1), y: Scale(0.5, 100, "u8")}  # type: ignore[arg-type]
    rounded = insert_q_dq(m, record)

    def qdq(value: Any, scale: float, zero: int = 0, low: int = -128, high: int = 127) -> Any:
        return (np.clip(np.round(value / np.float32(scale)) + zero, low, high) - zero) * np.float32(scale)

    want = qdq(qdq(ROWS, 0.05, 3).astype("f8") @ qdq(WEIGHTS["up"], 0.1), 0.5, 100, 0, 255).astype("f4")
    got = rlx.compile(rounded, {"up": WEIGHTS["up"]})(ROWS)
    assert_close(got["output1"], want)
    assert_close(got["output0"], np.maximum(want, 0))
    assert len(rounded) > len(m) and len(insert_q_dq(m, {})) == len(m)
