"""MiniLM and a Llama forward pass on one GPU: right, and how fast beside torch.

    python benchmarks/gpu.py                       MiniLM's shape with random weights, Llama small and 1B
    python benchmarks/gpu.py --minilm DIR          a real MiniLM checkpoint
    python benchmarks/gpu.py --tiny                everything small, on the CPU: checks this script, not a GPU

The reference is transformers in f32 on the CPU. Exits with 1 if, relative to the reference's largest value,
f32 with precision.matmul = "highest" is off by more than 3e-5, or bf16 by more than 1.5 x what transformers' own
bf16 is off on the same device, or if the 64 tokens that both choose greedily in f32 differ. Times are medians of
interleaved calls in this one process, the device synchronised after every call; torch runs eagerly, as a user of
transformers would. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before jax is imported: torch needs memory on the same GPU, and the reference runs on the CPU.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_PLATFORMS"] = "cpu" if "--tiny" in sys.argv else "cuda,cpu"

import jax
import ml_dtypes
import numpy as np
import torch
import transformers
from report import Goals, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.models.bert import BertConfig, BertFlow
from rlx_jax.models.llama import Llama32Flow, LlamaConfig

F32_GOAL = 3e-5
BF16_GOAL = 1.5
NEW_TOKENS = 64
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One model with its input. `valid` `[B, S]` marks the positions that are compared."""

    name: str
    reference: Any  # a transformers model in f32 on the CPU
    flow: Any
    weights: Mapping[str, Numbers] | None  # None: the flow brings its own
    inputs: Mapping[str, Numbers]  # by the names that both sides use
    valid: Numbers
    on_cpu: bool  # also run ours on the CPU


# -- the models --------------------------------------------------------------------------------


def arrays(model: torch.nn.Module, bf16: bool = False) -> dict[str, Numbers]:
    """A model's weights by checkpoint key: f32 without a copy, or as bf16."""
    state = model.state_dict()
    if bf16:
        return {k: t.bfloat16().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for k, t in state.items()}
    return {k: t.numpy() for k, t in state.items()}


def round_to_bf16(model: torch.nn.Module) -> None:
    """As the weights of a bf16 checkpoint are: then bf16 errors are those of the computation alone."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())


def bert_case(path: str | None, batch: int, seq: int, tiny: bool) -> Case:
    """MiniLM on a ragged batch."""
    if path is None:
        config = transformers.BertConfig(
            vocab_size=500 if tiny else 30522, hidden_size=48 if tiny else 384, num_hidden_layers=2 if tiny else 6,
            num_attention_heads=12, intermediate_size=96 if tiny else 1536, initializer_range=0.05,
        )  # fmt: skip
        model = transformers.BertModel(config, add_pooling_layer=False).eval()
        flow: Any = BertFlow(BertConfig.from_hf(config.to_dict()))
        weights: dict[str, Numbers] | None = arrays(model)
    else:
        model = transformers.BertModel.from_pretrained(path, add_pooling_layer=False, dtype=torch.float32).eval()
        flow, weights = rlx.from_pretrained(path), None
    rng = np.random.default_rng(0)
    lengths = rng.integers(seq // 4, seq + 1, batch)
    lengths[0] = seq
    valid = np.arange(seq)[None] < lengths[:, None]
    ids = np.where(valid, rng.integers(1, model.config.vocab_size, (batch, seq)), 0)
    inputs = {"input_ids": ids.astype(np.int32), "attention_mask": valid.astype(np.int32)}
    name = f"MiniLM{' shape, random' if path is None else ''}, {batch} x {seq}"
    return Case(name, model, flow, weights, inputs, valid, on_cpu=True)


def llama_case(name: str, sizes: Mapping[str, Any], batch: int, seq: int, on_cpu: bool) -> Case:
    """A Llama 3.2 with random bf16 weights."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = transformers.LlamaConfig(
        rope_parameters=rope, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=True,
        initializer_range=sizes["hidden_size"] ** -0.5, **sizes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    round_to_bf16(model)
    weights = arrays(model, bf16=True)
    del weights["lm_head.weight"]  # tied
    ids = np.random.default_rng(1).integers(0, sizes["vocab_size"], (batch, seq)).astype(np.int32)
    flow = Llama32Flow(LlamaConfig.from_hf(config.to_dict()))
    valid = np.ones((batch, seq), bool)
    return Case(f"{name}, {batch} x {seq}", model, flow, weights, {"input_ids": ids}, valid, on_cpu)


