"""Policies, passes, the verifier, the compute dtype and the precision of products: same program, other forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import LlamaDecoderSpec, RopeTables
from rlx_jax.compiler import passes
from rlx_jax.compiler.passes import PIPELINE, Job
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Origin, StateLeaf, TypeCache, Value
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.verify import verify
from tests.opening import opened
from tests.small import compiled, profile, w

# Settings vary here over programs that have nothing for some of them to act on.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")

CLEANING = [p.name for p in PIPELINE if p.kind == "cleaning"]
OPTIONAL = [p.name for p in PIPELINE if p.kind in ("layout", "fusion")]
H, F, V = 8, 12, 13
B, S = 2, 3
X = np.random.default_rng(0).standard_normal((B, S, H)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, V, (B, S)).astype(np.int32)


WEIGHTS = {
    **{name: w(H, H, seed=i) for i, name in enumerate(("w", "v", "u"))},
    "g": 1 + w(H), "b": w(H, seed=1), "gate": w(F, H), "up": w(F, H, seed=1), "down": w(H, F),
}  # fmt: skip


def x_flow() -> rlx.ModelFlow:
    """A flow over `x` `[batch, seq, 8]`."""
    return rlx.ModelFlow("m").input("x", ("batch", "seq", H))


def read_by(flow: rlx.ModelFlow, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that the flow reads: the others would be an error."""
    return {key: weights[key] for key in flow.build(weights).keys_read}


def llama_flow(layers: int = 2, biased: bool = False) -> rlx.ModelFlow:
    """A tied Llama of width 8."""
    spec = LlamaDecoderSpec(num_heads=4, head_dim=4, num_kv_heads=2, attention_bias=biased)
    return (
        rlx.ModelFlow("llama").input("tokens", ("batch", "seq"), dtype="int32").rope_tables(RopeTables.theta(4))
        .token_embed().repeat_layers(layers, lambda i: blocks.llama_prefill_layer_fused(i, spec))
        .final_norm().lm_head(V, H, tied=True)
    )  # fmt: skip


def llama_weights(layers: int = 2, biased: bool = False) -> dict[str, np.ndarray]:
    """Its weights."""
    out = {"model.embed_tokens.weight": w(V, H) * 2, "model.norm.weight": 1 + w(H)}
    for i in range(layers):
        p = f"model.layers.{i}"
        for n, shape in (("q", (16, H)), ("k", (8, H)), ("v", (8, H)), ("o", (H, 16))):
            out[f"{p}.self_attn.{n}_proj.weight"] = w(*shape, seed=i)
            if biased:
                out[f"{p}.self_attn.{n}_proj.bias"] = w(shape[0], seed=i)
        for n, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F))):
            out[f"{p}.mlp.{n}_proj.weight"] = w(*shape, seed=i)
        for n in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}.{n}.weight"] = 1 + w(H, seed=i)
    return out


# -- random programs ---------------------------------------------------------------------------

STEPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear": lambda e, x, y: e.linear(x, "w"),
    "three linears": lambda e, x, y: e.linear(x, "w") * e.linear(x, "v") + e.linear(x, "u"),
    "linear bias": lambda e, x, y: e.linear(y, "v", "b", activation="gelu"),
    "matmul": lambda e, x, y: x @ e.param("u"),
    "swiglu": lambda e, x, y: blocks.SwiGlu("gate", "up", "down").emit(e, x),
    "rms": lambda e, x, y: e.rms_norm(x, "g", eps=1e-5),
    "ln": lambda e, x, y: e.layer_norm(y, "g", "b", 1e-5),
    "rms with zero beta": lambda e, x, y: e.add_node(hir.RmsNorm(1e-5), x, e.param("g"), e.constant(np.zeros(H))),
    "attention": lambda e, x, y: e.add_node(hir.Attention(4, 2, causal=True), x, y[..., :4], y[..., 4:]),
    "window": lambda e, x, y: e.add_node(hir.Attention(2, 1, window=2, softcap=3.0), x, y[..., 4:], x[..., :4]),
    "add": lambda e, x, y: x + y,
    "mul": lambda e, x, y: x * e.sigmoid(y),
    "same twice": lambda e, x, y: e.tanh(x + y) * e.tanh(x + y),
    "dead": lambda e, x, y: (e.exp(x @ e.param("w")).sum(), x)[1],
    "constants": lambda e, x, y: x * (e.constant(np.full(H, 0.5)) + e.sin(e.constant(np.arange(H), "f32"))),
    "numbers": lambda e, x, y: (x * 2 - 1) / 3,
    "zero": lambda e, x, y: x + e.constant(np.zeros(H)) * 2,
    "halves": lambda e, x, y: e.concat([x[..., 4:], y[..., :4]]),
    "swap": lambda e, x, y: x.reshape(x.shape[0], x.shape[1], 2, 4).transpose(0, 1, 3, 2).reshape(*x.shape),
    "mean": lambda e, x, y: x - y.mean(-1, keepdims=True),
    "softmax": lambda e, x, y: e.softmax(x),
    "where": lambda e, x, y: e.where(x > y, x, 0.0),
    "cast": lambda e, x, y: x + (y * 4).astype("i32").astype("f32"),
    "jax": lambda e, x, y: e.jax(lambda a, b: jnp.cos(a) + b, x, y),
    "jax pair": lambda e, x, y: sum(e.jax(lambda a, b: (a * b, a - b), x, y)),
    "scores": lambda e, x, y: e.softmax(x @ y.transpose(0, 2, 1)) @ y,
}
PROGRAMS = st.lists(
    st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    min_size=6,
    max_size=6,
)
VARIANTS = st.fixed_dictionaries(
    {
        "fusion": st.fixed_dictionaries(
            {
                "policy": st.sampled_from(["direct", "fusable"]),
                "disable": st.lists(st.sampled_from(OPTIONAL), unique=True),
            }
        ),
        "passes": st.fixed_dictionaries({name: st.booleans() for name in CLEANING}),
        "backend": st.fixed_dictionaries({"cpu": st.fixed_dictionaries({"merge": st.booleans()})}),
    }
)
PLAIN = {
    "fusion": {"policy": "fusable", "skip": True}, "passes": dict.fromkeys(CLEANING, False),
    "backend": {"cpu": {"merge": False}},
}  # fmt: skip


def flow_of(programs: Sequence[Sequence[tuple[str, int, int]]]) -> rlx.ModelFlow:
    """Each program is a side output; its steps read any earlier value of it."""

    def stage(emit: Any, x: Any) -> Any:
        for number, steps in enumerate(programs):
            values = [x]
            for name, a, b in steps:
                value = STEPS[name](emit, values[-1 - a % len(values)], values[b % len(values)])
                values.append(emit.tanh(value))
            emit.output(f"o{number}", values[-1])
        return x

    return x_flow().custom(stage)


def outputs(
    flow: rlx.ModelFlow, tables: Any, inputs: Any = X, weights: Any = None, eager: bool = False
) -> dict[str, np.ndarray]:
    """All outputs of the flow, compiled with these settings; `eager` runs op by op and spares XLA."""
    weights = WEIGHTS if weights is None else weights
    used = read_by(flow, weights)
    model = compiled(flow, used, profile=profile(**tables))
    with jax.disable_jit(eager):
        out = model.apply(model.params, inputs) if eager else model(inputs)
    return {k: np.asarray(v) for k, v in (out if isinstance(out, dict) else {"output": out}).items()}


@pytest.mark.slow
@settings(max_examples=30)
@given(programs=PROGRAMS, tables=VARIANTS)
def test_policies_passes_and_merging_change_no_numbers(programs: Any, tables: Any) -> None:
    """Six random programs at a time: any choice against everything off."""
    flow = flow_of(programs)
    want, got = outputs(flow, PLAIN, eager=True), outputs(flow, tables, eager=True)
    assert list(want) == list(got)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


FORMS: dict[str, Any] = {
    "direct": {},
    "fusable": {"fusion": {"policy": "fusable"}},
    "merged": {"backend": {"cpu": {"merge": True}}},
    "plain": PLAIN,
}


