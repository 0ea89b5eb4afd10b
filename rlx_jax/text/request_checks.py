"""Check what a request holds, on the host, before anything is padded, cast or compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import RequestError, SequenceLengthError, TokenIdError, number, shown
from rlx_jax.io import limits
from rlx_jax.ir.types import short_name
from rlx_jax.runtime.inputs import as_host_array, id_array, ids_in, is_foreign, read_array

Ids = np.ndarray[Any, np.dtype[np.int32]]
LIST_BYTES = 40  # of an id in a list, and about that of a list


def token_block(
    tokens: Any, vocab_size: int, lengths: Any = None, mask: Any = None, low: int = 1, what: str = "tokens"
) -> tuple[Ids, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids `[B, S]` with the valid ones of each row first and 0 behind, how many they are, and where they began.

    Only valid ids are looked at: those under a 1 of `mask`, or before `lengths`, each at least `low`.

    Raises:
        TokenIdError: not integers, or one not in `[0, vocab_size)`. RequestError: not a `[B, S]` array with B, S ≥ 1,
            or both `lengths` and `mask`. Others as `row_lengths` and `mask_spans`.
    """
    texts = isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(t, str) for t in tokens))
    if mask is not None and texts:
        raise RequestError(f"{what}: attention_mask goes with token ids, padded to [batch, seq]; strings need none")
    padding = "pass lengths= where the model takes it" if mask is None else "say where in attention_mask"
    array = id_array(what, tokens, vocab_size, padding)
    if array.ndim != 2 or 0 in array.shape:
        raise RequestError(f"{what}: expected [batch, seq] with at least one token, got shape {list(array.shape)}")
    if mask is not None and lengths is not None:
        raise RequestError("lengths and attention_mask say the same; pass one of them")
    at, starts = np.arange(array.shape[1])[None], np.zeros(len(array), np.int64)
    if mask is None:
        valid = row_lengths(lengths, array.shape, low)
        keep = at < valid[:, None]
    else:
        keep, valid, starts = mask_spans(mask, array.shape)
    block = ids_in(what, np.where(keep, array, 0), vocab_size).astype(np.int32)
    if starts.any():
        block = np.take_along_axis(block, (at + starts[:, None]) % block.shape[1], axis=1)
    return block, valid, starts


def id_list(ids: Any, vocab_size: int, what: str) -> list[int]:
    """One sequence of token ids as a list.

    Raises:
        TokenIdError: an entry is not an integer in `[0, vocab_size)`; its position is named.
    """
    if isinstance(ids, jax.core.Tracer):
        raise RequestError(f"{what}: traced by jax.jit or the like, and ids are read on the host: call it outside")
    if isinstance(ids, np.ndarray | jax.Array):
        if ids.ndim != 1:
            raise RequestError(f"{what}: expected one sequence of ids, got shape {list(ids.shape)}")
        ids = read_array(what, ids)
        ids = ids.tolist() if ids.dtype.kind in "iu" else list(ids)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise RequestError(f"{what}: expected a list of token ids, got {type(ids).__name__}")
    if set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < vocab_size:
        return list(ids)  # some times as fast as the loop, which finds what to tell
    for at, i in enumerate(ids):
        if isinstance(i, bool | np.bool_) or not isinstance(i, int | np.integer):
            raise TokenIdError(f"{what}[{at}]: a token id is an integer, got {shown(i)}")
        if not 0 <= i < vocab_size:
            raise TokenIdError(f"{what}[{at}]: id {number(int(i))} is not in [0, {vocab_size})")
    return [int(i) for i in ids]


NO_TOKENIZER = (
    "a checkpoint's is tokenizer.json, which save_pretrained of transformers' AutoTokenizer writes; a flow of your own "
    "is given one, tokenizer="
)


@dataclass(frozen=True)
class Prompts:
    """What a request brought: texts or id lists, one or several."""

    texts: list[str] | None
    ids: list[Any] | None
    single: bool


