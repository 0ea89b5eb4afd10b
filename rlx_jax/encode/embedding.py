"""Run texts through an encoder: lay them out in calls, dispatch without waiting, and restore their order.

`PackedBatcher` puts several texts in a row, `RowBatcher` (in `padded_rows.py`) one; `Stream` runs either.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, islice
from typing import Any, TypeVar

import jax
import numpy as np

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.encode.packing import Block, BlockSizes, pack_rows, plan_blocks, plan_one_per_row
from rlx_jax.encode.padded_rows import RowBatcher, read_mask_names
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.precision import OutputFormat
from rlx_jax.encode.sentence import SentencePipeline, pool_segments
from rlx_jax.encode.token_selection import SELECTED, TokenResults, TokenSelection, first_indices
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.runtime.frozen import FrozenFlow
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.program_key import Variant
from rlx_jax.text.request_checks import TYPES, Ids, TokenRows

# Maximum number of texts that are read and tokenised at once, in a thread, while the previous chunk runs. The first
# chunk is small, as nothing runs meanwhile, and each further one is twice as large.
TEXTS_PER_CHUNK, TEXTS_OF_FIRST_CHUNK = 2048, 256
# Maximum number of calls in flight; bounds the memory of results that are not fetched yet.
MAX_IN_FLIGHT = 32
# Number of threads that make calls, by platform; 1 if not listed. On a CPU, XLA runs the calls of one thread one after
# the other, and not every op keeps all cores busy. Measured on 2 cores: a core was idle for a quarter of the time with
# one thread, for a twentieth with two.
MAX_THREADS = {"cpu": min(2, os.cpu_count() or 1)}

# Name of the input with the number of prompt tokens, in packed programs that leave the prompt out of pooling.
SKIP = "skip"

T = TypeVar("T")
R = TypeVar("R")


# -- several texts in a row --------------------------------------------------------------------


@dataclass(frozen=True)
class PooledSegments:
    """Wrap the program `packed` so that it returns pooled vectors `[B, slots, D]` in place of hidden states.

    The optional input `skip` is the number of leading tokens of each text that pooling leaves out; see `pool`.
    """

    pipeline: SentencePipeline
    slots: int

    def __call__(self, hidden: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            model_inputs = {name: value for name, value in inputs.items() if name != SKIP}
            (states, *_), state = hidden(params, state, model_inputs)
            vectors = pool_segments(states, inputs["segments"], self.slots, self.pipeline, inputs.get(SKIP, 0))
            return (vectors,), state

        return function


# Modes of pooling that return a token of a text, which is then the only one that the end of the model is computed for.
TOKEN_MODES = (("cls",), ("lasttoken",))


@dataclass(frozen=True)
class PackedBatcher:
    """Rows of several texts, run by the program `packed` of `model`.

    Attributes:
        skip: number of tokens of the prompt that pooling leaves out; None: pooling reads every prompt.
        selection: the tokens to return the outputs of, in place of pooled vectors.
    """

    model: CompiledModel
    pipeline: SentencePipeline
    sizes: BlockSizes
    skip: int | None
    selection: TokenSelection | None = None

    def plan(self, lengths: Sequence[int], has_more: bool) -> list[Block]:
        """Return calls for texts of these lengths.

        If more texts follow (`has_more`), only full calls are returned; the other texts are left for later.
        """
        blocks = plan_blocks(lengths, self.sizes)
        return [b for b in blocks if len(b.texts) == self.sizes.row_counts(b.width)[0]] if has_more else blocks

    def plan_one_per_row(self, lengths: Sequence[int]) -> list[Block]:
        """Return calls in which every text has a row of its own."""
        return plan_one_per_row(lengths, self.sizes)

    def num_threads(self, block: Block, rows: TokenRows) -> int:
        """Return the number of threads that may make this call at the same time as others."""
        # With sharding, collectives must be enqueued in the same order on all devices.
        if self.model.programs.model_sharding is not None:
            return 1
        num_threads = MAX_THREADS.get(self.model.settings.target, 1)
        # The first call compiles, and must do so in the caller's thread: JAX's context settings are per thread.
        return num_threads if num_threads > 1 and self._program(block, rows).is_compiled else 1

    @property
    def takes_tokens(self) -> bool:
        """Whether results are of some tokens: of the pooled one of each text, or of those that are selected."""
        if self.selection is not None:
            return self.selection.token_id is not None
        return self.skip is None and self.pipeline.pooling in TOKEN_MODES

    def _program(self, block: Block, rows: TokenRows) -> BoundProgram:
        """Return the program for a block of rows."""
        optional_inputs = read_mask_names(self.model) | ({TYPES} if rows.types else frozenset())
        # The end of the model is computed for the results' tokens alone, except in the programs of an artifact.
        last_only = self.takes_tokens and not isinstance(self.model.programs.flows[self.model.name], FrozenFlow)
        number = self._num_selected(block, rows)
        key = self.model.key_for_sizes(
            {"batch": block.rows, "seq": block.width, SELECTED: number},
            Variant(last_only=last_only, outputs=self.model.output_names[:1], optional_inputs=optional_inputs),
        )
        if self.takes_tokens:
            wrapper = TokenResults(number, from_all=not last_only, normalize=self.pipeline.normalize)
            if self.selection is not None:
                num_best, has_targets = self.selection.num_best, bool(self.selection.targets)
                wrapper = replace(wrapper, num_best=num_best, has_targets=has_targets, normalize=False)
            return self.model.bind(replace(key, wrapper=wrapper))
        if self.selection is None:
            return self.model.bind(replace(key, wrapper=PooledSegments(self.pipeline, block.slots)))
        return self.model.bind(key)

    def _num_selected(self, block: Block, rows: TokenRows) -> int:
        """Return for how many tokens of a row the program for a block returns results, if it `takes_tokens`."""
        few = max(1, block.slots // 4)
        if self.selection is None:
            return few if max(map(len, block.texts)) <= few else block.slots
        return self.selection.number([[rows.ids[text] for text in row] for row in block.texts], few, block.slots)

    def _pooled_tokens(self, segments: Ids, number: int) -> Ids:
        """Return the indices of the first or the last tokens of the texts of each row, and others, `number` of each."""
        shift = 1 if self.pipeline.pooling == ("cls",) else -1
        others = np.roll(np.pad(segments, ((0, 0), (1, 1))), shift, axis=1)[:, 1:-1]
        return first_indices((segments > 0) & (segments != others), number)

    def run(self, block: Block, rows: TokenRows) -> jax.Array:
        """Return the vectors of a block `[rows, slots, D]`, or of fewer slots if it `takes_tokens`; or the outputs of
        all tokens `[rows, width, D]`.

        The text numbers of the block are indices into `rows`.
        """
        tokens, segments, positions = pack_rows(block, [[rows.ids[text] for text in texts] for texts in block.texts])
        inputs = {self.model.first_input: tokens, "segments": segments, "positions": positions}
        inputs |= dict.fromkeys(read_mask_names(self.model), (segments > 0).astype(np.int32))
        if rows.types:
            inputs[TYPES] = pack_rows(block, [[rows.types[text] for text in texts] for texts in block.texts])[0]
        if self.takes_tokens:
            number = self._num_selected(block, rows)
            if self.selection is None:
                inputs[SELECTED] = self._pooled_tokens(segments, number)
            else:
                inputs |= self.selection.inputs(tokens, segments > 0, number)
        elif self.skip is not None:
            inputs[SKIP] = np.int32(self.skip)
        (vectors,), _ = self._program(block, rows)(inputs, {})
        return vectors  # type: ignore[no-any-return]


# The two ways in which texts are laid out and run.
Batcher = PackedBatcher | RowBatcher


# -- running -----------------------------------------------------------------------------------


@dataclass
class Stream:
    """Texts that are being embedded by a form.

    Attributes:
        batcher: how texts are laid out and run.
        vectors: result buffer `[capacity, D]`, in the order of the texts.
        ends: for each text the end of its results in the buffer, which begin at the end of the previous text's.
        ids, types: token ids of all texts so far, and their token types: see `TokenRows`.
        waiting: numbers of the texts that no call has taken yet.
        running: results of calls in flight, with the places in the buffer of each row's.
        executor: the threads that make calls, if there are several.
    """

    batcher: Batcher
    vectors: Vectors
    ends: list[int] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    types: list[Ids] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: deque[tuple[Future[Vectors] | jax.Array, list[list[int]]]] = field(default_factory=deque)
    executor: ThreadPoolExecutor | None = None

    def add(self, rows: TokenRows, has_more: bool) -> None:
        """Add texts, and start calls for them and for the waiting texts; all of them unless `has_more`."""
        self.waiting += range(len(self.ids), len(self.ids) + len(rows.ids))
        self.ids += rows.ids
        self.types += rows.types
        selection = self.batcher.selection
        counts = [1] * len(rows.ids) if selection is None else selection.counts(rows.ids)
        self.ends += [*accumulate(counts, initial=self.size)][1:]
        self._grow_buffer()
        texts = self.waiting
        blocks = self.batcher.plan([len(self.ids[text]) for text in texts], has_more)
        self._run(blocks, texts)
        started = {text for block in blocks for row in block.texts for text in row}
        self.waiting = [text for index, text in enumerate(texts) if index not in started]

    def rerun(self, texts: Sequence[int]) -> None:
        """Run texts once more, each in a row of its own."""
        self._run(self.batcher.plan_one_per_row([len(self.ids[text]) for text in texts]), texts)

    def finish(self) -> Vectors:
        """Wait for all calls and return all vectors."""
        while self.running:
            self._fetch()
        return self.vectors[: self.size]

    @property
    def size(self) -> int:
        """The number of results of all texts so far."""
        return self.ends[-1] if self.ends else 0

    def split(self) -> list[Vectors]:
        """Return the results of each text, after `finish`."""
        return np.split(self.vectors[: self.size], self.ends[:-1]) if self.ends else []

    def close(self) -> None:
        """Stop the threads; calls that have not begun are dropped."""
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)

    def _run(self, blocks: Sequence[Block], texts: Sequence[int]) -> None:
        """Start calls for blocks. The numbers in the blocks are indices into `texts`."""
        rows = TokenRows([self.ids[text] for text in texts], [self.types[text] for text in texts if self.types])
        for block in blocks:
            num_threads = self.batcher.num_threads(block, rows) if len(blocks) > 1 else 1
            result = self._call(block, rows, num_threads)
            self.running.append((result, self._places([[texts[index] for index in row] for row in block.texts])))
            if len(self.running) > MAX_IN_FLIGHT:
                self._fetch()

    def _places(self, rows: list[list[int]]) -> list[list[int]]:
        """Return where the results of rows of texts are in the buffer."""
        ends = self.ends
        if self.batcher.selection is None:
            return rows
        return [[i for text in row for i in range(ends[text - 1] if text else 0, ends[text])] for row in rows]

    def _call(self, block: Block, rows: TokenRows, num_threads: int) -> Future[Vectors] | jax.Array:
        """Start one call and return its result, or a future of it if threads make the calls."""
        if num_threads == 1:
            vectors = self.batcher.run(block, rows)
            vectors.copy_to_host_async()
            return vectors
        if self.executor is None:
            self.executor = ThreadPoolExecutor(num_threads)
        return self.executor.submit(lambda: np.asarray(jax.device_get(self.batcher.run(block, rows))))

    def _fetch(self) -> None:
        """Wait for the oldest call and copy its vectors into the result buffer."""
        result, rows = self.running.popleft()
        host = result.result() if isinstance(result, Future) else np.asarray(jax.device_get(result))
        host = host.reshape(len(host), -1, self.vectors.shape[1])[: len(rows)]
        is_result = np.arange(host.shape[1]) < np.array([[len(places)] for places in rows])
        self.vectors[[place for places in rows for place in places]] = host[is_result]

    def _grow_buffer(self) -> None:
        """Grow the result buffer, at least by a factor of two, so that an iterator of n texts copies O(n) rows."""
        if self.size > len(self.vectors):
            larger = np.zeros((max(self.size, 2 * len(self.vectors)), self.vectors.shape[1]), np.float32)
            larger[: len(self.vectors)] = self.vectors
            self.vectors = larger


def chunks(items: Iterable[T], size: int | None = None) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of the first item, consecutive items): `size` items, or growing numbers up to `TEXTS_PER_CHUNK`."""
    source, start = iter(items), 0
    while chunk := list(islice(source, size or min(TEXTS_PER_CHUNK, TEXTS_OF_FIRST_CHUNK + start))):
        yield start, chunk
        start += len(chunk)


