"""Define `DualEncoder`, which computes comparable vectors of texts and images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Unpack

import jax
import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.images import ImageProcessor
from rlx_jax.encode.pooled import Vectors, pooled_width
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import RequestError, check_names, suggest_keywords
from rlx_jax.inspection.page import Page
from rlx_jax.inspection.records import Inspection
from rlx_jax.ir.types import is_float
from rlx_jax.program import Weights
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.compile_flow import finish_models
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.runtime.report import Report
from rlx_jax.text.request_checks import pad_to
from rlx_jax.text.token_model import TaskModel, TokenizerLike, open_tokenizer
from rlx_jax.weights.format import CompileOptions, OpenOptions


class DualEncoder(TaskModel):
    """A text tower and an image tower that share one set of parameters.

    Args:
        texts: like the flow of an `Encoder`, with a side output `pooled` that is one vector for each text.
        images: like the flow of a `VisionEncoder`.
        similarity: a flow from `texts` `[texts, E]` and `images` `[batch, E]` to `[texts, batch]`; None: the cosine.
        tokenizer, processor: for strings and for images; `rlx_jax.load` passes the checkpoint's.
        padding: as in `Encoder`.
        options: `profile`, `mesh`, `strict`, `missing`, `key` and `progress`, as in `rlx_jax.compile` and
            `rlx_jax.load`.
    """

    _methods = "embed(texts) and embed_images(images) return vectors, similarity(texts, images) their similarity"

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, texts: Any, images: Any, weights: Weights = None, *, similarity: Any = None,
        tokenizer: TokenizerLike | None = None, processor: ImageProcessor | None = None,
        padding: tuple[int, int] | None = None, **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        text_tokenizer = open_tokenizer(tokenizer)
        flows = [texts, images] + ([] if similarity is None else [similarity])
        programs = make_programs(flows, weights, OpenOptions(**options), merge=True, serves=("forward",))
        text_model, image_model, *similarity_model = finish_models(programs).values()
        self.texts = Encoder(text_model, tokenizer=text_tokenizer, padding=padding)
        # Raises here, at setup, if the output `pooled` is missing.
        pooled_width(text_model)
        self.images = VisionEncoder(image_model, processor=processor)
        self.compare = similarity_model[0] if similarity_model else None

    def __repr__(self) -> str:
        return f"DualEncoder({self.texts!r}, {self.images!r})"

    def __str__(self) -> str:
        return f"{self.texts}\n\n{self.images}"

    def _repr_html_(self) -> str:
        return self.texts._repr_html_() + self.images._repr_html_()

    @property
    def model(self) -> CompiledModel:
        """The text tower, with parameters that all parts share. Setting it passes its parameters to all parts:
        `both.model = both.model.replace(params)`.

        Raises:
            RequestError: one tower got other parameters than the rest; or the new model was compiled separately.
        """
        parts = [self.images.model, *([] if self.compare is None else [self.compare])]
        params = self.texts.model.params
        for part in parts:
            if _differ_in_arrays(params, part.params):
                raise RequestError(
                    f"{part.name} has other parameters than {self.texts.model.name}, and a DualEncoder has one set: "
                    "both.model = both.texts.model.replace(params) gives them to all parts"
                )
        return self.texts.model

    @model.setter
    def model(self, model: CompiledModel) -> None:
        if model.programs is not self.texts.model.programs:
            raise RequestError(
                "model: expected this DualEncoder's model with other parameters, both.model.replace(params), got a "
                f"separately compiled {model.name}; for other programs make a DualEncoder of them"
            )
        params = model.require_params("a DualEncoder")
        towers = [self.texts.model.replace(params), self.images.model.replace(params)]
        self.compare = None if self.compare is None else self.compare.replace(params)
        self.texts.model, self.images.model = towers

    @suggest_keywords()
    def embed(self, texts: Any, *, max_tokens: int | None = None, show_progress: bool | None = None) -> Vectors:
        """Return one vector for each text: see `Encoder.embed`. The vectors are not normalised."""
        if getattr(texts[0] if isinstance(texts, list | tuple) and texts else texts, "ndim", 0) >= 3:
            raise RequestError("texts: expected strings or token ids, got images; embed_images takes them")
        return self.texts.embed(texts, max_tokens=max_tokens, show_progress=show_progress)

    @suggest_keywords()
    def embed_iter(self, texts: Iterable[Any], *, max_tokens: int | None = None) -> Iterator[Vectors]:
        """Yield the vector of each text of any iterable, in order: see `Encoder.embed_iter`."""
        return self.texts.embed_iter(texts, max_tokens=max_tokens)

    @suggest_keywords()
    def embed_images(self, images: Any) -> Vectors:
        """Return one vector for each image: see `VisionEncoder.embed`."""
        return self.images.embed(images)

    @suggest_keywords()
    def similarity(self, texts: Any, images: Any) -> Vectors:
        """Return how well each text fits each image, on the model's scale: `[texts, images]` float32, also for single
        inputs.

        For CLIP these are logits: their softmax over texts is the probability of each text. For SigLIP their sigmoid is
        the probability that text and image belong together.

        Raises:
            RequestError: as `embed` and `embed_images`.
        """
        for label, value in (("texts", texts), ("images", images)):
            if getattr(value, "ndim", 0) in (1, 2) and is_float(value.dtype):
                raise RequestError(
                    f"{label}: expected {label}, got an array of floats {list(value.shape)}: similarity makes the "
                    "vectors itself; the cosine of two of embed and embed_images is their product over both lengths"
                )
        text_rows, image_rows = np.atleast_2d(self.embed(texts)), np.atleast_2d(self.embed_images(images))
        if self.compare is None:
            units = [v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (text_rows, image_rows)]
            cosines: Vectors = units[0] @ units[1].T
            return cosines
        # Padded to buckets, so that few sizes of the comparison compile.
        padded = [pad_to(v, bucket_size(len(v), 1, None), v.shape[1]) for v in (text_rows, image_rows)]
        outputs = self.compare(texts=padded[0], images=padded[1])
        scores = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs
        padded_scores: Vectors = np.asarray(jax.device_get(scores))
        return padded_scores[: len(text_rows), : len(image_rows)]

    def report(self, **sizes: int) -> Report:
        """Return the cost of compiling the text tower and the requirements of its last program.

        With `sizes` it reports the requirements of `forward` at these sizes. `images.report()` reports the image tower.
        """
        return self.texts.report(**sizes)

    def explain(self, part: Literal["texts", "images"] = "texts", **options: Any) -> Inspection:
        """Explain one tower; `options` as in `Encoder.explain` or `VisionEncoder.explain`.

        Raises:
            RequestError: another part. Others as there.
        """
        return self._tower(part, "explain").explain(**options)

    def show(self, part: Literal["texts", "images"] = "texts", **options: Any) -> Page:
        """Return the page of one tower; `options` as in `Encoder.show`, errors as in `explain`."""
        return self._tower(part, "show").show(**options)

    def _tower(self, part: str, request: str) -> Encoder | VisionEncoder:
        """Return one tower by the name of its inputs."""
        check_names([part], ("texts", "images"), f"{request}: there is no part", "; there are", RequestError)
        return self.texts if part == "texts" else self.images

    @suggest_keywords()
    def profile(self, texts: Any, images: Any) -> BlockTimes:
        """Return the time by block of `similarity(texts, images)`, which runs three times: the last two under
        `jax.profiler`, of which the last counts."""
        return profile_run([self.texts.model.programs], lambda: self.similarity(texts, images))


def _differ_in_arrays(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Return whether two sets of parameters are not the same array objects."""
    if one is None or other is None:
        return one is not other
    return any(one[name] is not array for name, array in other.items())
