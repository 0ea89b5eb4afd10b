"""Encoders beside hand-written JAX and torch: MiniLM's shape, NomicBERT's and DINOv2-small's, random weights.

    python benchmarks/encoders.py                on a CPU in f32, on a GPU in bf16
    python benchmarks/encoders.py --torch        transformers eager too, in the same process
    python benchmarks/encoders.py --tiny         small shapes: checks the script

Ours is `rlx.compile(recipe, weights)`, on a GPU with products merged, as by `rlx.load`. By hand: the fastest of
four layouts of `handwritten_encoders.py`, each held to our numbers first. Times are medians of interleaved calls. Exits
with 1 if ours takes over 1.03 x the hand-written time on a CPU, or on a GPU more than 1 / 1.3 of torch's.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import handwritten_encoders as hand
import jax
import ml_dtypes
import numpy as np
from report import Goals, emit, interleaved, median_ratio, table

import rlx_jax as rlx
from rlx_jax.models.bert import BertConfig, BertFlow
from rlx_jax.models.nomic import NomicConfig, NomicFlow
from rlx_jax.models.vit import Dinov2Config, Dinov2Flow

Numbers = np.ndarray[Any, Any]
CPU_GOAL, GPU_GOAL = 1.03, 1 / 1.3


@dataclass(frozen=True)
class Case:
    """One encoder: its config as Hugging Face writes it, the recipe, the same by hand, and what it reads."""

    name: str
    config: Mapping[str, Any]
    recipe: Callable[[Mapping[str, Any]], Any]
    handwritten_forward: Callable[..., jax.Array]
    sizes: hand.Sizes
    batch: int
    seq: int  # tokens; 0: images
    qkv: str = ""  # where a layer's query, key and value are

    def inputs(self) -> dict[str, Numbers]:
        """By the names that all sides use; texts are ragged."""
        rng = np.random.default_rng(0)
        if not self.seq:
            shape = (self.batch, 3, self.sizes.image, self.sizes.image)
            return {"pixel_values": rng.standard_normal(shape, np.float32)}
        lengths = np.maximum(np.linspace(1, 0.3, self.batch) * self.seq, 1).astype(int)
        keep = np.arange(self.seq)[None] < lengths[:, None]
        ids = np.where(keep, rng.integers(1, self.sizes.vocab, keep.shape), 0)
        return {"input_ids": ids.astype(np.int32), "attention_mask": keep.astype(np.int32)}


def minilm(tiny: bool, gpu: bool) -> Case:
    s = hand.Sizes(2, 48, 4, 96, vocab=500) if tiny else hand.Sizes(6, 384, 12, 1536)
    config = dict(
        model_type="bert", vocab_size=s.vocab, hidden_size=s.hidden, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, intermediate_size=s.ffn, layer_norm_eps=s.eps,
    )  # fmt: skip
    shape = (3, 16) if tiny else (64, 128) if gpu else (8, 128)
    return Case("MiniLM", config, lambda c: BertFlow(BertConfig.from_hf(c)), hand.bert, s, *shape,
                qkv="encoder.layer.{i}.attention.self")  # fmt: skip


def nomic(tiny: bool, gpu: bool) -> Case:
    s = (
        hand.Sizes(2, 48, 4, 96, vocab=500, theta=1000.0)
        if tiny
        else hand.Sizes(12, 768, 12, 3072, 30528, theta=1000.0)
    )
    config = dict(
        model_type="nomic_bert", vocab_size=s.vocab, n_embd=s.hidden, n_layer=s.layers, n_head=s.heads, n_inner=s.ffn,
        layer_norm_epsilon=s.eps, rotary_emb_base=s.theta, rotary_emb_fraction=1.0, n_positions=2048,
        activation_function="swiglu", qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, prenorm=False,
        type_vocab_size=2,
    )  # fmt: skip
    shape = (3, 16) if tiny else (64, 128) if gpu else (4, 128)
    return Case("NomicBERT", config, lambda c: NomicFlow(NomicConfig.from_hf(c)), hand.nomic, s, *shape)


def dinov2(tiny: bool, gpu: bool) -> Case:
    s = hand.Sizes(2, 48, 4, 96, eps=1e-6, patch=7, image=28) if tiny else hand.Sizes(12, 384, 6, 1536, eps=1e-6)
    config = dict(
        model_type="dinov2", hidden_size=s.hidden, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        mlp_ratio=s.ffn // s.hidden, layer_norm_eps=s.eps, patch_size=s.patch, image_size=s.image,
    )  # fmt: skip
    batch = 2 if tiny else 64 if gpu else 4
    return Case("DINOv2-small", config, lambda c: Dinov2Flow(Dinov2Config.from_hf(c)), hand.dinov2, s, batch, 0,
                qkv="encoder.layer.{i}.attention.attention")  # fmt: skip


CASES = {"minilm": minilm, "nomic": nomic, "dinov2": dinov2}


def weights_of(case: Case, dtype: Any) -> dict[str, Numbers]:
    """Random weights by checkpoint key."""
    model = rlx.compile(case.recipe(case.config))
    return {key: np.asarray(w, np.float32).astype(dtype) for key, w in model.weights(model.init(0)).items()}


def handwritten_calls(
    case: Case, weights: Mapping[str, Numbers], inputs: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """A call for each layout."""
    calls = {}
    for layout in hand.LAYOUTS:
        if layout.merged and not case.qkv:
            continue
        params = hand.prepare_weights(weights, layout, case.qkv, dtype)
        device_inputs = [jax.device_put(x.astype(dtype) if x.dtype.kind == "f" else x) for x in inputs.values()]
        function = jax.jit(functools.partial(case.handwritten_forward, c=case.sizes, layout=layout))
        calls[f"by hand, {layout.name}"] = functools.partial(call_and_wait, function, params, *device_inputs)
    return calls


def call_and_wait(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """The result, when it is there."""
    return function(*args).block_until_ready()


def hidden(outputs: jax.Array | dict[str, jax.Array]) -> jax.Array:
    """The hidden states among a model's outputs."""
    return outputs["hidden_states"] if isinstance(outputs, dict) else outputs


