"""This module defines `ProgramKey`, the key of a compiled program, and `Variant`, options of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.compiler.executable import ProgramWrapper, uncovered_arguments
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import listing, quote


@dataclass(frozen=True)
class ProgramKey:
    """The key of an executable: a flow of the model, one of its programs, and sizes.

    All flows share the profile and the layout, so neither is part of the key. Without `binding` it is the key of the
    template, which has symbolic sizes.

    Attributes:
        flow, program: the names of the flow and of the program.
        optional_inputs: the names of the optional inputs that calls pass.
        outputs: the names of the outputs to compute; None for all.
        last_only: compute the outputs for each row's last token only.
        headless: end before the head; its operands are the outputs.
        hidden: the outputs are the logits and the hidden states `[B, S, H]` that the head reads. `last_only` then
            applies to the logits alone.
        binding: the sizes by name, sorted.
        wrapper: a function around the program that is compiled with it, such as a generation loop.
    """

    flow: str
    program: str
    optional_inputs: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    last_only: bool = False
    headless: bool = False
    hidden: bool = False
    binding: tuple[tuple[str, int], ...] = ()
    wrapper: ProgramWrapper | None = None

    @property
    def symbolic(self) -> ProgramKey:
        """Return the key of the template, without sizes and wrapper."""
        return replace(self, binding=(), wrapper=None)

    @property
    def text(self) -> str:
        """Return the program and its sizes as text, such as `prefill of batch 1, seq 16`."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.binding)
        return f"{self.program} of {sizes}" if sizes else self.program

    def size_violations(self, buckets: Buckets) -> list[str]:
        """Return the names of the lists of buckets that do not contain the sizes."""
        # The tokens of `verify` are drafts; their number is no bucket of prompts.
        return buckets.size_violations({dim: n for dim, n in self.binding if (self.program, dim) != ("verify", "seq")})


@dataclass(frozen=True)
class Variant:
    """The options of a program apart from its sizes.

    Attributes:
        last_only, outputs, optional_inputs, hidden: see `ProgramKey`.
        spare: the number of tokens that may be rolled back from ring buffers of the state; it applies if it exceeds the
            profile's `buckets.spare`.
    """

    last_only: bool = True
    outputs: tuple[str, ...] | None = None
    optional_inputs: frozenset[str] = frozenset()
    spare: int = 0
    hidden: bool = False


# All outputs, at each row's last token: the variant that generation runs most.
LAST_TOKEN = Variant()


def recompile_reason(
    key: ProgramKey, compiled: Sequence[ProgramKey], buckets: Buckets, is_warm: bool, first_input: Callable[[], str]
) -> tuple[str, str]:
    """Return why the program of a key is not among the compiled ones, and a remedy.

    The most specific reason comes first: the outputs, the optional inputs, the arguments of the wrapper, the program,
    and last the sizes.

    Args:
        key: the key.
        compiled: the keys of compiled programs.
        buckets: the buckets of the profile.
        is_warm: whether warm-up is complete.
        first_input: returns the name of the first input of the flow.
    """
    texts, binding = {"batch": "{} rows", "seq": "length {}", "context": "a cache of {} slots"}, dict(key.binding)
    described = ", ".join(text.format(binding[dim]) for dim, text in texts.items() if dim in binding)
    if not key.last_only and replace(key, last_only=True) in compiled:
        reason = f'{key.flow}: {described}: warm-up ran logits="last", not the logits of every position'
        return reason, 'pass logits="last"'
    warmed = next((k.optional_inputs for k in compiled if replace(k, optional_inputs=key.optional_inputs) == key), None)
    if warmed is not None:
        now, then = (
            f"with {listing(sorted(names))}" if names else "without any" for names in (key.optional_inputs, warmed)
        )
        return f"{key.flow}: {described}: optional inputs: warm-up was {then}, not {now}", f"call it {then}"
    in_buckets = is_warm and not key.size_violations(buckets)
    if in_buckets and (difference := uncovered_arguments(key.wrapper, (k.wrapper for k in compiled))):
        return f"{key.flow}: {described}: {difference}", "warm up for that too"
    programs = {k.program for k in compiled if k.flow == key.flow}
    if in_buckets and programs and key.program not in programs:
        hint = ", which `logits` runs" if key.program == "forward" else ""
        reason = f"{key.flow}: {described}: warm-up ran {listing(sorted(programs))}, not {key.program}{hint}"
        return reason, "call a program that it ran"
    reason = (
        f"{key.flow}: input {quote(first_input())} with {described or 'no size'}: no {key.program} "
        f"program is compiled for that; {buckets.text() or 'warm-up ran other sizes'}"
    )
    return reason, "pass sizes that fit"
