"""Define the recipes of towers that families share, as configs and keys: a vision tower, from images to hidden states
and one vector, and a pre-norm text tower, next to an image tower or alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax import blocks
from rlx_jax.blocks.linear import module_keys
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import ConfigError, RlxWarning, UnsupportedError, quote
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import Fields, LayeredConfig, TokenConfig, finish_model, tower_fields
from rlx_jax.models.encoder import IMAGE_HEADS, EncoderFlow, TaskHead, TowerFlow, head_keys
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource


@dataclass(frozen=True)
class TowerConfig(LayeredConfig):
    """Sizes of a stack of pre-norm layers, with Hugging Face's field names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    activation: str


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """Sizes of a vision tower. Positions are trained for `image_size`; they are resampled for other sizes.

    A family sets `defaults`, keywords of `tower_fields`; `patch`, the default of its patches; and `fields`, further
    attributes and the names of their fields.
    """

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    qkv_bias: bool | tuple[bool, bool, bool] = True
    gated: bool = False
    registers: int = 0
    antialias: bool = False

    patch: ClassVar[int] = 16
    fields: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        """Return the fields that configs like ViT's share, and the ones in `fields`."""
        return dict(
            **tower_fields(c, **cls.defaults), **image_fields(c, patch=cls.patch),
            intermediate_size=c.integer("intermediate_size", 4 * cls.defaults.get("hidden", 768)),
            **c.with_defaults(cls, **cls.fields),
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches that there are positions for."""
        (height, width), (p, q) = self.image_size, self.patch_size
        return height // p, width // q


# Fields of the towers of CLIP and SigLIP that do not affect the computation.
TOWER_INERT = ("tie_word_embeddings",)


def image_fields(c: Fields, patch: int = 16, name: str = "image_size") -> dict[str, Any]:
    """Return the sizes of images and patches.

    Args:
        c: the config.
        patch: the family's default of the size of patches.
        name: the family's name of the field `image_size`.

    Raises:
        ConfigError: an image is smaller than a patch.
    """
    size, patch_size = c.pair(name, 224), c.pair("patch_size", patch)
    if size[0] < patch_size[0] or size[1] < patch_size[1]:
        raise ConfigError(f"{c.where}: {name} {list(size)} is smaller than patch_size {list(patch_size)}")
    return {"image_size": size, "patch_size": patch_size, "num_channels": c.integer("num_channels", 3, high=2**10)}


@dataclass(frozen=True)
class VisionLayout:
    """The keys of a vision tower in a checkpoint, relative to a prefix; empty for weights that it does not have.

    Attributes:
        position: the position embeddings; empty for none.
        layers: prefix of a layer, with `{}` for its number.
        distillation: a second class token.
        flat: positions are stored `[T, H]` and the class token `[H]`; otherwise they have leading axes of 1.
        flat_patch: the weight of patches is `[H, C·P·Q]`; otherwise `[H, C, P, Q]`.
        unread_keys: keys that are not read.
        head_prefixes: prefixes of keys of task heads, which are not read either.
    """

    patch: str
    position: str
    layers: str
    keys: blocks.LayerKeys
    cls: str = ""
    distillation: str = ""
    registers: str = ""
    before: str = ""
    after: str = ""
    patch_bias: bool = True
    flat: bool = False
    flat_patch: bool = False
    unread_keys: tuple[str, ...] = ()
    head_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchMean:
    """Average the tokens from `start` on, `[B,S,H]` → `[B,H]`; with `cls`, append the average to the first token.

    `mask_input` names an input `[B,S]` with 1 for the tokens to average, in place of `start`.
    """

    start: int = 0
    cls: bool = False
    mask_input: str | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "PatchMean")
        with emit.scope("patch_mean"):
            if self.mask_input is not None:
                weights = emit.cast(emit.flow_input(self.mask_input), x.dtype)
                return emit.einsum("bsh,bs->bh", x, weights) / emit.sum(weights, 1, keepdims=True)
            mean = (x[:, self.start :] if self.start else x).mean(axis=1)
            return emit.concat([emit.first_token(x), mean]) if self.cls else mean


C = TypeVar("C", bound=VisionConfig)


@dataclass(frozen=True)
class VisionFlow(TowerFlow[C]):
    """The recipe of a vision tower.

    Input: `pixel_values` `[batch, channels, height, width]` float32, as the checkpoint's image processor makes them.
    Outputs: `hidden_states` `[batch, tokens, hidden]`, and `pooled`, one vector for each image; with a head
    `label_logits` `[batch, labels]`. For images of another size than the config's, positions are resampled.

    Args:
        layout: the keys of the checkpoint; prefix: the prefix of each of them.
        Others: see `Recipe`.
    """

    name = "vision"
    layout: VisionLayout = field(kw_only=True)

    config_type = VisionConfig
    heads = IMAGE_HEADS
    layouts: ClassVar[tuple[VisionLayout, ...]] = ()  # of a family whose checkpoints have one of several
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    head_pool: ClassVar[blocks.BlockStage] = blocks.ClsTokenPool()
    # Pairs of a module's name in checkpoints, and its name in transformers 5 and so in PEFT's files.
    peft_names: ClassVar[tuple[tuple[str, str], ...]] = ()

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe with the layout and the prefix under which a checkpoint has the patch weights.

        If no combination matches, the recipe is unchanged.
        """
        layouts = self.layouts or (self.layout,)
        choices = [replace(self, layout=layout, prefix=prefix) for layout in layouts for prefix in self.prefixes]
        matches = [choice for choice in choices if source.has(choice.key(f"{choice.layout.patch}.weight"))]
        # Layouts may differ in the prefix of the layers alone.
        complete = (c for c in matches if source.has(f"{c.spec(0).prefix}.{c.layout.keys.norm1}.weight"))
        return next(complete, matches[0] if matches else self)

    def spec(self, index: int) -> blocks.PreNormLayerSpec:
        """Return the spec of a layer, which includes the layer's keys."""
        c = self.config
        return blocks.PreNormLayerSpec(
            self.key(self.layout.layers.format(index)), self.layout.keys, c.hidden_size, c.num_attention_heads,
            c.intermediate_size, c.layer_norm_eps, c.activation, c.gated, c.qkv_bias,
        )  # fmt: skip

    def pool(self) -> blocks.BlockStage | None:
        """Return the stage that pools the hidden states to one vector; None for no pooling."""
        return self.head_pool

    def head_input(self) -> tuple[blocks.BlockStage, int]:
        """Return the stage that pools the hidden states for a head, and the vector's width."""
        return self.head_pool, self.config.hidden_size

    def head_stages(self, head: TaskHead) -> tuple[blocks.BlockStage, ...]:
        pool, width = self.head_input()
        return pool, *head.stages(width, self.key)

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        return () if self.head else head_keys(self.layout.head_prefixes, source)

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        return flow.input("pixel_values", (rows, self.config.num_channels, *self.sides))

    @property
    def sides(self) -> tuple[int | str, int | str]:
        """Height and width of the images: sizes, or names of dynamic axes."""
        return "height", "width"

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        """Return the stages before the layers; the first one takes the images."""
        c, layout = self.config, self.layout
        weight, bias = module_keys(self.key(layout.patch))
        registers = layout.registers if c.registers else ""
        names = (layout.position, layout.cls, registers, layout.distillation)
        position, cls, registers_key, distillation = (self.key(name) if name else None for name in names)
        embed = blocks.VisionEmbed(
            weight, bias if layout.patch_bias else None, position, c.hidden_size, c.patch_size, c.grid, cls,
            registers_key, c.antialias, layout.flat_patch, layout.flat, c.registers, distillation,
        )  # fmt: skip
        return embed, *self.norm(layout.before)

    def final_stages(self) -> tuple[blocks.BlockStage, ...]:
        """Return the stages after the layers."""
        return self.norm(self.layout.after)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose."""
        # A checkpoint may store register tokens although its config has none.
        has_spare_registers = not self.config.registers and self.layout.registers
        registers = (self.layout.registers,) if has_spare_registers else ()
        keys = self.layout.unread_keys + self.layout.head_prefixes + registers
        return (*map(self.key, keys), *keys)


TOKEN_TABLE, POSITION_TABLE = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"


@dataclass(frozen=True)
class TextConfig(TowerConfig, TokenConfig):
    """Sizes of a text tower. `width` is the width of its vectors."""

    vocab_size: int
    max_position_embeddings: int
    width: int


T = TypeVar("T", bound=TextConfig)


@dataclass(frozen=True)
class TextFlow(EncoderFlow[T]):
    """The recipe of a text tower: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`.

    Its side output `pooled` is one vector for each text, not normalised.
    """

    prefix: str = "text_model"
    name = "text"

    embedding = TOKEN_TABLE
    optional_inputs = (("attention_mask", None), ("position_ids", POSITIONS))
    causal: ClassVar[bool] = False

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c = self.config
        return (
            blocks.Embed(self.key(TOKEN_TABLE), (c.vocab_size, c.hidden_size)),
            blocks.GatherAdd("position_ids", self.key(POSITION_TABLE), (c.max_position_embeddings, c.hidden_size)),
        )

    def spec(self, index: int) -> blocks.PreNormLayerSpec:
        c = self.config
        return blocks.PreNormLayerSpec(
            self.key(f"encoder.layers.{index}"), CLIP_KEYS, c.hidden_size, c.num_attention_heads, c.intermediate_size,
            c.layer_norm_eps, c.activation, causal=self.causal, mask_input="attention_mask",
        )  # fmt: skip

    def final_stages(self) -> tuple[blocks.BlockStage, ...]:
        return self.norm("final_layer_norm")

    def pool(self) -> blocks.BlockStage:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """How a family's multimodal checkpoint contains its text model.

    Args:
        outer_type, text_type: `model_type` of the full model and of its text model.
        keys: prefixes of the text model's keys in the checkpoint, mapped to the prefixes of the standalone model.
        defaults: values for fields that a `text_config` leaves out, as in the reference.
        unread_fields: fields of the full config that the text model does not read.
        default_tied: whether the head is the embedding if the full config does not define it.
    """

    outer_type: str
    text_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    unread_fields: tuple[str, ...]
    default_tied: bool

    def extract(self, config: Fields, source: WeightSource) -> tuple[Fields, WeightSource]:
        """Return the config and the weights of the text model, and warn that the vision tower is left out.

        Raises:
            ConfigError: there is no `text_config`. UnsupportedError: a field that is not handled.
        """
        text = config.group("text_config")
        if text is None:
            raise ConfigError(f"{config.where}: field 'text_config' is missing; expected an object")
        kind = text.text("model_type", self.text_type)
        if kind != self.text_type:
            raise UnsupportedError(
                f"{text.where}: model_type {quote(kind)}; the text model of a {self.outer_type} is a {self.text_type}"
            )
        # The outer model has the head.
        head = {"tie_word_embeddings": config.flag("tie_word_embeddings", self.default_tied)}
        finish_model(config, self.unread_fields)
        names = {
            prefix + key.removeprefix(stored_prefix): key
            for key in source.keys() for stored_prefix, prefix in self.keys.items() if key.startswith(stored_prefix)
        }  # fmt: skip
        warnings.warn(
            f"{config.where}: model_type {quote(self.outer_type)} reads images too; only the text model is built, and "
            f"{len(source.keys()) - len(names)} weights of other parts are not read",
            RlxWarning,
            stacklevel=2,
        )
        values = {**self.defaults, "model_type": self.text_type, **dict(text.values), **head}
        return replace(text, values=values, consumed=set()), RenamedSource(source, names)
