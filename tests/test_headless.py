"""Encoders of decoders without their head, sentence-transformers over them, prompts, and heads of tasks left out.

Hidden states are those that `transformers` recorded; the live comparisons are with `sentence-transformers`.
"""

import dataclasses
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.models.families import FAMILIES
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.comparing import assert_close, assert_same_model
from tests.oracles.recorded import load_record

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
UNTIED = FIXTURES / "llama" / "mha_linear_biases_v4"
PROMPTS = {"prompts": {"query": "Find: ", "document": None}, "default_prompt_name": "query"}


def without_head(source: Path, target: Path, name_the_class: bool) -> Path:
    """A copy as transformers saves it from an `AutoModel`: bare keys, no head; or as some checkpoints have it, with the
    class that has the head in their config."""
    checkpoints.copy(source, target)
    config = json.loads((source / "config.json").read_text())
    if name_the_class:
        row: Any = FAMILIES[config["model_type"]]
        checkpoints.edit_json(target / "config.json", {"architectures": [row.architectures[1]]})
    prefixes = ("model.", "backbone.", "transformer.")

    def bare(key: str) -> str:
        return next((key.removeprefix(p) for p in prefixes if key.startswith(p)), key)

    checkpoints.edit_tensors(target, lambda t: {bare(k): v for k, v in t.items() if k != "lm_head.weight"})
    return target


def sentences(tmp_path: Path, modes: tuple[str, ...] = ("lasttoken",), **settings: Any) -> Path:
    """A sentence-transformers directory over a Llama with a tokenizer, as Qwen3-Embedding is over a Qwen3."""
    base = without_head(LLAMA, tmp_path / "base", name_the_class=False)
    made = checkpoints.sentence_directory(
        base, tmp_path / "st", modes=list(modes), normalise=True, sentence=settings.pop("sentence", PROMPTS),
        tokenizer={"pad_token": "<|end_of_text|>", "padding_side": settings.pop("side", "left")},
    )  # fmt: skip
    checkpoints.edit_json(made / "1_Pooling" / "config.json", settings)
    return made


