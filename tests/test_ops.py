"""Every op and block of the table: its shape rule is its `eval`, and its `eval` is the formula in float64."""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Mir, Op, TypeCache
from rlx_jax.ir.operands import ELEMENTWISE
from rlx_jax.ir.ops.pointwise import BINARY, COMPARE, UNARY
from rlx_jax.ir.ops.reduce import REDUCE
from rlx_jax.ir.queries import binds_types
from rlx_jax.ir.serial import decode, encode
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lower import as_function
from tests.ops import BF16, BLOCKS, F32, I32, MEANING, MIR_OPS, SIZES, Sample, o, operand
from tests.ops.sample import assert_formula
from tests.oracles import op_formulas as formula


def test_every_op_has_a_sample() -> None:
    """A new op or block is tested from its first day, and says what it computes in its docstring."""
    assert set(MIR_OPS) == set(o.OPS) - {o.ExportedCall}, "a sample of each stands in a file of tests/ops"
    assert {type(s.op) for s in BLOCKS} == set(hir.BLOCKS) - {hir.Recurrent}
    assert {*o.OPS, *hir.BLOCKS} - {o.ExportedCall} == set(MEANING), "what each computes, in NumPy, stands there too"
    assert set(UNARY) == set(formula.UNARY_REFERENCE) and set(BINARY) == set(formula.BINARY_REFERENCE)
    assert set(COMPARE) == set(formula.COMPARE_REFERENCE) and set(REDUCE) == set(formula.REDUCE_REFERENCE)
    for cls in o.OPS:
        assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), cls
        assert cls.__dataclass_params__.frozen, cls


