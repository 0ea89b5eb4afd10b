"""One checker for every table of a profile, driven by the rows of the dataclass fields.

A table is a frozen dataclass that derives from `Table`. A field is a row: its type, `setting(default, …)`, and its
entry `name: …` in the docstring of the table, which docs/profiles.md shows. Its type is one of six: another table, a
`Literal` of strings, `bool` (or a union of those), `str`, `int` (a size, at least 1), a tuple of one of these, or
`Options`. TOML, `replace` and the constructors all go through here, so that they accept and refuse the same things with
the same words.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from rlx_jax.errors import ProfileError, UnsupportedError, did_you_mean, quote

Scalar = str | bool | int | float

# Characters of one string in a profile.
MAX_STRING = 1024

# The largest size in a profile, that of a dimension.
MAX_SIZE = 2**31 - 1

_OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

_GPU = "; did you mean 'cuda' (NVIDIA) or 'rocm' (AMD)?"

# Platforms that the specification names and nothing is compiled for: an `UnsupportedError`.
OTHER_PLATFORMS = ("metal", "mlx", "wgpu")


class At(NamedTuple):
    """Where a value stands: the text that it came from, and its dotted path there."""

    source: str
    path: str = ""

    def child(self, key: str) -> At:
        """The place of `key` in the table that stands here."""
        return At(self.source, f"{self.path}.{key}" if self.path else key)

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source


@dataclass(frozen=True)
class Setting:
    """A setting, beside its type and its documentation.

    Attributes:
        idle: why a value has nothing to act on in a model, given its `Facts`; "" where it has.
        label: what a comparison of two programs calls it; "" where passes, ops or parameters show it.
        resolved: the attribute of `rlx_jax.compiler.settings.Settings` that has its value with `auto` resolved; "" for
            a setting that is used as it is written.
        of: the programs whose comparison shows it: "" all, "train", "state" those with a state, "serves" those that
            take requests.
        unsupported: values that are known, and that nothing computes.
        zero: whether a size may be 0.
    """

    default: Any
    idle: Callable[[Any, Any], str]
    label: str = ""
    resolved: str = ""
    of: Literal["", "train", "state", "serves"] = ""
    unsupported: tuple[str, ...] = ()
    zero: bool = False


def setting(default: Any, idle: Callable[[Any, Any], str], label: str = "", resolved: str = "", **others: Any) -> Any:
    """The field of a setting; arguments as the attributes of `Setting`."""
    return field(default=default, metadata={"row": Setting(default, idle, label, resolved, **others)})


class Table:
    """Base of the tables. Building one checks every field: a `Table` that exists is valid.

    `PATH` is the table's place in a profile; `*` stands for any backend.
    """

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        at = At("compile profile", self.PATH)
        for f in fields(self):  # type: ignore[arg-type]  # every Table is a dataclass
            hint = field_types(type(self))[f.name]
            object.__setattr__(self, f.name, _checked(_row(f), hint, getattr(self, f.name), at.child(f.name)))


def rows(table: Any, path: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """Each setting of a table and the tables in it: its place, `precision.compute`, its row and its value."""
    for f in fields(table):
        value = getattr(table, f.name)
        if isinstance(value, Table):
            yield from rows(value, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", f.metadata["row"], value


T = TypeVar("T", bound=Table)


@dataclass(frozen=True, eq=False, repr=False)
class Options(Mapping[str, Scalar]):
    """An immutable mapping of XLA option names to values, sorted by name.

    Two are equal when values agree in type too: `True`, `1` and `1.0` are different options for XLA, and a
    compiled program must not be found under the wrong one.

    >>> Options((("xla_a", True),)) == Options((("xla_a", 1),))
    False
    """

    entries: tuple[tuple[str, Scalar], ...] = ()

    def __getitem__(self, name: str) -> Scalar:
        return dict(self.entries)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return _spelled(self) == _spelled(other)

    def __hash__(self) -> int:
        return hash(frozenset(_spelled(self).items()))

    def __repr__(self) -> str:
        return f"Options({dict(self.entries)!r})"


def _spelled(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in options.items()}


def _field_types(table: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(table)
    return {f.name: hints[f.name] for f in fields(table)}


# Field name → resolved type of a `Table`, in the order of the dataclass.
field_types: Callable[[Any], dict[str, Any]] = cache(_field_types)


def is_table(hint: Any) -> bool:
    """Whether a field of this type holds a nested table."""
    return isinstance(hint, type) and issubclass(hint, Table)


def build(table: type[T], data: object, at: At) -> T:
    """A `table` from a mapping; a missing key takes the field's default.

    Raises:
        ProfileError: a key that is unknown, or a value of the wrong type or outside its choices.
        UnsupportedError: a setting that is known and has no effect yet, so that it is never accepted idle.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(f"{at}: expected a table, found {_described(data)}")
    known, types = {f.name: f for f in fields(table)}, field_types(table)  # type: ignore[arg-type]
    values = {}
    for key, value in data.items():
        if key not in types:
            raise _refused_key(table, key, at)
        values[key] = _checked(_row(known[key]), types[key], value, at.child(key))
    return table(**values)


