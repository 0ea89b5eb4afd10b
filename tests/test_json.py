"""Graphs as JSON: every op goes there and back, the same text and the same numbers; whatever else is refused."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule
from rlx_jax.errors import GraphError, RlxError
from rlx_jax.ir import serial
from rlx_jax.ir.graph import Hir, Input, Leaf, Mir, Op, StateRead
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.ops.shape import Slice
from rlx_jax.ir.paths import LayerIndex, StateLeaf
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.models.llama import LlamaConfig, weight_specs
from tests import small
from tests.oracles.fuzzing import mutated
from tests.refusal_names import document, graph

RNG = np.random.default_rng(0)
LLAMA = LlamaConfig.from_hf(small.LLAMA)


def again(module: GraphModule) -> GraphModule:
    """There and back; the second text is the first."""
    text = module.to_json()
    back = GraphModule.from_json(text)
    assert back.to_json() == text == module.to_json()
    return back


def op_classes(base: type[Any]) -> Iterator[type[Any]]:
    """The op classes of the package below `base`."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("rlx_jax.") and cls not in (Mir, Hir, Leaf):
            yield cls
        yield from op_classes(cls)


def test_every_op_is_stored() -> None:
    """A new op cannot be forgotten: all of them are stored, but for a user's function and an exported program."""
    users = {"JaxFn", "TokenScan", "Recurrent", "ExportedCall"}
    building = {
        "Boundary",
        "AttentionGroup",
        "DeltaGroup",
        "ExpertGroup",
        "HeadGroup",
        "KernelGroup",
    }  # no graph before its plan has one
    assert {cls.__name__ for cls in op_classes(Op)} == {*serial.SERIALIZABLE_OPS, *users, *building}, (
        "SERIALIZABLE_OPS: rlx_jax/ir/serial.py"
    )


def test_attributes_that_json_has_no_word_for() -> None:
    """Infinities, Ellipsis, dtypes, layer indices."""
    ops: list[Op] = [
        Slice((None, ..., (1, None, -1), 0)),
        StateRead(StateLeaf(("layers", LayerIndex(2, 1), "attn"), "k"), type=tensor_type(("batch", 4), "bf16", "t")),
        FullLike(-np.inf, as_dtype("f8_e4m3")),
        Input("x", type=tensor_type(("batch", "seq"), "i32", "t")),
    ]
    for op in ops:
        assert serial.decode(Op, json.loads(json.dumps(serial.encode(op))), "op") == op


def llama() -> Any:
    """A two-layer Llama and its weights."""
    weights = {k: RNG.standard_normal(s.shape).astype(np.float32) * 0.1 for k, s in weight_specs(LLAMA).items()}
    return rlx.Llama32Flow(LLAMA), weights


def test_a_llama_goes_there_and_back() -> None:
    """At each level the same dump; bit-equal logits when compiled again from LIR."""
    recipe, weights = llama()
    module = recipe.assemble().build(weights).into_graph_module()
    planned = Graph.from_lir(module.into_lir(batch=2, seq=5))
    for m in (module, module.lower(), planned):
        back = again(m)
        assert back.stage == m.stage and back.inspect() == m.inspect() and back.plan == m.plan
    tokens = RNG.integers(0, 31, (2, 5)).astype(np.int32)
    got, want = (np.asarray(rlx.compile(m, weights)(tokens)) for m in (again(planned), module))
    np.testing.assert_array_equal(got, want)


def test_a_program_with_a_state_goes_there_and_back() -> None:
    """State, writes, regions: the same dump and structure."""
    recipe, weights = llama()
    built = recipe.assemble().build(weights)
    extend = Graph.from_hir(derive(expand_composites(built.hir, built.types), "extend", built.types, False))
    for module in (extend, extend.lower()):
        back = again(module)
        assert back.inspect() == module.inspect()
        assert back.finish().writes == module.finish().writes


def test_a_graph_that_is_wrong() -> None:
    """What the verifier says of it, line by line. What is no graph is in `golden/refusals/rows.md`."""
    for path, value, message in (
        ("level", "mir", "not legal"), ("graph.outputs", [], "no outputs"), ("graph.inputs", [], "not declared"),
    ):  # fmt: skip
        with pytest.raises(GraphError, match=message):
            graph(path, value)


def test_mutants_are_refused_or_mean_a_graph() -> None:
    """Random damage: an RlxError, or a module that verifies; never another exception."""
    rng, refused = random.Random(7), 0
    recipe, _ = llama()
    module = recipe.assemble().build(weight_specs(LLAMA)).into_graph_module()
    sources = [document(), json.loads(module.to_json()), json.loads(module.lower().to_json())]
    odd: list[Any] = [None, True, -1, 0, 1, 2**31, 2**64, 1e308, -0.0, "", "seq", "Where", [], {}, [[0, 0]]]
    for _ in range(90):
        text = json.dumps(mutated(rng.choice(sources), rng, odd, times=(1,)))
        try:
            again(GraphModule.from_json(text))
        except RlxError:
            refused += 1
    assert 60 < refused < 90
