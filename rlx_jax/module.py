"""`GraphModule`: a program at one level (HIR or MIR) that is built by hand, printed, lowered and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlx_jax.errors import GraphError, LevelError, ShapeError, WeightShapeError
from rlx_jax.flow import BuiltModel, InputDecl, Weights
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Hir, Node, Op, Origin, Param, TypeCache, Value, everywhere, rewrite
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Unary
from rlx_jax.ir.ops.shaping import Concat, Narrow, Softmax, Transpose
from rlx_jax.ir.param import Key, WeightSource, cast
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.weights.source import open_weights

GraphStage = Literal["hir", "mir"]


@dataclass(eq=False)
class GraphModule:
    """A graph that is being built. `len(module)` is its number of nodes. `rlx_jax.compile` takes it like a flow.

    >>> m = GraphModule.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))
    >>> m.stage, len(m), m.lower().stage
    ('hir', 3, 'mir')
    """

    name: str
    stage: GraphStage
    builder: Builder = field(repr=False)
    outputs: list[Value] = field(default_factory=list, repr=False)
    policy: str = "direct"

    # -- opening -----------------------------------------------------------------------------

    @staticmethod
    def hir(name: str) -> GraphModule:
        """An empty HIR module."""
        return GraphModule(name, "hir", Builder(name, TypeCache()))

    @staticmethod
    def mir(name: str) -> GraphModule:
        """An empty MIR module."""
        return GraphModule(name, "mir", Builder(name, TypeCache()))

    @staticmethod
    def define(name: str, build: Callable[[GraphModule], Value]) -> GraphModule:
        """A HIR module whose only output is what `build` returns."""
        module = GraphModule.hir(name)
        module.set_outputs([build(module)])
        return module

    @staticmethod
    def from_graph(graph: Graph, stage: GraphStage, types: TypeCache, policy: str = "direct") -> GraphModule:
        """Wrap a finished graph."""
        builder = Builder(graph.name, types)
        builder.nodes, builder.inputs, builder.writes = list(graph.nodes), list(graph.inputs), list(graph.writes)
        return GraphModule(graph.name, stage, builder, list(graph.outputs), policy)

    # -- building ----------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int | str], dtype: Any = "f32") -> Value:
        """Declare an input."""
        return self.builder.input(name, tensor_type(tuple(shape), dtype, f"input {name}"))

    def param(self, name: str, shape: Sequence[int], dtype: Any = "f32") -> Value:
        """Declare a parameter; `name` is its weight key."""
        type = tensor_type(tuple(shape), dtype, f"param {name}")
        return self.builder.leaf(Param((Key(name, type),), type=type))

    def set_outputs(self, values: Sequence[Value]) -> None:
        """Set the outputs."""
        self.outputs = list(values)

    def named(self, name: str, build: Callable[[GraphModule], Value]) -> Value:
        """Run `build` inside a block path segment `name`."""
        with self.builder.at(Origin((*self.builder.origin.path, name))):
            return build(self)

    def shape(self, value: Value) -> TensorType:
        """The type of a value."""
        return self.builder.type(value)

    def add_node(self, op: Op, *values: Value, out_shape: Sequence[Any] | None = None) -> Value:
        """Append any op with one result; `out_shape` is checked against what is inferred.

        Raises:
            LevelError: a HIR block in a MIR module. ShapeError, DTypeError, ArityError: it does not fit.
        """
        if self.stage != "hir" and isinstance(op, Hir):
            raise LevelError(f"{op.name()} is a HIR block; module {self.name!r} is at level {self.stage}")
        value = self.builder(op, *values)
        if out_shape is not None and tuple(out_shape) != self.shape(value).shape:
            raise ShapeError(f"{op.name()}: declared {tuple(out_shape)}, inferred {self.shape(value)}")
        return value

    def linear(self, x: Value, w: Value, b: Value | None = None, activation: str = "") -> Value:
        """`act(x · w [+ b])`, w `[in, out]`."""
        op = hir.Linear(bias=b is not None, activation=activation)
        return self.add_node(op, x, w, *([b] if b is not None else []))

    def swiglu_ffn(self, x: Value, up: Value, gate: Value, down: Value) -> Value:
        """`(silu(x · gate) ⊙ (x · up)) · down`, weights `[in, out]`."""
        return self.linear(self.add_node(hir.GatedFfn(), self.linear(x, gate), self.linear(x, up)), down)

    def rms_norm(self, x: Value, gamma: Value, beta: Value, eps: float = 1e-5) -> Value:
        """RMSNorm over the last axis."""
        return self.add_node(hir.RmsNorm(eps), x, gamma, beta)

    def layer_norm(self, x: Value, gamma: Value, beta: Value, eps: float = 1e-5) -> Value:
        """LayerNorm over the last axis."""
        return self.add_node(hir.LayerNorm(eps), x, gamma, beta)

    def rope(self, x: Value, cos: Value, sin: Value, head_dim: int, n_rot: int | None = None) -> Value:
        """Rotary embedding of packed heads; cos and sin `[B|1, S, R/2]`."""
        return self.add_node(hir.Rope(head_dim, n_rot or head_dim), x, cos, sin)

    def attention(
        self, q: Value, k: Value, v: Value, heads: int, kv_heads: int | None = None, mask: Any = "causal", *extra: Value
    ) -> Value:
        """Attention over packed heads; `extra` is the keep mask or the bias of those mask kinds."""
        return self.add_node(hir.attention(heads, kv_heads or heads, hir.mask_kind(mask)), q, k, v, *extra)

    def binary(self, kind: str, a: Value, b: Value) -> Value:
        """`add`, `sub`, `mul`, `div`, `max`, `min`, `pow`."""
        return self.add_node(Binary(kind), a, b)

    def activation(self, kind: str, x: Value) -> Value:
        """A function of one value, by its name in `UNARY`."""
        return self.add_node(Unary(kind), x)

    def softmax(self, x: Value, axis: int = -1) -> Value:
        """Softmax along `axis`."""
        return self.add_node(Softmax(axis), x)

    def cast(self, x: Value, dtype: Any) -> Value:
        """The same values in another dtype."""
        return self.add_node(CastTo(as_dtype(dtype)), x)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Join values along `axis`."""
        return self.add_node(Concat(axis), *values)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Permute the axes."""
        return self.add_node(Transpose(tuple(perm)), x)

    def narrow(self, x: Value, axis: int, start: int, length: int) -> Value:
        """`length` elements of one axis from `start` on."""
        return self.add_node(Narrow(axis, start, length), x)

    # -- finishing ---------------------------------------------------------------------------

    def graph(self) -> Graph:
        """The finished, verified graph.

        Raises:
            GraphError: there are no outputs.
        """
        if not self.outputs:
            raise GraphError(f"module {self.name!r} has no outputs: set_outputs([...])")
        names = ["output"] if len(self.outputs) == 1 else [f"output{i}" for i in range(len(self.outputs))]
        return verify(self.builder.finish(self.outputs, names), self.stage, "building", self.builder.types)

    def lower(self) -> GraphModule:
        """HIR → MIR; MIR as it is."""
        if self.stage == "mir":
            return self
        types = self.builder.types
        lowered = lower(expand_composites(self.graph(), types), self.policy, types)
        return GraphModule.from_graph(verify(lowered, "mir", "lower", types), "mir", types, self.policy)

    def __len__(self) -> int:
        return len(self.builder.nodes)

    def inspect(self) -> str:
        """The dump of the graph."""
        return dump(self.graph(), self.stage, f", fusion={self.policy}" if self.stage == "hir" else "")

    def __str__(self) -> str:
        return self.inspect()

    # -- as a flow ---------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The declared inputs."""
        return tuple(InputDecl(i.input, i.type) for i in self.builder.inputs)

    @property
    def binding(self) -> Mapping[str, int]:
        """No sizes are chosen ahead."""
        return {}

    def build(self, weights: Weights = None, given: Iterable[str] = ()) -> BuiltModel:
        """The graph bound to weights, as `ModelFlow.build` gives it."""
        source = None if weights is None else open_weights(weights)
        graph = self.graph()
        keys = tuple(p.programs[0].key for p in graph.params() if isinstance(p.programs[0], Key))
        if source is not None:
            graph = _bind(graph, source, self.builder.types)
        return BuiltModel(self.name, graph, source, None, self.builder.types, keys)


def _bind(graph: Graph, source: WeightSource, types: TypeCache) -> Graph:
    """Point parameters at what the source stores, cast to the declared dtype."""

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if not isinstance(op, Param) or not isinstance(op.programs[0], Key):
            return None
        key = op.programs[0].key
        spec = source.spec(key)
        stored = tensor_type(tuple(spec.shape), spec.dtype, key)
        if stored.shape != op.type.shape:
            raise WeightShapeError(f"weight {key!r} ({source.where(key)}): declared {op.type}, got {stored}")
        return (b.leaf(Param((cast(Key(key, stored), op.type.dtype),), type=op.type)),)

    return rewrite(graph, everywhere(fn), types)
