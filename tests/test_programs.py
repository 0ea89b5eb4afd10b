"""The programs of a model: few for many sizes, none that waits for the host, and no more kept than asked for."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.errors import RequestError
from rlx_jax.ir.graph import Builder, Input, StateRead, TypeCache
from rlx_jax.ir.ops.pointwise import Binary, CastTo
from rlx_jax.ir.paths import StateLeaf
from rlx_jax.ir.types import TensorType, as_dtype, symbol
from rlx_jax.models.llama import Llama32Flow
from rlx_jax.runtime.compile_flow import compile_together
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.runtime.program_key import ProgramKey, Variant
from rlx_jax.weights.format import OpenOptions
from tests.divided import RING_VOCAB, windowed
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close
from tests.small import compiles_of
from tests.test_serving import CONFIG, PROMPTS, SAMPLERS, VOCAB, model, weights

BERT = checkpoints.FIXTURES / "bert" / "bare_v5"
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3], [9, 8], [2] * 16]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A tiny Llama without buckets."""
    return model()


def encoder(**buckets: Any) -> Any:
    """A tiny BERT with these buckets."""
    return rlx.load(BERT, profile=rlx.CompileProfile().replace(buckets=buckets))


@pytest.fixture(scope="module")
def bert() -> Any:
    """Without buckets."""
    return encoder()


def test_prefill_and_extend_dispatch_one_program(plain: Any) -> None:
    """The logits of the last tokens come from the program itself; only padding rows are cut off by another one."""
    ids, helpers = np.ones((2, 16), np.int32), plain.model.programs.helpers
    before = set(helpers)
    logits, state = plain.prefill(ids, max_len=32, logits="last")
    assert logits.shape == (2, VOCAB)
    assert plain.extend(state, ids[:, :1], logits="last")[0].shape == (2, VOCAB)
    assert set(helpers) == before


def test_an_encoder_has_buckets(bert: Any) -> None:
    """After warm-up nothing compiles, whatever the lengths and however many texts; the vectors are the same."""
    warm = encoder(prompt=[4, 16], batch=[1, 4], on_recompile="error")
    warm.warmup()
    got, events = compiles_of(lambda: [warm.embed(rows) for rows in (ROWS, ROWS[:2], ROWS[2:3])])
    assert not events and warm.report().recompiles == 0
    assert warm.report().compiles == 4
    for vectors, rows in zip(got, (ROWS, ROWS[:2], ROWS[2:3]), strict=True):
        assert_close(vectors, bert.embed(rows))
    for tokens, lengths in (([[1, 2, 3]], [3]), ([[1, 2, 3], [4, 5, 6]], [3, 2])):
        got, want = (e.hidden_states(tokens, lengths)[-1, : lengths[-1]] for e in (warm, bert))
        assert_close(got, want)
    blocks = [np.arange(rows * width).reshape(rows, width) % 9 for rows, width in ((1, 4), (2, 3), (4, 16))]
    # blocks of a bucket, and those that are cut from one
    states, events = compiles_of(lambda: [warm.hidden_states(block) for block in blocks])
    assert not events and (warm.report().compiles, warm.report().recompiles) == (4, 0)
    for block, got in zip(blocks, states, strict=True):
        count, width = block.shape
        whole = np.pad(block, ((0, 4 - count), (0, 16 - width)))
        assert_close(got, bert.hidden_states(whole, [width] * count + [1] * (4 - count))[:count, :width])
    with pytest.raises(RequestError, match="'attention_mask'.*'token_type_ids'"):
        warm.hidden_states([[1, 2]], token_type_ids=[[0, 0]])


def test_what_an_encoder_has_no_bucket_for() -> None:
    """Named before anything runs, and before warm-up too."""
    asked = encoder(prompt=[4, 16], batch=[1, 4], on_recompile="error")
    with pytest.raises(RequestError, match=r"texts\[1\].*17.*buckets.prompt.*\[4, 16\]"):
        asked.embed([[1], [2] * 17])
    for rows, said in (([[1] * 17], "1 rows, length 17"), ([[1]] * 5, "8 rows, length 4")):
        with pytest.raises(RequestError, match=f"with {said}: no padded program"):
            asked.hidden_states(rows)
    assert asked.report().compiles == 0


