"""A `CausalLM` as a model of lm-evaluation-harness: `lm_eval.simple_evaluate(model=LMEval(lm), tasks=[…])`.

The only module that imports lm_eval, which the extra `eval` installs; `import rlx_jax` does not. What is asked of the
model, and how texts become tokens, is as in the harness's own `hf` model (lm_eval/models/huggingface.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rlx_jax.errors import RequestError, SequenceLengthError, UnsupportedError, listing
from rlx_jax.generate.causal import CausalLM
from rlx_jax.generate.sampler import OPTIONS, Sampler
from rlx_jax.runtime.inputs import whole_number

MISSING: ModuleNotFoundError | None = None
try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:  # told where it is used, as tools that list modules import all of them
    if error.name != "lm_eval":
        raise
    MISSING, TemplateLM = error, object

# Tokens of a row where the model knows no limit, as in the `hf` model.
MAX_LENGTH = 2048


class LMEval(TemplateLM):  # type: ignore[misc]
    """The requests of the harness, answered by a `CausalLM` with a tokenizer: `loglikelihood`, `loglikelihood_rolling`
    and `generate_until`.

    Args:
        lm: what `rlx_jax.load` returns for a decoder.
        batch_size: rows of a call of `generate`; scores have batches of their own.
        max_length: tokens of a row, prompt and answer; by default the positions that the model knows. What is longer is
            cut on the left.
        max_gen_toks: new tokens where a task does not say how many.
        seed: of the draws, where a task samples.

    Raises:
        UnsupportedError: lm_eval is not installed.
        RequestError: no `CausalLM`, one without a tokenizer, or without an end token.
    """

    def __init__(
        self, lm: CausalLM, *, batch_size: int = 16, max_length: int | None = None, max_gen_toks: int = 256,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if MISSING is not None:
            raise UnsupportedError("LMEval needs lm-evaluation-harness: pip install 'rlx-jax[eval]'") from MISSING
        super().__init__()
        if not isinstance(lm, CausalLM):
            raise RequestError(f"LMEval: expected what rlx_jax.load returns for a decoder, got {type(lm).__name__}")
        if lm.tokenizer is None:
            raise RequestError("LMEval: tasks are texts, and the model has no tokenizer")
        if not lm.eos_ids:
            raise RequestError("LMEval: the model has no end token; pass eos_ids= to CausalLM")
        self.lm, self.texts, self.seed = lm, lm.tokenizer, seed
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.max_gen_toks = whole_number("max_gen_toks", max_gen_toks, 1)
        known = lm.max_positions or MAX_LENGTH
        self.max_length = known if max_length is None else whole_number("max_length", max_length, 2)
        if lm.max_positions is not None and self.max_length > lm.max_positions:
            raise SequenceLengthError(
                f"LMEval: max_length is {max_length}; the model knows {lm.max_positions} positions"
            )

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self.lm.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the begin token, or else the end token."""
        return self.eot_token_id if self.lm.bos_id is None else self.lm.bos_id

    @property
    def tokenizer_name(self) -> str:
        """A part of the keys of the harness's cache."""
        return str(self.lm.model.name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts there; None: unless they stand there."""
        if add_special_tokens is None:
            first = self.texts.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(first)
        return self.texts.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the checkpoint's template writes it.

        Raises:
            RequestError: the last message is to be continued, which the library's templates do not do.
        """
        if not add_generation_prompt:
            raise RequestError("LMEval: a message of the assistant that is to be continued; use a task without one")
        return str(self.lm.apply_chat_template(chat_history, tokenize=False))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **others: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood and whether it is greedy, for `(key, context, continuation)`; what does not fit is cut on the
        left, and a context has a token at least."""
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
        """Of whole texts, by windows that do not overlap but for one token."""
        windows = []
        for (string,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(self.tok_encode(string), self.prefix_token_id, self.max_length, 1)
            windows.append([make_disjoint_window(window) for window in rolling])
        scores = iter(self._loglikelihood_tokens([(None, *window) for of_text in windows for window in of_text]))
        answers = [sum(value for value, _ in itertools.islice(scores, len(of_text))) for of_text in windows]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on until a stop string or an end token; requests with the same arguments run together, long
        prompts first.

        Raises:
            RequestError: arguments of generation that a `Sampler` does not have.
        """
        items = [(self.tok_encode(request.args[0]), request.args[1], request.args) for request in requests]
        # Grouped by their repr: the harness takes "ab" and ["a", "b"] for the same.
        order = Collator(items, lambda item: -len(item[0]), lambda item: {"repr": repr(item[1])}, "gen_kwargs")
        answers: list[str] = []
        for batch in order.get_batched(n=self.batch_size):
            prompts, (wanted, *_), keys = zip(*batch, strict=True)
            answers += (texts := self._generate(prompts, wanted))
            for key, text in zip(keys, texts, strict=True):
                self.cache_hook.add_partial("generate_until", key, text)
        return list(order.get_original(answers))

    def _generate(self, prompts: Sequence[list[int]], wanted: Mapping[str, Any]) -> list[str]:
        """The answers to some prompts, with the arguments that their task has."""
        given = dict(normalize_gen_kwargs(dict(wanted), self.max_gen_toks))
        until, budget = given.pop("until", None) or [], given.pop("max_gen_toks")
        given.pop("do_sample", None)  # the temperature says it, as normalised
        if unknown := [name for name in given if name not in OPTIONS]:
            raise RequestError(f"LMEval: arguments of generation {listing(unknown)}; expected {listing(OPTIONS)}")
        if budget >= self.max_length:
            raise SequenceLengthError(
                f"LMEval: {budget} new tokens, and a row has {self.max_length}; give max_gen_toks in the task or here"
            )
        stops = [until] if isinstance(until, str) else [*until]
        cut = [prompt[-(self.max_length - budget) :] for prompt in prompts]
        rows = self.lm.generate(cut, budget, Sampler(**given), [s for s in stops if s], seed=self.seed)
        return [postprocess_generated_text(self.texts.decode(row), stops, None) for row in rows]
