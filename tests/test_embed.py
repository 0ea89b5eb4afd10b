"""`embed`: texts laid out in few sizes of programs, several in a row, with the vectors each has alone."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.encode import embedding
from rlx_jax.encode.packing import COSTS, plan_blocks, plan_one_per_row, sizes_for
from rlx_jax.encode.sentence import SentencePipeline, pool, pool_segments
from rlx_jax.errors import RequestError, SequenceLengthError, TokenIdError
from tests.divided import windowed
from tests.opening import load
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close
from tests.small import compiles_of

BERT = checkpoints.FIXTURES / "bert" / "bare_v5"
SAME = 1e-6
MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")


def texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Id lists of random lengths, short ones mostly."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.geometric(0.12, count), 1, longest)
    return [rng.integers(1, 97, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def bert() -> Any:
    """A tiny BERT of 40 positions."""
    return load(BERT)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """The same directions, to 1e-6, and lengths."""
    length = np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose(got / length, want / length, atol=SAME)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 700), max_size=80),
    kind=st.sampled_from([*COSTS]),
    tokens=st.sampled_from([None, 1, 100, 4096]),
    share=st.sampled_from([1, 3]),
)
def test_every_text_has_its_place(lengths: list[int], kind: str, tokens: int | None, share: int) -> None:
    """Once, in a row with room for it, in blocks that there are programs for; the widest of which holds the longest."""
    sizes = sizes_for(COSTS[kind], max(lengths, default=1), tokens, share)
    assert len(sizes.blocks) <= 8
    for blocks in (plan_blocks(lengths, sizes), plan_one_per_row(lengths, sizes)):
        assert sorted(text for b in blocks for row in b.texts for text in row) == [*range(len(lengths))]
        for b in blocks:
            assert (b.rows, b.width) in sizes.blocks and len(b.texts) <= b.rows and b.rows % share == 0
            assert all(sum(lengths[t] for t in row) <= b.width and 0 < len(row) <= b.slots for row in b.texts)
            assert tokens is None or share > 1 or b.rows == 1 or b.rows * b.width <= tokens


def test_pooling_of_segments() -> None:
    """Each text of a row has the vector that `pool` gives it by itself; a slot without one holds zeros."""
    hidden = np.random.default_rng(0).standard_normal((2, 9, 5)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2, 2]], np.int32)
    pipeline = SentencePipeline(pooling=MODES, normalize=True)
    got = np.asarray(jax.jit(pool_segments, static_argnums=(2, 3))(hidden, segments, 3, pipeline))
    for row, count in ((0, 3), (1, 1)):
        for number in range(1, count + 1):
            one = hidden[row, segments[row] == number][None]
            want = jax.jit(pool, static_argnums=2)(one, np.ones(one.shape[:2], bool), pipeline)
            np.testing.assert_allclose(got[row, number - 1], np.asarray(want)[0], atol=SAME)
    assert not got[1, 2].any()


def test_vectors_are_those_of_each_text_alone(bert: Any) -> None:
    """Against NumPy in float64, in any order and company; a soak over lengths and counts within the same programs."""
    ids = texts(150, 40)
    vectors = bert.embed(ids)
    assert bert.packing == "" and "several texts in a row" in str(bert.report())
    for i in (0, 1, 7, 80, 149):
        assert_close(vectors[i], bert.hidden_states(np.array([ids[i]]))[0].mean(0))
    for count, seed in ((1, 1), (3, 2), (33, 3), (90, 4)):
        chosen = np.random.default_rng(seed).permutation(len(ids))[:count]
        assert_same(bert.embed([ids[i] for i in chosen]), vectors[chosen])
    assert bert.report().compiles <= 8


def test_rows_of_their_own_give_the_same(bert: Any) -> None:
    """What `packing` forbids, and buckets ask for: one text in a row."""
    ids = texts(40, 16, seed=5)
    rows = load(BERT, profile=rlx.CompileProfile().replace(buckets={"prompt": [16], "batch": [8]}))
    assert_same(rows.embed(ids), bert.embed(ids))
    assert "the profile's buckets" in rows.packing and rows.packing in " ".join(str(rows.report()).split())
    for encoder, tokens, blocks in ((bert, 128, {(2, 64)}), (rows, 70, {(8, 16)})):
        assert_same(encoder.embed(ids, max_tokens=tokens), bert.embed(ids))
        ran = {(dict(k.binding)["batch"], dict(k.binding)["seq"]) for k in encoder.model.programs.executables}
        assert blocks <= ran


def test_an_iterator_is_read_as_it_goes(bert: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Chunk by chunk: texts that fill no call wait for others; the vectors are those of the list."""
    ids, read = texts(23, 40, seed=6), []

    def source() -> Iterator[list[int]]:
        for one in ids:
            read.append(one)
            yield one

    want = bert.embed(ids)
    monkeypatch.setattr(embedding, "TEXTS_PER_CHUNK", 5)
    assert_same(bert.embed(source(), show_progress=True), want)
    assert read == ids
    told = capsys.readouterr().err
    assert told.count("\r") == 5 and told.endswith("embed: 23 texts\n")
    bert.embed(ids, show_progress=True)
    assert "embed: 23 of 23 texts" in capsys.readouterr().err
    bert.embed(ids)
    assert not capsys.readouterr().err
    assert bert.embed(iter(())).shape == (0, 40)
    with pytest.raises(RequestError, match="show_progress is 1"):
        bert.embed(ids, show_progress=1)


