"""What kernels of our own have in common. They are written in Pallas' Triton dialect, for one Hopper GPU, on which they
were measured; elsewhere, over a mesh, and in programs that are trained, XLA runs the forms that it has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from rlx_jax.device import running_device

AnyArray = Any


def tile(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def call(
    kernel: Callable[..., None], out: Any, grid: tuple[int, ...], warps: int, stages: int = 1, **how: Any
) -> Callable[..., Any]:
    """A kernel over whole arrays, of which each program of the grid reads and writes its own part. Where there is no
    GPU it is interpreted."""
    from jax.experimental.pallas import triton  # a quarter of a second, which those that have no GPU save

    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    interpret = running_device().kind != "cuda"
    return pl.pallas_call(kernel, out_shape=out, grid=grid, compiler_params=params, interpret=interpret, **how)


def with_gradient_of(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A kernel `(op, *arrays)`, whose gradient is that of another form of the same, computed again for it."""

    def with_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
        run = jax.custom_vjp(kernel, nondiff_argnums=(0,))
        run.defvjp(
            lambda op, *given: (kernel(op, *given), given),
            lambda op, given, pulled: jax.vjp(functools.partial(plain, op), *given)[1](pulled),
        )
        return run

    return with_gradient
