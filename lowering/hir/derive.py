"""Derive prefill, extend, verify, explicit, packed and padded from the forward program: a rewrite of HIR.

Every block that knows the sequence has a rule here. Any other node is copied only if it is proved to treat each
token alone (`tokenwise`); otherwise the flow is refused, naming the stage.

`prefill` reads a whole prompt into an empty state, attending inside the block. `extend` reads tokens after a state.
Both get an input `lengths` `[batch]` int32, the new valid tokens of each row, right-padded. `verify` is `extend` for
tokens that may be taken back: the state's length stays what it was, and whoever judges the logits advances it by the
tokens that are kept. `explicit` has no state:
its cache comes as inputs and goes as outputs, longer by the new tokens (see `explicit.py`). `packed` has neither: its
rows hold several sequences each (see `packed.py`). Rows of `padded` hold one, and padding behind it that no token reads
(see `padded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx_jax.errors import DeriveError, did_you_mean
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Input, Leaf, Node, Op, StateLeaf, StateRead, TypeCache, Value, constant
from rlx_jax.ir.ops.control import PairBias
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.index import Iota
from rlx_jax.ir.ops.pointwise import Binary, Compare, Where
from rlx_jax.ir.ops.shape import Reshape, Slice
from rlx_jax.ir.param import Roles
from rlx_jax.ir.plugins import derive_rule
from rlx_jax.ir.region import Repeat, unroll
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import Path, TensorType, path_text, symbol
from rlx_jax.lowering.hir import continued, packed
from rlx_jax.lowering.hir.explicit import Behind
from rlx_jax.lowering.hir.padded import TokenMask
from rlx_jax.lowering.hir.request import REQUEST, Brought, Cutting, inputs_read, pruned, reads_fixed, request_of
from rlx_jax.lowering.hir.slices import Asked, differing, dims_of, try_together
from rlx_jax.lowering.hir.tokenwise import Verdict, token_wise
from rlx_jax.lowering.lower import as_function

I32 = np.dtype(np.int32)
PER_ROW = TensorType((symbol("batch"),), I32)
LENGTHS = Input("lengths", type=PER_ROW)
LENGTH_LEAF = StateLeaf((), "length")
LENGTH = StateRead(LENGTH_LEAF, type=PER_ROW)  # small, and every device asks for it: nowhere in parts
WHOLE = (None, None, None)
CACHED_PROGRAMS = ("prefill", "extend", "verify")
PROGRAMS = ("forward", "train", *CACHED_PROGRAMS, "explicit", "packed", "padded")


@dataclass
class Derivation:
    """What the rules share while one program is derived."""

    program: str
    types: TypeCache
    kv: np.dtype[Any] | None = None
    behind: Behind | None = None  # of `explicit`
    tokens: TokenMask = field(default_factory=TokenMask)  # of `padded`
    slots: set[tuple[Path, str]] = field(default_factory=set)

    def state(self, b: Builder, path: Path, slot: str, type: TensorType, roles: Roles) -> tuple[StateLeaf, Value]:
        """The leaf of one block, whose axes are `roles`, and its value at the start."""
        name, n = slot, 1
        while (path, name) in self.slots:
            n += 1
            name = f"{slot}{n}"
        self.slots.add((path, name))
        leaf = StateLeaf(path, name)
        return leaf, b.leaf(StateRead(leaf, roles, type=type))


Rule = Callable[[Derivation, Builder, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def derive(
    graph: Graph,
    program: str,
    types: TypeCache,
    last_only: bool = False,
    kv: np.dtype[Any] | None = None,
    given: Collection[str] = (),
) -> Graph:
    """The HIR of `program`. With `last_only` outputs are those of each row's last token, `[B, 1, …]`. Keys and values
    are cached as `kv`, or as they are (`explicit`: as f32, like every output); `given` names the optional inputs that
    calls will supply.

    Raises:
        DeriveError: the sequence dimension is a number, or a stage mixes positions and has no rule.
    """
    if program not in PROGRAMS:
        raise DeriveError(
            f"unknown program {program!r}; programs are {', '.join(PROGRAMS)}{did_you_mean(str(program), PROGRAMS)}"
        )
    if last_only:
        graph = last_token_only(graph, types)
    if program in ("forward", "train"):
        return graph  # `train` differs in how it runs: the plan scans its layers and may recompute them
    if program == "explicit":
        graph = unroll(graph, types)  # every layer has inputs and outputs of its own
    check_inputs(graph, program)
    if program in CACHED_PROGRAMS:
        check_last_tokens(graph)
    try_slices(graph, types)
    if program in CACHED_PROGRAMS:
        continued.try_blocks(graph, types, lambda op: rule_of(op) is carried)
    d = Derivation(program, types, kv)
    if program == "explicit":
        d.behind = Behind.of(graph, kv, given)
    if program == "padded":
        d.tokens = TokenMask.of(graph, given)
    asks = program in CACHED_PROGRAMS or program == "explicit" and not reads_cache(graph)
    brought = request_of(graph) if asks else Brought()

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        rule = rule_of(node.op, program)
        if rule is not None:
            written = len(b.writes)
            made = rule(d, b, node, inputs)
            if program == "verify" and type(node.op) not in RULES and len(b.writes) > written:
                raise DeriveError(
                    f"{node.op.text()} keeps a state by the rule of its plugin, which does not say how tokens are "
                    "taken back: no verify rule; generate without speculative="
                )
            return made
        if not (isinstance(node.op, Leaf) or node.op.regions()):
            check_token_wise(d, node, tuple(b.type(v) for v in inputs))
        return None

    def enter(graph: Graph) -> Rewrite:
        if program == "padded":
            return beside_padding(d, graph, fn)
        return fn if id(graph) not in brought.graphs else beside_request(d, graph, brought, fn)

    out = rewrite(graph, enter, types, program)
    if program in ("extend", "verify") and brought.graphs:
        out = replace(out, inputs=tuple(inputs_read(out)))
    if program == "packed":
        return packed.declared(out, types)
    if program == "padded":
        return d.tokens.finish(out, types)
    return _with_length(out, types, program) if d.behind is None else d.behind.finish(out, types)


def beside_request(d: Derivation, graph: Graph, brought: Brought, fn: Rewrite) -> Rewrite:
    """`fn` for what moves in a graph. Of what the request brings beside its tokens `prefill` keeps what is read, and
    `extend` reads it there; it has to treat rows of the batch alone, and no more."""
    cut = Cutting(graph, brought.levels(graph), d.program) if brought.cuts(graph) and d.behind is None else None
    levels, whole = brought.levels(graph), id(graph) in brought.whole

    def alone(node: Node) -> None:
        if not (isinstance(node.op, Leaf) or node.op.regions()):
            check_token_wise(d, node, tuple(graph.type(v) for v in node.inputs))

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if whole or levels[number] == REQUEST:
            alone(node)
            return cut.dropped(b, number, node) if cut is not None and d.program != "prefill" else None
        if isinstance(node.op, Leaf):
            return fn(b, number, node, inputs)
        if cut is not None:
            inputs = cut.operands(b, node, inputs, d.state)
        if isinstance(node.op, Repeat):
            op, inputs = pruned(node.op, inputs, d.types)
            return b.add(op, *inputs)
        if reads_fixed(levels, node):
            check_fixed_keys(node)
            alone(node)
            return b.add(node.op, *inputs)
        made = fn(b, number, node, inputs)
        return b.add(node.op, *inputs) if made is None else made

    return rewritten


def beside_padding(d: Derivation, graph: Graph, fn: Rewrite) -> Rewrite:
    """`fn` for a graph of `padded`, whose attention and ends of texts read no padding."""

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, hir.EndToken):
            return (d.tokens.end_token(b, node.op, *inputs),)
        if not isinstance(node.op, hir.Attention):
            return fn(b, number, node, inputs)
        if "seq" in b.type(inputs[1]).symbols:
            check_bias(d.types, node.op, tuple(b.type(v) for v in inputs[3 + len(node.op.extra) :]))
            return d.tokens.attention(b, graph, node, inputs)
        check_fixed_keys(node)
        check_token_wise(d, node, tuple(b.type(v) for v in inputs))
        return None

    return rewritten


def check_fixed_keys(node: Node) -> None:
    """Attention over keys that are the same for every token reads all of them, or those that a mask keeps.

    Raises:
        DeriveError: which keys a token reads hangs on where it stands.
    """
    op = node.op
    assert isinstance(op, hir.Attention)
    if op.causal or op.window is not None:
        raise DeriveError(
            "attention reads keys of another sequence, causally or in a window: those that a token reads would hang on "
            "how many tokens there are; use a mask"
        )


def check_last_tokens(graph: Graph) -> None:
    """What is read of the last token of a row goes to outputs alone: in `extend` another token is the last one.

    Raises:
        DeriveError: a node reads it beside every token.
    """
    for inner in dict.fromkeys(g for g, _ in graph.walk()):
        behind: set[int] = set()
        for number, node in enumerate(inner.nodes):
            reads = [v for v in node.inputs if v.node in behind]
            beside = any("seq" in inner.type(v).symbols for v in node.inputs if v.node not in behind)
            if reads and beside and isinstance(node.op, hir.Attention):
                reads = reads if node.op.last else []  # else its rule refuses it, and says more
            elif reads and beside:
                raise DeriveError(
                    f"{path_text(node.origin.path)}: {node.op.text()} reads the last token of each row beside every "
                    "token: an earlier one would read a later one"
                )
            if isinstance(node.op, hir.LastToken) or reads:
                behind.add(number)


def check_inputs(graph: Graph, program: str) -> None:
    """The sequence dimension is a symbol, unless the flow reads its cache itself, and no name is taken.

    Raises:
        DeriveError: names the inputs.
    """
    if not (reads_cache(graph) or any({"batch", "seq"} <= i.type.symbols for i in graph.inputs)):
        shapes = ", ".join(f"{i.input} {i.type}" for i in graph.inputs)
        raise DeriveError(f"{program} needs an input with the symbolic dimensions batch and seq; the flow has {shapes}")
    if program in CACHED_PROGRAMS and any(i.input == LENGTHS.input for i in graph.inputs):
        raise DeriveError(f"{program} adds an input 'lengths'; the flow has one of that name already, rename it")
    if program == "packed":
        packed.check_names(graph)


def reads_cache(graph: Graph) -> bool:
    """Whether a flow reads cached keys and values itself."""
    return any(isinstance(node.op, hir.GrowingAttention) for node in graph.nodes)


def _with_length(graph: Graph, types: TypeCache, program: str) -> Graph:
    """Declare `lengths` and advance the state's length by it, in `verify` by nothing."""
    b = Builder(graph.name, types)
    b.nodes, b.writes = list(graph.nodes), list(graph.writes)
    b.inputs = [*graph.inputs, LENGTHS]
    held = b(LENGTH)
    b.writes.append((LENGTH_LEAF, held if program == "verify" else b(Binary("add"), held, b(LENGTHS))))
    return b.finish(graph.outputs, graph.output_names)


