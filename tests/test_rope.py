"""Rotary embeddings of several coordinates, written with the builders, against float64 formulas."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import ShapeError
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.trace.frequencies import axial_frequencies
from tests.oracles import hugging_face, numpy_reference
from tests.oracles import op_formulas as formula
from tests.oracles.comparing import assert_close

RNG = np.random.default_rng(7)


def module(build: Any, **shapes: Any) -> Any:
    """A compiled module of one output, whose inputs are `shapes`."""
    made = rlx.GraphModule.define(
        "m", lambda m: build(m, *(m.input(n, s, "int32" if n == "at" else "float32") for n, s in shapes.items()))
    )
    return rlx.compile(made)


@pytest.mark.parametrize(("end_x", "end_y", "repeat", "theta"), [(3, 2, 1, 10000.0), (1, 5, 2, 50.0)])
def test_axial_rope_2d(end_x: int, end_y: int, repeat: int, theta: float) -> None:
    """Cell by cell: interleaved pairs, the column of a cell in the first half of a head, its row in the second."""
    dim, tokens = 8, end_x * end_y * repeat
    x = RNG.standard_normal((2, tokens, 3 * dim)).astype(np.float32)
    run = module(
        lambda m, x: m.axial_rope_2d(
            x, end_x=end_x, end_y=end_y, head_dim=dim, theta=theta, repeat_factor=repeat
        ),
        x=x.shape,
    )  # fmt: skip
    want = x.astype(np.float64)
    for t, head, pair in np.ndindex(tokens, 3, dim // 2):
        cell, c = t // repeat, pair % (dim // 4)
        place = cell % end_x if pair < dim // 4 else cell // end_x
        angle = place * theta ** (-4 * c / dim)
        at = head * dim + 2 * pair
        a, b = x[:, t, at].astype(np.float64), x[:, t, at + 1].astype(np.float64)
        want[:, t, at] = a * np.cos(angle) - b * np.sin(angle)
        want[:, t, at + 1] = b * np.cos(angle) + a * np.sin(angle)
    assert_close(run(x), want)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_four_coordinates(style: str) -> None:
    """As image models give them: each coordinate turns columns of its own, of its own width; positions for each row."""
    widths, dim = (4, 2, 6, 4), 16
    x = RNG.standard_normal((2, 5, 2 * dim)).astype(np.float32)
    at = RNG.integers(0, 40, (2, 5, 4)).astype(np.int32)
    inv_freq, axes = axial_frequencies(widths, 2000.0)

    def build(m: Any, x: Any, at: Any) -> Any:
        return m.rope(x, *m.rope_angles(at, inv_freq, axes=axes), head_dim=dim, style=style)

    found = [2000.0 ** (-2 * i / w) for w in widths for i in range(w // 2)]
    coordinates = [a for a, w in enumerate(widths) for _ in range(w // 2)]
    tables = formula.rope_table(at, found, axes=coordinates)
    want = formula.rope(x.astype(np.float64), *tables, head_dim=dim, n_rot=dim, style=style)
    assert_close(module(build, x=("batch", "seq", 2 * dim), at=("batch", "seq", 4))(x, at), want)


SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 640,
}  # fmt: skip
DELTA = {"layer_types": ["full_attention", "linear_attention"], "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (rlx.Llama32Flow, {}), "mistral": (rlx.MistralFlow, {}), "mixtral": (rlx.MixtralFlow, {}),
    "qwen2": (rlx.Qwen2Flow, {}), "qwen3": (rlx.Qwen3Flow, {}), "qwen3_moe": (rlx.Qwen3MoeFlow, {}),
    "qwen3_5_text": (rlx.Qwen35Flow, DELTA), "gemma": (rlx.GemmaFlow, {}), "gemma2": (rlx.GemmaFlow, {}),
    "gemma3_text": (rlx.GemmaFlow, {}), "gpt_oss": (rlx.GptOssFlow, {}),
}  # fmt: skip
YARN: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 160},
    "between whole numbers": {"factor": 32.0, "original_max_position_embeddings": 96, "truncate": False},
    "edges": {"factor": 2.5, "original_max_position_embeddings": 64, "beta_fast": 9.0, "beta_slow": 2.0},
    "an attention factor": {"factor": 8.0, "original_max_position_embeddings": 80, "attention_factor": 1.25},
    "two scales": {"factor": 8.0, "original_max_position_embeddings": 80, "mscale": 0.7, "mscale_all_dim": 1.4},
    "the model's own context": {"factor": 4.0},
    "one frequency is the edge": {"factor": 4.0, "original_max_position_embeddings": 4},
}  # fmt: skip


def with_yarn(family: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A config whose rope is YaRN's; of Gemma 3 in the layers that read all keys."""
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 5000.0} | parameters
    if family == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    own = FAMILIES[family][1]
    if family == "qwen3_5_text":
        rope = rope | {"partial_rotary_factor": own["partial_rotary_factor"]}
        own = {k: v for k, v in own.items() if k != "partial_rotary_factor"}
    return SIZES | own | {"model_type": family, "rope_parameters": rope}


