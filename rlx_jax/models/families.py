"""Which recipe a checkpoint directory asks for, and the flow bound to its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlx_jax.errors import (
    MissingFileError,
    MissingWeightError,
    UnsupportedError,
    WeightShapeError,
    listing,
    quote,
)
from rlx_jax.flow import ModelFlow, ModelRecipe
from rlx_jax.models import bert, llama
from rlx_jax.models.config import Fields, architecture, read_config
from rlx_jax.weights.source import WeightSource, open_weights

Kind = Literal["causal", "encoder"]


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint as a recipe bound to its weights: what it is for, and how many positions it knows."""

    recipe: ModelRecipe
    kind: Kind
    vocab_size: int
    max_positions: int


def _llama(config: Fields, source: WeightSource) -> Pretrained:
    c = llama.LlamaConfig.from_hf(config)
    # A head that is stored beside a tied embedding is the head: it may differ, and comparing would read data.
    if c.tie_word_embeddings and source.has(llama.HEAD):
        c = replace(c, tie_word_embeddings=False)
    recipe = llama.Llama32Flow(c, weights=checked(source, llama.weight_specs(c)))
    return Pretrained(recipe, "causal", c.vocab_size, c.max_position_embeddings)


def _bert(config: Fields, source: WeightSource) -> Pretrained:
    c = bert.BertConfig.from_hf(config)
    prefix = "bert" if source.has("bert.embeddings.word_embeddings.weight") else ""
    recipe = bert.BertFlow(c, prefix, weights=checked(source, bert.weight_specs(c, prefix)))
    return Pretrained(recipe, "encoder", c.vocab_size, c.max_position_embeddings)


Opener = Callable[[Fields, WeightSource], Pretrained]

FAMILIES: dict[str, tuple[Opener, tuple[str, ...]]] = {
    "llama": (_llama, ("LlamaForCausalLM",)),
    "bert": (
        _bert,
        (
            "BertModel",
            "BertForMaskedLM",
            "BertForPreTraining",
            "BertForNextSentencePrediction",
            "BertForSequenceClassification",
            "BertForMultipleChoice",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
        ),
    ),
}
"""Recipes by `model_type`, with the architectures they serve."""


def checked(source: WeightSource, shapes: dict[str, Any]) -> WeightSource:
    """The source, after every weight that the config asks for was found with the right shape.

    Raises:
        MissingWeightError: lists what is missing. WeightShapeError: tensor, expected, got.
    """
    missing = [key for key in shapes if not source.has(key)]
    if missing:
        raise MissingWeightError(f"{len(missing)} weights that config.json asks for are missing: {listing(missing)}")
    for key, spec in shapes.items():
        got = tuple(source.spec(key).shape)
        if got != spec.shape:
            raise WeightShapeError(
                f"weight {quote(key)} ({source.where(key)}): config.json asks for {list(spec.shape)}, got {list(got)}"
            )
    return source


def open_pretrained(path: str | os.PathLike[str], **options: Any) -> Pretrained:
    """A Hugging Face directory as a recipe; `options` are those of `open_weights`.

    Raises:
        ConfigError, UnsupportedError: config.json is absurd or asks for what is not handled.
        MissingWeightError, WeightShapeError: the weights contradict it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise MissingFileError(f"{quote(path)} is not a directory")
    config = read_config(directory)
    kind, name = architecture(config)
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedError(f"config.json: model_type {quote(kind)} ({quote(name)}) is not built; known are {known}")
    opener, names = FAMILIES[kind]
    if name and name not in names:
        raise UnsupportedError(
            f"config.json: architecture {quote(name)} is not built; of {kind} there are {', '.join(names)}"
        )
    return opener(config, open_weights(directory, **options))


def from_pretrained(path: str | os.PathLike[str], **options: Any) -> ModelFlow:
    """The flow of a Hugging Face directory, bound to its weights: edit it, then `rlx_jax.compile(flow)`."""
    return open_pretrained(path, **options).recipe.assemble()


def recipe_for(path: str | os.PathLike[str], **options: Any) -> Any:
    """The recipe of a Hugging Face directory (`Llama32Flow`, `BertFlow` …), bound to its weights.

    Change it with hooks or `dataclasses.replace`; then `compile(recipe)`, or `load(path, recipe=recipe)`
    for the checkpoint's tokenizer as well.
    """
    return open_pretrained(path, **options).recipe
