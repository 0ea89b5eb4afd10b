"""Named prefixes, `CausalLM.prefix`, and their files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.errors import FormatError, RequestError, VersionMismatchError, listing, quote, shown
from rlx_jax.generate.decode_state import fits, resize_state
from rlx_jax.generate.generation import GeneratesText
from rlx_jax.generate.prefill import prefill
from rlx_jax.generate.prefix_cache import PREFIX_BUCKET, Prefix, one_row, state_bytes
from rlx_jax.generate.request import LanguageModel
from rlx_jax.io.atomic import atomic_directory
from rlx_jax.io.files import parse_object
from rlx_jax.ir.serial import closure_digest, encode_graph
from rlx_jax.ir.types import short_name
from rlx_jax.runtime.inputs import check_flag
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import classify_prompts
from rlx_jax.text.token_model import check_positions
from rlx_jax.weights.format import Entry
from rlx_jax.weights.safetensors_format import write_file
from rlx_jax.weights.tensor_file import SafetensorsFile

# Tensors of a file next to the arrays of the state, whose names have a "state." in front.
IDS_TENSOR, IDENTITY_TENSOR, STATE_TENSORS = "ids", "identity", "state."


def name_prefix(self: GeneratesText, text: str | Sequence[int]) -> Prefix:
    """Prefill the beginning of prompts once, and return it with its state.

    Pass it as `state=` to `generate` or `stream`, with the rest of each prompt. Prompts of `generate` that begin with
    its tokens use it by themselves where they run in slots.

    Args:
        text: a string, to which the tokenizer adds its special tokens, or token ids.

    Raises:
        RequestError: the flow has other inputs than tokens; or it does not fit `prefix_cache` next to other named
            prefixes. TokenIdError, SequenceLengthError: as `generate`.
    """
    lm = self._lm
    prompts = classify_prompts(text, "prefix")
    if not prompts.is_single:
        raise RequestError(f"prefix is {shown(text)}; expected a string or a list of token ids")
    if lm.required_inputs:
        raise RequestError(f"prefix: the flow reads {listing(lm.required_inputs)}; use prefill, which takes inputs=")
    (ids,) = lm.encode_prompts(prompts)
    check_positions(len(ids), lm.max_positions, "prefix")
    prefix = _new_prefix(lm, ids)
    _, state, _ = prefill(lm, [ids], None, None, "last", None, None)
    arrays = state.take(lm.owner).arrays()
    prefix.arrays = resize_state(one_row(lm.model, prefix.cache_len), arrays, np.zeros(1, np.int32))
    return _pin(lm, prefix)


def load_prefix(self: GeneratesText, path: str | os.PathLike[str]) -> Prefix:
    """Return a prefix that `save_prefix` wrote, as `prefix` does; nothing is prefilled.

    Raises:
        VersionMismatchError: it belongs to another model, other weights, or another profile; the message names which.
        FormatError: the file is no prefix. RequestError: as `prefix`.
        MissingFileError, StorageError: it cannot be read.
    """
    lm, model, name = self._lm, self._lm.model, quote(os.fspath(path))
    with SafetensorsFile(path) as file:
        if not {IDS_TENSOR, IDENTITY_TENSOR} <= file.tensors.keys():
            raise FormatError(f"{name}: not a prefix: it has {listing(sorted(file.tensors), 4)}; see save_prefix")
        saved = parse_object(bytes(file.read(IDENTITY_TENSOR)), name, FormatError)
        for field, value in prefix_identity(model, lm.max_positions).items():
            if saved.get(field) != value:
                raise VersionMismatchError(
                    f"{name}: the prefix was computed with another {field}: {shown(saved.get(field))}, and this model "
                    f"has {shown(value)}; compute it again with prefix"
                )
        prefix = _new_prefix(lm, file.read(IDS_TENSOR).tolist())
        keys = [key for key in file.tensors if key.startswith(STATE_TENSORS)]
        arrays = {key.removeprefix(STATE_TENSORS): file.read(key) for key in keys}
    program = one_row(model, prefix.cache_len)
    template = model.programs.template(program.key.symbolic)
    if arrays.keys() != template.state.keys() or not fits(program, arrays):
        raise FormatError(f"{name}: the arrays of the state are not those of {len(prefix.ids)} tokens")
    prefix.arrays = jax.device_put(arrays, model.programs.state_shardings(program.key))
    return _pin(lm, prefix)


def save_prefix(self: GeneratesText, prefix: Prefix, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a prefix to a safetensors file for `load_prefix`, with a digest of the model and its weights.

    Raises:
        RequestError: `prefix` is none. SessionStateError: as `generate` with it as `state=`.
        TargetExistsError: the file exists, and `overwrite` is False. StorageError: it cannot be written.
    """
    lm = self._lm
    check_flag("overwrite", overwrite)
    if not isinstance(prefix, Prefix):
        raise RequestError(f"save_prefix: prefix is {shown(prefix)}; expected the result of prefix")
    state = prefix.decode_state(lm.owner, lm.model).take(lm.owner).arrays()
    identity = json.dumps(prefix_identity(lm.model, lm.max_positions)).encode()
    arrays = {STATE_TENSORS + name: np.asarray(jax.device_get(array)) for name, array in state.items()}
    arrays |= {IDS_TENSOR: np.array(prefix.ids, np.int32), IDENTITY_TENSOR: np.frombuffer(identity, np.uint8)}
    with atomic_directory(os.path.abspath(path), overwrite, prefix.nbytes) as target:
        write_file(target, [Entry.from_array(name, array) for name, array in arrays.items()])


