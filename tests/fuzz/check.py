"""A graph before and after a rewrite: the verifier, and the same values in NumPy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx_jax.compiler.passes import LEFT_TO_XLA, PIPELINE, Job
from rlx_jax.compiler.settings import lowering_settings
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Node, Param, StateRead, TypeCache, Value
from rlx_jax.ir.paths import bind_path
from rlx_jax.ir.region import Repeat, roll
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.hir.weights import merge_linears, merge_ropes
from rlx_jax.lowering.lower import expand_composites, lower
from tests.fuzz.sketch import Case, difference
from tests.ops.evaluate import evaluate

UNIT = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-8}
"""Rounding error of one operation, relative; twice the best possible, for functions that are not rounded correctly."""
AMPLIFIED = 500
"""How much larger the error of a result may be than that of the constants that it is made of."""


class Mismatch(AssertionError):
    """A rewrite changed what a graph computes."""


def structure(graph: Graph) -> tuple[Any, ...]:
    """What is equal for graphs that no rewrite has changed."""

    def one(node: Node) -> Any:
        op = node.op
        return (op.count, op.carries, structure(op.body)) if isinstance(op, Repeat) else op

    return tuple((one(n), n.inputs) for n in graph.nodes), graph.outputs, graph.writes


def constants_of(graph: Graph) -> set[Constant]:
    return {node.op for _, node in graph.walk() if isinstance(node.op, Constant)}


@dataclass
class Checker:
    """Compares the graphs that come of one case with it, in NumPy. A graph seen before is not run again."""

    case: Case
    seen: set[Any] = field(default_factory=set)
    constants: set[Constant] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen.add(structure(self.case.graph))
        self.constants |= constants_of(self.case.graph)

    def same(self, after: Graph, name: str, level: str = "mir", folds: bool = True) -> bool:
        """Verify `after`, the result of step `name`, and compare; whether it is a graph not seen before.

        A step that folds computes constants in their own dtypes; else values agree to the last digits.
        """
        case, before = self.case, self.case.graph
        verify(after, level, name, case.types)
        if not folds:
            self.constants |= constants_of(after)
        self.expect(name, "names of outputs", after.output_names, before.output_names)
        self.expect(name, "inputs", [i.input for i in after.inputs], [i.input for i in before.inputs])
        new = structure(after) not in self.seen
        if new:
            self.seen.add(structure(after))
            outputs, written = evaluate(after, case.feeds)
            made = [UNIT.get(op.type.dtype.name, 0.0) for op in constants_of(after) - self.constants]
            self.compare(name, outputs, written, max(AMPLIFIED * max(made, default=0.0), 1e-9))
        return new

    def expect(self, name: str, what: str, got: Any, want: Any) -> None:
        if got != want:
            raise Mismatch(f"{name}: {what} {got}, expected {want}; before:\n{self.case}")

    def compare(self, name: str, outputs: Sequence[Any], written: Mapping[Any, Any], tolerance: float) -> None:
        """Outputs and state against the case's own."""
        self.expect(name, "number of outputs", len(outputs), len(self.case.outputs))
        self.expect(name, "states written", set(written), set(self.case.state))
        rows = [(f"output {i}", got, k) for i, (got, k) in enumerate(zip(outputs, self.case.outputs, strict=True))]
        for what, got, k in [*rows, *((f"state {key}", written[key], k) for key, k in self.case.state.items())]:
            self.expect(name, f"{what}: shape", got.shape, k.array.shape)
            worst = difference(got, k.array)
            if not worst <= tolerance * max(1.0, float(np.abs(k.array).max(initial=0.0))):
                raise Mismatch(f"{name}: {what} {k.type} differs by {worst:.3g}; before:\n{self.case}")


OPTIONAL = tuple(p.name for p in PIPELINE if p.level == "mir" and p.kind != "program" and p.name not in LEFT_TO_XLA)
"""The passes that change no number of a graph of tensor ops, but for those that leave it as it is."""


