"""Steps of parameter programs that pack values while they are loaded."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.boxes import Box
from rlx_jax.ir.checkpoint_tensor import UnaryStep, select_box
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import decode_arrays, quantize
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Quantized(UnaryStep):
    """A program whose values are rounded to a packing scheme while they are loaded, by `rlx_jax.ir.packed.quantize`."""

    of: Any
    scheme: str
    lossy: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape, np.dtype(np.float32))

    def __str__(self) -> str:
        return f"quantize({self.of}, {self.scheme})"

    def box(self, box: Box) -> Any:
        return Quantized(select_box(self.of, box), self.scheme)

    def join(self, *values: Any) -> Any:
        return decode_arrays(quantize(values[0], self.scheme, str(self.of)), self.scheme)


@dataclass(frozen=True)
class QuantizedArray(UnaryStep):
    """One array of a parameter that is packed while it is loaded."""

    of: Any
    scheme: str
    array: str
    no_split: ClassVar[str] = "one of several arrays; `decoded_leaves` joins them"

    @property
    def type(self) -> TensorType:
        return SCHEMES[self.scheme].array_types(self.of.type.shape)[self.array]

    def __str__(self) -> str:
        return f"{self.array}(quantize({self.of}, {self.scheme}))"

    def box(self, box: Box) -> Any:
        *rows, edges = box
        start, stop = (edge * int(self.of.type.shape[-1]) // int(self.type.shape[-1]) for edge in edges)
        return QuantizedArray(select_box(self.of, (*rows, (start, stop))), self.scheme, self.array)

    def join(self, *values: Any) -> Any:
        return quantize(values[0], self.scheme, str(self.of))[self.array]
