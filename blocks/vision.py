"""Stages of vision transformers: patch embedding, attention over all tokens, pre-norm layers and their rotation.

Covers ViT, DINOv2, CLIP, SigLIP and Nomic. The towers share the layer of `pre_norm_layer` and differ in their keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx_jax.blocks.control import BlockStage, Named, Sequence, check_hidden
from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES, Mlp, SwiGlu, inner_shape
from rlx_jax.blocks.linear import LayerNorm, ResidualAdd, ResidualSave, dense, layer_norm_under, module_keys
from rlx_jax.blocks.self_attention import SelfAttention, head_width
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.vision import GridAngles, GridPositions, Patches
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import axial_frequencies
from rlx_jax.trace.parameters import WeightKey, WeightPart

__all__ = [
    "LayerKeys", "LayerScale", "NaflexEmbed", "PatchRope", "PreNormLayerSpec", "VisionEmbed", "VisionSwiGluFfn",
    "VitSelfAttn", "VitSelfAttnSpec", "dinov2_layer_fused", "nomic_vision_layer_fused", "pre_norm_layer",
    "siglip_layer_fused_with_prefix",
]  # fmt: skip

# -- from images to tokens ---------------------------------------------------------------------


@dataclass(frozen=True)
class VisionEmbed:
    """Embed images `[B, C, h, w]` as tokens `[B, (1 + R +) (h//P)·(w//Q), H]`: class tokens, registers, patches by row.

    Args:
        patch_weight: key of the projection of a patch `(P, Q)`, `[H, C, P, Q]`, or `[H, C·P·Q]` with `flat_patch`.
        position_key: `[1, T, H]` or `[T, H]`: a row for each class token, then one for each patch of `grid`; None for
            no positions. Images of another size resample the rows of the patches
            (`rlx_jax.ir.ops.vision.GridPositions`), with `antialias` as DINOv2 with registers does.
        cls_key: the class token, `[1, 1, H]` or `[H]`.
        registers_key: register tokens `[1, R, H]`, placed after the class token, without positions.
        flat: positions are `[T, H]` and the class token is `[H]`; read only when the flow is built without weights.
        registers: R; read only when the flow is built without weights.
        distillation_key: a second class token, as `cls_key` (DeiT).
    """

    patch_weight: str
    patch_bias: str | None
    position_key: str | None
    hidden_size: int
    patch: tuple[int, int]
    grid: tuple[int, int]
    cls_key: str | None = None
    registers_key: str | None = None
    antialias: bool = False
    flat_patch: bool = False
    flat: bool = False
    registers: int | None = None
    distillation_key: str | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        images = emit.require(value, "VisionEmbed")
        if images.ndim != 4:
            raise ShapeError(f"{emit.path}: VisionEmbed reads images [B, C, H, W], got {images.type}")
        cls_keys, hidden = [key for key in (self.cls_key, self.distillation_key) if key is not None], self.hidden_size
        num_cls = len(cls_keys)
        with emit.scope("embeddings"):
            prefix_tokens, patches = [self._tokens(emit, key, hidden) for key in cls_keys], self._patches(emit, images)
            if self.position_key is not None:
                table = self._tokens(emit, self.position_key, self.grid[0] * self.grid[1] + num_cls, hidden)
                # Only the rows of patches depend on the image size; rows of class tokens are never resampled.
                positions = GridPositions(self.grid, self.patch, self.antialias)
                patches = patches + emit.add_node(positions, table[0, num_cls:], images)
                prefix_tokens = [token + table[:, i : i + 1] for i, token in enumerate(prefix_tokens)]
            if self.registers_key is not None:  # registers have no positions
                prefix_tokens.append(self._tokens(emit, self.registers_key, 1, self.registers, hidden))
            batch = images.shape[0]
            prefix_rows = [emit.broadcast_to(x, (batch, x.shape[1], hidden)) for x in prefix_tokens]
            return emit.concat([*prefix_rows, patches], axis=1) if prefix_rows else patches

    def _patches(self, emit: Emit, images: FlowValue) -> FlowValue:
        """Return the projected patches, `[B, (h//P)·(w//Q), H]`."""
        with emit.scope("patch"):
            shape: tuple[int, ...] = (self.hidden_size, int(images.type.shape[1]), *self.patch)
            if self.flat_patch:  # checkpoints with the patch projection as a linear layer
                shape = (self.hidden_size, math.prod(shape[1:]))
            weight = emit.param(self.patch_weight, shape, ("hidden", *(None,) * (len(shape) - 1)))
            bias = None if self.patch_bias is None else emit.param(self.patch_bias, (self.hidden_size,))
            patches = emit.add_node(Patches(self.patch), images)
            return emit.linear(patches, weight.reshape(self.hidden_size, -1), bias, transpose=True)

    def _tokens(self, emit: Emit, key: str, *size: int | None) -> FlowValue:
        """Return the weight `key`, rows of the hidden width, as `[1, rows, H]`.

        The stored tensor may have leading axes of size 1.
        """
        axes = len(size) if self.flat else 3
        if emit.weights is not None and emit.has_param(key):
            axes = len(emit.weights.spec(key).shape)  # checkpoints of one family differ in the leading axes
        return emit.param(key, (*(1,) * (axes - len(size)), *size)).reshape(1, -1, self.hidden_size)


@dataclass(frozen=True)
class NaflexEmbed:
    """Embed patches `[B, N, P·P·C]` of images of any proportions as tokens `[B, N, H]` (SigLIP 2).

    The input `shapes_input` `[B, 2]` has the rows and columns of patches of each image; patches come row by row, and
    padding after them. Positions are resampled to them, bilinear with antialias.

    Args:
        patch_weight, patch_bias: keys of the projection, `[H, P·P·C]` and `[H]`.
        position_key: `[G·G, H]`, the positions of a grid of `side` × `side` patches.
    """

    patch_weight: str
    patch_bias: str
    position_key: str
    hidden_size: int
    side: int
    shapes_input: str = "spatial_shapes"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        patches = emit.require(value, "NaflexEmbed")
        with emit.scope("embeddings"):
            tokens = emit.linear(
                patches, self.patch_weight, self.patch_bias, roles=("hidden", None), columns=self.hidden_size
            )  # fmt: skip
            table = emit.param(self.position_key, (self.side**2, self.hidden_size))
            shapes = emit.flow_input(self.shapes_input)
            rows, columns = shapes[:, :1], shapes[:, 1:]
            index = emit.iota(patches, 1).reshape(1, -1)
            # Padding takes the first position: beyond the last row no weight would be left.
            index = emit.where(index < rows * columns, index, 0)
            row = emit.floor_divide(index, columns)
            by_row = self._weights(emit, row, rows)
            by_column = self._weights(emit, index - row * columns, columns)
            weights = by_row.reshape(*by_row.shape, 1) * by_column.reshape(*by_column.shape[:2], 1, self.side)
            return tokens + emit.cast(weights.reshape(*by_row.shape[:2], -1) @ emit.cast(table, "f32"), tokens.dtype)

    def _weights(self, emit: Emit, index: FlowValue, size: FlowValue) -> FlowValue:
        """Return the f32 weights `[B, N, side]` of the grid's rows for row `index` `[B, N]` of `size` `[B, 1]` rows."""
        scale = self.side / emit.cast(size, "f32")
        centre = (emit.cast(index, "f32") + 0.5) * scale - 0.5
        distance = abs(emit.arange(self.side, dtype="f32") - centre.reshape(*centre.shape, 1))
        weights = emit.maximum(1 - distance / emit.maximum(scale, 1.0).reshape(-1, 1, 1), 0.0)
        return weights / emit.sum(weights, -1, keepdims=True)


