"""Sentence embeddings against `sentence-transformers`: the real MiniLM, and every file around a tiny encoder."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.demo import minilm_directory
from tests.opening import load
from tests.oracles import checkpoints, texts

FIXTURES = checkpoints.FIXTURES
BASE = FIXTURES / "sentence" / "base"
SENTENCES: list[str] = json.loads((FIXTURES / "sentence.json").read_text("utf-8"))
ALLOWED = 1e-5


def assert_embeddings(got: Any, want: npt.NDArray[Any]) -> None:
    """float32, of the right shape, and nowhere off by more than 1e-5."""
    got = np.asarray(got)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max() <= ALLOWED


@pytest.fixture(scope="module")
def minilm() -> Any:
    """The real encoder."""
    return load(minilm_directory())


@pytest.fixture(scope="module")
def recorded() -> npt.NDArray[np.float32]:
    """Embeddings of the 50 texts by `sentence-transformers`."""
    with np.load(FIXTURES / "minilm50.npz") as file:
        embeddings: npt.NDArray[np.float32] = file["embeddings"]
    return embeddings


@pytest.fixture(scope="module")
def variants() -> dict[str, npt.NDArray[np.float32]]:
    """Recorded embeddings by variant."""
    with np.load(FIXTURES / "sentence.npz") as file:
        return dict(file)


# Each differs from one of the others in one way; the slow tier has the rest.
QUICK = ("mean", "cls", "max", "new_mean", "weighted", "prompt")
VARIANTS = checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in VARIANTS])
def test_variants(name: str, variants: dict[str, npt.NDArray[np.float32]], tmp_path: Path) -> None:
    """Pooling modes, normalisation, truncation, lower-casing and prompts are the checkpoint's own, in old and new
    spelling; what is rarely used may be refused, but not ignored."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / name, **VARIANTS[name])
    profile = rlx.CompileProfile().replace(buckets={"prompt": [40], "batch": [8]})  # one program
    try:
        embeddings = load(directory, profile=profile).embed(SENTENCES)
    except (errors.ConfigError, errors.UnsupportedError):
        assert name in checkpoints.SENTENCE_EXTRAS
    else:
        assert_embeddings(embeddings, variants[name])


@pytest.mark.oracle
def test_live_fifty_texts(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """`sentence-transformers`, today and as recorded, on 50 texts: empty, blank, many scripts, emoji, code, 600 words.

    And on 50 more made of their words."""
    st = importlib.import_module("sentence_transformers")
    model = st.SentenceTransformer(str(minilm_directory()), device="cpu")
    more = [texts.words(3 * i + 1, seed=i) for i in range(50)]
    for batch in (texts.fifty(), more):
        assert_embeddings(minilm.embed(batch), model.encode(batch, show_progress_bar=False))
    assert_embeddings(minilm.embed(texts.fifty()), recorded)
    assert np.asarray(minilm.embed([])).shape == (0, 384)
    assert_embeddings(model.encode(texts.fifty(), show_progress_bar=False), recorded)
