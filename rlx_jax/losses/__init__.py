"""Losses of a compiled model, as functions of its parameters and of a batch: `rlx_jax.losses.cross_entropy` of tokens,
`classification` of texts, and `span` of answers."""

from __future__ import annotations

from rlx_jax.losses.chunked import CHUNK_BYTES as CHUNK_BYTES
from rlx_jax.losses.chunked import LossChunking as LossChunking
from rlx_jax.losses.chunked import chunk_logits as chunk_logits
from rlx_jax.losses.chunked import count_chunks as count_chunks
from rlx_jax.losses.chunked import cross_entropy as cross_entropy
from rlx_jax.losses.chunked import loss_head as loss_head
from rlx_jax.losses.chunked import split_tokens as split_tokens
from rlx_jax.losses.chunked import targets as targets
from rlx_jax.losses.labels import check_batch as check_batch
from rlx_jax.losses.labels import classification as classification
from rlx_jax.losses.labels import counts_rows as counts_rows
from rlx_jax.losses.labels import span as span
from rlx_jax.losses.labels import target_weights as target_weights
