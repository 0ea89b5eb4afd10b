"""A graph before and after a rewrite: the verifier, the same values in NumPy, and the same values compiled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.passes import LEFT_TO_XLA, PIPELINE, Job
from rlx_jax.compiler.settings import plain
from rlx_jax.ir.graph import BodyInput, Builder, Constant, Graph, Leaf, Node, Param, StateRead, TypeCache, Value
from rlx_jax.ir.paths import bind_path
from rlx_jax.ir.region import Repeat, roll
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.hir.weights import merge_linears, merge_ropes
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.lir.plan import programs_of, state_types
from rlx_jax.lowering.lower import expand_composites, lower
from rlx_jax.lowering.mir.small import dce, specialise
from tests.fuzz.meaning import Array, Feeds, evaluate, weight, wide
from tests.fuzz.sketch import UNIT, Case, Known, difference
from tests.op_table import SIZES

Step = Callable[[Graph, TypeCache], Graph]
Program = tuple[str, Case, Graph, bool]
"""What to compile: a name, the case to compare with, a graph that came of it, and whether to scan regions."""
StateArrays = dict[str, Any]


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

        Constants that a step makes are rounded to their dtype. A step that does not fold makes none, or exact ones,
        and then values agree to the last digits.
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
            self.compare(name, outputs, written, rounded=not constants_of(after) <= self.constants)
        return new

    def expect(self, name: str, what: str, got: Any, want: Any) -> None:
        if got != want:
            raise Mismatch(f"{name}: {what} {got}, expected {want}; before:\n{self.case}")

    def compare(self, name: str, outputs: Sequence[Any], written: Mapping[Any, Any], rounded: bool) -> None:
        """Outputs and state against the case's own."""
        self.expect(name, "number of outputs", len(outputs), len(self.case.outputs))
        self.expect(name, "states written", set(written), set(self.case.state))
        for i, (got, k) in enumerate(zip(outputs, self.case.outputs, strict=True)):
            self.close(name, f"output {i}", got, k, rounded)
        for key, k in self.case.state.items():
            self.close(name, f"state {key}", written[key], k, rounded)

    def close(self, name: str, what: str, got: Any, k: Known, rounded: bool) -> None:
        got = np.asarray(got)
        self.expect(name, f"{what}: shape", got.shape, k.array.shape)
        if not k.is_float:
            worst, allowed = difference(wide(got), k.array), 0.0
        else:
            worst = difference(wide(got), k.array)
            scale = float(np.abs(k.array).max(initial=0.0))
            allowed = 4 * k.error + UNIT[k.type.dtype] * scale if rounded else 1e-9 * max(scale, 1.0)
        if not worst <= allowed:
            raise Mismatch(
                f"{name}: {what} {k.type} differs by {worst:.3g}, allowed {allowed:.3g}; before:\n{self.case}"
            )


OPTIONAL = tuple(p.name for p in PIPELINE if p.level == "mir" and p.kind != "program" and p.name not in LEFT_TO_XLA)
"""The passes that change no number of a graph of tensor ops, but for those that leave it as it is."""


def check_passes(case: Case, start: Graph, fired: Counter[str]) -> Graph:
    """Every pass alone on `start`, a graph that came of `case`, and all of them in turn; the graph after all."""
    checker, graph = Checker(case), start
    checker.same(start, "start", folds=False)
    job = Job(plain(), case.types)
    for step in (p for p in PIPELINE if p.name in OPTIONAL):
        name = step.name
        alone = step(start, job).graph
        checker.same(alone, f"{name} alone")
        after = step(graph, job).graph
        checker.same(after, f"{name} in turn")
        fired[name] += structure(alone) != structure(start) or structure(after) != structure(graph)
        graph = after
    return graph


def check_tensor_graph(case: Case, fired: Counter[str]) -> list[Program]:
    """Every pass, and rolling, on a MIR graph; what to compile."""
    last, rolled = check_passes(case, case.graph, fired), check_rolling(case)
    programs = [
        ("first, unrolled", case, case.graph, False),
        ("after all passes, scanned", case, last, True),
        ("first, scanned", case, case.graph, True),
        ("after all passes, unrolled", case, last, False),
    ]
    return [*programs, ("rolled again, scanned", case, rolled, True)] if rolled is not None else programs


