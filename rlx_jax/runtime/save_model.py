"""`rlx_jax.save`: a model's parameters as a checkpoint, under the keys and in the shapes of the one it came from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import (
    DTypeError,
    FormatError,
    GraphError,
    RlxNumericsWarning,
    StorageError,
    UnsupportedError,
    WeightError,
    listing,
    quote,
)
from rlx_jax.ir.param import Key, Program, narrows, packed_keys
from rlx_jax.ir.types import TensorType, as_dtype, is_float, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.runtime.arguments import check_params
from rlx_jax.runtime.checkpoint_origin import LoadedFrom, whole_checkpoint
from rlx_jax.runtime.compile_flow import has_data
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.weights.execute import Piece, fill, pieces, read_numbers, whole
from rlx_jax.weights.finite import narrowed
from rlx_jax.weights.format import Entry
from rlx_jax.weights.save import write_checkpoint


def save(
    model: Any, path: str | os.PathLike[str], format: str | None = None, *, overwrite: bool = False,
    dtype: str | None = None,
) -> None:  # fmt: skip
    """Write a model to the directory `path`.

    Of what `rlx_jax.load` opened it is a checkpoint that `rlx_jax.load` and transformers open: the weights, also those
    of the checkpoint that the model does not hold, with `config.json`, `generation_config.json`, the files of the
    tokenizer, its chat templates, the image processor's and those of sentence-transformers' modules. Of a compiled
    model it is the weights alone; `weights=path` loads them.

    Keys and shapes are the checkpoint's, whatever the profile merged, stacked or transposed. The directory is
    written beside `path`, read back, and renamed: `path` is what it was or what it is to be, also after a crash.
    On the host there is room for all weights at once, as orbax takes them together.

    Args:
        model: a compiled model with `params`, or what `rlx_jax.load` returned; after training,
            `model.replace(params=params)`.
        path: a new directory; those around it are made where they are missing.
        format: "safetensors", or "orbax", which plain orbax restores too. By default the first for what
            `rlx_jax.load` opened, the second for compiled models.
        overwrite: replace what an earlier save wrote at `path`. Files that others put there stay, and beside the
            weights alone of a compiled model so do the config and tokenizer of an earlier save.
        dtype: of all floating weights: "f32", "bf16", "f16"; `config.json` says so then. Without it each has the dtype
            of its checkpoint, and values that this dtype does not hold are an error, and so are weights that are packed
            there: no format writes packed ones, and with `dtype` the numbers they stand for are written.

    Raises:
        WeightError: values would be rounded, or weights were packed, and `dtype` does not ask for it.
        TargetExistsError: `path` exists, and `overwrite` is false or something else wrote it.
        NoSpaceError, SaveFailedError: the disk is full or refuses; `path` is as it was.
        WeightError: the model has no parameters, or holds one key twice with different values.
        UnsupportedError: another format, a dtype or shape that the format cannot store, a `CausalLM` or an `Encoder`
            that `rlx_jax.load` did not open, or opened with an edited `recipe=`, which no `config.json` describes.
    """
    compiled, loaded_from = _opened(model)
    programs = compiled.programs
    params = compiled.require_params("save")
    check_params(params, compiled.param_specs())
    source = programs.source if has_data(programs) else None
    wanted = None if dtype is None else as_dtype(dtype)
    if wanted is not None and not is_float(wanted):
        raise DTypeError(f"save: dtype={quote(dtype)}: expected a floating one, such as 'f32' or 'bf16'")
    beside = {} if loaded_from is None else loaded_from.files(compiled.built, wanted)
    if wanted is None:
        _refuse_packed(programs.layout.leaves.values())
    found: dict[str, list[_Weight]] = {}
    for weight in _weights(programs.layout.leaves, params, source):
        found.setdefault(weight.key, []).append(weight)
    if wanted is None:
        rounded = ([weight for weight in held if not weight.survives()] for held in found.values())
        _refuse_rounding([weights[0] for weights in rounded if weights])
    weights = [_one(held) for held in found.values()]
    _warn_of_nan(weights)
    entries = [w.entry(wanted) for w in weights]
    if loaded_from is None:
        write_checkpoint(path, entries, format or "orbax", overwrite)
        return
    entries = entries if source is None else whole_checkpoint(entries, source, wanted)
    write_checkpoint(path, entries, format or "safetensors", overwrite, beside, loaded_from.inside)


def _opened(model: Any) -> tuple[CompiledModel, LoadedFrom | None]:
    """The compiled model of what is to be saved, and where `rlx_jax.load` opened it.

    Raises:
        GraphError, UnsupportedError: as `save`.
    """
    compiled = getattr(model, "model", model)
    if not isinstance(compiled, CompiledModel):
        hint = "; pass its to_model()" if hasattr(model, "to_model") else ""
        if isinstance(model, Mapping):
            hint = "; parameters go with their model: save(model.replace(params=params), path)"
        kinds = "CompiledModel, CausalLM, Encoder, VisionEncoder or DualEncoder"
        raise GraphError(f"save takes a {kinds}, got {type(model).__name__}{hint}")
    loaded_from: LoadedFrom | None = getattr(model, "loaded_from", None)
    if loaded_from is None and model is not compiled:
        raise UnsupportedError(
            f"save: rlx_jax.load did not open this {type(model).__name__}, so there is no config.json and no "
            "tokenizer's file to save with it. Beside those of a checkpoint: whole = rlx_jax.load(checkpoint); "
            "whole.model = model.model; rlx_jax.save(whole, path). The weights alone: rlx_jax.save(model.model, path)"
        )
    return compiled, loaded_from


@dataclass(frozen=True)
class _Weight:
    """What the parameters hold of one checkpoint key.

    `values` have the stored shape in the leaf's dtype. `original` is the source they still equal, although the
    leaf's program lost bits; `lost` says that it lost bits and they equal no source.
    """

    piece: Piece
    values: Any
    original: WeightSource | None = None
    lost: bool = False

    @property
    def key(self) -> str:
        return self.piece.key.key

    @property
    def type(self) -> TensorType:
        return self.piece.key.type

    def survives(self) -> bool:
        """Whether the values can be stored in the checkpoint's dtype without rounding."""
        if self.values.dtype == self.type.dtype or self.original is not None:
            return True
        if self.lost:
            return False
        values = np.asarray(self.values)
        back = _cast(values, self.type.dtype).astype(values.dtype)
        return bool(((back == values) | (values != values)).all())

    def entry(self, wanted: np.dtype[Any] | None) -> Entry:
        """The weight as it is to be written."""
        dtype = wanted if wanted is not None and is_float(self.type.dtype) else self.type.dtype
        return Entry(self.key, self.type.with_dtype(dtype), lambda: self._stored(dtype))

    def _stored(self, dtype: np.dtype[Any]) -> Any:
        values = self.values if self.original is None else read_numbers(self.key, self.original)
        return values if values.dtype == dtype else narrowed(np.asarray(values), dtype, f"weight {quote(self.key)}")


