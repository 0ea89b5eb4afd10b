"""LoRA on a checkpoint: train adapters of its attention and MLP on a text, and save them in PEFT's format.

    python examples/lora.py path/to/llama text.txt runs/adapter

PEFT opens them, `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("path/to/llama"), "runs/adapter")`,
and transformers the merged weights, `AutoModelForCausalLM.from_pretrained("runs/adapter-merged")`.
"""

import argparse
from pathlib import Path

import numpy as np
import optax

import rlx_jax as rlx
from rlx_jax.text.tokenizer import load_tokenizer


def fine_tune(directory, tokens, steps=40, rate=1e-2):
    """Train adapters on `tokens` `[batch, seq]`; return the model, and the loss before each step."""
    adapted = rlx.lora(rlx.recipe_for(directory), "layers.*.{self_attn.{q,v}_proj,mlp.down_proj}", rank=4, alpha=8)
    model = rlx.compile(adapted, missing="init", key=0, program="train")
    mask = rlx.train.mask(model, "**.lora_{A,B}.weight")
    optimizer = optax.multi_transform({True: optax.adam(rate), False: optax.set_to_zero()}, mask)
    state, step, losses = rlx.train.init(model, optimizer), rlx.train.make_step(model, optimizer), []
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics.loss))
    return model.replace(params=state.params), losses


def merge(directory, model):
    """Return the checkpoint with the adapters merged into its weights."""
    lm = rlx.load(directory)
    lm.model = rlx.compile(rlx.recipe_for(directory), rlx.merge_lora(model))
    return lm


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("text", type=Path)
    parser.add_argument("adapter")
    args = parser.parse_args()
    ids = load_tokenizer(args.directory).encode(args.text.read_text("utf-8"))
    rows = np.array(ids[: len(ids) // 64 * 64], "i4").reshape(-1, 64)[:8]
    if not len(rows):
        parser.error(f"{args.text} has {len(ids)} tokens: training takes rows of 64")
    model, losses = fine_tune(args.directory, rows)
    print(losses[0], "→", losses[-1])
    rlx.save_lora(model, args.adapter, overwrite=True)
    rlx.save(merge(args.directory, model), f"{args.adapter}-merged", overwrite=True)
