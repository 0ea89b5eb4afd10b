"""Texts through an encoder: laid out in calls, run one behind the other without waiting, and put back in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import jax
import numpy as np

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.encode.packing import Block, BlockSizes, apart, packed_rows, plan
from rlx_jax.encode.padded_rows import RowForm, masks_of
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.sentence import SentencePipeline, pool_segments
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.text.request_checks import Ids

# Texts that are read and tokenised at once; the next ones are while these run.
CHUNK = 2048
# Calls whose vectors are not fetched yet.
AHEAD = 32
# Threads that make calls, where it is not one: on a CPU, XLA has the calls of a thread wait for each other, and within
# a call not every op keeps all cores busy. One of 2 cores stood still for a quarter of the time with one thread, for a
# twentieth with two.
LANES = {"cpu": min(2, os.cpu_count() or 1)}

# The input of a packed program whose pooling leaves out the prompt: the number of its tokens.
SKIP = "skip"

T = TypeVar("T")
R = TypeVar("R")


# -- several texts in a row --------------------------------------------------------------------


@dataclass(frozen=True)
class PooledSegments:
    """Around `packed`: the vectors of each row's texts `[B, slots, D]` in place of hidden states. Its input `skip`, if
    there is one, is how many tokens of each text pooling leaves out; see `pool`."""

    pipeline: SentencePipeline
    slots: int

    def __call__(self, hidden: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            read = {name: value for name, value in inputs.items() if name != SKIP}
            (states, *_), state = hidden(params, state, read)
            vectors = pool_segments(states, inputs["segments"], self.slots, self.pipeline, inputs.get(SKIP, 0))
            return (vectors,), state

        return function


@dataclass(frozen=True)
class PackedForm:
    """Rows of several texts, by the program `packed` of `model`. `skip`: tokens of the prompt that pooling leaves out;
    None: pooling reads every prompt."""

    model: CompiledModel
    pipeline: SentencePipeline
    sizes: BlockSizes
    skip: int | None

    def plan(self, lengths: Sequence[int], more: bool) -> list[Block]:
        """Calls for texts of these lengths. Where `more` texts follow, some may be left for later."""
        blocks = plan(lengths, self.sizes)
        return [b for b in blocks if len(b.texts) == self.sizes.of(b.width)[0]] if more else blocks

    def apart(self, lengths: Sequence[int]) -> list[Block]:
        """Calls in which no text is in the row of another."""
        return apart(lengths, self.sizes)

    def lanes(self, block: Block) -> int:
        """Threads that may make this call while others run."""
        if self.model.programs.division is not None:  # what devices send each other is in the order of the calls
            return 1
        lanes = LANES.get(self.model.settings.target, 1)
        return lanes if self._program(block).is_compiled else 1  # compiled where the caller's settings of JAX are

    def _program(self, block: Block) -> BoundProgram:
        return self.model.bound(
            {"batch": block.rows, "seq": block.width},
            PooledSegments(self.pipeline, block.slots),
            Variant(last_only=False, outputs=self.model.output_names[:1], given=masks_of(self.model)),
        )

    def run(self, block: Block, ids: Sequence[Ids]) -> jax.Array:
        """The vectors of a block `[rows, slots, D]`; `ids` are of all texts that its numbers may name."""
        tokens, segments, positions = packed_rows(block, [[ids[text] for text in texts] for texts in block.texts])
        inputs = {self.model.first_input: tokens, "segments": segments, "positions": positions}
        inputs |= dict.fromkeys(masks_of(self.model), (segments > 0).astype(np.int32))
        if self.skip is not None:
            inputs[SKIP] = np.int32(self.skip)
        (vectors,), _ = self._program(block)(inputs, {})
        return vectors  # type: ignore[no-any-return]


# How texts are laid out and run.
Form = PackedForm | RowForm


# -- running -----------------------------------------------------------------------------------


@dataclass
class Stream:
    """Texts on their way through a form: their ids, those that wait for others, and the vectors that are there."""

    form: Form
    vectors: Vectors
    ids: list[Ids] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: deque[tuple[Future[Vectors] | jax.Array, list[list[int]]]] = field(default_factory=deque)
    lanes: ThreadPoolExecutor | None = None

    def add(self, rows: Sequence[Ids], more: bool) -> None:
        """Run what these texts and those that wait make up: all of it, if no `more` follow."""
        self.waiting += range(len(self.ids), len(self.ids) + len(rows))
        self.ids += rows
        self._make_room()
        texts = self.waiting
        blocks = self.form.plan([len(self.ids[text]) for text in texts], more)
        self._run(blocks, texts)
        ran = {text for block in blocks for row in block.texts for text in row}
        self.waiting = [text for at, text in enumerate(texts) if at not in ran]

    def again(self, texts: Sequence[int]) -> None:
        """Run these once more, each in a row of its own."""
        self._run(self.form.apart([len(self.ids[text]) for text in texts]), texts)

    def finish(self) -> Vectors:
        """All vectors, when they are there."""
        while self.running:
            self._fetch()
        return self.vectors[: len(self.ids)]

    def close(self) -> None:
        """End its threads; calls that did not begin are dropped."""
        if self.lanes is not None:
            self.lanes.shutdown(cancel_futures=True)

    def _run(self, blocks: Sequence[Block], texts: Sequence[int]) -> None:
        """Blocks whose numbers are places in `texts`."""
        ids = [self.ids[text] for text in texts]
        for block in blocks:
            made = self._call(block, ids, self.form.lanes(block) if len(blocks) > 1 else 1)
            self.running.append((made, [[texts[at] for at in row] for row in block.texts]))
            if len(self.running) > AHEAD:
                self._fetch()

    def _call(self, block: Block, ids: Sequence[Ids], lanes: int) -> Future[Vectors] | jax.Array:
        if lanes == 1:
            made = self.form.run(block, ids)
            made.copy_to_host_async()
            return made
        if self.lanes is None:
            self.lanes = ThreadPoolExecutor(lanes)
        return self.lanes.submit(lambda: np.asarray(jax.device_get(self.form.run(block, ids))))

    def _fetch(self) -> None:
        made, rows = self.running.popleft()
        host = made.result() if isinstance(made, Future) else np.asarray(jax.device_get(made))
        for row, texts in zip(host.reshape(len(host), -1, self.vectors.shape[1]), rows, strict=False):
            self.vectors[texts] = row[: len(texts)]

    def _make_room(self) -> None:
        if len(self.ids) > len(self.vectors):
            larger = np.zeros((max(len(self.ids), 2 * len(self.vectors)), self.vectors.shape[1]), np.float32)
            larger[: len(self.vectors)] = self.vectors
            self.vectors = larger


def chunks(items: Iterable[T], size: int | None = None) -> Iterator[tuple[int, list[T]]]:
    """Consecutive items, `size` at a time or `CHUNK`, and the number of the first."""
    source, first = iter(items), 0
    while chunk := list(islice(source, size or CHUNK)):
        yield first, chunk
        first += len(chunk)


def ahead(chunks: Iterator[T], prepare: Callable[[T], R]) -> Iterator[tuple[R, bool]]:
    """Each chunk prepared, and whether another follows, which is prepared in a thread in the meantime."""
    chunk = next(chunks, None)
    if chunk is None:
        return
    with ThreadPoolExecutor(1) as pool:
        made = prepare(chunk)
        while (chunk := next(chunks, None)) is not None:
            coming = pool.submit(prepare, chunk)
            yield made, True
            made = coming.result()
        yield made, False
