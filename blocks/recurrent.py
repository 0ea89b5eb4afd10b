"""Recurrent stages, which carry a state along the sequence: Gated DeltaNet, Mamba-2, and custom recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx_jax.blocks.control import Named, Sequence, check_hidden
from rlx_jax.blocks.decoder import MixerLayer
from rlx_jax.blocks.layer import HiddenShape, LayerSpec
from rlx_jax.blocks.linear import ResidualAdd, ResidualSave, RmsNorm, dense, rms_norm
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import GraphError, check_integer
from rlx_jax.ir import hir
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.reduce import Standardize
from rlx_jax.ir.param import Parts, Role
from rlx_jax.trace.control import step_name
from rlx_jax.trace.emit import Emit, FlowValue

__all__ = [
    "CausalWindow", "GatedDeltaNet", "GatedDeltaSpec", "GdnScan", "Mamba2Mixer", "Mamba2Spec", "Recurrent",
    "gated_delta_layer", "mamba2_layer",
]  # fmt: skip

# Epsilon of the L2 norm of a query or key head: it is added to the sum of squares, under the root.
UNIT_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """Sizes of a Gated DeltaNet.

    Args:
        key_heads, value_heads: numbers of heads; `value_heads` is a multiple of `key_heads`.
        key_dim, value_dim: widths of a head of keys and of a head of values.
        kernel: window of the convolution, in tokens.
        eps: epsilon of the norm after the recurrence.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_integer(f"GatedDeltaSpec: {name}", getattr(self, name), error_class=GraphError)
        if self.value_heads % self.key_heads:
            raise GraphError(f"GatedDeltaSpec: {self.value_heads} value heads: no multiple of {self.key_heads}")

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of packed q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def mixed_roles(self) -> Parts:
        """Roles of the concatenated columns of q, k and v."""
        return Parts(tuple(zip(self.widths, ("groups", "groups", "heads"), strict=True)))


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated DeltaNet: token mixing by a state of fixed size instead of cached keys and values.

    It maps a normalised x `[B,S,H]` to `[B,S,H]`:

    1. q, k, v = silu(conv(x W_qkv)), with heads of q and k normalised to unit length;
    2. `β = σ(x W_b)` and `g = −exp(A_log) · softplus(x W_a + dt_bias)`;
    3. o is the result of the gated delta rule;
    4. `(w ⊙ rms(o) ⊙ silu(x W_z)) W_out`, with the RMSNorm over each value head.

    Weights under `prefix`: `in_proj_{qkv,z,b,a}.weight` `[out, H]`; `conv1d.weight` `[M, 1, kernel]` over the M columns
    of q, k and v; `dt_bias` and `A_log` `[value_heads]`; `norm.weight` `[value_dim]`; `out_proj.weight`.

    Source: Yang et al., Gated Delta Networks, arXiv:2412.06464; as in Qwen3.5.
    """

    prefix: str
    spec: GatedDeltaSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "GatedDeltaNet"), self.spec
        with emit.scope(self.prefix.rpartition(".")[2] or "linear_attn"):
            columns: dict[str, tuple[int, Role]] = {
                "qkv": (sum(s.widths), s.mixed_roles), "z": (s.widths[2], "heads"), "b": (s.value_heads, "heads"),
                "a": (s.value_heads, "heads"),
            }  # fmt: skip
            packed, z, b, a = (
                dense(emit, self.prefix, f"in_proj_{name}", x, (role, "hidden"), width, bias=False)
                for name, (width, role) in columns.items()
            )
            q, k, v = emit.split(_causal_conv(emit, self.prefix, packed, s), s.widths)
            step, rate = _time_steps(emit, self.prefix, a, s.value_heads)
            block = hir.GatedDelta(s.key_heads, s.value_heads, unit=UNIT_NORM_EPS)
            out = emit.add_node(block, q, k, v, step * rate, emit.add_node(Unary("sigmoid"), b))
            heads = out.reshape(*out.shape[:-1], s.value_heads, s.value_dim)
            with emit.scope("norm"):  # over each value head
                normed = rms_norm(emit, emit.block_input(heads), f"{self.prefix}.norm.weight", s.eps)
                gated = normed.reshape(out.shape) * emit.add_node(Unary("silu"), z)
            return dense(emit, self.prefix, "out_proj", gated, ("hidden", "heads"), x.type.shape[-1], bias=False)


def _causal_conv(
    emit: Emit, prefix: str, x: FlowValue, spec: GatedDeltaSpec | Mamba2Spec, bias: bool = False, kind: str = "silu"
) -> FlowValue:
    """Write a causal depthwise convolution of `x` `[B,S,M]` and the activation `kind`, a name in `UNARY`.

    Weights: `{prefix}.conv1d.weight` `[M, 1, kernel]` and, with `bias`, `{prefix}.conv1d.bias` `[M]`; M is the sum of
    the spec's `widths`.
    """
    columns = sum(spec.widths)
    with emit.scope("conv1d"):
        weights = [emit.param(f"{prefix}.conv1d.weight", (columns, 1, spec.kernel), (spec.mixed_roles, None, None))]
        if bias:
            weights.append(emit.param(f"{prefix}.conv1d.bias", (columns,), (spec.mixed_roles,)))
        return emit.add_node(Unary(kind), emit.add_node(hir.CausalConv(bias), x, *weights))


def _time_steps(
    emit: Emit, prefix: str, t: FlowValue, heads: int, low: float = 0.0, high: float | None = None
) -> tuple[FlowValue, ...]:
    """Write the time step and the decay rate of each head, `softplus(t + dt_bias)` and `−exp(A_log)`.

    Args:
        t: projected time steps `[B,S,heads]`.
        heads: number of heads; the weights `{prefix}.dt_bias` and `{prefix}.A_log` are `[heads]`.
        low, high: limits of the step; None for no upper limit.
    """
    weights = (emit.param(f"{prefix}.{name}", (heads,), ("heads",)) for name in ("dt_bias", "A_log"))
    return emit.add_all(hir.TimeSteps(low, high), t, *weights)


def gated_delta_layer(index: int, layer: LayerSpec, spec: GatedDeltaSpec, prefix: str = "model.layers") -> Named:
    """Return layer `index` with a Gated DeltaNet in place of attention; `layer` describes its norms and its MLP."""
    p = f"{prefix}.{index}"
    mixer = GatedDeltaNet(f"{p}.linear_attn", spec)
    return Named(f"layer{index}", MixerLayer(p, layer, (mixer,), "gated_delta_layer"))


@dataclass(frozen=True)
class GdnScan:
    """Gated delta rule over inputs that `emit.set_gdn` registered; the result is `[B,S,Hv,n]`.

    The inputs are q, k and v `[B,S,Hv,n]`, g and beta `[B,S,Hv]`. The stage ignores the active value, but needs one.

    Args:
        state_size: n, the width of each head.
        out_shape: expected shape of the result, if given.
        carry_state: start from the value registered as `state_key`, `[B,Hv,n,n]` f32, and register the state after the
            last token under the same key, for later stages and for `with_extra_outputs`. No array is written in place.
            Without `carry_state` the compiler owns the state, which `prefill` and `extend` carry.
        state_key: name of the registered state.

    Raises:
        GraphError: no inputs or no state are registered, or `carry_state` is set without `state_key`.
    """

    state_size: int
    out_shape: HiddenShape = None
    carry_state: bool = False
    state_key: str | None = None

    @staticmethod
    def prefill(state_size: int, out_shape: HiddenShape = None) -> GdnScan:
        """Return a scan that starts from zeros."""
        return GdnScan(state_size, out_shape)

    def with_carry(self, key: str) -> GdnScan:
        """Return this scan with the state registered as `key` as its start; the final state replaces it."""
        return GdnScan(self.state_size, self.out_shape, True, key)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        emit.require(value, "GdnScan")
        inputs = emit.state.gdn
        if inputs is None:
            raise GraphError(f"{emit.path}: GdnScan reads q, k, v, g and beta: call emit.set_gdn before it")
        if self.carry_state and self.state_key is None:
            raise GraphError(f"{emit.path}: GdnScan carries a state, but has no state_key to read it from")
        with emit.scope("gdn_scan"):
            if self.carry_state and self.state_key is not None:
                state = emit.named(self.state_key)
                out, new_state = emit.gated_delta_net_carry(*inputs, state, self.state_size)
                emit.set_named(self.state_key, new_state)
            else:
                out = emit.gated_delta_net(*inputs, self.state_size)
        check_hidden(emit, out, self.out_shape, "GdnScan")
        return out


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Sizes of a Mamba-2 mixer.

    Args:
        heads, head_dim: number of heads and width of a head.
        state_size: size of the state of each column of a head.
        groups: number of groups of consecutive heads that share B and C; it divides `heads`.
        kernel: window of the convolution, in tokens.
        bias: whether the projections have biases.
        conv_bias: whether the convolution has a bias.
        eps: epsilon of both norms.
        time_step_limit: lower and upper limit of a time step; None for no upper limit.
        activation: activation after the convolution, a name in `UNARY`. The gate always uses silu.
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
            check_integer(f"Mamba2Spec: {name}", getattr(self, name), error_class=GraphError)
        if self.heads % self.groups:
            raise GraphError(f"Mamba2Spec: {self.heads} heads are no multiple of {self.groups} groups")

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of x, B and C, the columns that the convolution mixes along the tokens."""
        shared = self.groups * self.state_size
        return self.inner, shared, shared

    @property
    def mixed_roles(self) -> Parts:
        """Roles of the concatenated columns of x, B and C."""
        return Parts(tuple(zip(self.widths, ("heads", "groups", "groups"), strict=True)))


