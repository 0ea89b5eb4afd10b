"""Embedders as sentence-transformers saves them: layers after pooling, bidirectional decoders, output formats."""

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode.precision import quantize_vectors, vector_ranges
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.vector_layers import Dense, UnitLength
from tests.opening import load
from tests.oracles import checkpoints, embedders
from tests.oracles.classifiers import TEXTS
from tests.oracles.comparing import assert_close, assert_same_layers, assert_same_model

ARCHIVES = (embedders.ARCHIVE,)


@pytest.mark.parametrize("name", embedders.RECORDED)
def test_recorded_vectors(directories: Path, name: str, tmp_path: Path) -> None:
    """Vectors of the whole pipeline, with and without a prompt; of texts that share rows; and of what is saved."""
    encoder = load(directories / name)
    record = json.loads((directories / name / "recorded.json").read_text())
    assert encoder.packing == ""
    assert_close(encoder.embed(TEXTS), np.array(record["plain"]))
    assert_close(encoder.embed(TEXTS, prompt_name="query"), np.array(record["query"]))
    assert encoder.embed(TEXTS[0]).shape == (encoder.output_width,)
    rlx.save(encoder, tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert_same_model(saved, encoder)
    assert saved.pipeline == encoder.pipeline and saved.padding == encoder.padding
    assert_same_layers(saved.pipeline.layers, encoder.pipeline.layers)


@pytest.mark.slow
def test_layers_compile_in_the_warm_up(directories: Path) -> None:
    encoder = load(directories / "mixed", mesh=8)
    encoder.warmup()
    record = json.loads((directories / "mixed" / "recorded.json").read_text())
    assert_close(encoder.embed(TEXTS * 50)[:6], np.array(record["plain"]))
    assert encoder.report().recompiles == 0


def test_output_formats(directories: Path, tmp_path: Path) -> None:
    """Truncation comes after the pipeline's normalization, a second one after it; then quantization."""
    encoder = load(directories / "embedding_gemma")
    vectors = encoder.embed(TEXTS)
    np.testing.assert_array_equal(encoder.embed(TEXTS, truncate_dim=5), vectors[:, :5])
    copy = checkpoints.copy(directories / "embedding_gemma", tmp_path / "short")
    checkpoints.edit_json(copy / "config_sentence_transformers.json", {"truncate_dim": 5})
    stored = load(copy)
    np.testing.assert_array_equal(stored.embed(TEXTS), vectors[:, :5])
    np.testing.assert_array_equal(stored.embed(TEXTS, truncate_dim=24), vectors)
    np.testing.assert_array_equal([*stored.embed_iter(TEXTS)], vectors[:, :5])
    short = vectors[:, :5].astype(np.float64)
    short /= np.linalg.norm(short, axis=1, keepdims=True)
    assert_close(encoder.embed(TEXTS, truncate_dim=5, normalize=True), short)
    ranges = vector_ranges(vectors)
    for precision, expected in (("int8", -128), ("uint8", 0)):
        levels = encoder.embed(TEXTS, precision=precision, ranges=ranges)
        exact = np.clip(np.floor((vectors.astype(np.float64) - ranges[0]) / (ranges[1] - ranges[0]) * 255), 0, 255)
        assert levels.dtype == precision and np.abs(levels.astype(int) - expected - exact).max() <= 1
        one = encoder.embed(TEXTS[1], precision=precision, ranges=ranges)
        assert one.shape == (24,) and np.abs(one.astype(int) - levels[1]).max() <= 1
    bits = encoder.embed(TEXTS, truncate_dim=20, precision="ubinary")
    assert bits.dtype == np.uint8 and bits.shape == (6, 3)
    np.testing.assert_array_equal(np.unpackbits(bits, axis=1)[:, :20], vectors[:, :20] > 0)
    np.testing.assert_array_equal(bits.astype(int) - 128, encoder.embed(TEXTS, truncate_dim=20, precision="binary"))
    with pytest.warns(errors.RlxWarning, match="precision='int8'.*6 vectors"):
        own = encoder.embed(TEXTS, precision="int8")
    np.testing.assert_array_equal(own, encoder.embed(TEXTS, precision="int8", ranges=ranges))
    constant = quantize_vectors(np.ones((2, 3), np.float32), "uint8", np.ones((2, 3)))
    np.testing.assert_array_equal(constant, 0)
    assert quantize_vectors(np.zeros((0, 9), np.float32), "int8").shape == (0, 9)


def test_layers_of_your_own() -> None:
    """An Encoder applies the layers of its pipeline in turn, and a new pipeline takes effect."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").embed("table")
    table, weight = np.eye(3, dtype=np.float32), np.array([[3, 4, 0], [0, 0, 1]], np.float32)
    pipeline = SentencePipeline(layers=(UnitLength(), Dense(weight, np.array([0, 1], np.float32))))
    encoder = rlx.Encoder(flow, {"table": table}, pipeline=pipeline)
    np.testing.assert_allclose(encoder.embed([[1, 1], [2]]), [[4, 1], [0, 2]], atol=1e-6)
    encoder.pipeline = dataclasses.replace(pipeline, normalize=True, layers=(Dense(-weight),))
    np.testing.assert_allclose(encoder.embed([[1, 1], [2]]), [[-1, 0], [0, -1]], atol=1e-6)
    with pytest.raises(errors.ConfigError, match="layer 1 .* Dense.*width 3.*6"):
        rlx.Encoder(flow, {"table": table}, pipeline=dataclasses.replace(pipeline, pooling=("mean", "cls")))


@pytest.mark.oracle
@pytest.mark.parametrize("name", embedders.CASES)
def test_live(name: str, tmp_path: Path) -> None:
    """Every pooling, layer and bidirectional decoder: vectors, ranks and output formats of sentence-transformers."""
    theirs, ours = embedders.write(name, tmp_path / "st"), load(tmp_path / "st")
    for prompt in ({}, {"prompt_name": "query"}, {"prompt": "w7 "}):
        expected = embedders.alone(theirs, **prompt)
        assert_close(ours.embed(TEXTS, **prompt), expected)
    vectors, expected = ours.embed(TEXTS), embedders.alone(theirs)
    np.testing.assert_array_equal(np.argsort(-vectors @ vectors[0]), np.argsort(-expected @ expected[0]))
    short = embedders.alone(theirs, truncate_dim=7, normalize_embeddings=True)
    assert_close(ours.embed(TEXTS, truncate_dim=7, normalize=True), short)
    library = importlib.import_module("sentence_transformers.util.quantization")
    many = np.random.default_rng(0).normal(size=(200, 19)).astype(np.float32)
    ranges = np.array([[-1.5] * 19, [1.25] * 19])
    for precision in ("int8", "uint8", "binary", "ubinary"):
        for limits in (None, ranges) if precision.endswith("int8") else (None,):
            exact = library.quantize_embeddings(many, precision, ranges=limits)
            np.testing.assert_array_equal(quantize_vectors(many, precision, limits), exact)
        assert ours.embed(TEXTS, precision=precision).dtype == exact.dtype
    clear = (np.abs(expected) > 1e-5).all(axis=0)  # numbers that rounding cannot make positive or negative
    bits = (theirs.encode(TEXTS, precision="ubinary"), ours.embed(TEXTS, precision="ubinary"))
    want, got = (np.unpackbits(x, axis=1)[:, : len(clear)][:, clear] for x in bits)
    np.testing.assert_array_equal(got, want)


@pytest.mark.oracle
def test_llama_bidirec(tmp_path: Path) -> None:
    """NVIDIA's model type: vectors of the bidirectional Llama, and logits of a classifier that pools by the mean."""
    theirs, directory = embedders.write("llama_bidirectional", tmp_path / "st"), tmp_path / "st"
    config = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}
    checkpoints.edit_json(directory / "config.json", config | {"is_causal": checkpoints.REMOVED, "temperature": 0.02})
    assert_close(load(directory).embed(TEXTS), embedders.alone(theirs))
    hidden = (theirs.encode([t], output_value="token_embeddings", convert_to_numpy=False)[0].numpy() for t in TEXTS)
    score = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    copy = checkpoints.copy(directory, tmp_path / "classifier")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (copy / name).unlink()
    weights = {f"model.{key}": value for key, value in load_file(copy / "model.safetensors").items()}
    save_file(weights | {"score.weight": score}, copy / "model.safetensors")
    names = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "num_labels": 3, "temperature": 1.0}
    checkpoints.edit_json(copy / "config.json", names)
    assert_close(load(copy).logits(TEXTS), np.stack([rows.astype(np.float64).mean(0) @ score.T for rows in hidden]))
    for changes, message in (
        ({"temperature": 0.5}, "'temperature' is 0.5"),
        ({"pooling": "last"}, "'pooling'"),
        ({"num_labels": 2}, r"id2label \(num_labels\) 2"),
    ):
        other = checkpoints.edited(copy, tmp_path / next(iter(changes)), changes)
        with pytest.raises(errors.RlxError, match=message):
            load(other)
