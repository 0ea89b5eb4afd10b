"""Recurrences over many tokens: the forms that a plan takes and the stage `GdnScan`, against the transcript."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.blocks import GdnScan
from rlx_jax.device import DEVICES
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.recurrent import choose, invert_unit_lower
from tests.oracles.comparing import assert_close
from tests.oracles.gated_delta import gated_delta
from tests.oracles.mamba2 import ssd

FORMS = ("chunks_at_once", "chunk_by_chunk")
Sizes = tuple[int, ...]


def unit(x: np.ndarray) -> np.ndarray:
    """Rows of length 1."""
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def delta_case(sizes: Sizes, seed: int = 0, alike: float = 0.0, erases: bool = False) -> list[np.ndarray]:
    """Operands for B, S, key heads, K, value heads, V.

    `alike`: how near all keys are to one, with β 1 and no decay. `erases`: two tokens have a decay of 0.
    """
    batch, tokens, groups, keys, heads, width = sizes
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, tokens, groups, keys))
    k = alike * k[:, :1] + (1 - alike) * k
    g = -np.exp(2 * rng.normal(size=(batch, tokens, heads)) - 2) * (1 - alike)
    beta = np.maximum(1 / (1 + np.exp(-2 * rng.normal(size=g.shape))), alike)
    if erases:
        g[:, 5], g[:, 8] = -1e8, -np.inf
    state = rng.normal(size=(batch, heads, keys, width))
    return [unit(q), unit(k), rng.normal(size=(batch, tokens, heads, width)), g, beta, state]


def scan_case(sizes: Sizes, seed: int = 0, step: float | None = None) -> list[np.ndarray]:
    """Operands for B, S, H, P, G, N; `step` is the one of a token, if it is no random one."""
    batch, tokens, heads, width, groups, size = sizes
    rng = np.random.default_rng(seed)
    dt, a = np.exp(rng.normal(size=(batch, tokens, heads)) - 2), -np.exp(rng.normal(size=heads))
    dt[:, 5:6] = dt[:, 5:6] if step is None else step
    b, c = rng.normal(size=(2, batch, tokens, groups, size))
    return [rng.normal(size=(batch, tokens, heads, width)), dt, a, b, c, rng.normal(size=(batch, heads, width, size))]


def distance(got: Any, want: np.ndarray) -> float:
    """The largest difference, as a part of the largest number."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


CASES: dict[str, tuple[Any, list[np.ndarray]]] = {
    "fewer tokens than a chunk": (GatedDeltaOp(from_state=True), delta_case((2, 13, 1, 8, 3, 6))),
    "a part of a chunk is left": (GatedDeltaOp(0.7, from_state=True), delta_case((2, 131, 2, 5, 4, 7))),
    "keys that are nearly one": (GatedDeltaOp(from_state=True), delta_case((1, 150, 2, 16, 2, 6), alike=0.95)),
    "tokens that erase the state": (GatedDeltaOp(from_state=True), delta_case((1, 70, 1, 4, 2, 3), erases=True)),
    "a scan after a long step": (SelectiveScanOp(), scan_case((1, 70, 2, 3, 2, 4), step=1e6)[:5]),
    "from zeros": (GatedDeltaOp(), delta_case((1, 70, 1, 4, 2, 3))[:5]),
    "a scan over three chunks": (SelectiveScanOp(from_state=True), scan_case((2, 131, 4, 3, 1, 7))),
    "a scan from zeros": (SelectiveScanOp(), scan_case((1, 70, 2, 3, 2, 4))[:5]),
}  # fmt: skip


