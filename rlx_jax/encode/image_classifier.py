"""Define `ImageClassifier`, which gives images labels."""

from __future__ import annotations

from typing import Any, Unpack

from rlx_jax.encode.classifier import check_top_k, classifications
from rlx_jax.encode.explain import profile_images
from rlx_jax.encode.head_model import LabelledModel
from rlx_jax.encode.images import ImageProcessor
from rlx_jax.encode.pooled import Vectors, pooled_width
from rlx_jax.encode.vision import VisionEncoder
from rlx_jax.errors import suggest_keywords
from rlx_jax.models.encoder import LABEL_LOGITS, TaskHead
from rlx_jax.program import Weights
from rlx_jax.weights.format import CompileOptions


class ImageClassifier(LabelledModel):
    """Classify images.

    Args:
        flow: a `ModelFlow` from pixel values `[batch, channels, height, width]` to the output `label_logits`
            `[batch, labels]`, or a recipe with a head.
        head: the labels and the kind of problem. By default the recipe's.
        processor, options: as in `VisionEncoder`.
    """

    encoder: VisionEncoder
    _methods = "classify(images) returns labels with probabilities, logits(images) the numbers before them"

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, head: TaskHead | None = None,
        processor: ImageProcessor | None = None, **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        self.head = self.read_head(flow, head)
        self.encoder = VisionEncoder(flow, weights, processor=processor, **options)
        self.check_width(pooled_width(self.model, LABEL_LOGITS))

    @suggest_keywords()
    def logits(self, images: Any) -> Vectors:
        """Return the logits of images, `[n, labels]` float32; of a single image `[labels]`.

        Args:
            images: images or pixel values, as in `VisionEncoder.embed`.

        Raises:
            As `VisionEncoder.embed`.
        """
        return self.encoder.run(images, LABEL_LOGITS)

    @suggest_keywords()
    def classify(self, images: Any, *, top_k: int | None = None) -> Any:
        """Return a `Classification` for each image; for a single image, one. Scores and `top_k` as in `Classifier`.

        Raises:
            RequestError: `top_k` is not positive. Others as `logits`.
        """
        count = check_top_k(top_k)
        return classifications(self.head, self.logits(images), count)

    profile, run_images = profile_images, classify
