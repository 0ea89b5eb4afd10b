"""The verifier lists all that is wrong, with node, op and block path, in a class that says what kind it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, blocks
from rlx_jax.errors import GraphError, ShapeError, UnboundInputError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Constant, Input, Mir, Node, Param, TypeCache, Value
from rlx_jax.ir.graph import Graph as IrGraph
from rlx_jax.ir.operands import ELEMENTWISE
from rlx_jax.ir.ops.pointwise import CastTo, Unary, Where
from rlx_jax.ir.ops.shape import RepeatHeads
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.text import dump
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lower import lower
from rlx_jax.lowering.mir.small import dce

F, VECTOR = tensor_type((2, 8), "f32", "test"), tensor_type((8,), "f32", "test")


def small() -> IrGraph:
    """tanh and a sum, with one input and one parameter."""
    m = Graph.mir("m")
    x, w = m.input("x", (2, 8)), m.param("w", (8,))
    y = m.named("act", lambda m: m.tanh(x))
    m.set_outputs([m.named("sum", lambda m: m.add(y, w))])
    return m.finish()


def node(graph: IrGraph, number: int, **changes: Any) -> IrGraph:
    """The graph with one node changed."""
    nodes = list(graph.nodes)
    nodes[number] = dataclasses.replace(nodes[number], **changes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def outputs(graph: IrGraph, *names: str) -> IrGraph:
    """The output several times, under names."""
    return dataclasses.replace(graph, outputs=graph.outputs * len(names), output_names=names)


def more(graph: IrGraph, op: Any, *inputs: Value) -> IrGraph:
    """One more node, of whatever types `infer` gives it."""
    types = TypeCache().infer(op, tuple(graph.type(v) for v in inputs))
    return dataclasses.replace(graph, nodes=(*graph.nodes, Node(op, inputs, types, Origin(("more",)))))


FAULTS: dict[str, tuple[Callable[[IrGraph], IrGraph], type[Exception], str]] = {
    "self-loop": (lambda g: node(g, 2, inputs=(Value(2),)), GraphError, r"%2 tanh \(act\): depends on itself"),
    "cycle": (lambda g: node(g, 2, inputs=(Value(3),)), GraphError, "depends on itself through %3"),
    "later": (lambda g: node(more(g, Unary("exp"), Value(0)), 2, inputs=(Value(4),)), GraphError, "%4.* not before"),
    "dangling node": (lambda g: node(g, 2, inputs=(Value(99),)), GraphError, "does not exist"),
    "dangling result": (lambda g: node(g, 2, inputs=(Value(0, 1),)), GraphError, "does not exist"),
    "negative": (lambda g: node(g, 2, inputs=(Value(-1),)), GraphError, "does not exist"),
    "arity": (lambda g: node(g, 3, inputs=(Value(2),)), GraphError, r"%3 add \(sum\).*operands"),
    "attribute": (lambda g: node(g, 2, op=Unary("tahn")), GraphError, "unary: kind is 'tahn'; did you mean"),
    "dtype": (lambda g: node(more(g, CastTo(as_dtype("bf16")), Value(0)), 3, op=CastTo(as_dtype("bf16")),
        inputs=(Value(2),)), ShapeError, r"declared f32\[2,8\], inferred bf16\[2,8\]"),
    "dtypes": (lambda g: node(more(g, Constant(bytes(2), type=tensor_type((), "bf16", "t"))), 3,
        inputs=(Value(2), Value(2)), op=Where()), GraphError, "where"),
    "shape": (lambda g: node(g, 3, types=(VECTOR,)), ShapeError, r"declared f32\[8\], inferred f32\[2,8\]"),
    "level": (lambda g: more(g, hir.RmsNorm(1e-5), Value(2), Value(1)), GraphError, "not legal at the mir level"),
    "no path": (lambda g: node(g, 2, origin=Origin()), GraphError, "no block path"),
    "no outputs": (lambda g: outputs(g), GraphError, "no outputs"),
    "output name": (lambda g: outputs(g, "a", "a"), GraphError, "two outputs are called 'a'"),
    "names": (lambda g: dataclasses.replace(g, output_names=()), GraphError, "1 outputs have 0"),
    "dropped output": (lambda g: dataclasses.replace(g, outputs=(Value(9),)), GraphError, "output"),
    "undeclared": (lambda g: dataclasses.replace(g, inputs=()), UnboundInputError, "'x' is read and not declared"),
    "declared twice": (lambda g: dataclasses.replace(g, inputs=g.inputs * 2), GraphError, "declared twice"),
    "other input": (lambda g: more(g, Input("x", type=tensor_type((3,), "f32", "t"))), ShapeError, "declared as f32"),
    "two weights": (lambda g: more(g, Param((Key("w", F),), type=F)), GraphError, r"'w' is f32\[8\] and f32\[2,8\]"),
    "programs": (lambda g: node(g, 1, op=Param((Key("w", VECTOR), Key("v", VECTOR)), type=VECTOR)), GraphError, "2 p"),
    "too large": (lambda g: node(g, 2, op=RepeatHeads(1, 2**31)), ShapeError, r"%2 repeat_heads.*over the limit"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    """Class and message; the sound graph passes."""
    edit, error, message = FAULTS[fault]
    graph = small()
    verify(graph, "mir", "test", TypeCache())
    with pytest.raises(error, match=message) as caught:
        verify(edit(graph), "mir", "a pass", TypeCache())
    assert "wrong after a pass" in str(caught.value)
    assert type(caught.value) is error or error is GraphError
    assert isinstance(caught.value, GraphError) and caught.value.problems


def test_problems_inside_a_region_say_where() -> None:
    """The path of the layer, behind the node of the region."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).repeat_layers(3, lambda i: blocks.RmsNorm(f"g{i}.w"))
    built = flow.build({f"g{i}.w": np.ones(8, np.float32) for i in range(3)})
    (number,) = (i for i, n in enumerate(built.hir.nodes) if n.op.regions())
    op = built.hir.nodes[number].op
    body = op.regions()[0]
    last = len(body.nodes) - 1
    broken = node(built.hir, number, op=op.with_regions((node(body, last, inputs=(Value(0), Value(40))),)))
    with pytest.raises(GraphError, match=f"%{number} repeat.*> %{last} rms_norm"):
        verify(broken, "hir", "test", TypeCache())


