"""Decoding and prefill over weights that stay packed on the device, beside the same model over floats, in turn.

    python benchmarks/packed.py                       f32 and packed, the 135M shape on the CPU; bf16 on a GPU, the 1B
    python benchmarks/packed.py --shape 8b --schemes gguf_q8_0 gguf_q4k
    python benchmarks/packed.py --schemes fp8 --only "decode 1"

`fp8` has a scale for each block of 128 × 128; embeddings and the head stay in bf16, as in published checkpoints.
The floor of a step is the time to read the bytes of all parameters but the embedding at the machine's bandwidth.
Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode
import jax
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.device import running_device
from rlx_jax.io.folder import Folder
from rlx_jax.ir.ggml import BLOCKS
from rlx_jax.ir.packed import BITS, SCHEMES
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.weights.quantize import FP8_BLOCK, quantize_fp8
from rlx_jax.weights.quantized import with_quantized_weights

SHAPES = {
    **decode.SHAPES,
    "1b": replace(decode.SHAPES["1b"], batches=(1, 64), prompts=((8, 2048),), queued=1),
    "8b": replace(
        decode.SHAPES["1b"], batches=(1, 64), prompts=((8, 2048),), queued=1,
        sizes=Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, theta=5e5),
    ),
}  # fmt: skip
# Times of decoding one row, to the time over floats.
GOALS = {
    "cuda": {"gguf_q8_0": 0.95, "fp8": 1.0, "gguf_q4k": 0.6, "gguf_q4_0": 0.6},
    "cpu": {"gguf_q8_0": 1.0, "gguf_q4k": 1.0},
}


def packed(scheme: str, shape: tuple[int, ...], cache: dict[Any, rlx.Packed]) -> rlx.Packed:
    """A random matrix with values of about 0.02."""
    if shape not in cache:
        layout, row = BLOCKS[scheme], SCHEMES[scheme]
        data = np.random.default_rng(0).integers(
            0, 256, (shape[0] * shape[1] // layout.elements, layout.bytes), np.uint8
        )
        part, dtype = layout.parts["scales"], BITS[row.scale]
        scale = 0.02 / 2 ** (sum(codes.bits for codes in row.codes) - 2) / (1 if row.group is None else 32)
        scales = np.full((part.stop - part.start) // dtype.itemsize, scale, dtype)
        data[:, part.start : part.stop] = scales.view(np.uint8)
        cache[shape] = rlx.Packed(data.reshape(shape[0], -1), scheme, shape)
    return cache[shape]


def allocated_bytes() -> int:
    """Bytes in use on the device by its allocator; 0 where it does not count."""
    return int((jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0))


def build(shape: decode.Shape, scheme: str, tied: bool) -> tuple[rlx.CausalLM, int]:
    """Our model with random weights, matrices packed by the scheme; and the bytes that a file of them has."""
    config = LlamaConfig.from_hf({**hf_config(shape.sizes), "tie_word_embeddings": tied})
    cache: dict[Any, Any] = {}
    floats = decode.hand_dtype(shape)

    def value(size: tuple[int, ...]) -> Any:
        if len(size) < 2 or scheme in ("floats", "fp8"):
            if size not in cache:
                noise = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
                cache[size] = (noise if len(size) > 1 else np.ones(size)).astype(floats)
            return cache[size]
        return packed(scheme, size, cache)

    weights = {key: value(spec.shape) for key, spec in weight_specs(config).items()}
    if scheme == "fp8":
        return with_fp8(shape, config, weights)
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    stored = sum(value.data.nbytes if isinstance(value, rlx.Packed) else value.nbytes for value in weights.values())
    return rlx.CausalLM(Llama32Flow(config), weights, profile=profile, max_positions=4096), stored


def with_fp8(shape: decode.Shape, config: LlamaConfig, weights: dict[str, Any]) -> tuple[rlx.CausalLM, int]:
    """The same of a checkpoint in FP8, whose linear layers are those of `weights`."""
    cache: dict[Any, Any] = {}
    tensors: dict[str, Any] = {}
    for key, value in weights.items():
        if not key.endswith("_proj.weight"):
            tensors[key] = value
            continue
        if value.shape not in cache:
            cache[value.shape] = quantize_fp8(value.astype(np.float32), key)
        tensors[key], tensors[f"{key}_scale_inv"] = cache[value.shape]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    folder = Folder(Path("fp8"), contents={"config.json": json.dumps({"quantization_config": method}).encode()})
    source = with_quantized_weights(rlx.open_weights(tensors), folder)
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    lm = rlx.CausalLM(Llama32Flow(config), source, profile=profile, max_positions=4096)
    return lm, sum(value.nbytes for value in tensors.values())


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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="the rows that contain this text, such as 'decode 1'")
    args = parser.parse_args()
    kind = running_device().kind
    name = args.shape or ("1b" if kind == "cuda" else "135m")
    shape = SHAPES[name]
    schemes = [
        "floats",
        *(args.schemes or (("gguf_q8_0", "gguf_q4_0") if name == "135m" else ("gguf_q8_0", "gguf_q4k"))),
    ]
    models, goals = {}, Goals()
    for scheme in schemes:
        before = allocated_bytes()
        models[scheme], stored = build(shape, scheme, name != "8b")
        added = allocated_bytes() - before
        emit(scheme=scheme, gib=round(stored / 2**30, 3), allocated=added / stored, floor_ms=floor_ms(models[scheme]))
        if added and scheme != "floats":
            goals.at_most(f"bytes on the device of {scheme}, to those of the file", added / stored, 1.03)
    lines: list[list[str]] = []
    steps = decode.LONG - decode.SHORT
    rows = [
        decode.measure(
            f"decode {batch}",
            {s: (decode.our_decode(lm, shape, batch, decode.LONG), decode.our_decode(lm, shape, batch, decode.SHORT))
             for s, lm in models.items()},
            steps, args.rounds,
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
            limit = GOALS.get(kind, {}).get(scheme) if row.name == "decode 1" else 1.15 if kind == "cuda" else None
            verdict = f"{goals.at_most(f'{row.name}, {scheme}', ratio, limit)} ({limit:g})" if limit else ""
            lines.append(
                [row.name, scheme, f"{row.ms[scheme]:.2f}", f"{row.ms['floats']:.2f}", f"{ratio:.3f}", verdict]
            )
    print(table(["ms a step or prompt", "scheme", "packed", "floats", "ratio", "goal"], lines))
    memory = jax.local_devices()[0].memory_stats()
    if memory:
        emit(peak_gib=round(memory["peak_bytes_in_use"] / 2**30, 3))
    goals.exit()


if __name__ == "__main__":
    main()
