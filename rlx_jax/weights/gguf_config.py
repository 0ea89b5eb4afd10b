"""`gguf_config`: the fields of `config.json` that the metadata of a GGUF file describes.

Fields of an architecture that have no row in the tables stay in the config under their own names, so that they are
refused by name, or passed over with `ignore_fields=`, as unknown fields of a `config.json` are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx_jax.errors import ConfigError, UnsupportedError, did_you_mean, quote, shown
from rlx_jax.weights.gguf_header import GgufHeader, MetadataValue, is_equal

ARCHITECTURE = "general.architecture"
# How an embedding model pools, by `pooling_type`; 0 is none, and 4, a score for ranking, is not supported.
POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}

# Fields of config.json: metadata key without the architecture → field.
_LAYERS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "context_length": "max_position_embeddings",
}  # fmt: skip
_ENCODER = _LAYERS | {
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
_DECODER = _LAYERS | {
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
_WINDOW = {"attention.sliding_window": "sliding_window"}
# Fields of config.json that are not whole numbers.
_REAL = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# The fields of each architecture.
_FIELDS: dict[str, dict[str, str]] = {
    "llama": _DECODER | _WINDOW,
    "mixtral": _DECODER | _EXPERTS | _WINDOW,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "qwen3moe": _DECODER | {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "qwen35": _DECODER | {
        "full_attention_interval": "full_attention_interval", "nextn_predict_layers": "mtp_num_hidden_layers",
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    },
    "gemma": _DECODER,
    "gemma2": _DECODER | _WINDOW | {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": _DECODER | _WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt-oss": _DECODER | _EXPERTS | _WINDOW | {"expert_feed_forward_length": "intermediate_size"},
    "mamba2": {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    "bert": _ENCODER,
    "nomic-bert": _ENCODER | {"attention.key_length": "head_dim"},
}  # fmt: skip
# Fields that a config has to have, where they are in the table of the architecture.
_REQUIRED = frozenset(
    """
    num_hidden_layers hidden_size num_attention_heads rms_norm_eps layer_norm_eps layer_norm_epsilon num_heads
    n_groups state_size conv_kernel linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads
    """.split()
)
# Fields of an architecture that the file does not store, as its implementations define them.
_FIXED: dict[str, dict[str, Any]] = {
    architecture: {"model_type": model_type, "architectures": [name], "hidden_act": activation}
    for architecture, model_type, name, activation in (
        ("llama", "llama", "LlamaForCausalLM", "silu"),
        ("mixtral", "mixtral", "MixtralForCausalLM", "silu"),
        ("qwen2", "qwen2", "Qwen2ForCausalLM", "silu"),
        ("qwen3", "qwen3", "Qwen3ForCausalLM", "silu"),
        ("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", "silu"),
        ("gemma", "gemma", "GemmaForCausalLM", "gelu_pytorch_tanh"),
        ("gemma2", "gemma2", "Gemma2ForCausalLM", "gelu_pytorch_tanh"),
        ("gemma3", "gemma3_text", "Gemma3ForCausalLM", "gelu_pytorch_tanh"),
        ("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", "silu"),
        ("gpt-oss", "gpt_oss", "GptOssForCausalLM", "silu"),
        ("mamba2", "mamba2", "Mamba2ForCausalLM", "silu"),
        ("bert", "bert", "BertModel", "gelu"),
        ("nomic-bert", "nomic_bert", "NomicBertModel", "silu"),
    )
}
_FIXED["qwen3moe"] |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Architectures without a rotary embedding, and encoders.
_WITHOUT_ROPE, _ENCODERS = ("mamba2", "bert"), ("bert", "nomic-bert")
# Fields that are compared with others or have no effect.
_READ_ELSEWHERE = frozenset(("vocab_size", "tensor_data_layout"))
_ROPE_FIELDS = frozenset(
    """
    rope.dimension_count attention.value_length rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned rope.scale_linear rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
    """.split()
)
# The same of some architectures. Text of Qwen 3.5 has one position, in all sections of the rotary embedding; the
# context of Mamba-2 has no limit.
_GEMMA_FIELDS = ("rope.freq_base_swa", "attention.sliding_window_pattern")
_MORE_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "gemma2": _GEMMA_FIELDS, "gemma3": _GEMMA_FIELDS, "qwen35": ("ssm.inner_size", "rope.dimension_sections"),
    "mamba2": ("ssm.inner_size", "context_length"),
}  # fmt: skip
# Fields that change nothing at these values.
_NEUTRAL: dict[str, tuple[bool | int | float, ...]] = {
    "attention.causal": (True,), "pooling_type": (0, *POOLING), "expert_count": (0,), "expert_used_count": (0,),
    "expert_shared_count": (0,), "expert_gating_func": (1,), "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0), "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,), "feed_forward_length": (0,), "attention.head_count": (0,),
}  # fmt: skip
_GEMMA3_PERIOD = 6  # every sixth layer of Gemma 3 attends over all tokens, if the file does not say so
_GEMMA3_LOCAL_THETA = 10_000.0  # base of the rotary embedding in its other layers, likewise


def architecture_of(metadata: Mapping[str, MetadataValue], where: str) -> str:
    """Return the architecture of a file: a name in `gguf_names.ARCHITECTURES`.

    Raises:
        ConfigError: the metadata has none. UnsupportedError: it is not supported.
    """
    name = metadata.get(ARCHITECTURE)
    if not is_equal(kind := metadata.get("general.type", "model"), "model"):
        raise UnsupportedError(f"{where}: general.type is {shown(kind)}, expected a model")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: {ARCHITECTURE}: expected the name of an architecture, got {shown(name)}")
    if name not in _FIXED or name == "mixtral":
        supported = [architecture for architecture in _FIXED if architecture != "mixtral"]
        raise UnsupportedError(
            f"{where}: GGUF architecture {quote(name)} is not supported{did_you_mean(name, supported)}; supported are "
            f"{', '.join(supported)}; for another model, load its Hugging Face directory"
        )
    has_experts = name == "llama" and not is_equal(metadata.get("llama.expert_count", 0), 0)
    return "mixtral" if has_experts else name


def gguf_config(header: GgufHeader, read: Callable[[str], np.ndarray[Any, Any]], where: str) -> dict[str, Any]:
    """Return the content of a `config.json` for a file.

    Args:
        header: the file's header.
        read: reads a tensor by name; only `rope_freqs.weight` is read.
        where: the file, for messages.

    Raises:
        ConfigError: a field is missing or contradicts another one. UnsupportedError: as `architecture_of`, or another
            scaling of the rotary embedding.
    """
    metadata = header.metadata
    architecture = architecture_of(metadata, where)
    prefix = f"{metadata[ARCHITECTURE]}."
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    table = _FIELDS[architecture]
    elsewhere = _READ_ELSEWHERE.union(_MORE_ELSEWHERE.get(architecture, ()))
    if architecture not in _WITHOUT_ROPE:
        elsewhere |= _ROPE_FIELDS
    neutral = _NEUTRAL | ({"attention.causal": (False,)} if architecture in _ENCODERS else {})
    config = {**_FIXED[architecture]}
    for key, value in fields.items():
        if key in table:
            number = _number(value, f"{where}: {prefix}{key}")
            if isinstance(number, float) and table[key] not in _REAL:
                raise ConfigError(f"{where}: {prefix}{key}: expected a whole number, got {shown(value)}")
            if config.get(table[key], number) != number:
                raise ConfigError(f"{where}: {prefix}{key} is {shown(value)}, another field says {config[table[key]]}")
            config[table[key]] = number
        elif key not in elsewhere and not any(is_equal(value, harmless) for harmless in neutral.get(key, ())):
            config[prefix + key] = value.tolist() if isinstance(value, np.ndarray) else value
    _complete(config, architecture, header, where)
    if architecture not in _WITHOUT_ROPE:
        head_dim = config.get("head_dim", config["hidden_size"] // max(config["num_attention_heads"], 1))
        config["rope_parameters"] = _rope(fields, header, read, head_dim, f"{where}: {prefix}")
        _check_lengths(config, head_dim, fields, f"{where}: {prefix}")
    if architecture in ("qwen35", "mamba2"):
        _complete_recurrent(config, architecture, fields, f"{where}: {prefix}")
    elif architecture in ("gemma2", "gemma3"):
        _complete_gemma(config, architecture, fields, f"{where}: {prefix}")
    elif architecture == "gpt-oss" and config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config


def _number(value: MetadataValue, where: str) -> int | float:
    """Return a number, or raise `ConfigError`; arrays with one value for each layer are not supported."""
    if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
        value = value.flat[0].item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: expected one number for all layers, got {shown(value)}")
    # float32 values print as short decimals, as they were written: 1e-05 and not 9.99999974e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _complete(config: dict[str, Any], architecture: str, header: GgufHeader, where: str) -> None:
    """Add the fields that follow from others and from the tensors."""
    prefix, tensors = f"{where}: {header.metadata[ARCHITECTURE]}", header.tensors
    for key, name in _FIELDS[architecture].items():
        if name in _REQUIRED and name not in config:
            raise ConfigError(f"{prefix}.{key} is missing")
    # Checked before anything has an entry for each layer.
    if config.get("num_hidden_layers", 0) > len(tensors):
        raise ConfigError(
            f"{prefix}.block_count is {config['num_hidden_layers']}, and the file has {len(tensors)} tensors"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{where}: there is no matrix token_embd.weight, the embedding of the tokens")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture in _ENCODERS:
        # Converters leave out the first rows of RoBERTa's positions, so that those of the table count from 0.
        for name, key in (("token_types", "type_vocab_size"), ("position_embd", "max_position_embeddings")):
            if f"{name}.weight" in tensors:
                config[key] = tensors[f"{name}.weight"].shape[0]
    elif architecture != "mamba2":
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // max(config["num_attention_heads"], 1))
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if architecture in ("llama", "qwen3", "qwen3moe", "qwen35", "gpt-oss"):
        config["attention_bias"] = any(f"blk.{i}.attn_q.bias" in tensors for i in range(config["num_hidden_layers"]))
    if architecture == "mamba2":
        config |= {"use_bias": "blk.0.ssm_in.bias" in tensors, "use_conv_bias": "blk.0.ssm_conv1d.bias" in tensors}
    config["dtype"] = "float32"


def _check_lengths(config: dict[str, Any], head_dim: int, fields: Mapping[str, MetadataValue], where: str) -> None:
    """Check fields that state a length which another field has too.

    Raises:
        UnsupportedError: a part of each head is rotated, or values have another size than keys.
    """
    if config["model_type"] == "qwen3_5_text":
        rotated = _number(fields.get("rope.dimension_count", head_dim), f"{where}rope.dimension_count")
        config["rope_parameters"]["partial_rotary_factor"] = rotated / max(head_dim, 1)
        fields = {**fields, "rope.dimension_count": head_dim}
    for key in ("rope.dimension_count", "attention.value_length"):
        if key in fields and not is_equal(value := fields[key], head_dim):
            raise UnsupportedError(f"{where}{key} is {shown(value)}, expected {head_dim}, the size of a key head")


def _complete_recurrent(
    config: dict[str, Any], architecture: str, fields: Mapping[str, MetadataValue], where: str
) -> None:
    """Add the fields of layers with a state: the size of a value head, and the layers without those of a draft module.

    Raises:
        ConfigError: the heads do not fill the layer.
    """
    heads = config["linear_num_value_heads" if architecture == "qwen35" else "num_heads"]
    inner = fields.get("ssm.inner_size")
    if isinstance(inner, bool) or not isinstance(inner, int) or heads < 1 or inner % heads:
        raise ConfigError(f"{where}ssm.inner_size: expected a multiple of {heads} heads, got {shown(inner)}")
    if architecture == "mamba2":
        ratio = inner / max(config["hidden_size"], 1)
        config |= {"head_dim": inner // heads, "expand": int(ratio) if ratio.is_integer() else ratio}
        return
    config["linear_value_head_dim"] = inner // heads
    config["num_hidden_layers"] = config.get("num_hidden_layers", 0) - config.setdefault("mtp_num_hidden_layers", 0)


def _rope(
    fields: Mapping[str, MetadataValue], header: GgufHeader, read: Callable[[str], np.ndarray[Any, Any]], head_dim: int,
    where: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the parameters of the rotary embedding.

    Raises:
        UnsupportedError: a scaling that is not supported.
    """
    file = where.rpartition(": ")[0]
    theta = _number(fields.get("rope.freq_base", 10_000.0), f"{where}rope.freq_base")
    scaling = fields.get("rope.scaling.type", "linear" if "rope.scale_linear" in fields else "none")
    if not isinstance(scaling, str):
        raise ConfigError(f"{where}rope.scaling.type: expected a text, got {shown(scaling)}")
    if "rope_freqs.weight" in header.tensors:
        if scaling != "none":
            raise UnsupportedError(
                f"{where}rope.scaling.type is {shown(scaling)} and there is a tensor rope_freqs.weight"
            )
        return {
            "rope_theta": theta,
            **_llama3_scaling(read("rope_freqs.weight"), theta, head_dim, file),
        }
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in fields else "rope.scale_linear"
    if factor_key not in fields:
        raise ConfigError(f"{where}rope.scaling.factor is missing, for rope.scaling.type {shown(scaling)}")
    parameters = {
        "rope_type": scaling, "rope_theta": theta, "factor": _number(fields[factor_key], where + factor_key),
    }  # fmt: skip
    if scaling == "yarn":
        key = "rope.scaling.original_context_length"
        parameters["original_max_position_embeddings"] = _number(fields.get(key, 0), where + key)
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in fields:
                parameters[name] = _number(fields[key], where + key)
    elif scaling != "linear":
        raise UnsupportedError(f"{where}rope.scaling.type is {shown(scaling)}; supported are none, linear and yarn")
    return parameters


