"""Losses of labels against optax, and training of heads against transformers."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlx_jax as rlx
from rlx_jax import losses
from tests.oracles import classifiers

RNG = np.random.default_rng(0)
IDS = RNG.integers(5, 45, (4, 12)).astype(np.int32)
LENGTHS = np.array([12, 3, 7, 1], np.int32)
ROWS = [row[:n].tolist() for row, n in zip(IDS, LENGTHS, strict=True)]
BATCH = {"tokens": IDS, "lengths": LENGTHS}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded checkpoints of tests/test_classifier.py."""
    root = tmp_path_factory.mktemp("heads")
    with zipfile.ZipFile(classifiers.ARCHIVE) as archive:
        archive.extractall(root)
    return root


@functools.cache
def trained(directory: Path, **options: Any) -> rlx.CompiledModel:
    """The program `train` of a checkpoint."""
    return rlx.compile(rlx.recipe_for(directory), program="train", **options)


def text_logits(model: rlx.CompiledModel, params: Any, pooling: str) -> jax.Array:
    """The logits of each row, run alone and without padding."""
    rows = [model.apply(params, np.array([row]))[0, 0 if pooling == "cls" else -1] for row in ROWS]
    return jnp.stack(rows)


WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5], np.float32)
MULTI = RNG.integers(0, 2, (4, 3)).astype(np.float32)
nll, bce = optax.softmax_cross_entropy_with_integer_labels, optax.sigmoid_binary_cross_entropy
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "one label": ("bert", {"labels": np.array([2, -100, 0, 1])},
                  lambda z: nll(z, jnp.array([2, 0, 0, 1])) * jnp.array([1.0, 0, 1, 1]) / 3),
    "weights": ("bert", {"labels": np.array([2, 1, 0, 1]), "weights": WEIGHTS},
                lambda z: nll(z, jnp.array([2, 1, 0, 1])) * WEIGHTS / 3.5),
    "several labels, a decoder": ("qwen3", {"labels": MULTI}, lambda z: bce(z, MULTI) / 12),
    "floats": ("bert", {"labels": MULTI}, lambda z: bce(z, MULTI) / 12),
    "problem": ("bert", {"labels": MULTI, "problem": "regression"}, lambda z: (z - MULTI) ** 2 / 12),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_losses_of_rows_run_alone(directories: Path, case: str) -> None:
    """Value and gradient are those of optax over rows without padding; a jitted loss is the same."""
    name, arguments, by_hand = CASES[case]
    model = trained(directories / name)
    pooling = "lasttoken" if name == "qwen3" else "cls"

    def ours(p: Any) -> Any:
        return losses.classification(model, p, **BATCH, **arguments)

    def theirs(p: Any) -> Any:
        return by_hand(text_logits(model, p, pooling)).sum()

    with jax.numpy_dtype_promotion("standard"):
        (a, of_a), (b, of_b) = (jax.jit(jax.value_and_grad(f))(model.params) for f in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in of_b.values())
    for key, want in of_b.items():
        assert float(jnp.abs(of_a[key] - want).max()) <= 1e-5 * scale, key
    np.testing.assert_allclose(ours(model.params), a, rtol=1e-5)
