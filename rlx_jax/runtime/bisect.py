"""`bisect` compares the blocks of a model with a reference, and names the first block that leaves tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx_jax.errors import RequestError, did_you_mean, listing, shown
from rlx_jax.inspection.bisection import NOT_COMPARED, OTHER_QUANTITY, Bisection, ComparedValue
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.observed import HostArray, ValueGraph, is_torch_module, module_values, observe, to_host

# The default tolerance of the first layer by dtype; it grows with the square root of the number of layers.
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# A value that differs by more than this, while all values computed from it agree, is not what the reference has there.
OTHER_QUANTITY_ERROR = 0.05


def bisect(
    model: Any, reference: Any, *inputs: Any, tolerance: float | None = None, program: str = "forward", **named: Any
) -> Bisection:
    """Compare the output of every block with a reference, and name the first block outside of tolerance.

    One program returns all values of the model. The reference runs `forward` on the same inputs.

    Args:
        model: a compiled model, or a language model, encoder or the like.
        reference: what to compare with, one of
            another model, with another profile, checkpoint or edit, as far as its blocks have the same paths;
            a module of PyTorch, such as a model of transformers: its submodules are aligned by the checkpoint keys that
            blocks read, and by their names;
            a function of the inputs, or a mapping: arrays by block path. A function may return the output alone.
        inputs, named: the inputs of the forward program, by position and by name.
        tolerance: the largest error that counts as agreement, relative to the largest value of the reference. By
            default 1e-5 for f32, 4e-3 for f16 and 3e-2 for bf16, whichever dtype of the two is narrower, times the
            square root of the number of the layer.
        program: the program of the model: `forward`, `prefill`, or `extend`, which prefills the first half of the
            tokens and extends the state by the others one at a time.

    Returns:
        The errors of all values, in order.

    Raises:
        RequestError: no value of the reference corresponds to one of the model, or an argument is invalid.
    """
    compiled = _compiled(model)
    if compiled is None:
        raise RequestError(f"bisect: expected a compiled model, from rlx_jax.load or compile, got {shown(model)}")
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 < tolerance < np.inf):
        raise RequestError(f"bisect: tolerance is {shown(tolerance)}; expected a positive number")
    graph, ours = observe(compiled, inputs, named, program)
    label, theirs, narrow = _reference_values(reference, graph, ours, inputs, named)
    names = [name for name in graph.values if name in ours and name in theirs]
    if not names:
        raise RequestError(
            f"bisect: no value of the reference has the path of a block. The model has {listing(ours, 8)}; the "
            f"reference has {listing(theirs, 8) or 'none'}{did_you_mean(next(iter(theirs), ''), ours)}"
        )
    base = max(TOLERANCES[dtype] for dtype in (_compute_dtype(compiled), narrow))
    mask = to_host(named.get("attention_mask", ()))
    pairs = {name: _aligned(ours[name], theirs[name], mask) for name in names}
    limits = _tolerances(names, base) if tolerance is None else dict.fromkeys(names, float(tolerance))
    return Bisection(
        compiled.name, label, program, _compare(graph, pairs, limits, base / 100, is_torch_module(reference)),
        tuple(n for n in graph.values if n not in theirs or n not in ours), tuple(n for n in theirs if n not in ours),
    )  # fmt: skip


def _compiled(value: Any) -> CompiledModel | None:
    """Return the compiled model that a value is or has; None if it is something else."""
    model = value if isinstance(value, CompiledModel) else getattr(value, "model", None)
    return model if isinstance(model, CompiledModel) else None


def _compute_dtype(model: CompiledModel) -> str:
    """Return the narrowest dtype that a program computes in."""
    compute, mixed = model.settings.compute.name, model.settings.mixed
    return compute if mixed == "none" else "bfloat16" if "bf16" in mixed else "float16"


def _reference_values(
    reference: Any, graph: ValueGraph, ours: Mapping[str, HostArray], inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[str, dict[str, HostArray], str]:
    """Return the name of a reference, its values by the name that they have in the model, and its narrowest dtype.

    Raises:
        RequestError: it is no reference.
    """
    if (model := _compiled(reference)) is not None:
        return model.name, observe(model, inputs, named, "forward")[1], _compute_dtype(model)
    if is_torch_module(reference):
        values, dtype = module_values(reference, graph, ours, inputs, named)
        return type(reference).__name__, values, dtype
    label = "the arrays" if isinstance(reference, Mapping) else getattr(reference, "__name__", "the function")
    if callable(reference):
        reference = reference(*inputs, **named)
        if not isinstance(reference, Mapping):
            reference = {graph.main: reference}
    if not isinstance(reference, Mapping):
        raise RequestError(
            f"bisect: reference is {shown(reference)}; expected a model, a PyTorch module, a function of the inputs, "
            "or a mapping of arrays by block path"
        )
    dtypes = {str(getattr(value, "dtype", "")).removeprefix("torch.") for value in reference.values()}
    narrow = max(dtypes & TOLERANCES.keys(), key=lambda name: TOLERANCES[name], default="float64")
    return label, {str(name): to_host(value) for name, value in reference.items()}, narrow


def _aligned(ours: HostArray, theirs: HostArray, mask: HostArray) -> tuple[HostArray, HostArray]:
    """Return a pair of values with one shape if their shapes differ only in split, merged or broadcast axes.

    Args:
        mask: `[B, S]`, 0 at padding, where values are not compared; `[0]` without padding.
    """
    if ours.size == theirs.size and ours.ndim != theirs.ndim:
        theirs = theirs.reshape(ours.shape)
    elif ours.ndim == theirs.ndim and all(m == n or 1 in (m, n) for m, n in zip(ours.shape, theirs.shape, strict=True)):
        ours, theirs = np.broadcast_arrays(ours, theirs)
    if ours.shape == theirs.shape and ours.shape[:2] == mask.shape:
        ours, theirs = ours[mask != 0], theirs[mask != 0]
    return ours, theirs


def _error(ours: HostArray, theirs: HostArray) -> tuple[float, str]:
    """Return the error of a value, see `ComparedValue`, and a note on shapes that differ and entries not finite."""
    if ours.shape != theirs.shape:
        return np.inf, f"{list(ours.shape)} in the model, {list(theirs.shape)} in the reference"
    kinds = {ours.dtype.kind, theirs.dtype.kind}
    if not kinds & {"f", "c"}:
        return float(np.mean(ours != theirs)) if ours.size else 0.0, ""
    wide = np.complex128 if "c" in kinds else np.float64
    left, right = ours.astype(wide), theirs.astype(wide)
    is_finite = np.isfinite(left) & np.isfinite(right)
    same = is_finite | (left == right) | (np.isnan(left) & np.isnan(right))
    if not same.all():
        return np.inf, f"not finite on one side alone: {np.count_nonzero(~same)} of {same.size} entries"
    left, right = (np.where(is_finite, array, 0.0) for array in (left, right))
    scale = max(np.abs(right).max(initial=0.0), np.finfo(np.float32).tiny)
    note = "" if is_finite.all() else f"{NOT_COMPARED}: {np.count_nonzero(~is_finite)} of {same.size}"
    return float(np.abs(left - right).max(initial=0.0) / scale), note


def _tolerances(names: list[str], base: float) -> dict[str, float]:
    """Return the tolerance of each value: `base`, times the square root of the number of layers up to it."""
    layers, limits = 1, dict[str, float]()
    for name in names:
        layers = max([layers, *(int(segment) + 1 for segment in name.split(".") if segment.isdecimal())])
        limits[name] = base * layers**0.5
    return limits


def _compare(
    graph: ValueGraph, pairs: Mapping[str, tuple[HostArray, HostArray]], limits: Mapping[str, float],
    precision: float, by_module: bool,
) -> tuple[ComparedValue, ...]:  # fmt: skip
    """Return the compared values in order.

    Args:
        pairs: the arrays of the model and of the reference, by name.
        limits: the tolerance of each value.
        precision: the smallest error that a growth is relative to.
        by_module: whether values are aligned by the names of modules, which may return something else.
    """
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    compared = {graph.values[name]: name for name in [*pairs][::-1]}  # the innermost block that returns the value
    origins = {name: graph.origin(graph.values[name], compared) for name in pairs}
    readers: dict[str, list[str]] = {}
    for name, (sources, _) in origins.items():
        for source in sources:
            readers.setdefault(compared[source], []).append(name)
    notes = {name: note for name, (_, note) in errors.items()}
    for name, (error, note) in errors.items():
        reads = readers.get(compared[graph.values[name]], []) if by_module and not note else []
        if error > OTHER_QUANTITY_ERROR and reads and all(errors[r][0] <= limits[r] for r in reads):
            notes[name] = f"{OTHER_QUANTITY}: all values computed from it agree"
    twin = compared.get(graph.values[graph.main], graph.main)
    if graph.main in pairs and errors[graph.main][0] > limits[graph.main] and errors[twin][0] <= limits[twin]:
        notes[graph.main] = f"{twin} agrees: only the program without side outputs differs, so compiling it is at fault"
    values = []
    for name, (sources, block) in origins.items():
        read = [s for s in map(compared.__getitem__, sources) if not notes[s].startswith(OTHER_QUANTITY)]
        error, inner = errors[name][0], max((errors[s][0] for s in read), default=0.0)
        growth = error / max(inner, precision) if inner < np.inf else 1.0
        is_over = error > limits[name] and not notes[name].startswith(OTHER_QUANTITY)
        introduced = is_over and all(errors[s][0] <= limits[s] for s in read)
        values.append(ComparedValue(name, block, error, limits[name], growth, introduced, notes[name]))
    return tuple(values)
