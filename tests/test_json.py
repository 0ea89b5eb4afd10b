"""Graphs as JSON: every op goes there and back, the same text and the same numbers; whatever else is refused."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, blocks
from rlx_jax.errors import FormatError, GraphError, RlxError, UnsupportedError, VersionMismatchError
from rlx_jax.ir import hir, serial
from rlx_jax.ir.graph import Hir, Input, Leaf, Mir, Op, StateLeaf, StateRead, TypeCache
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.experts import ClampedGate
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.ops.shape import Slice
from rlx_jax.ir.paths import LayerIndex
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.models.bert import BertConfig
from rlx_jax.models.bert import weight_specs as bert_specs
from rlx_jax.models.llama import LlamaConfig, weight_specs

RNG = np.random.default_rng(0)
LLAMA = LlamaConfig.from_hf(
    {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2}
)  # fmt: skip


def again(module: GraphModule) -> GraphModule:
    """There and back; the second text is the first."""
    text = module.to_json()
    back = GraphModule.from_json(text)
    assert back.to_json() == text == module.to_json()
    return back


def traced(module: GraphModule) -> tuple[str, list[bytes]]:
    """What a module without weights and state computes: its jaxpr and the constants in it."""
    graph = module.into_graph()

    def run(inputs: dict[str, Any]) -> Any:
        return interpret(graph, Env({}, inputs, {}))

    closed = jax.make_jaxpr(run)({i.input: i.type.spec for i in graph.inputs})
    return str(closed.jaxpr), [np.asarray(c).tobytes() for c in closed.consts]


# -- every op ----------------------------------------------------------------------------------

ROWS = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2).tobytes()
BLOCKS: list[tuple[Hir, tuple[str, ...]]] = [
    (hir.Linear(1, bias=True, activation="gelu"), ("f32 2 3 8", "f32 5 8", "f32 5")),
    (hir.LinearFused(1, "gelu"), ("f32 2 3 8", "f32 5 8", "f32 5")),
    (hir.SharedLinearPair(1, (0, 1)), ("f32 2 3 8", "f32 8 4", "f32 5 8")),
    (hir.SwiGLU((0, 1, 0)), ("f32 2 3 8", "f32 8 5", "f32 5 8", "f32 5 8")),
    (hir.ResidualRmsNorm(1e-6), ("f32 2 3 8", "f32 2 3 8", "f32 8", "f32 8")),
    (hir.Split((3, 5)), ("f32 2 8",)),
    (hir.GatedFfn("gelu_tanh"), ("f32 2 8", "f32 2 8")),
    (hir.RmsNorm(1e-6), ("f32 2 8", "f32 8", "f32 8")),
    (hir.RmsNorm(1e-6, 1.0), ("f32 2 8", "f32 8")),
    (hir.LayerNorm(1e-6, shifted=False), ("f32 2 3 8", "f32 8")),
    (hir.LayerNorm(1e-12), ("f32 2 8", "f32 8", "f32 8")),
    (hir.Embed(), ("f32 7 8", "i32 2 3")),
    (hir.Positions(), ("f32 2 3 8",)),
    (hir.RopeAngles((1.0, 0.1), 1.25), ("i32 1 3",)),
    (hir.RopeAngles((1.0, 0.1), axes=(1, 0)), ("i32 1 3 2",)),
    (hir.RopeRows(2, ROWS, ROWS), ("i32 1 3",)),
    (hir.Sinusoids(5, 1000.0, 500.0), ("f32 3",)),
    (hir.Rope(4, 4, "interleaved"), ("f32 2 3 8", "f32 1 3 2", "f32 1 3 2")),
    (hir.Rope(4, 4), ("f32 2 3 8", "f32 1 3 2", "f32 1 3 2")),
    (hir.Attention(4, 2, True, 2, 0.3, 5.0, ("keep",)), ("f32 2 3 8", "f32 2 3 4", "f32 2 3 4", "f32 2 3")),
    (hir.Attention(4, 2, sinks=True, extra=("keep",)), ("f32 2 3 8", "f32 2 3 4", "f32 2 3 4", "f32 2 3", "f32 4")),
    (hir.Attention(4, 2, window=3, ahead=2), ("f32 2 3 8", "f32 2 3 4", "f32 2 3 6")),
    (
        hir.CachedAttention(hir.Attention(4, 2, causal=True, last=True)),
        ("f32 2 1 8", "f32 2 1 4", "f32 2 1 4", "f32 2 6 2 2", "f32 2 6 2 2", "i32 2", "i32 2"),
    ),
    (
        hir.GrowingAttention(hir.Attention(4, 2, causal=True, window=2), keep=True),
        ("f32 2 3 8", "f32 2 3 4", "f32 2 3 4", "f32 2 5 4", "f32 2 5 4", "i32 2 8"),
    ),
    (hir.LastToken(), ("f32 2 3 8", "i32 2")),
    (hir.FirstToken(), ("f32 2 3 8",)),
    (hir.EndToken(5), ("f32 2 3 8", "i32 2 3")),
    (hir.CausalWindow(3), ("f32 2 4 5",)),
    (hir.Carried(hir.CausalWindow(3), 1, every=True), ("f32 2 4 5", "f32 2 2 5", "i32 2", "i32 2")),
    (hir.TimeSteps(0.25, 0.5), ("f32 2 3 4", "f32 4", "f32 4")),
    (hir.CausalConv(), ("f32 2 4 6", "f32 6 1 3")),
    (hir.CausalConv(bias=True), ("f32 2 4 6", "f32 6 1", "f32 6")),
    (hir.GatedDelta(2, 4, 0.5, 1e-6), (*["f32 2 3 6"] * 2, "f32 2 3 20", *["f32 2 3 4"] * 2)),
    (hir.SelectiveScan(4, 2), ("f32 2 3 12", "f32 2 3 4", "f32 4", *["f32 2 3 10"] * 2)),
    (
        hir.Qwen35MtpHead(2, 1, 4, 2, 6, 5, 9, 1e-5),
        ("f32 2 3 6", "i32 2 3", "f32 1 3 1", "f32 1 3 1", "i32 2", "f32 7 6", *["f32 6"] * 4, "f32 12 6",
         *["f32 6"] * 2, "f32 6 16", *["f32 6 4"] * 2, *["f32 4"] * 4, "f32 8 6", *["f32 6"] * 2, *["f32 6 5"] * 2,
         "f32 5 6", *["f32 6"] * 2, "f32 6 9"),
    ),
    (hir.CountedPositions(1), ("i32 2 3",)),
    (hir.Route(2, "sigmoid", False, 1.5, biased=True), ("f32 2 3 4", "f32 4")),
    (hir.Experts("gelu_tanh", 0),
     ("f32 2 3 8", "f32 4 8 5", "f32 4 8 5", "f32 4 5 8", "f32 2 3 2", "i32 2 3 2")),
    (hir.Experts(biased=True, clamp=ClampedGate(7.0, 1.702, 1.0)),
     ("f32 2 8", "f32 4 5 8", "f32 4 5 8", "f32 4 8 5", "f32 2 2", "i32 2 2", "f32 4 5", "f32 4 5", "f32 4 8")),
    (hir.RelativeBias(8, 16), ("f32 9 2", "f32 2 3 8")),
    (
        hir.LlamaDecoderBlock(2, 4, 1, 1e-5, hir.MaskKind.sliding_window(2), 1),
        ("f32 2 3 8", "f32 8", "f32 8", "f32 8 8", "f32 4 8", "f32 4 8", "f32 8 8", "f32 8", "f32 8", "f32 6 8",
         "f32 6 8", "f32 8 6", "f32 1 3 2", "f32 1 3 2"),
    ),
]  # fmt: skip


def op_classes(base: type[Any]) -> Iterator[type[Any]]:
    """The op classes of the package below `base`."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("rlx_jax.") and cls not in (Mir, Hir, Leaf):
            yield cls
        yield from op_classes(cls)


