"""The stages a flow is assembled from: frozen dataclasses with `emit(emit, value)`.

Axis letters: B batch, S tokens, H hidden width, F feed-forward width, V vocabulary, N query heads,
K key/value heads, D head width. Weights are `[out, in]`, as checkpoints store them, unless a stage says otherwise.
"""

from rlx_jax.blocks import stream_id as stream_id
from rlx_jax.blocks.attention import AttnMask as AttnMask
from rlx_jax.blocks.attention import SelfAttnPrefill as SelfAttnPrefill
from rlx_jax.blocks.attention import SideOutputs as SideOutputs
from rlx_jax.blocks.compat import FlowCtx as FlowCtx
from rlx_jax.blocks.compat import GemmaDecodeLayer as GemmaDecodeLayer
from rlx_jax.blocks.compat import GemmaDecodeLayerSpec as GemmaDecodeLayerSpec
from rlx_jax.blocks.compat import GemmaKvTap as GemmaKvTap
from rlx_jax.blocks.compat import LlamaDecodeLayer as LlamaDecodeLayer
from rlx_jax.blocks.compat import LlamaDecodeLayerSpec as LlamaDecodeLayerSpec
from rlx_jax.blocks.compat import LlamaDecoderSpec as LlamaDecoderSpec
from rlx_jax.blocks.compat import LlamaKvTap as LlamaKvTap
from rlx_jax.blocks.compat import PluginStage as PluginStage
from rlx_jax.blocks.compat import Qwen3DecodeLayer as Qwen3DecodeLayer
from rlx_jax.blocks.compat import Qwen3DecodeLayerSpec as Qwen3DecodeLayerSpec
from rlx_jax.blocks.compat import Qwen3Decoder as Qwen3Decoder
from rlx_jax.blocks.compat import Qwen3DecoderSpec as Qwen3DecoderSpec
from rlx_jax.blocks.compat import SelfAttnPrefillSpec as SelfAttnPrefillSpec
from rlx_jax.blocks.compat import dual_stream_stage as dual_stream_stage
from rlx_jax.blocks.compat import gemma_attn_spec as gemma_attn_spec
from rlx_jax.blocks.compat import gemma_decode_layer as gemma_decode_layer
from rlx_jax.blocks.compat import gemma_moe_decode_layer_composed as gemma_moe_decode_layer_composed
from rlx_jax.blocks.compat import gemma_moe_prefill_layer_composed as gemma_moe_prefill_layer_composed
from rlx_jax.blocks.compat import gemma_prefill_layer_composed as gemma_prefill_layer_composed
from rlx_jax.blocks.compat import gemma_prefill_layer_kv as gemma_prefill_layer_kv
from rlx_jax.blocks.compat import llama_decode_layer as llama_decode_layer
from rlx_jax.blocks.compat import llama_prefill_layer_composed as llama_prefill_layer_composed
from rlx_jax.blocks.compat import llama_prefill_layer_fused as llama_prefill_layer_fused
from rlx_jax.blocks.compat import plugin as plugin
from rlx_jax.blocks.compat import plugin_named as plugin_named
from rlx_jax.blocks.compat import qwen3_decode_layer_fused as qwen3_decode_layer_fused
from rlx_jax.blocks.compat import qwen3_prefill_layer_composed as qwen3_prefill_layer_composed
from rlx_jax.blocks.compat import qwen3_prefill_layer_fused as qwen3_prefill_layer_fused
from rlx_jax.blocks.compat import qwen3_prefill_layer_fused_kv as qwen3_prefill_layer_fused_kv
from rlx_jax.blocks.composition import Homogeneous as Homogeneous
from rlx_jax.blocks.composition import LayerComposition as LayerComposition
from rlx_jax.blocks.composition import Pair as Pair
from rlx_jax.blocks.composition import Single as Single
from rlx_jax.blocks.contracts import AttentionStage as AttentionStage
from rlx_jax.blocks.contracts import BlockAsLayer as BlockAsLayer
from rlx_jax.blocks.contracts import FfnStage as FfnStage
from rlx_jax.blocks.contracts import KvCacheContract as KvCacheContract
from rlx_jax.blocks.contracts import LayerStage as LayerStage
from rlx_jax.blocks.contracts import NormStage as NormStage
from rlx_jax.blocks.contracts import StageArtifacts as StageArtifacts
from rlx_jax.blocks.contracts import StageContract as StageContract
from rlx_jax.blocks.contracts import emit_attention as emit_attention
from rlx_jax.blocks.contracts import emit_layer as emit_layer
from rlx_jax.blocks.control import BlockStage as BlockStage
from rlx_jax.blocks.control import Custom as Custom
from rlx_jax.blocks.control import Named as Named
from rlx_jax.blocks.control import Repeat as Repeat
from rlx_jax.blocks.control import Sequence as Sequence
from rlx_jax.blocks.control import SideOutput as SideOutput
from rlx_jax.blocks.decode import BindDecodeInputs as BindDecodeInputs
from rlx_jax.blocks.decode import DecodeRopeParams as DecodeRopeParams
from rlx_jax.blocks.decode import SelfAttnDecode as SelfAttnDecode
from rlx_jax.blocks.decoder import LlamaDecoder as LlamaDecoder
from rlx_jax.blocks.decoder import decoder_layer as decoder_layer
from rlx_jax.blocks.encoder import BertEncoderLayer as BertEncoderLayer
from rlx_jax.blocks.encoder import BertEncoderLayerSpec as BertEncoderLayerSpec
from rlx_jax.blocks.ffn import GeGlu as GeGlu
from rlx_jax.blocks.ffn import GeluFfn as GeluFfn
from rlx_jax.blocks.ffn import Mlp as Mlp
from rlx_jax.blocks.ffn import SwiGlu as SwiGlu
from rlx_jax.blocks.flux2 import Flux2BlockSpec as Flux2BlockSpec
from rlx_jax.blocks.flux2 import Flux2Conditioning as Flux2Conditioning
from rlx_jax.blocks.flux2 import Flux2DoubleBlock as Flux2DoubleBlock
from rlx_jax.blocks.flux2 import Flux2JoinStreams as Flux2JoinStreams
from rlx_jax.blocks.flux2 import Flux2Output as Flux2Output
from rlx_jax.blocks.flux2 import Flux2Rope as Flux2Rope
from rlx_jax.blocks.flux2 import Flux2SingleBlock as Flux2SingleBlock
from rlx_jax.blocks.gated_delta import GatedDeltaNet as GatedDeltaNet
from rlx_jax.blocks.gated_delta import GatedDeltaSpec as GatedDeltaSpec
from rlx_jax.blocks.gated_delta import GdnScan as GdnScan
from rlx_jax.blocks.gated_delta import gated_delta_layer as gated_delta_layer
from rlx_jax.blocks.gemma import GemmaStyle as GemmaStyle
from rlx_jax.blocks.gemma import gemma2_layer_mask as gemma2_layer_mask
from rlx_jax.blocks.gemma import gemma_layer_spec as gemma_layer_spec
from rlx_jax.blocks.gemma import gemma_strided_layer_mask as gemma_strided_layer_mask
from rlx_jax.blocks.gpt2 import Gpt2Layer as Gpt2Layer
from rlx_jax.blocks.gpt2 import Gpt2LayerSpec as Gpt2LayerSpec
from rlx_jax.blocks.layer import DecoderKeys as DecoderKeys
from rlx_jax.blocks.layer import LayerNorms as LayerNorms
from rlx_jax.blocks.layer import LayerSpec as LayerSpec
from rlx_jax.blocks.linear import ClsTokenPool as ClsTokenPool
from rlx_jax.blocks.linear import Embed as Embed
from rlx_jax.blocks.linear import EmbedScale as EmbedScale
from rlx_jax.blocks.linear import GatherAdd as GatherAdd
from rlx_jax.blocks.linear import GatherFromInput as GatherFromInput
from rlx_jax.blocks.linear import GatherLastToken as GatherLastToken
from rlx_jax.blocks.linear import Linear as Linear
from rlx_jax.blocks.linear import LmHead as LmHead
from rlx_jax.blocks.linear import LogitSoftcap as LogitSoftcap
from rlx_jax.blocks.linear import Multiply as Multiply
from rlx_jax.blocks.linear import ResidualAdd as ResidualAdd
from rlx_jax.blocks.linear import ResidualSave as ResidualSave
from rlx_jax.blocks.mamba2 import Mamba2Mixer as Mamba2Mixer
from rlx_jax.blocks.mamba2 import Mamba2Spec as Mamba2Spec
from rlx_jax.blocks.mamba2 import mamba2_layer as mamba2_layer
from rlx_jax.blocks.moe import GPT_OSS_KEYS as GPT_OSS_KEYS
from rlx_jax.blocks.moe import MIXTRAL_KEYS as MIXTRAL_KEYS
from rlx_jax.blocks.moe import STACKED_KEYS as STACKED_KEYS
from rlx_jax.blocks.moe import ClampedGate as ClampedGate
from rlx_jax.blocks.moe import ExpertKeys as ExpertKeys
from rlx_jax.blocks.moe import MoeFfn as MoeFfn
from rlx_jax.blocks.moe import MoeSpec as MoeSpec
from rlx_jax.blocks.mtp import MtpMerge as MtpMerge
from rlx_jax.blocks.nomic import NomicEncoderLayer as NomicEncoderLayer
from rlx_jax.blocks.nomic import NomicEncoderLayerSpec as NomicEncoderLayerSpec
from rlx_jax.blocks.nomic import NomicSelector as NomicSelector
from rlx_jax.blocks.nomic import PatchRope as PatchRope
from rlx_jax.blocks.norm import GemmaRmsNorm as GemmaRmsNorm
from rlx_jax.blocks.norm import LayerNorm as LayerNorm
from rlx_jax.blocks.norm import RmsNorm as RmsNorm
from rlx_jax.blocks.norm import ZeroBeta as ZeroBeta
from rlx_jax.blocks.positions import LearnedPositions as LearnedPositions
from rlx_jax.blocks.positions import RelativeBias as RelativeBias
from rlx_jax.blocks.recurrent import CausalWindow as CausalWindow
from rlx_jax.blocks.recurrent import Recurrent as Recurrent
from rlx_jax.blocks.rope import RopeTables as RopeTables
from rlx_jax.blocks.self_attention import Activation as Activation
from rlx_jax.blocks.self_attention import SelfAttention as SelfAttention
from rlx_jax.blocks.streams import DualStream as DualStream
from rlx_jax.blocks.streams import LoadStream as LoadStream
from rlx_jax.blocks.streams import StoreStream as StoreStream
from rlx_jax.blocks.streams import bind_inputs_to_streams as bind_inputs_to_streams
from rlx_jax.blocks.vision import AttentionPool as AttentionPool
from rlx_jax.blocks.vision import EndTokenPool as EndTokenPool
from rlx_jax.blocks.vision import LayerKeys as LayerKeys
from rlx_jax.blocks.vision import LayerScale as LayerScale
from rlx_jax.blocks.vision import PreNormLayerSpec as PreNormLayerSpec
from rlx_jax.blocks.vision import Similarity as Similarity
from rlx_jax.blocks.vision import VisionEmbed as VisionEmbed
from rlx_jax.blocks.vision import VisionSwiGluFfn as VisionSwiGluFfn
from rlx_jax.blocks.vision import VitSelfAttn as VitSelfAttn
from rlx_jax.blocks.vision import VitSelfAttnSpec as VitSelfAttnSpec
from rlx_jax.blocks.vision import dinov2_layer_fused as dinov2_layer_fused
from rlx_jax.blocks.vision import nomic_vision_layer_fused as nomic_vision_layer_fused
from rlx_jax.blocks.vision import pre_norm_layer as pre_norm_layer
from rlx_jax.blocks.vision import siglip_layer_fused_with_prefix as siglip_layer_fused_with_prefix
from rlx_jax.ir.hir import CausalConv as CausalConv
from rlx_jax.ir.hir import GatedDelta as GatedDelta
from rlx_jax.ir.hir import MaskKind as MaskKind
from rlx_jax.ir.hir import Qwen35MtpHead as Qwen35MtpHead
from rlx_jax.ir.hir import SelectiveScan as SelectiveScan
from rlx_jax.ir.hir import TimeSteps as TimeSteps
from rlx_jax.trace.flow_state import DecodeBindings as DecodeBindings
from rlx_jax.trace.flow_state import FlowState as FlowState
from rlx_jax.trace.flow_state import GdnInputSlots as GdnInputSlots
from rlx_jax.trace.frequencies import Frequencies as Frequencies
from rlx_jax.trace.frequencies import axial_frequencies as axial_frequencies
from rlx_jax.trace.frequencies import frequencies as frequencies
from rlx_jax.trace.frequencies import linear_scaling as linear_scaling
from rlx_jax.trace.frequencies import llama3_scaling as llama3_scaling
from rlx_jax.trace.frequencies import yarn_factor as yarn_factor
from rlx_jax.trace.frequencies import yarn_scaling as yarn_scaling
from rlx_jax.trace.weight_part import WeightPart as WeightPart
from rlx_jax.trace.weight_part import WeightStack as WeightStack

# The first name of LayerSpec.
DecoderLayerSpec = LayerSpec

# Every stage.
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
    | CausalWindow | MtpMerge | BlockAsLayer | Multiply
)  # fmt: skip
