"""Losses of texts with labels: one or several labels, values of a regression, and the span of an answer.

The model's output is `label_logits`, as of a recipe with a head. What its logits mean is read from the head: see
`LabelHead`. The losses equal transformers', and their mean counts each row once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Arrays
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, RequestError, TokenIdError, describe_type, integer_text, quote, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.flow_outputs import LabelHead
from rlx_jax.losses.chunked import check_array, check_lengths, check_token_batch, check_tokens, mask_padding, targets
from rlx_jax.runtime.inputs import host_view
from rlx_jax.runtime.model import CompiledModel

AnyArray = Any

REGRESSION, SINGLE_LABEL, MULTI_LABEL = "regression", "single_label_classification", "multi_label_classification"
PROBLEMS = (REGRESSION, SINGLE_LABEL, MULTI_LABEL)
POOLINGS = ("cls", "lasttoken")
# The tasks of heads, as `architectures` in config.json names them after `For`.
TEXT_TASKS, ANSWER_TASKS = ("SequenceClassification", "ImageClassification"), ("QuestionAnswering",)
SPAN = 2  # logits of a token: as the first one of an answer, and as the last one


@dataclass(frozen=True)
class LabelTask:
    """What the logits of a model with labels are.

    Attributes:
        problem: one of `PROBLEMS`.
        num_labels: number of logits of a text.
        pooling: one of `POOLINGS`; empty if the logits are `[batch, labels]`.
        padding_id: see `LabelHead`.
    """

    problem: str
    num_labels: int
    pooling: str
    padding_id: int | None


def classification(
    model: CompiledModel, params: Arrays, tokens: Any, *, labels: Any, lengths: Any = None, weights: Any = None,
    problem: str | None = None, **inputs: Any,
) -> jax.Array:  # fmt: skip
    """Return the mean loss of the labels of texts, `Σ w · loss / Σ w`, f32.

    | `problem` | `labels` | loss of a row |
    |---|---|---|
    | `single_label_classification` | `[B]` ids; negative for none | cross-entropy |
    | `multi_label_classification` | `[B, L]` in 0 … 1 | mean over the labels of the binary cross-entropy |
    | `regression` | `[B, L]`, or `[B]` for one value | mean of the squared errors |

    The function is pure in `params`. Values of arguments are checked where the host can read them.

    Args:
        model: a recipe with a head, compiled with `program="train"`; or a flow with outputs `[B, L]`.
        tokens: `[B, S]` ids, or another first input of the flow.
        labels: see the table.
        lengths: `[B]` in 1 … S, for rows padded on the right: no token reads the padding.
        weights: `[B]` weight of each row; 0 for rows that fill a batch.
        problem: see the table. By default the head's `problem_type`; if it has none, as in transformers: a regression
            for one label, else one label for integers and several for floats.
        inputs: the flow's other inputs, such as `token_type_ids`, and `attention_mask` in place of `lengths`.

    Raises:
        GraphError: the output has no labels; or there are `lengths`, and attention reads padding.
        RequestError, ShapeError, TokenIdError, SequenceLengthError: invalid arguments.
    """
    task = _label_task(model, problem, labels)
    labels, weights = _row_targets(model, task.problem, task.num_labels, tokens, labels, weights)
    tokens, inputs = _model_inputs(model, tokens, lengths, inputs)
    output = _primary_output(model, params, tokens, inputs)
    logits = output if not task.pooling else _pool(task, output, tokens, lengths, inputs)
    return _weighted_mean(_row_losses(task.problem, logits, labels), weights)


def span(
    model: CompiledModel, params: Arrays, tokens: Any, *, labels: Any, lengths: Any = None, weights: Any = None,
    **inputs: Any,
) -> jax.Array:  # fmt: skip
    """Return the mean loss of the spans that answer questions, f32: the mean of the cross-entropies of the first and of
    the last token of an answer, among the tokens of the row.

    Args:
        model: its output is `[B, S, 2]`, the logits of a token as the first and as the last one.
        labels: `[B, 2]`, the first and the last token of the answer; negative for no target.
        Others: as in `classification`.

    Raises:
        As `classification`.
    """
    shape = _output_shape(model)
    _label_head(model, ANSWER_TASKS, "span")
    if len(shape) != 3 or shape[-1] != SPAN:
        raise GraphError(f"{model.name}: span needs the output [batch, seq, 2] of a head for answers, got {shape}")
    labels, weights = _row_targets(model, "", SPAN, tokens, labels, weights)
    tokens, inputs = _model_inputs(model, tokens, lengths, inputs)
    logits = _primary_output(model, params, tokens, inputs)
    if (keep := _keep(tokens, lengths, inputs)) is not None:
        logits = jnp.where(keep[..., None], logits, -jnp.inf)
    log_probabilities = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(log_probabilities, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    return _weighted_mean(-chosen.mean(1), weights)


# -- the model's logits ------------------------------------------------------------------------


def _output_shape(model: Any) -> tuple[Any, ...]:
    """Return the shape of the primary output.

    Raises:
        RequestError: not a compiled model. GraphError: another program than train or forward.
    """
    if not isinstance(model, CompiledModel):
        inner = "; pass its .model" if isinstance(getattr(model, "model", None), CompiledModel) else ""
        raise RequestError(f"expected what rlx_jax.compile returns, got {describe_type(model)}{inner}")
    if model.program not in ("forward", "train"):
        raise GraphError(f"{model.name}: the loss needs the program train or forward, got {model.program}")
    return tuple(model.template().built.primary_shape)


def _label_head(model: CompiledModel, tasks: tuple[str, ...], loss: str) -> LabelHead | None:
    """Return the head of a model; None if the flow has none.

    Raises:
        GraphError: it is for another task than `tasks`.
    """
    head = model.flow._outputs.label_head if isinstance(model.flow, ModelFlow) else None
    if head is not None and head.task not in tasks:
        losses = {**dict.fromkeys(ANSWER_TASKS, "span"), **dict.fromkeys(TEXT_TASKS, "classification")}
        other = losses.get(head.task, "cross_entropy")
        raise GraphError(f"{model.name}: the head is for {head.task}: rlx_jax.losses.{other}, not {loss}")
    return head


def _label_task(model: CompiledModel, problem: str | None, labels: Any) -> LabelTask:
    """Return what the logits of a model are."""
    shape = _output_shape(model)
    head = _label_head(model, TEXT_TASKS, "classification")
    if len(shape) not in (2, 3) or not isinstance(shape[-1], int) or (head is None and len(shape) == 3):
        raise GraphError(
            f"{model.name}: classification needs the output of a recipe with a head, or logits [batch, labels]; got "
            f"{list(shape)}. rlx_jax.recipe_for a checkpoint with a head, such as BertForSequenceClassification"
        )
    pooling = head.pooling if head is not None and len(shape) == 3 else ""
    if pooling and pooling not in POOLINGS:
        raise GraphError(f"{model.name}: classification reads logits at {', '.join(POOLINGS)}, not by {quote(pooling)}")
    problem = problem or (head.problem if head else "")
    if not problem:
        is_float = jnp.issubdtype((labels if hasattr(labels, "dtype") else np.asarray(labels)).dtype, jnp.floating)
        problem = REGRESSION if shape[-1] == 1 else MULTI_LABEL if is_float else SINGLE_LABEL
    if problem not in PROBLEMS:
        raise RequestError(f"classification: problem is {shown(problem)}; expected one of {', '.join(PROBLEMS)}")
    return LabelTask(problem, shape[-1], pooling, head.padding_id if head else None)


def _model_inputs(
    model: CompiledModel, tokens: Any, lengths: Any, inputs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the tokens and the other inputs of the model, checked, with a mask for `lengths`."""
    if lengths is not None and inputs.get("attention_mask") is not None:
        raise RequestError("lengths and attention_mask are alternatives; pass one of them")
    named = {name: value for name, value in inputs.items() if value is not None}
    if model.template().bounds.ids.get(model.first_input) is None:  # an image, for example
        if lengths is not None:
            raise RequestError(f"{model.name}: lengths are for tokens, and the input is {model.first_input!r}")
        return tokens, named
    tokens = check_tokens(model, tokens, min_length=1)
    if lengths is not None:
        check_lengths(lengths, tokens.shape[0], tokens.shape[1], low=1)
    return tokens, mask_padding(model, tokens, lengths, named)


