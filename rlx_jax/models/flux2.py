"""Define the config and recipe of FLUX.2's denoising transformer (`Flux2Transformer2DModel` of diffusers)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import jax
import numpy as np

from rlx_jax.blocks import BlockStage, Repeat, flux2, stream_id
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ConfigError
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import MAX_LAYERS, Fields, ModelConfig
from rlx_jax.models.hooks import HookedLayers, Recipe
from rlx_jax.trace.emit import Emit, FlowValue

# Prefix of the keys and block paths of each kind of block.
BLOCKS = {"double": "transformer_blocks", "single": "single_transformer_blocks"}


@dataclass(frozen=True)
class Flux2Config(ModelConfig):
    """Sizes of the transformer, with diffusers' field names."""

    in_channels: int = 128
    out_channels: int = 128
    patch_size: int = 1
    num_layers: int = 8
    num_single_layers: int = 48
    attention_head_dim: int = 128
    num_attention_heads: int = 48
    joint_attention_dim: int = 15360
    timestep_guidance_channels: int = 256
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = 2000.0
    eps: float = 1e-6
    guidance_embeds: bool = True

    inert = ("_class_name", "_diffusers_version")

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between blocks."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def read(cls, c: Fields) -> Self:
        sizes: dict[str, Any] = {
            name: c.integer(name, getattr(cls, name), high=MAX_LAYERS if "layers" in name else 2**20)
            for name in (
                "in_channels", "patch_size", "num_layers", "num_single_layers", "attention_head_dim",
                "num_attention_heads", "joint_attention_dim", "timestep_guidance_channels",
            )
        }  # fmt: skip
        spec = cls(
            **sizes,
            out_channels=c.integer_or_null("out_channels", None) or sizes["in_channels"],
            axes_dims_rope=_axes(c),
            **c.with_defaults(cls, "mlp_ratio", "rope_theta", "eps", "guidance_embeds"),
        )
        if sum(spec.axes_dims_rope) != spec.attention_head_dim:
            raise ConfigError(
                f"{c.where}: axes_dims_rope {list(spec.axes_dims_rope)} sum to {sum(spec.axes_dims_rope)}; expected "
                f"attention_head_dim, {spec.attention_head_dim}"
            )
        if int(spec.hidden_size * spec.mlp_ratio) < 1 or spec.timestep_guidance_channels < 2:
            raise ConfigError(f"{c.where}: mlp_ratio or timestep_guidance_channels leave nothing to compute")
        return spec

    def block(self, kind: Any) -> flux2.Flux2BlockSpec:
        """Return the spec of a `double` or a `single` block."""
        ffn = int(self.hidden_size * self.mlp_ratio)
        return flux2.Flux2BlockSpec(
            kind=kind, num_heads=self.num_attention_heads, head_dim=self.attention_head_dim, ffn=ffn, eps=self.eps
        )


def _axes(c: Fields) -> tuple[int, ...]:
    """Return the number of rotated columns for each axis of the positions."""
    default = Flux2Config.axes_dims_rope
    axes = c.items("axes_dims_rope", default, "even numbers", lambda n: type(n) is int and n > 0 and n % 2 == 0)
    if not 0 < len(axes) <= 16:
        raise c.invalid("axes_dims_rope", "1 to 16 even numbers", axes)
    return tuple(axes)


@dataclass(frozen=True)
class Flux2Flow(Recipe[Flux2Config]):
    """The recipe of the transformer. The names of the inputs are diffusers'.

    Inputs: `hidden_states` `[batch, image, in_channels]`, `encoder_hidden_states` `[batch, text, joint_attention_dim]`,
    `timestep` `[batch]` (0 … 1), `img_ids` `[image, axes]` and `txt_ids` `[text, axes]` integers, with an optional
    leading axis of rows (only the first row counts), and `guidance` `[batch]` if the model embeds it. Output: `sample`
    `[batch, image, out_channels · patch_size²]`.

    A layer hook sees double blocks, then single ones, each counted from 0; `ctx.spec.kind` tells them apart.

    Args:
        batch, image, text: sizes to compile for ahead of the first call.
        Others: see `Recipe`.
    """

    name = "flux2"
    image: int | None = None
    text: int | None = None

    @classmethod
    def for_config(cls, config: Flux2Config | Mapping[str, Any]) -> Self:
        """Return the recipe for a config, which may be the content of a `config.json`."""
        return cls.for_prefill(config)

    def spec(self, index: int, kind: str = "double") -> flux2.Flux2BlockSpec:
        """Return the spec of a block."""
        return self.config.block(kind)

    def stage(self, index: int, spec: flux2.Flux2BlockSpec) -> BlockStage:
        """Return the family's block."""
        prefix = f"{BLOCKS[spec.kind]}.{index}"
        return flux2.Flux2DoubleBlock(prefix, spec) if spec.kind == "double" else flux2.Flux2SingleBlock(prefix, spec)

    def _blocks(self, kind: str, count: int) -> Repeat:
        """Return the stage that repeats the blocks of a kind."""
        return Repeat(count, HookedLayers(self.hooks, partial(self.spec, kind=kind), self.stage), BLOCKS[kind])

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        c, h = self.config, self.config.hidden_size
        axes = len(c.axes_dims_rope)
        flow = (
            ModelFlow(self.name, profile=self.hooks.profile)
            .with_weights(self.weights)
            .input("hidden_states", ("batch", "image", c.in_channels))
            .input("encoder_hidden_states", ("batch", "text", c.joint_attention_dim))
            .input("timestep", ("batch",))
            .input("img_ids", ("img_rows", "image", axes), dtype="int32", rows_optional=True)
            .input("txt_ids", ("txt_rows", "text", axes), dtype="int32", rows_optional=True)
        )
        flow = flow.input("guidance", ("batch",)) if c.guidance_embeds else flow
        return (
            flow.bind(batch=self.batch, image=self.image, text=self.text)
            .stage(flux2.Flux2Conditioning(h, c.timestep_guidance_channels, c.guidance_embeds))
            .stage(flux2.Flux2Rope(c.axes_dims_rope, c.rope_theta))
            .custom_named("embedders", partial(embed_streams, hidden=h))
            .stage(*self.hooks.before, self._blocks("double", c.num_layers), flux2.Flux2JoinStreams())
            .stage(self._blocks("single", c.num_single_layers), *self.hooks.after)
            .patch(self.hooks.edit)
            .stage(flux2.Flux2Output(h, c.eps, c.patch_size**2 * c.out_channels))
            .output("sample")
        )  # fmt: skip


def embed_streams(emit: Emit, value: FlowValue, hidden: int) -> FlowValue:
    """Project image and text tokens to the width of the blocks, and store both as streams (`emit.stream`).

    `value` is `hidden_states` `[batch, image tokens, channels]`; the result, `[…, hidden]`, is the image again.

    Weights: `x_embedder.weight`, `context_embedder.weight`.
    """
    roles, text = ("hidden", None), emit.flow_input("encoder_hidden_states")
    image = emit.linear(value, "x_embedder.weight", roles=roles, columns=hidden)
    text = emit.linear(text, "context_embedder.weight", roles=roles, columns=hidden)
    emit.set_stream(stream_id.IMG, image)
    emit.set_stream(stream_id.TXT, text)
    return image


def weight_specs(config: Flux2Config, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every checkpoint key, to compile or `init` without a checkpoint."""
    return declared_shapes(Flux2Flow(config).assemble(), dtype)
