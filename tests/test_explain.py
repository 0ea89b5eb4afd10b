"""What becomes of a model: the work of its blocks, where its time goes, and what is found wrong with a program."""

from __future__ import annotations

import pytest

import rlx_jax as rlx
from rlx_jax.inspection.work import block_work
from tests import divided, small

CACHE = 2 * 2 * 64 * 4 * 8 * 4
"""Bytes of keys and values of the tiny models: two layers, 64 slots, 4 heads of width 8, f32."""


@pytest.mark.parametrize("weights", ["keep", "int8"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen3"])
def test_a_step_reads_every_parameter_and_the_cache_once(family: str, weights: str) -> None:
    """But a table that only tokens read, a row for each; packed parameters count as they are stored."""
    profile = small.profile(precision={"weights": weights})
    model = rlx.compile(divided.recipe(family), divided.weights(family), profile=profile, program="extend")
    lir = model.programs.function(model.key_for_sizes({"batch": 1, "context": 64, "seq": 1})).lir
    stored = {name: t.nbytes for name, t in model.programs.layout.types().items()}
    work = [part for parts in block_work(lir).values() for part in parts]
    table = sum(size for name, size in stored.items() if "embed_tokens" in name) if family != "llama tied" else 0
    assert sum(part.param_bytes for part in work) == pytest.approx(sum(stored.values()) - table, abs=64)
    attention = [part for part in work if part.kind == "attention"]
    assert CACHE < sum(part.bytes for part in attention) < 1.1 * CACHE
