"""LoRA over packed weights: adapters train as over the decoded base, whose bytes stay as they are."""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import rlx_jax as rlx
from rlx_jax.errors import DTypeError, RequestError, WeightError
from rlx_jax.losses import cross_entropy
from rlx_jax.train.step import trainable_params
from tests.divided import mesh
from tests.oracles import adapters, checkpoints, hugging_face
from tests.oracles.comparing import assert_close
from tests.oracles.packed import BLOCKS, meaning, packed
from tests.small import profile

BASE = checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"  # the embedding is the head too
PROJECTIONS = "layers.*.{self_attn.{q,v}_proj,mlp.{gate,down}_proj}"  # rows of down_proj are no whole blocks
TOKENS = np.random.default_rng(3).integers(0, 389, (4, 12)).astype(np.int32)
ONLY_ADAPTERS = "**.lora_{A,B}.weight"


def base_weights(scheme: str = "gguf_q8_0") -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint packed wherever rows are whole blocks, and what that means."""
    source = rlx.open_weights(BASE)
    mixed: dict[str, Any] = {key: source.read(key) for key in source.keys()}
    for n, (key, value) in enumerate(mixed.items()):
        if value.ndim == 2 and value.shape[1] % BLOCKS[scheme][0] == 0:
            mixed[key] = packed(scheme, value.shape, n)
            scales = mixed[key].data.reshape(-1, BLOCKS[scheme][1])[:, :2]
            scales[:] = np.array([0.002 if scheme == "gguf_q8_0" else 0.03], "<f2").view(np.uint8)
    return mixed, {k: meaning(v) if isinstance(v, rlx.Packed) else v for k, v in mixed.items()}


MIXED, DENSE = base_weights()


def adapted(weights: Any, program: str = "train", **tables: Any) -> rlx.CompiledModel:
    """Adapters of rank 4 whose B is not zeros."""
    recipe = rlx.lora(rlx.recipe_for(BASE), PROJECTIONS, rank=4, alpha=8)
    model = rlx.compile(recipe, weights, missing="init", key=0, program=program, profile=profile(**tables))
    params = dict(model.params or {})
    for n, name in enumerate(sorted(name for name in params if "lora_B" in name)):
        params[name] = jax.random.normal(jax.random.key(n), params[name].shape, params[name].dtype) * 0.1
    return model.replace(params)


@pytest.mark.parametrize(
    ("scheme", "tables"),
    [
        ("gguf_q8_0", {}),
        pytest.param("gguf_q4_0", {"layers": {"roll": "unroll", "remat": "layer"}}, marks=pytest.mark.slow),
        pytest.param("gguf_q8_0", {"backend": {"cpu": {"merge": True}}}, marks=pytest.mark.slow),
        pytest.param("gguf_q8_0", {"precision": {"mixed": "auto_mixed_bf16"}}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_over_the_decoded_base(scheme: str, tables: dict[str, Any]) -> None:
    """Of all that floats, adapters and norms; packed weights are integers and have none."""
    mixed, dense = (MIXED, DENSE) if scheme == "gguf_q8_0" else base_weights(scheme)
    one, other = adapted(mixed, **tables), adapted(dense, **tables)
    assert one.params is not None and other.params is not None
    trained = trainable_params(one.params)
    assert {k for k, v in one.params.items() if k not in trained} and "model.embed_tokens.weight" not in trained
    losses, gradients = [], []  # gradients by checkpoint key, as the leaves differ
    for model in (one, other):
        params = dict(model.params or {})

        def loss(p: Any, model: Any = model, params: Any = params) -> Any:
            return cross_entropy(model, {**params, **p}, TOKENS, chunk=5)

        value, gradient = jax.jit(jax.value_and_grad(loss))(trainable_params(params))
        losses.append(value)
        gradients.append(model.weights({**params, **gradient}))
    np.testing.assert_allclose(losses[0], losses[1], rtol=3e-6)
    keys = [key for key in gradients[1] if not isinstance(mixed.get(key), rlx.Packed)]
    assert sum("lora_" in key for key in keys) == 16 and "model.norm.weight" in keys
    for key in keys:
        assert np.abs(gradients[1][key]).max() > 0
        assert_close(gradients[0][key], np.asarray(gradients[1][key]), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("roll", ["scan", "unroll"])
def test_training(roll: str, tmp_path: Path) -> None:
    """50 steps: the loss falls, bytes of the base stay, and so does what the mask leaves out. States are saved."""
    model = adapted(MIXED, layers={"roll": roll})
    assert model.params is not None
    before = {name: np.asarray(leaf) for name, leaf in model.params.items()}
    mask = rlx.train.mask(model, ONLY_ADAPTERS)
    assert set(mask) == set(trainable_params(before)) != set(before)
    optimizer = optax.multi_transform({True: optax.adam(1e-2), False: optax.set_to_zero()}, mask)
    state, step, losses = rlx.train.init(model, optimizer), rlx.train.make_step(model, optimizer, microbatches=2), []
    lengths = np.array([12, 9, 12, 5], np.int32)
    for number in range(50):
        if number == 48:
            with rlx.train.Checkpoints(tmp_path / "run") as run:
                run.save(number, state)
        state, metrics = step(state, {"tokens": TOKENS, "lengths": lengths})
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.7 * losses[0]
    for name, leaf in state.params.items():
        assert leaf.dtype == before[name].dtype
        assert np.array_equal(np.asarray(leaf), before[name]) != mask.get(name, False), name
    trained = model.replace(state.params)
    with rlx.train.Checkpoints(tmp_path / "run") as run:  # the last two steps again, from what was saved
        again = run.restore(state)
    for _ in range(2):
        again, _ = step(again, {"tokens": TOKENS, "lengths": lengths})
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)

    # What is saved and merged is what was trained.
    rlx.save_lora(trained, tmp_path / "adapter")
    reopened = rlx.compile(rlx.lora(rlx.recipe_for(BASE), adapter=tmp_path / "adapter"), MIXED)
    want = np.asarray(trained(TOKENS))
    assert_close(reopened(TOKENS), want)
    with pytest.raises(WeightError, match=r"\d+ weights are packed.*dtype='f32'"):
        rlx.merge_lora(trained)
    with pytest.raises(DTypeError, match="'int8'.*'f32'.*'bf16'.*'f16'"):
        rlx.merge_lora(trained, dtype="int8")
    assert_close(rlx.compile(rlx.recipe_for(BASE), rlx.merge_lora(trained, dtype="f32"))(TOKENS), want, tolerance=1e-5)
    assert {str(value.dtype) for value in rlx.merge_lora(trained, dtype="bf16").values()} == {"bfloat16"}


@pytest.mark.oracle
def test_peft_opens_the_adapter(tmp_path: Path) -> None:
    """On the decoded base it has the same logits."""
    peft, torch = importlib.import_module("peft"), importlib.import_module("torch")
    model = adapted(MIXED)
    rlx.save_lora(model, tmp_path / "adapter")
    theirs = hugging_face.load(BASE, "AutoModelForCausalLM")
    theirs.load_state_dict({key: torch.tensor(value) for key, value in DENSE.items()}, strict=False)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert_close(model(TOKENS), adapters.first_output(theirs.eval(), TOKENS))


def test_what_is_not_trained_is_named() -> None:
    """Packed weights are decoded where nothing else would be trained, and never left out in silence."""
    recipe = rlx.recipe_for(BASE)
    decoded = rlx.compile(recipe, MIXED, program="train")
    assert decoded.params is not None and len(trainable_params(decoded.params)) == len(decoded.params)
    optimizer = optax.sgd(1.0)
    with pytest.raises(WeightError, match=r"'model.embed_tokens.weight' is i8 .*program='train'.*rlx_jax.lora"):
        rlx.train.init(rlx.compile(recipe, MIXED), optimizer)
    model = adapted(MIXED)
    with pytest.raises(RequestError, match="'model.layers.0.self_attn.q_proj.weight'"):
        rlx.train.mask(model, "**.q_proj.weight", ONLY_ADAPTERS)
    quantized = rlx.lora(recipe, PROJECTIONS, rank=32)  # adapters are of whole groups, and are not quantized
    tables: Any = {"precision": {"weights": "int8"}}
    model = rlx.compile(quantized, DENSE, missing="init", key=0, program="train", profile=profile(**tables))
    assert sum(rlx.train.mask(model, ONLY_ADAPTERS).values()) == 8
    with pytest.raises(WeightError, match="11 weights are packed"):
        rlx.merge_lora(model)
    full = adapted(MIXED, precision={"weights": "f32"})
    assert full.params is not None and len(trainable_params(full.params)) == len(full.params)
    memory: Any = rlx.train.init(model, optax.adam(1.0)).optimizer
    assert set(memory[0].mu) == set(rlx.train.mask(model, ONLY_ADAPTERS)) != set(model.params or {})


@pytest.mark.slow
def test_on_a_mesh() -> None:
    """A step of a sharded state is that of one device, and its packed leaves keep values and sharding."""
    states = []
    for place in (None, mesh("fsdp tensor", 4)):
        model = rlx.compile(
            rlx.lora(rlx.recipe_for(BASE), PROJECTIONS, rank=4), MIXED, missing="init", key=0, program="train",
            mesh=place,
        )  # fmt: skip
        state = rlx.train.init(model, optax.sgd(1.0))
        placed = {name: leaf.sharding for name, leaf in state.params.items()}
        state, _ = rlx.train.make_step(model, optax.sgd(1.0))(state, TOKENS)
        assert {name: leaf.sharding for name, leaf in state.params.items()} == placed
        states.append(model.weights(state.params))
    for key, want in states[0].items():
        assert_close(states[1][key], np.asarray(want), tolerance=1e-5)


def test_a_packed_head_scores() -> None:
    """Heads in chunks of tokens, as scores compute them, read packed weights too."""
    texts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    one, other = (rlx.CausalLM(rlx.recipe_for(BASE), weights).score(texts) for weights in (MIXED, DENSE))
    for mine, want in zip(one, other, strict=True):
        np.testing.assert_allclose(mine.logprob, want.logprob, atol=1e-5)
