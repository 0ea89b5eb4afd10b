"""Models divided over devices say what they say on one: logits, tokens, gradients, files; and what they send for it.

The quick tier has experts and a window, the slow one an archetype on a mesh each and two processes; every family on the
largest mesh and each mesh for one family are a soak.
"""

import functools
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import rlx_jax as rlx
from tests import model_process
from tests.divided import DECODERS, ENCODERS, IMAGES, SIZES, V, mesh, recipe, weights
from tests.oracles.comparing import TOLERANCE, assert_close
from tests.small import profile

RNG = np.random.default_rng(1)
IDS = RNG.integers(0, V, (4, 11)).astype(np.int32)
LENGTHS = np.array([11, 5, 1, 8])
PROMPTS = [RNG.integers(0, V, n).tolist() for n in (3, 9, 6, 1, 12)]
HIDDEN, LAYERS = SIZES["hidden_size"], SIZES["num_hidden_layers"]
SLOW = pytest.mark.slow
SOAK = pytest.mark.soak
LARGEST = ("data fsdp tensor", 8)
CHOSEN = [("llama", "data tensor", 8), ("gemma2", *LARGEST), ("qwen35", "tensor", 8)]
MESHES = [(family, *LARGEST) for family in DECODERS if family != "gemma2"]
MESHES += [("llama", "data", 2), ("llama", "fsdp", 8), ("llama", "tensor", 2), ("llama", "fsdp tensor", 4)]
MESHES += [(family, "fsdp expert tensor", 8) for family in ("mixtral", "qwen3 experts", "gpt_oss")]


@functools.lru_cache(maxsize=8)
def lm(family: str, kinds: str = "", devices: int = 1) -> rlx.CausalLM:
    """A tiny model: on one device, or over a mesh."""
    return rlx.CausalLM(recipe(family), weights(family), mesh=mesh(kinds, devices) if kinds else None)


@functools.cache
def logits(family: str) -> np.ndarray:
    """What one device says."""
    return np.asarray(lm(family).logits(IDS))


@functools.cache
def greedy(family: str) -> list[list[int]]:
    """12 tokens after each of three prompts, on one device."""
    return lm(family).generate(PROMPTS[:3], max_new_tokens=12)


@pytest.mark.parametrize(
    ("family", "kinds", "devices"),
    [*(pytest.param(*m, marks=SLOW) for m in CHOSEN), *(pytest.param(*m, marks=SOAK) for m in MESHES)],
)
def test_logits_and_tokens(family: str, kinds: str, devices: int) -> None:
    """Logits, and greedy tokens of a ragged batch whose rows no axis divides."""
    ours = lm(family, kinds, devices)
    assert_close(ours.logits(IDS), logits(family))
    assert ours.generate(PROMPTS[:3], max_new_tokens=12) == greedy(family)


@pytest.mark.parametrize(
    ("family", "kinds", "devices"),
    [("bert", "data tensor", 8), *(pytest.param(family, *LARGEST, marks=SOAK) for family in ENCODERS)],
)
def test_encoder(family: str, kinds: str, devices: int) -> None:
    """Hidden states of padded rows that no axis divides."""
    one, ours = (rlx.Encoder(recipe(family), weights(family), mesh=m) for m in (None, mesh(kinds, devices)))
    assert_close(ours.hidden_states(IDS[:3], LENGTHS[:3]), np.asarray(one.hidden_states(IDS[:3], LENGTHS[:3])))


@pytest.mark.parametrize(
    ("family", "kinds", "devices"),
    [pytest.param("dinov2 original", "fsdp tensor", 4, marks=SLOW), pytest.param("clip", *LARGEST, marks=SLOW)]
    + [pytest.param(f, *LARGEST, marks=SOAK) for f in IMAGES if f != "clip"],
)
def test_images(family: str, kinds: str, devices: int) -> None:
    """Hidden states and vectors of images, and how texts beside them fit, of rows that no axis divides."""
    pixels = np.random.default_rng(2).normal(size=(3, 3, 12, 12)).astype(np.float32)
    made, held, found = recipe(family), weights(family), list[Any]()
    for place in (None, mesh(kinds, devices)):
        if family in ("clip", "siglip"):
            towers = (made.of("text"), made.of("vision"))
            both = rlx.DualEncoder(*towers, held, similarity=made.of("similarity"), padding=made.padding, mesh=place)
            scores = both.similarity([[3, 5, 7], [9, 7], [1, 2, 3, 4, 7]], pixels)
            found.append((both.images.hidden_states(pixels), both.embed_images(pixels), scores))
        else:
            encoder = rlx.VisionEncoder(made, held, mesh=place)
            found.append((encoder.hidden_states(pixels), encoder.embed(pixels)))
    for one, ours in zip(*found, strict=True):
        assert_close(ours, np.asarray(one))


