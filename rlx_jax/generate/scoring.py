"""`Score`: log-likelihoods of texts, which `CausalLM.score` returns, and the perplexity of a long text by windows.

Texts, ids and pairs are converted to token ids. Texts that differ in their last token alone, such as a multiple-choice
question with each of its letters, are read once.
`score_program.py` groups them, and has the program, which returns two numbers per token.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.packing import Block
from rlx_jax.errors import NumericsError, RequestError, listing, shown
from rlx_jax.generate.prefix_cache import Prefix
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.score_program import (
    ScoredTokens,
    ScoreForm,
    ScorePart,
    SharedTokens,
    group_by_prefix,
    locate_texts,
    prefix_part,
    score_parts,
    score_sizes,
)
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import RequestReport
from rlx_jax.text.request_checks import convert_foreign_arrays, id_list
from rlx_jax.text.token_model import check_positions

# The most calls in flight, that is with results not fetched yet: enough to keep the device busy, and a limit on memory.
MAX_IN_FLIGHT = 8


@dataclass(frozen=True)
class Score:
    """The log-likelihood of a text given its context.

    Attributes:
        logprob: the sum of `token_logprobs`, natural logarithms.
        greedy: whether each token is the likeliest one at its position, so that greedy decoding returns this text.
        tokens: ids of the scored tokens.
        token_logprobs: the log-probability of each of them, given all tokens before it.
    """

    logprob: float
    greedy: bool
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]


def score_items(lm: LanguageModel, items: Sequence[ScoredTokens], method: str) -> tuple[list[Score], RequestReport]:
    """Return the score of each item, in order, and a report with the time and tokens of the call.

    Args:
        method: the public method, for error messages.

    Raises:
        RequestError: the flow has other inputs than tokens; as `score_sizes`. DeriveError: a token may see later
            tokens, or rows each other. NumericsError: as `score_all`.
    """
    model = lm.model
    clock = model.programs.start_timer()
    if lm.required_inputs:
        raise RequestError(f"{method}: {model.name} reads {listing(lm.required_inputs)} in addition to tokens")
    # Deriving a prefill program proves that tokens do not see later ones, and rows not each other.
    model.programs.any_template(model.as_program("prefill").key())
    items, num_tokens = list(items), sum(item.width for item in items)
    numbers_by_prefix = defaultdict[Prefix | None, list[int]](list)
    # What follows a prefix needs programs that neither warm-up nor buckets have.
    is_off = model.programs.is_warm or lm.buckets.on_recompile != "allow"
    for number, item in enumerate(items):
        # The token before the first scored one is read after the prefix, as its logits are needed.
        prefix = None if is_off else lm.prefixes.cached(model, item.ids[: item.start - 1])
        numbers_by_prefix[prefix].append(number)
        if prefix is not None:
            count = len(prefix.ids)
            items[number] = replace(item, ids=item.ids[count:], start=item.start - count, offset=item.offset + count)
    parts: list[ScorePart] = []
    for prefix, numbers in numbers_by_prefix.items():
        texts = group_by_prefix(items, numbers)
        parts += score_parts(lm, texts) if prefix is None else [prefix_part(lm, prefix, texts)]
    scores = score_all(method, items, parts)
    num_read = sum(len(text.prefix) for _, texts in parts for text in texts)
    seconds, compiled = clock()
    cached = num_tokens - num_read
    return scores, RequestReport("texts", len(items), num_tokens, seconds, compiled=compiled, cached_tokens=cached)


def score_all(method: str, items: Sequence[ScoredTokens], parts: Sequence[ScorePart]) -> list[Score]:
    """Return the score of each item, in order.

    Args:
        parts: the items, grouped by common prefix, with the form to score them with.

    Raises:
        NumericsError: logits are not finite; `outputs` has the other scores, and None for these.
    """
    scores: list[Score | None] = [None] * len(items)
    failed: dict[int, int] = {}

    def take(form: ScoreForm, texts: Sequence[SharedTokens], blocks: Iterable[Block]) -> list[SharedTokens]:
        """Record the scores of texts, and return the texts with values that are not finite."""
        not_finite = {}
        for text, number, values, likeliest in _results(form, items, texts, blocks):
            if np.isnan(values).any():
                failed[number] = int(np.isnan(values).argmax())
                not_finite[id(text)] = text
                continue
            failed.pop(number, None)
            numbers, item = tuple(values.tolist()), items[number]
            scores[number] = Score(math.fsum(numbers), bool(likeliest.all()), item.ids[item.start :], numbers)
        return [*not_finite.values()]

    for form, texts in parts:
        retried = take(form, texts, form.plan(texts))
        # A NaN of one text may have spread to the other texts of its row, as 0 · NaN is NaN in masked attention.
        if form.packed:
            take(form, retried, form.plan_one_per_row(retried))
    if failed:
        first_by_name: dict[str, int] = {}  # the windows of a text have one name
        for i, offset in sorted(failed.items()):
            first_by_name.setdefault(items[i].name, items[i].offset + items[i].start + offset)
        failures = [f"{name} (first after {n:,} token{'s'[: n > 1]})" for name, n in first_by_name.items()]
        suffix = f" and {len(failures) - 8} more" if len(failures) > 8 else ""
        message = f"logits are not finite for {', '.join(failures[:8])}{suffix}"
        raise NumericsError(f"{method}: {message}; `outputs` of this error has the other scores", failed, scores)
    return [score for score in scores if score is not None]


def _results(
    form: ScoreForm, items: Sequence[ScoredTokens], texts: Sequence[SharedTokens], blocks: Iterable[Block]
) -> Iterator[tuple[SharedTokens, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield, for each item, its text group, its number, the log-probabilities of its scored tokens, and whether each is
    the likeliest. Up to `MAX_IN_FLIGHT` later calls run on the device while the host processes a result."""
    running: deque[tuple[Block, tuple[jax.Array, ...]]] = deque()

    def fetched() -> Iterator[tuple[SharedTokens, int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        block, outputs = running.popleft()
        *token_arrays, alternatives, others_likeliest = jax.device_get(outputs)
        for location in locate_texts(block, texts):
            text, row = texts[location.text], location.row
            for number, alternative in text.items:
                span = slice(location.column + items[number].start - 1, location.column + len(text.prefix))
                values, likeliest = (array[row, span].copy() for array in token_arrays)
                if alternative is not None:
                    end = row, location.alternative_column + alternative
                    values[-1], likeliest[-1] = alternatives[end], others_likeliest[end]
                yield text, number, values, likeliest

    for block in blocks:
        running.append((block, form.run(block, texts)))
        if len(running) > (MAX_IN_FLIGHT if form.prefix is None else 1):  # a call after a prefix has a state
            yield from fetched()
    while running:
        yield from fetched()


def warm_scores(model: CompiledModel, buckets: Buckets, max_positions: int | None) -> None:
    """Run every program once that scoring texts within the prompt buckets can need."""
    form = ScoreForm(model, score_sizes(model.settings.target, buckets, max_positions, buckets.prompt[-1]))
    for rows, width in form.sizes.blocks:
        jax.block_until_ready(form.run(Block(rows, width, 1, ()), ()))


def split_windows(ids: Sequence[int], stride: int, context: int) -> list[ScoredTokens]:
    """Return windows of `context` tokens, each `stride` tokens after the previous one.

    A window scores the tokens that no earlier window has. Its first token has no context and is never scored; a window
    with nothing to score is left out.
    """
    windows, end = [], 0
    for begin in range(0, len(ids), stride):
        covered, end = end, min(begin + context, len(ids))
        start = max(1, covered - begin)
        if start < end - begin:
            windows.append(ScoredTokens(tuple(ids[begin:end]), start, "the text", begin, end - covered))
        if end == len(ids):
            break
    return windows


def perplexity_windows(lm: LanguageModel, text: Any, stride: Any, context: Any) -> list[ScoredTokens]:
    """Check the arguments of `CausalLM.perplexity` and return its windows.

    Raises:
        RequestError, TokenIdError, SequenceLengthError: as there. A stride of 1 is an error, as windows are weighted by
            their new tokens less one, and only the first window would count.
    """
    if isinstance(text, list | tuple) and any(isinstance(part, str) for part in text):
        raise RequestError(f"perplexity: expected one string, or its ids, got {shown(text)}; score takes several")
    if context is None and lm.max_positions is None:
        raise RequestError("perplexity: the model has no longest text; pass context=, the tokens of a window")
    size = lm.max_positions if context is None else check_integer("context", context, 2)
    assert size is not None
    check_positions(size, lm.max_positions, "perplexity: context")
    step = max(1, size // 2) if stride is None else check_integer("stride", stride, 1)
    if step > size:
        raise RequestError(f"stride is {step}, over the {size} tokens of a window: tokens in between would be left out")
    ids = text_ids(lm, text, "text")
    if len(ids) < 2:
        raise RequestError(f"perplexity: a text of {len(ids)} tokens has none to predict; pass 2 at least")
    windows = split_windows(ids, step, size)
    if step == 1 and len(windows) > 1:
        raise RequestError(
            f"perplexity: the stride is 1: a window counts with its new tokens less one, so that of {len(windows)} "
            "only the first would; pass stride=2 at least"
        )
    return windows


def mean_perplexity(windows: Sequence[ScoredTokens], scores: Sequence[Score]) -> float:
    """Return exp of the mean negative log-likelihood: the mean over the windows of their own means, each weighted by
    its new tokens less one, as on Hugging Face's page on perplexity."""
    total = math.fsum(s.logprob / len(s.tokens) * (w.num_new - 1) for w, s in zip(windows, scores, strict=True))
    return exp_or_inf(-total / sum(window.num_new - 1 for window in windows))


def exp_or_inf(nats: float) -> float:
    """Return exp of a number, or infinity where a float would overflow."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def scored_tokens(lm: LanguageModel, texts: Any) -> tuple[list[ScoredTokens], bool]:
    """Return the tokens of each item, and whether `texts` is a single item rather than a list.

    Raises:
        RequestError: `texts` has neither texts, nor ids, nor pairs of them; there is nothing to score; or there is no
            tokenizer, or no begin token. TokenIdError: the model does not have an id. SequenceLengthError: an item is
            over the model's positions.
    """
    texts = convert_foreign_arrays("texts", texts)
    single = _is_single(texts)
    if not single and not isinstance(texts, list | tuple | np.ndarray | jax.Array):
        raise RequestError(f"score: expected a text, ids, a pair (context, continuation) or a list, got {shown(texts)}")
    items = [texts] if single else list(texts)
    scored = [_item_tokens(lm, item, "texts" if single else f"texts[{i}]") for i, item in enumerate(items)]
    for item in scored:
        # As in lm-evaluation-harness: the last token is not read, so it may be one past the last position.
        check_positions(item.width, lm.max_positions, f"{item.name}: {len(item.ids)} tokens, the last one not read")
    return scored, single


def text_ids(lm: LanguageModel, text: Any, name: str) -> list[int]:
    """Return the ids of a string, with the special tokens that the tokenizer adds, or ids unchanged."""
    if isinstance(text, str):
        text = lm.require_tokenizer("strings need").encode(text)
    return id_list(text, lm.vocab_size, name)


def first_id(lm: LanguageModel) -> int:
    """Return the id that serves as context of a text without one: the begin token, or else the end token.

    Raises:
        RequestError: there is neither.
    """
    if lm.bos_id is not None:
        return lm.bos_id
    if lm.eos_ids:
        return lm.eos_ids[0]
    raise RequestError(
        "score: an empty context is replaced by the begin token, or else the end token, and the model has neither; "
        "pass bos_id= or eos_ids= to CausalLM"
    )


def pair_ids(lm: LanguageModel, context: Any, continuation: Any, name: str) -> ScoredTokens:
    """Return the tokens of a context and its continuation, which is scored.

    Strings are tokenized as in lm-evaluation-harness: spaces at the end of the context belong to the continuation, both
    are tokenized as one text, and the continuation starts after as many tokens as the context alone has. A context of
    spaces only becomes empty; `first_id` is then the context, unless the tokenizer adds a begin token.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise RequestError(f"{name}: a context and a continuation are both strings or both ids, got {shown(context)}")
    if not isinstance(context, str):
        context_ids, target_ids = (text_ids(lm, part, f"{name}[{i}]") for i, part in enumerate((context, continuation)))
        context_ids = context_ids or [first_id(lm)]
    elif context:
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        all_ids, context_ids = (text_ids(lm, text, name) for text in (context + continuation, context))
        context_ids, target_ids = all_ids[: len(context_ids)] or [first_id(lm)], all_ids[len(context_ids) :]
    else:
        encoded = lm.require_tokenizer("strings need").encode(continuation, add_special_tokens=False)
        target_ids = id_list(encoded, lm.vocab_size, name)
        context_ids = [first_id(lm)]
        if target_ids[:1] == context_ids:  # the text has the token already, for example as `<s>`
            del target_ids[0]
    if not target_ids:
        raise RequestError(f"{name}: the continuation has no tokens, so that there is nothing to score")
    return ScoredTokens((*context_ids, *target_ids), len(context_ids), name)


def _item_tokens(lm: LanguageModel, item: Any, name: str) -> ScoredTokens:
    """Return the tokens of one item to score: a text, ids or a pair."""
    if _is_pair(item):
        context, continuation = item
        return pair_ids(lm, context, continuation, name)
    if not _is_single(item):
        raise RequestError(f"{name}: expected a string, token ids or a pair (context, continuation), got {shown(item)}")
    ids = text_ids(lm, item, name)
    if len(ids) < 2:
        raise RequestError(
            f"{name}: {len(ids)} tokens; the first token of a text is not scored: pass at least 2, or a pair: "
            "('', text) scores all tokens of a text after the begin token"
        )
    return ScoredTokens(tuple(ids), 1, name)


def _is_pair(item: Any) -> bool:
    """Return whether an item is a tuple of two texts, or of two lists of ids."""
    return isinstance(item, tuple) and len(item) == 2 and not any(isinstance(part, int | np.integer) for part in item)


def _is_single(item: Any) -> bool:
    """Return whether an item is a single text: a string, a list of ids, or a pair."""
    if isinstance(item, str) or _is_pair(item):
        return True
    if isinstance(item, np.ndarray | jax.Array):
        return item.ndim == 1 and item.dtype.kind in "iu"
    kinds = set(map(type, item)) if isinstance(item, list | tuple) else set()
    return bool(kinds) and all(issubclass(kind, int | np.integer) for kind in kinds)
