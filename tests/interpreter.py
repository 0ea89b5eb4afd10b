"""Mosaic's interpreter of GPU kernels, which detects races between the warpgroups of a program.

Where JAX also has a GPU, kernels are compiled for it, and all else runs on the CPU as it does elsewhere:

    RLX_TEST_KEEP_ENV=JAX_PLATFORMS JAX_PLATFORMS=cpu,cuda \\
        python -m pytest -p no:benchmark -n 3 -m "slow or not slow" $(grep -l "import interpreted" tests/test_*.py)
"""

import contextlib
import functools
import importlib
import io
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from rlx_jax.lowering.lir.implementations import has_mosaic

needs_mosaic = pytest.mark.skipif(not has_mosaic(), reason="the kernel needs jax 0.11")


@functools.cache
def gpu() -> Any:
    """Return the GPU that kernels are compiled for, or None."""
    with contextlib.suppress(RuntimeError):  # JAX has no such platform
        return jax.devices("gpu")[0]
    return None


def interpreted(run: Callable[..., Any], *operands: Any) -> Any:
    """Return the results of a function that runs kernels, in the interpreter; check that it reports no race.

    Where JAX has a GPU, the kernels are compiled and run there.
    """
    if (device := gpu()) is not None:
        with jax.default_device(device):
            moved = jax.tree.map(
                lambda x: jax.device_put(x, device) if isinstance(x, jax.Array | np.ndarray) else x, operands
            )
            return jax.device_put(run(*moved), jax.devices("cpu")[0])
    pallas = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # jax 0.10 has no interpreter of it
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = jax.block_until_ready(run(*operands, interpret=pallas.InterpretGPUParams(detect_races=True)))
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()[:1000]
    return results
