"""Llama checkpoints: ways to compile and to load, configs that are refused, requests. Numbers: `test_families.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import Case, load_case, load_record

LLAMA = checkpoints.FIXTURES / "llama"
PLAIN = LLAMA / "gqa_plain_attnbias_v5"
TIED = LLAMA / "mha_tied_sparse"
LINEAR = LLAMA / "mha_linear_biases_v4"
DEEP = LLAMA / "gqa_linear_mlpbias_v5"
REFUSED = (errors.ConfigError, errors.UnsupportedError)


@pytest.fixture(scope="module")
def plain() -> Case:
    """The checkpoint with the smallest vocabulary."""
    return load_case(PLAIN)


# -- the recorded numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("directory", [LINEAR, TIED], ids=lambda d: d.name)
def test_compiled_flow(directory: Path) -> None:
    """`compile(from_pretrained(dir))` gives the logits, and the weights under the checkpoint's own names."""
    model = rlx.compile(rlx.from_pretrained(directory))
    record = load_record(directory)
    assert_close(model(record["tokens"]), record["logits"])
    stored = numpy_reference.read_weights(directory)
    weights = model.weights()
    assert set(weights) == {key for key in stored if "inv_freq" not in key}
    for key, value in weights.items():
        np.testing.assert_array_equal(np.asarray(value), stored[key], err_msg=key)


# -- equalities --------------------------------------------------------------------------------

VOCABULARY = 67


