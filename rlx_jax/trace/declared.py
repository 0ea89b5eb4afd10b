"""What a flow says of weights by their keys, whatever stage reads them: `flow.param`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import GraphError, did_you_mean, shown
from rlx_jax.ir.inits import Init as Init
from rlx_jax.trace.checks import check_init
from rlx_jax.trace.selecting import BlockPattern


@dataclass(frozen=True)
class WeightDecl:
    """Of every weight whose key a glob matches, the shape as it is stored, how it is drawn, or both.

    Raises:
        GraphError: it says nothing, or what is no shape or no init.
    """

    keys: BlockPattern
    shape: tuple[int, ...] | None = None
    init: Init | None = None

    def __post_init__(self) -> None:
        if self.shape is None and self.init is None:
            raise GraphError(f"{self}: say its shape=, its init=, or both")
        sizes = self.shape if self.shape is not None else ()
        if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise GraphError(f"{self}: shape is {shown(self.shape)}; expected a tuple of sizes, such as (64, 32)")
        if self.init is not None:
            check_init(self.init, str(self))

    @staticmethod
    def of(pattern: str, shape: Sequence[int] | None, init: Init | None) -> WeightDecl:
        """As `flow.param` takes it."""
        sizes: Any = tuple(shape) if isinstance(shape, list) else shape
        return WeightDecl(BlockPattern(pattern, "param"), sizes, init)

    def matches(self, key: str) -> bool:
        """Whether it is about the weight under a key."""
        return self.keys.matches(tuple(key.split(".")))

    def __str__(self) -> str:
        return f"param({self.keys.text!r})"


def says_shape(declared: Sequence[WeightDecl], key: str) -> WeightDecl | None:
    """The last that says the shape of a weight."""
    return next((d for d in reversed(declared) if d.shape is not None and d.matches(key)), None)


def declared_init(declared: Sequence[WeightDecl], key: str) -> Init | None:
    """What the last that knows it says."""
    return next((d.init for d in reversed(declared) if d.init is not None and d.matches(key)), None)


def check_declared(declared: Sequence[WeightDecl], keys: Iterable[str], where: str) -> None:
    """Every declaration is about a weight that is read.

    Raises:
        GraphError: one is not; the message has keys near it.
    """
    known = list(keys) if declared else []
    for decl in declared:
        if not any(map(decl.matches, known)):
            near = did_you_mean(decl.keys.text, known, alike=0.7)
            raise GraphError(f"{where}: {decl} matches no weight that a stage reads{near}")
