"""Mosaic's interpreter of GPU kernels, which detects races between the warpgroups of a program."""

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
    """Return the results of a function that runs kernels, in the interpreter; check that it reports no race."""
    pallas = importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # jax 0.10 has no interpreter of it
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = jax.block_until_ready(run(*operands, interpret=pallas.InterpretGPUParams(detect_races=True)))
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()[:1000]
    return results
