"""The head of a program: its last product with a weight, and the elementwise ops after it.

A loss over a large vocabulary computes the head in chunks, and the rest of the program at once.
"""

from __future__ import annotations

from typing import Any

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import CastTo, Unary
from rlx_jax.ir.ops.shape import Narrow, Shard
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.mir.small import dce

# Names of the outputs of a program that ends at its head; without `bias` if the head has none.
OPERANDS = ("hidden", "weight", "bias")


@dataclass(frozen=True)
class Head:
    """`tail(product(hidden, weight[, bias]))`, the first output of a program.

    Attributes:
        product: the op, without an activation; `contract` is the axis of the weight that it sums over.
        operands: its operands in the program, weights before their cast to `dtype`.
        dtype: the dtype in which the operands are multiplied.
        type: the type of the product.
        tail: the elementwise graph of one operand, the product, that computes the output.
    """

    product: MatMul | FusedMatMulBiasAct
    operands: tuple[Value, ...]
    dtype: Any
    type: TensorType
    tail: Graph = field(repr=False)

    @property
    def vocab_size(self) -> Any:
        """Return the number of logits per token; the product may have padding in addition."""
        return self.tail.output_types[0].shape[-1]


def find_head(graph: Graph) -> Head:
    """Find the head of a MIR program: a product followed by casts and elementwise ops only.

    Raises:
        GraphError: the first output is computed in another way; names the node in question.
    """
    tail: list[int] = []
    products: list[int] = []
    live = {graph.outputs[0].node}
    for number in range(len(graph.nodes) - 1, -1, -1):
        if number not in live:
            continue
        node = graph.nodes[number]
        if isinstance(node.op, MatMul | FusedMatMulBiasAct):
            products.append(number)
            continue
        _check_elementwise(graph, node)
        tail.append(number)
        live.update(v.node for v in node.inputs)
    if len(products) != 1:
        raise GraphError(
            f"{graph.name}: output {graph.output_names[0]!r} is computed by {len(products)} products with weights; "
            f"a head is {_HEAD_FORM}"
        )
    node = graph.nodes[products[0]]
    operands = (node.inputs[0], *(_weight(graph, node, v) for v in node.inputs[1:]))
    product: Any = node.op
    activation = getattr(product, "activation", "")
    product = replace(product, activation="") if activation else product
    tail_graph = _tail_graph(graph, products[0], sorted(tail), activation)
    return Head(product, operands, graph.type(node.inputs[0]).dtype, node.types[0], tail_graph)


_HEAD_FORM = "one product of hidden states with a weight, followed only by casts and elementwise functions"


def _check_elementwise(graph: Graph, node: Node) -> None:
    """Check that a node after the product is elementwise and the same for all tokens, or removes padding.

    Raises:
        GraphError: it is another op.
    """
    where = path_text(node.origin.path) or graph.name
    if isinstance(node.op, Constant):
        if any(size != 1 for size in node.op.type.shape[:-1]):
            raise GraphError(
                f"{where}: constant {node.op.type} differs by token; ops after a head treat all tokens equally"
            )
        return
    if isinstance(node.op, Shard) or (isinstance(node.op, Narrow) and node.op.axis == node.types[0].rank - 1):
        return  # a sharding constraint, or a slice that removes the padding of the vocabulary
    traits = getattr(node.op, "traits", None)
    if not node.inputs or not (isinstance(node.op, CastTo) or getattr(traits, "numeric", "") == "elementwise"):
        raise GraphError(
            f"{where}: the output {graph.output_names[0]!r} comes from no head, {node.op.text()} computes it or "
            f"follows the last product: a head is {_HEAD_FORM}"
        )


def _weight(graph: Graph, node: Node, value: Value) -> Value:
    """Return the parameter of an operand, before its casts.

    Raises:
        GraphError: the operand is not a parameter.
    """
    while isinstance((producer := graph.nodes[value.node]).op, CastTo):
        (value,) = producer.inputs
    if not isinstance(producer.op, Param):
        raise GraphError(
            f"{path_text(node.origin.path)}: {node.op.text()} is no head: it multiplies with {producer.op.text()}, "
            "not with a parameter"
        )
    return value


def _tail_graph(graph: Graph, product: int, numbers: list[int], activation: str) -> Graph:
    """Return the nodes after the product as a separate graph, beginning with the activation fused with the product."""
    b = Builder("tail", TypeCache())
    product_value = b.leaf(BodyInput(0, type=graph.nodes[product].types[0]))
    mapped = {Value(product): b(Unary(activation), product_value) if activation else product_value}
    for number in numbers:
        b.copy(graph.nodes[number], number, mapped)
    return b.finish([mapped[graph.outputs[0]]])


def up_to_head(graph: Graph, types: TypeCache) -> Graph:
    """Return the program up to its head: its outputs are the head's operands, with the names in `OPERANDS`."""
    operands = find_head(graph).operands
    return dce(replace(graph, outputs=operands, output_names=OPERANDS[: len(operands)]), types)