# -- attention and feed-forward ----------------------------------------------------------------


@dataclass(frozen=True)
class VitSelfAttnSpec:
    """Keys and sizes of a VitSelfAttn: weights `[3·N·D, H]` and `[H, N·D]`, biases `[3·N·D]` and `[H]`, or None."""

    qkv_weight: str
    qkv_bias: str | None
    out_weight: str
    out_bias: str | None
    hidden_size: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class VitSelfAttn:
    """Attention of a normalised `[B,S,H]` over all of its tokens, with one weight for q, k and v: `[B,S,H]` → same.

    The stage includes the output projection. It reads the keep mask of an earlier `AttnMask` stage, if there is one.
    """

    spec: VitSelfAttnSpec

    @staticmethod
    def dinov2(prefix: str, hidden_size: int, num_heads: int) -> VitSelfAttn:
        """Return the stage with DINOv2's keys, `{prefix}.attn.qkv.*` and `{prefix}.attn.proj.*`."""
        return VitSelfAttn(_fused_qkv_spec(f"{prefix}.attn", "qkv", "proj", hidden_size, num_heads))

    @staticmethod
    def nomic_vision(prefix: str, hidden_size: int, num_heads: int) -> VitSelfAttn:
        """Return the stage with the keys of Nomic's tower, `{prefix}.attn.Wqkv.*` and `{prefix}.attn.out_proj.*`."""
        return VitSelfAttn(_fused_qkv_spec(f"{prefix}.attn", "Wqkv", "out_proj", hidden_size, num_heads))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s, x = self.spec, emit.require(value, "VitSelfAttn")
        check_hidden(emit, x, (None, None, s.hidden_size), "VitSelfAttn")
        attention = SelfAttention(
            s.qkv_weight, s.out_weight, s.num_heads, head_dim=s.head_dim, qkv_bias=s.qkv_bias, out_bias=s.out_bias,
            name="attn",
        )  # fmt: skip
        return attention.emit(emit, x)


