"""Packed parameters in a running program, and the implementations of the ops that read them.

A parameter that stays packed on the device is a `PackedWeight`. Ops that are not listed in `packed_implementation`
decode it first; the result is the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.experts import GroupedMatMul
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES, Codes, Scheme
from rlx_jax.ir.packed_values import decode_arrays, decode_codes, group_scales
from rlx_jax.ir.param import Program, packing_of, without_casts
from rlx_jax.ir.types import DimLike, TensorType, short_name
from rlx_jax.lowering.lir.lanes import can_sum_lanes, packed_lanes, sums_bytes

AnyArray = Any

# Rows of x up to which a product is computed as one fused multiplication and sum, without a decoded matrix. Measured on
# one H200, 16384 x 2048, bf16, µs, floats, fused and by tiles: Q8_0 2 rows 28, 45 and 82, 4 rows 30, 69 and 75; Q4_K 2
# rows 28, 63 and 73, 4 rows 30, 100 and 75. On two CPU cores, 3072 x 576, f32, ms for 16 products with Q8_0: 1 row 5.9,
# 4.8 and 13.3, 2 rows 8.5, 7.1 and 11.7, 4 rows 8.7, 18.5 and 16.1.
MAX_FUSED_ROWS = 2
# Bytes of the decoded part of a matrix that a product holds at a time. On a CPU it stays in the cache; on a GPU smaller
# ones are slower, and larger ones not faster: 16384 rows of x by the same matrix 1358 µs as floats, 1365 by tiles of
# 2**26 bytes, 1897 by tiles of 2**24.
TILE_BYTES = {"cpu": 2**20}
DEFAULT_TILE_BYTES = 2**26


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
        scheme = SCHEMES[self.scheme]
        return scheme.stored_axes((*rows, size * 8 // scheme.codes[0].bits))

    def rows_of(self, array: AnyArray, height: int) -> int:
        """Return for how many rows one row of an array is, if this matrix has `height` rows."""
        return {height: 1, 1: height}.get(array.shape[0], SCHEMES[self.scheme].rows)

    def decode(self) -> AnyArray:
        """Return the values."""
        return decode_arrays(self.arrays, self.scheme).astype(self.logical_dtype).astype(self.dtype)

    def take(self, index: AnyArray) -> AnyArray:
        """Return the values of the matrices `index` of a stack `[E, …, N, K]`."""
        arrays = {name: jnp.take(array, index, axis=0, mode="clip") for name, array in self.arrays.items()}
        return replace(self, arrays=arrays).decode()


def packed_weight(program: Program, arrays: Mapping[str, AnyArray]) -> PackedWeight:
    """Return the parameter of a program that is stored as these arrays."""
    scheme = packing_of(program)
    assert scheme is not None
    return PackedWeight(dict(arrays), scheme, program.type.dtype, without_casts(program).type.dtype)


def decoded(operand: AnyArray) -> AnyArray:
    """Return an operand, decoded if it is packed."""
    return operand.decode() if isinstance(operand, PackedWeight) else operand


def packed_implementation(op: Mir, operands: tuple[AnyArray, ...], target: str) -> Callable[..., AnyArray] | None:
    """Return the function that runs an op on packed operands; None if they are to be decoded."""
    if isinstance(op, Gather) and isinstance(operands[0], PackedWeight):
        return dequant_gather
    if isinstance(op, MatMul | FusedMatMulBiasAct) and isinstance(operands[1], PackedWeight):
        return None if op.contract == 0 else functools.partial(dequant_matmul, target)
    if isinstance(op, GroupedMatMul) and isinstance(operands[1], PackedWeight):
        return dequant_grouped_matmul
    return None


def choose_dequant_matmul(
    op: MatMul | FusedMatMulBiasAct, shape: Sequence[DimLike], scheme: str, target: str
) -> tuple[Literal["decoded", "fused", "tiles"], str]:
    """Return how a product of x with this shape, which may be symbolic, and a packed weight is computed, and why."""
    if op.contract == 0:
        return "decoded", "the rows of the packed weight are not its outputs"
    if all(isinstance(n, int) for n in shape) and (target != "cpu" or can_sum_lanes(scheme, int(shape[-1]))):
        rows = math.prod(int(n) for n in shape[:-1])
        if 0 < rows <= MAX_FUSED_ROWS:
            return "fused", f"packed, {rows} rows: the sum decodes each value"
    return "tiles", "packed, decoded tile by tile"


# Rows of x that the kernel of `packed_tiles.py` multiplies: fewer have kernels of their own, and more are bound by the
# product. Rows and columns of the tiles that it decodes.
TILED_ROWS = range(9, 129)
KERNEL_TILE = (64, 128)


def multiplies_tiles(call: tuple[Mir, Sequence[TensorType]], programs: Sequence[Program]) -> bool:
    """Return whether the kernel of `packed_tiles.py` computes a product of these types with some of these weights."""
    op, (x, w, *_) = call
    assert isinstance(op, MatMul | FusedMatMulBiasAct)
    if (
        op.contract == 0
        or short_name(x.dtype) != "bf16"
        or x.dtype != w.dtype
        or not all(isinstance(n, int) for n in x.shape)
    ):
        return False
    rows = math.prod(int(n) for n in x.shape[:-1])
    return any(has_tiles(scheme, w.shape, rows) for scheme in map(packing_of, programs) if scheme is not None)


def has_tiles(scheme: str, shape: Sequence[DimLike], rows: int) -> bool:
    """Return whether the kernel of `packed_tiles.py` multiplies so many rows with a weight `[N, K]` of a scheme."""
    packing, (height, width) = SCHEMES[scheme], KERNEL_TILE
    block, codes = packing.block, packing.codes
    if codes[0].bits == 8:
        kinds: list[dict[str, Any]] = [{"signed": True}, {"table": "e4m3"}]
        plain = [Scheme(scheme, codes, block, packing.scale, rows=packing.rows, **kind) for kind in kinds]
        is_known = packing in plain and packing.scale in ("f16", "f32") and len(codes) == 1
        is_known = is_known and (block is None or block == height // 2 or block % height == 0)
    else:
        q4k = replace(SCHEMES["gguf_q4k"], name=scheme)
        is_known = packing in (q4k, *(Scheme(scheme, (Codes(4, n // 2),), n, "f16", zero=8) for n in (32, 128)))
    is_divided = not (int(shape[0]) % height or int(shape[1]) % width or (packing.rows > 1 and packing.rows % height))
    return rows in TILED_ROWS and is_known and is_divided and (not packing.six_bits or int(shape[1]) % 256 == 0)


def dequant_gather(op: Gather, table: PackedWeight, ids: AnyArray) -> AnyArray:
    """Look up rows of a packed table `[V, H]`, or matrices of a stack, and decode these alone."""
    if len(table.shape) > 2:
        return table.take(ids)
    height = table.shape[0]

    def take(array: AnyArray) -> AnyArray:
        """Return the rows for the ids, each as the only row of a matrix, with the scales of its own."""
        return jnp.take(array, ids // table.rows_of(array, height), axis=0, mode="clip")[..., None, :]

    return jax.tree.map(take, table).decode()[..., 0, :]


def dequant_grouped_matmul(op: GroupedMatMul, x: AnyArray, w: PackedWeight, ids: AnyArray) -> AnyArray:
    """Compute the product of each row with one of several packed matrices, which are decoded as `op.run` takes them."""
    return op.run(decoded(x), ids, w.shape, w.take)


def dequant_matmul(
    target: str, op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: PackedWeight, *bias: AnyArray
) -> AnyArray:
    """Compute a product with a packed weight `[N, K]`: x `[…, K]` → `[…, N]`, accumulated in float32.

    The matrix is never decoded as a whole: few rows are one fused multiplication and sum, and for many rows the product
    is computed for one tile of the matrix after another.
    """
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(dequant_matmul(target, op.product, x, w), *map(decoded, bias))
    x = decoded(x)
    if "order" in w.arrays:
        x = jnp.take(x, w.arrays["order"][0], axis=-1, mode="clip")
        w = replace(w, arrays={name: array for name, array in w.arrays.items() if name != "order"})
    if choose_dequant_matmul(op, x.shape, w.scheme, target)[0] == "fused":
        flat = x.astype(jnp.float32).reshape(-1, 1, x.shape[-1])
        if target == "cpu":
            dtypes = (w.logical_dtype, w.dtype)
            y = jax.checkpoint(lambda x, arrays: packed_lanes(x, arrays, w.scheme, dtypes))(flat[:, 0], w.arrays)
        else:
            y = (w.decode().astype(jnp.float32)[None] * flat).sum(axis=-1)
        return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)
    tile, height = tile_rows(w.shape, w.scheme, w.dtype, target), w.shape[0]
    return tiled_product(op, x, w, tile) if target == "cpu" and tile < height else unrolled_product(op, x, w, tile)


def tile_rows(shape: Sequence[DimLike], scheme: str, dtype: np.dtype[Any], target: str) -> int:
    """Return how many rows of a weight `[N, K]` to decode at a time.

    On a CPU it is at most half of them: XLA unrolls a loop of one step, and would then compute the scales of a group
    again for each of its values.
    """
    height, width = map(int, shape)
    unit = SCHEMES[scheme].rows
    rows = min(TILE_BYTES.get(target, DEFAULT_TILE_BYTES) // (width * dtype.itemsize), height)
    rows = min(rows, -(-height // 2)) if target == "cpu" else rows
    return min(max(1, rows // unit) * unit, height)


def unrolled_product(op: MatMul, x: AnyArray, w: PackedWeight, tile: int) -> AnyArray:
    """Compute a product with a packed weight, decoding `tile` of its rows at a time.

    On a GPU a loop of XLA takes twice as long: one H200, bf16, 64 rows by 8192 x 2048, Q8_0, in tiles of 4096 rows: 84
    and 32 µs.
    """
    height, products = w.shape[0], list[AnyArray]()
    # A gradient decodes a tile again, instead of keeping a decoded copy of each.
    product = jax.checkpoint(lambda x, part: op.eval(x, part.decode()))
    each = {name: w.rows_of(array, height) for name, array in w.arrays.items()}
    for start in range(0, height, tile):
        # XLA would otherwise decode before the loop over steps, as this needs no activations, and keep the result.
        x, products, w = lax.optimization_barrier((x, products, w))
        size = min(tile, height - start)
        arrays = {n: a[start // each[n] : start // each[n] + -(-size // each[n])] for n, a in w.arrays.items()}
        part = replace(w, arrays=arrays)
        products.append(product(x, part))
    return products[0] if len(products) == 1 else jnp.concatenate(products, axis=-1)


def tiled_product(op: MatMul, x: AnyArray, w: PackedWeight, tile: int) -> AnyArray:
    """Compute `unrolled_product` as a loop, for a CPU and more than one tile.

    The scales of groups are computed before the loop, which XLA:CPU would otherwise do again for each value.
    """
    height = w.shape[0]
    count = height // tile
    scales = group_scales(w.arrays, w.scheme)

    # A gradient decodes a tile again instead of keeping all of them.
    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(1,))
    def product(start: AnyArray, size: int, x: AnyArray) -> AnyArray:
        def rows(array: AnyArray) -> AnyArray:
            each = w.rows_of(array, height)
            return lax.dynamic_slice_in_dim(array, start // each, -(-size // each), 0)

        part = decode_codes(jax.tree.map(rows, w.arrays), w.scheme, jax.tree.map(rows, scales))
        return op.eval(x, part.astype(w.logical_dtype).astype(w.dtype))

    starts = jnp.arange(count, dtype=jnp.int32) * tile
    y = jnp.moveaxis(lax.map(lambda start: product(start, tile, x), starts), 0, -2).reshape(*x.shape[:-1], count * tile)
    rest = height - count * tile
    last = product(jnp.int32(count * tile), rest, x) if rest else None
    return y if last is None else jnp.concatenate([y, last], axis=-1)


def decoding_bytes(program: Program, target: str) -> int:
    """Return the bytes of temporaries that a product with a packed parameter takes: a tile or the sums of lanes, and
    scales of all groups.

    Experts are decoded as a whole.
    """
    scheme, (*lead, width) = packing_of(program), program.type.shape
    assert scheme is not None
    dtype, packing = program.type.dtype, SCHEMES[scheme]
    rows = tile_rows((*lead, width), scheme, dtype, target) if len(lead) == 1 else program.type.size // int(width)
    groups = int(width) // (packing.group or packing.block or int(width))
    per_group = 8 if packing.minimum else 4
    values = rows * int(width) * (4 + dtype.itemsize)
    if target == "cpu" and len(lead) == 1 and can_sum_lanes(scheme, int(width)):
        values = max(values, sums_bytes(int(lead[0]), int(width), scheme, MAX_FUSED_ROWS))
    return values + program.type.size // int(width) * groups * per_group
