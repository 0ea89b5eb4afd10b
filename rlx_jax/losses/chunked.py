"""Chunked losses of a compiled model: the logits of the full batch are never in memory at once.

Logits of 8 x 2048 tokens over a vocabulary of 128256 are 8.4 GB in f32, and their gradient is as large. This module
computes them for one chunk of the sequence at a time. Under differentiation, the gradients of the hidden states and of
the head come from the same chunk in the forward pass, so that each product with the head runs once and no logits are
retained for the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Arrays
from rlx_jax.compiler.pipeline import apply_tail, head_operands, head_product
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import (
    DTypeError,
    GraphError,
    RequestError,
    SequenceLengthError,
    ShapeError,
    TokenIdError,
    UnboundInputError,
    describe_type,
    integer_text,
    shown,
)
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import is_static, short_name, symbols_of
from rlx_jax.lowering.hir.row_layouts import MASK
from rlx_jax.lowering.lir.packed import PackedWeight
from rlx_jax.lowering.mir.head import Head
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.runtime.inputs import as_host_array, check_ids, check_integer, host_view, token_ids
from rlx_jax.runtime.model import CompiledModel

AnyArray = Any

# Default limit, in bytes, of the f32 logits of one chunk on one device. On one H200 with the 1B shape and 8 x 2048
# tokens (`benchmarks/train.py`), chunks of 0.98, 1.96 and 3.9 GiB take the same time; the peak memory is 15.2, 16.7 and
# 19.6 GiB.
CHUNK_BYTES = 2**30


def cross_entropy(
    model: CompiledModel, params: Arrays, tokens: Any, *, lengths: Any = None, labels: Any = None,
    weights: Any = None, chunk: int | None = None, z_loss: float = 0.0, vocab: int | None = None, **inputs: Any,
) -> jax.Array:  # fmt: skip
    """Return the mean negative log-likelihood of the next token, `Σ w (lse(z) − z[y] + z_loss · lse(z)²) / Σ w`, f32.

    `z` are the model's logits, cast to f32 before the softmax. The function is pure in `params` and works under
    `jax.jit`, `jax.grad` and `jax.vmap`, but not under forward mode (`jax.jvp`). Without a gradient only the loss is
    computed. The gradient of the head is summed over chunks in f32, and is returned in the dtype of its parameter.
    Arguments are checked as in a call of the model; under `jax.jit` their values are not.

    Args:
        model: its first output is `head(hidden)`: a product with a weight `[V, H]` or `[H, V]`, then only casts and
            elementwise functions of logits, such as a softcap. Best compiled with `program="train"`.
        tokens: `[B, S]` ids, the model's first input.
        lengths: `[B]` in 0 … S, for rows padded on the right: tokens past the length have no target and are no target.
        labels: `[B, S]` ids to predict at each position, in place of the next token; negative for no target. Only
            with labels may attention read later tokens.
        weights: `[B, S]` weight of each position's target, f32. They are constants: their gradient is zero.
        chunk: tokens of each row in one chunk; by default as many as have logits of at most `CHUNK_BYTES`.
        z_loss: coefficient of the z-loss, which keeps the log of the normalizer near 0 (Chowdhery et al. 2022 use
            1e-4).
        vocab: size of the vocabulary, where the head is padded with more rows.
        inputs: the flow's other inputs, by name.

    Returns:
        A scalar; 0 if the batch has no target.

    Raises:
        GraphError: the model has a state, or its output is no such head; the message names the op at fault.
        ShapeError, TokenIdError, SequenceLengthError, RequestError: invalid arguments.
    """
    loss_head(model)
    tokens = check_tokens(model, tokens)
    if MASK in inputs and all(decl.name != MASK for decl in model.flow._inputs):
        raise UnboundInputError(
            f"cross_entropy: {model.name} has no input 'attention_mask'; give lengths= [batch], how many tokens "
            "each row has before its padding"
        )
    chunking = _make_chunking(model, tokens.shape, chunk, vocab, z_loss)
    if labels is None:
        _check_causal(model)
    else:
        labels = _checked_labels(labels, tokens.shape, chunking.vocab, model.settings.check_ids)
    target_ids, weight = targets(tokens, lengths=lengths, labels=labels, weights=weights, vocab=chunking.vocab)
    total = weight.sum()
    inputs = mask_padding(model, tokens, lengths, inputs)
    (operands, _), _ = model.trace(params, (tokens,), inputs, None, headless=True)
    if tuple(operands[0].shape[:2]) != tuple(tokens.shape):
        raise ShapeError(
            f"{model.name}: the head reads hidden states {list(operands[0].shape)}, and tokens are "
            f"{list(tokens.shape)}; a loss needs hidden states of every token"
        )
    scaled = weight / jnp.where(total > 0, total, 1.0)  # a batch without targets has loss 0, not NaN
    hidden, kernel, *bias = operands
    loss: jax.Array = _loss(chunking, hidden, kernel, bias[0] if bias else None, target_ids, scaled)
    return loss


# -- targets -----------------------------------------------------------------------------------


def targets(
    tokens: Any, *, lengths: Any = None, labels: Any = None, weights: Any = None, vocab: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the target id of each position, `[B, S]` int32, and its weight, `[B, S]` f32: 0 where there is no target.

    The arguments are as in `cross_entropy`, which uses the same targets. `weight.sum()` is the weighted number of
    targets, to average the losses of several batches with.
    """
    tokens = check_array("tokens", tokens, None, "iu")
    batch, seq = tokens.shape
    position, end = jnp.arange(seq)[None], jnp.int32(seq)
    if lengths is not None:
        end = check_lengths(lengths, batch, seq)[:, None]
    if labels is None:
        # The last column has no next token: the first one fills it, and its weight is 0.
        target_ids = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1).astype(jnp.int32)
        is_target = position < end - 1
    else:
        target_ids = jnp.asarray(_checked_labels(labels, tokens.shape, vocab)).astype(jnp.int32)
        is_target = (target_ids >= 0) & (position < end)
    weight = jnp.broadcast_to(is_target, (batch, seq)).astype(jnp.float32)
    if weights is not None:
        checked_weights = check_array("weights", weights, tokens.shape, "biuf")
        weight = weight * lax.stop_gradient(jnp.asarray(checked_weights)).astype(jnp.float32)
    return jnp.maximum(target_ids, 0), weight


