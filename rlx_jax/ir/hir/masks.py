"""`MaskKind`, which keys attention may read, and the check of the number of operands of a block."""

from __future__ import annotations

from typing import ClassVar

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, check_integer, did_you_mean, quote, wrong_arity


def check_arity(op: str, got: int, *expected: int) -> None:
    """Check the number of operands of an op.

    Raises:
        GraphError: `got` is none of `expected`; the message has both and begins with `op`.
    """
    if got not in expected:
        raise wrong_arity(op, " or ".join(map(str, expected)), got)


@dataclass(frozen=True)
class MaskKind:
    """The kind of an attention mask: which keys a query reads.

    | kind | keys | operand |
    |---|---|---|
    | `NONE` | all | – |
    | `CAUSAL` | up to the query's position | – |
    | `sliding_window(w)` | the last w keys up to the query's position | – |
    | `local(w)` | those less than w positions away, before and after | – |
    | `KEEP` | all that the mask keeps | keep mask `[B, T]`: 1 keeps, less than ½ drops |
    | `CUSTOM` | up to the query's position, if the mask keeps them | keep mask `[B, T]` |
    | `BIAS` | all, with the bias added to their scores | floating `[B, N, S, T]`, or 1 on any axis |
    """

    kind: str
    window: int | None = None
    NONE: ClassVar[MaskKind]
    CAUSAL: ClassVar[MaskKind]
    KEEP: ClassVar[MaskKind]
    CUSTOM: ClassVar[MaskKind]
    BIAS: ClassVar[MaskKind]

    @staticmethod
    def sliding_window(window: int) -> MaskKind:
        """Return a causal mask that keeps only the last `window` keys, including the query's own."""
        return MaskKind("sliding_window", check_integer("mask: the number of keys of a window", window, 1, GraphError))

    @staticmethod
    def local(window: int) -> MaskKind:
        """Return a mask that is not causal and keeps the keys less than `window` positions away."""
        return replace(MaskKind.sliding_window(window), kind="local")

    @property
    def operand(self) -> str:
        """The extra operand: "keep", "bias", or "" for none."""
        return {"keep": "keep", "custom": "keep", "bias": "bias"}.get(self.kind, "")

    @property
    def causal(self) -> bool:
        """Whether a query reads no key after its own."""
        return self.kind in ("causal", "sliding_window", "custom")

    @property
    def ahead(self) -> int:
        """The number of keys after the query's own that a window covers."""
        return self.window - 1 if self.kind == "local" and self.window is not None else 0

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


MASK_KINDS = {kind: MaskKind(kind) for kind in ("none", "causal", "keep", "custom", "bias")}
MaskKind.NONE, MaskKind.CAUSAL = MASK_KINDS["none"], MASK_KINDS["causal"]
MaskKind.KEEP, MaskKind.CUSTOM, MaskKind.BIAS = MASK_KINDS["keep"], MASK_KINDS["custom"], MASK_KINDS["bias"]


def mask_kind(mask: MaskKind | str) -> MaskKind:
    """Return the `MaskKind` for itself or for a text: "none", "causal", "keep", "custom", "bias", "sliding:4".

    >>> str(mask_kind("sliding:4"))
    'sliding_window(4)'
    """
    if isinstance(mask, MaskKind):
        return mask
    name, _, window = str(mask).lower().partition(":")
    if name in ("sliding", "sliding_window", "slidingwindow") and window.isdigit():
        return MaskKind.sliding_window(int(window))
    if name not in MASK_KINDS or window:
        raise GraphError(f"mask: unknown mask kind {quote(mask)}{did_you_mean(name, [*MASK_KINDS, 'sliding:N'])}")
    return MASK_KINDS[name]
