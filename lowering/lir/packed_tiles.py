"""A kernel of Pallas (Triton backend) for products of some rows with a weight whose packed codes have 8 bits.

Each program decodes a tile of the matrix into registers and multiplies it; no decoded matrix is written to memory.
Measured on one H200, bf16, 64 rows, Q8_0, µs, floats, decoded by XLA and this kernel: 16384 x 2048 21, 65 and 33; 2048
x 8192 18, 39 and 21; 128256 x 2048 136, 457 and 222. With codes of 4 bits it gained little, and in some shapes lost.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import group_scales
from rlx_jax.lowering.lir.implementations import few_rows, with_reference
from rlx_jax.lowering.lir.kernels import kernel_call
from rlx_jax.lowering.lir.mosaic import pl
from rlx_jax.lowering.lir.packed import KERNEL_TILE, PackedWeight, dequant_matmul, has_tiles

AnyArray = Any

# Programs that one Hopper GPU runs at once, and the warps and the stages of loads of each.
PROGRAMS, WARPS, STAGES = 256, 4, 4


def multiply_tiles(x: AnyArray, w: PackedWeight) -> AnyArray:
    """Compute the product of x `[M, K]` with a packed weight `[N, K]`, in float32."""
    (height, width), rows, (tile_rows, columns) = w.shape, x.shape[0], KERNEL_TILE
    size = max(16, 1 << (rows - 1).bit_length())  # of a product in a kernel
    x = jnp.pad(x.astype(w.dtype), ((0, size - rows), (0, 0)))
    packing, codes, scales = SCHEMES[w.scheme], w.arrays["codes"], w.arrays["scales"]
    # Bits of float16 are converted in the kernel, which reads half as much.
    scales = scales.view(jnp.float16) if packing.scale == "f16" else group_scales(w.arrays, w.scheme)["scales"]
    group = min(packing.block or width, columns)
    scales = jnp.repeat(scales, width // group // scales.shape[1], axis=1)
    # Parts of a row that different programs sum, so that a matrix of few rows occupies all of the GPU.
    tiles, parts = width // columns, max(1, PROGRAMS * tile_rows // height)
    parts = max(n for n in range(1, min(parts, tiles) + 1) if tiles % n == 0)

    def kernel(x: Any, codes: Any, scales: Any, out: Any) -> None:
        n, part = (pl.program_id(axis) for axis in range(2))
        tile = pl.ds(n * tile_rows, tile_rows)

        def step(i: Any, total: Any) -> Any:
            first = (part * (tiles // parts) + i) * columns
            scale = scales[tile, pl.ds(first // group, columns // group)].astype(jnp.float32)
            values = codes[tile, pl.ds(first, columns)].astype(jnp.float32).reshape(tile_rows, -1, group)
            values = (scale[:, :, None] * values).reshape(tile_rows, columns).astype(w.logical_dtype).astype(w.dtype)
            axes = (((1,), (1,)), ((), ()))
            return total + lax.dot_general(
                x[:, pl.ds(first, columns)], values, axes, preferred_element_type=jnp.float32
            )

        out[part, :, tile] = lax.fori_loop(0, tiles // parts, step, jnp.zeros((size, tile_rows), jnp.float32))

    shape = jax.ShapeDtypeStruct((parts, size, height), jnp.float32)
    sums = kernel_call(kernel, shape, (height // tile_rows, parts), WARPS, STAGES)(x, codes, scales)
    return sums.sum(axis=0)[:rows]


@with_reference(functools.partial(dequant_matmul, "cuda"))
def multiply(op: MatMul | FusedMatMulBiasAct, *operands: AnyArray) -> AnyArray:
    """Compute a product by the kernel."""
    return few_rows(multiply_tiles, op, *operands)


def packed_tiles(op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: AnyArray, *bias: AnyArray) -> AnyArray:
    """Compute a product by the kernel; as without it, if this weight is a float, or packed by another scheme.

    Layers of one type may have weights of several schemes.
    """
    if not isinstance(w, PackedWeight):
        return op.eval(x, w, *bias)
    has_kernel = has_tiles(w.scheme, w.shape, math.prod(x.shape[:-1]))
    return (multiply if has_kernel else functools.partial(dequant_matmul, "cuda"))(op, x, w, *bias)
