"""Builders with names that only the specification has (IR 5.6, 5.2): aliases and short compositions.

Arguments are in the order of the specification: operands, then attributes. `rlx_jax.trace.checks` lists the other
builders that accept this order too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx_jax.errors import GraphError, ShapeError, did_you_mean, listing, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import GraphStage
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp
from rlx_jax.ir.plugins import active_plugin
from rlx_jax.ir.types import Init, is_static
from rlx_jax.trace.builders import Builders
from rlx_jax.trace.checks import bind_kind, items_of
from rlx_jax.trace.parameters import WeightKey
from rlx_jax.trace.quantized import QuantizedBuilders
from rlx_jax.trace.writer import V


class SpecBuilders(QuantizedBuilders[V]):
    """All builders: the methods of `QuantizedBuilders`, and the names of the specification."""

    # -- other names -------------------------------------------------------------------------

    sm = Builders.softmax
    ln = Builders.layer_norm
    gelu_approx = bind_kind(Builders.activation, "gelu_tanh", "½x(1 + tanh(√(2/π)(x + 0.044715x³))).")
    reshape_ = Builders.reshape
    transpose_ = Builders.transpose
    narrow_ = Builders.narrow
    concat_ = Builders.concat
    rope_n = Builders.rope
    conv_transpose2d = Builders.conv_transpose
    attention_kind_opts = Builders.attention_kind
    transformer_block = Builders.llama_decoder_block
    dense_solve = Builders.solve

    # -- indices -----------------------------------------------------------------------------

    def gather_(
        self,
        table: V | WeightKey,
        ids: V,
        axis: int = 0,
        *,
        shape: Sequence[int] | None = None,
        init: Init | None = None,
    ) -> V:
        """Return rows of a table by index: `gather` for axis 0.

        For a later axis, the axes before it are batch axes that `ids` has too: table `[B, S, E]`, ids `[B, I]` and axis
        1 give `[B, I, E]`.
        """
        if axis == 0:
            return self.gather(table, ids, shape=shape, init=init)
        x = self._table(table, None, shape, init)
        return self.gather_nd(x, self.expand_dims(ids, -1), batch_dims=self._axis(x, axis))

    # -- products ----------------------------------------------------------------------------

    def linear_bias_act(self, x: V, w: V | WeightKey, bias: V | WeightKey, activation: str = "") -> V:
        """Return `act(x · w + bias)`: a block at HIR, tensor ops below."""
        if self.level == GraphStage.HIR:
            return self.linear(x, w, bias, activation=activation)
        y = self.add(self.mm(x, self.weight(w)), self.weight(bias))
        return self.activation(activation, y) if activation else y

    linear_bias = linear_bias_act

    def shared_matmul_pair(self, x: V, w1: V, w2: V) -> tuple[V, V]:
        """Return `x · w₁` and `x · w₂` as tensor ops."""
        return self.mm(x, w1), self.mm(x, w2)

    def fused_swiglu_ffn(self, x: V, up: V, gate: V, down: V) -> V:
        """Return `(silu(x · gate) ⊙ (x · up)) · down` as tensor ops, with one product for up and gate."""
        up_and_gate = self.mm(x, self.concat([up, gate], 1))
        return self.mm(self.fused_swiglu(up_and_gate, gate_first=False), down)

    def batched_dense_solve(self, a: V, b: V) -> V:
        """Return the x of `a x = b` for every row: a `[B, n, n]`, b `[B, n]` or `[B, n, k]`."""
        if self.type_of(b).rank != 2:
            return self.solve(a, b)
        return self.squeeze(self.solve(a, self.expand_dims(b, -1)), -1)

    # -- attention and rotations -------------------------------------------------------------

    def attention_opts(
        self,
        q: V,
        k: V,
        v: V,
        mask_value: V,
        heads: int,
        head_dim: int,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> V:
        """Return `attention` with only a keep mask `[B, T]`; it is not causal."""
        return self.attention_kind(
            q, k, v, heads=heads, head_dim=head_dim, mask="keep", mask_value=mask_value, scale=scale, softcap=softcap
        )

    attention_ = attention_opts

    def attention_bias(self, q: V, k: V, v: V, bias: V, heads: int, head_dim: int, scale: float | None = None) -> V:
        """Return `attention` over all keys with a bias `[B, N, S, T]` added to the scaled scores."""
        return self.attention_kind(
            q, k, v, heads=heads, head_dim=head_dim, mask="bias", mask_value=bias, scale=scale
        )  # fmt: skip

    # -- recurrences -------------------------------------------------------------------------

    def gated_delta_net(self, q: V, k: V, v: V, g: V, beta: V, state_size: int) -> V:
        """Return the gated delta rule from a state of zeros: q, k, v `[B, S, Hv, n]`, g and beta `[B, S, Hv]` →
        `[B, S, Hv, n]`. Prefill and extend carry the state."""
        self._check_delta(q, k, v, state_size)
        flat = (self.reshape(t, (*self.shape(t).shape[:2], -1)) for t in (q, k, v))
        heads = (int(self.type_of(t).shape[2]) for t in (k, v))
        return self.reshape(self.add_node(hir.GatedDelta(*heads), *flat, g, beta), self.shape(v).shape)

    def gated_delta_net_carry(self, q: V, k: V, v: V, g: V, beta: V, state: V, state_size: int) -> tuple[V, V]:
        """Return the gated delta rule from `state` `[B, Hv, n, n]` f32, and the state after the last token."""
        self._check_delta(q, k, v, state_size)
        with self._block("gated_delta_net_carry"):
            out, final_state = self.add_all(GatedDeltaOp(held=True), q, k, v, g, beta, state)
        return out, final_state

    def _check_delta(self, q: V, k: V, v: V, state_size: int) -> None:
        """Check that q, k and v are `[B, S, heads, state_size]` with static heads."""
        for name, t in (("q", self.type_of(q)), ("k", self.type_of(k)), ("v", self.type_of(v))):
            if t.rank != 4 or not is_static(t.shape[2]) or not is_static(t.shape[3]) or t.shape[3] != state_size:
                raise ShapeError(
                    f"{self.path}: gated_delta_net: {name} is [B, S, heads, {shown(state_size)}] with known heads, "
                    f"got {t}; for heads of other widths use gated_delta(q, k, v, g, beta, key_heads=, value_heads=)"
                )

    def depthwise_conv1d_causal(self, x: V, w: V | WeightKey, left_pad: V, kernel_size: int) -> V:
        """Return each channel convolved with its own window: x `[B, S, C]`, w `[C, 1, 1, K]`, left_pad `[B, K−1, C]`
        with the preceding rows → `[B, S, C]`. `causal_conv` carries these rows itself."""
        weight = self.weight(w)
        x_type, w_type = self.type_of(x), self.type_of(weight)
        if x_type.rank != 3 or w_type.shape != (x_type.shape[2], 1, 1, kernel_size):
            raise ShapeError(
                f"{self.path}: depthwise_conv1d_causal: x is [B, S, C] and w [C, 1, 1, {shown(kernel_size)}], got "
                f"{x_type} and {w_type}"
            )
        pad = self.type_of(left_pad)
        if pad.shape != (x_type.shape[0], kernel_size - 1, x_type.shape[2]):
            raise ShapeError(
                f"{self.path}: depthwise_conv1d_causal: left_pad is [B, {kernel_size - 1}, C] for x {x_type}, got {pad}"
            )
        with self._block("depthwise_conv1d_causal"):
            rows = self.concat([left_pad, x], 1)
            return self.add_node(CausalConvOp(), rows, self.reshape(weight, (w_type.shape[0], kernel_size)))

    # -- user-defined ops --------------------------------------------------------------------

    def custom_op(self, name: str, inputs: Sequence[V], attributes: Mapping[str, Any] | None = None) -> V:
        """Return the result of an op that a plugin defines, by the name of its class; `attributes` are its fields.

        Raises:
            GraphError: no plugin has an op of that name, or it has other attributes.
        """
        ops = active_plugin().op_classes()
        if name not in ops:
            suggestion = did_you_mean(name, ops) or f"; known are {listing(ops) or 'none'}: see docs/plugins.md"
            raise GraphError(f"{self.path}: custom_op: no plugin has an op {quote(name)}{suggestion}")
        try:
            op = ops[name](**(attributes or {}))
        except TypeError as error:  # from the constructor of the dataclass
            raise GraphError(f"{self.path}: custom_op: {name} does not take {shown(attributes)}: {error}") from error
        return self.add_node(op, *items_of(inputs, f"{self.path}: custom_op", "a list of values"))

    def custom_fn(self, fwd: Callable[..., Any], *inputs: V, vjp: Callable[..., Any] | None = None) -> Any:
        """Return `fwd(*inputs)`; `vjp(*inputs, *outputs, *gradients)` is an optional gradient as in `custom_vjp`."""
        return fwd(*inputs) if vjp is None else self.custom_vjp(fwd, vjp, *inputs)

    custom_fn_multi = custom_fn
