"""LoRA's two small products beside a stored one, as a wrapper of its block: see `rlx_jax.models.lora`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from rlx_jax.errors import GraphError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Param
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.param import Parts
from rlx_jax.ir.param_keys import stored_keys
from rlx_jax.trace.editing import Inner
from rlx_jax.trace.emit import Emit, FlowValue

A_INIT = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2)
"""Uniform within ±1/√in, as PEFT draws A; B is zeros, so that a new adapter changes nothing."""


@dataclass(frozen=True)
class Adapter:
    """One product with an adapter: the key of its weight and how that is stored, and s."""

    key: str
    contract: int
    scale: float

    @property
    def module(self) -> str:
        """What PEFT calls it."""
        return self.key.removesuffix(".weight")

    @property
    def a(self) -> str:
        return f"{self.module}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{self.module}.lora_B.weight"


@dataclass(frozen=True)
class LoraLinear:
    """What stands in the place of a product: it, and an adapter of this rank beside it."""

    rank: int
    scale: float

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        return self.write(emit, x, inner)[0]

    def write(self, emit: Emit, x: FlowValue | None, inner: Inner) -> tuple[FlowValue, Adapter]:
        """Its value, and what it is."""
        start = len(emit.builder.nodes)
        x, y = emit.require(x, "lora"), inner(x)
        number, adapter, shape = self._product(emit, start)
        product = emit.builder.nodes[number]
        op = product.op
        assert isinstance(op, hir.Linear)
        if emit.own(y).node != number:
            raise GraphError(f"{emit.path}: lora changes a block that is one product, and this has more behind it")
        if op.activation:  # what is added stands before it
            y = emit.add_node(replace(op, activation=""), *map(emit.wrap, product.inputs))
        turn = 1 if op.contract else -1
        # Of an axis that is several, which a pass takes apart in W alone, A and B have no role.
        of_out, of_in = (None if isinstance(r, Parts) else r for r in emit.roles.get(adapter.key, (None, None))[::turn])
        out, wide = shape[::turn]
        a = emit.param(adapter.a, (self.rank, wide), (None, of_in), A_INIT)
        b = emit.param(adapter.b, (out, self.rank), (of_out, None), "zeros")
        with emit.scope("lora_A"):
            low = emit.linear(x, a, transpose=True)
        with emit.scope("lora_B"):
            y = y + emit.linear(low, b, transpose=True) * self.scale
        return emit.add_node(Unary(op.activation), y) if op.activation else y, adapter

    def _product(self, emit: Emit, start: int) -> tuple[int, Adapter, tuple[int, ...]]:
        """The number of the one product of the block, its adapter, and the shape of its weight as stored."""
        nodes = emit.builder.nodes
        numbers = [n for n in range(start, len(nodes)) if isinstance(nodes[n].op, hir.Linear)]
        weights = [nodes[nodes[n].inputs[1].node].op for n in numbers]
        stored = [(op, k) for op in weights if isinstance(op, Param) for k in stored_keys(op.programs[0])]
        if len(numbers) != 1 or len(stored) != 1:
            raise GraphError(
                f"{emit.path}: lora changes a block that is one product with one stored weight, and this has "
                f"{len(numbers)} products: select such as 'layers.*.self_attn.{{q,v}}_proj'"
            )
        (number,), ((weight, key),) = numbers, stored
        if key.type.shape != weight.type.shape or not key.key.endswith(".weight"):
            raise GraphError(
                f"{emit.path}: lora changes a product with the whole of a weight '….weight', and this has a part of "
                f"{quote(key.key)} or one of another name"
            )
        op = nodes[number].op
        assert isinstance(op, hir.Linear)
        return number, Adapter(key.key, op.contract, self.scale), tuple(map(int, key.type.shape))
