"""The recipe of a vision tower: from images to hidden states and one vector. Families are configs and keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax.blocks import BlockStage, ClsTokenPool, LayerKeys, LayerNorm, PreNormLayerSpec, VisionEmbed, pre_norm_layer
from rlx_jax.errors import ConfigError
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import Fields, LayeredConfig
from rlx_jax.models.encoder import TowerFlow, head_keys
from rlx_jax.weights.source import WeightSource

# -- configs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TowerConfig(LayeredConfig):
    """Sizes of a stack of layers whose norms come first, under the names of Hugging Face's configs."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    activation: str


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """Sizes of a vision tower. `image_size` is what its positions were trained for; others are resampled."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    qkv_bias: bool = True
    gated: bool = False
    registers: int = 0
    antialias: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches that there are positions for."""
        (height, width), (p, q) = self.image_size, self.patch_size
        return height // p, width // q


# Fields of the towers of CLIP and SigLIP that have no part in what is computed.
TOWER_INERT = ("tie_word_embeddings",)


def image_fields(c: Fields, image: int = 224, patch: int = 16, name: str = "image_size") -> dict[str, Any]:
    """The sizes of images and patches. The keywords are the family's defaults, and what it calls the first field.

    Raises:
        ConfigError: an image is smaller than a patch.
    """
    size, cut = c.pair(name, image), c.pair("patch_size", patch)
    if size[0] < cut[0] or size[1] < cut[1]:
        raise ConfigError(f"{c.where}: {name} {list(size)} is smaller than patch_size {list(cut)}")
    return {"image_size": size, "patch_size": cut, "num_channels": c.whole("num_channels", 3, high=2**10)}


# -- where checkpoints keep their weights ------------------------------------------------------


@dataclass(frozen=True)
class VisionLayout:
    """Where a checkpoint keeps a vision tower: keys under a prefix, empty for what there is not.

    `layers` is the prefix of a layer, `{}` its number. With `flat` positions are stored `[T, H]` and the class token
    `[H]`, else behind axes of 1; with `flat_patch` the weight of patches is `[H, C·P·Q]`, else `[H, C, P, Q]`. Not
    read are `left` and, of the heads of tasks, `heads`.
    """

    patch: str
    position: str
    layers: str
    keys: LayerKeys
    cls: str = ""
    registers: str = ""
    before: str = ""
    after: str = ""
    patch_bias: bool = True
    flat: bool = False
    flat_patch: bool = False
    left: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


C = TypeVar("C", bound=VisionConfig)


@dataclass(frozen=True)
class VisionFlow(TowerFlow[C]):
    """The recipe. Input: `pixel_values` `[batch, channels, height, width]` float32, as the checkpoint's image processor
    makes them. Outputs: `hidden_states` `[batch, tokens, hidden]`, and `pooled`, one vector for each image.

    Images of another size than the config's are read too: positions are resampled for them.

    Args:
        layout: where the checkpoint keeps its weights; prefix: what stands before each of those keys.
        Others: see `Recipe`.
    """

    name: str = "vision"
    layout: VisionLayout = field(kw_only=True)

    config_type = VisionConfig
    layouts: ClassVar[tuple[VisionLayout, ...]] = ()
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    modules: ClassVar[tuple[tuple[str, str], ...]] = ()  # as stored, and as transformers 5 calls it, PEFT's files too

    def stored_in(self, source: WeightSource) -> Self:
        """The recipe with the layout and the prefix that a checkpoint keeps the weights of its patches under; where it
        has none, as it is."""
        choices = [(layout, prefix) for layout in self.layouts for prefix in self.prefixes]
        there = (found for found in choices if source.has(f"{found[1]}{found[0].patch}.weight"))
        layout, prefix = next(there, (self.layout, self.prefix))
        return replace(self, layout=layout, prefix=prefix)

    def spec(self, index: int) -> PreNormLayerSpec:
        """The spec of a layer, which holds the layer's keys."""
        c, prefix = self.config, self.prefix + self.layout.layers.format(index)
        return PreNormLayerSpec(
            prefix, self.layout.keys, c.hidden_size, c.num_attention_heads, c.intermediate_size, c.layer_norm_eps,
            c.activation, c.gated, c.qkv_bias,
        )  # fmt: skip

    def stage(self, index: int, spec: Any) -> BlockStage:
        return pre_norm_layer(spec)

    def pool(self) -> BlockStage | None:
        """What makes one vector of the hidden states: the class token. None: nothing does."""
        return ClsTokenPool()

    def heads_in(self, source: WeightSource) -> tuple[str, ...]:
        return head_keys(self.layout.heads, source)

    def inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        return flow.input("pixel_values", (rows, self.config.num_channels, *self.sides))

    @property
    def sides(self) -> tuple[int | str, int | str]:
        """Height and width of the images."""
        return "height", "width"

    def opening(self) -> tuple[BlockStage, ...]:
        """The stages before the layers, the first of which takes the images."""
        c, where, p = self.config, self.layout, self.prefix
        embed = VisionEmbed(
            f"{p}{where.patch}.weight",
            f"{p}{where.patch}.bias" if where.patch_bias else None,
            p + where.position,
            c.hidden_size,
            c.patch_size,
            c.grid,
            p + where.cls if where.cls else None,
            p + where.registers if c.registers else None,
            c.antialias,
            where.flat_patch,
            where.flat,
            c.registers,
        )
        return embed, *self._norm(where.before)

    def closing(self) -> tuple[BlockStage, ...]:
        """The stages behind the layers."""
        return self._norm(self.layout.after)

    def _norm(self, name: str) -> tuple[BlockStage, ...]:
        """The norm of that name, if there is one."""
        key = self.prefix + name
        return (LayerNorm(f"{key}.weight", f"{key}.bias", self.config.layer_norm_eps),) if name else ()

    def leave(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose."""
        spare = not self.config.registers and self.layout.registers  # stored all the same
        none = (self.layout.registers,) if spare else ()
        keys = self.layout.left + self.layout.heads + none
        return tuple(self.prefix + key for key in keys) + keys
