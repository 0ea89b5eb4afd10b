"""`encoder.explain`: what embedding a batch of texts or images consists of, and where its time goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rlx_jax.encode.images import ImageProcessor
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.inspection.page import Page
from rlx_jax.inspection.records import Inspection
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.explain import explain_request
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.show import check_compared, model_page


class RunsTexts(Protocol):
    """An `Encoder`, or a model with the head of a task."""

    model: CompiledModel

    @property
    def vocab_size(self) -> int: ...

    def run_texts(self, texts: Any, max_tokens: int | None = None) -> Any: ...


class RunsImages(Protocol):
    """A `VisionEncoder`."""

    model: CompiledModel
    processor: ImageProcessor | None
    channels: int

    def embed(self, images: Any) -> Any: ...


class Explains(Protocol):
    """A model of one tower."""

    model: CompiledModel

    def explain(self, *args: Any, **options: Any) -> Inspection: ...


def explain(self: RunsTexts, *, batch: int = 8, tokens: int = 128, runs: int = 3) -> Inspection:
    """Explain `embed`, or the request of a head's task, for a batch of texts: per block its time, work and share of the
    roofline; the largest losses with what would reduce them; and findings, such as copies and padding. Print the
    result, or use its fields.

    It describes the program that takes most of the time, as measured by `jax.profiler`.

    Args:
        batch: number of texts, of random tokens.
        tokens: number of tokens of each.
        runs: number of traced runs, of which the mean counts.

    Raises:
        RequestError: a number is not positive. UnsupportedError: traces of this device name no kernels. Others as
            `embed`.
    """
    shape = check_integer("batch", batch, 1), check_integer("tokens", tokens, 1)
    texts = np.random.default_rng(0).integers(0, self.vocab_size, shape).tolist()
    runs = check_integer("runs", runs, 1)
    return explain_request(self.model.programs, lambda: self.run_texts(texts), runs, shape[0] * shape[1])


@suggest_keywords()
def explain_images(
    self: RunsImages, *, batch: int = 8, size: tuple[int, int] | None = None, runs: int = 3
) -> Inspection:
    """Explain `embed` for a batch of images, as `Encoder.explain` does for texts; the image processor's own work on
    the host is not part of it.

    Args:
        batch: number of images, of random pixel values.
        size: height and width; by default those that the image processor makes, if it has one size.
        runs: number of traced runs, of which the mean counts.

    Raises:
        RequestError: a number is not positive, or there is no default of `size`. UnsupportedError: traces of this
            device name no kernels. Others as `embed`.
    """
    if size is None and self.processor is not None:
        size = self.processor.crop or self.processor.size
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise RequestError(f"explain: size is {shown(size)}; expected height and width in pixels, such as (224, 224)")
    sides = [check_integer(f"size[{axis}]", side, 1) for axis, side in enumerate(size)]
    shape = (check_integer("batch", batch, 1), self.channels, *sides)
    pixels = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    runs = check_integer("runs", runs, 1)
    return explain_request(self.model.programs, lambda: self.embed(pixels), runs, shape[0], "images")


def show(self: Explains, *, compare: Sequence[Inspection] = (), **options: Any) -> Page:
    """Return the page of what `explain(**options)` returns. A notebook displays it, and `save` writes it.

    Args:
        compare: what `explain` returned for other models or profiles, to compare with.
        options: for `explain`.

    Raises:
        RequestError: `compare` is something else. Others as `explain`.
    """
    check_compared(compare)
    return model_page(self.model, [self.explain(**options)], compare)


@suggest_keywords()
def profile(self: RunsTexts, texts: Any, *, max_tokens: int | None = None) -> BlockTimes:
    """Return the time by block of `embed(texts)`, or of the request of a head's task for texts or id lists.

    It runs twice, the second time under `jax.profiler`.
    """
    inputs = [*texts] if isinstance(texts, Iterator) else texts  # an iterator can be read only once
    return profile_run([self.model.programs], lambda: self.run_texts(inputs, max_tokens))
