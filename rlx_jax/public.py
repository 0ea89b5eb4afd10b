"""The public names of the package, which `rlx_jax` imports when the first of them is used."""

from rlx_jax import blocks as blocks
from rlx_jax import errors as errors
from rlx_jax import losses as losses
from rlx_jax import models as models
from rlx_jax import plugins as plugins
from rlx_jax import profiles as profiles
from rlx_jax import quantization as quantization
from rlx_jax.compile_steps import *  # names of the specification, such as ModelCompilePipeline
from rlx_jax.compiler.compile_cache import compile_cache as compile_cache
from rlx_jax.compiler.graph_module import BuiltModel as BuiltModel
from rlx_jax.compiler.graph_module import GraphModule as GraphModule
from rlx_jax.encode.answering import QuestionAnswerer as QuestionAnswerer
from rlx_jax.encode.checkpoint import from_pretrained as from_pretrained
from rlx_jax.encode.checkpoint import recipe_for as recipe_for
from rlx_jax.encode.classifier import Classifier as Classifier
from rlx_jax.encode.classifier import Reranker as Reranker
from rlx_jax.encode.dual import DualEncoder as DualEncoder
from rlx_jax.encode.encoder import Encoder as Encoder
from rlx_jax.encode.image_classifier import ImageClassifier as ImageClassifier
from rlx_jax.encode.images import ImageProcessor as ImageProcessor
from rlx_jax.encode.masked import MaskedLM as MaskedLM
from rlx_jax.encode.multi_vector import MultiVectorEncoder as MultiVectorEncoder
from rlx_jax.encode.tagging import TokenClassifier as TokenClassifier
from rlx_jax.encode.vision import VisionEncoder as VisionEncoder
from rlx_jax.errors import RlxError as RlxError
from rlx_jax.flow import ModelFlow as ModelFlow
from rlx_jax.generate.causal import CausalLM as CausalLM
from rlx_jax.generate.generation import Completion as Completion
from rlx_jax.generate.many import PromptRequest as PromptRequest
from rlx_jax.generate.sampler import Sampler as Sampler
from rlx_jax.generate.scoring import Score as Score
from rlx_jax.ir import ops as ops
from rlx_jax.ir.graph import GraphStage as GraphStage
from rlx_jax.ir.packed import Packed as Packed
from rlx_jax.ir.param import Parts as Parts
from rlx_jax.layer_stack import LayerStack as LayerStack
from rlx_jax.loading.model_plan import plan as plan
from rlx_jax.loading.start import load as load
from rlx_jax.models import *  # every recipe, by its name
from rlx_jax.models.lora import lora as lora
from rlx_jax.models.lora import merge_lora as merge_lora
from rlx_jax.models.lora import save_lora as save_lora
from rlx_jax.models.lora import unmerge_lora as unmerge_lora
from rlx_jax.plugins import FlowExtensionPlan as FlowExtensionPlan
from rlx_jax.plugins import Plugin as Plugin
from rlx_jax.profiles import CompileProfile as CompileProfile
from rlx_jax.runtime.bisect import bisect as bisect
from rlx_jax.runtime.compile_flow import compile as compile
from rlx_jax.runtime.compile_flow import init as init
from rlx_jax.runtime.model import CompiledModel as CompiledModel
from rlx_jax.runtime.save_model import save as save
from rlx_jax.trace.emit import Emit as Emit
from rlx_jax.trace.emit import FlowValue as FlowValue
from rlx_jax.weights.source import open_weights as open_weights
from rlx_jax.weights.tree import TreeWeight as TreeWeight

Graph = GraphModule