def transcript(op: Any, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same in float64, one token at a time."""
    if isinstance(op, GatedDeltaOp):
        q, k, v, g, beta, *held = arrays
        return gated_delta(q, k, v, g, beta, held[0] if held else None, op.scale)
    x, dt, a, b, c, *start = arrays
    return ssd(x, dt, a, b, c, None, start[0] if start else None)


@pytest.mark.parametrize(("case", "form"), [*((case, FORMS[0]) for case in CASES),
    *((case, FORMS[1]) for case in ("a part of a chunk is left", "a scan over three chunks")),
])  # fmt: skip
def test_chunks_are_the_recurrence(case: str, form: str) -> None:
    op, arrays = CASES[case]
    got = jax.jit(lambda *a: IMPLEMENTATIONS[form](op, *a))(*(np.float32(a) for a in arrays))
    for result, want in zip(got, transcript(op, arrays), strict=True):
        assert distance(result, want) <= 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("case", ["from zeros", "a scan from zeros"])
def test_earlier_tokens_do_not_depend_on_later_ones(case: str, bad: float) -> None:
    """NaN or infinity of what token 67 writes: no token before it has one, all later ones and the state do."""
    op, arrays = CASES[case]
    want = transcript(op, arrays)[0][:, :67]
    runs = [jax.jit(functools.partial(IMPLEMENTATIONS[form], op)) for form in FORMS]
    for operand, run in itertools.product((1, 2, 4) if isinstance(op, GatedDeltaOp) else (0, 1, 3), runs):
        changed = [a.astype(np.float32) for a in arrays]
        changed[operand][0, 67, 0] = bad
        out, state = run(*changed)
        assert distance(out[:, :67], want) <= 1e-5
        assert not np.isfinite(out[:, 67:, 0]).any() and not np.isfinite(state[:, 0]).all()


@pytest.mark.parametrize(("case", "form"), [("from zeros", FORMS[0]), ("a scan from zeros", FORMS[1])])
def test_chunks_in_bfloat16(case: str, form: str) -> None:
    """Operands of 16 bits beside f32 gates: near the transcript of the same numbers, as far as they are rounded."""
    op, arrays = CASES[case]
    gates = (3, 4) if isinstance(op, GatedDeltaOp) else (1, 2)
    given = [jnp.asarray(a, jnp.float32 if i in gates else jnp.bfloat16) for i, a in enumerate(arrays)]
    out, state = jax.jit(lambda *a: IMPLEMENTATIONS[form](op, *a))(*given)
    want = transcript(op, [np.asarray(a, np.float64) for a in given])
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert distance(out, want[0]) <= 2e-2 and distance(state, want[1]) <= 2e-2


@pytest.mark.parametrize(
    "op", [GatedDeltaOp(from_state=True, every=True), SelectiveScanOp(from_state=True, every=True)]
)
def test_one_token_needs_no_loop(op: Any) -> None:
    """The step alone is what a loop over one token gives, and there is no loop in it."""
    case = delta_case((3, 1, 2, 5, 4, 7)) if isinstance(op, GatedDeltaOp) else scan_case((3, 1, 4, 6, 2, 5))
    arrays = [np.float32(a) for a in case]
    step = jax.jit(lambda *a: IMPLEMENTATIONS["one_token"](op, *a))
    for got, want in zip(step(*arrays), op.eval(*map(jnp.asarray, arrays)), strict=True):
        assert distance(got, np.asarray(want, np.float64)) <= 1e-6
    assert "while" not in step.lower(*arrays).as_text()


CHOICES = {
    "one token": ((2, 1, 1, 8, 2, 8), {}, "cpu", "one_token"), "a few tokens": ((2, 5, 1, 8, 2, 8), {}, "h100", None),
    "many on a GPU": ((2, 64, 1, 8, 2, 8), {}, "h100", "chunks_at_once"),
    "many on a CPU": ((2, 64, 1, 8, 2, 8), {}, "cpu", "chunk_by_chunk"),
    "every state is asked for": ((2, 64, 1, 8, 2, 8), {"every": True}, "h100", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_the_form_follows_from_the_tokens_and_the_device(case: str) -> None:
    sizes, options, device, want = CHOICES[case]
    types = tuple(TensorType(a.shape, np.dtype(np.float32)) for a in delta_case(sizes)[:5])
    found = choose((GatedDeltaOp(**options), types), DEVICES[device])
    assert (None if found is None else found.implementation) == want


def test_a_triangular_system_of_equal_keys_is_solved() -> None:
    """Powers of such a matrix would grow to 10¹⁸ and cancel."""
    a = np.tril(np.ones((64, 64)), -1)
    want = np.linalg.inv(np.eye(64) + a)
    assert distance(jax.jit(invert_unit_lower)(np.float32(a)), want) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_chunks_have_the_gradient_of_the_recurrence(form: str) -> None:
    """Of every operand, along a random direction, against central differences of the transcript in float64."""
    for case in ("a part of a chunk is left", "a scan over three chunks"):
        op, arrays = CASES[case]
        arrays = [a[:, :70] if a.ndim > 2 and a.shape[1] == 131 else a for a in arrays]
        rng = np.random.default_rng(3)
        steps = [rng.normal(size=a.shape) * (0.1 if a is arrays[3] or a is arrays[1] else 1) for a in arrays]
        weights = [rng.normal(size=r.shape) for r in transcript(op, arrays)]

        def value(h: float, op: Any = op, arrays: Any = arrays, steps: Any = steps, weights: Any = weights) -> float:
            moved = [a + h * s for a, s in zip(arrays, steps, strict=True)]
            return sum(float((r * w).sum()) for r, w in zip(transcript(op, moved), weights, strict=True))

        def loss(*given: Any, op: Any = op, weights: Any = weights) -> Any:
            results = IMPLEMENTATIONS[form](op, *given)
            return sum((r * np.float32(w)).sum() for r, w in zip(results, weights, strict=True))

        gradients = jax.jit(jax.grad(loss, tuple(range(6))))(*(np.float32(a) for a in arrays))
        terms = [np.asarray(g, np.float64) * s for g, s in zip(gradients, steps, strict=True)]
        got, size = sum(t.sum() for t in terms), sum(np.abs(t).sum() for t in terms)
        assert abs(got - (value(1e-5) - value(-1e-5)) / 2e-5) <= 2e-5 * size


HEADS, N, S = 2, 3, 5
SHAPES = {"q": (HEADS, N), "k": (HEADS, N), "v": (HEADS, N), "g": (HEADS,), "beta": (HEADS,)}


def arrays() -> dict[str, np.ndarray]:
    """Inputs `[2, S, …]` and a state."""
    rng = np.random.default_rng(4)
    found = {name: rng.normal(size=(2, S, *shape)) for name, shape in SHAPES.items()}
    found["g"] = -np.abs(found["g"])
    return found | {"state": rng.normal(size=(2, HEADS, N, N))}


def register(emit: Any, value: Any) -> Any:
    """The inputs, and the state where the flow has one."""
    emit.set_gdn(*(emit.flow_input(name) for name in SHAPES))
    if "state_in" in emit.state.inputs:
        emit.set_named("layer0.state", emit.flow_input("state_in"))
    return value


def flow(*stages: Any, before: Callable[..., Any] = register, state: bool = False) -> Any:
    """A flow over the inputs."""
    made = rlx.ModelFlow("gdn")
    for name, shape in SHAPES.items():
        made = made.input(name, ("batch", "seq", *shape))
    if state:
        made = made.input("state_in", ("batch", HEADS, N, N))
    return made.custom(before).stage(*stages)


def given(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Arrays as f32, by input."""
    found = arrays() | {"state_in": arrays()["state"]}
    return {name: found[name].astype(np.float32) for name in names}


def transcript_of(a: dict[str, np.ndarray], state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Results and the state after, token by token."""
    return gated_delta(a["q"], a["k"], a["v"], a["g"], a["beta"], state)


def test_from_zeros() -> None:
    model: Any = rlx.compile(flow().gdn_scan(GdnScan.prefill(N, ("batch", "seq", HEADS, N))))
    assert_close(model(**given(tuple(SHAPES))), transcript_of(arrays(), None)[0])


def test_the_state_goes_from_stage_to_stage() -> None:
    """What the second scan gives is what it gives behind the first; the state is there under its key, and as output."""
    scan = GdnScan.prefill(N).with_carry("layer0.state")
    model: Any = rlx.compile(flow(scan, scan, state=True).with_extra_outputs(["layer0.state"]))
    got, found = model(**given((*SHAPES, "state_in"))), arrays()
    twice = transcript_of(found, transcript_of(found, found["state"])[1])
    assert_close(got["output"], twice[0])
    assert_close(got["layer0.state"], twice[1])
