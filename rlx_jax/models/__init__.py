"""Recipes make a flow from a checkpoint's config. Each family has a file; each recipe is also a name of `rlx_jax`."""

from rlx_jax.models.bert import (
    BertFlow,
    Data2VecTextFlow,
    DistilBertFlow,
    EuroBertFlow,
    JinaV3Flow,
    MPNetFlow,
    RobertaFlow,
    RobertaPreLayerNormFlow,
    XlmRobertaXlFlow,
)
from rlx_jax.models.bert_variants import (
    AlbertFlow,
    BigBirdFlow,
    ElectraFlow,
    ErnieFlow,
    EsmFlow,
    GteFlow,
    IBertFlow,
    MegatronBertFlow,
    RemBertFlow,
    RoFormerFlow,
)
from rlx_jax.models.deberta import DebertaFlow, DebertaV2Flow
from rlx_jax.models.dual import ClipFlow, ClipTextFlow
from rlx_jax.models.flux2 import Flux2Flow
from rlx_jax.models.gemma import GemmaFlow
from rlx_jax.models.gpt2 import Gpt2Flow
from rlx_jax.models.llama import Llama32Flow, MistralFlow, Qwen2Flow, Qwen3Flow
from rlx_jax.models.mamba2 import Mamba2Flow
from rlx_jax.models.mixture import GptOssFlow, MixtralFlow, Qwen3MoeFlow
from rlx_jax.models.modernbert import ModernBertFlow
from rlx_jax.models.nomic import NomicFlow, NomicVisionFlow
from rlx_jax.models.qwen35 import Qwen35Flow
from rlx_jax.models.siglip import SiglipFlow, SiglipTextFlow
from rlx_jax.models.vit import Dinov2Flow, ViTFlow

__all__ = [
    "AlbertFlow", "BertFlow", "BigBirdFlow", "ClipFlow", "ClipTextFlow", "Data2VecTextFlow", "DebertaFlow",
    "DebertaV2Flow", "Dinov2Flow", "DistilBertFlow", "ElectraFlow", "ErnieFlow", "EsmFlow", "EuroBertFlow", "Flux2Flow",
    "GemmaFlow", "Gpt2Flow", "GptOssFlow", "GteFlow", "IBertFlow", "JinaV3Flow", "Llama32Flow", "MPNetFlow",
    "Mamba2Flow", "MegatronBertFlow", "MistralFlow", "MixtralFlow", "ModernBertFlow", "NomicFlow", "NomicVisionFlow",
    "Qwen2Flow", "Qwen35Flow", "Qwen3Flow", "Qwen3MoeFlow", "RemBertFlow", "RoFormerFlow", "RobertaFlow",
    "RobertaPreLayerNormFlow", "SiglipFlow", "SiglipTextFlow", "ViTFlow", "XlmRobertaXlFlow",
]  # fmt: skip
