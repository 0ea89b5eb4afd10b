"""The file of an exported artifact, `.rlxa`: a header, members one after the other, and a manifest.

    8 bytes    magic
    4 + 4      version of the format; reserved, 0
    8 + 8      bytes of the manifest; bytes of the file
    32 bytes   SHA-256 of the manifest
    the rest   the members, without gaps, then the manifest: JSON with offset, length and SHA-256 of each member

All bytes are compared with a digest when the file is opened, before anything in it is used. The digests are against
accidents. Only the caller can say whether a file is the intended one: with the digest of the manifest, which names all
others.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import (
    ArtifactFormatError,
    IntegrityError,
    RequestError,
    TargetExistsError,
    VersionMismatchError,
    quote,
    shown,
)
from rlx_jax.io import limits
from rlx_jax.io.atomic import atomic_directory
from rlx_jax.io.files import open_regular, parse_object, read_at

SUFFIX = ".rlxa"
MAGIC, VERSION = b"\x89RLXA\r\n\x1a", 2
HEADER = struct.Struct("<8sIIQQ32s")
_CHUNK_BYTES = 2**22  # bytes that are read at once to compute a digest

# Writes a part of a member; the content of a member is bytes, or a function that writes it part by part.
WritePart = Callable[[Any], object]
Content = bytes | Callable[[WritePart], None]


@dataclass(frozen=True)
class Member:
    """A member of an archive: its bytes in the file, and their SHA-256 in hexadecimal digits."""

    offset: int
    length: int
    sha256: str


class Archive:
    """An open archive with verified bytes. It is closed at the latest when the object is garbage-collected.

    Attributes:
        path, where: the path of the file, and its name in messages.
        content: the part of the manifest that describes the artifact.
        members: by name, in the order of the file.
        sha256: the digest of the manifest, in hexadecimal digits.
        status, size: of the file, when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str], expect_sha256: str | None = None) -> None:
        """Open a file, and verify all of it.

        Args:
            path: the file.
            expect_sha256: the digest that the manifest must have; None for any.

        Raises:
            ArtifactFormatError: the file is no artifact, or its manifest is malformed.
            VersionMismatchError: the file has a newer format. IntegrityError: bytes are missing or differ.
            LimitError: the manifest is too large. MissingFileError, StorageError: it cannot be read.
        """
        self.path = os.path.abspath(os.fsdecode(path))
        self.where = quote(os.fsdecode(path))
        self._descriptor = open_regular(self.path, self.where, ArtifactFormatError)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self.status = os.fstat(self._descriptor)
            self.size = self.status.st_size
            manifest, self.sha256 = self._read_manifest(expect_sha256)
            self.members, self.content = self._parse(manifest)
            for name, member in self.members.items():
                self._verify(name, member)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> bytes:
        """Return the bytes of a member, verified once more.

        Raises:
            ArtifactFormatError: there is no such member. IntegrityError: the file changed after it was opened.
        """
        if name not in self.members:
            raise ArtifactFormatError(f"{self.where}: the manifest names {quote(name)}, which is not among its members")
        member = self.members[name]
        raw = self._read(member.offset, member.length)
        self._compare(name, member, hashlib.sha256(raw).hexdigest())
        return raw

    def _read(self, offset: int, length: int) -> bytes:
        limits.check_memory(length, f"{self.where}: {length} bytes from byte {offset} on")
        buffer = bytearray(length)
        if read_at(self._descriptor, memoryview(buffer), offset, self.where) < length:
            raise IntegrityError(f"{self.where}: the file ends before byte {offset + length}: it was truncated")
        return bytes(buffer)

    def _read_manifest(self, expect_sha256: str | None) -> tuple[bytes, str]:
        """Return the bytes of the manifest and their digest, after checking the header."""
        head = self._read(0, min(self.size, HEADER.size))
        if head[: len(MAGIC)] != MAGIC[: len(head)] or len(head) < len(MAGIC):
            raise ArtifactFormatError(f"{self.where}: this is no artifact of rlx_jax; model.export(path) writes one")
        if len(head) < HEADER.size:
            raise IntegrityError(f"{self.where}: the file has {self.size} bytes: it was truncated")
        _, version, reserved, length, file_length, digest = HEADER.unpack(head)
        if version != VERSION or reserved:
            raise VersionMismatchError(
                f"{self.where}: the artifact has version {version} of the format, and this release reads version "
                f"{VERSION}: load it with the release that wrote it, or export the model again"
            )
        if file_length != self.size:
            raise IntegrityError(
                f"{self.where}: the header declares {file_length} bytes, and the file has {self.size}: it was "
                "truncated, or written to"
            )
        if length > self.size - HEADER.size:
            raise IntegrityError(f"{self.where}: the manifest would have {length} bytes of {self.size}")
        limits.check_limit(length, limits.bound("MAX_ARTIFACT_MANIFEST_BYTES"), f"{self.where}: the manifest's bytes")
        raw = self._read(self.size - length, length)
        actual = hashlib.sha256(raw).digest()
        if actual != digest:
            raise IntegrityError(f"{self.where}: the manifest differs from its digest: the file was altered")
        if expect_sha256 is not None:
            check_digest(expect_sha256)
            if actual.hex() != expect_sha256.lower():
                raise IntegrityError(
                    f"{self.where}: the digest of the artifact is {actual.hex()}, expected {expect_sha256}"
                )
        return raw, actual.hex()

    def _parse(self, raw: bytes) -> tuple[dict[str, Member], dict[str, Any]]:
        """Return the members, which fill the file up to the manifest without gaps, and the content of the manifest."""
        where = f"{self.where}: manifest"
        document = parse_object(raw, where, ArtifactFormatError)
        entries, content = document.get("members"), document.get("content")
        if set(document) != {"members", "content"} or not isinstance(entries, dict) or not isinstance(content, dict):
            raise ArtifactFormatError(f"{where}: expected an object with members and content")
        members, position = dict[str, Member](), HEADER.size
        for name, fields in entries.items():
            if not isinstance(fields, dict) or set(fields) != {"offset", "length", "sha256"}:
                raise ArtifactFormatError(f"{where}: {quote(name)}: expected an object with offset, length and sha256")
            offset, length, digest = fields["offset"], fields["length"], fields["sha256"]
            if type(length) is not int or length < 0 or offset != position or not isinstance(digest, str):
                raise ArtifactFormatError(f"{where}: {quote(name)}: expected a member from byte {position} on")
            members[name] = Member(position, length, digest)
            position += length
        if position != self.size - len(raw):
            raise ArtifactFormatError(
                f"{where}: the members end at byte {position}, and the manifest begins at {self.size - len(raw)}"
            )
        return members, content

    def _verify(self, name: str, member: Member) -> None:
        digest = hashlib.sha256()
        for start in range(0, member.length, _CHUNK_BYTES):
            digest.update(self._read(member.offset + start, min(_CHUNK_BYTES, member.length - start)))
        self._compare(name, member, digest.hexdigest())

    def _compare(self, name: str, member: Member, digest: str) -> None:
        if digest != member.sha256:
            raise IntegrityError(f"{self.where}: {quote(name)} differs from its digest: the file was altered")


