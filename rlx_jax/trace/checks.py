"""What users give to the methods of `Ops` and `Builders`, held against what these take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from rlx_jax.errors import GraphError, shown
from rlx_jax.ir.graph import Op

PLAIN = {bool: bool, int: int, float: int | float, str: str, type(None): type(None)}
"""What an attribute of one of these types may be."""


def items_of(value: Any, where: str, expected: str) -> tuple[Any, ...]:
    """The entries of a list; one entry alone is none.

    Raises:
        GraphError: it is no list.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise GraphError(f"{where}: expected {expected}, got {shown(value)}")
    return tuple(value)


def check_attributes(op: Op) -> None:
    """The attributes of an op that could not be written are of their types, as far as those are plain.

    Raises:
        GraphError: names the first that is not.
    """
    hints = get_type_hints(type(op))
    for f in fields(op):  # type: ignore[arg-type]  # every op is a dataclass
        value, hint = getattr(op, f.name), hints[f.name]
        plain = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if all(p in PLAIN for p in plain) and not isinstance(value, tuple(PLAIN[p] for p in plain)):
            wanted = " or ".join("None" if p is type(None) else p.__name__ for p in plain)
            raise GraphError(f"{type(op).__name__}: {f.name} is {shown(value)}; expected {wanted}")
