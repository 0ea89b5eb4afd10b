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
    """Return inverse frequencies θ^(−2i/D), i < D/2, in radians per token, computed in f32 like the reference."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return tuple(float(f) for f in np.float32(1.0) / np.float32(theta) ** exponent)


def axial_frequencies(widths: Sequence[int], theta: float = 10000.0) -> tuple[Frequencies, tuple[int, ...]]:
    """Return frequencies for heads that rotate `widths[a]` of their columns by coordinate a, and the coordinates.

    Each coordinate has the frequencies of a head of its width. The second result is `axes` of `RopeAngles`.

    >>> axial_frequencies((4, 2), 100.0)[1]
    (0, 0, 1)
    """
    pairs = [(f, axis) for axis, width in enumerate(widths) for f in frequencies(width, theta)]
    return tuple(f for f, _ in pairs), tuple(axis for _, axis in pairs)


def linear_scaling(freqs: Frequencies, factor: float) -> Frequencies:
    """Return frequencies divided by `factor`, which is the same as dividing positions."""
    return tuple(float(np.float32(f) / np.float32(factor)) for f in freqs)


def llama3_scaling(
    freqs: Frequencies, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Frequencies:
    """Return frequencies scaled by Llama 3.1's rule.

    With L = `original_context`, frequencies of wavelengths over L / `low_freq_factor` are divided by `factor`,
    frequencies of wavelengths under L / `high_freq_factor` are unchanged, and the ones in between are interpolated.
    """
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
    """Return frequencies of base `theta` scaled by YaRN's rule (Peng et al. 2023).

    Frequencies with more than `beta_fast` rotations within the original context are unchanged, and frequencies with
    less than `beta_slow` are divided by `factor`. In between they are interpolated linearly by index; `truncate` widens
    that range to integer indices. YaRN also multiplies cos and sin by `yarn_factor`.
    """
    width = 2 * len(freqs)

    def index_of(rotations: float) -> float:
        """Return the fractional index of the frequency with this number of rotations."""
        return width * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if high == low else high  # no division by zero below, as in the reference
    scaled = []
    for i, f in enumerate(freqs):
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(f / factor * share + f * (1 - share))
    return tuple(float(np.float32(f)) for f in scaled)


def yarn_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return YaRN's factor of cos and sin: `0.1 ln(factor) + 1`, or, with both arguments `mscale…`, the ratio of
    `0.1 mscale ln(factor) + 1` for the two."""

    def scale_for(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return scale_for(mscale) / scale_for(mscale_all_dim) if mscale and mscale_all_dim else scale_for(1.0)
