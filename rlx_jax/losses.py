"""Losses of a compiled model, taken from its hidden states: the logits of a whole batch never stand in memory.

Logits of 8 x 2048 tokens over 128256 words are 8.4 GB in f32, and their gradient is as large. Here they are made for a
piece of the sequence at a time, and where a gradient is wanted, those of the hidden states and of the head are formed
from the same piece at once: each product with the head is made once, and nothing of a piece is kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Arrays
from rlx_jax.compiler.pipeline import behind_product, head_operands
from rlx_jax.errors import (
    DTypeError,
    GraphError,
    RequestError,
    SequenceLengthError,
    ShapeError,
    TokenIdError,
    UnboundInputError,
    named_kind,
    number,
    shown,
)
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import is_static, short_name, symbols_of
from rlx_jax.lowering.mir.head import Head
from rlx_jax.lowering.sharding import Division
from rlx_jax.runtime.inputs import as_host_array, check_ids, host_view, token_ids, whole_number
from rlx_jax.runtime.model import CompiledModel

AnyArray = Any

# What the f32 logits of a piece may take on a device where the caller does not say how long it is. One H200, 1B shape,
# 8 x 2048, `benchmarks/train.py`: pieces of 0.98, 1.96 and 3.9 GiB take the same time, and 15.2, 16.7 and 19.6 GiB.
PIECE_BYTES = 2**30


def cross_entropy(
    model: CompiledModel, params: Arrays, tokens: Any, *, lengths: Any = None, labels: Any = None,
    weights: Any = None, chunk: int | None = None, z_loss: float = 0.0, vocab: int | None = None, **inputs: Any,
) -> jax.Array:  # fmt: skip
    """The mean negative log-likelihood of the next token: `Σ w (lse(z) − z[y] + z_loss · lse(z)²) / Σ w`, f32.

    `z` are the model's logits, in f32 before the softmax. A pure function of `params`: `jax.jit`, `jax.grad` and
    `jax.vmap` go through it (forward mode, `jax.jvp`, does not). Without a gradient only the loss is computed. The
    gradient with respect to the head is summed over pieces in f32, and has the dtype of its leaf. Arrays are checked
    as those of a call of the model; under `jax.jit` values are not.

    Args:
        model: its first output is `head(hidden)`: a product with a weight `[V, H]` or `[H, V]`, then casts and
            functions of single logits alone, such as a softcap. Best compiled with `program="train"`.
        tokens: `[B, S]` ids, its first input.
        lengths: `[B]` in 0 … S, rows padded on the right: what is behind has no target and is none.
        labels: `[B, S]`, what each position is to predict, in place of the token after it; none where negative. Only
            with these may attention read the tokens that follow.
        weights: `[B, S]` of each position's target, f32. They are constants: their gradient is zero.
        chunk: tokens of each row whose logits stand in memory at a time; by default those that `PIECE_BYTES` hold.
        z_loss: keeps the normaliser near 1 (Chowdhery et al. 2022, with 1e-4).
        vocab: the words that there are, where the head was padded with rows behind them.
        inputs: the flow's other inputs, by name.

    Returns:
        A scalar; 0 where there is no target at all.

    Raises:
        GraphError: the model has a state, or its output is made otherwise; names the op in the way.
        ShapeError, TokenIdError, SequenceLengthError, RequestError: the arguments.
    """
    head_of(model)
    tokens = _checked_tokens(model, tokens)
    if "attention_mask" in inputs and all(known.name != "attention_mask" for known in model.flow._inputs):
        raise UnboundInputError(
            f"cross_entropy: {model.name} has no input 'attention_mask'; give lengths= [batch], how many tokens "
            "each row has before its padding"
        )
    how = _in_pieces(model, tokens.shape, chunk, vocab, z_loss)
    if labels is None:
        _refuse_foresight(model)
    else:
        labels = _checked_labels(labels, tokens.shape, how.vocab, model.settings.check_ids)
    aim, weight = targets(tokens, lengths=lengths, labels=labels, weights=weights, vocab=how.vocab)
    total = weight.sum()
    (operands, _), _ = model.trace(params, (tokens,), inputs, None, headless=True)
    if tuple(operands[0].shape[:2]) != tuple(tokens.shape):
        raise ShapeError(
            f"{model.name}: the head reads hidden states {list(operands[0].shape)}, and tokens are "
            f"{list(tokens.shape)}; a loss wants those of every token"
        )
    scaled = weight / jnp.where(total > 0, total, 1.0)  # a batch without targets has loss 0, not NaN
    hidden, kernel, *bias = operands
    loss: jax.Array = _loss(how, hidden, kernel, bias[0] if bias else None, aim, scaled)
    return loss


# -- targets -----------------------------------------------------------------------------------


def targets(
    tokens: Any, *, lengths: Any = None, labels: Any = None, weights: Any = None, vocab: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """What each position is to predict, `[B, S]` int32, and what that counts, `[B, S]` f32: 0 where there is no target.

    Arguments as those of `cross_entropy`, which counts so. `weight.sum()` is the number of targets: what batches are
    weighed with where they are averaged.
    """
    tokens = _shaped("tokens", tokens, None, "iu")
    batch, seq = tokens.shape
    position, end = jnp.arange(seq)[None], jnp.int32(seq)
    if lengths is not None:
        end = _checked_lengths(lengths, batch, seq)[:, None]
    if labels is None:
        aim = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1).astype(jnp.int32)
        real = position < end - 1
    else:
        aim = jnp.asarray(_checked_labels(labels, tokens.shape, vocab)).astype(jnp.int32)
        real = (aim >= 0) & (position < end)
    weight = jnp.broadcast_to(real, (batch, seq)).astype(jnp.float32)
    if weights is not None:
        given = _shaped("weights", weights, tokens.shape, "biuf")
        weight = weight * lax.stop_gradient(jnp.asarray(given)).astype(jnp.float32)
    return jnp.maximum(aim, 0), weight


# -- the loss in pieces ------------------------------------------------------------------------


@dataclass(frozen=True)
class InPieces:
    """What does not change from call to call: the head, the number of pieces, the words, the weight of lse²."""

    head: Head
    pieces: int
    vocab: int
    z_loss: float
    division: Division | None = None

    def apart(self, sums: AnyArray) -> AnyArray:
        """`[g, …]`, of each group where its rows are."""
        if self.division is None:
            return sums
        of_weight = ("vocab", None) if self.head.product.contract == 1 else (None, "vocab")
        roles = ("batch", *(("vocab",) if sums.ndim == 2 else of_weight))
        return lax.with_sharding_constraint(sums, self.division.value(roles, sums.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    how: InPieces, hidden: AnyArray, kernel: AnyArray, bias: AnyArray, aim: AnyArray, weight: AnyArray
) -> AnyArray:
    """Σ weight · nll. hidden `[B, S, H]`; kernel as the head's product takes it, in the dtype of its leaf."""
    operands = head_operands(how.head, kernel, bias)

    def piece(total: AnyArray, part: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[AnyArray, None]:
        hidden, aim, weight = part
        logits, _ = logits_of_piece(how, hidden, operands)
        nll, _ = _nll(how, logits, aim)
        return total + (weight * nll).sum(), None

    return lax.scan(piece, jnp.float32(0), split_tokens(how, hidden, aim, weight))[0]


def _forward(
    how: InPieces, hidden: AnyArray, kernel: AnyArray, bias: AnyArray, aim: AnyArray, weight: AnyArray
) -> tuple[AnyArray, tuple[AnyArray, ...]]:
    """The loss with its gradients: of each piece while its logits are there."""
    operands = head_operands(how.head, kernel, bias)
    # Parts of the batch, each on devices of its own: the gradient of the weight is summed in each of them alone, over
    # all pieces, and then over them.
    groups = 1 if how.division is None else how.division.row_parts(hidden.shape[0])
    zeros = [how.apart(jnp.zeros((groups, *a.shape), jnp.float32)) for a in operands]

    def piece(sums: Any, part: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[Any, AnyArray]:
        total, gradients = sums
        hidden, aim, weight = part
        logits, back = logits_of_piece(how, hidden, operands)
        nll, slope = _nll(how, logits, aim)
        raw = back(weight[..., None] * slope)
        made, *others = _gradients(how.head, raw, hidden, operands, groups)
        sums = [how.apart(g + o) for g, o in zip(gradients, others, strict=True)]
        return (total + (weight * nll).sum(), sums), made

    (total, apart), made = lax.scan(piece, (jnp.float32(0), zeros), split_tokens(how, hidden, aim, weight))
    whole = made.swapaxes(0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])[:, : hidden.shape[1]]
    gradients = [g.sum(0) for g in apart]
    like = (jnp.zeros((), kernel.dtype), None if bias is None else jnp.zeros((), bias.dtype))
    return total, (whole, gradients, like)


def _backward(how: InPieces, kept: tuple[AnyArray, ...], slope: AnyArray) -> tuple[AnyArray, ...]:
    """The gradients times that of the loss, in the dtypes of what they belong to."""
    hidden, (kernel, *bias), (like_kernel, like_bias) = kept
    hidden = (hidden.astype(jnp.float32) * slope).astype(hidden.dtype)
    of_bias = (bias[0] * slope).astype(like_bias.dtype) if bias else None
    return hidden, (kernel * slope).astype(like_kernel.dtype), of_bias, None, None


_loss.defvjp(_forward, _backward)


def split_tokens(how: InPieces, *arrays: AnyArray) -> tuple[AnyArray, ...]:
    """`[B, S, …]` → `[n, B, S/n, …]`, padded with zeros. The batch stays an axis: it may be divided over devices."""

    def split(x: AnyArray) -> AnyArray:
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % how.pieces), *[(0, 0)] * (x.ndim - 2)))
        return padded.reshape(x.shape[0], how.pieces, -1, *x.shape[2:]).swapaxes(0, 1)

    return tuple(split(x) for x in arrays)


