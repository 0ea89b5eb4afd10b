"""Derive the programs prefill, extend, verify, explicit, packed and padded from the forward program, by rewriting HIR.

Every block that depends on the sequence has a rule (`rules.py`). Any other node is copied only if it is proved to treat
each token independently (`tokenwise.py`); otherwise derivation fails with an error that names the stage.

- `prefill` reads a full prompt into an empty state; attention stays inside the block of new tokens. `extend` reads
  tokens after a state. Both get an input `lengths` `[batch]` int32: the number of valid new tokens of each
  right-padded row.
- `verify` is `extend` for tokens that may be rejected. It leaves the state's length unchanged; the caller that judges
  the logits advances the length by the number of accepted tokens.
- `explicit` has no state. Its cache is passed as inputs and returned as outputs, longer by the new tokens
  (`explicit.py`).
- `packed` has neither state nor cache: each row contains several sequences. Rows of `padded` contain one sequence each,
  followed by padding that no token reads (`row_layouts.py` has both).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.errors import DeriveError, did_you_mean, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Leaf, Node, Op, TypeCache, Value
from rlx_jax.ir.ops.index import TakeAlongAxis
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.shape import AxisOf, Concat, Reshape
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import Rewrite, rewrite, unroll
from rlx_jax.ir.types import TensorType, is_static, symbol
from rlx_jax.lowering.hir import per_request
from rlx_jax.lowering.hir.explicit import ExplicitCache
from rlx_jax.lowering.hir.independence import cache_chunk_tests, cache_slice_tests, prove, why_not_independent
from rlx_jax.lowering.hir.row_layouts import POSITIONS, SEGMENTS, SELECTED, TokenMask, check_bias
from rlx_jax.lowering.hir.rules import LENGTH, LENGTH_LEAF, LENGTHS, RULES, Derivation, carry_state, rule_of

CACHED_PROGRAMS = ("prefill", "extend", "verify")
# Inputs that programs have in addition to the flow's inputs.
ADDED_INPUTS = {**dict.fromkeys(CACHED_PROGRAMS, (LENGTHS,)), "packed": (SEGMENTS, POSITIONS)}
PROGRAMS = ("forward", "train", *CACHED_PROGRAMS, "explicit", "packed", "padded")


def unknown_program(program: object) -> str:
    """Return the error message for a program name that does not exist."""
    programs = ", ".join(PROGRAMS)
    return f"unknown program {shown(program)}; programs are {programs}{did_you_mean(program, PROGRAMS, 0.5)}"


def derive(
    graph: Graph, program: str, types: TypeCache, last_only: bool = False, kv_dtype: np.dtype[Any] | None = None,
    supplied: Collection[str] = (),
) -> Graph:  # fmt: skip
    """Return the HIR of `program`, derived from the forward graph.

    Args:
        graph: the HIR of the forward program.
        program: one of `PROGRAMS`.
        types: the cache of inferred types and of proofs.
        last_only: whether to compute outputs of each row's last token only, `[B, 1, …]`; in `packed`, of the selected
            tokens.
        kv_dtype: dtype of cached keys and values; None for their own dtype (in `explicit` float32, as all outputs).
        supplied: names of the optional inputs that calls will supply.

    Raises:
        DeriveError: the sequence dimension is a number, or a stage mixes positions and has no rule.
    """
    if program not in PROGRAMS:
        raise DeriveError(unknown_program(program))
    if last_only and program != "packed":
        graph = last_token_only(graph, types)
    if program in ("forward", "train"):
        return graph  # `train` differs in how it runs: the plan scans its layers and may recompute them
    if program == "explicit":
        graph = unroll(graph, types)  # every layer has separate cache inputs and outputs
    check_inputs(graph, program)
    # Plugins' blocks, and then the nodes without a rule, are tried in one XLA program each: compilation dominates.
    if program in CACHED_PROGRAMS:
        check_last_tokens(graph)
        cache_chunk_tests(graph, types, lambda op: rule_of(op) is carry_state)
    cache_slice_tests(graph, types, rule_of)
    d = Derivation(program, types, kv_dtype)
    if program == "explicit":
        d.explicit_cache = ExplicitCache.of(graph, kv_dtype, supplied)
    if program == "padded":
        d.token_mask = TokenMask.of(graph, supplied)
    # Nodes that depend on no token are rewritten separately: `prefill` stores their values, `explicit` computes them.
    has_request_values = program in CACHED_PROGRAMS or program == "explicit" and not reads_cache(graph)
    request_levels = per_request.find_request_levels(graph) if has_request_values else per_request.RequestLevels()
    fn = rule_rewrite(d)

    def enter(graph: Graph) -> Rewrite:
        if program == "padded":
            return padding_rewrite(d, graph, fn)
        return fn if id(graph) not in request_levels.by_graph else request_rewrite(d, graph, request_levels, fn)

    program_graph = rewrite(graph, enter, types, program)
    if program in ("extend", "verify") and request_levels.by_graph:
        # The state has all that is computed from the other inputs, so they are no inputs of these programs.
        program_graph = replace(program_graph, inputs=tuple(per_request.used_inputs(program_graph)))
    if program == "packed":
        inputs = (*program_graph.inputs, *ADDED_INPUTS[program], *([SELECTED] if last_only else []))
        program_graph = replace(program_graph, inputs=inputs)
        return take_early(program_graph, types, take_selected, True) if last_only else program_graph
    if program == "padded":
        return d.token_mask.finish(program_graph)
    if d.explicit_cache is not None:
        return d.explicit_cache.finish(program_graph, types)
    return _with_length(program_graph, types, program)


def rule_rewrite(d: Derivation) -> Rewrite:
    """Return the rewrite of each node by the rule of its op; its result None leaves the node as it is.

    A node without a rule stays unchanged if it treats each token independently: by proof, or, where its author declares
    so, by tests on slices. Otherwise it is refused.
    """

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        rule = rule_of(node.op, d.program)
        if rule is None:
            check_token_wise(d, node, tuple(map(b.type, inputs)))
            return None
        num_writes = len(b.writes)
        results = rule(d, b, node, inputs)
        # Rejected tokens have to leave the state again. The rules of `RULES` handle that; plugins have no way to yet.
        if d.program == "verify" and type(node.op) not in RULES and len(b.writes) > num_writes:
            raise DeriveError(
                f"{node.op.text()} keeps a state by the rule of its plugin, which cannot remove rejected tokens from "
                "it: no verify rule; generate without speculative="
            )
        return results

    return rewritten


def request_rewrite(d: Derivation, graph: Graph, request_levels: per_request.RequestLevels, fn: Rewrite) -> Rewrite:
    """Return `fn` extended by the nodes of a graph that depend on the request but on no token.

    `fn` rewrites the other nodes. Values of the request that they read are stored in the state by `prefill`, and read
    from there by `extend`; `explicit` computes them in every call. Nodes of the request have to treat rows of the batch
    independently, and have no token dimension.

    Args:
        d: the derivation of a program.
        graph: the forward program, or a region of it.
        request_levels: for each node of every graph and region what it depends on: weights alone, the request, or
            tokens.
        fn: the rewrite of the other nodes, those that depend on tokens or on weights alone.
    """
    levels, is_fixed = request_levels.levels_of(graph), id(graph) in request_levels.fixed_regions
    stores_values = request_levels.has_stored_values(graph) and d.explicit_cache is None
    splitter = per_request.RequestSplitter(graph, levels, d.program) if stores_values else None

    def check_independent(node: Node) -> None:
        check_token_wise(d, node, tuple(map(graph.type, node.inputs)))

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if is_fixed or levels[number] == per_request.REQUEST:
            check_independent(node)
            return splitter.drop(b, number, node) if splitter is not None and d.program != "prefill" else None
        if isinstance(node.op, Leaf):
            return fn(b, number, node, inputs)
        if splitter is not None:
            inputs = splitter.operands(b, node, inputs, d.state)
        if node.op.regions():
            op, inputs = per_request.prune_operands(node.op, inputs, d.types)
            return b.add(op, *inputs)
        if per_request.reads_fixed_keys(levels, node):
            check_fixed_keys(node)
            check_independent(node)
            return b.add(node.op, *inputs)
        results = fn(b, number, node, inputs)
        return b.add(node.op, *inputs) if results is None else results

    return rewritten


def padding_rewrite(d: Derivation, graph: Graph, fn: Rewrite) -> Rewrite:
    """Return `fn` extended by the rules of `padded`: attention and end-of-text tokens do not read padding."""

    def rewritten(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(node.op, hir.EndToken):
            return (d.token_mask.end_token(b, node.op, *inputs),)
        if not isinstance(node.op, hir.Attention):
            return fn(b, number, node, inputs)
        if "seq" in b.type(inputs[1]).symbols:
            check_bias(d.types, node.op, tuple(b.type(v) for v in inputs))
            return d.token_mask.attention(b, graph, node, inputs)
        # Keys of another sequence contain no padding of this one.
        check_fixed_keys(node)
        check_token_wise(d, node, tuple(b.type(v) for v in inputs))
        return None

    return rewritten


def check_fixed_keys(node: Node) -> None:
    """Check that attention over another sequence's keys selects them by a mask only, if at all.

    Raises:
        DeriveError: attention is causal or windowed, so that the keys read by a token depend on its position.
    """
    op = node.op
    assert isinstance(op, hir.Attention)
    if op.causal or op.window is not None:
        raise DeriveError(
            "attention over keys of another sequence is causal or has a window: the keys that a token reads would "
            "depend on the number of tokens; use a mask"
        )


def check_last_tokens(graph: Graph) -> None:
    """Check that values of each row's last token reach outputs only, since in `extend` another token is the last one.

    Raises:
        DeriveError: a node combines such a value with a value of every token.
    """
    for inner in dict.fromkeys(g for g, _ in graph.walk()):
        last_token_nodes: set[int] = set()
        for number, node in enumerate(inner.nodes):
            last_reads = [v for v in node.inputs if v.node in last_token_nodes]
            reads_all_tokens = any(
                "seq" in inner.type(v).symbols for v in node.inputs if v.node not in last_token_nodes
            )
            if last_reads and reads_all_tokens and isinstance(node.op, hir.Attention):
                last_reads *= node.op.last  # otherwise its rule refuses it, with a more precise message
            elif last_reads and reads_all_tokens:
                raise DeriveError(
                    f"{path_text(node.origin.path)}: {node.op.text()} combines the last token of each row with every "
                    "token: an earlier token would read a later one"
                )
            if isinstance(node.op, hir.LastToken) or last_reads:
                last_token_nodes.add(number)


def check_inputs(graph: Graph, program: str) -> None:
    """Check that an input has the symbolic dims batch and seq, and that the program's own inputs have unused names.

    A flow that reads its cache itself may have other dims.

    Raises:
        DeriveError: one of these conditions does not hold; the message names the inputs.
    """
    if not (reads_cache(graph) or any({"batch", "seq"} <= i.type.symbols for i in graph.inputs)):
        shapes = ", ".join(f"{i.input} {i.type}" for i in graph.inputs)
        raise DeriveError(f"{program} needs an input with the symbolic dimensions batch and seq; the flow has {shapes}")
    names = {i.input for i in graph.inputs}
    for name in (i.input for i in ADDED_INPUTS.get(program, ()) if i.input in names):
        raise DeriveError(f"{program} adds an input {quote(name)}; the flow has one of that name already, rename it")


def reads_cache(graph: Graph) -> bool:
    """Return whether a flow reads cached keys and values itself."""
    return any(isinstance(node.op, hir.GrowingAttention) for node in graph.nodes)


def _with_length(graph: Graph, types: TypeCache, program: str) -> Graph:
    """Add the input `lengths` and advance the state's length by it; `verify` leaves the length unchanged."""
    b = Builder.resume(graph, types)
    b.inputs += ADDED_INPUTS[program]
    length = b(LENGTH)
    b.writes.append((LENGTH_LEAF, length if program == "verify" else b(Binary("add"), length, b(LENGTHS))))
    return b.finish(graph.outputs, graph.output_names)