def test_lengths_share_programs() -> None:
    """`logits`, `prefill` and `extend` of every length up to 16 are one program each, and extend's powers of two."""
    lm = model()
    for n in (1, 2, 3, 7, 15, 16):
        lm.logits([[1] * n])
        _, state = lm.prefill([[1] * n])
    for n in range(2, 9):
        _, state = lm.extend(state, [[1] * n])
    names = sorted(key.program for key in lm.model.programs.executables)
    assert names == ["extend"] * 3 + ["forward", "prefill"]


def test_a_flow_that_mixes_positions_is_not_padded() -> None:
    """No cached program can be derived from it, and its logits are those of exactly the tokens given."""
    eye = np.eye(VOCAB, dtype=np.float32)
    flow = (
        rlx.ModelFlow("mean").input("tokens", ("batch", "seq"), dtype="int32").embed("table")
        .custom_named("centre", lambda emit, x: x - x.mean(1, keepdims=True))
    )  # fmt: skip
    for buckets in ({}, {"prompt": [8]}):
        lm = rlx.CausalLM(flow, {"table": eye}, profile=rlx.CompileProfile().replace(buckets=buckets))
        want = eye[[1, 2, 3]] - eye[[1, 2, 3]].mean(0)
        np.testing.assert_allclose(lm.logits([[1, 2, 3]])[0], want, atol=1e-6)


def extended(lm: Any) -> None:
    _, state = lm.prefill([[1, 2, 3], [4, 5, 0]], [3, 2])
    _, state = lm.extend(state, [[7], [8]])
    lm.extend(state, [[7, 1], [8, 0]], [2, 1], logits="last")
    assert state.lengths.tolist() == [4, 3]


def stepped(lm: Any) -> None:
    """The cached programs as functions of their state."""
    read, step = (dataclasses.replace(lm.model, program=name) for name in ("prefill", "extend"))
    _, state = read(np.ones((1, 3), np.int32), np.full(1, 3, np.int32), state=read.init_state(1, 16))
    step(np.ones((1, 1), np.int32), np.ones(1, np.int32), state=state)


REQUESTS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda lm: lm.generate(PROMPTS, 9, SAMPLERS[2], stop=[3], seed=2**40),
    "stream": lambda lm: list(lm.stream(PROMPTS[1], 9)),
    "prefill and extend": extended, "logits": lambda lm: lm.logits([[1, 2, 3], [4, 5, 6]]),
    "a model": lambda lm: lm.model(np.ones((2, 5), np.int64)), "a model with state": stepped,
}  # fmt: skip
"""What a `CausalLM` is asked."""


def test_nothing_goes_to_the_device_unasked(plain: Any, bert: Any) -> None:
    """After a first call. What comes back is asked for too, which the CPU, where nothing has to move, cannot show."""
    for request in REQUESTS.values():
        request(plain)
        with jax.transfer_guard("disallow"):
            request(plain)
    for _ in range(2):
        with jax.transfer_guard("disallow") if _ else contextlib.nullcontext():
            bert.embed(ROWS)
            bert.hidden_states([[1, 2], [3, 0]], [2, 1])


def doubling(programs: int) -> Any:
    """A model of any batch that keeps so many programs."""
    flow = rlx.ModelFlow("twice").input("x", ("batch", 3)).custom(lambda emit, x: x * 2.0)
    return rlx.compile(flow, {}, profile=rlx.CompileProfile().replace(buckets={"programs": programs}))


