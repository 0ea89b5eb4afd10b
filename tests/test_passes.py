"""Policies, the table of passes, the verifier, the compute dtype and precisions: the same program in other forms."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import LlamaDecoderSpec, RopeTables
from rlx_jax.compiler import passes
from rlx_jax.compiler.passes import PIPELINE, pass_named
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Constant, Graph, Leaf
from rlx_jax.ir.types import TensorType
from tests import small
from tests.opening import opened
from tests.small import compiled, equations, profile, read_by, relative, w, x_flow

# Settings vary here over programs that have nothing for some of them to act on.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")

H, F, V = 8, 12, 13
B, S = 2, 3
X = np.random.default_rng(0).standard_normal((B, S, H)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, V, (B, S)).astype(np.int32)


WEIGHTS = {
    **{name: w(H, H, seed=i) for i, name in enumerate(("w", "v", "u"))},
    "g": 1 + w(H), "b": w(H, seed=1), "gate": w(F, H), "up": w(F, H, seed=1), "down": w(H, F),
}  # fmt: skip


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
    out |= small.llama_weights(layers, H, 16, 8, F)
    for key in [key for key in out if biased and "self_attn" in key]:
        out[key.replace("weight", "bias")] = w(len(out[key]))
    return out


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
        x = emit.linear(x, "v", "b", activation="gelu")
        normed = emit.add_node(hir.RmsNorm(1e-5), x, emit.param("g"), emit.constant(np.zeros(H)))
        return emit.add_node(hir.Attention(4, 2, causal=True), normed, x[..., :4], x[..., 4:])

    direct, fusable = (
        ops(mir_of(x_flow().custom(stage), WEIGHTS, fusion={"policy": p})) for p in ("direct", "fusable")
    )
    assert any("fused_mm_bias_gelu" in t for t in direct) and not any("fused" in t for t in fusable)
    assert any("repeat_heads" in t for t in fusable) and not any("repeat_heads" in t for t in direct)


F32 = np.dtype(np.float32)


def test_the_verifier_runs_after_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that breaks the program is named."""

    def bad(graph: Graph, types: object) -> Graph:
        return replace(graph, nodes=(*graph.nodes[:-1], replace(graph.nodes[-1], types=(TensorType((1,), F32),))))

    of_sizes = ("per_shard", "divide_last", *(f"group_{k}" for k in "deltas heads attention experts products".split()))
    for name in (p.name for p in PIPELINE if p.level == "mir" and p.kind != "program" and p.name not in of_sizes):
        rows = tuple(replace(p, run=bad) if p.name == name else p for p in PIPELINE)
        with monkeypatch.context() as m:
            m.setattr(passes, "PIPELINE", rows)
            marked = profile(fusion={"target": "cuda"} if name == "unroll_steps" else {})  # it runs there alone
            with pytest.raises(GraphError, match=f"mir graph.*wrong after {name}"):
                compiled(x_flow().linear("w"), {"w": WEIGHTS["w"]}, profile=marked)


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
    name: BEFORE[name] for name in ("numbers", "a rope table", "a mask", "jax in f32", "where")
} | {
    "softcap": lambda e, x: e.tanh(x / 30.0) * 30.0, "a constant": lambda e, x: x + e.constant(np.arange(V), "f32"),
    "a weight": lambda e, x: x + e.param("wide"),
}  # fmt: skip


def test_custom_stages_that_work_in_f32_work_in_bf16() -> None:
    """Before the head and after it: logits, tables and masks are f32 in every precision, the rest is not."""

    def stages(where: str, table: dict[str, Callable[[Any, Any], Any]]) -> Callable[[Any, Any], Any]:
        return lambda e, x: [x, *(e.output(f"{name} {where}", fn(e, x)) for name, fn in table.items())][0]

    flow = (
        rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").token_embed()
        .rope_tables(RopeTables.theta(4)).attn_mask_ones().custom(stages("before", BEFORE))
        .lm_head(V, H, tied=True).custom(stages("after", AFTER))
    )  # fmt: skip
    weights = {"model.embed_tokens.weight": w(V, H), "bias": w(H), "wide": w(V)}
    want = compiled(flow, weights)(IDS)
    got = compiled(flow, weights, profile=profile(precision={"compute": "bf16"}))(IDS)
    assert list(got) == list(want) and len(got) == 1 + len(BEFORE) + len(AFTER)
    for name, value in got.items():
        assert value.dtype == np.float32 and relative(value, want[name]) < 0.04, name


