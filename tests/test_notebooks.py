"""The notebooks run from top to bottom, show what they promise, and are stored with the outputs of such a run."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from rlx_jax import __version__
from tests.wheels import build_wheel

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST_CELL: str = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["FIRST_CELL"]
WHEEL = f"rlx_jax-{__version__}-py3-none-any.whl"


def count(printed: str, before: str) -> int:
    """The whole number behind the first `before`."""
    return int(re.findall(re.escape(before) + r"(\d+)", printed)[0])


def share(printed: str, before: str) -> float:
    """The percentage behind the first `before`."""
    return float(re.findall(re.escape(before) + r"([\d.]+)%", printed)[0])


CHECKS = {
    "train": lambda printed: float(re.findall(r"held out: ([\d.]+) nats per byte", printed)[-1]) <= 1.5,
    "editing": lambda printed: (
        share(printed, "right: ") >= 90
        and share(printed, "dialect: ") <= 85
        and share(printed.rpartition("right in the")[2], "dialect: ") >= 90
    ),
    "generate": lambda printed: "<|im_start|>assistant" in printed and "LimitError" in printed,
    "devices": lambda printed: (
        printed.count("equal tokens") == 2
        and max(map(float, re.findall(r"largest difference ([\d.e+-]+)", printed))) <= 1e-4
    ),
    "retrieval": lambda printed: (
        count(printed, "source: ") >= 17
        and count(printed, "picture is right: ") >= 35
        and count(printed, "caption is right: ") >= 130
        and all(note in printed for note in ("Vienna", "Roses", "fever", "dough", "rent"))
    ),
    "tour": lambda printed: "fused_mm_bias" in printed and "stablehlo" in printed.lower(),
}
"""What the outputs of a run say, by notebook."""
SHORTER = {
    "train": {"STEPS = 600": "STEPS = 26", "warmup_steps=30": "warmup_steps=5", "loss <= 1.5": "loss <= 9"},
    "editing": {"range(350)": "range(6)", "range(80)": "range(3)"},
    "generate": {"20, STEPS := 250": "2, STEPS := 6"},
    "devices": {"steps=40": "steps=3"},
    "retrieval": {"20, STEPS := 500": "2, STEPS := 6"},
}
"""What trains for fewer steps where only the running is looked at."""


def cells(path: Path) -> list[dict[str, Any]]:
    """The stored cells of code."""
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(outputs: list[dict[str, Any]]) -> str:
    """What outputs print, pictures left out."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain") or "" for o in outputs]
    return "".join(text if isinstance(text, str) else "".join(text) for text in texts)


def test_all_are_there() -> None:
    names = {"devices", "editing", "generate", "retrieval", "tour", "train"}
    assert {path.stem for path in NOTEBOOKS} == set(CHECKS) == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs(path: Path) -> None:
    """Those of one run from top to bottom, with pictures, without errors, traces of a machine, or megabytes. It is a
    notebook of the format that Colab takes, whose first code cell is that of all of them."""
    notebook, code = nbformat.read(path, as_version=4), cells(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and "Colab" in notebook.cells[0].source
    assert "".join(code[0]["source"]) == FIRST_CELL.rstrip("\n")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert CHECKS[path.stem](printed(outputs))
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    assert path.stat().st_size < 120_000
    for text in (printed(outputs), *("".join(cell["source"]) for cell in code)):
        assert not re.search(r"/(tmp|home|root|work|usr|var)/", text)


OLDER = "rlx_jax-0.0.9-py3-none-any.whl"
FIRST: list[tuple[tuple[str, ...], tuple[str, ...], str | None, str | None, str]] = [
    ((), (WHEEL,), "nvidia-smi", None, "as installed before"),
    (("optax",), (WHEEL,), None, "-q matplotlib optax", "as installed before"),
    (("rlx_jax", "optax"), (), None, '-q "rlx-jax[notebooks]" "jax"', "from the index"),
    (("rlx_jax",), (), "nvidia-smi", '-q "rlx-jax[notebooks]" "jax[cuda12]"', "from the index"),
    (("rlx_jax",), (OLDER, WHEEL), None, f'-q "{WHEEL}[notebooks]" "jax"', WHEEL),
]


@pytest.mark.parametrize("case", FIRST, ids=range(5))
@pytest.mark.parametrize("works", [True, False])
def test_first_cell(
    case: Any, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is installed, then a wheel beside the notebook, then the index; and it says which, or what to do."""
    missing, beside, gpu, installs, says = case
    absent, asked = set(missing), list[str]()

    def pip(arguments: str) -> None:
        asked.append(arguments)
        absent.difference_update(absent if works else ())

    for name in beside:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", {"nvidia-smi": gpu}.__getitem__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    cell = re.sub(r"%pip install (.*)", r"pip(f'\1')", FIRST_CELL)
    if "rlx_jax" in missing and not works:
        with pytest.raises(ModuleNotFoundError, match="make wheel"):
            exec(cell, {"pip": pip})
    else:
        exec(cell, {"pip": pip})
        assert says in capsys.readouterr().out
    assert asked == ([] if installs is None else [installs])


def run(python: Path, directory: Path, notebook: nbformat.NotebookNode, without: str) -> str:
    """What a notebook prints when an environment's own kernel runs it in a directory, `without` a variable of tests."""
    path = directory / "notebook.ipynb"
    nbformat.write(notebook, path)
    environ = {name: text for name, text in os.environ.items() if name not in without.split()}
    command: list[str | Path] = [python.parent / "jupyter-execute", "--inplace", "--timeout=1200", path]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return printed([output for cell in cells(path) for output in cell["outputs"]])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    """With fewer steps, in this environment; the train notebook asserts that resumed losses are equal."""
    text = path.read_text("utf-8")
    for steps, fewer in SHORTER.get(path.stem, {}).items():
        assert text.count(steps) == 1, steps
        text = text.replace(steps, fewer)
    said = run(Path(sys.executable), tmp_path, nbformat.reads(text, as_version=4), without="")
    assert "rlx_jax: as installed before" in said


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that had a kernel and no more, where the first cell then found the wheel."""
    here = tmp_path_factory.mktemp("elsewhere")
    python = here / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", here / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", "ipykernel", "nbclient"], check=True)
    shutil.copy(build_wheel(here / "built"), here)
    first = nbformat.v4.new_code_cell(FIRST_CELL)
    where = nbformat.v4.new_code_cell("import rlx_jax as rlx; print(rlx.__file__)")
    said = run(python, here, nbformat.v4.new_notebook(cells=[first, where]), without="PYTHONPATH XLA_FLAGS")
    assert f"from {WHEEL}" in said and str(here / "venv") in said.splitlines()[-1]
    return python


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_the_wheel(path: Path, elsewhere: Path, tmp_path: Path) -> None:
    """From the wheel alone, without a checkout. What a run of all steps says is what is stored."""
    said = run(elsewhere, tmp_path, nbformat.read(path, as_version=4), without="PYTHONPATH XLA_FLAGS")
    assert "rlx_jax: as installed before" in said and CHECKS[path.stem](said)
