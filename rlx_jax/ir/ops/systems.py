"""Spectra, and systems of linear equations: what is solved for an axis or a matrix as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import REDUCTION, Types
from rlx_jax.ir.types import TensorType, is_float, is_static

Array = jax.Array
TRANSFORMS = {"fft": jnp.fft.fft, "ifft": jnp.fft.ifft, "rfft": jnp.fft.rfft, "irfft": jnp.fft.irfft}
NORMS = ("backward", "ortho", "forward")
WHOLE = replace(REDUCTION, narrows=0)
"""What a rounded operand would spoil: it keeps its dtype, whatever the program computes in."""


@dataclass(frozen=True)
class Fft(Mir):
    """The discrete Fourier transform along `axis`, in f32 and c64: `jax.numpy.fft`.

    `fft`: X_k = Σ_j x_j e^(−2πi jk/n), of floats or c64, as c64; `ifft` the inverse, with 1/n. `rfft`: of floats, the
    first ⌊n/2⌋ + 1 of X; `irfft` its inverse, n floats. `n` entries are read, zeros behind the last (None: all; of
    `irfft` 2(m − 1) for m). `norm` says where 1/n stands: `backward` in the inverse, `forward` in the other, `ortho`
    1/√n in both.
    """

    traits = WHOLE

    kind: str
    n: int | None = None
    axis: int = -1
    norm: str = "backward"

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if self.kind not in TRANSFORMS:
            raise GraphError(f"unknown transform {self.kind!r}; known are {', '.join(TRANSFORMS)}")
        check_axis(self.kind, self.axis, x)
        if self.norm not in NORMS:
            raise GraphError(f"{self.kind}: norm is {self.norm!r}; expected one of {', '.join(NORMS)}")
        if not (is_float(x.dtype) or (x.dtype == np.complex64 and self.kind != "rfft")):
            raise DTypeError(f"{self.kind}: needs floats{', or c64' * (self.kind != 'rfft')}, got {x}; cast it")
        if not is_static(x.shape[self.axis]):
            raise ShapeError(f"{self.kind}: the size of axis {self.axis} of {x} must be a number")
        size = int(str(x.shape[self.axis]))
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1):
            raise ShapeError(f"{self.kind}: n is an int of at least 1, got {self.n!r}")
        if self.kind == "irfft" and self.n is None and size < 2:
            raise ShapeError(f"irfft: of one entry nothing is left; give n=, for {x}")

    def eval(self, x: Array) -> Array:
        wide = x.astype(jnp.float32) if is_float(x.dtype) else x
        found: Array = TRANSFORMS[self.kind](wide, n=self.n, axis=self.axis, norm=self.norm)
        return found


def check_matrices(what: str, a: TensorType) -> None:
    """Matrices of as many rows as columns, in floats."""
    if a.rank < 2 or a.shape[-1] != a.shape[-2] or not is_static(a.shape[-1]):
        raise ShapeError(f"{what}: matrices [..., n, n] with n a number, got {a}")
    if not is_float(a.dtype):
        raise DTypeError(f"{what}: needs floats, got {a}; cast it")


def eliminations(op: Any, operands: Types, results: Types) -> int:
    """⅔n³ of the factors, and 2n² for each column."""
    n = _size(operands[0].shape[-1])
    matrices = int(np.prod([_size(d) for d in operands[0].shape[:-2]], dtype=np.int64))
    columns = sum(int(np.prod([_size(d) for d in b.shape], dtype=np.int64)) for b in operands[1:]) // n
    return matrices * (2 * n**3 // 3) + 2 * n * n * columns


def _size(dim: Any) -> int:
    return int(str(dim))


@dataclass(frozen=True)
class Solve(Mir):
    """The x with `a x = b`, by LU factors in f32: a `[..., n, n]`, b `[..., n, k]`, or `[n]` beside one `[n, n]`.

    A matrix without an inverse gives infinities or NaN, as `jax.numpy.linalg.solve` does.
    """

    traits = replace(WHOLE, flops=eliminations)

    def check(self, *operands: TensorType) -> None:
        a, b = operands
        check_matrices("solve", a)
        if a.dtype != b.dtype:
            raise DTypeError(f"solve: a and b have one dtype, got {a} and {b}; cast one")
        rows: Sequence[Any] = b.shape if (a.rank, b.rank) == (2, 1) else b.shape[:-1]
        if tuple(rows) != tuple(a.shape[:-1]):
            raise ShapeError(f"solve: b is [..., n, k] beside a [..., n, n], or [n] beside [n, n]; got {a} and {b}")

    def eval(self, a: Array, b: Array) -> Array:
        found: Array = jnp.linalg.solve(a.astype(jnp.float32), b.astype(jnp.float32))
        return found.astype(a.dtype)


@dataclass(frozen=True)
class Det(Mir):
    """The determinant of each matrix, in f32: `[..., n, n]` → `[...]`."""

    traits = replace(WHOLE, flops=eliminations)

    def check(self, *operands: TensorType) -> None:
        check_matrices("det", operands[0])

    def eval(self, a: Array) -> Array:
        found: Array = jnp.linalg.det(a.astype(jnp.float32))
        return found.astype(a.dtype)