def test_logits_are_no_hidden_states() -> None:
    """An Encoder of a flow with a head is refused, and the message says how to leave the head out."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").embed("table").linear("head")
    weights = {"table": np.ones((9, 4), np.float32), "head": np.ones((9, 4), np.float32)}
    tied = recipe_for(FIXTURES / "gpt2" / "scaled_v5")
    for one, held in ((recipe_for(UNTIED), None), (tied, None), (flow, weights), (load(LLAMA).model, None)):
        with pytest.raises(errors.GraphError, match=r"is logits \[batch, seq, \d+\].*hidden_only=True"):
            rlx.Encoder(one, held)
    square = {"table": np.eye(4, dtype=np.float32)}
    plain = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").embed("table")
    np.testing.assert_array_equal(rlx.Encoder(plain, square).embed([[1, 1]]), [[0, 1, 0, 0]])  # as wide as high


@pytest.mark.parametrize("directory", [LLAMA, pytest.param(FIXTURES / "gpt2" / "scaled_v5", marks=pytest.mark.slow)])
def test_a_decoder(directory: Path, tmp_path: Path) -> None:
    """Without its head: the recorded hidden states, packed texts as alone, and a save that loads. The others are live
    below."""
    record = load_record(directory)
    made: Any = load(without_head(directory, tmp_path / "bare", True))
    rlx.save(made, tmp_path / "saved")
    again: Any = load(tmp_path / "saved")
    np.testing.assert_array_equal(again.embed([[1, 2]]), made.embed([[1, 2]]))
    recipe = dataclasses.replace(recipe_for(directory), hidden_only=True)
    assert isinstance(made, rlx.Encoder) and isinstance(load(directory, recipe=recipe), rlx.Encoder)
    assert_close(made.hidden_states(record["tokens"]), record["hidden"])
    lengths = record["ragged_lengths"]
    texts = [row[:n].tolist() for row, n in zip(record["ragged_tokens"], lengths, strict=True)]
    encoder = rlx.Encoder(made.model, pipeline=SentencePipeline(pooling=("lasttoken",), normalize=True))
    rows = [row[:n].astype(np.float64) for row, n in zip(record["ragged_hidden"], lengths, strict=True)]
    assert_close(encoder.embed(texts), np.array([numpy_reference.pool(row, ("lasttoken",), True) for row in rows]))


def test_weights_of_a_bare_model_under_a_recipe(tmp_path: Path) -> None:
    """A causal recipe reads them too, where its head is tied; else the missing head is named."""
    bare = without_head(LLAMA, tmp_path / "tied", name_the_class=False)
    record = load_record(LLAMA)
    assert_close(load(bare).logits(record["tokens"]), record["logits"])
    recipe = dataclasses.replace(recipe_for(LLAMA), weights=None)
    model: Any = rlx.compile(recipe, rlx.open_weights(bare))
    assert_close(model(record["tokens"]), record["logits"])
    with pytest.raises(errors.MissingWeightError, match=r"'lm_head.weight'"):
        load(without_head(UNTIED, tmp_path / "untied", name_the_class=False))


@pytest.mark.slow
def test_a_pipeline_over_a_decoder(tmp_path: Path) -> None:
    """Is an Encoder that pools as its files say, over causal attention; it is saved with them."""
    directory, record = sentences(tmp_path, ("mean", "cls")), load_record(LLAMA)
    encoder: Any = load(directory)
    assert isinstance(encoder, rlx.Encoder) and encoder.packing == ""
    texts = [row[:n].tolist() for row, n in zip(record["ragged_tokens"], record["ragged_lengths"], strict=True)]
    hidden = [h[:n].astype(np.float64) for h, n in zip(record["ragged_hidden"], record["ragged_lengths"], strict=True)]
    assert_close(encoder.embed(texts), np.array([numpy_reference.pool(h, ("cls", "mean"), True) for h in hidden]))
    rlx.save(encoder, tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert_same_model(saved, encoder)
    assert saved.pipeline == encoder.pipeline
    hooked = load(directory, recipe=recipe_for(LLAMA))  # a recipe with a head loses it
    np.testing.assert_array_equal(hooked.embed(texts), encoder.embed(texts))


def test_a_pipeline_over_what_is_no_text_encoder(tmp_path: Path) -> None:
    """Is refused, not dropped."""
    directory, listed = checkpoints.copy(FIXTURES / "vision" / "vit", tmp_path / "vit"), sentences(tmp_path)
    for name in ("modules.json", "1_Pooling/config.json"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes((listed / name).read_bytes())
    with pytest.raises(errors.UnsupportedError, match=r"modules\.json.*'vision'"):
        load(directory)


TEXTS = ["It was", "rivers of stone and a lantern", ""]


def test_prompts(tmp_path: Path) -> None:
    """A prompt is what stands in front of a text: the default one without a choice, none with `prompt=""`."""
    encoder: Any = load(sentences(tmp_path))
    plain = encoder.embed(TEXTS, prompt="")
    choice: Any
    for choice, prompt in [
        ({}, "Find: "), ({"prompt_name": None, "prompt": None}, "Find: "), ({"prompt_name": "query"}, "Find: "),
        ({"prompt_name": "document"}, ""), ({"prompt": "x y"}, "x y"),
    ]:  # fmt: skip
        want = encoder.embed([prompt + text for text in TEXTS], prompt="")
        np.testing.assert_array_equal(encoder.embed(TEXTS, **choice), want)
        np.testing.assert_allclose(encoder.embed(iter(TEXTS), **choice), want, atol=1e-6)
        assert (prompt == "") == np.array_equal(want, plain)
    ids = [encoder.tokenizer.encode(text) for text in TEXTS]
    np.testing.assert_array_equal(encoder.embed(ids), plain)  # id lists get no default prompt
    for asked, choice, message in [
        (TEXTS, {"prompt_name": "qury"}, "'qury'; the model has 'query', 'document'; did you mean 'query'"),
        (TEXTS, {"prompt_name": "query", "prompt": ""}, "prompt_name and prompt both"),
        (TEXTS, {"prompt": ["x"]}, "prompt is .* expected a str"),
        (iter(ids), {"prompt_name": "query"}, "prompt_name is for strings; token ids"),
    ]:
        with pytest.raises(errors.RequestError, match=message):
            encoder.embed(asked, **choice)


def test_a_prompt_that_pooling_leaves_out(tmp_path: Path) -> None:
    """`include_prompt: false`: the transformer reads the prompt and pooling does not; one program for all prompts."""
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    pooled = tuple(mode.removesuffix("_tokens") for mode in modes)
    encoder: Any = load(sentences(tmp_path, include_prompt=False))
    encoder.pipeline = dataclasses.replace(encoder.pipeline, pooling=pooled, normalize=False)
    for prompt in ("Find: ", ""):
        got = encoder.embed(TEXTS, prompt=prompt)
        skip = len(encoder.tokenizer.encode(prompt)) if prompt else 0  # the begin token counts, there is no end token
        for text, vector in zip(TEXTS, got, strict=True):
            ids = encoder.tokenizer.encode(prompt + text)
            padded = np.array([ids + [0] * (32 - len(ids))])
            kept = np.asarray(encoder.hidden_states(padded, [len(ids)]))[0, skip : len(ids)].astype(np.float64)
            if not len(kept):
                np.testing.assert_array_equal(vector, 0)
                continue
            ramp = np.arange(skip + 1, len(ids) + 1)[:, None]  # of the whole text
            parts = [numpy_reference.pool(kept, [mode], False) for mode in modes]
            parts[4] = (kept * ramp).sum(0) / ramp.sum()
            assert_close(vector, np.concatenate(parts))
    roles = {role: token for role, token in encoder.tokenizer.special_tokens.items() if role != "bos_token"}
    tokenizer = dataclasses.replace(encoder.tokenizer, special_tokens=roles)
    reader = dataclasses.replace(encoder.reader, tokenizer=tokenizer)
    assert reader.count_prompt_tokens("Find: ") == encoder.reader.count_prompt_tokens("Find: ")
    with pytest.raises(errors.UnsupportedError, match="skips '<|begin_of_text|>' at the end of the prompt is unknown"):
        reader.count_prompt_tokens("Find: <|begin_of_text|>")


def test_prompts_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`embed --prompt-name` and `--prompt` are the arguments of `Encoder.embed`."""
    encoder: Any = load(sentences(tmp_path))
    monkeypatch.setattr(rlx, "load", lambda *given, **named: encoder)
    for words, choice in (([], {}), (["--prompt-name", "document"], {"prompt_name": "document"}),
                          (["--prompt", ""], {"prompt": ""})):  # fmt: skip
        assert cli.main(["embed", "--json", str(tmp_path), "a b", *words]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        np.testing.assert_array_equal(np.array([json.loads(line)["embedding"]], "f4"), encoder.embed(["a b"], **choice))
    assert cli.main(["embed", str(tmp_path), "a", "--prompt-name", "qury"]) == 1
    assert "did you mean 'query'" in capsys.readouterr().err


TASKS = [("bert/bf16_pretraining_v5", 0, "'cls.seq_relationship.weight'")]


@pytest.mark.parametrize(("name", "count", "key"), TASKS)
@pytest.mark.filterwarnings("ignore:.*auto_map is ignored")
def test_the_head_of_a_task_is_left_out_with_a_warning(name: str, count: int, key: str) -> None:
    """One warning names its weights; the recipe, and what has no head in its files, warn of nothing."""
    with pytest.warns(errors.RlxWarning, match=f"head of its task.*{count or ''}.*{key}"):
        load(FIXTURES / name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*head of its task")
        recipe_for(FIXTURES / name)


BARE = {name: family.architectures[1] for name, family in FAMILIES.items() if name in hugging_face.RANDOM}


@pytest.mark.oracle
@pytest.mark.parametrize("headed", [False, True])
@pytest.mark.parametrize("family", hugging_face.RANDOM)
def test_live_pipelines(family: str, headed: bool, tmp_path: Path) -> None:
    """Fresh random decoders of every family, saved with their head and without, embed as sentence-transformers has it:
    each text alone there, and among others here, with prompts, which pooling reads or not."""
    made = hugging_face.RANDOM[family](500 + headed)
    made = dataclasses.replace(
        made, config=made.config | {"vocab_size": 400}, shard=None, buffers={}, bare=False,
        architecture=made.architecture if headed else BARE[family],
    )  # fmt: skip
    base, end = tmp_path / "base", "<|end_of_text|>"
    hugging_face.write(made, base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((LLAMA / name).read_bytes())
    added = json.loads((base / "tokenizer.json").read_text())
    template = added["post_processor"]  # as Qwen3-Embedding, which pools the end token
    template["single"].append({"SpecialToken": {"id": end, "type_id": 0}})
    template["special_tokens"][end] = {"id": end, "ids": [1], "tokens": [end]}
    (base / "tokenizer.json").write_text(json.dumps(added))
    others = [("mean", "right", False), ("weightedmean", "left", False)]
    at = list(hugging_face.RANDOM).index(family)
    mode, side, includes = ("lasttoken", "left", True) if headed == at % 2 else others[at // 2 % 2]
    directory = checkpoints.sentence_directory(
        base, tmp_path / "st", modes=[mode], normalise=mode != "mean", sentence=PROMPTS,
        tokenizer={"pad_token": end, "padding_side": side, "model_max_length": 30},
    )  # fmt: skip
    checkpoints.edit_json(directory / "1_Pooling" / "config.json", {"include_prompt": includes})
    theirs = importlib.import_module("sentence_transformers").SentenceTransformer(
        str(directory), device="cpu", model_kwargs={"dtype": "float32", "attn_implementation": "eager"}
    )
    theirs[0].model.set_experts_implementation("eager")
    ours: Any = load(directory)
    texts = [*TEXTS, "a word that is much too long " * 4]
    for choice in ({}, {"prompt": ""}, {"prompt": "Another one: "}):
        alone: Any = [theirs.encode([text], show_progress_bar=False, **choice)[0] for text in texts]
        assert_close(ours.embed(texts, **choice), np.array(alone))
