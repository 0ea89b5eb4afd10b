"""The block formats of GGML, which GGUF files contain: where a block has the arrays of a packed tensor.

A block of `bytes` bytes encodes `elements` consecutive values of a row. `BLOCKS` lists the parts of the blocks of each
scheme; `split_blocks` copies one part of all blocks of a tensor into an array, without any arithmetic on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, field

Bytes = np.ndarray[Any, Any]

_CHUNK = 2**14  # blocks that are converted at a time: the temporaries then fit in the CPU's cache


@dataclass(frozen=True)
class BlockPart:
    """One part of a block: bytes `start` to `stop`, and how they become the array; by default they are the array.

    `convert` writes the `size` bytes of the array for each block: takes the bytes of the parts `[count, stop - start]`,
    and the array `[count, size]`.
    """

    start: int
    stop: int
    convert: Callable[[Bytes, Bytes], None] | None = None
    converted_size: int = 0

    @property
    def size(self) -> int:
        """Return the number of bytes of the array for each block."""
        return self.converted_size or self.stop - self.start

    def copy(self, blocks: Bytes, out: Bytes) -> None:
        """Write the bytes of the array, `[count, size]`, from blocks `[count, bytes]`."""
        data = blocks[:, self.start : self.stop]
        if self.convert is None:
            # One item for the bytes of a part: NumPy copies items, which is several times faster than rows of bytes.
            item = f"V{self.size}"
            out.view(item)[...] = data.view(item)
            return
        for start in range(0, len(blocks), _CHUNK):
            self.convert(data[start : start + _CHUNK], out[start : start + _CHUNK])


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a block: how many values it encodes in how many bytes, and its parts by the name of their array."""

    elements: int
    bytes: int
    parts: Mapping[str, BlockPart]


def bit_fields(data: Any, width: int, shifts: Sequence[int], mask: int) -> Any:
    """Return bit fields, uint8: of each `width` bytes all fields at the first shift, then all at the next one.

    Args:
        data: uint8 `[..., n]` of NumPy or JAX.
        width: the number of bytes that a run has; it divides n.
        shifts: the lowest bit of each field.
        mask: the bits of a field.
    """
    if data.shape[-1] == 0:
        return data
    runs = data.reshape(*data.shape[:-1], -1, 1, width)
    columns = np.array(shifts, np.uint8).reshape(*(1,) * data.ndim, -1, 1)
    return ((runs >> columns) & np.uint8(mask)).reshape(*data.shape[:-1], -1)


def _spread_nibbles(spread: Bytes) -> Bytes:
    """Return, of bytes that are each followed by a byte 0, the lower four bits and then the upper ones as a byte."""
    nibbles = spread << 4
    nibbles |= spread
    nibbles &= 0x0F0F0F0F0F0F0F0F
    return nibbles


def _scales_of_q3_k(data: Bytes, out: Bytes) -> None:
    """Write the sixteen 6-bit scales of Q3_K minus 32: 8 bytes have the lower 4 bits, 4 bytes the upper 2."""
    first, second, upper = np.ascontiguousarray(data.view("<u4").T)  # four bytes at a time, as one integer
    words = out.view("<u4")
    words[:, 0] = first & 0x0F0F0F0F | upper << 4 & 0x30303030
    words[:, 1] = second & 0x0F0F0F0F | upper << 2 & 0x30303030
    words[:, 2] = first >> 4 & 0x0F0F0F0F | upper & 0x30303030
    words[:, 3] = second >> 4 & 0x0F0F0F0F | upper >> 2 & 0x30303030
    out -= 32  # modulo 256: the bytes of int8


def _scales_of_iq4_xs(data: Bytes, out: Bytes) -> None:
    """Write the eight 6-bit scales of IQ4_XS minus 32: 2 bytes have the upper 2 bits, 4 bytes the lower 4."""
    fields = np.ascontiguousarray(data[:, :2]).view("<u2")[:, 0].astype("<u8")
    for shift, mask in ((24, 0x000000FF000000FF), (12, 0x000F000F000F000F), (6, 0x0303030303030303)):
        fields |= fields << shift
        fields &= mask
    nibbles = _spread_nibbles(data[:, 2:].astype("<u2").view("<u8")[:, 0])
    out.view("<u8")[:, 0] = nibbles | fields << 4
    out -= 32  # modulo 256: the bytes of int8


