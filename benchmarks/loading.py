"""Loading a checkpoint from the page cache beside a plain read of the same bytes, in turn in one process.

    python benchmarks/loading.py                       a Llama of 2 GB in each format
    python benchmarks/loading.py --gb 0.3 --formats bf16 gguf_q8_0

A plain read is `readinto` from the file into one reused buffer of its size. Rate: the time of the plain read over that
of `rlx_jax.weights.execute.load_leaves` (the median over pairs), with the source opened anew and the check for NaN on;
the memory of the last load is freed between the calls.
CPU: the same with the time of the processor, which other work on the machine disturbs less; loading uses several
threads. New memory: the rate of a plain read into memory that the system has to clear first, as that of parameters; in
a virtual machine whose host gives memory by small pages this takes longer than to copy them.
Peak: the most memory that the process gained while loading, over the bytes of the file; on a CPU this includes the
parameters. The goal on a GPU is a tenth of the file and its largest tensor. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import statistics
import struct
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, median_ratio, seconds, table

import rlx_jax as rlx
from rlx_jax.device import running_device
from rlx_jax.io.ggml import BLOCKS
from rlx_jax.ir.packed import BITS, SCHEMES, TABLES
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.weights.execute import load_leaves
from rlx_jax.weights.format import Entry
from rlx_jax.weights.gguf_config import gguf_metadata
from rlx_jax.weights.gguf_header import DEFAULT_ALIGNMENT, MAGIC, PACKED
from rlx_jax.weights.gguf_names import tensor_names
from rlx_jax.weights.safetensors_format import write_file

SIZES = Sizes(hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=32768)
# Bytes of a value in the file; the sizes are exact for floats and near for packed files, which have f32 norms.
VALUE_BYTES = {
    "bf16": 2.0, "f32": 4.0, "gguf_bf16": 2.0, "gguf_q8_0": 34 / 32, "gguf_q4k": 144 / 256, "gguf_q6k": 210 / 256,
}  # fmt: skip
DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}
BF16 = 30
"""The number of bfloat16 in a GGUF file."""
GOAL, PEAK = 0.6, {"cpu": 1.1, "cuda": 0.1}


def config_of(gb: float, name: str) -> dict[str, Any]:
    """The `config.json` of as many layers as give a file of about `gb` GB."""
    one, two = (
        sum(math.prod(s.shape) for s in weight_specs(LlamaConfig.from_hf(hf_config(replace(SIZES, layers=n)))).values())
        for n in (1, 2)
    )
    layers = max(1, round((gb * 1e9 / VALUE_BYTES[name] - (2 * one - two)) / (two - one)))
    return hf_config(replace(SIZES, layers=layers))


def packed(scheme: str, shape: tuple[int, ...], cache: dict[Any, rlx.Packed]) -> rlx.Packed:
    """A random matrix with values of about 0.02."""
    if shape not in cache:
        layout, row = BLOCKS[scheme], SCHEMES[scheme]
        data = np.random.default_rng(0).integers(
            0, 256, (shape[0] * shape[1] // layout.elements, layout.bytes), np.uint8
        )
        part = layout.parts["scales"]
        dtype, stop = (np.dtype("<u2"), part.start + 4) if row.six_bits else (row.scale_dtype, part.stop)
        scale = 0.02 / 2 ** (sum(codes.bits for codes in row.codes) - 2) / (1 if row.group is None else 32)
        table = TABLES.get(row.scale)
        number = np.abs(table - scale).argmin() if table is not None else BITS[row.scale].type(scale).view(dtype)
        scales = np.full((stop - part.start) // dtype.itemsize, number, dtype)
        data[:, part.start : stop] = scales.view(np.uint8)
        cache[shape] = rlx.Packed(data.reshape(shape[0], -1), scheme, shape)
    return cache[shape]


def write(folder: str, name: str, config: dict[str, Any]) -> str:
    """Write a random checkpoint and return the path of its file."""
    specs = weight_specs(LlamaConfig.from_hf(config))
    cache: dict[Any, Any] = {}

    def floats(shape: tuple[int, ...], dtype: Any) -> Any:
        if shape not in cache:
            noise = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.02)
            cache[shape] = noise.astype(dtype)
        return cache[shape]

    if name in DTYPES:
        path = f"{folder}/model.safetensors"
        write_file(path, [Entry.from_array(key, floats(s.shape, DTYPES[name])) for key, s in specs.items()])
        return path
    path = f"{folder}/{name}.gguf"
    metadata = {**gguf_metadata(config), "tokenizer.ggml.model": "none"}
    keys = tensor_names("llama", 0, config)

    def data(shape: tuple[int, ...]) -> Any:
        if len(shape) > 1 and name in SCHEMES:
            return packed(name, shape, cache).data
        return floats(shape, np.float32 if len(shape) < 2 else ml_dtypes.bfloat16)

    tensors = [(keys[key][0], s.shape, data(s.shape)) for key, s in specs.items()]
    with open(path, "xb") as file:
        packed_type = next((number for number, scheme in PACKED.items() if scheme == name), BF16)
        file.write(gguf_header(metadata, tensors, packed_type))
        for _, _, data in tensors:
            file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))
            file.write(data.reshape(-1).view(np.uint8).data)
    return path


def gguf_header(metadata: Any, tensors: list[tuple[str, tuple[int, ...], Any]], packed_type: int) -> bytes:
    """The bytes of a GGUF file before the data; matrices have the type `packed_type`, vectors are float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        else:
            code, kind = ("f", 6) if isinstance(value, float) else ("I", 4)
            out += struct.pack("<I" + code, kind, value)
    offset = 0
    for name, shape, data in tensors:
        out += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += struct.pack("<IQ", packed_type if len(shape) > 1 else 0, offset)
        offset += -(-data.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return out + bytes(-len(out) % DEFAULT_ALIGNMENT)


def status_bytes(field: str) -> int:
    """A figure of this process's memory by its name in /proc."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def measure(path: str, name: str, config: dict[str, Any], rounds: int) -> dict[str, float]:
    """The figures of the table, and the bytes of the largest parameter over those of the file."""
    profile = rlx.CompileProfile.preset("auto").replace(
        precision={"compute": "bf16" if VALUE_BYTES[name] == 2 else "f32"}
    )
    leaves = rlx.compile(Llama32Flow(LlamaConfig.from_hf(config)), path, profile=profile).programs.layout.params
    size = os.path.getsize(path)
    cpu: dict[str, list[float]] = {"load": [], "read": []}
    buffer = np.zeros(size, np.uint8)
    loaded: list[Any] = []

    def read_into(buffer: np.ndarray[Any, Any]) -> None:
        with open(path, "rb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.readinto(buffer.data[done:]) or size

    def read() -> None:
        start = time.process_time()
        read_into(buffer)
        cpu["read"].append(time.process_time() - start)

    def read_new() -> None:
        loaded.append(np.empty(size, np.uint8))
        read_into(loaded[-1])

    def load() -> None:
        start = time.process_time()
        loaded.append(load_leaves(leaves, rlx.open_weights(path), None, lambda *_: None, threading.Event()))
        cpu["load"].append(time.process_time() - start)

    read()
    gc.collect()  # JAX frees host memory that it shared
    ctypes.CDLL(None).malloc_trim(0)
    before = status_bytes("VmRSS")
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts anew
    load()
    peak = (status_bytes("VmHWM") - before) / size
    times: dict[str, list[float]] = {"load": [], "read": [], "new": []}
    for _ in range(rounds):
        for what, call in (("load", load), ("read", read), ("new", read_new)):
            loaded.clear()  # to free memory is not a part of loading
            gc.collect()  # JAX frees host memory that it shared
            times[what].append(seconds(call))
    return {
        "rate": median_ratio(times["read"], times["load"]), "cpu": median_ratio(cpu["read"], cpu["load"]),
        "new": median_ratio(times["read"], times["new"]),
        "plain_gb_s": size / statistics.median(times["read"]) / 1e9, "peak": peak,
        "largest": max(program.type.nbytes for program in leaves.values()) / size,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="loading beside a plain read")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--formats", nargs="*", choices=VALUE_BYTES, default=list(VALUE_BYTES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    goals, lines, kind = Goals(), [], running_device().kind
    for name in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(args.gb, name)
            path = write(folder, name, config)
            found = measure(path, name, config, args.rounds)
            emit(format=name, bytes=os.path.getsize(path), **found)
        verdict = goals.at_most(f"{name}: plain read / loading", 1 / found["rate"], 1 / GOAL)
        limit = PEAK[kind] + (found["largest"] if kind == "cuda" else 0)
        fits = goals.at_most(f"{name}: peak", found["peak"], limit)
        figures = [f"{found[field]:.2f}" for field in ("plain_gb_s", "new", "cpu", "rate", "peak")]
        lines.append([name, *figures[:4], verdict, figures[4], f"{limit:.2f}", fits])
    print(table(["file", "plain GB/s", "new memory", "CPU", "rate", f">= {GOAL}", "peak / file", "limit", ""], lines))
    goals.exit()


if __name__ == "__main__":
    main()
