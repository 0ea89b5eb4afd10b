"""A name means one thing: of classes and of aliases in the package. And every exception is raised somewhere."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlx_jax import errors

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("rlx_jax", "blocks", "lowering", "profiles")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)  # rlx_jax/blocks is blocks
)
PUBLIC = {"Graph": "rlx_jax.Graph is the spec's name for GraphModule"}
"""Names that users know by two meanings, with the reason."""


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Names of a module's classes and capitalised aliases, each with what it is: `class`, or the alias's value."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            name, value = target.id, ast.unparse(node.value)
            if name[0].isupper() and not name.isupper() and not value.startswith("TypeVar"):
                yield name, value


def stage_and_block(paths: list[Path]) -> bool:
    """A stage and the HIR block or region that it writes."""
    folders = sorted(path.relative_to(ROOT).parts[:2] for path in paths)
    return len(paths) == 2 and folders[0][0] == "blocks" and folders[1] == ("rlx_jax", "ir")


def shared(sources: dict[Path, str]) -> dict[str, list[str]]:
    """Names with several meanings, and where they are made. An alias of the same value means the same."""
    found: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path, source in sources.items():
        for name, meaning in definitions(source):
            found[name].append((path, meaning))
    return {
        name: [str(path.relative_to(ROOT)) for path, _ in places]
        for name, places in found.items()
        if len(places) > 1
        and ("class" in (meanings := {meaning for _, meaning in places}) or len(meanings) > 1)
        and not stage_and_block([path for path, _ in places])
        and name not in PUBLIC
    }


def test_no_two_classes_share_a_name() -> None:
    """But a stage and the block it writes."""
    assert shared({path: path.read_text("utf-8") for path in FILES}) == {}


CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]


def test_every_exception_is_raised() -> None:
    """Or warned of: by name, in code that is not an import."""
    trees = [ast.parse(path.read_text("utf-8")) for path in FILES if path.name != "errors.py"]
    named = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    leaves = {c.__name__ for c in CLASSES if issubclass(c, BaseException) and not c.__subclasses__()}
    assert len(leaves) > 10 and leaves <= named