def live() -> int:
    """Executables that the backend holds."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.slow
def test_the_least_recently_used_program_goes() -> None:
    """The process holds no more than the limit, the report counts the others, and one that is gone comes back."""
    m = doubling(programs=3)
    m(np.ones((1, 3), np.float32))
    before = live()
    for n in range(1, 9):
        m(np.ones((1, 3), np.float32))  # used again and again, so it stays
        np.testing.assert_array_equal(m(np.full((n, 3), n, np.float32)), np.full((n, 3), 2 * n))
    assert live() - before < 6  # of 8, and what else the process ran meanwhile
    assert (m.report().compiles, m.report().evicted) == (8, 5) and "evicted" in str(m.report())
    assert [dict(k.binding)["batch"] for k in m.programs.executables] == [7, 1, 8]
    m(np.ones((2, 3), np.float32))
    assert m.report().compiles == 9 and "f32[2,3]" in m.text("lir")


def test_a_state_goes_on_after_its_program_is_gone(plain: Any) -> None:
    lm = model(programs=1)
    _, state = lm.prefill([[1, 2, 3]], max_len=16)
    got, _ = lm.extend(state, [[4]])
    np.testing.assert_allclose(got, plain.extend(plain.prefill([[1, 2, 3]], max_len=16)[1], [[4]])[0], atol=1e-6)


def adding(tables: list[np.ndarray]) -> Any:
    """A flow that adds tables of its own, one stage after the other."""
    flow = rlx.ModelFlow("tables").input("x", ("batch", tables[0].size))
    for i, table in enumerate(tables):
        flow = flow.custom_named(f"add{i}", plus(table))
    return flow


def plus(table: np.ndarray) -> Callable[[Any, Any], Any]:
    """A stage that adds a table."""
    return lambda emit, x: emit.jax(lambda y: y + table[None], x)


def test_the_constants_of_a_program_are_counted_together() -> None:
    """Five stages of 640 kB are over the limit, whichever of them are on their own; one table five times is not."""
    tables = [np.full(160_000, n, np.float32) for n in range(5)]
    with pytest.raises(errors.GraphError, match=r"3200000 bytes of constants .*weight.*add\d jax\(.*: 640000 bytes"):
        rlx.compile(adding(tables), {})
    assert rlx.compile(adding(tables[:1] * 5), {})(np.zeros((1, 160_000), np.float32)).sum() == 0


def head(name: str, *keys: str) -> Any:
    """Ids through a shared table, then a product with each of the weights."""
    flow = rlx.ModelFlow(name).input("tokens", ("batch", "seq"), dtype="int32").embed("table")
    for key in keys:
        flow = flow.linear(key)
    return flow


def test_flows_share_their_weights() -> None:
    """One array for what two flows read, one cache for their programs, and each answers as it does alone."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.normal(size=(7, 4)).astype("f4"), "a": rng.normal(size=(5, 4)).astype("f4")}
    weights["b"] = rng.normal(size=(3, 4)).astype("f4")
    flows = {"one": head("one", "a"), "two": head("two", "b")}
    models = compile_together([*flows.values()], weights)
    one, two = (model.require_params("the test") for model in models.values())
    assert sorted(one) == ["a", "b", "table"] and models["one"].programs is models["two"].programs
    assert all(one[key] is two[key] for key in weights)
    for name, key in (("one", "a"), ("two", "b")):
        alone = rlx.compile(flows[name], {k: weights[k] for k in ("table", key)})
        np.testing.assert_array_equal(models[name]([[1, 2]]), alone([[1, 2]]))
    assert models["two"].report().compiles == 2 and {k.flow for k in models["one"].programs.executables} == {*flows}
    assert models["two"].report().parameter_bytes == 4 * (28 + 20 + 12)


