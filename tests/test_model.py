"""`rlx_jax.compile` and `CompiledModel`: calls, checks, transformations, text, parameters, other platforms."""

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import DTypeError, RequestError, ShapeError
from rlx_jax.models import bert, llama
from rlx_jax.weights.initial import SMALL_SIZE
from tests.opening import load
from tests.oracles.checkpoints import FIXTURES
from tests.small import compiled, compiles_of, profile, w

LLAMA, BERT = FIXTURES / "llama" / "mha_tied_sparse", FIXTURES / "bert" / "bare_v5"
H, F, V, B, S = 8, 12, 11, 2, 3
X = np.random.default_rng(0).standard_normal((B, S, H)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, V, (B, S)).astype(np.int32)
Spec = jax.ShapeDtypeStruct


@pytest.fixture(scope="module")
def pair() -> Any:
    """`y = x * scale + ids`, over a float, an optional float and an integer input."""

    def body(emit: Any, x: Any) -> Any:
        scale = emit.optional_input("scale")
        x = x if scale is None else x * scale
        return x + emit.flow_input("ids").astype("f32").reshape(*x.shape[:2], 1)

    flow = (
        rlx.ModelFlow("pair").input("x", ("batch", "seq", H)).input("ids", ("batch", "seq"), dtype="int32")
        .input("scale", ("batch", 1, 1), default=None).custom(body)
    )  # fmt: skip
    return compiled(flow, {})


@pytest.fixture(scope="module")
def table() -> Any:
    """An embedding of 11 rows."""
    return compiled(rlx.ModelFlow("table").input("ids", ("batch", "seq"), dtype="int32").embed("e"), {"e": w(V, H)})


def mlp_flow() -> rlx.ModelFlow:
    """Two matrices with a SiLU between."""
    return (
        rlx.ModelFlow("mlp")
        .input("x", ("batch", H))
        .linear("w1")
        .custom(lambda e, x: e.silu(x))
        .linear("w2", bias="b2")
    )


MLP = {"w1": w(F, H), "w2": w(H, F), "b2": w(H)}


def mlp(x: np.ndarray) -> np.ndarray:
    """What it computes."""
    h = x @ MLP["w1"].T
    return (h / (1 + np.exp(-h))) @ MLP["w2"].T + MLP["b2"]


def number_of_compiles(run: Callable[[], Any]) -> int:
    return len(compiles_of(run)[1])


WANT = X + IDS[..., None]


def test_inputs_by_position_and_by_name(pair: Any) -> None:
    """In any mix; None is an absent optional input."""
    scale = np.array([[[2.0]], [[3.0]]], np.float32)
    for got in (pair(X, IDS), pair(X, ids=IDS), pair(x=X, ids=IDS), pair(ids=IDS, x=X), pair(X, IDS, None)):
        np.testing.assert_allclose(got, WANT, rtol=1e-6)
        assert isinstance(got, jax.Array) and got.dtype == np.float32
    for got in (pair(X, IDS, scale), pair(X, IDS, scale=scale), pair(scale=scale, ids=IDS, x=X)):
        np.testing.assert_allclose(got, X * scale + IDS[..., None], rtol=1e-6)


GOOD: dict[str, Any] = {
    "float64": X.astype(np.float64),
    "list": X.tolist(),
    "big endian": X.astype(">f4"),
    "not contiguous": np.repeat(X, 2, -1)[..., ::2],
    "negative stride": X[:, :, ::-1][:, :, ::-1],
    "unaligned": np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(X.shape),
    "jax array": jnp.asarray(X),
    "memoryview": memoryview(X),  # type: ignore[arg-type]
}


def read_only(x: np.ndarray) -> np.ndarray:
    """A copy that may not be written."""
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("name", [*GOOD, "read only"])
def test_arrays_of_every_layout(name: str, pair: Any) -> None:
    """Give the same numbers, and are left as they were."""
    x = read_only(X) if name == "read only" else GOOD[name]
    before = np.array(x, np.float64)
    np.testing.assert_allclose(pair(x, IDS), WANT, rtol=1e-6)
    np.testing.assert_array_equal(np.array(x, np.float64), before)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", ">i4"])
