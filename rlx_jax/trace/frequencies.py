"""Inverse frequencies of rotary position embeddings.

They follow Su et al. 2021 and the scaling rules of the checkpoints' own reference (`rope_scaling` /
`rope_parameters`: linear, llama3, yarn).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = [
    "Frequencies", "axial_frequencies", "frequencies", "linear_scaling", "llama3_scaling", "yarn_factor",
    "yarn_scaling",
]  # fmt: skip

Frequencies = tuple[float, ...]


def frequencies(head_dim: int, theta: float = 10000.0) -> Frequencies:
    """Inverse frequencies θ^(−2i/D), i < D/2, in radians a token; computed in f32 as the reference does."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return tuple(float(f) for f in np.float32(1.0) / np.float32(theta) ** exponent)


def axial_frequencies(widths: Sequence[int], theta: float = 10000.0) -> tuple[Frequencies, tuple[int, ...]]:
    """Frequencies of heads whose columns are shared out among coordinates: `widths[a]` columns turn by coordinate a.

    Each coordinate has the frequencies of a head of its own width. The second result are the `axes` of `RopeAngles`.

    >>> axial_frequencies((4, 2), 100.0)[1]
    (0, 0, 1)
    """
    found = [(f, axis) for axis, width in enumerate(widths) for f in frequencies(width, theta)]
    return tuple(f for f, _ in found), tuple(axis for _, axis in found)


def linear_scaling(freqs: Frequencies, factor: float) -> Frequencies:
    """Positions divided by `factor`."""
    return tuple(float(np.float32(f) / np.float32(factor)) for f in freqs)


def llama3_scaling(
    freqs: Frequencies, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Frequencies:
    """Llama 3.1's rule: wavelengths over `original/low` are divided by `factor`, under `original/high` kept,
    those between interpolated smoothly."""
    out = []
    for f in freqs:
        wavelength = 2 * math.pi / f
        if wavelength < original_context / high_freq_factor:
            out.append(f)
        elif wavelength > original_context / low_freq_factor:
            out.append(f / factor)
        else:
            smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append((1 - smooth) * f / factor + smooth * f)
    return tuple(float(np.float32(f)) for f in out)


def yarn_scaling(
    freqs: Frequencies, factor: float, original_context: int, theta: float = 10000.0, *, beta_fast: float = 32.0,
    beta_slow: float = 1.0, truncate: bool = True,
) -> Frequencies:  # fmt: skip
    """YaRN's rule (Peng et al. 2023): frequencies of base `theta` that turn more than `beta_fast` times within the
    original context are kept, those that turn less than `beta_slow` times are divided by `factor`, and those between
    are interpolated by their number; `truncate` widens that range to whole numbers. cos and sin are multiplied by
    `yarn_factor` besides."""
    width = 2 * len(freqs)

    def place(turns: float) -> float:
        """The number of the frequency that turns so often."""
        return width * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(beta_fast), place(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high
    out = []
    for i, f in enumerate(freqs):
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(f / factor * share + f * (1 - share))
    return tuple(float(np.float32(f)) for f in out)


def yarn_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies cos and sin with: `0.1 ln(factor) + 1`, or with both `mscale` the ratio of `0.1 mscale
    ln(factor) + 1`."""

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
