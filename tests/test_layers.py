"""Folders import upwards only, a name means one thing, and every exception is raised: read from the source."""

import ast
import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rlx_jax import errors

PACKAGE = Path(__file__).parents[1] / "rlx_jax"

ROOMS = (
    "errors", "io", "ir", "plugins", "profiles", "device", "weights", "trace", "blocks", "lowering", "program",
    "compiler", "inspection", "flow", "runtime", "losses", "train", "models", "text", "encode", "generate", "loading",
    "surface",
)  # fmt: skip
"""From the ground up: a module imports its own room and those before it."""

SURFACE = ("", "__main__", "cli", "compile_steps", "demo", "eval", "nnx", "public", "quantization")
ROOTS = {"dataclasses": "errors", "lru": "errors", "at": "flow", "flow_outputs": "flow", "layer_stack": "flow"}
SHARED = ROOTS | dict.fromkeys(SURFACE, "surface")
"""Files at the package's root that are no room of their own. "" is the package itself."""

STRANGERS = {
    "lowering": {"trace", "blocks"}, "trace": {"profiles", "weights"}, "blocks": {"profiles", "weights"},
    "models": {"ir", "lowering"},
}  # fmt: skip
"""Rooms that stand before another and are not entered: lowering knows no stage, a stage no profile and no file, and a
recipe no compiler internals."""


def modules() -> dict[str, Path]:
    """Every module of the package by its import name. The folders that stand beside the package are linked into it."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for path in (Path(folder) / name for name in files if name.endswith(".py")):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def targets(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name in known:
            yield name


def room(module: str) -> str:
    """The room of a module: `rlx_jax.lowering.mir.small` stands in `lowering`."""
    name = module.partition(".")[2].partition(".")[0]
    return SHARED.get(name, name)


MODULES = modules()


def test_every_module_has_a_room() -> None:
    assert {room(name) for name in MODULES} <= set(ROOMS)
    assert len(MODULES) > 100 and room("rlx_jax.lowering.mir.small") == "lowering"  # the links were followed


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module's source, parsed by the first test that reads it and not when tests are collected."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


@functools.cache
def imports() -> dict[str, list[ast.Import | ast.ImportFrom]]:
    """Every module's import statements, wherever they stand."""
    return {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, tree in trees().items()
    }


def test_imports_point_upwards() -> None:
    """No exception is made: not for an import inside a function, and not for one that only types need."""
    wrong = []
    for name, statements in imports().items():
        own = room(name)
        for node in statements:
            for target in targets(node, MODULES):
                there = room(target)
                strange = there in STRANGERS.get(own, ())
                if ROOMS.index(there) > ROOMS.index(own) or strange:
                    wrong.append(f"{MODULES[name]}:{node.lineno}: {own} imports {target}")
    assert wrong == []


LAZY = {
    "rlx_jax": {"rlx_jax.eval", "rlx_jax.nnx", "rlx_jax.train", "rlx_jax.public"},
    "rlx_jax.loading.start": {"rlx_jax.flow", "rlx_jax.generate.causal"},
}
"""What is imported when it is first used: the modules that need lm_eval and flax, what only training needs, and what
`load` imports while the device starts."""


def test_no_import_of_the_package_hides() -> None:
    """Inside a function or under a condition an import hides a circle."""
    for name, tree in trees().items():
        hidden = {t for node in imports()[name] if node not in tree.body for t in targets(node, MODULES)}
        assert hidden <= LAZY.get(name, set()), name


PUBLIC = {"Graph": "rlx_jax.Graph is the spec's name for GraphModule"}
"""Names that users know by two meanings, with the reason."""


def definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of a module's classes and capitalised aliases, each with what it is: `class`, or the alias's value."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            name, value = target.id, ast.unparse(node.value)
            if name[0].isupper() and not name.isupper() and not value.startswith("TypeVar"):
                yield name, value


def stage_and_block(modules: list[str]) -> bool:
    """A stage and the HIR block or region that it writes."""
    return sorted(map(room, modules)) == ["blocks", "ir"]


def test_no_two_classes_share_a_name() -> None:
    """But a stage and the block it writes. An alias of the same value means the same."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for module, tree in trees().items():
        for name, meaning in definitions(tree):
            found[name][module] = meaning
    for name, places in found.items():
        same = len(set(places.values())) == 1 and "class" not in places.values()
        assert len(places) == 1 or same or stage_and_block(list(places)) or name in PUBLIC, (name, places)


CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]


def test_every_exception_is_raised() -> None:
    """Or warned of: by name, in code that is not an import."""
    others = [tree for name, tree in trees().items() if name != "rlx_jax.errors"]
    nodes = [node for tree in others for node in ast.walk(tree)]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    named |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    leaves = {c.__name__ for c in CLASSES if issubclass(c, BaseException) and not c.__subclasses__()}
    assert len(leaves) > 10 and leaves <= named
