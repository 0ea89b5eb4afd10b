"""Rerankers that are decoders: the logits of tokens, prompts and chat templates, against sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode.classifier import Reranker
from rlx_jax.encode.cross_encoder import PairTemplate
from rlx_jax.encode.decoder_reranker import QWEN3_TEMPLATE, decoder_reranker
from rlx_jax.encode.sentence import LOGITS_MODALITY
from tests.opening import load, recipe_for
from tests.oracles import embedders
from tests.oracles.classifiers import SECOND, TEXTS
from tests.oracles.comparing import assert_close

PAIRS = [*zip(TEXTS, SECOND, strict=True)]


ARCHIVES = (embedders.ARCHIVE,)


@pytest.fixture(scope="module")
def directory(directories: Path) -> Path:
    return directories / "reranker"


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return load(directory)


def test_recorded_scores(directory: Path, model: Any, tmp_path: Path) -> None:
    """With the default prompt and without; long pairs end as the template does; what is saved is a reranker again."""
    record = {name: np.array(rows) for name, rows in json.loads((directory / "recorded.json").read_text()).items()}
    assert isinstance(model, Reranker) and model.classifier.encoder.packing == ""
    assert_close(model.score(PAIRS), record["web"])
    assert_close(model.score(PAIRS, prompt=""), record["plain"])
    assert_close(model.score(PAIRS, prompt_name="none"), record["plain"])
    ranked = model.rank(TEXTS[0], SECOND, top_k=3, prompt_name="none")
    scores = model.score([(TEXTS[0], text) for text in SECOND], prompt="")
    assert [row.index for row in ranked] == np.argsort(-scores)[:3].tolist()
    rlx.save(model, tmp_path / "saved")
    np.testing.assert_array_equal(load(tmp_path / "saved").score(PAIRS), model.score(PAIRS))


def test_without_the_score(directory: Path) -> None:
    """`head=False` gives hidden states, and the recipe is that of the causal model."""
    assert load(directory, head=False).embed(["w1"]).shape == (1, 20)
    assert recipe_for(directory).head is None


def test_a_decoder_as_a_reranker(directory: Path, model: Any) -> None:
    """The function makes the same of the recipe, the answers and the template."""
    tokenizer = model.tokenizer
    made = decoder_reranker(
        recipe_for(directory), tokenizer, answers=(tokenizer.decode([7]), tokenizer.decode([9])),
        template=embedders.TEMPLATE, prompt="w5 w6", max_seq_length=24,
    )  # fmt: skip
    assert_close(made.score(PAIRS), model.score(PAIRS).astype(np.float64))
    (text,) = PairTemplate(tokenizer, QWEN3_TEMPLATE)._render([("a\n", " b")], "c")
    assert text.startswith("<|im_start|>system\nJudge whether") and text.endswith(
        "<|im_end|>\n<|im_start|>user\n<Instruct>: c\n<Query>: a\n\n<Document>:  b<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    for answers, message in ((("w1 w2", "w3"), "'w1 w2' are not one token"), ((), "expected one or two")):
        with pytest.raises(errors.RequestError, match=message):
            decoder_reranker(recipe_for(directory), tokenizer, answers=answers)


OTHER = {"text": LOGITS_MODALITY, "message": {**LOGITS_MODALITY, "format": "other"}}


@pytest.mark.oracle
@pytest.mark.parametrize("name", embedders.RERANKERS)
def test_live(name: str, tmp_path: Path) -> None:
    """Scores and ranks of a directory that a CrossEncoder over a causal model wrote."""
    theirs, ours = embedders.write_reranker(name, tmp_path / "st"), load(tmp_path / "st")
    for prompt in ({}, {"prompt": "w9 "}, {"prompt_name": "web"}):
        assert_close(ours.score(PAIRS, **prompt), np.array(embedders.scores(theirs, **prompt)))
    ranks = [row["corpus_id"] for row in theirs.rank(TEXTS[0], SECOND)]
    assert [row.index for row in ours.rank(TEXTS[0], SECOND)] == ranks
