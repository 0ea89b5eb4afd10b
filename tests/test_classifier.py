"""Heads of sequence classification and rerankers, decoders too: against what transformers recorded and computes."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.encode.classifier import Classifier, Reranker
from rlx_jax.encode.cross_encoder import PairTemplate
from rlx_jax.encode.decoder_reranker import QWEN3_TEMPLATE, decoder_reranker
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.models.encoder import MULTI_LABEL, REGRESSION
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, classifiers, embedders, hugging_face
from tests.oracles.classifiers import SECOND, TEXTS
from tests.oracles.comparing import assert_close, assert_same_model

SLOW = pytest.mark.slow
BUCKETS = {"buckets": {"batch": [1, 8], "prompt": [16, 32]}}
ARCHIVES = (classifiers.ARCHIVE, embedders.ARCHIVE)


def recorded(directory: Path) -> dict[str, np.ndarray]:
    return {name: np.array(rows) for name, rows in json.loads((directory / "recorded.json").read_text()).items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "bert" else SLOW) for n in classifiers.RECORDED])
def test_recorded_logits(directories: Path, name: str, tmp_path: Path) -> None:
    """Of texts and of pairs, in any company, and, for one encoder, after a save."""
    model, record = load(directories / name), recorded(directories / name)
    assert_close(model.logits(TEXTS), record["texts"])
    assert_close(model.logits(TEXTS, SECOND), record["pairs"])
    if name != "bert":
        return
    assert_close(model.logits(TEXTS[2]), record["texts"][2])
    assert_close(model.logits(TEXTS[3], SECOND[3]), record["pairs"][3])
    rlx.save(model, tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert_same_model(saved, model)
    assert saved.head == model.head
    assert Classifier(rlx.recipe_for(directories / name), head=None).labels == model.labels  # a recipe brings its head


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_other_layouts(directories: Path, name: str) -> None:
    """Padded rows in buckets, with the types of pairs, and rows over eight devices have the logits of packed rows."""
    record = recorded(directories / name)
    buckets = {"profile": rlx.CompileProfile().replace(**BUCKETS)}
    model = load(directories / name, **(buckets if name == "bert" else {"mesh": 8}))
    assert_close(model.logits(TEXTS), record["texts"])
    assert_close(model.logits(TEXTS, SECOND), record["pairs"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "qwen3", "rerank")])
def test_programs(directories: Path, name: str) -> None:
    """What `warmup` compiles suffices for texts and for pairs, few and many in a call; the end of the model, which
    begins with attention if that is not causal, is computed for the tokens that are pooled alone."""
    model, pairs = load(directories / name), [*zip(TEXTS, SECOND, strict=True)] * 40
    model.warmup()
    if name == "rerank":
        results = model.score(pairs)
    else:
        results = model.logits([a for a, _ in pairs], [b for _, b in pairs])
        texts = model.logits(TEXTS * 40)
        assert_close(texts, np.tile(model.logits(TEXTS), (40, 1)).astype(np.float64))
    assert_close(results, np.concatenate([results[: len(TEXTS)]] * 40).astype(np.float64))
    assert not model.report().recompiles
    nodes = model.model.programs.template(model.model.last_key.symbolic).mir.nodes
    last = max(i for i, node in enumerate(nodes) if node.op.text().startswith("attention"))
    products = [str(node.types[0]) for node in nodes[last:] if isinstance(node.op, MatMul | FusedMatMulBiasAct)]
    assert ("selected" in str(nodes[last].types[0])) == (name != "qwen3")
    assert len(products) > 2 and all("selected" in text for text in products)


def test_scores(directories: Path) -> None:
    """Softmax of one label per text; the sigmoid of each of several; a regression has none."""
    model = load(directories / "bert")
    logits = model.logits(TEXTS).astype(np.float64)
    results = model.classify(TEXTS)
    for row, result in zip(logits, results, strict=True):
        weights = np.exp(row - row.max())
        expected = dict(zip(("no", "perhaps", "yes"), weights / weights.sum(), strict=True))
        assert list(result.scores) == sorted(expected, key=lambda label: -expected[label])
        assert result.scores == pytest.approx(expected, rel=1e-5)
        assert (result.label, result.score) == next(iter(result.scores.items()))
    assert model.classify(TEXTS[0]) == results[0]
    assert [*model.classify(TEXTS[0], top_k=2).scores] == [*results[0].scores][:2]
    several = load(directories / "qwen3")
    assert several.head.problem == MULTI_LABEL
    probabilities = 1 / (1 + np.exp(-several.logits(TEXTS).astype(np.float64)))
    for row, result in zip(probabilities, several.classify(TEXTS), strict=True):
        assert result.scores == pytest.approx({f"LABEL_{i}": p for i, p in enumerate(row)}, rel=1e-5)
        assert set(result.labels_above(0.4)) == {f"LABEL_{i}" for i, p in enumerate(row) if p > 0.4}


def test_reranker(directories: Path, tmp_path: Path) -> None:
    """A directory of a CrossEncoder: its scores, and the order that they give; another activation changes them."""
    model, scores = load(directories / "rerank"), recorded(directories / "rerank")["scores"]
    assert isinstance(model, Reranker)
    assert_close(model.score([*zip(TEXTS, SECOND, strict=True)]), scores)
    ranked = model.rank(TEXTS[1], SECOND, top_k=4)
    of_pairs = model.score([(TEXTS[1], text) for text in SECOND])
    assert [r.index for r in ranked] == np.argsort(-of_pairs).tolist()[:4]
    assert [r.score for r in ranked] == [float(of_pairs[r.index]) for r in ranked]
    assert [r.text for r in ranked] == [SECOND[r.index] for r in ranked] and model.rank("w1", []) == []
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    for file, changes in (
        ("config_sentence_transformers.json", identity),
        ("config.json", {"sentence_transformers": identity}),
        ("config.json", {"sbert_ce_default_activation_function": identity["activation_fn"]}),
    ):
        copy = checkpoints.copy(directories / "rerank", tmp_path / f"{len([*tmp_path.iterdir()])}")
        if file == "config.json":
            (copy / "config_sentence_transformers.json").unlink()
            (copy / "modules.json").unlink()
        checkpoints.edit_json(copy / file, changes)
        for architectures in ([], ["BertModel"]):  # the other files say what it is
            checkpoints.edit_json(copy / "config.json", {"architectures": architectures})
            raw = load(copy).score([*zip(TEXTS, SECOND, strict=True)])
            assert_close(1 / (1 + np.exp(-raw)), scores)


@pytest.mark.parametrize(("field", "kind"), [("problem_type", Classifier), ("finetuning_task", Reranker)])
def test_one_label(directories: Path, field: str, kind: type, tmp_path: Path) -> None:
    """One label scores pairs, unless the config says that it is a regression, which is not squashed."""
    copy = checkpoints.copy(directories / "rerank", tmp_path / "copy")
    for name in ("config_sentence_transformers.json", "modules.json"):
        (copy / name).unlink()
    checkpoints.edit_json(copy / "config.json", {field: REGRESSION})
    model = load(copy)
    assert type(model) is kind
    if isinstance(model, Classifier):
        assert model.classify(TEXTS[0]).score == float(model.logits(TEXTS[0])[0])


def test_without_the_head(directories: Path) -> None:
    """`head=False` gives hidden states; a decoder too."""
    for name in ("bert", "qwen3"):
        encoder = load(directories / name, head=False)
        assert type(encoder) is rlx.Encoder and encoder.hidden_states(np.array([[2, 7, 3]])).shape == (1, 3, 20)
        encoder = load(directories / name, head=False, recipe=rlx.recipe_for(directories / name))
        assert type(encoder) is rlx.Encoder and encoder.embed(["w1"]).shape == (1, 20)


def test_heads_that_do_not_match(directories: Path, tmp_path: Path) -> None:
    """A recipe with other labels is refused; a checkpoint without the head's weights says how to load it."""
    named = checkpoints.edited(directories / "bert", tmp_path / "named", {"id2label": {"0": "a", "1": "b", "2": "c"}})
    with pytest.raises(errors.ConfigError, match="'a'.*'b'.*'c'.*'no'.*'perhaps'.*'yes'"):
        load(directories / "bert", recipe=rlx.recipe_for(named))
    weights = load_file(named / "model.safetensors")
    save_file({k: w for k, w in weights.items() if not k.startswith("classifier")}, named / "model.safetensors")
    with pytest.raises(errors.MissingWeightError, match="rlx_jax.load.*head=False"):
        load(named)
    assert load(named, head=False).embed(["w1"]).shape == (1, 20)


