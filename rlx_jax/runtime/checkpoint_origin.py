"""The checkpoint that a model was loaded from: what else belongs into a directory that holds its weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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
from rlx_jax.weights.finite import narrowed
from rlx_jax.weights.format import Entry
from rlx_jax.weights.views import RenamedSource

CONFIG = "config.json"
# Files beside the weights that other libraries read, whether or not rlx_jax has.
BESIDE = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip
# The path of a block, an op, and what it reads: ops by their numbers, weights by their keys.
_Step = tuple[str, str, tuple[tuple[object, int], ...]]
_DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class LoadedFrom:
    """Where a model's weights, config and tokenizer are from.

    Attributes:
        folder: the checkpoint's directory.
        inside: the directory in it of the weights and their `config.json`; "" for itself.
        edited: why `config.json` is not that of the model; "" where it is.
        built: the flow that was opened.
    """

    folder: Folder
    inside: str
    edited: str
    built: Built

    def _check_model(self, built: Built) -> None:
        """The flow that was opened is of the config, and `built` computes what that does.

        Raises:
            UnsupportedError: it is not; names the first block that differs.
        """
        if self.edited:
            raise UnsupportedError(
                f"{self.edited}, and its config.json would describe another: save the weights alone, "
                "rlx_jax.save(model.model, path)"
            )
        if built is self.built:
            return
        seen: dict[_Step, int] = {}
        ours, theirs = (_steps(one, seen) for one in (built, self.built))
        for number, (path, _, _) in enumerate(seen):
            if (number in ours) != (number in theirs):
                raise UnsupportedError(
                    f"save: the model differs from what {self.folder.where(CONFIG)} describes, first in {quote(path)}, "
                    "as one does that was changed by its paths or has adapters (rlx_jax.merge_lora, rlx_jax.save_lora):"
                    " save the weights alone, rlx_jax.save(model.model, path)"
                )

    def files(self, built: Built, dtype: np.dtype[Any] | None) -> dict[str, bytes]:
        """What stands beside the weights, by path: as it is, but for the dtype that a config says, and for how weights
        were packed.

        Args:
            built: the flow of the model that is saved.
            dtype: what all floating weights are saved in; None: as they are.

        Raises:
            UnsupportedError: the config is not that of the model.
            ConfigError: a file that loading has read is not there any more.

        Warns:
            RlxWarning: a file of `BESIDE` cannot be read, and nothing of rlx_jax reads it.
        """
        self._check_model(built)
        prefix = f"{self.inside}/" if self.inside else ""
        found = {}
        for name in [path.relative_to(self.folder.path).as_posix() for path in self.folder.found()]:
            raw = self._read(name)
            if raw is None:
                raise ConfigError(
                    f"{self.folder.where(name)}: it was there when the model was loaded, and is not now; put it back, "
                    "or save the weights alone, rlx_jax.save(model.model, path)"
                )
            found[name] = raw
        for name in (prefix + name for name in BESIDE if prefix + name not in found):
            try:
                raw = self._read(name)
            except (HubError, FormatError, StorageError) as cause:  # nothing here reads it: no reason to lose a save
                warnings.warn(f"not saved, as rlx_jax does not need it: {cause}", RlxWarning, stacklevel=3)
                continue
            if raw is not None:
                found[name] = raw
        config = (self.folder.json if dtype is None else self.folder.needed)(prefix + CONFIG)
        unpacked = config.get("quantization_config") is not None  # what is saved is the numbers it stood for
        if dtype is not None or unpacked:
            config = {key: value for key, value in config.items() if key != "quantization_config"}
            config = config if dtype is None else in_dtype(config, dtype.name)
            found[prefix + CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
        return found

    def _read(self, name: str) -> bytes | None:
        return self.folder.read(name, limits.MAX_INDEX_BYTES, "limits.MAX_INDEX_BYTES", ConfigError)


def _steps(built: Built, seen: dict[_Step, int]) -> set[int]:
    """What a flow computes: the numbers of its ops among those that were `seen`, which are noted. One of the same block
    that reads the same is one op, in whatever order they stand. Types of weights are no part of it."""
    known, found = list[object](), set[int]()
    for node in unroll(built.hir, TypeCache()).nodes:
        if isinstance(node.op, Param):
            known.append(tuple(stored.key for program in node.op.programs for stored in stored_keys(program)))
        elif isinstance(node.op, Leaf):
            known.append(node.op)
        else:
            reads = tuple((known[v.node], v.index) for v in node.inputs)
            number = seen.setdefault((path_text(node.origin.path), node.op.text(), reads), len(seen))
            known.append(number)
            found.add(number)
    return found


def in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config whose weights are of this dtype, those of the parts too.

    >>> in_dtype({"dtype": "float32", "text_config": {"torch_dtype": "float32"}}, "bfloat16")
    {'dtype': 'bfloat16', 'text_config': {'torch_dtype': 'bfloat16'}}
    """

    def part(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: dtype if k in _DTYPES and isinstance(v, str | None) else part(v) for k, v in value.items()}

    made: dict[str, Any] = part(dict(config))
    return made if any(name in made for name in _DTYPES) else {**made, "torch_dtype": dtype}


def whole_checkpoint(held: list[Entry], source: WeightSource, dtype: np.dtype[Any] | None) -> list[Entry]:
    """What a model holds, under the checkpoint's names, and what of the checkpoint it does not hold, copied.

    So a text model that was built alone is saved with the tower of images that its `config.json` promises.

    Raises:
        UnsupportedError: a weight that is copied is packed.
    """
    stored = source
    if isinstance(source, RenamedSource):
        stored, held = source.source, [Entry(source.stored(e.key), e.type, e.values) for e in held]
    names = {entry.key for entry in held}
    return [*held, *(_copied(stored, key, dtype) for key in stored.keys() if key not in names)]


def _copied(source: WeightSource, key: str, dtype: np.dtype[Any] | None) -> Entry:
    spec = source.spec(key)
    if isinstance(spec, PackedSpec):
        raise UnsupportedError(f"weight {quote(key)} ({source.where(key)}) is packed, and no format writes packed ones")
    found = TensorType(tuple(spec.shape), np.dtype(spec.dtype))
    if dtype is None or not is_float(found.dtype):
        return Entry(key, found, partial(source.read, key))
    return Entry(key, found.with_dtype(dtype), lambda: narrowed(source.read(key), dtype, f"weight {quote(key)}"))
