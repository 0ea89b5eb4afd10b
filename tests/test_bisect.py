"""`rlx.bisect` names the block of a planted fault, in five families, against our own model and transformers."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import RlxError
from rlx_jax.inspection.bisection import OTHER_QUANTITY, Bisection, ComparedValue
from rlx_jax.runtime.observed import observe
from tests.oracles import checkpoints
from tests.small import profile

TOKENS = np.random.default_rng(0).integers(3, 50, (2, 8)).astype(np.int32)
FILES = {
    "llama": "llama/gqa_plain_attnbias_v5", "gemma2": "gemma2/caps_v5", "qwen3": "qwen3/window_bias_v5",
    "mixtral": "mixtral/window_v5", "gpt2": "gpt2/bare_v4", "qwen3_5": "qwen3_5_text/tied_v5",
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 3}  # so that the layers repeat
BASE: dict[str, dict[str, Any]] = {"gemma2": SLIDING, "qwen3": SLIDING}
# Changes of config.json, or of the tensors in place, or of the recipe.
Edit = dict[str, Any] | Callable[[dict[str, np.ndarray]], None] | Callable[[Any], Any]


def changed(key: str, fn: Callable[[np.ndarray], Any]) -> Edit:
    """The tensor `key` passed through a function."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[key] = np.asarray(fn(tensors[key].astype(np.float32))).astype(tensors[key].dtype)

    return edit


def swapped(*keys: str) -> Edit:
    """Two tensors of one shape in each other's place."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        first, second = keys
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def one(array: np.ndarray) -> np.ndarray:
    """One weight changed: in the middle, by the size of a large weight."""
    array.flat[array.size // 2] += 0.5
    return array


def zero(array: np.ndarray) -> np.ndarray:
    return np.zeros_like(array)


def bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def swap_qk(array: np.ndarray) -> np.ndarray:
    """GPT-2's fused projection with queries and keys exchanged."""
    q, k, v = np.split(array, 3, axis=-1)
    return np.concatenate([k, q, v], axis=-1)


def in_bf16(recipe: Any) -> Any:
    """A block that returns bf16 numbers."""

    def rounded(emit: rlx.Emit, x: Any, inner: Any) -> Any:
        return emit.cast(emit.cast(inner(x), jnp.bfloat16), jnp.float32)

    return recipe.at("layers.1.mlp").wrap(rounded)


L = "model.layers"
ROPE = {"rope_theta": 500.0, "rope_type": "default"}
# The family, the fault, and the block that it is in.
FAULTS: dict[str, tuple[str, Edit, str]] = {
    "one weight": ("llama", changed(f"{L}.1.self_attn.v_proj.weight", one), "layers.1.self_attn.v_proj"),
    "eps": ("llama", {"rms_norm_eps": 1e-2}, "layers.0.input_layernorm"),
    "rope base": ("llama", {"rope_parameters": ROPE}, "rotary_emb"),
    "bias dropped": ("llama", changed(f"{L}.2.self_attn.o_proj.bias", zero), "layers.2.self_attn.o_proj"),
    "dtype of a block": ("llama", in_bf16, "layers.1.mlp"),
    "grouping": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}, "rotary_emb"),
    "head": ("llama", changed("lm_head.weight", one), "lm_head"),
    "softcap": ("gemma2", {"attn_logit_softcapping": 3.0}, "layers.0.self_attn"),
    "final softcap": ("gemma2", {"final_logit_softcapping": 0.7}, "logit_softcap"),
    "scale": ("gemma2", {"query_pre_attn_scalar": 7}, "layers.0.self_attn"),
    "window": ("gemma2", {"sliding_window": 4}, "layers.0.self_attn"),
    "norm offset": (
        "gemma2", changed(f"{L}.1.post_feedforward_layernorm.weight", lambda a: a + 1),
        "layers.1.post_feedforward_layernorm",
    ),
    "embedding": ("gemma2", changed("model.embed_tokens.weight", lambda a: a * 1.01), "embed_tokens"),
    "key norm": ("qwen3", changed(f"{L}.1.self_attn.k_norm.weight", one), "layers.1.self_attn.k_norm"),
    "k/v swapped": (
        "qwen3", swapped(f"{L}.2.self_attn.k_proj.weight", f"{L}.2.self_attn.v_proj.weight"),
        "layers.2.self_attn.k_proj",
    ),
    "mask of one layer": (
        "qwen3", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "layers.1.self_attn"
    ),
    "window of queries": ("qwen3", {"sliding_window": 5}, "layers.0.self_attn"),
    "query bias dropped": ("qwen3", changed(f"{L}.1.self_attn.q_proj.bias", zero), "layers.1.self_attn.q_proj"),
    "final norm": ("qwen3", changed("model.norm.weight", one), "norm"),
    "router": ("mixtral", changed(f"{L}.1.block_sparse_moe.gate.weight", one), "layers.1.mlp.router"),
    "one expert": ("mixtral", changed(f"{L}.0.block_sparse_moe.experts.2.w2.weight", one), "layers.0.mlp.experts"),
    "fewer experts": ("mixtral", {"num_experts_per_tok": 1}, "layers.0.mlp.router"),
    "gate/up swapped": (
        "mixtral", swapped(*(f"{L}.1.block_sparse_moe.experts.0.{w}.weight" for w in ("w1", "w3"))),
        "layers.1.mlp.experts",
    ),
    "other rope base": ("mixtral", {"rope_parameters": ROPE}, "rotary_emb"),
    "heads": ("gpt2", {"n_head": 5}, "layers.0.attn"),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layers.1.attn"),
    "q/k swapped": ("gpt2", changed("h.1.attn.c_attn.weight", swap_qk), "layers.1.attn.c_attn.q"),
    "relu": ("gpt2", {"activation_function": "relu"}, "layers.0.mlp.act"),
    "dtype": ("gpt2", changed("h.1.mlp.c_fc.weight", bf16), "layers.1.mlp.c_fc"),
    "other eps": ("gpt2", {"layer_norm_epsilon": 1e-3}, "layers.0.ln_1"),
    "decay": ("qwen3_5", changed(f"{L}.1.linear_attn.A_log", lambda a: a + 0.1), "layers.1.linear_attn"),
    "convolution": ("qwen3_5", changed(f"{L}.2.linear_attn.conv1d.weight", one), "layers.2.linear_attn.conv1d"),
    "gated norm": ("qwen3_5", changed(f"{L}.0.linear_attn.norm.weight", one), "layers.0.linear_attn.norm"),
}  # fmt: skip


