"""The program `explicit`: cached keys and values of past tokens are inputs, and the extended ones are outputs.

Attention i of the flow, in graph order, reads the inputs `past_k_{i}` and `past_v_{i}` `[batch, past, K·D]`, with keys
after rotary embedding, and returns the outputs `kv.{i}.k` and `kv.{i}.v` `[batch, past + seq, K·D]`. Positions continue
after the cache. Two more inputs are optional: `position_ids` `[batch, seq]`, and `mask` `[batch, past + seq]` over
cached and new keys: 1 keeps a key, less than ½ drops it. The causal mask applies in addition.

A block with a state slot reads the input `state_{slot}_{i}` and returns the output `state.{i}.{slot}` `[batch, …]`, the
state after the last token; i counts the slots of the same name. A flow with such a block has no `mask`, because the
state has read every token.

An input that the flow declares under one of these names is used as it is, if its shape matches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.errors import DeriveError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Hir, Input, Node, TypeCache, Value
from rlx_jax.ir.ops.cache import is_code_dtype
from rlx_jax.ir.ops.index import Iota
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.shape import Narrow, Reshape
from rlx_jax.ir.types import F32, I32, DimLike, TensorType, is_float, symbol

ATTENTION_OPS = hir.Attention | hir.GrowingAttention
MASK, POSITION_IDS = "mask", "position_ids"
OPTIONAL_INPUTS = (  # of every explicit program, unless the flow has inputs of these names
    Input(MASK, type=TensorType((symbol("batch"), symbol("past") + symbol("seq")), I32)),
    Input(POSITION_IDS, type=TensorType((symbol("batch"), symbol("seq")), I32)),
)


@dataclass
class ExplicitCache:
    """Cache inputs and outputs of one `explicit` program while it is derived.

    Attributes:
        flow_inputs: the inputs of the flow, by name.
        past_keys: the input of the first layer's cached keys; None without attention.
        cache_dtype: dtype of cache inputs that the flow does not declare.
        supplied: names of the optional inputs that calls will supply.
        added_inputs: the inputs added so far, by name.
        added_outputs: the outputs added so far, by name: extended caches and new states.
        num_attentions: the number of attentions so far.
        slot_names: the names of the state slots so far.
    """

    flow_inputs: dict[str, Input]
    past_keys: Input | None
    cache_dtype: np.dtype[np.generic]
    supplied: frozenset[str]
    added_inputs: dict[str, Input] = field(default_factory=dict)
    added_outputs: dict[str, Value] = field(default_factory=dict)
    num_attentions: int = 0
    slot_names: list[str] = field(default_factory=list)

    @staticmethod
    def of(graph: Graph, cache_dtype: np.dtype[np.generic] | None, supplied: Collection[str]) -> ExplicitCache:
        """Return the initial value for a flow without regions.

        Args:
            graph: the flow's HIR.
            caches: dtype of caches, None for float32.
            given: names of the optional inputs that calls will supply.

        Raises:
            DeriveError: the flow has neither attention nor a block that carries a state, or the caches have codes.
        """
        attention = next((n for n in graph.nodes if isinstance(n.op, ATTENTION_OPS) and _reads_tokens(graph, n)), None)
        flow_inputs, dtype = {i.input: i for i in graph.inputs}, cache_dtype or F32
        past = flow_inputs.get(cache_name("k", 0)) if attention is not None else None
        if attention is None and not carries_state(graph):
            raise DeriveError("the flow has no attention, so explicit has nothing to cache: compile it as it is")
        if attention is not None and is_code_dtype(dtype):
            raise DeriveError(
                "explicit: its inputs and outputs are keys and values without scales, so precision.kv = 'int8' or "
                "'fp8' does not apply; use 'auto', 'f32', 'bf16' or 'f16', or the programs prefill and extend"
            )
        if attention is not None and past is None:
            past = Input(cache_name("k", 0), type=cache_type(graph.type(attention.inputs[1]), symbol("past"), dtype))
        return ExplicitCache(flow_inputs, past, dtype, frozenset(supplied))

    # -- the rules ---------------------------------------------------------------------------

    def positions(self, b: Builder, x: Value) -> Value:
        """Rewrite positions(x) → past + iota, or → the input `position_ids`."""
        rows = b.type(x)
        if POSITION_IDS in self.supplied and POSITION_IDS not in self.flow_inputs:
            return self._add_input(b, Input(POSITION_IDS, type=TensorType(rows.shape[:2], I32)))
        if self.past_keys is None:
            raise DeriveError(
                "the flow reads positions, and without attention no input has one row for each cached token: pass "
                f"{POSITION_IDS}"
            )
        # The number of past tokens as a value: the last index along the cache, plus 1.
        last_index = b(Narrow(0, -1, 1), b(Iota(1), b.leaf(self.past_keys)))
        start = b(Reshape((1, 1)), b(Binary("add"), last_index, b.scalar(1, last_index)))
        return b(Binary("add"), start, b(Reshape((1, -1)), b(Iota(1), x)))

    def attention(self, b: Builder, op: hir.Attention, q: Value, k: Value, v: Value, *extra_operands: Value) -> Value:
        """Rewrite attention(q, k, v) → growing_attention(q, k, v, past_k, past_v, mask), with outputs kv.k and kv.v."""
        layer, new = self.num_attentions, b.type(k)
        past = [self._add_cache_input(b, cache_name(kind, layer), b.type(x)) for kind, x in (("k", k), ("v", v))]
        keep = self._find_mask(b, new)
        context, *caches = b.add(hir.GrowingAttention(op, bool(keep)), q, k, v, *past, *keep, *extra_operands)
        self.added_outputs |= {f"kv.{layer}.{kind}": value for kind, value in zip("kv", caches, strict=True)}
        self.num_attentions += 1
        return context

    def carry_state(
        self, b: Builder, op: Hir, operands: Sequence[Value], slots: Sequence[hir.StateSlot]
    ) -> list[Value]:
        """Rewrite block(x, …) → carried(block, x, …, state_{slot}_{i}), with the outputs state.{i}.{slot}."""
        batch = b.type(operands[0]).shape[0]
        names: list[str] = []
        leaves: list[Value] = []
        for slot in slots:
            number = self.slot_names.count(slot.name)
            self.slot_names.append(slot.name)
            names.append(f"state.{number}.{slot.name}")
            leaf = Input(f"state_{slot.name}_{number}", type=slot.leaf(batch))
            declared = self.flow_inputs.get(leaf.input, leaf)
            if declared.type != leaf.type:
                raise DeriveError(f"input {leaf.input} is {declared.type}; expected {leaf.type}, state of {op.text()}")
            leaves.append(self._add_input(b, leaf))
        values = b.add(hir.Carried(op, len(slots), ragged=False), *operands, *leaves)
        count = len(values) - len(slots)
        self.added_outputs |= dict(zip(names, values[count:], strict=True))
        return list(values[:count])

    def finish(self, graph: Graph, types: TypeCache) -> Graph:
        """Return the program with its inputs and outputs.

        Raises:
            DeriveError: two outputs have the same name, nothing reads a supplied optional input, or a flow with states
                has a mask over past tokens.
        """
        for name in self.added_outputs:
            if name in graph.output_names:
                raise DeriveError(
                    f"explicit returns the extended keys and values as {quote(name)}, and the flow has an output of "
                    "that name already: remove export_kv, or the stage that returns them"
                )
        for name in (i.input for i in OPTIONAL_INPUTS if i.input in self.supplied):
            if name not in self.flow_inputs and name not in self.added_inputs:
                raise DeriveError(f"input {quote(name)} is passed, but nothing in the flow reads it")
        masks = [i for i in (self.flow_inputs.get(MASK), self.added_inputs.get(MASK)) if i and "past" in i.type.symbols]
        if self.slot_names and masks:
            raise DeriveError(
                f"input {MASK!r} drops keys of attention, and the state {self.slot_names[0]!r} has read every token: a "
                "masked token would still change the result; leave out the mask, or use prefill and extend with "
                "lengths"
            )
        b = Builder.resume(graph, types)
        # Inputs are added in this order: the mask, caches and states in layer order, position ids.
        names = (MASK, *(name for name in self.added_inputs if name not in (MASK, POSITION_IDS)), POSITION_IDS)
        b.inputs = [*graph.inputs, *(self.added_inputs[name] for name in names if name in self.added_inputs)]
        return b.finish([*graph.outputs, *self.added_outputs.values()], [*graph.output_names, *self.added_outputs])

    # -- the inputs --------------------------------------------------------------------------

    def _add_input(self, b: Builder, leaf: Input) -> Value:
        """Return the value of an input, added to the program unless the flow declares it."""
        if leaf.input not in self.flow_inputs:
            self.added_inputs[leaf.input] = leaf
        return b.leaf(leaf)

    def _add_cache_input(self, b: Builder, name: str, new: TensorType) -> Value:
        """Return the input of cached keys or values with the layout of the `new` ones.

        Raises:
            DeriveError: the flow declares an input of that name with another shape, or not of floats.
        """
        assert self.past_keys is not None
        expected = cache_type(new, self.past_keys.type.shape[1], self.cache_dtype)
        leaf = self.flow_inputs.get(name) or Input(name, type=expected)
        if leaf.type.shape != expected.shape or not is_float(leaf.type.dtype):
            raise DeriveError(
                f"input {name} is {leaf.type}; expected {expected}: cached keys or values of earlier tokens"
            )
        return self._add_input(b, leaf)

    def _find_mask(self, b: Builder, new: TensorType) -> tuple[Value, ...]:
        """Return the keep mask over cached and new keys, if there is one.

        A declared input `mask` of another shape is not used here; the flow may read it itself.
        """
        assert self.past_keys is not None
        shape = (new.shape[0], self.past_keys.type.shape[1] + new.shape[1])
        if MASK in self.supplied and MASK not in self.flow_inputs:
            return (self._add_input(b, Input(MASK, type=TensorType(shape, I32))),)
        leaf = self.flow_inputs.get(MASK)
        return () if leaf is None or leaf.type.shape != shape else (b.leaf(leaf),)


def _reads_tokens(graph: Graph, node: Node) -> bool:
    """Return whether a node is attention over tokens, not over other inputs of a request."""
    return isinstance(node.op, hir.GrowingAttention) or "seq" in graph.type(node.inputs[1]).symbols


def optional_inputs(graph: Graph) -> tuple[Input, ...]:
    """Return the optional inputs that the program adds to the flow's inputs."""
    unavailable = {i.input for i in graph.inputs} | ({MASK} if carries_state(graph) else set())
    return tuple(i for i in OPTIONAL_INPUTS if i.input not in unavailable)


