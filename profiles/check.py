"""This module checks every table of a profile, driven by the metadata of the dataclass fields.

A table is a frozen dataclass that derives from `Table`. A field is a row: its type, `setting(default, …)`, and its
entry `name: …` in the docstring of the table, which docs/profiles.md shows. The type is another table, a `Literal` of
strings, `bool` (or a union of these two), `str`, `int` (a size, at least 1), a tuple of one of these, or `Options`.
TOML, `replace` and the constructors all use this checker, so that they accept the same values with the same messages.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from rlx_jax.dataclasses import dataclass, field, fields
from rlx_jax.errors import ProfileError, UnsupportedError, did_you_mean, quote

Scalar = str | bool | int | float

# The largest number of characters in one string of a profile.
MAX_STRING = 1024

# The largest size in a profile, which is the limit of a dimension.
MAX_SIZE = 2**31 - 1

_OPTION_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

_GPU = "; did you mean 'cuda' (NVIDIA) or 'rocm' (AMD)?"

# Platforms of the specification that the compiler does not support: an `UnsupportedError`.
UNSUPPORTED_PLATFORMS = ("metal", "mlx", "wgpu")


class Location(NamedTuple):
    """The location of a value, for messages: the source text, and the dotted path in it."""

    source: str
    path: str = ""

    def child(self, key: str) -> Location:
        """Return the location of `key` in the table at this location."""
        return Location(self.source, f"{self.path}.{key}" if self.path else key)

    def __str__(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source


@dataclass(frozen=True)
class Setting:
    """The metadata of a setting, in addition to its type and its documentation.

    Attributes:
        default: the default value.
        no_effect: a function of a value and the `ModelFacts` of a model that returns why the value has no effect; "" if
            it has one.
        label: the name in a comparison of two programs; "" if passes, ops or parameters show the difference.
        resolved_as: the attribute of `rlx_jax.compiler.settings.Settings` with the resolved value; "" for a setting
            without `auto`.
        applies_to: the programs with a comparison that shows the setting: "" all, "train", "state" programs with a
            state, "serves" models that serve requests.
        unsupported: values that the specification has and this package does not implement.
        allows_zero: whether a size may be 0.
        table_values: the values of a setting that may also be a table, whose keys are any names.
    """

    default: Any
    no_effect: Callable[[Any, Any], str]
    label: str = ""
    resolved_as: str = ""
    applies_to: Literal["", "train", "state", "serves"] = ""
    unsupported: tuple[str, ...] = ()
    allows_zero: bool = False
    table_values: tuple[str, ...] = ()


def setting(
    default: Any, no_effect: Callable[[Any, Any], str], label: str = "", resolved_as: str = "", **others: Any
) -> Any:
    """Return the dataclass field of a setting. The arguments are the attributes of `Setting`.

    The hash of a table leaves mappings out, which would take as long as all other settings of a profile.
    """
    row = Setting(default, no_effect, label, resolved_as, **others)
    return field(default=default, hash=not isinstance(default, Mapping), metadata={"row": row})


class Table:
    """The base class of tables. The constructor checks every field, so that every `Table` object is valid.

    Attributes:
        PATH: the dotted path of the table in a profile; `*` is any backend.
    """

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        location = Location("compile profile", self.PATH)
        for f in fields(self):  # type: ignore[arg-type]  # every Table is a dataclass
            hint = field_types(type(self))[f.name]
            value = _check_value(_setting_of(f), hint, getattr(self, f.name), location.child(f.name))
            object.__setattr__(self, f.name, value)


def iter_settings(table: Any, path: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """List the settings of a table and its nested tables: path such as `precision.compute`, metadata, and value."""
    for f in fields(table):
        value = getattr(table, f.name)
        if isinstance(value, Table):
            yield from iter_settings(value, f"{path}{f.name}.")
        else:
            yield f"{path}{f.name}", f.metadata["row"], value


T = TypeVar("T", bound=Table)


@dataclass(frozen=True, eq=False, repr=False)
class Options(Mapping[str, Scalar]):
    """An immutable mapping of XLA option names to values, sorted by name.

    Two mappings are equal only if their values have equal types too: `True`, `1` and `1.0` are different options for
    XLA, and each needs its own compiled program.

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
        return _value_texts(self) == _value_texts(other)

    def __hash__(self) -> int:
        return hash(frozenset(name for name, _ in self.entries))

    def __repr__(self) -> str:
        return f"Options({dict(self.entries)!r})"