def _primary_output(model: CompiledModel, params: Arrays, tokens: Any, inputs: Mapping[str, Any]) -> AnyArray:
    """Return the first output of the model in f32."""
    outputs = model.apply(params, tokens, **inputs)
    return (outputs[model.output_names[0]] if isinstance(outputs, dict) else outputs).astype(jnp.float32)


def _keep(tokens: Any, lengths: Any, inputs: Mapping[str, Any]) -> AnyArray | None:
    """Return which tokens are not padding, bool `[B, S]`; None if all are."""
    if lengths is not None:
        ends = check_lengths(lengths, tokens.shape[0], tokens.shape[1], low=1)
        return jnp.arange(tokens.shape[1])[None] < ends[:, None]
    mask = inputs.get("attention_mask")
    return None if mask is None else jnp.asarray(mask) > 0


def _pool(task: LabelTask, logits: AnyArray, tokens: Any, lengths: Any, inputs: Mapping[str, Any]) -> AnyArray:
    """Return the logits of each text, `[B, L]`, from the logits of its tokens."""
    if task.pooling == "cls":
        return logits[:, 0]
    keep = _keep(tokens, lengths, inputs)
    keep = jnp.ones(tokens.shape, bool) if keep is None else keep
    if task.padding_id is not None:
        keep = keep & (jnp.asarray(tokens) != task.padding_id)
    last = jnp.where(keep, jnp.arange(tokens.shape[1])[None], 0).max(1)
    return jnp.take_along_axis(logits, last[:, None, None], 1)[:, 0]


# -- losses ------------------------------------------------------------------------------------


