"""Artifacts: what is exported computes the same in a process without flow, plugin and checkpoint, and no program of a
damaged file is deserialized."""

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import (
    ArtifactFormatError,
    DeriveError,
    IntegrityError,
    PlatformMismatchError,
    RequestError,
    RlxError,
    SequenceLengthError,
    UnsupportedError,
    VersionMismatchError,
)
from rlx_jax.io.archive import HEADER, Archive, write_archive
from rlx_jax.runtime import export_model
from tests.opening import load
from tests.oracles.chat_templates import format_checkpoint
from tests.oracles.checkpoints import FIXTURES, SENTENCE_VARIANTS, copy, edit_json, edit_tensors, sentence_directory
from tests.small import profile

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"llama": "llama/gqa_tied_llama3_v5", "gemma": "gemma3_text/pattern_v4", "qwen": "qwen3_5_text/blocks_v5"}
BLOCK = ["linear_attention", "linear_attention", "full_attention"]
X = np.random.default_rng(1).standard_normal((3, 8)).astype("f4")


def stage(emit: Any, x: Any) -> Any:
    return emit.jax(lambda v: jnp.tanh(v) * v, emit.linear(x, "w"))


@pytest.fixture(scope="module")
def model() -> Any:
    """A compiled flow with a function of the user's, which nothing can store."""
    flow = rlx.ModelFlow("gated").input("x", ("batch", 8)).custom(stage)
    return rlx.compile(flow, {"w": np.random.default_rng(0).standard_normal((8, 8)).astype("f4")})


