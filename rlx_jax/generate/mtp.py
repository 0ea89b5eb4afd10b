"""Drafts from a module of the model's own checkpoint, which predicts the token behind the next from hidden states.

DeepSeek-V3, arXiv:2412.19437, section 2.2. The module reads pairs: what the model's head reads of token i, and token
i + 1, at position i. It gives logits of token i + 2 and what its own head reads, which stands for the model's hidden
state where the next draft is made. Of pairs that are certain its state is kept; those of drafts are read once more,
with the model's hidden states, when `verify` has given them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.generate.decode import Array, Sizes
from rlx_jax.generate.draft_model import ProgramDrafter
from rlx_jax.generate.plan import bind_readers
from rlx_jax.generate.speculative import Drafts, Judged, Own, Turn, choose_draft
from rlx_jax.program import Buildable, Built, MakesMtp
from rlx_jax.runtime.compiling import model_beside
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Programs, Variant
from rlx_jax.runtime.state import LENGTH
from rlx_jax.text.requests import pad_rows

# The input of hidden states, and the output.
HIDDEN = "hidden"


@dataclass(frozen=True)
class MtpModule(ProgramDrafter):
    """See `Drafter`: `extend` of the module, the first key for the pairs that a step has made certain, the second for
    one draft.

    It keeps those pairs: tokens `[B, k + 1]`, hidden states `[B, k + 1, H]`, and how many there are `[B]`, at least 1
    in a row that runs.
    """

    asked: ClassVar[str] = "'mtp'"
    hidden: ClassVar[bool] = True

    def bound(self, sizes: Mapping[str, int]) -> MtpModule:
        """See `Drafter`."""
        extend = self.unbound.as_program("extend")
        keys = tuple(extend.sized({**sizes, "seq": seq}) for seq in (self.tokens + 1, 1))
        return replace(self, model=None, keys=keys)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Read the pairs of the prompts, all but the last, which waits for its drafts; see `Drafter`."""
        filled = [*prompts, *([0] for _ in range(sizes.batch - len(prompts)))]
        lengths = np.array([len(p) for p in filled], np.int32)
        readers = bind_readers(self.unbound, sizes.widths, sizes.state, Variant(outputs=(HIDDEN,)))
        state: StateArrays = {}
        at = 0
        for reader, width, block in zip(readers, sizes.widths, hidden, strict=True):
            tokens = pad_rows([p[at + 1 : at + 1 + width] for p in filled], width)
            fed = {self.ids_input: tokens, HIDDEN: block, "lengths": np.clip(lengths - 1 - at, 0, width)}
            _, state = reader(fed, state)
            at += width
        kept = programs.call(first_pair, hidden, lengths, first, static=(self.tokens + 1,), at=programs.whole)
        return kept, state

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """The first draft from the model's hidden states, the others each from the one before."""
        first, chain = (self.programs.function(key).run for key in self.keys)
        rows, room = turn.rows, turn.room
        ids, hidden, pairs = own.kept

        def read(run: Any, state: StateArrays, ids: Array, hidden: Array, lengths: Array) -> tuple[Array, Array, Any]:
            fed = {self.ids_input: ids, HIDDEN: hidden, "lengths": lengths}
            (logits, hidden), state = run(own.params, state, fed)
            return logits[:, 0], hidden.astype(jnp.float32), state

        logits, hidden, state = read(first, dict(own.state), ids, hidden, pairs)
        held = state[LENGTH]
        ids, fine, wanted, seen = choose_draft(turn, rows.seen, logits, jnp.int32(0))
        fine = fine & rows.running

        def step(carry: Any, number: Array) -> Any:
            state, ids, hidden, seen, fine = carry
            reads = rows.running & (number < room)
            logits, hidden, state = read(chain, state, ids[:, None], hidden, reads.astype(jnp.int32))
            ids, here, wanted, seen = choose_draft(turn, seen, logits, number)
            fine = fine & here
            return (state, ids, hidden, seen, fine), (ids, fine, wanted)

        begin: Any = (state, ids, hidden, seen, fine)
        (state, *_), others = lax.scan(step, begin, jnp.arange(1, self.tokens, dtype=jnp.int32))
        steps: Any = jax.tree.map(lambda a, more: jnp.concatenate([a[None], more]), (ids, fine, wanted), others)
        return Drafts.of_steps(self.tokens, *steps), replace(own, state=state | {LENGTH: held})

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """Each token that was taken, with what the model's head read for it."""
        assert judged.hidden is not None  # `MtpModule.hidden` asks for it
        hidden = jnp.where(judged.now[..., None], judged.hidden, 0.0)
        return replace(own, kept=(judged.chosen, hidden, judged.count))


