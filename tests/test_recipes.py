"""Recipes and their hooks, from outside the package; and compositions of layers as values."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.blocks import BlockStage, Homogeneous, LayerComposition, LlamaDecoderSpec, Pair, Single
from rlx_jax.lowering.mir.small import cse
from rlx_jax.models import gemma, llama
from rlx_jax.models.bert import BertConfig
from rlx_jax.models.decoder import DecoderFlow, weight_specs
from rlx_jax.models.hooks import LayerContext, check_recipe_weights
from tests import small
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
TIED = checkpoints.FIXTURES / "llama" / "mha_tied_sparse"
SINGLE = checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"
BERT = checkpoints.FIXTURES / "bert" / "masked_lm_v4"
LAYERS = 3
NAMES = [f"hidden.{i}" for i in range(LAYERS + 1)]


def compiled(flow: Any, weights: Any = None, **tables: Any) -> Any:
    """`rlx.compile` with tables of the profile."""
    return rlx.compile(flow, weights, profile=rlx.CompileProfile().replace(**tables))


def composed_at_1(ctx: LayerContext[LlamaDecoderSpec]) -> BlockStage:
    """Layer 1 from small stages."""
    if ctx.index == 1:
        return blocks.llama_prefill_layer_composed(ctx.index(), ctx.spec)
    return ctx.default_stage()


def test_a_recipe_takes_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """Hooks made on a base model, or on a config alone, serve a fine-tune: `load` reads the weights of its path."""
    tuned = checkpoints.copy(SINGLE, tmp_path / "tuned")
    checkpoints.edit_tensors(tuned, lambda tensors: {key: 1.5 * value for key, value in tensors.items()})
    record, found = load_record(SINGLE), []
    for recipe in (recipe_for(SINGLE).layer(composed_at_1), rlx.Llama32Flow(recipe_for(SINGLE).config)):
        found.append(np.asarray(load(tuned, recipe=recipe).logits(record["tokens"])))
    assert_close(found[0], found[1], tolerance=2e-6)
    assert np.abs(found[1] - record["logits"]).max() > 1e-3


def test_a_recipe_follows_how_the_checkpoint_stores_its_weights() -> None:
    """A bare encoder's hooks serve a task checkpoint, whose keys have a prefix."""
    bare = replace(recipe_for(BERT), prefix="", weights=None)
    tokens = load_record(BERT)["tokens"]
    found, expected = load(BERT, recipe=bare, head=False), load(BERT, head=False)
    assert_close(found.hidden_states(tokens), expected.hidden_states(tokens), tolerance=0)


def capturing(recipe: Any) -> Any:
    """What enters each layer, and what leaves the last one and its norm, as outputs `hidden.0` …"""

    def layer(ctx: LayerContext[Any]) -> BlockStage:
        return blocks.Sequence([blocks.StoreStream(f"hidden.{ctx.index}"), ctx.default_stage()])

    return recipe.layer(layer).patch_flow(lambda flow: flow.store_stream(NAMES[-1]).with_extra_outputs(NAMES))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "directory, kind", [(LLAMA, "AutoModelForCausalLM"), (BERT, "AutoModel")], ids=["llama", "bert"]
)
def test_live_hidden_states(directory: Path, kind: str) -> None:
    """`output_hidden_states=True` of transformers."""
    tokens = load_record(directory)["tokens"]
    out = compiled(capturing(recipe_for(directory)))(tokens)
    states = hugging_face.hidden_states(hugging_face.load(directory, kind), tokens)
    assert len(states) == len(NAMES)
    for name, state in zip(NAMES, states, strict=True):
        assert_close(out[name], state)


def scale(factor: float) -> BlockStage:
    """A custom stage."""
    return blocks.Custom(lambda emit, x: x * factor, f"scale_{factor:g}")


def test_stages_before_and_after_the_layers() -> None:
    """They accumulate, in order; powers of two are exact."""
    directory, tokens = LLAMA, load_record(LLAMA)["tokens"]
    recipe = recipe_for(directory)
    model = compiled(capturing(recipe.before_layers([scale(2.0)]).before_layers([scale(4.0)]).after([scale(8.0)])))
    embedded = numpy_reference.read_weights(directory)["model.embed_tokens.weight"][tokens].astype(np.float32)
    np.testing.assert_array_equal(model(tokens)["hidden.0"], 8 * embedded)
    text = model.text("hir")
    order = [text.index(name) for name in ("scale_2", "scale_4", "repeat(", "scale_8", "lm_head")]
    assert order == sorted(order)


