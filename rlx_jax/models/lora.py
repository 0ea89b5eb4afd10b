"""LoRA (Hu et al. 2021): y = x Wᵀ + s · (x Aᵀ) Bᵀ, with A `[rank, in]` and B `[out, rank]` beside a stored W.

Keys, sizes and initial numbers are those of PEFT, whose adapter files load and are written. It is built on `at`: A and
B stand in the block of the product that they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Real
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.blocks.lora import Adapter, LoraLinear, ModuleNames
from rlx_jax.errors import RequestError, UnsupportedError, WeightError, listing, shown
from rlx_jax.flow import ModelFlow
from rlx_jax.models.hooks import Edit, WithBlocks
from rlx_jax.models.lora_files import (
    PARTS,
    TASKS,
    AdapterSizes,
    BaseModel,
    as_stored,
    base_of,
    open_adapter,
    write_adapter,
)
from rlx_jax.program import Buildable
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.trace.block_selection import BlockPattern, BlocksReading, ProductsIn
from rlx_jax.trace.editing import BlockEdit, Inner
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import MarkedSource, RenamedSource

R = TypeVar("R")


@dataclass(frozen=True)
class WithAdapter:
    """The edit of a flow that puts an adapter's files beside its weights, and the products beside theirs. A class, so
    that a recipe with it can be pickled."""

    sizes: AdapterSizes
    source: WeightSource
    renamed: tuple[tuple[str, str], ...] = ()  # see `ModuleNames`
    no_training: str = ""  # why it cannot be trained as it was, where it cannot

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        flow = replace(flow, _no_training=self.no_training or flow._no_training)
        names = replace(self._names(flow), renamed=self.renamed)
        own = {names.stored + key.removeprefix(names.outer): key for key in self.source.keys()}
        flow = flow.with_weights(MarkedSource(RenamedSource(self.source, own), "spare"), add=True)
        if flow._elsewhere:  # the other tower's, which another flow reads
            known = set(flow._left_keys)
            others = (key for key in own if any(f"{key.removesuffix(part)}.weight" in known for part in PARTS))
            flow = replace(flow, _left_keys=(*flow._left_keys, *others))
        for (size, scale), modules in self.sizes.groups().items():
            origin = f"the adapter {self.source.where(self.source.keys()[0])}"
            keys = frozenset(f"{names.stored}{module.removeprefix(names.outer)}.weight" for module in modules)
            flow = WithBlocks(BlockEdit(BlocksReading(keys, origin), LoraLinear(size, scale, names)))(flow)
        return flow

    def _names(self, flow: ModelFlow) -> ModuleNames:
        """The flow's checkpoint may be that of the bare model while the adapter is of one with a head, or the other way
        round."""
        first, known = next(iter(self.sizes.modules)), flow._weights
        inner = first.partition(".")[2]
        if known is None or known.has(f"{first}.weight"):
            return ModuleNames()
        if known.has(f"{inner}.weight"):
            return ModuleNames(outer=first.removesuffix(inner))
        longer = next((key for key in known.keys() if key.endswith(f".{first}.weight")), f"{first}.weight")
        return ModuleNames(stored=longer.removesuffix(f"{first}.weight"))


def lora(
    recipe: R,
    pattern: str | None = None,
    *,
    rank: int | None = None,
    alpha: float | None = None,
    rslora: bool = False,
    dropout: float | None = None,
    adapter: Any = None,
) -> R:
    """A recipe or flow with LoRA adapters: new ones where `pattern` matches, or those of PEFT's files.

    New weights are in no checkpoint: `rlx_jax.compile(…, missing="init", key=0)` draws them, A uniform and B zeros.

    Args:
        recipe: a recipe or a `ModelFlow`.
        pattern: as `at` takes it; every block that matches is one product, such as `layers.*.self_attn.{q,v}_proj`.
        rank: of new adapters.
        alpha: s is alpha / rank; rank by default, so that s is 1.
        rslora: s is alpha / √rank (Kalajdzievski 2023).
        dropout: there is none here, and another number than 0 is refused. Files that say `lora_dropout` are for
            inference, and train on without it where this is 0.
        adapter: a directory with `adapter_config.json` and `adapter_model.safetensors`, which say all the rest. A
            checkpoint that has the adapter's weights itself counts before its files.

    Raises:
        RequestError: options that contradict. ConfigError, UnsupportedError: the files ask for what there is not.
    """
    if dropout not in (None, 0) or isinstance(dropout, bool):
        raise UnsupportedError(f"lora: dropout is {shown(dropout)}; adapters train without: leave it out")
    if adapter is not None:
        if isinstance(adapter, list | tuple | dict):
            raise RequestError(f"lora: one adapter at a time, the path of a directory; got {shown(adapter)}")
        if (pattern, rank, alpha, rslora) != (None, None, None, False):
            raise RequestError("lora: an adapter says which blocks it is for, its rank and alpha: leave out the others")
        (sizes, source), renamed = open_adapter(adapter), getattr(recipe, "modules", ())
        left = ""
        if sizes.dropout and dropout is None:
            said = f"the adapter says lora_dropout {sizes.dropout:g}"
            left = f"{said}, and there is no dropout here: rlx_jax.lora(…, dropout=0) trains on without"
        return _patched(recipe, WithAdapter(*as_stored(sizes, source, renamed), renamed, left))
    if pattern is None:
        raise RequestError("lora: expected a pattern of blocks and a rank, or adapter=, the directory of PEFT's files")
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or rank < 1:
        raise RequestError(f"lora: rank is {shown(rank)}; expected a whole number of at least 1, such as rank=8")
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, Real) or not 0 < alpha < inf):
        raise RequestError(f"lora: alpha is {shown(alpha)}; expected a finite number over 0")
    scale = (rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)
    products = ProductsIn(BlockPattern(pattern))
    names = ModuleNames(outer=getattr(recipe, "outer", ""), renamed=getattr(recipe, "modules", ()))
    return _patched(recipe, WithBlocks(BlockEdit(products, LoraLinear(int(rank), float(scale), names))))


def _patched(recipe: R, edit: Edit) -> R:
    made: Any = recipe
    return cast(R, edit(made) if isinstance(made, ModelFlow) else made.patch_flow(edit))


# -- what a model has of them --------------------------------------------------------------------


@dataclass
class _Noting:
    """A `LoraLinear` that notes what it wrote."""

    made: LoraLinear
    found: list[Adapter] = field(default_factory=list)

    def __call__(self, emit: Emit, x: FlowValue | None, inner: Inner) -> FlowValue:
        value, adapter = self.made.write(emit, x, inner)
        self.found.append(adapter)
        return value


def adapters_of(model: CompiledModel) -> tuple[Adapter, ...]:
    """Every weight with an adapter.

    Raises:
        RequestError: the model has none.
    """
    found = [adapter for flow in model.programs.flows.values() for adapter in _written(flow, model.programs.source)]
    if not found:
        raise RequestError(f"{model.name}: there is no adapter in this model; rlx_jax.lora(recipe, …) adds one")
    return tuple(dict.fromkeys(found))  # of several parts one


def _written(flow: Buildable, source: WeightSource | None) -> list[Adapter]:
    """The adapters that a flow writes."""
    notes, edits = list[_Noting](), list[BlockEdit]()
    for edit in flow._block_edits if isinstance(flow, ModelFlow) else ():
        if isinstance(edit.wrapper, LoraLinear):
            notes.append(_Noting(edit.wrapper))
            edit = replace(edit, wrapper=notes[-1])
        edits.append(edit)
    if notes and isinstance(flow, ModelFlow):
        replace(flow, _block_edits=tuple(edits)).build(source)
    return [adapter for note in notes for adapter in note.found]


def _compiled(model: Any, what: str) -> CompiledModel:
    """The model, or that of a `CausalLM`, an `Encoder` …

    Raises:
        RequestError: it is none.
    """
    compiled = getattr(model, "model", model)
    if not isinstance(compiled, CompiledModel):
        raise RequestError(f"{what} takes a CompiledModel, CausalLM or Encoder, got {shown(model)}")
    return compiled


def merge_lora(model: Any) -> dict[str, jax.Array]:
    """The weights by checkpoint key with W + s B A in the place of W and without the adapters: what the recipe without
    adapters reads. Sums are f32; each weight keeps its dtype. The model is a `CompiledModel`, or what has one as its
    `model`: a `CausalLM`, an `Encoder`."""
    model = _compiled(model, "merge_lora")
    return _merged(adapters_of(model), model.weights(), +1)


def unmerge_lora(model: Any, weights: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Of weights that `merge_lora(model)` made those of before, and the model's adapters beside them. What the merge
    rounded stays so."""
    model = _compiled(model, "unmerge_lora")
    adapters, own = adapters_of(model), model.weights()
    pairs = {key: own[key] for adapter in adapters for key in (adapter.a, adapter.b)}
    if lacking := [adapter.key for adapter in adapters if adapter.key not in weights]:
        raise WeightError(f"unmerge_lora: weights {listing(lacking, 4)} are not there")
    return _merged(adapters, dict(weights) | pairs, -1) | pairs


