"""This module defines `rlx_jax.save`, which writes the parameters of a model as a checkpoint.

It uses the keys and shapes of the checkpoint that the model was loaded from, so that other libraries can load it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax import errors
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import listing, quote
from rlx_jax.ir.param import Key, Program, is_lossy, packed_keys
from rlx_jax.ir.types import TensorType, is_float, short_name
from rlx_jax.ir.weight_reads import WeightSource, has_any_values
from rlx_jax.runtime.arguments import check_params
from rlx_jax.runtime.checkpoint_origin import CheckpointOrigin, with_unused_weights
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.weights.execute import fill, read_numbers
from rlx_jax.weights.format import Entry, narrow_values
from rlx_jax.weights.gguf import SUFFIX
from rlx_jax.weights.inverse import Piece, decoded_leaves, join_pieces, pieces
from rlx_jax.weights.save import parse_dtype, write_checkpoint


def save(
    model: Any, path: str | os.PathLike[str], format: str | None = None, *, overwrite: bool = False,
    dtype: str | None = None,
) -> None:  # fmt: skip
    """Write a model to the directory `path`, or to one GGUF file.

    A model from `rlx_jax.load` becomes a checkpoint that `rlx_jax.load` and transformers can load. It has all weights
    of the original checkpoint, including unused ones, with `config.json`, `generation_config.json`, and the files of
    the tokenizer, chat templates, image processor and sentence-transformers modules. For a compiled model only the
    weights are written; `weights=path` loads them.

    Keys and shapes match the checkpoint, even if the profile fused, stacked or transposed weights. The directory is
    written under a temporary name next to `path`, read back, and renamed. So `path` is either unchanged or complete,
    even after a crash. The host needs memory for all weights at once, because orbax takes them together.

    Args:
        model: a compiled model with `params`, or the result of `rlx_jax.load`; after training,
            `model.replace(params=params)`.
        path: a new directory, or a `.gguf` file; missing parent directories are created.
        format: "safetensors", "orbax", which plain orbax restores too, or "gguf". The default is "gguf" for a `.gguf`
            file, "safetensors" for another model from `rlx_jax.load`, and "orbax" for a compiled model.
        overwrite: replace an earlier save at `path`. Other files there are retained; when a compiled model is saved,
            that includes the config and tokenizer of an earlier save.
        dtype: the dtype of all floating weights, "f32", "bf16" or "f16", which `config.json` then declares. By default
            each weight has the dtype of the checkpoint; values that would be rounded are an error, and so are weights
            that are packed in the checkpoint. With `dtype` packed weights are written dequantized. In a GGUF file it is
            the type of matrices, also "q8_0"; vectors and routers are "f32" there. "fp8" (blocks of 128 × 128) and
            "int8" (a scale for each row) quantize the weights of linear layers in a Hugging Face directory, except the
            head and routers; the others keep their dtype.

    Raises:
        WeightError: the model has no parameters, or one key twice with different values; or without `dtype`, values
            would be rounded, or weights were packed.
        TargetExistsError: `path` exists, and `overwrite` is false or something else wrote it.
        NoSpaceError, SaveFailedError: the disk is full or refuses; `path` is unchanged.
        UnsupportedError: another format; a dtype or shape that the format cannot store; a `CausalLM` or an `Encoder`
            that does not come from `rlx_jax.load`, or was loaded with an edited `recipe=`, which no `config.json`
            describes; a config or a tokenizer that the metadata of a GGUF file cannot express.
    """
    if format is None and isinstance(path, str | os.PathLike) and os.fsdecode(path).lower().endswith(SUFFIX):
        format = "gguf"
    compiled, loaded_from = _compiled_and_origin(model)
    leaves, source = compiled.programs.layout.params, compiled.programs.source
    source = source if has_any_values(source) else None
    params = compiled.require_params("save")
    check_params(params, compiled.param_specs())
    target, storage = parse_dtype(dtype, format, "save: dtype=")
    default, subfolder, files, metadata = "orbax", "", None, None
    if loaded_from is not None:
        loaded_from.check_model(compiled.built)
        default, subfolder = "safetensors", loaded_from.subfolder
        files = None if format == "gguf" else loaded_from.files(target)
    elif storage is not None or format == "gguf":
        message = f"save: {dtype or format} needs the config of a checkpoint: save the result of rlx_jax.load"
        raise errors.UnsupportedError(message)
    if dtype is None:
        _refuse_packed(leaves.values())
    entries = _entries(_weights(leaves, params, source), target)
    if loaded_from is not None and format == "gguf":
        metadata, entries = loaded_from.describe(entries)
    elif loaded_from is not None and source is not None:
        entries = with_unused_weights(entries, source, target, decodes=storage is not None)
    write_checkpoint(path, entries, format or default, overwrite, files, subfolder, metadata, storage)


def _compiled_and_origin(model: Any) -> tuple[CompiledModel, CheckpointOrigin | None]:
    """Return the compiled model of the argument of `save`, and its origin if `rlx_jax.load` returned it.

    Raises:
        GraphError, UnsupportedError: as `save`.
    """
    compiled = getattr(model, "model", model)
    if not isinstance(compiled, CompiledModel):
        hint = "; pass its to_model()" if hasattr(model, "to_model") else ""
        if isinstance(model, Mapping):
            hint = "; parameters go with their model: save(model.replace(params=params), path)"
        kinds = "CompiledModel, CausalLM, Encoder, VisionEncoder or DualEncoder"
        raise errors.GraphError(f"save takes a {kinds}, got {type(model).__name__}{hint}")
    loaded_from: CheckpointOrigin | None = getattr(model, "loaded_from", None)
    if loaded_from is None and model is not compiled:
        raise errors.UnsupportedError(
            f"save: rlx_jax.load did not open this {type(model).__name__}, so there is no config.json and no "
            "tokenizer's file to save with it. With the files of a checkpoint: loaded = rlx_jax.load(checkpoint); "
            "loaded.model = model.model; rlx_jax.save(loaded, path). The weights alone: rlx_jax.save(model.model, path)"
        )
    return compiled, loaded_from


def _entries(parts: Iterable[_WeightPart], target: np.dtype[Any] | None) -> list[Entry]:
    """Return the weights to write, in the dtype `target` or in the dtypes of the checkpoint.

    Raises:
        WeightError: without `target`, values would be rounded; or one key has two different values.

    Warns:
        RlxNumericsWarning: a weight has NaN.
    """
    parts_by_key: dict[str, list[_WeightPart]] = {}
    for part in parts:
        parts_by_key.setdefault(part.key, []).append(part)
    if target is None:
        inexact = ([part for part in same_key if not part.is_exact()] for same_key in parts_by_key.values())
        _refuse_rounding([same_key[0] for same_key in inexact if same_key])
    weights = [_join_parts(same_key) for same_key in parts_by_key.values()]
    _warn_of_nan(weights)
    return [weight.entry(target) for weight in weights]


@dataclass(frozen=True)
class _WeightPart:
    """The values, or a slice of the values, that a parameter has of one checkpoint key.

    Attributes:
        piece: the key, and the slice if it is not the full weight.
        values: in the checkpoint's shape and the parameter's dtype.
        original: the source, if loading rounded the values and they have not changed since. The exact values are then
            read from it again.
        is_rounded: whether loading rounded the values and no source has them.
    """

    piece: Piece
    values: Any
    original: WeightSource | None = None
    is_rounded: bool = False

    @property
    def key(self) -> str:
        return self.piece.key.key

    @property
    def type(self) -> TensorType:
        return self.piece.key.type

    def is_exact(self) -> bool:
        """Return whether the checkpoint's dtype represents the values without rounding."""
        if self.values.dtype == self.type.dtype or self.original is not None:
            return True
        if self.is_rounded:
            return False
        values = np.asarray(self.values)
        back = _cast(values, self.type.dtype).astype(values.dtype)
        return bool(((back == values) | (values != values)).all())  # NaN equals nothing, and survives a cast

    def entry(self, target_dtype: np.dtype[Any] | None) -> Entry:
        """Return the weight to write, in the dtype `target_dtype`, or in the checkpoint's dtype if it is None."""
        dtype = target_dtype if target_dtype is not None and is_float(self.type.dtype) else self.type.dtype
        return Entry(self.key, self.type.with_dtype(dtype), lambda: self._stored(dtype))

    def _stored(self, dtype: np.dtype[Any]) -> Any:
        values = self.values if self.original is None else read_numbers(self.key, self.original)
        return (
            values if values.dtype == dtype else narrow_values(np.asarray(values), dtype, f"weight {quote(self.key)}")
        )


