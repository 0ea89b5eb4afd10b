"""`at`: blocks wrapped, replaced, captured and scaled by their paths, in recipes and in flows of one's own."""

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.hir import Linear
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.trace.block_selection import BlockPattern
from tests.opening import load
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
CONFIG, WEIGHTS = numpy_reference.read_config(LLAMA), numpy_reference.read_weights(LLAMA)
TOKENS = load_record(LLAMA)["tokens"]
LAYERS, HIDDEN, HEADS, WIDTH = (
    CONFIG[f"{n}"] for n in ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim")
)
RNG = np.random.default_rng(3)
STEER = RNG.normal(size=HIDDEN).astype("f4")
MASK = np.array([1, 0, 1, 0.5, 1, 1, 0, 2], "f4")
OUT = "self_attn.o_proj"


def steer(emit: rlx.Emit, x: rlx.FlowValue, inner: Callable[..., rlx.FlowValue]) -> rlx.FlowValue:
    """What leaves a layer, and a vector that a call may bring."""
    vector = emit.optional_input("steer")
    return inner(x) if vector is None else inner(x) + vector


def edited(recipe: Any) -> Any:
    """Every layer steered, its heads masked and its value an output, alone and as one array."""
    recipe = recipe.patch_flow(
        lambda flow: flow.input("steer", (HIDDEN,), default=None).input("heads", (HEADS,), default=None)
    )
    recipe = recipe.at("layers.*").wrap(steer).at(f"layers.*.{OUT}").scale("heads", of="input", heads=HEADS)
    return recipe.at("layers.*").capture(stacked=True).at("layers.*").capture().at("norm").capture()


def edited_weights(steer: Any, mask: Any) -> numpy_reference.Weights:
    """The same in the weights: a vector behind a layer is part of its bias, a mask of heads of what reads them."""
    weights = dict(WEIGHTS)
    for i in range(LAYERS):
        key, bias = f"model.layers.{i}.{OUT}.weight", f"model.layers.{i}.mlp.down_proj.bias"
        weights[key] = weights[key] * np.repeat(np.asarray(mask, "f8"), WIDTH)
        weights[bias] = weights[bias] + np.asarray(steer, "f8")
    return weights


def reference(weights: numpy_reference.Weights) -> dict[str, np.ndarray[Any, Any]]:
    """Captures and logits in float64."""
    rows = [numpy_reference.llama_states(CONFIG, weights, row) for row in TOKENS]
    states = [np.stack([row[i] for row in rows]) for i in range(LAYERS + 1)]
    # What leaves the last layer is normalised before it is a state.
    named = {f"layers.{i}": states[i + 1] for i in range(LAYERS - 1)} | {"norm": states[LAYERS]}
    return named | {"logits": states[LAYERS] @ weights["lm_head.weight"].T, "layers.*": np.stack(states[1:LAYERS])}


def but_the_last(out: dict[str, Any]) -> dict[str, Any]:
    """Outputs, of the stacked ones those that the reference knows; the last is what the last layer gave alone."""
    np.testing.assert_array_equal(out["layers.*"][-1], out[f"layers.{LAYERS - 1}"])
    assert len(out["layers.*"]) == LAYERS
    return out | {"layers.*": out["layers.*"][:-1]}


@pytest.fixture(scope="module")
def scanned() -> rlx.CompiledModel:
    """The edited model with its layers as one scan."""
    return rlx.compile(edited(rlx.recipe_for(LLAMA)), profile=rlx.CompileProfile().replace(layers={"roll": "scan"}))


def test_edits_are_what_the_same_change_of_the_weights_is(scanned: rlx.CompiledModel) -> None:
    """Captures, a vector and a head mask as inputs, in float64 NumPy; the layers are one region."""
    want = reference(edited_weights(STEER, MASK))
    out = but_the_last(scanned(TOKENS, steer=STEER, heads=MASK))
    assert list(out) == ["logits", "layers.*", *(f"layers.{i}" for i in range(LAYERS)), "norm"]
    for name, value in want.items():
        assert_close(out[name], value.astype("f4"))
    assert scanned.report().refusals == () and "repeat(count=3" in scanned.text("hir")


