"""Fields of `config.json` that no family reads: ignored, refused by name, or ignored because the caller says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import rlx_jax as rlx
from rlx_jax.cli import main
from rlx_jax.errors import UnsupportedError
from tests import models_page
from tests.opening import load
from tests.oracles.checkpoints import FIXTURES, edited
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

LLAMA, BERT = FIXTURES / "llama" / "gqa_tied_llama3_v5", FIXTURES / "bert" / "bare_v5"
FAMILIES = sorted({file.parent.parent: file.parent for file in FIXTURES.rglob("config.json")}.values())
CLIP = FIXTURES / "vision" / "dual" / "clip"
TOKENS = load_record(LLAMA)["tokens"]

NAMES: list[tuple[Any, str]] = [
    (0.1, "activation_dropout attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop"),
    (0.1, "dropout embd_pdrop embedding_dropout hidden_dropout hidden_dropout_prob initializer_cutoff_factor"),
    (0.1, "initializer_factor initializer_range layerdrop mlp_dropout neftune_noise_alpha resid_dropout resid_pdrop"),
    (0.1, "classifier_dropout residual_dropout router_aux_loss_coef router_jitter_noise summary_first_dropout"),
    (True, "_attn_implementation_autoset _flash_attn_2_enabled do_sample flash_attn freeze_backbone fp16 return_dict"),
    (True, "freeze_word_embeddings gradient_checkpointing output_router_logits output_past return_dict_in_generate"),
    (True, "torchscript unsloth_fixed use_cache use_flash_attention use_flash_attn use_flash_attention_2"),
    (True, "use_return_dict"),
    (False, "add_cross_attention alibi early_stopping is_decoder is_encoder_decoder output_attentions use_mrope"),
    (False, "output_hidden_states tie_encoder_decoder use_bidirectional_attention use_sliding_window"),
    (None, "a_field_that_is_not_set attn_logit_softcapping cross_attention_hidden_size problem_type pruned_heads"),
    (None, "quantization_config rope_scaling task_specific_params"),
    ("somewhere", "_commit_hash _name_or_path _attn_implementation attn_implementation base_model_name_or_path dtype"),
    ("somewhere", "directionality finetuning_task loss_type summary_type tokenizer_class tokenizer_name torch_dtype"),
    ("somewhere", "tokenizer_padding_side transformers_version unsloth_version"),
    (2, "bos_token_id cls_token_id max_length max_new_tokens max_sequence_length model_max_length num_beams"),
    (2, "num_return_sequences sep_token_id temperature top_k unk_token_id"),
]
HARMLESS: dict[str, Any] = {name: value for value, names in NAMES for name in names.split()}
HARMLESS |= {"id2label": {"0": "a"}, "label2id": {"a": 0}, "partial_rotary_factor": 1.0, "pretraining_tp": 1}
HARMLESS |= {"sentence_transformers": {"version": "5.0.0"}, "suppress_tokens": [1]}
HARMLESS |= {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}


@pytest.mark.parametrize("directory", FAMILIES, ids=lambda p: p.parent.name)
def test_harmless_fields(directory: Path, tmp_path: Path) -> None:
    """They change nothing in any family."""
    own = json.loads((directory / "config.json").read_text())
    made = edited(directory, tmp_path / "m", {k: v for k, v in HARMLESS.items() if k not in own})
    if "Flux2" not in str(own.get("_class_name")):
        assert rlx.recipe_for(made).config == rlx.recipe_for(directory).config
    else:  # the fields of diffusers are others
        with pytest.raises(UnsupportedError, match="may change the computation"):
            rlx.recipe_for(edited(directory, tmp_path / "n", {"use_guidance": 3}))


LAYERS = json.loads((LLAMA / "config.json").read_text())["num_hidden_layers"]
FULL, SLIDING = ["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS


@pytest.mark.parametrize(
    ("directory", "changes"),
    [
        (LLAMA, {"layer_types": FULL}),
        (LLAMA, {"layer_types": FULL, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}),
        (LLAMA, {"is_decoder": True}),
        (LLAMA, {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "beta": None}}),
        (BERT, {"position_embedding_type": "absolute", "tie_word_embeddings": False, "pad_token_id": 7}),
    ],
    ids=str,
)
def test_fields_that_are_harmless_at_some_values(directory: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    same = {"config": rlx.recipe_for(directory).config} if "rope_theta" not in changes else {}
    recipe = rlx.recipe_for(edited(directory, tmp_path / "m", changes))
    assert {name: getattr(recipe, name) for name in same} == same


REFUSED: list[tuple[Path, dict[str, Any], str]] = [
    (LLAMA, {"router_scale": 2.0}, "router_scale"), (LLAMA, {"layer_types": SLIDING}, "layer_types"),
    (LLAMA, {"layer_types": FULL[1:]}, "layer_types"), (LLAMA, {"layer_types": [{}] * LAYERS}, "layer_types"),
    (LLAMA, {"token_dropout": True}, "token_dropout"), (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "dtype": 1}}, "rope_parameters.dtype"),
    (BERT, {"is_decoder": True}, "is_decoder"), (CLIP, {"text_config": {"rope": 1}}, "text_config.rope"),
]  # fmt: skip


@pytest.mark.parametrize(("directory", "changes", "name"), REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_fields_that_may_change_the_computation(
    directory: Path, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """Refused by name; the message names the option that opens the checkpoint all the same."""
    if directory == CLIP:
        changes = {"text_config": json.loads((CLIP / "config.json").read_text())["text_config"] | {"rope": 1}}
    made = edited(directory, tmp_path / "m", changes)
    with pytest.raises(UnsupportedError, match=rf"field '{name.split('.')[-1]}' is .*ignore_fields=\['{name}'\]"):
        rlx.recipe_for(made)
    rlx.recipe_for(made, ignore_fields=[name])
    rlx.from_pretrained(made, ignore_fields=(name,))


def test_ignored_fields_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those without the field; every way to open reports which were ignored."""
    made = edited(LLAMA, tmp_path / "m", {"one": 1, "two": {"deep": 2}})
    lm = load(made, ignore_fields=["one", "two"])
    assert_close(lm.logits(TOKENS), load_record(LLAMA)["logits"])
    recipe = rlx.recipe_for(made, ignore_fields=["one", "two"])
    again = load(made, recipe=recipe, ignore_fields=["two", "one"])
    for model in (lm, rlx.compile(recipe), again):
        assert sorted(model.report().ignored_fields) == ["one", "two"]
        assert "ignored fields     'one', 'two'" in str(model.report())
    assert load(LLAMA).report().ignored_fields == () and "ignored" not in str(load(LLAMA).report())
    many = edited(LLAMA, tmp_path / "many", {"one": 1, "two": 2, "three": 3})
    with pytest.raises(UnsupportedError, match="'one'.*'1'.*'two'.*'three'"):
        load(many)
    assert main(["inspect", str(made), "--ignore-field", "one", "--ignore-field", "two"]) == 0
    assert main(["inspect", str(made), "--ignore-field", "one"]) == 1
    assert "ignore_fields=['two']" in capsys.readouterr().err
    dual = load(edited(CLIP, tmp_path / "clip", {"three": 3}), ignore_fields=["three"])
    assert dual.report().ignored_fields == dual.images.report().ignored_fields == ("three",)


