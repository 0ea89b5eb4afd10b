"""A model that generates, as requests see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.errors import RequestError
from rlx_jax.generate.stopping import cut, split_stops
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.requests import NO_TOKENIZER, Prompts, id_list
from rlx_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Speaker:
    """A model that generates, with what a request needs to know of it; fields as in `CausalLM`."""

    model: CompiledModel
    vocab_size: int
    tokenizer: Tokenizer | None
    max_positions: int | None
    buckets: Buckets
    bos_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def owner(self) -> tuple[Programs, str]:
        """Whose states this model takes: those of its flow's programs, whatever the parameters."""
        return self.model.programs, self.model.name

    def needed(self, what: str = "strings need", instead: str = "pass token ids") -> Tokenizer:
        """The tokenizer. What a message says: who needs it, and what goes without.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(f"{what} a tokenizer, and this model has none: {NO_TOKENIZER}; or {instead}")
        return self.tokenizer

    def decode(self, ids: list[int]) -> str:
        """The text of new tokens."""
        return self.needed().decode(ids)

    def text(self, ids: list[int], words: tuple[str, ...]) -> str:
        """The text up to the first stop string."""
        return cut(self.decode(ids), words)

    def rows(self, asked: Prompts) -> list[list[int]]:
        """Prompts as ids, each with at least one.

        Raises:
            RequestError, TokenIdError: an empty one, and there is no begin token; ids that the model does not have.
        """
        given = asked.ids or [] if asked.texts is None else self.needed().encode_batch(asked.texts)
        rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(given)]
        for i, row in enumerate(rows):
            if not row and self.bos_id is None:
                raise RequestError(f"prompts[{i}] is empty, and the model has no begin token to start from")
        return [row or [self.bos_id] for row in rows]  # type: ignore[list-item]

    def stops(self, stop: Any) -> tuple[tuple[str, ...], set[int]]:
        """Strings and ids that end a row, end tokens among them."""
        words, others = split_stops(stop)
        if words:
            self.needed("stop: strings need")
        return words, {*id_list(others, self.vocab_size, "stop"), *self.eos_ids}