def width(family: str) -> int:
    return 12 if family == "qwen3_5_text" else 24


@dataclass(frozen=True)
class PartialConfig(DecoderConfig):
    """A family with a rope over a part of each head: half of its columns if the config does not have the fraction."""

    defaults = {"partial_rotary": 0.5}


@pytest.mark.parametrize(("fields", "columns"), [
    ({}, 12), ({"partial_rotary_factor": 1.0}, 24), ({"partial_rotary_factor": 0.25}, 6),
    ({"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}, 6),
])  # fmt: skip
def test_partial_rotary_of_a_family(fields: dict[str, Any], columns: int) -> None:
    """`defaults` of a config is enough for a family that rotates a part of each head, such as Phi 3."""
    config = PartialConfig.from_hf(SIZES | fields)
    want = 10000.0 ** (-np.arange(0, columns, 2) / columns)
    np.testing.assert_allclose(config.inv_freq, want, rtol=1e-6)
    assert config.layer_spec(0).n_rot == (None if columns == 24 else columns)


UNREAD = ("gemma3_text", "between whole numbers")
"""What the reference does not read is refused by name: see `tests/test_gemma.py`."""


@pytest.mark.parametrize("family", FAMILIES)
def test_yarn(family: str) -> None:
    """Of every family that has it, in the spelling of transformers 5 and of 4, against the formula."""
    for kind in YARN:
        if (family, kind) != UNREAD:
            check_yarn(family, kind)


def check_yarn(family: str, kind: str) -> None:
    said = {"original_max_position_embeddings": 640} | YARN[kind] | {"rope_type": "yarn"}
    fields = with_yarn(family, YARN[kind])
    config = FAMILIES[family][0].config_type.from_hf(fields)
    want = numpy_reference.scaled_frequencies(width(family), 5000.0, said)
    np.testing.assert_allclose(config.inv_freq, want, rtol=2e-6)
    assert config.rope_factor == pytest.approx(numpy_reference.rope_factor({"rope_parameters": said}))
    if family not in ("gemma3_text", "qwen3_5_text"):  # transformers 4 did not write these so
        old = {k: v for k, v in fields["rope_parameters"].items() if k != "rope_theta"}
        fields = {k: v for k, v in fields.items() if k != "rope_parameters"}
        assert FAMILIES[family][0].config_type.from_hf(fields | {"rope_theta": 5000.0, "rope_scaling": old}) == config


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_live_yarn(family: str) -> None:
    """As `transformers` computes it for that family's config."""
    for kind in YARN:
        if family == "gemma3_text" and kind in ("between whole numbers", "the model's own context"):
            continue  # which that class does not read
        fields = with_yarn(family, YARN[kind])
        own = FAMILIES[family][0].config_type.from_hf(fields)
        layer = "full_attention" if family == "gemma3_text" else None
        without = {name: value for name, value in fields.items() if name != "model_type"}
        freqs, factor = hugging_face.yarn(hugging_face.config_of(family, without), layer)
        np.testing.assert_allclose(own.inv_freq, freqs, rtol=1e-6)
        assert own.rope_factor == pytest.approx(factor)


def test_factors_of_tables() -> None:
    """YaRN's factor is in cos and sin; given tables have theirs, and a factor of null is that of the two contexts."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 3, 4)).stage(blocks.RopeTables((0.5, 0.25), factor=1.5))

    def cosines(emit: Any, x: Any) -> Any:
        return emit.state.rope_cos

    flow = flow.custom(cosines)
    want = 1.5 * np.cos(np.arange(3)[:, None] * np.array([0.5, 0.25]))
    assert_close(rlx.compile(flow)(np.zeros((1, 3, 4), np.float32)), want[None])
    with pytest.raises(ShapeError, match="inv_freq"):
        blocks.RopeTables(cos_data=np.ones((3, 2)), sin_data=np.ones((3, 2)), factor=2.0)
    null = {"factor": None, "original_max_position_embeddings": 160}
    read = rlx.Llama32Flow.config_type.from_hf
    assert read(with_yarn("llama", null)) == read(with_yarn("llama", YARN["plain"]))
