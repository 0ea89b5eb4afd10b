"""Layers that repeat: one node for equal layers, the same numbers rolled, unrolled and scanned."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import BlockStage, Custom, Linear, LlamaDecoderSpec, Named, RmsNorm, Sequence
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.errors import DeriveError
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.region import Repeat, peel_last
from tests.small import compiled, llama_weights, read_by, w

H = 6
B, S = 2, 3
X = np.random.default_rng(0).standard_normal((B, S, H)).astype(np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:.*layers.roll = .* has no effect:rlx_jax.errors.RlxWarning")

UNROLL, SCAN = (rlx.CompileProfile().replace(layers={"roll": how}) for how in ("unroll", "scan"))
Layer = Callable[[int], BlockStage]


def x_flow() -> rlx.ModelFlow:
    """A flow over `x` `[batch, seq, 6]`."""
    return rlx.ModelFlow("m").input("x", ("batch", "seq", H))


def weights_of(count: int, *names: str) -> dict[str, np.ndarray]:
    """`{name}{i}` for every layer: matrices, and vectors where the name starts with g."""
    shapes = {name: (H,) if name.startswith("g") else (H, H) for name in names}
    return {f"{name}{i}": w(*shape, seed=i) for i in range(count) for name, shape in shapes.items()}


def regions(graph: Graph) -> list[Repeat]:
    """The Repeat ops of a graph, those inside regions too."""
    return [n.op for _, n in graph.walk() if isinstance(n.op, Repeat)]


def outputs(model: Any, *inputs: Any) -> dict[str, np.ndarray]:
    """Outputs by name."""
    out = model(*inputs)
    return {k: np.asarray(v) for k, v in (out if isinstance(out, dict) else {"output": out}).items()}


def plain(flow: rlx.ModelFlow, count: int, layer: Layer) -> rlx.ModelFlow:
    """The same layers, one after the other, without Repeat."""
    for i in range(count):
        stage = layer(i)
        flow = flow.stage(stage.inner if isinstance(stage, Named) else stage)
    return flow


def assert_alike(count: int, layer: Layer, weights: dict[str, np.ndarray], tail: Any = lambda f: f) -> BuiltModel:
    """Rolled and unrolled, scanned, peeled, and written out: the same outputs. Returns the rolled flow, built."""
    rolled = tail(x_flow().repeat_layers(count, layer))
    want = outputs(compiled(tail(plain(x_flow(), count, layer)), weights, profile=UNROLL), X)
    built = rolled.build(weights)
    peeled = BuiltModel.from_hir(peel_last(built.hir, built.types), weights)
    runs = {"unrolled": (rolled, UNROLL), "scanned": (rolled, SCAN), "peeled": (peeled, UNROLL)}
    for how, (flow, profile) in runs.items():
        got = outputs(compiled(flow, weights, profile=profile), X)
        assert list(got) == list(want)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=2e-6, atol=2e-6, err_msg=f"{name} {how}")
    return built


def block(i: int) -> BlockStage:
    """A norm, two matrices, a residual."""
    return Sequence(
        [blocks.ResidualSave(), RmsNorm(f"g{i}"), Linear(f"w{i}"), Custom(lambda e, x: e.silu(x)), Linear(f"v{i}"),
         blocks.ResidualAdd()]
    )  # fmt: skip


def test_equal_layers_are_one_node(count: int = 3) -> None:
    """Through every level, with a name for all of its parameters; and it is the same program scanned."""
    built = assert_alike(count, block, weights_of(count, "g", "w", "v"))
    (repeat,) = regions(built.hir)
    assert repeat.count == count and repeat.carries == 1
    assert [p.programs for p in repeat.body.params()] and all(len(p.programs) == count for p in repeat.body.params())
    assert built.refusals == ()
    model = compiled(x_flow().repeat_layers(count, block), weights_of(count, "g", "w", "v"))
    assert f"repeat(count={count}" in model.text("hir") and f"repeat(count={count}" in model.text("mir")
    assert f"repeat(count={count}" in model.text("lir", X)


def test_scan_stacks_the_leaves_and_unroll_does_not() -> None:
    """`params` has one leaf for each weight of a layer when scanned; `weights()` the checkpoint's keys in both."""
    weights = weights_of(3, "g", "w", "v")
    unrolled, scanned = (compiled(x_flow().repeat_layers(3, block), weights, profile=p) for p in (UNROLL, SCAN))
    assert set(unrolled.params) == set(weights)
    assert len(scanned.params) == 3 and all(a.shape[0] == 3 for a in scanned.params.values())
    for model in (unrolled, scanned):
        for key, value in model.weights().items():
            np.testing.assert_array_equal(value, weights[key])
        assert set(model.weights()) == set(weights)
    assert "scan" in scanned.text("jaxpr") and "scan" not in unrolled.text("jaxpr")


