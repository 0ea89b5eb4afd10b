"""What models tell: time by block, from traces; `report()` of programs and requests; the table of blocks."""

import dataclasses
import gzip
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import RequestError, SaveFailedError, UnsupportedError
from rlx_jax.lowering.inspect.hlo import Instruction, block_paths, kernel_name, module_id, parse_instructions
from rlx_jax.runtime.block_times import (
    ANNOTATION,
    HELPERS,
    IDLE,
    NOT_ATTRIBUTED,
    BlockTimes,
    Kernel,
    Trace,
    _match_program,
    block_times,
    read_trace,
)
from rlx_jax.runtime.kernel_order import instructions_of_kernels, schedule_of
from tests import divided
from tests.oracles import checkpoints, numpy_reference


def proto_of(executable: Any) -> bytes:
    """The program as XLA writes it."""
    (module,) = executable.call.runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()


def test_the_blocks_of_a_program() -> None:
    """Those of regions too, layers together; and the number that XLA gives it."""
    weights = {f"w{i}": np.ones((4, 4), np.float32) for i in range(3)}
    flow = rlx.ModelFlow("m").input("x", ("n", 4)).repeat_layers(3, lambda i: rlx.blocks.Linear(f"w{i}"))
    model = rlx.compile(flow, weights)
    model(np.ones((2, 4), np.float32))
    (executable,) = model.programs.executables.values()
    assert block_paths(executable.lir.graph) == {"m", "layers", *(f"layers.{i}.w{i}" for i in ("{i}", 0, 1, 2))}
    before = module_id(proto_of(executable))
    model(np.ones((3, 4), np.float32))
    assert module_id(proto_of([*model.programs.executables.values()][-1])) > before  # none before: 0
    made: Any = [e.call.runtime_executable() for e in model.programs.executables.values()]
    names = [one.hlo_modules()[0].name for one in made]
    assert names == ["jit_forward_of_n_2", "jit_forward_of_n_3"]  # by which a GPU's trace tells them
    assert kernel_name("loop-fusion.7") == "loop_fusion_7"


# 0    10        20   30        40   50
# |----a---------|                        (two devices or threads)
#      |----b---------|
#                     |---while---------|
#                          |-c--|
KERNELS = (
    Kernel(0, 20, 7, "jit_function", "a"),
    Kernel(10, 30, 7, "jit_function", "b"),
    Kernel(30, 50, 7, "jit_function", "w"),
    Kernel(35, 40, 7, "jit_function", "c"),
    Kernel(52, 53, 8, "jit__lambda", "a"),
)
FOUND = {
    (7, "jit_function"): (
        "forward of n 2",
        {
            "a": Instruction("dot", "dot_general", "layers.0.up"),
            "b": Instruction("fusion", "tanh", "layers.1.up"),
            "c": Instruction("add", "add", "layers.1.up"),
            "w": Instruction("while", "while", "norm"),
        },
    )
}


def test_every_moment_counts_once() -> None:
    """Kernels that run together share it; one that runs others has what they leave; the rest is nothing's."""
    told = block_times(Trace(0, 60, 1, KERNELS), FOUND, 2, "cpu")
    ns = {(row.program, row.path): row.seconds * 2e9 for row in told.rows}
    program = "forward of n 2"
    wanted = {
        (program, "layers.0.up"): 15, (program, "layers.1.up"): 20, (program, NOT_ATTRIBUTED): 15, ("", HELPERS): 1,
        ("", IDLE): 9,
    }  # fmt: skip
    assert ns == pytest.approx(wanted) and told.seconds == pytest.approx(30e-9)
    assert [row.path for row in told.rows][:1] == ["layers.1.up"] and told.programs == (program, "")
    both = told.rows[0]
    assert [k.primitive for k in both.kernels] == ["tanh", "add"]
    (layers,) = [row for row in told.folded().rows if row.path == "layers.*.up"]
    assert layers.seconds == pytest.approx(35e-9 / 2) and [k.primitive for k in layers.kernels] == [
        "dot_general", "tanh", "add",
    ]  # fmt: skip


