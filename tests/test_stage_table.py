"""The table of docs/stages.md: every stage is in it, and its test notices when the stage is wrong."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlx_jax import blocks

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| `(test_\w+\.py)::(test_\w+)(\[[^`]*\])?` \|$", re.MULTILINE
)


def rows() -> dict[str, str]:
    """The test of each stage, as pytest is asked for it."""
    found = ROW.findall((ROOT / "docs" / "stages.md").read_text("utf-8"))
    assert len(found) == len({row[0] for row in found})
    return {row[0]: f"tests/{row[4]}::{row[5]}{row[6]}" for row in found}


TABLE = rows()


def stages() -> set[str]:
    """The classes of `rlx_jax.blocks` that have an `emit`; protocols only say what a stage is."""
    classes = (c for c in vars(blocks).values() if inspect.isclass(c) and hasattr(c, "emit"))
    return {c.__name__ for c in classes if not getattr(c, "_is_protocol", False)}


def test_every_stage_is_in_the_table() -> None:
    page = (ROOT / "docs" / "stages.md").read_text("utf-8")
    assert page.count("\n| `") == len(TABLE), "a row that the pattern does not read"
    assert set(TABLE) == stages(), "a stage is a row of docs/stages.md"


@pytest.mark.parametrize("test", sorted(set(TABLE.values())))
def test_the_tests_exist(test: str) -> None:
    file, name = test.removeprefix("tests/").partition("[")[0].split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def run_wrong(test: str, stage: str) -> subprocess.CompletedProcess[str]:
    """The test in a process of its own, in which the stage is wrong."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", "not oracle"]
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name} | {"RLX_PERTURB": stage}
    command += ["-p", "tests.perturbed", test]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=pytest.mark.soak if at % 40 else pytest.mark.slow)
        for at, stage in enumerate(sorted(TABLE))
    ],
)
def test_its_test_notices_a_wrong_stage(stage: str) -> None:
    """It fails by a comparison, not because the wrong stage cannot be built."""
    done = run_wrong(TABLE[stage], stage)
    assert done.returncode == 1, f"{stage}: {TABLE[stage]} passes although the stage is wrong\n{done.stdout[-1500:]}"
    assert re.search(r"^E +(AssertionError|assert )", done.stdout, re.MULTILINE), done.stdout[-2000:]
