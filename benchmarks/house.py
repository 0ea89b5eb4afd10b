"""Print the size of the package and how many of its functions a call enters.

    python benchmarks/house.py            lines of each folder, the longest files, functions and files that calls enter
    python benchmarks/house.py --root DIR the same of another checkout, such as an older commit
    python benchmarks/house.py --names    the names of the functions and files, too

A call is counted the second time that it runs, between call and return: `compile` of a small Llama flow, two tokens of
`generate`, `load` of a recorded checkpoint. Comprehensions and lambdas belong to the function around them.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import table

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("rlx_jax", "blocks", "lowering", "profiles")
CHECKPOINT = Path("tests", "fixtures", "llama", "gqa_tied_llama3_v5")
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def read_sources(root: Path) -> dict[Path, str]:
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


def folder(path: Path) -> str:
    """`lowering/mir` of `lowering/mir/small.py`, `rlx_jax/ir` of what is below it."""
    parts = path.parent.parts
    return "/".join(parts[:2])


def line_counts(text: str) -> tuple[int, int, int]:
    """Lines of code, of docstrings and in all; blank lines and comments count only in all."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docs.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = list(enumerate(map(str.strip, text.splitlines()), 1))
    return sum(bool(line) and line[0] != "#" and n not in docs for n, line in lines), len(docs), len(lines)


def print_sizes(root: Path) -> None:
    """Print files and lines of each folder, and the longest files and functions."""
    files = read_sources(root)
    counts = {path: line_counts(text) for path, text in files.items()}
    rows = []
    for name in sorted(set(map(folder, files))):
        below = [count for path, count in counts.items() if folder(path) == name]
        rows.append((name, len(below), *map(sum, zip(*below, strict=True))))
    rows.append(("all", len(files), *map(sum, zip(*counts.values(), strict=True))))
    tests = [line_counts(path.read_text("utf-8")) for path in sorted((root / "tests").rglob("*.py"))]
    rows.append(("tests", len(tests), *map(sum, zip(*tests, strict=True))))
    print(table(("folder", "files", "code", "docstrings", "lines"), rows))
    longest = sorted(counts, key=lambda p: -counts[p][2])[:5]
    print("\nlongest files:", ", ".join(f"{p} {counts[p][2]}" for p in longest))
    print("functions over 60 lines:", ", ".join(long_functions(files)) or "none")


def long_functions(files: dict[Path, str]) -> list[str]:
    """Functions that do not fit on a screen."""
    return [
        f"{path}:{node.name} {node.end_lineno - node.lineno + 1}"
        for path, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 60
    ]


def entered_functions(root: Path, call: Callable[[], Any]) -> set[tuple[str, str]]:
    """The file and the qualified name of each function of the package that runs during `call`, in every thread."""
    found: set[tuple[str, str]] = set()
    package_dirs = tuple(os.fspath(root / folder) + os.sep for folder in FOLDERS)

    def on_event(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package_dirs) and not code.co_name.startswith("<"):
            found.add((os.path.relpath(os.path.realpath(code.co_filename), root), code.co_qualname))

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def print_calls(root: Path, names: bool) -> None:
    """Print how many functions and files each of three calls enters when it runs for the second time."""
    sys.path.insert(0, os.fspath(root))
    import rlx_jax as rlx

    assert Path(rlx.__file__).resolve().is_relative_to(root), rlx.__file__
    with tempfile.TemporaryDirectory() as directory:
        for name in CHECKPOINT_FILES:
            if (REPOSITORY / CHECKPOINT / name).exists():
                shutil.copy(REPOSITORY / CHECKPOINT / name, directory)
        flow = rlx.from_pretrained(directory)
        lm = rlx.load(directory)
        prompt = [1, 2, 3]
        calls_by_name: dict[str, Callable[[], Any]] = {
            "load": lambda: rlx.load(directory),
            "generate": lambda: lm.generate(prompt, max_new_tokens=2),
            "compile": lambda: rlx.compile(flow),
        }
        rows = []
        for name, call in calls_by_name.items():
            call()
            found = entered_functions(root, call)
            rows.append((name, len(found), len({file for file, _ in found})))
            if names:
                print(name, *sorted(f"    {file} {function}" for file, function in found), sep="\n")
        print("\n" + table(("second call", "functions", "files"), rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the checkout to look at")
    parser.add_argument("--names", action="store_true", help="print the functions that each call enters")
    args = parser.parse_args()
    print_sizes(args.root.resolve())
    print_calls(args.root.resolve(), args.names)