@functools.cache
def twice_each(form: str) -> dict[str, np.ndarray]:
    """Every step, applied twice, as one side output of a program of that form."""
    flow = flow_of([[(step, 0, 0), (step, 1, 0)] for step in STEPS])
    return dict(zip(STEPS, list(outputs(flow, FORMS[form]).values())[1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("form", [f for f in FORMS if f != "plain"])
@pytest.mark.parametrize("step", STEPS)
def test_each_step_in_each_form(step: str, form: str) -> None:
    """So that no step is left to chance."""
    np.testing.assert_allclose(twice_each(form)[step], twice_each("plain")[step], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def llama_logits() -> np.ndarray:
    """Of the biased Llama, with everything off."""
    return outputs(llama_flow(biased=True), PLAIN, IDS, llama_weights(biased=True))["output"]


@pytest.mark.slow
@pytest.mark.parametrize("roll", ["unroll", "scan"])
@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_llama_in_each_form(roll: str, policy: str, merge: bool, llama_logits: np.ndarray) -> None:
    """Both policies, merged and not, rolled both ways."""
    tables = {"fusion": {"policy": policy}, "backend": {"cpu": {"merge": merge}}, "layers": {"roll": roll}}
    got = outputs(llama_flow(biased=True), tables, IDS, llama_weights(biased=True))["output"]
    np.testing.assert_allclose(got, llama_logits, rtol=1e-5, atol=1e-5)


# -- what the passes do ------------------------------------------------------------------------


def mir_of(flow: rlx.ModelFlow, weights: Any = None, **tables: Any) -> Graph:
    """The MIR template of the forward program."""
    used = read_by(flow, weights or {})
    return opened(flow, used, profile(**tables)).template("forward").mir


def ops(graph: Graph) -> list[str]:
    """The text of every op that is no leaf."""
    return [n.op.text() for _, n in graph.walk() if not isinstance(n.op, Leaf)]


def test_dead_code_goes() -> None:
    """In regions too. With it go the inputs that nothing reads, which no switch keeps in the signature."""

    def stage(emit: Any, x: Any) -> Any:
        emit.exp(x)
        return emit.tanh(x)

    flow = x_flow().repeat_layers(3, lambda i: blocks.Custom(stage))
    on, off = mir_of(flow), mir_of(flow, passes={"dce": False})
    assert "exp" in ops(off) and "exp" not in ops(on)
    assert "tanh" in ops(on)
    more = flow.input("unused", ("batch",)).input("read", ("batch", 1, 1))
    more = more.custom(lambda emit, x: x + emit.exp(emit.flow_input("read")))
    for dce in (True, False):
        assert [i.input for i in mir_of(more, passes={"dce": dce}).inputs] == ["x", "read"]


def test_equal_expressions_are_one() -> None:
    """Only where op and operands are equal; what looks alike stays two."""

    def stage(emit: Any, x: Any) -> Any:
        return emit.tanh(x + 1) + emit.tanh(x + 1) * emit.tanh(1 + x) + emit.tanh(x + 2)

    on, off = (ops(mir_of(x_flow().custom(stage), passes={"cse": c})) for c in (True, False))
    assert off.count("tanh") == 4 and on.count("tanh") == 3
    assert off.count("add") == 6 and on.count("add") == 5


def test_constants_fold_with_the_evaluator_of_the_program() -> None:
    """Ops on constants only; GELU of 1 is 0.8413 as it is when computed."""

    def stage(emit: Any, x: Any) -> Any:
        one = emit.constant(np.ones(H))
        return x + emit.gelu(one) * (one + 2).sum()

    on, off = (mir_of(x_flow().custom(stage), passes={"constant_folding": c}) for c in (True, False))
    assert "gelu" in ops(off) and ops(on) == ["add"]
    folded = [n.op.array for n in on.nodes if isinstance(n.op, Constant) and n.op.array.shape == (H,)]
    assert any(np.allclose(a, 0.8413447 * 24) for a in folded)


def test_large_results_are_not_folded() -> None:
    """A big constant is cheaper to compute than to carry."""
    flow = x_flow().custom(lambda e, x: x + e.jax(lambda c: jnp.tile(c, 4096), e.constant(np.ones(H))).sum())
    assert sum(len(n.op.data) for n in mir_of(flow).nodes if isinstance(n.op, Constant)) < 8192


def test_merging_makes_one_product_of_three() -> None:
    """Linears of one value, each weight used once; the others stay."""

    def stage(emit: Any, x: Any) -> Any:
        q, k, v = (emit.linear(x, name) for name in ("w", "v", "u"))
        return q * k + v

    merged = {"cpu": {"merge": True}}
    assert sum("matmul" in t for t in ops(mir_of(x_flow().custom(stage), WEIGHTS, backend=merged))) == 1
    assert sum("matmul" in t for t in ops(mir_of(x_flow().custom(stage), WEIGHTS))) == 3
    used = {k: WEIGHTS[k] for k in ("w", "v", "u")}
    model = compiled(x_flow().custom(stage), used, profile=profile(backend=merged))
    assert len(model.params) == 1 and next(iter(model.params.values())).shape == (3 * H, H)
    for key, value in model.weights().items():
        np.testing.assert_array_equal(value, used[key])

    def shared(emit: Any, x: Any) -> Any:
        return emit.linear(x, "w") + emit.linear(emit.tanh(x), "w") + emit.linear(x, "v")

    assert sum("matmul" in t for t in ops(mir_of(x_flow().custom(shared), WEIGHTS, backend=merged))) == 3


def test_the_direct_policy_takes_better_rules() -> None:
    """A biased Linear is one op, a zero beta is dropped, key heads are not repeated."""

    def stage(emit: Any, x: Any) -> Any:
        x = STEPS["linear bias"](emit, x, x)
        return STEPS["attention"](emit, STEPS["rms with zero beta"](emit, x, x), x)

    direct, fusable = (
        ops(mir_of(x_flow().custom(stage), WEIGHTS, fusion={"policy": p})) for p in ("direct", "fusable")
    )
    assert any("fused_mm_bias_gelu" in t for t in direct) and not any("fused" in t for t in fusable)
    assert any("repeat_heads" in t for t in fusable) and not any("repeat_heads" in t for t in direct)


def test_types_of_leaves_flow_through_specialise() -> None:
    """The LIR has numbers where the template has symbols."""
    model = compiled(x_flow().linear("w"), {"w": WEIGHTS["w"]})
    assert "f32[batch,seq,8]" in model.text("mir")
    text = model.text("lir", X)
    assert "f32[2,3,8]" in text and "batch" not in text


# -- the verifier ------------------------------------------------------------------------------


def graph_of() -> tuple[Graph, TypeCache]:
    """tanh(x · w) + x, with a constant and a region of two layers."""
    flow = x_flow().linear("w").custom(lambda e, x: e.tanh(x) + x * 2).repeat_layers(
        2, lambda i: blocks.Custom(lambda e, x: e.sin(x) + 1)
    )  # fmt: skip
    built = flow.build({"w": WEIGHTS["w"]})
    return built.hir, built.types


def number_of(graph: Graph, op: Any) -> int:
    """The first node with such an op."""
    return next(i for i, n in enumerate(graph.nodes) if isinstance(n.op, op))


def with_node(graph: Graph, number: int, **changes: Any) -> Graph:
    """The graph with one node changed."""
    nodes = list(graph.nodes)
    nodes[number] = replace(nodes[number], **changes)
    return replace(graph, nodes=tuple(nodes))


def with_body(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """The graph with the body of its region changed."""
    number = number_of(graph, Repeat)
    op = graph.nodes[number].op
    assert isinstance(op, Repeat)
    return with_node(graph, number, op=op.with_regions((change(op.body),)))


def first_sin(body: Graph) -> int:
    """The first node of a body that is no leaf."""
    return next(i for i, n in enumerate(body.nodes) if not isinstance(n.op, Leaf))


@dataclass(frozen=True)
class Damage:
    """A change that the verifier must find, and what its message must say."""

    change: Callable[[Graph], Graph]
    says: tuple[str, ...]


def operand(number: int, index: int = 0) -> Callable[[Graph], Graph]:
    """The tanh reads another value."""
    return lambda g: with_node(g, number_of(g, Unary), inputs=(Value(number, index),))


F32 = np.dtype(np.float32)
DAMAGE = {
    "a value that does not exist": Damage(operand(99), ("tanh",)),
    "a value that comes later": Damage(lambda g: operand(number_of(g, Unary) + 1)(g), ("tanh",)),
    "its own value": Damage(lambda g: operand(number_of(g, Unary))(g), ("tanh",)),
    "a negative node": Damage(operand(-1), ("tanh",)),
    "a result that does not exist": Damage(operand(0, 1), ("tanh",)),
    "a negative result": Damage(operand(0, -1), ("tanh",)),
    "another declared shape": Damage(
        lambda g: with_node(g, number_of(g, Unary), types=(TensorType((1, 2), F32),)),
        ("tanh", "f32[1,2]", "f32[batch,seq,8]"),
    ),
    "another declared dtype": Damage(
        lambda g: with_node(g, number_of(g, Unary), types=(g.nodes[number_of(g, Unary)].types[0].with_dtype("bf16"),)),
        ("tanh", "bf16[batch,seq,8]"),
    ),
    "one result too many": Damage(
        lambda g: with_node(g, number_of(g, Unary), types=g.nodes[number_of(g, Unary)].types * 2), ("tanh",),
    ),
    "another leaf type": Damage(lambda g: with_node(g, 0, types=(TensorType((3,), F32),)), ("f32[3]",)),
    "an operand too few": Damage(
        lambda g: with_node(g, number_of(g, Binary), inputs=g.nodes[number_of(g, Binary)].inputs[:1]), ("mul",),
    ),
    "an operand too many": Damage(
        lambda g: with_node(g, number_of(g, Unary), inputs=g.nodes[number_of(g, Unary)].inputs * 2), ("tanh",),
    ),
    "an unknown function": Damage(lambda g: with_node(g, number_of(g, Unary), op=Unary("tanhh")), ("tanhh",)),
    "an output that does not exist": Damage(lambda g: replace(g, outputs=(Value(99),)), ("output", "99")),
    "an output that has no such result": Damage(lambda g: replace(g, outputs=(Value(0, 3),)), ("output",)),
    "a negative output": Damage(lambda g: replace(g, outputs=(Value(-1),)), ("output",)),
    "fewer output names than outputs": Damage(lambda g: replace(g, output_names=()), ("output",)),
    "a write of a value that does not exist": Damage(
        lambda g: replace(g, writes=((StateLeaf(("a",), "k"), Value(99)),)), ("99",),
    ),
    "an input twice": Damage(lambda g: replace(g, inputs=g.inputs * 2), ("'x'", "twice")),
    "an input that is not declared": Damage(lambda g: replace(g, inputs=()), ("x",)),
    "an empty block path": Damage(lambda g: with_node(g, number_of(g, Unary), origin=Origin()), ("tanh",)),
    "a value inside a region that does not exist": Damage(
        lambda g: with_body(g, lambda b: with_node(b, first_sin(b), inputs=(Value(77),))), ("sin", "77"),
    ),
    "a type inside a region": Damage(
        lambda g: with_body(g, lambda b: with_node(b, first_sin(b), types=(TensorType((1,), F32),))), ("sin", "f32[1]"),
    ),
    "an operand that the region does not have": Damage(
        lambda g: with_body(g, lambda b: with_node(b, number_of(b, BodyInput), op=BodyInput(5, type=b.type(Value(0))))),
        ("body_input(5)",),
    ),
    "an output inside a region that does not exist": Damage(
        lambda g: with_body(g, lambda b: replace(b, outputs=(Value(55),))), ("repeat",),
    ),
    "a region without outputs": Damage(lambda g: with_body(g, lambda b: replace(b, outputs=())), ("repeat",)),
    "a region without its operand": Damage(lambda g: with_node(g, number_of(g, Repeat), inputs=()), ("repeat",)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_the_verifier_finds_planted_damage(name: str) -> None:
    """The message names the stage, the level, and the node with its op."""
    graph, types = graph_of()
    assert verify(graph, "hir", "build", types) is graph
    with pytest.raises(GraphError) as caught:
        verify(DAMAGE[name].change(graph), "hir", "my_pass", types)
    message = str(caught.value)
    for part in ("my_pass", "hir", *DAMAGE[name].says):
        assert part in message, message
    if "output" not in name and "write" not in name and "input" not in name:
        assert "%" in message


def test_blocks_are_not_legal_in_mir() -> None:
    """Neither at the top nor in a region; HIR may hold MIR ops."""
    graph, types = graph_of()
    with pytest.raises(GraphError, match=r"after lower:\s+%\d+ linear.*not legal at the mir level") as caught:
        verify(graph, "mir", "lower", types)
    assert "tanh" not in str(caught.value)

    def body_with_a_block(body: Graph) -> Graph:
        b = Builder("body", types)
        x = b.leaf(BodyInput(0, type=body.nodes[number_of(body, BodyInput)].types[0]))
        with b.at(Origin(("layers",))):
            half = b.leaf(Constant(np.ones(H, np.float32).tobytes(), type=TensorType((H,), F32)))
            out = b(hir.RmsNorm(1e-5), x, half)
        return b.finish([out])

    damaged = with_body(graph, body_with_a_block)
    lowered = with_node(damaged, number_of(damaged, hir.Linear), op=MatMul(1))
    verify(lowered, "hir", "build", types)
    with pytest.raises(GraphError, match="rms_norm.*not legal at the mir level"):
        verify(lowered, "mir", "lower", types)


def test_the_verifier_runs_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that breaks the program is named."""

    def bad(graph: Graph, job: Job) -> Graph:
        return with_node(graph, len(graph.nodes) - 1, types=(TensorType((1,), F32),))

    for name in (p.name for p in PIPELINE if p.level == "mir" and p.kind != "program"):
        rows = tuple(replace(p, run=bad) if p.name == name else p for p in PIPELINE)
        with monkeypatch.context() as m:
            m.setattr(passes, "PIPELINE", rows)
            marked = profile(fusion={"target": "cuda"} if name == "unroll_steps" else {})  # it runs there alone
            with pytest.raises(GraphError, match=f"mir graph.*wrong after {name}"):
                compiled(x_flow().linear("w"), {"w": WEIGHTS["w"]}, profile=marked)


def test_every_node_knows_its_block() -> None:
    """Through building, expanding, lowering and passes, in every program."""
    model = opened(llama_flow(), llama_weights(), merge=True)
    lost = []
    for program in ("forward", "prefill", "extend"):
        template = model.template(program)
        for level, graph in (("built", template.built.hir), ("hir", template.hir), ("mir", template.mir)):
            for _, node in graph.walk():
                if not isinstance(node.op, Leaf) and not node.origin.path:
                    lost.append(f"{program} {level}: {node.op.text()}")
    assert not lost, lost


# -- compute dtype -----------------------------------------------------------------------------


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr and all inside it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    yield from jaxprs(item)


def relative(got: Any, want: Any) -> float:
    """The largest difference over the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


LOW = [("bf16", ml_dtypes.bfloat16, 0.04), ("f16", np.float16, 0.005)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "tolerance"), LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("roll", ["unroll", "scan"])
def test_low_precision_llama(name: str, dtype: Any, tolerance: float, roll: str) -> None:
    """Leaves and products have the compute dtype, logits are f32 and near."""
    flow, weights = llama_flow(), llama_weights()
    want = compiled(flow, weights)(IDS)
    model = compiled(flow, weights, profile=profile(precision={"compute": name}, layers={"roll": roll}))
    got = model(IDS)
    assert got.dtype == np.float32 and {a.dtype for a in model.params.values()} == {np.dtype(dtype)}
    assert 0 < relative(got, want) < tolerance
    closed = jax.make_jaxpr(lambda p: model.apply(p, IDS))(model.params)
    dots = [e for j in jaxprs(closed.jaxpr) for e in j.eqns if e.primitive.name == "dot_general"]
    assert dots and all(v.aval.dtype == dtype for e in dots for v in e.invars)


@pytest.mark.parametrize(("name", "dtype", "tolerance"), LOW, ids=["bf16", "f16"])
def test_low_precision_encoder_stages(name: str, dtype: Any, tolerance: float) -> None:
    """Norms, GELU, masks, pooling and a side output; integers are left alone."""

    def side(emit: Any, x: Any) -> Any:
        emit.output("ids", emit.flow_input("kinds") + 1)
        emit.output("half", x * 0.5)
        return x

    flow = (
        x_flow().input("kinds", ("batch", "seq"), dtype="int32").gather_add("kinds", "t")
        .layer_norm("g", "b").residual_save().linear("w", bias="b").residual_add().swiglu("gate", "up", "down")
        .attn_mask_ones().custom(side).cls_token_pool()
    )  # fmt: skip
    weights = {k: WEIGHTS[k] for k in ("g", "b", "w", "gate", "up", "down")} | {"t": w(5, H)}
    kinds = (IDS % 5).astype(np.int32)
    want = compiled(flow, weights)(X, kinds)
    got = compiled(flow, weights, profile=profile(precision={"compute": name}))(X, kinds)
    assert {k: v.dtype for k, v in got.items()} == {"output": F32, "ids": np.int32, "half": F32}
    np.testing.assert_array_equal(got["ids"], kinds + 1)
    for key in ("output", "half"):
        assert relative(got[key], want[key]) < tolerance


BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "numbers": lambda e, x: x * 0.5 + 1,
    "a constant": lambda e, x: x + e.constant(np.arange(H), "f32"),
    "a weight": lambda e, x: x + e.param("bias"),
    "a rope table": lambda e, x: x * e.state.rope_cos[..., :1],
    "a mask": lambda e, x: x * e.named("attn_mask").reshape(*x.shape[:2], 1),
    "astype f32": lambda e, x: x * x.astype("f32").mean(-1, keepdims=True),
    "ids as numbers": lambda e, x: x + e.flow_input("tokens").astype("f32").mean(),
    "jax in f32": lambda e, x: x + e.jax(lambda t: jnp.sin(t.astype(jnp.float32)), x),
    "jax over a table": lambda e, x: e.jax(lambda t, c: t * c[..., :1], x, e.state.rope_cos),
    "where": lambda e, x: e.where(x > 0, x, 0.0),
}
AFTER: dict[str, Callable[[Any, Any], Any]] = {
    "a number after the head": lambda e, x: x * 0.5,
    "softcap after the head": lambda e, x: e.tanh(x / 30.0) * 30.0,
    "a constant after the head": lambda e, x: x + e.constant(np.arange(V), "f32"),
    "a weight after the head": lambda e, x: x + e.param("bias"),
    "a rope table": lambda e, x: x + e.state.rope_cos[..., :1],
    "a mask": lambda e, x: x * e.named("attn_mask").reshape(*x.shape[:2], 1),
    "astype f32": lambda e, x: x + e.flow_input("tokens").astype("f32").sum(),
    "jax in f32": lambda e, x: x + e.jax(lambda t: jnp.sin(t.astype(jnp.float32)), x),
    "where": lambda e, x: e.where(x > 0, x, 0.0),
}


CUSTOM = [*(("before", name) for name in BEFORE), *(("after", name) for name in AFTER)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), CUSTOM, ids=lambda v: v.replace(" ", "_"))
def test_a_custom_stage_that_works_in_f32_works_in_bf16(where: str, name: str) -> None:
    """Before the head and after it: logits, tables and masks are f32 in every precision, the rest is not."""
    flow = (
        rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").token_embed()
        .rope_tables(RopeTables.theta(4)).attn_mask_ones()
        .when(where == "before", lambda f: f.custom(BEFORE[name])).lm_head(V, H, tied=True)
        .when(where == "after", lambda f: f.custom(AFTER[name]))
    )  # fmt: skip
    width = H if where == "before" else V
    weights = {"model.embed_tokens.weight": w(V, H)} | ({"bias": w(width)} if "weight" in name else {})
    want = compiled(flow, weights)(IDS)
    got = compiled(flow, weights, profile=profile(precision={"compute": "bf16"}))(IDS)
    assert got.dtype == np.float32 and relative(got, want) < 0.04


def test_bf16_checkpoints_compute_in_f32_on_the_cpu() -> None:
    """`auto` widens them; the weights go back as they came."""
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in llama_weights().items()}
    model = compiled(llama_flow(), weights)
    assert {a.dtype for a in model.params.values()} == {F32}
    for key, value in model.weights().items():
        np.testing.assert_array_equal(np.asarray(value), weights[key])
    in_bf16 = compiled(llama_flow(), weights, profile=profile(precision={"compute": "bf16"}))
    assert relative(in_bf16(IDS), model(IDS)) < 0.04


@pytest.mark.parametrize("program", ["prefill", "extend"])
def test_low_precision_state(program: str) -> None:
    """The cache has the compute dtype."""
    tables = profile(precision={"compute": "bf16"})
    model = compiled(llama_flow(), llama_weights(), profile=tables, program=program)
    state = model.init_state(B, 8)
    assert {a.dtype for a in state.leaves.values()} == {np.dtype(ml_dtypes.bfloat16)}
    out, after = model.apply(model.params, IDS, lengths=np.array([3, 2], np.int32), state=state)
    assert out.dtype == np.float32
    assert {k: v.dtype for k, v in after.leaves.items()} == {k: v.dtype for k, v in state.leaves.items()}


# -- precision of products ---------------------------------------------------------------------


def precisions(model: Any, *inputs: Any, **named: Any) -> set[Any]:
    """The `precision` of every dot in the jaxpr of a model."""
    closed = jax.make_jaxpr(lambda p: model.apply(p, *inputs, **named))(model.params)
    dots = [e for j in jaxprs(closed.jaxpr) for e in j.eqns if e.primitive.name == "dot_general"]
    assert dots
    return {e.params["precision"] for e in dots}


HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("roll", ["unroll", "scan"])
@pytest.mark.parametrize("merge", [False, True])
def test_matmul_precision_reaches_every_dot(policy: str, roll: str, merge: bool) -> None:
    """Projections with and without bias, attention, the head, merged and scanned."""
    tables = profile(
        precision={"matmul": "highest"}, fusion={"policy": policy}, layers={"roll": roll},
        backend={"cpu": {"merge": merge}},
    )  # fmt: skip
    model = compiled(llama_flow(biased=True), llama_weights(biased=True), profile=tables)
    assert precisions(model, IDS) == {HIGHEST}


@pytest.mark.parametrize("program", ["prefill", "extend"])
def test_matmul_precision_reaches_derived_programs(program: str) -> None:
    """Attention over a cache too."""
    tables = profile(precision={"matmul": "highest"})
    model = compiled(llama_flow(), llama_weights(), profile=tables, program=program)
    lengths = np.array([3, 2], np.int32)
    assert precisions(model, IDS, lengths=lengths, state=model.init_state(B, 8)) == {HIGHEST}


@pytest.mark.parametrize("name", ["linear", "linear bias", "matmul", "swiglu", "attention", "scores"])
def test_matmul_precision_reaches_operators(name: str) -> None:
    """`@`, `emit.linear` and the blocks."""
    flow = flow_of([[(name, 0, 0)]])
    used = read_by(flow, WEIGHTS)
    model = compiled(flow, used, profile=profile(precision={"matmul": "highest"}))
    assert precisions(model, X) == {HIGHEST}


def test_matmul_precision_reaches_jax_functions() -> None:
    """ "The precision of every matrix product" is also that of a product in `emit.jax` that names none itself."""
    flow = x_flow().custom(lambda e, x: e.jax(lambda a: jnp.einsum("bsh,bth->bst", a, a), x))
    model = compiled(flow, {}, profile=profile(precision={"matmul": "highest"}))
    assert precisions(model, X) == {HIGHEST}


def test_the_default_precision_leaves_the_choice_to_jax() -> None:
    """Nothing is pinned that was not asked for."""
    got = precisions(compiled(llama_flow(), llama_weights()), IDS)
    assert got <= {None, (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)}


@pytest.mark.parametrize("roll", ["unroll", "scan"])
def test_merging_stores_nothing_twice(roll: str) -> None:
    """A merged weight takes the place of its parts; both forms have the same bytes and give the same keys."""
    weights = llama_weights(biased=True)
    for merge in (False, True):
        tables = profile(backend={"cpu": {"merge": merge}}, layers={"roll": roll})
        model = compiled(llama_flow(biased=True), weights, profile=tables)
        stored = sum(a.nbytes for a in model.params.values())
        assert stored == sum(a.nbytes for a in weights.values()) == model.report().parameter_bytes
        assert set(model.weights()) == set(weights)
