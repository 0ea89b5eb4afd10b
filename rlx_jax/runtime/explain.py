"""This module explains programs: `model.explain()`, and the parts that models of text and images share.

Findings are facts of a program's plan, its compiled form and its requests that cost time or memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlx_jax.compiler.dumps import graph_text, pass_diffs
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import RequestError, shown
from rlx_jax.inspection.page import Page, make_page
from rlx_jax.inspection.rates import Rates
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection
from rlx_jax.inspection.work import rated_dtype
from rlx_jax.ir.graph import Graph, Node, Param
from rlx_jax.ir.ops.experts import ExpertFfn, GroupedMatMul
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.text import format_bytes, scaled_text
from rlx_jax.lowering.inspect.hlo import block_paths, traced_products, without_layer_numbers
from rlx_jax.lowering.lir.donation import COPIED_ADVICE, result_bytes
from rlx_jax.lowering.lir.experts import BY_NUMBER
from rlx_jax.lowering.lir.plan import PRODUCTS
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.estimate import implementation_of
from rlx_jax.runtime.inspect_program import ProgramFacts, inspect_program, program_facts
from rlx_jax.runtime.model_program import ModelProgram
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs


def explain_program(
    programs: Programs, key: ProgramKey, times: BlockTimes | None = None, steps: int = 1,
    padding: PaddedSizes | None = None,
) -> Inspection:  # fmt: skip
    """Return the full description of a program: its blocks, its largest losses, and what is found about it.

    Args:
        programs, key: the program.
        times: the times of runs of this program; None for estimates.
        steps: the number of steps in a run, for a generation loop.
        padding: the sizes that were requested.
    """
    facts = program_facts(programs, key, ran=times is not None)
    inspection = inspect_program(facts, times, steps)
    return replace(inspection, losses=largest_losses(inspection, facts.rates), findings=findings_of(facts, padding))


def explain_request(
    programs: Programs, run: Callable[[], Any], runs: int, size: int, unit: str = "tokens"
) -> Inspection:
    """Run a request `runs` times in a trace, and return the description of the program that took most of the time.

    Args:
        programs: the programs of the model.
        run: the request.
        runs: the number of traced runs.
        size, unit: the number of tokens or images of the request, for the share of padding in one program.

    Raises:
        RequestError, UnsupportedError: as `profile_run`. Others as `run`.
    """
    times = profile_run([programs], run, runs)
    name = next(name for name in times.programs if name)
    key = next(key for key in programs.executables if key.text == name)
    sizes = dict(key.binding)
    num_computed = sizes.get("batch", 1) * sizes.get("seq", 1)
    one_call = sum(bool(name) for name in times.programs) == 1 and num_computed >= size
    padding = PaddedSizes({unit: (size, num_computed)}) if one_call else None
    return explain_program(programs, key, times, padding=padding)


# -- findings ---------------------------------------------------------------------------------

NARROW = ("bf16", "f16")
# Bytes of a weight, and share of a program's operations, from which a finding is worth reading.
MIN_BYTES, MIN_SHARE = 2**16, 0.01
# Rows up to which a product reads a weight `[out, in]` faster than `[in, out]`. Two cores of an AMD EPYC, f32, ms,
# 4096 x 2048 and 2048 x 8192: 1 row 2.6 and 4.5, 17 and 37; 4 rows 25 and 33, 52 and 129. On a GPU the faster
# implementation of products of one row (`row`) requires a weight `[out, in]`.
FEW_ROWS = {"cpu": 4, "cuda": 1}
# Sizes of one program from which their number is a finding.
MANY_SIZES = 4
# The share of padding from which it is a finding.
MIN_PADDING = 0.1

# Texts and advice for copies of weights.
SCAN_COPY = (
    "the scan over layers copies its weights, {} in each run",
    "layers.roll = 'unroll' in the profile reads the weights of each layer in place",
)
WEIGHT_COPY = (
    "its weight is copied to another layout or dtype in each run, {}",
    "a weight is read in place if it has the dtype that its product computes in, and the orientation of the profile's "
    "backend.*.weight_layout",
)


@dataclass(frozen=True)
class PaddedSizes:
    """The sizes of a request and of the program that runs it, by name: `{"batch": (3, 4)}` is 3 rows in 4.

    `part` is what is padded: all that the program computes, or the cache.
    """

    sizes: dict[str, tuple[int, int]]
    part: str = "what the program computes"

    @property
    def waste(self) -> float:
        """Return the share of the program's values that is padding."""
        return 1.0 - math.prod(requested / padded for requested, padded in self.sizes.values())


