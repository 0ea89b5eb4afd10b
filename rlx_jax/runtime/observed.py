"""`observe` runs a program of a model that also returns the value of every block; `ValueGraph` relates the values."""

from __future__ import annotations

import functools
import importlib
import os.path
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import RequestError, UnsupportedError, listing, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.ir.graph import Graph, Param, Value
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.region import unroll
from rlx_jax.program import Built
from rlx_jax.runtime.compile_flow import companion_model
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.captures import CapturedBlock
from rlx_jax.trace.editing import BlockEdit

HostArray = np.ndarray[Any, Any]
PROGRAMS = ("forward", "prefill", "extend")


@dataclass(frozen=True)
class ValueGraph:
    """The values between the blocks of a flow, in the order of the program, inner blocks first.

    Attributes:
        graph: the program, without regions.
        values: the value of each output by name: the block path, or see `capture_reads`. Several names may share one.
    """

    graph: Graph
    values: Mapping[str, Value]

    @staticmethod
    def of(built: Built) -> ValueGraph:
        """Return the graph of a flow that was built with all captures."""
        graph = unroll(built.hir, built.types)
        main, *names = zip(graph.output_names, graph.outputs, strict=True)
        names.sort(key=lambda item: (item[1].node, -item[0].count(".")))
        return ValueGraph(graph, dict([*names, main]))

    @property
    def main(self) -> str:
        """Return the name of the first output of the flow."""
        return self.graph.output_names[0]

    def origin(self, value: Value, compared: Collection[Value]) -> tuple[set[Value], str]:
        """Return the compared values that a value is computed from, and the innermost block with all ops in between.

        The block is the flow if there is no other.

        Ops that depend on no compared value, such as those of rotary tables, count only if none of the ops does.
        """
        sources, ops, stack = set[Value](), set[int](), [value.node]
        while stack:
            number = stack.pop()
            if number in ops or not self.graph.nodes[number].inputs:
                continue
            ops.add(number)
            sources.update(v for v in self.graph.nodes[number].inputs if v in compared)
            stack += [v.node for v in self.graph.nodes[number].inputs if v not in compared]
        dependents = set[int]()
        for number in sorted(ops):
            if any(v in sources or v.node in dependents for v in self.graph.nodes[number].inputs):
                dependents.add(number)
        paths = [[*map(str, self.graph.nodes[number].origin.path)] for number in dependents or ops]
        return sources, ".".join(os.path.commonprefix(paths)) or self.graph.name

    def readers(self, value: Value) -> set[str]:
        """Return the blocks that read a value, from the innermost outwards."""
        paths = (node.origin.path for node in self.graph.nodes if value in node.inputs)
        own = self.graph.nodes[value.node].origin.path
        return {path_text(p[:end]) for p in paths for end in range(1, len(p) + 1) if p[:end] != own[:end]}

    def keys(self) -> dict[str, set[str]]:
        """Return the checkpoint keys that each block reads, by path."""
        keys = dict[str, set[str]]()
        for node in self.graph.nodes:
            leaves = [op for v in node.inputs if isinstance(op := self.graph.nodes[v.node].op, Param)]
            for end in range(1, len(node.origin.path) + 1) if leaves else ():
                block_keys = keys.setdefault(path_text(node.origin.path[:end]), set())
                block_keys.update(key for leaf in leaves for program in leaf.programs for key in keys_of(program))
        return keys


def observed_model(model: CompiledModel) -> CompiledModel:
    """Return the model with the values of all blocks as side outputs, over the same parameters and settings.

    Raises:
        UnsupportedError: the model has no blocks with paths. Others as `companion_model`.
    """
    flow = model.flow.flow if isinstance(model.flow, Built) else model.flow
    if not isinstance(flow, ModelFlow):
        raise UnsupportedError(f"{model.name}: blocks of a {type(flow).__name__} have no paths; compile a ModelFlow")
    edit = BlockEdit(BlockPattern("**"), CapturedBlock(reads=True))
    outputs = replace(flow._outputs, side=None)
    flow = replace(flow, _block_edits=(*flow._block_edits, edit), _outputs=outputs)
    return companion_model(model, lambda source: flow, "observed", shares_all=True)


def observe(
    model: CompiledModel, inputs: tuple[Any, ...], named: Mapping[str, Any], program: str
) -> tuple[ValueGraph, dict[str, HostArray]]:
    """Return the values of all blocks on the host, by name, and the graph of the values.

    Args:
        model: a compiled model.
        inputs, named: the inputs of the forward program.
        program: `forward`; `prefill`, of all tokens; or `extend`: the first half of the tokens is prefilled, the others
            extend the state one at a time.

    Raises:
        RequestError: `program` is none of these, or there are too few tokens.
    """
    if program not in PROGRAMS:
        raise RequestError(f"bisect: program is {shown(program)}; expected one of {listing(PROGRAMS)}")
    observed = observed_model(model)
    graph = ValueGraph.of(observed.built)
    if program == "forward":
        # The last value is of the program that users run: it shows a fault that only occurs without the captures.
        outputs, plain = (m.as_program("forward")(*inputs, **named) for m in (observed, model))
        values = outputs if isinstance(outputs, dict) else {graph.main: outputs}
        values |= plain if isinstance(plain, dict) else {graph.main: plain}
        return graph, {name: to_host(values[name]) for name in graph.values}
    return graph, _run_cached(observed, program, inputs, named)