def _value_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text, which differs for values of different types."""
    return {name: repr(value) for name, value in options.items()}


def _field_types(table: type[Any]) -> dict[str, Any]:
    """Return the resolved type of each field of a dataclass, in order."""
    hints = get_type_hints(table)
    return {f.name: hints[f.name] for f in fields(table)}


# Cached: `get_type_hints` evaluates every annotation, which is too slow for each constructor call.
field_types: Callable[[Any], dict[str, Any]] = cache(_field_types)


def is_table(hint: Any) -> bool:
    """Return whether a field of this type is a nested table."""
    return isinstance(hint, type) and issubclass(hint, Table)


def build(table: type[T], data: object, location: Location) -> T:
    """Return a table from a mapping; missing keys have the default of the field.

    Args:
        table: the class of the table.
        data: the mapping.
        location: the source of the mapping, for messages.

    Raises:
        ProfileError: an unknown key, or a value of the wrong type or outside of its choices.
        UnsupportedError: a setting of the specification that is not implemented, and so must not be silently ignored.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(f"{location}: expected a table, found {_describe(data)}")
    fields_by_name, types = {f.name: f for f in fields(table)}, field_types(table)  # type: ignore[arg-type]
    values = {}
    for key, value in data.items():
        if key not in types:
            raise _unknown_key_error(table, key, location)
        values[key] = _check_value(_setting_of(fields_by_name[key]), types[key], value, location.child(key))
    return table(**values)


def _unknown_key_error(table: type[Table], key: object, location: Location) -> ProfileError | UnsupportedError:
    """Return the error for a key that is no field of a table, with a suggestion."""
    if not isinstance(key, str):
        return ProfileError(f"{location}: a key is a string, found {_describe(key)}")
    if key in UNSUPPORTED_PLATFORMS:
        return UnsupportedError(f"{location.child(key)}: this setting is known but not implemented yet; remove it")
    types = field_types(table)
    deeper = [f"{name}.{key}" for name, hint in types.items() if is_table(hint) and key in field_types(hint)]
    hint = f"; did you mean {quote(deeper[0])}?" if deeper else _suggestion(key, [*types])
    return ProfileError(f"{location}: unknown key {quote(key)}; known here: {', '.join(types)}{hint}")


def _setting_of(field: Any) -> Setting | None:
    """Return the metadata of a dataclass field; None for a nested table."""
    row: Setting | None = field.metadata.get("row")
    return row


def _check_value(row: Setting | None, hint: Any, value: object, location: Location) -> object:
    """Return the value of a field, checked and converted.

    Raises:
        ProfileError, UnsupportedError: as `build`.
    """
    if is_table(hint):
        return value if isinstance(value, hint) else build(hint, value, location)
    if hint is Options:
        return _check_options(value, location)
    if row and row.table_values and isinstance(value, Mapping):
        return _check_names_table(row.table_values, value, location)
    if get_origin(hint) is tuple:
        return _check_items(row, get_args(hint)[0], value, location)
    if _accepts(hint, value) or (row and row.allows_zero and type(value) is int and value == 0):
        return value
    if row and type(value) is str and value in row.unsupported:
        raise UnsupportedError(f"{location}: {quote(value)} is known but not supported; {_expected(hint)}")
    close = _suggestion(value, _choices(hint)) if type(value) is str else ""
    raise ProfileError(f"{location}: {_expected(hint)}, found {_describe(value)}{close}")


def _check_items(row: Setting | None, hint: Any, value: object, location: Location) -> tuple[object, ...]:
    """Return an array as a tuple, with each item checked as a field of type `hint`."""
    if not isinstance(value, (list, tuple)):
        raise ProfileError(f"{location}: expected an array, found {_describe(value)}")
    locations = (Location(location.source, f"{location.path}[{i}]") for i in range(len(value)))
    return tuple(_check_value(row, hint, item, at) for item, at in zip(value, locations, strict=True))


