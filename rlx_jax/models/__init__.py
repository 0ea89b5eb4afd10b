"""Recipes make a flow from a checkpoint's config. Each family has a file; each recipe is also a name of `rlx_jax`."""

from rlx_jax.models.albert import AlbertFlow
from rlx_jax.models.bert import BertFlow
from rlx_jax.models.big_bird import BigBirdFlow
from rlx_jax.models.clip import ClipFlow, ClipTextFlow
from rlx_jax.models.deberta import DebertaFlow, DebertaV2Flow
from rlx_jax.models.dinov2 import Dinov2Flow
from rlx_jax.models.distilbert import DistilBertFlow
from rlx_jax.models.electra import ElectraFlow
from rlx_jax.models.ernie import ErnieFlow
from rlx_jax.models.esm import EsmFlow
from rlx_jax.models.eurobert import EuroBertFlow
from rlx_jax.models.flux2 import Flux2Flow
from rlx_jax.models.gemma import GemmaFlow
from rlx_jax.models.gpt2 import Gpt2Flow
from rlx_jax.models.gpt_oss import GptOssFlow
from rlx_jax.models.gte import GteFlow
from rlx_jax.models.ibert import IBertFlow
from rlx_jax.models.jina_v3 import JinaV3Flow
from rlx_jax.models.llama import Llama32Flow
from rlx_jax.models.mamba2 import Mamba2Flow
from rlx_jax.models.megatron_bert import MegatronBertFlow
from rlx_jax.models.mistral import MistralFlow
from rlx_jax.models.mixtral import MixtralFlow
from rlx_jax.models.modernbert import ModernBertFlow
from rlx_jax.models.mpnet import MPNetFlow
from rlx_jax.models.nomic import NomicFlow
from rlx_jax.models.nomic_vision import NomicVisionFlow
from rlx_jax.models.qwen2 import Qwen2Flow
from rlx_jax.models.qwen3 import Qwen3Flow
from rlx_jax.models.qwen3_moe import Qwen3MoeFlow
from rlx_jax.models.qwen35 import Qwen35Flow
from rlx_jax.models.rembert import RemBertFlow
from rlx_jax.models.roberta import Data2VecTextFlow, RobertaFlow, RobertaPreLayerNormFlow, XlmRobertaXlFlow
from rlx_jax.models.roformer import RoFormerFlow
from rlx_jax.models.siglip import SiglipFlow, SiglipTextFlow
from rlx_jax.models.vit import ViTFlow

__all__ = [
    "AlbertFlow", "BertFlow", "BigBirdFlow", "ClipFlow", "ClipTextFlow", "Data2VecTextFlow", "DebertaFlow",
    "DebertaV2Flow", "Dinov2Flow", "DistilBertFlow", "ElectraFlow", "ErnieFlow", "EsmFlow", "EuroBertFlow", "Flux2Flow",
    "GemmaFlow", "Gpt2Flow", "GptOssFlow", "GteFlow", "IBertFlow", "JinaV3Flow", "Llama32Flow", "MPNetFlow",
    "Mamba2Flow", "MegatronBertFlow", "MistralFlow", "MixtralFlow", "ModernBertFlow", "NomicFlow", "NomicVisionFlow",
    "Qwen2Flow", "Qwen35Flow", "Qwen3Flow", "Qwen3MoeFlow", "RemBertFlow", "RoFormerFlow", "RobertaFlow",
    "RobertaPreLayerNormFlow", "SiglipFlow", "SiglipTextFlow", "ViTFlow", "XlmRobertaXlFlow",
]  # fmt: skip
