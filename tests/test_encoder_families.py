"""Families of text encoders against transformers: recorded hidden states by default, live ones under the mark `oracle`.

A new family adds a config to `tests/oracles/encoder_families.py`.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import RlxError, UnsupportedError
from rlx_jax.models.bert_variants import GteConfig, RoFormerFlow
from rlx_jax.models.encoder import MASKED, SEQUENCE
from rlx_jax.weights.mapping import MappingSource
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, encoder_families, hugging_face
from tests.oracles.checkpoints import REMOVED
from tests.oracles.comparing import assert_close, assert_rows_close

ARCHIVES = (encoder_families.ARCHIVE,)


def check_rows(encoder: Any, want: np.ndarray[Any, Any], packing: str = "") -> None:
    """Rows with padding, and the same texts in one packed row, whose mean is `embed`; `packing` is in `packing`."""
    tokens, lengths = encoder_families.drawn_rows()
    assert_rows_close(encoder.hidden_states(tokens, lengths), want, lengths)
    texts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    means = np.stack([row[:n].mean(0) for row, n in zip(want, lengths, strict=True)])
    assert packing in encoder.packing and bool(packing) == bool(encoder.packing)
    assert_close(encoder.embed(texts), means)


OTHERS = ("deberta", "eurobert")  # deberta_v3 has more fields, and eurobert a head below


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in OTHERS)) for n in encoder_families.RECORDED]
)
def test_recorded_hidden_states(directories: Path, name: str) -> None:
    with np.load(directories / name / "recorded.npz") as record:
        check_rows(load(directories / name), record["hidden"])


def check_logits(directory: Path, want: list[np.ndarray[Any, Any]]) -> None:
    """The logits of padded rows; of texts that share a row, if they are classified."""
    tokens, lengths = encoder_families.drawn_rows()
    mask = (np.arange(tokens.shape[1])[None] < lengths[:, None]).astype(np.int32)
    recipe = recipe_for(directory)
    model: Any = rlx.compile(recipe)
    found = np.asarray(model(input_ids=tokens, attention_mask=mask))
    for row, n, rows in zip(found, lengths, want, strict=True):
        token = n - 1 if recipe.head.pooling == "lasttoken" else 0
        assert_close(row[:n] if rows.ndim == 2 else row[token], rows, tolerance=1e-4)
    if want[0].ndim == 1:
        classifier = load(directory)
        texts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        assert_close(classifier.logits(texts), np.stack(want))


@pytest.mark.parametrize("name", encoder_families.RECORDED_HEADS)
def test_recorded_logits(directories: Path, name: str) -> None:
    with np.load(directories / name / "recorded.npz") as record:
        check_logits(directories / name, [record[key] for key in record])


def test_old_names_of_norms(directories: Path, tmp_path: Path) -> None:
    """The first checkpoints of BERT have gamma and beta in place of weight and bias."""
    base = checkpoints.FIXTURES / "bert" / "bare_v5"
    copy = checkpoints.copy(base, tmp_path / "bert")
    names = {"Norm.weight": "Norm.gamma", "Norm.bias": "Norm.beta"}

    def rename(key: str) -> str:
        return next((key.removesuffix(end) + new for end, new in names.items() if key.endswith(end)), key)

    checkpoints.edit_tensors(copy, lambda tensors: {rename(key): value for key, value in tensors.items()})
    tokens = np.array([[5, 8, 2]])
    old, new = (load(directory) for directory in (copy, base))
    np.testing.assert_array_equal(old.hidden_states(tokens), new.hidden_states(tokens))


def test_ntk_rope() -> None:
    """The authors' scaling of GTE's rope, with the config of gte-multilingual-base."""
    config = encoder_families.SIZES | {
        "model_type": "new", "rope_theta": 20000, "rope_scaling": {"factor": 8.0, "type": "ntk"}, "pack_qkv": True,
        "logn_attention_scale": False, "layer_norm_type": "layer_norm", "position_embedding_type": "rope",
    }  # fmt: skip
    powers = np.arange(0, 6, 2) / 6
    want = (8 * 20000.0) ** -powers / 8 ** (2 / 6)
    np.testing.assert_allclose(GteConfig.from_hf(config).inv_freq, want, rtol=1e-6)
    plain = {**config, "rope_scaling": None}
    np.testing.assert_allclose(GteConfig.from_hf(plain).inv_freq, 20000.0**-powers, rtol=1e-6)


def test_positions_of_roformer() -> None:
    """A stored table must be the one that is computed, up to the rounding of its dtype."""
    config = {"model_type": "roformer", "vocab_size": 9, "hidden_size": 16, "num_attention_heads": 2}
    recipe = RoFormerFlow.for_prefill(config | {"num_hidden_layers": 1, "intermediate_size": 8})
    angles = np.arange(30)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    table, key = np.concatenate([np.sin(angles), np.cos(angles)], axis=1), "encoder.embed_positions.weight"
    for dtype in (np.float32, np.float16):
        recipe.adapt_weights(MappingSource({key: table.astype(dtype)}))
    for other in (table + [[1e-4]], np.roll(table, 1, axis=0), table[:, :6], np.sin(angles)):
        with pytest.raises(UnsupportedError, match=f"{key} is not the table"):
            recipe.adapt_weights(MappingSource({key: other.astype(np.float32)}))


@pytest.mark.oracle
@pytest.mark.parametrize("name", encoder_families.CASES)
def test_live(name: str, tmp_path: Path) -> None:
    """Every family: padded and packed rows."""
    model = encoder_families.write(name, tmp_path)
    check_rows(load(tmp_path), encoder_families.hidden_states(model), "conv" if name.endswith("conv") else "")


def few_layers(name: str) -> dict[str, int]:
    """One layer where all are alike: the convolution of DeBERTa stands behind the first one alone."""
    fields = (encoder_families.CASES | encoder_families.BASES)[name][1]
    layers = 2 if name.startswith("deberta") else 1
    return {} if {"layer_types", "num_hidden_layers"} & fields.keys() else {"num_hidden_layers": layers}


@pytest.mark.oracle
@pytest.mark.parametrize("name", encoder_families.CASES)
def test_live_heads(name: str, tmp_path: Path) -> None:
    """Every head of every family, over few layers."""
    encoder_families.write(name, tmp_path / "base", changes=few_layers(name))
    tasks = recipe_for(tmp_path / "base").task_heads()
    assert {SEQUENCE} <= {*tasks} and (MASKED in tasks) == (name != "modernbert_decoder")
    for task in tasks:
        if hasattr(transformers(), f"{encoder_families.CASES[name][0]}For{task}"):
            model = encoder_families.write(name, tmp_path / task, f"For{task}", few_layers(name))
            check_logits(tmp_path / task, encoder_families.logits(model))


def transformers() -> Any:
    return importlib.import_module("transformers")


def mutated(value: Any) -> list[Any]:
    """Plausible other values of a field, and its absence."""
    if isinstance(value, bool):
        return [not value, None, REMOVED]
    if isinstance(value, int):
        return [value + 1, 2 * value, None, REMOVED]
    if isinstance(value, float):
        return [value * 3 + 0.01, 0.0, None, REMOVED]
    if isinstance(value, str):
        return ["relu", "mean", REMOVED]
    if isinstance(value, list) and value:
        return [value[::-1], value[:1], REMOVED]
    return [None, 2, True] if value is None else [None, REMOVED]


# What names files and software, and not the model.
ORIGIN = {"architectures", "dtype", "model_type", "transformers_version"}


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*encoder_families.CASES, *encoder_families.BASES])
def test_live_mutants(name: str, tmp_path: Path) -> None:
    """Every field with another value: transformers' hidden states, or an error; or transformers refuses it as well."""
    encoder_families.write(name, tmp_path / "base", changes=few_layers(name))
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    tokens, lengths = encoder_families.drawn_rows()
    states: dict[Any, Any] = {}
    wrong, compared = [], 0
    for field in sorted(config.keys() - ORIGIN):
        for number, value in enumerate(mutated(config[field])):
            copy = checkpoints.edited(tmp_path / "base", tmp_path / f"{field}{number}", {field: value})
            try:
                recipe = recipe_for(copy)
                if recipe.config not in states:
                    states[recipe.config] = load(copy).hidden_states(tokens, lengths)
            except RlxError:  # the field, or weights that are missing or that nothing reads
                continue
            try:
                want = encoder_families.hidden_states(hugging_face.load(copy, "AutoModel"))
            except Exception:  # a value that the reference refuses, or fails on
                continue
            if not np.isfinite(want).all():  # ESM's share of mask tokens is 1 in a row
                continue
            compared += 1
            try:
                assert_rows_close(states[recipe.config], want, lengths)
            except AssertionError as error:
                wrong.append(f"{field} = {value!r}: {error}")
    assert not wrong and compared > 10, "\n".join(wrong)


