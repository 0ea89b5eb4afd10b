"""Losses of labels against optax, and training of heads against a step by hand and against transformers."""

import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlx_jax as rlx
from rlx_jax import errors, losses, train
from rlx_jax.blocks import Custom, Embed, Linear
from rlx_jax.encode.classifier import Classifier
from rlx_jax.models.encoder import ANSWER, MULTI_LABEL, REGRESSION, SEQUENCE, HeadLayer, TaskHead
from tests.opening import load
from tests.oracles import classifiers, hugging_face
from tests.oracles.classifiers import SECOND, TEXTS
from tests.oracles.comparing import assert_close
from tests.test_classifier import recorded

RNG = np.random.default_rng(0)
IDS = RNG.integers(5, 45, (4, 6)).astype(np.int32)
LENGTHS = np.array([6, 2, 5, 1], np.int32)
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5], np.float32)
MULTI = RNG.integers(0, 2, (4, 3)).astype(np.float32)
LAYERS = (HeadLayer("w"),)


@functools.cache
def small(head: TaskHead | None, width: int = 3) -> tuple[rlx.CompiledModel, dict[str, Any]]:
    """An embedding, a function and a head, without attention."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (45, 8)))
    flow = flow.stage(Custom(lambda emit, x: emit.tanh(x)), Linear("w", shape=(width, 8)))
    model = rlx.compile(flow._with_outputs(label_head=head), program="train")
    return model, model.init(0)


def head(pooling: str = "cls", padding_id: int | None = None, problem: str = "", task: str = SEQUENCE) -> TaskHead:
    return TaskHead(task, LAYERS, ("a", "b", "c"), problem, pooling, padding_id)


nll, bce = optax.softmax_cross_entropy_with_integer_labels, optax.sigmoid_binary_cross_entropy
ENDS = LENGTHS - 1
CASES: dict[str, tuple[TaskHead, dict[str, Any], Any]] = {
    "one label": (head(), {"labels": np.array([2, -100, 0, 1])},
                  lambda z: nll(z[:, 0], jnp.array([2, 0, 0, 1])) @ jnp.array([1.0, 0.0, 1.0, 1.0]) / 3),
    "weights": (head(), {"labels": np.array([2, 1, 0, 1]), "weights": WEIGHTS},
                lambda z: nll(z[:, 0], jnp.array([2, 1, 0, 1])) @ WEIGHTS / 3.5),
    "the last token": (head("lasttoken"), {"labels": np.array([2, 1, 0, 1])},
                       lambda z: nll(z[np.arange(4), ENDS], jnp.array([2, 1, 0, 1])).mean()),
    "before the padding id": (head("lasttoken", int(IDS[2, 4])), {"labels": np.array([-1, -1, 0, -1])},
                              lambda z: nll(z[2, 3], jnp.array(0))),
    "a mask": (head("lasttoken"), {"labels": np.array([2, 1, 0, 1]), "lengths": None},
               lambda z: nll(z[:, 5], jnp.array([2, 1, 0, 1])).mean()),
    "floats": (head(), {"labels": MULTI}, lambda z: bce(z[:, 0], MULTI).mean()),
    "several labels": (head(problem=MULTI_LABEL), {"labels": MULTI.astype(int)}, lambda z: bce(z[:, 0], MULTI).mean()),
    "a regression": (head(problem=REGRESSION), {"labels": MULTI}, lambda z: ((z[:, 0] - MULTI) ** 2).mean()),
    "a problem": (head(), {"labels": MULTI, "problem": REGRESSION}, lambda z: ((z[:, 0] - MULTI) ** 2).mean()),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in ("one label", "floats", "a regression"))) for c in CASES]
)
def test_losses_are_those_of_optax(case: str) -> None:
    """Value and gradients, jitted."""
    of_head, arguments, by_hand = CASES[case]
    model, params = small(of_head)
    arguments = {"lengths": LENGTHS} | arguments

    def ours(p: Any) -> Any:
        return losses.classification(model, p, IDS, **arguments)

    (a, of_a), (b, of_b) = (
        jax.jit(jax.value_and_grad(f))(params) for f in (ours, lambda p: by_hand(model.apply(p, IDS)))
    )
    np.testing.assert_allclose(a, b, rtol=1e-6)
    for key, want in of_b.items():
        assert_close(np.asarray(of_a[key]), np.asarray(want), tolerance=1e-5)


def test_spans() -> None:
    """The first and the last token among those of the row."""
    model, params = small(head(task=ANSWER), width=2)
    labels, z = np.array([[1, 3], [0, 1], [-1, -1], [0, 0]]), np.asarray(jax.jit(model.apply)(params, IDS), np.float64)
    own = [(z[i, : LENGTHS[i], j], labels[i, j]) for j in (0, 1) for i in (0, 1, 3)]
    rows = [np.log(np.exp(x).sum()) - x[label] for x, label in own]
    got = jax.jit(lambda p: losses.span(model, p, IDS, labels=labels, lengths=LENGTHS))(params)
    np.testing.assert_allclose(got, np.mean(rows), rtol=1e-6)
    step = train.make_step(model, optax.sgd(0.1), losses.span)
    _, metrics = step(train.init(model, optax.sgd(0.1), params), {"tokens": IDS, "labels": labels, "lengths": LENGTHS})
    np.testing.assert_allclose(metrics.loss, got, rtol=1e-6)
    assert metrics.tokens == 3


def test_refusals() -> None:
    """Others are rows of the table of refusals."""
    model, params = small(head())
    step = train.make_step(model, optax.sgd(1.0), losses.classification)
    with pytest.raises(errors.RequestError, match="a batch for this loss has 'labels'"):
        step(train.init(model, optax.sgd(1.0), params), {"tokens": IDS})


ARCHIVES = (classifiers.ARCHIVE,)


NAMES = ["yes", "no", "perhaps", "yes", "no", "no"]


@pytest.mark.slow
def test_fifty_steps_are_those_of_a_loop_by_hand(directories: Path, tmp_path: Path) -> None:
    """Of pairs of texts in padded batches; the first loss is that of the recorded logits of each pair alone. What is
    saved classifies as the trained model."""
    classifier = load(directories / "bert")
    model = rlx.compile(rlx.recipe_for(directories / "bert"), program="train")
    optimizer = optax.adamw(1e-3, eps=1e-4)
    labels = jnp.array([classifier.labels.index(name) for name in NAMES])
    batches = [*classifier.batches(TEXTS, NAMES, SECOND, batch_size=6)]
    (batch,) = batches
    mask = (np.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]).astype(np.int32)
    inputs = {"attention_mask": mask, "token_type_ids": batch["token_type_ids"]}

    @jax.jit
    def next_by_hand(params: Any, memory: Any) -> Any:
        def loss(p: Any) -> Any:
            return nll(model.apply(p, batch["tokens"], **inputs)[:, 0], labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, memory = optimizer.update(gradients, memory, params)
        return value, optax.apply_updates(params, updates), memory

    step, state = train.make_step(model, optimizer, losses.classification), train.init(model, optimizer)
    params, memory = state.params, optimizer.init(state.params)
    params = jax.tree.map(jnp.copy, params)
    ours, theirs = [], []
    for _ in range(50):
        with jax.numpy_dtype_promotion("standard"):
            value, params, memory = next_by_hand(params, memory)
        state, metrics = step(state, batch)
        ours.append(float(metrics.loss))
        theirs.append(float(value))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    logits = recorded(directories / "bert")["pairs"].astype(np.float32)
    np.testing.assert_allclose(ours[0], nll(logits, labels).mean(), rtol=1e-5)
    assert ours[-1] < 0.5 * ours[0] and metrics.tokens == 6
    classifier.model = model.replace(params=state.params)
    rlx.save(classifier, tmp_path / "saved")
    again = load(tmp_path / "saved").logits(TEXTS, SECOND)
    assert_close(classifier.logits(TEXTS, SECOND), again)
    np.testing.assert_allclose(nll(again, labels).mean(), theirs[-1], rtol=0.1)
    assert again.argmax(1).tolist() == labels.tolist()


def test_batches(directories: Path) -> None:
    """Every row once, in an order of the seed; the last batch is filled with rows that do not count."""
    classifier = load(directories / "bert")
    batches = [*classifier.batches(TEXTS, NAMES, batch_size=4, seed=1)]
    assert [b["weights"].tolist() for b in batches] == [[1] * 4, [1, 1, 0, 0]]
    names = ("tokens", "lengths", "labels", "weights")
    rows = {tuple(row[:n]): label for b in batches
            for row, n, label, w in zip(*(b[name].tolist() for name in names), strict=True) if w}  # fmt: skip
    ids = [tuple(classifier.tokenizer.encode(text, max_length=24)) for text in TEXTS]
    assert rows == {i: classifier.labels.index(name) for i, name in zip(ids, NAMES, strict=True)}
    assert all(
        b["tokens"].shape[1] in (16, 32) and not set(b["tokens"][np.arange(4), b["lengths"] - 1]) & {0} for b in batches
    )
    in_order = next(iter(classifier.batches(TEXTS, [0, 1, 2, 0, 1, 2])))
    assert in_order["labels"][:6].tolist() == [0, 1, 2, 0, 1, 2] and in_order["labels"].shape == (16,)
    several = next(iter(load(directories / "qwen3").batches([[5, 0, 0], [6]], np.eye(2, 3))))
    assert several["labels"].dtype == np.float32 and several["lengths"][:2].tolist() == [1, 1]
    calls: list[tuple[dict[str, Any], str]] = [
        ({"labels": [*NAMES[1:], "Yes"]}, "'Yes' is no label; the head has 'no', 'perhaps', 'yes'; did you mean 'yes'"),
        ({"labels": [0, 1, 3, 2, 3, 0]}, r"labels\[2\] is 3; the head has 3 labels, and a negative one is none"),
        ({"labels": NAMES[1:]}, r"of shape \[5\]; expected 6 names or numbers of labels"),
        ({"labels": np.ones((6, 2))}, r"of shape \[6, 2\]; expected numbers \[6, 3\]"),
        ({"labels": NAMES, "batch_size": 0}, "batch_size"),
        ({"labels": NAMES, "seed": -1}, "seed"),
        ({"labels": NAMES, "second_texts": ["w1"]}, "each of 6 texts"),
    ]
    for arguments, message in calls:
        with pytest.raises(errors.RequestError, match=message):
            classifier.batches(TEXTS, **arguments)


@pytest.mark.slow
def test_lora_with_a_trained_head_on_eight_devices(directories: Path) -> None:
    """Adapters and head change, the base does not; the losses are those of one device."""
    recipe = rlx.lora(rlx.recipe_for(directories / "bert"), "**.attention.self.{query,value}", rank=2)
    seen = []
    for mesh in (8, None):
        model = rlx.compile(recipe, program="train", missing="init", key=0, mesh=mesh)
        mask = train.mask(model, "**.lora_{A,B}.weight", "classifier.*")
        optimizer = optax.multi_transform({True: optax.adam(1e-2), False: optax.set_to_zero()}, mask)
        state, step = train.init(model, optimizer), train.make_step(model, optimizer, losses.classification)
        values = []
        for batch in [
            *Classifier(recipe, key=0, missing="init").batches([*IDS, *IDS], [0, 1, 2, 0] * 2, batch_size=8)
        ] * 3:
            state, metrics = step(state, batch)
            values.append(float(metrics.loss))
        seen.append(values)
        start = model.params
        assert start is not None and values[-1] < values[0]
        for name, array in state.params.items():
            assert bool((array != start[name]).any()) == mask[name], name
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["distilbert", "albert", "qwen3", "bert_one_label"])
def test_live_fifty_steps(name: str, tmp_path: Path) -> None:
    """AdamW of torch over transformers' own loss, for each problem; the saved directory opens with equal logits."""
    torch = importlib.import_module("torch")
    theirs, tokenizer = classifiers.write(name, tmp_path / "base"), classifiers.tokenizer()
    classifier = load(tmp_path / "base")
    rng, count = np.random.default_rng(2), len(classifier.labels)
    multi = classifier.head.problem in (MULTI_LABEL, REGRESSION)
    labels = rng.integers(0, 2, (6, count)).astype(np.float32) if multi else rng.integers(0, count, 6)
    inputs = tokenizer(TEXTS, truncation=True, padding=True, return_tensors="pt")
    inputs = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, eps=1e-4, weight_decay=0.01)
    expected = []
    for _ in range(50):
        loss = theirs(**inputs, labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = rlx.compile(rlx.recipe_for(tmp_path / "base"), program="train")
    ours = optax.adamw(1e-3, eps=1e-4, weight_decay=0.01)
    state, step = train.init(model, ours), train.make_step(model, ours, losses.classification)
    (batch,) = classifier.batches(TEXTS, labels, batch_size=6)
    seen = []
    for _ in range(50):
        state, metrics = step(state, batch)
        seen.append(float(metrics.loss))
    np.testing.assert_allclose(seen, expected, rtol=1e-3)
    classifier.model = model.replace(params=state.params)
    rlx.save(classifier, tmp_path / "saved")
    reopened = hugging_face.load(tmp_path / "saved", "AutoModelForSequenceClassification")
    assert_close(load(tmp_path / "saved").logits(TEXTS), np.array(classifiers.logits(reopened)))
