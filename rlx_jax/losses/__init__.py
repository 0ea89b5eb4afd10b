"""Losses of a compiled model, as functions of its parameters and of a batch: `rlx_jax.losses.cross_entropy` of tokens,
`classification` of texts, and `span` of answers."""

from __future__ import annotations

from rlx_jax.losses.chunked import cross_entropy as cross_entropy
from rlx_jax.losses.chunked import targets as targets
from rlx_jax.losses.labels import classification as classification
from rlx_jax.losses.labels import span as span
