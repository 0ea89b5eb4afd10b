"""Custom steps along the tokens, in repeated layers, in bf16, several in a turn: the same numbers in every program."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import DeriveError, TokenIdError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.operands import BLOCK
from rlx_jax.ir.ops.index import TailRows
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.recurrent import TokenScan
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import Concat, Narrow, Reshape, Slice
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.hir import rules
from tests.oracles.comparing import assert_close
from tests.small import compiled, profile, w
from tests.test_derive import EMBEDDING, TOKENS, H, V, assert_generates, head, tokens_flow

D = 3
START = np.linspace(-0.5, 0.5, H).astype(np.float32)
WEIGHTS = EMBEDDING | {
    "rnn.x": w(H, H), "rnn.h": w(H, H, seed=1), "fast.k": w(D, H), "fast.v": w(D, H, seed=1), "fast.q": w(D, H, seed=2),
    "fast.o": w(H, D), "fast.decay": w(D), "fast.start": w(D, D, seed=4), "window.w": w(3, H),
    "mean.x": w(H, H, seed=3),
}  # fmt: skip


def rnn_step(h: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    """Elman's cell."""
    h = jnp.tanh(x + h @ weight)
    return h, h


def rnn(emit: Any, x: Any) -> Any:
    """A start that is an array; a parameter that is a key."""
    return x + emit.recurrent(rnn_step, emit.linear(x, "rnn.x"), "rnn.h", init=START)


def fast_step(state: Any, x: Any, decay: Any) -> tuple[Any, Any]:
    """Fast weights: a matrix that forgets, and how many tokens it has seen."""
    k, v, q = x
    matrix = jax.nn.sigmoid(decay)[:, None] * state["matrix"] + k[:, None] * v[None, :]
    seen = state["seen"] + 1
    return {"matrix": matrix, "seen": seen}, (q @ matrix / jnp.sqrt(seen.astype(jnp.float32)), seen)


def fast(emit: Any, x: Any) -> Any:
    """A start that is learned, a whole number in the state, a tuple in and a tuple out."""
    k, v, q = (emit.linear(x, f"fast.{name}") for name in "kvq")
    init = {"matrix": emit.param("fast.start"), "seen": 0}
    y, seen = emit.recurrent(fast_step, (k, v, q), emit.param("fast.decay"), init=init)
    return x + emit.linear(y, "fast.o") * emit.cast(seen, "f32").reshape(*seen.shape, 1)


def mean_step(total: Any, x: Any) -> tuple[Any, Any]:
    """A mean that forgets."""
    total = 0.9 * total + x
    return total, 0.1 * total


def mean(emit: Any, x: Any) -> Any:
    """From zeros, without parameters."""
    return emit.recurrent(mean_step, emit.linear(x, "mean.x"), init=np.zeros(H, np.float32)) + x


def window(emit: Any, x: Any) -> Any:
    """Three tokens, each with a weight of its own, and the last two ids of the prompt."""
    ids = emit.causal_window(emit.flow_input("tokens"), 2)
    last = emit.cast(ids[:, :, 0] - ids[:, :, 1], "f32")
    return x + (emit.causal_window(x, 3) * emit.param("window.w")).sum(2) + last.reshape(*last.shape, 1) / V


STAGES: dict[str, Callable[..., Any]] = {"rnn": rnn, "fast": fast, "mean": mean, "window": window}