def test_every_op_is_in_the_table() -> None:
    """A new op cannot be forgotten: all of them are stored, but for a user's function."""
    users = {"JaxFn", "TokenScan", "Recurrent"}
    building = {"Boundary"}  # no finished graph has one
    assert {cls.__name__ for cls in op_classes(Op)} == {*serial.STORED, *users, *building}, (
        "STORED: rlx_jax/ir/serial.py"
    )
    stored = {cls for cls in op_classes(Hir) if cls.__name__ not in users}
    assert {type(op) for op, _ in BLOCKS} == stored, "a sample of each block stands in this file"


def operand_module(op: Op, operands: tuple[str, ...]) -> GraphModule:
    """A module whose outputs are the results of one op on inputs."""
    module = Graph.hir("one") if isinstance(op, Hir) else Graph.mir("one")
    inputs = []
    for i, text in enumerate(operands):
        dtype, *dims = text.split()
        inputs.append(module.input(f"x{i}", [int(d) if d.isdigit() else d for d in dims], dtype))
    module.set_outputs(module.builder.add(op, *inputs))
    return module


@pytest.mark.parametrize(("op", "operands"), BLOCKS, ids=lambda x: type(x).__name__ if isinstance(x, Op) else "")
def test_blocks_round_trip(op: Hir, operands: tuple[str, ...]) -> None:
    """The text of every HIR block, and what it computes."""
    module = operand_module(op, operands)
    back = again(module)
    assert str(back) == str(module) and back.builder.nodes[-1].op == op
    assert traced(back) == traced(module)


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