def whole(times: BlockTimes) -> bool:
    return math.isclose(sum(row.seconds for row in times.rows), times.seconds, rel_tol=1e-6)


def test_the_dearest_block_comes_first() -> None:
    """Of a flow with one block far dearer than the others; all of the run is in the rows."""
    small, wide = np.ones((8, 8), np.float32), np.ones((1024, 8), np.float32)
    flow = rlx.ModelFlow("m").input("x", ("n", 8)).linear("first.weight").linear("wide.weight")
    flow = flow.custom(lambda emit, x: emit.jax(lambda a: jax.numpy.sort(a, axis=-1), x)).linear("last.weight")
    model = rlx.compile(flow, {"first.weight": small, "wide.weight": wide, "last.weight": wide.T.copy()})
    times = model.profile(np.random.default_rng(0).normal(size=(256, 8)).astype("f4"), runs=2)
    blocks = [row for row in times.rows if row.program and row.path != NOT_ATTRIBUTED]
    assert blocks[0].path == "custom" and blocks[0].program == "forward of n 256" and blocks[0].calls == 1
    assert {row.path for row in blocks} >= {"custom", "first", "wide", "last"} and whole(times)
    assert times.runs == 2 and blocks[0].kernels[0].primitive == "sort"


def test_what_a_run_consumes_is_copied(tmp_path: Any) -> None:
    """The state and donated inputs are as they were, and the decode program has its blocks. One trace at a time."""
    step = rlx.compile(divided.recipe("llama"), divided.weights("llama"), program="extend")
    state = step.init_state(2, 8)
    times = step.profile(np.array([[1], [2]], np.int32), lengths=np.array([1, 1], np.int32), state=state, runs=2)
    state.check_alive()
    assert {"layers.0.self_attn", "layers.1.self_attn", "lm_head"} <= {row.path for row in times.rows}
    assert whole(times)
    x = jax.numpy.ones((4, 8), np.float32)
    given = rlx.CompileProfile().replace(donation={"inputs": ["x"]})
    flow = rlx.ModelFlow("m").input("x", ("n", 8)).linear("w")
    model = rlx.compile(flow, {"w": np.ones((8, 8), np.float32)}, profile=given)
    with jax.profiler.trace(str(tmp_path)), pytest.raises(RequestError, match="profile: .*one trace at a time"):
        model.profile(x)
    model.profile(x, runs=1)
    assert not x.is_deleted() and model.report().donated_bytes == x.nbytes
    with pytest.raises(RequestError, match="runs is .*expected an integer of at least 1"):
        model.profile(x, runs=0)


def test_generating_is_profiled_by_program() -> None:
    """Prompts and the loop have their own rows; layers that are one loop are `layers.*`, and count as often as they
    run."""
    scanned = rlx.CompileProfile().replace(layers={"roll": "scan"})
    lm = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"), profile=scanned)
    times = lm.profile([[1, 2, 3], [4, 5]], 6)
    rows = {(row.program.split()[0], row.path): row for row in times.rows if row.program}
    assert {program for program, _ in rows} == {"prefill", "extend"} and whole(times)
    assert rows["prefill", "layers.*.mlp.gate_proj"].calls == 2 and rows["extend", "layers.*.mlp.gate_proj"].calls == 10
    assert rows["prefill", "lm_head"].calls == 1 and rows["extend", "lm_head"].calls == 5
    assert rows["extend", "sampler"].seconds > 0 and not any("{i}" in path or path == "body" for _, path in rows)
    assert lm.report().compiles == 2


@pytest.mark.slow
def test_a_draft_has_rows_of_its_own() -> None:
    lm = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))
    times = lm.profile([[1, 2, 3]], 8, speculative=lm)
    paths = {row.path for row in times.rows if row.program.startswith("verify")}
    assert {"draft.layers.0.self_attn", "layers.0.self_attn", "sampler"} <= paths and whole(times)