def loaded(path: Path, roll: str = "auto", edit: Any = None) -> rlx.CausalLM:
    recipe = None if edit is None else edit(rlx.recipe_for(path))
    with warnings.catch_warnings():  # some faults, as in one mask, are of a layer that then repeats no other
        warnings.filterwarnings("ignore", "(llama|gemma|qwen3|gpt2): layers.roll = 'scan' has no effect")
        lm = rlx.load(path, recipe=recipe, profile=profile(layers={"roll": roll}))
    assert isinstance(lm, rlx.CausalLM)
    return lm


@functools.cache
def right(family: str, directory: Path, roll: str = "auto") -> rlx.CausalLM:
    """The model without a fault."""
    path = directory / f"{family}-{roll}"
    return loaded(checkpoints.edited(checkpoints.FIXTURES / FILES[family], path, BASE.get(family, {})), roll)


def wrong(fault: str, directory: Path, roll: str = "auto") -> rlx.CausalLM:
    """The model with a fault."""
    family, edit, _ = FAULTS[fault]
    changes = BASE.get(family, {}) | (edit if isinstance(edit, dict) else {})
    path = checkpoints.edited(checkpoints.FIXTURES / FILES[family], directory / "model", changes)
    if edit is in_bf16:
        return loaded(path, roll, edit)
    if not isinstance(edit, dict):
        checkpoints.edit_tensors(path, edit)
    return loaded(path, roll)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models without faults are."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(("roll", "parameter", "block"), [
    ("scan", f"{L}.{{0..2}}.self_attn.{{q,k,v}}_proj.weight", "layers.1.self_attn.v_proj"),
    pytest.param("unroll", "model.norm.weight", "norm", marks=pytest.mark.slow),
])  # fmt: skip
def test_another_parameter(roll: str, parameter: str, block: str, references: Path) -> None:
    """Parameters that replace those of the file are the ones that are compared."""
    model = right("llama", references, roll).model
    params = dict(model.params or {})
    params[parameter] = params[parameter].at[(1, -1, 3) if params[parameter].ndim == 3 else 3].add(0.5)
    found = rlx.bisect(model.replace(params), model, TOKENS)
    assert found.first == block and found.introduced == (block,), str(found)
    assert rlx.bisect(model, model, input_ids=TOKENS).first is None


@pytest.fixture(scope="module")
def values(references: Path) -> dict[str, np.ndarray]:
    """The values of the model without a fault, by block path."""
    return observe(right("llama", references, "unroll").model, (TOKENS,), {}, "forward")[1]


