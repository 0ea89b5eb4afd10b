"""BERT checkpoints against `transformers`: recorded numbers by default, live ones under the mark `oracle`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.models.config import ACTIVATIONS
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import load_record

BERT = checkpoints.FIXTURES / "bert"
NAMES = sorted(file.stem for file in BERT.glob("*.npz"))
BARE = BERT / "bare_v5"
MASKED_LM = BERT / "masked_lm_v4"
REFUSED = (errors.ConfigError, errors.UnsupportedError)


@dataclass(frozen=True)
class Case:
    """A recorded checkpoint: as an encoder, and as a compiled flow with its optional inputs."""

    directory: Path
    encoder: Any
    model: Any
    record: Mapping[str, npt.NDArray[Any]]

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """1 for the valid tokens of each row."""
        positions = np.arange(self.record["tokens"].shape[1])[None]
        return (positions < self.record["lengths"][:, None]).astype(np.int32)


def load_case(directory: Path) -> Case:
    """The checkpoint in `directory` with its recorded numbers."""
    return Case(directory, rlx.load(directory), rlx.compile(rlx.from_pretrained(directory)), load_record(directory))


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each recorded checkpoint in turn."""
    return load_case(BERT / request.param)


@pytest.fixture(scope="module")
def bare() -> Case:
    """The bare encoder."""
    return load_case(BARE)


# -- the recorded numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_record_agrees_with_numpy(name: str) -> None:
    """What `transformers` said is what the formulas say."""
    config, weights = (f(BERT / name) for f in (numpy_reference.read_config, numpy_reference.read_weights))
    record = load_record(BERT / name)
    for b, (tokens, types) in enumerate(zip(record["tokens"], record["types"], strict=True)):
        keep = (np.arange(len(tokens)) < record["lengths"][b]).astype(int)
        for key, inputs in {
            "plain": {},
            "ragged": {"keep": keep},
            "typed": {"keep": keep, "types": types},
            "holes": {"keep": record["holes_mask"][b], "types": types},
            "shuffled": {"keep": keep, "positions": record["positions"][b]},
        }.items():
            assert_close(record[key][b], numpy_reference.bert_row(config, weights, tokens, **inputs), tolerance=5e-6)


def test_hidden_states(case: Case) -> None:
    """A batch without padding."""
    assert_close(case.encoder.hidden_states(case.record["tokens"]), case.record["plain"])


def test_ragged_hidden_states(case: Case) -> None:
    """Rows of different lengths."""
    lengths = case.record["lengths"]
    assert_rows_close(case.encoder.hidden_states(case.record["tokens"], lengths), case.record["ragged"], lengths)


def test_no_optional_input(case: Case) -> None:
    """The compiled flow by itself: no mask, types 0, positions 0, 1, 2 …"""
    assert_close(case.model(case.record["tokens"]), case.record["plain"])
    assert_close(case.model(input_ids=case.record["tokens"]), case.record["plain"])


def test_mask_and_types(case: Case) -> None:
    """A padding mask alone, and with token types."""
    tokens, lengths = case.record["tokens"], case.record["lengths"]
    assert_rows_close(case.model(input_ids=tokens, attention_mask=case.mask), case.record["ragged"], lengths)
    got = case.model(input_ids=tokens, attention_mask=case.mask, token_type_ids=case.record["types"])
    assert_rows_close(got, case.record["typed"], lengths)


def test_mask_with_holes(case: Case) -> None:
    """Any token may be masked out, also in the middle; its own row is computed all the same."""
    got = case.model(
        input_ids=case.record["tokens"],
        attention_mask=case.record["holes_mask"],
        token_type_ids=case.record["types"],
    )
    assert_close(got, case.record["holes"])


def test_positions(case: Case) -> None:
    """Positions may be given."""
    record = case.record
    got = case.model(input_ids=record["tokens"], attention_mask=case.mask, position_ids=record["positions"])
    assert_rows_close(got, record["shuffled"], record["lengths"])


def test_weights_by_name(case: Case) -> None:
    """The compiled flow has the encoder's tensors under the checkpoint's own names, and nothing of the heads."""
    stored = numpy_reference.read_weights(case.directory)
    heads = ("cls.", "classifier.", "pooler.", "bert.pooler.")
    used = {key for key in stored if not key.startswith(heads) and "position_ids" not in key}
    weights = case.model.weights()
    assert set(weights) == used
    for key, value in weights.items():
        np.testing.assert_array_equal(np.asarray(value).astype(np.float64), stored[key], err_msg=key)


# -- equalities --------------------------------------------------------------------------------

VOCABULARY = 97
rows = st.lists(st.integers(0, VOCABULARY - 1), min_size=9, max_size=9)


