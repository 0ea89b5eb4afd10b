"""Pallas and its Mosaic GPU backend, each imported when it is first used, as that takes a quarter of a second."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

__all__ = ["LazyModule", "load", "pl", "plgpu"]


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


def load(ref: Any, layout: Any, optimized: bool = True) -> Any:
    """Return the values of a reference in a layout, by `plgpu.load`, which jax 0.10 declares otherwise."""
    return cast(Any, plgpu.load)(ref, layout=layout, optimized=optimized)
