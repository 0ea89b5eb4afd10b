"""This module defines `Rates`, the roofline of a device: its limits, and the fractions of them that kernels reach.

The limits are data sheet numbers (`rlx_jax/device.py`). The fractions and fixed times are measured on an H200 and, at
the first use, on the CPU that runs; for other devices the fractions of the H200 are assumed (`Rates.basis`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import DEVICES, Device, named_device, running_device
from rlx_jax.errors import ProfileError, did_you_mean, quote

# Kinds of kernels. `reduction` includes norms; `fused` are elementwise ops, which XLA fuses into others.
KernelKind = Literal["product", "attention", "experts", "recurrence", "reduction", "fused"]


@dataclass(frozen=True)
class KernelRate:
    """What kernels of one kind reach: fractions of the device's limits, and the fixed seconds of a kernel."""

    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Roofline of a device.

    Attributes:
        device: the facts of the device; its `memory` is what JAX may allocate.
        bandwidth: bytes per second of its memory.
        flops: operations per second of dense products, by the short name of the compute dtype.
        kernels: what kernels reach, by kind.
        call_seconds: seconds in which the host checks a prompt and starts its program.
        argument_seconds: the same for each parameter that the program takes.
        unpack: elements per second of packed weights that products decode in registers: of codes with 8 bits, and
            of narrower codes.
        unpack_tiles: the same for products that decode their weight tile by tile.
        link: bytes per second of an array that devices of one host sum up.
        link_seconds: the fixed seconds of such a sum.
        samples: whether parts of programs are run to measure them, which needs the device here.
        basis: the source of the fractions: `measured` on this product, or limits of the `data sheet` alone.
    """

    device: Device
    bandwidth: float
    flops: Mapping[str, float]
    kernels: Mapping[KernelKind, KernelRate]
    unpack: tuple[float, float]
    unpack_tiles: tuple[float, float]
    link: float
    link_seconds: float
    basis: Literal["measured", "data sheet"]
    call_seconds: float = 0.0
    argument_seconds: float = 0.0
    samples: bool = False

    def limits(self, flops: float, nbytes: float, dtype: str) -> tuple[float, float]:
        """Return the shortest seconds for so many operations, and for so many bytes, at the limits of the device."""
        return flops / self.flops[dtype], nbytes / self.bandwidth

    def parts(self, kind: KernelKind, flops: float, nbytes: float, dtype: str) -> tuple[float, float, float]:
        """Return the estimated seconds of a kernel: for its operations, for its bytes, and fixed.

        The time is their sum. Products of some rows read their weights and compute without much overlap.
        """
        rate = self.kernels[kind]
        compute, memory = self.limits(flops, nbytes, dtype)
        return compute / rate.flops, memory / rate.bytes, rate.seconds


# Fractions of an H200, fitted to figures of benchmarks/README.md and docs/performance.md: steps and prompts of
# Llama, Qwen 3, Gemma 3, mixture and Qwen 3.5 shapes in bf16. The largest errors on 21 such figures are 20 and 15 %
# (`python benchmarks/plan.py --figures`, jax 0.11); docs/plan.md has what was compared otherwise. Attention is
# counted without its causal mask and recurrences with each state read twice, so that fractions may be 1 or more.
H200_KERNELS: Mapping[KernelKind, KernelRate] = {
    "product": KernelRate(0.84, 0.92, 3.2e-6),
    "attention": KernelRate(1.19, 0.88, 3.1e-6),
    "experts": KernelRate(0.49, 0.95, 6.0e-6),
    "recurrence": KernelRate(0.21, 1.0, 11.0e-6),
    "reduction": KernelRate(1.0, 0.54, 2.1e-6),
    "fused": KernelRate(1.0, 0.53, 0.0),
}
# Packed weights on an H200: a step of 1 row takes 0.93 with 8-bit codes and 1.30 with 4-bit codes of the time of bf16,
# of 64 rows, which decode tiles, 1.9 to 2.9 (docs/weights.md).
H200_UNPACK, H200_UNPACK_TILES = (2.4e12, 1.4e12), (5.6e11, 5.6e11)
# Prompts of 256 tokens of models with 23 to 42 parameters, in which the device takes less: 0.66 to 1.34 ms. Scaled
# by the time in which the host starts a program they were no closer. With 98 parameters: 1.35 to 1.65 ms.
GPU_CALL_SECONDS, GPU_ARGUMENT_SECONDS = 0.6e-3, 8e-6
TPU_KERNELS = {kind: replace(rate, seconds=rate.seconds / 4) for kind, rate in H200_KERNELS.items()}  # one program

# Products in f32 (TF32 where the GPU has it; three and six passes of bf16 are slower than a TPU's default of one), and
# in f16 or bf16 where this differs from the device's `flops`.
_FLOPS = {
    "h100": {"f32": 494e12}, "h200": {"f32": 494e12}, "a100": {"f32": 156e12}, "l4": {"f32": 60e12},
    "t4": {"f32": 8.1e12, "bf16": 8.1e12}, "rtx4090": {"f32": 82.6e12}, "tpu_v5e": {}, "tpu_v6e": {},
}  # fmt: skip
# Bytes per second between devices of one host, and seconds of a sum. Two H200: 134 MB in 0.5 ms, and 17 µs of 64.
_LINKS = {
    "h100": (268e9, 17e-6), "h200": (268e9, 17e-6), "a100": (180e9, 20e-6), "l4": (13e9, 40e-6), "t4": (6e9, 40e-6),
    "rtx4090": (13e9, 40e-6), "tpu_v5e": (90e9, 10e-6), "tpu_v6e": (200e9, 10e-6),
}  # fmt: skip
# The part of a GPU's memory that JAX allocates unless XLA_PYTHON_CLIENT_MEM_FRACTION sets another.
GPU_MEMORY_FRACTION = 0.75
ALIASES = {"v5e": "tpu_v5e", "v6e": "tpu_v6e"}
RATED = ("cpu", *_FLOPS)


def rates_named(name: str) -> Rates:
    """Return the rates of a device by name: `cpu` is this machine's, measured once; others are from the table.

    Raises:
        ProfileError: there are no rates of such a device; the message has a suggestion.
    """
    product = ALIASES.get(name, name)
    if not isinstance(name, str) or product not in RATED:
        names = [n for n in (*RATED, *ALIASES) if n not in ALIASES.values()]
        hint = did_you_mean(str(name), names)
        raise ProfileError(f"device: there are no rates of {quote(str(name))}; there are {', '.join(names)}{hint}")
    if product == "cpu":
        return _measured_cpu()
    device = named_device(product)
    is_gpu = device.kind == "cuda"
    memory = int((device.memory or 0) * (GPU_MEMORY_FRACTION if is_gpu else 1))
    link, link_seconds = _LINKS[product]
    return Rates(
        replace(device, memory=memory), device.bandwidth or 1.0,
        {dtype: device.flops or 1.0 for dtype in ("bf16", "f16", "f32")} | _FLOPS[product],
        H200_KERNELS if is_gpu else TPU_KERNELS, _scaled(H200_UNPACK, device), _scaled(H200_UNPACK_TILES, device), link,
        link_seconds,
        "measured" if product == "h200" else "data sheet", GPU_CALL_SECONDS if is_gpu else 0.0,
        GPU_ARGUMENT_SECONDS if is_gpu else 0.0,
    )  # fmt: skip


def _scaled(per_second: tuple[float, float], device: Device) -> tuple[float, float]:
    """Return what an H200 decodes per second, for another device in proportion to its products."""
    share = (device.flops or 0.0) / (DEVICES["h200"].flops or 1.0)
    return per_second[0] * share, per_second[1] * share


def rates_of(device: Device) -> Rates | None:
    """Return the rates of a running device; None if they are not known for its product."""
    if device.name not in RATED:
        return None
    rates = rates_named(device.name)
    return replace(rates, device=replace(rates.device, memory=device.memory or rates.device.memory))


# -- the CPU that runs -------------------------------------------------------------------------

# Rows and sides of the measured products, and side of the matrix that is read (64 MB in f32, over most caches).
_ROWS, _SIDES, _READ_SIDE = 256, (1024, 512), 4096
# Steps of the measured loop.
_STEPS = 4
DTYPES = {"f32": np.dtype(jnp.float32), "bf16": np.dtype(jnp.bfloat16)}
CPU_KERNELS: Mapping[KernelKind, KernelRate] = {
    "product": KernelRate(1.0, 1.0, 4e-6), "attention": KernelRate(0.3, 0.5, 4e-6),
    "experts": KernelRate(0.6, 0.8, 4e-6), "recurrence": KernelRate(0.2, 0.5, 4e-6),
    "reduction": KernelRate(0.5, 0.5, 4e-6), "fused": KernelRate(0.5, 0.5, 4e-6),
}  # fmt: skip


@functools.cache
def _measured_cpu() -> Rates:
    """Measure how fast this CPU multiplies and reads, in a second."""
    with jax.default_device(jax.devices("cpu")[0]):
        runs = [_product(_ROWS, _SIDES, name) for name in DTYPES]
        *products, read = least_seconds([*runs, _product(1, (_READ_SIDE, _READ_SIDE), "f32", _STEPS)], 1.0)
    flops = {name: 2 * math.prod(_SIDES) * _ROWS / s for name, s in zip(DTYPES, products, strict=True)}
    bandwidth = 4 * _READ_SIDE**2 * _STEPS / read
    here = running_device()
    device = here if here.kind == "cpu" else replace(DEVICES["cpu"], memory=None)
    # 8-bit codes take 1.05, 4-bit codes 1.8 of the time of f32 weights (docs/weights.md).
    unpack = bandwidth / 3.1, bandwidth / 6.6
    return Rates(
        device, bandwidth, flops | {"f16": flops["bf16"]}, CPU_KERNELS, unpack, unpack, bandwidth / 4, 50e-6,
        "measured", samples=True,
    )  # fmt: skip


def _product(rows: int, sides: tuple[int, int], dtype: str, steps: int = 1) -> Callable[[], Any]:
    """Return a run of some products, one after the other, of `[rows, in]` and the transpose of `[out, in]`."""
    x, w = jnp.zeros((rows, sides[1]), DTYPES[dtype]), jnp.zeros(sides, DTYPES[dtype])

    def product(_: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, partial(product, w=w), x) if steps > 1 else product(0, x, w)

    jitted = jax.jit(run)
    return lambda: jax.block_until_ready(jitted(x, w))


def least_seconds(runs: Sequence[Callable[[], Any]], budget: float) -> list[float]:
    """Return the least seconds of each of several runs, after one that compiles.

    They take turns, so that what else the machine does for a while slows down no run in all rounds. Medians would have
    the time in which threads wake up, which ops in the middle of a program do not take.

    Args:
        runs: the runs.
        budget: the seconds in which to begin another round; there are three at least.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < 9 and time.perf_counter() - start < budget):
        rounds += 1
        for run, seconds in zip(runs, times, strict=True):
            until = time.perf_counter() + 0.01  # short runs more often
            for _ in range(8):
                before = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - before)
                if time.perf_counter() > until:
                    break
    return list(map(min, times))
