"""The state is updated in place, this is proved for every compiled program, and a planted fault is caught."""

import dataclasses
import functools
import re
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.executable import trace_program
from rlx_jax.errors import GraphError, RlxWarning
from rlx_jax.generate.decode import DecodeLoop, initial_history, new_rows
from rlx_jax.generate.sampler import Sampler, SamplingSteps
from rlx_jax.ir.ops.cache import CacheUpdate, write_rows
from rlx_jax.lowering.lir import donation
from rlx_jax.lowering.lir.implementations import write_in_loop
from rlx_jax.lowering.lir.plan import state_types
from rlx_jax.models.llama import LlamaConfig, weight_specs
from tests import small
from tests.divided import recipe, weights

CONFIG = LlamaConfig.from_hf(small.LLAMA | {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48})
BATCH, CONTEXT = 3, 2048


def fresh(roll: str, compute: str = "f32", kv: str = "auto") -> Any:
    """The extend program, compiled for one token a row and called once."""
    rng = np.random.default_rng(0)
    weights = {k: rng.normal(0, 0.1, s.shape).astype(np.float32) for k, s in weight_specs(CONFIG).items()}
    profile = rlx.CompileProfile().replace(
        layers={"roll": roll}, precision={"compute": compute, "kv": kv}, donation={"strict": True}
    )
    model = rlx.compile(rlx.Llama32Flow(CONFIG), weights, profile=profile, program="extend")
    model(np.ones((BATCH, 1), np.int32), np.ones(BATCH, np.int32), state=model.init_state(BATCH, CONTEXT))
    return model


extended = functools.cache(fresh)


@pytest.mark.parametrize(("roll", "compute"), [("scan", "f32"), ("unroll", "bf16")])
def test_the_state_is_aliased_and_never_copied(roll: str, compute: str) -> None:
    """Every byte of the state, temporaries that do not grow with it, no copy of an array of a cache's shape."""
    (executable,) = extended(roll, compute).programs.executables.values()
    proof = executable.donation
    width = 2 if compute == "bf16" else 4
    layer = 2 * BATCH * CONTEXT * 2 * 8 * width
    assert proof.state_bytes == 2 * layer + 4 * BATCH
    assert proof.aliased_bytes == proof.state_bytes
    assert not proof.problem()
    assert proof.temp_bytes < proof.state_bytes or compute == "bf16"  # the CPU computes bf16 products in f32


def decode_step(model: Any, batch: int, context: int) -> Any:
    """Compile the loop that generates with a vocabulary of 61 tokens, as `generate` does; nothing runs."""
    loop = DecodeLoop(SamplingSteps(), "input_ids", steps=4, early_exit=True)
    key = replace(model.key_for_sizes({"batch": batch, "context": context, "seq": 1}), wrapper=loop)
    state = jax.eval_shape(partial(model.init_state, batch, context)).arrays()
    history = initial_history(SamplingSteps(), [()] * batch, 61, 0)
    rows = jax.eval_shape(partial(new_rows, False), jax.random.key(0), np.ones(batch, bool), np.int32(4), history)
    inputs = {"rows": rows, "sampler_values": Sampler().values(61), "stop_mask": np.zeros(61, bool)}
    return model.programs.executable(key, model.param_specs(), state, inputs)


@pytest.mark.parametrize(("batch", "roll"), [(1, "unroll"), pytest.param(8, "scan", marks=pytest.mark.slow)])
def test_the_loop_that_generates_is_in_place(batch: int, roll: str) -> None:
    """Compiled as `generate` does it, around the extend program; nothing runs."""
    profile = rlx.CompileProfile().replace(layers={"roll": roll}, donation={"strict": True})
    model = rlx.compile(rlx.Llama32Flow(CONFIG), profile=profile, program="extend")
    proof = decode_step(model, batch, 512).donation
    assert proof.state_bytes == 2 * (2 * batch * 512 * 2 * 8 * 4) + 4 * batch
    assert proof.aliased_bytes >= proof.state_bytes and not proof.problem()


