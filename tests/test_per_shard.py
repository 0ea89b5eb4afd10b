"""The program of one device of a mesh: it computes what the whole program does, its kernels too; what has none."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.compiler import passes
from rlx_jax.compiler.pipeline import make_lir
from rlx_jax.ir.graph import BodyInput, Builder, TypeCache
from rlx_jax.ir.kernel_group import AttentionGroup, KernelGroup
from rlx_jax.ir.ops.collective import AllGather, AllReduce
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir import implementations
from rlx_jax.lowering.lir.attention_groups import run_attention
from rlx_jax.lowering.lir.per_shard import Divide, UndividedError, reshape_groups
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.lowering.lir.product_groups import op_refusal, run_group
from rlx_jax.runtime.program_key import ProgramKey
from tests.divided import V, mesh, recipe, weights
from tests.interpreter import interpreted, needs_mosaic

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, V, n).tolist() for n in (3, 9, 6)]
FAMILIES = ["llama tied", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gpt2", "qwen2", "gemma2"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the whole program over the mesh: a padded vocabulary, biases, rings, caps; the state stays in place."""
    want = rlx.CausalLM(recipe(family), weights(family), mesh=mesh("tensor", 2)).generate(PROMPTS, max_new_tokens=12)
    monkeypatch.setattr(passes, "uses_kernels", lambda job, _="": job.sizes is not None and job.program == "extend")
    ours = rlx.CausalLM(recipe(family), weights(family), mesh=mesh("tensor", 2))
    assert ours.generate(PROMPTS, max_new_tokens=12) == want
    steps = [e for key, e in ours.model.programs.executables.items() if key.program == "extend"]
    assert steps and all(e.lir.shard is not None and not (e.donation and e.donation.state_problem()) for e in steps)