def check_digest(digest: object) -> None:
    """Check that an argument is a SHA-256.

    Raises:
        RequestError: it is not.
    """
    if not (isinstance(digest, str) and len(digest) == 64 and set(digest.lower()) <= set("0123456789abcdef")):
        raise RequestError(f"expect_sha256 is {shown(digest)}; expected the 64 hexadecimal digits that export returns")


def is_archive(path: str) -> bool:
    """Return whether a file begins as an artifact does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def write_archive(
    path: str, members: Mapping[str, Content], content: Mapping[str, Any], nbytes: int, overwrite: bool = False
) -> tuple[str, int]:
    """Write an archive; `path` is either unchanged or complete, even after a crash.

    Args:
        path: the file.
        members: the content of each member by name.
        content: the description of the artifact, plain JSON.
        nbytes: approximate number of bytes to be written.
        overwrite: replace an earlier artifact at `path`.

    Returns:
        The digest of the manifest, and the size of the file in bytes.

    Raises:
        TargetExistsError: `path` exists, and `overwrite` is false or it is no artifact.
        NoSpaceError, SaveFailedError: the disk is full or refuses.
    """
    target = os.path.realpath(path)
    if overwrite and os.path.lexists(target) and not is_archive(target):
        raise TargetExistsError(f"{quote(path)} is no artifact of rlx_jax; remove it, or export elsewhere")
    with atomic_directory(target, overwrite, nbytes) as new, open(new, "xb") as file:
        return _write(file, members, content)


def _write(file: BinaryIO, members: Mapping[str, Content], content: Mapping[str, Any]) -> tuple[str, int]:
    """Write an archive into an empty file; see `write_archive`."""
    file.write(bytes(HEADER.size))  # the header has the digest of the manifest, and is written last
    entries: dict[str, Any] = {}
    for name, value in members.items():
        digest, offset = hashlib.sha256(), file.tell()

        def write(part: Any, digest: Any = digest) -> None:
            digest.update(part)
            file.write(part)

        if isinstance(value, bytes):
            write(value)
        else:
            value(write)
        entries[name] = {"offset": offset, "length": file.tell() - offset, "sha256": digest.hexdigest()}
    manifest = json.dumps({"members": entries, "content": content}, allow_nan=False).encode()
    limits.check_limit(len(manifest), limits.bound("MAX_ARTIFACT_MANIFEST_BYTES"), "export: the manifest's bytes")
    file.write(manifest)
    size, manifest_digest = file.tell(), hashlib.sha256(manifest)
    file.seek(0)
    file.write(HEADER.pack(MAGIC, VERSION, 0, len(manifest), size, manifest_digest.digest()))
    return manifest_digest.hexdigest(), size
