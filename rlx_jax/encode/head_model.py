"""Define `HeadModel`, which the classes for the heads of tasks over texts have in common."""

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


class HeadModel(EncoderModel):
    """A text model with the head of a task. The result for a text does not depend on the other texts of a request:
    texts share rows and are padded as in `Encoder`.

    Args:
        flow: a `ModelFlow` from ids `[batch, seq]` to logits `[batch, seq, labels]`, or a recipe with a head.
        head: the task, and what the logits are. By default the recipe's.
        max_seq_length: maximum number of tokens of a text, where it is truncated; None: the tokenizer's.
        tokenizer, padding, max_positions, options: as in `Encoder`.
    """

    task: ClassVar[str]
    of_pairs: ClassVar[tuple[bool, ...]] = (False,)
    """Whether requests are of pairs of texts, which may have token types."""
    encoder: Encoder
    artifact_plan = head_plan

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self,
        flow: Any,
        weights: Weights = None,
        *,
        head: TaskHead | None = None,
        tokenizer: TokenizerLike | None = None,
        padding: tuple[int, int] | None = None,
        max_positions: int | None = None,
        max_seq_length: int | None = None,
        **options: Unpack[CompileOptions],
    ) -> None:
        name, task_head = type(self).__name__, getattr(flow, "head", None) if head is None else head
        if not isinstance(task_head, TaskHead):
            raise RequestError(f"{name}: head is {shown(task_head)}; expected a TaskHead, or a recipe that has one")
        if task_head.task != self.task:
            raise RequestError(f"{name}: the head is for {task_head.task}; expected one for {self.task}")
        self.head = task_head
        self.encoder = Encoder(
            flow, weights, tokenizer=tokenizer,
            pipeline=SentencePipeline(pooling=(task_head.pooling,), max_seq_length=max_seq_length), padding=padding,
            max_positions=max_positions, **options,
        )  # fmt: skip
        self.tokenizer = self.encoder.tokenizer
        count, kind = len(task_head.labels), "labels"
        if self.task == MASKED:
            count, kind = self.encoder.vocab_size, "token ids"
        if self.encoder.width != count:
            raise RequestError(
                f"{name}: the head has {count} {kind}, and {self.model.name} returns {self.encoder.width} logits"
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels, in the order of the logits."""
        return self.head.labels

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self.encoder.vocab_size

    @property
    def selection(self) -> TokenSelection | None:
        """The tokens that a request reads the logits of; None: one for each text, as `head.pooling` says."""
        return ALL_TOKENS

    def check_runnable(self) -> None:
        """Raise an error if the model has no parameters or is called under a transformation of JAX."""
        self.model.refuse_traced()
        self.model.require_params(self._methods.partition("(")[0])

    def _run(self, requests: Requests, max_tokens: int | None, selection: TokenSelection = ALL_TOKENS) -> list[Vectors]:
        """Return the logits of the selected tokens of each text of a request."""
        self.check_runnable()
        return self.encoder.run_tokens(requests, selection, max_tokens)

    def run_texts(self, texts: Any, max_tokens: int | None = None) -> Any:
        """Run the request of the task for texts or id lists, without what is done with the logits."""
        return self._run(self.encoder.reader.read_texts(texts), max_tokens, self.selection or ALL_TOKENS)

    @suggest_keywords()
    def warmup(self) -> None:
        """Run every program once that requests with default options can need, as `Encoder.warmup` does."""
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
