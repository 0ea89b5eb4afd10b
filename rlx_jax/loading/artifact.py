"""Load an artifact of `export` as the class that was exported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlx_jax.encode.answering import QuestionAnswerer
from rlx_jax.encode.classifier import Classifier, Reranker
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.head_model import HeadModel
from rlx_jax.encode.masked import MaskedLM
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.tagging import TokenClassifier
from rlx_jax.errors import ArtifactFormatError, RequestError, listing, quote
from rlx_jax.generate.causal import CausalLM
from rlx_jax.io.archive import SUFFIX, is_archive
from rlx_jax.io.folder import Folder
from rlx_jax.ir.serial import decode
from rlx_jax.models.encoder import TaskHead
from rlx_jax.runtime.compile_flow import finish_models
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.open_artifact import OpenArtifact, frozen_programs, open_artifact
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer

H = TypeVar("H", bound=HeadModel)
# What an artifact can be loaded with: its digest, and a callback. Everything else was decided by the export.
OPTIONS = ("expect_sha256", "progress")


def is_artifact(path: object) -> bool:
    """Return whether a path names an artifact, or is a file that begins as one does."""
    if not isinstance(path, str | os.PathLike):
        return False
    name = os.fsdecode(path)
    return name.endswith(SUFFIX) or (os.path.isfile(name) and is_archive(name))


def load_artifact(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Return the model of an artifact; see `rlx_jax.load`.

    Args:
        path: the file.
        options: the arguments of `load` that the caller passed, by name.

    Raises:
        RequestError: an option that does not apply. Others as `open_artifact`.
    """
    if surplus := [name for name in options if name not in OPTIONS]:
        raise RequestError(
            f"load: {quote(os.fsdecode(path))} is an artifact, which takes {listing(OPTIONS)} and not "
            f"{listing(surplus)}: pass these when the model is loaded for the export"
        )
    artifact = open_artifact(path, options.get("expect_sha256"))
    if artifact.kind not in KINDS:
        raise ArtifactFormatError(f"{artifact.archive.where}: manifest: kind: unknown {quote(artifact.kind)}")
    programs = frozen_programs(artifact, options.get("progress"))
    (model,) = finish_models(programs, artifact.flow.program).values()
    return KINDS[artifact.kind](model, artifact)


def read_tokenizer(artifact: OpenArtifact) -> Tokenizer | None:
    """Return the tokenizer of an artifact; None if it has none."""
    return load_tokenizer(Folder(Path(artifact.archive.path), contents=artifact.files))


def setting(artifact: OpenArtifact, name: str, hint: Any) -> Any:
    """Return one of the settings, decoded as a value of the type `hint`."""
    return decode(hint, artifact.settings.get(name), f"{artifact.archive.where}: manifest: settings.{name}")


def _language_model(model: CompiledModel, artifact: OpenArtifact) -> CausalLM:
    eos, bos = setting(artifact, "eos_ids", tuple[int, ...]), setting(artifact, "bos_id", int | None)
    lm = CausalLM(model, tokenizer=read_tokenizer(artifact), bos_id=bos)
    lm.eos_ids, lm.bos_id = eos, bos  # also where they are empty, and those of the tokenizer are not
    return lm


def _encoder(model: CompiledModel, artifact: OpenArtifact) -> Encoder:
    pipeline = setting(artifact, "pipeline", SentencePipeline | None)
    padding = setting(artifact, "padding", tuple[int, int] | None)
    return Encoder(model, tokenizer=read_tokenizer(artifact), pipeline=pipeline, padding=padding)


def _with_head(cls: type[H], model: CompiledModel, artifact: OpenArtifact) -> H:
    return cls(
        model,
        head=setting(artifact, "head", TaskHead),
        tokenizer=read_tokenizer(artifact),
        padding=setting(artifact, "padding", tuple[int, int] | None),
        max_seq_length=setting(artifact, "max_seq_length", int | None),
    )


def _reranker(model: CompiledModel, artifact: OpenArtifact) -> Reranker:
    return Reranker(_with_head(Classifier, model, artifact), setting(artifact, "activation", str))


KINDS: dict[str, Callable[[CompiledModel, OpenArtifact], Any]] = {
    "model": lambda model, artifact: model,
    "CausalLM": _language_model,
    "Encoder": _encoder,
    "Reranker": _reranker,
    **{cls.__name__: partial(_with_head, cls) for cls in (Classifier, TokenClassifier, QuestionAnswerer, MaskedLM)},
}