def test_a_trace_without_kernels() -> None:
    """Of a device whose traces name none."""
    mark = SimpleNamespace(name=ANNOTATION, start_ns=5.0, duration_ns=10.0, stats=[])
    other = SimpleNamespace(name="dot", start_ns=6.0, duration_ns=1.0, stats=[("hlo_op", "dot"), ("program_id", 3)])

    def data(*events: Any) -> Any:
        return SimpleNamespace(planes=[SimpleNamespace(name="", lines=[SimpleNamespace(name="", events=events)])])

    assert read_trace(data(mark, other)).kernels == (Kernel(6.0, 7.0, 3, "", "dot"),)
    for outside in (4.0, 15.0):
        other.start_ns = outside
        with pytest.raises(UnsupportedError, match="names no kernel of a compiled program"):
            read_trace(data(mark, other))


def test_a_trace_of_a_gpu() -> None:
    """It names CUDA graphs, and in them kernels as XLA does; it numbers programs as it likes, so that their names
    count, and where two have one name, their kernels do."""
    mark = SimpleNamespace(name=ANNOTATION, start_ns=0.0, duration_ns=10.0, stats=[])
    stats = [("hlo_op", "command_buffer_1"), ("hlo_module", "jit_forward"), ("program_id", 9)]
    kernel = SimpleNamespace(name="fusion_7_1", start_ns=1.0, duration_ns=2.0, stats=stats)
    line = SimpleNamespace(name="Stream #13", events=[mark, kernel])
    trace = read_trace(SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=[line])]))
    row = ("/device:GPU:0", "Stream #13", 0)
    assert trace.kernels == (Kernel(1.0, 3.0, 9, "jit_forward", "fusion_7_1", row, True),)

    def program(number: int, module: str, *names: str) -> Any:
        made = {name: Instruction("fusion") for name in names}
        return SimpleNamespace(number=number, module=module, instructions=lambda: made)

    other, small, large = program(9, "jit_other"), program(1, "jit_forward", "a"), program(2, "jit_forward", "a", "b")
    compiled = [other, small, large]
    assert (
        _match_program(compiled, (9, "jit_other"), set()) is other
        and _match_program(compiled, (9, "jit_none"), {"a"}) is None
    )
    assert (
        _match_program(compiled, (9, "jit_forward"), {"a", "b"}) is large
        and _match_program(compiled, (1, "jit_forward"), {"b"}) is small
    )


def shares(events: list[Any], runs: int) -> dict[tuple[str, str], float]:
    """Seconds of a run by program and block, from the events of a file: each moment is shared by the innermost."""
    edges = sorted({t for e in events for t in (e["ts"], e["ts"] + e["dur"])})
    seconds: dict[tuple[str, str], float] = {}
    for start, end in zip(edges, edges[1:], strict=False):
        active = [e for e in events if e["ts"] <= start and end <= e["ts"] + e["dur"]]
        inner = [e for e in active if e["args"]["primitive"] != "while"] or active
        for event in inner:
            place = event["args"]["program"], event["args"]["block"]
            seconds[place] = seconds.get(place, 0.0) + (end - start) / len(inner) / 1e6 / runs
    return seconds


