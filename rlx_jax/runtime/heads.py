"""What the head of a model reads, and what it makes of it: programs that give hidden states beside their logits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.mir.head import Head

AnyArray = Any


def head_operands(head: Head, kernel: AnyArray, bias: AnyArray = None) -> list[AnyArray]:
    """The weights as the product takes them."""
    wide = jnp.float32 if head.product.f32_result else head.dtype
    return [kernel.astype(head.dtype)] + ([] if bias is None else [bias.astype(wide)])


def behind_product(head: Head, product: AnyArray) -> AnyArray:
    """The first output of a program from its head's product."""
    (made,) = interpret(head.tail, Env({}, {}, {}, operands=(product,)))
    return made


def with_hidden(run: Function, head: Head, last_only: bool) -> Function:
    """Around a program up to its head: outputs (logits, hidden states `[B, S, H]` f32), the former of each row's last
    token alone, `[B, 1, V]`, where `last_only`; a row's tokens are those before `lengths`."""

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        (hidden, *weights), state = run(params, state, inputs)
        read = last_rows(hidden, inputs["lengths"]) if last_only else hidden
        logits = behind_product(head, head.product.eval(read, *head_operands(head, *weights)))
        return (logits, hidden.astype(jnp.float32)), state

    return function


def last_rows(hidden: AnyArray, lengths: AnyArray) -> AnyArray:
    """`[B, S, H]` → that of the last token `[B, 1, H]`, of the first one where a row has none."""
    at = jnp.maximum(lengths - 1, 0).reshape(-1, 1, 1)
    return jnp.take_along_axis(hidden, at, axis=1, mode="clip")
