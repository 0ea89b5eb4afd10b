"""Configs that no family reads: the nearest one, and how it differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlx_jax as rlx
from rlx_jax.errors import UnsupportedError
from tests import models_page

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
ENCODER = SIZES | {
    "intermediate_size": 24,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "a decoder with another field": (
        "qwen9", "Qwen9ForCausalLM", DECODER | {"logit_bend": 0.5},
        ("nearest family is 'qwen", "reads 7 of its fields, and not 'logit_bend' (0.5)"),
    ),
    "experts": (
        "other_moe", "OtherMoeForCausalLM", DECODER | EXPERTS | {"shared": 2, "norm_topk_prob": True},
        ("nearest family is 'qwen3_moe'", "'shared' (2)"),
    ),
    "an encoder": (
        "convbirt", "ConvBirtForMaskedLM", ENCODER | {"kernel": 9, "hidden_dropout_prob": 0.1},
        ("reads 8 of its fields, and not 'kernel' (9);",),
    ),
    "no size that a family reads": (
        "odd", "OddForCausalLM", {"width": 16, "depth": 3}, ("'width' (16), 'depth' (3);",)
    ),
    "nothing but other weights": ("bort", "BortForMaskedLM", ENCODER, ("only the weights or what the layers compute",)),
    "no architecture": ("mistril", "", DECODER, ("nearest family is 'mi",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nearest_families(case: str, tmp_path: Path) -> None:
    kind, architecture, fields, parts = CASES[case]
    config = fields | {"model_type": kind, "architectures": [architecture] if architecture else []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError) as caught:
        rlx.load(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in (*parts, f"model_type '{kind}'", "docs/adding-a-family.md")), message
    assert "'hidden_dropout_prob'" not in message


def test_the_page_of_models_is_current() -> None:
    """As `python -m tests.models_page --write` has it, of the table of families and of the last census."""
    assert models_page.PAGE.read_text("utf-8") == models_page.page()
