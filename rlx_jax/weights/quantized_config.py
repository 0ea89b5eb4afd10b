"""Read how a Hugging Face checkpoint is quantised: `quantization_config` of config.json, or hf_quant_config.json.

Each field is honoured, known to have no effect on the values of weights, or refused by name. Which modules are
quantised follows from the tensors of the checkpoint, so that lists of modules to leave alone are only checked for their
type. Activations and caches are not quantised, whatever a config requests of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.io.fields import MAX_INTEGER, Fields
from rlx_jax.io.folder import CONFIG, Folder

MODELOPT_CONFIG = "hf_quant_config.json"
_ADDED = "pre_quant_scale lora_rank"  # what ModelOpt may add to quantised weights
T = TypeVar("T")


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of some modules are quantised, as far as the config defines it.

    Attributes:
        bits: of a code.
        is_float: whether codes are floats.
        strategy: what shares a scale: a "tensor", a "channel" (a row), a "group" of inputs, or a "block".
        group: number of inputs that share a scale, for groups and blocks.
        rows: number of rows that share a scale, for blocks.
        symmetric: whether there are no zero points.
        zero_offset: what stored zero points lack.
        mixed_order: whether the inputs of a group need not be neighbours.
        exponents: whether scales of dtype uint8 are exponents of 2.
    """

    bits: int
    is_float: bool = False
    strategy: str = "group"
    group: int = 0
    rows: int = 1
    symmetric: bool = True
    zero_offset: int = 0
    mixed_order: bool = False
    exponents: bool = False


@dataclass(frozen=True)
class Quantization:
    """The quantisation that the files of a checkpoint declare.

    Attributes:
        method: a key of `METHODS`.
        where: the file and field, for messages.
        formats: the formats of weights; the tensors of a module select one of several.
        by_module: formats of modules that differ from the others.
    """

    method: str
    where: str
    formats: tuple[WeightFormat, ...]
    by_module: Mapping[str, WeightFormat] = field(default_factory=dict)


def quantization_of(folder: Folder) -> Quantization | None:
    """Return the quantisation of the checkpoint in a directory; None if it has none.

    Raises:
        ConfigError: a field is malformed. UnsupportedError: a field or a value is not supported.
    """
    quantization = read_quantization(folder.json(CONFIG), folder.where(CONFIG))
    if quantization is None and MODELOPT_CONFIG in folder.names():
        outer = _without_nulls(Fields(folder.json(MODELOPT_CONFIG), folder.where(MODELOPT_CONFIG)))
        inner = _group(outer, "quantization")
        _finish(outer, "producer")
        return None if inner is None else _read(inner, "modelopt")
    return quantization


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the quantisation that the content of a config.json declares; None if it declares none.

    A model that also reads images may declare it in the config of its text model.

    Raises:
        As `quantization_of`.
    """
    outer, text = Fields(config, where), config.get("text_config")
    # MLX writes the same object under both names.
    section = _group(outer, "quantization_config") or _group(outer, "quantization")
    if section is None:
        return read_quantization(text, f"{where}, text_config") if isinstance(text, Mapping) else None
    method = section.text("quant_method", "")
    if not method:
        is_bnb = any(section.values.get(name) for name in ("load_in_4bit", "load_in_8bit"))
        is_mlx = {"bits", "group_size"} <= section.values.keys()
        method = "bitsandbytes" if is_bnb else "mlx" if is_mlx else ""
    if method not in METHODS:
        raise UnsupportedError(
            f"{section.where}: field 'quant_method' is {quote(method or None)}; supported are {', '.join(METHODS)}: "
            "use the checkpoint that is not quantised"
        )
    return _read(section, method)


def _read(section: Fields, method: str) -> Quantization:
    """Return the quantisation of a method, after checking that every field was read."""
    formats, by_module = METHODS[method](section)
    return Quantization(method, section.where, formats, by_module)


# -- fields ------------------------------------------------------------------------------------


def _without_nulls(c: Fields) -> Fields:
    """Return the fields without nulls, which count as missing."""
    return replace(c, values={name: value for name, value in c.values.items() if value is not None})


def _group(c: Fields, name: str) -> Fields | None:
    """Return a nested object; None if there is none."""
    group = c.group(name)
    return None if group is None else _without_nulls(group)


def _only(c: Fields, name: str, default: T, *supported: T) -> T:
    """Return a value of the type of `default`, strings in lower case, which is one of `supported` or the default.

    Raises:
        UnsupportedError: it is not.
    """
    readers: dict[type, Callable[..., Any]] = {str: c.text, bool: c.flag, int: partial(c.integer, low=-MAX_INTEGER)}
    value = readers[type(default)](name, default)
    result: Any = value.lower() if isinstance(value, str) else value
    if result not in (default, *supported):
        choices = ", ".join(str(choice) for choice in dict.fromkeys((default, *supported)))
        raise UnsupportedError(f"{c.where}: field {quote(name)} is {quote(value)}; supported: {choices}")
    return cast(T, result)


def _size(c: Fields, name: str, default: int | None = None) -> int:
    """Return a number of values that share a scale: a positive one, or -1 for a row."""
    if (value := c.integer(name, default, low=-1)) == 0:
        raise c.invalid(name, "-1 or a positive integer", value)
    return value


def _block(c: Fields, name: str) -> list[int]:
    """Return the numbers of rows and columns of a block; an empty list without blocks."""
    if c.raw(name) is None:
        return []
    return c.items(name, [], "two positive integers", is_positive, 2)


def is_positive(size: object) -> bool:
    """Return whether a size is a positive integer."""
    return type(size) is int and 0 < size <= MAX_INTEGER


def _finish(c: Fields, harmless: str = "", off: str = "", names: str = "", **only: tuple[Any, ...]) -> None:
    """Check the fields that were not read, and refuse those that no argument lists.

    Args:
        c: the fields.
        harmless: fields that do not matter.
        off: fields that are refused unless they are off.
        names: fields with lists of modules.
        only: the supported values of a field, the default first.
    """
    for field_name, supported in only.items():
        _only(c, field_name, *supported)
    for field_name in names.split():
        c.items(field_name, [], "names", lambda module: isinstance(module, str))
    if unread := c.unread({*harmless.split()}, dict.fromkeys(off.split(), (False, 0, 0.0, "", [], {}))):
        raise UnsupportedError(
            f"{c.where}: field {quote(unread[0])} is {quote(c.values[unread[0]])}; it may change the computation and "
            "is not handled: use the checkpoint that is not quantised"
        )


# -- methods -----------------------------------------------------------------------------------

Formats = tuple[tuple[WeightFormat, ...], Mapping[str, WeightFormat]]
# How the quantisation was found, and which kernels run it.
_ORIGIN = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
desc_act disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act lm_head max_input_length meta quant_method
model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
modules_to_fuse mse pad_token_id static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama version
"""


