"""Qwen 3.5's head for drafts against its definition, and what does not fit it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import TypeCache
from rlx_jax.ir.types import TensorType, tensor_type
from rlx_jax.lowering.lower import as_function
from tests.oracles.comparing import assert_close
from tests.oracles.mtp_head import mtp_head

ROWS, TOKENS, VOCAB = 3, 5, 13
BLOCKS = {
    "grouped, part of a head turns": hir.Qwen35MtpHead(4, 2, 6, 4, 10, 7, 11, 1e-3),
    "heads of their own, all of a head turns": hir.Qwen35MtpHead(3, 3, 4, 4, 9, 5, 8, 1e-5),
}


def arrays(block: hir.Qwen35MtpHead) -> list[np.ndarray]:
    """Operands of three rows, which end at tokens of their own."""
    rng, e, d, f = np.random.default_rng(2), block.n_embd, block.head_dim, block.n_ff
    q, kv, half = block.heads * d, block.kv_heads * d, block.n_rot // 2
    angles = np.arange(TOKENS)[None, :, None] * 10.0 ** -np.arange(half)
    norm, head = [(e,), (e,)], [(d,)] * 4
    shapes = [
        (VOCAB, e), *norm, *norm, (2 * e, e), *norm, (e, 2 * q), (e, kv), (e, kv), *head, (q, e), *norm, (e, f), (e, f),
        (f, e), *norm, (e, block.mtp_vocab),
    ]  # fmt: skip
    weights = [rng.normal(size=shape) * (0.4 if len(shape) > 1 else 1) for shape in shapes]
    ids, last = rng.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32), np.array([4, 0, 2], np.int32)
    return [rng.normal(size=(ROWS, TOKENS, e)), ids, np.cos(angles), np.sin(angles), last, *weights]


def types(given: list[np.ndarray], **symbols: str) -> list[TensorType]:
    """Of operands; `tokens` as a symbol, or `rows`."""
    named = {TOKENS: symbols.get("tokens", TOKENS), ROWS: symbols.get("rows", ROWS)}
    free = [0, 1, 2, 3, 4] if symbols else []
    found = []
    for place, a in enumerate(given):
        shape = tuple(named.get(n, n) if place in free else n for n in a.shape)
        found.append(tensor_type(shape, "f32" if a.dtype == np.float64 else "i32", "t"))
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_head(name: str) -> None:
    """Numbers, and with a symbol for the tokens the same type and the same numbers."""
    block = BLOCKS[name]
    given = arrays(block)
    cos, sin = (np.broadcast_to(t, (ROWS, *t.shape[1:])) for t in given[2:4])
    want = mtp_head(
        given[0], given[1], cos, sin, *given[4:], heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim,
        n_rot=block.n_rot, eps=block.eps,
    )  # fmt: skip
    narrow = [a.astype(np.float32) if a.dtype == np.float64 else a for a in given]
    for found in (types(given), types(given, tokens="seq")):
        (result,) = TypeCache().infer(block, tuple(found))
        assert result == tensor_type((ROWS, 1, block.mtp_vocab), "f32", "t")
        got: Any = as_function(block, tuple(found), TypeCache())(*narrow)
        assert_close(got[0] if isinstance(got, list | tuple) else got, want)


REFUSED: dict[str, tuple[dict[str, Any], type[GraphError], str]] = {
    "another n_ff": ({"n_ff": 6}, ShapeError, "gate_w"),
    "another vocabulary": ({"mtp_vocab": 12}, ShapeError, "lm_head_w"),
    "another width": ({"n_embd": 12}, ShapeError, "h_pre_norm"),
    "an odd part turns": ({"n_rot": 3}, GraphError, "n_rot"),
    "more turns than there is": ({"n_rot": 8}, GraphError, "n_rot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, error, text = REFUSED[name]
    block = BLOCKS["grouped, part of a head turns"]
    with pytest.raises(error, match=text):
        TypeCache().infer(dataclasses.replace(block, **changes), tuple(types(arrays(block))))


def test_a_batch_that_is_a_symbol_is_refused_by_name() -> None:
    block = BLOCKS["grouped, part of a head turns"]
    with pytest.raises(ShapeError, match="h_pre_norm is .* give the batch as a number"):
        TypeCache().infer(block, tuple(types(arrays(block), rows="batch", tokens="seq")))
    with pytest.raises(GraphError, match="29"):
        TypeCache().infer(block, tuple(types(arrays(block))[:-1]))