def _layout(elements: int, num_bytes: int, **parts: tuple[Any, ...]) -> BlockLayout:
    """Return the layout of a block; `parts` has the arguments of the `BlockPart` of each array."""
    return BlockLayout(elements, num_bytes, {name: BlockPart(*part) for name, part in parts.items()})


# The layouts by the name of the scheme in `rlx_jax.ir.packed.SCHEMES`. The end of a Q8_K block, sums of its codes,
# serves other programs.
BLOCKS: dict[str, BlockLayout] = {
    "gguf_q4_0": _layout(32, 18, codes=(2, 18), scales=(0, 2)),
    "gguf_q4_1": _layout(32, 20, codes=(4, 20), scales=(0, 4)),
    "gguf_q5_0": _layout(32, 22, codes=(6, 22), high=(2, 6), scales=(0, 2)),
    "gguf_q5_1": _layout(32, 24, codes=(8, 24), high=(4, 8), scales=(0, 4)),
    "gguf_q8_0": _layout(32, 34, codes=(2, 34), scales=(0, 2)),
    "gguf_q2k": _layout(256, 84, codes=(16, 80), scales=(80, 84), multiples=(0, 16)),
    "gguf_q3k": _layout(
        256, 110, codes=(32, 96), high=(0, 32), scales=(108, 110), multiples=(96, 108, _scales_of_q3_k, 16)
    ),
    "gguf_q4k": _layout(256, 144, codes=(16, 144), scales=(0, 16)),
    "gguf_q5k": _layout(256, 176, codes=(48, 176), high=(16, 48), scales=(0, 16)),
    "gguf_q6k": _layout(256, 210, codes=(0, 128), high=(128, 192), scales=(208, 210), multiples=(192, 208)),
    "gguf_q8k": _layout(256, 292, codes=(4, 260), scales=(0, 4)),
    "gguf_iq4_nl": _layout(32, 18, codes=(2, 18), scales=(0, 2)),
    "gguf_iq4_xs": _layout(256, 136, codes=(8, 136), scales=(0, 2), multiples=(2, 8, _scales_of_iq4_xs, 8)),
    "gguf_mxfp4": _layout(32, 17, codes=(1, 17), scales=(0, 1)),
    "gguf_nvfp4": _layout(64, 36, codes=(4, 36), scales=(0, 4)),
}


def split_blocks(data: Bytes, layout: BlockLayout, name: str, dtype: np.dtype[Any]) -> Bytes:
    """Return the array `name` of a tensor in blocks.

    Args:
        data: the blocks, uint8 `[..., n · bytes]`.
        layout: their layout.
        name: the name of a part.
        dtype: the dtype of the array, little-endian in the blocks.

    Returns:
        The array `[..., n · size]`, where `size` is the number of entries in one block.
    """
    part = layout.parts[name]
    blocks = np.ascontiguousarray(data).reshape(-1, layout.bytes)
    values = np.empty((len(blocks), part.size), np.uint8)
    part.copy(blocks, values)
    row_size = data.shape[-1] // layout.bytes * part.size // dtype.itemsize
    return values.view(dtype.newbyteorder("<")).reshape(*data.shape[:-1], row_size).astype(dtype, copy=False)


@dataclass
class BlockArrays:
    """Arrays of a tensor in blocks. Who reads the blocks writes their parts to them, so that nobody holds the blocks.

    Attributes:
        layout: the layout of the blocks.
        shape: the shape of the blocks, as bytes.
        arrays: names and C-contiguous arrays, little-endian.
        filled: whether all blocks have been written.
    """

    layout: BlockLayout
    shape: tuple[int, ...]
    arrays: Sequence[tuple[str, Bytes]]
    filled: bool = False
    _parts: list[tuple[BlockPart, Bytes]] = field(init=False)

    def __post_init__(self) -> None:
        parts = [(self.layout.parts[name], array) for name, array in self.arrays]
        self._parts = [(part, array.reshape(-1).view(np.uint8).reshape(-1, part.size)) for part, array in parts]

    def write(self, start: int, data: Bytes) -> None:
        """Write the parts of contiguous blocks, the first of which has the number `start`."""
        blocks = data.reshape(-1, self.layout.bytes)
        for part, out in self._parts:
            part.copy(blocks, out[start : start + len(blocks)])