# -- the chunked loss --------------------------------------------------------------------------


@dataclass(frozen=True)
class LossChunking:
    """Static configuration of a chunked loss.

    Attributes:
        head: the head of the model.
        num_chunks: number of chunks that the sequence is split into.
        vocab: number of vocabulary entries; later columns of the logits are padding.
        z_loss: coefficient of lse².
        model_sharding: sharding of the model, if it runs on several devices.
        target: platform that the model runs on.
    """

    head: Head
    num_chunks: int
    vocab: int
    z_loss: float
    model_sharding: ModelSharding | None = None
    target: str = "cpu"

    def shard_groups(self, sums: AnyArray) -> AnyArray:
        """Constrain sums `[g, …]` over groups of rows to the devices that hold the rows of each group."""
        if self.model_sharding is None:
            return sums
        weight_roles = ("vocab", None) if self.head.product.contract == 1 else (None, "vocab")
        roles = ("batch", *(("vocab",) if sums.ndim == 2 else weight_roles))
        return lax.with_sharding_constraint(sums, self.model_sharding.value_sharding(roles, sums.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    chunking: LossChunking, hidden: AnyArray, kernel: AnyArray, bias: AnyArray, target_ids: AnyArray, weight: AnyArray
) -> AnyArray:
    """Return Σ weight · nll for hidden `[B, S, H]`; the kernel has the layout and dtype of the head's parameter."""
    operands = head_operands(chunking.head, kernel, bias)

    def step(total: AnyArray, chunk: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[AnyArray, None]:
        hidden, target_ids, weight = chunk
        logits, _ = chunk_logits(chunking, hidden, operands)
        nll, _ = _nll(chunking, logits, target_ids)
        return total + (weight * nll).sum(), None

    return lax.scan(step, jnp.float32(0), split_tokens(chunking, hidden, target_ids, weight))[0]


def _forward(
    chunking: LossChunking, hidden: AnyArray, kernel: AnyArray, bias: AnyArray, target_ids: AnyArray, weight: AnyArray
) -> tuple[AnyArray, tuple[AnyArray, ...]]:
    """Return the loss and, as residuals, its gradients, which each chunk computes while its logits are in memory."""
    operands = head_operands(chunking.head, kernel, bias)
    # Each group of rows is on its own devices. Summing the gradient of the weight per group over all chunks, and then
    # once over the groups, needs one all-reduce in place of one per chunk.
    groups = 1 if chunking.model_sharding is None else chunking.model_sharding.num_batch_shards(hidden.shape[0])
    params = (kernel,) if bias is None else (kernel, bias)
    # A packed kernel is a constant: it has no gradient, which is None here and below.
    shapes = [None if isinstance(p, PackedWeight) else (groups, *p.shape) for p in params]
    zeros = [None if shape is None else chunking.shard_groups(jnp.zeros(shape, jnp.float32)) for shape in shapes]

    def step(sums: Any, chunk: tuple[AnyArray, AnyArray, AnyArray]) -> tuple[Any, AnyArray]:
        total, gradients = sums
        hidden, target_ids, weight = chunk
        logits, pull_back = chunk_logits(chunking, hidden, operands)
        nll, logits_grad = _nll(chunking, logits, target_ids)
        product_grad = pull_back(weight[..., None] * logits_grad)
        hidden_grad, *head_grads = _gradients(chunking, product_grad, hidden, operands, groups)
        pairs = zip(gradients, head_grads, strict=True)
        sums = [None if g is None else chunking.shard_groups(g + o) for g, o in pairs]
        return (total + (weight * nll).sum(), sums), hidden_grad

    chunks = split_tokens(chunking, hidden, target_ids, weight)
    (total, grouped_grads), hidden_grad = lax.scan(step, (jnp.float32(0), zeros), chunks)
    full_hidden_grad = hidden_grad.swapaxes(0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])[:, : hidden.shape[1]]
    gradients = jax.tree.map(lambda g: g.sum(0), grouped_grads)
    # Residuals of a custom VJP are arrays, so that scalars carry the dtypes of the parameters.
    dtype_examples = [None if isinstance(p, PackedWeight) else jnp.zeros((), p.dtype) for p in params]
    return total, (full_hidden_grad, gradients, dtype_examples)


def _backward(chunking: LossChunking, residuals: tuple[AnyArray, ...], loss_grad: AnyArray) -> tuple[AnyArray, ...]:
    """Return the gradients from `_forward` scaled by the gradient of the loss, in the dtypes of the primals."""
    hidden, gradients, dtype_examples = residuals
    hidden = (hidden.astype(jnp.float32) * loss_grad).astype(hidden.dtype)
    kernel, *bias = jax.tree.map(lambda g, like: (g * loss_grad).astype(like.dtype), gradients, dtype_examples)
    return hidden, kernel, bias[0] if bias else None, None, None


_loss.defvjp(_forward, _backward)


def split_tokens(chunking: LossChunking, *arrays: AnyArray) -> tuple[AnyArray, ...]:
    """Split `[B, S, …]` into chunks `[n, B, S/n, …]`, padded with zeros.

    The batch stays an axis, because it may be sharded over devices.
    """

    def split(x: AnyArray) -> AnyArray:
        padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunking.num_chunks), *[(0, 0)] * (x.ndim - 2)))
        return padded.reshape(x.shape[0], chunking.num_chunks, -1, *x.shape[2:]).swapaxes(0, 1)

    return tuple(split(x) for x in arrays)


