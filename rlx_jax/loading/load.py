"""The models that `rlx_jax.load` returns.

The kind of the checkpoint decides the class: `CausalLM`, `Encoder`, `Classifier`, `Reranker`,
`TokenClassifier`, `QuestionAnswerer`, `MaskedLM`, `VisionEncoder`, `ImageClassifier` or `DualEncoder`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rlx_jax.device import start_device
from rlx_jax.encode.answering import QuestionAnswerer
from rlx_jax.encode.checkpoint import Checkpoint, check_class, check_expected, open_checkpoint
from rlx_jax.encode.classifier import Classifier, Reranker
from rlx_jax.encode.cross_encoder import PairTemplate
from rlx_jax.encode.dual import DualEncoder
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.gguf_metadata import describe_checkpoint
from rlx_jax.encode.head_model import HeadModel
from rlx_jax.encode.image_classifier import ImageClassifier
from rlx_jax.encode.masked import MaskedLM
from rlx_jax.encode.multi_vector import MultiVectorEncoder
from rlx_jax.encode.tagging import TokenClassifier
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import ConfigError, ProfileError, RequestError, RlxWarning, UnsupportedError, listing, quote, shown
from rlx_jax.flow import ModelRecipe
from rlx_jax.generate.causal import CausalLM
from rlx_jax.io.archive import SUFFIX, is_archive
from rlx_jax.ir.types import as_dtype, short_name
from rlx_jax.loading.artifact import load_artifact
from rlx_jax.models.encoder import REGRESSION, EncoderFlow
from rlx_jax.models.families import KINDS
from rlx_jax.models.lora import lora
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.runtime.checkpoint_origin import CheckpointOrigin
from rlx_jax.text.tokenizer import Tokenizer, config_token_ids
from rlx_jax.weights.format import OpenOptions

H = TypeVar("H", bound=HeadModel)


def load_path(
    path: str | os.PathLike[str], revision: str | None, token: str | bool | None, subfolder: str, file: str | None,
    dtype: Any, recipe: ModelRecipe | None, adapter: str | os.PathLike[str] | None, head: bool,
    ignore_fields: Iterable[str], expect_sha256: str | None, prefix_cache: int | str | None,
    expect: type | None, options: dict[str, Any],
) -> Any:  # fmt: skip
    """Return the model of a checkpoint or an artifact; arguments and errors as in `rlx_jax.load`."""
    check_expected("load", expect)
    if is_artifact(path):
        arguments = {"revision": revision, "token": token, "subfolder": subfolder or None, "file": file, "dtype": dtype,
                     "recipe": recipe, "adapter": adapter, "head": None if head is True else head,
                     "ignore_fields": list(ignore_fields) or None, "expect_sha256": expect_sha256,
                     "prefix_cache": prefix_cache}  # fmt: skip
        return load_artifact(path, {n: v for n, v in (arguments | options).items() if v is not None}, expect)
    if expect_sha256 is not None:
        raise RequestError(f"load: expect_sha256 is for an artifact of export (.rlxa), not for {shown(path)}")
    checkpoint = open_checkpoint(
        path, "load", options, revision=revision, token=token, subfolder=subfolder, file=file,
        ignore_fields=ignore_fields, head=head, other_arguments=("dtype", "recipe", "adapter", "expect"),
    )  # fmt: skip
    check_kind(checkpoint)
    start_device()
    model_recipe = checkpoint.pretrained.recipe if recipe is None else checkpoint.bind(recipe)
    if adapter is not None:
        model_recipe = lora(model_recipe, adapter=adapter)
    cls = choose_class(checkpoint, model_recipe, has_adapter=adapter is not None)
    check_class("load", path, cls, expect)
    if prefix_cache is not None and cls is not CausalLM:
        raise RequestError(f"load: prefix_cache is for a CausalLM, and {shown(path)} is of class {cls.__name__}")
    compile_opts = checkpoint.options
    if dtype is not None:
        base = checkpoint.flow(model_recipe).profile if compile_opts.profile is None else compile_opts.profile
        compile_opts = replace(compile_opts, profile=with_compute_dtype(dtype, base))
    loaded_model = LOADERS[cls](checkpoint, model_recipe, compile_opts)
    if isinstance(loaded_model, CausalLM) and prefix_cache is not None:
        loaded_model.prefix_cache = prefix_cache
    loaded_model.loaded_from = CheckpointOrigin(
        checkpoint.root, checkpoint.model_subfolder, describe_edit(checkpoint, model_recipe, adapter is not None),
        loaded_model.model.built, partial(describe_checkpoint, checkpoint),
    )  # fmt: skip
    return loaded_model


def describe_edit(checkpoint: Checkpoint, recipe: Any, has_adapter: bool) -> str:
    """Return how a recipe differs from the checkpoint's, whose `config.json` then does not describe the model; empty if
    it does not, and the model can be saved as this checkpoint."""
    original = checkpoint.pretrained.recipe
    if recipe is original or recipe == original:
        return ""
    edit = "a recipe that differs from the checkpoint's"
    if has_adapter:
        edit = "an adapter (rlx_jax.merge_lora, rlx_jax.save_lora)"
    return f"the model was loaded with {edit}"


def is_artifact(path: object) -> bool:
    """Return whether a path names an artifact, or is a file that begins as one does."""
    if not isinstance(path, str | os.PathLike):
        return False
    name = os.fsdecode(path)
    return name.endswith(SUFFIX) or (os.path.isfile(name) and is_archive(name))


def choose_class(checkpoint: Checkpoint, recipe: Any, has_adapter: bool) -> type[LoadedModel]:
    """Return the class of the model that a recipe of a checkpoint becomes.

    An encoder that makes a vector for each token is a `MultiVectorEncoder`. A classifier with one label is a
    `Reranker` if it is a CrossEncoder of sentence-transformers, or a text encoder and the label is no regression.
    """
    head, pipeline, pretrained = getattr(recipe, "head", None), checkpoint.pipeline, checkpoint.pretrained
    pools_logits = pipeline is not None and pipeline.reads_logits
    # A decoder without its head serves as an encoder, for embeddings.
    is_headless = getattr(recipe, "hidden_only", False) and head is None
    kind = "encoder" if pools_logits or is_headless else pretrained.kind
    if has_adapter and head is not None and not pools_logits:  # the adapter may bring another head
        kind = KINDS[head.task]
    if kind == "encoder" and checkpoint.multi_vector is not None and checkpoint.head:
        return MultiVectorEncoder
    if kind == "classifier" and len(recipe.head.labels) == 1:
        scores_pairs = isinstance(pretrained.recipe, EncoderFlow) and recipe.head.problem != REGRESSION
        return Reranker if checkpoint.cross_encoder or scores_pairs else Classifier
    return CLASSES[kind]


def check_kind(checkpoint: Checkpoint) -> None:
    """Check that `load` has a class for a checkpoint, and warn if it leaves out the head of a task.

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
    if pipeline is not None and pretrained.kind != ("masked_lm" if pipeline.reads_logits else "encoder"):
        raise UnsupportedError(
            f"{quote(folder.path)}: modules.json lists modules of sentence-transformers after a model of kind "
            f"{quote(pretrained.kind)}; supported are encoders of texts, decoders of rlx_jax without their head, and, "
            "with SpladePooling, masked language models with their head"
        )
    # With a pipeline, sentence-transformers leaves the head out too.
    if pipeline is None and pretrained.head_keys and checkpoint.head:
        warnings.warn(
            f"{quote(folder.path)}: only the encoder is loaded, and not the head of its task, which is not built: "
            f"{len(pretrained.head_keys)} weights are left out, {listing(pretrained.head_keys)}",
            RlxWarning,
            stacklevel=4,
        )


