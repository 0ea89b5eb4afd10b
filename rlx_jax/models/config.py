"""Read a Hugging Face `config.json` field by field, and refuse fields that nothing reads.

A field that changes the computation but is not read would silently give wrong numbers. So every field is either read by
the family, or known not to affect the forward pass (`INERT`), or refused by name, unless the caller names it in
`ignore_fields`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from rlx_jax.errors import ConfigError, GraphError, RequestError, RlxWarning, quote, shown
from rlx_jax.io.fields import IGNORE_OPTION, IgnoredFields
from rlx_jax.io.fields import Fields as Fields
from rlx_jax.io.folder import CONFIG, Folder
from rlx_jax.weights.quantized_config import read_quantization

# Sanity limits, so that a malformed config does not make the process allocate or trace without bound.
MAX_LAYERS = 1024
MAX_VOCABULARY = 2**24

# Fields that do not affect the forward pass, by paragraph: the model's origin, its dtype, implementation choices,
# dropout and training, task heads, special tokens and the tokenizer, generation.
INERT = frozenset(
    """
    _commit_hash _from_auto _name_or_path _num_labels architectures base_model base_model_name_or_path finetuning_task
    id2label is_training label2id language license model_name model_type name_or_path num_labels prefix problem_type
    sbert_ce_default_activation_function sentence_transformers task_specific_params torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version

    bf16 dtype fp16 fp32 torch_dtype use_bfloat16

    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation
    _experts_implementation_internal _flash_attn_2_enabled attn_implementation chunk_size_feed_forward
    experts_implementation flash_attn flash_attention fuse_cross_entropy fuse_norm fused_bias_fc fused_dropout_add_ln
    output_attentions output_hidden_states output_past output_router_logits return_dict use_cache
    use_flash_attention use_flash_attention_2 use_flash_attn use_fused_cross_entropy use_kernels use_liger_kernel
    use_memory_efficient_attention use_return_dict use_sdpa use_xentropy

    activation_dropout attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop classifier_dropout
    classifier_dropout_prob decoder_layerdrop drop_path_rate dropout dropout_rate embd_dropout embd_pdrop
    embedding_dropout encoder_layerdrop ffn_dropout ffn_pdrop gradient_checkpointing gradient_checkpointing_kwargs
    head_dropout hidden_dropout hidden_dropout_prob ignore_index init_std label_smoothing label_smoothing_factor
    layerdrop loss_type matryoshka_dimensions mlp_dropout neftune_noise_alpha pooler_dropout resid_dropout resid_pdrop
    residual_dropout router_aux_loss_coef router_jitter_noise router_z_loss_coef use_reentrant

    classifier_activation directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type

    bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id max_model_length max_seq_len
    max_seq_length max_sequence_length model_max_length pad_token_id padding_side sep_token_id tokenizer_class
    tokenizer_model_max_length tokenizer_name tokenizer_padding_side unk_token_id

    assistant_confidence_threshold assistant_early_exit bad_words_ids begin_suppress_tokens cache_implementation
    constraints diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids
    forced_bos_token_id forced_eos_token_id generation_config guidance_scale length_penalty low_memory max_length
    max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits output_scores
    penalty_alpha prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
    return_dict_in_generate sequence_bias stop_strings suppress_tokens temperature tf_legacy_loss token_healing top_k
    top_p typical_p watermarking_config
    """.split()
)

# Prefixes of more such fields: training, initialization of weights, and GPT-2's classifier.
INERT_PREFIXES = ("freeze_", "initializer_", "summary_", "unsloth_")

# Fields that are harmless at these values, and change the computation at others. Null is always harmless in a field
# that is not read: it means that the field is not set.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """
        add_cross_attention alibi attention_bias is_decoder is_encoder_decoder mlp_bias tie_encoder_decoder
        use_alibi use_bidirectional_attention use_mrope use_qk_norm use_sliding_window
        """.split(),
        (False,),
    ),
    **dict.fromkeys("embedding_multiplier logits_scaling partial_rotary_factor residual_multiplier".split(), (1, 1.0)),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "rope_scaling": ({},),
}


def finish_model(c: Fields, inert: Iterable[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """Refuse unread fields of a model's own config, where `INERT` and `NEUTRAL` fields are harmless too; see
    `Fields.finish`.

    Raises:
        UnsupportedError: names the fields.
    """
    if c.raw("auto_map") is not None:
        warnings.warn(f"{c.where}: auto_map is ignored, code of a checkpoint is never run", RlxWarning, stacklevel=2)
    if read_quantization(c.values, c.where) is not None:  # its weights are read packed
        c.consumed |= {"quantization_config", "quantization"}
    harmless = {*INERT, *inert, *(name for name in c.values if name.startswith(INERT_PREFIXES))}
    c.finish(harmless | _without_window(c), NEUTRAL | dict(neutral or {}))


def _without_window(c: Fields) -> set[str]:
    """Return the names of sliding-window fields that are harmless because no layer has a window."""
    # A family that reads sliding_window but has no use_sliding_window applies the window in any case.
    always_slides = "sliding_window" in c.consumed and "use_sliding_window" not in c.consumed
    is_off = c.values.get("use_sliding_window") is False and not always_slides
    if not is_off and c.values.get("sliding_window") is not None:
        return set()
    kinds, layers = c.values.get("layer_types"), c.values.get("num_hidden_layers")
    all_full = isinstance(kinds, list) and len(kinds) == layers and all(kind == "full_attention" for kind in kinds)
    return {"max_window_layers", "sliding_window"} | ({"layer_types"} if all_full else set())


class ModelConfig:
    """Sizes of a model, as its `config.json` defines them.

    A family's config is a frozen subclass that reads its own fields.

    Attributes:
        defaults: the family's defaults of the fields that it shares with others.
        inert: names of fields that do not affect the computation.
        neutral: fields that do not at some values.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    inert: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def read(cls, c: Fields) -> Self:
        """Return the config from the family's fields. The caller refuses unread fields afterwards."""
        return cls(**cls.common_fields(c))

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        """Return the attributes whose fields several families share."""
        raise NotImplementedError

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self:
        """Return the config for a `config.json`, given as fields or as a mapping.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        if isinstance(cls.inert, str):  # A tuple of its letters otherwise.
            raise GraphError(f"{cls.__name__}: inert is {quote(cls.inert)}; expected a tuple of names of fields")
        result = cls.read(c)
        finish_model(c, cls.inert, cls.neutral)
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
ACTIVATIONS: dict[str, str] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys("gelu_accurate gelu_fast gelu_new gelu_python_tanh gelu_pytorch_tanh".split(), "gelu_tanh"),
    **{name: name for name in ("mish", "quick_gelu", "relu", "relu6", "sigmoid", "silu", "tanh")},
    "hardswish": "hard_silu",
    "swish": "silu",
}


def width_and_heads(
    c: Fields, hidden: int = 768, heads: int = 12, names: tuple[str, str] = ("hidden_size", "num_attention_heads")
) -> tuple[int, int]:
    """Return the hidden width and the number of heads, which divides it unless the config has `head_dim`.

    Args:
        c: the config.
        hidden, heads: the family's defaults.
        names: the two fields.

    Raises:
        ConfigError, LimitError: a value is absurd.
    """
    width, number = c.integer(names[0], hidden), c.integer(names[1], heads, high=2**16)
    if width % number and c.values.get("head_dim") is None:
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
