"""What each tensor op means, in plain NumPy: float64 formulas that share no code with the library.

Each is written from the published formula, slowly where that is clearer: attention takes one score at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracles.image_formulas import resize_axis


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e⁻ˣ)."""
    return 1 / (1 + np.exp(-x))


def erf(x: np.ndarray) -> np.ndarray:
    """The error function."""
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def elu(x: np.ndarray, alpha: float) -> np.ndarray:
    """x above 0, else α(eˣ − 1)."""
    return np.where(x > 0, x, alpha * (np.exp(np.minimum(x, 0)) - 1))


def whole(a: Any, b: Any, rounded: Any) -> Any:
    """a / b, rounded; of integers an integer."""
    quotient = rounded(np.asarray(a, np.float64) / np.asarray(b, np.float64))
    return quotient.astype(np.result_type(a)) if np.result_type(a).kind in "iu" else quotient


def relative_bucket(query: int, key: int, buckets: int, max_distance: int) -> int:
    """Half of the buckets for keys up to the query, half for later ones; of each half, one half for a distance each,
    the rest in equal steps of the logarithm up to `max_distance`, and the last for all that are further away."""
    half, distance = buckets // 2, abs(key - query)
    exact = half // 2
    place = distance
    if distance >= exact:
        share = math.log(distance / exact) / math.log(max_distance / exact)
        place = min(exact + math.floor(share * (half - exact) + 1e-9), half - 1)
    return place + (half if key > query else 0)


def relative_buckets(size: int, buckets: int, max_distance: int) -> np.ndarray:
    """`relative_bucket` of every query and key, `[S, S]`."""
    rows = range(size)
    return np.array([[relative_bucket(s, t, buckets, max_distance) for t in rows] for s in rows])


def counted_positions(ids: np.ndarray, padding: int) -> np.ndarray:
    """Each id that is no padding stands one behind the last that was none, the first at padding + 1."""
    out = np.full(ids.shape, padding)
    for b, row in enumerate(ids):
        last = padding
        for t, token in enumerate(row):
            if token != padding:
                last += 1
                out[b, t] = last
    return out


UNARY_REFERENCE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x), "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0), "sigmoid": sigmoid, "softplus": lambda x: np.log(1 + np.exp(x)),
    "tanh": np.tanh, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": lambda x: -x, "abs": np.abs, "sin": np.sin, "cos": np.cos, "tan": np.tan, "atan": np.arctan,
    "round": np.rint, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "sign": np.sign, "square": lambda x: x * x,
    "stop_gradient": lambda x: x, "reciprocal": lambda x: 1 / x, "cbrt": lambda x: np.sign(x) * np.abs(x) ** (1 / 3),
    "expm1": lambda x: np.exp(x) - 1, "log1p": lambda x: np.log(1 + x), "exp2": lambda x: 2.0**x,
    "log2": lambda x: np.log(x) / math.log(2), "asin": np.arcsin, "acos": np.arccos,
    "sinh": lambda x: (np.exp(x) - np.exp(-x)) / 2, "cosh": lambda x: (np.exp(x) + np.exp(-x)) / 2,
    "asinh": lambda x: np.log(x + np.sqrt(x * x + 1)), "acosh": lambda x: np.log(x + np.sqrt(x * x - 1)),
    "atanh": lambda x: np.log((1 + x) / (1 - x)) / 2, "erf": erf, "erfc": lambda x: 1 - erf(x),
    "relu6": lambda x: np.clip(x, 0, 6), "selu": lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772),
    "mish": lambda x: x * np.tanh(np.log(1 + np.exp(x))), "log_sigmoid": lambda x: np.log(sigmoid(x)),
    "soft_sign": lambda x: x / (1 + np.abs(x)), "hard_sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hard_silu": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "hard_tanh": lambda x: np.clip(x, -1, 1),
}  # fmt: skip
BINARY_REFERENCE: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "floor_div": lambda a, b: whole(a, b, np.floor), "trunc_div": lambda a, b: whole(a, b, np.trunc),
    "mod": lambda a, b: a - b * whole(a, b, np.floor), "rem": lambda a, b: a - b * whole(a, b, np.trunc),
    "atan2": np.arctan2, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "shift_left": lambda a, b: a * 2**b, "shift_right": lambda a, b: np.floor(a / 2.0**b).astype(a.dtype),
}  # fmt: skip
COMPARE_REFERENCE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
REDUCE_REFERENCE: dict[str, Any] = {
    "sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod,
    "any": lambda x, **at: np.sum(x != 0, **at) > 0, "all": lambda x, **at: np.sum(x == 0, **at) == 0,
    "logsumexp": lambda x, **at: np.log(np.sum(np.exp(x), **at)),
    "var": lambda x, ddof=0, **at: variance(x, ddof, **at),
    "std": lambda x, ddof=0, **at: np.sqrt(variance(x, ddof, **at)),
}  # fmt: skip


