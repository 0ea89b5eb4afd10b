"""Check and convert the inputs of a request (token ids, masks, prompts) on the host, and pad them.

Blocks of tokens are padded to few sizes, so that few programs are compiled; outputs are cropped to the original sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.buckets import Buckets, bucket_size, fit_bucket
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import ProfileError, RequestError, SequenceLengthError, TokenIdError, integer_text, shown
from rlx_jax.io import limits
from rlx_jax.ir.types import short_name
from rlx_jax.runtime.inputs import as_host_array, ids_in_range, is_foreign, read_array, to_id_array
from rlx_jax.runtime.programs import Programs

# Smallest padded prompt length where the profile has no buckets for prompts.
PROMPT_BUCKET = 16


def block_width(buckets: Buckets, seq: int, limit: int | None, step: int = PROMPT_BUCKET) -> int:
    """Return the sequence length of the program for `seq` tokens in each row.

    It is the smallest bucket of at least `seq`, else a power of two from `step` on, of at most `limit`. If sizes
    outside of the buckets are an error, it is `seq`, so that the error has the actual size.
    """
    if buckets.prompt and buckets.on_recompile == "error":
        return fit_bucket(buckets.prompt, seq) or seq
    return fit_bucket(buckets.prompt, seq) or bucket_size(seq, step, limit)


def pad_block(buckets: Buckets, block: Ids, limit: int | None) -> Ids:
    """Return a block `[B, S]` of prompts, padded to the sizes of its program."""
    batch, seq = block.shape
    return pad_to(block, buckets.rows(batch), block_width(buckets, seq, limit))


def pad_to(block: np.ndarray[Any, Any], rows: int, width: int) -> np.ndarray[Any, Any]:
    """Return a block `[B, S]` padded with zeros at the end of each axis to `[rows, width]`."""
    padded = np.zeros((rows, width), block.dtype)
    padded[: block.shape[0], : block.shape[1]] = block
    return padded


def crop(sizes: tuple[int, ...], array: Any) -> Any:
    """Return the first `sizes` entries of an array's first axes.

    Callers compile it, as an eager slice would transfer its indices to the device.
    """
    return array[tuple(slice(size) for size in sizes)]


def crop_to(programs: Programs, array: jax.Array, *sizes: int) -> jax.Array:
    """Return the first `sizes` entries of an array's first axes; the array itself if these are all.

    Every combination of sizes compiles a small program. Once compilation is closed, the host slices instead.
    """
    if array.shape[: len(sizes)] == sizes:
        return array
    is_closed = programs.is_warm and programs.settings.buckets.on_recompile == "error"
    if is_closed and not isinstance(array, jax.core.Tracer):
        target = programs.replicated or (array.sharding if array.committed else None)
        result: jax.Array = jax.device_put(crop(sizes, jax.device_get(array)), target)
    else:
        result = programs.run_helper(crop, array, static=(sizes,))
    return result


def check_buckets(buckets: Buckets, max_positions: int | None) -> None:
    """Check that the buckets fit the model and each other.

    Raises:
        ProfileError: they do not; the message names the bucket and the limit.
    """
    for name in ("prompt", "context"):
        sizes = getattr(buckets, name)
        if max_positions is not None and sizes and sizes[-1] > max_positions:
            raise ProfileError(f"buckets.{name}: {sizes[-1]} tokens, and the model has {max_positions} positions")
    if buckets.context and buckets.prompt and buckets.prompt[0] > buckets.context[-1]:
        raise ProfileError(
            f"buckets.prompt: the smallest, {buckets.prompt[0]}, is over the largest of buckets.context, "
            f"{buckets.context[-1]}"
        )


def check_has_buckets(buckets: Buckets, names: tuple[str, ...] = ("prompt", "batch")) -> None:
    """Check that the profile has buckets, without which a warm-up has no sizes to compile.

    Raises:
        RequestError: one of the bucket lists in `names` is empty.
    """
    empty_names = [name for name in names if not getattr(buckets, name)]
    if empty_names:
        joined = " and ".join(f"buckets.{name}" for name in empty_names)
        raise RequestError(
            f"warmup: the profile has no {joined}, so requests can have any size; set them, as in "
            'profile.replace(buckets={"prompt": [128, 512], "batch": [1, 8]})'
        )


Ids = np.ndarray[Any, np.dtype[np.int32]]
# Name of the input with the token types of pairs of texts.
TYPES = "token_type_ids"
LIST_ITEM_BYTES = 40  # memory of an id in a Python list, and approximately of the list object itself


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens.

    Attributes:
        ids: the token ids of each row.
        types: the token types of each row, if the rows are pairs of texts that the model distinguishes by them; else
            empty.
    """

    ids: list[Ids]
    types: list[Ids] = field(default_factory=list)


