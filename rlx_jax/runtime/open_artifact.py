"""Open an artifact of `export`: its manifest is checked first, and then its programs are read on demand."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import export

from rlx_jax.compiler.settings import choose_settings, with_model_sharding
from rlx_jax.errors import (
    ArtifactFormatError,
    IntegrityError,
    PlatformMismatchError,
    SafetensorsError,
    VersionMismatchError,
    listing,
    quote,
)
from rlx_jax.io.archive import Archive
from rlx_jax.ir.checkpoint_tensor import Key
from rlx_jax.ir.serial import decode
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir.plan import Layout
from rlx_jax.runtime.export_model import PARAMS
from rlx_jax.runtime.frozen import FlowRecord, FrozenFlow, require_flatbuffers
from rlx_jax.runtime.programs import Programs
from rlx_jax.weights.safetensors_format import SafetensorsSource
from rlx_jax.weights.safetensors_header import Header
from rlx_jax.weights.tensor_file import ReadBytes, TensorFile, file_identity, read_header


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
        raise ArtifactFormatError(f"{where}: expected {listing(sorted(names))}")
    versions = decode(Mapping[str, str | int], content["versions"], f"{where}: versions")
    check_versions(archive.where, versions, decode(str, content["expires"], f"{where}: expires"))
    platforms = decode(tuple[str, ...], content["platforms"], f"{where}: platforms")
    running = export.default_export_platform()
    if running not in platforms:
        raise PlatformMismatchError(
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
        raise VersionMismatchError(
            f"{where}: jax {made_by} wrote calling convention {convention}, and jax {jax.__version__} reads {low} to "
            f"{high}: {advice}"
        )
    if _version(made_by) > _version(jax.__version__):
        raise VersionMismatchError(
            f"{where}: jax {made_by} wrote it, which is newer than jax {jax.__version__}: {advice}"
        )
    today = datetime.date.today().isoformat()
    if made_by != jax.__version__ and today > expires:
        raise VersionMismatchError(
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
    programs.builds.insert((record.name, frozenset()), (built, 0.0))
    for exported in (program for program in record.programs if program.forms):
        programs.derivation_errors.insert((record.name, exported.program, exported.key.optional_inputs), "")
    for optional_inputs, unread in record.unread.items():
        programs.unread_by_optional[record.name, frozenset(optional_inputs)] = frozenset(unread)
    return programs


def open_params(archive: Archive) -> WeightSource:
    """Return the parameters of an artifact."""
    if PARAMS not in archive.members:
        raise ArtifactFormatError(f"{archive.where}: the artifact has no {PARAMS}")
    member = archive.members[PARAMS]

    def header(read: ReadBytes, size: int, where: str) -> Header:
        tensors = read_header(
            lambda count, start, where: read(count, member.offset + start, where), member.length, where
        )
        return {name: replace(info, start=info.start + member.offset) for name, info in tensors.items()}

    file = TensorFile(archive.path, header, SafetensorsError, name=f"{archive.path}: {PARAMS}")
    if file.identity != file_identity(archive.status):
        file.close()
        raise IntegrityError(f"{archive.where}: the file was replaced or written to while it was opened")
    return SafetensorsSource([file], on_nonfinite="ignore")
