"""The decoder-only families against `transformers`: recorded numbers by default, live ones under the mark `oracle`.

A new family adds its fixtures (`tests/oracles/make_fixtures.py`), its random configurations (`hugging_face.RANDOM`) and
rows here.
"""

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import read_config
from rlx_jax.models.decoder import as_decode
from rlx_jax.models.families import Family
from rlx_jax.models.llama import MistralConfig, Qwen2Config, Qwen3Config
from rlx_jax.models.mamba2 import Mamba2Config
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, hugging_face, hybrid, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import Case, load_case, load_record

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "gemma", "gemma2", "gemma3_text", "gpt2",
    "qwen3_5_text", "mamba2",
)  # fmt: skip
NAMES = sorted(f"{family}/{f.stem}" for family in FAMILIES for f in (checkpoints.FIXTURES / family).glob("*.npz"))
LLAMA = checkpoints.FIXTURES / "llama" / "gqa_plain_attnbias_v5"
TIED = checkpoints.FIXTURES / "llama" / "mha_tied_sparse"
PUBLISHED = [
    pytest.param(file, marks=[pytest.mark.slow] * (file.stem not in ("Qwen2.5-0.5B", "gpt2", "gpt-oss-20b")))
    for file in sorted((checkpoints.FIXTURES / "published").glob("*.json")) if '"parameters"' in file.read_text("utf-8")
]  # fmt: skip
ODD = checkpoints.FIXTURES / "qwen3" / "window_bias_v5"
CAPS = checkpoints.FIXTURES / "gemma2" / "caps_v5"
SCALED = checkpoints.FIXTURES / "gpt2" / "scaled_v5"
MIXED = checkpoints.FIXTURES / "qwen3_moe" / "mixed_v5"
BLOCKS = checkpoints.FIXTURES / "qwen3_5_text" / "blocks_v5"
GROUPS = checkpoints.FIXTURES / "mamba2" / "groups_v5"
SINKS = checkpoints.FIXTURES / "gpt_oss" / "window_v5"
REFUSED = (errors.ConfigError, errors.LimitError, errors.UnsupportedError)
QUICK = (
    "llama/mqa_llama3_v4", "mistral/window_v5", "qwen2/window_v4", "qwen3/window_bias_v5", "gemma/tied_v4",
    "gemma2/caps_v5", "gpt2/bare_v4", "gpt2/scaled_v5", "mixtral/window_v5",
)  # fmt: skip
GREEDY = (
    "gemma3_text/pattern_v4", "mamba2/groups_v5", "llama/mqa", "gemma2/caps", "gpt_oss/window", "qwen3_5_text/blocks",
)  # fmt: skip
"""Fixtures of which the default suite looks at logits, and those of which the slow tier looks at new tokens. The slow
tier has the logits of all; what gpt-oss computes is in test_gpt_oss.py, too."""


@functools.cache
def case(name: str) -> Case:
    """A recorded checkpoint, loaded once."""
    return load_case(checkpoints.FIXTURES / name)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in NAMES])
def test_logits(name: str) -> None:
    """Rows of different lengths, padded on the right, as if each were alone."""
    record = case(name).record
    lengths = record["ragged_lengths"]
    assert_rows_close(case(name).lm.logits(record["ragged_tokens"], lengths), record["ragged_logits"], lengths)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.startswith(GREEDY) else pytest.mark.soak) for n in NAMES]
)
def test_greedy_tokens(name: str) -> None:
    """24 or 48: of some families in the slow tier, of the rest in a soak."""
    greedy = case(name).record["greedy"]
    assert case(name).lm.generate(case(name).prompts, max_new_tokens=greedy.shape[1]) == greedy.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("directory", [ODD, CAPS, BLOCKS, MIXED, SINKS, GROUPS], ids=lambda d: d.name)
def test_every_weight_has_a_gradient(directory: Path) -> None:
    """Of the `train` program. A stage's own are held against differences elsewhere."""
    tokens, model = load_record(directory)["tokens"], rlx.compile(recipe_for(directory), program="train")
    params: Any = model.params
    found = jax.jit(jax.grad(lambda p: jax.nn.log_softmax(model.apply(p, tokens))[..., 0].mean()))(params)
    assert set(found) == set(params)
    dead = [k for k, g in found.items() if not np.isfinite(g).all() or not np.abs(np.asarray(g)).max() > 0]
    assert [k for k in dead if not k.endswith("k_proj.bias")] == []  # scores hardly move with a bias of all keys


