"""Map a checkpoint's `model_type` to its family of recipes, and bind the recipe to the weights.

For a config that no family reads, the nearest family is found by the fields that each of them reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import rlx_jax.models as models
from rlx_jax import plugins
from rlx_jax.compiler.pipeline import prints_fusion
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import jax_settings
from rlx_jax.errors import GraphError, RlxError, UnsupportedError, WeightError, did_you_mean, listing, quote, shown
from rlx_jax.flow import ModelFlow, ModelRecipe
from rlx_jax.io.fields import NULLABLE
from rlx_jax.io.folder import Folder
from rlx_jax.lru import LruCache
from rlx_jax.models.config import (
    INERT,
    INERT_PREFIXES,
    NEUTRAL,
    Fields,
    ModelConfig,
    architecture,
    finish_model,
    read_config,
)
from rlx_jax.models.decoder import CausalFlow
from rlx_jax.models.dual import ClipVisionFlow, DualConfig, DualFlow, tower_group
from rlx_jax.models.encoder import ANSWER, IMAGE, MASKED, SEQUENCE, TOKEN, EncoderFlow, TowerFlow, read_head
from rlx_jax.models.gemma import TEXT as GEMMA_TEXT
from rlx_jax.models.hooks import Recipe, WithIgnored, check_recipe_weights, with_other_weights
from rlx_jax.models.llama import LlamaBidirectionalFlow
from rlx_jax.models.modernbert import ModernBertCausalFlow, ModernBertDecoderFlow
from rlx_jax.models.qwen35 import TEXT as QWEN35_TEXT
from rlx_jax.models.siglip import Siglip2Flow, Siglip2VisionFlow, SiglipVisionFlow
from rlx_jax.models.vision import TextPart, VisionFlow
from rlx_jax.models.vit import TEACHER, BeitFlow, DeiTFlow, Dinov3Flow, IJepaFlow, ViTMsnFlow
from rlx_jax.weights.directory import refuse_without_config
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import description

PAGE = "docs/adding-a-family.md"
# Weight of how similar the names of two model types are, compared with the share of fields that are read.
NAME_WEIGHT = 0.3
# Number of fields that a message has with their values.
MAX_FIELDS = 6
# The value of sizes that the config does not have, so that a family reads the fields after them.
ANY_SIZE = 8


def describe_nearest(
    config: Fields, model_type: str, architecture: str, families: Mapping[str, tuple[type[ModelConfig], Iterable[str]]]
) -> str:
    """Return a sentence about the nearest family: its name, the fields in which it differs, and the page on families.

    Args:
        config: the fields of a config.json.
        model_type, architecture: what the config names.
        families: the class of the config, and the architectures, by `model_type`.
    """
    if isinstance(inner := config.values.get("text_config"), Mapping):
        config = Fields({**inner, **config.values, "text_config": None}, config.where)
    task = architecture.rpartition("For")[2]
    same_task = {n for n, (_, names) in families.items() if any(a.rpartition("For")[2] == task for a in names)}
    types = {n: families[n][0] for n in families if n in same_task or not same_task}
    if not types:
        return f"{PAGE} shows how to add a family"
    candidates = {name: compare(config, config_type) for name, config_type in types.items()}

    def score(name: str) -> float:
        """Return the share of fields in common, plus a part for similar names."""
        similarity = difflib.SequenceMatcher(None, model_type, name).ratio()
        read, *others = map(len, candidates[name])
        return read / max(read + sum(others), 1) + NAME_WEIGHT * similarity

    nearest = max(candidates, key=score)
    read, unread, missing = candidates[nearest]
    text = f"the nearest family is {quote(nearest)}, which reads {len(read)} of its fields"
    if not unread:
        text += "; only the weights or what the layers compute may differ"
    else:
        values = [f"{quote(name)} ({shown(config.values[name])})" for name in unread]
        more = len(values) - MAX_FIELDS
        text += f", and not {', '.join(values[:MAX_FIELDS])}{f' and {more} more' if more > 0 else ''}"
    if missing:
        text += f"; the config does not have {listing(missing, MAX_FIELDS)}"
    return f"{text}; {PAGE} shows how to add a family"


def compare(config: Fields, config_type: type[ModelConfig]) -> tuple[list[str], list[str], list[str]]:
    """Return how near the family is that reads configs of this class.

    Returns:
        The fields of the config that the family reads; those that it does not read and that may change the computation;
        and the sizes that it needs and the config does not have.
    """
    config_class: Any = config_type  # a dataclass in every family
    fields = dataclasses.fields(config_class)
    sizes = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    required = [size for size in sizes if size not in NULLABLE]
    probe = Fields({**dict.fromkeys(required, ANY_SIZE), **config.values}, config.where)
    # A value that the family refuses ends the reading; the fields after it count as not read.
    with contextlib.suppress(RlxError):
        config_type.read(probe)
    prefixed = (field for field in config.values if field.startswith(INERT_PREFIXES))
    unread = probe.unread({*INERT, *config_type.inert, *prefixed}, {**NEUTRAL, **config_type.neutral})
    return (
        [field for field in config.values if field in probe.consumed],
        [field for field in unread if field in config.values],
        [n for n in required if n in probe.consumed and n not in config.values],
    )


ModelKind = Literal[
    "causal", "encoder", "classifier", "token_classifier", "question_answerer", "masked_lm", "denoiser", "vision",
    "image_classifier", "dual",
]  # fmt: skip

# The kind of a model by the task of its head.
KINDS: Mapping[str, ModelKind] = {
    SEQUENCE: "classifier", TOKEN: "token_classifier", ANSWER: "question_answerer", MASKED: "masked_lm",
    IMAGE: "image_classifier", TEACHER: "image_classifier",
}  # fmt: skip


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint as a recipe bound to its weights.

    Attributes:
        recipe: the recipe.
        kind: what the model is for.
        vocab_size: number of token ids; 0 if the model does not read tokens.
        max_positions: the longest sequence in tokens; None without a limit.
        processor_prefix: prefix of the image processor's class, such as `ViT` for `ViTImageProcessor`; empty if the
            model reads no images.
        head_keys: keys of a task's head in the checkpoint, which the recipe does not read.
        ignored_fields: fields of the config that the caller ignored.
        checked: the recipe with checked weights, and its flow, which keeps its graph.
    """

    recipe: ModelRecipe
    kind: ModelKind
    vocab_size: int = 0
    max_positions: int | None = None
    processor_prefix: str = ""
    head_keys: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    checked: tuple[ModelRecipe, ModelFlow] | None = None

    def bound_to(self, source: WeightSource | None) -> Pretrained:
        """Return the same bound to other weights with the same keys and types; with None, to none."""
        assert self.checked is not None
        recipe: Any = self.recipe
        weights = None if source is None else recipe.adapt_weights(source)
        recipe = replace(recipe, weights=weights)
        return replace(self, recipe=recipe, checked=(recipe, with_other_weights(self.checked[1], weights)))


