"""The NumPy transcripts of recurrent layers and of the MTP head compute what transformers does."""

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

from tests.oracles import gated_delta, mamba2, mtp_head
from tests.oracles.comparing import assert_close
from tests.oracles.numpy_reference import Array

pytestmark = pytest.mark.oracle(warnings="error")

QWEN: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 22, "intermediate_size": 18, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
QWEN_CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head each": {"linear_num_value_heads": 2, "linear_key_head_dim": 5, "linear_conv_kernel_dim": 4},
    "one key head": {"linear_num_key_heads": 1, "linear_value_head_dim": 7},
}
MAMBA: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 15, "num_heads": 6, "head_dim": 5, "state_size": 7, "n_groups": 3, "expand": 2,
    "conv_kernel": 3, "num_hidden_layers": 1, "chunk_size": 4, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
MAMBA_CASES: dict[str, dict[str, Any]] = {
    "groups": {},
    "one group, biases, limits": {"n_groups": 1, "use_bias": True, "time_step_limit": (0.4, 1.3)},
    "a group a head, no bias of the convolution": {"n_groups": 6, "use_conv_bias": False, "conv_kernel": 4},
}


def drawn(module: Any, seed: int) -> dict[str, Array]:
    """Puts numbers that show a mistake into a module, and returns them under their keys, float64."""
    torch = importlib.import_module("torch")
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.from_numpy(rng.normal(0, 0.5, p.shape).astype(np.float32)))
    return {key: p.detach().numpy().astype(np.float64) for key, p in module.named_parameters(prefix="at")}


def hidden(seed: int, *shape: int) -> Array:
    """Random hidden states whose numbers float32 can hold."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(np.float64)


def run(module: Any, x: Array, **more: Any) -> Any:
    """A module's result for x, as an array; `cache` was called `cache_params` before transformers 5.24."""
    torch = importlib.import_module("torch")
    if "cache_params" in inspect.signature(module.forward).parameters and "cache" in more:
        more["cache_params"] = more.pop("cache")
    with torch.no_grad():
        out = module(torch.from_numpy(x.astype(np.float32)), **more)
    return (out[0] if isinstance(out, tuple) else out).numpy()


@pytest.mark.parametrize("case", QWEN_CASES)
def test_a_gated_deltanet_layer(case: str) -> None:
    """A prefill with padding before one row, then two tokens one by one from the cache, and its state and tail."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    config = transformers.Qwen3_5TextConfig(**QWEN | QWEN_CASES[case])
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0).eval()
    w, fields = drawn(layer, 1), config.to_dict()
    x, keep = hidden(2, 2, 9, config.hidden_size), np.ones((2, 9))
    keep[1, :3] = 0
    cache = transformers.DynamicCache(config=config)
    got = run(layer, x[:, :7], cache=cache, attention_mask=torch.from_numpy(keep[:, :7]) != 0)
    want, tail, state = gated_delta.gdn_layer(fields, w, "at", x[:, :7], keep=keep[:, :7])
    assert_close(got, want)
    assert_close(cache.get_recurrent_state(0).numpy(), state)
    assert_close(cache.get_conv_state(0).numpy()[:, :, -tail.shape[1] :], tail.transpose(0, 2, 1))
    for t in (7, 8):
        want, tail, state = gated_delta.gdn_layer(fields, w, "at", x[:, t : t + 1], tail, state)
        assert_close(run(layer, x[:, t : t + 1], cache=cache), want)
    assert_close(run(layer, x), gated_delta.gdn_layer(fields, w, "at", x)[0])


@pytest.mark.parametrize("case", MAMBA_CASES)
def test_a_mamba2_mixer(case: str) -> None:
    """A prefill with padding before one row, its state and tail, and a token from the cache, which reads no limits."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    modeling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    config = transformers.Mamba2Config(**MAMBA | MAMBA_CASES[case])
    layer = modeling.Mamba2Mixer(config, 0).eval()
    w, fields = drawn(layer, 3), config.to_dict()
    x, keep = hidden(4, 2, 9, config.hidden_size), np.ones((2, 9))
    keep[1, :3] = 0
    cache = transformers.DynamicCache(config=config)
    got = run(layer, x[:, :8], cache=cache, attention_mask=torch.from_numpy(keep[:, :8]) != 0)
    want, tail, state = mamba2.mixer(fields, w, "at", x[:, :8], keep=keep[:, :8])
    assert_close(got, want)
    assert_close(cache.get_recurrent_state(0).numpy(), state)
    assert_close(cache.get_conv_state(0).numpy()[:, :, -tail.shape[1] :], tail.transpose(0, 2, 1))
    free = fields | {"time_step_limit": (0.0, np.inf)}
    assert_close(run(layer, x[:, 8:], cache=cache), mamba2.mixer(free, w, "at", x[:, 8:], tail, state)[0])
    assert_close(run(layer, x), mamba2.mixer(fields, w, "at", x)[0])


