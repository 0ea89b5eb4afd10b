"""Subclasses of `Record` are frozen dataclasses, with or without the decorator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from rlx_jax.record import Record


class Plain(Record):
    name: str = field(kw_only=True)
    sizes: tuple[int, ...] = field(default_factory=tuple)
    rank: int = 0


@dataclass(frozen=True)
class Decorated(Record):
    name: str = field(kw_only=True)
    sizes: tuple[int, ...] = field(default_factory=tuple)
    rank: int = 0


@pytest.mark.parametrize("cls", [Plain, Decorated])
def test_a_subclass_is_a_frozen_dataclass(cls: type[Plain] | type[Decorated]) -> None:
    record = cls((1,), 2, name="a")
    assert record == cls((1,), 2, name="a") and hash(record) == hash(cls((1,), 2, name="a"))
    assert dataclasses.astuple(cls(name="b")) == ("b", (), 0)
    assert dataclasses.replace(record, rank=3).sizes == (1,)
    with pytest.raises(dataclasses.FrozenInstanceError, match="rank"):
        record.rank = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="rank"):
        del record.rank


def test_a_subclass_may_compare_by_identity() -> None:
    class ByIdentity(Plain, eq=False):
        extra: int = 0

    record = ByIdentity(name="a")
    assert record == record != ByIdentity(name="a") and len({record, record, ByIdentity(name="a")}) == 2