def _llama3_scaling(factors: np.ndarray[Any, Any], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Return Llama 3's scaling of the rotary embedding whose divisors of the frequencies are `factors`.

    The file has the divisors alone. All published models have low and high factors of 1 and 4 and 8192 positions; the
    divisor of the lowest frequency is the factor. These are accepted if they give the file's divisors.
    """
    original, low, high = 8192, 1.0, 4.0
    factor = float(factors.max())
    expected = _llama3_factors(theta, head_dim, factor, low, high, original)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-5):
        raise UnsupportedError(
            f"{where}: rope_freqs.weight is not Llama 3's scaling by {factor} of {original} positions; load the "
            "Hugging Face directory of the same model"
        )
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def _llama3_factors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> np.ndarray[Any, Any]:
    """Return the divisors of the frequencies in Llama 3's scaling, float32 `[head_dim / 2]`."""
    with np.errstate(all="ignore"):  # a base or a factor of 0 gives NaN, which equals nothing
        wavelengths = 2 * np.pi * np.float64(theta) ** (np.arange(0, head_dim, 2, dtype=np.float64) / max(head_dim, 1))
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / np.float64(factor) + smooth)).astype(np.float32)


def _complete_gemma(config: dict[str, Any], architecture: str, fields: Mapping[str, MetadataValue], where: str) -> None:
    """Add the fields of Gemma 2 and 3 that a file does not have: layer types, score scale, local rotary embedding."""
    layers, heads = config.get("num_hidden_layers", 0), config["num_attention_heads"]
    # The largest models scale scores by the size of a hidden state's share of a head.
    is_largest = (architecture, layers) in (("gemma2", 46), ("gemma3", 62))
    config["query_pre_attn_scalar"] = config["hidden_size"] // max(heads, 1) if is_largest else config["head_dim"]
    period = 2 if architecture == "gemma2" else _GEMMA3_PERIOD
    pattern = fields.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_ and len(pattern) == layers:
        is_local = [bool(value) for value in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        is_local = [(i + 1) % pattern != 0 for i in range(layers)]
    else:
        raise ConfigError(f"{where}attention.sliding_window_pattern: expected a period, or {layers} bools")
    config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in is_local]
    if architecture == "gemma3":
        theta = _number(fields.get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA), f"{where}rope.freq_base_swa")
        local = {"rope_type": "default", "rope_theta": theta}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