@pytest.fixture(scope="module")
def exported(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model.export(tmp_path_factory.mktemp("artifact") / "m.rlxa", platforms=("cpu", "cuda", "tpu"))


def same(got: Any, want: Any) -> bool:
    return np.array_equal(np.asarray(got), np.asarray(want))


def test_a_flow_of_the_user(model: Any, exported: Any) -> None:
    """One program for every batch, bit-equal; it says when it expires, and is what its digest names."""
    loaded = load(exported.path, expect_sha256=exported.sha256)
    assert all(same(loaded(X[:rows]), model(X[:rows])) for rows in (1, 3))
    assert f"later versions load it until {exported.expires}" in str(exported)
    assert Archive(exported.path).content["expires"] == str(exported.expires)
    assert (exported.expires - exported.created).days == 180
    assert same(pickle.loads(pickle.dumps(loaded.programs.source)).read("w"), model.weights()["w"])
    with pytest.raises(IntegrityError, match="the digest of the artifact is"):
        load(exported.path, expect_sha256="0" * 64)
    with pytest.raises(rlx.errors.RequestError, match="is of class CompiledModel; expected Encoder"):
        load(exported.path, expect=rlx.Encoder)
    assert loaded.report().flops is None and "gated" in str(loaded)
    with pytest.raises(DeriveError, match=r"m\.rlxa.*'train'.*'forward'"):
        loaded.as_program("train")(X)


def test_packed_weights_with_sizes_that_are_open(tmp_path: Path) -> None:
    """One program for every batch, on devices that choose the product by the number of rows too."""
    flow = rlx.ModelFlow("packed").input("x", ("batch", 32)).linear("w")
    weights = {"w": np.random.default_rng(0).standard_normal((8, 32)).astype("f4")}
    packed = rlx.compile(flow, weights, profile=profile(precision={"weights": "int8"}))
    path = packed.export(tmp_path / "m.rlxa", platforms=("cpu", "cuda")).path
    x = np.random.default_rng(1).standard_normal((3, 32)).astype("f4")
    for rows in (1, 3):
        np.testing.assert_allclose(load(path)(x[:rows]), packed(x[:rows]), atol=1e-6)


def test_platforms_with_other_implementations(tmp_path: Path) -> None:
    """Each has a program of its own, which computes what the model does."""
    m = rlx.GraphModule.hir("m")
    q, k, v = (m.input(name, ("batch", "seq", 2, 16)) for name in "qkv")
    g, beta = (m.input(name, ("batch", "seq", 2)) for name in ("g", "beta"))
    m.set_outputs([m.gated_delta_net(q, k, v, g, beta, 16)])
    model, rng = rlx.compile(m), np.random.default_rng(0)
    x = [rng.standard_normal((2, 32, 2, *([16] if i < 3 else []))).astype("f4") for i in range(5)]
    x[3:] = -np.abs(x[3]), 1 / (1 + np.exp(-x[4]))
    written = model.export(tmp_path / "m.rlxa", platforms=("cpu", "cuda", "tpu"))
    assert written.programs == ("forward on cpu", "forward on cuda, tpu")
    for got, want in zip(load(written.path)(*x), model(*x), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_apply_with_symbolic_sizes(tmp_path: Path) -> None:
    """`jax.export` of `model.apply`, if no sequence can be longer than the model's positions."""
    model = rlx.compile(rlx.from_pretrained(FIXTURES / "bert" / "bare_v5"))
    ids, specs, limit = np.array([[1, 2, 3]], np.int32), model.param_specs(), model.template().bounds.positions

    def exported_for(constraints: list[str], program: str = "forward") -> Any:
        sizes = jax.export.symbolic_shape("b, s", constraints=constraints)
        return jax.export.export(jax.jit(model.as_program(program).apply), platforms=["cpu", "cuda"])(
            specs, jax.ShapeDtypeStruct(sizes, jnp.int32)
        )

    program = jax.export.deserialize(exported_for([f"s <= {limit}"]).serialize())
    for rows in (ids, np.tile(ids, (2, 3))):
        assert all(map(same, jax.tree.leaves(program.call(model.params, rows)), jax.tree.leaves(model(rows))))
    with pytest.raises(SequenceLengthError, match=rf"constraints=\['s <= {limit}'\]"):
        exported_for([])


def test_optional_inputs_and_sizes(tmp_path: Path) -> None:
    flow = rlx.ModelFlow("sum").input("x", ("batch", "seq", 4)).input("y", ("batch", "seq", 4), default=None)

    def add(emit: Any, x: Any) -> Any:
        return x + (x if (y := emit.optional_input("y")) is None else y)

    model = rlx.compile(flow.custom(add))
    x = np.ones((2, 3, 4), "f4")
    model.export(tmp_path / "a.rlxa", given=["y"])
    loaded = load(tmp_path / "a.rlxa")
    assert same(loaded(x), model(x)) and same(loaded(x, y=x), model(x, y=x))
    model.export(tmp_path / "b.rlxa", sizes=[{"batch": 2, "seq": 3}, {"batch": 1, "seq": 3}])
    loaded = load(tmp_path / "b.rlxa")
    assert same(loaded(x), model(x)) and same(loaded(x[:1]), model(x[:1]))
    with pytest.raises(RequestError, match="'batch 2, seq 3'.*batch 2, seq 2"):
        loaded(x[:, :2])
    with pytest.raises(DeriveError, match="has no program 'forward, with y'"):
        loaded(x, y=x)


FRESH = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "torch", "safetensors", "tests"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import jax, numpy as np, rlx_jax as rlx
exec(sys.argv[2])
print(json.dumps([answers(rlx.load(path), rows, tokens) for path, rows, tokens in json.loads(sys.argv[1])]))
"""


def answers(model: Any, rows: Any, tokens: int) -> dict[str, Any]:
    """The outputs for token ids, or for the rows of an array, and what is generated or embedded."""
    if isinstance(model, rlx.CausalLM):
        state = model.prefill(np.array(rows), max_len=32)[1]
        more = model.extend(state, np.array(rows)[:, :2])[0]
        outputs: Any = (model.logits(np.array(rows)), more)
        return {"outputs": [np.asarray(x).tolist() for x in outputs], "ids": model.generate(rows, tokens)}
    if isinstance(model, rlx.Encoder):
        outputs = (model.hidden_states(np.array(rows)), model.embed(rows))
    else:
        outputs = (model(np.array(rows, np.float32)),)
    return {"outputs": [np.asarray(x).tolist() for x in outputs], "ids": []}


def fresh(*requests: tuple[Path, Any, int], devices: int = 1) -> list[dict[str, Any]]:
    """What a new process computes with artifacts, for rows and a number of tokens each; it can import neither
    transformers nor the tests."""
    source = "from typing import Any\n" + inspect.getsource(answers)
    command = [sys.executable, "-c", FRESH, json.dumps(requests, default=str), source]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run(command, env=env, cwd=requests[0][0].parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [*json.loads(done.stdout)]


@pytest.mark.slow
def test_models_in_a_fresh_process(tmp_path: Path) -> None:
    """Full caches, ring buffers, recurrent states: bit-equal logits of a prompt, and of two more tokens, and the same
    tokens, without the checkpoint; and an encoder's states and vectors."""
    requests, want = [], []
    for family, fixture in {**FAMILIES, "encoder": "sentence/base"}.items():
        path = copy(FIXTURES / fixture, tmp_path / "checkpoints" / family)
        if family == "qwen":  # one block of its layers
            edit_json(path / "config.json", {"num_hidden_layers": 3, "layer_types": BLOCK})
            edit_tensors(path, lambda t: {k: v for k, v in t.items() if not re.search(r"layers\.[3-5]\.", k)})
        model: Any = load(str(path))
        ids = np.random.default_rng(0).integers(1, 30, (2, 9)).tolist()
        model.export(tmp_path / f"{family}.rlxa")
        requests.append((tmp_path / f"{family}.rlxa", ids, 24))
        want.append(answers(model, ids, 24))
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    assert fresh(*requests) == want


def test_a_flow_in_a_fresh_process(model: Any, tmp_path: Path) -> None:
    model.export(tmp_path / "m.rlxa")
    assert fresh((tmp_path / "m.rlxa", X.tolist(), 0)) == [answers(model, X.tolist(), 0)]


@pytest.mark.slow
def test_a_sharded_model(model: Any, tmp_path: Path) -> None:
    """Parameters and rows are sharded as they were, over as many devices; fewer are a named error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).stage(rlx.blocks.SwiGlu("g", "u", "d"))
    shapes = {"g": (16, 8), "u": (16, 8), "d": (8, 16)}
    weights = {key: np.random.default_rng(0).normal(size=shape).astype("f4") for key, shape in shapes.items()}
    sharded: Any = rlx.compile(flow, weights, mesh=mesh)
    x = np.random.default_rng(1).standard_normal((8, 8)).astype("f4")
    for name, sizes in (("any", None), ("eight", [{"batch": 8}])):
        sharded.export(tmp_path / f"{name}.rlxa", sizes=sizes)
        loaded = load(tmp_path / f"{name}.rlxa")
        want = {k: v.sharding.spec for k, v in sharded.params.items()}
        assert {k: v.sharding.spec for k, v in loaded.params.items()} == want and "tensor" in str(want)
        np.testing.assert_allclose(loaded(x), sharded(x), rtol=1e-5, atol=1e-5)
        assert loaded(x).sharding.shard_shape(x.shape) == ((2, 8) if sizes else (8, 8))  # symbolic rows are replicated
    with pytest.raises(AssertionError, match="PlatformMismatchError: .*8 devices .*4"):
        fresh((tmp_path / "eight.rlxa", x.tolist(), 0), devices=4)


@pytest.mark.slow
def test_a_sharded_language_model(tmp_path: Path) -> None:
    """Caches too: the same tokens, with parameters and states over eight devices."""
    lm = load(FIXTURES / FAMILIES["llama"], mesh=8)
    lm.export(tmp_path / "lm.rlxa")
    loaded = load(tmp_path / "lm.rlxa")
    ids = np.random.default_rng(0).integers(1, 30, (8, 6)).tolist()
    assert loaded.generate(ids, 5) == lm.generate(ids, 5)
    np.testing.assert_allclose(loaded.logits(ids), lm.logits(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_requests_of_a_language_model(tmp_path: Path) -> None:
    """Text, streams, chat and states, through the same code; the state is donated. No end token stays none, though the
    tokenizer has one; a file is recognized by its content."""
    lm = load(format_checkpoint(tmp_path / "m", "qwen"))
    assert lm.tokenizer.eos_ids and lm.eos_ids
    lm.eos_ids = ()
    lm.export(tmp_path / "lm.rlxa")
    loaded = load((tmp_path / "lm.rlxa").rename(tmp_path / "renamed"))
    assert (loaded.eos_ids, loaded.bos_id, loaded.max_positions) == ((), lm.bos_id, lm.max_positions)
    assert loaded.generate("a b", 6) == lm.generate("a b", 6) == "".join(loaded.stream("a b", 6))
    messages = [{"role": "user", "content": "a"}]
    assert loaded.chat(messages, 4) == lm.chat(messages, 4)
    assert loaded.generate("a", 4, temperature=1.0, seed=3, n=2) == lm.generate("a", 4, temperature=1.0, seed=3, n=2)
    got, want = (m.score([[1, 2, 3], ("a", "b")]) for m in (loaded, lm))
    assert [s.tokens for s in got] == [s.tokens for s in want]
    np.testing.assert_allclose([s.logprob for s in got], [s.logprob for s in want], rtol=1e-6)
    lm.export(tmp_path / "sized.rlxa", sizes=[{"batch": 1, "seq": 8, "context": 16}])
    with pytest.raises(RequestError, match="exported for 'batch 1, seq 8'"):
        load(tmp_path / "sized.rlxa").score([[1, 2, 3]])
    ids = np.array([[1, 2, 3]])
    (logits, state), (other, _) = loaded.prefill(ids), lm.prefill(ids)
    arrays = state.take(state.owner, peek=True).arrays()
    assert same(logits, other)
    loaded.extend(state, ids[:, :1])
    assert all(array.is_deleted() for array in arrays.values())
    with pytest.raises(UnsupportedError, match="artifact"):
        loaded.export(tmp_path / "again.rlxa")
    with pytest.raises(RlxError, match="no program"):
        loaded.generate("a", 4, speculative="prompt")


def test_an_encoder(tmp_path: Path) -> None:
    """Packed, padded and plain programs; pooling and truncation."""
    encoder = load(str(FIXTURES / "sentence" / "base"))
    encoder.export(tmp_path / "e.rlxa")
    loaded = load(tmp_path / "e.rlxa")
    texts = ["a b c", "b", "a a a a"]
    assert loaded.pipeline == encoder.pipeline and loaded.packing == encoder.packing == ""
    assert same(loaded.embed(texts), encoder.embed(texts))
    ids = np.array([[1, 2, 3], [3, 2, 1]])
    assert same(loaded.hidden_states(ids, [3, 2]), encoder.hidden_states(ids, [3, 2]))
    first = sentence_directory(FIXTURES / "sentence" / "base", tmp_path / "cls", **SENTENCE_VARIANTS["cls"])
    load(first).export(tmp_path / "cls.rlxa")
    assert load(tmp_path / "cls.rlxa").pipeline == load(first).pipeline != encoder.pipeline


def test_stablehlo_alone(model: Any, tmp_path: Path) -> None:
    """`jax.export` runs it without this package."""
    model.export(tmp_path / "hlo", format="stablehlo", platforms=["cpu"])
    program = jax.export.deserialize(bytearray((tmp_path / "hlo" / "program-0.bin").read_bytes()))
    params = {"w": model.params["w"]}
    (y,), _ = program.call(params, {}, {"x": X})
    assert same(y, model(X))
    assert "stablehlo.dot_general" in (tmp_path / "hlo" / "program-0.mlir").read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "m.rlxa")
    words = ["export", str(FIXTURES / FAMILIES["llama"]), path, "--size", "batch=1", "--size", "seq=16"]
    assert cli.main([*words, "--size", "context=64", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["path"] == path and written["sha256"] == Archive(path).sha256
    encoder = str(tmp_path / "encoder.rlxa")
    assert cli.main(["export", str(FIXTURES / "sentence/base"), encoder]) == 0 and capsys.readouterr().out  # any sizes
    assert cli.main(["embed", encoder, "a text", "--json"]) == 0  # in place of the checkpoint
    assert len(json.loads(capsys.readouterr().out.splitlines()[0])) > 0


@pytest.fixture
def no_deserialization(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("reached jax.export.deserialize")

    monkeypatch.setattr("jax.export.deserialize", fail)


def mutants(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Damaged copies: flipped bits, other bytes, zeros, cuts, pieces twice or moved, and numbers of the header."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        at, end = sorted(rng.integers(0, len(raw), 2).tolist())
        piece = bytes(raw[at : end + 1])
        match number % 8:
            case 0:
                out = raw[:at] + bytes([raw[at] ^ 1 << int(rng.integers(8))]) + raw[at + 1 :]
            case 1:
                out = raw[:at] + rng.bytes(1) + raw[at + 1 :]
            case 2:
                out = raw[:at] + bytes(len(piece)) + raw[end + 1 :]
            case 3:
                out = raw[:at]
            case 4:
                out = raw[: end + 1] + piece + raw[end + 1 :]
            case 5:
                out = raw[:at] + raw[end + 1 :] + piece
            case 6:
                field = int(rng.integers(8, HEADER.size))
                out = raw[:field] + rng.bytes(4) + raw[field + 4 :]
            case _:
                out = raw + rng.bytes(int(rng.integers(1, 99)))
        if out != raw:
            yield out


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutants_are_refused(count: int, exported: Any, tmp_path: Path, no_deserialization: None) -> None:
    path, raw = tmp_path / "x.rlxa", Path(exported.path).read_bytes()
    for mutant in mutants(raw, count, seed=count):
        path.write_bytes(mutant)
        with pytest.raises((IntegrityError, ArtifactFormatError, VersionMismatchError)):
            load(path)


def test_a_manifest_of_a_stranger(exported: Any, tmp_path: Path, no_deserialization: None) -> None:
    """With fitting digests, as the digest is against accidents: every fault is still one of this package's."""
    original = Archive(exported.path)
    members = {name: original.read(name) for name in original.members}
    text = json.dumps(original.content)
    rng, values = np.random.default_rng(0), [b"0", b"-1", b"[]", b"{}", b'""', b"null", b"1e99", b'"seq"', b"true"]
    refused = 0
    for i in range(300):
        at = int(rng.integers(len(text)))
        changed = text[:at] + values[i % len(values)].decode() + text[at + int(rng.integers(1, 9)) :]
        try:
            content = json.loads(changed)
        except ValueError:
            continue
        write_archive(str(tmp_path / "x.rlxa"), members, content, 0, overwrite=True)
        try:
            load(tmp_path / "x.rlxa")
        except RlxError:
            refused += 1
    assert refused > 10


def rewritten(exported: Any, path: Path, **changes: Any) -> Path:
    """The artifact with another manifest."""
    original = Archive(exported.path)
    members = {name: original.read(name) for name in original.members}
    write_archive(str(path), members, {**original.content, **changes}, 0)
    return path


VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2", "calling_convention": 10}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"platforms": ["tpu"]}, PlatformMismatchError, "the artifact is for 'tpu', and JAX runs on 'cpu'"),
        ({"versions": {**VERSIONS, "jax": "99.0.0"}}, VersionMismatchError, "jax 99.0.0 wrote it, which is newer"),
        (
            {"versions": {**VERSIONS, "jax": "0.4.0"}, "expires": "2020-01-01"},
            VersionMismatchError,
            "later versions read it until 2020-01-01",
        ),
        ({"versions": {**VERSIONS, "calling_convention": 99}}, VersionMismatchError, "calling convention 99"),
        ({"kind": "oracle"}, ArtifactFormatError, "unknown 'oracle'"),
    ],
)
def test_versions_and_platforms(
    changes: Any, error: Any, message: str, exported: Any, tmp_path: Path, no_deserialization: None
) -> None:
    with pytest.raises(error, match=message):
        load(rewritten(exported, tmp_path / "x.rlxa", **changes))


