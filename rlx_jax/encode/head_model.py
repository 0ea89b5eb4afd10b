"""Define `HeadModel`, the base class of text models with a task head, and `LabelledModel`, of images as well."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from rlx_jax.encode.artifact_plan import head_plan
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.explain import explain as explain_ids
from rlx_jax.encode.explain import profile as profile_ids
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.text_rows import Requests
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.models.encoder import MASKED, TaskHead
from rlx_jax.program import Weights
from rlx_jax.runtime.explain import show as show_model
from rlx_jax.text.token_model import EncoderModel, TokenizerLike
from rlx_jax.weights.format import CompileOptions

# A request returns the results of every token.
ALL_TOKENS = TokenSelection()


class LabelledModel(EncoderModel):
    """A model with a task head."""

    head: TaskHead

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of the logits."""
        return self.head.labels

    def read_head(self, flow: Any, head: TaskHead | None) -> TaskHead:
        """Return the head, by default the one of a recipe."""
        head = getattr(flow, "head", None) if head is None else head
        if not isinstance(head, TaskHead):
            raise RequestError(f"{type(self).__name__}: head is {shown(head)}; expected a TaskHead, or a recipe's")
        return head

    def check_width(self, width: int) -> None:
        """Check that the model returns as many logits as the head has labels, or token ids."""
        is_masked = self.head.task == MASKED
        count = self.encoder.vocab_size if is_masked else len(self.labels)
        if width != count:
            raise RequestError(
                f"{type(self).__name__}: the head has {count} {'token ids' if is_masked else 'labels'}, and "
                f"{self.model.name} returns {width} logits"
            )


class HeadModel(LabelledModel):
    """A text model with a task head. The result for a text does not depend on the other texts of a request: texts are
    packed into rows and padded as in `Encoder`.

    Args:
        flow: a `ModelFlow` from ids `[batch, seq]` to logits `[batch, seq, labels]`, or a recipe with a head.
        head: the task, and what the logits are. By default the recipe's.
        max_seq_length: maximum number of tokens of a text, where it is truncated; None: the tokenizer's.
        tokenizer, padding, max_positions, options: as in `Encoder`.
    """

    task: ClassVar[str]
    of_pairs: ClassVar[tuple[bool, ...]] = (False,)
    """Kinds of inputs: False for single texts, True for pairs, which may have token types."""
    encoder: Encoder
    artifact_plan = head_plan

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, head: TaskHead | None = None,
        tokenizer: TokenizerLike | None = None, padding: tuple[int, int] | None = None,
        max_positions: int | None = None, max_seq_length: int | None = None, **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        self.head = self.read_head(flow, head)
        if self.head.task != self.task:
            raise RequestError(f"{type(self).__name__}: the head is for {self.head.task}; expected one for {self.task}")
        self.encoder = Encoder(
            flow, weights, tokenizer=tokenizer,
            pipeline=SentencePipeline(pooling=(self.head.pooling,), max_seq_length=max_seq_length), padding=padding,
            max_positions=max_positions, **options,
        )  # fmt: skip
        self.tokenizer = self.encoder.tokenizer
        self.check_width(self.encoder.width)

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self.encoder.vocab_size

    @property
    def selection(self) -> TokenSelection | None:
        """The tokens to return the logits of; None: one token per text, chosen by `head.pooling`."""
        return ALL_TOKENS

    def check_runnable(self) -> None:
        """Raise an error if the model has no parameters or is called under a transformation of JAX."""
        self.model.concrete_params(self._methods.partition("(")[0])

    def _run(self, requests: Requests, max_tokens: int | None, selection: TokenSelection = ALL_TOKENS) -> list[Vectors]:
        """Return the logits of the selected tokens of each text of a request."""
        self.check_runnable()
        return self.encoder.run_tokens(requests, selection, max_tokens)

    def run_texts(self, texts: Any, max_tokens: int | None = None) -> Any:
        """Return the logits of texts or id lists that the task's request computes, without postprocessing."""
        return self._run(self.encoder.reader.read_texts(texts), max_tokens, self.selection or ALL_TOKENS)

    @suggest_keywords()
    def warmup(self) -> None:
        """Compile and run every program that requests with default options use, as `Encoder.warmup` does."""
        self.encoder.run_all_programs(self.selection, self.of_pairs)

    explain, show, profile = explain_ids, show_model, profile_ids


class TokenLogits(HeadModel):
    """A `HeadModel` whose result is the logits of every token."""

    @suggest_keywords()
    def logits(self, texts: Any, *, max_tokens: int | None = None) -> Any:
        """Return the logits of each text's tokens, special ones included: a list of `[tokens, labels]` float32.

        A single string gives one array.

        Args:
            texts, max_tokens: as in `Encoder.embed`.

        Raises:
            As `Encoder.embed`.
        """
        requests = self.encoder.reader.read_texts(texts)
        rows = self._run(requests, max_tokens)
        return rows[0] if requests.is_single else rows