def first_pair(width: int, blocks: tuple[Array, ...], lengths: Array, first: Array) -> tuple[Array, Array, Array]:
    """What `MtpModule` keeps behind the prompts: of `width` pairs the first, made of the last token's hidden states.

    `blocks` are hidden states `[B, S, H]` of the prompts, part by part; `lengths` `[B]` of the prompts; `first`
    `[B, 1]`, the tokens chosen behind them.
    """
    hidden, at = jnp.zeros_like(blocks[0][:, 0]), 0
    for block in blocks:
        number = lengths - 1 - at
        found = jnp.take_along_axis(block, number[:, None, None], axis=1, mode="clip")[:, 0]
        hidden = jnp.where(((number >= 0) & (number < block.shape[1]))[:, None], found, hidden)
        at += block.shape[1]
    ids = jnp.pad(jnp.maximum(first, 0), ((0, 0), (0, width - 1)))
    return ids, jnp.pad(hidden[:, None], ((0, 0), (0, width - 1), (0, 0))), jnp.ones_like(lengths)


# -- which module ------------------------------------------------------------------------------


def mtp_module(model: CompiledModel, tokens: int) -> MtpModule:
    """The module of a model's own checkpoint, which is read when it is first asked for.

    Raises:
        UnsupportedError: it has none. GraphError: what there is does not fit the model. Others, of
            weights that are missing or have another shape, as the family's recipe raises them.
    """
    make = mtp_of(model.flow)
    if make is None:
        raise UnsupportedError(
            f"speculative='mtp': {model.name} has no module that predicts several tokens (MTP); only Qwen 3.5 has one "
            "here: use 'prompt' or another CausalLM"
        )
    module = model_beside(model, make)
    check_module(module, model)
    return MtpModule(tokens, module.programs, module.first_input, module)


def mtp_of(flow: Buildable) -> MakesMtp | None:
    """What makes the module of a flow, if it has one."""
    return mtp_of(flow.flow) if isinstance(flow, Built) and flow.flow is not flow else getattr(flow, "_mtp", None)


def check_module(module: CompiledModel, model: CompiledModel) -> None:
    """A module reads ids and the model's hidden states, and gives the model's logits and hidden states as wide.

    Raises:
        GraphError: names what differs.
    """
    whole = model.template("forward")
    width, vocab = whole.mir.type(whole.head.operands[0]).shape[-1], whole.head.words
    inputs = {d.name: d.type for d in module.flow._inputs}
    graph = module.template("forward").mir
    outputs = {name: graph.type(v) for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    fits = (
        list(inputs)[1:] == [HIDDEN] and inputs[HIDDEN].shape[-1:] == (width,)
        and list(outputs) == ["logits", HIDDEN] and outputs["logits"].shape[-1] == vocab
        and outputs[HIDDEN].shape[-1] == width
    )  # fmt: skip
    if not fits:
        raise GraphError(
            f"{module.name} cannot draft for {model.name}: it reads {_told(inputs)} and gives {_told(outputs)}; "
            f"expected ids and {HIDDEN} [batch, seq, {width}], and logits [batch, seq, {vocab}] and {HIDDEN} as wide"
        )


def _told(types: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {t}" for name, t in types.items())