def chunk_logits(chunking: LossChunking, hidden: AnyArray, operands: list[AnyArray]) -> tuple[AnyArray, Any]:
    """Return the logits of a chunk in f32, −inf in padded vocabulary entries, and a function from their gradient to the
    gradient of the head's product."""
    head = chunking.head
    product = head_product(head, chunking.target, hidden, operands)

    def tail(product: AnyArray) -> AnyArray:
        logits = apply_tail(head, product).astype(jnp.float32)
        is_word = lax.broadcasted_iota(jnp.int32, logits.shape, 2) < chunking.vocab
        return jnp.where(is_word, logits, -jnp.inf) if chunking.vocab < logits.shape[2] else logits

    logits, pull_back = jax.vjp(tail, product)
    return logits, lambda logits_grad: pull_back(logits_grad)[0]


def _nll(chunking: LossChunking, logits: AnyArray, target_ids: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the loss `[B, c]` of each target and its gradient `[B, c, V]` with respect to the logits."""
    max_logit = logits.max(2, keepdims=True)
    sums = jnp.exp(logits - max_logit).sum(2, keepdims=True)
    lse = (max_logit + jnp.log(sums))[..., 0]
    nll = lse - jnp.take_along_axis(logits, target_ids[..., None], 2)[..., 0]
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == target_ids[..., None]
    softmax = jnp.exp(logits - lse[..., None])
    if chunking.z_loss:
        nll, softmax = nll + chunking.z_loss * lse * lse, softmax * (1 + 2 * chunking.z_loss * lse[..., None])
    return nll, softmax - is_target.astype(jnp.float32)


def _gradients(
    chunking: LossChunking, product_grad: AnyArray, hidden: AnyArray, operands: list[AnyArray], groups: int
) -> list[AnyArray]:
    """Return the gradients of the hidden states, the weight and the bias, given the gradient of the product.

    The gradient of the hidden states has their dtype; the others are f32 and have an axis of row groups, `[g, …]`.
    Products run in the dtype of the head, so that bf16 stays bf16, and accumulate in f32. A packed weight has no
    gradient, and that of the hidden states decodes it part by part, as the product does.
    """
    head, contract = chunking.head, chunking.head.product.contract
    narrow = product_grad.astype(head.dtype)
    precision = lax.Precision(head.product.precision)
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    grouped = [a.reshape(groups, -1, *a.shape[1:]) for a in (narrow, hidden, product_grad)]
    if isinstance(operands[0], PackedWeight):
        _, pull_back = jax.vjp(lambda h: head_product(head, chunking.target, h, operands), hidden)
        (hidden_grad,), weight_grad = pull_back(product_grad), None
    else:
        hidden_grad = product(narrow, operands[0], (((2,), (1 - contract,)), ((), ())))
        lhs, rhs = grouped[:2] if contract == 1 else grouped[1::-1]
        weight_grad = product(lhs, rhs, (((1, 2), (1, 2)), ((0,), (0,))))
    bias_grads = [grouped[2].astype(jnp.float32).sum((1, 2)) for _ in operands[1:]]
    return [hidden_grad.astype(hidden.dtype), weight_grad, *bias_grads]


# -- checks ------------------------------------------------------------------------------------


def loss_head(model: CompiledModel) -> Head:
    """Return the head of a model that can compute a loss; the model's template caches it.

    Raises:
        RequestError: not a compiled model. GraphError: it has a state, or no head.
    """
    if not isinstance(model, CompiledModel):
        inner = "; pass its .model" if isinstance(getattr(model, "model", None), CompiledModel) else ""
        raise RequestError(f"cross_entropy: expected what rlx_jax.compile returns, got {describe_type(model)}{inner}")
    template = model.template()
    if template.state or model.program not in ("forward", "train"):
        raise GraphError(
            f"{model.name}: cross_entropy needs the program train or forward, got {model.program}"
            f"{' with a state' if template.state else ''}; compile the flow with program='train'"
        )
    if not is_static(template.head.type.shape[-1]) or template.head.type.rank != 3:
        raise GraphError(f"{model.name}: logits are [batch, seq, V] with a static V, got {template.head.type}")
    return template.head


def _check_causal(model: CompiledModel) -> None:
    """Refuse a model with attention to later tokens: it reads the token that it is trained to predict.

    Raises:
        GraphError: names the attention.
    """
    if path := _find_later_attention(model):
        raise GraphError(
            f"{path}: this attention is not causal, so the model reads the token that it is to predict; pass labels= "
            "for a loss of other targets"
        )


def _find_later_attention(model: CompiledModel) -> str:
    """Return the path of an attention to later tokens; empty if there is none."""
    shape = model.template().built.primary_shape
    seq = shape[1] if len(shape) == 3 else None  # logits [batch, labels]: any attention reads the tokens
    for inner, node in model.template().mir.walk():
        op = node.op
        if not isinstance(op, AttentionOp) or op.causal or not (op.window is None or op.ahead > 0):
            continue
        keys = inner.type(node.inputs[1])  # `[B, T, …]`, which may be of another sequence than the tokens
        if seq is None or keys.shape[1] == seq or symbols_of(seq) & keys.symbols:
            return path_text(node.origin.path)
    return ""


def mask_padding(model: CompiledModel, tokens: Any, lengths: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model with an `attention_mask` for rows of these lengths, if it has that input.

    Raises:
        GraphError: it does not, and attention reads later tokens, so that tokens would read the padding.
    """
    named = dict(inputs)
    if lengths is None or named.get(MASK) is not None:
        return named
    if any(decl.name == MASK for decl in model.flow._inputs):
        keep = jnp.arange(tokens.shape[1])[None] < check_lengths(lengths, *tokens.shape)[:, None]
        named[MASK] = keep.astype(jnp.int32)
    elif path := _find_later_attention(model):
        raise GraphError(
            f"{path}: this attention reads later tokens, and {model.name} has no input {MASK!r} to leave padding out: "
            "train on rows of one length, without lengths="
        )
    return named


def _make_chunking(
    model: CompiledModel, shape: tuple[int, ...], chunk: int | None, vocab: int | None, z_loss: float
) -> LossChunking:
    """Check arguments of `cross_entropy` for tokens of shape `[B, S]`, and return the configuration of the loss."""
    head, model_sharding = model.template().head, model.programs.model_sharding
    rows = int(head.vocab_size)
    if vocab is not None:
        if isinstance(vocab, bool) or not isinstance(vocab, int | np.integer) or not 1 <= vocab <= rows:
            raise RequestError(f"{model.name}: vocab is {shown(vocab)}; expected a number of entries from 1 to {rows}")
        rows = int(vocab)
    if isinstance(z_loss, bool) or not isinstance(z_loss, int | float) or not 0 <= z_loss < math.inf:
        raise RequestError(f"cross_entropy: z_loss is a finite number, 0 or more, got {shown(z_loss)}")
    num_chunks = count_chunks(shape, chunk, head.type.shape[-1], model_sharding)
    return LossChunking(head, num_chunks, rows, float(z_loss), model_sharding, model.settings.target)


def count_chunks(
    shape: tuple[int, ...], chunk: int | None, vocab: Any, model_sharding: ModelSharding | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> int:  # fmt: skip
    """Return the number of chunks; by default the f32 logits of one chunk take at most `chunk_bytes` on a device."""
    batch, seq = shape
    if chunk is None:
        d = model_sharding
        share = 1 if d is None else d.num_batch_shards(batch) * d.num_shards("vocab")
        chunk = max(1, share * chunk_bytes // (4 * batch * int(vocab)))
    return math.ceil(seq / check_integer("cross_entropy: chunk", chunk, 1))


def check_tokens(model: CompiledModel, tokens: Any, min_length: int = 2) -> Any:
    """Return `[B, S]` ids with at least `min_length` tokens in each row; ids that the host can read are checked against
    the vocabulary."""
    input_name = model.first_input
    rows = model.template().bounds.ids.get(input_name)
    if not isinstance(tokens, jax.Array):
        if rows is None:
            raise GraphError(f"{model.name}: its first input {input_name!r} does not hold token ids")
        tokens = token_ids("tokens", tokens, rows)
    tokens = check_array("tokens", tokens, None, "iu")
    if rows is not None:
        check_ids("tokens", tokens, rows, model.settings.check_ids)
    if tokens.shape[1] < min_length:
        raise SequenceLengthError(f"tokens: {list(tokens.shape)}: one token has no next one to predict; pass 2 or more")
    return tokens


def check_array(name: str, value: Any, shape: tuple[int, ...] | None, kinds: str) -> Any:
    """Return `value` as a NumPy array, or as it is if it is a JAX array, after checks of its shape and dtype.

    Args:
        shape: the expected shape; None is any `[B, S]`.
        kinds: letters of the accepted NumPy dtype kinds.
    """
    array = value if isinstance(value, jax.Array) else as_host_array(name, value)
    if 0 in array.shape or (array.ndim != 2 if shape is None else tuple(array.shape) != tuple(shape)):
        expected = "[batch, seq]" if shape is None else f"{list(shape)} to match tokens"
        raise RequestError(f"{name}: expected shape {expected}, got {list(array.shape)}")
    kind = "f" if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype.kind
    if kind not in kinds:
        raise DTypeError(f"{name}: expected {'numbers' if 'f' in kinds else 'integers'}, got {short_name(array.dtype)}")
    return array


def check_lengths(lengths: Any, batch: int, seq: int, low: int = 0) -> Any:
    """Return lengths `[batch]` as i32, after checking that host arrays are in `low` … `seq`."""
    array = check_array("lengths", lengths, (batch,), "iu")
    if isinstance(array, np.ndarray) and (array.min() < low or array.max() > seq):
        raise SequenceLengthError(f"lengths: expected {low} to {seq}, got {array.tolist()[:8]}")
    return jnp.asarray(array).astype(jnp.int32)


def _checked_labels(labels: Any, shape: tuple[int, ...], vocab: int | None, devices: bool = False) -> Any:
    """Return labels after checking their shape, and their ids if the host can read them.

    With `devices`, ids on accelerators are read too, which waits for them.
    """
    array = check_array("labels", labels, shape, "iu")
    ids = None if vocab is None else host_view(array, devices)
    if ids is not None and ids.max() >= vocab:
        index = np.argwhere(ids >= vocab)[0]
        raise TokenIdError(
            f"labels: id {integer_text(int(ids[tuple(index)]))} at {tuple(int(i) for i in index)} is not in "
            f"[0, {vocab}); a position without a target has a negative one"
        )
    return array


def check_token_batch(model: CompiledModel, batch: Mapping[str, Any]) -> None:
    """Check the values in `batch`, arguments of `cross_entropy` by name, as that function does outside of `jax.jit`.

    A training step under `jax.jit` sees no values, so its caller checks them. Raises the errors of `cross_entropy`.
    """
    tokens = check_tokens(model, batch["tokens"])
    if batch.get("labels") is not None:
        vocab = int(loss_head(model).type.shape[-1])
        _checked_labels(batch["labels"], tokens.shape, vocab, model.settings.check_ids)
    if batch.get("lengths") is not None:
        check_lengths(batch["lengths"], *tokens.shape)