def events_of(path: Any) -> tuple[list[Any], list[Any]]:
    """The kernels and the names of rows in a trace file, as its format has them."""
    data = json.loads((gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode())
    events = data["traceEvents"]
    kernels, names = ([e for e in events if e["ph"] == phase] for phase in "XM")
    assert len(kernels) + len(names) == len(events) and data["otherData"]["runs"] >= 1
    named = {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in kernels} == named
    return kernels, names


def test_the_trace_file_of_a_given_trace(tmp_path: Any) -> None:
    """Microseconds from the start of the trace, a row for each stream."""
    rows = [("gpu:0", "stream 1", 0), ("gpu:0", "stream 1", 1), *[("gpu:1", "stream", 0)] * 3]
    kernels = tuple(dataclasses.replace(k, row=row) for k, row in zip(KERNELS, rows, strict=True))
    times = block_times(Trace(-10, 60, 2, kernels), FOUND, 1, "two")
    times.save_trace(tmp_path / "run.json")
    events, names = events_of(tmp_path / "run.json")
    assert [e["ts"] for e in events] == pytest.approx([0.01, 0.02, 0.04, 0.045, 0.062])
    assert [e["dur"] for e in events] == pytest.approx([0.02, 0.02, 0.02, 0.005, 0.001])
    assert events[0]["args"] == {"program": "forward of n 2", "block": "layers.0.up", "primitive": "dot_general"}
    assert [e["args"]["name"] for e in names] == ["gpu:0", "gpu:1", "stream 1", "stream 1", "stream"]
    assert [(e["pid"], e["tid"]) for e in events] == [(1, 1), (1, 2), (2, 3), (2, 3), (2, 3)]


def test_the_trace_file_has_the_times_of_the_blocks(tmp_path: Any) -> None:
    """Of a run: added up from the file, they are those of the table."""
    model = rlx.compile(divided.recipe("llama"), divided.weights("llama"))
    times = model.profile(np.array([[1, 2, 3]], np.int32), runs=2)
    times.save_trace(tmp_path / "run.json.gz")
    events, _ = events_of(tmp_path / "run.json.gz")
    rows = {(row.program, row.path): row.seconds for row in times.rows if row.path != IDLE}
    assert shares(events, 2) == pytest.approx(rows, rel=1e-3, abs=1e-9)
    assert any("layers.1.mlp" in path for _, path in rows)
    with pytest.raises(SaveFailedError, match="trace .* not written: No such file"):
        times.save_trace(tmp_path / "none" / "run.json")
    with pytest.raises(RequestError, match="save_trace: these times have no trace"):
        BlockTimes(0.01, 1, "cpu", ()).save_trace(tmp_path / "run.json")


@pytest.fixture(scope="module")
def lm() -> Any:
    """A model that generates."""
    return rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))


def test_a_request_and_its_programs(lm: Any) -> None:
    """How fast it was, its tokens by count, and a row for each program with what it cost and needs."""
    assert lm.report().request is None and lm.report().programs == ()
    assert "request" not in str(lm.report()) and "\n\n" not in str(lm.report())
    answers = lm.generate([[1, 2, 3], [4, 5]], 9)
    first = lm.report().request
    assert first.compiled >= 2 and "were compiled during it" in str(first)
    lm.generate([[1, 2, 3], [4, 5]], 9)
    report = lm.report()
    assert max(map(len, str(report).splitlines())) <= 80 and "layers.*.self_attn: " in str(report)
    told = report.request
    assert (told.kind, told.rows, told.prompt_tokens, told.compiled) == ("prompts", 2, 5, 0)
    assert (told.new_tokens, told.first_tokens) == (sum(map(len, answers)), 2)
    assert told.prompt_seconds < first.prompt_seconds and told.answer_seconds > 0
    assert told.prompt_rate == 5 / told.prompt_seconds and told.answer_rate == 16 / told.answer_seconds
    reader, loop = sorted(report.programs, key=lambda r: r.program.startswith("extend"))
    assert [reader.program, loop.program] == [
        "prefill of batch 2, context 64, seq 16", "extend of batch 2, context 64, seq 1",
    ]  # fmt: skip
    state = lm.model.as_program("extend").init_state(2, 64)
    held = sum(a.nbytes for a in jax.tree.leaves(state.arrays()))
    assert reader.cache_bytes == loop.cache_bytes == report.cache_bytes == held
    assert loop.donated_bytes == report.donated_bytes == held and loop.flops == report.flops
    assert loop.peak_bytes == report.peak_bytes and loop.bytes == report.bytes and report.program == loop.program
    made = {key.program: e for key, e in lm.model.programs.executables.items()}
    memory: Any = made["extend"].call.memory_analysis()
    assert memory.alias_size_in_bytes >= held  # a donated state counts once
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert loop.peak_bytes == memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    for row, name in ((reader, "prefill"), (loop, "extend")):
        seconds, template = made[name].seconds, lm.model.programs.template(
            next(k for k in lm.model.programs.executables if k.program == name).symbolic
        ).seconds  # fmt: skip
        assert row.prove == pytest.approx(template["derive"] + seconds["prove"]) and row.prove > 0
        assert row.lower == pytest.approx(sum(template.values()) - template["derive"] + seconds["plan"])
        assert (row.trace, row.compile) == (seconds["trace"], seconds["compile"])
        assert row.seconds == pytest.approx(sum(template.values()) + sum(seconds.values()))


