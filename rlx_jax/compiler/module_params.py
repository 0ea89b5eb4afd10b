"""The declaration of a parameter in a `GraphModule`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_jax.errors import GraphError, quote, shown
from rlx_jax.ir.graph import Node, Param
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.param import Dequantized, Key, cast
from rlx_jax.ir.param_keys import key_kinds
from rlx_jax.ir.reading import as_stored
from rlx_jax.ir.types import device_dtype, tensor_type
from rlx_jax.trace.checks import items_of


def declared_param(
    module: str, nodes: Sequence[Node], name: str, shape: Sequence[int], dtype: Any, packed: str | None
) -> Param:
    """The leaf of a parameter beside the `nodes` that `module` has; see `GraphModule.param`."""
    if not isinstance(name, str):
        raise GraphError(f"{module}: a weight key is a string, got {shown(name)}")
    where = f"{module}: parameter {quote(name)}"
    sizes = items_of(shape, where, "a list of sizes")
    if packed is None:
        stored: Key | Dequantized = Key(name, tensor_type(sizes, dtype, where))
    else:
        stored = as_stored(name, PackedSpec(sizes, dtype, packed), where)
    declared = dict(key_kinds(stored))[name]
    for node in nodes:
        for key, kind in key_kinds(node.op.programs[0]) if isinstance(node.op, Param) else ():
            if key == name and kind != declared:
                raise GraphError(f"{where} is {kind} and {declared}")
    program = cast(stored, device_dtype(stored.type.dtype))
    return Param((program,), type=program.type)
