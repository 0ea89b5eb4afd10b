"""Which implementation runs the experts of a mixture. `ExpertFfn.eval` is the meaning: every expert for every token.

- `gathered` reads the weights of the experts of each token, for few tokens;
- `eval` reads each expert once, and computes all of them, which costs nothing while reading them takes longer;
- `blocked` sorts the choices by expert, in blocks of one expert each, and multiplies block by block: no more than the
  products that are needed, and the rest of the last block of each expert;
- `looped` does so block by block, and computes those alone that have choices in them;
- `grouped` sorts too, and multiplies each block with the weights where they stand: kernels of our own (`kernels.py`);
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from rlx_jax.device import Device
from rlx_jax.ir.ops.experts import ExpertFfn, plus
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.plan import Call, Choice
from rlx_jax.lowering.sharding import Division, on_one

AnyArray = Any

# Of experts without biases.
NONE = (None, None, None)

IN_KERNELS = ("silu", "relu", "gelu_tanh")

# Operations for each byte of weights up to which computing every expert hides behind reading it, where the device does
# not say.
WORK = 200.0


def choose_experts(
    call: Call, device: Device, wanted: str, division: Division | None = None, kernels: bool = False
) -> Choice:
    """How a mixture runs. `wanted` is auto or the name of an implementation; auto takes `kernels` of our own where it
    may.

    Where devices have experts of their own, each chooses for these, and for the tokens that are brought to them.
    """
    if wanted != "auto":
        return Choice("xla", "dense, as asked for") if wanted == "dense" else Choice(wanted, "asked for")
    return choose(call, device, kernels) if division is None else choose_apart(call, device, division)


def choose_apart(call: Call, device: Device, division: Division) -> Choice:
    """As `choose` for the experts that a device has, if devices have some each."""
    op, operands = call
    assert isinstance(op, ExpertFfn)
    apart = apart_of(op, division, operands)
    if not apart.own:
        return choose(call, device)
    experts = int(operands[1].shape[0])
    brought = (tuple(n for n in _axes([entry]) if n not in apart.own) for entry in apart.rows)
    there = NamedSharding(division.mesh, PartitionSpec(*(names or None for names in brought)))
    x, weights, ids = (on_one(operands[place], there) for place in (0, 4, 5))
    own = NamedSharding(division.mesh, PartitionSpec(apart.wide[0]))
    gate, up, down, *biases = (on_one(t, own) for t in (*operands[1:4], *operands[6:]))
    chosen = choose((op, (x, gate, up, down, weights, ids, *biases)), device)
    return replace(chosen, reason=f"{gate.shape[0]} of {experts} experts on each device: {chosen.reason}")


def choose(call: Call, device: Device, kernels: bool = False) -> Choice:
    """The implementation of one mixture."""
    _, (_, gate, _, _, _, ids, *_) = call
    experts, chosen, tokens = int(gate.shape[0]), ids.size, ids.size // int(ids.shape[-1])
    if kernels and 2 * chosen >= experts and fits_kernels(call):
        return Choice("grouped", f"{chosen} choices of {experts} experts, whose weights are read where they stand")
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


def fits_kernels(call: Call) -> bool:
    """Whether `grouped` takes it: 16 bits, sizes that 32 divides, and an activation that such a kernel has."""
    op, (x, gate, *_) = call
    assert isinstance(op, ExpertFfn)
    sizes = all(int(n) % 32 == 0 for n in gate.shape[1:])
    known = op.precision == "default" and op.activation in IN_KERNELS
    return sizes and known and short_name(x.dtype) in ("bf16", "f16")


@dataclass(frozen=True)
class Apart:
    """Where a mixture is on a mesh.

    rows, choices: of x and the result, and of weights and ids. wide, narrow: of gate and up, and of down. beside: of
    biases.
    own: the mesh axes along which devices have experts of their own. gathered: axes of x that these divide, each with
    those that do: tokens are brought together along them, and results added and given back. summed: along these,
    results are added for all.
    """

    rows: PartitionSpec
    choices: PartitionSpec
    wide: PartitionSpec
    narrow: PartitionSpec
    beside: tuple[PartitionSpec, ...]
    own: tuple[str, ...]
    gathered: tuple[tuple[int, tuple[str, ...]], ...]
    summed: tuple[str, ...]


def apart_of(op: ExpertFfn, division: Division, operands: Sequence[Any]) -> Apart:
    """Of operands that are types or arrays."""
    x, gate, _, down, _, ids, *biases = operands
    rows, choices = (division.value((*op.roles, None), a.shape).spec for a in (x, ids))
    wide = division.value(("experts", "ffn", None) if op.contract else ("experts", None, "ffn"), gate.shape).spec
    narrow = division.value(("experts", None, "ffn") if op.contract else ("experts", "ffn", None), down.shape).spec
    own = _axes(wide[:1])
    shared = ((axis, tuple(n for n in _axes([entry]) if n in own)) for axis, entry in enumerate(rows))
    gathered = tuple((axis, names) for axis, names in shared if names)
    back = {name for _, names in gathered for name in names}
    outs = zip(("ffn", "ffn", None), biases, strict=False)
    beside = tuple(division.value(("experts", role), bias.shape).spec for role, bias in outs)
    return Apart(rows, choices, wide, narrow, beside, own, gathered, tuple(n for n in _axes(wide) if n not in back))


def over_devices(
    op: ExpertFfn, run: Callable[..., AnyArray], division: Division, arrays: tuple[AnyArray, ...]
) -> AnyArray:
    """The op over a mesh: each device runs its own experts, or its part of each.

    Of T tokens of H that n devices with E / n experts each have parts of, every device gets all, `(n − 1) / n · T · H`
    numbers, runs the choices of its own experts, and gives each device the sum for its tokens, as many numbers. Any
    routing fits: a token is sent once to each device, whatever number of its experts is there. Where the rows do not
    divide, every device has all of them, and results are added for all.
    """
    apart = apart_of(op, division, arrays)
    devices = math.prod(division.mesh.shape[name] for name in apart.own)
    specs = (apart.rows, apart.wide, apart.wide, apart.narrow, apart.choices, apart.choices, *apart.beside)
    every = _axes((*apart.rows, *apart.wide))

    def here(*arrays: AnyArray) -> AnyArray:
        # What devices have alike each takes as its own, so that its gradient is added over them here, and not where it
        # is used, which may be in a branch that some of them do not take.
        alike = (tuple(n for n in dict.fromkeys(every) if n not in _axes(spec)) for spec in specs)
        own = [lax.pcast(a, names, to="varying") if names else a for a, names in zip(arrays, alike, strict=True)]
        x, weights, ids = (_brought(own[place], apart) for place in (0, 4, 5))
        gate, up, down, *biases = *own[1:4], *own[6:]
        within = tuple(n for n in _axes(apart.wide) if n not in apart.own)
        if biases and within:  # of the sum over parts of an expert one has the bias
            biases[2] = jnp.where(lax.axis_index(within) == 0, biases[2], 0)
        if not apart.own:
            made = run(x, gate, up, down, weights, ids, *biases)
        else:
            ids = ids - lax.axis_index(apart.own) * gate.shape[0]
            ids = jnp.where((ids >= 0) & (ids < gate.shape[0]), ids, gate.shape[0])  # none of its own
            how = {} if run == op.eval else {"devices": devices}
            made = run(x, gate, up, down, weights, ids, *biases, **how)
        for axis, names in apart.gathered:
            made = lax.psum_scatter(made, names, scatter_dimension=axis, tiled=True)
        return lax.psum(made, apart.summed) if apart.summed else made

    divided = jax.shard_map(here, mesh=division.mesh, in_specs=specs, out_specs=apart.rows)
    return divided(*arrays)


def _brought(a: AnyArray, apart: Apart) -> AnyArray:
    """Of tokens that devices with other experts have, all."""
    for axis, names in apart.gathered:
        a = lax.all_gather(a, names, axis=axis, tiled=True)
    return a


def _axes(entries: Iterable[Any]) -> tuple[str, ...]:
    """The axes of a mesh that entries of a spec name."""
    named = (entry if isinstance(entry, tuple) else (entry,) for entry in entries if entry is not None)
    return tuple(itertools.chain.from_iterable(named))


def of_rows(
    op: ExpertFfn, rows: str, experts: str, x: AnyArray, arrays: Sequence[AnyArray], result: Any = None
) -> AnyArray:
    """What rows give, whose experts' gate, up, down and biases are `arrays`, in the dtype `result`.

    `rows` and `experts` are the axes of x and of the matrices before those that are multiplied, as `einsum` has them.
    """
    gate, up, down, *biases = arrays
    wide, narrow = ("fh", "hf") if op.contract else ("hf", "fh")
    gate_bias, up_bias, down_bias = biases or NONE
    both = ((gate, gate_bias), (up, up_bias))
    inner = op.gated(*(plus(op.product(f"{rows}h,{experts}{wide}->{rows}f", x, w), bias) for w, bias in both))
    return plus(op.product(f"{rows}f,{experts}{narrow}->{rows}h", inner, down, result), down_bias)


def gathered(op: ExpertFfn, *arrays: AnyArray, devices: int = 1) -> AnyArray:
    """The op with the weights of each choice, as a batch of products of one row."""
    x, gate, up, down, weights, ids, *biases = arrays
    flat, each = ids.reshape(-1), jnp.repeat(x.reshape(-1, x.shape[-1]), ids.shape[-1], axis=0)
    if devices > 1:
        each = jnp.where((flat < len(gate))[:, None], each, 0)
    own = [jnp.take(w, flat, axis=0, mode="clip") for w in (gate, up, down, *biases)]
    return combined(of_rows(op, "n", "n", each, own, jnp.float32), x, weights, _mine(ids, gate, devices))


def blocked(op: ExpertFfn, *arrays: AnyArray, devices: int = 1) -> AnyArray:
    """The op by blocks of choices of one expert, whose weights are multiplied as a batch.

    Of the experts of several devices, which most choices are none of here: so many blocks at a time as there are where
    all have their share, and no more times than there are choices for.
    """
    x, gate, up, down, weights, ids, *biases = arrays
    # Half of what an expert has, as the last block of each is not full.
    share = ids.size // devices
    rows = max(block_rows(share, len(gate)) // 2, 1)
    at_once = -(-share // rows) + len(gate) if devices > 1 else 1
    cut = sorted_blocks(ids, len(gate), rows, at_once)
    tokens = x.reshape(-1, x.shape[-1])

    def blocks(choice: AnyArray, owner: AnyArray) -> AnyArray:
        own = [*(w[owner] for w in (gate, up, down)), *(bias[owner][:, None] for bias in biases)]
        return of_rows(op, "br", "b", tokens[choice // ids.shape[-1]], own)  # f32 would move twice the bytes

    def turn(given: tuple[AnyArray, AnyArray, AnyArray]) -> AnyArray:
        choice, owner, used = given
        none = jnp.zeros_like(tokens, shape=(*choice.shape, tokens.shape[1]))
        return lax.cond(used.any(), blocks, lambda *_: none, choice, owner)

    if devices == 1:
        out = blocks(cut.choice, cut.owner)
    else:
        parts = (a.reshape(-1, at_once, *a.shape[1:]) for a in (cut.choice, cut.owner, cut.used))
        out = lax.map(turn, tuple(parts))
    return combined(cut.back(out).astype(jnp.float32), x, weights, _mine(ids, gate, devices))


def looped(op: ExpertFfn, *arrays: AnyArray, devices: int = 1) -> AnyArray:
    """The op by blocks of choices of one expert, block by block; those that nothing is in cost nothing."""
    x, gate, up, down, weights, ids, *biases = arrays
    cut = sorted_blocks(ids, len(gate), block_rows(ids.size // devices, len(gate)))
    inside = x.reshape(-1, x.shape[-1])[cut.choice // ids.shape[-1]]

    def block(given: tuple[AnyArray, AnyArray, AnyArray]) -> AnyArray:
        rows, owner, used = given

        def filled() -> AnyArray:
            own = [lax.dynamic_index_in_dim(w, owner, keepdims=False) for w in (gate, up, down, *biases)]
            return of_rows(op, "r", "", rows, own, jnp.float32)

        return lax.cond(used, filled, lambda: jnp.zeros_like(rows, jnp.float32))

    out = lax.map(block, (inside, cut.owner, cut.used[:, 0]))
    return combined(cut.back(out), x, weights, _mine(ids, gate, devices))


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


def sorted_blocks(ids: AnyArray, experts: int, rows: int, multiple: int = 1) -> SortedChoices:
    """As many blocks as there can be, or the next multiple. An id past the last expert is in none."""
    flat = ids.reshape(-1)
    most = min(-(-flat.size // rows) + experts - 1, flat.size)
    number = jnp.arange(-(-most // multiple) * multiple)
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


def ragged(op: ExpertFfn, *arrays: AnyArray, devices: int = 1) -> AnyArray:
    """The op by groups of choices, sorted by expert."""
    x, gate, up, down, weights, ids, *biases = arrays
    experts, top, flat = gate.shape[0], ids.shape[-1], ids.reshape(-1)
    order, counts = jnp.argsort(flat, stable=True), _counts(flat, experts)
    inside = x.reshape(-1, x.shape[-1])[order // top]
    if devices > 1:  # what is made of rows behind the groups nobody says
        inside = jnp.where((jnp.arange(flat.size) < counts.sum())[:, None], inside, 0)

    def product(x: AnyArray, w: AnyArray, bias: AnyArray | None, dtype: Any) -> AnyArray:
        turned, precision = w.swapaxes(1, 2) if op.contract else w, lax.Precision(op.precision)
        made = lax.ragged_dot(x, turned, counts, precision=precision, preferred_element_type=dtype)
        return plus(made, None if bias is None else jnp.take(bias, flat[order], axis=0, mode="clip"))

    gate_bias, up_bias, down_bias = biases or NONE
    inner = op.gated(*(product(inside, w, bias, x.dtype) for w, bias in ((gate, gate_bias), (up, up_bias))))
    out = product(inner, down, down_bias, jnp.float32)[jnp.argsort(order)]
    return combined(out, x, weights, _mine(ids, gate, devices))


def block_rows(choices: int, experts: int) -> int:
    """About as many as an expert has, a power of 2."""
    return int(2 ** round(math.log2(max(choices / experts, 1.0))))


def _counts(ids: AnyArray, experts: int) -> AnyArray:
    """How often each expert was chosen."""
    return jnp.zeros(experts, jnp.int32).at[ids].add(1)


def _mine(ids: AnyArray, gate: AnyArray, devices: int) -> AnyArray | None:
    """Which choices are of experts that are here; None: all."""
    return ids < len(gate) if devices > 1 else None


def combined(out: AnyArray, x: AnyArray, weights: AnyArray, mine: AnyArray | None = None) -> AnyArray:
    """The weighted sum of what the choices of each token give, `[choices, H]` f32; of those that are `mine` alone."""
    each = out.reshape(*weights.shape, -1) * weights.astype(jnp.float32)[..., None]
    return (each if mine is None else jnp.where(mine[..., None], each, 0)).sum(-2).astype(x.dtype)