def test_one_line_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At level debug, with the names of the fields that were passed over."""
    made = edited(LLAMA, tmp_path / "m", {"neftune_noise_alpha": 5, "model_max_length": 77, "unset": None})
    with caplog.at_level(logging.DEBUG, "rlx_jax"):
        rlx.recipe_for(made)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rlx_jax"]
    assert all(name in line for name in ("neftune_noise_alpha", "model_max_length", "unset")) and "hidden" not in line


SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = SIZES | {"intermediate_size": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
ENCODER = SIZES | {
    "intermediate_size": 24, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 32,
}  # fmt: skip
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
    "the text model of several": (
        "eyevbert", "EyeVBertForMaskedLM", {"text_config": ENCODER | {"kernel": 9}, "vision_config": {}},
        ("reads 8 of its fields, and not 'kernel' (9), 'vision_config' ({});",),
    ),
    "no architecture": ("mistril", "", DECODER, ("nearest family is 'mi",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nearest_families(case: str, tmp_path: Path) -> None:
    kind, architecture, fields, parts = CASES[case]
    config = fields | {"model_type": kind, "architectures": [architecture] if architecture else []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in (*parts, f"model_type '{kind}'", "docs/adding-a-family.md")), message
    assert "'hidden_dropout_prob'" not in message


def test_the_page_of_models_is_current() -> None:
    """As `python -m tests.models_page --write` has it, of the table of families and of the last census."""
    assert models_page.PAGE.read_text("utf-8") == models_page.page()
