"""`CausalLM.patch`: prompts with the outputs of blocks changed, all together or one after another in a sweep.

The program has the blocks and positions to change as operands, so that a sweep, and each later call with other layers,
runs what is compiled already. Its rows are copies of the prompts, one for each run of a sweep.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import RequestError, ShapeError, shown, suggest_keywords
from rlx_jax.generate import patched_flow
from rlx_jax.generate.decode_state import last_tokens
from rlx_jax.generate.generation import GeneratesText
from rlx_jax.generate.prefill import CaptureAxes, last_only, read_prompts, run_forward, trim_padding
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_inputs import Inputs, RequestInputs, check_inputs
from rlx_jax.runtime.inputs import check_flag, check_integer, read_array
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import Ids, pad_block, pad_rows, pad_to
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.checks import check_signature

# Tokens of the copies that run at once, padding included: more gain little, and take more memory.
SWEEP_TOKENS = 2048
# Bytes of the logits of the copies that run at once.
SWEEP_LOGIT_BYTES = 2**28

# The changes of one copy of the prompts: patches, each with the number of a block and the index of the positions.
Copy = list[tuple[patched_flow.Patch, int, int]]


@dataclass(frozen=True, eq=False)
class PatchRun:
    """A checked call of `patch`.

    Attributes:
        block, lengths: the prompts `[B, S]`, and their lengths.
        places: bool `[places, B, S]`, the positions to change together.
        pads: whether rows may be padded: where tokens do not see later ones, and rows not each other.
        is_last: whether only the logits of the last tokens are asked for.
    """

    lm: LanguageModel
    block: Ids
    lengths: Ids
    places: patched_flow.HostArray
    patches: list[patched_flow.Patch]
    inputs: RequestInputs
    pads: bool
    sweep: bool
    is_last: bool
    metric: patched_flow.PatchFunction | None

    def padded(self, block: Ids) -> Ids:
        """Return a block of tokens padded to the sizes of its program.

        Many copies of a prompt are not padded to powers of two, which could double their cost.
        """
        buckets = self.lm.buckets
        if not self.pads:
            return block
        if self.sweep and not buckets.prompt:
            return pad_to(block, buckets.rows(len(block)), block.shape[1])
        return pad_block(buckets, block, self.lm.max_positions)

    def copies_at_once(self) -> int:
        """Return how many copies of the prompts a program of a sweep should run."""
        by_tokens = SWEEP_TOKENS // self.padded(self.block).size
        by_logits = by_tokens if self.is_last else SWEEP_LOGIT_BYTES // (4 * self.block.size * self.lm.vocab_size)
        return max(1, min(by_tokens, by_logits))

    def values(self, source: Ids | None) -> dict[str, Any]:
        """Return the inputs with values: the arrays, and the outputs of the source's blocks.

        Args:
            source: tokens of the source, None without one.
        """
        model, (rows, width) = self.lm.model, self.padded(self.block).shape
        values: dict[str, Any] = {}
        for p in self.patches:
            if p.array is not None:
                filled = np.zeros((len(p.chosen), rows, width, *p.width), np.float32)
                filled[:, : self.block.shape[0], : self.block.shape[1]] = p.array
                values[p.wrapper.name("values")] = filled
        read = [p for p in self.patches if p.wrapper.reads_values and p.array is None]
        if source is not None and read:
            names = dict.fromkeys(name for p in read for name in p.names)  # all, so that another layer compiles nothing
            ids = self.padded(source)
            capturing = patched_flow.edited_model(model, "capture", self.patches)
            outputs = run_forward(capturing, tuple(names), ids, self.inputs, self.inputs.padded(len(ids)))
            for p in read:
                chosen = (outputs[p.names[number]] for number in p.chosen)
                values[p.wrapper.name("values")] = model.programs.run_helper(stack, *chosen)
        placed: dict[str, Any] = jax.device_put(values, model.programs.replicated)
        return placed

    def run(self, copies: Sequence[Copy], size: int, values: Mapping[str, Any]) -> Any:
        """Return the metric of each copy, `[copies, …]`.

        Args:
            size: number of copies that run at once.
        """
        model, count = self.lm.model, len(self.block) * size
        block = self.padded(np.repeat(self.block, size, axis=0))
        lengths = np.ones(len(block), np.int32)
        lengths[:count] = np.repeat(self.lengths, size)
        inputs = self.inputs.repeated(size)
        inputs = replace(inputs, sizes={**inputs.sizes, patched_flow.PROMPTS: len(self.padded(self.block))})
        arrays = {**inputs.padded(len(block)), **values}
        arrays[patched_flow.ROWS] = np.minimum(np.arange(len(block)) // size, len(self.block) - 1).astype(np.int32)
        for p in self.patches:
            slots = np.zeros(len(p.names), np.int32)
            slots[list(p.chosen)] = np.arange(len(p.chosen))
            arrays[p.wrapper.name("slots")] = slots
            inputs = replace(inputs, sizes={**inputs.sizes, p.wrapper.name("count"): len(p.chosen)})
        patched = patched_flow.edited_model(model, "patch", self.patches)
        ends_early, (primary, *_) = self.is_last and patched.template().has_head, model.output_names
        metric = PatchMetric(self.metric, len(self.block), size, self.is_last, 0 if ends_early else self.block.shape[1])
        results = []
        for start in range(0, len(copies), size):
            masks = {p: np.zeros((len(p.names), *block.shape), bool) for p in self.patches}
            for copy, changes in enumerate(copies[start : start + size]):
                for p, number, place in changes:
                    masks[p][number, copy:count:size, : self.block.shape[1]] = self.places[place]
            arrays |= {p.wrapper.name("at"): mask for p, mask in masks.items()}
            out = run_forward(patched, (primary,), block, inputs, arrays, lengths if ends_early else None)
            results.append(model.programs.run_helper(metric, out[primary], lengths))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts)[: len(copies)], *results)


def stack(*arrays: jax.Array) -> jax.Array:
    """Return arrays stacked along a new first axis."""
    return jnp.stack(arrays)


@dataclass(frozen=True)
class PatchMetric:
    """Program from the logits of rows, `[rows, …]`, to the metric of each copy of the prompts, `[size, …]`.

    Attributes:
        metric: the user's function, None for the logits themselves.
        prompts, size: number of prompts, and of copies; the rows of a prompt are adjacent, and padding comes last.
        is_last: whether only the logits of the last tokens are asked for.
        width: number of tokens of the longest prompt; 0 where the logits are of the last tokens already.
    """

    metric: patched_flow.PatchFunction | None
    prompts: int
    size: int
    is_last: bool
    width: int

    def __call__(self, logits: jax.Array, lengths: jax.Array) -> Any:
        count = self.prompts * self.size
        if not self.width:
            logits = logits[:count, 0]
        elif self.is_last:
            logits = last_tokens(logits[:count], lengths[:count])
        else:
            logits = trim_padding(CaptureAxes(0, (1,), True), count, self.width, logits, lengths[:count])
        by_copy = jnp.moveaxis(logits.reshape(self.prompts, self.size, *logits.shape[1:]), 1, 0)
        return by_copy if self.metric is None else jax.vmap(self.values)(by_copy)

    def values(self, logits: jax.Array) -> Any:
        """Return the metric of one copy of the prompts.

        Raises:
            RequestError: it is not an array.
        """
        assert self.metric is not None
        result = self.metric(logits)
        if not isinstance(result, jax.Array | np.ndarray | np.generic | int | float):
            raise RequestError(f"patch: metric returns {shown(result)}; expected an array")
        return result


@suggest_keywords()
def patch(
    self: GeneratesText, prompts: Any, patches: Mapping[str, Any] | str, *, source: Any = None,
    positions: Any = None, sweep: bool = False, metric: patched_flow.PatchFunction | None = None,
    logits: Literal["all", "last"] = "last", batch_size: int | None = None, inputs: Inputs = None,
) -> Any:  # fmt: skip
    """Return the logits of prompts with the outputs of blocks changed: activation patching, ablation, steering.

    Without `sweep` all blocks of all patterns are changed in one run. With `sweep` there is a run for each block and
    each of the positions, and the result has two more axes in front: `[blocks, positions, …]`, blocks in the order of
    the patterns and then of the flow. A sweep compiles one program, and one for the outputs of a source.

    Args:
        prompts: as in `generate`, strings or token ids.
        patches: by the pattern of blocks, as in `recipe.at`, what their outputs become: an array that broadcasts to
            `[blocks, prompts, tokens, …]`, such as 0 or what `capture` returned; or a JAX function of the output
            `[tokens, …]` of one prompt. A pattern alone puts in the outputs of `source`.
        source: other prompts of the same lengths. Functions then take their output too: `lambda y, source: …`.
        positions: the positions to change; negative ones count from the end of each prompt. None is all tokens. In a
            sweep each entry is a position, or a list of positions to change together; None is each position alone.
        metric: a JAX function of the logits of all prompts, `[prompts, vocab]`, or with logits="all" `[prompts, tokens,
            vocab]`; its results are returned in place of the logits.
        logits: "last" gives those of each prompt's last token, "all" of every token, NaN after the end of a prompt.
        batch_size: the number of runs of a sweep computed at once; by default, of at most 2048 tokens together.
        inputs: as in `logits`, a row for each prompt.

    Raises:
        RequestError: see `rlx_jax.errors`. GraphError: a pattern matches no block. ShapeError: an array does not fit.
    """
    lm = self._lm
    check_flag("sweep", sweep)
    if batch_size is not None and not sweep:
        raise RequestError("patch: batch_size is for a sweep: pass sweep=True, or leave it out")
    if metric is not None and not callable(metric):
        raise RequestError(f"patch: metric is a function of the logits, got {shown(metric)}")
    rows = read_prompts(lm, prompts, "patch: prompts", "prompts")
    lengths = np.array(list(map(len, rows)), np.int32)
    source_rows = None if source is None else read_prompts(lm, source, "patch: source", "source")
    if source_rows is not None and [*map(len, source_rows)] != lengths.tolist():
        raise RequestError(
            f"patch: the prompts have {shown(lengths.tolist())} tokens, and source {shown([*map(len, source_rows)])}: "
            "a position is one of both, so lengths have to be equal"
        )
    request_inputs = check_inputs(lm.model, inputs, len(rows), lm.inputs)
    places = _read_positions(positions, lengths, sweep)
    block = pad_rows(rows, int(lengths.max()))
    entries = _read_patches(lm.model, patches, source is not None, block)
    # A function of all tokens of a prompt, such as their mean, would read padding.
    has_function = any(p.wrapper.function is not None for p in entries)
    padded_model = patched_flow.edited_model(lm.model, "patch", entries) if has_function else lm.model
    error = padded_model.programs.derivation_error(lm.model.name, "prefill", request_inputs.optional_inputs)
    if error and len(set(lengths.tolist())) > 1:
        raise RequestError(f"patch: prompts of several lengths would be padded, which is not safe here: {error}")
    run = PatchRun(lm, block, lengths, places, entries, request_inputs, not error, sweep, last_only(logits), metric)
    changes = [(p, number, place) for p in entries for number in p.chosen for place in range(len(places))]
    copies = [[change] for change in changes] if sweep else [changes]
    if batch_size is None:  # parts of one size, as the last one takes as long as the others
        size = -(-len(copies) // -(-len(copies) // run.copies_at_once()))
    else:
        size = min(check_integer("batch_size", batch_size, 1), len(copies))
    values = run.values(None if source_rows is None else pad_rows(source_rows, block.shape[1]))
    results = run.run(copies, size, values)
    shape = (-1, len(places)) if sweep else ()
    return jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), results)


def _read_positions(positions: Any, lengths: Ids, sweep: bool) -> np.ndarray[Any, Any]:
    """Return the positions of each patch as bools `[patches, prompts, tokens]`.

    Raises:
        RequestError: a position is no integer, or not in every prompt.
    """
    shortest, width = int(lengths.min()), int(lengths.max())
    is_token = np.arange(width) < lengths[:, None]
    if positions is None and not sweep:
        return is_token[None]
    if positions is None:
        if shortest != width:
            raise RequestError("patch: prompts of several lengths have other positions: pass positions=, such as [-1]")
        positions = range(width)
    if isinstance(positions, int | np.integer) and not isinstance(positions, bool):
        positions = [positions]
    if isinstance(positions, str | bytes | Mapping) or not hasattr(positions, "__iter__"):
        raise RequestError(f"patch: positions is {shown(positions)}; expected a list of positions")
    entries = [list(e) if hasattr(e, "__iter__") and not isinstance(e, str) else [e] for e in positions]
    if not entries or not all(entries):
        raise RequestError("patch: positions is empty; expected a list of positions, or None for all")
    for position in (p for entry in entries for p in entry):
        if isinstance(position, bool) or not isinstance(position, int | np.integer):
            raise RequestError(f"patch: positions has {shown(position)}; expected integers")
        if not -shortest <= position < shortest:
            raise RequestError(f"patch: position {position} is not in a prompt of {shortest} tokens")
    groups = entries if sweep else [[p for entry in entries for p in entry]]
    places = np.zeros((len(groups), len(lengths), width), bool)
    for place, group in zip(places, groups, strict=True):
        for position in group:
            place[np.arange(len(lengths)), position if position >= 0 else lengths + position] = True
    return places


def _read_patches(model: CompiledModel, patches: Any, has_source: bool, block: Ids) -> list[patched_flow.Patch]:
    """Return the patches.

    Raises:
        RequestError: an entry is neither an array nor a function, or the source is missing or not read.
        GraphError: a pattern matches no block, or blocks with other outputs than floats `[batch, seq, …]`.
        ShapeError: an array does not broadcast to the outputs.
    """
    if isinstance(patches, str):
        patches = {patches: None}
        if not has_source:
            raise RequestError("patch: a pattern alone puts in outputs of other prompts: pass source=, or a mapping")
    if not isinstance(patches, Mapping) or not patches:
        raise RequestError(f"patch: patches is {shown(patches)}; expected {{pattern: array or function}}, or a pattern")
    if has_source and not any(value is None or callable(value) for value in patches.values()):
        raise RequestError("patch: source is not read, as all patches are arrays; leave it out, or pass a function")
    entries = []
    for index, (pattern, value) in enumerate(patches.items()):
        find = functools.partial(patched_flow.find_blocks, model, pattern)
        general, names, t = model.programs.request_keys(("patch", model.name, pattern), find)
        chosen = tuple(i for i, name in enumerate(names) if BlockPattern(pattern).matches((name,)))
        function = value if callable(value) else None
        if function is not None:
            arguments = ("output", "source") if has_source else ("output",)
            check_signature(function, arguments, f"patch: {pattern}", RequestError)
            if not isinstance(value, Hashable):
                raise RequestError(f"patch: {pattern}: {shown(function)} has no hash, by which its program is found")
        from_source = has_source and (function is not None or value is None)
        wrapper = patched_flow.PatchedBlock(index, function, from_source or function is None)
        entry = patched_flow.Patch(pattern, general, names, chosen, t, wrapper)
        if function is None and not from_source:
            shape = (len(chosen), *block.shape, *entry.width)
            entry = replace(entry, array=_read_values(f"patches[{pattern!r}]", value, shape))
        entries.append(entry)
    return entries


def _read_values(name: str, value: Any, shape: tuple[int, ...]) -> patched_flow.HostArray:
    """Return an array of the patches that broadcasts to `shape`.

    Raises:
        RequestError: it is no array of numbers. ShapeError: it does not broadcast.
    """
    array = read_array(name, value)
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise RequestError(f"{name}: expected numbers or a function, got {shown(value)}")
    if not fits:
        raise ShapeError(f"{name}: {list(array.shape)} does not broadcast to {list(shape)} [blocks, prompts, tokens …]")
    return array