def test_a_dtype_drift_is_caught_before_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that leaves a program in another dtype: the verifier names the leaf and both types."""
    update = CacheUpdate.eval
    monkeypatch.setattr(CacheUpdate, "eval", lambda self, *arrays: update(self, *arrays).astype(jnp.bfloat16))
    with pytest.raises(GraphError, match=r"(read as f32.* written as bf16|dtype)"):
        fresh("unroll")


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
    with pytest.raises(GraphError, match="self_attn.k.*f32.*bf16"):
        trace_program(lir, drifting, model.param_specs(), state, inputs)()
    assert executable.donation is not None


def compiled_with(change: Any) -> Any:
    """The extend program with something around it, compiled as programs are, and strictly."""
    model = extended("unroll")
    (key,) = model.programs.executables
    lir, function = model.programs.function(key).lir, model.programs.function(key).run
    state = {k: t.spec for k, t in state_types(lir.graph, False).items()}
    inputs = {i.input: i.type.spec for i in lir.graph.inputs}
    lir = dataclasses.replace(lir, plan=dataclasses.replace(lir.plan, strict=True))
    return trace_program(lir, partial(change, function), model.param_specs(), state, inputs)()


def test_a_copied_cache_is_an_error() -> None:
    """All of its bytes are aliased, and yet it is copied whole: the old keys are read after the new ones are there."""

    def keeping(function: Any, params: Any, state: Any, inputs: Any) -> Any:
        outputs, after = function(params, state, inputs)
        return (*outputs, next(a for a in state.values() if a.ndim == 4)), after

    with pytest.raises(
        GraphError,
        match=r"[0-9]{6,} bytes.*f32\[3,2048,2,8\].*donation.strict",
    ):
        compiled_with(keeping)


def test_temporaries_are_told_with_their_place() -> None:
    """More temporaries than planned: the message has the largest, and what to do."""

    def sorting(function: Any, params: Any, state: Any, inputs: Any) -> Any:
        outputs, after = function(params, state, inputs)
        with jax.named_scope("stage.of.mine"):
            many = jnp.sort(outputs[0][0, 0, 0] + jnp.arange(2**21, dtype=jnp.float32))
        return (outputs[0] + many[7],), after

    with pytest.raises(GraphError, match=r"f32\[2097152\] at stage.of.mine/.*layers.roll = 'unroll'"):
        compiled_with(sorting)


def test_rows_that_are_multiplied_before_they_are_summed_are_planned() -> None:
    """XLA:CPU writes the products of a row with a matrix, if the row has several readers."""
    sizes = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1}
    config = LlamaConfig.from_hf(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    arrays = {k: np.full(s.shape, 0.1, np.float32) for k, s in weight_specs(config).items()}
    backend = {"cpu": {"products": "row", "merge": False}}
    profile = rlx.CompileProfile().replace(backend=backend, donation={"strict": True})
    model = rlx.compile(rlx.Llama32Flow(config), arrays, profile=profile, program="extend")
    model(np.ones((1, 1), np.int32), np.ones(1, np.int32), state=model.init_state(1, 64))


@pytest.mark.parametrize("strict", [False, True])
def test_temporaries_of_a_program_without_a_state(strict: bool) -> None:
    """The message has what XLA needs and where, and the blocks of the plan; strict makes it an error."""

    def scratch(x: Any) -> Any:
        return x + jnp.sort(x[0, 0] + jnp.arange(2**21, dtype=jnp.float32))[7]

    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w")
    flow = flow.custom_named("scratch", lambda emit, x: emit.jax(scratch, x))
    profile = rlx.CompileProfile().replace(donation={"strict": strict})
    model = rlx.compile(flow, {"w": np.eye(8, dtype="f4")}, profile=profile)
    x = np.ones((3, 8), np.float32)
    match = r"temporaries, expected at most.*f32\[2097152\] at .*scratch.* planned peak most bytes are of .*\(\d+\)"
    if strict:
        with pytest.raises(GraphError, match=match + ".*donation.strict = false"):
            model(x)
        return
    with pytest.warns(RlxWarning, match=match + ".*donation.strict = true"):
        assert np.array_equal(model(x), x + 8)


def wide(compute: str, **donation: Any) -> Any:
    """A Llama with caches of `[B,T,4,64]`, and its tables of the profile."""
    profile = rlx.CompileProfile().replace(precision={"compute": compute}, donation=donation)
    changes = (("head_dim", 64), ("max_position_embeddings", 1024))
    return rlx.CausalLM(recipe("llama", **dict(changes)), weights("llama", *changes), profile=profile)


@pytest.mark.slow
def test_one_row_of_16_bits_generates_in_place() -> None:
    """One row over a cache of 256 positions: XLA:CPU used to copy the cache in every step."""
    lm = wide("bf16", strict=True)
    assert len(lm.generate([1, 2, 3], max_new_tokens=130)) == 130
    proofs = [e.donation for key, e in lm.model.programs.executables.items() if key.program == "extend"]
    assert [p.state_bytes for p in proofs] == [2 * (2 * 256 * 4 * 64 * 2) + 4]


@pytest.mark.slow
def test_a_copied_cache_warns_once_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of a program that XLA would copy: one warning with the bytes, and the same tokens. Strict: an error."""
    line = "%copy.7 = f32[1,128,4,64]{3,2,1,0} copy(%fusion.3)"
    monkeypatch.setattr(donation, "cache_copies", lambda hlo, types: [line])
    lm = wide("f32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        want = lm.generate([1, 2, 3], max_new_tokens=100)
        assert lm.generate([1, 2, 3], max_new_tokens=130)[:100] == want
    (warning,) = caught
    assert warning.category is RlxWarning
    assert re.search(
        r"extend of batch 1, context 128.*131072 bytes.*%copy.7 = f32.*strict = true", str(warning.message)
    )
    with pytest.raises(GraphError, match=r"131072.*%copy.7 = f32\[1,128,4,64\].*donation.strict"):
        wide("f32", strict=True).generate([1, 2, 3], max_new_tokens=100)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_are_written_in_a_loop_as_by_a_scatter(rows: int, dtype: Any) -> None:
    """Random distinct slots, past the end too; a call that writes nothing; NaN in what is dropped."""
    rng = np.random.default_rng(rows)
    for case in range(8):
        slots = np.stack([rng.permutation(20)[:rows] for _ in range(2)]).astype(np.int32) + 11 * (case == 0)
        new = rng.normal(size=(2, rows, 2, 3))
        new[slots >= 11] = np.nan
        cache = rng.normal(size=(2, 11, 2, 3))
        given = jnp.asarray(cache, dtype), jnp.asarray(slots), jnp.asarray(new, dtype)
        want = np.array(given[0])
        for b, i in np.argwhere(slots < 11):
            want[b, slots[b, i]] = given[2][b, i]
        for write in (write_rows, write_in_loop):
            assert np.array_equal(jax.jit(write)(*given), want)


GEMMA3 = {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None}
CACHES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 64}), ("mixtral", {}), ("gpt2", {}), ("qwen35", {}), ("mamba2", {}), ("gpt_oss", {}),
    ("gemma2", GEMMA3 | {"sliding_window_pattern": 2}),
]  # fmt: skip
"""Each kind of state, with its changes."""


