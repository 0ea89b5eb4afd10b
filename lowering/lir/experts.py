"""Which implementation runs the experts of a mixture. `ExpertFfn.eval` is the meaning: every expert for every token.

- `gathered` reads the weights of the experts of each token, for few tokens;
- `eval` reads each expert once, and computes all of them, which costs nothing while reading them takes longer;
- `blocked` sorts the choices by expert, in blocks of one expert each, and multiplies block by block: no more than the
  products that are needed, and the rest of the last block of each expert;
- `looped` does so block by block, and computes those alone that have choices in them;
- `ragged` sorts too, and leaves the groups to `jax.lax.ragged_dot`, which is one kernel on a TPU and on other platforms
  every expert for every token.

Measured on one H200, bf16, 8 layers of 128 experts of width 768 over 2048, 8 of them for each token, ms, what reading
and computing cannot go below, and this: 1 token 0.13, `gathered` 0.36; 8 tokens 0.81, `gathered` 1.31; 64 tokens 1.98,
`eval` 2.94, `ragged` 12.5; 16384 tokens 10.0, `blocked` 39.5.
On two cores of an AMD EPYC that other work shared, f32, 32 experts of width 256 over 512, 4 for each token, ms,
`looped` and the best of the others: 1 token 0.24 and 0.37; 16 tokens 3.9 and 81; 512 tokens 47 and 725.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.device import Device
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.experts import ExpertFfn, plus
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.lir.choices import Call, Choice, call_of

AnyArray = Any

NONE = (None, None, None)
"""Of experts without biases."""

WORK = 200.0
"""Operations for each byte of weights up to which computing every expert hides behind reading it, where the device does
not say."""


def choose_experts(graph: Graph, device: Device, wanted: str, divided: bool = False) -> dict[Call, Choice]:
    """How every mixture of a program with static sizes runs. `wanted` is auto or the name of an implementation.

    Over several devices that have their own experts, all compute theirs for every token, and the results are added.
    """
    calls = {call_of(g, n) for g, n in graph.walk() if isinstance(n.op, ExpertFfn)}
    if wanted != "auto":
        chosen = Choice("xla", "dense, as asked for") if wanted == "dense" else Choice(wanted, "asked for")
        return dict.fromkeys(calls, chosen)
    if divided:
        return {call: Choice("xla", "experts are divided over devices") for call in calls}
    return {call: choose(call, device) for call in calls}


def choose(call: Call, device: Device) -> Choice:
    """The implementation of one mixture."""
    _, (x, gate, *_, ids) = call
    experts, chosen, tokens = int(gate.shape[0]), ids.size, ids.size // int(ids.shape[-1])
    if device.kind == "cpu":
        return Choice("looped", "batches of products are slow on a CPU")
    if chosen <= experts:
        return Choice("gathered", f"{chosen} choices of {experts} experts")
    if device.kind == "tpu":
        return Choice("ragged", "one kernel")
    work = device.flops / device.bandwidth if device.flops and device.bandwidth else WORK
    if 2 * tokens <= work * gate.dtype.itemsize:
        return Choice("xla", f"{tokens} tokens: reading the experts takes longer than computing all")
    return Choice("blocked", f"{chosen} choices of {experts} experts")


def over_devices(
    op: ExpertFfn, run: Callable[..., AnyArray], division: Division, arrays: tuple[AnyArray, ...]
) -> AnyArray:
    """The op over a mesh: each device runs its own experts, or its part of each, for the rows that it has, and what
    they give is added. A choice of an expert that another device has is of none here."""
    x, gate, up, down, weights, ids, *biases = arrays
    rows, choices = (division.value((*op.roles, None), a.shape).spec for a in (x, ids))
    wide = division.value(("experts", "ffn", None) if op.contract else ("experts", None, "ffn"), gate.shape).spec
    narrow = division.value(("experts", None, "ffn") if op.contract else ("experts", "ffn", None), down.shape).spec
    own, parts = _axes(wide[:1]), _axes(wide)
    outs = zip(("ffn", "ffn", None), biases, strict=False)
    beside = [division.value(("experts", role), bias.shape).spec for role, bias in outs]

    def here(*arrays: AnyArray) -> AnyArray:
        gate, up, down, *biases = *arrays[1:4], *arrays[6:]
        # What a device makes of rows that others have too is its own.
        x, weights, ids = (lax.pcast(a, parts, to="varying") if parts else a for a in (arrays[0], *arrays[4:6]))
        if biases and (within := parts[len(own) :]):  # of the sum over parts of an expert one has the bias
            biases[2] = jnp.where(lax.axis_index(within) == 0, biases[2], 0)
        if own:
            ids = ids - lax.axis_index(own) * gate.shape[0]
            mine = (ids >= 0) & (ids < gate.shape[0])
            # An id that no expert has is seen by none; ways that read by id get one, with a weight of nothing.
            ids = jnp.where(mine, ids, gate.shape[0] if run == op.eval else 0)
            weights = jnp.where(mine, weights, 0)
        made = run(x, gate, up, down, weights, ids, *biases)
        return lax.psum(made, parts) if parts else made

    divided = jax.shard_map(
        here, mesh=division.mesh, in_specs=(rows, wide, wide, narrow, choices, choices, *beside), out_specs=rows
    )
    return divided(*arrays)


def _axes(entries: Iterable[Any]) -> tuple[str, ...]:
    """The axes of a mesh that entries of a spec name."""
    named = (entry if isinstance(entry, tuple) else (entry,) for entry in entries if entry is not None)
    return tuple(itertools.chain.from_iterable(named))


def gathered(
    op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray, ids: AnyArray,
    *biases: AnyArray,
) -> AnyArray:  # fmt: skip
    """The op with the weights of each choice, as a batch of products of one row."""
    flat, each = ids.reshape(-1), jnp.repeat(x.reshape(-1, x.shape[-1]), ids.shape[-1], axis=0)
    wide, narrow = ("nh,nfh->nf", "nf,nhf->nh") if op.contract else ("nh,nhf->nf", "nf,nfh->nh")

    def own(w: AnyArray | None) -> AnyArray | None:
        return None if w is None else jnp.take(w, flat, axis=0, mode="clip")

    def product(subscripts: str, x: AnyArray, w: AnyArray, bias: AnyArray | None, dtype: Any = None) -> AnyArray:
        return plus(op.product(subscripts, x, own(w), dtype), own(bias))

    gate_bias, up_bias, down_bias = biases or NONE
    inner = op.gated(*(product(wide, each, w, bias) for w, bias in ((gate, gate_bias), (up, up_bias))))
    return _combined(op, product(narrow, inner, down, down_bias, jnp.float32), x, weights)


def blocked(
    op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray, ids: AnyArray,
    *biases: AnyArray,
) -> AnyArray:  # fmt: skip
    """The op by blocks of choices of one expert, whose weights are multiplied as a batch."""
    # Half of what an expert has, as the last block of each is not full.
    cut = sorted_blocks(ids, len(gate), max(block_rows(ids.size, len(gate)) // 2, 1))
    inside = x.reshape(-1, x.shape[-1])[cut.choice // ids.shape[-1]]
    wide, narrow = ("brh,bfh->brf", "brf,bhf->brh") if op.contract else ("brh,bhf->brf", "brf,bfh->brh")

    def product(subscripts: str, x: AnyArray, w: AnyArray, bias: AnyArray | None) -> AnyArray:
        return plus(op.product(subscripts, x, w[cut.owner]), None if bias is None else bias[cut.owner][:, None])

    gate_bias, up_bias, down_bias = biases or NONE
    inner = op.gated(*(product(wide, inside, w, bias) for w, bias in ((gate, gate_bias), (up, up_bias))))
    out = product(narrow, inner, down, down_bias)  # f32 would move twice the bytes
    return _combined(op, cut.back(out).astype(jnp.float32), x, weights)


def looped(
    op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray, ids: AnyArray,
    *biases: AnyArray,
) -> AnyArray:  # fmt: skip
    """The op by blocks of choices of one expert, block by block; those that nothing is in cost nothing."""
    cut = sorted_blocks(ids, len(gate), block_rows(ids.size, len(gate)))
    inside = x.reshape(-1, x.shape[-1])[cut.choice // ids.shape[-1]]
    wide, narrow = ("rh,fh->rf", "rf,hf->rh") if op.contract else ("rh,hf->rf", "rf,fh->rh")

    def block(given: tuple[AnyArray, AnyArray, AnyArray]) -> AnyArray:
        rows, owner, used = given

        def filled() -> AnyArray:
            own = [lax.dynamic_index_in_dim(w, owner, keepdims=False) for w in (gate, up, down, *biases)]
            gate_bias, up_bias, down_bias = own[3:] or NONE
            both = ((own[0], gate_bias), (own[1], up_bias))
            inner = op.gated(*(plus(op.product(wide, rows, w), bias) for w, bias in both))
            return plus(op.product(narrow, inner, own[2], jnp.float32), down_bias)

        return lax.cond(used, filled, lambda: jnp.zeros_like(rows, jnp.float32))

    return _combined(op, cut.back(lax.map(block, (inside, cut.owner, cut.used[:, 0]))), x, weights)


@dataclass(frozen=True)
class SortedChoices:
    """Choices sorted by expert, in blocks of rows of one expert each: whose block it is, which rows are used, the
    number of the choice in each row, and the row of each choice."""

    owner: AnyArray
    used: AnyArray
    choice: AnyArray
    place: AnyArray

    def back(self, out: AnyArray) -> AnyArray:
        """What the rows gave, in the order of the choices."""
        return out.reshape(-1, out.shape[-1])[self.place]


def sorted_blocks(ids: AnyArray, experts: int, rows: int) -> SortedChoices:
    """As many blocks as there can be."""
    flat = ids.reshape(-1)
    number = jnp.arange(min(-(-flat.size // rows) + experts - 1, flat.size))
    order, counts = jnp.argsort(flat, stable=True), _counts(flat, experts)
    first, needs = jnp.cumsum(counts) - counts, -(-counts // rows)  # of each expert: its first choice, its blocks
    ends = jnp.cumsum(needs)
    owner = jnp.clip(jnp.searchsorted(ends, number, side="right"), 0, experts - 1)
    within = (number - (ends - needs)[owner])[:, None] * rows + jnp.arange(rows)[None, :]
    used = within < counts[owner][:, None]
    choice = order[jnp.where(used, first[owner][:, None] + within, 0)]
    row = jnp.arange(number.size * rows, dtype=flat.dtype).reshape(choice.shape)
    place = jnp.zeros_like(flat).at[jnp.where(used, choice, flat.size)].set(row, mode="drop")
    return SortedChoices(owner, used, choice, place)


def ragged(
    op: ExpertFfn, x: AnyArray, gate: AnyArray, up: AnyArray, down: AnyArray, weights: AnyArray, ids: AnyArray,
    *biases: AnyArray,
) -> AnyArray:  # fmt: skip
    """The op by groups of choices, sorted by expert."""
    experts, top, flat = gate.shape[0], ids.shape[-1], ids.reshape(-1)
    order, counts = jnp.argsort(flat, stable=True), _counts(flat, experts)
    inside = x.reshape(-1, x.shape[-1])[order // top]

    def product(x: AnyArray, w: AnyArray, bias: AnyArray | None, dtype: Any) -> AnyArray:
        turned, precision = w.swapaxes(1, 2) if op.contract else w, lax.Precision(op.precision)
        made = lax.ragged_dot(x, turned, counts, precision=precision, preferred_element_type=dtype)
        return plus(made, None if bias is None else bias[flat[order]])

    gate_bias, up_bias, down_bias = biases or NONE
    inner = op.gated(*(product(inside, w, bias, x.dtype) for w, bias in ((gate, gate_bias), (up, up_bias))))
    return _combined(op, product(inner, down, down_bias, jnp.float32)[jnp.argsort(order)], x, weights)


def block_rows(choices: int, experts: int) -> int:
    """About as many as an expert has, a power of 2."""
    return int(2 ** round(math.log2(max(choices / experts, 1.0))))


def _counts(ids: AnyArray, experts: int) -> AnyArray:
    """How often each expert was chosen."""
    return jnp.zeros(experts, jnp.int32).at[ids].add(1)


def _combined(op: ExpertFfn, out: AnyArray, x: AnyArray, weights: AnyArray) -> AnyArray:
    """The weighted sum of what the choices of each token give, `[choices, H]` f32."""
    each = out.reshape(*weights.shape, -1)
    return (each * weights.astype(jnp.float32)[..., None]).sum(-2).astype(x.dtype)