def test_integers_narrow_after_a_range_check(dtype: str, pair: Any) -> None:
    """int64 is NumPy's own default, so it is taken where the values fit."""
    np.testing.assert_allclose(pair(X, IDS.astype(dtype)), WANT, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint32", "float16", "bfloat16", "bool"])
def test_inputs_of_every_dtype(dtype: str) -> None:
    """64-bit inputs are 32-bit ones in JAX: values that fit are taken, others refused."""
    flow = rlx.ModelFlow("m").input("a", ("n",), dtype=dtype).custom(lambda e, x: x.astype("f32") + 1)
    model = compiled(flow, {})
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    np.testing.assert_array_equal(model(np.array([0, 1, 1]).astype(kind)), [1.0, 2.0, 2.0])
    if dtype == "int64":
        with pytest.raises(DTypeError):
            model(np.array([2**40]))


def test_ids_at_the_ends_are_fine(table: Any) -> None:
    """0 and V − 1, of any integer dtype."""
    for dtype in (np.uint8, np.int64, np.uint64):
        np.testing.assert_array_equal(table(np.array([[0, V - 1]], dtype)), w(V, H)[[[0, V - 1]]])


def test_apply_is_pure_and_goes_through_jit() -> None:
    """Alone, inside a jit, and with other parameters."""
    model = compiled(mlp_flow(), MLP)
    x = X[0]
    np.testing.assert_allclose(model(x), mlp(x), rtol=1e-5, atol=1e-6)
    for fn in (model.apply, jax.jit(model.apply), jax.jit(lambda p, x: model.apply(p, x=x))):
        np.testing.assert_allclose(fn(model.params, x), mlp(x), rtol=1e-5, atol=1e-6)
    zero = jax.tree.map(jnp.zeros_like, model.params)
    assert not np.any(model.apply(zero, x)) and np.any(model.apply(model.params, x))


def test_gradients_of_a_call() -> None:
    """A call is `apply` of the parameters, under `grad` and `jit` too."""
    model, x = compiled(mlp_flow(), MLP), X[0]
    grads = jax.grad(lambda p: (model.apply(p, x) ** 2).sum())(model.params)
    assert {k: v.shape for k, v in grads.items()} == {k: v.shape for k, v in MLP.items()}
    called = jax.grad(lambda p: (model.replace(p)(x) ** 2).sum())(model.params)
    jax.tree.map(np.testing.assert_array_equal, called, grads)
    jitted = jax.jit(lambda p: model.replace(p)(x))(model.params)
    np.testing.assert_allclose(jitted, model(x), rtol=1e-6)


def test_requests_of_traced_parameters() -> None:
    """What reads its results is refused by name; logits and hidden states go through."""
    lm, enc = load(LLAMA), load(BERT)
    grads = jax.jit(jax.grad(lambda p: rlx.CausalLM(lm.model.replace(p)).logits([[1, 2]]).sum()))(lm.model.params)
    assert grads.keys() == lm.model.params.keys()
    for model, ask in (
        (lm.model, lambda m: rlx.CausalLM(m).prefill([[1, 2]])[0].sum()),
        (lm.model, lambda m: rlx.CausalLM(m).generate([[1, 2]], 2)),
        (enc.model, lambda m: rlx.Encoder(m).embed([[1, 2]]).sum()),
    ):
        with pytest.raises(RequestError, match="parameters are traced .*differentiate logits"):
            jax.grad(lambda p, model=model, ask=ask: ask(model.replace(p)))(model.params)


def test_vmap_and_checkpoint() -> None:
    """Over inputs, over parameters, and recomputed."""
    model = compiled(mlp_flow(), MLP)
    many = jnp.asarray(np.stack([X[0], X[1], X[0] * 2]))
    got = jax.vmap(lambda x: model.apply(model.params, x))(many)
    np.testing.assert_allclose(got, np.stack([mlp(np.asarray(x)) for x in many]), rtol=1e-5, atol=1e-5)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a * 0]), model.params)
    got = jax.vmap(lambda p: model.apply(p, X[0]))(stacked)
    np.testing.assert_allclose(got[0], mlp(X[0]), rtol=1e-5, atol=1e-5)
    assert not np.any(got[1])
    plain = jax.jit(jax.grad(lambda p: model.apply(p, X[0]).sum()))(model.params)
    again = jax.jit(jax.grad(lambda p: jax.checkpoint(model.apply)(p, X[0]).sum()))(model.params)
    for key in plain:
        np.testing.assert_allclose(plain[key], again[key], rtol=1e-5, atol=1e-6)


