"""Stages that pool the tokens of vision and text towers, and the similarity of pooled vectors."""

from __future__ import annotations

from collections.abc import Iterable

from rlx_jax.blocks.ffn import Mlp, SwiGlu
from rlx_jax.blocks.linear import module_keys
from rlx_jax.blocks.self_attention import head_width
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart

__all__ = ["AttentionPool", "EndTokenPool", "MeanOfTokens", "NomicSelector", "Similarity"]


@dataclass(frozen=True)
class AttentionPool:
    """SigLIP's pooling head: attention of a learned query over all tokens, then `p + mlp(ln(p))`: `[B,S,H]` → `[B,H]`.

    Weights under the prefix: `probe` `[1, 1, H]`, `attention.in_proj_weight` `[3H, H]`, `attention.in_proj_bias`,
    `attention.out_proj.*`, `layernorm.*`, `mlp.fc1.*`, `mlp.fc2.*`. `inner`, the width of the MLP, is needed only for
    weights that no source has. `mask_input` names an input `[B,S]` with 1 for tokens to read; None: all are read.
    """

    prefix: str
    num_heads: int
    eps: float = 1e-6
    activation: str = "gelu_tanh"
    inner: int | None = None
    mask_input: str | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, p = emit.require(value, "AttentionPool"), self.prefix
        if x.ndim != 3:
            raise ShapeError(f"{emit.path}: AttentionPool needs [B, S, H], got {x.type}")
        with emit.scope("head"):
            weights, biases = (WeightPart.split(f"{p}.attention.in_proj_{kind}", 3) for kind in ("weight", "bias"))
            keep = None if self.mask_input is None else emit.flow_input(self.mask_input)
            out = f"{p}.attention.out_proj"
            pooled = pool_by_query(emit, x, f"{p}.probe", weights, biases, out, self.num_heads, keep)
            normed = emit.layer_norm(pooled, *module_keys(f"{p}.layernorm"), self.eps)
            mlp = Mlp(*module_keys(f"{p}.mlp.fc1"), *module_keys(f"{p}.mlp.fc2"), self.activation, self.inner)
            return emit.first_token(pooled + mlp.emit(emit, normed))


def pool_by_query(
    emit: Emit, x: FlowValue, query: str, weights: Iterable[WeightKey], biases: Iterable[WeightKey], out: str,
    heads: int, keep: FlowValue | None = None,
) -> FlowValue:  # fmt: skip
    """Return the attention of a learned query over all tokens of `x`, projected: `[B,S,H]` → `[B,1,H]`.

    Args:
        x: tokens `[B,S,H]`.
        query: key of the query, `[1, 1, H]`, which is the same for every row of the batch.
        weights, biases: keys of the projections of q, k and v, `[H, H]` and `[H]`.
        out: module name of the output projection.
        heads: number of heads; it divides H.
        keep: `[B,S]`, 1 for tokens to read; None: all are read.
    """
    hidden = int(x.type.shape[-1])
    head_width(query, hidden, heads)
    probe = emit.broadcast_to(emit.param(query, (1, 1, hidden)), (x.shape[0], 1, hidden))
    q, k, v = (
        emit.linear(source, w, b, roles=("heads", "hidden"), columns=hidden)
        for source, w, b in zip((probe, x, x), weights, biases, strict=True)
    )
    op = hir.attention(heads, heads, MaskKind.NONE)
    context = emit.add_node(op, q, k, v) if keep is None else emit.attention(q, k, v, heads=heads, mask=keep)
    return emit.linear(context, *module_keys(out), roles=("hidden", "heads"), columns=hidden)


@dataclass(frozen=True)
class EndTokenPool:
    """Select the token at the end of each text: `[B,S,H]` → `[B,H]`.

    The position is the first one at which the input `ids_input` `[B,S]` holds `end_id`, or with None the first one of
    the row's largest id, as in CLIP's oldest checkpoints. A row without `end_id` yields its first token.
    """

    end_id: int | None
    ids_input: str = "input_ids"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, ids = emit.require(value, "EndTokenPool"), emit.flow_input(self.ids_input)
        with emit.scope("end_token"):
            return emit.add_node(hir.EndToken(self.end_id), x, ids)


