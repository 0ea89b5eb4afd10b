"""`Gguf`, the weight format of llama.cpp and its relatives: one file, or several parts `x-00001-of-00003.gguf`.

`GgufSource` offers the weights under the checkpoint keys of Hugging Face, so that flows and recipes read them like any
other checkpoint. Packed tensors remain packed: `spec` returns a `PackedSpec`, and `read` the bytes.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import (
    DuplicateWeightError,
    GgufError,
    IntegrityError,
    MissingFileError,
    SaveFailedError,
    listing,
    quote,
)
from rlx_jax.io.files import Links, resolve
from rlx_jax.io.ggml import BLOCKS, BlockArrays
from rlx_jax.ir.packed import F32, PackedSpec, WeightSpec
from rlx_jax.ir.packed_values import decode_packed, finite_check_floats, has_finite_scales
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.format import Entry, FiniteCheck, OnNonfinite, OpenOptions, check_finite, stored_spec
from rlx_jax.weights.gguf_config import architecture_of, gguf_config
from rlx_jax.weights.gguf_header import GgufHeader, GgufTensor, MetadataValue, is_equal, read_gguf_header
from rlx_jax.weights.gguf_names import KeyReading, key_readings
from rlx_jax.weights.gguf_write import write_gguf
from rlx_jax.weights.manifest import digest
from rlx_jax.weights.tensor_file import FilesSource, TensorFile, TensorInfo
from rlx_jax.weights.views import Destination, HostArray, NamedTensors, ReadingView, check_index, read_into

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_PARTS, _PART_NUMBER, _ALL_TENSORS = "split.count", "split.no", "split.tensors.count"
# The headers in use by the identity of their file: whoever opens a file again, such as the folder of a checkpoint and
# the source of its weights, shares one. A vocabulary of 150,000 takes tenths of a second to read.
_HEADERS: weakref.WeakValueDictionary[tuple[int, ...], GgufHeader] = weakref.WeakValueDictionary()


class GgufFile(TensorFile):
    """One open `.gguf` file. Opening reads only the header.

    Attributes:
        header: metadata and tensors. `tensors` has these as arrays of bytes where they are packed.

    Raises:
        As `read_gguf_header` and `TensorFile`.
    """

    error = GgufError
    header: GgufHeader

    def _read_header(self, size: int) -> Mapping[str, TensorInfo]:
        self.header = _HEADERS.get(self.identity) or read_gguf_header(self._read_bytes, size, self._where)
        _HEADERS[self.identity] = self.header
        return {name: tensor.stored for name, tensor in self.header.tensors.items()}


class GgufSource(NamedTensors[KeyReading], FilesSource):
    """Weights from a GGUF file or the parts of one, under their checkpoint keys.

    A context manager; the files are closed at the latest when the source is garbage-collected. Several threads may
    read.

    Attributes:
        files: the parts, in order. The first one has the metadata.
        header: the metadata, and the tensors of all parts.

    Raises:
        ConfigError, UnsupportedError: as `gguf_config`.
    """

    def __init__(self, files: Sequence[GgufFile], *, on_nonfinite: OnNonfinite = "error") -> None:
        self.files: tuple[GgufFile, ...] = tuple(files)
        self._on_nonfinite = on_nonfinite
        self._owners: dict[str, GgufFile] = {}
        for part in self.files:
            if repeated := [name for name in part.header.tensors if name in self._owners]:
                other = self._owners[repeated[0]].name
                raise DuplicateWeightError(f"tensor {quote(repeated[0])} is in {quote(other)} and {quote(part.name)}")
            self._owners |= dict.fromkeys(part.header.tensors, part)
        tensors = {name: tensor for part in self.files for name, tensor in part.header.tensors.items()}
        self.header = GgufHeader(self.files[0].header.metadata, tensors)
        self._label = f"{listing((part.name for part in self.files), 2)}, a GGUF file"
        where = quote(self.files[0].name)
        self.config = gguf_config(self.header, self._read_tensor, where)
        architecture = architecture_of(self.header.metadata, where)
        self._tensors = key_readings(architecture, tensors, self.config, where)

    def where(self, key: str) -> str:
        """Return the file that holds `key`, and the name of its tensor there.

        Raises:
            MissingWeightError: no such key.
        """
        name = self._find(key).tensor
        return f"{self._owners[name].name}: {name}"

    def spec(self, key: str) -> WeightSpec:
        """Return the logical shape and the dtype of a weight, and its scheme if it is packed.

        Raises:
            MissingWeightError: no such key.
        """
        reading, tensor = self._find_tensor(key)
        shape = reading.shape or (tensor.shape if reading.expert is None else tensor.shape[1:])
        if tensor.scheme is not None and not reading.decodes:
            return PackedSpec(shape, F32, tensor.scheme)
        return stored_spec(shape, F32 if reading.change or reading.decodes else tensor.stored.dtype)

    def is_decoded(self, key: str) -> bool:
        """Return whether `read` decodes a weight that is packed in the file."""
        reading, tensor = self._find_tensor(key)
        return reading.decodes and tensor.scheme is not None

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        """Return a weight, or the part that `index` selects as in NumPy; see `rlx_jax.weights.views.ReadingSource`.

        For a packed tensor these are its bytes, and `index` applies to the array of bytes.

        Raises:
            MissingWeightError: no such key. WeightShapeError: `index` does not fit the shape.
            NonFiniteWeightError: NaN in the values, unless `on_nonfinite` allows them.
            Others: as `TensorFile.read`.
        """
        reading, tensor = self._find_tensor(key)
        scheme = None if reading.decodes else tensor.scheme
        # The expert of a stack is a part of its first axis.
        lead = () if reading.expert is None else (slice(reading.expert, reading.expert + 1),)
        shape = tensor.stored.shape[len(lead) :] if scheme is not None else self.spec(key).shape
        check, slices = FiniteCheck(), check_index(index, shape, key)
        if isinstance(out, BlockArrays):
            order = reading.order
            is_suited = reading.shape is None and (order is None or (order.axis == 0 and not slices))
            if scheme is not None and BLOCKS[scheme] is out.layout and is_suited:
                values = self._read_tensor(reading.tensor, (*lead, *slices), out)
                if order is not None and out.filled:
                    for _, array in out.arrays:
                        order.arrange(array)
                # Bad scales are read as an array as well, of which the check below counts the bad values.
                if out.filled and any(
                    name == "scales" and has_finite_scales(array, scheme) for name, array in out.arrays
                ):
                    return values
                out.filled = False
            out = None
        if lead:
            values = self._read_tensor(reading.tensor, (*lead, *slices), None if out is None else out[None], check)[0]
        else:
            values = self._changed(reading, tensor, slices, out, check)
        is_stored = scheme is None and not reading.change and not reading.decodes
        if not (is_stored and check.all_finite):
            checked = values if scheme is None else finite_check_floats(values, scheme)
            check_finite(checked, key, quote(self.where(key)), self._on_nonfinite)
        return values

    def _find_tensor(self, key: str) -> tuple[KeyReading, GgufTensor]:
        """Return what is read for a key, and its tensor."""
        reading = self._find(key)
        return reading, self.header.tensors[reading.tensor]

    def _read_tensor(
        self, name: str, index: tuple[slice, ...] | None = None, out: Destination = None,
        check: FiniteCheck | None = None,
    ) -> HostArray:  # fmt: skip
        """Return a tensor under its name in the file, or a part of it."""
        is_packed = self.header.tensors[name].scheme is not None
        return self._owners[name].read(name, index, out, None if is_packed else check)

    def _changed(
        self, reading: KeyReading, tensor: GgufTensor, slices: tuple[slice, ...], out: HostArray | None,
        check: FiniteCheck,
    ) -> HostArray:  # fmt: skip
        """Return the part `slices` of what is read for a key that is no expert's, as the checkpoint has it."""
        # Small tensors change their shape, and those that are decoded their blocks: both are read whole.
        is_whole = reading.shape is not None or reading.decodes
        order, parts = reading.order, list(slices)
        positions = None if order is None else order.positions()
        if order is not None and positions is not None and not is_whole and len(slices) > order.axis:
            # The rows of the part, in another order, are within few rows more.
            positions = positions[slices[order.axis]]
            start, stop = (int(positions.min()), int(positions.max()) + 1) if positions.size else (0, 0)
            parts[order.axis], positions = slice(start, stop), positions - start
        values = self._read_tensor(reading.tensor, None if is_whole else tuple(parts) or None, out, check)
        if reading.decodes and tensor.scheme is not None:
            values = decode_packed(values, tensor.scheme)
        if order is not None and positions is not None:
            values = values.take(positions, order.axis)
        if reading.change:
            values = values.astype(F32)
            with np.errstate(all="ignore"):  # the check for NaN follows
                values = values - F32.type(1) if reading.change == "subtract" else np.log(-values)
        return values.reshape(reading.shape or values.shape)[slices] if is_whole else values


