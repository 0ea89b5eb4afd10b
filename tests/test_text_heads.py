"""Heads of token classification, question answering and masked language models, against transformers' pipelines."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode import embedding, tagging
from rlx_jax.encode.answering import QuestionAnswerer
from rlx_jax.encode.masked import MaskedLM
from rlx_jax.encode.tagging import TaggedSpan, TokenClassifier
from rlx_jax.text.spans import encode_spans
from rlx_jax.text.tokenizer import Tokenizer
from tests.opening import load
from tests.oracles import checkpoints, hugging_face, text_heads
from tests.oracles.comparing import assert_close
from tests.oracles.text_heads import AGGREGATIONS, CONTEXTS, MASKED, MASKS, QUESTIONS, SEARCHES, TEXTS

ARCHIVES = (text_heads.ARCHIVE,)


@pytest.fixture(scope="module")
def models(directories: Path) -> dict[str, Any]:
    return {name: load(directories / name) for name in text_heads.RECORDED}


def recorded(directories: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directories / name / "recorded.json").read_text())
    return found


def assert_parts(ours: list[Any], theirs: list[Any], *names: str) -> None:
    """Compare results with rows of a record, attribute by attribute; scores approximately."""
    assert len(ours) == len(theirs), (ours, theirs)
    for result, row in zip(ours, theirs, strict=True):
        values = dict(zip(names, row, strict=True))
        assert result.score == pytest.approx(values.pop("score"), rel=1e-4)
        assert {name: getattr(result, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "kind"), [("tags", TokenClassifier), ("answers", QuestionAnswerer), ("masks", MaskedLM)]
)
def test_recorded_logits(directories: Path, models: dict[str, Any], name: str, kind: type[Any]) -> None:
    """The class that the config names, and the logits of each token."""
    record, model = recorded(directories, name), models[name]
    assert type(model) is kind
    rows = model.run_texts(record["ids"]) if name == "answers" else model.logits(record["ids"])
    for row, expected in zip(rows, record["logits"], strict=True):
        assert_close(row, np.array(expected))


@pytest.mark.slow
def test_other_layouts(directories: Path, models: dict[str, Any], tmp_path: Path) -> None:
    """Padded rows in buckets, rows over eight devices, and a saved directory give the same tokens for masks."""
    rlx.save(models["masks"], tmp_path / "saved")
    stored = [load_file(root / "model.safetensors").keys() for root in (tmp_path / "saved", directories / "masks")]
    assert stored[0] == stored[1]
    profile = rlx.CompileProfile().replace(buckets={"batch": [1, 8], "prompt": [16, 32]})
    others = [load(directories / "masks", **options) for options in ({"profile": profile}, {"mesh": 8})]
    for model in (*others, load(tmp_path / "saved")):
        for ours, theirs in zip(model.fill(MASKS), recorded(directories, "masks")["fill"], strict=True):
            for mask, rows in zip(ours, theirs, strict=True):
                assert_parts(mask, rows, "id", "token", "text", "score")
    encoder = load(directories / "masks", head=False)
    assert type(encoder) is rlx.Encoder and encoder.hidden_states(np.array([[2, 7, 3]])).shape == (1, 3, 20)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_tags(directories: Path, models: dict[str, Any], aggregation: str) -> None:
    record = recorded(directories, "tags")[aggregation]
    for text, ours, theirs in zip(TEXTS, models["tags"].tag(TEXTS, aggregation=aggregation), record, strict=True):
        assert_parts(ours, theirs, "label", "score", "start", "end")
        assert all(part.text == text[part.start : part.end] for part in ours)


def test_tags_of_a_slow_first_chunk(directories: Path, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are in the order of the texts, although the second chunk is encoded before the first."""
    encoded = threading.Event()

    def encode(tokenizer: Tokenizer, texts: Sequence[str], length: int | None, overlap: int | None, first: int) -> Any:
        encoded.set() if first else encoded.wait(10)
        return encode_spans(tokenizer, texts, length, overlap, first)

    monkeypatch.setattr(tagging, "encode_spans", encode)
    monkeypatch.setattr(embedding, "TEXTS_OF_FIRST_CHUNK", 2)
    for ours, theirs in zip(models["tags"].tag(TEXTS), recorded(directories, "tags")["simple"], strict=True):
        assert_parts(ours, theirs, "label", "score", "start", "end")