@pytest.mark.slow
def test_requests() -> None:
    """Five rows, of which the devices have no equal parts, and one alone; drawn tokens. All is served where JAX refuses
    what is not sent explicitly."""
    one, ours = lm("llama"), lm("llama", "data tensor", 8)
    sampler = rlx.Sampler(1.3, 20, 0.9, None, 1.2, presence_penalty=0.3, min_tokens=3, bad_words=[[1, 2]])
    with jax.transfer_guard("disallow"):
        assert list(ours.stream(PROMPTS[0], max_new_tokens=12)) == greedy("llama")[0]
        both = [m.generate(PROMPTS, max_new_tokens=12, sampler=sampler, seed=5) for m in (one, ours)]
    assert both[0] == both[1]


@pytest.mark.slow
def test_other_devices_than_the_first() -> None:
    """Devices in any order, not those that JAX would take; another one as the default."""
    want, tokens, where = logits("llama"), greedy("llama"), Mesh(np.array(jax.devices())[[5, 3]], ("tensor",))
    with jax.default_device(jax.devices()[7]):
        ours = rlx.CausalLM(recipe("llama"), weights("llama"), mesh=where)
        assert_close(ours.logits(IDS), want)
        assert ours.generate(PROMPTS[:3], max_new_tokens=12) == tokens
        _, state = ours.prefill(IDS)
        ours.extend(state.copy(), IDS[:, :1])


def test_states() -> None:
    """Each device has its rows and heads of the cache, and rings as short as on one, all written in place; a prompt in
    parts, rows of their own lengths, is the prompt at once; a copy goes on as the state does."""
    ours, want = lm("mistral", "fsdp tensor", 4), logits("mistral")
    first, state = ours.prefill(IDS[:, :8], lengths=[8, 2, 1, 5])
    rows = [0, 1, 2, 3], [7, 1, 0, 4]
    assert_close(np.asarray(first)[rows], want[rows])
    arrays = state.take(state.owner, peek=True).arrays()
    for name in ("layers.0.self_attn.k", "layers.1.self_attn.v"):
        assert arrays[name].shape == (4, 5, 4, 8) and arrays[name].sharding.shard_shape((4, 5, 4, 8)) == (2, 5, 2, 8)
    held = sum(int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize for a in arrays.values())
    more = np.stack([IDS[0, 8:11], IDS[1, 2:5], IDS[2, :3], IDS[3, 5:8]])
    second, third = (ours.extend(s, more, [3, 3, 0, 2], "last") for s in (state.copy(), state))
    np.testing.assert_array_equal(second[0], third[0])
    assert_close(np.asarray(third[0])[[0, 1, 3]], want[[0, 1, 3], [10, 4, 6]], tolerance=2 * TOLERANCE)
    assert third[1].lengths.tolist() == [11, 5, 1, 7]
    proofs = [e.donation for k, e in ours.model.programs.executables.items() if k.program == "extend"]
    assert proofs and all(p is not None and p.aliased_bytes >= p.state_bytes for p in proofs)
    assert held in {p.state_bytes for p in proofs if p is not None}


@pytest.mark.slow
def test_scanned_layers() -> None:
    """Divided as layers that are not."""
    made, held, chosen = recipe("llama tied"), weights("llama tied"), profile(layers={"roll": "scan"})
    one, ours = (rlx.CausalLM(made, held, profile=chosen, mesh=m) for m in (None, mesh("fsdp tensor", 8)))
    assert_close(ours.logits(IDS), np.asarray(one.logits(IDS)))
    assert ours.generate(PROMPTS[:3], max_new_tokens=12) == one.generate(PROMPTS[:3], max_new_tokens=12)


