"""The persistent compile cache: a second process compiles nothing, and no fault of the cache changes a result."""

import functools
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax.compiler import compile_cache
from rlx_jax.compiler import content_digest as content_digests
from rlx_jax.compiler.content_digest import content_digest
from rlx_jax.device import running_device
from rlx_jax.errors import IntegrityError, LimitError, RequestError, RlxCacheWarning, StorageError
from rlx_jax.io.entries import EntryStore
from rlx_jax.ir.ops.attention import AttentionOp
from tests.hub_server import LLAMA
from tests.opening import load
from tests.small import compiles_of

ROOT = Path(__file__).parents[1]
KEY = "0" * 64
PROMPTS = [[3, 1, 4, 1], [5, 9]]


@pytest.fixture(scope="module", autouse=True)
def programs_in_memory() -> None:
    """What tests of other modules left in JAX's memory is gone: what the suite loaded cannot be stored again whole."""
    jax.clear_caches()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, switched on."""
    monkeypatch.setattr(compile_cache, "_choice", {})
    monkeypatch.setattr(compile_cache, "_warned", set())
    monkeypatch.setenv("RLX_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(directory: Path) -> list[Path]:
    """Files of a cache in order of their names."""
    return sorted(directory.glob("*")) if directory.exists() else []


def flip(path: Path, place: float) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path, float], object]:
    """Put something else in the place of a file, which is moved."""
    return lambda path, place: (path.rename(path.with_name("elsewhere")), make(path))


DAMAGES: dict[str, Callable[[Path, float], object]] = {
    "flipped": flip, "truncated": lambda path, place: os.truncate(path, int(place * (path.stat().st_size - 1))),
    "empty": lambda path, place: os.truncate(path, 0),
    "longer": lambda path, place: path.write_bytes(path.read_bytes() + b"x"),
    "foreign": lambda path, place: path.write_bytes(b"{}"), "writable by all": lambda path, place: path.chmod(0o666),
    "a directory": replace_by(lambda path: (path / "inner").mkdir(parents=True)),
    "a link": replace_by(lambda path: path.symlink_to("elsewhere")), "a FIFO": replace_by(os.mkfifo),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_refused_and_replaced(tmp_path: Path, damage: str) -> None:
    store, payload = EntryStore(str(tmp_path / "made" / "here"), 10_000), bytes(range(256)) * 4
    assert store.read(KEY) is None
    store.write(KEY, payload)
    (path,) = entries(tmp_path / "made" / "here")
    DAMAGES[damage](path, 1.0)
    with pytest.raises((IntegrityError, OSError)):
        store.read(KEY)
    store.write(KEY, payload)
    assert store.read(KEY) == payload and path.stat().st_mode & 0o777 == 0o600


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    """A read is a use; strangers' files stay; what killed processes left is removed after an hour."""
    store = EntryStore(str(tmp_path), 3500)
    stranger, old, new = (
        tmp_path / name for name in ("mine.txt", f".{KEY}.entry.1-{'a' * 8}", f".{KEY}.entry.2-{'b' * 8}")
    )
    for path in (stranger, old, new):
        path.write_bytes(bytes(5000))
    os.utime(old, (0, 0))
    for i in range(3):
        store.write(f"{i:064x}", bytes(1000))
        os.utime(tmp_path / f"{i:064x}.entry", (i, i))
    assert store.read(f"{0:064x}") == bytes(1000)
    store.write(f"{3:064x}", bytes(1000))
    assert [store.read(f"{i:064x}") is None for i in range(4)] == [False, True, False, False]
    assert (stranger.exists(), old.exists(), new.exists()) == (True, False, True)
    with pytest.raises(LimitError, match="3501 bytes to cache, the limit is 3500"):
        store.write(KEY, bytes(3501))


@pytest.mark.parametrize("fault", ["writable by the group", "of another user"])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: Any, fault: str) -> None:
    """An entry is a pickle: whoever can write one runs code here."""
    store = EntryStore(str(tmp_path / "cache"), 1000)
    store.write(KEY, b"x")
    if fault == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        (tmp_path / "cache").chmod(0o770)
    for call in (lambda: store.read(KEY), lambda: store.write(KEY, b"y")):
        with pytest.raises(StorageError, match="others can write it|belongs to user"):
            call()


