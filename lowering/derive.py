"""Derive prefill and extend from the forward program: a rewrite of HIR.

Every block that knows the sequence has a rule here. Any other node is copied only if it is proved to treat each
token alone (`tokenwise`); otherwise the flow is refused, naming the stage.

`prefill` reads a whole prompt into an empty state, attending inside the block. `extend` reads tokens after a state.
Both get an input `lengths` `[batch]` int32, the new valid tokens of each row, right-padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import DeriveError, did_you_mean
from rlx_jax.ir import hir
from rlx_jax.ir.graph import (
    Builder,
    Graph,
    Input,
    Leaf,
    Node,
    Op,
    Rewrite,
    StateLeaf,
    StateRead,
    TypeCache,
    Value,
    everywhere,
    rewrite,
)
from rlx_jax.ir.ops.pointwise import Binary, JaxFn
from rlx_jax.ir.ops.shaping import Iota, Reshape
from rlx_jax.ir.types import Path, TensorType, symbol
from rlx_jax.lowering.lower import as_function
from rlx_jax.lowering.tokenwise import Verdict, token_wise

I32 = np.dtype(np.int32)
PER_ROW = TensorType((symbol("batch"),), I32)
LENGTHS = Input("lengths", type=PER_ROW)
LENGTH_LEAF = StateLeaf((), "length")
LENGTH = StateRead(LENGTH_LEAF, type=PER_ROW)
CACHED_PROGRAMS = ("prefill", "extend")
PROGRAMS = ("forward", "train", *CACHED_PROGRAMS)


@dataclass
class Derivation:
    """What the rules share while one program is derived."""

    program: str
    types: TypeCache
    kv: np.dtype[Any] | None = None
    proofs: dict[tuple[Op, tuple[TensorType, ...], str], Verdict] = field(default_factory=dict)
    slots: set[tuple[Path, str]] = field(default_factory=set)

    def state(self, b: Builder, path: Path, slot: str, type: TensorType) -> tuple[StateLeaf, Value]:
        """The leaf of one block, and its value at the start."""
        name, n = slot, 1
        while (path, name) in self.slots:
            n += 1
            name = f"{slot}{n}"
        self.slots.add((path, name))
        leaf = StateLeaf(path, name)
        return leaf, b.leaf(StateRead(leaf, type=type))


Rule = Callable[[Derivation, Builder, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def derive(
    graph: Graph, program: str, types: TypeCache, last_only: bool = False, kv: np.dtype[Any] | None = None
) -> Graph:
    """The HIR of `program`. With `last_only` outputs are those of each row's last token, `[B, 1, …]`. Keys and values
    are cached as `kv`, or as they are.

    Raises:
        DeriveError: the sequence dimension is a number, or a stage mixes positions and has no rule.
    """
    if program not in PROGRAMS:
        raise DeriveError(
            f"unknown program {program!r}; programs are {', '.join(PROGRAMS)}{did_you_mean(str(program), PROGRAMS)}"
        )
    if last_only:
        graph = last_token_only(graph, types)
    if program not in CACHED_PROGRAMS:
        return graph  # `train` differs in how it runs: the plan scans its layers and may recompute them
    if not any({"batch", "seq"} <= i.type.symbols for i in graph.inputs):
        shapes = ", ".join(f"{i.input} {i.type}" for i in graph.inputs)
        raise DeriveError(f"{program} needs an input with the symbolic dimensions batch and seq; the flow has {shapes}")
    if any(i.input == LENGTHS.input for i in graph.inputs):
        raise DeriveError(f"{program} adds an input 'lengths'; the flow has one of that name already, rename it")
    d = Derivation(program, types, kv)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        rule = RULES.get(type(node.op))
        if rule is not None:
            return rule(d, b, node, inputs)
        if not (isinstance(node.op, Leaf) or node.op.regions()):
            check_token_wise(d, node, tuple(b.type(v) for v in inputs))
        return None

    out = rewrite(graph, everywhere(fn), types, program)
    return _with_length(out, types)


def _with_length(graph: Graph, types: TypeCache) -> Graph:
    """Declare `lengths` and advance the state's length by it."""
    b = Builder(graph.name, types)
    b.nodes, b.writes = list(graph.nodes), list(graph.writes)
    b.inputs = [*graph.inputs, LENGTHS]
    total = b(Binary("add"), b(LENGTH), b(LENGTHS))
    b.writes.append((LENGTH_LEAF, total))
    return b.finish(graph.outputs, graph.output_names)


# -- rules -------------------------------------------------------------------------------------


