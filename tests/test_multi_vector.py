"""ColBERT models: a vector for each token, and the scores of documents, against sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.encode.multi_vector import MultiVectorEncoder
from tests.opening import load
from tests.oracles import embedders
from tests.oracles.classifiers import TEXTS
from tests.oracles.comparing import assert_close, assert_same_layers, assert_same_model
from tests.small import compiles_of

ARCHIVES = (embedders.ARCHIVE,)


@pytest.fixture(scope="module")
def directory(directories: Path) -> Path:
    return directories / "colbert"


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


def test_recorded_vectors(directory: Path, model: Any, tmp_path: Path) -> None:
    """Of queries, which are filled up with tokens that the others do not read, and of documents without some words."""
    assert isinstance(model, MultiVectorEncoder)
    record = json.loads((directory / "recorded.json").read_text())
    for kind, rows in record.items():
        for found, expected in zip(model.embed_tokens(TEXTS, kind=kind), rows, strict=True):
            assert_close(found, np.array(expected))
    np.testing.assert_allclose(model.embed_tokens(TEXTS[1], kind="query"), record["query"][1], atol=1e-5)
    plain = model.embed_tokens(["w2 w7"], kind="document", prompt="")
    assert_close(plain[0], model.embed_tokens(["w7"], kind="document")[0].astype(np.float64))
    rlx.save(model, tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert_same_model(saved.encoder, model.encoder)
    assert saved.settings == model.settings
    assert_same_layers(saved.settings.layers, model.settings.layers)


def test_scores(model: Any) -> None:
    queries, documents = (model.embed_tokens(TEXTS, kind=kind) for kind in ("query", "document"))
    wide = [[(q.astype(np.float64) @ d.T).max(axis=1).sum() for d in documents] for q in queries]
    assert_close(model.maxsim(queries, documents), np.array(wide))
    assert model.maxsim([], documents).shape == (0, 6) and model.embed_tokens([], kind="query") == []


@pytest.mark.slow
def test_warm_up(directory: Path) -> None:
    model = load(directory)
    model.warmup()
    _, compiled = compiles_of(lambda: model.embed_tokens(TEXTS, kind="document"))
    assert not compiled


@pytest.mark.oracle
@pytest.mark.parametrize("name", embedders.COLBERTS)
def test_live(name: str, tmp_path: Path) -> None:
    """Vectors, scores and ranks of directories that sentence-transformers wrote."""
    theirs, ours = embedders.write_colbert(name, tmp_path / "st"), load(tmp_path / "st")
    expected = embedders.token_vectors(theirs)
    found = {kind: ours.embed_tokens(TEXTS, kind=kind) for kind in expected}
    for kind, rows in expected.items():
        for vectors, row in zip(found[kind], rows, strict=True):
            assert_close(vectors, row)
    scores = theirs.similarity(expected["query"], expected["document"]).numpy()
    mine = ours.maxsim(found["query"], found["document"])
    assert_close(mine, scores)
    np.testing.assert_array_equal(np.argsort(-mine, axis=1), np.argsort(-scores, axis=1))
