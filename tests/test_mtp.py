"""`speculative="mtp"`: drafts from the module of a Qwen 3.5 checkpoint, against its formulas and plain decoding."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.drafters import make_drafter
from rlx_jax.ir import hir
from rlx_jax.ir.graph import TypeCache
from rlx_jax.models.qwen35 import Qwen35Config, Qwen35Flow, Qwen35MtpFlow
from tests.opening import load, recipe_for
from tests.ops import BLOCKS, SIZES, operand
from tests.oracles import checkpoints, mtp_drafts
from tests.oracles.comparing import assert_close, assert_rows_close
from tests.oracles.hybrid import row
from tests.oracles.numpy_reference import read_config, read_weights

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [9], [2, 7, 1, 8, 2]]
"""The first is longer than the prompt's bucket: it is read in two parts."""
NEW, DRAFTS = 10, 3
TABLES = {"prompt": [8], "batch": [3], "context": [32]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose module is right more often than not."""
    return mtp_drafts.checkpoint(tmp_path_factory.mktemp("mtp") / "right", 1, planted=4.0)


@pytest.fixture(scope="module")
def lm(directory: Path) -> Any:
    """That checkpoint, with buckets."""
    return load(directory, profile=rlx.CompileProfile().replace(buckets=TABLES))


def with_drafts(lm: Any) -> list[list[int]]:
    """The new tokens of all prompts."""
    found: list[list[int]] = lm.generate(PROMPTS, NEW, speculative="mtp", draft_tokens=DRAFTS)
    return found


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_module_is_its_formulas(tied: bool, tmp_path: Path) -> None:
    """Logits and hidden states of all tokens, in one block and in ragged pieces; weights of its own file."""
    where = mtp_drafts.checkpoint(tmp_path / "m", 2, {"tie_word_embeddings": tied})
    config, w = read_config(where), read_weights(where)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, config["vocab_size"], (2, 9)).astype(np.int32)
    hidden = np.stack([row(config, w, r)[0] for r in rng.integers(0, 37, (2, 9))]).astype(np.float32)
    want = [mtp_drafts.module(config, w, h, r) for h, r in zip(hidden, ids, strict=True)]
    logits, own = (np.stack([pair[i] for pair in want]) for i in (1, 0))
    recipe = Qwen35MtpFlow(Qwen35Config.from_hf(config), rlx.open_weights(where))
    prefill, extend = (rlx.compile(recipe, program=name) for name in ("prefill", "extend"))
    state = prefill.init_state(2, 16)
    got, state = prefill(ids[:, :6], hidden[:, :6], np.array([6, 1], np.int32), state=state)
    assert_rows_close(got["logits"], logits[:, :6], np.array([6, 1]))
    assert_rows_close(got["hidden"], own[:, :6], np.array([6, 1]))
    at = np.array([6, 1])
    pieces = [np.stack([a[b, n : n + 3] for b, n in enumerate(at)]) for a in (ids, hidden, logits, own)]
    got, state = extend(*pieces[:2], np.array([3, 3], np.int32), state=state)
    assert_close(got["logits"], pieces[2])
    assert_close(got["hidden"], pieces[3])
    assert state.length.tolist() == [9, 4]
    if tied:  # one more program, in the slow tier
        whole: Any = rlx.compile(recipe)(ids, hidden)
        assert_close(whole["logits"], logits)
        assert_close(whole["hidden"], own)


@pytest.mark.slow
def test_the_steps_of_the_formulas(directory: Path, lm: Any) -> None:
    """Greedy tokens, and of every row as many drafts read and kept, in as many steps, as NumPy has: so each draft is
    the one that the formulas give, after any that were taken back too. The stream is the same, and compiles nothing."""
    config, w = read_config(directory), read_weights(directory)
    got, found = with_drafts(lm), lm.report().speculative
    rows: Any = [mtp_drafts.decoded(config, w, prompt, NEW, DRAFTS) for prompt in PROMPTS]
    assert got == [tokens for tokens, *_ in rows]
    drafted, accepted = (sum(r[i] for r in rows) for i in (1, 2))
    assert (found.drafted, found.accepted, found.steps) == (drafted, accepted, max(r[3] for r in rows))
    assert 0.3 * drafted < accepted < drafted and found.steps < NEW - 1
    list(lm.stream(PROMPTS[0], NEW, speculative="mtp", draft_tokens=DRAFTS))  # one step of a block of its own
    compiled = lm.report().compiles
    with jax.transfer_guard("disallow"):
        assert list(lm.stream(PROMPTS[0], NEW, speculative="mtp", draft_tokens=DRAFTS)) == got[0]
    assert lm.report().compiles == compiled
    named = [row.program.split(":")[0] for row in lm.report().programs if ": prefill" in row.program]
    assert named == ["qwen35_mtp"]


@pytest.mark.slow
@pytest.mark.parametrize("has_mesh", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_in_slots(directory: Path, lm: Any, has_mesh: bool) -> None:
    """Rows equal the request alone with the same drafts, with a sampler and a number of tokens for each prompt."""
    prompts, budgets = [*PROMPTS, [1, 2] * 4, [4] * 7, [3, 1]] * 2, [NEW, 1, 7, 3, 12, NEW] * 2
    samplers: Any = [(rlx.Sampler(), rlx.Sampler(temperature=3.0, top_k=9))[i % 2] for i in range(12)]
    options: Any = {"speculative": "mtp", "draft_tokens": DRAFTS}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4]) if has_mesh else None
    model: Any = load(directory, mesh=mesh)
    got = model.generate(prompts, budgets, samplers, seed=[*range(12)], stop=[5], slots=4, **options)
    report = model.report()
    assert report.request.slots == 4 and report.speculative.drafted > report.speculative.accepted > 0
    each = enumerate(zip(prompts, budgets, samplers, strict=True))
    assert got == [lm.generate([p], b, s, seed=i, stop=[5], **options)[0] for i, (p, b, s) in each]
    assert model.generate(prompts, budgets, samplers, seed=[*range(12)], stop=[5], slots=4, **options) == got
    assert model.report().request.compiled == 0


def test_the_model_and_its_module_share_arrays(lm: Any) -> None:
    """The embedding and the head; the model holds nothing of the module."""
    drafter: Any = make_drafter("mtp", DRAFTS, lm._lm)
    own, shared = lm.model.params, drafter.params()
    assert {k for k, a in shared.items() if own.get(k) is a} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any(key.startswith("mtp.") for key in own) and drafter.programs.layout.types().keys() == shared.keys()


@pytest.mark.slow
def test_over_a_mesh(directory: Path, lm: Any) -> None:
    """The module is divided as its model is: the same tokens by as many drafts."""
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    ours: Any = load(directory, mesh=jax.sharding.Mesh(grid, ("data", "tensor")))
    assert with_drafts(ours) == with_drafts(lm)
    assert ours.report().speculative == lm.report().speculative


def test_inside_a_checkpoint_that_reads_images(directory: Path, tmp_path: Path) -> None:
    """Its weights stand beside those of the text model, whose keys have another prefix."""
    where = checkpoints.inside(directory, tmp_path / "m", "Qwen3_5ForConditionalGeneration", "model.language_model.")
    with pytest.warns(errors.RlxWarning, match="text model .*0 weights"):
        lm: Any = load(where)
    drafter: Any = make_drafter("mtp", 2, lm._lm)
    stored = read_weights(directory)
    for key in ("mtp.fc.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(drafter.params()[key], stored[key])


WITHOUT: list[tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]], type[errors.RlxError], str]] = [
    ({"mtp_num_hidden_layers": 2}, dict, errors.UnsupportedError, "mtp_num_hidden_layers is 2; expected 1"),
    ({"mtp_use_dedicated_embeddings": True}, dict, errors.UnsupportedError, "mtp_use_dedicated_embeddings is true"),
    (
        {}, lambda t: {k: a for k, a in t.items() if not k.startswith("mtp.")}, errors.MissingWeightError,
        r"no mtp\.\* weights",
    ),
    (
        {}, lambda t: {k: a for k, a in t.items() if k != "mtp.norm.weight"}, errors.MissingWeightError,
        "mtp.norm.weight.* read by norm",
    ),
    (
        {}, lambda t: t | {"mtp.fc.weight": t["mtp.fc.weight"].T.copy()}, errors.WeightShapeError,
        r"merge\.fc: weight 'mtp\.fc\.weight' .*expected \[22, 44\]",
    ),
]  # fmt: skip


def test_checkpoints_that_cannot(directory: Path, tmp_path: Path) -> None:
    """By name, when drafts are asked for: the model itself is loaded."""
    for n, (changes, edit, error, told) in enumerate(WITHOUT):
        copy = checkpoints.edited(directory, tmp_path / str(n), changes)
        checkpoints.edit_tensors(copy, edit)
        lm = load(copy)
        for _ in range(2):  # what was refused once is not there
            with pytest.raises(error, match=told):
                lm.generate(PROMPTS[1], 4, speculative="mtp")
    for name, value, refusal in (
        ("mtp_layer_types", ["full_attention"], errors.UnsupportedError),
        ("mtp_num_hidden_layers", True, errors.ConfigError), ("mtp_use_dedicated_embeddings", "no", errors.ConfigError),
    ):  # fmt: skip
        with pytest.raises(refusal, match=name):
            load(checkpoints.edited(directory, tmp_path / name, {name: value}))


def test_a_module_that_does_not_fit(directory: Path) -> None:
    """One of a flow's own: another width, and no function at all."""
    config = Qwen35Config.from_hf(json.loads((directory / "config.json").read_text("utf-8")))
    flow = recipe_for(directory).assemble()
    narrow = lambda source: Qwen35MtpFlow(config, source).assemble().outputs(["logits"])  # noqa: E731
    with pytest.raises(errors.GraphError, match=r"qwen35_mtp.*qwen35.*\[batch, seq, 22\]"):
        rlx.CausalLM(flow.with_mtp(narrow)).generate(PROMPTS[1], 4, speculative="mtp")
    with pytest.raises(errors.GraphError, match="with_mtp takes a function"):
        flow.with_mtp(3)
    shapes = rlx.CausalLM(Qwen35Flow(config))
    with pytest.raises(errors.MissingWeightError, match="needs parameters"):
        shapes.generate(PROMPTS[1], 4, speculative="mtp")


def test_operands_that_do_not_fit_the_block_of_the_specification() -> None:
    """By name, when types are inferred; the batch is a number, and there are 29 operands."""
    sample: Any = next(s for s in BLOCKS if isinstance(s.op, hir.Qwen35MtpHead))
    fields: list[tuple[dict[str, int], str]] = [
        ({"n_ff": 6}, "gate_w"), ({"mtp_vocab": 12}, "lm_head_w"), ({"n_embd": 12}, "h_pre_norm"),
        ({"n_rot": 3}, "n_rot"), ({"n_rot": 8}, "n_rot"),
    ]  # fmt: skip
    types = tuple(t.bind(SIZES) for t in sample.types)
    symbolic = (operand("f32 batch 3 6"), *types[1:])
    calls = [(dataclasses.replace(sample.op, **changes), types, message) for changes, message in fields]
    calls += [(sample.op, types[:-1], "29"), (sample.op, symbolic, "h_pre_norm is .* give the batch as a number")]
    for block, operands, message in calls:
        with pytest.raises(errors.GraphError, match=message):
            TypeCache().infer(block, operands)
