"""Kernels of our own: where a plan takes them, and small ones in Mosaic's interpreter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.blocks import MoeSpec
from rlx_jax.device import DEVICES
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.ops.reduce import RmsNormOp
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.lowering.lir import experts, implementations, recurrent
from rlx_jax.lowering.lir.implementations import (
    IMPLEMENTATIONS,
    KERNELS,
    choose_convolution,
    choose_norm,
    choose_selection,
    runnable_choices,
)
from rlx_jax.lowering.lir.row_kernels import convolve, select, update_states
from tests.interpreter import interpreted, needs_mosaic
from tests.test_recurrences import delta_case, distance, transcript


def types(*shapes: tuple[int, ...], dtype: str = "bf16") -> tuple[TensorType, ...]:
    return tuple(TensorType(shape, as_dtype(dtype)) for shape in shapes)


def experts_of(tokens: int, inner: int = 768, dtype: str = "bf16") -> tuple[TensorType, ...]:
    wide, narrow = (128, inner, 2048), (128, 2048, inner)
    given = types((1, tokens, 2048), wide, wide, narrow, dtype=dtype)
    return *given, *types((1, tokens, 8), dtype="f32"), *types((1, tokens, 8), dtype="i32")


def delta_of(rows: int, tokens: int, width: int = 128, dtype: str = "bf16") -> tuple[TensorType, ...]:
    heads = (rows, tokens, 16)
    wide = types(*((*heads, width),) * 3, dtype=dtype)
    return *wide, *types(heads, heads, (rows, 16, width, width), dtype="f32")


DELTA = GatedDeltaOp(from_state=True)
CHOICES: dict[str, tuple[Any, tuple[TensorType, ...], str]] = {
    "experts of a token": (ExpertFfn(), experts_of(1), "gathered"),
    "experts [in, out] of a token": (ExpertFfn(contract=0), experts_of(1), "grouped"),
    "experts of 8 tokens": (ExpertFfn(), experts_of(8), "grouped"),
    "experts of a prompt": (ExpertFfn(), experts_of(4096), "grouped"),
    "experts in f32": (ExpertFfn(), experts_of(4096, dtype="f32"), "blocked"),
    "experts of an odd width": (ExpertFfn(), experts_of(4096, inner=760), "blocked"),
    "experts with the error function": (ExpertFfn("gelu"), experts_of(4096), "grouped"),
    "experts with an activation of their own": (ExpertFfn("mish"), experts_of(4096), "blocked"),
    "experts of a width that tiles do not divide": (ExpertFfn(), experts_of(64, inner=2880), "grouped"),
    "experts that are pinned": (ExpertFfn(precision="highest"), experts_of(4096), "blocked"),
    "a token of one row": (DELTA, delta_of(1, 1), "one_token"),
    "a token of 8 rows": (DELTA, delta_of(8, 1), "one_pass"),
    "a token, every state": (GatedDeltaOp(from_state=True, every=True), delta_of(8, 1), "one_token"),
    "a token of an odd width": (DELTA, delta_of(8, 1, width=96), "one_token"),
    "a token of a wide state": (DELTA, delta_of(8, 1, width=512), "one_token"),
    "a prompt": (DELTA, delta_of(1, 512), "states_in_one"),
    "a prompt of wide heads": (DELTA, delta_of(1, 512, width=256), "chunks_at_once"),
    "a prompt in f32": (DELTA, delta_of(1, 512, dtype="f32"), "chunks_at_once"),
    "a scan": (SelectiveScanOp(), types((1, 64, 4, 8), (1, 64, 4), (4,), *((1, 64, 1, 8),) * 2), "chunks_at_once"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.usefixtures("with_kernels")
def test_where_kernels_run(case: str) -> None:
    """Where they gain and what they take; never where they are off."""
    op, operands, want = CHOICES[case]
    choose = experts.choose if isinstance(op, ExpertFfn) else recurrent.choose
    found, without = (choose((op, operands), DEVICES["h200"], kernels) for kernels in (True, False))
    assert found is not None and without is not None
    assert found.implementation == want and without.implementation not in KERNELS
    is_refused = want == "blocked" or (want == "chunks_at_once" and isinstance(op, GatedDeltaOp))
    assert ("no kernel" in found.reason) == is_refused
    assert not runnable_choices({(op, operands): found}, DEVICES["a100"]) or want not in KERNELS
    assert runnable_choices({(op, operands): found}, DEVICES["h100"])


@pytest.mark.parametrize(("device", "tokens", "want"), [("h200", 512, True), ("h200", 511, False), ("cpu", 512, False)])
def test_where_a_convolution_is_a_kernel_of_its_own(device: str, tokens: int, want: bool) -> None:
    """On a GPU, of many tokens; its numbers are the same."""
    op, arrays = CausalConvOp(), [jnp.ones((1, tokens + 3, 8)), jnp.ones((8, 4))]
    choice = choose_convolution((op, tuple(TensorType(a.shape, a.dtype) for a in arrays)), DEVICES[device])
    assert (choice is not None) == want
    name = "xla" if choice is None else choice.implementation
    np.testing.assert_array_equal(jax.jit(lambda *a: IMPLEMENTATIONS[name](op, *a))(*arrays), op.eval(*arrays))


@pytest.mark.parametrize(
    ("op", "rows", "want"), [(TopK(8), 1024, True), (TopK(8), 1000, False), (TopK(2, largest=False), 1024, False)]
)
def test_where_a_kernel_selects_entries(op: TopK, rows: int, want: bool) -> None:
    """The largest of many rows."""
    choice = choose_selection((op, types((2, rows // 2, 64), dtype="f32")), use_kernels=True)
    assert (choice is not None) == want


@pytest.mark.parametrize(
    ("op", "tokens", "want"),
    [(RmsNormOp(1e-6), 1024, True), (RmsNormOp(1e-6), 1023, False), (RmsNormOp(1e-6, offset=1.0), 1024, False)],
)
def test_where_a_norm_multiplies_in_f32(op: RmsNormOp, tokens: int, want: bool) -> None:
    """Of many tokens in bf16, where the norm is rounded before its weight; its numbers are the same."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size) * 2, jnp.bfloat16) for size in ((1, tokens, 512), 512)]
    choice = choose_norm((op, tuple(TensorType(a.shape, a.dtype) for a in arrays)), use_kernels=True)
    assert (choice is not None) == want
    name = "xla" if choice is None else choice.implementation
    found, right = jax.jit(lambda *a: IMPLEMENTATIONS[name](op, *a))(*arrays), jax.jit(op.eval)(*arrays)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(right, np.float32))


