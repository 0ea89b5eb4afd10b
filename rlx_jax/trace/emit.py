"""`Emit`, with which stages write HIR and share registers. Its values are `FlowValue`s.

A stage gets the `Emit` and the active `FlowValue` and returns the next active value. Custom stages use operators on
values, the methods of `Emit`, or `emit.jax` for any JAX function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax import errors
from rlx_jax.errors import check_names, describe_type, first_line, listing, quote
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Hir, Op, Param, Value, as_values, locate_errors
from rlx_jax.ir.param import Role, Roles, stored_keys
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.ir.types import Dim, Init, TensorType, as_dtype, device_dtype, short_name, tensor_type
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.trace.checks import missing_method_text
from rlx_jax.trace.compat import SpecBuilders
from rlx_jax.trace.flow_value import FlowState as FlowState
from rlx_jax.trace.flow_value import FlowValue as FlowValue
from rlx_jax.trace.flow_value import GdnInputSlots
from rlx_jax.trace.parameters import AxisSizes, Parameters, WeightKey, WeightPart, WeightStack


def as_number_array(data: Any, where: str) -> np.ndarray[Any, Any]:
    """Return numbers that a stage computes in Python as an array, in f32 if they are f64."""
    try:
        array = np.asarray(data)
    except (ValueError, TypeError) as error:
        raise errors.GraphError(f"{where}: not an array: {first_line(error)}") from error
    if array.dtype.kind not in "biuf" or not array.size:
        raise errors.GraphError(f"{where}: expected numbers, got {short_name(array.dtype)} {list(array.shape)}")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def input_type(name: str, shape: Sequence[int | str | Dim], dtype: Any) -> TensorType:
    """Return the type of a declared input; 64-bit dtypes become 32-bit ones."""
    if not isinstance(name, str) or not name.isidentifier():
        raise errors.GraphError(f"an input's name is an identifier, got {quote(name)}")
    if name in ("state", "params"):
        raise errors.GraphError(f"an input cannot be called {quote(name)}: calls use that name")
    return tensor_type(shape, device_dtype(as_dtype(dtype, f"input {name}: ")), f"input {name}")


class Emit(SpecBuilders[FlowValue]):
    """Writes the HIR of one flow: the ops of `SpecBuilders`, weights by key, and the registers.

    Parameters are references, so that a build reads no weight data.

    Args:
        binding: the sizes of symbolic dimensions that the flow is bound to.
        profile: the CompileProfile of `flow.with_profile`, or None. The profile of a call of `compile` is not known
            while the stages run.
    """

    level = GraphStage.HIR

    def __init__(
        self, builder: Builder, parameters: Parameters, captured: CapturedArrays | None, binding: Mapping[str, int],
        profile: Any = None,
    ) -> None:  # fmt: skip
        self.builder = builder
        self.profile = profile
        self.captured = CapturedArrays() if captured is None else captured
        self.parameters = parameters
        self.binding = dict(binding)
        self.state = FlowState()
        self.in_repeat = False
        self.expands_composites = False  # composite blocks are expanded into their smaller blocks
        # The path at the start of the current stage, and the blocks that the stage opened there.
        self.stage_blocks: tuple[Path, dict[Path, None]] = ((), {})
        self.placeholder_writer: Callable[[Path, FlowValue | None, errors.MissingWeightError], FlowValue] | None = None
        self.has_placeholders = False  # a stage with missing weights was replaced by an edit
        self._stage = object()
        self._stage_of_path: dict[Path, object] = {}  # block path -> the stage that uses it
        self._latest_paths: dict[Path, Path] = {}  # requested block path -> the path that it last became

    # -- block paths -------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, *segments: str | int, again: bool = False) -> Iterator[None]:
        """Add segments to the block path of everything emitted inside.

        A stage may use its own paths again. If an earlier stage uses the path, the last name gets a number, `mlp_2`;
        with `again`, the path is the one of the latest such stage.
        """
        origin = self.builder.origin
        path = (*origin.path, *segments)
        block_path = self._latest_paths.get(path, path) if again else self._unique_path(origin.path, segments)
        self._latest_paths[path] = block_path
        if segments and origin.path == self.stage_blocks[0]:
            self.stage_blocks[1][block_path] = None
        with self.builder.origin_scope(replace(origin, path=block_path)):
            yield

    def block_input(self, value: FlowValue, *segments: str | int) -> FlowValue:
        """Mark a value as the input of the current block, and return the marked value for the block to read.

        Edits by path change this value: it is `x` of `wrap`, and the target of `scale(of="input")`. The input of a
        stage is its active value. A part of a stage that reads several values needs this call:
        `with emit.scope("self_attn"): x = emit.block_input(x)`.

        Args:
            value: the input of the block.
            segments: path of the block relative to the current one.
        """
        if not segments:
            return self.wrap(self.builder.boundary("input", self.unwrap(value)))
        with self.scope(*segments):
            return self.block_input(value)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Emit a separate stage inside this context: its block paths differ from the paths of earlier stages."""
        outer_stage, self._stage = self._stage, object()
        try:
            yield
        finally:
            self._stage = outer_stage

    def _unique_path(self, prefix: Path, segments: Path) -> Path:
        """Return the path with a number after its last name, if another stage uses the path already."""
        names = [i for i, segment in enumerate(segments) if isinstance(segment, str)]
        path, number = (*prefix, *segments), 1
        while names and self._stage_of_path.setdefault(path, self._stage) is not self._stage:
            number += 1
            name_index = names[-1]
            path = (*prefix, *segments[:name_index], f"{segments[name_index]}_{number}", *segments[name_index + 1 :])
        return path

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Run a user's function inside this context: errors get the block path, and errors about values get advice."""
        try:
            yield
        except errors.RlxError as error:
            if self.builder.origin.path:
                error.locate(self.path)
            raise
        except Exception as error:
            if isinstance(error, AttributeError) and error.obj is self:
                raise errors.GraphError(
                    f"{self.path}: emit has no {missing_method_text(self, str(error.name))}"
                ) from error
            if "FlowValue" not in str(error):
                error.add_note(f"in the custom stage {self.path}")
                raise
            raise errors.GraphError(
                f"{self.path}: {first_line(error)}; a FlowValue takes operators and the functions of emit: "
                "use emit.jax(fn, value) for JAX functions and emit.constant(array) for small arrays"
            ) from error

    # -- values ------------------------------------------------------------------------------

    def wrap(self, value: Value) -> FlowValue:
        """Return a graph value as a FlowValue, which has operators."""
        return FlowValue(self, Value(value.node, value.index, self.builder))

    def unwrap(self, value: FlowValue) -> Value:
        """Return the graph value of a FlowValue, after checking that it belongs to this flow."""
        if isinstance(value, str):
            raise errors.GraphError(
                f"{self.path}: expected a FlowValue, got {value!r}; the weight of that key is emit.param({value!r}), "
                f"and an input of that name emit.flow_input({value!r})"
            )
        if not isinstance(value, FlowValue):
            raise errors.GraphError(
                f"{self.path}: expected a FlowValue, got {describe_type(value)}; use emit.constant(array) for a small "
                "array, emit.param(key) for a weight, emit.jax(fn, value) for a JAX function"
            )
        if value.emit is not self:
            raise errors.GraphError(f"{self.path}: a value of another flow, or of an earlier build, is used here")
        return self.to_current_body(value.value)

    def weight(
        self, weight: FlowValue | WeightKey | WeightStack, roles: Roles | None = None, *,
        shape: AxisSizes | None = None, init: Init | None = None,
    ) -> FlowValue:  # fmt: skip
        """Return `param` of a key, or a value as it is."""
        if isinstance(weight, str | WeightPart | WeightStack):
            return self.param(weight, shape, roles, init)
        return weight

    def add_all(self, op: Op, *values: FlowValue) -> tuple[FlowValue, ...]:
        """Append an op and return all of its results. A shape error names the weights at fault."""
        with locate_errors(self.builder.current_origin):
            try:
                return super().add_all(op, *values)
            except errors.ShapeError as error:
                at_fault = [values[i] for i in error.operands] or values
                weights = " and ".join(dict.fromkeys(w for v in at_fault for w in self._weights_of(self.unwrap(v))))
                if not weights:
                    raise
                raise errors.WeightShapeError(f"{error}; it reads {weights}") from error

    def _write(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        """Append the node of an op, or the smaller blocks of a composite if composites are expanded."""
        if not (self.expands_composites and isinstance(op, Hir) and op.traits.composite):
            return self.builder.add(op, *operands)
        self.builder.types.infer(
            op, tuple(self.builder.type(v) for v in operands)
        )  # reports errors of the composite itself
        with self.builder.origin_scope(replace(self.builder.current_origin, label=op.name())):
            return as_values(op.expand(self.builder, *operands))

    def _weights_of(self, value: Value) -> Iterator[str]:
        """Yield a description of each weight that a value is, as in the checkpoint, through casts and transposes."""
        node = self.builder.nodes[value.node]
        if len(node.inputs) == 1:
            yield from self._weights_of(node.inputs[0])
        if isinstance(node.op, Param):
            for stored in stored_keys(node.op.programs[0]):
                readers = {path_text(n.origin.path): None for n in self.builder.nodes if value in n.inputs}
                suffix = f" and is read by {listing(readers, 2)} too" if readers else ""
                yield f"{self.parameters.describe(stored.key)}, which is {stored.type}{suffix}"

    # -- parameters --------------------------------------------------------------------------

    def param(
        self, key: WeightKey | WeightStack, shape: AxisSizes | None = None, roles: Sequence[Role] | None = None,
        init: Init | None = None,
    ) -> FlowValue:  # fmt: skip
        """Return the weight under `key`, laid out as in the checkpoint.

        The weight of a projection is `[out, in]` there: `linear(x, key)` and `linear(x, w, transpose=True)` read it as
        it is, while `linear(x, w)` reads `[in, out]`. Floating weights enter the program as f32; packed ones are
        decoded.

        Args:
            key: a checkpoint key, a `WeightPart` of one, or a `WeightStack`, which is stacked along a new first axis.
            shape: the known sizes of the weight (of the part, for a `WeightPart`), None for an unknown size. Known
                sizes are checked against the source. If no source has the weight, the unknown sizes come from
                `flow.param(key, shape=…)` or from an earlier use of the weight.
            roles: roles of the axes in the checkpoint (`rlx_jax.ir.roles.ROLES`), by which a mesh of devices shards the
                weight. Without them it is replicated.
            init: initializer of a missing weight: `"zeros"`, `"ones"`, `"orthogonal"`, or a function `(key, shape,
                dtype) → array` such as `jax.nn.initializers.normal(0.02)`. The default depends on the op that reads the
                weight: normal with deviation 1/√fan_in for matrices, 1 for norms, 0 for biases.

        Raises:
            GraphError: invalid init or roles, or other ones than at an earlier use of the weight.
            MissingWeightError: the source has no such key, or there is no source and a size is not known.
            WeightShapeError: the source has another shape. WeightError: the weight is complex.
            UnsupportedError: the weight is packed in a scheme that cannot be decoded.
        """
        parameters, path = self.parameters, self.path
        if isinstance(key, WeightStack):
            program = parameters.stack_program(key, shape, roles, path)
        else:
            program = parameters.weight_program(key, shape, path)
            if roles is not None:
                (stored,) = stored_keys(program)  # a part of several has the roles of all
                parameters.record_roles(stored.key, roles, stored.type, path)
        if init is not None or parameters.declared:
            parameters.record_init(key, init, path)
        return self.wrap(self.builder.leaf(Param((program,), type=program.type)))

    def record_roles(self, weight: FlowValue, roles: Sequence[Role]) -> None:
        """Declare the roles of the axes of a weight that was read earlier."""
        op = self.builder.nodes[self.unwrap(weight).node].op
        for stored in stored_keys(op.programs[0]) if isinstance(op, Param) else ():
            self.parameters.record_roles(stored.key, roles, stored.type, self.path)

    def load_param(self, key: str, transpose: bool = False) -> FlowValue:
        """Return `param(key)`, transposed in the program with `transpose`; the parameter itself is the same."""
        value = self.param(key)
        loaded = value.transpose() if transpose else value
        # Only a record: repeated layers that shared a cached value would not become one region.
        self.state.loaded_params[key, transpose] = loaded
        return loaded

    def synth_param(self, name: str, data: Any, shape: Sequence[int] | None = None) -> FlowValue:
        """Return computed numbers as a constant of the program, at most 1 MiB, registered as `name` for later stages.

        It is no parameter: `model.params`, gradients and checkpoints do not have it. `shape` reshapes flat `data`.

        Raises:
            ShapeError: `data` has another number of elements. GraphError: `name` is already registered.
        """
        array = as_number_array(data, f"{self.path}: synth_param {quote(name)}")
        if shape is not None and math.prod(shape) != array.size:
            raise errors.ShapeError(
                f"{self.path}: synth_param {quote(name)}: {array.size} numbers are no {list(shape)}"
            )
        if name in self.state.named:
            raise errors.GraphError(f"{self.path}: {quote(name)} is registered already")
        with self.scope(name):
            value = self.constant(array if shape is None else array.reshape(tuple(shape)))
        self.set_named(name, value)
        return value

    def synth_zeros(self, name: str, length: int) -> FlowValue:
        """Return f32 zeros `[length]`, registered as `name`."""
        return self.synth_param(name, np.zeros(length, np.float32))

    def node_shape(self, value: FlowValue) -> tuple[int | Dim, ...]:
        """Return the shape of a value: `value.shape`."""
        return self.shape(value).shape

    def hir(self) -> Emit:
        """Return the HIR module that the stages write, which is this Emit; it has the methods of a GraphModule."""
        return self

    @property
    def module(self) -> Emit:
        """The program that the stages write, as `hir()`."""
        return self

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of the weights that were read so far, by key."""
        return self.hir_and_params()[1]

    @property
    def weights(self) -> WeightSource | None:
        """The weight source of the build (`keys`, `spec`, `has`), or None where the flow is built without weights."""
        return self.parameters.source

    def hir_and_params(self) -> tuple[Graph, dict[str, jax.ShapeDtypeStruct]]:
        """Return the graph that was written so far, without outputs, and the weights that it reads, by key."""
        graph = self.builder.finish(())
        stored = (k for leaf in graph.params() for program in leaf.programs for k in stored_keys(program))
        return graph, {k.key: k.type.spec for k in stored}

    def has_param(self, key: str) -> bool:
        """Return whether the weight source has `key`."""
        source = self.parameters.source
        return source is not None and source.has(key)

    # -- registers ---------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str | Dim], dtype: Any = "float32") -> FlowValue:
        """Return a declared input by name; declare it as a required one if the flow does not."""
        if name not in self.state.inputs:
            self.state.inputs[name] = self.wrap(self.builder.input(name, input_type(name, shape, dtype)))
        return self.flow_input(name)

    def flow_input(self, name: str) -> FlowValue:
        """Return a declared input by name. An absent optional input is an error (see `optional_input`)."""
        value = self.optional_input(name)
        if value is None:
            raise errors.UnboundInputError(f"{self.path}: input {quote(name)} is optional and was not given")
        return value

    def optional_input(self, name: str) -> FlowValue | None:
        """Return a declared input by name, or None if it is absent and optional without a default value."""
        check_names(
            [name], self.state.inputs, f"{self.path}: no input", " is declared; known:", errors.UnboundInputError
        )
        return self.state.inputs[name]

    def set_named(self, key: str, value: FlowValue) -> None:
        """Register `value` under `key` for later stages."""
        self.state.named[key] = value

    def named(self, key: str) -> FlowValue:
        """Return the value that an earlier stage registered under `key`."""
        check_names([key], self.state.named, f"{self.path}: nothing is registered as", "; registered are")
        return self.state.named[key]

    def set_gdn(self, q: FlowValue, k: FlowValue, v: FlowValue, g: FlowValue, beta: FlowValue) -> None:
        """Register the inputs of a GdnScan: q, k, v `[B,S,heads,n]`, g and beta `[B,S,heads]`."""
        self.state.gdn = GdnInputSlots(q, k, v, g, beta)

    def set_stream(self, name: str, value: FlowValue) -> None:
        """Save `value` as stream `name`."""
        self.state.streams[name] = value

    def stream(self, name: str) -> FlowValue:
        """Return the value of the stream `name`, which an earlier stage saved."""
        suffix = "; store_stream(name) and bind_inputs_to_streams keep one; streams are"
        check_names([name], self.state.streams, f"{self.path}: there is no stream", suffix)
        return self.state.streams[name]

    def output(self, name: str, value: FlowValue) -> None:
        """Add a side output of the flow under `name`, after the primary one."""
        if name in self.state.outputs:
            raise errors.GraphError(f"{self.path}: there is a side output {quote(name)} already")
        self.state.outputs[name] = value

    def require(self, value: FlowValue | None, stage: str) -> FlowValue:
        """Return the active value of a stage that needs one.

        Raises:
            GraphError: there is no active value; the message names the stage that returned None.
        """
        if value is None:
            stage_name = self.state.last_none_stage
            reason = f"the stage {stage_name} before it returned None" if stage_name else "there is no active value"
            raise errors.GraphError(f"{self.path}: {stage} requires input, but {reason}")
        return value
