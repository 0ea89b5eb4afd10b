"""Numbers rounded to few bits and back, so that a model is trained for what it will be stored as."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import ELEMENTWISE
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array
STE = ("identity", "clipped", "tanh", "hard_tanh")


@dataclass(frozen=True)
class FakeQuantize(Mir):
    """`clip(round(x/s), ±q) · s` with q = 2^(bits − 1) − 1: x rounded to a signed number of so many bits, and back.

    s is the second operand, of rank 0 or, with an `axis`, a number for each of its entries; without the operand it is
    max |x| / q, of all of x or along each entry of `axis`. The gradient goes straight through the rounding, by `ste`:
    dy (`identity`); dy where |x| ≤ q s, else 0 (`clipped`); dy (1 − tanh²(x/s)) (`tanh`); dy max(0, 1 − |x|/(q s))
    (`hard_tanh`). s gets none, unless it is `learned` (LSQ, arXiv:1902.08153): then Σ dy ψ(x/s) over what shares it,
    ψ(z) = round(z) − z where |z| ≤ q, else ±q.
    """

    traits = ELEMENTWISE

    bits: int = 8
    axis: int | None = None
    ste: str = "identity"
    learned: bool = False

    def check(self, *operands: TensorType) -> None:
        x, *scale = operands
        if isinstance(self.bits, bool) or not 2 <= self.bits <= 16:
            raise GraphError(f"fake_quantize: bits are 2 to 16, got {self.bits!r}")
        if self.ste not in STE:
            raise GraphError(f"fake_quantize: ste is {self.ste!r}; expected one of {', '.join(STE)}")
        if self.learned and not scale:
            raise GraphError("fake_quantize: a scale that is learned has to be given")
        if self.axis is not None:
            check_axis("fake_quantize", self.axis, x)
        if not is_float(x.dtype) or any(s.dtype != x.dtype for s in scale):
            raise DTypeError(
                f"fake_quantize: x and the scale have one floating dtype, got {', '.join(map(str, operands))}"
            )
        want = () if self.axis is None else (x.shape[self.axis],)
        if scale and scale[0].shape != want:
            raise ShapeError(f"fake_quantize: the scale of {x} is {TensorType(want, x.dtype)}, got {scale[0]}")

    def eval(self, x: Array, scale: Array | None = None) -> Array:
        wide, most = x.astype(jnp.float32), 2.0 ** (self.bits - 1) - 1
        rest = tuple(i for i in range(x.ndim) if self.axis is None or i != self.axis % x.ndim)
        if scale is None:
            s = jnp.maximum(jnp.max(jnp.abs(wide), axis=rest, keepdims=True), 1e-12) / most
        else:
            s = jnp.expand_dims(scale.astype(jnp.float32), rest)
        return _rounded(self.ste, most, wide, s if self.learned else jax.lax.stop_gradient(s)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(ste: str, most: float, x: Array, s: Array) -> Array:
    return jnp.clip(jnp.round(x / s), -most, most) * s


def _forward(ste: str, most: float, x: Array, s: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rounded(ste, most, x, s), (x, s)


def _backward(ste: str, most: float, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, s = kept
    slope = {
        "identity": lambda: jnp.ones_like(x), "clipped": lambda: (jnp.abs(x) <= most * s).astype(x.dtype),
        "tanh": lambda: 1 - jnp.tanh(x / s) ** 2, "hard_tanh": lambda: jnp.maximum(0.0, 1 - jnp.abs(x) / (most * s)),
    }[ste]()  # fmt: skip
    z = x / s
    by_scale = jnp.where(jnp.abs(z) <= most, jnp.round(z) - z, jnp.sign(z) * most)
    shared = tuple(i for i in range(x.ndim) if s.ndim == 0 or s.shape[i] == 1)
    return dy * slope, jnp.sum(dy * by_scale, axis=shared, keepdims=s.ndim > 0).reshape(s.shape)


_rounded.defvjp(_forward, _backward)
