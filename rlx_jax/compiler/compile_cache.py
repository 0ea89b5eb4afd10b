"""This module is the persistent compile cache: it stores compiled programs on disk, so that later processes load them.

It stores only programs of this package and changes no setting of JAX. If the user has configured JAX's own cache, that
one is used and this one is off. An entry is a pickle (`jax.experimental.serialize_executable`), so it is read only from
a directory that nobody else can write.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import re
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, Sharding
from jax.stages import Lowered

from rlx_jax.compiler.content_digest import content_digest, source_digest
from rlx_jax.dataclasses import dataclass
from rlx_jax.device import devices_of, fingerprint, jax_settings
from rlx_jax.errors import IntegrityError, LimitError, RequestError, RlxCacheWarning, StorageError, first_line, shown
from rlx_jax.io.entries import EntryStore

VARIABLE, SIZE_VARIABLE = "RLX_JAX_CACHE", "RLX_JAX_CACHE_MAX_BYTES"
# The default limit of all entries together. A program takes 0.1 MB for a CPU, and several MB for a GPU.
MAX_BYTES = 2**31
_OFF = ("off", "0", "false", "no")
_ON = ("", "on", "1", "true", "yes")
# Calls back into this process: their targets are addresses or indices that mean nothing in another one.
_NOT_PORTABLE = re.compile(r"custom_call @\w*(?:callback|CustomSPMDPartitioning)|stablehlo\.(?:send|recv)\b")
_FUNCTION = re.compile(r"^  func\.func private @([\w.$-]+)(\(.*?^  }\n)", re.DOTALL | re.MULTILINE)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the compile cache in effect.

    Attributes:
        directory: the directory of the entries; None if the cache is off.
        max_bytes: the limit of all entries together.
        reason: why the cache is off; empty if it is on.
    """

    directory: str | None
    max_bytes: int
    reason: str = ""


# Arguments of `compile_cache`, which take precedence over the environment.
_choice: dict[str, Any] = {}
_warned: set[str] = set()


def compile_cache(directory: str | os.PathLike[str] | None = None, *, max_bytes: int | None = None) -> CacheSettings:
    """Choose where this process caches compiled programs from now on, and return the settings in effect.

    Args:
        directory: an absolute path, "on" for the default directory, or "off"; None changes nothing. It takes precedence
            over the environment variable `RLX_JAX_CACHE`, which has the same values.
        max_bytes: the limit of all entries together; by default the value of `RLX_JAX_CACHE_MAX_BYTES`, else 2 GiB. The
            least recently used entries are removed first.

    Raises:
        RequestError: the directory is no absolute path, or the limit no positive number.
    """
    if directory is not None:
        text = os.fspath(directory)
        _directory(text)
        _choice["directory"] = text
    if max_bytes is not None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise RequestError(f"compile_cache: max_bytes is a number of bytes, at least 1, got {shown(max_bytes)}")
        _choice["max_bytes"] = max_bytes
    return cache_settings()


def cache_settings() -> CacheSettings:
    """Return the settings in effect: from `compile_cache`, else the environment; off if JAX's own cache is on."""
    config: Any = jax.config
    try:
        max_bytes = _choice.get("max_bytes") or _size(os.environ.get(SIZE_VARIABLE, ""))
        directory = _directory(_choice.get("directory", os.environ.get(VARIABLE, "")))
    except RequestError as error:
        _warn(f"compile cache off: {error}")
        return CacheSettings(None, MAX_BYTES, str(error))
    reason = "" if directory else "switched off"
    if config.jax_compilation_cache_dir:
        reason = "JAX's own cache is used: jax_compilation_cache_dir is set"
    elif not config.jax_enable_compilation_cache:
        reason = "jax_enable_compilation_cache is false"
    return CacheSettings(None if reason else directory, max_bytes, reason)


@dataclass(frozen=True)
class TraceRecord:
    """What the cache has of a program that is not traced.

    Attributes:
        key: the key of the program.
        arguments: a pytree of the structure of its arguments.
        results: the types of its results, a pytree.
    """

    key: str
    arguments: Any
    results: Any


def trace_key(content: Any, arguments: Any, options: Any) -> str | None:
    """Return the key of a `TraceRecord`, or None if there is none.

    Args:
        content: all data that the program is traced from, besides its arguments; see `content_digest`.
        arguments, options: as in `compile_lowered`.
    """
    if cache_settings().directory is None or jax.process_count() > 1:
        return None
    digest, source = content_digest(content), source_digest()
    if digest is None or source is None:
        return None
    leaves, tree = jax.tree.flatten(arguments)
    described = [f"{type(leaf).__qualname__} {jax.typeof(leaf)} {getattr(leaf, 'weak_type', '')}" for leaf in leaves]
    sha = hashlib.sha256(b"trace")
    for part in (digest, source, str(tree), *described, *_placements((arguments, options)), *_environment()):
        sha.update(hashlib.sha256(part.encode(errors="surrogatepass")).digest())
    return sha.hexdigest()


