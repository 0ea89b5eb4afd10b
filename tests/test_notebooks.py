"""The notebooks run from top to bottom, show what they promise, and are stored with the outputs of such a run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["name"]


def count(printed: str, before: str) -> int:
    """The whole number behind the first `before`."""
    return int(re.findall(re.escape(before) + r"(\d+)", printed)[0])


CHECKS = {
    "train": lambda printed: float(re.findall(r"held out: ([\d.]+) nats per byte", printed)[-1]) <= 1.5,
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


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    """The stored cells of a kind."""
    stored = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in stored if cell["cell_type"] == kind]


def printed(outputs: list[dict[str, Any]]) -> str:
    """What outputs print, pictures left out."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain") or "" for o in outputs]
    return "".join(text if isinstance(text, str) else "".join(text) for text in texts)


def test_all_are_there() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(CHECKS) == {"devices", "generate", "retrieval", "train", "tour"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs(path: Path) -> None:
    """Those of one run from top to bottom, without errors, traces of a machine, or megabytes."""
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert CHECKS[path.stem](printed(outputs))
    assert path.stat().st_size < 120_000
    for text in (printed(outputs), *("".join(cell["source"]) for cell in code)):
        assert not re.search(r"/(tmp|home|root|work|usr|var)/", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_opens_in_colab(path: Path) -> None:
    """A notebook of the format that Colab takes, whose first code cell installs this package where it is missing."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and "Colab" in notebook.cells[0].source
    first = "".join(cells(path, "code")[0]["source"])
    assert 'find_spec("rlx_jax") is None' in first and f'%pip install -q "{PROJECT}' in first


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of its own runs every cell; the train notebook asserts that resumed losses are equal."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # they run longer than they compile
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert CHECKS[path.stem](printed(outputs))