def token_block(
    tokens: Any, vocab_size: int, lengths: Any = None, mask: Any = None, min_length: int = 1, name: str = "tokens"
) -> tuple[Ids, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Check a block of token ids `[B, S]`, and left-align the valid ids of each row.

    Only valid ids are checked: those where `mask` is 1, or the first `lengths` of each row.

    Args:
        tokens: an array or nested list of ids.
        vocab_size: exclusive upper bound of ids.
        lengths: the number of valid ids of each row, each at least `min_length`; all by default.
        mask: 1 for valid ids, 0 for padding; only one of `lengths` and `mask` is allowed.
        min_length: the minimum length of a row.
        name: the name of the argument in messages.

    Returns:
        The ids, int32 `[B, S]`, with zeros after the valid ones; the number of valid ids of each row, int64 `[B]`;
        and the position of the first valid id of each row in `tokens`, int64 `[B]`.

    Raises:
        TokenIdError: not integers, or one not in `[0, vocab_size)`. RequestError: not a `[B, S]` array with B, S ≥ 1,
            or both `lengths` and `mask`. Others as `row_lengths` and `mask_spans`.
    """
    is_text = isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(t, str) for t in tokens))
    if mask is not None and is_text:
        raise RequestError(f"{name}: attention_mask goes with token ids, padded to [batch, seq]; strings need none")
    padding_advice = "pass lengths= where the model takes it" if mask is None else "mark it in attention_mask"
    array = to_id_array(name, tokens, vocab_size, padding_advice)
    if array.ndim != 2 or 0 in array.shape:
        raise RequestError(f"{name}: expected [batch, seq] with at least one token, got shape {list(array.shape)}")
    if mask is not None and lengths is not None:
        raise RequestError("lengths and attention_mask are alternatives; pass one of them")
    positions, starts = np.arange(array.shape[1])[None], np.zeros(len(array), np.int64)
    if mask is None:
        valid = row_lengths(lengths, array.shape, min_length)
        keep = None if lengths is None else positions < valid[:, None]
    else:
        keep, valid, starts = mask_spans(mask, array.shape)
    ids = array if keep is None else np.where(keep, array, 0)
    block = ids_in_range(name, ids, vocab_size).astype(np.int32)
    if starts.any():
        block = np.take_along_axis(block, (positions + starts[:, None]) % block.shape[1], axis=1)
    return block, valid, starts


def id_list(ids: Any, vocab_size: int, name: str) -> list[int]:
    """Return one sequence of token ids as a list of Python ints.

    Raises:
        TokenIdError: an entry is not an integer in `[0, vocab_size)`; the message has its position.
        RequestError: not a sequence, or an array of another rank.
    """
    if isinstance(ids, jax.core.Tracer):
        raise RequestError(f"{name}: traced by jax.jit or the like, and ids are read on the host: call it outside")
    if isinstance(ids, np.ndarray | jax.Array):
        if ids.ndim != 1:
            raise RequestError(f"{name}: expected one sequence of ids, got shape {list(ids.shape)}")
        ids = read_array(name, ids)
        ids = ids.tolist() if ids.dtype.kind in "iu" else list(ids)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise RequestError(f"{name}: expected a list of token ids, got {type(ids).__name__}")
    if set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < vocab_size:
        return list(ids)  # several times faster than the loop, which is needed for the position in messages
    for position, i in enumerate(ids):
        if isinstance(i, bool | np.bool_) or not isinstance(i, int | np.integer):
            raise TokenIdError(f"{name}[{position}]: a token id is an integer, got {shown(i)}")
        if not 0 <= i < vocab_size:
            raise TokenIdError(f"{name}[{position}]: id {integer_text(int(i))} is not in [0, {vocab_size})")
    return [int(i) for i in ids]


NO_TOKENIZER = (
    "a checkpoint requires tokenizer.json, which save_pretrained of transformers' AutoTokenizer writes; for a custom "
    "flow, pass tokenizer="
)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a request: texts or id lists (the other is None); `is_single` if it is not a list of prompts."""

    texts: list[str] | None
    ids: list[Any] | None
    is_single: bool


def classify_prompts(prompts: Any, name: str = "prompts", allow_flat: bool = True, first: int = 0) -> Prompts:
    """Classify prompts: a string, a list of strings, an id list (if `allow_flat`), a list of id lists, or arrays.

    Args:
        prompts: the prompts.
        name, first: the name of the argument, and the index of the first prompt in it, for messages.
        allow_flat: whether an id list is one prompt.

    Raises:
        RequestError: none of these, or a mix.
    """
    prompts = convert_foreign_arrays(name, prompts, first)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "UTO":  # texts, or rows of many lengths
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return Prompts([prompts], None, True)
    if isinstance(prompts, jax.core.Tracer):
        raise RequestError(f"{name}: traced by jax.jit or the like, and prompts are read on the host: call it outside")
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim:
        limits.check_memory(LIST_ITEM_BYTES * (prompts.size + len(prompts)), name)
        return Prompts(None, [prompts] if prompts.ndim == 1 else list(read_array(name, prompts)), prompts.ndim == 1)
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"{name}: expected a string, token ids, or a list of them, got {type(prompts).__name__}")
    if prompts and all(isinstance(p, str) for p in prompts):
        return Prompts(list(prompts), None, False)
    if allow_flat and prompts and all(isinstance(p, int | np.integer) and not isinstance(p, bool) for p in prompts):
        return Prompts(None, [list(prompts)], True)
    kinds = [_prompt_kind(p, allow_flat) for p in prompts]
    for i, (kind, prompt) in enumerate(zip(kinds, prompts, strict=True), first):
        if kind is None:
            raise RequestError(f"{name}[{i}]: expected {kinds[0] or 'a string or token ids'}, got {shown(prompt)}")
        if kind != kinds[0]:
            raise RequestError(
                f"{name}[{i}]: expected {kinds[0]}, as {name}[{first}] is: all of one kind; got {shown(prompt)}"
            )
    return Prompts(None, list(prompts), False)


