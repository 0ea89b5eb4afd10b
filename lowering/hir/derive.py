"""Derive prefill, extend, verify, explicit, packed and padded from the forward program: a rewrite of HIR.

Every block that knows the sequence has a rule (`rules.py`). Any other node is copied only if it is proved to treat each
token alone (`tokenwise`); otherwise the flow is refused, naming the stage.

`prefill` reads a whole prompt into an empty state, attending inside the block. `extend` reads tokens after a state.
Both get an input `lengths` `[batch]` int32, the new valid tokens of each row, right-padded. `verify` is `extend` for
tokens that may be taken back: the state's length stays what it was, and whoever judges the logits advances it by the
tokens that are kept. `explicit` has no state:
its cache comes as inputs and goes as outputs, longer by the new tokens (see `explicit.py`). `packed` has neither: its
rows hold several sequences each. Rows of `padded` hold one, and padding behind it that no token reads (see `rows.py`
for both).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.errors import DeriveError, did_you_mean, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Leaf, Node, Op, TypeCache, Value
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import unroll
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import TensorType, symbol
from rlx_jax.lowering.hir.explicit import Behind
from rlx_jax.lowering.hir.independence import prove, try_blocks, try_slices, why_not_alone
from rlx_jax.lowering.hir.per_request import REQUEST, Brought, Cutting, inputs_read, pruned, reads_fixed, request_of
from rlx_jax.lowering.hir.row_layouts import POSITIONS, SEGMENTS, TokenMask, check_bias
from rlx_jax.lowering.hir.rules import LENGTH, LENGTH_LEAF, LENGTHS, RULES, Derivation, carried, rule_of

CACHED_PROGRAMS = ("prefill", "extend", "verify")
# Inputs that programs have beside those of the flow.
ADDED = {**dict.fromkeys(CACHED_PROGRAMS, (LENGTHS,)), "packed": (SEGMENTS, POSITIONS)}
PROGRAMS = ("forward", "train", *CACHED_PROGRAMS, "explicit", "packed", "padded")


def unknown_program(program: object) -> str:
    """What to say of a program that there is not."""
    known = ", ".join(PROGRAMS)
    return f"unknown program {shown(program)}; programs are {known}{did_you_mean(program, PROGRAMS, 0.5)}"


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
        raise DeriveError(unknown_program(program))
    if last_only:
        graph = last_token_only(graph, types)
    if program in ("forward", "train"):
        return graph  # `train` differs in how it runs: the plan scans its layers and may recompute them
    if program == "explicit":
        graph = unroll(graph, types)  # every layer has inputs and outputs of its own
    check_inputs(graph, program)
    if program in CACHED_PROGRAMS:
        check_last_tokens(graph)
        try_blocks(graph, types, lambda op: rule_of(op) is carried)
    try_slices(graph, types, rule_of)
    d = Derivation(program, types, kv)
    if program == "explicit":
        d.behind = Behind.of(graph, kv, given)
    if program == "padded":
        d.tokens = TokenMask.of(graph, given)
    asks = program in CACHED_PROGRAMS or program == "explicit" and not reads_cache(graph)
    brought, fn = request_of(graph) if asks else Brought(), by_rules(d)

    def enter(graph: Graph) -> Rewrite:
        if program == "padded":
            return beside_padding(d, graph, fn)
        return fn if id(graph) not in brought.graphs else beside_request(d, graph, brought, fn)

    out = rewrite(graph, enter, types, program)
    if program in ("extend", "verify") and brought.graphs:
        out = replace(out, inputs=tuple(inputs_read(out)))
    if program == "packed":
        return replace(out, inputs=(*out.inputs, *ADDED[program]))
    if program == "padded":
        return d.tokens.finish(out)
    return _with_length(out, types, program) if d.behind is None else d.behind.finish(out, types)


def by_rules(d: Derivation) -> Rewrite:
    """Each node by the rule of its block; one without stays as it is, if it treats each token alone."""

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        rule = rule_of(node.op, d.program)
        if rule is None:
            check_token_wise(d, node, tuple(map(b.type, inputs)))
            return None
        written = len(b.writes)
        made = rule(d, b, node, inputs)
        if d.program == "verify" and type(node.op) not in RULES and len(b.writes) > written:
            raise DeriveError(
                f"{node.op.text()} keeps a state by the rule of its plugin, which does not say how tokens are "
                "taken back: no verify rule; generate without speculative="
            )
        return made

    return rewritten


def beside_request(d: Derivation, graph: Graph, brought: Brought, fn: Rewrite) -> Rewrite:
    """`fn` for what moves in a graph. Of what the request brings beside its tokens `prefill` keeps what is read, and
    `extend` reads it there; it has to treat rows of the batch alone, and no more."""
    cut = Cutting(graph, brought.levels(graph), d.program) if brought.cuts(graph) and d.behind is None else None
    levels, whole = brought.levels(graph), id(graph) in brought.whole

    def alone(node: Node) -> None:
        check_token_wise(d, node, tuple(map(graph.type, node.inputs)))

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if whole or levels[number] == REQUEST:
            alone(node)
            return cut.dropped(b, number, node) if cut is not None and d.program != "prefill" else None
        if isinstance(node.op, Leaf):
            return fn(b, number, node, inputs)
        if cut is not None:
            inputs = cut.operands(b, node, inputs, d.state)
        if node.op.regions():
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
            check_bias(d.types, node.op, tuple(b.type(v) for v in inputs))
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
    names = {i.input for i in graph.inputs}
    for name in (i.input for i in ADDED.get(program, ()) if i.input in names):
        raise DeriveError(f"{program} adds an input {quote(name)}; the flow has one of that name already, rename it")


def reads_cache(graph: Graph) -> bool:
    """Whether a flow reads cached keys and values itself."""
    return any(isinstance(node.op, hir.GrowingAttention) for node in graph.nodes)


def _with_length(graph: Graph, types: TypeCache, program: str) -> Graph:
    """Declare `lengths` and advance the state's length by it, in `verify` by nothing."""
    b = Builder.resume(graph, types)
    b.inputs += ADDED[program]
    held = b(LENGTH)
    b.writes.append((LENGTH_LEAF, held if program == "verify" else b(Binary("add"), held, b(LENGTHS))))
    return b.finish(graph.outputs, graph.output_names)


def check_token_wise(d: Derivation, node: Node, operands: tuple[TensorType, ...]) -> None:
    """Refuse a node that mixes positions or rows of the batch. A leaf reads none, and of a region the nodes of its body
    are looked at."""
    if isinstance(node.op, Leaf) or node.op.regions():
        return
    for dim, what in (("seq", "positions"), ("batch", "rows of the batch")):
        if not any(dim in t.symbols for t in (*operands, *node.types)):
            continue
        if reason := why_not_alone(d.types, node, operands, dim):
            raise DeriveError(
                f"{node.op.text()} is not proved to treat {what} alone: {reason}. "
                f"It has no {d.program} rule; build it from token-wise ops and the attention stages"
            )


def last_token_only(graph: Graph, types: TypeCache) -> Graph:
    """Gather the last token above the token-wise suffix, so that the head sees one row for each sequence.

    The suffix goes on through attention on the side of its queries: its last query reads what the last row needs.
    """
    try_slices(graph, types, rule_of)
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
    b = Builder.resume(out, types)
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
