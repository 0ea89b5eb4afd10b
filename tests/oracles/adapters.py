"""LoRA adapters as PEFT makes them, and the logits of a model with them.

`python -m tests.oracles.adapters` writes `tests/fixtures/lora`. torch, transformers and peft are imported when needed.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import hugging_face
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.recorded import load_record

BASE = FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
ADAPTER = FIXTURES / "lora" / "llama_mixed"
MIXED: dict[str, Any] = {
    "r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"model.layers.1.mlp.down_proj": 5}, "alpha_pattern": {"v_proj": 2.5}, "lora_dropout": 0.1,
}  # fmt: skip


def adapted(directory: Path, auto_class: str, seed: int, **config: Any) -> Any:
    """The checkpoint in transformers with a random adapter, whose B is not zeros."""
    peft = importlib.import_module("peft")
    model = hugging_face.load(directory, auto_class)
    return randomised(peft.get_peft_model(model, peft.LoraConfig(**config)), seed)


def randomised(model: Any, seed: int) -> Any:
    """A model of PEFT's with random weights in the adapter, and in the modules that it saves in full."""
    generator = importlib.import_module("torch").Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            value.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def first_output(model: Any, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits, or the last hidden state of a model without a head, of tokens or of images."""
    torch = importlib.import_module("torch")
    rows = torch.tensor(given)
    with torch.no_grad():
        made = model(pixel_values=rows) if rows.ndim == 4 else model(input_ids=rows.long())
    found: np.ndarray[Any, Any] = made[0].numpy()
    return found


def main() -> None:
    """Write the fixture."""
    model = adapted(BASE, "AutoModelForCausalLM", 5, **MIXED)
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(ADAPTER)
    (ADAPTER / "README.md").unlink(missing_ok=True)
    np.savez_compressed(ADAPTER.with_suffix(".npz"), logits=first_output(model, load_record(BASE)["tokens"]))


if __name__ == "__main__":
    main()
