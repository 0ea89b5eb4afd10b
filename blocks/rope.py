"""Rotary position embeddings: the frequencies, and the RopeTables stage that makes cos and sin.

Frequencies follow Su et al. 2021 and the scaling rules of the checkpoints' own reference
(`rope_scaling` / `rope_parameters`: linear, llama3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.trace.emit import Emit, FlowValue

Frequencies = tuple[float, ...]
MAX_TABLE = 2**20  # bytes: tables are constants of the program


def frequencies(head_dim: int, theta: float = 10000.0) -> Frequencies:
    """Inverse frequencies θ^(−2i/D), i < D/2, in radians a token; computed in f32 as the reference does."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return tuple(float(f) for f in np.float32(1.0) / np.float32(theta) ** exponent)


def linear_scaling(freqs: Frequencies, factor: float) -> Frequencies:
    """Positions divided by `factor`."""
    return tuple(float(np.float32(f) / np.float32(factor)) for f in freqs)


def llama3_scaling(
    freqs: Frequencies, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Frequencies:
    """Llama 3.1's rule: wavelengths over `original/low` are divided by `factor`, under `original/high` kept,
    those between interpolated smoothly."""
    out = []
    for f in freqs:
        wavelength = 2 * math.pi / f
        if wavelength < original_context / high_freq_factor:
            out.append(f)
        elif wavelength > original_context / low_freq_factor:
            out.append(f / factor)
        else:
            smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append((1 - smooth) * f / factor + smooth * f)
    return tuple(float(np.float32(f)) for f in out)


@dataclass(frozen=True, eq=False)
class RopeTables:
    """cos and sin at the positions of the active value, for every rotary stage that follows.

    Either `inv_freq` (the program computes the tables) or data `[max_positions, half_dim]`, whose row t is
    position t. Positions are the input `position_ids` where the flow declares it and it is given, else 0, 1, 2 …
    Tables with a `name` are read only by the stages that ask for it (`SelfAttnPrefillSpec.rope`): several kinds of
    layers may so have frequencies of their own.
    """

    inv_freq: Frequencies = ()
    max_positions: int | None = None
    cos_data: Any = field(default=None, repr=False)
    sin_data: Any = field(default=None, repr=False)
    name: str = ""

    @staticmethod
    def theta(head_dim: int, theta: float = 10000.0, name: str = "") -> RopeTables:
        """Unscaled frequencies of base `theta` over the full head width."""
        return RopeTables(frequencies(head_dim, theta), name=name)

    @staticmethod
    def param(max_positions: int, half_dim: int, cos: Any, sin: Any) -> RopeTables:
        """Tables given as data `[max_positions, half_dim]`."""
        cos, sin = (np.asarray(t, np.float32) for t in (cos, sin))
        for name, table in (("cos", cos), ("sin", sin)):
            if table.nbytes > MAX_TABLE:
                raise ShapeError(
                    f"RopeTables: {name} has {table.nbytes} bytes, the limit is {MAX_TABLE}; use RopeTables.theta"
                )
            if table.size != max_positions * half_dim:
                raise ShapeError(f"RopeTables: {name} has shape {table.shape}, expected [{max_positions}, {half_dim}]")
        return RopeTables((), max_positions, cos.reshape(-1, half_dim), sin.reshape(-1, half_dim))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("rotary_emb"):
            positions = positions_of(emit, emit.require(value, "RopeTables"))
            if self.inv_freq:
                cos, sin = emit.add_all(hir.RopeAngles(self.inv_freq), positions)
            else:
                width = self.cos_data.shape[1]
                cos, sin = emit.add_all(
                    hir.RopeRows(width, self.cos_data.tobytes(), self.sin_data.tobytes()), positions
                )
            if self.name:
                for register, table in zip(registers(self.name), (cos, sin), strict=True):
                    emit.set_named(register, table)
            else:
                emit.state.rope_cos, emit.state.rope_sin = cos, sin
        return value


def registers(name: str) -> tuple[str, str]:
    """Where the tables called `name` stand among the named values."""
    return f"rope.{name}.cos", f"rope.{name}.sin"


def positions_of(emit: Emit, value: FlowValue) -> FlowValue:
    """The position of each token of `value` `[B, S, …]`: the input `position_ids` if given, else int32 `[1, S]`."""
    if "position_ids" in emit.state.inputs and (given := emit.optional_input("position_ids")) is not None:
        return given
    if value.ndim < 2:
        raise ShapeError(f"{emit.path}: positions need [batch, seq, …], got {value.type}")
    return emit.positions(value)


def rope_tables_for(
    emit: Emit, x: FlowValue, head_dim: int, theta: float, name: str = ""
) -> tuple[FlowValue, FlowValue]:
    """cos and sin of the last RopeTables stage, else unscaled ones of base `theta` at the positions of `x`.
    With a `name`, those of the RopeTables stage of that name.

    The latter are not registered: each layer writes the same ops, so that layers stay alike and fold into one.
    """
    if name:
        cos_at, sin_at = registers(name)
        return emit.named(cos_at), emit.named(sin_at)
    cos, sin = emit.state.rope_cos, emit.state.rope_sin
    if cos is not None and sin is not None:
        return cos, sin
    with emit.scope("rotary_emb"):
        cos, sin = emit.add_all(hir.RopeAngles(frequencies(head_dim, theta)), positions_of(emit, x))
    return cos, sin
