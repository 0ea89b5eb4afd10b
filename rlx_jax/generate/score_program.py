"""Which texts to score stand in which calls, and the program that scores them.

Texts are packed in rows, of few sizes, at most eight for all texts. A row holds one text where the flow has no program
for several. The program reads rows of tokens up to the head, then the logits of a piece of the tokens at a time, so
that two numbers leave it for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import head_operands
from rlx_jax.compiler.settings import Buckets
from rlx_jax.encode.packing import FULL, MOST, Block, BlockSizes, apart, costs_on, packed_rows, plan, sizes_for
from rlx_jax.errors import GraphError, RequestError, shown
from rlx_jax.generate.request import LanguageModel
from rlx_jax.ir.types import is_static
from rlx_jax.losses import InPieces, count_pieces, logits_of_piece, split_tokens
from rlx_jax.lowering.hir.row_layouts import POSITIONS, SEGMENTS
from rlx_jax.lowering.mir.head import Head
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.text.request_checks import as_known_arrays, id_list
from rlx_jax.text.token_model import check_positions

# Tokens that may stand behind those that a text reads, beside the first one.
MOST_OTHERS = 16
# The widest row that texts share: which pairs of tokens see each other is an array, of the square of that.
SHARED = 2048
# Widths of rows of one text, for models of up to 8192 positions and for others.
SHORT, LONG = (64, 128, 256, 512, 1024, 2048, 8192), (64, 128, 512, 2048, 8192, 32768, 131072)
# Widths of programs of one row, beside those of full calls: for what is left over, and for a text alone.
ALONE = (64, 512)


# -- what texts share --------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTokens:
    """Tokens that are read once, and those that stand behind them: the first one and others. Of each text its number,
    and the place of its last token among the others; None for the first."""

    read: tuple[int, ...]
    ends: list[int]
    texts: list[tuple[int, int | None]]


def shared_tokens(items: Sequence[ScoredTokens]) -> list[SharedTokens]:
    """One for all texts that differ in their last token alone, with up to `MOST_OTHERS` beside the first."""
    last: dict[tuple[int, ...], SharedTokens] = {}
    found: list[SharedTokens] = []
    for text, item in enumerate(items):
        read, end = item.ids[:-1], item.ids[-1]
        one = last.get(read)
        if one is None or (end not in one.ends and len(one.ends) > MOST_OTHERS):
            one = last[read] = SharedTokens(read, [], [])
            found.append(one)
        if end not in one.ends:
            one.ends.append(end)
        place = one.ends.index(end)
        one.texts.append((text, place - 1 if place else None))
    return found


# -- sizes -------------------------------------------------------------------------------------


def score_sizes(target: str, buckets: Buckets, max_positions: int | None, longest: int, above: int = 0) -> BlockSizes:
    """Of rows of one text, for texts of more than `above` and up to `longest` tokens: at most eight programs, of full
    calls of each width and of one row; with buckets those of their sizes. A text over all widths, which is one over all
    buckets or over 131072 tokens of a model without a limit, has a width of its own.

    Raises:
        RequestError: a text is over the largest bucket, and `on_recompile` is `error`.
    """
    costs = costs_on(target)
    closed = buckets.on_recompile == "error"
    if buckets.prompt and closed and longest > buckets.prompt[-1]:
        raise RequestError(
            f"score: a text of {longest} tokens, and buckets.prompt = {list(buckets.prompt)}; score less at once, or "
            "add a bucket to the profile"
        )
    is_long = max_positions is None or max_positions > SHORT[-1]
    widths = list(buckets.prompt or (LONG if is_long else SHORT))
    if max_positions is not None and not buckets.prompt:
        widths = [w for w in widths if w < max_positions]
        widths = [*widths[: 6 if max_positions > LONG[-1] else None], max_positions]
    while widths[-1] < longest:
        widths.append(min(4 * widths[-1], max_positions or 4 * longest))
    widths = [width for width in widths if width > above]
    if buckets.batch:
        blocks = {(rows, width) for rows in buckets.batch for width in widths}
    else:
        full = {(max(1, costs.tokens // width), width) for width in widths}
        alone = {(1, width) for width in ALONE[: MOST - len(widths)] if width in widths and not buckets.prompt}
        blocks = {(buckets.rows(rows), width) for rows, width in full | alone}
    return BlockSizes(tuple(sorted(blocks)), costs.tokens, replace(costs, slot=FULL))


# -- forms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreForm:
    """How texts are laid out and run: by the program `packed` of a model, several in a row, or by `forward`."""

    model: CompiledModel
    sizes: BlockSizes

    @property
    def shared(self) -> bool:
        """Whether a row holds several texts."""
        return self.model.program == "packed"

    def plan(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """The cheapest calls."""
        return plan([self._room(text) for text in texts], self.sizes)

    def apart(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """Calls of a shared form in which no text is in the row of another."""
        return apart([self._room(text) for text in texts], self.sizes)

    def _room(self, text: SharedTokens) -> int:
        """Tokens of a row that a text takes: a row has one of the other ends for each slot."""
        return max(len(text.read), self.sizes.costs.slot * (len(text.ends) - 1) if self.shared else 0)

    def program(self, rows: int, width: int) -> BoundProgram:
        """See `score_program`."""
        more = (SEGMENTS.input, POSITIONS.input) if self.shared else ()
        return score_program(self.model, (self.model.first_input, *more), rows, width)

    def inputs(self, block: Block, texts: Sequence[SharedTokens]) -> Mapping[str, Any]:
        """What the program of a block reads."""
        rows = [[texts[number] for number in numbers] for numbers in block.texts]
        tokens, segments, positions = packed_rows(block, [[text.read for text in row] for row in rows])
        aim, *_ = packed_rows(block, [[(*text.read[1:], text.ends[0]) for text in row] for row in rows])
        slots = self.sizes.slots(block.width) if self.shared else MOST_OTHERS
        others, places = np.zeros((2, block.rows, slots), np.int32)
        for place in places_in(block, texts):
            text = texts[place.text]
            more = slice(place.other, place.other + len(text.ends) - 1)
            others[place.row, more], places[place.row, more] = text.ends[1:], place.first + len(text.read) - 1
        known = {self.model.first_input: tokens, AIM: aim, OTHERS: others, PLACES: places}
        return known | {SEGMENTS.input: segments, POSITIONS.input: positions} if self.shared else known


@dataclass(frozen=True)
class TextPlace:
    """Where a text stands in a block: its row, and its first token and the first of its other ends there."""

    text: int
    row: int
    first: int
    other: int


def places_in(block: Block, texts: Sequence[SharedTokens]) -> Iterator[TextPlace]:
    """Those of all texts of a block, one behind the other in each row."""
    for row, numbers in enumerate(block.texts):
        first = other = 0
        for text in numbers:
            yield TextPlace(text, row, first, other)
            first, other = first + len(texts[text].read), other + len(texts[text].ends) - 1


def forms_for(
    model: CompiledModel, buckets: Buckets, max_positions: int | None, longest: int
) -> tuple[ScoreForm | None, ScoreForm | None]:
    """The form in which texts of up to `SHARED` tokens share rows, if there is one, and that of all others, if the
    first one does not do for all of up to `longest` tokens.

    Raises:
        RequestError: as `score_sizes`.
    """
    target = model.settings.target
    if buckets.batch or buckets.prompt or model.programs.why_not(model.name, "packed"):
        return None, ScoreForm(model, score_sizes(target, buckets, max_positions, longest))
    wide, shared = shared_sizes(target, buckets.share, max_positions, longest)
    return ScoreForm(model.as_program("packed"), shared), None if wide is None else ScoreForm(model, wide)


def shared_sizes(
    target: str, share: int, max_positions: int | None, longest: int
) -> tuple[BlockSizes | None, BlockSizes]:
    """Of rows of one text, for those of over `SHARED` tokens where the model reads such, and of rows of several."""
    wide, most, costs = None, MOST, costs_on(target)
    if max_positions is None or max_positions > SHARED:
        wide = score_sizes(target, Buckets(share=share), max_positions, longest, above=SHARED)
        most = MOST - len(wide.blocks)
    # However few positions there are, a row has room for all other ends of a text.
    widest = min(max(max_positions or SHARED, MOST_OTHERS * costs.slot), SHARED)
    return wide, sizes_for(costs, widest, share=share, most=most)


# Tokens whose logits are made at a time, on each device; what is not known is taken for a GPU. Every piece reads the
# weight of the head, which takes a GPU as long as the products of some 250 tokens. On a CPU a small piece stays in its
# cache.
PIECE = {"cpu": 128, "cuda": 512}
# The input that has the token after each token. It stands beside those of the flow, which may be called anything.
AIM = "score.aim"
# The inputs that have other tokens, and the place in the row of the token that each of them may stand behind.
OTHERS, PLACES = "score.others", "score.places"


@dataclass(frozen=True)
class ScoreTokens:
    """Around a program of the inputs `reads`: the log-probability `[B, S]` f32 of the token in `AIM` `[B, S]` behind
    each token, NaN where logits are not finite, and whether it is the likeliest one `[B, S]` bool; and the same
    `[B, K]` of the tokens in `OTHERS` `[B, K]` behind those at `PLACES` `[B, K]`.

    With `pieces` the program ends at its head, and the logits of a piece of the tokens are made at a time; else they
    are its output.
    """

    reads: tuple[str, ...]
    pieces: InPieces | None

    def arguments(self) -> Mapping[str, str]:
        """See `rlx_jax.compiler.executable.SaysArguments`."""
        return {"scoring": "True"}

    def __call__(self, forward: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            made, state = forward(params, state, {name: inputs[name] for name in self.reads})
            how, aim, others, places = self.pieces, inputs[AIM], inputs[OTHERS], inputs[PLACES]
            if how is None:
                return judged(made[0].astype(jnp.float32), aim, others, places), state
            hidden, kernel, *bias = made
            operands = head_operands(how.head, kernel, bias[0] if bias else None)

            def piece(first: Any, part: tuple[Any, Any]) -> tuple[Any, tuple[Any, ...]]:
                logits, _back = logits_of_piece(how, part[0], operands)
                return first + logits.shape[1], judged(logits, part[1], others, places - first)

            _, found = lax.scan(piece, jnp.int32(0), split_tokens(how, hidden, aim))
            each, likeliest, other, other_likeliest = found
            return (joined(each, aim.shape), joined(likeliest, aim.shape), other.sum(0), other_likeliest.any(0)), state

        return function


def judged(
    logits: jax.Array, aim: jax.Array, others: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits `[B, c, V]` f32, and a token for each `[B, c]`: its log-probability, and whether it is the likeliest; of
    several that are, the smallest id is, as in greedy decoding. The same of the tokens `others` `[B, K]` behind
    `places` `[B, K]`; zeros where that is none of `[0, c)`."""
    lse, best = jax.nn.logsumexp(logits, axis=-1), likeliest_id(logits)
    chosen = jnp.take_along_axis(logits, aim[..., None], axis=-1, mode="clip")[..., 0]
    inside = (places >= 0) & (places < logits.shape[1])
    at = jnp.clip(places, 0, logits.shape[1] - 1)
    other = jax.vmap(lambda x, place, word: x.at[place, word].get(mode="clip"))(logits, at, others)
    lse_at, best_at = (jnp.take_along_axis(x, at, axis=1, mode="clip") for x in (lse, best))
    found = jnp.where(inside, log_prob(other, lse_at), 0.0)
    return log_prob(chosen, lse), best == aim, found, inside & (best_at == others)