def test_tags_of_long_texts(directories: Path, models: dict[str, Any]) -> None:
    """Windows; labels that are left out; and one text."""
    model = models["tags"]
    for ours, theirs in zip(model.tag(TEXTS, overlap=4), recorded(directories, "tags")["overlap"], strict=True):
        assert_parts(ours, theirs, "label", "score", "start", "end")
    parts: list[TaggedSpan] = model.tag(TEXTS[4], ignore_labels=())
    assert {p.label for p in parts} == {"A", "B", "O"}
    for kept in ("AB", "B"):
        ours = model.tag(TEXTS[4], ignore_labels=[*{*"ABO"}.difference(kept)])
        assert ours == [part for part in parts if part.label in kept]


def test_tags_of_padded_rows(directories: Path, models: dict[str, Any]) -> None:
    """Padding has logits and no parts."""
    recipe, tokenizer = rlx.recipe_for(directories / "tags"), models["tags"].tokenizer
    model = TokenClassifier(recipe, {}, missing="init", key=0, tokenizer=tokenizer, padding=(24, 0))
    for text, parts in zip(TEXTS[:3], model.tag(TEXTS[:3], aggregation="none", ignore_labels=()), strict=True):
        logits = model.logits(text)[1 : 1 + len(parts)]
        assert len(model.logits(text)) == 24 and len(parts) == min(22, len(tokenizer.encode(text)) - 2)
        assert [part.label for part in parts] == [model.labels[i] for i in logits.argmax(axis=1)]


@pytest.mark.parametrize("index", range(len(SEARCHES)))
def test_answers(directories: Path, models: dict[str, Any], index: int) -> None:
    """Best spans, over windows of long contexts; the pipeline also returns parts of probability 0."""
    record = json.loads((directories / "answers" / "answers.json").read_text())[index]
    model, options = models["answers"], SEARCHES[index][0]
    results = model.answer(QUESTIONS, CONTEXTS, **options)
    for context, ours, theirs in zip(CONTEXTS, results, record, strict=True):
        assert_parts(ours, [row for row in theirs if row[1]], "text", "score", "start", "end")
        assert all(answer.text == context[answer.start : answer.end] for answer in ours)
    best = [model.answer(QUESTIONS[1], CONTEXTS[1], **(options | {"top_k": k})) for k in (None, 1)]
    assert [best[0]] == best[1]
    for one, other in zip(model.answer(QUESTIONS[:1], CONTEXTS[0], **options)[0], results[0], strict=True):
        assert_parts([one], [(other.text, other.score)], "text", "score")


def test_fillings(directories: Path, models: dict[str, Any]) -> None:
    """The most probable tokens for each of several masks, also among a few."""
    record, model = recorded(directories, "masks"), models["masks"]
    for name, options in (("fill", {}), ("targets", {"targets": ["a", "k"], "top_k": 2})):
        for ours, theirs in zip(model.fill(MASKS, **options), record[name], strict=True):
            for mask, rows in zip(ours, theirs, strict=True):
                assert_parts(mask, rows, "id", "token", "text", "score")
    assert [len(m) for m in model.fill(MASKS[1], top_k=3)] == [3, 3, 3] and model.fill([]) == []
    assert [len(model.fill("[MASK] " * n)) for n in (1, 20, 4)] == [1, 20, 4]  # more than the program is compiled for
    assert [f.id for f in model.fill(MASKS[0], top_k=10**6)[0]][:5] == [f.id for f in model.fill(MASKS[0])[0]]
    many = model.fill([MASKS[0], "[MASK] " * 20] * 20)
    assert len(many[1]) == 20 and [f.id for f in many[0][0]] == [f.id for f in model.fill(MASKS[0])[0]]


def test_programs(directories: Path) -> None:
    """What `warmup` compiles suffices; the report is of the task's request."""
    model = load(directories / "masks")
    model.warmup()
    model.fill(MASKS)
    report = model.report()
    assert not report.recompiles and report.request is not None and report.request.rows == len(MASKS)
    assert repr(model).startswith("MaskedLM(bert")


