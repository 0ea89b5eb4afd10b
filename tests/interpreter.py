"""Mosaic's interpreter of GPU kernels, which detects races between the warpgroups of a program.

On a machine with a GPU the same tests run the compiled kernels:

    RLX_TEST_KEEP_ENV=JAX_PLATFORMS JAX_PLATFORMS=cuda,cpu pytest -m "slow or not slow" -k kernel tests/test_….py
"""

import contextlib
import importlib
import io
from collections.abc import Callable
from typing import Any

import jax
import pytest

from rlx_jax.lowering.lir.implementations import has_mosaic

needs_mosaic = pytest.mark.skipif(not has_mosaic(), reason="the kernel needs jax 0.11")


def interpreted(run: Callable[..., Any], *operands: Any) -> Any:
    """Return the results of a function that runs kernels, in the interpreter; check that it reports no race.

    Where JAX runs on a GPU, the kernels are compiled for it.
    """
    if jax.default_backend() == "gpu":
        return jax.block_until_ready(run(*operands))
    pallas = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # jax 0.10 has no interpreter of it
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = jax.block_until_ready(run(*operands, interpret=pallas.InterpretGPUParams(detect_races=True)))
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()[:1000]
    return results