_LINE = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")
SLOTS = 80


def sent(ours: rlx.CausalLM, program: str) -> list[tuple[str, str]]:
    """What a program sends, but for what takes no room: kinds, and dtypes with shapes."""
    (made,) = (e for key, e in ours.model.programs.executables.items() if key.program == program)
    found = [m for line in (made.call.as_text() or "").splitlines() if (m := _LINE.match(line))]
    return [(m[2], m[1].split("{")[0]) for m in found if m[1].startswith("f32")]


@pytest.mark.parametrize(
    ("family", "kinds", "devices"),
    [
        ("llama tied", "data tensor", 4), pytest.param("mistral", "fsdp", 4, marks=SLOW),
        pytest.param("gpt2", "data tensor", 4, marks=SLOW),
    ],
)  # fmt: skip
def test_collectives(family: str, kinds: str, devices: int) -> None:
    """Heads: two sums a layer, and one for a table whose rows are divided; logits are gathered. Parameters: each that
    is kept in parts is gathered once. Nothing of the size of a cache is sent."""
    chosen = profile(buckets={"context": [SLOTS]})
    ours = rlx.CausalLM(recipe(family), weights(family), profile=chosen, mesh=mesh(kinds, devices))
    ours.generate([[1, 2, 3]] * 4, max_new_tokens=4)
    model_sharding = ours.model.programs.model_sharding
    assert model_sharding is not None
    leaves = ours.model.programs.layout.params.values()
    gathered = [p for p in leaves if model_sharding.storage_sharding(p) != model_sharding.compute_sharding(p)]
    rows = {"fsdp": 1, "data tensor": 2}[kinds]
    for program in ("prefill", "extend"):
        found = sent(ours, program)
        sums = [shape for kind, shape in found if kind == "all-reduce"]
        others = [kind for kind, _ in found if kind != "all-reduce"]
        assert all(re.fullmatch(rf"f32\[{rows},\d+,{HIDDEN}\]", shape) for shape in sums)
        assert len(sums) == (0 if kinds == "fsdp" else 2 * LAYERS + 1)
        assert others == ["all-gather"] * (len(gathered) + (kinds != "fsdp"))
        assert not any(re.search(rf"[\[,]({SLOTS}|5)[,\]]", shape) for _, shape in found)
    assert len(gathered) == (4 * LAYERS + 2 if kinds == "fsdp" else 0)


@pytest.mark.slow
def test_experts_stay_where_they_are() -> None:
    """Each device has its own; tokens are sent to them and results back, and no weight. Rows are divided, too."""
    ours = lm("mixtral", "expert tensor", 4)
    assert ours.generate(PROMPTS[:3], max_new_tokens=12) == greedy("mixtral")
    params: Any = ours.model.params
    (gate,) = (p for name, p in params.items() if name.startswith("model.layers.1") and ".w1." in name)
    assert gate.shape == (4, 48, 32) and gate.sharding.shard_shape(gate.shape) == (2, 24, 32)
    kept = {k.program: e for k, e in ours.model.programs.executables.items()}
    for program in ("prefill", "extend"):
        assert all("2 of 4 experts on each device" in line for line in kept[program].lir.experts())
        found = sent(ours, program)
        wide = [(kind, re.sub(r",\d+,", ",S,", shape)) for kind, shape in found if shape.endswith(f",{HIDDEN}]")]
        layer = [("all-gather", "f32[4,S,32]"), ("reduce-scatter", "f32[2,S,32]"), *[("all-reduce", "f32[2,S,32]")] * 2]
        assert sorted(wide) == sorted(LAYERS * layer)
        others = {shape.rpartition(",")[2] for _, shape in found if not shape.endswith(f",{HIDDEN}]")}
        assert others == {"2]", f"{V + 1}]"}  # weights of choices, logits


