"""`DualEncoder`: vectors of texts and of images that can be compared."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.executable import Progress
from rlx_jax.encode.images import ImageProcessor
from rlx_jax.encode.vision import BATCH, POOLED, Vectors, VisionEncoder, check_finite
from rlx_jax.errors import GraphError, RequestError, shown
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import Weights
from rlx_jax.runtime.compiling import finish_models
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import open_programs
from rlx_jax.runtime.report import Report
from rlx_jax.text.opening import check_positions, check_tokenizer, known_positions
from rlx_jax.text.padding import block_width, bucket, padded_to
from rlx_jax.text.requests import id_list, split_prompts, whole_number
from rlx_jax.text.tokenizer import Tokenizer

MASK = "attention_mask"


class DualEncoder:
    """Two towers over one set of parameters.

    Args:
        texts: a flow or recipe from ids `[batch, seq]`, its first input, whose side output `pooled` is one vector for
            each text. It may declare `attention_mask` with default None.
        images: as the flow of a `VisionEncoder`.
        similarity: from `texts` `[texts, E]` and `images` `[batch, E]` to `[texts, batch]`; None: the cosine.
        tokenizer, processor: for strings and for images; `rlx_jax.load` brings the checkpoint's own.
        padding: (tokens, id): texts are padded to so many tokens by that id, and padding is read as any other token.
            None: padding is hidden by `attention_mask`.
        profile, mesh, strict, progress: as `rlx_jax.compile` and `rlx_jax.load` have them.
    """

    def __init__(
        self,
        texts: Any,
        images: Any,
        weights: Weights = None,
        *,
        similarity: Any = None,
        tokenizer: Tokenizer | None = None,
        processor: ImageProcessor | None = None,
        padding: tuple[int, int] | None = None,
        profile: CompileProfile | None = None,
        mesh: Any = None,
        strict: bool = True,
        progress: Progress | None = None,
    ) -> None:
        flows = [texts, images] + ([] if similarity is None else [similarity])
        opened = open_programs(
            flows, weights, profile, strict, merge=True, progress=progress, serves=("forward",), mesh=mesh
        )
        first, second, *third = finish_models(opened).values()
        self.texts: CompiledModel = first
        self.images = VisionEncoder(second, processor=processor)
        self.compare = third[0] if third else None
        self.tokenizer, self.max_positions = check_tokenizer(tokenizer), known_positions(first)
        self.vocab_size, self.hides = check_texts(first, padding)
        self.padding = check_padding(padding, self.vocab_size, self.max_positions)

    def embed(self, texts: Any) -> Vectors:
        """One vector for each text or id list: `[n, E]` float32, as the tower gives it, before any division by its
        length; a single string gives `[E]`.

        Raises:
            RequestError: not strings or id lists, or strings without a tokenizer. TokenIdError: an id out of range.
            SequenceLengthError: ids over the positions that the model knows; strings are cut.
            NumericsError: vectors that are not finite.
        """
        self.texts.refuse_traced()
        asked = split_prompts(texts, "texts", flat=False)
        rows = self._encoded(asked.texts) if asked.texts is not None else []
        for i, ids in enumerate(asked.ids or []):
            rows.append(id_list(ids, self.vocab_size, f"texts[{i}]"))
            check_positions(len(rows[-1]), self.max_positions, f"texts[{i}]")
        for i, row in enumerate(rows):
            if not row:
                raise RequestError(f"texts[{i}] has no token ids")
        if not rows:
            raise RequestError("texts: there are none")
        most = self.texts.settings.buckets.batch[-1] if self.texts.settings.buckets.batch else BATCH
        vectors = np.concatenate([self._pooled(rows[i : i + most], most) for i in range(0, len(rows), most)])
        check_finite(vectors, "texts")
        return vectors[0] if asked.single else vectors

    def embed_images(self, images: Any) -> Vectors:
        """One vector for each image: see `VisionEncoder.embed`."""
        return self.images.embed(images)

    def similarity(self, texts: Any, images: Any) -> Vectors:
        """How well each text fits each image, by the model's own scale: `[texts, images]` float32, also of single ones.

        Of CLIP the logits, whose softmax over texts gives the probability of each; of SigLIP those whose sigmoid is the
        probability that the two belong together.

        Raises:
            RequestError: as `embed` and `embed_images`.
        """
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

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise RequestError("strings need a tokenizer: the checkpoint has no tokenizer.json; pass token ids")
        limits = (self.tokenizer.model_max_length, self.max_positions, self.padding[0] if self.padding else None)
        longest = min((x for x in limits if x is not None), default=None)
        rows = self.tokenizer.encode_batch(texts, max_length=longest)
        return [id_list(row, self.vocab_size, f"texts[{i}]") for i, row in enumerate(rows)]

    def _pooled(self, rows: list[list[int]], most: int) -> Vectors:
        """Vectors of a batch, which is padded to one of few sizes."""
        buckets = self.texts.settings.buckets
        count, fill = buckets.rows(bucket(len(rows), 1, most)), self.padding[1] if self.padding else 0
        longest = max(map(len, rows))
        width = self.padding[0] if self.padding else block_width(buckets, longest, self.max_positions)
        block, keep = np.full((count, width), fill, np.int32), np.zeros((count, width), np.int32)
        for i, row in enumerate(rows):
            block[i, : len(row)] = row
            keep[i, : len(row)] = 1
        keep[len(rows) :, 0] = 1  # a row that is padding holds one token
        hidden: dict[str, Any] = {MASK: keep} if self.hides else {}
        found = self.texts(block, **hidden)
        vectors: Vectors = np.asarray(jax.device_get(found[POOLED] if isinstance(found, dict) else found))[: len(rows)]
        return vectors

    def report(self) -> Report:
        """What compiling the tower of texts cost, and its last program's needs; `images.report()` is the other's."""
        return self.texts.report()


def check_texts(model: CompiledModel, padding: tuple[int, int] | None) -> tuple[int, bool]:
    """The vocabulary size of a tower of texts, and whether padding is hidden from it.

    Raises:
        GraphError: its first input does not index an embedding, or it has no output `pooled`, or nothing that hides
            padding.
    """
    first = model.flow.inputs[0].name
    rows = model.template().bounds.ids.get(first)
    if rows is None:
        raise GraphError(f"{model.name}: the first input, {first!r}, does not index an embedding")
    if POOLED not in model.output_names:
        raise GraphError(
            f"{model.name}: embed needs an output {POOLED!r} [batch, width]: emit.output({POOLED!r}, vector)"
        )
    masked = any(i.name == MASK for i in model.inputs)
    if not masked and padding is None:
        raise GraphError(f"{model.name}: declares no input {MASK!r} (default=None) that hides padding; pass padding=")
    return rows, padding is None


def check_padding(padding: Any, vocab_size: int, positions: int | None) -> tuple[int, int] | None:
    """Tokens and id of padding.

    Raises:
        RequestError: no two integers. SequenceLengthError: over the positions. TokenIdError: no id.
    """
    if padding is None:
        return None
    if not isinstance(padding, tuple) or len(padding) != 2:
        raise RequestError(f"padding is {shown(padding)}; expected (tokens, id)")
    tokens = whole_number("padding[0]", padding[0], 1)
    check_positions(tokens, positions, "padding[0]")
    return tokens, id_list([padding[1]], vocab_size, "padding[1:]")[0]
