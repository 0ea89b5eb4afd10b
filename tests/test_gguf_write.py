"""Writing GGUF files: gguf-py reads what it would have written itself, and `load` the model that was saved."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import TargetExistsError, UnsupportedError, WeightError
from rlx_jax.weights.quantize import quantize_q8_0
from tests.opening import load
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.comparing import assert_same_model
from tests.oracles.gguf_files import tensors_of, write_gguf
from tests.test_gguf import CASES, assert_same_file, directory, random_checkpoint, random_mixture
from tests.test_gguf_tokenizers import LLAMA3, TEXTS

NOT_WRITTEN = ("qwen3_5_text", "gpt_oss", "mamba2", "bert", "nomic_bert")
WRITTEN = [case for case, (fixture, _) in CASES.items() if fixture.partition("/")[0] not in NOT_WRITTEN]


def read_back(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a file, by gguf-py."""
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor: Any) -> np.ndarray:
    """The numbers of a tensor of gguf-py's reader."""
    if tensor.tensor_type is Kind.F32:
        return np.asarray(tensor.data)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def weights_of(source: Path) -> dict[str, np.ndarray]:
    return {k: v for file in source.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}


@pytest.mark.parametrize("case", WRITTEN)
def test_equals_what_converters_write(case: str, tmp_path: Path) -> None:
    """Names, values and metadata as the oracle writes them with gguf-py's tables, which test_gguf.py loads;
    what is written is the same model."""
    fixture, fields = CASES[case]
    if "query_pre_attn_scalar" in fields:
        fields = {"query_pre_attn_scalar": json.loads((FIXTURES / fixture / "config.json").read_text())["head_dim"]}
    if case == "mixtral":
        fields = {"sliding_window": None}
    source = directory(tmp_path, fixture, **fields)
    config = json.loads((source / "config.json").read_text())
    model = load(source, dtype="f32")
    rlx.save(model, tmp_path / "m.gguf", dtype="f32")
    metadata, tensors = read_back(tmp_path / "m.gguf")
    expected = tensors_of(config, weights_of(source))
    assert tensors.keys() - {"rope_freqs.weight"} == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(values(tensors[name]), array, err_msg=name)
    write_gguf(source, tmp_path / "theirs.gguf")
    theirs, their_tensors = read_back(tmp_path / "theirs.gguf")
    for key in theirs.keys() - {"gemma3.rope.scaling.type"}:
        assert metadata[key] == pytest.approx(theirs[key]), key
    if "rope_freqs.weight" in their_tensors:
        factors = values(tensors["rope_freqs.weight"])
        np.testing.assert_allclose(factors, values(their_tensors["rope_freqs.weight"]), rtol=1e-6)
    assert_same_model(load(tmp_path / "m.gguf", dtype="f32"), model, tolerance=1e-6)


def test_q8_0_is_that_of_gguf_py() -> None:
    """Bit by bit: random scales, ties, zeros, subnormals and the largest values."""
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((4096, 64)).astype(np.float32) * np.exp2(rng.integers(-40, 20, (4096, 1)))
    blocks[::7] = np.round(blocks[::7] * 4) / 4
    edges = np.zeros((8, 64), np.float32)
    edges[1], edges[2, ::3], edges[3] = -0.0, 1e-36, np.linspace(-127, 127, 64)
    edges[4], edges[5, 5], edges[6] = np.arange(64) + 0.5, 8.3e6, np.float32(2) ** -30
    data = np.concatenate([blocks, edges]).astype(np.float32)
    with np.errstate(all="ignore"):
        want = gguf.quants.quantize(data, Kind.Q8_0)
    np.testing.assert_array_equal(quantize_q8_0(data, "w"), want)
    with pytest.raises(WeightError, match="w: its values are too small for Q8_0"):
        quantize_q8_0(np.full((1, 32), 1e-7, np.float32), "w")
    for bad in (np.inf, np.nan, 1e7):
        with pytest.raises(WeightError, match="w: .*not finite"):
            quantize_q8_0(np.full((1, 32), bad, np.float32), "w")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_types(dtype: str, tmp_path: Path) -> None:
    """Matrices have the type, vectors are F32; values are those of gguf-py's rule; `load` runs on the same numbers."""
    random_checkpoint(tmp_path / "hf", 64)
    kind, lm = Kind[dtype.upper()], load(tmp_path / "hf", dtype="f32")
    decoded = write_gguf(tmp_path / "hf", tmp_path / "theirs.gguf", kind)
    rlx.save(lm, tmp_path / "m.gguf", dtype=dtype)
    metadata, tensors = read_back(tmp_path / "m.gguf")
    file_types = {"f16": 1, "bf16": 32, "q8_0": 7}
    assert metadata["general.file_type"] == file_types[dtype]
    for name, tensor in tensors.items():
        assert tensor.tensor_type is (Kind.F32 if name.endswith("norm.weight") else kind)
        np.testing.assert_array_equal(values(tensor), decoded[name], err_msg=name)
    assert_same_file(tmp_path / "m.gguf", tmp_path / "theirs.gguf")
    # The command writes the same file, and converts it back and forth.
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "c.gguf"), "--dtype", dtype]) == 0
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    assert cli.main(["convert", str(tmp_path / "c.gguf"), str(tmp_path / "d"), "--dtype", "f32"]) == 0
    assert cli.main(["convert", str(tmp_path / "d"), str(tmp_path / "e.gguf"), "--dtype", dtype]) == 0
    for name, tensor in read_back(tmp_path / "e.gguf")[1].items():
        np.testing.assert_array_equal(values(tensor), decoded[name], err_msg=name)


