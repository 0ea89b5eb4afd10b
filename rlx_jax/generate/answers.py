"""What a request returns beside new tokens: several answers to a prompt, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import RequestError, shown
from rlx_jax.generate.asking import blocks
from rlx_jax.generate.generation import NewTokens
from rlx_jax.generate.plan import Request
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.speaker import Speaker
from rlx_jax.text.padding import bucket
from rlx_jax.text.requests import whole_number

TOP = 8
"""Programs tell of 0, 8, 16, 32 … likeliest tokens; the host leaves out what was not asked for."""


@dataclass(frozen=True)
class Completion:
    """One answer, with what the model says of it: natural logarithms of probabilities, before a sampler changes them.

    Attributes:
        text: up to the first stop string; None where the prompt was ids.
        tokens: all new ids.
        token_logprobs: of each of them.
        top: for each of them the likeliest ids at its place with their log-probabilities, the likeliest first.
    """

    text: str | None
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def check_answers(n: Any, logprobs: Any, sampler: Any, drafts: bool, vocab_size: int) -> tuple[int, int | None]:
    """Answers of each prompt, and likeliest tokens that programs tell of. Arguments as those of `CausalLM.generate`.

    Raises:
        RequestError: no such numbers; several greedy answers, which are one; drafts beside them.
    """
    answers = 1 if n is None else whole_number("n", n, 1)
    if answers > 1 and isinstance(sampler, Sampler) and sampler.temperature == 0:
        raise RequestError(f"n is {answers}, and a greedy sampler gives one answer; pass Sampler(temperature=1.0)")
    if drafts and (answers > 1 or logprobs is not None):
        name = "logprobs" if logprobs is not None else "n"
        raise RequestError(f"{name}= and speculative= do not go together; leave one of them out")
    if logprobs is None:
        return answers, None
    k = whole_number("logprobs", logprobs, 0)
    if k > vocab_size:
        raise RequestError(f"logprobs is {shown(logprobs)}; the model has {vocab_size} tokens")
    return answers, bucket(k, TOP, vocab_size) if k else 0


def outputs_of(speaker: Speaker, request: Request, new: NewTokens, text: bool, logprobs: int | None) -> list[Any]:
    """What each row returns: text or ids, or a `Completion` where log-probabilities were asked for."""
    texts = [speaker.text(ids, request.words) if text else None for ids in new.rows]
    if logprobs is None:
        return [*texts] if text else [*new.rows]
    return [
        Completion(told, tuple(ids), tuple(values), tuple(pairs[:logprobs] for pairs in top))
        for told, ids, values, top in zip(texts, new.rows, new.log_probs, new.top, strict=True)
    ]


def answered(
    speaker: Speaker, request: Request, new: NewTokens, text: bool, n: int | None, logprobs: int | None
) -> list[Any]:
    """Generate, and return what each prompt gets.

    Raises:
        NumericsError: logits of a row were not finite; `outputs` has what there is.
    """
    for _ in blocks(speaker, request, new):
        pass
    outputs = grouped(outputs_of(speaker, request, new, text, logprobs), n)
    new.check(outputs, n)
    return outputs


def grouped(outputs: Sequence[Any], n: int | None) -> list[Any]:
    """The answers to each prompt together, where several were asked for by number."""
    return [*outputs] if n is None else [list(outputs[at : at + n]) for at in range(0, len(outputs), n)]
