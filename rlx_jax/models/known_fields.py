"""List the fields of `config.json` that do not affect the forward pass, at any value or at some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx_jax.errors import ConfigError, did_you_mean, quote

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
    layerdrop loss_type mlp_dropout neftune_noise_alpha pooler_dropout resid_dropout resid_pdrop residual_dropout
    router_aux_loss_coef router_jitter_noise router_z_loss_coef use_reentrant

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

# Fields that a config may set to null to get the default.
NULLABLE = frozenset({"head_dim", "num_key_value_heads", "rope_theta"})

# Fields that are harmless at these values, and change the computation at others. Null is always harmless in a field
# that is not read: it means that the field is not set.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "embedding_multiplier": (1, 1.0),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "residual_multiplier": (1, 1.0),
    "rope_scaling": ({},),
    "tie_encoder_decoder": (False,),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}


# Define `IgnoredFields`, the fields of a config that the caller wants ignored.


# Name of the option of `rlx_jax.load`, `recipe_for` and `from_pretrained`, for messages.
IGNORE_OPTION = "ignore_fields"


@dataclass
class IgnoredFields:
    """The fields of a config that the caller wants ignored, such as `sliding_window` or
    `text_config.rope_scaling.beta`.

    Attributes:
        names: the names that the caller passed.
        applied: the names among them that would otherwise be refused, collected while the config is read.
    """

    names: tuple[str, ...] = ()
    applied: list[str] = field(default_factory=list)

    def check_present(self, values: Mapping[str, Any], where: str) -> None:
        """Refuse a name that is not a field of `values`.

        Raises:
            ConfigError: the message has the name, and a similar one.
        """
        for name in self.names:
            (*groups, leaf), inner = name.split("."), values
            for group in groups:
                nested = inner.get(group)
                inner = nested if isinstance(nested, Mapping) else {}
            # A field's name may contain a dot, such as `transformers.js_config`, so the full name counts too.
            if leaf not in inner and name not in values:
                suggestion = did_you_mean(leaf, list(map(str, inner)), cutoff=0.7)
                raise ConfigError(f"{where}: {IGNORE_OPTION}: there is no field {quote(name)}{suggestion}")

    def check_applied(self, where: str) -> None:
        """Refuse a name that ignores nothing, after the config was read.

        Raises:
            ConfigError: the field is handled anyway.
        """
        if unused := [name for name in self.names if name not in self.applied]:
            raise ConfigError(
                f"{where}: {IGNORE_OPTION}: field {quote(unused[0])} is handled: it is read, or it does not affect the "
                "forward pass; leave it out"
            )
