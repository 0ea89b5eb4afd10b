"""The stage SelfAttention against float64 formulas, over devices, and as a model that generates."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import SelfAttention
from rlx_jax.errors import GraphError
from tests.divided import mesh
from tests.oracles import op_formulas as formula

H, N, K, D = 24, 8, 4, 4
RNG = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


WEIGHTS = {
    "a.q.weight": normal(N * D, H), "a.k.weight": normal(K * D, H), "a.v.weight": normal(K * D, H),
    "a.q.bias": normal(N * D), "a.k.bias": normal(K * D), "a.v.bias": normal(K * D),
    "a.o.weight": normal(H, N * D), "a.o.bias": normal(H),
    "b.qkv.weight": normal(H, 3 * N * 3), "b.qkv.bias": normal(3 * N * 3), "b.o.weight": normal(N * 3, H),
    "a.sinks": 2 + normal(N),
}  # fmt: skip
WIDE = {key: value.astype(np.float64) for key, value in WEIGHTS.items()}
THREE = SelfAttention(
    ("a.q.weight", "a.k.weight", "a.v.weight"), "a.o.weight", N, kv_heads=K, head_dim=D,
    qkv_bias=("a.q.bias", "a.k.bias", "a.v.bias"), out_bias="a.o.bias", mask_input="keep", rope_theta=50.0,
    rope_style="interleaved", softcap=4.0, window=4, bias="relative", sinks="a.sinks",
)  # fmt: skip
FUSED = SelfAttention("b.qkv.weight", "b.o.weight", N, qkv_bias="b.qkv.bias", transpose=False, scale=0.4, causal=True)
X = RNG.standard_normal((2, 5, H)).astype(np.float32)
KEEP = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]], np.int32)
BIAS = RNG.standard_normal((1, N, 5, 5)).astype(np.float32)


def flow(*stages: Any) -> rlx.ModelFlow:
    made = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).input("keep", ("batch", "seq"), "int32", default=None)
    made = made.input("relative", (1, N, "seq", "seq"))

    def register(emit: Any, x: Any) -> Any:
        emit.set_named("relative", emit.flow_input("relative"))
        return x

    for stage in stages:
        made = made.custom(register).stage(stage)
    return made


def three(x: np.ndarray, keep: np.ndarray | None) -> np.ndarray:
    q, k, v = (x @ WIDE[f"a.{n}.weight"].T + WIDE[f"a.{n}.bias"] for n in "qkv")
    tables = formula.rope_table(np.arange(5)[None], [50.0 ** (-2 * i / D) for i in range(D // 2)])
    q, k = (formula.rope(y, *tables, D, D, "interleaved") for y in (q, k))
    context = formula.attention(
        q, k, v, heads=N, kv_heads=K, window=4, ahead=3, softcap=4.0, keep=keep, bias=BIAS.astype(float),
        sinks=WIDE["a.sinks"],
    )  # fmt: skip
    return context @ WIDE["a.o.weight"].T + WIDE["a.o.bias"]


def fused(x: np.ndarray) -> np.ndarray:
    q, k, v = np.split(x @ WIDE["b.qkv.weight"] + WIDE["b.qkv.bias"], 3, axis=-1)
    return formula.attention(q, k, v, heads=N, kv_heads=N, causal=True, scale=0.4) @ WIDE["b.o.weight"]


@pytest.mark.parametrize("keep", [KEEP, None])
def test_formula(keep: np.ndarray | None) -> None:
    """Three weights and one, stored either way; the mask is there or not. Heads over eight devices are the same."""
    want = fused(three(X.astype(float), keep))
    given: dict[str, Any] = {} if keep is None else {"keep": keep}
    meshes = (None, mesh("tensor", 8), mesh("fsdp tensor", 4)) if keep is None else (None,)
    for over in meshes:
        got = rlx.compile(flow(THREE, FUSED), WEIGHTS, mesh=over)(x=X, relative=BIAS, **given)
        assert np.abs(np.asarray(got) - want).max() <= 3e-5 * np.abs(want).max()


def test_named_tables_and_the_context_alone() -> None:
    """Rope tables of a stage before, and a mask that AttnMask registered."""
    made = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).input("keep", ("batch", "seq"), "int32")
    made = made.stage(blocks.RopeTables.theta(2, 10.0, name="some"), blocks.AttnMask.from_input("keep"))
    stage = SelfAttention(("a.q.weight", "a.q.weight", "a.q.weight"), None, N, head_dim=D, rope="some", n_rot=2)
    got = rlx.compile(made.stage(stage), {"a.q.weight": WEIGHTS["a.q.weight"]})(X, KEEP)
    q = X.astype(float) @ WIDE["a.q.weight"].T
    turned = formula.rope(q, *formula.rope_table(np.arange(5)[None], [1.0]), D, 2)
    want = formula.attention(turned, turned, q, heads=N, kv_heads=N, keep=KEEP)
    np.testing.assert_allclose(got, want, atol=3e-5)


def test_no_column_is_rotated() -> None:
    """`n_rot=0` is attention without positions, under a base, under tables and without either."""
    for rotation in ({"rope_theta": 50.0}, {"rope": ""}, {}):
        stage = SelfAttention(("a.q.weight",) * 3, None, N, head_dim=D, causal=True, n_rot=0, **rotation)
        q = X.astype(float) @ WIDE["a.q.weight"].T
        want = formula.attention(q, q, q, heads=N, kv_heads=N, causal=True)
        made = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).stage(blocks.RopeTables.theta(D)).stage(stage)
        np.testing.assert_allclose(rlx.compile(made, {"a.q.weight": WEIGHTS["a.q.weight"]})(X), want, atol=3e-5)


def test_hugging_face_keys() -> None:
    assert SelfAttention.hf("p", 2) == SelfAttention(
        ("p.q_proj.weight", "p.k_proj.weight", "p.v_proj.weight"), "p.out_proj.weight", 2,
        qkv_bias=("p.q_proj.bias", "p.k_proj.bias", "p.v_proj.bias"), out_bias="p.out_proj.bias",
    )  # fmt: skip
    assert SelfAttention.hf("p", 2, names=("c_attn", "c_proj"), bias=False, causal=True) == SelfAttention(
        "p.c_attn.weight", "p.c_proj.weight", 2, causal=True
    )
    with pytest.raises(GraphError, match="expected names of"):
        SelfAttention.hf("p", 2, names=("q", "k", "o"))


A = ("a.q.weight", "a.k.weight", "a.v.weight")


@pytest.mark.parametrize("transpose", [True, False])
def test_fewer_key_heads_under_one_key(transpose: bool) -> None:
    """q, k and v of unequal widths that are stored as one are the three weights; heads over devices are the same."""
    joined = {kind: np.concatenate([WEIGHTS[f"a.{n}.{kind}"] for n in "qkv"]) for kind in ("weight", "bias")}
    own = {"qkv.weight": joined["weight"], "o.weight": WEIGHTS["a.o.weight"]}
    weights = {key: w if transpose else w.T.copy() for key, w in own.items()} | {"qkv.bias": joined["bias"]}
    biases = ("a.q.bias", "a.k.bias", "a.v.bias")
    three = SelfAttention(A, "a.o.weight", N, kv_heads=K, head_dim=D, qkv_bias=biases)
    options: dict[str, Any] = {"kv_heads": K, "head_dim": D, "qkv_bias": "qkv.bias", "transpose": transpose}
    one = SelfAttention("qkv.weight", "o.weight", N, **options)
    plain = rlx.ModelFlow("m").input("x", ("batch", "seq", H))
    separate = {key: WEIGHTS[key] for key in (*A, *biases, "a.o.weight")}
    want = np.asarray(rlx.compile(plain.stage(three), separate)(x=X))
    for over in (None, mesh("tensor", 4)):
        got = rlx.compile(plain.stage(one), weights, mesh=over)(x=X)
        np.testing.assert_allclose(got, want, atol=3e-5 * np.abs(want).max())
