"""Read how a Hugging Face checkpoint is quantised: `quantization_config` of config.json, or hf_quant_config.json.

Each field is honoured, known to have no effect on the values of weights, or refused by name. Which modules are
quantised follows from the tensors of the checkpoint, so that lists of modules to leave alone are only checked for their
type. Activations and caches are not quantised, whatever a config requests of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.io.folder import CONFIG, Folder

MODELOPT_CONFIG = "hf_quant_config.json"
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
        section = _Section(folder.json(MODELOPT_CONFIG), folder.where(MODELOPT_CONFIG))
        inner = section.section("quantization")
        section.finish("producer")
        return None if inner is None else _read(inner, "modelopt")
    return quantization


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the quantisation that the content of a config.json declares; None if it declares none.

    A model that also reads images may declare it in the config of its text model.

    Raises:
        As `quantization_of`.
    """
    outer, text = _Section(config, where), config.get("text_config")
    # MLX writes the same object under both names.
    section = outer.section("quantization_config") or outer.section("quantization")
    if section is None:
        return read_quantization(text, f"{where}, text_config") if isinstance(text, Mapping) else None
    method = section.get("quant_method", str)
    if method is None:
        is_bnb = any(section.values.get(name) for name in ("load_in_4bit", "load_in_8bit"))
        is_mlx = {"bits", "group_size"} <= section.values.keys()
        method = "bitsandbytes" if is_bnb else "mlx" if is_mlx else None
    if method is None or method not in METHODS:
        raise UnsupportedError(
            f"{section.where}: field 'quant_method' is {quote(method)}; supported are {', '.join(METHODS)}: use the "
            "checkpoint that is not quantised"
        )
    return _read(section, method)


def _read(section: _Section, method: str) -> Quantization:
    """Return the quantisation of a method, after checking that every field was read."""
    formats, by_module = METHODS[method](section)
    return Quantization(method, section.where, formats, by_module)


# -- fields ------------------------------------------------------------------------------------