def split_prompts(prompts: Any, what: str = "prompts", flat: bool = True) -> Prompts:
    """Tell a string, a list of strings, an id list (where `flat`) and a list of id lists apart; or arrays of them.

    Raises:
        RequestError: none of them, or a mix.
    """
    prompts = as_known_arrays(what, prompts)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "UTO":  # texts, or rows of many lengths
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return Prompts([prompts], None, True)
    if isinstance(prompts, jax.core.Tracer):
        raise RequestError(f"{what}: traced by jax.jit or the like, and prompts are read on the host: call it outside")
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim:
        limits.fits_in_memory(LIST_BYTES * (prompts.size + len(prompts)), what)
        return Prompts(None, [prompts] if prompts.ndim == 1 else list(read_array(what, prompts)), prompts.ndim == 1)
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"{what}: expected a string, token ids, or a list of them, got {type(prompts).__name__}")
    if prompts and all(isinstance(p, str) for p in prompts):
        return Prompts(list(prompts), None, False)
    if flat and prompts and all(isinstance(p, int | np.integer) and not isinstance(p, bool) for p in prompts):
        return Prompts(None, [list(prompts)], True)
    kinds = [_kind(p, flat) for p in prompts]
    for i, kind in enumerate(kinds):
        if kind is None:
            raise RequestError(f"{what}[{i}]: expected {kinds[0] or 'a string or token ids'}, got {shown(prompts[i])}")
        if kind != kinds[0]:
            raise RequestError(
                f"{what}[{i}]: expected {kinds[0]}, as {what}[0] is, all of one kind; got {shown(prompts[i])}"
            )
    return Prompts(None, list(prompts), False)


def as_known_arrays(what: str, value: Any) -> Any:
    """Return arrays of other libraries, such as torch tensors, as NumPy arrays, in a list too; anything else as it is.

    Raises:
        RequestError: one cannot be read; or a mapping.
    """
    if isinstance(value, list | tuple) and any(map(is_foreign, value)):
        items = [as_known_arrays(f"{what}[{i}]", item) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return read_array(what, value) if is_foreign(value) or isinstance(value, Mapping) else value


def _kind(prompt: Any, flat: bool) -> str | None:
    """What one of several prompts is, or one of the ids of a prompt; None for neither."""
    if isinstance(prompt, str):
        return "a string"
    if flat and isinstance(prompt, int | np.integer) and not isinstance(prompt, bool):
        return "a token id"
    rows = isinstance(prompt, list | tuple | np.ndarray | jax.Array) and not isinstance(prompt, jax.core.Tracer)
    return "a list of token ids" if rows else None


def row_lengths(lengths: Any, shape: tuple[int, ...], low: int) -> np.ndarray[Any, Any]:
    """New valid tokens of each row of a block of shape `[B, S]`, int64 `[B]`, between `low` and S; all S if None.

    Raises:
        RequestError: another number of rows, not integers, or out of range.
    """
    batch, seq = shape
    if lengths is None:
        return np.full(batch, seq, np.int64)
    array = as_host_array("lengths", lengths)
    if array.dtype.kind not in "iu":
        raise RequestError(f"lengths: expected integers, got {short_name(array.dtype)}")
    if array.shape != (batch,):
        raise RequestError(f"lengths: expected shape [{batch}], one for each row, got shape {list(array.shape)}")
    if (array < low).any() or (array > seq).any():
        raise SequenceLengthError(f"lengths: expected {low} to {seq}, got {array.tolist()[:8]}")
    return array.astype(np.int64)


def keep_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A mask over tokens as bools `[B, S]`.

    Raises:
        RequestError: another shape, or other values than 0 and 1.
    """
    array = as_host_array("attention_mask", mask)
    if array.shape != shape:
        raise RequestError(f"attention_mask: expected {list(shape)}, as the tokens, got {list(array.shape)}")
    if array.dtype.kind not in "biu":
        raise RequestError(f"attention_mask: expected 0 and 1, integers or bools, got {short_name(array.dtype)}")
    if ((array != 0) & (array != 1)).any():
        place = tuple(int(i) for i in np.argwhere((array != 0) & (array != 1))[0])
        raise RequestError(f"attention_mask: expected 0 and 1, got {array[place]} at {place}")
    return array.astype(bool)


def mask_spans(
    mask: Any, shape: tuple[int, ...]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`keep_mask`; the valid tokens of each row and where they begin, int64 `[B]`.

    Raises:
        RequestError: as `keep_mask`, or a row has holes or is hidden whole.
    """
    keep = keep_mask(mask, shape)
    valid, starts = keep.sum(axis=1), keep.argmax(axis=1)
    at = np.arange(shape[1])[None]
    span = (at >= starts[:, None]) & (at < (starts + valid)[:, None])
    for row in np.flatnonzero((valid == 0) | (span != keep).any(axis=1))[:1]:
        what = "hides every token" if valid[row] == 0 else "has a hole"
        raise RequestError(f"attention_mask: row {row} {what}; a row has a 1 at least, and its 1s stand together")
    return keep, valid.astype(np.int64), starts.astype(np.int64)


def pad_rows(rows: Sequence[Sequence[int] | Ids], width: int) -> Ids:
    """Rows padded on the right with 0 to `[B, width]`."""
    block = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
    return block