def logits_of_piece(how: InPieces, hidden: AnyArray, operands: list[AnyArray]) -> tuple[AnyArray, Any]:
    """The logits of a piece in f32, −inf for words that are not, and from their gradient that of the product."""
    head = how.head
    product = head.product.eval(hidden, *operands)

    def tail(product: AnyArray) -> AnyArray:
        logits = behind_product(head, product).astype(jnp.float32)
        known = lax.broadcasted_iota(jnp.int32, logits.shape, 2) < how.vocab
        return jnp.where(known, logits, -jnp.inf) if how.vocab < logits.shape[2] else logits

    logits, back = jax.vjp(tail, product)
    return logits, lambda slope: back(slope)[0]


def _nll(how: InPieces, logits: AnyArray, aim: AnyArray) -> tuple[AnyArray, AnyArray]:
    """`[B, c]` and its gradient `[B, c, V]`."""
    most = logits.max(2, keepdims=True)
    sums = jnp.exp(logits - most).sum(2, keepdims=True)
    lse = (most + jnp.log(sums))[..., 0]
    nll = lse - jnp.take_along_axis(logits, aim[..., None], 2)[..., 0]
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == aim[..., None]
    softmax = jnp.exp(logits - lse[..., None])
    if how.z_loss:
        nll, softmax = nll + how.z_loss * lse * lse, softmax * (1 + 2 * how.z_loss * lse[..., None])
    return nll, softmax - hit.astype(jnp.float32)