def classify_strings(texts: Any, method: str) -> tuple[list[str], bool]:
    """Return the texts of a request that takes no token ids, and whether it is a single one.

    Raises:
        RequestError: not a string or a list of strings.
    """
    request = classify_prompts(texts, "texts", allow_flat=False)
    if request.ids:
        raise RequestError(f"texts[0] is {shown(request.ids[0])}; {method} takes strings")
    return request.texts or [], request.is_single


def convert_foreign_arrays(name: str, value: Any, first: int = 0) -> Any:
    """Convert arrays of other libraries, such as torch tensors, to NumPy, also in lists; return other values unchanged.

    `name` is for messages, as is `first`, the index of the first item.

    Raises:
        RequestError: an array cannot be read, or `value` is a mapping.
    """
    # One item of each type is examined, as a prompt may have 100,000 ids.
    if isinstance(value, list | tuple) and any(map(is_foreign, {type(item): item for item in value}.values())):
        items = [convert_foreign_arrays(f"{name}[{i}]", item) for i, item in enumerate(value, first)]
        return tuple(items) if isinstance(value, tuple) else items
    return read_array(name, value) if is_foreign(value) or isinstance(value, Mapping) else value


def _prompt_kind(prompt: Any, allow_id: bool) -> str | None:
    """Return the kind of one item of a prompt list, for messages; None if it is no prompt (nor an id, if allowed)."""
    if isinstance(prompt, str):
        return "a string"
    if allow_id and isinstance(prompt, int | np.integer) and not isinstance(prompt, bool):
        return "a token id"
    rows = isinstance(prompt, list | tuple | np.ndarray | jax.Array) and not isinstance(prompt, jax.core.Tracer)
    return "a list of token ids" if rows else None


