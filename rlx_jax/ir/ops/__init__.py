"""MIR: tensor ops, each defined once. `eval` is the meaning, and the shape rule unless `infer` is written."""

from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.attention import AttentionOp, CacheUpdate, Overwrite, RingStep, RopeOp, RopeTable, SinusoidTable
from rlx_jax.ir.ops.control import CustomVjp, PairBias, Scan, Switch, While
from rlx_jax.ir.ops.conv import Conv, ConvTranspose
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.cut import CutAxis
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.fused import (
    ElementwiseRegion,
    FusedMatMulBiasAct,
    FusedResidualLayerNorm,
    FusedResidualRmsNorm,
    FusedSwiGLU,
)
from rlx_jax.ir.ops.fused_layers import FusedAttentionBlock, FusedTransformerLayer
from rlx_jax.ir.ops.index import Gather, GatherNd, Iota, Scatter, ScatterNd, Take, TakeAlongAxis, TakeRow
from rlx_jax.ir.ops.linalg import BatchMatMul, Einsum, MatMul
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp, Standardize
from rlx_jax.ir.ops.order import ArgReduce, Sort, TopK
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, FullLike, Parametric, Unary, Where
from rlx_jax.ir.ops.pool import Pool
from rlx_jax.ir.ops.quantize import FakeQuantize
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.ops.reduce import Cumsum, Cumulative, LogSoftmax, Reduce, Softmax
from rlx_jax.ir.ops.relative import RelativeBuckets
from rlx_jax.ir.ops.resize import GridSample, Resize
from rlx_jax.ir.ops.sample import Sample
from rlx_jax.ir.ops.shape import (
    Concat,
    Expand,
    Narrow,
    Pad,
    RepeatHeads,
    Reshape,
    Shard,
    Slice,
    SplitLast,
    Tile,
    Transpose,
)
from rlx_jax.ir.ops.systems import Det, Fft, Solve
from rlx_jax.ir.ops.token_scan import TokenScan
from rlx_jax.ir.ops.vision import GridPositions, Patches
from rlx_jax.ir.ops.windows import TailRows, TokenWindows

OPS: tuple[type[Mir], ...] = (
    Unary, Parametric, Binary, Compare, Where, CastTo, FullLike,
    MatMul, BatchMatMul, Einsum, RmsNormOp, LayerNormOp, Standardize,
    Reduce, Softmax, LogSoftmax, Cumsum, Cumulative, ArgReduce, Sort, TopK,
    Reshape, Transpose, Narrow, SplitLast, Slice, CutAxis, Expand, Concat, RepeatHeads, Shard, Pad, Tile,
    Switch, While, Scan, CustomVjp, PairBias, TokenScan, TokenWindows, TailRows,
    Conv, ConvTranspose, Pool, Resize, GridSample, FakeQuantize, Sample,
    Fft, Solve, Det,
    Gather, TakeRow, Iota, Take, TakeAlongAxis, GatherNd, Scatter, ScatterNd, RelativeBuckets,
    AttentionOp, RopeTable, SinusoidTable, RopeOp, CacheUpdate, RingStep, Overwrite,
    GatedDeltaOp, SelectiveScanOp, CausalConvOp,
    FusedMatMulBiasAct, FusedSwiGLU, FusedResidualLayerNorm, FusedResidualRmsNorm, ElementwiseRegion,
    FusedAttentionBlock, FusedTransformerLayer, ExpertFfn, Patches, GridPositions, JaxFn,
)  # fmt: skip
"""Every tensor op. A new one is a class in a file of this folder, and a name here."""
