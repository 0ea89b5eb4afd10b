"""This module defines `ModelPlan`: what a model will cost on a device, and its text.

Bytes of parameters and of caches are exact; all other figures are estimates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlx_jax.dataclasses import asdict, dataclass, field
from rlx_jax.ir.text import TextTable, format_bytes

# Parts of the time of a device: what limits a program of which one takes most, and its name in the text of a plan.
SHARES = {
    "memory": ("memory bandwidth", "memory"), "compute": ("FLOPs", "operations"),
    "start": ("kernel launches", "launches"), "link": ("interconnect", "links"),
}  # fmt: skip


@dataclass(frozen=True)
class ProgramEstimate:
    """The estimated cost of one run of a program, on the fullest device of a mesh.

    Attributes:
        program: the program, such as `prefill` or `extend`.
        sizes: the sizes of its symbolic dimensions.
        flops, bytes: operations, and bytes that are read and written if elementwise ops are fused.
        activation_bytes: the temporaries and outputs that are live at the same time.
        compute_seconds, memory_seconds, start_seconds, link_seconds: the time for operations, for bytes, for kernel
            launches, and for sums over devices.
        host_seconds: the time in which the host prepares and starts a run.
    """

    program: str
    sizes: Mapping[str, int]
    flops: int
    bytes: int
    activation_bytes: int
    compute_seconds: float
    memory_seconds: float
    start_seconds: float
    link_seconds: float
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the estimated time of one run: of the device, or of the host if that is longer."""
        return max(sum(self.parts.values()), self.host_seconds)

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each of `SHARES`."""
        return {part: getattr(self, f"{part}_seconds") for part in SHARES}

    @property
    def bound(self) -> str:
        """Return what takes most of the time."""
        longest = max(SHARES, key=lambda part: self.parts[part])
        return "the host" if self.seconds > sum(self.parts.values()) else SHARES[longest][0]

    def then(self, other: ProgramEstimate) -> ProgramEstimate:
        """Return the estimate of this run followed by another one."""
        names = ("flops", "bytes", *(f"{part}_seconds" for part in (*SHARES, "host")))
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        largest = max(self.activation_bytes, other.activation_bytes)
        return ProgramEstimate(self.program, self.sizes, activation_bytes=largest, **sums)


@dataclass(frozen=True)
class Suggestion:
    """A change of the arguments with which the model fits, and its figures.

    Attributes:
        change: the change in words.
        arguments: the arguments of `rlx_jax.plan` that differ; of a profile the table of its changes, for
            `profile.replace(**table)`.
    """

    change: str
    arguments: Mapping[str, Any]
    params_bytes: int
    cache_bytes: int
    peak_bytes: int
    ms_per_token: float | None
    ms_prefill: float


@dataclass(frozen=True)
class ModelPlan:
    """What a model costs on a device. Bytes are those of the fullest device of a mesh.

    Attributes:
        name: the name of the flow.
        device: the device and its limits.
        basis: `measured` if what kernels reach of the limits was measured on this product, or `data sheet`.
        mesh: the axes of the mesh; empty on one device.
        batch, context: the rows, and the tokens of each row: prompt and answer.
        dtype: the dtype of activations.
        parameters: the bytes of the parameters by scheme, or by dtype if they are not packed.
        cache: the bytes of the state by kind of layer: `full` attention, attention `window`, `recurrent`.
        decode: a step of decoding at the end of the context; None for a model that does not generate.
        prefill: all programs of a prompt as long as the context; for other models the forward program.
        memory: the bytes that JAX may allocate on the device; None if unknown.
        suggestions: changes with which it would fit; empty if it fits.
    """

    name: str
    device: str
    basis: str
    mesh: str
    batch: int
    context: int
    dtype: str
    parameters: Mapping[str, int]
    cache: Mapping[str, int]
    decode: ProgramEstimate | None
    prefill: ProgramEstimate
    memory: int | None
    suggestions: tuple[Suggestion, ...] = field(default=())

    @property
    def params_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(self.parameters.values())

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the state."""
        return sum(self.cache.values())

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of temporaries and outputs of the program that needs most."""
        return max(p.activation_bytes for p in (self.decode, self.prefill) if p is not None)

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of parameters, state, temporaries and outputs together."""
        return self.params_bytes + self.cache_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        """Return whether the peak fits the memory; None if the memory is unknown."""
        return None if self.memory is None else self.peak_bytes <= self.memory

    @property
    def ms_per_token(self) -> float | None:
        """Return the milliseconds of a decoding step, which gives each row a token; None without decoding."""
        return None if self.decode is None else 1e3 * self.decode.seconds

    @property
    def ms_prefill(self) -> float:
        """Return the milliseconds of a prompt as long as the context, of all rows together."""
        return 1e3 * self.prefill.seconds

    @property
    def bound(self) -> str:
        """Return what limits the model: `memory size` if it does not fit, else what takes most of a step's time."""
        return "memory size" if self.fits is False else (self.decode or self.prefill).bound

    def to_json(self) -> str:
        """Return the plan as one JSON object: the attributes above, and the figures computed from them."""
        return json.dumps(self.record(), ensure_ascii=False, allow_nan=False)

    def record(self) -> dict[str, Any]:
        """Return the content of `to_json`."""
        names = (
            "params_bytes", "cache_bytes", "activation_bytes", "peak_bytes", "fits", "ms_per_token", "ms_prefill",
            "bound",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        rows: list[tuple[str, str]] = [
            ("device", f"{self.device}{f', {self.mesh}' if self.mesh else ''}"),
            ("rows × tokens", f"{self.batch:,} × {self.context:,}, computed in {self.dtype}"),
            *_parts("parameters", self.parameters),
            *_parts("cache", self.cache),
            ("activations", f"{format_bytes(self.activation_bytes)}, about"),
            ("peak", f"{format_bytes(self.peak_bytes)}, about"),
            ("memory", "unknown" if self.memory is None else format_bytes(self.memory)),
            ("fits", {None: "unknown", True: "yes", False: "no"}[self.fits]),
        ]
        if self.decode is not None:
            rows += _program_rows("a token of each row", self.decode)
        rows += _program_rows("the prompts" if self.decode else "a call", self.prefill)
        rows.append(("bound by", self.bound))
        if self.basis != "measured":
            rows.append(("times", "from the data sheet: what kernels reach on an H200 is assumed of this device"))
        lines = [self.name, str(TextTable(rows, widths=(20,), gap=" ", wrap=100))]
        return "\n".join([*lines, *self._suggestion_lines()])

    def _suggestion_lines(self) -> list[str]:
        """Return the table of suggestions; if the model does not fit and there are none, a line that says so."""
        if not self.suggestions:
            return ["no single change makes it fit"] if self.fits is False else []
        head = ("it would fit with", "parameters", "cache", "peak", "ms/token", "ms/prompt")
        rows = []
        for s in self.suggestions:
            sizes = map(format_bytes, (s.params_bytes, s.cache_bytes, s.peak_bytes))
            token = "" if s.ms_per_token is None else f"{s.ms_per_token:.3g}"
            rows.append((s.change, *sizes, token, f"{s.ms_prefill:.4g}"))
        return ["", str(TextTable(rows, head))]


def _parts(label: str, parts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the lines of bytes by kind, and of their sum if there are several kinds."""
    rows = [(label, f"{format_bytes(nbytes)} {name}") for name, nbytes in parts.items()]
    return rows + ([(label, f"{format_bytes(sum(parts.values()))} in all")] if len(parts) > 1 else [])


def _program_rows(label: str, estimate: ProgramEstimate) -> list[tuple[str, str]]:
    """Return the lines about the time of a program."""
    shares = ", ".join(f"{SHARES[part][1]} {1e3 * seconds:.3g}" for part, seconds in estimate.parts.items() if seconds)
    if estimate.bound == "the host":
        shares += f"; the host meanwhile {1e3 * estimate.host_seconds:.3g}"
    work = f"{estimate.flops:.3g} FLOPs, {estimate.bytes:.3g} bytes"
    return [(label, f"{1e3 * estimate.seconds:.3g} ms, estimated ({shares}); {work}")]
