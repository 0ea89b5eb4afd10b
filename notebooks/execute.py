"""Run the notebooks of this directory and store their outputs: `python notebooks/execute.py [train] [tour] …`.

Each begins with the same code cell, `FIRST_CELL`, which is written before they run; `--first` only writes it.
"""

import base64
import io
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

HERE = Path(__file__).parent

FIRST_CELL = """\
# rlx_jax as it is installed here; else from a wheel next to this notebook; else from the package index.
import importlib.util
import shutil
from pathlib import Path

wheels = sorted(map(str, Path().glob("rlx_jax-*.whl")))
installed = importlib.util.find_spec("rlx_jax") is not None
source = "as installed before" if installed else f"from {wheels[-1]}" if wheels else "from the index"
if not all(map(importlib.util.find_spec, ("rlx_jax", "matplotlib", "optax"))):
    jax = "jax[cuda12]" if shutil.which("nvidia-smi") else "jax"
    package = wheels[-1] if wheels else "rlx-jax"
    missing = "matplotlib optax" if installed else f'"{package}[notebooks]" "{jax}"'
    %pip install -q {missing}
    importlib.invalidate_caches()
    if importlib.util.find_spec("rlx_jax") is None:
        raise ModuleNotFoundError("no rlx_jax: run `make wheel` in a checkout and put the wheel next to this notebook")

print("rlx_jax:", source)
"""
"""The first code cell of every notebook. pip installs into the kernel that runs, hence the caches."""


def write_first_cell(notebook: nbformat.NotebookNode) -> None:
    """Put `FIRST_CELL` in the place of the first code cell."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = FIRST_CELL.rstrip("\n")


def shrink_pictures(notebook: nbformat.NotebookNode) -> None:
    """Store pictures with 128 colours, which takes a third of the bytes."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                small = io.BytesIO()
                image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
                image.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
                output["data"]["image/png"] = base64.b64encode(small.getvalue()).decode()


def main(words: list[str]) -> None:
    names = [word for word in words if word != "--first"]
    for path in sorted(HERE.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        write_first_cell(notebook)
        if "--first" not in words:
            print(f"running {path.name} …", flush=True)
            with tempfile.TemporaryDirectory() as directory:
                resources = {"metadata": {"path": directory}}
                nbclient.NotebookClient(
                    notebook, timeout=1200, resources=resources, record_timing=False, coalesce_streams=True
                ).execute()
            shrink_pictures(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
