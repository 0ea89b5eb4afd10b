"""Read the files of a CrossEncoder of sentence-transformers, and turn pairs of texts into its token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.encode.sentence import (
    LOGITS_MODALITY,
    TRANSFORMER_FILES,
    SentencePipeline,
    is_cross_encoder,
    module_fields,
    read_modules,
    read_prompts,
    transformer_settings,
)
from rlx_jax.errors import ConfigError, UnsupportedError, listing, quote
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import MAX_VOCABULARY, Fields
from rlx_jax.text.chat_template import choose_template, render_each, rendered_text
from rlx_jax.text.tokenizer import Tokenizer

_ACTIVATIONS = {"torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.linear.Identity": "identity"}
# Values of the transformer's settings, by whether a head of one label follows or the logits of tokens are read.
_NEUTRAL = {
    False: {"transformer_task": ("sequence-classification",), "module_output_name": ("scores",)},
    True: {"transformer_task": ("text-generation",), "module_output_name": ("causal_logits",)},
}
# Arguments of transformers' apply_chat_template that are no variables of the template.
_TEMPLATE_OPTIONS = ("max_length", "padding", "return_tensors", "restore_suffix", "tokenize", "truncation")
# Number of pairs that one process renders.
_PAIRS_PER_PROCESS = 512


@dataclass(frozen=True)
class CrossEncoderSettings:
    """The settings of a CrossEncoder of sentence-transformers.

    Attributes:
        activation: `sigmoid` or `identity`.
        max_seq_length: maximum number of tokens of a pair; None: the tokenizer's.
        token_ids: the score is the logit of the first token at the end of a pair, less the logit of the second if
            there are two; empty: the model has a head of labels.
        prompts: the prompts by name, and the default one.
        message_format: pairs are rendered by the chat template, with contents that are texts ("flat") or lists of parts
            ("structured"); empty: pairs are tokenized as two texts.
        variables: for the chat template.
    """

    activation: str
    max_seq_length: int | None = None
    token_ids: tuple[int, ...] = ()
    prompts: SentencePipeline = SentencePipeline()
    message_format: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)


def read_cross_encoder(folder: Folder, config: Fields) -> CrossEncoderSettings | None:
    """Return the settings of a CrossEncoder of sentence-transformers; None if the directory is none.

    Its releases name the activation in one of three places. Without a name it is the sigmoid.

    Raises:
        ConfigError: the activation is no name.
        UnsupportedError: another activation, another task, or a setting that needs more; the message names it.
    """
    settings = config.raw("sentence_transformers", {})
    if is_cross_encoder(folder):
        c = module_fields(folder, "", "config_sentence_transformers.json")
        return _read_modules(folder, _activation(c.raw("activation_fn"), c.where))
    if isinstance(settings, Mapping) and "activation_fn" in settings:
        return CrossEncoderSettings(_activation(settings["activation_fn"], config.where))
    name = "sbert_ce_default_activation_function"
    return CrossEncoderSettings(_activation(config.raw(name), config.where)) if name in config.values else None


def _activation(name: Any, where: str) -> str:
    """Return the name of an activation in this package."""
    if name is None:
        return "sigmoid"
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the activation is {quote(name)}; expected the name of a class")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{where}: activation {quote(name)}; supported are {listing(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_modules(folder: Folder, activation: str) -> CrossEncoderSettings:
    """Return the settings of a directory with the files of a CrossEncoder."""
    modules, where = read_modules(folder) or [("Transformer", "")], folder.where("modules.json")
    kinds, reads_tokens = [kind for kind, _ in modules], len(modules) > 1
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]) or modules[0][1]:
        raise UnsupportedError(
            f"{where}: modules {listing(kinds)} of a CrossEncoder; supported are 'Transformer' in the directory, "
            "then maybe 'LogitScore'"
        )
    token_ids: tuple[int, ...] = ()
    if reads_tokens:
        c = module_fields(folder, modules[1][1], "config.json")
        token_ids = (c.integer("true_token_id", low=0, high=MAX_VOCABULARY),)
        if c.raw("false_token_id") is not None:
            token_ids += (c.integer("false_token_id", low=0, high=MAX_VOCABULARY),)
        c.finish(neutral={"module_input_name": ("causal_logits",)})
    transformer = transformer_settings(folder, "", LOGITS_MODALITY, _NEUTRAL[reads_tokens], messages=reads_tokens)
    if transformer.do_lower_case:
        raise UnsupportedError(f"{folder.where(TRANSFORMER_FILES[0])}: do_lower_case of a CrossEncoder")
    variables = dict(transformer.template_variables)
    if wrong := sorted(variables.keys() & {*_TEMPLATE_OPTIONS}):
        where = folder.where(TRANSFORMER_FILES[0])
        raise UnsupportedError(f"{where}: processing_kwargs, chat_template: {listing(wrong)}")
    prompts, default = read_prompts(folder, "CrossEncoder")
    return CrossEncoderSettings(
        activation, transformer.max_seq_length, token_ids,
        SentencePipeline(prompts=prompts, default_prompt_name=default), transformer.message_format, variables,
    )  # fmt: skip


@dataclass(frozen=True)
class PairTemplate:
    """A chat template with one message for the query and one for the document, after a system message with the prompt.

    Attributes:
        tokenizer: the tokenizer.
        template: the text of the template; None: the tokenizer's.
        max_length: maximum number of tokens of a pair. A longer one is cut as the tokenizer does, and ends in the text
            that the template puts after every document; None: no limit.
        is_structured: whether contents are lists of parts, not texts.
        variables: further variables of the template.
    """

    tokenizer: Tokenizer
    template: str | None = None
    max_length: int | None = None
    is_structured: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def token_ids(self, pairs: Sequence[tuple[str, str]], prompt: str) -> list[list[int]]:
        """Return the token ids of each pair.

        Raises:
            RequestError, TokenizerError: the template refuses the messages, or fails on them.
        """
        rows: list[list[int]] = []
        for first in range(0, len(pairs), _PAIRS_PER_PROCESS):
            texts = self._render(pairs[first : first + _PAIRS_PER_PROCESS], prompt)
            rows += self.tokenizer.encode_batch(
                texts, add_special_tokens=False, max_length=self.max_length, first=first
            )
        if self.max_length is not None and any(len(row) == self.max_length for row in rows):
            suffix = self._suffix(prompt)[-self.max_length :]
            for row in rows:
                if len(row) == self.max_length and suffix:
                    row[-len(suffix) :] = suffix
        return rows

    def _render(self, pairs: Sequence[tuple[str, str]], prompt: str) -> list[str]:
        """Return the text of each pair."""
        template = self.template or choose_template(self.tokenizer.chat_templates, None, False)
        names = {**self.tokenizer.special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        names |= self.variables
        system = [self._message("system", prompt)] if prompt else []
        messages = [[*system, self._message("query", a), self._message("document", b)] for a, b in pairs]
        return [rendered_text(answer) for answer in render_each(template, [names | {"messages": m} for m in messages])]

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.is_structured else text}

    def _suffix(self, prompt: str) -> list[int]:
        """Return the tokens that end every pair: those in common to two pairs that have no token in common."""
        texts = self._render([("0", "0"), ("1 2 3 4", "1 2 3 4")], prompt)
        short, long = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        count = next((i for i, (a, b) in enumerate(zip(short[::-1], long[::-1], strict=False)) if a != b), 0)
        return short[len(short) - count :]
