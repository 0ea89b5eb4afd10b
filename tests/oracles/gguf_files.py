"""Write a Hugging Face checkpoint of a decoder as a GGUF file, with gguf-py's names of tensors and metadata.

What llama.cpp's converter does to a model is written out here once more: it is no part of the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA, "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip
"""By model_type."""


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order of llama.cpp's rotary embedding."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))


def tensors_of(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the file by name, in float32."""
    model_type = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[model_type], config["num_hidden_layers"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(
        weights.items(), key=lambda item: [int(p) if p.isdigit() else 0 for p in item[0].split(".")]
    ):
        array = value.astype(np.float32)
        if ".experts." in key:
            head, _, tail = key.partition(".experts.")
            experts.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(array)
            continue
        if ARCHITECTURES[model_type] is gguf.MODEL_ARCH.LLAMA and ".q_proj." in key:
            array = permuted(array, heads)
        if ARCHITECTURES[model_type] is gguf.MODEL_ARCH.LLAMA and ".k_proj." in key:
            array = permuted(array, kv_heads)
        if model_type.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        out[name] = array
    for key, arrays in experts.items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        out[name] = np.stack(arrays)
    return out


def scaled_frequencies(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """The divisors of Llama 3's rotary frequencies, one by one."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / head_dim)
        original, low, high = (
            rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    directory: Path, path: Path, kind: Kind = Kind.F32, *, tensors: dict[str, np.ndarray] | None = None,
    more: Callable[[Any], None] | None = None, split: int = 0, leave: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Write a checkpoint directory as one file. Matrices whose rows are whole blocks get the type `kind`, others F32.

    Args:
        tensors: tensors of the file to write in place of those of the directory.
        more: adds metadata.
        split: how many tensors a part has; 0 for one file.
        leave: metadata keys that are not written.

    Returns:
        The tensors that the file stands for, decoded by gguf-py, by name.
    """
    config = json.loads((directory / "config.json").read_text())
    weights: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= safetensors.numpy.load_file(file)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split)
    add_config(writer, config)
    tensors = tensors_of(config, weights) if tensors is None else tensors
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = scaled_frequencies(rope, config.get("head_dim") or 0)
    for key in leave:
        del writer.kv_data[0][key]
    if more is not None:
        more(writer)
    decoded = {}
    for name, array in tensors.items():
        fits = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "gate_inp" not in name
        used = kind if fits else Kind.F32
        data = array if used == Kind.F32 else gguf.quants.quantize(array, used)
        writer.add_tensor(name, data, raw_dtype=used)
        decoded[name] = array if used == Kind.F32 else gguf.quants.dequantize(data, used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def add_config(writer: Any, config: dict[str, Any]) -> None:
    """Add the metadata of the architecture."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = rope if rope.get("rope_type") == "linear" else config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] == "gemma3_text":
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["model_type"] in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config["model_type"] == "mixtral":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
