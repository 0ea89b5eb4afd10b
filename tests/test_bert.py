"""BERT checkpoints against `transformers`: recorded numbers by default, live ones under the mark `oracle`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

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


def test_recorded_numbers(case: Case) -> None:
    """As an encoder, rows of different lengths too; as a flow without, and with each, of its optional inputs."""
    record, model = case.record, case.model
    tokens, lengths, types = record["tokens"], record["lengths"], record["types"]
    assert_close(case.encoder.hidden_states(tokens), record["plain"])
    assert_rows_close(case.encoder.hidden_states(tokens, lengths), record["ragged"], lengths)
    assert_close(model(tokens), record["plain"])
    masked = {"input_ids": tokens, "attention_mask": case.mask}
    assert_rows_close(model(**masked), record["ragged"], lengths)
    assert_rows_close(model(**masked, token_type_ids=types), record["typed"], lengths)
    assert_rows_close(model(**masked, position_ids=record["positions"]), record["shuffled"], lengths)
    holes = model(input_ids=tokens, attention_mask=record["holes_mask"], token_type_ids=types)
    assert_close(holes, record["holes"])  # a token that is masked out is computed all the same


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


def test_alone_is_in_batch_and_padding_is_not_seen(bare: Case) -> None:
    """A row's valid states depend neither on the other rows nor on what stands behind its end."""
    rng = np.random.default_rng(0)
    for count in np.array([[9, 9, 9], [1, 2, 9], [5, 8, 3]], np.int32):
        tokens, other = rng.integers(0, VOCABULARY, (2, 3, 9)).astype(np.int32)
        together = np.asarray(bare.encoder.hidden_states(tokens, count))
        repadded = np.where(np.arange(9)[None] < count[:, None], tokens, other)
        assert_rows_close(bare.encoder.hidden_states(repadded, count), together, count, tolerance=1e-6)
        for b in range(3):
            alone = np.asarray(bare.encoder.hidden_states(tokens[b : b + 1, : count[b]]))
            assert_rows_close(alone, together[b : b + 1, : count[b]], count[b : b + 1], tolerance=1e-5)


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
    "changes",
    [
        {"hidden_act": "relu2"}, {"position_embedding_type": "relative_key"}, {"is_decoder": True},
        {"quantization_config": {"quant_method": "bitsandbytes"}}, {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "2"}, {"num_attention_heads": 7}, {"hidden_size": -40}, {"layer_norm_eps": -1e-12},
        {"type_vocab_size": 0},
    ],
    ids=str,
)  # fmt: skip
def test_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """What changes the computation and is not handled, or makes no sense, is refused by name."""
    directory = checkpoints.edited(BARE, tmp_path / "odd", changes)
    with pytest.raises((errors.ConfigError, errors.LimitError, errors.UnsupportedError), match=next(iter(changes))):
        rlx.from_pretrained(directory)


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
