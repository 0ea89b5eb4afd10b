"""GGUF files: loading against the Hugging Face directory of the same model, parts, and malformed files.

The files are written by gguf-py. `write_gguf` does to a model what llama.cpp's converter does.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import (
    ConfigError,
    GgufError,
    MissingFileError,
    NonFiniteWeightError,
    RequestError,
    UnsupportedError,
)
from rlx_jax.io.ggml import BLOCKS, BlockArrays
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.weights import execute, tensor_file
from rlx_jax.weights.gguf import open_gguf
from rlx_jax.weights.gguf_header import read_gguf_header
from rlx_jax.weights.views import SourceView
from tests.oracles.checkpoints import FIXTURES, edit_json, edit_tensors, edited
from tests.oracles.comparing import assert_same_model
from tests.oracles.gguf_files import write_gguf


def directory(tmp_path: Path, fixture: str, **fields: Any) -> Path:
    """A copy of a recorded checkpoint whose config has other values in these fields."""
    return edited(FIXTURES / fixture, tmp_path / "hf", fields)


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama/gqa_plain_attnbias_v5", {}),
    "llama, biases": ("llama/mha_linear_biases_v4", {}),
    "llama 3": ("llama/gqa_tied_llama3_v5", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral/full_v4", {}),
    "mixtral": ("mixtral/window_v5", {}),
    "qwen2": ("qwen2/tied_v4", {}),
    "qwen3": ("qwen3/tied_v4", {}),
    "gemma": ("gemma/tied_v4", {}),
    "gemma2": ("gemma2/caps_v5", {"query_pre_attn_scalar": None}),
    "gemma3": (
        "gemma3_text/deep_v5",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "qwen35": ("qwen3_5_text/blocks_v5", {}),
    "gpt-oss": ("gpt_oss/window_v5", {"swiglu_limit": 7.0}),
    "mamba2": ("mamba2/groups_v5", {}),
    "yarn": (
        "mistral/full_v4",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "rope_scaling": None,
            "rope_theta": 10000.0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_directory(case: str, tmp_path: Path) -> None:
    """A file in F32 is the same program over the same parameters; of one also logits and greedy tokens are compared."""
    fixture, fields = CASES[case]
    if "query_pre_attn_scalar" in fields:
        fields = {"query_pre_attn_scalar": json.loads((FIXTURES / fixture / "config.json").read_text())["head_dim"]}
    source = directory(tmp_path, fixture, **fields)
    write_gguf(source, tmp_path / "m.gguf")
    theirs, ours = rlx.load(source, dtype="f32"), rlx.load(tmp_path / "m.gguf", dtype="f32")
    assert_same_model(ours, theirs, tolerance=1e-6)
    if case == "llama 3":
        tokens = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
        want = np.asarray(theirs.logits(tokens))
        np.testing.assert_allclose(np.asarray(ours.logits(tokens)), want, atol=3e-6 * np.abs(want).max(), rtol=0)
        assert ours.generate([[1, 2, 3]], max_new_tokens=6) == theirs.generate([[1, 2, 3]], max_new_tokens=6)
    if case == "mixtral":
        rlx.save(ours, tmp_path / "saved")
        assert_same_model(rlx.load(tmp_path / "saved", dtype="f32"), ours)


def assert_same_file(path: Path, other: Path) -> None:
    """Two files have one config, and are the same model."""
    assert rlx.recipe_for(path).config == rlx.recipe_for(other).config
    assert_same_model(*(rlx.load(p, dtype="f32") for p in (path, other)))


def random_checkpoint(path: Path, hidden: int) -> dict[str, Any]:
    """A Llama whose rows are whole blocks, with random weights in float32."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": hidden // 4, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens": (40, hidden), "lm_head": (40, hidden), f"{layer}self_attn.q_proj": (hidden, hidden),
        f"{layer}self_attn.k_proj": (hidden // 2, hidden), f"{layer}self_attn.v_proj": (hidden // 2, hidden),
        f"{layer}self_attn.o_proj": (hidden, hidden), f"{layer}mlp.gate_proj": (hidden, hidden),
        f"{layer}mlp.up_proj": (hidden, hidden), f"{layer}mlp.down_proj": (hidden, hidden),
        "model.norm": (hidden,), f"{layer}input_layernorm": (hidden,), f"{layer}post_attention_layernorm": (hidden,),
    }  # fmt: skip
    weights = {f"{k}.weight": rng.standard_normal(s).astype(np.float32) * (s[-1] ** -0.5) for k, s in shapes.items()}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    return config


