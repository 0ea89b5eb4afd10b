"""Read a Hugging Face `config.json` field by field, and refuse fields that nothing reads.

A field that changes the computation but is not read would silently give wrong numbers. So every field is either read by
the family, or known not to affect the forward pass (`INERT`), or refused by name, unless the caller names it in
`ignore_fields`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax.errors import (
    ConfigError,
    LimitError,
    RequestError,
    RlxWarning,
    UnsupportedError,
    did_you_mean,
    listing,
    quote,
    shown,
)
from rlx_jax.io.folder import CONFIG, Folder
from rlx_jax.models.known_fields import IGNORE_OPTION, INERT, INERT_PREFIXES, NEUTRAL, NULLABLE, IgnoredFields
from rlx_jax.weights.quantized_config import read_quantization

T = TypeVar("T")

# Sanity limits, so that a malformed config does not make the process allocate or trace without bound.
MAX_LAYERS = 1024
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**24

LOG = logging.getLogger("rlx_jax")


@dataclass
class Fields:
    """A config that records which of its fields were read.

    Attributes:
        values: the content of the JSON object.
        where: file and group, for messages.
        consumed: names of the fields that were read.
        ignored: the caller's `ignore_fields`; None if these fields are not from the config.json that is being loaded.
        prefix: prefix of the full names of the fields in a nested object, such as `text_config.`.
    """

    values: Mapping[str, Any]
    where: str
    consumed: set[str] = field(default_factory=set)
    ignored: IgnoredFields | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ConfigError(
                f"{self.where}: expected the content of config.json, a mapping, as to_dict() of transformers' "
                f"configurations; got {shown(self.values)}"
            )

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value without a check; for a missing field and for null, the default."""
        self.consumed.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def _get_value(self, name: str, default: Any, kind: str) -> Any:
        """Return the value or the default, and refuse null and a missing field without a default.

        Null is accepted only for the `NULLABLE` fields, which the reference itself writes as null.
        """
        if name in self.values and self.values[name] is None and name not in NULLABLE:
            raise self.invalid(name, "a value", "null")
        value = self.raw(name, default)
        if value is None:
            suggestion = did_you_mean(name, [str(k) for k in self.values if k not in self.consumed], cutoff=0.85)
            raise ConfigError(f"{self.where}: field {quote(name)} is missing; expected {kind}{suggestion}")
        return value

    def invalid(self, name: str, expected: str, value: Any) -> ConfigError:
        """Return the error for a field with an unexpected value."""
        text = value if value == "null" else quote(value)
        return ConfigError(f"{self.where}: field {quote(name)} is {text}; expected {expected}")

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """Return an integer in `[low, high]`."""
        value = self._get_value(name, default, "an integer")
        # bool is a subclass of int in Python, but true is not a number in a config.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(name, "an integer", value)
        if value < low:
            raise self.invalid(name, f"at least {low}", value)
        if value > high:
            raise LimitError(f"{self.where}: field {quote(name)} is {quote(value)}; the limit is {high}")
        return value

    def integer_or_null(self, name: str, default: int | None, high: int = MAX_WIDTH) -> int | None:
        """Return an integer in `[1, high]`, or None for null; the default for a missing field."""
        return None if self._is_null(name, default) else self.integer(name, default, high=high)

    def pair(self, name: str, default: int | None = None, high: int = 2**16) -> tuple[int, int]:
        """Return height and width: one integer in `[1, high]` for both, or a list of two."""
        value = self._get_value(name, default, "an integer")
        if not isinstance(value, list | tuple):
            side = self.integer(name, default, high=high)
            return side, side
        if len(value) != 2:
            raise self.invalid(name, "one integer or two", value)
        height, width = (Fields({name: side}, self.where).integer(name, high=high) for side in value)
        return height, width

    def real(self, name: str, default: float | None = None, low: float = 0.0, exclusive: bool = True) -> float:
        """Return a finite number greater than `low`, or at least `low` if not `exclusive`."""
        value = self._get_value(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.invalid(name, "a finite number", value)
        if value < low or (exclusive and value == low):
            raise self.invalid(name, f"{'over' if exclusive else '≥'} {low}", value)
        return float(value)

    def real_or_null(self, name: str, default: float | None) -> float | None:
        """Return a finite number over 0, or None for null; the default for a missing field."""
        return None if self._is_null(name, default) else self.real(name, default)

    def _is_null(self, name: str, default: Any) -> bool:
        """Return whether a field is null, or is missing and has no default."""
        self.consumed.add(name)
        return self.values.get(name, default) is None

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get_value(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false", value)
        return value

    def with_defaults(self, config: type[Any], *names: str, **fields: str) -> dict[str, Any]:
        """Return attributes of a config class, each read with the type (bool, int or float) and value of its default.

        A field has the name of its attribute, or the name that `fields` gives it.
        """
        readers: dict[type, Callable[..., Any]] = {bool: self.flag, int: self.integer, float: self.real}
        attributes = {**{name: name for name in names}, **fields}
        return {n: readers[type(getattr(config, n))](field, getattr(config, n)) for n, field in attributes.items()}

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get_value(name, default, "a string")
        if not isinstance(value, str):
            raise self.invalid(name, "a string", value)
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """Return the value that `choices` maps a string to.

        Raises:
            UnsupportedError: the string is not among the choices.
        """
        value = self.text(name, default)
        if value not in choices:
            raise UnsupportedError(
                f"{self.where}: field {quote(name)} is {quote(value)}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def items(
        self, name: str, default: Sequence[Any], what: str, fits: Callable[[Any], bool], count: int | None = None
    ) -> list[Any]:
        """Return a list of items that all satisfy `fits`.

        Args:
            name: the field.
            default: value for a missing field.
            what: description of the items, for messages.
            fits: predicate of an item.
            count: required length; None: any.
        """
        values = self.raw(name, default)
        is_list = isinstance(values, list | tuple) and count in (None, len(values))
        if not is_list or not all(map(fits, values)):
            raise self.invalid(name, f"a list of {what}", values)
        return list(values)

    def kinds(self, name: str, default: Sequence[str], choices: Mapping[str, T]) -> tuple[T, ...]:
        """Return a list with one entry per layer, each mapped by `choices`; it has the length of the default.

        Raises:
            UnsupportedError: an entry is not among the choices.
        """
        count = len(default)
        kinds = self.items(name, default, f"{count}, one a layer", lambda kind: True, count)
        for kind in kinds:
            if kind not in list(choices):  # a list, because an entry may be unhashable
                raise UnsupportedError(
                    f"{self.where}: field {quote(name)} has {quote(kind)}; supported are {', '.join(choices)}"
                )
        return tuple(choices[kind] for kind in kinds)

    def group(self, name: str) -> Fields | None:
        """Return the fields of a nested object; None if it is missing or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "an object", value)
        return Fields(value, f"{self.where}, {name}", ignored=self.ignored, prefix=f"{self.prefix}{name}.")

    def finish_model(self, inert: Iterable[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse unread fields of a model's own config, where `INERT` and `NEUTRAL` fields are harmless too; see
        `finish`.

        Raises:
            UnsupportedError: names the fields.
        """
        if self.raw("auto_map") is not None:
            warnings.warn(
                f"{self.where}: auto_map is ignored, code of a checkpoint is never run", RlxWarning, stacklevel=2
            )
        if read_quantization(self.values, self.where) is not None:  # its weights are read packed
            self.consumed |= {"quantization_config", "quantization"}
        harmless = {*INERT, *inert, *(name for name in self.values if name.startswith(INERT_PREFIXES))}
        self.finish(harmless | self._without_window(), NEUTRAL | dict(neutral or {}))

    def _without_window(self) -> set[str]:
        """Return the names of sliding-window fields that are harmless because no layer has a window."""
        # A family that reads sliding_window but has no use_sliding_window applies the window in any case.
        always_slides = "sliding_window" in self.consumed and "use_sliding_window" not in self.consumed
        is_off = self.values.get("use_sliding_window") is False and not always_slides
        if not is_off and self.values.get("sliding_window") is not None:
            return set()
        kinds, layers = self.values.get("layer_types"), self.values.get("num_hidden_layers")
        all_full = isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)
        return {"max_window_layers", "sliding_window"} | ({"layer_types"} if all_full else set())

    def finish(self, inert: Iterable[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Refuse every field that was not read and is not known to be harmless. Null is always harmless.

        Args:
            inert: names of fields that are harmless at any value.
            neutral: fields that are harmless at some values.

        Raises:
            UnsupportedError: names the fields.
        """
        refused = self.unread(set(inert), neutral or {})
        skipped = [name for name in self.values if name not in self.consumed and name not in refused]
        if self.ignored is not None:
            ignored = [name for name in refused if f"{self.prefix}{name}" in self.ignored.names]
            self.ignored.applied += [f"{self.prefix}{name}" for name in ignored]
            refused = [name for name in refused if name not in ignored]
        if refused:
            raise UnsupportedError(self._refusal(refused))
        if skipped:
            LOG.debug("%s: fields without a part in the forward pass: %s", self.where, ", ".join(map(quote, skipped)))

    def unread(self, inert: set[str], neutral: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Return the fields that were not read and may change the computation. Arguments as in `finish`."""

        def is_harmless(name: str, value: Any) -> bool:  # the type counts because 1 == True in Python
            return (
                value is None
                or name in inert
                or any((value, type(value)) == (v, type(v)) for v in neutral.get(name, ()))
            )

        return [n for n, value in self.values.items() if n not in self.consumed and not is_harmless(n, value)]

    def _refusal(self, names: Sequence[str]) -> str:
        """Return the message about fields that nothing reads."""
        key, *others = names
        others_text = f"; nor {'is' if len(others) == 1 else 'are'} {listing(others)}" if others else ""
        text = (
            f"{self.where}: field {quote(key)} is {quote(self.values[key])}; it may change the computation and is "
            f"not handled{others_text}{did_you_mean(key, self.consumed - self.values.keys(), cutoff=0.85)}"
        )
        name = f"{self.prefix}{key}"
        return (
            text
            if self.ignored is None
            else f"{text}; if it does not change the forward pass: {IGNORE_OPTION}=[{name!r}]"
        )


class ModelConfig:
    """Sizes of a model, as its `config.json` defines them.

    A family's config is a frozen subclass that reads its own fields. `inert` names fields that do not affect its
    computation, `neutral` fields that do not at some values.
    """

    inert: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        """Return the config from the family's fields. The caller refuses unread fields afterwards."""
        raise NotImplementedError

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self:
        """Return the config for a `config.json`, given as fields or as a mapping.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        result = cls.read(c)
        c.finish_model(cls.inert, cls.neutral)
        return result

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return a config of this class unchanged, or `from_hf` of the content of a `config.json`."""
        return config if isinstance(config, cls) else cls.from_hf(config)


class LayeredConfig(ModelConfig):
    """The config of a stack of layers, with Hugging Face's field names like all its subclasses."""

    num_hidden_layers: int
    hidden_size: int


class TokenConfig(LayeredConfig):
    """The config of a model that reads tokens."""

    vocab_size: int
    max_position_embeddings: int


class CausalConfig(TokenConfig):
    """The config of a causal model."""

    tie_word_embeddings: bool


# -- fields that families have in common -------------------------------------------------------

# Hugging Face's names of activations, mapped to the names in `rlx_jax.blocks`.
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


def width_and_heads(
    c: Fields, hidden: int = 768, heads: int = 12, names: tuple[str, str] = ("hidden_size", "num_attention_heads")
) -> tuple[int, int]:
    """Return the hidden width and the number of heads, which divides it.

    Args:
        c: the config.
        hidden, heads: the family's defaults.
        names: the two fields.

    Raises:
        ConfigError, LimitError: a value is absurd.
    """
    width, number = c.integer(names[0], hidden), c.integer(names[1], heads, high=2**16)
    if width % number:
        raise ConfigError(f"{c.where}: {names[0]} {width} is not a multiple of {names[1]} {number}")
    return width, number


def tower_fields(
    c: Fields, hidden: int = 768, heads: int = 12, activation: str = "gelu", eps: float = 1e-6, layers: int = 12
) -> dict[str, Any]:
    """Return the fields that every stack of BERT-like or ViT-like layers has; the keywords are the family's defaults.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: an activation that is not handled.
    """
    width, number = width_and_heads(c, hidden, heads)
    return dict(
        hidden_size=width,
        num_hidden_layers=c.integer("num_hidden_layers", layers, high=MAX_LAYERS),
        num_attention_heads=number,
        layer_norm_eps=c.real("layer_norm_eps", eps),
        activation=c.choice("hidden_act", activation, ACTIVATIONS),
    )


def text_fields(
    c: Fields, vocab: int | None, positions: int = 512, inner: int = 3072, eps: float = 1e-12, **tower: Any
) -> dict[str, Any]:
    """Return the fields of a BERT-like stack that reads tokens.

    The keywords are the family's defaults; `tower` are the keywords of `tower_fields`.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: an activation that is not handled.
    """
    return dict(
        **tower_fields(c, eps=eps, **tower),
        vocab_size=c.integer("vocab_size", vocab, high=MAX_VOCABULARY),
        intermediate_size=c.integer("intermediate_size", inner),
        max_position_embeddings=c.integer("max_position_embeddings", positions),
    )


# -- files -------------------------------------------------------------------------------------


def read_config(folder: Folder, ignore_fields: Iterable[str] = ()) -> Fields:
    """Return the fields of `config.json` in a model directory; fields that `ignore_fields` names are not refused.

    Raises:
        ConfigError: not one strict JSON object. MissingFileError: there is none.
        RequestError: `ignore_fields` is no list of names.
    """
    is_list = isinstance(ignore_fields, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(name, str) for name in ignore_fields):
        raise RequestError(f"{IGNORE_OPTION} is {shown(ignore_fields)}; expected a list of the names of fields")
    ignored = IgnoredFields(tuple(ignore_fields))
    config = Fields(folder.required_json(CONFIG), folder.where(CONFIG), ignored=ignored)
    ignored.check_present(config.values, config.where)
    return config


def architecture(config: Fields) -> tuple[str, str]:
    """Return `model_type` and the first of `architectures`, which is "" if the config names none.

    A config of diffusers has `_class_name` instead, which is returned for both.
    """
    if "model_type" not in config.values and "_class_name" in config.values:
        return (config.text("_class_name"),) * 2
    if "model_type" not in config.values:
        raise ConfigError(f"{config.where}: field 'model_type' is missing; expected the name of a family")
    kind = config.text("model_type", "")
    names = config.items("architectures", [], "strings", lambda name: isinstance(name, str))
    return kind, names[0] if names else ""