def _refused_key(table: type[Table], key: object, at: At) -> ProfileError | UnsupportedError:
    """The error for a key that is no field of `table`."""
    if not isinstance(key, str):
        return ProfileError(f"{at}: a key is a string, found {_described(key)}")
    if key in OTHER_PLATFORMS:
        return UnsupportedError(f"{at.child(key)}: this setting is known but not built yet; take it out")
    types = field_types(table)
    deeper = [f"{name}.{key}" for name, hint in types.items() if is_table(hint) and key in field_types(hint)]
    hint = f"; did you mean {quote(deeper[0])}?" if deeper else _suggestion(key, [*types])
    return ProfileError(f"{at}: unknown key {quote(key)}; known here: {', '.join(types)}{hint}")


def _row(field: Any) -> Setting | None:
    """The row of a dataclass field; a table inside another has none."""
    found: Setting | None = field.metadata.get("row")
    return found


def _checked(row: Setting | None, hint: Any, value: object, at: At) -> object:
    """`value` as the field holds it, or an error."""
    if is_table(hint):
        return value if isinstance(value, hint) else build(hint, value, at)
    if hint is Options:
        return _options(value, at)
    if get_origin(hint) is tuple:
        return _items(row, get_args(hint)[0], value, at)
    if _accepts(hint, value) or (row and row.zero and type(value) is int and value == 0):
        return value
    if row and type(value) is str and value in row.unsupported:
        raise UnsupportedError(f"{at}: {quote(value)} is known but not supported; {_expected(hint)}")
    close = _suggestion(value, _choices(hint)) if type(value) is str else ""
    raise ProfileError(f"{at}: {_expected(hint)}, found {_described(value)}{close}")


def _items(row: Setting | None, hint: Any, value: object, at: At) -> tuple[object, ...]:
    """An array as a tuple, each item checked as a field of type `hint`."""
    if not isinstance(value, (list, tuple)):
        raise ProfileError(f"{at}: expected an array, found {_described(value)}")
    return tuple(_checked(row, hint, item, At(at.source, f"{at.path}[{i}]")) for i, item in enumerate(value))


def _suggestion(word: str, known: list[str]) -> str:
    # By spelling, "gpu" is nearest to "cpu".
    return _GPU if word == "gpu" and "cuda" in known else did_you_mean(word, known)


def _arms(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(hint: Any) -> list[str]:
    return [str(c) for arm in _arms(hint) if get_origin(arm) is Literal for c in get_args(arm)]


def _accepts(hint: Any, value: object) -> bool:
    if type(value) is str:
        return value in _choices(hint) or (str in _arms(hint) and value != "" and _plain(value))
    if type(value) is int:
        return int in _arms(hint) and 1 <= value <= MAX_SIZE
    return type(value) is bool and bool in _arms(hint)


def _plain(text: str) -> bool:
    """Printable, hence one line that UTF-8 and TOML can hold."""
    return len(text) <= MAX_STRING and text.isprintable()


def _expected(hint: Any) -> str:
    arms = _arms(hint)
    words = [quote(c) for c in _choices(hint)]
    words += ["true", "false"] if bool in arms else []
    words += [f"an integer from 1 to {MAX_SIZE}"] if int in arms else []
    words += [f"a printable string of 1 to {MAX_STRING} characters"] if str in arms else []
    return f"expected {words[0]}" if len(words) == 1 else f"expected {', '.join(words[:-1])} or {words[-1]}"


def _options(value: object, at: At) -> Options:
    if not isinstance(value, Mapping):
        raise ProfileError(f"{at}: expected a table of XLA options, found {_described(value)}")
    return Options(tuple(sorted((_option_name(name, at), _option(v, at.child(name))) for name, v in value.items())))


def _option_name(name: object, at: At) -> str:
    if isinstance(name, str) and _OPTION_NAME.fullmatch(name):
        return name
    raise ProfileError(f"{at}: expected an option name of letters, digits and _, found {_described(name)}")


def _option(value: object, at: At) -> Scalar:
    # Exact types, here and above: a subclass (an IntEnum, a NumPy float) would not come back equal from TOML.
    if type(value) is bool or (type(value) is str and _plain(value)):
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise ProfileError(
        f"{at}: expected a boolean, a 64-bit integer, a finite number or a printable string of at most "
        f"{MAX_STRING} characters, found {_described(value)}"
    )


def _described(value: object) -> str:
    """What `value` is, for a message. Never calls the repr of a foreign type, and never prints a huge integer."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str:
        return f"the string {quote(value)}"
    if type(value) in _SCALARS:
        return f"the {_SCALARS[type(value)]} {str(value).lower()}"
    return next((words for kind, words in _KINDS if isinstance(value, kind)), f"a value of type {type(value).__name__}")


_SCALARS = {bool: "boolean", int: "integer", float: "number"}
_KINDS: tuple[tuple[Any, str], ...] = (
    (Mapping, "a table"), (list | tuple, "an array"), (datetime.date | datetime.time, "a date or time"),
)  # fmt: skip