def _run_cached(
    observed: CompiledModel, program: str, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, HostArray]:
    """Return the values of prefill, or of prefill and the steps after it, joined along their axis of tokens."""
    tokens = np.asarray(inputs[0] if inputs else named[observed.first_input])
    rows, seq = tokens.shape
    prompt = seq if program == "prefill" else seq // 2
    if not prompt:
        raise RequestError(f"bisect: program='extend' takes two tokens at least, got {seq}")
    prefill, extend = (observed.as_program(name) for name in ("prefill", "extend"))
    others = {name: value for name, value in named.items() if name != observed.first_input}
    state = prefill.init_state(rows, seq, given=[d.name for d in prefill.inputs if d.optional and d.name in others])
    lengths = np.full(rows, prompt, np.int32)
    values, state = prefill(tokens[:, :prompt], lengths=lengths, state=state, **others)
    parts = [values]
    for i in range(prompt, seq):
        values, state = extend(tokens[:, i : i + 1], lengths=np.ones(rows, np.int32), state=state)
        parts.append(values)
    mir = (prefill if program == "prefill" else extend).template().mir
    axes = {name: [*map(str, t.shape)] for name, t in zip(mir.output_names, mir.output_types, strict=True)}
    # A value over the slots of the cache, such as a mask, corresponds to none of the forward program.
    return {
        name: _join([to_host(part[name]) for part in parts], shape.index("seq")) if "seq" in shape
        else to_host(values[name])
        for name, shape in axes.items() if "context" not in shape
    }  # fmt: skip


def _join(parts: Sequence[HostArray], axis: int) -> HostArray:
    """Concatenate arrays along an axis; other axes of size 1, as of a table common to all rows, are broadcast."""
    moved = [np.moveaxis(part, axis, 0) for part in parts]
    shape = np.broadcast_shapes(*(part.shape[1:] for part in moved))
    return np.moveaxis(np.concatenate([np.broadcast_to(part, (len(part), *shape)) for part in moved]), 0, axis)


def to_host(value: Any) -> HostArray:
    """Return an array of JAX, NumPy or PyTorch as NumPy array, floating values as float32 or wider."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
    array = np.asarray(value)
    is_narrow = array.dtype.itemsize < 4 and array.dtype.kind not in "biu"
    return array.astype(np.float32) if is_narrow else array


# `module_values` runs a PyTorch module, and returns the inputs and outputs of its submodules by our block paths.


def is_torch_module(value: Any) -> bool:
    """Return whether a value is a module of PyTorch, without importing it."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torch.nn.modules.module.Module" for kind in type(value).__mro__)


