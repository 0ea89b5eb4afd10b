"""Rules that rewrite the blocks that depend on the sequence, for each derived program.

`RULES` is the table of programs with a state and of `explicit`. `PACKED` and `PADDED` are for the programs with another
row layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from rlx_jax.errors import DeriveError, ProfileError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Input, Node, Op, Param, StateRead, TypeCache, Value, constant
from rlx_jax.ir.ops.cache import is_code_dtype
from rlx_jax.ir.ops.custom import ExportedCall
from rlx_jax.ir.ops.index import Iota
from rlx_jax.ir.ops.pointwise import Binary, Compare, Where
from rlx_jax.ir.ops.shape import Reshape, Slice
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import Program, Quantized, Roles, printed_name
from rlx_jax.ir.paths import Path, StateLeaf, bind_path, path_text
from rlx_jax.ir.queries import is_builtin
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.ir.types import I32, TensorType, symbol
from rlx_jax.lowering.hir import row_layouts
from rlx_jax.lowering.hir.explicit import ExplicitCache
from rlx_jax.lowering.hir.independence import chunk_failure
from rlx_jax.lowering.hir.row_layouts import TokenMask
from rlx_jax.lowering.hir.weights import make_param, transposed
from rlx_jax.lowering.mir.small import dce
from rlx_jax.plugins import derive_rule

PER_ROW = TensorType((symbol("batch"),), I32)
LENGTHS = Input("lengths", type=PER_ROW)
LENGTH_LEAF = StateLeaf((), "length")
LENGTH = StateRead(LENGTH_LEAF, type=PER_ROW)  # replicated (no roles): it is small, and every device reads it


@dataclass
class Derivation:
    """State shared by the rules while one program is derived.

    Attributes:
        program: the name of the program.
        types: the cache of inferred types and of proofs.
        kv_dtype: dtype of cached keys and values, None for their own.
        explicit_cache: the cache inputs and outputs of `explicit`, else None.
        token_mask: the token mask of `padded`.
        leaf_names: the paths and names of state leaves so far.
        cached_attention: the blocks of attention over a cache so far, with their operands, by builder, window and the
            operands in the flow; both without the queries, which may be those of the last token alone.
    """

    program: str
    types: TypeCache
    kv_dtype: np.dtype[Any] | None = None
    explicit_cache: ExplicitCache | None = None
    token_mask: TokenMask = field(default_factory=TokenMask)
    leaf_names: set[tuple[Path, str]] = field(default_factory=set)
    cached_attention: dict[Any, tuple[hir.CachedAttention, tuple[Value, ...]]] = field(default_factory=dict)

    def state(self, b: Builder, path: Path, slot: str, type: TensorType, roles: Roles) -> tuple[StateLeaf, Value]:
        """Add a leaf to the state of one block.

        Args:
            b: the builder of the program.
            path: the block's path.
            slot: the name of the leaf within the block; a number is appended if the block has one of that name.
            type: the shape and dtype.
            roles: the role of each axis, for sharding.

        Returns:
            The leaf and its value at the beginning of the program.
        """
        name, n = slot, 1
        while (path, name) in self.leaf_names:
            n += 1
            name = f"{slot}{n}"
        self.leaf_names.add((path, name))
        leaf = StateLeaf(path, name)
        return leaf, b.leaf(StateRead(leaf, roles, type=type))


Rule = Callable[[Derivation, Builder, Node, tuple[Value, ...]], tuple[Value, ...] | None]


def keep_unchanged(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """Leave the block as it is: it depends on the sequence only through positions, which have a rule."""


def positions(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Rewrite positions(x) → state.length[:, None] + iota; prefill starts at 0 and leaves positions(x)."""
    if d.explicit_cache is not None:
        return (d.explicit_cache.positions(b, *inputs),)
    if d.program == "prefill":
        return None
    steps = b(Reshape((1, -1)), b(Iota(1), *inputs))
    start = b(Reshape((-1, 1)), b.leaf(LENGTH))
    return (b(Binary("add"), start, steps),)


