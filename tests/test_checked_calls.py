"""Every public call refuses the same wrong ids and the same long rows, in whatever array they come."""

import functools
from collections import UserDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.runtime import inputs

V, POSITIONS = 31, 24
SIZES = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
}  # fmt: skip
TEXTS = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
FLOWS: dict[str, Any] = {
    "llama": rlx.Llama32Flow.for_prefill(SIZES),
    "bert": rlx.BertFlow.for_prefill(TEXTS),
    "nomic": rlx.NomicFlow.for_prefill(TEXTS | {"hidden_act": "silu"}),
}


@functools.cache
def model(program: str = "forward", ids: str = "host") -> rlx.CompiledModel:
    profile = rlx.CompileProfile().replace(checks={"ids": ids})
    return rlx.init(FLOWS["llama"], 0, program=program, profile=profile)


@functools.cache
def lm() -> rlx.CausalLM:
    return rlx.CausalLM(FLOWS["llama"], model().weights())


@functools.cache
def encoder() -> rlx.Encoder:
    return rlx.Encoder(FLOWS["bert"], missing="init", key=0)


def extend(block: Any) -> Any:
    _, state = lm().prefill([[1, 2]], max_len=POSITIONS)
    return lm().extend(state, block)


def step(block: Any, ids: str = "host", labels: Any = None) -> Any:
    trained, optimizer = model("train", ids), optax.sgd(0.1)
    batch = {"tokens": block} if labels is None else {"tokens": block, "labels": labels}
    return rlx.train.make_step(trained, optimizer)(rlx.train.init(trained, optimizer, 0), batch)


CALLS: dict[str, Callable[[Any], Any]] = {
    "model": lambda block: model()(block),
    "model, jnp": lambda block: model()(jnp.asarray(block)),
    "apply, jnp": lambda block: model().apply(model().params or {}, jnp.asarray(block)),
    "lm.model": lambda block: lm().model(block),
    "logits": lambda block: lm().logits(block),
    "logits, jnp": lambda block: lm().logits(jnp.asarray(block)),
    "prefill": lambda block: lm().prefill(block),
    "extend": extend,
    "generate": lambda block: lm().generate(block, max_new_tokens=1),
    "score": lambda block: lm().score(np.asarray(block)),
    "encoder.model": lambda block: encoder().model(block),
    "hidden_states": lambda block: encoder().hidden_states(block),
    "hidden_states, padded": lambda block: encoder().hidden_states(block, lengths=[1]),
    "token_type_ids": lambda block: encoder().hidden_states(np.ones_like(block), token_type_ids=jnp.asarray(block)),
    "embed": lambda block: encoder().embed(np.asarray(block)),
    "step": step,
    "step, jnp": lambda block: step(jnp.asarray(block)),
    "step, labels": lambda block: step(np.ones_like(block), labels=jnp.abs(jnp.asarray(block))),
    "cross_entropy, jnp": lambda block: rlx.losses.cross_entropy(model(), model().params or {}, jnp.asarray(block)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("block", "error"), [
    ([[1, 99999, 3]], errors.TokenIdError),
    ([[1, -V, 3]], errors.TokenIdError),
    ([[1] * (POSITIONS + 2)], errors.SequenceLengthError),
], ids=["above", "below", "long"])  # fmt: skip
def test_what_no_call_takes(call: str, block: list[list[int]], error: type[Exception]) -> None:
    with pytest.raises(error):
        CALLS[call](block)


@pytest.mark.parametrize(("family", "program"), [("llama", "train"), ("bert", "forward"), ("nomic", "forward")])
def test_a_recipe_declares_its_positions(family: str, program: str) -> None:
    """Rotary positions have no table that ends, and the config says where they do."""
    made = rlx.init(FLOWS[family], 0, program=program)
    assert jax.tree.leaves(made(np.ones((1, POSITIONS), int)))[0].shape[1] == POSITIONS
    with pytest.raises(errors.SequenceLengthError, match=f"{POSITIONS + 1}.*{POSITIONS}"):
        made(np.ones((1, POSITIONS + 1), int))


def test_arguments_and_flows_say_how_long_a_sequence_is() -> None:
    """An argument counts before the recipe's own number; a flow has a number, or none."""
    longer = rlx.CausalLM(FLOWS["llama"], model().weights(), max_positions=POSITIONS + 8)
    assert longer.max_positions == POSITIONS + 8
    assert longer.logits([[1] * (POSITIONS + 8)]).shape[1] == POSITIONS + 8
    for wrong in ("seq", 0, 2.5):
        with pytest.raises(errors.ShapeError, match="max_positions"):
            rlx.ModelFlow("m", _max_positions=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", ["host", "all"])
def test_ids_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, ids: str) -> None:
    """They are read where the profile says so, for calls and for training steps; traced ones have no values."""
    monkeypatch.setattr(inputs, "HOST_PLATFORMS", ())
    good, bad = jnp.array([[1, 2, 3]]), jnp.array([[1, 99999, 3]])
    calls = [lambda: model(ids=ids)(bad), lambda: step(bad, ids), lambda: step(good, ids, bad)]
    for call in calls:
        if ids == "host":
            call()
        else:
            with pytest.raises(errors.TokenIdError, match=r"id 99999 at \(0, 1\) is not in \[0, 31\)"):
                call()
    assert jax.jit(model(ids=ids).apply)(model().params, bad).shape == (1, 3, V)


def test_ids_in_parts() -> None:
    """Of an array over several devices all parts are read."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    block = jax.device_put(np.array([[1, 2], [3, 99]]), jax.NamedSharding(mesh, jax.P("x")))
    with pytest.raises(errors.TokenIdError, match=r"id 99 at \(1, 1\)"):
        rlx.init(FLOWS["llama"], 0, mesh=2)(block)


@pytest.mark.oracle(warnings="error")
def test_arrays_of_torch() -> None:
    """They are read as NumPy's are; one that NumPy cannot read, and what tokenizers return, are refused with a cure."""
    import torch

    ids, rows = [[1, 2, 3]], [[1, 2], [3]]
    for request in (lm().generate, encoder().embed):
        with pytest.raises(errors.TokenIdError):
            request(torch.tensor([[1, 99999, 3]]))
    assert lm().generate(torch.tensor(ids), max_new_tokens=3) == lm().generate(ids, max_new_tokens=3)
    assert lm().generate([torch.tensor(r) for r in rows], max_new_tokens=3) == lm().generate(rows, max_new_tokens=3)
    assert lm().score(torch.tensor(ids)) == lm().score(ids)
    np.testing.assert_array_equal(lm().logits(torch.tensor(ids)), lm().logits(ids))
    wrong = torch.ones(1, 3, requires_grad=True), torch.ones(1, 3, dtype=torch.bfloat16)
    for call in (model(), lm().generate, lm().score, lm().logits, encoder().embed):
        for array in wrong:
            with pytest.raises(errors.RequestError, match=r"\.detach\(\)\.cpu\(\)\.numpy\(\)"):
                call(array)
        with pytest.raises(errors.RequestError, match="got UserDict: pass its 'input_ids'"):
            call(UserDict(input_ids=ids, attention_mask=[[1, 1, 1]]))