def check_token_wise(d: Derivation, node: Node, operands: tuple[TensorType, ...]) -> None:
    """Check that a node treats positions and rows of the batch independently.

    Leaves have no operands, and the nodes in the body of a region are checked one by one, so both pass.

    Raises:
        DeriveError: there is no proof; the message has the reason.
    """
    if isinstance(node.op, Leaf) or node.op.regions() or stacks(node, operands):
        return
    for dim, entries in (("seq", "positions"), ("batch", "rows of the batch")):
        if not any(dim in t.symbols for t in (*operands, *node.types)):
            continue
        if reason := why_not_independent(d.types, node, operands, dim):
            raise DeriveError(
                f"{node.op.text()} is not proved to treat {entries} independently: {reason}. "
                f"It has no {d.program} rule; build it from token-wise ops and the attention stages"
            )


def stacks(node: Node, operands: tuple[TensorType, ...]) -> bool:
    """Return whether a node stacks its operands along a new first axis, or is a part of that.

    Captured weights of attention have two axes of tokens, for which there is no proof, and need none to be stacked.
    """
    (result,) = node.types[:1]
    if isinstance(node.op, Reshape):
        return result.shape == (1, *operands[0].shape)
    is_concat = isinstance(node.op, Concat) and node.op.axis == 0 and is_static(result.shape[0])
    return is_concat and all(t.shape[1:] == result.shape[1:] for t in operands)


