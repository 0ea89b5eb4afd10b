"""Llama checkpoints: ways to compile and to load, configs that are refused, requests. Numbers: `test_families.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
ABSURD = (errors.ConfigError, errors.LimitError, errors.UnsupportedError, errors.WeightShapeError)


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


def test_path_may_be_a_string(plain: Case) -> None:
    """`load` takes what `open` takes."""
    assert_close(rlx.load(str(plain.directory)).logits(plain.record["tokens"]), plain.record["logits"])


# -- equalities --------------------------------------------------------------------------------

VOCABULARY = 67
rows = st.lists(st.integers(0, VOCABULARY - 1), min_size=8, max_size=8)


@settings(max_examples=15)
@given(st.tuples(rows, rows, rows), st.tuples(*[st.integers(1, 8)] * 3), st.integers(0, VOCABULARY - 1))
def test_alone_is_in_batch_and_padding_is_not_seen(
    plain: Case, batch: tuple[list[int], ...], lengths: tuple[int, ...], other: int
) -> None:
    """A row's valid logits depend neither on the other rows nor on what stands behind its end."""
    tokens, count = np.array(batch, np.int32), np.array(lengths, np.int32)
    together = np.asarray(plain.lm.logits(tokens, count))
    repadded = np.where(np.arange(8)[None] < count[:, None], tokens, np.int32(other))
    assert_rows_close(plain.lm.logits(repadded, count), together, count, tolerance=1e-6)
    for b in range(3):
        alone = np.asarray(plain.lm.logits(tokens[b : b + 1], count[b : b + 1]))
        assert_rows_close(alone, together[b : b + 1], count[b : b + 1], tolerance=1e-5)


def test_later_tokens_are_not_seen(plain: Case) -> None:
    """Logits at a position do not change with the tokens after it, nor do lengths change them."""
    tokens = plain.record["tokens"]
    whole = np.asarray(plain.lm.logits(tokens))
    changed = tokens.copy()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCABULARY
    assert_close(np.asarray(plain.lm.logits(changed))[:, :6], whole[:, :6], tolerance=1e-6)
    assert_close(plain.lm.logits(tokens, np.array([11, 11])), whole, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "roll"),
    [
        ("direct", "scan"),
        ("fusable", "unroll"),
        pytest.param("direct", "unroll", marks=pytest.mark.slow),
        pytest.param("fusable", "scan", marks=pytest.mark.slow),
    ],
)
def test_policies_and_rolling(policy: str, roll: str) -> None:
    """Every way to compile gives the same numbers and the same tokens."""
    profile = rlx.CompileProfile.preset("auto").replace(fusion={"policy": policy}, layers={"roll": roll})
    lm, record = rlx.load(DEEP, profile=profile), load_record(DEEP)
    assert_close(lm.logits(record["tokens"]), record["logits"])
    prompts = [r[:n].tolist() for r, n in zip(record["ragged_tokens"], record["ragged_lengths"], strict=True)]
    assert lm.generate(prompts, max_new_tokens=8) == record["greedy"][:, :8].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa_tied_llama3_v5", "gqa_linear_mlpbias_v5", "gqa_plain_attnbias_v5"])
