"""Define the config and recipe of BEiT (Bao et al. 2021) and Data2Vec-Vision, with Hugging Face's keys."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from rlx_jax.blocks import BlockStage, ClsTokenPool, PreNormLayerSpec, Sequence
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.config import Fields
from rlx_jax.models.vision import PatchMean, VisionConfig, VisionFlow, VisionLayout
from rlx_jax.models.vit import HF
from rlx_jax.trace.emit import Emit, FlowValue

# Name of the registered bias of scores, and the prefix of its table in a layer.
BIAS, TABLE = "grid_bias", "relative_position_bias.relative_position_"
LAYOUT = replace(
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

    layout: VisionLayout = LAYOUT
    name = "beit"

    prefixes = ("", "beit", "data2vec_vision")

    @property
    def sides(self) -> tuple[int | str, int | str]:
        return self.config.image_size if self.config.has_bias else super().sides

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.config
        layout = replace(LAYOUT, keys=LAYOUT.keys if c.layer_scale else HF.keys)
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