def module_values(
    module: Any, graph: ValueGraph, ours: Mapping[str, HostArray], inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[dict[str, HostArray], str]:
    """Return the values of a module by the names of our values, others by module name, and its narrowest dtype.

    Args:
        module: an instance of `torch.nn.Module`.
        graph: the values of our model.
        ours: our arrays by name, for their shapes.
        inputs, named: arrays, by position and by name.
    """
    outputs, reads = _run(module, inputs, named)
    modules = _modules_of_blocks(graph, list(outputs))
    values, used = dict[str, HostArray](), set[str]()
    for name, value in graph.values.items():
        block, _, index = name.removesuffix("]").partition("[")
        parts = outputs[modules[block]] if block in modules else []
        count = sum(other.startswith(f"{block}[") for other in graph.values) or 1
        if len(parts) > count > 1 and name in ours:  # a router also returns its logits
            parts = [part for part in parts if part.size == ours[name].size]
        if len(parts) == 1 and count > 1:
            parts = _split(parts[0], [ours[f"{block}[{i}]"] for i in range(count) if f"{block}[{i}]" in ours])
        candidates = [reads[m] for m in map(modules.get, graph.readers(value)) if m in reads]
        if len(parts) == count or (not index and parts):
            candidates.insert(0, _like(parts[int(index or 0)], ours.get(name)))
            used.add(modules[block])
        if candidates and name in ours:
            # An embedding of positions returns them, our block the sum: what the next module reads is the same value.
            values[name] = min(candidates, key=functools.partial(_distance, ours[name]))
    if (main := graph.main) not in values and outputs[""]:
        values[main] = outputs[""][0]
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    narrow = next((d for d in ("bfloat16", "float16", "float32", "float64") if d in dtypes), "float32")
    return values | {name: parts[0] for name, parts in outputs.items() if parts and name and name not in used}, narrow


def _run(
    module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[dict[str, list[HostArray]], dict[str, HostArray]]:
    """Run a module, and return the outputs of each submodule that runs once, and its first input if it has no children.

    A submodule's name is its path, and the module's own name is empty.

    Raises:
        RequestError: the module is in training mode.
    """
    if name := next((name or type(module).__name__ for name, child in module.named_modules() if child.training), ""):
        raise RequestError(
            f"bisect: {name} is in training mode, in which dropout changes values: call reference.eval()"
        )
    torch = importlib.import_module("torch")
    outputs, reads, calls, handles = dict[str, list[HostArray]](), dict[str, HostArray](), dict[str, int](), []

    def hook(name: str, is_leaf: bool) -> Any:
        def record(_: Any, args: Any, result: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            parts = tuple(result.values()) if isinstance(result, Mapping) else result
            parts = parts if isinstance(parts, tuple | list) else (parts,)
            outputs[name] = [to_host(part).copy() for part in parts if isinstance(part, torch.Tensor)]
            if is_leaf and args and isinstance(args[0], torch.Tensor):
                reads[name] = to_host(args[0]).copy()

        return record

    device = next((parameter.device for parameter in module.parameters()), "cpu")
    try:
        for name, child in module.named_modules():
            handles.append(child.register_forward_hook(hook(name, not any(True for _ in child.children()))))

        def tensor(value: Any) -> Any:
            array = np.asarray(value)
            return torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array, device=device)

        with torch.no_grad():
            module(*map(tensor, inputs), **{name: tensor(value) for name, value in named.items()})
    finally:
        for handle in handles:
            handle.remove()
    once = [name for name, count in calls.items() if count == 1]
    return {name: outputs[name] for name in once}, {name: reads[name] for name in once if name in reads}


def _modules_of_blocks(graph: ValueGraph, modules: list[str]) -> dict[str, str]:
    """Return the submodule of each block: by the checkpoint keys that the block reads, else by its path."""
    candidates: dict[str, list[str]] = {}
    for block, keys in graph.keys().items():
        prefix = ".".join(os.path.commonprefix([key.split(".")[:-1] for key in keys]))
        # transformers renames modules when it loads a file: `block_sparse_moe.gate` becomes `mlp.gate`.
        renamed = f"{block.rpartition('.')[0]}.{prefix.rpartition('.')[2]}"
        name = _find(prefix, modules) or _find(renamed.strip("."), modules)
        candidates.setdefault(name, []).append(block)
    candidates.pop("", None)
    # A block and its only part, or an embedding and a tied head, read the same keys: the name decides, then the depth.
    blocks = {
        max(paths, key=lambda p: (p.split(".")[-1] == name.split(".")[-1], p.count("."))): name
        for name, paths in candidates.items()
    }
    for path in dict.fromkeys(name.partition("[")[0] for name in graph.values):
        name = _find(path, modules)
        if path not in blocks and name and name not in blocks.values():
            blocks[path] = name
    return blocks


def _find(path: str, modules: list[str]) -> str:
    """Return the submodule with a path; either may have leading parts that the other lacks, such as `model`."""
    if path in modules or not path:
        return path
    pairs = [(m, *sorted((f".{m}", f".{path}"), key=len)) for m in modules if m]
    # A number in the leading parts means that one is a layer, or part of it, and the other is not.
    names = [m for m, short, long in pairs if long.endswith(short) and not re.search(r"\.\d", long[: -len(short)])]
    return names[0] if len(names) == 1 else ""


def _split(array: HostArray, parts: list[HostArray]) -> list[HostArray]:
    """Return the parts of a fused projection, if their widths add up to the width of the array."""
    widths = [part.shape[-1] for part in parts]
    return np.split(array, np.cumsum(widths)[:-1], axis=-1) if sum(widths) == array.shape[-1] else []


def _distance(ours: HostArray, array: HostArray) -> float:
    """Return the largest difference of two arrays, infinite if their sizes differ or one is not finite."""
    difference = np.abs(ours - array.reshape(ours.shape)).max(initial=0.0) if ours.size == array.size else np.inf
    return float(difference) if np.isfinite(difference) else np.inf


def _like(array: HostArray, ours: HostArray | None) -> HostArray:
    """Return an array in the layout of ours: heads after tokens, one half of rotary tables with two equal halves."""
    if ours is None or not ours.ndim:
        return array
    if array.ndim == 4 and ours.ndim == 3 and array.size == ours.size:
        layouts = [a.reshape(ours.shape) for a in (array, array.swapaxes(1, 2)) if a.shape[1] == ours.shape[1]]
        return min(layouts, key=lambda a: float(np.abs(a - ours).max()), default=array)
    if array.shape[-1:] == (2 * ours.shape[-1],):
        first, second = np.split(array, 2, axis=-1)
        return first if np.array_equal(first, second) else array
    return array
