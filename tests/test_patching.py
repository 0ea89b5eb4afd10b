"""`CausalLM.patch` and `capture`, inside attention too: against transformers, float64 NumPy, and each prompt alone."""

import functools
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.blocks import Custom, Embed, Linear
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close

FIXTURES = checkpoints.FIXTURES
GPT2, LLAMA = FIXTURES / "gpt2" / "bare_v4", FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
PROMPTS, SOURCE = [[5, 6, 7, 8, 9], [3, 4, 1, 2, 7]], [[5, 6, 1, 8, 9], [9, 4, 1, 2, 7]]


@functools.cache
def model(directory: Path, roll: str = "auto") -> rlx.CausalLM:
    return rlx.load(directory, profile=rlx.CompileProfile().replace(layers={"roll": roll}))


@functools.cache
def captured(directory: Path, pattern: str) -> np.ndarray:
    """The outputs of blocks for `SOURCE`, `[blocks, prompts, tokens, hidden]`."""
    lm = rlx.load(directory, recipe=rlx.recipe_for(directory).at(pattern).capture(stacked=True))
    return np.asarray(lm.capture(SOURCE)[pattern])


def executables(lm: rlx.CausalLM) -> int:
    return sum(len(companion.programs.executables) for companion in lm.model.programs.companions.values())


def test_a_sweep_is_one_program_and_layers_are_operands() -> None:
    """Rolled layers stay one region, and a later call with another layer or position compiles nothing."""
    lm = model(LLAMA, "scan")
    grid = lm.patch(PROMPTS, "layers.*", source=SOURCE, sweep=True)
    assert grid.shape == (3, 5, 2, lm.vocab_size) and executables(lm) == 2  # the source's outputs, and the sweep
    patched = next(
        c.programs for c in lm.model.programs.companions.values() if len(c.programs.flows["llama"]._inputs) > 1
    )
    (key,) = patched.executables
    assert sum(bool(node.op.regions()) for node in patched.template(key.symbolic).mir.nodes) == 1
    one = lm.patch(PROMPTS, "layers.1", source=SOURCE, positions=2, batch_size=None)
    before = executables(lm)
    two = lm.patch(PROMPTS, "layers.2", source=SOURCE, positions=[-1])
    assert executables(lm) == before
    assert_close(one, grid[1, 2])
    assert_close(two, grid[2, 4])


@pytest.mark.slow
def test_forms_of_a_patch() -> None:
    """The same changes as an array, as a function, in parts, with all logits, and as a metric."""
    lm, values = model(LLAMA), captured(LLAMA, "layers.*")
    grid = np.asarray(lm.patch(PROMPTS, {"layers.*": values}, sweep=True))
    of_source = lm.patch(
        PROMPTS, {"layers.*": lambda y, s: y + (s - y)}, source=SOURCE, sweep=True, batch_size=4, logits="all"
    )
    assert of_source.shape[:4] == (3, 5, 2, 5)
    assert_close(of_source[:, :, :, -1], grid)
    metric = lm.patch(
        PROMPTS, {"layers.*": values}, sweep=True, metric=lambda x: x[:, 3] - x[:, 4], positions=[-1, [0, 4]]
    )
    assert metric.shape == (3, 2, 2)
    assert_close(metric[:, 0], grid[:, 4, :, 3] - grid[:, 4, :, 4])
    with pytest.raises(errors.RequestError, match="metric returns 'x'; expected an array"):
        lm.patch(PROMPTS, {"layers.*": values}, sweep=True, metric=lambda x: "x")
    both = lm.patch(PROMPTS, {"layers.0.mlp": 0, "layers.2": lambda y: y * 2})
    recipe = rlx.recipe_for(LLAMA).at("layers.0.mlp").scale(0.0).at("layers.2").scale(2.0)
    assert_close(both, rlx.compile(recipe)(np.array(PROMPTS))[:, -1])
    ragged = lm.patch([[5, 6, 7], [3]], {"layers.1": 0}, positions=-1, logits="all")
    assert np.isnan(ragged[1, 1:]).all()
    assert_close(ragged[0, -1], lm.patch([5, 6, 7], {"layers.1": 0}, positions=[2])[0])
    assert_close(ragged[1, 0], lm.patch([3], {"layers.1": 0})[0])


