"""Decode the block formats of GGML, which GGUF files contain, exactly.

Each function takes blocks, uint8 `[count, bytes]` of NumPy or JAX, and returns float32 `[count, elements]`. A product
of a float16 scale, a sub-scale of at most 8 bits and a code of at most 6 bits is exact in the 24 bits of float32, so
that only the subtraction of a minimum rounds, once, as in the reference decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Values of the 4-bit codes of IQ4_NL and IQ4_XS.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Values of the 4-bit codes e2m1 (a sign, two bits of exponent, one of mantissa), doubled, with halved scales e8m0:
# 2^(byte - 127) itself is over the range of float32 for the byte 255, in which the reference sees no NaN. A code of a
# sign alone gives +0, as there.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
E8M0_HALVED = np.ldexp(np.float32(1), np.arange(256) - 128)
# Halved values of the scales ue4m3: the float8 e4m3fn without its sign bit; NaN is 0, as in the reference.
UE4M3_HALVED = np.array(
    [np.ldexp(m, -10) if e == 0 else np.ldexp(8 + m, e - 11) for e in range(16) for m in range(8)] * 2, np.float32
)
UE4M3_HALVED[0x7F] = 0


def decode_q4_0(blocks: Any) -> Any:
    """Return d · (q − 8)."""
    return _float16(blocks, 0) * (_float32(_nibbles(blocks[:, 2:], 16)) - 8)


def decode_q4_1(blocks: Any) -> Any:
    """Return d · q + m."""
    return _float16(blocks, 0) * _float32(_nibbles(blocks[:, 4:], 16)) + _float16(blocks, 2)


def decode_q5_0(blocks: Any) -> Any:
    """Return d · (q − 16) for codes of 5 bits; bytes 2 to 5 have the highest bits."""
    codes = _nibbles(blocks[:, 6:], 16) | _fields(blocks[:, 2:6], 1, range(8), 1) << 4
    return _float16(blocks, 0) * (_float32(codes) - 16)


def decode_q5_1(blocks: Any) -> Any:
    """Return d · q + m for codes of 5 bits; bytes 4 to 7 have the highest bits."""
    codes = _nibbles(blocks[:, 8:], 16) | _fields(blocks[:, 4:8], 1, range(8), 1) << 4
    return _float16(blocks, 0) * _float32(codes) + _float16(blocks, 2)


def decode_q8_0(blocks: Any) -> Any:
    """Return d · q for signed bytes q."""
    return _float16(blocks, 0) * _float32(blocks[:, 2:].view(np.int8))


def decode_q2_k(blocks: Any) -> Any:
    """Return d · s · q − dmin · m; one byte has the 4-bit scale s and minimum m of 16 elements."""
    scales, minimums = (_float32(part) for part in (blocks[:, :16] & 15, blocks[:, :16] >> 4))
    codes = _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    return _scaled(_float16(blocks, 80) * scales, _float32(codes), _float16(blocks, 82) * minimums)


def decode_q3_k(blocks: Any) -> Any:
    """Return d · (s − 32) · (q − 4) for codes of 3 bits and a 6-bit scale s of 16 elements."""
    codes = _fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 3) | _fields(blocks[:, :32], 32, range(8), 1) << 2
    scales = _fields(blocks[:, 96:104], 8, (0, 4), 15) | _fields(blocks[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    return _scaled(_float16(blocks, 108) * (_float32(scales) - 32), _float32(codes) - 4)


def decode_q4_k(blocks: Any) -> Any:
    """Return d · s · q − dmin · m with a 6-bit scale s and minimum m of 32 elements."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:], 32)
    return _scaled(_float16(blocks, 0) * scales, _float32(codes), _float16(blocks, 2) * minimums)


def decode_q5_k(blocks: Any) -> Any:
    """Return d · s · q − dmin · m for codes of 5 bits; bytes 16 to 47 have the highest bits."""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:], 32) | _fields(blocks[:, 16:48], 32, range(8), 1) << 4
    return _scaled(_float16(blocks, 0) * scales, _float32(codes), _float16(blocks, 2) * minimums)


