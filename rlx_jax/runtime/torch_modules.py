"""`module_values` runs a PyTorch module, and returns the inputs and outputs of its submodules by our block paths."""

from __future__ import annotations

import functools
import importlib
import os.path
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx_jax.errors import RequestError
from rlx_jax.runtime.observed import HostArray, ValueGraph, to_host


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
