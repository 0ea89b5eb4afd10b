"""What users give to the methods of `Builders`, held against what these take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_type_hints

import numpy as np

from rlx_jax.errors import GraphError, RlxError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Op
from rlx_jax.ir.inits import INITS, Init


def is_number(value: object) -> bool:
    """Whether an operand is a plain number, to stand beside a value."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


def check_count(value: Any, what: str, least: int = 1, error: type[RlxError] = GraphError) -> int:
    """Return a whole number of at least `least`; `what` says where it stands and what it is called.

    Raises:
        GraphError, or what `error` says: it is none.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise error(f"{what} is {shown(value)}; expected an integer of at least {least}")
    return int(value)


# What an attribute of one of these types may be.
PLAIN = {bool: bool, int: int, float: int | float, str: str, type(None): type(None)}


def items_of(value: Any, where: str, expected: str) -> tuple[Any, ...]:
    """The entries of a list; one entry alone is none.

    Raises:
        GraphError: it is no list.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise GraphError(f"{where}: expected {expected}, got {shown(value)}")
    return tuple(value)


def check_takes(
    fn: Callable[..., Any],
    arguments: tuple[str, ...],
    where: str,
    error: type[RlxError] = GraphError,
    *,
    named: bool = False,
) -> None:
    """A function of a user can be called with so many arguments by position, where `named` beside others by name.

    Raises:
        GraphError, or what `error` says: it cannot.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # what is written in C tells nothing
        return
    try:
        (signature.bind_partial if named else signature.bind)(*arguments)
    except TypeError as cause:
        name = getattr(fn, "__name__", type(fn).__name__)
        called = f"{name}({', '.join(arguments)})"
        raise error(f"{where}: the function is called as {called}, and it takes {signature}") from cause


def has_no(writer: object, name: str | None) -> str:
    """A name that `writer` does not have, and those close to it."""
    close = did_you_mean(name, (known for known in dir(writer) if not known.startswith("_")))
    return f"{quote(name)}{close or '; docs/graph.md lists what it has'}"


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


def check_init(init: Init, where: str) -> Init:
    """It, if it is one.

    Raises:
        GraphError: it is none of the names, and no function of these arguments.
    """
    if isinstance(init, str) and init not in INITS:
        raise GraphError(
            f"{where}: init {quote(init)}: expected one of {listing(INITS)}, or a function (key, shape, dtype) → array "
            f"such as jax.nn.initializers.normal(0.02){did_you_mean(init, INITS)}"
        )
    if not isinstance(init, str) and not callable(init):
        raise GraphError(f"{where}: init is {shown(init)}; expected one of {listing(INITS)}, or a function")
    if not isinstance(init, str):
        check_takes(init, ("key", "shape", "dtype"), f"{where}: init")
    return init
