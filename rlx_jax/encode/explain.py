"""`encoder.explain`: what embedding a batch of texts or images consists of, and where its time goes.

`self` is an `Encoder` or a model with the head of a task, or for images a `VisionEncoder` or an `ImageClassifier`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlx_jax.encode.naflex import patch_inputs
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.inspection.records import Inspection
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.explain import explain_request
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.token_model import supported_positions


def explain(self: Any, *, batch: int = 8, tokens: int | None = None, runs: int = 3) -> Inspection:
    """Explain `embed`, or the request of a head's task, for a batch of texts: per block its time, work and share of the
    roofline; the largest losses with what would reduce them; and findings, such as copies and padding. Print the
    result, or use its fields.

    It describes the program that takes most of the time, as measured by `jax.profiler`.

    Args:
        batch: number of texts, of random tokens.
        tokens: number of tokens of each; None: 128, or as many as the model reads.
        runs: number of traced runs, of which the mean counts.

    Raises:
        RequestError: a number is not positive. UnsupportedError: traces of this device name no kernels. Others as
            `embed`.
    """
    if tokens is None:
        tokens = min(128, supported_positions(self.model) or 128)
    shape = check_integer("batch", batch, 1), check_integer("tokens", tokens, 1)
    texts = np.random.default_rng(0).integers(0, self.vocab_size, shape).tolist()
    runs = check_integer("runs", runs, 1)
    return explain_request(self.model.programs, lambda: self.run_texts(texts), runs, shape[0] * shape[1])


@suggest_keywords()
def explain_images(self: Any, *, batch: int = 8, size: tuple[int, int] | None = None, runs: int = 3) -> Inspection:
    """Explain `embed` for a batch of images, as `Encoder.explain` does for texts; the image processor's own work on
    the host is not part of it.

    Args:
        batch: number of images, of random pixel values.
        size: height and width; by default those that the image processor makes, if it has one size. For a model that
            reads patches: rows and columns of patches; by default one row of as many as the image processor makes.
        runs: number of traced runs, of which the mean counts.

    Raises:
        RequestError: a number is not positive, or there is no default of `size`. UnsupportedError: traces of this
            device name no kernels. Others as `embed`.
    """
    size = processed_size(self) if size is None else size
    if not isinstance(size, tuple | list) or len(size) != 2:
        pixels, patches = (
            "height and width in pixels, such as (224, 224)",
            "rows and columns of patches, such as (16, 16)",
        )
        raise RequestError(f"explain: size is {shown(size)}; expected {patches if self.reads_patches else pixels}")
    height, width = (check_integer(f"size[{axis}]", side, 1) for axis, side in enumerate(size))
    images = random_images(self, check_integer("batch", batch, 1), height, width)
    runs = check_integer("runs", runs, 1)
    return explain_request(self.model.programs, lambda: self.embed(images), runs, batch, "images")


def processed_size(encoder: Any) -> tuple[int, int] | None:
    """Return the height and width of the images that the image processor makes, or rows and columns of patches; None
    if they have no fixed size."""
    processor = encoder.processor
    if processor is None or (encoder.reads_patches and not processor.max_patches):
        return None
    return (1, processor.max_patches) if encoder.reads_patches else processor.crop or processor.size


def random_images(encoder: Any, batch: int, height: int, width: int) -> Any:
    """Return random pixel values, or patches without padding, as `embed` takes them."""
    is_patches, channels = encoder.reads_patches, encoder.channels
    shape = (batch, height * width, channels) if is_patches else (batch, channels, height, width)
    pixels = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    return patch_inputs(pixels, height, width) if is_patches else pixels


@suggest_keywords()
def profile(self: Any, texts: Any, *, max_tokens: int | None = None) -> BlockTimes:
    """Return the time by block of `embed(texts)`, or of the request of a head's task for texts or id lists.

    It runs three times: the last two under `jax.profiler`, of which the last counts.
    """
    inputs = [*texts] if isinstance(texts, Iterator) else texts  # an iterator can be read only once
    return profile_run([self.model.programs], lambda: self.run_texts(inputs, max_tokens))


@suggest_keywords()
def profile_images(self: Any, images: Any) -> BlockTimes:
    """Return the time by block of the request of images, which runs three times: the last two under `jax.profiler`, of
    which the last counts."""
    inputs = [*images] if isinstance(images, Iterator) else images  # an iterator can be read only once
    return profile_run([self.model.programs], lambda: self.run_images(inputs))
