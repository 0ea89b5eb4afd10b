"""Log-likelihoods of texts: what `CausalLM.score` and `CausalLM.perplexity` return, and the program behind them.

One program reads rows of one width up to the head, and takes the logits of a piece of the tokens at a time: what leaves
it is two numbers for each token. There are at most eight of these programs (`score_sizes`). Texts that differ in their
last token alone, such as a question with each of its letters, are one row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.encode.packing import Block, BlockSizes, costs_on
from rlx_jax.errors import GraphError, NumericsError, RecompileError, RequestError, listing
from rlx_jax.generate.request_inputs import declared
from rlx_jax.generate.scored_texts import ScoredTokens, text_ids
from rlx_jax.generate.speaker import Speaker
from rlx_jax.ir.types import is_static
from rlx_jax.losses import InPieces, count_pieces, logits_of_piece, split_tokens
from rlx_jax.runtime.heads import head_operands
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.report import RequestReport
from rlx_jax.text.opening import check_positions
from rlx_jax.text.requests import pad_rows, whole_number

ROOM = 2**26
"""Bytes of the f32 logits of a piece, on each device."""
AHEAD = 8
"""Calls whose results are not fetched yet."""
AIM = "aim"
"""The input that has the token after each token."""
LAST, OTHERS = "last", "others"
"""The inputs that have the place of each row's last token, and other tokens that may stand behind it."""
MOST_OTHERS = 16
"""How many of them a row has."""
SHORT, LONG = (64, 128, 256, 512, 1024, 2048, 8192), (64, 128, 512, 2048, 8192, 32768, 131072)
"""Widths of rows, for models of up to 8192 positions and for others."""
ALONE = (64, 512)
"""Widths of programs of one row, beside those of full calls: for what is left over, and for a text alone."""


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text behind its context.

    Attributes:
        log_likelihood: the sum of `log_probs`, natural logarithms.
        greedy: whether each token is the likeliest one where it stands, so that greedy decoding gives this text.
        tokens: ids of the tokens that were scored.
        log_probs: of each of them, given all tokens before it.
    """

    log_likelihood: float
    greedy: bool
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


# -- the program -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreTokens:
    """Around `forward`: the log-probability `[B, S]` f32 of the token in `aim` `[B, S]` behind each token, NaN where
    logits are not finite, and whether it is the likeliest one `[B, S]` bool; and the same `[B, K]` of the tokens in
    `others` `[B, K]` behind the one at `last` `[B]`.

    With `pieces` the program ends at its head, and the logits of a piece of the tokens are made at a time; else they
    are its output.
    """

    ids_input: str
    pieces: InPieces | None

    def arguments(self) -> Mapping[str, str]:
        """See `rlx_jax.compiler.executable.SaysArguments`."""
        return {"scoring": "True"}

    def __call__(self, forward: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            made, state = forward(params, state, {self.ids_input: inputs[self.ids_input]})
            how, aim, others, last = self.pieces, inputs[AIM], inputs[OTHERS], inputs[LAST]
            if how is None:
                return judged(made[0].astype(jnp.float32), aim, others, last), state
            hidden, kernel, *bias = made
            operands = head_operands(how.head, kernel, bias[0] if bias else None)

            def piece(first: Any, part: tuple[Any, Any]) -> tuple[Any, tuple[Any, ...]]:
                logits, _back = logits_of_piece(how, part[0], operands)
                return first + logits.shape[1], judged(logits, part[1], others, last - first)

            _, found = lax.scan(piece, jnp.int32(0), split_tokens(how, hidden, aim))
            each, likeliest, other, other_likeliest = found
            return (joined(each, aim.shape), joined(likeliest, aim.shape), other.sum(0), other_likeliest.any(0)), state

        return function


def judged(
    logits: jax.Array, aim: jax.Array, others: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits `[B, c, V]` f32, and a token for each `[B, c]`: its log-probability, and whether it is the likeliest; of
    several that are, the smallest id is, as in greedy decoding. The same of the tokens `others` `[B, K]` behind the
    place `last` `[B]`; zeros where that is none of `[0, c)`."""
    lse, best = jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(aim.dtype)
    chosen = jnp.take_along_axis(logits, aim[..., None], axis=-1, mode="clip")[..., 0]
    inside = ((last >= 0) & (last < logits.shape[1]))[:, None]
    at = jnp.clip(last, 0, logits.shape[1] - 1)[:, None]
    row = jnp.take_along_axis(logits, at[..., None], axis=1, mode="clip")[:, 0]
    other = jnp.take_along_axis(row, others, axis=-1, mode="clip")
    lse_at, best_at = (jnp.take_along_axis(x, at, axis=1, mode="clip") for x in (lse, best))
    found = jnp.where(inside, log_prob(other, lse_at), 0.0)
    return log_prob(chosen, lse), best == aim, found, inside & (best_at == others)


