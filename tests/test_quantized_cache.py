"""Caches of 8-bit codes: what they store, how far logits are from those of a f32 cache, and what must not matter."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from tests import divided, test_cached_masks, test_donation
from tests.divided import V
from tests.oracles import op_formulas as formula
from tests.oracles.comparing import TOLERANCE, assert_close
from tests.small import profile, relative

RNG = np.random.default_rng(5)
IDS = RNG.integers(0, V, (3, 16)).astype(np.int32)
DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
BOUNDS = {"int8": 0.01, "fp8": 0.06}
"""Of the error of logits (root mean square, relative), as docs/profiles.md states it."""
DECODERS = [("llama", "int8")]
OTHERS = [("gemma2", "fp8"), ("qwen35", "int8"), ("llama", "fp8")]  # rings, and recurrent states
BUCKETS = {"batch": [3], "prompt": [4], "context": [32]}


@functools.cache
def lm(family: str, kv: str, roll: str = "unroll") -> Any:
    made = profile(precision={"kv": kv}, layers={"roll": roll}, buckets=BUCKETS)
    return rlx.CausalLM(divided.recipe(family), divided.weights(family), profile=made)


def run(model: Any, *ends: int, rows: Any = slice(None), pad: int = 0) -> tuple[np.ndarray, Any]:
    """Logits of the tokens after the first 4, read in steps up to `ends`, each with `pad` tokens of padding."""
    ids = IDS[rows]
    _, state = model.prefill(ids[:, :4], max_len=24)
    parts, start = [], 4
    for end in ends:
        block = np.pad(ids[:, start:end], ((0, 0), (0, pad)), constant_values=7)
        logits, state = model.extend(state, block, np.full(len(ids), end - start))
        parts.append(np.asarray(logits)[:, : end - start])
        start = end
    return np.concatenate(parts, axis=1), state


@pytest.mark.parametrize(
    ("family", "kv"), [*DECODERS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_decoder(family: str, kv: str) -> None:
    """The error is within its bound, and rows, padding, cuts and scanned layers do not matter.

    A number between two codes may become either in another program. Codes of fp8 are so far apart that it shows.
    """
    close = functools.partial(assert_close, tolerance=BOUNDS[kv] / 20 if kv == "fp8" else TOLERANCE)
    model, exact = lm(family, kv), np.asarray(lm(family, "f32").logits(IDS))[:, 4:]
    logits, state = run(model, 8, 12, 16)
    assert 0 < np.sqrt(((logits - exact) ** 2).mean() / (exact**2).mean()) < BOUNDS[kv]
    assert_close(run(lm(family, "f32"), 8, 12, 16)[0], exact)
    close(run(model, 5, 9, 13, 14, 15, 16)[0], logits)
    close(run(model, 8, 12, 16, rows=[1])[0], logits[1:2])
    close(run(model, 7, 10, 13, 16, pad=1)[0], logits)
    if family == "llama":
        close(run(lm(family, kv, "scan"), 8, 12, 16)[0], logits)
    dtypes = {name.rsplit(".", 1)[1]: array.dtype for name, array in state.state.leaves.items()}
    assert dtypes.items() >= {"k": DTYPES[kv], "v": DTYPES[kv], "k_scale": np.float32, "v_scale": np.float32}.items()
    assert {dtypes[name] for name in dtypes.keys() - {"k", "v", "k_scale", "v_scale"}} <= {np.dtype(np.float32)}


@pytest.mark.parametrize("kv", DTYPES)
def test_what_is_stored(kv: str) -> None:
    """The keys and values of the first layer, each vector by its largest number, and how many bytes."""
    states = [lm("llama", k).prefill(IDS[:, :4], max_len=24)[1].state.leaves for k in ("f32", kv)]
    for name in ("k", "v"):
        path = next(key for key in states[0] if key.endswith(f"0.self_attn.{name}"))
        codes, scale = formula.quantize_vectors(np.asarray(states[0][path], np.float64), DTYPES[kv])
        got = np.asarray(states[1][path]).astype(np.float64) * np.asarray(states[1][f"{path}_scale"])[..., None]
        want = codes.astype(np.float64) * scale[..., None]
        step = scale[..., None] * (1 if kv == "int8" else 32)  # a number between two codes may become either
        assert (np.abs(got - want) <= 1.01 * step).all() and (np.abs(got - want) <= 1e-5).mean() > 0.99
    sizes = [sum(array.nbytes for array in leaves.values()) for leaves in states]
    width = divided.SIZES["head_dim"]
    assert sizes[1] == sizes[0] * (width + 4) // (4 * width)


@pytest.mark.slow
def test_requests() -> None:
    """Drafts, shared beginnings and states change no token; rejected drafts leave rings and full caches."""
    model = lm("gemma2", "fp8")
    prompts = [[3, 1, 4, 1, 5, 9, 3, 1, 4], [3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 1, 5, 9, 6, 5]]
    want = model.generate(prompts, 12)
    assert model.generate(prompts, 12, speculative="prompt", draft_tokens=3) == want
    assert model.report().speculative.accepted < model.report().speculative.drafted
    assert model.generate(prompts, 12, share_prefix=True) == want
    assert model.generate(prompts[0], 12) == want[0]


def test_a_cached_mask() -> None:
    """Scales come before the mask of the cache."""
    flow = test_cached_masks.flow(test_cached_masks.own, window=3)
    outputs = {}
    for kv in ("f32", "int8"):
        model: Any = rlx.compile(
            flow, test_cached_masks.WEIGHTS, program="extend", profile=profile(precision={"kv": kv})
        )
        ids = test_cached_masks.IDS
        _, state = model(ids[:, :5], lengths=np.array([5, 5], np.int32), state=model.init_state(2, 10))
        outputs[kv], state = model(ids[:, 5:7], lengths=np.array([2, 2], np.int32), state=state)
        assert state.leaves["stage.keep"].dtype == bool
    assert 0 < relative(outputs["int8"], outputs["f32"]) < 0.05


@pytest.mark.parametrize(
    ("kv", "roll", "compute"), [pytest.param("int8", "scan", "f32", marks=pytest.mark.slow), ("fp8", "unroll", "bf16")]
)
def test_the_state_is_updated_in_place(kv: str, roll: str, compute: str) -> None:
    """As with other caches: every byte is aliased, and no code or scale is copied."""
    model = test_donation.fresh(roll, compute, kv)
    (executable,) = model.programs.executables.values()
    assert executable.donation.aliased_bytes == executable.donation.state_bytes and not executable.donation.problem()


@pytest.mark.slow
def test_over_a_mesh() -> None:
    """Scales are divided like their codes."""
    made = profile(precision={"kv": "int8"}, buckets=BUCKETS | {"batch": [4]})
    over = rlx.CausalLM(
        divided.recipe("llama"), divided.weights("llama"), mesh=divided.mesh("data tensor", 8), profile=made
    )
    assert_close(run(over, 8, 16)[0], run(lm("llama", "int8"), 8, 16)[0])
