"""CLIP from scratch: two towers in one flow with the keys of transformers, trained briefly on synthetic pairs.

    python examples/clip.py path/to/clip

The path is a directory with config.json and safetensors.
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import rlx_jax as rlx


def linear(emit, x, key):
    return emit.linear(x, f"{key}.weight", f"{key}.bias")


def tower(name, config, causal):
    """Return a function that builds layer `i` of a tower, and a function for its norms."""
    assert config["hidden_act"] == "quick_gelu", config["hidden_act"]

    def norm(emit, x, key):
        return emit.layer_norm(x, f"{name}.{key}.weight", f"{name}.{key}.bias", eps=config["layer_norm_eps"])

    def layer(i):
        def write(emit, x):
            n, p = norm(emit, x, f"encoder.layers.{i}.layer_norm1"), f"{name}.encoder.layers.{i}"
            q, k, v = (linear(emit, n, f"{p}.self_attn.{part}_proj") for part in "qkv")
            context = emit.attention(q, k, v, heads=config["num_attention_heads"], causal=causal)
            x = x + linear(emit, context, f"{p}.self_attn.out_proj")
            n = norm(emit, x, f"encoder.layers.{i}.layer_norm2")
            return x + linear(emit, emit.quick_gelu(linear(emit, n, f"{p}.mlp.fc1")), f"{p}.mlp.fc2")

        return rlx.blocks.Custom(write, name)

    return layer, norm


def clip(directory):
    """The flow of a checkpoint: `ids` and `pixels` → `logits` `[texts, images]`, `text_embeds`, `image_embeds`."""
    config = json.loads(Path(directory, "config.json").read_text("utf-8"))
    text, vision = config["text_config"], config["vision_config"]
    source, side, eos = rlx.open_weights(directory), vision["image_size"], text["eos_token_id"]
    text_layer, text_norm = tower("text_model", text, causal=True)
    vision_layer, vision_norm = tower("vision_model", vision, causal=False)

    def words(emit, ids):
        p = "text_model.embeddings"
        x = emit.embed(f"{p}.token_embedding.weight", ids)
        return x + emit.embed(f"{p}.position_embedding.weight", emit.positions(ids))

    def patches(emit, _):
        p = "vision_model.embeddings"
        x = emit.conv(emit.flow_input("pixels"), f"{p}.patch_embedding.weight", window_strides=vision["patch_size"])
        images, width = x.shape[:2]
        cls = emit.broadcast_to(emit.param(f"{p}.class_embedding"), (images, 1, width))
        x = emit.concat([cls, x.reshape(images, width, -1).transpose(0, 2, 1)], axis=1)
        return vision_norm(emit, x + emit.param(f"{p}.position_embedding.weight"), "pre_layrnorm")

    def end_token(emit, x):
        ids = emit.flow_input("ids")
        end = emit.argmax(ids if eos == 2 else emit.cast(emit.eq(ids, eos), "int32"), axis=1)  # 2: the oldest configs
        x = emit.take_along_axis(text_norm(emit, x, "final_layer_norm"), end[:, None, None], axis=1)[:, 0]
        return embedding(emit, x, "text")

    def class_token(emit, x):
        x = embedding(emit, vision_norm(emit, x[:, 0], "post_layernorm"), "visual")
        return emit.exp(emit.param("logit_scale")) * emit.einsum("te,ie->ti", emit.stream("texts"), x)

    def embedding(emit, x, name):
        x = emit.linear(x, f"{name}_projection.weight")
        x = x / emit.norm(x, axis=-1, keepdims=True)
        emit.output("text_embeds" if name == "text" else "image_embeds", x)
        return x

    return (
        rlx.ModelFlow("clip")
        .with_weights(source, leave=[key for key in source.keys() if key.endswith(".position_ids")])
        .input("ids", ("batch", "seq"), dtype="int32")
        .input("pixels", ("images", 3, side, side))
        .custom(words)
        .repeat_layers(text["num_hidden_layers"], text_layer)
        .custom(end_token)
        .store_stream("texts")
        .custom(patches)
        .repeat_layers(vision["num_hidden_layers"], vision_layer)
        .custom(class_token)
        .output("logits")
    )


def contrastive(model, params, tokens, pixels):
    """Return CLIP's symmetric contrastive loss: cross entropy of the matching image of each text, and vice versa."""
    logits = model.apply(params, tokens, pixels)["logits"]
    cross_entropy, labels = optax.softmax_cross_entropy_with_integer_labels, jnp.arange(len(tokens))
    return (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2


def train(flow, tokens, pixels, steps=30, rate=1e-3):
    """Train a flow; return the model, and the loss of each step."""
    model, optimizer, losses = rlx.compile(flow, program="train"), optax.adam(rate), []
    state, step = rlx.train.init(model, optimizer), rlx.train.make_step(model, optimizer, contrastive)
    for _ in range(steps):
        state, metrics = step(state, {"tokens": tokens, "pixels": pixels})
        losses.append(float(metrics.loss))
    return model.replace(params=state.params), losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    directory = parser.parse_args().directory
    flow, rng, ids = clip(directory), np.random.default_rng(0), np.arange(16)
    colours = rng.normal(size=(16, 3, 1, 1)) + 0.1 * rng.normal(size=(16, *flow.build().inputs[1].type.shape[1:]))
    end = rlx.open_weights(directory).spec("text_model.embeddings.token_embedding.weight").shape[0] - 1
    words = np.stack([3 + ids % 4, 20 + ids // 4, np.full(16, end)], axis=1)  # two words for each colour
    _, losses = train(flow, words, colours.astype("f4"))
    print(losses[0], "→", losses[-1])
