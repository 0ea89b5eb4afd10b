"""Experts that devices share: tokens are brought to them and results given back, whatever the routing is."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax.device import named_device
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.types import TensorType
from rlx_jax.lowering.lir.experts import (
    block_rows,
    choose_sharded,
    compare_into_blocks,
    count_into_blocks,
    sort_into_blocks,
)
from rlx_jax.lowering.sharding import ModelSharding
from tests.divided import mesh
from tests.oracles.comparing import assert_close

E, K, H, F, S = 8, 3, 6, 10, 5
RNG = np.random.default_rng(0)
SIZES = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
BIASES = {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, H)}
WEIGHTS = {name: RNG.normal(size=size).astype(np.float32) for name, size in (SIZES | BIASES).items()}


def stage(emit: Any, x: Any) -> Any:
    names = {name: name for name in SIZES}
    return emit.experts(x, emit.flow_input("weights"), emit.flow_input("ids"), **names, biases=list(BIASES))


FLOW = (
    rlx.ModelFlow("apart")
    .input("x", ("batch", "seq", H))
    .input("weights", ("batch", "seq", K))
    .input("ids", ("batch", "seq", K), dtype="int32")
    .custom(stage)
)


def model(way: str, kinds: str, devices: int) -> Any:
    """One mixture over a mesh."""
    profile = rlx.CompileProfile().replace(backend={"cpu": {"experts": way}})
    return rlx.compile(FLOW, WEIGHTS, mesh=mesh(kinds, devices), profile=profile)


def drawn(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and weights of their choices."""
    rng = np.random.default_rng(rows)
    return rng.normal(size=(rows, S, H)).astype(np.float32), rng.normal(size=(rows, S, K)).astype(np.float32)


def routings(rows: int) -> dict[str, np.ndarray]:
    """Ids: of any experts, of one for all, of those of one device, of one twice, and none of 0, 1 and 3."""
    rng, shape = np.random.default_rng(rows), (rows, S, K)
    found = {"any": rng.integers(0, E, shape), "one": np.full(shape, 5), "neighbours": rng.integers(6, 8, shape)}
    found["twice"] = np.tile([2, 7, 2], (*shape[:2], 1))
    return {name: ids.astype(np.int32) for name, ids in found.items()} | {
        "some": rng.choice(np.array([2, 4, 5, 6, 7], np.int32), shape)
    }


