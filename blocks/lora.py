"""LoRA's two small products beside a stored one, as a wrapper of its block: see `rlx_jax.models.lora`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax

from rlx_jax.errors import GraphError, MissingWeightError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Param
from rlx_jax.ir.param import Conflict, Parts, stored_keys
from rlx_jax.trace.editing import Inner
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightPart, part_read

# Uniform within ±1/√in, as PEFT draws A; B is zeros, so that a new adapter changes nothing.
A_INIT = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2)


@dataclass(frozen=True)
class Adapter:
    """One product with an adapter: the key of its weight and how that is stored, s, and what PEFT calls its module."""

    key: str
    contract: int
    scale: float
    module: str

    @property
    def a(self) -> str:
        return f"{self.key.removesuffix('.weight')}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{self.key.removesuffix('.weight')}.lora_B.weight"


@dataclass(frozen=True)
class ModuleNames:
    """What PEFT calls modules: the checkpoint's keys, which begin with `stored` there and with `outer` in its model,
    where the one is bare and the other has a head, `transformer.h.0.attn.c_attn`."""

    stored: str = ""
    outer: str = ""
    renamed: tuple[tuple[str, str], ...] = ()  # as stored, and as the model calls it; {} is the number of a layer

    def of(self, key: str) -> str:
        """The module of a weight."""
        name = key.removesuffix(".weight").removeprefix(self.stored)
        return other_name(name if name.startswith(self.outer) else self.outer + name, self.renamed)


def other_name(module: str, names: Iterable[tuple[str, str]]) -> str:
    """What a module is called by the first pair of templates whose first is its name, or the end of it.

    >>> other_name("vit.encoder.layer.3.output.dense", [("encoder.layer.{}.output.dense", "layers.{}.mlp.fc2")])
    'vit.layers.3.mlp.fc2'
    """
    for of, to in names:
        first, last = map(re.escape, of.split("{}"))
        if found := re.fullmatch(rf"((?:.*\.)?){first}(\d+){last}", module):
            return found[1] + to.format(found[2])
    return module


@dataclass(frozen=True)
class LoraLinear:
    """What stands in the place of a product: it, and an adapter of this rank beside it."""

    rank: int
    scale: float
    names: ModuleNames = ModuleNames()

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        return self.write(emit, x, inner)[0]

    def write(self, emit: Emit, x: FlowValue | None, inner: Inner) -> tuple[FlowValue, Adapter]:
        """Its value, and what it is."""
        start = len(emit.builder.nodes)
        y = inner(emit.require(x, "lora"))
        number, adapter, shape, part = self._product(emit, start)
        product = emit.builder.nodes[number]
        op = product.op
        assert isinstance(op, hir.Linear)
        if emit.own(y).node != number:
            raise GraphError(f"{emit.path}: lora changes a block that is one product, and this has more behind it")
        turn = 1 if op.contract else -1
        # Of an axis that is several, which a pass takes apart in W alone, A and B have no role.
        roles = emit.parameters.roles.get(adapter.key, (None, None))[::turn]
        of_out, of_in = (None if isinstance(role, Parts | Conflict) else role for role in roles)
        out, wide = shape[::turn]
        rows = adapter.b if part is None else replace(part, key=adapter.b, axis=0)
        try:
            a = emit.param(adapter.a, (self.rank, wide), (None, of_in), A_INIT)
            b = emit.param(rows, (out, self.rank), (of_out, None), "zeros")
        except MissingWeightError as error:
            raise MissingWeightError(
                f"{emit.path}: lora: the weights {quote(adapter.a)} and lora_B of a new adapter are in no checkpoint: "
                "missing='init' draws them, compile(…, missing='init', key=0); lora(…, adapter=path) loads one"
            ) from error
        with emit.scope("lora_A"):  # of what W reads, which an edit of the block may have changed
            low = emit.linear(emit.wrap(product.inputs[0]), a, transpose=True)
        with emit.scope("lora_B"):
            y = y + emit.linear(low, b, transpose=True) * self.scale
        return y, adapter

    def _product(self, emit: Emit, start: int) -> tuple[int, Adapter, tuple[int, ...], WeightPart | None]:
        """The number of the one product of the block, its adapter, the shape of its weight, and which part of a stored
        one that is, such as the queries' of queries, keys and values."""
        nodes = emit.builder.nodes
        numbers = [n for n in range(start, len(nodes)) if isinstance(nodes[n].op, hir.Linear)]
        weights = [nodes[nodes[n].inputs[1].node].op for n in numbers]
        stored = [(op, k) for op in weights if isinstance(op, Param) for k in stored_keys(op.programs[0])]
        if any(k.key.endswith(".lora_A.weight") for _, k in stored):
            raise GraphError(
                f"{emit.path}: this product has an adapter already, and several of one product are not built: "
                "merge the first, rlx_jax.merge_lora"
            )
        if len(numbers) != 1 or len(stored) != 1:
            raise GraphError(
                f"{emit.path}: lora changes a block that is one product with one stored weight, and this has "
                f"{len(numbers)} products: select such as 'layers.*.self_attn.{{q,v}}_proj'"
            )
        (number,), ((weight, key),) = numbers, stored
        op, part = nodes[number].op, part_read(weight.programs[0])
        assert isinstance(op, hir.Linear)
        whole = key.type.shape == weight.type.shape or (part is not None and part.axis == 1 - op.contract)
        if not whole or not key.key.endswith(".weight"):
            raise GraphError(
                f"{emit.path}: lora changes a product with a weight '….weight', the whole of it or one of parts "
                f"that stand side by side, and this has another part of {quote(key.key)} or one of another name"
            )
        return (
            number,
            Adapter(key.key, op.contract, self.scale, self.names.of(key.key)),
            tuple(map(int, weight.type.shape)),
            part,
        )