@pytest.mark.slow
def test_an_optional_input_between_products() -> None:
    """Of which the others share their input without it: with it, and without it, as the weights say in NumPy."""
    by = np.linspace(0.5, 2.0, HIDDEN, dtype="f4")
    steered = rlx.recipe_for(LLAMA).patch_flow(lambda flow: flow.input("by", (HIDDEN,), default=None))
    lm = load(LLAMA, recipe=steered.at("layers.*.self_attn.q_proj").scale("by", of="input"))
    scaled = {key: value * by if key.endswith("q_proj.weight") else value for key, value in WEIGHTS.items()}
    calls: list[tuple[Any, dict[str, Any]]] = [(WEIGHTS, {}), (scaled, {"by": by})]
    for weights, given in calls:
        want = numpy_reference.llama_greedy(CONFIG, weights, [3, 5, 7], 5)
        assert lm.generate([[3, 5, 7]], max_new_tokens=5, inputs=given or None) == [want]
        assert_close(lm.model(TOKENS, **given), reference(weights)["logits"].astype("f4"))


def test_a_product_and_its_activation_are_two_blocks() -> None:
    """Which are one op: the product is captured and scaled before the activation."""
    recipe: Any = rlx.recipe_for(checkpoints.FIXTURES / "gpt2" / "bare_v4")
    first, act = "layers.1.mlp.c_fc", "layers.1.mlp.act"
    ids = np.array([[1, 2, 3]])
    plain = rlx.compile(recipe)(ids)
    seen = rlx.compile(recipe.at(first).capture().at(act).capture())(ids)
    assert_close(seen[act], np.asarray(jax.nn.gelu(seen[first])))
    assert (np.asarray(seen[first]) < -0.2).any()  # which no value behind a GELU is
    (same,) = (v for k, v in seen.items() if k not in (first, act))
    assert_close(same, np.asarray(plain))
    half = rlx.compile(recipe.at(first).scale(0.5).at(act).capture())(ids)
    assert_close(half[act], np.asarray(jax.nn.gelu(seen[first] * 0.5)))


def test_a_block_replaced() -> None:
    """Layer 1 without its MLP, and with the queries of layer 0: another stage in the place of each block. What the
    blocks had may stay in the checkpoint."""
    recipe = rlx.recipe_for(LLAMA).at("layers.1.mlp").replace(blocks.Custom(lambda emit, x: emit.zeros_like(x)))
    recipe = recipe.at("layers.1.self_attn.q_proj").replace(blocks.Linear("model.layers.0.self_attn.q_proj.weight"))
    weights = dict(WEIGHTS)
    weights["model.layers.1.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"]
    for part in ("weight", "bias"):
        weights[f"model.layers.1.mlp.down_proj.{part}"] = 0 * weights[f"model.layers.1.mlp.down_proj.{part}"]
    model = rlx.compile(recipe)
    assert_close(model(TOKENS), reference(weights)["logits"].astype("f4"))
    assert "model.layers.1.mlp.up_proj.weight" not in model.require_params("a test")