def meaning(tokens: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """The logits, token after token in float64."""
    p = {key: value.astype(np.float64) for key, value in WEIGHTS.items()}
    logits = []
    for row in tokens:
        h, matrix, seen, total = START.astype(np.float64), p["fast.start"], 0, np.zeros(H)
        before, held = 0, [np.zeros(H), np.zeros(H)]
        for token in row:
            x = p["e"][token]
            for name in names:
                if name == "rnn":
                    h = np.tanh(p["rnn.x"] @ x + h @ p["rnn.h"])
                    x = x + h
                elif name == "fast":
                    k, v, q = (p[f"fast.{n}"] @ x for n in "kvq")
                    matrix = (1 / (1 + np.exp(-p["fast.decay"])))[:, None] * matrix + np.outer(k, v)
                    seen += 1
                    x = x + p["fast.o"] @ (q @ matrix / np.sqrt(seen)) * seen
                elif name == "window":
                    held = [*held[-2:], x]
                    x = x + (np.stack(held) * p["window.w"]).sum(0) + (before - token) / V
                    before = token
                else:
                    total = 0.9 * total + p["mean.x"] @ x
                    x = x + 0.1 * total
            logits.append(p["e"] @ x)
    return np.reshape(logits, (*tokens.shape, V))


def flow_of(*names: str) -> rlx.ModelFlow:
    """These stages between an embedding and its head."""
    flow = tokens_flow()
    for name in names:
        flow = flow.custom_named(name, STAGES[name])
    return head(flow)


def weights_of(*names: str) -> dict[str, np.ndarray]:
    """Theirs."""
    return {key: value for key, value in WEIGHTS.items() if key == "e" or key.partition(".")[0] in names}


ALL = ("rnn", "fast", "window", "mean")


def test_forward_is_a_loop_over_tokens() -> None:
    assert_close(compiled(flow_of(*ALL), WEIGHTS)(TOKENS), meaning(TOKENS, ALL))


def test_prefill_and_extend_are_forward() -> None:
    """Ragged prompts, chunks, and rows that get nothing; leaves by block path and name, f32 or whole numbers."""
    state = assert_generates(flow_of(*ALL), WEIGHTS)
    found = {key: (str(a.dtype), a.shape[1:]) for key, a in state.leaves.items()}
    assert found == {
        "rnn.state": ("float32", (H,)), "fast.matrix": ("float32", (D, D)), "fast.seen": ("int32", ()),
        "mean.state": ("float32", (H,)), "window.window": ("int32", (1,)), "window.window2": ("float32", (2, H)),
    }  # fmt: skip
    np.testing.assert_array_equal(state.leaves["fast.seen"], state.length)


FORMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a partial": (functools.partial(lambda a, h, x: (a * h + x, h), 0.5), np.zeros(4), {"state": np.zeros(4, "f4")}),
    "a jitted one": (jax.jit(lambda h, x: (h + x, h)), np.ones(4, np.float16), {"state": np.zeros(4, "f4")}),
    "numbers of all kinds": (lambda s, x: ((s[0] + 1, {"on": ~s[1]["on"]}, 0.5j * s[2] + x.astype(jnp.complex64)),
        jnp.where(s[1]["on"], s[2].imag, x * s[0].astype(jnp.float32))),
            (np.int8(3), {"on": True}, jnp.ones(4, np.complex64)),
                {"state_0": np.int8(0), "state_1_on": np.bool_(0), "state_2": np.zeros(4, "c8")}),
    "random numbers": (lambda key, x: (jax.random.key_data(jax.random.split(jax.random.wrap_key_data(key))[0]),
        x * jax.random.uniform(jax.random.wrap_key_data(key))), np.array([0, 7], np.uint32),
            {"state": np.zeros(2, np.uint32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_steps_and_states(name: str) -> None:
    """Leaves are named by their place in `init`; without a prompt the first token starts from there too."""
    step, init, leaves = FORMS[name]
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 4)).recurrent(step, init=init)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    forward, extend = compiled(flow, {}), compiled(flow, {}, program="extend")
    state, parts = extend.init_state(2), []
    found = {key.partition(".")[2]: (a.dtype, a.shape[1:]) for key, a in state.leaves.items()}
    assert found == {key: (a.dtype, a.shape) for key, a in leaves.items()}
    for t in range(3):
        out, state = extend(x[:, t : t + 1], lengths=np.array([1, 1]), state=state)
        parts.append(np.asarray(out))
    assert_close(np.concatenate(parts, 1), np.asarray(forward(x)))


def test_stages() -> None:
    """As methods of a flow."""
    flow = (
        tokens_flow()
        .stage(rlx.blocks.CausalWindow(2))
        .custom(lambda emit, x: x.mean(2))
        .recurrent(rnn_step, "rnn.h", init=START)
    )
    got = compiled(flow, {"e": WEIGHTS["e"], "rnn.h": WEIGHTS["rnn.h"]})(TOKENS)
    x = WEIGHTS["e"].astype(np.float64)[TOKENS]
    x = (x + np.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]) / 2
    h, want = START.astype(np.float64), []
    for t in range(x.shape[1]):
        h = np.tanh(x[:, t] + h @ WEIGHTS["rnn.h"])
        want.append(h)
    assert_close(got, np.stack(want, 1))


ALL_OF = (None, None, None)


@dataclass(frozen=True)
class RunningTotal(Hir):
    """The sum of the tokens up to each, by the protocol; where `careless`, padding counts."""

    traits = BLOCK
    careless: bool = False

    def slots(self, *operands: TensorType) -> tuple[hir.StateSlot, ...]:
        return (hir.StateSlot("total", TensorType(operands[0].shape[2:], operands[0].dtype)),)

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        return self.expand_from(b, operands).results

    def expand_from(
        self, b: Builder, operands: Any, start: Any = None, lengths: Any = None, every: bool = False
    ) -> hir.BlockRun:
        before = b(Narrow(1, 0, 1), operands[0])
        none = b(Binary("sub"), before, before) if start is None else b(Reshape((-1, 1, H)), start[0])
        sums = b(Cumsum(1), b(Concat(1), none, operands[0]))
        use = lengths is None or self.careless
        last = b(Narrow(1, -1, 1), sums) if use else b(TailRows(1), sums, lengths)
        return hir.BlockRun((b(Slice((ALL_OF, (1, None, None))), sums),), (b(Reshape((-1, H)), last),))


def adds(op: Hir) -> Callable[..., Any]:
    """A stage of one block."""
    return lambda emit, x: emit.add_node(op, x)


def test_ids_in_a_window_are_ids() -> None:
    """A table that they index through a window says which there are."""
    flow = rlx.ModelFlow("m").input("ids", ("batch", "seq"), dtype="int32")
    model = rlx.compile(flow.custom(lambda emit, x: emit.embed("e", emit.causal_window(x, 3)).sum(2)), EMBEDDING)
    ids = np.array([[2, V - 1]], np.int32)
    table = EMBEDDING["e"].astype(np.float64)
    assert_close(model(ids)[0], np.stack([table[2] + 2 * table[0], table[V - 1] + table[2] + table[0]]))
    with pytest.raises(TokenIdError, match=rf"id {V} .* is not in \[0, {V}\)"):
        model(ids + 1)


def test_a_block_of_a_plugin_is_tried() -> None:
    """One that follows the protocol generates by the same rule; one that reads padding is refused by its path."""
    plugin = rlx.Plugin("p", derive={RunningTotal: rules.carry_state})
    with rlx.plugins.using(plugin):
        right, wrong = (
            head(tokens_flow().custom_named("sum", adds(op))) for op in (RunningTotal(), RunningTotal(True))
        )
        logits, held = rlx.CausalLM(right, EMBEDDING).prefill([[3, 1, 4], [2, 0, 0]], lengths=[3, 1])
        assert_close(logits[0, -1], EMBEDDING["e"] @ EMBEDDING["e"][[3, 1, 4]].sum(0))
        assert held.state is not None
        assert_close(held.state.leaves["sum.total"][1], EMBEDDING["e"][2])
        compiled(wrong, EMBEDDING)
        with pytest.raises(DeriveError, match="^sum: .*result 0 of tokens 2 to 2"):
            compiled(wrong, EMBEDDING, program="prefill").text("mir")


def layers(count: int = 3) -> rlx.ModelFlow:
    """Layers of a window and an Elman cell; the functions of each are its own."""

    def layer(i: int) -> Any:
        def cell(emit: Any, x: Any) -> Any:
            mean = emit.causal_window(x, 3).mean(2)
            y = emit.recurrent(
                lambda h, x, weight: rnn_step(h, x, weight), emit.linear(mean, f"l.{i}.x"), f"l.{i}.h", init=START
            )
            return x + 0.5 * y

        return blocks.Custom(cell, f"layer{i}")

    return head(tokens_flow().repeat_layers(count, layer))


LAYERS = EMBEDDING | {f"l.{i}.{name}": w(H, H, seed=2 * i + (name == "x")) for i in range(3) for name in "xh"}


def test_layers_are_one_region() -> None:
    """Functions that compute the same are one body; its state is stacked where layers are scanned."""
    state = assert_generates(layers(), LAYERS, layers={"roll": "scan"})
    assert {k: a.shape for k, a in state.leaves.items()} == {
        "layers.{i}.layer{i}.state": (3, 2, H),
        "layers.{i}.layer{i}.window": (3, 2, 2, H),
    }
    whole = [
        np.asarray(compiled(layers(), LAYERS, profile=profile(layers={"roll": r}))(TOKENS)) for r in ("scan", "unroll")
    ]
    assert_close(whole[0], whole[1])


def test_small_numbers_add_up_in_bf16() -> None:
    """A sum of 2000 entries of 0.001 in bf16 stands still at 0.25."""

    def total(s: Any, x: Any) -> tuple[Any, Any]:
        return s + 0.001 * x, s

    flow = rlx.ModelFlow("sum").input("x", ("batch", "seq", 1)).recurrent(total, init=np.zeros(1, np.float32))
    model = compiled(flow, {}, program="prefill", profile=profile(precision={"compute": "bf16"}))
    out, state = model(np.ones((1, 2000, 1), np.float32), lengths=np.array([2000]), state=model.init_state(1))
    assert abs(float(state.leaves["total.state"][0, 0]) - 2) < 1e-3 and abs(float(out[0, -1, 0]) - 2) < 1e-2


def test_a_turn_of_the_loop_takes_several_tokens() -> None:
    """On a GPU by default, unless the flow or the profile says otherwise; the numbers are the same."""
    cuda = {"fusion": {"target": "cuda"}}
    off = {"fusion": {"target": "cuda", "disable": ["unroll_steps"]}}
    weights = {key: WEIGHTS[key] for key in ("e", "rnn.h")}
    for unroll, tables, found in ((None, cuda, 8), (None, off, None), (None, {}, None), (3, cuda, 3), (3, {}, 3)):
        flow = tokens_flow().recurrent(rnn_step, "rnn.h", init=START, unroll=unroll)
        elsewhere = (
            pytest.warns(rlx.errors.RlxWarning, match="the plan is for another device") if tables else nullcontext()
        )
        with elsewhere:
            model = compiled(flow, weights, profile=profile(**tables))
        assert [n.op.unroll for n in model.template().mir.nodes if isinstance(n.op, TokenScan)] == [found]
    flows = [tokens_flow().recurrent(rnn_step, "rnn.h", init=START, unroll=u) for u in (1, 3, 40)]
    whole, *others = (np.asarray(compiled(flow, weights)(TOKENS)) for flow in flows)
    for other in others:
        assert_close(other, whole)