def _fused_qkv_spec(prefix: str, qkv: str, out: str, hidden_size: int, num_heads: int) -> VitSelfAttnSpec:
    """Return the spec of an attention with the modules `{prefix}.{qkv}` and `{prefix}.{out}`, both with biases."""
    width = head_width(prefix, hidden_size, num_heads)
    keys = *module_keys(f"{prefix}.{qkv}"), *module_keys(f"{prefix}.{out}")
    return VitSelfAttnSpec(*keys, hidden_size, num_heads, width)


@dataclass(frozen=True)
class LayerScale:
    """Multiply each channel by a learned scale: `x ⊙ γ`. Weight: `gamma_key` `[H]` (Touvron et al. 2021)."""

    gamma_key: str

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LayerScale")
        with emit.scope("layer_scale"):
            return x * emit.param(self.gamma_key, x.type.shape[-1:])


@dataclass(frozen=True)
class VisionSwiGluFfn:
    """Gated feed-forward with an inner norm (Nomic): `ln((x W₁₁ + b₁₁) ⊙ silu(x W₁₂ + b₁₂); γ, β) W₂ + b₂`.

    Weights: `{layer_prefix}.mlp.{fc11,fc12,fc2}.{weight,bias}`, `{layer_prefix}.mlp.norm.{weight,bias}`. `inner`, the
    width of W₁₁, is needed only for weights that no source has.
    """

    layer_prefix: str
    eps: float = 1e-6
    inner: int | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, p = emit.require(value, "VisionSwiGluFfn"), f"{self.layer_prefix}.mlp"

        with emit.scope("mlp"):
            up = dense(emit, p, "fc11", x, UP_ROLES, self.inner)
            gate = dense(emit, p, "fc12", x, UP_ROLES, up.type.shape[-1])
            inner = emit.add_node(hir.GatedFfn("silu"), gate, up)
            normed = layer_norm_under(emit, p, "norm", inner, self.eps)
            return dense(emit, p, "fc2", normed, DOWN_ROLES, x.type.shape[-1])

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """Return the inner shape `[…, F]` for an input `[…, H]`."""
        return inner_shape(emit, hidden, f"{self.layer_prefix}.mlp.fc11.weight")


# -- complete layers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerKeys:
    """Module names of a layer's weights, relative to the layer's prefix.

    Args:
        norm1, norm2: the norms of the attention half and of the feed-forward half.
        qkv: one name of a fused projection, or three.
        out: the output projection of attention.
        fc1, fc2: the projections of the MLP.
        scale1, scale2: the weights of LayerScale (not modules, so the name ends in `.gamma`), if the layer has any.
        gated1, gated2: projections of a gated layer, which replace `fc1` and `fc2`. `gated1` holds gate and up, gate
            rows first, or names both.
        gate, inner: the gate projection and the inner norm of a VisionSwiGluFfn, which is the feed-forward half where
            `inner` is set.
    """

    norm1: str
    norm2: str
    qkv: str | tuple[str, str, str]
    out: str
    fc1: str
    fc2: str
    scale1: str = ""
    scale2: str = ""
    gated1: str | tuple[str, str] = ""
    gated2: str = ""
    gate: str = ""
    inner: str = ""