def formula(x: np.ndarray, shares: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Token by token in float64."""
    out = np.zeros(x.shape)
    for at in np.ndindex(ids.shape):
        token, own = x[at[:2]], {name: w[ids[at]].astype(np.float64) for name, w in WEIGHTS.items()}
        inner, up = (own[name] @ token + own[f"{name}_bias"] for name in ("gate", "up"))
        out[at[:2]] += shares[at] * (own["down"] @ (inner / (1 + np.exp(-inner)) * up) + own["down_bias"])
    return out


def sent(ours: Any, rows: int) -> list[str]:
    """What the program of so many rows sends."""
    (made,) = (e for key, e in ours.programs.executables.items() if dict(key.binding)["batch"] == rows)
    return re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", made.call.as_text() or "")


ROUTED = (
    ("auto", "data expert", 8), ("blocked", "expert", 4), ("ragged", "expert tensor", 4), ("gathered", "expert", 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("way", "kinds", "devices"), [ROUTED[0], *(pytest.param(*routed, marks=pytest.mark.slow) for routed in ROUTED[1:])]
)
def test_any_routing(way: str, kinds: str, devices: int) -> None:
    """The formula, of rows that divide and of some that do not; experts that no token chose overflow unseen. Tokens
    are sent once, with their choices, and results once; where rows do not divide, results alone."""
    ours = model(way, kinds, devices)
    wild = {name: np.array(w) for name, w in WEIGHTS.items()}
    for w in wild.values():
        w[[0, 1, 3]] = 1e38
    for rows in (8, 3):
        x, shares = drawn(rows)
        for name, ids in routings(rows).items():
            held = {n: jax.device_put(w, ours.params[n].sharding) for n, w in wild.items()}
            got = (ours.replace(params=held) if name == "some" else ours)(x, shares, ids)
            assert_close(got, formula(x, shares, ids))
    inner = ["all-reduce"] * ("tensor" in kinds)
    assert sent(ours, 8) == ["all-gather"] * 3 + ["reduce-scatter"] + inner
    assert sent(ours, 3) == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "ragged"])
def test_gradients(way: str) -> None:
    """Of tokens, weights of choices and every expert: those of the formula, written in plain JAX."""
    ours, (x, shares) = model(way, "data expert", 8), drawn(8)

    def plain(w: Any, x: Any, shares: Any, ids: Any) -> Any:
        wide = (jnp.einsum("bskfh,bsh->bskf", w[name][ids], x) + w[f"{name}_bias"][ids] for name in ("gate", "up"))
        gate, up = wide
        made = jnp.einsum("bskhf,bskf->bskh", w["down"][ids], jax.nn.silu(gate) * up) + w["down_bias"][ids]
        return (made * shares[..., None]).sum(2)

    def slopes(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=(0, 1, 2)))

    got, want = slopes(ours.apply), slopes(plain)
    for ids in routings(8).values():
        found, wanted = got(ours.params, x, shares, ids), want(WEIGHTS, x, shares, ids)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert_close(one, np.asarray(other))


@pytest.mark.parametrize("name", ["any", "one", "neighbours"])
def test_each_device_computes_its_own_choices(name: str) -> None:
    """All devices together no more blocks than one device has, whatever the routing: full ones, and the last of each
    expert."""
    ids, devices = np.tile(routings(8)[name], (4, 1, 1)), 4
    rows = block_rows(ids.size // devices, E // devices)
    used, cut = [], jax.jit(lambda own: sort_into_blocks(own, E // devices, rows).row_mask)
    for device in range(devices):
        own = ids - device * (E // devices)
        own = np.where((own >= 0) & (own < E // devices), own, E // devices)
        filled = np.asarray(cut(own.astype(np.int32)))
        used.append(int(filled.any(1).sum()))
        assert filled.sum() == (own < E // devices).sum()
    assert sum(used) == sum(-(-n // rows) for n in np.bincount(ids.ravel(), minlength=E))


@pytest.mark.parametrize("sort", [compare_into_blocks, count_into_blocks])
@pytest.mark.parametrize("name", ["any", "one"])
def test_ways_to_sort_choices(name: str, sort: Any) -> None:
    """In several parts, the last of them not full."""
    ids = np.tile(routings(8)[name], (7, 1, 1)).astype(np.int32)
    want, got = ({k: np.asarray(v) for k, v in vars(run(ids, E, 4)).items()} for run in (sort_into_blocks, sort))
    used = want["row_mask"]
    for name in ("choice_row", "row_mask"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_array_equal(got["row_choice"][used], want["row_choice"][used])
    np.testing.assert_array_equal(got["block_expert"][used.any(1)], want["block_expert"][used.any(1)])


@pytest.mark.parametrize(("rows", "device", "chosen"), [
    (1, "cuda", "gathered (16 of 64 experts on each device: 16 choices of 16 experts)"),
    (4, "cuda", "xla (16 of 64 experts on each device: 16 tokens: reading the experts takes longer"),
    (512, "cuda", "blocked (16 of 64 experts on each device: 8192 choices of 16 experts)"),
    (512, "tpu", "ragged (16 of 64 experts on each device: one kernel)"),
    (512, "cpu", "looped (16 of 64 experts on each device: batches"),
])  # fmt: skip
def test_the_choice_is_of_what_a_device_has(rows: int, device: str, chosen: str) -> None:
    """Its experts, and the tokens that are brought to it: over `data` 2 and `expert` 4 half of all."""
    op = ExpertFfn(roles=("batch", None))
    axes = {"batch": ("data", "expert"), "experts": ("expert",)}
    model_sharding = ModelSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert")), axes, {})
    shapes = {"x": (8, rows, H), "gate": (64, F, H), "up": (64, F, H), "down": (64, H, F)}
    shapes |= {"weights": (8, rows, 4), "ids": (8, rows, 4)}
    types = [TensorType(s, np.dtype(np.int32 if n == "ids" else np.float32)) for n, s in shapes.items()]
    assert str(choose_sharded((op, tuple(types)), named_device(device), model_sharding)).startswith(chosen)
