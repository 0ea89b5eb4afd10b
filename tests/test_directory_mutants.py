"""Damaged index files, configs and profiles: refused in our words, or what they say, as another parser reads them."""

import json
import random
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax.errors import RlxError
from rlx_jax.ir.types import MAX_DIM
from tests.opening import recipe_for
from tests.oracles.checkpoints import FIXTURES, copy
from tests.oracles.fuzzing import corpus, mutated, run, scrambled, seed_of

INDEX = "model.safetensors.index.json"
SHARDS = {"a.safetensors": {"w": np.arange(6, dtype=np.float32)}, "b.safetensors": {"b": np.ones(3, np.float32)}}
WHOLE: list[Any] = [0, 1, -1, 2, 3, 64, 1024, 2**31, 2**62, 2**64, 10**60, 2.5, -0.0, 1e300]
WHOLE += [True, None, "32", "", [], {}, [1]]
NAMES = ["a.safetensors", "b.safetensors", "../m.safetensors", "/etc/passwd", "A.safetensors", "", ".", "NUL", "m.bin",
         "a.safetensors/", "a\0", "sub/../a.safetensors", "a.safetensors ", "é" * 200, 3, None, ["a"]]  # fmt: skip
FIELDS = ["a_field", "auto_map", "sliding_window", "quantization_config", "head_dim", "rope_scaling", "\ud83d\ude00",
          "layer_types", "use_sliding_window", "max_window_layers"]  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "full_attention"]
PIECES = [b"{", b"}", b"[", b"]", b'"', b"'", b"\\", b",", b":", b"=", b".", b"#", b"\n", b"\0", b"\xff", b"NaN",
          b"nan", b"inf", b"-", b"1", b"9" * 5000, b"[" * 200, b"a." * 40, b"true", b"0x", b"\\ud800", b"1e999",
          b"\xef\xbb\xbf", "é".encode(), b'"""', b"[fusion]", b"1979-05-27", b"{a=1}"]  # fmt: skip


def judge_index(raw: bytes, here: Path) -> str:
    """What opens holds what the index lists, as it was written, and nothing from outside."""
    (here / INDEX).write_bytes(raw)
    source = rlx.open_weights(here)
    listed = json.loads(raw)["weight_map"]
    assert set(source.keys()) == set(listed)
    assert all(np.array_equal(source.read(key), SHARDS[shard][key]) for key, shard in listed.items())
    return "opened"


