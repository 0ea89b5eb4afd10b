"""How a Pallas kernel in Triton's dialect is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from rlx_jax.device import running_device


def kernel_call(
    kernel: Callable[..., None], out: Any, grid: tuple[int, ...], warps: int, stages: int = 1, **options: Any
) -> Callable[..., Any]:
    """Return a callable that runs a Pallas kernel; it is interpreted if there is no GPU.

    Args:
        kernel: the kernel over references to full arrays, of which each program of the grid accesses its own part.
        out: shapes and dtypes of the results.
        grid: the number of programs along each grid axis.
        warps: warps per program.
        stages: pipeline stages of loads.
        options: further options of `pallas_call`.
    """
    from jax.experimental.pallas import triton  # imported here, as it takes a quarter of a second

    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    interpret = running_device().kind != "cuda"
    return pl.pallas_call(kernel, out_shape=out, grid=grid, compiler_params=params, interpret=interpret, **options)
