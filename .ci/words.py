"""Count the private words of docstrings, comments and pages, and fail where one is too frequent.

    python .ci/words.py           the table; exit status 1 if a word is over the limit
    python .ci/words.py --all     the table with the files that use each word most

In older texts of this project these words had a meaning of their own, which a reader who knows JAX and Hugging Face
would have had to learn.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
CODE = ("rlx_jax/**/*.py", "blocks/**/*.py", "lowering/**/*.py", "profiles/**/*.py", "examples/**/*.py")
LIMIT = 0.3  # per 1,000 words
PRIVATE = {
    "behind": r"behind",
    "beside": r"beside",
    "stand": r"stands?",
    "say, told": r"says?|said|told",
    "ask": r"asks?|asked",
    "those of, that of": r"(?:those|that) of",
    "whose": r"whose",
}


def page_prose(text: str) -> str:
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`]*`", " ", text, flags=re.DOTALL)


def code_prose(text: str) -> str:
    """Return the docstrings and comments of a module."""
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*strings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def counts(patterns: tuple[str, ...], prose: Callable[[str], str]) -> tuple[int, dict[str, Counter[str]]]:
    """Return the number of words in some files, and how often each file uses each private word."""
    total, uses = 0, {word: Counter[str]() for word in PRIVATE}
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        text = prose(path.read_text("utf-8"))
        total += len(re.findall(r"[A-Za-z]+", text))
        for word, pattern in PRIVATE.items():
            uses[word][str(path.relative_to(ROOT))] = len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
    return total, uses


def main() -> int:
    """Print the table, and return 1 if a word is over the limit."""
    over = False
    for name, patterns, prose in (("pages", PAGES, page_prose), ("docstrings and comments", CODE, code_prose)):
        total, uses = counts(patterns, prose)
        print(f"{name}, {total} words; uses per 1,000:")
        for word, by_file in uses.items():
            rate = 1000 * by_file.total() / total
            over |= rate > LIMIT
            most = ", ".join(f"{file} {n}" for file, n in by_file.most_common(3) if n) if "--all" in sys.argv else ""
            print(f"  {word:18}{rate:6.2f}{'  over ' + str(LIMIT) if rate > LIMIT else ''}  {most}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
