"""`rlx_jax.plan`: what a model will cost on a device, from its config and the headers of its weights alone."""

from __future__ import annotations

import bisect
import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from rlx_jax.compiler.meshes import PlannedDevices
from rlx_jax.compiler.pipeline import Template
from rlx_jax.compiler.settings import with_target
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import named_device, running_device
from rlx_jax.encode.checkpoint import Checkpoint, open_model_folder
from rlx_jax.errors import (
    GraphError,
    RequestError,
    RlxError,
    RlxWarning,
    UnsupportedError,
    listing,
    quote,
    shown,
    suggest_keywords,
)
from rlx_jax.generate.request_plan import cache_sizes, chunk_widths
from rlx_jax.inspection.plan_record import ModelPlan, ProgramEstimate, Suggestion
from rlx_jax.inspection.rates import Rates, rates_named, rates_of
from rlx_jax.io.hub import ProgressCallback
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.program import Buildable
from rlx_jax.runtime.estimate import estimate_program, parameter_bytes, state_bytes_by_kind
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model_setup import as_flow, make_programs
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.token_model import check_positions
from rlx_jax.weights.format import OpenOptions

# Kinds of models that read tokens alone.
TOKEN_KINDS = ("causal", "encoder", "classifier", "token_classifier", "question_answerer", "masked_lm")
# The number of tokens of a row unless the model has fewer positions, and the numbers of devices that are suggested.
DEFAULT_CONTEXT = 2048
MORE_DEVICES = (2, 4, 8)
# The largest number of devices of a mesh: all ways to divide them are tried.
MAX_DEVICES = 1 << 16
# The largest part of a GPU's memory that XLA_PYTHON_CLIENT_MEM_FRACTION should give to JAX.
MAX_MEMORY_FRACTION = 0.95


@suggest_keywords()
def plan(
    model: Any, *, device: str | None = None, batch: int = 1, context: int | None = None,
    profile: ProfileLike | None = None, mesh: Any = None, revision: str | None = None,
    ignore_fields: Iterable[str] = (), progress: ProgressCallback | None = None,
) -> ModelPlan:  # fmt: skip
    """Return what a model will cost on a device: memory, time of a token and of a prompt, and what would make it fit.

    No weights are read: of a model of the Hub, config and headers are fetched. For the CPU that runs, a part of the
    program is compiled and run. Bytes of parameters and caches are exact; all other figures are estimates.

    Args:
        model: a checkpoint directory, a GGUF file or the name of a model of the Hub; or a recipe or a flow, with the
            shapes that its config or its stages declare.
        device: `cpu` for this machine, `h100`, `h200`, `a100`, `l4`, `t4`, `rtx4090`, `v5e` or `v6e`; by default the
            device that JAX runs on.
        batch: the number of rows.
        context: the tokens of each row, prompt and answer; by default 2048, or as many as the model has positions.
        profile: the profile that the model would be loaded with.
        mesh: a number of devices, a mapping of axes to sizes such as `{"data": 2, "tensor": 4}`, or a mesh.
        revision, ignore_fields, progress: as in `rlx_jax.load`.

    Raises:
        ProfileError: there are no rates of such a device; the profile names another device, or does not fit the model.
        RequestError: a batch, a context or a mesh that is not possible; a model that is loaded already.
            SequenceLengthError: the context is longer than the model's positions.
        UnsupportedError: the model does not read tokens.
        Others: as `rlx_jax.load`.
    """
    rates = rates_named(device) if device is not None else _running_rates()
    rows, planned_mesh = check_integer("batch", batch, 1), _planned_mesh(mesh)
    flow, max_positions, generates = _open_flow(model, rates, revision, ignore_fields, progress)
    planned = PlannedModel(flow, max_positions, generates, _for_device(flow, profile, rates), planned_mesh)
    request = PlanRequest(planned, rates, rows, context)
    return with_suggestions(request, make_plan(request))


def _running_rates() -> Rates:
    """Return the rates of the device that JAX runs on.

    Raises:
        ProfileError: there are none; the message lists the devices with rates.
    """
    here = running_device()
    return rates_of(here) or rates_named(here.name)


def _for_device(flow: Buildable, profile: ProfileLike | None, rates: Rates) -> CompileProfile:
    """Return the profile that is passed, or that of the flow, with the device as its target.

    Raises:
        ProfileError: the profile is for another device.
    """
    own = getattr(flow, "profile", None)
    base = CompileProfile.of(profile) if profile is not None else own or CompileProfile.auto()
    return with_target(base, rates.device.name, "device", rates.device.kind)


