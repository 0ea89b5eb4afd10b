"""Classifiers of images, against what transformers recorded and computes."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import rlx_jax as rlx
from rlx_jax import errors, losses, train
from rlx_jax.encode.image_classifier import ImageClassifier
from rlx_jax.models.encoder import MULTI_LABEL
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, image_classifiers, vision
from tests.oracles.checkpoints import REMOVED
from tests.oracles.comparing import assert_close
from tests.oracles.image_classifiers import PIXELS

ARCHIVES = (image_classifiers.ARCHIVE,)


def recorded(directory: Path) -> dict[str, np.ndarray]:
    return {name: np.array(rows) for name, rows in json.loads((directory / "recorded.json").read_text()).items()}


@pytest.fixture(scope="module")
def vit(directories: Path) -> ImageClassifier:
    """A classifier with named labels and an image processor, loaded once."""
    loaded: ImageClassifier = load(directories / "vit")
    return loaded


@pytest.mark.parametrize("name", image_classifiers.RECORDED)
def test_recorded_logits(directories: Path, name: str) -> None:
    assert_close(load(directories / name).logits(PIXELS), recorded(directories / name)["pixels"])


def test_pictures(vit: ImageClassifier, directories: Path, tmp_path: Path) -> None:
    """Pictures through the image processor, one alone, and after a save with other parameters and the old ones."""
    pictures, want = vision.images(4, *image_classifiers.PICTURES), recorded(directories / "vit")["pictures"]
    assert_close(vit.logits(pictures), want)
    assert_close(vit.logits(pictures[1]), want[1])
    rlx.save(vit, tmp_path / "saved")
    again = load(tmp_path / "saved")
    np.testing.assert_array_equal(again.logits(pictures), vit.logits(pictures))
    again.model = again.model.replace({k: 2 * v for k, v in again.model.params.items()})
    assert np.abs(again.logits(pictures) - want).max() > 0.1


def test_scores(vit: ImageClassifier, directories: Path) -> None:
    """Softmax of one label per image; the sigmoid of each of several."""
    logits = vit.logits(PIXELS).astype(np.float64)
    results = vit.classify(PIXELS)
    for row, result in zip(logits, results, strict=True):
        weights = np.exp(row - row.max())
        assert result.scores == pytest.approx(dict(zip(("cat", "dog", "owl"), weights / weights.sum(), strict=True)))
        assert (result.label, result.score) == max(result.scores.items(), key=lambda item: item[1])
    assert [*vit.classify(PIXELS, top_k=2)[0].scores] == [*results[0].scores][:2]
    several = load(directories / "dinov2")
    assert several.head.problem == MULTI_LABEL
    (result,) = several.classify(PIXELS[:1])
    want = 1 / (1 + np.exp(-several.logits(PIXELS[:1])[0].astype(np.float64)))
    assert result.scores == pytest.approx({f"LABEL_{i}": p for i, p in enumerate(want)}, rel=1e-5)


def test_without_the_head(directories: Path) -> None:
    encoder = load(directories / "vit", head=False)
    assert type(encoder) is rlx.VisionEncoder and encoder.embed(PIXELS).shape == (3, 18)


def test_warmup_and_profile(vit: ImageClassifier, directories: Path) -> None:
    """`warmup` compiles what pictures need; `profile` classifies."""
    profile = rlx.CompileProfile().replace(buckets={"batch": [2], "on_recompile": "error"})
    model = load(directories / "vit", profile=profile)
    model.warmup()
    assert_close(model.logits(PIXELS), vit.logits(PIXELS))
    assert model.report().recompiles == 0 and model.profile(iter(vision.images(4, (20, 20)))).rows
    assert repr(model).startswith("ImageClassifier(vit: 3 channels")


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip"])
def test_live_fifty_steps(name: str, tmp_path: Path) -> None:
    """AdamW of torch over transformers' own loss, for each problem; the saved directory opens with equal logits."""
    torch = importlib.import_module("torch")
    theirs, classifier = image_classifiers.write(name, tmp_path / "made"), load(tmp_path / "made")
    rng, count = np.random.default_rng(2), len(classifier.labels)
    labels = rng.integers(0, count, 3) if name == "vit" else rng.integers(0, 2, (3, count)).astype(np.float32)
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-3, eps=1e-4, weight_decay=0.01)
    model = rlx.compile(recipe_for(tmp_path / "made"), program="train")
    ours = optax.adamw(1e-3, eps=1e-4, weight_decay=0.01)
    state, step = train.init(model, ours), train.make_step(model, ours, losses.classification)
    for _ in range(50):
        loss = theirs(torch.from_numpy(PIXELS), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state, metrics = step(state, {"pixel_values": PIXELS, "labels": labels})
        np.testing.assert_allclose(metrics.loss, loss.item(), rtol=1e-3)
    classifier.model = model.replace(params=state.params)
    rlx.save(classifier, tmp_path / "saved")
    reopened = image_classifiers.load(tmp_path / "saved")
    assert_close(classifier.logits(PIXELS), image_classifiers.logits(reopened, PIXELS), tolerance=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", image_classifiers.CASES)
def test_live(name: str, tmp_path: Path) -> None:
    """Every class: the logits, also of what `rlx.save` writes and transformers reads; no head without the head."""
    theirs, ours = image_classifiers.write(name, tmp_path / "made"), load(tmp_path / "made")
    want = image_classifiers.logits(theirs, PIXELS)
    assert_close(ours.logits(PIXELS), want)
    rlx.save(ours, tmp_path / "saved")
    assert_close(image_classifiers.logits(image_classifiers.load(tmp_path / "saved"), PIXELS), want, tolerance=1e-6)
    assert type(load(tmp_path / "made", head=False)) is rlx.VisionEncoder


def output(directory: Path) -> Any:
    """The logits of a classifier, or the hidden states of an encoder."""
    model = load(directory)
    return model.logits(PIXELS) if isinstance(model, ImageClassifier) else model.hidden_states(PIXELS)


def changed(value: Any) -> list[Any]:
    """Other plausible values of a field, and its absence."""
    if isinstance(value, bool):
        return [not value, None, REMOVED]
    if isinstance(value, int):
        return [value + 1, 2 * value, None, REMOVED]
    if isinstance(value, float):
        return [value / 2 + 0.25, 0.0, None, REMOVED]
    if isinstance(value, str):
        return ["relu" if "gelu" in value else "gelu", "quick_gelu", REMOVED]
    return [None, REMOVED] if value is not None else [0.5, True]


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*image_classifiers.CASES, *image_classifiers.ENCODERS])
def test_mutants(name: str, tmp_path: Path) -> None:
    """Each field of each config with another value: the logits of transformers, or an error that is about the config
    or the weights that it no longer fits."""
    image_classifiers.write(name, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text("utf-8"))
    tower, outputs = config.get("vision_config"), dict[Any, Any]()
    fields = [(key, value) for key, values in (tower or config).items() for value in changed(values)]
    compared = 0
    for i, (key, value) in enumerate(fields):
        if key in ("architectures", "model_type"):
            continue
        inner = {k: v for k, v in ((tower or {}) | {key: value}).items() if v is not REMOVED}
        changes = {key: value} if tower is None else {"vision_config": inner}
        copy = checkpoints.edited(tmp_path / "made", tmp_path / str(i), changes)
        try:
            recipe = recipe_for(copy)
            same = recipe.config, recipe.head
            outputs[same] = ours = outputs[same] if same in outputs else output(copy)
        except (errors.ConfigError, errors.UnsupportedError, errors.WeightError, errors.ShapeError):
            continue
        try:
            want = image_classifiers.logits(image_classifiers.load(copy), PIXELS)
        except Exception:  # transformers refuses the config itself
            continue
        assert_close(ours, want)
        compared += 1
    assert compared >= 5
