"""Add, merge and save LoRA adapters (Hu et al. 2021).

y = x Wᵀ + s · (x Aᵀ) Bᵀ, with A `[rank, in]` and B `[out, rank]`. Keys, sizes and initial values match PEFT's, so its
adapter files can be loaded and written. It is built on `at`: A and B belong to the block of the product that they
change.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from numbers import Real
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.blocks.lora import Adapter, LoraLinear, ModuleNames
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DTypeError, RequestError, UnsupportedError, WeightError, listing, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.models.encoder import FIXED_LABELS, TaskHead
from rlx_jax.models.hooks import Edit, WithBlocks
from rlx_jax.models.lora_files import (
    HEAD_TASKS,
    TASKS,
    TENSOR_SUFFIXES,
    AdapterSizes,
    BaseModel,
    base_of,
    open_adapter,
    rename_modules,
    write_adapter,
)
from rlx_jax.program import Buildable
from rlx_jax.runtime.arguments import refuse_consumed
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.trace.block_selection import BlockPattern, BlocksByWeight, ProjectionPattern
from rlx_jax.trace.editing import BlockEdit, Inner
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.weights.inverse import weights_by_key
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import MarkedSource, RenamedSource

R = TypeVar("R")
# The dtypes that merged weights may have.
DTYPES = {"f32": np.dtype(np.float32), "bf16": jnp.dtype(jnp.bfloat16), "f16": np.dtype(np.float16)}


@dataclass(frozen=True)
class WithAdapter:
    """The edit of a flow that adds an adapter's files to its weights, and the low-rank products to the matching blocks.

    It is a class, so that a recipe with it can be pickled.

    Attributes:
        sizes: the adapted modules.
        source: the adapter's weights.
        renamed: see `ModuleNames`.
        no_training: reason why the adapter cannot be trained as it was; empty if it can.
    """

    sizes: AdapterSizes
    source: WeightSource
    renamed: tuple[tuple[str, str], ...] = ()
    no_training: str = ""

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        flow = replace(flow, _no_training=self.no_training or flow._no_training)
        names = replace(self._names(flow), renamed=self.renamed)
        head_keys = self.sizes.head_keys
        lora_keys = (key for key in self.source.keys() if key not in head_keys)
        adapter_keys = {names.stored + key.removeprefix(names.outer): key for key in lora_keys}
        adapter_keys |= {key: key for key in head_keys}
        source = MarkedSource(RenamedSource(self.source, adapter_keys), "replace" if head_keys else "fallback")
        flow = flow.with_weights(source, add=True)
        if flow._other_parts:  # adapter weights of the other tower, which another flow reads, are left unread here
            unread = set(flow._ignored_keys)
            companions = (
                key
                for key in adapter_keys
                if any(f"{key.removesuffix(part)}.weight" in unread for part in TENSOR_SUFFIXES)
            )
            flow = replace(flow, _ignored_keys=(*flow._ignored_keys, *companions))
        for (size, scale), modules in self.sizes.groups().items():
            origin = f"the adapter {self.source.where(self.source.keys()[0])}"
            keys = frozenset(f"{names.stored}{module.removeprefix(names.outer)}.weight" for module in modules)
            flow = WithBlocks(BlockEdit(BlocksByWeight(keys, origin), LoraLinear(size, scale, names)))(flow)
        return flow

    def _names(self, flow: ModelFlow) -> ModuleNames:
        """Return how the adapter's module names map to the checkpoint's keys.

        The checkpoint may be of the bare model while the adapter is of one with a head, or the other way round.
        """
        module, weights = next(iter(self.sizes.modules)), flow._weights
        inner = module.partition(".")[2]
        if weights is None or weights.has(f"{module}.weight"):
            return ModuleNames()
        if weights.has(f"{inner}.weight"):
            return ModuleNames(outer=module.removesuffix(inner))
        full_key = next((key for key in weights.keys() if key.endswith(f".{module}.weight")), f"{module}.weight")
        return ModuleNames(stored=full_key.removesuffix(f"{module}.weight"))


def lora(
    recipe: R, pattern: str | None = None, *, rank: int | None = None, alpha: float | None = None, rslora: bool = False,
    dropout: float | None = None, adapter: Any = None,
) -> R:  # fmt: skip
    """Return a recipe or flow with LoRA adapters: new ones where `pattern` matches, or the adapters in PEFT's files.

    New weights are in no checkpoint: `rlx_jax.compile(…, missing="init", key=0)` initializes them, A uniform and B
    zeros.

    Args:
        recipe: a recipe or a `ModelFlow`.
        pattern: as in `at`; every block that matches is one product, such as `layers.*.self_attn.{q,v}_proj`.
        rank: the rank of new adapters.
        alpha: s is alpha / rank; the default is rank, so that s is 1.
        rslora: s is alpha / √rank (Kalajdzievski 2023).
        dropout: not supported; any number other than 0 is refused. An adapter's files with a `lora_dropout` are for
            inference only, unless this is 0: then training continues without dropout.
        adapter: a directory with `adapter_config.json` and `adapter_model.safetensors`, which define all other options.
            If the checkpoint itself has weights under the adapter's keys, it takes precedence over the files.

    Raises:
        RequestError: options that contradict each other. ConfigError, UnsupportedError: the files need a feature that
            is not supported.
    """
    if dropout not in (None, 0) or isinstance(dropout, bool):
        raise UnsupportedError(f"lora: dropout is {shown(dropout)}; adapters train without dropout: leave it out")
    if adapter is not None:
        if isinstance(adapter, list | tuple | dict):
            raise RequestError(f"lora: one adapter at a time, the path of a directory; got {shown(adapter)}")
        if (pattern, rank, alpha, rslora) != (None, None, None, False):
            raise RequestError("lora: adapter= defines the blocks, rank and alpha: leave out the other arguments")
        (sizes, source), renamed = open_adapter(adapter), getattr(recipe, "peft_names", ())
        recipe = _with_head(recipe, sizes, source) if sizes.task else recipe
        no_training = ""
        if sizes.dropout and dropout is None:
            problem = f"the adapter has lora_dropout {sizes.dropout:g}"
            no_training = f"{problem}, and dropout is not supported: rlx_jax.lora(…, dropout=0) trains without it"
        return _apply_edit(recipe, WithAdapter(*rename_modules(sizes, source, renamed), renamed, no_training))
    if pattern is None:
        raise RequestError("lora: expected a pattern of blocks and a rank, or adapter=, the directory of PEFT's files")
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or rank < 1:
        raise RequestError(f"lora: rank is {shown(rank)}; expected a whole number of at least 1, such as rank=8")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha < inf):
        raise RequestError(f"lora: alpha is {shown(alpha)}; expected a finite number over 0")
    scale = (rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)
    products = ProjectionPattern(BlockPattern(pattern))
    names = ModuleNames(outer=getattr(recipe, "peft_prefix", ""), renamed=getattr(recipe, "peft_names", ()))
    return _apply_edit(recipe, WithBlocks(BlockEdit(products, LoraLinear(int(rank), float(scale), names))))


def _with_head(recipe: R, sizes: AdapterSizes, source: WeightSource) -> R:
    """Return a recipe with the head that an adapter was trained with; the recipe's own if it is for the same labels.

    Raises:
        UnsupportedError: the family has no such head, or the adapter has weights outside of the head.
    """
    target: Any = recipe
    head: TaskHead | None = getattr(recipe, "head", None)
    layers = getattr(recipe, "heads", {}).get(sizes.task)
    where = f"the adapter {source.where(source.keys()[0])}"
    if layers is None:
        raise UnsupportedError(f"lora: {where} has a head for {sizes.task}, which {target.name} does not have")
    last_key = f"{layers[-1].key}.weight"
    labels = head.labels if head is not None and head.task == sizes.task else ()
    num_labels = int(source.spec(last_key).shape[0]) if last_key in sizes.head_keys else len(labels)
    if num_labels != len(labels) or not labels:
        labels = FIXED_LABELS.get(sizes.task) or tuple(f"LABEL_{i}" for i in range(num_labels))
    if head is None or head.task != sizes.task:
        is_decoder = hasattr(target, "hidden_only")
        head = TaskHead(sizes.task, layers, labels, pooling="lasttoken" if is_decoder else "cls")
        target = replace(target, hidden_only=True) if is_decoder else target
    head = replace(head, labels=labels)
    if unread := sorted(set(sizes.head_keys) - head.weight_keys(str)):
        raise UnsupportedError(f"lora: {where} replaces {listing(unread, 4)}, which the head for {head.task} lacks")
    if not labels:
        raise UnsupportedError(f"lora: {where} is for {head.task}, and neither it nor the base model has {last_key}")
    return cast(R, replace(target, head=head))


def _apply_edit(recipe: R, edit: Edit) -> R:
    """Return a recipe or a flow with an edit applied."""
    target: Any = recipe
    return cast(R, edit(target) if isinstance(target, ModelFlow) else target.patch_flow(edit))


@dataclass
class _AdapterRecorder:
    """A wrapper that delegates to a `LoraLinear` and records the adapters that it adds."""

    lora_linear: LoraLinear
    adapters: list[Adapter] = field(default_factory=list)

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        """Write the adapted product, and record its adapter."""
        value, adapter = self.lora_linear.write(emit, x, inner)
        self.adapters.append(adapter)
        return value


def adapters_of(model: CompiledModel) -> tuple[Adapter, ...]:
    """Return every weight with an adapter.

    Raises:
        RequestError: the model has none.
    """
    flows, source = model.programs.flows.values(), model.programs.source
    adapters = [adapter for flow in flows for adapter in _collect_adapters(flow, source)]
    if not adapters:
        raise RequestError(f"{model.name}: there is no adapter in this model; rlx_jax.lora(recipe, …) adds one")
    return tuple(dict.fromkeys(adapters))  # several flows may share one


def _collect_adapters(flow: Buildable, source: WeightSource | None) -> list[Adapter]:
    """Return the adapters of a flow, by building it with wrappers that record them."""
    recorders, edits = list[_AdapterRecorder](), list[BlockEdit]()
    for edit in flow._block_edits if isinstance(flow, ModelFlow) else ():
        if isinstance(edit.wrapper, LoraLinear):
            recorders.append(_AdapterRecorder(edit.wrapper))
            edit = replace(edit, wrapper=recorders[-1])
        edits.append(edit)
    if recorders and isinstance(flow, ModelFlow):
        replace(flow, _block_edits=tuple(edits)).build(source)
    return [adapter for recorder in recorders for adapter in recorder.adapters]


def _adapter_weights(
    model: CompiledModel, adapters: tuple[Adapter, ...], others: tuple[str, ...] = ()
) -> dict[str, jax.Array]:
    """Return the matrices A and B, and the weights `others`, by key. The rest is not touched: packed weights would be
    decoded."""
    keys = {*others, *(key for adapter in adapters for key in (adapter.a, adapter.b))}
    params = model.require_params("the weights of adapters")
    refuse_consumed(params, {})
    weights = weights_by_key({p: params[name] for name, p in model.programs.layout.reading(keys).items()})
    return {key: weights[key] for key in weights if key in keys}


def _compiled(model: Any, caller: str) -> CompiledModel:
    """Return the model itself, or the compiled model of a `CausalLM`, an `Encoder` …

    Raises:
        RequestError: it is neither.
    """
    compiled = getattr(model, "model", model)
    if not isinstance(compiled, CompiledModel):
        raise RequestError(f"{caller} takes a CompiledModel, CausalLM or Encoder, got {shown(model)}")
    return compiled


def merge_lora(model: Any, *, dtype: str | None = None) -> dict[str, jax.Array]:
    """Return the weights by checkpoint key, with W + s B A in place of W and without the adapters.

    The recipe without adapters reads them. Sums are float32; each weight keeps its dtype.

    Args:
        model: a `CompiledModel`, or an object with one as its `model`: a `CausalLM`, an `Encoder`.
        dtype: the dtype of all floating weights, "f32", "bf16" or "f16". It is required if weights are packed in the
            checkpoint or on the device, and they are returned dequantized.

    Raises:
        DTypeError: another dtype. WeightError: weights are packed, and there is no `dtype`.
    """
    model = _compiled(model, "merge_lora")
    if dtype is not None and dtype not in DTYPES:
        raise DTypeError(f"merge_lora: dtype is {shown(dtype)}; expected 'f32', 'bf16' or 'f16'")
    adapters, packed = adapters_of(model), model.programs.layout.packed_keys()
    if dtype is None and packed:
        raise WeightError(
            f"merge_lora: {len(packed)} weights are packed, and sums with adapters are not: "
            f"{listing(packed, 8)}; dtype='f32' merges into the dequantized values"
        )
    return _add_products(adapters, model.weights(), +1, dtype)


def unmerge_lora(model: Any, weights: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the weights before `merge_lora(model)`, together with the model's adapters.

    Args:
        model: the model with the adapters.
        weights: what `merge_lora` returned. Its rounding to the dtype of the weights cannot be undone.

    Raises:
        WeightError: an adapted weight is missing.
    """
    model = _compiled(model, "unmerge_lora")
    adapters = adapters_of(model)
    pairs = _adapter_weights(model, adapters)
    if missing := [adapter.key for adapter in adapters if adapter.key not in weights]:
        raise WeightError(f"unmerge_lora: weights {listing(missing, 4)} are missing")
    return _add_products(adapters, dict(weights) | pairs, -1) | pairs


