"""Sparse vectors and vectors of tokens: SPLADE, bge-m3, and ColBERT models, old and new."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode.multi_vector import MultiVectorEncoder
from rlx_jax.encode.sparse import maxsim
from rlx_jax.weights.torch_file import read_torch_file
from tests.opening import load
from tests.oracles import checkpoints, embedders
from tests.oracles import sparse_embedders as sparse
from tests.oracles.classifiers import TEXTS
from tests.oracles.comparing import assert_close, assert_same_layers, assert_same_model
from tests.small import compiles_of

ARCHIVES = (sparse.ARCHIVE, embedders.ARCHIVE)


def _dense(vectors: list[dict[int, float]], width: int) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(vectors), width), np.float32)
    for row, vector in zip(rows, vectors, strict=True):
        row[list(vector)] = list(vector.values())
        assert list(vector.values()) == sorted(vector.values(), reverse=True) and 0 not in vector.values()
    return rows


def test_splade(directories: Path, tmp_path: Path) -> None:
    model = load(directories / "splade")
    expected = np.array(json.loads((directories / "splade" / "recorded.json").read_text()))
    vectors = model.embed_sparse(TEXTS)
    assert_close(_dense(vectors, 45), expected)
    assert_close(model.embed(TEXTS), expected)
    assert model.embed_sparse(TEXTS[1], max_active_dims=4) == pytest.approx(dict([*vectors[1].items()][:4]))
    rlx.save(model, tmp_path / "saved")
    assert load(tmp_path / "saved").embed_sparse(TEXTS) == vectors
    assert model.embed_sparse([]) == []
    for texts in (None, 3, {"a": 1}, b"a"):
        with pytest.raises(errors.RequestError, match="embed_sparse: texts is"):
            model.embed_sparse(texts)


def test_m3(directories: Path, tmp_path: Path) -> None:
    """Three kinds of vectors of one model; the layers of two are in files of torch."""
    model, record = load(directories / "m3"), json.loads((directories / "m3" / "recorded.json").read_text())
    assert_close(_dense(model.embed_sparse(TEXTS), 45), np.array(record["weights"]))
    vectors = model.embed_tokens(TEXTS)
    for found, expected in zip(vectors, record["vectors"], strict=True):
        assert_close(found, np.array(expected))
    np.testing.assert_allclose(maxsim(vectors, vectors, mean=True).diagonal(), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(model.embed(TEXTS), axis=1), 1, atol=1e-5)
    rlx.save(model, tmp_path / "saved")
    np.testing.assert_array_equal(load(tmp_path / "saved").embed_tokens(TEXTS[1]), model.embed_tokens(TEXTS[1]))


def test_errors_count_in_the_whole_list(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx_jax.encode.sparse.MAX_VALUES", 100)
    splade, m3 = load(directories / "splade"), load(directories / "m3")
    for call in (splade.embed_sparse, m3.embed_sparse, m3.embed_tokens):
        with pytest.raises(errors.TokenIdError, match=r"texts\[5\]\[0\]: id 999"):
            call([[3]] * 5 + [[999]])
    with pytest.raises(errors.RequestError, match="embed_tokens: texts is None"):
        m3.embed_tokens(None)


def test_pylate_directory(directories: Path, tmp_path: Path) -> None:
    """PyLate's files for the recorded ColBERT model give the recorded vectors; `model_type` may be missing."""
    record = json.loads((directories / "colbert" / "recorded.json").read_text())
    for name in ("new", "old"):
        copy = checkpoints.copy(directories / "colbert", tmp_path / name)
        for file, content in sparse.pylate_files("pylate").items():
            if name == "old" and isinstance(content, dict):
                content.pop("model_type")
            (copy / file).write_text(json.dumps(content))
        checkpoints.edit_json(copy / "sentence_bert_config.json", {"query_expansion": None})
        model = load(copy)
        for kind, rows in record.items():
            for found, expected in zip(model.embed_tokens(TEXTS, kind=kind), rows, strict=True):
                assert_close(found, np.array(expected))


def test_torch_files(directories: Path) -> None:
    """A file that is not a dictionary of tensors is refused, and nothing of it is run."""
    raw = (directories / "m3" / "sparse_linear.pt").read_bytes()
    tensors = read_torch_file(raw, "x.pt")
    assert {name: (a.shape, a.dtype.name) for name, a in tensors.items()} == {
        "weight": ((1, 20), "float16"), "bias": ((1,), "float16")
    }  # fmt: skip
    for old, new, message in (
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", "names 'torch._utils._rebuild_tensor_v9', which is not loaded"),
        (b"ccollections\nOrderedDict", b"cposix\nsystem", "names 'posix.system'"),
        (b"HalfStorage", b"LongStorage", "names 'torch.LongStorage'"),
        (b"K\x14K\x01\x86", b"K\x14K\x02\x86", r"shape \(1, 20\) has the strides \(20, 2\)"),
    ):
        with pytest.raises(errors.RlxError, match=message):
            read_torch_file(_patched(raw, old, new), "x.pt")
    for cut in range(0, len(raw), 97):
        with pytest.raises(errors.RlxError):
            read_torch_file(raw[:cut], "x.pt")
    # A name of 60 nested pairs, whose hash takes 2^60 steps: from the memo, and by copies of the top of the stack.
    for pairs in (b")q\x00" + b"h\x00\x86q\x00" * 60 + b"0}h\x00K\x02s.", b"}K\x01" + b"2\x86" * 60 + b"K\x02s."):
        with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02" + pairs)
        with pytest.raises(errors.CheckpointFormatError):
            read_torch_file(file.getvalue(), "x.pt")


def _patched(raw: bytes, old: bytes, new: bytes) -> bytes:
    """The archive with a change in the pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(old, new) if name.endswith(".pkl") else source.read(name))
    return out.getvalue()


@pytest.mark.oracle
@pytest.mark.parametrize("name", sparse.CASES)
def test_live(name: str, tmp_path: Path) -> None:
    theirs, ours = sparse.write(name, tmp_path / "st"), load(tmp_path / "st")
    for arguments in ({}, {"prompt_name": "query"}, {"max_active_dims": 3}):
        expected = sparse.dense_rows(theirs, **arguments)
        assert_close(_dense(ours.embed_sparse(TEXTS, **arguments), expected.shape[1]), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("name", sparse.OLD_COLBERTS)
def test_live_colbert(name: str, tmp_path: Path) -> None:
    theirs = sparse.write_old_colbert(name, tmp_path / "old")
    ours = load(tmp_path / "old")
    for kind, rows in embedders.token_vectors(theirs).items():
        for found, expected in zip(ours.embed_tokens(TEXTS, kind=kind), rows, strict=True):
            assert_close(found, expected)
    if name == "stanford":
        checkpoints.edit_json(tmp_path / "old" / "artifact.metadata", {"query_token_id": "[Q]"})
        with pytest.raises(errors.ConfigError, match="'.Q.'"):
            load(tmp_path / "old")


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
def test_live_multi_vector(name: str, tmp_path: Path) -> None:
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
