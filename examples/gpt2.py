"""GPT-2 from scratch: a custom flow with the checkpoint keys of transformers, which generates with a cache.

    python examples/gpt2.py path/to/gpt2 "The sky is"

The path is a directory with config.json, safetensors and tokenizer.json.
"""

import argparse
import json
from pathlib import Path

import rlx_jax as rlx


def norm(emit, x, key, eps):
    return emit.layer_norm(x, f"{key}.weight", f"{key}.bias", eps=eps)


def linear(emit, x, key):
    return emit.linear(x, f"{key}.weight", f"{key}.bias", transpose=False)  # GPT-2 stores [in, out]


def layer(prefix, config):
    """Return one layer: attention and a feed-forward block, each after a norm and with a residual connection."""
    eps = config["layer_norm_epsilon"]

    def write(emit, x):
        with emit.scope("attn"):
            q, k, v = emit.split(
                linear(emit, norm(emit, x, f"{prefix}.ln_1", eps), f"{prefix}.attn.c_attn"), 3, axis=-1
            )
            context = emit.attention(q, k, v, heads=config["n_head"], causal=True)
            x = x + linear(emit, context, f"{prefix}.attn.c_proj")
        with emit.scope("mlp"):
            inner = emit.gelu_tanh(linear(emit, norm(emit, x, f"{prefix}.ln_2", eps), f"{prefix}.mlp.c_fc"))
            return x + linear(emit, inner, f"{prefix}.mlp.c_proj")

    return rlx.blocks.Custom(write, "layer")


def gpt2(directory):
    """Return the flow of a checkpoint: tokens `[batch, seq]` → logits `[batch, seq, vocabulary]`."""
    config = json.loads(Path(directory, "config.json").read_text("utf-8"))
    assert config["activation_function"] == "gelu_new", config["activation_function"]
    source = rlx.open_weights(directory)
    p = "transformer." if source.has("transformer.wte.weight") else ""  # older checkpoints have no prefix

    def positions(emit, x):
        return x + emit.embed(f"{p}wpe.weight", emit.positions(x))

    buffers = [key for key in source.keys() if key.endswith((".attn.bias", ".attn.masked_bias"))]
    return (
        rlx.ModelFlow("gpt2")
        .with_weights(source, leave=buffers)
        .input("tokens", ("batch", "seq"), dtype="int32")
        .embed(f"{p}wte.weight")
        .custom(positions)
        .repeat_layers(config["n_layer"], lambda i: layer(f"{p}h.{i}", config))
        .layer_norm(f"{p}ln_f.weight", f"{p}ln_f.bias", eps=config["layer_norm_epsilon"])
        .lm_head(config["vocab_size"], config["n_embd"], tied=True)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("prompt")
    args = parser.parse_args()
    lm = rlx.CausalLM(gpt2(args.directory), tokenizer=args.directory)
    print(lm.model)
    print(lm.generate(args.prompt, max_new_tokens=20))
