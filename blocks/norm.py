"""Norms: RmsNorm, GemmaRmsNorm, LayerNorm, and the ZeroBeta register that older flows declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlx_jax.ir.inits import Init
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = ["GemmaRmsNorm", "LayerNorm", "RmsNorm", "ZeroBeta"]


@dataclass(frozen=True)
class ZeroBeta:
    """Zeros `[length]`, registered as `name`; the first one is the beta of every RMSNorm. Norms need none."""

    length: int
    name: str = "zero_beta"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        zeros = emit.zeros(self.length)
        emit.set_named(self.name, zeros)
        if emit.state.zero_beta is None:
            emit.state.zero_beta = zeros
        return value


@dataclass(frozen=True)
class RmsNorm:
    """`x (mean(x²) + ε)^(−1/2) ⊙ γ`. Weight: `weight_key` `[H]`; where no source has it, `init` draws it, or 1."""

    norm: ClassVar[str] = "rms"
    offset: ClassVar[float] = 0.0
    """What is added to the weight."""

    weight_key: str
    eps: float = 1e-5
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, type(self).__name__)
        with emit.scope(module_of(self.weight_key)):
            gamma = emit.weight(self.weight_key, shape=x.type.shape[-1:], init=self.init)
            return rms_norm(emit, x, gamma, self.eps, self.offset)


@dataclass(frozen=True)
class GemmaRmsNorm(RmsNorm):
    """`x (mean(x²) + ε)^(−1/2) ⊙ (1 + w)`, rounded once. Weight: `weight_key` `[H]`, which starts at 0, or
    as `init` says."""

    offset = 1.0

    eps: float = 1e-6

    @staticmethod
    def hf_layer(prefix: str, eps: float = 1e-6) -> GemmaRmsNorm:
        """`{prefix}.weight`."""
        return GemmaRmsNorm(f"{prefix}.weight", eps)


@dataclass(frozen=True)
class LayerNorm:
    """`(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`. Weights: `gamma_key`, `beta_key` `[H]`, if not None; where no
    source has them γ is drawn by `init`, by default 1, and β is 0."""

    norm: ClassVar[str] = "layer"

    gamma_key: str | None
    beta_key: str | None
    eps: float = 1e-5
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LayerNorm")
        with emit.scope(module_of(self.gamma_key or self.beta_key or "norm.weight")):
            gamma = None
            if self.gamma_key is not None:
                gamma = emit.weight(self.gamma_key, shape=x.type.shape[-1:], init=self.init)
            return emit.layer_norm(x, gamma, self.beta_key, self.eps)


def norm_under(emit: Emit, prefix: str, name: str, x: FlowValue, eps: float) -> FlowValue:
    """Write a LayerNorm by the weights `{prefix}.{name}.{weight,bias}` in the block `name`."""
    with emit.scope(*name.split(".")):
        return emit.layer_norm(x, f"{prefix}.{name}.weight", f"{prefix}.{name}.bias", eps)


def rms_norm(emit: Emit, x: FlowValue, key: str | FlowValue, eps: float, offset: float = 0.0) -> FlowValue:
    """RMSNorm by the weight under `key`, or a value, plus `offset`; the beta is that of a ZeroBeta stage if one ran and
    fits."""
    beta = emit.state.zero_beta
    fits = beta is not None and beta.type.shape == x.type.shape[-1:]
    return emit.rms_norm(x, key, beta if fits else None, eps, offset=offset)


def head_norm(emit: Emit, x: FlowValue, key: str, head_dim: int | None, eps: float, offset: float = 0.0) -> FlowValue:
    """RMSNorm of every head alone, or of all as one vector where `head_dim` is None: packed `[B,S,N·D]` → same.
    Weight: `key` `[D]` or `[N·D]`, to which `offset` is added."""
    with emit.scope(module_of(key)):
        if head_dim is None:
            return rms_norm(emit, x, key, eps, offset)
        heads = x.reshape(*x.shape[:-1], -1, head_dim)
        return rms_norm(emit, heads, key, eps, offset).reshape(x.shape)


def module_of(key: str) -> str:
    """Return `q_proj` of `layers.0.q_proj.weight`: the block that a weight belongs to."""
    parts = key.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]
