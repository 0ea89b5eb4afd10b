"""This module defines `CheckpointOrigin`, the checkpoint that a model was loaded from.

It supplies the config, tokenizer and other files, and the unused weights, that a saved copy of the model needs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ConfigError, FormatError, HubError, RlxWarning, StorageError, UnsupportedError, quote
from rlx_jax.io import limits
from rlx_jax.io.folder import Folder
from rlx_jax.ir.graph import Leaf, Param, TypeCache
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.param import stored_keys
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import unroll
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.program import Built
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.format import Entry, narrow_values
from rlx_jax.weights.views import RenamedSource

CONFIG = "config.json"
# Companion files of the weights that other libraries may read, even if rlx_jax has not read them.
COMPANION_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip
# The path of a block, an op, and its operands: ops by their numbers, weights by their keys.
_Step = tuple[str, str, tuple[tuple[object, int], ...]]
_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class CheckpointOrigin:
    """The origin of a model's weights, config and tokenizer.

    Attributes:
        folder: the checkpoint's directory.
        subfolder: the subdirectory with the weights and their `config.json`; "" for the directory itself.
        mismatch: why `config.json` does not describe the model; "" if it does.
        built: the flow that was loaded.
        describe: returns the metadata of a GGUF file with these weights of the model, and all weights to write.
    """

    folder: Folder
    subfolder: str
    mismatch: str
    built: Built
    describe: Callable[[Sequence[Entry]], tuple[dict[str, Any], list[Entry]]]

    def check_model(self, built: Built) -> None:
        """Check that the config describes the flow that was loaded, and that `built` computes the same.

        Raises:
            UnsupportedError: it does not; the message names the first block that differs.
        """
        if self.mismatch:
            raise UnsupportedError(
                f"{self.mismatch}, and its config.json would describe another: save the weights alone, "
                "rlx_jax.save(model.model, path)"
            )
        if built is self.built:
            return
        number_of_step: dict[_Step, int] = {}
        ours, theirs = (_op_numbers(one, number_of_step) for one in (built, self.built))
        for number, (path, _, _) in enumerate(number_of_step):
            if (number in ours) != (number in theirs):
                raise UnsupportedError(
                    f"save: the model differs from what {self.folder.where(CONFIG)} describes, first in {quote(path)}: "
                    "it was edited by path or has adapters (rlx_jax.merge_lora, rlx_jax.save_lora); save the weights "
                    "alone, rlx_jax.save(model.model, path)"
                )

    def files(self, dtype: np.dtype[Any] | None) -> dict[str, bytes]:
        """Return the companion files of the weights, by path.

        They are copied unchanged, except that the config declares the new dtype and no packing.

        Args:
            dtype: the dtype that all floating weights are saved in; None if they keep theirs.

        Returns:
            The bytes of each file by its path, relative to the checkpoint's directory.

        Raises:
            ConfigError: a file that was read when the model was loaded is missing now.

        Warns:
            RlxWarning: a file of `COMPANION_FILES` that rlx_jax does not need cannot be read.
        """
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        contents = {}
        for name in [path.relative_to(self.folder.path).as_posix() for path in list(self.folder.files_read)]:
            raw = self._read(name)
            if raw is None:
                raise ConfigError(
                    f"{self.folder.where(name)}: the model was loaded with this file, and it is missing now; "
                    "restore it, or save the weights alone, rlx_jax.save(model.model, path)"
                )
            contents[name] = raw
        for name in (prefix + name for name in COMPANION_FILES if prefix + name not in contents):
            try:
                raw = self._read(name)
            except (HubError, FormatError, StorageError) as cause:  # rlx_jax does not read it: saving goes on without
                warnings.warn(f"not saved, as rlx_jax does not need it: {cause}", RlxWarning, stacklevel=3)
                continue
            if raw is not None:
                contents[name] = raw
        config = (self.folder.json if dtype is None else self.folder.required_json)(prefix + CONFIG)
        contents |= new_config(prefix + CONFIG, config, dtype)  # weights are saved dequantized
        return contents

    def _read(self, name: str) -> bytes | None:
        """Return the bytes of a file of the checkpoint, None if there is no such file."""
        return self.folder.read(name, limits.bound("MAX_INDEX_BYTES"), ConfigError)


def _op_numbers(built: Built, numbers_by_step: dict[_Step, int]) -> set[int]:
    """Return the set of numbers that identify the ops of a flow.

    Two ops have the same number if they are equal, in the same block, and read the same operands; the order of ops and
    the types of weights do not matter. `numbers_by_step` has the numbers so far, and new ops are added to it.
    """
    operands, numbers = list[object](), set[int]()
    for node in unroll(built.hir, TypeCache()).nodes:
        if isinstance(node.op, Param):
            operands.append(tuple(stored.key for program in node.op.programs for stored in stored_keys(program)))
        elif isinstance(node.op, Leaf):
            operands.append(node.op)
        else:
            reads = tuple((operands[v.node], v.index) for v in node.inputs)
            number = numbers_by_step.setdefault(
                (path_text(node.origin.path), node.op.text(), reads), len(numbers_by_step)
            )
            operands.append(number)
            numbers.add(number)
    return numbers


def config_with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config that declares this dtype, also in its nested configs.

    >>> config_with_dtype({"dtype": "float32", "text_config": {"torch_dtype": "float32"}}, "bfloat16")
    {'dtype': 'bfloat16', 'text_config': {'torch_dtype': 'bfloat16'}}
    """

    def part(value: Any) -> Any:
        """Return a value of the config with the dtype of each nested config replaced."""
        if not isinstance(value, dict):
            return value
        return {k: dtype if k in _DTYPES and isinstance(v, str | None) else part(v) for k, v in value.items()}

    result: dict[str, Any] = part(dict(config))
    return result if any(name in result for name in _DTYPES) else {**result, "torch_dtype": dtype}


