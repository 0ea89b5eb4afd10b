"""LoRA: PEFT's files load, merge and are written; new adapters change nothing, and train alone."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.models.lora_files import INERT, NEUTRAL, open_adapter
from tests.opening import recipe_for
from tests.oracles import adapters, checkpoints, classifiers, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

TOKENS = load_record(adapters.BASE)["tokens"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
STORED = load_file(adapters.ADAPTER / WEIGHTS)


@pytest.fixture(scope="module")
def adapted() -> rlx.CompiledModel:
    """The base model with the recorded adapter."""
    return rlx.compile(rlx.lora(recipe_for(adapters.BASE), adapter=adapters.ADAPTER))


def scale_of(module: str) -> float:
    """alpha / r, as MIXED says."""
    alpha = 2.5 if module.endswith("v_proj") else 7
    return alpha / (5 if module == "model.layers.1.mlp.down_proj" else 3)


def test_an_adapter_of_peft_loads(adapted: rlx.CompiledModel) -> None:
    """The logits of PEFT, with ranks and alphas of their own by module; the rank of layer 1 keeps it plain."""
    assert_close(adapted(TOKENS), load_record(adapters.ADAPTER)["logits"])
    assert ["layer 1" in refusal for refusal in adapted.report().refusals] == [True]


def test_load_with_an_adapter(tmp_path: Path) -> None:
    """The logits of PEFT from `load`, also on top of a recipe; a save would lose the adapter, and is refused."""
    want = load_record(adapters.ADAPTER)["logits"]
    lm = rlx.load(adapters.BASE, adapter=adapters.ADAPTER, recipe=recipe_for(adapters.BASE).after_layers([]))
    assert_close(rlx.load(adapters.BASE, adapter=adapters.ADAPTER).logits(TOKENS), want)
    first, state = lm.prefill(TOKENS[:, :4])
    assert_close(first, want[:, :4])
    assert_close(lm.extend(state, TOKENS[:, 4:])[0], want[:, 4:])
    with pytest.raises(errors.UnsupportedError, match=r"loaded with an adapter \(rlx_jax.merge_lora"):
        rlx.save(lm, tmp_path / "whole")


def test_merged_and_unmerged(adapted: rlx.CompiledModel) -> None:
    """W + s B A in float64, under the keys of the base model; and back."""
    base, merged = numpy_reference.read_weights(adapters.BASE), rlx.merge_lora(adapted)
    assert set(merged) == set(base)
    for key, value in base.items():
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in STORED:
            a, b = (STORED[f"{stem}.lora_{part}.weight"].astype("f8") for part in "AB")
            value = value + scale_of(key.removesuffix(".weight")) * b @ a
        assert_close(merged[key], value, tolerance=1e-6)
    again, own = rlx.unmerge_lora(adapted, merged), adapted.weights()
    assert set(again) == set(own)
    for key, weight in own.items():
        assert_close(again[key], np.asarray(weight), tolerance=1e-6)


def test_written_as_peft_writes(adapted: rlx.CompiledModel, tmp_path: Path) -> None:
    """The same tensors, bit by bit, and a config that says the same of every module."""
    rlx.save_lora(adapted, tmp_path / "mine")
    written = load_file(tmp_path / "mine" / WEIGHTS)
    assert set(written) == set(STORED)
    for key, value in STORED.items():
        np.testing.assert_array_equal(written[key], value)
    again = rlx.lora(recipe_for(adapters.BASE), adapter=tmp_path / "mine").assemble()
    ours = {edit.wrapper for edit in again._block_edits}
    assert ours == {edit.wrapper for edit in adapted.flow._block_edits}  # type: ignore[attr-defined]
    with pytest.raises(errors.TargetExistsError, match="mine"):
        rlx.save_lora(adapted, tmp_path / "mine")
    about = json.loads((tmp_path / "mine" / CONFIG).read_text())
    assert (about["base_model_name_or_path"], about["task_type"]) == (os.fspath(adapters.BASE), "CAUSAL_LM")
    commit = "0123456789abcdef" * 2 + "01234567"
    directory = checkpoints.copy(adapters.BASE, tmp_path / f"models--org--some--m/snapshots/{commit}")
    cached = rlx.compile(rlx.lora(recipe_for(directory), adapter=adapters.ADAPTER))
    for options, said in (({}, ("org/some--m", commit)), ({"base_model": "org/other"}, ("org/other", None))):
        rlx.save_lora(cached, tmp_path / "mine", overwrite=True, **options)
        about = json.loads((tmp_path / "mine" / CONFIG).read_text())
        assert (about["base_model_name_or_path"], about["revision"]) == said


def test_written_where_an_adapter_is(adapted: rlx.CompiledModel, tmp_path: Path) -> None:
    """Folders around it are made; `overwrite` replaces an adapter, and nothing beside one."""
    place, params = tmp_path / "runs" / "one" / "mine", dict(adapted.params or {})
    rlx.save_lora(adapted, place)
    name = next(name for name in params if "lora_B" in name)
    rlx.save_lora(adapted.replace(params=params | {name: params[name] * 2}), place, overwrite=True)
    changed = [key for key, value in load_file(place / WEIGHTS).items() if not np.array_equal(value, STORED[key])]
    assert len(changed) == 1 and "lora_B" in changed[0] and os.listdir(place.parent) == ["mine"]
    (place / "notes").write_text("mine")
    with pytest.raises(errors.TargetExistsError, match="holds 'notes' too"):
        rlx.save_lora(adapted, place, overwrite=True)
    with pytest.raises(errors.TargetExistsError, match=f"has no {CONFIG}"):
        rlx.save_lora(adapted, place.parent, overwrite=True)
    assert (place / "notes").read_text() == "mine"


@pytest.fixture(scope="module")
def fresh() -> rlx.CompiledModel:
    """New adapters of all four projections."""
    recipe = rlx.lora(recipe_for(adapters.BASE), "layers.*.self_attn.*_proj", rank=4, alpha=8)
    return rlx.compile(recipe, missing="init", key=0, program="train")


def test_a_new_adapter_is_drawn_as_peft_draws_it(fresh: rlx.CompiledModel) -> None:
    """A uniform within ±1/√in, B zeros; named in the report, beside weights that are the checkpoint's. Layers roll."""
    weights, base = fresh.weights(), numpy_reference.read_weights(adapters.BASE)
    new = set(weights) - set(base)
    assert set(fresh.report().initialised) == new and len(new) == 3 * 4 * 2
    for key in new:
        values = np.asarray(weights[key])
        if "lora_B" in key:
            assert not values.any()
            continue
        bound = values.shape[1] ** -0.5
        assert 0.9 * bound < np.abs(values).max() <= bound and abs(values.mean()) < bound / 4
        assert values.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    for key, value in base.items():
        np.testing.assert_array_equal(np.asarray(weights[key]), value.astype("f4"))
    assert fresh.report().refusals == ()
    assert "model.layers.{0..2}.self_attn.q_proj.lora_A.weight" in fresh.params  # type: ignore[operator]


