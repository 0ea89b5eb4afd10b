"""This module defines `ModuleBuilder`, the part of `GraphModule` that builds a graph.

It declares inputs and parameters, checks which module values belong to, and finishes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rlx_jax.errors import GraphError, quote, shown
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Param, Value
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.param import Dequantized, Key, Roles, cast, key_descriptions
from rlx_jax.ir.paths import Origin, Path, unique_path
from rlx_jax.ir.types import DimLike, Init, as_name, as_names, device_dtype, tensor_type
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.verify import verify
from rlx_jax.ir.weight_reads import source_program
from rlx_jax.lowering.lir.plan import Plan
from rlx_jax.trace.checks import items_of
from rlx_jax.trace.compat import SpecBuilders
from rlx_jax.trace.emit import input_type
from rlx_jax.trace.parameters import WeightKey, WeightPart, WeightStack, stored_key


@dataclass(eq=False)
class ModuleBuilder(SpecBuilders[Value]):
    """A graph under construction.

    Attributes:
        name: the name of the module.
        stage: the level of the graph: HIR, MIR or LIR.
        builder: the nodes so far.
        outputs, output_names: the outputs that `set_outputs` declares.
        policy: the fusion policy for lowering: `direct` or `fusable`.
        plan: the plan of a module at LIR.
        captured: the arrays that functions of the user capture.
        used_paths: the block paths in use.
    """

    name: str
    stage: GraphStage
    builder: Builder = field(repr=False)
    outputs: list[Value] = field(default_factory=list, repr=False)
    output_names: tuple[str, ...] = ()
    policy: str = "direct"
    plan: Plan | None = None
    captured: CapturedArrays = field(default_factory=CapturedArrays, repr=False)
    used_paths: set[Path] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        as_name(self.name, "a module")

    def input(self, name: str, shape: Sequence[int | str], dtype: Any = "f32") -> Value:
        """Declare an input and return its value; strings in the shape are symbolic sizes.

        Raises:
            GraphError: an input of that name is declared already.
        """
        if any(i.input == name for i in self.builder.inputs):
            raise GraphError(f"{self.name}: input {quote(name)} is declared twice")
        return self.wrap(self.builder.input(name, input_type(name, shape, dtype)))

    def input_batch_seq(
        self, name: str, hidden: int, dtype: Any = "f32", batch: int | str = "batch", seq: int | str = "seq"
    ) -> Value:
        """Declare an input `[batch, seq, hidden]` and return its value."""
        return self.input(name, (batch, seq, hidden), dtype)

    def param(self, name: str, shape: Sequence[int], dtype: Any = "f32", *, packed: str | None = None) -> Value:
        """Declare a parameter and return its value.

        The weight in a source may have another dtype, or another packing or none.

        Args:
            name: the weight key.
            shape: the logical shape.
            dtype: the logical dtype; 64-bit types are narrowed to 32 bits in the program.
            packed: the packing, a name in `rlx_jax.ir.packed.SCHEMES`; None for a plain tensor.

        Raises:
            GraphError: the key is declared already with another type.
            ShapeError, DTypeError: the shape or the dtype is invalid.
            WeightShapeError, WeightError: the tensor cannot be packed by the scheme.
            UnsupportedError: the scheme is not implemented.
        """
        if not isinstance(name, str):
            raise GraphError(f"{self.name}: a weight key is a string, got {shown(name)}")
        location = f"{self.name}: parameter {quote(name)}"
        sizes = items_of(shape, location, "a list of sizes")
        if packed is None:
            stored: Key | Dequantized = Key(name, tensor_type(sizes, dtype, location))
        else:
            stored = source_program(name, PackedSpec(sizes, dtype, packed), location)
        declared = dict(key_descriptions(stored))[name]
        for node in self.builder.nodes:
            for key, kind in key_descriptions(node.op.programs[0]) if isinstance(node.op, Param) else ():
                if key == name and kind != declared:
                    raise GraphError(f"{location} is {kind} and {declared}")
        program = cast(stored, device_dtype(stored.type.dtype))
        return self.wrap(self.builder.leaf(Param((program,), type=program.type)))

    def named(self, name: str, build: Callable[[Self], Value]) -> Value:
        """Run `build` inside the block path segment `name`, and return its value.

        If an earlier block has that path, the segment is `name_2`, and so on.
        """
        if not callable(build):
            raise GraphError(f"{self.name}: named takes a function GraphModule → value, got {shown(build)}")
        path = unique_path(self.builder.origin.path, as_name(name, f"{self.name}: named"), self.used_paths)
        self.used_paths.add(path)
        with self.builder.origin_scope(Origin(path)):
            return build(self)

    @staticmethod
    def block(module: ModuleBuilder, name: str, build: Callable[[Any], Value]) -> Value:
        """Return `module.named(name, build)`."""
        return module.named(name, build)

    def wrap(self, value: Value) -> Value:
        """Return a value of the builder with its owner, so that another module refuses it."""
        return Value(value.node, value.index, self.builder)

    @property
    def level(self) -> GraphStage:
        """Return `stage`, under the name that the op builders use."""
        return self.stage

    def unwrap(self, value: Value) -> Value:
        """Return the graph value of a value of this module.

        Raises:
            GraphError: it is no value, or belongs to another module.
        """
        if not isinstance(value, Value):
            raise GraphError(
                f"{self.name}: expected a value of this module, got {type(value).__name__}; m.constant(array) makes one"
            )
        enclosing = [body.outer for body in self._bodies]
        if value.owner is not None and value.owner not in (self.builder, *enclosing):
            raise GraphError(
                f"{self.name}: {value} belongs to another module called {quote(value.owner.name)}; "
                "use the values that this module returned; after lowering, use its `outputs`"
            )
        nodes = (value.owner or self.builder).nodes
        if not (0 <= value.node < len(nodes)) or value.index >= len(nodes[value.node].types):
            raise GraphError(f"{self.name}: {value} is not a value of this module")
        return self.to_current_body(value)

    def weight(
        self, weight: Value | WeightKey | WeightStack, roles: Roles | None = None, *,
        shape: Sequence[DimLike | None] | None = None, init: Init | None = None,
    ) -> Value:  # fmt: skip
        """Return a weight operand; a module declares its parameters, so that a key alone is an error.

        Raises:
            GraphError: `weight` is a key.
        """
        if isinstance(weight, str | WeightPart | WeightStack):
            key = weight.keys[0] if isinstance(weight, WeightStack) else stored_key(weight)
            raise GraphError(f"{self.name}: {quote(weight)} is a key; m.param({key!r}, shape) declares the weight")
        return weight

    def set_outputs(self, values: Sequence[Value], names: Sequence[str] = ()) -> None:
        """Set the outputs and their names. The default names are `output`, or `output0`, `output1` … for several.

        Raises:
            GraphError: a value of another module, or another number of names than values.
        """
        if not isinstance(values, Iterable):
            raise GraphError(f"{self.name}: set_outputs takes a list of values, got {type(values).__name__}: [value]")
        outputs = [self.unwrap(v) for v in values]
        default = ("output",) if len(outputs) == 1 else tuple(f"output{i}" for i in range(len(outputs)))
        output_names = as_names(names, f"{self.name}: set_outputs") or default
        if len(output_names) != len(outputs):
            raise GraphError(f"{self.name}: set_outputs: {len(outputs)} values and {len(output_names)} names")
        self.outputs, self.output_names = outputs, output_names

    set_hir_outputs = set_outputs

    def finish_hir(self, value: Value) -> Self:
        """Set the only output, and return the module."""
        self.set_outputs([value])
        return self

    def finish(self) -> Graph:
        """Return the finished, verified graph.

        Raises:
            GraphError: there are no outputs, or the graph is invalid; the message lists all problems.
        """
        if not self.outputs:
            raise GraphError(f"module {self.name!r} has no outputs: set_outputs([...])")
        return verify(self._snapshot(), self.stage, "building", self.builder.types)

    def _snapshot(self) -> Graph:
        """Return the graph so far, without verifying it."""
        return self.builder.finish(self.outputs, self.output_names)
