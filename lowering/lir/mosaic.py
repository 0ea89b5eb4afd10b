"""Kernels in Pallas' Mosaic GPU backend, which is imported when it is first used: that takes a quarter of a second."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "LANES", "WARPS", "LazyModule", "await_slot", "copies", "flipped", "load", "pl", "plgpu", "run_kernel", "store",
    "tiled", "transforms",
]  # fmt: skip

# Warps of a warpgroup, and lanes of a warp.
WARPS, LANES = 4, 32


class LazyModule:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


if TYPE_CHECKING:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:
    pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.mosaic_gpu")


def run_kernel(
    body: Callable[[Any], None], inputs: Mapping[str, Any], outputs: Mapping[str, Any], scratch: Mapping[str, Any],
    grid: Mapping[str, int], groups: int = 0, interpret: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """Run a kernel and return its results in order.

    Args:
        body: a program. Its argument has by name what `inputs`, `outputs` and `scratch` name as references, and the
            place of the program: its number along each axis of the grid, and `group`, the number of the warpgroup.
        inputs: arrays, or lists of arrays.
        outputs: arrays with the shapes and dtypes of the results, or lists of them.
        scratch: types of shared memory and barriers.
        grid: the number of programs along each axis.
        groups: the warpgroups of a program; 0 for one that needs no number.
        interpret: parameters of Mosaic's interpreter; None to compile.
        params: fields of `plgpu.CompilerParams`.
    """
    named, axes = {**inputs, **outputs, **scratch}, (*(["group"] if groups else []), *grid)

    def flat(values: Mapping[str, Any]) -> list[Any]:
        return [x for value in values.values() for x in (value if isinstance(value, list) else [value])]

    def program(*refs: Any) -> None:
        left = iter(refs)
        own = {k: [next(left) for _ in v] if isinstance(v, list) else next(left) for k, v in named.items()}
        body(SimpleNamespace(**own, **{axis: lax.axis_index(axis) for axis in axes}))

    threads: dict[str, Any] = {"num_threads": groups, "thread_name": "group"} if groups else {}
    run = plgpu.kernel(
        program,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat(outputs)],
        scratch_types=flat(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(**params),
        interpret=interpret,
        **threads,
    )
    return run(*flat(inputs))


def load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """Return the values of a reference in a layout, by `plgpu.load`, which jax 0.10 declares otherwise."""
    return cast(Any, plgpu.load)(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: Any) -> None:
    """Write values to a reference in any layout.

    From jax 0.12 on, an assignment refuses layouts with fewer than 4 bytes a thread or with bank conflicts. jax 0.11
    accepts them, and has no `plgpu.store`.
    """
    if hasattr(plgpu, "store"):
        cast(Any, plgpu).store(ref, value, optimized=False)
    else:
        ref[...] = value


def await_slot(used: Any, slots: int, step: Any) -> None:
    """Wait until the slot of a step is used no more, by its barrier; of the first steps, each has one of its own."""
    pl.when(step >= slots)(lambda: plgpu.barrier_wait(used.at[lax.rem(step, slots)]))


def tiled(tiles: Sequence[tuple[int, ...]], warps: Sequence[Any], lanes: Sequence[Any]) -> Any:
    """Return the layout of an array in registers.

    Args:
        tiles: tiles of the array, tiles of these, and so on. A lane has the last axis of the last one.
        warps, lanes: the axes that warps and lanes divide, counted from the last one, and `copies`.
    """
    return plgpu.Layout.TILED(plgpu.Tiling(tuple(tiles)), warp_dims=tuple(warps), lane_dims=tuple(lanes), vector_dim=-1)


def copies(count: int) -> tuple[Any, ...]:
    """Return what stands for so many warps or lanes with the same entries among the axes of `tiled`."""
    return (plgpu.Replicated(count),) if count > 1 else ()


def transforms(columns: int = 64) -> tuple[Any, ...]:
    """Return the layout in shared memory of 16-bit tiles that `wgmma` reads."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


def flipped(bits: Any) -> Any:
    """Return integers in the order of the floats with these bits, −0 before +0, or the bits: it is its own inverse."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
