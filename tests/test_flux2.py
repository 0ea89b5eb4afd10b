"""FLUX.2's transformer against `diffusers`: recorded numbers by default, live ones under the mark `oracle`."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.models.flux2 import Flux2Flow
from tests.divided import mesh
from tests.oracles import checkpoints, diffusion
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

SHARDED = checkpoints.FIXTURES / "flux2" / "sharded_bf16"
INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids", "guidance")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return load_record(SHARDED)


@pytest.fixture(scope="module")
def model() -> Any:
    return rlx.compile(rlx.from_pretrained(SHARDED))


def given(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: record[name] for name in INPUTS} | changes


@pytest.mark.slow
def test_recorded_sample(model: Any, record: dict[str, Any]) -> None:
    """Sharded bf16 weights through their index; ids with an axis of rows, and without."""
    assert_close(model(**given(record)), record["sample"])
    rows = {name: np.stack([record[name]] * 2) for name in ("img_ids", "txt_ids")}
    assert_close(model(**given(record, **rows)), record["sample"])
    rows["img_ids"] = np.stack([record["img_ids"], record["img_ids"] + 3])  # the first row counts, as in diffusers
    assert_close(model(**given(record, **rows)), record["sample"])
    assert model.report().refusals == ()
    assert all(f"{name}.{{i}}" in model.text("hir") for name in ("transformer_blocks", "single_transformer_blocks"))


@pytest.mark.slow
def test_bf16_is_no_worse_than_its_rounding(record: dict[str, Any]) -> None:
    """The angles of time stay f32: 1000 times a time in bf16 would turn them by radians."""
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    got = rlx.compile(rlx.from_pretrained(SHARDED), profile=profile)(**given(record))
    assert np.abs(got - record["sample"]).max() < 1.5e-2 * np.abs(record["sample"]).max()


def test_a_model_without_guidance() -> None:
    """It asks for none, and has no weights for it."""
    recipe = Flux2Flow.for_config(diffusion.FLUX2 | {"guidance_embeds": False})
    assert not any("guidance_embedder" in key for key in recipe.shapes())
    model = rlx.compile(recipe)
    assert "guidance" not in [i.name for i in model.inputs]


def test_all_weights_have_roles() -> None:
    """So that a mesh can divide them: a role for each matrix, and the norms of heads are vectors."""
    recipe = Flux2Flow.for_config(diffusion.FLUX2)
    built = recipe.assemble().build()
    matrices = {key for key, spec in recipe.shapes().items() if len(spec.shape) == 2}
    assert set(built.keys_read) == set(recipe.shapes()) and matrices <= set(built.roles)
    assert all(any(built.roles[key]) for key in matrices)


def test_hooks_see_both_kinds_of_blocks() -> None:
    """In the order of the flow, and what they return stands there."""
    seen = []

    def hook(ctx: Any) -> Any:
        seen.append((ctx.spec.kind, int(ctx.index)))
        return blocks.Named("tapped", ctx.default_stage())

    recipe = Flux2Flow.for_config(diffusion.FLUX2).layer(hook)
    built = recipe.assemble().build()
    assert seen == [("double", 0), ("double", 1), ("single", 0), ("single", 1)]
    assert any("tapped" in path for path in built.readers().values())


@pytest.mark.oracle
@pytest.mark.parametrize("name", diffusion.FLUX2_RANDOM)
def test_live_sample(name: str, tmp_path: Path) -> None:
    """Fresh random checkpoints equal `diffusers`, one for two sizes."""
    config = diffusion.FLUX2_RANDOM[name]
    reference = diffusion.make_flux2(config, 7, tmp_path / "model", shard="40KB" if name == "wide" else "5GB")
    model: Any = rlx.compile(rlx.from_pretrained(tmp_path / "model"))
    for seed, image, text in ((1, 7, 4), (2, 5, 1))[: 2 if name == "plain" else 1]:
        inputs = diffusion.flux2_inputs(config, seed, image, text)
        assert_close(model(**inputs), diffusion.flux2_sample(reference, inputs))


@pytest.mark.oracle
def test_live_record(record: dict[str, Any], tmp_path: Path) -> None:
    """The record is what `diffusers` says of the committed checkpoint."""
    reference = importlib.import_module("diffusers").Flux2Transformer2DModel.from_pretrained(
        SHARDED, torch_dtype=importlib.import_module("torch").float32
    )
    assert_close(diffusion.flux2_sample(reference.eval(), given(record)), record["sample"], tolerance=1e-6)


DIVIDED = diffusion.FLUX2 | {
    "attention_head_dim": 8, "num_attention_heads": 8, "axes_dims_rope": [2, 2, 2, 2], "mlp_ratio": 1.5,
}  # fmt: skip
"""Heads and feed-forward widths that eight devices divide."""


@pytest.mark.slow
def test_other_ways_to_run_say_the_same() -> None:
    """Each block's weights in parts over eight devices, by their roles; the other policy, layers scanned."""
    recipe = Flux2Flow.for_config(DIVIDED)
    rng = np.random.default_rng(0)
    weights = {
        key: (rng.normal(size=s.shape) * s.shape[-1] ** -0.5 + (len(s.shape) == 1)).astype("f4")
        for key, s in recipe.shapes().items()
    }
    inputs = diffusion.flux2_inputs(DIVIDED, 3)
    one: Any = rlx.compile(recipe, weights)
    profile = rlx.CompileProfile().replace(fusion={"policy": "fusable"}, layers={"roll": "scan"})
    options: dict[str, Any]
    for options in ({"mesh": mesh("data fsdp tensor", 8)}, {"profile": profile}):
        other: Any = rlx.compile(recipe, weights, **options)
        assert_close(other(**inputs), np.asarray(one(**inputs)))
        if "mesh" in options:
            query = other.params["transformer_blocks.0.attn.to_q.weight"]
            assert np.prod(query.sharding.shard_shape(query.shape)) < query.size
