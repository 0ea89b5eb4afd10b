"""A decoder family is its differences: one written here by `docs/adding-a-family.md`, and what the record holds."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import UnsupportedError
from rlx_jax.models import families, gemma, llama
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow, weight_specs
from rlx_jax.models.decoder_config import DecoderConfig, Ends, layer_of, plain_fields
from tests.oracles.comparing import assert_close
from tests.oracles.decoder_layer import layer_reference
from tests.oracles.numpy_reference import Array, Weights, capped, rms_norm


@dataclass(frozen=True)
class ToyConfig(DecoderConfig):
    """Every second layer reads the last `sliding_window` keys, and turns them by a base of its own."""

    sliding_window: int | None = 3
    cap: float = 5.0

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **plain_fields(c, max_positions=64),
            sliding_window=c.integer_or_null("sliding_window", cls.sliding_window),
            cap=c.real("cap", cls.cap),
        )

    def layer_spec(self, index: int) -> blocks.LayerSpec:
        slides = index % 2 == 1
        return layer_of(
            self,
            window=self.sliding_window if slides else None,
            rope="local" if slides else "",
            score_scale=0.3,
            attn_logit_softcap=self.cap,
            qkv_bias=True,
            qk_norm="heads",
            mlp_bias=True,
            norms=blocks.LayerNorms(
                before_attention=None,
                after_attention="post_attention_layernorm",
                before_mlp=None,
                after_mlp="post_feedforward_layernorm",
            ),
        )

    def ends(self) -> Ends:
        return Ends(
            rope=(blocks.RopeTables.theta(self.head_dim, 50.0, "local"),), logits=(blocks.LogitSoftcap(self.cap),)
        )


@dataclass(frozen=True)
class ToyFlow(DecoderFlow[ToyConfig]):
    """The recipe of Toy: see `DecoderFlow`."""

    name: str = "toy"

    config_type = ToyConfig


TOY = families.Family.decoder(ToyFlow, "ToyForCausalLM")


H, N, K, D, F, V, LAYERS = 10, 4, 2, 6, 14, 23, 3
CONFIG = {
    "model_type": "toy", "architectures": ["ToyForCausalLM"], "vocab_size": V, "hidden_size": H, "head_dim": D,
    "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": N, "num_key_value_heads": K,
    "rms_norm_eps": 1e-4, "sliding_window": 3, "rope_theta": 700.0, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, V, (2, 7)).astype(np.int32)


def toy_row(w: Weights, ids: Any) -> Array:
    """Logits `[S, V]` of a row in float64."""
    x, config = w["model.embed_tokens.weight"][np.asarray(ids)], ToyConfig.from_hf(CONFIG)
    for i in range(LAYERS):
        theta, p = 50.0 if i % 2 else 700.0, f"model.layers.{i}"
        (x,) = layer_reference(config.layer_spec(i), w, x[None], theta=theta, prefix=p)
    return capped(rms_norm(x, w["model.norm.weight"], 1e-4) @ w["lm_head.weight"].T, 5.0)


def drawn(specs: Any) -> dict[str, np.ndarray]:
    """Weights of these shapes; no norm is 1 and no bias 0."""
    rng = np.random.default_rng(0)
    return {
        key: (rng.uniform(0.5, 1.5, s.shape) if key.endswith("norm.weight") else rng.normal(0, 0.5, s.shape)).astype(
            "f4"
        )
        for key, s in specs.items()
    }


def test_a_row_in_the_table_is_all_that_loading_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, cached decode behind the window's edge, and every weight read, against the formula."""
    weights = drawn(weight_specs(ToyConfig.from_hf(CONFIG)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedError, match="model_type 'toy'.* is not built; the nearest family is .*; known are llama, mistral"
    ):
        rlx.load(tmp_path)
    monkeypatch.setitem(families.FAMILIES, "toy", TOY)
    lm = rlx.load(tmp_path)
    wide = {key: value.astype(np.float64) for key, value in weights.items()}
    assert_close(lm.logits(TOKENS), np.stack([toy_row(wide, row) for row in TOKENS]).astype("f4"))
    ids = TOKENS[0].tolist()
    for _ in range(5):
        ids.append(int(np.argmax(toy_row(wide, ids)[-1])))
    assert lm.generate([TOKENS[0].tolist()], max_new_tokens=5) == [ids[7:]]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["ToyModel"]}))
    with pytest.raises(UnsupportedError, match="of toy there are ToyForCausalLM"):
        rlx.load(tmp_path)


