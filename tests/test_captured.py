"""What functions in `emit.jax` capture is copied when the flow is built: nothing changes a compiled model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import GraphError
from rlx_jax.ir.captured import MAX_CAPTURED, Captured

TABLE = np.full(3, 2.0, np.float32)
SCALE = 2.0


def model_of(fn: Callable[..., Any], **options: Any) -> Any:
    """A compiled flow of one function."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).custom(lambda e, x: e.jax(fn, x))
    return rlx.compile(flow, **options)


def answers(model: Any) -> list[float]:
    """What it makes of ones, by size: every size is a trace of its own."""
    return [float(np.asarray(model(np.ones((n, 3), np.float32)))[0, 0]) for n in (1, 2, 3)]


class Scaler:
    """An object with an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __call__(self, t: Any) -> Any:
        return t * self.array[None]

    def method(self, t: Any) -> Any:
        return t * self.array[None]


def by(c: Any) -> Callable[[Any], Any]:
    return lambda t: t * c[None]


def by_jvp(c: Any) -> Any:
    fn = jax.custom_jvp(by(c))
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * c[None]))
    return fn


def calling(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda t: fn(t)


CAPTURES: dict[str, Callable[[np.ndarray], Any]] = {
    "a closure": by,
    "a default": lambda c: lambda t, c=c: t * c[None],
    "a keyword default": lambda c: lambda t, *, c=c: t * c[None],
    "a partial": lambda c: functools.partial(lambda c, t: t * c[None], c),
    "a view": lambda c: by(c[:]),
    "a list": lambda c: (lambda held: lambda t: t * held[0][None])([c]),
    "a dict in a tuple": lambda c: (lambda held: lambda t: t * held[0]["c"][None])(({"c": c},)),
    "computed while tracing": lambda c: lambda t: t * np.square(np.sqrt(c))[None],
    "a number while tracing": lambda c: lambda t: t * float(c[0]),
    "a function in a function": lambda c: calling(calling(by(c))),
    "a jitted function": lambda c: jax.jit(by(c)),
    "a function in a jitted one": lambda c: jax.jit(calling(by(c))),
    "a recomputed function": lambda c: jax.checkpoint(by(c)),
    "a mapped function": lambda c: jax.vmap(lambda row: row * c),
    "a derivative of its own": by_jvp,
    "an object": Scaler,
    "a method": lambda c: Scaler(c).method,
    "a loop": lambda c: lambda t: jax.lax.fori_loop(0, 1, lambda _, a: a * c[None], t),
    "jnp.asarray": lambda c: lambda t: t * jnp.asarray(c)[None],
}


@pytest.mark.parametrize("name", CAPTURES)
def test_an_array_changed_in_place_changes_nothing(name: str) -> None:
    """However the function comes by it: the model answers as it was built, at every size."""
    c = np.full(3, 2.0, np.float32)
    model = model_of(CAPTURES[name](c))
    first = float(np.asarray(model(np.ones((1, 3), np.float32)))[0, 0])
    c[:] = 9.0
    assert [first, *answers(model)] == pytest.approx([2.0] * 4)
    assert c[0] == 9.0 and c.flags.writeable
    assert answers(model_of(CAPTURES[name](c))) == pytest.approx([9.0] * 3)  # another model sees what is there now


def test_a_global_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed in place, or bound to another; and a number, too."""
    model = model_of(lambda t: t * TABLE[None] * SCALE)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    TABLE[:] = 9.0
    try:
        assert answers(model) == [4.0] * 3
        monkeypatch.setitem(globals(), "TABLE", np.zeros(3, np.float32))
        assert answers(model) == [4.0] * 3
    finally:
        monkeypatch.undo()
        TABLE[:] = 2.0


def test_a_variable_bound_anew() -> None:
    """A closure sees the variable as it was when the flow was built."""
    c, s = np.full(3, 2.0, np.float32), 1.0

    def fn(t: Any) -> Any:
        return t * c[None] * s

    model = model_of(fn)
    c, s = np.zeros(3, np.float32), 7.0
    assert answers(model) == [2.0] * 3


def test_a_buffer_that_is_filled_again() -> None:
    """Each use has what stood in it then, in every program of the model."""
    buffer = np.zeros(3, np.float32)

    def stage(emit: Any, x: Any) -> Any:
        for i in (1, 2, 3):
            buffer[:] = i
            x = emit.jax(lambda t: t * buffer[None], x)
        return x

    assert answers(rlx.compile(rlx.ModelFlow("m").input("x", ("batch", 3)).custom(stage))) == [6.0] * 3