def test_padding_at_the_end(directories: Path) -> None:
    """A decoder's logits are read at the last token that is not padding, as in transformers; a row has one token."""
    model = load(directories / "qwen3")
    assert model.head.padding_id == 0
    padded, rows = [[5, 0, 7, 0, 0], [0, 0], [6]], [[5, 0, 7], [0], [6]]
    assert_close(model.logits(padded), model.logits(rows))
    assert_close(model.logits(iter(padded)), model.logits(rows))


def test_tokenizers_without_types(directories: Path, tmp_path: Path) -> None:
    """Token types of pairs are 0 where the tokenizer's files say that the model gets none."""
    model = load(directories / "bert")
    rows = [row.tolist() for row in model.tokenizer.encode_rows([*zip(TEXTS, SECOND, strict=True)], max_length=24)[0]]
    untyped = model.logits(rows)
    assert np.abs(untyped - model.logits(TEXTS, SECOND)).max() > 0.01
    changes: list[dict[str, Any]] = [{"model_input_names": ["input_ids"]}, {"tokenizer_class": "DistilBertTokenizer"}]
    for i, change in enumerate(changes):
        copy = checkpoints.copy(directories / "bert", tmp_path / str(i))
        checkpoints.edit_json(copy / "tokenizer_config.json", change)
        assert_close(load(copy).logits(TEXTS, SECOND), untyped)