@pytest.mark.slow
@pytest.mark.parametrize("directory", [SCALED, SINKS], ids=lambda d: d.name)
def test_options_and_programs(directory: Path) -> None:
    """Explicit decode, several rows in one: the same model."""
    recipe, record = recipe_for(directory), load_record(directory)
    tokens, want = record["tokens"], record["logits"]
    n = tokens.shape[1]
    first: Any = rlx.compile(dataclasses.replace(recipe, export_kv=True))(tokens[:, :7])
    past = {f"past_{name[-1]}_{name.split('.')[1]}": value for name, value in first.items() if name != "logits"}
    step: Any = rlx.compile(as_decode(recipe))
    assert_close(step(input_ids=tokens[:, 7:], **past)["logits"], want[:, 7:])
    places, segments = np.tile(np.arange(n), 2)[None].astype(np.int32), np.repeat([1, 2], n)[None].astype(np.int32)
    together: Any = rlx.compile(recipe, program="packed")
    got = np.asarray(together(input_ids=tokens.reshape(1, -1), segments=segments, positions=places))
    assert_close(got.reshape(want.shape), want)


@pytest.mark.parametrize("name, sparse", [("gqa_tied_llama3_v5", False), ("gqa_plain_attnbias_v5", True)])
def test_spellings(name: str, sparse: bool, tmp_path: Path) -> None:
    """The config as transformers 4 wrote it means what the config of transformers 5 means; so does one with both."""
    source = LLAMA.parent / name
    old = hugging_face.old_spelling(numpy_reference.read_config(source), sparse=False)
    if sparse:  # what is left out must be what the default says
        for key, default in {
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 1e4,
            "rope_scaling": None,
        }.items():
            if old.get(key) == default:
                old.pop(key)
        for key in ("pretraining_tp", "attention_dropout", "torch_dtype", "transformers_version", "use_cache"):
            old.pop(key)
    directory = checkpoints.copy(source, tmp_path / "old")
    (directory / "config.json").write_text(json.dumps(old), "utf-8")
    both = {"rope_theta": 1000000.0, "rope_scaling": None} if sparse else {}
    for path in (directory, checkpoints.edited(source, tmp_path / "both", both)):
        assert recipe_for(path).config == recipe_for(source).config


def test_tensors_and_code_beside_the_weights(tmp_path: Path) -> None:
    """An extra tensor is an error unless `strict=False`, then a warning; a tied checkpoint may also store the head, and
    another one than the embedding counts, as in transformers 5; `auto_map` points at Python: nothing is imported."""
    extra = checkpoints.copy(LLAMA, tmp_path / "extra")
    checkpoints.edit_tensors(extra, lambda t: t | {"model.layers.0.adapter.weight": np.ones(3, np.float32)})
    with pytest.warns(errors.RlxWarning, match="adapter"):
        load(extra, strict=False)
    tied = checkpoints.copy(TIED, tmp_path / "tied")
    head, record = (
        np.random.default_rng(0).normal(0, 0.2, (113, 40)).astype("f4"),
        load_record(LLAMA.parent / "mha_tied_sparse"),
    )
    checkpoints.edit_tensors(tied, lambda t: t | {"lm_head.weight": head})
    checkpoints.edit_json(tied / "config.json", {"auto_map": {"AutoModel": "evil.Model"}})
    (tied / "evil.py").write_text("raise SystemExit('imported')\n", "utf-8")
    with pytest.warns(UserWarning, match="auto_map"):
        lm = load(str(tied))
    assert_close(lm.logits(record["tokens"]), (record["hidden"].astype(np.float64) @ head.T).astype("f4"))


SMALL = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 32,
}  # fmt: skip


