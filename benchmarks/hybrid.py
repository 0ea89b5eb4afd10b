"""Decoding and prefill of a model with a state of fixed size, ours and the peers' in turn, beside the machine's limits.

    python benchmarks/hybrid.py               Qwen3.5-0.8B's shape in bf16 on one GPU, random weights
    python benchmarks/hybrid.py --torch       transformers too, in the same process
    python benchmarks/hybrid.py --alone --only 8x4096     one job, ours and its limit
    python benchmarks/hybrid.py --tiny        a small shape in f32 on the CPU: checks this script

First the gated delta rule of one layer alone over each prompt, in every form of `handwritten_hybrid.py` and in ours.
Then the model: ours through `lm.generate` and `lm.prefill`, by hand with the form that was the fastest. The limit of a
job is the larger of the bytes that it has to read and write, by the bandwidth, and its products, by the speed of the
device. Of transformers its `generate` with a cache; where `flash-linear-attention` and `causal-conv1d` are installed it
takes their kernels, else its own forms in torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory on the same GPU
if "--tiny" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import handwritten_hybrid as hand
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from moe import measure
from report import RandomSource, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.device import running_device
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.models.qwen35 import Qwen35Config, Qwen35Flow

START = time.perf_counter()
SHORT, LONG = 17, 81
"""New tokens of two calls whose difference is the time of a step: what a call costs once drops out."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A model, how it runs, and what is measured."""

    sizes: hand.Sizes
    dtype: str
    prompt: int
    cache_len: int
    batches: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]

    @property
    def numpy(self) -> Any:
        return np.dtype(np.float32 if self.dtype == "f32" else ml_dtypes.bfloat16)


FULL = Shape(
    hand.Sizes(layers=24, hidden=1024, heads=8, kv_heads=2, head_dim=256, delta_heads=16, delta_dim=128, ffn=3584,
               vocab=248320),
    "bf16", 128, 512, (1, 8, 64), ((1, 4096), (8, 4096)),
)  # fmt: skip
TINY = Shape(
    hand.Sizes(layers=4, hidden=48, heads=2, kv_heads=1, head_dim=16, delta_heads=2, delta_dim=16, ffn=64, vocab=256),
    "f32", 16, 128, (1, 4), ((2, 80),),
)  # fmt: skip


def hf_config(c: hand.Sizes) -> dict[str, Any]:
    """The config of a shape, as transformers takes it."""
    return {
        "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": c.ffn, "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
        "linear_num_key_heads": c.delta_heads, "linear_num_value_heads": c.delta_heads,
        "linear_key_head_dim": c.delta_dim, "linear_value_head_dim": c.delta_dim, "linear_conv_kernel_dim": c.kernel,
        "rms_norm_eps": c.eps, "tie_word_embeddings": True, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.theta, "partial_rotary_factor": c.rotary_fraction},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def build(shape: Shape) -> rlx.CausalLM:
    """Our model with random weights."""
    recipe = Qwen35Flow.for_prefill(hf_config(shape.sizes) | {"model_type": "qwen3_5_text"})
    assert isinstance(recipe.config, Qwen35Config)
    specs = {key: jax.ShapeDtypeStruct(s.shape, shape.numpy) for key, s in recipe.shapes().items()}
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    return rlx.CausalLM(recipe, RandomSource(specs), profile=profile, max_positions=8192)