def test_the_largest_of_a_row_are_found_where_it_is() -> None:
    """As NumPy sorts; no row is sent."""
    axis = 1
    flow = rlx.ModelFlow("top").input("x", ("batch", 5, 6)).custom(lambda emit, x: emit.top_k(x, 3, axis)[0])
    ours: Any = rlx.compile(flow, mesh=mesh("data", 4))
    x = np.random.default_rng(2).normal(size=(8, 5, 6)).astype(np.float32)
    np.testing.assert_array_equal(ours(x), -np.take(np.sort(-x, axis), np.arange(3), axis))
    assert ours.report().collectives == {}


def test_an_encoder_sends_two_sums_a_layer() -> None:
    """Also where queries, keys and values are stored as one: no device sends another a part of it."""
    ours = rlx.Encoder(recipe("nomic"), weights("nomic"), mesh=mesh("tensor", 2))
    ours.hidden_states(IDS, LENGTHS)
    assert ours.model.report().collectives == {"all-reduce": 2 * LAYERS}


@pytest.mark.parametrize(
    ("family", "devices", "sums", "whole"),
    [
        ("mamba2", 2, 2, []),
        # Groups that devices do not divide are whole on each.
        pytest.param("qwen35", 8, 4, ["conv1d.weight[0:32]", "conv1d.weight[32:64]"], marks=SLOW),
    ],
)
def test_blocks_with_a_state(family: str, devices: int, sums: int, whole: list[str]) -> None:
    """What a checkpoint stores as one is divided part by part, and so are convolutions and their states: as few sums as
    of attention, and nothing is brought together for a step but logits."""
    ours, want = rlx.CausalLM(recipe(family), weights(family), mesh=mesh("tensor", devices)), logits(family)
    first, state = ours.prefill(IDS[:, :9])
    assert_close(first, want[:, :9], tolerance=2 * TOLERANCE)
    for at in (9, 10):
        last, state = ours.extend(state, IDS[:, at : at + 1])
        assert_close(last[:, 0], want[:, at], tolerance=2 * TOLERANCE)
    found = [kind for kind, _ in sent(ours, "extend")]
    assert (found.count("all-reduce"), found.count("all-gather"), len(found)) == (sums, 1, sums + 1)
    leaves = ours.model.report().replicated
    assert sorted({name.partition("conv1d")[2] for name in leaves if "conv1d" in name}) == [w[6:] for w in whole]
    assert any("in_proj" in name for name in leaves) == bool(whole)
    arrays = state.take(state.owner, peek=True).arrays()
    held = {name: a for name, a in arrays.items() if "conv1d" in name}
    cut = {name: a.sharding.shard_shape(a.shape)[2] * devices == a.shape[2] for name, a in held.items()}
    layers = 1 if family == "qwen35" else 2
    assert len(cut) == 3 * layers and sum(cut.values()) == (1 if whole else 3) * layers


ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "tests" / "fixtures" / "llama" / "gqa_tied_llama3_v5"


def both(directory: Path, steps: int, save_at: int) -> list[dict[str, Any]]:
    """What each of two processes says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.model_process", str(CHECKPOINT), str(directory), f"--steps={steps}"]
    command += [f"--save-at={save_at}", "--of=2", f"--port={port}"]
    processes = [
        subprocess.Popen(
            [*command, f"--process={i}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow
def test_a_model_over_two_processes(tmp_path: Path) -> None:
    """Both read the checkpoint, generate the same tokens as one device, and train; one process goes on from their
    checkpoint with the losses that they had."""
    first, second = both(tmp_path / "run", 4, 2)
    assert first == second
    alone = rlx.load(CHECKPOINT)
    assert first["tokens"] == alone.generate(model_process.PROMPTS, max_new_tokens=8)
    sampler = rlx.Sampler(temperature=1.0)
    assert first["sampled"] == alone.generate(model_process.PROMPTS, max_new_tokens=8, sampler=sampler, seed=7)
    losses = [first["losses"][str(number)] for number in range(1, 5)]
    whole = model_process.losses_of(CHECKPOINT, tmp_path / "alone", 4, 0)
    np.testing.assert_allclose([whole[number] for number in range(1, 5)], losses, rtol=1e-5)
    resumed = model_process.losses_of(CHECKPOINT, tmp_path / "run", 4, 0)
    assert sorted(resumed) == [3, 4]
    np.testing.assert_allclose([resumed[number] for number in resumed], losses[2:], rtol=1e-5)
    assert losses[-1] != losses[0]
