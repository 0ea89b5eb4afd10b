"""Pool hidden states to one vector per text, as a sentence-transformers checkpoint defines it.

Such a checkpoint is a pipeline of modules, listed in `modules.json`: the transformer, a pooling over its tokens, and
often dense layers and a normalization of the vector to unit length. `load_pipeline` reads the files into one
`SentencePipeline`; `pool` computes it, except for the layers of `vector_layers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.encode.pooled import POOLING_MODES, first_token
from rlx_jax.encode.vector_layers import (
    Dense,
    UnitLength,
    VectorLayer,
    output_width,
    read_layer,
    read_linear,
    unit_length,
)
from rlx_jax.errors import ConfigError, RequestError, UnsupportedError, did_you_mean, listing, quote, shown
from rlx_jax.io import files, limits
from rlx_jax.io.files import parse
from rlx_jax.io.folder import Folder
from rlx_jax.ir.types import short_name
from rlx_jax.models.config import Fields
from rlx_jax.text.tokenizer import model_max_length

_PACKAGE = "sentence_transformers"
# How the releases of sentence-transformers spell the supported modules.
_MODULE_TYPES = {
    f"{_PACKAGE}.{path}": kind
    for kind, home, file in (
        ("Transformer", "base.modules", "transformer"),
        ("Pooling", "sentence_transformer.modules", "pooling"),
        ("Dense", "base.modules", "dense"),
        ("LayerNorm", "sentence_transformer.modules", "layer_norm"),
        ("Dropout", "sentence_transformer.modules", "dropout"),
        ("Normalize", "base.modules", "normalize"),
        ("LogitScore", "cross_encoder.modules", "logit_score"),
        ("MultiVectorMask", "multi_vector_encoder.modules", "multi_vector_mask"),
        ("MLMTransformer", "sparse_encoder.modules", "mlm_transformer"),
        ("SpladePooling", "sparse_encoder.modules", "splade_pooling"),
    )
    for path in (
        f"models.{kind}",
        f"models.{kind}.{kind}",
        f"sentence_transformer.modules.{kind}",
        f"sparse_encoder.models.{kind}",
        f"sparse_encoder.models.{kind}.{kind}",
        f"{home}.{kind}",
        f"{home}.{file}.{kind}",
    )
} | {"pylate.models.Dense.Dense": "Dense"}
# The modules that may follow the pooling, in any order.
_LAYERS = ("Dense", "LayerNorm", "Dropout", "Normalize")
SPARSE = "SparseEncoder"

# In the order in which sentence-transformers concatenates several.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_NAMES = {name: name for name in _POOLING_FLAGS.values()} | {"mean_sqrt_len_tokens": "mean_sqrt_len"}

TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Values that sentence-transformers writes by default. Any other value needs code that this package does not have.
_TRANSFORMER_NEUTRAL = {"transformer_task": ("feature-extraction",), "module_output_name": ("token_embeddings",)}
_SPLADE_NEUTRAL = {"transformer_task": ("fill-mask",), "module_output_name": ("token_embeddings",)}
_TRANSFORMER_EMPTY = "model_args model_kwargs tokenizer_args processor_kwargs config_args config_kwargs".split()
_TRANSFORMER_INERT = ("unpad_inputs", "query_length", "document_length", "query_expansion")  # not for `encode`
_TEXT_MODALITY = {"method": "forward", "method_output_name": "last_hidden_state"}
LOGITS_MODALITY = {"method": "forward", "method_output_name": "logits"}


@dataclass(frozen=True)
class SentencePipeline:
    """What a checkpoint does with a text before and after its transformer.

    Attributes:
        pooling: how token vectors become one; the results of several modes are concatenated in this order. Modes:
            `cls`, `max`, `mean`, `mean_sqrt_len` (sum over the root of the count), `weightedmean` (weights 1, 2, 3, …),
            `lasttoken`; of the logits of a masked language model `splade_max` and `splade_sum`, which reduce
            log(1 + relu(x)), and `splade_max_log1p` and `splade_sum_log1p`, which take log(1 + x) of that first.
        layers: applied to the pooled vector in turn.
        normalize: divide by the Euclidean length, after the layers.
        max_seq_length: maximum length of a text in tokens, special ones included, that the transformer reads; None if
            the checkpoint has no limit. The model's number of positions may be lower.
        do_lower_case: lower the text first: `load_tokenizer(..., lowercase=True)`.
        prompts: texts to put in front of each text, by name, such as `query` and `document`.
        default_prompt_name: the prompt that `embed` uses when it gets neither `prompt_name` nor `prompt`.
        include_prompt: whether pooling reads the tokens of the prompt. The transformer always does.
        width: size of a token vector, if the checkpoint names it.
        transformer: the transformer's directory, relative to the checkpoint; `""` is the checkpoint itself.
        is_sparse: whether most numbers of a vector are zero, as `Encoder.embed_sparse` expects.
        max_active_dims: the number of values of a sparse vector that are kept, the largest; None: all.
        truncate_dim: the number of columns that `embed` returns by default; None: all.
        token_weight: the layer from hidden states to weights of tokens, of bge-m3.
        token_layers: the layers from hidden states to vectors of tokens, of bge-m3.
    """

    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    layers: tuple[VectorLayer, ...] = ()
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict, hash=False)
    default_prompt_name: str | None = None
    include_prompt: bool = True
    width: int | None = None
    transformer: str = ""
    is_sparse: bool = False
    max_active_dims: int | None = None
    truncate_dim: int | None = None
    token_weight: Dense | None = None
    token_layers: tuple[VectorLayer, ...] = ()

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.pooling if mode not in POOLING_MODES]
        if unknown or not self.pooling:
            raise ConfigError(f"pooling: expected some of {listing(POOLING_MODES)}, found {listing(unknown) or 'none'}")
        if self.default_prompt_name is not None and self.default_prompt_name not in self.prompts:
            names = listing(self.prompts) or "none"
            raise ConfigError(f"default_prompt_name is {shown(self.default_prompt_name)}; prompts has {names}")

    @property
    def reads_logits(self) -> bool:
        """Whether it pools the logits of a masked language model."""
        return self.pooling[0].startswith("splade")

    @property
    def pooling_only(self) -> SentencePipeline:
        """The pipeline up to its layers, which `pool` computes."""
        return replace(self, layers=(), normalize=False) if self.layers else self

    @property
    def layers_after_pooling(self) -> tuple[VectorLayer, ...]:
        """What is left to apply to the vectors of `pooling_only`."""
        return (*self.layers, *([UnitLength()] if self.normalize else [])) if self.layers else ()

    def choose_prompt(self, name: str | None = None, text: str | None = None) -> str:
        """Return the text to put in front of each text of a request.

        Args:
            name: one of `prompts`.
            text: the prompt itself; `""` is none. Without `name` and `text` it is the default prompt.

        Raises:
            RequestError: both are given, one is no string, or there is no prompt of that name.
        """
        if name is not None and text is not None:
            raise RequestError("prompt_name and prompt both choose the prompt; pass one of them")
        for argument, value in (("prompt_name", name), ("prompt", text)):
            if not isinstance(value, str | None):
                raise RequestError(f"{argument} is {shown(value)}; expected a str or None")
        name = self.default_prompt_name if name is None else name
        if text is not None or name is None:
            return text or ""
        if name not in self.prompts:
            available = f"the model has {listing(self.prompts)}" if self.prompts else "the model has no prompts"
            advice = did_you_mean(name, self.prompts) or "; prompt= takes the text itself"
            raise RequestError(f"there is no prompt_name {quote(name)}; {available}{advice}")
        return self.prompts[name]


def load_pipeline(directory: str | os.PathLike[str] | Folder) -> SentencePipeline | None:
    """Return the pipeline of a sentence-transformers checkpoint, or None if it has no `modules.json`.

    Raises:
        ConfigError: a file is malformed, contradicts itself or another one.
        PathEscapeError: a module's path, or a link, leads out of the directory.
        MissingFileError: the pooling module has no `config.json`.
        UnsupportedError: the modules are not transformer, pooling, then dense layers, layer norms, dropout and
            normalizations in any order; or one has a setting that needs more; the message names it.
        LimitError: a file is too large.
    """
    folder = Folder.from_path(directory)
    modules = read_modules(folder)
    if modules is None:
        return None
    where = folder.where("modules.json")
    kinds = [kind for kind, _ in modules]
    if is_cross_encoder(folder):
        return None
    is_splade = kinds[1:] == ["SpladePooling"] and kinds[0] in ("Transformer", "MLMTransformer")
    if not is_splade and (kinds[:2] != ["Transformer", "Pooling"] or not {*kinds[2:]} <= {*_LAYERS}):
        raise UnsupportedError(
            f"{where}: modules {listing(kinds)}; supported are 'Transformer', 'Pooling', then any of "
            f"{listing(_LAYERS)}; or 'Transformer', 'SpladePooling'"
        )
    paths = [path for _, path in modules]
    _fetch_settings(folder, paths)
    about = module_fields(folder, "", "config_sentence_transformers.json")
    max_active_dims = about.integer_or_null("max_active_dims", None)
    pooling: tuple[str, ...]
    if is_splade:
        transformer = transformer_settings(folder, paths[0], LOGITS_MODALITY, _SPLADE_NEUTRAL)
        pooling, width, include_prompt = (_splade_mode(module_fields(folder, paths[1], "config.json")),), None, True
    else:
        transformer = transformer_settings(folder, paths[0])
        pooling, width, include_prompt = _pooling_settings(folder, paths[1])
    layers = [layer for kind, path in modules[2:] if (layer := read_layer(folder, kind, path)) is not None]
    output_width(layers, None if width is None else width * len(pooling), where)
    normalize = bool(layers) and layers[-1] == UnitLength()
    is_sparse = about.raw("model_type") == SPARSE
    prompts, default_prompt_name = read_prompts(folder, SPARSE if is_sparse else None)
    token_vector = read_linear(folder, "colbert_linear")
    return SentencePipeline(
        pooling=pooling,
        normalize=normalize,
        layers=tuple(layers[:-1] if normalize else layers),
        max_seq_length=transformer.max_seq_length,
        do_lower_case=transformer.do_lower_case,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        include_prompt=include_prompt,
        width=width,
        transformer=paths[0],
        is_sparse=is_sparse,
        max_active_dims=max_active_dims,
        truncate_dim=None if is_sparse else about.integer_or_null("truncate_dim", None),
        token_weight=read_linear(folder, "sparse_linear", "ReLU"),
        token_layers=() if token_vector is None else (token_vector, UnitLength()),
    )


def is_cross_encoder(folder: Folder) -> bool:
    """Whether the directory was written by a CrossEncoder of a release that lists modules."""
    return folder.json("config_sentence_transformers.json").get("model_type") == "CrossEncoder"


def pool(hidden: jax.Array, keep: jax.Array, pipeline: SentencePipeline, skip: jax.Array | int = 0) -> jax.Array:
    """Return one vector for each row of token vectors. It is pure; the caller jits it.

    A row without any token gives zeros.

    Args:
        hidden: `[B, S, H]` floats; the arithmetic is float32.
        keep: `[B, S]` bool, True at real tokens. Values of `hidden` at other tokens, NaN included, have no influence.
        pipeline: the pooling modes, and whether to normalize.
        skip: int32 scalar: number of the first real tokens of each row to leave out, which are a prompt.

    Returns:
        `[B, H · len(pipeline.pooling)]` float32.

    Raises:
        RequestError: the pipeline has layers, or `keep` is not `[B, S]` bool.
    """
    if pipeline.layers:
        raise RequestError("pool: the pipeline has layers; pass its pooling_only")
    if keep.dtype != jnp.bool_ or hidden.ndim != 3 or keep.shape != hidden.shape[:2]:
        raise RequestError(
            f"pool: expected hidden [B, S, H] and keep [B, S] bool, found "
            f"{short_name(hidden.dtype)}{list(hidden.shape)} and {short_name(keep.dtype)}{list(keep.shape)}"
        )
    keep, position = _skip_tokens(keep, skip)
    return _pool_finite(jnp.where(keep[:, :, None], hidden.astype(jnp.float32), 0.0), keep, position, pipeline)


def _skip_tokens(keep: jax.Array, skip: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Return `keep` without the first `skip` tokens of each row, and the positions from the row's first token."""
    position = jnp.arange(keep.shape[1])[None, :] - first_token(keep)[:, None]
    return keep & (position >= skip), position


