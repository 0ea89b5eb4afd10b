"""Pallas, its Mosaic GPU backend and MLIR, each imported when it is first used, as that takes a quarter of a second."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax import lax

__all__ = [
    "LazyModule",
    "arith",
    "array_of",
    "emit_asm",
    "ir",
    "llvm",
    "load",
    "mgpu",
    "mma",
    "number",
    "pl",
    "plgpu",
    "run_kernel",
    "transforms",
    "vector",
    "wait_for_rows",
    "words",
]


class LazyModule:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector
else:
    ir, mgpu = LazyModule("jaxlib.mlir.ir"), LazyModule("jax.experimental.mosaic.gpu")
    arith, llvm, vector = (LazyModule(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "llvm", "vector"))
    pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.mosaic_gpu")


def run_kernel(
    body: Callable[[Any], None], inputs: Mapping[str, Any], outputs: Mapping[str, Any], scratch: Mapping[str, Any],
    grid: Mapping[str, int], groups: int = 0, interpret: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """Run a kernel and return its results in order.

    Args:
        body: a program. Its argument has by name what `inputs`, `outputs` and `scratch` name as references, and the
            place of the program: its number along each axis of the grid, and `group`, the number of the warpgroup.
        inputs: arrays, or lists of arrays.
        outputs: arrays with the shapes and dtypes of the results, or lists of them.
        scratch: types of shared memory and barriers.
        grid: the number of programs along each axis.
        groups: the warpgroups of a program; 0 for one that needs no number.
        interpret: parameters of Mosaic's interpreter; None to compile.
        params: fields of `plgpu.CompilerParams`.
    """
    named, axes = {**inputs, **outputs, **scratch}, (*(["group"] if groups else []), *grid)

    def flat(values: Mapping[str, Any]) -> list[Any]:
        return [x for value in values.values() for x in (value if isinstance(value, list) else [value])]

    def program(*refs: Any) -> None:
        left = iter(refs)
        own = {k: [next(left) for _ in v] if isinstance(v, list) else next(left) for k, v in named.items()}
        body(SimpleNamespace(**own, **{axis: lax.axis_index(axis) for axis in axes}))

    threads: dict[str, Any] = {"num_threads": groups, "thread_name": "group"} if groups else {}
    run = plgpu.kernel(
        program,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat(outputs)],
        scratch_types=flat(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(**params),
        interpret=interpret,
        **threads,
    )
    return run(*flat(inputs))


def load(ref: Any, layout: Any, optimized: bool = True) -> Any:
    """Return the values of a reference in a layout, by `plgpu.load`, which jax 0.10 declares otherwise."""
    return cast(Any, plgpu.load)(ref, layout=layout, optimized=optimized)


def transforms(columns: int = 64) -> tuple[Any, ...]:
    """Return the layout in shared memory of 16-bit tiles that `wgmma` reads."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


def emit_asm(asm: str, operands: Sequence[Any], constraints: str) -> None:
    """Emit instructions of the device."""
    llvm.inline_asm(None, operands, asm, constraints, has_side_effects=True)


def wait_for_rows(begun: int) -> None:
    """Wait until all copies by `cp.async` but the last `begun` have ended, and `wgmma` reads what they wrote."""
    asm = f"cp.async.wait_group {begun}; fence.proxy.async.shared::cta;"
    plgpu.inline_mgpu()(lambda _: emit_asm(asm, [], ""))()


def number(value: int) -> Any:
    """Return 32 bits in a kernel."""
    return mgpu.c(value - 2**32 if value >= 2**31 else value, ir.IntegerType.get_signless(32))


def words(register: Any) -> list[Any]:
    """Return the words of 32 bits of a register of a kernel."""
    element = register.type.element_type
    bits = 16 if str(element) in ("bf16", "f16") else int(element.width)
    count = register.type.shape[0] * bits // 32
    vectors = vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)), register)
    return [vector.extract(vectors, [], [i]) for i in range(count)]


def array_of(registers: Sequence[Any], layout: Any, shape: tuple[int, ...], is_signed: Any = None) -> Any:
    """Return registers of a kernel, in order, as an array in a layout of Pallas."""
    device_layout, objects = layout.to_mgpu(), np.empty(len(registers), object)
    objects[:] = registers
    objects = objects.reshape(device_layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=objects, _layout=device_layout, _is_signed=is_signed)


def mma(sums: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Return sums plus the products of 16 rows and 16 columns of a with 8 columns of b."""
    f32 = ir.F32Type.get()
    asm = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    result: Any = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *sums], asm, constraints)
    return [llvm.extractvalue(f32, result, [i]) for i in range(4)]
