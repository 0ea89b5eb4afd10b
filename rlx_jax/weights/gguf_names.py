"""Map the tensors of a GGUF file to the checkpoint keys of Hugging Face, one table for each architecture.

Converters to GGUF rename tensors and change some: rows of the query and key projections of Llama models are reordered
for another form of rotary embedding, 1 is added to the norm weights of Gemma and Qwen 3.5, and the experts of a layer
are stacked. `KeyReading` records what of a tensor is read for a key, and how it is changed back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import ConfigError, DuplicateWeightError, quote
from rlx_jax.io import limits
from rlx_jax.io.ggml import BLOCKS
from rlx_jax.weights.gguf_header import GgufTensor

# Names of modules without their layer: GGUF → Hugging Face.
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_MIXTRAL = {
    "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1", "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}  # fmt: skip
_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj", "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}  # fmt: skip
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip

_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_QWEN35 = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj", "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}  # fmt: skip
_MAMBA2 = {
    "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_norm": "mixer.norm", "ssm_out": "mixer.out_proj",
}  # fmt: skip
_BERT = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
_NOMIC = {
    "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1", "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
}  # fmt: skip
_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip

# The layer of a tensor, and the rest of its name: `blk.3.attn_q.weight`, `output_norm.weight`.
_TENSOR = re.compile(r"(?:blk\.([0-9]+)\.)?(.+)")
# Files of 2023 have a tensor for each expert: `ffn_up.7`.
_EXPERT = re.compile(r"([a-z_]+)\.([0-9]+)")


@dataclass(frozen=True)
class Architecture:
    """How the tensors of an architecture are named and changed.

    Attributes:
        layer: the modules of a layer: GGUF → Hugging Face. `{expert}` stands for the number of an expert. A tensor
            whose full name changes has an entry of its own: `ssm_dt.bias`.
        model: the other modules.
        layers: the prefix of the keys of layers.
        has_reordered_rows: rows of `attn_q` and `attn_k` are reordered.
        has_added_norms: 1 is added to the norm weights.
    """

    layer: Mapping[str, str]
    model: Mapping[str, str] = field(default_factory=lambda: _MODEL)
    layers: str = "model.layers"
    has_reordered_rows: bool = False
    has_added_norms: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_ATTENTION | _MLP, has_reordered_rows=True),
    "mixtral": Architecture(_ATTENTION | _MIXTRAL, has_reordered_rows=True),
    "qwen2": Architecture(_ATTENTION | _MLP),
    "qwen3": Architecture(_ATTENTION | _QK_NORM | _MLP),
    "qwen3moe": Architecture(_ATTENTION | _QK_NORM | _MLP | _QWEN_MOE),
    "qwen35": Architecture(_ATTENTION | _QK_NORM | _MLP | _QWEN35, has_added_norms=True),
    "gemma": Architecture(_ATTENTION | _MLP, has_added_norms=True),
    "gemma2": Architecture(_ATTENTION | _MLP | _GEMMA_NORMS, has_added_norms=True),
    "gemma3": Architecture(_ATTENTION | _QK_NORM | _MLP | _GEMMA_NORMS, has_added_norms=True),
    "gpt-oss": Architecture(_ATTENTION | _GPT_OSS),
    "mamba2": Architecture(
        _MAMBA2,
        {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        "backbone.layers",
    ),
    "bert": Architecture(_BERT, _EMBEDDINGS, "encoder.layer"),
    "nomic-bert": Architecture(_NOMIC, _EMBEDDINGS | {"token_embd_norm": "emb_ln"}, "encoder.layers"),
}

# Tensors that are part of the configuration, not weights.
CONFIG_TENSORS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
# The modules of Qwen 3.5 whose value heads are reordered: their axis, the field of the size of a head (None: 1), and
# whether the rows of queries and keys precede them.
_VALUE_HEADS: dict[str, tuple[int, str | None, bool]] = {
    "attn_qkv": (0, "linear_value_head_dim", True), "ssm_conv1d": (0, "linear_value_head_dim", True),
    "attn_gate": (0, "linear_value_head_dim", False), "ssm_out": (1, "linear_value_head_dim", False),
    "ssm_alpha": (0, None, False), "ssm_beta": (0, None, False), "ssm_a": (0, None, False), "ssm_dt": (0, None, False),
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """The order of the rows (axis 0) or columns (axis 1) of a weight in the checkpoint, as positions in the file.

    From `start` on, the file has the rows as `[outer, first, second, inner]`, and the checkpoint as `[outer, second,
    first, inner]`.
    """

    axis: Literal[0, 1]
    start: int
    sizes: tuple[int, int, int, int]

    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the position in the file of each row or column."""
        rows = np.arange(math.prod(self.sizes)).reshape(self.sizes).swapaxes(1, 2).reshape(-1)
        return np.concatenate([np.arange(self.start), self.start + rows])

    def arrange(self, rows: np.ndarray[Any, Any]) -> None:
        """Change contiguous rows from the order of the file to that of the checkpoint, in place."""
        outer, first, second, _ = self.sizes
        for part in rows[self.start :].reshape(outer, first, second, -1):
            part.reshape(second, first, -1)[...] = part.swapaxes(0, 1).copy()


