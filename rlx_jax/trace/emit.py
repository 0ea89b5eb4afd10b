"""How a stage writes HIR: `Emit`, the builder and the registers that stages share. Values are `FlowValue`s.

A stage gets the `Emit` and the active `FlowValue` and returns the next active value. Custom stages use
operators on values, the methods of `Emit`, or `emit.jax` for any JAX function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import (
    GraphError,
    MissingWeightError,
    RlxError,
    ShapeError,
    UnboundInputError,
    WeightShapeError,
    did_you_mean,
    first_line,
    listing,
    named_kind,
    quote,
)
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Hir, Op, Param, Value, as_values, located
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.param import Role, Roles, stored_keys
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.ir.types import (
    Dim,
    TensorType,
    as_dtype,
    device_dtype,
    short_name,
    tensor_type,
)
from rlx_jax.ir.user_functions import Captured
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.trace.checks import has_no
from rlx_jax.trace.compat import SpecBuilders
from rlx_jax.trace.flow_value import FlowState as FlowState
from rlx_jax.trace.flow_value import FlowValue as FlowValue
from rlx_jax.trace.flow_value import GdnInputSlots
from rlx_jax.trace.parameters import AxisSizes, Parameters, WeightDecl, WeightKey, WeightPart, WeightStack


def read_numbers(data: Any, where: str) -> np.ndarray[Any, Any]:
    """Numbers that a stage made up, as an array."""
    try:
        array = np.asarray(data)
    except (ValueError, TypeError) as error:
        raise GraphError(f"{where}: not an array: {first_line(error)}") from error
    if array.dtype.kind not in "biuf" or not array.size:
        raise GraphError(f"{where}: expected numbers, got {short_name(array.dtype)} {list(array.shape)}")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def input_type(name: str, shape: Sequence[int | str | Dim], dtype: Any) -> TensorType:
    """The type of an input that is declared; 64-bit ones are narrowed."""
    if not isinstance(name, str) or not name.isidentifier():
        raise GraphError(f"an input's name is an identifier, got {quote(name)}")
    if name in ("state", "params"):
        raise GraphError(f"an input cannot be called {quote(name)}: calls use that name")
    return tensor_type(shape, device_dtype(as_dtype(dtype, f"input {name}: ")), f"input {name}")


class Emit(SpecBuilders[FlowValue]):
    """Writes the HIR of one flow: the ops of `SpecBuilders`, weights by key, and the registers.

    Parameters are references: nothing here reads weight data. `binding` are the sizes that the flow is bound to,
    `declared` what it says of weights by their keys, and `profile` the CompileProfile of `flow.with_profile`, or None.
    A profile that `compile` gets is not known while the stages run.
    """

    level = GraphStage.HIR

    def __init__(
        self,
        builder: Builder,
        source: WeightSource | None,
        captured: Captured | None = None,
        binding: Mapping[str, int] | None = None,
        declared: Sequence[WeightDecl] = (),
        profile: Any = None,
    ) -> None:
        self.builder = builder
        self.profile = profile
        self.captured = Captured() if captured is None else captured
        self.parameters = Parameters(source, declared)
        self.binding = dict(binding or {})
        self.state = FlowState()
        self.repeating = False
        self.flat = False  # composites are written as the blocks that they stand for
        self.opened: tuple[Path, dict[Path, None]] = ((), {})  # where a stage started, and the blocks it opened there
        self.stand_in: Callable[[Path, FlowValue | None, MissingWeightError], FlowValue] | None = None
        self.has_stand_ins = False  # some stage could not run without its weights, and an edit replaces it
        self._stage = object()
        self._owners: dict[Path, object] = {}  # block path -> the stage that has it
        self._last: dict[Path, Path] = {}  # block path as it was asked for -> as it was last given

    # -- where we are ------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, *segments: str | int, again: bool = False) -> Iterator[None]:
        """Add segments to the block path of everything emitted inside.

        A stage may come back to a path of its own. Where an earlier stage has it, the last name gets a number, `mlp_2`;
        with `again` this is the path of that stage, the last of them.
        """
        origin = self.builder.origin
        path = (*origin.path, *segments)
        own = self._last.get(path, path) if again else self._own_path(origin.path, segments)
        self._last[path] = own
        if segments and origin.path == self.opened[0]:
            self.opened[1][own] = None
        with self.builder.at(replace(origin, path=own)):
            yield

    def block_input(self, value: FlowValue, *segments: str | int) -> FlowValue:
        """Say which value the current block takes as its active one, and return it for the block to read.

        Edits by path change this value: `x` of `wrap`, and `scale(of="input")`. A stage is given its active value; a
        part of a stage, `with emit.scope("self_attn"): x = emit.block_input(x)`, needs this where it reads several.

        Args:
            value: the active value of the block.
            segments: the block, where it is one inside the current one.
        """
        if not segments:
            return self.wrap(self.builder.boundary("input", self.own(value)))
        with self.scope(*segments):
            return self.block_input(value)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """What is emitted inside is a stage of its own: its block paths are not those of the stages before it."""
        before, self._stage = self._stage, object()
        try:
            yield
        finally:
            self._stage = before

    def _own_path(self, around: Path, segments: Path) -> Path:
        names = [i for i, segment in enumerate(segments) if isinstance(segment, str)]
        path, number = (*around, *segments), 1
        while names and self._owners.setdefault(path, self._stage) is not self._stage:
            number += 1
            last = names[-1]
            path = (*around, *segments[:last], f"{segments[last]}_{number}", *segments[last + 1 :])
        return path

    @contextlib.contextmanager
    def users_code(self) -> Iterator[None]:
        """Around a function of the user: its errors get the block path, and those about values say what takes them."""
        try:
            yield
        except RlxError as error:
            if self.builder.origin.path:
                error.locate(self.path)
            raise
        except Exception as error:
            if isinstance(error, AttributeError) and error.obj is self:
                raise GraphError(f"{self.path}: emit has no {has_no(self, str(error.name))}") from error
            if "FlowValue" not in str(error):
                error.add_note(f"in the custom stage {self.path}")
                raise
            raise GraphError(
                f"{self.path}: {first_line(error)}; a FlowValue takes operators and the functions of emit: "
                "use emit.jax(fn, value) for JAX functions and emit.constant(array) for small arrays"
            ) from error

    # -- values ------------------------------------------------------------------------------

    def wrap(self, value: Value) -> FlowValue:
        """A graph value with operators."""
        return FlowValue(self, replace(value, owner=self.builder))

    def own(self, value: FlowValue) -> Value:
        """The graph value behind a FlowValue of this flow."""
        if isinstance(value, str):
            raise GraphError(
                f"{self.path}: expected a FlowValue, got {value!r}; the weight of that key is emit.param({value!r}), "
                f"and an input of that name emit.flow_input({value!r})"
            )
        if not isinstance(value, FlowValue):
            raise GraphError(
                f"{self.path}: expected a FlowValue, got {named_kind(value)}; use emit.constant(array) for a small "
                "array, emit.param(key) for a weight, emit.jax(fn, value) for a JAX function"
            )
        if value.emit is not self:
            raise GraphError(f"{self.path}: a value of another flow, or kept from an earlier build, is used here")
        return self.inside(value.value)

    def weight(
        self,
        weight: FlowValue | WeightKey | WeightStack,
        roles: Roles | None = None,
        *,
        shape: AxisSizes | None = None,
        init: Init | None = None,
    ) -> FlowValue:
        """`param` of a key; a value as it is."""
        if isinstance(weight, str | WeightPart | WeightStack):
            return self.param(weight, shape, roles, init)
        return weight

    def add_all(self, op: Op, *values: FlowValue) -> tuple[FlowValue, ...]:
        """Append an op; all of its results. Where a shape does not fit, the error names the weight that has it."""
        with located(self.builder.here):
            try:
                return super().add_all(op, *values)
            except ShapeError as error:
                at_fault = [values[i] for i in error.operands] or values
                weights = " and ".join(dict.fromkeys(w for v in at_fault for w in self._weights_of(self.own(v))))
                if not weights:
                    raise
                raise WeightShapeError(f"{error}; it reads {weights}") from error

    def _write(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        """The node; of a composite, where the flow is to be flat, the blocks that it stands for."""
        if not (self.flat and isinstance(op, Hir) and op.traits.composite):
            return self.builder.add(op, *operands)
        self.builder.types.infer(op, tuple(self.builder.type(v) for v in operands))  # its own checks come first
        with self.builder.at(replace(self.builder.here, label=op.name())):
            return as_values(op.expand(self.builder, *operands))

    def _weights_of(self, value: Value) -> Iterator[str]:
        """The weights that a value is, as stored, looking through casts and transposes."""
        node = self.builder.nodes[value.node]
        if len(node.inputs) == 1:
            yield from self._weights_of(node.inputs[0])
        if isinstance(node.op, Param):
            for stored in stored_keys(node.op.programs[0]):
                others = {path_text(n.origin.path): None for n in self.builder.nodes if value in n.inputs}
                too = f" and is read by {listing(others, 2)} too" if others else ""
                yield f"{self.parameters.at(stored.key)}, which is {stored.type}{too}"

    # -- parameters --------------------------------------------------------------------------

    def param(
        self,
        key: WeightKey | WeightStack,
        shape: AxisSizes | None = None,
        roles: Sequence[Role] | None = None,
        init: Init | None = None,
    ) -> FlowValue:
        """The weight under `key`, as stored: that of a projection is `[out, in]`, and `linear(x, w)` reads `[in, out]`.
        Of a `WeightPart` that part, and `shape` is the part's; of a `WeightStack` all of them, one behind the other.

        `linear(x, key)` and `linear(x, w, transpose=True)` read it as it is. Floating weights enter the program as f32,
        decoded where they are packed.

        `shape` is what the caller knows of it, axis by axis, None for a size that it does not know. Known sizes are
        checked against the source. Where no source has the weight, the others come from `flow.param(key, shape=…)` or
        from an earlier use of the weight. `roles` say what its axes are, as stored, so that a mesh of devices can
        divide them (`rlx_jax.ir.roles.ROLES`): without them each device has it whole. `init` is how the weight is drawn
        where there is none: `"zeros"`, `"ones"`, `"orthogonal"`, or a function `(key, shape, dtype) → array` such as
        `jax.nn.initializers.normal(0.02)`. By default what reads it decides: matrices are normal with deviation
        1/√fan_in, norms 1, biases 0.

        Raises:
            GraphError: an init that is none, or another one than for an earlier use of the weight; roles that there are
                not, or others than another stage has for the same weight.
            MissingWeightError: the source has no such key, or there is no source and a size is not known.
            WeightShapeError: the source has another shape. WeightError: it has complex numbers.
            UnsupportedError: it is packed by a scheme that is not decoded yet.
        """
        if isinstance(key, WeightStack):
            program = self.parameters.stacked(key, shape, roles, self.path)
        else:
            program = self.parameters.one(key, shape, self.path)
            if roles is not None:
                (stored,) = stored_keys(program)  # a part of several has the roles of all
                self.parameters.say_roles(stored.key, roles, stored.type, self.path)
        self.parameters.say_init(key, init, self.path)
        return self.wrap(self.builder.leaf(Param((program,), type=program.type)))

    def say_roles(self, weight: FlowValue, roles: Sequence[Role]) -> None:
        """Say what the axes of a weight that was read before are here too."""
        op = self.builder.nodes[self.own(weight).node].op
        for stored in stored_keys(op.programs[0]) if isinstance(op, Param) else ():
            self.parameters.say_roles(stored.key, roles, stored.type, self.path)

    def load_param(self, key: str, transpose: bool = False) -> FlowValue:
        """`param(key)`, transposed in the program when asked: the leaf is stored once either way."""
        value = self.param(key)
        loaded = value.transpose() if transpose else value
        # A record, not a cache: a layer that read a value of another layer would not fold into one region with it.
        self.state.loaded_params[key, transpose] = loaded
        return loaded

    def synth_param(self, name: str, data: Any, shape: Sequence[int] | None = None) -> FlowValue:
        """Made-up numbers, registered as `name` for later stages: a constant of the program of at most 1 MiB.

        It is no parameter: `model.params`, gradients and checkpoints do not have it. `shape` is that of `data` if it
        is flat.

        Raises:
            ShapeError: there are not so many numbers. GraphError: something is registered as `name`.
        """
        array = read_numbers(data, f"{self.path}: synth_param {quote(name)}")
        if shape is not None and math.prod(shape) != array.size:
            raise ShapeError(f"{self.path}: synth_param {quote(name)}: {array.size} numbers are no {list(shape)}")
        if name in self.state.named:
            raise GraphError(f"{self.path}: {quote(name)} is registered already")
        with self.scope(name):
            value = self.constant(array if shape is None else array.reshape(tuple(shape)))
        self.set_named(name, value)
        return value

    def synth_zeros(self, name: str, length: int) -> FlowValue:
        """f32 zeros `[length]`, registered as `name`."""
        return self.synth_param(name, np.zeros(length, np.float32))

    def node_shape(self, value: FlowValue) -> tuple[int | Dim, ...]:
        """The shape of a value: `value.shape`."""
        return self.shape(value).shape

    def hir(self) -> Emit:
        """Return the HIR module that the stages write, which is this Emit: it has the builders of a GraphModule."""
        return self

    @property
    def module(self) -> Emit:
        """The program that the stages write, as `hir()`."""
        return self

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the weights that were read so far, by key. `param` reads one, `synth_param` makes one."""
        return self.hir_and_params()[1]

    @property
    def weights(self) -> WeightSource | None:
        """The weight source of the build (`keys`, `spec`, `has`), or None where the flow is built without weights."""
        return self.parameters.source

    def hir_and_params(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """What was written so far: the nodes, and the weights that they read, by key. The graph has no outputs yet."""
        graph = self.builder.finish(())
        stored = (k for leaf in graph.params() for program in leaf.programs for k in stored_keys(program))
        return graph, {k.key: k.type.spec for k in stored}

    def has_param(self, key: str) -> bool:
        """Whether the weight source holds `key`."""
        source = self.parameters.source
        return source is not None and source.has(key)

    # -- registers ---------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str | Dim], dtype: Any = "float32") -> FlowValue:
        """A declared input by name; declared here, as a required one, if the flow has none of that name."""
        if name not in self.state.inputs:
            self.state.inputs[name] = self.wrap(self.builder.input(name, input_type(name, shape, dtype)))
        return self.flow_input(name)

    def flow_input(self, name: str) -> FlowValue:
        """A declared input by name; an optional one that was not given is an error here (see `optional_input`)."""
        value = self.optional_input(name)
        if value is None:
            raise UnboundInputError(f"{self.path}: input {quote(name)} is optional and was not given")
        return value

    def optional_input(self, name: str) -> FlowValue | None:
        """A declared input by name, or None if it is optional without a default value and absent."""
        if name not in self.state.inputs:
            known = list(self.state.inputs)
            raise UnboundInputError(
                f"{self.path}: no input {quote(name)} is declared; known: {listing(known)}{did_you_mean(name, known)}"
            )
        return self.state.inputs[name]

    def set_named(self, key: str, value: FlowValue) -> None:
        """Register `value` under `key` for later stages."""
        self.state.named[key] = value

    def named(self, key: str) -> FlowValue:
        """What an earlier stage registered under `key`."""
        known = self.state.named
        if key not in known:
            raise GraphError(f"{self.path}: nothing is registered as {quote(key)}; registered are {listing(known)}")
        return known[key]

    def set_gdn(self, q: FlowValue, k: FlowValue, v: FlowValue, g: FlowValue, beta: FlowValue) -> None:
        """Register what a GdnScan reads: q, k, v `[B,S,heads,n]`, g and beta `[B,S,heads]`."""
        self.state.gdn = GdnInputSlots(q, k, v, g, beta)

    def set_stream(self, name: str, value: FlowValue) -> None:
        """Keep `value` as stream `name`."""
        self.state.streams[name] = value

    def stream(self, name: str) -> FlowValue:
        """The stream that an earlier stage kept as `name`."""
        known = self.state.streams
        if name not in known:
            close = did_you_mean(name, known) or "; store_stream(name) and bind_inputs_to_streams keep one"
            raise GraphError(
                f"{self.path}: there is no stream {quote(name)}; streams are {listing(known) or 'none'}{close}"
            )
        return known[name]

    def output(self, name: str, value: FlowValue) -> None:
        """Add a side output of the flow under `name`, after the primary one."""
        if name in self.state.outputs:
            raise GraphError(f"{self.path}: there is a side output {quote(name)} already")
        self.state.outputs[name] = value

    def require(self, value: FlowValue | None, stage: str) -> FlowValue:
        """The active value of a stage that needs one."""
        if value is None:
            left = self.state.left_none
            why = f"the stage {left} before it returned None" if left else "there is no active value"
            raise GraphError(f"{self.path}: {stage} requires input, but {why}")
        return value
