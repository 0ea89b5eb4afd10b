"""Table of implementations for ops that have alternatives to `eval`, and the choice for each node of a program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from rlx_jax.device import Device
from rlx_jax.ir.graph import Graph, Mir, Param, locate_errors
from rlx_jax.ir.kernel_group import AttentionGroup, DeltaGroup, ExpertGroup, HeadGroup, KernelGroup
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.cache import CacheUpdate, RingStep, write_rows
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp
from rlx_jax.ir.ops.reduce import RmsNormOp
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.lowering.lir.attention import choose as choose_attention
from rlx_jax.lowering.lir.attention import cudnn, query_chunks
from rlx_jax.lowering.lir.attention_groups import run_attention
from rlx_jax.lowering.lir.expert_groups import run_experts
from rlx_jax.lowering.lir.experts import blocked, choose_experts, gathered, looped, ragged
from rlx_jax.lowering.lir.head_groups import run_heads
from rlx_jax.lowering.lir.lanes import has_lanes, lanes
from rlx_jax.lowering.lir.mosaic import LazyModule
from rlx_jax.lowering.lir.packed import decoded, multiplies_tiles
from rlx_jax.lowering.lir.plan import CACHE_WRITES, CHOICE_OPS, PRODUCTS, RECURRENCES, Call, Choice, Plan, call_of
from rlx_jax.lowering.lir.product_groups import run_group
from rlx_jax.lowering.lir.recurrent import choose as choose_recurrence
from rlx_jax.lowering.lir.recurrent import chunk_by_chunk, chunks_at_once, one_token
from rlx_jax.lowering.sharding import ModelSharding

AnyArray = Any

# Tokens of a causal convolution, at least, that runs as a kernel of its own on a GPU.
MIN_UNFUSED_TOKENS = 512


def choose_product(call: Call, device: Device, preference: str) -> Choice | None:
    """Choose `row`, or `lanes` on a CPU, for a product of one row with a weight `[out, in]`; None leaves it to XLA.

    Args:
        call: the op and the types of its operands, with static sizes.
        device: the target.
        preference: `auto`, `xla` or `row`.
    """
    op, (x, w, *_) = call
    assert isinstance(op, MatMul | FusedMatMulBiasAct)
    if preference == "xla" or op.contract == 0:
        return None
    rows = math.prod(int(n) for n in x.shape[:-1])
    if device.kind == "cpu" and has_lanes(rows, w):
        return Choice("lanes", "asked for" if preference == "row" else "few rows: XLA:CPU converts 16-bit weights")
    if rows > 1 or (preference == "auto" and device.kind != "cuda"):
        return None
    return Choice("row", "asked for" if preference == "row" else "one row: cuBLAS is slower")


def few_rows(
    multiply: Callable[[AnyArray, AnyArray], AnyArray],
    op: MatMul | FusedMatMulBiasAct,
    x: AnyArray,
    w: AnyArray,
    *bias: AnyArray,
) -> AnyArray:
    """Compute a product by `multiply`, which takes x `[M, K]` and w `[N, K]`, in float32."""
    if isinstance(op, FusedMatMulBiasAct):
        return op.finish(few_rows(multiply, op.product, x, w), *bias)
    y = multiply(x.astype(jnp.float32).reshape(-1, x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], -1).astype(jnp.float32 if op.f32_result else x.dtype)


def row(x: AnyArray, w: AnyArray) -> AnyArray:
    """Compute a product of one row as a multiplication and a sum: x `[1, K]`, w `[N, K]`.

    The product of one row with a matrix is limited by reading the matrix, and XLA's fused reduction reads faster than
    cuBLAS. Measured on one H200, bf16, µs, cuBLAS and this, weights `[out, in]`: 16384 x 2048 19.2 and 16.8, 2048 x
    8192 10.1 and 9.3, 128256 x 2048 131 and 117.
    """
    return (w.astype(jnp.float32) * x).sum(axis=1)


def choose_cache_write(call: Call, device: Device) -> Choice | None:
    """Choose `in_loop` for a write that scatters rows into a cache of 8- or 16-bit floats on a CPU, else None."""
    op, (cache, *_) = call
    scatters = not (isinstance(op, CacheUpdate) and op.fresh)
    if device.kind == "cpu" and scatters and is_float(cache.dtype) and cache.dtype.itemsize <= 2:
        return Choice("in_loop", "XLA:CPU copies a cache of narrow floats otherwise")
    return None


def in_loop(op: CacheUpdate | RingStep, *arrays: Array) -> Any:
    """Evaluate a `CacheUpdate` or `RingStep` with its write in a loop of at most one iteration.

    XLA:CPU's pass `float-normalization-bf16` computes every bf16 op in f32, scatters and `dynamic_update_slice` too. A
    scatter of one row into a bf16 cache then widens the cache to f32 and narrows it again; of a batch of one row it
    becomes a fusion that reads the old cache twice, so that the cache is copied as well. f8 is normalized too. f16 is
    not, but the write of one row may be fused into the ops that read the cache, which also reads the old cache twice.

    Two properties avoid this. A bf16 or f8 cache is written by an elementwise select, which XLA computes in place and
    in one pass. And the write is the body of a loop of at most one iteration: XLA fuses nothing across the border of a
    loop, and a loop updates its carry in place.
    """
    return op.eval(*arrays, write=write_in_loop)


def write_in_loop(cache: Array, slots: Array, rows: Array, ordered: bool = False) -> Array:
    """Write rows with the arguments of `write_rows`; skip the write if no row has a slot in the cache."""
    num_iterations = (slots < cache.shape[1]).any().astype(jnp.int32)

    def scatter(_: Any, cache: Array) -> Array:
        return write_rows(cache, slots, rows, ordered)

    # The index of the row to write to each slot, -1 for none: `[B,T]`, small, and equal for all layers.
    numbers = jnp.broadcast_to(jnp.arange(slots.shape[1], dtype=jnp.int32), slots.shape)
    sources = write_rows(jnp.full(cache.shape[:2], -1, jnp.int32), slots, numbers, ordered)
    is_written = (sources >= 0).reshape(*sources.shape, *(1,) * (cache.ndim - 2))

    def select(_: Any, cache: Array) -> Array:
        # A single row is broadcast to all written slots, because a gather of bf16 is slower.
        value = (
            rows if rows.shape[1] == 1 else jax.vmap(lambda r, s: jnp.take(r, s, axis=0, mode="clip"))(rows, sources)
        )
        return jnp.where(is_written, value, cache)

    new_cache: Array = lax.fori_loop(0, num_iterations, scatter if cache.dtype == np.float16 else select, cache)
    return new_cache


def choose_convolution(call: Call, device: Device) -> Choice | None:
    """Choose `unfused` for a causal convolution of many tokens on a GPU, else None."""
    _, (z, w, *_) = call
    if device.kind == "cuda" and int(z.shape[1]) - int(w.shape[1]) + 1 >= MIN_UNFUSED_TOKENS:
        return Choice("unfused", "XLA's kernel of it and the slices after it is slower")
    return None


# Entries of rows that a kernel selects from: it has all of a row in registers.
SELECTED_SIZES = (64, 128, 256, 512)


def choose_selection(call: Call, use_kernels: bool) -> Choice | None:
    """Choose a kernel to select the largest entries of many short rows, as a router does; else None."""
    op, (x,) = call
    assert isinstance(op, TopK)
    rows = x.size // int(x.shape[-1])
    is_supported = op.largest and op.axis in (-1, len(x.shape) - 1) and op.k <= 16 and short_name(x.dtype) == "f32"
    if use_kernels and is_supported and x.shape[-1] in SELECTED_SIZES and rows >= 1024 and rows % 16 == 0:
        return Choice("selected", "XLA sorts each row")
    return None


# Tokens and width of a norm, at least, whose weight XLA multiplies with in a kernel of its own.
MIN_NORM_TOKENS, MIN_NORM_WIDTH = 1024, 512


def choose_norm(call: Call, use_kernels: bool) -> Choice | None:
    """Choose `rounded` for norms of many tokens in bf16; else None."""
    op, (x, gamma, *beta) = call
    assert isinstance(op, RmsNormOp)
    is_bf16 = short_name(x.dtype) == short_name(gamma.dtype) == "bf16"
    width = int(x.shape[-1])
    is_large = width >= MIN_NORM_WIDTH and x.size >= MIN_NORM_TOKENS * width
    if use_kernels and is_bf16 and is_large and len(gamma.shape) == 1 and not op.offset and not beta:
        return Choice("rounded", "one kernel")
    return None


def rounded(op: RmsNormOp, x: Array, gamma: Array) -> Array:
    """Compute a norm with a weight in float32, after the same rounding.

    The product of two bf16 numbers is exact in float32. XLA joins one in bf16 to the next op instead of the norm, and
    makes it a kernel of its own if that op is a call of cuBLAS.
    """
    f32 = jnp.float32
    normed = op.eval(x.astype(f32), jnp.ones(gamma.shape, f32))
    normed = lax.reduce_precision(normed, exponent_bits=8, mantissa_bits=7)
    return jnp.multiply(*same_rank(normed, gamma.astype(f32))).astype(x.dtype)


def unfused(op: CausalConvOp, *arrays: Array) -> Array:
    """Compute a convolution as a kernel without the ops that read it.

    With them XLA makes one kernel that has three results. Measured on one H200, bf16, 8 x 4096 tokens of 6,144 channels
    in the layers of Qwen3.5-0.8B, it took 0.72 ms a layer, and two kernels 0.48.
    """
    result: Array = lax.optimization_barrier(op.eval(*arrays))
    return result


def with_reference(reference: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a kernel `(op, *arrays)`: under `grad`, `jvp` and `vmap` an equivalent function runs."""

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(op: Mir, *arrays: AnyArray) -> Any:
            plain = functools.partial(reference, op)

            def run_rows(_: int, is_batched: Any, *rows: AnyArray) -> tuple[Any, Any]:
                axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
                results = jax.vmap(plain, axes)(*rows)
                return results, jax.tree.map(lambda _: True, results)

            def differentiate(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
                leaves, structure = jax.tree.flatten(primals[1:])  # a packed weight has several
                moving = {i: t for i, t in enumerate(jax.tree.leaves(tangents[1:])) if type(t) is not SymbolicZero}

                def vary(*values: AnyArray) -> Any:
                    by_number = dict(zip(moving, values, strict=True))
                    return plain(*jax.tree.unflatten(structure, [by_number.get(i, a) for i, a in enumerate(leaves)]))

                return jax.jvp(vary, tuple(leaves[i] for i in moving), tuple(moving.values()))

            batched = custom_vmap(functools.partial(kernel, op))
            batched.def_vmap(run_rows)
            # JAX 0.11 cannot compile a kernel that writes to its operands within `jax.custom_jvp`. So the kernel sees
            # constants, and an identity after it has the derivative.
            identity = jax.custom_jvp(lambda results, *_: results)
            identity.defjvp(differentiate, symbolic_zeros=True)
            return identity(batched(*lax.stop_gradient(arrays)), *arrays)

        return run

    return decorate


# The modules of the kernels of one op, imported only when one runs, as they import Pallas; then the kernels of groups.
KERNEL_MODULES = {
    name: LazyModule(f"rlx_jax.lowering.lir.{module}")
    for module, names in {
        "row_kernels": ("one_pass", "selected"), "delta_chunks": ("states_in_one", "convolved_states"),
        "expert_products": ("grouped",), "packed_tiles": ("packed_tiles",),
    }.items()
    for name in names
}  # fmt: skip
GROUP_KERNELS: dict[str, Callable[..., Any]] = {
    "matvec": run_group,
    "decode_attention": run_attention,
    "streamed": run_experts,
    "rotated": run_heads,
}
KERNELS = (*KERNEL_MODULES, *GROUP_KERNELS)

# Functions that run an op, by the name of the implementation; each computes the same as `eval`.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": lambda op, *arrays: op.eval(*arrays),
    # Operands transposed to have the head axis first: XLA's batched products on a CPU are faster so.
    "heads_first": lambda op, *arrays: op.eval(*arrays, heads_first=True),
    **{fn.__name__: functools.partial(few_rows, fn) for fn in (row, lanes)},
    **{fn.__name__: fn for fn in (cudnn, query_chunks, one_token, chunks_at_once, chunk_by_chunk, in_loop)},
    **{fn.__name__: fn for fn in (rounded, unfused)},
    **{fn.__name__: fn for fn in (gathered, blocked, looped, ragged)},
    **{
        name: lambda *arrays, name=name, module=module: getattr(module, name)(*arrays)
        for name, module in KERNEL_MODULES.items()
    },
    **{
        name: with_reference(lambda op, *arrays: op.eval(*map(decoded, arrays)))(kernel)
        for name, kernel in GROUP_KERNELS.items()
    },
}


