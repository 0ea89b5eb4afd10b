"""Inputs of a flow: optional ones, unread ones, values without numbers; and slices to symbolic sizes."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.errors import DeriveError, ShapeError
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


RNG = np.random.default_rng(3)
TXT, IMG = (RNG.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 5))


def flow(fn: Any) -> rlx.ModelFlow:
    """Of two sequences, with a size for each."""
    made = rlx.ModelFlow("joint").input("txt", ("batch", "words", 4)).input("img", ("batch", "patches", 4))
    return made.custom_named("cut", lambda e, t: fn(e, t, e.flow_input("img")))


def joint(emit: Any, t: Any, i: Any) -> Any:
    return emit.concat([t, i], axis=1)


CUTS: dict[str, tuple[Any, Any]] = {
    "in front": (lambda e, x, t, i: x[:, : t.shape[1]], np.s_[:, :3]),
    "behind": (lambda e, x, t, i: x[:, t.shape[1] :], np.s_[:, 3:]),
    "counted from the end": (lambda e, x, t, i: x[:, -i.shape[1] :, 1:3], np.s_[:, 3:, 1:3]),
    "before the end": (lambda e, x, t, i: x[..., : -i.shape[1], :], np.s_[:, :-5]),
    "a size of x itself": (lambda e, x, t, i: x[:, x.shape[1] - i.shape[1] : x.shape[1]], np.s_[:, 3:8]),
    "and numbers": (lambda e, x, t, i: x[:, 1 + t.shape[1] : -1], np.s_[:, 4:-1]),
    "a size twice": (lambda e, x, t, i: x[:, 1 : 2 * t.shape[1]], np.s_[:, 1:6]),
    "a size and itself": (lambda e, x, t, i: x[:, t.shape[1] : t.shape[1] + t.shape[1]], np.s_[:, 3:6]),
    "a difference": (lambda e, x, t, i: x[:, i.shape[1] - t.shape[1] :], np.s_[:, 2:]),
    "a number less": (lambda e, x, t, i: x[:, t.shape[1] - 2 : 2 * t.shape[1] - 1], np.s_[:, 1:5]),
    "beside a new axis": (lambda e, x, t, i: x[None, :, : t.shape[1], 0], np.s_[None, :, :3, 0]),
    "narrow": (lambda e, x, t, i: e.narrow(x, 1, t.shape[1], i.shape[1]), np.s_[:, 3:]),
    "narrow from the end": (lambda e, x, t, i: e.narrow(x, -2, -i.shape[1], i.shape[1]), np.s_[:, 3:]),
    "narrow to a number": (lambda e, x, t, i: e.narrow(x, 1, t.shape[1], 2), np.s_[:, 3:5]),
    "narrow from a number": (lambda e, x, t, i: e.narrow(x, 1, 2, t.shape[1]), np.s_[:, 2:5]),
}  # fmt: skip


def test_parts_of_a_joint_sequence() -> None:
    """All of them in one program; another pair of sizes too."""

    def cut(emit: Any, t: Any, i: Any) -> Any:
        for name, (fn, _) in CUTS.items():
            emit.output(name, fn(emit, joint(emit, t, i), t, i))
        return joint(emit, t, i)

    model = rlx.compile(flow(cut))
    out, x = model(TXT, IMG), np.concatenate([TXT, IMG], 1)
    for name, (_, key) in CUTS.items():
        np.testing.assert_array_equal(out[name], x[key], err_msg=name)
    longer = np.concatenate([IMG, IMG], 1)
    out = model(TXT, longer)
    np.testing.assert_array_equal(out["behind"], longer)
    np.testing.assert_array_equal(out["counted from the end"], longer[:, :, 1:3])


def test_a_part_has_the_size_it_had() -> None:
    """`words + patches` less `words` is `patches`, so that it can be added to what it was."""
    sizes: dict[str, Any] = {}

    def cut(emit: Any, t: Any, i: Any) -> Any:
        x = emit.tanh(joint(emit, t, i))
        sizes["behind"] = x[:, t.shape[1] :].shape[1]
        return x[:, t.shape[1] :] + i

    model = rlx.compile(flow(cut))
    np.testing.assert_allclose(model(TXT, IMG), np.tanh(IMG) + IMG, atol=1e-6)
    assert sizes["behind"] == "patches"


def test_what_only_sizes_decide() -> None:
    """Whether the text is the longer one is known when sizes are: refused in the call that does not fit."""
    model = rlx.compile(flow(lambda e, t, i: i[:, : t.shape[1]]))
    np.testing.assert_array_equal(model(TXT, IMG), IMG[:, :3])
    with pytest.raises(ShapeError, match="0:5 along axis 1"):
        model(IMG, TXT)


def test_a_cut_of_the_sequence_mixes_positions() -> None:
    """A part of a table as long as the prompt would be the front of it in every step of decoding."""
    model = (
        rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").embed("e")
        .custom_named("wpe", lambda e, x: x + e.param("p")[: x.shape[1]])
        .lm_head(7, 4, tied=True)
    )  # fmt: skip
    weights = {"e": np.ones((7, 4), np.float32), "p": np.ones((9, 4), np.float32)}
    lm = rlx.CausalLM(model, weights)
    assert lm.logits([[1, 2]]).shape == (1, 2, 7)
    with pytest.raises(DeriveError, match="wpe"):
        lm.prefill([[1, 2]])