def test_captures_beside_named_outputs() -> None:
    """They follow what the flow names, unless some of them are named."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 4)).store_stream("raw").named_layer("a", blocks.Activation("relu"))
    flow = flow.named_layer("b", blocks.Activation("relu")).at("{a,b}").capture()
    names = {(): ("output", "a", "b"), ("raw",): ("output", "raw", "a", "b"), ("b", "raw"): ("output", "b", "raw")}
    for chosen, want in names.items():
        assert (flow.with_extra_outputs(chosen) if chosen else flow).build().output_names == want


@pytest.mark.slow
def test_the_head_of_siglip_takes_the_tokens() -> None:
    """Not the pixels, of which it reads how many rows there are."""
    siglip = checkpoints.FIXTURES / "vision" / "dual" / "siglip"
    recipe, rows = rlx.recipe_for(siglip), load_record(siglip)["pixels"]
    plain = load(siglip).embed_images(rows)
    muted = load(siglip, recipe=recipe.at("vision.head").scale(0.0, of="input")).embed_images(rows)
    assert np.abs(muted - muted[:1]).max() < 1e-6 < 1e-3 < np.abs(plain - plain[:1]).max()


@pytest.mark.parametrize(
    "fixture", ["llama/gqa_linear_mlpbias_v5", pytest.param("mixtral/window_v5", marks=pytest.mark.slow)]
)
def test_a_capture_of_every_block(fixture: str) -> None:
    """Tables and routers give several values; none of the outputs changes the model."""
    recipe, ids = rlx.recipe_for(checkpoints.FIXTURES / fixture), np.array([[1, 2, 3]])
    out, plain = dict(rlx.compile(recipe.at("**").capture())(ids)), rlx.compile(recipe)(ids)
    first = next(iter(out))
    assert_close(out[first], np.asarray(plain[first] if isinstance(plain, dict) else plain))
    expected = {"rotary_emb[0]", "rotary_emb[1]"} if "llama" in fixture else {"layers.0"}
    assert expected <= set(out) and "layers.1" in out


FAMILIES = ("llama/mha_tied_sparse", "mixtral/window_v5", "qwen3_5_text/tied_v5", "bert/bare_v5", "vision/vit")


def written(graph: Graph) -> Counter[Any]:
    """Each op with its path and types, an activation apart from its product."""
    found: Counter[Any] = Counter()
    for _, node in graph.walk():
        op, path, types = node.op, node.origin.path, tuple(map(str, node.types))
        if isinstance(op, Linear) and op.activation:
            found[Unary(op.activation).text(), (*path[:-1], "act"), types] += 1
            op = replace(op, activation="")
        if node.inputs:
            found[op.name() if op.regions() else op.text(), path, types] += 1
    return found


@pytest.mark.parametrize("fixture", FAMILIES)
def test_a_wrapper_that_changes_nothing(fixture: str) -> None:
    """The program is as it was, node for node, and as rolled, whatever block is asked for."""
    recipe: Any = rlx.recipe_for(checkpoints.FIXTURES / fixture)
    stock = recipe.assemble().build()
    same = recipe.at("layers{,.*,.*.*}").wrap(lambda emit, x, inner: inner(x)).assemble().build()
    assert written(same.hir) == written(expand_composites(stock.hir, stock.types))
    assert same.refusals == stock.refusals and same.keys_read == stock.keys_read and same.roles == stock.roles


def test_recipes_with_edits_are_values() -> None:
    """They can be pickled, but for functions that cannot; a recipe before its edit is as it was."""
    stock = rlx.Llama32Flow(rlx.recipe_for(LLAMA).config)
    recipe = stock.at("layers.*.mlp").scale(np.arange(HIDDEN)).at("layers.0").capture()
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again != stock and stock.hooks.edits == ()
    assert again.assemble().build().output_names == ("logits", "layers.0")


def test_patterns() -> None:
    layer = ("layers", 11, "mlp")
    for pattern, path, matched in [
        ("layers.*.mlp", layer, True), ("layers.*", layer, False), ("layers.**", layer, True),
        ("**.q_proj", ("layers", 1, "self_attn", "q_proj"), True), ("layers.[0-2].mlp", ("layers", 3, "mlp"), False),
        ("layers.[!0-2].mlp", ("layers", 3, "mlp"), True), ("layers.{0,3}.mlp", ("layers", 3, "mlp"), True),
        ("layers.{1,2}*", ("layers", 23), True), ("layers.?", ("layers", 23), False), ("a+b", ("a+b",), True),
    ]:  # fmt: skip
        assert BlockPattern(pattern).matches(path) is matched, pattern


HEADED: dict[str, tuple[str, str, Literal["input", "output"], int]] = {
    "what attention gives": ("llama/gqa_linear_mlpbias_v5", "layers.*.self_attn.o_proj", "input", 8),
    "queries": ("qwen3/tied_v4", "layers.*.self_attn.q_proj", "output", 4),
    "keys, normed and turned": ("qwen3/tied_v4", "layers.*.self_attn.k_proj", "output", 2),
    "values": ("qwen3/tied_v4", "layers.*.self_attn.v_proj", "output", 2),
    "of three in one": ("gpt2/bare_v4", "layers.*.attn.c_attn.q", "output", 3),
    "the context": ("bert/bare_v5", "layers.*.attention.self", "output", 5),
    "queries and their gates": ("qwen3_5_text/tied_v5", "layers.*.self_attn.q_proj", "output", 3),
    "gated": ("qwen3_5_text/tied_v5", "layers.*.self_attn.o_proj", "input", 3),
    "the delta rule": ("qwen3_5_text/tied_v5", "layers.*.linear_attn.out_proj", "input", 3),
    "a scan, normed in two groups": ("mamba2/groups_v5", "layers.*.mixer.out_proj", "input", 4),
}
"""Blocks whose values are heads, and how many: those of the fixtures' configs."""


