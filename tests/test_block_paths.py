"""Block paths name one block each: in dumps, summaries, reports, and as the names of caches."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import GraphModule
from rlx_jax.blocks import BlockStage, Custom, Linear, Named, Repeat, RopeTables, Sequence
from rlx_jax.ir.graph import Graph, Leaf
from rlx_jax.ir.paths import path_text
from tests.small import w

H = 4


def x_flow() -> rlx.ModelFlow:
    return rlx.ModelFlow("m").input("x", ("batch", "seq", H))


WEIGHTS = {f"w{i}": w(H, H, seed=i) for i in range(6)}


def paths(graph: Graph) -> list[str]:
    """The block paths of all nodes that are no leaves and no regions, each once, in order."""
    nodes = (n for _, n in graph.walk() if not isinstance(n.op, Leaf) and not n.op.regions())
    return list(dict.fromkeys(path_text(n.origin.path) for n in nodes))


def linear(i: int) -> BlockStage:
    return Linear(f"w{i}")


def tanh(name: str) -> Custom:
    return Custom(lambda e, x: e.tanh(x), name)


def read(*stages: BlockStage) -> list[str]:
    flow = x_flow().raw_stages(stages)
    return paths(flow.build(WEIGHTS).hir)


CASES: dict[str, tuple[list[BlockStage], list[str]]] = {
    "two stacks": ([Repeat(2, linear), Repeat(3, linear)], ["layers.{i}.w{i}", "layers_2.{i}.w{i}"]),
    "stacks of other names": ([Repeat(2, linear), Repeat(2, linear, "more")], ["layers.{i}.w{i}", "more.{i}.w{i}"]),
    "a named layer": ([Repeat(2, lambda i: Named("ffn", linear(i)))], ["layers.{i}.ffn.w{i}"]),
    "a layer named after its number": ([Repeat(2, lambda i: Named(f"layer{i}", linear(i)))], ["layers.{i}.w{i}"]),
    "an edited layer": ([Repeat(2, lambda i: Sequence([Named(f"layer{i}", linear(i)), tanh("mine")]))],
        ["layers.{i}.w{i}", "layers.{i}.mine"]),
    "a number in a name": ([Repeat(2, lambda i: Named(f"ffn{i + 3}", linear(i)))], ["layers.{i}.ffn{i+3}.w{i}"]),
    "a stack in a stack": ([Repeat(2, lambda i: Repeat(2, lambda j: Linear(f"w{2 * i + j}"), "inner"))],
        ["layers.{i}.inner.0.w{2i}", "layers.{i}.inner.1.w{2i+1}"]),
    "customs": ([tanh("scale"), tanh("scale"), tanh("other"), tanh("scale")], ["scale", "scale_2", "other", "scale_3"]),
    "a name that is taken": ([tanh("a"), tanh("a_2"), tanh("a")], ["a", "a_2", "a_3"]),
    "named": ([Named("a", tanh("f")), Named("a", tanh("f"))], ["a.f", "a_2.f"]),
    "named alike inside": ([Named("a", Sequence([tanh("f"), tanh("f")]))], ["a.f", "a.f_2"]),
    "the same block again": ([*(again := [Named("a", tanh("f")), Named("a", tanh("g"), again=True)]), *again],
        ["a.f", "a.g", "a_2.f", "a_2.g"]),
    "one weight twice": ([linear(0), linear(0)], ["w0", "w0_2"]),
    "customs in layers": ([Repeat(2, lambda i: Sequence([tanh("f"), linear(i), tanh("f")]))],
        ["layers.{i}.f", "layers.{i}.w{i}", "layers.{i}.f_2"]),
    "tables": ([RopeTables.theta(4, name="a"), RopeTables.theta(4, 5.0, name="b"), tanh("f")],
        ["rotary_emb", "rotary_emb_2", "f"]),
}  # fmt: skip


def test_paths() -> None:
    """The first of a name has it, a later one gets a number."""
    for name, (stages, want) in CASES.items():
        assert read(*stages) == want, name


MODULES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "blocks": (("a", "a", "b", "a"), ["a", "a_2", "b", "a_3"]),
    "a name that is taken": (("a", "a_2", "a"), ["a", "a_2", "a_3"]),
    "inside": (("a.f", "a.f", "f"), ["a.f", "a_2.f", "f"]),
}  # fmt: skip


def test_paths_of_a_module() -> None:
    """As those of a flow; also where a finished graph is gone on with."""
    for names, want in MODULES.values():
        m = GraphModule.hir("m")
        m.set_outputs([m.input("x", (2,))])
        graph = blocks_of(m, *names).finish()
        assert paths(graph) == want
        again = paths(blocks_of(GraphModule.from_hir(graph), names[0]).finish())
        assert len(set(again)) == len(want) + 1


def blocks_of(m: GraphModule, *names: str) -> GraphModule:
    """With a block for each of the names behind the output, inside of others where a name has dots."""

    def inside(segments: list[str]) -> Any:
        return m.named(segments[0], lambda _: inside(segments[1:])) if segments else m.relu(m.outputs[0])

    for name in names:
        m.set_outputs([inside(name.split("."))])
    return m


leaves = st.builds(lambda name: [name], st.sampled_from("ab"))
trees = st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=8)


@settings(max_examples=12, deadline=None)
@given(trees=st.lists(trees, min_size=1, max_size=3), layers=st.integers(1, 3))
def test_no_two_blocks_share_a_path(trees: list[Any], layers: int) -> None:
    """Any nesting of names, in and out of layers: as many paths as stages."""
    made = 0

    def stage(tree: Any) -> BlockStage:
        nonlocal made
        if isinstance(tree, str):
            made += 1
            return tanh(tree)
        inner = Sequence([stage(part) for part in tree])
        return Named("ab"[len(tree) % 2], inner)

    def layer(i: int) -> BlockStage:
        return Sequence([stage(tree) for tree in trees] + [Custom(lambda e, x: x * (i + 1), "apart")])

    found = paths(x_flow().raw_stages([Repeat(layers, layer), Repeat(layers, layer)]).build().hir)
    assert len(set(found)) == len(found) == made + 2 * layers