def test_a_function_of_all_tokens_reads_no_padding() -> None:
    """Such as their mean, against a wrapper; prompts of several lengths would be padded."""

    def mean(y: Any) -> Any:
        return y.mean(0)

    def all_means(y: Any) -> Any:
        return jnp.broadcast_to(y.mean(1, keepdims=True), y.shape)

    wrapped = RECIPE.at("layers.1").wrap(lambda emit, x, inner: emit.jax(all_means, inner(x)))
    got = model(LLAMA).patch(PROMPTS, {"layers.1": mean})
    assert_close(got, np.asarray(rlx.compile(wrapped)(np.array(PROMPTS)))[:, -1])
    with pytest.raises(errors.RequestError, match="reduces over 'seq'"):
        model(LLAMA).patch([[5, 6, 7], [3]], {"layers.1": mean})


def test_parameters_of_now_are_patched() -> None:
    lm = rlx.CausalLM(model(GPT2).model)
    lm.model = lm.model.replace({name: a * 1.5 for name, a in (lm.model.params or {}).items()})
    got = lm.patch(PROMPTS, {"layers.0": lambda y: y})
    assert_close(got, np.asarray(lm.logits(PROMPTS)[:, -1]))


RECIPE = rlx.recipe_for(LLAMA)


@functools.cache
def capturing(roll: str) -> rlx.CausalLM:
    recipe = RECIPE
    for value in ("probs", "scores", "q", "k", "v", "input"):
        recipe = recipe.at("layers.*.self_attn").capture(value, stacked=True)
    recipe = recipe.at("layers.1.self_attn").capture("probs")
    return rlx.load(LLAMA, recipe=recipe, profile=rlx.CompileProfile().replace(layers={"roll": roll}))


def test_values_of_attention_by_hand() -> None:
    """The definitions, in float64, and that repeated layers are one region or many with the same values."""
    got = {name: np.asarray(a, np.float64) for name, a in capturing("scan").capture(PROMPTS).items()}
    unrolled = capturing("unroll").capture(PROMPTS)
    for name, a in got.items():
        np.testing.assert_allclose(a, unrolled[name], atol=1e-5)
    q, k, scores, probs = (got[f"layers.*.self_attn.{name}"] for name in ("q", "k", "scores", "probs"))
    assert q.shape == (3, 2, 5, 8, 6) and k.shape == (3, 2, 5, 2, 6) and probs.shape == (3, 2, 8, 5, 5)
    want = np.einsum("lbsnd,lbtnd->lbnst", q, np.repeat(k, 4, axis=3)) * 6**-0.5
    allowed = np.tril(np.ones((5, 5), bool))
    assert_close(scores[..., allowed].astype("f4"), want[..., allowed].astype("f4"))
    assert (scores[..., ~allowed] == -np.inf).all() and (probs[..., ~allowed] == 0).all()
    weights = np.exp(scores)
    assert_close(probs.astype("f4"), (weights / weights.sum(-1, keepdims=True)).astype("f4"))
    np.testing.assert_array_equal(got["layers.1.self_attn.probs"], probs[1])


@pytest.mark.slow
def test_captures_of_requests() -> None:
    """Prefill and generation return what `capture` does, by prompt, without padding, and decoding stays as it is."""
    lm, prompts = capturing("scan"), [[5, 6, 7, 8, 9], [3, 1]]
    want = lm.capture(prompts)
    ids, got = lm.generate(prompts, 4, return_captures=True)
    assert ids == rlx.load(LLAMA).generate(prompts, 4)
    whole = lm.capture([[*prompt, *new] for prompt, new in zip(prompts, ids, strict=True)])
    for name in whole:
        np.testing.assert_array_equal(got[name], whole[name])
    padded = np.array([[5, 6, 7, 8, 9], [3, 1, 0, 0, 0]])
    values, state, captures = lm.prefill(padded, [5, 2], logits="last", return_captures=True)
    assert_close(values, lm.prefill(padded, [5, 2], logits="last")[0])
    for name in want:
        np.testing.assert_allclose(captures[name], want[name], atol=1e-5)
    new = np.array([row[:2] for row in ids], np.int32)
    out, _ = lm.model.as_program("extend")(new, lengths=np.array([2, 2], np.int32), state=state.state)
    cached = np.asarray(out["layers.1.self_attn.probs"])  # over the slots of the cache
    for row, start in enumerate((5, 2)):
        mine = np.asarray(whole["layers.1.self_attn.probs"][row, :, start : start + 2, : start + 2])
        assert_close(cached[row, :, :, : start + 2], mine)
        assert (cached[row, :, :, start + 2 :] == 0).all()
    answers, many = lm.generate([[5, 6]], 2, n=2, temperature=1.0, seed=1, return_captures=True)
    assert many["layers.1.self_attn.probs"].shape[0] == len(answers[0]) == 2


