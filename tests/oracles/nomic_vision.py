"""The vision tower of nomic-embed-vision-v1 and -v1.5 in plain NumPy, float64: image by image, head by head.

Sources: `NomicVisionModel` in nomic-ai/contrastors, `src/contrastors/models/huggingface/modeling_hf_nomic_bert.py`,
which the Hub's `auto_map` names as a file of nomic-ai/nomic-bert-2048; `config.json` of both checkpoints, equal in all
that counts. The trunk is that of EVA-02 (arXiv 2303.11331): `states` was compared with timm's `Eva`.

What differs from what one would guess:

- There is rotary embedding *and* a learned position for each token. It turns the patches only: not CLS. Pairs are
  neighbours (0, 1), (2, 3), …; the first half of a head turns by the row of the patch, the second by its column, pair i
  of a half by `place * base^(-4i / head_dim)`. The base is always 10000:
  `rotary_emb_base` belongs to the text model and is not read, nor is `rotary_emb_interleaved`; `rotary_emb_fraction`
  is 0. Places are scaled by `ref_feat_shape / grid`, if there is one.
- `fc11` is the value and `fc12` the gate: `fc2(norm(fc11(x) * silu(fc12(x))))`. The norm inside (`norm_mlp`) has
  PyTorch's eps of 1e-5, not the config's, which is 1e-6. The MLP of the selector has no such norm.
- There is no norm behind the last layer (`no_last_ln`): the selector reads the sum of the residual stream.
- The selector pools by attention with a learned query, and then adds `mlp(norm1(pooled))` to *every token* of the
  residual stream, not to what was pooled. So `last_hidden_state` has as many rows, and row 0 is CLS plus that MLP.
  The model card takes this row and divides it by its length: the embedding.
- `n_inner` is written as a float, 2048.0, and the MLP rounds it up to a multiple of 256. Here, as in any reader of
  weights, `fc11.weight` says how wide it is.

`weight_shapes` has the keys of `model.safetensors`. A patch is flattened channel, row, column; `Wqkv` has all queries,
then keys, then values, `Wkv` all keys, then values. The rotary tables are buffers that are not stored.
"""

import json
import math
from typing import Any

import numpy as np

from tests.oracles.checkpoints import FIXTURES
from tests.oracles.numpy_reference import ACTIVATIONS, Array, Weights, layer_norm, linear, softmax

PUBLISHED: dict[str, Any] = json.loads((FIXTURES / "published" / "nomic-embed-vision-v1.5.json").read_text("utf-8"))
"""`config.json` as published, without those fields of GPT2Config that change no number (summary_*, torch_dtype, …).

A field that neither stands in `READ_ONE_WAY` nor is read below changes no number.
"""

READ_ONE_WAY: dict[str, Any] = {
    "activation_function": "swiglu", "global_pool": None, "learned_pos_embedding": False, "no_cls_token": False,
    "no_embed_class": False, "prenorm": True, "register_tokens": 0, "rotary_emb_fraction": 0,
    "sinusoidal_pos_embedding": False, "scale_attn_weights": True, "num_heads_kv": None, "rotary_scaling_factor": None,
}  # fmt: skip
"""Fields by which the reference computes something else, with the value that this file is written for."""


def pair(size: int | list[int]) -> tuple[int, int]:
    """(height, width) of a field that is one number or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def grid_of(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of patches."""
    (height, width), (high, wide) = pair(config["img_size"]), pair(config["patch_size"])
    return height // high, width // wide


def weight_shapes(config: dict[str, Any], wide: int) -> dict[str, tuple[int, ...]]:
    """Every key with its shape, for an MLP of `wide`; without the biases and norms that the config leaves out."""
    h, rows_columns, patch = config["n_embd"], grid_of(config), pair(config["patch_size"])
    found: dict[str, tuple[int, ...]] = {"embeddings.cls_token": (1, 1, h)}

    def add(name: str, out: int, into: int, bias: bool) -> None:
        found[f"{name}.weight"] = (out, into)
        if bias:
            found[f"{name}.bias"] = (out,)

    def add_norm(name: str, width: int) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)

    def add_mlp(name: str, norm: bool) -> None:
        add(f"{name}.fc11", wide, h, config["mlp_fc1_bias"])
        add(f"{name}.fc12", wide, h, config["mlp_fc1_bias"])
        add(f"{name}.fc2", h, wide, config["mlp_fc2_bias"])
        if norm:
            add_norm(f"{name}.norm", wide)

    if config.get("use_pos_embed", True):
        found["embeddings.pos_embed"] = (1, 1 + math.prod(rows_columns), h)
    add("embeddings.proj", h, config["num_channels"] * math.prod(patch), config["patch_embed_bias"])
    for i in range(config["n_layer"]):
        add_norm(f"layers.{i}.norm1", h)
        add(f"layers.{i}.attn.Wqkv", 3 * h, h, config["qkv_proj_bias"])
        add(f"layers.{i}.attn.out_proj", h, h, config["qkv_proj_bias"])
        add_norm(f"layers.{i}.norm2", h)
        add_mlp(f"layers.{i}.mlp", config.get("norm_mlp", False))
    found["selector.attn.latent"] = (1, 1, h)
    add("selector.attn.Wq", h, h, config["qkv_proj_bias"])
    add("selector.attn.Wkv", 2 * h, h, config["qkv_proj_bias"])
    add("selector.attn.out_proj", h, h, config["qkv_proj_bias"])
    add_norm("selector.norm1", h)
    add_mlp("selector.mlp", False)
    return found


