"""Read a Hugging Face `config.json` field by field, and refuse what is left over.

A field that changes the computation and that nothing reads would give wrong numbers in silence, so every field is
either read by the family, or known to have no part in the forward computation (`INERT`), or refused by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, TypedDict

from rlx_jax.errors import ConfigError, GraphError, LimitError, RlxWarning, UnsupportedError, did_you_mean, quote, shown
from rlx_jax.io.folder import CONFIG, Folder

MAX_LAYERS = 1024
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**24

INERT = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures attention_dropout
    attention_probs_dropout_prob attn_implementation bos_token_id classifier_dropout directionality
    dtype embd_pdrop eos_token_id finetuning_task gradient_checkpointing hidden_dropout_prob id2label
    initializer_factor initializer_range is_encoder_decoder label2id language max_length min_length model_type
    num_labels output_attentions output_hidden_states output_past pad_token_id pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type
    resid_pdrop return_dict sep_token_id task_specific_params tokenizer_class torch_dtype
    transformers_version transformers.js_config unsloth_fixed unsloth_version use_cache use_return_dict
    """.split()
)
"""Fields without a part in the forward computation at inference."""

NULLABLE = frozenset({"head_dim", "num_key_value_heads", "rope_theta"})
"""Sizes that a config may give as null, for the default."""

# Fields of every config that are harmless at one value and change the computation at others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "layer_types": (None,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "torchscript": (False,),
    "use_bfloat16": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


