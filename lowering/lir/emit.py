"""Instructions of a GPU in kernels, emitted by MLIR, which is imported when it is first used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from rlx_jax.lowering.lir.mosaic import LazyModule, plgpu

__all__ = [
    "announce_rows", "arith", "array_of", "emit_asm", "ir", "llvm", "mgpu", "mma", "number", "vector", "words",
]  # fmt: skip

if TYPE_CHECKING:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector
else:
    ir, mgpu = LazyModule("jaxlib.mlir.ir"), LazyModule("jax.experimental.mosaic.gpu")
    arith, llvm, vector = (LazyModule(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "llvm", "vector"))


def emit_asm(asm: str, operands: Sequence[Any], constraints: str) -> None:
    """Emit instructions of the device."""
    llvm.inline_asm(None, operands, asm, constraints, has_side_effects=True)


def announce_rows(copied: Any, slots: int, step: Any, begun: int) -> None:
    """Wait until rows of a step are copied by `cp.async`, so that `wgmma` reads them, and pass the barrier of its slot.

    Args:
        copied: a barrier for each slot.
        slots: the number of slots, which steps fill one after another.
        step: the number of the step.
        begun: the steps begun after it.
    """
    asm = f"cp.async.wait_group {begun}; fence.proxy.async.shared::cta;"
    plgpu.inline_mgpu()(lambda _: emit_asm(asm, [], ""))()
    plgpu.barrier_arrive(copied.at[lax.rem(step, slots)])


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
