"""Log-likelihoods of texts: what `CausalLM.score` returns.

Texts that differ in their last token alone, such as a question with each of its letters, are read once
(`score_layout.py`). The program that reads them gives two numbers for each token (`score_program.py`).
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
from rlx_jax.generate.score_layout import ScoreForm, SharedTokens, forms_for, places_in, score_sizes, shared_tokens
from rlx_jax.generate.scored_texts import ScoredTokens
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import RequestReport

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
