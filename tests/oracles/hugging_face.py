"""Tiny random checkpoints made by `transformers`, and what `transformers` computes from them.

torch and transformers are imported when a function needs them, so that this module can be imported without.
"""

import functools
import importlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "gemma", "gemma2")
V4_SPARSE_DROPS = ("head_dim", "num_key_value_heads", "mlp_bias", "pretraining_tp", "attention_dropout", "rope_theta")


@dataclass(frozen=True)
class Checkpoint:
    """How to make one checkpoint directory."""

    architecture: str
    """A class of transformers."""
    config: dict[str, Any]
    """Keywords of its config class, in the spelling of transformers 5."""
    seed: int = 0
    spelling: str = "v5"
    """`v5` as transformers 5 writes it, `v4` as transformers 4 did, `sparse` as the oldest files do."""
    dtype: str = "float32"
    shard: str | None = None
    """Largest size of a shard."""
    buffers: dict[str, list[int] | list[float]] = field(default_factory=dict)
    """Tensors that old checkpoints carry and nobody reads."""
    bare: bool = False
    """Keys without the name of the model inside, as the first files of some families have them."""


def modules() -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(1)  # models this small only wait for each other's threads
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def randomise(model: Any, seed: int) -> None:
    """Weights that show a mistake: no norm scales by 1, no bias is 0, no activation is tiny. Gemma's norms add 1."""
    torch, _ = modules()
    rng = np.random.default_rng(seed)
    centre = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a table of sines
                continue
            shape = tuple(parameter.shape)
            if ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight"):
                value = rng.uniform(centre - 0.5, centre + 0.5, shape)
            elif name.endswith("bias"):
                value = rng.normal(0.0, 0.3, shape)
            elif "conv1d" in name:  # heads of length nearly 0 are not made ones of length 1: that would show rounding
                value = rng.normal(0.0, 1.0, shape)
            else:
                value = rng.normal(0.0, 0.2, shape)
                if not centre and "embed" in name:  # they are scaled by √H
                    value /= shape[1] ** 0.5
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))


def write(checkpoint: Checkpoint, directory: Path) -> None:
    """Save a random model of this description as transformers lays it out."""
    torch, transformers = modules()
    cls = getattr(transformers, checkpoint.architecture)
    model = cls(cls.config_class(**checkpoint.config))
    randomise(model, checkpoint.seed)
    model.to(getattr(torch, checkpoint.dtype))
    sharding = {"max_shard_size": checkpoint.shard} if checkpoint.shard else {}
    model.save_pretrained(directory, **sharding)
    if checkpoint.buffers or checkpoint.bare:
        _edit_tensors(checkpoint, model.base_model_prefix, directory)
    if checkpoint.spelling != "v5":
        respell(checkpoint, directory)


def respell(checkpoint: Checkpoint, directory: Path) -> None:
    """Write `config.json` in the spelling of the checkpoint."""
    file = directory / "config.json"
    config = old_spelling(json.loads(file.read_text("utf-8")), sparse=checkpoint.spelling == "sparse")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    (directory / "generation_config.json").unlink(missing_ok=True)


def _edit_tensors(checkpoint: Checkpoint, prefix: str, directory: Path) -> None:
    torch_io = importlib.import_module("safetensors.torch")
    torch, _ = modules()
    file = directory / "model.safetensors"
    tensors = torch_io.load_file(file)
    if checkpoint.bare:
        tensors = {key.removeprefix(f"{prefix}."): value for key, value in tensors.items()}
    for key, values in checkpoint.buffers.items():
        tensors[key] = torch.tensor(values)
    torch_io.save_file(tensors, file, {"format": "pt"})


