"""`TrainState`: the state of a training run between two steps, and `init`, which creates the first one.

It consists of the number of steps, the parameters and the optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from rlx_jax.blocks.lora import has_adapters
from rlx_jax.compiler.compile_cache import with_compile_cache
from rlx_jax.compiler.executable import Arrays
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RequestError, WeightError, did_you_mean, listing, quote, shown
from rlx_jax.ir.param import keys_of, packed_parameter
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.runtime.arguments import check_params, refuse_consumed
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import refuse_untrainable
from rlx_jax.trace.block_selection import BlockPattern


class Optimizer(Protocol):
    """An optax `GradientTransformation`, or any object with its two functions."""

    @property
    def init(self) -> Callable[..., Any]:
        """`init(params) → state`."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """`update(gradients, state, params) → (updates, state)`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a training run, a pytree that a step consumes and returns.

    Attributes:
        step: int32 scalar, number of steps so far.
        params: the model's parameters by leaf name, with the arrays of packed weights, which no step changes.
        optimizer: the optimizer's state, from its `init` over `trainable_params(params)`.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    optimizer: Any


def init(model: CompiledModel, optimizer: Optimizer, start: Any = None) -> TrainState:
    """Return the state before the first step.

    An array of the optimizer's state that belongs to a parameter, by its name and shape, has the sharding of that
    parameter; all others are replicated.

    Args:
        model: a model compiled with `program="train"`.
        optimizer: an optax optimizer.
        start: a seed or a key of `jax.random` for random parameters (see `CompiledModel.init`); parameters by leaf
            name; or None for the parameters that the model was compiled with. Arrays are copied, as steps consume the
            state.

    Raises:
        WeightShapeError: parameters do not match the model. WeightError: a leaf has no gradient.
        MissingWeightError: `start` is None, and the model was compiled without parameters.
    """
    check_trainable(model, optimizer)
    if start is None:
        start = model.require_params("train.init without a key or parameters")
    if isinstance(start, Mapping):
        check_params(start, model.param_specs())
        refuse_consumed(start, {})
        params = {name: jnp.copy(array) for name, array in (model.replace(start).params or {}).items()}
    else:
        params = model.init(start)
    step = jnp.zeros((), jnp.int32)
    step = jax.device_put(step, replicated_sharding(params)) if is_distributed(params) else step
    return TrainState(step, params, optimizer_state(optimizer, trainable_params(params)))


def trainable_params(params: Arrays) -> dict[str, Any]:
    """Return the parameters that are trained: the floating ones. The arrays of packed weights are constants."""
    return {name: array for name, array in params.items() if is_float(array.dtype)}


def check_trainable(model: Any, optimizer: Any) -> None:
    """Check that all leaves of a model have gradients, and that the optimizer has its two functions.

    The arrays of packed weights have none, which is accepted if the model has LoRA adapters to train in their place.

    Raises:
        RequestError: an argument is something else. WeightError: a leaf has no gradient; names it.
        UnsupportedError: the flow has something that cannot be trained.
    """
    if not isinstance(model, CompiledModel):
        raise RequestError(f"train: expected a model of rlx_jax.compile, then an optimizer; got {type(model).__name__}")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise RequestError(f"train: expected an optax optimizer, such as optax.adamw(1e-3), got {shown(optimizer)}")
    refuse_untrainable(model.flow)
    programs = model.programs.layout.params
    adapted = has_adapters(key for p in programs.values() if packed_parameter(p) is None for key in keys_of(p))
    for name, spec in model.param_specs().items():
        packed = packed_parameter(programs[name]) is not None
        if not is_float(spec.dtype) and not (packed and adapted):
            advice = "train a model whose weights are floating"
            if packed:
                advice = (
                    "compile it with program='train', which decodes packed weights, or add adapters to train over them "
                    "by rlx_jax.lora"
                )
            raise WeightError(
                f"{model.name}: leaf {quote(name)} is {short_name(spec.dtype)} and has no gradient; {advice}"
            )


