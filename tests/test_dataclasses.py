"""`rlx_jax.dataclasses`: its classes behave as those of the standard library."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx_jax.dataclasses as ours


def define(dataclass: Callable[..., Any]) -> list[Any]:
    @dataclass(frozen=True)
    class Empty: ...

    @dataclass(frozen=True)
    class One:
        x: Any

    @dataclass(frozen=True)
    class Two(One):
        y: Any = dataclasses.field(default=2, compare=False)
        z: Any = dataclasses.field(default=3, hash=False, repr=False)

    @dataclass(frozen=True)
    class Own:
        x: Any

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

    @dataclasses.dataclass(frozen=True)
    class Below(Two):
        w: Any = 4

    one = One(1)
    nan = np.array([np.nan])
    return [
        Empty(), one, One(1), One(1.0), One(nan), One(nan), One("1"), Two(1), Two(1, 5), Two(1, 2, 4), Own(1), Own(2),
        Below(1), Below(1, w=5),
    ]  # fmt: skip


def test_methods_equal_the_standard_ones() -> None:
    got, want = define(ours.dataclass), define(dataclasses.dataclass)

    def pairs(values: list[Any]) -> list[bool]:
        return [a == b for a in values for b in values]

    assert pairs(got) == pairs(want)
    assert [repr(x) for x in got] == [repr(x) for x in want]
    assert equal_hashes(got) == equal_hashes(want)
    for value in got[1:]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.x = 2
        assert dataclasses.replace(value, x=7).x == 7


def equal_hashes(values: list[Any]) -> list[bool]:
    hashes = [hash(value) for value in values if not isinstance(getattr(value, "x", None), np.ndarray)]
    return [a == b for a in hashes for b in hashes]


def test_recursion_and_pickles() -> None:
    value = Node([])
    value.children.append(value)
    assert repr(value) == "Node(children=[...])"
    assert pickle.loads(pickle.dumps(Node([1]))) == Node([1])


@ours.dataclass(frozen=True)
class Node:
    children: list[Any]
