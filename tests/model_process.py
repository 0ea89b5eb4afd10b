"""One process of a run that opens a checkpoint over eight devices, generates, and trains: what `test_mesh` starts.

    python -m tests.model_process CHECKPOINT DIRECTORY --steps 20 --process 0 --of 2 --port 1234

Says a JSON line: the tokens that it generates, and the losses of its steps, resumed from the newest step there is.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax import train

DEVICES = 8
PROMPTS = [[3, 1, 4, 1], [5, 9], [2]]
AXES = {"generate": ((4, 2), ("data", "tensor")), "train": ((2, 4), ("data", "fsdp"))}


def mesh(what: str) -> Mesh:
    """All eight devices, of whichever processes."""
    shape, names = AXES[what]
    return Mesh(np.array(jax.devices()[:DEVICES]).reshape(shape), names)


def generated(checkpoint: str | Path) -> dict[str, Any]:
    """Tokens that the checkpoint generates."""
    lm = rlx.load(checkpoint, mesh=mesh("generate"))
    sampler = rlx.Sampler(temperature=1.0)
    return {
        "tokens": lm.generate(PROMPTS, max_new_tokens=8),
        "sampled": lm.generate(PROMPTS, max_new_tokens=8, sampler=sampler, seed=7),
    }


def losses_of(checkpoint: str | Path, directory: str | Path, steps: int, save_at: int) -> dict[int, float]:
    """The loss of each step after the newest that is saved."""
    model = rlx.compile(rlx.from_pretrained(checkpoint), mesh=mesh("train"), program="train")
    optimizer = optax.adamw(1e-2)
    step, losses = train.make_step(model, optimizer), {}
    with train.Checkpoints(directory, timeout_s=60) as checkpoints:
        state = train.init(model, optimizer)
        if checkpoints.newest() is not None:
            state = checkpoints.restore(state)
        for number in range(int(state.step) + 1, steps + 1):
            rng = np.random.default_rng(number)
            state, metrics = step(state, rng.integers(0, 389, (8, 12)).astype(np.int32))
            losses[number] = float(metrics.loss)
            if number == save_at:
                checkpoints.save(number, state)
    return losses


def main() -> None:
    """Start this process and its backend, then run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--of", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes to stdout
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // given.of)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{given.port}", given.of, given.process)
    losses = losses_of(given.checkpoint, given.directory, given.steps, given.save_at)
    print(json.dumps(generated(given.checkpoint) | {"losses": losses}), file=said, flush=True)


if __name__ == "__main__":
    main()