def test_settings_of_cross_encoders(directories: Path, tmp_path: Path) -> None:
    """The length in sentence_bert_config.json counts."""
    pairs, scores = [*zip(TEXTS, SECOND, strict=True)], []
    for file, name in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        copy = checkpoints.copy(directories / "rerank", tmp_path / name)
        checkpoints.edit_json(copy / file, {name: 10})
        scores.append(load(copy).score(pairs))
    assert_close(*scores)
    assert np.abs(scores[0] - recorded(directories / "rerank")["scores"]).max() > 0.001


def test_labels_of_one_name_get_numbers(directories: Path, tmp_path: Path) -> None:
    names = {"id2label": {"0": "a", "1": "b", "2": "a"}}
    assert load(checkpoints.edited(directories / "bert", tmp_path / "c", names)).labels == ("a (0)", "b", "a (2)")


@pytest.mark.oracle
@pytest.mark.parametrize("name", classifiers.CASES)
def test_live(name: str, tmp_path: Path) -> None:
    """Every class: the logits of texts and of pairs, and the scores of transformers' pipeline."""
    theirs, ours = classifiers.write(name, tmp_path), load(tmp_path)
    ours = getattr(ours, "classifier", ours)
    assert_close(ours.logits(TEXTS), np.array(classifiers.logits(theirs)))
    assert_close(ours.logits(TEXTS, SECOND), np.array(classifiers.logits(theirs, SECOND)))
    if name == "gpt2":  # the pipeline gives it the tokenizer's token types, which GPT-2 takes for words
        return
    transformers = importlib.import_module("transformers")
    pipeline = transformers.pipeline("text-classification", theirs, tokenizer=classifiers.tokenizer(), top_k=None)
    for text, result in zip(TEXTS, ours.classify(TEXTS), strict=True):
        (rows,) = pipeline([text], truncation=True)
        assert result.scores == pytest.approx({row["label"]: row["score"] for row in rows}, rel=1e-4, abs=1e-6)


MODERN = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 6}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "labels", "activation"),
    [("Bert", 1, None), ("Bert", 1, "Identity"), ("Bert", 3, None), ("XLMRoberta", 1, None), ("ModernBert", 1, None)],
)
def test_live_cross_encoders(family: str, labels: int, activation: str | None, tmp_path: Path) -> None:
    """Scores and ranks of a directory that a CrossEncoder wrote, as ms-marco's, bge-reranker's and ModernBERT's are."""
    torch, library = (importlib.import_module(name) for name in ("torch", "sentence_transformers"))
    base = {"XLMRoberta": classifiers.SHIFTED | {"type_vocab_size": 2}, "ModernBert": classifiers.ENCODER | MODERN}
    fields = base.get(family, classifiers.ENCODER) | {"num_labels": labels}
    architecture = f"{family}ForSequenceClassification"
    hugging_face.write(hugging_face.Checkpoint(architecture, fields, seed=9), tmp_path / "base")
    classifiers.tokenizer().save_pretrained(tmp_path / "base")
    function = None if activation is None else getattr(torch.nn, activation)()
    theirs = library.CrossEncoder(str(tmp_path / "base"), device="cpu", activation_fn=function)
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours, pairs = load(tmp_path / "saved"), [*zip(TEXTS, SECOND, strict=True)]
    if labels > 1:
        assert_close(ours.pair_logits(pairs), theirs.predict(pairs))
        return
    assert_close(ours.score(pairs), theirs.predict(pairs))
    ranks = [row["corpus_id"] for row in theirs.rank(TEXTS[0], SECOND)]
    assert [row.index for row in ours.rank(TEXTS[0], SECOND)] == ranks


PAIRS = [*zip(TEXTS, SECOND, strict=True)]


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


@pytest.mark.oracle
@pytest.mark.parametrize("name", embedders.RERANKERS)
def test_live_decoder(name: str, tmp_path: Path) -> None:
    """Scores and ranks of a directory that a CrossEncoder over a causal model wrote."""
    theirs, ours = embedders.write_reranker(name, tmp_path / "st"), load(tmp_path / "st")
    for prompt in ({}, {"prompt": "w9 "}, {"prompt_name": "web"}):
        assert_close(ours.score(PAIRS, **prompt), np.array(embedders.scores(theirs, **prompt)))
    ranks = [row["corpus_id"] for row in theirs.rank(TEXTS[0], SECOND)]
    assert [row.index for row in ours.rank(TEXTS[0], SECOND)] == ranks
