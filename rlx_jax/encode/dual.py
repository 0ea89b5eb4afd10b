"""`DualEncoder`: vectors of texts and of images that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import numpy as np

from rlx_jax.compiler.settings import bucket
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.images import ImageProcessor
from rlx_jax.encode.pooled import Vectors, pooled_width
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import RequestError, suggests
from rlx_jax.ir.types import is_float
from rlx_jax.program import Weights
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.compile_flow import finish_models
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import open_programs
from rlx_jax.runtime.report import Report
from rlx_jax.text.padding import padded_to
from rlx_jax.text.token_model import OpenedModel, TokenizerLike, open_tokenizer
from rlx_jax.weights.format import CompileOptions, OpenOptions


class DualEncoder(OpenedModel):
    """Two towers over one set of parameters.

    Args:
        texts: as the flow of an `Encoder`, whose side output `pooled` is one vector for each text.
        images: as the flow of a `VisionEncoder`.
        similarity: from `texts` `[texts, E]` and `images` `[batch, E]` to `[texts, batch]`; None: the cosine.
        tokenizer, processor: for strings and for images; `rlx_jax.load` brings the checkpoint's own.
        padding: as `Encoder` has it.
        options: `profile`, `mesh`, `strict`, `missing`, `key` and `progress`, as `rlx_jax.compile` and `rlx_jax.load`
            have them.
    """

    _methods = "embed(texts), embed_images(images) and similarity(texts, images) give vectors and how alike they are"

    @suggests(*CompileOptions.__annotations__)
    def __init__(
        self,
        texts: Any,
        images: Any,
        weights: Weights = None,
        *,
        similarity: Any = None,
        tokenizer: TokenizerLike | None = None,
        processor: ImageProcessor | None = None,
        padding: tuple[int, int] | None = None,
        **options: Unpack[CompileOptions],
    ) -> None:
        known = open_tokenizer(tokenizer)
        flows = [texts, images] + ([] if similarity is None else [similarity])
        opened = open_programs(flows, weights, OpenOptions(**options), merge=True, serves=("forward",))
        first, second, *third = finish_models(opened).values()
        self.texts = Encoder(first, tokenizer=known, padding=padding)
        pooled_width(first)  # or it says what is missing
        self.images = VisionEncoder(second, processor=processor)
        self.compare = third[0] if third else None

    def __repr__(self) -> str:
        return f"DualEncoder({self.texts!r}, {self.images!r})"

    def __str__(self) -> str:
        return f"{self.texts}\n\n{self.images}"

    def _repr_html_(self) -> str:
        return self.texts._repr_html_() + self.images._repr_html_()

    @property
    def model(self) -> CompiledModel:
        """The tower of texts, whose parameters are those of both; to set it, `both.model = both.model.replace(params)`,
        gives them to all parts.

        Raises:
            RequestError: one tower alone was given others; or it is set to a model that is none of its own.
        """
        parts = [self.images.model, *([] if self.compare is None else [self.compare])]
        held = self.texts.model.params
        for part in parts:
            if _differ(held, part.params):
                raise RequestError(
                    f"{part.name} has other parameters than {self.texts.model.name}, and a DualEncoder has one set: "
                    "both.model = both.texts.model.replace(params) gives them to all parts"
                )
        return self.texts.model

    @model.setter
    def model(self, model: CompiledModel) -> None:
        if model.programs is not self.texts.model.programs:
            raise RequestError(
                "model: expected one of this DualEncoder with other parameters, both.model.replace(params), got one of "
                f"{model.name} that was compiled by itself; for other programs make a DualEncoder of them"
            )
        params = model.require_params("a DualEncoder")
        towers = [self.texts.model.replace(params), self.images.model.replace(params)]
        self.compare = None if self.compare is None else self.compare.replace(params)
        self.texts.model, self.images.model = towers

    @suggests()
    def embed(self, texts: Any, *, max_tokens: int | None = None, show_progress: bool | None = None) -> Vectors:
        """One vector for each text: see `Encoder.embed`. It is as the tower gives it, before any division by its
        length."""
        if getattr(texts[0] if isinstance(texts, list | tuple) and texts else texts, "ndim", 0) >= 3:
            raise RequestError("texts: expected strings or token ids, got images; embed_images takes them")
        return self.texts.embed(texts, max_tokens=max_tokens, show_progress=show_progress)

    @suggests()
    def embed_images(self, images: Any) -> Vectors:
        """One vector for each image: see `VisionEncoder.embed`."""
        return self.images.embed(images)

    @suggests()
    def similarity(self, texts: Any, images: Any) -> Vectors:
        """How well each text fits each image, by the model's own scale: `[texts, images]` float32, also of single ones.

        Of CLIP the logits, whose softmax over texts gives the probability of each; of SigLIP those whose sigmoid is the
        probability that the two belong together.

        Raises:
            RequestError: as `embed` and `embed_images`.
        """
        for what, given in (("texts", texts), ("images", images)):
            if getattr(given, "ndim", 0) in (1, 2) and is_float(given.dtype):
                raise RequestError(
                    f"{what}: expected {what}, got an array of floats {list(given.shape)}: similarity makes the "
                    "vectors itself; the cosine of two of embed and embed_images is their product over both lengths"
                )
        words, pictures = np.atleast_2d(self.embed(texts)), np.atleast_2d(self.embed_images(images))
        if self.compare is None:
            units = [v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (words, pictures)]
            cosines: Vectors = units[0] @ units[1].T
            return cosines
        padded = [padded_to(v, bucket(len(v), 1, None), v.shape[1]) for v in (words, pictures)]
        found = self.compare(texts=padded[0], images=padded[1])
        scores = next(iter(found.values())) if isinstance(found, dict) else found
        whole: Vectors = np.asarray(jax.device_get(scores))
        return whole[: len(words), : len(pictures)]

    def report(self, **sizes: int) -> Report:
        """What compiling the tower of texts cost, and its last program's needs, or with `sizes` those of `forward` at
        these; `images.report()` is the other's."""
        return self.texts.report(**sizes)

    @suggests()
    def profile(self, texts: Any, images: Any) -> BlockTimes:
        """Time by block of `similarity(texts, images)`, which runs twice: the second time under `jax.profiler`."""
        return profile_run([self.texts.model.programs], lambda: self.similarity(texts, images))


def _differ(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether they are not the same arrays."""
    if one is None or other is None:
        return one is not other
    return any(one[name] is not array for name, array in other.items())