def _weights(
    leaves: Mapping[str, Program], params: Mapping[str, Any], source: WeightSource | None
) -> Iterator[_Weight]:
    """Every piece of every leaf."""
    for name, program in leaves.items():
        leaf = params[name]
        if isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
            raise WeightError(f"params: leaf {quote(name)} has no values: traced, or donated to a jitted call")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise WeightError(f"params: leaf {quote(name)} lies on devices of other processes")
        lossy = narrows(program)
        fresh = _loaded_again(program, source) if lossy else None
        held = list(pieces(program, leaf if isinstance(program, Key) else np.asarray(leaf)))
        again = [None] * len(held) if fresh is None else [piece.values for piece in pieces(program, fresh)]
        for piece, loaded in zip(held, again, strict=True):
            same = loaded is not None and np.array_equal(_bits(piece.values), _bits(loaded))
            yield _Weight(piece, piece.values, source if same else None, lossy and not same)


def _loaded_again(program: Program, source: WeightSource | None) -> np.ndarray[Any, Any] | None:
    """The leaf as the source gives it now; None without a source, or one that has changed."""
    if source is None:
        return None
    out = np.empty(program.type.shape, program.type.dtype)
    try:
        fill(out, program, source)
    except (FormatError, StorageError, WeightError):
        return None
    return out


def _one(held: list[_Weight]) -> _Weight:
    """What leaves hold of one key as one weight: of parts the whole, and of a tied one in two leaves the one with more
    bits.

    Raises:
        WeightError: the parts are not all of it, or two leaves hold different values.
    """
    widest = max(held, key=lambda weight: weight.values.dtype.itemsize)
    is_cut = any(weight.piece.sliced is not None for weight in held)
    values = whole([weight.piece for weight in held]) if is_cut else widest.values
    for weight in held if len(held) > 1 else ():
        part = _cast(np.asarray(values[weight.piece.place]), weight.values.dtype)
        if not np.array_equal(_bits(part), _bits(weight.values)):
            raise WeightError(f"weight {quote(weight.key)} is in two leaves of the model, and their values differ")
    if not is_cut:
        return widest
    same = all(weight.original is not None for weight in held)
    rounded = any(weight.lost or weight.original is not None for weight in held) and not same
    return _Weight(Piece(widest.piece.key, values), values, widest.original if same else None, rounded)


def _refuse_packed(leaves: Iterable[Program]) -> None:
    packed = dict(found for program in leaves for found in packed_keys(program))
    if packed:
        schemes = " and ".join(dict.fromkeys(packed.values()))
        raise WeightError(
            f"{len(packed)} weights are packed in the checkpoint ({schemes}), and no format writes packed ones: "
            f"{listing(packed, 8)}; dtype='f32' writes the numbers they stand for"
        )


def _refuse_rounding(weights: list[_Weight]) -> None:
    """Refuse to save these, which the dtypes of the checkpoint do not hold."""
    if not weights:
        return
    held, stored = weights[0].values.dtype, weights[0].type.dtype
    narrow, wide = sorted((held, stored), key=lambda dtype: dtype.itemsize)
    raise WeightError(
        f"{len(weights)} weights are {short_name(held)} in the model and {short_name(stored)} in the checkpoint, and "
        f"would not come back as they are: {listing([w.key for w in weights], 8)}; "
        f"dtype={short_name(wide)!r} keeps the values, dtype={short_name(narrow)!r} rounds them on purpose"
    )


def _warn_of_nan(weights: list[_Weight]) -> None:
    damaged = [w.key for w in weights if is_float(w.values.dtype) and bool((w.values != w.values).any())]
    if damaged:
        message = f"{len(damaged)} of {len(weights)} weights hold NaN, and loading refuses them: {listing(damaged, 8)}"
        warnings.warn(message, RlxNumericsWarning, stacklevel=3)


def _cast(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def _bits(values: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
