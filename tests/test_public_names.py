"""Every name of the public interface that is promised to stay: the top level, `ModelFlow`, and the spec's stages."""

import subprocess
import sys
from typing import Any, assert_type

import pytest

import rlx_jax as rlx
from rlx_jax.models.hooks import Recipe
from tests.oracles.checkpoints import FIXTURES

FLOW = """
new input with_profile profile profile_file profile_prefill profile_decode profile_encoder stage raw_stage raw_stages
sequence output outputs hidden_states with_extra_outputs with_extensions from_recipe build build_with embed token_embed
gather_from_input gather_add rope_tables zero_beta zero_beta_named bind_decode_inputs attn_mask_ones repeat_layers
named_layer layer llama_prefill_layer llama_prefill_layer_composed llama_decoder_layer llama_decode_layer llama_kv_tap
linear residual_save residual_add swiglu swiglu_hf_mlp self_attn_prefill gdn_scan layer_norm rms_norm final_norm
gelu_ffn bert_encoder_layer repeat_bert_layers repeat_nomic_layers repeat_dinov2_layers repeat_vision_layers
repeat_siglip_layers cls_token_pool gather_last_token_dynamic gather_last_token_at lm_head store_stream load_stream
bind_inputs_to_streams dual_stream plugin plugin_named custom custom_named when patch
""".split()
RECIPES = """
BertFlow Dinov2Flow Flux2Flow GemmaFlow Llama32Flow MPNetFlow MistralFlow NomicFlow NomicVisionFlow Qwen2Flow Qwen35Flow
Qwen3Flow Qwen3MoeFlow SiglipFlow ViTFlow
""".split()
TOP = """
BuiltModel CausalLM CompileProfile DualEncoder Emit Encoder FlowValue Graph GraphModule GraphStage LayerStack ModelFlow
Packed Plugin RlxError Sampler VisionEncoder blocks compile errors from_pretrained init load lora losses open_weights
recipe_for save
""".split()


def test_builders() -> None:
    """They are there, and few other names."""
    public = {name for name in dir(rlx.ModelFlow.new("m")) if not name.startswith("_")}
    assert set(FLOW) <= public and len(public - set(FLOW)) <= 10, public ^ set(FLOW)


def test_the_top_level() -> None:
    assert set(TOP) <= set(rlx.__all__) and not set(RECIPES) & set(rlx.__all__)
    for name in RECIPES:
        assert getattr(rlx, name) is getattr(rlx.models, name)
    for name, meant in (("complie", "compile"), ("LlamaFlow", "Llama32Flow")):
        with pytest.raises(AttributeError, match=f"'{name}'; did you mean '{meant}'"):
            getattr(rlx, name)
    with pytest.raises(TypeError, match=r"Sampler\(\) .*'temp'.*'temperature'"):
        rlx.Sampler(temp=1.0)  # type: ignore[call-arg]


def test_types() -> None:
    """What mypy infers for code of users, and that `expect` is checked."""
    path = FIXTURES / "llama" / "gqa_tied_llama3_v5"
    lm = rlx.load(path)
    assert_type(lm, rlx.CausalLM)
    assert_type(lm.generate("Hello", max_new_tokens=1), str)
    assert_type(lm.generate([[1], [2]], max_new_tokens=1), list[list[int]])
    assert_type(lm.score([("a", "b")]), list[rlx.Score])
    assert_type(rlx.load(FIXTURES / "bert" / "bare_v5", expect=rlx.Encoder), rlx.Encoder)
    assert_type(rlx.recipe_for(path), Recipe[Any])
    assert_type(rlx.recipe_for(path, expect=rlx.Llama32Flow), rlx.Llama32Flow)
    for function, other in ((rlx.load, rlx.Encoder), (rlx.recipe_for, rlx.BertFlow)):
        with pytest.raises(rlx.errors.RequestError, match=f"of class .*; expected {other.__name__}"):
            function(path, expect=other)


def test_a_module_is_imported_before_all_names() -> None:
    """Its own imports from the package do not import it again."""
    forget = "[sys.modules.pop(n) for n in [*sys.modules] if 'rlx_jax' in n]"
    names = ("models.llama", "weights.save", "trace.emit", "models.siglip")
    code = "\n".join(["import sys", *(f"import rlx_jax.{name}\n{forget}" for name in names)])
    subprocess.run([sys.executable, "-c", code], check=True)