SIZES: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 3,
    "local_attention": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, separate head": {**dict.fromkeys(BIASES, True), "tie_word_embeddings": False},
    "no bias of the head": {"decoder_bias": False, "hidden_activation": "silu", "classifier_activation": "relu",
                            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
                            + ["sliding_attention"]},
}  # fmt: skip


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_and_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    """The window of 4 keys is shorter than the prompts, and the cache wraps around."""
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm.weight" in name))
    model.save_pretrained(tmp_path)
    lm: Any = rlx.load(tmp_path)
    prompts = [np.random.default_rng(n).integers(3, 83, n).tolist() for n in (19, 2, 11)]
    for prompt in prompts:
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits.numpy()
        np.testing.assert_allclose(lm.logits(np.array([prompt])), expected, atol=3e-5 * abs(expected).max(), rtol=0)
    answers = lm.generate(prompts, max_new_tokens=14)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, pad_token_id=0)
        end = len(answer)
        assert list(answer) == tokens[0, len(prompt) : len(prompt) + end].tolist() and (end == 14 or answer[-1] == 2)
    with torch.no_grad():
        states = model.model(torch.tensor(prompts[:1])).last_hidden_state.numpy()
    encoder: Any = rlx.load(tmp_path, head=False)
    np.testing.assert_allclose(encoder.hidden_states(np.array(prompts[:1])), states, atol=3e-5 * abs(states).max())
