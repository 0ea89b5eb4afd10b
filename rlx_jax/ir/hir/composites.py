"""Composite blocks, which expand into several blocks: a decoder layer, Qwen 3.5's draft head, and small named groups.

They expand before programs are derived, so that fusion, mixed precision and the policies see the blocks
inside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value, constant
from rlx_jax.ir.hir.masks import MASK_KINDS, MaskKind
from rlx_jax.ir.hir.sequence import LastToken, Rope, attention
from rlx_jax.ir.hir.tokenwise_blocks import Embed, GatedFfn, Linear, RmsNorm, Split
from rlx_jax.ir.operands import BLOCK, COMPOSITE, TABLES
from rlx_jax.ir.ops.attention import check_heads
from rlx_jax.ir.ops.index import Gather, Iota, RelativeBuckets, TakeAlongAxis
from rlx_jax.ir.ops.linalg import Einsum, check_linear
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Unary
from rlx_jax.ir.ops.shape import AxisOf, Concat, Reshape, Transpose, merge_axes, split_axis
from rlx_jax.ir.types import F32, TensorType, is_static

DECODER_OPERANDS = ("x", "ln1_g", "ln1_b", "q", "k", "v", "o", "ln2_g", "ln2_b", "gate", "up", "down", "cos", "sin")


# The path of each projection inside the layer.
PROJECTIONS = {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}

DECODER_BIASES = tuple(f"{name}_bias" for name in PROJECTIONS)


def matrix(name: str, rows: object, columns: object, contract: int) -> str:
    """Return the declaration of a weight `[in, out]`, or `[out, in]` where `contract` is 1."""
    return f"{name}[{columns},{rows}]" if contract else f"{name}[{rows},{columns}]"


@dataclass(frozen=True)
class LlamaDecoderBlock(Hir):
    """One pre-norm Llama layer (Touvron et al. 2023): h = x + attn(rms(x))·Wo, y = h + swiglu(rms(h)).

    Operands: the 14 of `DECODER_OPERANDS`; `mask` if the mask kind is custom or keep (`[B,T]`)
    or bias (`[B,N,S,T]`); then one operand for each name in `biases`.
    Weights are `[in, out]` (`contract=0`) or `[out, in]` as in checkpoints (`contract=1`); norm weights `[H]`.
    """

    traits = COMPOSITE
    notation = "llama_decoder_block(heads={heads}, dim={head_dim}, kv={kv_heads}, eps={eps}, mask={mask})"

    heads: int
    head_dim: int
    kv_heads: int
    eps: float
    mask: MaskKind = field(default=MASK_KINDS["causal"])
    contract: int = 0
    biases: tuple[str, ...] = ()

    def declaration(self) -> str:
        """Return the declaration of the operands, with the sizes that the attributes determine."""
        if unknown := [n for n in self.biases if n not in DECODER_BIASES]:
            raise GraphError(f"llama_decoder_block: unknown biases {unknown}, known are {list(DECODER_BIASES)}")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = dict.fromkeys(PROJECTIONS, "H") | {"o": q, "down": "F"}
        columns = {"q": q, "k": kv, "v": kv, "o": "H", "gate": "F", "up": "F", "down": "H"}
        declared = {"x": "x[…,H]", **{name: f"{name}[H]" for name in ("ln1_g", "ln1_b", "ln2_g", "ln2_b")}}
        for name, size in columns.items():
            declared[name] = matrix(name, rows[name], size, self.contract)
            declared[f"{name}_bias"] = f"{name}_bias[{size}]"
        names = (*DECODER_OPERANDS, *["mask"] * bool(self.mask.operand), *self.biases)
        return " ".join(declared.get(name, name) for name in names)

    def check(self, *operands: TensorType) -> None:
        check_heads(self.heads, self.kv_heads)

    def expand(self, b: Builder, *operands: Value) -> Value:
        values = dict(zip(DECODER_OPERANDS, operands, strict=False))
        mask_operands = operands[14 : 14 + bool(self.mask.operand)]
        bias_by_name = dict(zip(self.biases, operands[14 + len(mask_operands) :], strict=True))
        origin = b.origin

        def block_scope(part: str) -> AbstractContextManager[None]:
            return b.origin_scope(replace(origin, path=(*origin.path, *part.split("."))))

        def norm(part: str, weights: str, x: Value) -> Value:
            with block_scope(part):
                return b(RmsNorm(self.eps), x, values[f"{weights}_g"], values[f"{weights}_b"])

        def project(name: str, x: Value) -> Value:
            with block_scope(PROJECTIONS[name]):
                bias_operands = (bias_by_name[f"{name}_bias"],) if f"{name}_bias" in bias_by_name else ()
                return b(Linear(self.contract, bias=bool(bias_operands)), x, values[name], *bias_operands)

        x, add, rope = values["x"], Binary("add"), Rope(self.head_dim, self.head_dim)
        normed = norm("input_layernorm", "ln1", x)
        # The active value of `self_attn` enters after the norm, as it does in Hugging Face's module of that name.
        with block_scope("self_attn"):
            normed = b.boundary("input", normed)
        query, key, value = (project(name, normed) for name in "qkv")
        with block_scope("self_attn"):
            rotated = (b(rope, heads, values["cos"], values["sin"]) for heads in (query, key))
            context = b(attention(self.heads, self.kv_heads, self.mask), *rotated, value, *mask_operands)
        x = b(add, x, project("o", context))
        normed = norm("post_attention_layernorm", "ln2", x)
        gate, up = (project(name, normed) for name in ("gate", "up"))
        with block_scope("mlp"):
            inner = b(GatedFfn("silu"), gate, up)
        return b(add, x, project("down", inner))


@dataclass(frozen=True)
class LinearFused(Hir):
    """`act(x · w + b)`, a `Linear` with a bias.

    x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]` (`contract=1`); b `[out]`.
    """

    traits = COMPOSITE
    choices = {"activation": ("", *UNARY)}
    operands = "x w b"
    notation = "linear_fused({activation})"

    contract: int = 0
    activation: str = ""

    def check(self, *operands: TensorType) -> None:
        check_linear("linear_fused", operands, self.contract, False)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Linear(self.contract, bias=True, activation=self.activation), *operands)


@dataclass(frozen=True)
class SharedLinearPair(Hir):
    """`x · w₁` (`slot=0`) or `x · w₂` (`slot=1`): one of two products that share x and may differ in width.

    Operands: x `[…, in]`, w₁, w₂; each weight is `[in, out]` if its entry of `contracts` is 0, `[out, in]` if it is 1.
    """

    traits = COMPOSITE
    notation = "shared_linear_pair(out={slot})"

    slot: int
    contracts: tuple[int, int] = (0, 0)

    def declaration(self) -> str:
        """Return the declaration of the operands."""
        contract_1, contract_2 = self.contracts
        return f"x[…,H] {matrix('w1', 'H', '_', contract_1)} {matrix('w2', 'H', '_', contract_2)}"

    def check(self, *operands: TensorType) -> None:
        if self.slot not in (0, 1):
            raise GraphError(f"shared_linear_pair: slot is 0 or 1, got {self.slot!r}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Linear(self.contracts[self.slot]), operands[0], operands[1 + self.slot])


@dataclass(frozen=True)
class SwiGLU(Hir):
    """`(silu(x · gate) ⊙ (x · up)) · down` (Shazeer 2020).

    Operands: x `[…, H]`, up and gate `[H, F]`, down `[F, H]`. A weight is transposed if its entry of `contracts` is 1.
    """

    traits = COMPOSITE
    notation = "swiglu_ffn"

    contracts: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def name(cls) -> str:  # the rule of `Op.name` would give `swi_glu`
        return "swiglu_ffn"

    def declaration(self) -> str:
        """Return the declaration of the operands."""
        up, gate, down = self.contracts
        return f"x[…,H] {matrix('up', 'H', 'F', up)} {matrix('gate', 'H', 'F', gate)} {matrix('down', 'F', '_', down)}"

    def expand(self, b: Builder, x: Value, up: Value, gate: Value, down: Value) -> Value:
        up_out, gate_out = b(Linear(self.contracts[0]), x, up), b(Linear(self.contracts[1]), x, gate)
        return b(Linear(self.contracts[2]), b(GatedFfn("silu"), gate_out, up_out), down)


@dataclass(frozen=True)
class ResidualRmsNorm(Hir):
    """`rms_norm(x + residual)`. Operands: x and residual `[…, H]` of the same type, γ `[H]`, optionally β `[H]`."""

    traits = COMPOSITE
    operands = "x[…L] residual:x[…L] gamma beta?"

    eps: float

    def expand(self, b: Builder, x: Value, residual: Value, *weights: Value) -> Value:
        return b(RmsNorm(self.eps), b(Binary("add"), x, residual), *weights)


MTP_OPERANDS = (
    "h_pre_norm", "input_ids", "cos", "sin", "last_token_idx", "embed_w", "hnorm_w", "hnorm_b", "enorm_w", "enorm_b",
    "eh_w", "attn_norm_w", "attn_norm_b", "q_gate_w", "k_w", "v_w", "q_norm_w", "q_norm_b", "k_norm_w", "k_norm_b",
    "o_w", "post_norm_w", "post_norm_b", "gate_w", "up_w", "down_w", "head_norm_w", "head_norm_b", "lm_head_w",
)  # fmt: skip


@dataclass(frozen=True)
class Qwen35MtpHead(Hir):
    """Multi-token prediction head: logits `[B,1,mtp_vocab]` of the token after the next one, at `last_token_idx` `[B]`.

    `c = [rms(embed(ids)) ‖ rms(h)] W_eh`, `c ← c + (causal attention · σ(gate)) W_o`, `c ← c + swiglu(rms(c))`,
    `rms(c[last]) W_head`.

    Operands: `MTP_OPERANDS`. h `[B,S,E]`; ids `[B,S]`, at each position the id of the next token; cos and sin
    `[B|1,S,n_rot/2]`; matrices `[in, out]`. The first E rows of `eh_w` multiply the embedding. In `q_gate_w` each head
    has D columns for the query, then D for its gate. Norms are `w · x (mean x² + ε)^(−½) + b`; head norms are `[D]`.

    B must be static; S may be a symbol. Source: Qwen 3.5's `mtp.*` weights; the combination of embedding and hidden
    state is DeepSeek-V3's, arXiv:2412.19437, section 2.2.
    """

    traits = COMPOSITE
    notation = "qwen35_mtp_head(heads={heads}, dim={head_dim}, vocab={mtp_vocab})"

    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    n_embd: int
    n_ff: int
    mtp_vocab: int
    eps: float = 1e-6

    def declaration(self) -> str:
        """Return the declaration of the operands, with the sizes that the attributes determine."""
        e, d, f = self.n_embd, self.head_dim, self.n_ff
        q, kv = self.heads * d, self.kv_heads * d
        return (
            f"h_pre_norm[_,S,{e}] input_ids[_,S] cos sin last_token_idx[_] embed_w[V,{e}] hnorm_w[{e}] hnorm_b[{e}] "
            f"enorm_w[{e}] enorm_b[{e}] eh_w[{2 * e},{e}] attn_norm_w[{e}] attn_norm_b[{e}] q_gate_w[{e},{2 * q}] "
            f"k_w[{e},{kv}] v_w[{e},{kv}] q_norm_w[{d}] q_norm_b[{d}] k_norm_w[{d}] k_norm_b[{d}] o_w[{q},{e}] "
            f"post_norm_w[{e}] post_norm_b[{e}] gate_w[{e},{f}] up_w[{e},{f}] down_w[{f},{e}] head_norm_w[{e}] "
            f"head_norm_b[{e}] lm_head_w[{e},{self.mtp_vocab}]"
        )

    def check(self, *operands: TensorType) -> None:
        check_heads(self.heads, self.kv_heads)
        if self.n_rot % 2 or not 2 <= self.n_rot <= self.head_dim:
            raise GraphError(f"qwen35_mtp_head: n_rot is even and at most head_dim {self.head_dim}, got {self.n_rot}")
        h, ids, last = operands[0], operands[1], operands[4]
        if not is_static(h.shape[0]) or not h.shape[0] == ids.shape[0] == last.shape[0]:
            raise ShapeError(
                f"qwen35_mtp_head: h_pre_norm is {h}, input_ids {ids} and last_token_idx {last}; expected one "
                "number of rows that is known: give the batch as a number"
            ).at_operands(0)

    def expand(self, b: Builder, *operands: Value) -> Value:
        values = dict(zip(MTP_OPERANDS, operands, strict=True))
        norm, dot, add = RmsNorm(self.eps), Linear(0), Binary("add")

        def normed(x: Value, name: str) -> Value:
            return b(norm, x, values[f"{name}_w"], values[f"{name}_b"])

        token = normed(b(Embed(), values["embed_w"], values["input_ids"]), "enorm")
        x = b(dot, b(Concat(2), token, normed(values["h_pre_norm"], "hnorm")), values["eh_w"])
        attn_input = normed(x, "attn_norm")
        heads = b(split_axis(3, 2, (self.heads, 2 * self.head_dim)), b(dot, attn_input, values["q_gate_w"]))
        query, gate = b.add(Split((self.head_dim, self.head_dim)), heads)
        keys = b(split_axis(3, 2, (self.kv_heads, self.head_dim)), b(dot, attn_input, values["k_w"]))
        # Norms act on single heads, so heads are separated for them, and packed again for the rotation and attention.
        rope, pack = Rope(self.head_dim, self.n_rot), merge_axes(4, 2)
        rotated = ((query, "q_norm"), (keys, "k_norm"))
        q, k = (b(rope, b(pack, normed(t, name)), values["cos"], values["sin"]) for t, name in rotated)
        context = b(attention(self.heads, self.kv_heads, MASK_KINDS["causal"]), q, k, b(dot, attn_input, values["v_w"]))
        gated = b(Binary("mul"), context, b(Unary("sigmoid"), b(pack, gate)))
        x = b(add, x, b(dot, gated, values["o_w"]))
        ffn_input = normed(x, "post_norm")
        inner = b(GatedFfn("silu"), b(dot, ffn_input, values["gate_w"]), b(dot, ffn_input, values["up_w"]))
        x = b(add, x, b(dot, inner, values["down_w"]))
        return b(dot, normed(b(LastToken(), x, values["last_token_idx"]), "head_norm"), values["lm_head_w"])


# Blocks that compute scores of attention from the distances between tokens.


@dataclass(frozen=True)
class RelativeBias(Hir):
    """The bias that each head adds to the scores, by the bucketed distance of query and key (T5).

    table `[R, N]` and x `[B, S, …]` → `[1, N, S, S]`, for the `buckets` ≤ R of `RelativeBuckets`.
    """

    traits = TABLES
    operands = "table[R!,N] x[_,_,…]"

    buckets: int = 32
    max_distance: int = 128

    def check(self, table: TensorType, x: TensorType) -> None:
        if int(table.shape[0]) < self.buckets:
            raise ShapeError(
                f"relative_bias: a table of {self.buckets} rows or more, one for each bucket, and [B, S, …]; got "
                f"{table} and {x}"
            )

    def expand(self, b: Builder, table: Value, x: Value) -> Value:
        rows = b(Gather(), table, b(RelativeBuckets(1, self.buckets, self.max_distance), x))
        heads = b(Transpose((2, 0, 1)), rows)
        return b(Reshape((1, *(AxisOf(axis) for axis in range(3)))), heads)


TERMS = ("keys", "queries")


@dataclass(frozen=True)
class RelativeScores(Hir):
    """Scores of queries and keys with embeddings of their distance (DeBERTa, He et al. 2021): f32 `[B,N,S,S]`.

        scale · (q_s · K[row(s − t)] + k_t · Q[row(s − t)])

    Operands: q and k `[B,S,N·D]`; then for each of `terms`, `keys` (K) and `queries` (Q), its rows `[R, N·D]`.
    With `buckets` distances are grouped as in `rows_of_distances`. R is twice `buckets`, or twice `max_distance`.
    """

    traits = BLOCK

    heads: int
    scale: float
    buckets: int
    max_distance: int
    terms: tuple[str, ...] = TERMS

    def check(self, *operands: TensorType) -> None:
        if not self.terms or len(operands) != 2 + len(self.terms) or not {*self.terms} <= {*TERMS}:
            raise GraphError(f"relative_scores: expected q, k and an operand for each of the terms {self.terms}")
        rows = 2 * (self.buckets or self.max_distance)
        if rows < 2 or any(table.shape[0] != rows for table in operands[2:]):
            raise ShapeError(f"relative_scores: expected {rows} rows, got {', '.join(map(str, operands[2:]))}")

    def expand(self, b: Builder, q: Value, k: Value, *tables: Value) -> Value:
        rows, split = self._rows(b, q), split_axis(3, 2, (self.heads, -1))
        scores = []
        for term, table in zip(self.terms, tables, strict=True):
            heads, embeddings = b(split, q if term == "keys" else k), b(split_axis(2, 1, (self.heads, -1)), table)
            products = b(Einsum("bsnd,rnd->bnsr", result=F32), heads, embeddings)
            # Row s has the rows of its distances to each t as a query, and transposed as a key.
            index = rows if term == "keys" else b(Transpose((0, 1, 3, 2)), rows)
            score = b(TakeAlongAxis(3, "clip"), products, index)
            scores.append(score if term == "keys" else b(Transpose((0, 1, 3, 2)), score))
        total = scores[0] if len(scores) == 1 else b(Binary("add"), *scores)
        return b(Binary("mul"), total, b.scalar(self.scale, total))

    def _rows(self, b: Builder, x: Value) -> Value:
        """Return the row of the distance of each query s and key t, int32 `[1,1,S,S]`."""
        row_of = rows_of_distances(self.buckets, self.max_distance)
        farthest = len(row_of) // 2
        position = b(Iota(1), x)
        distance = b(Binary("sub"), b(Reshape((1, 1, -1, 1)), position), b(Reshape((1, 1, 1, -1)), position))
        index = b(Binary("add"), distance, b.scalar(farthest, distance))
        clipped = b(Binary("min"), b(Binary("max"), index, b.scalar(0, index)), b.scalar(2 * farthest, index))
        return b(Gather(), b.leaf(constant(row_of, np.int32)), clipped)

    def text(self) -> str:
        return f"relative_scores(heads={self.heads}, rows={2 * (self.buckets or self.max_distance)})"


@lru_cache
def rows_of_distances(buckets: int, max_distance: int) -> npt.NDArray[np.int32]:
    """Return the row of each distance −L … L from query to key; farther ones have the rows of ±L.

    The row is the distance, plus half the number of rows, limited to the rows. With `buckets` b > 0, distances from b/2
    on are grouped: their logarithms grow to b at `max_distance`. The logarithms are f32, as in the reference
    implementation, and computed on the host: a device could round one to the other side of a bucket's border.
    """
    half = buckets or max_distance
    distance = np.arange(-max_distance, max_distance + 1)
    if buckets:
        middle = buckets // 2
        size = np.where(np.abs(distance) < middle, middle - 1, np.abs(distance))
        with np.errstate(divide="ignore"):
            ratio = np.log((size / middle).astype(np.float32)) / np.log(np.float32((max_distance - 1) / middle))
        grouped = (np.ceil(ratio * np.float32(middle - 1)) + middle) * np.sign(distance)
        distance = np.where(size <= middle, distance, grouped)
    return np.clip(distance.astype(np.int64) + half, 0, 2 * half - 1).astype(np.int32)
