"""`ScoreForm` and `score_program`: texts are packed into calls for scoring, and a program scores them.

Texts are packed into rows of few sizes, at most eight for all texts. A row has one text where the flow has no program
for several. The program computes hidden states up to the head, and then the logits of one chunk of tokens at a time, so
that it returns two numbers per token and never materializes all logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import head_operands
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.packing import (
    MAX_BLOCK_SIZES,
    ONE_TEXT_PER_ROW,
    Block,
    BlockSizes,
    costs_on,
    pack_rows,
    plan_blocks,
    plan_one_per_row,
    sizes_for,
)
from rlx_jax.errors import RequestError
from rlx_jax.generate.decode_state import resize_state
from rlx_jax.generate.prefix_cache import Prefix
from rlx_jax.generate.request import LanguageModel
from rlx_jax.ir.types import is_static
from rlx_jax.losses.chunked import LossChunking, chunk_logits, count_chunks, split_tokens
from rlx_jax.lowering.hir.row_layouts import POSITIONS, SEGMENTS
from rlx_jax.lowering.mir.head import Head
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.program_key import Variant

# The most alternative last tokens of one prefix, in addition to the first one.
MAX_ALTERNATIVES = 16
# The widest row that texts share: the attention mask between its tokens takes memory quadratic in the width.
MAX_SHARED_WIDTH = 2048
# Widths of rows with one text, for models of up to 8192 positions and for others.
SHORT_WIDTHS, LONG_WIDTHS = (64, 128, 256, 512, 1024, 2048, 8192), (64, 128, 512, 2048, 8192, 32768, 131072)
# Rows after a prefix copy its cache: a call has caches of so many times the tokens of other calls.
PREFIX_TOKENS = 8
# Widths of additional programs of one row, for the texts left over after full calls, and for a single text.
SINGLE_ROW_WIDTHS = (64, 512)


# -- texts ----------------------------------------------------------------


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids to score, given the ids before them.

    Attributes:
        ids: context and continuation.
        start: index of the first id that is scored, at least 1.
        name: the text in error messages.
        offset: number of tokens of the text before `ids`, for a window of a longer text.
        num_new: number of tokens that no earlier window of the text has.
    """

    ids: tuple[int, ...]
    start: int
    name: str = "texts"
    offset: int = 0
    num_new: int = 0

    @property
    def width(self) -> int:
        """Return the number of tokens that the model reads: all but the last one, after which nothing is predicted."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class SharedTokens:
    """A prefix that the model reads once, for several texts that differ in their last token alone.

    Attributes:
        prefix: ids of the prefix.
        last_tokens: the different last tokens; the first one is scored as the next token, the others as alternatives.
        items: for each text its index, and the index of its last token in `last_tokens[1:]`; None for
            `last_tokens[0]`.
    """

    prefix: tuple[int, ...]
    last_tokens: list[int]
    items: list[tuple[int, int | None]]


def group_by_prefix(items: Sequence[ScoredTokens], numbers: Sequence[int]) -> list[SharedTokens]:
    """Group texts of some numbers that differ in their last token alone.

    A group has up to `MAX_ALTERNATIVES` + 1 different last tokens.
    """
    latest_by_prefix: dict[tuple[int, ...], SharedTokens] = {}
    groups: list[SharedTokens] = []
    for text in numbers:
        item = items[text]
        prefix, last_token = item.ids[:-1], item.ids[-1]
        group = latest_by_prefix.get(prefix)
        if group is None or (last_token not in group.last_tokens and len(group.last_tokens) > MAX_ALTERNATIVES):
            group = latest_by_prefix[prefix] = SharedTokens(prefix, [], [])
            groups.append(group)
        if last_token not in group.last_tokens:
            group.last_tokens.append(last_token)
        index = group.last_tokens.index(last_token)
        group.items.append((text, index - 1 if index else None))
    return groups


# -- sizes -------------------------------------------------------------------------------------


def score_sizes(target: str, buckets: Buckets, max_positions: int | None, longest: int, above: int = 0) -> BlockSizes:
    """Choose the block sizes for rows of one text, for texts of more than `above` and up to `longest` tokens.

    There are at most eight: a full call for each width, and some with one row. With buckets, the sizes are the buckets.
    A text longer than all widths gets an additional width: this happens over the largest bucket, or over 131072 tokens
    for a model without a limit.

    Raises:
        RequestError: a text is over the largest bucket, and `on_recompile` is `error`.
    """
    costs = costs_on(target)
    forbids_recompile = buckets.on_recompile == "error"
    if buckets.prompt and forbids_recompile and longest > buckets.prompt[-1]:
        raise RequestError(
            f"score: a text of {longest} tokens, and buckets.prompt = {list(buckets.prompt)}; score less at once, or "
            "add a bucket to the profile"
        )
    is_long = max_positions is None or max_positions > SHORT_WIDTHS[-1]
    widths = list(buckets.prompt or (LONG_WIDTHS if is_long else SHORT_WIDTHS))
    if max_positions is not None and not buckets.prompt:
        widths = [w for w in widths if w < max_positions]
        widths = [*widths[: 6 if max_positions > LONG_WIDTHS[-1] else None], max_positions]
    while widths[-1] < longest:
        widths.append(min(4 * widths[-1], max_positions or 4 * longest))
    widths = [width for width in widths if width > above]  # shorter texts share rows in other blocks
    if buckets.batch:
        blocks = {(rows, width) for rows in buckets.batch for width in widths}
    else:
        full = {(max(1, costs.tokens // width), width) for width in widths}
        singles = () if buckets.prompt else SINGLE_ROW_WIDTHS[: MAX_BLOCK_SIZES - len(widths)]
        single_row = {(1, width) for width in singles if width in widths}
        blocks = {(buckets.rows(rows), width) for rows, width in full | single_row}
    return BlockSizes(tuple(sorted(blocks)), costs.tokens, replace(costs, tokens_per_slot=ONE_TEXT_PER_ROW))


# -- forms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreForm:
    """A program for scoring and its block sizes.

    The program is `packed` with several texts in a row, `forward` with one, or `extend` with one after a prefix.
    """

    model: CompiledModel
    sizes: BlockSizes
    prefix: Prefix | None = None

    @property
    def packed(self) -> bool:
        """Return whether a row may have several texts."""
        return self.model.program == "packed"

    def plan(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """Return the cheapest calls for these texts."""
        return plan_blocks([self._required_width(text) for text in texts], self.sizes)

    def plan_one_per_row(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """Return calls that place every text in a row of its own, although rows could be shared."""
        return plan_one_per_row([self._required_width(text) for text in texts], self.sizes)

    def _required_width(self, text: SharedTokens) -> int:
        """Return the tokens of a row that a text needs: the row has room for one alternative end in each slot."""
        for_ends = self.sizes.costs.tokens_per_slot * (len(text.last_tokens) - 1) if self.packed else 0
        return max(len(text.prefix), for_ends)

    def program(self, rows: int, width: int) -> BoundProgram:
        """Return the program for blocks of this size; see `score_program`."""
        row_inputs: tuple[str, ...] = (SEGMENTS.input, POSITIONS.input) if self.packed else ()
        sizes = {"batch": rows, "seq": width}
        if self.prefix is not None:
            row_inputs, sizes["context"] = ("lengths",), len(self.prefix.ids) + width
        return score_program(self.model, (self.model.first_input, *row_inputs), sizes)

    def run(self, block: Block, texts: Sequence[SharedTokens]) -> tuple[Any, ...]:
        """Run the program for a block, without waiting for the results."""
        program, state = self.program(block.rows, block.width), {}
        if self.prefix is not None:
            assert self.prefix.arrays is not None
            state = resize_state(program, self.prefix.arrays, np.full(block.rows, self.prefix.row, np.int32))
        outputs, _ = program(self.inputs(block, texts), state)
        return outputs

    def inputs(self, block: Block, texts: Sequence[SharedTokens]) -> Mapping[str, Any]:
        """Return the inputs of the program for a block."""
        rows = [[texts[number] for number in numbers] for numbers in block.texts]
        tokens, segments, positions = pack_rows(block, [[text.prefix for text in row] for row in rows])
        targets, *_ = pack_rows(block, [[(*text.prefix[1:], text.last_tokens[0]) for text in row] for row in rows])
        slots = self.sizes.slots(block.width) if self.packed else MAX_ALTERNATIVES
        alternatives, columns = np.zeros((2, block.rows, slots), np.int32)
        for location in locate_texts(block, texts):
            text = texts[location.text]
            span = slice(location.alternative_column, location.alternative_column + len(text.last_tokens) - 1)
            alternatives[location.row, span] = text.last_tokens[1:]
            columns[location.row, span] = location.column + len(text.prefix) - 1
        arrays = {self.model.first_input: tokens, TARGETS: targets}
        arrays |= {ALTERNATIVES: alternatives, ALTERNATIVE_COLUMNS: columns}
        if self.prefix is not None:
            lengths = [sum(len(text.prefix) for text in row) for row in rows]
            arrays["lengths"] = np.array(lengths + [0] * (block.rows - len(rows)), np.int32)
        return arrays | {SEGMENTS.input: segments, POSITIONS.input: positions} if self.packed else arrays


@dataclass(frozen=True)
class TextLocation:
    """The location of a text in a block: its row, the column of its first token and of its first alternative end."""

    text: int
    row: int
    column: int
    alternative_column: int


def locate_texts(block: Block, texts: Sequence[SharedTokens]) -> Iterator[TextLocation]:
    """Yield the location of every text of a block; the texts of a row follow each other."""
    for row, numbers in enumerate(block.texts):
        column = other_column = 0
        for text in numbers:
            yield TextLocation(text, row, column, other_column)
            column, other_column = column + len(texts[text].prefix), other_column + len(texts[text].last_tokens) - 1


# Texts, grouped by common prefix, and the form to score them with.
ScorePart = tuple[ScoreForm, Sequence[SharedTokens]]


def score_parts(lm: LanguageModel, texts: Sequence[SharedTokens]) -> list[ScorePart]:
    """Return the texts that share rows, and all others, with their forms.

    Texts of up to `MAX_SHARED_WIDTH` tokens share rows if the flow has a program `packed`, and no buckets prescribe
    other sizes.

    Raises:
        RequestError: as `score_sizes`.
    """
    model, buckets, target = lm.model, lm.buckets, lm.model.settings.target
    longest = max((len(text.prefix) for text in texts), default=1)
    if buckets.batch or buckets.prompt or model.programs.derivation_error(model.name, "packed"):
        return [(ScoreForm(model, score_sizes(target, buckets, lm.max_positions, longest)), texts)]
    wide_sizes, shared = shared_sizes(target, buckets.row_multiple, lm.max_positions, longest)
    narrow = [text for text in texts if len(text.prefix) <= shared.widths[-1]]
    wide = [text for text in texts if len(text.prefix) > shared.widths[-1]]
    parts: list[ScorePart] = [(ScoreForm(model.as_program("packed"), shared), narrow)]
    return parts if wide_sizes is None else [*parts, (ScoreForm(model, wide_sizes), wide)]


def prefix_part(lm: LanguageModel, prefix: Prefix, texts: Sequence[SharedTokens]) -> ScorePart:
    """Return texts after a prefix with their form."""
    left = None if lm.max_positions is None else lm.max_positions - len(prefix.ids)
    longest = max(len(text.prefix) for text in texts)
    sizes = score_sizes(lm.model.settings.target, Buckets(row_multiple=lm.buckets.row_multiple), left, longest)
    most = PREFIX_TOKENS * sizes.costs.tokens
    rows = {width: lm.buckets.rows(max(1, most // (len(prefix.ids) + width))) for _, width in sizes.blocks}
    blocks = {(min(count, rows[width]), width) for count, width in sizes.blocks}
    return ScoreForm(lm.model.as_program("extend"), replace(sizes, blocks=tuple(sorted(blocks))), prefix), texts


def shared_sizes(
    target: str, share: int, max_positions: int | None, longest: int
) -> tuple[BlockSizes | None, BlockSizes]:
    """Choose the block sizes for rows of one text, and for rows of several texts.

    The former are for texts of over `MAX_SHARED_WIDTH` tokens; None where the model has fewer positions.
    """
    wide_sizes, max_shared, costs = None, MAX_BLOCK_SIZES, costs_on(target)
    if max_positions is None or max_positions > MAX_SHARED_WIDTH:
        wide_sizes = score_sizes(target, Buckets(row_multiple=share), max_positions, longest, above=MAX_SHARED_WIDTH)
        max_shared = MAX_BLOCK_SIZES - len(wide_sizes.blocks)
    # Even for a model of few positions, a row has room for all alternative ends of a text.
    widest = min(max(max_positions or MAX_SHARED_WIDTH, MAX_ALTERNATIVES * costs.tokens_per_slot), MAX_SHARED_WIDTH)
    return wide_sizes, sizes_for(costs, widest, share=share, max_block_sizes=max_shared)


# Tokens per chunk of logits, on each device; an unknown target is treated as a GPU. Every chunk loads the weight of the
# head, which takes a GPU as long as the matrix product of some 250 tokens. On a CPU the logits of a small chunk stay in
# its cache.
CHUNK_TOKENS = {"cpu": 128, "cuda": 512}
# Input with the next token of each token. The dot avoids clashes with inputs of the flow, which may have any names.
TARGETS = "score.targets"
# Inputs with alternative tokens, and the column of the token that each of them follows.
ALTERNATIVES, ALTERNATIVE_COLUMNS = "score.alternatives", "score.columns"


@dataclass(frozen=True)
class ScoreTokens:
    """Wrapper that makes a program with the inputs `input_names` score tokens instead of returning logits.

    It returns four arrays: the log-probability `[B, S]` f32 of the next token in `TARGETS` `[B, S]`, NaN where logits
    are not finite; whether that token is the likeliest one, `[B, S]` bool; and the same two, `[B, K]`, for the
    alternative tokens in `ALTERNATIVES` `[B, K]` after the columns `ALTERNATIVE_COLUMNS` `[B, K]`.

    With `chunking` the program ends before its head, and the wrapper computes the logits of one chunk of tokens at a
    time; otherwise the logits are the program's output.
    """

    input_names: tuple[str, ...]
    chunking: LossChunking | None

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that select it; see `rlx_jax.compiler.executable.HasRequestArguments`."""
        return {"scoring": "True"}

    def __call__(self, forward: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            outputs, state = forward(params, state, {name: inputs[name] for name in self.input_names})
            chunking, targets = self.chunking, inputs[TARGETS]
            alternatives, columns = inputs[ALTERNATIVES], inputs[ALTERNATIVE_COLUMNS]
            if chunking is None:
                return score_chunk(outputs[0].astype(jnp.float32), targets, alternatives, columns), state
            hidden, kernel, *bias = outputs
            operands = head_operands(chunking.head, kernel, bias[0] if bias else None)

            def score_next(start: Any, chunk: tuple[Any, Any]) -> tuple[Any, tuple[Any, ...]]:
                logits, _back = chunk_logits(chunking, chunk[0], operands)
                return start + logits.shape[1], score_chunk(logits, chunk[1], alternatives, columns - start)

            _, chunk_scores = lax.scan(score_next, jnp.int32(0), split_tokens(chunking, hidden, targets))
            probs, likeliest, other, other_likeliest = chunk_scores
            scores = (join_chunks(probs, targets.shape), join_chunks(likeliest, targets.shape))
            return (*scores, other.sum(0), other_likeliest.any(0)), state

        return function


def score_chunk(
    logits: jax.Array, targets: jax.Array, alternatives: jax.Array, columns: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Score tokens by the logits `[B, c, V]` f32 of a chunk.

    Args:
        targets: the next tokens `[B, c]`.
        alternatives, columns: alternative tokens `[B, K]`, and the column of the chunk that each follows; columns
            outside `[0, c)` belong to another chunk.

    Returns:
        the log-probabilities of `targets`, whether each is the likeliest token (the smallest id of several, as in
        greedy decoding), and the same two for `alternatives`, which are 0 and False for columns of another chunk.
    """
    lse, best = jax.nn.logsumexp(logits, axis=-1), likeliest_id(logits)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    in_chunk = (columns >= 0) & (columns < logits.shape[1])
    clipped = jnp.clip(columns, 0, logits.shape[1] - 1)
    other_logits = jax.vmap(lambda x, column, token: x.at[column, token].get(mode="clip"))(
        logits, clipped, alternatives
    )
    lse_at, best_at = (jnp.take_along_axis(x, clipped, axis=1, mode="clip") for x in (lse, best))
    other_log_probs = jnp.where(in_chunk, log_prob(other_logits, lse_at), 0.0)
    return log_prob(chosen, lse), best == targets, other_log_probs, in_chunk & (best_at == alternatives)


def likeliest_id(logits: jax.Array) -> jax.Array:
    """Return the first id with the largest logit, `[…, V]` f32 → `[…]` int32; V, which is no id, where that is NaN.

    It uses two float reductions, as XLA:CPU compiles `argmax` to a loop without vector instructions, which takes five
    times as long.
    """
    vocab_size = logits.shape[-1]
    if vocab_size >= 2**24:  # f32 represents integers exactly only below 2²⁴
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    from_end = lax.broadcasted_iota(jnp.float32, logits.shape, logits.ndim - 1)
    from_end = jnp.float32(vocab_size - 1) - from_end
    largest = logits.max(axis=-1, keepdims=True)
    return vocab_size - 1 - jnp.where(logits == largest, from_end, jnp.float32(-1)).max(axis=-1).astype(jnp.int32)


def log_prob(chosen: jax.Array, lse: jax.Array) -> jax.Array:
    """Return the log-probability of a token from its logit and the logsumexp; NaN where logits are not finite."""
    return jnp.where(jnp.isfinite(lse) & (chosen < jnp.inf), chosen - lse, jnp.nan)


def join_chunks(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Concatenate the chunks of a row, `[n, B, c]` → `[B, S]`, without the padding of the last chunk."""
    return chunks.swapaxes(0, 1).reshape(shape[0], -1)[:, : shape[1]]


def score_program(model: CompiledModel, input_names: tuple[str, ...], sizes: Mapping[str, int]) -> BoundProgram:
    """Return the scoring program of `model` with the inputs `input_names`, for blocks of these sizes by symbol.

    Raises:
        RequestError: it is not compiled, and the profile makes that an error.
    """
    key = model.key_for_sizes(sizes, Variant(last_only=False, outputs=model.output_names[:1]))
    chunking, template = None, model.template()
    if template.has_head:
        chunking = _head_chunking(model, template.head, sizes["batch"], sizes["seq"])
    return model.bind(replace(key, headless=chunking is not None, wrapper=ScoreTokens(input_names, chunking)))


def _head_chunking(model: CompiledModel, head: Head, rows: int, width: int) -> LossChunking | None:
    """Return how to compute the logits of a head in chunks; None where that is not possible."""
    sharding = model.programs.model_sharding
    if head.type.rank != 3 or not is_static(head.type.shape[-1]):
        return None
    vocab_size = int(head.type.shape[-1])
    chunk_bytes = 4 * vocab_size * CHUNK_TOKENS.get(model.settings.target, CHUNK_TOKENS["cuda"])  # bytes of f32 logits
    count = count_chunks((rows, width), None, vocab_size, sharding, chunk_bytes)
    return LossChunking(head, count, int(head.vocab_size), 0.0, sharding, model.settings.target)
