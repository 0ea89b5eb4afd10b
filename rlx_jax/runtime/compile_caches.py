"""Tables of compiled programs for hosts that choose keys and sizes themselves.

`CompileCache` has a model for each key, `DynamicDimCompileCache` one template with a program for each key, and
`BucketedCompileCache` programs for a few sizes that inputs are padded to. `CausalLM` and `Encoder` do all of it by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.compiler.executable import Executable
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RequestError, quote
from rlx_jax.runtime.compile_flow import compile
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_compile_pipeline import DEFAULT_CAPACITY, BuildHir, KeywordsLike, ModelCompilePipeline

__all__ = ["BucketedCompileCache", "CompileCache", "DynamicDimCompileCache"]


class CompileCache:
    """Compiled models by key, at most `capacity`; the first one is dropped first, and a hit changes no order."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.capacity = check_integer("capacity", capacity, 1)
        self._models: dict[int, CompiledModel] = {}

    def get_or_compile(self, key: int, build_hir: BuildHir, **options: Any) -> CompiledModel:
        """Return the model of a key; a new one is `rlx_jax.compile(build_hir(), **options)`."""
        if key not in self._models:
            self._models[key] = compile(build_hir(), **options)
            if len(self._models) > self.capacity:
                del self._models[next(iter(self._models))]
        return self._models[key]

    def __contains__(self, key: object) -> bool:
        return key in self._models

    contains = __contains__

    def __len__(self) -> int:
        return len(self._models)

    @property
    def is_empty(self) -> bool:
        """Return whether there are no models."""
        return not self._models


class DynamicDimCompileCache(ModelCompilePipeline):
    """A pipeline with its model: one template with symbolic sizes, and an executable for each key.

    Args:
        build_hir, options: as `ModelCompilePipeline.build_template`.
        device, capacity: as `ModelCompilePipeline`.
    """

    def __init__(
        self, build_hir: BuildHir, options: KeywordsLike = None, device: str = "auto", capacity: int = DEFAULT_CAPACITY
    ) -> None:
        super().__init__(device, capacity)
        self._arguments = build_hir, options

    def get_or_specialize(self, key: int, binding: Mapping[str, int]) -> Executable:
        """Return the executable of a key; raises as `ModelCompilePipeline.get_or_compile`."""
        return self.get_or_compile(key, binding, *self._arguments)


@dataclass(frozen=True)
class BucketedCompileCache:
    """The sizes that inputs are padded to, in ascending order, and a function that returns the program of a size.

    Attributes:
        extents: the upper bounds of the buckets.
        program: returns, for an extent, a function from inputs by name to a sequence of outputs.
    """

    extents: tuple[int, ...]
    program: Callable[[int], Callable[[Mapping[str, Any]], Sequence[Any]]]

    def __post_init__(self) -> None:
        sizes = [check_integer("extents", extent, 1) for extent in self.extents]
        if not sizes or sizes != sorted(set(sizes)):
            raise RequestError(f"extents: expected sizes in ascending order, got {quote(self.extents)}")

    @staticmethod
    def power_of_two_ladder(low: int, high: int) -> tuple[int, ...]:
        """Return the powers of two from `low`, rounded up, to the first that is at least `high`.

        >>> BucketedCompileCache.power_of_two_ladder(3, 20)
        (4, 8, 16, 32)
        """
        low, high = check_integer("low", low, 1), check_integer("high", high, 1)
        first, last = (low - 1).bit_length(), (high - 1).bit_length()
        return tuple(1 << n for n in range(first, max(first, last) + 1))

    def bucket(self, extent: int) -> int | None:
        """Return the smallest bucket for an extent; None if it is larger than all."""
        extent = check_integer("extent", extent, 1)
        return next((size for size in self.extents if size >= extent), None)

    def run_padded(
        self, extent: int, inputs: Mapping[str, Any], padded: Sequence[str], sliced: Sequence[int] = ()
    ) -> tuple[Any, ...] | None:
        """Run the program of the bucket, and return its outputs; None if the extent is larger than all buckets.

        Args:
            extent: the number of rows of the inputs.
            inputs: arrays by name.
            padded: the names of the inputs to which rows of zeros are added.
            sliced: the numbers of the outputs of which only the first `extent` rows are returned.

        Raises:
            RequestError: a padded input is missing or has another number of rows, there is no output of a number in
                `sliced`, or it does not have the rows of the bucket.
        """
        size = self.bucket(extent)
        if size is None:
            return None
        arrays = dict(inputs)
        for name in padded:
            rows = np.shape(arrays[name])[:1] if name in arrays else None
            if rows != (extent,):
                raise RequestError(f"run_padded: input {quote(name)}: expected {extent} rows, got {rows and rows[0]}")
            widths = [(0, size - extent)] + [(0, 0)] * (np.ndim(arrays[name]) - 1)
            arrays[name] = np.pad(np.asarray(arrays[name]), widths)
        outputs = tuple(self.program(size)(arrays))
        if wrong := [number for number in sliced if number not in range(len(outputs))]:
            raise RequestError(f"run_padded: there is no output {wrong[0]}; the program has {len(outputs)}")
        for number in sliced:
            if (shape := np.shape(outputs[number]))[:1] != (size,):
                raise RequestError(f"run_padded: output {number} has shape {shape}, not the {size} rows of the bucket")
        return tuple(output[:extent] if number in sliced else output for number, output in enumerate(outputs))