# -- rules -------------------------------------------------------------------------------------


def keep(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """The block reads positions, not the sequence."""


def positions(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """positions(x) → state.length[:, None] + iota"""
    if d.behind is not None:
        return (d.behind.positions(b, *inputs),)
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
    q, k, v, *rest = inputs
    t, read = b.type(k), rest[len(op.extra) :]
    if symbol("seq") in b.type(q).shape and "seq" not in t.symbols:
        raise DeriveError(f"attention reads keys {t} of another sequence: there is no {d.program} rule for that")
    if not op.causal:
        raise DeriveError(
            f"attention is not causal and mixes positions: a token would read later ones, so {d.program} has no meaning"
        )
    check_extra(d, op)
    check_bias(d.types, op, tuple(b.type(x) for x in read))
    if t.shape[1] != symbol("seq") or not (op.last or b.type(q).shape[1] == symbol("seq")):
        raise DeriveError(f"attention reads keys {t} of another sequence: there is no {d.program} rule for that")
    if d.behind is not None:
        return (d.behind.attention(b, op, q, k, v, *read),)
    roles = ("batch", None, "kv_heads", None)
    slots = (t.shape[0], hir.cache_slots(op.window), op.kv_heads)
    (leaf_k, cache_k), (leaf_v, cache_v) = (
        d.state(b, node.origin.path, slot, TensorType((*slots, x.shape[2] // op.kv_heads), d.kv or x.dtype), roles)
        for slot, x in (("k", t), ("v", b.type(v)))
    )
    leaves, masks = [leaf_k, leaf_v], list[Value]()
    if op.extra:  # which of the keys are kept is known to later calls too
        keep = keys_kept(b, rest[0])
        leaf, cache = d.state(b, node.origin.path, "keep", TensorType(slots[:2], b.type(keep).dtype), roles[:2])
        leaves, masks = [*leaves, leaf], [keep, cache]
    block = hir.CachedAttention(op, block_only=d.program == "prefill", ring=op.window is not None)
    out, *caches = b.add(block, q, k, v, cache_k, cache_v, b.leaf(LENGTH), b.leaf(LENGTHS), *masks, *read)
    b.writes += zip(leaves, caches, strict=True)
    return (out,)


def keys_kept(b: Builder, keep: Value) -> Value:
    """A keep mask over the new keys as bools `[batch, seq]`.

    Raises:
        DeriveError: it says something else of each query.
    """
    t = b.type(keep)
    if t.shape[-1] != symbol("seq") or any(size != 1 for size in t.shape[1:-1]):
        raise DeriveError(
            f"attention reads the mask {t}, which is not one of keys alone, [batch, seq]: of a cached key it does not "
            "say which later tokens read it; a function of positions does, attention(…, bias=lambda q, k: …)"
        )
    if t.rank == 4:
        keep = b(Slice((WHOLE, 0, 0, WHOLE)), keep)
    keep = packed.kept(b, keep)
    if t.shape[0] != 1:
        return keep
    every = b(Compare("ge"), b(Reshape((-1, 1)), b.leaf(LENGTHS)), b.leaf(constant(0, I32)))
    return b(Where(), every, keep, b.leaf(constant(False, np.bool_)))  # the same for each row


def check_extra(d: Derivation, op: hir.Attention) -> None:
    """Attention reads no array with an entry for each key that later calls do not know: of cached keys it has none.

    Raises:
        DeriveError: it does.
    """
    if "bias" in op.extra:
        raise DeriveError(
            f"attention adds a bias that is an array, and {d.program} has keys that it knows nothing of: give a "
            "function of the positions of queries and keys, attention(…, bias=lambda q, k: …)"
        )
    if op.extra and d.behind is not None:
        raise DeriveError(
            f"attention reads the operand {op.extra[0]!r} over new keys, and cached ones have none; explicit masks by "
            "its own input 'mask' both: make the flow's an optional input (default=None), or use prefill and extend"
        )


def check_bias(types: TypeCache, op: hir.Attention, read: tuple[TensorType, ...]) -> None:
    """A bias by positions is proved to be one of each query and each key alone: there are other keys in a cache.

    Raises:
        DeriveError: it is not.
    """
    if op.bias_of is None:
        return
    pairs = PairBias(op.bias_of)
    places = tuple(TensorType((1, symbol(name)), I32) for name in ("queries", "keys"))
    for name in ("queries", "keys"):
        verdict = types.ask(prove, pairs, (*places, *read), name)
        if not verdict.token_wise:
            raise DeriveError(f"attention's bias is not proved to treat each of the {name} alone: {verdict.reason}")


def carried(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """block(x, …) → carried(block, x, …, state.slot …, state.length, lengths); state.slot := … for each slot"""
    block: Any = node.op  # what `hir.CarriesState` says
    x = b.type(inputs[0])
    if d.behind is not None:
        raise DeriveError(
            f"{block.text()} carries a state, and explicit has keys and values alone as inputs: use prefill and extend"
        )
    if x.shape[:2] != (symbol("batch"), symbol("seq")):
        raise DeriveError(f"{block.text()} runs along {x}, expected [batch, seq, …]: there is no {d.program} rule")
    operands = tuple(b.type(v) for v in inputs)
    if continued.is_tried(block) and (reason := d.types.ask(continued.differing, block, operands)):
        raise DeriveError(f"{block.text()} carries a state, and {reason}: {d.program} would give other numbers")
    slots = block.slots(*operands)
    leaves = [d.state(b, node.origin.path, s.name, s.leaf(x.shape[0]), s.leaf_roles) for s in slots]
    every = d.program == "verify"  # the state stays what it was; what it would be after each token goes beside it
    op = hir.Carried(block, len(slots), fresh=d.program == "prefill", every=every)
    made = b.add(op, *inputs, *(value for _, value in leaves), b.leaf(LENGTH), b.leaf(LENGTHS))
    results = len(made) - len(slots) * (1 + every)
    behind = made[results + len(slots) * every :]
    b.writes += [(leaf.every if every else leaf, after) for (leaf, _), after in zip(leaves, behind, strict=True)]
    b.writes += leaves if every else []
    return made[:results]


def growing(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """A flow that reads its cache itself is `explicit`, and stays as it is."""
    if d.behind is None:
        raise DeriveError(
            f"the flow reads cached keys and values itself (BindDecodeInputs): {d.program} has no meaning"
        )
    d.behind.growing()


def ring_sizes(graph: Graph) -> dict[str, int]:
    """The dimensions of rings in a derived program, with the most slots that each may have: its window."""
    sizes: dict[str, int] = {}
    for inner, node in graph.walk():
        op = node.op
        if isinstance(op, hir.CachedAttention) and op.ring and op.attend.window is not None:
            sizes[str(inner.type(node.inputs[3]).shape[1])] = op.attend.window
    return sizes


def last_token(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """last_token(x) → last_token(x, lengths − 1)"""
    if d.behind is not None:  # without lengths every token counts
        return None
    lengths = b.leaf(LENGTHS)
    return (b(hir.LastToken(), inputs[0], b(Binary("sub"), lengths, b.scalar(1, lengths))),)


def unpacked(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """What a plugin's op that knows the sequence is for rows laid out otherwise, its rule does not say."""
    raise DeriveError(
        f"{node.op.text()} has a rule of its plugin, which knows rows of one sequence: no {d.program} rule"
    )


RULES: dict[type[Op], Rule] = {
    hir.Positions: positions,
    hir.RopeAngles: keep,
    hir.RopeRows: keep,
    hir.Attention: attention,
    hir.GrowingAttention: growing,
    hir.LastToken: last_token,
    hir.Recurrent: carried,
    hir.CausalWindow: carried,
    hir.CausalConv: carried,
    hir.GatedDelta: carried,
    hir.SelectiveScan: carried,
}
"""The blocks that know the sequence. Nothing else mentions a cache."""


def packed_attention(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """As `packed.attention`, where a bias by positions is one of each pair."""
    assert isinstance(node.op, hir.Attention)
    check_bias(d.types, node.op, tuple(b.type(v) for v in inputs[3 + len(node.op.extra) :]))
    return packed.attention(b, node, inputs)


PACKED: dict[type[Op], Rule] = {
    hir.Positions: lambda d, b, node, inputs: packed.positions(b, node, inputs),
    hir.RopeAngles: keep,
    hir.RopeRows: keep,
    hir.Attention: packed_attention,
    hir.CountedPositions: lambda d, b, node, inputs: packed.counted_positions(b, node, inputs),
    hir.RelativeBias: keep,
}
"""The same for rows of several sequences: a block without a rule is proved to treat tokens alone, or refused."""

PADDED: dict[type[Op], Rule] = dict.fromkeys(
    (hir.Positions, hir.RopeAngles, hir.RopeRows, hir.CountedPositions, hir.RelativeBias, hir.FirstToken), keep
)
"""The same for rows that are padded: these look at no later token. `beside_padding` has the others."""


def rule_of(op: Op, program: str = "") -> Rule | None:
    """The rule of an op: one of `RULES`, or that of the plugin whose op it is; for `packed` and `padded`, of theirs."""
    if program not in ("packed", "padded"):
        return RULES.get(type(op)) or derive_rule(type(op))
    table = PACKED if program == "packed" else PADDED
    return table.get(type(op)) or (unpacked if derive_rule(type(op)) else None)


# -- the proof ---------------------------------------------------------------------------------


def check_token_wise(d: Derivation, node: Node, operands: tuple[TensorType, ...]) -> None:
    """Refuse a node that mixes positions or rows of the batch."""
    for dim, what in (("seq", "positions"), ("batch", "rows of the batch")):
        if not any(dim in t.symbols for t in (*operands, *node.types)):
            continue
        if reason := why_not_alone(d.types, node, operands, dim):
            raise DeriveError(
                f"{node.op.text()} is not proved to treat {what} alone: {reason}. "
                f"It has no {d.program} rule; build it from token-wise ops and the attention stages"
            )


def why_not_alone(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> str:
    """Why a node may not treat every entry along `dim` alone; empty if it does. Found out once for all programs."""
    verdict = types.ask(prove, node.op, operands, dim)
    if not (verdict.token_wise or node.origin.token_wise):
        return verdict.reason
    return types.ask(differing, node.op, operands).get(dim, "") if asks_slices(types, node, operands, dim) else ""


def why_rows_mix(graph: Graph, types: TypeCache) -> str:
    """Which stage may mix rows of the batch, and why; empty if every one is proved to treat them alone."""
    for inner, node in graph.walk():
        operands = tuple(inner.type(v) for v in node.inputs)
        if isinstance(node.op, Leaf) or node.op.regions():
            continue
        if any("batch" in t.symbols for t in (*operands, *node.types)):
            if reason := why_not_alone(types, node, operands, "batch"):
                return f"{path_text(node.origin.path)}: {node.op.text()} is not proved to treat rows alone: {reason}"
    return ""


def prove(types: TypeCache, op: Op, operands: tuple[TensorType, ...], dim: str) -> Verdict:
    """The verdict on one op."""
    return token_wise(as_function(op, operands, types), [t.spec for t in operands], dim)


def asks_slices(types: TypeCache, node: Node, operands: tuple[TensorType, ...], dim: str) -> bool:
    """Whether slices along `dim` have a say: for a claim that is not proved, and for a closure, which may branch on a
    size of 1, which a symbol hides from the proof."""
    proved = types.ask(prove, node.op, operands, dim).token_wise
    return isinstance(node.op, JaxFn) if proved else node.origin.token_wise


def try_slices(graph: Graph, types: TypeCache) -> None:
    """Try together all nodes of a graph that slices will be asked of."""
    asked: dict[Asked, None] = {}
    for inner, node in graph.walk():
        if isinstance(node.op, Leaf) or node.op.regions() or rule_of(node.op):
            continue
        operands = tuple(inner.type(v) for v in node.inputs)
        if any(asks_slices(types, node, operands, dim) for dim in dims_of(operands)):
            asked[node.op, operands] = None
    try_together(types, list(asked))


# -- logits of the last token only -------------------------------------------------------------


def last_token_only(graph: Graph, types: TypeCache) -> Graph:
    """Gather the last token above the token-wise suffix, so that the head sees one row for each sequence.

    The suffix goes on through attention on the side of its queries: its last query reads what the last row needs.
    """
    try_slices(graph, types)
    suffix = _suffix(graph, types)

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
    outputs = [b(hir.LastToken(), v) if "seq" in out.type(v).symbols else v for v in out.outputs]
    return b.finish(outputs, out.output_names)


def _suffix(graph: Graph, types: TypeCache) -> set[int]:
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
        plain = not (isinstance(node.op, Leaf) or node.op.regions() or rule_of(node.op))
        if number in whole or not users.get(number, set()) <= suffix:
            continue
        operands = tuple(graph.type(v) for v in node.inputs)
        if has_last_query(node.op) and all(t.shape[1] == symbol("seq") for t in operands[:3]):
            suffix.add(number)
        if not plain:
            continue
        if "seq" in operands[0].symbols or any("seq" in t.symbols for t in operands):
            verdict = types.ask(prove, node.op, operands, "seq")
            alone = verdict.token_wise and not why_not_alone(types, node, operands, "seq")
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
