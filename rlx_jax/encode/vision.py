"""Define `VisionEncoder`, which computes hidden states and vectors of images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

import jax
import numpy as np

from rlx_jax.compiler.buckets import bucket_size, fit_bucket
from rlx_jax.encode.embedding import chunks, prefetch
from rlx_jax.encode.explain import explain_images, processed_size, profile_images, random_images
from rlx_jax.encode.images import ImageProcessor, named_images, number_images
from rlx_jax.encode.naflex import PATCH_INPUTS, check_patches
from rlx_jax.encode.pooled import POOLED, Vectors, check_finite, get_pooled, pooled_width
from rlx_jax.errors import GraphError, RequestError, RlxNumericsWarning, listing, quote, shown, suggest_keywords
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.program import Weights
from rlx_jax.runtime.compile_flow import open_model
from rlx_jax.runtime.explain import show as show_model
from rlx_jax.runtime.inputs import as_host_array
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import Report, RequestReport
from rlx_jax.text.token_model import TaskModel, primary_output
from rlx_jax.weights.format import CompileOptions, OpenOptions

# Maximum number of images of a call, if the profile has no buckets for it.
MAX_IMAGES = 32


class VisionEncoder(TaskModel):
    """Compute hidden states and vectors of images.

    `flow` maps pixel values `[batch, channels, height, width]` to hidden states `[batch, tokens, hidden]`; its side
    output `pooled` is one vector for each image.

    Args:
        flow: a `ModelFlow` with pixel values as its first input, or a recipe; or a compiled model, to share its
            programs.
        processor: makes pixel values of images, for `embed`; `rlx_jax.load` passes the checkpoint's.
        options: `profile`, `mesh`, `strict`, `missing` and `key` as in `rlx_jax.compile`; `progress`, a callback that
            reports loading and compiling: see `rlx_jax.compiler.executable.Progress`.
    """

    _methods = "embed(images) returns vectors, hidden_states(pixel_values) one per patch, model(…) every output"

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, processor: ImageProcessor | None = None,
        **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        if not isinstance(processor, ImageProcessor | None):
            raise RequestError(f"processor is {shown(processor)}; expected an ImageProcessor")
        self.model = open_model(flow, weights, OpenOptions(**options), serves=("forward",))
        self.processor, self.buckets = processor, self.model.settings.buckets
        self.channels = check_images(self.model)
        self.reads_patches = reads_patches(self.model)
        self._last_request: RequestReport | None = None

    def __repr__(self) -> str:
        unit = "values a patch" if self.reads_patches else "channels"
        return f"VisionEncoder({self.model.name}: {self.channels} {unit}, target {self.model.settings.target})"

    @suggest_keywords()
    def hidden_states(self, pixel_values: Any) -> jax.Array:
        """Return the last hidden states: pixel values `[B, C, H, W]` floats → `[B, tokens, hidden]` float32.

        Height and width may be any size of at least one patch; positions are resampled for a size that the family was
        not trained for.

        Raises:
            RequestError: not floats of that shape. GraphError: the flow has no hidden states.
        """
        if len(shape := self.model.template().built.primary_shape) != 3:
            raise GraphError(f"{self.model.name}: the output is {list(shape)}, not [batch, tokens, hidden]")
        if self.reads_patches:
            inputs: dict[str, Any] = check_patches(pixel_values, self.channels)
            return primary_output(self.model(**inputs))
        return primary_output(self.model(self._check_pixel_values(pixel_values)))

    @suggest_keywords()
    def embed(self, images: Any) -> Vectors:
        """Return one vector for each image, the flow's output `pooled`: `[n, E]` float32; a single image gives `[E]`.

        Args:
            images: uint8 arrays `[H, W, C]` or Pillow's images, which the checkpoint's image processor converts: a
                single one, or several in a list or an iterator, which is consumed in chunks; or pixel values
                `[B, C, H, W]`, floats; a model that reads patches takes what `processor(images)` returns.

        Raises:
            RequestError: none of these; the message names the image. GraphError: the flow has no output `pooled`.
            NumericsError: vectors that are not finite; its `rows` names them, and `outputs` has all vectors.
        """
        return self.run(images, POOLED)

    def run(self, images: Any, output: str) -> Vectors:
        """Return an output of the flow `[batch, width]` for images; arguments and errors as in `embed`."""
        self.model.concrete_params("embed" if output == POOLED else "logits")
        width = pooled_width(self.model, output)
        clock = self.model.programs.start_timer()
        if self.reads_patches and (isinstance(images, Mapping) or _is_pixel_values(images)):
            patches, single, size = check_patches(images, self.channels), False, self._max_batch
            starts = range(0, len(patches["pixel_values"]), size)
            batches: Iterator[Any] = ({k: v[i : i + size] for k, v in patches.items()} for i in starts)
        elif _is_pixel_values(images):
            pixels, single = np.asarray(self._check_pixel_values(images, min_images=0)), False
            batches = (pixels[i : i + self._max_batch] for i in range(0, len(pixels), self._max_batch))
        else:
            batches, single = self._preprocess(images)
        rows = (self._run_batch(batch, output) for batch in batches)
        vectors = np.concatenate([np.zeros((0, width), np.float32), *rows])
        seconds, compiled = clock()
        self._last_request = RequestReport("images", len(vectors), 0, seconds, compiled=compiled)
        check_finite(vectors, "images")
        return vectors[0] if single else vectors

    def _preprocess(self, images: Any) -> tuple[Iterator[Any], bool]:
        """Return batches of pixel values of images, and whether it is a single image.

        A thread makes the next batch while the model runs one. All images must have the processed size of the first.
        """
        processor = self.processor
        if processor is None:
            raise RequestError("images need processor=, or pixel values: there is no preprocessor_config.json")
        named_items, single = (None, False) if isinstance(images, Iterator) else named_images(images)
        sizes: list[tuple[int, ...]] = []

        def make(chunk: tuple[int, list[Any]]) -> Any:
            items = chunk[1] if named_items is not None else number_images(chunk[1], chunk[0])
            return processor.process_batch(items, sizes)

        source: Any = images if named_items is None else named_items
        return (pixels for pixels, _ in prefetch(chunks(source, self._max_batch), make)), single

    @property
    def _max_batch(self) -> int:
        """Maximum number of images in a batch."""
        return self.buckets.batch[-1] if self.buckets.batch else MAX_IMAGES

    def _run_batch(self, pixels: Any, output: str) -> Vectors:
        """Return an output for a batch, padded with zeros to one of few sizes, so that few programs compile."""
        arrays: dict[str, Any] = pixels if self.reads_patches else {self.model.first_input: pixels}
        rows = len(arrays[self.model.first_input])
        padded_rows = fit_bucket(self.buckets.batch, rows) or self.buckets.rows(bucket_size(rows, 1, self._max_batch))
        # Patches are padded with the last image, because an image without patches has no positions.
        mode: Any = "edge" if self.reads_patches else "constant"
        padded: dict[str, Any] = {
            k: np.pad(v, ((0, padded_rows - rows), *((0, 0),) * (v.ndim - 1)), mode) for k, v in arrays.items()
        }
        outputs = self.model(**padded)
        vectors: Vectors = np.asarray(jax.device_get(get_pooled(outputs, output)))[:rows]
        return vectors

    def _check_pixel_values(self, pixel_values: Any, min_images: int = 1) -> Any:
        """Return the pixel values of a request, after checking their shape and dtype; at least `min_images` images."""
        if on_host := not isinstance(pixel_values, jax.Array):
            pixel_values = as_host_array("pixel_values", pixel_values)
        shape = list(pixel_values.shape)
        if len(shape) != 4 or 0 in shape[1:] or shape[0] < min_images or shape[1] != self.channels:
            is_channels_last = len(shape) == 4 and shape[3] == self.channels
            hint = "; an image to be processed is uint8, [height, width, channels]" if len(shape) == 3 else ""
            hint = "; x[None] is a batch of one" if len(shape) == 3 and shape[0] == self.channels else hint
            hint = "; x.transpose(0, 3, 1, 2) puts the channels there" if is_channels_last else hint
            raise RequestError(f"pixel_values: expected [batch, {self.channels}, height, width], got {shape}{hint}")
        if not is_float(pixel_values.dtype):
            raise RequestError(
                f"pixel_values: expected floats as an image processor makes them, got "
                f"{short_name(pixel_values.dtype)}; embed takes uint8 images"
            )
        # Values on the device are not checked: reading them would wait for the device.
        if on_host and self.processor is not None:
            warn_of_range(pixel_values, self.processor)
        return pixel_values

    @suggest_keywords()
    def warmup(self) -> None:
        """Run every program once that `embed` can need for images as the image processor makes them.

        Raises:
            RequestError: the profile has no buckets for rows, or the processor gives images of many sizes.
        """
        size = processed_size(self)
        if not self.buckets.batch or size is None:
            raise RequestError(
                "warmup: requests come in every size: set buckets.batch in the profile, and an image processor whose "
                "images have one size"
            )
        with self.model.programs.warm_up():
            for rows in self.buckets.batch:
                images = random_images(self, rows, *size)
                jax.block_until_ready(self.model(**images) if self.reads_patches else self.model(images))

    def report(self, **sizes: int) -> Report:
        """Return the cost of compiling and the requirements of the last program.

        With `sizes` it reports the requirements of `forward` at these sizes.
        """
        return replace(self.model.report(**sizes), request=self._last_request)

    explain, show, profile, run_images = explain_images, show_model, profile_images, embed


def check_images(model: CompiledModel) -> int:
    """Return the number of channels of the images that a model reads.

    Raises:
        GraphError: its first input is not images, or it has other required inputs.
    """
    image_input = next(i for i in model.flow._inputs if i.name == model.first_input)
    shape = image_input.type.shape
    if reads_patches(model):
        return int(shape[2])
    if len(shape) != 4 or not isinstance(shape[1], int) or not is_float(image_input.type.dtype):
        raise GraphError(
            f"{model.name}: the first input of a VisionEncoder's flow is pixel values [batch, channels, height, width] "
            f"of floats, its channels a number; {quote(image_input.name)} is {image_input.type}"
        )
    required = [i.name for i in model.inputs if not i.optional and i.name != image_input.name]
    if required:
        raise GraphError(
            f"{model.name}: requests contain only images, and the flow also requires {listing(required)}; give "
            "these inputs a default, or call rlx_jax.compile(flow)"
        )
    return shape[1]


def reads_patches(model: CompiledModel) -> bool:
    """Return whether a model reads the `PATCH_INPUTS` in place of images."""
    return model.first_input == PATCH_INPUTS[0] and {i.name for i in model.inputs} == {*PATCH_INPUTS}


def warn_of_range(pixels: np.ndarray[Any, Any], processor: ImageProcessor) -> None:
    """Warn of pixel values that look unprocessed.

    These are values from 0 to 255, or from 0 to 1 where the processor subtracts a mean.
    """
    if not pixels.size:
        return
    vmin, vmax = processor.range
    low, high = float(pixels.min()), float(pixels.max())
    is_raw = max(-low, high) > 4 * max(-vmin, vmax)
    # After the mean is subtracted, dark parts of pictures are negative; values within 0 to 1 are before that step.
    is_scaled = vmin < -0.5 and 1.5 < vmax < 200 and 0 <= low and high <= 1 and high - low > 0.9
    if is_raw or is_scaled:
        warnings.warn(
            f"pixel_values: {low:g} to {high:g}, and the image processor makes {vmin:.2g} to {vmax:.2g}: they look "
            f"unprocessed ({'not rescaled' if is_raw else 'the mean is not subtracted'}); embed takes uint8 images; "
            "processor(images) makes their pixel values",
            RlxNumericsWarning,
            stacklevel=5,
        )


def _is_pixel_values(images: Any) -> bool:
    """Return whether it is an array of floats, and not images."""
    return isinstance(images, np.ndarray | jax.Array) and is_float(images.dtype)