@pytest.mark.slow
def test_a_window_with_captured_weights_generates() -> None:
    """The slots of a ring buffer have no rule for weights, which decoding does not compute."""
    directory = FIXTURES / "mistral" / "window_v5"
    recipe = rlx.recipe_for(directory).at("layers.*.self_attn").capture("probs")
    prompts = [[5, 6, 7, 8, 9, 11, 12, 13, 4, 3, 17], [3, 1]]
    plain = rlx.load(directory).generate(prompts, 4)
    for roll in ("scan", "unroll"):
        lm = rlx.load(directory, recipe=recipe, profile=rlx.CompileProfile().replace(layers={"roll": roll}))
        ids, got = lm.generate(prompts, 4, return_captures=True)
        assert ids == plain and np.isfinite(got["layers.0.self_attn.probs"][0, :, :15, :15]).all()


def loaded(directory: Path) -> Any:
    hf = hugging_face.load(directory, "AutoModelForCausalLM")
    hf.set_attn_implementation("eager")
    return hf


@pytest.mark.oracle
@pytest.mark.parametrize("roll", ["scan", "unroll"])
@pytest.mark.parametrize("fixture, pattern", [
    ("llama/gqa_linear_mlpbias_v5", "layers.*.self_attn"), ("gpt2/bare_v4", "layers.*.attn"),
    ("gemma2/caps_v5", "layers.*.self_attn"), ("gpt_oss/window_v5", "layers.*.self_attn"),
])  # fmt: skip
def test_live_probabilities(fixture: str, pattern: str, roll: str) -> None:
    """Dense, with windows and a softcap, and with sinks: `output_attentions` of eager attention."""
    import torch

    directory = FIXTURES / fixture
    hf = loaded(directory)
    ids = np.random.default_rng(0).integers(1, hf.config.vocab_size - 1, (2, 11))
    with torch.no_grad():
        out = hf(torch.tensor(ids), output_attentions=True, use_cache=True)
    recipe = rlx.recipe_for(directory)
    for value in ("probs", "k"):
        recipe = recipe.at(pattern).capture(value)
    lm = rlx.load(directory, recipe=recipe, profile=rlx.CompileProfile().replace(layers={"roll": roll}))
    got = lm.capture(ids)
    probs = [a for name, a in got.items() if name.endswith("probs")]
    assert len(probs) == len(out.attentions)
    for mine, theirs in zip(probs, out.attentions, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=3e-6)
    for i, mine in enumerate(a for name, a in got.items() if name.endswith(".k")):
        keys = out.past_key_values.layers[i].keys.numpy().transpose(0, 2, 1, 3)
        np.testing.assert_allclose(np.asarray(mine)[:, -keys.shape[1] :], keys, atol=1e-5)  # a window keeps the last


