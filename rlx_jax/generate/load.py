"""`rlx_jax.load`: a checkpoint directory, or a model of the Hub, as something to call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rlx_jax.encode.checkpoint import Checkpoint, open_checkpoint
from rlx_jax.encode.dual import DualEncoder
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import ConfigError, ProfileError, RlxWarning, UnsupportedError, listing, quote, shown
from rlx_jax.flow import ModelFlow, ModelRecipe
from rlx_jax.generate.causal import CausalLM
from rlx_jax.ir.types import as_dtype, short_name
from rlx_jax.models.lora import lora
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.runtime.checkpoint_origin import LoadedFrom
from rlx_jax.text.tokenizer import Tokenizer, configured_ids
from rlx_jax.weights.format import OpenOptions


def load(
    path: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None,
    subfolder: str = "", dtype: Any = None, recipe: ModelRecipe | None = None,
    adapter: str | os.PathLike[str] | None = None, ignore_fields: Iterable[str] = (), **options: Any,
) -> Any:  # fmt: skip
    """A Hugging Face or sentence-transformers directory as a `CausalLM`, an `Encoder`, a `VisionEncoder` or a
    `DualEncoder`; `config.json` decides.

    Args:
        path: a directory; or, where there is none of that name, `"org/name"`, a model of the Hub. Of it the files that
            are read are fetched, into huggingface_hub's cache. `HF_ENDPOINT`, `HF_HOME` and
            `HF_HUB_CACHE` say where; with `HF_HUB_OFFLINE` it is what the cache has, and nothing else.
        revision: of a model of the Hub: a branch, a tag or a commit; `main` by default.
        token: what the Hub is shown for it; None: `HF_TOKEN` or that of a login; False: none.
        subfolder: the directory in it that is meant, as a pipeline of diffusers has one for each of its models.
        dtype: the compute dtype, `precision.compute` of the profile: "bf16", "bfloat16", `jnp.bfloat16` and so on.
        recipe: to use in place of the checkpoint's own: `rlx_jax.recipe_for(path)` with hooks, or one made from
            another checkpoint of the same config, or from the config alone. The weights are those of `path`.
        adapter: a directory with a LoRA adapter of PEFT's, which the model computes with: see `rlx_jax.lora`.
        ignore_fields: fields of `config.json` that are refused, since they may change the computation and are not
            handled, and that you know do not: `["router_scale"]`, of nested objects `["rope_scaling.finetuned"]`.
            `report().ignored_fields` names them.
        options: `profile`, `mesh`, `strict`, `missing` and `key` of `rlx_jax.compile`: what the checkpoint has not,
            such as the weights of new blocks of `recipe`, is an error, or drawn. Of `open_weights`: `on_nonfinite`,
            `links`, `max_bytes`, `verify`, `subtree`. And `progress`, told how far loading and compiling are:
            `progress("load", bytes read, bytes in all)`, `progress("download model.safetensors", bytes, bytes in all)`,
            of shards `"download 4 files"`, and `progress("compile prefill of batch 1, seq 16", 0, 1)`, then 1 of 1; see
            `rlx_jax.compiler.executable.Progress`.

    Raises:
        ConfigError, UnsupportedError, WeightError, TokenizerError: see `rlx_jax.errors`.
        MissingFileError: neither a directory nor a model. HubError: the Hub refuses or cannot be reached.
        IntegrityError: other bytes came than the commit has.
    """
    checkpoint = open_checkpoint(
        path, "load", options, revision=revision, token=token, subfolder=subfolder,
        ignore_fields=ignore_fields, known=("dtype", "recipe", "adapter"),
    )  # fmt: skip
    check_kind(checkpoint)
    own = checkpoint.pretrained.recipe
    used = own if recipe is None else checkpoint.bind(recipe)
    if adapter is not None:
        used = lora(used, adapter=adapter)
    compiling = checkpoint.options
    if dtype is not None:
        chosen = ModelFlow.from_recipe(used).profile if compiling.profile is None else compiling.profile
        compiling = replace(compiling, profile=computing_in(dtype, chosen))
    kind = "encoder" if getattr(used, "hidden_only", False) else checkpoint.pretrained.kind
    opened = KINDS[kind](checkpoint, used, compiling)
    what = "a recipe that differs from the checkpoint's"
    if adapter is not None:
        what = "an adapter (rlx_jax.merge_lora, rlx_jax.save_lora)"
    edited = "" if used is own or used == own else f"the model was loaded with {what}"
    opened.loaded_from = LoadedFrom(checkpoint.root, checkpoint.inside, edited, opened.model.built)
    return opened


def check_kind(checkpoint: Checkpoint) -> None:
    """Refuse what `load` has no class for, and warn of a task's head that it leaves out.

    Raises:
        UnsupportedError: a denoising model, or sentence-transformers' modules over a model that is no text encoder.

    Warns:
        RlxWarning: names the weights of the head.
    """
    pipeline, pretrained, folder = checkpoint.pipeline, checkpoint.pretrained, checkpoint.folder
    if pretrained.kind == "denoiser":
        raise UnsupportedError(
            f"{quote(folder.path)}: one step of a denoising model is a plain function: "
            "rlx_jax.compile(rlx_jax.from_pretrained(path))"
        )
    if pipeline is not None and pretrained.kind != "encoder":
        raise UnsupportedError(
            f"{quote(folder.path)}: modules.json lists modules of sentence-transformers after a model of kind "
            f"{quote(pretrained.kind)}; supported are encoders of texts, and decoders of rlx_jax without their head"
        )
    if pipeline is None and pretrained.head:  # with a pipeline, sentence-transformers leaves the head out too
        warnings.warn(
            f"{quote(folder.path)}: only the encoder is loaded, and not the head of its task, which is not built: "
            f"{len(pretrained.head)} weights are left out, {listing(pretrained.head)}",
            RlxWarning,
            stacklevel=3,
        )


def computing_in(dtype: Any, profile: ProfileLike | None) -> CompileProfile:
    """A profile, or the default one, with another compute dtype.

    Raises:
        ProfileError: models do not compute in that.
    """
    known = "auto" if dtype == "auto" else short_name(as_dtype(dtype, "dtype: "))
    if known not in ("auto", "f32", "bf16", "f16"):
        raise ProfileError(f"dtype: models compute in f32, bf16 or f16, got {shown(dtype)}")
    chosen = CompileProfile.of(CompileProfile() if profile is None else profile)
    return chosen.replace(precision={"compute": known})


def open_causal(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> CausalLM:
    """A recipe of a checkpoint as a `CausalLM`, with the tokenizer and the ids that the checkpoint names.

    Raises:
        ConfigError: an id that ends or begins a row is not in the model's vocabulary.
    """
    folder, tokenizer, pretrained = checkpoint.folder, checkpoint.tokenizer, checkpoint.pretrained
    if tokenizer is not None:  # it knows the files
        eos, bos = tokenizer.eos_ids, tokenizer.bos_id
    else:
        eos, bos = configured_ids(folder, "eos"), next(iter(configured_ids(folder, "bos")), None)
    for field, ids in (("eos_token_id", eos), ("bos_token_id", () if bos is None else (bos,))):
        if any(i >= pretrained.vocab_size for i in ids):
            where = f"{quote(folder.path)}: {field}"
            raise ConfigError(f"{where} is {list(ids)}; expected ids in [0, {pretrained.vocab_size})")
    return CausalLM(
        ModelFlow.from_recipe(recipe), tokenizer=tokenizer, eos_ids=eos, bos_id=bos,
        max_positions=pretrained.max_positions, **options.compiling(),
    )  # fmt: skip


def open_encoder(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> Encoder:
    """A recipe of a checkpoint as an `Encoder`, with its tokenizer and its modules of sentence-transformers."""
    pretrained, tokenizer = checkpoint.pretrained, checkpoint.tokenizer
    return Encoder(
        ModelFlow.from_recipe(recipe), tokenizer=tokenizer, pipeline=checkpoint.pipeline,
        padding=padding_of(pretrained.recipe, tokenizer), max_positions=pretrained.max_positions,
        **options.compiling(),
    )  # fmt: skip


def open_vision(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> VisionEncoder:
    """A recipe of a checkpoint as a `VisionEncoder`, with the checkpoint's image processor."""
    return VisionEncoder(ModelFlow.from_recipe(recipe), processor=checkpoint.processor, **options.compiling())


def open_dual(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> DualEncoder:
    """The towers of a recipe, with the checkpoint's tokenizer and image processor."""
    return DualEncoder(
        recipe.of("text"), recipe.of("vision"), similarity=recipe.of("similarity"), tokenizer=checkpoint.tokenizer,
        processor=checkpoint.processor, padding=padding_of(recipe, checkpoint.tokenizer), **options.compiling(),
    )  # fmt: skip


# What opens a checkpoint of each kind.
KINDS: dict[str, Callable[[Checkpoint, Any, OpenOptions], CausalLM | Encoder | VisionEncoder | DualEncoder]] = {
    "causal": open_causal, "encoder": open_encoder, "vision": open_vision, "dual": open_dual,
}  # fmt: skip


def padding_of(recipe: Any, tokenizer: Tokenizer | None) -> tuple[int, int] | None:
    """To how many tokens a recipe's texts are padded, and with which id: the tokenizer's own, if it has one. None: to
    any number, and padding is not read."""
    padding: tuple[int, int] | None = getattr(recipe, "padding", None)  # plugins' encoders may know none
    if padding is not None and tokenizer is not None and tokenizer.pad_id is not None:
        return padding[0], tokenizer.pad_id
    return padding
