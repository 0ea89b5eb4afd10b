"""Write a Hugging Face checkpoint of a decoder as a GGUF file, with gguf-py's names of tensors and metadata.

What llama.cpp's converter does to a model is written out here once more: it is no part of the `gguf` package.
"""

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
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "roberta": gguf.MODEL_ARCH.BERT,
    "bert": gguf.MODEL_ARCH.BERT, "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT, "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip
"""By model_type."""


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order of llama.cpp's rotary embedding."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))


def tiled(array: np.ndarray, config: dict[str, Any], size: int, axis: int = 0) -> np.ndarray:
    """Value heads of Qwen 3.5, adjacent for each key head, in the order in which those of all key heads alternate."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    array = np.moveaxis(array, axis, 0)
    split = array.reshape(groups, heads // groups, size, *array.shape[1:])
    return np.ascontiguousarray(np.moveaxis(split.swapaxes(0, 1).reshape(array.shape), 0, axis))


def changed_delta(key: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """A weight of a Gated DeltaNet layer as the file has it."""
    size = config["linear_value_head_dim"]
    module = key.partition(".linear_attn.")[2].removesuffix(".weight")
    if module in ("in_proj_qkv", "conv1d"):
        keys = 2 * config["linear_key_head_dim"] * config["linear_num_key_heads"]
        return np.concatenate([array[:keys], tiled(array[keys:], config, size)])
    if module == "out_proj":
        return tiled(array, config, size, 1)
    return array if module == "norm" else tiled(array, config, size if module == "in_proj_z" else 1)


def changed(key: str, array: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A weight of the newer architectures as the file has it: by the keys that gguf-py maps."""
    model_type = config["model_type"]
    if ".linear_attn." in key:
        array = changed_delta(key, array, config)
    is_norm = key.endswith("norm.weight") or ".pre_fc_norm_" in key
    if is_norm and model_type == "qwen3_5_text" and not key.endswith("linear_attn.norm.weight"):
        array = array + 1
    if key.endswith(".A_log"):
        array = -np.exp(array)
    if key.endswith(".dt_bias"):
        key = key.replace(".dt_bias", ".dt_proj.bias")
    if "conv1d.weight" in key:
        array = array[:, 0]
    if model_type == "roberta" and key.endswith("position_embeddings.weight"):
        array = array[config["pad_token_id"] + 1 :]
    if model_type == "mamba2" and key.endswith((".A_log", ".D")):
        array = array[:, None]
    if model_type == "mamba2" and key.endswith("mixer.norm.weight"):
        array = array.reshape(config["n_groups"], -1)
    if key.endswith("sinks"):
        key += ".weight"
    stem, _, module = key.partition(".mlp.experts.")
    if model_type == "gpt_oss" and module:
        name, kind = module.removesuffix("_bias"), "bias" if module.endswith("_bias") else "weight"
        rows = array if kind == "bias" else array.swapaxes(1, 2)
        halves = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]} if name == "gate_up_proj" else {name: rows}
        return {f"{stem}.mlp.experts.{half}.{kind}": np.ascontiguousarray(part) for half, part in halves.items()}
    draft = {"fc": "eh_proj", "norm": "shared_head.norm", "pre_fc_norm_hidden": "hnorm"}
    draft["pre_fc_norm_embedding"] = "enorm"
    layer = f"model.layers.{config.get('num_hidden_layers')}."
    if key.startswith("mtp.layers.0."):
        key = layer + key.removeprefix("mtp.layers.0.")
    elif key.startswith("mtp."):
        key = f"{layer}{draft[key.split('.')[1]]}.weight"
    return {key: array}


def tensors_of(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the file by name, in float32."""
    model_type = config["model_type"]
    layers = config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0)
    names = gguf.get_tensor_name_map(ARCHITECTURES[model_type], layers)
    heads, kv_heads = config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0)
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for key, value in sorted(
        weights.items(), key=lambda item: [int(p) if p.isdigit() else 0 for p in item[0].split(".")]
    ):
        array = value.astype(np.float32)
        if ".experts." in key and model_type != "gpt_oss":
            head, _, tail = key.partition(".experts.")
            experts.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(array)
            continue
        if ARCHITECTURES[model_type] is gguf.MODEL_ARCH.LLAMA and ".q_proj." in key:
            array = permuted(array, heads)
        if ARCHITECTURES[model_type] is gguf.MODEL_ARCH.LLAMA and ".k_proj." in key:
            array = permuted(array, kv_heads)
        if model_type.startswith("gemma") and key.endswith("norm.weight"):
            array = array + 1
        for new, part in changed(key, array, config).items():
            if "pooler." not in new and not new.endswith("position_ids"):
                out[tensor_name(names, new)] = part
    return out | {tensor_name(names, key): np.stack(arrays) for key, arrays in experts.items()}


def tensor_name(names: Any, key: str) -> str:
    """The name of a tensor by gguf-py; those of Qwen 3.5's draft module are in a later version of it."""
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    for module in ("eh_proj", "enorm", "hnorm", "shared_head.norm"):
        if name is None and f".{module}." in key:
            name = f"blk.{key.split('.')[2]}.nextn.{module.replace('.', '_')}.weight"
    assert name is not None, key
    return str(name)


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


def add_encoder(writer: Any, config: dict[str, Any]) -> None:
    """Add the metadata of an encoder."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if config["model_type"] == "nomic_bert":
        writer.add_key_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def add_mamba2(writer: Any, config: dict[str, Any]) -> None:
    """Add the metadata of Mamba-2."""
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def add_qwen35(writer: Any, config: dict[str, Any], head_dim: int) -> None:
    """Add the metadata of Qwen 3.5."""
    drafts = config.get("mtp_num_hidden_layers", 0)
    writer.kv_data[0].pop("qwen35.rope.dimension_count")
    writer.kv_data[0].pop("qwen35.block_count")
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    writer.add_rope_dimension_count(int(head_dim * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if drafts:
        writer.add_nextn_predict_layers(drafts)


def add_config(writer: Any, config: dict[str, Any]) -> None:
    """Add the metadata of the architecture."""
    if config["model_type"] in ("bert", "roberta", "nomic_bert", "mamba2"):
        return add_mamba2(writer, config) if config["model_type"] == "mamba2" else add_encoder(writer, config)
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
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if config["model_type"] == "qwen3_5_text":
        add_qwen35(writer, config, head_dim)
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
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