def variance(x: np.ndarray, ddof: int, axis: Any, keepdims: bool = False) -> np.ndarray:
    """Σ(x − mean)² / (n − ddof), from the moments."""
    count = np.sum(np.ones_like(x), axis=axis, keepdims=keepdims)
    total, squares = (np.sum(v, axis=axis, keepdims=keepdims) for v in (x, x * x))
    return np.asarray((squares - total * total / count) / (count - ddof))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax of finite numbers."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def log_softmax(x: Any) -> np.ndarray:
    """Over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def rms_norm(x: np.ndarray, gamma: np.ndarray, beta: Any = 0.0, eps: float = 1e-5, offset: float = 0.0) -> np.ndarray:
    """x (mean x² + ε)^(−1/2) (offset + γ) + β."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + gamma) + beta


def layer_norm(x: np.ndarray, gamma: Any, beta: Any, eps: float = 1e-5) -> np.ndarray:
    """(x − mean)(var + ε)^(−1/2) γ + β with the biased variance."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma + beta


def at_score(x: np.ndarray, b: int, n: int, s: int, t: int) -> float:
    """The entry of one score in a mask or bias `[B, T]` or `[B, N, S, T]`, either with 1 on any axis."""
    at = (b, t) if x.ndim == 2 else (b, n, s, t)
    return float(x[tuple(i % size for i, size in zip(at, x.shape, strict=True))])


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, heads: int, kv_heads: int, causal: bool = False,
    window: int | None = None, scale: float | None = None, softcap: float | None = None,
    keep: np.ndarray | None = None, bias: np.ndarray | None = None, positions: np.ndarray | None = None,
    key_positions: np.ndarray | None = None, ahead: int = 0, sinks: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Attention one score at a time; a sink is one score more, which weighs nothing."""
    batch, queries, width = q.shape
    keys, dim, wide = k.shape[1], width // heads, v.shape[2] // kv_heads
    out = np.zeros((batch, queries, heads * wide))
    for b in range(batch):
        for n in range(heads):
            here = slice(n * dim, (n + 1) * dim)
            shared = n // (heads // kv_heads)
            there = slice(shared * dim, (shared + 1) * dim)
            for s in range(queries):
                at = s + keys - queries if positions is None else int(positions[b % len(positions), s])
                if positions is None and key_positions is not None:
                    at = int(key_positions[b, at])
                scores: dict[int, float] = {}
                for t in range(keys):
                    where = t if key_positions is None else int(key_positions[b, t])
                    if (causal or window is not None) and where < 0:
                        continue
                    if (causal or window is not None) and where > at + ahead:
                        continue
                    if window is not None and where <= at - window:
                        continue
                    if keep is not None and at_score(keep, b, n, s, t) < 0.5:
                        continue
                    score = float(q[b, s, here] @ k[b, t, there]) * (dim**-0.5 if scale is None else scale)
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if bias is not None:
                        score += at_score(bias, b, n, s, t)
                    if score != -math.inf:
                        scores[t] = score
                beside = [] if sinks is None else [float(sinks[n])]
                top = max([*scores.values(), *beside], default=0.0)
                total = sum(math.exp(x - top) for x in (*scores.values(), *beside))
                for t, score in scores.items():
                    value = v[b, t, shared * wide : (shared + 1) * wide]
                    out[b, s, n * wide : (n + 1) * wide] += math.exp(score - top) / total * value
    return out


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, head_dim: int, n_rot: int, style: str = "half") -> np.ndarray:
    """Rotation of packed heads, one pair at a time."""
    out, half = x.copy(), n_rot // 2
    for b in range(x.shape[0]):
        for head in range(x.shape[2] // head_dim):
            for i in range(half):
                pair = (i, half + i) if style == "half" else (2 * i, 2 * i + 1)
                first, second = (head * head_dim + column for column in pair)
                c, s = cos[b % len(cos), :, i], sin[b % len(sin), :, i]
                out[b, :, first] = x[b, :, first] * c - x[b, :, second] * s
                out[b, :, second] = x[b, :, second] * c + x[b, :, first] * s
    return out


def sinusoids(t: np.ndarray, channels: int, scale: float, max_period: float) -> np.ndarray:
    """Cosines, then sines, of frequencies that fall by a constant ratio; an odd channel is 0."""
    half = channels // 2
    angles = scale * t[:, None] * max_period ** (-np.arange(half) / half)
    return np.concatenate([np.cos(angles), np.sin(angles), np.zeros((len(t), channels % 2))], axis=1)


def rope_table(
    positions: np.ndarray, inv_freq: Sequence[float], factor: float = 1.0, axes: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, one frequency at a time."""
    columns = [positions if not axes else positions[..., axes[i]] for i in range(len(inv_freq))]
    angles = np.stack([p * f for p, f in zip(columns, inv_freq, strict=True)], axis=-1)
    return np.cos(angles) * factor, np.sin(angles) * factor


def attention_block(
    op: Any, hidden: np.ndarray, qkv_w: np.ndarray, out_w: np.ndarray, mask: np.ndarray, qkv_b: Any = 0.0,
    out_b: Any = 0.0, cos: Any = None, sin: Any = None,
) -> np.ndarray:  # fmt: skip
    """Bidirectional attention with its projections, head by head."""
    s, n, d = hidden.shape[1], op.heads, op.head_dim
    q, k, v = np.split(hidden @ qkv_w + qkv_b, 3, axis=-1)
    if cos is not None:
        q, k = (rope(x, cos, sin, d, d) for x in (q, k))
    heads = []
    for h in range(n):
        a, b, c = (x[..., h * d : (h + 1) * d] for x in (q, k, v))
        scores = np.where(mask[:, None, :] >= 0.5, a @ np.swapaxes(b, 1, 2) / np.sqrt(d), -np.inf)
        weights = np.exp(scores - np.where(np.isfinite(m := scores.max(-1, keepdims=True)), m, 0.0))
        total = weights.sum(-1, keepdims=True)
        heads.append(weights / np.where(total == 0, 1.0, total) @ c)
    assert heads[0].shape[1] == s
    return np.concatenate(heads, -1) @ out_w + out_b


def transformer_layer(op: Any, **t: np.ndarray) -> np.ndarray:
    """BERT's post-norm layer."""
    biases = {name: t[name] for name in ("qkv_b", "out_b") if name in t}
    context = attention_block(op, t["hidden"], t["qkv_w"], t["out_w"], t["mask"], **biases)
    a = layer_norm(t["hidden"] + context, t["ln1_g"], t["ln1_b"], op.eps1)
    inner = UNARY_REFERENCE[op.activation](a @ t["fc1_w"] + t.get("fc1_b", 0.0))
    return layer_norm(a + inner @ t["fc2_w"] + t.get("fc2_b", 0.0), t["ln2_g"], t["ln2_b"], op.eps2)


def running(fn: Any, x: np.ndarray, axis: int, exclusive: bool = False, reverse: bool = False, nothing: Any = 0) -> Any:
    """Each entry is `fn` of those before it, and of itself unless exclusive; `reverse`: of those behind it."""
    rows = list(np.moveaxis(x, axis, 0))[:: -1 if reverse else 1]
    out = []
    for i in range(len(rows)):
        seen = rows[: i + (not exclusive)]
        out.append(fn(np.stack(seen), axis=0) if seen else np.full(rows[0].shape, nothing))
    return np.moveaxis(np.stack(out[:: -1 if reverse else 1]).astype(x.dtype), 0, axis)


def cumsum(x: np.ndarray, axis: int, exclusive: bool = False, reverse: bool = False) -> np.ndarray:
    """Each entry is the sum of those before it, and of itself unless exclusive."""
    return np.asarray(running(np.sum, x, axis, exclusive, reverse))


def pad(x: np.ndarray, widths: Any, mode: str, value: float) -> np.ndarray:
    """`numpy.pad`; negative widths cut first."""
    cut = x[tuple(slice(max(-a, 0), min(b, 0) or None) for a, b in widths)]
    more: Any = {"constant_values": value} if mode == "constant" else {}
    grown: np.ndarray = np.pad(cut, [(max(a, 0), max(b, 0)) for a, b in widths], mode, **more)  # type: ignore[call-overload]
    return grown


def take(x: np.ndarray, indices: np.ndarray, axis: int, mode: str) -> np.ndarray:
    """`numpy.take`; `fill` counts negative indices from the end."""
    return np.take(x, indices, axis, mode="raise" if mode == "fill" else mode)  # type: ignore[call-overload]


def gather_nd(x: np.ndarray, indices: np.ndarray, batch_dims: int) -> np.ndarray:
    """One entry after the other."""
    out = np.zeros((*indices.shape[:-1], *x.shape[batch_dims + indices.shape[-1] :]), x.dtype)
    for at in np.ndindex(*indices.shape[:-1]):
        out[at] = x[(*at[:batch_dims], *indices[at])]
    return out


WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda old, new: new, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def scatter(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int, kind: str) -> np.ndarray:
    """One entry after the other, each written at its own index along `axis`."""
    out = x.copy()
    for at in np.ndindex(*indices.shape):
        place = tuple(int(indices[at]) if i == axis % x.ndim else p for i, p in enumerate(at))
        out[place] = WRITTEN[kind](out[place], updates[at])
    return out


def scatter_nd(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, kind: str) -> np.ndarray:
    """One row after the other."""
    out = x.copy()
    for at in np.ndindex(*indices.shape[:-1]):
        place = tuple(int(i) for i in indices[at])
        out[place] = WRITTEN[kind](out[place], updates[at])
    return out


def quantize_vectors(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the vectors along the last axis, with the largest of each at the end of the range; and their scales."""
    scale = np.abs(x).max(-1) / (127 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max))
    codes = x / np.where(scale > 0, scale, 1)[..., None]
    return (np.rint(codes) if dtype == np.int8 else codes.astype(np.float32)).astype(dtype), scale


def cache_fill(cache: np.ndarray, new: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The first slots hold the new rows, and zeros where those are not valid."""
    out = cache.copy()
    for b, i in np.ndindex(len(cache), min(new.shape[1], cache.shape[1])):
        out[b, i] = new[b, i] if i < lengths[b] else 0
    return out


def cache_update(cache: np.ndarray, new: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Row i of batch b goes to slot start + i, if it is valid and there is such a slot."""
    out = cache.copy()
    for b in range(len(cache)):
        for i in range(int(lengths[b])):
            if start[b] + i < cache.shape[1]:
                out[b, start[b] + i] = new[b, i]
    return out


def ring_step(
    ring: np.ndarray, new: np.ndarray, start: np.ndarray, lengths: np.ndarray, in_place: bool = False
) -> tuple[np.ndarray, ...]:
    """One token after the other: position p to slot p mod T. Keys are the old ring and the block, or the new ring."""
    slots, after = ring.shape[1], ring.copy()

    def positions(count: int) -> list[int]:
        last = {p % slots: p for p in range(count)}
        return [last.get(slot, -1) for slot in range(slots)]

    for b in range(len(ring)):
        for i in range(int(lengths[b])):
            after[b, (start[b] + i) % slots] = new[b, i]
    ends = start + lengths
    if new.shape[1] == 1 or in_place:
        return after, np.array([positions(int(n)) for n in ends]), after
    at = [[start[b] + i if i < lengths[b] else -1 for i in range(new.shape[1])] for b in range(len(ring))]
    old = np.array([positions(int(n)) for n in start])
    return np.concatenate([ring, new], 1), np.concatenate([old, np.array(at)], 1), after


def patches(images: np.ndarray, p: int, q: int) -> np.ndarray:
    """Patches cut out one by one."""
    height, width = images.shape[2:]
    cuts = [
        images[:, :, r : r + p, c : c + q].reshape(len(images), -1)
        for r in range(0, height - p + 1, p)
        for c in range(0, width - q + 1, q)
    ]
    return np.stack(cuts, axis=1)


def grid_positions(
    table: np.ndarray, images: np.ndarray, grid: tuple[int, int], patch: tuple[int, int], antialias: bool
) -> np.ndarray:
    """A grid of rows resampled along one axis, then along the other."""
    rows, columns = images.shape[2] // patch[0], images.shape[3] // patch[1]
    cells = table.reshape(*grid, -1)
    how: Any = {"antialias": antialias, "a": -0.5 if antialias else -0.75, "exclude": antialias}
    down = np.stack([resize_axis(cells[:, c], rows, "cubic", **how) for c in range(grid[1])], axis=1)
    across = np.stack([resize_axis(down[r], columns, "cubic", **how) for r in range(rows)])
    return across.reshape(1, rows * columns, -1)


def grid_angles(
    images: np.ndarray, patch: tuple[int, int], frequencies: tuple[float, ...], tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Angles by the centres of patches between -1 and 1, after `tokens` rows of zeros."""
    rows, columns = images.shape[2] // patch[0], images.shape[3] // patch[1]
    angles = [[0.0] * 2 * len(frequencies)] * tokens
    for i in range(rows * columns):
        centre = 2 * (i // columns + 0.5) / rows - 1, 2 * (i % columns + 0.5) / columns - 1
        angles.append([x * f for x in centre for f in frequencies])
    return np.cos(angles)[None], np.sin(angles)[None]


def spectrum(kind: str, x: np.ndarray, n: int | None, axis: int, norm: str) -> np.ndarray:
    """The transform by its matrix. Of `irfft` the entries behind the half are the mirrored conjugates, and the first
    (and, of an even n, the one in the middle) is real."""
    rows = np.moveaxis(np.asarray(x, np.complex128), axis, -1)
    size = n or (2 * (rows.shape[-1] - 1) if kind == "irfft" else rows.shape[-1])
    if kind == "irfft":
        half = np.zeros((*rows.shape[:-1], size // 2 + 1), np.complex128)
        half[..., : rows.shape[-1]] = rows[..., : half.shape[-1]]
        full = np.array([half[..., k] if k <= size // 2 else half[..., size - k].conj() for k in range(size)])
        full[0] = full[0].real
        full[size // 2] = full[size // 2].real if size % 2 == 0 else full[size // 2]
        rows = np.moveaxis(full, 0, -1)
    read = np.zeros((*rows.shape[:-1], size), np.complex128)
    read[..., : rows.shape[-1]] = rows[..., :size]
    j, inverse = np.arange(size), kind in ("ifft", "irfft")
    matrix = np.exp((2j if inverse else -2j) * np.pi * np.outer(j, j) / size)
    scale = {"ortho": size**-0.5, "backward": 1 / size if inverse else 1.0, "forward": 1.0 if inverse else 1 / size}[
        norm
    ]
    out = read @ matrix * scale
    out = out.real if kind == "irfft" else out[..., : size // 2 + 1] if kind == "rfft" else out
    return np.moveaxis(out, -1, axis)


def experts(op: Any, *operands: np.ndarray) -> np.ndarray:
    """Each token through each of its experts, one after the other."""
    x, gate, up, down, weights, ids, *biases = operands
    turn = (lambda w: w) if op.contract == 1 else np.transpose
    gate_bias, up_bias, down_bias = biases or [np.zeros(len(gate))] * 3
    out = np.zeros(x.shape)
    for place in np.ndindex(ids.shape):
        e, token = ids[place], x[place[:-1]].astype(np.float64)
        g, u = turn(gate[e]) @ token + gate_bias[e], turn(up[e]) @ token + up_bias[e]
        if op.clamp is None:
            inner = UNARY_REFERENCE[op.activation](g) * u
        else:
            g, u = np.where(g > op.clamp.limit, op.clamp.limit, g), np.clip(u, -op.clamp.limit, op.clamp.limit)
            inner = UNARY_REFERENCE[op.activation](op.clamp.alpha * g) / op.clamp.alpha * (u + op.clamp.offset)
        out[place[:-1]] += weights[place] * (turn(down[e]) @ inner + down_bias[e])
    return out


def route(op: Any, logits: np.ndarray, bias: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The foremost experts of each token, and their weights."""
    logits = logits.astype(np.float64)
    scores = {"softmax": softmax, "sigmoid": sigmoid, "chosen": lambda x: x}[op.scores](logits)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[..., : op.top_k]
    weights = np.take_along_axis(scores, ids, -1)
    if op.scores == "chosen":
        weights = softmax(weights)
    if op.normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * op.scale, ids