def _pool_finite(tokens: jax.Array, keep: jax.Array, position: jax.Array, pipeline: SentencePipeline) -> jax.Array:
    """Return `pool` of float32 tokens, of which those that are not kept are finite."""
    pooled = jnp.concatenate([POOLING_MODES[mode](tokens, keep, position) for mode in pipeline.pooling], axis=1)
    return unit_length(pooled) if pipeline.normalize else pooled


def pool_segments(
    hidden: jax.Array, segments: jax.Array, slots: int, pipeline: SentencePipeline, skip: jax.Array | int = 0
) -> jax.Array:
    """Return pooled vectors of rows that contain several texts: `[B, slots, H · len(pipeline.pooling)]` float32.

    Args:
        hidden: `[B, S, H]` floats.
        segments: `[B, S]` int32: 1, 2, 3 … at the tokens of each text of a row, up to `slots`, and 0 elsewhere.
        slots: number of vectors per row; those without a text are zeros.
        pipeline, skip: as in `pool`; `skip` counts from the start of each text.

    Values of a text that are not finite can spoil the vectors of its row.
    """
    numbers = jnp.arange(1, slots + 1, dtype=segments.dtype)
    keep = segments[:, None, :] == numbers[None, :, None]
    tokens = jnp.where((segments > 0)[:, :, None], hidden.astype(jnp.float32), 0.0)

    def pool_text(keep: jax.Array) -> jax.Array:
        return _pool_finite(tokens, *_skip_tokens(keep, skip), pipeline)

    pooled: jax.Array = jax.vmap(pool_text, in_axes=1, out_axes=1)(keep)
    return pooled


