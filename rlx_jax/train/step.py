"""`TrainStep`: loss, gradients and the optimizer's update as one program, with optional gradient accumulation.

`TrainState` is the state of a training run between two steps: the number of steps, the parameters and the optimizer's
state; `init` creates the first one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

import rlx_jax.losses as losses
from rlx_jax.blocks.lora import has_adapters
from rlx_jax.compiler.executable import Arrays, with_compile_cache
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.device import out_of_memory
from rlx_jax.errors import (
    RequestError,
    SessionStateError,
    WeightError,
    did_you_mean,
    listing,
    quote,
    shown,
    suggest_keywords,
)
from rlx_jax.ir.param import keys_of, packed_parameter
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.ir.user_functions import is_consumed
from rlx_jax.losses.labels import check_batch, counts_rows, target_weights
from rlx_jax.runtime.arguments import check_params, refuse_consumed
from rlx_jax.runtime.inputs import as_host_array, check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import refuse_untrainable
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.checks import check_signature


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


# `loss(model, params, tokens, **others)` → a scalar, the mean over the targets of the batch.
Loss = Callable[..., jax.Array]

AnyArray = Any

# The inputs that select, in addition to the tokens, the positions with a target. Without any of them, all positions but
# the last of a row have one.
TARGET_INPUTS = frozenset({"lengths", "labels", "weights"})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Metrics of one step, f32 scalars on the device. Reading a value waits for the step to finish.

    Attributes:
        loss: the mean over the targets, before the update; 0 for a batch without targets.
        grad_norm: √Σg² over the gradients of all trainable leaves, as passed to the optimizer.
        tokens: the number of targets, tokens or rows as the loss has them, or the sum of their weights. A batch without
            a target (all labels negative, rows of one token, all weights 0) changes neither parameters nor the
            optimizer's state; it counts as a step.
    """

    loss: jax.Array
    grad_norm: jax.Array
    tokens: jax.Array


