"""Quantization of programs written by hand: schemes, and rounding of values as integer hardware does.

The products with quantized weights are methods of `GraphModule` and `Emit`, such as `dequant_matmul`. Fake quantization
rounds values of a graph; the scales of `insert_q_dq` come from calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real

import numpy as np

from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import DTypeError, GraphError, shown
from rlx_jax.ir.graph import Builder, Graph, GraphStage, Node, Param, Value
from rlx_jax.ir.ops.conv import Pool
from rlx_jax.ir.ops.pointwise import FakeQuantize, Unary
from rlx_jax.ir.ops.shape import Concat, Narrow, Reshape, Transpose
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.region import Rewrite, rewrite
from rlx_jax.ir.types import is_float
from rlx_jax.trace.quant_scheme import QuantScheme as QuantScheme

# The schemes of values of a graph; a table of the user that no pass reads.
QuantMap = dict[Value, QuantScheme]

_FLOAT32 = np.finfo(np.float32)


def quant_map(module: GraphModule) -> QuantMap:
    """Return the schemes of the packed parameters of a module, by their values."""
    params = ((module.wrap(Value(i, 0)), n.op) for i, n in enumerate(module.builder.nodes) if isinstance(n.op, Param))
    schemes = ((value, packing_of(op.programs[0])) for value, op in params)
    return {value: QuantScheme(scheme) for value, scheme in schemes if scheme is not None}


@dataclass(frozen=True)
class Scale:
    """The rounding of one value: `dequantize(quantize(x))` with `scale` and `zero_point` in `dtype`, i8 or u8."""

    scale: float
    zero_point: int = 0
    dtype: str = "i8"

    def __post_init__(self) -> None:
        is_number = isinstance(self.scale, Real) and not isinstance(self.scale, bool)
        scale = self.scale.item() if isinstance(self.scale, np.generic) else self.scale
        # XLA may take a number below the smallest normal one as 0.
        if not is_number or not _FLOAT32.tiny.item() <= scale <= _FLOAT32.max.item():
            raise GraphError(f"insert_q_dq: a scale is a normal number of float32 over 0, got {shown(self.scale)}")
        low = {"i8": -128, "u8": 0}.get(str(self.dtype))
        if low is None or not isinstance(self.zero_point, Integral) or not low <= self.zero_point <= low + 255:
            raise GraphError(
                f"insert_q_dq: dtype is i8 or u8 and zero_point one of its numbers, got {shown(self.dtype)} and "
                f"{shown(self.zero_point)}"
            )


def insert_q_dq(module: GraphModule, record: Mapping[Value, Scale]) -> GraphModule:
    """Return a module in which every value of `record` is rounded, for all readers and outputs.

    Args:
        module: a module at HIR or MIR.
        record: the values to round, and how.

    Raises:
        GraphError: the module is at LIR, a key is no value of the module, or a value of the mapping is no `Scale`.
        DTypeError: a value is not floating.
    """
    if module.stage == GraphStage.LIR:
        raise GraphError(f"module {module.name!r} is at lir: round before it is planned")
    scales: dict[Value, Scale] = {}
    for value, scale in record.items():
        if not isinstance(scale, Scale):
            raise GraphError(f"{module.name}: insert_q_dq: expected a Scale, got {shown(scale)}")
        graph_value = module.unwrap(value)
        if not is_float(module.type_of(value).dtype):
            raise DTypeError(f"{module.name}: insert_q_dq: {module.node_label(value)} is {module.type_of(value)}")
        scales[graph_value] = scale
    graph = module.finish()

    def enter(inner: Graph) -> Rewrite:
        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            # The record has values of the top-level graph; node numbers in a region mean other nodes.
            rounding = {i: scales.get(Value(number, i)) for i in range(len(node.types))} if inner is graph else {}
            if not any(rounding.values()):
                return None
            results = b.append(node.op, *inputs)
            writer = GraphModule(module.name, module.stage, b)
            return tuple(v if (s := rounding[i]) is None else _rounded(writer, v, s) for i, v in enumerate(results))

        return fn

    out = rewrite(graph, enter, module.builder.types, "insert_q_dq")
    return GraphModule.of(out, module.stage, module.builder.types, module.policy)


def _rounded(m: GraphModule, value: Value, s: Scale) -> Value:
    """Append `dequantize(quantize(value))` to the module, and return its value, in the dtype of the original."""
    scale, zero = float(s.scale), int(s.zero_point) or None  # symmetric quantization needs no zero point
    dtype = m.type_of(value).dtype
    return m.unwrap(m.dequantize(m.quantize(value, scale, zero, dtype=s.dtype), scale, zero, dtype=dtype))


def quant_propagate(module: GraphModule) -> tuple[GraphModule, int]:
    """Return a module without redundant `fake_quantize`, and the number of those that are dropped.

    One is redundant if its operand is the result of an equal one, through ops that keep the values on its grid: reshape
    and transpose for a scale of all values, and if both have the same scale as an operand, also narrow, concat, relu
    and max pooling; with an `axis` relu and max pooling alone. Values stay the same but for rounding, and so do
    gradients. Those with a learned scale or another gradient (`ste`) than "identity" and "clipped" are retained.

    Raises:
        GraphError: the module is at LIR.
    """
    if module.stage == GraphStage.LIR:
        raise GraphError(f"module {module.name!r} is at lir: remove rounding before it is planned")
    dropped: list[int] = []

    def enter(graph: Graph) -> Rewrite:
        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if not isinstance(node.op, FakeQuantize) or not _is_rounded(graph, node.inputs[0], graph.nodes[number]):
                return None
            dropped.append(number)
            return inputs[:1]

        return fn

    out = rewrite(module.finish(), enter, module.builder.types, "quant_propagate")
    return GraphModule.of(out, module.stage, module.builder.types, module.policy), len(dropped)


def _is_rounded(graph: Graph, value: Value, rounding: Node) -> bool:
    """Return whether `value` is on the grid of the `FakeQuantize` of the node `rounding` already."""
    node, op, has_scale = graph.nodes[value.node], rounding.op, len(rounding.inputs) > 1
    assert isinstance(op, FakeQuantize)
    if op.learned or op.ste not in ("identity", "clipped"):
        return False
    if isinstance(node.op, FakeQuantize):
        return node.op == op and node.inputs[1:] == rounding.inputs[1:]
    is_pool = isinstance(node.op, Pool) and node.op.kind == "max" and (op.axis is None or op.axis in (0, 1))
    # These may drop the largest value, so that a scale computed from their result would be another one.
    keeps_grid = has_scale and (is_pool or node.op == Unary("relu"))
    if op.axis is None:
        keeps_grid |= isinstance(node.op, Reshape | Transpose) or (has_scale and isinstance(node.op, Narrow | Concat))
    return keeps_grid and all(_is_rounded(graph, operand, rounding) for operand in node.inputs)
