"""LoRA adapters: a wrapper of a block that adds two low-rank products to its linear projection.

The interface for users is `rlx_jax.models.lora`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, MissingWeightError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Param
from rlx_jax.ir.param import Conflict, Parts, stored_keys
from rlx_jax.trace.editing import Inner
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightPart, find_weight_part

# PEFT's initializer of A: uniform within ±1/√in. B is zeros, so that a new adapter leaves the model unchanged.
A_INIT = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2)

# The end of the key of a matrix A.
A_SUFFIX = ".lora_A.weight"
# The scopes of the two products of an adapter, in the block that it changes.
SCOPES = frozenset(("lora_A", "lora_B"))


@dataclass(frozen=True)
class Adapter:
    """One linear projection with an adapter.

    Args:
        key: key of the projection's weight W.
        contract: axis of W that the projection contracts: 1 if W is stored as `[out, in]`, 0 if `[in, out]`.
        scale: factor of the adapter's product.
        module: PEFT's name of the module.
    """

    key: str
    contract: int
    scale: float
    module: str

    @property
    def a(self) -> str:
        """Key of the matrix A, `[rank, in]`."""
        return self.key.removesuffix(".weight") + A_SUFFIX

    @property
    def b(self) -> str:
        """Key of the matrix B, `[out, rank]`."""
        return f"{self.key.removesuffix('.weight')}.lora_B.weight"


def has_adapters(keys: Iterable[str]) -> bool:
    """Return whether checkpoint keys include those of LoRA adapters."""
    return any(key.endswith(A_SUFFIX) for key in keys)


@dataclass(frozen=True)
class ModuleNames:
    """Mapping from keys of a checkpoint to PEFT's names of modules.

    A checkpoint of a bare model has no prefix for the model that has a head, such as `transformer.` in
    `transformer.h.0.attn.c_attn`, so the prefixes may differ.

    Args:
        stored: prefix of the checkpoint's keys, which is removed.
        outer: prefix of the module names in PEFT's model, which is added unless it is there.
        renamed: pairs (name in the checkpoint, name in the model); `{}` is the number of a layer.
    """

    stored: str = ""
    outer: str = ""
    renamed: tuple[tuple[str, str], ...] = ()

    def of(self, key: str) -> str:
        """Return PEFT's name of the module that owns the weight `key`."""
        name = key.removesuffix(".weight").removeprefix(self.stored)
        return rename_module(name if name.startswith(self.outer) else self.outer + name, self.renamed)


def rename_module(module: str, names: Iterable[tuple[str, str]]) -> str:
    """Return the new name of a module, by the first pair of templates that matches the end of its name.

    A module that no template matches keeps its name.

    >>> rename_module("vit.encoder.layer.3.output.dense", [("encoder.layer.{}.output.dense", "layers.{}.mlp.fc2")])
    'vit.layers.3.mlp.fc2'
    """
    for old_template, new_template in names:
        template_head, template_tail = map(re.escape, old_template.split("{}"))
        if match := re.fullmatch(rf"((?:.*\.)?){template_head}(\d+){template_tail}", module):
            return match[1] + new_template.format(match[2])
    return module


@dataclass(frozen=True)
class LoraLinear:
    """Replacement of a block: its linear projection plus an adapter, `x W + scale · (x Aᵀ) Bᵀ`.

    Args:
        rank: rank of A and B.
        scale: factor of the adapter's product.
        names: PEFT's names of modules.
    """

    rank: int
    scale: float
    names: ModuleNames = ModuleNames()

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        return self.write(emit, x, inner)[0]

    def write(self, emit: Emit, x: FlowValue | None, inner: Inner) -> tuple[FlowValue, Adapter]:
        """Write the block with its adapter; return its value and the adapter.

        Raises:
            GraphError: the block is not one projection with one stored weight, or it has an adapter already.
            MissingWeightError: no source has the weights of the adapter.
        """
        start = len(emit.builder.nodes)
        y = inner(emit.require(x, "lora"))
        number, adapter, shape, part = self._product(emit, start)
        product = emit.builder.nodes[number]
        op = product.op
        assert isinstance(op, hir.Linear)
        # A later node of the block, such as a bias, would not see the adapter's product.
        if emit.unwrap(y).node != number:
            raise GraphError(f"{emit.path}: lora changes a block that is one product; this one has ops after it")
        axis_order = 1 if op.contract else -1
        # A pass splits an axis with several roles (fused q, k and v) in W only, so A and B get no role there.
        roles = emit.parameters.roles.get(adapter.key, (None, None))[::axis_order]
        out_role, in_role = (None if isinstance(role, Parts | Conflict) else role for role in roles)
        out_features, in_features = shape[::axis_order]
        rows = adapter.b if part is None else replace(part, key=adapter.b, axis=0)
        try:
            a = emit.param(adapter.a, (self.rank, in_features), (None, in_role), A_INIT)
            b = emit.param(rows, (out_features, self.rank), (out_role, None), "zeros")
        except MissingWeightError as error:
            raise MissingWeightError(
                f"{emit.path}: lora: the weights {quote(adapter.a)} and lora_B of a new adapter are missing: "
                "initialize them by compile(…, missing='init', key=0), or load them by lora(…, adapter=path)"
            ) from error
        with emit.scope("lora_A"):  # A reads the input of W, which may differ from x in an edited block
            low_rank = emit.linear(emit.wrap(product.inputs[0]), a, transpose=True)
        with emit.scope("lora_B"):
            y = y + emit.linear(low_rank, b, transpose=True) * self.scale
        return y, adapter

    def _product(self, emit: Emit, start: int) -> tuple[int, Adapter, tuple[int, ...], WeightPart | None]:
        """Find the one projection of the block.

        Args:
            start: index of the block's first node.

        Returns:
            The index of the projection's node, its adapter, the shape of its weight, and the part of the stored tensor
            that the weight is (such as q in a fused qkv), or None for the full tensor.

        Raises:
            GraphError: the block has an adapter already, or it is not one projection with one stored weight.
        """
        nodes = emit.builder.nodes
        numbers = [n for n in range(start, len(nodes)) if isinstance(nodes[n].op, hir.Linear)]
        weights = [nodes[nodes[n].inputs[1].node].op for n in numbers]
        stored_weights = [(op, k) for op in weights if isinstance(op, Param) for k in stored_keys(op.programs[0])]
        if has_adapters(k.key for _, k in stored_weights):
            raise GraphError(
                f"{emit.path}: this product has an adapter already, and several adapters are not supported: "
                "merge the first by rlx_jax.merge_lora"
            )
        if len(numbers) != 1 or len(stored_weights) != 1:
            raise GraphError(
                f"{emit.path}: lora changes a block that is one product with one stored weight, but this block "
                f"has {len(numbers)} products: select for example 'layers.*.self_attn.{{q,v}}_proj'"
            )
        (number,), ((weight, key),) = numbers, stored_weights
        op, part = nodes[number].op, find_weight_part(weight.programs[0])
        assert isinstance(op, hir.Linear)
        has_all_inputs = key.type.shape == weight.type.shape or (part is not None and part.axis == 1 - op.contract)
        if not has_all_inputs or not key.key.endswith(".weight"):
            raise GraphError(
                f"{emit.path}: lora changes a product with a full weight '….weight' or one of its consecutive parts "
                f"of output features, but {quote(key.key)} is another part or has another name"
            )
        adapter = Adapter(key.key, op.contract, self.scale, self.names.of(key.key))
        return number, adapter, tuple(map(int, weight.type.shape)), part
