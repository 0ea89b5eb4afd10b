"""GGUF files of more families against their Hugging Face directories, and GGUF files that `rlx_jax.save` writes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import ConfigError, RlxError, TargetExistsError, UnsupportedError, WeightError
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.models.mixture import GptOssConfig, GptOssFlow
from rlx_jax.weights.gguf import GptOssExperts
from rlx_jax.weights.quantize import quantize_q8_0
from tests.opening import load
from tests.oracles import mtp_drafts
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.comparing import assert_same_model
from tests.oracles.gguf_files import tensors_of, write_gguf
from tests.test_gguf import CASES as DECODERS
from tests.test_gguf import assert_same_file, directory, random_checkpoint, random_mixture
from tests.test_gguf_tokenizers import LLAMA3, TEXTS
from tests.test_sentence_pipeline import modules

SLOW = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text/blocks_v5": {}, "qwen3_5_text/tied_v5": {}, "gpt_oss/window_v5": {"swiglu_limit": 7.0},
    "mamba2/groups_v5": {}, "mamba2/tied_v5": {}, "bert/bare_v5": {}, "nomic_bert/bare_v5": {"hidden_act": "silu"},
}  # fmt: skip


def assert_reads(path: Path, source: Path) -> None:
    """Each weight of a directory is in the file, in full and in part, up to the rounding of the logarithm."""
    weights: dict[str, np.ndarray] = {}
    for file in source.glob("*.safetensors"):
        weights |= safetensors.numpy.load_file(file)
    with rlx.open_weights(path) as ours:  # type: ignore[attr-defined]
        assert sorted(ours.keys()) == sorted(key for key in weights if "pooler." not in key)
        for key in ours.keys():
            want, spec = weights[key].astype(np.float32), ours.spec(key)
            np.testing.assert_allclose(ours.read(key), want, rtol=1e-6, atol=1e-7, err_msg=key)
            assert spec.shape == want.shape and spec.dtype == ours.read(key).dtype
            index = (slice(1, None, 2), slice(0, 3), slice(None))[: want.ndim]
            np.testing.assert_array_equal(ours.read(key, index), ours.read(key)[index], err_msg=key)


@pytest.mark.parametrize("fixture", CASES)
def test_weights(fixture: str, tmp_path: Path) -> None:
    source = directory(tmp_path, fixture, **CASES[fixture])
    write_gguf(source, tmp_path / "m.gguf")
    assert_reads(tmp_path / "m.gguf", source)
    if fixture.startswith("mamba2"):
        opened: Any = rlx.open_weights(tmp_path / "m.gguf")
        assert repr(opened.config["expand"]) == "2"  # transformers takes no 2.0


@pytest.mark.slow
def test_draft_module(tmp_path: Path) -> None:
    """The draft module of Qwen 3.5 follows the layers of the model."""
    source = mtp_drafts.checkpoint(tmp_path / "hf", 1, planted=4.0)
    write_gguf(source, tmp_path / "m.gguf")
    assert_reads(tmp_path / "m.gguf", source)
    ours, theirs = rlx.load(tmp_path / "m.gguf", dtype="f32"), rlx.load(source, dtype="f32")
    want = theirs.generate([[3, 1, 4]], max_new_tokens=6, speculative="mtp")
    assert ours.generate([[3, 1, 4]], max_new_tokens=6, speculative="mtp") == want


@pytest.mark.parametrize(
    ("kind", "size"), [pytest.param(*case, marks=SLOW) for case in (("Q8_0", 32), ("Q8_0", 16), ("Q4_1", 64))]
)
def test_packed_value_heads(kind: str, size: int, tmp_path: Path) -> None:
    """Columns of value heads that are whole blocks stay packed; others are decoded."""
    changes = {"hidden_size": 64, "linear_value_head_dim": size, "linear_key_head_dim": 32}
    source = mtp_drafts.checkpoint(tmp_path / "hf", 2, changes)
    decoded = write_gguf(source, tmp_path / "q.gguf", Kind[kind])
    write_gguf(source, tmp_path / "p.gguf", tensors=decoded)
    with rlx.open_weights(tmp_path / "q.gguf") as weights:  # type: ignore[attr-defined]
        spec = weights.spec("model.layers.0.linear_attn.out_proj.weight")
        assert spec.shape == (64, 4 * size) and isinstance(spec, PackedSpec) == (size % 32 == 0)
    tokens = np.arange(8, dtype=np.int32)[None]
    packed, plain = (np.asarray(rlx.load(tmp_path / n, dtype="f32").logits(tokens)) for n in ("q.gguf", "p.gguf"))
    np.testing.assert_allclose(packed, plain, atol=3e-6 * np.abs(plain).max(), rtol=0)


@pytest.mark.parametrize("kind", ["MXFP4", pytest.param("Q8_0", marks=SLOW), pytest.param("F16", marks=SLOW)])
def test_packed_experts(kind: str, tmp_path: Path) -> None:
    """Experts of gpt-oss: MXFP4 in the layout of its checkpoint, other types decoded."""
    source = directory(
        tmp_path, "gpt_oss/window_v5", swiglu_limit=7.0, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    shapes = GptOssFlow(GptOssConfig.from_hf(json.loads((source / "config.json").read_text()))).shapes()
    rng = np.random.default_rng(4)
    weights = {key: rng.normal(0, 0.3, spec.shape).astype(np.float32) for key, spec in shapes.items()}
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    decoded = write_gguf(source, tmp_path / "q.gguf", Kind[kind])
    write_gguf(source, tmp_path / "p.gguf", tensors=decoded)
    with rlx.open_weights(tmp_path / "q.gguf") as opened:  # type: ignore[attr-defined]
        assert opened.has("model.layers.0.mlp.experts.gate_up_proj_blocks") == (kind == "MXFP4")
    tokens = np.arange(8, dtype=np.int32)[None]
    packed, plain = (np.asarray(rlx.load(tmp_path / n, dtype="f32").logits(tokens)) for n in ("q.gguf", "p.gguf"))
    np.testing.assert_allclose(packed, plain, atol=3e-6 * np.abs(plain).max(), rtol=0)


def test_experts_in_two_floating_types() -> None:
    """The gate and the up projection of a layer in F16 and BF16 are one weight, in F32."""
    stem = "model.layers.0.mlp.experts."
    gate, up = (np.arange(i, 17, 2, dtype=np.float32)[:8].reshape(1, 2, 4) for i in (0, 1))
    halves = {f"{stem}gate_proj.weight": gate.astype("f2"), f"{stem}up_proj.weight": up.astype(ml_dtypes.bfloat16)}
    values = GptOssExperts(rlx.open_weights(halves)).read(f"{stem}gate_up_proj")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.stack([gate, up], 2).reshape(1, 4, 4).swapaxes(1, 2))


def test_a_packed_half_of_experts_counts_as_decoded() -> None:
    stem = "model.layers.0.mlp.experts."
    specs = {f"{stem}gate_proj.weight": jax.ShapeDtypeStruct((1, 2, 32), "f2"),
             f"{stem}up_proj.weight": PackedSpec((1, 2, 32), np.dtype("f4"), "gguf_q8_0")}  # fmt: skip
    source: Any = SimpleNamespace(keys=lambda: tuple(specs), has=specs.__contains__, spec=specs.__getitem__)
    assert GptOssExperts(source).is_decoded(f"{stem}gate_up_proj")


POOLED = {
    "bert/bare_v5": (2, "cls", {}), "nomic_bert/bare_v5": (1, "mean", {"hidden_act": "silu"}),
    "qwen3/tied_v4": (3, "lasttoken", {}), "bert/bare_v5 ": (0, "", {}), "roberta/bare_v5": (1, "mean", {}),
}  # fmt: skip


@pytest.mark.parametrize("fixture", POOLED)
def test_embeddings(fixture: str, tmp_path: Path) -> None:
    """Vectors of an embedder, pooled as the metadata say; a decoder that pools has no head."""
    number, mode, fields = POOLED[fixture]
    source = directory(tmp_path, fixture.strip(), **fields)
    write_gguf(
        source, tmp_path / "m.gguf", more=lambda writer: writer.add_uint32(f"{writer.arch}.pooling_type", number)
    )
    if mode:
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": mode}))
        (source / "modules.json").write_text(json.dumps(modules("Transformer", "Pooling")))
    ours, theirs = rlx.load(tmp_path / "m.gguf", dtype="f32"), rlx.load(source, dtype="f32")
    assert isinstance(ours, rlx.Encoder)
    assert ours.pipeline.pooling == theirs.pipeline.pooling
    if fixture.startswith("roberta"):  # becomes a BERT with fewer positions
        texts = [[2, 7, 9, 4], [2, 8, 11, 6, 5, 3, 10]]
        want = np.asarray(theirs.embed(texts))
        np.testing.assert_allclose(np.asarray(ours.embed(texts)), want, atol=3e-6 * np.abs(want).max(), rtol=0)
    else:
        assert_same_model(ours, theirs, tolerance=1e-6)
    if mode == "cls":
        rlx.save(ours, tmp_path / "saved")
        assert_same_model(rlx.load(tmp_path / "saved", dtype="f32"), ours)


REFUSED: dict[str, tuple[str, dict[str, Any], type[RlxError], str]] = {
    "a score for ranking": ("bert/bare_v5", {"pooling_type": 4}, UnsupportedError, r"bert\.pooling_type"),
    "an encoder that is causal": ("bert/bare_v5", {"attention.causal": True}, UnsupportedError, r"attention\.causal"),
    "an encoder with a rope": ("bert/bare_v5", {"rope.freq_base": 2}, UnsupportedError, r"bert\.rope\.freq_base"),
    "heads of a state": ("mamba2/groups_v5", {"ssm.inner_size": 41}, ConfigError, r"inner_size: expected a multiple"),
    "widths of gpt-oss": ("gpt_oss/window_v5", {"expert_feed_forward_length": 4}, ConfigError, "another field says"),
    "value heads": ("qwen3_5_text/blocks_v5", {"ssm.state_size": 8}, ConfigError, "does not have 4 value heads"),
    "no key heads": ("qwen3_5_text/blocks_v5", {"ssm.group_count": 0}, ConfigError, "for 0 key heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_metadata(case: str, tmp_path: Path) -> None:
    fixture, fields, error, message = REFUSED[case]
    source = directory(tmp_path, fixture, **CASES[fixture])

    def more(writer: Any) -> None:
        for key, value in fields.items():
            name = f"{writer.arch}.{key}"
            writer.kv_data[0].pop(name, None)
            writer.add_bool(name, value) if isinstance(value, bool) else writer.add_uint32(name, value)

    write_gguf(source, tmp_path / "m.gguf", more=more)
    with pytest.raises(error, match=message):
        rlx.recipe_for(tmp_path / "m.gguf")


NOT_WRITTEN = ("qwen3_5_text", "gpt_oss", "mamba2", "bert", "nomic_bert")
WRITTEN = [case for case, (fixture, _) in DECODERS.items() if fixture.partition("/")[0] not in NOT_WRITTEN]


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
    fixture, fields = DECODERS[case]
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