@pytest.mark.parametrize("share, kv_heads", [(0.4, 2), (1.0, 4), (0.8, 1)])
def test_the_mtp_head(share: float, kv_heads: int) -> None:
    """Around transformers' full-attention layer: norms of both inputs, the merge, the last norm and the logits."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": share, "mrope_section": [1, 1, 0]}
    more = {"num_key_value_heads": kv_heads, "rope_parameters": rope, "attn_implementation": "eager"}
    config = transformers.Qwen3_5TextConfig(**QWEN | more)
    e, n_rot, eps = config.hidden_size, round(config.head_dim * share), config.rms_norm_eps
    layer = modeling.Qwen3_5DecoderLayer(config, 1).eval()
    norms = {name: modeling.Qwen3_5RMSNorm(e, eps=eps).eval() for name in ("enorm", "hnorm", "head_norm")}
    w = drawn(layer, 5) | {f"{name}_w": drawn(norm, i)["at.weight"] for i, (name, norm) in enumerate(norms.items())}
    rng = np.random.default_rng(6)
    embed_w, eh_w, head_w = (0.5 * rng.normal(size=size) for size in ((29, e), (2 * e, e), (e, 31)))
    h, ids, last = hidden(7, 3, 5, e), rng.integers(0, 29, (3, 5)), np.array([4, 0, 2])
    merged = np.concatenate([run(norms["enorm"], embed_w[ids]), run(norms["hnorm"], h)], -1).astype(np.float64) @ eh_w
    tables = modeling.Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), torch.arange(5).expand(3, 3, 5))
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    out = run(layer, merged, position_embeddings=tables, attention_mask=mask)
    want = run(norms["head_norm"], out)[np.arange(3), last].astype(np.float64) @ head_w
    zeros, d = np.zeros(e), np.zeros(config.head_dim)
    cos, sin = (t[0].numpy().astype(np.float64) for t in tables)
    assert cos.shape[-1] == n_rot
    a, m = "at.self_attn", "at.mlp"
    got = mtp_head.mtp_head(
        h, ids, cos, sin, last, embed_w, 1 + w["hnorm_w"], zeros, 1 + w["enorm_w"], zeros, eh_w,
        1 + w["at.input_layernorm.weight"], zeros, w[f"{a}.q_proj.weight"].T, w[f"{a}.k_proj.weight"].T,
        w[f"{a}.v_proj.weight"].T, 1 + w[f"{a}.q_norm.weight"], d, 1 + w[f"{a}.k_norm.weight"], d,
        w[f"{a}.o_proj.weight"].T, 1 + w["at.post_attention_layernorm.weight"], zeros, w[f"{m}.gate_proj.weight"].T,
        w[f"{m}.up_proj.weight"].T, w[f"{m}.down_proj.weight"].T, 1 + w["head_norm_w"], zeros, head_w,
        heads=config.num_attention_heads, kv_heads=kv_heads, head_dim=config.head_dim, n_rot=n_rot, eps=eps,
    )  # fmt: skip
    assert got.shape == (3, 1, 31)
    assert_close(got[:, 0].astype(np.float32), want)
