"""How numbers are compared with a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TOLERANCE = 3e-5
"""Largest difference from a float32 reference, relative to the reference's largest entry."""


def assert_close(got: Any, want: npt.NDArray[Any], *, tolerance: float = TOLERANCE) -> None:
    """`got` is float32, has the shape of `want`, is finite, and differs by at most `tolerance * max |want|`."""
    got = np.asarray(got)
    assert got.dtype == np.float32, got.dtype
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.isfinite(got).all()
    worst = np.abs(got.astype(np.float64) - want).max(initial=0.0)
    allowed = tolerance * np.abs(want).max(initial=0.0)
    assert worst <= allowed, f"differs by {worst:.2e}, allowed {allowed:.2e}"


def assert_rows_close(
    got: Any, want: npt.NDArray[Any], lengths: npt.NDArray[Any], *, tolerance: float = TOLERANCE
) -> None:
    """`assert_close` of `[B, S, …]` for the first `lengths[b]` positions of each row; what follows is not looked at."""
    got = np.asarray(got)
    assert got.shape == want.shape, (got.shape, want.shape)
    for b, n in enumerate(lengths):
        assert_close(got[b, :n], want[b, :n], tolerance=tolerance)