def random_mixture(path: Path) -> None:
    """A Qwen 3 whose layers all have experts, with rows of whole blocks."""
    random_checkpoint(path, 64)
    edit_json(path / "config.json", {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    })  # fmt: skip
    rng, layer = np.random.default_rng(3), "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {f"mlp.experts.{e}.{name}_proj": s for e in range(3) for name, s in
              (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32)))}  # fmt: skip
    shapes |= {"mlp.gate": (3, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
    drawn = {f"{layer}{k}.weight": rng.standard_normal(s).astype(np.float32) / 4 for k, s in shapes.items()}
    edit_tensors(path, lambda weights: {k: w for k, w in weights.items() if ".mlp." not in k} | drawn)


OTHER_TYPES = ("BF16", "Q4_1", "Q5_0", "Q8_0")


@pytest.mark.slow
def test_experts_of_qwen3(tmp_path: Path) -> None:
    """All layers have experts, with packed weights: a slice of a stacked tensor for each expert."""
    random_mixture(tmp_path / "hf")
    tokens = np.random.default_rng(1).integers(0, 40, (2, 7)).astype(np.int32)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf")
    assert_same_model(rlx.load(tmp_path / "m.gguf", dtype="f32"), rlx.load(tmp_path / "hf", dtype="f32"))
    decoded = write_gguf(tmp_path / "hf", tmp_path / "q.gguf", Kind.Q8_0)
    write_gguf(tmp_path / "hf", tmp_path / "p.gguf", tensors=decoded)
    packed, plain = (np.asarray(rlx.load(tmp_path / n, dtype="f32").logits(tokens)) for n in ("q.gguf", "p.gguf"))
    np.testing.assert_allclose(packed, plain, rtol=0, atol=1e-6)  # two programs


@pytest.mark.parametrize(
    "kind", ["Q4_0", "MXFP4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("F16", "Q5_1", *OTHER_TYPES))]
)
def test_packed_types(kind: str, tmp_path: Path) -> None:
    """Equal the directory with the numbers that gguf-py decodes; `open_weights` offers the bytes."""
    random_checkpoint(tmp_path / "hf", 64)
    decoded = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind[kind])
    write_gguf(tmp_path / "hf", tmp_path / "plain.gguf", tensors=decoded)
    ours, twin = (rlx.load(tmp_path / name, dtype="f32") for name in ("m.gguf", "plain.gguf"))
    tokens = np.random.default_rng(1).integers(0, 40, (2, 7)).astype(np.int32)
    # Two programs, whose sums XLA rounds alike on some CPUs and not on others.
    np.testing.assert_allclose(np.asarray(ours.logits(tokens)), np.asarray(twin.logits(tokens)), rtol=0, atol=1e-6)
    with rlx.open_weights(tmp_path / "m.gguf") as source, rlx.open_weights(tmp_path / "plain.gguf") as plain:  # type: ignore[attr-defined]
        assert source.keys() == plain.keys() and "model.layers.0.self_attn.q_proj.weight" in source.keys()
        spec = source.spec("model.layers.0.self_attn.q_proj.weight")
        assert spec.shape == (64, 64) and isinstance(spec, PackedSpec) == (kind not in ("F16", "BF16"))
        rows = source.read("model.layers.0.self_attn.q_proj.weight", (slice(3, 40, 5),))
        np.testing.assert_array_equal(rows, source.read("model.layers.0.self_attn.q_proj.weight")[3:40:5])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_packed_rows_in_bands(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are the same when their rows, which the file may have in another order, are read a few at a time."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind[kind])
    at_once = rlx.load(tmp_path / "m.gguf", dtype="f32").model.params
    monkeypatch.setattr(tensor_file, "_BAND_BYTES", 200)
    in_bands = rlx.load(tmp_path / "m.gguf", dtype="f32").model.params
    assert at_once is not None and in_bands is not None and at_once.keys() == in_bands.keys()
    for name, values in at_once.items():
        np.testing.assert_array_equal(np.asarray(in_bands[name]), np.asarray(values), name)


@pytest.mark.parametrize("shape", [(64, 68), (128, 34), (4352,)])
def test_blocks_in_place(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A source writes the parts of blocks to arrays, if it has blocks of that shape; else it returns the blocks."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind.Q8_0)
    scales = np.zeros(128, np.uint16)
    with open_gguf(str(tmp_path / "m.gguf")) as source:
        blocks = source.read(key := "model.layers.0.mlp.up_proj.weight")
        values = source.read_into(key, None, out := BlockArrays(BLOCKS["gguf_q8_0"], shape, [("scales", scales)]))
    assert blocks.shape == (64, 68) and out.filled == (shape == blocks.shape)
    if out.filled:
        np.testing.assert_array_equal(scales, blocks.reshape(-1, 34)[:, :2].copy().view(np.uint16)[:, 0])
    else:
        np.testing.assert_array_equal(values, blocks)


class CopyingSource(SourceView):
    """A user's source, whose `read_into` is as docs/weights.md has it: `out` is an array or None."""

    def read_into(self, key: str, index: Any, out: Any) -> Any:
        values = self.source.read(key, index)
        if out is None or out.shape != values.shape or out.dtype != values.dtype:
            return values
        out[...] = values
        return out


def test_a_user_source_of_blocks(tmp_path: Path) -> None:
    """Its arrays are split into the parameters as those of the package's own sources are."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", path := tmp_path / "m.gguf", Kind.Q8_0)
    params, expected = (
        rlx.compile(rlx.recipe_for(path), source).params for source in (CopyingSource(rlx.open_weights(path)), path)
    )
    assert params is not None and expected is not None and any(name.endswith(".scales") for name in params)
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), np.asarray(values), name)


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    """Loading counts the values of a block whose scale is NaN, or takes them as they are."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", path := tmp_path / "m.gguf", Kind.Q8_0)
    with open_gguf(str(path)) as source, open(path, "r+b") as file:
        file.seek(source.header.tensors["blk.0.ffn_up.weight"].stored.start)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(NonFiniteWeightError, match="32 NaN"):
        rlx.load(path)
    params = rlx.load(path, on_nonfinite="ignore").model.params
    assert params is not None
    scales = [np.asarray(values).view(np.float16) for name, values in params.items() if name.endswith(".scales")]
    assert sum(int(np.isnan(values).sum()) for values in scales) == 1


def test_memory_of_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that packed arrays share is not larger than the parameters."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind.Q4_0)
    new_bytes = Mock(wraps=execute._new_bytes)
    monkeypatch.setattr(execute, "_new_bytes", new_bytes)
    rlx.load(tmp_path / "m.gguf")
    assert max(call.args[0] for call in new_bytes.call_args_list) <= (tmp_path / "m.gguf").stat().st_size


def test_convert(tmp_path: Path) -> None:
    """The command writes a Hugging Face directory, decoded; without a dtype it says that the weights are packed."""
    random_checkpoint(tmp_path / "hf", 64)
    decoded = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind.Q8_0)
    arguments = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "out")]
    assert cli.main(arguments) != 0 and not (tmp_path / "out").exists()
    assert cli.main([*arguments, "--dtype", "f32"]) == 0
    write_gguf(tmp_path / "hf", tmp_path / "plain.gguf", tensors=decoded)
    assert_same_model(*(rlx.load(tmp_path / name, dtype="f32") for name in ("plain.gguf", "out")))


