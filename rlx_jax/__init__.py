"""rlx_jax: a tracing compiler for people who build and run transformer-style models in JAX."""

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx_jax.io.garbage import paused_gc

__version__ = "0.1.0"
# When the first of the sources was read.
IMPORT_TIME = time.time()
MODULES = "blocks errors eval losses models nnx plugins profiles quantization train".split()

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
    from rlx_jax.public import *
else:

    @paused_gc()
    def __getattr__(name: str) -> Any:
        """Import a name at its first use: all public names together, but `load`, which starts the device before that,
        `nnx`, which needs flax, `eval`, which needs lm_eval, and modules, which modules of the package import."""
        if name in MODULES:
            return import_module(f"rlx_jax.{name}")
        if name == "load":
            return import_module("rlx_jax.loading.start").load
        public = {} if name.startswith("_") else vars(import_module("rlx_jax.public"))
        for key, value in public.items():
            if not key.startswith("_"):
                globals().setdefault(key, value)  # a name that a test has replaced stays
        if name in globals():
            return globals()[name]
        did_you_mean = import_module("rlx_jax.errors").did_you_mean
        suggestion = did_you_mean(name, __all__) or did_you_mean(name, public)
        raise AttributeError(f"module 'rlx_jax' has no attribute {name!r}{suggestion}")


def __dir__() -> list[str]:
    """Return the public names: neither helpers of this file nor submodules that happen to be imported."""
    return [*__all__]
