"""Choices, loops and gradients of one's own, and what functions in `emit.jax` capture: numbers, and what is refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlx_jax as rlx
from rlx_jax.errors import DeriveError, GraphError

RNG = np.random.default_rng(4)
X = RNG.standard_normal((3, 4)).astype(np.float32)
W = RNG.standard_normal((4, 4)).astype(np.float32) / 4
P = np.float32(0.5)


def program(m: Any, x: Any, p: Any, w: Any) -> dict[str, Any]:
    """One of each, by name; bodies read values and weights around them, and stand in each other."""
    y = m.mul(x, 2.0)
    count, halved = m.while_loop(
        lambda c: m.lt(c[0], 5), lambda c: (m.add(c[0], 1), m.mul(c[1], p)), (m.constant(0), x)
    )
    carry, (before, index) = m.scan(lambda c, v: (m.add(c, v), (c, m.argmax(v))), m.zeros(4), x)
    back, none = m.scan(lambda c, v: (m.add(m.mul(c, p), v), None), m.zeros(4), x, reverse=True)
    nested = m.cond(p, lambda v: m.cond(m.gt(p, 1), m.sin, lambda u: m.mul(u, y), v), lambda v: v, x)
    assert none is None
    return {
        "switch": m.switch(m.constant(7), [m.sin, m.cos, lambda v: m.add(v, y)], x),
        "cond": m.cond(m.gt(p, 0), lambda v: m.linear(v, w), lambda v: m.add(v, y), x),
        **{"nested": nested, "count": count, "halved": halved, "carry": carry, "before": before, "index": index},
        "back": back,
        "fori": m.fori_loop(1, 4, lambda i, v: m.add(m.mm(v, w), m.cast(i, "f32")), x),
        "pairs": m.fori_loop(0, 2, lambda i, c: {"a": c["b"], "b": m.mul(c["a"], p)}, {"a": x, "b": y})["a"],
        "rounded": m.custom_vjp(m.round, lambda v, out, g: m.mul(g, m.sub(v, out)), x),
        "stopped": m.mul(x, m.stop_gradient(x)),
    }


def reference(x: Any, p: Any, w: Any) -> dict[str, Any]:
    """The same in JAX."""

    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), x), lambda x, g: (g * (x - jnp.round(x)),))
    carry, (before, index) = lax.scan(lambda c, v: (c + v, (c, jnp.argmax(v))), jnp.zeros(4), x)
    return {
        "switch": x + 2 * x, "cond": jnp.where(p > 0, x @ w, 3 * x),
        **{"nested": x * 2 * x, "count": 5, "halved": x * p**5, "carry": carry, "before": before, "index": index},
        "back": lax.scan(lambda c, v: (c * p + v, None), jnp.zeros(4), x, reverse=True)[0],
        "fori": lax.fori_loop(1, 4, lambda i, v: v @ w + i.astype(jnp.float32), x), "pairs": x * p,
        "rounded": rounded(x), "stopped": x * lax.stop_gradient(x),
    }  # fmt: skip


def compiled(names: tuple[str, ...] = (), **options: Any) -> Any:
    m = rlx.Graph.hir("m")
    made = program(m, m.input("x", ("rows", 4)), m.input("p", ()), m.param("w", (4, 4)))
    chosen = names or tuple(made)
    m.set_outputs([made[n] for n in chosen], chosen)
    return rlx.compile(m, {"w": W}, **options)


def test_numbers_are_those_of_jax() -> None:
    """For another number of rows too: they are a symbol."""
    model = compiled()
    for x in (X, np.concatenate([X, -X])):
        want = reference(x, P, W)
        for name, got in model(x, P).items():
            np.testing.assert_allclose(got, want[name], atol=1e-5, err_msg=name)


def test_gradients_are_those_of_jax() -> None:
    """But of while_loop, which has none; those of weights that bodies read too."""
    names = ("switch", "cond", "nested", "carry", "before", "back", "fori", "pairs", "rounded", "stopped")
    model = compiled(names)

    def ours(params: Any, x: Any) -> Any:
        return sum((v * v).sum() for v in model.apply(params, x, P).values())

    def theirs(params: Any, x: Any) -> Any:
        made = reference(x, jnp.asarray(P), params["w"])
        return sum((made[n] * made[n]).sum() for n in names)

    got, want = (jax.jit(jax.grad(f, (0, 1)))({"w": jnp.asarray(W)}, jnp.asarray(X)) for f in (ours, theirs))
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=1e-4)


def test_one_branch_runs() -> None:
    """The program holds a conditional and a loop, not both branches and a choice."""
    text = compiled(("nested", "count")).lower(X, P).as_text()
    assert "stablehlo.case" in text and "stablehlo.while" in text


@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"mixed": "auto_mixed_bf16"}], ids=str)
def test_bodies_keep_their_dtypes(precision: Any) -> None:
    """A program in bf16 rounds what goes in; the bodies are those that were written."""
    profile = rlx.CompileProfile().replace(precision=precision)
    got, want = compiled(profile=profile)(X, P), reference(X, P, W)
    for name in set(got) - {"rounded"}:
        assert np.abs(np.asarray(got[name], np.float64) - np.asarray(want[name], np.float64)).max() < 0.1, name


def tokens(stage: Callable[..., Any]) -> rlx.ModelFlow:
    return rlx.ModelFlow("m").input("x", ("batch", "seq", 4)).custom(stage)


def test_what_treats_tokens_alone_is_derived() -> None:
    """A loop over each token's own features; one over the sequence mixes, and is refused by name."""
    model = rlx.compile(tokens(lambda e, x: e.fori_loop(0, 3, lambda i, v: e.sin(v), x)), program="extend")
    assert "scan(" in model.text("mir")

    def over_tokens(e: Any, x: Any) -> Any:
        return e.scan(lambda c, v: (c + v, c), e.zeros(("batch", 4)), e.swapaxes(x, 0, 1))[1].transpose(1, 0, 2)

    with pytest.raises(DeriveError, match=r"scan\(.*'seq'"):
        rlx.compile(tokens(over_tokens), program="extend").text("mir")


def test_a_value_of_a_body_stays_inside() -> None:
    kept: list[Any] = []

    def branch(m: Any) -> Callable[[Any], Any]:
        return lambda v: kept.append(m.sin(v)) or kept[-1]  # type: ignore[func-returns-value]

    m = rlx.Graph.hir("m")
    x = m.input("x", ("rows", 4))
    m.cond(m.any(x), branch(m), m.cos, x)
    with pytest.raises(GraphError, match="the body of switch"):
        m.add(kept[0], x)

    def stage(e: Any, x: Any) -> Any:
        e.cond(e.any(x), branch(e), e.cos, x)
        return kept[-1] + x

    with pytest.raises(GraphError, match="is used outside; return it from the body"):
        rlx.ModelFlow("m").input("x", ("rows", 4)).custom(stage).build()


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
