"""What is true of an op, written on its class: passes, plan and reports choose by it, and none of them lists classes.

Nothing here has a default. An op that leaves a fact open is an error when it is defined, so that no pass narrows, moves
or counts it by a rule that was never meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlx_jax.errors import GraphError
from rlx_jax.ir.types import TensorType

Types = Sequence[TensorType]
# From an op, the static types of its operands and of its results: a number of operations or bytes.
Count = Callable[[Any, Types, Types], int]

# Products and whatever else is worth a narrow dtype; sums over many values; functions of elements; what moves values;
# what writes the state in place, which has its own dtype.
Numeric = Literal["compute", "reduction", "elementwise", "movement", "state"]


def nothing(op: Any, operands: Types, results: Types) -> int:
    """None."""
    return 0


def each_once(op: Any, operands: Types, results: Types) -> int:
    """Every operand is read once, every result written once."""
    return sum(t.nbytes for t in (*operands, *results))


def results_moved(op: Any, operands: Types, results: Types) -> int:
    """What is kept of the first operand is read and written; the others, such as indices, are read."""
    return 2 * sum(t.nbytes for t in results) + sum(t.nbytes for t in operands[1:])


def results_written(op: Any, operands: Types, results: Types) -> int:
    """Operands give a shape alone."""
    return sum(t.nbytes for t in results)


def first_moved(op: Any, operands: Types, results: Types) -> int:
    """The first operand is read; the others lend their sizes alone."""
    return operands[0].nbytes + results[0].nbytes


ViewOffset = Callable[[Any, Types, Types], int | None]


@dataclass(frozen=True)
class Traits:
    """Of a tensor op.

    numeric: its class, which `precision.mixed` chooses a dtype for.
    narrows: how many of its first operands take that dtype; None: all. Masks and tables keep their range.
    widens: where one operand has to stay f32 (logits, tables), the op runs in f32; if not, all are cast to the compute
        dtype.
    pinned: it has a field `precision`, for the algorithm of its products.
    flops: multiply-adds × 2 of its contractions. bytes: what it reads and writes, run alone.
    workspace: scratch memory beside operands and results.
    view: how many bytes into its first operand the result begins, where it is a part of it; None where it is not.
    writes: the (result, operand) whose memory is one where the operand is a state leaf that is donated.
    stored: it can be written as JSON: attributes that are values.
    """

    numeric: Numeric
    narrows: int | None
    widens: bool
    pinned: bool
    flops: Count
    bytes: Count
    workspace: Count
    view: ViewOffset
    writes: tuple[tuple[int, int], ...]
    stored: bool


# Facts that several ops share; an op may replace some (`dataclasses.replace`).
ELEMENTWISE = Traits(
    "elementwise", narrows=None, widens=True, pinned=False, flops=nothing, bytes=each_once, workspace=nothing,
    view=lambda op, operands, results: None, writes=(), stored=True,
)  # fmt: skip
REDUCTION = replace(ELEMENTWISE, numeric="reduction")
NORM = replace(REDUCTION, widens=False)
MOVEMENT = replace(ELEMENTWISE, numeric="movement")
TOKENS = replace(MOVEMENT, widens=False, bytes=results_moved)
STATE = replace(ELEMENTWISE, numeric="state", narrows=0, widens=False, writes=((0, 0),))


def product_traits(flops: Count) -> Traits:
    """A product with a field `precision`."""
    return replace(ELEMENTWISE, numeric="compute", widens=False, pinned=True, flops=flops)


@dataclass(frozen=True)
class BlockTraits:
    """Of a block.

    composite: it expands into other blocks, before programs are derived.
    keeps_f32: it takes f32 tables beside other operands, or makes them: a compute dtype leaves its operands alone.
    stored: it can be written as JSON.
    """

    composite: bool
    keeps_f32: bool
    stored: bool


# Most blocks; those that expand into blocks; those that read or make rotary tables and positions.
BLOCK = BlockTraits(composite=False, keeps_f32=False, stored=True)
COMPOSITE = BlockTraits(composite=True, keeps_f32=False, stored=True)
TABLES = BlockTraits(composite=False, keeps_f32=True, stored=True)


@dataclass(frozen=True)
class Normal:
    """Normal numbers with deviation 1/√`fan_in`."""

    fan_in: int


# How a random weight is drawn: every entry the same number, or normal.
Initial = float | Normal


def check_traits(cls: type[Any], kind: type[Any], example: str) -> None:
    """A class says what is true of its ops.

    Raises:
        GraphError: it does not; raised where the class is defined.
    """
    if not isinstance(cls.__dict__.get("traits"), kind):
        raise GraphError(
            f"{cls.__module__}.{cls.__qualname__}: an op says what is true of it, and leaves nothing open: "
            f"traits = {kind.__name__}(…), or one of those in rlx_jax/ir/traits.py, such as {example}"
        )
