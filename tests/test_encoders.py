"""BERT, RoBERTa, MPNet and NomicBERT against `transformers`: recorded numbers by default, live ones under the mark
`oracle`.

A new family adds checkpoints to `tests/oracles/encoders.py`, and rows here.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.models.config import ACTIVATIONS
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, encoders, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.recorded import load_record

NAMES = [f"{family}/{name}" for family, made in encoders.CHECKPOINTS.items() for name in made]
SLOW = (
    "bert/masked_lm_v4", "mpnet/masked_lm_v4", "nomic_bert/first_v1", "bert/classifier_v4", "bert/bf16_pretraining_v5",
    "roberta/xlm_v4",
)  # fmt: skip
BARE = checkpoints.FIXTURES / "bert" / "bare_v5"
ROBERTA, XLM, MPNET, NOMIC = (
    checkpoints.FIXTURES / name for name in ("roberta/bare_v5", "roberta/xlm_v4", "mpnet/bare_v5", "nomic_bert/bare_v5")
)
OPTIONAL = ("attention_mask", "token_type_ids", "position_ids")
AUTO_MAP = pytest.mark.filterwarnings("ignore:.*auto_map is ignored:rlx_jax.errors.RlxWarning")
pytestmark = AUTO_MAP


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded checkpoint: as an encoder, and as a compiled flow with its optional inputs."""

    encoder: Any
    model: Any
    record: Mapping[str, npt.NDArray[Any]]

    @property
    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The optional inputs of `given`."""
        return {name: self.record[name] for name in OPTIONAL if name in self.record}


@functools.lru_cache(maxsize=1)
def case(name: str) -> Case:
    """Loaded once for the tests that follow each other; without the head of its task."""
    directory = checkpoints.FIXTURES / name
    recipe = dataclasses.replace(recipe_for(directory), head=None)
    return Case(load(directory, head=False), rlx.compile(recipe), load_record(directory))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NAMES])
def test_hidden_states(name: str) -> None:
    """A batch without padding; rows of their own lengths; every optional input. The flow has the encoder's tensors
    under the checkpoint's own names, and nothing of the heads."""
    it = case(name)
    tokens, lengths = it.record["tokens"], it.record["lengths"]
    assert_close(it.encoder.hidden_states(tokens), it.record["plain"])
    assert_rows_close(it.encoder.hidden_states(tokens, lengths), it.record["ragged"], lengths)
    assert_close(it.model(input_ids=tokens, **it.inputs), it.record["given"])
    stored, heads = numpy_reference.read_weights(checkpoints.FIXTURES / name), ("cls.", "lm_head.", "classifier.")
    left = (*heads, "pooler.", "bert.pooler.")
    weights = it.model.weights()
    assert set(weights) == {k for k in stored if not k.startswith(left) and not k.endswith("position_ids")}
    for key, value in weights.items():
        np.testing.assert_array_equal(np.asarray(value).astype(np.float64), stored[key], err_msg=key)


@pytest.mark.parametrize("name", ["mpnet/bare_v5", pytest.param("roberta/bare_v5", marks=pytest.mark.slow)])
def test_texts_that_share_a_row(name: str) -> None:
    """Several sequences in a row, of which one has padding among its tokens: each as if it were alone."""
    it = case(name)
    tokens = it.record["tokens"]
    texts = [tokens[1, :23], tokens[0, :4], tokens[1, :40]]
    said = {
        "input_ids": np.concatenate([*texts, [0]]),
        "segments": np.repeat([1, 2, 3, 0], [*map(len, texts), 1]),
        "positions": np.concatenate([*(np.arange(len(text)) for text in texts), [0]]),
    }
    model: Any = rlx.compile(recipe_for(checkpoints.FIXTURES / name), program="packed")
    got = model(**{key: value[None].astype(np.int32) for key, value in said.items()})[0]
    for number, text in enumerate(texts, 1):
        assert_close(np.asarray(got)[said["segments"] == number], it.encoder.hidden_states(text[None])[0])


def test_names_of_the_fields_of_a_layer() -> None:
    """`replace` changes a field under its other name; a field has one value."""
    spec = blocks.BertEncoderLayerSpec("a", 8, 2, 4, qkv_style="mpnet")
    new = dataclasses.replace(spec, layer_prefix="b", attention_mask_input=None)  # type: ignore[call-arg]
    assert (new.prefix, new.layer_prefix, new.mask_input, new.attention_mask_input) == ("b", "b", None, None)
    assert new.keys == spec.keys and new == dataclasses.replace(spec, prefix="b", mask_input=None)
    for layer in (blocks.BertEncoderLayerSpec, blocks.NomicEncoderLayerSpec):
        with pytest.raises(TypeError, match="Spec got multiple values for 'hidden_size'"):
            layer("a", 8, 2, 4, hidden_size=16)
        with pytest.raises(TypeError, match="takes at most 7 positional arguments, got 8; pass others by name"):
            layer("a", 8, 2, 4, 1e-5, None, "gelu", "mpnet")


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


