"""`Record`, the base of families of frozen dataclasses: ops, configs and recipes."""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Every subclass becomes a frozen dataclass, which its class statement may compare by identity (`eq=False`).

    The decorator `@dataclass(frozen=True)` changes nothing on a subclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, eq: bool = True) -> None:
        super().__init_subclass__()
        specifiers = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True)(cls)
        if not eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]
        # A subclass may have the decorator too. It refuses a class that defines these two methods, and it reads the
        # calls of `field` again, of which `dataclass` leaves only the default.
        del cls.__setattr__, cls.__delattr__
        for name, specifier in specifiers.items():
            if specifier.default is MISSING:
                setattr(cls, name, specifier)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")
