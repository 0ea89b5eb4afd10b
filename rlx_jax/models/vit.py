"""Define the config and recipe of ViT (Dosovitskiy et al. 2020), with Hugging Face's keys, and of the families that
differ from it in tokens or pooling: DeiT, I-JEPA and ViT-MSN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from rlx_jax.blocks import BlockStage, Linear
from rlx_jax.blocks.vision import VIT_KEYS
from rlx_jax.models.heads import IMAGE, IMAGE_HEADS, HeadLayer, TaskHead
from rlx_jax.models.vision import PatchMean, VisionConfig, VisionFlow, VisionLayout
from rlx_jax.trace.emit import Emit, FlowValue

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


@dataclass(frozen=True)
class ViTConfig(VisionConfig):
    """Sizes of a ViT. Its tanh pooler is not built."""

    defaults = {"eps": 1e-12}
    fields = {"qkv_bias": "qkv_bias"}
    inert = ("encoder_stride", "pooler_act", "pooler_output_size")


@dataclass(frozen=True)
class ViTFlow(VisionFlow[ViTConfig]):
    """The recipe of ViT: see `VisionFlow`. `pooled` is the class token after the last norm, before any pooler."""

    layout: VisionLayout = HF
    name: str = "vit"

    config_type = ViTConfig
    prefixes = ("", "vit.")
    peft_names = (
        *((f"{LAYER}.attention.attention.{name}", f"layers.{{}}.attention.{name[0]}_proj") for name in PROJECTIONS),
        (f"{LAYER}.attention.output.dense", "layers.{}.attention.o_proj"),
        (f"{LAYER}.intermediate.dense", "layers.{}.mlp.fc1"),
        (f"{LAYER}.output.dense", "layers.{}.mlp.fc2"),
    )
    layouts: ClassVar[tuple[VisionLayout, ...]] = (HF,)


# -- families with other tokens or pooling -----------------------------------------------------

DEIT = replace(
    HF,
    distillation="embeddings.distillation_token",
    head_prefixes=(*HF.head_prefixes, "cls_classifier.", "distillation_classifier."),
)
TEACHER = f"{IMAGE}WithTeacher"


@dataclass(frozen=True)
class DeiTFlow(ViTFlow):
    """The recipe of DeiT (Touvron et al. 2020): ViT with a distillation token after the class token.

    The head of `DeiTForImageClassificationWithTeacher` is the mean of two classifiers, one for each token.
    """

    layout: VisionLayout = DEIT
    name: str = "deit"

    prefixes = ("", "deit.")
    layouts = (DEIT,)
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
    name: str = "ijepa"

    prefixes = ("", "ijepa.")
    layouts = (IJEPA,)

    def pool(self) -> BlockStage:
        return PatchMean()

    def head_input(self) -> tuple[BlockStage, int]:
        return PatchMean(), self.config.hidden_size


# transformers 5 writes the layers of a classifier without the prefix of the other weights.
MSN = replace(HF, patch=f"vit.{HF.patch}", position=f"vit.{HF.position}", cls=f"vit.{HF.cls}", after=f"vit.{HF.after}")


@dataclass(frozen=True)
class ViTMsnConfig(ViTConfig):
    """Sizes of a ViT-MSN."""

    defaults = {}


@dataclass(frozen=True)
class ViTMsnFlow(ViTFlow):
    """The recipe of ViT-MSN (Assran et al. 2022): ViT with another epsilon by default."""

    name: str = "vit_msn"

    config_type = ViTMsnConfig
    layouts = (HF, MSN)
