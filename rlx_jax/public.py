"""The public names of the package, which `rlx_jax` imports when the first of them is used."""

from rlx_jax import blocks, errors, losses, models, profiles, quantization
from rlx_jax.compile_steps import *  # names of the specification, such as ModelCompilePipeline
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
from rlx_jax.generate.many import PromptRequest
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.scoring import Score
from rlx_jax.ir import ops, plugins
from rlx_jax.ir.graph import GraphStage
from rlx_jax.ir.packed import Packed
from rlx_jax.ir.param import Parts
from rlx_jax.ir.plugins import FlowExtensionPlan, Plugin
from rlx_jax.layer_stack import LayerStack
from rlx_jax.loading.model_plan import plan
from rlx_jax.loading.start import load
from rlx_jax.models import *  # every recipe, by its name
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