def keep(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """The block reads positions, not the sequence."""


def positions(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """positions(x) → state.length[:, None] + iota"""
    if len(inputs) > 1:
        raise DeriveError(
            f"the flow reads cached keys and values itself (BindDecodeInputs): {d.program} has no meaning"
        )
    if d.program == "prefill":
        return None
    steps = b(Reshape((1, -1)), b(Iota(1), *inputs))
    start = b(Reshape((-1, 1)), b.leaf(LENGTH))
    return (b(Binary("add"), start, steps),)


def attention(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """attention(q, k, v) → cached_attention(q, k, v, state.k, state.v, state.length, lengths); state.k, state.v := …

    Attention in a window of w keys gets a ring of min(context, w) slots.
    """
    op = node.op
    assert isinstance(op, hir.Attention)
    if not op.causal:
        raise DeriveError(f"attention is not causal: a token would read later ones, so {d.program} has no meaning")
    if op.extra:
        raise DeriveError(
            f"attention reads the operand {op.extra[0]!r}; {d.program} masks by lengths, "
            "make the mask an optional input (default=None)"
        )
    q, k, v = inputs
    t = b.type(k)
    if t.shape[1] != symbol("seq") or not (op.last or b.type(q).shape[1] == symbol("seq")):
        raise DeriveError(f"attention reads keys {t} of another sequence: there is no {d.program} rule for that")
    cache = TensorType(
        (t.shape[0], hir.cache_slots(op.window), op.kv_heads, t.shape[2] // op.kv_heads), d.kv or t.dtype
    )
    leaf_k, cache_k = d.state(b, node.origin.path, "k", cache)
    leaf_v, cache_v = d.state(b, node.origin.path, "v", cache)
    block = hir.CachedAttention(op, block_only=d.program == "prefill", ring=op.window is not None)
    out, new_k, new_v = b.add(block, q, k, v, cache_k, cache_v, b.leaf(LENGTH), b.leaf(LENGTHS))
    b.writes += [(leaf_k, new_k), (leaf_v, new_v)]
    return (out,)


def ring_sizes(graph: Graph) -> dict[str, int]:
    """The dimensions of rings in a derived program, with the most slots that each may have: its window."""
    sizes: dict[str, int] = {}
    for inner, node in graph.walk():
        op = node.op
        if isinstance(op, hir.CachedAttention) and op.ring and op.attend.window is not None:
            sizes[str(inner.type(node.inputs[3]).shape[1])] = op.attend.window
    return sizes


def last_token(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """last_token(x) → last_token(x, lengths − 1)"""
    lengths = b.leaf(LENGTHS)
    return (b(hir.LastToken(), inputs[0], b(Binary("sub"), lengths, b.scalar(1, lengths))),)


RULES: dict[type[Op], Rule] = {
    hir.Positions: positions,
    hir.RopeAngles: keep,
    hir.RopeRows: keep,
    hir.Attention: attention,
    hir.LastToken: last_token,
}
"""The blocks that know the sequence. Nothing else mentions a cache."""


# -- the proof ---------------------------------------------------------------------------------


def check_token_wise(d: Derivation, node: Node, operands: tuple[TensorType, ...]) -> None:
    """Refuse a node that mixes positions or rows of the batch."""
    for dim, what in (("seq", "positions"), ("batch", "rows of the batch")):
        if not any(dim in t.symbols for t in (*operands, *node.types)):
            continue
        if reason := why_not_alone(d, node, operands, dim):
            raise DeriveError(
                f"{node.op.text()} is not proved to treat {what} alone: {reason}. "
                f"It has no {d.program} rule; build it from token-wise ops and the attention stages"
            )


def why_not_alone(d: Derivation, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Why a node may not treat every entry along `dim` alone; empty if it does."""
    verdict = prove(d, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    # A closure may branch on a size of 1, which a symbol hides from the proof.
    ask = isinstance(node.op, JaxFn) or not verdict.token_wise
    return (
        "" if not ask or slices_alone(d, node.op, operands, dim) else f"a slice along {dim!r} alone gives other numbers"
    )


def slices_alone(d: Derivation, op: Op, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Whether the op of a slice along `dim` is the slice of the op, on random numbers; slices of one and of several."""
    function = as_function(op, operands, d.types)
    whole = 5
    sizes = {name: 2 for t in operands for name in t.symbols} | {dim: whole}
    arrays = [_random(t.bind(sizes)) for t in operands]
    axes, out_axes = (
        [next((i for i, size in enumerate(t.shape) if str(size) == dim), None) for t in types]
        for types in (operands, d.types.infer(op, operands))
    )
    with jax.ensure_compile_time_eval():  # the program may be derived inside a trace
        full = jax.tree.leaves(function(*arrays))
    for keep in (slice(0, 1), slice(whole - 1, whole), slice(1, 4)):
        with jax.ensure_compile_time_eval():
            parts = jax.tree.leaves(function(*(_cut(a, axis, keep) for a, axis in zip(arrays, axes, strict=True))))
        for a, b, axis in zip(full, parts, out_axes, strict=True):
            want, got = _cut(np.asarray(a), axis, keep), np.asarray(b)
            if want.shape != got.shape or not np.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True):
                return False
    return True


def _random(t: TensorType) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2, t.shape) if t.dtype.kind in "biu" else rng.standard_normal(t.shape)
    return drawn.astype(t.dtype)


def _cut(array: np.ndarray[Any, Any], axis: int | None, keep: slice) -> np.ndarray[Any, Any]:
    return array if axis is None else array[(slice(None),) * axis + (keep,)]


def prove(d: Derivation, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """The verdict on one op, proved once for each op and operand types."""
    key = (op, operands, dim)
    if key not in d.proofs:
        d.proofs[key] = token_wise(as_function(op, operands, d.types), [t.spec for t in operands], dim)
    return d.proofs[key]


# -- logits of the last token only -------------------------------------------------------------


def last_token_only(graph: Graph, types: TypeCache) -> Graph:
    """Gather the last token above the token-wise suffix, so that the head sees one row for each sequence.

    Of the first output: who asks for the last token leaves the others.
    The suffix goes on through attention on the side of its queries: its last query reads what the last row needs.
    """
    d = Derivation("forward", types)
    graph = replace(graph, outputs=graph.outputs[:1], output_names=graph.output_names[:1])
    suffix = _suffix(graph, d)

    def enter(inner: Graph) -> Rewrite:
        moved: dict[Value, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if inner is not graph or number not in suffix:
                return None
            gathered = []
            for at, (old, new) in enumerate(zip(node.inputs, inputs, strict=True)):
                if by_row(node.op, at) and old.node not in suffix and "seq" in b.type(new).symbols:
                    if new not in moved:
                        moved[new] = b(hir.LastToken(), new)
                    new = moved[new]
                gathered.append(new)
            op = node.op
            return b.add(replace(op, last=True) if isinstance(op, hir.Attention) else op, *gathered)

        return fn

    out = rewrite(graph, enter, types, "last_token_only")
    b = Builder(out.name, types)
    b.nodes, b.inputs, b.writes = list(out.nodes), list(out.inputs), list(out.writes)
    first = out.outputs[0]
    return b.finish([b(hir.LastToken(), first) if "seq" in out.type(first).symbols else first], out.output_names[:1])


def _suffix(graph: Graph, d: Derivation) -> set[int]:
    """Nodes whose rows only outputs and other suffix nodes read, one by one, and that treat tokens alone."""
    users: dict[int, set[int]] = {}
    whole = {v.node for _, v in graph.writes}
    for number, node in enumerate(graph.nodes):
        for at, v in enumerate(node.inputs):
            users.setdefault(v.node, set()).add(number)
            if not by_row(node.op, at):
                whole.add(v.node)
    suffix: set[int] = set()
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        plain = not (isinstance(node.op, Leaf) or node.op.regions() or type(node.op) in RULES)
        if number in whole or not users.get(number, set()) <= suffix:
            continue
        operands = tuple(graph.type(v) for v in node.inputs)
        if has_last_query(node.op) and all(t.shape[1] == symbol("seq") for t in operands):
            suffix.add(number)
        if not plain:
            continue
        if "seq" in operands[0].symbols or any("seq" in t.symbols for t in operands):
            verdict = prove(d, node.op, operands, "seq")
            alone = verdict.token_wise and not why_not_alone(d, node, operands, "seq")
            if alone and all(axis == 1 for axis in verdict.out_axes):
                if all(t.shape[1:2] == (symbol("seq"),) for t in operands if "seq" in t.symbols):
                    suffix.add(number)
    return suffix


def has_last_query(op: Op) -> bool:
    """Whether the op is attention whose last query, given alone, is still the last: queries stand where keys end."""
    return isinstance(op, hir.Attention) and op.causal and not op.extra


def by_row(op: Op, operand: int) -> bool:
    """Whether a row of the result needs only that row of the operand."""
    return operand == 0 or not isinstance(op, hir.Attention)