# -- experts of gpt-oss ------------------------------------------------------------------------

_MXFP4, _BLOCK = "gguf_mxfp4", 32
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class _Weight:
    """A weight of the checkpoint: the keys of its tensors, and what of them it is.

    `blocks` and `scales` are parts of MXFP4, `values` the numbers, transposed, and `same` the values unchanged.
    """

    keys: tuple[str, ...]
    part: Literal["blocks", "scales", "values", "same"]


class GptOssExperts(NamedTensors[_Weight], ReadingView):
    """The experts of a gpt-oss file under the keys and in the layout of its Hugging Face checkpoint.

    A file has the gate and the up projection of all experts as one tensor each, `[experts, inner, hidden]`. The
    checkpoint has their rows in turn in one weight: MXFP4 as `gate_up_proj_blocks` and `gate_up_proj_scales`, other
    types as numbers `[experts, hidden, 2 · inner]`.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._label = "a GGUF file"
        self._tensors = {}
        for key in source.keys():
            stem, _, module = key.rpartition(_EXPERTS)
            name, _, kind = module.partition(".")
            new, keys = f"{stem}{_EXPERTS}{name}", [key]
            if stem and name in ("gate_proj", "up_proj"):
                keys = [f"{stem}{_EXPERTS}{half}.{kind}" for half in ("gate_proj", "up_proj")]
                new = f"{stem}{_EXPERTS}gate_up_proj"
            shapes = {tuple(source.spec(k).shape) if source.has(k) else () for k in keys}
            if not stem or len(shapes) > 1 or len(min(shapes)) != (2 if kind == "bias" else 3):
                self._tensors[key] = _Weight((key,), "same")
            elif kind == "bias":
                self._tensors[f"{new}_bias"] = _Weight(tuple(keys), "same")
            elif {getattr(source.spec(key), "scheme", None) for key in keys} == {_MXFP4}:
                self._tensors |= {
                    f"{new}_blocks": _Weight(tuple(keys), "blocks"),
                    f"{new}_scales": _Weight(tuple(keys), "scales"),
                }
            else:
                self._tensors[new] = _Weight(tuple(keys), "values")

    def _at(self, key: str) -> tuple[WeightSource, str]:
        return self.source, self._find(key).keys[0]

    def spec(self, key: str) -> WeightSpec:
        weight = self._find(key)
        spec = self.source.spec(weight.keys[0])
        if len(weight.keys) == 1 and weight.part == "same":
            return spec
        experts, rows, *columns = spec.shape
        rows *= len(weight.keys)
        dtypes = {self.source.spec(key).dtype for key in weight.keys}
        # NumPy has no common dtype for f16 and bf16.
        dtype = spec.dtype if len(dtypes) == 1 else functools.reduce(np.promote_types, dtypes, F32)
        if weight.part == "same":
            return stored_spec((experts, rows, *columns), dtype)
        if weight.part == "values":
            return stored_spec((experts, *columns, rows), dtype)
        blocks = columns[0] // _BLOCK
        shape = (experts, rows, blocks) if weight.part == "scales" else (experts, rows, blocks, _BLOCK // 2)
        return stored_spec(shape, np.uint8)

    def is_decoded(self, key: str) -> bool:
        weight = self._find(key)
        return weight.part == "values" and any(isinstance(self.source.spec(k), PackedSpec) for k in weight.keys)

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: Destination) -> HostArray:
        weight = self._find(key)
        if len(weight.keys) == 1 and weight.part == "same":
            return read_into(self.source, weight.keys[0], index, out)
        spec = self.spec(key)
        slices = check_index(index, tuple(spec.shape), key)
        halves = [self._read(name, slices[:1], weight.part).astype(spec.dtype, copy=False) for name in weight.keys]
        # The rows of gate and up in turn.
        values = np.stack(halves, axis=2).reshape(halves[0].shape[0], -1, *halves[0].shape[2:])
        values = values.swapaxes(1, 2) if weight.part == "values" else values
        return np.ascontiguousarray(values[(slice(None), *slices[1:])])

    def _read(self, key: str, experts: tuple[slice, ...], part: str) -> HostArray:
        """Return a part of a tensor, of some experts: `[experts, inner, …]`."""
        values, spec = self.source.read(key, experts), self.source.spec(key)
        if not isinstance(spec, PackedSpec):
            return values
        if part in ("values", "same"):
            decoded: HostArray = decode_packed(values, spec.scheme)
            return decoded
        blocks = values.reshape(*values.shape[:2], -1, 1 + _BLOCK // 2)
        if part == "scales":
            return blocks[..., 0]
        # A byte has the values i and i + 16 of a block in the file, and 2i and 2i + 1 in the checkpoint.
        codes = np.concatenate([blocks[..., 1:] & 0x0F, blocks[..., 1:] >> 4], axis=-1)
        pairs: HostArray = codes[..., ::2] | codes[..., 1::2] << 4
        return pairs


# -- the format --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gguf:
    """The GGUF format; see `rlx_jax.weights.format.Format`."""

    name: str = "gguf"
    suffix: str = SUFFIX

    def detect(self, weights: Any) -> bool:
        """Whether `weights` is the path of a `.gguf` file, or of a link or pipe with such a name, which is refused."""
        is_named = isinstance(weights, str) and weights.lower().endswith(SUFFIX)
        return is_named and os.path.lexists(weights) and not os.path.isdir(weights)

    def open(self, weights: Any, options: OpenOptions) -> WeightSource:
        """Open a file, and the other parts of a model if the file is its first one."""
        if options.verify == "full":
            raise IntegrityError(f"{quote(weights)}: GGUF files have no digests to verify")
        source = open_gguf(weights, links=options.links, on_nonfinite=options.on_nonfinite)
        return GptOssExperts(source) if source.config["model_type"] == "gpt_oss" else source

    def write_file(self, path: str, entries: Sequence[Entry], metadata: Mapping[str, MetadataValue]) -> None:
        """Write one file, and compare what it holds with what was written.

        Raises:
            UnsupportedError: as `write_gguf`. SaveFailedError: the file is not what was written.
        """
        digests = write_gguf(path, entries, metadata)
        with GgufFile(path) as written:
            wrong = [name for name, sha256 in digests.items() if digest(written.read(name)) != sha256]
        if wrong or digests.keys() != written.header.tensors.keys():
            raise SaveFailedError(f"the written file cannot be read back, so it was removed: {listing(wrong)}")


def open_gguf(path: str, *, links: Links = "follow", on_nonfinite: OnNonfinite = "error") -> GgufSource:
    """Return the source of a GGUF file, or of all parts of a model if it is the first of several.

    Raises:
        GgufError: parts contradict each other, or the path is not the first part.
        MissingFileError: parts are missing; the message lists them.
        DuplicateWeightError: a tensor is in two parts.
        Others: as `GgufFile` and `GgufSource`.
    """
    directory, name = os.path.split(path)
    first_path = resolve(directory or ".", name, links) if links == "refuse" else path
    with ExitStack() as stack:  # closes the parts that are open if one of them, or a check, fails
        files = [stack.enter_context(GgufFile(first_path, name=path))]
        names = _other_parts(files[0], directory or ".", name)
        for number, part_name in enumerate(names, 1):
            files.append(stack.enter_context(GgufFile(resolve(directory or ".", part_name, links), name=part_name)))
            numbers = [files[-1].header.metadata.get(key) for key in (_PART_NUMBER, _PARTS)]
            if not all(map(is_equal, numbers, (number, len(names) + 1))):
                expected = [number, len(names) + 1]
                raise GgufError(f"{quote(part_name)}: {_PART_NUMBER} and {_PARTS}: expected {expected}, got {numbers}")
        count = sum(len(part.header.tensors) for part in files)
        if names and not is_equal(declared := files[0].header.metadata.get(_ALL_TENSORS, count), count):
            raise GgufError(f"{quote(path)}: {_ALL_TENSORS} is {declared}, the parts have {count} tensors")
        source = GgufSource(files, on_nonfinite=on_nonfinite)
        stack.pop_all()
    return source


def _other_parts(first: GgufFile, directory: str, name: str) -> list[str]:
    """Return the names of the parts of a model after its first one, which exist; an empty list if the file is whole."""
    where, metadata = quote(first.name), first.header.metadata
    count = metadata.get(_PARTS, 0)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _PART.fullmatch(name)
    if match is None or int(match[3]) != count:
        raise GgufError(f"{where}: the file is one of {count} parts; expected a name like x-00001-of-{count:05}.gguf")
    if not is_equal(metadata.get(_PART_NUMBER), 0) or int(match[2]) != 1:
        raise GgufError(f"{where}: the file is not the first part; open {match[1]}-00001-of-{count:05}.gguf")
    names = part_names(name)[1:]
    if missing := [n for n in names if not os.path.lexists(os.path.join(directory, n))]:
        raise MissingFileError(f"{where}: {len(missing)} of {count} parts are missing: {listing(missing)}")
    return names


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model, from the name of its first one; the name alone if it has one part."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]