def test_stacked_experts(tmp_path: Path) -> None:
    """The experts of a layer are one packed tensor, and the router stays F32."""
    random_mixture(tmp_path / "hf")
    decoded = write_gguf(tmp_path / "hf", tmp_path / "theirs.gguf", Kind.Q8_0)
    rlx.save(load(tmp_path / "hf", dtype="f32"), tmp_path / "m.gguf", dtype="q8_0")
    tensors = read_back(tmp_path / "m.gguf")[1]
    assert tensors.keys() == decoded.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(values(tensor), decoded[name], err_msg=name)
    assert tensors["blk.0.ffn_down_exps.weight"].tensor_type is Kind.Q8_0
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type is Kind.F32


def with_tokenizer(tmp_path: Path, document: dict[str, Any], **settings: Any) -> Path:
    """A checkpoint with this `tokenizer.json`, and more rows than it has tokens."""
    source = tmp_path / "tok"
    config = random_checkpoint(source, 32) | {"vocab_size": 1200, "eos_token_id": [1, 2]}
    (source / "config.json").write_text(json.dumps(config))
    weights = weights_of(source)
    rows = np.random.default_rng(5).standard_normal((1200, 32)).astype(np.float32)
    weights |= {"model.embed_tokens.weight": rows, "lm_head.weight": rows / 8}
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    (source / "tokenizer.json").write_text(json.dumps(document))
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    return source


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_bpe"])
def test_tokenizers(name: str, tmp_path: Path) -> None:
    """Equal tokens, ends and templates after the round trip; a split that files cannot name is refused."""
    document = json.loads((FIXTURES / f"tokenizers/{name}.json").read_text())
    if name == "byte_level":
        document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA3
    added, first = [token["content"] for token in document["added_tokens"]], int(name == "sentencepiece_bpe")
    source = with_tokenizer(
        tmp_path, document, bos_token=added[first], eos_token=added[first + 1], chat_template="{{ x }}"
    )
    model = load(source, dtype="f32")
    rlx.save(model, tmp_path / "m.gguf")
    again = load(tmp_path / "m.gguf", dtype="f32")
    for text in TEXTS:
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text), text
        assert again.tokenizer.decode(model.tokenizer.encode(text)) == model.tokenizer.decode(
            model.tokenizer.encode(text)
        )
    assert again.tokenizer.bos_id == model.tokenizer.bos_id and again.tokenizer.chat_templates == {"default": "{{ x }}"}
    assert set(model.tokenizer.eos_ids) <= set(again.tokenizer.eos_ids)
    metadata, _ = read_back(tmp_path / "m.gguf")
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.token_type"]) == 1200
    if name == "byte_level":
        assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
        document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,2}|\p{L}+|."
        (source / "tokenizer.json").write_text(json.dumps(document))
        with pytest.raises(UnsupportedError, match="GGUF cannot express the tokenizer"):
            rlx.save(load(source), tmp_path / "n.gguf")


def test_paths_and_dtypes(tmp_path: Path) -> None:
    """A file of another kind is not replaced."""
    random_checkpoint(tmp_path / "hf", 32)
    model, target = load(tmp_path / "hf"), tmp_path / "m.gguf"
    rlx.save(model, target)
    first = target.read_bytes()
    with pytest.raises(TargetExistsError, match="overwrite=True"):
        rlx.save(model, target, dtype="q8_0")
    rlx.save(model, target, dtype="q8_0", overwrite=True)
    assert target.read_bytes() != first and sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]
    (tmp_path / "d.gguf").mkdir()
    with pytest.raises(TargetExistsError, match="is not a .gguf file"):
        rlx.save(model, tmp_path / "d.gguf", overwrite=True)
    with pytest.raises(WeightError, match="gguf_q8_0"):
        rlx.save(load(target), tmp_path / "x.gguf")  # packed, and no dtype
    params = {name: leaf * 1e9 for name, leaf in model.model.params.items()}
    model.model = model.model.replace(params=params)
    with pytest.raises(WeightError, match="too large to quantize"):
        rlx.save(model, target, dtype="q8_0", overwrite=True)
    assert load(target)
