"""`QuantizedSource`: a checkpoint with quantised weights, as packed weights under the keys that recipes read."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_jax.errors import MissingWeightError, RlxError, UnsupportedError, WeightError, quote
from rlx_jax.ir.boxes import box_shape
from rlx_jax.ir.packed import PackedSpec, WeightSpec
from rlx_jax.ir.param import Key
from rlx_jax.ir.types import is_float
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.module_tensors import ModuleTensors, QuantizedWeight
from rlx_jax.weights.quantized_config import Quantization, WeightFormat
from rlx_jax.weights.quantized_layouts import CACHE_SCALES, MXFP4, ModuleLayout
from rlx_jax.weights.tensor_file import check_shape
from rlx_jax.weights.views import PART, HostArray, NamedTensors, SourceView, index_box

_WEIGHT = ".weight"


class QuantizedSource(NamedTensors[None], SourceView):
    """A view of `source` in which the tensors of each quantised module are one weight, such as `{module}.weight`.

    `spec` of such a weight is a `PackedSpec` whose arrays are read under keys of their own; they convert the
    stored tensors. `read` of the weight itself returns decoded values. Other weights are unchanged.

    Raises:
        MissingWeightError: a weight of 8-bit floats has no scale.
    """

    def __init__(self, source: WeightSource, quantization: Quantization, layout: ModuleLayout) -> None:
        super().__init__(source)
        self._quantization, self._layout = quantization, layout
        self._weights: dict[str, QuantizedWeight] = {}
        ends = (*layout.markers, *layout.others, layout.weight)
        # Each quantised module, with the key of the first of its tensors, for messages.
        self._modules: dict[str, str] = {}
        for key in source.keys():
            for marker in layout.markers:
                if key.endswith(marker):
                    self._modules.setdefault(key.removesuffix(marker), key)
        self._tensors = {}
        for key in source.keys():
            module = next((key.removesuffix(end) for end in ends if key.endswith(end)), None)
            if module in self._modules:
                self._tensors[module + layout.weight] = None
            elif not key.endswith(CACHE_SCALES):
                self._tensors[key] = None
                self._check_plain(key)

    def _check_plain(self, key: str) -> None:
        """Check a tensor that is not part of a quantised weight."""
        spec = self.source.spec(key)
        is_code = is_float(np.dtype(spec.dtype)) or key.endswith(_WEIGHT)
        if is_code and np.dtype(spec.dtype).itemsize == 1 and len(spec.shape) > 1:
            expected = " or ".join(quote(key.removesuffix(_WEIGHT) + marker) for marker in self._layout.markers)
            raise MissingWeightError(
                f"weight {quote(key)} ({self.source.where(key)}) is quantised, and its tensor {expected} is missing"
            )

    def _at(self, key: str) -> tuple[WeightSource, str]:
        return self.source, self._modules.get(self._module(key), key)

    def spec(self, key: str) -> WeightSpec:
        """Return the shape of a weight, and its scheme if it is quantised.

        Raises:
            WeightError, WeightShapeError, MissingWeightError: its tensors do not fit each other or the config.
        """
        if self._module(key) not in self._modules:
            return self.source.spec(key)
        weight = self._describe(self._module(key))
        types = weight.scheme.array_types(weight.shape)
        arrays = {name: Key(f"{key}{PART}{name}", types[name]) for name in weight.arrays}
        return PackedSpec(weight.shape, weight.dtype, weight.scheme.name, arrays)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight or a part of it, decoded if it is quantised; or one of the arrays of its scheme.

        Raises:
            As `spec`, and as `read` of the source.
        """
        name, _, array = key.partition(PART)
        if self._module(name) not in self._modules:
            return self.source.read(key, index)
        if not array:
            return read_numbers(key, self, index)
        weight = self._describe(self._module(name))
        array_type = weight.scheme.array_types(weight.shape)[array]
        box, rest = index_box(index, array_type.shape, key)
        values = np.empty(box_shape(box), array_type.dtype) if 0 in box_shape(box) else weight.arrays[array](*box)
        return np.ascontiguousarray(values[rest])

    def _module(self, key: str) -> str:
        """Return the module of a weight, or of an array of one."""
        return key.partition(PART)[0].removesuffix(self._layout.weight) if isinstance(key, str) else ""

    def _describe(self, module: str) -> QuantizedWeight:
        """Return the description of the weight of a module, which is retained."""
        if module not in self._weights:
            self._weights[module] = self._make_description(module)
        return self._weights[module]

    def _make_description(self, module: str) -> QuantizedWeight:
        """Describe the weight of a module by the format that its tensors fit.

        Raises:
            UnsupportedError: they fit several formats in different ways. Others: they fit none.
        """
        tensors, q = ModuleTensors(self.source, module, self._layout.weight), self._quantization
        results: dict[tuple[Any, ...], QuantizedWeight] = {}
        errors: list[RlxError] = []
        for stored in (q.by_module[module],) if module in q.by_module else q.formats:
            try:
                weight = self._layout.describe(tensors, stored)
            except WeightError as error:
                errors.append(error)
                continue
            results.setdefault((weight.shape, weight.scheme.name), weight)
        if not results:
            no_format = UnsupportedError(f"{q.where}: it has no format of weights, and {tensors.where} is quantised")
            # Another dtype is a plain `WeightError`: the tensors fit another format.
            raise next((e for e in errors if type(e) is not WeightError), errors[0]) if errors else no_format
        if len(results) > 1:
            raise UnsupportedError(f"{q.where}: {tensors.where} fits several groups, {list(results)}")
        (weight,) = results.values()
        check_shape(weight.shape, tensors.where)
        return weight


def with_mxfp4_weights(source: WeightSource) -> WeightSource:
    """Return a view of a source in which MXFP4 weights are packed weights; the source itself if it has none."""
    if not any(
        key.endswith("_blocks") and source.has(key.removesuffix("_blocks") + "_scales") for key in source.keys()
    ):
        return source
    return QuantizedSource(source, Quantization("mxfp4", "MXFP4", (WeightFormat(4, is_float=True),)), MXFP4)
