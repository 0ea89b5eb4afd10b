"""Tiny models of every family, whose sizes eight devices divide, all but the vocabulary; and meshes of devices."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.models import vit

V = 61
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 5}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 8, "n_positions": 256}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 6,
    "n_groups": 2, "expand": 2, "conv_kernel": 3, "layer_norm_epsilon": 1e-2,
}  # fmt: skip
DECODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (rlx.Llama32Flow, {}),
    "gpt2": (rlx.Gpt2Flow, GPT2),
    "llama tied": (rlx.Llama32Flow, TIED),
    "mistral": (rlx.MistralFlow, WINDOW),
    "qwen2": (rlx.Qwen2Flow, TIED),
    "qwen3": (rlx.Qwen3Flow, {}),
    "mixtral": (rlx.MixtralFlow, WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        rlx.GptOssFlow, WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 2.0},
    ),
    "qwen3 experts": (rlx.Qwen3MoeFlow, EXPERTS),
    "qwen35": (rlx.Qwen35Flow, DELTA),
    "mamba2": (rlx.Mamba2Flow, MAMBA2),
    "gemma": (rlx.GemmaFlow, GELU | TIED | {"model_type": "gemma"}),
    "gemma2": (
        rlx.GemmaFlow,
        GELU | TIED | WINDOW
        | {"model_type": "gemma2", "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    ),
}  # fmt: skip
BERT = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")} | {"type_vocab_size": 2}
ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (rlx.BertFlow, BERT),
    "roberta": (rlx.RobertaFlow, BERT),
    "mpnet": (rlx.MPNetFlow, {k: v for k, v in BERT.items() if k != "type_vocab_size"}),
    "clip text": (rlx.ClipTextFlow, {k: v for k, v in BERT.items() if k != "type_vocab_size"} | {"eos_token_id": 7}),
    "nomic": (rlx.NomicFlow, BERT | {"hidden_act": "silu"}),
}
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "image_size": 12, "patch_size": 4}
WIDE = TOWER | {"intermediate_size": 48}
WORDS = {k: v for k, v in WIDE.items() if k not in ("image_size", "patch_size")}
WORDS |= {"vocab_size": V, "max_position_embeddings": 16, "eos_token_id": 7}
REGISTERS = {"model_type": "dinov2_with_registers", "num_register_tokens": 2, "use_swiglu_ffn": True}
NOMIC: dict[str, Any] = {"n_embd": 32, "n_head": 8, "n_layer": 2, "n_inner": 256.0, "img_size": 12, "patch_size": 4}
NOMIC |= {"layer_norm_epsilon": 1e-6, "use_rotary_pos_emb": True, "ref_feat_shape": [2, 2]}
IMAGES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "vit": (rlx.ViTFlow, WIDE, {}),
    "dinov2": (rlx.Dinov2Flow, TOWER | REGISTERS, {}),
    "dinov2 original": (rlx.Dinov2Flow, TOWER, {"layout": vit.ORIGINAL}),
    "nomic vision": (rlx.NomicVisionFlow, NOMIC, {}),
    "clip": (rlx.ClipFlow, {"text_config": WORDS, "vision_config": WIDE, "projection_dim": 24}, {}),
    "siglip": (rlx.SiglipFlow, {"text_config": WORDS, "vision_config": WIDE}, {}),
}
"""Those that read images: the recipe, its config, and what else it is given."""


def recipe(family: str, **changes: Any) -> Any:
    """The recipe of a family without a checkpoint."""
    if family in ENCODERS:
        encoder, sizes = ENCODERS[family]
        return encoder.for_prefill(sizes | changes)
    if family in IMAGES:
        tower, config, given = IMAGES[family]
        return dataclasses.replace(tower.for_prefill(config), **given)
    flow, own = DECODERS[family]
    return flow.for_prefill((own if family in ("gpt2", "mamba2") else SIZES | own) | changes)


@functools.cache
def weights(family: str, *changes: tuple[str, Any]) -> dict[str, np.ndarray]:
    """Random weights by checkpoint key: vectors about 1, matrices that keep the scale, no number a special case."""
    made = recipe(family, **dict(changes))
    specs = made.shapes()
    rng = np.random.default_rng(0)
    normal = {k: rng.normal(0.0, (s.shape or (1,))[-1] ** -0.5, s.shape) for k, s in specs.items()}
    return {k: np.asarray(0.3 * v + 1 if np.ndim(v) < 2 else 1.5 * v, np.float32) for k, v in normal.items()}


def mesh(kinds: str, devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """So many devices along axes of these names: 2 along each but the last, which has the rest."""
    names = kinds.split()
    sizes = [2] * (len(names) - 1)
    shape = (*sizes, devices // math.prod(sizes))
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), names, axis_types=(kind,) * len(names))


RING_VOCAB = 19
RING_SIZES = {
    "vocab_size": RING_VOCAB, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


def windowed(window: int, everywhere: bool = False) -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """Two Llama layers with a window, in the first or `everywhere`, and random weights."""
    masks = (f"sliding:{window}", f"sliding:{window}" if everywhere else "causal")
    specs = [blocks.LlamaDecoderSpec(num_heads=4, head_dim=4, num_kv_heads=2, mask=m) for m in masks]
    flow = (
        rlx.ModelFlow("windows").input("input_ids", ("batch", "seq"), dtype="int32")
        .rope_tables(blocks.RopeTables.theta(4)).token_embed()
        .repeat_layers(2, lambda i: blocks.llama_prefill_layer_fused(i, specs[i]))
        .final_norm(1e-6).lm_head(RING_VOCAB, 12, tied=False)
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = rlx.Llama32Flow.for_prefill(RING_SIZES).shapes()
    normal = {k: rng.normal(0, 0.4 * len(s.shape) - 0.4, s.shape) for k, s in shapes.items()}
    return flow, {k: (v + (v.ndim == 1)).astype("f4") for k, v in normal.items()}
