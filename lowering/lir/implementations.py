"""The implementations of ops that have more than their `eval`, and which of them a program takes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.device import Device
from rlx_jax.ir.graph import Graph, Mir, located
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep, write_rows
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.lir.attention import choose as choose_attention
from rlx_jax.lowering.lir.attention import cudnn, query_chunks
from rlx_jax.lowering.lir.experts import blocked, choose_experts, gathered, looped, ragged
from rlx_jax.lowering.lir.plan import CACHE_WRITES, CHOSEN, PRODUCTS, RECURRENCES, Call, Choice, call_of
from rlx_jax.lowering.lir.recurrent import choose as choose_recurrence
from rlx_jax.lowering.lir.recurrent import chunk_by_chunk, chunks_at_once, one_token
from rlx_jax.lowering.sharding import Division

AnyArray = Any


def choose_product(call: Call, device: Device, wanted: str) -> Choice | None:
    """`row` for a product of one row with a weight `[out, in]`. `wanted` is auto, xla or row; the others XLA runs as it
    does."""
    op, (x, *_) = call
    assert isinstance(op, MatMul | FusedMatMulBiasAct)
    if wanted == "xla" or (wanted == "auto" and device.kind != "cuda"):
        return None
    if op.contract == 0 or math.prod(int(n) for n in x.shape[:-1]) > 1:
        return None
    return Choice("row", "asked for" if wanted == "row" else "one row: cuBLAS is slower")


def row(op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: AnyArray, *bias: AnyArray) -> AnyArray:
    """The op for one row: x `[1, …, K]`, w `[N, K]`, products and their sum in f32.

    One row against a matrix reads the matrix once and computes next to nothing. Measured on one H200, bf16, µs, cuBLAS
    and this, which XLA sums up, weights `[out, in]`: 16384 x 2048 19.2 and 16.8, 2048 x 8192 10.1 and 9.3, 128256 x
    2048 131 and 117.
    """
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(row(op.product, x, w), *bias)
    y = (w.astype(jnp.float32) * x.astype(jnp.float32).reshape(1, -1)).sum(axis=1)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)


def choose_cache_write(call: Call, device: Device) -> Choice | None:
    """`in_loop` for a write that scatters rows into a 16-bit floating-point cache on a CPU."""
    op, (cache, *_) = call
    scatters = not (isinstance(op, CacheUpdate) and op.fresh)
    if device.kind == "cpu" and scatters and is_float(cache.dtype) and cache.dtype.itemsize == 2:
        return Choice("in_loop", "XLA:CPU copies a 16-bit cache otherwise")
    return None


def in_loop(op: CacheUpdate | RingStep, *arrays: Array) -> Any:
    """Evaluate a `CacheUpdate` or `RingStep` with its write in a loop of at most one turn.

    XLA:CPU's pass `float-normalization-bf16` computes every bf16 op in f32, scatters and `dynamic_update_slice` too. A
    scatter of one row into a bf16 cache then widens the cache to f32 and narrows it again; of a batch of one row it
    becomes a fusion that reads the old cache twice, so that the cache is copied as well. f16 is not normalized, but the
    write of one row may be fused into the ops that read the cache, which also reads the old cache twice.

    Two properties avoid this. A bf16 cache is written by an elementwise select, which XLA computes in place and in one
    pass. And the write is the body of a loop of at most one turn: XLA fuses nothing across the border of a loop, and a
    loop updates its carry in place.
    """
    return op.eval(*arrays, write=write_in_loop)


def write_in_loop(cache: Array, slots: Array, rows: Array, ordered: bool = False) -> Array:
    """Write rows as `write_rows` does, see there; skip the cache if no row has a slot in it."""
    turns = (slots < cache.shape[1]).any().astype(jnp.int32)

    def scatter(_: Any, cache: Array) -> Array:
        return write_rows(cache, slots, rows, ordered)

    # The number of the row that goes to each slot, -1 for none: `[B,T]`, small, and equal for all layers.
    numbers = jnp.broadcast_to(jnp.arange(slots.shape[1], dtype=jnp.int32), slots.shape)
    sources = write_rows(jnp.full(cache.shape[:2], -1, jnp.int32), slots, numbers, ordered)
    is_written = (sources >= 0).reshape(*sources.shape, *(1,) * (cache.ndim - 2))

    def select(_: Any, cache: Array) -> Array:
        # One row goes to every slot that is written: broadcast, for a gather of bf16 is slower.
        each = rows if rows.shape[1] == 1 else jax.vmap(lambda r, s: jnp.take(r, s, axis=0, mode="clip"))(rows, sources)
        return jnp.where(is_written, each, cache)

    written: Array = lax.fori_loop(0, turns, scatter if cache.dtype == np.float16 else select, cache)
    return written


def in_kernels(name: str) -> Callable[..., Any]:
    """An implementation of `kernels.py`, which imports Pallas, imported where one runs."""

    def run(op: Mir, *arrays: Any) -> Any:
        return getattr(importlib.import_module("rlx_jax.lowering.lir.kernels"), name)(op, *arrays)

    return run


# Kernels of our own.
KERNELS = ("grouped", "one_pass", "states_in_one")

# How to run an op, by the name of the implementation; each equals `eval`.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": lambda op, *arrays: op.eval(*arrays),
    "cudnn": cudnn,
    # Operands laid out head by head, as XLA's products on a CPU want them.
    "heads_first": lambda op, *arrays: op.eval(*arrays, heads_first=True),
    "query_chunks": query_chunks,
    "row": row,
    "one_token": one_token,
    "chunks_at_once": chunks_at_once,
    "chunk_by_chunk": chunk_by_chunk,
    "gathered": gathered,
    "blocked": blocked,
    "looped": looped,
    "ragged": ragged,
    "in_loop": in_loop,
    **{name: in_kernels(name) for name in KERNELS},
}

# Held while the filters of warnings, which are the whole process's, are others.
LOWERING = threading.Lock()


def has_kernels(device: Device) -> bool:
    """Whether kernels of our own were measured on the device, and this JAX has what they are written in."""
    return device.has_kernels and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether this JAX has Pallas' Triton backend, which is deprecated since 0.11 and will go."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def without_deprecation(choices: Mapping[Call, Choice]) -> Iterator[None]:
    """Lower a program with these choices without JAX's word on Triton, about which a user can do nothing."""
    if not any(choice.implementation in KERNELS for choice in choices.values()):
        yield
        return
    with LOWERING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        yield