def program(scale: float = 3.0, donate: bool = False, **options: Any) -> tuple[Any, bool]:
    """Result of a small program, and whether the program was loaded."""
    jitted = jax.jit(
        lambda x, y: (x * jnp.float32(scale) + 1, y.sum()), donate_argnums=(0,) if donate else (), **options
    )
    arguments = (jnp.arange(4.0), jnp.ones(3))
    call, loaded = compile_cache.compile_lowered(jitted.lower(*arguments), arguments, options)
    result, total = call(*arguments)
    np.testing.assert_array_equal(result, np.arange(4) * scale + 1)
    assert total == 3 and arguments[0].is_deleted() == donate
    return result, loaded


@pytest.mark.parametrize("damage", ["flipped", "a FIFO"])
def test_a_damaged_program_is_compiled_again_and_replaced(cache: Path, damage: str) -> None:
    """One warning, the right result; the next run finds a sound entry."""
    assert [program()[1], program()[1]] == [False, True]
    DAMAGES[damage](entries(cache)[0], 0.5)
    with pytest.warns(RlxCacheWarning) as warned:
        assert not program()[1]
    assert len(warned) == 1 and program()[1]


@pytest.mark.parametrize("fault", ["others can write it", "a file", "full"])
def test_a_cache_that_cannot_be_used_is_a_warning(cache: Path, monkeypatch: Any, fault: str) -> None:
    """One for all programs."""
    if fault == "a file":
        cache.write_text("")
    elif fault == "full":
        monkeypatch.setattr("rlx_jax.io.entries.write_synced", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    else:
        cache.mkdir()
        cache.chmod(0o777)
    with pytest.warns(RlxCacheWarning, match="compile cache") as warned:
        assert [program(scale)[1] for scale in (2.0, 3.0, 2.0)] == [False, False, False]
    assert len(warned) == 1


def test_the_key_has_all_that_the_result_depends_on(cache: Path, monkeypatch: Any) -> None:
    """StableHLO does not show which arguments were dropped, weak types, devices, or how XLA compiles."""

    def run(function: Any, *arguments: Any, **options: Any) -> tuple[Any, bool]:
        compiled, loaded = compile_cache.compile_lowered(jax.jit(function).lower(*arguments), arguments, options)
        return compiled(*arguments), loaded

    one, two = jnp.arange(3.0), jnp.arange(3.0) + 5
    first, second = (run(f, one, two) for f in (lambda a, b: a * 2, lambda a, b: b * 2))
    assert not first[1] and not second[1] and first[0][1] == 2 and second[0][1] == 12
    weak, strong = run(lambda x: x * 2, 1.0), run(lambda x: x * 2, jnp.float32(1))
    assert not strong[1] and (weak[0].weak_type, strong[0].weak_type) == (True, False)
    there = jax.device_put(one, jax.devices()[2])
    for expected in (False, True):
        result, loaded = run(lambda a: a * 2, there)
        assert result.devices() == {jax.devices()[2]} and result[2] == 4 and loaded == expected
    assert not run(lambda a: a * 2, one)[1]
    assert not program(donate=True)[1] and not program()[1] and program()[1] and program(donate=True)[1]
    assert not program(compiler_options={"xla_cpu_enable_fast_min_max": True})[1]
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
        assert not program()[1]
    with jax.default_matmul_precision("highest"):
        assert not program()[1]
    key = compile_cache.trace_key("content", (one,), None)
    with jax.set_mesh(jax.make_mesh((2,), ("devices",))):
        assert key and key != compile_cache.trace_key("content", (one,), None)
    assert program()[1]


def test_functions_are_known_by_their_content() -> None:
    """JAX 0.11 gives one program other names, and equal functions once or twice, by what was traced before."""
    function = "  func.func private @{}(%a: f32) -> f32 {{\n    return {}\n  }}\n"
    main = "module {{\n  func.func public @main(%a: f32) {{\n    call @{} call @{}\n  }}\n{}}}\n"
    inner, outer = function.format("inner", "%a"), function.format("f", "call @inner")
    one = main.format("f", "f", outer + inner)
    two = main.format("f", "f_2", inner + outer + function.format("f_2", "call @inner_3") + inner.replace("r(", "r_3("))
    other = main.format("f", "f", outer + function.format("inner", "%b"))
    texts = [compile_cache.canonical_text(text) for text in (one, two, other, main.format("f", "inner", outer + inner))]
    assert texts[0] == texts[1] and len(set(texts)) == 3 and "private" not in texts[0]


def test_on_a_mesh(cache: Path) -> None:
    """Devices in their order: a program of devices 1, 0 is none of 0, 1."""

    def run(*devices: int) -> bool:
        mesh = Mesh(np.array(jax.devices())[list(devices)], ("x",))
        x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec("x")))
        call, loaded = compile_cache.compile_lowered(jax.jit(lambda a: a - a.sum()).lower(x), (x,))
        result = call(x)
        np.testing.assert_array_equal(result, np.arange(8.0) - 28)
        assert [s.device.id for s in sorted(result.addressable_shards, key=lambda s: s.index[0].start)] == list(devices)
        return loaded

    assert [run(0, 1), run(1, 0), run(3, 2), run(0, 1), run(1, 0), run(3, 2)] == [False] * 3 + [True] * 3


