"""What `model.report()` tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx_jax.compiler.settings import Loop
from rlx_jax.device import Device
from rlx_jax.errors import listing
from rlx_jax.lowering.division import Division
from rlx_jax.lowering.inspect.fusion_report import FusionReport
from rlx_jax.lowering.lir.layout import Layout


@dataclass(frozen=True)
class Speculated:
    """What became of drafts: tokens that were `drafted` and read, those of them that were `accepted`, and the `steps`
    that took, of all rows together. Beside the accepted ones each step gives one token to each row that runs."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.accepted:,} of {self.drafted:,} drafts accepted in {self.steps:,} steps"


@dataclass(frozen=True)
class Report:
    """What compiling cost and what the program needs. Times in seconds, sizes in bytes.

    `program` is the one that ran last, with its sizes; what depends on sizes is of it. `compiles` counts compiled
    programs, `evicted` those of them that are not kept any more (`buckets.programs`), `recompiles` those made after
    warm-up, small functions beside them included. `embedding`: how an encoder lays texts out, or why not otherwise.
    `speculative`: of the last request that drafted, so far. `seed`: that the last request drew its tokens from, its own
    or one made for it; None where it drew none, or from a key. `initialised`: the keys of the weights that were drawn,
    as no source had them (`missing="init"`).

    Over a mesh: `mesh` are its axes, `leaf_bytes` what one device has of the parameters, `shardings` how leaves are
    divided and how many are, `whole` the leaves of more than one axis that every device has whole, `collectives` what
    the program sends between devices, by kind. Bytes of programs are those of one device.
    """

    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    parameter_bytes: int
    compiles: int
    evicted: int
    recompiles: int
    refusals: tuple[str, ...]
    fusion: FusionReport
    device: Device
    program: str = ""
    loop: Loop | None = None
    attention: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    recurrences: tuple[str, ...] = ()
    flops: int | None = None
    bytes: int | None = None
    workspace: int | None = None
    donated_bytes: int | None = None
    peak_bytes: int | None = None
    estimated_activation_bytes: int | None = None
    mesh: str = ""
    leaf_bytes: int | None = None
    shardings: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    collectives: Mapping[str, int] = field(default_factory=dict)
    embedding: str = ""
    speculative: Speculated | None = None
    seed: int | None = None
    initialised: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{k:<18} {v:8.3f} s" for k, v in self.seconds.items()]
        rows += [f"{'parameters':<18} {self.parameter_bytes:,} bytes", f"{'compiles':<18} {self.compiles}"]
        rows += [f"{'evicted':<18} {self.evicted}"] if self.evicted else []
        rows += [f"{'recompiles':<18} {self.recompiles}"] if self.recompiles else []
        rows += [f"{'program':<18} {self.program}"] if self.program else []
        for name in ("flops", "bytes", "workspace", "donated_bytes", "peak_bytes", "estimated_activation_bytes"):
            if (value := getattr(self, name)) is not None:
                rows.append(f"{name:<18} {value:,}")
        rows += [f"{'nodes':<18} {', '.join(f'{name} {count}' for name, count in self.nodes.items())}"]
        rows += [f"{'fusion':<18} {self.fusion.summary}", *(f"not fused: {m}" for m in self.fusion.missed)]
        rows += [f"{'planned for':<18} {self.device}"]
        rows += [f"{'attention':<18} {a}" for a in self.attention]
        rows += [f"{'products':<18} {p}" for p in self.products]
        rows += [f"{'experts':<18} {e}" for e in self.experts]
        rows += [f"{'recurrence':<18} {r}" for r in self.recurrences]
        rows += [f"{'generating loop':<18} {self.loop}"] if self.loop else []
        rows += [f"{'embedding':<18} {self.embedding}"] if self.embedding else []
        rows += [f"{'speculative':<18} {self.speculative}"] if self.speculative else []
        rows += [f"{'seed':<18} {self.seed}"] if self.seed is not None else []
        if self.initialised:
            rows += [f"{'initialised':<18} {len(self.initialised)} weights: {listing(self.initialised, 8)}"]
        rows += self._on_mesh() if self.mesh else []
        rows += [f"not rolled: {r}" for r in self.refusals]
        return "\n".join(rows)

    def _on_mesh(self) -> list[str]:
        found = ", ".join(f"{count} {name}" for name, count in self.collectives.items())
        return [
            f"{'mesh':<18} {self.mesh}",
            f"{'of one device':<18} {self.leaf_bytes:,} bytes of parameters",
            *(f"{'divided':<18} {count} leaves as {spec}" for spec, count in self.shardings.items()),
            *([f"{'collectives':<18} {found or 'none'}"] if self.program else []),
            *(f"whole on each device: {name}" for name in self.whole),
        ]


def mesh_facts(division: Division | None, layout: Layout) -> dict[str, Any]:
    """Of a report, what depends on the mesh; nothing on one device."""
    if division is None:
        return {}
    placed = [division.placed(program) for program in layout.leaves.values()]
    return {
        "mesh": division.text(),
        "leaf_bytes": sum(nbytes for _, nbytes in placed),
        "shardings": dict(Counter(spec for spec, _ in placed if set(spec) - set("(-, )"))),
        "whole": division.whole_leaves(layout.leaves.values()),
    }