def findings_of(facts: ProgramFacts, padding: PaddedSizes | None = None) -> tuple[Finding, ...]:
    """Return all findings about a program."""
    checks = (wide_regions, copied_caches, slow_orientations, unfused_decodes, copied_weights, recompilations)
    findings = [finding for check in checks for finding in check(facts)]
    return (*findings, *(padding_waste(facts, padding) if padding is not None else ()))


def wide_regions(facts: ProgramFacts) -> Iterator[Finding]:
    """Find products of f32 values, those of user functions too, in a program that mostly multiplies 16-bit values."""
    narrow = next((w.dtype for works in facts.work.values() for w in works if w.dtype in NARROW), None)
    if facts.executable is None or narrow is None:
        return
    products = traced_products(facts.executable.lowered.as_text(debug_info=True), block_paths(facts.lir.graph))
    flops, wide = sum(count for _, _, count in products), Counter[str]()
    for path, dtypes, count in products:
        if dtypes == ("f32", "f32"):
            wide[without_layer_numbers(path)] += count
    for path, count in wide.items():
        if flops > 2 * wide.total() and count > MIN_SHARE * flops:
            rates = facts.rates
            seconds = None if rates is None else max(0.0, count / rates.flops["f32"] - count / rates.flops[narrow])
            text = f"its products are of f32 values, while most of the program's are of {narrow}"
            yield Finding("f32", path, text, f"cast the operands to {narrow}, unless they need more precision", seconds)


def copied_caches(facts: ProgramFacts) -> Iterator[Finding]:
    """Find a state that is not updated in place, although it is donated."""
    proof = None if facts.executable is None else facts.executable.donation
    if proof is None or not (problem := proof.state_problem()):
        return
    names = [match[1] for line in proof.copies if (match := re.match(r"(?:ROOT )?%?(\S+) =", line))]
    paths = dict.fromkeys(facts.instructions[n].path for n in names if n in facts.instructions)
    nbytes = 2 * (sum(map(result_bytes, proof.copies)) or proof.state_bytes - proof.aliased_bytes)
    yield Finding(
        "copied cache", without_layer_numbers(next(filter(None, paths), "")),
        f"the state is not updated in place: {problem}",
        COPIED_ADVICE, _memory_seconds(facts, nbytes),
    )  # fmt: skip


def param_reads(facts: ProgramFacts) -> Iterator[tuple[str, Graph, Node, Param, int]]:
    """Yield each parameter that an op reads: the path of its block, the graph, the op, the parameter and its bytes."""
    for graph, node in facts.lir.graph.walk():
        for op in (graph.nodes[value.node].op for value in node.inputs):
            if isinstance(op, Param):
                path = without_layer_numbers(path_text(node.origin.path))
                yield path, graph, node, op, op.type.nbytes * len(set(op.programs))


def slow_orientations(facts: ProgramFacts) -> Iterator[Finding]:
    """Find products of few rows with a weight `[in, out]`."""
    target = facts.lir.plan.target
    sizes: dict[str, tuple[int, int]] = {}
    for path, graph, node, weight, nbytes in param_reads(facts):
        if not isinstance(node.op, PRODUCTS) or node.op.contract == 1 or weight.type.nbytes < MIN_BYTES:
            continue
        rows = graph.type(node.inputs[0]).size // int(graph.type(node.inputs[0]).shape[-1])
        if graph.nodes[node.inputs[1].node].op is weight and rows <= FEW_ROWS.get(target, 0):
            sizes[path] = rows, sizes.get(path, (0, 0))[1] + nbytes
    for path, (rows, nbytes) in sizes.items():
        yield Finding(
            "orientation", path, f"{format_bytes(nbytes)} of weights are stored [in, out], which {target} reads slower "
            f"for {rows} row{'s' if rows > 1 else ''} than [out, in]",
            f"set backend.{target}.weight_layout = 'out_in' in the profile",
        )  # fmt: skip


def unfused_decodes(facts: ProgramFacts) -> Iterator[Finding]:
    """Find packed weights that a program decodes to memory, in full, in each run."""
    decoded: dict[str, tuple[int, str]] = {}
    for path, graph, node, param, nbytes in param_reads(facts):
        if isinstance(node.op, PRODUCTS):
            fuses = node.op.contract == 1
        elif isinstance(node.op, ExpertFfn):
            fuses = implementation_of(facts.lir, graph, node) in BY_NUMBER
        else:
            fuses = isinstance(node.op, Gather | GroupedMatMul) or bool(node.op.regions())
        if facts.lir.stays_packed(param) and not fuses:
            decoded[path] = decoded.get(path, (0, ""))[0] + nbytes, packing_of(param.programs[0]) or ""
    for path, (nbytes, scheme) in decoded.items():
        yield Finding(
            "unfused decode", path, f"its {scheme} weight is decoded to {format_bytes(nbytes)} in memory in each run",
            "products decode a weight where they read it if it is stored [out, in]; precision.weights = 'bf16' decodes "
            "it once, while it is loaded", _memory_seconds(facts, 2 * nbytes),
        )  # fmt: skip


