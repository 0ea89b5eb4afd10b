"""Define `Checkpoint`: a folder, or a model of the Hub, with parts that are opened when they are first used.

A GGUF file has the config, the tokenizer and the chat template in its metadata. They become the files that a Hugging
Face directory of the same model has, so that everything after this reads one kind of checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_jax import plugins
from rlx_jax.dataclasses import dataclass, fields, replace
from rlx_jax.encode.cross_encoder import CrossEncoderSettings, read_cross_encoder
from rlx_jax.encode.images import ImageProcessor, load_processor
from rlx_jax.encode.multi_vector import STANFORD, TokenSettings, read_multi_vector
from rlx_jax.encode.sentence import SentencePipeline, load_pipeline
from rlx_jax.errors import (
    ConfigError,
    MissingFileError,
    RequestError,
    UnsupportedError,
    check_keywords,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.flow import ModelFlow
from rlx_jax.io.files import check_name
from rlx_jax.io.folder import CONFIG, Folder, open_folder, refuse_hub_options
from rlx_jax.io.hub import ProgressCallback
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import CausalFlow
from rlx_jax.models.encoder import SEQUENCE
from rlx_jax.models.families import Family, Pretrained, family_of, open_pretrained, record_ignored
from rlx_jax.models.hooks import Recipe
from rlx_jax.text.gguf_tokenizer import tokenizer_files
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.gguf import SUFFIX, Gguf, open_gguf, part_names
from rlx_jax.weights.gguf_config import ARCHITECTURE, POOLING
from rlx_jax.weights.gguf_header import MetadataValue
from rlx_jax.weights.source import WeightSource, open_headers, open_with
from rlx_jax.weights.views import MarkedSource

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    RecipeClass = TypeVar("RecipeClass", default=Recipe[Any])
# Files, and fields of config.json, of checkpoints that need more than a model of transformers.
MODULE_FILES = frozenset(("modules.json", "config_sentence_transformers.json"))
MODULE_FIELDS = frozenset(("sentence_transformers", "sbert_ce_default_activation_function"))
# The options of `OpenOptions` that apply to reading weights.
WEIGHT_OPTIONS = ("strict", "on_nonfinite", "links", "verify", "subtree", "max_bytes")


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face or sentence-transformers directory, or a model of the Hub. Only parts in use are read and fetched.

    Attributes:
        root: the directory.
        options: how to open the weights.
        ignore_fields: fields of `config.json` that are not refused; see `rlx_jax.load`.
        use_modules: apply the modules of sentence-transformers, which define where the model is and that it has no
            head.
        headers_only: fetch only names, shapes and dtypes of the weights.
        head: build the head of the model's task, if the family has it.
    """

    root: Folder
    options: OpenOptions = OpenOptions()
    ignore_fields: Iterable[str] = ()
    use_modules: bool = True
    headers_only: bool = False
    head: bool = True

    @cached_property
    def _has_modules(self) -> bool:
        """Whether files or fields of sentence-transformers, or of other code for ColBERT, apply to the directory."""
        config = self.root.json(CONFIG)
        has_any = not (MODULE_FILES.isdisjoint(self.root.names()) and MODULE_FIELDS.isdisjoint(config))
        return self.use_modules and (has_any or STANFORD in str(config.get("architectures")))

    @cached_property
    def pipeline(self) -> SentencePipeline | None:
        """The pipeline of a sentence-transformers checkpoint; None if it is not one."""
        if self.multi_vector is not None:
            return self.multi_vector.pipeline
        return load_pipeline(self.root) if self._has_modules else None

    @cached_property
    def multi_vector(self) -> TokenSettings | None:
        """The settings of a MultiVectorEncoder of sentence-transformers; None if the checkpoint is none."""
        return read_multi_vector(self.root) if self._has_modules else None

    @property
    def model_subfolder(self) -> str:
        """Directory of the weights and their `config.json`, relative to `root`; empty for `root` itself."""
        return self.pipeline.transformer if self.pipeline else ""

    @cached_property
    def folder(self) -> Folder:
        """The directory `model_subfolder` of `root`."""
        return self.root.subfolder(self.model_subfolder)

    @cached_property
    def _config_and_family(self) -> tuple[Fields, Family | plugins.FamilyHandler]:
        """The config and the family, read together. A CrossEncoder is a classifier whatever it names."""
        headless = not self.head or (self.pipeline is not None and not self.pipeline.reads_logits)
        config, family = family_of(self.folder, self.ignore_fields, headless)
        if headless or not self._has_modules:
            return config, family
        settings = read_cross_encoder(self.root, config)
        if settings is None or settings.token_ids:
            return config, family
        names = [name for name in family.architectures if name.endswith(f"For{SEQUENCE}")]
        if not names:
            raise UnsupportedError(f"{config.where}: a CrossEncoder of a family without a classifier of texts")
        if config.raw("architectures", [])[:1] in ([name] for name in names):
            return config, family
        return replace(config, values={**config.values, "architectures": names[:1]}), family

    @cached_property
    def cross_encoder(self) -> CrossEncoderSettings | None:
        """The settings of a CrossEncoder of sentence-transformers; None if the checkpoint is none."""
        return read_cross_encoder(self.root, self.config) if self._has_modules else None

    @property
    def config(self) -> Fields:
        """Fields of `config.json`.

        Raises:
            ConfigError: it is malformed. MissingFileError: there is none. UnsupportedError: as `family`.
        """
        return self._config_and_family[0]

    @property
    def family(self) -> Family | plugins.FamilyHandler:
        """The family that the config names.

        Raises:
            UnsupportedError: the family is not built; or the directory is of another kind, such as GGUF files.
        """
        return self._config_and_family[1]

    @cached_property
    def weights(self) -> WeightSource:
        """The source of the weights, opened once the family is known to be supported; errors as `open_weights`."""
        # Reading `family` first refuses an unsupported model before anything large is fetched.
        if self.family and self.headers_only:
            return open_headers(self.folder)
        source = open_with(self.folder, self.options)
        return MarkedSource(source, "incomplete") if self.options.missing == "init" else source

    @cached_property
    def pretrained(self) -> Pretrained:
        """The family's recipe for the config, bound to the weights, with the kind of the model.

        Weights are opened, and fetched for a model of the Hub, but their values are not read yet.

        Raises:
            MissingWeightError, WeightShapeError: the weights contradict the config.
        """
        pretrained = open_pretrained(self.folder, *self._config_and_family, self.weights)
        settings = self.cross_encoder if self.head else None
        if settings is None or not settings.token_ids:
            return pretrained
        recipe = pretrained.recipe
        if not isinstance(recipe, CausalFlow) or pretrained.kind != "causal":
            raise UnsupportedError(f"{quote(self.folder.path)}: LogitScore in modules.json needs a language-model head")
        return replace(pretrained, recipe=recipe.with_token_score(settings.token_ids), kind="classifier")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if there is none. Errors as `load_tokenizer`."""
        return load_tokenizer(self.folder, lowercase=bool(self.pipeline and self.pipeline.do_lower_case))

    @cached_property
    def processor(self) -> ImageProcessor | None:
        """The image processor; None if there is none. Errors as `load_processor`."""
        return load_processor(self.folder, self.pretrained.processor_prefix)

    def flow(self, recipe: Any) -> ModelFlow:
        """Return the flow of a recipe; for the checkpoint's own, the one with checked weights."""
        checked = self.pretrained.checked
        return checked[1] if checked is not None and checked[0] is recipe else ModelFlow.from_recipe(recipe)

    def bind(self, recipe: Any) -> Any:
        """Return a recipe bound to the weights of this checkpoint, which must have the same config.

        The recipe also takes over how this checkpoint stores its weights: a prefix of the keys, a separate head
        although the embedding is tied. A recipe without a config, such as a function that returns a flow, is returned
        unchanged.

        Raises:
            ConfigError: the configs differ; the message names the fields.
        """
        stored: Any = self.pretrained.recipe
        if not hasattr(recipe, "config"):
            return record_ignored(recipe, self.pretrained.ignored_fields)
        cfg, ref, remedy = recipe.config, stored.config, "make it with rlx_jax.recipe_for of that checkpoint"
        if type(cfg) is not type(ref):
            raise ConfigError(
                f"the recipe {quote(recipe.name)} has a {type(cfg).__name__}, the checkpoint a {type(ref).__name__}; "
                f"{remedy}"
            )
        # A tied embedding with a separate head in the checkpoint is a matter of storage, so that field may differ.
        names = [f.name for f in fields(ref) if f.name != "tie_word_embeddings"]
        mismatches = [n for n in names if getattr(cfg, n) != getattr(ref, n)]
        values = [f"{n} {shown(getattr(cfg, n))} (config.json: {shown(getattr(ref, n))})" for n in mismatches]
        head, other_head = getattr(stored, "head", None), getattr(recipe, "head", None)
        if head is not None and other_head is not None:
            values += [
                f"{n} of its head {shown(getattr(other_head, n))} (config.json: {shown(getattr(head, n))})"
                for n in ("labels", "problem", "padding_id")
                if getattr(other_head, n) != getattr(head, n)
            ]
        if values:
            raise ConfigError(
                f"the recipe {quote(recipe.name)} is of another config than the checkpoint: {', '.join(values)}; "
                f"{remedy}"
            )
        shared = ["config", "layout", "prefix", "weights"] + ["hidden_only"] * getattr(stored, "hidden_only", False)
        # A recipe may bring a new head for a checkpoint without one, unless the caller loads without a head.
        shared += ["head"] * (head is not None or not self.head)
        rebound = replace(recipe, **{n: getattr(stored, n) for n in shared if hasattr(recipe, n)})
        return record_ignored(rebound, self.pretrained.ignored_fields)