def likeliest_id(logits: jax.Array) -> jax.Array:
    """`[…, V]` f32 → `[…]` int32, the first id with the largest logit; none of them where that is NaN.

    Two reductions of floats: XLA makes one loop for the CPU of `argmax` that is not in vectors, and takes five times as
    long. f32 holds ids below 2²⁴.
    """
    words = logits.shape[-1]
    if words >= 2**24:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    from_end = lax.broadcasted_iota(jnp.float32, logits.shape, logits.ndim - 1)
    from_end = jnp.float32(words - 1) - from_end
    largest = logits.max(axis=-1, keepdims=True)
    return words - 1 - jnp.where(logits == largest, from_end, jnp.float32(-1)).max(axis=-1).astype(jnp.int32)


def log_prob(chosen: jax.Array, lse: jax.Array) -> jax.Array:
    """Of a token with the logit `chosen`, NaN where logits are not finite."""
    return jnp.where(jnp.isfinite(lse) & (chosen < jnp.inf), chosen - lse, jnp.nan)


def joined(pieces: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[n, B, c]` → `[B, S]`, without what fills up the last piece."""
    return pieces.swapaxes(0, 1).reshape(shape[0], -1)[:, : shape[1]]


def score_program(model: CompiledModel, reads: tuple[str, ...], rows: int, width: int) -> BoundProgram:
    """The program of `model`, which reads these inputs, for this many rows and tokens.

    Raises:
        RequestError: it is not compiled, and the profile wants that told.
    """
    key = model.sized({"batch": rows, "seq": width}, Variant(last_only=False, outputs=model.output_names[:1]))
    try:
        pieces = _in_pieces(model, model.template().head, rows, width)
    except GraphError:  # the output is not a product
        pieces = None
    return model.bind(replace(key, headless=pieces is not None, around=ScoreTokens(reads, pieces)))


def _in_pieces(model: CompiledModel, head: Head, rows: int, width: int) -> InPieces | None:
    """How the logits of a head are taken; None where it cannot be taken in pieces."""
    division = model.programs.division
    if head.type.rank != 3 or not is_static(head.type.shape[-1]):
        return None
    words = int(head.type.shape[-1])
    room = 4 * words * PIECE.get(model.settings.target, PIECE["cuda"])
    count = count_pieces((rows, width), None, words, division, room)
    return InPieces(head, count, int(head.words), 0.0, division)


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids of which those from `start` on, which is at least 1, are scored behind all that stand before them.

    `name` is what messages call them, and `first` how many tokens of the text stand before the first one. Of a window
    of a longer text, `new` are the tokens that no window before it has.
    """

    ids: tuple[int, ...]
    start: int
    name: str = "texts"
    first: int = 0
    new: int = 0

    @property
    def width(self) -> int:
        """Tokens that the model reads: the last one has nothing behind it to predict."""
        return len(self.ids) - 1


def scored_tokens(lm: LanguageModel, texts: Any) -> tuple[list[ScoredTokens], bool]:
    """The tokens of each item, and whether it is one that stands alone.

    Raises:
        RequestError: neither texts, nor ids, nor pairs of them; nothing to score; no tokenizer, or no begin token.
        TokenIdError: an id that the model does not have. SequenceLengthError: an item is over the model's positions.
    """
    texts = as_known_arrays("texts", texts)
    single = _is_one(texts)
    if not single and not isinstance(texts, list | tuple | np.ndarray | jax.Array):
        raise RequestError(
            "score: expected a string, token ids, a pair (context, continuation), or a list of them, got "
            f"{shown(texts)}"
        )
    items = [texts] if single else list(texts)
    found = [_read(lm, item, "texts" if single else f"texts[{i}]") for i, item in enumerate(items)]
    for item in found:
        # As in lm-evaluation-harness: the last token is not read, and may stand one behind the last position.
        check_positions(item.width, lm.max_positions, f"{item.name}: {len(item.ids)} tokens, the last one not read")
    return found, single


def text_ids(lm: LanguageModel, text: Any, what: str) -> list[int]:
    """The ids of a string, with the special tokens that the tokenizer puts around it, or ids as they are."""
    if isinstance(text, str):
        text = lm.needed("strings need").encode(text)
    return id_list(text, lm.vocab_size, what)


def first_id(lm: LanguageModel) -> int:
    """What stands before a text that has nothing before it: the begin token, or else the end token.

    Raises:
        RequestError: there is neither.
    """
    if lm.bos_id is not None:
        return lm.bos_id
    if lm.eos_ids:
        return lm.eos_ids[0]
    raise RequestError(
        "score: an empty context stands for the begin token, or else the end token, and the model has neither; "
        "pass bos_id= or eos_ids= to CausalLM"
    )


def pair_ids(lm: LanguageModel, context: Any, continuation: Any, what: str) -> ScoredTokens:
    """A context and its continuation.

    Of strings, spaces at the end of the context belong to the continuation, both are tokenised as one text, and the
    continuation is what goes beyond the tokens of the context alone, as in lm-evaluation-harness. Of a context of
    spaces nothing is left, and then the first token stands before it unless the tokenizer puts one there.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise RequestError(f"{what}: a context and a continuation are both strings or both ids, got {shown(context)}")
    if not isinstance(context, str):
        before, behind = (text_ids(lm, part, f"{what}[{i}]") for i, part in enumerate((context, continuation)))
        before = before or [first_id(lm)]
    elif context:
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        whole, before = (text_ids(lm, text, what) for text in (context + continuation, context))
        before, behind = whole[: len(before)] or [first_id(lm)], whole[len(before) :]
    else:
        encoded = lm.needed("strings need").encode(continuation, add_special_tokens=False)
        behind = id_list(encoded, lm.vocab_size, what)
        before = [first_id(lm)]
        if behind[:1] == before:  # the text brings its own
            del behind[0]
    if not behind:
        raise RequestError(f"{what}: the continuation has no tokens of its own, so that there is nothing to score")
    return ScoredTokens((*before, *behind), len(before), what)


def _read(lm: LanguageModel, item: Any, what: str) -> ScoredTokens:
    if _is_pair(item):
        context, continuation = item
        return pair_ids(lm, context, continuation, what)
    if not _is_one(item):
        raise RequestError(f"{what}: expected a string, token ids or a pair (context, continuation), got {shown(item)}")
    ids = text_ids(lm, item, what)
    if len(ids) < 2:
        raise RequestError(
            f"{what}: {len(ids)} tokens, and the first of a text is given, not scored; pass 2, or a pair: "
            "('', text) scores all tokens of a text behind the begin token"
        )
    return ScoredTokens(tuple(ids), 1, what)


def _is_pair(item: Any) -> bool:
    """A tuple of two texts, or of two lists of ids."""
    return isinstance(item, tuple) and len(item) == 2 and not any(isinstance(part, int | np.integer) for part in item)


def _is_one(item: Any) -> bool:
    """A string, a list of ids, or a pair."""
    if isinstance(item, str) or _is_pair(item):
        return True
    if isinstance(item, np.ndarray | jax.Array):
        return item.ndim == 1 and item.dtype.kind in "iu"
    kinds = set(map(type, item)) if isinstance(item, list | tuple) else set()
    return bool(kinds) and all(issubclass(kind, int | np.integer) for kind in kinds)
