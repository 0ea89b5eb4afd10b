"""`open_safetensors`: open a `.safetensors` file (a length of eight bytes, a JSON header, contiguous tensors).

    8 bytes   N, the length of the header, little-endian
    N bytes   the header, see `safetensors_header`
    the rest  the tensors, without gaps or overlaps, row-major and little-endian

It replaces the reference implementation because files may come from anyone. Each number in the header is checked
against the bytes in the file before anything of that size is allocated. BF16 and F8 load. It accepts only files that
the reference implementation accepts, except those that name a tensor twice, have unknown fields, or are over
`rlx_jax.io.limits`.
"""

from __future__ import annotations

import os

from rlx_jax.errors import SafetensorsError, quote
from rlx_jax.io import limits
from rlx_jax.weights.safetensors_header import Header, parse_header
from rlx_jax.weights.tensor_file import ReadBytes, TensorFile


def open_safetensors(path: str | os.PathLike[str], *, name: str | None = None) -> TensorFile:
    """Return an open `.safetensors` file; `name` is its name in its directory.

    Raises:
        SafetensorsError: the file is malformed, or not a regular file.
        DuplicateWeightError: a name occurs twice.
        LimitError: over one of `rlx_jax.io.limits`.
        UnsupportedError: a dtype that is not in `DTYPES`.
        MissingFileError, StorageError: it does not exist, or cannot be read.
    """
    return TensorFile(path, read_header, SafetensorsError, name=name)


def read_header(read: ReadBytes, size: int, where: str) -> Header:
    """Return the header of a file of `size` bytes; `read(count, start, where)` returns its bytes.

    Raises:
        As `open_safetensors`.
    """
    if size < 8:
        raise SafetensorsError(f"{where}: the file has {size} bytes, expected 8 bytes of header length first")
    length = int.from_bytes(read(8, 0, where), "little")
    if length > size - 8:
        description = _describe_content(read(min(size, 64), 0, where))
        raise SafetensorsError(
            f"{where}: {description or f'the header length is {length} bytes, the file has {size - 8} after it'}"
        )
    limits.check_limit(
        length, limits.MAX_HEADER_BYTES, "limits.MAX_HEADER_BYTES", f"{where}: the header's length in bytes"
    )
    return parse_header(read(length, 8, where), size - 8 - length, where)


def _describe_content(head: bytes) -> str:
    """Describe a file that is not safetensors by its first bytes; return an empty string if they are unknown."""
    if head.startswith(b"version https://git-lfs"):
        return "this is a pointer of git-lfs, not the weights: `git lfs pull` fetches them"
    if head.startswith(b"PK\x03\x04"):
        return "this is a zip archive, as torch.save writes, under another name: convert it to safetensors"
    text = head.split(b"\n")[0].decode("ascii", "replace")
    is_printable = len(text) > 8 and text.isascii() and text.isprintable()
    return f"this is not a safetensors file but a text that begins with {quote(text)}" if is_printable else ""