def check_expected(caller: str, expected: Any) -> None:
    """Check that the argument `expect` of `load` or `recipe_for` is a class, or None."""
    if not isinstance(expected, type | None):
        raise RequestError(f"{caller}: expect is {shown(expected)}; expected a class, such as rlx_jax.Encoder")


def check_class(caller: str, path: object, cls: type, expected: type | None) -> None:
    """Check that the result of `load` or `recipe_for` is of the class that the caller expects; None is any class.

    Raises:
        RequestError: it is of another class.
    """
    if expected is not None and not issubclass(cls, expected):
        raise RequestError(f"{caller}: {shown(path)} is of class {cls.__name__}; expected {expected.__name__}")


def open_model_folder(
    path: str | os.PathLike[str] | Folder, revision: str | None = None, token: str | bool | None = None,
    progress: ProgressCallback | None = None, subfolder: str = "", file: str | None = None,
) -> Folder:  # fmt: skip
    """Return the folder of a checkpoint; see `open_folder`, and `rlx_jax.load` for `file`.

    Raises:
        MissingFileError: the directory or the model has no such `file`.
        RequestError: `file` is not the name of a GGUF file, or `path` is itself a file.
        Others: as `open_folder` and `open_gguf`.
    """
    is_file = isinstance(path, str | os.PathLike) and not os.path.isdir(path) and Gguf().detect(os.fspath(path))
    if not is_file and file is None:
        return open_folder(path, revision, token, progress, subfolder)
    if is_file:
        if file is not None or subfolder:
            raise RequestError(f"{quote(path)} is a file; file= and subfolder= are for directories and the Hub")
        refuse_hub_options(revision, token, f"{quote(path)} is a file on this machine", RequestError)
        return _gguf_folder(Path(os.fspath(path)))  # type: ignore[arg-type]
    if not isinstance(file, str) or not file.lower().endswith(SUFFIX):
        raise RequestError(f"file: expected the name of a {SUFFIX} file, got {shown(file)}")
    check_name(file)
    folder = open_folder(path, revision, token, progress, subfolder)
    directory, name = os.path.split(file)
    names = folder.names(directory)
    if name not in names:
        candidates = [n for n in names if n.lower().endswith(SUFFIX)]
        hint = f"{did_you_mean(name, candidates)}; there is {listing(candidates, 8) or 'none'}"
        raise MissingFileError(f"{folder.where(file)}: no such file{hint}")
    folder.fetch(*(os.path.join(directory, part) for part in part_names(name)))
    return _gguf_folder(folder.path / file)


