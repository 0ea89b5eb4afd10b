"""`FORMATS`: the weight formats. To add one, implement `rlx_jax.weights.format.Format` and add it here."""

from __future__ import annotations

from rlx_jax.weights.format import Format
from rlx_jax.weights.gguf import Gguf
from rlx_jax.weights.mapping import MappingFormat
from rlx_jax.weights.orbax import Orbax
from rlx_jax.weights.safetensors_format import Safetensors

# In the order of detection: the first format that accepts weights opens them.
FORMATS: tuple[Format, ...] = (Safetensors(), MappingFormat(), Gguf(), Orbax())