def layer_windows(config: dict[str, Any]) -> list[int | None]:
    """How many keys each layer of a Mistral or Qwen reads, its own included; None is all."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if config["model_type"] == "mistral":
        return [window] * layers
    if not config.get("use_sliding_window"):
        return [None] * layers
    kinds = config.get("layer_types")
    slides = [k == "sliding_attention" for k in kinds] if kinds else None
    return [window if (slides[i] if slides else i >= config["max_window_layers"]) else None for i in range(layers)]


def judge_config(raw: bytes, here: Path) -> str:
    """A config that is taken gives a flow whose weights are those of the file, by the sizes that it names."""
    (here / "config.json").write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = recipe_for(here)
    said, flow = json.loads(raw), recipe.assemble()
    table = next(k for k in flow._weights.keys() if k.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    rows, width = flow._weights.spec(table).shape
    assert (said["vocab_size"], said["hidden_size"]) == (rows, width)
    assert 1 <= said["num_hidden_layers"] <= 1024
    assert 1 <= said.get("max_position_embeddings", 512) <= MAX_DIM
    if said["model_type"] in SLIDING:
        windows = [recipe.spec(i).mask.window for i in range(said["num_hidden_layers"])]
        assert windows == layer_windows({"sliding_window": 4096, "max_window_layers": 28} | said)
    return said["model_type"]


def judge_profile(raw: bytes, here: Path) -> str:
    """A profile that is taken says what tomllib reads, and is itself again after writing."""
    path = here / "p.rlx.toml"
    path.write_bytes(raw)
    profile = rlx.CompileProfile.from_toml(path)
    assert rlx.CompileProfile.from_toml_str(profile.to_toml()) == profile
    agree(tomllib.loads(raw.decode()), profile)
    return "read"


def agree(said: dict[str, Any], table: Any) -> None:
    """Each value of the text is that of the profile."""
    for key, value in said.items():
        held = table[key] if not hasattr(table, key) else getattr(table, key)
        if isinstance(value, dict):
            agree(value, held)
        else:
            assert held == value or list(held) == value, (key, value, held)


def outcome(raw: bytes, judge: Callable[[bytes], str]) -> str:
    try:
        return judge(raw)
    except RlxError as error:
        message = str(error)
        assert message.isprintable() and 10 < len(message) <= 2048, message
        return type(error).__name__


SLIDING = ("mistral", "qwen2", "qwen3")
BASES = {
    "config_bert": FIXTURES / "bert" / "bare_v5",
    "config_qwen2": FIXTURES / "qwen2" / "window_v4",
    "config_qwen3": FIXTURES / "qwen3" / "window_bias_v5",
}
KINDS = ["index", *BASES, "profile"]
FULL = rlx.CompileProfile().replace(
    name="all",
    precision={"compute": "bf16"},
    backend={"cpu": {"compiler_options": {"xla_a": True, "xla_b": -3, "xla_c": 1e-5, "xla_d": 'x"\\y'}}},
)


def bench(kind: str, here: Path) -> tuple[Callable[[random.Random], bytes], Callable[[bytes], str]]:
    """How to make a mutant of a kind, and who judges it, in the directory `here`."""
    if kind == "profile":
        return lambda rng: scrambled(FULL.to_toml().encode(), rng, PIECES), lambda raw: judge_profile(raw, here)
    if kind == "index":
        (here / "in").mkdir()
        for name, tensors in SHARDS.items():
            save_file(dict(tensors), here / "in" / name)
        save_file(dict(SHARDS["a.safetensors"]), here / "m.safetensors")  # what a name might reach
        index = {"metadata": {"total_size": 36}, "weight_map": {k: n for n, tensors in SHARDS.items() for k in tensors}}
        return lambda rng: text_of(index, rng, [*WHOLE, *NAMES]), lambda raw: judge_index(raw, here / "in")
    directory = copy(BASES[kind], here / "in")
    base = json.loads((directory / "config.json").read_text("utf-8"))

    def make(rng: random.Random) -> bytes:
        more = {rng.choice(FIELDS): rng.choice(WHOLE)} if rng.random() < 0.2 else {}
        return text_of(base | more, rng, [*WHOLE, "gelu", "llama", "bert", TYPES])

    return make, lambda raw: judge_config(raw, directory)


def text_of(doc: Any, rng: random.Random, values: list[Any]) -> bytes:
    """A document, some values of it changed, and some bytes of its text."""
    raw = json.dumps(mutated(doc, rng, values, times=(0, 1, 1, 2)), ensure_ascii=rng.random() < 0.5)
    encoded = raw.encode("utf-8", "surrogatepass")
    return scrambled(encoded, rng, PIECES) if rng.random() < 0.4 else encoded


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_mutants(many: bool, tmp_path: Path) -> None:
    """Of each kind; both outcomes are frequent."""
    for kind in KINDS:
        count = ((12, 200) if kind.startswith("config") else (40, 1_400))[many]
        (here := tmp_path / kind).mkdir()
        make, judge = bench(kind, here)
        outcomes = run(kind, count, seed_of("new" if many else "fixed"), make, lambda raw, j=judge: outcome(raw, j))  # type: ignore[misc]
        refused = sum(n for name, n in outcomes.items() if name.endswith("Error"))
        assert refused > count // 5 and count - refused > count // 40, outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus(kind: str, tmp_path: Path) -> None:
    """Mutants that failed once, and the smallest of each outcome: both outcomes are among them."""
    _, judge = bench(kind, tmp_path)
    outcomes = {outcome(saved.read_bytes(), judge) for saved in corpus(kind)}
    assert len(outcomes) > 1 and any(name.endswith("Error") for name in outcomes)
