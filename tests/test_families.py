"""The decoder-only families against `transformers`: recorded numbers by default, live ones under the mark `oracle`.

A new family adds its fixtures (`tests/oracles/make_fixtures.py`), its random configurations (`hugging_face.RANDOM`) and
rows here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.models.decoder import as_decode
from rlx_jax.models.mistral import MistralConfig
from rlx_jax.models.qwen2 import Qwen2Config
from rlx_jax.models.qwen3 import Qwen3Config
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import Case, load_case, load_record

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "gemma", "gemma2", "gemma3_text", "gpt2",
)  # fmt: skip
NAMES = sorted(f"{family}/{f.stem}" for family in FAMILIES for f in (checkpoints.FIXTURES / family).glob("*.npz"))
SLIDING = checkpoints.FIXTURES / "mistral" / "window_v5"
PLAIN = checkpoints.FIXTURES / "qwen3" / "tied_v4"
ODD = checkpoints.FIXTURES / "qwen3" / "window_bias_v5"
LATE = checkpoints.FIXTURES / "qwen2" / "window_v4"
CAPS = checkpoints.FIXTURES / "gemma2" / "caps_v5"
PATTERN = checkpoints.FIXTURES / "gemma3_text" / "pattern_v4"
DEEP = checkpoints.FIXTURES / "gemma3_text" / "deep_v5"
CONV = checkpoints.FIXTURES / "gpt2" / "bare_v4"
SCALED = checkpoints.FIXTURES / "gpt2" / "scaled_v5"
EXPERTS = checkpoints.FIXTURES / "mixtral" / "window_v5"
MIXED = checkpoints.FIXTURES / "qwen3_moe" / "mixed_v5"
STEP = checkpoints.FIXTURES / "qwen3_moe" / "step_v4"
SINKS = checkpoints.FIXTURES / "gpt_oss" / "window_v5"
EACH = [ODD, SLIDING, LATE, PLAIN, CAPS, PATTERN, DEEP, CONV, SCALED, EXPERTS, MIXED, STEP, SINKS]
REFUSED = (errors.ConfigError, errors.LimitError, errors.UnsupportedError)
QUICK = (
    "llama/", "mistral/window", "qwen2/window", "qwen3/window", "gemma/", "gemma2/caps", "gemma3_text/pattern", "gpt2/",
    "mixtral/", "qwen3_moe/mixed",
)  # fmt: skip
"""The fixtures of the default suite; the slow tier has the others."""


def recorded(quick: tuple[str, ...]) -> list[Any]:
    """Every recorded checkpoint; those whose name does not start so are slow."""
    return [pytest.param(name, marks=() if name.startswith(quick) else pytest.mark.slow) for name in NAMES]


@functools.lru_cache(maxsize=1)
def case(name: str) -> Case:
    """A recorded checkpoint, loaded once for the tests that follow each other."""
    return load_case(checkpoints.FIXTURES / name)


# -- the recorded numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_record_agrees_with_numpy(name: str) -> None:
    """What `transformers` said is what the formulas say."""
    directory = checkpoints.FIXTURES / name
    config, weights = (f(directory) for f in (numpy_reference.read_config, numpy_reference.read_weights))
    record = load_record(directory)
    for tokens, hidden, logits in zip(record["tokens"], record["hidden"], record["logits"], strict=True):
        for want, got in zip(numpy_reference.llama_row(config, weights, tokens), (hidden, logits), strict=True):
            assert_close(got, want, tolerance=5e-6)
    for b, n in enumerate(record["ragged_lengths"]):
        prompt = record["ragged_tokens"][b, :n]
        assert_close(
            record["ragged_logits"][b, :n], numpy_reference.llama_row(config, weights, prompt)[1], tolerance=5e-6
        )
        count = len(record["greedy"][b])
        assert numpy_reference.llama_greedy(config, weights, prompt.tolist(), count) == record["greedy"][b].tolist()


@pytest.mark.parametrize("name", recorded(QUICK))
def test_logits(name: str) -> None:
    """A batch without padding, and rows of different lengths, padded on the right, as if each were alone."""
    lm, record = case(name).lm, case(name).record
    assert_close(lm.logits(record["tokens"]), record["logits"])
    lengths = record["ragged_lengths"]
    assert_rows_close(lm.logits(record["ragged_tokens"], lengths), record["ragged_logits"], lengths)


GREEDY = recorded(("qwen3/window", "gemma3_text/pattern", "gpt2/bare", "qwen3_moe/mixed", "gpt_oss/window"))


@pytest.mark.parametrize("name", [p for p in GREEDY if not p.values[0].startswith("llama")])
def test_greedy_tokens(name: str) -> None:
    """24 tokens or 48 after each row of a ragged batch. Llama's are in `test_generate.py`."""
    greedy = case(name).record["greedy"]
    assert case(name).lm.generate(case(name).prompts, max_new_tokens=greedy.shape[1]) == greedy.tolist()


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("llama", "gpt2"))])
def test_what_differs_from_llama_shows(name: str) -> None:
    """The numbers would be others without the windows, the biases or the norms of heads that the fixture has."""
    directory = checkpoints.FIXTURES / name
    config, weights = (f(directory) for f in (numpy_reference.read_config, numpy_reference.read_weights))
    record = load_record(directory)
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if any(numpy_reference.layer_windows(config)):
        changed.append((config | {"sliding_window": config["sliding_window"] + 1}, weights))
    for field in ("sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar"):
        if field in config:
            changed.append((config | {field: 2 * config[field]}, weights))
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            changed.append((config | {field: None}, weights))
    gemma = name.startswith("gemma")
    for field in ("swiglu_limit", "swiglu_alpha"):
        if field in config:
            changed.append((config | {field: config[field] / 20}, weights))
    if any(key.endswith("sinks") for key in weights):
        changed.append((config, {k: v - np.inf if k.endswith("sinks") else v for k, v in weights.items()}))
        rope = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
        scaled: Any = config[rope]
        changed.append((config | {rope: scaled | {"rope_type": "default"}}, weights))
    for ending in ("q_proj.bias", "k_norm.weight", "o_proj.bias", "feedforward_layernorm.weight", "norm.weight"):
        if any(key.endswith(ending) for key in weights):
            plain = 1.0 if "norm" in ending and not gemma else 0.0
            changed.append(
                (config, {k: np.full_like(v, plain) if k.endswith(ending) else v for k, v in weights.items()})
            )
    assert changed or name == "mistral/full_v4"
    want = record["logits"][0]
    for other, values in changed:
        got = numpy_reference.llama_row(other, values, record["tokens"][0])[1]
        assert np.abs(got - want).max() > 1e-2 * np.abs(want).max()


