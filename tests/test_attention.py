"""`emit.attention` and `emit.rope` with each of their options, against float64 formulas, by both policies."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.device import DEVICES
from rlx_jax.errors import ShapeError
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir.attention import choose
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from tests.oracles import op_formulas as formula

B, S, T, N, K, D, E = 2, 3, 5, 4, 2, 6, 3
RNG = np.random.default_rng(11)
TYPES: dict[str, tuple[tuple[Any, ...], str]] = {
    "q": (("batch", "seq", N * D), "float32"), "k": (("batch", "keys", K * D), "float32"),
    "v": (("batch", "keys", K * E), "float32"), "k1": (("batch", "seq", K * D), "float32"),
    "kd": (("batch", "keys", K * D), "float32"), "row": (("batch", "keys"), "int32"), "one": (("keys",), "bool"),
    "pair": (("seq", "keys"), "bool"), "pairs": (("batch", "seq", "keys"), "float32"),
    "each": (("batch", N, "seq", "keys"), "bool"), "bias": (("batch", N, "seq", "keys"), "float32"),
    "flat": (("seq", "keys"), "float32"), "at": (("batch", "seq"), "int32"), "sinks": ((N,), "float32"),
}  # fmt: skip
SIZES = {"batch": B, "seq": S, "keys": T}


def drawn(shape: tuple[Any, ...], dtype: str) -> np.ndarray:
    sizes = [SIZES.get(n, n) for n in shape]
    if dtype == "bool":
        return RNG.random(sizes) < 0.7
    return RNG.integers(0, 9 if shape[-1] == "seq" else 2, sizes).astype("i4") if dtype == "int32" else (
        RNG.standard_normal(sizes).astype("f4"))  # fmt: skip


ARRAYS: dict[str, Any] = {name: drawn(*given) for name, given in TYPES.items()}
X: dict[str, Any] = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in ARRAYS.items()}


def heads(x: np.ndarray, n: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], n, -1)


def attend(k: str = "k", v: str = "v", q: Any = None, key: Any = None, **options: Any) -> np.ndarray:
    q, key = (X["q"] if q is None else q), (X[k] if key is None else key)
    return formula.attention(q, key, X[v], heads=N, kv_heads=K, **options)


def turned(x: np.ndarray, n: int, theta: float, style: str = "half", by: float = 1.0) -> np.ndarray:
    freqs = [theta ** (-2 * i / n) / by for i in range(n // 2)]
    return formula.rope(x, *formula.rope_table(X["at"], freqs), D, n, style)


def run(emit: Any, i: Any, **options: Any) -> Any:
    """Attention over the inputs of that name."""
    return emit.attention(i.q, i.k, i.v, heads=N, **options)


Case = tuple[Callable[[Any, Any], Any], Callable[[], np.ndarray]]
CASES: dict[str, Case] = {
    "all keys": (lambda e, i: run(e, i), lambda: attend()),
    "said twice": (lambda e, i: run(e, i, kv_heads=K, head_dim=D, causal=False), lambda: attend()),
    "causal": (lambda e, i: run(e, i, causal=True), lambda: attend(causal=True)),
    "cross": (lambda e, i: e.cross_attention(i.q, i.k, i.v, heads=N, kv_heads=K, mask=i.row, softcap=2.0),
        lambda: attend(keep=X["row"], softcap=2.0)),
    "mask of keys": (lambda e, i: run(e, i, mask=i.one), lambda: attend(keep=X["one"][None])),
    "mask of rows": (lambda e, i: run(e, i, mask=i.row), lambda: attend(keep=X["row"])),
    "mask of rows and causal": (lambda e, i: run(e, i, mask=i.row, causal=True),
        lambda: attend(keep=X["row"], causal=True)),
    "mask of pairs": (lambda e, i: run(e, i, mask=i.pair), lambda: attend(keep=X["pair"][None, None])),
    "mask of pairs in rows": (lambda e, i: run(e, i, mask=i.pairs, causal=True),
        lambda: attend(keep=X["pairs"][:, None], causal=True)),
    "mask of heads": (lambda e, i: run(e, i, mask=i.each, window=2, causal=True),
        lambda: attend(keep=X["each"], window=2)),
    "bias": (lambda e, i: run(e, i, bias=i.bias, scale=0.2), lambda: attend(bias=X["bias"], scale=0.2)),
    "bias and mask": (lambda e, i: run(e, i, bias=i.flat, mask=i.row, causal=True),
        lambda: attend(bias=X["flat"][None, None], keep=X["row"], causal=True)),
    "window": (lambda e, i: run(e, i, window=2), lambda: attend(window=2, ahead=1)),
    "window to one side": (lambda e, i: run(e, i, window=(0, 2)), lambda: attend(window=1, ahead=2)),
    "causal window": (lambda e, i: run(e, i, window=(1, 0), causal=True), lambda: attend(window=2)),
    "sinks": (lambda e, i: run(e, i, sinks=i.sinks, scale=0.2, softcap=1.5),
        lambda: attend(sinks=X["sinks"], scale=0.2, softcap=1.5)),
    "sinks of rows that may be empty": (lambda e,
        i: run(e, i, sinks=i.sinks, mask=i.each, bias=i.bias, window=1, causal=True),
            lambda: attend(sinks=X["sinks"], keep=X["each"], bias=X["bias"], window=1)),
    "heads apart": (lambda e, i: e.attention(i.q.reshape("batch", "seq", N, D), i.k.reshape("batch", "keys", K, D),
        i.v.reshape("batch", "keys", K, E), heads=N, kv_heads=K, layout="heads", causal=True),
            lambda: heads(attend(causal=True), N)),
    "rotary": (lambda e, i: e.attention(i.q, i.k1, i.k1, heads=N, causal=True,
        rope=e.rotary(i.at, head_dim=D, theta=100.0, n_rot=4, style="interleaved")),
            lambda: attend(v="k1", q=turned(X["q"], 4, 100.0, "interleaved"),
                key=turned(X["k1"], 4, 100.0, "interleaved"), causal=True)),
    "tables": (lambda e, i: e.attention(i.q, i.k1, i.k1, heads=N,
        rope=e.rope_angles(i.at, [1000.0 ** (-2 * j / D) for j in range(D // 2)])),
            lambda: attend(v="k1", q=turned(X["q"], D, 1000.0), key=turned(X["k1"], D, 1000.0))),
    "rope at positions": (lambda e, i: e.rope(i.q, i.at, head_dim=D, theta=50.0, n_rot=2),
        lambda: turned(X["q"], 2, 50.0)),
    "rope scaled": (lambda e, i: e.rope(i.q, i.at, head_dim=D, scaling=lambda f: blocks.linear_scaling(f, 4.0)),
        lambda: turned(X["q"], D, 10000.0, by=4.0)),
    "rope of heads apart": (lambda e, i: e.rope(i.q.reshape("batch", "seq", N, D), e.rotary(i.at, head_dim=D),
        head_dim=D), lambda: heads(turned(X["q"], D, 10000.0), N)),
}  # fmt: skip


class Inputs:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def flow() -> rlx.ModelFlow:
    made = rlx.ModelFlow("m")
    for name, (shape, dtype) in TYPES.items():
        made = made.input(name, shape, dtype)
    return made


def with_inputs(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda e, x: fn(e, Inputs({name: e.flow_input(name) for name in TYPES}))


@pytest.mark.parametrize("policy", ["direct", "fusable"])
def test_formula(policy: str, subtests: pytest.Subtests) -> None:
    """Every case in one program."""

    def every(emit: Any, i: Any) -> Any:
        for name, (fn, _) in CASES.items():
            emit.output(name, fn(emit, i))
        return i.q

    profile = rlx.CompileProfile().replace(fusion={"policy": policy})
    model: Any = rlx.compile(flow().custom(with_inputs(every)), profile=profile)
    found = model(**{i.name: ARRAYS[i.name] for i in model.inputs})
    for name, (_, formula_of) in CASES.items():
        with subtests.test(name):
            got, want = np.asarray(found[name]), formula_of()
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= 3e-5 * np.abs(want).max()


def test_layer_norms_without_weights() -> None:
    """With γ, with β, with none; random weights begin at 1 and 0."""
    made = rlx.ModelFlow("m").input("x", ("batch", 6))
    made = made.layer_norm("a.g").layer_norm(None, "b.b").layer_norm(eps=0.1)
    model = rlx.compile(made, {"a.g": np.arange(1, 7, dtype="f4"), "b.b": np.arange(6, dtype="f4")})
    x = RNG.standard_normal((2, 6)).astype("f4")
    want = formula.layer_norm(x.astype(float), np.arange(1, 7), 0.0)
    want = formula.layer_norm(formula.layer_norm(want, 1.0, np.arange(6)), 1.0, 0.0, 0.1)
    np.testing.assert_allclose(model(x), want, atol=3e-5)
    drawn = model.init(0)
    assert (np.asarray(drawn["a.g"]) == 1).all() and (np.asarray(drawn["b.b"]) == 0).all()


def test_a_mask_that_may_be_two_things() -> None:
    """As many rows as queries: one says which, with an axis of 1."""

    def square(fn: Any) -> Any:
        made = rlx.ModelFlow("m").input("x", (3, 3, 4)).input("keep", (3, 3), "bool")
        return made.custom(lambda e, x: e.attention(x, x, x, heads=1, mask=fn(e.flow_input("keep"))))

    with pytest.raises(ShapeError, match=r"may be \[B, T\] or \[S, T\]"):
        square(lambda keep: keep).build()
    x, keep = RNG.standard_normal((3, 3, 4)).astype("f4"), np.tril(np.ones((3, 3), bool))
    for key, mask in ((np.s_[:, None], keep[:, None, None]), (np.s_[None], keep[None, None])):
        got = rlx.compile(square(lambda m, key=key: m[key]))(x, keep)
        want = formula.attention(*[x.astype(float)] * 3, heads=1, kv_heads=1, keep=mask)
        np.testing.assert_allclose(got, want, atol=3e-5)


OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": True, "window": 2}, {"extra": ("keep",)}, {"extra": ("keep", "bias"), "softcap": 2.0, "scale": 0.3},
    {"ahead": 1, "window": 2}, {"extra": ("keep", "sinks"), "causal": True}, {"extra": ("positions",), "causal": True},
    {"extra": ("key_positions",), "causal": True, "window": 3},
]  # fmt: skip


@pytest.mark.parametrize("options", [OPTIONS[i] for i in (1, 3, 5)], ids=str)
def test_heads_first_is_eval(options: dict[str, Any]) -> None:
    """The operands laid out head by head: the same numbers as `eval`, which the formulas hold, with every option."""
    op, arrays = AttentionOp(N, K, **options), attention_operands(options, T)
    ways = functools.partial(IMPLEMENTATIONS["heads_first"], op), op.eval
    got, want = jax.jit(lambda *a: [way(*a) for way in ways])(*arrays)
    np.testing.assert_allclose(got, want, atol=2e-6)
    call = op, tuple(TensorType(a.shape, a.dtype) for a in arrays)
    assert choose(call, DEVICES["cpu"], "auto").implementation == "heads_first"
    assert choose(call, DEVICES["cpu"], "xla").implementation == "xla"
    assert "heads" not in choose(call, DEVICES["cuda"], "auto").implementation


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("options", [{"extra": ("keep",)}, {"causal": True}, {"extra": ("keep", "sinks")}], ids=str)
def test_masked_key_that_is_not_finite(options: dict[str, Any], value: float) -> None:
    """Its scores are no numbers, and no other key's weight depends on them."""
    op, (q, k, v, *extra) = AttentionOp(N, K, **options), attention_operands(options, T)
    if "keep" in op.extra:
        extra[0] = np.arange(T)[None] < [[T - 1]] * B
    broken = k.copy()
    broken[:, -1] = value
    rows = slice(None) if "keep" in op.extra else slice(-1)  # a causal mask hides the last key from all but one query
    for run in (op.eval, functools.partial(IMPLEMENTATIONS["heads_first"], op)):
        np.testing.assert_array_equal(run(q, broken, v, *extra)[:, rows], run(q, k, v, *extra)[:, rows])