# -- writing -----------------------------------------------------------------------------------

# Architectures of files that are written: decoders whose layers all have attention, with weights as in the checkpoint.
_WRITTEN = ("llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3")
# Fields that files of a family do not store: the base of the rotary embedding if config.json leaves it out.
_DEFAULT_THETA = {"mixtral": 1e6, "gemma3": 1e6}


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Return the metadata of a model, by the tables of `gguf_config`; what they cannot describe is not checked here.

    Args:
        config: the fields of `config.json`, with the family's defaults for those that it leaves out.

    Raises:
        UnsupportedError: there is no GGUF architecture for the `model_type`, or none for the rotary embedding,
            or for a window.
    """
    architectures = {_FIXED[name]["model_type"]: name for name in _WRITTEN} | {"mistral": "llama"}
    model_type = config.get("model_type")
    if model_type not in architectures:
        raise UnsupportedError(
            f"save: model_type {shown(model_type)} is not written as GGUF; supported are {', '.join(architectures)}"
        )
    architecture, head_dim = architectures[model_type], config["head_dim"]
    if architecture == "mixtral" and config.get("sliding_window") is not None:
        raise UnsupportedError(
            f"save: sliding_window is {shown(config['sliding_window'])}, which readers of GGUF ignore in files of "
            "Mixtral, as in others of the architecture llama; save a Hugging Face directory, format='safetensors'"
        )
    fields: dict[str, MetadataValue] = {
        key: float(config[field]) if field in _REAL else config[field]
        for key, field in _FIELDS[architecture].items() if config.get(field) is not None
    }  # fmt: skip
    fields |= {
        "vocab_size": config["vocab_size"], "rope.dimension_count": head_dim, "attention.value_length": head_dim,
    }  # fmt: skip
    rope = _rope_parameters(config)
    if architecture == "gemma3":
        fields["rope.freq_base_swa"] = float(rope.get("sliding_attention", {}).get("rope_theta", _GEMMA3_LOCAL_THETA))
    theta, positions = _DEFAULT_THETA.get(architecture, 1e4), config["max_position_embeddings"]
    fields |= _rope_fields(rope.get("full_attention", rope), theta, positions)
    if windows := config.get("windows"):
        local = np.array([window is not None for window in windows])
        default = [(i + 1) % (2 if architecture == "gemma2" else _GEMMA3_PERIOD) != 0 for i in range(len(local))]
        if architecture in ("gemma2", "gemma3") and local.tolist() != default:
            fields["attention.sliding_window_pattern"] = local
        if architecture in ("gemma2", "gemma3") and local.any():
            fields["attention.sliding_window"] = next(window for window in windows if window is not None)
    prefix = "llama" if architecture == "mixtral" else architecture
    return {ARCHITECTURE: prefix, **{f"{prefix}.{key}": value for key, value in fields.items()}}


def stated_fields(metadata: Mapping[str, MetadataValue], architecture: str) -> dict[str, Any]:
    """Return the fields of `config.json` in the metadata of a file that is written; 0 for those that it leaves out."""
    prefix = metadata[ARCHITECTURE]
    return {field: metadata.get(f"{prefix}.{key}", 0) for key, field in _FIELDS[architecture].items()}


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of a config; configs of transformers 4 have the same under other names."""
    base = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    if config.get("rope_parameters"):
        return {**base, **config["rope_parameters"]}
    scaling = dict(config.get("rope_scaling") or {})
    rope = {"rope_type": scaling.pop("type", "default"), **scaling, **base}
    if config.get("rope_local_base_freq") is None:
        return rope
    return {"full_attention": rope, "sliding_attention": {"rope_theta": config["rope_local_base_freq"]}}


def _rope_fields(rope: Mapping[str, Any], default_theta: float, max_positions: int) -> dict[str, MetadataValue]:
    """Return the metadata of a rotary embedding. Llama 3's scaling is in a tensor, `rope_factors`."""
    kind = rope.get("rope_type", "default")
    fields: dict[str, MetadataValue] = {"rope.freq_base": float(rope.get("rope_theta") or default_theta)}
    if kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        original = rope.get("original_max_position_embeddings") or max_positions
        fields |= {"rope.scaling.original_context_length": original} if kind == "yarn" else {}
    elif kind not in ("default", "llama3"):
        raise UnsupportedError(f"save: rope_type {shown(kind)} is not written as GGUF")
    return fields


def rope_factors(config: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """Return the tensor `rope_freqs.weight`; None if the rotary embedding is not scaled as Llama 3's."""
    rope = _rope_parameters(config)
    if rope.get("rope_type") != "llama3":
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (float(rope[name]) for name in names)
    return _llama3_factors(float(rope.get("rope_theta") or 1e4), config["head_dim"], factor, low, high, original)