def _planned_mesh(mesh: Any) -> Any:
    """Return the argument `mesh` in the form that `make_programs` takes; no device of it needs to be here.

    Raises:
        RequestError: it is no mesh, has an axis without devices, or too many devices.
    """
    if mesh is None or isinstance(mesh, Mesh | AbstractMesh):
        return mesh
    if isinstance(mesh, Mapping) and mesh:
        sizes = [check_integer(f"mesh[{name!r}]", size, 1) for name, size in mesh.items()]
        return AbstractMesh(tuple(sizes), tuple(map(str, mesh)))
    if isinstance(mesh, bool) or not isinstance(mesh, int | np.integer):
        raise RequestError(f"mesh is {shown(mesh)}; expected a number of devices, axes with sizes, or a mesh")
    count = check_integer("mesh", mesh, 1)
    if count > MAX_DEVICES:
        raise RequestError(f"mesh is {count}; plans are for at most {MAX_DEVICES} devices")
    return PlannedDevices(count)


def _open_flow(
    model: Any, rates: Rates, revision: str | None, ignore_fields: Iterable[str] = (),
    progress: ProgressCallback | None = None,
) -> tuple[Buildable, int | None, bool]:  # fmt: skip
    """Return the flow of a model, over headers alone, its number of positions, and whether it generates.

    Raises:
        UnsupportedError: it does not read tokens. RequestError: it is loaded already.
    """
    if isinstance(model, str | os.PathLike):
        folder = open_model_folder(model, revision, progress=progress)
        checkpoint = Checkpoint(folder, ignore_fields=ignore_fields, headers_only=True)
        pretrained = checkpoint.pretrained
        if pretrained.kind not in TOKEN_KINDS:
            raise UnsupportedError(f"{quote(model)} is of kind {pretrained.kind}: plans are for models of tokens")
        return checkpoint.flow(pretrained.recipe), pretrained.max_positions, pretrained.kind == "causal"
    if revision is not None or tuple(ignore_fields):
        raise RequestError(f"revision= and ignore_fields= are for checkpoints; got {type(model).__name__}")
    if isinstance(getattr(getattr(model, "model", model), "programs", None), Programs):
        raise RequestError(
            f"plan: this {type(model).__name__} is loaded already, and report() and explain() have its figures; pass "
            "its directory or its recipe to plan it for another device"
        )
    flow = as_flow(model)
    # With a target, the devices that are here are not started.
    profile = CompileProfile.auto().replace(fusion={"target": rates.device.name})
    programs = make_programs([flow], None, OpenOptions(profile=profile), merge=True)
    positions = getattr(model, "max_positions", None)
    positions = positions or programs.template(ProgramKey(flow.name, "forward")).bounds.positions
    return flow, positions, not programs.derivation_error(flow.name, "prefill")


# -- one plan ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedModel:
    """A model with the profile and the mesh to plan it for. Plans of several sizes share its programs.

    Attributes:
        flow: the flow, bound to headers or with declared shapes.
        max_positions: its number of positions; None without a limit.
        generates: whether it has the programs of generation.
        profile: the profile, for the device.
        mesh: as in `plan`.
    """

    flow: Buildable
    max_positions: int | None
    generates: bool
    profile: CompileProfile
    mesh: Any

    @cached_property
    def programs(self) -> Programs:
        """Return the programs of the model, without weights."""
        options = OpenOptions(profile=self.profile, mesh=self.mesh)
        serves = ("forward", *CACHED_PROGRAMS) if self.generates else ("forward",)
        return make_programs([self.flow], None, options, merge=True, max_positions=self.max_positions, serves=serves)

    def template(self, program: str) -> Template:
        """Return the template of a program that computes the first output; in generation, of each row's last token."""
        key = ProgramKey(self.flow.name, program, last_only=self.generates)
        names = self.programs.template(key).mir.output_names
        return self.programs.template(replace(key, outputs=names[:1] if len(names) > 1 else None))


