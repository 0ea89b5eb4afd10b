"""Small checkpoints with quantised weights, written by the packages that define each format, and their decoded values.

`python -m tests.oracles.quantized` writes tests/fixtures/quantized.zip. It needs torch, transformers, and
compressed-tensors 0.20, autoawq 0.2.9, gptqmodel 7.7, bitsandbytes 0.50, mlx 0.32 with mlx-cpu, nvidia-modelopt 0.47.
The archive has a directory for each case of `CASES`:

- config.json and model.safetensors: a Llama or Qwen 3 of one layer with some of its projections quantised;
- edges.safetensors: one quantised weight `edge` with scales of zero, of the largest and of subnormal size, and codes of
  -0 and subnormal numbers;
- decoded.json: for each quantised weight its shape and the SHA-256 of its values in float32, as the reference decodes
  them with scales widened to float32, so that nothing is rounded to a narrower dtype. modelopt decodes a code of a
  sign alone to +0, the other packages to -0; all zeros of its NVFP4 are recorded as +0.

Sources of the decoders: `fp8`: transformers' Fp8Dequantize; `nvfp4_ct`, `ct_*`, `fp8_tensor`, `fp8_channel`:
compressed-tensors (with `weight_g_idx`, which its present version has dropped, on top of its unpacking);
`*_modelopt`: modelopt's QTensor classes; `awq`: autoawq's dequantize_gemm; `gptq_*`: gptqmodel's TorchLinear;
`bnb_*`: bitsandbytes.functional; `mlx_*`: mlx.core.dequantize.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "quantized.zip"
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 48
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
EVERY = tuple(SHAPES)
SOME = ("self_attn.v_proj", "mlp.down_proj")
FROM_HIDDEN = ("self_attn.v_proj", "mlp.up_proj")  # blocks of 64 fill the rows of these
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
    "vocab_size": VOCAB, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A format: how its package packs a weight `[out, in]`, decodes it, and names it in the config.

    Tensors of a weight are named by what follows the path of its module: `.weight`, `.weight_scale`.
    """

    pack: Callable[[torch.Tensor], Tensors]
    decode: Callable[[Tensors], torch.Tensor]
    edges: Callable[[Tensors], None]
    quantization: dict[str, Any]
    modules: tuple[str, ...] = SOME
    base: dict[str, Any] = field(default_factory=lambda: LLAMA)
    dtype: torch.dtype = torch.bfloat16
    files: dict[str, Any] = field(default_factory=dict)
    edge_inputs: int = 96


def edge_floats(name: str, *values: float) -> Callable[[Tensors], None]:
    """Write numbers over the first elements of a tensor, in its dtype."""

    def edit(tensors: Tensors) -> None:
        flat = tensors[name].reshape(-1)
        count = min(len(values), len(flat) - 1)  # one scale remains
        flat[:count] = torch.tensor(values[:count], dtype=torch.float32).to(flat.dtype)

    return edit