def test_a_program_may_be_made_inside_a_trace() -> None:
    """A first use under jit, with constants to fold and an optional input that makes another program."""

    def body(emit: Any, x: Any) -> Any:
        scale = emit.optional_input("scale")
        x = x if scale is None else x * scale
        return x + emit.gelu(emit.constant(np.ones(H)))

    flow = rlx.ModelFlow("m").input("x", ("batch", H)).input("scale", ("batch", 1), default=None).custom(body)
    model = compiled(flow, {})
    got = jax.jit(lambda x, s: model.apply({}, x, s))(X[0], np.full((S, 1), 2, np.float32))
    np.testing.assert_allclose(got, 2 * X[0] + 0.8413447, rtol=1e-5)


def test_lower_is_like_jit_lower() -> None:
    """From shapes or arrays; it compiles, and says what it costs."""
    model = compiled(mlp_flow(), MLP)
    for given in ((Spec((5, H), np.float32),), (np.zeros((5, H), np.float32),)):
        lowered = model.lower(*given)
        assert isinstance(lowered, jax.stages.Lowered)
        costs: Any = lowered.cost_analysis()
        memory: Any = lowered.compile().memory_analysis()
        assert costs["flops"] >= 2 * 5 * 2 * F * H
        assert memory.output_size_in_bytes == 5 * H * 4
    named = model.lower(x=Spec((5, H), np.float32))
    assert named.as_text() == lowered.as_text()
    for wrong in (Spec((5, H), np.float16), Spec((5, H), np.int32)):
        with pytest.raises(DTypeError, match="x"):
            model.lower(wrong)
    with pytest.raises(ShapeError):
        model.lower(Spec((5, H + 1), np.float32))


def test_text_at_every_level() -> None:
    """The template needs no sizes; the others say so, or take the given or the last ones."""
    model = compiled(mlp_flow(), MLP)
    assert model.text("hir").startswith("hir @mlp (") and "← output" in model.text("hir")
    assert model.text("mir").startswith("mir @mlp (") or "mir @mlp" in model.text("mir")
    assert "batch" in model.text("jaxpr") and "dot_general" in model.text("jaxpr")
    model(np.zeros((7, H), np.float32))
    assert "f32[7,8]" in model.text("lir") and "7x8xf32" in model.text("stablehlo") and "f32[7,8]" in model.text("hlo")
    assert "f32[5,8]" in model.text("lir", Spec((5, H), np.float32))


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize(("platform", "roll"), [("cuda", "unroll"), ("tpu", "scan")])
def test_other_platforms_lower_here(platform: str, roll: str) -> None:
    """A Llama, a BERT and a custom flow, on a machine that has a CPU only."""
    config = llama.LlamaConfig(V, H, F, 2, 4, 2, 4, (1.0, 0.5))
    encoder = bert.BertConfig(V, H, F, 2, 2, max_position_embeddings=8)
    custom = rlx.ModelFlow("c").input("x", ("batch", "seq", H)).rms_norm("g").custom(
        lambda e, x: e.softmax(x @ x.transpose(0, 2, 1)) @ x + e.jax(jnp.sin, x)
    )  # fmt: skip
    ids, x = Spec((B, S), np.int32), Spec((B, S, H), np.float32)
    for flow, specs, given in (
        (llama.Llama32Flow(config), llama.weight_specs(config), (ids,)),
        (bert.BertFlow(encoder), bert.weight_specs(encoder), (ids, ids)),
        (custom, {"g": Spec((H,), np.float32)}, (x,)),
    ):
        model = compiled(flow, specs, profile=profile(layers={"roll": roll}))
        lowered = jax.jit(model.apply).trace(model.param_specs(), *given).lower(lowering_platforms=(platform,))
        assert "stablehlo" in lowered.as_text()


