"""Qwen 3.5's head for drafts: one more layer, which reads the token behind each, and logits of its own vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import MASK_KINDS, check_arity
from rlx_jax.ir.hir.sequence import LastToken, Rope, attention
from rlx_jax.ir.hir.token_wise import Embed, GatedFfn, Linear, RmsNorm, Split
from rlx_jax.ir.ops.attention import check_heads
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.shape import Concat, merge_axes, split_axis
from rlx_jax.ir.traits import COMPOSITE
from rlx_jax.ir.types import DimLike, TensorType, is_static

MTP_OPERANDS = (
    "h_pre_norm", "input_ids", "cos", "sin", "last_token_idx", "embed_w", "hnorm_w", "hnorm_b", "enorm_w", "enorm_b",
    "eh_w", "attn_norm_w", "attn_norm_b", "q_gate_w", "k_w", "v_w", "q_norm_w", "q_norm_b", "k_norm_w", "k_norm_b",
    "o_w", "post_norm_w", "post_norm_b", "gate_w", "up_w", "down_w", "head_norm_w", "head_norm_b", "lm_head_w",
)  # fmt: skip
"""The 29 operands, in order."""


@dataclass(frozen=True)
class Qwen35MtpHead(Hir):
    """Logits `[B,1,mtp_vocab]` of the token behind the next, at `last_token_idx` `[B]` of each row.

    `c = [rms(embed(ids)) ‖ rms(h)] W_eh`, `c ← c + (causal attention · σ(gate)) W_o`, `c ← c + swiglu(rms(c))`,
    `rms(c[last]) W_head`. Operands: `MTP_OPERANDS`; h `[B,S,E]`, ids `[B,S]`, at each position its next token's, cos
    and sin `[B|1,S,n_rot/2]`; matrices `[in, out]`, the first E rows of `eh_w` meet the embedding; in `q_gate_w` each
    head is D columns of the query and then D of its gate. Norms are `w · x (mean x² + ε)^(−½) + b`, of heads `[D]`.

    The number of rows is a number; that of tokens may be a symbol. Source: Qwen 3.5's `mtp.*` weights; the
    merge of DeepSeek-V3, arXiv:2412.19437, section 2.2.
    """

    traits = COMPOSITE

    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    n_embd: int
    n_ff: int
    mtp_vocab: int
    eps: float = 1e-6

    def check(self, *operands: TensorType) -> None:
        check_arity("qwen35_mtp_head", len(operands), len(MTP_OPERANDS))
        check_heads(self.heads, self.kv_heads)
        if self.n_rot % 2 or not 2 <= self.n_rot <= self.head_dim:
            raise GraphError(f"qwen35_mtp_head: n_rot is even and at most head_dim {self.head_dim}, got {self.n_rot}")
        named = dict(zip(MTP_OPERANDS, operands, strict=True))
        h = named["h_pre_norm"]
        if h.rank != 3 or not is_static(h.shape[0]):
            raise ShapeError(
                f"qwen35_mtp_head: h_pre_norm is [B, S, {self.n_embd}] with a number of rows that is known, got {h}: "
                "give the batch as a number"
            ).of(0)
        rows, tokens, _ = h.shape
        for place, (name, want) in enumerate(zip(MTP_OPERANDS, self._shapes(rows, tokens), strict=True)):
            got = named[name].shape
            if want is not None and got != want:
                raise ShapeError(
                    f"qwen35_mtp_head: {name} is {named[name]}; expected {list(map(str, want))} for {self.text()}"
                ).of(place)
        if named["embed_w"].rank != 2 or named["embed_w"].shape[1] != self.n_embd:
            raise ShapeError(f"qwen35_mtp_head: embed_w is [V, {self.n_embd}], got {named['embed_w']}").of(5)

    def _shapes(self, rows: DimLike, tokens: DimLike) -> list[tuple[DimLike, ...] | None]:
        """Of every operand; None where others check."""
        e, d, f = self.n_embd, self.head_dim, self.n_ff
        q, kv = self.heads * d, self.kv_heads * d
        norm: list[tuple[DimLike, ...] | None] = [(e,), (e,)]
        head: list[tuple[DimLike, ...] | None] = [(d,)] * 4
        return [
            (rows, tokens, e), (rows, tokens), None, None, (rows,), None, *norm, *norm, (2 * e, e), *norm,
            (e, 2 * q), (e, kv), (e, kv), *head, (q, e), *norm, (e, f), (e, f), (f, e), *norm, (e, self.mtp_vocab),
        ]  # fmt: skip

    def expand(self, b: Builder, *operands: Value) -> Value:
        at = dict(zip(MTP_OPERANDS, operands, strict=True))
        norm, dot, add = RmsNorm(self.eps), Linear(0), Binary("add")

        def normed(x: Value, name: str) -> Value:
            return b(norm, x, at[f"{name}_w"], at[f"{name}_b"])

        token = normed(b(Embed(), at["embed_w"], at["input_ids"]), "enorm")
        x = b(dot, b(Concat(2), token, normed(at["h_pre_norm"], "hnorm")), at["eh_w"])
        a = normed(x, "attn_norm")
        heads = b(split_axis(3, 2, (self.heads, 2 * self.head_dim)), b(dot, a, at["q_gate_w"]))
        query, gate = b.add(Split((self.head_dim, self.head_dim)), heads)
        keys = b(split_axis(3, 2, (self.kv_heads, self.head_dim)), b(dot, a, at["k_w"]))
        rope, pack = Rope(self.head_dim, self.n_rot), merge_axes(4, 2)
        q, k = (
            b(rope, b(pack, normed(t, f"{name}_norm")), at["cos"], at["sin"]) for name, t in (("q", query), ("k", keys))
        )
        context = b(attention(self.heads, self.kv_heads, MASK_KINDS["causal"]), q, k, b(dot, a, at["v_w"]))
        gated = b(Binary("mul"), context, b(Unary("sigmoid"), b(pack, gate)))
        x = b(add, x, b(dot, gated, at["o_w"]))
        m = normed(x, "post_norm")
        inner = b(GatedFfn("silu"), b(dot, m, at["gate_w"]), b(dot, m, at["up_w"]))
        x = b(add, x, b(dot, inner, at["down_w"]))
        return b(dot, normed(b(LastToken(), x, at["last_token_idx"]), "head_norm"), at["lm_head_w"])

    def text(self) -> str:
        return f"qwen35_mtp_head(heads={self.heads}, dim={self.head_dim}, vocab={self.mtp_vocab})"
