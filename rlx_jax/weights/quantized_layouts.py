"""How quantised checkpoints of Hugging Face store a weight, and how its tensors become the arrays of a packing scheme.

`LAYOUTS` has a row for each method: the tensors that a quantised module has, and a function that describes its weight.
Values of codes and scales are copied, and scales at most widened, so decoding gives the numbers of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, NonFiniteWeightError, UnsupportedError, WeightError, WeightShapeError, quote
from rlx_jax.io.fields import Fields
from rlx_jax.io.files import parse_object
from rlx_jax.ir.packed import F32, SCHEMES, TABLES, Codes
from rlx_jax.ir.types import short_name
from rlx_jax.weights.module_tensors import (
    BF16,
    E4M3,
    E8M0,
    FLOATS,
    I8,
    I32,
    I64,
    U8,
    U32,
    ModuleTensors,
    QuantizedWeight,
    Range,
    ReadArray,
    bit_fields_of,
    cut,
    declare_scheme,
    expect_one,
    float_bits,
    read_bytes,
    read_outer,
    read_whole,
)
from rlx_jax.weights.quantized_config import WeightFormat, is_positive
from rlx_jax.weights.views import HostArray

# The order in which AWQ stores eight neighbours, inverted.
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class ModuleLayout:
    """The layout of a method.

    Attributes:
        markers: the ends of keys that only a quantised module has.
        others: the ends of its other keys, including scales of activations, which are not used.
        describe: describes the weight of such a module.
        weight: the end of the key of the weight.
    """

    markers: tuple[str, ...]
    others: tuple[str, ...]
    describe: Callable[[ModuleTensors, WeightFormat], QuantizedWeight]
    weight: str = ".weight"


# -- codes of a byte with scales ---------------------------------------------------------------


def _scaled(t: ModuleTensors, stored: WeightFormat, end: str) -> QuantizedWeight:
    """Describe FP8 or int8 codes `.weight` with the scales `end`: for a tensor, rows, groups or blocks."""
    codes = t.type(".weight", E4M3 if stored.is_float else I8, rank=2)
    dtypes = (*FLOATS, E8M0, U8) if stored.exponents else (*FLOATS, E8M0) if stored.is_float else FLOATS
    scales, (num_rows, num_columns) = t.type(end, *dtypes), codes.shape
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (1,), (1, 1)), "channel": ((num_rows, 1), (num_rows,)),
    }  # fmt: skip
    if stored.strategy in ("group", "block"):
        shapes[stored.strategy] = ((-(-num_rows // stored.rows), -(-num_columns // stored.group)),)
    if scales.shape not in shapes[stored.strategy]:
        expected = " or ".join(str(list(shape)) for shape in shapes[stored.strategy])
        raise t.mismatch(end, f"shape {expected} (a scale for each {stored.strategy})", scales)
    is_divided = stored.strategy in ("group", "block")

    def per_scale(end: str, rows: Range, columns: Range) -> HostArray:
        """Return a box of a tensor with the shape of the scales."""
        if stored.strategy == "tensor":
            return np.repeat(t.read(end).reshape(1, 1), rows[1] - rows[0], axis=0)
        return t.read(end, slice(*rows), *(slice(*columns),) * is_divided).reshape(rows[1] - rows[0], -1)

    def read_scales(rows: Range, columns: Range) -> HostArray:
        values = per_scale(end, rows, columns)
        if values.dtype == U8 and (values == 255).any():
            raise NonFiniteWeightError(f"{t.where}: {quote(t.module + end)} has the byte 255, an exponent of NaN")
        return float_bits((values.view(E8M0) if values.dtype == U8 else values).astype(F32))

    def signed_codes(rows: Range, columns: Range) -> HostArray:
        return t.read(".weight", slice(*rows), slice(*columns))

    shape, block = (num_rows, num_columns), min(stored.group, num_columns) if is_divided else None
    shared_rows = min(stored.rows, num_rows)  # decoding repeats scales as often as the scheme declares
    if stored.is_float:
        scheme = declare_scheme("fp8_e4m3", 8, block, "f32", table="e4m3", rows=shared_rows)
        return QuantizedWeight(shape, scheme, {"codes": read_bytes(t, ".weight"), "scales": read_scales})
    if stored.symmetric:
        scheme = declare_scheme("int8", 8, block, "f32", signed=True, rows=shared_rows)
        return QuantizedWeight(shape, scheme, {"codes": signed_codes, "scales": read_scales})
    zeros = ".weight_zero_point"
    t.expect(zeros, scales.shape, I8)
    scheme = declare_scheme("uint8_zeros", 8, block, "f32", zeros=True, rows=shared_rows)
    arrays: dict[str, ReadArray] = {
        "codes": lambda rows, columns: _plus_128(signed_codes(rows, columns)),
        "scales": read_scales,
        "zeros": lambda rows, columns: _plus_128(per_scale(zeros, rows, columns)),
    }
    return QuantizedWeight(shape, scheme, arrays)


def _plus_128(values: HostArray) -> HostArray:
    """Return signed bytes plus 128, which are unsigned."""
    return values.view(U8) ^ np.uint8(128)


# -- NVFP4 -------------------------------------------------------------------------------------


def _nvfp4(t: ModuleTensors, codes_end: str, outer_end: str, outer: str) -> QuantizedWeight:
    """Describe NVFP4: e2m1 codes, e4m3 scales of 16 values, and a float32 of the tensor that scales are combined with.

    Args:
        t: the tensors.
        codes_end: the tensor of the codes, uint8 `[out, in / 2]`, low bits first.
        outer_end: the tensor of the float32.
        outer: "multiplied" or "divided".
    """
    codes = t.type(codes_end, U8, rank=2)
    num_rows, num_columns = codes.shape[0], codes.shape[1] * 2
    if num_columns % 16:
        raise t.mismatch(codes_end, "rows of whole groups of 16 values, 8 bytes", codes)
    t.expect(".weight_scale", (num_rows, num_columns // 16), E4M3)
    expect_one(t, outer_end, F32)
    arrays = {
        "codes": read_bytes(t, codes_end), "scales": read_bytes(t, ".weight_scale"),
        "outer": read_outer(t, outer_end, is_divisor=outer == "divided"),
    }  # fmt: skip
    scheme = declare_scheme(f"nvfp4_{outer}", 4, 16, "e4m3", table="e2m1", outer=outer)
    return QuantizedWeight((num_rows, num_columns), scheme, arrays)


def _modelopt(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    for end in (".pre_quant_scale", ".svdquant_lora_a", ".weight_zero_point"):
        if t.has(end):
            raise UnsupportedError(f"{t.where}: {quote(t.module + end)} of ModelOpt is not supported")
    if stored.bits == 4:
        return _nvfp4(t, ".weight", ".weight_scale_2", "multiplied")
    return _scaled(t, stored, ".weight_scale")


# -- compressed-tensors ------------------------------------------------------------------------


def _compressed_tensors(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    if not t.has(".weight_packed"):
        return _scaled(t, stored, ".weight_scale")
    t.refuse_plain()
    if stored.is_float:
        return _nvfp4(t, ".weight_packed", ".weight_global_scale", "divided")
    words, scales = t.type(".weight_packed", I32, rank=2), t.type(".weight_scale", *FLOATS, rank=2)
    num_rows, bits = words.shape[0], stored.bits
    num_columns = words.shape[1] * 32 // bits
    if stored.strategy not in ("channel", "group"):
        raise UnsupportedError(f"{t.where}: packed integers with a scale for each {stored.strategy} are not supported")
    block, num_groups = _grouping(stored, num_columns)
    t.expect(".weight_scale", (num_rows, num_groups), *FLOATS)
    if block is not None and num_columns % block:
        raise t.mismatch(".weight_packed", f"rows of whole groups of {block} values", words)
    has_shape = t.has(".weight_shape") and t.expect(".weight_shape", (2,), I32, I64)

    def read_codes(rows: Range, columns: Range) -> HostArray:
        shape = t.read(".weight_shape").tolist() if has_shape else [num_rows, num_columns]
        if shape != [num_rows, num_columns]:
            raise WeightShapeError(f"{t.where}: weight_shape is {shape}, expected {[num_rows, num_columns]}")
        return read_bytes(t, ".weight_packed", 4)(rows, columns)

    def read_zeros() -> HostArray:
        return bit_fields_of(t.read(".weight_zero_point").T, bits)[:, :num_rows].T

    def read_scales(rows: Range, columns: Range) -> HostArray:
        return float_bits(t.read(".weight_scale", slice(*rows), slice(*columns)))

    arrays: dict[str, ReadArray] = {"codes": read_codes, "scales": read_scales}
    scale = short_name(scales.dtype)
    if stored.symmetric:
        scheme = declare_scheme(f"int{bits}", bits, block, scale, zero=2 ** (bits - 1))
    else:
        t.expect(".weight_zero_point", (-(-num_rows * bits // 32), num_groups), I32)
        arrays["zeros"] = read_whole(read_zeros)
        scheme = declare_scheme(f"uint{bits}_zeros", bits, block, scale, zeros=True)
    groups = _groups(t, stored, ".weight_g_idx", num_columns, num_groups)
    return _by_group(t, QuantizedWeight((num_rows, num_columns), scheme, arrays), groups)


def _grouping(stored: WeightFormat, num_columns: int) -> tuple[int | None, int]:
    """Return the number of inputs that share a scale, None for all, and the number of such groups."""
    block = min(stored.group, num_columns) if stored.strategy == "group" else None
    return block, 1 if block is None else -(-num_columns // block)


def _groups(
    t: ModuleTensors, stored: WeightFormat, end: str, num_columns: int, num_groups: int
) -> Callable[[], HostArray] | None:
    """Return a function that reads the group of each input; None if there is no such tensor and none is needed."""
    if not stored.mixed_order and not t.has(end):
        return None
    t.expect(end, (num_columns,), I32)

    def read() -> HostArray:
        groups = t.read(end)
        if num_columns and not (0 <= groups.min() and groups.max() < num_groups):
            raise WeightError(f"{t.where}: {quote(t.module + end)} has groups outside 0 … {num_groups - 1}")
        return groups

    return read


def _by_group(t: ModuleTensors, weight: QuantizedWeight, groups: Callable[[], HostArray] | None) -> QuantizedWeight:
    """Return a weight with its codes sorted by group, for inputs in mixed order; None: they are in order."""
    if groups is None:
        return weight
    scheme, num_columns = weight.scheme, weight.shape[1]
    (codes,), block = scheme.codes, scheme.block or num_columns

    def read_order() -> HostArray:
        order = np.argsort(groups(), kind="stable").astype(np.int32)
        if (groups()[order] != np.arange(num_columns) // block).any():
            raise UnsupportedError(f"{t.where}: g_idx has groups of other sizes than {block}, which is unsupported")
        return order[None]

    def read_codes(rows: Range, columns: Range) -> HostArray:
        data = weight.arrays["codes"](rows, (0, num_columns * codes.bits // 8))
        return cut(codes.pack(codes.unpack(data)[:, read_order()[0]]), 0, columns)

    scheme = SCHEMES.setdefault(f"{scheme.name}_ordered", replace(scheme, name=f"{scheme.name}_ordered", ordered=True))
    return QuantizedWeight(
        weight.shape, scheme, {**weight.arrays, "codes": read_codes, "order": read_whole(read_order)}
    )


# -- AWQ and GPTQ ------------------------------------------------------------------------------


def _awq(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    """Describe AWQ: words with eight neighbours of an output in mixed order, for each input."""
    t.refuse_plain()
    words = t.type(".qweight", I32, rank=2)
    num_columns, num_rows = words.shape[0], words.shape[1] * 8
    block, _, scale = _transposed_scales(t, stored, num_rows, num_columns, num_rows // 8)

    def neighbours(words: HostArray) -> HostArray:
        fields = bit_fields_of(words, 4)
        return fields.reshape(len(fields), -1, 8)[..., _AWQ_ORDER].reshape(fields.shape).T

    def read_codes(rows: Range, columns: Range) -> HostArray:
        start = rows[0] // 8
        part = t.read(".qweight", slice(2 * columns[0], 2 * columns[1]), slice(start, -(-rows[1] // 8)))
        return Codes(4).pack(neighbours(part)[rows[0] - start * 8 : rows[1] - start * 8])

    arrays = {
        "codes": read_codes, "scales": _read_transposed_scales(t),
        "zeros": read_whole(lambda: neighbours(t.read(".qzeros"))),
    }  # fmt: skip
    return QuantizedWeight((num_rows, num_columns), declare_scheme("uint4_zeros", 4, block, scale, zeros=True), arrays)


def _gptq(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    """Describe GPTQ: words with neighbouring inputs, for each output; version 1 stores zero points minus 1."""
    t.refuse_plain()
    words, bits = t.type(".qweight", I32, rank=2), stored.bits
    num_columns, num_rows = words.shape[0] * 32 // bits, words.shape[1]
    block, num_groups, scale = _transposed_scales(t, stored, num_rows, num_columns, -(-num_rows * bits // 32))
    groups = _groups(t, stored, ".g_idx", num_columns, num_groups)

    def read_codes(rows: Range, columns: Range) -> HostArray:
        in_order = np.arange(num_columns) // (block or num_columns)
        if groups is not None and not stored.mixed_order and (groups() != in_order).any():
            raise WeightError(f"{t.where}: g_idx is not in order, although desc_act is false")
        start = columns[0] // 4
        part = t.read(".qweight", slice(start, -(-columns[1] // 4)), slice(*rows))
        return cut(np.ascontiguousarray(part.T).view(U8), start * 4, columns)

    def read_zeros() -> HostArray:
        # The writers subtract 1 from each field of a word with borrows, which this addition undoes.
        ones = np.uint32(stored.zero_offset * sum(1 << shift for shift in range(0, 32, bits)))
        return bit_fields_of(t.read(".qzeros").view(U32) + ones, bits)[:, :num_rows].T

    arrays = {"codes": read_codes, "scales": _read_transposed_scales(t), "zeros": read_whole(read_zeros)}
    scheme = declare_scheme(f"uint{bits}_zeros", bits, block, scale, zeros=True)
    weight = QuantizedWeight((num_rows, num_columns), scheme, arrays)
    return _by_group(t, weight, groups if stored.mixed_order else None)


def _transposed_scales(
    t: ModuleTensors, stored: WeightFormat, num_rows: int, num_columns: int, zero_words: int
) -> tuple[int | None, int, str]:
    """Check scales and zero points `[in / group, out]` of AWQ and GPTQ; return `_grouping` and the dtype of scales."""
    block, num_groups = _grouping(stored, num_columns)
    t.expect(".qzeros", (num_groups, zero_words), I32)
    return block, num_groups, short_name(t.expect(".scales", (num_groups, num_rows), *FLOATS).dtype)


def _read_transposed_scales(t: ModuleTensors) -> ReadArray:
    return lambda rows, columns: float_bits(t.read(".scales", slice(*columns), slice(*rows)).T)


# -- bitsandbytes ------------------------------------------------------------------------------

_STATE = ".weight.quant_state.bitsandbytes__nf4"


def _bitsandbytes(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    return _nf4(t) if stored.bits == 4 else _llm_int8(t)


def _llm_int8(t: ModuleTensors) -> QuantizedWeight:
    """Describe int8 rows: value = code · SCB / 127."""
    num_rows, num_columns = t.type(".weight", I8, rank=2).shape
    t.expect(".SCB", (num_rows,), F32)
    if has_order := t.has(".weight_format"):
        expect_one(t, ".weight_format", U8)

    def read_codes(rows: Range, columns: Range) -> HostArray:
        if has_order and t.read(".weight_format").any():
            raise UnsupportedError(f"{t.where}: a weight_format other than 0, rows in order, is not supported")
        return t.read(".weight", slice(*rows), slice(*columns))

    arrays: dict[str, ReadArray] = {
        "codes": read_codes,
        "scales": lambda rows, columns: float_bits(t.read(".SCB", slice(*rows)).reshape(-1, 1)),
    }
    scheme = declare_scheme("bnb_int8", 8, None, "f32", signed=True, factor=1 / 127)
    return QuantizedWeight((num_rows, num_columns), scheme, arrays)


def _nf4(t: ModuleTensors) -> QuantizedWeight:
    """Describe NF4: codes of the flattened weight, high bits first, and a scale for each block of them.

    Scales may be quantised too, which loading undoes.
    """
    num_rows, num_columns, block, nested_block, offset = _quant_state(t)
    if num_columns % block or num_columns % 2:
        raise UnsupportedError(f"{t.where}: blocks of {block} are cut by rows of {num_columns}, which is unsupported")
    t.expect(".weight", (num_rows * num_columns // 2, 1), U8)
    count, width = num_rows * num_columns // block, num_columns // 2
    t.expect(".weight.absmax", (count,), U8 if nested_block else F32)
    if nested_block:
        t.expect(".weight.nested_absmax", (-(-count // nested_block),), F32)
        t.expect(".weight.nested_quant_map", (256,), F32)

    def read_codes(rows: Range, columns: Range) -> HostArray:
        data = t.read(".weight", slice(rows[0] * width, rows[1] * width)).reshape(-1, width)
        return cut(data << 4 | data >> 4, 0, columns)

    def read_scales() -> HostArray:
        scales = t.read(".weight.absmax")
        if nested_block:
            outer = t.read(".weight.nested_absmax")[np.arange(count) // nested_block]
            scales = t.read(".weight.nested_quant_map")[scales] * outer + np.float32(offset)
        return float_bits(scales.reshape(num_rows, -1))

    arrays: dict[str, ReadArray] = {"codes": read_codes, "scales": read_whole(read_scales)}
    return QuantizedWeight((num_rows, num_columns), declare_scheme("nf4", 4, block, "f32", table="nf4"), arrays)


def _quant_state(t: ModuleTensors) -> tuple[int, int, int, int, float]:
    """Return the state that bitsandbytes stores as JSON in a tensor, after checking the table of values of NF4.

    It is the numbers of rows and columns, the size of a block of values and of a block of scales, which is 0 if scales
    are not quantised, and what quantised scales lack.

    Raises:
        ConfigError: it is malformed. LimitError: a size is over 2**24.
    """
    if (state_type := t.type(_STATE, U8, rank=1)).size > 2**16:
        raise t.mismatch(_STATE, "at most 65,536 bytes", state_type)
    t.expect(".weight.quant_map", (16,), F32)
    if not np.array_equal(t.read(".weight.quant_map"), TABLES["nf4"]):
        raise UnsupportedError(f"{t.where}: quant_map has other values than NF4")
    where = f"{t.where}: {quote(t.module + _STATE)}"
    state = Fields(parse_object(t.read(_STATE).tobytes(), where, ConfigError), where)
    if (kind := state.text("quant_type")) != "nf4":
        raise state.invalid("quant_type", "nf4", kind)
    num_rows, num_columns = state.items("shape", [], "two positive integers", is_positive, 2)
    nested_block = state.integer("nested_blocksize") if t.has(".weight.nested_absmax") else 0
    offset = state.real("nested_offset", 0.0, low=-math.inf)
    return num_rows, num_columns, state.integer("blocksize"), nested_block, offset


# -- MLX ---------------------------------------------------------------------------------------


def _mlx(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    """Describe MLX: value = scale · code + bias for each group."""
    words = t.type(".weight", U32, rank=2)
    num_rows, num_columns = words.shape[0], words.shape[1] * 32 // stored.bits
    if num_columns % stored.group:
        raise t.mismatch(".weight", f"rows of whole groups of {stored.group} values", words)
    dtype = t.expect(".scales", (num_rows, num_columns // stored.group), *FLOATS).dtype
    t.expect(".biases", (num_rows, num_columns // stored.group), dtype)

    def read_scales(rows: Range, columns: Range) -> HostArray:
        start, stop = columns[0] // 2, -(-columns[1] // 2)
        pairs = [float_bits(t.read(end, slice(*rows), slice(start, stop))) for end in (".scales", ".biases")]
        return cut(np.stack(pairs, axis=-1).reshape(len(pairs[0]), -1), 2 * start, columns)

    arrays = {"codes": read_bytes(t, ".weight", 4), "scales": read_scales}
    scheme = declare_scheme(f"affine{stored.bits}", stored.bits, stored.group, short_name(dtype), minimum="added")
    return QuantizedWeight((num_rows, num_columns), scheme, arrays)


# -- MXFP4 -------------------------------------------------------------------------------------

# The largest scale of MXFP4 whose products with codes, which are up to 6, are in the range of bf16.
_MAX_SCALE = 252


def _mxfp4(t: ModuleTensors, stored: WeightFormat) -> QuantizedWeight:
    """Describe the weight of experts, bf16 `[E, in, out]`, in MXFP4 (OCP Microscaling Formats, 2023).

    A byte of `_blocks` uint8 `[E, out, in/32, 16]` holds two numbers of four bits (e2m1), the first in the low bits;
    each 32 of them are multiplied by `2^(scale − 127)`, with `_scales` uint8 `[E, out, in/32]`. The products are exact
    in bf16.
    """
    t.refuse_plain()
    blocks, scales = t.type("_blocks", U8, rank=4), t.type("_scales", U8)
    experts, rows, groups, width = blocks.shape
    if width != 16 or scales.shape != blocks.shape[:3]:
        raise t.mismatch("_blocks", f"16 bytes for each of the scales u8 {list(scales.shape)}", blocks)

    def read_codes(experts: Range, rows: Range, columns: Range) -> HostArray:
        part = t.read("_blocks", slice(*experts), slice(*rows))
        return part.reshape(*part.shape[:2], -1)[..., slice(*columns)]

    def read_scales(*box: Range) -> HostArray:
        part = t.read("_scales", *(slice(*span) for span in box))
        if part.max(initial=0) > _MAX_SCALE:
            raise WeightError(
                f"{t.where}: scales are exponents up to {_MAX_SCALE}, got {part.max()}; its numbers would be over the "
                "range of bf16"
            )
        return part

    # The scales are halved, which the factor makes up for.
    scheme = declare_scheme("mxfp4", 4, 32, "e8m0_halved", table="e2m1", factor=2.0, transposed=True)
    return QuantizedWeight(
        (experts, groups * 32, rows), scheme, {"codes": read_codes, "scales": read_scales}, dtype=BF16
    )


# Its modules are recognised by their keys, whatever the config declares: see `with_mxfp4_weights`.
MXFP4 = ModuleLayout(("_blocks",), ("_scales",), _mxfp4, weight="")


# -- the layouts -------------------------------------------------------------------------------

_INPUT = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale")
# The layouts by the method of the config.
LAYOUTS: dict[str, ModuleLayout] = {
    "fp8": ModuleLayout((".weight_scale_inv",), _INPUT, partial(_scaled, end=".weight_scale_inv")),
    "compressed-tensors": ModuleLayout(
        (".weight_packed", ".weight_scale"),
        (".weight_zero_point", ".weight_g_idx", ".weight_shape", ".weight_global_scale", ".output_zero_point", *_INPUT),
        _compressed_tensors,
    ),
    "modelopt": ModuleLayout((".weight_scale",), (".weight_scale_2", *_INPUT), _modelopt),
    "awq": ModuleLayout((".qweight",), (".qzeros", ".scales"), _awq),
    "gptq": ModuleLayout((".qweight",), (".qzeros", ".scales", ".g_idx"), _gptq),
    "bitsandbytes": ModuleLayout(
        (_STATE, ".weight.absmax", ".SCB"),
        (".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", ".weight_format"),
        _bitsandbytes,
    ),
    "mlx": ModuleLayout((".scales",), (".biases",), _mlx),
}
# Scales of caches that the attention of a quantised model has; caches are not quantised.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".prob_scale")
