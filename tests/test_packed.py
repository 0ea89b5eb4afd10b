"""Packed tensors: the schemes, what decodes them, packed values as weights, and programs over packed keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.errors import (
    LimitError,
    NonFiniteWeightError,
    RlxNumericsWarning,
    UnsupportedError,
    WeightError,
)
from rlx_jax.io.ggml import BLOCKS as LAYOUTS
from rlx_jax.io.ggml import split_blocks
from rlx_jax.ir.packed import SCHEMES, Codes, Packed, PackedSpec, stored_bytes
from rlx_jax.ir.packed_values import decode_arrays, decode_on_host, decode_packed, finite_check_floats
from rlx_jax.ir.param import (
    Dequantized,
    Joined,
    Key,
    Program,
    Sliced,
    Stack,
    Transposed,
    cast,
    is_lossy,
    keys_of,
    packed_keys,
    printed_name,
    stored_keys,
)
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.ir.weight_reads import with_source
from rlx_jax.weights.execute import fill, host_bytes_to_load
from rlx_jax.weights.inverse import pieces
from rlx_jax.weights.mapping import MappingSource
from tests.opening import load_leaf
from tests.oracles.packed import BLOCKS, FLOATS, damaged, meaning, numbers, packed, random_bytes

F32 = np.dtype(np.float32)
BF16 = as_dtype("bf16")


def test_the_table_is_that_of_ggml() -> None:
    assert {name: (layout.elements, layout.bytes) for name, layout in LAYOUTS.items()} == BLOCKS
    assert all(row.name == name for name, row in SCHEMES.items())
    for name, layout in LAYOUTS.items():
        assert SCHEMES[name].elements == layout.elements and set(layout.parts) == set(arrays_of(packed(name, (1, 512))))


def arrays_of(value: Packed) -> dict[str, Any]:
    """The arrays that a packed tensor is on a device."""
    types = SCHEMES[value.scheme].array_types(value.shape)
    arrays = {n: split_blocks(value.data, LAYOUTS[value.scheme], n, t.dtype) for n, t in types.items()}
    assert {n: (a.shape, a.dtype) for n, a in arrays.items()} == {n: (t.shape, t.dtype) for n, t in types.items()}
    return arrays


@settings(max_examples=15)
@given(
    scheme=st.sampled_from(list(BLOCKS)),
    rows=st.lists(st.integers(1, 4), max_size=3),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_decoding(scheme: str, rows: list[int], blocks: int, seed: int) -> None:
    """The float64 numbers bit by bit, on the host and on the device, also of bytes that do not lie side by side."""
    shape = (*rows, BLOCKS[scheme][0] * blocks)
    value = packed(scheme, shape, seed)
    want = meaning(value)
    found = decode_packed(value.data, scheme)
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_array_equal(found, want)
    arrays = arrays_of(value)
    np.testing.assert_array_equal(decode_on_host(arrays, scheme), want)
    np.testing.assert_array_equal(jax.jit(lambda arrays: decode_arrays(arrays, scheme))(arrays), want)
    spread = np.repeat(value.data, 2, -1)[..., ::2]
    np.testing.assert_array_equal(decode_packed(spread, scheme), want)
    np.testing.assert_array_equal(decode_packed(np.asfortranarray(value.data), scheme), want)


def read_key(value: Packed, key: str = "w") -> Program:
    """The program of a declared float32 key over a source that has it packed."""
    return with_source(Key(key, tensor_type(tuple(value.shape), "f32", key)), MappingSource({key: value}))


def kind_of(scheme: str) -> str:
    """The name of gguf-py: `gguf_q4k` is Q4_K."""
    name = scheme.removeprefix("gguf_").upper()
    return f"{name[:-1]}_K" if name.endswith("K") else name


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("scheme", BLOCKS)
def test_live_decoding(scheme: str) -> None:
    """Equals that of `gguf` bit by bit: of any bytes, NaN and infinity included, and of what it packs itself."""
    import gguf

    kind = gguf.GGMLQuantizationType[kind_of(scheme)]
    assert gguf.GGML_QUANT_SIZES[kind] == BLOCKS[scheme]
    if scheme == "gguf_q8k":  # gguf-py does not decode it
        return
    elements, width = BLOCKS[scheme]
    data = np.random.default_rng(0).integers(0, 256, (300, 3 * width), np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data, kind).astype(np.float32)
    found = decode_packed(data, scheme)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), want[~nan].view(np.uint32))
    original = np.random.default_rng(1).standard_normal((6, 2 * elements)).astype(np.float32)
    try:
        theirs = gguf.quants.quantize(original, kind)
    except NotImplementedError:  # of some schemes it only decodes
        return
    value = Packed(theirs, scheme, original.shape)
    np.testing.assert_array_equal(
        load_leaf(read_key(value), MappingSource({"w": value})), gguf.quants.dequantize(theirs, kind)
    )


Q8 = random_bytes("gguf_q8_0", (4, 64))


def opened(data: Any, scheme: str = "gguf_q8_0", shape: Any = (4, 64), **dtype: Any) -> Any:
    """Open a packed tensor of these bytes."""
    return rlx.open_weights({"layers.0.w": Packed(data, scheme, shape, **dtype)})


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
    with pytest.raises(WeightError, match="'w' .*PackedSpec"):
        rlx.open_weights({"w": value.spec}).read("w")


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


@pytest.mark.parametrize("scheme", ["gguf_q4_0", "gguf_q8_0"])
def test_nan_in_a_block(scheme: str) -> None:
    """Is an error when it is read, alone or of a part, and counted in numbers."""
    weights = {"w": damaged(scheme, np.nan)}
    flow = rlx.ModelFlow("m").input("x", (2, 64)).linear("w")
    with pytest.raises(NonFiniteWeightError, match=r"'w'.*\(mapping\).*32.*192"):
        rlx.compile(flow, weights)
    source = rlx.open_weights(weights)
    with pytest.raises(NonFiniteWeightError, match="32 NaN of 64 values read"):
        source.read("w", (slice(1, 2),))
    assert source.read("w", (slice(0, 1),)).shape[0] == 1
    with pytest.warns(RlxNumericsWarning, match="32 NaN of 192 values read"):
        rlx.compile(flow, rlx.open_weights(weights, on_nonfinite="warn"))
    model = rlx.compile(flow, rlx.open_weights(weights, on_nonfinite="ignore"))
    want = numbers(scheme, weights["w"].data)
    np.testing.assert_array_equal(model.weights()["w"], want)


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
    assert np.isfinite(finite_check_floats(packed(scheme, (3, 512)).data, scheme)).all()
    for at in range(len(FLOATS[scheme])):
        with pytest.raises(NonFiniteWeightError, match="NaN"):
            rlx.open_weights({"w": damaged(scheme, np.nan, at)}).read("w")


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
    want, program = means(STORED), with_source(declared, SOURCE)
    assert program.type == declared.type and is_lossy(program) and printed_name(program).replace("}.{", "},{") == name
    np.testing.assert_array_equal(load_leaf(program, SOURCE), want)
    larger = np.zeros((*want.shape[:-1], want.shape[-1] + 2), np.float32)
    fill(larger[..., 1:-1], program, SOURCE)
    np.testing.assert_array_equal(larger[..., 1:-1], want)

    np.testing.assert_array_equal(load_leaf(cast(program, BF16), SOURCE), want.astype(BF16))
    assert cast(cast(program, np.dtype(np.float64)), np.dtype(np.float32)) == program
    assert with_source(program, SOURCE) == program == with_source(cast(program, np.dtype(np.float32)), SOURCE)

    assert list(stored_keys(program)) == list(stored_keys(declared)), "logical types"
    assert dict(packed_keys(program)) == {k: VALUES[k].scheme for k in keys_of(declared)}
    for piece in pieces(program, want):
        np.testing.assert_array_equal(piece.values, STORED[piece.key.key][piece.selection])
        assert piece.key.type.dtype == np.float32


def test_values_are_not_packed_again() -> None:
    program = with_source(M, SOURCE)
    assert isinstance(program, Dequantized)
    with pytest.raises(UnsupportedError, match=r"dequantize\(m.0.*gguf_q8_0\)"):
        program.split(STORED["m.0"])


@pytest.mark.parametrize(("bits", "stride"), [(4, 1), (4, 32), (2, 32), (1, 8), (8, 1)])
def test_codes_are_packed_and_unpacked(bits: int, stride: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 512), np.uint8)
    packed_codes = Codes(bits, stride).pack(codes)
    assert packed_codes.shape == (3, 512 * bits // 8)
    np.testing.assert_array_equal(Codes(bits, stride).unpack(packed_codes), codes)


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
        load_leaf(with_source(part, source), source)
        assert asked == [("a.w", shape)]
    m = with_source(M, source)
    assert host_bytes_to_load(m) == 2 * m.type.nbytes + 12 * 68
    assert host_bytes_to_load(cast(m, BF16)) == 2 * (m.type.nbytes // 2) + m.type.nbytes + 12 * 68
    assert host_bytes_to_load(Stack((m, with_source(N, source)))) == 2 * m.type.nbytes + m.type.nbytes + 12 * 68


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f64"])
def test_another_logical_dtype(dtype: str) -> None:
    """The numbers are rounded to it, and then to what the program computes in."""
    value = Packed(VALUES["m.0"].data, "gguf_q8_0", (6, 64), dtype)
    want = STORED["m.0"].astype(as_dtype(dtype))
    program = with_source(Key("w", tensor_type((6, 64), dtype, "w")), MappingSource({"w": value}))
    assert program.type.dtype == as_dtype(dtype) and isinstance(program, Dequantized)
    leaf = np.empty(want.shape, want.dtype)
    fill(leaf, program, MappingSource({"w": value}))
    np.testing.assert_array_equal(leaf, want)
    np.testing.assert_array_equal(load_leaf(cast(program, F32), MappingSource({"w": value})), want.astype(np.float32))


BYTES = Key("w", tensor_type((4, 68), "u8", "w"))