def last_token_only(graph: Graph, types: TypeCache) -> Graph:
    """Gather the last token before the token-wise suffix of the graph, so that the head computes one row per sequence.

    The suffix continues through the query operand of causal attention: the last query alone determines the last row.
    """
    cache_slice_tests(graph, types, rule_of)
    return take_early(graph, types, lambda b, x, axis: b(hir.LastToken(), x))


def take_selected(b: Builder, x: Value, axis: int) -> Value:
    """Return the selected tokens of each packed row of x, whose tokens are on `axis`."""
    others = (1,) * (b.type(x).rank - axis - 1)
    indices = b(Reshape((AxisOf(0), *(1,) * (axis - 1), -1, *others)), b.leaf(SELECTED))
    return b(TakeAlongAxis(axis, "clip"), x, indices)


def take_early(
    graph: Graph, types: TypeCache, take: Callable[[Builder, Value, int], Value], packed: bool = False
) -> Graph:
    """Return the graph with `take`, which takes some tokens of a value, before its token-wise suffix and its outputs.

    Its last argument is the axis of the tokens. `packed`: whether it is the program of that name.
    """
    suffix = _token_wise_suffix(graph, types, packed)

    def enter(inner: Graph) -> Rewrite:
        moved: dict[tuple[Value, int], Value] = {}  # one gather for all readers of a value

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if inner is not graph or number not in suffix:
                return None
            gathered = []
            for index, (old, new) in enumerate(zip(node.inputs, inputs, strict=True)):
                axis = query_axis(node.op, index)
                is_taken = axis is not None and b.type(new).shape[axis : axis + 1] == (symbol("seq"),)
                if axis is not None and is_taken and old.node not in suffix:
                    if (new, axis) not in moved:
                        moved[new, axis] = take(b, new, axis)
                    new = moved[new, axis]
                gathered.append(new)
            op = node.op
            return b.add(replace(op, last=True) if isinstance(op, hir.Attention) and not packed else op, *gathered)

        return fn

    new_graph = rewrite(graph, enter, types, "last_token_only")
    b = Builder.resume(new_graph, types)
    # An output outside of the suffix still has all tokens.
    outputs = list[Value]()
    for name, value in zip(new_graph.output_names, new_graph.outputs, strict=True):
        t = new_graph.type(value)
        if "seq" in t.symbols and t.shape[1:2] != (symbol("seq"),):
            raise DeriveError(f"output {quote(name)} is {t}, without tokens on axis 1: it has no value of a last token")
        outputs.append(take(b, value, 1) if "seq" in t.symbols else value)
    return b.finish(outputs, new_graph.output_names)