# -- whole programs ----------------------------------------------------------------------------


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


def test_programs_with_state_and_bert_go_there_and_back() -> None:
    """The extend program (state, writes, regions) and a BERT: the same dump and structure."""
    recipe, weights = llama()
    built = recipe.assemble().build(weights)
    extend = Graph.from_hir(derive(expand_composites(built.hir, built.types), "extend", built.types, False))
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
              "vocab_size": 31, "max_position_embeddings": 16, "type_vocab_size": 2}  # fmt: skip
    bert_config = BertConfig.from_hf(config)
    bert = rlx.BertFlow(bert_config).assemble().build(bert_specs(bert_config)).into_graph_module()
    for module in (extend, extend.lower(), bert, bert.lower()):
        back = again(module)
        assert back.inspect() == module.inspect()
        assert back.finish().writes == module.finish().writes


def test_a_users_function_cannot_be_stored() -> None:
    """Refused with the block's path, wherever it stands."""
    flow = rlx.ModelFlow("f").input("x", ("batch", 8))
    flow = flow.repeat_layers(3, lambda i: blocks.Custom(lambda e, x: e.jax(jnp.sin, x), name="wave"))
    module = flow.build({}).into_graph_module()
    with pytest.raises(UnsupportedError, match=r"wave: jax\(sin\).*cannot be stored"):
        module.to_json()
    odd = Graph.mir("odd")
    odd.set_outputs([odd.add_node(JaxFn(jnp.sin), odd.input("x", (2,)))])
    with pytest.raises(UnsupportedError, match="odd: jax"):
        odd.to_json()


# -- reading what is wrong ---------------------------------------------------------------------


def document() -> Any:
    """A small valid document, as data."""
    module = Graph.hir("m")
    y = module.linear(module.input("x", ("batch", 8)), module.param("w", (8, 4)))
    module.set_outputs([module.add(y, module.constant(np.arange(4), "f32"))])
    return json.loads(module.to_json())