def old_spelling(config: dict[str, Any], *, sparse: bool) -> dict[str, Any]:
    """The same config as transformers 4 wrote it; `sparse`: without what its oldest files do not have."""
    config = dict(config)
    config["transformers_version"] = "4.46.3"
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"].startswith("gemma"):
        config |= {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}
        config.pop("use_bidirectional_attention", None)
    if config["model_type"] == "gemma3_text":
        rope, kinds = config.pop("rope_parameters"), config.pop("layer_types")
        config["rope_theta"] = rope["full_attention"].pop("rope_theta")
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["rope_scaling"] = None if rope["full_attention"]["rope_type"] == "default" else rope["full_attention"]
        config.pop("_sliding_window_pattern")
        config["sliding_window_pattern"] = [*kinds, "full_attention"].index("full_attention") + 1
    elif config["model_type"] == "nomic_bert":
        return first_nomic(config)
    elif config["model_type"] == "mpnet":
        config.pop("tie_word_embeddings")
    elif config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
        for key in ("add_cross_attention", "tie_word_embeddings", "pad_token_id"):
            config.pop(key)
    elif config["model_type"] in CAUSAL:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope["rope_type"]
        if kind == "linear":  # the oldest spelling of all
            rope = {"type": "linear", "factor": rope["factor"]}
        config["rope_scaling"] = None if kind == "default" else rope
        if config["model_type"] == "gemma2":  # layers alternated
            config.pop("layer_types")
        if config["model_type"] == "qwen3_moe":
            config |= {"num_experts": config.pop("num_local_experts"), "max_window_layers": 1}
        elif "max_window_layers" in config:  # which layers slide followed from it; a window stood there, used or not
            config.pop("layer_types")
            config["sliding_window"] = config["sliding_window"] or 4096
    else:
        for key in ("add_cross_attention", "is_decoder", "tie_word_embeddings", "bos_token_id", "eos_token_id"):
            config.pop(key, None)
        config["position_embedding_type"] = "absolute"
        config["gradient_checkpointing"] = False
    config["_name_or_path"] = "models/tiny"
    if sparse:
        config = {k: v for k, v in config.items() if k not in V4_SPARSE_DROPS}
    return config


def first_nomic(config: dict[str, Any]) -> dict[str, Any]:
    """A NomicBERT's config as its first implementation, which is not in transformers, wrote it."""
    kept = {k: config[k] for k in ("architectures", "model_type", "type_vocab_size")}
    names = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers"}
    names |= {"n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
    kept |= {first: config[name] for first, name in names.items()}
    off = "causal mlp_fc1_bias mlp_fc2_bias parallel_block parallel_block_tied_norm prenorm qkv_proj_bias".split()
    off += ["rotary_emb_interleaved", "reorder_and_upcast_attn", "use_rms_norm"]
    kept |= dict.fromkeys(off, False) | dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"))
    kept |= {"vocab_size": config["vocab_size"] - 3, "pad_vocab_size_multiple": 4, "max_trained_positions": 16}
    kept |= {"rotary_emb_base": config["rope_parameters"]["rope_theta"], "rotary_emb_fraction": 1.0}
    kept |= {"activation_function": "swiglu", "layer_norm_epsilon": config["layer_norm_eps"], "use_flash_attn": True}
    kept |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "fused_bias_fc": True}
    return kept | {"auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}}


def load(directory: Path, auto_class: str, dtype: str = "float32") -> Any:
    """The model in `directory` with eager attention, as transformers reads it."""
    torch, transformers = modules()
    cls = getattr(transformers, auto_class)
    model, info = cls.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True
    )
    model.set_experts_implementation("eager")  # the others ask for widths that are multiples of 16 bytes
    assert not info["missing_keys"] or auto_class == "AutoModel", info
    if model.config.model_type == "gpt_oss":  # some releases of transformers ignore the fields, and have constants
        for layer in model.model.layers:
            layer.mlp.experts.alpha = getattr(model.config, "swiglu_alpha", 1.702)
            layer.mlp.experts.limit = getattr(model.config, "swiglu_limit", 7.0)
    return model.eval()


def llama_rows(model: Any, rows: Sequence[Sequence[int]]) -> list[tuple[Floats, Floats]]:
    """Last hidden state (after the final norm) and logits of each row, computed alone."""
    return [(hidden[0], logits[0]) for hidden, logits in (llama_batch(model, np.array([row])) for row in rows)]


def hidden_states(model: Any, tokens: npt.NDArray[Any]) -> list[Floats]:
    """All hidden states of a batch `[B, S]`: the embeddings, then one for each layer."""
    torch, _ = modules()
    with torch.no_grad():
        result = model(torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True)
    return [state.numpy() for state in result.hidden_states]


