"""Packed tensors for tests, and the numbers that they stand for: computed one by one, with nothing of the package's."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx_jax.ir.packed import SCHEMES, Packed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BLOCKS = {
    "gguf_q4_0": (32, 18), "gguf_q4_1": (32, 20), "gguf_q5_0": (32, 22), "gguf_q5_1": (32, 24), "gguf_q8_0": (32, 34),
    "gguf_q2k": (256, 84), "gguf_q3k": (256, 110), "gguf_q4k": (256, 144), "gguf_q5k": (256, 176),
    "gguf_q6k": (256, 210), "gguf_q8k": (256, 292), "gguf_iq4_nl": (32, 18), "gguf_iq4_xs": (256, 136),
    "gguf_mxfp4": (32, 17), "gguf_nvfp4": (64, 36),
}  # fmt: skip
"""Numbers and bytes of a block, as llama.cpp has them."""
FLOATS = {
    **{name: ((0, "<f2"),) for name in ("gguf_q4_0", "gguf_q5_0", "gguf_q8_0", "gguf_iq4_nl", "gguf_iq4_xs")},
    **{name: ((0, "<f2"), (2, "<f2")) for name in ("gguf_q4_1", "gguf_q5_1", "gguf_q4k", "gguf_q5k")},
    "gguf_q2k": ((80, "<f2"), (82, "<f2")), "gguf_q3k": ((108, "<f2"),), "gguf_q6k": ((208, "<f2"),),
    "gguf_q8k": ((0, "<f4"),), "gguf_mxfp4": (), "gguf_nvfp4": (),
}  # fmt: skip
"""Where the floats of a block stand, and of what kind."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MINIMUMS = ("gguf_q4_1", "gguf_q5_1", "gguf_q2k", "gguf_q4k", "gguf_q5k")
"""Schemes that add or subtract, which rounds. All others but Q8_K give numbers that float32 has exactly."""