def test_params_are_the_checkpoint_by_key() -> None:
    """One leaf for each key, equal to what was given, on a device; `weights()` gives the same."""
    model = compiled(mlp_flow(), MLP)
    for held in (model.params, model.weights()):
        assert set(held) == set(MLP)
        for key, value in held.items():
            assert isinstance(value, jax.Array)
            np.testing.assert_array_equal(value, MLP[key])
    source = {k: v.copy() for k, v in MLP.items()}
    model = compiled(mlp_flow(), source)
    source["w1"][:] = 0  # later changes to the arrays that were given do not reach the model
    np.testing.assert_array_equal(model.params["w1"], MLP["w1"])


def test_replace_keeps_the_executables() -> None:
    """Other numbers, the same program; the old model is as it was."""
    model = compiled(mlp_flow(), MLP)
    model(X[0])
    other = model.replace(params={k: v * 2 for k, v in model.params.items()})
    assert number_of_compiles(lambda: other(X[0])) == 0
    assert np.abs(np.asarray(other(X[0])) - np.asarray(model(X[0]))).max() > 0.1
    np.testing.assert_allclose(model(X[0]), mlp(X[0]), rtol=1e-5, atol=1e-6)


def test_init_of_a_flow_with_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a weight is follows from who reads it, not from how its key is spelt. Those of one trace are the same, and
    small ones share a program."""
    flow = (
        rlx.ModelFlow("m").input("x", ("n", 64)).linear("first", bias="offset").layer_norm("scale", "shift")
        .linear("second", transpose=False).linear("third")
    )  # fmt: skip
    shapes = {"first": (256, 64), "offset": (256,), "scale": (256,), "shift": (256,), "second": (256, 161)}
    model = compiled(flow, {k: Spec(s, np.float32) for k, s in {**shapes, "third": (5, 161)}.items()})
    traced = {k: np.asarray(v) for k, v in jax.jit(model.init)(jax.random.key(0)).items()}
    normal = mock.Mock(side_effect=jax.random.normal)
    monkeypatch.setattr(jax.random, "normal", normal)
    params = {k: np.asarray(v) for k, v in model.init(jax.random.key(0)).items()}
    assert sorted(call.args[1] for call in normal.call_args_list) == [(256, 161), (SMALL_SIZE,), (SMALL_SIZE,)]
    for name, value in params.items():
        np.testing.assert_allclose(value, traced[name], rtol=3e-7)
    assert not params["offset"].any() and not params["shift"].any() and (params["scale"] == 1).all()
    np.testing.assert_allclose(params["first"].std(), 64**-0.5, rtol=0.1)
    np.testing.assert_allclose(params["second"].std(), 256**-0.5, rtol=0.1)


def test_a_bound_flow_compiles_ahead() -> None:
    """A static flow, or one with `bind`, is compiled by `compile`; the first call compiles nothing."""
    static = rlx.ModelFlow("s").input("x", (5, H)).linear("w1")
    bound = mlp_flow().bind(batch=5)
    for flow, weights in ((static, {"w1": MLP["w1"]}), (bound, MLP)):
        model = compiled(flow, weights)
        assert model.report().compiles == 1
        assert number_of_compiles(functools.partial(model, np.zeros((5, H), np.float32))) == 0


def test_a_cold_call_from_many_threads() -> None:
    """All get the right numbers, and one of them compiles."""
    model = compiled(mlp_flow(), MLP)
    xs = [X[0] * (i + 1) for i in range(8)]
    results: list[Any] = [None] * 8
    barrier = threading.Barrier(8)

    def work(i: int) -> None:
        barrier.wait()
        try:
            results[i] = np.asarray(model(xs[i]))
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    count = number_of_compiles(run)
    for x, got in zip(xs, results, strict=True):
        assert not isinstance(got, Exception), got
        np.testing.assert_allclose(got, mlp(x), rtol=1e-5, atol=1e-5)
    assert model.report().compiles == 1
    assert count == 1, f"{count} compiles for one program"