@pytest.mark.slow
def test_a_long_chain(length: int = 3_000) -> None:
    """No recursion proportional to depth: it is verified, lowered, rewritten and printed."""
    types = TypeCache()
    b = Builder("chain", types)
    x = b.input("x", F)
    for i in range(length):
        x = b(Unary("tanh" if i % 2 else "sin"), x)
    graph = verify(b.finish([x], ["output"]), "hir", "building", types)
    lowered = verify(dce(lower(graph, "direct", types), types), "mir", "dce", types)
    assert len(lowered.nodes) == length + 1 and dump(lowered, "mir").count("= tanh(") == length // 2


def test_types_are_traced_once_in_a_process_for_each_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds share them; an op that is given another formula is traced again, and what is no value is always traced."""
    traced: list[Any] = []

    def wider(self: Unary, x: Any) -> Any:
        traced.append(x.shape)
        return jnp.concatenate([x, x])

    neg = Unary("neg")
    assert TypeCache().infer(neg, (F,)) == (F,)
    monkeypatch.setattr(Unary, "eval", wider)
    assert [TypeCache().infer(neg, (F,))[0].shape for _ in range(2)] == [(4, 8), (4, 8)] and len(traced) == 1
    monkeypatch.setattr(Unary, "traits", dataclasses.replace(Unary.traits, stored=False))
    assert TypeCache().infer(neg, (F,))[0].shape == (4, 8) and len(traced) == 2


@dataclasses.dataclass(frozen=True)
class Filled(Mir):
    """A number for each row, in its own dtype."""

    traits = ELEMENTWISE

    number: float

    def eval(self, x: Any) -> Any:
        return jnp.full((x.shape[0],), self.number)


def test_attributes_that_are_equal_and_of_other_kinds_have_types_of_their_own() -> None:
    assert [TypeCache().infer(Filled(n), (F,))[0].dtype.kind for n in (1, 1.0, True, 1)] == ["i", "f", "b", "i"]