def half(raw: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", raw, at)[0])


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 and code & 7 else E2M1[code & 7]


def nibble(raw: bytes, at: int, i: int, width: int) -> int:
    """Code i of bytes from `at`: of each `width` bytes the low halves come first."""
    run, place = divmod(i, 2 * width)
    return raw[at + run * width + place % width] >> (4 if place >= width else 0) & 15


def six_bits(raw: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum j of Q4_K and Q5_K."""
    b = raw[4:16]
    if j < 4:
        return b[j] & 63, b[j + 4] & 63
    return b[j + 4] & 15 | (b[j - 4] >> 6) << 4, b[j + 4] >> 4 | (b[j] >> 6) << 4


def q3_scale(raw: bytes, j: int) -> int:
    low = raw[96 + j % 8] >> (4 if j >= 8 else 0) & 15
    return (low | (raw[104 + j % 4] >> (2 * (j // 4)) & 3) << 4) - 32


def two_bits(raw: bytes, at: int, i: int) -> int:
    return raw[at + i // 128 * 32 + i % 32] >> (2 * (i % 128 // 32)) & 3


def q6(raw: bytes, i: int) -> float:
    run, place = divmod(i, 128)
    low = raw[run * 64 + place % 64] >> (4 if place >= 64 else 0) & 15
    high = raw[128 + run * 32 + place % 32] >> (2 * (place // 32)) & 3
    return half(raw, 208) * struct.unpack_from("b", raw, 192 + i // 16)[0] * ((low | high << 4) - 32)


def q4k(raw: bytes, i: int, code: int) -> float:
    scale, minimum = six_bits(raw, i // 32)
    return half(raw, 0) * scale * code - half(raw, 2) * minimum


def ue4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte == 0x7F:
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def iq4_scale(raw: bytes, j: int) -> int:
    return ((raw[4 + j // 2] >> 4 * (j % 2) & 15) | (raw[2 + j // 4] >> 2 * (j % 4) & 3) << 4) - 32


def bit(raw: bytes, at: int, i: int) -> int:
    return raw[at + i // 8] >> i % 8 & 1


NUMBER: dict[str, Callable[[bytes, int], float]] = {
    "gguf_q4_0": lambda b, i: half(b, 0) * (nibble(b, 2, i, 16) - 8),
    "gguf_q4_1": lambda b, i: half(b, 0) * nibble(b, 4, i, 16) + half(b, 2),
    "gguf_q5_0": lambda b, i: half(b, 0) * (nibble(b, 6, i, 16) + 16 * bit(b, 2, i) - 16),
    "gguf_q5_1": lambda b, i: half(b, 0) * (nibble(b, 8, i, 16) + 16 * bit(b, 4, i)) + half(b, 2),
    "gguf_q8_0": lambda b, i: half(b, 0) * struct.unpack_from("b", b, 2 + i)[0],
    "gguf_q2k": lambda b, i: half(b, 80) * (b[i // 16] & 15) * two_bits(b, 16, i) - half(b, 82) * (b[i // 16] >> 4),
    "gguf_q3k": lambda b, i: half(b, 108) * q3_scale(b, i // 16) * (
        two_bits(b, 32, i) - (0 if b[i % 32] >> i // 32 & 1 else 4)),
    "gguf_q4k": lambda b, i: q4k(b, i, nibble(b, 16, i, 32)),
    "gguf_q5k": lambda b, i: q4k(b, i, nibble(b, 48, i, 32) + 16 * (b[16 + i % 32] >> i // 32 & 1)),
    "gguf_q6k": q6,
    "gguf_q8k": lambda b, i: struct.unpack_from("<f", b, 0)[0] * struct.unpack_from("b", b, 4 + i)[0],
    "gguf_iq4_nl": lambda b, i: half(b, 0) * IQ4[nibble(b, 2, i, 16)],
    "gguf_iq4_xs": lambda b, i: half(b, 0) * iq4_scale(b, i // 32) * IQ4[nibble(b, 8, i, 16)],
    "gguf_mxfp4": lambda b, i: 2.0 ** (b[0] - 127) * e2m1(nibble(b, 1, i, 16)),
    "gguf_nvfp4": lambda b, i: ue4m3(b[i // 16]) * e2m1(nibble(b, 4, i, 8)),
}  # fmt: skip
"""Number i of a block, in Python's floats, which are float64."""


def block_of(scheme: str, raw: bytes) -> list[float]:
    return [NUMBER[scheme](raw, i) for i in range(BLOCKS[scheme][0])]


def numbers(scheme: str, data: Bytes) -> np.ndarray:
    """float64 `[..., k]` of uint8 `[..., bytes]`."""
    elements, width = BLOCKS[scheme]
    rows = data.reshape(-1, data.shape[-1])
    found = [
        [x for at in range(0, len(row), width) for x in block_of(scheme, row[at : at + width].tobytes())]
        for row in rows
    ]
    return np.array(found, np.float64).reshape(*data.shape[:-1], data.shape[-1] // width * elements)


def random_bytes(scheme: str, shape: tuple[int, ...], seed: int = 0) -> Bytes:
    """Bytes for a logical shape: any quants; scales of both signs, small and large."""
    elements, width = BLOCKS[scheme]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, width), np.uint8)
    for at, dtype in FLOATS[scheme]:
        scales = (
            rng.standard_normal((*data.shape[:-1], 1)) * 10.0 ** rng.integers(-6, 3, (*data.shape[:-1], 1))
        ).astype(dtype)
        data[..., at : at + scales.dtype.itemsize] = scales.view(np.uint8)
    if scheme == "gguf_mxfp4":
        data[..., 0] = rng.integers(100, 150, data.shape[:-1])
    return data.reshape(*shape[:-1], -1)


def packed(scheme: str, shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> Packed:
    return Packed(random_bytes(scheme, shape, seed), scheme, shape, dtype)


def random_arrays(scheme: str, size: tuple[int, int], rng: np.random.Generator) -> dict[str, Any]:
    """Arrays of a packed weight of this size: random codes and multiples, scales of about 1e-3."""
    arrays = {}
    for name, t in SCHEMES[scheme].array_types(size).items():
        shape = [int(n) for n in t.shape]
        arrays[name] = rng.integers(0, 256, (*shape, t.dtype.itemsize), np.uint8).view(t.dtype)[..., 0]
        if name == "scales":
            width = 4 if scheme == "gguf_q8k" else 2
            floats = rng.uniform(1e-4, 1e-3, (*shape, t.dtype.itemsize // width)).astype(f"<f{width}").view(t.dtype)
            step = 4 if scheme in ("gguf_q4k", "gguf_q5k") else 1  # other words of a block have its multiples
            arrays[name][..., ::step] = floats[..., ::step, 0]
    return arrays


def meaning(value: Packed) -> np.ndarray:
    """float32: the numbers themselves, or rounded once."""
    exact = numbers(value.scheme, value.data)
    found = exact.astype(np.float32)
    if value.scheme not in MINIMUMS and value.scheme != "gguf_q8k":
        np.testing.assert_array_equal(found.astype(np.float64), exact)
    return found


def damaged(scheme: str, scale: float, at: int = 0) -> Packed:
    """Three rows of two blocks, of which the one in the second row has this as its float number `at`."""
    value = packed(scheme, (3, 2 * BLOCKS[scheme][0]))
    data = value.data.reshape(3, 2, -1).copy()
    offset, dtype = FLOATS[scheme][at]
    raw = np.array([scale], dtype).view(np.uint8)
    data[1, 0, offset : offset + len(raw)] = raw
    data[1, 0, 2:] = np.where(data[1, 0, 2:] == 0, 1, data[1, 0, 2:]) if scheme == "gguf_q8_0" else data[1, 0, 2:]
    return Packed(data.reshape(value.data.shape), scheme, value.shape)