def test_an_adapter_over_a_changed_input() -> None:
    """A and B read what W reads, whichever of both came first: merged it is the same model."""
    by = np.arange(33.0, dtype="f4") / 9

    def edit(recipe: Any) -> Any:
        recipe = recipe.at("layers.*.mlp.down_proj").scale(by, of="input")
        return recipe.at("layers.1.mlp.down_proj").wrap(lambda emit, x, inner: inner(x * 2.0))

    def shifted(made: Any) -> rlx.CompiledModel:
        model = rlx.compile(made, missing="init", key=0)
        return model.replace({key: a + 0.2 if "lora" in key else a for key, a in (model.params or {}).items()})

    recipe = edit(recipe_for(adapters.BASE))
    model = shifted(rlx.lora(recipe, "layers.*.mlp.down_proj", rank=2))
    before = shifted(edit(rlx.lora(recipe_for(adapters.BASE), "layers.*.mlp.down_proj", rank=2)))
    want = np.asarray(model(TOKENS))
    np.testing.assert_allclose(np.asarray(before(TOKENS)), want, atol=3e-5)
    np.testing.assert_allclose(np.asarray(rlx.compile(recipe, rlx.merge_lora(model))(TOKENS)), want, atol=3e-5)


def test_a_mask_of_adapters(fresh: rlx.CompiledModel) -> None:
    """A base weight is trained or not as a whole leaf."""
    mask = rlx.train.mask(fresh, "**.lora_{A,B}.weight")
    assert {name for name, trained in mask.items() if trained} == {name for name in mask if "lora_" in name}
    for pattern, message in (("**.lora_C.weight", "matches no weight"), ("model.layers.1.**", "is trained as a whole")):
        with pytest.raises(errors.RequestError, match=message):
            rlx.train.mask(fresh, pattern)


GPT2 = checkpoints.FIXTURES / "gpt2" / "bare_v4"


def merged_projections() -> Any:
    """GPT-2 with an adapter of its queries, keys and values, which are one weight `[in, out]`."""
    return rlx.lora(recipe_for(GPT2), "layers.*.attn.c_attn", rank=2, alpha=3)