# -- files -------------------------------------------------------------------------------------


def read_modules(folder: Folder) -> list[tuple[str, str]] | None:
    """Return the (kind, path) of each module; None if there is no `modules.json`."""
    where = folder.where("modules.json")
    raw = folder.read("modules.json", limits.bound("MAX_CONFIG_BYTES"), ConfigError)
    if raw is None:
        return None
    entries = parse(raw, where, ConfigError, limits.bound("MAX_JSON_VALUES"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: expected an array of objects")
    modules = [_module(Fields(entry, f"{where}: module {i}"), i) for i, entry in enumerate(entries)]
    names = [str(entry.get("name", i)) for i, entry in enumerate(entries)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: two modules have one name: {listing(names)}")
    return modules


def _fetch_settings(folder: Folder, paths: Sequence[str]) -> None:
    """Fetch the files of a Hub model that are read next in one go: the settings of the modules and of the model."""
    transformer = (_module_file(paths[0], file) for file in TRANSFORMER_FILES)
    settings = next((name for name in transformer if folder.hub_file(name) is not None), None)
    names = [_module_file(path, "config.json") for path in paths if path or path == paths[0]]
    names += ["config_sentence_transformers.json"] + ([] if settings is None else [settings])
    folder.fetch(*names, bounds=dict.fromkeys(names, limits.bound("MAX_CONFIG_BYTES")))


def _module(c: Fields, position: int) -> tuple[str, str]:
    """Return the (kind, path) of entry number `position` of `modules.json`."""
    path, kind = c.text("path"), c.text("type")
    if path:
        files.check_name(path)
    if c.raw("idx", position) != position:
        raise ConfigError(f"{c.where} has idx {quote(c.raw('idx'))}; the modules run in the listed order")
    if kind not in _MODULE_TYPES:
        names = ", ".join(dict.fromkeys(_MODULE_TYPES.values()))
        raise UnsupportedError(f"{c.where}: type {quote(kind)}; supported are {_PACKAGE}'s {names}")
    return _MODULE_TYPES[kind], path


def _module_file(path: str, name: str) -> str:
    """Return the name of a file in a module's directory, relative to the checkpoint."""
    return f"{path}/{name}" if path else name


def module_fields(folder: Folder, path: str, name: str) -> Fields:
    """Return the fields of a file of a module; no fields if the file does not exist."""
    name = _module_file(path, name)
    return Fields(folder.json(name), folder.where(name))


def transformer_fields(folder: Folder, path: str) -> Fields:
    """Return the fields of the file with the settings of the transformer module; no fields if there is none."""
    candidates = (module_fields(folder, path, file) for file in TRANSFORMER_FILES)
    return next((c for c in candidates if c.values), Fields({}, ""))


@dataclass(frozen=True)
class TransformerSettings:
    """The settings of a transformer module.

    Attributes:
        max_seq_length, do_lower_case: see `SentencePipeline`.
        message_format: the form of messages for a chat template, `flat` or `structured`; empty for none.
        template_variables: further variables of the chat template.
    """

    max_seq_length: int | None
    do_lower_case: bool
    message_format: str = ""
    template_variables: Mapping[str, Any] = field(default_factory=dict, hash=False)


def transformer_settings(
    folder: Folder, path: str, modality: Mapping[str, str] = _TEXT_MODALITY,
    neutral: Mapping[str, tuple[Any, ...]] = _TRANSFORMER_NEUTRAL, messages: bool = False,
) -> TransformerSettings:  # fmt: skip
    """Return the settings of the transformer module, after checking the others.

    Args:
        folder, path: the checkpoint, and the module's directory.
        modality: what it must do with texts.
        neutral: fields that must have one of these values.
        messages: whether it may read messages by a chat template.
    """
    c = transformer_fields(folder, path)
    for name in _TRANSFORMER_EMPTY:
        if group := c.group(name):
            group.finish(("trust_remote_code",))
    variables: dict[str, Any] = {}
    if processing := c.group("processing_kwargs"):
        if messages and (template := processing.group("chat_template")):
            variables = dict(template.values)
        texts = {name for name in ("text", "common") if processing.values.get(name)}
        processing.finish(processing.values.keys() - texts)
    modalities = c.raw("modality_config", {"text": modality})
    message = modalities.get("message") if isinstance(modalities, dict) else None
    kind = str(message.get("format", "structured")) if isinstance(message, dict) else ""
    is_known = kind in ("flat", "structured")
    is_readable = message is None or messages and is_known and message == {**modality, "format": kind}
    if not isinstance(modalities, dict) or modalities.get("text") != modality or not is_readable:
        raise UnsupportedError(
            f"{c.where}: modality_config is {quote(modalities)}; supported is text by {modality}, and "
            f"{'messages, flat or structured' if messages else 'no message, which is a chat template'}"
        )
    lowercase, length = c.flag("do_lower_case", False), c.integer_or_null("max_seq_length", None, high=2**31 - 1)
    c.finish(_TRANSFORMER_INERT, neutral)
    if length is None:
        length = _default_length(folder, path)
    return TransformerSettings(length, lowercase, kind, variables)


def _default_length(folder: Folder, path: str) -> int | None:
    """Return the tokenizer's length, limited by the number of positions of the model, as newer releases have it."""
    tokenizer, config = (module_fields(folder, path, name) for name in ("tokenizer_config.json", "config.json"))
    length = model_max_length(tokenizer)
    if config.raw("max_position_embeddings", -1) == -1:  # -1 is XLNet's "any"
        return length
    positions = config.integer("max_position_embeddings", high=2**31 - 1)
    return positions if length is None else min(length, positions)


def _splade_mode(c: Fields) -> str:
    """Return the pooling mode of a `SpladePooling` module."""
    strategy = c.choice("pooling_strategy", "max", {"max": "splade_max", "sum": "splade_sum"})
    suffix = c.choice("activation_function", "relu", {"relu": "", "log1p_relu": "_log1p"})
    c.finish(("embedding_dimension", "word_embedding_dimension", "chunk_size"))
    return strategy + suffix


def _pooling_settings(folder: Folder, path: str) -> tuple[tuple[str, ...], int | None, bool]:
    """Return the pooling modes, the size of a token vector if it is known, and `include_prompt`."""
    if not path:
        raise ConfigError(f"{folder.where('modules.json')}: the pooling module needs its own path")
    # Without the file the pooling mode is unknown, and a default could be wrong.
    folder.required_json(_module_file(path, "config.json"))
    c = module_fields(folder, path, "config.json")
    # A file without any flag has the default of sentence-transformers, which is the mean.
    has_flags = any(name.startswith("pooling_mode_") for name in c.values)
    flag_modes = [mode for name, mode in _POOLING_FLAGS.items() if c.flag(name, False)]
    c.finish(name for name in c.values if not name.startswith("pooling_mode_"))
    modes = c.raw("pooling_mode", flag_modes if has_flags else "mean")
    mode_list = [modes] if isinstance(modes, str) else modes
    if not isinstance(mode_list, list) or not mode_list or not all(isinstance(mode, str) for mode in mode_list):
        raise ConfigError(f"{c.where}: expected a pooling mode, found {quote(modes)}; known: {listing(_POOLING_NAMES)}")
    for mode in mode_list:
        if mode not in _POOLING_NAMES:
            raise UnsupportedError(f"{c.where}: pooling mode {quote(mode)}; supported are {listing(_POOLING_NAMES)}")
    width = c.integer_or_null("embedding_dimension", c.integer_or_null("word_embedding_dimension", None))
    include_prompt = c.flag("include_prompt", True)
    return tuple(_POOLING_NAMES[mode] for mode in mode_list), width, include_prompt


def read_prompts(folder: Folder, model_type: str | None = None) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, with null read as an empty prompt, and the name of the default prompt."""
    c = module_fields(folder, "", "config_sentence_transformers.json")
    c.choice("model_type", "SentenceTransformer", {model_type or "SentenceTransformer": ""})
    default, group = c.raw("default_prompt_name"), c.group("prompts") or Fields({}, c.where)
    prompts = {name: "" if text is None else group.text(name) for name, text in group.values.items()}
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ConfigError(f"{c.where}: default_prompt_name is {quote(default)}; prompts has {listing(prompts)}")
    return prompts, default