def damaged() -> Iterator[tuple[str, Any, type[Exception], str]]:
    """(what, document, error, message)."""

    def edit(what: str, path: str, value: Any, error: type[Exception], message: str) -> tuple[str, Any, type, str]:
        data = document()
        at, *rest = data, *path.split(".")
        for key in rest[:-1]:
            at = at[int(key) if isinstance(at, list) else key]
        last = int(rest[-1]) if isinstance(at, list) else rest[-1]
        at[last] = value
        return what, data, error, message

    wrong = FormatError
    yield edit("format", "format", "onnx", wrong, "format")
    yield edit("version", "version", 2, VersionMismatchError, "reads version 1")
    yield edit("version text", "version", "1", VersionMismatchError, "version is '1'; this release reads version 1")
    yield edit("version type", "version", True, VersionMismatchError, "reads version 1")
    yield edit("level", "level", "asm", wrong, "hir, mir, lir")
    yield edit("policy", "policy", ["direct"], wrong, "direct, fusable")
    yield edit("plan", "plan", {}, wrong, "plan")
    yield edit("no plan", "level", "lir", wrong, "plan: expected")
    yield edit("extra", "more", 1, wrong, "expected an object with")
    yield edit("hir op at mir", "level", "mir", GraphError, "not legal")
    yield edit("unknown op", "graph.nodes.2.op", "Linaer", wrong, "did you mean 'Linear'")
    yield edit("user function", "graph.nodes.2.op", {"JaxFn": {"fn": "os.system"}}, wrong, "unknown Op 'JaxFn'")
    yield edit("a class that is no op", "graph.nodes.2.op", "TypeCache", wrong, "unknown Op")
    yield edit("attribute", "graph.nodes.2.op", {"Linear": {"contact": 1}}, wrong, "no field 'contact'")
    yield edit("attribute type", "graph.nodes.2.op", {"Linear": {"bias": 1}}, wrong, "expected bool, found '1'")
    yield edit("attribute type", "graph.nodes.2.op", {"Linear": {"contract": True}}, wrong, "expected int")
    yield edit("attribute value", "graph.nodes.2.op", {"Linear": {"contract": 9}}, GraphError, "contract is 0 or 1")
    yield edit("missing attribute", "graph.nodes.4.op", "Binary", wrong, "needs kind")
    yield edit("unknown function", "graph.nodes.4.op", {"Binary": {"kind": "system"}}, GraphError, "unknown function")
    yield edit("itself", "graph.nodes.4.inputs.0", [4, 0], wrong, "no result of the 4 nodes before it")
    yield edit("later", "graph.nodes.2.inputs.0", [3, 0], wrong, "no result")
    yield edit("dangling", "graph.nodes.2.inputs.0", [0, 1], wrong, "no result")
    yield edit("negative", "graph.nodes.2.inputs.0", [-1, 0], wrong, "no result")
    yield edit("arity", "graph.nodes.2.inputs", [[0, 0]], GraphError, "operands")
    yield edit("dangling output", "graph.outputs.0", [99, 0], wrong, "no result")
    yield edit("float index", "graph.outputs.0", [4.0, 0], wrong, "expected int")
    yield edit("no outputs", "graph.outputs", [], GraphError, "no outputs")
    yield edit("names", "graph.output_names", [], GraphError, "output names")
    yield edit("lying type", "graph.nodes.2.types.0", "f32[batch,8]", wrong, "gives")
    yield edit("base64", "graph.nodes.3.op.Constant.data", "!!", wrong, "not base64")
    yield edit("short constant", "graph.nodes.3.op.Constant.data", base64.b64encode(b"1234").decode(), wrong, "4 bytes")
    yield edit("huge", "graph.nodes.0.op.Input.type.shape", [2**62, 8], GraphError, "2147483647")
    yield edit("huge product", "graph.nodes.0.op.Input.type.shape", [2**30] * 4, GraphError, "limit")
    yield edit("zero", "graph.nodes.0.op.Input.type.shape", [0], GraphError, "between 1")
    yield edit("symbol", "graph.nodes.0.op.Input.type.shape", ["a b"], GraphError, "identifier")
    yield edit("dtype", "graph.nodes.0.op.Input.type.dtype", "object", GraphError, "dtype")
    yield edit("undeclared input", "graph.inputs", [], GraphError, "not declared")
    yield edit("twice", "graph.inputs", document()["graph"]["inputs"] * 2, GraphError, "declared twice")
    yield edit("no program", "graph.nodes.1.op.Param.programs", [], wrong, "without a program")
    yield edit("program", "graph.nodes.1.op.Param.programs.0", {"Pickle": {}}, wrong, "unknown Key")
    yield edit("body input", "graph.nodes.1.op", {"BodyInput": {"index": 0}}, wrong, "0 operands")
    yield edit("origin", "graph.nodes.2.origin", {"path": [1.5]}, wrong, "path")
    yield edit("no path", "graph.nodes.2.origin", {}, GraphError, "no block path")
    yield edit("nodes", "graph.nodes", {}, wrong, "an array")
    body = {"name": "b", "inputs": [], "nodes": [], "outputs": [], "output_names": [], "writes": []}
    repeat = {"Repeat": {"count": 2**40, "carries": 0, "body": body}}
    yield edit("endless", "graph.nodes.4.op", repeat, wrong, "65536")


