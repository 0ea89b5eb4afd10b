"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.custom import traced_flops
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.traits import REDUCTION, Types, product_traits
from rlx_jax.ir.types import TensorType, is_float, is_static


def check_product(op: str, x: TensorType, w: TensorType, contract: int) -> None:
    """The checks of `x · w` where axis `contract` (0 or 1) of `w` is summed over."""
    if contract not in (0, 1):
        raise ShapeError(f"{op}: contract is 0 or 1, an axis of the weight; got {contract!r}")
    if w.rank != 2 or x.rank < 1:
        raise ShapeError(f"{op}: the weight has rank 2, got {w}, and x at least 1, got {x}").of(1)
    if x.shape[-1] != w.shape[contract]:
        turned = f"transpose={not contract}" if op == "linear" else "transpose w"
        other = f"; the other orientation of w fits: {turned}" if x.shape[-1] == w.shape[1 - contract] else ""
        raise ShapeError(
            f"{op}: last axis of x {x} is {x.shape[-1]}, axis {contract} of w {w} is {w.shape[contract]}{other}"
        ).of(0, 1)
    if x.dtype != w.dtype:
        ids = op == "linear" and x.dtype.kind in "iu"
        told = "token ids go through an embedding first, other integers are cast" if ids else "cast one of them"
        raise DTypeError(f"{op}: x is {x}, w is {w}; {told}")


def check_linear(op: str, operands: Types, contract: int, f32_result: bool) -> None:
    """The checks of `x · w [+ b]`: b is as long as the product is wide, in its dtype, and never broadcast."""
    x, w, *bias = operands
    check_product(op, x, w, contract)
    want = TensorType((w.shape[1 - contract],), jnp.dtype("float32") if f32_result else x.dtype)
    if bias and bias[0] != want:
        raise ShapeError(f"{op}: the bias of x {x} and w {w} is {want}, got {bias[0]}").of(2)


def product_text(name: str, contract: int, precision: str, f32_result: bool) -> str:
    """How dumps print a product: what is not at its default."""
    notes = [f"contract={contract}"] if contract else []
    notes += [f"precision={precision}"] if precision != "default" else []
    notes += ["f32"] if f32_result else []
    return f"{name}({', '.join(notes)})" if notes else name


def _contraction(op: Any, operands: Types, results: Types) -> int:
    return 2 * results[0].size * int(operands[0].shape[-1])


@dataclass(frozen=True)
class MatMul(Mir):
    """`x · w` with a rank-2 `w`: x `[…, K]`; w `[K, N]` (`contract=0`) or `[N, K]` (`contract=1`) → `[…, N]`.

    The orientation is the Layout's choice. `precision` pins the algorithm of this one product
    ("default", "high", "highest"), whatever jax's global configuration says.
    """

    traits = product_traits(_contraction)

    contract: int = 0
    precision: str = "default"
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        x, w = operands
        check_product("matmul", x, w, self.contract)

    def eval(self, x: Array, w: Array) -> Array:
        dims = (((x.ndim - 1,), (self.contract,)), ((), ()))
        dtype = jnp.float32 if self.f32_result else x.dtype
        return lax.dot_general(x, w, dims, precision=lax.Precision(self.precision), preferred_element_type=dtype)

    def text(self) -> str:
        return product_text("matmul", self.contract, self.precision, self.f32_result)


@dataclass(frozen=True)
class BatchMatMul(Mir):
    """NumPy's `a @ b`: `[…, M, K] × […, K, N]`, leading axes broadcast."""

    traits = product_traits(_contraction)
    operands = "a b:a"

    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        a, b = operands
        if min(a.rank, b.rank) < 1 or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
            raise ShapeError(f"matmul: the inner axes of {a} and {b} differ")

    def eval(self, a: Array, b: Array) -> Array:
        if min(a.ndim, b.ndim) > 1:
            a, b = same_rank(a, b)
        return jnp.matmul(a, b, precision=lax.Precision(self.precision))


def product(a: TensorType, b: TensorType) -> MatMul | BatchMatMul:
    """The op of `a @ b`: a `MatMul` where `b` is a matrix."""
    return MatMul() if b.rank == 2 and a.rank > 1 else BatchMatMul()


