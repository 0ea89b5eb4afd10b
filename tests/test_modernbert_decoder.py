"""ModernBERT's decoder with its language-model head, live against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx

pytestmark = pytest.mark.oracle(warnings="error")

SIZES: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 3,
    "local_attention": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, separate head": {**dict.fromkeys(BIASES, True), "tie_word_embeddings": False},
    "no bias of the head": {"decoder_bias": False, "hidden_activation": "silu", "classifier_activation": "relu",
                            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
                            + ["sliding_attention"]},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits_and_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    """The window of 4 keys is shorter than the prompts, and the cache wraps around."""
    import torch
    import transformers

    torch.manual_seed(7)
    model = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm.weight" in name))
    model.save_pretrained(tmp_path)
    lm: Any = rlx.load(tmp_path)
    prompts = [np.random.default_rng(n).integers(3, 83, n).tolist() for n in (19, 2, 11)]
    for prompt in prompts:
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits.numpy()
        np.testing.assert_allclose(lm.logits(np.array([prompt])), expected, atol=3e-5 * abs(expected).max(), rtol=0)
    answers = lm.generate(prompts, max_new_tokens=14)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, pad_token_id=0)
        end = len(answer)
        assert list(answer) == tokens[0, len(prompt) : len(prompt) + end].tolist() and (end == 14 or answer[-1] == 2)
    with torch.no_grad():
        states = model.model(torch.tensor(prompts[:1])).last_hidden_state.numpy()
    encoder: Any = rlx.load(tmp_path, head=False)
    np.testing.assert_allclose(encoder.hidden_states(np.array(prompts[:1])), states, atol=3e-5 * abs(states).max())
