"""The program behind scores: rows of tokens up to the head, then the logits of a piece of the tokens at a time, so that
two numbers leave it for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import head_operands
from rlx_jax.errors import GraphError
from rlx_jax.ir.types import is_static
from rlx_jax.losses import InPieces, count_pieces, logits_of_piece, split_tokens
from rlx_jax.lowering.mir.head import Head
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Variant

# Tokens whose logits are made at a time, on each device; what is not known is taken for a GPU. Every piece reads the
# weight of the head, which takes a GPU as long as the products of some 250 tokens. On a CPU a small piece stays in its
# cache.
PIECE = {"cpu": 128, "cuda": 512}
# The input that has the token after each token. It stands beside those of the flow, which may be called anything.
AIM = "score.aim"
# The inputs that have other tokens, and the place in the row of the token that each of them may stand behind.
OTHERS, PLACES = "score.others", "score.places"


@dataclass(frozen=True)
class ScoreTokens:
    """Around a program of the inputs `reads`: the log-probability `[B, S]` f32 of the token in `AIM` `[B, S]` behind
    each token, NaN where logits are not finite, and whether it is the likeliest one `[B, S]` bool; and the same
    `[B, K]` of the tokens in `OTHERS` `[B, K]` behind those at `PLACES` `[B, K]`.

    With `pieces` the program ends at its head, and the logits of a piece of the tokens are made at a time; else they
    are its output.
    """

    reads: tuple[str, ...]
    pieces: InPieces | None

    def arguments(self) -> Mapping[str, str]:
        """See `rlx_jax.compiler.executable.SaysArguments`."""
        return {"scoring": "True"}

    def __call__(self, forward: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            made, state = forward(params, state, {name: inputs[name] for name in self.reads})
            how, aim, others, places = self.pieces, inputs[AIM], inputs[OTHERS], inputs[PLACES]
            if how is None:
                return judged(made[0].astype(jnp.float32), aim, others, places), state
            hidden, kernel, *bias = made
            operands = head_operands(how.head, kernel, bias[0] if bias else None)

            def piece(first: Any, part: tuple[Any, Any]) -> tuple[Any, tuple[Any, ...]]:
                logits, _back = logits_of_piece(how, part[0], operands)
                return first + logits.shape[1], judged(logits, part[1], others, places - first)

            _, found = lax.scan(piece, jnp.int32(0), split_tokens(how, hidden, aim))
            each, likeliest, other, other_likeliest = found
            return (joined(each, aim.shape), joined(likeliest, aim.shape), other.sum(0), other_likeliest.any(0)), state

        return function


def judged(
    logits: jax.Array, aim: jax.Array, others: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits `[B, c, V]` f32, and a token for each `[B, c]`: its log-probability, and whether it is the likeliest; of
    several that are, the smallest id is, as in greedy decoding. The same of the tokens `others` `[B, K]` behind
    `places` `[B, K]`; zeros where that is none of `[0, c)`."""
    lse, best = jax.nn.logsumexp(logits, axis=-1), likeliest_id(logits)
    chosen = jnp.take_along_axis(logits, aim[..., None], axis=-1, mode="clip")[..., 0]
    inside = (places >= 0) & (places < logits.shape[1])
    at = jnp.clip(places, 0, logits.shape[1] - 1)
    other = jax.vmap(lambda x, place, word: x.at[place, word].get(mode="clip"))(logits, at, others)
    lse_at, best_at = (jnp.take_along_axis(x, at, axis=1, mode="clip") for x in (lse, best))
    found = jnp.where(inside, log_prob(other, lse_at), 0.0)
    return log_prob(chosen, lse), best == aim, found, inside & (best_at == others)


def likeliest_id(logits: jax.Array) -> jax.Array:
    """`[…, V]` f32 → `[…]` int32, the first id with the largest logit; none of them where that is NaN.

    Two reductions of floats: XLA makes one loop for the CPU of `argmax` that is not in vectors, and takes five times as
    long. f32 holds ids below 2²⁴.
    """
    words = logits.shape[-1]
    if words >= 2**24:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    from_end = lax.broadcasted_iota(jnp.float32, logits.shape, logits.ndim - 1)
    from_end = jnp.float32(words - 1) - from_end
    largest = logits.max(axis=-1, keepdims=True)
    return words - 1 - jnp.where(logits == largest, from_end, jnp.float32(-1)).max(axis=-1).astype(jnp.int32)


def log_prob(chosen: jax.Array, lse: jax.Array) -> jax.Array:
    """Of a token with the logit `chosen`, NaN where logits are not finite."""
    return jnp.where(jnp.isfinite(lse) & (chosen < jnp.inf), chosen - lse, jnp.nan)


def joined(pieces: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[n, B, c]` → `[B, S]`, without what fills up the last piece."""
    return pieces.swapaxes(0, 1).reshape(shape[0], -1)[:, : shape[1]]


def score_program(model: CompiledModel, reads: tuple[str, ...], rows: int, width: int) -> BoundProgram:
    """The program of `model`, which reads these inputs, for this many rows and tokens.

    Raises:
        RequestError: it is not compiled, and the profile wants that told.
    """
    key = model.sized({"batch": rows, "seq": width}, Variant(last_only=False, outputs=model.output_names[:1]))
    try:
        pieces = _in_pieces(model, model.template().head, rows, width)
    except GraphError:  # the output is not a product
        pieces = None
    return model.bind(replace(key, headless=pieces is not None, around=ScoreTokens(reads, pieces)))


def _in_pieces(model: CompiledModel, head: Head, rows: int, width: int) -> InPieces | None:
    """How the logits of a head are taken; None where it cannot be taken in pieces."""
    division = model.programs.division
    if head.type.rank != 3 or not is_static(head.type.shape[-1]):
        return None
    words = int(head.type.shape[-1])
    room = 4 * words * PIECE.get(model.settings.target, PIECE["cuda"])
    count = count_pieces((rows, width), None, words, division, room)
    return InPieces(head, count, int(head.words), 0.0, division)