@pytest.mark.oracle
@pytest.mark.parametrize("directory, pattern, module", [
    (GPT2, "layers.*", "transformer.h.{}"), (GPT2, "layers.*.mlp", "transformer.h.{}.mlp"),
    (LLAMA, "layers.*", "model.layers.{}"), (LLAMA, "layers.*.self_attn", "model.layers.{}.self_attn"),
])  # fmt: skip
def test_live_sweep(directory: Path, pattern: str, module: str) -> None:
    """A sweep against hooks in transformers, layer by layer and position by position."""
    import torch

    hf, values = loaded(directory), captured(directory, pattern)
    grid = np.asarray(model(directory).patch(PROMPTS, pattern, source=SOURCE, sweep=True))
    for layer, value in enumerate(values):
        for position in range(value.shape[1]):

            def put(module: Any, given: Any, made: Any, at: int = position, new: Any = value) -> Any:
                output = (made[0] if isinstance(made, tuple) else made).clone()
                output[:, at] = torch.tensor(new[:, at])
                return (output, *made[1:]) if isinstance(made, tuple) else output

            handle = hf.get_submodule(module.format(layer)).register_forward_hook(put)
            with torch.no_grad():
                want = hf(torch.tensor(PROMPTS)).logits[:, -1].numpy()
            handle.remove()
            np.testing.assert_allclose(grid[layer, position], want, atol=1e-5)


@pytest.mark.oracle
def test_live_values_of_new_tokens() -> None:
    """What transformers' generation sees at the prompt and the new tokens."""
    import torch

    hf, prompt = loaded(LLAMA), [[5, 6, 7]]
    out = hf.generate(
        torch.tensor(prompt), max_new_tokens=4, do_sample=False, output_attentions=True, return_dict_in_generate=True,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    lm = rlx.load(LLAMA, recipe=RECIPE.at("layers.*.self_attn").capture("probs", stacked=True))
    lm.eos_ids = ()
    ids, got = lm.generate(prompt, 4, return_captures=True)
    assert ids[0] == out.sequences[0, 3:].tolist()
    probs = jnp.asarray(got["layers.*.self_attn.probs"])
    for step, layers in enumerate(out.attentions):
        for layer, theirs in enumerate(layers):
            start, keys = (0, 3) if step == 0 else (2 + step, 3 + step)
            np.testing.assert_allclose(probs[layer, :, :, start : start + theirs.shape[2], :keys], theirs, atol=3e-6)


CONFIG, WEIGHTS = numpy_reference.read_config(LLAMA), numpy_reference.read_weights(LLAMA)
LAYERS = CONFIG["num_hidden_layers"]
LENGTHS = [[5, 6, 7, 8, 9], [3]]


@functools.cache
def llama(stacked: bool = False, roll: str = "auto") -> rlx.CausalLM:
    recipe = rlx.recipe_for(LLAMA).at("layers.*").capture(stacked=stacked)
    recipe = recipe.at("norm").capture().at("layers.0.{self_attn,mlp.down_proj}").capture()
    return rlx.load(LLAMA, recipe=recipe, profile=rlx.CompileProfile().replace(layers={"roll": roll}))


def assert_alone(lm: rlx.CausalLM, prompts: list[list[int]], got: dict[str, Any], batch: int = 0) -> None:
    """Every prompt has the values that the model gives for it alone, and padding after them."""
    longest = max(map(len, prompts))
    for i, row in enumerate(prompts):
        for name, want in list(lm.model(np.array([row])).items())[1:]:
            axis = batch if name.endswith("*") else 0
            mine = np.moveaxis(np.asarray(got[name]), axis, 0)[i]
            mine, want = np.moveaxis(mine, axis, 0), np.moveaxis(np.asarray(want), [axis, axis + 1], [0, 1])[0]
            assert mine.shape == (longest, *want.shape[1:]) and mine.dtype == want.dtype
            (assert_close if want.dtype.kind == "f" else np.testing.assert_array_equal)(mine[: len(row)], want)
            fill = np.isnan(mine[len(row) :]) if want.dtype.kind == "f" else mine[len(row) :] == -1
            assert fill.all()


def test_prompts_of_several_lengths() -> None:
    lm = llama(stacked=True)
    got = lm.capture(LENGTHS)
    assert tuple(got) == lm.model.output_names[1:]
    assert_alone(lm, LENGTHS, got, batch=1)
    for i, row in enumerate(LENGTHS):
        states = numpy_reference.llama_states(CONFIG, WEIGHTS, row)
        assert_close(got["layers.*"][0, i, : len(row)], states[1].astype("f4"))
        assert_close(got["norm"][i, : len(row)], states[LAYERS].astype("f4"))


def test_one_prompt_and_prompts_of_one_length() -> None:
    """One prompt is a batch of one. No head is computed, and blocks of up to 16 tokens run one program."""
    lm = llama(roll="scan")
    for prompts in (LENGTHS[0], jnp.array([LENGTHS[0]])):
        assert_alone(lm, [LENGTHS[0]], lm.capture(prompts))
    assert_alone(lm, [[1, 2], [3, 4]], lm.capture([[1, 2], [3, 4]]))
    ran = [key for key in lm.model.programs.executables if key.outputs == lm.model.output_names[1:]]
    assert {dict(key.binding)["seq"] for key in ran} == {16}
    paths = {".".join(map(str, node.origin.path)) for _, node in lm.model.programs.template(ran[0].symbolic).mir.walk()}
    assert not any("lm_head" in path for path in paths)


def backwards(both: bool = False) -> rlx.CausalLM:
    """Tokens see those after them, so that no cached program can be derived and no row may be padded."""

    def flip(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
        turned = emit.jax(lambda v: jnp.cumsum(v[:, ::-1], 1), x)
        emit.output("largest", emit.jax(lambda v: jnp.argmax(v, -1).astype(jnp.int32), x))
        if both:
            emit.output("flat", emit.jax(lambda v: v.reshape(-1, 8), turned))
        return turned

    flow = rlx.ModelFlow("m").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (31, 8)))
    flow = flow.named_layer("flip", Custom(flip)).stage(Linear("w", shape=(31, 8))).at("flip").capture()
    return rlx.CausalLM(flow, missing="init", key=0)