def read_record(key: str | None) -> TraceRecord | None:
    """Return the record of a program; None if there is none, it cannot be read, or there is no entry of its program."""
    store = open_store()
    if key is None or store is None:
        return None
    try:
        payload = store.read(key)
        record = None if payload is None else pickle.loads(payload)
    except Exception:  # the program is traced, and the record replaced
        return None
    return record if isinstance(record, TraceRecord) and store.has(record.key) else None


class UntracedError(Exception):
    """A program was not traced, and cannot be loaded. The thread that wants it has to trace it.

    Settings of JAX may apply to one thread only, and another one would trace another program.
    """


def trace_or_load(
    lower: Callable[[], Lowered], key: str | None, compile: Callable[[Lowered], tuple[jax.stages.Compiled, bool]],
    loading: Future[jax.stages.Compiled | None] | None = None,
) -> Callable[[], tuple[jax.stages.Compiled, bool, Any]]:  # fmt: skip
    """Trace a program unless the cache has a record of it; return a function that loads or compiles it.

    That function may run in another thread; if the program of a record cannot be loaded, it raises `UntracedError`
    there. It returns the program, whether it was loaded, and the types of its results.

    Args:
        lower: traces the program; later calls return the same.
        key: the key of the record, as `trace_key` returns it.
        compile: compiles or loads the traced program, as `compile_lowered` does.
        loading: the program of the record, if a thread loads it with `load_recorded` already.
    """
    record, thread = read_record(key), threading.get_ident()
    if record is None:
        lower()

    def compile_traced() -> tuple[jax.stages.Compiled, bool, Any]:
        if record is not None:
            loaded = load_recorded(record) if loading is None else loading.result()
            if loaded is not None:
                return loaded, True, record.results
            if threading.get_ident() != thread:
                raise UntracedError
        lowered = lower()
        return (*compile(lowered), lowered.out_info)

    return compile_traced


def load_recorded(record: TraceRecord) -> jax.stages.Compiled | None:
    """Return the program of a record; None if it cannot be loaded, and has to be traced."""
    store = open_store()
    try:
        payload = None if store is None else store.read(record.key)
        if payload is not None:
            return _deserialize(payload, *map(jax.tree.structure, (record.arguments, record.results)))
    except Exception as error:  # as in `compile_lowered`, which warns of it
        logger.debug("compile cache: a program is traced, as its entry cannot be used: %s", first_line(error))
    return None


def compile_lowered(
    lowered: Lowered, arguments: Any, options: Any = None, record_key: str | None = None
) -> tuple[jax.stages.Compiled, bool]:
    """Compile a program, or load it from the cache.

    Args:
        lowered: the program.
        arguments: the pytree of arguments that it was lowered for, arrays or their types; their devices are part of
            the cache key.
        options: a pytree of shardings, strings and numbers: the options of `jax.jit`, and anything else that the
            compiled program depends on but its StableHLO does not show.
        record_key: the key of a record to write, with which later processes load the program without a trace.

    Returns:
        The compiled program, and whether it was loaded. If the cache fails, it warns and compiles the program.
    """
    store, key, writable = open_store(), None, True
    try:
        key = program_key(lowered, arguments, options) if store is not None else None
    except Exception as error:  # a release of JAX that shows its programs in another form
        _warn(f"compile cache off: a program has no key: {first_line(error)}")
    if store is None or key is None:
        return lowered.compile(), False
    try:
        payload = store.read(key)
        if payload is not None:
            compiled = _deserialize(payload, jax.tree.structure(lowered.args_info), lowered.out_tree)
            _write_record(store, record_key, key, lowered)
            return compiled, True
    except StorageError as error:  # of the directory
        writable = False
        _warn(f"compile cache off: {error}; repair it, or set {VARIABLE} to another directory or to off")
    except Exception as error:  # an unpickled payload may fail in any way; so does a runtime that refuses it
        reason = str(error) if isinstance(error, IntegrityError) else first_line(error)
        _warn(f"compile cache: an entry cannot be used, the program is compiled again and the entry replaced: {reason}")
    compiled = lowered.compile()
    if writable:
        _write(store, key, compiled)
        _write_record(store, record_key, key, lowered)
    return compiled, False