@pytest.mark.slow
def test_times_and_padded_programs(directories: Path, models: dict[str, Any]) -> None:
    """Times and explanations are of the task's request; programs of buckets suffice, too."""
    model = models["masks"]
    assert model.profile(MASKS).programs and model.explain(batch=1, tokens=8, runs=1).program == "packed"
    profile = rlx.CompileProfile().replace(buckets={"batch": [1, 4], "prompt": [16]})
    padded = load(directories / "masks", profile=profile)
    padded.warmup()
    assert [len(padded.fill(["[MASK] " * count] * 3)[2]) for count in (1, 2, 9)] == [1, 2, 9]
    assert not padded.report().recompiles


def test_masks_without_a_tokenizer(directories: Path) -> None:
    """No token is a mask, so that a run returns the logits of all tokens."""
    model, ids = MaskedLM(rlx.recipe_for(directories / "masks"), {}, missing="init", key=0), [[2, 7, 3]]
    np.testing.assert_array_equal(model.run_texts(ids)[0], model.logits(ids)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_separate_projections(directories: Path, tied: bool, tmp_path: Path) -> None:
    """A projection of its own counts, whether the config ties it or not; without it, an untied config is refused."""
    copy = checkpoints.edited(directories / "masks", tmp_path / "copy", {"tie_word_embeddings": tied})
    weights = load_file(copy / "model.safetensors")
    base = load(directories / "masks").logits(TEXTS[0])
    if not tied:
        with pytest.raises(errors.MissingWeightError, match="cls.predictions.decoder.weight.*head=False"):
            load(copy)
    table, bias = weights["bert.embeddings.word_embeddings.weight"], weights["cls.predictions.bias"]
    weights |= {"cls.predictions.decoder.weight": 2 * table, "cls.predictions.decoder.bias": 2 * bias}
    save_file(weights, copy / "model.safetensors")
    assert_close(load(copy).logits(TEXTS[0]), 2 * base)


def test_errors_count_in_the_whole_list(directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the chunk; and texts, not their windows, such as of a model with an embedding that is not finite."""
    monkeypatch.setattr("rlx_jax.encode.masked.MAX_PROBABILITIES", 16)
    tags, masks = (load(directories / name) for name in ("tags", "masks"))
    with pytest.raises(errors.RequestError, match=r"texts\[3\] has no \[MASK\]"):
        masks.fill(["[MASK] a"] * 3 + ["a"])
    name = next(key for key in tags.model.params if key.endswith("word_embeddings.weight"))
    word = tags.tokenizer.encode("b", add_special_tokens=False)[0]
    tags.model = tags.model.replace({**tags.model.params, name: tags.model.params[name].at[word].set(np.nan)})
    with pytest.raises(errors.NumericsError, match=r"are not finite: 'texts\[2\]'$") as failed:
        tags.tag(["a c " * 20, "c", "b c"], overlap=2)
    assert [*failed.value.rows] == [2]


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "task"), [(name, task) for name, tasks in text_heads.TASKS.items() for task in tasks])
def test_live(name: str, task: str, tmp_path: Path) -> None:
    """Every class: the logits of ragged rows, and of the saved directory in transformers."""
    architecture, fields = text_heads.live_case(name, task)
    theirs, ours = text_heads.write(architecture, fields, tmp_path / "made"), load(tmp_path / "made")
    rng = np.random.default_rng(1)
    rows = [rng.integers(6, 44, n).tolist() for n in (9, 1, 21, 4)]
    expected = [text_heads.logits(theirs, row) for row in rows]
    for row, reference in zip(ours.logits(rows) if task == MASKED else ours.run_texts(rows), expected, strict=True):
        assert_close(row, reference)
    rlx.save(ours, tmp_path / "saved")
    saved = hugging_face.load(tmp_path / "saved", architecture)
    for (key, before), after in zip(theirs.state_dict().items(), saved.state_dict().values(), strict=True):
        np.testing.assert_array_equal(after.numpy(), before.numpy(), key)
    for row, reference in zip(rows, expected, strict=True):
        assert_close(text_heads.logits(saved, row), reference)  # PyTorch's own results differ in the last bit
