"""Decoding and prefill over several devices, beside one.

    python benchmarks/devices.py                 the 8B shape in bf16 on 1 and on all GPUs; a small one on a CPU
    python benchmarks/devices.py --devices 2     on 2 alone
    python benchmarks/devices.py --option xla_gpu_x=true --steps 16     with an option of XLA, steps a dispatch

Through `rlx.CausalLM(…, mesh=n)`, `lm.generate` and `lm.prefill`, as a user's call. Weights are made up, read by each
device in its own part. What a step of the 8B shape cannot go below on n H200 (4.24 TB/s measured copy): 16.06 GB of
weights, of which the embedding (1.05 GB) is only looked up, are 15.0 / n GB, 3.54 / n ms; of a prompt of 8 x 2048
tokens: 246 TFLOP of products and 9 of attention, 322 / n ms at 790 TFLOP/s. Two all-reduces a layer are 64 in a step.

`--train` takes steps of AdamW of the 1B shape, data parallel with as many rows a device as on one, and as many in all.

Exits with 1 if a goal is missed: on two H200 2.9 ms a step of 1 row, 3.5 of 64, and a prompt 1.9 times as fast as on
one, and training 1.9 times as many tokens a second.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import decode as single
import jax
import ml_dtypes
import numpy as np
from handwritten_llama import Sizes, hf_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from report import Goals, RandomSource, emit, seconds, table

import rlx_jax as rlx
from rlx_jax.lowering.inspect.hlo import count_collectives
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs

SHAPES = {
    "8b": single.Shape(
        Sizes(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, theta=5e5),
        "bf16", 128, 1024, (1, 64), ((8, 2048),), (), ms=(("decode 1", 2.9), ("decode 64", 3.5)), queued=5,
    ),
    "tiny": single.Shape(
        Sizes(layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, vocab=512),
        "f32", 16, 128, (1, 2), ((2, 32),), (),
    ),
}  # fmt: skip
SPEED_UP = 1.9


def build(shape: single.Shape, devices: int, options: Mapping[str, Any], steps: int | None) -> rlx.CausalLM:
    """The model over so many devices."""
    config = LlamaConfig.from_hf({**hf_config(shape.sizes), "tie_word_embeddings": False})
    dtype = np.float32 if shape.dtype == "f32" else ml_dtypes.bfloat16
    backend: dict[str, Any] = {"compiler_options": dict(options)} | (
        {} if steps is None else {"steps_per_dispatch": steps}
    )
    profile = rlx.CompileProfile.preset("auto").replace(
        precision={"compute": shape.dtype}, backend={"cuda" if jax.default_backend() == "gpu" else "cpu": backend}
    )
    source = RandomSource(weight_specs(config, dtype=dtype))
    return rlx.CausalLM(
        Llama32Flow(config), source, profile=profile, max_positions=4096, mesh=None if devices == 1 else devices
    )


def collectives_by_program(lm: rlx.CausalLM) -> dict[str, dict[str, int]]:
    """The collectives of each compiled program."""
    executables = lm.model.programs.executables.items()
    return {key.text: count_collectives(executable.call.as_text() or "") for key, executable in executables}


def measure(shape: single.Shape, lm: rlx.CausalLM, devices: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each job."""
    found = {}
    for batch in shape.batches:
        calls = (single.our_decode(lm, shape, batch, single.LONG), single.our_decode(lm, shape, batch, single.SHORT))
        row = single.measure(f"decode {batch}", {f"{devices} devices": calls}, single.LONG - single.SHORT, rounds)
        found[row.name] = next(iter(row.ms.values()))
    for batch, seq in shape.prompts:
        call = single.our_prefill(lm, shape, batch, seq, shape.queued)
        row = single.measure(f"prefill {batch}x{seq}", {f"{devices} devices": (call, None)}, shape.queued, rounds)
        found[row.name] = next(iter(row.ms.values()))
    return found


