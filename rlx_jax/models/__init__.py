"""Recipes: a checkpoint's config → a flow. One file for each family; each recipe is also a name of `rlx_jax`."""

from rlx_jax.models.bert import BertFlow as BertFlow
from rlx_jax.models.clip import ClipFlow as ClipFlow
from rlx_jax.models.clip import ClipTextFlow as ClipTextFlow
from rlx_jax.models.dinov2 import Dinov2Flow as Dinov2Flow
from rlx_jax.models.flux2 import Flux2Flow as Flux2Flow
from rlx_jax.models.gemma import GemmaFlow as GemmaFlow
from rlx_jax.models.gpt2 import Gpt2Flow as Gpt2Flow
from rlx_jax.models.gpt_oss import GptOssFlow as GptOssFlow
from rlx_jax.models.llama import Llama32Flow as Llama32Flow
from rlx_jax.models.mamba2 import Mamba2Flow as Mamba2Flow
from rlx_jax.models.mistral import MistralFlow as MistralFlow
from rlx_jax.models.mixtral import MixtralFlow as MixtralFlow
from rlx_jax.models.mpnet import MPNetFlow as MPNetFlow
from rlx_jax.models.nomic import NomicFlow as NomicFlow
from rlx_jax.models.nomic_vision import NomicVisionFlow as NomicVisionFlow
from rlx_jax.models.qwen2 import Qwen2Flow as Qwen2Flow
from rlx_jax.models.qwen3 import Qwen3Flow as Qwen3Flow
from rlx_jax.models.qwen3_moe import Qwen3MoeFlow as Qwen3MoeFlow
from rlx_jax.models.qwen35 import Qwen35Flow as Qwen35Flow
from rlx_jax.models.roberta import RobertaFlow as RobertaFlow
from rlx_jax.models.siglip import SiglipFlow as SiglipFlow
from rlx_jax.models.siglip import SiglipTextFlow as SiglipTextFlow
from rlx_jax.models.vit import ViTFlow as ViTFlow

__all__ = [name for name in dir() if name.endswith("Flow")]