@dataclass(frozen=True)
class Similarity:
    """Score texts against images by scaled cosine similarity: `exp(s) · t̂ îᵀ [+ b]`, `[T, I]`.

    The texts t are the active value `[T, E]`, the images i the stream `images` `[I, E]`; both are normalised to unit
    length, and the normalised vectors are the side outputs `text_embeds` and `image_embeds`. Weights: `scale_key` (s)
    and `bias_key` (b), one number each (CLIP: Radford et al. 2021; SigLIP: Zhai et al. 2023).
    """

    scale_key: str
    bias_key: str | None = None
    images: str = "images"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        texts, images = emit.require(value, "Similarity"), emit.stream(self.images)
        if texts.ndim != 2 or images.ndim != 2 or texts.shape[1] != images.shape[1]:
            raise ShapeError(f"{emit.path}: Similarity: expected [T, E] and [I, E], got {texts.type}, {images.type}")
        # CLIP stores a scalar, SigLIP a vector of one number.
        scalar_shape: tuple[int, ...] = () if self.bias_key is None else (1,)

        def number(key: str) -> FlowValue:
            return emit.param(key, None if emit.has_param(key) else scalar_shape).reshape(1, 1)

        with emit.scope("similarity"):
            texts, images = normalize_rows(emit, texts), normalize_rows(emit, images)
            emit.output("text_embeds", texts)
            emit.output("image_embeds", images)
            scores = texts @ images.T * emit.exp(number(self.scale_key))
            return scores if self.bias_key is None else scores + number(self.bias_key)


def normalize_rows(emit: Emit, x: FlowValue) -> FlowValue:
    """Return the rows of `x` divided by their Euclidean norms; a row of zeros stays zero."""
    return x * emit.rsqrt(emit.maximum(emit.sum(x * x, -1, keepdims=True), 1e-24))


@dataclass(frozen=True)
class NomicSelector:
    """Nomic's selector: add a pooled vector to every token, `x + mlp(ln(p))`, `[B,S,H]` → same.

    p is the attention of a learned query over all tokens. Weights under the prefix: `attn.latent` `[1, 1, H]`,
    `attn.Wq.*`, `attn.Wkv.*` (rows of keys, then rows of values), `attn.out_proj.*`, `norm1.*`, and
    `mlp.{fc11,fc12,fc2}.*`, of which `fc12` is the gate. `inner`, the width of the MLP, is needed only for weights
    that no source has.
    """

    prefix: str
    num_heads: int
    eps: float = 1e-6
    inner: int | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, p = emit.require(value, "NomicSelector"), self.prefix
        if x.ndim != 3:
            raise ShapeError(f"{emit.path}: NomicSelector needs [B, S, H], got {x.type}")
        with emit.scope("selector"):
            weights: list[WeightKey] = [f"{p}.attn.Wq.weight", *WeightPart.split(f"{p}.attn.Wkv.weight", 2)]
            biases: list[WeightKey] = [f"{p}.attn.Wq.bias", *WeightPart.split(f"{p}.attn.Wkv.bias", 2)]
            out = f"{p}.attn.out_proj"
            pooled = pool_by_query(emit, x, f"{p}.attn.latent", weights, biases, out, self.num_heads)
            normed = emit.layer_norm(pooled, *module_keys(f"{p}.norm1"), self.eps)
            gate, up, down = (module_keys(f"{p}.mlp.{name}") for name in ("fc12", "fc11", "fc2"))
            mlp = SwiGlu(gate[0], up[0], down[0], (gate[1], up[1], down[1]), self.inner)
            return x + mlp.emit(emit, normed)


@dataclass(frozen=True)
class MeanOfTokens:
    """Replace each token by the mean of its text's tokens, `[B,S,W]` → same.

    It is attention with equal scores, so that texts may share a packed row. The input `mask_input` leaves tokens out: 1
    keeps a token. It may be absent.
    """

    mask_input: str = "attention_mask"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "MeanOfTokens")
        with emit.scope("mean"):
            equal = emit.zeros_like(x[..., :1])
            return emit.attention(equal, equal, x, heads=1, mask=emit.optional_input(self.mask_input))