def train_step(shape: single.Shape, devices: int, rows: int, seq: int, rounds: int) -> float:
    """Milliseconds of a step of AdamW, data parallel, `rows` rows a device."""
    import optax

    from rlx_jax import train

    config = LlamaConfig.from_hf({**hf_config(shape.sizes), "tie_word_embeddings": True})
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("data",))
    source = RandomSource(weight_specs(config, dtype=np.float32 if shape.dtype == "f32" else ml_dtypes.bfloat16))
    profile = rlx.CompileProfile.preset("train_bf16") if jax.default_backend() == "gpu" else None
    model = rlx.compile(Llama32Flow(config), source, profile=profile, mesh=mesh, program="train")
    optimizer = optax.adamw(1e-4)
    carry = [train.init(model, optimizer)]
    step = train.make_step(model, optimizer)
    tokens = np.random.default_rng(0).integers(0, shape.sizes.vocab, (rows * devices, seq)).astype(np.int32)
    if mesh is not None:
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))

    def call() -> None:
        for _ in range(4):
            carry[0], metrics = step(carry[0], tokens)
        jax.block_until_ready(metrics.loss)

    call()
    ms = statistics.median(seconds(call) for _ in range(rounds)) / 4 * 1e3
    emit(job=f"train {rows}x{seq} a device", devices=devices, ms=round(ms, 1))
    return ms


def train_all(shape: single.Shape, counts: Sequence[int], rounds: int, goals: Goals) -> list[list[str]]:
    """Rows a device, and rows in all, as on one."""
    rows, seq = (8, 2048) if jax.default_backend() == "gpu" else (2, 32)
    one, lines = train_step(shape, 1, rows, seq, rounds), []
    for devices in (n for n in counts if n > 1):
        for each in (rows, rows // devices):
            ms = train_step(shape, devices, each, seq, rounds)
            speed = each * devices / ms / (rows / one)
            verdict = ""
            if (each, devices) == (rows, 2):
                verdict = goals.at_most("1 / speed-up of training", 1 / speed, 1 / SPEED_UP)
            what = f"train, {each}x{seq} a device, {devices} / 1"
            lines.append([what, f"{one:.1f}", f"{ms:.1f}", f"{speed:.2f} x {verdict}"])
    return lines


def value_of(text: str) -> str | bool | int:
    """An option's value as XLA takes it."""
    return {"true": True, "false": False}.get(text, int(text) if text.lstrip("-").isdigit() else text)


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding and prefill over several devices")
    parser.add_argument("--shape", choices=SHAPES, help="by default 8b on a GPU, else tiny")
    parser.add_argument("--devices", type=int, nargs="*", help="by default 1 and all")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of XLA")
    parser.add_argument("--steps", type=int, help="steps a dispatch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="a step of training, data parallel, of the 1B shape")
    args = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    shape = SHAPES[args.shape or ("8b" if gpu else "tiny")]
    options = {name: value_of(value) for name, _, value in (option.partition("=") for option in args.option)}
    if args.train:
        goals, shape = Goals(), single.SHAPES[args.shape or ("1b" if gpu else "tiny")]
        lines = train_all(shape, args.devices or [len(jax.devices())], args.rounds, goals)
        print(table(["ms a step", "one", "several", "tokens a second"], lines))
        goals.exit()
    found: dict[int, dict[str, float]] = {}
    for devices in args.devices or sorted({1, len(jax.devices())}):
        lm = build(shape, devices, options, args.steps)
        found[devices] = measure(shape, lm, devices, args.rounds)
        emit(devices=devices, load_seconds=round(lm.model.load_seconds, 1), collectives=collectives_by_program(lm))
        del lm
        gc.collect()
    goals, lines = Goals(), []
    for job in next(iter(found.values())):
        verdict = ""
        if 2 in found and job in dict(shape.ms):
            verdict = goals.at_most(f"{job} on 2, ms", found[2][job], dict(shape.ms)[job])
        if {1, 2} <= found.keys() and job.startswith("prefill") and gpu:
            verdict = goals.at_most(f"{job}, 2 devices / 1", found[2][job] / found[1][job], 1 / SPEED_UP)
        lines.append([job, *(f"{row[job]:.2f}" for row in found.values()), verdict])
    print(table(["ms a step or prompt", *(f"{n} devices" for n in found), "goal"], lines))
    goals.exit()


if __name__ == "__main__":
    main()