def test_an_adapter_of_merged_projections(tmp_path: Path) -> None:
    """One A for the three, and the rows of B that each has: the model is that of W + s (B A)ᵀ by hand; saved under the
    names that PEFT has for a model with a head; and the weights that hold the adapter count before its files."""
    rng, base = np.random.default_rng(1), numpy_reference.read_weights(GPT2)
    pairs, width, changed = dict[str, Any](), base["h.0.attn.c_attn.weight"].shape[0], dict(base)
    for key in [key for key in base if key.endswith("c_attn.weight")]:
        a, b = rng.normal(size=(2, width)), rng.normal(size=(3 * width, 2))
        stem = key.removesuffix(".weight")
        pairs |= {f"{stem}.lora_A.weight": a.astype("f4"), f"{stem}.lora_B.weight": b.astype("f4")}
        changed[key] = base[key] + 1.5 * (b.astype("f4").astype("f8") @ a.astype("f4").astype("f8")).T
    model = rlx.compile(merged_projections(), {k: v.astype("f4") for k, v in base.items()} | pairs)
    assert model.report().refusals == () and set(model.weights()) == {*base, *pairs} - set(model.flow._ignored_keys)  # type: ignore[attr-defined]
    for key, value in rlx.merge_lora(model).items():
        assert_close(value, changed[key], tolerance=1e-6)
    tokens = load_record(GPT2)["tokens"]
    want = rlx.compile(recipe_for(GPT2), {k: v.astype("f4") for k, v in changed.items()})(tokens)
    assert_close(model(tokens), np.asarray(want))

    rlx.save_lora(model, tmp_path / "mine")
    assert {key.split(".lora")[0] for key in load_file(tmp_path / "mine" / WEIGHTS)} == {
        f"base_model.model.transformer.h.{i}.attn.c_attn" for i in range(2)
    }
    assert json.loads((tmp_path / "mine" / CONFIG).read_text("utf-8"))["fan_in_fan_out"] is True
    again = rlx.lora(recipe_for(GPT2), adapter=tmp_path / "mine")
    from_files = again.assemble().build()
    trained = {key: 2 * value if "lora_B" in key else value for key, value in model.weights().items()}
    held = again.assemble().build(trained)
    key = "h.0.attn.c_attn.lora_B.weight"
    np.testing.assert_array_equal(from_files.source.read(key), pairs[key])
    np.testing.assert_array_equal(held.source.read(key), 2 * pairs[key])


def test_dropout_is_not_left_out_in_silence() -> None:
    """What an adapter was trained with: inference has none, and training asks."""
    with pytest.raises(errors.UnsupportedError, match=r"lora_dropout.*0\.1"):
        rlx.compile(rlx.lora(recipe_for(adapters.BASE), adapter=adapters.ADAPTER), program="train")
    flow = rlx.lora(recipe_for(adapters.BASE), adapter=adapters.ADAPTER, dropout=0.0).assemble()
    assert flow._no_training == ""


def with_config(directory: Path, **changes: Any) -> Path:
    """A copy of the recorded adapter with other fields in its config."""
    checkpoints.edit_json(checkpoints.copy(adapters.ADAPTER, directory) / CONFIG, changes)
    return directory


def test_names_of_alphas_are_matched_as_peft_matches_them(tmp_path: Path) -> None:
    """As in PEFT's `get_pattern_key`: the end of a path, behind a dot; a dot within is any character. Rank-stabilised
    ones have alpha / √rank of each module."""
    names = {"v_proj": 2, "v.proj": 2, "layers.1.self_attn.v_proj": 7, "_proj": 7, "^v_proj": 7}
    for i, (name, alpha) in enumerate((names | {"^model.layers.0.self.attn.v_proj": 2}).items()):
        sizes, _ = open_adapter(with_config(tmp_path / str(i), alpha_pattern={name: 2}))
        assert sizes.modules["model.layers.0.self_attn.v_proj"][1] == alpha / 3
    sizes, _ = open_adapter(with_config(tmp_path / "adapter", use_rslora=True))
    assert len({rank for rank, _ in sizes.modules.values()}) == 2
    for module, (rank, scale) in sizes.modules.items():
        assert scale == pytest.approx(scale_of(module) * rank**0.5)


@pytest.mark.oracle
def test_every_field_of_peft_is_known() -> None:
    """Read, of no part in the computation, or refused at other values than those that are plain LoRA."""
    fields = importlib.import_module("peft").LoraConfig().to_dict()
    read = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout"}
    assert set(fields) <= {*read, *INERT, *NEUTRAL}
    assert {name: fields[name] for name in NEUTRAL if name in fields and fields[name] not in NEUTRAL[name]} == {}


TWO: dict[str, Any] = {"r": 2, "lora_alpha": 3}
TURNED: dict[str, Any] = {"fan_in_fan_out": True}


def first(model: rlx.CompiledModel, given: np.ndarray[Any, Any]) -> Any:
    """The first output."""
    made = model(given)
    return next(iter(made.values())) if isinstance(made, dict) else made


