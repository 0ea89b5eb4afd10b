"""`AotCache`: planned programs on disk, so that a later process neither runs the passes nor plans again.

Executables of XLA are in the compile cache (`rlx_jax.compile_cache`), which depends on the machine; these do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlx_jax.compiler.compile_pipeline import CompilePipeline
from rlx_jax.compiler.execution import stable_hash
from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.compiler.settings import Settings
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import running_device
from rlx_jax.errors import GraphError, RlxCacheWarning, RlxError, first_line
from rlx_jax.io.entries import EntryStore
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.serial import closure_digest, encode_graph
from rlx_jax.ir.types import as_name
from rlx_jax.lowering.inspect.buffers import fingerprint
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.profiles import CompileProfile

__all__ = ["AotCache"]

MAX_BYTES = 1 << 30


def source_digest(graph: Graph, settings: Settings) -> str:
    """Return the SHA-256 of what a planned program depends on besides its sizes.

    That is blocks, profile and release, and what `auto` in the profile stands for: the device, and the dtype that may
    be the weights'.
    """
    device = replace(settings.device, memory=None)
    return _digest([encode_graph(graph, closure_digest), repr((settings.profile, device, settings.compute))])


def _digest(content: Any) -> str:
    """Return the SHA-256 of JSON data and of this release."""
    release = sys.modules["rlx_jax"].__version__
    return hashlib.sha256(json.dumps([content, release], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class AotCache:
    """Planned programs in a directory, by name. An entry that is damaged, or of other blocks, is made again.

    Attributes:
        root: the directory; it is created, accessible to its owner alone.
        max_bytes: the limit of all entries; the least recently used ones are removed first.
    """

    root: str | os.PathLike[str]
    max_bytes: int = MAX_BYTES

    def put_lir(self, key: str, lir: Lir, source: str = "") -> None:
        """Write a planned program, with its fingerprint.

        Args:
            key: the name of the entry.
            lir: the program.
            source: the digest of what it was made from, which `get_lir` compares.

        Raises:
            UnsupportedError: the program calls a Python function (`emit.jax`). LimitError, StorageError: as the store.
        """
        text = GraphModule.from_lir(lir).to_json()
        payload = {"source": source, "fingerprint": fingerprint(lir), "lir": text}
        self._store.write(_entry(key), json.dumps(payload).encode())

    def get_lir(self, key: str, source: str = "") -> Lir | None:
        """Return a planned program; None if there is none, it is damaged, or it was made from another source.

        Raises:
            StorageError: the directory cannot be used.
        """
        try:
            payload = self._store.read(_entry(key))
            if payload is None:
                return None
            data = json.loads(payload)
            if data["source"] != source:
                return None
            lir = GraphModule.from_json(data["lir"]).as_lir()
            if lir is None or fingerprint(lir) != data["fingerprint"]:
                raise GraphError("its fingerprint differs")
        except OSError:
            raise
        except (RlxError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{self.root}: {key}: not used, and made again: {first_line(error)}", RlxCacheWarning, 2)
            return None
        return lir

    def contains(self, key: str) -> bool:
        """Return whether there is an entry of that name, whatever its source."""
        return Path(self.root, f"{_entry(key)}.entry").is_file()

    def specialize_cached(self, base: str, binding: Mapping[str, int], source: str, make: Callable[[], Lir]) -> Lir:
        """Return the entry `{base}__{hash of the sizes}`, made and written if there is none of this source."""
        return self._get_or_make(f"{base}__{stable_hash(sorted(binding.items())):016x}", source, make)

    def _get_or_make(self, key: str, source: str, make: Callable[[], Lir]) -> Lir:
        lir = self.get_lir(key, source)
        if lir is None:
            lir = make()
            self.put_lir(key, lir, source)
        return lir

    def compile_module_cached(self, key: str, module: GraphModule, pipeline: CompilePipeline) -> Lir:
        """Return the planned program of a module with static sizes, made and written if there is none of this module.

        Raises:
            GraphError: the module has symbolic sizes: use `specialize_cached`. Others as the pipeline.
        """
        if module.has_dynamic_dims:
            symbols = ", ".join(module.dynamic_symbols)
            raise GraphError(f"module {module.name!r} has no size of {symbols}: bind it, or use specialize_cached")
        profile = None if pipeline.profile is None else CompileProfile.of(pipeline.profile)
        ops = None if pipeline.supported_ops is None else sorted(pipeline.supported_ops)
        device = replace(running_device(), memory=None) if pipeline.target == "auto" else None
        described = replace(pipeline, profile=profile, supported_ops=ops), device, module.build().profile
        source = _digest([module.to_json(), repr(described)])
        return self._get_or_make(key, source, lambda: pipeline.compile_module(module).lir)

    compile_hir_cached = compile_graph_cached = compile_module_cached

    @property
    def _store(self) -> EntryStore:
        return EntryStore(os.path.abspath(self.root), self.max_bytes)


def _entry(key: str) -> str:
    """Return the file name of an entry: names may have characters that files cannot."""
    return hashlib.sha256(as_name(key, "AotCache: key").encode()).hexdigest()
