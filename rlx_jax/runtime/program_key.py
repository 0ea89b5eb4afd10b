"""This module defines `ProgramKey`, the key of a compiled program, and `Variant`, the options of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx_jax.compiler.executable import ProgramWrapper


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