def test_a_flow_that_reads_what_follows() -> None:
    """Each prompt runs at its own length. What a stage gives to `emit.output` is there too; integers after the end of a
    prompt are -1."""
    lm = backwards()
    got = lm.capture(LENGTHS)
    assert got["largest"].dtype == jnp.int32 and len(got) == 2
    assert_alone(lm, LENGTHS, got)
    both = backwards(both=True)
    assert both.capture([LENGTHS[0]])["flat"].shape == (5, 8)
    with pytest.raises(errors.RequestError, match=r"'flat' is f32\[.*pass one"):
        both.capture(LENGTHS)


def test_inputs_beside_tokens() -> None:
    """A row of them for each prompt."""

    def steered(emit: rlx.Emit, x: Any, inner: Any) -> Any:
        vector = emit.optional_input("steer")
        return inner(x) if vector is None else inner(x) + vector.reshape(-1, 1, 8)

    flow = rlx.ModelFlow("m").input("ids", ("batch", "seq"), dtype="int32").input("steer", ("batch", 8), default=None)
    flow = flow.named_layer("e", Embed("e", (31, 8))).stage(Linear("w", shape=(31, 8)))
    lm = rlx.CausalLM(flow.at("e").wrap(steered).at("e").capture(), missing="init", key=0)
    steer = np.arange(16, dtype="f4").reshape(2, 8)
    plain, moved = (np.asarray(lm.capture(LENGTHS, inputs=given)["e"]) for given in (None, {"steer": steer}))
    np.testing.assert_allclose(moved - plain, np.where(np.isnan(plain), np.nan, steer[:, None]), rtol=1e-5)


def test_requests_that_return_no_captures_warn_once() -> None:
    requests = {
        "logits": lambda lm: lm.logits([[1, 2]]), "prefill": lambda lm: lm.prefill([[1, 2]]),
        "generate": lambda lm: lm.generate([[1, 2]], max_new_tokens=1),
    }  # fmt: skip
    for request in requests.values():
        lm: Any = rlx.CausalLM(llama().model)
        with pytest.warns(errors.RlxWarning, match="'layers.0'.*lm.capture") as told:
            request(lm)
        assert [w.filename for w in told] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for again in requests.values():
                again(lm)
            lm.capture([[1, 2]])
    plain: Any = rlx.load(LLAMA)
    requests["generate"](plain)  # a warning is an error in these tests
    with pytest.raises(errors.RequestError, match=r"llama has no captures.*\.capture\(\)"):
        plain.capture([[1, 2]])