def alternating(period: int) -> Layer:
    """Every `period`-th layer has a tanh, the others a silu."""

    def layer(i: int) -> BlockStage:
        last = i % period == period - 1
        return Sequence([Linear(f"w{i}"), Custom((lambda e, x: e.tanh(x)) if last else (lambda e, x: e.silu(x)))])

    return layer


def test_the_smallest_period_is_the_body(count: int = 12, period: int = 6) -> None:
    """Gemma's 5:1 is a period of 6."""
    built = assert_alike(count, alternating(period), weights_of(count, "w"))
    (repeat,) = regions(built.hir)
    assert repeat.count == count // period
    assert len(repeat.body.params()) == period


def edited(edits: dict[int, str], period: int = 1) -> Layer:
    """Layers of a period, some of which do something else."""

    def layer(i: int) -> BlockStage:
        kind = edits.get(i, "silu" if i % period else "sin")
        return Sequence([Linear(f"w{i}"), Custom(lambda e, x: e.activation(kind, x))])

    return layer


def shape_of(built: BuiltModel) -> list[tuple[int, int] | str]:
    """What the layers became: (iterations, layers of a period) of each region, the function of each plain layer."""
    found: list[tuple[int, int] | str] = []
    for node in built.hir.nodes:
        if isinstance(node.op, Repeat):
            found.append((node.op.count, sum("linear" in n.op.text() for n in node.op.body.nodes)))
        elif isinstance(node.op, Unary):
            found.append(node.op.kind)
    return found


