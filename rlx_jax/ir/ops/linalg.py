"""Matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.custom import traced_flops
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.traits import Types, product_traits
from rlx_jax.ir.types import TensorType

Array = jax.Array


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

    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        a, b = operands
        if a.dtype != b.dtype:
            raise DTypeError(f"matmul: operands are {a} and {b}; cast one of them")
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