def test_a_bad_text_of_a_later_chunk(bert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named by its number among all."""
    monkeypatch.setattr(embedding, "TEXTS_PER_CHUNK", 3)
    for bad, error, message in (
        ([97], TokenIdError, r"texts\[7\]\[0\]: id 97"), ([1] * 41, SequenceLengthError, r"texts\[7\]"),
        ([], RequestError, r"texts\[7\] has no token ids"),
    ):  # fmt: skip
        asked = [*texts(7, 40), bad]
        for source in (asked, iter(asked)):
            with pytest.raises(error, match=message):
                bert.embed(source)
    with pytest.raises(RequestError, match=r"texts\[7\].*texts\[6\]"):
        bert.embed(iter([*texts(7, 40), "a string"]))


def test_warm_up_without_buckets() -> None:
    """Compiles every block that `embed` has; then nothing compiles."""
    encoder = load(BERT)
    encoder.warmup()
    _, compiled = compiles_of(lambda: [encoder.embed(texts(count, 40)) for count in (50, 1)])
    assert not compiled and encoder.report().recompiles == 0
    assert encoder.report().compiles == len(sizes_for(COSTS["cpu"], 40).blocks)


def packed(model: Any, rows: list[list[list[int]]], width: int) -> list[np.ndarray]:
    """The outputs at the tokens of each sequence, of rows that hold them one after the other."""
    ids, segments, positions = np.zeros((3, len(rows), width), np.int32)
    for row, sequences in enumerate(rows):
        at = 0
        for number, one in enumerate(sequences, 1):
            here = slice(at, at := at + len(one))
            ids[row, here], segments[row, here], positions[row, here] = one, number, np.arange(len(one))
    out = np.asarray(model(ids, segments=segments, positions=positions))
    return [out[row, segments[row] == n] for row, of in enumerate(rows) for n in range(1, len(of) + 1)]


def test_a_decoder_packs_too() -> None:
    """Rotations by places, causality and windows inside each sequence: the logits that it has alone."""
    flow, held = windowed(4)
    model, plain = (rlx.compile(flow, held, program=program) for program in ("packed", "forward"))
    rng = np.random.default_rng(0)
    rows = [[rng.integers(0, 17, n).tolist() for n in lengths] for lengths in ((3, 9, 2), (12,))]
    got = packed(model, rows, 14)
    for logits, one in zip(got, (one for row in rows for one in row), strict=True):
        assert_close(logits, np.asarray(plain([one]))[0])


def mixing() -> Any:
    """A flow that looks at earlier tokens by itself."""
    return (
        rlx.ModelFlow("mixing").input("tokens", ("batch", "seq"), dtype="int32")
        .input("attention_mask", ("batch", "seq"), dtype="int32", default=None)
        .embed("table").custom(lambda emit, x: emit.jax(lambda x: jnp.cumsum(x, axis=1), x))
    )  # fmt: skip


def test_a_flow_that_mixes_positions_is_not_packed() -> None:
    """Its texts have rows of their own, and `packing` says why."""
    table = np.random.default_rng(0).standard_normal((11, 6)).astype(np.float32)
    encoder = rlx.Encoder(mixing(), {"table": table})
    rows = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    np.testing.assert_allclose(
        encoder.embed(rows), [np.cumsum(table[row], axis=0).mean(axis=0) for row in rows], atol=1e-5
    )
    assert "cumsum accumulates along 'seq'" in encoder.packing and "packed" in encoder.packing


def test_positions_of_packed_rows(bert: Any) -> None:
    """A row may be longer than the model's 40 positions."""
    model = rlx.compile(rlx.recipe_for(BERT), program="packed")
    ids = np.ones((1, 60), np.int32)
    places = np.arange(60, dtype=np.int32)[None] % 40
    assert model(ids, segments=1 + np.arange(60)[None] // 40, positions=places).shape == (1, 60, 40)
