"""`Fields`: read a JSON object of untrusted origin field by field, and refuse fields that nothing reads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlx_jax.errors import ConfigError, GraphError, LimitError, UnsupportedError, did_you_mean, listing, quote, shown

T = TypeVar("T")

# The largest integer of a field without another limit, so that a malformed file does not make the process allocate or
# trace without bound.
MAX_INTEGER = 2**24

LOG = logging.getLogger("rlx_jax")

# Fields that a config may set to null to get the default.
NULLABLE = frozenset({"head_dim", "num_key_value_heads", "rope_theta"})
# Name of the option of `rlx_jax.load`, `recipe_for` and `from_pretrained`, for messages.
IGNORE_OPTION = "ignore_fields"


@dataclass
class IgnoredFields:
    """The fields of a config that the caller wants ignored, such as `sliding_window` or
    `text_config.rope_scaling.beta`.

    Attributes:
        names: the names that the caller passed.
        applied: the names among them that would otherwise be refused, collected while the config is read.
    """

    names: tuple[str, ...] = ()
    applied: list[str] = field(default_factory=list)

    def check_present(self, values: Mapping[str, Any], where: str) -> None:
        """Refuse a name that is not a field of `values`.

        Raises:
            ConfigError: the message has the name, and a similar one.
        """
        for name in self.names:
            (*groups, leaf), inner = name.split("."), values
            for group in groups:
                nested = inner.get(group)
                inner = nested if isinstance(nested, Mapping) else {}
            # A field's name may contain a dot, such as `transformers.js_config`, so the full name counts too.
            if leaf not in inner and name not in values:
                suggestion = did_you_mean(leaf, list(map(str, inner)), cutoff=0.7)
                raise ConfigError(f"{where}: {IGNORE_OPTION}: there is no field {quote(name)}{suggestion}")

    def check_applied(self, where: str) -> None:
        """Refuse a name that ignores nothing, after the config was read.

        Raises:
            ConfigError: the field is handled anyway.
        """
        if unused := [name for name in self.names if name not in self.applied]:
            raise ConfigError(
                f"{where}: {IGNORE_OPTION}: field {quote(unused[0])} is handled: it is read, or it does not affect the "
                "forward pass; leave it out"
            )


@dataclass
class Fields:
    """A config that records which of its fields were read.

    Attributes:
        values: the content of the JSON object.
        where: file and group, for messages.
        consumed: names of the fields that were read.
        ignored: the caller's `ignore_fields`; None if these fields are not from the config.json that is being loaded.
        prefix: prefix of the full names of the fields in a nested object, such as `text_config.`.
    """

    values: Mapping[str, Any]
    where: str
    consumed: set[str] = field(default_factory=set)
    ignored: IgnoredFields | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ConfigError(
                f"{self.where}: expected the content of config.json, a mapping, as to_dict() of transformers' "
                f"configurations; got {shown(self.values)}"
            )

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value without a check; for a missing field and for null, the default."""
        self.consumed.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def _get_value(self, name: str, default: Any, kind: str) -> Any:
        """Return the value or the default, and refuse null and a missing field without a default.

        Null is accepted only for the `NULLABLE` fields, which the reference itself writes as null.
        """
        if name in self.values and self.values[name] is None and name not in NULLABLE:
            raise self.invalid(name, "a value", "null")
        value = self.raw(name, default)
        if value is None:
            suggestion = did_you_mean(name, [str(k) for k in self.values if k not in self.consumed], cutoff=0.85)
            raise ConfigError(f"{self.where}: field {quote(name)} is missing; expected {kind}{suggestion}")
        return value

    def invalid(self, name: str, expected: str, value: Any) -> ConfigError:
        """Return the error for a field with an unexpected value."""
        text = value if value == "null" else quote(value)
        return ConfigError(f"{self.where}: field {quote(name)} is {text}; expected {expected}")

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Return an integer in `[low, high]`."""
        value = self._get_value(name, default, "an integer")
        # bool is a subclass of int in Python, but true is not a number in a config.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(name, "an integer", value)
        if value < low:
            raise self.invalid(name, f"at least {low}", value)
        if value > high:
            raise LimitError(f"{self.where}: field {quote(name)} is {quote(value)}; the limit is {high}")
        return value

    def integer_or_null(self, name: str, default: int | None, high: int = MAX_INTEGER) -> int | None:
        """Return an integer in `[1, high]`, or None for null; the default for a missing field."""
        return None if self._is_null(name, default) else self.integer(name, default, high=high)

    def pair(self, name: str, default: int | None = None, high: int = 2**16) -> tuple[int, int]:
        """Return height and width: one integer in `[1, high]` for both, or a list of two."""
        value = self._get_value(name, default, "an integer")
        if not isinstance(value, list | tuple):
            side = self.integer(name, default, high=high)
            return side, side
        if len(value) != 2:
            raise self.invalid(name, "one integer or two", value)
        height, width = (Fields({name: side}, self.where).integer(name, high=high) for side in value)
        return height, width

    def real(self, name: str, default: float | None = None, low: float = 0.0, exclusive: bool = True) -> float:
        """Return a finite number greater than `low`, or at least `low` if not `exclusive`."""
        value = self._get_value(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.invalid(name, "a finite number", value)
        if value < low or (exclusive and value == low):
            raise self.invalid(name, f"{'over' if exclusive else '≥'} {low}", value)
        return float(value)

    def real_or_null(self, name: str, default: float | None) -> float | None:
        """Return a finite number over 0, or None for null; the default for a missing field."""
        return None if self._is_null(name, default) else self.real(name, default)

    def _is_null(self, name: str, default: Any) -> bool:
        """Return whether a field is null, or is missing and has no default."""
        self.consumed.add(name)
        return self.values.get(name, default) is None

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return self._typed(name, default, bool, "true or false")

    def with_defaults(self, config: type[Any], *names: str, **fields: str) -> dict[str, Any]:
        """Return attributes of a config class, each read with the type (bool, int or float) and value of its default.

        A field has the name of its attribute, or the name that `fields` gives it.
        """
        readers: dict[type, Callable[..., Any]] = {bool: self.flag, int: self.integer, float: self.real}
        attributes = {**{name: name for name in names}, **fields}
        for name in attributes:
            kind = type(getattr(config, name, None))
            if kind not in readers:
                known = "a default of type bool, int or float"
                raise GraphError(
                    f"{config.__name__}: fields has {quote(name)}, an attribute "
                    + (f"with a default of type {kind.__name__}; " if hasattr(config, name) else "without a default; ")
                    + f"expected {known}; read other fields in `read`"
                )
        return {n: readers[type(getattr(config, n))](field, getattr(config, n)) for n, field in attributes.items()}

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return self._typed(name, default, str, "a string")

    def _typed(self, name: str, default: T | None, kind: type[T], expected: str) -> T:
        """Return a value of a type."""
        value = self._get_value(name, default, expected)
        if not isinstance(value, kind):
            raise self.invalid(name, expected, value)
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """Return the value that `choices` maps a string to.

        Raises:
            UnsupportedError: the string is not among the choices.
        """
        value = self.text(name, default)
        if value not in choices:
            raise UnsupportedError(
                f"{self.where}: field {quote(name)} is {quote(value)}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def items(
        self, name: str, default: Sequence[Any], what: str, fits: Callable[[Any], bool], count: int | None = None
    ) -> list[Any]:
        """Return a list of items that all satisfy `fits`.

        Args:
            name: the field.
            default: value for a missing field.
            what: description of the items, for messages.
            fits: predicate of an item.
            count: required length; None: any.
        """
        values = self.raw(name, default)
        is_list = isinstance(values, list | tuple) and count in (None, len(values))
        if not is_list or not all(map(fits, values)):
            raise self.invalid(name, f"a list of {'' if count is None else f'{count} items: '}{what}", values)
        return list(values)

    def kinds(self, name: str, default: Sequence[str], choices: Mapping[str, T]) -> tuple[T, ...]:
        """Return a list with one entry per layer, each mapped by `choices`; it has the length of the default.

        Raises:
            UnsupportedError: an entry is not among the choices.
        """
        count = len(default)
        kinds = self.items(name, default, "strings, one for each layer", lambda kind: True, count)
        for kind in kinds:
            if kind not in list(choices):  # a list, because an entry may be unhashable
                raise UnsupportedError(
                    f"{self.where}: field {quote(name)} has {quote(kind)}; supported are {', '.join(choices)}"
                )
        return tuple(choices[kind] for kind in kinds)

    def group(self, name: str) -> Fields | None:
        """Return the fields of a nested object; None if it is missing or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "an object", value)
        return Fields(value, f"{self.where}, {name}", ignored=self.ignored, prefix=f"{self.prefix}{name}.")

    def finish(self, inert: Iterable[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse every field that was not read and is not known to be harmless. Null is always harmless.

        Args:
            inert: names of fields that are harmless at any value.
            neutral: fields that are harmless at some values.

        Raises:
            UnsupportedError: names the fields.
        """
        refused = self.unread(set(inert), neutral or {})
        skipped = [name for name in self.values if name not in self.consumed and name not in refused]
        if self.ignored is not None:
            ignored = [name for name in refused if f"{self.prefix}{name}" in self.ignored.names]
            self.ignored.applied += [f"{self.prefix}{name}" for name in ignored]
            refused = [name for name in refused if name not in ignored]
        if refused:
            raise UnsupportedError(self._refusal(refused))
        if skipped:
            LOG.debug("%s: fields without a part in the forward pass: %s", self.where, ", ".join(map(quote, skipped)))

    def unread(self, inert: set[str], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Return the fields that were not read and may change the computation. Arguments as in `finish`."""

        def is_harmless(name: str, value: Any) -> bool:  # the type counts because 1 == True in Python
            return (
                value is None
                or name in inert
                or any((value, type(value)) == (v, type(v)) for v in neutral.get(name, ()))
            )

        return [n for n, value in self.values.items() if n not in self.consumed and not is_harmless(n, value)]

    def _refusal(self, names: Sequence[str]) -> str:
        """Return the message about fields that nothing reads."""
        key, *others = names
        others_text = f"; nor {'is' if len(others) == 1 else 'are'} {listing(others)}" if others else ""
        text = (
            f"{self.where}: field {quote(key)} is {quote(self.values[key])}; it may change the computation and is "
            f"not handled{others_text}{did_you_mean(key, self.consumed - self.values.keys(), cutoff=0.85)}"
        )
        name = f"{self.prefix}{key}"
        return (
            text
            if self.ignored is None
            else f"{text}; if it does not change the forward pass: {IGNORE_OPTION}=[{name!r}]"
        )