@dataclass(eq=False)
class TrainStep:
    """A training step, `step(state, batch) → (state, metrics)`, compiled once for each set of sizes.

    The state is consumed (donated).

    Attributes:
        model, optimizer, loss, microbatches: as in `make_step`.
        jitted: jitted functions by the sharding of the state.
        programs: compiled programs by jitted function and types of the batch.
        optimizer_tree: structure of the optimizer's state, once it is known.
    """

    model: CompiledModel
    optimizer: Optimizer
    loss: Loss
    microbatches: int
    jitted: dict[Any, Any] = field(default_factory=dict, repr=False)
    programs: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)
    optimizer_tree: Any = field(default=None, repr=False)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run one step, and return the new state and the metrics.

        Args:
            state: the state of `train.init` or of the previous step, which must not be used again.
            batch: tokens `[B, S]`, or a mapping with `tokens` and other arguments of the loss by name: `lengths`,
                `labels`, `weights`, inputs of the flow. With labels of rows, as of `losses.classification`, the
                flow's first input may have its own name.
                Ids of tokens and labels are checked where the host can read them; on an accelerator only with
                `checks.ids = "all"` in the model's profile.

        Raises:
            RequestError, SessionStateError: `state` is no state or was consumed, or the rows cannot be split into
                microbatches. Others are raised by the loss; see `losses.cross_entropy`.
        """
        arrays = self._arrays(state, batch)
        shape = arrays["tokens"].shape
        sizes = f"{' x '.join(map(str, shape))} {'tokens' if len(shape) == 2 else 'numbers'}"
        with out_of_memory(f"step of {sizes}", lambda: self._memory_advice(shape[0])):
            result: tuple[TrainState, Metrics] = self._program(state, arrays)(state, arrays)
        return result

    def _memory_advice(self, rows: int) -> str:
        """Return advice for an out-of-memory error: the options that save memory and are not in use."""
        settings = self.model.settings
        options = [f"make_step(…, microbatches={2 * self.microbatches})"] if rows > self.microbatches else []
        options += ["layers.remat = 'layer' in the profile"] if settings.plan.remat != "layer" else []
        options += ["precision.compute = 'bf16' in the profile"] if settings.compute.itemsize > 2 else []
        return f"use {', '.join([*options, 'shorter rows'])}, or more devices with mesh="

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the step for these arguments, which may be `ShapeDtypeStruct`s, as `jax.jit` does."""
        named = batch if isinstance(batch, Mapping) else {"tokens": batch}
        lowered: jax.stages.Lowered = self._function(state).lower(state, named)
        return lowered

    def _arrays(self, state: Any, batch: Any) -> dict[str, Any]:
        """Check the arguments of a step, and return the arrays of the batch by name."""
        if not isinstance(state, TrainState):
            raise RequestError(
                f"step: expected the state of train.init or of a step, then a batch; got {type(state).__name__}"
            )
        if any(is_consumed(a) for a in (state.step, *state.params.values())):
            raise SessionStateError(
                "step: this state was consumed by an earlier step; continue with the state that it returned"
            )
        self._check_optimizer(state)
        if isinstance(batch, tuple):
            raise RequestError('step: a batch of several arrays has them by name: {"tokens": tokens, "labels": labels}')
        named = dict(batch) if isinstance(batch, Mapping) else {"tokens": batch}
        # Of `cross_entropy` labels are at the position of the prediction, and under transformers' names one before.
        if counts_rows(self.loss) and self.model.first_input in named:
            named.setdefault("tokens", named.pop(self.model.first_input))
        if named.get("tokens") is None:
            raise RequestError(f"step: a batch is tokens [B, S], or a mapping with 'tokens'; got {listing(named)}")
        named = {k: a if isinstance(a, jax.Array) else as_host_array(k, a) for k, a in named.items() if a is not None}
        check_batch(self.loss, self.model, named)
        return named

    def _check_optimizer(self, state: TrainState) -> None:
        """Check that the state has the tree structure of this step's optimizer.

        Raises:
            RequestError: it has another, so that `train.init` got another optimizer.
        """
        if self.optimizer_tree is None:
            with allow_promotion():
                self.optimizer_tree = jax.tree.structure(
                    jax.eval_shape(self.optimizer.init, trainable_params(state.params))
                )
        if jax.tree.structure(state.optimizer) != self.optimizer_tree:
            raise RequestError(
                "step: the state is from another optimizer than this step: pass the same one to train.init(model, "
                "optimizer) and make_step(model, optimizer)"
            )

    def _program(self, state: TrainState, arrays: Arrays) -> Callable[..., Any]:
        """Return the compiled step for batches of these types, from the compile cache of this machine if possible."""
        jitted, options = self._function(state), dict(self.model.settings.plan.compiler_options)
        types = tuple((k, a.shape, a.dtype, getattr(a, "sharding", None)) for k, a in sorted(arrays.items()))
        if (jitted, types) not in self.programs:
            self.programs[jitted, types] = with_compile_cache(jitted, (state, arrays), options)()[0]
        return self.programs[jitted, types]

    def _function(self, state: Any) -> Any:
        """Return the jitted step, with the sharding of the given state also for the new state."""
        shardings: Any = jax.tree.map(lambda a: getattr(a, "sharding", None), state)
        distributed = [p for p in jax.tree.leaves(shardings) if len(p.device_set) > 1]
        key = tuple(jax.tree.leaves(shardings)) if distributed else ()  # on one device, one function serves every state
        if key not in self.jitted:
            options: dict[str, Any] = {"out_shardings": (shardings, None)} if distributed else {}
            options["compiler_options"] = dict(self.model.settings.plan.compiler_options) or None
            self.jitted[key] = jax.jit(self._step, donate_argnums=0, **options)
        return self.jitted[key]

    def _step(self, state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Metrics]:
        trained = trainable_params(state.params)
        constants = {name: array for name, array in state.params.items() if name not in trained}
        loss, gradients, tokens = self._gradients(trained, constants, batch)
        squares = [jnp.square(g.astype(jnp.float32)).sum() for g in gradients.values()]
        if TARGET_INPUTS & batch.keys():
            has_targets = (self._target_weights(batch) != 0).any()
            # Skip the update without targets: momentum and weight decay would change the parameters even with zero
            # gradients. `cond` rather than `where`, which would make XLA:CPU copy the donated state.
            operands = gradients, trained, state.optimizer
            types = jax.eval_shape(self._update, *operands)
            params, optimizer = lax.cond(has_targets, self._update, lambda _, *old: _cast(old, types), *operands)
        else:  # the targets are the next tokens, and every row has one
            params, optimizer = self._update(gradients, trained, state.optimizer)
        metrics = Metrics(loss, jnp.sqrt(sum(squares, jnp.float32(0))), tokens)
        return TrainState(state.step + 1, constants | params, optimizer), metrics

    def _update(self, gradients: Arrays, params: Arrays, optimizer_state: Any) -> tuple[dict[str, AnyArray], Any]:
        """Compute the next parameters and the next optimizer state."""
        with allow_promotion():
            updates, optimizer_state = self.optimizer.update(gradients, optimizer_state, params)
        return {name: _add_update(p, updates[name]) for name, p in params.items()}, optimizer_state

    def _gradients(
        self, params: Arrays, constants: Arrays, batch: Arrays
    ) -> tuple[AnyArray, dict[str, AnyArray], AnyArray]:
        """Return the loss, the gradients in the dtypes of their leaves, and the number of targets."""
        if self.microbatches == 1:
            loss, gradients = self._loss_and_gradients(params, constants, batch)
            return loss, gradients, self._target_weights(batch).sum()

        def accumulate(sums: Any, part: dict[str, AnyArray]) -> tuple[Any, None]:
            loss_sum, gradient_sums, tokens = sums
            count = self._target_weights(part).sum()
            loss, gradients = self._loss_and_gradients(params, constants, part)
            new_sums = {k: gradient_sums[k] + count * g.astype(jnp.float32) for k, g in gradients.items()}
            return (loss_sum + count * loss, new_sums, tokens + count), None

        zero = jnp.float32(0)
        zeros = {k: jnp.zeros_like(p, jnp.float32) for k, p in params.items()}
        (loss, gradients, tokens), _ = lax.scan(
            accumulate, (zero, zeros, zero), _microbatches(batch, self.microbatches)
        )
        scale = 1 / jnp.where(tokens > 0, tokens, 1.0)  # all sums are 0 without targets
        return loss * scale, {k: (g * scale).astype(params[k].dtype) for k, g in gradients.items()}, tokens

    def _target_weights(self, batch: Arrays) -> AnyArray:
        """Return the weights of the targets as the loss counts them."""
        return target_weights(self.loss, self.model, batch)

    def _loss_and_gradients(
        self, params: Arrays, constants: Arrays, batch: Arrays
    ) -> tuple[AnyArray, dict[str, AnyArray]]:
        loss_inputs = {k: a for k, a in batch.items() if k != "tokens"}

        def scalar(p: Arrays) -> AnyArray:
            loss = self.loss(self.model, {**constants, **p}, batch["tokens"], **loss_inputs)
            if not isinstance(loss, jax.Array) or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
                actual = f"shape {list(loss.shape)} {loss.dtype}" if isinstance(loss, jax.Array) else shown(loss)
                raise RequestError(
                    f"step: the loss is a floating JAX scalar computed from the parameters; got {actual}"
                )
            return loss

        loss, gradients = jax.value_and_grad(scalar)(params)
        return loss.astype(jnp.float32), gradients


