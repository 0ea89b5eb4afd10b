"""GGUF files byte by byte, for files that no library writes."""

import struct


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_file(
    pairs: list[bytes], tensors: list[bytes], data: bytes = b"", counts: tuple[int, int] | None = None
) -> bytes:
    """A GGUF file; `counts` replaces the numbers of tensors and pairs."""
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


ARCH = pair(b"general.architecture", 8, string(b"llama"))
ONE = tensor(b"a", (4,), 0, 0)