@dataclass(frozen=True)
class Mamba2Mixer:
    """Mamba-2 mixer: token mixing by a state of fixed size.

    It maps a normalised u `[B,S,H]` to `[B,S,H]`:

    1. z, m, t = u W_in and x, B, C = act(conv(m));
    2. `Δ = clip(softplus(t + dt_bias))` and `A = −exp(A_log)`;
    3. y is the result of the selective scan;
    4. `(w ⊙ rms((y + D x) ⊙ silu(z))) W_out`, with the RMSNorm over each group of heads.

    Weights under `prefix`: `in_proj` `[I + M + N, H]` and `out_proj` `[H, I]` with their biases, `conv1d.weight`
    `[M, 1, kernel]` and `.bias`, `dt_bias`, `A_log` and `D` `[N]`, `norm.weight` `[I]`. N is the number of heads, I
    their total width, and M the total width of x, B and C.

    Source: Dao and Gu, arXiv:2405.21060.
    """

    prefix: str
    spec: Mamba2Spec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s = emit.require(value, "Mamba2Mixer"), self.spec
        with emit.scope(self.prefix.rpartition(".")[2] or "mixer"):
            packed = Parts(((s.inner, "heads"), *s.mixed_roles.of, (s.heads, "heads")))
            columns = (s.inner, sum(s.widths), s.heads)
            projected = dense(emit, self.prefix, "in_proj", x, (packed, "hidden"), sum(columns), bias=s.bias)
            z, mixed, t = emit.split(projected, columns)
            convolved = _causal_conv(emit, self.prefix, mixed, s, s.conv_bias, s.activation)
            values, b, c = emit.split(convolved, s.widths)
            step, rate = _time_steps(emit, self.prefix, t, s.heads, *s.time_step_limit)
            out = emit.add_node(hir.SelectiveScan(s.heads, s.groups), values, step, rate, b, c)
            # D is one number per head, so the skip connection needs the heads as an axis.
            skip = emit.param(f"{self.prefix}.D", (s.heads,), ("heads",)).reshape(s.heads, 1)
            out = out + (values.reshape(*values.shape[:-1], s.heads, s.head_dim) * skip).reshape(values.shape)
            gated = out * emit.add_node(Unary("silu"), z)
            with emit.scope("norm"):  # over each group of heads
                groups = gated.reshape(*gated.shape[:-1], s.groups, s.inner // s.groups)
                normed = emit.add_node(Standardize((-1,), s.eps, centre=False), groups).reshape(gated.shape)
                normed = normed * emit.param(f"{self.prefix}.norm.weight", (s.inner,), ("heads",))
            return dense(emit, self.prefix, "out_proj", normed, ("hidden", "heads"), x.type.shape[-1], bias=s.bias)


def mamba2_layer(index: int, spec: Mamba2Spec, prefix: str = "backbone.layers") -> Named:
    """Return Mamba-2's layer `index`: `x + mixer(rms(x))`."""
    p = f"{prefix}.{index}"
    stages = (ResidualSave(), RmsNorm(f"{p}.norm.weight", spec.eps), Mamba2Mixer(f"{p}.mixer", spec), ResidualAdd())
    return Named(f"layer{index}", Sequence(stages))


@dataclass(frozen=True)
class Recurrent:
    """Run a custom recurrence `state, y_t = step(state, x_t, *params)` along the tokens: x `[B, S, …]` → y `[B, S, …]`.

    Args:
        step: the function of one token.
        keys: keys of the weights `params`, which the step receives after the token, in their stored layout.
        init, unroll: the state before the first token, and how far to unroll the scan, as in `emit.recurrent`, which
            also accepts several sequences and a learned initial state.
    """

    step: Callable[..., Any]
    keys: tuple[str, ...] = ()
    init: Any = field(default=None, kw_only=True)
    unroll: int | None = field(default=None, kw_only=True)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "Recurrent")
        with emit.stage(), emit.scope(step_name(self.step)), emit.user_code():
            y: FlowValue = emit.recurrent(self.step, x, *self.keys, init=self.init, unroll=self.unroll)
        return y


@dataclass(frozen=True)
class CausalWindow:
    """Gather the last `width` tokens up to and including each token: x `[B, S, …]` → `[B, S, width, …]`.

    Positions before the first token are zeros.
    """

    width: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        x = emit.require(value, "CausalWindow")
        with emit.stage(), emit.scope("causal_window"):
            return emit.causal_window(x, self.width)