def test_windows_of_qwen() -> None:
    """As `use_sliding_window`, `sliding_window`, `max_window_layers` and `layer_types` say together."""
    used, types = {"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"] * 2}
    for fields, windows in (
        ({"sliding_window": 7}, (None,) * 4),
        ({"sliding_window": 7} | used, (None,) * 4),  # max_window_layers is 28
        ({"sliding_window": None, "max_window_layers": 0} | used, (None,) * 4),
        ({"sliding_window": 7, "max_window_layers": 3} | used, (None, None, None, 7)),
        ({"max_window_layers": 2} | used, (None, None, 4096, 4096)),
        ({"sliding_window": 7, "max_window_layers": 0} | used | types, (None, 7, None, 7)),
    ):  # fmt: skip
        assert Qwen2Config.from_hf(SMALL | fields).windows == Qwen3Config.from_hf(SMALL | fields).windows == windows


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda f: f.stem)
def test_published_sizes(file: Path) -> None:
    """A flow of the config as its maker published it reads as many parameters as the published checkpoint has, of
    encoders less their poolers."""
    about = json.loads(file.read_text("utf-8"))
    flows: dict[str, Any] = {
        "mistral": rlx.MistralFlow, "qwen2": rlx.Qwen2Flow, "qwen3": rlx.Qwen3Flow, "gpt2": rlx.Gpt2Flow,
        "mixtral": rlx.MixtralFlow, "qwen3_moe": rlx.Qwen3MoeFlow, "gpt_oss": rlx.GptOssFlow,
        "xlm-roberta": rlx.RobertaFlow, "mpnet": rlx.MPNetFlow, "nomic_bert": rlx.NomicFlow,
    }  # fmt: skip
    recipe = flows[about["config"]["model_type"]].for_prefill(about["config"], batch=3)
    built, shapes = recipe.assemble().build(), recipe.shapes()
    assert built.refusals == () and built.source is None and built.binding == {"batch": 3}
    assert set(built.keys_read) == set(shapes)
    assert sum(math.prod(spec.shape) for spec in shapes.values()) == about["parameters"]
    matrices = {key for key, spec in shapes.items() if len(spec.shape) > 1}
    assert matrices <= set(built.roles)  # what a mesh may divide


def test_positions_that_gpt2_knows() -> None:
    """The rows of its table are all that there are."""
    assert case("gpt2/scaled_v5").lm.max_positions == 48


LIVE = {
    "llama": (101, 106, 108, 109, 112), "mistral": (202, 200, 210), "mixtral": (202, 200, 201),
    "qwen3_moe": (202, 200, 210), "gpt_oss": (202, 201), "gpt2": (200, 201, 205), "qwen3_5_text": (307, 309, 310),
    "mamba2": (301, 302, 304), "qwen2": (202, 201, 203), "qwen3": (212, 201, 203), "gemma": (202, 201, 203),
    "gemma2": (201, 200, 202), "gemma3_text": (201, 200, 202),
}  # fmt: skip
"""Seeds of fresh random checkpoints: those whose few layers have the most kinds of fields between them."""


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "seed"), [(family, seed) for family, seeds in LIVE.items() for seed in seeds])
def test_live(family: str, seed: int, tmp_path: Path) -> None:
    """Logits of ragged rows equal those of `transformers`; so do 10 greedy tokens of a ragged batch of 3, past every
    window. For the first seed so do logits of a batch, and bfloat16 departs from float32 by at most 1.5 times what
    theirs does, root mean square."""
    directory, rng = tmp_path / "checkpoint", np.random.default_rng(seed)
    hugging_face.write(hugging_face.RANDOM[family](seed), directory)
    model, lm = hugging_face.load(directory, "AutoModelForCausalLM"), load(directory)
    tokens = rng.integers(0, model.config.vocab_size, (3, 21)).astype(np.int32)
    want = hugging_face.llama_batch(model, tokens)[1]
    if is_first := seed == LIVE[family][0]:
        assert_close(lm.logits(tokens), want)
    lengths = rng.integers(1, 22, 3).astype(np.int32)
    assert_rows_close(lm.logits(tokens, lengths), want, lengths)
    prompts, greedy = hugging_face.clear_prompts(model, [5, 2, 9], 10, seed, distinct=3)
    assert lm.generate(prompts, max_new_tokens=10) == greedy
    if is_first and family not in ("qwen3_5_text", "mamba2"):  # those: test_bf16
        profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
        found = (
            np.asarray(load(directory, profile=profile).logits(tokens)),
            hugging_face.bf16_logits(directory, tokens),
        )
        ours, theirs = (float(np.sqrt(np.mean(np.square(x.astype(np.float64) - want)))) for x in found)
        assert ours <= 1.5 * theirs


