"""Stages that carry a state along the sequence: Gated DeltaNet and Mamba-2, and a step of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlx_jax.blocks.control import Named, Sequence, check_hidden
from rlx_jax.blocks.decoder import LayerAround
from rlx_jax.blocks.layer import HiddenShape, LayerSpec
from rlx_jax.blocks.linear import ResidualAdd, ResidualSave, RmsNorm, dense, rms_norm
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.norm import Standardize
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.param import Parts, Role
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.control import step_name
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = [
    "CausalWindow", "GatedDeltaNet", "GatedDeltaSpec", "GdnScan", "Mamba2Mixer", "Mamba2Spec", "Recurrent",
    "gated_delta_layer", "mamba2_layer",
]  # fmt: skip

# What is added to the sum of squares of a query or key head before its root.
UNIT = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Sizes of a Gated DeltaNet. `key_heads` divides `value_heads`; the widths of both may differ.

    Args:
        kernel: tokens in the window of its convolution.
        eps: of the norm behind the recurrence.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_count(getattr(self, name), f"GatedDeltaSpec: {name}")
        if self.value_heads % self.key_heads:
            raise GraphError(
                f"GatedDeltaSpec: {self.value_heads} value heads are no multiple of {self.key_heads} key heads"
            )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of q, k and v, packed."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def mixed(self) -> Parts:
        """What the columns of q, k and v are."""
        return Parts(tuple(zip(self.widths, ("groups", "groups", "heads"), strict=True)))


@dataclass(frozen=True)
class GatedDeltaNet:
    """A normalised `[B,S,H]` → `[B,S,H]`, by a state of fixed size instead of keys and values.

    q, k, v = silu(conv(x W_qkv)), heads of q and k at length 1; `β = σ(x W_b)`,
    `g = −exp(A_log) · softplus(x W_a + dt_bias)`; the gated delta rule; then `(w ⊙ rms(o) ⊙ silu(x W_z)) W_out`, the
    norm that of each value head. Weights under `prefix`: `in_proj_{qkv,z,b,a}.weight` `[out, H]`, `conv1d.weight`
    `[M, 1, kernel]` over the M columns of q, k and v, `dt_bias` and `A_log` of each value head, `norm.weight` of its
    width, `out_proj.weight`.

    Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; as in Qwen3.5.
    """

    prefix: str
    spec: GatedDeltaSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "GatedDeltaNet"), self.spec
        with emit.scope(self.prefix.rpartition(".")[2] or "linear_attn"):
            columns: dict[str, tuple[int, Role]] = {
                "qkv": (sum(s.widths), s.mixed), "z": (s.widths[2], "heads"), "b": (s.value_heads, "heads"),
                "a": (s.value_heads, "heads"),
            }  # fmt: skip
            packed, z, b, a = (
                dense(emit, self.prefix, f"in_proj_{name}", x, (role, "hidden"), wide, bias=False)
                for name, (wide, role) in columns.items()
            )
            q, k, v = emit.split(_convolved(emit, self.prefix, packed, s), s.widths)
            step, rate = _time_steps(emit, self.prefix, a, s.value_heads)
            block = hir.GatedDelta(s.key_heads, s.value_heads, unit=UNIT)
            out = emit.add_node(block, q, k, v, step * rate, emit.add_node(Unary("sigmoid"), b))
            apart = out.reshape(*out.shape[:-1], s.value_heads, s.value_dim)
            with emit.scope("norm"):  # of each head
                normed = rms_norm(emit, emit.block_input(apart), f"{self.prefix}.norm.weight", s.eps)
                gated = normed.reshape(out.shape) * emit.add_node(Unary("silu"), z)
            return dense(emit, self.prefix, "out_proj", gated, ("hidden", "heads"), x.type.shape[-1], bias=False)


def _convolved(
    emit: Emit, prefix: str, x: FlowValue, spec: GatedDeltaSpec | Mamba2Spec, bias: bool = False, kind: str = "silu"
) -> FlowValue:
    """Write `act(conv(x))`, act being `kind`, by the weights `{prefix}.conv1d.{weight,bias}` of the mixed columns."""
    columns = sum(spec.widths)
    with emit.scope("conv1d"):
        weights = [emit.param(f"{prefix}.conv1d.weight", (columns, 1, spec.kernel), (spec.mixed, None, None))]
        if bias:
            weights.append(emit.param(f"{prefix}.conv1d.bias", (columns,), (spec.mixed,)))
        return emit.add_node(Unary(kind), emit.add_node(hir.CausalConv(bias), x, *weights))


def _time_steps(
    emit: Emit, prefix: str, t: FlowValue, heads: int, low: float = 0.0, high: float | None = None
) -> tuple[FlowValue, ...]:
    """Write the step and the rate of each head, by the weights `{prefix}.dt_bias` and `{prefix}.A_log` `[heads]`."""
    weights = (emit.param(f"{prefix}.{name}", (heads,), ("heads",)) for name in ("dt_bias", "A_log"))
    return emit.add_all(hir.TimeSteps(low, high), t, *weights)


def gated_delta_layer(index: int, layer: LayerSpec, spec: GatedDeltaSpec, prefix: str = "model.layers") -> Named:
    """Layer `index` with a Gated DeltaNet where others have attention; `layer` says what is around it."""
    p = f"{prefix}.{index}"
    mixer = GatedDeltaNet(f"{p}.linear_attn", spec)
    return Named(f"layer{index}", LayerAround(p, layer, (mixer,), "gated_delta_layer"))


# -- the recurrence alone ------------------------------------------------------------------------


@dataclass(frozen=True)
class GdnScan:
    """The gated delta rule over the registered inputs of `emit.set_gdn`: q, k, v `[B,S,Hv,n]`, g and beta `[B,S,Hv]` →
    `[B,S,Hv,n]`. The active value is not read, but there has to be one.

    With `carry_state` it starts from the value registered as `state_key`, `[B,Hv,n,n]` f32, and registers the state
    after the last token under that key, where later stages and `with_extra_outputs` find it: nothing is written in
    place. Without it the state is part of the program: `prefill` and `extend` carry it.

    Args:
        state_size: n, the width of each head. `out_shape`: what the result is held against, if given.

    Raises:
        GraphError: no inputs, or no state, are registered, or `carry_state` without `state_key`.
    """

    state_size: int
    out_shape: HiddenShape = None
    carry_state: bool = False
    state_key: str | None = None

    @staticmethod
    def prefill(state_size: int, out_shape: HiddenShape = None) -> GdnScan:
        """From zeros."""
        return GdnScan(state_size, out_shape)

    def with_carry(self, key: str) -> GdnScan:
        """From the state registered as `key`, which it replaces."""
        return GdnScan(self.state_size, self.out_shape, True, key)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        emit.require(value, "GdnScan")
        given = emit.state.gdn
        if given is None:
            raise GraphError(f"{emit.path}: GdnScan reads q, k, v, g and beta: call emit.set_gdn before it")
        if self.carry_state and self.state_key is None:
            raise GraphError(f"{emit.path}: GdnScan carries a state, and has no state_key to read it from")
        with emit.scope("gdn_scan"):
            if self.carry_state and self.state_key is not None:
                state = emit.named(self.state_key)
                out, after = emit.gated_delta_net_carry(*given, state, self.state_size)
                emit.set_named(self.state_key, after)
            else:
                out = emit.gated_delta_net(*given, self.state_size)
        check_hidden(emit, out, self.out_shape, "GdnScan")
        return out


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
        with emit.scope(self.prefix.rpartition(".")[2] or "mixer"):
            packed = Parts(((s.inner, "heads"), *s.mixed.of, (s.heads, "heads")))
            columns = (s.inner, sum(s.widths), s.heads)
            projected = dense(emit, self.prefix, "in_proj", x, (packed, "hidden"), sum(columns), bias=s.bias)
            z, mixed, t = emit.split(projected, columns)
            convolved = _convolved(emit, self.prefix, mixed, s, s.conv_bias, s.activation)
            values, b, c = emit.split(convolved, s.widths)
            step, rate = _time_steps(emit, self.prefix, t, s.heads, *s.time_step_limit)
            out = emit.add_node(hir.SelectiveScan(s.heads, s.groups), values, step, rate, b, c)
            skip = emit.param(f"{self.prefix}.D", (s.heads,), ("heads",)).reshape(s.heads, 1)
            out = out + (values.reshape(*values.shape[:-1], s.heads, s.head_dim) * skip).reshape(values.shape)
            gated = out * emit.add_node(Unary("silu"), z)
            with emit.scope("norm"):  # of each group
                parts = gated.reshape(*gated.shape[:-1], s.groups, s.inner // s.groups)
                normed = emit.add_node(Standardize((-1,), s.eps, centre=False), parts).reshape(gated.shape)
                normed = normed * emit.param(f"{self.prefix}.norm.weight", (s.inner,), ("heads",))
            return dense(emit, self.prefix, "out_proj", normed, ("hidden", "heads"), x.type.shape[-1], bias=s.bias)


def mamba2_layer(index: int, spec: Mamba2Spec, prefix: str = "backbone.layers") -> Named:
    """Layer `index`: `x + mixer(rms(x))`."""
    p = f"{prefix}.{index}"
    stages = (ResidualSave(), RmsNorm(f"{p}.norm.weight", spec.eps), Mamba2Mixer(f"{p}.mixer", spec), ResidualAdd())
    return Named(f"layer{index}", Sequence(stages))


@dataclass(frozen=True)
class Recurrent:
    """`state, y_t = step(state, x_t, *params)` along the tokens: x `[B, S, …]` → y `[B, S, …]`.

    `keys` name the weights that the step is given behind the token, each as stored; `init` is the state before the
    first token. See `emit.recurrent`, which takes several values and a learned start too.
    """

    step: Callable[..., Any]
    keys: tuple[str, ...] = ()
    init: Any = field(default=None, kw_only=True)
    unroll: int | None = field(default=None, kw_only=True)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "Recurrent")
        with emit.stage(), emit.scope(step_name(self.step)), emit.users_code():
            y: FlowValue = emit.recurrent(self.step, x, *self.keys, init=self.init, unroll=self.unroll)
        return y


@dataclass(frozen=True)
class CausalWindow:
    """The last `width` tokens up to each, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`."""

    width: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "CausalWindow")
        with emit.stage(), emit.scope("causal_window"):
            return emit.causal_window(x, self.width)
