"""Quantize weights when they are saved: GGML's Q8_0, and FP8 and int8 in Hugging Face directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import WeightError, quote
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.weights.format import Entry, all_finite
from rlx_jax.weights.views import HostArray

F32, F8 = np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)
FP8_BLOCK = 128  # rows and columns that share a scale
_FP8_MAX = np.float32(448)


def quantize_q8_0(values: HostArray, where: str) -> HostArray:
    """Return float32 `[..., k]` as blocks of Q8_0, uint8 `[..., k / 32 · 34]`: bit by bit those of gguf-py.

    Raises:
        WeightError: values that are not finite, or whose scale is over the range of float16, or which all become 0;
            begins with `where`.
    """
    blocks = values.reshape(-1, 32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    stored_scales = _finite(scales, np.dtype("<f2"), where)
    if scales.any() and not stored_scales.any():
        raise WeightError(f"{where}: its values are too small for Q8_0, whose scales are float16; bf16 represents them")
    with np.errstate(divide="ignore", over="ignore"):
        inverses = np.float32(1) / scales
    inverses[np.isinf(inverses)] = 0  # scales of 0, and those so small that float16 has 0 for them
    scaled = blocks * inverses
    magnitudes = np.abs(scaled)
    # Halves are rounded away from zero, as by C's roundf; NumPy rounds them to even.
    floors = np.floor(magnitudes)
    codes = np.sign(scaled) * (floors + np.floor(2 * (magnitudes - floors)))
    raw = np.concatenate([stored_scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1)
    return raw.reshape(*values.shape[:-1], -1)


def _finite(scales: HostArray, dtype: np.dtype[Any], where: str) -> HostArray:
    """Return scales in a dtype, or raise `WeightError` if one is not finite in it."""
    with np.errstate(over="ignore"):
        cast = scales.astype(dtype)
    if not all_finite(cast):
        raise WeightError(f"{where}: has values that are not finite, or too large to quantize; bf16 represents them")
    return cast


def quantize_fp8(values: HostArray, where: str) -> tuple[HostArray, HostArray]:
    """Return codes in float8 e4m3 and float32 scales of blocks of 128 × 128, as transformers computes them.

    Args:
        values: float32 `[out, in]`, both multiples of 128. where: begins the message.

    Raises:
        WeightError: values that are not finite.
    """
    rows, columns = (size // FP8_BLOCK for size in values.shape)
    blocks = values.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
    largest = _finite(np.abs(blocks).max(axis=(1, 3), keepdims=True), F32, where)
    with np.errstate(divide="ignore", over="ignore"):
        inverses = np.float32(1) / largest * _FP8_MAX  # in the order of operations of the reference
    inverses[np.isinf(inverses)] = 1  # blocks of zeros
    codes = np.clip(blocks * inverses, -_FP8_MAX, _FP8_MAX).astype(F8)
    return codes.reshape(values.shape), (np.float32(1) / inverses).reshape(rows, columns)


def quantize_int8(values: HostArray, where: str) -> tuple[HostArray, HostArray]:
    """Return codes of 8 bits and a float32 scale of each row, as compressed-tensors computes them. See above."""
    scales = _finite(np.abs(values).max(axis=1, keepdims=True), F32, where) / np.float32(127.5)
    scales[scales == 0] = np.finfo(F32).eps
    return np.clip(np.rint(values / scales), -128, 127).astype(np.int8), scales


@dataclass(frozen=True)
class Quantizer:
    """How the linear layers of a Hugging Face directory are stored.

    Attributes:
        block: the shape of a weight is a multiple of it; other weights stay as they are.
        dtype: of the codes.
        suffix: what follows the key of a weight in the key of its scales.
        quantize: returns the codes and the scales of a weight; its second argument begins messages.
        config: `quantization_config` in config.json, for the names of linear layers that are not quantized.
    """

    block: int
    dtype: np.dtype[Any]
    suffix: str
    quantize: Callable[[HostArray, str], tuple[HostArray, HostArray]]
    config: Callable[[list[str]], dict[str, Any]]

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return (shape[0], 1) if self.block == 1 else (shape[0] // self.block, shape[1] // self.block)


def _fp8_config(kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": kept,
    }  # fmt: skip


def _int8_config(kept: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    stored = {"format": "int-quantized"}  # for each group too: without it, newer versions of the package expect words
    return {
        "quant_method": "compressed-tensors", **stored, "quantization_status": "compressed", "ignore": kept,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **stored}},
    }  # fmt: skip


# By `dtype=` of `rlx_jax.save`.
QUANTIZERS = {
    "fp8": Quantizer(FP8_BLOCK, F8, "_scale_inv", quantize_fp8, _fp8_config),
    "int8": Quantizer(1, np.dtype(np.int8), "_scale", quantize_int8, _int8_config),
}
# Matrices that are no linear layers in transformers, and linear layers that are small and decide much: parts of keys.
_TABLES = re.compile(r"embed|wte|wpe|position|token_type|\bc_(attn|fc|proj)\b|conv|norm")
_KEPT = re.compile(r"\b(lm_head|gate|router|shared_expert_gate|score|classifier|pooler|visual|vision_tower)\b")


def quantized_entries(entries: Sequence[Entry], method: str) -> tuple[list[Entry], dict[str, Any]]:
    """Return entries in which each weight of a linear layer is quantized to codes and scales, and the field
    `quantization_config`.

    Args:
        entries: all weights of a checkpoint.
        method: a name in `QUANTIZERS`.

    Raises:
        WeightError: there is no weight to quantize.
    """
    quantizer, result, unquantized = QUANTIZERS[method], list[Entry](), list[str]()
    for entry in entries:
        shape = entry.type.shape
        is_linear = entry.key.endswith(".weight") and len(shape) == 2 and is_float(entry.type.dtype)
        if not is_linear or _TABLES.search(entry.key):
            result.append(entry)
        elif _KEPT.search(entry.key) or any(size % quantizer.block for size in shape):
            result.append(entry)
            unquantized.append(entry.key.removesuffix(".weight"))
        else:
            scales_type = TensorType(quantizer.scales_shape(shape), F32)
            result.append(Entry(entry.key, TensorType(shape, quantizer.dtype), partial(_part, quantizer, entry, 0)))
            result.append(Entry(entry.key + quantizer.suffix, scales_type, partial(_part, quantizer, entry, 1)))
    if len(result) == len(entries):
        raise WeightError(
            f"save: there is no weight of a linear layer to store as {method}, whose shape is a multiple of "
            f"{quantizer.block}"
        )
    return result, quantizer.config(sorted(unquantized))


def _part(quantizer: Quantizer, entry: Entry, index: int) -> HostArray:
    """Return the codes (0) or the scales (1) of a weight. Both compute it, so that none is kept in memory."""
    values = np.asarray(entry.values()).astype(F32, copy=False)
    return quantizer.quantize(values, f"weight {quote(entry.key)}")[index]