def collect_caches(b: Builder) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return the values that later tokens need, by the names of the program's outputs.

    Returns:
        The keys and values of every causal attention, and the state of every block after the last token. The nodes
        that compute those states are added to the builder.
    """
    nodes = list(b.nodes)
    attention = [n for n in nodes if isinstance(n.op, hir.Attention) and n.op.causal]
    caches = {f"kv.{i}.{kind}": v for i, n in enumerate(attention) for kind, v in zip("kv", n.inputs[1:3], strict=True)}
    states: dict[str, Value] = {}
    names: list[str] = []
    for node in nodes:
        op: Any = node.op
        slots = op.slots(*map(b.type, node.inputs)) if isinstance(op, hir.CarriesState) else ()
        if not slots:
            continue
        with b.origin_scope(node.origin):
            new_states = b.add(hir.Carried(op, len(slots), fresh=True, ragged=False), *node.inputs)[-len(slots) :]
        for slot, value in zip(slots, new_states, strict=True):
            states[f"state.{names.count(slot.name)}.{slot.name}"] = value
            names.append(slot.name)
    return caches, states


def carries_state(graph: Graph) -> bool:
    """Return whether a block carries a state along the tokens."""
    return any(isinstance(node.op, hir.CarriesState) for _, node in graph.walk())


def cache_name(kind: str, layer: int) -> str:
    """Return the name of the input with cached keys (`k`) or values (`v`) of one layer."""
    return f"past_{kind}_{layer}"


def cache_type(new: TensorType, past: DimLike, dtype: np.dtype[np.generic]) -> TensorType:
    """Return the type of a cache of `past` tokens that precede new keys or values `[B, S, K·D]`."""
    return TensorType((new.shape[0], past, *new.shape[2:]), dtype)