def copied_weights(facts: ProgramFacts) -> Iterator[Finding]:
    """Find kernels that only copy, slice or cast a weight: in each run, and in a scan for each layer."""
    iterations = {param.programs: len(param.programs) for param in facts.lir.graph.params() if param.varies}
    count = max(iterations.values(), default=1) if facts.lir.plan.scan else 1
    readers = facts.programs.layout.readers(facts.lir)
    copies: dict[tuple[str, bool], int] = defaultdict(int)
    for instruction in facts.instructions.values():
        size = result_bytes(f"%x = {instruction.result} copy()") if instruction.has_kernel and instruction.moves else 0
        if instruction.parameter and size >= MIN_BYTES:
            sliced = "slice" in instruction.primitive or "slice" in instruction.opcode
            path = without_layer_numbers(readers.get(instruction.parameter, instruction.path))
            copies[path, sliced] += size * (count if sliced else 1)
    for (path, sliced), nbytes in copies.items():
        text, advice = SCAN_COPY if sliced else WEIGHT_COPY
        cost = _memory_seconds(facts, 2 * nbytes)
        yield Finding("copied weight", path, text.format(format_bytes(nbytes)), advice, cost)


def recompilations(facts: ProgramFacts) -> Iterator[Finding]:
    """Find programs that compiled after warm-up, and a program that compiled for many sizes."""
    for reason in facts.programs.recompile_reasons:
        yield Finding(
            "recompiled", "", reason, "cover these sizes and arguments by warmup, or by the profile's buckets"
        )
    same = {k: e for k, e in facts.programs.executables.items() if k.symbolic == facts.key.symbolic}
    values: dict[str, set[int]] = defaultdict(set)
    for name, size in (pair for key in same for pair in key.binding):
        values[name].add(size)
    dims = {name: sorted(sizes) for name, sizes in values.items() if len(sizes) > 1}
    if len({key.binding for key in same}) >= MANY_SIZES and dims:
        seconds = sum(e.seconds["trace"] + e.seconds["compile"] for e in same.values())
        sizes = "; ".join(f"{name} {', '.join(map(str, each))}" for name, each in dims.items())
        yield Finding(
            "recompiled", "", f"{facts.key.program} is compiled for {len(same)} choices of sizes, {seconds:.1f} s in "
            f"all: {sizes}", "pad inputs to few sizes, or set buckets in the profile, which requests are padded to",
        )  # fmt: skip


def padding_waste(facts: ProgramFacts, padding: PaddedSizes) -> Iterator[Finding]:
    """Find a program with larger sizes than a request needs."""
    if padding.waste < MIN_PADDING:
        return
    sizes = ", ".join(f"{name} {got} in {size}" for name, (got, size) in padding.sizes.items() if got != size)
    source = facts.programs.settings.buckets.text() or "without buckets, sizes are powers of two"
    yield Finding(
        "padding", "", f"{100 * padding.waste:.0f}% of {padding.part} is padding: {sizes}; {source}",
        "set buckets of the profile to the sizes that requests have",
    )  # fmt: skip


def _memory_seconds(facts: ProgramFacts, nbytes: int) -> float | None:
    """Return the estimated seconds to move so many bytes."""
    return None if facts.rates is None else nbytes / facts.rates.bandwidth


# -- the page of a model ----------------------------------------------------------------------

# The levels whose text is on the page: those with the names of the page.
LEVELS = ("hir", "mir")


def show(self: Any, *inputs: Any, compare: Sequence[Inspection] = (), **named: Any) -> Page:
    """Return the page of what `explain(*inputs, **named)` returns. A notebook displays it, and `save` writes it.

    Args:
        self: a `CompiledModel`, or an encoder, which has one.
        inputs, named: the arguments of `explain`.
        compare: what `explain` returned for other models or profiles, to compare with.

    Raises:
        RequestError: `compare` is something else. Others as `explain`.
    """
    return model_page(getattr(self, "model", self), lambda: [self.explain(*inputs, **named)], compare)


