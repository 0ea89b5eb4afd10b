"""Decoding and prefill of a mixture of experts, ours and the peers' in turn, beside the limits of the machine.

    python benchmarks/moe.py                  Qwen3-30B-A3B's widths, 8 of its layers, in bf16 on one GPU
    python benchmarks/moe.py --torch          transformers too, in the same process
    python benchmarks/moe.py --tiny           a small shape in f32 on the CPU: checks this script

First the experts of all layers alone, in every form of `handwritten_moe.py` and every way of ours: ms for a pass
through the layers. Then the model: ours through `lm.generate` and `lm.prefill`, by hand with the form that was the
fastest for that number of tokens. The limit of a job is the larger of the bytes that it has to read, by the bandwidth,
and its products, by the speed of the device; the experts that random tokens choose are counted as expected. Peers of
transformers: its `generate` with grouped and with batched products, and with a static cache, compiled, while there is
time.
"""

from __future__ import annotations

import argparse
import functools
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

import handwritten_moe as hand
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from handwritten_decode import empty_cache
from report import RandomSource, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.device import running_device
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.models.mixture import Qwen3MoeConfig, Qwen3MoeFlow, weight_specs

START = time.perf_counter()
SHORT, LONG = 17, 81
"""New tokens of two calls whose difference is the time of a step: what a call costs once drops out."""


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
    hand.Sizes(
        layers=8, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8, inner=768, vocab=151936
    ),
    "bf16", 128, 512, (1, 8, 64), ((8, 2048),),
)  # fmt: skip
TINY = Shape(
    hand.Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, inner=32, vocab=512),
    "f32", 16, 128, (1, 4), ((2, 32),),
)  # fmt: skip


def hf_config(c: hand.Sizes) -> dict[str, Any]:
    """The config of a shape, as transformers takes it."""
    return {
        "vocab_size": c.vocab, "hidden_size": c.hidden, "intermediate_size": 3 * c.hidden, "head_dim": c.head_dim,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "num_local_experts": c.experts, "num_experts_per_tok": c.top_k, "moe_intermediate_size": c.inner,
        "norm_topk_prob": True, "rms_norm_eps": c.eps, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.theta}, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip


def build(shape: Shape) -> rlx.CausalLM:
    """Our model with random weights."""
    config = Qwen3MoeConfig.from_hf(hf_config(shape.sizes))
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    return rlx.CausalLM(
        Qwen3MoeFlow(config), RandomSource(weight_specs(config, shape.numpy)), profile=profile, max_positions=4096
    )


def handwritten_params(lm: rlx.CausalLM, c: hand.Sizes) -> dict[str, Any]:
    """Our leaves under the names of the hand-written model: there is one copy of the experts."""
    p: Any = lm.model.params
    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "router": "mlp.gate",
             "qkv": "self_attn.{q,k,v}_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
             "k_norm": "self_attn.k_norm"}  # fmt: skip
    names |= {name: f"mlp.experts.{{0..{c.experts - 1}}}.{name}_proj" for name in ("gate", "up", "down")}
    layers = [{n: p[f"model.layers.{i}.{key}.weight"] for n, key in names.items()} for i in range(c.layers)]
    ends = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    return {"layers": layers, **{n: p[f"{key}.weight"] for n, key in ends.items()}}


# -- the limits of the machine --------------------------------------------------------------------


def lower_bound_ms(shape: Shape, rows: int, tokens: int, full_model: bool) -> float:
    """Milliseconds that no program can beat for `rows` rows of `tokens` new tokens each: of the experts, or with
    `full_model` of the model."""
    device, c = running_device(), shape.sizes
    if not device.bandwidth or not device.flops:
        return float("nan")
    many, expert = rows * tokens, 3 * c.hidden * c.inner
    chosen = c.experts * (1 - (1 - c.top_k / c.experts) ** many)
    read, products = c.layers * chosen * expert, 2.0 * c.layers * many * c.top_k * expert
    if full_model:
        attention = c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads) + c.hidden * c.experts
        read += c.layers * attention + c.vocab * c.hidden
        products += 2.0 * (c.layers * many * attention + rows * c.vocab * c.hidden)
        products += 2.0 * c.layers * rows * tokens**2 * c.heads * c.head_dim * (tokens > 1)
    return max(read * shape.numpy.itemsize / device.bandwidth, products / device.flops) * 1e3


# -- experts alone --------------------------------------------------------------------------------

Call = Callable[[], Any]
MAX_SCRATCH_BYTES = 24 << 30
"""Scratch memory that a form may take."""


def experts_call(c: hand.Sizes, form: hand.Form, layers: list[Any], tokens: int, queued: int) -> Call:
    """A pass through the experts of all layers."""
    dtype = layers[0]["gate"].dtype

    def run(x: jax.Array, layers: list[Any]) -> jax.Array:
        for layer in layers:
            x = hand.rms_norm(x + hand.mixture(c, form.run, x, layer), layer["norm2"], c.eps)
        return x

    x = jax.random.normal(jax.random.key(1), (tokens, c.hidden), jnp.float32).astype(dtype)
    compiled = jax.jit(run).lower(x, layers).compile(compiler_options=dict(form.options))
    scratch = compiled.memory_analysis().temp_size_in_bytes
    if scratch > MAX_SCRATCH_BYTES:
        raise MemoryError(f"{scratch / 2**30:.0f} GiB of scratch memory")

    def call() -> None:
        for _ in range(queued):
            out = compiled(x, layers)
        jax.block_until_ready(out)

    call()
    return call


