"""Format the text of ops in dumps from the templates `Op.notation`."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

# `{name}` or `{name?text}`.
_PLACEHOLDER = re.compile(r"\{([\w.]+)(?:\?([^}]*))?\}")


def fill_notation(notation: str, op: object) -> str:
    """Return the text of an op, a template with the values of the op's attributes.

    Args:
        notation: `{name}` is the value of an attribute, and `{name?text}` is `text` if the attribute is true, with its
            value for `*`.
        op: has the attributes.
    """

    def attribute_text(match: re.Match[str]) -> str:
        path, text_if_true = match.groups()
        value = attrgetter(path)(op)
        if text_if_true is None:
            return value_text(value)
        return text_if_true.replace("*", value_text(value)) if value else ""

    return _PLACEHOLDER.sub(attribute_text, notation)


def value_text(value: Any) -> str:
    """Return the value of an attribute as text; for a graph, the number of its nodes."""
    if hasattr(value, "text"):
        return str(value.text())
    if hasattr(value, "nodes"):
        return f"{len(value.nodes)} nodes"
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