def _gguf_folder(path: Path) -> Folder:
    """Return the folder of a GGUF file, with the files that its metadata describe."""
    with open_gguf(os.fspath(path)) as source:
        folder = described_folder(path, source.config, source.header.metadata)
        return replace(folder, header=tuple(part.header for part in source.files))


def described_folder(path: Path, config: Mapping[str, Any], metadata: Mapping[str, MetadataValue]) -> Folder:
    """Return the folder of a file with this metadata, of which `config` is the part about the model."""
    contents: dict[str, Any] = {**tokenizer_files(metadata, quote(path)), **_pooling_files(metadata)}
    contents["config.json"] = {**config, **contents.get("config.json", {})}
    return Folder(path, contents={name: json.dumps(content).encode() for name, content in contents.items()})


def _pooling_files(metadata: Mapping[str, MetadataValue]) -> dict[str, Any]:
    """Return the files of sentence-transformers for a model that pools its hidden states; none for any other."""
    pooling_type = metadata.get(f"{metadata[ARCHITECTURE]}.pooling_type")
    if not isinstance(pooling_type, int) or pooling_type not in POOLING:
        return {}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))
    ]
    return {"modules.json": modules, "1_Pooling/config.json": {"pooling_mode": POOLING[pooling_type]}}


def open_checkpoint(
    path: str | os.PathLike[str], caller: str, options: Mapping[str, Any], *, revision: str | None = None,
    token: str | bool | None = None, subfolder: str = "", file: str | None = None, ignore_fields: Iterable[str] = (),
    use_modules: bool = True, head: bool = True, other_arguments: Iterable[str] = (),
) -> Checkpoint:  # fmt: skip
    """Return the checkpoint at a path, without reading anything yet.

    Args:
        path: a directory, a GGUF file, or the name of a model of the Hub.
        caller: name of the function that the user called, for messages.
        options: its keyword options, which become `OpenOptions`.
        revision, token, subfolder, file, ignore_fields: as in `rlx_jax.load`.
        use_modules, head: see `Checkpoint`.
        other_arguments: names of the other arguments of `caller`, for messages.

    Raises:
        TypeError: an unknown option, as Python raises it. MissingFileError and others: as `open_folder`.
    """
    if not isinstance(head, bool):
        raise RequestError(f"{caller}: head is {shown(head)}; expected True or False")
    names = ["revision", "token", "subfolder", "file", "ignore_fields", "head", *other_arguments]
    options_of_weights = WEIGHT_OPTIONS if caller != "load" else tuple(f.name for f in fields(OpenOptions))
    check_keywords(caller, options, [*names, *options_of_weights])
    open_options = OpenOptions(**options)
    folder = open_model_folder(path, revision, token, open_options.progress, subfolder, file)
    return Checkpoint(folder, open_options, ignore_fields, use_modules, head=head)