def embed_patches(config: dict[str, Any], w: Weights, pixels: Array) -> Array:
    """`[1 + P, H]` of one image `[C, height, width]`: CLS and the patches row by row, plus their positions."""
    rows, columns = grid_of(config)
    high, wide = pair(config["patch_size"])
    tokens = [w["embeddings.cls_token"][0, 0]]
    for r in range(rows):
        for c in range(columns):
            patch = pixels[:, r * high : (r + 1) * high, c * wide : (c + 1) * wide]
            tokens.append(linear(w, "embeddings.proj", patch.reshape(-1)))
    x = np.stack(tokens)
    return x + w["embeddings.pos_embed"][0] if config.get("use_pos_embed", True) else x


def turned(config: dict[str, Any], x: Array) -> Array:
    """Queries or keys `[1 + P, D]` of one head after the rotation by row and column; CLS as it was. D is 4n."""
    if not config.get("use_rotary_pos_emb", False):
        return x
    grid, d = grid_of(config), x.shape[-1]
    reference = config.get("ref_feat_shape")
    out = x.copy()
    for token in range(1, len(x)):
        place = divmod(token - 1, grid[1])
        for axis in range(2):
            at = place[axis] if reference is None else place[axis] / grid[axis] * pair(reference)[axis]
            for i in range(d // 4):
                angle = at * 10000.0 ** (-i / (d // 4))
                j = axis * d // 2 + 2 * i
                a, b = x[token, j], x[token, j + 1]
                out[token, j] = a * math.cos(angle) - b * math.sin(angle)
                out[token, j + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(queries: Array, keys: Array, values: Array) -> Array:
    """`softmax(q kᵀ / sqrt(D)) v` of one head: `[Q, D]`, `[S, D]`, `[S, D]` → `[Q, D]`."""
    return softmax(queries @ keys.T / math.sqrt(keys.shape[-1])) @ values


def gated_mlp(config: dict[str, Any], w: Weights, name: str, x: Array) -> Array:
    """`fc2(norm(fc11(x) * silu(fc12(x))))`; the norm where the weights have one, with PyTorch's eps."""
    inner = linear(w, f"{name}.fc11", x) * ACTIVATIONS["silu"](linear(w, f"{name}.fc12", x))
    if f"{name}.norm.weight" in w:
        inner = layer_norm(w, f"{name}.norm", inner, 1e-5)
    return linear(w, f"{name}.fc2", inner)


def states(config: dict[str, Any], w: Weights, pixels: Array) -> list[Array]:
    """What enters the first layer and leaves each of them, `[1 + P, H]`, of one image `[C, height, width]`."""
    for field, value in READ_ONE_WAY.items():
        assert config.get(field, value) == value, (field, config[field])
    eps, n = config["layer_norm_epsilon"], config["n_head"]
    found = [embed_patches(config, w, pixels)]
    for i in range(config["n_layer"]):
        p, x = f"layers.{i}", found[-1]
        packed = linear(w, f"{p}.attn.Wqkv", layer_norm(w, f"{p}.norm1", x, eps))
        q, k, v = (np.split(part, n, axis=-1) for part in np.split(packed, 3, axis=-1))
        heads = [attention(turned(config, q[h]), turned(config, k[h]), v[h]) for h in range(n)]
        x = x + linear(w, f"{p}.attn.out_proj", np.concatenate(heads, axis=-1))
        found.append(x + gated_mlp(config, w, f"{p}.mlp", layer_norm(w, f"{p}.norm2", x, eps)))
    return found


def selector(config: dict[str, Any], w: Weights, x: Array) -> Array:
    """`last_hidden_state [S, H]` of the residual stream `[S, H]`: each token plus the MLP of what one query pools."""
    n = config["n_head"]
    q = np.split(linear(w, "selector.attn.Wq", w["selector.attn.latent"][0]), n, axis=-1)
    k, v = (np.split(part, n, axis=-1) for part in np.split(linear(w, "selector.attn.Wkv", x), 2, axis=-1))
    pooled = np.concatenate([attention(q[h], k[h], v[h]) for h in range(n)], axis=-1)
    pooled = layer_norm(w, "selector.norm1", linear(w, "selector.attn.out_proj", pooled), config["layer_norm_epsilon"])
    return x + gated_mlp(config, w, "selector.mlp", pooled)


def last_hidden_state(config: dict[str, Any], w: Weights, pixel_values: Array) -> Array:
    """`[B, 1 + P, H]` of images `[B, C, height, width]`, normalised as the preprocessor does."""
    return np.stack([selector(config, w, states(config, w, pixels)[-1]) for pixels in pixel_values])


def embeddings(config: dict[str, Any], w: Weights, pixel_values: Array) -> Array:
    """`[B, H]` of unit length: row 0 of `last_hidden_state`, as the model card says."""
    cls = last_hidden_state(config, w, pixel_values)[:, 0]
    return cls / np.linalg.norm(cls, axis=-1, keepdims=True)
