"""Model code stays above the IR: recipes, notebooks and the README's code import no compiler internals."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_docs import python_blocks

ROOT = Path(__file__).parents[1]
BELOW = ("rlx_jax.ir", "rlx_jax.lowering")
COMPILER_PAGES = {"docs/adding-a-block.md", "docs/adding-a-pass.md", "docs/plugins.md"}
PUBLIC = {"rlx_jax.ir.plugins"}  # as rlx_jax.plugins
NAMES = {"HirModule", "FusionPolicy", "Op"}
MAGIC = re.compile(r"^(\s*)[%!].*", re.MULTILINE)  # a notebook's %pip is not Python


def sources() -> dict[str, str]:
    """What counts as model code, by path: every recipe, each notebook's code cells, the blocks of README and docs.

    Three of the pages are about compiler work.
    """
    found = {
        str(p.relative_to(ROOT)): p.read_text("utf-8") for p in sorted((ROOT / "rlx_jax" / "models").rglob("*.py"))
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found[str(path.relative_to(ROOT))] = MAGIC.sub(r"\1pass", code)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    blocks = {str(p.relative_to(ROOT)): "\n".join(python_blocks(p.read_text("utf-8"))) for p in pages}
    return found | {name: text for name, text in blocks.items() if name not in COMPILER_PAGES}


def breaches(code: str) -> Iterator[str]:
    """Imports of a module below, and the names of compiler internals."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            words = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            words = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            words = [ast.unparse(node)]
        else:
            continue
        for word in words:
            word = word.replace("rlx.", "rlx_jax.", 1) if word.startswith("rlx.") else word
            if word in PUBLIC:
                continue
            if any(f"{word}.".startswith(f"{module}.") for module in BELOW) or NAMES & set(word.split(".")):
                yield word


def test_above() -> None:
    found = sources()
    assert {name: list(breaches(code)) for name, code in found.items()} == dict.fromkeys(found, [])
    assert {"README.md", "docs/recipes.md", "rlx_jax/models/llama.py", "rlx_jax/models/bert.py"} <= set(found)