def test_metadata_that_changes_the_model(tmp_path: Path) -> None:
    """A field that no table has is refused by name, or ignored where the user says so."""
    random_checkpoint(tmp_path / "hf", 64)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", more=lambda writer: writer.add_float32("llama.logit_scale", 2.0))
    with pytest.raises(UnsupportedError, match=r"llama\.logit_scale"):
        rlx.load(tmp_path / "m.gguf")
    assert rlx.load(tmp_path / "m.gguf", ignore_fields=["llama.logit_scale"])
    write_gguf(
        tmp_path / "hf",
        tmp_path / "k.gguf",
        more=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    )
    with pytest.raises(ConfigError, match=r"rope\.scaling\.factor"):
        rlx.load(tmp_path / "k.gguf")
    write_gguf(tmp_path / "hf", tmp_path / "e.gguf", leave=("llama.attention.layer_norm_rms_epsilon",))
    with pytest.raises(ConfigError, match=r"layer_norm_rms_epsilon is missing"):
        rlx.load(tmp_path / "e.gguf")
    write_gguf(tmp_path / "hf", tmp_path / "a.gguf", more=lambda writer: writer.add_type("adapter"))
    with pytest.raises(UnsupportedError, match=r"general\.type is 'adapter'"):
        rlx.load(tmp_path / "a.gguf")