def has_kernels(device: Device) -> bool:
    """Return whether custom kernels were measured on the device, and this JAX has Pallas' Mosaic GPU backend."""
    return device.has_kernels and has_mosaic()


@functools.cache
def has_mosaic() -> bool:
    """Return whether this JAX has Pallas' Mosaic GPU backend with the operations that kernels need: from 0.11 on."""
    return tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


def choose_implementations(
    graph: Graph, device: Device, plan: Plan, model_sharding: ModelSharding | None = None
) -> dict[Call, Choice]:
    """Choose implementations for a program with static sizes.

    Args:
        graph: the MIR program.
        device: the target.
        plan: the plan without choices, which has the requested implementations.
        model_sharding: the sharding, None on one device and in the program of one device. Kernels run without one.

    Returns:
        A choice for every attention and mixture of experts, and for those products, recurrences and cache writes for
        which another implementation is faster than `eval`.

    Raises:
        UnsupportedError: an attention cannot run by the requested implementation; names its block and the reason.
    """
    use_kernels = plan.kernels and model_sharding is None and has_kernels(device)
    rules: dict[type[Mir], Callable[[Call], Choice | None]] = {
        AttentionOp: lambda call: choose_attention(call, device, plan.implementation),
        **dict.fromkeys(PRODUCTS, lambda call: choose_product(call, device, plan.products)),
        **dict.fromkeys(RECURRENCES, lambda call: choose_recurrence(call, device, use_kernels)),
        **dict.fromkeys(CACHE_WRITES, lambda call: choose_cache_write(call, device)),
        # The passes in `compiler/passes.py` make groups only where their kernels run.
        DeltaGroup: lambda call: Choice("convolved_states", "kernels with the convolution and the norms before it"),
        HeadGroup: lambda call: Choice("rotated", "one kernel with the ops on each head before it"),
        AttentionGroup: lambda call: Choice("decode_attention", "one kernel with the ops around the attention"),
        ExpertGroup: lambda call: Choice("streamed", "two kernels, with the selection of experts"),
        KernelGroup: lambda call: Choice("matvec", "one kernel"),
        CausalConvOp: lambda call: choose_convolution(call, device),
        RmsNormOp: lambda call: choose_norm(call, use_kernels),
        TopK: lambda call: choose_selection(call, use_kernels),
        ExpertFfn: lambda call: choose_experts(call, device, plan.experts, model_sharding, use_kernels),
    }
    with_kernels = (GatedDeltaOp, ExpertFfn) if plan.experts == "auto" else (GatedDeltaOp,)
    is_refused = plan.kernels and not use_kernels and device.kind == "cuda"
    place = f"jax {jax.__version__}" if device.has_kernels else device.name
    reason = f"; no kernel: none for {'a mesh' if model_sharding is not None else place}"
    choices: dict[Call, Choice] = {}
    for inner, node in graph.walk():
        if isinstance(node.op, CHOICE_OPS):
            call = call_of(inner, node)
            with locate_errors(node.origin):
                choice = rules[type(node.op)](call)
            if choice is not None and is_refused and isinstance(node.op, with_kernels):
                choice = Choice(choice.implementation, choice.reason + reason)
            weight = inner.nodes[node.inputs[1].node].op if isinstance(node.op, PRODUCTS) else None
            takes_tiles = use_kernels and plan.packed and plan.products == "auto"
            if takes_tiles and isinstance(weight, Param) and multiplies_tiles(call, weight.programs):
                choice = Choice("packed_tiles", "a kernel decodes the packed weight in registers")
            choices |= {} if choice is None else {call: choice}
    return choices


def runnable_choices(choices: Mapping[Call, Choice], device: Device) -> dict[Call, Choice]:
    """Return the choices that a device can run. Nodes without a choice run by `eval`, which computes the same."""
    missing = set(() if device.kind == "cuda" else ("cudnn",)) | set(() if has_kernels(device) else KERNELS)
    return {call: choice for call, choice in choices.items() if choice.implementation not in missing}
