"""What the ops of images mean, in plain NumPy float64: one output entry after the other."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Pairs = Sequence[tuple[int, int]]


def same(size: int, window: int, stride: int, dilation: int, lower: bool) -> tuple[int, int]:
    """The padding of "SAME": ⌈size / stride⌉ results, what is odd behind, or before."""
    whole = max((math.ceil(size / stride) - 1) * stride + dilation * (window - 1) + 1 - size, 0)
    less, more = whole // 2, whole - whole // 2
    return (more, less) if lower else (less, more)


def pairs_of(padding: Any, sizes: Sequence[int], window: Sequence[int], strides: Any, dilation: Any) -> list[Any]:
    """(before, after) of each axis."""
    if padding == "VALID":
        return [(0, 0)] * len(sizes)
    if isinstance(padding, str):
        args = zip(sizes, window, strides, dilation, strict=True)
        return [same(n, k, s, d, padding == "SAME_LOWER") for n, k, s, d in args]
    return list(padding)


def windows(at: Sequence[int], window: Any, strides: Any, pairs: Any, dilation: Any) -> Iterator[tuple[Any, Any]]:
    """(place in the window, place in x) of one output entry."""
    for k in np.ndindex(*window):
        yield k, tuple(i * s - p[0] + d * j for i, s, p, d, j in zip(at, strides, pairs, dilation, k, strict=True))


def inside(place: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a place is one of the array."""
    return all(0 <= p < n for p, n in zip(place, sizes, strict=True))


