"""Prefill and extend, derived from the forward flow: the same numbers, and refusals by name."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import Custom, LlamaDecoderSpec, Named, RopeTables
from rlx_jax.errors import DeriveError, GraphError, SessionStateError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Param, TypeCache
from rlx_jax.ir.ops.index import TakeRow
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.param import Key
from rlx_jax.ir.types import F32, TensorType
from rlx_jax.lowering.mir.small import divide_last
from tests import small
from tests.small import compiled, profile, w

H, F, V = 8, 12, 17
CONTEXT = 16
LENGTHS = np.array([5, 3], np.int32)  # of the prompts
CHUNKS = [[4, 1], [1, 1], [0, 2], [2, 3]]  # new tokens of each row
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (2, CONTEXT)).astype(np.int32)


def tokens_flow() -> rlx.ModelFlow:
    """Token ids `[batch, seq]`, embedded."""
    return rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").embed("e")


def head(flow: rlx.ModelFlow) -> rlx.ModelFlow:
    """Logits."""
    return flow.lm_head(V, H, tied=True)


EMBEDDING = {"e": w(V, H) * 3}


def llama_layers(flow: rlx.ModelFlow, count: int, mask: Callable[[int], Any] = lambda i: "causal") -> rlx.ModelFlow:
    """Llama layers, grouped heads."""
    specs = [LlamaDecoderSpec(num_heads=4, head_dim=4, num_kv_heads=2, mask=mask(i)) for i in range(count)]
    return flow.repeat_layers(count, lambda i: blocks.llama_prefill_layer_fused(i, specs[i]))


def llama_weights(count: int) -> dict[str, np.ndarray]:
    """Their weights, and an embedding."""
    return EMBEDDING | small.llama_weights(count, H, 16, 8, F)


def ragged(rows: Sequence[np.ndarray], width: int, seed: int = 3) -> np.ndarray:
    """Rows padded on the right with random tokens, so that reading padding shows."""
    out = np.random.default_rng(seed).integers(0, V, (len(rows), width)).astype(np.int32)
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = tokens
    return out


def generated(
    flow: rlx.ModelFlow, weights: Any, widths: Sequence[int] = (4, 4, 4, 4), tables: Any = None
) -> tuple[list[np.ndarray], Any]:
    """Outputs of each valid token, from a prefill and extends with ragged rows; and the last state.

    Chunks are padded to `widths`; each width is compiled.
    """
    tables = tables or {}
    prefill, extend = (compiled(flow, weights, program=p, profile=profile(**tables)) for p in ("prefill", "extend"))
    state, at = prefill.init_state(2, CONTEXT), np.zeros(2, int)
    outs: list[list[np.ndarray]] = [[], []]
    for step, (width, new) in enumerate(zip((5, *widths), [list(LENGTHS), *CHUNKS], strict=True)):
        rows = [TOKENS[b, at[b] : at[b] + n] for b, n in enumerate(new)]
        model = prefill if step == 0 else extend
        out, state = model.apply(model.params, ragged(rows, width), lengths=np.array(new, np.int32), state=state)
        for b, n in enumerate(new):
            outs[b].append(np.asarray(out)[b, :n])
        at += np.array(new)
        np.testing.assert_array_equal(state.length, at)
    return [np.concatenate(parts) for parts in outs], state


def assert_generates(flow: rlx.ModelFlow, weights: Any, tolerance: float = 5e-6, **tables: Any) -> Any:
    """Prefill and ragged extends give what the forward program gives. Returns the state."""
    got, state = generated(flow, weights, tables=tables)
    whole = np.asarray(compiled(flow, weights)(TOKENS))  # causal: what comes later changes nothing
    for b, row in enumerate(got):
        want = whole[b, : len(row)]
        assert np.abs(row - want).max() <= tolerance * max(1.0, np.abs(want).max())
    return state


TOKEN_WISE: dict[str, Callable[[Any, Any], Any]] = {
    "operators": lambda e, x: x * e.sigmoid(x) + 1, "weights": lambda e, x: x @ e.param("a") + e.param("b"),
    "norms": lambda e, x: e.rms_norm(x, "b", eps=1e-5) + e.layer_norm(x, "b", "b", 1e-5),
    "heads": lambda e, x: x.reshape(x.shape[0], x.shape[1], 2, 4).transpose(0, 1, 3, 2).reshape(*x.shape),
    "hidden first": lambda e, x: (x.transpose(2, 0, 1) * 2).transpose(1, 2, 0), "jax": lambda e, x: e.jax(jnp.tanh, x),
    "jax einsum": lambda e, x: e.jax(lambda t, a: jnp.einsum("bsh,hf->bsf", t, a), x, e.param("a")),
    "jax sort over hidden": lambda e, x: e.jax(lambda t: jnp.sort(t, -1), x),
    "jax flattened": lambda e, x: e.jax(lambda t: jnp.tanh(t.reshape(-1, H) * 2).reshape(t.shape), x),
    "gate of the embedding": lambda e, x: x * e.sigmoid(e.add_node(hir.Embed(), e.param("e"), e.flow_input("tokens"))),
    "swiglu": lambda e, x: x + blocks.SwiGlu("g", "g", "d").emit(e, x),
    "scaled and capped": lambda e, x: blocks.LogitSoftcap(2.0).emit(e, blocks.EmbedScale(H).emit(e, x)),
}  # fmt: skip
TOKEN_WISE_WEIGHTS = {"a": w(H, H), "b": w(H), "g": w(F, H), "d": w(H, F)}


def test_token_wise_custom_stages() -> None:
    """All of them in a row, with attention before and after."""
    flow = llama_layers(tokens_flow(), 1)
    for name, fn in TOKEN_WISE.items():
        flow = flow.custom_named(name.replace(" ", "_"), fn)
    flow = flow.named_layer(
        "last", blocks.LlamaDecoder("model.layers.1", LlamaDecoderSpec(num_heads=4, head_dim=4, num_kv_heads=2))
    )
    assert_generates(head(flow), llama_weights(2) | TOKEN_WISE_WEIGHTS, 2e-5)


def test_two_attentions_in_one_block() -> None:
    """Slots of one path are told apart."""

    def layer(emit: Any, x: Any) -> Any:
        for i in range(2):
            q, k, v = (emit.linear(x, f"{n}{i}") for n in "qkv")
            x = x + emit.add_node(hir.Attention(2, 2, causal=True), q, k, v)
        return x

    weights = {f"{n}{i}": w(H, H, seed=i) for n in "qkv" for i in range(2)}
    state = assert_generates(head(tokens_flow().custom_named("two", layer)), EMBEDDING | weights)
    assert sorted(state.leaves) == ["two.k", "two.k2", "two.v", "two.v2"]


SUFFIXES: dict[str, Callable[[Any, Any], Any]] = {
    "flattened tokens": lambda e, x: e.jax(lambda t: jnp.tanh(t.reshape(-1, H)).reshape(t.shape), x),
    "positions": lambda e, x: blocks.GatherAdd("at", "p").emit(e, x),
}  # fmt: skip


@pytest.mark.parametrize("name", SUFFIXES)
def test_logits_of_the_last_token_only(name: str) -> None:
    """The head sees one row for each sequence; its logits are those of the last valid token among all."""
    flow = (
        rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32")
        .input("at", ("batch", "seq"), dtype="int32", default="positions")
        .rope_tables(RopeTables.theta(4)).embed("e")
    )  # fmt: skip
    flow = head(llama_layers(flow, 1).custom_named("suffix", SUFFIXES[name]))
    weights = llama_weights(1) | {"b": w(H), "p": w(CONTEXT, H)}
    lm = rlx.CausalLM(flow, {key: weights[key] for key in flow.build(weights).keys_read})
    every, _ = lm.prefill(TOKENS[:, :5], lengths=LENGTHS)
    last, _ = lm.prefill(TOKENS[:, :5], lengths=LENGTHS, logits="last")
    np.testing.assert_allclose(last, np.asarray(every)[np.arange(2), LENGTHS - 1], rtol=1e-5, atol=1e-5)


def test_the_last_layer_computes_one_row() -> None:
    """Attention for the last query and what is behind it, in prefill and a later chunk; the caches hold every row."""
    flow, weights = head(llama_layers(tokens_flow(), 3)), llama_weights(3)
    lm = rlx.CausalLM(flow, weights)
    every, state = lm.prefill(TOKENS[:, :5], lengths=LENGTHS)
    more, whole = lm.extend(state, TOKENS[:, :3], lengths=[3, 1])
    _, state = lm.prefill(TOKENS[:, :5], lengths=LENGTHS, logits="last")
    last, state = lm.extend(state, TOKENS[:, :3], lengths=[3, 1], logits="last")
    np.testing.assert_allclose(last, np.asarray(more)[np.arange(2), [2, 0]], rtol=1e-6, atol=5e-6)
    want, got = (s.arrays() for s in (whole.state, state.state) if s is not None)
    assert want.keys() == got.keys()
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, atol=2e-6, err_msg=str(key))
    for program in ("prefill", "extend"):
        nodes = lm.model.template(program, last_only=True).mir.nodes
        products = [n.types[0].shape[1] for n in nodes if isinstance(n.op, MatMul)]
        assert [str(s) for s in products] == ["seq", "1", "1", "1", "1"], program  # qkv; o, gate and up, down, the head


def test_queries_of_the_last_layer_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens, the joined product has keys and values of all, and queries of the last one."""
    monkeypatch.setattr("rlx_jax.lowering.mir.small.MIN_DIVIDED_TOKENS", 1)
    lm = rlx.CausalLM(head(llama_layers(tokens_flow(), 2)), llama_weights(2))
    every, whole = lm.prefill(TOKENS[:, :5], lengths=LENGTHS)
    last, state = lm.prefill(TOKENS[:, :5], lengths=LENGTHS, logits="last")
    np.testing.assert_allclose(last, np.asarray(every)[np.arange(2), LENGTHS - 1], rtol=1e-6, atol=5e-6)
    assert whole.state is not None and state.state is not None
    for key, value in whole.state.arrays().items():
        np.testing.assert_allclose(state.state.arrays()[key], value, atol=2e-6, err_msg=str(key))
    nodes = list(lm.model.programs.executables.values())[-1].lir.graph.nodes
    products = [n.types[0].shape[1:] for n in nodes if isinstance(n.op, MatMul)]
    assert products[:1] + products[4:6] == [(16, 32), (16, 16), (1, 32)]