SPLITS: dict[str, tuple[int, Layer, list[tuple[int, int] | str], int]] = {
    "in the middle": (7, edited({3: "cos"}), [(3, 1), "cos", (3, 1)], 3),
    "the last": (5, edited({4: "cos"}), [(4, 1), "cos"], 4),
    "two alike": (12, edited({2: "cos", 6: "cos"}), [(2, 1), "cos", (3, 1), "cos", (5, 1)], 10),
    "at a distance": (9, edited({2: "cos", 5: "cos"}), [(2, 3), (3, 1)], 8),
    "half of the stack apart": (24, edited({3: "cos", 15: "cos"}), [(3, 1), "cos", (11, 1), "cos", (8, 1)], 3),
    "two in a row": (8, edited({3: "cos", 4: "cos"}), [(3, 1), (2, 1), (3, 1)], 3),
    "two that differ": (8, edited({3: "cos", 4: "tan"}), [(3, 1), "cos", "tan", (3, 1)], 3),
    "of a period": (13, edited({6: "cos"}, 3), [(2, 3), "cos", (2, 3)], 6),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_a_region_is_split_around_an_edited_layer(name: str) -> None:
    """The fewest bodies; the numbers of the plain program; a refusal that names the layer."""
    count, layer, want, first = SPLITS[name]
    if name in ("two alike", "at a distance", "of a period"):
        built = assert_alike(count, layer, weights_of(count, "w"))
    else:
        built = x_flow().repeat_layers(count, layer).build(weights_of(count, "w"))
    assert shape_of(built) == want
    (refusal,) = built.refusals
    assert refusal.startswith(f"layer {first}, op ")


def test_layers_that_read_an_earlier_one_are_a_region_behind_it() -> None:
    """What the first layer made is a value that all others share, as in value residuals."""

    def layer(i: int) -> BlockStage:
        def mix(emit: Any, x: Any) -> Any:
            y = emit.linear(x, f"w{i}")
            if i == 0:
                emit.set_named("first", y)
                return emit.tanh(y)
            return emit.tanh(y + emit.named("first"))

        return Custom(mix)

    built = assert_alike(5, layer, weights_of(5, "w"))
    assert [r.count for r in regions(built.hir)] == [4]


def test_state_of_a_split_region() -> None:
    """Every layer has caches of its own, under its own number, and decodes as it computes."""
    weights = llama_weights(5, H, 8, 4, 9)

    def layer(i: int) -> BlockStage:
        stage = blocks.llama_prefill_layer_composed(i, LlamaDecoderSpec(num_heads=2, head_dim=4, num_kv_heads=1))
        return Sequence([stage, Custom(lambda e, x: x * 0.5, "halve")]) if i == 2 else stage

    flow = x_flow().repeat_layers(5, layer)
    want = np.asarray(compiled(flow, weights)(X))
    keys = {"unroll": [f"layers.{i}" for i in range(5)], "scan": ["layers.{i}", "layers.2", "layers.{i+3}"]}
    for profile in (UNROLL, SCAN):
        model = compiled(flow, weights, program="extend", profile=profile)
        state, got = model.init_state(B, context=S), []
        held = {name.removesuffix(".self_attn.k") for name in state.leaves if name.endswith(".k")}
        assert held == set(keys[profile.layers.roll])
    for at in range(S):
        y, state = model(X[:, at : at + 1], lengths=np.ones(B, np.int32), state=state)
        got.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(got, 1), want, rtol=1e-4, atol=1e-5)


def test_a_declared_stage_stays_declared_in_a_region() -> None:
    """`token_wise` goes with the node; layers of which one says it and one does not are two programs."""

    def by_number(t: Any) -> Any:
        return jnp.tanh(jnp.take(t, jnp.arange(t.shape[1]), axis=1, mode="clip"))

    def layer(said: set[int]) -> Layer:
        return lambda i: Custom(lambda e, x: e.jax(by_number, x), "mine", token_wise=i in said)

    with pytest.raises(DeriveError, match="layers.{i}.mine"):
        compiled(x_flow().repeat_layers(3, layer(set())), program="extend").text("mir")
    flow = x_flow().repeat_layers(3, layer({0, 1, 2}))
    assert [r.count for r in regions(flow.build().hir)] == [3]
    for profile in (UNROLL, SCAN):
        model = compiled(flow, program="extend", profile=profile)
        y, _ = model(X, lengths=np.full(B, S, np.int32), state=model.init_state(B))
        np.testing.assert_allclose(y, np.tanh(np.tanh(np.tanh(X))), rtol=1e-5)
    (refusal,) = x_flow().repeat_layers(3, layer({0, 1})).build().refusals
    assert "layer 2" in refusal and "token_wise" in refusal


DIFFERENT: dict[str, Layer] = {
    "number": lambda i: Custom(lambda e, x: x * (i + 1)),
    "constant": lambda i: Custom(lambda e, x: x + e.constant(np.full(H, i), "f32")),
    "epsilon": lambda i: RmsNorm(f"g{i}", 1e-5 * (i + 1)),
    "width": lambda i: Sequence([Linear(f"u{i}"), Linear(f"d{i}")]),
    "slice": lambda i: Custom(lambda e, x: x + x[:, :, i : i + 1]),
    "python value in a closure": lambda i: Custom(lambda e, x: e.jax(lambda t: t * (i + 1.5), x + 1)),
    "array in a closure": lambda i: Custom(lambda e, x: e.jax(scaled_by(jnp.full(H, i + 1.0, jnp.float32)), x + 1)),
    "array in a nested jit": lambda i: Custom(lambda e,
        x: e.jax(jax.jit(scaled_by(jnp.full(H, i + 1.0, jnp.float32))), x + 1)),
    "array in a scan": lambda i: Custom(lambda e, x: e.jax(scanned_by(jnp.full(H, i + 1.0, jnp.float32)), x + 1)),
    "array in a custom_jvp": lambda i: Custom(lambda e, x: e.jax(custom_by(jnp.full(H, i + 1.0, jnp.float32)), x + 1)),
    "close numbers": lambda i: Custom(lambda e, x: e.jax(lambda t: t * (1 + i * 1e-6), x + 1)),
    "shape": lambda i: Custom(lambda e, x: e.jax(lambda t: t + jnp.ones(i + 1, t.dtype).sum(), x + 1)),
}  # fmt: skip


