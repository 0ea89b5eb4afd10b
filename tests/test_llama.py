"""Llama checkpoints: ways to compile and to load, configs that are refused, requests. Numbers: `test_families.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

LLAMA = checkpoints.FIXTURES / "llama"
PLAIN = LLAMA / "gqa_plain_attnbias_v5"
TIED = LLAMA / "mha_tied_sparse"
REFUSED = (errors.ConfigError, errors.UnsupportedError)


# -- the recorded numbers ----------------------------------------------------------------------


# -- equalities --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, sparse", [("gqa_tied_llama3_v5", False), ("gqa_plain_attnbias_v5", True)])
def test_spellings(name: str, sparse: bool, tmp_path: Path) -> None:
    """The config as transformers 4 wrote it means what the config of transformers 5 means; so does one with both."""
    old = hugging_face.old_spelling(numpy_reference.read_config(LLAMA / name), sparse=False)
    if sparse:  # what is left out must be what the default says
        for key, default in {"attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0}.items():
            if old.get(key) == default:
                old.pop(key)
        for key in ("pretraining_tp", "attention_dropout", "torch_dtype", "transformers_version", "use_cache"):
            old.pop(key)
        if old["rope_scaling"] is None:
            old.pop("rope_scaling")
    directory = checkpoints.copy(LLAMA / name, tmp_path / "old")
    (directory / "config.json").write_text(json.dumps(old), "utf-8")
    both = {"rope_theta": 1000000.0, "rope_scaling": None} if sparse else {}
    for path in (directory, checkpoints.edited(LLAMA / name, tmp_path / "both", both)):
        assert rlx.recipe_for(path).config == rlx.recipe_for(LLAMA / name).config


def test_tied_with_a_head_beside(tmp_path: Path) -> None:
    """A tied checkpoint may also store the head: another one than the embedding counts, as in transformers 5."""
    record = load_record(TIED)
    head = np.random.default_rng(0).normal(0, 0.2, (113, 40)).astype(np.float32)
    directory = checkpoints.copy(TIED, tmp_path / "other")
    checkpoints.edit_tensors(directory, lambda t: t | {"lm_head.weight": head})
    want = (record["hidden"].astype(np.float64) @ head.T).astype("f4")
    assert_close(rlx.load(str(directory)).logits(record["tokens"]), want)


# -- config: what is refused, what is inert -----------------------------------------------------

SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


BROKEN: list[tuple[str, dict[str, Any]]] = [
    # what changes the computation and is not handled
    ("dynamic", {"rope_parameters": SCALED | {"rope_type": "dynamic"}}),
    ("wobbly", {"rope_parameters": SCALED | {"rope_type": "wobbly"}}),
    ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("dynamic", {"rope_parameters": checkpoints.REMOVED, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    ("pretraining_tp", {"pretraining_tp": 2}),
    ("layer_types", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    ("attn_logit_softcapping", {"attn_logit_softcapping": 30.0}), ("logits_scaling", {"logits_scaling": 8.0}),
    ("residual_multiplier", {"residual_multiplier": 0.2}), ("embedding_multiplier", {"embedding_multiplier": 12.0}),
    ("attention_multiplier", {"attention_multiplier": 0.1}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("FooForCausalLM", {"architectures": ["FooForCausalLM"]}),
]  # fmt: skip


@pytest.mark.parametrize("field, changes", BROKEN, ids=lambda v: v if isinstance(v, str) else None)
def test_refused(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """By name, before anything is built, in every way to load."""
    directory = checkpoints.edited(PLAIN, tmp_path / "odd", changes)
    for load in (rlx.from_pretrained, rlx.load):
        with pytest.raises((*REFUSED, errors.LimitError), match=field):
            load(directory)


def test_unexpected_weights(tmp_path: Path) -> None:
    """An extra tensor is an error unless `strict=False`, then a warning."""
    extra = checkpoints.copy(PLAIN, tmp_path / "extra")
    checkpoints.edit_tensors(extra, lambda t: t | {"model.layers.0.adapter.weight": np.ones(3, np.float32)})
    with pytest.warns(errors.RlxWarning, match="adapter"):
        rlx.load(extra, strict=False)


def test_code_in_a_directory_is_never_run(tmp_path: Path) -> None:
    """`auto_map` points at Python in the directory: one warning, nothing imported."""
    directory = checkpoints.edited(PLAIN, tmp_path / "code", {"auto_map": {"AutoModel": "evil.Model"}})
    (directory / "evil.py").write_text("raise SystemExit('imported')\n", "utf-8")
    with pytest.warns(UserWarning, match="auto_map"):
        rlx.load(directory)


# -- requests ----------------------------------------------------------------------------------


# -- live --------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_live_activations(activation: str, tmp_path: Path) -> None:
    """Another activation is right or refused, never taken for silu."""
    directory = checkpoints.edited(PLAIN, tmp_path / activation, {"hidden_act": activation})
    tokens = load_record(PLAIN)["tokens"]
    try:
        lm = rlx.load(directory)
    except REFUSED:
        return
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    assert_close(lm.logits(tokens), hugging_face.llama_batch(model, tokens)[1])
