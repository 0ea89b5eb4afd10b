"""`SelectedBlocks`, the result of `at`: changes to blocks of a flow or recipe, selected by their paths.

recipe.at("layers.*.self_attn").capture()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from rlx_jax.blocks.control import BlockStage, check_stages, run_stage
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, ShapeError, did_you_mean, listing, shown
from rlx_jax.ir.graph import Constant, Value, constant
from rlx_jax.ir.types import as_name, is_static
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.captures import CAPTURES, CapturedBlock, HeadCounter
from rlx_jax.trace.editing import BlockEdit, BlockWrapper, Inner
from rlx_jax.trace.emit import Emit, FlowValue, as_number_array

T = TypeVar("T")
CapturedValue = Literal["output", "input", "probs", "scores", "q", "k", "v"]


@dataclass(frozen=True)
class SelectedBlocks(Generic[T]):
    """The blocks of a flow or recipe that a pattern matches. Each method returns the changed flow or recipe.

    Changes apply when the flow is built, in their order: each sees the result of the earlier ones. They hold for the
    forward program and for all programs derived from it. A pattern that matches no block is an error of `build`.
    """

    pattern: BlockPattern
    apply_edit: Callable[[BlockEdit], T]

    def wrap(self, fn: BlockWrapper) -> T:
        """Replace each block by `fn(emit, x, inner)`, where x is the block's input and `inner(x)` runs the block.

        x is the block's active value, which the flow passes to its stage; other values that it reads stay as they are.
        For a part of a stage, x is the value that it declares with `emit.block_input(x)`, or else the only value that
        it reads apart from weights.
        """
        if not callable(fn):
            raise GraphError(f"wrap: expected a function (emit, x, inner) → value, got {shown(fn)}")
        return self._edit(fn)

    def replace(self, stage: BlockStage) -> T:
        """Replace each block by a stage. The weights of the block may be in the checkpoint or missing."""
        (checked_stage,) = check_stages([stage], "replace")
        return self._edit(Replaced(checked_stage))

    def capture(self, value: CapturedValue = "output", *, stacked: bool = False) -> T:
        """Add a value of each block as a side output of the flow: its output, named after the block's path.

        A block that returns several values, such as rotary tables, has an output for each, `rotary_emb[0]` and so on.
        With `stacked` there is one output `[blocks, …]`, named after the pattern, in the order of the flow; all values
        must have one type. Repeated layers stay one region either way.

        Args:
            value: "output"; "input", the active value that the block reads; or a value inside the only attention of the
                block: "q", "k" or "v", `[B, S, heads, D]` as they enter the products, after norms and rotary embedding;
                "probs" `[B, heads, S, T]`, the softmax in f32 without the share of sinks; or "scores", what the softmax
                reads, −∞ for keys that a query does not read. The name of the output then ends with the value's:
                `layers.3.self_attn.probs`. It is computed only where the output is, and attention itself still runs by
                its fastest implementation.
            stacked: one output for all blocks.
        """
        if value not in CAPTURES:
            raise GraphError(
                f"capture: value is {shown(value)}; expected {listing(CAPTURES)}{did_you_mean(str(value), CAPTURES)}"
            )
        if not isinstance(stacked, bool):
            raise GraphError(f"capture: stacked is {shown(stacked)}; expected True or False")
        return self._edit(CapturedBlock(self.pattern.text if stacked else "", value))

    def scale(self, by: Any, *, of: Literal["output", "input"] = "output", heads: int | None = None) -> T:
        """Multiply the output or the input of each block by a number, an array, or an input of the flow.

        Shapes broadcast as in NumPy. If a call omits an optional input, the block is not scaled.

        Args:
            by: a number, an array that becomes part of the program, or the name of a declared input.
            of: `"output"` of the block or its `"input"`.
            heads: split the last axis into this many heads; the last axis of `by` then has one factor for each head.
                `build` raises an error if attention has another number of heads.
        """
        if of not in ("output", "input"):
            raise GraphError(f"scale: of is 'output' or 'input', got {shown(of)}")
        if heads is not None and (type(heads) is not int or heads < 1):
            raise GraphError(f"scale: heads is a number of heads, got {shown(heads)}")
        factor: str | Constant = as_name(by, "scale") if isinstance(by, str) else _numbers(by)
        return self._edit(Scaled(factor, of == "input", heads), requires_input=of == "input")

    def _edit(self, wrapper: BlockWrapper, requires_input: bool = True) -> T:
        return self.apply_edit(BlockEdit(self.pattern, wrapper, requires_input))


def _numbers(by: Any) -> Constant:
    """Return the factor of `scale` as a finite f32 constant."""
    if isinstance(by, FlowValue):
        raise GraphError("scale: a value of a flow scales inside of it: wrap(lambda emit, x, inner: inner(x) * value)")
    factor = constant(as_number_array(by, "scale"), np.float32)
    if not np.isfinite(factor.array).all():
        raise GraphError("scale: the factor has numbers that are not finite")
    return factor


# -- wrappers that replace or scale a block ------------------------------------------------------


@dataclass(frozen=True)
class Replaced:
    """Wrapper that runs a stage in place of the block."""

    stage: BlockStage

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        result = run_stage(self.stage, emit, x)
        return emit.require(x if result is None else result, "replace")


@dataclass(frozen=True)
class Scaled:
    """Wrapper that multiplies the output, or the input, of the block by a factor."""

    factor: str | Constant
    scales_input: bool
    heads: int | None

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        if self.scales_input:
            return inner(self._multiply(emit, emit.require(x, "scale")))
        return self._multiply(emit, inner(x))

    def check_block(self, counter: HeadCounter, block_input: Value | None, output: Value, where: str) -> None:
        """Check `heads` against the number of heads of attention, or of any other op that splits the value.

        Raises:
            ShapeError: the value has another number of heads, or no op reads or makes it as heads.
        """
        value, verb = (block_input, "reads") if self.scales_input else (output, "returns")
        if self.heads is None or value is None:
            return
        text = f"the value that the block {verb}, {counter.type(value)},"
        candidates, is_unknown = counter.count(value)
        if candidates and self.heads not in candidates:
            expected = " or ".join(map(str, sorted(candidates)))
            raise ShapeError(f"{where}: scale: {text} has {expected} heads, not {self.heads}: give heads={expected}")
        if not candidates and not is_unknown:
            raise ShapeError(
                f"{where}: scale: heads={self.heads}, but {text} does not consist of packed heads. The "
                "projection after attention reads heads: "
                f"at('layers.*.self_attn.o_proj').scale(by, of='input', heads={self.heads})"
            )

    def _multiply(self, emit: Emit, x: FlowValue) -> FlowValue:
        """Return x times the factor, in the type of x.

        Raises:
            ShapeError: the last axis does not split into the heads, or the factor does not broadcast to x.
        """
        if isinstance(self.factor, str):
            factor = emit.optional_input(self.factor)
        else:
            factor = emit.wrap(emit.builder.leaf(self.factor))
        if factor is None:  # the call omits an optional input
            return x
        if self.heads is None:
            product = x * factor
        else:
            width = x.type.shape[-1]
            if not is_static(width) or width % self.heads:
                raise ShapeError(f"{emit.path}: scale: {x.type} does not split into {self.heads} heads")
            if factor.type.shape[-1:] != (self.heads,):
                raise ShapeError(f"{emit.path}: scale: expected a factor [..., {self.heads}], got {factor.type}")
            split = x.reshape(*x.shape[:-1], self.heads, -1) * factor.reshape(*factor.shape, 1)
            product = split.reshape(x.shape)
        if product.type != x.type:  # the factor may broadcast, but must not change the shape of x
            raise ShapeError(f"{emit.path}: scale: {factor.type} times {x.type} is {product.type}; expected {x.type}")
        return product