@dataclass(frozen=True)
class PlanRequest:
    """A model with the device and the sizes to plan it for; `batch` and `context` as in `plan`, None is the default."""

    model: PlannedModel
    rates: Rates
    batch: int
    context: int | None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of each row, checked against the positions of the model."""
        longest = min(DEFAULT_CONTEXT, self.model.max_positions or DEFAULT_CONTEXT)
        context = longest if self.context is None else check_integer("context", self.context, 1)
        check_positions(context, self.model.max_positions, "context")
        return context


def make_plan(request: PlanRequest) -> ModelPlan:
    """Return the plan of a request, without suggestions. Sizes are those that a request of these rows is padded to."""
    model, context = request.model, request.num_tokens
    programs, flow = model.programs, model.flow
    settings, sharding = programs.settings, programs.model_sharding
    buckets = settings.buckets
    cache: dict[str, int] = {}
    decode = None
    if model.generates:
        extend = model.template("extend")
        rows, cache_len = cache_sizes(buckets, request.batch, context, model.max_positions)
        sizes = {**flow._binding, "batch": rows, "context": cache_len}
        sizes |= programs.ring_sizes(extend, cache_len)
        cache = state_bytes_by_kind(programs, extend, sizes)
        decode = _estimate(request, "extend", {**sizes, "seq": 1})
        first, *rest = chunk_widths(buckets, context, model.max_positions)
        prefill = _estimate(request, "prefill", {**sizes, "seq": first})
        for width in rest:
            prefill = prefill.then(_estimate(request, "extend", {**sizes, "seq": width}))
    else:
        prefill = _estimate(request, "forward", {"batch": buckets.rows(request.batch), "seq": context})
    return ModelPlan(
        flow.name, str(request.rates.device), request.rates.basis, "" if sharding is None else sharding.text(),
        request.batch, context, short_name(settings.compute), parameter_bytes(programs), cache, decode, prefill,
        request.rates.device.memory,
    )  # fmt: skip


def _estimate(request: PlanRequest, program: str, sizes: Mapping[str, int]) -> ProgramEstimate:
    """Return the estimate of a program.

    Raises:
        GraphError: the program has a symbol without a size.
    """
    template = request.model.template(program)
    if unknown := sorted(template.symbols.difference(sizes)):
        name = request.model.flow.name
        raise GraphError(f"{name}: plans are for models of tokens [batch, seq]; it has other sizes: {listing(unknown)}")
    return estimate_program(request.model.programs, template, program, sizes, request.rates)


# -- what would make it fit --------------------------------------------------------------------


def with_suggestions(request: PlanRequest, result: ModelPlan) -> ModelPlan:
    """Return the plan with the changes that would make it fit, if it does not."""
    if result.fits is not False:
        return result
    suggestions = [*_more_of_the_gpu(request, result)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RlxWarning)
        for change, arguments, changed in _alternatives(request, result):
            with contextlib.suppress(RlxError):  # such as a number of devices that does not divide the heads
                if _fits(changed):
                    suggestions.append(_suggestion(change, arguments, make_plan(changed)))
    return replace(result, suggestions=tuple(suggestions))


def _fits(request: PlanRequest) -> bool:
    """Return whether a request fits; that is a matter of bytes, so no op runs for its time."""
    parameters, memory = sum(parameter_bytes(request.model.programs).values()), request.rates.device.memory or 0
    return parameters <= memory and bool(make_plan(replace(request, rates=replace(request.rates, samples=False))).fits)


def _suggestion(change: str, arguments: Mapping[str, Any], result: ModelPlan) -> Suggestion:
    """Return a change with the figures of its plan."""
    sizes = result.params_bytes, result.cache_bytes, result.peak_bytes
    return Suggestion(change, arguments, *sizes, result.ms_per_token, result.ms_prefill)


def _more_of_the_gpu(request: PlanRequest, result: ModelPlan) -> Iterator[Suggestion]:
    """Yield the setting of JAX that allows more of a GPU's memory, if that is enough."""
    device = request.rates.device
    if device.kind == "cuda" and result.peak_bytes <= (named_device(device.name).memory or 0) * MAX_MEMORY_FRACTION:
        change = f"XLA_PYTHON_CLIENT_MEM_FRACTION={MAX_MEMORY_FRACTION}"
        yield _suggestion(f"{change} in the environment", {}, result)


def _alternatives(request: PlanRequest, result: ModelPlan) -> Iterator[tuple[str, dict[str, Any], PlanRequest]]:
    """Yield changes to try, each with the arguments of `plan` that differ, and the changed request."""
    # Each with the smallest part of the parameters' bytes that it could leave: what cannot fit is not planned.
    precisions = {
        "weights and activations in bf16": ({"compute": "bf16", "weights": "bf16"}, 2),
        "weights packed as int8": ({"weights": "int8"}, 4), "weights packed as int4": ({"weights": "int4"}, 8),
        "a cache in int8": ({"kv": "int8"}, 1),
        "weights packed as int4, a cache in int8": ({"weights": "int4", "kv": "int8"}, 8),
    }  # fmt: skip
    smallest, model = result.params_bytes / (result.memory or 1), request.model
    for change, (precision, factor) in precisions.items():
        if not (result.dtype != "f32" and "compute" in precision) and ("kv" not in precision or result.cache):
            if smallest <= factor:
                variant = replace(model, profile=model.profile.replace(precision=precision))
                yield change, {"profile": {"precision": precision}}, replace(request, model=variant)
    for name, word in (("context", "a context of"), ("batch", "a batch of")) if smallest <= 1 else ():
        size = getattr(result, name)
        smaller = [replace(request, **{name: size >> i}) for i in range(1, size.bit_length())]
        index = bisect.bisect_left(smaller, True, key=_fits)
        if index < len(smaller):
            value = getattr(smaller[index], name)
            yield f"{word} {value:,}", {name: value}, smaller[index]
    if model.mesh is None and request.rates.device.kind != "cpu":
        for count in MORE_DEVICES:
            if smallest <= count:
                variant = replace(model, mesh=PlannedDevices(count))
                yield f"{count} devices", {"mesh": count}, replace(request, model=variant)
