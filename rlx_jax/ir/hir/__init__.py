"""HIR: the blocks that stages write. `expand` is a block's meaning, its shape rule and its `fusable` lowering.

Whatever depends on the sequence is one of these blocks, so that `derive` has one rule for each.
"""

from rlx_jax.ir.graph import Hir
from rlx_jax.ir.hir.cached import CachedAttention as CachedAttention
from rlx_jax.ir.hir.cached import GrowingAttention as GrowingAttention
from rlx_jax.ir.hir.cached import cache_slots as cache_slots
from rlx_jax.ir.hir.composites import DECODER_BIASES as DECODER_BIASES
from rlx_jax.ir.hir.composites import DECODER_OPERANDS as DECODER_OPERANDS
from rlx_jax.ir.hir.composites import MTP_OPERANDS as MTP_OPERANDS
from rlx_jax.ir.hir.composites import PROJECTIONS as PROJECTIONS
from rlx_jax.ir.hir.composites import LinearFused as LinearFused
from rlx_jax.ir.hir.composites import LlamaDecoderBlock as LlamaDecoderBlock
from rlx_jax.ir.hir.composites import Qwen35MtpHead as Qwen35MtpHead
from rlx_jax.ir.hir.composites import ResidualRmsNorm as ResidualRmsNorm
from rlx_jax.ir.hir.composites import SharedLinearPair as SharedLinearPair
from rlx_jax.ir.hir.composites import SwiGLU as SwiGLU
from rlx_jax.ir.hir.composites import write_attention as write_attention
from rlx_jax.ir.hir.composites import write_gated_ffn as write_gated_ffn
from rlx_jax.ir.hir.composites import write_layer as write_layer
from rlx_jax.ir.hir.experts import Experts as Experts
from rlx_jax.ir.hir.experts import Route as Route
from rlx_jax.ir.hir.masks import MASK_KINDS as MASK_KINDS
from rlx_jax.ir.hir.masks import MaskKind as MaskKind
from rlx_jax.ir.hir.masks import check_arity as check_arity
from rlx_jax.ir.hir.masks import mask_kind as mask_kind
from rlx_jax.ir.hir.recurrent import BlockRun as BlockRun
from rlx_jax.ir.hir.recurrent import Carried as Carried
from rlx_jax.ir.hir.recurrent import CarriesState as CarriesState
from rlx_jax.ir.hir.recurrent import CausalWindow as CausalWindow
from rlx_jax.ir.hir.recurrent import Recurrent as Recurrent
from rlx_jax.ir.hir.recurrent import StateSlot as StateSlot
from rlx_jax.ir.hir.recurrent import initial_value as initial_value
from rlx_jax.ir.hir.sequence import Attention as Attention
from rlx_jax.ir.hir.sequence import CountedPositions as CountedPositions
from rlx_jax.ir.hir.sequence import EndToken as EndToken
from rlx_jax.ir.hir.sequence import FirstToken as FirstToken
from rlx_jax.ir.hir.sequence import LastToken as LastToken
from rlx_jax.ir.hir.sequence import Positions as Positions
from rlx_jax.ir.hir.sequence import RelativeBias as RelativeBias
from rlx_jax.ir.hir.sequence import Rope as Rope
from rlx_jax.ir.hir.sequence import RopeAngles as RopeAngles
from rlx_jax.ir.hir.sequence import RopeRows as RopeRows
from rlx_jax.ir.hir.sequence import Sinusoids as Sinusoids
from rlx_jax.ir.hir.sequence import attention as attention
from rlx_jax.ir.hir.state_space import CausalConv as CausalConv
from rlx_jax.ir.hir.state_space import GatedDelta as GatedDelta
from rlx_jax.ir.hir.state_space import SelectiveScan as SelectiveScan
from rlx_jax.ir.hir.state_space import TimeSteps as TimeSteps
from rlx_jax.ir.hir.token_wise import Embed as Embed
from rlx_jax.ir.hir.token_wise import GatedFfn as GatedFfn
from rlx_jax.ir.hir.token_wise import LayerNorm as LayerNorm
from rlx_jax.ir.hir.token_wise import Linear as Linear
from rlx_jax.ir.hir.token_wise import RmsNorm as RmsNorm
from rlx_jax.ir.hir.token_wise import Split as Split

BLOCKS: tuple[type[Hir], ...] = (
    Linear, Split, GatedFfn, RmsNorm, LayerNorm, Embed, Positions, RopeAngles, RopeRows, Rope, Attention,
    CachedAttention, GrowingAttention, LastToken, FirstToken, EndToken, LlamaDecoderBlock,
    LinearFused, SharedLinearPair, SwiGLU, ResidualRmsNorm, CountedPositions, RelativeBias, Sinusoids,
    Carried, CausalWindow, Recurrent, CausalConv, GatedDelta, SelectiveScan, TimeSteps, Qwen35MtpHead, Route, Experts,
)  # fmt: skip
"""Every block."""
