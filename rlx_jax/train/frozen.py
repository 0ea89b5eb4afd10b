"""Which leaves are trained: a mask for optax, by the keys of their weights."""

from __future__ import annotations

from rlx_jax.errors import RequestError, did_you_mean, listing, quote
from rlx_jax.ir.param_keys import keys_of
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.trace.selecting import BlockPattern


def mask(model: CompiledModel, *patterns: str) -> dict[str, bool]:
    """Leaf name → whether its weights' keys match one of the patterns: globs as `at` takes them, over checkpoint keys.

    `optax.multi_transform({True: optimizer, False: optax.set_to_zero()}, mask)` trains those leaves alone.

    Raises:
        RequestError: a pattern matches no key, or some keys of a leaf and not the others, as where layers are stacked.
    """
    found, seen = {}, set[str]()
    globs = [BlockPattern(pattern, "mask") for pattern in patterns]
    if not globs:
        raise RequestError("mask: a pattern of keys is needed, such as '**.lora_{A,B}.weight'")
    for name, program in model.programs.layout.leaves.items():
        keys = list(keys_of(program))
        matched = {key for key in keys for glob in globs if glob.matches(tuple(key.split(".")))}
        seen |= {glob.text for glob in globs for key in keys if glob.matches(tuple(key.split(".")))}
        if matched and len(matched) < len(set(keys)):
            others = sorted(set(keys) - matched)
            raise RequestError(
                f"mask: leaf {quote(name)} has weights that match and others, {listing(others, 3)}, and is trained "
                "whole: take a pattern of all, or layers.roll = 'unroll'"
            )
        found[name] = bool(matched)
    if idle := [glob.text for glob in globs if glob.text not in seen]:
        keys = [key for program in model.programs.layout.leaves.values() for key in keys_of(program)]
        close = did_you_mean(idle[0], keys, alike=0.7) or f"; weights are {listing(keys, 3)}"
        raise RequestError(f"mask: {quote(idle[0])} matches no weight{close}")
    return found