# Module names as checkpoints have them: ViT in Hugging Face's layout, DINOv2 in its authors' layout, CLIP and SigLIP,
# and Nomic's vision tower.
HF_QKV = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
VIT_KEYS = LayerKeys(
    "layernorm_before", "layernorm_after", HF_QKV, "attention.output.dense", "intermediate.dense", "output.dense"
)
DINOV2_KEYS = LayerKeys(
    "norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "ls1.gamma", "ls2.gamma", "mlp.w12", "mlp.w3"
)
CLIP_KEYS = LayerKeys(
    "layer_norm1", "layer_norm2", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj",
    "mlp.fc1", "mlp.fc2",
)  # fmt: skip
NOMIC_KEYS = LayerKeys(
    "norm1", "norm2", "attn.Wqkv", "attn.out_proj", "mlp.fc11", "mlp.fc2", gate="mlp.fc12", inner="mlp.norm"
)


@dataclass(frozen=True)
class PreNormLayerSpec:
    """Keys, sizes and options of a pre-norm layer.

    Args:
        activation: a name in `UNARY`.
        gated: the feed-forward half is SwiGLU.
        qkv_bias: whether the projections of attention have biases, all or q, k and v each.
        causal, mask_input: as in `SelfAttention`.
        use_rope: rotate queries and keys by the rope tables of an earlier stage.
        rope_style: how columns pair up for that, as in `SelfAttention`.
        bias: as in `SelfAttention`.
        inner_eps: epsilon of the norm inside the feed-forward half, if the keys name one.
        intermediate_size: width of the MLP; may be None unless some weight is missing from every source.
    """

    prefix: str
    keys: LayerKeys
    hidden_size: int
    num_heads: int
    intermediate_size: int | None
    eps: float = 1e-6
    activation: str = "gelu"
    gated: bool = False
    qkv_bias: bool | tuple[bool, bool, bool] = True
    causal: bool = False
    mask_input: str | None = None
    use_rope: bool = False
    inner_eps: float = 1e-6
    rope_style: str = "interleaved"
    bias: str | None = None

    def __post_init__(self) -> None:
        if self.gated and not (self.keys.gated1 and self.keys.gated2):
            raise GraphError(f"{self.prefix}: a gated layer needs the names gated1 and gated2 among its keys")

    @property
    def attention(self) -> SelfAttention:
        """The attention stage of the layer."""
        k, width = self.keys, head_width(self.prefix, self.hidden_size, self.num_heads)
        names = (k.qkv,) if isinstance(k.qkv, str) else k.qkv
        attention = SelfAttention.hf(
            self.prefix, self.num_heads, names=(*names, k.out), bias=self.qkv_bias is not False, head_dim=width,
            causal=self.causal, mask_input=self.mask_input,
        )  # fmt: skip
        options: dict[str, Any] = {"rope": "", "rope_style": self.rope_style} if self.use_rope else {}
        if isinstance(self.qkv_bias, tuple):
            keys = zip(names, self.qkv_bias, strict=True)
            options["qkv_bias"] = tuple(f"{self.prefix}.{name}.bias" if has_bias else None for name, has_bias in keys)
        return replace(attention, out_bias=f"{self.prefix}.{k.out}.bias", name="attn", bias=self.bias, **options)

    @property
    def ffn(self) -> BlockStage:
        """The feed-forward stage of the layer: a VisionSwiGluFfn, a SwiGlu or an Mlp, by the keys and `gated`."""
        k, inner = self.keys, self.intermediate_size
        if k.inner:
            return VisionSwiGluFfn(self.prefix, self.inner_eps, inner)
        if not self.gated:
            fc1, fc2 = (module_keys(f"{self.prefix}.{name}") for name in (k.fc1, k.fc2))
            return Mlp(*fc1, *fc2, self.activation, inner)
        down = module_keys(f"{self.prefix}.{k.gated2}")
        gate: tuple[WeightKey, ...]  # weight and bias
        up: tuple[WeightKey, ...]
        if isinstance(k.gated1, str):
            fused = (WeightPart.split(key, 2) for key in module_keys(f"{self.prefix}.{k.gated1}"))
            gate, up = zip(*fused, strict=True)
        else:
            gate, up = (module_keys(f"{self.prefix}.{name}") for name in k.gated1)
        return SwiGlu(gate[0], up[0], down[0], (gate[1], up[1], down[1]), inner)


def pre_norm_layer(spec: PreNormLayerSpec) -> BlockStage:
    """Return a pre-norm layer: `h = x + attn(ln(x)) [⊙ γ₁]`, `y = h + ffn(ln(h)) [⊙ γ₂]`, `[B,S,H]` → same."""
    k, p = spec.keys, spec.prefix
    attention = _residual_half(p, k.norm1, spec.eps, spec.attention, k.scale1)
    return Sequence((*attention, *_residual_half(p, k.norm2, spec.eps, spec.ffn, k.scale2)))


