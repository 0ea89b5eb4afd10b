"""The implementations of ops that have more than their `eval`, and which of them a program takes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlx_jax.device import Device
from rlx_jax.ir.graph import Graph, Mir, located
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.lir.attention import choose as choose_attention
from rlx_jax.lowering.lir.attention import cudnn, heads_first, query_chunks
from rlx_jax.lowering.lir.cache_writes import choose_cache_write, in_loop
from rlx_jax.lowering.lir.experts import blocked, choose_experts, gathered, looped, ragged
from rlx_jax.lowering.lir.plan import CACHE_WRITES, CHOSEN, PRODUCTS, RECURRENCES, Call, Choice, call_of
from rlx_jax.lowering.lir.products import choose_product, row
from rlx_jax.lowering.lir.recurrent import choose as choose_recurrence
from rlx_jax.lowering.lir.recurrent import chunk_by_chunk, chunks_at_once, one_token


def in_kernels(name: str) -> Callable[..., Any]:
    """An implementation of `kernels.py`, which imports Pallas, imported where one runs."""

    def run(op: Mir, *arrays: Any) -> Any:
        return getattr(importlib.import_module("rlx_jax.lowering.lir.kernels"), name)(op, *arrays)

    return run


KERNELS = ("grouped", "one_pass", "states_in_one")
"""Kernels of our own."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": lambda op, *arrays: op.eval(*arrays),
    "cudnn": cudnn,
    "heads_first": heads_first,
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
"""How to run an op, by the name of the implementation; each equals `eval`."""

LOWERING = threading.Lock()
"""Held while the filters of warnings, which are the whole process's, are others."""


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