@pytest.mark.parametrize(("what", "data", "error", "message"), list(damaged()))
def test_what_is_wrong_is_named(what: str, data: Any, error: type[Exception], message: str) -> None:
    """A typed error whose message is short and names the place."""
    with pytest.raises(error, match=message) as caught:
        GraphModule.from_json(json.dumps(data))
    assert isinstance(caught.value, RlxError) and len(str(caught.value)) <= 2048


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"format": 1}', "[" * 100_000, '{"a": NaN}', '{"format": "\ud800"}', b"\xff", "{}"]
)
def test_what_is_no_document(text: str | bytes) -> None:
    """Not JSON, too deep, not an object."""
    with pytest.raises(FormatError):
        GraphModule.from_json(text)


@pytest.mark.parametrize("text", ["A" * 5000, "A " * 2500], ids=["a word", "words"])
def test_a_message_quotes_little_of_the_file(text: str) -> None:
    """Whatever stands at any place of a document, an error holds at most 120 characters of it."""
    module = GraphModule.define("m", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8))))
    whole = json.loads(module.to_json())

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in inside:
            yield (*path, key)
            yield from places(item, (*path, key))

    for path in places(whole):
        for bad in (text, [text], {text: text}):
            data = copy.deepcopy(whole)
            holder = data
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = bad
            try:
                GraphModule.from_json(json.dumps(data))
            except RlxError as error:
                assert text[:121] not in str(error), path


def test_mutants_are_refused_or_mean_a_graph() -> None:
    """Random damage: an RlxError, or a module that verifies; never another exception."""
    rng = np.random.default_rng(7)
    recipe, _ = llama()
    module = recipe.assemble().build(weight_specs(LLAMA)).into_graph_module()
    sources = [document(), json.loads(module.to_json()), json.loads(module.lower().to_json())]
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**64,
        1e308,
        -0.0,
        "",
        "seq",
        "Where",
        [],
        {},
        [[0, 0]],
        {"Linear": {}},
    ]
    refused = 0
    for _ in range(150):
        data = copy.deepcopy(sources[rng.integers(len(sources))])
        at: Any = data
        while True:
            key = list(at)[rng.integers(len(at))] if isinstance(at, dict) else int(rng.integers(len(at)))
            if not isinstance(at[key], list | dict) or not at[key] or rng.random() < 0.1:
                break
            at = at[key]
        action = rng.integers(3)
        if action == 0:
            at[key] = odd[rng.integers(len(odd))]
        elif action == 1:
            del at[key]
        elif isinstance(at, list):
            at.append(at[key])
        else:
            at[str(rng.integers(9))] = at[key]
        try:
            again(GraphModule.from_json(json.dumps(data)))
        except RlxError:
            refused += 1
    assert 100 < refused < 150


def test_types_of_a_stored_graph_are_inferred_again() -> None:
    """A region's inputs have no type of their own in the text."""
    recipe, _ = llama()
    module = recipe.assemble().build(weight_specs(LLAMA)).into_graph_module()
    data = json.loads(module.to_json())
    (repeat,) = (n["op"]["Repeat"] for n in data["graph"]["nodes"] if "Repeat" in n["op"])
    assert repeat["body"]["nodes"][0]["op"] == {"BodyInput": {"index": 0}}
    graph = serial.decode_graph(data["graph"], TypeCache())
    (inner,) = (n.op for n in graph.nodes if n.op.regions())
    assert str(inner.regions()[0].nodes[0].types[0]) == "f32[batch,seq,16]"