def planned(
    monkeypatch: pytest.MonkeyPatch, kinds: str = "tensor", devices: int = 2, rows: int = 1, **fields: Any
) -> Lir:
    """Return a decode step of some rows of a small Llama over a mesh, planned for an H200 in bf16."""
    monkeypatch.setattr(implementations, "has_mosaic", lambda: True)
    config = {
        "rms_norm_eps": 1e-6, "vocab_size": 128, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    precision = {"compute": "bf16", "weights": "bf16", **fields.pop("precision", {})}
    profile = rlx.CompileProfile().replace(**{"fusion": {"target": "h200"}, "precision": precision, **fields})
    flow = rlx.Llama32Flow.for_prefill(config)
    model = rlx.CausalLM(flow, flow.shapes(), profile=profile, max_positions=64, mesh=mesh(kinds, devices)).model
    programs = model.programs
    template = programs.template(ProgramKey(model.name, "extend", last_only=True))
    sizes = {"batch": rows * programs.settings.buckets.row_multiple, "seq": 1}
    return make_lir(template, {symbol: sizes.get(symbol, 64) for symbol in template.symbols}, programs.settings)


pytestmark = pytest.mark.filterwarnings("ignore:.*the plan is for another device", "ignore:.*has no effect")


@needs_mosaic
@pytest.mark.parametrize("scheme", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_kernels_of_a_shard(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product and attention of a layer has one, with the ops around it; two sums over devices a layer follow."""
    lir = planned(monkeypatch, precision={"weights": scheme})
    assert lir.shard is not None and (scheme == "int8" or all("by matvec" in line for line in lir.products()))
    assert all("decode_attention" in line for line in lir.attention())
    assert sum(isinstance(node.op, AllReduce) for node in lir.shard.graph.nodes) == 4
    groups: dict[str, Any] = {
        op.text(): op for n in lir.shard.graph.nodes if isinstance(op := n.op, KernelGroup | AttentionGroup)
    }
    for group in list(groups.values())[slice(1, 3) if scheme == "bf16" else slice(None)]:  # the others if slow
        run: Any = run_group if isinstance(group, KernelGroup) else run_attention
        types = [node.types[0] for node in group.body.nodes if isinstance(node.op, BodyInput)]
        shapes = [(tuple(map(int, t.shape)), t.dtype) for t in types]
        arrays = [
            jnp.full(shape, 5, dtype) if dtype == np.int32 else jnp.asarray(RNG.normal(size=shape), dtype)
            for shape, dtype in shapes
        ]
        found = interpreted(run, group, *arrays)
        for got, want in zip(found, group.eval(*arrays), strict=True):
            scale = float(jnp.abs(want.astype(jnp.float32)).max())
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02 * scale)


# The mesh and the fields of a profile, and a part of the reason why there is no program of one device; None for none.
PLANS: dict[str, tuple[str, int, dict[str, Any], str | None]] = {
    "off": ("tensor", 2, {"backend": {"cuda": {"kernels": "off"}}}, None),
    "a scan": ("tensor", 2, {"layers": {"roll": "scan"}}, "layers run in a scan"),
    "switched off": ("tensor", 2, {"fusion": {"target": "h200", "disable": ["per_shard"]}}, None),
    "rows": ("data tensor", 4, {}, "over a mesh, embed_tokens: shard(batch, sequence, -) divides a value"),
    "few key heads": ("tensor", 8, {}, "over a mesh, layers.0.self_attn: attention"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if PLANS[c][3] is None else c for c in PLANS])
def test_where_there_is_none(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA divides the whole program, and the report says why."""
    kinds, devices, fields, reason = PLANS[case]
    lir = planned(monkeypatch, kinds, devices, **fields)
    lines = "\n".join(lir.products())
    assert lir.shard is None and "matvec" not in lines
    assert ("no kernel" in lines) == (reason is not None) and (reason or "") in lines, lines


def test_required_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not replaced by XLA's division in silence."""
    with pytest.raises(errors.UnsupportedError, match="'on'.*layers.0.self_attn"):
        planned(monkeypatch, devices=8, backend={"cuda": {"kernels": "on"}})


def test_results_that_are_no_shards() -> None:
    """Columns and rows on the same mesh axis have an outer product of which each device computes one block alone."""
    model = rlx.CausalLM(recipe("llama tied"), weights("llama tied"), mesh=mesh("tensor", 2)).model
    sharding = model.programs.settings.model_sharding
    assert sharding is not None
    types = TypeCache()
    b = Builder("m", types)
    column, row = (b.leaf(BodyInput(i, type=TensorType(s, np.dtype("f4")))) for i, s in enumerate([(4, 1), (1, 4)]))
    graph = b.finish([b(Binary("mul"), column, row)])
    with pytest.raises(UndividedError, match="mul has no rule"):
        Divide(sharding, types).graph(graph, [(("tensor",), ()), ((), ("tensor",))])


def test_a_gathered_result_joins_no_kernel() -> None:
    """A gather over devices has no meaning within a kernel."""
    row = TensorType((1, 1, 64), np.dtype("f4"))
    assert op_refusal(AllGather(2, 2, ("tensor",)), (row,), 64, reductions=False)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_ops_without_a_rule(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts and recurrences are named, and the whole program runs."""
    monkeypatch.setattr(passes, "uses_kernels", lambda job, _="": job.sizes is not None and job.program == "extend")
    ours = rlx.CausalLM(recipe(family), weights(family), mesh=mesh("tensor", 2))
    assert ours.generate(PROMPTS[:1], max_new_tokens=2)
    (step,) = (e for key, e in ours.model.programs.executables.items() if key.program == "extend")
    assert step.lir.shard is None and "of divided operands has no rule" in step.lir.refusal


def test_axes_of_a_reshape() -> None:
    """Axes with as many entries are a group; axes of one entry belong to none."""
    assert reshape_groups((1, 1, 1024), (1, 2, 512)) == [([2], [1, 2])]
    assert reshape_groups((2, 3, 4), (6, 1, 2, 2)) == [([0, 1], [0]), ([2], [2, 3])]
    assert reshape_groups((1, 1), ()) == []


def test_options_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over a mesh set them, unless the profile does; devices without kernels, and `off`, do not."""
    option, found = "xla_gpu_graph_min_graph_size", []
    for backend in ({}, {"compiler_options": {option: 7}}, {"kernels": "off"}):
        found.append(planned(monkeypatch, backend={"cuda": backend}).plan.compiler_options.get(option))
    other_device = planned(monkeypatch, fusion={"target": "a100"}).plan.compiler_options
    assert found == [2, 7, None] and option not in other_device
    no_triton = {"xla_gpu_enable_triton_gemm": False}
    for asked, want in (({}, no_triton), ({option: 7}, {option: 7, **no_triton})):
        lir = planned(monkeypatch, rows=64, backend={"cuda": {"compiler_options": asked}})
        assert lir.plan.compiler_options == want
    lir = planned(monkeypatch, rows=64, precision={"weights": "int8"})
    assert "packed_tiles" in {choice.implementation for choice in lir.plan.choices.values()}
    assert lir.plan.compiler_options == {option: 2}