@dataclass
class Fields:
    """A config that remembers which of its fields were read."""

    values: Mapping[str, Any]
    where: str
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ConfigError(
                f"{self.where}: expected the content of config.json, a mapping, as to_dict() of transformers' "
                f"configurations; got {shown(self.values)}"
            )

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is; an absent field and null are the default."""
        self.seen.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def _given(self, name: str, default: Any) -> Any:
        """As `raw`, but null is only a value where the reference writes it."""
        if name in self.values and self.values[name] is None and name not in NULLABLE:
            raise ConfigError(f"{self.where}: field {quote(name)} is null; expected a value")
        return self.raw(name, default)

    def _near(self, name: str) -> str:
        """A field that nobody asked for, if it may be a misspelt `name`."""
        return did_you_mean(name, [str(k) for k in self.values if k not in self.seen], alike=0.85)

    def whole(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer in `[low, high]`."""
        value = self._given(name, default)
        if value is None:
            raise ConfigError(f"{self.where}: field {quote(name)} is missing; expected an integer{self._near(name)}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected an integer")
        if value < low:
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected at least {low}")
        if value > high:
            raise LimitError(f"{self.where}: field {quote(name)} is {quote(value)}; the limit is {high}")
        return value

    def whole_or_null(self, name: str, default: int | None, high: int = MAX_WIDTH) -> int | None:
        """An integer in `[1, high]`, or None for null; an absent field is the default."""
        null = self.values[name] is None if name in self.values else default is None
        self.seen.add(name)
        return None if null else self.whole(name, default, high=high)

    def pair(self, name: str, default: int | None = None, high: int = 2**16) -> tuple[int, int]:
        """Height and width: one integer in `[1, high]` for both, or a list of two."""
        value = self._given(name, default)
        if not isinstance(value, list | tuple):
            side = self.whole(name, default, high=high)
            return side, side
        if len(value) != 2:
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected one integer or two")
        height, width = (Fields({name: side}, self.where).whole(name, high=high) for side in value)
        return height, width

    def real(self, name: str, default: float | None = None, low: float = 0.0, above: bool = True) -> float:
        """A finite number over `low`, or from `low` on if not `above`."""
        value = self._given(name, default)
        if value is None:
            raise ConfigError(f"{self.where}: field {quote(name)} is missing; expected a number{self._near(name)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected a finite number")
        if value < low or (above and value == low):
            raise ConfigError(
                f"{self.where}: field {quote(name)} is {value}; expected {'over' if above else '≥'} {low}"
            )
        return float(value)

    def real_or_null(self, name: str, default: float | None) -> float | None:
        """A finite number over 0, or None for null; an absent field is the default."""
        null = self.values[name] is None if name in self.values else default is None
        self.seen.add(name)
        return None if null else self.real(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._given(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected a string")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """One of `choices`, mapped.

        Raises:
            UnsupportedError: another string.
        """
        value = self.text(name, default)
        if value not in choices:
            raise UnsupportedError(
                f"{self.where}: field {quote(name)} is {quote(value)}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def group(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: field {quote(name)} is {quote(value)}; expected an object")
        return Fields(value, f"{self.where}, {name}")

    def finish(self, inert: Iterable[str] = (), only: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse every field that was not read and is not known to be harmless: the family's `inert` ones, and its
        `only` at some values.

        Raises:
            UnsupportedError: names the field and its value.
        """
        if self.raw("auto_map") is not None:
            warnings.warn(
                f"{self.where}: auto_map is ignored, code of a checkpoint is never run", RlxWarning, stacklevel=2
            )
        harmless, neutral = INERT | set(inert), NEUTRAL | dict(only or {})
        for name, value in self.values.items():
            if name in self.seen or name in harmless:
                continue
            if any(value == v and type(value) is type(v) for v in neutral.get(name, ())):
                continue
            advice = ": take the checkpoint that is not quantised" if name == "quantization_config" else ""
            raise UnsupportedError(
                f"{self.where}: field {quote(name)} is {quote(value)}; it may change the computation and is not "
                f"handled{advice}"
            )


class ModelConfig:
    """Sizes of a model as its `config.json` has them. A family's config is a frozen dataclass of this kind, which reads
    its own fields; `inert` are those that have no part in its computation, `only` those that have none at some values.
    """

    inert: ClassVar[tuple[str, ...]] = ()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        """The family's fields. What nobody reads is refused afterwards, unless it is known to be harmless."""
        raise NotImplementedError

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self:
        """From `config.json`, as it was read or as a mapping.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        made = cls.read(c)
        c.finish(cls.inert, cls.only)
        return made


# -- fields that families have in common -------------------------------------------------------

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "hardswish": "hard_silu",
    "mish": "mish",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu6": "relu6",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Hugging Face's names of activations, and ours."""


def width_and_heads(
    c: Fields, hidden: int = 768, heads: int = 12, names: tuple[str, str] = ("hidden_size", "num_attention_heads")
) -> tuple[int, int]:
    """The hidden width and the number of heads, which divides it; `hidden` and `heads` are the family's defaults.

    Raises:
        ConfigError, LimitError: a value is absurd.
    """
    width, number = c.whole(names[0], hidden), c.whole(names[1], heads, high=2**16)
    if width % number:
        raise ConfigError(f"{c.where}: {names[0]} {width} is not a multiple of {names[1]} {number}")
    return width, number


class TowerFields(TypedDict):
    """The fields of every stack of BERT's or ViT's layers."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    activation: str


def tower_fields(
    c: Fields, hidden: int = 768, heads: int = 12, activation: str = "gelu", eps: float = 1e-6
) -> TowerFields:
    """These fields; the keywords are the family's defaults.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: an activation that is not handled.
    """
    width, number = width_and_heads(c, hidden, heads)
    return TowerFields(
        hidden_size=width,
        num_hidden_layers=c.whole("num_hidden_layers", 12, high=MAX_LAYERS),
        num_attention_heads=number,
        layer_norm_eps=c.real("layer_norm_eps", eps),
        activation=c.choice("hidden_act", activation, ACTIVATIONS),
    )


class TextFields(TowerFields):
    """Those of a stack that reads tokens."""

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int


def text_fields(
    c: Fields, vocab: int, positions: int = 512, inner: int = 3072, eps: float = 1e-12, **tower: Any
) -> TextFields:
    """These fields; the keywords are the family's defaults, `tower` those of `tower_fields`.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: an activation that is not handled.
    """
    return TextFields(
        **tower_fields(c, eps=eps, **tower),
        vocab_size=c.whole("vocab_size", vocab, high=MAX_VOCABULARY),
        intermediate_size=c.whole("intermediate_size", inner),
        max_position_embeddings=c.whole("max_position_embeddings", positions),
    )


# -- files -------------------------------------------------------------------------------------


def check_recipe(recipe: Any) -> None:
    """The fields of a recipe are of their kinds: its config, and what is true or false.

    Raises:
        ConfigError: the config is not of the family's class. GraphError: an option is no bool.
    """
    name, config = type(recipe).__name__, recipe.config
    if not isinstance(config, recipe.config_type):
        raise ConfigError(
            f"{name}: config is {shown(config)}; expected a {recipe.config_type.__name__}: rlx_jax.recipe_for(path) "
            f"reads it from a checkpoint, {name}.for_prefill(mapping) from the content of a config.json"
        )
    for option in fields(recipe):
        value = getattr(recipe, option.name)
        if isinstance(option.default, bool) and not isinstance(value, bool):
            raise GraphError(f"{name}: {option.name} is {shown(value)}; expected True or False")


def read_config(folder: Folder) -> Fields:
    """`config.json` of a model directory.

    Raises:
        ConfigError: not one strict JSON object. MissingFileError: there is none.
    """
    return Fields(folder.needed(CONFIG), folder.where(CONFIG))


def architecture(config: Fields) -> tuple[str, str]:
    """`model_type` and the first of `architectures` ("" if the config names none); what diffusers writes has
    `_class_name`, which is both."""
    if "model_type" not in config.values and "_class_name" in config.values:
        return (config.text("_class_name"),) * 2
    if "model_type" not in config.values:
        raise ConfigError(f"{config.where}: field 'model_type' is missing; expected the name of a family")
    kind = config.text("model_type", "")
    names = config.raw("architectures", [])
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{config.where}: field 'architectures' is {quote(names)}; expected a list of strings")
    return kind, names[0] if names else ""