def precisions(model: Any, *inputs: Any, **named: Any) -> set[Any]:
    """The `precision` of every dot in the jaxpr of a model."""
    closed = jax.make_jaxpr(lambda p: model.apply(p, *inputs, **named))(model.params)
    dots = [e for e in equations(closed.jaxpr) if e.primitive.name == "dot_general"]
    assert dots
    return {e.params["precision"] for e in dots}


HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


@pytest.mark.parametrize(("policy", "roll", "merge"), [("direct", "unroll", False), ("fusable", "scan", True)])
def test_matmul_precision_reaches_every_dot(policy: str, roll: str, merge: bool) -> None:
    """Projections with and without bias, attention, the head, merged and scanned."""
    tables = profile(
        precision={"matmul": "highest"}, fusion={"policy": policy}, layers={"roll": roll},
        backend={"cpu": {"merge": merge}},
    )  # fmt: skip
    model = compiled(llama_flow(biased=True), llama_weights(biased=True), profile=tables)
    assert precisions(model, IDS) == {HIGHEST}


def test_matmul_precision_reaches_jax_functions() -> None:
    """ "The precision of every matrix product" is also that of a product in `emit.jax` that names none itself."""
    flow = x_flow().custom(lambda e, x: e.jax(lambda a: jnp.einsum("bsh,bth->bst", a, a), x))
    model = compiled(flow, {}, profile=profile(precision={"matmul": "highest"}))
    assert precisions(model, X) == {HIGHEST}


OPTIONAL = [p.name for p in PIPELINE if p.kind != "program"]
W = {name: np.random.default_rng(i).standard_normal((8, 8)).astype("f4") for i, name in enumerate("qkv")}


def three(emit: Any, x: Any) -> Any:
    q, k, v = (emit.linear(x, name) for name in "qkv")
    return emit.tanh(q) * k + v


FLOW = rlx.ModelFlow("m").input("x", ("batch", 8)).custom_named("mix", three)


def mixed(**tables: Any) -> Any:
    """Compile the flow with fused projections."""
    backend = {"cpu": {"merge": True, "weight_layout": "in_out"}}
    return rlx.compile(FLOW, W, profile=rlx.CompileProfile().replace(backend=backend, **tables))


def test_every_pass_of_a_program_is_timed_counted_and_printed() -> None:
    """In the order of the table; each can be stopped after."""
    model = mixed(passes={"verbose": False})
    report = model.report()
    ran = list(report.nodes)
    assert ran == [p.name for p in PIPELINE if p.name in ran]
    assert {"expand", "merge_linears", "orient", "derive", "lower", "cse", "dce"} <= set(ran)
    assert set(ran) < set(report.seconds) and "build" in report.seconds
    texts = {name: model.text(str(pass_named(name).level), after=name) for name in ran}
    assert texts["expand"].count("= linear(") == 3 and texts["merge_linears"].count("= linear(") == 1
    assert texts["merge_linears"].startswith("hir @m (") and "after=merge_linears" in texts["merge_linears"]
    body = texts["dce"].partition("\n")[2]
    assert body == model.text("mir").partition("\n")[2]


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_pass_can_be_switched_off(name: str) -> None:
    """By its name; the numbers stay."""
    x = np.ones((2, 8))
    model = mixed(fusion={"disable": [name]})
    assert name not in model.report().nodes
    q, k, v = (x @ W[n].T.astype("f8") for n in "qkv")
    np.testing.assert_allclose(model(x), np.tanh(q) * k + v, rtol=1e-5, atol=1e-5)
