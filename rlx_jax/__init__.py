"""rlx_jax: a tracing compiler for people who build and run transformer-style models in JAX."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from rlx_jax import blocks as blocks
from rlx_jax import errors as errors
from rlx_jax import losses as losses
from rlx_jax import profiles as profiles
from rlx_jax.compiler.compile_cache import compile_cache as compile_cache
from rlx_jax.compiler.graph_module import BuiltModel as BuiltModel
from rlx_jax.compiler.graph_module import GraphModule as GraphModule
from rlx_jax.encode.dual import DualEncoder as DualEncoder
from rlx_jax.encode.encoder import Encoder as Encoder
from rlx_jax.encode.images import ImageProcessor as ImageProcessor
from rlx_jax.encode.vision import VisionEncoder as VisionEncoder
from rlx_jax.errors import RlxError as RlxError
from rlx_jax.flow import ModelFlow as ModelFlow
from rlx_jax.generate.answers import Completion as Completion
from rlx_jax.generate.causal import CausalLM as CausalLM
from rlx_jax.generate.load import load as load
from rlx_jax.generate.sampler import Sampler as Sampler
from rlx_jax.generate.scoring import Score as Score
from rlx_jax.ir import ops as ops
from rlx_jax.ir import plugins as plugins
from rlx_jax.ir.extensions import FlowExtensionPlan as FlowExtensionPlan
from rlx_jax.ir.graph import GraphStage as GraphStage
from rlx_jax.ir.packed import Packed as Packed
from rlx_jax.ir.param import Parts as Parts
from rlx_jax.ir.plugins import Plugin as Plugin
from rlx_jax.layer_stack import LayerStack as LayerStack
from rlx_jax.models.bert import BertFlow as BertFlow
from rlx_jax.models.clip import ClipFlow as ClipFlow
from rlx_jax.models.clip import ClipTextFlow as ClipTextFlow
from rlx_jax.models.dinov2 import Dinov2Flow as Dinov2Flow
from rlx_jax.models.families import from_pretrained as from_pretrained
from rlx_jax.models.families import recipe_for as recipe_for
from rlx_jax.models.flux2 import Flux2Flow as Flux2Flow
from rlx_jax.models.gemma import GemmaFlow as GemmaFlow
from rlx_jax.models.gpt2 import Gpt2Flow as Gpt2Flow
from rlx_jax.models.gpt_oss import GptOssFlow as GptOssFlow
from rlx_jax.models.llama import Llama32Flow as Llama32Flow
from rlx_jax.models.lora import lora as lora
from rlx_jax.models.lora import merge_lora as merge_lora
from rlx_jax.models.lora import save_lora as save_lora
from rlx_jax.models.lora import unmerge_lora as unmerge_lora
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
from rlx_jax.profiles import CompileProfile as CompileProfile
from rlx_jax.runtime.compiling import compile as compile
from rlx_jax.runtime.compiling import init as init
from rlx_jax.runtime.model import CompiledModel as CompiledModel
from rlx_jax.runtime.save import save as save
from rlx_jax.trace.emit import Emit as Emit
from rlx_jax.trace.emit import FlowValue as FlowValue
from rlx_jax.weights.source import open_weights as open_weights

Graph = GraphModule

__version__ = "0.1.0"

__all__ = [
    "BertFlow",
    "BuiltModel",
    "CausalLM",
    "ClipFlow",
    "ClipTextFlow",
    "CompileProfile",
    "CompiledModel",
    "Completion",
    "Dinov2Flow",
    "DualEncoder",
    "Emit",
    "Encoder",
    "FlowExtensionPlan",
    "FlowValue",
    "Flux2Flow",
    "GemmaFlow",
    "Gpt2Flow",
    "GptOssFlow",
    "Graph",
    "GraphModule",
    "GraphStage",
    "ImageProcessor",
    "LayerStack",
    "Llama32Flow",
    "MPNetFlow",
    "Mamba2Flow",
    "MistralFlow",
    "MixtralFlow",
    "ModelFlow",
    "NomicFlow",
    "NomicVisionFlow",
    "Packed",
    "Parts",
    "Plugin",
    "Qwen2Flow",
    "Qwen35Flow",
    "Qwen3Flow",
    "Qwen3MoeFlow",
    "RlxError",
    "RobertaFlow",
    "Sampler",
    "Score",
    "SiglipFlow",
    "SiglipTextFlow",
    "ViTFlow",
    "VisionEncoder",
    "blocks",
    "compile",
    "compile_cache",
    "errors",
    "eval",
    "from_pretrained",
    "init",
    "load",
    "lora",
    "losses",
    "merge_lora",
    "nnx",
    "open_weights",
    "ops",
    "plugins",
    "profiles",
    "recipe_for",
    "save",
    "save_lora",
    "train",
    "unmerge_lora",
]

if TYPE_CHECKING:
    from rlx_jax import eval as eval
    from rlx_jax import nnx as nnx
    from rlx_jax import train as train
else:

    def __getattr__(name: str) -> ModuleType:
        """Import `nnx`, which needs flax, `eval`, which needs lm_eval, and `train` at their first use."""
        if name in ("eval", "nnx", "train"):
            return importlib.import_module(f"rlx_jax.{name}")
        raise AttributeError(f"module 'rlx_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names: neither helpers of this file nor submodules that happen to be imported."""
    return [*__all__, "__version__"]