def edge_bytes(name: str, *codes: int) -> Callable[[Tensors], None]:
    """Write bytes over the first bytes of the last row of a tensor."""

    def edit(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[-1, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)

    return edit


def both(*edits: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def edit_all(tensors: Tensors) -> None:
        for edit in edits:
            edit(tensors)

    return edit_all


FP8_CODES = (0x80, 0x00, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE)  # ±0, subnormals, the least normal, ±448
FP4_CODES = (0x08, 0x80, 0x91, 0x7F, 0xF7)
HALF_EDGES = (0.0, 65504.0, 2.0**-24, -(2.0**-20), 2.0**-14)
F32_EDGES = (0.0, 2.0**120, 2.0**-149, -(2.0**-130), 2.0**-126)


def fp8_block(rows: int, columns: int, scale_fmt: str) -> tuple[Any, Any]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(rows, columns), scale_fmt=scale_fmt)

    def pack(weight: torch.Tensor) -> Tensors:
        clamped = SimpleNamespace(weight_block_size=(min(rows, len(weight)), min(columns, weight.shape[1])))
        clamped.scale_fmt = scale_fmt  # a block over the edge of the matrix has one scale as well
        out = Fp8Quantize(SimpleNamespace(quantization_config=clamped)).convert({"m.weight": weight})
        return {key.removeprefix("m"): value for key, value in out.items()}

    def decode(t: Tensors) -> torch.Tensor:
        op = Fp8Dequantize(SimpleNamespace(quantization_config=config))
        return op._dequantize_one(t[".weight"], t[".weight_scale_inv"], torch.float32)

    return pack, decode


def compressed(layout: str, **arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the functions and the config of a format of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(weight: torch.Tensor) -> Tensors:
        rows, columns = weight.shape
        if args.strategy == "block":
            height, width = args.block_structure
            blocks = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
            blocks = blocks.reshape(-(-rows // height), height, -(-columns // width), width)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        else:
            width = {"tensor": 0, "channel": columns}.get(args.strategy, args.group_size)
            groups = weight.reshape(1, -1) if not width else weight.reshape(rows, -1, width)
            low, high = groups.amin(-1), groups.amax(-1)
            low, high = (x.reshape(1) if not width else x for x in (low, high))
        scheme_scale: dict[str, Any] = {}
        if layout == "nvfp4-pack-quantized":
            scheme_scale["global_scale"] = (6 * 448 / weight.abs().max()).reshape(1)
        scale, zero = calculate_qparams(low, high, args, **scheme_scale)
        state = {"weight": weight, "weight_scale": scale.to(torch.float32)}
        state |= {"weight_zero_point": zero} if not args.symmetric else {}
        state |= {"weight_global_scale": scheme_scale["global_scale"]} if scheme_scale else {}
        if not scheme_scale:
            state["weight_scale"] = scale.to(torch.bfloat16)
        return {f".{key}": value.contiguous() for key, value in compressor.compress(state, scheme).items()}

    def decode(t: Tensors) -> torch.Tensor:
        if ".weight_global_scale" in t:
            packed = t[".weight_packed"]
            codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)
            scale, outer = t[".weight_scale"].float(), t[".weight_global_scale"]
            return dequantize(codes, scale, args=args, global_scale=outer, dtype=torch.float32)
        state = {key[1:]: value for key, value in t.items()}
        state["weight_scale"] = state["weight_scale"].float()
        if "weight_g_idx" in state:
            from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

            shape, scale = state["weight_shape"], state["weight_scale"]
            codes = unpack_from_int32(state["weight_packed"], args.num_bits, shape).float()
            zeros = unpack_from_int32(state["weight_zero_point"], args.num_bits, (shape[0], scale.shape[1]), 0).float()
            groups = state["weight_g_idx"].long()
            return (codes - zeros[:, groups]) * scale[:, groups]
        return compressor.decompress(state, scheme)["weight"].float()

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed", ignore=["lm_head"]
    )
    return pack, decode, json.loads(config.model_dump_json())


def with_g_idx(pack: Callable[[torch.Tensor], Tensors], group: int) -> Callable[[torch.Tensor], Tensors]:
    """Give each input its group, in mixed order, and the order of the inputs of the codes accordingly."""

    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    def packed(weight: torch.Tensor) -> Tensors:
        columns = weight.shape[1]
        order = torch.from_numpy(np.random.default_rng(columns).permutation(columns))
        tensors = pack(weight[:, order])
        codes = torch.empty(weight.shape, dtype=torch.int8)
        codes[:, order] = unpack_from_int32(tensors[".weight_packed"], 4, weight.shape)
        tensors[".weight_packed"] = pack_to_int32(codes, 4)
        groups = torch.empty(columns, dtype=torch.int32)
        groups[order] = (torch.arange(columns) // group).to(torch.int32)
        return tensors | {".weight_g_idx": groups}

    return packed


def modelopt_nvfp4() -> tuple[Any, Any]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def pack(weight: torch.Tensor) -> Tensors:
        tensor, scale, outer = NVFP4QTensor.quantize(weight.clone(), 16)
        outer = outer.reshape(())
        return {".weight": tensor._quantized_data, ".weight_scale": scale, ".weight_scale_2": outer,
                ".input_scale": torch.tensor(0.25)}  # fmt: skip

    def decode(t: Tensors) -> torch.Tensor:
        rows, columns = t[".weight"].shape
        tensor = NVFP4QTensor(torch.Size((rows, columns * 2)), torch.float32, t[".weight"])
        scales = {"scale": t[".weight_scale"], "double_scale": t[".weight_scale_2"]}
        return tensor.dequantize(torch.float32, **scales, block_sizes={-1: 16}) + 0.0

    return pack, decode


def modelopt_fp8() -> tuple[Any, Any]:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    def pack(weight: torch.Tensor) -> Tensors:
        tensor, scale = FP8QTensor.quantize(weight)
        return {".weight": tensor._quantized_data, ".weight_scale": scale.reshape(()), ".input_scale": scale * 2}

    def decode(t: Tensors) -> torch.Tensor:
        tensor = FP8QTensor(t[".weight"].shape, torch.float32, t[".weight"])
        return tensor.dequantize(torch.float32, scale=t[".weight_scale"])

    return pack, decode


def asymmetric(weight: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales in float16 and zero points, `[out, in / group]`."""
    groups, top = weight.reshape(len(weight), -1, group), 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        return (2 * high / top).half().float(), torch.full_like(high, (top + 1) / 2)
    scale = ((high - low) / top).half().float()
    return scale, torch.round(-low / scale).clamp(1, top)


def awq(group: int) -> tuple[Any, Any]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def pack(weight: torch.Tensor) -> Tensors:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        scale, zero = asymmetric(weight, group, 4, symmetric=False)
        linear.weight.data = torch.maximum(torch.minimum(weight, ((15 - zero) * scale).repeat_interleave(group, 1)),
                                           (-zero * scale).repeat_interleave(group, 1))  # fmt: skip
        module = WQLinear_GEMM.from_linear(linear, 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        return {f".{name}": getattr(module, name).contiguous() for name in ("qweight", "qzeros", "scales")}

    def decode(t: Tensors) -> torch.Tensor:
        return dequantize_gemm(t[".qweight"], t[".qzeros"], t[".scales"].float(), 4, group).T

    return pack, decode


def gptq(bits: int, group: int, *, version: int, desc_act: bool, symmetric: bool) -> tuple[Any, Any]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    def module(shape: tuple[int, int]) -> Any:
        return TorchLinear(
            bits=bits, group_size=group, sym=symmetric, desc_act=desc_act, in_features=shape[1], out_features=shape[0]
        )

    def pack(weight: torch.Tensor) -> Tensors:
        columns = weight.shape[1]
        order = np.random.default_rng(columns).permutation(columns) if desc_act else np.arange(columns)
        groups = torch.empty(columns, dtype=torch.int32)
        groups[torch.from_numpy(order)] = (torch.arange(columns) // group).to(torch.int32)
        scale, zero = asymmetric(weight[:, torch.from_numpy(order)], group, bits, symmetric)
        linear = torch.nn.Linear(columns, len(weight), bias=False)
        linear.weight.data = weight
        layer = module(weight.shape)
        layer.pack_original(linear, scale, zero, groups)
        if version == 1:
            convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        return {f".{name}": getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}

    def decode(t: Tensors) -> torch.Tensor:
        layer = module((t[".scales"].shape[1], t[".g_idx"].shape[0]))
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            layer.register_buffer(name, t[f".{name}"].clone())
        if version == 1:
            convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.scales = layer.scales.float()
        layer.post_init()
        return layer.dequantize_weight().T

    return pack, decode


def bnb_4bit(nested: bool) -> tuple[Any, Any]:
    from bitsandbytes import functional

    def pack(weight: torch.Tensor) -> Tensors:
        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
        state.dtype = torch.bfloat16
        return {".weight": codes} | {f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}

    def decode(t: Tensors) -> torch.Tensor:
        state = {key.removeprefix(".weight."): value for key, value in t.items() if key != ".weight"}
        found = functional.QuantState.from_dict(state, torch.device("cpu"))
        found.dtype = torch.float32
        return functional.dequantize_4bit(t[".weight"], found)

    return pack, decode


def bnb_int8() -> tuple[Any, Any]:
    from bitsandbytes import functional

    def pack(weight: torch.Tensor) -> Tensors:
        codes, stats, _ = functional.int8_vectorwise_quant(weight.half())
        return {".weight": codes, ".SCB": stats, ".weight_format": torch.tensor(0, dtype=torch.uint8)}

    return pack, lambda t: functional.int8_vectorwise_dequant(t[".weight"], t[".SCB"])


def mlx(bits: int, group: int, dtype: torch.dtype) -> tuple[Any, Any]:
    import mlx.core as mx

    names = ("weight", "scales", "biases")
    kind = {torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}[dtype]

    def pack(weight: torch.Tensor) -> Tensors:
        arrays = mx.quantize(mx.array(weight.numpy()).astype(kind), group_size=group, bits=bits)
        floats = [torch.from_numpy(np.array(array.astype(mx.float32))).to(dtype) for array in arrays[1:]]
        return dict(zip((f".{name}" for name in names), (torch.from_numpy(np.array(arrays[0])), *floats), strict=True))

    def decode(t: Tensors) -> torch.Tensor:
        codes, *floats = (t[f".{name}"] for name in names)
        scales, biases = (mx.array(x.float().numpy()) for x in floats)
        value = mx.dequantize(mx.array(codes.numpy()), scales, biases, group_size=group, bits=bits)
        return torch.from_numpy(np.array(value))

    return pack, decode


def hf_fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | more


def cases() -> dict[str, Case]:
    """The formats by name. Imports of their packages are heavy, so they are made here."""
    fp8_codes, ct = edge_bytes(".weight", *FP8_CODES), compressed
    scale_inv = edge_floats(".weight_scale_inv", 0.0, 2.0**100, 2.0**-149, 2.0**-126)
    w4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    out = {
        "fp8_block": Case(
            *fp8_block(32, 16, "float"), both(fp8_codes, scale_inv), hf_fp8(weight_block_size=[32, 16])),
        "fp8_ue8m0": Case(
            *fp8_block(128, 128, "ue8m0"), fp8_codes,
            hf_fp8(weight_block_size=[128, 128], scale_fmt="ue8m0",
                   modules_to_not_convert=["lm_head", "mlp.gate_proj", "model.layers.0.mlp.up_proj"]), base=QWEN3),
        "awq": Case(
            *awq(32), edge_floats(".scales", *HALF_EDGES),
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
             "modules_to_not_convert": None}, EVERY, dtype=torch.float16),
        "nvfp4_modelopt": Case(
            *modelopt_nvfp4(), both(edge_bytes(".weight", *FP4_CODES), edge_bytes(".weight_scale", 0x80, 0, 1, 0x7E)),
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
             "producer": {"name": "modelopt", "version": "0.47.0"},
             "config_groups": {"group_0": {
                 "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                 "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                 "targets": ["Linear"]}}}, base=QWEN3),
        "fp8_modelopt": Case(
            *modelopt_fp8(), fp8_codes, {}, files={"hf_quant_config.json": {
                "producer": {"name": "modelopt", "version": "0.47.0"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}}),
        "bnb_nf4": Case(
            *bnb_4bit(False), edge_floats(".weight.absmax", *F32_EDGES), bnb(load_in_4bit=True), FROM_HIDDEN,
            edge_inputs=128),
        "bnb_nf4_nested": Case(
            *bnb_4bit(True), edge_floats(".weight.nested_absmax", 0.0),
            bnb(load_in_4bit=True, bnb_4bit_use_double_quant=True), FROM_HIDDEN, QWEN3, edge_inputs=128),
        "bnb_int8": Case(*bnb_int8(), edge_floats(".SCB", *F32_EDGES), bnb(load_in_8bit=True), dtype=torch.float16),
        "mlx_4bit": Case(
            *mlx(4, 32, torch.float16), both(edge_floats(".scales", *HALF_EDGES), edge_floats(".biases", 1.0, -0.0)),
            {"group_size": 32, "bits": 4, "mode": "affine"}, dtype=torch.float16),
        "mlx_8bit": Case(
            *mlx(8, 32, torch.bfloat16), edge_floats(".scales", 0.0, 2.0**100, 2.0**-133),
            {"group_size": 32, "bits": 8}, base=QWEN3),
    }  # fmt: skip
    for name, layout, arguments, modules in (
        ("ct_int4", "pack-quantized", w4 | {"symmetric": True}, SOME),
        ("ct_int4_g_idx", "pack-quantized", w4 | {"symmetric": False}, SOME),
        ("ct_int8_packed", "pack-quantized", w4 | {"num_bits": 8, "strategy": "channel", "group_size": None}, SOME),
        ("ct_int8", "int-quantized", w4 | {"num_bits": 8, "strategy": "channel", "group_size": None}, SOME),
        ("fp8_tensor", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, SOME),
        ("fp8_channel", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, SOME),
        ("fp8_block_ct", "float-quantized",
         {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [40, 48]}, SOME),
        ("nvfp4_ct", "nvfp4-pack-quantized",
         {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, EVERY),
    ):  # fmt: skip
        pack, decode, config = ct(layout, **arguments)
        edges = edge_floats(".weight_scale", 0.0, 2.0**100, 2.0**-133, -(2.0**-126))
        if arguments["type"] == "float":
            edges = both(fp8_codes, edges) if layout != "nvfp4-pack-quantized" else both(
                edge_bytes(".weight_packed", *FP4_CODES), edge_bytes(".weight_scale", 0x80, 0, 1, 0x7E))  # fmt: skip
        pack = with_g_idx(pack, 32) if name == "ct_int4_g_idx" else pack
        out[name] = Case(pack, decode, edges, config, modules)
    gptq_cases: tuple[tuple[str, int, dict[str, Any], tuple[str, ...]], ...] = (
        ("gptq_v1", 4, {"version": 1, "desc_act": False, "symmetric": True}, EVERY),
        ("gptq_v2_desc_act", 4, {"version": 2, "desc_act": True, "symmetric": False}, SOME),
        ("gptq_8bit", 8, {"version": 1, "desc_act": True, "symmetric": False}, SOME),
    )
    for name, bits, options, modules in gptq_cases:
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": options["desc_act"],
                  "sym": options["symmetric"], "lm_head": False, "static_groups": False, "true_sequential": True,
                  "checkpoint_format": "gptq" if options["version"] == 1 else "gptq_v2", "damp_percent": 0.01,
                  "meta": {"quantizer": ["gptqmodel:7.7.0"]}}  # fmt: skip
        out[name] = Case(*gptq(bits, 32, **options), edge_floats(".scales", *HALF_EDGES), config, modules,
                         dtype=torch.float16)  # fmt: skip
    return dict(sorted(out.items()))


def bnb(**changes: Any) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16", **changes).to_dict()


def plain(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Random numbers that repeat, so that they take little room in the archive."""
    block = rng.integers(-4, 5, [min(size, 16) for size in shape])
    repeats = [-(-size // 16) for size in shape]
    return torch.from_numpy((np.tile(block, repeats) / 16).astype(np.float32))


def digest(value: torch.Tensor) -> dict[str, Any]:
    data = value.contiguous().numpy()
    assert data.dtype == np.float32 and np.isfinite(data).all()
    return {"shape": list(data.shape), "sha256": hashlib.sha256(data.tobytes()).hexdigest()}


def write_case(archive: zipfile.ZipFile, name: str, case: Case) -> None:
    """Write the directory of a case."""
    rng = np.random.default_rng(len(name))
    tensors = {"model.embed_tokens.weight": plain(rng, VOCAB, HIDDEN), "lm_head.weight": plain(rng, VOCAB, HIDDEN),
               "model.norm.weight": plain(rng, HIDDEN) + 1}  # fmt: skip
    decoded, layer = {}, "model.layers.0."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{norm}.weight"] = plain(rng, HIDDEN) + 1
    if case.base is QWEN3:
        for norm in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{norm}.weight"] = plain(rng, HEAD_DIM) + 1
    tensors = {key: value.to(case.dtype) for key, value in tensors.items()}
    for module, shape in SHAPES.items():
        if module not in case.modules:
            tensors[f"{layer}{module}.weight"] = plain(rng, *shape).to(case.dtype)
            continue
        weight = torch.from_numpy(rng.standard_normal(shape).astype(np.float32) / 8)
        packed = case.pack(weight)
        assert (case.decode(dict(packed)) - weight).abs().max() < 0.2, f"{name}: {module} is far from its original"
        tensors |= {layer + module + key: value.contiguous() for key, value in packed.items()}
        decoded[f"{layer}{module}.weight"] = digest(case.decode(dict(packed)))
    edge = case.pack(torch.from_numpy(rng.standard_normal((32, case.edge_inputs)).astype(np.float32)))
    case.edges(edge)
    decoded["edge.weight"] = digest(case.decode(dict(edge)))
    config = case.base | {"torch_dtype": str(case.dtype).removeprefix("torch.")}
    config |= {"quantization_config": case.quantization} if case.quantization else {}
    edges = {"edge" + key: value.contiguous() for key, value in edge.items()}
    content = {"model.safetensors": safetensors.torch.save(tensors, {"format": "pt"}),
               "edges.safetensors": safetensors.torch.save(edges, {"format": "pt"})}  # fmt: skip
    texts = {"config.json": config, "decoded.json": decoded} | case.files
    content |= {file: json.dumps(value, indent=1).encode() for file, value in texts.items()}
    for file, value in content.items():
        archive.writestr(zipfile.ZipInfo(f"{name}/{file}"), value, zipfile.ZIP_LZMA)


def main() -> None:
    torch.manual_seed(0)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, case in cases().items():
            before = buffer.tell()
            write_case(archive, name, case)
            print(f"{buffer.tell() - before:8} {name}")
    ARCHIVE.write_bytes(buffer.getvalue())
    print(f"{ARCHIVE.stat().st_size:8} {ARCHIVE}")


if __name__ == "__main__":
    main()