def with_compute_dtype(dtype: Any, profile: ProfileLike | None) -> CompileProfile:
    """Return a profile, by default the default profile, with another compute dtype.

    Raises:
        ProfileError: models cannot compute in that dtype.
    """
    dtype_name = "auto" if dtype == "auto" else short_name(as_dtype(dtype, "dtype: "))
    if dtype_name not in ("auto", "f32", "bf16", "f16"):
        raise ProfileError(f"dtype: models compute in f32, bf16 or f16, got {shown(dtype)}")
    base = CompileProfile.of(CompileProfile() if profile is None else profile)
    return base.replace(precision={"compute": dtype_name})


def open_causal(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> CausalLM:
    """Return a recipe as a `CausalLM`, with the tokenizer and the special ids of the checkpoint.

    Raises:
        ConfigError: an id that ends or begins a row is not in the model's vocabulary.
    """
    folder, tokenizer, pretrained = checkpoint.folder, checkpoint.tokenizer, checkpoint.pretrained
    if tokenizer is not None:  # it has read the ids from the same files
        eos, bos = tokenizer.eos_ids, tokenizer.bos_id
    else:
        eos, bos = config_token_ids(folder, "eos"), next(iter(config_token_ids(folder, "bos")), None)
    for field, ids in (("eos_token_id", eos), ("bos_token_id", () if bos is None else (bos,))):
        if any(i >= pretrained.vocab_size for i in ids):
            where = f"{quote(folder.path)}: {field}"
            raise ConfigError(f"{where} is {list(ids)}; expected ids in [0, {pretrained.vocab_size})")
    return CausalLM(
        checkpoint.flow(recipe), tokenizer=tokenizer, eos_ids=eos, bos_id=bos,
        max_positions=pretrained.max_positions, **options.compile_options(),
    )  # fmt: skip


def open_encoder(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> Encoder:
    """Return a recipe as an `Encoder`, with the tokenizer and the sentence-transformers modules of the checkpoint."""
    pretrained, tokenizer = checkpoint.pretrained, checkpoint.tokenizer
    return Encoder(
        checkpoint.flow(recipe), tokenizer=tokenizer, pipeline=checkpoint.pipeline,
        padding=text_padding(pretrained.recipe, tokenizer), max_positions=pretrained.max_positions,
        **options.compile_options(),
    )  # fmt: skip


def open_multi_vector(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> MultiVectorEncoder:
    """Return a recipe as a `MultiVectorEncoder`."""
    encoder = open_encoder(checkpoint, recipe, options)
    assert checkpoint.multi_vector is not None
    return MultiVectorEncoder(encoder, checkpoint.multi_vector.with_projection(checkpoint.weights))


def open_head(kind: type[H], checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> H:
    """Return a recipe with a head as the class of its task, with the tokenizer of the checkpoint."""
    pretrained, tokenizer = checkpoint.pretrained, checkpoint.tokenizer
    settings = checkpoint.cross_encoder if kind is Classifier else None
    return kind(
        checkpoint.flow(recipe), head=recipe.head, tokenizer=tokenizer,
        padding=text_padding(pretrained.recipe, tokenizer), max_positions=pretrained.max_positions,
        max_seq_length=settings.max_seq_length if settings else None, **options.compile_options(),
    )  # fmt: skip


def open_reranker(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> Reranker:
    """Return a recipe with a head of one label as a `Reranker`."""
    classifier, settings = open_head(Classifier, checkpoint, recipe, options), checkpoint.cross_encoder
    if settings is None:
        return Reranker(classifier)
    template = None
    if settings.message_format and checkpoint.tokenizer is not None:
        template = PairTemplate(
            checkpoint.tokenizer, None, classifier.encoder.reader.max_text_tokens,
            settings.message_format == "structured", settings.variables,
        )  # fmt: skip
    return Reranker(classifier, settings.activation, prompts=settings.prompts, template=template)


def open_vision(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> VisionEncoder:
    """Return a recipe as a `VisionEncoder`, with the image processor of the checkpoint."""
    return VisionEncoder(checkpoint.flow(recipe), processor=checkpoint.processor, **options.compile_options())


def open_image_classifier(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> ImageClassifier:
    """Return a recipe with a head as an `ImageClassifier`, with the image processor of the checkpoint."""
    flow = checkpoint.flow(recipe)
    return ImageClassifier(flow, head=recipe.head, processor=checkpoint.processor, **options.compile_options())


def open_dual(checkpoint: Checkpoint, recipe: Any, options: OpenOptions) -> DualEncoder:
    """Return a recipe of two towers as a `DualEncoder`, with the tokenizer and image processor of the checkpoint."""
    return DualEncoder(
        recipe.of("text"), recipe.of("vision"), similarity=recipe.of("similarity"), tokenizer=checkpoint.tokenizer,
        processor=checkpoint.processor, padding=text_padding(recipe, checkpoint.tokenizer), **options.compile_options(),
    )  # fmt: skip


LoadedModel = (
    CausalLM | Encoder | MultiVectorEncoder | HeadModel | Reranker | VisionEncoder | ImageClassifier | DualEncoder
)
# The class of each kind of checkpoint; see `choose_class`.
CLASSES: dict[str, type[LoadedModel]] = {
    "causal": CausalLM, "encoder": Encoder, "classifier": Classifier, "vision": VisionEncoder,
    "image_classifier": ImageClassifier, "dual": DualEncoder, "token_classifier": TokenClassifier,
    "question_answerer": QuestionAnswerer, "masked_lm": MaskedLM,
}  # fmt: skip
LOADERS: dict[type[LoadedModel], Callable[[Checkpoint, Any, OpenOptions], LoadedModel]] = {
    CausalLM: open_causal, Encoder: open_encoder, MultiVectorEncoder: open_multi_vector, Reranker: open_reranker,
    VisionEncoder: open_vision, ImageClassifier: open_image_classifier, DualEncoder: open_dual,
    **{cls: partial(open_head, cls) for cls in (Classifier, TokenClassifier, QuestionAnswerer, MaskedLM)},
}  # fmt: skip


def text_padding(recipe: Any, tokenizer: Tokenizer | None) -> tuple[int, int] | None:
    """Return the length that texts of a recipe are padded to, and the pad id, from the tokenizer if it has one.

    None means that any length will do, as the model ignores padding.
    """
    padding: tuple[int, int] | None = getattr(recipe, "padding", None)  # encoders of plugins may not have the attribute
    if padding is not None and tokenizer is not None and tokenizer.pad_id is not None:
        return padding[0], tokenizer.pad_id
    return padding
