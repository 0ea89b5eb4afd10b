"""Keep masks of a flow's own in cached programs: what a token said of itself as a key, later calls know."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from tests.oracles.comparing import assert_close

RNG = np.random.default_rng(11)
HEADS, WIDTH, VOCAB = 2, 6, 13
WEIGHTS = {n: RNG.standard_normal((VOCAB if n == "e" else WIDTH, WIDTH)).astype(np.float32) for n in "eqkv"}
IDS = RNG.integers(0, VOCAB, (2, 9)).astype(np.int32)
GIVEN = np.array([[1, 0, 1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1, 0, 1, 1]])
PLACES = np.arange(9)


def own(emit: Any, x: Any) -> Any:
    """A key is read where a number of its token is large."""
    return x[:, :, 0] + 0.5


MASKS: dict[str, tuple[Any, Any]] = {
    "of tokens": (own, lambda x, row: x[:, 0] >= 0),
    "of positions": (lambda e, x: e.ne(e.positions(x), 1), lambda x, row: PLACES[: len(x)] != 1),
    "an input": (lambda e, x: e.flow_input("kept"), lambda x, row: GIVEN[row, : len(x)] == 1),
}  # fmt: skip


def flow(mask: Any, window: int | None = None, given: bool = False) -> rlx.ModelFlow:
    def stage(emit: Any, x: Any) -> Any:
        q, k, v = (emit.linear(x, n) for n in "qkv")
        return x + emit.attention(q, k, v, heads=HEADS, causal=True, window=window, mask=mask(emit, x))

    made = rlx.ModelFlow("masked").input("tokens", ("batch", "seq"), dtype="int32")
    made = made.input("kept", ("batch", "seq"), dtype="int32") if given else made
    return made.embed("e").custom(stage).linear("e").output("logits")


def alone(row: int, keeps: Any, window: int = 9) -> Any:
    """The logits of a row, in float64; a query without any key reads nothing."""
    x = WEIGHTS["e"][IDS[row]].astype(np.float64)
    apart = PLACES[:, None] - PLACES[None]
    keep = (apart >= 0) & (apart < window) & keeps(x, row)[None]
    q, k, v = ((x @ WEIGHTS[n].T).reshape(9, HEADS, -1) for n in "qkv")
    weights = np.exp(np.einsum("shd,thd->hst", q, k) / np.sqrt(q.shape[-1])) * keep
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return (x + np.einsum("hst,thd->shd", weights, v).reshape(9, -1)) @ WEIGHTS["e"].T


@pytest.mark.parametrize(("kind", "window"), [*((kind, None) for kind in MASKS), ("of tokens", 3)])
def test_prefill_and_extend_are_forward(kind: str, window: int | None) -> None:
    """For rows of several lengths, token by token too."""
    mask, keeps = MASKS[kind]
    given = kind == "an input"
    made = flow(mask, window, given)
    prefill, extend = (rlx.compile(made, WEIGHTS, program=p) for p in ("prefill", "extend"))
    want = [alone(row, keeps, window or 9) for row in (0, 1)]
    at, state = [0, 0], prefill.init_state(2, 10)
    for lengths, width in (((4, 2), 5), ((2, 3), 3), ((1, 0), 1), ((1, 1), 1)):
        ids, masks = np.full((2, width), 5, np.int32), np.ones((2, width), np.int32)
        for row, count in enumerate(lengths):
            ids[row, :count], masks[row, :count] = (a[row, at[row] : at[row] + count] for a in (IDS, GIVEN))
        more = {"kept": masks} if given else {}
        program = extend if any(at) else prefill
        out, state = program(ids, lengths=np.array(lengths, np.int32), state=state, **more)
        for row, count in enumerate(lengths):
            assert_close(np.asarray(out)[row, :count], want[row][at[row] : at[row] + count])
            at[row] += count
    assert state.arrays()["stage.keep"].dtype == bool
