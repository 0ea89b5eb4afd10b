"""Every setting of a profile acts, in the program or on requests, or says why it has nothing to act on."""

import functools
import re
import warnings
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import RlxWarning
from rlx_jax.ir.roles import ROLES
from rlx_jax.ir.types import tensor_type
from rlx_jax.models.llama import Llama32Flow
from rlx_jax.profiles import PRESETS, effects
from rlx_jax.profiles.check import iter_settings
from tests.divided import recipe
from tests.oracles.checkpoints import FIXTURES
from tests.small import TIED_LLAMA as LLAMA
from tests.small import profile
from tests.test_profile_effects import checkpoint, llama, small


def flat(**tables: Any) -> Any:
    """One function, and nothing else: no weights, layers, attention or state."""
    flow = rlx.ModelFlow("flat").input("x", ("batch", 8)).custom(lambda emit, x: emit.tanh(x))
    return rlx.compile(flow, {}, profile=profile(**tables))


def repeating(**tables: Any) -> Any:
    """One function twice, and one of a constant."""
    one = np.ones(8, np.float32)
    flow = rlx.ModelFlow("repeating").input("x", ("batch", 8))
    flow = flow.custom(lambda emit, x: emit.tanh(x) * emit.tanh(x) + emit.tanh(emit.constant(one)))
    return rlx.compile(flow, {}, profile=profile(**tables))


def ids_only(**tables: Any) -> Any:
    """Integers alone."""
    flow = rlx.ModelFlow("ids").input("x", ("batch", 8), "int32").custom(lambda emit, x: x + x)
    return rlx.compile(flow, {}, profile=profile(**tables))


def over_two(**tables: Any) -> Any:
    """`flat` over two devices, whose axis divides rows whatever the other roles say."""
    flow = rlx.ModelFlow("flat").input("x", ("batch", 8)).custom(lambda emit, x: emit.tanh(x))
    return rlx.compile(flow, {}, profile=profile(**tables), mesh=2)


def trained(**tables: Any) -> Any:
    """`small` as the program `train`."""
    flow = rlx.ModelFlow("small").input("x", ("batch", 8)).linear("up.weight", shape=(24, 8))
    return rlx.compile(flow, profile=profile(**tables), program="train")


def generating(**tables: Any) -> Any:
    """A model that runs forward, prefill and extend."""
    return rlx.CausalLM(Llama32Flow.for_prefill(LLAMA), checkpoint(), profile=profile(**tables))


def mixture(**tables: Any) -> Any:
    """A layer's experts alone."""
    spec = rlx.blocks.MoeSpec(num_experts=3, top_k=2, inner=4)
    flow = rlx.ModelFlow("mixture").input("x", ("batch", 8)).stage(blocks.MoeFfn("l", spec))
    weights = {key: np.ones(spec.shape, "f4") for key, spec in flow.build().params.items()}
    return rlx.compile(flow, weights, profile=profile(**tables))


def embedding(**tables: Any) -> Any:
    """A model that runs forward alone, on requests."""
    return rlx.load(FIXTURES / "bert" / "bare_v5", profile=profile(**tables))