def from_pretrained(
    path: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None, subfolder: str = "",
    file: str | None = None, ignore_fields: Iterable[str] = (), head: bool = True, **options: Any,
) -> ModelFlow:  # fmt: skip
    """Return the flow of a Hugging Face directory, a GGUF file or a model of the Hub, bound to its weights.

    Config and headers are read now, and the weights of a model of the Hub are fetched; values are read by `compile`.
    Edit the flow (`flow.at`, further stages), then call `rlx_jax.compile(flow)`. `revision`, `token`, `subfolder`,
    `file`, `ignore_fields`, `head`: as in `rlx_jax.load`; `options`: as in `rlx_jax.open_weights`.
    """
    checkpoint = open_checkpoint(
        path, "from_pretrained", options, revision=revision, token=token, subfolder=subfolder, file=file,
        ignore_fields=ignore_fields, use_modules=False, head=head,
    )  # fmt: skip
    return checkpoint.flow(checkpoint.pretrained.recipe)


def recipe_for(
    path: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None, subfolder: str = "",
    file: str | None = None, ignore_fields: Iterable[str] = (), head: bool = True,
    expect: type[RecipeClass] | None = None, **options: Any,
) -> RecipeClass:  # fmt: skip
    """Return the recipe (`Llama32Flow`, `Qwen3Flow` …) of a Hugging Face directory or of a model of the Hub.

    It is bound to the checkpoint's weights. Change it with hooks or `dataclasses.replace`; then `compile(recipe)`, or
    `load(path, recipe=recipe)` to get the tokenizer as well. `load` takes the weights of its own `path`, which may be
    another checkpoint of the same config. `revision`, `token`, `subfolder`, `file`, `ignore_fields`, `head`: as
    in `rlx_jax.load`. `expect` is the class of the recipe, such as `rlx_jax.Qwen3Flow`; another class is an error. Type
    checkers take the result for a `Recipe` without it; recipes of plugins may be of other classes.
    """
    check_expected("recipe_for", expect)
    checkpoint = open_checkpoint(
        path, "recipe_for", options, revision=revision, token=token, subfolder=subfolder, file=file,
        ignore_fields=ignore_fields, use_modules=False, head=head, other_arguments=("expect",),
    )  # fmt: skip
    recipe: Any = checkpoint.pretrained.recipe
    check_class("recipe_for", path, type(recipe), expect)
    result: RecipeClass = recipe
    return result
