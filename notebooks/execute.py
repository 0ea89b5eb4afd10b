"""Run the notebooks beside this file and store their outputs: `python notebooks/execute.py [train] [tour] …`."""

import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

HERE = Path(__file__).parent

for path in sorted(HERE.glob("*.ipynb")):
    if sys.argv[1:] and path.stem not in sys.argv[1:]:
        continue
    print(f"running {path.name} …", flush=True)
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        resources = {"metadata": {"path": directory}}
        nbclient.NotebookClient(
            notebook, timeout=1200, resources=resources, record_timing=False, coalesce_streams=True
        ).execute()
    nbformat.write(notebook, path)
