"""`CausalLM.capture`: prompts of several lengths against each prompt alone, and against float64 NumPy."""

import functools
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.blocks import Custom, Embed, Linear
from tests.oracles import checkpoints, numpy_reference
from tests.oracles.comparing import assert_close

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
CONFIG, WEIGHTS = numpy_reference.read_config(LLAMA), numpy_reference.read_weights(LLAMA)
LAYERS = CONFIG["num_hidden_layers"]
PROMPTS = [[5, 6, 7, 8, 9], [3]]


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
    got = lm.capture(PROMPTS)
    assert tuple(got) == lm.model.output_names[1:]
    assert_alone(lm, PROMPTS, got, batch=1)
    for i, row in enumerate(PROMPTS):
        states = numpy_reference.llama_states(CONFIG, WEIGHTS, row)
        assert_close(got["layers.*"][0, i, : len(row)], states[1].astype("f4"))
        assert_close(got["norm"][i, : len(row)], states[LAYERS].astype("f4"))


def test_one_prompt_and_prompts_of_one_length() -> None:
    """One prompt is a batch of one. No head is computed, and blocks of up to 16 tokens run one program."""
    lm = llama(roll="scan")
    for prompts in (PROMPTS[0], jnp.array([PROMPTS[0]])):
        assert_alone(lm, [PROMPTS[0]], lm.capture(prompts))
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
    got = lm.capture(PROMPTS)
    assert got["largest"].dtype == jnp.int32 and len(got) == 2
    assert_alone(lm, PROMPTS, got)
    both = backwards(both=True)
    assert both.capture([PROMPTS[0]])["flat"].shape == (5, 8)
    with pytest.raises(errors.RequestError, match=r"'flat' is f32\[.*pass one"):
        both.capture(PROMPTS)


def test_inputs_beside_tokens() -> None:
    """A row of them for each prompt."""

    def steered(emit: rlx.Emit, x: Any, inner: Any) -> Any:
        vector = emit.optional_input("steer")
        return inner(x) if vector is None else inner(x) + vector.reshape(-1, 1, 8)

    flow = rlx.ModelFlow("m").input("ids", ("batch", "seq"), dtype="int32").input("steer", ("batch", 8), default=None)
    flow = flow.named_layer("e", Embed("e", (31, 8))).stage(Linear("w", shape=(31, 8)))
    lm = rlx.CausalLM(flow.at("e").wrap(steered).at("e").capture(), missing="init", key=0)
    steer = np.arange(16, dtype="f4").reshape(2, 8)
    plain, moved = (np.asarray(lm.capture(PROMPTS, inputs=given)["e"]) for given in (None, {"steer": steer}))
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