def _token_wise_suffix(graph: Graph, types: TypeCache, packed: bool) -> set[int]:
    """Return the token-wise nodes with results that only outputs and other suffix nodes read, row by row."""
    users: dict[int, set[int]] = {}
    full_readers = {v.node for _, v in graph.writes}
    for number, node in enumerate(graph.nodes):
        for index, v in enumerate(node.inputs):
            users.setdefault(v.node, set()).add(number)
            if query_axis(node.op, index) is None:
                full_readers.add(v.node)
    suffix: set[int] = set()
    for number in range(len(graph.nodes) - 1, -1, -1):  # backwards, as a node's users decide whether it is in
        node = graph.nodes[number]
        is_plain = not (isinstance(node.op, Leaf) or node.op.regions() or rule_of(node.op))
        if number in full_readers or not users.get(number, set()) <= suffix:
            continue
        operands = tuple(graph.type(v) for v in node.inputs)
        if treats_queries_alone(node.op, packed) and all(t.shape[1] == symbol("seq") for t in operands[:3]):
            suffix.add(number)
        with_tokens = [t for t in operands if "seq" in t.symbols]
        if not is_plain or not with_tokens or any(t.shape[1:2] != (symbol("seq"),) for t in with_tokens):
            continue
        verdict = types.cached(prove, node.op, operands, "seq")
        is_independent = verdict.token_wise and not why_not_independent(types, node, operands, "seq")
        if is_independent and all(axis == 1 for axis in verdict.out_axes):
            suffix.add(number)
    return suffix


def treats_queries_alone(op: Op, packed: bool) -> bool:
    """Return whether the op is attention that computes its last row, or any in `packed`, from that query alone.

    The last row needs causal attention without a mask or bias array, because single queries are aligned with the last
    keys. Any needs one that is not causal, and in `packed` masks have an axis of queries.
    """
    if not isinstance(op, hir.Attention) or op.returns != "context":
        return False
    return not op.causal and op.window is None if packed else op.causal and not op.extra


def query_axis(op: Op, operand: int) -> int | None:
    """Return the axis of an operand of which an entry is all that a token of the result needs; None if there is none.

    Masks and biases of attention have it after the heads.
    """
    if operand == 0 or not isinstance(op, hir.Attention):
        return 1
    return 2 if 3 <= operand < 3 + len(op.extra) else None
