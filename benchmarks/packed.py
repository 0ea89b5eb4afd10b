"""Decoding and prefill over weights that stay packed on the device, beside the same model over floats, in turn.

    python benchmarks/packed.py                       f32 and packed, the 135M shape on the CPU; bf16 on a GPU, the 1B
    python benchmarks/packed.py --shape 8b --schemes gguf_q8_0 gguf_q4k
    python benchmarks/packed.py --schemes fp8 --only "decode 1"
    python benchmarks/packed.py --only "decode 1" --kernels off    by XLA's forms, floats too
    python benchmarks/packed.py --shape 1b --peer llama.cpp    the same files in llama.cpp, on as many threads

`fp8` has a scale for each block of 128 × 128, `awq` and `gptq` groups of 128, `nvfp4` is that of compressed-tensors; in
these embeddings and the head stay in bf16, as in published checkpoints.
`int8` and `int4` are quantised on load, in groups of `precision.weights`.
The floor of a step is the time to read the bytes of all parameters but the embedding at the machine's bandwidth.
Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import decode
import jax
import ml_dtypes
import numpy as np
from handwritten_llama import Sizes, hf_config
from loading import packed, write
from report import Goals, emit, noise, table

import rlx_jax as rlx
from rlx_jax.device import num_cpus, running_device
from rlx_jax.io.folder import Folder
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.weights.quantize import FP8_BLOCK, quantize_fp8
from rlx_jax.weights.source import with_quantized_weights

SHAPES = {
    **decode.SHAPES,
    "1b": replace(decode.SHAPES["1b"], batches=(1, 8, 64), prompts=((8, 2048),), queued=1),
    "8b": replace(
        decode.SHAPES["1b"], batches=(1, 8, 64), prompts=((8, 2048),), queued=1,
        sizes=Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, theta=5e5),
    ),
}  # fmt: skip
# Floats that are packed while they are loaded. There is no file to whose bytes theirs would be compared.
QUANTIZED = ("int8", "int4")
# Times of decoding one or 8 rows, to the time over floats; of all else on a GPU, 1.15.
GOALS = {
    ("cuda", "decode 1"): {"gguf_q8_0": 0.95, "int8": 0.95, "fp8": 1.0, "gguf_q4k": 0.6, "gguf_q4_0": 0.6},
    ("cuda", "decode 8"): {"gguf_q8_0": 0.8, "int8": 0.8},
    ("cpu", "decode 1"): {"gguf_q8_0": 1.0, "gguf_q4k": 1.0},
}


def allocated_bytes() -> int:
    """Bytes in use on the device by its allocator; 0 where it does not count."""
    return int((jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0))


def build(
    shape: decode.Shape, scheme: str, tied: bool, folder: str, profile: rlx.CompileProfile
) -> tuple[rlx.CausalLM, int]:
    """Our model with random weights, matrices packed by the scheme, of GGUF in a file where a folder is given; and the
    bytes that a file of them has."""
    fields = {**hf_config(shape.sizes), "tie_word_embeddings": tied}
    config = LlamaConfig.from_hf(fields)
    precision = {"compute": shape.dtype} | ({"weights": scheme} if scheme in QUANTIZED else {})
    profile = profile.replace(precision=precision)
    if folder and scheme.startswith("gguf"):
        path = write(folder, scheme, fields)
        return rlx.CausalLM(Llama32Flow(config), path, profile=profile, max_positions=4096), os.path.getsize(path)
    cache: dict[Any, Any] = {}
    numbers = noise(decode.hand_dtype(shape))

    def value(size: tuple[int, ...]) -> Any:
        if len(size) > 1 and scheme.startswith("gguf"):
            return packed(scheme, size, cache)
        if size not in cache:
            cache[size] = np.resize(numbers, size) if len(size) > 1 else np.ones(size, numbers.dtype)
        return cache[size]

    weights = {key: value(spec.shape) for key, spec in weight_specs(config).items()}
    if scheme in METHODS:
        return with_method(scheme, config, weights, profile)
    stored = sum((v if isinstance(v, np.ndarray) else v.data).nbytes for v in weights.values())
    return rlx.CausalLM(Llama32Flow(config), weights, profile=profile, max_positions=4096), stored


def random_codes(*shape: int, dtype: Any = np.int32) -> Any:
    return np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


def fp8(value: Any) -> dict[str, Any]:
    return dict(zip(("weight", "weight_scale_inv"), quantize_fp8(value.astype(np.float32), ""), strict=True))


def nvfp4(value: Any) -> dict[str, Any]:
    rows, columns = value.shape
    scales = np.full((rows, columns // 16), 1, ml_dtypes.float8_e4m3fn)
    codes = random_codes(rows, columns // 2, dtype=np.uint8)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": np.array([200], np.float32)}


def in_words(value: Any, words: tuple[int, int]) -> dict[str, Any]:
    rows, columns = value.shape
    scales = np.full((columns // 128, rows), 0.004, np.float16)
    return {"qweight": random_codes(*words), "qzeros": random_codes(columns // 128, rows // 8), "scales": scales}


_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
# What a linear layer of published checkpoints has in place of its weight, and their `quantization_config`.
METHODS: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}),
    "nvfp4": (nvfp4, {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": _NVFP4}},
    }),
    "awq": (lambda v: in_words(v, (v.shape[1], v.shape[0] // 8)), {"quant_method": "awq", "bits": 4}),
    "gptq": (lambda v: in_words(v, (v.shape[1] // 8, v.shape[0])), {"quant_method": "gptq", "bits": 4}),
}  # fmt: skip


def with_method(
    name: str, config: LlamaConfig, weights: dict[str, Any], profile: rlx.CompileProfile
) -> tuple[rlx.CausalLM, int]:
    """The same of a checkpoint that is quantised by a method of `METHODS`."""
    stored, method = METHODS[name]
    cache: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, Any] = {}
    for key, value in weights.items():
        module, linear, _ = key.partition("_proj.weight")
        if not linear:
            tensors[key] = value
            continue
        if value.shape not in cache:
            cache[value.shape] = stored(value)
        tensors |= {f"{module}_proj.{end}": part for end, part in cache[value.shape].items()}
    folder = Folder(Path(name), contents={"config.json": json.dumps({"quantization_config": method}).encode()})
    source = with_quantized_weights(rlx.open_weights(tensors), folder)
    lm = rlx.CausalLM(Llama32Flow(config), source, profile=profile, max_positions=4096)
    return lm, sum(value.nbytes for value in tensors.values())


def llama_cpp_decode(folder: str, scheme: str, shape: decode.Shape) -> Any:
    """Steps of llama.cpp over the file of `build`: returns a function of the number of steps. Sampling is not done."""
    from llama_cpp import Llama

    model = Llama(
        f"{folder}/{scheme}.gguf", n_ctx=shape.cache_len, n_threads=num_cpus(), n_threads_batch=num_cpus(),
        use_mmap=False, verbose=False,
    )  # fmt: skip
    (prompt,) = decode.prompts(shape, 1).tolist()

    def steps(new: int) -> None:
        model.reset()
        model.eval(prompt)
        for token in prompt[:new]:
            model.eval([token])

    return steps


def temporaries(lm: rlx.CausalLM) -> dict[str, int]:
    """The bytes of scratch memory of each program, by XLA: one that decodes whole matrices needs more than floats."""
    found = lm.model.programs.executables.items()
    return {f"{key.program} {dict(key.binding)}": int(e.memory.temp_size_in_bytes) for key, e in found}


def floor_ms(lm: rlx.CausalLM) -> float | None:
    """The time to read all parameters that a step reads, in ms; None where the bandwidth is unknown."""
    bandwidth = running_device().bandwidth
    assert lm.model.params is not None
    tied = not any("lm_head" in name for name in lm.model.params)
    nbytes = sum(a.nbytes for name, a in lm.model.params.items() if tied or "embed_tokens" not in name)
    return nbytes / bandwidth * 1e3 if bandwidth else None


def main() -> None:
    parser = argparse.ArgumentParser(description="packed weights beside floats, in turn")
    parser.add_argument("--shape", choices=SHAPES, help="by default 1b on a GPU, else 135m")
    parser.add_argument("--schemes", nargs="*", default=None)
    parser.add_argument("--layers", type=int, help="of the shape, fewer than it has")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="the rows that contain this text, such as 'decode 1'")
    parser.add_argument("--kernels", choices=("auto", "off"), default="auto", help="`backend.cuda.kernels`, floats too")
    parser.add_argument("--peer", choices=["llama.cpp"], help="decode the same GGUF files with it, on a CPU")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt that is decoded after")
    parser.add_argument("--steps", type=int, default=decode.LONG - decode.SHORT, help="tokens by which calls differ")
    args = parser.parse_args()
    kind = running_device().kind
    name = args.shape or ("1b" if kind == "cuda" else "135m")
    shape = SHAPES[name]
    shape = replace(shape, prompt=args.prompt or shape.prompt)
    shape = replace(shape, sizes=replace(shape.sizes, layers=args.layers or shape.sizes.layers))
    if kind == "cpu":
        shape = replace(shape, dtype="f32", batches=(1,), prompts=((1, 512),))
    names = [*(f"decode {rows}" for rows in shape.batches), *(f"prefill {n}x{seq}" for n, seq in shape.prompts)]
    if not any(args.only in row for row in names):
        parser.error(f"--only {args.only!r} selects none of {names}")
    schemes = [
        "floats",
        *(args.schemes or (("gguf_q8_0", "gguf_q4_0") if name == "135m" else ("gguf_q8_0", "gguf_q4k"))),
    ]
    profile = rlx.CompileProfile.preset("auto").replace(backend={"cuda": {"kernels": args.kernels}})
    models, goals = {}, Goals()
    folder = tempfile.TemporaryDirectory() if args.peer else None
    for scheme in schemes:
        before = allocated_bytes()
        models[scheme], stored = build(shape, scheme, name != "8b", folder.name if folder else "", profile)
        added = allocated_bytes() - before
        # The allocator counts a free piece that an array takes with up to its size to spare: `arrays` does not.
        arrays = sum(a.nbytes for a in (models[scheme].model.params or {}).values()) / stored
        emit(scheme=scheme, gib=round(stored / 2**30, 3), allocated=added / stored, arrays=arrays,
             floor_ms=floor_ms(models[scheme]))  # fmt: skip
        if added and scheme not in ("floats", *QUANTIZED):
            goals.at_most(f"bytes on the device of {scheme}, to those of the file", added / stored, 1.03)
    lines: list[list[str]] = []
    short, long = args.steps // 2 + 1, args.steps // 2 + 1 + args.steps
    peers: dict[str, Any] = {}
    if args.peer and importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp: skipped, the package llama-cpp-python is not installed")
    elif folder:
        peers = {s: llama_cpp_decode(folder.name, s, shape) for s in schemes if s.startswith("gguf_")}
    rows = [
        decode.measure(
            f"decode {batch}",
            {s: (decode.our_decode(lm, shape, batch, long), decode.our_decode(lm, shape, batch, short))
             for s, lm in models.items()}
            | {f"llama.cpp {s}": (partial(call, long), partial(call, short)) for s, call in peers.items()},
            args.steps, args.rounds,
        )
        for batch in shape.batches
        if args.only in f"decode {batch}"
    ]  # fmt: skip
    rows += [
        decode.measure(
            f"prefill {batch}x{seq}",
            {s: (decode.our_prefill(lm, shape, batch, seq), None) for s, lm in models.items()},
            1, args.rounds,
        )
        for batch, seq in shape.prompts
        if args.only in f"prefill {batch}x{seq}"
    ]  # fmt: skip
    for row in rows:
        for scheme in schemes[1:]:
            ratio = row.ms[scheme] / row.ms["floats"]
            default = 1.15 if kind == "cuda" and row.name != "decode 1" else None
            limit = GOALS.get((kind, row.name), {}).get(scheme, default)
            verdict = f"{goals.at_most(f'{row.name}, {scheme}', ratio, limit)} ({limit:g})" if limit else ""
            lines.append(
                [row.name, scheme, f"{row.ms[scheme]:.2f}", f"{row.ms['floats']:.2f}", f"{ratio:.3f}", verdict]
            )
            if (peer := row.ms.get(f"llama.cpp {scheme}")) is not None:
                ratio = row.ms[scheme] / peer
                lines.append(
                    [row.name, f"{scheme} / llama.cpp", f"{row.ms[scheme]:.2f}", f"{peer:.2f}", f"{ratio:.3f}", ""]
                )
    print(table(["ms a step or prompt", "scheme", "packed", "other", "ratio", "goal"], lines))
    base = temporaries(models["floats"])
    for scheme in schemes[1:]:
        more = {k: round((v - base[k]) / 2**20, 1) for k, v in temporaries(models[scheme]).items() if k in base}
        emit(scheme=scheme, temporaries_over_floats_mib=more)
    memory = jax.local_devices()[0].memory_stats()
    if memory:
        emit(peak_gib=round(memory["peak_bytes_in_use"] / 2**30, 3))
    goals.exit()


if __name__ == "__main__":
    main()
