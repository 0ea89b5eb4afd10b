"""Ops of linear algebra: matrix products, einsum, Fourier transforms, and linear systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import REDUCTION, Types, product_traits
from rlx_jax.ir.ops.custom import traced_flops
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.types import TensorType, is_float, is_static


def check_product(op: str, x: TensorType, w: TensorType, contract: int) -> None:
    """Check the product `x · w` that contracts the last axis of x and axis `contract` of w.

    Args:
        op: name of the op, for messages.
        x: type of x, `[…, K]`.
        w: type of the rank-2 weight.
        contract: 0 for w `[K, N]`, 1 for w `[N, K]`.

    Raises:
        ShapeError: the ranks or the contracted sizes do not fit.
        DTypeError: x and w differ in dtype.
    """
    if contract not in (0, 1):
        raise ShapeError(f"{op}: contract is 0 or 1, an axis of the weight; got {contract!r}")
    if w.rank != 2 or x.rank < 1:
        error = ShapeError(f"{op}: the weight has rank 2, got {w}, and x at least 1, got {x}")
        raise error.at_operands(1)  # operand 1 is w
    if x.shape[-1] != w.shape[contract]:
        remedy = f"transpose={not contract}" if op == "linear" else "transpose w"
        other = f"; the other orientation of w fits: {remedy}" if x.shape[-1] == w.shape[1 - contract] else ""
        raise ShapeError(
            f"{op}: last axis of x {x} is {x.shape[-1]}, axis {contract} of w {w} is {w.shape[contract]}{other}"
        ).at_operands(0, 1)
    if x.dtype != w.dtype:
        is_ids = op == "linear" and x.dtype.kind in "iu"
        hint = "token ids go through an embedding first, other integers are cast" if is_ids else "cast one of them"
        raise DTypeError(f"{op}: x is {x}, w is {w}; {hint}")


def check_linear(op: str, operands: Types, contract: int, f32_result: bool) -> None:
    """Check `x · w [+ b]`: b has the width and the dtype of the product, and is not broadcast.

    Raises:
        ShapeError, DTypeError: as `check_product`, or the bias has another type.
    """
    x, w, *bias = operands
    check_product(op, x, w, contract)
    bias_type = TensorType((w.shape[1 - contract],), jnp.dtype("float32") if f32_result else x.dtype)
    if bias and bias[0] != bias_type:
        raise ShapeError(f"{op}: the bias of x {x} and w {w} is {bias_type}, got {bias[0]}").at_operands(2)


def product_text(name: str, contract: int, precision: str, f32_result: bool) -> str:
    """Return the text of a product in dumps: its name and the options that differ from their defaults."""
    notes = [f"contract={contract}"] if contract else []
    notes += [f"precision={precision}"] if precision != "default" else []
    notes += ["f32"] if f32_result else []
    return f"{name}({', '.join(notes)})" if notes else name


def _contraction(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs: a multiplication and an addition for each result and contracted entry."""
    return 2 * results[0].size * int(operands[0].shape[-1])


@dataclass(frozen=True)
class MatMul(Mir):
    """Matrix product `x · w`: x `[…, K]`, w `[K, N]` (`contract=0`) or `[N, K]` (`contract=1`) → `[…, N]`.

    The Layout chooses the orientation of w. `precision` ("default", "high", "highest") overrides JAX's global setting
    for this product. With `f32_result` the result is f32, else it has the dtype of x.
    """

    traits = product_traits(_contraction)

    contract: int = 0
    precision: str = "default"
    f32_result: bool = False

    def check(self, x: TensorType, w: TensorType) -> None:
        check_product("matmul", x, w, self.contract)

    def eval(self, x: Array, w: Array) -> Array:
        dims = (((x.ndim - 1,), (self.contract,)), ((), ()))
        dtype = jnp.float32 if self.f32_result else x.dtype
        return lax.dot_general(x, w, dims, precision=lax.Precision(self.precision), preferred_element_type=dtype)

    def text(self) -> str:
        return product_text("matmul", self.contract, self.precision, self.f32_result)


@dataclass(frozen=True)
class BatchMatMul(Mir):
    """Batched matrix product, NumPy's `a @ b`: `[…, M, K] × […, K, N]` → `[…, M, N]`; leading axes broadcast."""

    traits = product_traits(_contraction)
    operands = "a b:a"

    precision: str = "default"

    def check(self, a: TensorType, b: TensorType) -> None:
        if min(a.rank, b.rank) < 1 or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
            raise ShapeError(f"matmul: the inner axes of {a} and {b} differ")

    def eval(self, a: Array, b: Array) -> Array:
        if min(a.ndim, b.ndim) > 1:  # a vector has its own rule in matmul, and no batch axes
            a, b = same_rank(a, b)
        return jnp.matmul(a, b, precision=lax.Precision(self.precision))


def product(a: TensorType, b: TensorType) -> MatMul | BatchMatMul:
    """Return the op of `a @ b`: a `MatMul` if `b` is a matrix and `a` no vector, else a `BatchMatMul`."""
    return MatMul() if b.rank == 2 and a.rank > 1 else BatchMatMul()


