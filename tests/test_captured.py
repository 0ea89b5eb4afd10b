"""What functions in `emit.jax` capture is read when the flow is built: a change afterwards is an error, no number."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import GraphError

TABLE = np.full(3, 2.0, np.float32)
SCALE = 2.0
ONES = np.ones((2, 3), np.float32)
CHANGED = r"^\w+: jax\(.*captures.* has changed since the model was built.*emit\.param"


def model_of(fn: Callable[..., Any], **options: Any) -> Any:
    """A compiled flow of one function."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).custom(lambda e, x: e.jax(fn, x))
    return rlx.compile(flow, **options)


def first(model: Any, rows: int) -> float:
    """The first number that a model makes of ones; every number of rows is a trace of its own."""
    return float(np.asarray(model(np.ones((rows, 3), np.float32)))[0, 0])


class Scaler:
    """An object with an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __call__(self, t: Any) -> Any:
        return t * self.array[None]


def by(c: Any) -> Callable[[Any], Any]:
    return lambda t: t * c[None]


CAPTURES: dict[str, Callable[[np.ndarray], Any]] = {
    "a closure": by,
    "a partial": lambda c: functools.partial(lambda c, t: t * c[None], c),
    "a dict in a tuple": lambda c: (lambda held: lambda t: t * held[0]["c"][None])(({"c": c},)),
    "computed while tracing": lambda c: lambda t: t * np.square(np.sqrt(c))[None],
    "a jitted function": lambda c: jax.jit(by(c)),
    "a function in a jitted one": lambda c: (lambda fn: lambda t: fn(t))(jax.jit(by(c))),
    "an object": Scaler,
    "a loop": lambda c: lambda t: jax.lax.fori_loop(0, 1, lambda _, a: a * c[None], t),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_an_array_changed_in_place_is_an_error_of_the_next_trace(name: str) -> None:
    """What is compiled answers as before; another model sees what is there now."""
    c = np.full(3, 2.0, np.float32)
    model = model_of(CAPTURES[name](c))
    assert first(model, 1) == pytest.approx(2.0)
    c[:] = 9.0
    assert first(model, 1) == pytest.approx(2.0)
    with pytest.raises(GraphError, match=CHANGED):
        first(model, 2)
    assert first(model_of(CAPTURES[name](c)), 2) == pytest.approx(9.0)


def test_a_variable_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global or a variable of the function around: the message names it."""
    model = model_of(lambda t: t * TABLE[None] * SCALE)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    with pytest.raises(GraphError, match=r"it reads SCALE, TABLE"):
        first(model, 1)
    s = 1.0
    model = model_of(lambda t: t * s)
    s = 7.0
    with pytest.raises(GraphError, match=CHANGED):
        first(model, 1)


def test_a_template_for_other_optional_inputs() -> None:
    """It is built when such a call comes, and compared with what the model saw first."""
    c = np.full(3, 2.0, np.float32)

    def stage(emit: Any, x: Any) -> Any:
        y = emit.optional_input("y")
        x = emit.jax(lambda t: t * c[None], x)
        return x if y is None else x + y

    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).input("y", ("batch", 3), default=None).custom(stage)
    model: Any = rlx.compile(flow)
    assert np.asarray(model(ONES))[0, 0] == 2.0 and np.asarray(model(ONES, y=ONES))[0, 0] == 3.0
    model = rlx.compile(flow)
    c[:] = 9.0
    with pytest.raises(GraphError, match=CHANGED):
        model(ONES, y=ONES)
    fresh: Any = rlx.compile(flow)
    assert np.asarray(fresh(ONES, y=ONES))[0, 0] == 10.0


def test_a_step_along_the_tokens() -> None:
    """Its constants are the user's arrays."""
    c = np.full(3, 2.0, np.float32)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 3))
    flow = flow.custom(lambda e, x: e.recurrent(lambda h, x: (h + x, h * c), x, init=np.ones(3, np.float32)))
    model: Any = rlx.compile(flow)
    assert np.asarray(model(np.ones((1, 2, 3), np.float32)))[0, 0, 0] == 2.0
    c[:] = 9.0
    with pytest.raises(GraphError, match="has changed since the model was built"):
        model(np.ones((1, 4, 3), np.float32))