def _residual_half(prefix: str, norm: str, eps: float, inner: BlockStage, scale: str = "") -> tuple[BlockStage, ...]:
    """Return the stages of `x + inner(ln(x)) [⊙ γ]`."""
    pre_norm = LayerNorm(*module_keys(f"{prefix}.{norm}"), eps)
    scales = (LayerScale(f"{prefix}.{scale}"),) if scale else ()
    return ResidualSave(), pre_norm, inner, *scales, ResidualAdd()


def dinov2_layer_fused(index: int, hidden_size: int, num_heads: int, eps: float = 1e-6) -> BlockStage:
    """Return DINOv2's layer `blocks.{index}`, in its authors' checkpoint layout, with exact GELU."""
    spec = PreNormLayerSpec(f"blocks.{index}", DINOV2_KEYS, hidden_size, num_heads, None, eps)
    return Named(f"layer{index}", pre_norm_layer(spec))


def nomic_vision_layer_fused(index: int, hidden_size: int, num_heads: int, eps: float = 1e-6) -> BlockStage:
    """Return layer `layers.{index}` of Nomic's vision tower; all norms use `eps`, queries and keys are not rotated."""
    spec = PreNormLayerSpec(f"layers.{index}", NOMIC_KEYS, hidden_size, num_heads, None, eps, inner_eps=eps)
    return Named(f"layer{index}", pre_norm_layer(spec))


def siglip_layer_fused_with_prefix(
    prefix: str, index: int, hidden_size: int, num_heads: int, eps: float = 1e-6
) -> BlockStage:
    """Return SigLIP's layer `{prefix}.encoder.layers.{index}`, with tanh GELU."""
    p = f"{prefix}.encoder.layers.{index}"
    spec = PreNormLayerSpec(p, CLIP_KEYS, hidden_size, num_heads, None, eps, "gelu_tanh")
    return Named(f"layer{index}", pre_norm_layer(spec))


# -- rotation ---------------------------------------------------------------------------------


def grid_rope_tables(
    emit: Emit, images: FlowValue, patch: tuple[int, int], freqs: tuple[float, ...], num_prefix_tokens: int
) -> tuple[FlowValue, FlowValue]:
    """Return cos and sin of a rotation by the row and the column of each patch of images of any size.

    Args:
        emit: the flow.
        images: `[B, C, h, w]`.
        patch: height and width of a patch.
        freqs: radians per unit, for coordinates from −1 to 1 across the image.
        num_prefix_tokens: tokens before the patches, which are not rotated.
    """
    cos, sin = emit.add_all(GridAngles(patch, freqs, num_prefix_tokens), images)
    return cos, sin


@dataclass(frozen=True)
class PatchRope:
    """Write rope tables of a grid of patches, row by row, for the stages that follow; the active value is unchanged.

    The first half of a head's columns is rotated by the patch's row and the second half by its column, each with the
    frequencies of a head of half the width (EVA-02: Fang et al. 2023).

    Args:
        grid: rows and columns of patches.
        head_dim: width of a head, a multiple of 4.
        reference: (rows, columns) of another grid, to which the coordinates are scaled.
        num_prefix_tokens: number of leading tokens, such as a class token, that are not rotated.
    """

    grid: tuple[int, int]
    head_dim: int
    theta: float = 10000.0
    reference: tuple[int, int] | None = None
    num_prefix_tokens: int = 1

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        half = self.head_dim // 2
        if self.head_dim < 4 or self.head_dim % 4:
            raise ShapeError(f"{emit.path}: PatchRope: head_dim is {self.head_dim}; expected a multiple of 4")
        coordinates = np.indices(self.grid).reshape(2, -1).T
        table = np.concatenate([np.zeros((self.num_prefix_tokens, 2)), coordinates])[None].astype(np.int32)
        scale = (1.0, 1.0) if self.reference is None else tuple(np.divide(self.reference, self.grid).tolist())
        frequencies, axes = axial_frequencies((half, half), self.theta)
        scaled = [f * scale[axis] for f, axis in zip(frequencies, axes, strict=True)]
        with emit.scope("rotary_emb"):
            emit.state.rope_cos, emit.state.rope_sin = emit.rope_angles(emit.constant(table), scaled, axes=axes)
        return value