def _fp8(section: Fields) -> Formats:
    """FP8 of DeepSeek and transformers: blocks, or one scale for a tensor."""
    scale_format, block = _only(section, "scale_fmt", "float", "ue8m0"), _block(section, "weight_block_size")
    _finish(
        section, "quant_method dequantize kv_cache_scheme",
        names="modules_to_not_convert ignored_layers modules_to_convert", fmt=("e4m3", "float8_e4m3fn"),
        activation_scheme=("dynamic", "static"), expert_dtype=("fp8",),
    )  # fmt: skip
    rows, columns = block or (1, 0)
    strategy = "block" if block else "tensor"
    return (WeightFormat(8, True, strategy, columns, rows, exponents=scale_format == "ue8m0"),), {}


def _mxfp4(section: Fields) -> Formats:
    _finish(section, "quant_method dequantize", names="modules_to_not_convert")
    return (), {}


def _awq(section: Fields) -> Formats:
    group = _size(section, "group_size", 128)
    _finish(
        section, _ORIGIN, names="modules_to_not_convert", bits=(4,), version=("gemm",), format=("gemm",),
        zero_point=(True,),
    )  # fmt: skip
    return (_grouped(WeightFormat(4, symmetric=False), group),), {}


def _gptq(section: Fields) -> Formats:
    bits, group = _only(section, "bits", 4, 8), _size(section, "group_size", 128)
    layouts = {_only(section, name, "gptq", "gptq_v2") for name in ("checkpoint_format", "format")}
    mixed_order = section.flag("desc_act", False)
    off = "dynamic is_marlin_format adapter rotation"
    _finish(section, _ORIGIN, off, names="modules_to_not_convert", pack_dtype=("int32",))
    offset = 0 if "gptq_v2" in layouts else 1
    stored = WeightFormat(bits, symmetric=False, zero_offset=offset, mixed_order=mixed_order)
    return (_grouped(stored, group),), {}


def _grouped(stored: WeightFormat, group: int) -> WeightFormat:
    """Return a format with groups of this size, where -1 is a row."""
    return replace(stored, strategy="channel") if group == -1 else replace(stored, group=group)


def _bitsandbytes(section: Fields) -> Formats:
    is_4bit, is_8bit = (
        any([section.flag(prefix + name, False) for prefix in ("", "_")]) for name in ("load_in_4bit", "load_in_8bit")
    )
    if is_4bit == is_8bit:
        raise ConfigError(f"{section.where}: expected one of 'load_in_4bit' and 'load_in_8bit' to be true")
    only = {"bnb_4bit_quant_type": ("nf4",), "bnb_4bit_quant_storage": ("uint8",)} if is_4bit else {}
    _finish(
        section,
        "quant_method bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
        "llm_int8_enable_fp32_cpu_offload llm_int8_threshold",
        "llm_int8_has_fp16_weight", "llm_int8_skip_modules", **only,
    )  # fmt: skip
    return (WeightFormat(4 if is_4bit else 8, is_float=is_4bit),), {}


