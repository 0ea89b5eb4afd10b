"""What `model.report()` tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx_jax.lowering.fusion_report import FusionReport


@dataclass(frozen=True)
class Report:
    """What compiling cost and what the program needs. Times in seconds, sizes in bytes.

    `compiles` counts compiled programs, `recompiles` those made after warm-up, small functions beside them included.
    """

    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    parameter_bytes: int
    compiles: int
    recompiles: int
    refusals: tuple[str, ...]
    fusion: FusionReport
    attention: tuple[str, ...] = ()
    flops: int | None = None
    donated_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_activation_bytes: int | None = None

    def __str__(self) -> str:
        rows = [f"{k:<18} {v:8.3f} s" for k, v in self.seconds.items()]
        rows += [f"{'parameters':<18} {self.parameter_bytes:,} bytes", f"{'compiles':<18} {self.compiles}"]
        rows += [f"{'recompiles':<18} {self.recompiles}"] if self.recompiles else []
        for name in ("flops", "donated_bytes", "peak_bytes", "estimated_activation_bytes"):
            if (value := getattr(self, name)) is not None:
                rows.append(f"{name:<18} {value:,}")
        rows += [f"{'nodes':<18} {', '.join(f'{name} {count}' for name, count in self.nodes.items())}"]
        rows += [f"{'fusion':<18} {self.fusion.summary}", *(f"not fused: {m}" for m in self.fusion.missed)]
        rows += [f"{'attention':<18} {a}" for a in self.attention]
        rows += [f"not rolled: {r}" for r in self.refusals]
        return "\n".join(rows)
