"""Nomic's vision encoder and nomic-embed-text-v2-moe against formulas in NumPy float64 (`tests/oracles/nomic_*.py`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.models.nomic import NomicVisionConfig
from tests.oracles import nomic_experts as experts
from tests.oracles import nomic_vision as oracle
from tests.oracles.comparing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*auto_map is ignored:rlx_jax.errors.RlxWarning")

SMALL = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_inner": 200.0, "img_size": [12, 20], "patch_size": [3, 5]}
CONFIGS: dict[str, dict[str, Any]] = {
    # heads of 8 columns, a grid of 4 × 4 whose places are scaled apart
    "scaled": SMALL | {"ref_feat_shape": [6, 3], "layer_norm_epsilon": 1e-3},
    # a grid that is no square, places as they are, more than one step of the feed-forward width
    "plain": SMALL | {"img_size": [14, 9], "patch_size": 3, "ref_feat_shape": None, "n_inner": 300, "num_channels": 2},
    "unturned": SMALL | {"use_rotary_pos_emb": False, "n_head": 4},
}


def config(name: str) -> dict[str, Any]:
    """The published config with other sizes."""
    return oracle.PUBLISHED | CONFIGS[name]


def drawn(name: str) -> dict[str, npt.NDArray[np.float32]]:
    """Weights that show a mistake, whatever the norm or the bias."""
    rng, wide = np.random.default_rng(3), 512 if name == "plain" else 256
    made = {}
    for key, shape in oracle.weight_shapes(config(name), wide).items():
        centre = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        made[key] = (centre + rng.normal(0, 0.3 if len(shape) < 2 else 0.2, shape)).astype(np.float32)
    return made


def images(name: str) -> npt.NDArray[np.float32]:
    """Three, of the size of the config."""
    height, width = oracle.pair(config(name)["img_size"])
    shape = (3, config(name)["num_channels"], height, width)
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


def write(name: str, directory: Path) -> Path:
    """A checkpoint as it is published."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(name)), "utf-8")
    save_file(drawn(name), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", ["scaled", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "unturned"))])
def test_hidden_states_and_vectors(name: str, tmp_path: Path) -> None:
    """Of a checkpoint, images in a batch and alone."""
    encoder = rlx.load(write(name, tmp_path))
    weights = {key: value.astype(np.float64) for key, value in drawn(name).items()}
    pixels = images(name)
    want = oracle.last_hidden_state(config(name), weights, pixels.astype(np.float64))
    assert isinstance(encoder, rlx.VisionEncoder)
    assert_close(encoder.hidden_states(pixels), want.astype(np.float32))
    vectors = oracle.embeddings(config(name), weights, pixels.astype(np.float64))
    assert_close(encoder.embed(pixels), vectors.astype(np.float32))
    assert_close(encoder.embed(pixels[1:2]), vectors[1:2].astype(np.float32))


def test_patch_rope() -> None:
    """Tables by row and column; tokens in front do not turn."""

    def tables(emit: Any, x: Any) -> Any:
        emit.output("cos", emit.state.rope_cos)
        emit.output("sin", emit.state.rope_sin)
        return x

    flow = rlx.ModelFlow("rope").input("x", ("batch", 7, 8)).stage(blocks.PatchRope((2, 3), 8, 100.0, (4, 3)))
    found: Any = rlx.compile(flow.custom(tables))(np.zeros((1, 7, 8), np.float32))
    rows, columns = np.repeat([0, 2], 3), np.tile([0, 1, 2], 2)
    angles = np.stack([rows, rows / 10, columns, columns / 10], axis=-1)
    angles = np.concatenate([np.zeros((1, 4)), angles])
    np.testing.assert_allclose(found["cos"][0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(found["sin"][0], np.sin(angles), atol=1e-6)
    with pytest.raises(errors.ShapeError, match="head_dim is 6; expected a multiple of 4"):
        rlx.ModelFlow("rope").input("x", ("batch", 7, 8)).stage(blocks.PatchRope((2, 3), 6)).build()


def test_published_config() -> None:
    """It is read whole."""
    read = NomicVisionConfig.from_hf(oracle.PUBLISHED)
    assert (read.hidden_size, read.intermediate_size, read.grid, read.reference_grid) == (768, 2048, (14, 14), (14, 14))
    shapes = {key: spec.shape for key, spec in rlx.NomicVisionFlow.for_prefill(oracle.PUBLISHED).shapes().items()}
    assert shapes == oracle.weight_shapes(oracle.PUBLISHED, 2048) and len(shapes) == 211


LENGTHS = (31, 1, 17)


def written(directory: Path, **changes: Any) -> dict[str, Any]:
    """The weights of a checkpoint with the config, in `directory`."""
    config = experts.CONFIG | changes
    weights = experts.weights_of(config, 5)
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
        expected = experts.states(weights, experts.CONFIG | changes, row[:length])
        np.testing.assert_allclose(actual[:length], expected, atol=3e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("moe_normalize_expert_weights", 2.0), ("moe_top_k", 6),
     ("activation_function", "gelu_new"), ("activation_function", "swiglu"), ("num_experts", None)],
)  # fmt: skip
def test_refused(name: str, value: Any, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(experts.CONFIG | {name: value}))
    with pytest.raises(rlx.errors.RlxError, match="moe_every_n_layers" if value == "swiglu" else name):
        rlx.load(tmp_path)
