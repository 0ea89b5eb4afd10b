"""MIR: tensor ops, each defined once. `eval` is the meaning, and the shape rule unless `infer` is written."""

from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, RingStep, RopeOp, RopeTable
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.cut import CutAxis
from rlx_jax.ir.ops.fused import (
    ElementwiseRegion,
    FusedMatMulBiasAct,
    FusedResidualLayerNorm,
    FusedResidualRmsNorm,
    FusedSwiGLU,
)
from rlx_jax.ir.ops.fused_layers import FusedAttentionBlock, FusedTransformerLayer
from rlx_jax.ir.ops.index import Gather, Iota, TakeRow
from rlx_jax.ir.ops.linalg import BatchMatMul, MatMul
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, FullLike, Unary, Where
from rlx_jax.ir.ops.reduce import Cumsum, Reduce, Softmax
from rlx_jax.ir.ops.shape import Concat, Expand, Narrow, RepeatHeads, Reshape, Shard, Slice, SplitLast, Transpose

OPS: tuple[type[Mir], ...] = (
    Unary, Binary, Compare, Where, CastTo, FullLike,
    MatMul, BatchMatMul, RmsNormOp, LayerNormOp, Reduce, Softmax, Cumsum,
    Reshape, Transpose, Narrow, SplitLast, Slice, CutAxis, Expand, Concat, RepeatHeads, Shard, Gather, TakeRow, Iota,
    AttentionOp, RopeTable, RopeOp, CacheUpdate, RingStep,
    FusedMatMulBiasAct, FusedSwiGLU, FusedResidualLayerNorm, FusedResidualRmsNorm, ElementwiseRegion,
    FusedAttentionBlock, FusedTransformerLayer, JaxFn,
)  # fmt: skip
"""Every tensor op. A new one is a class in a file of this folder, and a name here."""
