"""GGUF files that are damaged, malformed or unusual: an error of this package, or the model of the original file."""

import functools
import json
import math
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax.encode.checkpoint import Checkpoint, open_checkpoint
from rlx_jax.errors import (
    DuplicateWeightError,
    MissingFileError,
    RlxError,
    RlxWarning,
)
from tests.gguf_bytes import pair, string, tensor
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.fuzzing import corpus, run, scrambled, seed_of
from tests.oracles.gguf_files import write_gguf
from tests.test_gguf import directory, random_checkpoint
from tests.test_gguf_tokenizers import vocabulary

NUMBERS = (
    0,
    1,
    2,
    7,
    9,
    13,
    31,
    32,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
PIECES = (b"", b"\0", b"\xff", b"GGUF", b"llama", b"general.alignment", b"blk.0.attn_q.weight", b"x" * 70, "é".encode())
TEXT = "Hello, it's 12 ein Test: é"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two schemes with a tokenizer."""
    root = tmp_path_factory.mktemp("base")
    random_checkpoint(root / "hf", 64)
    tokens, kinds = vocabulary(document := json.loads((FIXTURES / "tokenizers/byte_level.json").read_text()))
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]

    def add_tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_key_value("llama.vocab_size", len(tokens), gguf.GGUFValueType.UINT32)

    rng = np.random.default_rng(0)
    write_gguf(root / "hf", root / "f32.gguf", leave=("llama.vocab_size",), more=add_tokenizer)
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(root / "f32.gguf").tensors}
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = rng.standard_normal((len(tokens), 64)).astype(np.float32)
    write_gguf(
        root / "hf", root / "m.gguf", Kind.Q4_0, tensors=tensors, leave=("llama.vocab_size",), more=add_tokenizer
    )
    return root / "m.gguf"


@functools.cache
def fields(path: Path) -> tuple[list[list[bytes]], list[list[bytes]], bytes]:
    """The fields of the pairs and of the tensors of a file, as gguf-py finds them, and its data."""
    reader = gguf.GGUFReader(path)
    head = [[bytes(part) for part in field.parts] for field in reader.fields.values()]
    tensors = [[bytes(part) for part in t.field.parts] for t in reader.tensors]
    raw, written = path.read_bytes(), b"GGUF" + b"".join(part for entry in [*head, *tensors] for part in entry)
    assert raw.startswith(written)
    return head[3:], tensors, raw[-(-len(written) // 32) * 32 :]  # the first three are the version and two counts


def damaged(rng: random.Random, path: Path) -> bytes:
    """A file with a few fields that have another number, are missing, repeated, or from elsewhere in it."""
    pairs, tensors, data = fields(path)
    entries, num_tensors = [*pairs, *tensors], len(tensors)
    counts = [b"GGUF", *(struct.pack("<IQ", 3, num_tensors)[i:j] for i, j in ((0, 4), (4, 12))), bytes(8)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        number, action = rng.randrange(-1, len(entries)), rng.random()
        entry = counts if number < 0 else list(entries[number])
        if not entry:
            continue
        at = rng.randrange(len(entry))
        size = len(entry[at])
        if action < 0.6 and size in (1, 2, 4, 8):
            old = int.from_bytes(entry[at], "little")
            new = rng.choice((*NUMBERS, old + 1, old - 1, old * 2, old + 8, int.from_bytes(entry[at], "big")))
            entry[at] = (new % 2 ** (8 * size)).to_bytes(size, "little")
        elif action < 0.75:
            entry[at] = rng.choice((b"", entry[at] * 2, rng.choice(PIECES), rng.randbytes(size)))
        elif action < 0.85:
            entry[at] = rng.choice(rng.choice(entries) or [b""])
        elif number >= 0:
            entry = [] if action < 0.93 else [*entry, *rng.choice(entries)]
            num_tensors -= not entry and number >= len(pairs)
        if number >= 0:
            # Texts keep their lengths as often as not, so that what follows them is read.
            if at and len(entry) > at and entry[at - 1] == struct.pack("<Q", size) and rng.random() < 0.7:
                entry[at - 1] = struct.pack("<Q", len(entry[at]))
            entries[number] = entry
    if counts[3] == bytes(8):
        counts[2] = struct.pack("<Q", num_tensors) if counts[2] == struct.pack("<Q", len(tensors)) else counts[2]
        counts[3] = struct.pack("<Q", len(pairs) - entries[: len(pairs)].count([]))
    raw = b"".join([*counts, *(part for entry in entries for part in entry)])
    raw += bytes(-len(raw) % 32) + data
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw) + 1)]
    return scrambled(raw, rng, PIECES) if rng.random() < 0.1 else raw


def unusual(rng: random.Random, path: Path) -> bytes:
    """The same model in another order, version and alignment, with holes, and with pairs that mean nothing to it."""
    align = rng.choice((8, 16, 32, 64, 256, 4096))
    pairs = [b"".join(entry) for entry in fields(path)[0]] + [
        extra_pair(rng, number) for number in range(rng.randint(0, 6))
    ]
    if align != 32 or rng.random() < 0.5:
        pairs.append(pair(b"general.alignment", 4, struct.pack("<I", align)))
    rng.shuffle(pairs)
    reader = gguf.GGUFReader(path)
    out, listed = b"", []
    for t in rng.sample(list(reader.tensors), len(reader.tensors)):
        out += bytes(-len(out) % align + align * rng.choice((0, 0, 1, 3)))
        listed.append(tensor(t.name.encode(), tuple(map(int, t.shape)), int(t.tensor_type), len(out)))
        out += t.data.tobytes()
    rng.shuffle(listed)
    start = b"GGUF" + struct.pack("<IQQ", rng.choice((2, 3)), len(listed), len(pairs)) + b"".join([*pairs, *listed])
    return start + bytes(-len(start) % align) + out + rng.randbytes(rng.choice((0, 0, 1, 100)))


def extra_pair(rng: random.Random, number: int) -> bytes:
    """A pair of any kind that no reader uses."""
    kind, key = (rng.choice((*range(8), 8, 8, 10, 11, 12)), f"{rng.choice(('user', 'general.x', 'a-b'))}.{number}")

    def value(kind: int) -> bytes:
        if kind == 8:
            return string(rng.choice((b"", "ünï".encode(), b"a" * rng.randint(0, 3000), b"\0")))
        return bytes([rng.randint(0, 1)]) if kind == 7 else rng.randbytes((1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)[kind])

    if rng.random() < 0.4:
        count = rng.choice((0, 1, 3, 400))
        return pair(key.encode(), 9, struct.pack("<IQ", kind, count) + b"".join(value(kind) for _ in range(count)))
    return pair(key.encode(), kind, value(kind))


def opened(raw: bytes, here: Path) -> Checkpoint:
    """The checkpoint of a file: config, tokenizer, flow and every weight have been read."""
    (here / "d.gguf").write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RlxWarning)
        checkpoint = open_checkpoint(here / "d.gguf", "recipe_for", {"on_nonfinite": "ignore"})
        weights = checkpoint.weights
        try:
            values = {key: weights.read(key) for key in weights.keys()}
            assert all(a.nbytes < 2 * len(raw) for a in values.values())
            assert checkpoint.tokenizer is None or isinstance(checkpoint.tokenizer.encode(TEXT), list)
            assert checkpoint.pretrained.recipe is not None
        finally:
            weights.close()  # type: ignore[attr-defined]
    return checkpoint


def judge_damaged(raw: bytes, here: Path) -> str:
    try:
        opened(raw, here)
    except RlxError as error:
        assert len(str(error)) <= 2048 and str(error).isprintable()
        return type(error).__name__
    return "opened"


def judge_unusual(raw: bytes, here: Path, path: Path) -> str:
    """The same config, tokens and weights."""
    ours, theirs = opened(raw, here), open_checkpoint(path, "recipe_for", {"on_nonfinite": "ignore"})
    assert ours.config.values == theirs.config.values
    assert ours.tokenizer is not None and theirs.tokenizer is not None
    assert ours.tokenizer.encode(TEXT) == theirs.tokenizer.encode(TEXT)
    again = open_checkpoint(here / "d.gguf", "recipe_for", {"on_nonfinite": "ignore"}).weights
    assert sorted(again.keys()) == sorted(theirs.weights.keys())
    for key in again.keys():
        assert again.spec(key) == theirs.weights.spec(key)
        np.testing.assert_array_equal(again.read(key), theirs.weights.read(key))
    return "opened"


def fuzz(base: Path, here: Path, mutants: int, twins: int, seed: int) -> None:
    outcomes = run("gguf", mutants, seed, lambda rng: damaged(rng, base), lambda raw: judge_damaged(raw, here))
    assert len(outcomes) > 5 and 0 < outcomes["opened"] < mutants
    run("gguf_twins", twins, seed, lambda rng: unusual(rng, base), lambda raw: judge_unusual(raw, here, base))


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.soak)])
def test_damaged_files(base: Path, tmp_path: Path, count: int) -> None:
    fuzz(base, tmp_path, 10 * count if count == 20 else 20 * count, count, seed_of("fixed" if count == 20 else "new"))


def test_damaged_files_of_former_runs(tmp_path: Path) -> None:
    """What once failed is refused, or opens."""
    for path in corpus("gguf"):
        judge_damaged(path.read_bytes(), tmp_path)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("blob")
    for call in (rlx.load, rlx.open_weights):
        with pytest.raises(MissingFileError, match="no such file: it is a link to 'blob'"):
            call(tmp_path / "m.gguf")


# Fields of each architecture; those of `llama` include the ones of all decoders and of no architecture.
FIELDS = {
    "llama/gqa_plain_attnbias_v5": """
        block_count embedding_length attention.head_count attention.head_count_kv expert_count attention.key_length
        attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scaling.type attention.value_length
        attention.causal context_length pooling_type general.type general.alignment tokenizer.ggml.model
        tokenizer.ggml.pre split.count split.no
        """,
    "qwen3_5_text/blocks_v5": """
        block_count ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size
        full_attention_interval nextn_predict_layers rope.dimension_count rope.dimension_sections
        """,
    "mamba2/groups_v5": """
        block_count embedding_length ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size
        attention.layer_norm_rms_epsilon attention.head_count feed_forward_length
        """,
    "gpt_oss/window_v5": """
        expert_count expert_used_count expert_feed_forward_length attention.sliding_window rope.scaling.factor
        rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.original_context_length
        """,
    "nomic_bert/bare_v5": """
        block_count embedding_length attention.head_count attention.key_length attention.layer_norm_epsilon
        attention.causal pooling_type context_length rope.freq_base
        """,
}


@pytest.mark.parametrize("fixture", FIELDS)
@pytest.mark.parametrize("value", [
    ["a", "b"], math.nan, 2**31, 0,
    *(pytest.param(value, marks=pytest.mark.slow) for value in ([1, 2], "a", 2.5, True, -1)),
], ids=str)  # fmt: skip
def test_metadata_of_another_type(value: Any, fixture: str, tmp_path: Path) -> None:
    """In place of each value of the model's metadata: an error of this package, or a model that opens."""
    source = directory(tmp_path, fixture)
    array, unsigned = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
    kind = array if isinstance(value, list) else unsigned if value == 2**31 else gguf.GGUFValueType.get_type(value)
    for name in FIELDS[fixture].split():

        def more(writer: Any, name: str = name) -> None:
            is_general = name.partition(".")[0] in ("general", "tokenizer", "split")
            key = name if is_general else f"{writer.arch}.{name}"
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, kind)

        write_gguf(source, tmp_path / "m.gguf", more=more)
        try:
            rlx.recipe_for(tmp_path / "m.gguf")
        except RlxError as error:
            assert len(str(error)) < 2048 and str(error).isprintable()


def test_two_tensors_of_one_weight(tmp_path: Path) -> None:
    tensors = write_gguf(directory(tmp_path, "mixtral/window_v5"), tmp_path / "m.gguf")
    tensors["blk.0.ffn_up.1.weight"] = tensors["blk.0.ffn_up_exps.weight"][0]
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(DuplicateWeightError, match="are the same weight"):
        rlx.open_weights(tmp_path / "m.gguf")