def _row_losses(problem: str, logits: AnyArray, labels: AnyArray) -> AnyArray:
    """Return the loss of each row, `[B]`; labels are `[B]` ids, or `[B, L]`."""
    if problem == SINGLE_LABEL:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], 1)
        return -chosen[:, 0]
    if problem == REGRESSION:
        return jnp.square(logits - labels).mean(1)
    # −log σ(z) for a label, −log σ(−z) for none, without overflow.
    return (jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))).mean(1)


def _weighted_mean(losses: AnyArray, weights: AnyArray) -> jax.Array:
    """Return Σ w · loss / Σ w; 0 for a batch without targets."""
    total = weights.sum()
    # A row without a target may have a loss that is not finite, and 0 · ∞ is NaN.
    losses = jnp.where(weights != 0, losses, 0.0)
    result: jax.Array = (losses * weights).sum() / jnp.where(total > 0, total, 1.0)
    return result


# -- targets -----------------------------------------------------------------------------------


def _row_targets(
    model: CompiledModel, problem: str, num_labels: int, tokens: Any, labels: Any, weights: Any
) -> tuple[AnyArray, AnyArray]:
    """Return the labels of the rows, and the weight of each row, `[B]` f32: 0 without a target.

    Args:
        problem: one of `PROBLEMS`; empty for the two tokens of a span.
    """
    rows = np.shape(tokens)[0]
    checked = _check_labels(model, problem, num_labels, np.shape(tokens), labels)
    row_weights = jnp.ones(rows, jnp.float32)
    if weights is not None:
        checked_weights = check_array("weights", weights, (rows,), "biuf")
        row_weights = lax.stop_gradient(jnp.asarray(checked_weights)).astype(jnp.float32)
    if problem in (REGRESSION, MULTI_LABEL):
        return jnp.asarray(checked).astype(jnp.float32).reshape(rows, num_labels), row_weights
    ids = jnp.asarray(checked).astype(jnp.int32)
    return ids, row_weights * (ids.reshape(rows, -1) >= 0).all(1).astype(jnp.float32)


def _check_labels(model: CompiledModel, problem: str, num_labels: int, shape: tuple[int, ...], labels: Any) -> Any:
    """Return labels after checking their shape and dtype, and their values if the host can read them."""
    rows, is_ids = shape[0], problem in ("", SINGLE_LABEL)
    expected = (rows,) if problem == SINGLE_LABEL or (num_labels == 1 and np.ndim(labels) == 1) else (rows, num_labels)
    array = check_array("labels", labels, expected, "iu" if is_ids else "biuf")
    values = host_view(array, model.settings.check_ids)
    if values is None:
        return array
    limit = num_labels if problem else shape[1]
    if is_ids and values.max() >= limit:
        raise TokenIdError(
            f"labels: {integer_text(int(values.max()))} is not in [0, {limit}); a row without a target has a negative "
            "one"
        )
    if not is_ids and not np.isfinite(values.astype(np.float32)).all():
        raise RequestError("labels: expected finite numbers")
    if problem == MULTI_LABEL and (values.min() < 0 or values.max() > 1):
        raise RequestError(f"labels: expected numbers from 0 to 1, got {values.min()} to {values.max()}")
    return array


# -- batches -----------------------------------------------------------------------------------


def _label_loss(loss: Callable[..., Any]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the function of a loss, and the options that `functools.partial` fixes."""
    function: Any = loss
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    return function, options


def counts_rows(loss: Callable[..., Any]) -> bool:
    """Return whether a loss has labels for rows, as `classification` and `span` do, and not for tokens."""
    return _label_loss(loss)[0] in (classification, span)


def target_weights(loss: Callable[..., Any], model: CompiledModel, batch: Arrays) -> AnyArray:
    """Return the weights of the targets of a batch as a loss counts them: of rows for `classification` and `span`, else
    of tokens as in `cross_entropy`; 0 without a target."""
    function, options = _label_loss(loss)
    labels, weights = batch.get("labels"), batch.get("weights")
    if function in (classification, span) and labels is not None:
        task = _label_task(model, options.get("problem"), labels) if function is classification else None
        problem, num_labels = (task.problem, task.num_labels) if task else ("", SPAN)
        return _row_targets(model, problem, num_labels, batch["tokens"], labels, weights)[1]
    names = {name: batch[name] for name in ("lengths", "labels", "weights") if name in batch}
    return targets(batch["tokens"], **names)[1]


def check_batch(loss: Callable[..., Any], model: CompiledModel, batch: Mapping[str, Any]) -> None:
    """Check the values in `batch`, arguments of a loss by name, as the loss does outside of `jax.jit`.

    A training step under `jax.jit` sees no values, so its caller checks them. Raises the errors of the loss.
    """
    if not counts_rows(loss):
        check_token_batch(model, batch)
        return
    if batch.get("labels") is None:
        raise RequestError("step: a batch for this loss has 'labels'")
    target_weights(loss, model, batch)
    if batch.get("lengths") is not None:
        check_lengths(batch["lengths"], batch["tokens"].shape[0], batch["tokens"].shape[1], low=1)
    if model.template().bounds.ids.get(model.first_input) is not None:
        check_tokens(model, batch["tokens"], min_length=1)
