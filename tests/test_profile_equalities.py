"""What no setting of a profile changes: the numbers, on recorded checkpoints; and how far bf16 may be off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.settings import CLEANING
from tests.oracles import checkpoints, hugging_face

# Settings vary here over programs that have nothing for some of them to act on.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")

MODELS = {
    "llama": checkpoints.FIXTURES / "llama" / "gqa_plain_attnbias_v5",
    "bert": checkpoints.FIXTURES / "bert" / "bare_v5",
}
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": {
        "fusion": {"policy": "fusable", "skip": True}, "layers": {"roll": "scan"},
        "passes": {name: False for name in CLEANING}, "backend": {"cpu": {"merge": True, "weight_layout": "in_out"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_forms_of_one_program(name: str) -> None:
    """direct = fusable, unrolled = scanned, apart = merged, as stored = turned, with passes = without."""
    with np.load(MODELS[name].with_suffix(".npz")) as file:
        tokens = np.asarray(file["tokens"], np.int32)
    profiles = [rlx.CompileProfile().replace(**tables) for tables in FORMS.values()]
    want, got = (np.asarray(rlx.compile(rlx.from_pretrained(MODELS[name]), profile=p)(tokens)) for p in profiles)
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_exact_as_the_reference(name: str) -> None:
    """Against transformers in f32, our error in bf16 is at most 1.5 times that of transformers in bf16."""
    import torch

    kind = {"llama": "AutoModelForCausalLM", "bert": "AutoModel"}[name]
    model = hugging_face.load(MODELS[name], kind)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, 32)).astype(np.int32)

    def reference(dtype: torch.dtype) -> np.ndarray:
        in_dtype = type(model).from_pretrained(MODELS[name], dtype=dtype, attn_implementation="eager").eval()
        with torch.no_grad():
            out = in_dtype(torch.from_numpy(tokens.astype(np.int64)))
        return np.asarray((out.logits if name == "llama" else out.last_hidden_state).float())

    want, theirs = reference(torch.float32), reference(torch.bfloat16)
    for table in ({"compute": "bf16"}, {"mixed": "auto_mixed_bf16"}, {"weights": "bf16"}):
        profile = rlx.CompileProfile().replace(precision=table)
        ours: Any = rlx.compile(rlx.from_pretrained(MODELS[name]), profile=profile)
        errors = [np.asarray(got, np.float64) - want for got in (ours(tokens), theirs)]
        for size in (lambda e: np.abs(e).max(), lambda e: np.sqrt((e**2).mean())):
            assert 0 < size(errors[0]) <= 1.5 * size(errors[1]), table
