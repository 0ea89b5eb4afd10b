"""Inputs of a flow: optional ones, those that nothing reads, and values without numbers."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests.small import compiled, x_flow
from tests.test_flow import B, F, H, S, X, close, run, w


def test_a_value_has_shape_and_dtype_and_no_numbers() -> None:
    """Symbolic sizes are equal to themselves and to their names, and count with numbers."""

    def look(emit: Any, x: Any) -> Any:
        batch, seq, hidden = x.shape
        assert (x.ndim, x.dtype, hidden) == (3, np.float32, H)
        assert seq == "seq" and seq == x.shape[1] and not seq == batch
        assert str(seq + 1) == "seq + 1" and str(2 * seq) == "2*seq" and seq - seq == 0
        assert hash(seq) == hash(x.shape[1]) and "f32[batch,seq,8]" in repr(x)
        return x

    x_flow().custom(look).build()


def test_unread_weights() -> None:
    """An error that lists them, unless left on purpose or not strict."""
    weights = {"w": w(F, H), "extra.a": w(2), "extra.b": w(2)}
    flow = x_flow().linear("w")
    want = X @ weights["w"].T
    with pytest.warns(errors.RlxWarning, match=r"extra\.a"):
        close(compiled(flow, weights, strict=False)(X), want)
    close(compiled(flow.with_weights(weights, leave=["extra."]))(X), want)
    close(compiled(flow.with_weights(weights, leave=["extra.a", "extra.b"]))(X), want)
    with pytest.raises(errors.UnexpectedWeightError, match=r"extra\.b"):
        compiled(flow.with_weights(weights, leave=["extra.a"]))


def test_a_default_of_positions() -> None:
    """Needs an input with the same leading axes, not one of the same shape."""
    flow = x_flow().input("at", ("batch", "seq"), dtype="int32", default="positions").gather_add("at", "t")
    close(run(flow, X, weights={"t": w(5, H)}), X + w(5, H)[None, :S])


def test_an_absent_optional_input_is_a_smaller_program() -> None:
    """None: stages do without. A number: it counts as that. Given: it is read."""

    def scaled(emit: Any, x: Any) -> Any:
        scale = emit.optional_input("scale")
        return x if scale is None else x * scale

    flow = x_flow().input("scale", ("batch", 1, 1), default=None)
    model = compiled(flow.custom(scaled), {})
    close(model(X), X)
    scale = np.array([[[2.0]], [[3.0]]], np.float32)
    close(model(X, scale), X * scale)
    close(model(X, scale=scale), X * scale)
    close(model(X, None), X)
    assert " mul" not in model.text("lir", X) and " mul" in model.text("lir", X, scale)
    with pytest.raises(errors.UnboundInputError, match="optional"):
        compiled(flow.custom(lambda e, x: x * e.flow_input("scale")), {})
    table = w(2, H)
    kinds = x_flow().input("kinds", ("batch", "seq"), "int32", default=1)
    both = compiled(kinds.gather_add("kinds", "t"), {"t": table})
    close(both(X), X + table[1])
    close(both(X, np.zeros((B, S), np.int32)), X + table[0])


def two_towers() -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """Outputs `image` of the first input and `text` of the second; none reads the third but `scaled`."""
    flow = rlx.ModelFlow("two").input("pixels", ("batch", 3)).input("ids", ("batch", "seq"), "int32")
    flow = flow.input("scale", ("batch", 1, 1), default=None).linear("v").store_stream("image")
    flow = flow.gather_from_input("ids", "t").store_stream("text")

    def scaled(emit: Any, x: Any) -> Any:
        return x if (scale := emit.optional_input("scale")) is None else x * scale

    return flow.custom(scaled).store_stream("scaled"), {"v": w(4, 3), "t": w(5, 4, seed=1)}


def called_with(model: Any) -> list[str]:
    return [d.name for d in model.inputs]


def test_inputs_that_no_output_reads() -> None:
    """Are no part of what is compiled: of the call, its shapes and ids, what is printed, a module and its JSON."""
    flow, weights = two_towers()
    text, ids, pixels = flow.outputs(["text"]), np.array([[4, 0]], np.int32), np.ones((1, 3), np.float32)
    model, scale = compiled(text, weights), np.full((1, 1, 1), 2, np.float32)
    assert called_with(model) == ["ids", "scale"] and called_with(compiled(flow, weights)) == ["ids", "scale"]
    first = (model(pixels, ids), model(ids, pixels=pixels))  # the active value, which a gather replaces
    for made in (*first, model(ids), model(ids=ids), compiled(flow.outputs(["scaled"]), weights)(ids, scale=scale) / 2):
        close(made, weights["t"][ids])
    close(compiled(flow.outputs(["image"]), weights)(pixels), pixels @ weights["v"].T)
    both = compiled(flow.outputs(["image", "text"]), weights)
    assert called_with(both) == ["pixels", "ids", "scale"] and set(both(pixels, ids)) == {"image", "text"}
    assert "pixels" not in str(model).split("\n\n")[0] and "in   ids i32[batch,seq]\n" in str(model)
    assert text.summary(weights).startswith("two: ids i32[batch,seq]\n")
    assert model.report(batch=1, seq=2).bytes == 72 and "pixels" not in model.text("mir")
    module = text.build(weights).into_graph_module()
    for one in (module, module.lower(), rlx.GraphModule.from_lir(module.into_lir(batch=1, seq=2))):
        again = compiled(rlx.GraphModule.from_json(one.to_json()), weights)
        assert called_with(again) == ["ids"]
        close(again(ids), weights["t"][ids])
    np.testing.assert_allclose(rlx.Encoder(text, weights).embed([[4, 0]])[0], weights["t"][[4, 0]].mean(0), rtol=1e-5)


def test_inputs_that_are_read_with_an_optional_one() -> None:
    """Are asked for where that is given; and what its default is made of only where it is not."""

    def shifted(emit: Any, x: Any) -> Any:
        by = emit.optional_input("by")
        return x if by is None else x + by * emit.flow_input("unit")

    flow = x_flow().input("unit", ("batch", 1, 1)).input("by", ("batch", 1, 1), default=None)
    model, unit = compiled(flow.custom(shifted), {}), np.full((B, 1, 1), 3, np.float32)
    close(model(X), X)
    close(model(X, unit=unit, by=unit), X + 9)
