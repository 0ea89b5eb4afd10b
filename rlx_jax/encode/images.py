"""Define `ImageProcessor`, which makes the pixel values that a vision model reads from images.

Its settings come from a checkpoint's `preprocessor_config.json` or `processor_config.json`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.naflex import patch_sides, stack_patches
from rlx_jax.encode.resample import FILTERS, NEAREST, Pixels, Resizer, resize
from rlx_jax.errors import ConfigError, RequestError, UnsupportedError, did_you_mean, listing, quote, shown
from rlx_jax.io import limits
from rlx_jax.io.folder import Folder
from rlx_jax.ir.types import short_name
from rlx_jax.models.config import Fields, finish_model
from rlx_jax.runtime.inputs import read_array

PixelValues = np.ndarray[Any, np.dtype[np.float32]]
FILE, JOINT_FILE = "preprocessor_config.json", "processor_config.json"
CHANNELS = 3
MAX_SIDE = 2**16


@dataclass(frozen=True)
class ImageProcessor:
    """Convert images `[H, W, C]` uint8 to pixel values: colours, resize, crop, rescale, normalize, in this order by
    default.

    Attributes:
        size: height and width to resize to, whatever the proportions; or None.
        shortest_edge: length to resize the shorter side to, with the proportions preserved; or None.
        resample: the filter by Pillow's number: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic.
        crop: height and width to cut out of the middle; a smaller image is padded with zeros on all sides.
        rescale: factor of every value, or None.
        mean, std: subtracted from each channel, and the divisor after that; or None.
        resizer: the library to reproduce, `pillow` or `torch`. They also differ in centering a smaller image by an odd
            number of pixels: the extra line of zeros comes before the image with `pillow`, after it with `torch`.
        convert_rgb: give grey images three channels, and blend transparent ones onto white.
        rescale_first: rescale before the resize, which is then in floats as torch's (DINOv3).
        patch, max_patches: resize to at most that many patches `(patch, patch)`, with about the proportions, and return
            the `rlx_jax.encode.naflex.PATCH_INPUTS` (SigLIP 2); 0 for pixel values.
    """

    size: tuple[int, int] | None = None
    shortest_edge: int | None = None
    resample: int = 2
    crop: tuple[int, int] | None = None
    rescale: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    convert_rgb: bool = True
    resizer: Resizer = "pillow"
    rescale_first: bool = False
    patch: int = 0
    max_patches: int = 0

    def __post_init__(self) -> None:
        if self.resizer not in ("pillow", "torch"):
            raise ConfigError(f"ImageProcessor: resizer is {shown(self.resizer)}; expected pillow or torch")
        check_filter("ImageProcessor", self.resample)
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and (len(values) != CHANNELS or not np.isfinite(values).all()):
                raise ConfigError(f"ImageProcessor: {name} is {shown(values)}; expected {CHANNELS} numbers")
        if self.std is not None and not np.all(self.std):
            raise ConfigError(f"ImageProcessor: std is {shown(self.std)}, and pixels are divided by it")
        for name in ("size", "crop"):
            pair = getattr(self, name)
            if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2 and min(pair) > 0):
                raise ConfigError(f"ImageProcessor: {name} is {shown(pair)}; expected (height, width)")

    def __call__(self, images: Any) -> Any:
        """Return pixel values `[n, C, H, W]` float32 of one image or several: uint8 arrays `[H, W, C]`, or Pillow's
        images.

        Raises:
            RequestError: an image with a wrong dtype, rank, number of channels or size, or with another processed size
                than the first; the message names it.
        """
        named_items = named_images(images)[0]
        if not named_items:
            raise RequestError("images: there are none")
        return self.process_batch(named_items, [])

    def process_batch(self, named_items: Sequence[tuple[str, Any]], sizes: list[tuple[int, ...]]) -> Any:
        """Return pixel values `[n, C, H, W]` of one image or more, given as (name, image).

        Args:
            named_items: names for messages, and images.
            sizes: the shape that every image must have after processing, once the first image determines it; this
                method appends it to an empty list.

        Raises:
            RequestError: as `__call__`.
        """
        if self.max_patches:
            return stack_patches([self.process_one(x, name) for name, x in named_items], self.patch, self.max_patches)
        batch = []
        for name, image in named_items:
            pixels = self.process_one(image, name)
            sizes += [] if sizes else [pixels.shape]
            if pixels.shape != sizes[0]:
                raise RequestError(
                    f"{name}: {list(pixels.shape)} after processing, and the first {list(sizes[0])}: the "
                    "checkpoint's image processor preserves proportions; pass images of one size together"
                )
            batch.append(pixels)
        return np.stack(batch)

    def process_one(self, image: Any, name: str = "image") -> PixelValues:
        """Return pixel values `[C, H, W]` float32 of one image."""
        pixels = self.to_rgb(image, name)
        rescale_first = self.rescale_first and self.rescale is not None
        pixels = pixels * np.float64(self.rescale or 1) if rescale_first else pixels
        if self.size is not None or self.shortest_edge is not None or self.max_patches:
            height, width = self.target_size(pixels.shape[0], pixels.shape[1])
            if height * width > limits.MAX_RESIZED_PIXELS:
                raise RequestError(
                    f"{name}: {pixels.shape[0]} × {pixels.shape[1]} pixels become {height} × {width}; the limit "
                    f"limits.MAX_RESIZED_PIXELS is {limits.MAX_RESIZED_PIXELS}"
                )
            pixels = resize(pixels, height, width, self.resample, self.resizer)
        pixels = pixels if self.crop is None else center_crop(pixels, *self.crop, self.resizer)
        values: Any = pixels.astype(np.float32)
        if self.rescale is not None and not rescale_first:
            # The reference multiplies in float64 and then rounds to float32.
            values = (pixels.astype(np.float64) * self.rescale).astype(np.float32)
        if self.mean is not None and self.std is not None:
            values = (values - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        channels_first: PixelValues = np.ascontiguousarray(values.transpose(2, 0, 1))
        return channels_first

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest pixel value that the processor can produce."""
        levels = np.array([[0.0], [255.0]]) * (1 if self.rescale is None else self.rescale)
        if self.mean is not None and self.std is not None:
            levels = (levels - np.asarray(self.mean)) / np.asarray(self.std)
        return float(levels.min()), float(levels.max())

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to."""
        if self.max_patches:
            return patch_sides(height, width, self.patch, self.max_patches)
        if self.size is not None:
            return self.size
        edge = self.shortest_edge or 1
        if width <= height:
            # Truncated, not rounded, like the reference.
            return int(edge * height / width), edge
        return edge, int(edge * width / height)

    def to_rgb(self, image: Any, name: str) -> Pixels:
        """Return the image as `[H, W, 3]` uint8."""
        pixels = as_pixels(image, name, self.convert_rgb)
        channels = pixels.shape[2]
        if channels == CHANNELS:
            return pixels
        if not self.convert_rgb:
            raise RequestError(f"{name}: {channels} channels, expected {CHANNELS}: the processor converts no colours")
        if channels == 1:
            return np.repeat(pixels, CHANNELS, axis=2)
        # Four channels: blend by the alpha channel onto a white background.
        alpha = pixels[..., 3:] / 255
        return np.round(alpha * pixels[..., :3] + (1 - alpha) * 255).astype(np.uint8)


def check_filter(where: str, resample: int) -> None:
    """Check that there is a filter of that number.

    Raises:
        UnsupportedError: there is none.
    """
    if resample != NEAREST and resample not in FILTERS:
        raise UnsupportedError(
            f"{where}: resample is {shown(resample)}; expected 0 to {max(FILTERS)}: 0 nearest, "
            f"{', '.join(f'{number} {f.name}' for number, f in FILTERS.items())}"
        )


def named_images(images: Any) -> tuple[list[tuple[str, Any]], bool]:
    """Return the images of a request as (name for messages, image), and whether it is a single image.

    Raises:
        RequestError: no images.
    """
    if _is_picture(images) or (isinstance(images, np.ndarray | jax.Array) and images.ndim in (2, 3)):
        return [("images", images)], True
    if isinstance(images, np.ndarray | jax.Array) and images.ndim == 4:
        images = list(read_array("images", images))
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        file = "; PIL.Image.open(path) opens a file" if isinstance(images, str) else ""
        raise RequestError(
            "images: expected uint8 arrays [H, W, C], Pillow's images, or pixel values [B, C, H, W], got "
            f"{shown(images)}{file}"
        )
    return number_images(images), False


def number_images(images: Sequence[Any], first: int = 0) -> list[tuple[str, Any]]:
    """Return images with names for messages, numbered from `first`."""
    return [(f"images[{i}]", image) for i, image in enumerate(images, first)]


def _is_picture(image: Any) -> bool:
    """Return whether it is an image of Pillow, by its attributes: this package does not import Pillow."""
    return hasattr(image, "convert") and hasattr(image, "getbands") and hasattr(image, "size")


def as_pixels(image: Any, name: str, convert_rgb: bool) -> Pixels:
    """Return an image as `[H, W, C]` uint8 with 1, 3 or 4 channels.

    Raises:
        RequestError: another dtype, rank or number of channels; no pixels, or over `limits.MAX_IMAGE_PIXELS`.
    """
    if _is_picture(image):
        columns, rows = image.size
        # Checked before Pillow decodes the pixels, because a small file may hold a huge image.
        _check_size(rows, columns, name)
        _check_levels(image, name)
        # Palette images hold indices, which have no meaning as intensities.
        if convert_rgb:
            has_alpha = "A" in image.getbands() or getattr(image, "info", {}).get("transparency") is not None
            image = image.convert("RGBA" if has_alpha else "RGB")
    elif not isinstance(image, np.ndarray | jax.Array):
        file = "; PIL.Image.open(path) opens a file" if isinstance(image, str | os.PathLike) else ""
        raise RequestError(f"{name}: expected uint8 [H, W, C] or one of Pillow's images, got {shown(image)}{file}")
    pixels = read_array(name, image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.dtype != np.uint8:
        hint = "; pass pixel values as one array [B, C, H, W]" if pixels.dtype.kind == "f" else ""
        hint = "; divide it by 257, for example, and cast it" if pixels.dtype == np.uint16 else hint
        raise RequestError(f"{name}: expected u8, got {short_name(pixels.dtype)}{hint}")
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        advice = "; transpose it" if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) else ""
        raise RequestError(f"{name}: expected [height, width, 1, 3 or 4 channels], got {list(pixels.shape)}{advice}")
    _check_size(pixels.shape[0], pixels.shape[1], name)
    return pixels


def _check_levels(image: Any, name: str) -> None:
    """Check that an image of Pillow in a mode with more than 8 bits has values from 0 to 255.

    Pillow's conversion clips values outside this range, and drops fractions.

    Raises:
        RequestError: values outside the range, or floats that all lie within 0 to 1.
    """
    mode = str(getattr(image, "mode", ""))
    if mode in ("I", "F") or mode.startswith("I;"):
        # Pillow's getextrema does not support the 16-bit modes with an explicit byte order.
        needs_conversion = mode not in ("I", "F", "I;16")
        low, high = image.convert("I").getextrema() if needs_conversion else image.getextrema()
        if low < 0 or high > 255 or 0 < high <= 1 and mode == "F":
            raise RequestError(
                f"{name}: mode {quote(mode)} with values from {low:g} to {high:g}; expected 0 to 255: convert it "
                "to a uint8 array, for example by dividing 16-bit grey by 257"
            )


def _check_size(rows: int, columns: int, name: str) -> None:
    if rows < 1 or columns < 1:
        raise RequestError(f"{name}: {rows} × {columns} pixels; expected at least one")
    if rows * columns > limits.MAX_IMAGE_PIXELS:
        raise RequestError(f"{name}: {rows} × {columns} pixels; limits.MAX_IMAGE_PIXELS is {limits.MAX_IMAGE_PIXELS}")


def center_crop(pixels: Pixels, height: int, width: int, resizer: Resizer = "pillow") -> Pixels:
    """Return the middle of an image as `[height, width, C]`; a smaller image is centered in zeros.

    If an odd number of lines is cut off, the larger half comes off the end. If an odd number of zero lines is added,
    the larger half comes before the image with `pillow`, as in transformers, and after it with `torch`.
    """
    out = np.zeros((height, width, pixels.shape[2]), pixels.dtype)
    (to_rows, from_rows), (to_columns, from_columns) = (
        _overlap(old, new, resizer == "pillow") for old, new in zip(pixels.shape[:2], (height, width), strict=True)
    )
    out[to_rows, to_columns] = pixels[from_rows, from_columns]
    return out


def _overlap(old: int, new: int, extra_before: bool) -> tuple[slice, slice]:
    """Return the slice of the new side that gets pixels, and the slice of the old side that they come from."""
    if old >= new:
        return slice(0, new), slice((old - new) // 2, (old - new) // 2 + new)
    start = (new - old + extra_before) // 2
    return slice(start, start + old), slice(0, old)


# -- files -------------------------------------------------------------------------------------


SIDES = (224, 224)
HALF = ImageProcessor(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
IMAGENET = ImageProcessor(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
OPENAI = ImageProcessor(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711),
    shortest_edge=224, resample=3, crop=SIDES,
)  # fmt: skip
# What the processors of transformers do without settings, by the prefix of the class name, which one of ENDINGS
# follows: `CLIPImageProcessor`, `CLIPImageProcessorFast` …
PROCESSORS: dict[str, ImageProcessor] = {
    "ViT": replace(HALF, size=SIDES, convert_rgb=False),
    "CLIP": OPENAI,
    "Bit": OPENAI,
    "Siglip": replace(HALF, size=SIDES, resample=3),
    "DeiT": replace(HALF, size=(256, 256), resample=3, crop=SIDES, convert_rgb=False),
    "DINOv3ViT": replace(IMAGENET, size=SIDES, convert_rgb=False, resizer="torch", rescale_first=True),
    "Siglip2": replace(HALF, convert_rgb=False, patch=16, max_patches=256),
    "Beit": replace(HALF, size=SIDES, resample=3, convert_rgb=False),
}
# Those for which a size given as one number is height and width, not the shorter side.
SQUARE = ("ViT", "DeiT", "DINOv3ViT", "Beit")

# Suffix of processors that have always resized with torch. The others resized with Pillow when their files were
# written; transformers 5 uses whatever is installed for all of them.
TORCH_ENDING = "Fast"
ENDINGS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
# Settings that do not change the pixels.
INERT = ("_valid_processor_keys", "data_format", "disable_grouping", "processor_class", "return_tensors", "use_fast")
# Settings that may change pixels, with the values at which they do not.
NEUTRAL = {
    "do_pad": (False,),
    "do_reduce_labels": (False,),
    "do_flip_channel_order": (False,),
    "input_data_format": ("channels_last",),
    "use_square_size": (False,),
}


def load_processor(directory: Folder, family: str) -> ImageProcessor | None:
    """Return the image processor of a checkpoint; None if it has no file for one.

    Args:
        directory: the checkpoint.
        family: prefix of the processor class that the model uses, such as `ViT`, for files that name no class.

    Raises:
        ConfigError: a setting is malformed or absurd.
        UnsupportedError: a class, or a setting that changes pixels, that is not handled; the message names it.
    """
    name, settings = FILE, directory.json(FILE)
    if not settings:
        name, settings = JOINT_FILE, directory.json(JOINT_FILE).get("image_processor") or {}
    if not settings:
        return None
    where = directory.where(name)
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: image_processor: expected an object, got {quote(settings)}")
    # null means the default of the class
    return read_processor(Fields({k: v for k, v in settings.items() if v is not None}, where), family)


def read_processor(c: Fields, family: str) -> ImageProcessor:
    """Return an image processor from its settings; see `load_processor`."""
    class_name = c.text("image_processor_type", c.text("feature_extractor_type", f"{family}ImageProcessor"))
    kind = next((k for k in PROCESSORS if class_name in [k + ending for ending in ENDINGS]), None)
    if kind is None:
        class_names = [f"{k}ImageProcessor" for k in PROCESSORS]
        raise UnsupportedError(
            f"{c.where}: image processor {quote(class_name)} is not built; known are {listing(class_names)}"
            f"{did_you_mean(class_name, class_names)}"
        )
    d = PROCESSORS[kind]
    resizes = c.flag("do_resize", True)
    if d.max_patches and not resizes:
        raise UnsupportedError(f"{c.where}: do_resize is false; images are resized to whole patches")
    size, edge = _size(c, d, kind in SQUARE) if resizes and not d.max_patches else (None, None)
    crops = c.flag("do_center_crop", d.crop is not None)
    normalises = c.flag("do_normalize", True)
    resample: int = c.integer("resample", d.resample, low=0)
    resizer: Resizer = "torch" if class_name.endswith(TORCH_ENDING) else d.resizer
    check_filter(c.where, resample)
    processor = ImageProcessor(
        size=size,
        shortest_edge=edge,
        resample=resample,
        crop=_sides(c, "crop_size", SIDES[0]) if crops else None,
        rescale=c.real("rescale_factor", 1 / 255) if c.flag("do_rescale", True) else None,
        mean=_channel_values(c, "image_mean", d.mean or (), -math.inf) if normalises else None,
        std=_channel_values(c, "image_std", d.std or (), 0.0) if normalises else None,
        convert_rgb=c.flag("do_convert_rgb", d.convert_rgb),
        resizer=resizer,
        rescale_first=d.rescale_first,
        patch=c.integer("patch_size", d.patch, high=MAX_SIDE) if d.max_patches else 0,
        max_patches=c.integer("max_num_patches", d.max_patches, high=MAX_SIDE) if d.max_patches else 0,
    )
    # A setting is not read if the step that uses it is off; then its value does not matter.
    known_fields = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std", "default_to_square")
    finish_model(c, (*INERT, *known_fields), NEUTRAL)
    return processor


def _size(c: Fields, d: ImageProcessor, is_square: bool) -> tuple[tuple[int, int] | None, int | None]:
    """Return (height and width, None), or (None, length of the shorter side); for one number if it `is_square`."""
    size = c.raw("size")
    if size is None:
        return d.size, d.shortest_edge
    if not isinstance(size, dict):
        square = c.flag("default_to_square", is_square)
        return (c.pair("size", high=MAX_SIDE), None) if square else (None, c.integer("size", high=MAX_SIDE))
    if set(size) == {"shortest_edge"}:
        return None, Fields(size, f"{c.where}: size").integer("shortest_edge", high=MAX_SIDE)
    if set(size) == {"height", "width"}:
        return _sides(c, "size", size), None
    raise UnsupportedError(f"{c.where}: size is {quote(size)}; supported are height and width, or shortest_edge alone")


def _sides(c: Fields, name: str, default: Any) -> tuple[int, int]:
    """Return height and width, given as an object or as one number."""
    value = c.raw(name, default)
    if not isinstance(value, dict):
        return c.pair(name, default, high=MAX_SIDE)
    group = Fields(value, f"{c.where}: {name}")
    sides = group.integer("height", high=MAX_SIDE), group.integer("width", high=MAX_SIDE)
    group.finish()
    return sides


def _channel_values(c: Fields, name: str, default: Sequence[float], low: float) -> tuple[float, ...]:
    """Return a number over `low` for each channel, given as a list or as one number for all."""
    if not isinstance(c.values.get(name, default), list | tuple):
        return (c.real(name, low=low),) * CHANNELS
    kind = "finite numbers" if math.isinf(low) else f"finite numbers over {low:g}"
    values = c.items(name, default, kind, lambda v: type(v) in (int, float) and math.isfinite(v) and v > low, CHANNELS)
    return tuple(map(float, values))
