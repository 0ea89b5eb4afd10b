"""Drafts from another model, which decodes them one by one behind a state of its own.

Leviathan et al. 2023. A smaller model of the same vocabulary reads the same text; it draws its drafts from its own
distribution, and `VerifyLoop` keeps them so that the tokens are distributed as the larger one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Shardings, StateArrays
from rlx_jax.generate.decode import Array, Sizes
from rlx_jax.generate.plan import PromptPart, bind_readers, prompt_blocks
from rlx_jax.generate.speculative import Drafts, Judged, Own, Turn, after_tokens, choose_draft
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import ProgramKey, Programs, Variant
from rlx_jax.runtime.state import LENGTH


@dataclass(frozen=True)
class ProgramDrafter:
    """What drafters have in common that run programs of another model in the loop. Where one is bound, `keys` are those
    programs, and it has no `model`: a compiled loop keeps no parameters alive."""

    tokens: int
    programs: Programs
    ids_input: str
    model: CompiledModel | None = None
    positions: int | None = None
    keys: tuple[ProgramKey, ...] = ()

    @property
    def unbound(self) -> CompiledModel:
        """The model, of what is not bound."""
        assert self.model is not None
        return self.model

    def params(self) -> Any:
        """The parameters of the other model."""
        return self.unbound.require_params("drafting")

    def lir(self) -> Lir | None:
        """The largest of its programs; the state is that of all."""
        return self.programs.function(self.keys[0]).lir

    def shardings(self) -> Shardings | None:
        """As where it runs alone."""
        return self.programs.shardings(self.keys[0], {})


@dataclass(frozen=True)
class DraftModel(ProgramDrafter):
    """See `Drafter`: `extend` of another model for one token. `carried`: arrays of its state that every token changes,
    with the axis of their rows."""

    asked: ClassVar[str] = "another model"
    hidden: ClassVar[bool] = False

    carried: tuple[tuple[str, int], ...] = ()

    def bound(self, sizes: Mapping[str, int]) -> DraftModel:
        """See `Drafter`."""
        model, logits = self.unbound, self.unbound.output_names[:1]
        key = model.as_program("extend").sized({**sizes, "seq": 1}, Variant(outputs=logits, spare=self.tokens))
        back = self.programs.template(model.as_program("verify").key(outputs=logits)).taken_back
        return replace(self, model=None, positions=None, keys=(key,), carried=back)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Read the prompts; see `Drafter`."""
        variant = Variant(outputs=self.unbound.output_names[:1], spare=self.tokens)
        readers = bind_readers(self.unbound, sizes.widths, sizes.state, variant)
        parts = [PromptPart(width, width) for width in sizes.widths]
        *_, last = prompt_blocks(readers, parts, prompts, sizes.batch, {})
        return None, last.state

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """One token after the other; the last draft is read as well, so that the state has it should it be kept."""
        extend = self.programs.function(self.keys[0]).run
        rows, room, count = turn.rows, turn.room, self.tokens

        def step(carry: Any, number: Array) -> Any:
            state, ids, seen, fine = carry
            reads = rows.running & (number <= room)
            fed = {self.ids_input: ids[:, None], "lengths": reads.astype(jnp.int32)}
            outputs, state = extend(own.params, state, fed)
            ids, here, wanted, seen = choose_draft(turn, seen, outputs[0][:, 0], number)
            fine = fine & here
            after = {name: state[name] for name, _ in self.carried}
            return (state, ids, seen, fine), (ids, fine, wanted, after)

        start = (dict(own.state), rows.ids, rows.seen, rows.running)
        (state, *_), (*steps, after) = lax.scan(step, start, jnp.arange(count + 1, dtype=jnp.int32))
        before = {name: own.state[name] for name, _ in self.carried}
        return Drafts.of_steps(count, *steps), replace(own, kept=(before, after), state=state)

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """The state after the tokens that were taken."""
        before, after = own.kept
        state = own.state | {LENGTH: turn.held + judged.count}
        for name, axis in self.carried:
            every = jnp.moveaxis(after[name], 0, axis + 1)
            state[name] = after_tokens(before[name], every, judged.count, axis)
        return replace(own, kept=None, state=state)
