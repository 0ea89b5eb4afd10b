"""Blocks under the names of the spec, questions to a graph, and graphs put into each other."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.quantization import Scale, insert_q_dq
from tests.oracles.comparing import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 8)).astype("f4")
W = {
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
    got = rlx.compile(m, {"mlp.up": W["up"], "other": W["gate"]})(X, y)
    assert_close(got, (X.astype("f8") @ W["up"] + y + X @ W["gate"]).astype("f4"))
    assert "block" in m.inspect()


def test_weights_that_calls_give() -> None:
    m = inner().promote_params_to_inputs(["mlp.up"])
    assert [i.name for i in m.inputs] == ["x", "y", "mlp_up"] and m.build().params == {}
    y = RNG.normal(size=(3, 6)).astype("f4")
    assert_close(rlx.compile(m)(X, y, W["up"]), (X.astype("f8") @ W["up"] + y).astype("f4"))
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

    want = qdq(qdq(X, 0.05, 3).astype("f8") @ qdq(W["up"], 0.1), 0.5, 100, 0, 255).astype("f4")
    got = rlx.compile(rounded, {"up": W["up"]})(X)
    assert_close(got["output1"], want)
    assert_close(got["output0"], np.maximum(want, 0))
    assert len(rounded) > len(m) and len(insert_q_dq(m, {})) == len(m)
