"""Which implementation runs the experts of a mixture. `ExpertFfn.eval` is the meaning: every expert for every token.

- `gathered` reads the weights of the experts of each token, for few tokens;
- `eval` reads each expert once, and computes all of them, which costs nothing while reading them takes longer;
- `blocked` sorts the choices by expert, in blocks of one expert each, and multiplies block by block: no more than the
  products that are needed, and the rest of the last block of each expert;
- `ragged` sorts too, and leaves the groups to `jax.lax.ragged_dot`, which is one kernel on a TPU and on other platforms
  every expert for every token.

Measured on one H200, bf16, 8 layers of 128 experts of width 768 over 2048, 8 of them for each token, ms, what reading
and computing cannot go below, and this: 1 token 0.13, `gathered` 0.36; 8 tokens 0.81, `gathered` 1.31; 64 tokens 1.98,
`eval` 2.94, `ragged` 12.5; 16384 tokens 10.0, `blocked` 39.5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.device import Device
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.lir.choices import Call, Choice, call_of

AnyArray = Any

WORK = 200.0
"""Operations for each byte of weights up to which computing every expert hides behind reading it, where the device does
not say."""


def choose_experts(graph: Graph, device: Device, wanted: str, divided: bool = False) -> dict[Call, Choice]:
    """How every mixture of a program with static sizes runs. `wanted` is auto or the name of an implementation.

    Over several devices that have their own experts, all compute theirs for every token, and the results are added.
    """
    calls = {call_of(g, n) for g, n in graph.walk() if isinstance(n.op, ExpertFfn)}
    if wanted != "auto":
        return {call: Choice("xla" if wanted == "dense" else wanted, "asked for") for call in calls}
    if divided:
        return {call: Choice("xla", "experts are divided over devices") for call in calls}
    return {call: choose(call, device) for call in calls}


def choose(call: Call, device: Device) -> Choice:
    """The implementation of one mixture."""
    _, (x, gate, *_, ids) = call
    experts, chosen, tokens = int(gate.shape[0]), ids.size, ids.size // int(ids.shape[-1])
    if chosen <= experts:
        return Choice("gathered", f"{chosen} choices of {experts} experts")
    if device.kind == "tpu":
        return Choice("ragged", "one kernel")
    work = device.flops / device.bandwidth if device.flops and device.bandwidth else WORK
    if device.kind != "cpu" and 2 * tokens <= work * gate.dtype.itemsize:
        return Choice("xla", f"{tokens} tokens: reading the experts takes longer than computing all")
    return Choice("blocked", f"{chosen} choices of {experts} experts")


def over_devices(
    op: ExpertFfn, run: Callable[..., AnyArray], division: Division, arrays: tuple[AnyArray, ...]
) -> AnyArray:
    """The op over a mesh: each device runs its own experts, or its part of each, for the rows that it has, and what
    they give is added. A choice of an expert that another device has is of none here."""
    x, gate, up, down, weights, ids = arrays
    rows, choices = (division.value((*op.roles, None), a.shape).spec for a in (x, ids))
    wide = division.value(("experts", "ffn", None) if op.contract else ("experts", None, "ffn"), gate.shape).spec
    narrow = division.value(("experts", None, "ffn") if op.contract else ("experts", "ffn", None), down.shape).spec
    own = _axes(wide[:1])

    def here(*arrays: AnyArray) -> AnyArray:
        x, gate, up, down, weights, ids = arrays
        if own:
            ids = ids - lax.axis_index(own) * gate.shape[0]
            mine = (ids >= 0) & (ids < gate.shape[0])
            # An id that no expert has is seen by none; ways that read by id get one, with a weight of nothing.
            ids = jnp.where(mine, ids, gate.shape[0] if run == op.eval else 0)
            weights = jnp.where(mine, weights, 0)
        made = run(x, gate, up, down, weights, ids)
        return lax.psum(made, _axes(wide)) if _axes(wide) else made

    divided = jax.shard_map(
        here, mesh=division.mesh, in_specs=(rows, wide, wide, narrow, choices, choices), out_specs=rows
    )
    return divided(*arrays)


def _axes(entries: Iterable[Any]) -> tuple[str, ...]:
    """The axes of a mesh that entries of a spec name."""
    named = (entry if isinstance(entry, tuple) else (entry,) for entry in entries if entry is not None)
    return tuple(itertools.chain.from_iterable(named))


def gathered(
    op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray, ids: AnyArray
) -> AnyArray:
    """The op with the weights of each choice, as a batch of products of one row."""
    flat, each = ids.reshape(-1), jnp.repeat(x.reshape(-1, x.shape[-1]), ids.shape[-1], axis=0)
    wide, narrow = ("nh,nfh->nf", "nf,nhf->nh") if op.contract else ("nh,nhf->nf", "nf,nfh->nh")

    def product(subscripts: str, x: AnyArray, w: AnyArray, dtype: Any = None) -> AnyArray:
        return op.product(subscripts, x, jnp.take(w, flat, axis=0, mode="clip"), dtype)

    inner = op.gated(*(product(wide, each, w) for w in (gate, up)))
    return _combined(op, product(narrow, inner, down, jnp.float32), x, weights)


def blocked(op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray,
            ids: AnyArray) -> AnyArray:  # fmt: skip
    """The op by blocks of choices of one expert, whose weights are multiplied as a batch."""
    experts, top = gate.shape[0], ids.shape[-1]
    flat = ids.reshape(-1)
    rows = block_rows(flat.size, experts)
    blocks = min(-(-flat.size // rows) + experts - 1, flat.size)  # as many as there can be
    order, counts = jnp.argsort(flat, stable=True), _counts(flat, experts)
    first = jnp.cumsum(counts) - counts  # of each expert, among the sorted choices
    needs = -(-counts // rows)
    begins = jnp.cumsum(needs) - needs  # the first block of each expert
    owner = jnp.clip(jnp.searchsorted(begins + needs, jnp.arange(blocks), side="right"), 0, experts - 1)
    within = (jnp.arange(blocks) - begins[owner])[:, None] * rows + jnp.arange(rows)[None, :]
    used = within < counts[owner][:, None]
    choice = order[jnp.where(used, first[owner][:, None] + within, 0)]  # the choice that each row of a block is of
    inside = x.reshape(-1, x.shape[-1])[choice // top]
    wide, narrow = ("brh,bfh->brf", "brf,bhf->brh") if op.contract else ("brh,bhf->brf", "brf,bfh->brh")
    inner = op.gated(*(op.product(wide, inside, w[owner]) for w in (gate, up)))
    out = op.product(narrow, inner, down[owner]).reshape(blocks * rows, -1)  # f32 would move twice the bytes
    place = (
        jnp.zeros_like(flat)
        .at[jnp.where(used, choice, flat.size)]
        .set(jnp.arange(blocks * rows, dtype=flat.dtype).reshape(blocks, rows), mode="drop")
    )  # the row of each choice
    return _combined(op, out[place].astype(jnp.float32), x, weights)


def ragged(op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray,
           ids: AnyArray) -> AnyArray:  # fmt: skip
    """The op by groups of choices, sorted by expert."""
    experts, top, flat = gate.shape[0], ids.shape[-1], ids.reshape(-1)
    order, counts = jnp.argsort(flat, stable=True), _counts(flat, experts)
    inside = x.reshape(-1, x.shape[-1])[order // top]

    def product(x: AnyArray, w: AnyArray, dtype: Any) -> AnyArray:
        turned = w.swapaxes(1, 2) if op.contract else w
        return lax.ragged_dot(x, turned, counts, precision=lax.Precision(op.precision), preferred_element_type=dtype)

    inner = op.gated(*(product(inside, w, x.dtype) for w in (gate, up)))
    return _combined(op, product(inner, down, jnp.float32)[jnp.argsort(order)], x, weights)


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block: about half of what an expert has, as the last block of each is not full."""
    return int(2 ** max(0, round(math.log2(max(choices / experts, 1.0))) - 1))


def _counts(ids: AnyArray, experts: int) -> AnyArray:
    """How often each expert was chosen."""
    return jnp.zeros(experts, jnp.int32).at[ids].add(1)


def _combined(op: ExpertFfn, out: AnyArray, x: AnyArray, weights: AnyArray) -> AnyArray:
    """The weighted sum of what the choices of each token give, `[choices, H]` f32."""
    each = out.reshape(*weights.shape, -1)
    return (each * weights.astype(jnp.float32)[..., None]).sum(-2).astype(x.dtype)
