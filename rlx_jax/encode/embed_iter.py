"""`Encoder.embed_iter`: the vectors of more texts than fit the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlx_jax.encode.embedding import chunks
from rlx_jax.encode.precision import OutputFormat
from rlx_jax.errors import RequestError, shown, suggest_keywords

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
