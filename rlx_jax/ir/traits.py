"""Traits of ops, declared on the op class. Passes, plan and reports decide by traits instead of lists of classes.

Traits have no defaults. A class without them is an error when it is defined, so that no pass narrows, moves or counts
an op by a rule that was not meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlx_jax.errors import GraphError
from rlx_jax.ir.types import TensorType

Types = Sequence[TensorType]
# `(op, operand types, result types) → number of operations or bytes`; the types are static.
Count = Callable[[Any, Types, Types], int]

# compute: products, and other ops that a narrow dtype speeds up; reduction: sums over many values; elementwise:
# functions of single elements; movement: ops that only move values; state: writes of the state in place, in its dtype.
Numeric = Literal["compute", "reduction", "elementwise", "movement", "state"]


def zero(op: Any, operands: Types, results: Types) -> int:
    """Return 0."""
    return 0


def all_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads every operand once and writes every result once."""
    return sum(t.nbytes for t in (*operands, *results))


def results_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that copies a part of its first operand and reads the others, such as indices."""
    return 2 * sum(t.nbytes for t in results) + sum(t.nbytes for t in operands[1:])


def results_written(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads only the shapes of its operands."""
    return sum(t.nbytes for t in results)


def first_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads its first operand and only the shapes of the others."""
    return operands[0].nbytes + results[0].nbytes


ViewOffset = Callable[[Any, Types, Types], int | None]


@dataclass(frozen=True)
class Traits:
    """Traits of a tensor op.

    Attributes:
        numeric: the numeric class, for which `precision.mixed` chooses a dtype.
        narrows: the number of leading operands that are cast to that dtype; None means all. Masks and tables keep their
            dtype, because they need its range.
        widens: whether the op runs in f32 if one operand must stay f32 (logits, tables). Otherwise all operands are
            cast to the compute dtype.
        pinned: whether the op has a field `precision`, for the algorithm of its products.
        flops: returns 2 × the multiply-adds of its contractions.
        bytes: returns the bytes that the op reads and writes if it is not fused with others.
        workspace: returns the bytes of scratch memory in addition to operands and results.
        view: returns the byte offset of the result in the first operand if the result is a contiguous part of it;
            otherwise None.
        writes: pairs (result, operand) that share memory if the operand is a donated state leaf.
        stored: whether the op can be serialized to JSON, because its attributes are plain values.
        size_dependent: whether `eval` compares a size with a number, so that result types may differ from the symbolic
            ones for some sizes.
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
    size_dependent: bool


# Common traits; an op may change some of them (`dataclasses.replace`).
ELEMENTWISE = Traits(
    "elementwise", narrows=None, widens=True, pinned=False, flops=zero, bytes=all_moved, workspace=zero,
    view=lambda op, operands, results: None, writes=(), stored=True, size_dependent=False,
)  # fmt: skip
REDUCTION = replace(ELEMENTWISE, numeric="reduction")
NORM = replace(REDUCTION, widens=False)
MOVEMENT = replace(ELEMENTWISE, numeric="movement")
TOKENS = replace(MOVEMENT, widens=False, bytes=results_moved)
STATE = replace(ELEMENTWISE, numeric="state", narrows=0, widens=False, writes=((0, 0),))


def product_traits(flops: Count) -> Traits:
    """Return the traits of a matrix product with a field `precision`, given its `flops`."""
    return replace(ELEMENTWISE, numeric="compute", widens=False, pinned=True, flops=flops)


@dataclass(frozen=True)
class BlockTraits:
    """Traits of a block.

    Attributes:
        composite: whether the block expands into other blocks, before programs are derived.
        keeps_f32: whether the block reads or returns f32 tables, so that a compute dtype does not apply to its
            operands.
        stored: whether the block can be serialized to JSON.
    """

    composite: bool
    keeps_f32: bool
    stored: bool


# For most blocks; for blocks that expand into blocks; for blocks that read or return rotary tables and positions.
BLOCK = BlockTraits(composite=False, keeps_f32=False, stored=True)
COMPOSITE = BlockTraits(composite=True, keeps_f32=False, stored=True)
TABLES = BlockTraits(composite=False, keeps_f32=True, stored=True)


@dataclass(frozen=True)
class Normal:
    """A normal distribution with mean 0 and standard deviation 1/√`fan_in`."""

    fan_in: int


# The initialization of a weight: a constant, or a normal distribution.
Initial = float | Normal


def check_traits(cls: type[Any], kind: type[Any], example: str) -> None:
    """Check that a class declares its traits itself.

    Raises:
        GraphError: it does not. `__init_subclass__` calls this, so that the definition of the class raises.
    """
    # Inherited traits do not count: a subclass may compute something else.
    if not isinstance(cls.__dict__.get("traits"), kind):
        raise GraphError(
            f"{cls.__module__}.{cls.__qualname__}: an op declares all of its traits itself: "
            f"traits = {kind.__name__}(…), or one of those in rlx_jax/ir/traits.py, such as {example}"
        )
