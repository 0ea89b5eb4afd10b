"""Liveness and the arena: no two values that live at once share a byte, and nothing lives longer than it must."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule
from rlx_jax.ir.graph import Graph as IrGraph
from rlx_jax.ir.graph import Leaf, Value
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.inspect.buffers import ALIGNMENT, BufferPlan, activation_bytes, fingerprint, plan_buffers
from rlx_jax.lowering.lir.plan import Plan
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.lowering.mir.small import specialise
from rlx_jax.models.llama import LlamaConfig, weight_specs
from tests import small

CONFIG = LlamaConfig.from_hf(small.LLAMA)


def check(graph: IrGraph, plan: BufferPlan) -> None:
    """The plan is sound: aligned, disjoint while alive, alive from birth to last use, every byte accounted for."""
    for slot in plan.slots:
        assert slot.offset % ALIGNMENT == 0 and slot.offset + slot.life.size <= plan.arena_size
    for a, b in itertools.combinations(plan.slots, 2):
        if a.life.overlaps(b.life):
            assert a.offset + a.life.size <= b.offset or b.offset + b.life.size <= a.offset
    for number, node in enumerate(graph.nodes):
        for value in (*node.inputs, *((v for v in graph.outputs) if number == len(graph.nodes) - 1 else ())):
            root = plan.views[value].root if value in plan.views else value
            assert root not in plan.views
            slot_ = plan.slot(root)
            if slot_ is not None:
                assert slot_.life.born <= number <= slot_.life.dies
        for index, t in enumerate(node.types):
            value = Value(number, index)
            has = plan.slot(value) is not None
            assert has == (not isinstance(node.op, Leaf) and value not in plan.views and t.is_static)
    assert activation_bytes(graph) <= plan.arena_size <= plan.total_unshared_bytes + ALIGNMENT * len(plan.slots)
    assert plan.bytes_saved == max(0, plan.total_unshared_bytes - plan.arena_size)


def chain(m: GraphModule, x: Any, steps: int) -> Any:
    """x through `steps` functions, one after the other."""
    for _ in range(steps):
        x = m.tanh(x)
    return x


def test_views_take_nothing_and_keep_their_root_alive() -> None:
    """Reshape, cast to the same dtype and rows of the first axis; chains end at the root, offsets add up."""
    m = Graph.mir("views")
    y = m.tanh(m.input("x", (6, 8)))
    rows = m.narrow_(y, 0, 2, 3)  # 64 bytes in
    last = m.narrow_(m.reshape_(m.cast(rows, "f32"), (3, 2, 4)), 0, -1, 1)  # 64 more
    column = m.narrow_(y, 1, 0, 1)  # no view: its rows are not beside each other
    m.set_outputs([chain(m, m.exp(m.input("z", (6, 8))), 3), m.neg(last), column])
    plan = plan_buffers(m.graph)
    check(m.graph, plan)
    assert plan.views[rows].root == y and plan.views[rows].byte_offset == 64
    assert plan.views[last].root == y and plan.views[last].byte_offset == 128
    assert column not in plan.views
    slot = plan.slot(y)
    neg = next(n for n, node in enumerate(m.graph.nodes) if node.op.text() == "neg")
    assert slot is not None and slot.life.dies == neg  # through two views


def extend_graph() -> IrGraph:
    """The cached step of a Llama, for 2 rows, 1 token and 8 slots."""
    built = rlx.Llama32Flow(CONFIG).assemble().build(weight_specs(CONFIG))
    hir = derive(expand_composites(built.hir, built.types), "extend", built.types, False)
    graph = Graph.from_hir(hir).into_graph()
    return specialise(graph, {"batch": 2, "seq": 1, "context": 8}, built.types)


def test_a_donated_cache_is_updated_where_it_is() -> None:
    """A layer's new cache is a view of the state; without donation it is a value like others."""
    graph = extend_graph()
    check(graph, plan_buffers(graph))
    cache = 2 * 8 * 2 * 4 * 4
    assert activation_bytes(graph, in_place=False) >= activation_bytes(graph) + 2 * cache
    (region,) = (n.op.regions()[0] for n in graph.nodes if n.op.regions())
    inner = plan_buffers(region)
    check(region, inner)
    assert {region.nodes[v.node].op.name() for v in inner.views} == {"cache_update", "reshape"}
    layer = sum(p.type.nbytes for p in region.params() if len(p.programs) > 1)
    assert activation_bytes(graph, scan=True) >= activation_bytes(graph) + layer > activation_bytes(graph) + 4000
    (workspace,) = (s for s in plan_buffers(graph).slots if s.life.workspace)
    assert workspace.life.size == activation_bytes(region) and workspace.life.born == workspace.life.dies


@given(st.data())
@settings(max_examples=40)
def test_random_graphs_have_sound_plans(data: st.DataObject) -> None:
    """Any dag of functions, products, views and concatenations."""
    m = Graph.mir("random")
    values = [m.input("x", (4, 8)), m.input("y", (8, 4))]
    for _ in range(data.draw(st.integers(1, 15))):
        x, y = (values[data.draw(st.integers(0, len(values) - 1))] for _ in range(2))
        rows, columns = m.shape(x).shape
        match data.draw(st.sampled_from(("tanh", "add", "reshape", "narrow", "mm", "concat"))):
            case "tanh":
                values.append(m.tanh(x))
            case "add":
                values.append(m.add(x, x))
            case "reshape":
                values.append(m.reshape_(x, (columns, rows)))
            case "narrow":
                values.append(m.narrow_(x, data.draw(st.integers(0, 1)), 0, 1 + (rows > 1 < columns)))
            case "mm":
                values.append(m.mm(x, m.transpose_(x, (1, 0))))
            case _:
                if m.shape(y).shape == m.shape(x).shape and m.shape(x).size < 2**12:
                    values.append(m.concat_([x, y], 0))
    m.set_outputs(list(dict.fromkeys([values[-1], values[data.draw(st.integers(0, len(values) - 1))]])))
    check(m.graph, plan_buffers(m.graph))


def test_the_fingerprint_is_that_of_the_whole_content() -> None:
    """Constants, attributes, closures and the plan change it; building it again does not."""

    def made(value: float = 1.0, eps: float = 1e-5, name: str = "m", shift: int = 1, **options: Any) -> str:
        flow = rlx.ModelFlow(name).input("x", (2, 8)).rms_norm("g", eps)
        flow = flow.custom(lambda e, x: e.jax(lambda a: a + shift, x + e.constant(value)))
        lir = flow.build({"g": np.ones(8, np.float32)}).into_graph_module().into_lir()
        plan = Plan(**{**lir.plan.__dict__, **options})
        return fingerprint(Graph.from_lir(type(lir)(lir.graph, plan)).into_lir())

    first = made()
    assert first == made() and len(first) == 16 and int(first, 16) >= 0
    changed = [made(value=2.0), made(eps=1e-6), made(name="n"), made(shift=2), made(scan=True)]
    assert len({first, *changed}) == 6
