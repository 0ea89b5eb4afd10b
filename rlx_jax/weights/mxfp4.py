"""Experts that are stored as MXFP4 (OCP Microscaling Formats, 2023), read as the numbers they stand for."""

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
# Numbers that share a scale.
SIZE = 32
BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# What four bits stand for: a sign, two bits of an exponent and one of a mantissa.
NIBBLES = np.concatenate([E2M1, -E2M1])


class Mxfp4Source(SourceView):
    """The weights of `source`, of which each pair `{key}_blocks` uint8 `[E, out, in/32, 16]` and `{key}_scales` uint8
    `[E, out, in/32]` is seen as `{key}` bf16 `[E, in, out]`. Others are seen as they are.

    A byte holds two numbers of four bits (e2m1), the first in the low ones; 32 of them are multiplied with
    `2^(scale − 127)`. They are bf16 without rounding.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        found = (key.removesuffix(BLOCKS) for key in source.keys() if key.endswith(BLOCKS))
        self._packed = {key for key in found if source.has(key + SCALES) and not source.has(key)}
        hidden = {key + end for key in self._packed for end in (BLOCKS, SCALES)}
        self._keys = (*(key for key in source.keys() if key not in hidden), *sorted(self._packed))
        self._known = frozenset(self._keys)

    def keys(self) -> tuple[str, ...]:
        return self._keys

    def has(self, key: str) -> bool:
        return isinstance(key, str) and key in self._known

    def where(self, key: str) -> str:
        return self.source.where(key + BLOCKS if key in self._packed else key)

    def spec(self, key: str) -> WeightSpec:
        """As the source's; of a pair that of its numbers.

        Raises:
            WeightShapeError: blocks and scales that do not belong together.
        """
        if key not in self._packed:
            return self.source.spec(key)
        blocks, scales = (self.source.spec(key + end) for end in (BLOCKS, SCALES))
        shape = tuple(blocks.shape)
        fits = len(shape) == 4 and shape[3] == SIZE // 2 and tuple(scales.shape) == shape[:3]
        if not fits or {np.dtype(blocks.dtype), np.dtype(scales.dtype)} != {np.dtype(np.uint8)}:
            raise WeightShapeError(
                f"weight {quote(key)} ({self.where(key)}): MXFP4 is blocks u8 [E, out, in/{SIZE}, {SIZE // 2}] and "
                f"scales u8 [E, out, in/{SIZE}], got {short_name(blocks.dtype)} {list(shape)} and "
                f"{short_name(scales.dtype)} {list(scales.shape)}"
            )
        return jax.ShapeDtypeStruct((shape[0], shape[2] * SIZE, shape[1]), BF16)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """As the source's; of a pair the numbers, for which whole blocks are read.

        Raises:
            WeightError: a number that bf16 cannot hold.
        """
        if key not in self._packed:
            return self.source.read(key, index)
        shape = self.spec(key).shape
        cut = (*(index or ()), *(slice(None),) * (3 - len(index or ())))
        (first, stop, _), (experts, _, out) = cut[1].indices(shape[1]), cut
        around = slice(first // SIZE, -(-stop // SIZE))
        blocks, scales = (self.source.read(key + end, (experts, out, around)) for end in (BLOCKS, SCALES))
        numbers = decoded(blocks, scales)
        if not all_finite(numbers):
            raise WeightError(f"weight {quote(key)} ({self.where(key)}): holds numbers over the range of bf16")
        begins = around.start * SIZE
        return np.ascontiguousarray(numbers[..., first - begins : stop - begins].swapaxes(1, 2))


def unpacked(source: WeightSource) -> WeightSource:
    """A source whose MXFP4 weights are seen as numbers: itself where there are none, or where they are already."""
    has = any(key.endswith(BLOCKS) and source.has(key.removesuffix(BLOCKS) + SCALES) for key in source.keys())
    return Mxfp4Source(source) if has else source


def decoded(blocks: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bytes `[…, G, 16]` and scales `[…, G]` as bf16 `[…, 32 G]`."""
    nibbles = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    with np.errstate(over="ignore"):
        wide = np.ldexp(NIBBLES[nibbles], scales.astype(np.int32)[..., None, None] - 127)
    found: np.ndarray[Any, Any] = wide.reshape(*scales.shape[:-1], -1).astype(BF16)
    return found