def test_files_of_other_years(tmp_path: Path) -> None:
    """A tensor for each expert, and metadata that change nothing."""
    source = directory(tmp_path, "mixtral/window_v5")
    tensors = write_gguf(source, tmp_path / "m.gguf")
    old: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        stem, _, tail = name.partition("_exps.")
        old |= {f"{stem}.{i}.{tail}": part for i, part in enumerate(array)} if tail else {name: array}
    old["blk.0.attn_rot_embd.weight"] = np.ones(5, np.float32)

    def more(writer: Any) -> None:
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_causal_attention(True)

    write_gguf(source, tmp_path / "old.gguf", tensors=old, more=more)
    assert_same_file(tmp_path / "old.gguf", tmp_path / "m.gguf")


def test_the_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever opens the same file, until it is replaced."""
    reads: list[str] = []

    def counted(read: Any, size: int, where: str) -> Any:
        reads.append(where)
        return read_gguf_header(read, size, where)

    monkeypatch.setattr("rlx_jax.weights.gguf.read_gguf_header", counted)
    path = tmp_path / "m.gguf"
    random_checkpoint(tmp_path / "hf", 32)
    write_gguf(tmp_path / "hf", path)
    recipe = rlx.recipe_for(path)
    assert len(reads) == 1
    write_gguf(tmp_path / "hf", path, Kind.Q8_0)
    assert isinstance(rlx.open_weights(path).spec("lm_head.weight"), PackedSpec)
    assert len(reads) == 2 and recipe is not None


def test_parts_and_files_of_a_directory(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", 64)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_gguf(tmp_path / "hf", folder / "whole.gguf")
    write_gguf(tmp_path / "hf", folder / "m.gguf", split=4)
    names = sorted(path.name for path in folder.glob("m-*"))
    assert len(names) > 2
    ours = rlx.load(folder, file=names[0], dtype="f32")
    assert_same_model(ours, rlx.load(folder / "whole.gguf", dtype="f32"))
    with pytest.raises(GgufError, match="not the first part; open m-00001"):
        rlx.load(folder / names[1])
    (folder / names[2]).unlink()
    with pytest.raises(MissingFileError, match=names[2]):
        rlx.load(folder / names[0])
    with pytest.raises(MissingFileError, match="did you mean 'whole.gguf'"):
        rlx.load(folder, file="whol.gguf")
    with pytest.raises(RequestError, match=r"file: expected the name of a \.gguf file"):
        rlx.load(folder, file="config.json")
    with pytest.raises(RequestError, match="is a file"):
        rlx.load(folder / "whole.gguf", file="whole.gguf")