def test_heads_first_in_f16_with_large_values() -> None:
    """The weights are divided after the product, whose sum over the keys is over the largest f16."""
    q, v = np.zeros((1, 512, 8), np.float16), np.full((1, 512, 8), 200, np.float16)
    np.testing.assert_array_equal(IMPLEMENTATIONS["heads_first"](AttentionOp(1, 1), q, q, v), v)


def attention_operands(options: dict[str, Any], queries: int) -> list[Any]:
    """Random operands of an `AttentionOp(N, K, **options)` with S = `queries`."""
    rng = np.random.default_rng(3)
    widths = ((queries, N * D), (T, K * D), (T, K * E))
    operands = {
        "keep": rng.random((B, T)) < 0.6,
        "bias": rng.standard_normal((B, N, queries, 1)).astype("f4"),
        "sinks": rng.standard_normal(N).astype("f4"),
        "positions": (np.arange(queries) + np.arange(B)[:, None]).astype("i4"),
        "key_positions": (np.arange(T) + np.arange(B)[:, None]).astype("i4"),
    }
    rest = [operands[name] for name in options.get("extra", ())]
    return [*(rng.standard_normal((B, *shape)).astype("f4") for shape in widths), *rest]


@pytest.mark.parametrize(("options", "queries"), [({}, T + 2), *((OPTIONS[i], 3) for i in (1, 3, 7))])
def test_query_chunks_equal_eval(options: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2 queries, the last one padded where S is odd: results and gradients of q, k and v as of `eval`."""
    monkeypatch.setattr("rlx_jax.lowering.lir.attention.CHUNK_SCORE_BYTES", 2 * 4 * B * N * T)
    op = AttentionOp(N, K, **options)
    operands = [jax.numpy.asarray(a) for a in attention_operands(options, queries)]
    weights = np.random.default_rng(4).standard_normal((B, queries, N * E)).astype("f4")

    def value_and_gradients(run: Any) -> Any:
        def weighted(q: Any, k: Any, v: Any) -> Any:
            out = run(q, k, v, *operands[3:])
            return (out * weights).sum(), out

        return jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(*operands[:3])

    direct = value_and_gradients(op.eval)
    chunked = value_and_gradients(functools.partial(IMPLEMENTATIONS["query_chunks"], op))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), chunked, direct)


def test_attention_without_cudnn_needs_no_memory_of_all_scores() -> None:
    """The scores of 8 x 2048 tokens take 4 GiB a layer. In f32 they are never all in memory, in a gradient neither."""
    op = AttentionOp(32, 8, causal=True)
    shapes = [(8, 2048, n * 64) for n in (32, 8, 8)]
    for dtype, name, implementation in (
        ("f4", "h200", "query_chunks"),
        ("bfloat16", "h200", "cudnn"),
        ("f4", "cpu", "query_chunks"),
    ):
        call = op, tuple(TensorType(shape, jax.numpy.dtype(dtype)) for shape in shapes)
        assert choose(call, DEVICES[name], "auto").implementation == implementation
    assert choose(call, DEVICES["h200"], "xla").implementation == "xla"

    def loss(q: Any, k: Any, v: Any) -> Any:
        return IMPLEMENTATIONS["query_chunks"](op, q, k, v).sum()

    specs = [jax.ShapeDtypeStruct((1, 4096, shape[2]), "f4") for shape in shapes]
    memory: Any = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*specs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**31  # `eval` keeps three arrays of 2**31 bytes