def scaled_by(c: Any) -> Callable[[Any], Any]:
    """Multiplication with an array that is captured."""
    return lambda t: t * c[None, None]


def scanned_by(c: Any) -> Callable[[Any], Any]:
    """The same inside a loop."""
    return lambda t: jax.lax.fori_loop(0, 2, lambda _, a: a * c[None, None], t)


def custom_by(c: Any) -> Callable[[Any], Any]:
    """The same behind a custom derivative."""
    fn = jax.custom_jvp(scaled_by(c))
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return fn


def test_layers_that_differ_are_not_merged() -> None:
    """Whatever a layer captures counts, wherever it hides."""
    widths = {f"u{i}": w(5 + i, H) for i in range(3)} | {f"d{i}": w(H, 5 + i) for i in range(3)}
    for name, layer in DIFFERENT.items():
        weights = {"epsilon": weights_of(3, "g"), "width": widths}.get(name, {})
        built = x_flow().repeat_layers(3, layer).build(weights)
        assert regions(built.hir) == [] and len(built.refusals) == 1, name


@jax.custom_vjp
def clipped_gradient(x: Any) -> Any:
    """The identity, with a derivative of its own."""
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

SAME: dict[str, Layer] = {
    "operators": lambda i: Custom(lambda e, x: e.tanh(x * 2) + x),
    "closure on the carry": lambda i: Custom(lambda e, x: e.jax(lambda t: jnp.tanh(t) + 1, x)),
    "closure on a weight": lambda i: Custom(lambda e, x: x + e.jax(lambda t: t * t, e.param(f"g{i}"))),
    "equal captured arrays": lambda i: Custom(lambda e, x: e.jax(scaled_by(jnp.arange(6, dtype=jnp.float32)), x)),
    "equal arrays in nested jits": lambda i: Custom(lambda e,
        x: e.jax(jax.jit(scaled_by(jnp.arange(6, dtype=jnp.float32))), x)),
    "a jax function": lambda i: Custom(lambda e, x: e.jax(jnp.sin, x)),
    "jax.nn.gelu": lambda i: Custom(lambda e, x: e.jax(lambda t: jax.nn.gelu(t), x * 2)),
    "custom_vjp": lambda i: Custom(lambda e, x: e.jax(lambda t: clipped_gradient(t), x * 2)),
    "closure on the input": lambda i: Custom(lambda e, x: x + e.jax(lambda t: t * t, e.flow_input("x"))),
}  # fmt: skip


def test_equal_closures_are_merged() -> None:
    """Each layer makes its own function object; what counts is what it computes."""
    for name, layer in SAME.items():
        weights = weights_of(3, "g") if "weight" in name else {}
        built = x_flow().repeat_layers(3, layer).build(weights)
        assert built.refusals == () and [r.count for r in regions(built.hir)] == [3], name
        if "weight" in name or "input" in name:
            assert_alike(3, layer, weights)