def test_later_tokens_are_not_seen(plain: Case) -> None:
    """Logits at a position do not change with the tokens after it, nor with those behind the end of a row."""
    tokens = plain.record["tokens"]
    whole, changed = np.asarray(plain.lm.logits(tokens)), tokens.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCABULARY
    assert_close(np.asarray(plain.lm.logits(changed))[:, :6], whole[:, :6], tolerance=1e-6)
    assert_close(plain.lm.logits(tokens, np.array([11, 11])), whole, tolerance=1e-6)
    lengths = np.array([6, 3])
    assert_rows_close(plain.lm.logits(changed, lengths), whole, lengths, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name, sparse", [("gqa_tied_llama3_v5", False), ("gqa_plain_attnbias_v5", True)])
def test_spellings(name: str, sparse: bool, tmp_path: Path) -> None:
    """The config as transformers 4 wrote it means what the config of transformers 5 means."""
    old = hugging_face.old_spelling(numpy_reference.read_config(LLAMA / name), sparse=False)
    if sparse:  # what is left out must be what the default says
        for key, default in {"attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0}.items():
            if old.get(key) == default:
                old.pop(key)
        for key in ("pretraining_tp", "attention_dropout", "torch_dtype", "transformers_version", "use_cache"):
            old.pop(key)
        if old["rope_scaling"] is None:
            old.pop("rope_scaling")
    directory = checkpoints.copy(LLAMA / name, tmp_path / "old")
    (directory / "config.json").write_text(json.dumps(old), "utf-8")
    record = load_record(LLAMA / name)
    assert_close(rlx.load(directory).logits(record["tokens"]), record["logits"])


def test_both_spellings_at_once(tmp_path: Path) -> None:
    """`rope_theta` beside a `rope_parameters` that says the same is one config, not two."""
    directory = checkpoints.edited(PLAIN, tmp_path / "both", {"rope_theta": 1000000.0, "rope_scaling": None})
    record = load_record(PLAIN)
    assert_close(rlx.load(directory).logits(record["tokens"]), record["logits"])


def test_tied_with_a_head_beside(tmp_path: Path) -> None:
    """A tied checkpoint may also store the head: equal to the embedding it is the same model, another one counts, as in
    transformers 5."""
    record = load_record(TIED)
    head = np.random.default_rng(0).normal(0, 0.2, (113, 40)).astype(np.float32)
    for name, change in (("equal", lambda table: table.copy()), ("other", lambda table: head)):
        directory = checkpoints.copy(TIED, tmp_path / name)
        checkpoints.edit_tensors(directory, lambda t: t | {"lm_head.weight": change(t["model.embed_tokens.weight"])})  # noqa: B023
        want = record["logits"] if name == "equal" else (record["hidden"].astype(np.float64) @ head.T).astype("f4")
        assert_close(rlx.load(str(directory)).logits(record["tokens"]), want)


def test_cache_snapshot_of_links(tmp_path: Path) -> None:
    """The layout of a Hugging Face cache, where every file is a link into `blobs`, loads."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(DEEP.iterdir())):
        (blobs / f"{i:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    record = load_record(DEEP)
    assert_close(rlx.load(snapshot).logits(record["tokens"]), record["logits"])


# -- config: what is refused, what is inert -----------------------------------------------------

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "field, changes",
    [
        ("dynamic", {"rope_parameters": SCALED | {"rope_type": "dynamic"}}),
        ("wobbly", {"rope_parameters": SCALED | {"rope_type": "wobbly"}}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("dynamic", {"rope_parameters": checkpoints.REMOVED, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("pretraining_tp", {"pretraining_tp": 2}),
        ("layer_types", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}),
        ("logits_scaling", {"logits_scaling": 8.0}),
        ("residual_multiplier", {"residual_multiplier": 0.2}),
        ("embedding_multiplier", {"embedding_multiplier": 12.0}),
        ("attention_multiplier", {"attention_multiplier": 0.1}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("FooForCausalLM", {"architectures": ["FooForCausalLM"]}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_refused(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A field that changes the computation and is not handled is refused by name, in every way to load."""
    directory = checkpoints.edited(PLAIN, tmp_path / "odd", changes)
    for load in (rlx.from_pretrained, rlx.load):
        with pytest.raises(REFUSED, match=field):
            load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": checkpoints.REMOVED}, {"num_attention_heads": 0}, {"rms_norm_eps": -1.0},
        {"rms_norm_eps": math.nan}, {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e60}}, {"rope_parameters": "default"},
        {"model_type": 7},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_values(changes: dict[str, Any], tmp_path: Path) -> None:
    """Values that make no sense are config errors, found before anything is built."""
    directory = checkpoints.edited(PLAIN, tmp_path / "absurd", changes)
    with pytest.raises((*REFUSED, errors.LimitError), match=f"{next(iter(changes))}|NaN"):
        rlx.from_pretrained(directory)


def test_missing_and_unexpected_weights(tmp_path: Path) -> None:
    """Missing tensors are listed; an extra one is an error unless `strict=False`, then a warning."""
    more_layers = checkpoints.edited(PLAIN, tmp_path / "more", {"num_hidden_layers": 4})
    with pytest.raises(errors.MissingWeightError, match=r"model\.layers\.3\."):
        rlx.load(more_layers)
    biased = checkpoints.edited(PLAIN, tmp_path / "biased", {"attention_bias": False})
    with pytest.raises(errors.UnexpectedWeightError, match=r"q_proj\.bias"):
        rlx.load(biased)
    extra = checkpoints.copy(PLAIN, tmp_path / "extra")
    checkpoints.edit_tensors(extra, lambda t: t | {"model.layers.0.adapter.weight": np.ones(3, np.float32)})
    record = load_record(PLAIN)
    with pytest.warns(errors.RlxWarning, match="adapter"):
        lm = rlx.load(extra, strict=False)
    assert_close(lm.logits(record["tokens"]), record["logits"])


def test_code_in_a_directory_is_never_run(tmp_path: Path) -> None:
    """`auto_map` points at Python in the directory: one warning, nothing imported."""
    directory = checkpoints.edited(PLAIN, tmp_path / "code", {"auto_map": {"AutoModel": "evil.Model"}})
    (directory / "evil.py").write_text("raise SystemExit('imported')\n", "utf-8")
    with pytest.warns(UserWarning, match="auto_map"):
        lm = rlx.load(directory)
    assert_close(lm.logits(load_record(PLAIN)["tokens"]), load_record(PLAIN)["logits"])


# -- requests ----------------------------------------------------------------------------------


def test_containers_of_tokens(plain: Case) -> None:
    """Whole numbers in any container are tokens."""
    tokens, containers = plain.record["tokens"], list[Any]()
    containers += [tokens.tolist(), jnp.asarray(tokens), np.asfortranarray(tokens)]
    containers += [tokens.astype(dtype) for dtype in (np.int64, np.uint8, np.uint16)]
    for given in containers:
        assert_close(plain.lm.logits(given), plain.record["logits"])


def test_context_is_checked(tmp_path: Path) -> None:
    """More tokens than `max_position_embeddings` are an error that names both numbers."""
    lm = rlx.load(checkpoints.edited(PLAIN, tmp_path / "short", {"max_position_embeddings": 9}))
    assert lm.logits(np.zeros((1, 9), np.int32)).shape == (1, 9, VOCABULARY)
    with pytest.raises(errors.SequenceLengthError, match=r"(?s)\b10\b.*\b9\b|\b9\b.*\b10\b"):
        lm.logits(np.zeros((1, 10), np.int32))


# -- live --------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_live_activations(activation: str, tmp_path: Path) -> None:
    """Another activation is right or refused, never taken for silu."""
    directory = checkpoints.edited(PLAIN, tmp_path / activation, {"hidden_act": activation})
    tokens = load_record(PLAIN)["tokens"]
    try:
        lm = rlx.load(directory)
    except REFUSED:
        return
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    assert_close(lm.logits(tokens), hugging_face.llama_batch(model, tokens)[1])
