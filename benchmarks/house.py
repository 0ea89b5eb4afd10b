"""How big the house is, and how far one walks in it.

    python benchmarks/house.py            lines by room, the longest files, files that a call enters
    python benchmarks/house.py --root DIR the same of another checkout, such as an older commit

A walk counts the files of the package in which a function runs: `compile` of a small Llama flow, one token through
`generate` when everything is compiled, `load` of a recorded checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import table

HERE = Path(__file__).resolve().parents[1]
FOLDERS = ("rlx_jax", "blocks", "lowering", "profiles")
CHECKPOINT = Path("tests", "fixtures", "llama", "gqa_tied_llama3_v5")
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def sources(root: Path) -> dict[Path, str]:
    """The package's files by their path below `root`, links left out."""
    found = {}
    for folder in FOLDERS:
        for here, below, files in os.walk(root / folder):
            below[:] = [name for name in below if not (Path(here) / name).is_symlink()]
            for name in files:
                if name.endswith(".py"):
                    path = Path(here, name)
                    found[path.relative_to(root)] = path.read_text("utf-8")
    return found


def room(path: Path) -> str:
    """`lowering/mir` of `lowering/mir/cse.py`, `rlx_jax/ir` of what is below it."""
    parts = path.parent.parts
    return "/".join(parts[:2])


def sizes(root: Path) -> None:
    """Print files and lines by room, and the longest files and functions."""
    files = sources(root)
    lines = {path: text.count("\n") for path, text in files.items()}
    count, total = Counter(map(room, files)), Counter[str]()
    for path, n in lines.items():
        total[room(path)] += n
    rows = [(name, count[name], total[name]) for name in sorted(count)]
    print(table(("room", "files", "lines"), [*rows, ("all", len(files), sum(lines.values()))]))
    longest = sorted(lines, key=lambda p: -lines[p])[:5]
    print("\nlongest files:", ", ".join(f"{p} {lines[p]}" for p in longest))
    print("functions over 60 lines:", ", ".join(long_functions(files)) or "none")


def long_functions(files: dict[Path, str]) -> list[str]:
    """Functions that do not fit on a screen."""
    return [
        f"{path}:{node.name} {node.end_lineno - node.lineno + 1}"
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 60
    ]


def entered(root: Path, call: Callable[[], Any]) -> set[str]:
    """The files of the package in which a function runs during `call`, in this thread."""
    found: set[str] = set()
    homes = tuple(os.fspath(root / folder) + os.sep for folder in FOLDERS)

    def see(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(homes):
            found.add(os.path.relpath(os.path.realpath(name), root))

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def walks(root: Path) -> None:
    """Print how many files each of three calls enters."""
    sys.path.insert(0, os.fspath(root))
    import rlx_jax as rlx

    assert Path(rlx.__file__).resolve().is_relative_to(root), rlx.__file__
    with tempfile.TemporaryDirectory() as directory:
        for name in NEEDED:
            if (HERE / CHECKPOINT / name).exists():
                shutil.copy(HERE / CHECKPOINT / name, directory)
        flow = rlx.from_pretrained(directory)
        lm = rlx.load(directory)
        prompt = [1, 2, 3]
        lm.generate(prompt, max_new_tokens=2)
        calls: dict[str, Callable[[], Any]] = {
            "a flow through compile": lambda: rlx.compile(flow),
            "a token through generate": lambda: lm.generate(prompt, max_new_tokens=2),
            "a path through load": lambda: rlx.load(directory),
        }
        print()
        for name, call in calls.items():
            found = entered(root, call)
            print(f"{name}: {len(found)} files")
            print("   ", ", ".join(sorted(found)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="the checkout to look at")
    root = parser.parse_args().root.resolve()
    sizes(root)
    walks(root)
