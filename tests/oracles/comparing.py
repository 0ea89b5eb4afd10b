"""How numbers are compared with a reference."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_jax.ir.graph import Param

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


def program_of(model: Any) -> list[tuple[Any, ...]]:
    """Every op of a program with all of its attributes, numbers to six digits, and its operands."""
    rows = []
    for _, node in model.template().mir.walk():
        whole = node.op.text() if node.op.regions() or isinstance(node.op, Param) else repr(node.op)
        text = re.sub(r"cast\(([^,()]+), f32\)", r"\1", whole)
        rounded = re.sub(r"\d+\.\d*(e[+-]?\d+)?", lambda number: f"{float(number[0]):.6g}", text)
        rows.append((rounded, node.inputs, node.types))
    return rows


def assert_same_model(ours: Any, theirs: Any, *, tolerance: float = 0.0) -> None:
    """Two models are one program over the same parameters, so their results are the same: nothing is compiled.

    Names of flows do not count, nor casts to f32, which the loader may do.

    Args:
        ours, theirs: models of any kind.
        tolerance: the largest difference of a parameter, relative to its largest entry.
    """
    ours, theirs = (getattr(model, "model", model) for model in (ours, theirs))
    for mine, other in zip(program_of(ours), program_of(theirs), strict=True):
        assert mine == other
    assert ours.params.keys() == theirs.params.keys()
    for name, value in ours.params.items():
        got, want = np.asarray(value), np.asarray(theirs.params[name])
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if not tolerance:
            np.testing.assert_array_equal(got, want, name)
            continue
        wide = want.astype(np.float64)
        assert np.abs(got - wide).max(initial=0.0) <= tolerance * np.abs(wide).max(initial=0.0), name


def assert_same_layers(ours: Any, theirs: Any) -> None:
    """Two sequences of layers over vectors have the same settings, which is what `==` compares, and weights."""
    assert ours == theirs
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.arrays().keys() == other.arrays().keys()
        for name, array in mine.arrays().items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other.arrays()[name]), name)
