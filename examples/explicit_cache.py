"""Decode with a cache that this script manages: the program `explicit` is a pure function of keys and values.

    python examples/explicit_cache.py path/to/llama

`lm.generate` needs none of this: its cache has a fixed size and stays on the device. Here the cache is padded to an
upper bound, with the mask and the positions that go with it, so that one program serves every length below.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import rlx_jax as rlx
from rlx_jax.models.decoder import as_decode

Arrays = dict[str, Any]


def next_inputs(outputs: Mapping[str, Any]) -> Arrays:
    """Return the outputs of a call as inputs of the next: `kv.{i}.k` as `past_k_{i}`, `state.{i}.{slot}` as
    `state_{slot}_{i}`."""
    inputs = {}
    for name, array in outputs.items():
        kind, _, suffix = name.partition(".")
        number, _, slot = suffix.partition(".")
        if kind in ("kv", "state"):
            inputs[f"{'past' if kind == 'kv' else kind}_{slot}_{number}"] = array
    return inputs


def padded_cache(cache: Mapping[str, Any], upper: int) -> Arrays:
    """Pad keys and values `[B, P, K·D]` with zeros to `[B, upper, K·D]`; the mask hides the padding."""
    return {name: np.pad(array, ((0, 0), (0, upper - array.shape[1]), (0, 0))) for name, array in cache.items()}


def advanced_cache(cache: Mapping[str, Any], outputs: Mapping[str, Any], upper: int) -> Arrays:
    """Return the cache after a call that read `cache` padded to `upper`: the new rows, without the padding before."""
    past = next(iter(cache.values())).shape[1]
    after = {name: np.asarray(array) for name, array in next_inputs(outputs).items()}
    return {name: np.concatenate([a[:, :past], a[:, upper:]], axis=1) for name, a in after.items()}


def bucket_mask(past: int, upper: int, new: int = 1, batch: int = 1) -> np.ndarray[Any, Any]:
    """Return the mask int32 `[B, upper + new]` of a cache of `past` tokens that is padded to `upper`: 1 keeps a key."""
    index = np.arange(upper + new)
    return np.tile(((index < past) | (index >= upper)).astype(np.int32), (batch, 1))


def bucket_positions(past: int, new: int = 1, batch: int = 1) -> np.ndarray[Any, Any]:
    """Return the `position_ids` int32 `[B, new]` of new tokens after `past` cached ones; padding does not count."""
    return np.tile(np.arange(past, past + new, dtype=np.int32), (batch, 1))


def generate(directory: str, prompt: list[int], max_new_tokens: int, upper: int = 64) -> list[int]:
    """Return the greedy continuation of a prompt."""
    recipe: Any = rlx.recipe_for(directory)
    prefill: Any = rlx.compile(dataclasses.replace(recipe, export_kv=True))
    step: Any = rlx.compile(as_decode(recipe, custom_mask=True))
    outputs = prefill([prompt])
    cache = {name: np.asarray(array) for name, array in next_inputs(outputs).items()}
    ids = [int(np.asarray(outputs["logits"])[0, -1].argmax())]
    while len(ids) < max_new_tokens:
        past = len(prompt) + len(ids) - 1
        outputs = step(
            [ids[-1:]], mask=bucket_mask(past, upper), position_ids=bucket_positions(past), **padded_cache(cache, upper)
        )
        cache = advanced_cache(cache, outputs, upper)
        ids.append(int(np.asarray(outputs["logits"])[0, -1].argmax()))
    return ids


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="a checkpoint of a Llama-like model")
    print(generate(parser.parse_args().directory, [3, 1, 4], 16))