def llama_batch(model: Any, tokens: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """The same for a batch `[B, S]` without padding, in one call."""
    torch, _ = modules()
    with torch.no_grad():
        result = model(torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True, use_cache=False)
    return result.hidden_states[-1].float().numpy(), result.logits.float().numpy()


def cached(model: Any, tokens: npt.NDArray[Any]) -> dict[str, Floats]:
    """Logits of a batch `[B, S]` and the keys and values of every layer `[B, S, K·D]`, windows not applied.

    The names are those of the library's outputs: `logits`, `kv.0.k`, `kv.0.v`, `kv.1.k` …
    """
    torch, transformers = modules()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        result = model(torch.from_numpy(tokens.astype(np.int64)), past_key_values=cache, use_cache=True)
    found = {"logits": result.logits.numpy()}
    for i, layer in enumerate(cache.layers):
        for kind, heads in (("k", layer.keys), ("v", layer.values)):
            found[f"kv.{i}.{kind}"] = heads.transpose(1, 2).flatten(2).numpy()
    return found


def bf16_logits(directory: Path, tokens: npt.NDArray[Any]) -> Floats:
    """Logits `[B, S, V]` of the checkpoint computed in bfloat16, as float32."""
    return llama_batch(load(directory, "AutoModelForCausalLM", "bfloat16"), tokens)[1]


def config_of(family: str, fields: dict[str, Any]) -> Any:
    """What transformers makes of a config."""
    _, transformers = modules()
    return transformers.AutoConfig.for_model(family, **fields)


def yarn(config: Any, layer_type: str | None = None) -> tuple[Floats, float]:
    """Inverse frequencies and attention factor of a config whose rope is YaRN's."""
    modules()
    rope = importlib.import_module("transformers.modeling_rope_utils")
    freqs, factor = rope.ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)
    return freqs.numpy(), float(factor)


def llama_greedy(model: Any, prompt: Sequence[int], count: int, clear: float = 0.0) -> tuple[list[int], float]:
    """`count` greedy tokens, the row recomputed for each; and the least relative lead of a winner over the second.

    It stops early where a winner leads by less than `clear`.
    """
    ids, lead = [int(t) for t in prompt], np.inf
    for _ in range(count):
        logits = llama_rows(model, [ids])[0][1][-1]
        second, first = np.sort(logits)[-2:]
        lead = min(lead, float((first - second) / np.abs(logits).max()))
        if lead < clear:
            break
        ids.append(int(np.argmax(logits)))
    return ids[len(prompt) :], lead


