"""GGUF files of recurrent models, gpt-oss, encoders and embedding models, against their Hugging Face directories.

As tests/test_gguf.py, which has the logits of the decoders.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax.errors import ConfigError, RlxError, UnsupportedError
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.models.mixture import GptOssConfig, GptOssFlow
from rlx_jax.weights.gguf import GptOssExperts
from tests.oracles import mtp_drafts
from tests.oracles.comparing import assert_same_model
from tests.oracles.gguf_files import write_gguf
from tests.test_gguf import directory
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