@suggest_keywords()
def make_step(
    model: CompiledModel, optimizer: Optimizer, loss: Loss = losses.cross_entropy, microbatches: int = 1
) -> TrainStep:
    """Return a training step, `step(state, batch) → (state, metrics)`: one program that updates the state in place.

    Args:
        model: a model compiled with `program="train"`; its profile sets rematerialization and how layers run.
        optimizer: any optimizer of optax; it includes learning rates, clipping and decay.
        loss: a function of a model, parameters and a batch; with options for example
            `functools.partial(losses.cross_entropy, chunk=512)`.
        microbatches: number of microbatches that a batch is split into for gradient accumulation. Gradients are
            accumulated in f32, weighted by the number of targets, so that the step equals one of the full batch.
            Microbatch i has rows i, i + n, i + 2n …, so that every device has rows of each microbatch if the batch is
            sharded.

    Raises:
        RequestError, WeightError: as `train.init`, or `microbatches` is no positive number.
    """
    check_trainable(model, optimizer)
    if not callable(loss):
        raise RequestError(f"make_step: loss is a function of (model, params, tokens), got {shown(loss)}")
    # The loss may require further keyword arguments, which come from the batch.
    check_signature(loss, ("model", "params", "tokens"), "make_step: loss", RequestError, named=True)
    return TrainStep(model, optimizer, loss, check_integer("make_step: microbatches", microbatches, 1))


def _add_update(p: AnyArray, update: AnyArray) -> AnyArray:
    """Return `p + update`, computed in the wider of their dtypes and rounded once."""
    wide = jnp.promote_types(p.dtype, update.dtype)
    return (p.astype(wide) + update.astype(wide)).astype(p.dtype)


def _cast(tree: Any, types: Any) -> Any:
    """Return a tree in the dtypes of another: an optimizer may widen a moment in its first step."""
    return jax.tree.map(lambda a, spec: a if a.dtype == spec.dtype else a.astype(spec.dtype), tree, types)


def _microbatches(batch: Arrays, parts: int) -> dict[str, AnyArray]:
    """Split every array `[B, …]` into microbatches `[parts, B/parts, …]`, with adjacent rows in different ones.

    Raises:
        RequestError: an array has another number of rows, or the number is no multiple of `parts`.
    """
    rows = batch["tokens"].shape[0]
    for name, array in batch.items():
        if array.ndim == 0 or array.shape[0] != rows or rows % parts:
            raise RequestError(
                f"step: {name} {list(array.shape)}: {rows} rows of tokens cannot be split into {parts} equal "
                f"parts, microbatches={parts}"
            )
    return {k: a.reshape(rows // parts, parts, *a.shape[1:]).swapaxes(0, 1) for k, a in batch.items()}