def check_passes(case: Case, start: Graph) -> None:
    """Every pass alone on `start`, a graph that came of `case`, and all of them in turn."""
    checker, graph = Checker(case), start
    checker.same(start, "start", folds=False)
    job = Job(lowering_settings(), case.types)
    for step in (p for p in PIPELINE if p.name in OPTIONAL and p.when(job) is not None):  # None: it needs a mesh
        name = step.name
        alone = step(start, job).graph
        checker.same(alone, f"{name} alone")
        after = step(graph, job).graph
        checker.same(after, f"{name} in turn")
        graph = after


def check_tensor_graph(case: Case) -> None:
    """Every pass, and rolling, on a MIR graph."""
    check_passes(case, case.graph)
    check_rolling(case)


def check_lowering(case: Case) -> None:
    """HIR expanded, merged and lowered by either policy, then every pass."""
    checker, types = Checker(case), case.types
    expanded = expand_composites(case.graph, types)
    merged = merge_ropes(merge_linears(expanded, types).graph, types).graph
    for name, blocks in (("expanded", expanded), ("merged", merged)):
        checker.same(blocks, name, "hir", folds=False)
        for policy in ("direct", "fusable"):
            lowered = lower(blocks, policy, types)
            checker.same(lowered, f"{name}, {policy}", folds=False)
            if name == "merged":
                check_passes(case, lowered)


def regions_of(graph: Graph) -> Iterator[Repeat]:
    return (node.op for _, node in graph.walk() if isinstance(node.op, Repeat))


def unrolled(graph: Graph, types: TypeCache) -> tuple[Graph, list[list[int]]]:
    """`graph` with every region written out layer by layer, and where the layers of each start."""
    b = Builder(graph.name, types)
    b.inputs = list(graph.inputs)
    mapped: dict[Value, Value] = {}
    bounds: list[list[int]] = []
    for number, node in enumerate(graph.nodes):
        inputs = [mapped[v] for v in node.inputs]
        with b.origin_scope(node.origin):
            if isinstance(node.op, Repeat):
                starts, results = write_out(b, node.op, inputs)
                bounds.append(starts)
            else:
                results = (b.leaf(node.op),) if isinstance(node.op, Leaf) else b.add(node.op, *inputs)
        mapped.update({Value(number, i): v for i, v in enumerate(results)})
    b.writes = [(leaf, mapped[v]) for leaf, v in graph.writes]
    return b.finish([mapped[v] for v in graph.outputs], graph.output_names), bounds


def write_out(b: Builder, op: Repeat, inputs: Sequence[Value]) -> tuple[list[int], tuple[Value, ...]]:
    """Every layer of a region in turn: the node numbers at which they start, and the results."""
    carried, shared, sides, starts = tuple(inputs[: op.carries]), tuple(inputs[op.carries :]), [], [len(b.nodes)]
    for i in range(op.count):
        made: dict[Value, Value] = {}
        for number, node in enumerate(op.body.nodes):
            operands = [made[v] for v in node.inputs]
            with b.origin_scope(replace(node.origin, path=bind_path(node.origin.path, i))):
                match node.op:
                    case BodyInput(index=index):
                        results: tuple[Value, ...] = ((*carried, *shared)[index],)
                    case Param(programs=programs) if len(programs) > 1:
                        results = (b.leaf(replace(node.op, programs=(programs[i],))),)
                    case Leaf():
                        results = (b.leaf(node.op),)
                    case _:
                        results = b.add(node.op, *operands)
            made.update({Value(number, i): v for i, v in enumerate(results)})
        out = [made[v] for v in op.body.outputs]
        carried = tuple(out[: op.carries])
        sides.append(out[op.carries :])
        starts.append(len(b.nodes))
    return starts, (*carried, *(step[i] for i in range(len(sides[0])) for step in sides))


def check_rolling(case: Case) -> None:
    """Regions written out, then found again by `roll`, where there is something to roll."""
    regions = list(regions_of(case.graph))
    if not regions or any(isinstance(n.op, StateRead) for r in regions for n in r.body.nodes):
        return
    checker = Checker(case)
    plain, bounds = unrolled(case.graph, case.types)
    checker.same(plain, "unrolled", folds=False)
    checker.same(roll(plain, bounds, case.types)[0], "roll")
