"""`Mxfp4Source`: expert weights that are stored as MXFP4 (OCP Microscaling Formats, 2023), as packed weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from rlx_jax.errors import WeightError, WeightShapeError, quote
from rlx_jax.ir.packed import PackedSpec, WeightSpec
from rlx_jax.ir.param import Key
from rlx_jax.ir.types import short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.named import NamedTensors, check_index
from rlx_jax.weights.quantized_tensors import declare_scheme
from rlx_jax.weights.views import PART, HostArray, SourceView

BLOCKS, SCALES = "_blocks", "_scales"
# Number of values that share a scale.
BLOCK_SIZE = 32
BF16 = np.dtype(ml_dtypes.bfloat16)
# The largest scale whose products with codes, which are up to 6, are in the range of bf16.
MAX_SCALE = 252


class Mxfp4Source(NamedTensors[bool], SourceView):
    """A view of `source` in which MXFP4 weights are packed weights; other weights are unchanged.

    Each pair `{key}_blocks` uint8 `[E, out, in/32, 16]` and `{key}_scales` uint8 `[E, out, in/32]` becomes `{key}` bf16
    `[E, in, out]`. A byte holds two numbers of four bits (e2m1), the first in the low bits; each 32 of them are
    multiplied by `2^(scale − 127)`. The products are exact in bf16.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        bases = (key.removesuffix(BLOCKS) for key in source.keys() if key.endswith(BLOCKS))
        self._packed = {key for key in bases if source.has(key + SCALES) and not source.has(key)}
        hidden = {key + end for key in self._packed for end in (BLOCKS, SCALES)}
        # Whether each weight is packed.
        self._tensors = {key: False for key in source.keys() if key not in hidden} | dict.fromkeys(self._packed, True)

    def where(self, key: str) -> str:
        name = key.partition(PART)[0]
        return self.source.where(name + BLOCKS if name in self._packed else key)

    def spec(self, key: str) -> WeightSpec:
        """Return the shape and dtype of a weight, and its scheme for a pair.

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
        # The scales are halved, which the factor makes up for.
        scheme = declare_scheme("mxfp4", 4, BLOCK_SIZE, "e8m0_halved", table="e2m1", factor=2.0, transposed=True)
        size = (shape[0], shape[2] * BLOCK_SIZE, shape[1])
        arrays = {name: Key(f"{key}{PART}{name}", t) for name, t in scheme.array_types(size).items()}
        return PackedSpec(size, BF16, scheme.name, arrays)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight or a part of it, decoded for a pair; or one of the arrays of its scheme.

        Raises:
            WeightError: a number is over the range of bf16.
        """
        name, _, array = key.partition(PART)
        if name not in self._packed:
            return self.source.read(key, index)
        if not array:
            return read_numbers(key, self, index)
        if array == "scales":
            scales = self.source.read(name + SCALES, index)
            if scales.max(initial=0) > MAX_SCALE:
                raise WeightError(
                    f"weight {quote(name)} ({self.where(name)}): scales are exponents up to {MAX_SCALE}, got "
                    f"{scales.max()}; its numbers would be over the range of bf16"
                )
            return scales
        experts, num_rows, groups, width = self.source.spec(name + BLOCKS).shape
        slices = (*check_index(index, (experts, num_rows, groups * width), key), *(slice(None),) * 3)[:3]
        blocks = self.source.read(name + BLOCKS, slices[:2])
        return np.ascontiguousarray(blocks.reshape(*blocks.shape[:2], -1)[..., slices[2]])


def with_mxfp4_weights(source: WeightSource) -> WeightSource:
    """Return a view of a source in which MXFP4 weights are packed weights; the source itself if it has none."""
    has_pairs = any(key.endswith(BLOCKS) and source.has(key.removesuffix(BLOCKS) + SCALES) for key in source.keys())
    return Mxfp4Source(source) if has_pairs else source
