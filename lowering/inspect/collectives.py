"""What a compiled program sends between devices, as XLA wrote it."""

from __future__ import annotations

import re
from collections import Counter

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_LINE = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")


def collectives(hlo: str) -> dict[str, int]:
    """How many of each kind stand in an HLO text. One that sends several arrays counts once; one in a loop does, too,
    however often it runs."""
    return dict(Counter(found[1] for line in hlo.splitlines() if (found := _LINE.match(line))))