@dataclass
class _Section:
    """A JSON object of which every field is read, or refused by `finish`. A null is a missing field."""

    values: Mapping[str, Any]
    where: str
    seen: set[str] = field(default_factory=set)

    def get(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """Return a value of this type.

        Raises:
            ConfigError: it has another type.
        """
        self.seen.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected {_KINDS[kind]}")
        return value

    def only(self, name: str, default: T, *supported: T) -> T:
        """Return a value of the type of `default`, which is one of `supported` or the default.

        Raises:
            UnsupportedError: it is not.
        """
        value = self.get(name, type(default), default)
        assert value is not None
        found = value.lower() if isinstance(value, str) else value
        if found != default and found not in supported:
            choices = ", ".join(str(choice) for choice in dict.fromkeys((default, *supported)))
            raise UnsupportedError(f"{self.where}: field {quote(name)} is {quote(value)}; supported: {choices}")
        return found

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of values that share a scale: a positive one, or -1 for a row."""
        value = self.get(name, int, default)
        if value is None or value == 0 or not -1 <= value <= 2**24:
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected -1 or a positive integer")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the numbers of rows and columns of a block; None without blocks."""
        value = self.get(name, list)
        if value is None:
            return None
        if len(value) != 2 or not all(type(size) is int and 0 < size <= 2**24 for size in value):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected two positive integers")
        return value[0], value[1]

    def names(self, *names: str) -> None:
        """Check lists of modules."""
        for name in names:
            value = self.get(name, list, [])
            if not all(isinstance(module, str) for module in value or ()):
                raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected a list of names")

    def section(self, name: str) -> _Section | None:
        """Return a nested object; None if there is none."""
        value = self.get(name, dict)
        return None if value is None else _Section(value, f"{self.where}, {name}")

    def refuse(self, *names: str) -> None:
        """Refuse fields that are neither missing, nor null, false or empty."""
        for name in names:
            self.seen.add(name)
            if self.values.get(name) not in (None, False, "", [], {}):
                raise UnsupportedError(f"{self.where}: field {quote(name)} is {quote(self.values[name])}; unsupported")

    def finish(self, harmless: str = "") -> None:
        """Refuse fields that were not read and are not in the list `harmless`."""
        for name, value in self.values.items():
            if name not in self.seen and name not in harmless.split() and value is not None:
                raise UnsupportedError(
                    f"{self.where}: field {quote(name)} is {quote(value)}; it may change the computation and is not "
                    "handled: use the checkpoint that is not quantised"
                )


_KINDS: dict[type, str] = {
    str: "a string", int: "an integer", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip

# -- methods -----------------------------------------------------------------------------------

Formats = tuple[tuple[WeightFormat, ...], Mapping[str, WeightFormat]]
# How the quantisation was found, and which kernels run it.
_ORIGIN = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset
desc_act disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act lm_head max_input_length meta
model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
modules_to_fuse mse pad_token_id static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama version
"""


def _fp8(section: _Section) -> Formats:
    """FP8 of DeepSeek and transformers: blocks, or one scale for a tensor."""
    section.only("fmt", "e4m3", "float8_e4m3fn")
    section.only("activation_scheme", "dynamic", "static")
    section.only("expert_dtype", "fp8")
    scale_format, block = section.only("scale_fmt", "float", "ue8m0"), section.block("weight_block_size")
    section.names("modules_to_not_convert", "ignored_layers", "modules_to_convert")
    section.finish("quant_method dequantize kv_cache_scheme")
    rows, columns = block or (1, 0)
    strategy = "tensor" if block is None else "block"
    return (WeightFormat(8, True, strategy, columns, rows, exponents=scale_format == "ue8m0"),), {}


def _mxfp4(section: _Section) -> Formats:
    section.names("modules_to_not_convert")
    section.finish("quant_method dequantize")
    return (), {}


def _awq(section: _Section) -> Formats:
    section.only("bits", 4)
    section.only("version", "gemm")
    section.only("format", "gemm")
    section.only("zero_point", True)
    section.names("modules_to_not_convert")
    group = section.size("group_size", 128)
    section.finish(f"quant_method {_ORIGIN}")
    return (_grouped(WeightFormat(4, symmetric=False), group),), {}


def _gptq(section: _Section) -> Formats:
    bits, group = section.only("bits", 4, 8), section.size("group_size", 128)
    layouts = {section.only(name, "gptq", "gptq_v2") for name in ("checkpoint_format", "format")}
    section.only("pack_dtype", "int32")
    section.refuse("dynamic", "is_marlin_format", "adapter", "rotation")
    mixed_order = section.get("desc_act", bool, False)
    section.names("modules_to_not_convert")
    section.finish(f"quant_method {_ORIGIN}")
    offset = 0 if "gptq_v2" in layouts else 1
    stored = WeightFormat(bits, symmetric=False, zero_offset=offset, mixed_order=bool(mixed_order))
    return (_grouped(stored, group),), {}


def _grouped(stored: WeightFormat, group: int) -> WeightFormat:
    """Return a format with groups of this size, where -1 is a row."""
    return replace(stored, strategy="channel") if group == -1 else replace(stored, group=group)


def _bitsandbytes(section: _Section) -> Formats:
    is_4bit, is_8bit = (
        any([section.get(prefix + name, bool) for prefix in ("", "_")]) for name in ("load_in_4bit", "load_in_8bit")
    )
    if is_4bit == is_8bit:
        raise ConfigError(f"{section.where}: expected one of 'load_in_4bit' and 'load_in_8bit' to be true")
    if is_4bit:
        section.only("bnb_4bit_quant_type", "nf4")
        section.only("bnb_4bit_quant_storage", "uint8")
    section.refuse("llm_int8_has_fp16_weight")
    section.names("llm_int8_skip_modules")
    section.finish(
        "quant_method bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant "
        "llm_int8_enable_fp32_cpu_offload llm_int8_threshold"
    )
    return (WeightFormat(4 if is_4bit else 8, is_float=is_4bit),), {}


def _mlx(section: _Section) -> Formats:
    """MLX: a nested object has the format of one module, false leaves a module as it is."""
    by_module = {}
    for name, value in section.values.items():
        if isinstance(value, dict):
            inner = _Section(value, f"{section.where}, {name}")
            by_module[name] = _mlx_format(inner)
            inner.finish()
        if isinstance(value, bool | dict):
            section.seen.add(name)
    stored = _mlx_format(section)
    section.finish()
    return (stored,), by_module


def _mlx_format(section: _Section) -> WeightFormat:
    bits, group = section.only("bits", 4, 2, 8), section.only("group_size", 64, 32, 128)
    section.only("mode", "affine")
    section.get("quant_method", str)
    return WeightFormat(bits, group=group, symmetric=False)


def _modelopt(section: _Section) -> Formats:
    """ModelOpt: FP8 and NVFP4, which the dtypes of the weights distinguish."""
    algorithms = ("fp8", "nvfp4", "w4a16_nvfp4", "fp8_per_channel_per_token", "mixed_precision")
    _check_algorithm(section, *algorithms)
    for layer in (section.get("quantized_layers", dict) or {}).values():
        if not isinstance(layer, dict):
            raise ConfigError(f"{section.where}, quantized_layers: a layer is {quote(layer)}; expected an object")
        inner = _Section(layer, f"{section.where}, quantized_layers")
        _check_algorithm(inner, *algorithms[:-1])
        inner.finish("has_zero_point")
    section.names("ignore", "exclude_modules")
    # The groups repeat the algorithm for other programs.
    section.finish("quant_method producer config_groups kv_cache_scheme kv_cache_quant_algo has_zero_point")
    return (WeightFormat(8, True, "tensor"), WeightFormat(8, True, "channel"), _NVFP4), {}


def _check_algorithm(section: _Section, *algorithms: str) -> None:
    section.only("quant_algo", *algorithms)
    section.only("group_size", 16)
    section.refuse("pre_quant_scale", "lora_rank")


_NVFP4 = WeightFormat(4, True, "group", 16)


def _compressed_tensors(section: _Section) -> Formats:
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
    section.only("format", layouts[0], *layouts[1:], "mixed-precision")
    section.only("quantization_status", "compressed")
    section.names("ignore")
    sparsity = section.section("sparsity_config")
    if sparsity is not None:
        sparsity.only("format", "dense")
    section.refuse("transform_config", "moe_sparsity_config")
    groups = section.section("config_groups")
    formats: dict[WeightFormat, None] = {}
    for name in () if groups is None else groups.values:
        group = groups.section(name) if groups is not None else None
        weights = None if group is None else group.section("weights")
        if group is not None and weights is not None:
            group.names("targets")
            group.only("format", layouts[0], *layouts[1:])
            group.finish("input_activations output_activations")
            formats[_weight_arguments(weights)] = None
    section.finish("quant_method kv_cache_scheme global_compression_ratio version dequantize run_compressed")
    return tuple(formats), {}


def _weight_arguments(section: _Section) -> WeightFormat:
    """Return the format of `weights` in a group of compressed-tensors."""
    is_float = section.only("type", "int", "float") == "float"
    bits = section.only("num_bits", 8, 4)
    strategies = ("tensor", "channel", "group", "tensor_group", "block")
    group, block = section.get("group_size", int), section.block("block_structure")
    inferred = "block" if block else "tensor" if group is None else "group" if group > 0 else "channel"
    strategy = section.only("strategy", inferred, *strategies)
    symmetric = section.get("symmetric", bool, True) is not False
    section.refuse("dynamic")
    mixed_order = section.values.get("actorder") in ("group", "dynamic", True)
    if strategy == "block":
        group, rows = (block[1], block[0]) if block else (section.size("block_structure"), 1)
    else:
        rows = 1
    if strategy in ("group", "tensor_group"):
        group = section.size("group_size")
        strategy = "channel" if group == -1 else strategy
    if is_float and ((bits == 4) != (strategy == "tensor_group") or (bits == 4 and group != 16) or not symmetric):
        raise UnsupportedError(
            f"{section.where}: floats of {bits} bits, strategy {quote(strategy)}, group_size {group}, symmetric "
            f"{symmetric} are not supported; FP8 by tensor, channel or block and NVFP4 are"
        )
    section.finish("actorder observer observer_kwargs scale_dtype zp_dtype")
    strategy = "group" if strategy == "tensor_group" else strategy
    return WeightFormat(bits, is_float, strategy, group or 0, rows, symmetric, mixed_order=mixed_order)


# The supported values of `quant_method`, and what reads their fields.
METHODS: Mapping[str, Callable[[_Section], Formats]] = {
    "fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
    "bitsandbytes": _bitsandbytes, "mlx": _mlx, "mxfp4": _mxfp4,
}  # fmt: skip
