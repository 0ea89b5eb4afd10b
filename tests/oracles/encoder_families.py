"""Tiny text encoders of many families, and the hidden states that transformers computes from them.

`python -m tests.oracles.encoder_families` writes tests/fixtures/encoder_families.zip: for each of `RECORDED` a
checkpoint, and `recorded.npz` with the hidden states of `drawn_rows`. torch and transformers are imported when needed.
"""

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, hugging_face

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "encoder_families.zip"
WORDS, LENGTHS, MASK = 40, (29, 1, 17), 4

SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 18, "intermediate_size": 23, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 36, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
ENDS = {"cls_token_id": 2, "sep_token_id": 3}
RELATIVE = {"relative_attention": True}
THETAS = {"full_attention": 300.0, "sliding_attention": 50.0}
WINDOWS = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()}
V3 = RELATIVE | {
    "position_buckets": 8, "pos_att_type": "p2c|c2p", "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}  # fmt: skip

CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "modernbert": ("ModernBert", ENDS | {"local_attention": 6, "num_hidden_layers": 5}),
    "modernbert_biases": (
        "ModernBert",
        ENDS | {"local_attention": 9, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "norm_eps": 1e-2,
                "hidden_activation": "relu", "rope_parameters": WINDOWS,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "modernbert_decoder": ("ModernBertDecoder", ENDS | {"local_attention": 9, "num_hidden_layers": 5}),
    "deberta_v3": ("DebertaV2", V3),
    "deberta_v2": ("DebertaV2", RELATIVE | {"position_buckets": 6, "max_relative_positions": 12, "type_vocab_size": 2,
                                            "pos_att_type": ["c2p"]}),
    "deberta_v2_absolute": ("DebertaV2", {"pos_att_type": ["p2c"]}),
    "deberta_v2_conv": ("DebertaV2", V3 | {"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2}),
    "deberta": ("Deberta", RELATIVE | {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": 9}),
    "deberta_one_term": ("Deberta", RELATIVE | {"pos_att_type": ["p2c"], "position_biased_input": False}),
    "gte": ("Gte", {"type_vocab_size": 2}),
    "gte_scaled": ("Gte", {"type_vocab_size": 0, "rope_parameters": {"rope_type": "linear", "factor": 3.0,
                                                                     "rope_theta": 500.0}}),
    "jina_v3": ("JinaEmbeddingsV3", {}),
    "eurobert": ("EuroBert", {"mask_token_id": MASK, "num_key_value_heads": 1}),
    "eurobert_biases": ("EuroBert", {"mask_token_id": MASK, "attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "esm2": ("Esm", {"mask_token_id": MASK, "position_embedding_type": "rotary", "token_dropout": True}),
    "esm1b": ("Esm", {"mask_token_id": MASK, "emb_layer_norm_before": True}),
    "data2vec": ("Data2VecText", {"layer_norm_eps": 1e-2}),
    "roberta_prelayernorm": ("RobertaPreLayerNorm", {}),
    "xlm_roberta_xl": ("XLMRobertaXL", {"hidden_act": "relu"}),
    "megatron_bert": ("MegatronBert", {}),
    "big_bird": ("BigBird", {"rescale_embeddings": True, "use_bias": False}),
    "ibert": ("IBert", {}),
    "ernie": ("Ernie", {"use_task_id": True}),
    "rembert": ("RemBert", {"input_embedding_size": 10}),
    "roformer": ("RoFormer", {"embedding_size": 14}),
}  # fmt: skip
"""A tiny config for each family: the prefix of its class, and its fields."""

BASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("Bert", {}),
    "albert": ("Albert", {"embedding_size": 10, "num_hidden_layers": 4, "num_hidden_groups": 2}),
    "electra": ("Electra", {"embedding_size": 10}),
    "distilbert": ("DistilBert", {"hidden_dim": 23, "intermediate_size": None}),
    "mpnet": ("MPNet", {}),
    "roberta": ("Roberta", {}),
}
"""Families with oracles of their own, of which only the config is changed here."""

RECORDED = ("modernbert", "deberta_v3", "deberta", "eurobert", "esm2")
MEAN = {"classifier_pooling": "mean", "classifier_activation": "relu", "classifier_bias": True}
RECORDED_HEADS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "modernbert_mean": ("modernbert_biases", "ForSequenceClassification", MEAN),
    "eurobert_late": ("eurobert", "ForSequenceClassification", {}),
    "rembert_masked": ("rembert", "ForMaskedLM", {"output_embedding_size": 12}),
}
"""A case, its task, and fields."""


def write(name: str, directory: Path, task: str = "Model", changes: Mapping[str, Any] | None = None) -> Any:
    """Write a checkpoint of `CASES`; the model of transformers."""
    prefix, fields = (CASES | BASES)[name]
    config = SIZES | dict(fields) | dict(changes or {})
    hugging_face.write(hugging_face.Checkpoint(f"{prefix}{task}", config, seed=len(name)), directory)
    return hugging_face.load(directory, f"Auto{task}" if task == "Model" else f"AutoModel{task}")


def drawn_rows() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Three rows of tokens, with mask tokens in two of them, and their lengths."""
    tokens = np.random.default_rng(6).integers(5, WORDS, (3, max(LENGTHS))).astype(np.int32)
    tokens[0, [7, 9]] = tokens[2, 3] = MASK
    return tokens, np.array(LENGTHS, np.int32)


def hidden_states(model: Any) -> np.ndarray[Any, Any]:
    """The hidden states of `drawn_rows`, with a mask from the lengths."""
    tokens, lengths = drawn_rows()
    mask = (np.arange(tokens.shape[1])[None] < lengths[:, None]).astype(np.int32)
    return hugging_face.bert_hidden(model, tokens, attention_mask=mask)


def logits(model: Any) -> list[np.ndarray[Any, Any]]:
    """The logits of each row of `drawn_rows` alone: `[labels]`, or `[n, labels]` of each token."""
    torch = importlib.import_module("torch")
    tokens, lengths = drawn_rows()
    found = []
    with torch.no_grad():
        for row, n in zip(tokens, lengths, strict=True):
            output = model(torch.tensor(row[None, :n].astype(np.int64)))
            values = [output.start_logits, output.end_logits] if "start_logits" in output else [output.logits]
            found.append((torch.stack(values, -1) if len(values) > 1 else values[0])[0].numpy())
    return found


def main() -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as root:
        for name in RECORDED:
            record = Path(root, name, "recorded.npz")
            hidden = hidden_states(write(name, Path(root, name)))
            np.savez_compressed(record, hidden=hidden)
        for name, (case, task, fields) in RECORDED_HEADS.items():
            rows = logits(write(case, Path(root, name), task, fields))
            np.savez_compressed(Path(root, name, "recorded.npz"), *rows)
        checkpoints.write_archive(ARCHIVE, Path(root))


if __name__ == "__main__":
    main()