Opener = Callable[..., Pretrained]
# Opened checkpoints that are retained, without their weights.
MAX_OPENED = 8
_opened: LruCache[Hashable, Pretrained] = LruCache(MAX_OPENED)


def opened_once(opener: Opener) -> Opener:
    """Return an opener that makes and builds a recipe once for an equal config and weights of the same names and types.

    Recipes of other packages, and of configs with ignored fields or a warning, are made each time, and so are all if
    fusion reports are printed.
    """

    def open_again(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
        ignored = config.ignored is not None and config.ignored.names
        if ignored or config.values.get("auto_map") is not None or prints_fusion():
            return opener(config, source, headless)
        try:
            content = config.values, headless, description(source), jax_settings()
        except WeightError:  # the build names the block that reads the weight
            return opener(config, source, headless)
        key = opener, hashlib.sha256(repr(content).encode(errors="surrogatepass")).digest()
        pretrained = _opened.get(key)
        if pretrained is not None:
            return pretrained.bound_to(source)
        model = opener(config, source, headless)
        is_own = type(model.recipe).__module__.startswith(f"{__package__}.")
        if is_own and model.checked is not None and model.checked[1]._checked is not None:
            _opened.insert(key, model.bound_to(None))
        return model

    return open_again


@dataclass(frozen=True)
class Family:
    """Support for one `model_type`.

    Attributes:
        open: `open(config, source, headless=False)` makes the recipe for a checkpoint; with `headless`, for the model
            without its head, if it has one.
        architectures: the values of `architectures` that are supported.
        config_type: the class of the config that a checkpoint's config is read as; None if that is only a part of it.
    """

    open: Opener
    architectures: tuple[str, ...]
    config_type: type[ModelConfig] | None = None

    @staticmethod
    def decoder(recipe: type[CausalFlow[Any]], causal: str, bare: str = "") -> Family:
        """Return a decoder-only family.

        Args:
            recipe: its class.
            causal: the architecture with a head.
            bare: the architecture without a head, if there is one.
        """
        stem = (bare or causal).removesuffix("Model").removesuffix("ForCausalLM")
        names = (causal, *([bare] if bare else []), *(f"{stem}For{task}" for task in recipe.heads))
        architectures = tuple(dict.fromkeys(names))

        def opener(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
            name = architecture(config)[1]
            head = None if headless else read_head(config, name, recipe.heads, *recipe.head_token)
            headless = headless or (bool(bare) and name == bare)
            instance = replace(recipe.for_prefill(config), hidden_only=headless or head is not None, head=head)
            return bind_recipe(instance, source, KINDS[head.task] if head else "encoder" if headless else "causal")

        return Family(opened_once(opener), architectures, recipe.config_type)

    @staticmethod
    def of(recipe: type[Recipe[Any]], kind: ModelKind, processor_prefix: str, *architectures: str) -> Family:
        """Return a family of recipes for models of a kind. `processor_prefix`: see `Pretrained`."""

        def opener(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
            return bind_recipe(recipe.for_prefill(config), source, kind, processor_prefix)

        return Family(opened_once(opener), architectures, recipe.config_type)

    @staticmethod
    def encoder(recipe: type[EncoderFlow[Any]], *architectures: str) -> Family:
        """Return a family of text encoders, which may have heads."""
        return Family.tower(recipe, "", *architectures)

    @staticmethod
    def tower(
        recipe: type[TowerFlow[Any]], processor_prefix: str, *architectures: str, config_field: str = ""
    ) -> Family:
        """Return a family of towers, which may have heads.

        Args:
            recipe: its class.
            processor_prefix: see `Pretrained`; empty for text encoders.
            architectures: see `Family`.
            config_field: the field of the config with the tower's config, for classifiers whose config also has a text
                tower, which they do not use; empty if the config is the tower's.
        """

        def opener(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
            if config_field:
                instance = recipe.for_prefill(tower_group(config, config_field))
                finish_model(config, UNUSED_TEXT)
            else:
                instance = recipe.for_prefill(config)
            name, heads = architecture(config)[1], instance.task_heads()
            head = None if headless else read_head(config, name, heads, *recipe.head_token)
            kind = KINDS[head.task] if head else "vision" if processor_prefix else "encoder"
            return bind_recipe(replace(instance, head=head), source, kind, processor_prefix)

        return Family(opened_once(opener), architectures, None if config_field else recipe.config_type)

    @staticmethod
    def dual(recipe: type[DualFlow[Any]], vision: type[VisionFlow[Any]], name: str) -> Family:
        """Return a family with a text tower and an image tower; its classifiers of images have the second one only.

        Args:
            recipe, vision: the classes of both towers and of the image tower.
            name: first part of the architectures, and of the image processor's class.
        """
        classifiers = Family.tower(vision, name, f"{name}ForImageClassification", config_field="vision_config")
        return Family.either(Family.of(recipe, "dual", name, f"{name}Model"), classifiers)

    @staticmethod
    def with_images(part: TextPart, *architectures: str) -> Family:
        """Return a family of decoders that also read images; only its text model is built."""

        def opener(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
            return FAMILIES[part.text_type].open(*part.extract(config, source), headless)

        return Family(opener, architectures)

    @staticmethod
    def either(*families: Family) -> Family:
        """Return several families under one `model_type`: the architecture selects one, by default the first."""

        def opener(config: Fields, source: WeightSource, headless: bool = False) -> Pretrained:
            _, name = architecture(config)
            family = next((f for f in families if name in f.architectures), families[0])
            return family.open(config, source, headless)

        architectures = tuple(name for f in families for name in f.architectures)
        return Family(opener, architectures, families[0].config_type)


def bind_recipe(recipe: Recipe[Any], source: WeightSource, kind: ModelKind, processor_prefix: str = "") -> Pretrained:
    """Return a recipe bound to the weights of a checkpoint, after checking them against its config."""
    recipe = recipe.adapt_to(source)
    bound_recipe = replace(recipe, weights=recipe.adapt_weights(source))
    # Assembled without the weights, so that no stage refers to them.
    flow = recipe.assemble().with_weights(bound_recipe.weights)
    return Pretrained(
        bound_recipe, kind, recipe.vocab_size, recipe.max_positions, processor_prefix, recipe.task_head_keys(source),
        checked=(bound_recipe, check_recipe_weights(flow, recipe)),
    )  # fmt: skip


TASKS = ("MaskedLM", "SequenceClassification", "MultipleChoice", "TokenClassification", "QuestionAnswering")


def task_architectures(name: str, *others: str) -> tuple[str, ...]:
    """Return the architectures of an encoder: the bare model, one for each of `TASKS`, and one for each of `others`."""
    return (f"{name}Model", *(f"{name}For{task}" for task in (*TASKS, *others)))


# Fields of a config with two towers that a classifier of images does not use.
UNUSED_TEXT = ("text_config", "text_config_dict", "projection_dim", *DualConfig.inert)
VIT = ("Model", "ForImageClassification", "ForMaskedImageModeling")
DINOV2 = ("Model", "ForImageClassification", "Backbone")

# The families by `model_type`; models of diffusers by class name. Installed plugins may add others under new names.
FAMILIES: dict[str, Family] = {
    "llama": Family.decoder(models.Llama32Flow, "LlamaForCausalLM", "LlamaModel"),
    "mistral": Family.decoder(models.MistralFlow, "MistralForCausalLM", "MistralModel"),
    "mixtral": Family.decoder(models.MixtralFlow, "MixtralForCausalLM", "MixtralModel"),
    "qwen2": Family.decoder(models.Qwen2Flow, "Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": Family.decoder(models.Qwen3Flow, "Qwen3ForCausalLM", "Qwen3Model"),
    "qwen3_moe": Family.decoder(models.Qwen3MoeFlow, "Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    "qwen3_5_text": Family.decoder(models.Qwen35Flow, "Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    "qwen3_5": Family.with_images(QWEN35_TEXT, "Qwen3_5ForConditionalGeneration"),
    "gemma": Family.decoder(models.GemmaFlow, "GemmaForCausalLM", "GemmaModel"),
    "gemma2": Family.decoder(models.GemmaFlow, "Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": Family.decoder(models.GemmaFlow, "Gemma3ForCausalLM", "Gemma3TextModel"),
    "gemma3": Family.with_images(GEMMA_TEXT, "Gemma3ForConditionalGeneration"),
    "mamba2": Family.decoder(models.Mamba2Flow, "Mamba2ForCausalLM", "Mamba2Model"),
    "gpt_oss": Family.decoder(models.GptOssFlow, "GptOssForCausalLM", "GptOssModel"),
    "gpt2": Family.decoder(models.Gpt2Flow, "GPT2LMHeadModel", "GPT2Model"),
    "llama_bidirec": Family.decoder(LlamaBidirectionalFlow, "LlamaBidirectionalModel", "LlamaBidirectionalModel"),
    "bert": Family.encoder(
        models.BertFlow, *task_architectures("Bert", "PreTraining", "NextSentencePrediction"), "HF_ColBERT"
    ),
    "roberta": Family.encoder(models.RobertaFlow, *task_architectures("Roberta")),
    "xlm-roberta": Family.encoder(models.RobertaFlow, *task_architectures("XLMRoberta")),
    "camembert": Family.encoder(models.RobertaFlow, *task_architectures("Camembert")),
    "distilbert": Family.encoder(models.DistilBertFlow, *task_architectures("DistilBert")),
    "electra": Family.encoder(models.ElectraFlow, *task_architectures("Electra", "PreTraining")),
    "albert": Family.encoder(models.AlbertFlow, *task_architectures("Albert", "PreTraining")),
    "mpnet": Family.encoder(models.MPNetFlow, *task_architectures("MPNet")),
    "modernbert": Family.encoder(models.ModernBertFlow, *task_architectures("ModernBert")),
    "modernbert-decoder": Family.either(
        Family.encoder(ModernBertDecoderFlow, "ModernBertDecoderModel", "ModernBertDecoderForSequenceClassification"),
        Family.decoder(ModernBertCausalFlow, "ModernBertDecoderForCausalLM"),
    ),
    "deberta": Family.encoder(models.DebertaFlow, *task_architectures("Deberta")),
    "deberta-v2": Family.encoder(models.DebertaV2Flow, *task_architectures("DebertaV2")),
    "gte": Family.encoder(models.GteFlow, *task_architectures("Gte"), *task_architectures("New")),
    "new": Family.encoder(models.GteFlow, *task_architectures("New")),
    "jina_embeddings_v3": Family.encoder(models.JinaV3Flow, *task_architectures("JinaEmbeddingsV3")),
    "eurobert": Family.encoder(models.EuroBertFlow, *task_architectures("EuroBert")),
    "data2vec-text": Family.encoder(models.Data2VecTextFlow, *task_architectures("Data2VecText")),
    "roberta-prelayernorm": Family.encoder(models.RobertaPreLayerNormFlow, *task_architectures("RobertaPreLayerNorm")),
    "xlm-roberta-xl": Family.encoder(models.XlmRobertaXlFlow, *task_architectures("XLMRobertaXL")),
    "megatron-bert": Family.encoder(
        models.MegatronBertFlow, *task_architectures("MegatronBert", "PreTraining", "NextSentencePrediction")
    ),
    "big_bird": Family.encoder(models.BigBirdFlow, *task_architectures("BigBird", "PreTraining")),
    "ibert": Family.encoder(models.IBertFlow, *task_architectures("IBert")),
    "ernie": Family.encoder(models.ErnieFlow, *task_architectures("Ernie", "PreTraining", "NextSentencePrediction")),
    "rembert": Family.encoder(models.RemBertFlow, *task_architectures("RemBert")),
    "roformer": Family.encoder(models.RoFormerFlow, *task_architectures("RoFormer")),
    "esm": Family.encoder(models.EsmFlow, *task_architectures("Esm")),
    "nomic_bert": Family.either(
        Family.encoder(models.NomicFlow, *task_architectures("NomicBert", "PreTraining")),
        Family.tower(models.NomicVisionFlow, "CLIP", "NomicVisionModel"),
    ),
    "vit": Family.tower(models.ViTFlow, "ViT", *(f"ViT{end}" for end in VIT)),
    "deit": Family.tower(DeiTFlow, "DeiT", *(f"DeiT{end}" for end in VIT), f"DeiTFor{TEACHER}"),
    "ijepa": Family.tower(IJepaFlow, "ViT", "IJepaModel", "IJepaForImageClassification"),
    "vit_msn": Family.tower(ViTMsnFlow, "ViT", "ViTMSNModel", "ViTMSNForImageClassification"),
    "beit": Family.tower(BeitFlow, "Beit", *(f"Beit{end}" for end in VIT)),
    "data2vec-vision": Family.tower(BeitFlow, "Beit", "Data2VecVisionModel", "Data2VecVisionForImageClassification"),
    "dinov2": Family.tower(models.Dinov2Flow, "Bit", *(f"Dinov2{end}" for end in DINOV2)),
    "dinov2_with_registers": Family.tower(models.Dinov2Flow, "Bit", *(f"Dinov2WithRegisters{end}" for end in DINOV2)),
    "dinov3_vit": Family.tower(Dinov3Flow, "DINOv3ViT", "DINOv3ViTModel", "DINOv3ViTBackbone"),
    "clip": Family.dual(models.ClipFlow, ClipVisionFlow, "CLIP"),
    "clip_text_model": Family.encoder(models.ClipTextFlow, "CLIPTextModel", "CLIPTextModelWithProjection"),
    "clip_vision_model": Family.tower(ClipVisionFlow, "CLIP", "CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "metaclip_2": Family.tower(ClipVisionFlow, "CLIP", "MetaClip2ForImageClassification", config_field="vision_config"),
    "siglip": Family.dual(models.SiglipFlow, SiglipVisionFlow, "Siglip"),
    "siglip_text_model": Family.encoder(models.SiglipTextFlow, "SiglipTextModel"),
    "siglip_vision_model": Family.tower(SiglipVisionFlow, "Siglip", "SiglipVisionModel"),
    "siglip2": Family.dual(Siglip2Flow, Siglip2VisionFlow, "Siglip2"),
    "siglip2_text_model": Family.encoder(models.SiglipTextFlow, "Siglip2TextModel"),
    "siglip2_vision_model": Family.tower(Siglip2VisionFlow, "Siglip2", "Siglip2VisionModel"),
    "Flux2Transformer2DModel": Family.of(models.Flux2Flow, "denoiser", "", "Flux2Transformer2DModel"),
}


def _plugin_families() -> Mapping[str, plugins.FamilyHandler]:
    """Return the families of plugins.

    Raises:
        GraphError: a plugin redefines a family of the package.
    """
    families = plugins.active_plugin().families
    if duplicates := sorted(families.keys() & FAMILIES.keys()):
        raise GraphError(f"plugins define {listing(duplicates)}, which rlx_jax already has: see rlx_jax.plugins")
    return families


def family_of(
    folder: Folder, ignore_fields: Iterable[str] = (), headless: bool = False
) -> tuple[Fields, Family | plugins.FamilyHandler]:
    """Return the config of a checkpoint, and the family that it names.

    Args:
        folder: the checkpoint.
        ignore_fields: see `read_config`.
        headless: open a causal model without its head, if the family can.

    Raises:
        UnsupportedError: the family is not built; or the directory is of another kind, such as GGUF files.
        ConfigError: config.json is malformed. MissingFileError: there is none.
    """
    refuse_without_config(folder)
    config = read_config(folder, ignore_fields)
    kind, name = architecture(config)
    family = FAMILIES.get(kind) or _plugin_families().get(kind)
    if family is None:
        detail = f" ({quote(name)})" if name else ""
        names = [*FAMILIES, *_plugin_families()]
        configs = {n: (f.config_type, f.architectures) for n, f in FAMILIES.items() if f.config_type is not None}
        raise UnsupportedError(
            f"{config.where}: model_type {quote(kind)}{detail} is not built; "
            f"{describe_nearest(config, kind, name, configs)}; known are {', '.join(names)}{did_you_mean(kind, names)}"
        )
    if name and name not in family.architectures:
        supported = ", ".join(family.architectures)
        raise UnsupportedError(
            f"{config.where}: architecture {quote(name)} is not built; supported: {supported}"
            f"{did_you_mean(name, family.architectures)}; {PAGE} shows how to add one"
        )
    if headless and isinstance(family, Family):
        family = replace(family, open=partial(family.open, headless=True))
    return config, family


def open_pretrained(
    folder: Folder, config: Fields, family: Family | plugins.FamilyHandler, source: WeightSource
) -> Pretrained:
    """Return the recipe of a family for a config, bound to weights.

    Raises:
        MissingWeightError, WeightShapeError: the weights contradict the config. Others as `family_of`.
    """
    try:
        model: Pretrained = family.open(config, source)
    except WeightError as error:
        error.locate(quote(folder.path))
        raise
    if config.ignored is None or not config.ignored.names:
        return model
    config.ignored.check_applied(config.where)
    names = config.ignored.names
    return replace(model, recipe=record_ignored(model.recipe, names), ignored_fields=names)


def record_ignored(recipe: Any, names: tuple[str, ...]) -> Any:
    """Return a recipe whose models report these ignored fields.

    A recipe of a plugin without hooks is returned unchanged.
    """
    edit = WithIgnored(names)
    if not names or not hasattr(recipe, "hooks") or edit in recipe.hooks.edits:
        return recipe
    return recipe.patch_flow(edit)