def traced(*calls: tuple[Any, Sequence[TensorType]]) -> list[tuple[TensorType, ...]]:
    """The types of `eval` of each op, traced abstractly, all in one trace; none is weak."""
    evals = [op.eval for op, _ in calls]
    operands = [[t.spec for t in types] for _, types in calls]
    found = jax.eval_shape(lambda every: [run(*given) for run, given in zip(evals, every, strict=True)], operands)
    results = []
    for (op, _), out in zip(calls, found, strict=True):
        leaves = jax.tree.leaves(out)
        assert not any(leaf.weak_type for leaf in leaves if not isinstance(op, o.JaxFn)), "weakly typed result"
        results.append(tuple(TensorType(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves))
    return results


@pytest.mark.parametrize("cls", MIR_OPS, ids=lambda c: c.__name__)
def test_infer_is_eval_shape_of_eval(cls: Any) -> None:
    """With symbolic sizes; `test_eval_is_the_formula` has numbers. `specialise` binds the symbolic types."""
    for sample, want in zip(MIR_OPS[cls], traced(*((s.op, s.types) for s in MIR_OPS[cls])), strict=True):
        types = TypeCache().infer(sample.op, sample.types)
        assert types == want, sample
        for sizes in (SIZES, dict.fromkeys(SIZES, 1)) if binds_types(sample.op) else ():
            bound = tuple(t.bind(sizes) for t in types)
            try:
                inferred = TypeCache().infer(sample.op, tuple(t.bind(sizes) for t in sample.types))
            except rlx.RlxError:  # such as a window of more than one token
                continue
            assert bound == inferred or not all(t.is_static for t in bound), sample


@pytest.mark.parametrize("cls", [c for c in MIR_OPS if c.traits.stored], ids=lambda c: c.__name__)
def test_an_op_survives_json(cls: Any) -> None:
    """Every attribute comes back as it was; a body of a loop, which is no value, is written alike."""
    for sample in MIR_OPS[cls]:
        again = decode(Op, json.loads(json.dumps(encode(sample.op))), "op")
        assert encode(again) == encode(sample.op)
        assert again == sample.op or cls in (o.Switch, o.While, o.Scan, o.CustomVjp, o.PairBias)


def damaged(types: tuple[TensorType, ...]) -> Iterator[tuple[str, tuple[TensorType, ...]]]:
    """Operand lists near `types`: one too few or too many, another dtype, rank or size."""
    yield "one operand too few", types[:-1]
    yield "one operand too many", (*types, types[-1])
    for i, t in enumerate(types):

        def swapped(shape: Any, dtype: Any = t.dtype, i: int = i) -> tuple[TensorType, ...]:
            return (*types[:i], TensorType(shape, dtype), *types[i + 1 :])

        for dtype in (BF16, I32):
            yield f"operand {i} as {dtype}", swapped(t.shape, dtype)
        yield f"operand {i} with an axis more", swapped((3, *t.shape))
        if t.rank:
            yield f"operand {i} with an axis less", swapped(t.shape[1:])
            yield f"operand {i} as a scalar", swapped(())
        for axis, size in enumerate(t.shape):
            yield f"operand {i} longer on axis {axis}", swapped((*t.shape[:axis], size + 1, *t.shape[axis + 1 :]))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", MIR_OPS, ids=lambda c: c.__name__)
def test_infer_refuses_what_eval_cannot_do(cls: Any, count: int) -> None:
    """Where tracing `eval` fails or gives other types, `infer` raises an RlxError, and so does the verifier."""
    passed, samples = list[str](), MIR_OPS[cls]
    for sample in samples[:: -(-len(samples) // count)]:
        for what, types in damaged(tuple(t.bind(SIZES) for t in sample.types)):
            try:
                got = TypeCache().infer(sample.op, types)
            except rlx.RlxError:
                continue
            try:
                want: Any = traced((sample.op, types))[0]
            except Exception as error:
                want = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            if got != want:
                passed.append(f"{sample}: {what}: infer says {', '.join(map(str, got))}, eval {want}")
    assert not passed, f"{len(passed)} wrong calls pass:\n" + "\n".join(passed[:20])


@dataclass(frozen=True)
class Halved(Mir):
    traits = ELEMENTWISE

    @staticmethod
    def eval(x: Any) -> Any:
        return x / 2


def test_eval_may_be_a_static_method() -> None:
    f32 = operand("f32 2")
    assert TypeCache().infer(Halved(), (f32,)) == (f32,)
    with pytest.raises(GraphError, match="halved: expected 1 operands, got 2"):
        TypeCache().infer(Halved(), (f32, f32))


def test_eval_is_the_formula(subtests: pytest.Subtests) -> None:
    """And gives what `infer` says. Sixty ops are compiled together, which takes less time than one or all of them."""
    every = [s for row in MIR_OPS.values() for s in row]
    for start in range(0, len(every), 60):
        samples = every[start : start + 60]
        ops: list[Any] = [s.op for s in samples]
        together = jax.jit(lambda many, ops=ops: [op.eval(*a) for op, a in zip(ops, many, strict=True)])
        for sample, out in zip(samples, together([s.arrays() for s in samples]), strict=True):
            with subtests.test(str(sample)):
                assert_formula(sample, out)
                types = TypeCache().infer(sample.op, tuple(t.bind(SIZES) for t in sample.types))
                assert [(y.shape, y.dtype) for y in jax.tree.leaves(out)] == [(t.shape, t.dtype) for t in types]


def module_of(sample: Sample) -> Any:
    """A module whose outputs are the results of one block on inputs."""
    m = Graph.hir("one")
    m.set_outputs(m.builder.add(sample.op, *(m.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(sample.types))))
    return m


def test_a_block_is_its_formula_and_survives_json(subtests: pytest.Subtests) -> None:
    """Expanded; JSON gives the same block and the same text. A user's step is not stored."""
    functions = [as_function(s.op, s.types, TypeCache()) for s in BLOCKS]
    together = jax.jit(lambda many: [f(*arrays) for f, arrays in zip(functions, many, strict=True)])
    for sample, out in zip(BLOCKS, together([s.arrays() for s in BLOCKS]), strict=True):
        with subtests.test(str(sample)):
            assert_formula(sample, out)
            if not isinstance(getattr(sample.op, "block", None), hir.Recurrent):
                module = module_of(sample)
                back = Graph.from_json(module.to_json())
                assert back.to_json() == module.to_json() and str(back) == str(module)
                assert back.builder.nodes[-1].op == sample.op


NO_SLOPE = {
    o.FakeQuantize: "its gradient is a rule of its own: see test_images.py",
    o.While: "how often it runs is known when it runs",
    o.CustomVjp: "its gradient is what the caller says: see test_control.py", o.JaxFn: "it is what the caller says",
    o.Sample: "a draw",
    **dict.fromkeys((o.Compare, o.CastTo, o.FullLike, o.ArgReduce, o.Iota, o.RelativeBuckets, o.ShardIndex, o.RopeTable,
        o.After), "no sample takes f32 and gives it"),
}  # fmt: skip
"""Ops that finite differences do not speak of, and why."""
NO_SLOPE_KINDS = ("stop_gradient", "floor_div", "trunc_div", "mod", "rem")
"""Functions without one or with steps. Of `mul` where indices may repeat JAX has none, and says so."""


def steep(sample: Sample) -> bool:
    """Whether the sample has a slope: it takes f32, nothing narrower, and gives f32 or c64."""
    kind = getattr(sample.op, "kind", "")
    if kind in NO_SLOPE_KINDS or (kind == "mul" and isinstance(sample.op, o.Scatter | o.ScatterNd)):
        return False
    taken, out = {t.dtype for t in sample.types}, TypeCache().infer(sample.op, sample.types)
    return F32 in taken and BF16 not in taken and any(t.dtype in (F32, np.complex64) for t in out)


@functools.cache
def slopes(cls: Any) -> list[tuple[Sample, Any, Any]]:
    """Of each such sample of a class: the derivative along a direction, and what the transpose says of it."""
    rng = np.random.default_rng(7)
    samples = [s for s in MIR_OPS[cls] if steep(s)]
    points = [s.arrays() for s in samples]
    ways = [[rng.standard_normal(a.shape).astype(np.float32) if a.dtype == F32 else None for a in p] for p in points]

    def both(op: Any, point: list[Any], way: list[Any]) -> tuple[Any, Any]:
        moved = [i for i, w in enumerate(way) if w is not None]

        def f(*floats: Any) -> list[Any]:
            full = list(point)
            for i, x in zip(moved, floats, strict=True):
                full[i] = x
            return [y for y in jax.tree.leaves(op.eval(*full)) if y.dtype in (F32, np.complex64)]

        primals, tangents = [point[i] for i in moved], [way[i] for i in moved]
        _, forward = jax.jvp(f, primals, tangents)
        _, back = jax.vjp(f, *primals)
        weights = [jnp.cos(jnp.arange(y.size, dtype=F32)).reshape(y.shape).astype(y.dtype) for y in forward]
        there = sum(jnp.sum(w * y).real for w, y in zip(weights, forward, strict=True))
        again = sum(jnp.sum(g * t) for g, t in zip(back(weights), tangents, strict=True))
        return forward, (there, again)

    every = jax.jit(lambda p, w: [both(s.op, *at) for s, *at in zip(samples, p, w, strict=True)])
    found = every(points, ways)
    return [(s, w, f) for s, w, f in zip(samples, ways, found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [c for c in MIR_OPS if c not in NO_SLOPE], ids=lambda c: c.__name__)
def test_gradients_are_those_of_the_formula(cls: Any) -> None:
    """Forward mode against central differences of the float64 formula; reverse mode is its transpose."""
    assert slopes(cls)
    for sample, way, (forward, (there, again)) in slopes(cls):
        wide = [a.astype(np.float64) if a.dtype in (F32, BF16) else a for a in sample.arrays()]

        def moved(sign: float, wide: Any = wide, way: Any = way, sample: Sample = sample) -> tuple[np.ndarray, ...]:
            return sample.want(*(a if w is None else a + sign * w for a, w in zip(wide, way, strict=True)))

        want = [(a - b) / 2e-5 for a, b in zip(moved(1e-5), moved(-1e-5), strict=True) if a.dtype.kind in "fc"]
        assert len(want) == len(forward), sample
        for got, expected in zip(forward, want, strict=True):
            worst = np.abs(np.asarray(got) - expected).max(initial=0.0)
            assert worst <= 1e-3 * max(1.0, np.abs(expected).max(initial=0.0)), (str(sample), worst)
        assert abs(there - again) <= 1e-3 * max(1.0, abs(there)), (str(sample), there, again)


def test_round_is_half_to_even() -> None:
    got = o.Unary("round").eval(jnp.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4]))
    np.testing.assert_array_equal(got, [0.0, 2.0, 2.0, -0.0, -2.0, 2.0])


def test_norms_take_their_statistics_in_f32() -> None:
    """A bf16 sum of squares of 1,024 numbers would stop growing at 256, and a one-pass variance would cancel."""
    x, ones, zeros = jnp.full((1, 1024), 3, jnp.bfloat16), jnp.ones(1024, jnp.bfloat16), jnp.zeros(1024, jnp.float32)
    np.testing.assert_allclose(np.asarray(o.RmsNormOp(1e-6).eval(x, ones), np.float32), 1.0, rtol=1e-2)
    far = jnp.asarray(1000 + np.tile([1.0, -1.0], 512)[None], jnp.float32)
    got = o.LayerNormOp(1e-6).eval(far, ones.astype(jnp.float32), zeros)
    np.testing.assert_allclose(got, np.tile([1.0, -1.0], 512)[None], atol=1e-3)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_where_rms_norm_rounds(offset: float) -> None:
    """As in Hugging Face's Llama the normalised value has x's dtype before γ multiplies it; as in Gemma x and 1 + w,
    which is no bf16 number, meet in f32."""
    rng, narrow = np.random.default_rng(0), ml_dtypes.bfloat16
    x = rng.standard_normal((4, 64)).astype(narrow)
    w = (1 - offset + rng.standard_normal(64) / (64 if offset else 8)).astype(narrow)
    wide = x.astype(np.float32)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-5))
    normed = normed if offset else normed.astype(narrow).astype(np.float32)
    want = (normed * (np.float32(offset) + w.astype(np.float32))).astype(narrow)
    got = np.asarray(o.RmsNormOp(1e-5, offset).eval(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_array_equal(got, want)


def test_out_of_range() -> None:
    """A gather reads the nearest row; writes past the capacity are dropped, not clamped; padding is not written."""
    table = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(o.Gather().eval(table, jnp.array([-5, 99])), [[0.0, 1.0], [6.0, 7.0]])
    cache, new = np.zeros((4, 3, 2), np.float32), np.arange(1, 17, dtype=np.float32).reshape(4, 2, 2)
    start, lengths = np.array([1, 2, 3, 2**30], np.int32), np.array([2, 2, 2, 1], np.int32)
    got = np.asarray(jax.jit(o.CacheUpdate().eval)(cache, new, start, lengths))
    np.testing.assert_array_equal(got, formula.cache_update(cache, new, start, lengths))
    assert got[1, 2].any() and not got[2:].any() and not got[1, :2].any()
    cache, new = np.full((3, 5, 1), 9.0, np.float32), np.ones((3, 3, 1), np.float32)
    got = np.asarray(jax.jit(o.CacheUpdate().eval)(cache, new, np.zeros(3, np.int32), np.array([0, 2, 3], np.int32)))
    np.testing.assert_array_equal(got[..., 0] == 1.0, np.arange(5)[None] < np.array([[0], [2], [3]]))


def run_attention(op: Any, *arrays: np.ndarray) -> np.ndarray:
    """The op on f32 operands."""
    return np.asarray(jax.jit(op.eval)(*(a.astype(np.float32) for a in arrays)))


@pytest.mark.parametrize("extra", ["keep", "bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_keys_gives_zeros(extra: str, causal: bool) -> None:
    """Whether a mask (½ keeps, less drops) or −inf drops them all; other rows are not touched, gradients are finite."""
    q, k, v = np.random.default_rng(4).standard_normal((3, 2, 3, 8))
    keep = np.array([[0.0, 0.49, 0.0], [0.0, 0.5, 1.0]])
    bias = np.where(keep[:, None, None] >= 0.5, 0.3, -np.inf) * np.ones((2, 2, 3, 3))
    op, given = o.AttentionOp(2, 2, causal=causal, extra=(extra,)), {"keep": keep, "bias": bias}[extra]
    options: dict[str, Any] = {extra: given}
    got = run_attention(op, q, k, v, given)
    assert not got[0].any()
    assert np.array_equal(got[1, 0], np.zeros(8)) == causal  # its first key is dropped
    want = formula.attention(q, k, v, heads=2, kv_heads=2, causal=causal, **options)
    np.testing.assert_allclose(got, want, atol=3e-6)
    mask = jnp.asarray(given, jnp.float32)
    grads = jax.jit(jax.grad(lambda *a: op.eval(*a, mask).sum(), (0, 1, 2)))(*(x.astype(np.float32) for x in (q, k, v)))
    assert all(np.isfinite(g).all() for g in grads)


def test_queries_before_the_first_key_and_huge_scores() -> None:
    """More queries than keys: the first ones stand before all keys. The softmax subtracts the largest score."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, n, 4)) for n in (4, 2, 2))
    got = run_attention(o.AttentionOp(1, 1, causal=True), q, k, v)
    np.testing.assert_allclose(got, formula.attention(q, k, v, heads=1, kv_heads=1, causal=True), atol=3e-6)
    huge = np.full((1, 2, 4), 1e4)
    for op, rest in ((o.AttentionOp(1, 1, causal=True), []), (o.AttentionOp(1, 1, extra=("keep",)), [np.ones((1, 2))])):
        assert np.isfinite(run_attention(op, huge, huge, np.ones((1, 2, 4)), *rest)).all()
