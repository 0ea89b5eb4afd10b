"""Steps of a user's own along the tokens: the same numbers in every program, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import GraphError, RlxError, ShapeError
from tests.test_derive import EMBEDDING, TOKENS, H, V, assert_generates, compiled, head, tokens_flow, w

D = 3
START = np.linspace(-0.5, 0.5, H).astype(np.float32)
WEIGHTS = EMBEDDING | {
    "rnn.x": w(H, H), "rnn.h": w(H, H, seed=1), "fast.k": w(D, H), "fast.v": w(D, H, seed=1), "fast.q": w(D, H, seed=2),
    "fast.o": w(H, D), "fast.decay": w(D), "fast.start": w(D, D, seed=4), "mean.x": w(H, H, seed=3),
}  # fmt: skip

# -- three stages, and what they mean ------------------------------------------------------------


def rnn_step(h: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """Elman's cell."""
    h = jnp.tanh(x + h @ weight)
    return h, h


def rnn(emit: Any, x: Any) -> Any:
    """A start that is an array; a parameter that is a key."""
    return x + emit.recurrent(rnn_step, emit.linear(x, "rnn.x"), "rnn.h", init=START)


def fast_step(state: Any, x: Any, decay: Any) -> tuple[Any, Any]:
    """Fast weights: a matrix that forgets, and how many tokens it has seen."""
    k, v, q = x
    matrix = jax.nn.sigmoid(decay)[:, None] * state["matrix"] + k[:, None] * v[None, :]
    seen = state["seen"] + 1
    return {"matrix": matrix, "seen": seen}, (q @ matrix / jnp.sqrt(seen.astype(jnp.float32)), seen)


def fast(emit: Any, x: Any) -> Any:
    """A start that is learned, a whole number in the state, a tuple in and a tuple out."""
    k, v, q = (emit.linear(x, f"fast.{name}") for name in "kvq")
    init = {"matrix": emit.param("fast.start"), "seen": 0}
    y, seen = emit.recurrent(fast_step, (k, v, q), emit.param("fast.decay"), init=init)
    return x + emit.linear(y, "fast.o") * emit.cast(seen, "f32").reshape(*seen.shape, 1)


def mean_step(total: Any, x: Any) -> tuple[Any, Any]:
    """A mean that forgets."""
    total = 0.9 * total + x
    return total, 0.1 * total


def mean(emit: Any, x: Any) -> Any:
    """From zeros, without parameters."""
    return emit.recurrent(mean_step, emit.linear(x, "mean.x"), init=np.zeros(H, np.float32)) + x


STAGES: dict[str, Callable[..., Any]] = {"rnn": rnn, "fast": fast, "mean": mean}