def _mlx(section: Fields) -> Formats:
    """MLX: a nested object has the format of one module, false leaves a module as it is."""
    by_module = {}
    for name, value in section.values.items():
        if isinstance(value, dict) and (inner := _group(section, name)):
            by_module[name] = _mlx_format(inner)
        if isinstance(value, bool):
            section.consumed.add(name)
    return (_mlx_format(section),), by_module


def _mlx_format(section: Fields) -> WeightFormat:
    bits, group = _only(section, "bits", 4, 2, 8), _only(section, "group_size", 64, 32, 128)
    section.text("quant_method", "")
    _finish(section, mode=("affine",))
    return WeightFormat(bits, group=group, symmetric=False)


def _modelopt(section: Fields) -> Formats:
    """ModelOpt: FP8 and NVFP4, which the dtypes of the weights distinguish."""
    algorithms = ("fp8", "nvfp4", "w4a16_nvfp4", "fp8_per_channel_per_token")
    layers = section.group("quantized_layers") or Fields({}, section.where)
    for name in layers.values:
        if inner := _group(layers, name):
            _finish(inner, "has_zero_point", _ADDED, quant_algo=algorithms, group_size=(16,))
    # The groups repeat the algorithm for other programs.
    harmless = "quant_method producer config_groups kv_cache_scheme kv_cache_quant_algo has_zero_point"
    _finish(
        section, harmless, _ADDED, "ignore exclude_modules", quant_algo=(*algorithms, "mixed_precision"),
        group_size=(16,),
    )  # fmt: skip
    return (WeightFormat(8, True, "tensor"), WeightFormat(8, True, "channel"), WeightFormat(4, True, "group", 16)), {}


def _compressed_tensors(section: Fields) -> Formats:
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
    if sparsity := _group(section, "sparsity_config"):
        _only(sparsity, "format", "dense")
    groups = section.group("config_groups") or Fields({}, section.where)
    formats: dict[WeightFormat, None] = {}
    for name in groups.values:
        if (group := _group(groups, name)) and (weights := _group(group, "weights")):
            _finish(group, "input_activations output_activations", names="targets", format=layouts)
            formats[_weight_arguments(weights)] = None
    harmless = "quant_method kv_cache_scheme global_compression_ratio version dequantize run_compressed"
    _finish(
        section, harmless, "transform_config moe_sparsity_config", "ignore", format=(*layouts, "mixed-precision"),
        quantization_status=("compressed",),
    )  # fmt: skip
    return tuple(formats), {}


def _weight_arguments(section: Fields) -> WeightFormat:
    """Return the format of `weights` in a group of compressed-tensors."""
    is_float = _only(section, "type", "int", "float") == "float"
    bits = _only(section, "num_bits", 8, 4)
    strategies = ("tensor", "channel", "group", "tensor_group", "block")
    block = _block(section, "block_structure")
    group = None if section.raw("group_size") is None else section.integer("group_size", low=-MAX_INTEGER)
    inferred = "block" if block else "tensor" if group is None else "group" if group > 0 else "channel"
    strategy = _only(section, "strategy", inferred, *strategies)
    symmetric = section.flag("symmetric", True)
    mixed_order = section.values.get("actorder") in ("group", "dynamic", True)
    rows = 1
    if strategy == "block":
        rows, group = block or (1, _size(section, "block_structure"))
    if strategy in ("group", "tensor_group"):
        group = _size(section, "group_size")
        strategy = "channel" if group == -1 else strategy
    if is_float and ((bits == 4) != (strategy == "tensor_group") or (bits == 4 and group != 16) or not symmetric):
        raise UnsupportedError(
            f"{section.where}: floats of {bits} bits, strategy {quote(strategy)}, group_size {group}, symmetric "
            f"{symmetric} are not supported; FP8 by tensor, channel or block and NVFP4 are"
        )
    _finish(section, "actorder observer observer_kwargs scale_dtype zp_dtype", "dynamic")
    strategy = "group" if strategy == "tensor_group" else strategy
    return WeightFormat(bits, is_float, strategy, group or 0, rows, symmetric, mixed_order=mixed_order)


# The supported values of `quant_method`, and what reads their fields.
METHODS: Mapping[str, Callable[[Fields], Formats]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
    "bitsandbytes": _bitsandbytes, "mlx": _mlx, "mxfp4": _mxfp4,
}  # fmt: skip