def choose_all(
    graph: Graph, device: Device, attention: str, products: str, experts: str, division: Division | None, kernels: bool
) -> dict[Call, Choice]:
    """The implementation of every attention and mixture of experts of a program with static sizes, and of products,
    recurrences and cache writes where `eval` loses. `kernels` of our own run on one device.

    Raises:
        UnsupportedError: attention cannot have what was asked for; names its block and the reason.
    """
    own = kernels and division is None and has_kernels(device)
    rules: dict[type[Mir], Callable[[Call], Choice | None]] = {
        AttentionOp: lambda call: choose_attention(call, device, attention),
        **dict.fromkeys(PRODUCTS, lambda call: choose_product(call, device, products)),
        **dict.fromkeys(RECURRENCES, lambda call: choose_recurrence(call, device, own)),
        **dict.fromkeys(CACHE_WRITES, lambda call: choose_cache_write(call, device)),
        ExpertFfn: lambda call: choose_experts(call, device, experts, division, own),
    }
    chosen: dict[Call, Choice] = {}
    for inner, node in graph.walk():
        if isinstance(node.op, CHOSEN):
            call = call_of(inner, node)
            with located(node.origin):
                choice = rules[type(node.op)](call)
            chosen |= {} if choice is None else {call: choice}
    return chosen


def runnable(choices: Mapping[Call, Choice], device: Device) -> dict[Call, Choice]:
    """The choices that a device can run; `eval` means the same as the others."""
    missing = set(() if device.kind == "cuda" else ("cudnn",)) | set(() if has_kernels(device) else KERNELS)
    return {call: choice for call, choice in choices.items() if choice.implementation not in missing}
