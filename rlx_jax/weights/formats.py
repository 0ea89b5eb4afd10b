"""The weight formats. One more is a file with a class as `rlx_jax.weights.format.Format` says, and a row here."""

from __future__ import annotations

from rlx_jax.weights.format import Format
from rlx_jax.weights.mapping import MappingFormat
from rlx_jax.weights.orbax import Orbax
from rlx_jax.weights.safetensors_format import Safetensors

# In the order in which they are asked whether weights are theirs.
FORMATS: tuple[Format, ...] = (MappingFormat(), Safetensors(), Orbax())