def cases(minilm: str | None, tiny: bool) -> list[Callable[[], Case]]:
    """What is run. Each is made when its turn comes: the large one takes some GB."""
    small = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
    large = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    if tiny:
        small = {**small, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        large = {**small, "num_hidden_layers": 3}
    return [
        lambda: bert_case(minilm, *((3, 16) if tiny else (32, 128)), tiny),
        lambda: llama_case("Llama small", small, *((2, 8) if tiny else (2, 128)), on_cpu=True),
        lambda: llama_case("Llama 1B", large, 1, 16 if tiny else 512, on_cpu=False),
    ]


# -- torch -------------------------------------------------------------------------------------


class Torch:
    """transformers, eager, on one device."""

    def __init__(self, reference: Any, device: str, dtype: torch.dtype, inputs: Mapping[str, Numbers]) -> None:
        extra = {"add_pooling_layer": False} if isinstance(reference, transformers.BertModel) else {}
        # Made in its dtype, as from_pretrained does: casting a model would also round its rotary frequencies.
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.model = type(reference)(reference.config, **extra).eval()
        finally:
            torch.set_default_dtype(before)
        self.model.load_state_dict(reference.state_dict())
        self.device = device
        self.inputs = {k: torch.from_numpy(v).to(device, torch.int64) for k, v in inputs.items()}

    def __call__(self) -> torch.Tensor:
        """One forward pass; returns when the device has finished."""
        with torch.inference_mode():
            out = self.model(**self.inputs, **({"use_cache": False} if "Llama" in type(self.model).__name__ else {}))
            if self.device == "cuda":
                torch.cuda.synchronize()
        result: torch.Tensor = out[0]
        return result

    def numbers(self) -> Numbers:
        found: Numbers = self().float().cpu().numpy()
        return found


# -- rlx_jax -----------------------------------------------------------------------------------


class Ours:
    """The flow, compiled for one device."""

    def __init__(self, case: Case, device: jax.Device, compute: str) -> None:
        profile = rlx.CompileProfile().replace(
            fusion={"target": "cpu" if device.platform == "cpu" else "cuda"},
            precision={"compute": compute, "matmul": "highest" if compute == "f32" else "default"},
            backend={"cuda": {"merge": True}},
        )
        jax.config.update("jax_default_device", device)
        start = time.perf_counter()
        self.model = rlx.compile(case.flow, case.weights, profile=profile)
        self.inputs = {k: jax.device_put(v, device) for k, v in case.inputs.items()}
        self()
        self.first_call_s = time.perf_counter() - start
        where = {d for p in self.model.params.values() for d in p.devices()} | self().devices()
        assert where == {device}, f"asked for {device}, runs on {where}"

    def __call__(self) -> jax.Array:
        """One forward pass; returns when the device has finished."""
        result: jax.Array = self.model(**self.inputs).block_until_ready()
        return result

    def numbers(self) -> Numbers:
        return np.asarray(self(), np.float32)


# -- greedy tokens -----------------------------------------------------------------------------


def same_tokens(case: Case, peer: Torch, compute: str) -> float:
    """How many of the new tokens are transformers' own, of all: both continue the same prompts greedily.

    A row counts up to the first token that differs, since what follows has another past.
    """
    new = 8 if len(case.inputs["input_ids"][0]) < 32 else NEW_TOKENS
    with torch.inference_mode():
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        want = peer.model.generate(peer.inputs["input_ids"], **options)[:, -new:].cpu().numpy()
    profile = rlx.CompileProfile().replace(
        precision={"compute": compute, "matmul": "highest" if compute == "f32" else "default"}
    )
    lm = rlx.CausalLM(case.flow, case.weights, profile=profile)
    got = np.asarray(lm.generate(case.inputs["input_ids"].tolist(), max_new_tokens=new))
    return float(np.cumprod(got == want, axis=1).sum() / want.size)


# -- comparing ---------------------------------------------------------------------------------


def error(got: Numbers, want: Numbers, valid: Numbers) -> tuple[float, float]:
    """Largest and root mean square difference at valid positions, relative to the reference's largest value."""
    difference, scale = np.abs(got[valid] - want[valid]), np.abs(want[valid]).max()
    return float(difference.max() / scale), float(np.sqrt(np.mean(np.square(difference))) / scale)


def run(case: Case, device: jax.Device, rounds: int, budget: float, goals: Goals) -> list[tuple[Any, ...]]:
    """Errors and times of one case as rows of the table, and as a JSON line."""
    where = "cpu" if device.platform == "cpu" else "cuda"
    start = time.perf_counter()
    reference = Torch(case.reference, "cpu", torch.float32, case.inputs)
    want = reference.numbers()
    del reference
    note = {"reference_s": time.perf_counter() - start}

    if case.on_cpu:
        on_cpu = Ours(case, jax.devices("cpu")[0], "f32").numbers()
    sides: dict[str, Any] = {
        "rlx_jax f32 highest": Ours(case, device, "f32"),
        "torch f32": Torch(case.reference, where, torch.float32, case.inputs),
        "rlx_jax bf16": Ours(case, device, "bf16"),
        "torch bf16": Torch(case.reference, where, torch.bfloat16, case.inputs),
    }
    found = {name: side.numbers() for name, side in sides.items()}
    errors = {name: error(got, want, case.valid) for name, got in found.items()}
    ours, theirs = (errors[f"{name} bf16"] for name in ("rlx_jax", "torch"))
    f32 = errors["rlx_jax f32 highest"][0]
    bf16 = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    verdict = {
        "rlx_jax f32 highest": goals.at_most(f"{case.name}: f32 against torch on the CPU", f32, F32_GOAL),
        "rlx_jax bf16": goals.at_most(f"{case.name}: bf16 error / torch's bf16 error", max(bf16), BF16_GOAL),
    }
    if case.on_cpu:
        errors["rlx_jax f32 CPU"] = error(on_cpu, want, case.valid)
        note["f32_to_own_cpu"] = error(found["rlx_jax f32 highest"], on_cpu, case.valid)[0]
        goals.at_most(f"{case.name}: f32 against rlx_jax on the CPU", note["f32_to_own_cpu"], F32_GOAL)

    if isinstance(case.flow, Llama32Flow):
        for compute in ("f32", "bf16"):
            note[f"greedy_{compute}"] = same_tokens(case, sides[f"torch {compute}"], compute)
        goals.at_most(f"{case.name}: greedy tokens in f32 that are not torch's", 1 - note["greedy_f32"], 0.0)

    for side in sides.values():  # libraries pick algorithms in their first calls
        for _ in range(3):
            side()
    times = interleaved(sides, rounds, budget)
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    rows = []
    for name, (largest, mean) in errors.items():
        peer = ms.get(name.replace("rlx_jax", "torch").removesuffix(" highest"), 0.0)
        ratio = f"{ms[name] / peer:.2f}" if name in ms and name.startswith("rlx") else ""
        first = f"{sides[name].first_call_s:.1f}" if isinstance(sides.get(name), Ours) else ""
        rows.append((f"{case.name}: {name}", f"{largest:.1e}", f"{mean:.1e}", verdict.get(name, ""),
                     f"{ms[name]:.3f}" if name in ms else "", ratio, first))  # fmt: skip
    steps = {name: {k: round(v, 3) for k, v in s.model.report().seconds.items()}
             for name, s in sides.items() if isinstance(s, Ours)}  # fmt: skip
    emit(benchmark="gpu", case=case.name, errors=errors, bf16_ratio=bf16,
         ms=ms, rounds=len(times["torch bf16"]), seconds=steps, **note)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="rlx_jax compared with torch on one GPU")
    parser.add_argument("--minilm", metavar="DIR", help="a checkpoint directory of MiniLM; else random weights")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of timed calls for a model")
    args = parser.parse_args()
    if args.minilm is not None and not Path(args.minilm).is_dir():
        parser.error(f"--minilm: {args.minilm} is no directory")
    device = jax.devices()[0]
    if not args.tiny and (device.platform != "gpu" or not torch.cuda.is_available()):
        parser.error("no GPU that both jax and torch see; --tiny runs on the CPU")
    torch.manual_seed(0)
    if args.tiny:
        torch.set_num_threads(1)  # else it fights with jax for a few cores
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    emit(benchmark="gpu", device=device.device_kind, python=sys.version.split()[0], jax=jax.__version__,
         torch=torch.__version__, transformers=transformers.__version__, rlx_jax=rlx.__version__)  # fmt: skip
    goals, rows = Goals(), []
    for make in cases(args.minilm, args.tiny):
        rows += run(make(), device, args.rounds, args.budget, goals)
        gc.collect()
        if device.platform == "gpu":
            torch.cuda.empty_cache()
    head = ("model", "max error", "rms error", "goal", "ms a call", "/ torch", "compile + load, s")
    print(table(head, rows))
    goals.exit()


if __name__ == "__main__":
    main()