def handwritten_params(lm: rlx.CausalLM, c: hand.Sizes) -> dict[str, Any]:
    """Our leaves under the names of the hand-written model: there is one copy of the weights."""
    p: Any = lm.model.params
    ends = {"norm1": "input_layernorm.weight", "norm2": "post_attention_layernorm.weight",
            "gate_up": "mlp.{gate,up}_proj.weight", "down": "mlp.down_proj.weight"}  # fmt: skip
    full = {"qkv": "self_attn.{q,k,v}_proj.weight", "o": "self_attn.o_proj.weight",
            "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}  # fmt: skip
    linear = {"in": "in_proj_{qkv,z,b,a}.weight", "conv": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias",
              "norm": "norm.weight", "out": "out_proj.weight"}  # fmt: skip
    names = [
        ends | (full if (i + 1) % c.interval == 0 else {n: f"linear_attn.{key}" for n, key in linear.items()})
        for i in range(c.layers)
    ]
    layers = [{n: p[f"model.layers.{i}.{key}"] for n, key in layer.items()} for i, layer in enumerate(names)]
    return {"layers": layers, "embedding": p["model.embed_tokens.weight"], "norm": p["model.norm.weight"]}


# -- the limits of the machine --------------------------------------------------------------------


def lower_bound_ms(shape: Shape, rows: int, tokens: int) -> float:
    """Milliseconds below which no program can be, for `rows` of `tokens` new ones each: weights are read once, states
    are read and written, keys of a decoding step are those of the prompt."""
    device, c = running_device(), shape.sizes
    if not device.bandwidth or not device.flops:
        return float("nan")
    full, wide = c.layers // c.interval, c.delta_heads * c.delta_dim
    attention = c.hidden * c.head_dim * (3 * c.heads + 2 * c.kv_heads)
    delta = c.hidden * (5 * wide + 2 * c.delta_heads)
    weights = full * attention + (c.layers - full) * delta + c.layers * 3 * c.hidden * c.ffn
    state = (c.layers - full) * wide * c.delta_dim * 4
    keys = full * c.kv_heads * c.head_dim * 2 * shape.numpy.itemsize * (shape.prompt if tokens == 1 else tokens)
    moved = (weights + c.vocab * c.hidden) * shape.numpy.itemsize + rows * (2 * state + keys)
    products = 2.0 * rows * (tokens * weights + c.vocab * c.hidden)
    products += rows * tokens * (c.layers - full) * 6.0 * wide * c.delta_dim
    products += 2.0 * rows * tokens**2 * full * c.heads * c.head_dim * (tokens > 1)
    return max(moved / device.bandwidth, products / device.flops) * 1e3


# -- the rule alone -------------------------------------------------------------------------------


def rule_operands(c: hand.Sizes, batch: int, seq: int, dtype: Any) -> list[jax.Array]:
    """Random operands of one layer, and an empty state."""
    keys = jax.random.split(jax.random.key(batch), 5)
    heads = (batch, seq, c.delta_heads)
    q, k, v = (jax.random.normal(key, (*heads, c.delta_dim), jnp.float32) for key in keys[:3])
    q, k = (t / jnp.linalg.norm(t, axis=-1, keepdims=True) for t in (q, k))
    g, beta = -jax.nn.softplus(jax.random.normal(keys[3], heads)), jax.nn.sigmoid(jax.random.normal(keys[4], heads))
    state = jnp.zeros((batch, c.delta_heads, c.delta_dim, c.delta_dim), jnp.float32)
    return [*(t.astype(dtype) for t in (q, k, v)), g, beta, state]


def rules(seq: int) -> dict[str, hand.Rule]:
    """By hand and ours, for so many tokens."""
    op = GatedDeltaOp(from_state=True)
    names = ["one_token"] if seq == 1 else ["chunks_at_once", "chunk_by_chunk"]
    names += ["one_pass" if seq == 1 else "states_in_one"] * running_device().has_kernels
    ours = {f"ours, {name}": (lambda *a, n=name: IMPLEMENTATIONS[n](op, *a)) for name in names}
    return (hand.TOKEN if seq == 1 else hand.PROMPT) | ours


def time_rule(shape: Shape, batch: int, seq: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one layer; a form that does not compile is told and left out."""
    operands, queued = rule_operands(shape.sizes, batch, seq, shape.numpy), 20 if seq == 1 else 3
    calls: dict[str, Call] = {}
    for name, rule in rules(seq).items():
        try:
            run = jax.jit(rule).lower(*operands).compile()

            def call(run: Any = run) -> None:
                for _ in range(queued):
                    out = run(*operands)
                jax.block_until_ready(out)

            call()
            calls[name] = call
        except Exception as error:
            emit(rule=f"{batch}x{seq}", form=name, left_out=str(error).strip().splitlines()[0][:160])
    times = interleaved(calls, rounds, budget=8)
    return {name: statistics.median(t) / queued * 1e3 for name, t in times.items()}


# -- the model ------------------------------------------------------------------------------------


def prompts(shape: Shape, batch: int, seq: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(batch).integers(0, shape.sizes.vocab, (batch, seq)).astype(np.int32)


def ours(lm: rlx.CausalLM, shape: Shape, batch: int, seq: int) -> tuple[Call, Call | None]:
    """A prompt; or decoding, with a shorter call beside it."""
    if seq == 1:
        rows = prompts(shape, batch, shape.prompt).tolist()
        return lambda: lm.generate(rows, max_new_tokens=LONG), lambda: lm.generate(rows, max_new_tokens=SHORT)
    tokens = prompts(shape, batch, seq)
    return lambda: jax.block_until_ready(lm.prefill(tokens, max_len=seq, logits="last")[0]), None


def hand_call(shape: Shape, rule: hand.Rule, params: Any, batch: int, seq: int, steps: int) -> Call:
    """`steps` steps called from the host, each fed with the token of the last; of a prompt one from an empty cache.
    Attention by cuDNN where it takes the shape."""
    cache_len = max(seq, shape.cache_len)
    try:
        made = hand.compiled(
            shape.sizes, rule, jax.default_backend() == "gpu", params, batch, seq, cache_len, shape.numpy
        )  # fmt: skip
    except Exception as error:
        emit(job=f"{batch}x{seq}", cudnn=str(error).strip().splitlines()[0][:160])
        made = hand.compiled(shape.sizes, rule, False, params, batch, seq, cache_len, shape.numpy)
    run, new_cache = made
    ids = prompts(shape, batch, seq)
    if seq > 1:
        return lambda: jax.block_until_ready(run(params, ids, np.int32(0), new_cache())[0])
    carry = [jnp.asarray(ids[:, 0]), new_cache()]

    def decode() -> None:
        for i in range(steps):
            carry[0], carry[1] = run(params, carry[0][:, None], np.int32(shape.prompt + i), carry[1])
        jax.block_until_ready(carry[0])

    return decode


class Torch:
    """transformers' model of the same shape on the same device."""

    def __init__(self, shape: Shape, device: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.torch, self.shape, self.device = torch, shape, device
        config = transformers.Qwen3_5TextConfig(**hf_config(shape.sizes))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if shape.dtype == "f32" else torch.bfloat16)
        try:
            with torch.device(device):
                self.model = transformers.Qwen3_5ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def calls(self, batch: int, seq: int) -> tuple[Call, Call | None]:
        """A prompt, logits of its last token and the cache; or whole calls of `generate`, greedy, never ended."""
        tokens = prompts(self.shape, batch, self.shape.prompt if seq == 1 else seq)
        rows = self.torch.as_tensor(tokens, dtype=self.torch.int64, device=self.device)

        def generate(new: int) -> None:
            options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            with self.torch.inference_mode():
                self.model.generate(rows, pad_token_id=0, **options).cpu()

        def prefill() -> None:
            with self.torch.inference_mode():
                self.model(rows, logits_to_keep=1, use_cache=True).logits.cpu()

        return (lambda: generate(LONG), lambda: generate(SHORT)) if seq == 1 else (prefill, None)


def torch_calls(peer: Torch | None, batch: int, seq: int, seconds: float) -> dict[str, tuple[Call, Call | None]]:
    """If it works, until so many seconds of this process are over."""
    if peer is None or time.perf_counter() - START > seconds:
        return {}
    try:
        found = peer.calls(batch, seq)
        found[0]()
        return {"torch": found}
    except Exception as error:
        emit(job=f"{batch}x{seq}", form="torch", left_out=str(error).strip().splitlines()[0][:160])
        return {}


# -- the tables -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding and prefill of a model with a state of fixed size")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    parser.add_argument("--torch", action="store_true", help="transformers too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=330.0, help="after which no further peer of torch begins")
    parser.add_argument("--only", default="", help="jobs that contain this text, such as 'decode' or '8x4096'")
    parser.add_argument("--alone", action="store_true", help="neither the rule alone nor the model by hand")
    args = parser.parse_args()
    shape = TINY if args.tiny else FULL
    lm = build(shape)
    params = handwritten_params(lm, shape.sizes)
    jobs = {f"decode {batch}": (batch, 1) for batch in shape.batches}
    jobs |= {f"prefill {batch}x{seq}": (batch, seq) for batch, seq in shape.prompts}
    jobs = {name: job for name, job in jobs.items() if args.only in name}
    emit(benchmark="hybrid", device=str(running_device()), jax=jax.__version__,
         loaded_s=round(time.perf_counter() - START, 1))  # fmt: skip

    best: dict[tuple[int, int], str] = {}
    lines = []
    for batch, seq in () if args.alone else jobs.values():
        ms = time_rule(shape, batch, seq, args.rounds)
        best[batch, seq] = min((n for n in ms if not n.startswith("ours")), key=lambda n: ms[n])
        for name, value in sorted(ms.items(), key=lambda item: item[1]):
            lines.append([f"{batch} x {seq}: {name}", f"{value:.3f}", f"{value / batch / seq * 1e3:.3f}"])
        emit(rule=f"{batch}x{seq}", ms={n: round(v, 4) for n, v in ms.items()})
    if lines:
        print(table(["the rule of one layer", "ms", "us a token"], lines), flush=True)
    emit(seconds=round(time.perf_counter() - START, 1))

    peer = Torch(shape, "cuda" if jax.default_backend() == "gpu" else "cpu") if args.torch else None
    lines = []
    for name, (batch, seq) in jobs.items():
        steps, form = LONG - SHORT if seq == 1 else 1, best.get((batch, seq), "")
        calls = {"ours": ours(lm, shape, batch, seq)}
        if form:
            rule = (hand.TOKEN if seq == 1 else hand.PROMPT)[form]
            calls["by hand"] = (hand_call(shape, rule, params, batch, seq, steps), None)
        calls |= torch_calls(peer, batch, seq, args.seconds)
        ms, floor = measure(calls, steps, args.rounds), lower_bound_ms(shape, batch, seq)
        by_hand, theirs = ms.get("by hand", float("nan")), ms.get("torch", float("nan"))
        emit(job=name, ms={n: round(v, 4) for n, v in ms.items()}, limit=round(floor, 4), by_hand=form,
             seconds=round(time.perf_counter() - START, 1))  # fmt: skip
        numbers = (ms["ours"], by_hand, ms["ours"] / by_hand, theirs, ms["ours"] / theirs, floor)
        lines.append([name, *(f"{n:.3f}" for n in numbers), f"{ms['ours'] / floor:.2f}", form])
    head = ["ms a step or prompt", "ours", "by hand", "ratio", "torch", "ratio", "limit", "ratio", "the form by hand"]
    print(table(head, lines))


if __name__ == "__main__":
    main()