@pytest.mark.oracle(warnings="error")
def test_live_with_all_optimisations() -> None:
    """A decoder, a recurrent family and an encoder in a process whose XLA optimises as for users; the other tests do
    without most of it."""
    chosen = [f"tests/test_families.py::test_live[{name}]" for name in ("qwen3-203", "mamba2-304")]
    chosen += ["tests/test_encoders.py::test_live_hidden_states[mpnet-302]"]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "oracle", *chosen]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment | {"RLX_TEST_KEEP_ENV": "XLA_FLAGS", "XLA_FLAGS": ""},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]


WINDOWS: list[dict[str, Any]] = [
    {},
    {"rms_norm_eps": 0.5, "sliding_window": None},
    {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"] * 2},
]


@pytest.mark.oracle
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


@pytest.mark.oracle
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_live_activations(activation: str, tmp_path: Path) -> None:
    """Another activation is right or refused, never taken for silu."""
    directory = checkpoints.edited(LLAMA, tmp_path / activation, {"hidden_act": activation})
    tokens = load_record(LLAMA)["tokens"]
    try:
        lm = load(directory)
    except REFUSED:
        return
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    assert_close(lm.logits(tokens), hugging_face.llama_batch(model, tokens)[1])


HYBRID = ("qwen3_5_text/blocks_v5", "mamba2/groups_v5")


@functools.cache
def formulas(directory: Path) -> tuple[dict[str, Any], Any]:
    """The config and the weights of a checkpoint in float64."""
    return numpy_reference.read_config(directory), numpy_reference.read_weights(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_many_tokens(name: str) -> None:
    """60 tokens, which run in chunks, of rows that end anywhere."""
    config, weights = formulas(checkpoints.FIXTURES / name)
    lm, lengths = case(name).lm, np.array([60, 17])
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (2, 60)).astype(np.int32)
    got = np.asarray(lm.logits(tokens, lengths))
    for b, n in enumerate(lengths):
        assert_close(got[b, :n], hybrid.row(config, weights, tokens[b, :n].tolist())[1], tolerance=5e-5)


def test_no_most_time_step_is_written_in_three_ways(tmp_path: Path) -> None:
    """Published checkpoints have Python's bare Infinity; newer releases of transformers write JSON."""
    source = checkpoints.FIXTURES / "mamba2" / "groups_v5"
    want = Mamba2Config.from_hf(read_config(Folder(source)))
    assert want.mixer.time_step_limit == (0.0, None)
    for n, most in enumerate((math.inf, "inf", {"__float__": "Infinity"})):
        directory = checkpoints.edited(source, tmp_path / str(n), {"time_step_limit": [0.0, most]})
        assert Mamba2Config.from_hf(read_config(Folder(directory))) == want


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"hidden_act": "gelu"}, marks=pytest.mark.slow), {"time_step_limit": [0.3, 0.6]}],
    ids=["another activation", "steps in limits"],
)
def test_fields_of_mamba2_that_change_its_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    """`hidden_act` is that of the convolution alone: the gate of the norm is silu whatever it says."""
    directory = checkpoints.edited(checkpoints.FIXTURES / "mamba2" / "groups_v5", tmp_path / "m", changes)
    tokens = load_record(checkpoints.FIXTURES / "mamba2" / "groups_v5")["tokens"][0]
    config, weights = formulas(checkpoints.FIXTURES / "mamba2" / "groups_v5")
    assert_close(rlx.load(directory).logits([tokens])[0], hybrid.row(config | changes, weights, tokens)[1])


@pytest.mark.oracle
@pytest.mark.parametrize("name", HYBRID)
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


def test_architectures_of_a_decoder() -> None:
    """The names of the classes with a task head follow from that of the causal model, if there is no other."""
    bare, causal = (Family.decoder(rlx.Llama32Flow, "TinyForCausalLM", name) for name in ("TinyModel", ""))
    assert {*bare.architectures} - {*causal.architectures} == {"TinyModel"}
    assert "TinyForSequenceClassification" in causal.architectures
