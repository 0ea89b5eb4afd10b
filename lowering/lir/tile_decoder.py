"""The values of packed codes in the kernel of `packed_tiles.py`: decoded in registers, in the layout of `wgmma`.

They are rounded as `PackedWeight.decode` rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.packed import BITS, Scheme
from rlx_jax.ir.packed_values import group_scales
from rlx_jax.lowering.lir.emit import array_of, ir, llvm, vector, words
from rlx_jax.lowering.lir.mosaic import copies, load, pl, plgpu, tiled

AnyArray = Any

# Features of a warpgroup, and columns that it decodes at once; columns of a step.
TILE, STEP = 64, 128


@dataclass(frozen=True)
class Decoder:
    """How the codes of a weight become values.

    A lane has 16 bytes of codes of two rows, codes of 4 bits of both halves of a step.

    Attributes:
        scheme: the scheme.
        logical: the dtype that values are rounded to before bf16.
        interprets: whether the kernel runs in the interpreter, which has no instructions of the device.
    """

    scheme: Scheme
    logical: np.dtype[Any]
    interprets: bool

    @property
    def bits(self) -> int:
        """Return the bits of a code."""
        return self.scheme.codes[0].bits

    @property
    def stride(self) -> int:
        """Return how many columns the second half of a step is after the first, for each lane."""
        return self.scheme.codes[0].stride if self.bits == 4 else TILE

    @property
    def layout(self) -> Any:
        """Return where the scales of a step or half of one are: one, two or four of a row, or words."""
        if self.scheme.six_bits:
            return tiled(((TILE, 4), (16, 4), (8, 4)), (-6,), (-2, *copies(4)))
        n = self.scales_of_row
        if n == 1:
            return plgpu.Layout.WGMMA.reduce(1)
        return tiled(((TILE, n), (16, n), (8, n), (1,)), (-7,), (-3, -2, *copies(4 // n)))

    @property
    def scales_of_row(self) -> int:
        """Return how many scales of a row `fetch` reads."""
        columns = STEP if self.bits == 4 else TILE
        return 4 if self.scheme.six_bits else max(1, columns // (self.scheme.block or columns))

    def fetch(self, scales: Any, first: AnyArray, column: AnyArray) -> AnyArray:
        """Return the bits of scales of `TILE` features, from a column on."""
        rows, block, n = self.scheme.rows, self.scheme.block, self.scales_of_row
        column = 0 if block is None else lax.div(column, block) * (4 if self.scheme.six_bits else 1)
        if rows > 1:
            scale = lax.broadcast_in_dim(scales[lax.div(first, rows), column], (TILE,), ())
            return plgpu.layout_cast(scale, self.layout)
        ref = scales.at[pl.ds(first, TILE), pl.ds(column, n) if n > 1 else column]
        return load(ref, self.layout)

    def decode(self, codes: AnyArray, scales: AnyArray, piece: AnyArray, column: AnyArray) -> AnyArray:
        """Return values in the layout of `wgmma`, with columns in the order of `copy_x`.

        Args:
            codes: bytes of codes.
            scales: as `fetch` returned them.
            piece: the half of a step.
            column: the first column of the step.
        """
        late = lax.rem(lax.div(column, STEP), 2)  # the second half of a block of Q4_K
        if not self.interprets:
            arg_types = code_layout(), self.layout, plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT
            result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
            run = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(self.emit)
            return run(codes, scales, piece, late)
        factors, table = group_scales({"scales": scales.reshape(TILE, -1)}, self.scheme.name), self.scheme.table
        if self.scheme.six_bits:
            factors = {name: array.reshape(TILE, 2, 2, 2)[:, late, :, piece] for name, array in factors.items()}
        codes = codes if self.bits == 8 else codes >> (4 * piece).astype(np.uint8) & 15
        codes = lax.bitcast_convert_type(codes, BITS[table]) if table else codes
        each = {name: array[..., None] for name, array in factors.items()}
        values = (codes.astype(jnp.float32) - self.scheme.zero).reshape(TILE, factors["scales"].shape[1], -1)
        values = each["scales"] * values - each.get("minimums", 0)
        values = values.reshape(TILE, 4, 8, 2).swapaxes(1, 2).reshape(TILE, TILE)
        return values.astype(self.logical).astype(jnp.bfloat16)

    def emit(self, _: Any, codes: Any, scales: Any, piece: Any, late: Any) -> Any:
        """Emit `decode`."""
        piece, late, rows = piece.registers.flat[0], late.registers.flat[0], []
        for register, scale in zip(codes.registers.flat, scales.registers.flat, strict=True):
            factors = [vector.extract(scale, [], [0])]
            if self.scheme.six_bits:
                factors = two_words(SIX_BITS, [*words(scale), piece, late], "r" * 6)
            kinds = "rr" + ("h" if self.scales_are_f16 else "r" * len(factors))
            rows.append([two_words(self.asm(), [word, piece, *factors], kinds) for word in words(register)])
        pair, one = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        ordered = [row[i][j] for i in range(4) for j in range(2) for row in rows]
        pairs = [vector.bitcast(pair, vector.broadcast(one, word)) for word in ordered]
        return array_of(pairs, plgpu.Layout.WGMMA, (TILE, TILE))

    @property
    def scales_are_f16(self) -> bool:
        """Return whether instructions get the bits of float16 as scales, not float32."""
        return self.scheme.scale == "f16" and not self.scheme.six_bits

    def asm(self) -> str:
        """Return the instructions that decode four codes `$2` of a half `$3` by a scale `$4`, and a minimum `$5`."""
        asm = "{ .reg .b32 a<4>, u, s, bias; .reg .b16 h<4>, low, high;"
        asm += "cvt.f32.f16 s, $4;" if self.scales_are_f16 else "mov.b32 s, $4;"
        if self.scheme.table:
            asm += "mov.b32 {low, high}, $2;"
            for i, half in enumerate(("low", "high")):
                asm += f"cvt.rn.f16x2.{self.scheme.table}x2 u, {half}; mov.b32 {{h{2 * i}, h{2 * i + 1}}}, u;"
            each = "cvt.f32.f16 a{i}, h{i}; mul.rn.f32 a{i}, a{i}, s;"
        else:
            # Floats of the bytes are 2¹⁵ and a zero more than the codes. Times a float16 that has at most 24 bits, so
            # that one instruction subtracts it exactly.
            is_8_bit = self.bits == 8
            zero = f"0f{np.float32(-(2**15) - (128 if is_8_bit else self.scheme.zero)).view(np.uint32):08X}"
            half = "shl.b32 u, $3, 2; shr.u32 u, $2, u; and.b32 u, u, 0x0F0F0F0F;"
            asm += "xor.b32 u, $2, 0x80808080;" if is_8_bit else half
            asm += "".join(f"prmt.b32 a{i}, u, 0x4700, 0x54{i}4;" for i in range(4))
            if self.scales_are_f16:
                asm, each = asm + f"mul.rn.f32 bias, s, {zero};", "fma.rn.f32 a{i}, a{i}, s, bias;"
            else:
                product = "fma.rn.f32 a{i}, a{i}, s, $5;" if self.scheme.six_bits else "mul.rn.f32 a{i}, a{i}, s;"
                each = f"add.rn.f32 a{{i}}, a{{i}}, {zero};" + product
        if self.logical == np.float16:
            each += "cvt.rn.f16.f32 h{i}, a{i}; cvt.f32.f16 a{i}, h{i};"
        asm += "".join(each.format(i=i) for i in range(4))
        return asm + "cvt.rn.bf16x2.f32 $0, a1, a0; cvt.rn.bf16x2.f32 $1, a3, a2; }"


def two_words(asm: str, operands: Sequence[Any], kinds: str) -> list[Any]:
    """Return two words that instructions compute from operands, whose registers are of these kinds."""
    i32 = ir.IntegerType.get_signless(32)
    both: Any = llvm.inline_asm(
        llvm.StructType.get_literal([i32, i32]), operands, asm, ",".join(["=&r", "=&r", *kinds])
    )
    return [llvm.extractvalue(i32, both, [i]) for i in range(2)]


def six_bits(factor: int) -> str:
    """Return the instructions for the scale (0) or minus the minimum (1) of a lane, from the words of a block."""
    sign = "neg.f32 f, f;" if factor else ""
    return f"""
        and.b32 a, ${3 + factor}, 0x3F3F3F3F;
        shr.u32 b, $5, {4 * factor}; and.b32 b, b, 0x0F0F0F0F;
        shr.u32 c, ${3 + factor}, 2; and.b32 c, c, 0x30303030; @p or.b32 a, b, c;
        shr.u32 a, a, lane; and.b32 a, a, 255; cvt.rn.f32.u32 a, a;
        cvt.f32.f16 f, h{factor}; {sign} mul.rn.f32 ${factor}, a, f;"""


SIX_BITS = f"""{{
    .reg .b32 a, b, c, lane; .reg .f32 f; .reg .b16 h<2>; .reg .pred p;
    mov.u32 lane, %tid.x; and.b32 lane, lane, 2; add.u32 lane, lane, $6; shl.b32 lane, lane, 3;
    setp.ne.u32 p, $7, 0; mov.b32 {{h0, h1}}, $2; {six_bits(0)} {six_bits(1)}
}}"""


def code_layout() -> Any:
    """Return the layout of codes: a lane has 16 neighbours of two rows."""
    return tiled(((TILE, TILE), (16, TILE), (8, TILE), (16,)), (-7,), (-3, -2))