def meaning(tokens: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The logits, token after token in float64."""
    p = {key: value.astype(np.float64) for key, value in WEIGHTS.items()}
    logits = []
    for row in tokens:
        h, matrix, seen, total = START.astype(np.float64), p["fast.start"], 0, np.zeros(H)
        for token in row:
            x = p["e"][token]
            for name in names:
                if name == "rnn":
                    h = np.tanh(p["rnn.x"] @ x + h @ p["rnn.h"])
                    x = x + h
                elif name == "fast":
                    k, v, q = (p[f"fast.{n}"] @ x for n in "kvq")
                    matrix = (1 / (1 + np.exp(-p["fast.decay"])))[:, None] * matrix + np.outer(k, v)
                    seen += 1
                    x = x + p["fast.o"] @ (q @ matrix / np.sqrt(seen)) * seen
                else:
                    total = 0.9 * total + p["mean.x"] @ x
                    x = x + 0.1 * total
            logits.append(p["e"] @ x)
    return np.reshape(logits, (*tokens.shape, V))


def flow_of(*names: str) -> rlx.ModelFlow:
    """These stages between an embedding and its head."""
    flow = tokens_flow()
    for name in names:
        flow = flow.custom_named(name, STAGES[name])
    return head(flow)


def weights_of(*names: str) -> dict[str, np.ndarray]:
    """Theirs."""
    return {key: value for key, value in WEIGHTS.items() if key == "e" or key.partition(".")[0] in names}


def close(got: Any, want: np.ndarray, tolerance: float = 3e-5) -> None:
    """To so many parts of the largest entry."""
    assert np.abs(np.asarray(got) - want).max() <= tolerance * np.abs(want).max()


ALL = ("rnn", "fast", "mean")


def test_forward_is_a_loop_over_tokens() -> None:
    close(compiled(flow_of(*ALL), WEIGHTS)(TOKENS), meaning(TOKENS, ALL))


def test_prefill_and_extend_are_forward() -> None:
    """Ragged prompts, chunks, and rows that get nothing; leaves by block path and name, f32 or whole numbers."""
    state = assert_generates(flow_of(*ALL), WEIGHTS)
    found = {key: (str(a.dtype), a.shape[1:]) for key, a in state.leaves.items()}
    assert found == {
        "rnn.state": ("float32", (H,)), "fast.matrix": ("float32", (D, D)), "fast.seen": ("int32", ()),
        "mean.state": ("float32", (H,)),
    }  # fmt: skip
    np.testing.assert_array_equal(state.leaves["fast.seen"], state.length)


def test_it_generates() -> None:
    """The likeliest token each time, alone as in a batch."""
    lm = rlx.CausalLM(flow_of("rnn", "fast"), weights_of("rnn", "fast"))
    prompts = [[3, 1, 4, 1], [5], [9, 2, 6]]
    got = lm.generate(prompts, max_new_tokens=5)
    for prompt, new in zip(prompts, got, strict=True):
        row = list(prompt)
        for _ in range(5):
            row.append(int(meaning(np.array([row]), ("rnn", "fast"))[0, -1].argmax()))
        assert new == row[len(prompt) :]
    assert lm.generate(prompts[1], max_new_tokens=5) == got[1]


# -- refusals ------------------------------------------------------------------------------------


def refused(call: Callable[..., Any], match: str, kind: type[RlxError] = GraphError) -> None:
    """A stage that is refused when its flow is built, with its path."""
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).custom_named("mine", call)
    with pytest.raises(kind, match=f"^mine: .*{match}"):
        flow.build({"w": w(H, H)})


def counter() -> Callable[..., Any]:
    """A step that counts how often it is traced."""
    calls: list[int] = []

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        calls.append(1)
        return h + x * len(calls), x

    return step


def printing(h: Any, x: Any) -> tuple[Any, Any]:
    jax.debug.print("{}", x)
    return h, x


def asking(h: Any, x: Any) -> tuple[Any, Any]:
    return h, jax.jit(lambda x: jax.pure_callback(lambda x: x, x, x))(x)


LEAKED: list[Any] = []


def leak(x: Any) -> Any:
    LEAKED.append(x)
    return x


jax.jit(leak)(1.0)
ZEROS = np.zeros(H, np.float32)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "narrower": (lambda h, x: (h.astype(jnp.bfloat16), x), "state leaf state enters a step as f32.8. and leaves it as"),
    "longer": (lambda h, x: (jnp.concatenate([h, h]), x), r"state leaf state enters a step as f32.8. .* as f32.16."),
    "another form": (lambda h, x: ((h, h), x), "the state enters a step as"),
    "no pair": (lambda h, x: h, r"the step returns \(state, y_t\)"),
    "no y": (lambda h, x: (h, None), "gives no y"),
    "counts its traces": (counter(), "another function each time"),
    "random": (lambda h, x: (h + np.random.normal(), x), "another function each time"),
    "prints": (printing, "effects"),
    "calls Python": (asking, "effects.*pure_callback"),
    "reads another trace": (lambda h, x: (h + LEAKED[0], x), "another trace"),
    "no function": (7, "takes a function"),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_are_refused(name: str) -> None:
    """By the path of the stage and the leaf of the state."""
    step, match = REFUSED[name]
    refused(lambda emit, x: emit.recurrent(step, x, init=ZEROS), match)


def test_operands_that_are_refused() -> None:
    refused(lambda emit, x: emit.recurrent(rnn_step, x, x, init=ZEROS), r"parameter 0 is f32.batch,seq,8.", ShapeError)
    refused(lambda emit, x: emit.recurrent(mean_step, emit.param("w")[0], init=ZEROS), r"x is \[B, S", ShapeError)
    refused(lambda emit, x: emit.recurrent(mean_step, (x, emit.param("w")), init=ZEROS), r"x is \[B, S", ShapeError)
    refused(lambda emit, x: emit.recurrent(mean_step, x, init=()), "init has no arrays")
    refused(lambda emit, x: emit.recurrent(mean_step, x, init=np.zeros((513, 512), "f4")), "init leaf state.*limit")
    refused(lambda emit, x: emit.recurrent(mean_step, x, init=ZEROS, unroll=0), "unroll")
    refused(lambda emit, x: emit.recurrent(mean_step, x, init=x[:, 0]), "init leaf state", ShapeError)
    big = np.zeros((513, 512), np.float32)
    refused(
        lambda emit, x: emit.recurrent(lambda h, x: (h, x + (x[0] * big).sum()), x, init=ZEROS), "captures .* bytes"
    )
