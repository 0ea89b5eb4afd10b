"""Load an artifact of `export` as the class that was exported.

Its manifest is checked first, and its programs are read on demand.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax import export

from rlx_jax import errors
from rlx_jax.compiler.settings import choose_settings, with_model_sharding
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.answering import QuestionAnswerer
from rlx_jax.encode.checkpoint import check_class
from rlx_jax.encode.classifier import Classifier, Reranker
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.head_model import HeadModel
from rlx_jax.encode.masked import MaskedLM
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.tagging import TokenClassifier
from rlx_jax.errors import listing, quote
from rlx_jax.generate.causal import CausalLM
from rlx_jax.io.archive import Archive, Member
from rlx_jax.io.folder import Folder
from rlx_jax.ir.checkpoint_tensor import Key
from rlx_jax.ir.serial import decode
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir.plan import Layout
from rlx_jax.models.encoder import TaskHead
from rlx_jax.runtime.compile_flow import finish_models
from rlx_jax.runtime.export_model import PARAMS
from rlx_jax.runtime.frozen import FlowRecord, FrozenFlow, require_flatbuffers
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer
from rlx_jax.weights.safetensors_format import SafetensorsSource
from rlx_jax.weights.tensor_file import Header, SafetensorsFile, file_identity, read_header

H = TypeVar("H", bound=HeadModel)
# What an artifact can be loaded with: its digest, and a callback. Everything else was decided by the export.
OPTIONS = ("expect_sha256", "progress")


def load_artifact(path: str | os.PathLike[str], options: Mapping[str, Any], expect: type | None = None) -> Any:
    """Return the model of an artifact; see `rlx_jax.load`.

    Args:
        path: the file.
        options: the other arguments of `load` that the caller passed, by name.
        expect: as in `rlx_jax.load`.

    Raises:
        RequestError: an option that does not apply. Others as `open_artifact`.
    """
    if surplus := [name for name in options if name not in OPTIONS]:
        raise errors.RequestError(
            f"load: {quote(os.fsdecode(path))} is an artifact, which takes {listing(OPTIONS)} and not "
            f"{listing(surplus)}: pass these when the model is loaded for the export"
        )
    artifact = open_artifact(path, options.get("expect_sha256"))
    if artifact.kind not in KINDS:
        raise errors.ArtifactFormatError(f"{artifact.archive.where}: manifest: kind: unknown {quote(artifact.kind)}")
    cls, make = KINDS[artifact.kind]
    check_class("load", path, cls, expect)
    programs = frozen_programs(artifact, options.get("progress"))
    (model,) = finish_models(programs, artifact.flow.program).values()
    return make(model, artifact)


# -- checks and programs -------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenArtifact:
    """An artifact whose bytes, versions and platform were checked; no program of it was read yet.

    Attributes:
        archive: the file.
        kind, settings: as in `ArtifactPlan`.
        flow: the description of the model.
        files: as in `ArtifactPlan`.
    """

    archive: Archive
    kind: str
    settings: Mapping[str, Any]
    flow: FlowRecord
    files: Mapping[str, bytes]


def open_artifact(path: str | os.PathLike[str], expect_sha256: str | None = None) -> OpenArtifact:
    """Open an artifact, and check all that can be checked before one of its programs is read.

    Raises:
        ArtifactFormatError, IntegrityError, LimitError, VersionMismatchError: as `Archive`.
        VersionMismatchError: it was made by a newer version of JAX, or expired.
        PlatformMismatchError: it is for other platforms. UnsupportedError: flatbuffers is not installed.
    """
    archive = Archive(path, expect_sha256)
    content, where = archive.content, f"{archive.where}: manifest"
    names = {"kind", "versions", "created", "expires", "platforms", "flow", "settings", "files"}
    if set(content) != names or not isinstance(content["settings"], dict):
        raise errors.ArtifactFormatError(f"{where}: expected {listing(sorted(names))}")
    versions = decode(Mapping[str, str | int], content["versions"], f"{where}: versions")
    check_versions(archive.where, versions, decode(str, content["expires"], f"{where}: expires"))
    platforms = decode(tuple[str, ...], content["platforms"], f"{where}: platforms")
    running = export.default_export_platform()
    if running not in platforms:
        raise errors.PlatformMismatchError(
            f"{archive.where}: the artifact is for {listing(platforms)}, and JAX runs on {quote(running)}: export the "
            f"model again with platforms={[*platforms, running]}"
        )
    require_flatbuffers("loading an artifact")
    files = decode(tuple[str, ...], content["files"], f"{where}: files")
    return OpenArtifact(
        archive,
        decode(str, content["kind"], f"{where}: kind"),
        content["settings"],
        decode(FlowRecord, content["flow"], f"{where}: flow"),
        {name: archive.read(f"files/{name}") for name in files},
    )


def check_versions(where: str, versions: Mapping[str, str | int], expires: str) -> None:
    """Check that this version of JAX can read what another one wrote.

    Raises:
        VersionMismatchError: it cannot, or nobody promises that it can.
    """
    made_by, convention = str(versions.get("jax", "")), versions.get("calling_convention")
    low, high = export.minimum_supported_calling_convention_version, export.maximum_supported_calling_convention_version
    advice = "export the model again with this version, or install that one"
    if not isinstance(convention, int) or not low <= convention <= high:
        raise errors.VersionMismatchError(
            f"{where}: jax {made_by} wrote calling convention {convention}, and jax {jax.__version__} reads {low} to "
            f"{high}: {advice}"
        )
    if _version(made_by) > _version(jax.__version__):
        raise errors.VersionMismatchError(
            f"{where}: jax {made_by} wrote it, which is newer than jax {jax.__version__}: {advice}"
        )
    today = datetime.date.today().isoformat()
    if made_by != jax.__version__ and today > expires:
        raise errors.VersionMismatchError(
            f"{where}: jax {made_by} wrote it, and later versions read it until {expires}; this is jax "
            f"{jax.__version__} on {today}: {advice}"
        )


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version such as `0.10.2.dev3`."""
    parts = itertools.takewhile(str.isdigit, text.split("."))
    return tuple(map(int, parts))


