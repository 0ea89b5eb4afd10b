"""Packed tensors: the schemes, what decodes them, and packed values as weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.errors import (
    DTypeError,
    LimitError,
    NonFiniteWeightError,
    RlxNumericsWarning,
    ShapeError,
    UnsupportedError,
    WeightError,
    WeightShapeError,
)
from rlx_jax.ir.packed import SCHEMES, Packed, PackedSpec, decoded, stored_bytes, suspects
from rlx_jax.ir.param import Key, Program
from rlx_jax.ir.reading import read_from
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.weights.execute import load_leaf
from rlx_jax.weights.mapping import MappingSource
from tests.oracles.packed import BLOCKS, DECODED, FLOATS, damaged, meaning, numbers, packed, random_bytes

F32 = np.dtype(np.float32)
BF16 = as_dtype("bf16")


# -- the table and the decoders ------------------------------------------------------------------


def test_the_table_is_that_of_ggml() -> None:
    assert {name: (row.elements, row.bytes) for name, row in SCHEMES.items()} == BLOCKS
    assert tuple(name for name, row in SCHEMES.items() if row.decode) == DECODED
    assert {name: row.floats for name, row in SCHEMES.items()} == FLOATS
    assert all(row.name == name for name, row in SCHEMES.items())


@settings(max_examples=25)
@given(
    scheme=st.sampled_from(DECODED),
    rows=st.lists(st.integers(1, 4), max_size=3),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_decoding(scheme: str, rows: list[int], blocks: int, seed: int) -> None:
    """The float64 numbers bit by bit, on the host and on the device, also of bytes that do not lie side by side."""
    shape = (*rows, 32 * blocks)
    value = packed(scheme, shape, seed)
    want = meaning(value)
    found = decoded(value.data, scheme)
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(jax.jit(lambda data: decoded(data, scheme))(jnp.asarray(value.data)), want)
    spread = np.repeat(value.data, 2, -1)[..., ::2]
    np.testing.assert_array_equal(decoded(spread, scheme), want)
    np.testing.assert_array_equal(decoded(np.asfortranarray(value.data), scheme), want)


@pytest.mark.parametrize("scheme", DECODED)
def test_decoding_of_many_blocks(scheme: str) -> None:
    """More than are decoded at once; the last are what they are alone."""
    data = random_bytes(scheme, (2**14 + 5, 32))
    found = decoded(data, scheme)
    np.testing.assert_array_equal(found[-7:], numbers(scheme, data[-7:]).astype(np.float32))
    np.testing.assert_array_equal(found[:3], numbers(scheme, data[:3]).astype(np.float32))


def read_key(value: Packed, key: str = "w") -> Program:
    """The program of a declared float32 key over a source that has it packed."""
    return read_from(Key(key, tensor_type(tuple(value.shape), "f32", key)), MappingSource({key: value}))


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", DECODED)
def test_live_decoding(scheme: str) -> None:
    """Equals that of `gguf`: of any bytes, and of what it packs itself."""
    import gguf

    kind = gguf.GGMLQuantizationType[scheme.removeprefix("gguf_").upper()]
    data = random_bytes(scheme, (7, 5, 96))
    np.testing.assert_array_equal(decoded(data, scheme), gguf.quants.dequantize(data, kind))
    original = np.random.default_rng(1).standard_normal((6, 128)).astype(np.float32)
    theirs = gguf.quants.quantize(original, kind)
    value = Packed(theirs, scheme, original.shape)
    np.testing.assert_array_equal(
        load_leaf(read_key(value), MappingSource({"w": value})), gguf.quants.dequantize(theirs, kind)
    )


@pytest.mark.oracle
def test_live_table() -> None:
    import gguf

    for name, (elements, width) in BLOCKS.items():
        kind = name.removeprefix("gguf_").upper().replace("K", "_K")
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (elements, width)


# -- values --------------------------------------------------------------------------------------

Q8 = random_bytes("gguf_q8_0", (4, 64))


def q8(shape: Any) -> Packed:
    return Packed(Q8, "gguf_q8_0", shape)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            Packed(Q8, "gguf_q8_0", (4, 60)),
            WeightShapeError,
            "gguf_q8_0 packs blocks of 32, expected a last axis that 32 divides, got f32[4,60]; rows are not padded: "
            "store it as f16, or by a scheme of smaller blocks",
        ),
        (
            Packed(Q8, "gguf_q6k", (4, 64)),
            WeightShapeError,
            "gguf_q6k packs blocks of 256, expected a last axis that 256 divides, got f32[4,64]",
        ),
        (
            Packed(Q8[:, :-2], "gguf_q8_0", (4, 64)),
            WeightShapeError,
            "the bytes of gguf_q8_0 f32[4,64]: expected u8[4,68], got u8[4,66]; check the scheme and the shape",
        ),
        (Packed(Q8, "gguf_q4_0", (4, 64)), WeightShapeError, "expected u8[4,36], got u8[4,68]"),
        (Packed(Q8.ravel(), "gguf_q8_0", (4, 64)), WeightShapeError, "expected u8[4,68], got u8[272]"),
        (
            Packed(Q8.view(np.int8), "gguf_q8_0", (4, 64)),
            WeightError,
            "expected u8[4,68], got dtype 'i8'; give the bytes as they are stored",
        ),
        (Packed(Q8.view(np.float32), "gguf_q8_0", (4, 64)), WeightError, "got dtype 'f32'"),
        (Packed(Q8.tobytes(), "gguf_q8_0", (4, 64)), WeightError, "got 'bytes'; numpy.frombuffer makes one"),
        (Packed(np.ma.masked_array(Q8), "gguf_q8_0", (4, 64)), WeightError, "got 'MaskedArray'"),
        (
            Packed(Q8, "gguf_q80", (4, 64)),
            WeightError,
            "unknown scheme of packing 'gguf_q80'; did you mean 'gguf_q8_0'",
        ),
        (Packed(Q8, "int8", (4, 64)), WeightError, "unknown scheme of packing 'int8'; known are gguf_q4_0, gguf_q4_1"),
        (Packed(Q8, None, (4, 64)), WeightError, "unknown scheme of packing None; known are"),  # type: ignore[arg-type]
        (
            Packed(Q8, "gguf_q8_0", ()),
            WeightShapeError,
            "gguf_q8_0 packs rows, got the scalar f32[]; store it as it is",
        ),
        (Packed(Q8, "gguf_q8_0", (4, 64), np.int32), WeightError, "gguf_q8_0 packs floats, got i32[4,64]"),
        (Packed(Q8, "gguf_q8_0", (4, 64), "f33"), DTypeError, "unknown dtype 'f33'"),
        (q8(64), ShapeError, "a shape is a tuple of identifiers and ints, got '64'"),
        (q8(("n", 64)), WeightShapeError, "expected whole numbers as the shape of what is packed, got f32[n,64]"),
        (q8((4, "k")), WeightShapeError, "expected whole numbers"),
        (Packed(Q8, "gguf_q8_0", (0, 64)), ShapeError, "a dimension is between 1 and"),
        (PackedSpec((4, 60), F32, "gguf_q8_0"), WeightShapeError, "expected a last axis that 32 divides"),
        (PackedSpec((), F32, "gguf_q8_0"), WeightShapeError, "got the scalar f32[]"),
    ],
)
def test_what_is_no_packed_value(value: Any, error: type[Exception], message: str) -> None:
    """Is refused where it gets its key, which the message names."""
    with pytest.raises(error) as caught:
        rlx.open_weights({"layers.0.w": value})
    assert message in str(caught.value)
    assert type(caught.value) is DTypeError or "layers.0.w" in str(caught.value)


@pytest.mark.parametrize("scheme", sorted(set(BLOCKS) - set(DECODED)))
def test_what_is_not_decoded_yet(scheme: str) -> None:
    """Opens, and is refused by name when a flow reads it: before anything is compiled or read."""
    value = packed(scheme, (4, 256))
    source = rlx.open_weights({"w": value})
    np.testing.assert_array_equal(source.read("w"), value.data)
    for weights in (source, {"w": value.spec}):
        with pytest.raises(
            UnsupportedError, match=rf"weight 'w' \(mapping\): {scheme} is not decoded yet, only gguf_q4_0 and"
        ):
            rlx.ModelFlow("m").input("x", (2, 256)).linear("w").build(weights)
    with pytest.raises(UnsupportedError, match=f"a packed tensor: {scheme} is not decoded yet"):
        decoded(value.data, scheme)


def test_a_source_of_packed_values() -> None:
    """Specs are logical, and what is read are bytes."""
    value = packed("gguf_q8_0", (2, 3, 64))
    source = rlx.open_weights({"w": value, "jax": Packed(jnp.asarray(value.data), value.scheme, [2, 3, 64], "bf16")})
    assert source.spec("w") == PackedSpec((2, 3, 64), F32, "gguf_q8_0")
    assert source.spec("jax") == PackedSpec([2, 3, 64], "bf16", "gguf_q8_0")  # type: ignore[arg-type]
    assert source.spec("jax").shape == (2, 3, 64) and source.spec("jax").dtype == BF16 and source.spec("w").size == 384
    np.testing.assert_array_equal(source.read("w"), value.data)
    np.testing.assert_array_equal(source.read("jax", (slice(1, 2),)), value.data[1:2])
    assert not source.read("w").flags.writeable
    with pytest.raises(WeightError, match="'w' has a shape only, no values: it was given as a PackedSpec"):
        rlx.open_weights({"w": value.spec}).read("w")
    with pytest.raises(WeightShapeError, match="expected at most 3 slices"):
        source.read("w", (slice(0, 1),) * 4)


@pytest.mark.parametrize("scheme", BLOCKS)
def test_bytes_are_those_that_are_stored(scheme: str) -> None:
    """`max_bytes` counts them, not the numbers."""
    value, dense = packed(scheme, (3, 512)), np.zeros((5, 7), np.float16)
    total = value.data.nbytes + dense.nbytes
    assert (
        stored_bytes(value.spec) == value.data.nbytes and stored_bytes(jax.ShapeDtypeStruct((5, 7), np.float16)) == 70
    )
    rlx.open_weights({"w": value, "b": dense}, max_bytes=total)
    with pytest.raises(LimitError, match=str(total)):
        rlx.open_weights({"w": value, "b": dense}, max_bytes=total - 1)


# -- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", DECODED)
def test_nan_in_a_block(scheme: str) -> None:
    """Is an error when it is read, alone or of a part, and counted in numbers."""
    weights = {"w": damaged(scheme, np.nan)}
    flow = rlx.ModelFlow("m").input("x", (2, 64)).linear("w")
    with pytest.raises(NonFiniteWeightError, match=r"weight 'w' \(mapping\): 32 NaN of 192 values read"):
        rlx.compile(flow, weights)
    source = rlx.open_weights(weights)
    with pytest.raises(NonFiniteWeightError, match="32 NaN of 64 values read"):
        source.read("w", (slice(1, 2),))
    assert source.read("w", (slice(0, 1),)).shape[0] == 1
    with pytest.warns(RlxNumericsWarning, match="32 NaN of 192 values read"):
        rlx.compile(flow, rlx.open_weights(weights, on_nonfinite="warn"))
    model = rlx.compile(flow, rlx.open_weights(weights, on_nonfinite="ignore"))
    want = numbers(scheme, weights["w"].data)
    assert model.params is not None
    np.testing.assert_array_equal(model.params["w"], want)


def test_infinity_in_a_block() -> None:
    """A warning, as anywhere; but infinity times a quant of 0 is NaN, and that is an error."""
    value = damaged("gguf_q8_0", np.inf)
    with pytest.warns(RlxNumericsWarning, match="32 infinite of 192 values"):
        rlx.open_weights({"w": value}).read("w")
    data = value.data.copy()
    data[1, 2] = 0
    with pytest.raises(NonFiniteWeightError, match="1 NaN and 31 infinite of 192 values"):
        rlx.open_weights({"w": Packed(data, value.scheme, value.shape)}).read("w")


@pytest.mark.parametrize("scheme", BLOCKS)
def test_every_float_of_a_block_is_looked_at(scheme: str) -> None:
    """Of schemes that are not decoded yet, too."""
    assert np.isfinite(suspects(packed(scheme, (3, 512)).data, scheme)).all()
    for at in range(len(FLOATS[scheme])):
        with pytest.raises(NonFiniteWeightError, match="NaN"):
            rlx.open_weights({"w": damaged(scheme, np.nan, at)}).read("w")


def test_numbers_over_the_range() -> None:
    """Of the dtype that they are narrowed to: infinite, with a warning, as of weights that are not packed."""
    data = random_bytes("gguf_q8_0", (1, 32))
    data[0, :2] = np.array([60000], "<f2").view(np.uint8)
    data[0, 2:] = 2
    flow = rlx.ModelFlow("m").input("x", (2, 32)).linear("w")
    with pytest.warns(RlxNumericsWarning, match=r"weight 'w' \(mapping\): 32 of 32 values are over the range of f16"):
        rlx.compile(flow, {"w": Packed(data, "gguf_q8_0", (1, 32), "f16")})