def decode_q6_k(blocks: Any) -> Any:
    """Return d · s · (q − 32) for codes of 6 bits and a signed 8-bit scale s of 16 elements."""
    codes = _nibbles(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    scales = _float32(blocks[:, 192:208].view(np.int8))
    return _scaled(_float16(blocks, 208) * scales, _float32(codes) - 32)


def decode_q8_k(blocks: Any) -> Any:
    """Return d · q for signed bytes q and a float32 d. The sums of codes at the end serve other programs."""
    return blocks[:, :4].view(np.dtype("<f4")) * _float32(blocks[:, 4:260].view(np.int8))


def decode_iq4_nl(blocks: Any) -> Any:
    """Return d · table[q]."""
    return _float16(blocks, 0) * _look_up(IQ4, _nibbles(blocks[:, 2:], 16))


def decode_iq4_xs(blocks: Any) -> Any:
    """Return d · (s − 32) · table[q] with a 6-bit scale s of 32 elements."""
    scales = _fields(blocks[:, 4:8], 1, (0, 4), 15) | _fields(blocks[:, 2:4], 1, (0, 2, 4, 6), 3) << 4
    return _scaled(_float16(blocks, 0) * (_float32(scales) - 32), _look_up(IQ4, _nibbles(blocks[:, 8:], 16)))


def decode_mxfp4(blocks: Any) -> Any:
    """Return e8m0(s) · e2m1(q) with a scale s of 32 elements."""
    return _look_up(E8M0_HALVED, blocks[:, :1]) * _look_up(E2M1_DOUBLED, _nibbles(blocks[:, 1:], 16))


def decode_nvfp4(blocks: Any) -> Any:
    """Return ue4m3(s) · e2m1(q) with a scale s of 16 elements."""
    return _scaled(_look_up(UE4M3_HALVED, blocks[:, :4]), _look_up(E2M1_DOUBLED, _nibbles(blocks[:, 4:], 8)))


# -- parts of blocks ---------------------------------------------------------------------------


def _float32(codes: Any) -> Any:
    return codes.astype(np.float32)


def _float16(blocks: Any, start: int) -> Any:
    """Return the float16 at byte `start` of each block, as float32 `[count, 1]`."""
    return _float32(blocks[:, start : start + 2].view(np.dtype("<f2")))


def _fields(data: Any, width: int, shifts: Sequence[int], mask: int) -> Any:
    """Return bit fields, uint8: of each `width` bytes all fields at the first shift, then all at the next one."""
    columns = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return ((data.reshape(len(data), -1, 1, width) >> columns) & np.uint8(mask)).reshape(len(data), -1)


def _nibbles(data: Any, width: int) -> Any:
    """Return codes of 4 bits, uint8: of each `width` bytes the low halves, then the high halves."""
    return _fields(data, width, (0, 4), 15)


def _scales_and_minimums(data: Any) -> tuple[Any, Any]:
    """Return the eight 6-bit scales and eight 6-bit minimums in the 12 bytes of Q4_K and Q5_K, as float32 `[count, 8]`.

    Bytes 0–3 and 4–7 have the scales and minimums 0–3 in their lower 6 bits. Bytes 8–11 have the lower 4 bits of the
    scales 4–7 (low halves) and minimums 4–7 (high halves); the upper 2 bits of bytes 0–7 complete them.
    """
    first, last = data[:, :8] & 63, _nibbles(data[:, 8:], 4) | (data[:, :8] >> 6) << 4
    concatenate = data.__array_namespace__().concatenate
    scales, minimums = (concatenate([first[:, i : i + 4], last[:, i : i + 4]], axis=1) for i in (0, 4))
    return _float32(scales), _float32(minimums)


def _look_up(table: np.ndarray[Any, Any], codes: Any) -> Any:
    """Return the float32 values of codes by a table of all codes."""
    return codes.__array_namespace__().asarray(table)[codes]


def _scaled(scales: Any, codes: Any, minimums: Any = None) -> Any:
    """Return scale · code − minimum; each scale and minimum `[count, groups]` is for equally many consecutive codes."""
    count, groups = scales.shape
    values = scales[:, :, None] * codes.reshape(count, groups, -1)
    return (values if minimums is None else values - minimums[:, :, None]).reshape(count, -1)