def _gradients(head: Head, raw: AnyArray, hidden: AnyArray, operands: list[AnyArray], groups: int) -> list[AnyArray]:
    """Of the hidden states, in their dtype, of the weight and of the bias, in f32 and of each group of rows `[g, …]`,
    from that of the product.

    Products are of the dtype that the head has, so that bf16 stays bf16, and are summed in f32.
    """
    narrow, contract = raw.astype(head.dtype), head.product.contract
    product = functools.partial(
        lax.dot_general, precision=lax.Precision(head.product.precision), preferred_element_type=jnp.float32
    )
    back = product(narrow, operands[0], (((2,), (1 - contract,)), ((), ())))
    grouped = [a.reshape(groups, -1, *a.shape[1:]) for a in (narrow, hidden, raw)]
    left, right = grouped[:2] if contract == 1 else grouped[1::-1]
    weight = product(left, right, (((1, 2), (1, 2)), ((0,), (0,))))
    return [back.astype(hidden.dtype), weight] + [grouped[2].astype(jnp.float32).sum((1, 2)) for _ in operands[1:]]


# -- checks ------------------------------------------------------------------------------------


def head_of(model: CompiledModel) -> Head:
    """The head of a model whose loss can be taken; found once.

    Raises:
        RequestError: no compiled model. GraphError: it has a state, or no head.
    """
    if not isinstance(model, CompiledModel):
        inner = "; pass its .model" if isinstance(getattr(model, "model", None), CompiledModel) else ""
        raise RequestError(f"cross_entropy: expected what rlx_jax.compile returns, got {named_kind(model)}{inner}")
    template = model.template()
    if template.state or model.program not in ("forward", "train"):
        raise GraphError(
            f"{model.name}: cross_entropy reads the program train or forward, and this is {model.program}"
            f"{' with a state' if template.state else ''}; compile the flow with program='train'"
        )
    if not is_static(template.head.type.shape[-1]) or template.head.type.rank != 3:
        raise GraphError(f"{model.name}: logits are [batch, seq, V] with a V that is known, got {template.head.type}")
    return template.head


def _refuse_foresight(model: CompiledModel) -> None:
    """A model that reads the next token has nothing to learn from predicting it."""
    seq = model.template().head.type.shape[1]
    for inner, node in model.template().mir.walk():
        op = node.op
        if not isinstance(op, AttentionOp) or op.causal or not (op.window is None or op.ahead > 0):
            continue
        keys = inner.type(node.inputs[1])  # `[B, T, …]`, maybe of another sequence than the tokens
        if keys.shape[1] == seq or symbols_of(seq) & keys.symbols:
            raise GraphError(
                f"{path_text(node.origin.path)}: this attention is not causal, so the model reads the token that it is "
                "to predict; pass labels= for a loss over something else"
            )


