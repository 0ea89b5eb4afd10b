"""`Mxfp4Source`: decode expert weights that are stored as MXFP4 (OCP Microscaling Formats, 2023) to bf16."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.ir.packed import WeightSpec
from rlx_jax.ir.types import short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.finite import all_finite
from rlx_jax.weights.views import SourceView

BLOCKS, SCALES = "_blocks", "_scales"
# Number of values that share a scale.
BLOCK_SIZE = 32
BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The value of each four-bit code e2m1: a sign, two bits of exponent and one of mantissa.
NIBBLES = np.concatenate([E2M1, -E2M1])


class Mxfp4Source(SourceView):
    """A view of `source` with MXFP4 weights decoded; other weights are unchanged.

    Each pair `{key}_blocks` uint8 `[E, out, in/32, 16]` and `{key}_scales` uint8 `[E, out, in/32]` becomes `{key}` bf16
    `[E, in, out]`. A byte holds two numbers of four bits (e2m1), the first in the low bits; each 32 of them are
    multiplied by `2^(scale − 127)`. The products are exact in bf16.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        bases = (key.removesuffix(BLOCKS) for key in source.keys() if key.endswith(BLOCKS))
        self._packed = {key for key in bases if source.has(key + SCALES) and not source.has(key)}
        hidden = {key + end for key in self._packed for end in (BLOCKS, SCALES)}
        self._keys = (*(key for key in source.keys() if key not in hidden), *sorted(self._packed))
        self._key_set = frozenset(self._keys)

    def keys(self) -> tuple[str, ...]:
        return self._keys

    def has(self, key: str) -> bool:
        return isinstance(key, str) and key in self._key_set

    def where(self, key: str) -> str:
        return self.source.where(key + BLOCKS if key in self._packed else key)

    def spec(self, key: str) -> WeightSpec:
        """Return the shape and dtype of a weight; of the decoded numbers for a pair.

        Raises:
            WeightShapeError: the shapes or dtypes of blocks and scales do not match.
        """
        if key not in self._packed:
            return self.source.spec(key)
        blocks, scales = (self.source.spec(key + end) for end in (BLOCKS, SCALES))
        shape = tuple(blocks.shape)
        fits = len(shape) == 4 and shape[3] == BLOCK_SIZE // 2 and tuple(scales.shape) == shape[:3]
        if not fits or {np.dtype(blocks.dtype), np.dtype(scales.dtype)} != {np.dtype(np.uint8)}:
            raise WeightShapeError(
                f"weight {quote(key)} ({self.where(key)}): MXFP4 is blocks u8 [E, out, in/32, 16] and scales u8 "
                f"[E, out, in/32], got {short_name(blocks.dtype)} {list(shape)} and "
                f"{short_name(scales.dtype)} {list(scales.shape)}"
            )
        return jax.ShapeDtypeStruct((shape[0], shape[2] * BLOCK_SIZE, shape[1]), BF16)

    def is_decoded(self, key: str) -> bool:
        return key in self._packed or super().is_decoded(key)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return a weight or a part of it; the decoded numbers for a pair, for which full blocks are read.

        Raises:
            WeightError: a number is over the range of bf16.
        """
        if key not in self._packed:
            return self.source.read(key, index)
        shape = self.spec(key).shape
        slices = (*(index or ()), *(slice(None),) * (3 - len(index or ())))
        (start, stop, _), (experts, _, out) = slices[1].indices(shape[1]), slices
        blocks_slice = slice(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE))
        blocks, scales = (self.source.read(key + end, (experts, out, blocks_slice)) for end in (BLOCKS, SCALES))
        numbers = decode_blocks(blocks, scales)
        if not all_finite(numbers):
            raise WeightError(f"weight {quote(key)} ({self.where(key)}): holds numbers over the range of bf16")
        offset = blocks_slice.start * BLOCK_SIZE
        return np.ascontiguousarray(numbers[..., start - offset : stop - offset].swapaxes(1, 2))


def decode_mxfp4(source: WeightSource) -> WeightSource:
    """Return a view of a source that decodes MXFP4 weights; the source itself if it has no encoded ones."""
    has_pairs = any(key.endswith(BLOCKS) and source.has(key.removesuffix(BLOCKS) + SCALES) for key in source.keys())
    return Mxfp4Source(source) if has_pairs else source


def decode_blocks(blocks: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decode bytes `[…, G, 16]` with scales `[…, G]` to bf16 `[…, 32 G]`."""
    nibbles = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    with np.errstate(over="ignore"):
        wide = np.ldexp(NIBBLES[nibbles], scales.astype(np.int32)[..., None, None] - 127)
    numbers: np.ndarray[Any, Any] = wide.reshape(*scales.shape[:-1], -1).astype(BF16)
    return numbers