def _weights(
    leaves: Mapping[str, Program], params: Mapping[str, Any], source: WeightSource | None
) -> Iterator[_WeightPart]:
    """Return the parameters, split into the weights of the checkpoint."""
    for name in leaves:
        array = params[name]
        if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and array.is_deleted()):
            raise errors.WeightError(f"params: leaf {quote(name)} has no values: traced, or donated to a jitted call")
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise errors.WeightError(f"params: leaf {quote(name)} lies on devices of other processes")
    for program, array in decoded_leaves({program: params[name] for name, program in leaves.items()}).items():
        lossy = is_lossy(program)
        reloaded = _reload(program, source) if lossy else None
        parts = list(pieces(program, array if isinstance(program, Key) else np.asarray(array)))
        reloads = [None] * len(parts) if reloaded is None else [piece.values for piece in pieces(program, reloaded)]
        for piece, reload in zip(parts, reloads, strict=True):
            is_unchanged = reload is not None and np.array_equal(_bits(piece.values), _bits(reload))
            yield _WeightPart(piece, piece.values, source if is_unchanged else None, lossy and not is_unchanged)


def _reload(program: Program, source: WeightSource | None) -> np.ndarray[Any, Any] | None:
    """Return the parameter as the source has it now; None if there is no source, or it can no longer be read."""
    if source is None:
        return None
    out = np.empty(program.type.shape, program.type.dtype)
    try:
        fill(out, program, source)
    except (errors.FormatError, errors.StorageError, errors.WeightError):
        return None
    return out


