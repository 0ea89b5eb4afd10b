"""Which keys attention may read, by kind; and the count of a block's operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlx_jax.errors import GraphError, did_you_mean, quote, wrong_arity


def check_arity(op: str, got: int, *expected: int) -> None:
    """Raise `GraphError` with op, expected, got."""
    if got not in expected:
        raise wrong_arity(op, " or ".join(map(str, expected)), got)


@dataclass(frozen=True)
class MaskKind:
    """Which keys a query reads.

    | kind | keys | operand |
    |---|---|---|
    | `NONE` | all | – |
    | `CAUSAL` | those up to the query's own | – |
    | `sliding_window(w)` | the last w of those | – |
    | `KEEP` | those that the mask keeps | keep mask `[B, T]`: 1 keeps, less than ½ drops |
    | `CUSTOM` | those that the mask keeps, up to the query's own | keep mask `[B, T]` |
    | `BIAS` | all, and the bias is added to their scores | floating `[B, N, S, T]`, or 1 on any axis |
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
        """Causal, and only the last `window` keys, the query's own included."""
        if window < 1:
            raise GraphError(f"a sliding window keeps at least 1 key, got {window}")
        return MaskKind("sliding_window", window)

    @property
    def operand(self) -> str:
        """The extra operand: `keep`, `bias` or none."""
        return {"keep": "keep", "custom": "keep", "bias": "bias"}.get(self.kind, "")

    @property
    def causal(self) -> bool:
        """Whether a query reads no key behind its own."""
        return self.kind in ("causal", "sliding_window", "custom")

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


MASK_KINDS = {kind: MaskKind(kind) for kind in ("none", "causal", "keep", "custom", "bias")}
MaskKind.NONE, MaskKind.CAUSAL = MASK_KINDS["none"], MASK_KINDS["causal"]
MaskKind.KEEP, MaskKind.CUSTOM, MaskKind.BIAS = MASK_KINDS["keep"], MASK_KINDS["custom"], MASK_KINDS["bias"]


def mask_kind(mask: MaskKind | str) -> MaskKind:
    """A `MaskKind` from itself or from text: "none", "causal", "keep", "custom", "bias", "sliding:4".

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
