"""Rows that are padded: no token reads padding, whatever a flow does with its mask, or rows are not padded."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import DeriveError, RequestError
from rlx_jax.ir.text import dump
from rlx_jax.runtime.program_key import ProgramKey
from tests.divided import mesh
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close

HEADS, WIDTH, VOCAB = 2, 6, 13
TABLE = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
LATENTS = np.random.default_rng(1).standard_normal((1, 3, WIDTH)).astype(np.float32)
TEXTS = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11, 12, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
Stage = Callable[[Any, Any], Any]


def attend(q: Any, k: Any, v: Any, keep: Any = None, bias: Any = 0.0) -> Any:
    """Attention of two heads over whole rows `[S, 6]`, in float64; `keep` and `bias` are `[S, T]` or `[T]`."""
    q, k, v = (np.asarray(x, np.float64).reshape(len(x), HEADS, -1) for x in (q, k, v))
    scores = np.einsum("shd,thd->hst", q, k) / np.sqrt(q.shape[-1]) + bias
    weights = np.exp(scores - scores.max()) * (1.0 if keep is None else keep)
    return np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


def placed(n: int) -> Any:
    """The distance of query and key."""
    return np.arange(n)[:, None] - np.arange(n)[None]


def read(emit: Any, x: Any, **options: Any) -> Any:
    return emit.attention(x, x, x, heads=HEADS, **options)


def latents(emit: Any, x: Any) -> Any:
    """Three vectors read the tokens, and the tokens read them: neither has as many queries as keys."""
    found = emit.broadcast_to(emit.param("latents"), (x.shape[0], 3, WIDTH))
    found = emit.attention(found, x, x, heads=HEADS)
    return emit.attention(x, found, found, heads=HEADS)


def decaying(emit: Any, x: Any) -> Any:
    """The sum of the tokens so far, each of which halves at the next."""

    def step(state: Any, x: Any) -> Any:
        state = 0.5 * state + x
        return state, state

    return emit.recurrent(step, x, init=np.zeros(WIDTH, np.float32))


ALONE: dict[str, tuple[Stage, Callable[[Any], Any]]] = {
    "no mask": (read, lambda x: attend(x, x, x)),
    "a window": (lambda emit, x: read(emit, x, window=2), lambda x: attend(x, x, x, abs(placed(len(x))) < 2)),
    "causal": (lambda emit, x: read(emit, x, causal=True), lambda x: attend(x, x, x, placed(len(x)) >= 0)),
    "a mask of its own": (lambda emit, x: read(emit, x, mask=emit.where(emit.positions(x) == 0, 1.0, x[:, :, 0] + 1.0)),
        lambda x: attend(x, x, x, (x[:, 0] > -0.5) | (np.arange(len(x)) == 0))),
    "a bias of keys": (lambda emit, x: read(emit, x, bias=x[:, :, 0][:, None, None]), lambda x:
        attend(x, x, x, bias=x[:, 0])),
    "a state": (decaying, lambda x: np.stack([0.5 ** np.arange(t, -1, -1) @ x[: t + 1] for t in range(len(x))])),
    "tokens before": (lambda emit, x: emit.causal_window(x, 3).sum(2), lambda x:
        np.stack([x[max(0, t - 2) : t + 1].sum(0) for t in range(len(x))])),
    "latents": (latents, lambda x: attend(x, *[attend(LATENTS[0], x, x)] * 2)),
}  # fmt: skip
"""Stages that leave the mask alone, and what they give of one text."""

MIXING: dict[str, tuple[Stage, Callable[[Any], Any], str]] = {
    "mean": (lambda emit, x: x - x.mean(1, keepdims=True), lambda x: x - x.mean(0), "reduces over 'seq'"),
    "jax": (lambda emit, x: emit.jax(lambda x: jnp.cumsum(x[:, ::-1], 1)[:, ::-1], x), lambda x:
        np.cumsum(x[::-1], 0)[::-1], "depends on the size"),
    "rows too": (lambda emit, x: x - x.mean(1, keepdims=True) * x.mean((0, 2), keepdims=True), lambda x:
        x - x.mean(0) * x.mean(1, keepdims=True), "reduces over 'seq'"),
}  # fmt: skip
"""Stages that mix tokens in ways of their own, what they give of one text, and what is said of them."""


def flow(stage: Stage, mask: bool = False) -> rlx.ModelFlow:
    """A table and a stage; `mask` declares an input that no stage reads."""
    made = rlx.ModelFlow("own").input("tokens", ("batch", "seq"), dtype="int32")
    if mask:
        made = made.input("attention_mask", ("batch", "seq"), dtype="int32", default=None)
    return made.embed("table").custom(stage)


def encoder(stage: Stage, mask: bool = False, **options: Any) -> rlx.Encoder:
    held = {"table": TABLE, "latents": LATENTS} if stage is latents else {"table": TABLE}
    return rlx.Encoder(flow(stage, mask), held, **options)


def buckets(**sizes: list[int]) -> Any:
    return rlx.CompileProfile().replace(buckets=sizes)


def block(texts: list[list[int]], width: int, padding: int = 5) -> Any:
    """Texts as rows with a token behind them that shows where it is read."""
    return np.array([text + [padding] * (width - len(text)) for text in texts], np.int32)


@pytest.mark.parametrize(("kind", "mask"), [*((kind, False) for kind in ALONE if kind != "no mask"), ("no mask", True)])
def test_padding_is_not_read(kind: str, mask: bool) -> None:
    """By the program, and so by rows that are padded to buckets or by the caller."""
    stage, alone = ALONE[kind]
    found = encoder(stage, mask, profile=buckets(prompt=[4, 9], batch=[4]))
    assert found.own_lengths == ""
    np.testing.assert_allclose(found.embed(TEXTS), [alone(TABLE[t]).mean(0) for t in TEXTS], atol=1e-5)
    hidden = found.hidden_states(block(TEXTS[:4], 7), lengths=[len(t) for t in TEXTS[:4]])
    for row, text in zip(np.asarray(hidden), TEXTS, strict=False):
        assert_close(row[: len(text)], alone(TABLE[text]))


@pytest.mark.parametrize("kind", ["mean", "jax", "rows too"])
def test_rows_at_their_own_lengths(kind: str) -> None:
    """What is not proved to leave padding alone sees none."""
    stage, alone, said = MIXING[kind]
    found = encoder(stage, mask=kind == "mean")
    want = [alone(TABLE[t].astype(np.float64)) for t in TEXTS]
    np.testing.assert_allclose(found.embed(TEXTS), [x.mean(0) for x in want], atol=1e-5)
    hidden = np.asarray(found.hidden_states(block(TEXTS, 8), lengths=[len(t) for t in TEXTS]))
    for row, text, x in zip(hidden, TEXTS, want, strict=True):
        np.testing.assert_allclose(row[: len(text)], x, atol=1e-5)
        assert not row[len(text) :].any()
    assert f"rows at their own lengths: {found.own_lengths}" in " ".join(str(found.report()).split())
    assert re.search(said, found.own_lengths)
    sizes = [dict(key.binding) for key in found.model.programs.executables]
    assert {size["seq"] for size in sizes} == {1, 2, 5, 7}
    assert {size["batch"] for size in sizes} == ({1} if kind == "rows too" else {1, 2})
    with pytest.raises(RequestError, match="each length of a text is a program of its own: "):
        found.warmup()


def test_buckets_are_refused_where_padding_may_be_read() -> None:
    for kind, sizes, said in (
        ("mean", {"prompt": [8]}, "leave out buckets.prompt"),
        ("rows too", {"batch": [4]}, r"reduce_mean.* is not proved to treat rows independently.*buckets.batch"),
    ):
        found = encoder(MIXING[kind][0], profile=buckets(**sizes))
        for call in (lambda f=found: f.embed(TEXTS), lambda f=found: f.hidden_states([[1, 2, 3]]), found.warmup):
            with pytest.raises(DeriveError, match=said):
                call()
    held = encoder(MIXING["mean"][0], profile=buckets(batch=[4]))  # rows are alone, so more of them do no harm
    want = [(x - x.mean(0)).mean(0) for x in (TABLE[t] for t in TEXTS)]
    np.testing.assert_allclose(held.embed(TEXTS), want, atol=1e-6)


def test_masks_with_holes() -> None:
    """A token that the mask leaves out is not read; rows that run at their own lengths have no such tokens."""
    keep = np.array([[1, 0, 1, 1, 0]])
    for declares in (False, True):
        found = encoder(read, declares).hidden_states([[1, 2, 3, 4, 5]], attention_mask=keep)
        x = TABLE[[1, 2, 3, 4, 5]]
        assert_close(np.asarray(found)[0], attend(x, x, x, keep[0]))
    mixing = encoder(MIXING["mean"][0])
    with pytest.raises(RequestError, match="row 0 .*own"):
        mixing.hidden_states([[1, 2, 3, 4, 5]], attention_mask=keep)
    with pytest.raises(RequestError, match="traced"):
        jax.jit(lambda m: mixing.hidden_states(np.ones((1, 5), np.int32), attention_mask=m))(jnp.asarray(keep))


@pytest.mark.parametrize("keep", [[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
def test_padding_in_front_of_what_carries_a_state(keep: list[int]) -> None:
    """It would be read, as any token before another is; padding behind the tokens is not."""
    found = encoder(decaying)
    for mask in (np.array([keep]), jnp.array([keep])):
        with pytest.raises(RequestError, match=r"row 0.*recurrent\(step\)"):
            found.hidden_states([[1, 2, 3, 4, 5]], attention_mask=mask)
    behind = found.hidden_states([[1, 2, 3, 4, 5]], attention_mask=[[1, 1, 1, 0, 0]])
    assert_close(np.asarray(behind)[0, :3], ALONE["a state"][1](TABLE[[1, 2, 3]]))


def test_gradients_go_through_rows_of_their_own_lengths() -> None:
    found = encoder(MIXING["mean"][0])

    def loss(params: Any) -> Any:
        made = rlx.Encoder(found.model.replace(params))
        return (made.hidden_states(block(TEXTS[:2], 6), lengths=[5, 1]) ** 2).sum()

    x = TABLE[TEXTS[0]].astype(np.float64)
    want = np.zeros_like(TABLE)
    want[TEXTS[0]] = 2 * (x - x.mean(0))  # the gradient of Σ(x − mean)²; a row of one token is 0
    (gradient,) = jax.jit(jax.grad(loss))(found.model.params).values()
    np.testing.assert_allclose(gradient, want, atol=1e-5)


def test_what_is_no_mask_over_tokens() -> None:
    made = rlx.ModelFlow("own").input("tokens", ("batch", "seq"), dtype="int32")
    made = made.input("attention_mask", ("batch", 1, 1, "seq"), dtype="int32", default=None).embed("table").custom(read)
    found = rlx.Encoder(made, {"table": TABLE})
    assert "is i32[batch,1,1,seq]; padded expects the token mask, [batch, seq]" in found.own_lengths
    hidden = found.hidden_states(block(TEXTS[:2], 6), lengths=[5, 1])
    assert_close(np.asarray(hidden)[0, :5], ALONE["no mask"][1](TABLE[TEXTS[0]]))


@pytest.mark.parametrize("end", [9, None])
def test_an_end_that_stands_in_padding(end: int | None) -> None:
    """Of a text, the end that is its own; without one it begins at the beginning."""
    made = flow(lambda emit, x: x, mask=True).stage(rlx.blocks.EndTokenPool(end, "tokens"))
    ids = np.array([[1, 9, 2, 9], [3, 4, 9, 9], [2, 1, 12, 11]], np.int32)
    keep = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    found = rlx.compile(made, {"table": TABLE}, program="padded")(ids, attention_mask=keep)
    np.testing.assert_array_equal(found, TABLE[[9, 3 if end else 4, 2]])


FAMILIES = ("bert/bare_v5", "roberta/bare_v5", "mpnet/bare_v5", "nomic_bert/bare_v5")


def test_families_run_what_they_ran(roll: str = "scan") -> None:
    """They heed their mask, so that nothing is added."""
    for name in FAMILIES:
        profile = rlx.CompileProfile().replace(layers={"roll": roll})
        programs = rlx.load(checkpoints.FIXTURES / name, profile=profile).model.programs
        (own,) = programs.flows
        padded, forward = (
            dump(programs.template(ProgramKey(own, program, frozenset({"attention_mask"}))).mir, "mir")
            for program in ("padded", "forward")
        )
        assert padded == forward


@pytest.mark.parametrize("kind", ["no mask", "rows too"])
def test_over_devices(kind: str) -> None:
    stage, alone = (ALONE | {k: v[:2] for k, v in MIXING.items()})[kind]
    found = encoder(stage, mesh=mesh("data", 4))
    want = [alone(TABLE[t].astype(np.float64)).mean(0) for t in TEXTS]
    np.testing.assert_allclose(found.embed(TEXTS), want, atol=1e-5)
    hidden = np.asarray(found.hidden_states(block(TEXTS, 8), lengths=[len(t) for t in TEXTS]))
    np.testing.assert_allclose([row[: len(t)].mean(0) for row, t in zip(hidden, TEXTS, strict=True)], want, atol=1e-5)
