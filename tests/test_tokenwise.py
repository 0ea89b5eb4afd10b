"""The proof that a function is token-wise: what it accepts, what it refuses and why, each held against numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from rlx_jax.lowering.hir.tokenwise import Verdict, token_wise

SIZES = {"batch": 3, "seq": 7}  # no other axis here has these sizes, so a size tells the dim
X = "float32 batch seq 8"
IDS = "int32 batch seq"
MASK = "bool batch seq"
SQUARE = "float32 batch seq seq"


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    args: tuple[str, ...] = (X,)
    reason: str = ""  # of a refusal
    dim: str = "seq"
    out_axes: tuple[int | None, ...] = (1,)

    def prove(self) -> Verdict:
        symbols = dict(zip(SIZES, jax.export.symbolic_shape(", ".join(SIZES)), strict=True))
        avals = []
        for arg in self.args:
            dtype, *shape = arg.split()
            avals.append(jax.ShapeDtypeStruct([symbols.get(size) or int(size) for size in shape], dtype))
        return token_wise(self.fn, avals, self.dim)

    def inputs(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        inputs = []
        for arg in self.args:
            dtype, *names = arg.split()
            shape = [SIZES.get(name) or int(name) for name in names]
            draw = (
                rng.standard_normal(shape)
                if dtype == "float32"
                else rng.integers(0, 2 if dtype == "bool" else 5, shape)
            )
            inputs.append(np.asarray(draw, dtype))
        return inputs

    def keeps(self, positions: Sequence[int], seed: int) -> bool:
        """Whether taking these positions of the inputs takes the same positions of the outputs, and nothing else."""
        inputs = self.inputs(seed)
        before = [self.take(y, positions) for y in jax.tree.leaves(jax.jit(self.fn)(*inputs))]
        after = jax.tree.leaves(jax.jit(self.fn)(*[self.take(x, positions) for x in inputs]))
        return all(
            a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
            for a, b in zip(after, before, strict=True)
        )

    def take(self, x: Any, positions: Sequence[int]) -> np.ndarray:
        for axis in [axis for axis, size in enumerate(x.shape) if size == SIZES[self.dim]]:
            x = np.take(x, positions, axis)
        return np.asarray(x)


def weight(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight(1, 1, 8)


def layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def swiglu(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x @ weight(8, 32), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ weight(16, 8)


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = x[..., :4], x[..., 4:]
    return x * cos + jnp.concatenate([-right, left], axis=-1) * sin


def heads(x: jax.Array) -> jax.Array:
    split = x.reshape(*x.shape[:2], 2, 4)
    return jnp.einsum("bshd,hde->bshe", split, weight(2, 4, 4)).reshape(x.shape)


def one_hot_experts(x: jax.Array) -> jax.Array:
    weights, experts = lax.top_k(jax.nn.softmax(x @ weight(8, 5), axis=-1), 2)
    routing = jnp.sum(jax.nn.one_hot(experts, 5) * weights[..., None], axis=-2)
    return jnp.einsum("bsh,ehk,bse->bsk", x, weight(5, 8, 8), routing)


def flattened_experts(x: jax.Array) -> jax.Array:
    """As tokens [b * s, h], the usual form of a mixture of experts."""
    tokens = x.reshape(-1, 8)
    logits = tokens @ weight(8, 5) + weight(1, 5)
    top = lax.top_k(logits, 2)[1]
    kept = jnp.where(jnp.any(jax.nn.one_hot(top, 5, dtype=bool), axis=1), logits, -1e9)
    out = jnp.einsum("te,th,ehf->tf", jax.nn.softmax(kept, axis=-1), tokens, weight(5, 8, 8))
    return out.reshape(x.shape)


def per_position_loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y) + lax.convert_element_type(i, y.dtype), x)


def scan_over_features(x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry + y, carry * y

    last, ys = lax.scan(step, jnp.zeros(x.shape[:2]), jnp.moveaxis(x, -1, 0))
    return jnp.moveaxis(ys, 0, -1) + last[..., None]


def scan_over_layers(x: jax.Array) -> jax.Array:
    return lax.scan(lambda y, w: (jax.nn.relu(y @ w), None), x, weight(4, 8, 8))[0]


def put_features(x: jax.Array, ids: jax.Array) -> jax.Array:
    one = jax.vmap(jax.vmap(lambda row, i: row.at[i].set(0.5).at[i + 1].add(1.0)))
    return one(x, ids).at[..., 6].multiply(2.0).at[:, :, jnp.array([0, 7])].set(1.0)


def while_outside(x: jax.Array, count: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, c[1] * 0.5), (jnp.int32(0), x))[1]


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

TOKEN_WISE = [
    Case("identity", lambda x: x), Case("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
    Case("softmax over features", lambda x: jax.nn.softmax(x, axis=-1)), Case("layer norm", layer_norm),
    Case("RMS norm", rms_norm),
    Case("linear with bias", lambda x, w, b: x @ w + b[None, None], (X, "float32 8 4", "float32 4")),
    Case("SwiGLU by split", swiglu), Case("heads, einsum and back", heads),
    Case("embedding", lambda table, ids: table[ids], ("float32 5 8", IDS)),
    Case("one-hot", lambda ids: jax.nn.one_hot(ids, 5), (IDS,)),
    Case("mask", lambda x, mask: jnp.where(mask[..., None], x, 0.0), (X, MASK)),
    Case("rotary with tables", rotary, (X, "float32 1 seq 8", "float32 1 seq 8")),
    Case("table of positions", lambda x, table: x + table[None], (X, "float32 seq 8")),
    Case("take along features", lambda x, ids: jnp.take_along_axis(x, ids[..., None], axis=-1), (X, IDS)),
    Case("features by index", lambda x: x[:, :, jnp.array([3, 1])] + x[:, :, -1:]),
    Case("features by an input", lambda x, i: x[:, :, i[0]], (X, "int32 1")),
    Case("dynamic slices of features", lambda x,
        i: lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, i[0], 2, axis=2), 3, axis=2), (X, "int32 1")),
    Case("top-k", lambda x: lax.top_k(x, 2), out_axes=(1, 1)),
    Case("sorted by keys", lambda x: lax.sort((x, -x), num_keys=2), out_axes=(1, 1)),
    Case("sort and argmax of features", lambda x: (jnp.sort(x), jnp.argsort(x), jnp.argmax(x, -1)), out_axes=(1,) * 3),
    Case("cumsum of features", lambda x: jnp.cumsum(x, axis=-1)[..., ::-1]),
    Case("experts by one-hot", one_hot_experts), Case("experts over flattened tokens", flattened_experts),
    Case("matrix per position", lambda x, w: jnp.einsum("bsh,bshk->bsk", x, w), (X, "float32 batch seq 8 4")),
    Case("vmap over positions", jax.vmap(jax.vmap(lambda v: v[jnp.argmax(v)] * v))),
    Case("pad and tile of features", lambda x: jnp.tile(jnp.pad(x, ((0, 0), (0, 0), (1, 2))), (1, 1, 2))),
    Case("max pool of features", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID")),
    Case("loop", per_position_loop), Case("scan over features", scan_over_features),
    Case("scan over layers", scan_over_layers), Case("scatter into features", put_features, (X, IDS)),
    Case("while on an input", while_outside, (X, "int32")), Case("custom_vjp", straight_through),
    Case("gradient", jax.grad(lambda x: jnp.sum(jnp.square(jnp.tanh(x))))),
    Case("layout along the dim", lambda x: x + jnp.zeros(x.shape) + lax.broadcasted_iota(jnp.float32, x.shape, 2)),
    Case("dead size read", lambda x: (x.shape[1] * jnp.ones(()), x)[1]),
    Case("no dim at all", lambda w: (w @ w, jnp.linalg.inv(w)), ("float32 8 8",), out_axes=(None, None)),
    Case("attention, of a batch", lambda x: jax.nn.softmax(x @ x.mT) @ x, dim="batch", out_axes=(0,)),
    Case("causal scan, of a batch", lambda x: jnp.cumsum(x, axis=1), dim="batch", out_axes=(0,)),
    Case("last by lengths, of a batch", lambda x, n: jnp.take_along_axis(x, n[:, None, None], 1)[:, 0],
        (X, "int32 batch"), dim="batch", out_axes=(0,)),
]  # fmt: skip


def conv(x: jax.Array, width: int) -> jax.Array:
    return lax.conv_general_dilated(x, weight(width, 8, 8), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def attention(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


def linear_attention(x: jax.Array) -> jax.Array:
    return x @ jnp.einsum("bsh,bsk->bhk", x, x)


def recurrent(x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry * 0.5 + y, carry

    return lax.scan(step, x[:, 0] * 0, jnp.moveaxis(x, 1, 0))[1]


def dropout(x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0.0)


def write_first(x: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, jnp.zeros((x.shape[0], 1, 8)), (0, 0, 0))


def through_a_ref(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = jnp.sum(x)
    return x + ref[...]


def swapped_merge(x: jax.Array) -> jax.Array:
    """Two flattenings that have one shape but different orders."""
    return (x.reshape(-1, 8) + x.transpose(1, 0, 2).reshape(-1, 8)).reshape(x.shape)


def constant_halves(x: jax.Array) -> jax.Array:
    """Knows the middle of the sequence, although each operand of the concatenation is the same everywhere."""
    halves = jnp.concatenate([jnp.zeros(x.shape), jnp.ones(x.shape)], axis=1)
    return x + halves.reshape(*x.shape[:2], 2, 8)[:, :, 0]


MIXERS = [
    Case("mean centring", lambda x: x - x.mean(1, keepdims=True), reason="reduce_sum reduces over 'seq' (axis 1 of"),
    Case("softmax over positions", lambda x: jax.nn.softmax(x, axis=1), reason="reduce_max reduces over"),
    Case("cumsum", lambda x: jnp.cumsum(x, axis=1), reason="cumsum accumulates along"),
    Case("attention", attention, reason="dot_general crosses positions of"),
    Case("linear attention", linear_attention, reason="dot_general contracts"),
    Case("pairs", lambda x: (x[:, :, None] * x[:, None]).max(2), reason="mul crosses positions of 'seq'"),
    Case("matmul over positions", lambda x, w: jnp.einsum("bsh,st->bth", x, w), (X, "float32 seq 7"),
        "dot_general contracts"),
    Case("reversal", lambda x: lax.rev(x, (1,)), reason="rev reverses"),
    Case("shift", lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], reason="pad pads"),
    Case("convolution", lambda x: conv(x, 3), reason="conv_general_dilated slides over"),
    Case("window", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME"),
        reason="reduce_window_sum slides over"),
    Case("sort", lambda x: jnp.sort(x, axis=1), reason="sort sorts along"),
    Case("scan", recurrent, reason="scan runs over 'seq'"),
    Case("loop as long as the sequence", lambda x: lax.fori_loop(0, x.shape[1], lambda i, y: y + 1.0, x),
        reason="dim_as_value depends on the size of 'seq'"),
    Case("cond on all positions", lambda x: lax.cond(jnp.square(x).sum() > 100, jnp.sin, jnp.cos, x),
        reason="reduce_sum reduces over"),
    Case("fft", lambda x: jnp.fft.fft(x, axis=1).real, reason="fft transforms along"),
    Case("first position", lambda x: x[:, 0], reason="gather picks from"),
    Case("last position", lambda x: x[:, -1], reason="dim_as_value depends on the size of 'seq'"),
    Case("every second", lambda x: lax.slice_in_dim(x, 0, x.shape[1], 2, axis=1), reason="slice takes a part of"),
    Case("positions by index", jax.vmap(lambda x,
        ids: x.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)), (X, IDS), "gather picks from"),
    Case("write to the first", write_first, reason="dynamic_update_slice writes a part of"),
    Case("set the first", lambda x: x.at[:, 0].set(0.0), reason="scatter writes positions of"),
    Case("positions from iota", lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1),
        reason="iota counts along 'seq' (axis 1 of f32[batch,seq,8])"),
    Case("size as a length", lambda x: x + lax.scan(lambda c, _: (c + 1, None), 0.0, length=x.shape[1])[0],
        reason="does not trace with symbolic sizes"),
    Case("dropout", dropout, reason="random_bits depends on the size of 'seq'"),
    Case("reshape that swaps", lambda x: x.reshape(x.shape[1], x.shape[0], 8), reason="reshape mixes positions of"),
    Case("two flattenings", swapped_merge,
         reason="add has operands with two layouts of 'seq' (axis 0 of f32[batch*seq,8])"),
    Case("left flattened", lambda x: x.reshape(-1, 8), reason="output 0 does not have 'seq' as one full axis"),
    Case("concatenation", lambda x: jnp.concatenate([x, x], axis=1), reason="concatenate concatenates along"),
    Case("constant halves", constant_halves, reason="concatenate concatenates along"),
    Case("tile", lambda x: jnp.tile(x, (1, 2, 1)), reason="tile repeats"),
    Case("mutable array", through_a_ref, reason="new_ref has effects"),
    Case("inverse", lambda x: jnp.linalg.inv(x), (SQUARE,), "input 0 does not have 'seq' as one full axis"),
    Case("branch on the size", lambda x: x * 2 if x.shape[1] > 4 else x, reason="InconclusiveDimensionOperation"),
    Case("constant table cut to size", lambda x: x + weight(10, 8)[None, : x.shape[1]], reason="does not trace"),
    Case("batch norm", lambda x: x - x.mean(0, keepdims=True), reason="reduce_sum reduces over 'batch'", dim="batch"),
    Case("attention across a batch", lambda x: attention(x.swapaxes(0, 1)), dim="batch", reason="dot_general crosses"),
]  # fmt: skip

# Refused although token-wise: safe, and each is here so that it is known.
CONSERVATIVE = [
    Case("kernel of width 1", lambda x: conv(x, 1), reason="conv_general_dilated slides over"),
    Case("inverse per position", lambda w: jnp.linalg.inv(w), ("float32 batch seq 4 4",), "has no rule that proves"),
    Case("there and back", lambda x: lax.rev(lax.rev(x, (1,)), (1,)), reason="rev reverses"),
    Case("host callback", lambda x: jax.pure_callback(np.sin, x, x), reason="pure_callback has no rule that"),
]  # fmt: skip


def rolled_and_cut(case: Case) -> list[bool]:
    """Whether it keeps positions that are moved, left out, and one alone."""
    size = SIZES[case.dim]
    return [case.keeps(positions, 0) for positions in ([*range(1, size), 0], range(size - 1), [0])]


@pytest.mark.parametrize("case", TOKEN_WISE, ids=lambda case: case.name)
def test_token_wise_is_accepted(case: Case) -> None:
    assert case.prove() == Verdict(True, "", case.out_axes)


@pytest.mark.parametrize("case", MIXERS + CONSERVATIVE, ids=lambda case: case.name)
def test_mixer_is_refused(case: Case) -> None:
    verdict = case.prove()
    assert case.reason in verdict.reason
    assert (verdict.token_wise, verdict.out_axes) == (False, ())


# Each takes a value and one of its axes.
STEPS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "move": lambda x, i: jnp.moveaxis(x, i, 0),
    "merge": lambda x, i: x.reshape(*x.shape[:i], -1, *x.shape[i + 2 :]) if i + 1 < x.ndim else x,
    "add axis": lambda x, i: jnp.stack([x, x * 2.0], axis=i),
    "take first": lambda x, i: jnp.take(x, jnp.array([0, 0]), axis=i, mode="clip"),
    "take largest": lambda x, i: jnp.take_along_axis(x, jnp.argmax(x, axis=i, keepdims=True), axis=i),
    "centre": lambda x, i: x - x.max(i, keepdims=True), "sum": lambda x, i: x.sum(i, keepdims=True),
    "cumsum": lambda x, i: lax.cumsum(x, i), "reverse": lambda x, i: lax.rev(x, (i,)),
    "sort": lambda x, i: lax.sort(x, dimension=i), "double": lambda x, i: jnp.concatenate([x, jnp.sin(x)], axis=i),
    "shift": lambda x, i: lax.pad(x, jnp.float32(0), [(1, -1, 0) if j == i else (0, 0, 0) for j in range(x.ndim)]),
    "count": lambda x, i: x + lax.broadcasted_iota(jnp.float32, x.shape, i), "size": lambda x, i: x * x.shape[i],
    "scan": lambda x, i: lax.scan(lambda c, y: (c + y, c), jnp.zeros_like(x.sum(i)), jnp.moveaxis(x, i, 0))[1],
    "dot": lambda x, i: lax.dot_general(x, jnp.sin(x), (((i,), (i,)), ([j := (i + 1) % x.ndim], [j]))),
    "write": lambda x, i: lax.dynamic_update_slice_in_dim(x, x * 2.0, 1, axis=i),
}  # fmt: skip


@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=1, max_size=4),
    dim=st.sampled_from(sorted(SIZES)),
)
def test_no_random_mixer_is_accepted(steps: list[tuple[str, int]], dim: str) -> None:
    def fn(x: jax.Array) -> jax.Array:
        for name, axis in steps:
            x = STEPS[name](x, axis % x.ndim)
            assume(1 < x.ndim < 5)
        return x

    case = Case("", fn, dim=dim)
    if case.prove().token_wise:
        assert all(rolled_and_cut(case))


def test_a_branch_on_size_one_is_not_seen() -> None:
    """The known gap: a symbol is not equal to 1, so only the other branch is traced."""
    assert Case("", lambda x: x * 2 if x.shape[1] == 1 else x).prove().token_wise


@pytest.mark.parametrize("size", ["2*seq", "seq + 1", "batch*seq"])
def test_input_holds_the_dim_as_a_whole(size: str) -> None:
    scope = jax.export.SymbolicScope()
    aval = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"{size}, 8", scope=scope), jnp.float32)
    assert token_wise(lambda x: x, [aval], "seq").reason.startswith("input 0 does not have 'seq' as one full axis")


def test_dim_is_matched_as_a_word() -> None:
    seq, seq2 = jax.export.symbolic_shape("seq, seq2")
    aval = jax.ShapeDtypeStruct((seq2, seq), jnp.float32)
    assert token_wise(lambda x: x.sum(0), [aval], "seq") == Verdict(True, "", (0,))


def test_mistakes_of_the_function_are_raised() -> None:
    with pytest.raises(TypeError, match="contracting"):
        Case("", lambda x: x @ weight(4, 4)).prove()
    with pytest.raises(ZeroDivisionError):
        Case("", lambda x: x / (1 // 0)).prove()


def test_pytrees() -> None:
    verdict = Case("", lambda x: {"a": x, "b": (jnp.ones(3), x.sum(-1).T)}).prove()
    assert verdict == Verdict(True, "", (1, None, 0))