def test_what_calls_back_into_the_process_is_not_cached(cache: Path) -> None:
    def doubled(x: Any) -> Any:
        return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((), np.float32), x)

    lowered = jax.jit(doubled).lower(1.0)
    assert compile_cache.compile_lowered(lowered, (1.0,))[0](1.0) == 2 and entries(cache) == []


@pytest.mark.parametrize("text", ["cache", "of", "/\0"])
def test_a_setting_that_is_no_directory_is_named(cache: Path, monkeypatch: Any, text: str) -> None:
    """In the environment it is a warning and no cache, in a call an error."""
    if "\0" not in text:  # which the environment cannot hold
        monkeypatch.setenv("RLX_JAX_CACHE", text)
        with pytest.warns(RlxCacheWarning, match="RLX_JAX_CACHE.*'on'.*'off'"):
            assert not program()[1]
    with pytest.raises(RequestError, match="'on'.*'off'"):
        rlx.compile_cache(text)


def test_the_limit_is_a_number(cache: Path, monkeypatch: Any) -> None:
    wrong: Any
    for wrong in (0, -1, True, 1.5, "1"):
        with pytest.raises(RequestError, match="max_bytes"):
            rlx.compile_cache(max_bytes=wrong)
    monkeypatch.setenv("RLX_JAX_CACHE_MAX_BYTES", "5000")
    assert rlx.compile_cache().max_bytes == 5000 and rlx.compile_cache(max_bytes=7000).max_bytes == 7000
    monkeypatch.setattr(compile_cache, "_choice", {})
    monkeypatch.setenv("RLX_JAX_CACHE_MAX_BYTES", "2 GB")
    with pytest.warns(RlxCacheWarning, match="RLX_JAX_CACHE_MAX_BYTES"):
        assert not program()[1]


@pytest.mark.parametrize("switch", ["environment", "call", "jax_compilation_cache_dir", "jax_enable_compilation_cache"])
def test_switched_off(cache: Path, tmp_path: Path, monkeypatch: Any, switch: str) -> None:
    """Where the user has set up or switched off JAX's own cache, this one stays out."""
    if switch == "environment":
        monkeypatch.setenv("RLX_JAX_CACHE", "OFF")
    elif switch == "call":
        rlx.compile_cache("off")
    else:
        for name in ("_cache", "_cache_initialized", "_cache_checked", "_cache_used"):
            # JAX's cache would stay in use, and later tests would store programs that it loaded, which are not whole.
            monkeypatch.setattr(compilation_cache, name, getattr(compilation_cache, name))
        value = str(tmp_path / "jax") if switch.endswith("dir") else False
        before = getattr(jax.config, switch)
        jax.config.update(switch, value)
    try:
        assert rlx.compile_cache().directory is None and rlx.compile_cache().reason
        assert [program()[1], program()[1]] == [False, False] and entries(cache) == []
    finally:
        if switch.startswith("jax"):
            jax.config.update(switch, before)