def over(axis: str, family: str) -> Any:
    """A function that compiles a family over two devices along `data` and two along another axis."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", axis))
    return lambda **tables: rlx.compile(recipe(family), profile=profile(**tables), mesh=mesh)


def for_h200(**tables: Any) -> Any:
    """The program that generates, planned for a GPU."""
    return llama("extend", fusion={"target": "h200"}, **tables)


def windowed(**tables: Any) -> Any:
    """A model with ring buffers."""
    return rlx.load(FIXTURES / "gemma3_text" / "pattern_v4", profile=profile(**tables))


def custom_classes(**tables: Any) -> Any:
    """`llama` with a policy of its own, bf16 products and norms for more casts."""
    classes = {"compute": "bf16"} if not tables else {"compute": "bf16", **tables["precision"]["classes"]}
    return llama(precision={"mixed": "custom", "classes": classes})


over_llama, over_groups = (over("tensor", family) for family in ("llama", "qwen35"))


def visible(model: Any) -> list[str]:
    """What can be seen of a compiled model: its MIR, the plan of its LIR, its parameters, and the sizes of requests."""
    programs = getattr(model, "model", model).programs
    settings, forms = programs.settings, programs.layout.types().items()
    template = getattr(model, "model", model).template()
    sharded = [s.spec for s in (programs.storage_shardings() or {}).values()]
    constrained = str(programs.model_sharding and programs.model_sharding.input_sharding(
        tensor_type(("batch", "seq"), "i32", ""), (2, 2)).spec)  # fmt: skip
    return [str(template.mir), repr(settings.plan), str([*forms]), str(sharded), constrained, str(settings.buckets),
            str(settings.loop)]  # fmt: skip


@functools.cache
def visible_by_default(make: Any) -> list[str]:
    """What can be seen of a model with the default profile."""
    return visible(make())


# Settings of messages and checks, which no program has: test_fusion_report.py, `test_verbose`, test_checked_calls.py.
OF_CHECKS = {"name", "fusion.assert_clean", "passes.verbose", "checks.ids"}
DIVIDED: dict[str, tuple[Any, Any]] = {
    **{role: (over_llama, []) for role in ("heads", "kv_heads", "ffn", "vocab")},
    **{role: (over_llama, ["tensor"]) for role in ("sequence", "embedding", "channel")},
    "batch": (over_llama, ["data", "tensor"]), "hidden": (over_llama, ["data"]),
    "experts": (over("expert", "mixtral"), []), "groups": (over_groups, []),
}  # fmt: skip
"""For each role a model over four devices that axes divide otherwise."""
SILENT = None
SETTINGS: dict[str, list[tuple[Any, Any, str | None]]] = {
    "fusion.policy": [(flat, "fusable", "no block has a better rule"), (llama, "fusable", "")],
    "fusion.assert_clean": [(llama, True, SILENT)],
    "fusion.target": [(llama, "tpu", "")],
    "fusion.disable": [
        (llama, ["mark_elementwise_regions"], "'mark_elementwise_regions' would change nothing here"),
        (llama, ["fuse_swiglu"], "'fuse_swiglu' would change nothing here"),
        (llama, ["cse"], "'cse' would change nothing here"),
        (repeating, ["cse"], ""),
    ],
    "passes.dce": [(flat, False, "'dce' would change nothing here"), (llama, False, "")],
    "passes.cse": [(llama, False, "'cse' would change nothing here"), (repeating, False, "")],
    "passes.constant_folding": [
        (generating, False, "'constant_folding' would change nothing here"),
        (repeating, False, ""),
    ],
    "precision.compute": [(ids_only, "f32", "nothing is computed in floating point"), (small, "bf16", "")],
    "precision.matmul": [(flat, "high", "there is no matrix product"), (small, "high", "")],
    "precision.mixed": [
        (ids_only, "auto", "nothing is computed in floating point"),
        (small, "auto", ""),
        (small, "custom", "precision.classes is f32 for all"),
    ],
    **{
        f"precision.classes.{name}": [(small, "bf16", "precision.mixed is not 'custom'"), (custom_classes, "f16", "")]
        for name in ("compute", "reduction", "elementwise", "movement")
    },
    "precision.weights": [(flat, "bf16", "there is no floating parameter"), (small, "bf16", "")],
    "precision.kv": [
        (llama, "bf16", "only prefill, extend and explicit have cached keys and values, and this model runs forward"),
        (embedding, "bf16", "only prefill, extend and explicit"),
        (generating, "bf16", ""),
        (lambda **t: llama("extend", **t), "int8", ""),
    ],
    "donation.state": [
        (llama, False, "there is no state, and this model runs forward"),
        (generating, False, ""),
        (lambda **t: llama("prefill", **t), False, ""),
    ],
    "donation.strict": [
        (llama, True, ""),
        (generating, True, ""),
        (lambda **t: llama("extend", donation={"state": False, **t["donation"]}), True, "donation.state is false"),
    ],
    "donation.inputs": [(generating, ["input_ids"], "requests come from the host"), (small, ["x"], "")],
    "layers.roll": [(small, "scan", "no layers repeat"), (llama, "scan", "")],
    "layers.remat": [
        (llama, "layer", "only the program train recomputes anything, and this model runs forward"),
        (generating, "dots", "this model runs forward, prefill, extend"),
        (trained, "dots", "no layers repeat"),
        (lambda **t: llama("train", **t), "dots", ""),
    ],
    "attention.implementation": [(small, "cudnn", "there is no attention"), (generating, "xla", "")],
    "buckets.prompt": [(llama, [8], "this model pads nothing"), (generating, [8], "")],
    "buckets.batch": [(llama, [8], "this model pads nothing"), (generating, [8], "")],
    "buckets.context": [(embedding, [32], "only prefill and extend have a cache"), (generating, [64], "")],
    "buckets.spare": [
        (generating, 3, "no layer attends in a window"),
        (llama, 3, "only prefill and extend have rings"),
        (windowed, 3, ""),
    ],
    "buckets.programs": [(generating, 9, "")],
    "buckets.on_recompile": [(llama, "error", "no list of buckets limits the sizes"), (generating, "error", "")],
    "checks.ids": [(flat, "all", "no op reads a table by ids"), (generating, "all", SILENT)],
    **{
        f"sharding.{role}": [
            (flat, ["x"], "there is no mesh"),
            *([(over_two, ["x"], "the mesh has the axes 'data'")] if role != "batch" else []),  # or it divides nothing
            (over_two, ["x", "data"], SILENT),
            (*DIVIDED[role], ""),
        ]
        for role in ROLES
    },
    "backend.cpu.weight_layout": [(flat, "in_out", "there is no Linear"), (small, "in_out", "")],
    "backend.cpu.merge": [(small, True, "no two projections of one input can be merged"), (generating, False, "")],
    "backend.cuda.merge": [(generating, False, "it is for cuda, and the target is cpu")],
    "fusion.skip": [(llama, True, "the fusion passes leave their ops to XLA")],
    "backend.cpu.skip_fusion": [(small, True, "the fusion passes leave their ops to XLA")],
    "backend.cpu.unfuse_regions": [(small, False, "the fusion passes leave their ops to XLA")],
    "backend.cpu.products": [(flat, "row", "there is no matrix product"), (small, "row", "")],
    "backend.cpu.experts": [(small, "blocked", "there is no mixture of experts"), (mixture, "blocked", "")],
    "backend.cpu.kernels": [(small, "off", "there are no experts"), (mixture, "off", "kernels run on H100")],
    "backend.cuda.kernels": [(for_h200, "off", "")],
    "backend.cpu.compiler_options": [(small, {"xla_cpu_enable_fast_min_max": True}, "")],
    "backend.cpu.steps_per_dispatch": [(llama, 2, "only a CausalLM generates"), (generating, 2, "")],
    "backend.cpu.stop_early": [(embedding, False, "only a CausalLM generates"), (generating, False, "")],
}
"""For each setting: a model, a value, and why it has nothing to act on there; "" where it changes the program, plan,
parameters or request sizes, and SILENT where it only acts."""


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("place", "make", "value", "reason"),
    [pytest.param(p, *row, id=f"{p}-{i}") for p, rows in SETTINGS.items() for i, row in enumerate(rows)],
)
def test_a_setting_acts_or_says_that_it_does_not(place: str, make: Any, value: Any, reason: str | None) -> None:
    first, *rest = place.split(".")
    table: Any = value
    for key in reversed(rest):
        table = {key: table}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = make(**{first: table})
    found = [str(w.message) for w in told if w.category is RlxWarning]
    assert len(found) == bool(reason)
    for message in found:
        assert re.search(rf"^\w+: {re.escape(place)} = .* has no effect: .*{re.escape(str(reason))}", message)
    assert reason != "" or visible(model) != visible_by_default(make)


def test_every_setting_is_above() -> None:
    """Idle where it is known to be: only those that act everywhere never are. And visible, or of checks, or never of
    effect."""
    rows = {
        place: row
        for place, row, _ in iter_settings(rlx.CompileProfile())
        if not re.match(r"backend\.(cuda|rocm|tpu)\.", place)
    }
    idle, shown = (
        {p for p, found in SETTINGS.items() if any(test(r[2]) for r in found)}
        for test in (bool, lambda reason: reason == "")
    )
    assert not {place for place, row in rows.items() if row.no_effect is not effects.always} - idle - OF_CHECKS
    never = {place for place, row in rows.items() if row.no_effect is effects.never} | {"backend.cpu.kernels"}
    assert set(rows) == shown - {"backend.cuda.kernels"} | OF_CHECKS | never


def test_no_preset_is_idle_where_it_belongs() -> None:
    for name in PRESETS:
        if name.startswith("train"):
            recipe = Llama32Flow.for_prefill(LLAMA)
            rlx.compile(recipe, checkpoint(), profile=rlx.CompileProfile.preset(name), program="train")
        elif name != "encoder":
            rlx.CausalLM(Llama32Flow.for_prefill(LLAMA), checkpoint(), profile=rlx.CompileProfile.preset(name))
    rlx.load(FIXTURES / "bert" / "bare_v5", profile=rlx.CompileProfile.preset("encoder"))