def model_page(
    model: ModelProgram, explain: Callable[[], Sequence[Inspection]], compare: Sequence[Inspection] = ()
) -> Page:
    """Return the page of programs of a model.

    Args:
        model: the model.
        explain: returns its programs, with their text and the differences that passes made on the page.
        compare: other inspections, which have no text on the page.

    Raises:
        RequestError: `compare` is something else. Others as `explain`.
    """
    if not isinstance(compare, Sequence) or not all(isinstance(other, Inspection) for other in compare):
        raise RequestError(f"compare is {shown(compare)}; expected a list of what explain returned")
    inspections = explain()
    texts, with_diffs = [], []
    for inspection in inspections:
        template = model.template(inspection.program)
        diffs = pass_diffs(template)
        passes = tuple(replace(step, diff=diffs.get(step.name, "")) for step in inspection.passes)
        with_diffs.append(replace(inspection, passes=passes))
        texts.append({level: graph_text(template, {}, level, "", False, "text") for level in LEVELS})
    return make_page([*with_diffs, *compare], texts)


# -- the largest losses ------------------------------------------------------------------------


NUM_LOSSES = 5
# A block loses its time to the fixed time of its kernels if that is more than this share of the loss.
FIXED_SHARE = 0.5
# Losses below this share of a run are not worth reading.
MIN_LOSS = 0.01
# Advice for time that belongs to no block, by path.
NO_BLOCK = {
    "(no kernel runs)": "the device waits for the host: a larger batch does more work per call",
    "(helper functions)": "functions outside of the program, such as the choice of a token; larger batches share them",
    "(other programs)": "other programs of the same request",
    "(not attributed)": "loop control, and kernels that XLA added between blocks; fewer and larger kernels have less",
    "sampler": "the choice of a token takes this time for each row; greedy decoding takes least",
}


def largest_losses(inspection: Inspection, rates: Rates | None) -> tuple[Finding, ...]:
    """Return the largest losses of a measured program, largest first; none for estimated times or unknown rates."""
    if not inspection.measured or rates is None:
        return ()
    blocks = sorted(inspection.blocks, key=lambda block: -block.lost_seconds)
    blocks = [block for block in blocks if block.lost_seconds > MIN_LOSS * inspection.seconds]
    return tuple(_loss(block, rates) for block in blocks[:NUM_LOSSES])


def _loss(block: BlockEntry, rates: Rates) -> Finding:
    duration = f"takes {scaled_text(block.seconds, 's')}"
    if not block.limited_by:
        advice = NO_BLOCK.get(block.path, "it computes nothing that the roofline counts")
        return Finding("loss", block.path, duration, advice, block.lost_seconds)
    amount = f"{format_bytes(block.bytes)} at {rates.bandwidth / 1e9:,.0f} GB/s"
    if block.limited_by == "compute":
        speed = rates.flops[rated_dtype(block.dtype)]
        amount = f"{scaled_text(block.flops, 'FLOP')} at {speed / 1e9:,.0f} GFLOP/s in {block.dtype}"
    limit = f"{block.limited_by} allows {scaled_text(block.roofline_seconds, 's')}: {amount}"
    return Finding("loss", block.path, f"{duration}; {limit}", _advice(block, rates), block.lost_seconds)


def _advice(block: BlockEntry, rates: Rates) -> str:
    """Return what would reduce the time of a block."""
    calls = sum(kernel.calls for kernel in block.kernels)
    fixed = calls * rates.kernels["product"].seconds
    if fixed > FIXED_SHARE * block.lost_seconds:
        mean = scaled_text(block.seconds / calls, "s")
        fixed = min(fixed, block.lost_seconds)  # the rate is a mean: starts of small kernels may overlap
        started = f"starting {calls} kernels of {mean} each takes about {scaled_text(fixed, 's')}"
        return f"{started}: more rows per step do more work in each"
    # An implementation of a few layers alone, such as the last one of a prompt, does not explain the time of all.
    if block.implementation and block.reason and f" of {block.layers} layers" not in block.reason:
        return f"it runs by {block.implementation} ({block.reason})"
    dtype = rated_dtype(block.dtype)
    compute, memory = rates.limits(block.flops, block.bytes, dtype)
    if block.limited_by == "memory":
        if block.weight_bytes < block.bytes / 2 or not compute:
            return "it only reads and writes values of other blocks: XLA could fuse it into one of them"
        times = f"{memory / compute:,.0f} times as many rows take no longer"
        return f"it reads its weights once for all rows: by the roofline, {times}"
    # XLA:CPU computes 16-bit products in f32.
    if rates.device.kind != "cpu" and dtype == "f32" and rates.flops["bf16"] > 1.2 * rates.flops["f32"]:
        factor = rates.flops["bf16"] / rates.flops["f32"]
        return f"products in bf16 have a limit {factor:.1f} times as high here: precision.compute = 'bf16'"
    reached = f"{scaled_text(block.flops / block.seconds, 'FLOP/s')} reached"
    return f"{reached}: larger products, by a larger batch or merged projections, come closer to the limit"