def _suggestion(word: str, choices: list[str]) -> str:
    """Return "; did you mean …?" for a misspelled word; empty if no known word is similar."""
    # By spelling, "gpu" is nearest to "cpu".
    return _GPU if word == "gpu" and "cuda" in choices else did_you_mean(word, choices)


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(hint: Any) -> list[str]:
    """Return the strings of the `Literal` types in a type."""
    return [str(c) for member in _union_members(hint) if get_origin(member) is Literal for c in get_args(member)]


def _accepts(hint: Any, value: object) -> bool:
    """Return whether a string, integer or boolean is a value of a type; other values are not."""
    if type(value) is str:
        return value in _choices(hint) or (str in _union_members(hint) and value != "" and _is_printable(value))
    if type(value) is int:
        return int in _union_members(hint) and 1 <= value <= MAX_SIZE
    return type(value) is bool and bool in _union_members(hint)


def _is_printable(text: str) -> bool:
    """Return whether a text is short and printable, hence one line that UTF-8 and TOML can represent."""
    return len(text) <= MAX_STRING and text.isprintable()


def _expected(hint: Any) -> str:
    """Return the part of a message that lists the values of a type: "expected … or …"."""
    members = _union_members(hint)
    words = [quote(c) for c in _choices(hint)]
    words += ["true", "false"] if bool in members else []
    words += [f"an integer from 1 to {MAX_SIZE}"] if int in members else []
    words += [f"a printable string of 1 to {MAX_STRING} characters"] if str in members else []
    return f"expected {words[0]}" if len(words) == 1 else f"expected {', '.join(words[:-1])} or {words[-1]}"


def _check_options(value: object, location: Location) -> Options:
    """Return XLA options, with names and values checked, sorted by name."""
    if not isinstance(value, Mapping):
        raise ProfileError(f"{location}: expected a table of XLA options, found {_describe(value)}")
    options = (
        (_check_option_name(name, location), _check_option(v, location.child(name))) for name, v in value.items()
    )
    return Options(tuple(sorted(options)))


def _check_names_table(choices: tuple[str, ...], value: Mapping[Any, Any], location: Location) -> Options:
    """Return a table of any names whose values are among `choices`, sorted by name."""
    entries = []
    for name, item in value.items():
        if type(name) is not str or not name or not _is_printable(name):
            raise ProfileError(f"{location}: expected printable strings as keys, found {_describe(name)}")
        entries.append((name, str(_check_value(None, Literal[choices], item, location.child(name)))))
    return Options(tuple(sorted(entries)))


def _check_option_name(name: object, location: Location) -> str:
    """Return the name of an XLA option, checked."""
    if isinstance(name, str) and _OPTION_PATTERN.fullmatch(name):
        return name
    raise ProfileError(f"{location}: expected an option name of letters, digits and _, found {_describe(name)}")


def _check_option(value: object, location: Location) -> Scalar:
    """Return the value of an XLA option, checked."""
    # Exact types, here and above: a subclass (an IntEnum, a NumPy float) would not be equal after a round trip in TOML.
    if type(value) is bool or (type(value) is str and _is_printable(value)):
        return value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise ProfileError(
        f"{location}: expected a boolean, a 64-bit integer, a finite number or a printable string of at most "
        f"{MAX_STRING} characters, found {_describe(value)}"
    )


def _describe(value: object) -> str:
    """Describe a value for a message, without calling the repr of a foreign type or printing a huge integer."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str:
        return f"the string {quote(value)}"
    if type(value) in _SCALARS:
        return f"the {_SCALARS[type(value)]} {str(value).lower()}"
    names = (name for kind, name in _TYPE_NAMES if isinstance(value, kind))
    return next(names, f"a value of type {type(value).__name__}")


_SCALARS = {bool: "boolean", int: "integer", float: "number"}
_TYPE_NAMES: tuple[tuple[Any, str], ...] = (
    (Mapping, "a table"), (list | tuple, "an array"), (datetime.date | datetime.time, "a date or time"),
)  # fmt: skip