def row_lengths(lengths: Any, shape: tuple[int, ...], min_length: int) -> np.ndarray[Any, Any]:
    """Return the number of valid tokens of each row of a `[B, S]` block, int64 `[B]`; S for each if `lengths` is None.

    Raises:
        RequestError: not B integers. SequenceLengthError: one is not between `min_length` and S.
    """
    batch, seq = shape
    if lengths is None:
        return np.full(batch, seq, np.int64)
    array = as_host_array("lengths", lengths)
    if array.dtype.kind not in "iu":
        raise RequestError(f"lengths: expected integers, got {short_name(array.dtype)}")
    if array.shape != (batch,):
        raise RequestError(f"lengths: expected shape [{batch}], one for each row, got shape {list(array.shape)}")
    if (array < min_length).any() or (array > seq).any():
        raise SequenceLengthError(f"lengths: expected {min_length} to {seq}, got {array.tolist()[:8]}")
    return array.astype(np.int64)


def keep_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a mask over tokens as bools `[B, S]`.

    Raises:
        RequestError: another shape, or other values than 0 and 1.
    """
    array = as_host_array("attention_mask", mask)
    if array.shape != shape:
        raise RequestError(f"attention_mask: expected {list(shape)}, as the tokens, got {list(array.shape)}")
    if array.dtype.kind not in "biu":
        raise RequestError(f"attention_mask: expected 0 and 1, integers or bools, got {short_name(array.dtype)}")
    if ((array != 0) & (array != 1)).any():
        position = tuple(int(i) for i in np.argwhere((array != 0) & (array != 1))[0])
        raise RequestError(f"attention_mask: expected 0 and 1, got {array[position]} at {position}")
    return array.astype(bool)


def mask_spans(
    mask: Any, shape: tuple[int, ...]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return `keep_mask`, the number of valid tokens of each row, and the position of the first, both int64 `[B]`.

    Raises:
        RequestError: as `keep_mask`, or the 1s of a row are not contiguous, or a row has none.
    """
    keep = keep_mask(mask, shape)
    valid, starts = keep.sum(axis=1), keep.argmax(axis=1)
    positions = np.arange(shape[1])[None]
    span = (positions >= starts[:, None]) & (positions < (starts + valid)[:, None])
    for row in np.flatnonzero((valid == 0) | (span != keep).any(axis=1))[:1]:
        problem = "hides every token" if valid[row] == 0 else "has a gap"
        raise RequestError(
            f"attention_mask: row {row} {problem}; expected at least one 1, and all 1s of a row adjacent"
        )
    return keep, valid.astype(np.int64), starts.astype(np.int64)


def pad_rows(rows: Sequence[Sequence[int] | Ids], width: int) -> Ids:
    """Return rows of ids as a block `[B, width]`, padded with 0 on the right."""
    block = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
    return block


def check_text(text: object, name: str) -> None:
    """Check that `text` is a str without lone surrogates, on which the native library fails."""
    if not isinstance(text, str):
        raise RequestError(f"{name}: expected a str, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(
            f"{name}: half of a surrogate pair at character {cause.start}, which is not valid Unicode text"
        ) from None
