"""A `CausalLM` as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model=LMEval(lm), tasks=[…])`.

It is the only module that imports lm_eval, which the extra `eval` installs; `import rlx_jax` does not. Requests and
tokenization are as in the harness's own `hf` model (lm_eval/models/huggingface.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlx_jax.errors import RequestError, SequenceLengthError, UnsupportedError, listing
from rlx_jax.generate.causal import CausalLM
from rlx_jax.generate.sampler import OPTIONS, Sampler
from rlx_jax.runtime.inputs import check_integer

IMPORT_ERROR: ModuleNotFoundError | None = None
try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:  # raised at the first use, because tools that list modules import all of them
    if error.name != "lm_eval":
        raise
    IMPORT_ERROR, TemplateLM = error, object

# Default tokens of a row for a model without a limit, as in the `hf` model.
MAX_LENGTH = 2048


class LMEval(TemplateLM):  # type: ignore[misc]
    """A model of the harness that runs requests on a `CausalLM` with a tokenizer: `loglikelihood`,
    `loglikelihood_rolling` and `generate_until`.

    Args:
        lm: a decoder from `rlx_jax.load`.
        batch_size: rows of a call of `generate`; `lm.score` chooses its own batches.
        max_length: tokens of a row, prompt and answer; by default the maximum positions of the model. Longer prompts
            are cut on the left.
        max_gen_toks: new tokens if a task does not set a number.
        seed: seed for tasks that sample.

    Raises:
        UnsupportedError: lm_eval is not installed.
        RequestError: `lm` is not a `CausalLM`, or has no tokenizer or no end token.
    """

    def __init__(
        self, lm: CausalLM, *, batch_size: int = 16, max_length: int | None = None, max_gen_toks: int = 256,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if IMPORT_ERROR is not None:
            raise UnsupportedError("LMEval needs lm-evaluation-harness: pip install 'rlx-jax[eval]'") from IMPORT_ERROR
        super().__init__()
        if not isinstance(lm, CausalLM):
            raise RequestError(f"LMEval: expected what rlx_jax.load returns for a decoder, got {type(lm).__name__}")
        if lm.tokenizer is None:
            raise RequestError("LMEval: tasks are texts, and the model has no tokenizer")
        if not lm.eos_ids:
            raise RequestError("LMEval: the model has no end token; pass eos_ids= to CausalLM")
        self.lm, self.texts, self.seed = lm, lm.tokenizer, seed
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.max_gen_toks = check_integer("max_gen_toks", max_gen_toks, 1)
        model_limit = lm.max_positions or MAX_LENGTH
        self.max_length = model_limit if max_length is None else check_integer("max_length", max_length, 2)
        if lm.max_positions is not None and self.max_length > lm.max_positions:
            raise SequenceLengthError(f"LMEval: max_length is {max_length}; the model has {lm.max_positions} positions")

    @property
    def eot_token_id(self) -> int:
        """The id of the end token."""
        return self.lm.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The id of the token in front of a text without context: the begin token, or else the end token."""
        return self.eot_token_id if self.lm.bos_id is None else self.lm.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The name of the model, which is part of the keys of the harness's cache."""
        return str(self.lm.model.name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Return the ids of a text.

        With `add_special_tokens` None, special tokens are added unless the text starts with the prefix token.
        """
        if add_special_tokens is None:
            prefix = self.texts.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        return self.texts.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation formatted with the checkpoint's chat template.

        Raises:
            RequestError: `add_generation_prompt` is False; the templates cannot continue the last message.
        """
        if not add_generation_prompt:
            raise RequestError("LMEval: chat templates cannot continue an assistant's message; use a task without one")
        return str(self.lm.apply_chat_template(chat_history, tokenize=False))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of the continuation, and whether it is greedy, for each `(key, context,
        continuation)`. Long contexts are cut on the left to the tokens that fit, at least one."""
        pairs = []
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RequestError(
                    f"LMEval: a continuation of {len(continuation)} tokens; expected 1 to {self.max_length}"
                )
            pairs.append((context[-(self.max_length + 1 - len(continuation)) :], continuation))
        answers = [(score.logprob, score.greedy) for score in self.lm.score(pairs)]
        for (key, *_), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of full texts, scored in windows that overlap by one token."""
        windows = []
        for (string,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(self.tok_encode(string), self.prefix_token_id, self.max_length, 1)
            windows.append([make_disjoint_window(window) for window in rolling])
        scores = iter(self._loglikelihood_tokens([(None, *window) for group in windows for window in group]))
        answers = [sum(value for value, _ in itertools.islice(scores, len(group))) for group in windows]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated texts, each up to a stop string or an end token. Requests with the same arguments run in
        one batch, long prompts first.

        Raises:
            RequestError: arguments of generation that a `Sampler` does not have.
        """
        items = [(self.tok_encode(request.args[0]), request.args[1], request.args) for request in requests]
        # Group by the repr of the arguments, because the harness treats "ab" and ["a", "b"] as equal.
        order = Collator(items, lambda item: -len(item[0]), lambda item: {"repr": repr(item[1])}, "gen_kwargs")
        answers: list[str] = []
        for batch in order.get_batched(n=self.batch_size):
            prompts, (gen_kwargs, *_), keys = zip(*batch, strict=True)
            answers += (texts := self._generate(prompts, gen_kwargs))
            for key, text in zip(keys, texts, strict=True):
                self.cache_hook.add_partial("generate_until", key, text)
        return list(order.get_original(answers))

    def _generate(self, prompts: Sequence[list[int]], gen_kwargs: Mapping[str, Any]) -> list[str]:
        """Return the generated texts for prompts of one task, with the task's generation arguments."""
        options = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        until, budget = options.pop("until", None) or [], options.pop("max_gen_toks")
        options.pop("do_sample", None)  # redundant, because the normalized temperature implies it
        if unknown := [name for name in options if name not in OPTIONS]:
            raise RequestError(f"LMEval: arguments of generation {listing(unknown)}; expected {listing(OPTIONS)}")
        if budget >= self.max_length:
            raise SequenceLengthError(
                f"LMEval: {budget} new tokens, and a row has {self.max_length}; give max_gen_toks in the task or here"
            )
        stops = [until] if isinstance(until, str) else [*until]
        cut_prompts = [prompt[-(self.max_length - budget) :] for prompt in prompts]
        rows = self.lm.generate(cut_prompts, budget, Sampler(**options), [s for s in stops if s], seed=self.seed)
        return [postprocess_generated_text(self.texts.decode(row), stops, None) for row in rows]
