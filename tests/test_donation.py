"""The state is updated in place, this is proved for every compiled program, and a planted fault is caught."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.executable import compile_program
from rlx_jax.errors import GraphError, RlxWarning
from rlx_jax.generate.decode import DecodeLoop, StartRows
from rlx_jax.generate.sampler import Method, Sampler
from rlx_jax.ir.ops.attention import CacheUpdate
from rlx_jax.lowering.lir.donation import cache_copies
from rlx_jax.lowering.lir.plan import state_types
from rlx_jax.models.llama import LlamaConfig, weight_specs

CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
BATCH, CONTEXT = 3, 2048


def extended(roll: str, compute: str = "f32") -> Any:
    """The extend program, compiled for one token a row and called once."""
    rng = np.random.default_rng(0)
    weights = {k: rng.normal(0, 0.1, s.shape).astype(np.float32) for k, s in weight_specs(CONFIG).items()}
    profile = rlx.CompileProfile().replace(layers={"roll": roll}, precision={"compute": compute})
    model = rlx.compile(rlx.Llama32Flow(CONFIG), weights, profile=profile, program="extend")
    model(np.ones((BATCH, 1), np.int32), np.ones(BATCH, np.int32), state=model.init_state(BATCH, CONTEXT))
    return model


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("roll", ["unroll", "scan"])
def test_the_state_is_aliased_and_never_copied(roll: str, compute: str) -> None:
    """Every byte of the state, temporaries that do not grow with it, no copy of an array of a cache's shape."""
    (executable,) = extended(roll, compute).programs.executables.values()
    donation = executable.donation
    width = 2 if compute == "bf16" else 4
    layer = 2 * BATCH * CONTEXT * 2 * 8 * width
    assert donation.state_bytes == 4 * layer + 4 * BATCH
    assert donation.aliased_bytes == donation.state_bytes
    assert not donation.broken() and not donation.surplus()
    assert donation.temp_bytes < donation.state_bytes or compute == "bf16"  # the CPU computes bf16 products in f32


def test_a_tied_table_is_no_copied_cache() -> None:
    """XLA:CPU widens it twice to compute in bf16, which is no reason to warn; the state is much smaller."""
    fields = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig.from_hf(fields | {"vocab_size": 5000, "tie_word_embeddings": True})
    weights = {k: np.ones(s.shape, np.float32) for k, s in weight_specs(config).items()}
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    lm = rlx.CausalLM(rlx.Llama32Flow(config), weights, profile=profile, max_positions=8)
    assert len(lm.generate([1, 2, 3], max_new_tokens=2)) == 2


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("roll", ["unroll", pytest.param("scan", marks=pytest.mark.slow)])
def test_the_loop_that_generates_is_in_place(batch: int, roll: str) -> None:
    """Compiled as `generate` does it, around the extend program; nothing runs."""
    profile = rlx.CompileProfile().replace(layers={"roll": roll})
    model = rlx.compile(rlx.Llama32Flow(CONFIG), profile=profile, program="extend")
    loop = DecodeLoop(Method(), "input_ids", steps=4, early=True)
    key = model.bound({"batch": batch, "context": 512, "seq": 1}, loop).key
    state = jax.eval_shape(partial(model.init_state, batch, 512)).arrays()
    rows = jax.eval_shape(
        StartRows(draws=False), jax.random.key(0), np.ones(batch, bool), np.int32(4), np.zeros((batch, 0), bool)
    )  # fmt: skip
    inputs = {"rows": rows, "knobs": Sampler().knobs(61), "ends": np.zeros(61, bool)}
    donation: Any = model.programs.executable(key, model.param_specs(), state, inputs).donation
    assert donation.state_bytes == 4 * (2 * batch * 512 * 2 * 8 * 4) + 4 * batch
    assert donation.aliased_bytes >= donation.state_bytes and not donation.broken() and not donation.surplus()


@pytest.mark.parametrize("roll", ["unroll", "scan"])
def test_a_dtype_drift_is_caught_before_xla(roll: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that leaves a program in another dtype: the verifier names the leaf and both types."""
    update = CacheUpdate.eval
    monkeypatch.setattr(CacheUpdate, "eval", lambda self, *arrays: update(self, *arrays).astype(jnp.bfloat16))
    with pytest.raises(GraphError, match=r"(read as f32.* written as bf16|dtype)"):
        extended(roll)


def test_a_drift_that_only_the_compiled_program_shows() -> None:
    """As jax neither donates nor warns, the proof compares aliased bytes with the state's."""
    model = extended("unroll")
    ((key, executable),) = model.programs.executables.items()
    lir, function = model.programs.function(key).lir, model.programs.function(key).run

    def drifting(params: Any, state: Any, inputs: Any) -> Any:
        outputs, after = function(params, state, inputs)
        return outputs, {k: v.astype(jnp.bfloat16) if v.ndim == 4 else v for k, v in after.items()}

    state = {k: t.spec for k, t in state_types(lir.graph, False).items()}
    inputs = {i.input: i.type.spec for i in lir.graph.inputs}
    with pytest.raises(GraphError, match=r"in place: .*self_attn.k is read as f32.* and written as bf16"):
        compile_program(lir, drifting, model.param_specs(), state, inputs)
    assert executable.donation is not None


def compiled_with(change: Any) -> Any:
    """The extend program with something around it, compiled as programs are."""
    model = extended("unroll")
    (key,) = model.programs.executables
    lir, function = model.programs.function(key).lir, model.programs.function(key).run
    state = {k: t.spec for k, t in state_types(lir.graph, False).items()}
    inputs = {i.input: i.type.spec for i in lir.graph.inputs}
    return compile_program(lir, partial(change, function), model.param_specs(), state, inputs)


def test_a_copied_cache_is_an_error() -> None:
    """All of its bytes are aliased, and yet it is copied whole: the old keys are read after the new ones are there."""

    def keeping(function: Any, params: Any, state: Any, inputs: Any) -> Any:
        outputs, after = function(params, state, inputs)
        return (*outputs, next(a for a in state.values() if a.ndim == 4)), after

    with pytest.raises(GraphError, match=r"a whole cache is copied: .*f32\[3,2048,2,8\].*donation.state = false"):
        compiled_with(keeping)


def test_temporaries_are_told_with_their_place() -> None:
    """How many of them XLA needs is estimated, so that many are a warning: with the largest, and what to do."""

    def sorting(function: Any, params: Any, state: Any, inputs: Any) -> Any:
        outputs, after = function(params, state, inputs)
        with jax.named_scope("stage.of.mine"):
            many = jnp.sort(outputs[0][0, 0, 0] + jnp.arange(2**21, dtype=jnp.float32))
        return (outputs[0] + many[7],), after

    with pytest.warns(RlxWarning, match=r"f32\[2097152\] at stage.of.mine/.*layers.roll = 'unroll'"):
        compiled_with(sorting)


def test_copies_are_found_in_hlo() -> None:
    """Only whole arrays of a cache's own shape and dtype count."""
    (cache,) = {t for t in state_types(extended("unroll").template("extend").mir, False).values() if t.rank > 2}
    cache = cache.bind({"batch": 3, "context": 2048})
    hlo = "  %c = f32[3,2048,2,8]{3,2,1,0} copy(%p)\n  %d = f32[3,2048,2,9]{3,2,1,0} copy(%p)\n"
    assert [re.sub(" =.*", "", x) for x in cache_copies(hlo, {cache})] == ["%c"]
    assert not cache_copies(hlo, {dataclasses.replace(cache, dtype=np.dtype(np.int32))})
