"""Rotary embeddings of several coordinates, written with the builders, against float64 formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.frequencies import axial_frequencies
from tests.oracles import op_formulas as formula

RNG = np.random.default_rng(7)


def module(build: Any, **shapes: Any) -> Any:
    """A compiled module of one output, whose inputs are `shapes`."""
    made = rlx.GraphModule.define(
        "m", lambda m: build(m, *(m.input(n, s, "int32" if n == "at" else "float32") for n, s in shapes.items()))
    )
    return rlx.compile(made)


def close(got: Any, want: np.ndarray) -> None:
    assert np.abs(np.asarray(got) - want).max() <= 3e-5 * np.abs(want).max()


@pytest.mark.parametrize(("end_x", "end_y", "repeat", "theta"), [(3, 2, 1, 10000.0), (1, 5, 2, 50.0)])
def test_axial_rope_2d(end_x: int, end_y: int, repeat: int, theta: float) -> None:
    """Cell by cell: interleaved pairs, the column of a cell in the first half of a head, its row in the second."""
    dim, tokens = 8, end_x * end_y * repeat
    x = RNG.standard_normal((2, tokens, 3 * dim)).astype(np.float32)
    run = module(
        lambda m, x: m.axial_rope_2d(
            x, end_x=end_x, end_y=end_y, head_dim=dim, theta=theta, repeat_factor=repeat
        ),
        x=x.shape,
    )  # fmt: skip
    want = x.astype(np.float64)
    for t, head, pair in np.ndindex(tokens, 3, dim // 2):
        cell, c = t // repeat, pair % (dim // 4)
        place = cell % end_x if pair < dim // 4 else cell // end_x
        angle = place * theta ** (-4 * c / dim)
        at = head * dim + 2 * pair
        a, b = x[:, t, at].astype(np.float64), x[:, t, at + 1].astype(np.float64)
        want[:, t, at] = a * np.cos(angle) - b * np.sin(angle)
        want[:, t, at + 1] = b * np.cos(angle) + a * np.sin(angle)
    close(run(x), want)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_four_coordinates(style: str) -> None:
    """As image models give them: each coordinate turns columns of its own, of its own width; positions for each row."""
    widths, dim = (4, 2, 6, 4), 16
    x = RNG.standard_normal((2, 5, 2 * dim)).astype(np.float32)
    at = RNG.integers(0, 40, (2, 5, 4)).astype(np.int32)
    inv_freq, axes = axial_frequencies(widths, 2000.0)

    def build(m: Any, x: Any, at: Any) -> Any:
        return m.rope(x, *m.rope_angles(at, inv_freq, axes=axes), head_dim=dim, style=style)

    found = [2000.0 ** (-2 * i / w) for w in widths for i in range(w // 2)]
    coordinates = [a for a, w in enumerate(widths) for _ in range(w // 2)]
    tables = formula.rope_table(at, found, axes=coordinates)
    want = formula.rope(x.astype(np.float64), *tables, head_dim=dim, n_rot=dim, style=style)
    close(module(build, x=("batch", "seq", 2 * dim), at=("batch", "seq", 4))(x, at), want)


@pytest.mark.parametrize(
    ("build", "kind", "says"),
    [
        (lambda m, x: m.axial_rope_2d(x, end_x=2, end_y=2, head_dim=8), ShapeError, "[B, 4, N·8] for 2 x 2 cells"),
        (lambda m, x: m.axial_rope_2d(x, end_x=3, end_y=2, head_dim=6), ShapeError, "a multiple of 4, got 6"),
        (lambda m, x: m.rope(x, x, x, head_dim=8, style="neox"), GraphError, "expected half or interleaved"),
        (lambda m, x: m.rope_angles(x, (1.0,), axes=(0,)), ShapeError, "positions are integers [B,S,A]"),
        (lambda m, x: m.rope_angles(x, (1.0,), axes=0), GraphError, "the coordinate of each frequency"),
    ],
)
def test_refusals(build: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as caught:
        module(build, x=(1, 6, 8))
    assert says in str(caught.value)
