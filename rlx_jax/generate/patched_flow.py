"""The flows behind `CausalLM.patch`: with inputs that change the outputs of blocks, or with these outputs captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DTypeError, GraphError, RequestError, ShapeError, UnsupportedError, listing, quote
from rlx_jax.flow import ModelFlow
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.runtime.compile_flow import companion_model
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.captures import CapturedBlock
from rlx_jax.trace.editing import BlockEdit, Inner
from rlx_jax.trace.emit import Emit, FlowValue

# The input with the index of each row's prompt among the values to put in, and the number of those prompts.
ROWS, PROMPTS = "patch_rows", "patch_prompts"

PatchFunction = Callable[..., Any]
HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PatchedBlock:
    """Wrapper that changes the output of blocks, where an input says so.

    A counter, which passes from block to block, selects the block's part of the inputs, so that all blocks are the same
    program and repeated layers stay one region. The inputs are

    - `at`, bool `[blocks, batch, seq]`: where the output is changed;
    - `slots`, int32 `[blocks]`: the index of the block's values;
    - `values`, `[slots, prompts, seq, …]`.

    Attributes:
        index: number of the patch, in the names of its inputs.
        function: `output [S, …] → output` of one prompt, or `(output, value)`; None puts in the value.
        reads_values: whether there are values.
        order: the paths of the blocks, in the order of their numbers.
    """

    index: int
    function: PatchFunction | None
    reads_values: bool
    order: list[str] = field(default_factory=list, compare=False)

    def name(self, operand: str) -> str:
        """Return the name of an input."""
        return f"patch_{self.index}_{operand}"

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        output = inner(x)  # a block inside of this one has a lower number
        self.order.append(emit.path)
        count = emit.state.named.get(self.name("count"))
        names = (self.name("at"), *((ROWS, self.name("slots"), self.name("values")) if self.reads_values else ()))
        operands = [emit.require(emit.optional_input(name), "patch") for name in names]
        output, count = emit.jax(self.change, output, emit.constant(0, np.int32) if count is None else count, *operands)
        emit.set_named(self.name("count"), count)
        return emit.require(output, "patch")

    def change(self, output: jax.Array, count: jax.Array, at: jax.Array, *operands: jax.Array) -> Any:
        """Return the output of block number `count` after the change, and the number of the next block."""
        arguments = [output]
        if operands:
            rows, slots, values = operands
            value = jnp.take(values, jnp.take(slots, count, mode="clip"), axis=0, mode="clip")
            arguments.append(jnp.take(value, rows, axis=0, mode="clip"))
        changed = arguments[-1] if self.function is None else jax.vmap(self._change_prompt)(*arguments)
        is_changed = jnp.take(at, count, axis=0, mode="clip").reshape(*output.shape[:2], *(1,) * (output.ndim - 2))
        return jnp.where(is_changed, changed.astype(output.dtype), output), count + 1

    def _change_prompt(self, *arguments: jax.Array) -> jax.Array:
        """Return the function of the output of one prompt, in its shape."""
        assert self.function is not None
        where, shape = f"patch: {self.order[-1]}: the function returns", arguments[0].shape
        result = self.function(*arguments)
        if not isinstance(result, jax.Array | np.ndarray | np.generic | int | float | complex):
            raise RequestError(f"{where} a {type(result).__name__}; expected an array [tokens, …]")
        array = jnp.asarray(result)
        if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
            raise DTypeError(f"{where} {array.dtype.name}; expected real numbers")
        if array.ndim > len(shape) or any(
            m not in (1, n) for m, n in zip(array.shape[::-1], shape[::-1], strict=False)
        ):
            sizes = (listing(map(str, a.shape), 8) for a in (array, arguments[0]))
            raise ShapeError("{} [{}]; expected an array that broadcasts to [{}], [tokens, …]".format(where, *sizes))
        return jnp.broadcast_to(array, shape)


@dataclass(frozen=True, eq=False)
class Patch:
    """One entry of the patches: blocks, and either the values to put in or a function.

    Attributes:
        pattern: the pattern of the user.
        general: the pattern with `*` for layer numbers, of all blocks that the program can change.
        names: the paths of these blocks.
        chosen: the numbers of the blocks to change among them.
        type: of their outputs, `[batch, seq, …]`.
        wrapper: the change.
        array: the values; None for a function, or for the outputs of the source.
    """

    pattern: str
    general: str
    names: tuple[str, ...]
    chosen: tuple[int, ...]
    type: TensorType
    wrapper: PatchedBlock
    array: HostArray | None = None

    @property
    def width(self) -> tuple[int, ...]:
        """The sizes of an output of a token."""
        return tuple(map(int, self.type.shape[2:]))


def find_blocks(model: CompiledModel, pattern: str) -> tuple[str, tuple[str, ...], TensorType]:
    """Return the blocks that the program for a pattern can change: a pattern, their paths, and the type of an output.

    These are the blocks at the same place in all layers, as repeated layers are one program.

    Raises:
        GraphError: the pattern matches no block, or blocks with several outputs, or other outputs than floats `[batch,
            seq, …]`. ShapeError: blocks have outputs of several types.
    """
    flow, segments = _flow_of(model), BlockPattern(pattern).text.split(".")
    general = ".".join("*" if re.fullmatch(r"[^A-Za-z_]+", s) and s != "**" else s for s in segments)
    for text in dict.fromkeys((general, pattern)):
        try:
            built = flow.at(text).capture().build(model.programs.source)
        except GraphError:
            if text == pattern:
                raise
            continue
        outputs = zip(built.hir.output_names, built.hir.outputs, strict=True)
        types = {name: built.hir.type(value) for name, value in outputs if name in built.captures}
        if len(set(types.values())) == 1 or text == pattern:
            break
    ids = next(decl.type for decl in flow._inputs if decl.name == model.first_input)
    for name, t in types.items():
        if t.shape[:2] != ids.shape or not is_float(t.dtype) or not all(map(is_static, t.shape[2:])) or "[" in name:
            raise GraphError(f"patch: {quote(pattern)}: {name} is {t}; expected floats [batch, seq, …]")
        if t != next(iter(types.values())):
            raise ShapeError(f"patch: {quote(pattern)}: blocks of one pattern return values of one type; {name} is {t}")
    if not any(BlockPattern(pattern).matches((name,)) for name in types):
        flow.at(pattern).capture().build(model.programs.source)  # raises, with paths that are similar
    return text, tuple(types), next(iter(types.values()))


def _flow_of(model: CompiledModel) -> ModelFlow:
    """Return the flow of a model, without its captures.

    Raises:
        UnsupportedError: it was compiled from something else.
    """
    if not isinstance(model.flow, ModelFlow):
        raise UnsupportedError(f"patch: {model.name} was compiled from a {type(model.flow).__name__}, not a flow")
    edits = (edit for edit in model.flow._block_edits if not isinstance(edit.wrapper, CapturedBlock))
    return replace(model.flow, _block_edits=tuple(edits))


def edited_model(model: CompiledModel, kind: Literal["capture", "patch"], patches: Sequence[Patch]) -> CompiledModel:
    """Return the model that captures the blocks of patches, or that has inputs to change them.

    It has the same parameters, and is built once for each choice of blocks and functions.

    Raises:
        UnsupportedError: the model stores weights as one that the edit separates.
        GraphError: the blocks are not written in the order of their numbers.
    """
    flow = _flow_of(model)
    if kind == "capture":
        for p in patches:
            flow = flow.at(p.general).capture()
        return companion_model(model, lambda source: flow, (kind, *(p.general for p in patches)), shares_all=True)
    if any(p.wrapper.reads_values for p in patches):
        flow = flow.input(ROWS, ("batch",), "int32")
    for p in patches:
        name, count = p.wrapper.name, len(p.names)
        flow = flow.input(name("at"), (count, "batch", "seq"), "bool")
        if p.wrapper.reads_values:
            flow = flow.input(name("slots"), (count,), "int32")
            flow = flow.input(name("values"), (name("count"), PROMPTS, "seq", *p.width))
        flow = flow.at(p.general).apply_edit(BlockEdit(BlockPattern(p.general), p.wrapper, requires_input=False))
    key = (kind, *((p.general, p.names, p.wrapper) for p in patches))
    patched = companion_model(model, lambda source: flow, key, shares_all=True)
    edits = _flow_of(patched)._block_edits[-len(patches) :]
    for p, edit in zip(patches, edits, strict=True):
        assert isinstance(edit.wrapper, PatchedBlock)
        if tuple(edit.wrapper.order[: len(p.names)]) != p.names:
            raise GraphError(f"patch: {quote(p.pattern)}: blocks are not written in the order {listing(p.names)}")
    return patched