def _join_parts(parts: list[_WeightPart]) -> _WeightPart:
    """Return one weight from the values that several parameters have of one key.

    Slices are joined into the full weight. For a tied weight in two parameters the one with more bits is taken.

    Raises:
        WeightError: slices are missing, or two parameters have different values.
    """
    widest = max(parts, key=lambda weight: weight.values.dtype.itemsize)
    is_cut = any(weight.piece.sliced is not None for weight in parts)
    values = join_pieces([weight.piece for weight in parts]) if is_cut else widest.values
    for weight in parts if len(parts) > 1 else ():
        overlap = _cast(np.asarray(values[weight.piece.selection]), weight.values.dtype)
        if not np.array_equal(_bits(overlap), _bits(weight.values)):
            raise errors.WeightError(
                f"weight {quote(weight.key)} is in two leaves of the model, and their values differ"
            )
    if not is_cut:
        return widest
    are_unchanged = all(weight.original is not None for weight in parts)
    is_rounded = any(weight.is_rounded or weight.original is not None for weight in parts) and not are_unchanged
    return _WeightPart(Piece(widest.piece.key, values), values, widest.original if are_unchanged else None, is_rounded)


def _refuse_packed(leaves: Iterable[Program]) -> None:
    """Raise a `WeightError` if a weight is packed in the checkpoint."""
    packed = dict(item for program in leaves for item in packed_keys(program))
    if packed:
        schemes = " and ".join(dict.fromkeys(packed.values()))
        raise errors.WeightError(
            f"{len(packed)} weights are packed in the checkpoint ({schemes}), and are not copied packed: "
            f"{listing(packed, 8)}; dtype='f32' writes the dequantized values"
        )


def _refuse_rounding(weights: list[_WeightPart]) -> None:
    """Raise a `WeightError` for weights that the dtypes of the checkpoint would round; `weights` are only those."""
    if not weights:
        return
    ours, theirs = weights[0].values.dtype, weights[0].type.dtype
    narrow, wide = sorted((ours, theirs), key=lambda dtype: dtype.itemsize)
    raise errors.WeightError(
        f"{len(weights)} weights are {short_name(ours)} in the model and {short_name(theirs)} in the checkpoint, "
        f"so that a save would round values: {listing([w.key for w in weights], 8)}; "
        f"dtype={short_name(wide)!r} keeps the values, dtype={short_name(narrow)!r} rounds them on purpose"
    )


def _warn_of_nan(weights: list[_WeightPart]) -> None:
    """Warn of weights with NaN: saving works, but loading refuses them."""
    damaged = [w.key for w in weights if is_float(w.values.dtype) and _has_nan(w.values)]
    if damaged:
        message = f"{len(damaged)} of {len(weights)} weights hold NaN, and loading refuses them: {listing(damaged, 8)}"
        warnings.warn(message, errors.RlxNumericsWarning, stacklevel=4)


def _has_nan(values: Any) -> bool:
    """Return whether an array has NaN, on the device that it is on; on a CPU, NumPy needs no program for each shape."""
    if isinstance(values, jax.Array) and {device.platform for device in values.devices()} == {"cpu"}:
        values = np.asarray(values)
    return bool((values != values).any())


def _cast(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the values in another dtype; overflow gives infinities without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def _bits(values: Any) -> np.ndarray[Any, Any]:
    """Return the bytes of an array, which compare equal for NaN too, and differ for 0.0 and -0.0."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
