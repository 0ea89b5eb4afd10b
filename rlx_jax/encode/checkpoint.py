"""A checkpoint as a value: a folder, or a model of the Hub, whose parts are each opened when they are first used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from rlx_jax.encode.images import ImageProcessor, load_processor
from rlx_jax.encode.sentence import SentencePipeline, load_pipeline
from rlx_jax.errors import ConfigError, check_keywords, quote, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.io.folder import Folder, open_folder
from rlx_jax.ir import plugins
from rlx_jax.models.config import Fields
from rlx_jax.models.families import Family, Pretrained, bound, family_of, with_ignored
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.source import WeightSource, open_headers, open_with
from rlx_jax.weights.views import MarkedSource

# The options of reading weights.
READING = ("strict", "on_nonfinite", "links", "verify", "subtree", "max_bytes")


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face or sentence-transformers directory, or a model of the Hub. Only what is used is read and fetched.

    Attributes:
        root: the directory.
        options: how it is opened.
        ignore_fields: fields of `config.json` that are not refused; see `rlx_jax.load`.
        as_task: the modules of sentence-transformers count: they say where the model is, and that it has no head.
        headers: of the weights only names, shapes and dtypes are fetched.
    """

    root: Folder
    options: OpenOptions = OpenOptions()
    ignore_fields: Iterable[str] = ()
    as_task: bool = True
    headers: bool = False

    @cached_property
    def pipeline(self) -> SentencePipeline | None:
        """The modules of sentence-transformers, if there are any."""
        return load_pipeline(self.root) if self.as_task else None

    @property
    def inside(self) -> str:
        """The directory in `root` of the weights and their `config.json`; "" for itself."""
        return self.pipeline.transformer if self.pipeline else ""

    @cached_property
    def folder(self) -> Folder:
        """That directory."""
        return self.root.below(self.inside)

    @cached_property
    def _known(self) -> tuple[Fields, Family | plugins.Opens]:
        return family_of(self.folder, self.ignore_fields, headless=self.pipeline is not None)

    @property
    def config(self) -> Fields:
        """`config.json`.

        Raises:
            ConfigError: it is malformed. MissingFileError: there is none. UnsupportedError: as `family`.
        """
        return self._known[0]

    @property
    def family(self) -> Family | plugins.Opens:
        """The family that the config names.

        Raises:
            UnsupportedError: none that is built; or the directory is of another kind, such as GGUF files.
        """
        return self._known[1]

    @cached_property
    def weights(self) -> WeightSource:
        """The weights; errors as `open_weights`. Nothing of them is fetched before the family is known to be built."""
        if self.family and self.headers:
            return open_headers(self.folder)
        source = open_with(self.folder, self.options)
        return MarkedSource(source, "lacking") if self.options.missing == "init" else source

    @cached_property
    def pretrained(self) -> Pretrained:
        """The family's recipe for the config, bound to the weights, and what the model is for.

        Raises:
            MissingWeightError, WeightShapeError: the weights contradict the config.
        """
        return bound(self.folder, self.config, self.family, self.weights)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one; errors as `load_tokenizer`."""
        return load_tokenizer(self.folder, lowercase=bool(self.pipeline and self.pipeline.do_lower_case))

    @cached_property
    def processor(self) -> ImageProcessor | None:
        """The image processor, if there is one; errors as `load_processor`."""
        return load_processor(self.folder, self.pretrained.images)

    def bind(self, recipe: Any) -> Any:
        """A recipe with the weights of this checkpoint, which is of the same config.

        How the weights are stored is the checkpoint's matter too: a prefix of their keys, a head beside a tied
        embedding. What has no config of its own, such as a function that returns a flow, stays as it is.

        Raises:
            ConfigError: the configs differ; the message names the fields.
        """
        own: Any = self.pretrained.recipe
        if not hasattr(recipe, "config"):
            return with_ignored(recipe, self.pretrained.ignored)
        got, want, remedy = recipe.config, own.config, "make it with rlx_jax.recipe_for of that checkpoint"
        if type(got) is not type(want):
            raise ConfigError(
                f"the recipe {quote(recipe.name)} has a {type(got).__name__}, the checkpoint a {type(want).__name__}; "
                f"{remedy}"
            )
        names = [f.name for f in fields(want) if f.name != "tie_word_embeddings"]
        differ = [n for n in names if getattr(got, n) != getattr(want, n)]
        if differ:
            values = ", ".join(f"{n} {shown(getattr(got, n))} (config.json: {shown(getattr(want, n))})" for n in differ)
            raise ConfigError(
                f"the recipe {quote(recipe.name)} is of another config than the checkpoint: {values}; {remedy}"
            )
        stored = ["config", "layout", "prefix", "weights"] + ["hidden_only"] * getattr(own, "hidden_only", False)
        same = replace(recipe, **{n: getattr(own, n) for n in stored if hasattr(recipe, n)})
        return with_ignored(same, self.pretrained.ignored)


def open_checkpoint(
    path: str | os.PathLike[str],
    caller: str,
    options: Mapping[str, Any],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    ignore_fields: Iterable[str] = (),
    as_task: bool = True,
    known: Iterable[str] = (),
) -> Checkpoint:
    """The checkpoint at a path, of which nothing is read yet; `options` of a function `caller` become `OpenOptions`,
    and `known` are the names of its other arguments.

    Raises:
        TypeError: an unknown option, as Python itself does. MissingFileError and others: as `open_folder`.
    """
    named = ["revision", "token", "subfolder", "ignore_fields", *known]
    check_keywords(caller, options, [*named, *(READING if caller != "load" else (f.name for f in fields(OpenOptions)))])
    opened = OpenOptions(**options)
    folder = open_folder(path, revision, token, opened.progress, subfolder)
    return Checkpoint(folder, opened, ignore_fields, as_task)


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    ignore_fields: Iterable[str] = (),
    **options: Any,
) -> ModelFlow:
    """The flow of a Hugging Face directory or of a model of the Hub, bound to its weights: edit it, then
    `rlx_jax.compile(flow)`. `revision`, `token`, `subfolder`, `ignore_fields`: as `rlx_jax.load` has them."""
    where: dict[str, Any] = dict(revision=revision, token=token, subfolder=subfolder, ignore_fields=ignore_fields)
    checkpoint = open_checkpoint(path, "from_pretrained", options, as_task=False, **where)
    return ModelFlow.from_recipe(checkpoint.pretrained.recipe)


def recipe_for(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    subfolder: str = "",
    ignore_fields: Iterable[str] = (),
    **options: Any,
) -> Any:
    """The recipe of a Hugging Face directory (`Llama32Flow`, `Qwen3Flow` …) or of a model of the Hub, bound to its
    weights. `revision`, `token`, `subfolder`, `ignore_fields`: as `rlx_jax.load` has them.

    Change it with hooks or `dataclasses.replace`; then `compile(recipe)`, or `load(path, recipe=recipe)`
    for the tokenizer as well. `load` takes the weights of its own `path`, which may be another checkpoint of the same
    config.
    """
    where: dict[str, Any] = dict(revision=revision, token=token, subfolder=subfolder, ignore_fields=ignore_fields)
    return open_checkpoint(path, "recipe_for", options, as_task=False, **where).pretrained.recipe