def test_sizes_that_nothing_ran_with(lm: Any) -> None:
    """Of the whole forward pass, as the model's own report counts them."""
    small, large = lm.report(batch=1, seq=8), lm.report(batch=2, seq=8)
    assert large.flops == 2 * small.flops == 2 * lm.model.report(batch=1, seq=8).flops > 0


def test_encoders() -> None:
    """What was embedded last, and how fast."""
    encoder = rlx.Encoder(divided.recipe("bert"), divided.weights("bert"))
    assert encoder.report().request is None
    encoder.embed([[1, 2, 3], [4, 5]])
    encoder.embed([[1, 2, 3], [4, 5]])
    report = encoder.report()
    told = report.request
    assert told is not None and (told.kind, told.rows, told.prompt_tokens, told.compiled) == ("texts", 2, 5, 0)
    assert str(told) in " ".join(str(report).split()) and report.embedding != ""
    sizes = {"batch": 7, "seq": 4}
    assert encoder.report(**sizes).flops == encoder.model.report(**sizes).flops != report.flops


LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
WEIGHTS = numpy_reference.read_weights(LLAMA)
COUNT = sum(value.size for value in WEIGHTS.values())


@pytest.fixture(scope="module")
def model() -> rlx.CompiledModel:
    """Bound to a size, and not called."""
    return rlx.compile(rlx.recipe_for(LLAMA).assemble().with_weights({k: v.astype("f4") for k, v in WEIGHTS.items()}))


def test_numbers_of_a_model(model: rlx.CompiledModel) -> None:
    """Parameters are those of the checkpoint, FLOPs 2 · in · out for a token, and totals those of the report."""
    table = model.outline()
    rows = {".".join(map(str, row.path)): row for row in table.rows}
    assert table.params == COUNT
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        row = rows[f"layers.{{i}}.{name}"]
        stored = [v for key, v in WEIGHTS.items() if name in key]
        assert row.params == sum(v.size for v in stored)
        assert row.cost is not None and row.cost.flops == 2 * sum(v.size for v in stored if v.ndim == 2)
    layer, report = rows["layers.{i}"], model.report(batch=1, seq=1)
    assert layer.layers == 3 and layer.params == sum(v.size for key, v in WEIGHTS.items() if ".layers." in key)
    assert table.cost is not None and (table.cost.flops, table.cost.bytes) == (report.flops, report.bytes)
    bound = rlx.recipe_for(LLAMA).assemble().bind(batch=2, seq=5)._outline()
    assert bound.sizes == {"batch": 2, "seq": 5} and bound.cost is not None
    assert bound.cost.flops == model.report(batch=2, seq=5).flops


def test_what_is_printed(model: rlx.CompiledModel) -> None:
    """A small model on the screen; `repr` is one line."""
    flow = rlx.ModelFlow("mlp").input("x", ("batch", 64))
    flow = flow.repeat_layers(12, lambda i: blocks.Linear(f"l.{i}.w", shape=(64, 64))).linear("out", shape=(500, 64))
    rows = [line.split() for line in str(flow).splitlines()]
    assert ["layers.{i}", "×", "12", "49.2K", "98.3K", "203K"] in rows and ["total", "81.2K", "162K", "333K"] in rows
    assert repr(flow) == "ModelFlow(mlp: x f32[batch,64]; 2 stages)"
    assert repr(model) == f"CompiledModel(llama: forward, {COUNT:,} parameters)"
    assert repr(rlx.compile(flow)) == "CompiledModel(mlp: forward, 81,152 parameters, none loaded)"


