"""Models with a state of fixed size, Qwen 3.5 and Mamba-2, against `transformers` and against the formulas."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.errors import RlxWarning
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import read_config
from rlx_jax.models.mamba2 import Mamba2Config
from rlx_jax.models.qwen35 import Qwen35Config
from tests.oracles import checkpoints, hugging_face, hybrid, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import Case, load_case, load_record

FAMILIES = ("qwen3_5_text", "mamba2")
NAMES = sorted(f"{family}/{f.stem}" for family in FAMILIES for f in (checkpoints.FIXTURES / family).glob("*.npz"))
BLOCKS = checkpoints.FIXTURES / "qwen3_5_text" / "blocks_v5"
TIED = checkpoints.FIXTURES / "qwen3_5_text" / "tied_v5"
QUICK = ("qwen3_5_text/blocks_v5", "mamba2/groups_v5")
LISTED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]


@functools.lru_cache(maxsize=2)
def case(name: str) -> Case:
    """A recorded checkpoint, loaded once for the tests that follow each other."""
    return load_case(checkpoints.FIXTURES / name)


@functools.cache
def formulas(directory: Path) -> tuple[dict[str, Any], Any]:
    """The config and the weights of a checkpoint in float64."""
    return numpy_reference.read_config(directory), numpy_reference.read_weights(directory)


# -- the recorded numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_record_agrees_with_numpy(name: str) -> None:
    """What `transformers` said is what the formulas say."""
    config, weights = formulas(checkpoints.FIXTURES / name)
    record = load_record(checkpoints.FIXTURES / name)
    for tokens, hidden, logits in zip(record["tokens"], record["hidden"], record["logits"], strict=True):
        for want, got in zip(hybrid.row(config, weights, tokens), (hidden, logits), strict=True):
            assert_close(got, want, tolerance=1e-5)
    prompt = record["ragged_tokens"][0, : record["ragged_lengths"][0]].tolist()
    assert hybrid.greedy(config, weights, prompt, 12) == record["greedy"][0, :12].tolist()


@pytest.mark.parametrize("name", LISTED)
def test_logits(name: str) -> None:
    """A batch without padding, and rows of different lengths, padded on the right, as if each were alone."""
    lm, record = case(name).lm, case(name).record
    assert_close(lm.logits(record["tokens"]), record["logits"])
    lengths = record["ragged_lengths"]
    assert_rows_close(lm.logits(record["ragged_tokens"], lengths), record["ragged_logits"], lengths)


@pytest.mark.parametrize("name", LISTED)
def test_greedy_tokens(name: str) -> None:
    """48 tokens after each row of a ragged batch, through prefill and extend."""
    assert case(name).lm.generate(case(name).prompts, max_new_tokens=48) == case(name).record["greedy"].tolist()


@pytest.mark.parametrize("name", LISTED)
def test_many_tokens(name: str) -> None:
    """60 tokens, which run in chunks, of rows that end anywhere."""
    config, weights = formulas(checkpoints.FIXTURES / name)
    lm, lengths = case(name).lm, np.array([60, 17])
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (2, 60)).astype(np.int32)
    got = np.asarray(lm.logits(tokens, lengths))
    for b, n in enumerate(lengths):
        assert_close(got[b, :n], hybrid.row(config, weights, tokens[b, :n].tolist())[1], tolerance=5e-5)


# -- equalities --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_chunks_give_what_the_whole_gives(name: str) -> None:
    """prefill(n) and extend(m), ragged, of many tokens and of one, are forward(n + m); a row may get none."""
    lm, tokens = case(name).lm, case(name).record["tokens"]
    whole = case(name).record["logits"]
    at = np.array([5, 2])
    logits, state = lm.prefill(tokens[:, :5], lengths=at, max_len=16)
    assert_rows_close(logits, whole[:, :5], at)
    for new in ([3, 3], [0, 3], [1, 1], [1, 0], [1, 2]):
        size = 1 if max(new) == 1 else 3
        rows = np.stack([np.resize(tokens[b, at[b] : at[b] + n] if n else tokens[b], size) for b, n in enumerate(new)])
        logits, state = lm.extend(state, rows, lengths=new)
        for b, n in enumerate(new):
            assert_close(np.asarray(logits)[b, :n], whole[b, at[b] : at[b] + n])
        at = at + np.array(new)
    assert at.tolist() == [11, 11]


@pytest.mark.slow
@pytest.mark.parametrize("roll", ["scan", "unroll"])
@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("name", QUICK)
def test_rolled_layers(name: str, policy: str, roll: str) -> None:
    """Blocks of layers are one region, and the same numbers and tokens either way, by either policy."""
    profile = rlx.CompileProfile().replace(fusion={"policy": policy}, layers={"roll": roll})
    directory = checkpoints.FIXTURES / name
    loaded = dataclasses.replace(case(name), lm=rlx.load(directory, profile=profile))
    assert_close(loaded.lm.logits(loaded.record["tokens"]), loaded.record["logits"])
    assert loaded.lm.generate(loaded.prompts, max_new_tokens=8) == loaded.record["greedy"][:, :8].tolist()


def test_three_layers_are_one_region() -> None:
    """Of six layers that repeat in threes the body has three, and it stands twice."""
    built = rlx.recipe_for(BLOCKS).assemble().build()
    counts = [node.op.iterations() for _, node in built.hir.walk() if node.op.regions()]
    assert counts == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_a_gradient(name: str) -> None:
    """Of the `train` program; and remat changes none."""
    directory = checkpoints.FIXTURES / name
    found = []
    for remat in ("none", "layer"):
        profile = rlx.CompileProfile().replace(layers={"remat": remat})
        model: Any = rlx.compile(rlx.recipe_for(directory), program="train", profile=profile)
        tokens = load_record(directory)["tokens"]
        found.append(jax.grad(lambda p: jax.nn.log_softmax(model.apply(p, tokens))[..., 0].mean())(model.params))  # noqa: B023
    assert set(found[0]) == set(model.params)
    dead = [k for k, g in found[0].items() if not np.isfinite(g).all() or not np.abs(np.asarray(g)).max() > 0]
    assert [k for k in dead if not k.endswith("k_proj.bias")] == []
    for key, gradient in found[0].items():
        assert_close(found[1][key], gradient, tolerance=1e-4)


@pytest.mark.parametrize("name", QUICK)
def test_every_leaf_is_written_in_place(name: str) -> None:
    """Keys and values, states and the rows of convolutions: all bytes of the state are donated."""
    lm, tokens = case(name).lm, case(name).record["tokens"]
    _, state = lm.prefill(tokens[:, :4], max_len=16)
    leaves = {leaf: array for leaf, array in state.state.arrays().items() if "." in leaf}
    kinds = {leaf.rpartition(".")[2] for leaf in leaves}
    assert kinds == ({"conv", "delta", "k", "v"} if name.startswith("qwen") else {"conv", "ssm"})
    assert all(a.dtype == np.float32 for a in leaves.values())
    size = sum(a.nbytes for a in state.state.arrays().values())
    lm.extend(state, tokens[:, 4:5])
    assert lm.report().program.startswith("extend") and lm.report().donated_bytes == size


def test_heads_that_devices_do_not_divide_are_named() -> None:
    recipe = rlx.recipe_for(TIED)
    with pytest.raises(errors.UnsupportedError, match=r"linear_attn: 3 heads with a state cannot be divided"):
        rlx.CausalLM(recipe, mesh=jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",)))


@pytest.mark.parametrize("name", NAMES)
def test_what_differs_from_llama_shows(name: str) -> None:
    """The numbers would be others without what the fixture has."""
    config, weights = formulas(checkpoints.FIXTURES / name)
    record = load_record(checkpoints.FIXTURES / name)
    endings = {
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "linear_attn.norm.weight",
        "q_norm.weight",
        "q_proj.bias",
        "mixer.D",
    }
    for ending in sorted(endings):
        keys = [key for key in weights if key.endswith(ending)]
        if keys:
            got = hybrid.row(config, weights | {k: weights[k] + 0.5 for k in keys}, record["tokens"][0])[1]
            assert np.abs(got - record["logits"][0]).max() > 1e-2 * np.abs(record["logits"][0]).max(), ending


# -- configs -----------------------------------------------------------------------------------


def with_images(target: Path) -> Path:
    """The fixture inside a checkpoint that reads images."""
    text = json.loads((BLOCKS / "config.json").read_text("utf-8"))
    text.pop("architectures")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    outer |= {"vision_config": {"depth": 1}, "image_token_id": 60, "tie_word_embeddings": False}
    tensors = {
        k.replace("model.", "model.language_model.", 1): v for k, v in load_file(BLOCKS / "model.safetensors").items()
    }
    target.mkdir()
    (target / "config.json").write_text(json.dumps(outer), "utf-8")
    more = {"model.visual.patch_embed.proj.weight": np.ones(3, np.float32), "mtp.fc.weight": np.ones(2, np.float32)}
    save_file(tensors | more, target / "model.safetensors", {"format": "pt"})
    return target


def test_the_text_model_of_one_that_reads_images(tmp_path: Path) -> None:
    """A nested `text_config`, keys of their own; the head for drafts is left on purpose."""
    with pytest.warns(RlxWarning, match="the text model alone is built, and 1 weights of the others are left"):
        lm = rlx.load(with_images(tmp_path / "m"))
    record = load_record(BLOCKS)
    assert_close(lm.logits(record["tokens"]), record["logits"])


REFUSED: dict[str, tuple[dict[str, Any], type[errors.RlxError], str]] = {
    "another kind of layer": ({"layer_types": ["sliding_attention"] * 6}, errors.UnsupportedError, "layer_types"),
    "too few layer types": ({"layer_types": ["full_attention"]}, errors.ConfigError, "a list of 6"),
    "no gate": ({"attn_output_gate": False}, errors.UnsupportedError, "attn_output_gate"),
    "another activation": ({"hidden_act": "gelu"}, errors.UnsupportedError, "hidden_act"),
    "heads that do not divide": ({"linear_num_value_heads": 5}, errors.ConfigError, "linear_num_value_heads 5"),
    "an odd part turns": (
        {"rope_parameters": {"rope_theta": 1e3, "rope_type": "default", "partial_rotary_factor": 0.4}},
        errors.ConfigError, "turns 3 columns",
    ),
    "an unknown field": ({"linear_gate": 2}, errors.UnsupportedError, "linear_gate"),
    "an absurd window": ({"linear_conv_kernel_dim": 0}, errors.ConfigError, "linear_conv_kernel_dim"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    changes, error, text = REFUSED[name]
    directory = checkpoints.edited(BLOCKS, tmp_path / "m", changes)
    with pytest.raises(error, match=text):
        rlx.load(directory)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = checkpoints.copy(BLOCKS, tmp_path / "m")
    key = "model.layers.1.linear_attn.conv1d.weight"
    checkpoints.edit_tensors(directory, lambda tensors: tensors | {key: tensors[key][:, :, :2]})
    with pytest.raises(errors.WeightShapeError, match=r"layers\.1\.linear_attn\.conv1d: .*expected \[56, 1, 3\]"):
        rlx.load(directory)


def test_published_sizes() -> None:
    """The 0.8B model, as its `text_config` has it."""
    c = Qwen35Config.from_hf(
        {
            "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "head_dim": 256,
            "full_attention_interval": 4, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "vocab_size": 248320,
            "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            },
        }
    )  # fmt: skip
    assert c.attends == (False, False, False, True) * 6 and len(c.inv_freq) == 32
    assert c.inv_freq[1] == pytest.approx(1e7 ** (-1 / 32))
    assert c.delta.widths == (2048, 2048, 2048) and c.layer_spec(3).n_rot == 64


def test_no_most_time_step_is_written_in_three_ways(tmp_path: Path) -> None:
    """Published checkpoints have Python's bare Infinity; newer releases of transformers write JSON."""
    source = checkpoints.FIXTURES / "mamba2" / "groups_v5"
    want = Mamba2Config.from_hf(read_config(Folder(source)))
    assert want.mixer.time_step_limit == (0.0, None)
    for n, most in enumerate((math.inf, "inf", {"__float__": "Infinity"})):
        directory = checkpoints.edited(source, tmp_path / str(n), {"time_step_limit": [0.0, most]})
        assert Mamba2Config.from_hf(read_config(Folder(directory))) == want


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "gelu"}, {"time_step_limit": [0.3, 0.6]}], ids=["another activation", "steps in limits"]
)
def test_fields_of_mamba2_that_change_its_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    """`hidden_act` is that of the convolution alone: the gate of the norm is silu whatever it says."""
    directory = checkpoints.edited(checkpoints.FIXTURES / "mamba2" / "groups_v5", tmp_path / "m", changes)
    tokens = load_record(checkpoints.FIXTURES / "mamba2" / "groups_v5")["tokens"][0]
    config, weights = formulas(checkpoints.FIXTURES / "mamba2" / "groups_v5")
    assert_close(rlx.load(directory).logits([tokens])[0], hybrid.row(config | changes, weights, tokens)[1])


