"""`PromptRequest`: a prompt with options of its own, for `generate_iter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlx_jax.errors import RequestError, shown
from rlx_jax.generate.request import LanguageModel, check_min_tokens, choose_seed
from rlx_jax.generate.row_options import RowOptions, StopLike
from rlx_jax.generate.sampler import Sampler, resolve_sampler
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.chat import chat_prompt
from rlx_jax.text.request_checks import Prompts, classify_prompts


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """A prompt for `CausalLM.generate_iter` with options of its own; None means the option of the call.

    Attributes:
        prompt: a string or an id list.
        messages: in place of a prompt, messages that the chat template renders; the answer is text.
        max_new_tokens, sampler, stop, seed: as in `CausalLM.generate`. With a seed of its own the prompt has the random
            draws of a call for it alone.
        index: the number that its answer is yielded with, that errors name, and that its random draws depend on; by
            default its position in the iterable.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_new_tokens: int | None = None
    sampler: Sampler | None = None
    stop: StopLike | None = None
    seed: Any = None
    index: int | None = None

    def checked_index(self, position: int) -> int:
        """Return `index`, or the position of the prompt in the iterable without one.

        Raises:
            RequestError: it is no integer in [0, 2**31).
        """
        index = position if self.index is None else check_integer(f"prompts[{position}]: index", self.index, 0)
        if index >= 2**31:  # random draws take it as int32
            raise RequestError(f"prompts[{position}]: index is {index}; expected an integer below 2**31")
        return index

    def read(self, lm: LanguageModel, name: str) -> Prompts:
        """Return the prompt, rendered by the chat template if it is messages.

        Args:
            lm: the model.
            name: the prompt, for messages.

        Raises:
            RequestError: neither or both of `prompt` and `messages`, or not one prompt. Others as
                `CausalLM.apply_chat_template`.
        """
        if (self.prompt is None) == (self.messages is None):
            count = "none" if self.prompt is None else "both"
            raise RequestError(f"{name}: expected a prompt or messages, got {count}")
        if self.messages is not None:
            tokenizer = lm.require_tokenizer("chat needs", "generate from token ids")
            return Prompts(None, [chat_prompt(tokenizer, self.messages, variables={})], True)
        # An empty list has no tokens; it would be classified as a list without prompts.
        is_empty = isinstance(self.prompt, list | tuple) and not self.prompt
        prompts = Prompts(None, [[]], True) if is_empty else classify_prompts(self.prompt, name)
        if not prompts.is_single:
            raise RequestError(f"{name} is {shown(self.prompt)}; expected a string or a list of token ids")
        return prompts

    def replace_options(self, lm: LanguageModel, options: RowOptions, stop: StopLike, name: str) -> RowOptions:
        """Return the options of the call, replaced by the options of this prompt.

        Args:
            lm: the model.
            options, stop: the options of the call, and its `stop`.
            name: the prompt, for messages.

        Raises:
            RequestError, TokenIdError: as `CausalLM.generate`.
        """
        if self.max_new_tokens is not None:
            budget = check_integer(f"{name}: max_new_tokens", self.max_new_tokens, 0)
            options = replace(options, budget=budget)
        if self.sampler is not None:
            sampler = lm.bind_sampler(resolve_sampler(self.sampler, {}))
            sampler.values(lm.vocab_size)
            options = replace(options, sampler=sampler)
        if self.stop is not None or self.sampler is not None:  # a sampler may ignore the end tokens
            stop_strings, stop_ids = lm.parse_stop(stop if self.stop is None else self.stop, options.sampler)
            options = replace(options, stop_strings=stop_strings, stop_ids=stop_ids)
        if self.seed is not None:
            options = replace(options, seed=choose_seed(self.seed, options.sampler), draw=0)
        check_min_tokens(options.sampler, options.budget, f"{name}: ")
        return options
