"""`FlowState`: the registers that one stage writes and a later one reads, and the records that some of them hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlx_jax.ir.types import Dim
from rlx_jax.trace.flow_value import FlowValue


class GdnInputSlots(NamedTuple):
    """The inputs of a GdnScan: q, k, v `[B,S,heads,n]`, g and beta `[B,S,heads]`."""

    q: FlowValue
    k: FlowValue
    v: FlowValue
    g: FlowValue
    beta: FlowValue


class DecodeBindings(NamedTuple):
    """The inputs of explicit decode: rope rows of the new tokens, a keep mask `[B, P+S]`, and the cached keys and
    values `[B, P, K·D]` of each layer. cos and sin are None where a later RopeTables stage computes them."""

    cos: FlowValue | None
    sin: FlowValue | None
    mask: FlowValue | None
    past_k: tuple[FlowValue, ...]
    past_v: tuple[FlowValue, ...]


@dataclass
class FlowState:
    """Registers that one stage writes and a later one reads; `program` is what the flow is compiled to by itself.

    No stage of this package reads or writes `hidden_shape`; `loaded_params` lists what `emit.load_param` returned, by
    key and whether it was transposed.
    """

    program: str = "forward"

    rope_cos: FlowValue | None = None
    rope_sin: FlowValue | None = None
    rope_by_itself: str = ""  # the first stage that made its own tables, as there were none
    zero_beta: FlowValue | None = None
    embed_weight: FlowValue | None = None
    hidden_shape: tuple[int | Dim, ...] | None = None
    decode: DecodeBindings | None = None
    residual: FlowValue | None = None
    gdn: GdnInputSlots | None = None
    inputs: dict[str, FlowValue | None] = field(default_factory=dict)
    named: dict[str, FlowValue] = field(default_factory=dict)
    streams: dict[str, FlowValue] = field(default_factory=dict)
    outputs: dict[str, FlowValue] = field(default_factory=dict)
    loaded_params: dict[tuple[str, bool], FlowValue] = field(default_factory=dict)
    repeats: list[list[int]] = field(default_factory=list)
    contracts: list[Any] = field(default_factory=list)  # a `StageContract` for each stage that promises something
    left_none: str = ""

    @property
    def residual_skip(self) -> FlowValue | None:
        """The value that ResidualSave stored: `residual`."""
        return self.residual

    @property
    def residual_shape(self) -> tuple[int | Dim, ...] | None:
        """The shape of the value that ResidualSave stored."""
        return None if self.residual is None else self.residual.shape