def _merged(adapters: tuple[Adapter, ...], weights: Mapping[str, Any], sign: int) -> dict[str, jax.Array]:
    found = {key: jnp.asarray(value) for key, value in weights.items()}
    for adapter in adapters:
        a, b, w = (found[key].astype(jnp.float32) for key in (adapter.a, adapter.b, adapter.key))
        change = jnp.matmul(b, a, precision="highest") * (sign * adapter.scale)
        found[adapter.key] = (w + (change if adapter.contract else change.T)).astype(found[adapter.key].dtype)
    left = {key for adapter in adapters for key in (adapter.a, adapter.b)}
    return {key: value for key, value in found.items() if key not in left}


def save_lora(model: Any, path: Any, *, base_model: str | None = None, overwrite: bool = False) -> None:
    """Write the model's adapters, and nothing else, to a directory as PEFT does: `rlx_jax.load(base, adapter=path)`,
    `PeftModel.from_pretrained` and `AutoPeftModelForCausalLM.from_pretrained` load them.

    Args:
        model: a `CompiledModel`, or what has one as its `model`: a `CausalLM`, an `Encoder`.
        path: a directory; those around it are made where they are missing.
        base_model: the checkpoint that the files name as the base model: a path or `"org/name"`. By default the
            directory that the weights were read from, or the model of the Hub with its commit.
        overwrite: replace the adapter that is there, in one step.

    Raises:
        RequestError: the model has no adapter, or `base_model` is no text.
        TargetExistsError: `path` exists, and `overwrite` is false or something else than an adapter is there.
        NoSpaceError, SaveFailedError: the disk is full or refuses.
    """
    model = _compiled(model, "save_lora")
    adapters = adapters_of(model)
    weights = model.weights()
    modules = {adapter.module: (int(weights[adapter.a].shape[0]), adapter.scale) for adapter in adapters}
    arrays = {
        adapter.module + part: weights[key]
        for adapter in adapters
        for part, key in zip(PARTS, (adapter.a, adapter.b), strict=True)
    }
    turned = all(adapter.contract == 0 for adapter in adapters)
    if base_model is not None and not isinstance(base_model, str):
        raise RequestError(f"save_lora: base_model is {shown(base_model)}; expected a path or 'org/name'")
    base = base_of(model.programs.source) if base_model is None else BaseModel(base_model)
    output = model.flow._outputs.primary if isinstance(model.flow, ModelFlow) else ""
    write_adapter(path, AdapterSizes(modules, turned), arrays, overwrite, replace(base, task=TASKS.get(output)))
