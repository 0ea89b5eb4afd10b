"""What a training run is between two steps: the number of the step, the parameters, the optimizer's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from rlx_jax.compiler.compile_cache import from_cache
from rlx_jax.compiler.executable import Arrays
from rlx_jax.errors import RequestError, WeightError, did_you_mean, listing, quote, shown
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.runtime.arguments import check_params, refuse_consumed
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import refuse_untrained
from rlx_jax.trace.block_selection import BlockPattern


class Optimizer(Protocol):
    """An optax `GradientTransformation`, or whatever has its two functions."""

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
    """A pytree that a step consumes and gives back.

    Attributes:
        step: int32, how many steps were taken.
        params: the model's leaves by name.
        optimizer: what its `init` made.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    optimizer: Any


def init(model: CompiledModel, optimizer: Optimizer, start: Any = None) -> TrainState:
    """The state before the first step.

    The optimizer's state is placed as the parameters are: an array that belongs to one, by its name and shape, is
    divided over the devices as that is; everything else is on all of them.

    Args:
        start: a seed or a key of `jax.random` for random parameters (see `CompiledModel.init`); parameters by leaf
            name; or None for those that the model was compiled with. Arrays are copied: steps consume the state.

    Raises:
        WeightShapeError: parameters are not the model's. WeightError: a leaf has no gradient.
        MissingWeightError: no parameters, and none to start from.
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
    step = jax.device_put(step, everywhere(params)) if divided(params) else step
    return TrainState(step, params, optimizer_state(optimizer, params))


def check_trainable(model: Any, optimizer: Any) -> None:
    """The model is one whose leaves all have gradients, and the optimizer has its two functions.

    Raises:
        RequestError, WeightError: they are not; names the leaf.
        UnsupportedError: the flow's training has something that there is not.
    """
    if not isinstance(model, CompiledModel):
        raise RequestError(
            f"train: expected what rlx_jax.compile returns, and behind it an optimizer; got {type(model).__name__}"
        )
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise RequestError(f"train: expected an optax optimizer, such as optax.adamw(1e-3), got {shown(optimizer)}")
    refuse_untrained(model.flow)
    for name, spec in model.param_specs().items():
        if not is_float(spec.dtype):
            raise WeightError(
                f"{model.name}: leaf {quote(name)} is {short_name(spec.dtype)} and has no gradient; train a model "
                "whose weights are floating"
            )


def optimizer_state(optimizer: Optimizer, params: Arrays) -> Any:
    """`optimizer.init(params)`, each array made where it belongs."""
    with promoting():
        places = None
        if divided(params):
            shapes = jax.eval_shape(optimizer.init, params)
            places = jax.tree_util.tree_map_with_path(lambda path, leaf: _place(path, leaf, params), shapes)
        return from_cache(jax.jit(optimizer.init, out_shardings=places), (params,), places)[0](params)


def divided(params: Arrays) -> bool:
    """Whether they lie on several devices. Traced ones, as of `jax.eval_shape`, lie on none."""
    real = (a for a in params.values() if not isinstance(a, jax.core.Tracer))
    return any(len(a.sharding.device_set) > 1 for a in real)


@contextlib.contextmanager
def promoting() -> Iterator[None]:
    """Optimizers promote dtypes and ranks (in optax, decay to the power of an int32 count), in strict programs too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _place(path: Any, leaf: Any, params: Arrays) -> Sharding:
    """That of the parameter whose name the path ends with, where the shapes agree too."""
    last = path[-1].key if path and isinstance(path[-1], jax.tree_util.DictKey) else None
    owner = params.get(last) if isinstance(last, str) else None
    if owner is not None and owner.shape == leaf.shape:
        place: Sharding = owner.sharding
        return place
    return everywhere(params)


def everywhere(params: Arrays) -> Sharding:
    """On all devices that the parameters are on."""
    places: list[Sharding] = [a.sharding for a in params.values()]
    named = next((p for p in places if isinstance(p, NamedSharding)), None)
    return NamedSharding(named.mesh, PartitionSpec()) if named is not None else places[0]


def mask(model: CompiledModel, *patterns: str) -> dict[str, bool]:
    """Leaf name → whether its weights' keys match one of the patterns: globs as `at` takes them, over checkpoint keys.

    `optax.multi_transform({True: optimizer, False: optax.set_to_zero()}, mask)` trains those leaves alone.

    Raises:
        RequestError: a pattern matches no key, or some keys of a leaf and not the others, as where layers are stacked.
    """
    found, seen, every = {}, set[str](), list[str]()
    globs = [BlockPattern(pattern, "mask") for pattern in patterns]
    if not globs:
        raise RequestError("mask: a pattern of keys is needed, such as '**.lora_{A,B}.weight'")
    for name, program in model.programs.layout.leaves.items():
        hits = {k: [glob.text for glob in globs if glob.matches(tuple(k.split(".")))] for k in keys_of(program)}
        others = sorted(key for key, matching in hits.items() if not matching)
        if others and any(hits.values()):
            raise RequestError(
                f"mask: leaf {quote(name)} has weights that match and others, {listing(others, 3)}, and is trained "
                "whole: take a pattern of all, or layers.roll = 'unroll'"
            )
        found[name] = any(hits.values())
        seen.update(*hits.values())
        every += hits
    if idle := [glob.text for glob in globs if glob.text not in seen]:
        close = did_you_mean(idle[0], every, alike=0.7) or f"; weights are {listing(every, 3)}"
        raise RequestError(f"mask: {quote(idle[0])} matches no weight{close}")
    return found