def torch_call(case: Case, inputs: Mapping[str, Numbers], gpu: bool) -> Callable[[], Any] | None:
    """transformers, eager, in the same dtype; None where it is too old to have the model."""
    import torch
    import transformers

    kind = dict(case.config)
    model_type = kind.pop("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        return None
    config = transformers.AutoConfig.for_model(model_type, **kind)
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    model = transformers.AutoModel.from_config(config).to(device, dtype).eval()
    device_inputs = {k: torch.from_numpy(v).to(device) for k, v in inputs.items()}
    device_inputs = {k: v.to(dtype) if v.is_floating_point() else v.long() for k, v in device_inputs.items()}

    def call() -> Any:
        with torch.inference_mode():
            out = model(**device_inputs)
            if gpu:
                torch.cuda.synchronize()
        return out

    return call


def run(case: Case, torch_too: bool, gpu: bool, rounds: int, budget: float, goals: Goals) -> list[Any]:
    """Ours, by hand and torch's, as a row of the table."""
    dtype = "bfloat16" if gpu else "float32"
    weights, inputs = weights_of(case, ml_dtypes.bfloat16 if gpu else np.float32), case.inputs()
    profile = rlx.CompileProfile().replace(backend={"cuda": {"merge": True}}) if gpu else None
    model = rlx.compile(case.recipe(case.config), weights, profile=profile)
    device_inputs = {k: jax.device_put(v) for k, v in inputs.items()}
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: hidden(jax.block_until_ready(model(**device_inputs)))}
    hands = handwritten_calls(case, weights, inputs, dtype)
    keep = inputs.get("attention_mask", np.ones((case.batch, 1))) > 0
    got = np.asarray(calls["ours"](), np.float32)
    keep = np.broadcast_to(keep, got.shape[:2])
    errors = {}
    for name, call in hands.items():
        want = np.asarray(call(), np.float32)
        errors[name] = float(np.abs(got - want)[keep].max() / np.abs(want[keep]).max())
    goals.at_most(f"{case.name}: ours - by hand", max(errors.values()), 6e-2 if gpu else 3e-5)
    calls |= hands
    theirs = torch_call(case, inputs, gpu) if torch_too else None
    if theirs is not None:
        calls["torch"] = theirs
    interleaved(calls, 3)
    times = interleaved(calls, rounds, budget)
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    best = min(hands, key=lambda name: ms[name])
    ratio = median_ratio(times["ours"], times[best])
    verdict = goals.at_most(f"{case.name}: ours / {best}", ratio, CPU_GOAL) if not gpu else ""
    row = [case.name, f"{ms['ours']:.2f}", f"{ms[best]:.2f}", f"{ratio:.3f} {verdict}"]
    if torch_too and theirs is None:
        row += ["none", ""]
    if theirs is not None:
        other = median_ratio(times["ours"], times["torch"])
        verdict = goals.at_most(f"{case.name}: ours / torch", other, GPU_GOAL) if gpu else ""
        row += [f"{ms['torch']:.2f}", f"{other:.3f} {verdict}"]
    emit(benchmark="encoders", case=case.name, ms=ms, rounds=len(times["ours"]), error=max(errors.values()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="encoders compared with hand-written JAX and torch")
    parser.add_argument("--torch", action="store_true", help="transformers too")
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), help="some models")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for a model")
    args = parser.parse_args()
    gpu = jax.default_backend() == "gpu"
    emit(jax=jax.__version__, device=jax.devices()[0].device_kind)
    goals = Goals()
    cases = [CASES[name](args.tiny, gpu) for name in args.only]
    rows = [run(case, args.torch, gpu, args.rounds, args.budget, goals) for case in cases]
    head = ["ms a call", "rlx_jax", "by hand", "ratio"] + (["torch", "ratio"] if args.torch else [])
    print(table(head, rows))
    goals.exit()


if __name__ == "__main__":
    main()