@dataclass(frozen=True)
class Einsum(Mir):
    """`jax.numpy.einsum(subscripts, *operands)`: a sum over products by named axes. Operands have one dtype.

    `precision` as in `MatMul`; the result, and the sums, are of dtype `result` where it is given.
    """

    traits = product_traits(traced_flops)

    subscripts: str
    precision: str = "default"
    result: np.dtype[Any] | None = None

    def check(self, *operands: TensorType) -> None:
        if len({t.dtype for t in operands}) != 1:
            given = ", ".join(map(str, operands)) or "none"
            raise DTypeError(f"einsum: operands have one dtype, got {given}; cast them")
        terms, _, _ = self.subscripts.partition("->")
        if terms.count(",") + 1 != len(operands):
            raise ShapeError(f"einsum: {self.subscripts!r} reads {terms.count(',') + 1} operands, got {len(operands)}")

    def eval(self, *arrays: Array) -> Array:
        dtype = arrays[0].dtype if self.result is None else self.result
        precision = lax.Precision(self.precision)
        return jnp.einsum(self.subscripts, *arrays, precision=precision, preferred_element_type=dtype).astype(dtype)


# -- spectra, and systems of linear equations --------------------------------------------------

TRANSFORMS = {"fft": jnp.fft.fft, "ifft": jnp.fft.ifft, "rfft": jnp.fft.rfft, "irfft": jnp.fft.irfft}
NORMS = ("backward", "ortho", "forward")
# What a rounded operand would spoil: it keeps its dtype, whatever the program computes in.
WHOLE = replace(REDUCTION, narrows=0)


@dataclass(frozen=True)
class Fft(Mir):
    """The discrete Fourier transform along `axis`, in f32 and c64: `jax.numpy.fft`.

    `fft`: X_k = Σ_j x_j e^(−2πi jk/n), of floats or c64, as c64; `ifft` the inverse, with 1/n. `rfft`: of floats, the
    first ⌊n/2⌋ + 1 of X; `irfft` its inverse, n floats. `n` entries are read, zeros behind the last (None: all; of
    `irfft` 2(m − 1) for m). `norm` says where 1/n stands: `backward` in the inverse, `forward` in the other, `ortho`
    1/√n in both.
    """

    traits = WHOLE
    choices = {"kind": TRANSFORMS, "norm": NORMS}
    operands = "x@axis"

    kind: str
    n: int | None = None
    axis: int = -1
    norm: str = "backward"

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if not (is_float(x.dtype) or (x.dtype == np.complex64 and self.kind != "rfft")):
            raise DTypeError(f"{self.kind}: needs floats{', or c64' * (self.kind != 'rfft')}, got {x}; cast it")
        if not is_static(x.shape[self.axis]):
            raise ShapeError(f"{self.kind}: the size of axis {self.axis} of {x} must be a number")
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1):
            raise ShapeError(f"{self.kind}: n is an int of at least 1, got {self.n!r}")
        if self.kind == "irfft" and self.n is None and x.shape[self.axis] < 2:
            raise ShapeError(f"irfft: of one entry nothing is left; give n=, for {x}")

    def eval(self, x: Array) -> Array:
        wide = x.astype(jnp.float32) if is_float(x.dtype) else x
        found: Array = TRANSFORMS[self.kind](wide, n=self.n, axis=self.axis, norm=self.norm)
        return found


# Matrices of as many rows as columns, in floats.
MATRICES = "a:float[…,N!,N!]"


def eliminations(op: Any, operands: Types, results: Types) -> int:
    """⅔n³ of the factors, and 2n² for each column."""
    n = int(operands[0].shape[-1])
    matrices, columns = operands[0].size // n**2, sum(b.size for b in operands[1:]) // n
    return matrices * (2 * n**3 // 3) + 2 * n * n * columns


@dataclass(frozen=True)
class Solve(Mir):
    """The x with `a x = b`, by LU factors in f32: a `[..., n, n]`, b `[..., n, k]`, or `[n]` beside one `[n, n]`.

    A matrix without an inverse gives infinities or NaN, as `jax.numpy.linalg.solve` does.
    """

    traits = replace(WHOLE, flops=eliminations)
    operands = f"{MATRICES} b:a"

    def check(self, *operands: TensorType) -> None:
        a, b = operands
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
    operands = MATRICES

    def eval(self, a: Array) -> Array:
        found: Array = jnp.linalg.det(a.astype(jnp.float32))
        return found.astype(a.dtype)
