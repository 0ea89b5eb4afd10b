"""Streams, chosen outputs, and the flow's methods against the stages they stand for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import stream_id
from tests.small import x_flow

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)


def run(flow: rlx.ModelFlow, *inputs: Any) -> Any:
    """Compile and call."""
    return rlx.compile(flow)(*inputs)


def times(factor: float) -> Callable[[Any, Any], Any]:
    """A custom stage."""
    return lambda emit, x: x * factor


def test_store_and_load() -> None:
    """Storing leaves the value active; loading replaces it; a stream may be stored again."""
    flow = x_flow().store_stream("a").custom(times(2)).store_stream("b").load_stream("a").custom(times(4))
    np.testing.assert_array_equal(run(flow, X), 4 * X)
    np.testing.assert_array_equal(run(flow.load_stream("b"), X), 2 * X)
    np.testing.assert_array_equal(run(flow.store_stream("b").load_stream("b"), X), 4 * X)


def test_a_double_block() -> None:
    """Two inputs as streams, mixed by a function of both; the active value passes by."""

    def mix(emit: Any, image: Any, text: Any) -> Any:
        return image + text.mean(axis=1, keepdims=True), text - image.mean(axis=1, keepdims=True)

    flow = (
        x_flow()
        .input("context", ("batch", "words", 8))
        .bind_inputs_to_streams([("x", stream_id.IMG), ("context", stream_id.TXT)])
        .custom(times(3))
        .dual_stream("double", stream_id.IMG, stream_id.TXT, mix)
        .with_extra_outputs(["img", "txt"])
    )
    out = run(flow, X, Y)
    assert list(out) == ["output", "img", "txt"]
    np.testing.assert_array_equal(out["output"], 3 * X)
    np.testing.assert_allclose(out["img"], X + Y.mean(1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["txt"], Y - X.mean(1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert "double" in rlx.compile(flow).text("hir")


@pytest.mark.parametrize("roll", ["scan", "unroll"])
def test_a_stream_through_equal_layers(roll: str) -> None:
    """What one layer stores the next one loads: a second carry of the region."""

    def layer(i: int) -> blocks.BlockStage:
        def step(emit: Any, x: Any) -> Any:
            skip = emit.stream("skip")
            emit.set_stream("skip", x)
            return x + skip

        return blocks.Custom(step)

    profile = rlx.CompileProfile().replace(layers={"roll": roll})
    model = rlx.compile(x_flow().store_stream("skip").repeat_layers(5, layer), profile=profile)
    np.testing.assert_allclose(model(X), fibonacci(X, 5), rtol=1e-6)
    assert model.report().refusals == ()


def fibonacci(x: Any, count: int) -> Any:
    """`count` steps of (a, b) → (a + b, a) from (x, x)."""
    a, b = x, x
    for _ in range(count):
        a, b = a + b, a
    return a


def test_a_stage_declares_an_input() -> None:
    """One of the program after those of the flow; asked for again, or declared by the flow, it is the same."""

    def scaled(emit: Any, x: Any) -> Any:
        factor = emit.input("factor", ("batch",), "int64")
        assert emit.input("factor", ("batch",)).value == factor.value
        return x * factor[:, None, None].astype("float32")

    model = rlx.compile(x_flow().custom(scaled))
    assert [str(i.type) for i in model.inputs] == ["f32[batch,seq,8]", "i32[batch]"]
    np.testing.assert_array_equal(model(X, np.array([2, 3])), X * np.array([2, 3], "f4")[:, None, None])
    declared = x_flow().input("factor", ("batch",), dtype="int32").custom(scaled)
    assert [i.name for i in rlx.compile(declared).inputs] == ["x", "factor"]
