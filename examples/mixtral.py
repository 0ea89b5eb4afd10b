"""A mixture of experts from scratch: Mixtral's flow with the keys of transformers, which generates with a cache.

    python examples/mixtral.py path/to/mixtral "The sky is"

The path is a directory with config.json, safetensors and tokenizer.json.
"""

import argparse
import json
from pathlib import Path

import rlx_jax as rlx


def experts(emit, x, prefix, config):
    """Route each token to its top-k experts, and sum their SwiGLU outputs with the router's weights."""
    logits = emit.linear(x, f"{prefix}.gate.weight")
    shares, ids = emit.route(logits, top_k=config["num_experts_per_tok"])

    def stack(name):  # separate tensors in the checkpoint, one array in the model
        return rlx.blocks.WeightStack(f"{prefix}.experts.{{}}.{name}.weight", config["num_local_experts"])

    return emit.experts(x, shares, ids, gate=stack("w1"), up=stack("w3"), down=stack("w2"))


def layer(prefix, config):
    """Return one layer: attention and experts, each after a norm and with a residual connection."""
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = (config.get("rope_parameters") or config)["rope_theta"]  # transformers 5, or 4

    def write(emit, x):
        with emit.scope("self_attn"):
            n = emit.rms_norm(x, f"{prefix}.input_layernorm.weight", eps=eps)
            q, k, v = (emit.linear(n, f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv")
            rope = emit.rotary(emit.positions(x), head_dim=head_dim, theta=theta)
            context = emit.attention(q, k, v, heads=heads, causal=True, window=config["sliding_window"], rope=rope)
            x = x + emit.linear(context, f"{prefix}.self_attn.o_proj.weight")
        with emit.scope("mlp"):
            n = emit.rms_norm(x, f"{prefix}.post_attention_layernorm.weight", eps=eps)
            return x + experts(emit, n, f"{prefix}.block_sparse_moe", config)

    return rlx.blocks.Custom(write, "layer")


def mixtral(directory):
    """Return the flow of a checkpoint: tokens `[batch, seq]` → logits `[batch, seq, vocabulary]`."""
    config = json.loads(Path(directory, "config.json").read_text("utf-8"))
    assert config["hidden_act"] == "silu", config["hidden_act"]
    return (
        rlx.ModelFlow("mixtral")
        .with_weights(directory)
        .input("tokens", ("batch", "seq"), dtype="int32")
        .embed("model.embed_tokens.weight")
        .repeat_layers(config["num_hidden_layers"], lambda i: layer(f"model.layers.{i}", config))
        .rms_norm("model.norm.weight", eps=config["rms_norm_eps"])
        .linear("lm_head.weight")
        .output("logits")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("prompt")
    args = parser.parse_args()
    lm = rlx.CausalLM(mixtral(args.directory), tokenizer=args.directory)
    print(lm.generate(args.prompt, max_new_tokens=20))
    print(lm.report().experts)  # the implementation that was selected