def test_a_key_of_the_last_token_is_none_of_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another part of the joined product is read for one token too."""
    monkeypatch.setattr("rlx_jax.lowering.mir.small.MIN_DIVIDED_TOKENS", 1)
    b, types = Builder("m", TypeCache()), [TensorType(size, F32) for size in ((2, 5, 4), (12, 4))]
    x, index = b.input("x", types[0]), b.input("index", TensorType((2,), np.dtype(np.int32)))
    q, k, v = b.add(SplitLast((4, 4, 4)), b(MatMul(1), x, b.leaf(Param((Key("w", types[1]),), type=types[1]))))
    graph = b.finish([b(TakeRow(), q, index), b(TakeRow(), k, index), k, v], ["q", "k", "keys", "v"])
    arrays = {"x": small.w(2, 5, 4), "index": np.array([4, 1], np.int32), "w": small.w(12, 4, seed=1)}

    def run(graph: Graph) -> list[Any]:
        values: list[Any] = []
        for node in graph.nodes:
            name = "w" if isinstance(node.op, Param) else getattr(node.op, "input", "")
            inputs = [values[v.node][v.index] for v in node.inputs]
            op: Any = node.op
            result = arrays[name] if name in arrays else op.eval(*map(jnp.asarray, inputs))
            values.append(result if isinstance(result, tuple | list) else (result,))
        return [values[v.node][v.index] for v in graph.outputs]

    divided = divide_last(graph, TypeCache())
    assert divided is not graph
    for got, want in zip(run(divided), run(graph), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_branch_on_one_row_is_refused() -> None:
    """The last row alone would take the other branch, which a symbolic size does not show."""
    odd = head(llama_layers(tokens_flow(), 1).custom(lambda e, x: e.jax(lambda t: -t if t.shape[1] == 1 else t, x)))
    lm = rlx.CausalLM(odd, llama_weights(1))
    for call in (lambda: lm.prefill(TOKENS, logits="last"), lambda: lm.generate(TOKENS.tolist(), max_new_tokens=2)):
        with pytest.raises(DeriveError, match="slice along 'seq'"):
            call()


def test_a_query_of_the_last_token_for_every_row_is_refused() -> None:
    """Whoever adds what it reads to earlier tokens lets them see later ones."""

    def pooled(emit: Any, x: Any) -> Any:
        context = emit.add_node(hir.Attention(2, 2, causal=True), emit.add_node(hir.LastToken(), x), x, x)
        return emit.jax(lambda t, c: t + c, x, context)

    lm = rlx.CausalLM(head(llama_layers(tokens_flow(), 1).custom(pooled)), llama_weights(1))
    for logits in ("all", "last"):
        with pytest.raises(DeriveError, match="attention reads keys .* of another sequence"):
            lm.prefill(TOKENS, logits=logits)


def test_optional_inputs_are_left_out() -> None:
    """A mask with default None: prefill masks by lengths instead; a mask that is given is kept in the state."""
    flow = rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").input(
        "mask", ("batch", "seq"), dtype="int32", default=None
    ).embed("e")  # fmt: skip

    def layer(emit: Any, x: Any) -> Any:
        keep = emit.optional_input("mask")
        extra = ("keep",) if keep is not None else ()
        return x + emit.add_node(hir.Attention(2, 2, causal=True, extra=extra), x, x, x, *([keep] if extra else []))

    flow = head(flow.custom_named("attn", layer))
    assert_generates(flow, EMBEDDING)
    model = compiled(flow, EMBEDDING, program="prefill")
    keep = np.array([[1, 0, 1, 1]] * 2, np.int32)
    ids, lengths = np.asarray(TOKENS)[:, :4], np.full(2, 4, np.int32)
    out, _ = model(ids, keep, lengths=lengths, state=model.init_state(2, CONTEXT, given=["mask"]))
    np.testing.assert_allclose(out, compiled(flow, EMBEDDING)(ids, keep), atol=2e-5)
    with pytest.raises(SessionStateError, match="init_state.*given="):
        model(ids, keep, lengths=lengths, state=model.init_state(2, CONTEXT))
    for wrong in (["masks"], "mask", ["tokens"]):
        with pytest.raises(GraphError, match="init_state: given: .*'mask"):
            model.init_state(2, CONTEXT, given=wrong)


def test_padding_is_never_written() -> None:
    """Rows of the cache at and after the length stay zero."""
    flow, weights = head(llama_layers(tokens_flow(), 2)), llama_weights(2)
    scanned = profile(layers={"roll": "scan"})
    prefill, extend = (compiled(flow, weights, program=p, profile=scanned) for p in ("prefill", "extend"))
    state = prefill.init_state(2, CONTEXT)
    for model, new in ((prefill, [4, 1]), (extend, [0, 3]), (extend, [2, 1])):
        _, state = model.apply(model.params, TOKENS[:, :4], lengths=np.array(new, np.int32), state=state)
    length = np.asarray(state.length)
    assert length.tolist() == [6, 5]
    for leaf in state.leaves.values():
        written = np.any(np.asarray(leaf) != 0, axis=(0, 3, 4))
        np.testing.assert_array_equal(written, np.arange(CONTEXT)[None] < length[:, None])


def test_a_derived_program_may_be_made_inside_a_trace() -> None:
    """Its proofs look at numbers of their own, not at traced ones."""
    flow = head(tokens_flow().custom_named("stage", lambda e, x: e.jax(jnp.tanh, x)))
    model = compiled(flow, {"e": jax.ShapeDtypeStruct((V, H), np.float32)}, program="prefill")
    other = compiled(flow, EMBEDDING, program="prefill")
    state = other.init_state(2)
    step = jax.jit(lambda p, t, s: model.apply(p, t, lengths=jnp.array([2, 1], jnp.int32), state=s)[0])
    got = step(EMBEDDING, TOKENS[:, :2], state)
    want, _ = other.apply(EMBEDDING, TOKENS[:, :2], lengths=[2, 1], state=state)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_call_consumes_its_state() -> None:
    """`model(…)` donates, `apply` does not."""
    model = compiled(head(llama_layers(tokens_flow(), 1)), llama_weights(1), program="extend")
    first = model.init_state(2, 4)
    model.apply(model.params, TOKENS[:, :1], lengths=[1, 1], state=first)
    assert not any(a.is_deleted() for a in first.leaves.values())
    out, second = model(TOKENS[:, :1], lengths=[1, 1], state=first)
    assert all(a.is_deleted() for a in first.leaves.values())
    with pytest.raises(rlx.RlxError):
        model(TOKENS[:, :1], lengths=[1, 1], state=first)
    model(TOKENS[:, 1:2], lengths=[1, 1], state=second)


def test_a_mixer_inside_the_layers_is_refused_by_name() -> None:
    """Rolled: the path has the layer's index as a letter, or a number."""

    def layer(i: int) -> Any:
        return blocks.Sequence(
            [Named("a", blocks.Linear(f"w{i}")), Custom(lambda e, x: x - x.mean(1, keepdims=True), "centre")]
        )

    flow = head(tokens_flow().repeat_layers(3, layer))
    with pytest.raises(DeriveError, match=r"layers\.(\{i\}|\d)\.centre"):
        compiled(flow, EMBEDDING | {f"w{i}": w(H, H) for i in range(3)}, program="extend").text("mir")