@settings(max_examples=15)
@given(st.tuples(rows, rows, rows), st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, VOCABULARY - 1))
def test_alone_is_in_batch_and_padding_is_not_seen(
    bare: Case, batch: tuple[list[int], ...], lengths: tuple[int, ...], other: int
) -> None:
    """A row's valid states depend neither on the other rows nor on what stands behind its end."""
    tokens, count = np.array(batch, np.int32), np.array(lengths, np.int32)
    together = np.asarray(bare.encoder.hidden_states(tokens, count))
    repadded = np.where(np.arange(9)[None] < count[:, None], tokens, np.int32(other))
    assert_rows_close(bare.encoder.hidden_states(repadded, count), together, count, tolerance=1e-6)
    for b in range(3):
        alone = np.asarray(bare.encoder.hidden_states(tokens[b : b + 1], count[b : b + 1]))
        assert_rows_close(alone, together[b : b + 1], count[b : b + 1], tolerance=1e-5)


@pytest.mark.parametrize("length", [1, 4])
def test_padded_is_unpadded(bare: Case, length: int) -> None:
    """A short row alone, and the same row in a longer buffer."""
    tokens = bare.record["tokens"][:1]
    want = np.asarray(bare.encoder.hidden_states(tokens[:, :length]))
    got = np.asarray(bare.encoder.hidden_states(tokens, np.array([length])))
    assert_close(got[:, :length], want, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("roll", ["unroll", "scan"])
def test_policies_and_rolling(policy: str, roll: str) -> None:
    """Every way to compile gives the same numbers."""
    profile = rlx.CompileProfile.preset("auto").replace(fusion={"policy": policy}, layers={"roll": roll})
    encoder = rlx.load(MASKED_LM, profile=profile)
    record = load_record(MASKED_LM)
    lengths = record["lengths"]
    assert_rows_close(encoder.hidden_states(record["tokens"], lengths), record["ragged"], lengths)


# -- config and requests -----------------------------------------------------------------------


def test_activations() -> None:
    """Hugging Face's names against the formulas, where each bends."""
    x = np.linspace(-7, 7, 113, dtype=np.float32).reshape(1, -1)
    flow = rlx.ModelFlow("act").input("x", ("batch", 113))

    def every(emit: Any, value: Any) -> Any:
        for name, own in ACTIVATIONS.items():
            emit.output(name, emit.activation(own, value))
        return value

    found: Any = rlx.compile(flow.custom(every))(x)
    for name in ACTIVATIONS:
        want = numpy_reference.ACTIVATIONS[name](x.astype(np.float64))
        np.testing.assert_allclose(found[name], want, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(
    "field, changes",
    [
        ("hidden_act", {"hidden_act": "relu2"}),
        ("position_embedding_type", {"position_embedding_type": "relative_key"}),
        ("is_decoder", {"is_decoder": True}),
        ("add_cross_attention", {"add_cross_attention": True, "is_decoder": True}),
        ("quantization_config", {"quantization_config": {"quant_method": "bitsandbytes"}}),
        ("FooModel", {"architectures": ["FooModel"]}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_refused(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A field that changes the computation and is not handled is refused by name."""
    if field == "add_cross_attention":
        field = "add_cross_attention|is_decoder"
    directory = checkpoints.edited(BARE, tmp_path / "odd", changes)
    with pytest.raises(REFUSED, match=field):
        rlx.from_pretrained(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "2"},
        {"num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"hidden_size": -40},
        {"layer_norm_eps": -1e-12},
        {"type_vocab_size": 0},
    ],
    ids=str,
)
def test_absurd_values(changes: dict[str, Any], tmp_path: Path) -> None:
    """Values that make no sense are found before anything is built."""
    directory = checkpoints.edited(BARE, tmp_path / "absurd", changes)
    with pytest.raises((errors.ConfigError, errors.LimitError, errors.WeightShapeError), match=next(iter(changes))):
        rlx.from_pretrained(directory)


@pytest.mark.parametrize(
    "tokens",
    [np.array([[0, -1]]), np.array([[0, VOCABULARY]]), np.array([[0, 2**31]]), np.array([[2**32 + 3]]), [[1.0, 2.0]]],
    ids=["negative", "vocabulary", "int32", "wraps", "float"],
)
def test_token_ids_are_checked(bare: Case, tokens: Any) -> None:
    """An id outside the vocabulary, or no integer at all, is an error."""
    with pytest.raises(errors.TokenIdError):
        bare.encoder.hidden_states(tokens)


def test_host_inputs_are_checked(bare: Case) -> None:
    """Types and positions have bounds of their own; shapes must agree."""
    tokens = bare.record["tokens"]
    for name, value in {"token_type_ids": 2, "position_ids": 40, "input_ids": -1}.items():
        inputs = {"input_ids": tokens} | {name: np.full_like(tokens, value)}
        with pytest.raises(rlx.RlxError):
            bare.model(**inputs)
    with pytest.raises(rlx.RlxError):
        bare.model(input_ids=tokens, attention_mask=np.ones((3, 11), np.int32))
    with pytest.raises(rlx.RlxError, match="attention_msk"):
        bare.model(input_ids=tokens, attention_msk=np.ones((3, 12), np.int32))


@pytest.mark.parametrize("value", [2, -1, 256, 0.5])
def test_a_mask_is_zeros_and_ones(bare: Case, value: float) -> None:
    """Whatever else stands in it would be taken for some other number on its way to a bool."""
    mask = np.array([[1, value]])
    with pytest.raises(errors.RequestError, match=r"attention_mask: expected 0 and 1"):
        bare.encoder.hidden_states([[1, 2]], attention_mask=mask)
    want = bare.encoder.hidden_states([[1, 2]], attention_mask=[[True, False]])
    np.testing.assert_array_equal(bare.encoder.hidden_states([[1, 2]], attention_mask=np.array([[1, 0]])), want)


def test_vectors_that_are_not_finite(bare: Case) -> None:
    """Are an error that names them; the others are whole."""
    weights = dict(bare.encoder.model.weights())
    (key,) = (k for k in weights if k.endswith("word_embeddings.weight"))
    table = np.array(weights[key])
    table[7] = np.nan
    recipe = rlx.recipe_for(BARE)
    encoder = rlx.Encoder(recipe.assemble(), rlx.open_weights({**weights, key: table}, on_nonfinite="ignore"))
    with pytest.raises(errors.NumericsError, match=r"2 of 4 .* not finite: 'texts\[1\]', 'texts\[3\]'$") as told:
        encoder.embed([[1, 2], [3, 7], [4], [7]])
    first, _, third, _ = told.value.outputs
    assert told.value.rows == {1: 0, 3: 0}
    np.testing.assert_array_equal([np.asarray(first), np.asarray(third)], encoder.embed([[1, 2], [4]]))


def test_too_long(bare: Case) -> None:
    """There are 40 positions; token 41 is an error, not the last position again."""
    assert bare.encoder.hidden_states(np.ones((1, 40), np.int32)).shape == (1, 40, 40)
    with pytest.raises(errors.SequenceLengthError, match="41"):
        bare.encoder.hidden_states(np.ones((1, 41), np.int32))


def test_missing_and_unexpected_weights(tmp_path: Path) -> None:
    """Heads are left aside; a missing encoder tensor or one that nothing reads is an error."""
    missing = checkpoints.copy(BARE, tmp_path / "missing")
    checkpoints.edit_tensors(missing, lambda t: {k: v for k, v in t.items() if "layer.1.output.dense.bias" not in k})
    with pytest.raises(errors.MissingWeightError, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        rlx.load(missing)
    extra = checkpoints.copy(BARE, tmp_path / "extra")
    checkpoints.edit_tensors(extra, lambda t: t | {"encoder.layer.0.adapter.weight": np.ones(3, np.float32)})
    with pytest.raises(errors.UnexpectedWeightError, match="adapter"):
        rlx.load(extra)
    headless = checkpoints.copy(BARE, tmp_path / "headless")
    checkpoints.edit_tensors(headless, lambda t: {k: v for k, v in t.items() if not k.startswith("pooler")})
    rlx.from_pretrained(headless)


# -- live --------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(200, 208))
def test_live_hidden_states(seed: int, tmp_path: Path) -> None:
    """Fresh random checkpoints with masks, holes, types and positions equal `transformers`."""
    directory = tmp_path / "checkpoint"
    hugging_face.write(hugging_face.random_bert(seed), directory)
    model, encoder = hugging_face.load(directory, "AutoModel"), rlx.load(directory)
    compiled: Any = rlx.compile(rlx.from_pretrained(directory))
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.config.vocab_size, (3, 13)).astype(np.int32)
    assert_close(encoder.hidden_states(tokens), hugging_face.bert_hidden(model, tokens))
    lengths = rng.integers(1, 14, 3).astype(np.int32)
    mask = (np.arange(13)[None] < lengths[:, None]).astype(np.int32)
    want = hugging_face.bert_hidden(model, tokens, attention_mask=mask)
    assert_rows_close(encoder.hidden_states(tokens, lengths), want, lengths)
    inputs = {
        "attention_mask": np.where(np.arange(13) == 4, 1, rng.random((3, 13)) < 0.5).astype(np.int32),
        "token_type_ids": rng.integers(0, model.config.type_vocab_size, (3, 13)).astype(np.int32),
        "position_ids": rng.integers(0, model.config.max_position_embeddings, (3, 13)).astype(np.int32),
    }
    want = hugging_face.bert_hidden(model, tokens, **inputs)
    assert_close(compiled(input_ids=tokens, **inputs), want)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_live_activations(bare: Case, activation: str, tmp_path: Path) -> None:
    """Every one that is known is transformers' own."""
    directory = checkpoints.edited(BARE, tmp_path / activation, {"hidden_act": activation})
    encoder = rlx.load(directory)
    want = hugging_face.bert_hidden(hugging_face.load(directory, "AutoModel"), bare.record["tokens"])
    assert_close(encoder.hidden_states(bare.record["tokens"]), want)
