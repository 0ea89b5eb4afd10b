"""Programs over packed keys: what they are over the numbers, and read bytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax.errors import UnsupportedError, WeightError, WeightShapeError
from rlx_jax.ir.packed import Packed
from rlx_jax.ir.param import (
    Dequantized,
    Joined,
    Key,
    Program,
    Sliced,
    Stack,
    Transposed,
    cast,
    keys_of,
    leaf_name,
    narrows,
    packed_keys,
    stored_keys,
)
from rlx_jax.ir.reading import read_from
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.weights.execute import bytes_to_fill, fill, load_leaf, pieces
from rlx_jax.weights.mapping import MappingSource
from tests.oracles.packed import meaning, packed

F32 = np.dtype(np.float32)
BF16 = as_dtype("bf16")


VALUES = {"a.w": packed("gguf_q8_0", (2, 3, 64), 1), "b.w": packed("gguf_q4_0", (2, 3, 64), 2)}
VALUES |= {"m.0": packed("gguf_q8_0", (6, 64), 3), "m.1": packed("gguf_q4_0", (6, 64), 4)}
STORED = {key: meaning(value) for key, value in VALUES.items()}
SOURCE = MappingSource(VALUES)


def key(name: str) -> Key:
    return Key(name, tensor_type(STORED[name].shape, "f32", name))


A, B, M, N = (key(name) for name in VALUES)
PROGRAMS: list[tuple[Program, Any, str]] = [
    (M, lambda s: s["m.0"], "m.0"),
    (Transposed(M), lambda s: s["m.0"].T, "m.0.T"),
    (Sliced(M, 0, 1, 4), lambda s: s["m.0"][1:4], "m.0[1:4]"),
    (Sliced(A, 1, 1, 3), lambda s: s["a.w"][:, 1:3], "a.w[:, 1:3]"),
    (Sliced(A, 2, 32, 64), lambda s: s["a.w"][..., 32:], "a.w[:, :, 32:64]"),
    (Transposed(Sliced(N, 1, 0, 32)), lambda s: s["m.1"][:, :32].T, "m.1[:, 0:32].T"),
    (Joined((Sliced(M, 1, 0, 32), Sliced(N, 1, 0, 32), Sliced(M, 1, 32, 64), Sliced(N, 1, 32, 64)), 1), lambda s:
        np.concatenate([s[name][:, half] for half in np.s_[:32, 32:] for name in ("m.0", "m.1")], 1), "m.{0..1}"),
    (Sliced(Sliced(A, 1, 1, 3), 2, 32, 64), lambda s: s["a.w"][:, 1:3, 32:], "a.w[:, 1:3][:, :, 32:64]"),
    (Joined((M, N), 0), lambda s: np.concatenate([s["m.0"], s["m.1"]], 0), "m.{0..1}"),
    (Joined((A, B), 2), lambda s: np.concatenate([s["a.w"], s["b.w"]], 2), "{a,b}.w"),
    (Stack((M, N)), lambda s: np.stack([s["m.0"], s["m.1"]]), "m.{0..1}"),
    (Stack((Joined((Sliced(M, 0, 0, 2), Sliced(M, 0, 2, 6)), 0), N)), lambda s: np.stack([s["m.0"], s["m.1"]]),
        "m.{0..1}"),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "means", "name"), PROGRAMS, ids=[name for *_, name in PROGRAMS])
def test_a_program_over_packed_keys(declared: Program, means: Any, name: str) -> None:
    """Is what it is over the numbers: its type, its value in any dtype, its name; and read backwards the numbers."""
    want, program = means(STORED), read_from(declared, SOURCE)
    assert program.type == declared.type and narrows(program) and leaf_name(program).replace("}.{", "},{") == name
    np.testing.assert_array_equal(load_leaf(program, SOURCE), want)
    larger = np.zeros((*want.shape[:-1], want.shape[-1] + 2), np.float32)
    fill(larger[..., 1:-1], program, SOURCE)
    np.testing.assert_array_equal(larger[..., 1:-1], want)

    np.testing.assert_array_equal(load_leaf(cast(program, BF16), SOURCE), want.astype(BF16))
    assert cast(cast(program, np.dtype(np.float64)), np.dtype(np.float32)) == program
    assert read_from(program, SOURCE) == program == read_from(cast(program, np.dtype(np.float32)), SOURCE)

    assert list(stored_keys(program)) == list(stored_keys(declared)), "logical types"
    assert dict(packed_keys(program)) == {k: VALUES[k].scheme for k in keys_of(declared)}
    for piece in pieces(program, want):
        np.testing.assert_array_equal(piece.values, STORED[piece.key.key][piece.place])
        assert piece.key.type.dtype == np.float32


def test_join_decodes() -> None:
    """Arrays of NumPy or JAX, as the other steps do; and what it makes cannot be cut into bytes."""
    program = read_from(M, SOURCE)
    assert isinstance(program, Dequantized)
    np.testing.assert_array_equal(program.join(VALUES["m.0"].data), STORED["m.0"])
    np.testing.assert_array_equal(program.join(jnp.asarray(VALUES["m.0"].data)), STORED["m.0"])
    with pytest.raises(UnsupportedError, match=r"dequantize\(m.0, gguf_q8_0\): numbers are not packed again"):
        program.cut(STORED["m.0"])


def test_what_is_read_of_a_part() -> None:
    """Its bytes alone; and the host's memory holds those, the numbers and the leaf."""
    asked: list[Any] = []

    class Counting(MappingSource):
        def read(self, key: str, index: Any = None) -> Any:
            found = super().read(key, index)
            asked.append((key, found.shape))
            return found

    source = Counting(VALUES)
    for part, shape in ((Sliced(A, 0, 1, 2), (1, 3, 68)), (Sliced(A, 2, 32, 64), (2, 3, 34)), (A, (2, 3, 68))):
        asked.clear()
        load_leaf(read_from(part, source), source)
        assert asked == [("a.w", shape)]
    m = read_from(M, source)
    assert bytes_to_fill(m) == 2 * m.type.nbytes + 6 * 68
    assert bytes_to_fill(cast(m, BF16)) == 2 * (m.type.nbytes // 2) + m.type.nbytes + 6 * 68
    assert bytes_to_fill(Stack((m, read_from(N, source)))) == 2 * m.type.nbytes + m.type.nbytes + 6 * 68


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_another_logical_dtype(dtype: str) -> None:
    """The numbers are rounded to it, and then to what the program computes in."""
    value = Packed(VALUES["m.0"].data, "gguf_q8_0", (6, 64), dtype)
    want = STORED["m.0"].astype(as_dtype(dtype))
    program = read_from(Key("w", tensor_type((6, 64), dtype, "w")), MappingSource({"w": value}))
    assert program.type.dtype == as_dtype(dtype) and isinstance(program, Dequantized)
    leaf = np.empty(want.shape, want.dtype)
    fill(leaf, program, MappingSource({"w": value}))
    np.testing.assert_array_equal(leaf, want)
    np.testing.assert_array_equal(load_leaf(cast(program, F32), MappingSource({"w": value})), want.astype(np.float32))


BYTES = Key("w", tensor_type((4, 68), "u8", "w"))


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: Dequantized(BYTES, "gguf_q8", F32), WeightError,
        r"dequantize\(w\): unknown scheme of packing 'gguf_q8'; did you mean"),
    (lambda: Dequantized(BYTES, "gguf_q4k", F32), UnsupportedError,
        r"dequantize\(w\): gguf_q4k is not decoded yet, only gguf_q4_0 and gguf_q8_0 are"),
    (lambda: Dequantized(BYTES, "gguf_q4_0", F32), WeightShapeError,
        r"dequantize\(w, gguf_q4_0\): expected whole blocks, u8\[4,54\] for f32\[4,96\], got u8\[4,68\]"),
    (lambda: Dequantized(BYTES, "gguf_q8_0", np.dtype(np.int32)), WeightError, "packs floats, got i32"),
    (lambda: Dequantized(Key("w", tensor_type((4, 68), "i8", "w")), "gguf_q8_0", F32), WeightShapeError,
        r"expected whole blocks, u8\[4,68\] for f32\[4,64\], got i8\[4,68\]"),
    (lambda: Dequantized(Sliced(BYTES, 1, 3, 37), "gguf_q8_0", F32), WeightShapeError, "expected whole blocks"),
    (lambda: Dequantized(BYTES, "gguf_q8_0", F32).over(Transposed(BYTES)), WeightShapeError,
        "a stored tensor is decoded, or a part of one, not transpose"),
    (lambda: read_from(Sliced(M, 1, 0, 48), SOURCE), WeightShapeError,
        r"dequantize\(m.0, gguf_q8_0\): 0:48 of f32\[6,64\] along axis 1 cuts a block of 32; take multiples"),
    (lambda: read_from(Sliced(M, 1, 16, 32), SOURCE), WeightShapeError, "16:32 .* cuts a block"),
    (lambda: read_from(Key("m.0", tensor_type((6, 32), "f32", "m.0")), SOURCE), WeightShapeError,
        r"weight 'm.0' \(mapping\): expected f32\[6,32\], got f32\[6,64\]"),
    (lambda: read_from(Key("m.0", tensor_type((6, 64), "c64", "m.0")), SOURCE), WeightError,
        r"expected c64\[6,64\], got f32\[6,64\]"),
])  # fmt: skip
def test_what_is_no_program(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