def _add_products(
    adapters: tuple[Adapter, ...], weights: Mapping[str, Any], sign: int, dtype: str | None = None
) -> dict[str, jax.Array]:
    """Return the weights with `sign` · s B A added to each adapted one, without the adapters.

    Floating weights are returned in `dtype`, or in their own if it is None.
    """

    def rounded(value: jax.Array, stored: np.dtype[Any]) -> jax.Array:
        return value.astype(DTYPES[dtype] if dtype is not None and jnp.issubdtype(stored, jnp.floating) else stored)

    merged = {key: jnp.asarray(value) for key, value in weights.items()}
    for adapter in adapters:
        a, b, w = (merged[key].astype(jnp.float32) for key in (adapter.a, adapter.b, adapter.key))
        delta = jnp.matmul(b, a, precision="highest") * (sign * adapter.scale)
        merged[adapter.key] = rounded(w + (delta if adapter.contract else delta.T), merged[adapter.key].dtype)
    adapter_keys = {key for adapter in adapters for key in (adapter.a, adapter.b)}
    return {key: rounded(value, value.dtype) for key, value in merged.items() if key not in adapter_keys}


def save_lora(model: Any, path: Any, *, base_model: str | None = None, overwrite: bool = False) -> None:
    """Write the model's adapters, and the head of a task that was trained with them, in PEFT's format.

    `rlx_jax.load(base, adapter=path)`, `PeftModel.from_pretrained` and `AutoPeftModelForCausalLM.from_pretrained` load
    it.

    Args:
        model: a `CompiledModel`, or an object with one as its `model`: a `CausalLM`, an `Encoder`.
        path: a directory; missing parent directories are created.
        base_model: the base model to record in the files: a path or `"org/name"`. By default the directory that the
            weights were read from, or the model of the Hub with its commit.
        overwrite: replace an existing adapter, in one step.

    Raises:
        RequestError: the model has no adapter, or `base_model` is no text.
        TargetExistsError: `path` exists, and `overwrite` is false or the path is something else than an adapter.
        NoSpaceError, SaveFailedError: the disk is full or refuses.
    """
    model = _compiled(model, "save_lora")
    adapters, head = adapters_of(model), _saved_head(model)
    head_keys = () if head is None else tuple(sorted(head.weight_keys(str)))
    weights = _adapter_weights(model, adapters, head_keys)
    modules = {adapter.module: (int(weights[adapter.a].shape[0]), adapter.scale) for adapter in adapters}
    pairs = [(a.module, zip(TENSOR_SUFFIXES, (a.a, a.b), strict=True)) for a in adapters]
    arrays = {module + part: weights[key] for module, parts in pairs for part, key in parts}
    arrays |= {key: weights[key] for key in head_keys}
    # Weights stored `[in, out]`, as in GPT-2, are `fan_in_fan_out` in PEFT.
    transposed = all(adapter.contract == 0 for adapter in adapters)
    if base_model is not None and not isinstance(base_model, str):
        raise RequestError(f"save_lora: base_model is {shown(base_model)}; expected a path or 'org/name'")
    base = base_of(model.programs.source) if base_model is None else BaseModel(base_model)
    output = model.flow._outputs.primary if isinstance(model.flow, ModelFlow) else ""
    task = TASKS.get(output) if head is None else next(name for name, t in HEAD_TASKS.items() if t == head.task)
    sizes = AdapterSizes(modules, transposed, head_keys=head_keys)
    write_adapter(path, sizes, arrays, overwrite, replace(base, task=task))


def _saved_head(model: CompiledModel) -> TaskHead | None:
    """Return the layers of a model's head that PEFT saves with an adapter; None for a task without any.

    A layer in the encoder, such as BERT's pooler, is a part of the base model.
    """
    head = model.flow._outputs.label_head if isinstance(model.flow, ModelFlow) else None
    if not isinstance(head, TaskHead) or head.task not in HEAD_TASKS.values():
        return None
    return replace(head, layers=tuple(layer for layer in head.layers if not layer.in_encoder))
