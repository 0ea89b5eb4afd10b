"""Steps of a user's own in layers that repeat, in bf16, and in loops that take several tokens in a turn."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.ir.ops.recurrent import TokenScan
from tests.oracles.comparing import assert_close
from tests.small import compiled, profile, w
from tests.test_derive import EMBEDDING, TOKENS, H, assert_generates, head, tokens_flow
from tests.test_recurrent import START, WEIGHTS, rnn_step


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