def test_unrolled_layers_with_state_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers evaluate no more ops, and each layer has its own instructions with its own names."""
    evaluated: list[Unary] = []
    evaluate = Unary.eval

    def counted(op: Unary, x: Any) -> Any:
        evaluated.append(op)
        return evaluate(op, x)

    def layer(i: int) -> BlockStage:
        stage = blocks.llama_prefill_layer_composed(i, LlamaDecoderSpec(num_heads=2, head_dim=4, num_kv_heads=1))
        return Sequence([stage, Custom(lambda e, x: e.tanh(x), "own")])

    monkeypatch.setattr(Unary, "eval", counted)
    counts = []
    for count in (2, 5):
        model = compiled(x_flow().repeat_layers(count, layer), llama_weights(count, H, 8, 4, 9), program="extend")
        state = model.init_state(B, context=S)
        evaluated.clear()
        text = model.lower(X, lengths=np.full(B, S, np.int32), state=state).as_text(debug_info=True)
        counts.append(len(evaluated))
        scopes = set(re.findall(r"layers\.\d\.own/tanh", text))
        assert scopes == {f"layers.{i}.own/tanh" for i in range(count)} and text.count("stablehlo.tanh") == count
    assert counts[0] == counts[1] > 0


def test_nested_repeats() -> None:
    """Layers inside layers: the outer one is the region."""
    weights = {f"w{i}{j}": w(H, H, seed=3 * i + j) for i in range(3) for j in range(2)}

    def outer(i: int) -> BlockStage:
        return Sequence([blocks.Repeat(2, lambda j: Linear(f"w{i}{j}"), "inner"), Custom(lambda e, x: e.tanh(x))])

    flow = x_flow().repeat_layers(3, outer)
    want = X
    for i in range(3):
        want = np.tanh(want @ weights[f"w{i}0"].T @ weights[f"w{i}1"].T)
    for roll in (UNROLL, SCAN):
        np.testing.assert_allclose(compiled(flow, weights, profile=roll)(X), want, atol=1e-5)
    assert regions(flow.build(weights).hir)[0].count == 3


OPS = ["w", "v", "g", "tanh", "scale", "skip", "first", "closure", "out", "save"]
bodies = st.lists(st.lists(st.sampled_from(OPS), min_size=1, max_size=4), min_size=1, max_size=3)


def random_layer(body: list[list[str]]) -> Layer:
    """Layer i does the ops of entry i of `body`, in turn."""

    def layer(i: int) -> BlockStage:
        def run(emit: Any, x: Any) -> Any:
            enters = x
            for number, op in enumerate(body[i % len(body)]):
                x = {
                    "w": lambda x: x @ emit.param(f"w{i}"),
                    "v": lambda x: emit.linear(x, f"v{i}"),
                    "g": lambda x: emit.rms_norm(x, f"g{i}", eps=1e-5),
                    "tanh": emit.tanh,
                    "scale": lambda x: x * 0.5,
                    "skip": lambda x: x + enters,
                    "first": lambda x: x + emit.flow_input("x"),
                    "closure": lambda x: emit.jax(lambda t: jnp.sin(t) * 0.75, x),
                    "out": lambda x, n=number: (emit.output(f"o{i}_{n}", x), x)[1],
                    "save": lambda x: (x + emit.state.named.get("s", x), emit.set_named("s", x))[0],
                }[op](x)
            return x

        return Custom(run)

    return layer


@settings(max_examples=4, deadline=None)
@given(body=bodies, count=st.integers(0, 7), scan=st.booleans())
def test_random_layers_rolled_are_random_layers(body: list[list[str]], count: int, scan: bool) -> None:
    """Any structure, any period, any tail: the outputs are those of the plain program."""
    layer, weights = random_layer(body), weights_of(7, "w", "v", "g")

    def tail(flow: rlx.ModelFlow) -> rlx.ModelFlow:
        return flow.custom(lambda e, x: e.tanh(x))

    flows = tail(x_flow().repeat_layers(count, layer)), tail(plain(x_flow(), count, layer))
    used = read_by(flows[0], weights)
    got, want = (outputs(compiled(f, used, profile=SCAN if scan and f is flows[0] else UNROLL), X) for f in flows)
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
