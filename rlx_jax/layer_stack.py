"""`LayerStack`: small stages in a row, as one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rlx_jax import blocks
from rlx_jax.blocks.control import BlockStage
from rlx_jax.emit import Emit, FlowValue


@dataclass(frozen=True)
class LayerStack:
    """Small stages in a row, built into one stage: `LayerStack.named("ffn").rms_norm(key).linear(key).build()`."""

    name: str | None = None
    items: tuple[BlockStage, ...] = ()

    @staticmethod
    def named(name: str) -> LayerStack:
        """A stack whose block path has a segment `name`."""
        return LayerStack(name)

    def stage(self, *stages: BlockStage) -> LayerStack:
        """Append stages."""
        return replace(self, items=(*self.items, *stages))

    def stages(self, stages: Iterable[BlockStage]) -> LayerStack:
        """Append several stages."""
        return self.stage(*stages)

    def layer_norm(self, gamma: str, beta: str, eps: float = 1e-5) -> LayerStack:
        """LayerNorm; weights under `gamma` and `beta`, `[H]`."""
        return self.stage(blocks.LayerNorm(gamma, beta, eps))

    def rms_norm(self, key: str, eps: float = 1e-5) -> LayerStack:
        """RMSNorm; its weight under `key`, `[H]`."""
        return self.stage(blocks.RmsNorm(key, eps))

    def gather_add(self, input_name: str, key: str) -> LayerStack:
        """`x + E[input]`; the table is under `key` `[V, H]`."""
        return self.stage(blocks.GatherAdd(input_name, key))

    def linear(self, key: str, transpose: bool = True, bias: str | None = None) -> LayerStack:
        """`x W`; see `ModelFlow.linear`."""
        return self.stage(blocks.Linear(key, transpose, bias))

    def residual_save(self) -> LayerStack:
        """Remember the active value for `residual_add`."""
        return self.stage(blocks.ResidualSave())

    def residual_add(self) -> LayerStack:
        """Add the value that `residual_save` remembered."""
        return self.stage(blocks.ResidualAdd())

    def swiglu(self, gate: str, up: str, down: str) -> LayerStack:
        """`(silu(x Wg) ⊙ (x Wu)) Wd`; weights `[F, H]`, `[F, H]`, `[H, F]`."""
        return self.stage(blocks.SwiGlu(gate, up, down))

    def swiglu_hf_mlp(self, prefix: str) -> LayerStack:
        """SwiGLU under `{prefix}.mlp.{gate,up,down}_proj.weight`; the prefix may end in `.mlp`."""
        return self.stage(blocks.SwiGlu.hf_mlp(prefix))

    def self_attn_prefill(self, spec: blocks.SelfAttnPrefillSpec) -> LayerStack:
        """Rotary self-attention: normalised `[B, S, H]` → context `[B, S, N·D]`."""
        return self.stage(blocks.SelfAttnPrefill(spec))

    def custom(self, fn: Callable[[Emit, Any], FlowValue | None]) -> LayerStack:
        """Any function `(emit, value) → value`."""
        return self.stage(blocks.Custom(fn))

    def build(self) -> BlockStage:
        """Named{Sequence} if named, else Sequence."""
        inner = blocks.Sequence(self.items)
        return blocks.Named(self.name, inner) if self.name else inner