@dataclass(frozen=True)
class KeyReading:
    """What is read for one checkpoint key.

    Attributes:
        tensor: the name of the tensor in the file.
        expert: the index on its first axis; None for the whole tensor.
        order: the order of its rows or columns, counted in stored values or bytes; None for the file's.
        change: `"subtract"`: 1 is subtracted; `"log"`: the logarithm of minus the values.
        shape: the shape in the checkpoint, if it differs by axes of size 1 or by splitting an axis.
        decodes: whether a packed tensor is decoded, because its blocks do not permit the change.
    """

    tensor: str
    expert: int | None = None
    order: Order | None = None
    change: Literal["", "subtract", "log"] = ""
    shape: tuple[int, ...] | None = None
    decodes: bool = False

    def to_file(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the values of the checkpoint key as the file has them: the inverse of reading, but for `shape`."""
        if self.change:
            values = values.astype(np.float32)
            values = values + np.float32(1) if self.change == "subtract" else -np.exp(values)
        return values if self.order is None else values.take(np.argsort(self.order.positions()), self.order.axis)


def key_readings(
    architecture: str, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any], where: str
) -> dict[str, KeyReading]:
    """Return the checkpoint keys of a file's tensors, in their order. A tensor of unknown name keeps its name.

    Args:
        architecture: a name in `ARCHITECTURES`.
        tensors: the tensors of the file by name.
        config: the content of its `config.json`.
        where: the file, for messages.

    Raises:
        ConfigError: the rows or columns of a tensor are not those of the heads in the config.
        DuplicateWeightError: two tensors are the same weight. LimitError: too many experts.
    """
    table = ARCHITECTURES[architecture]
    readings: dict[str, KeyReading] = {}
    for name in (name for name in tensors if not CONFIG_TENSORS.fullmatch(name)):
        key, tensor = _key(table, name, config), tensors[name]
        if key is None:
            new = {name: KeyReading(name)}
        elif "{expert}" in key:
            count = tensor.shape[0]
            limits.check_limit(count, limits.bound("MAX_TENSORS"), f"{where}: {name}: the experts")
            new = {key.format(expert=e): KeyReading(name, e) for e in range(count)}
        else:
            new = {key: _reading(table, name, tensor, config, where)}
        if repeated := new.keys() & readings.keys():
            other = readings[min(repeated)].tensor
            raise DuplicateWeightError(f"{where}: tensors {quote(other)} and {quote(name)} are the same weight")
        readings |= new
    return readings


def tensor_names(architecture: str, num_experts: int, config: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    """Return the tensor, and the expert in it, of every checkpoint key that a model may have: the names of reading.

    Args:
        architecture: a name in `ARCHITECTURES`.
        num_experts: experts of a layer.
        config: as in `key_readings`.
    """
    table, names = ARCHITECTURES[architecture], dict[str, tuple[str, int | None]]()
    layers = (f"blk.{i}.{module}" for i in range(config["num_hidden_layers"]) for module in table.layer)
    for name in (f"{module}.{kind}" for module in (*table.model, *layers) for kind in ("weight", "bias")):
        if (key := _key(table, name, config)) is not None:
            experts = range(num_experts) if "{expert}" in key else (None,)
            names |= {key.format(expert=expert): (name, expert) for expert in experts}
    return names


def _key(table: Architecture, name: str, config: Mapping[str, Any]) -> str | None:
    """Return the checkpoint key of a tensor's name; None if the table does not have it."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    layer, tail = match.groups()
    names = table.model if layer is None else table.layer
    stem, _, kind = tail.rpartition(".")
    if tail in names:
        path = names[tail]
    elif kind not in ("weight", "bias"):
        return None
    elif stem in names:
        path = f"{names[stem]}.{kind}"
    elif (expert := _EXPERT.fullmatch(stem)) and "{expert}" in (stacked := names.get(f"{expert[1]}_exps", "")):
        path = f"{stacked.format(expert=expert[2])}.{kind}"
    else:
        return None
    if layer is None or path.startswith("mtp."):
        return path
    # The layers of a draft module follow the model's.
    first_draft = config["num_hidden_layers"] if config.get("mtp_num_hidden_layers") else math.inf
    if int(layer) < first_draft:
        return f"{table.layers}.{layer}.{path}"
    return f"mtp.layers.{int(layer) - int(first_draft)}.{path}"


def _reading(table: Architecture, name: str, tensor: GgufTensor, config: Mapping[str, Any], where: str) -> KeyReading:
    """Return how the tensor with this name is changed back to the weight of the checkpoint."""
    module = re.sub(r"^blk\.[0-9]+\.|\.(weight|bias)$", "", name)
    change: Literal["", "subtract", "log"] = "log" if module == "ssm_a" else ""
    if table.has_added_norms and module.endswith("norm") and module != "ssm_norm":
        change = "subtract"
    shape: tuple[int, ...] | None = None
    if module in ("ssm_a", "ssm_d", "ssm_norm") and len(tensor.shape) > 1:
        shape = (math.prod(tensor.shape),)
    elif module == "ssm_conv1d" and len(tensor.shape) == 2:
        shape = (tensor.shape[0], 1, tensor.shape[1])
    order = _order(table, module, tensor.shape, config, f"{where}: tensor {quote(name)}")
    decodes = tensor.scheme is not None and bool(change or shape)
    if tensor.scheme is not None and order is not None and order.axis == 1:
        # Heads that are whole blocks are reordered in the file's bytes.
        layout, (outer, first, second, inner) = BLOCKS[tensor.scheme], order.sizes
        if inner % layout.elements:
            decodes = True
        else:
            order = Order(1, order.start, (outer, first, second, inner // layout.elements * layout.bytes))
    return KeyReading(name, None, order, change, shape, decodes)


def _order(
    table: Architecture, module: str, shape: tuple[int, ...], config: Mapping[str, Any], where: str
) -> Order | None:
    """Return the order of the rows or columns of a module; None for the file's.

    Raises:
        ConfigError: the heads do not fill the rows or columns.
    """
    if table.has_reordered_rows and module in ("attn_q", "attn_k"):
        # The halves of a head are interleaved: its rows 0, 1, … of the checkpoint are its rows 0, 2, … of the file.
        heads = config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        if heads < 1 or shape[0] % (2 * heads):
            raise ConfigError(f"{where} has {shape[0]} rows, which {heads} heads of even size do not fill")
        return Order(0, 0, (heads, shape[0] // (2 * heads), 2, 1))
    heads, groups = config.get("linear_num_value_heads", 0), config.get("linear_num_key_heads", 0)
    if heads == groups or module not in _VALUE_HEADS:
        return None
    # Value heads of one key head are adjacent in the checkpoint; in the file, those of all key heads alternate.
    axis, size_field, follows_keys = _VALUE_HEADS[module]
    start = 2 * groups * config["linear_key_head_dim"] if follows_keys else 0
    size = 1 if size_field is None else config[size_field]
    if groups < 1 or heads % groups or len(shape) <= axis or start + heads * size != shape[axis]:
        raise ConfigError(
            f"{where} of shape {list(shape)} does not have {heads} value heads of size {size} for {groups} key heads"
        )
    return Order(0 if axis == 0 else 1, start, (1, heads // groups, groups, size))