@pytest.mark.oracle
@pytest.mark.parametrize(
    "fixture, kind, config",
    [
        ("vision/vit", "AutoModel", {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj", "fc1", "fc2"]}),
        ("vision/dinov2", "AutoModel", {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj", "fc1"]}),
        ("llama/gqa_linear_mlpbias_v5", "AutoModelForCausalLM", adapters.MIXED),
        ("qwen3/tied_v4", "AutoModelForCausalLM", TWO | {"use_rslora": True, "target_modules": "all-linear"}),
        ("gpt2/scaled_v5", "AutoModelForCausalLM", TWO | TURNED | {"target_modules": ["c_proj", "c_fc"]}),
        ("gpt2/scaled_v5", "AutoModelForCausalLM", TWO | TURNED | {"target_modules": ["c_attn", "c_proj"]}),
        ("gpt2/bare_v4", "AutoModelForCausalLM", TURNED | {"r": 3, "target_modules": ["c_attn"]}),
        ("bert/bare_v5", "AutoModel", {"r": 2, "target_modules": ["query", "value"]}),
        (
            "bert/bare_v5", "AutoModel",
            TWO | {"use_rslora": True, "target_modules": ["query", "value", "key"]}
            | {"rank_pattern": {"layer.1.attention.self.query": 5, "key": 1}}
            | {"alpha_pattern": {"^encoder.layer.0.attention.self.value": 7}},
        ),
    ],
)  # fmt: skip
def test_live_adapters(fixture: str, kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's numbers from its files; and what we write, PEFT reads."""
    peft = importlib.import_module("peft")
    directory: Path = checkpoints.FIXTURES / fixture
    record = load_record(directory)
    tokens = record["tokens"] if "tokens" in record else record["pixels"]
    theirs = adapters.adapted(directory, kind, 2, **config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = rlx.compile(rlx.lora(recipe_for(directory), adapter=tmp_path / "theirs"))
    want = adapters.first_output(theirs, tokens)
    assert_close(first(model, tokens), want)
    rlx.save_lora(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(hugging_face.load(directory, kind), tmp_path / "ours")
    assert_close(adapters.first_output(again.eval(), tokens), want)
    if "pixels" not in record:
        auto = "AutoPeftModelForCausalLM" if kind == "AutoModelForCausalLM" else "AutoPeftModelForFeatureExtraction"
        opened = getattr(peft, auto).from_pretrained(tmp_path / "ours", dtype="float32")
        assert_close(adapters.first_output(opened.eval(), tokens), want)
    merged = rlx.compile(recipe_for(directory), rlx.merge_lora(model))
    assert_close(first(merged, tokens), adapters.first_output(theirs.merge_and_unload(), tokens))


HEADS = {
    "bert": ("SequenceClassification", "SEQ_CLS", ["query", "value"]),
    "distilbert": ("SequenceClassification", "SEQ_CLS", ["q_lin"]),
    "roberta": ("TokenClassification", "TOKEN_CLS", ["query"]),
    "qwen3": ("SequenceClassification", "SEQ_CLS", ["q_proj", "down_proj"]),
}


@pytest.mark.oracle
@pytest.mark.parametrize("bare", [False, True], ids=["head", "bare"])
@pytest.mark.parametrize("name", HEADS)
def test_live_heads(name: str, bare: bool, tmp_path: Path) -> None:
    """Of a base model with and without the head: the logits of PEFT, which reads what we write."""
    peft, (task, kind, modules) = importlib.import_module("peft"), HEADS[name]
    prefix, fields = classifiers.CASES[name]
    fields = dict(fields) | {"id2label": {i: f"LABEL_{i}" for i in range(3)}}
    fields = {k: v for k, v in fields.items() if k != "num_labels"}
    auto, ending = f"AutoModelFor{task}", "Model" if bare else f"For{task}"
    hugging_face.write(hugging_face.Checkpoint(f"{prefix}{ending}", fields, seed=5), tmp_path / "base")
    classifiers.tokenizer().save_pretrained(tmp_path / "base")
    config = TWO | {"task_type": kind, "target_modules": modules}
    transformers = importlib.import_module("transformers")
    base = getattr(transformers, auto).from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = adapters.randomised(peft.get_peft_model(base, peft.LoraConfig(**config)), 3)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = np.array([[5, 9, 12, 7]])
    want = adapters.first_output(theirs.eval(), tokens)
    ours = rlx.load(tmp_path / "base", adapter=tmp_path / "theirs")
    got = np.array(ours.logits(tokens.tolist()))
    assert_close(got, want)
    rlx.save_lora(ours, tmp_path / "ours")
    base = getattr(transformers, auto).from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert_close(adapters.first_output(again, tokens), want)
