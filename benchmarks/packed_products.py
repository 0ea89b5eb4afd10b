"""The kernels of products, with packed weights and bf16 ones, against float32, for 1 to 8 rows on a GPU.

    python benchmarks/packed_products.py [--schemes int8/32,gguf_q4k] [--sizes 2048x2048] [--rows 1,8]

Prints the largest error of each kernel relative to what rounding explains; exits with 1 if one is larger.
`--interpret` checks the script on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.ir.graph import Builder, Graph, Param, TypeCache
from rlx_jax.ir.kernel_group import KernelGroup
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import decode_arrays
from rlx_jax.ir.param import Key, Quantized
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.lowering.lir.packed import PackedWeight
from rlx_jax.lowering.lir.product_groups import group_products, run_group
from rlx_jax.lowering.lir.row_products import VECTORS

BF16 = as_dtype("bf16")
SIZES = "2048x2048,3072x2048,2048x8192,8192x2048,1024x3072,6144x1024,4096x14336,1056x4096"


def make_group(scheme: str, height: int, columns: int, rows: int, parts: int) -> KernelGroup | None:
    """Return the kernel of a product and a sum after it: of both halves, or with another operand."""
    b, weight = Builder("product", TypeCache(), Origin(("block",))), TensorType((height, columns), BF16)
    key = Key("w", type=weight)
    leaf = b.leaf(Param((Quantized(key, scheme) if scheme else key,), type=weight))
    product = b(MatMul(1), b.input("x", TensorType((rows, 1, columns), BF16)), leaf)
    if parts == 2:
        out = b(Binary("add"), *b.add(SplitLast((height // 2,) * 2), product))
    else:
        out = b(Binary("add"), b.input("r", TensorType((rows, 1, height), BF16)), product)
    graph: Graph = group_products(b.finish([out], ["y"]), TypeCache())
    return next((node.op for node in graph.nodes if isinstance(node.op, KernelGroup)), None)


def random_weight(scheme: str, height: int, columns: int) -> Any:
    """Return the arrays of a packed weight with all codes and scales over three decades; for "" a weight in bf16."""
    rng, arrays = np.random.default_rng(0), {}
    if not scheme:
        return jnp.asarray(rng.normal(size=(height, columns)), BF16)
    for name, t in SCHEMES[scheme].array_types((height, columns)).items():
        shape = [int(n) for n in t.shape]
        arrays[name] = rng.integers(0, 256, (*shape, t.dtype.itemsize), np.uint8).view(t.dtype)[..., 0]
        if name == "scales":
            halves = arrays[name].view(np.float16)
            is_scale = np.arange(halves.shape[-1]) % 8 < (2 if SCHEMES[scheme].six_bits else 8)
            halves[:, is_scale] = 10 ** rng.uniform(-5, -2, (height, is_scale.sum()))
    return jax.tree.map(jnp.asarray, arrays)


@functools.partial(jax.jit, static_argnums=(0, 4))
def expected(scheme: str, arrays: Any, x: Any, extra: Any, parts: int) -> tuple[Any, Any]:
    """Return the exact results, and the largest differences that rounding to bf16 and sums in float32 make."""
    w = decode_arrays(arrays, scheme) if scheme else arrays.astype(jnp.float32)
    x = x[:, 0].astype(jnp.float32)
    y, size = (jnp.dot(a, b.T, precision="highest") for a, b in ((x, w), (abs(x), abs(w))))
    halves = jnp.split(y, 2, axis=-1) if parts == 2 else [y, extra[:, 0].astype(jnp.float32)]
    small = sum(jnp.split(size, parts, axis=-1)) * 2.0**-19
    total = halves[0] + halves[1]
    return total, (abs(halves[0]) + abs(halves[1]) + abs(total)) * 2.0**-8 + small


def check(scheme: str, height: int, columns: int, counts: list[int], interpret: Any) -> bool:
    """Print a line for each number of rows; return whether rounding explains all errors."""
    arrays, rng, is_right = random_weight(scheme, height, columns), np.random.default_rng(1), True
    weight = PackedWeight(arrays, scheme, BF16, BF16) if scheme else arrays
    for rows in counts:
        parts = 1 + rows % 2 if height % 64 == 0 else 1
        row: dict[str, Any] = {"scheme": scheme or "bf16", "size": f"{height}x{columns}", "rows": rows, "parts": parts}
        if (group := make_group(scheme, height, columns, rows, parts)) is None:
            print(json.dumps(row | {"kernel": None}), flush=True)
            continue
        x = jnp.asarray(rng.normal(size=(rows, 1, columns)), BF16)
        extra = [] if parts == 2 else [jnp.asarray(rng.normal(size=(rows, 1, height)), BF16)]
        run = functools.partial(run_group, group, interpret=interpret)
        run = run if interpret is not None else jax.jit(run)
        (found,) = run(x, weight, *extra)
        want, allowed = expected(scheme, arrays, x, extra[0] if extra else None, parts)
        errors = abs(found.reshape(rows, -1).astype(jnp.float32) - want) / allowed
        row["error"] = round(float(jnp.max(jnp.where(jnp.isfinite(errors), errors, jnp.inf))), 3)
        is_right &= row["error"] <= 1
        print(json.dumps(row), flush=True)
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(scheme or "bf16" for scheme in VECTORS))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rows", default="1,2,3,4,5,8")
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    interpret, is_right = None, True
    if args.interpret:
        from jax.experimental.pallas import mosaic_gpu

        jax.config.update("jax_num_cpu_devices", 8)  # the interpreter needs a thread for each warpgroup
        interpret = mosaic_gpu.InterpretGPUParams()
    for scheme in args.schemes.split(","):
        for size in args.sizes.split(","):
            height, columns = map(int, size.split("x"))
            is_right &= check(
                scheme.replace("bf16", ""), height, columns, [int(n) for n in args.rows.split(",")], interpret
            )
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