@dataclass(frozen=True)
class Einsum(Mir):
    """Sum of products over named axes, `jax.numpy.einsum(subscripts, *operands)`; operands have the same dtype.

    `precision` is as in `MatMul`. The result has the dtype `result`, in which sums are accumulated too; the default is
    the dtype of the operands.
    """

    traits = product_traits(traced_flops)

    subscripts: str
    precision: str = "default"
    result: np.dtype[Any] | None = None

    def check(self, *operands: TensorType) -> None:
        if len({t.dtype for t in operands}) != 1:
            dtypes = ", ".join(map(str, operands)) or "none"
            raise DTypeError(f"einsum: operands have the same dtype, got {dtypes}; cast them")
        terms, _, _ = self.subscripts.partition("->")
        if terms.count(",") + 1 != len(operands):
            raise ShapeError(f"einsum: {self.subscripts!r} reads {terms.count(',') + 1} operands, got {len(operands)}")

    def eval(self, *arrays: Array) -> Array:
        dtype = arrays[0].dtype if self.result is None else self.result
        precision = lax.Precision(self.precision)
        return jnp.einsum(self.subscripts, *arrays, precision=precision, preferred_element_type=dtype).astype(dtype)


TRANSFORMS = {"fft": jnp.fft.fft, "ifft": jnp.fft.ifft, "rfft": jnp.fft.rfft, "irfft": jnp.fft.irfft}
NORMS = ("backward", "ortho", "forward")
# Traits of ops that lose too much accuracy with rounded operands: mixed precision does not narrow the operands.
FULL_PRECISION = replace(REDUCTION, narrows=0)


@dataclass(frozen=True)
class Fft(Mir):
    """Discrete Fourier transform along `axis`, in f32 and c64, as in `jax.numpy.fft`.

    Args:
        kind: `fft`, X_k = Σ_j x_j e^(−2πi jk/n), maps floats or c64 to c64; `ifft` is its inverse, with the factor 1/n.
            `rfft` maps floats to the first ⌊n/2⌋ + 1 entries of X; `irfft` is its inverse, with n floats as the result.
        n: number of entries; the axis is truncated, or padded with zeros at its end. The default is all entries, or
            2(m − 1) for m entries of an `irfft`.
        axis: the axis.
        norm: factor of the transforms: `backward` has 1/n in the inverse, `forward` in the forward transform, `ortho`
            1/√n in both.
    """

    traits = FULL_PRECISION
    choices = {"kind": TRANSFORMS, "norm": NORMS}
    operands = "x@axis"

    kind: str
    n: int | None = None
    axis: int = -1
    norm: str = "backward"

    def check(self, x: TensorType) -> None:
        if not (is_float(x.dtype) or (x.dtype == np.complex64 and self.kind != "rfft")):
            raise DTypeError(f"{self.kind}: needs floats{', or c64' * (self.kind != 'rfft')}, got {x}; cast it")
        if not is_static(x.shape[self.axis]):
            raise ShapeError(f"{self.kind}: the size of axis {self.axis} of {x} must be static")
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1):
            raise ShapeError(f"{self.kind}: n is an int of at least 1, got {self.n!r}")
        if self.kind == "irfft" and self.n is None and x.shape[self.axis] < 2:
            raise ShapeError(f"irfft: the result of one entry is empty; give n= for {x}")

    def eval(self, x: Array) -> Array:
        values = x.astype(jnp.float32) if is_float(x.dtype) else x
        spectrum: Array = TRANSFORMS[self.kind](values, n=self.n, axis=self.axis, norm=self.norm)
        return spectrum


def eliminations(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of Gaussian elimination: ⅔n³ for the factors of each matrix, and 2n² for each column."""
    n = int(operands[0].shape[-1])
    num_matrices, num_columns = operands[0].size // n**2, sum(b.size for b in operands[1:]) // n
    return num_matrices * (2 * n**3 // 3) + 2 * n * n * num_columns


@dataclass(frozen=True)
class Solve(Mir):
    """Solve `a x = b` by LU factorization in f32: a `[..., n, n]`, b `[..., n, k]`, or a `[n, n]`, b `[n]`.

    A singular matrix gives infinities or NaN, as in `jax.numpy.linalg.solve`.
    """

    traits = replace(FULL_PRECISION, flops=eliminations)
    operands = "a:float[…,N!,N!] b:a"

    def check(self, a: TensorType, b: TensorType) -> None:
        rows: Sequence[Any] = b.shape if (a.rank, b.rank) == (2, 1) else b.shape[:-1]
        if tuple(rows) != tuple(a.shape[:-1]):
            raise ShapeError(f"solve: expected a [..., n, n] and b [..., n, k], or a [n, n] and b [n]; got {a} and {b}")

    def eval(self, a: Array, b: Array) -> Array:
        solution: Array = jnp.linalg.solve(a.astype(jnp.float32), b.astype(jnp.float32))
        return solution.astype(a.dtype)
