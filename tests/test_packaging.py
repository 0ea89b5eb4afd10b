"""The layout: links and wheel agree, and importing rlx_jax is light and touches no device."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import rlx_jax
from tests.hub_server import LLAMA
from tests.test_layers import imports
from tests.wheels import build_wheel

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEEL = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
HEAVY = {"flax", "lm_eval", "optax", "orbax", "safetensors", "tensorstore", "tokenizers", "torch", "transformers"}


OPTIONAL = {"lm_eval", "typing_extensions"}
"""Imported where somebody uses them, and installed by an extra; the second by type checkers alone."""


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


def test_links_and_wheel_agree() -> None:
    """The links of a checkout are what the wheel includes, and builds leave them out."""
    for directory, package in WHEEL["force-include"].items():
        assert (ROOT / package).resolve() == (ROOT / directory).resolve()
    links = {f"rlx_jax/{p.name}" for p in (ROOT / "rlx_jax").iterdir() if p.is_symlink()}
    assert links == set(WHEEL["force-include"].values()) == set(PYPROJECT["tool"]["hatch"]["build"]["exclude"])


@pytest.mark.slow
def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    """Modules and presets of the checkout under the names that are imported, and nothing else but the metadata."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages = {directory: f"{package}/" for directory, package in WHEEL["force-include"].items()}
    tracked = {packages[d] + rest for d, _, rest in (name.partition("/") for name in listed) if d in packages}
    tracked |= {name for name in listed if name.startswith("rlx_jax/") and not (ROOT / name).is_symlink()}
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == tracked


def test_every_directory_with_code_is_a_package() -> None:
    """A directory without `__init__.py` imports in a checkout and surprises tools."""
    found = [p.parent for d in ("rlx_jax", *WHEEL["force-include"]) for p in (ROOT / d).rglob("*.py")]
    assert sorted({str(d.relative_to(ROOT)) for d in found if not (d / "__init__.py").exists()}) == []


def test_core_dependencies_have_a_lower_bound_and_no_upper_one() -> None:
    for requirement in PYPROJECT["project"]["dependencies"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement), requirement


def test_core_dependencies_are_what_is_imported() -> None:
    """The other packages that modules import at some place are those of an extra."""
    nodes = [node for statements in imports().values() for node in statements]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    imported = {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "rlx_jax"}
    declared = {re.split(r"[>=]", r)[0].replace("-", "_") for r in PYPROJECT["project"]["dependencies"]}
    declared = declared - {"orbax_checkpoint"} | {"orbax"}
    assert imported - declared == OPTIONAL
    assert not declared - imported


def test_load_starts_the_device_before_the_package_is_imported() -> None:
    """Before it reads a checkpoint, that is; a path that is none starts nothing."""
    code = "import rlx_jax, sys; rlx_jax.load; print('jax' in sys.modules); import rlx_jax.device"
    code += "; rlx_jax.device.start_device = lambda: print('starts', 'rlx_jax.flow' in sys.modules)"
    code += "; rlx_jax.load(sys.argv[1]); print('loaded'); rlx_jax.load('/nowhere')"
    done = python("-c", code, str(LLAMA))
    assert done.stdout.splitlines() == ["False", "starts False", "starts True", "loaded"], done.stderr
    assert "MissingFileError" in done.stderr


def test_what_is_public_and_imported() -> None:
    """`dir` has the public names alone, which are all there; what imports slowly is imported when it is used. And no
    backend starts: with a platform that does not exist, whatever asks jax for a device fails."""
    nowhere = {"JAX_PLATFORMS": "no_such_platform"}
    used = "rlx_jax.train.Checkpoints; import rlx_jax.encode.sentence"
    code = "import rlx_jax, sys; print(*dir(rlx_jax)); rlx_jax.load = 1; rlx_jax.Sampler; assert rlx_jax.load == 1"
    code += f"; print(*sys.modules); {used}; print(*sys.modules)"
    code += "; import jax; jax.devices()"  # the probe sees a backend start: this alone fails, after all is printed
    done = python("-X", "importtime", "-c", code, **nowhere)
    assert done.returncode and "no_such_platform" in done.stderr, done.stderr
    listed, loaded, later = (line.split() for line in done.stdout.splitlines())
    assert "rlx_jax.models" in loaded and not {f"rlx_jax.{name}" for name in ("train", "nnx", "eval")} & set(loaded)
    timed = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "rlx_jax" in timed, "the probe sees imports"
    assert HEAVY & ({name.partition(".")[0] for name in later} | timed) == set()
    assert sorted(listed) == rlx_jax.__all__
    assert len(listed) <= 45
    assert rlx_jax.__all__ == sorted(rlx_jax.__all__)
    found = {name: getattr(rlx_jax, name) for name in rlx_jax.__all__ if name != "eval"}  # which imports lm_eval
    modules = {name for name, value in found.items() if isinstance(value, ModuleType)}
    assert modules == {"blocks", "errors", "losses", "models", "nnx", "ops", "plugins", "profiles", "train"}
    with pytest.raises(AttributeError, match="no_such_name"):
        rlx_jax.no_such_name  # type: ignore[attr-defined] # noqa: B018
