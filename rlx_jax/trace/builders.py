"""`Builders`: blocks, which exist only at HIR, and by inheritance all tensor ops, which exist at every level.

`Emit` and `GraphModule` are its two writers. Axis letters: B batch, S tokens, T keys, N query heads, K key heads,
D head width, H hidden, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from rlx_jax.errors import GraphError, ShapeError, WeightShapeError, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import GraphStage, Mir
from rlx_jax.ir.ops import fused
from rlx_jax.ir.ops.experts import ClampedGate
from rlx_jax.ir.ops.reduce import LayerNormOp, Standardize
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.param import Roles
from rlx_jax.ir.roles import roles_of_bias
from rlx_jax.ir.types import DimLike, Init, is_static
from rlx_jax.trace.attention import AttentionBuilders
from rlx_jax.trace.checks import bind_kind, items_of
from rlx_jax.trace.parameters import WeightKey, WeightPart, WeightStack
from rlx_jax.trace.writer import Shape, V, is_integer, is_number


class Builders(AttentionBuilders[V]):
    """Blocks, products and norms over the values `V` of a writer, and all methods of `AttentionBuilders`."""

    @contextmanager
    def _block(self, label: str) -> Iterator[None]:
        """Write several nodes inside this context as one block: all get its label. Only at HIR."""
        if self.level != GraphStage.HIR:
            raise GraphError(f"{label} is a HIR block; module {self.builder.name!r} is at {self.level}")
        with self.builder.origin_scope(replace(self.builder.origin, label=label)):
            yield

    def _weights(self, *weights: V | WeightKey | None, like: V | None = None) -> list[V]:
        """Return the weights that are not None as values; with `like`, keys are weights as long as its last axis."""
        shape = None if like is None else self.type_of(like).shape[-1:]
        for weight in weights:
            if is_number(weight):
                raise GraphError(f"{self.path}: expected a value or a weight key, got {weight!r}; a number is eps=")
        return [self.weight(w, shape=shape) for w in weights if w is not None]

    # -- products ----------------------------------------------------------------------------

    def linear(
        self, x: V, w: V | WeightKey, bias: V | WeightKey | None = None, *, activation: str = "",
        transpose: bool | None = None, roles: Roles | None = None, columns: DimLike | None = None,
        init: Init | None = None,
    ) -> V:  # fmt: skip
        """Return `act(x · w [+ bias])` for x `[…, in]`, w `[in, out]` as a value or `[out, in]` as a key, bias `[out]`.

        So `linear(x, key)` equals `linear(x, param(key), transpose=True)`.

        Args:
            transpose: w is `[out, in]` if True, `[in, out]` if False. A square weight fits both, so that its shape does
                not reveal a wrong choice.
            roles: roles of the axes of a weight under a key, as in the checkpoint; the roles of the bias follow.
            columns: `out`, needed only for a weight that no source has.
            init: initializer of a weight that no source has: see `emit.param`.
        """
        contract = self._contract(w, transpose)
        op = hir.Linear(contract, bias=bias is not None, activation=activation)
        if not isinstance(w, str | WeightPart):
            if (roles, columns, init) != (None, None, None):
                raise GraphError(
                    f"{self.path}: roles, columns and init belong to a weight under a key: use emit.param(key, roles=…)"
                )
            return self.add_node(op, x, *self._weights(w, bias))
        in_sizes = self.type_of(x).shape[-1:] or (None,)
        try:
            weight = self.weight(w, roles, shape=(columns, *in_sizes) if contract else (*in_sizes, columns), init=init)
        except WeightShapeError as error:
            reading = f"linear reads it with transpose={bool(contract)}, and x is {self.type_of(x)}"
            raise WeightShapeError(f"{error}; {reading}") from error
        if bias is None:
            return self.add_node(op, x, weight)
        if is_number(bias):
            self._weights(bias)  # raises the error about a number
        bias_roles = None if roles is None else roles_of_bias(roles[1 - contract])
        bias_value = self.weight(bias, bias_roles, shape=(self.type_of(weight).shape[1 - contract],))
        return self.add_node(op, x, weight, bias_value)

    def _contract(self, w: V | WeightKey, transpose: bool | None) -> int:
        """Return the axis of w that is summed over: 1 for `[out, in]`, 0 for `[in, out]`."""
        if not isinstance(transpose, bool | None):
            raise GraphError(f"{self.path}: transpose is {shown(transpose)}; expected True, False or None")
        return int(isinstance(w, str | WeightPart) if transpose is None else transpose)

    def _biased_product(
        self, kind: str, x: V, w: V | str, bias: V | str, *, activation: str = "", transpose: bool | None = None
    ) -> V:
        op_class = hir.LinearFused if kind == "block" else fused.FusedMatMulBiasAct
        op = op_class(self._contract(w, transpose), activation)
        return self.add_node(op, x, *self._weights(w, bias))

    linear_fused = bind_kind(_biased_product, "block", "`act(x · w + bias)` as one block; w and bias as in `linear`.")
    fused_matmul_bias_act = bind_kind(_biased_product, "op", "`act(x · w + bias)` as one tensor op; w as in `linear`.")

    def shared_linear_pair(self, x: V, w1: V | str, w2: V | str, *, transpose: bool | None = None) -> tuple[V, V]:
        """Return `x · w₁` and `x · w₂`, which may differ in width; the weights are as in `linear`."""
        contracts = (self._contract(w1, transpose), self._contract(w2, transpose))
        weights = self._weights(w1, w2)
        product1, product2 = (self.add_node(hir.SharedLinearPair(slot, contracts), x, *weights) for slot in (0, 1))
        return product1, product2

    # -- norms: over the last axis -----------------------------------------------------------

    def rms_norm(
        self, x: V, gamma: V | str | None = None, beta: V | str | None = None, eps: float = 1e-5, *, offset: float = 0.0
    ) -> V:
        """Return `x · (mean(x²) + ε)^(−1/2) [⊙ (offset + γ) [+ β]]`: γ and β `[H]` or `[N, H]`; Gemma's offset is 1."""
        if gamma is None:
            if beta is not None or offset:
                raise GraphError(f"{self.path}: rms_norm: beta and offset go with a gamma")
            # The block requires a γ, so that a norm without one is a tensor op.
            return self.add_node(Standardize((-1,), eps, centre=False), x)
        op = hir.RmsNorm(eps, offset)
        return self.add_node(op, x, *self._weights(gamma, beta, like=x))

    def layer_norm(self, x: V, gamma: V | str | None = None, beta: V | str | None = None, eps: float = 1e-5) -> V:
        """Return `(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`: γ and β `[H]`, both optional."""
        affine = (gamma is not None, beta is not None)
        # The block exists only at HIR, where passes look for it; lower modules write the tensor op.
        op = hir.LayerNorm(eps, *affine) if self.level == GraphStage.HIR else LayerNormOp(eps, *affine)
        return self.add_node(op, x, *self._weights(gamma, beta, like=x))

    def residual_rms_norm(self, x: V, residual: V, gamma: V | str, beta: V | str | None = None, eps: float = 1e-5) -> V:
        """Return `rms_norm(x + residual)` as one block: x and residual have one type."""
        op = hir.ResidualRmsNorm(eps)
        return self.add_node(op, x, residual, *self._weights(gamma, beta, like=x))

    def fused_residual_rms_norm(
        self, x: V, residual: V, gamma: V | str, beta: V | str | None = None, eps: float = 1e-5, *,
        bias: V | str | None = None, offset: float = 0.0,
    ) -> V:  # fmt: skip
        """Return `rms_norm(x [+ bias] + residual)` as one tensor op."""
        op = fused.FusedResidualRmsNorm(eps, bias is not None, offset)
        return self.add_node(op, x, residual, *self._weights(bias, gamma, beta))

    def fused_residual_ln(
        self, x: V, residual: V, gamma: V | str, beta: V | str, eps: float = 1e-5, *, bias: V | str | None = None
    ) -> V:
        """Return `layer_norm(x [+ bias] + residual)` as one tensor op."""
        op = fused.FusedResidualLayerNorm(eps, bias is not None)
        return self.add_node(op, x, residual, *self._weights(bias, gamma, beta))

    # -- feed-forward ------------------------------------------------------------------------

    def gated_ffn(self, *, gate: V, up: V, activation: str = "silu") -> V:
        """Return `act(gate) ⊙ up` for two `[…, F]`, as in SwiGLU (silu) and GeGLU (gelu_tanh)."""
        return self.add_node(hir.GatedFfn(activation), gate, up)

    def swiglu_ffn(self, x: V, *, up: V | str, gate: V | str, down: V | str, transpose: bool | None = None) -> V:
        """Return `(silu(x · gate) ⊙ (x · up)) · down` as one block.

        As values, gate and up are `[H, F]` and down is `[F, H]`; as keys they are transposed. `transpose` is as in
        `linear`.
        """
        up_contract, gate_contract, down_contract = (self._contract(w, transpose) for w in (up, gate, down))
        op = hir.SwiGLU((up_contract, gate_contract, down_contract))
        return self.add_node(op, x, *self._weights(up, gate, down))

    def fused_swiglu(self, x: V, *, gate_first: bool = True, activation: str = "silu") -> V:
        """Return `act(gate) ⊙ up` of the two halves of `[…, 2F]` as one tensor op."""
        return self.add_node(fused.FusedSwiGLU(gate_first, activation), x)

    def route(
        self, logits: V, bias: V | str | None = None, *, top_k: int,
        scores: Literal["softmax", "sigmoid", "chosen"] = "softmax", normalise: bool = True, scale: float = 1.0,
    ) -> tuple[V, V]:  # fmt: skip
        """Return the `top_k` experts of each token: logits `[…, E]` → weights `[…, k]` f32 and ids `[…, k]` i32.

        Args:
            bias: `[E]`, added to the scores only to choose the experts, not to compute their weights.
            scores: `softmax` over all logits, `sigmoid`, or `chosen`: a softmax over the logits of the chosen experts.
            normalise: divide the weights by their sum.
            scale: factor of the weights, applied last.
        """
        op = hir.Route(top_k, scores, normalise, scale, biased=bias is not None)
        weights, ids = self.add_all(op, logits, *self._weights(bias))
        return weights, ids

    def experts(
        self, x: V, weights: V, ids: V, *, gate: V | WeightKey | WeightStack, up: V | WeightKey | WeightStack,
        down: V | WeightKey | WeightStack, activation: str = "silu", transpose: bool | None = None,
        biases: Sequence[V | WeightKey | WeightStack] | None = None, clamp: ClampedGate | None = None,
    ) -> V:  # fmt: skip
        """Return `Σⱼ weightsⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ` with e = idsⱼ, as one block: x `[…, H]`, weights and ids
        `[…, k]`.

        Args:
            gate, up, down: as values `[E, H, F]`, `[E, H, F]` and `[E, F, H]`. As keys, the last two axes are
                transposed as in checkpoints. A `WeightStack` is for experts with one key each.
            transpose: the last two axes are transposed.
            biases: of gate `[E, F]`, up `[E, F]` and down `[E, H]`.
            clamp: a clamped gate in place of `act(gate) ⊙ up`.
        """
        projections = (gate, up, down)
        keys = [isinstance(w, str | WeightPart | WeightStack) for w in projections]
        if transpose is None and len(set(keys)) > 1:
            raise GraphError(f"{self.path}: experts: gate, up and down are all keys or all values, or give transpose=")
        up_roles, down_roles = (("experts", *roles) for roles in (("ffn", "hidden"), ("hidden", "ffn")))
        roles = (up_roles, up_roles, down_roles) if transpose is not False else (down_roles, down_roles, up_roles)
        operands = [self.weight(w, r if key else None) for w, r, key in zip(projections, roles, keys, strict=True)]
        expected = "the biases of gate, up and down"
        bias_list = () if biases is None else items_of(biases, f"{self.path}: experts: biases", expected)
        if biases is not None and len(bias_list) != 3:
            raise GraphError(f"{self.path}: experts: biases: expected {expected}, got {len(bias_list)}")
        bias_values = [
            self.weight(w, ("experts", role)) for w, role in zip(bias_list, ("ffn", "ffn", "hidden"), strict=False)
        ]
        contract = int(keys[0] if transpose is None else transpose)
        op = hir.Experts(activation, contract, biased=bool(bias_values), clamp=clamp)
        return self.add_node(op, x, *operands, weights, ids, *bias_values)

    # -- tokens ------------------------------------------------------------------------------

    def embed(self, table: V | WeightKey, ids: V, *, shape: Sequence[int] | None = None, init: Init | None = None) -> V:
        """Return `E[ids]`: E `[V, H]`, ids `[…]` integers in `[0, V)` → `[…, H]`; `shape` and `init` as in `gather`."""
        rows = self._table(table, ("embedding", "hidden"), shape, init)
        return self.add_node(hir.Embed(), rows, ids)

    def last_token(self, x: V, index: V | None = None) -> V:
        """Return the last token of each row, or token `index[b]`: x `[B, S, …]` → `[B, 1, …]`."""
        return self.add_node(hir.LastToken(), x, *([] if index is None else [index]))

    def first_token(self, x: V) -> V:
        """Return the first token of each row: x `[B, S, H]` → `[B, H]`."""
        return self.add_node(hir.FirstToken(), x)

    def split(self, x: V, sizes: int | Sequence[int], axis: int = -1) -> tuple[V, ...]:
        """Split `axis` into parts of consecutive `sizes`, or, for an int, into that many equal parts."""
        at, x_type = self._axis(x, axis), self.type_of(x)
        axis_size = x_type.shape[at]
        if isinstance(sizes, int) and is_integer(sizes):
            if not is_static(axis_size) or sizes < 1 or axis_size % sizes:
                raise ShapeError(f"{self.path}: split: {sizes} equal parts do not make up axis {at} of {x_type}")
            sizes = (axis_size // sizes,) * sizes
        parts = items_of(sizes, f"{self.path}: split", "a list of sizes, or a number of equal parts")
        # Both ops split only the last axis, so that any other axis is swapped with it.
        if at == x_type.rank - 1 and self.level == GraphStage.HIR:
            return self.add_all(hir.Split(parts), x)
        swapped = x if at == x_type.rank - 1 else self.swapaxes(x, at, -1)
        results = self.add_all(SplitLast(parts), swapped)
        return results if at == x_type.rank - 1 else tuple(self.swapaxes(part, at, -1) for part in results)

    # -- full layers, and tensor ops as blocks  ----------------------------------------------

    def llama_decoder_block(
        self, *operands: V, heads: int, head_dim: int, kv_heads: int, eps: float = 1e-5,
        mask: hir.MaskKind | str = "causal", biases: Mapping[str, V] | None = None,
    ) -> V:  # fmt: skip
        """Return the output of one Llama layer: the 14 operands of `hir.DECODER_OPERANDS`, weights `[in, out]`, then
        the operands of the mask.

        `biases` of projections are by name, `q_bias` … `down_bias` (`hir.DECODER_BIASES`), each `[out]`.
        """
        bias_values = dict(biases or {})
        op = hir.LlamaDecoderBlock(heads, head_dim, kv_heads, eps, hir.mask_kind(mask), biases=tuple(bias_values))
        return self.add_node(op, *self._with_tables(operands, 12), *bias_values.values())

    def qwen35_mtp_head(
        self, *operands: V, heads: int, kv_heads: int, head_dim: int, n_rot: int, n_embd: int, n_ff: int,
        mtp_vocab: int, eps: float = 1e-6,
    ) -> V:  # fmt: skip
        """Return the logits `[B, 1, mtp_vocab]` of Qwen 3.5's draft head for the 29 operands of `hir.MTP_OPERANDS`."""
        op = hir.Qwen35MtpHead(heads, kv_heads, head_dim, n_rot, n_embd, n_ff, mtp_vocab, eps)
        return self.add_node(op, *self._with_tables(operands, 2))

    def _with_tables(self, operands: Sequence[V], index: int) -> list[V]:
        """Return a layer's operands with the tables cos and sin, at `index` and after it, as `[B|1, S, W]`."""
        tables = [self._token_table(operands[0], table) for table in operands[index : index + 2]]
        return [*operands[:index], *tables, *operands[index + 2 :]]

    def fused_attention_block(
        self, hidden: V, qkv_w: V, out_w: V, mask: V, *, heads: int, head_dim: int, biases: tuple[V, V] | None = None,
        rope: tuple[V, V] | None = None,
    ) -> V:  # fmt: skip
        """Return bidirectional attention over hidden `[B, S, H]`, with its projections, as one tensor op.

        The operands are qkv_w `[H, 3·N·D]`, out_w `[N·D, H]`, a keep mask `[B, S]`, the biases of both projections, and
        the tables cos and sin `[B|1, S, D/2]`; see `rlx_jax.ops.FusedAttentionBlock`.
        """
        op = fused.FusedAttentionBlock(heads, head_dim, biases is not None, rope is not None)
        tables = [self._token_table(hidden, table) for table in rope or ()]
        return self.add_node(op, hidden, qkv_w, out_w, mask, *(biases or ()), *tables)

    def fused_transformer_layer(
        self, *operands: V, heads: int, head_dim: int, intermediate: int, eps1: float = 1e-12, eps2: float = 1e-12,
        activation: str = "gelu", has_bias: bool = True,
    ) -> V:  # fmt: skip
        """Return BERT's layer as one tensor op of the 14 operands of `FusedTransformerLayer`, 10 without biases."""
        op = fused.FusedTransformerLayer(heads, head_dim, intermediate, eps1, eps2, activation, has_bias)
        return self.add_node(op, *operands)

    def hir_mir(self, op: Mir, inputs: Sequence[V], shape: Shape | None = None) -> V:
        """Return the result of a tensor op in a HIR module; its node is labeled as a tensor op."""
        if not isinstance(op, Mir):
            raise GraphError(f"{self.path}: hir_mir takes a tensor op, got {shown(op)}")
        with self._block(f"mir({op.text()})"):
            operands = items_of(inputs, f"{self.path}: {op.name()}", "a list of values")
            return self.add_node(op, *operands, out_shape=shape)
