"""Settings of every test: an environment of its own, CPU, no silent promotion of dtypes or ranks, examples that repeat
in CI."""

import contextlib
import gc
import os
import zipfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.environment  # noqa: F401 -- before jax and huggingface_hub, which read the environment when imported

# isort: split
import huggingface_hub
import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.hub_server import LLAMA, Hub, serving
from tests.shared_programs import remove_unused, share_programs

jax.config.update("jax_num_cpu_devices", 8)  # what runs on one device runs on the first of them

collect_ignore = ["oracles/quantized.py"]  # writes fixtures with torch, which this suite does without

# An op that leans on implicit promotion works here and fails in a user's strict program.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first example compiles and later ones do not, so a deadline would measure XLA.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# JAX keeps millions of small objects of what it compiled; the collector would go over them again and again.
gc.set_threshold(100_000, 20, 100)


class ModulesWithExamples:
    """Doctests are looked for where there are some, so that each process begins sooner, and in packages: pytest would
    import a module once more whose package imports it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[Any], list[Any]]:
        found = yield
        return [c for c in found if type(c).__name__ != "DoctestModule" or has_examples(file_path)]


def has_examples(path: Path) -> bool:
    """Return whether a module is a package, or its text has examples."""
    return path.name == "__init__.py" or ">>>" in path.read_text("utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Tests compile without LLVM's optimiser, by XLA's older emitters, and each program as one LLVM module in place of
    many, which takes a quarter of the time; what XLA does to a program is the same. A few comparisons with transformers
    run what users run: `test_families.py::test_live_with_all_optimisations`.

    What is compiled once is loaded afterwards, but with `-p no:cacheprovider`."""
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    else:
        flags.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))  # read at the first computation
    config.pluginmanager.register(ModulesWithExamples())
    with contextlib.suppress(AttributeError, OSError):  # without pytest's cache, or where it cannot be written
        share_programs(directory := config.cache.mkdir("programs"))
        if not hasattr(config, "workerinput"):  # a process of xdist's has one
            remove_unused(directory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other libraries warn as they like; a comparison that must not is marked `oracle(warnings="error")`."""
    for item in items:
        mark = item.get_closest_marker("oracle")
        if mark is not None and not mark.kwargs:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_collection_finish() -> None:
    """What modules and collected tests hold stays to the end: collections of garbage leave it out."""
    gc.freeze()


@pytest.fixture(scope="module")
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded checkpoints in the `ARCHIVES` of a module, one directory for each."""
    root = tmp_path_factory.mktemp("recorded")
    for path in request.module.ARCHIVES:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(root)
    return root


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models of the Hub go: a cache of the test's own, without a token, and without waits between tries."""
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for module in ("file_download", "utils._http"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def server(hub_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback with the model `org/m`, a tiny Llama."""
    with serving(Hub()) as started:
        started.add("org/m", LLAMA)
        monkeypatch.setenv("HF_ENDPOINT", started.endpoint)
        yield started
        huggingface_hub.close_session()


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a JAX that has Mosaic GPU, with which custom kernels run."""
    monkeypatch.setattr("rlx_jax.lowering.lir.implementations.has_mosaic", lambda: True)
