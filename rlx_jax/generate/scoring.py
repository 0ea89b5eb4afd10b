"""Log-likelihoods of texts, what `CausalLM.score` returns, and the perplexity of a long text, read window by window.

Texts that differ in their last token alone, such as a question with each of its letters, are read once
(`score_program.py`, which has the program too: it gives two numbers for each token).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets
from rlx_jax.encode.packing import Block
from rlx_jax.errors import NumericsError, RequestError, listing
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.score_program import (
    ScoredTokens,
    ScoreForm,
    SharedTokens,
    forms_for,
    places_in,
    score_sizes,
    shared_tokens,
    text_ids,
)
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import RequestReport
from rlx_jax.text.token_model import check_positions

# Calls whose results are not fetched yet.
AHEAD = 8


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text behind its context.

    Attributes:
        logprob: the sum of `token_logprobs`, natural logarithms.
        greedy: whether each token is the likeliest one where it stands, so that greedy decoding gives this text.
        tokens: ids of the tokens that were scored.
        token_logprobs: of each of them, given all tokens before it.
    """

    logprob: float
    greedy: bool
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]


def scores_of(lm: LanguageModel, items: Sequence[ScoredTokens], what: str) -> tuple[list[Score], RequestReport]:
    """The score of each item, in order, and how fast that was. `what` messages are about: the method that was called.

    Raises:
        RequestError: the flow reads more than tokens; as `score_sizes`. DeriveError: a token may see those behind it,
            or rows each other. NumericsError: as `score_all`.
    """
    model = lm.model
    clock = model.programs.clock()
    if lm.required:
        raise RequestError(f"{what}: {model.name} reads {listing(lm.required)} beside tokens; {what} takes texts alone")
    model.programs.any_template(model.as_program("prefill").key())  # what is proved before one is derived
    longest = max((item.width for item in items), default=1)
    texts = shared_tokens(items)
    scores = score_all(what, items, texts, *forms_for(model, lm.buckets, lm.max_positions, longest))
    seconds, compiled = clock()
    every, read = sum(item.width for item in items), sum(len(text.read) for text in texts)
    told = RequestReport("texts", len(items), every, seconds, compiled=compiled, cached_tokens=every - read)
    return scores, told


def score_all(
    what: str, items: Sequence[ScoredTokens], texts: Sequence[SharedTokens], shared: ScoreForm | None,
    alone: ScoreForm | None,
) -> list[Score]:  # fmt: skip
    """The score of each item, in order, of which `texts` are made: in rows with others as long as they fit there.

    Raises:
        NumericsError: logits are not finite; `outputs` has the others, and None for these.
    """
    found: list[Score | None] = [None] * len(items)
    failed: dict[int, int] = {}

    def take(form: ScoreForm, texts: Sequence[SharedTokens], blocks: Iterable[Block]) -> list[SharedTokens]:
        """Note the scores of texts, and give those that have something that is not finite."""
        bad = {}
        for text, number, values, likeliest in _results(form, items, texts, blocks):
            if np.isnan(values).any():
                failed[number] = int(np.isnan(values).argmax())
                bad[id(text)] = text
                continue
            failed.pop(number, None)
            numbers, item = tuple(values.tolist()), items[number]
            found[number] = Score(math.fsum(numbers), bool(likeliest.all()), item.ids[item.start :], numbers)
        return [*bad.values()]

    widest = shared.sizes.widths[-1] if shared else 0
    fitting, wide = ([text for text in texts if (len(text.read) > widest) == over] for over in (False, True))
    if shared is not None:
        again = take(shared, fitting, shared.plan(fitting))
        take(shared, again, shared.apart(again))  # what is not finite in one text may reach the others of its row
    if alone is not None:
        take(alone, wide, alone.plan(wide))
    if failed:
        first: dict[str, int] = {}  # the windows of a text have one name
        for i, at in sorted(failed.items()):
            first.setdefault(items[i].name, items[i].first + items[i].start + at)
        places = [f"{name} (first behind {at:,} token{'s'[: at > 1]})" for name, at in first.items()]
        more = f" and {len(places) - 8} more" if len(places) > 8 else ""
        told = f"logits are not finite of {', '.join(places[:8])}{more}"
        raise NumericsError(f"{what}: {told}; `outputs` of this error has the other scores", failed, found)
    return [score for score in found if score is not None]


