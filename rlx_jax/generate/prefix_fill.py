"""`PrefixFiller`: computes the prefixes of jobs with the programs of a fill, and copies their states into its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.settings import SlotSizes
from rlx_jax.generate.decode_state import LeafMove, leaf_moves, move_state, resize_state
from rlx_jax.generate.prefix_cache import Prefix, PrefixCache, one_row
from rlx_jax.generate.request_plan import PromptChunk, prompt_blocks
from rlx_jax.generate.slot_plan import SlotPlan, fill_keys
from rlx_jax.runtime.model import BoundProgram
from rlx_jax.runtime.programs import state_shardings
from rlx_jax.runtime.sequence_state import LENGTH


@dataclass(eq=False)
class PrefixFiller:
    """The prefixes of the jobs of one call.

    Attributes:
        plan: the sizes and programs of the slots.
        cache: the prefixes of the model.
        suffix_widths: widths of the programs that prefill the rest of prompts after a prefix, ascending; every other
            width, so that there are few programs.
        num_prefilled: tokens of prefixes that were prefilled so far.
    """

    plan: SlotPlan
    cache: PrefixCache
    suffix_widths: tuple[int, ...]
    num_prefilled: int = 0

    def _sizes(self, has_prefix: bool) -> SlotSizes:
        """Return the sizes of prefill programs."""
        return replace(self.plan.sizes, widths=self.suffix_widths, extends=True) if has_prefix else self.plan.sizes

    def widths(self, num_tokens: int, has_prefix: bool) -> tuple[int, ...]:
        """Return the widths of the programs that prefill so many tokens."""
        return self._sizes(has_prefix).chunk_widths(num_tokens)

    def programs(self, widths: Sequence[int], has_prefix: bool) -> list[BoundProgram]:
        """Return the programs that prefill chunks of these widths."""
        keys = fill_keys(self.plan.lm, self._sizes(has_prefix), widths, self.plan.drafter)
        return list(map(self.plan.loop.model.bind, keys))

    def width(self, num_tokens: int, has_prefix: bool) -> int:
        """Return the padded width of so many tokens, the sum of their chunks."""
        return sum(self.widths(num_tokens, has_prefix))

    def start(self, prefixes: Sequence[Prefix | None]) -> StateArrays | None:
        """Return the state of a fill in which each row has its prefix; None if the first program creates it."""
        named = [prefix for prefix in prefixes if prefix is not None]
        if not named:
            fill_state = self.plan.fill_state
            return None if fill_state is None else self.plan.lm.model.programs.run_helper(fill_state)
        states = dict(zip(named, self._states(named), strict=True))
        (program,) = self.programs(self.suffix_widths[:1], True)
        programs, sizes = program.model.programs, dict(program.key.binding)
        template, sharding = programs.template(program.key.symbolic), programs.model_sharding
        shardings = None if sharding is None else state_shardings(template, sizes, sharding)
        state_sizes = {"batch": self.plan.sizes.fill_rows, "context": self.plan.sizes.cache_len}
        empty = programs.empty_state(program.key.symbolic, state_sizes, self.plan.num_drafts)
        state: StateArrays = programs.run_helper(empty)
        for arrays in {id(arrays): arrays for arrays in states.values()}.values():
            rows, mask = np.zeros(sizes["batch"], np.int32), np.zeros(sizes["batch"], bool)
            for i, prefix in enumerate(prefixes):
                if prefix is not None and states[prefix] is arrays:
                    rows[i], mask[i] = prefix.row, True
            state = programs.run_helper(
                put_rows, state, arrays, rows, mask, static=(leaf_moves(program, arrays),), out_shardings=shardings,
                donate=(0,),
            )  # fmt: skip
        return state

    def _states(self, prefixes: Sequence[Prefix]) -> list[StateArrays]:
        """Return the state of each prefix; the ones that are missing are prefilled."""
        # Held here, as computing one may evict another from the cache.
        states = {prefix: prefix.arrays for prefix in prefixes}
        missing = [prefix for prefix, arrays in states.items() if arrays is None]
        rows, model = self.plan.sizes.fill_rows, self.plan.lm.model
        for begin in range(0, len(missing), rows):
            group = missing[begin : begin + rows]
            state = self.start([prefix.parent for prefix in group])
            new = [prefix.ids[len(prefix.parent.ids) if prefix.parent else 0 :] for prefix in group]
            has_prefix = any(prefix.parent for prefix in group)
            widths = self.widths(max(map(len, new)), has_prefix)
            programs = self.programs(widths, has_prefix)
            chunks = [PromptChunk(width, width) for width in widths]
            for block in prompt_blocks(programs, chunks, new, rows, {}, state):
                for row in np.flatnonzero(block.is_end):
                    prefix = group[row]
                    target = one_row(model, prefix.cache_len)
                    states[prefix] = resize_state(target, block.state, np.array([row], np.int32))
                    self.cache.store(prefix, states[prefix])  # type: ignore[arg-type]
            self.num_prefilled += sum(map(len, new))
        return [states[prefix] for prefix in prefixes]  # type: ignore[misc]


def put_rows(
    leaves: tuple[LeafMove, ...], state: StateArrays, source: StateArrays, rows: jax.Array, mask: jax.Array
) -> Mapping[str, Any]:
    """Return a state with rows of another state where `mask` `[B]` is true; `rows` `[B]` are their indices there."""
    moved = move_state(leaves, source, rows)

    def choose(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
        shape = [1] * new.ndim
        shape[axis] = -1
        return jnp.where(mask.reshape(shape), new, old)

    axes = {LENGTH: 0, **{leaf.name: leaf.row_axis for leaf in leaves}}
    return moved | {name: choose(axis, state[name], moved[name]) for name, axis in axes.items()}
