"""Tiny random denoising transformers made by `diffusers`, and what it computes from them.

torch and diffusers are imported when a function needs them, so that this module can be imported without.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FLUX2: dict[str, Any] = {
    "patch_size": 1, "in_channels": 5, "out_channels": None, "num_layers": 2, "num_single_layers": 2,
    "attention_head_dim": 10, "num_attention_heads": 2, "joint_attention_dim": 11, "timestep_guidance_channels": 9,
    "mlp_ratio": 1.3, "axes_dims_rope": [2, 4, 2, 2], "rope_theta": 300, "eps": 1e-5, "guidance_embeds": True,
}  # fmt: skip
"""A config whose sizes all differ."""

FLUX2_RANDOM: dict[str, dict[str, Any]] = {
    "plain": FLUX2,
    "no_guidance": FLUX2 | {"guidance_embeds": False, "num_layers": 1, "num_single_layers": 3, "mlp_ratio": 2.75},
    "patches": FLUX2 | {"patch_size": 2, "out_channels": 3, "axes_dims_rope": [4, 2, 8], "attention_head_dim": 14},
    "wide": FLUX2 | {"num_attention_heads": 5, "timestep_guidance_channels": 16, "rope_theta": 2000, "eps": 1e-2},
}
"""Configs for live comparison."""


def make_flux2(
    config: Mapping[str, Any], seed: int, directory: Path, dtype: str = "float32", shard: str = "5GB"
) -> Any:
    """A model with weights that show a mistake, written as diffusers writes it, and read back in float32."""
    torch, diffusers = (importlib.import_module(name) for name in ("torch", "diffusers"))
    torch.set_num_threads(1)
    model = diffusers.Flux2Transformer2DModel(**config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for p in model.parameters():
            drawn = rng.uniform(0.5, 1.5, p.shape) if p.ndim == 1 else rng.normal(0, p.shape[-1] ** -0.5, p.shape)
            p.copy_(torch.from_numpy(drawn.astype(np.float32)))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard)
    return diffusers.Flux2Transformer2DModel.from_pretrained(directory, torch_dtype=torch.float32).eval()


def flux2_inputs(config: Mapping[str, Any], seed: int, image: int = 7, text: int = 4) -> dict[str, npt.NDArray[Any]]:
    """Inputs of two rows, under their names."""
    rng = np.random.default_rng(seed)
    axes = len(config["axes_dims_rope"])
    found = {
        "hidden_states": rng.normal(size=(2, image, config["in_channels"])).astype(np.float32),
        "encoder_hidden_states": rng.normal(size=(2, text, config["joint_attention_dim"])).astype(np.float32),
        "timestep": np.array([0.31, 0.872], np.float32),
        "img_ids": rng.integers(0, 40, (image, axes)).astype(np.int32),
        "txt_ids": rng.integers(0, 40, (text, axes)).astype(np.int32),
    }
    return found | ({"guidance": np.array([3.5, 1.0], np.float32)} if config["guidance_embeds"] else {})


def flux2_sample(model: Any, inputs: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """What `model` makes of the inputs."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        sample: npt.NDArray[np.float32] = model(**{n: torch.from_numpy(v) for n, v in inputs.items()}).sample.numpy()
    return sample