def test_patch_flow_runs_before_the_head() -> None:
    """A softcap between the final norm and the head, against NumPy."""

    def softcap(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
        return 5.0 * emit.tanh(x / 5.0)

    tokens = load_record(LLAMA)["tokens"]
    recipe = recipe_for(LLAMA).patch_flow(lambda flow: flow.custom_named("softcap", softcap))
    weights = numpy_reference.read_weights(LLAMA)
    hidden = load_record(LLAMA)["hidden"].astype(np.float64)
    want = (5 * np.tanh(hidden / 5)) @ weights["lm_head.weight"].T
    assert_close(compiled(recipe)(tokens), want.astype(np.float32))
    rlx.compile(recipe, program="extend").text("mir")  # proved token-wise, so there is a cached program


@pytest.mark.parametrize("fixture, other", [("llama/mha_tied_sparse", {}), ("gpt2/bare_v4", {"prefix": "transformer"})])
def test_a_recipe_is_that_of_the_weights_it_is_compiled_with(fixture: str, other: dict[str, str]) -> None:
    """Under their prefix, and with a head that they have beside a tied embedding: as `recipe_for` opens them."""
    own: Any = recipe_for(checkpoints.FIXTURES / fixture)
    weights = numpy_reference.read_weights(checkpoints.FIXTURES / fixture)
    table = weights["wte.weight" if other else "model.embed_tokens.weight"]
    tied = replace(type(own)(own.config), **other)
    assert tied.config.tie_word_embeddings
    found = rlx.compile(tied, weights | {"lm_head.weight": 2 * table})
    assert set(found.weights()) == {*weights, "lm_head.weight"} - set(own.assemble()._ignored_keys)
    tokens = load_record(checkpoints.FIXTURES / fixture)["tokens"]
    assert_close(found(tokens), 2 * np.asarray(rlx.compile(own)(tokens)))


def test_hooks_chain_and_recipes_are_values() -> None:
    """The default stage of a second layer hook is what the first returned, and `ctx.spec` is that of its layer."""
    seen: list[tuple[int, str, str]] = []

    def second(ctx: LayerContext[Any]) -> BlockStage:
        stage = ctx.default_stage()
        assert isinstance(stage, blocks.Named) and ctx.index() == ctx.index
        seen.append((ctx.index, stage.name, ctx.spec.prefix))
        return stage

    stock = rlx.BertFlow(BertConfig(11, 8, 16, 2, 2), prefix="bert")
    hooked = stock.layer(lambda ctx: blocks.Named("mine", ctx.default_stage())).layer(second)
    assert stock.hooks.layers == () and stock == rlx.BertFlow(BertConfig(11, 8, 16, 2, 2), prefix="bert")
    hooked.assemble().build()
    assert seen == [(i, "mine", f"bert.encoder.layer.{i}") for i in (0, 1)]


def test_options() -> None:
    """No head; the head of the last token of each row; embeddings in place of ids, with a tied head too."""
    recipe, want = recipe_for(LLAMA), load_record(LLAMA)
    model = compiled(replace(recipe, hidden_only=True))
    assert_close(model(want["tokens"]), want["hidden"])
    assert "lm_head.weight" not in model.params
    last = compiled(replace(recipe, last_token_logits=True))(want["tokens"])
    assert_close(last, want["logits"][:, -1:])
    recipe, want = recipe_for(TIED), load_record(TIED)
    embeds = numpy_reference.read_weights(TIED)["model.embed_tokens.weight"][want["tokens"]].astype(np.float32)
    assert_close(compiled(replace(recipe, inputs_embeds=True))(inputs_embeds=embeds), want["logits"])


def test_the_profile_beside_the_weights(tmp_path: Path) -> None:
    """`<family>.rlx.toml` in their directory; without it what was set before, else `auto`; a wrong one is an error."""
    directory = checkpoints.copy(LLAMA, tmp_path / "checkpoint")
    recipe, fusable = recipe_for(directory), rlx.CompileProfile().replace(fusion={"policy": "fusable"})
    assert recipe.profile_near(directory).hooks.profile == rlx.CompileProfile.preset("auto")
    assert recipe.profile(fusable).profile_near(directory).hooks.profile == fusable
    for name in ("tuned", "llama"):
        (directory / f"{name}.rlx.toml").write_text('fusion = {policy = "fusable"}', "utf-8")
        assert recipe.profile_near(directory).hooks.profile == fusable
    (directory / "tuned.rlx.toml").unlink()
    for near in (recipe.profile_near(directory), recipe.profile_near(next(directory.glob("*.safetensors")))):
        assert near.assemble().profile.fusion.policy == "fusable"
    assert recipe.profile_near(directory, "other").hooks.profile == rlx.CompileProfile.preset("auto")
    (directory / "llama.rlx.toml").write_text('fusion = {polcy = "fusable"}', "utf-8")
    with pytest.raises(errors.ProfileError, match="did you mean 'policy'"):
        recipe.profile_near(directory)
    with pytest.raises(errors.MissingFileError):
        recipe.profile_near(tmp_path / "nowhere")


RECIPES: dict[str, type[DecoderFlow[Any]]] = {
    "llama": llama.Llama32Flow, "mistral": llama.MistralFlow, "qwen2": llama.Qwen2Flow, "qwen3": llama.Qwen3Flow,
    "gemma": gemma.GemmaFlow, "gemma2": gemma.GemmaFlow, "gemma3_text": gemma.GemmaFlow,
}  # fmt: skip


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_a_value_whose_flow_reads_its_weights(kind: str) -> None:
    """It pickles, compares, and names one class of config."""
    recipe: Any = RECIPES[kind].for_prefill(small.LLAMA | {"model_type": kind, "head_dim": 6})
    assert pickle.loads(pickle.dumps(recipe)) == recipe == replace(recipe) != replace(recipe, batch=3)
    assert type(recipe.config) is recipe.config_type and recipe == type(recipe).for_prefill(recipe.config)
    assert set(recipe.assemble().build().keys_read) == set(recipe.shapes()) == set(weight_specs(recipe.config))


def test_a_checked_flow_keeps_its_graph() -> None:
    """`build` returns what the check of its weights built, until the flow or an argument changes."""
    flow = rlx.from_pretrained(SINGLE)
    built = flow.build()
    assert flow.build() is built
    edited = flow.at("layers.0").scale(by=2).build()
    assert edited is not built and len([*edited.hir.walk()]) > len([*built.hir.walk()])
    assert flow.build(rlx.open_weights(SINGLE)).source is not built.source
    assert cse(cse(built.hir, built.types), built.types) is cse(built.hir, built.types) is built.hir  # as one graph
    flow = flow.param("model.norm.weight", init="zeros")
    assert (checked := check_recipe_weights(flow, None)).build() is checked.build()
    assert checked.build().inits == {"model.norm.weight": "zeros"}


def test_names_of_the_specification() -> None:
    """They are LayerSpecs with other defaults, and `dataclasses.replace` takes their own fields too."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    llama: Any = blocks.LlamaDecoderSpec(**sizes, kv_group_size=2)
    assert (llama.eps, llama.kv_group_size, llama.attention_bias, llama.use_custom_mask) == (1e-5, 2, False, False)
    biased = replace(llama, attention_bias=True)
    assert (biased.attention_bias, biased.qkv_bias, biased.output_bias) == (True, True, True)
    qwen: Any = blocks.Qwen3DecoderSpec(**sizes)
    qwen = replace(qwen, attention_bias=True, batch=3)
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.output_bias) == ("heads", True, False)
    assert replace(qwen, qk_norm=False, seq="rows").hidden_shape == (3, "rows", None)
    gemma_layer: Any = blocks.GemmaDecodeLayerSpec(style=blocks.GemmaStyle.GEMMA2, **sizes, score_scale=0.5)
    assert gemma_layer.zero_centred and replace(gemma_layer, score_scale=0.25).norms == blocks.LayerNorms.around_both()
    attention: Any = blocks.SelfAttnPrefillSpec("a", "b", "c", 4, 6, 2, "sliding:3", sinks_key="s")
    assert [attention.weight(name) for name in "qkv"] == ["a", "b", "c"] and attention.sinks
    assert replace(attention, k_key="d").keys.k == "d" and attention.under("p").keys.q == "a"


KEY = 3126292069848458932
STACK = Pair(Single("embed"), Pair(Homogeneous("block", 3), Single("norm")))


def build(name: str, index: int) -> blocks.BlockStage:
    """Linears whose key says which layer asked."""
    return blocks.Linear(f"{name}.{index}.weight", shape=(8, 8))


def test_depth_and_stage() -> None:
    """The layers in order; equal ones are one region, under their own name."""
    assert [c.depth_hint() for c in (STACK, Single("a"), Homogeneous("a", 7))] == [5, 1, 7]
    built = rlx.ModelFlow("m").input("x", ("batch", 8)).stage(STACK.to_flow_stage(build)).build()
    keys = ("embed.0", "block.0", "block.1", "block.2", "norm.0")
    assert built.keys_read == tuple(f"{key}.weight" for key in keys)
    assert any(node.op.text().startswith("repeat(count=3") for node in built.hir.nodes)


def test_cache_keys() -> None:
    """Equal for equal compositions, in every process (hence the number); different for every change of structure."""
    others: list[LayerComposition] = [
        Single("a"), Single("b"), Homogeneous("a", 1), Homogeneous("a", 2), Pair(Single("a"), Single("b")),
        Pair(Single("b"), Single("a")), Pair(Homogeneous("a", 1), Single("b")), STACK,
    ]  # fmt: skip
    assert len({c.cache_key() for c in others}) == len(others)
    assert Pair(Single("a"), Single("b")).cache_key() == Pair(Single("a"), Single("b")).cache_key()
    assert Pair(Single("a"), Single("b")).cache_key() == KEY