def nan_on_one_side(array: np.ndarray) -> np.ndarray:
    return np.where(np.arange(array.size).reshape(array.shape) == 3, np.nan, array)


LAYER_OUTPUTS = ("layers.0", "layers.1", "layers.2", "logits")


@pytest.mark.parametrize(("kept", "edits", "block", "text"), [
    (None, {"layers.1.mlp.up_proj": lambda a: a * 1.01}, "layers.1.mlp.up_proj", "9.9e-03"),
    (None, {"layers.2.mlp": lambda a: a[..., :-1]}, "layers.2.mlp.down_proj", "[2, 8, 45] in the model, [2, 8, 44] in"),
    (None, {"norm": lambda a: a + 1j}, "norm", "norm is the first block"),
    (None, {"layers.1": nan_on_one_side}, "layers.1", "not finite on one side alone: 1 of 720 entries"),
    (None, {"layers.0.self_attn.q_proj": lambda a: a.reshape(2, 8, 9, 4)}, None, "all 52 values agree"),
    (LAYER_OUTPUTS, {"layers.1": lambda a: a + 1, "layers.2": lambda a: a + 1}, "layers.1", "layers.1 is the first"),
    (("logits", "norm", "extra"), {"logits": lambda a: a + 1}, "lm_head", "only in the reference: 'extra'"),
])  # fmt: skip
def test_arrays_by_path(
    kept: Any, edits: Any, block: str | None, text: str, values: dict[str, np.ndarray], references: Path
) -> None:
    arrays = {name: values.get(name, np.ones(2)) for name in kept or values}
    arrays |= {name: edit(arrays[name]) for name, edit in edits.items()}
    found = rlx.bisect(right("llama", references, "unroll"), arrays, TOKENS)
    assert found.first == block and text in f"{found}\n{found.table}", str(found)


def test_values_that_are_nan_on_both_sides(references: Path) -> None:
    """They agree, and the result says from where on nothing is compared."""
    model = right("llama", references, "unroll").model
    assert model.params is not None
    key = next(key for key in model.params if "layers.0.mlp.down_proj" in key)
    broken = model.replace(model.params | {key: model.params[key] * jnp.nan})
    found = rlx.bisect(broken, broken, TOKENS)
    assert found.first is None and "From layers.0.mlp.down_proj on, entries not finite on both sides" in found.summary


def test_a_function_of_the_inputs(values: dict[str, np.ndarray], references: Path) -> None:
    lm = right("llama", references, "unroll")
    assert rlx.bisect(lm, lambda tokens: jnp.asarray(values["logits"]), TOKENS).first is None
    assert rlx.bisect(lm, lambda tokens: {"norm": values["norm"] * 1.001}, TOKENS).first == "llama"  # all that precedes
    assert rlx.bisect(lm, lambda tokens: {"norm": values["norm"] * 1.001}, TOKENS, tolerance=0.01).first is None


def test_decoding(references: Path) -> None:
    """A cache of codes rounds keys and values in decoding."""
    lm = right("llama", references, "unroll")
    coded = rlx.load(references / "llama-unroll", profile=profile(precision={"kv": "int8"}))
    assert rlx.bisect(coded, lm, TOKENS, program="extend").first == "layers.0.self_attn"


@pytest.mark.slow
def test_dtypes(tmp_path: Path) -> None:
    """bf16 is within its tolerance, and not within that of f32; so is a packed model, and its decoded weights agree."""
    path = checkpoints.copy(checkpoints.FIXTURES / "llama" / "bf16_gqa_tied_v5", tmp_path / "model")
    checkpoints.edit_tensors(path, lambda tensors: {key: array.astype(np.float32) for key, array in tensors.items()})
    lm, packed = rlx.load(path), rlx.load(path, profile=profile(precision={"weights": "int8"}))
    assert rlx.bisect(packed, lm, TOKENS).first == "embed_tokens"
    assert rlx.bisect(packed, lm, TOKENS, tolerance=0.1).first is None
    assert rlx.bisect(packed, rlx.CausalLM(rlx.recipe_for(path), packed.model.weights()), TOKENS).first is None
    narrow = rlx.load(path, profile=profile(precision={"compute": "bf16"}))
    assert rlx.bisect(narrow, lm, TOKENS).first is None
    assert rlx.bisect(narrow, lm, TOKENS, tolerance=1e-5).first is not None


