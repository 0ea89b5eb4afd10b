"""How a stage writes HIR: `Emit`, the builder and the registers that stages share. Values are `FlowValue`s.

A stage gets the `Emit` and the active `FlowValue` and returns the next active value. Custom stages use
operators on values, the methods of `Emit`, or `emit.jax` for any JAX function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import (
    DTypeError,
    GraphError,
    MissingWeightError,
    NameCollisionError,
    ShapeError,
    UnboundInputError,
    UnboundStreamError,
    WeightDTypeError,
    WeightShapeError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.flow_value import FlowValue as FlowValue
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Op, Param, Value, located
from rlx_jax.ir.ops import pointwise, shaping
from rlx_jax.ir.param import Key, Program, WeightSource, cast, stored_keys
from rlx_jax.ir.types import TensorType, as_dtype, is_float, path_text, tensor_type

F32 = np.dtype(np.float32)
NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32"}  # JAX has no 64-bit types by default


def input_type(name: str, shape: Sequence[int | str], dtype: Any) -> TensorType:
    """The type of an input that is declared; 64-bit ones are narrowed."""
    if not isinstance(name, str) or not name.isidentifier():
        raise GraphError(f"an input's name is an identifier, got {quote(name)}")
    if name in ("state", "params"):
        raise NameCollisionError(f"an input cannot be called {quote(name)}: calls use that name")
    return tensor_type(shape, NARROWED.get(as_dtype(dtype).name, dtype), f"input {name}")


@dataclass(frozen=True)
class DecodeBindings:
    """What decode layers read: the cached keys and values of each layer `[B, P, K·D]`, a keep mask `[B, P+S]`, and the
    position of each key among those that the mask keeps, int32 `[B, P+S]`."""

    past: tuple[tuple[FlowValue, FlowValue], ...]
    mask: FlowValue | None = None
    key_positions: FlowValue | None = None
    use_custom_mask: bool = False


@dataclass
class FlowState:
    """Registers that one stage writes and a later one reads.

    `rope_tables` are the RopeTables stages that ran, each with the cos it made.
    """

    rope_cos: FlowValue | None = None
    rope_sin: FlowValue | None = None
    rope_tables: list[tuple[Any, FlowValue]] = field(default_factory=list)
    decode: DecodeBindings | None = None
    zero_beta: FlowValue | None = None
    embed_weight: FlowValue | None = None
    residual: FlowValue | None = None
    inputs: dict[str, FlowValue | None] = field(default_factory=dict)
    named: dict[str, FlowValue] = field(default_factory=dict)
    streams: dict[str, FlowValue] = field(default_factory=dict)
    outputs: dict[str, FlowValue] = field(default_factory=dict)
    repeats: list[list[int]] = field(default_factory=list)
    left_none: str = ""


class Emit:
    """Writes the HIR of one flow. Parameters are references: nothing here reads weight data."""

    def __init__(self, builder: Builder, source: WeightSource | None) -> None:
        self.builder = builder
        self.source = source
        self.state = FlowState()
        self.keys_read: dict[str, None] = {}
        self.repeating = False
        self._zeros: dict[int, FlowValue] = {}
        self._declared: dict[str, TensorType] = {}
        self._types: dict[tuple[tuple[int, ...], np.dtype[Any]], TensorType] = {}

    # -- where we are ------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, *segments: str | int) -> Iterator[None]:
        """Add segments to the block path of everything emitted inside."""
        origin = self.builder.origin
        with self.builder.at(replace(origin, path=(*origin.path, *segments))):
            yield

    @property
    def path(self) -> str:
        """The current block path, `layers.3.self_attn`; the name of the flow outside of all blocks."""
        return path_text(self.builder.here.path)

    # -- values ------------------------------------------------------------------------------

    def wrap(self, value: Value) -> FlowValue:
        """A graph value with operators."""
        return FlowValue(self, value)

    def add(self, op: Op, *values: FlowValue) -> FlowValue:
        """Append an op with one result."""
        (value,) = self.add_all(op, *values)
        return value

    def add_all(self, op: Op, *values: FlowValue) -> tuple[FlowValue, ...]:
        """Append an op; all of its results."""
        operands = [self._own(v) for v in values]
        with located(self.builder.here):
            try:
                return tuple(self.wrap(v) for v in self.builder.add(op, *operands))
            except ShapeError as error:
                weights = " and ".join(dict.fromkeys(w for v in operands for w in self._weights_of(v)))
                if not weights:
                    raise
                raise WeightShapeError(f"{error}; it reads {weights}") from error

    def _weights_of(self, value: Value) -> Iterator[str]:
        """The weights that a value is, as stored, looking through casts and transposes."""
        node = self.builder.nodes[value.node]
        if len(node.inputs) == 1:
            yield from self._weights_of(node.inputs[0])
        if isinstance(node.op, Param):
            for stored in stored_keys(node.op.programs[0]):
                file = f" ({self.source.where(stored.key)})" if self.source else ""
                yield f"weight {quote(stored.key)}{file}, which is {stored.type}"

    def _own(self, value: FlowValue) -> Value:
        if not isinstance(value, FlowValue):
            raise GraphError(
                f"{self.path}: expected a FlowValue, got {type(value).__name__}; wrap numbers with operators"
            )
        if value.emit is not self:
            raise GraphError(f"{self.path}: a value of another flow, or kept from an earlier build, is used here")
        return value.value

    def constant(self, array: Any, dtype: Any = "f32") -> FlowValue:
        """A small constant of the program (not a weight): at most 1 MiB."""
        with located(self.builder.here):
            return self.wrap(self.builder.leaf(pointwise.small_constant(array, dtype)))

    def zeros(self, length: int) -> FlowValue:
        """f32 zeros `[length]`: the beta of an RMSNorm that has none. Made once for each length."""
        if length not in self._zeros:
            self._zeros[length] = self.constant(np.zeros(length, np.float32))
        return self._zeros[length]

    # -- parameters --------------------------------------------------------------------------

    def param(self, key: str, shape: tuple[int, ...] | None = None) -> FlowValue:
        """The weight stored under `key`, as stored. Floating weights enter the program as f32.

        `shape` is checked against the source, and stands in for it when there is none.

        Raises:
            MissingWeightError: the source has no such key, or there is no source and no `shape`.
            WeightShapeError: the source has another shape. WeightDTypeError: it has complex numbers.
        """
        if not isinstance(key, str):
            raise GraphError(f"{self.path}: a weight key is a string, got {shown(key)}")
        stored = self._stored(key, shape)
        if stored.dtype.kind == "c":
            file = f" ({self.source.where(key)})" if self.source else ""
            raise WeightDTypeError(
                f"{self.path}: weight {quote(key)}{file} is {stored}; expected floats, integers or bools: "
                "store the real and the imaginary part as two weights"
            )
        program: Program = Key(key, stored)
        if is_float(stored.dtype):
            program = cast(program, F32)
        elif stored.dtype.itemsize == 8:  # JAX has no 64-bit integers by default; values are checked when they load
            program = cast(program, np.dtype(f"{'u' if stored.dtype.kind == 'u' else ''}int32"))
        self.keys_read[key] = None
        return self.wrap(self.builder.leaf(Param((program,), type=program.type)))

    def _stored(self, key: str, shape: tuple[int, ...] | None) -> TensorType:
        if self.source is None:
            if shape is None:
                raise MissingWeightError(
                    f"{self.path}: the shape of weight {quote(key)} is not known; give weights=, shape= on the stage, "
                    "or a mapping of jax.ShapeDtypeStruct"
                )
            declared = tensor_type(shape, F32, key)
            if self._declared.setdefault(key, declared) != declared:
                before, now = list(self._declared[key].shape), list(declared.shape)
                raise WeightShapeError(f"{self.path}: weight {quote(key)} is {before} elsewhere and {now} here")
            return declared
        try:
            spec = self.source.spec(key)
        except MissingWeightError as error:
            raise MissingWeightError(f"{self.path}: {error}") from error
        known = (tuple(spec.shape), spec.dtype)
        stored = self._types.get(known) or self._types.setdefault(known, tensor_type(*known, key))
        if shape is not None and tuple(shape) != stored.shape:
            raise WeightShapeError(
                f"{self.path}: weight {quote(key)} ({self.source.where(key)}): expected {list(shape)}, got {stored}"
            )
        return stored

    def load_param(self, key: str, transpose: bool = False) -> FlowValue:
        """`param(key)`, transposed in the program when asked: the leaf is stored once either way."""
        value = self.param(key)
        return value.transpose() if transpose else value

    def has_param(self, key: str) -> bool:
        """Whether the weight source holds `key`."""
        return self.source is not None and self.source.has(key)

    # -- registers ---------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str], dtype: Any = "float32") -> FlowValue:
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
        if key not in self.state.named:
            raise UnboundStreamError(
                f"{self.path}: nothing is registered as {quote(key)}; registered are {listing(self.state.named)}"
            )
        return self.state.named[key]

    def set_stream(self, name: str, value: FlowValue) -> None:
        """Keep `value` as stream `name`."""
        self.state.streams[name] = value

    def stream(self, name: str) -> FlowValue:
        """The stream that an earlier stage kept as `name`."""
        if name not in self.state.streams:
            known = list(self.state.streams)
            raise UnboundStreamError(
                f"{self.path}: there is no stream {quote(name)}; streams are {listing(known) or 'none'}"
                f"{did_you_mean(name, known)}"
            )
        return self.state.streams[name]

    def output(self, name: str, value: FlowValue) -> None:
        """Add a side output of the flow under `name`, after the primary one."""
        if name in self.state.outputs:
            raise NameCollisionError(f"{self.path}: there is a side output {quote(name)} already")
        self.state.outputs[name] = value

    def require(self, value: FlowValue | None, stage: str) -> FlowValue:
        """The active value of a stage that needs one."""
        if value is None:
            left = self.state.left_none
            why = f"the stage {left} before it returned None" if left else "there is no active value"
            raise GraphError(f"{self.path}: {stage} requires input, but {why}")
        return value

    # -- functions ---------------------------------------------------------------------------

    def jax(self, fn: Callable[..., Any], *values: FlowValue) -> Any:
        """Call any JAX function on values: an array gives a FlowValue, a tuple of arrays a tuple of them.

        The function is traced with symbolic sizes, so it may not branch on them. Captured constants over
        1 MiB are an error.
        """
        results = self.add_all(pointwise.JaxFn(fn), *values)
        if len(results) > 1:
            return results
        out = jax.eval_shape(fn, *(v.type.spec for v in values))
        return results if isinstance(out, tuple | list) else results[0]

    def unary(self, kind: str, x: FlowValue) -> FlowValue:
        """A function of one value by its name in `UNARY`."""
        return self.add(pointwise.Unary(kind), x)

    def sigmoid(self, x: FlowValue) -> FlowValue:
        """σ(x)."""
        return self.unary("sigmoid", x)

    def silu(self, x: FlowValue) -> FlowValue:
        """x σ(x)."""
        return self.unary("silu", x)

    def gelu(self, x: FlowValue, approximate: bool = False) -> FlowValue:
        """GELU, exact or with tanh."""
        return self.unary("gelu_tanh" if approximate else "gelu", x)

    def relu(self, x: FlowValue) -> FlowValue:
        """max(x, 0)."""
        return self.unary("relu", x)

    def tanh(self, x: FlowValue) -> FlowValue:
        """tanh x."""
        return self.unary("tanh", x)

    def exp(self, x: FlowValue) -> FlowValue:
        """eˣ."""
        return self.unary("exp", x)

    def log(self, x: FlowValue) -> FlowValue:
        """ln x."""
        return self.unary("log", x)

    def sqrt(self, x: FlowValue) -> FlowValue:
        """√x."""
        return self.unary("sqrt", x)

    def rsqrt(self, x: FlowValue) -> FlowValue:
        """1/√x."""
        return self.unary("rsqrt", x)

    def sin(self, x: FlowValue) -> FlowValue:
        """sin x."""
        return self.unary("sin", x)

    def cos(self, x: FlowValue) -> FlowValue:
        """cos x."""
        return self.unary("cos", x)

    def softmax(self, x: FlowValue, axis: int = -1) -> FlowValue:
        """Softmax along `axis`."""
        return self.add(shaping.Softmax(axis), x)

    def cumsum(self, x: FlowValue, axis: int = -1, exclusive: bool = False) -> FlowValue:
        """The running sum along `axis`; `exclusive` leaves each entry out of its own sum."""
        return self.add(shaping.Cumsum(axis, exclusive), x)

    def where(self, condition: FlowValue, on_true: Any, on_false: Any) -> FlowValue:
        """`on_true` where `condition`, else `on_false`; numbers are allowed for one of them."""
        if not isinstance(on_true, FlowValue | bool) and not isinstance(on_false, FlowValue):
            on_true = self.constant(on_true)
        like = on_true if isinstance(on_true, FlowValue) else on_false
        return self.add(pointwise.Where(), condition, self.lift(on_true, like), self.lift(on_false, like))

    def concat(self, values: list[FlowValue], axis: int = -1) -> FlowValue:
        """Join values along `axis`."""
        if not values:
            raise GraphError(f"{self.path}: concat of no values")
        return self.add(shaping.Concat(values[0].axis(axis)), *values)

    def maximum(self, a: Any, b: Any) -> FlowValue:
        """The larger of two, element by element."""
        return self._binary("max", a, b)

    def minimum(self, a: Any, b: Any) -> FlowValue:
        """The smaller of two, element by element."""
        return self._binary("min", a, b)

    def linear(
        self, x: FlowValue, key: str, bias: str | None = None, transpose: bool = True, activation: str = ""
    ) -> FlowValue:
        """`act(x W + b)`; the weight under `key` is `[out, in]` (`transpose`) or `[in, out]`."""
        operands = [x, self.param(key)] + ([self.param(bias)] if bias else [])
        return self.add(hir.Linear(int(transpose), bias=bool(bias), activation=activation), *operands)

    def rms_norm(self, x: FlowValue, key: str, eps: float, offset: float = 0.0) -> FlowValue:
        """RMSNorm over the last axis; γ is the weight under `key` plus `offset`, which is 1 for Gemma."""
        beta = [self.state.zero_beta] if self.state.zero_beta is not None and self._fits_beta(x) else []
        return self.add(hir.RmsNorm(eps, offset), x, self.param(key), *beta)

    def layer_norm(self, x: FlowValue, gamma: str, beta: str, eps: float) -> FlowValue:
        """LayerNorm with weights under `gamma` and `beta`."""
        return self.add(hir.LayerNorm(eps), x, self.param(gamma), self.param(beta))

    def _fits_beta(self, x: FlowValue) -> bool:
        beta = self.state.zero_beta
        return beta is not None and beta.type.shape == x.type.shape[-1:]

    def lift(self, value: Any, like: FlowValue) -> FlowValue:
        """A number as a scalar constant in the dtype of `like`; a FlowValue as it is."""
        if isinstance(value, FlowValue):
            return value
        if isinstance(value, bool | int | float | np.number):
            if not is_float(like.dtype) and value != int(value):
                raise DTypeError(f"{self.path}: {value} with a value of {like.type}: cast it first, .astype('float32')")
            return self.wrap(self.builder.scalar(float(value), like.value))
        raise GraphError(
            f"{self.path}: cannot combine a FlowValue with {type(value).__name__}; "
            "use emit.constant for a small array, emit.param for a weight, emit.jax for a JAX function"
        )

    def _binary(self, kind: str, a: Any, b: Any) -> FlowValue:
        like = a if isinstance(a, FlowValue) else b
        if not isinstance(like, FlowValue):
            raise GraphError(f"{self.path}: {kind} of {a!r} and {b!r}: one of them must be a FlowValue")
        return self.add(pointwise.Binary(kind), self.lift(a, like), self.lift(b, like))
