"""Kernels that the bytes of their operands limit, in Mosaic's interpreter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp
from rlx_jax.lowering.lir.row_kernels import convolve, select, update_states
from tests.interpreter import interpreted, needs_mosaic
from tests.test_recurrences import delta_case, distance, transcript

pytestmark = needs_mosaic
RNG = np.random.default_rng(0)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("sizes", [(2, 1, 2, 16, 4, 64), slow((3, 1, 1, 128, 3, 128))])
def test_the_states_of_one_token(sizes: tuple[int, ...]) -> None:
    op = GatedDeltaOp(from_state=True)
    *token, state = (np.asarray(a, np.float32) for a in delta_case(sizes))
    out, new = interpreted(functools.partial(update_states, op.factor(sizes[3])), *(x[:, 0] for x in token), state)
    want = transcript(op, [a.astype(np.float64) for a in (*token, state)])
    assert distance(out[:, None], want[0]) <= 5e-6 and distance(new, want[1]) <= 5e-6


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


@pytest.mark.parametrize(("size", "count"), [(64, 8), slow(128, 3), slow(512, 10)])
def test_the_largest_entries(size: int, count: int) -> None:
    """Equal entries keep their order and NaN comes first, as in the op."""
    x = np.round(RNG.normal(size=(32, size)) * 4).astype(np.float32)
    x[0, 3], x[1, 5], x[2], x[3], x[4, ::2] = np.nan, np.inf, -np.inf, np.int32(-1).view(np.float32), -0.0
    found = interpreted(functools.partial(select, count), x)
    for one, other in zip(found, TopK(count).eval(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(one, other)