def frozen_programs(artifact: OpenArtifact, progress: Any = None) -> Programs:
    """Return the programs of an artifact, in the form in which a model has them; no parameter was read yet.

    Raises:
        PlatformMismatchError: it is for more devices.
        IntegrityError: the file changed after it was opened. SafetensorsError: the parameters are malformed.
    """
    record, source = artifact.flow, open_params(artifact.archive)
    layout = Layout({name: Key(name, t) for name, t in record.params.items()})
    flow = FrozenFlow(record, artifact.archive.where, artifact.archive.read)
    built = flow.build(source)
    settings = choose_settings(built, None, merge=False, program="forward")
    settings = replace(settings, plan=replace(settings.plan, scan=False))
    if record.mesh is not None:
        settings = with_model_sharding(settings, record.mesh.sharding(artifact.archive.where))
    programs = Programs({record.name: flow}, source, settings, layout, {record.name: CapturedArrays()}, progress)
    programs.planned_program = record.program
    programs.builds.insert((record.name, frozenset()), built)
    for exported in (program for program in record.programs if program.forms):
        programs.derivation_errors.insert((record.name, exported.program, exported.key.optional_inputs), "")
    for optional_inputs, unread in record.unread.items():
        programs.unread_by_optional[record.name, frozenset(optional_inputs)] = frozenset(unread)
    return programs


class _ParamsFile(SafetensorsFile):
    """The parameters of an artifact: a safetensors file in it."""

    def __init__(self, path: str, member: Member) -> None:
        self._member = member
        super().__init__(path, name=f"{path}: {PARAMS}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _ParamsFile, (self._path, self._member)

    def _read_header(self, size: int) -> Header:
        begin, length = self._member.offset, self._member.length
        tensors = read_header(lambda count, at, where: self._read_bytes(count, begin + at, where), length, self._where)
        return {name: replace(info, start=info.start + begin) for name, info in tensors.items()}


def open_params(archive: Archive) -> WeightSource:
    """Return the parameters of an artifact."""
    if PARAMS not in archive.members:
        raise errors.ArtifactFormatError(f"{archive.where}: the artifact has no {PARAMS}")
    file = _ParamsFile(archive.path, archive.members[PARAMS])
    if file.identity != file_identity(archive.status):
        file.close()
        raise errors.IntegrityError(f"{archive.where}: the file was replaced or written to while it was opened")
    return SafetensorsSource([file], on_nonfinite="ignore")


# -- classes -------------------------------------------------------------------------------------


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


KINDS: dict[str, tuple[type, Callable[[CompiledModel, OpenArtifact], Any]]] = {
    "model": (CompiledModel, lambda model, artifact: model),
    "CausalLM": (CausalLM, _language_model),
    "Encoder": (Encoder, _encoder),
    "Reranker": (Reranker, _reranker),
    **{
        cls.__name__: (cls, partial(_with_head, cls))
        for cls in (Classifier, TokenClassifier, QuestionAnswerer, MaskedLM)
    },
}
