"""`MappingSource`: weights from a mapping of checkpoint key to array in memory, or only to shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import IntegrityError, WeightError, WeightShapeError, quote
from rlx_jax.ir.packed import Packed, PackedSpec, WeightSpec, check_packed, packed_types
from rlx_jax.ir.packed_values import finite_check_floats
from rlx_jax.ir.types import short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.format import OnNonfinite, OpenOptions, check_finite, stored_spec
from rlx_jax.weights.tensor_file import check_shape
from rlx_jax.weights.views import HostArray, NamedTensors, check_index


@dataclass(frozen=True)
class MappingFormat:
    """The format of weights in memory: a mapping. It cannot be written."""

    name: str = "mapping"

    def detect(self, weights: Any) -> bool:
        """Whether `weights` is a mapping."""
        return isinstance(weights, Mapping)

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Return the source of a mapping, which does not support `verify="full"`."""
        if options.verify == "full":
            raise IntegrityError("weights: a mapping has no digests to verify with")
        return MappingSource(weights, on_nonfinite=options.on_nonfinite)


class MappingSource(NamedTensors[Any]):
    """Weights from a mapping: arrays of NumPy or JAX, or `Packed`; for shapes `jax.ShapeDtypeStruct` or `PackedSpec`.

    The mapping is copied, the arrays are not. Values are checked when they are read. `name` is its name in messages.

    Raises:
        WeightError: a key is not a string.
        WeightError: a value is not an array of numbers, or a packed one does not have the bytes of a known scheme.
        WeightShapeError, LimitError: a symbolic shape, one that is too large, or one that packed bytes contradict.
    """

    def __init__(
        self, arrays: Mapping[str, Any], *, on_nonfinite: OnNonfinite = "error", name: str = "mapping"
    ) -> None:
        self._tensors = dict(arrays)
        self._on_nonfinite, self._name, self._label = on_nonfinite, name, f"the {name}"
        for key, value in self._tensors.items():
            _check_value(key, value)

    @property
    def shapes_only(self) -> bool:
        """Whether no entry has values, only shapes: enough to compile, not to run."""
        values = self._tensors.values()
        return bool(values) and all(isinstance(v, WeightSpec) for v in values)

    def has_values(self, key: str) -> bool:
        """Whether there is an array under `key`, and not only a shape."""
        return self.has(key) and not isinstance(self._tensors[key], WeightSpec)

    def where(self, key: str) -> str:
        """Return `name`.

        Raises:
            MissingWeightError: no such key.
        """
        self._find(key)
        return self._name

    def spec(self, key: str) -> WeightSpec:
        """Return the shape and dtype under `key`; the logical ones if it is packed.

        Raises:
            MissingWeightError: no such key.
        """
        value = self._find(key)
        if isinstance(value, Packed | PackedSpec):
            return value.spec if isinstance(value, Packed) else value
        return stored_spec(value.shape, value.dtype)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return the array under `key`, or the part that `index` selects as in NumPy; read-only, a view if possible.

        For a packed tensor these are its bytes, and `index` applies to the array of bytes.

        Raises:
            MissingWeightError: no such key.
            WeightShapeError: `index` does not fit the shape.
            WeightError: there is only a shape, or the JAX array is deleted, traced or on other hosts.
            NonFiniteWeightError: NaN in the values, unless `on_nonfinite` allows them.
        """
        entry = self._find(key)
        value = entry.data if isinstance(entry, Packed) else entry
        slices = check_index(index, value.shape, key)
        if isinstance(value, WeightSpec):
            kind = type(value).__name__
            raise WeightError(f"weight {quote(key)} has a shape only, no values: it is a {kind}")
        if isinstance(value, jax.core.Tracer):
            raise WeightError(
                f"weight {quote(key)} is traced by a JAX transformation; compile outside of it, and pass traced "
                "weights to model.apply(params, …)"
            )
        if isinstance(value, jax.Array) and value.is_deleted():
            raise WeightError(f"weight {quote(key)} is deleted: a jitted call that donates it has consumed it")
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise WeightError(f"weight {quote(key)} is on devices of other processes, so it cannot be read here")
        # A JAX array is sliced on its device, so that only the part is transferred to the host.
        part = np.asarray(value[slices] if slices else value)
        part = part.astype(part.dtype.newbyteorder("="), copy=False).view()
        part.flags.writeable = False
        checked = finite_check_floats(part, entry.scheme) if isinstance(entry, Packed) else part
        check_finite(checked, key, self._name, self._on_nonfinite)
        return part


def _check_value(key: object, value: Any) -> None:
    """Check the type of one entry of a mapping, but not its values. Errors as `MappingSource`."""
    if not isinstance(key, str):
        raise WeightError(f"weights: expected strings as keys, got {quote(key)} of type {type(key).__name__}")
    if isinstance(value, Packed):
        return check_packed(value, f"weight {quote(key)}")
    if isinstance(value, PackedSpec):
        packed_types(value.shape, value.dtype, value.scheme, f"weight {quote(key)}")
        return
    if not isinstance(value, np.ndarray | jax.Array | jax.ShapeDtypeStruct) or isinstance(value, np.ma.MaskedArray):
        hint = "; flatten nested mappings to dotted keys" if isinstance(value, Mapping) else "; numpy.asarray makes one"
        if isinstance(value, str):
            hint = "; pass a path in place of the full mapping"
        raise WeightError(f"weight {quote(key)}: expected an array, got {quote(type(value).__name__)}{hint}")
    dtype = value.dtype
    if not (jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise WeightError(
            f"weight {quote(key)}: expected an array of numbers or bools, got dtype {quote(short_name(dtype))}"
        )
    if not all(isinstance(dim, int) for dim in value.shape):
        raise WeightShapeError(f"weight {quote(key)}: expected whole numbers as shape, got {quote(value.shape)}")
    check_shape(value.shape, f"weight {quote(key)}")