def prefetch(chunks: Iterator[T], prepare: Callable[[T], R], num_threads: int = 1) -> Iterator[tuple[R, bool]]:
    """Yield (prepared chunk, whether another follows). Threads prepare the next chunks, one each, in the meantime."""
    chunk = next(chunks, None)
    if chunk is None:
        return
    with ThreadPoolExecutor(num_threads) as pool:
        upcoming = deque(pool.submit(prepare, chunk) for chunk in islice(chunks, num_threads))
        prepared = prepare(chunk)
        while upcoming:
            yield prepared, True
            prepared = upcoming.popleft().result()
            upcoming += (pool.submit(prepare, chunk) for chunk in islice(chunks, 1))
        yield prepared, False


# -- texts from an iterator --------------------------------------------------------------------


# Texts that are read and computed at once: enough that the device rarely waits for the first call of the next ones.
TEXTS_AT_ONCE = 8192


@suggest_keywords()
def embed_iter(
    self: Any, texts: Iterable[Any], *, prompt_name: str | None = None, prompt: str | None = None,
    truncate_dim: int | None = None, normalize: bool = False, precision: str = "float32", ranges: Any = None,
    max_tokens: int | None = None,
) -> Iterator[np.ndarray[Any, Any]]:  # fmt: skip
    """Yield the vector of each text of any iterable, in order, for more texts than fit the memory.

    The vectors equal `embed`. Texts are read 8,192 at a time, so that the iterable may be endless.

    Args:
        texts: strings or id lists.
        prompt_name, prompt, truncate_dim, normalize, precision, ranges, max_tokens: as in `embed`; but "int8" and
            "uint8" need `ranges`, as the range of all vectors is not known.

    Raises:
        RequestError, TokenIdError, NumericsError: as `embed`; options at once, and texts when they are read.
    """
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise RequestError(f"embed_iter: texts is {shown(texts)}; expected an iterable of strings or id lists")
    self.model.concrete_params("embed_iter")
    output = OutputFormat.checked(self, truncate_dim, normalize, precision, ranges)
    if precision in ("int8", "uint8") and ranges is None:
        raise RequestError(f"embed_iter: precision={precision!r} needs ranges=, vector_ranges of many vectors")
    self.reader.read_prompted([], prompt_name, prompt)  # checks the prompt

    def vectors() -> Iterator[np.ndarray[Any, Any]]:
        for first, chunk in chunks(texts, TEXTS_AT_ONCE):
            requests = self.reader.read_prompted(chunk, prompt_name, prompt, first)
            yield from output(self.run(requests, max_tokens))

    return vectors()
