"""The cache of explicit decode as plain NumPy arithmetic on the host: from outputs to inputs, and padding to a bucket.

A decode flow compiles once for each number of cached tokens. Padded to an upper bound U, with the mask and the
positions that say so, it compiles once for each U. `CausalLM` needs none of this: its cache has a fixed size and stays
on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_jax.errors import RequestError, SequenceLengthError, ShapeError, listing, shown

CacheRows = np.ndarray[Any, Any]
MAX_SIZE = 2**30
"""Rows of a cache, positions, new tokens."""


@dataclass(frozen=True)
class LayerKvCache:
    """Keys (rotated) and values of every layer, `[B, P, K·D]` each."""

    keys: tuple[CacheRows, ...]
    values: tuple[CacheRows, ...]

    def __post_init__(self) -> None:
        for name, arrays in (("keys", self.keys), ("values", self.values)):
            if not isinstance(arrays, tuple) or not all(isinstance(a, np.ndarray) for a in arrays):
                raise ShapeError(f"{name}: expected a tuple of arrays [B, P, K·D], one a layer, got {shown(arrays)}")
        shapes = {a.shape[:2] for a in (*self.keys, *self.values)}
        if not self.keys or len(self.keys) != len(self.values) or len(shapes) != 1 or self.keys[0].ndim != 3:
            found = [list(a.shape) for a in (*self.keys, *self.values)]
            raise ShapeError(f"a cache has keys and values [B, P, K·D] for each layer, got {listing(found)}")

    @property
    def length(self) -> int:
        """Cached tokens P."""
        return int(self.keys[0].shape[1])

    @property
    def batch(self) -> int:
        """Rows B."""
        return int(self.keys[0].shape[0])

    @staticmethod
    def from_layer_outputs(outputs: Mapping[str, Any]) -> LayerKvCache:
        """From the outputs `kv.{i}.k` and `kv.{i}.v` of a call: `export_kv`, or a step without padding.

        Raises:
            RequestError: an output of a layer is missing.
        """
        if not isinstance(outputs, Mapping):
            raise RequestError(f"outputs: expected the dict that a model returns, got {shown(outputs)}")
        layers = sum(name.startswith("kv.") and name.endswith(".k") for name in outputs)
        names = [f"kv.{i}.{kind}" for kind in "kv" for i in range(layers)]
        missing = [name for name in names if name not in outputs]
        if missing or not layers:
            raise RequestError(
                f"outputs {listing(missing) or 'kv.{i}.k'} are missing of {listing(outputs)}; expected keys and values "
                "of every layer: compile with export_kv=True, or a decode flow"
            )
        arrays = tuple(np.asarray(outputs[name]) for name in names)
        return LayerKvCache(arrays[:layers], arrays[layers:])

    def pad_layers_to_upper(self, upper: int) -> LayerKvCache:
        """With zeros behind the tokens, up to `upper` rows, which `bucket_decode_mask` drops.

        Raises:
            SequenceLengthError: there are more tokens than that.
        """
        _check_fits(self.length, upper)
        width = ((0, 0), (0, upper - self.length), (0, 0))
        keys, values = (tuple(np.pad(a, width) for a in part) for part in (self.keys, self.values))
        return LayerKvCache(keys, values)

    def advance_from_decode_outputs(self, outputs: Mapping[str, Any], upper: int | None = None) -> LayerKvCache:
        """The cache after a step that read this one, padded to `upper` if given: its tokens, then the new ones.

        The new rows stand behind the padding, at `upper`, and move up to P.

        Raises:
            ShapeError: the outputs are not those of such a step.
        """
        padded = self.length if upper is None else _size("upper", upper)
        after = LayerKvCache.from_layer_outputs(outputs)
        if len(after.keys) != len(self.keys) or after.batch != self.batch or after.length <= padded:
            raise ShapeError(
                f"the outputs have {len(after.keys)} layers of {after.batch} × {after.length} rows; expected "
                f"{len(self.keys)} of {self.batch} × more than {padded}"
            )
        past, new = slice(None, self.length), slice(padded, None)
        keys, values = (
            tuple(np.concatenate([a[:, past], a[:, new]], axis=1) for a in part) for part in (after.keys, after.values)
        )
        return LayerKvCache(keys, values)

    def inputs(self) -> dict[str, CacheRows]:
        """The inputs `past_k_{i}` and `past_v_{i}` of a decode flow."""
        pairs = enumerate(zip(self.keys, self.values, strict=True))
        return {f"past_{kind}_{i}": array for i, pair in pairs for kind, array in zip("kv", pair, strict=True)}


def state_inputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs `state_{slot}_{i}` of a decode flow, which are the outputs `state.{i}.{slot}` of a call."""
    parts = ((name.split(".", 2), array) for name, array in outputs.items() if name.startswith("state."))
    return {f"state_{slot}_{number}": array for (_, number, slot), array in parts}


def bucket_decode_mask(past: int, upper: int, new: int = 1, batch: int = 1) -> CacheRows:
    """The keep mask int32 `[B, U+S]` of a cache of `past` tokens that is padded to `upper`: 1 keeps a key.

    >>> bucket_decode_mask(2, 4, new=1).tolist()
    [[1, 1, 0, 0, 1]]
    """
    _check_fits(past, upper)
    new, batch = _size("new", new, 1), _size("batch", batch, 1)
    at = np.arange(upper + new)
    return np.tile(((at < past) | (at >= upper)).astype(np.int32), (batch, 1))


def bucket_positions(past: int, new: int = 1, batch: int = 1) -> CacheRows:
    """The `position_ids` int32 `[B, S]` of new tokens behind `past` cached ones, whatever they are padded to."""
    past, new, batch = _size("past", past), _size("new", new, 1), _size("batch", batch, 1)
    _size("past + new", past + new)
    return np.tile(np.arange(past, past + new, dtype=np.int32), (batch, 1))


def _size(name: str, value: Any, low: int = 0) -> int:
    """A size from `low` on.

    Raises:
        SequenceLengthError: something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= MAX_SIZE:
        raise SequenceLengthError(f"{name} is {shown(value)}; expected an integer from {low} to {MAX_SIZE}")
    return int(value)


def _check_fits(past: Any, upper: Any) -> None:
    """A cache of `past` tokens fits `upper` rows."""
    if _size("past", past) > _size("upper", upper):
        raise SequenceLengthError(f"a cache of {past} tokens does not fit {upper} rows")
