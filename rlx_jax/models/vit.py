"""Define the config and recipe of ViT (Dosovitskiy et al. 2020), with Hugging Face's keys, and of the families that
differ from it in tokens or pooling: DeiT, I-JEPA, ViT-MSN, DINOv2, DINOv3, BEiT (Bao et al. 2021) and Data2Vec-Vision.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from rlx_jax.blocks import BlockStage, ClsTokenPool, LayerKeys, Linear, PreNormLayerSpec, Sequence
from rlx_jax.blocks.vision import DINOV2_KEYS, HF_QKV, VIT_KEYS, grid_rope_tables
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, UnsupportedError, quote
from rlx_jax.models.config import Fields, tower_fields
from rlx_jax.models.encoder import IMAGE, IMAGE_HEADS, HeadLayer, TaskHead
from rlx_jax.models.vision import PatchMean, VisionConfig, VisionFlow, VisionLayout, image_fields
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import frequencies

LAYER, PROJECTIONS = "encoder.layer.{}", ("query", "key", "value")
HF = VisionLayout(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    layers=LAYER,
    keys=VIT_KEYS,
    cls="embeddings.cls_token",
    after="layernorm",
    unread_keys=("embeddings.mask_token", "pooler."),
    head_prefixes=("classifier.", "decoder."),
)


class ViTConfig(VisionConfig):
    """Sizes of a ViT. Its tanh pooler is not built."""

    defaults = {"eps": 1e-12}
    fields = {"qkv_bias": "qkv_bias"}
    inert = ("encoder_stride", "pooler_act", "pooler_output_size")


@dataclass(frozen=True)
class ViTFlow(VisionFlow[ViTConfig]):
    """The recipe of ViT: see `VisionFlow`. `pooled` is the class token after the last norm, before any pooler."""

    layout: VisionLayout = HF
    name = "vit"

    prefixes = ("", "vit")
    peft_names = (
        *((f"{LAYER}.attention.attention.{name}", f"layers.{{}}.attention.{name[0]}_proj") for name in PROJECTIONS),
        (f"{LAYER}.attention.output.dense", "layers.{}.attention.o_proj"),
        (f"{LAYER}.intermediate.dense", "layers.{}.mlp.fc1"),
        (f"{LAYER}.output.dense", "layers.{}.mlp.fc2"),
    )


DEIT_HEADS = (*HF.head_prefixes, "cls_classifier.", "distillation_classifier.")
DEIT = replace(HF, distillation="embeddings.distillation_token", head_prefixes=DEIT_HEADS)
TEACHER = f"{IMAGE}WithTeacher"


@dataclass(frozen=True)
class DeiTFlow(ViTFlow):
    """The recipe of DeiT (Touvron et al. 2020): ViT with a distillation token after the class token.

    The head of `DeiTForImageClassificationWithTeacher` is the mean of two classifiers, one for each token.
    """

    layout: VisionLayout = DEIT
    name = "deit"

    prefixes = ("", "deit")
    heads = {**IMAGE_HEADS, TEACHER: (HeadLayer("cls_classifier"), HeadLayer("distillation_classifier"))}

    def head_stages(self, head: TaskHead) -> tuple[BlockStage, ...]:
        if head.task != TEACHER:
            return super().head_stages(head)
        return (MeanOfHeads(tuple(layer.key for layer in head.layers), len(head.labels), self.config.hidden_size),)


@dataclass(frozen=True)
class MeanOfHeads:
    """Average linear heads, the first of the first token, the second of the second: `[B,S,H]` → `[B,labels]`."""

    keys: tuple[str, ...]
    labels: int
    hidden_size: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "MeanOfHeads")
        logits = [
            Linear(f"{key}.weight", bias_key=f"{key}.bias", shape=(self.labels, self.hidden_size)).emit(emit, x[:, i])
            for i, key in enumerate(self.keys)
        ]
        return sum(logits[1:], logits[0]) * (1 / len(logits))


IJEPA = replace(HF, cls="")


@dataclass(frozen=True)
class IJepaFlow(ViTFlow):
    """The recipe of I-JEPA (Assran et al. 2023): ViT without a class token. `pooled` is the mean of the patches."""

    layout: VisionLayout = IJEPA
    name = "ijepa"

    prefixes = ("", "ijepa")
    head_pool = PatchMean()


# transformers 5 writes the layers of a classifier without the prefix of the other weights.
MSN = replace(HF, patch=f"vit.{HF.patch}", position=f"vit.{HF.position}", cls=f"vit.{HF.cls}", after=f"vit.{HF.after}")


class ViTMsnConfig(ViTConfig):
    """Sizes of a ViT-MSN."""

    defaults = {}


class ViTMsnFlow(ViTFlow):
    """The recipe of ViT-MSN (Assran et al. 2022): ViT with another epsilon by default."""

    name = "vit_msn"

    config_type = ViTMsnConfig
    layouts = (HF, MSN)


# DINOv3 (Siméoni et al. 2025), with Hugging Face's keys.
LAYOUT = VisionLayout(
    patch="embeddings.patch_embeddings",
    position="",
    layers="layer.{}",
    keys=LayerKeys(
        "norm1", "norm2", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj",
        "mlp.up_proj", "mlp.down_proj", "layer_scale1.lambda1", "layer_scale2.lambda1",
        ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj",
    ),
    cls="embeddings.cls_token",
    registers="embeddings.register_tokens",
    after="norm",
    unread_keys=("embeddings.mask_token",),
)  # fmt: skip


@dataclass(frozen=True)
class Dinov3Config(VisionConfig):
    """Sizes of a DINOv3 model; its positions are a rotation with the base `rope_theta`."""

    rope_theta: float = 100.0

    defaults = {"hidden": 384, "heads": 6, "eps": 1e-5}
    fields = {"gated": "use_gated_mlp", "rope_theta": "rope_theta"}
    inert = (
        "apply_layernorm", "layerscale_value", "out_features", "out_indices", "pos_embed_jitter", "pos_embed_rescale",
        "pos_embed_shift", "reshape_hidden_states", "stage_names",
    )  # fmt: skip
    neutral = {"mlp_bias": (True,), "proj_bias": (True,)}

    @classmethod
    def read(cls, c: Fields) -> Self:
        result = cls(
            **cls.common_fields(c),
            qkv_bias=(c.flag("query_bias", True), c.flag("key_bias", False), c.flag("value_bias", True)),
            registers=c.integer("num_register_tokens", 0, low=0, high=2**10),
        )
        if result.hidden_size // result.num_attention_heads % 4:
            raise ConfigError(
                f"{c.where}: hidden_size {result.hidden_size} over num_attention_heads {result.num_attention_heads} is "
                "no multiple of 4, as the rotation by row and column needs"
            )
        if result.gated and result.activation != "silu":
            raise UnsupportedError(f"{c.where}: hidden_act is {quote(c.raw('hidden_act'))}; use_gated_mlp needs silu")
        return result


@dataclass(frozen=True)
class GridRope:
    """Write the rope tables of the patches of the input `pixel_values` for the stages that follow.

    The tokens before the patches are not rotated. The active value is unchanged.
    """

    patch: tuple[int, int]
    head_dim: int
    theta: float
    num_prefix_tokens: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        freqs = tuple(2 * math.pi * f for f in frequencies(self.head_dim // 2, self.theta))
        with emit.scope("rope_embeddings"):
            images = emit.flow_input("pixel_values")
            tables = grid_rope_tables(emit, images, self.patch, freqs, self.num_prefix_tokens)
            emit.state.rope_cos, emit.state.rope_sin = tables
        return value


@dataclass(frozen=True)
class Dinov3Flow(VisionFlow[Dinov3Config]):
    """The recipe of DINOv3: see `VisionFlow`. `pooled` is the class token after the last norm."""

    layout: VisionLayout = LAYOUT
    name = "dinov3"

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        rope = GridRope(c.patch_size, c.hidden_size // c.num_attention_heads, c.rope_theta, 1 + c.registers)
        return *super().embedding_stages(), rope

    def spec(self, index: int) -> PreNormLayerSpec:
        return replace(super().spec(index), use_rope=True, rope_style="half")


# DINOv2, with and without registers, with Hugging Face's keys or the authors'.
HF_KEYS = LayerKeys(
    "norm1", "norm2", HF_QKV, "attention.output.dense", "mlp.fc1", "mlp.fc2",
    "layer_scale1.lambda1", "layer_scale2.lambda1", "mlp.weights_in", "mlp.weights_out",
)  # fmt: skip
DINOV2_LAYOUT = replace(
    HF, keys=HF_KEYS, registers="embeddings.register_tokens", unread_keys=("embeddings.mask_token",),
    head_prefixes=("classifier.",),
)  # fmt: skip
ORIGINAL = VisionLayout(
    patch="patch_embed.proj",
    position="pos_embed",
    layers="blocks.{}",
    keys=DINOV2_KEYS,
    cls="cls_token",
    registers="register_tokens",
    after="norm",
    unread_keys=("mask_token",),
    head_prefixes=("head.",),
)


class Dinov2Config(VisionConfig):
    """Sizes of a DINOv2 model."""

    inert = (
        "apply_layernorm", "intermediate_size", "layerscale_value", "out_features", "out_indices",
        "reshape_hidden_states", "stage_names", "use_mask_token",
    )  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        with_registers = c.text("model_type", "dinov2") == "dinov2_with_registers"
        tower, swiglu = tower_fields(c), c.flag("use_swiglu_ffn", False)
        width = int(tower["hidden_size"] * c.real("mlp_ratio", 4))
        return cls(
            **tower,
            **image_fields(c, patch=16 if with_registers else 14),
            # As in the reference: SwiGLU has two thirds of the width, rounded up to a multiple of 8.
            intermediate_size=(int(width * 2 / 3) + 7) // 8 * 8 if swiglu else width,
            qkv_bias=c.flag("qkv_bias", True),
            gated=swiglu,
            registers=c.integer("num_register_tokens", 4, low=0, high=2**10) if with_registers else 0,
            antialias=with_registers,
        )


@dataclass(frozen=True)
class Dinov2Flow(VisionFlow[Dinov2Config]):
    """The recipe of DINOv2: see `VisionFlow`. `pooled` is the class token after the last norm.

    A head reads the class token and the mean of the patches.
    """

    layout: VisionLayout = DINOV2_LAYOUT
    name = "dinov2"

    prefixes = ("", "dinov2", "dinov2_with_registers")
    peft_names = (
        *((f"{LAYER}.attention.attention.{name}", f"{LAYER}.attention.{name[0]}_proj") for name in PROJECTIONS),
        (f"{LAYER}.attention.output.dense", f"{LAYER}.attention.o_proj"),
    )
    layouts = (DINOV2_LAYOUT, ORIGINAL)

    def head_input(self) -> tuple[BlockStage, int]:
        return PatchMean(1 + self.config.registers, cls=True), 2 * self.config.hidden_size


# Name of the registered bias of scores, and the prefix of its table in a layer.
BIAS, TABLE = "grid_bias", "relative_position_bias.relative_position_"
BEIT_LAYOUT = replace(
    HF,
    keys=replace(HF.keys, scale1="lambda_1", scale2="lambda_2"),
    unread_keys=("embeddings.mask_token", "pooler.", "layernorm."),
    head_prefixes=("classifier.", "lm_head."),
)


@dataclass(frozen=True)
class GridBias:
    """Register a bias of attention scores by the distance of two patches in rows and columns, `[1,N,S,S]`, as `BIAS`.

    Weight: `key` `[(2R−1)·(2C−1)+3, N]` for a grid of R rows and C columns. The last three rows are for pairs with the
    class token: from it, to it, and with itself.
    """

    key: str
    grid: tuple[int, int]
    heads: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        rows, columns = self.grid
        distances = (2 * rows - 1) * (2 * columns - 1)
        row, column = np.indices(self.grid).reshape(2, -1)
        index = np.full((rows * columns + 1,) * 2, distances, np.int32)
        index[1:, 0], index[0, 0] = distances + 1, distances + 2
        row_steps, column_steps = (x[:, None] - x + n - 1 for x, n in ((row, rows), (column, columns)))
        index[1:, 1:] = row_steps * (2 * columns - 1) + column_steps
        with emit.scope("relative_position_bias"):
            table = emit.param(self.key, (distances + 3, self.heads), (None, "heads"))
            bias = emit.take(table, emit.constant(index.reshape(-1)), 0).reshape(*index.shape, self.heads)
            emit.set_named(BIAS, bias.transpose(2, 0, 1)[None])
        return value


@dataclass(frozen=True)
class BeitConfig(VisionConfig):
    """Sizes of a BEiT.

    Attributes:
        absolute, relative, shared: which positions it has: embeddings, a bias of scores in each layer, one for all.
        layer_scale: whether the halves of a layer have scales.
        mean_pooling: pool the mean of the patches, with a norm after it, rather than the class token after a norm.
    """

    absolute: bool = False
    relative: bool = False
    shared: bool = False
    layer_scale: bool = True
    mean_pooling: bool = True

    defaults = {"eps": 1e-12}
    fields = {
        "absolute": "use_absolute_position_embeddings", "relative": "use_relative_position_bias",
        "shared": "use_shared_relative_position_bias", "mean_pooling": "use_mean_pooling",
    }  # fmt: skip
    inert = (
        "add_fpn", "auxiliary_channels", "auxiliary_concat_input", "auxiliary_loss_weight", "auxiliary_num_convs",
        "out_features", "out_indices", "pool_scales", "reshape_hidden_states", "segmentation_indices",
        "semantic_loss_ignore_index", "stage_names", "use_auxiliary_head", "use_mask_token", "vocab_size",
    )  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        scale = c.real("layer_scale_init_value", 0.1, exclusive=False)
        result = cls(**cls.common_fields(c), qkv_bias=(True, False, True), layer_scale=scale > 0)
        if result.relative and result.shared:
            raise UnsupportedError(
                f"{c.where}: use_relative_position_bias and use_shared_relative_position_bias are both true; supported "
                "is one of them"
            )
        if result.has_bias and result.grid[0] != result.grid[1]:
            raise UnsupportedError(
                f"{c.where}: image_size {list(result.image_size)} is {result.grid[0]} × {result.grid[1]} patches; a "
                "relative position bias is supported for as many rows as columns"
            )
        return result

    @property
    def has_bias(self) -> bool:
        """Whether scores have a bias by the distance of patches."""
        return self.relative or self.shared


@dataclass(frozen=True)
class BeitFlow(VisionFlow[BeitConfig]):
    """The recipe of BEiT: see `VisionFlow`. `pooled` is its pooler's output, which a classifier reads too.

    With a bias by distance images have the size in the config.
    """

    layout: VisionLayout = BEIT_LAYOUT
    name = "beit"

    prefixes = ("", "beit", "data2vec_vision")

    @property
    def sides(self) -> tuple[int | str, int | str]:
        return self.config.image_size if self.config.has_bias else super().sides

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.config
        layout = replace(BEIT_LAYOUT, keys=BEIT_LAYOUT.keys if c.layer_scale else HF.keys)
        layout = replace(layout, position=HF.position if c.absolute else "", after="" if c.mean_pooling else HF.after)
        object.__setattr__(self, "layout", layout)  # which weights there are depends on the config

    def unread_keys(self) -> tuple[str, ...]:
        # Old checkpoints also store the indices of the rows of the tables.
        layers = (self.layout.layers.format(i) for i in range(self.config.num_hidden_layers))
        indices = (f"{prefix}.{TABLE}index" for prefix in ("encoder", *(f"{n}.attention.attention" for n in layers)))
        return *super().unread_keys(), *map(self.key, indices)

    def grid_bias(self, prefix: str) -> GridBias:
        """Return the stage that makes the bias of scores from the table under a prefix."""
        return GridBias(self.key(f"{prefix}.{TABLE}bias_table"), self.config.grid, self.config.num_attention_heads)

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        shared = (self.grid_bias("encoder"),) if self.config.shared else ()
        return *super().embedding_stages(), *shared

    def spec(self, index: int) -> PreNormLayerSpec:
        return replace(super().spec(index), bias=BIAS if self.config.has_bias else None)

    def stage(self, index: int, spec: Any) -> BlockStage:
        layer = super().stage(index, spec)
        if not self.config.relative:
            return layer
        return Sequence((self.grid_bias(f"{self.layout.layers.format(index)}.attention.attention"), layer))

    def pool(self) -> BlockStage:
        mean = Sequence((PatchMean(1), *self.norm("pooler.layernorm")))
        return mean if self.config.mean_pooling else ClsTokenPool()

    def head_input(self) -> tuple[BlockStage, int]:
        return self.pool(), self.config.hidden_size
