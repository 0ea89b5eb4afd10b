"""Packed tensors for tests, and the numbers that they stand for: computed one by one, with nothing of the package's."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rlx_jax.ir.packed import Packed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BLOCKS = {
    "gguf_q4_0": (32, 18), "gguf_q4_1": (32, 20), "gguf_q5_0": (32, 22), "gguf_q5_1": (32, 24), "gguf_q8_0": (32, 34),
    "gguf_q2k": (256, 84), "gguf_q3k": (256, 110), "gguf_q4k": (256, 144), "gguf_q5k": (256, 176),
    "gguf_q6k": (256, 210), "gguf_q8k": (256, 292),
}  # fmt: skip
"""Numbers and bytes of a block, as llama.cpp has them."""
FLOATS = {
    **{name: ((0, "<f2"),) for name in ("gguf_q4_0", "gguf_q5_0", "gguf_q8_0")},
    **{name: ((0, "<f2"), (2, "<f2")) for name in ("gguf_q4_1", "gguf_q5_1", "gguf_q4k", "gguf_q5k")},
    "gguf_q2k": ((80, "<f2"), (82, "<f2")), "gguf_q3k": ((108, "<f2"),), "gguf_q6k": ((208, "<f2"),),
    "gguf_q8k": ((0, "<f4"),),
}  # fmt: skip
"""Where the floats of a block stand, and of what kind."""
DECODED = ("gguf_q4_0", "gguf_q8_0")


def block_of(scheme: str, raw: bytes) -> list[float]:
    """The numbers of one block, computed one by one in Python's floats, which are float64."""
    (scale,) = struct.unpack("<e", raw[:2])
    if scheme == "gguf_q8_0":
        return [q * scale for q in struct.unpack("<32b", raw[2:])]
    assert scheme == "gguf_q4_0" and len(raw) == 18
    return [((raw[2 + i] & 0x0F) - 8) * scale for i in range(16)] + [((raw[2 + i] >> 4) - 8) * scale for i in range(16)]


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
    return data.reshape(*shape[:-1], -1)


def packed(scheme: str, shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> Packed:
    return Packed(random_bytes(scheme, shape, seed), scheme, shape, dtype)


def meaning(value: Packed) -> np.ndarray:
    """float32, which holds the numbers exactly."""
    exact = numbers(value.scheme, value.data)
    found = exact.astype(np.float32)
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
