"""`rlx_jax.load`: load a checkpoint directory, or a model of the Hub, as an object to call.

This module imports little, so that `load` can start the device before JAX and the rest of the package are imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlx_jax.io.garbage import paused_gc

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from rlx_jax.flow import ModelRecipe
    from rlx_jax.generate.causal import CausalLM

    Model = TypeVar("Model", default=CausalLM)


def load(
    path: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None,
    subfolder: str = "", file: str | None = None, dtype: Any = None, recipe: ModelRecipe | None = None,
    adapter: str | os.PathLike[str] | None = None, head: bool = True, ignore_fields: Iterable[str] = (),
    expect_sha256: str | None = None, prefix_cache: int | str | None = None, expect: type[Model] | None = None,
    **options: Any,
) -> Model:  # fmt: skip
    """Load a Hugging Face or sentence-transformers directory, a GGUF file, or an artifact of `export`, as a `CausalLM`,
    an `Encoder`, a `Classifier`, a `Reranker`, a `TokenClassifier`, a `QuestionAnswerer`, a `MaskedLM`, a
    `VisionEncoder`, an `ImageClassifier` or a `DualEncoder`, depending on its config.

    A second load of an equal config in one process takes what the first one built, and only opens, checks and reads the
    weights. Models with equal tokenizer files share a tokenizer.

    Args:
        path: a directory; a `.gguf` file, the first one if the model has several parts; a `.rlxa` file, which takes no
            other arguments than `expect_sha256` and `progress`; or, where there is no such path, `"org/name"`, a model
            of the Hub. Only the files that are needed are downloaded, into huggingface_hub's cache. The environment
            variables `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_CACHE` set the server and the directories; with
            `HF_HUB_OFFLINE` only the cache is used.
        revision: branch, tag or commit of a model of the Hub; `main` by default.
        token: access token for the Hub. None uses `HF_TOKEN` or the token of a login, False uses none.
        subfolder: the directory of the model within `path`, as in a pipeline of diffusers.
        file: a `.gguf` file in the directory or the model of the Hub, to load in place of its safetensors.
        dtype: the compute dtype, `precision.compute` of the profile: "bf16", "bfloat16", `jnp.bfloat16` and so on.
        recipe: a recipe to use in place of the checkpoint's: `rlx_jax.recipe_for(path)` with hooks, or one made from
            another checkpoint of the same config, or from the config alone. The weights are loaded from `path`.
        adapter: a directory with a LoRA adapter of PEFT's, which the model applies: see `rlx_jax.lora`.
        head: False loads the model without the head of its task, as an `Encoder` or `VisionEncoder`.
        ignore_fields: fields of `config.json` to ignore: `["router_scale"]`, in nested objects
            `["rope_scaling.finetuned"]`. Others that are not supported and may change the computation are an error.
        expect_sha256: the digest that `export` returned for a `.rlxa` file; another file is refused.
        prefix_cache: as in `CausalLM`.
        expect: the class of the model, such as `rlx_jax.Encoder`; a checkpoint of another class is an error. It is also
            the type of the result for type checkers, which take it for a `CausalLM` otherwise.
        options: `profile`, `mesh`, `strict`, `missing` and `key` of `rlx_jax.compile`, where `missing` decides whether
            weights missing from the checkpoint, such as the weights of new blocks in `recipe`, are an error or
            initialized. From `open_weights`: `on_nonfinite`, `links`, `max_bytes`, `verify`, `subtree`. And the
            callback `progress`, called with a step such as `"load"`, `"download model.safetensors"` or `"compile
            prefill of batch 1, seq 16"`, the amount done and the total: `rlx_jax.compiler.executable.Progress`.

    Raises:
        ConfigError, UnsupportedError, WeightError, TokenizerError: see `rlx_jax.errors`.
        MissingFileError: `path` is neither a directory nor a model. HubError: the Hub refuses or cannot be reached.
        IntegrityError: the downloaded bytes are not the bytes of the commit, or an artifact was altered or truncated.
        VersionMismatchError, PlatformMismatchError, ArtifactFormatError: an artifact that this process cannot load.
    """
    if isinstance(path, str | os.PathLike) and os.path.exists(path):  # else a download is first, or an error
        if may_use_cuda():
            threading.Thread(target=start_driver).start()
        import_module("rlx_jax.device").start_device()
    # The rest of the package, in its usual order: a GPU takes longer to start than that takes to import.
    if "rlx_jax.public" not in sys.modules:
        with paused_gc():
            import_module("rlx_jax.public")
    model: Model = import_module("rlx_jax.loading.load").load_path(
        path, revision, token, subfolder, file, dtype, recipe, adapter, head, ignore_fields, expect_sha256,
        prefix_cache, expect, options,
    )  # fmt: skip
    return model


def may_use_cuda() -> bool:
    """Return whether JAX is not imported yet, and will use the first GPU of NVIDIA if there is one."""
    platforms = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME") or "cuda"
    if "jax" in sys.modules or not {"cuda", "gpu"} & {*platforms.split(",")}:
        return False
    # A context takes memory of its GPU, so none is made on a GPU that JAX leaves to other processes.
    if os.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all") != "all":
        return False
    with contextlib.suppress(OSError, ValueError):  # a path that is gone, or a module without a spec
        plugins = find_spec("jax_plugins")
        paths = plugins.submodule_search_locations if plugins is not None else None
        return any("cuda" in name for path in paths or () for name in os.listdir(path))
    return False


def start_driver() -> None:
    """Start CUDA and the context of the first GPU, which JAX uses too; JAX is imported meanwhile, and starts sooner."""
    with contextlib.suppress(OSError, AttributeError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