@pytest.mark.parametrize(
    ("compute", "sizes"),
    [pytest.param("bf16", ((1, 64), (8, 256)), marks=pytest.mark.slow),
     *(pytest.param(c, ((1, 64), (1, 1024), (2, 256), (8, 1024)), marks=pytest.mark.soak) for c in ("f32", "bf16"))],
)  # fmt: skip
@pytest.mark.parametrize(("family", "changes"), CACHES, ids=lambda v: v if isinstance(v, str) else None)
def test_every_state_is_updated_in_place(
    family: str, changes: Any, compute: str, sizes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows over caches of so many positions: no copy of a cache of any size, no surplus.

    With `-s` a line for each program: bytes of the state, of temporaries, more than planned, and what XLA copies.
    """
    monkeypatch.setattr(donation, "MIN_CACHE_BYTES", 0)
    positions = {"gpt2": {"n_positions": 1024}, "mamba2": {}}.get(family, {"max_position_embeddings": 1024})
    profile = rlx.CompileProfile().replace(precision={"compute": compute}, donation={"strict": True})
    model = rlx.compile(recipe(family, **positions, **changes), profile=profile, program="extend")
    for batch, context in sizes:
        proof = decode_step(model, batch, context).donation
        told = f"{proof.state_bytes:>9} {proof.temp_bytes:>9} {proof.extra_bytes():>6}"
        print(f"{family:>18} {compute:>4} {batch} x {context:<4} {told} {proof.problem() or '-'}")