@pytest.mark.slow
def test_its_layers_take_hooks() -> None:
    """`ctx.spec` is the record: a changed one makes another layer."""
    recipe = ToyFlow.for_prefill(CONFIG, 2, 7)
    open_wide = recipe.layer(lambda ctx: blocks.decoder_layer(ctx.index, replace(ctx.spec, mask="causal")))
    wide = replace(recipe, config=replace(recipe.config, sliding_window=None))
    weights = drawn(recipe.shapes())
    stock, changed, meant = (np.asarray(rlx.compile(r, weights)(TOKENS)) for r in (recipe, open_wide, wide))
    assert_close(changed, meant, tolerance=0)
    assert np.abs(changed - stock).max() > 1e-3


RECIPES: dict[str, type[DecoderFlow[Any]]] = {
    "llama": llama.Llama32Flow, "mistral": llama.MistralFlow, "qwen2": llama.Qwen2Flow, "qwen3": llama.Qwen3Flow,
    "gemma": gemma.GemmaFlow, "gemma2": gemma.GemmaFlow, "gemma3_text": gemma.GemmaFlow, "toy": ToyFlow,
}  # fmt: skip


def recipe_of(kind: str) -> Any:
    """A family with the sizes above."""
    config = {k: v for k, v in CONFIG.items() if k not in ("architectures", "sliding_window")} | {"model_type": kind}
    return RECIPES[kind].for_prefill(config)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_is_a_value_whose_flow_reads_its_weights(kind: str) -> None:
    """It pickles, compares, and names one class of config."""
    recipe = recipe_of(kind)
    assert pickle.loads(pickle.dumps(recipe)) == recipe == replace(recipe) != replace(recipe, batch=3)
    assert type(recipe.config) is recipe.config_type and recipe == type(recipe).for_prefill(recipe.config)
    assert set(recipe.assemble().build().keys_read) == set(recipe.shapes()) == set(weight_specs(recipe.config))


def test_names_of_the_specification() -> None:
    """They are LayerSpecs with other defaults, and `dataclasses.replace` takes their own fields too."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    llama: Any = blocks.LlamaDecoderSpec(**sizes, kv_group_size=2)
    assert (llama.eps, llama.kv_group_size, llama.attention_bias, llama.use_custom_mask) == (1e-5, 2, False, False)
    biased = replace(llama, attention_bias=True)
    assert (biased.attention_bias, biased.qkv_bias, biased.output_bias) == (True, True, True)
    qwen: Any = blocks.Qwen3DecoderSpec(**sizes)
    qwen = replace(qwen, attention_bias=True, batch=3)
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.output_bias) == ("heads", True, False)
    assert replace(qwen, qk_norm=False, seq="rows").hidden_shape == (3, "rows", None)
    gemma_layer: Any = blocks.GemmaDecodeLayerSpec(style=blocks.GemmaStyle.GEMMA2, **sizes, score_scale=0.5)
    assert gemma_layer.zero_centred and replace(gemma_layer, score_scale=0.25).norms == blocks.LayerNorms.around_both()
    attention: Any = blocks.SelfAttnPrefillSpec("a", "b", "c", 4, 6, 2, "sliding:3", sinks_key="s")
    assert [attention.weight(name) for name in "qkv"] == ["a", "b", "c"] and attention.sinks
    assert replace(attention, k_key="d").keys.k == "d" and attention.under("p").keys.q == "a"
