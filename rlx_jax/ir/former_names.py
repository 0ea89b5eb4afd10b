"""`former_names`: keep the former names of renamed fields and methods for one version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def former_names(**names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that keeps former names of fields and methods, as arguments and as attributes.

    Args:
        names: former name → present name.

    Warns:
        DeprecationWarning: a former name is used.
    """

    def decorate(cls: type[T]) -> type[T]:
        original_init: Callable[..., None] = cls.__init__

        @functools.wraps(original_init)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            for former in names.keys() & kwargs.keys():
                _warn(cls, former, names[former])
                kwargs[names[former]] = kwargs.pop(former)
            original_init(self, *args, **kwargs)

        setattr(cls, "__init__", init)  # noqa: B010  (an assignment is an error for type checkers)
        for former, present in names.items():
            setattr(cls, former, property(functools.partial(_read, cls, former, present)))
        return cls

    return decorate


def _read(cls: type, former: str, present: str, value: object) -> Any:
    """Return the field or method of a former name."""
    _warn(cls, former, present)
    return getattr(value, present)


def _warn(cls: type, former: str, present: str) -> None:
    """Warn that a field has another name now."""
    warnings.warn(f"{cls.__name__}.{former} is now {present}", DeprecationWarning, stacklevel=3)
