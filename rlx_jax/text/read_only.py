"""Tables of an object that several models share, which refuse edits."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReadOnlyDict(dict[K, V]):
    """A dict that cannot be edited; it can be copied, also by `copy` and `pickle`.

    Args:
        entries: the entries, which are copied.
        advice: the message of the error that an edit raises.
    """

    advice: str

    def __init__(self, entries: Any, advice: str) -> None:
        super().__init__(entries)
        self.advice = advice

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        """Raise a TypeError with the advice."""
        raise TypeError(self.advice)

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self), self.advice)


def freeze_tables(owner: Any, place: str, *names: str) -> None:
    """Make tables of a frozen dataclass read-only, in its `__post_init__`.

    Args:
        owner: the instance.
        place: how users refer to it, in the message.
        names: the fields that hold tables.
    """
    for name in names:
        advice = f"{name} is read-only: {place} = dataclasses.replace({place}, {name}={{…}}) changes it"
        object.__setattr__(owner, name, ReadOnlyDict(getattr(owner, name), advice))
