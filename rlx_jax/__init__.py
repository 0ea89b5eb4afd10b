"""rlx_jax: a tracing compiler for people who build and run transformer-style models in JAX."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from rlx_jax import blocks, errors, losses, models, profiles
from rlx_jax import quantization as quantization
from rlx_jax.compile_steps import *  # noqa: F403 (names of the specification, such as ModelCompilePipeline)
from rlx_jax.compiler.compile_cache import compile_cache
from rlx_jax.compiler.graph_module import BuiltModel, GraphModule
from rlx_jax.encode.checkpoint import from_pretrained, recipe_for
from rlx_jax.encode.dual import DualEncoder
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.images import ImageProcessor
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import RlxError
from rlx_jax.flow import ModelFlow
from rlx_jax.generate.causal import CausalLM
from rlx_jax.generate.generation import Completion
from rlx_jax.generate.many import PromptRequest as PromptRequest
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scoring import Score as Score
from rlx_jax.ir import ops, plugins
from rlx_jax.ir.graph import GraphStage
from rlx_jax.ir.packed import Packed
from rlx_jax.ir.param import Parts as Parts
from rlx_jax.ir.plugins import FlowExtensionPlan as FlowExtensionPlan
from rlx_jax.ir.plugins import Plugin
from rlx_jax.layer_stack import LayerStack
from rlx_jax.loading.load import load
from rlx_jax.loading.model_plan import plan
from rlx_jax.models import *  # noqa: F403 (every recipe, by its name)
from rlx_jax.models.lora import lora, merge_lora, save_lora, unmerge_lora
from rlx_jax.profiles import CompileProfile
from rlx_jax.runtime.bisect import bisect
from rlx_jax.runtime.compile_flow import compile, init
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.save_model import save
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.weights.source import open_weights
from rlx_jax.weights.tree import TreeWeight

Graph = GraphModule

__version__ = "0.1.0"

__all__ = [
    "BuiltModel", "CausalLM", "CompileProfile", "CompiledModel", "Completion", "DualEncoder", "Emit", "Encoder",
    "FlowValue", "Graph", "GraphModule", "GraphStage", "ImageProcessor", "LayerStack", "ModelFlow", "Packed", "Plugin",
    "RlxError", "Sampler", "TreeWeight", "VisionEncoder", "bisect", "blocks", "compile",
    "compile_cache", "errors", "eval", "from_pretrained", "init", "load", "lora", "losses", "merge_lora", "models",
    "nnx", "open_weights", "ops", "plan", "plugins", "profiles", "recipe_for", "save", "save_lora", "train",
    "unmerge_lora",
]  # fmt: skip

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
