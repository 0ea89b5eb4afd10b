"""This module has the functions of the specification (IR 5.1 and 13) that are methods of `GraphModule` here,
and its names of policies and dtypes.
"""

from __future__ import annotations

from enum import StrEnum

from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import GraphStage


class FusionPolicy(StrEnum):
    """How blocks become tensor ops: the names that `with_fusion_policy` and profiles take."""

    DIRECT = "direct"
    FUSABLE = "fusable"

    @staticmethod
    def for_autodiff() -> FusionPolicy:
        """Return `FUSABLE`, which expands every block into a chain of tensor ops."""
        return FusionPolicy.FUSABLE


# The element types of the specification (IR 2), such as `DType.F32`: names in lower case that every `dtype=` takes.
DType = StrEnum("DType", "BOOL U8 I8 I16 BF16 F16 U32 I32 I64 F32 F64 C64")


def _at(module: GraphModule, stage: GraphStage) -> GraphModule:
    """Return the module, checked to be at a stage."""
    if not isinstance(module, GraphModule) or module.stage != stage:
        raise GraphError(f"expected a GraphModule at {stage}, got {getattr(module, 'stage', type(module).__name__)}")
    return module


def hir_to_json(module: GraphModule) -> str:
    """Return `module.to_json()` of a module at HIR."""
    return _at(module, GraphStage.HIR).to_json()


def hir_from_json(text: str | bytes) -> GraphModule:
    """Return `GraphModule.from_json(text)`, checked to be at HIR."""
    return _at(GraphModule.from_json(text), GraphStage.HIR)


def lir_to_json(module: GraphModule) -> str:
    """Return `module.to_json()` of a module at LIR."""
    return _at(module, GraphStage.LIR).to_json()


def lir_from_json(text: str | bytes) -> GraphModule:
    """Return `GraphModule.from_json(text)`, checked to be at LIR."""
    return _at(GraphModule.from_json(text), GraphStage.LIR)
