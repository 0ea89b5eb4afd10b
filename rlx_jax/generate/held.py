"""A text that stays on the device between requests: its tokens, the state after them, and how much of it a next text
can go on from.

Keys and values are cut back by their length alone. What a layer with a window has written over is gone, and a block
that carries a state knows nothing but the last one: of these arrays a copy is kept, as they were at one place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.pipeline import Template
from rlx_jax.generate.generation import Generation
from rlx_jax.generate.request import Before, common
from rlx_jax.generate.speculative import OWN
from rlx_jax.ir.plugins import derive_rule
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.state import LENGTH


@dataclass(frozen=True)
class KeptArrays:
    """Arrays of a state as they were after `at` tokens."""

    at: int
    arrays: StateArrays


@dataclass(frozen=True)
class TextState:
    """The tokens of one row, the state after them, and a copy of what cannot be cut back."""

    ids: tuple[int, ...]
    arrays: StateArrays
    slots: int
    kept: KeptArrays | None = None

    def copy(self) -> TextState:
        """The same in arrays of its own."""
        kept = self.kept and KeptArrays(self.kept.at, copied(self.kept.arrays))
        return TextState(self.ids, copied(self.arrays), self.slots, kept)


def copied(arrays: StateArrays) -> StateArrays:
    """In buffers of their own."""
    return {name: jnp.copy(array) for name, array in arrays.items()}


def continued(
    model: CompiledModel, text: TextState | None, ids: Sequence[int]
) -> tuple[Before | None, str, KeptArrays | None]:
    """What the text `ids` can go on from: the state, if any of it is of use, why no more, and the copy that is still
    there. At least its last token is read: a state tells no logits."""
    if text is None:
        return None, "", None
    same, held = common(text.ids, ids), len(text.ids)
    at = wanted = min(same, len(ids) - 1)
    if at == 0:
        return None, f"the text differs from its first token on, and all {held} tokens held were dropped", None
    arrays, why, kept = text.arrays, "", text.kept
    if at < held and not can_cut(model, text, at):
        if text.kept is None or not 0 < text.kept.at <= at or not can_cut(model, text, text.kept.at, text.kept.arrays):
            why = f"the text differs at token {same} of {held} that were held, and its state cannot be taken back"
            return None, why, None
        at = text.kept.at
        arrays = {**arrays, **copied(text.kept.arrays)}  # the request writes into these, and may be asked for again
    if at < held:  # what moves a state to other slots goes by its length
        length = np.full(arrays[LENGTH].shape, at, np.int32)
        arrays = {**arrays, LENGTH: jax.device_put(length, arrays[LENGTH].sharding)}
    if at < wanted:
        why = f"its state was kept at token {at}, and cannot be taken back to another"
    if same < min(held, len(ids)):
        why = f"the text differs at token {same} of {held} that were held" + (f"; {why}" if why else "")
    before = Before(arrays, (0,), (at,), text.slots, consumed=True)
    return before, why, kept if kept is not None and kept.at <= at else None


def can_cut(model: CompiledModel, text: TextState, at: int, besides: Collection[str] = ()) -> bool:
    """Whether the state is right after `at` tokens where its length alone is set to that, `besides` these arrays."""
    held, rings, template = len(text.ids), windows(model), _template(model)

    def cuts(name: str) -> bool:
        if name not in rings:
            return False
        axis = next(i for i, size in enumerate(template.state[name].shape) if str(size) in template.rings)
        slots = text.arrays[name].shape[axis]
        return bool(held <= slots or held - at <= slots - rings[name])

    return all(name in besides or cuts(name) for name in uncut(model))


def kept_at_mark(model: CompiledModel, tokens: int) -> tuple[str, ...]:
    """The arrays to keep a copy of, of a text that gets up to `tokens` long: none where all of it can be cut."""
    rings = windows(model)
    return tuple(name for name in uncut(model) if name not in rings or tokens > rings[name])


def after(generation: Generation, ids: Sequence[int], kept: KeptArrays | None) -> TextState | None:
    """The text of a request of one row that has run or was left; None where its state is gone, as an interrupted call
    takes it along."""
    arrays = {name: array for name, array in generation.state.items() if not name.startswith(OWN)}
    if any(array.is_deleted() for array in arrays.values()):
        return None
    count = int(jax.device_get(arrays[LENGTH])[0])
    whole = (*ids, *generation.chosen(0))
    assert len(ids) <= count <= len(whole)  # else the tokens that it holds are not known
    return TextState(whole[:count], arrays, generation.slots, kept)


# -- which arrays ------------------------------------------------------------------------------


def uncut(model: CompiledModel) -> tuple[str, ...]:
    """The arrays of a state that hold more than a place for each token: rings, and what blocks carry along. Where a
    block keeps a state by the rule of its plugin, that is all of them: nothing is known of those."""
    template = _template(model)
    foreign = any(derive_rule(type(node.op)) is not None for _, node in template.built.hir.walk())
    state = ((name, t) for name, t in template.state.items() if name != LENGTH)
    return tuple(name for name, t in state if foreign or "context" not in t.symbols)


def windows(model: CompiledModel) -> dict[str, int]:
    """The window of each array that is a ring."""
    rings = _template(model).rings
    found = ((name, t.symbols & rings.keys()) for name, t in _template(model).state.items())
    return {name: rings[symbol] for name, symbols in found for symbol in symbols}


def _template(model: CompiledModel) -> Template:
    return model.programs.any_template(model.as_program("extend").key(outputs=model.output_names[:1]))