def log_prob(chosen: jax.Array, lse: jax.Array) -> jax.Array:
    """Of a token with the logit `chosen`, NaN where logits are not finite."""
    return jnp.where(jnp.isfinite(lse) & (chosen < jnp.inf), chosen - lse, jnp.nan)


def joined(pieces: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[n, B, c]` → `[B, S]`, without what fills up the last piece."""
    return pieces.swapaxes(0, 1).reshape(shape[0], -1)[:, : shape[1]]


def score_program(model: CompiledModel, rows: int, width: int) -> BoundProgram:
    """The program for this many rows and tokens.

    Raises:
        RecompileError: it is not compiled, and the profile wants that told.
    """
    key = model.sized({"batch": rows, "seq": width}, last_only=False, outputs=model.output_names[:1])
    pieces = _in_pieces(model, rows, width)
    around = ScoreTokens(model.flow.inputs[0].name, pieces)
    key = replace(key, headless=pieces is not None, around=around)
    model.programs.check_compiled(key)
    return BoundProgram(model, key)


def _in_pieces(model: CompiledModel, rows: int, width: int) -> InPieces | None:
    """How the logits are taken; None where the output is not a product that could be taken in pieces."""
    division = model.programs.division
    try:
        head = model.template().head
    except GraphError:
        return None
    if head.type.rank != 3 or not is_static(head.type.shape[-1]):
        return None
    count = count_pieces((rows, width), None, head.type.shape[-1], division, ROOM)
    return InPieces(head, count, int(head.words), 0.0, division)


# -- sizes -------------------------------------------------------------------------------------


def score_sizes(target: str, buckets: Buckets, max_positions: int | None, longest: int) -> BlockSizes:
    """The programs on a `target` for texts of up to `longest` tokens: at most eight, of full calls of each width and of
    one row; with buckets those of their sizes. A text over all widths, which is one over all buckets or over 131072
    tokens of a model without a limit, has a width of its own.

    Raises:
        RecompileError: a text is over the largest bucket, and `on_recompile` is `error`.
    """
    costs = costs_on(target)
    closed = buckets.on_recompile == "error"
    if buckets.prompt and closed and longest > buckets.prompt[-1]:
        raise RecompileError(
            f"score: a text of {longest} tokens, and buckets.prompt = {list(buckets.prompt)}; score less at once, or "
            "add a bucket to the profile"
        )
    if max_positions is None or max_positions > SHORT[-1]:
        widths = list(buckets.prompt or LONG)
    else:
        widths = list(buckets.prompt or SHORT)
    if max_positions is not None and not buckets.prompt:
        widths = [w for w in widths if w < max_positions]
        widths = [*widths[: 6 if max_positions > LONG[-1] else None], max_positions]
    while widths[-1] < longest:
        widths.append(min(4 * widths[-1], max_positions or 4 * longest))
    if buckets.batch:
        blocks = {(rows, width) for rows in buckets.batch for width in widths}
    else:
        full = {(max(1, costs.tokens // width), width) for width in widths}
        alone = {(1, width) for width in ALONE[: 8 - len(widths)] if width in widths and not buckets.prompt}
        blocks = {(buckets.rows(rows), width) for rows, width in full | alone}
    return BlockSizes(tuple(sorted(blocks)), costs.tokens, costs)


def score_calls(widths: Sequence[int], sizes: BlockSizes) -> list[Block]:
    """Calls for texts of so many tokens, each in a row of its own, long ones first: full ones, and the rest of a width
    in the cheapest, which may have wider rows."""
    blocks, waiting = [], sorted(range(len(widths)), key=lambda text: -widths[text])
    for width, narrower in zip(sizes.widths[::-1], (*sizes.widths[-2::-1], 0), strict=True):
        count = next((i for i, text in enumerate(waiting) if widths[text] <= narrower), len(waiting))
        texts, waiting = waiting[:count], waiting[count:]
        full = sizes.of(width)[0]
        whole = count // full * full
        blocks += [Block(full, width, 1, tuple((t,) for t in texts[at : at + full])) for at in range(0, whole, full)]
        rest = texts[whole:]
        if rest:
            usable = [block for block in sizes.blocks if block[1] >= width]
            rows, wide = min(usable, key=lambda block: -(-len(rest) // block[0]) * sizes.cost(*block))
            blocks += [
                Block(rows, wide, 1, tuple((t,) for t in rest[at : at + rows])) for at in range(0, len(rest), rows)
            ]
    return blocks


def warm_scores(model: CompiledModel, buckets: Buckets, max_positions: int | None) -> None:
    """Run every program once that texts within the buckets for prompts can need."""
    sizes = score_sizes(model.settings.target, buckets, max_positions, buckets.prompt[-1])
    for rows, width in sizes.blocks:
        block = Block(rows, width, 1, ())
        jax.block_until_ready(score_program(model, rows, width)(_inputs(model, (), block), {})[0])


# -- running -----------------------------------------------------------------------------------


def check_scores(model: CompiledModel) -> None:
    """A text can be scored, padded and beside others.

    Raises:
        RequestError: the flow reads more than tokens. DeriveError: a token may see those behind it, or rows each other.
    """
    if required := [name for name, d in declared(model).items() if not d.optional]:
        raise RequestError(f"score: {model.name} reads {listing(required)} beside tokens; score takes texts alone")
    model.programs.any_template(model.name, "prefill")  # what is proved before one is derived


def scores_of(speaker: Speaker, items: Sequence[ScoredTokens]) -> tuple[list[Score], RequestReport]:
    """The score of each item, in order, and how fast that was.

    Raises:
        RequestError, DeriveError: as `check_scores`. RecompileError: as `score_sizes`. NumericsError: as `score_all`.
    """
    model = speaker.model
    clock = model.programs.clock()
    check_scores(model)
    longest = max((item.width for item in items), default=1)
    sizes = score_sizes(model.settings.target, speaker.buckets, speaker.max_positions, longest)
    rows = shared_rows(items)
    scores = score_all(model, items, rows, sizes)
    seconds, compiled = clock()
    every, read = sum(item.width for item in items), sum(len(row.read) for row in rows)
    told = RequestReport("texts", len(items), every, seconds, compiled=compiled, cached_tokens=every - read)
    return scores, told


def score_all(
    model: CompiledModel, items: Sequence[ScoredTokens], rows: Sequence[SharedRow], sizes: BlockSizes
) -> list[Score]:
    """The score of each item, in order, of which `rows` are made.

    Raises:
        NumericsError: logits are not finite; `outputs` has the others, and None for these.
    """
    found: list[Score | None] = [None] * len(items)
    failed: dict[int, int] = {}
    places: list[str] = []
    for block, results in _results(model, rows, score_calls([len(row.read) for row in rows], sizes)):
        for place, (number,) in enumerate(block.texts):
            row = rows[number]
            for text, ending in row.texts:
                item = items[text]
                values, likeliest = results.of(place, slice(item.start - 1, item.width), ending)
                if np.isnan(values).any():
                    failed[text] = int(np.isnan(values).argmax())
                    read = item.first + item.start + failed[text]
                    places.append(f"{item.name} (first behind {read:,} tokens)")
                    continue
                numbers = tuple(values.tolist())
                found[text] = Score(math.fsum(numbers), bool(likeliest.all()), item.ids[item.start :], numbers)
    if failed:
        more = f" and {len(places) - 8} more" if len(places) > 8 else ""
        told = f"logits are not finite of {', '.join(places[:8])}{more}"
        raise NumericsError(f"score: {told}; `outputs` of this error has the other scores", failed, found)
    return [score for score in found if score is not None]


@dataclass(frozen=True)
class SharedRow:
    """Tokens that are read once, and those that stand behind them: the first one and others. Of each text its number,
    and the place of its last token among the others; None for the first."""

    read: tuple[int, ...]
    ends: list[int]
    texts: list[tuple[int, int | None]]


def shared_rows(items: Sequence[ScoredTokens]) -> list[SharedRow]:
    """A row for all texts that differ in their last token alone, with up to `MOST_OTHERS` beside the first."""
    last: dict[tuple[int, ...], SharedRow] = {}
    rows: list[SharedRow] = []
    for text, item in enumerate(items):
        read, end = item.ids[:-1], item.ids[-1]
        row = last.get(read)
        if row is None or (end not in row.ends and len(row.ends) > MOST_OTHERS):
            row = last[read] = SharedRow(read, [], [])
            rows.append(row)
        if end not in row.ends:
            row.ends.append(end)
        place = row.ends.index(end)
        row.texts.append((text, place - 1 if place else None))
    return rows


@dataclass(frozen=True)
class JudgedCall:
    """What a call gives, on the host; see `ScoreTokens`."""

    log_probs: np.ndarray[Any, Any]
    likeliest: np.ndarray[Any, Any]
    others: np.ndarray[Any, Any]
    others_likeliest: np.ndarray[Any, Any]

    def of(self, row: int, span: slice, other: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Log-probabilities and flags of a text's tokens; `other`: the last one is that of the others."""
        values, flags = self.log_probs[row, span], self.likeliest[row, span]
        if other is not None:
            values, flags = values.copy(), flags.copy()
            values[-1], flags[-1] = self.others[row, other], self.others_likeliest[row, other]
        return values, flags


def _results(
    model: CompiledModel, rows: Sequence[SharedRow], blocks: Iterable[Block]
) -> Iterator[tuple[Block, JudgedCall]]:
    """What each call gives; the next ones run while the host looks at it."""
    running: deque[tuple[Block, tuple[Any, ...]]] = deque()
    for block in blocks:
        made, _ = score_program(model, block.rows, block.width)(_inputs(model, rows, block), {})
        running.append((block, made))
        if len(running) > AHEAD:
            yield _fetched(*running.popleft())
    while running:
        yield _fetched(*running.popleft())


def _fetched(block: Block, made: tuple[Any, ...]) -> tuple[Block, JudgedCall]:
    return block, JudgedCall(*jax.device_get(made))


def _inputs(model: CompiledModel, rows: Sequence[SharedRow], block: Block) -> Mapping[str, Any]:
    empty: list[tuple[int, ...]] = [(0,)] * (block.rows - len(block.texts))
    own = [rows[number] for (number,) in block.texts]
    read = [row.read for row in own] + empty
    return {
        model.flow.inputs[0].name: pad_rows(read, block.width),
        AIM: pad_rows([(*row.read[1:], row.ends[0]) for row in own] + empty, block.width),
        LAST: np.array([len(row) - 1 for row in read], np.int32),
        OTHERS: pad_rows([row.ends[1:] for row in own] + [()] * len(empty), MOST_OTHERS),
    }


# -- perplexity --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextWindow:
    """Tokens that are read together, and how many of them no window before has."""

    tokens: ScoredTokens
    new: int


def strides(ids: Sequence[int], stride: int, context: int) -> list[TextWindow]:
    """Windows of `context` tokens, each `stride` behind the one before, of which the tokens are scored that no window
    before them has. The first token of a window has nothing before it, and a window of no more than that is left out.
    """
    windows, end = [], 0
    for begin in range(0, len(ids), stride):
        seen, end = end, min(begin + context, len(ids))
        start = max(1, seen - begin)
        if start < end - begin:
            windows.append(TextWindow(ScoredTokens(tuple(ids[begin:end]), start, "the text", begin), end - seen))
        if end == len(ids):
            break
    return windows


def perplexity_windows(speaker: Speaker, text: Any, stride: Any, context: Any) -> list[TextWindow]:
    """The windows that `CausalLM.perplexity` reads; arguments as there.

    Raises:
        RequestError, TokenIdError, SequenceLengthError: as there.
    """
    if context is None and speaker.max_positions is None:
        raise RequestError("perplexity: the model has no longest text; pass context=, the tokens of a window")
    size = speaker.max_positions if context is None else whole_number("context", context, 2)
    assert size is not None
    check_positions(size, speaker.max_positions, "perplexity: context")
    step = max(1, size // 2) if stride is None else whole_number("stride", stride, 1)
    if step > size:
        raise RequestError(f"stride is {step}, over the {size} tokens of a window: those between would be left out")
    ids = text_ids(speaker, text, "text")
    if len(ids) < 2:
        raise RequestError(f"perplexity: a text of {len(ids)} tokens has none to predict; pass 2 at least")
    return strides(ids, step, size)


def perplexity_of(windows: Sequence[TextWindow], scores: Sequence[Score]) -> float:
    """exp of the mean negative log-likelihood, as Hugging Face's page on perplexity takes it: of the means of the
    windows, each counted with its new tokens less one."""
    total = math.fsum(s.log_likelihood / len(s.tokens) * (w.new - 1) for w, s in zip(windows, scores, strict=True))
    return math.exp(-total / sum(window.new - 1 for window in windows))