def optimizer_state(optimizer: Optimizer, params: Arrays) -> Any:
    """Return `optimizer.init(params)`, with each array created in its sharding."""
    with allow_promotion():
        shardings = None  # on one device JAX's default is right
        if is_distributed(params):
            shapes = jax.eval_shape(optimizer.init, params)
            shardings = jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_sharding(path, leaf, params), shapes)
        return with_compile_cache(jax.jit(optimizer.init, out_shardings=shardings), (params,), shardings)()[0](params)


def is_distributed(params: Arrays) -> bool:
    """Return whether parameters are on several devices. Tracers, as in `jax.eval_shape`, are on none."""
    concrete = (a for a in params.values() if not isinstance(a, jax.core.Tracer))
    return any(len(a.sharding.device_set) > 1 for a in concrete)


@contextlib.contextmanager
def allow_promotion() -> Iterator[None]:
    """Allow implicit promotion of dtypes and ranks, also where a program forbids it.

    Optimizers need it: optax, for example, computes a decay to the power of an int32 count.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _leaf_sharding(path: Any, leaf: Any, params: Arrays) -> Sharding:
    """Return the sharding for a leaf of the optimizer's state.

    It is the sharding of the parameter with the name at the end of the path, if the shapes agree too; otherwise the
    leaf is replicated.
    """
    name = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
    param = params.get(name) if isinstance(name, str) else None
    if param is not None and param.shape == leaf.shape:
        sharding: Sharding = param.sharding
        return sharding
    return replicated_sharding(params)


def replicated_sharding(params: Arrays) -> Sharding:
    """Return a sharding that replicates an array over the devices that hold the parameters."""
    shardings: list[Sharding] = [a.sharding for a in params.values()]
    mesh_sharding = next((p for p in shardings if isinstance(p, NamedSharding)), None)
    return NamedSharding(mesh_sharding.mesh, PartitionSpec()) if mesh_sharding is not None else shardings[0]


def mask(model: CompiledModel, *patterns: str) -> dict[str, bool]:
    """Return, by the name of each trainable leaf, whether its checkpoint keys match one of the patterns.

    `optax.multi_transform({True: optimizer, False: optax.set_to_zero()}, mask)` trains the matching leaves alone.

    Args:
        patterns: globs over checkpoint keys, with the syntax of `at`.

    Raises:
        RequestError: a pattern matches no key, the key of a packed weight, which is not trained, or some keys of a leaf
            and not the others, as happens in stacked layers.
    """
    matches, used_globs, all_keys = {}, set[str](), list[str]()
    globs = [BlockPattern(pattern, "mask") for pattern in patterns]
    if not globs:
        raise RequestError("mask: a pattern of keys is needed, such as '**.lora_{A,B}.weight'")
    for name, program in model.programs.layout.params.items():
        hits = {k: [glob.text for glob in globs if glob.matches(tuple(k.split(".")))] for k in keys_of(program)}
        misses = sorted(key for key, matching in hits.items() if not matching)
        if misses and any(hits.values()):
            raise RequestError(
                f"mask: leaf {quote(name)} has weights that match and others that do not, {listing(misses, 3)}, but is "
                "trained as a whole: use a pattern that matches all, or layers.roll = 'unroll'"
            )
        if packed_parameter(program) is None:
            matches[name] = any(hits.values())
        elif any(hits.values()):
            raise RequestError(
                f"mask: {quote(next(iter(hits)))} matches, but it stays packed on the device and is not trained: use a "
                "pattern of adapters, such as '**.lora_{A,B}.weight', or precision.weights = 'f32'"
            )
        used_globs.update(*hits.values())
        all_keys += hits
    if unused_globs := [glob.text for glob in globs if glob.text not in used_globs]:
        suggestion = did_you_mean(unused_globs[0], all_keys, cutoff=0.7) or f"; weights are {listing(all_keys, 3)}"
        raise RequestError(f"mask: {quote(unused_globs[0])} matches no weight{suggestion}")
    return matches