# -- live --------------------------------------------------------------------------------------


SEEDS = [(family, seed) for family in FAMILIES for seed in range(300, 306)]


@pytest.fixture(scope="module", params=SEEDS, ids=lambda p: f"{p[0]}-{p[1]}")
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, int]]:
    """A fresh random checkpoint: its directory, the model of `transformers`, and the seed."""
    family, seed = request.param
    directory = tmp_path_factory.mktemp("live") / "checkpoint"
    hugging_face.write(hugging_face.RANDOM[family](seed), directory)
    yield directory, hugging_face.load(directory, "AutoModelForCausalLM"), seed


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live(live: tuple[Path, Any, int]) -> None:
    """Logits of a batch, and of ragged rows, equal those of `transformers`; so do 48 tokens of a ragged batch of 3."""
    directory, model, seed = live
    lm, rng = rlx.load(directory), np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (3, 21)).astype(np.int32)
    want = hugging_face.llama_batch(model, tokens)[1]
    assert_close(lm.logits(tokens), want)
    lengths = rng.integers(1, 22, 3).astype(np.int32)
    assert_rows_close(lm.logits(tokens, lengths), want, lengths)
    count = min(48, getattr(model.config, "max_position_embeddings", 64) - 16)
    prompts, greedy = hugging_face.clear_prompts(model, [5, 2, 16], count, seed, distinct=4)
    assert lm.generate(prompts, max_new_tokens=count) == greedy


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_bf16(name: str) -> None:
    """bfloat16 departs from float32 by at most 1.5 times what `transformers` does, root mean square; 44 tokens."""
    directory = checkpoints.FIXTURES / name
    tokens = np.tile(load_record(directory)["tokens"], (1, 4))
    exact = hugging_face.llama_batch(hugging_face.load(directory, "AutoModelForCausalLM"), tokens)[1]
    theirs = hugging_face.bf16_logits(directory, tokens)
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    ours = np.asarray(rlx.load(directory, profile=profile).logits(tokens))
    departures = [float(np.sqrt(np.mean(np.square(x - exact)))) for x in (ours, theirs)]
    assert departures[0] <= 1.5 * departures[1]
