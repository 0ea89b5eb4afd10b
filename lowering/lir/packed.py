"""Packed parameters in a running program, and the implementations of the ops that read them.

A parameter that stays packed on the device is a `PackedWeight`. Ops that are not listed in `packed_implementation`
decode it first; the result is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES, decode_arrays
from rlx_jax.ir.param import Program, packing_of, without_casts

AnyArray = Any

# Rows of x up to which a product is computed as one fused multiplication and sum, without a decoded matrix.
MAX_FUSED_ROWS = 4
# Bytes of the decoded part of a matrix that a product of many rows holds at a time.
TILE_BYTES = 2**26


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A parameter that is packed on the device.

    Attributes:
        arrays: its arrays by name, with types as `Scheme.array_types` returns them.
        scheme: the name of its scheme.
        dtype: the dtype that its decoded values are rounded to.
        logical_dtype: the dtype of the checkpoint, which they are rounded to before.
    """

    arrays: dict[str, AnyArray]
    scheme: str = field(metadata={"static": True})
    dtype: np.dtype[Any] = field(metadata={"static": True})
    logical_dtype: np.dtype[Any] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""
        *rows, size = self.arrays["codes"].shape
        return (*rows, size * 8 // SCHEMES[self.scheme].codes[0].bits)

    def decode(self) -> AnyArray:
        """Return the values."""
        return decode_arrays(self.arrays, self.scheme).astype(self.logical_dtype).astype(self.dtype)

    def rows(self, take: Callable[[AnyArray, int], AnyArray]) -> PackedWeight:
        """Return some rows: `take(array, n)` selects them from an array in which each row is for n rows of this."""
        height = self.shape[-2]
        taken = {name: take(array, -(-height // array.shape[-2])) for name, array in self.arrays.items()}
        return replace(self, arrays=taken)


def packed_weight(program: Program, arrays: Mapping[str, AnyArray]) -> PackedWeight:
    """Return the parameter of a program that is stored as these arrays."""
    scheme = packing_of(program)
    assert scheme is not None
    return PackedWeight(dict(arrays), scheme, program.type.dtype, without_casts(program).type.dtype)


def decoded(operand: AnyArray) -> AnyArray:
    """Return an operand, decoded if it is packed."""
    return operand.decode() if isinstance(operand, PackedWeight) else operand


def packed_implementation(op: Mir, operands: tuple[AnyArray, ...]) -> Callable[..., AnyArray] | None:
    """Return the function that runs an op on packed operands; None if they are to be decoded."""
    if isinstance(op, Gather) and isinstance(operands[0], PackedWeight):
        return dequant_gather
    if not isinstance(op, MatMul | FusedMatMulBiasAct) or not isinstance(operands[1], PackedWeight):
        return None
    if op.contract == 0 or len(operands[1].shape) != 2:
        return None
    return dequant_matmul


def dequant_gather(op: Gather, table: PackedWeight, ids: AnyArray) -> AnyArray:
    """Look up rows of a packed table `[V, H]`, and decode these rows alone."""
    taken = table.rows(lambda array, height: jnp.take(array, ids // height, axis=0, mode="clip"))
    if SCHEMES[table.scheme].rows == 1:
        return taken.decode()
    # Each row has its own scales now, as if it were the only one of a matrix.
    arrays = {name: array[..., None, :] for name, array in taken.arrays.items()}
    return replace(taken, arrays=arrays).decode()[..., 0, :]


def dequant_matmul(op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: PackedWeight, *bias: AnyArray) -> AnyArray:
    """Compute a product with a packed weight `[N, K]`: x `[…, K]` → `[…, N]`, accumulated in float32.

    The matrix is never decoded as a whole: few rows are one fused multiplication and sum, and for many rows the product
    is computed for one tile of the matrix after another.
    """
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(dequant_matmul(op.product, x, w), *bias)
    num_rows = math.prod(x.shape[:-1])
    if num_rows <= MAX_FUSED_ROWS:
        flat = x.astype(jnp.float32).reshape(num_rows, 1, -1)
        y = (w.decode().astype(jnp.float32)[None] * flat).sum(axis=-1)
        return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)
    height, width = w.shape
    unit = SCHEMES[w.scheme].rows
    tile = max(1, TILE_BYTES // (width * w.dtype.itemsize * unit)) * unit
    if height <= tile:
        return op.eval(x, w.decode())
    count = height // tile

    def product(start: AnyArray, size: int) -> AnyArray:
        rows = w.rows(lambda a, n: lax.dynamic_slice_in_dim(a, start // n, -(-size // n), a.ndim - 2))
        return op.eval(x, rows.decode())

    tiles = lax.map(lambda number: product(number * tile, tile), jnp.arange(count, dtype=jnp.int32))
    y = jnp.moveaxis(tiles, 0, -2).reshape(*x.shape[:-1], count * tile)
    rest = height - count * tile
    return jnp.concatenate([y, product(count * tile, rest)], axis=-1) if rest else y
