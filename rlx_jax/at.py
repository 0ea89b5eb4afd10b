"""`at`: changes to a flow's blocks by their paths, for flows and for recipes alike.

recipe.at("layers.*.self_attn").capture()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from rlx_jax.blocks.control import BlockStage, check_stages, run_stage
from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Constant, Value, constant
from rlx_jax.ir.types import as_name, is_static
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.boundaries import HeadsAround
from rlx_jax.trace.editing import BlockEdit, BlockWrapper, CapturedBlock, Inner
from rlx_jax.trace.emit import Emit, FlowValue, read_numbers

T = TypeVar("T")


@dataclass(frozen=True)
class SelectedBlocks(Generic[T]):
    """The blocks of a flow or recipe that a pattern matches. Each method returns the changed flow or recipe.

    Changes are made when the flow is built, in their order: a later one finds the blocks as the earlier ones left them,
    in the forward program and in all that is derived from it. A pattern that matches no block is an error then.
    """

    pattern: BlockPattern
    edited: Callable[[BlockEdit], T]

    def wrap(self, fn: BlockWrapper) -> T:
        """Write `fn(emit, x, inner)` instead of each block: x is what it takes, `inner(x)` what it returns.

        x is the block's active value, the one that the flow hands to its stage; other values stay as they are. A part
        of a stage takes the value that it says, `emit.block_input(x)`, or the only one that it reads, weights aside.
        """
        if not callable(fn):
            raise GraphError(f"wrap: expected a function (emit, x, inner) → value, got {shown(fn)}")
        return self._edit(fn)

    def replace(self, stage: BlockStage) -> T:
        """Put a stage in the place of each block, whose weights may stay in the checkpoint, or be missing."""
        (found,) = check_stages([stage], "replace")
        return self._edit(Replaced(found))

    def capture(self, *, stacked: bool = False) -> T:
        """Make what each block returns a side output of the flow, under the block's path.

        A block that returns several values, such as rotary tables, has an output for each, `rotary_emb[0]` and so on.
        With `stacked` the values are one, `[blocks, …]`, in the order of the flow and under the pattern, if all are of
        one type. Layers stay one region either way.
        """
        if not isinstance(stacked, bool):
            raise GraphError(f"capture: stacked is {shown(stacked)}; expected True or False")
        return self._edit(CapturedBlock(self.pattern.text if stacked else ""))

    def scale(self, by: Any, *, of: Literal["output", "input"] = "output", heads: int | None = None) -> T:
        """Multiply what each block returns, or what it takes, by a number, an array, or the flow's input of that name.

        Axes stand behind each other as in NumPy, from the last. An optional input that a call leaves out scales
        nothing.

        Args:
            by: a number, an array that becomes part of the program, or the name of a declared input.
            of: `"output"` of the block or its `"input"`.
            heads: the last axis is that of so many heads, side by side, and the last of `by` has one number for each.
                Another number than attention has is refused when the flow is built.
        """
        if of not in ("output", "input"):
            raise GraphError(f"scale: of is 'output' or 'input', got {shown(of)}")
        if heads is not None and (type(heads) is not int or heads < 1):
            raise GraphError(f"scale: heads is a number of heads, got {shown(heads)}")
        factor: str | Constant = as_name(by, "scale") if isinstance(by, str) else _numbers(by)
        return self._edit(Scaled(factor, of == "input", heads), takes_input=of == "input")

    def _edit(self, wrapper: BlockWrapper, takes_input: bool = True) -> T:
        return self.edited(BlockEdit(self.pattern, wrapper, takes_input))


def _numbers(by: Any) -> Constant:
    if isinstance(by, FlowValue):
        raise GraphError("scale: a value of a flow scales inside of it: wrap(lambda emit, x, inner: inner(x) * value)")
    factor = constant(read_numbers(by, "scale"), np.float32)
    if not np.isfinite(factor.array).all():
        raise GraphError("scale: the factor has numbers that are not finite")
    return factor


# -- what stands in the place of a block ---------------------------------------------------------


@dataclass(frozen=True)
class Replaced:
    """A stage."""

    stage: BlockStage

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        made = run_stage(self.stage, emit, x)
        return emit.require(x if made is None else made, "replace")


@dataclass(frozen=True)
class Scaled:
    """The block with its value, or what it reads, times a factor."""

    factor: str | Constant
    of_input: bool
    heads: int | None

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        if self.of_input:
            return inner(self._times(emit, emit.require(x, "scale")))
        return self._times(emit, inner(x))

    def check_block(self, around: HeadsAround, read: Value | None, given: Value, where: str) -> None:
        """The heads are those that attention, or whatever else splits the value, has.

        Raises:
            ShapeError: it has another number of them, or nothing reads or makes it as heads.
        """
        value, does = (read, "reads") if self.of_input else (given, "gives")
        if self.heads is None or value is None:
            return
        found, what = around.of(value), f"what the block {does}, {around.type(value)},"
        if found.known and self.heads not in found.known:
            known = " or ".join(map(str, sorted(found.known)))
            raise ShapeError(f"{where}: scale: {what} has {known} heads, not {self.heads}: give heads={known}")
        if not found.known and not found.unread:
            raise ShapeError(
                f"{where}: scale: heads={self.heads}, and {what} is not heads side by side. The projection behind "
                f"attention reads heads: at('layers.*.self_attn.o_proj').scale(by, of='input', heads={self.heads})"
            )

    def _times(self, emit: Emit, x: FlowValue) -> FlowValue:
        if isinstance(self.factor, str):
            factor = emit.optional_input(self.factor)
        else:
            factor = emit.wrap(emit.builder.leaf(self.factor))
        if factor is None:
            return x
        if self.heads is None:
            made = x * factor
        else:
            wide = x.type.shape[-1]
            if not is_static(wide) or wide % self.heads:
                raise ShapeError(f"{emit.path}: scale: {x.type} is not whole in {self.heads} heads")
            if factor.type.shape[-1:] != (self.heads,):
                raise ShapeError(f"{emit.path}: scale: of {self.heads} heads, the factor is {factor.type}")
            split = x.reshape(*x.shape[:-1], self.heads, -1) * factor.reshape(*factor.shape, 1)
            made = split.reshape(x.shape)
        if made.type != x.type:
            raise ShapeError(f"{emit.path}: scale: {factor.type} times {x.type} is {made.type}; expected {x.type}")
        return made