def new_config(
    name: str, config: Mapping[str, Any], dtype: np.dtype[Any] | None, unpacked: bool = True
) -> dict[str, bytes]:
    """Return the config, by its name, of weights in a dtype, which are not quantized if `unpacked`; nothing if it
    stays as it is."""
    declarations = ("quantization_config", "quantization") if unpacked else ()
    new = {key: value for key, value in config.items() if key not in declarations}
    new = new if dtype is None else config_with_dtype(new, dtype.name)
    return {} if new == config else {name: json.dumps(new, indent=2).encode() + b"\n"}


def with_unused_weights(
    entries: list[Entry], source: WeightSource, dtype: np.dtype[Any] | None, decodes: bool = False
) -> list[Entry]:
    """Return the entries of a model under the checkpoint's keys, with the checkpoint's other weights copied.

    So the text model of a vision-language checkpoint is saved with the image tower that its `config.json` declares.

    Args:
        entries: the weights of the model.
        source: the weights of the checkpoint.
        dtype: the dtype of all floating weights; None for the checkpoint's dtypes.
        decodes: without `dtype`, decode packed weights.

    Raises:
        UnsupportedError: a copied weight is packed, and stays so.
    """
    stored = source
    if isinstance(source, RenamedSource):
        stored, entries = source.source, [Entry(source.stored(e.key), e.type, e.values) for e in entries]
    names = {entry.key for entry in entries}
    return [*entries, *copied_entries(stored, (key for key in stored.keys() if key not in names), dtype, decodes)]


def copied_entries(
    source: WeightSource, keys: Iterable[str], dtype: np.dtype[Any] | None, decodes: bool = False
) -> list[Entry]:
    """Return the entries of weights that are copied from a source, each read when it is written.

    Without `dtype`, `decodes` decodes packed weights.

    Raises:
        UnsupportedError: a weight is packed, and there is no dtype to decode it to.
    """
    return [_copy_entry(source, key, dtype, decodes) for key in keys]


def _copy_entry(source: WeightSource, key: str, dtype: np.dtype[Any] | None, decodes: bool) -> Entry:
    """Return the entry of a weight that is copied from the source when it is written."""
    spec = source.spec(key)
    if decodes and dtype is None and isinstance(spec, PackedSpec):
        dtype = np.dtype(spec.dtype)
    scheme = spec.scheme if isinstance(spec, PackedSpec) else None
    if scheme is not None and dtype is None:
        raise UnsupportedError(
            f"weight {quote(key)} ({source.where(key)}) is packed as {scheme}, and is not copied packed; pass "
            "a dtype to decode it, such as bf16"
        )
    stored_type = TensorType(tuple(spec.shape), np.dtype(spec.dtype))
    if dtype is None or not is_float(stored_type.dtype):
        return Entry(key, stored_type, partial(source.read, key))

    def values() -> np.ndarray[Any, Any]:
        """Return the weight, decoded and cast."""
        return narrow_values(read_numbers(key, source), dtype, f"weight {quote(key)}")

    return Entry(key, stored_type.with_dtype(dtype), values)