def _in_pieces(
    model: CompiledModel, shape: tuple[int, ...], chunk: int | None, vocab: int | None, z_loss: float
) -> InPieces:
    """How the loss of tokens `[B, S]` is taken, by arguments of `cross_entropy`, which are checked."""
    head, division = model.template().head, model.programs.division
    rows = int(head.words)
    if vocab is not None:
        if isinstance(vocab, bool) or not isinstance(vocab, int | np.integer) or not 1 <= vocab <= rows:
            raise RequestError(f"{model.name}: vocab is a number of words from 1 to {rows}, got {shown(vocab)}")
        rows = int(vocab)
    if isinstance(z_loss, bool) or not isinstance(z_loss, int | float) or not 0 <= z_loss < math.inf:
        raise RequestError(f"cross_entropy: z_loss is a finite number, 0 or more, got {shown(z_loss)}")
    pieces = count_pieces(shape, chunk, head.type.shape[-1], division)
    return InPieces(head, pieces, rows, float(z_loss), division)


def count_pieces(
    shape: tuple[int, ...], chunk: int | None, vocab: Any, division: Division | None, room: int = PIECE_BYTES
) -> int:
    """In how many pieces the sequence is taken; by default so that the f32 logits of one on one device fit `room`."""
    batch, seq = shape
    if chunk is None:
        share = 1 if division is None else division.row_parts(batch) * division.parts("vocab")
        chunk = max(1, share * room // (4 * batch * int(vocab)))
    return math.ceil(seq / whole_number("cross_entropy: chunk", chunk, 1))


def _checked_tokens(model: CompiledModel, tokens: Any) -> Any:
    """Return `[B, S]` ids with a token to predict; each that the host can read is in the model's table."""
    first = model.first_input
    rows = model.template().bounds.ids.get(first)
    if not isinstance(tokens, jax.Array):
        if rows is None:
            raise GraphError(f"{model.name}: its first input {first!r} holds no token ids")
        tokens = token_ids("tokens", tokens, rows)
    tokens = _shaped("tokens", tokens, None, "iu")
    if rows is not None:
        check_ids("tokens", tokens, rows, model.settings.check_ids)
    if tokens.shape[1] < 2:
        raise SequenceLengthError(f"tokens: {list(tokens.shape)}, and the first token has none to predict; pass 2")
    return tokens


def _shaped(name: str, value: Any, shape: tuple[int, ...] | None, kinds: str) -> Any:
    """An array of a shape, or `[B, S]`, of numbers of these kinds; of the host, or of JAX as it is."""
    array = value if isinstance(value, jax.Array) else as_host_array(name, value)
    if 0 in array.shape or (array.ndim != 2 if shape is None else tuple(array.shape) != tuple(shape)):
        want = "[batch, seq]" if shape is None else f"those of tokens, {list(shape)}"
        raise RequestError(f"{name}: sizes are {want}, got {list(array.shape)}")
    kind = "f" if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype.kind
    if kind not in kinds:
        raise DTypeError(f"{name}: expected {'numbers' if 'f' in kinds else 'integers'}, got {short_name(array.dtype)}")
    return array


def _checked_lengths(lengths: Any, batch: int, seq: int) -> Any:
    array = _shaped("lengths", lengths, (batch,), "iu")
    if isinstance(array, np.ndarray) and (array.min() < 0 or array.max() > seq):
        raise SequenceLengthError(f"lengths: expected 0 to {seq}, got {array.tolist()[:8]}")
    return jnp.asarray(array).astype(jnp.int32)


def _checked_labels(labels: Any, shape: tuple[int, ...], vocab: int | None, devices: bool = False) -> Any:
    array = _shaped("labels", labels, shape, "iu")
    known = None if vocab is None else host_view(array, devices)
    if known is not None and known.max() >= vocab:
        at = np.argwhere(known >= vocab)[0]
        raise TokenIdError(
            f"labels: id {number(int(known[tuple(at)]))} at {tuple(int(i) for i in at)} is not in [0, {vocab}); "
            "a position without a target has a negative one"
        )
    return array


def check_batch(model: CompiledModel, batch: Mapping[str, Any]) -> None:
    """Check what `cross_entropy` would refuse of the arrays in `batch`, its arguments by name.

    A step under `jax.jit` sees no values, so that its caller checks them. Raises as `cross_entropy`.
    """
    tokens = _checked_tokens(model, batch["tokens"])
    if batch.get("labels") is not None:
        vocab = int(head_of(model).type.shape[-1])
        _checked_labels(batch["labels"], tokens.shape, vocab, model.settings.check_ids)
    if batch.get("lengths") is not None:
        _checked_lengths(batch["lengths"], *tokens.shape)
