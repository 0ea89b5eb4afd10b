"""`GraphModule`: one builder surface at HIR, MIR and LIR; what a level lacks is a typed error."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, GraphStage, errors
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Value
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Unary
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
