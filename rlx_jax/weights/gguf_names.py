"""Map the tensors of a GGUF file to the checkpoint keys of Hugging Face, one table for each architecture.

Converters to GGUF rename tensors and change some: rows of the query and key projections of Llama models are reordered
for another form of rotary embedding, 1 is added to Gemma's norm weights, and the experts of a layer are stacked.
`KeyReading` records what of a tensor is read for a key, and how it is changed back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlx_jax.errors import DuplicateWeightError, quote
from rlx_jax.io import limits

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

# The layer, the name, the expert and the kind of a tensor: `blk.3.attn_q.weight`, `output_norm.weight`. Files of 2023
# have a tensor for each expert: `blk.3.ffn_up.7.weight`.
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)(?:\.(\d+))?\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """How the tensors of an architecture are named and changed.

    Attributes:
        layer: the modules of a layer: GGUF → Hugging Face. `{expert}` stands for the number of an expert.
        has_reordered_rows: rows of `attn_q` and `attn_k` are reordered.
        has_added_norms: 1 is added to the norm weights.
    """

    layer: Mapping[str, str]
    has_reordered_rows: bool = False
    has_added_norms: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_ATTENTION | _MLP, has_reordered_rows=True),
    "mixtral": Architecture(_ATTENTION | _MIXTRAL, has_reordered_rows=True),
    "qwen2": Architecture(_ATTENTION | _MLP),
    "qwen3": Architecture(_ATTENTION | _QK_NORM | _MLP),
    "qwen3moe": Architecture(_ATTENTION | _QK_NORM | _MLP | _QWEN_MOE),
    "gemma": Architecture(_ATTENTION | _MLP, has_added_norms=True),
    "gemma2": Architecture(_ATTENTION | _MLP | _GEMMA_NORMS, has_added_norms=True),
    "gemma3": Architecture(_ATTENTION | _QK_NORM | _MLP | _GEMMA_NORMS, has_added_norms=True),
}

# Tensors that are part of the configuration, not weights.
CONFIG_TENSORS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


@dataclass(frozen=True)
class KeyReading:
    """What is read for one checkpoint key.

    Attributes:
        tensor: the name of the tensor in the file.
        expert: the index on its first axis; None for the whole tensor.
        change: `"reorder"`: the rows of each of `heads` heads are reordered; `"subtract"`: 1 is subtracted.
    """

    tensor: str
    expert: int | None = None
    change: Literal["", "reorder", "subtract"] = ""
    heads: int = 1


def key_readings(
    architecture: str, shapes: Mapping[str, tuple[int, ...]], heads: int, kv_heads: int, where: str
) -> dict[str, KeyReading]:
    """Return the checkpoint keys of a file's tensors, in their order. A tensor of unknown name keeps its name.

    Args:
        architecture: a name in `ARCHITECTURES`.
        shapes: the logical shapes of the tensors by name.
        heads: number of query heads. kv_heads: number of key heads.
        where: the file, for messages.

    Raises:
        DuplicateWeightError: two tensors are the same weight. LimitError: too many experts.
    """
    table = ARCHITECTURES[architecture]
    readings: dict[str, KeyReading] = {}
    for name in (name for name in shapes if not CONFIG_TENSORS.fullmatch(name)):
        match = _TENSOR.fullmatch(name)
        key = _key(table, match) if match else None
        if match is None or key is None:
            new = {name: KeyReading(name)}
        elif "{expert}" in key:
            limits.check_limit(
                shapes[name][0], limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{where}: {name}: the experts"
            )
            new = {key.format(expert=e): KeyReading(name, e) for e in range(shapes[name][0])}
        else:
            new = {key: KeyReading(name, None, *_change(table, match[2], heads, kv_heads))}
        if repeated := new.keys() & readings.keys():
            other = readings[min(repeated)].tensor
            raise DuplicateWeightError(f"{where}: tensors {quote(other)} and {quote(name)} are the same weight")
        readings |= new
    return readings


def _key(table: Architecture, match: re.Match[str]) -> str | None:
    """Return the checkpoint key of a tensor's name; None if the table does not have it."""
    layer, module, expert, kind = match.groups()
    if expert is not None:
        stacked = table.layer.get(f"{module}_exps")
        if layer is None or stacked is None:
            return None
        return f"model.layers.{layer}.{stacked.format(expert=expert)}.{kind}"
    if layer is None:
        return f"{_MODEL[module]}.{kind}" if module in _MODEL else None
    return f"model.layers.{layer}.{table.layer[module]}.{kind}" if module in table.layer else None


def _change(
    table: Architecture, module: str, heads: int, kv_heads: int
) -> tuple[Literal["", "reorder", "subtract"], int]:
    """Return how the tensor of a module is changed, and the number of heads of its rows."""
    if table.has_reordered_rows and module in ("attn_q", "attn_k"):
        return "reorder", heads if module == "attn_q" else kv_heads
    return ("subtract" if table.has_added_norms and module.endswith("norm") else ""), 1