def our_form(name: str) -> hand.Experts:
    """One of our implementations as a form."""
    op = ExpertFfn()
    return lambda x, weights, ids, w: IMPLEMENTATIONS[name](op, x, w["gate"], w["up"], w["down"], weights, ids)


def time_experts(shape: Shape, layers: list[Any], tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each form; those that do not compile or take too much room are told and left out."""
    gpu, queued = jax.default_backend() == "gpu", 10 if tokens <= 512 else 1
    forms = hand.forms(shape.sizes, tokens, gpu)
    ways = {"gathered": 32, "xla": 512, "blocked": 1 << 30, "looped": 64 if gpu else 1 << 30}
    ways |= {"grouped": 1 << 30} if running_device().has_kernels else {}
    forms |= {f"ours, {way}": hand.Form(our_form(way)) for way, most in ways.items() if tokens <= most}
    calls: dict[str, Call] = {}
    for name, form in forms.items():
        try:
            calls[name] = experts_call(shape.sizes, form, layers, tokens, queued)
        except Exception as error:  # an option of XLA that this version has not, or no room
            emit(experts=tokens, form=name, left_out=str(error).strip().splitlines()[0][:160])
    times = interleaved(calls, rounds, budget=10)
    return {name: statistics.median(t) / queued * 1e3 for name, t in times.items()}


# -- the model ------------------------------------------------------------------------------------


def prompts(shape: Shape, batch: int, seq: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(batch).integers(0, shape.sizes.vocab, (batch, seq)).astype(np.int32)


def our_decode(lm: rlx.CausalLM, shape: Shape, batch: int, new: int) -> Call:
    rows = prompts(shape, batch, shape.prompt).tolist()
    return lambda: lm.generate(rows, max_new_tokens=new)


def our_prefill(lm: rlx.CausalLM, shape: Shape, batch: int, seq: int) -> Call:
    tokens = prompts(shape, batch, seq)
    return lambda: jax.block_until_ready(lm.prefill(tokens, max_len=max(seq, shape.cache_len), logits="last")[0])


def hand_call(shape: Shape, form: hand.Form, params: Any, batch: int, seq: int, steps: int) -> Call:
    """`steps` steps called from the host, each fed with the token of the last; of a prompt one from an empty cache."""
    c, cache_len = shape.sizes, max(seq, shape.cache_len)
    new_cache = jax.jit(lambda: empty_cache(c, batch, cache_len, shape.numpy))  # type: ignore[arg-type]
    function = functools.partial(hand.step, c, form.run, jax.default_backend() == "gpu")
    specs = jax.eval_shape(new_cache)
    tokens, start = jax.ShapeDtypeStruct((batch, seq), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(function, donate_argnums=(3,)).lower(params, tokens, start, specs)
    compiled = lowered.compile(compiler_options=dict(form.options))
    ids = prompts(shape, batch, seq)
    carry = [jnp.asarray(ids[:, 0]), new_cache()]  # rows that were alike would choose the same experts

    def decode() -> None:
        for i in range(steps):
            carry[0], carry[1] = compiled(params, carry[0][:, None], np.int32(shape.prompt + i), carry[1])
        jax.block_until_ready(carry[0])

    return decode if seq == 1 else lambda: jax.block_until_ready(compiled(params, ids, np.int32(0), new_cache())[0])


def measure(calls: dict[str, tuple[Call, Call | None]], steps: int, rounds: int) -> dict[str, float]:
    """Medians of interleaved calls; where a shorter call is given, of the difference to it."""
    flat = {who: call for who, (call, _) in calls.items()}
    flat |= {f"{who}, shorter": shorter for who, (_, shorter) in calls.items() if shorter is not None}
    for call in flat.values():
        call()
        call()
    times = interleaved(flat, rounds, budget=25)
    ms = {}
    for who, (_, shorter) in calls.items():
        less = times[f"{who}, shorter"] if shorter is not None else [0.0] * len(times[who])
        ms[who] = statistics.median(a - b for a, b in zip(times[who], less, strict=True)) / steps * 1e3
    return ms


# -- transformers ---------------------------------------------------------------------------------


class Torch:
    """transformers' model of the same shape on the same device."""

    def __init__(self, shape: Shape, device: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.torch, self.shape, self.device = torch, shape, device
        config = transformers.Qwen3MoeConfig(**hf_config(shape.sizes))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if shape.dtype == "f32" else torch.bfloat16)
        try:
            with torch.device(device):
                self.model = transformers.Qwen3MoeForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def ids(self, batch: int, seq: int) -> Any:
        return self.torch.as_tensor(prompts(self.shape, batch, seq), dtype=self.torch.int64, device=self.device)

    def decode(self, way: str, static: bool, batch: int, new: int) -> Call:
        """A whole call of `generate`, greedy, never ended."""
        rows = self.ids(batch, self.shape.prompt)
        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        options |= {"cache_implementation": "static"} if static else {}

        def call() -> None:
            self.model.set_experts_implementation(way)
            with self.torch.inference_mode():
                self.model.generate(rows, **options).cpu()

        return call

    def prefill(self, way: str, batch: int, seq: int) -> Call:
        """Logits of the last token, and the cache."""
        rows = self.ids(batch, seq)

        def call() -> None:
            self.model.set_experts_implementation(way)
            with self.torch.inference_mode():
                self.model(rows, logits_to_keep=1).logits.cpu()

        return call


def torch_calls(peer: Torch | None, batch: int, seq: int, seconds: float) -> dict[str, tuple[Call, Call | None]]:
    """Those that work, until so many seconds of this process are over."""
    if peer is None:
        return {}
    gpu, found = peer.device == "cuda", {}
    ways = ("grouped_mm", "batched_mm") if gpu else ("eager",)
    for way, static in [(way, False) for way in ways] + [(way, True) for way in ways if gpu and seq == 1]:
        if way == "batched_mm" and batch * seq > 64:  # the weights of every choice, copied
            continue
        if time.perf_counter() - START > seconds:
            break
        name = f"torch {way}{', static' if static else ''}"
        pair: tuple[Call, Call | None] = (peer.prefill(way, batch, seq), None)
        if seq == 1:
            pair = (peer.decode(way, static, batch, LONG), peer.decode(way, static, batch, SHORT))
        try:
            pair[0]()
            found[name] = pair
        except Exception as error:
            emit(job=f"{batch}x{seq}", form=name, left_out=str(error).strip().splitlines()[0][:160])
    return found


# -- the tables -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding and prefill of a mixture of experts")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    parser.add_argument("--torch", action="store_true", help="transformers too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=330.0, help="after which no further peer of torch begins")
    args = parser.parse_args()
    shape = TINY if args.tiny else FULL
    c, gpu = shape.sizes, jax.default_backend() == "gpu"
    lm = build(shape)
    params = handwritten_params(lm, c)
    jobs = [(batch, 1) for batch in shape.batches] + list(shape.prompts)
    device = running_device()
    emit(benchmark="moe", device=str(device), jax=jax.__version__, loaded_s=round(time.perf_counter() - START, 1))

    best: dict[int, str] = {}
    lines = []
    for batch, seq in jobs:
        ms = time_experts(shape, params["layers"], batch * seq, args.rounds)
        best[batch * seq] = min((n for n in ms if not n.startswith("ours")), key=lambda n: ms[n])
        floor = lower_bound_ms(shape, batch, seq, full_model=False)
        for name, value in sorted(ms.items(), key=lambda item: item[1]):
            lines.append([f"{batch * seq} tokens: {name}", f"{value:.3f}", f"{value / floor:.2f}"])
        emit(experts=batch * seq, ms={n: round(v, 4) for n, v in ms.items()}, limit=round(floor, 4))
    print(table(["experts of all layers", "ms", "/ limit"], lines), flush=True)
    emit(seconds=round(time.perf_counter() - START, 1))

    peer = Torch(shape, "cuda" if gpu else "cpu") if args.torch else None
    lines = []
    for batch, seq in jobs:
        name, steps = (f"decode {batch}", LONG - SHORT) if seq == 1 else (f"prefill {batch}x{seq}", 1)
        calls: dict[str, tuple[Call, Call | None]] = {"ours": (our_prefill(lm, shape, batch, seq), None)}
        if seq == 1:
            calls = {"ours": (our_decode(lm, shape, batch, LONG), our_decode(lm, shape, batch, SHORT))}
        form = hand.forms(c, batch * seq, gpu)[best[batch * seq]]
        calls["by hand"] = (hand_call(shape, form, params, batch, seq, steps), None)
        calls |= torch_calls(peer, batch, seq, args.seconds)
        ms, floor = measure(calls, steps, args.rounds), lower_bound_ms(shape, batch, seq, full_model=True)
        ours, made = ms["ours"], list(lm.model.programs.executables.values())
        theirs = min((v for n, v in ms.items() if n.startswith("torch")), default=float("nan"))
        emit(job=name, ms={n: round(v, 4) for n, v in ms.items()}, limit=round(floor, 4), by_hand=best[batch * seq],
             ours_by=made[-1].lir.experts()[:1], seconds=round(time.perf_counter() - START, 1))  # fmt: skip
        numbers = (ours, ms["by hand"], ours / ms["by hand"], theirs, ours / theirs, floor, ours / floor)
        lines.append([name, *(f"{n:.3f}" for n in numbers), best[batch * seq]])
    head = ["ms a step or prompt", "ours", "by hand", "ratio", "torch", "ratio", "limit", "ratio", "the form by hand"]
    print(table(head, lines))


if __name__ == "__main__":
    main()
