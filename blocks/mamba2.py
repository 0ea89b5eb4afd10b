"""Mamba-2: a layer that is one mixer, a selective scan behind a causal convolution."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.blocks.control import Named, Sequence
from rlx_jax.blocks.linear import ResidualAdd, ResidualSave, dense
from rlx_jax.blocks.norm import RmsNorm
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.param import Parts
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.emit import Emit, FlowValue


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Sizes of a Mamba-2 mixer. `groups` divides `heads`.

    Args:
        head_dim: width of a head. `state_size`: numbers that each column of a head keeps.
        groups: heads beside each other share their B and C.
        kernel: tokens in the window of the convolution; `conv_bias`: whether it has a bias. `bias`: whether the
            projections have.
        eps: of both norms.
        time_step_limit: the least and the most of a step; None for no most.
        activation: behind the convolution, a name in `UNARY`; that of the gate is silu whatever this is.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    kernel: int = 4
    bias: bool = False
    conv_bias: bool = True
    eps: float = 1e-5
    time_step_limit: tuple[float, float | None] = (0.0, None)
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "state_size", "groups", "kernel"):
            check_count(getattr(self, name), f"Mamba2Spec: {name}")
        if self.heads % self.groups:
            raise GraphError(f"Mamba2Spec: {self.heads} heads are no multiple of {self.groups} groups")

    @property
    def inner(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of x, B and C, which are convolved."""
        shared = self.groups * self.state_size
        return self.inner, shared, shared

    @property
    def mixed(self) -> Parts:
        """What the columns of x, B and C are."""
        return Parts(tuple(zip(self.widths, ("heads", "groups", "groups"), strict=True)))


@dataclass(frozen=True)
class Mamba2Mixer:
    """A normalised `[B,S,H]` → `[B,S,H]`, by a state of fixed size.

    z, m, t = x W_in; x, B, C = act(conv(m)); `Δ = clip(softplus(t + dt_bias))`, `A = −exp(A_log)`; the selective scan
    `y`; then `(w ⊙ rms((y + D x) ⊙ silu(z))) W_out`, the norm over each group of heads. Weights under `prefix`:
    `in_proj` `[I + M + N, H]` and `out_proj` `[H, I]` with their biases, `conv1d.weight` `[M, 1, kernel]` and `.bias`,
    `dt_bias`, `A_log` and `D` `[N]`, `norm.weight` `[I]`; N heads are I wide, and x, B and C M.

    Source: Dao and Gu, arXiv:2405.21060.
    """

    prefix: str
    spec: Mamba2Spec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "Mamba2Mixer"), self.spec
        heads = (s.heads,)
        with emit.scope(self.prefix.rpartition(".")[2] or "mixer"):
            packed = Parts(((s.inner, "heads"), *s.mixed.of, (s.heads, "heads")))
            columns = (s.inner, sum(s.widths), s.heads)
            projected = dense(emit, self.prefix, "in_proj", x, (packed, "hidden"), sum(columns), bias=s.bias)
            z, mixed, t = emit.split(projected, columns)
            values, b, c = emit.split(self._convolved(emit, mixed), s.widths)
            biases = (emit.param(f"{self.prefix}.{name}", heads, ("heads",)) for name in ("dt_bias", "A_log"))
            low, high = s.time_step_limit
            step, rate = emit.add_all(hir.TimeSteps(low, high), t, *biases)
            out = emit.add_node(hir.SelectiveScan(s.heads, s.groups), values, step, rate, b, c)
            skip = emit.param(f"{self.prefix}.D", heads, ("heads",)).reshape(s.heads, 1)
            out = out + (values.reshape(*values.shape[:-1], s.heads, s.head_dim) * skip).reshape(values.shape)
            normed, hidden = self._normed(emit, out, z), x.type.shape[-1]
            return dense(emit, self.prefix, "out_proj", normed, ("hidden", "heads"), hidden, bias=s.bias)

    def _convolved(self, emit: Emit, mixed: FlowValue) -> FlowValue:
        s, p, columns = self.spec, f"{self.prefix}.conv1d", sum(self.spec.widths)
        with emit.scope("conv1d"):
            weights = [emit.param(f"{p}.weight", (columns, 1, s.kernel), (s.mixed, None, None))]
            if s.conv_bias:
                weights.append(emit.param(f"{p}.bias", (columns,), (s.mixed,)))
            return emit.add_node(Unary(s.activation), emit.add_node(hir.CausalConv(s.conv_bias), mixed, *weights))

    def _normed(self, emit: Emit, out: FlowValue, z: FlowValue) -> FlowValue:
        """The gate, then the norm of each group."""
        s = self.spec
        gated = out * emit.add_node(Unary("silu"), z)
        with emit.scope("norm"):
            parts = gated.reshape(*gated.shape[:-1], s.groups, s.inner // s.groups)
            normed = emit.add_node(Standardize((-1,), s.eps, centre=False), parts).reshape(gated.shape)
            return normed * emit.param(f"{self.prefix}.norm.weight", (s.inner,), ("heads",))


def mamba2_layer(index: int, spec: Mamba2Spec, prefix: str = "backbone.layers") -> Named:
    """Layer `index`: `x + mixer(rms(x))`."""
    p = f"{prefix}.{index}"
    stages = (ResidualSave(), RmsNorm(f"{p}.norm.weight", spec.eps), Mamba2Mixer(f"{p}.mixer", spec), ResidualAdd())
    return Named(f"layer{index}", Sequence(stages))