def program_key(lowered: Lowered, arguments: Any, options: Any) -> str | None:
    """Return the SHA-256 of everything that a compiled program depends on, or None if it cannot be cached."""
    if jax.process_count() > 1:
        logger.debug("compile cache: a program of several processes is not cached")
        return None
    text = lowered.as_text()
    if match := _NOT_PORTABLE.search(text):
        logger.debug("compile cache: a program with %s is not cached", match[0])
        return None
    if (names := _read_arguments(lowered)) is None:
        logger.debug("compile cache: arguments without names are not cached")
        return None
    digest = hashlib.sha256()
    for part in (canonical_text(text), names, *_types(lowered), *_placements((arguments, options)), *_environment()):
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode(errors="surrogatepass"))
    return digest.hexdigest()


def canonical_text(text: str) -> str:
    """Return a StableHLO text with private functions named by their content.

    JAX numbers private functions, and merges equal ones, depending on what the process has traced before. Without this
    the same program would have different keys.
    """
    bodies, rest = dict(_FUNCTION.findall(text)), _FUNCTION.sub("", text)
    if " @main(" not in rest:  # a form that the pattern does not know
        return text

    @functools.cache
    def digest(name: str) -> str:
        return hashlib.sha256(named(bodies[name]).encode()).hexdigest()

    def named(part: str) -> str:
        return re.sub(r"@([\w.$-]+)", lambda m: f"@{digest(m[1])}" if m[1] in bodies else m[0], part)

    return named(rest)


def _read_arguments(lowered: Lowered) -> str | None:
    """Return the names of the arguments that the program reads, or "all"; JAX drops the others from the StableHLO.

    Returns None if they cannot be determined: some are dropped, and the remaining ones have no distinct names.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if op.operation.name == "func.func" and op.name.value == "main")
    names = [str(argument.location) for argument in main.arguments]
    if len(names) == len(jax.tree.leaves(lowered.args_info)):
        return "all"
    return None if len({*names, "loc(unknown)"}) <= len(names) else "\n".join(names)


def _types(lowered: Lowered) -> Iterator[str]:
    """List the types of arguments and results: StableHLO has neither weak types nor unread arguments."""
    yield from map(repr, jax.tree.leaves(lowered.args_info))
    yield from (f"{info} {getattr(info, 'weak_type', '')}" for info in jax.tree.leaves(lowered.out_info))


def _placements(tree: Any) -> Iterator[str]:
    """List the sharding and devices of each committed leaf; "" for other arrays, and the text of any other leaf."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None):
        sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
        if sharding is None or not getattr(leaf, "committed", True):
            yield "" if hasattr(leaf, "shape") else repr(leaf)
            continue
        mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
        # The order of devices matters on a mesh; without one they are a set, which is sorted for a stable key.
        devices = sharding.device_set if mesh is None else mesh.devices.flat
        ids = [device.id for device in devices]
        yield f"{sharding!r} on {sorted(ids) if mesh is None else ids}"


def _environment() -> Iterator[str]:
    """List versions, hardware and settings: everything besides the program that XLA's result depends on."""
    yield f"rlx_jax {sys.modules['rlx_jax'].__version__}, jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    yield f"python {sys.version_info[:2]}"
    yield fingerprint()
    yield f"mesh={jax.sharding.get_abstract_mesh()}"  # of `jax.set_mesh`: XLA compiles for all of its devices
    yield from (f"{name}={os.environ.get(name, '')}" for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    yield from jax_settings()  # some change how XLA compiles without a trace in the StableHLO


def open_store() -> EntryStore | None:
    """Return the store of the cache; None if it is off."""
    settings = cache_settings()
    return None if settings.directory is None else EntryStore(settings.directory, settings.max_bytes)


def _write(store: EntryStore, key: str, compiled: jax.stages.Compiled) -> None:
    """Write a program to the cache; a failure is a warning."""
    try:
        payload = _serialize(compiled)
    except Exception as error:  # depends on the backend: each refuses in its own way
        logger.debug("compile cache: a program that cannot be serialized is not cached: %s", error)
        return
    try:
        store.write(key, payload)
    except LimitError as error:
        _warn(f"compile cache: {error}; raise {SIZE_VARIABLE}")
    except OSError as error:
        _warn(f"compile cache: nothing can be written to {store.directory}: {error.strerror or error}")


def _serialize(compiled: jax.stages.Compiled) -> bytes:
    """Return a program as bytes: a JSON line with its devices in order, then the compressed executable."""
    devices: Any = compiled.runtime_executable().local_devices()  # type: ignore[union-attr]
    head = json.dumps({"platform": devices[0].platform, "devices": [device.id for device in devices]})
    return head.encode() + b"\n" + zlib.compress(serialize_executable.serialize(compiled)[0], 1)


def _write_record(store: EntryStore, record_key: str | None, key: str, lowered: Lowered) -> None:
    """Write the record of a program, if it has a key; a failure costs a trace."""
    if record_key is not None:
        results = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info)
        with contextlib.suppress(Exception):
            arguments = jax.tree.map(lambda _: 0, lowered.args_info)
            store.write(record_key, pickle.dumps(TraceRecord(key, arguments, results)))


