"""Samples of ops: operands that fit an op, their random numbers, and the table of what each op means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import rlx_jax as rlx
from rlx_jax.ir.graph import Op
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type

o: Any = rlx.ops
SIZES = {"batch": 2, "seq": 5, "keys": 7}
F32, BF16, I32 = (as_dtype(name) for name in ("f32", "bf16", "i32"))
Array = np.ndarray[Any, Any]
Meaning = Callable[..., Any]
MEANING: dict[type[Op], Meaning] = {}
"""What each op and each block means in NumPy: the entries of the files of this folder."""


@dataclass(frozen=True)
class Sample:
    """An op, the types of its operands (`"f32 batch seq 8; f32 8"`), and how their numbers are drawn."""

    op: Op
    text: str
    means: Callable[..., Any] | None = None  # where it is not that of the table of meanings
    positive: bool = False
    below: int = 3  # of integer operands
    tolerance: float = 3e-6
    draw: Callable[[np.ndarray], np.ndarray] = lambda x: x  # of floats, from normal ones

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(operand(text) for text in self.text.split(";"))

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Random operands; symbols have the sizes of `SIZES`."""
        rng = np.random.default_rng(seed)
        arrays = [random_array(rng, t.bind(SIZES), self.positive, self.below) for t in self.types]
        return [self.draw(a.astype(np.float64)).astype(a.dtype) if a.dtype in (F32, BF16) else a for a in arrays]

    def want(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """What it gives, in NumPy."""
        means = self.means(*arrays) if self.means else MEANING[type(self.op)](self.op, *arrays)
        return tuple(np.asarray(y) for y in (means if isinstance(means, tuple) else (means,)))

    def __str__(self) -> str:
        return f"{type(self.op).__name__}-{self.op.text()}-{self.text}".replace(" ", ",")


def operand(text: str) -> TensorType:
    """`"f32 batch seq 8"` as a type."""
    dtype, *dims = text.split()
    return tensor_type(tuple(int(d) if d.isdigit() else d.replace("+", " + ") for d in dims), dtype, text)


def random_array(rng: np.random.Generator, t: TensorType, positive: bool, below: int) -> np.ndarray:
    """Numbers of type `t`."""
    if t.dtype == np.bool_:
        return rng.random(t.shape) < 0.5
    if t.dtype.kind in "iu":
        return rng.integers(int(positive), below, t.shape).astype(t.dtype)
    x = rng.standard_normal(t.shape)
    if t.dtype == np.complex64:
        return (x + 1j * rng.standard_normal(t.shape)).astype(t.dtype)
    return (np.abs(x) + 0.1 if positive else x).astype(t.dtype)


def assert_formula(sample: Sample, out: Any) -> None:
    """Against NumPy in float64; bf16 within its rounding, integers and bools exactly."""
    arrays = sample.arrays()
    want = sample.want(*(a.astype(np.float64) if a.dtype in (F32, BF16) else a for a in arrays))
    for got, expected in zip(jax.tree.leaves(out), want, strict=True):
        exact = got.dtype not in (F32, BF16, np.complex64)
        bound = 0.0 if exact else 0.03 if BF16 in [a.dtype for a in arrays] else sample.tolerance
        wide = np.complex128 if got.dtype == np.complex64 else np.float64
        expected = expected.astype(wide)
        assert got.shape == expected.shape, sample
        worst = np.abs(np.asarray(got).astype(wide) - expected).max(initial=0.0)
        assert worst <= bound * max(1.0, np.abs(expected).max(initial=0.0)), (str(sample), worst)