def test_a_template_for_other_optional_inputs() -> None:
    """It is built when such a call comes, over the arrays as the model first saw them."""
    c = np.full(3, 2.0, np.float32)

    def stage(emit: Any, x: Any) -> Any:
        y = emit.optional_input("y")
        x = emit.jax(lambda t: t * c[None], x)
        return x if y is None else x + y

    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).input("y", ("batch", 3), default=None).custom(stage)
    model: Any = rlx.compile(flow)
    built = flow.build()
    ones = np.ones((2, 3), np.float32)
    assert np.asarray(model(ones))[0, 0] == 2.0
    c[:] = 9.0
    assert np.asarray(model(ones, y=ones))[0, 0] == 3.0
    later: Any = rlx.compile(built)
    assert np.asarray(later(ones, y=ones))[0, 0] == 3.0
    fresh: Any = rlx.compile(flow)
    assert np.asarray(fresh(ones, y=ones))[0, 0] == 10.0


@pytest.mark.parametrize("program", ["forward", "train", "prefill", "extend"])
def test_every_program(program: str) -> None:
    """Those that are derived later, too."""
    c = np.full(3, 2.0, np.float32)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 3)).custom(lambda e, x: e.jax(lambda t: t * c[None, None], x))
    model: Any = rlx.compile(flow, program=program)
    c[:] = 9.0
    x = np.ones((1, 2, 3), np.float32)
    if program in ("forward", "train"):
        out = model(x)
    else:
        out, _ = model(x, lengths=np.full(1, 2, np.int32), state=model.init_state(1))
    assert np.asarray(out)[0, 0, 0] == 2.0


def test_functions_without_arrays_stay_themselves() -> None:
    """So that equal functions are equal ops, and what a function counts is counted."""
    calls = 0

    def counting(t: Any) -> Any:
        nonlocal calls
        calls += 1
        return t

    captured = Captured()
    for fn in (
        jnp.sin,
        jax.nn.gelu,
        jax.jit(jnp.tanh),
        lambda t: t + 1,
        functools.partial(jnp.sum, axis=0),
        Scaler.method,
    ):
        assert captured.own(fn) is fn
    fn = by(np.ones(3, np.float32))
    assert captured.own(fn) is captured.own(fn) is not fn
    model_of(counting)
    assert calls


def test_a_large_array_is_refused_before_it_is_copied() -> None:
    """A table on the disk is not read to say that it is no constant."""
    endless = np.broadcast_to(np.float32(1), (2**40, 3))
    assert endless.nbytes > MAX_CAPTURED and Captured().own(endless) is endless
    large = np.ones((MAX_CAPTURED, 3), np.float32)
    with pytest.raises(GraphError, match="name the array as a weight"):
        model_of(lambda t: t * jnp.asarray(large).sum())


def test_a_function_cannot_change_its_copy() -> None:
    """It would answer by how often it was traced."""
    c = np.ones(3, np.float32)

    def fn(t: Any) -> Any:
        c[:] += 1
        return t * c[None]

    with pytest.raises(Exception, match="read-only"):
        model_of(fn)


class Holder:
    """An object that is no function."""

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclass(frozen=True)
class ScaleStage:
    """A stage of one's own with an array among its fields."""

    array: np.ndarray

    def emit(self, emit: Any, value: Any) -> Any:
        return emit.jax(lambda t: t * self.array[None], value)


def _edits() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """What holds numbers, as a function over it and the edit in place."""
    flat, nested, table = [2.0, 2.0, 2.0], [[2.0, 2.0, 2.0]], {"by": 2.0}
    inner = Holder(np.full(3, 2.0, np.float32))
    outer = Holder(inner)
    return {
        "a list": (lambda t: t * jnp.array(flat, jnp.float32)[None], lambda: flat.__setitem__(0, 9.0)),
        "a list in a list": (lambda t: t * jnp.array(nested, jnp.float32), lambda: nested[0].__setitem__(0, 9.0)),
        "a number in a dict": (lambda t: t * table["by"], lambda: table.__setitem__("by", 9.0)),
        "an attribute": (lambda t: t * inner.held[None], lambda: inner.held.fill(9.0)),
        "an attribute's attribute": (lambda t: t * outer.held.held[None], lambda: inner.held.fill(9.0)),
        "an attribute bound anew": (lambda t: t * inner.held[None], lambda: setattr(inner, "held", inner.held * 4)),
    }


@pytest.mark.parametrize("name", _edits())
def test_what_holds_numbers_is_copied(name: str) -> None:
    fn, edit = _edits()[name]
    model = model_of(fn)
    assert model(np.ones((4, 3), np.float32))[0, 0] == 2.0
    edit()
    assert answers(model) == [2.0, 2.0, 2.0]
    assert answers(model_of(fn)) != [2.0, 2.0, 2.0]


def test_the_fields_of_a_stage_are_copied() -> None:
    stage = ScaleStage(np.full(3, 2.0, np.float32))
    model = rlx.compile(rlx.ModelFlow("m").input("x", ("batch", 3)).stage(stage))
    stage.array[:] = 9.0
    assert answers(model) == [2.0, 2.0, 2.0]
