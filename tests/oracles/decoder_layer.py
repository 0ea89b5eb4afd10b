"""One decoder layer of a `LayerSpec` in NumPy, float64, and its weights, stated without the package's own shapes."""

import math
from typing import Any

import numpy as np

from rlx_jax.blocks import LayerSpec, MaskKind
from rlx_jax.ir.hir import mask_kind
from tests.oracles.numpy_reference import ACTIVATIONS, Array, capped, linear, rms_norm, rotate, softmax

P = "model.layers.0"
GATES = {"silu": ACTIVATIONS["silu"], "gelu_tanh": ACTIVATIONS["gelu_pytorch_tanh"]}


def layer_shapes(spec: LayerSpec, hidden: int, inner: int, prefix: str = P) -> dict[str, tuple[int, ...]]:
    """Every weight of the layer by its key, q, k and v, gate and up each under a key of its own."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    biased = set(sizes) if spec.qkv_bias else set()
    sizes |= {"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    sizes |= {"mlp.down_proj": (hidden, inner)}
    biased |= {"self_attn.o_proj"} if spec.output_bias else set()
    biased |= {name for name in sizes if name.startswith("mlp")} if spec.mlp_bias else set()
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in sizes.items()}
    shapes |= {f"{name}.bias": sizes[name][:1] for name in biased}
    shapes |= {f"{name}.weight": (hidden,) for name in vars(spec.norms).values() if name is not None}
    widths = {"heads": (spec.head_dim, spec.head_dim), "width": (q, kv)}.get(spec.qk_norm or "", ())
    shapes |= {f"self_attn.{n}_norm.weight": (width,) for n, width in zip("qk", widths, strict=False)}
    return {f"{prefix}.{name}": shape for name, shape in sorted(shapes.items())}


def layer_weights(spec: LayerSpec, hidden: int, inner: int, seed: int = 0, prefix: str = P) -> dict[str, np.ndarray]:
    """Random weights; no norm is 1 and no bias 0."""
    rng, made = np.random.default_rng(seed), {}
    for key, shape in layer_shapes(spec, hidden, inner, prefix).items():
        value = rng.uniform(0.5, 1.5, shape) if "norm" in key else rng.standard_normal(shape) / math.sqrt(shape[-1])
        made[key] = value.astype(np.float32)
    return made


def layer_reference(
    spec: LayerSpec, weights: dict[str, Any], x: np.ndarray, given: Any = None, theta: float = 10000.0, prefix: str = P
) -> Array:
    """`h = x + m · after(attention(before(x)))`, `y = h + m · after(mlp(before(h)))` for x `[B, S, H]`; `given` is what
    a custom or bias mask reads."""
    w = {key: np.asarray(value, np.float64) for key, value in weights.items()}

    def norm(half: str, y: Array) -> Array:
        name, offset = getattr(spec.norms, half), float(spec.zero_centred)
        return y if name is None else rms_norm(y, w[f"{prefix}.{name}.weight"] + offset, spec.eps)

    rows = []
    for b, row in enumerate(x.astype(np.float64)):
        change = _attention(spec, w, norm("before_attention", row), None if given is None else given[b], theta, prefix)
        h = row + spec.residual_multiplier * norm("after_attention", change)
        m = norm("before_mlp", h)
        gate = GATES[spec.activation](linear(w, f"{prefix}.mlp.gate_proj", m))
        change = linear(w, f"{prefix}.mlp.down_proj", gate * linear(w, f"{prefix}.mlp.up_proj", m))
        rows.append(h + spec.residual_multiplier * norm("after_mlp", change))
    return np.stack(rows)


def _attention(spec: LayerSpec, w: dict[str, Array], x: Array, given: Any, theta: float, prefix: str) -> Array:
    """Attention of one row `[S, H]`, with its output projection."""
    s, d, groups = len(x), spec.head_dim, spec.num_heads // spec.num_kv_heads
    q, k, v = (linear(w, f"{prefix}.self_attn.{name}_proj", x) for name in "qkv")
    if spec.qk_norm is not None:
        cut = (s, -1, d) if spec.qk_norm == "heads" else (s, -1)
        norms = [w[f"{prefix}.self_attn.{name}_norm.weight"] + spec.zero_centred for name in "qk"]
        q, k = (rms_norm(y.reshape(cut), n, spec.eps).reshape(y.shape) for y, n in zip((q, k), norms, strict=True))
    q, k, v = (y.reshape(s, -1, d) for y in (q, k, v))
    if spec.n_rot != 0:
        angles = np.arange(s)[:, None, None] * theta ** (-np.arange(0, d, 2) / d)
        q, k = (rotate(y, np.cos(angles), np.sin(angles)) for y in (q, k))
    scale = 1 / math.sqrt(d) if spec.score_scale is None else spec.score_scale
    keep = _kept(mask_kind(spec.mask), s, given)
    heads = []
    for n in range(spec.num_heads):
        scores = capped(scale * q[:, n] @ k[:, n // groups].T, spec.attn_logit_softcap)
        scores = scores + given[n] if mask_kind(spec.mask).kind == "bias" else scores
        scores = np.where(keep, scores, -np.inf)
        readable = np.isfinite(scores).any(-1, keepdims=True)
        heads.append(np.where(readable, softmax(np.where(readable, scores, 0.0)), 0.0) @ v[:, n // groups])
    return linear(w, f"{prefix}.self_attn.o_proj", np.concatenate(heads, -1))


def _kept(mask: MaskKind, s: int, given: Any) -> Any:
    """Which keys each query reads, `[S, S]`."""
    back = np.subtract.outer(np.arange(s), np.arange(s))
    keep = back >= 0 if mask.causal else np.full((s, s), True)
    keep = keep & (back < mask.window) if mask.window is not None else keep
    return keep & (np.asarray(given) >= 0.5)[None] if mask.operand == "keep" else keep
