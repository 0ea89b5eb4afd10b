"""Stages, the building blocks of a flow: frozen dataclasses with a method `emit(emit, value)`.

Axis letters: B batch, S tokens, H hidden width, F feed-forward width, V vocabulary, N query heads,
K key/value heads, D head width. Weights are `[out, in]`, as checkpoints store them, unless a stage says otherwise.
"""

from rlx_jax.blocks import stream_id as stream_id
from rlx_jax.blocks.attention import *
from rlx_jax.blocks.compat import *
from rlx_jax.blocks.composition import *
from rlx_jax.blocks.control import *
from rlx_jax.blocks.decoder import *
from rlx_jax.blocks.encoder import *
from rlx_jax.blocks.ffn import *
from rlx_jax.blocks.flux2 import *
from rlx_jax.blocks.layer import *
from rlx_jax.blocks.linear import *
from rlx_jax.blocks.pooling import *
from rlx_jax.blocks.positions import *
from rlx_jax.blocks.recurrent import *
from rlx_jax.blocks.self_attention import *
from rlx_jax.blocks.vision import *
from rlx_jax.ir.hir import CausalConv as CausalConv
from rlx_jax.ir.hir import GatedDelta as GatedDelta
from rlx_jax.ir.hir import MaskKind as MaskKind
from rlx_jax.ir.hir import Qwen35MtpHead as Qwen35MtpHead
from rlx_jax.ir.hir import SelectiveScan as SelectiveScan
from rlx_jax.ir.hir import TimeSteps as TimeSteps
from rlx_jax.trace.flow_value import DecodeBindings as DecodeBindings
from rlx_jax.trace.flow_value import FlowState as FlowState
from rlx_jax.trace.flow_value import GdnInputSlots as GdnInputSlots
from rlx_jax.trace.frequencies import *
from rlx_jax.trace.parameters import WeightPart as WeightPart
from rlx_jax.trace.parameters import WeightStack as WeightStack

# Alias: the original name of LayerSpec.
DecoderLayerSpec = LayerSpec

# Union of all stages, for annotations.
FlowStage = (
    Embed | RopeTables | ZeroBeta | AttnMask | LlamaDecoder | Repeat | Named | Sequence | RmsNorm
    | GatherLastToken | LmHead | Linear | ResidualSave | ResidualAdd | SwiGlu | SelfAttnPrefill | SelfAttention | Custom
    | BertEncoderLayer | ClsTokenPool | LayerNorm | GeluFfn | GatherFromInput | GatherAdd | Activation
    | StoreStream | LoadStream | DualStream | Qwen3Decoder | EmbedScale | GemmaRmsNorm | LogitSoftcap | GeGlu
    | BindDecodeInputs | DecodeRopeParams | SelfAttnDecode | LlamaDecodeLayer | LlamaKvTap | Qwen3DecodeLayer
    | GemmaDecodeLayer | GemmaKvTap | LearnedPositions | Gpt2Layer | RelativeBias | NomicEncoderLayer
    | Flux2Conditioning | Flux2Rope | Flux2DoubleBlock | Flux2SingleBlock | Flux2JoinStreams | Flux2Output
    | SideOutput | Mlp | VisionEmbed | VitSelfAttn | LayerScale | VisionSwiGluFfn | AttentionPool | EndTokenPool
    | Similarity | PatchRope | NomicSelector | GatedDeltaNet | GdnScan | Mamba2Mixer | MoeFfn | Recurrent
    | CausalWindow | MtpMerge | BlockAsLayer | Multiply | EncoderLayer | DistanceEmbeddings | MeanOfTokens
    | NaflexEmbed
)  # fmt: skip