def attention(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Rewrite attention(q, k, v) → cached_attention(q, k, v, state.k, state.v, state.length, lengths).

    Also write the state leaves k and v; if they are 8-bit codes, with their scales k_scale and v_scale. Attention in a
    window of w keys gets a ring buffer of min(context, w) slots.
    In `explicit` the caches are inputs and outputs instead.

    Raises:
        DeriveError: attention is not causal, reads keys of another sequence, or reads an array over keys that later
            calls do not have.
    """
    op = node.op
    assert isinstance(op, hir.Attention)
    q, k, v, *rest = inputs
    t, other_operands = b.type(k), rest[len(op.extra) :]
    if symbol("seq") in b.type(q).shape and "seq" not in t.symbols:
        raise DeriveError(f"attention reads keys {t} of another sequence: there is no {d.program} rule for that")
    if not op.causal:
        raise DeriveError(
            f"attention is not causal and mixes positions: a token would read later ones, so {d.program} has no meaning"
        )
    check_extra(d, op)
    row_layouts.check_bias(d.types, op, tuple(b.type(x) for x in inputs))
    if op.returns != "context" and (d.explicit_cache is not None or d.program != "prefill" and op.window is not None):
        keys = "cached keys of an input" if d.explicit_cache is not None else "the slots of a ring buffer"
        raise DeriveError(
            f"the capture {op.returns!r} of attention has no {d.program} rule over {keys}: prefill, lm.capture and "
            "lm.generate(…, return_captures=True) return it"
        )
    key = b, op.window, inputs[1:]
    if op.returns != "context" and key in d.cached_attention:  # a capture beside the attention
        block, operands = d.cached_attention[key]
        return b.add(replace(block, attend=op), q, *operands)[:1]
    if t.shape[1] != symbol("seq") or not (op.last or b.type(q).shape[1] == symbol("seq")):
        raise DeriveError(f"attention reads keys {t} of another sequence: there is no {d.program} rule for that")
    if d.explicit_cache is not None:
        return (d.explicit_cache.attention(b, op, q, k, v, *other_operands),)
    roles = ("batch", None, "kv_heads", None)
    slots = (t.shape[0], symbol("context" if op.window is None else f"context_{op.window}"), op.kv_heads)
    new_leaves = [
        d.state(b, node.origin.path, name, TensorType((*slots, x.shape[2] // op.kv_heads), dtype), roles)
        for name, x, dtype in (("k", t, d.kv_dtype or t.dtype), ("v", b.type(v), d.kv_dtype or b.type(v).dtype))
    ]
    quantized = d.kv_dtype is not None and is_code_dtype(d.kv_dtype)
    if quantized:
        scales = TensorType(slots, np.dtype(np.float32))
        new_leaves += [d.state(b, node.origin.path, name, scales, roles[:3]) for name in ("k_scale", "v_scale")]
    leaves, (cache_k, cache_v, *cached_scales) = [leaf for leaf, _ in new_leaves], [value for _, value in new_leaves]
    masks = list[Value]()
    if op.extra:  # later calls need the mask of cached keys too, so it is part of the state
        keep = key_mask(b, rest[0])
        leaf, cache = d.state(b, node.origin.path, "keep", TensorType(slots[:2], b.type(keep).dtype), roles[:2])
        leaves, masks = [*leaves, leaf], [keep, cache]
    block = hir.CachedAttention(op, d.program == "prefill", ring=op.window is not None, quantized=quantized)
    operands = (q, k, v, cache_k, cache_v, b.leaf(LENGTH), b.leaf(LENGTHS), *cached_scales, *masks, *other_operands)
    d.cached_attention[key] = block, operands[1:]
    out, *caches = b.add(block, *operands)
    b.writes += zip(leaves, caches, strict=True)
    return (out,)


def key_mask(b: Builder, keep: Value) -> Value:
    """Return a keep mask over the new keys as bools `[batch, seq]`.

    Raises:
        DeriveError: the mask depends on queries or heads, not on keys alone.
    """
    t = b.type(keep)
    if t.shape[-1] != symbol("seq") or any(size != 1 for size in t.shape[1:-1]):
        raise DeriveError(
            f"attention reads the mask {t}, which is no mask of keys, [batch, seq]: it does not define which later "
            "tokens read a cached key; use a function of positions, attention(…, bias=lambda q, k: …)"
        )
    if t.rank == 4:
        keep = b(Slice((row_layouts.FULL, 0, 0, row_layouts.FULL)), keep)
    keep = row_layouts.to_bool_mask(b, keep)
    if t.shape[0] != 1:
        return keep
    # Broadcast over the batch: the state has a row of the mask for each sequence.
    all_true = b(Compare("ge"), b(Reshape((-1, 1)), b.leaf(LENGTHS)), b.leaf(constant(0, I32)))
    return b(Where(), all_true, keep, b.leaf(constant(False, np.bool_)))


def check_extra(d: Derivation, op: hir.Attention) -> None:
    """Check that attention reads no array over new keys that has no entries for the cached keys.

    Raises:
        DeriveError: it adds a bias array, or in `explicit` reads a mask of its own.
    """
    if "bias" in op.extra:
        raise DeriveError(
            f"attention adds a bias array, which has no entries for the cached keys of {d.program}: pass a function of "
            "the positions of queries and keys, attention(…, bias=lambda q, k: …)"
        )
    if op.extra and d.explicit_cache is not None:
        raise DeriveError(
            f"attention reads the operand {op.extra[0]!r} over new keys, which has no entries for cached keys; "
            "explicit masks both by its own input 'mask': make the flow's mask an optional input (default=None), or "
            "use prefill and extend"
        )


def keep_causal_block(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """Leave a block that carries a state along the tokens as it is: padding comes after the tokens.

    Raises:
        DeriveError: the block runs along another axis than the tokens.
    """
    op, x = node.op, b.type(inputs[0])
    if x.shape[:2] != (symbol("batch"), symbol("seq")):
        raise DeriveError(f"{op.text()} runs along {x}, expected [batch, seq, …]: there is no {d.program} rule")


def carry_state(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...]:
    """Rewrite block(x, …) → carried(block, x, …, state.slot …, state.length, lengths), and write each slot's leaf.

    Raises:
        DeriveError: a plugin's block gives other results when its tokens arrive in chunks.
    """
    block: Any = node.op  # implements `hir.CarriesState`
    keep_causal_block(d, b, node, inputs)
    operands = tuple(b.type(v) for v in inputs)
    if not is_builtin(type(block)) and (reason := d.types.cached(chunk_failure, block, operands)):
        raise DeriveError(f"{block.text()} carries a state, and {reason}: {d.program} would compute other numbers")
    slots = block.slots(*operands)
    if d.explicit_cache is not None:
        return tuple(d.explicit_cache.carry_state(b, block, inputs, slots))
    batch = operands[0].shape[0]
    roles = [("batch", *(s.roles or (None,) * s.type.rank)) for s in slots]
    leaves = [d.state(b, node.origin.path, s.name, s.leaf(batch), r) for s, r in zip(slots, roles, strict=True)]
    # `verify` leaves the state unchanged, and writes the states after each token to companion leaves.
    returns_every = d.program == "verify"
    op = hir.Carried(block, len(slots), fresh=d.program == "prefill", every=returns_every)
    values = b.add(op, *inputs, *(value for _, value in leaves), b.leaf(LENGTH), b.leaf(LENGTHS))
    num_results = len(values) - len(slots) * (1 + returns_every)
    new_states = values[num_results + len(slots) * returns_every :]
    b.writes += [
        (replace(leaf, every=returns_every), new_state) for (leaf, _), new_state in zip(leaves, new_states, strict=True)
    ]
    b.writes += leaves if returns_every else []
    return values[:num_results]


def refuse_exported_state(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """Refuse a state that `export_kv` made an output: the derived program keeps the state itself.

    Raises:
        DeriveError: always.
    """
    raise DeriveError(
        f"{node.op.text()}: export_kv gives the state after the last token of a row, which {d.program} keeps itself: "
        "leave out export_kv"
    )


def keep_growing_attention(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """Leave attention over a cache that the flow reads itself as it is; only `explicit` has a rule for it.

    Raises:
        DeriveError: the program is another one.
    """
    if d.explicit_cache is None:
        raise DeriveError(f"the flow reads cached keys and values itself (BindDecodeInputs): no {d.program} rule")
    d.explicit_cache.num_attentions += 1


def ring_sizes(graph: Graph) -> dict[str, int]:
    """Return the symbolic sizes of ring buffers in a derived program, each with its maximum, the attention window."""
    sizes: dict[str, int] = {}
    for inner, node in graph.walk():
        op = node.op
        if isinstance(op, hir.CachedAttention) and op.ring and op.attend.window is not None:
            sizes[str(inner.type(node.inputs[3]).shape[1])] = op.attend.window
        elif isinstance(op, ExportedCall):
            sizes |= dict(op.rings)
    return sizes


def last_token(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
    """Rewrite last_token(x) → last_token(x, lengths − 1)."""
    if d.explicit_cache is not None:  # `explicit` has no lengths, so every token is valid
        return None
    lengths = b.leaf(LENGTHS)
    return (b(hir.LastToken(), inputs[0], b(Binary("sub"), lengths, b.scalar(1, lengths))),)


def refuse_plugin_rule(d: Derivation, b: Builder, node: Node, inputs: tuple[Value, ...]) -> None:
    """Refuse a plugin's op in `packed` and `padded`: its derive rule covers rows of one sequence only.

    Raises:
        DeriveError: always.
    """
    raise DeriveError(f"{node.op.text()} has a rule of its plugin, for rows of one sequence: no {d.program} rule")


# Rules for the blocks that depend on the sequence, in programs with a state and in `explicit`. Only these rules read or
# write caches.
RULES: dict[type[Op], Rule] = {
    hir.Positions: positions,
    hir.Attention: attention,
    hir.GrowingAttention: keep_growing_attention,
    hir.LastToken: last_token,
    hir.Carried: refuse_exported_state,
    **dict.fromkeys((hir.RopeAngles, hir.RopeRows), keep_unchanged),
    **dict.fromkeys((hir.Recurrent, hir.CausalWindow, hir.CausalConv, hir.GatedDelta, hir.SelectiveScan), carry_state),
}


# Rules of `packed`, with rows of several sequences. A block without a rule is proved to be token-wise, or refused.
PACKED: dict[type[Op], Rule] = {
    hir.Positions: lambda d, b, node, inputs: (b.leaf(row_layouts.POSITIONS),),
    hir.Attention: lambda d, b, node, inputs: row_layouts.packed_attention(d.types, b, node, inputs),
    hir.CountedPositions: lambda d, b, node, inputs: row_layouts.counted_positions(b, cast(Any, node.op), *inputs),
    **dict.fromkeys((hir.RopeAngles, hir.RopeRows, hir.RelativeBias, hir.RelativeScores), keep_unchanged),
}


# Rules of `padded`: these blocks read no later token, so padding at the end does not change them. `padding_rewrite` has
# the rules of the other blocks.
PADDED: dict[type[Op], Rule] = {
    **{block: rule for block, rule in PACKED.items() if rule is keep_unchanged},
    **dict.fromkeys((hir.Positions, hir.CountedPositions, hir.FirstToken), keep_unchanged),
    **{block: keep_causal_block for block, rule in RULES.items() if rule is carry_state},
}


def rule_of(op: Op, program: str = "") -> Rule | None:
    """Return the rule of an op for a program, or None.

    A plugin's op has the derive rule that the plugin registered, but not in `packed` and `padded`, which refuse it.
    """
    if program not in ("packed", "padded"):
        return RULES.get(type(op)) or derive_rule(type(op))
    table = PACKED if program == "packed" else PADDED
    return table.get(type(op)) or (refuse_plugin_rule if derive_rule(type(op)) else None)


def find_causal_block(graph: Graph) -> str:
    """Return a block that reads every preceding position, so that padding has to come last; empty if there is none."""
    for _, node in graph.walk():
        if rule_of(node.op, "padded") is keep_causal_block:
            return f"{path_text(node.origin.path)}: {node.op.text()}"
        if isinstance(node.op, ExportedCall) and node.op.left_context:
            return node.op.left_context
    return ""


# The pass that packs weights by a scheme of integers, which the profile selects (`precision.weights`).


# Returns the scheme of the weights of a block, or "keep"; None if other blocks that read them may decide.
SchemeAt = Callable[[Path], str | None]


def quantize_weights(graph: Graph, scheme_at: SchemeAt, types: TypeCache) -> Graph:
    """Rewrite linear(x, w) → linear(x, quantize(w)), and likewise embeddings and experts.

    Groups of values lie along the axis that a product contracts. Weights of which this axis does not consist of whole
    groups stay as they are, and so do those that other blocks read, and the router of a mixture: a small error there
    selects other experts.
    """
    schemes = _schemes(graph, scheme_at)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Param) and any(program in schemes for program in op.programs):
            return (b.leaf(make_param(_packed(program, schemes) for program in op.programs)),)
        weight = b.nodes[inputs[1].node].op if isinstance(op, hir.Linear) else None
        if isinstance(op, hir.Linear) and op.contract == 0 and isinstance(weight, Param):
            if isinstance(weight.programs[0], Quantized):
                return b.add(replace(op, contract=1), *inputs)
        return None

    return dce(rewrite(graph, everywhere(fn), types, "quantize"), types) if schemes else graph


def _packed(program: Program, schemes: Mapping[Program, tuple[str, bool]]) -> Program:
    """Return a weight by its scheme, with its axes swapped if its products contract the first one."""
    if program not in schemes:
        return program
    scheme, turned = schemes[program]
    return Quantized(transposed(program) if turned else program, scheme)


def _schemes(graph: Graph, scheme_at: SchemeAt) -> dict[Program, tuple[str, bool]]:
    """Return the weights to pack: for each the scheme, and whether its products contract its first axis.

    Raises:
        ProfileError: two blocks that read a weight have different schemes.
    """
    scheme_by_weight: dict[Program, str] = {}
    schemes: dict[Program, tuple[str, bool]] = {}
    fixed: set[Program] = set()
    turned_groups: list[tuple[Program, ...]] = []
    routers = {
        number for inner, node in graph.walk() if isinstance(node.op, hir.Route) for number in _router(inner, node)
    }
    for inner, node in graph.walk():
        for index, value in enumerate(node.inputs):
            weight = inner.nodes[value.node].op
            if not isinstance(weight, Param):
                continue
            axis = _contracted_axis(node, index)
            if axis is None or id(node) in routers:
                fixed.update(weight.programs)
                continue
            turned_groups += [weight.programs] if axis == 0 else []
            for layer, program in enumerate(weight.programs):
                path = bind_path(node.origin.path, layer)
                scheme = scheme_at(path) or ""
                if scheme and scheme_by_weight.setdefault(program, scheme) != scheme:
                    raise ProfileError(
                        f"precision.weights: {quote(path_text(path))} is {quote(scheme)}, and another block that reads "
                        f"{printed_name(program)} is {quote(scheme_by_weight[program])}; choose one for both"
                    )
                if scheme in SCHEMES and int(program.type.shape[axis]) % SCHEMES[scheme].elements == 0:
                    if schemes.setdefault(program, (scheme, axis == 0))[1] != (axis == 0):
                        fixed.add(program)
    # The layers of one product have one orientation.
    for group in turned_groups:
        fixed.update(group if any(program not in schemes for program in group) else ())
    return {program: choice for program, choice in schemes.items() if program not in fixed}


def _router(graph: Graph, route: Node) -> set[int]:
    """Return the products that compute the logits of a mixture, by `id`, whatever sums and casts follow them."""
    products: set[int] = set()
    pending = {route.inputs[0].node}
    while pending:
        node = graph.nodes[pending.pop()]
        operands = [graph.nodes[v.node].op for v in node.inputs]
        if any(isinstance(op, Param) and op.type.rank > 1 for op in operands):
            products.add(id(node))
        else:
            pending.update(v.node for v in node.inputs)
    return products


def _contracted_axis(node: Node, index: int) -> int | None:
    """Return the axis of a weight along which products contract it, or look-ups read it; None for other operands."""
    if isinstance(node.op, hir.Linear) and index == 1:
        return 0 if node.op.contract == 0 else -1
    if isinstance(node.op, hir.Embed) and index == 0:
        return -1
    return -1 if isinstance(node.op, hir.Experts) and node.op.contract == 1 and index in (1, 2, 3) else None