def conv(x: np.ndarray, w: np.ndarray, strides: Any, padding: Any, dilation: Any, groups: int = 1) -> np.ndarray:
    """Cross-correlation, one product after the other."""
    sizes, window = x.shape[2:], w.shape[2:]
    pairs = pairs_of(padding, sizes, window, strides, dilation)
    args = zip(sizes, window, strides, pairs, dilation, strict=True)
    counts = [(n + low + high - d * (k - 1) - 1) // s + 1 for n, k, s, (low, high), d in args]
    out = np.zeros((len(x), len(w), *counts))
    width = w.shape[1]
    for o in range(len(w)):
        group = o // (len(w) // groups)
        for at in np.ndindex(*counts):
            for k, place in windows(at, window, strides, pairs, dilation):
                if inside(place, sizes):
                    channels = x[(slice(None), slice(group * width, (group + 1) * width), *place)]
                    out[(slice(None), o, *at)] += channels @ w[(o, slice(None), *k)]
    return out


def conv_transpose(
    x: np.ndarray, w: np.ndarray, strides: Any, padding: Pairs, more: Any, dilation: Any, groups: int = 1
) -> np.ndarray:
    """Each entry of x adds its multiple of the window."""
    sizes, window, width = x.shape[2:], w.shape[2:], w.shape[1]
    args = zip(sizes, window, strides, padding, more, dilation, strict=True)
    counts = [(n - 1) * s - low - high + d * (k - 1) + 1 + m for n, k, s, (low, high), m, d in args]
    out = np.zeros((len(x), width * groups, *counts))
    for c in range(x.shape[1]):
        group = c // (x.shape[1] // groups)
        for at in np.ndindex(*sizes):
            for k in np.ndindex(*window):
                steps = zip(at, strides, padding, dilation, k, strict=True)
                place = tuple(i * s - p[0] + d * j for i, s, p, d, j in steps)
                if inside(place, counts):
                    features = slice(group * width, (group + 1) * width)
                    out[(slice(None), features, *place)] += np.outer(x[(slice(None), c, *at)], w[(c, slice(None), *k)])
    return out


def pool(
    x: np.ndarray, kind: str, window: Any, strides: Any, padding: Any, dilation: Any, ceil: bool = False,
    count_include_pad: bool = False,
) -> np.ndarray:  # fmt: skip
    """One window after the other."""
    sizes = x.shape[2:]
    pairs = pairs_of(padding, sizes, window, strides, dilation)
    counts = []
    for n, k, s, (low, high), d in zip(sizes, window, strides, pairs, dilation, strict=True):
        steps = (n + low + high - d * (k - 1) - 1) / s
        count = math.ceil(steps) + 1 if ceil else math.floor(steps) + 1
        counts.append(count - 1 if ceil and (count - 1) * s >= n + low else count)
    out = np.zeros((*x.shape[:2], *counts), x.dtype)
    for at in np.ndindex(*counts):
        places = [place for _, place in windows(at, window, strides, pairs, dilation)]
        read = np.stack([x[(slice(None), slice(None), *place)] for place in places if inside(place, sizes)], -1)
        whole = [n + low + high for n, (low, high) in zip(sizes, pairs, strict=True)]
        shifted = ([q + low for q, (low, _) in zip(place, pairs, strict=True)] for place in places)
        count = sum(inside(place, whole) for place in shifted) if count_include_pad else read.shape[-1]
        out[(slice(None), slice(None), *at)] = read.max(-1) if kind == "max" else read.sum(-1) / count
    return out


def keys(d: float, a: float) -> float:
    """Keys' cubic kernel."""
    d = abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def place_of(i: int, n: int, m: int, s: float, how: str, roi: Any = None) -> float:
    """Where entry i of m reads, in entries of n."""
    if how == "align_corners":
        return i * (n - 1) / (m - 1) if m > 1 else 0.0
    if how == "asymmetric":
        return i / s
    if how == "pytorch_half_pixel":
        return (i + 0.5) / s - 0.5 if m > 1 else 0.0
    if how == "half_pixel_symmetric":
        return n / 2 * (1 - m / (s * n)) + (i + 0.5) / s - 0.5
    if how == "tf_crop_and_resize":
        start, end = roi
        return start * (n - 1) + i * (end - start) * (n - 1) / (m - 1) if m > 1 else (start + end) / 2 * (n - 1)
    return (i + 0.5) / s - 0.5


def resize_axis(
    row: np.ndarray, m: int, method: str, how: str = "half_pixel", scale: float | None = None, antialias: bool = False,
    a: float = -0.5, exclude: bool = False, rounding: str = "round_prefer_floor", roi: Any = None, fill: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """One row, one entry after the other."""
    n, out = len(row), []
    s = m / n if scale is None else scale
    rounded = {
        "floor": math.floor, "ceil": math.ceil, "round_prefer_floor": lambda c: math.ceil(c - 0.5),
        "round_prefer_ceil": lambda c: math.floor(c + 0.5),
    }[rounding]  # fmt: skip
    for i in range(m):
        c = place_of(i, n, m, s, how, roi)
        if roi is not None and not 0 <= c <= n - 1:
            out.append(fill)
            continue
        if method == "nearest":
            out.append(row[min(max(rounded(c), 0), n - 1)])
            continue
        narrow = min(s, 1.0) if antialias else 1.0
        total = weights = 0.0
        for k in range(math.floor(c - 2 / narrow) - 1, math.ceil(c + 2 / narrow) + 2):
            d = (k - c) * narrow
            w = max(1 - abs(d), 0.0) if method == "linear" else keys(d, a)
            if exclude and not 0 <= k < n:
                continue
            total += w * row[min(max(k, 0), n - 1)]
            weights += w
        out.append(total / weights)
    return np.array(out)


def resize(x: np.ndarray, op: Any) -> np.ndarray:
    """One axis after the other."""
    for at, axis in enumerate(op.axes):
        x = np.apply_along_axis(
            resize_axis, axis, x, op.sizes[at], op.method, op.coordinates,
            None if op.scales is None else op.scales[at], op.antialias, op.a, op.exclude_outside, op.rounding,
            None if op.roi is None else op.roi[at], op.extrapolation,
        )  # fmt: skip
    return x


def folded(k: float, n: int, padding: str, corners: bool) -> float | None:
    """A place as the padding has it; None where it reads 0."""
    if padding == "border":
        return min(max(k, 0), n - 1)
    if padding == "reflection":
        low, high = (0.0, n - 1.0) if corners else (-0.5, n - 0.5)
        while high > low and not low <= k <= high:
            k = 2 * low - k if k < low else 2 * high - k
        return min(max(k, 0), n - 1)
    return k


def grid_sample(x: np.ndarray, grid: np.ndarray, method: str, padding: str, corners: bool) -> np.ndarray:
    """One place after the other."""
    sizes = x.shape[2:]
    out = np.zeros((*x.shape[:2], *grid.shape[1:-1]))
    for at in np.ndindex(*grid.shape[:-1]):
        around: list[list[tuple[float, float]]] = []
        for i, n in enumerate(sizes):
            g = float(grid[(*at, len(sizes) - 1 - i)])
            c = (g + 1) / 2 * (n - 1) if corners else ((g + 1) * n - 1) / 2
            if method != "cubic":
                c = float(folded(c, n, padding, corners))  # type: ignore[arg-type]
            base, t = math.floor(c), c - math.floor(c)
            if method == "nearest":
                around.append([(float(np.rint(c)), 1.0)])
            elif method == "linear":
                around.append([(base, 1 - t), (base + 1, t)])
            else:
                around.append([(base + k, keys(t - k, -0.75)) for k in (-1, 0, 1, 2)])
        for corner in np.ndindex(*(len(a) for a in around)):
            chosen = [a[i] for a, i in zip(around, corner, strict=True)]
            place: list[Any] = [k for k, _ in chosen]
            if method == "cubic":
                place = [folded(k, n, padding, corners) for k, n in zip(place, sizes, strict=True)]
            if inside(place, sizes):
                read = x[(at[0], slice(None), *(int(k) for k in place))]
                out[(at[0], slice(None), *at[1:])] += math.prod(w for _, w in chosen) * read
    return out


def fake_quantize(x: np.ndarray, scale: Any, bits: int, axis: int | None) -> np.ndarray:
    """clip(round(x/s)) s, by slices of the axis."""
    most = 2 ** (bits - 1) - 1
    if axis is None:
        s = np.abs(x).max() / most if scale is None else scale
        return np.clip(np.rint(x / s), -most, most) * s
    rows = np.moveaxis(x, axis, 0)
    given = [None] * len(rows) if scale is None else scale
    return np.moveaxis(np.stack([fake_quantize(r, s, bits, None) for r, s in zip(rows, given, strict=True)]), 0, axis)


def dequantize_blocks(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, axis: int, block: int) -> np.ndarray:
    """Entry by entry."""
    out = np.zeros(q.shape)
    for at in np.ndindex(*q.shape):
        of = (*at[:axis], at[axis] // block, *at[axis + 1 :])
        out[at] = (float(q[at]) - float(zero[of])) * scale[of]
    return out