@pytest.mark.parametrize("case", HEADED)
def test_heads_are_those_that_there_are(case: str) -> None:
    """Another number that divides the width too is no mask of heads, and would be taken for one."""
    fixture, pattern, of, heads = HEADED[case]
    blocks_of = rlx.recipe_for(checkpoints.FIXTURES / fixture).at(pattern)
    assert blocks_of.scale(np.arange(heads), of=of, heads=heads).assemble().build()
    for wrong in (1, 2 * heads):
        with pytest.raises(errors.ShapeError, match=f"{heads}.*{wrong}.*heads={heads}"):
            blocks_of.scale(np.arange(wrong), of=of, heads=wrong).assemble().build()


def test_no_heads_to_mask() -> None:
    """Of a value that is none; what a function of one's own makes cannot be known, and is not refused."""
    recipe = rlx.recipe_for(LLAMA)
    for pattern in ("layers.*.self_attn", "layers.*.mlp"):
        with pytest.raises(errors.ShapeError, match=r"layers\.0\.\w+: scale: heads=8, .*not consist of packed heads"):
            recipe.at(pattern).scale(np.ones(8), heads=8).assemble().build()
    own = rlx.ModelFlow("m").input("x", ("batch", 8)).custom_named("own", lambda emit, x: emit.jax(jnp.sin, x))
    halved = rlx.compile(own.at("own").scale([1, 0], heads=2))(np.ones((1, 8), "f4"))
    np.testing.assert_array_equal(np.asarray(halved) != 0, [[True] * 4 + [False] * 4])


def packed(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
    """Attention of four heads with two key heads, of one product."""
    with emit.scope("qkv"):
        both = emit.linear(x, "w")
    q, k, v = emit.split(both, (16, 8, 8))
    return emit.attention(q, k, v, heads=4, kv_heads=2, causal=True)


def test_heads_of_what_is_packed() -> None:
    """Queries, keys and values in one are as many heads as all three have."""
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).custom_named("attn", packed).param("w", shape=(32, 8))
    assert flow.at("attn.qkv").scale(np.ones(8), heads=8).build()
    with pytest.raises(errors.ShapeError, match=r"attn\.qkv: scale: .* has 8 heads, not 4"):
        flow.at("attn.qkv").scale(np.ones(4), heads=4).build()


@pytest.mark.oracle
@pytest.mark.parametrize("fixture, kind, ours, theirs", [
    ("llama/gqa_linear_mlpbias_v5", "AutoModelForCausalLM", "layers.*.self_attn", "model.layers.{}.self_attn"),
    ("qwen3/tied_v4", "AutoModelForCausalLM", "layers.*.mlp", "model.layers.{}.mlp"),
    ("bert/bare_v5", "AutoModel", "layers.*.attention.self", "encoder.layer.{}.attention.self"),
    ("gpt2/bare_v4", "AutoModelForCausalLM", "layers.*.attn.c_proj", "transformer.h.{}.attn.c_proj"),
])  # fmt: skip
def test_live_captures(fixture: str, kind: str, ours: str, theirs: str) -> None:
    """What forward hooks see in transformers, on modules of the same place."""
    directory: Path = checkpoints.FIXTURES / fixture
    tokens = load_record(directory)["tokens"]
    out = rlx.compile(rlx.recipe_for(directory).at(ours).capture())(tokens)
    model, seen = hugging_face.load(directory, kind), {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, given: Any, made: Any) -> None:
            seen[name] = (made[0] if isinstance(made, tuple) else made).detach().numpy()

        return hook

    names = [name for name in out if name.startswith("layers.")]
    for i, name in enumerate(names):
        model.get_submodule(theirs.format(i)).register_forward_hook(keep(name))
    hugging_face.hidden_states(model, tokens)
    assert len(names) == len(seen) > 1
    for name in names:
        assert_close(out[name], seen[name])