def test_requests_run_the_programs_of_a_compiled_model(plain: Any) -> None:
    """A model and a smaller one over its weights generate as each alone does; what they compile is in one place."""
    flow = Llama32Flow(CONFIG).assemble()
    draft = rlx.ModelFlow("draft").input("input_ids", ("batch", "seq"), dtype="int32").token_embed()
    draft = draft.final_norm(1e-6).lm_head(VOCAB, 16, tied=False)
    models = compile_together([flow, draft], weights())
    small = {k: v for k, v in weights().items() if "layers" not in k}
    for name, alone in ((flow.name, plain), ("draft", rlx.CausalLM(draft, small))):
        lm = rlx.CausalLM(models[name])
        assert lm.generate(PROMPTS, max_new_tokens=4) == alone.generate(PROMPTS, max_new_tokens=4)
        assert lm.model.programs is models["draft"].programs
    assert {key.flow for key in models["draft"].programs.executables} == {flow.name, "draft"}
    with pytest.raises(errors.RequestError, match="'weights'.*'strict'"):
        rlx.CausalLM(models["draft"], weights(), strict=False)
    with pytest.raises(errors.GraphError, match="CausalLM.*compiled already.*model"):
        rlx.CausalLM(lm)
    assert rlx.Encoder(rlx.load(BERT).model).hidden_states([[1, 2]]).shape[:2] == (1, 2)


def test_a_weight_that_one_flow_merges_is_not_stored_twice() -> None:
    """q and k are one leaf where one flow reads both, and two where another reads q alone."""
    weights = {k: np.ones((4, 4), np.float32) for k in ("table", "q", "k")}
    both = head("both").custom(lambda emit, x: emit.linear(x, "q") + emit.linear(x, "k"))
    merged = make_programs([both], weights, OpenOptions(), merge=True)
    together = make_programs([both, head("other", "q")], weights, OpenOptions(), merge=True)
    assert len(merged.layout.params) == 2 and sorted(together.layout.params) == ["k", "q", "table"]


def test_outputs_of_a_program_are_chosen_by_name() -> None:
    """Of the last token, too: side outputs are there if they are asked for, and are not computed if not."""
    flow = head("m").store_stream("raw").linear("a").linear("a").with_extra_outputs(["raw"])
    rng = np.random.default_rng(0)
    weights = {"table": rng.normal(size=(7, 4)).astype("f4"), "a": rng.normal(size=(4, 4)).astype("f4")}
    m, tokens = rlx.compile(flow, weights), {"tokens": np.array([[1, 2, 3]], np.int32)}
    whole = m(tokens["tokens"])
    for names in (None, ("raw",), ("output",), ("raw", "output")):
        program = m.bind_to_sizes({"batch": 1, "seq": 3}, variant=Variant(outputs=names))
        outputs, _ = program(tokens, {})
        for name, got in zip(names or ("output", "raw"), outputs, strict=True):
            assert_close(got, whole[name][:, -1:])
    (less, more) = (m.programs.template(ProgramKey("m", "forward", outputs=(n,))).mir for n in ("raw", "output"))
    assert len(less.params()) == 1 and len(more.params()) == 2
    with pytest.raises(errors.GraphError, match="m: no output 'rwa'; .*did you mean 'raw'"):
        m.bind_to_sizes({"batch": 1, "seq": 3}, variant=Variant(outputs=("rwa",)))


def test_a_state_is_copied(plain: Any) -> None:
    """Two ways on from one prompt; a state that is consumed cannot be copied."""
    _, state = plain.prefill([[1, 2, 3]], max_len=16)
    twin = state.copy()
    one, _ = plain.extend(state, [[4]])
    other, _ = plain.extend(twin, [[4]])
    np.testing.assert_array_equal(one, other)
    with pytest.raises(errors.SessionStateError, match="consumed"):
        state.copy()
    bare = dataclasses.replace(plain.model, program="extend").init_state(2, 8)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(bare)}
    assert names == {".length", ".leaves['layers.0.self_attn.k']", ".leaves['layers.0.self_attn.v']"}
    assert jax.tree.map(np.shape, bare.copy()) == jax.tree.map(np.shape, bare)


def running_sum() -> Any:
    """A running sum of each row, as a flow with state, and the leaf."""
    types, t = TypeCache(), TensorType((symbol("batch"), 3), np.dtype(np.float32))
    b = Builder("sum", types)
    leaf = StateLeaf(("total",), "sum")
    x, held = b.leaf(Input("x", type=t)), b.leaf(StateRead(leaf, type=t))
    total = b(Binary("add"), held, x)
    b.inputs, b.writes = [Input("x", type=t)], [(leaf, total)]
    return rlx.GraphModule.from_hir(b.finish([total], ["total"]))


