"""nomic-embed-text-v2-moe against its formula in NumPy float64 (`tests/oracles/nomic_experts.py`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from tests.oracles import nomic_experts as oracle

LENGTHS = (31, 1, 17)


def written(directory: Path, **changes: Any) -> dict[str, Any]:
    """The weights of a checkpoint with the config, in `directory`."""
    config = oracle.CONFIG | changes
    weights = oracle.weights_of(config, 5)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return weights


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe_top_k": 1, "moe_every_n_layers": 3}, pytest.param({"moe_top_k": 5}, marks=pytest.mark.slow)],
    ids=str,
)
def test_hidden_states(changes: dict[str, Any], tmp_path: Path) -> None:
    weights = written(tmp_path, **changes)
    encoder: Any = rlx.load(tmp_path)
    rows = np.random.default_rng(3).integers(2, 48, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    mask = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int32)
    states = np.asarray(encoder.hidden_states(rows, attention_mask=mask))
    for row, length, actual in zip(rows, LENGTHS, states, strict=True):
        expected = oracle.states(weights, oracle.CONFIG | changes, row[:length])
        np.testing.assert_allclose(actual[:length], expected, atol=3e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("moe_normalize_expert_weights", 2.0), ("moe_top_k", 6),
     ("activation_function", "gelu_new"), ("activation_function", "swiglu"), ("num_experts", None)],
)  # fmt: skip
def test_refused(name: str, value: Any, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(oracle.CONFIG | {name: value}))
    with pytest.raises(rlx.errors.RlxError, match="moe_every_n_layers" if value == "swiglu" else name):
        rlx.load(tmp_path)
