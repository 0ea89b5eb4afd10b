"""`rlx_jax.dataclasses`: its classes behave as those of the standard library."""

import dataclasses
import inspect
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

    @dataclass(frozen=True)
    class Under(Below): ...

    @dataclass(frozen=True)
    class Negative(Two):
        v: Any = dataclasses.field(default_factory=tuple, kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "x", -self.x)

    class Plain(Two):
        def __init__(self) -> None:
            super().__init__(8)

    one = One(1)
    nan = np.array([np.nan])
    return [
        Empty(), one, One(1), One(1.0), One(nan), One(nan), One("1"), Two(1), Two(1, 5), Two(1, 2, 4), Own(1), Own(2),
        Below(1), Below(1, w=5), Under(2), Negative(1), Negative(1, v=5), Plain(),
    ]  # fmt: skip


def test_methods_equal_the_standard_ones() -> None:
    got, want = define(ours.dataclass), define(dataclasses.dataclass)

    def pairs(values: list[Any]) -> list[bool]:
        return [a == b for a in values for b in values]

    assert pairs(got) == pairs(want)
    assert [repr(x) for x in got] == [repr(x) for x in want]
    assert equal_hashes(got) == equal_hashes(want)
    assert [str(inspect.signature(type(x))) for x in got] == [str(inspect.signature(type(x))) for x in want]
    assert [type(x).__match_args__ for x in got] == [type(x).__match_args__ for x in want]
    for value in got[1:]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.x = 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            del value.x
    assert [dataclasses.replace(value, x=7).x for value in got[1:-3]] == [7] * (len(got) - 4)


def test_a_class_that_is_not_frozen_below_one_that_is() -> None:
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        ours.dataclass(type("Below", (Node,), {}))
    with pytest.raises(TypeError, match=r"Node\.__init__\(\).*'children'"):
        Node()  # type: ignore[call-arg]


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