def test_padding_is_not_compared() -> None:
    """An encoder with a mask against itself with other tokens at padding."""
    encoder = rlx.load(checkpoints.FIXTURES / "bert" / "bare_v5")
    mask = np.array([[1] * 8, [1] * 5 + [0] * 3], np.int32)
    other = observe(encoder.model, (np.where(mask, TOKENS, 7),), {"attention_mask": mask}, "forward")[1]
    assert rlx.bisect(encoder, other, TOKENS, attention_mask=mask).first is None
    assert rlx.bisect(encoder, other, TOKENS * mask + 1, attention_mask=mask).first == "embed_tokens"


def test_table_and_picture(values: dict[str, np.ndarray], references: Path) -> None:
    arrays = values | {"layers.1": values["layers.1"] * 1.5, "<b>": np.ones(2)}
    found = rlx.bisect(right("llama", references, "unroll"), arrays, TOKENS)
    page = found._repr_html_()
    assert "<svg" in page and "&lt;b&gt;" in page and "<b>" not in page and "http" not in page
    assert len(found.table.rows) == len(found.values) and "█" in str(found) and found.summary in str(found)
    assert [v.name for v in found.values if v.introduced] == ["layers.1"]


def test_values_that_do_not_count_are_named() -> None:
    values = (ComparedValue("k", "k", 0.5, 1e-5, 1.0, note=f"{OTHER_QUANTITY}: …"), ComparedValue("v", "v", 0, 1e-5, 1))
    assert "1 of 2 values agree" in (text := Bisection("m", "r", "forward", values).summary)
    assert text.endswith("another quantity there: 'k'")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "program"), [*zip(FILES, ("prefill", "extend") * 3, strict=True)])
def test_programs_agree(family: str, program: str, references: Path) -> None:
    lm = right(family, references)
    found = rlx.bisect(lm, lm, TOKENS, program=program)
    assert found.first is None and not found.not_in_reference, str(found)


# Faults that transformers shows one level further out: its router returns as many experts, its convolution is no call.
OUTER = {"fewer experts": "layers.0.mlp", "convolution": "layers.2.linear_attn"}
# Every third fault, in one form of its layers; all of them are found against transformers, and in both forms by a soak.
ROLLED = [
    pytest.param(fault, roll, marks=pytest.mark.soak if j or (i % 3 and fault not in OUTER) else pytest.mark.slow)
    for i, fault in enumerate(FAULTS) for j, roll in enumerate(("scan", "unroll")[:: (-1) ** i])
]  # fmt: skip


@pytest.mark.parametrize(("fault", "roll"), ROLLED)
def test_planted_faults(fault: str, roll: str, tmp_path: Path, references: Path) -> None:
    family, _, block = FAULTS[fault]
    found = rlx.bisect(wrong(fault, tmp_path, roll), right(family, references, roll), TOKENS)
    assert found.first == block, str(found)


@functools.cache
def transformers_model(family: str, directory: Path) -> Any:
    from tests.oracles import hugging_face

    right(family, directory)
    return hugging_face.load(directory / f"{family}-auto", "AutoModelForCausalLM")


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_against_transformers(fault: str, tmp_path: Path, references: Path) -> None:
    family, _, block = FAULTS[fault]
    found = rlx.bisect(wrong(fault, tmp_path), transformers_model(family, references), TOKENS)
    assert found.first == OUTER.get(fault, block), str(found)


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("family", FILES)
def test_transformers_agrees(family: str, references: Path) -> None:
    found = rlx.bisect(right(family, references), transformers_model(family, references), TOKENS)
    assert found.first is None and len(found.values) > 0.8 * len((*found.values, *found.not_in_reference)), str(found)


@pytest.mark.oracle(warnings="error")
def test_an_encoder_against_transformers(tmp_path: Path) -> None:
    """With padding on the right, and a bias dropped."""
    from tests.oracles import hugging_face

    path = checkpoints.copy(checkpoints.FIXTURES / "bert" / "bare_v5", tmp_path / "bert")
    reference = hugging_face.load(path, "AutoModel")
    mask = np.array([[1] * 8, [1] * 5 + [0] * 3], np.int32)
    assert rlx.bisect(rlx.load(path), reference, TOKENS, attention_mask=mask).first is None
    with pytest.raises(RlxError, match="BertModel is in training mode"):
        rlx.bisect(rlx.load(path), reference.train(), TOKENS, attention_mask=mask)
    reference.eval()
    checkpoints.edit_tensors(path, changed("encoder.layer.1.intermediate.dense.bias", zero))  # type: ignore[arg-type]
    found = rlx.bisect(rlx.load(path), reference, TOKENS, attention_mask=mask)
    assert found.first == "layers.1.intermediate.dense", str(found)
