"""Builders that only the specification names (IR 5.2, 5.6, 6.5, 8): aliases, and compositions of other ops.

Arguments are in the order of the specification: operands, then attributes. `rlx_jax.trace.checks` lists the other
builders that accept this order too.

A weight is packed if its parameter is declared with a packing, `packed="gguf_q4k"`, or read from a packed checkpoint.
It is a value of its logical shape then, `[out, in]`, and the program decodes it where it is used. With the other
schemes of the specification the codes, scales and zero points are operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, did_you_mean, listing, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import GraphStage, Param, locate_errors
from rlx_jax.ir.ops.conv import Conv
from rlx_jax.ir.ops.experts import GroupedMatMul
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp
from rlx_jax.ir.packed import TABLES
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.types import DimLike, Init, TensorType, as_dtype, is_float, is_static
from rlx_jax.plugins import active_plugin
from rlx_jax.trace.builders import Builders
from rlx_jax.trace.checks import bind_kind, items_of
from rlx_jax.trace.image_ops import Counts
from rlx_jax.trace.parameters import WeightKey
from rlx_jax.trace.quant_scheme import FLOAT_CODES, QuantScheme
from rlx_jax.trace.writer import V, is_number

# Zero point of 4-bit codes without an operand for it.
INT4_ZERO = 8


class SpecBuilders(Builders[V]):
    """All builders: the methods of `Builders`, and the names of the specification."""

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
        self, table: V | WeightKey, ids: V, axis: int = 0, *, shape: Sequence[int] | None = None,
        init: Init | None = None,
    ) -> V:  # fmt: skip
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
        self, q: V, k: V, v: V, mask_value: V, heads: int, head_dim: int, scale: float | None = None,
        softcap: float | None = None,
    ) -> V:  # fmt: skip
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
            out, final_state = self.add_all(GatedDeltaOp(from_state=True), q, k, v, g, beta, state)
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

    # -- quantized weights -------------------------------------------------------------------

    def dequant_matmul(
        self, x: V, w: V | WeightKey, scale: V | WeightKey | None = None, zero_point: V | WeightKey | None = None,
        scheme: str = "", *, global_scale: V | WeightKey | None = None,
    ) -> V:  # fmt: skip
        """Return the product of x `[…, k]` with the decoded values of a quantized weight → `[…, n]`.

        Without a scale, w is a packed weight `[n, k]`, and the result is `x · wᵀ`. Otherwise w has the codes of
        `[k, n]`, by `scheme`:

        - `int8/b`, `int8a/b`: i8 `[k, n]`; `int4/b`: u8, two codes of 0 to 15 in each byte, the lower half first;
          `(code − zero_point) · scale`, scale and zero_point `[⌈k/b⌉, n]`. Without zero_point it is 0, for int4 8.
        - `fp8e4m3`, `fp8e5m2`: float8 or their bytes u8 `[k, n]`, scale `[n]`.
        - `nvfp4/16`: codes as for int4, scale bytes of float8 (e4m3, 0x7F is 0) u8 `[⌈k/16⌉, n]`, global_scale `[]`.

        Raises:
            GraphError: the scheme is unknown or not that of the parameter, or it has other operands.
            DTypeError, ShapeError: the operands do not fit the scheme.
        """
        optional = {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}
        operands = [name for name, value in optional.items() if value is not None]
        packing = self._scheme(scheme) if scheme or operands else None
        if packing and not set(packing.operands) <= set(operands) <= {*packing.operands, *packing.optional_operands}:
            expected, actual = (listing(names) or "none" for names in (packing.operands, operands))
            raise GraphError(f"{self.path}: dequant_matmul: operands of {scheme}: {expected}; got {actual}")
        if packing is None or packing.is_packed:
            weight = self._packed_weight("dequant_matmul", w, scheme, (None, *self.type_of(x).shape[-1:]))
            is_block = self.level == GraphStage.HIR
            return self.linear(x, weight, transpose=True) if is_block else self.add_node(MatMul(contract=1), x, weight)
        codes, scales, zeros, outer = (None if v is None else self.weight(v) for v in (w, *optional.values()))
        assert codes is not None and scales is not None
        if packing.kind in FLOAT_CODES:
            return self.quantized_matmul(x, self._float8(codes, FLOAT_CODES[packing.kind]), scales)
        if packing.scale_is_fp8:
            assert outer is not None
            codes = self.gather(self.constant(TABLES["e2m1"]), self.cast(self._nibbles(x, codes, scales), "i32"))
            scales = self.mul(self._float8(scales, "f8_e4m3", zero=0x7F), outer)
        elif packing.kind == "int4":
            codes = self._nibbles(x, codes, scales)
            zeros = self.full_like(scales, INT4_ZERO) if zeros is None else zeros
        elif self.type_of(codes).dtype != np.int8:
            raise DTypeError(f"{self.path}: dequant_matmul: the codes of {scheme} are i8, got {self.type_of(codes)}")
        return self.quantized_matmul(x, codes, scales, zeros, block=packing.block)

    def dequant_matmul_packed(self, x: V, w: V | WeightKey, scheme: str = "") -> V:
        """Return `dequant_matmul` of a packed weight `[n, k]`."""
        return self.dequant_matmul(x, w, None, None, scheme)

    def dequant_matmul_nvfp4(self, x: V, w: V | WeightKey, scale: V | WeightKey, global_scale: V | WeightKey) -> V:
        """Return `dequant_matmul` of the scheme `nvfp4/16`."""
        return self.dequant_matmul(x, w, scale, None, "nvfp4/16", global_scale=global_scale)

    def _scheme(self, name: str) -> QuantScheme:
        """Return the scheme of this name; errors name the current block."""
        with locate_errors(self.builder.current_origin):
            return QuantScheme(name)

    def _packed_weight(self, name: str, w: V | WeightKey, scheme: str, shape: Sequence[DimLike | None] | None) -> V:
        """Return a weight as a value, after checking that it is declared with `scheme` if that is not empty."""
        weight = self.weight(w, shape=shape)
        value, weight_type = self.unwrap(weight), self.type_of(weight)
        op = self.builder.nodes[value.node].op
        packing = packing_of(op.programs[0]) if isinstance(op, Param) else None
        if (scheme and self._scheme(scheme).name != packing) or not is_float(weight_type.dtype):
            expected = f"packed={scheme or 'gguf_q4k'!r}"
            raise GraphError(
                f"{self.path}: {name}: expected a parameter that is declared with {expected} and its logical shape, "
                f"got {weight_type} {f'packed as {packing}' if packing else 'that is not packed'}"
            )
        return weight

    def _nibbles(self, x: V, codes: V, scales: V) -> V:
        """Return the 4-bit codes `[k, n]` in the bytes `codes`; k is a size of x, and n one of the scales."""
        shape = (*self.type_of(x).shape[-1:], *self.type_of(scales).shape[-1:])
        codes_type = self.type_of(codes)
        if len(shape) != 2 or not codes_type.is_static or not all(map(is_static, shape)):
            raise ShapeError(f"{self.path}: dequant_matmul: 4-bit codes have static sizes, got {codes_type}")
        if 2 * codes_type.size != math.prod(shape):
            raise ShapeError(f"{self.path}: dequant_matmul: two codes of {list(shape)} in each byte, got {codes_type}")
        return self.unpack_nibbles(codes, shape)

    def _float8(self, x: V, name: str, zero: int | None = None) -> V:
        """Return floats of 8 bits, or the bytes of such as f32; the byte `zero` is 0."""
        x_type = self.type_of(x)
        if x_type.dtype == as_dtype(name) and zero is None:
            return x
        if x_type.dtype != np.uint8:
            raise DTypeError(f"{self.path}: dequant_matmul: expected bytes u8 of {name}, got {x_type}")
        table = np.arange(256, dtype=np.uint8).view(as_dtype(name)).astype(np.float32)
        table[[] if zero is None else zero] = 0
        return self.gather(self.constant(table), self.cast(x, "i32"))

    # -- experts -----------------------------------------------------------------------------

    def grouped_matmul(self, x: V, w: V | WeightKey, ids: V) -> V:
        """Return `x[i] · w[ids[i]]` for each row: x `[M, K]`, w `[E, K, N]`, ids `[M]` in `[0, E)` → `[M, N]`."""
        return self.add_node(GroupedMatMul(), x, self.weight(w), ids)

    def dequant_grouped_matmul(self, x: V, w: V | WeightKey, ids: V, scheme: str = "") -> V:
        """Return `x[i] · w[ids[i]]ᵀ` for each row, for packed experts w `[E, N, K]`: x `[M, K]`, ids `[M]`."""
        return self.add_node(
            GroupedMatMul(contract=1), x, self._packed_weight("dequant_grouped_matmul", w, scheme, None), ids
        )

    def dequant_moe_weights(self, w: V | WeightKey, scheme: str = "") -> V:
        """Return the decoded values of packed experts `[E, N, K]` as `[E, K, N]`."""
        return self.transpose(self._packed_weight("dequant_moe_weights", w, scheme, None), (0, 2, 1))

    # -- integers ----------------------------------------------------------------------------

    def q_matmul(self, x: V, w: V, bias: V, *, x_zp: int, w_zp: int, out_zp: int, mult: float) -> V:
        """Return `clamp(round(acc · mult) + out_zp)` in i8, with `acc = bias + Σ (x − x_zp)(w − w_zp)` in i32.

        x i8 `[M, K]`, w i8 `[K, N]`, bias i32 `[N]`. `mult` is a factor in f32; halves are rounded to even.
        """
        self._check_integers("q_matmul", (x, w, bias), (x_zp, w_zp, out_zp), mult, rank=2)
        return self._requantize(self.add(self.integer_matmul(x, w, x_zp, w_zp), bias), out_zp, mult)

    def q_conv2d(
        self, x: V, w: V, bias: V, *, x_zp: int, w_zp: int, out_zp: int, mult: float, window_strides: Counts = 1,
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0, rhs_dilation: Counts = 1,
        feature_group_count: int = 1,
    ) -> V:  # fmt: skip
        """Return `q_matmul` as a convolution: x i8 `[N, C, H, W]`, w i8 `[O, C/groups, kh, kw]`, bias i32 `[O]`.

        Padded entries are equal to `x_zp`, and contribute nothing. H and W are static.
        """
        self._check_integers("q_conv2d", (x, w, bias), (x_zp, w_zp, out_zp), mult, rank=4)
        strides, pairs = self._per_axis("window_strides", window_strides, 2), self._padding_pairs(padding, 2)
        op = Conv(strides, pairs, self._per_axis("rhs_dilation", rhs_dilation, 2), feature_group_count)
        with locate_errors(self.builder.current_origin):
            (result,) = self.builder.types.infer(op, (self.type_of(x), self.type_of(w)))
        if isinstance(pairs, str) or not all(map(is_static, self.type_of(x).shape[1:])):
            raise ShapeError(
                f"{self.path}: q_conv2d: static C, H and W, and padding as numbers; got {self.type_of(x)} and "
                f"{shown(padding)}"
            )
        # XLA has no convolution of 32-bit integers on GPUs, so that this is a product with the entries of each window.
        padded = self.pad(self._subtract_zero_point(x, x_zp), [(0, 0), (0, 0), *pairs])
        offsets = itertools.product(*(range(size) for size in self.type_of(w).shape[2:]))
        columns = self.stack([self._every_window(padded, at, op, result) for at in offsets], 2)
        features, per_group, *window = self.type_of(w).shape
        batch, groups, size = self.shape(x).shape[0], feature_group_count, result.shape[2:]
        columns = self.reshape(columns, (batch, groups, per_group, math.prod(window), *size))
        weights = self._subtract_zero_point(w, w_zp)
        weights = self.reshape(weights, (groups, features // groups, per_group, math.prod(window)))
        acc = self.reshape(self.einsum("ngckhw,gock->ngohw", columns, weights), (batch, features, *size))
        return self._requantize(self.add(acc, self.expand_dims(bias, [1, 2])), out_zp, mult)

    def _every_window(self, x: V, at: tuple[int, ...], op: Conv, result: TensorType) -> V:
        """Return the entry `at` of every window of the convolution `op` with this result."""
        starts = [step * i for step, i in zip(op.dilation, at, strict=True)]
        axes = zip(starts, op.strides, result.shape[2:], strict=True)
        return self.slice(x, (..., *(slice(start, start + (n - 1) * step + 1, step) for start, step, n in axes)))

    def _check_integers(
        self, name: str, operands: tuple[V, V, V], zero_points: tuple[int, int, int], mult: float, rank: int
    ) -> None:
        """Check the types of x, w and the bias, and the numbers of a product of 8-bit integers."""
        x, w, bias = (self.type_of(value) for value in operands)
        width = w.shape[-1 if rank == 2 else 0] if w.rank == rank else None
        if (x.rank, w.rank) != (rank, rank) or bias.shape != (width,) or {x.dtype, w.dtype} != {as_dtype("i8")}:
            raise ShapeError(f"{self.path}: {name}: x and w are i8 of rank {rank}, and the bias i32 with an entry for "
                             f"each output; got {x}, {w} and {bias}")  # fmt: skip
        if bias.dtype != np.int32:
            raise DTypeError(f"{self.path}: {name}: the bias is i32, got {bias}")
        if not all(isinstance(zero, int) and -128 <= zero <= 127 for zero in zero_points):
            raise GraphError(f"{self.path}: {name}: zero points are ints from -128 to 127, got {shown(zero_points)}")
        if not is_number(mult) or not 0 < mult < math.inf:
            raise GraphError(f"{self.path}: {name}: mult is a finite number over 0, got {shown(mult)}")

    def _requantize(self, acc: V, out_zp: int, mult: float) -> V:
        """Return `clamp(round(acc · mult) + out_zp)` in i8."""
        rounded = self.round(self.mul(self.cast(acc, "f32"), mult))
        return self.cast(self.add(rounded, float(out_zp)), "i8", saturate=True)