def _results(
    form: ScoreForm, items: Sequence[ScoredTokens], texts: Sequence[SharedTokens], blocks: Iterable[Block]
) -> Iterator[tuple[SharedTokens, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """What each item of the texts gets: the text, the item's number, the log-probabilities of its tokens that are
    scored, and whether each is the likeliest. The next calls run while the host looks at it."""
    running: deque[tuple[Block, tuple[jax.Array, ...]]] = deque()

    def fetched() -> Iterator[tuple[SharedTokens, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        block, made = running.popleft()
        *each, others, others_likeliest = jax.device_get(made)
        for place in places_in(block, texts):
            text, row = texts[place.text], place.row
            for number, other in text.texts:
                span = slice(place.first + items[number].start - 1, place.first + len(text.read))
                values, likeliest = (array[row, span].copy() for array in each)
                if other is not None:
                    end = row, place.other + other
                    values[-1], likeliest[-1] = others[end], others_likeliest[end]
                yield text, number, values, likeliest

    for block in blocks:
        made, _ = form.program(block.rows, block.width)(form.inputs(block, texts), {})
        running.append((block, made))
        if len(running) > AHEAD:
            yield from fetched()
    while running:
        yield from fetched()


def warm_scores(model: CompiledModel, buckets: Buckets, max_positions: int | None) -> None:
    """Run every program once that texts within the buckets for prompts can need."""
    form = ScoreForm(model, score_sizes(model.settings.target, buckets, max_positions, buckets.prompt[-1]))
    for rows, width in form.sizes.blocks:
        jax.block_until_ready(form.program(rows, width)(form.inputs(Block(rows, width, 1, ()), ()), {})[0])


def strides(ids: Sequence[int], stride: int, context: int) -> list[ScoredTokens]:
    """Windows of `context` tokens, each `stride` behind the one before, of which the tokens are scored that no window
    before them has. The first token of a window has nothing before it, and a window of no more than that is left out.
    """
    windows, end = [], 0
    for begin in range(0, len(ids), stride):
        seen, end = end, min(begin + context, len(ids))
        start = max(1, seen - begin)
        if start < end - begin:
            windows.append(ScoredTokens(tuple(ids[begin:end]), start, "the text", begin, end - seen))
        if end == len(ids):
            break
    return windows


def perplexity_windows(lm: LanguageModel, text: Any, stride: Any, context: Any) -> list[ScoredTokens]:
    """The windows that `CausalLM.perplexity` reads; arguments as there.

    Raises:
        RequestError, TokenIdError, SequenceLengthError: as there; a stride of 1 would count the first window alone.
    """
    if context is None and lm.max_positions is None:
        raise RequestError("perplexity: the model has no longest text; pass context=, the tokens of a window")
    size = lm.max_positions if context is None else whole_number("context", context, 2)
    assert size is not None
    check_positions(size, lm.max_positions, "perplexity: context")
    step = max(1, size // 2) if stride is None else whole_number("stride", stride, 1)
    if step > size:
        raise RequestError(f"stride is {step}, over the {size} tokens of a window: those between would be left out")
    ids = text_ids(lm, text, "text")
    if len(ids) < 2:
        raise RequestError(f"perplexity: a text of {len(ids)} tokens has none to predict; pass 2 at least")
    windows = strides(ids, step, size)
    if step == 1 and len(windows) > 1:
        raise RequestError(
            f"perplexity: the stride is 1: a window counts with its new tokens less one, so that of {len(windows)} "
            "only the first would; pass stride=2 at least"
        )
    return windows


def perplexity_of(windows: Sequence[ScoredTokens], scores: Sequence[Score]) -> float:
    """exp of the mean negative log-likelihood, as Hugging Face's page on perplexity takes it: of the means of the
    windows, each counted with its new tokens less one."""
    total = math.fsum(s.logprob / len(s.tokens) * (w.new - 1) for w, s in zip(windows, scores, strict=True))
    return exp_of(-total / sum(window.new - 1 for window in windows))


def exp_of(nats: float) -> float:
    """exp, which is infinite where a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
