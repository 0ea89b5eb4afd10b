"""Weights that no checkpoint has: how they are drawn, and that it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from tests.oracles import checkpoints, numpy_reference

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
HIDDEN = 56
Init = Any


def adding(init: Init = None, shape: tuple[int, ...] | None = (HIDDEN,)) -> Any:
    """The recipe with a learned vector behind its layers."""
    stage = blocks.Custom(lambda emit, x: x + emit.param("steering", shape, init=init), "steering")
    return rlx.recipe_for(LLAMA).after_layers([stage])


def test_a_new_weight_beside_those_of_a_checkpoint() -> None:
    """An error by default; drawn where that is asked for, and named; the others are the checkpoint's."""
    with pytest.raises(errors.MissingWeightError, match=r"steering: no weight 'steering'.*missing='init' draws it"):
        rlx.compile(adding("zeros"))
    model = rlx.compile(adding("zeros"), missing="init", key=0)
    assert model.report().initialised == ("steering",) and "1 weights: 'steering'" in str(model.report())
    weights = model.weights()
    for key, value in numpy_reference.read_weights(LLAMA).items():
        np.testing.assert_array_equal(np.asarray(weights[key]), value.astype("f4"))
    assert not np.asarray(weights["steering"]).any()


W = np.random.default_rng(0).normal(size=(6, 8)).astype("f4")


def drawn(init: Init, key: Any = 1, shape: tuple[int, int] = (9, 6)) -> np.ndarray[Any, Any]:
    """A second product behind a stored one, drawn."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w").linear("new", shape=shape, init=init)
    model = rlx.compile(flow, {"w": W}, missing="init", key=key)
    assert model.report().initialised == ("new",)
    np.testing.assert_array_equal(np.asarray(model.weights()["w"]), W)
    return np.asarray(model.weights()["new"])


def test_inits() -> None:
    """Names, functions, and by default a deviation of 1/√in; the same key draws the same."""
    assert not drawn("zeros").any() and (drawn("ones") == 1).all()
    square = drawn("orthogonal")
    np.testing.assert_allclose(square.T @ square, np.eye(6), atol=1e-5)
    normal = jax.nn.initializers.normal(0.02)
    assert drawn(normal, shape=(400, 6)).std() == pytest.approx(0.02, rel=0.1)
    assert drawn(None, shape=(400, 6)).std() == pytest.approx(6**-0.5, rel=0.1)
    np.testing.assert_array_equal(drawn(normal), drawn(normal, jax.random.key(1)))
    assert not np.array_equal(drawn(normal), drawn(normal, 2))
    ramp = drawn(lambda key, shape, dtype: np.arange(54, dtype=dtype).reshape(shape))
    np.testing.assert_array_equal(ramp, np.arange(54).reshape(9, 6))


@pytest.mark.slow
def test_a_config_alone_is_a_random_model() -> None:
    """All weights are drawn, as `CompiledModel.init` draws them."""
    recipe = rlx.Llama32Flow(rlx.recipe_for(LLAMA).config)
    model = rlx.compile(recipe, missing="init", key=3)
    assert set(model.report().initialised) == set(numpy_reference.read_weights(LLAMA))
    assert model.params is not None
    again = rlx.compile(recipe).init(3)
    for name, value in model.params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(again[name]))


def test_weights_beside_others() -> None:
    """Those of another source stand beside the flow's own, or beside those that it is compiled with."""
    vector = np.full(HIDDEN, 0.5, "f4")
    flow = adding().assemble().add_weights({"steering": vector})
    for model in (rlx.compile(flow), rlx.compile(flow, LLAMA)):
        np.testing.assert_array_equal(np.asarray(model.weights()["steering"]), vector)
    with pytest.raises(errors.WeightError, match=r"have already: 'model\.norm\.weight'"):
        rlx.compile(flow.add_weights({"model.norm.weight": vector}))
    with pytest.raises(errors.UnexpectedWeightError, match="other"):
        rlx.compile(flow.add_weights({"other": vector}))


def two_inits() -> rlx.ModelFlow:
    """One weight that two stages draw in two ways."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 8))
    return flow.linear("w", shape=(8, 8), init="zeros").linear("w", shape=(8, 8), init="ones")


MISUSE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no key": (lambda: rlx.compile(adding(), missing="init"), errors.RequestError, "give both, or neither"),
    "no missing": (lambda: rlx.compile(adding(), key=0), errors.RequestError, "give both, or neither"),
    "a word": (
        lambda: rlx.compile(adding(), missing="draw", key=0),  # type: ignore[arg-type]
        errors.RequestError,
        "'draw'; expected 'error' or",
    ),
    "no shape": (
        lambda: rlx.compile(adding(shape=None), missing="init", key=0),
        errors.MissingWeightError,
        "say its shape=",
    ),
    "no init": (lambda: drawn("zeross"), errors.GraphError, r"new: .*did you mean 'zeros'"),
    "a number": (lambda: drawn(3), errors.GraphError, "init is 3; expected"),
    "a shape": (
        lambda: drawn(lambda *_: np.zeros(2)),
        errors.WeightShapeError,
        r"'new': its init made \[2\]; expected \[9, 6\]",
    ),
    "two inits": (
        lambda: rlx.compile(two_inits(), missing="init", key=0),
        errors.GraphError,
        "'zeros' elsewhere and 'ones' here",
    ),
    "a module": (
        lambda: rlx.compile(rlx.GraphModule.define("m", lambda m: m.relu(m.input("x", (2,)))), missing="init", key=0),
        errors.GraphError,
        "for a ModelFlow or a recipe",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_told(case: str) -> None:
    call, error, message = MISUSE[case]
    with pytest.raises(error, match=message):
        call()