def generate(
    model: Any, prompt: Sequence[int], count: int, eos: int | list[int] | None = None, **options: Any
) -> list[int]:
    """New tokens of transformers' own `generate`, greedy, with its cache."""
    torch, _ = modules()
    mask = torch.ones((1, len(prompt)), dtype=torch.long)
    greedy = {"do_sample": False, "max_new_tokens": count, "eos_token_id": eos, "pad_token_id": 0}
    out = model.generate(torch.tensor([list(prompt)]), attention_mask=mask, **greedy, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def clear_prompts(
    model: Any, lengths: Sequence[int], count: int, seed: int, *, distinct: int = 9
) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts whose greedy continuations are decided clearly and have `distinct` different tokens or more.

    A continuation is clear if each winner leads by 1/500 of the largest logit, which rounding cannot turn.
    """
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    tokens: list[list[int]] = []
    for length in lengths:
        for _ in range(200):
            prompt = [draw.randrange(model.config.vocab_size) for _ in range(length)]
            out, lead = llama_greedy(model, prompt, count, clear=2e-3)
            if lead > 2e-3 and len(set(out)) >= distinct:
                prompts.append(prompt)
                tokens.append(out)
                break
        else:
            raise RuntimeError(f"no clear prompt of {length} tokens")
    return prompts, tokens


def bert_hidden(model: Any, tokens: npt.NDArray[Any], **inputs: npt.NDArray[Any]) -> Floats:
    """Last hidden state `[B, S, H]`; optional inputs by transformers' own names."""
    torch, _ = modules()
    arguments = {name: torch.from_numpy(np.asarray(value, np.int64)) for name, value in inputs.items()}
    with torch.no_grad():
        result = model(torch.from_numpy(tokens.astype(np.int64)), **arguments)
    hidden: Floats = result.last_hidden_state.numpy()
    return hidden


def random_sizes(draw: random.Random) -> dict[str, Any]:
    """What the configurations of all decoder-only families have, drawn: grouped heads, odd widths, tied or not."""
    kv = draw.choice([1, 2, 3])
    heads = kv * draw.choice([1, 2, 3])
    config: dict[str, Any] = {"vocab_size": draw.randint(50, 200)}
    config |= {"hidden_size": heads * draw.randint(-(-24 // heads), 72 // heads)}
    config |= {"intermediate_size": draw.randint(20, 90), "num_hidden_layers": draw.randint(1, 4)}
    config |= {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 2 * draw.randint(2, 9)}
    config |= {"rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2]), "tie_word_embeddings": draw.random() < 0.5}
    positions = draw.choice([64, 100, 2048])
    return config | {"max_position_embeddings": positions, "bos_token_id": None, "eos_token_id": None}


def random_rope(draw: random.Random) -> dict[str, Any]:
    """Rope parameters, drawn."""
    rope: dict[str, Any] = {"rope_theta": draw.choice([10000.0, 500000.0, 1000.0]), "rope_type": "default"}
    kind = draw.choice(["default", "linear", "llama3", "yarn"])
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": draw.choice([2.0, 3.5])}
    elif kind == "llama3":
        rope |= {"rope_type": "llama3", "factor": draw.choice([8.0, 32.0]), "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": draw.choice([16, 32, 64])}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": draw.choice([4.0, 16.0]), "truncate": draw.random() < 0.5}
        rope |= {"original_max_position_embeddings": draw.choice([24, 64, 300])}
        rope |= draw.choice([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 1.5}])
        rope |= draw.choice([{}, {}, {"attention_factor": 1.3}])
    return rope


def random_storage(draw: random.Random) -> dict[str, Any]:
    """How the checkpoint is stored, drawn."""
    dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
    return {"spelling": draw.choice(["v4", "v5"]), "dtype": dtype, "shard": draw.choice([None, "60kB"])}


def random_qwen(family: str, seed: int) -> Checkpoint:
    """A Qwen 2 or 3 configuration drawn from `seed`; layers slide from one on, by their types, or not at all."""
    draw = random.Random(seed)
    config = random_sizes(draw) | {"rope_parameters": random_rope(draw)}
    layers = config["num_hidden_layers"]
    config |= {"use_sliding_window": draw.random() < 0.7, "sliding_window": draw.choice([2, 5])}
    config |= {"max_window_layers": draw.randint(0, layers)}
    if family == "qwen3":
        config |= {"attention_bias": draw.random() < 0.5}
    storage = random_storage(draw)
    if config["use_sliding_window"] and draw.random() < 0.5:
        config |= {"layer_types": [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]}
        storage["spelling"] = "v5"
    return Checkpoint(f"{family.capitalize()}ForCausalLM", config, seed=seed, **storage)


def random_decoder(architecture: str, options: Callable[[random.Random, int], dict[str, Any]], seed: int) -> Checkpoint:
    """A configuration drawn from `seed`, with a family's options of so many layers; windows are shorter than most rows,
    or there are none."""
    draw = random.Random(seed)
    config = random_sizes(draw) | {"rope_parameters": random_rope(draw)}
    config |= options(draw, config["num_hidden_layers"])
    return Checkpoint(architecture, config, seed=seed, **random_storage(draw))


def mixtral_options(draw: random.Random, layers: int) -> dict[str, Any]:
    """As many experts as a token goes to, or more."""
    sizes = random_experts(draw)
    return sizes | {"sliding_window": draw.choice([None, 3, 7]), "intermediate_size": draw.randint(5, 30)}


def qwen3_moe_options(draw: random.Random, layers: int) -> dict[str, Any]:
    """Experts in all layers, in some by number, or by a list."""
    return random_experts(draw) | {
        "use_sliding_window": draw.random() < 0.5, "sliding_window": draw.choice([2, 5]),
        "attention_bias": draw.random() < 0.5, "norm_topk_prob": draw.random() < 0.5,
        "decoder_sparse_step": draw.choice([1, 1, 2]), "moe_intermediate_size": draw.randint(5, 30),
        "mlp_only_layers": [i for i in range(layers) if draw.random() < 0.3],
    }  # fmt: skip


def gpt_oss_options(draw: random.Random, layers: int) -> dict[str, Any]:
    """Clamps that bite."""
    sizes, kinds = random_experts(draw), [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    sizes |= {"sliding_window": draw.choice([2, 5]), "intermediate_size": draw.randint(5, 30)}
    sizes |= draw.choice([{}, {"layer_types": kinds}]) | {"attention_bias": draw.random() < 0.6}
    return sizes | {"swiglu_limit": draw.choice([0.5, 7.0]), "swiglu_alpha": draw.choice([1.702, 1.702, 0.8])}


def random_experts(draw: random.Random) -> dict[str, Any]:
    """How many experts there are and how many a token goes to, drawn."""
    experts = draw.randint(1, 9)
    return {"num_local_experts": experts, "num_experts_per_tok": draw.randint(1, experts)}


def random_gemma(family: str, seed: int) -> Checkpoint:
    """A Gemma 1, 2 or 3 configuration drawn from `seed`; windows are shorter than most rows, softcaps bite."""
    draw = random.Random(seed)
    config = random_sizes(draw) | {"attention_bias": draw.random() < 0.4, "tie_word_embeddings": draw.random() < 0.7}
    storage, rope = random_storage(draw), random_rope(draw)
    if family == "gemma":
        return Checkpoint("GemmaForCausalLM", config | {"rope_parameters": rope}, seed=seed, **storage)
    config |= {"num_hidden_layers": draw.randint(2, 4), "query_pre_attn_scalar": draw.choice([5, 11, 24])}
    config |= {"sliding_window": draw.choice([1, 3, 6]), "final_logit_softcapping": draw.choice([None, 0.8, 2.0])}
    kinds = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(config["num_hidden_layers"])]
    if draw.random() < 0.5:  # as transformers 4 could not say
        config |= {"layer_types": kinds}
        storage["spelling"] = "v5"
    if family == "gemma2":
        config |= {"rope_parameters": rope, "attn_logit_softcapping": draw.choice([None, 1.5, 6.0])}
        return Checkpoint("Gemma2ForCausalLM", config, seed=seed, **storage)
    config |= {"sliding_window_pattern": draw.choice([2, 3, 6])}
    rope.pop("truncate", None)  # which this class does not read
    local = {"rope_theta": draw.choice([10000.0, 50.0]), "rope_type": "default"}
    config |= {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return Checkpoint("Gemma3ForCausalLM", config, seed=seed, **storage)


def random_gpt2(seed: int) -> Checkpoint:
    """A GPT-2 configuration drawn from `seed`."""
    draw = random.Random(seed)
    heads = draw.choice([1, 3, 4])
    config = {
        "vocab_size": draw.randint(50, 200), "n_embd": heads * draw.randint(-(-24 // heads), 60 // heads),
        "n_inner": draw.choice([None, draw.randint(20, 90)]), "n_layer": draw.randint(1, 4), "n_head": heads,
        "n_positions": draw.choice([80, 100, 256]), "layer_norm_epsilon": draw.choice([1e-6, 1e-5, 1e-2]),
        "activation_function": draw.choice(["gelu_new", "gelu_new", "gelu", "relu"]),
        "scale_attn_weights": draw.random() < 0.7, "scale_attn_by_inverse_layer_idx": draw.random() < 0.4,
        "reorder_and_upcast_attn": draw.random() < 0.4, "tie_word_embeddings": (tied := draw.random() < 0.6),
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    storage = random_storage(draw) if tied else random_storage(draw) | {"spelling": "v5"}
    bare = storage["shard"] is None and draw.random() < 0.5
    return Checkpoint("GPT2LMHeadModel", config, seed=seed, bare=bare, **storage)


def random_qwen35(seed: int) -> Checkpoint:
    """A Qwen 3.5 configuration drawn from `seed`: key and value heads, their widths, the window and the pattern."""
    draw = random.Random(seed)
    config = random_sizes(draw) | {"attention_bias": draw.random() < 0.4, "num_hidden_layers": draw.randint(2, 5)}
    groups = draw.choice([1, 2, 3])
    config |= {"linear_num_key_heads": groups, "linear_num_value_heads": groups * draw.choice([1, 2, 3])}
    config |= {"linear_key_head_dim": draw.randint(7, 13), "linear_value_head_dim": draw.randint(2, 9)}
    # A small epsilon would show rounding: what a head reads of its state may nearly cancel, before it is normalised.
    config |= {"rms_norm_eps": draw.choice([1e-2, 3e-2])}
    config |= {"linear_conv_kernel_dim": draw.randint(2, 5), "head_dim": 4 * draw.randint(1, 4)}
    factor, theta = draw.choice([0.5, 1.0]), draw.choice([10000.0, 1000.0])
    rope = {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": factor}
    config |= {"rope_parameters": rope}
    kinds = [draw.choice(["full_attention", "linear_attention"]) for _ in range(config["num_hidden_layers"])]
    if draw.random() < 0.7:
        config |= {"layer_types": ["linear_attention", *kinds[1:]]}
    return Checkpoint("Qwen3_5ForCausalLM", config, seed=seed, **random_storage(draw) | {"spelling": "v5"})


def random_mamba2(seed: int) -> Checkpoint:
    """A Mamba-2 configuration drawn from `seed`: groups, widths, the window, which biases there are."""
    draw = random.Random(seed)
    groups = draw.choice([1, 2, 3])
    heads, width = groups * draw.choice([1, 2, 4]), draw.randint(3, 6)
    expand = draw.choice([1, 2]) if heads * width % 2 == 0 else 1
    config = {
        "vocab_size": draw.randint(50, 200), "hidden_size": heads * width // expand, "expand": expand,
        "num_hidden_layers": draw.randint(1, 4), "num_heads": heads, "head_dim": width,
        "state_size": draw.randint(3, 9), "n_groups": groups, "conv_kernel": draw.randint(2, 5),
        "use_bias": draw.random() < 0.5, "use_conv_bias": draw.random() < 0.7, "chunk_size": 16,
        "layer_norm_epsilon": draw.choice([1e-3, 1e-2]), "tie_word_embeddings": draw.random() < 0.5,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return Checkpoint("Mamba2ForCausalLM", config, seed=seed, **random_storage(draw) | {"spelling": "v5"})


OPTIONS: dict[str, tuple[str, Callable[[random.Random, int], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", lambda draw, _: {
        "attention_bias": draw.random() < 0.4, "mlp_bias": draw.random() < 0.4}),
    "mistral": ("MistralForCausalLM", lambda draw, _: {"sliding_window": draw.choice([None, 1, 3, 7])}),
    "mixtral": ("MixtralForCausalLM", mixtral_options), "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe_options),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss_options),
}  # fmt: skip
RANDOM: dict[str, Callable[[int], Checkpoint]] = {
    **{family: functools.partial(random_decoder, *options) for family, options in OPTIONS.items()},
    **{family: functools.partial(random_qwen, family) for family in ("qwen2", "qwen3")},
    **{family: functools.partial(random_gemma, family) for family in ("gemma", "gemma2", "gemma3_text")},
    "gpt2": random_gpt2, "qwen3_5_text": random_qwen35, "mamba2": random_mamba2,
}  # fmt: skip


def random_bert(seed: int) -> Checkpoint:
    """A BERT configuration drawn from `seed`."""
    draw = random.Random(seed)
    heads = draw.choice([1, 3, 4, 7])
    config = {
        "vocab_size": draw.randint(50, 200), "hidden_size": heads * draw.randint(4, 12),
        "intermediate_size": draw.randint(20, 90), "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads, "max_position_embeddings": draw.randint(20, 60),
        "type_vocab_size": draw.choice([1, 2, 4]), "layer_norm_eps": draw.choice([1e-12, 1e-7, 1e-3]),
        "hidden_act": "gelu",
    }  # fmt: skip
    name = draw.choice(["BertModel", "BertForMaskedLM", "BertForTokenClassification", "BertForPreTraining"])
    spelling, dtype = draw.choice(["v4", "v5"]), draw.choice(["float32", "float32", "bfloat16"])
    return Checkpoint(name, config, seed=seed, spelling=spelling, dtype=dtype, shard=draw.choice([None, "60kB"]))