def prefix_identity(model: CompiledModel, max_positions: int | None) -> dict[str, Any]:
    """Return what a prefix in a file depends on, by a name for messages."""
    # Not `any_template`: a file must not depend on what ran before it was written.
    template = model.programs.template(model.as_program("extend").key(outputs=model.output_names[:1]))
    params = model.require_params("a prefix")
    leaves = jax.tree.leaves(params)  # in the order of their names
    dtypes = {short_name(array.dtype) for array in (*leaves, *template.state.values())}
    sums = np.asarray(jax.device_get(model.programs.run_helper(checksums, leaves)))
    graph = json.dumps(encode_graph(template.mir, closure_digest), sort_keys=True)
    return {
        "dtype": sorted(dtypes),
        "max_positions": max_positions,
        "profile": model.settings.profile.to_toml(defaults=False),
        "model": f"{model.name} {_digest(graph.encode())}",
        "weights": _digest(json.dumps(sorted(params)).encode() + sums.tobytes()),
    }


def checksums(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return a sum over the hashes of the bits and position of each number of each array, `[n]` uint32."""

    def checksum(array: jax.Array) -> jax.Array:
        is_wide = array.dtype not in (jnp.bool_, jnp.int4, jnp.uint4)
        bits = array.view(f"uint{8 * array.dtype.itemsize}") if is_wide else array.astype(jnp.uint8)
        position = jax.lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
        # A sum without a hash is the same for the negative of an array, and for twice an array of some sizes.
        mixed = bits.astype(jnp.uint32) + position * jnp.uint32(2654435761)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
        return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)

    return jnp.stack([checksum(leaf) for leaf in leaves])


def _digest(content: bytes) -> str:
    """Return 16 hex digits of a hash."""
    return hashlib.sha256(content).hexdigest()[:16]


def _new_prefix(lm: LanguageModel, ids: Sequence[int]) -> Prefix:
    """Return a prefix without its state."""
    cache_len = bucket_size(len(ids), PREFIX_BUCKET, lm.max_positions)
    params, nbytes = lm.prefixes.begin(lm.model), state_bytes(lm.model, 1, cache_len)
    return Prefix(tuple(ids), nbytes, cache_len, params, cache=lm.prefixes)


def _pin(lm: LanguageModel, prefix: Prefix) -> Prefix:
    """Store a prefix until it is released, and return it; or an equal one that was named before.

    Raises:
        RequestError: it does not fit next to the other ones.
    """
    same = lm.prefixes.entries.get(prefix.ids)
    if same is not None and same.is_named:
        return same
    if not lm.prefixes.store(prefix, prefix.arrays):
        raise RequestError(
            f"prefix: {prefix!r} does not fit prefix_cache, {lm.prefixes.budget:,} bytes, of which other named "
            f"prefixes take {lm.prefixes.named_bytes:,}; release one, or set a larger prefix_cache"
        )
    return prefix
