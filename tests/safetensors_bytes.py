"""Safetensors files byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from rlx_jax.weights.safetensors import SafetensorsFile

ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def frame(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def one(data: bytes = b"1234", **changes: Any) -> bytes:
    """A file with one tensor `a`, an F32 of four bytes unless `changes` says otherwise."""
    return frame({"a": {**ENTRY, **changes}}, data)


def open_raw(tmp_path: Path, raw: bytes) -> SafetensorsFile:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return SafetensorsFile(path)