def test_a_claim_is_checked_by_slicing() -> None:
    """`token_wise=True` is taken where the proof fails and slices agree; a false claim is refused."""
    with pytest.raises(DeriveError, match="honest"):
        flow = tokens_flow().custom_named("honest", lambda e, x: e.jax(by_flat_index, x))
        compiled(head(flow), EMBEDDING, program="extend").text("mir")
    flow = head(tokens_flow().custom_named("honest", lambda e, x: e.jax(by_flat_index, x), token_wise=True))
    assert_generates(flow, EMBEDDING)
    lie = tokens_flow().custom_named("lie", lambda e, x: x - x.mean(1, keepdims=True), token_wise=True)
    with pytest.raises(DeriveError, match="lie"):
        compiled(head(lie), EMBEDDING, program="extend").text("mir")


def by_flat_index(t: Any) -> Any:
    """Gathers every token by its own number: token-wise in effect, not by any rule."""
    return jnp.take(t, jnp.arange(t.shape[1]), axis=1, mode="clip") * 2


def calling(fn: Any, emit: rlx.Emit, x: Any) -> Any:
    """A stage that is one function."""
    return emit.jax(fn, x)


def test_one_of_several_functions_is_refused_by_name() -> None:
    """Tried together, told apart; one that fails at the sizes it is tried at says so in its place."""

    def sneaky(t: Any) -> Any:
        return t * 100 if t.shape[1] == 1 else t

    def fails(t: Any) -> Any:
        return t.reshape(2, 3, -1) if t.shape[1] == 1 else t

    for bad, match in ((sneaky, "sneaky.*'seq' alone"), (fails, "sneaky.*fails on slices.*reshape")):
        flow = tokens_flow().custom_named("good", lambda e, x: e.jax(jnp.tanh, x))
        flow = flow.custom_named("sneaky", functools.partial(calling, bad))
        with pytest.raises(DeriveError, match=match):
            compiled(head(flow), EMBEDDING, program="extend").text("mir")