def test_the_default_directory(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RLX_JAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    for base, directory in (("/x", "/x"), ("", f"{tmp_path}/.cache"), ("relative", f"{tmp_path}/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert rlx.compile_cache() == compile_cache.CacheSettings(f"{directory}/rlx_jax/programs", 2**31)


def test_a_second_model_compiles_nothing(cache: Path) -> None:
    """Tokens, donation, HLO and report are those of the first; the user's own programs are not in the cache."""
    settings = dict(jax.config.values)
    reports, texts, answers = [], [], []
    for _ in range(2):
        lm = load(LLAMA)
        answer, compiled = compiles_of(functools.partial(lm.generate, PROMPTS, max_new_tokens=8))
        reports.append(lm.report())
        answers.append(answer)
        texts.append(re.findall(r"%\S+ = .*?\)|op_name=\S+", lm.model.text("hlo", np.ones((1, 4), np.int32))))
    cold, warm = reports
    assert answers[0] == answers[1] and texts[0] == texts[1] and compiled == []
    assert (cold.loaded, warm.compiles, warm.loaded) == (0, 0, cold.compiles) and cold.compiles >= 2
    assert warm.request.compiled == 0 < cold.request.compiled and "from the compile cache" in str(warm)
    assert {p.donated_bytes for p in cold.programs} == {p.donated_bytes for p in warm.programs} != {0}
    count = len(entries(cache))
    jax.jit(lambda x: x * 7 - 3)(np.float32(2))
    assert len(entries(cache)) == count and settings == dict(jax.config.values)


def test_a_second_model_is_not_traced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its helper functions. Another source, profile or setting traces it; so does a record without its entry."""
    traces: list[str] = []
    monkeypatch.setattr(compile_cache, "_choice", {})
    lower = jax.stages.Traced.lower

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        traces.append(self.fun_name)
        return lower(self, *arguments, **options)

    def logits(profile: rlx.CompileProfile | None = None) -> tuple[Any, int]:
        traces.clear()
        return np.asarray(load(LLAMA, profile=profile).logits(PROMPTS[1:])).tolist(), len(traces)

    def answer() -> tuple[Any, int]:
        traces.clear()
        lm = load(LLAMA)
        return [lm.generate(PROMPTS, max_new_tokens=6, temperature=t, seed=3) for t in (0.0, 0.9)], len(traces)

    monkeypatch.setattr(jax.stages.Traced, "lower", counted)
    want, count = answer()
    assert count and answer() == (want, 0)
    lm = load(LLAMA)
    lm.generate(PROMPTS, max_new_tokens=6)
    assert "stablehlo" in lm.model.lower(np.ones((1, 4), np.int32)).as_text()
    whole, once = logits()
    assert once and logits() == (whole, 0)
    assert logits(rlx.CompileProfile().replace(layers={"roll": "scan"}))[1] > 0
    key = compile_cache.trace_key("", (), None)
    with jax.default_matmul_precision("highest"):
        assert None is not key != compile_cache.trace_key("", (), None)
    with monkeypatch.context() as changed:
        changed.setattr(compile_cache, "source_digest", lambda: "edited")
        assert logits() == (whole, once)
    for path in entries(cache):
        if path.stat().st_size > 4096:  # a program
            path.unlink()
    assert logits() == (whole, once) and logits() == (whole, 0)


def test_the_programs_of_the_first_tokens_are_loaded_with_the_weights(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the process before ran, on an accelerator; programs that cannot be loaded cost what they save."""
    threads: list[int] = []
    deserialize, here = compile_cache._deserialize, replace(running_device(), kind="cuda")
    monkeypatch.setattr("rlx_jax.runtime.compile_flow.running_device", lambda: here)

    def counted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return deserialize(*arguments)

    def run() -> tuple[Any, int]:
        """The answer, and how many programs were loaded ahead; helper functions are loaded when they run."""
        threads.clear()
        lm = load(LLAMA)
        ahead = [thread for thread in threads if thread != threading.get_ident()]
        answer = lm.generate([PROMPTS[0] * 8], max_new_tokens=4)
        assert (report := lm.report()).compiles + report.loaded == 2
        return answer, len(ahead)

    monkeypatch.setattr(compile_cache, "_deserialize", counted)
    want, ahead = run()
    assert ahead == 0 and run() == (want, 2)
    for path in entries(cache):
        if path.stat().st_size > 4096:
            flip(path, 0.5)
    with pytest.warns(RlxCacheWarning, match="the entry replaced"):
        assert run()[0] == want


def test_what_has_a_digest() -> None:
    """Plain data, by value and type; nothing of a user, whose code may change."""
    op = AttentionOp(4, 2)
    values: list[Any] = [
        0, False, 0.0, -0.0, "0", b"0", None, (), [], {}, (0,), ((0,),), ((), ()), {"a": 1, "b": 2}, {"b": 2, "a": 1},
        np.zeros(2, "f4"), np.zeros(2, "i4"), np.zeros((2, 1), "f4"), np.dtype("f4"), np.dtype(jnp.bfloat16), op,
        replace(op, window=3), replace(op, extra=("keep",)), AttentionOp, rlx.CompileProfile(),
    ]  # fmt: skip
    digests = [content_digest(value) for value in values]
    assert None not in digests and len({*digests}) == len(values)
    assert content_digest({"ab", "c", "d"}) == content_digest({"d", "c", "ab"}) != content_digest({"a", "bc", "d"})
    mine = type("Mine", (compile_cache.TraceRecord,), {})("", None, None)
    texts = [type("Mine", (base,), {})() for base in (str, tuple, int, dict)]
    values = [len, Path, lambda x: x, object(), mine, *texts, np.array([None]), jnp.ones(2), functools.partial(max, 1)]
    for value in values:
        assert content_digest([value]) is None


def test_the_digest_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has packages as links; what has changed since the import is not what runs."""
    source_digest, rule = content_digests.source_digest.__wrapped__, tmp_path / "lowering" / "rule.py"
    for directory in ("package/compiler", "lowering"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "package" / "lowering").symlink_to("../lowering")
    monkeypatch.setattr(content_digests, "__file__", str(tmp_path / "package" / "compiler" / "digest.py"))
    monkeypatch.setattr(content_digests, "IMPORT_TIME", time.time() + 3600)
    assert source_digest() is None
    rule.write_text("1")
    first = source_digest()
    rule.write_text("2")
    assert None is not first != source_digest() is not None
    (tmp_path / "lowering" / ".#rule.py").symlink_to("user@host")  # an editor's lock
    assert source_digest() is None
    (tmp_path / "lowering" / ".#rule.py").unlink()
    monkeypatch.setattr(content_digests, "IMPORT_TIME", rule.stat().st_mtime - 1)
    assert source_digest() is None


@pytest.mark.slow
def test_what_cannot_be_loaded_is_traced_with_the_settings_of_its_caller(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may apply to its thread only; programs of slots are loaded in others."""
    threads: list[int] = []
    lower = jax.stages.Traced.lower

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return lower(self, *arguments, **options)

    monkeypatch.setattr(jax.stages.Traced, "lower", counted)
    want = load(LLAMA).generate(PROMPTS, max_new_tokens=6, slots=2)
    count = len(threads)
    for path in entries(cache):
        if path.stat().st_size > 4096:  # a program
            flip(path, 0.5)
    with pytest.warns(RlxCacheWarning, match="the entry replaced"):
        assert load(LLAMA).generate(PROMPTS, max_new_tokens=6, slots=2) == want
    assert len(threads) > count and {*threads} == {threading.get_ident()}


CHILD = """
import json, sys, warnings
import rlx_jax as rlx
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lm = rlx.load(sys.argv[1])
    answers = lm.generate([[3, 1, 4, 1], [5, 9]], max_new_tokens=8)
report = lm.report()
names = [str(w.message) for w in caught if w.category is rlx.errors.RlxCacheWarning]
print(json.dumps({"answers": answers, "compiles": report.compiles, "loaded": report.loaded, "warnings": names}))
"""


def children(cache: Path, count: int) -> list[dict[str, Any]]:
    """What so many processes report that start at once."""
    env = os.environ | {"RLX_JAX_CACHE": str(cache)}
    command = [sys.executable, "-c", CHILD, str(LLAMA)]
    started = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    outputs = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count
    return [json.loads(output) for output in outputs]


@pytest.mark.slow
def test_processes_at_once_on_an_empty_directory(tmp_path: Path) -> None:
    """Two compile and write at once, and after them one compiles nothing."""
    want = load(LLAMA).generate(PROMPTS, max_new_tokens=8)
    cold = children(tmp_path / "cache", 2)
    assert all(child["answers"] == want and child["warnings"] == [] for child in cold)
    (warm,) = children(tmp_path / "cache", 1)
    assert (warm["answers"], warm["compiles"], warm["warnings"]) == (want, 0, []) and warm["loaded"] >= 2


def test_the_library_of_mosaic_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA is told where it is, as Pallas may not be imported; a path that is set remains. A folder is no package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "libmosaic_gpu_runtime.so").touch()
    plugin = importlib.machinery.ModuleSpec("jax_cuda13_plugin", None, origin=str(tmp_path / "__init__.py"))
    folder = importlib.machinery.ModuleSpec("jax_cuda12_plugin", None)
    monkeypatch.setattr(importlib.util, "find_spec", {s.name: s for s in (folder, plugin)}.get)
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "")
    for before, after in (("", str(tmp_path / "libmosaic_gpu_runtime.so")), ("elsewhere", "elsewhere")):
        os.environ.pop("MOSAIC_GPU_RUNTIME_LIB_PATH")
        if before:
            os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = before
        compile_cache._find_mosaic_library.__wrapped__()
        assert os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] == after