def check_lowering(case: Case, fired: Counter[str]) -> list[Program]:
    """HIR expanded, merged and lowered by either policy, then every pass; what to compile."""
    checker, types, programs = Checker(case), case.types, []
    expanded = expand_composites(case.graph, types)
    linears = merge_linears(expanded, types).graph
    merged = merge_ropes(linears, types).graph
    fired["merge_linears"] += structure(linears) != structure(dce(expanded, types))
    fired["merge_ropes"] += structure(merged) != structure(linears)
    for name, blocks in (("expanded", expanded), ("merged", merged)):
        checker.same(blocks, name, "hir", folds=False)
        for policy in ("direct", "fusable"):
            lowered = lower(blocks, policy, types)
            checker.same(lowered, f"{name}, {policy}", folds=False)
            programs.append((f"{name}, {policy}", case, lowered, False))
            if name == "merged":
                last = check_passes(case, lowered, fired)
                programs.append((f"{name}, {policy}, all passes", case, last, True))
    return programs


def function(graph: Graph, scan: bool) -> Callable[..., tuple[Any, StateArrays]]:
    """The interpreter over `graph`, as a function of parameters, state and inputs."""

    def run(params: Sequence[Any], state: StateArrays, inputs: dict[str, Any]) -> tuple[Any, StateArrays]:
        env = Env(dict(zip(programs_of([graph], scan), params, strict=True)), inputs, dict(state), scan)
        return interpret(graph, env), env.state

    return run


def layer_of(leaf: str, region: str) -> int | None:
    """Which iteration of a region has a state leaf: 2 for `layers.5.k` of `layers.{2i+1}.k`; None for none."""
    index = re.search(r"\{(\d*)i(?:\+(\d+))?\}", region)
    if index is None:
        return None
    before, after = region[: index.start()], region[index.end() :]
    number = leaf.removeprefix(before).removesuffix(after)
    if leaf != f"{before}{number}{after}" or not number.isdigit():
        return None
    layer, rest = divmod(int(number) - int(index[2] or 0), int(index[1] or 1))
    return None if rest or layer < 0 else layer


def arguments(graph: Graph, feeds: Feeds, scan: bool) -> tuple[list[Array], dict[str, Array], Any]:
    """Arrays for `function`: a scanned region's state is stacked."""
    state = {}
    for key in state_types(graph, scan):
        layers = [v for k, v in feeds.state.items() if layer_of(k, key) is not None]
        state[key] = feeds.state[key] if key in feeds.state else np.stack(layers)
    return [weight(p, feeds.weights) for p in programs_of([graph], scan)], state, feeds.inputs


def unstack(state: StateArrays, case: Case) -> StateArrays:
    """The state by layer, of the leaves the case writes."""
    out = {}
    for key in case.state:
        if key in state:
            out[key] = state[key]
        else:
            (found,) = [(v, layer) for k, v in state.items() if (layer := layer_of(key, k)) is not None]
            out[key] = found[0][found[1]]
    return out


QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False  # XLA compiles in a quarter of the time


def check_compiled(programs: Sequence[Program], optimise: bool = False) -> None:
    """Compile graphs together, run them, and compare with NumPy."""
    bound = [(specialise(graph, SIZES, case.types), scan) for _, case, graph, scan in programs]
    functions = [function(graph, scan) for graph, scan in bound]
    given = [arguments(g, case.feeds, scan) for (g, scan), (_, case, _, _) in zip(bound, programs, strict=True)]
    together = jax.jit(
        lambda many: [f(*a) for f, a in zip(functions, many, strict=True)], compiler_options=None if optimise else QUICK
    )
    results = together(given)
    for (name, case, graph, _), (outputs, state) in zip(programs, results, strict=True):
        types = [graph.type(v).dtype for v in graph.outputs]
        checker = Checker(case)
        checker.expect(name, "dtypes", [np.asarray(o).dtype for o in outputs], types)
        checker.compare(name, outputs, unstack(state, case), rounded=True)


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
        with b.at(node.origin):
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
            with b.at(replace(node.origin, path=bind_path(node.origin.path, i))):
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


def check_rolling(case: Case) -> Graph | None:
    """Regions written out, then found again by `roll`: the rolled graph, None where there is nothing to roll."""
    regions = list(regions_of(case.graph))
    if not regions or any(isinstance(n.op, StateRead) for r in regions for n in r.body.nodes):
        return None
    checker = Checker(case)
    plain, bounds = unrolled(case.graph, case.types)
    checker.same(plain, "unrolled", folds=False)
    rolled, _ = roll(plain, bounds, case.types)
    checker.same(rolled, "roll")
    return rolled