def test_vectors_that_are_not_finite() -> None:
    """Are an error that names them; the others are whole."""
    weights = dict(case("bert/bare_v5").encoder.model.weights())
    (key,) = (k for k in weights if k.endswith("word_embeddings.weight"))
    table = np.array(weights[key])
    table[7] = np.nan
    recipe = recipe_for(BARE)
    encoder = rlx.Encoder(recipe.assemble(), rlx.open_weights({**weights, key: table}, on_nonfinite="ignore"))
    with pytest.raises(errors.NumericsError, match=r"2 of 4 .*'texts\[1\]', 'texts\[3\]'$") as told:
        encoder.embed([[1, 2], [3, 7], [4], [7]])
    first, _, third, _ = told.value.outputs
    assert told.value.rows == {1: 0, 3: 0}
    np.testing.assert_array_equal([np.asarray(first), np.asarray(third)], encoder.embed([[1, 2], [4]]))


def test_positions_begin_behind_the_padding() -> None:
    """There are as many fewer of them, and one more token is an error."""
    assert (recipe_for(XLM).max_positions, recipe_for(MPNET).max_positions) == (43, 42)
    for directory, known in ((XLM, 43), (MPNET, 42), (NOMIC, 44), (BARE, 40)):
        encoder: Any = load(directory, head=False)
        assert encoder.max_positions == known
        with pytest.raises(errors.SequenceLengthError, match=f"{known + 1} positions, the model has {known}"):
            encoder.hidden_states(np.full((1, known + 1), 5, np.int32))
    model: Any = rlx.compile(rlx.from_pretrained(XLM))  # which is told no limit, and finds it
    with pytest.raises(errors.SequenceLengthError, match="43"):
        model(np.full((1, 44), 5, np.int32))


LIVE = {
    "bert": (301, 307, 310), "roberta": (301, 302, 308, 313), "mpnet": (302, 305, 311), "nomic_bert": (301, 308, 313),
}  # fmt: skip
"""Seeds: those whose checkpoints have the most kinds of fields between them."""


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "seed"), [(family, seed) for family, seeds in LIVE.items() for seed in seeds])
def test_live_hidden_states(family: str, seed: int, tmp_path: Path) -> None:
    """Fresh random checkpoints equal `transformers`; MPNet in rows longer than every bucket of distances is wide."""
    directory = tmp_path / "checkpoint"
    model = encoders.written(encoders.random_encoder(family, seed), directory)
    encoder: Any = load(directory, head=False)
    compiled: Any = rlx.compile(rlx.from_pretrained(directory, head=False))
    width = 150 if family == "mpnet" else 60
    inputs: dict[str, Any] = encoders.drawn_inputs(model.config, np.random.default_rng(seed), width)
    tokens, lengths = inputs.pop("tokens"), inputs.pop("lengths")
    assert_close(encoder.hidden_states(tokens), hugging_face.bert_hidden(model, tokens))
    mask = (np.arange(tokens.shape[1])[None] < lengths[:, None]).astype(np.int32)
    want = hugging_face.bert_hidden(model, tokens, attention_mask=mask)
    assert_rows_close(encoder.hidden_states(tokens, lengths), want, lengths)
    assert_close(compiled(input_ids=tokens, **inputs), hugging_face.bert_hidden(model, tokens, **inputs))


@pytest.mark.oracle
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_live_activations(activation: str, tmp_path: Path) -> None:
    """Every one that is known is transformers' own."""
    directory = checkpoints.edited(BARE, tmp_path / activation, {"hidden_act": activation})
    encoder = load(directory, head=False)
    tokens = load_record(BARE)["tokens"]
    want = hugging_face.bert_hidden(hugging_face.load(directory, "AutoModel"), tokens)
    assert_close(encoder.hidden_states(tokens), want)


TEXTS = ["", "a river of stone", "The Lantern and the window", "unknown words", "garden " * 60, "one two three"]


@pytest.mark.oracle
@pytest.mark.parametrize("modes", [["mean"], ["cls"]], ids=str)
@pytest.mark.parametrize("directory", [ROBERTA, MPNET], ids=lambda d: d.parent.name)
def test_live_sentences(directory: Path, modes: list[str], tmp_path: Path) -> None:
    """A directory of sentence-transformers embeds as sentence-transformers does."""
    base = checkpoints.copy(directory, tmp_path / "base")
    encoders.write_tokenizer(base)
    options: dict[str, Any] = {"spelling": "new", "sentence": {}} if modes == ["cls"] else {}
    target = checkpoints.sentence_directory(base, tmp_path / "st", modes=modes, normalise=modes == ["mean"], **options)
    checkpoints.edit_json(target / "sentence_bert_config.json", {"max_seq_length": 40})
    theirs = importlib.import_module("sentence_transformers").SentenceTransformer(str(target), device="cpu")
    want = theirs.encode(TEXTS, show_progress_bar=False)
    assert_close(load(target).embed(TEXTS), want)