@functools.cache
def _find_mosaic_library() -> None:
    """Tell XLA where the library of Mosaic's kernels is, without which it compiles kernels of a loaded program again.

    JAX does so when it imports Pallas' backend, which a process that loads its programs does not need.
    """
    for package in ("jaxlib.mosaic.gpu", "jax_cuda12_plugin", "jax_cuda13_plugin"):
        spec = importlib.util.find_spec(package)
        # A folder without `__init__.py`, such as what is left of a removed package, has no origin.
        origin = spec.origin if spec is not None else None
        if origin and (library := Path(origin).parent / "libmosaic_gpu_runtime.so").exists():
            os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))
            return


def _deserialize(payload: bytes, in_tree: Any, out_tree: Any) -> jax.stages.Compiled:
    """Return the program of a payload that `_serialize` created, with the trees of its arguments and results."""
    head, _, content = payload.partition(b"\n")
    target = json.loads(head)
    if target["platform"] != "cpu":
        _find_mosaic_library()
    devices = devices_of(target["platform"], target["devices"])
    compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        zlib.decompress(content), in_tree, out_tree, devices[0].client, devices
    )
    return compiled


def _size(text: str) -> int:
    """Return the limit in bytes that the environment variable `SIZE_VARIABLE` has, or the default.

    Raises:
        RequestError: it is no positive number.
    """
    if not text.strip():
        return MAX_BYTES
    if not text.strip().isdecimal() or not int(text):
        raise RequestError(f"{SIZE_VARIABLE}: expected a number of bytes, at least 1, got {shown(text)}")
    return int(text)


def _directory(text: str) -> str:
    """Return the directory that a setting names; "" if it turns the cache off.

    Raises:
        RequestError: it is no absolute path.
    """
    if text.strip().lower() in _OFF:
        return ""
    path = os.path.expanduser(_default_directory() if text.strip().lower() in _ON else text)
    if not os.path.isabs(path) or "\0" in path:
        raise RequestError(f"{VARIABLE}: expected 'on', 'off' or an absolute path, got {shown(text)}")
    return path


def _default_directory() -> str:
    """Return the default cache directory of the user on this platform."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores a relative path
        places = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "~")}
        base = places.get(sys.platform, "~/.cache")
    return os.path.join(base, "rlx_jax", "programs")


def _warn(text: str) -> None:
    """Warn of a failure, once for each text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RlxCacheWarning, stacklevel=2)


# -- the programs that a process runs first ----------------------------------------------------


# Programs that a process loads ahead: those of the first tokens.
MAX_FIRST_PROGRAMS = 3


class FirstPrograms:
    """The programs that a process runs first with a model, which the next process loads while it reads the weights.

    Args:
        content: all data of the model that its programs are traced from.
        pool: the threads that load.

    Attributes:
        templates: the argument `template` of `take` in the last process, for each program that is loaded ahead.
    """

    def __init__(self, content: Any, pool: Executor) -> None:
        self._key, self._used = trace_key(("first programs", content), (), None), list[tuple[str, Any]]()
        self._listed: list[tuple[str, Any]] = []
        if (store := open_store()) is not None and self._key is not None:
            with contextlib.suppress(Exception):  # damaged; written again when programs run
                self._listed = pickle.loads(store.read(self._key) or pickle.dumps([]))
        records = {key: read_record(key) for key, _ in self._listed}
        self._loading = {key: pool.submit(load_recorded, each) for key, each in records.items() if each is not None}
        self.templates = [template for key, template in self._listed if key in self._loading]

    def take(self, template: Any, key: str) -> Future[jax.stages.Compiled | None] | None:
        """Return the program of a record, if it is loaded ahead, and note for the next process that it runs.

        Args:
            template: what the program is made from; it can be pickled.
            key: the key of the record.
        """
        if len(self._used) == MAX_FIRST_PROGRAMS:
            self._loading.clear()  # those of the last process that this one has not run take memory of the device
            return None
        self._used.append((key, template))
        if self._used != self._listed[: len(self._used)]:
            self._listed = [*self._used]
            if (store := open_store()) is not None and self._key is not None:
                with contextlib.suppress(Exception):
                    store.write(self._key, pickle.dumps(self._listed))
        return self._loading.pop(key, None)