@pytest.mark.parametrize("version", [1, 3])
def test_another_format(version: int, exported: Any, tmp_path: Path) -> None:
    raw = bytearray(Path(exported.path).read_bytes())
    raw[8] = version
    (tmp_path / "x.rlxa").write_bytes(raw)
    with pytest.raises(VersionMismatchError, match=f"version {version}.*version 2"):
        load(tmp_path / "x.rlxa")


def test_an_expired_artifact_of_this_version(exported: Any, tmp_path: Path) -> None:
    """The same version of JAX reads it for ever."""
    loaded = load(rewritten(exported, tmp_path / "x.rlxa", expires="2020-01-01"))
    assert same(loaded(X), load(exported.path)(X))


def test_without_what_the_extra_installs(
    model: Any, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'rlx-jax\[export\]'"):
        model.export(tmp_path / "x.rlxa")
    with pytest.raises(UnsupportedError, match="flatbuffers"):
        load(exported.path)
    assert not list(tmp_path.iterdir())


def test_a_program_without_symbolic_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exported for the buckets of the profile, or refused with what to pass."""
    weights = {"w": np.ones((4, 8), "f4")}
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w")

    def fail(*_: Any) -> None:
        raise TypeError("a symbolic size")

    monkeypatch.setattr(export_model, "_symbolic_forms", fail)
    with pytest.raises(UnsupportedError, match="TypeError: a symbolic size.*sizes=.*'batch'"):
        rlx.compile(flow, weights).export(tmp_path / "m.rlxa")
    model = rlx.compile(flow, weights, profile=profile(buckets={"batch": [1, 3], "on_recompile": "error"}))
    assert model.export(tmp_path / "m.rlxa").programs == ("forward of batch 1", "forward of batch 3")
    loaded = load(tmp_path / "m.rlxa")
    assert same(loaded(X), model(X)) and same(loaded(X[:1]), model(X[:1]))