def test_a_flow_that_cannot_be_built_prints_its_stages() -> None:
    """Printing is no error: shapes of weights may not be known yet."""
    flow = rlx.ModelFlow("m<1>").input("x", ("batch", 8)).linear("w").stage(rlx.blocks.Activation("relu"))
    text = str(flow)
    assert text.splitlines()[:3] == ["ModelFlow(m<1>: x f32[batch,8]; 2 stages)", "  0  Linear", "  1  Activation"]
    assert (
        "the shape of weight 'w' is not known" in re.sub(r"\s+", " ", text) and max(map(len, text.splitlines())) <= 80
    )
    assert flow._repr_html_().startswith("<pre>ModelFlow(m&lt;1&gt;")
    assert repr(rlx.ModelFlow("empty")) == "ModelFlow(empty: no inputs; 0 stages)"


HLO = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x.1 = f32[8] get-tuple-element(%p), index=1
  %norm.1 = f32[8] fusion(%x.1), kind=kLoop, calls=%c1, metadata={op_name="jit(f)/layers.{i}.norm/mul"}
  %custom-call.1 = (f32[8], s8[4]) custom-call(%norm.1), metadata={op_name="jit(f)/layers.{i}.up/dot"}
  %norm.2 = f32[8] fusion(%x.1), kind=kLoop, calls=%c1, metadata={op_name="jit(f)/layers.{i}.post/mul"}
  %custom-call.2 = (f32[8], s8[4]) custom-call(%norm.2), metadata={op_name="jit(f)/layers.{i}.down/dot"}
  ROOT %out = (s32[], f32[8]) tuple(%norm.2)
}

ENTRY %main (a: f32[8]) -> f32[4] {
  %a = f32[8] parameter(0)
  %first = f32[8] fusion(%a), kind=kLoop, calls=%c1, metadata={op_name="jit(f)/embed/mul"}
  %t = (s32[], f32[8]) tuple(%first)
  %loop = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %norm.3 = f32[8] fusion(%loop), kind=kLoop, calls=%c1, metadata={op_name="jit(f)/head/mul"}
  %custom-call.3 = (f32[4], s8[4]) custom-call(%norm.3), custom_call_target="gemm", metadata={op_name="jit(f)/head/dot"}
  ROOT %last = f32[4] fusion(%custom-call.3), kind=kLoop, calls=%c2, metadata={op_name="jit(f)/head/exp"}
}
"""
PATHS = frozenset({"embed", "head", *(f"layers.{{i}}.{name}" for name in ("norm", "up", "post", "down"))})
ITERATION = ["norm.1", "custom-call.1", "norm.2", "custom-call.2"]


def test_schedule() -> None:
    schedule = schedule_of(parse_instructions(HLO, PATHS))
    assert schedule.names == ("first", *ITERATION, "norm.3", "custom-call.3", "last") and schedule.loops == ((1, 5),)


def test_kernels_in_order() -> None:
    """Two runs of two iterations: equal fusions have one name, libraries others, and one call has two kernels and
    memory that is set before."""
    run = (
        ["first"]
        + ["norm_1", "Memset 0", "nvjet_a", "norm_1", "nvjet_b", "reduce_b"] * 2
        + ["norm_3", "nvjet_c", "last"]
    )
    wanted = ["first"] + [*ITERATION[:1], *ITERATION[1:2] * 2, *ITERATION[2:], ITERATION[3]] * 2
    wanted += ["norm.3", "custom-call.3", "last"]
    found = instructions_of_kernels(run * 2, parse_instructions(HLO, PATHS))
    assert found == wanted * 2


def test_kernels_that_fit_nothing_keep_their_name() -> None:
    assert instructions_of_kernels(["other", "first", "MemcpyD2D"], parse_instructions(HLO, PATHS)) == [
        "other", "first", "MemcpyD2D",
    ]  # fmt: skip