@pytest.mark.parametrize("sparse", [False, True], ids=["v4", "sparse"])
def test_spellings(name: str, sparse: bool, tmp_path: Path) -> None:
    """The config as transformers 4 wrote it means what the config of transformers 5 means."""
    config = numpy_reference.read_config(LLAMA / name)
    old = hugging_face.old_spelling(config, sparse=False)
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
    """A tied checkpoint that also stores the head, equal to the embedding, is the same model."""
    directory = checkpoints.copy(TIED, tmp_path / "twice")

    def add_head(tensors: dict[str, npt.NDArray[Any]]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    checkpoints.edit_tensors(directory, add_head)
    record = load_record(TIED)
    assert_close(rlx.load(directory).logits(record["tokens"]), record["logits"])


def test_tied_with_another_head(tmp_path: Path) -> None:
    """If config says tied and the stored head differs, it counts (as in transformers 5), or it is refused."""
    directory = checkpoints.copy(TIED, tmp_path / "other")
    head = np.random.default_rng(0).normal(0, 0.2, (113, 40)).astype(np.float32)
    checkpoints.edit_tensors(directory, lambda t: t | {"lm_head.weight": head})
    record = load_record(TIED)
    try:
        logits = rlx.load(directory).logits(record["tokens"])
    except rlx.RlxError:
        return
    assert_close(logits, (record["hidden"].astype(np.float64) @ head.T).astype(np.float32))


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
        ("hidden_act", {"hidden_act": "relu6"}),
        ("dynamic", {"rope_parameters": SCALED | {"rope_type": "dynamic"}}),
        ("longrope", {"rope_parameters": SCALED | {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}),
        ("wobbly", {"rope_parameters": SCALED | {"rope_type": "wobbly"}}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        (
            "dynamic",
            {"rope_parameters": checkpoints.REMOVED, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
        ),
        (
            "dynamic",
            {"rope_parameters": checkpoints.REMOVED, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        ),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("pretraining_tp", {"pretraining_tp": 2}),
        ("sliding_window", {"sliding_window": 4}),
        ("layer_types", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("logits_scaling", {"logits_scaling": 8.0}),
        ("residual_multiplier", {"residual_multiplier": 0.2}),
        ("embedding_multiplier", {"embedding_multiplier": 12.0}),
        ("attention_multiplier", {"attention_multiplier": 0.1}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("FooForCausalLM", {"architectures": ["FooForCausalLM"]}),
        ("foo", {"model_type": "foo", "architectures": ["FooForCausalLM"]}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_refused(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A field that changes the computation and is not handled is refused by name, in every way to load."""
    directory = checkpoints.edited(PLAIN, tmp_path / "odd", changes)
    with pytest.raises(REFUSED, match=field):
        rlx.from_pretrained(directory)
    with pytest.raises(REFUSED, match=field):
        rlx.load(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": True},
        {"num_hidden_layers": None},
        {"hidden_size": 0},
        {"hidden_size": checkpoints.REMOVED},
        {"head_dim": 5},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 0},
        {"vocab_size": 2**40},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": math.nan},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e60}},
        {"rope_parameters": "default"},
        {"tie_word_embeddings": "yes"},
        {"model_type": 7},
    ],
    ids=str,
)
def test_absurd_values(changes: dict[str, Any], tmp_path: Path) -> None:
    """Values that make no sense are config errors, found before anything is built."""
    directory = checkpoints.edited(PLAIN, tmp_path / "absurd", changes)
    with pytest.raises(ABSURD, match=f"{next(iter(changes))}|NaN"):
        rlx.from_pretrained(directory)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "\ufeff{}", '{"model_type": "llama", "model_type": "bert"}', "[" * 99999],
    ids=["empty", "open", "list", "mark", "duplicate", "deep"],
)
def test_config_that_is_no_config(text: str, tmp_path: Path) -> None:
    """A file that is not one JSON object is a config error."""
    directory = checkpoints.copy(PLAIN, tmp_path / "broken")
    (directory / "config.json").write_text(text, "utf-8")
    with pytest.raises(ABSURD):
        rlx.from_pretrained(directory)


def test_missing_files(tmp_path: Path) -> None:
    """No directory, no config, no weights: errors of the tree, and of the built-in kind one would catch."""
    with pytest.raises(errors.RlxError):
        rlx.load(tmp_path / "nowhere")
    for pattern in ("config.json", "model.safetensors"):
        directory = checkpoints.copy(PLAIN, tmp_path / pattern)
        (directory / pattern).unlink()
        with pytest.raises(errors.RlxError):
            rlx.load(directory)


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 66}, {"intermediate_size": 91}, {"head_dim": 6}, {"hidden_size": 54}], ids=str
)
def test_weights_contradict_config(changes: dict[str, Any], tmp_path: Path) -> None:
    """A tensor of another shape than the config asks for is named."""
    directory = checkpoints.edited(PLAIN, tmp_path / "shape", changes)
    with pytest.raises(errors.WeightShapeError, match="weight"):
        rlx.load(directory)


def test_missing_and_unexpected_weights(tmp_path: Path) -> None:
    """Missing tensors are listed; an extra one is an error unless `strict=False`, then a warning."""
    missing = checkpoints.copy(PLAIN, tmp_path / "missing")
    checkpoints.edit_tensors(missing, lambda t: {k: v for k, v in t.items() if "layers.1.mlp" not in k})
    with pytest.raises(errors.MissingWeightError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        rlx.load(missing)
    more_layers = checkpoints.edited(PLAIN, tmp_path / "more", {"num_hidden_layers": 4})
    with pytest.raises(errors.MissingWeightError, match=r"model\.layers\.3\."):
        rlx.load(more_layers)
    biased = checkpoints.edited(PLAIN, tmp_path / "biased", {"attention_bias": False})
    with pytest.raises(errors.UnexpectedWeightError, match=r"q_proj\.bias"):
        rlx.load(biased)
    extra = checkpoints.copy(PLAIN, tmp_path / "extra")
    checkpoints.edit_tensors(extra, lambda t: t | {"model.layers.0.adapter.weight": np.ones(3, np.float32)})
    with pytest.raises(errors.UnexpectedWeightError, match="adapter"):
        rlx.load(extra)
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

BAD_TOKENS: list[tuple[str, Any]] = [
    ("negative", np.array([[1, -1]])),
    ("vocabulary", np.array([[VOCABULARY, 1]])),
    ("int32", np.array([[1, 2**31]])),
    ("wraps", np.array([[1, 2**32 + 5]])),
    ("unsigned", np.array([[2**32 - 1, 1]], np.uint32)),
    ("huge", np.array([[1, 2**63 + 1]], np.uint64)),
    ("float", np.array([[1.0, 2.0]])),
    ("float32", np.array([[1.0, 2.0]], np.float32)),
    ("bool", np.array([[True, False]])),
    ("text", np.array([["a", "b"]])),
    ("list", [[1, -1]]),
    ("nested float", [[1, 2.0]]),
]


@pytest.mark.parametrize("tokens", [t for _, t in BAD_TOKENS], ids=[n for n, _ in BAD_TOKENS])
def test_token_ids_are_checked(plain: Case, tokens: Any) -> None:
    """An id outside the vocabulary, or no integer at all, is an error, never another token."""
    with pytest.raises(errors.TokenIdError):
        plain.lm.logits(tokens)
    with pytest.raises(errors.TokenIdError):
        plain.lm.prefill(tokens)
    assert issubclass(errors.TokenIdError, rlx.RlxError) and issubclass(errors.TokenIdError, ValueError)


@pytest.mark.parametrize(
    "convert",
    [np.int32, np.int64, np.uint8, np.uint16, lambda t: t.tolist(), lambda t: jnp.asarray(t), np.asfortranarray],
    ids=["int32", "int64", "uint8", "uint16", "list", "jax", "fortran"],
)
def test_containers_of_tokens(plain: Case, convert: Any) -> None:
    """Whole numbers in any container are tokens."""
    assert_close(plain.lm.logits(convert(plain.record["tokens"])), plain.record["logits"])


@pytest.mark.parametrize(
    "lengths",
    [np.array([12, 3]), np.array([-1, 3]), np.array([3]), np.array([[3, 3]]), np.array([3.0, 3.0]), [3, 3, 3]],
    ids=["over", "negative", "one", "rank", "float", "three"],
)
def test_lengths_are_checked(plain: Case, lengths: Any) -> None:
    """Lengths must be whole numbers, one for each row, within the row."""
    with pytest.raises(errors.RequestError):
        plain.lm.logits(plain.record["tokens"], lengths)


def test_context_is_checked(tmp_path: Path) -> None:
    """More tokens than `max_position_embeddings` are an error that names both numbers."""
    lm = rlx.load(checkpoints.edited(PLAIN, tmp_path / "short", {"max_position_embeddings": 9}))
    assert lm.logits(np.zeros((1, 9), np.int32)).shape == (1, 9, VOCABULARY)
    with pytest.raises(errors.SequenceLengthError, match=r"(?s)\b10\b.*\b9\b|\b9\b.*\b10\b"):
        lm.logits(np.zeros((1, 10), np.int32))
    for tokens in (np.zeros((1, 0), np.int32), np.zeros(3, np.int32), np.zeros((1, 2, 3), np.int32)):
        with pytest.raises(errors.RequestError):
            lm.logits(tokens)


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