PLANS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "an H200": ({"target": "h200"}, "forward", True), "an A100": ({"target": "a100"}, "forward", False),
    "no kernels": ({"target": "h200", "kernels": "off"}, "forward", False),
    "training": ({"target": "h200"}, "train", False),
    "an older JAX": ({"target": "h200", "mosaic": False}, "forward", False),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_says_which_kernels_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device, the profile, whether the program is trained, and what JAX has."""
    options, program, want = PLANS[case]
    monkeypatch.setattr(implementations, "has_mosaic", lambda: options.get("mosaic", True))
    spec = MoeSpec(num_experts=4, top_k=2, inner=64)
    flow = rlx.ModelFlow("m").input("x", ("batch", 64)).stage(rlx.blocks.MoeFfn("l", spec))
    rng = np.random.default_rng(0)
    weights = {key: rng.normal(size=spec.shape).astype("f4") for key, spec in flow.build().params.items()}
    backend = {"cuda": {"kernels": options["kernels"]}} if "kernels" in options else {}
    profile = rlx.CompileProfile().replace(
        fusion={"target": options["target"]}, precision={"compute": "bf16"}, backend=backend
    )
    with pytest.warns(rlx.errors.RlxWarning, match="the plan is for another device"):
        model = rlx.compile(flow, weights, profile=profile, program=program)
    text = str(model.text("lir", np.ones((4, 64), np.float32)))
    assert ("grouped" in text) == want and ("no kernel: none for " in text) == (case in ("an A100", "an older JAX"))


RNG = np.random.default_rng(0)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@needs_mosaic
@pytest.mark.parametrize("sizes", [(2, 1, 2, 16, 4, 64), slow((3, 1, 1, 128, 3, 128))])
def test_the_states_of_one_token(sizes: tuple[int, ...]) -> None:
    op = GatedDeltaOp(from_state=True)
    *token, state = (np.asarray(a, np.float32) for a in delta_case(sizes))
    out, new = interpreted(functools.partial(update_states, op.factor(sizes[3])), *(x[:, 0] for x in token), state)
    want = transcript(op, [a.astype(np.float64) for a in (*token, state)])
    assert distance(out[:, None], want[0]) <= 5e-6 and distance(new, want[1]) <= 5e-6


@needs_mosaic
@pytest.mark.parametrize(
    ("tokens", "width", "taps", "unit", "dtype"),
    [(133, 64, 4, 1e-6, "bfloat16"), slow(20, 64, 2, None, "float16"), slow(300, 128, 4, 1e-6, "bfloat16")],
)  # fmt: skip
def test_a_convolution(tokens: int, width: int, taps: int, unit: float | None, dtype: str) -> None:
    """Of some heads, whose tokens blocks do not divide; no row sees another one's tokens."""
    x = jnp.asarray(RNG.normal(size=(2, tokens, 3 * width + 8)), dtype)
    window = jnp.asarray(RNG.normal(size=(3 * width, taps)), dtype)
    got = interpreted(functools.partial(convolve, first=width, heads=2, width=width, unit=unit), x, window)
    own = jnp.pad(x[:, :, width : 3 * width], ((0, 0), (taps - 1, 0), (0, 0)))
    want = jax.nn.silu(CausalConvOp().eval(own, window[width:])).astype(jnp.float32).reshape(2, tokens, 2, width)
    if unit is not None:
        want = want * jax.lax.rsqrt(jnp.square(want).sum(-1, keepdims=True) + unit)
    assert got.dtype == dtype and got.shape == want.shape
    assert distance(got, np.asarray(want)) <= 0.01


@needs_mosaic
@pytest.mark.parametrize(("size", "count"), [(64, 8), slow(128, 3), slow(512, 10)])
def test_the_largest_entries(size: int, count: int) -> None:
    """Equal entries keep their order and NaN comes first, as in the op."""
    x = np.round(RNG.normal(size=(32, size)) * 4).astype(np.float32)
    x[0, 3], x[1, 5], x[2], x[3], x[4, ::2] = np.nan, np.inf, -np.inf, np.int32(-1).view(np.float32), -0.0
    found = interpreted(functools.partial(select, count), x)
    for one, other in zip(found, TopK(count).eval(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(one, other)
