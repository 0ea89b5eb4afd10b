"""Calls of the builders with arrays, and what they mean in NumPy: compiled together, as one program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, eq=False)
class OpCase:
    """`call(m, *values)` on `arrays`; `want` is an array, a tuple of them, or a function of the arrays in float64.

    With `symbolic` the first axis is a symbol, in every operand of two axes or more where it is that of the first.
    """

    call: Callable[..., Any]
    arrays: Sequence[Any]
    want: Any
    tolerance: float = 3e-6
    symbolic: bool = True

    @property
    def operands(self) -> list[np.ndarray]:
        """The arrays, floats as f32 and whole numbers as i32 where they have NumPy's own dtypes."""
        narrow = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
        arrays = [np.asarray(a) for a in self.arrays]
        return [a.astype(narrow.get(a.dtype, a.dtype)) for a in arrays]

    @property
    def types(self) -> list[tuple[tuple[int | str, ...], str]]:
        """The shape and the dtype that each operand is declared with."""

        def shape(a: np.ndarray) -> tuple[int | str, ...]:
            symbolic = self.symbolic and a.ndim > 1 and a.shape[:1] == self.operands[0].shape[:1]
            return (f"n{a.shape[0]}", *a.shape[1:]) if symbolic else a.shape

        return [(shape(a), str(a.dtype)) for a in self.operands]

    def reference(self) -> tuple[np.ndarray, ...]:
        """What the call gives."""
        wide = [a.astype(np.float64) if a.dtype in (np.float32, BF16) else a for a in self.operands]
        want = self.want(*wide) if callable(self.want) else self.want
        return tuple(np.asarray(w) for w in (want if isinstance(want, tuple) else (want,)))


def check_all(cases: Mapping[str, OpCase], subtests: pytest.Subtests) -> None:
    """Compare each."""
    for name, got in evaluated(cases, subtests).items():
        with subtests.test(name):
            check(got, cases[name])


def evaluated(cases: Mapping[str, OpCase], subtests: pytest.Subtests) -> dict[str, list[np.ndarray]]:
    """What the cases give; they are compiled as one program."""
    m = rlx.Graph.hir("cases")
    values, arrays, counts = list[Any](), dict[str, Any](), dict[str, int]()
    for number, (name, case) in enumerate(cases.items()):
        names = [f"i{number}_{place}" for place in range(len(case.arrays))]
        operands = [m.input(n, *t) for n, t in zip(names, case.types, strict=True)]
        arrays |= dict(zip(names, case.operands, strict=True))
        with subtests.test(name):
            made = case.call(m, *operands)
            made = made if isinstance(made, tuple) else (made,)
            values += made
            counts[name] = len(made)
    m.set_outputs(values)
    model = rlx.compile(m)
    found = iter(model(**{i.name: arrays[i.name] for i in model.inputs}).values())  # a case may read no operand
    return {name: [np.asarray(next(found)) for _ in range(count)] for name, count in counts.items()}


def check(got: Sequence[np.ndarray], case: OpCase) -> None:
    """Shapes, kinds of dtype, and numbers: whole ones and bools exactly, infinities and NaN where they are."""
    want = case.reference()
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape, (g.shape, w.shape)
        exact = not jax.numpy.issubdtype(g.dtype, np.inexact)
        assert exact == (w.dtype.kind in "biu"), (g.dtype, w.dtype)
        if exact:
            np.testing.assert_array_equal(g, w)
            continue
        wide = g.astype(np.float64)
        finite = np.isfinite(w)
        np.testing.assert_array_equal(wide[~finite], w[~finite])
        worst = np.abs(wide[finite] - w[finite]).max(initial=0.0)
        assert worst <= case.tolerance * max(1.0, np.abs(w[finite]).max(initial=0.0)), worst
