"""Kernels of CUDA graphs are found by their order: of libraries, and of equal layers, which share one kernel."""

from rlx_jax.lowering.inspect.hlo import parse_instructions
from rlx_jax.runtime.kernel_order import instructions_of_kernels, schedule_of

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
