"""nomic-embed-text-v2-moe in plain NumPy, float64: token by token, expert by expert.

Source: `NomicBertModel` in nomic-ai/nomic-bert-2048, `modeling_hf_nomic_bert.py`. Layer i has experts if
i % moe_every_n_layers is 1. The router is a softmax over all experts, and the weights of the chosen ones are not
divided by their sum. `w1` and `w2` have the rows of all experts, `[E·F, H]`; one bias is added to the sum.
"""

from typing import Any

import numpy as np

from tests.oracles.numpy_reference import ACTIVATIONS, Array, Weights, layer_norm, linear, softmax

CONFIG: dict[str, Any] = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "gelu",
    "add_pooling_layer": False, "causal": False, "expert_choice_router": False, "ffn_div": 1, "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-5, "max_trained_positions": 48, "mlp_fc1_bias": True, "mlp_fc2_bias": True,
    "moe_every_n_layers": 2, "moe_impl": "megablocks", "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0,
    "moe_top_k": 2, "n_embd": 18, "n_head": 3, "n_inner": 13, "n_layer": 3, "n_positions": 48, "num_experts": 5,
    "num_shared_experts": 0, "pad_token_id": 1, "pad_vocab_to_multiple_of": 8, "prenorm": False, "qkv_proj_bias": True,
    "rotary_emb_base": 500, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_scaling_factor": None,
    "router_aux_loss_coef": 0.1, "type_vocab_size": 1, "use_rms_norm": None, "vocab_size": 48,
}  # fmt: skip


def weights_of(config: dict[str, Any], seed: int) -> Weights:
    """Random float32 weights under the keys of the checkpoint."""
    h, f, n = config["n_embd"], config["n_inner"], config["num_experts"]
    norm = {"weight": (h,), "bias": (h,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], h),
        "embeddings.token_type_embeddings.weight": (1, h),
        **{f"emb_ln.{k}": s for k, s in norm.items()},
    }
    for i in range(config["n_layer"]):
        dense = {"fc1.weight": (f, h), "fc1.bias": (f,), "fc2.weight": (h, f), "fc2.bias": (h,)}
        experts = {"router.layer.weight": (n, h), "experts.bias": (h,)}
        experts |= {"experts.mlp.w1": (n * f, h), "experts.mlp.w2": (n * f, h)}
        layer: dict[str, tuple[int, ...]] = {
            "attn.Wqkv.weight": (3 * h, h), "attn.Wqkv.bias": (3 * h,), "attn.out_proj.weight": (h, h),
            "attn.out_proj.bias": (h,), **{f"{name}.{k}": s for name in ("norm1", "norm2") for k, s in norm.items()},
            **{f"mlp.{k}": s for k, s in (experts if i % config["moe_every_n_layers"] == 1 else dense).items()},
        }  # fmt: skip
        shapes |= {f"encoder.layers.{i}.{k}": s for k, s in layer.items()}
    rng = np.random.default_rng(seed)
    ones = ("ln.weight", "norm1.weight", "norm2.weight")
    return {k: (rng.normal(size=s) * 0.4 + k.endswith(ones)).astype(np.float32) for k, s in shapes.items()}


def experts(x: Array, weights: Weights, config: dict[str, Any]) -> Array:
    """The experts of one layer, of tokens `[S, H]`."""
    scores = softmax(x @ weights["router.layer.weight"].T)
    up, down = (weights[f"experts.mlp.{k}"].reshape(config["num_experts"], -1, x.shape[1]) for k in ("w1", "w2"))
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        for e in np.argsort(-scores[t])[: config["moe_top_k"]]:
            out[t] += scores[t, e] * (ACTIVATIONS["gelu"](up[e] @ row) @ down[e])
    return out + weights["experts.bias"]


def states(weights: Weights, config: dict[str, Any], tokens: Any) -> Array:
    """Hidden states `[S, H]` of one text."""
    w = {k: v.astype(np.float64) for k, v in weights.items()}
    heads, eps, h = config["n_head"], config["layer_norm_epsilon"], config["n_embd"]

    def part(prefix: str) -> Weights:
        return {k.removeprefix(f"{prefix}."): v for k, v in w.items() if k.startswith(f"{prefix}.")}

    x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
    x, d = layer_norm(w, "emb_ln", x, eps), h // heads
    angles = np.arange(len(x))[:, None] * config["rotary_emb_base"] ** (-np.arange(0, d, 2) / d)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    for i in range(config["n_layer"]):
        p = part(f"encoder.layers.{i}")
        qkv = linear(p, "attn.Wqkv", x).reshape(len(x), 3, heads, d)
        q, k = (
            a * cos + np.concatenate([-a[..., d // 2 :], a[..., : d // 2]], -1) * sin for a in (qkv[:, 0], qkv[:, 1])
        )
        shares = softmax(np.einsum("snd,tnd->nst", q, k) / np.sqrt(d))
        context = np.einsum("nst,tnd->snd", shares, qkv[:, 2]).reshape(len(x), h)
        x = layer_norm(p, "norm1", x + linear(p, "attn.out_proj", context), eps)
        mlp = {k.removeprefix("mlp."): v for k, v in p.items() if k.startswith("mlp.")}
        if "router.layer.weight" in mlp:
            y = experts(x, mlp, config)
        else:
            y = linear(mlp, "fc2", ACTIVATIONS["gelu"](linear(mlp, "fc1", x)))
        x = layer_norm(p, "norm2", x + y, eps)
    return x