def test_what_gpt2_has_shows() -> None:
    """Nor without its positions, its biases, or the scale of each layer."""
    config, weights = (f(SCALED) for f in (numpy_reference.read_config, numpy_reference.read_weights))
    record = load_record(SCALED)
    changed = [(config | {"scale_attn_by_inverse_layer_idx": False}, weights)]
    changed += [(config | {"scale_attn_weights": False}, weights), (config | {"activation_function": "gelu"}, weights)]
    for ending in ("wpe.weight", "c_attn.bias", "mlp.c_proj.bias", "ln_1.bias", "ln_f.bias"):
        changed.append((config, {k: 0 * v if k.endswith(ending) else v for k, v in weights.items()}))
    for other, values in changed:
        got = numpy_reference.gpt2_row(other, values, record["tokens"][0])[1]
        assert np.abs(got - record["logits"][0]).max() > 1e-2 * np.abs(record["logits"]).max()


# -- equalities --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral/window_v5", "qwen3/window_bias_v5", "gemma2/caps_v5"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), lengths=st.tuples(*[st.integers(1, 8)] * 3))
def test_alone_is_in_batch_and_padding_is_not_seen(name: str, seed: int, lengths: tuple[int, ...]) -> None:
    """A row's valid logits depend neither on the other rows nor on what stands behind its end."""
    lm, count, rng = case(name).lm, np.array(lengths, np.int32), np.random.default_rng(seed)
    tokens, other = rng.integers(0, 77, (2, 3, 8)).astype(np.int32)
    together = np.asarray(lm.logits(tokens, count))
    repadded = np.where(np.arange(8)[None] < count[:, None], tokens, other)
    assert_rows_close(lm.logits(repadded, count), together, count, tolerance=1e-6)
    for b in range(3):
        alone = np.asarray(lm.logits(tokens[b : b + 1], count[b : b + 1]))
        assert_rows_close(alone, together[b : b + 1], count[b : b + 1], tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("directory", EACH, ids=lambda d: d.name)
def test_chunks_give_what_the_whole_gives(directory: Path) -> None:
    """prefill(n) and extend(m), ragged, over the edge of every window, are forward(n + m)."""
    lm, tokens = rlx.load(directory), load_record(directory)["tokens"]
    whole = np.asarray(lm.logits(tokens))
    at = np.array([5, 2])
    logits, state = lm.prefill(tokens[:, :5], lengths=at, max_len=16)
    assert_rows_close(logits, whole[:, :5], at)
    for new in ([3, 3], [0, 3], [3, 1], [0, 2]):
        rows = np.stack([np.resize(tokens[b, at[b] : at[b] + n] if n else tokens[b], 3) for b, n in enumerate(new)])
        logits, state = lm.extend(state, rows, lengths=new)
        for b, n in enumerate(new):
            assert_close(np.asarray(logits)[b, :n], whole[b, at[b] : at[b] + n])
        at = at + np.array(new)
    assert at.tolist() == [11, 11]


@pytest.mark.parametrize("policy", ["direct", pytest.param("fusable", marks=pytest.mark.slow)])
@pytest.mark.parametrize("directory", [ODD, *(pytest.param(d, marks=pytest.mark.slow) for d in (SLIDING, LATE, PLAIN))])
def test_layers_of_small_stages(directory: Path, policy: str) -> None:
    """`composed` is the fused layer: bit by bit under `fusable`, to 2e-6 under `direct`."""
    recipe, tokens = rlx.recipe_for(directory), load_record(directory)["tokens"]
    profile = rlx.CompileProfile().replace(fusion={"policy": policy})
    fused, composed = (
        np.asarray(rlx.compile(r, profile=profile)(tokens))
        for r in (recipe, dataclasses.replace(recipe, composed=True))
    )
    assert_close(composed, fused, tolerance=0 if policy == "fusable" else 2e-6)
    assert_close(fused, load_record(directory)["logits"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("directory", EACH, ids=lambda d: d.name)
@pytest.mark.parametrize("policy", ["direct", "fusable"])
def test_scanned_layers(directory: Path, policy: str) -> None:
    """Rolled layers give the same numbers and tokens; layers whose windows differ say why they are not one region."""
    profile = rlx.CompileProfile().replace(fusion={"policy": policy}, layers={"roll": "scan"})
    case = dataclasses.replace(load_case(directory), lm=rlx.load(directory, profile=profile))
    assert_close(case.lm.logits(case.record["tokens"]), case.record["logits"])
    assert case.lm.generate(case.prompts, max_new_tokens=8) == case.record["greedy"][:, :8].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("directory", [SLIDING, LATE, ODD, CAPS, PATTERN, CONV, MIXED, SINKS], ids=lambda d: d.name)
def test_every_weight_has_a_gradient(directory: Path) -> None:
    """Of the `train` program; a stage's own gradients are held against differences elsewhere."""
    import jax

    model: Any = rlx.compile(rlx.recipe_for(directory), program="train")
    tokens = load_record(directory)["tokens"]
    gradient = jax.grad(lambda p: jax.nn.log_softmax(model.apply(p, tokens))[..., 0].mean())(model.params)
    assert set(gradient) == set(model.params)
    dead = [k for k, g in gradient.items() if not np.isfinite(g).all() or not np.abs(np.asarray(g)).max() > 0]
    assert [k for k in dead if not k.endswith("k_proj.bias")] == []  # scores hardly move with a bias of all keys


def test_keys_and_values_as_outputs() -> None:
    """`qwen3_prefill_layer_fused_kv` names what prefill keeps in its cache."""
    recipe, tokens = rlx.recipe_for(PLAIN), load_record(PLAIN)["tokens"]
    named = recipe.layer(lambda ctx: rlx.blocks.qwen3_prefill_layer_fused_kv(ctx.index, ctx.spec))
    model: Any = rlx.compile(named, program="prefill")
    lengths, empty = np.full(2, tokens.shape[1], np.int32), model.init_state(2, tokens.shape[1])
    outputs, state = model.apply(model.params, tokens, lengths=lengths, state=empty)
    assert list(outputs) == ["logits", "kv.0.k", "kv.0.v", "kv.1.k", "kv.1.v"]
    assert_close(outputs["logits"], load_record(PLAIN)["logits"])
    assert len(state.leaves) == 4
    for name, kept in state.leaves.items():
        _, layer, *_, slot = name.split(".")
        value = outputs[f"kv.{layer}.{slot}"]
        np.testing.assert_array_equal(value, np.reshape(kept, value.shape))


@pytest.mark.slow
def test_options_of_gpt2() -> None:
    """Hidden states, embeddings as input, the last token alone, explicit decode: the same model."""
    recipe, record = rlx.recipe_for(SCALED), load_record(SCALED)
    tokens = record["tokens"]
    assert_close(rlx.compile(dataclasses.replace(recipe, hidden_only=True))(tokens), record["hidden"])
    embedded = np.asarray(recipe.weights.read("transformer.wte.weight"))[tokens]
    assert_close(rlx.compile(dataclasses.replace(recipe, inputs_embeds=True))(embedded), record["logits"])
    last = rlx.compile(dataclasses.replace(recipe, last_token_logits=True))
    assert_close(last(tokens), record["logits"][:, -1:])
    first: Any = rlx.compile(dataclasses.replace(recipe, export_kv=True))(tokens[:, :7])
    past = {f"past_{n}_{i}": first[f"kv.{i}.{n}"] for i in range(3) for n in "kv"}
    step: Any = rlx.compile(as_decode(recipe))
    assert_close(step(input_ids=tokens[:, 7:], **past)["logits"], record["logits"][:, 7:])


# -- configs -----------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}


def test_defaults() -> None:
    """What a config leaves out is what the family's own class says; a null window is none."""
    mistral = MistralConfig.from_hf(SMALL)
    assert (mistral.num_key_value_heads, mistral.head_dim, mistral.sliding_window) == (8, 2, 4096)
    assert MistralConfig.from_hf(SMALL | {"sliding_window": None}).sliding_window is None
    assert MistralConfig.from_hf(SMALL | {"num_key_value_heads": None}).num_key_value_heads == 32
    qwen2 = Qwen2Config.from_hf(SMALL)
    assert (qwen2.num_key_value_heads, qwen2.head_dim, qwen2.windows) == (32, 2, (None,) * 4)
    assert Qwen3Config.from_hf(SMALL).head_dim == 128


@pytest.mark.parametrize(
    "fields, windows",
    [
        ({"sliding_window": 7}, (None,) * 4),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
        ({"sliding_window": 7, "use_sliding_window": True}, (None,) * 4),  # max_window_layers is 28
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 7)),
        ({"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096, 4096)),
        (
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0,
             "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 7, None, 7),
        ),
        ({"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_windows_of_qwen(config: Any, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """As `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types` say together."""
    assert config.from_hf(SMALL | fields).windows == windows


@pytest.mark.parametrize("directory", [SLIDING, ODD], ids=lambda d: d.name)
def test_spellings(directory: Path) -> None:
    """The config as transformers 4 wrote it means what the config of transformers 5 means."""
    new = numpy_reference.read_config(directory)
    if "layer_types" in new:
        new |= {"max_window_layers": 2, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    read = type(rlx.recipe_for(directory).config).from_hf
    assert read(hugging_face.old_spelling(new, sparse=False)) == read(new)


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    }),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": 32768, "max_window_layers": 24,
        "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": True,
    }),
    "gpt2": (124_439_808, {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_ctx": 1024, "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new", "resid_pdrop": 0.1,
    }),
    "Qwen3-8B": (8_190_735_360, {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None,
        "sliding_window": None, "max_window_layers": 36, "use_sliding_window": False, "attention_bias": False,
        "tie_word_embeddings": False,
    }),
    "Mixtral-8x7B-v0.1": (46_702_792_704, {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
        "tie_word_embeddings": False,
    }),
    "gpt-oss-20b": (20_914_757_184, {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "rms_norm_eps": 1e-05, "max_position_embeddings": 131072, "rope_theta": 150000, "sliding_window": 128,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "swiglu_limit": 7.0,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096,
        "output_router_logits": False, "router_aux_loss_coef": 0.9, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
    }),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "rms_norm_eps": 1e-06, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rope_scaling": None,
        "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "max_window_layers": 48, "use_sliding_window": False,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Parameters of the checkpoints that their makers published, and their configs."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """A flow of the published config reads as many parameters as the published checkpoint has."""
    count, config = PUBLISHED[name]
    families: dict[str, Any] = {"mistral": rlx.MistralFlow, "qwen2": rlx.Qwen2Flow, "qwen3": rlx.Qwen3Flow}
    families |= {"gpt2": rlx.Gpt2Flow, "mixtral": rlx.MixtralFlow, "qwen3_moe": rlx.Qwen3MoeFlow}
    families |= {"gpt_oss": rlx.GptOssFlow}
    recipe = families[config["model_type"]]
    built = recipe.for_prefill(config).assemble().build()
    assert built.source is not None and built.refusals == ()
    assert sum(math.prod(built.source.spec(key).shape) for key in built.keys_read) == count


BROKEN: list[tuple[Path, str, dict[str, Any]]] = [
    (SLIDING, "attention_bias", {"attention_bias": True}),
    (SLIDING, "layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    (SLIDING, "sliding_window", {"sliding_window": 0}),
    (SLIDING, "sliding_window", {"sliding_window": "5"}),
    (SLIDING, "sliding_window", {"sliding_window": 2.5}),
    (SLIDING, "sliding_window", {"sliding_window": True}),
    (SLIDING, "sliding_window", {"sliding_window": 2**40}),
    (SLIDING, "use_sliding_window", {"use_sliding_window": True}),
    (SLIDING, "field 'factor' is missing", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}),
    (SLIDING, "longrope", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "factor": 4.0}}),
    (SLIDING, "hidden_act", {"hidden_act": "gelu"}),
    (SLIDING, "MistralForSequenceClassification", {"architectures": ["MistralForSequenceClassification"]}),
    (LATE, "use_sliding_window", {"use_sliding_window": "yes"}),
    (LATE, "max_window_layers", {"max_window_layers": -1}),
    (LATE, "max_window_layers", {"max_window_layers": None}),
    (LATE, "attention_bias", {"attention_bias": True}),
    (LATE, "use_mrope", {"use_mrope": True}),
    (ODD, "chunked_attention", {"layer_types": ["chunked_attention"] * 3}),
    (ODD, "layer_types", {"layer_types": ["full_attention"] * 2}),
    (ODD, "layer_types", {"layer_types": "full_attention"}),
    (ODD, "layer_types", {"layer_types": [1, 2, 3]}),
    (ODD, "layer_types", {"use_sliding_window": False}),  # layers slide, and no window is used
    (ODD, "layer_types", {"sliding_window": None}),
    (ODD, "qk_norm", {"qk_norm": False}),
    (ODD, "head_dim", {"head_dim": 7}),
    (ODD, "head_dim", {"head_dim": None}),
    (ODD, "final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    (ODD, "num_experts", {"num_experts": 4}),
    (CAPS, "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    (CAPS, "hidden_activation", {"hidden_activation": "silu"}),
    (CAPS, "layer_types", {"layer_types": ["full_attention"] * 2}),
    (PATTERN, "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
    (PATTERN, "longrope", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}),
    (ODD, "Qwen3ForTokenClassification", {"architectures": ["Qwen3ForTokenClassification"]}),
    (SINKS, "quant_method.*'bitsandbytes'", {"quantization_config": {"quant_method": "bitsandbytes"}}),
    (SINKS, "block_size", {"quantization_config": {"quant_method": "mxfp4", "block_size": 16}}),
    (SINKS, "swiglu_limit", {"swiglu_limit": 0}),
    (SINKS, "swiglu_limit", {"swiglu_limit": None}),
    (SINKS, "swiglu_alpha", {"swiglu_alpha": -1.0}),
    (SINKS, "hidden_act", {"hidden_act": "gelu"}),
    (SINKS, "layer_types", {"sliding_window": None}),
    (SINKS, "num_experts_per_tok", {"num_experts_per_tok": 6}),
    (SINKS, "mlp_bias", {"mlp_bias": True}),
    (SINKS, "'attn_factor'", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 1.0}}),
    (SINKS, "rope_theta", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 0.5}}),
    (SINKS, "beta_fast", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "fast"}}),
    (SINKS, "truncate", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}),
    (CONV, "n_embd", {"n_embd": 31}),
    (CONV, "n_layer", {"n_layer": 0}),
    (CONV, "hidden_size", {"hidden_size": 30}),
    (CONV, "activation_function", {"activation_function": "xielu"}),
    (CONV, "add_cross_attention", {"add_cross_attention": True}),
    (CONV, "scale_attn_weights", {"scale_attn_weights": None}),
    (CONV, "reorder_and_upcast_attn", {"reorder_and_upcast_attn": 1}),
    (CONV, "GPT2ForSequenceClassification", {"architectures": ["GPT2ForSequenceClassification"]}),
]


@pytest.mark.parametrize(("directory", "name", "changes"), BROKEN, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(directory: Path, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """What makes no sense, or would change the computation and is not handled, is refused by name."""
    with pytest.raises(REFUSED, match=name):
        rlx.load(checkpoints.edited(directory, tmp_path / "odd", changes))


def test_positions_that_gpt2_knows() -> None:
    """The rows of its table are all that there are, at once and behind cached tokens."""
    lm = case("gpt2/scaled_v5").lm
    assert lm.max_positions == 48
    with pytest.raises(errors.SequenceLengthError, match="49"):
        lm.logits(np.ones((1, 49), np.int32))
    with pytest.raises(errors.SequenceLengthError, match="48"):
        lm.generate([[1] * 40], max_new_tokens=9)


@pytest.mark.parametrize(
    "directory, key, block",
    [
        (LATE, "model.layers.1.self_attn.k_proj.bias", r"layers\.1\.self_attn\.k_proj"),
        (ODD, "model.layers.2.self_attn.q_norm.weight", r"layers\.2\.self_attn\.q_norm"),
        (ODD, "model.layers.0.self_attn.o_proj.bias", r"layers\.0\.self_attn\.o_proj"),
        (PATTERN, "model.layers.1.self_attn.k_norm.weight", r"layers?\.?1\.self_attn\.k_norm"),
        (CONV, "h.1.attn.c_attn.bias", r"layers\.1\.attn\.c_attn"),
        (SCALED, "transformer.h.2.ln_2.weight", r"layers\.2\.ln_2"),
        (CAPS, "model.layers.2.pre_feedforward_layernorm.weight", r"2\.pre_feedforward_layernorm"),
    ],
)
def test_weights_that_are_missing_or_have_another_shape(directory: Path, key: str, block: str, tmp_path: Path) -> None:
    """The error names block and key."""
    source = rlx.open_weights(directory)
    weights = {k: source.read(k) for k in source.keys()}
    recipe = rlx.recipe_for(directory)
    without = {k: v for k, v in weights.items() if k != key}
    with pytest.raises(errors.MissingWeightError, match=f"{block}.*{key}"):
        rlx.compile(dataclasses.replace(recipe, weights=rlx.open_weights(without)))
    longer = weights | {key: np.ones(len(weights[key]) + 1, np.float32)}
    with pytest.raises(errors.ShapeError, match=block):
        rlx.compile(dataclasses.replace(recipe, weights=rlx.open_weights(longer)))
    saved = checkpoints.copy(directory, tmp_path / "less")
    if (saved / "model.safetensors").exists():
        checkpoints.edit_tensors(saved, lambda t: {k: v for k, v in t.items() if k != key})
        with pytest.raises(errors.MissingWeightError, match=f"{key}.*{block}"):
            rlx.load(saved)


def test_biases_that_the_config_does_not_have(tmp_path: Path) -> None:
    """A checkpoint with more than its config says is another model."""
    with pytest.raises(errors.UnexpectedWeightError, match=r"q_proj\.bias"):
        rlx.load(checkpoints.edited(ODD, tmp_path / "no_bias", {"attention_bias": False}))


# -- live --------------------------------------------------------------------------------------

SEEDS = [("llama", s) for s in range(100, 110)]
SEEDS += [(f, s) for f in FAMILIES[1:] for s in range(200, 202 if f == "gpt_oss" else 204)]


@pytest.fixture(scope="module", params=SEEDS, ids=lambda p: f"{p[0]}-{p[1]}")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, int]]:
    """A fresh random checkpoint: its directory, the model of `transformers`, and the seed."""
    family, seed = request.param
    directory = tmp_path_factory.mktemp("live") / "checkpoint"
    hugging_face.write(hugging_face.RANDOM[family](seed), directory)
    yield directory, hugging_face.load(directory, "AutoModelForCausalLM"), seed


@functools.lru_cache(maxsize=1)
def loaded(directory: Path) -> Any:
    """The library's model."""
    return rlx.load(directory)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_logits(live: tuple[Path, Any, int]) -> None:
    """Logits of a batch, and of ragged rows, equal those of `transformers`."""
    directory, model, seed = live
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (3, 14)).astype(np.int32)
    want = hugging_face.llama_batch(model, tokens)[1]
    assert_close(loaded(directory).logits(tokens), want)
    lengths = rng.integers(1, 15, 3).astype(np.int32)
    assert_rows_close(loaded(directory).logits(tokens, lengths), want, lengths)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_greedy(live: tuple[Path, Any, int]) -> None:
    """64 greedy tokens of a ragged batch of 3 equal those of `transformers`, row by row."""
    directory, model, seed = live
    count = min(64, model.config.max_position_embeddings - 9)
    prompts, tokens = hugging_face.clear_prompts(model, [5, 2, 9], count, seed, distinct=4)
    assert loaded(directory).generate(prompts, max_new_tokens=count) == tokens


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_bf16(live: tuple[Path, Any, int]) -> None:
    """bfloat16 departs from float32 by at most 1.5 times what `transformers` does, root mean square."""
    directory, model, seed = live
    tokens = np.random.default_rng(seed).integers(0, model.config.vocab_size, (4, 24)).astype(np.int32)
    exact = hugging_face.llama_batch(model, tokens)[1]
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    ours = np.asarray(rlx.load(directory, profile=profile).logits(tokens))
    theirs = hugging_face.bf16_logits(directory, tokens)

    def rms(x: npt.NDArray[Any]) -> float:
        return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))

    assert rms(ours - exact) <= 1.5 * rms(theirs - exact)


WINDOWS: list[dict[str, Any]] = [
    {},
    {"rms_norm_eps": 0.5, "sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"] * 2},
]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "extra"),
    [("mistral", e) for e in WINDOWS[:2]]
    + [(f, e) for f in ("qwen2", "qwen3") for e in (*WINDOWS, {"num_key_value_heads": None})],
)
def test_live_configs(family: str, extra: dict[str, Any]) -> None:
    """What a config says and leaves out is what the class of `transformers` makes of it."""
    ours: Any = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    theirs, got = hugging_face.config_of(family, SMALL | extra), ours.from_hf(SMALL | extra)
    names = [f.name for f in dataclasses.fields(got) if hasattr(theirs, f.name)]
    assert {n: getattr(got, n) for n in names} == {n: getattr(theirs, n) for n in names} and len(names) >= 9
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    if family != "mistral":
        slides = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert got.windows == tuple(theirs.sliding_window if s else None for s in slides)
