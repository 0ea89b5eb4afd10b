"""The standard library's `dataclasses`, with a decorator that is faster for frozen classes, to import from here."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from dataclasses import asdict as asdict
from dataclasses import field as field
from dataclasses import fields as fields
from dataclasses import is_dataclass as is_dataclass
from dataclasses import replace as replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """Return what `dataclasses.dataclass` does; a class without a docstring gets none.

        That compiles six methods for each frozen class, and for the classes of this package took most of the time of
        the import. Here five of them are functions that all classes share, and `__init__` is compiled when it is used.
        """
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        params = [vars(base).get("__dataclass_params__", _shared_params) for base in cls.__mro__[1:]]
        if options != {"frozen": True} or any(base is not _shared_params for base in params):
            return dataclasses.dataclass(cls, **options)
        defined = dict(vars(cls))
        if defined.get("__hash__") is None:  # as Python sets it in a class that defines `__eq__`
            defined.pop("__hash__", None)
        cls.__doc__ = cls.__doc__ or " "  # else it is made from the signature
        _shared_params.frozen = False
        try:
            dataclasses.dataclass(cls, init=False, eq=False, repr=False)
        finally:
            _shared_params.frozen = True
        cls.__dataclass_params__, cls.__doc__ = _shared_params, defined["__doc__"]
        members = fields(cls)
        names = frozenset(member.name for member in members)
        compared = values_getter([member.name for member in members if member.compare])
        hashed = values_getter([m.name for m in members if (m.compare if m.hash is None else m.hash)])
        shown = [member.name for member in members if member.repr]

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if type(self) is cls or name in names:
                raise FrozenInstanceError(f"cannot assign to field {name!r}")
            super(cls, self).__setattr__(name, value)

        def __delattr__(self: Any, name: str) -> None:
            if type(self) is cls or name in names:
                raise FrozenInstanceError(f"cannot delete field {name!r}")
            super(cls, self).__delattr__(name)

        def __eq__(self: Any, other: object) -> Any:
            return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

        def __hash__(self: Any) -> int:
            return hash(hashed(self))

        @recursive_repr()
        def __repr__(self: Any) -> str:
            return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

        if "__init__" not in defined:
            cls.__init__ = _CompiledInit(cls)
        for method in (__setattr__, __delattr__, __eq__, __hash__, __repr__):
            if method.__name__ not in defined:
                method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                setattr(cls, method.__name__, method)
        return cls


class _SharedParams(threading.local):
    """The parameters of all these classes. `frozen` is false in a thread that adds fields to a class below them: the
    standard library compiles methods for a class that is frozen, and refuses one that is not below one that is."""

    frozen = init = repr = eq = match_args = True
    order = unsafe_hash = kw_only = slots = weakref_slot = False


_shared_params = _SharedParams()


class _CompiledInit:
    """The `__init__` of a class, until it is looked up."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __get__(self, instance: Any, owner: type) -> Any:
        members: dict[str, Any] = {member.name: member for member in fields(self.cls)}
        annotations = {name: member.type for name, member in members.items()}
        body = {"__doc__": self.cls.__name__, "__annotations__": annotations, **members}
        for name in ("__module__", "__qualname__", "__post_init__"):
            if hasattr(self.cls, name):
                body[name] = getattr(self.cls, name)
        standard: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(type(self.cls.__name__, (), body))
        setattr(self.cls, "__init__", standard.__init__)  # noqa: B010
        return standard.__init__ if instance is None else standard.__init__.__get__(instance)


def values_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)