def test_a_forward_flow_may_have_state() -> None:
    """No program is derived, and there are no tokens to count."""
    m = rlx.compile(running_sum(), {})
    state = m.init_state(2)
    assert state.length is None and list(state.leaves) == ["total.sum"]
    for n in range(1, 4):
        out, state = m.apply({}, np.ones((2, 3), np.float32), state=state)
        np.testing.assert_array_equal(out, np.full((2, 3), n))
    out, _ = m(np.ones((2, 3), np.float32), state=state)
    np.testing.assert_array_equal(out, np.full((2, 3), 4))


@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"mixed": "auto_mixed_bf16"}])
def test_a_state_keeps_its_precision(precision: dict[str, str]) -> None:
    """What it is computed from is rounded as the profile says; the state is not, however many steps there are."""
    m = rlx.compile(running_sum(), {}, profile=rlx.CompileProfile().replace(precision=precision))
    state, third = m.init_state(1), np.full((1, 3), 1 / 3, np.float32)
    for _ in range(300):
        out, state = m(third, state=state)
    step = np.float64(third.astype(as_dtype(precision.get("compute", "f32"))))  # mixed gives inputs as they are
    assert state.leaves["total.sum"].dtype == np.float32
    np.testing.assert_allclose(out, 300 * step, rtol=1e-5)


def test_states_that_carry_each_other_keep_their_precision() -> None:
    """a ← b + x, b ← a; and a leaf in bf16 that is written and read apart stays in bf16."""
    types, t = TypeCache(), TensorType((symbol("batch"), 3), np.dtype(np.float32))
    b, half = Builder("turns", types), t.with_dtype("bf16")
    a_leaf, b_leaf, last = (StateLeaf((name,), "s") for name in ("a", "b", "last"))
    x = b.leaf(Input("x", type=t))
    a, other, seen = (b.leaf(StateRead(n, type=d)) for n, d in ((a_leaf, t), (b_leaf, t), (last, half)))
    b.inputs = [Input("x", type=t)]
    b.writes = [(a_leaf, b(Binary("add"), other, x)), (b_leaf, a), (last, b(CastTo(half.dtype), x))]
    flow = rlx.GraphModule.from_hir(b.finish([a, b(CastTo(t.dtype), seen)], ["a", "last"]))
    m = rlx.compile(flow, {}, profile=rlx.CompileProfile().replace(precision={"compute": "bf16"}))
    state, third = m.init_state(1), np.full((1, 3), 1 / 3, np.float32)
    for _ in range(301):
        out, state = m(third, state=state)
    step = np.float64(third.astype(as_dtype("bf16")))
    dtypes = {"a.s": "float32", "b.s": "float32", "last.s": "bfloat16"}
    assert {n: v.dtype.name for n, v in state.leaves.items()} == dtypes
    np.testing.assert_allclose(np.asarray(state.leaves["a.s"]), 151 * step, rtol=1e-5)
    np.testing.assert_allclose(out["last"], third, rtol=1e-2)


@pytest.mark.slow
def test_tokens_are_taken_back_from_a_ring() -> None:
    """As many as it has spare slots: then it is as if they had not been."""
    flow, weights = windowed(5)
    profile = rlx.CompileProfile().replace(buckets={"spare": 3})
    m: Any = rlx.compile(flow, weights, program="extend", profile=profile)
    tokens = np.random.default_rng(0).integers(0, RING_VOCAB, (1, 14))

    def read(state: Any, first: int, last: int) -> Any:
        return m(tokens[:, first:last], np.array([last - first], np.int32), state=state)

    _, state = read(m.init_state(1, 24), 0, 10)
    want, _ = read(state.copy(), 10, 12)
    wrong = np.full((1, 3), 7)
    _, drafted = m(wrong, np.array([3], np.int32), state=state)
    back = dataclasses.replace(drafted, length=drafted.length - np.int32(3))
    got, _ = read(back, 10, 12)
    np.testing.assert_allclose(got, want, atol=1e-5)
