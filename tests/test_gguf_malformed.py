"""GGUF files that are malformed, or say what no writer does: an error of this package, or a model that opens."""

import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import rlx_jax as rlx
from rlx_jax.errors import (
    ConfigError,
    DuplicateWeightError,
    GgufError,
    LimitError,
    MissingFileError,
    RlxError,
    UnsupportedError,
)
from tests.oracles.gguf_files import write_gguf
from tests.test_gguf import directory, random_checkpoint


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", counts: tuple[int, int] | None = None) -> bytes:
    """A GGUF file; `counts` replaces the numbers of tensors and pairs."""
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


ARCH = pair(b"general.architecture", 8, string(b"llama"))
ONE = tensor(b"a", (4,), 0, 0)
REFUSED: dict[str, tuple[bytes, type[RlxError], str]] = {
    "empty": (b"", GgufError, "not a GGUF file"),
    "another magic": (b"GGML" + bytes(60), GgufError, "expected b'GGUF'"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", GgufError, "git lfs pull"),
    "a page": (b"<!DOCTYPE html>\n<html>", GgufError, "not a GGUF file but a text that begins with '<!DOCTYPE html>'"),
    "version 0": (b"GGUF" + bytes(60), GgufError, "version 0"),
    "version 4": (b"GGUF\4\0\0\0" + bytes(60), GgufError, "version 4"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(60), UnsupportedError, "big-endian"),
    "2^63 tensors": (file([ARCH], [ONE], counts=(2**63, 1)), GgufError, "number of tensors"),
    "2^63 pairs": (file([ARCH], [ONE], counts=(1, 2**63)), GgufError, "number of metadata pairs"),
    "a string of 2^62": (file([struct.pack("<QQQ", 2**62, 0, 0)], []), GgufError, "a metadata key"),
    "a key that is no ASCII": (file([pair("é".encode(), 4, bytes(4))], []), GgufError, "ASCII"),
    "an empty key": (file([pair(b"", 4, bytes(4))], []), GgufError, "ASCII"),
    "a key twice": (file([ARCH, ARCH], []), GgufError, "occurs twice"),
    "kind 13": (file([pair(b"k", 13, bytes(8))], []), GgufError, "no kind 13"),
    "a bool of 2": (file([pair(b"k", 7, b"\2")], []), GgufError, "a bool is 2"),
    "a text that is no UTF-8": (file([pair(b"k", 8, string(b"\xff"))], []), GgufError, "not UTF-8"),
    "an array of arrays": (file([pair(b"k", 9, struct.pack("<IQ", 9, 1))], []), GgufError, "array of arrays"),
    "an array of 2^61": (file([pair(b"k", 9, struct.pack("<IQ", 10, 2**61))], []), GgufError, "take at least"),
    "texts of 2^61": (file([pair(b"k", 9, struct.pack("<IQ", 8, 2**61))], []), GgufError, "take at least"),
    "alignment 0": (file([ARCH, pair(b"general.alignment", 4, bytes(4))], []), GgufError, "multiple of 8"),
    "alignment 13": (file([pair(b"general.alignment", 4, b"\x0d\0\0\0")], []), GgufError, "multiple of 8"),
    "alignment of text": (file([pair(b"general.alignment", 8, string(b"32"))], []), GgufError, "multiple of 8"),
    "a long name": (file([ARCH], [tensor(b"a" * 65, (4,), 0, 0)], bytes(16)), LimitError, "MAX_GGUF_NAME_BYTES"),
    "a tensor twice": (file([ARCH], [ONE, ONE], bytes(16)), DuplicateWeightError, "listed twice"),
    "rank 0": (file([ARCH], [tensor(b"a", (), 0, 0)], bytes(16)), GgufError, "rank 0"),
    "rank 5": (file([ARCH], [tensor(b"a", (1,) * 5, 0, 0)], bytes(16)), GgufError, "rank 5"),
    "an axis of 0": (file([ARCH], [tensor(b"a", (4, 0), 0, 0)], bytes(16)), GgufError, "size 0"),
    "a negative axis": (file([ARCH], [tensor(b"a", (2**64 - 4,), 0, 0)], bytes(16)), LimitError, "dimension"),
    "a product of 2^64": (file([ARCH], [tensor(b"a", (2**30,) * 4, 0, 0)], bytes(16)), LimitError, "elements"),
    "half a block": (file([ARCH], [tensor(b"a", (33,), 8, 0)], bytes(64)), GgufError, "do not fill"),
    "a removed type": (file([ARCH], [tensor(b"a", (32,), 4, 0)], bytes(64)), UnsupportedError, "removed"),
    "IQ2_XXS": (file([ARCH], [tensor(b"a", (256,), 16, 0)], bytes(99)), UnsupportedError, "IQ2_XXS"),
    "type 99": (file([ARCH], [tensor(b"a", (32,), 99, 0)], bytes(64)), GgufError, "no tensor type 99"),
    "an odd offset": (file([ARCH], [tensor(b"a", (4,), 0, 8)], bytes(64)), GgufError, "alignment"),
    "data past the end": (file([ARCH], [tensor(b"a", (4,), 0, 2**40)], bytes(64)), GgufError, "cut short"),
    "overlapping data": (
        file([ARCH], [tensor(b"a", (16,), 0, 0), tensor(b"b", (4,), 0, 32)], bytes(64)), GgufError, "overlaps",
    ),
    "another architecture": (
        file([pair(b"general.architecture", 8, string(b"lama"))], [ONE], bytes(16)), UnsupportedError,
        "did you mean 'llama'",
    ),
    "no architecture": (file([], [ONE], bytes(16)), ConfigError, "general.architecture"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_files(name: str, tmp_path: Path) -> None:
    raw, error, message = REFUSED[name]
    (tmp_path / "m.gguf").write_bytes(raw)
    for call in (rlx.load, rlx.open_weights):
        with pytest.raises(error, match=message):
            call(tmp_path / "m.gguf")


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


def test_random_damage(tmp_path: Path) -> None:
    """Files with a changed number, bit or length load with an error of this package, or with the same weights."""
    random_checkpoint(tmp_path / "hf", 32)
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", Kind.Q8_0)
    raw = (tmp_path / "m.gguf").read_bytes()
    header = raw.index(b"blk.0.ffn_up.weight") + 60
    rng = np.random.default_rng(0)
    outcomes = {"refused": 0, "loads": 0}
    for _ in range(400):
        damaged = bytearray(raw)
        at, width = int(rng.integers(0, header)), (1, 4, 8, 0)[int(rng.integers(0, 4))]
        if width == 0:
            del damaged[int(rng.integers(0, len(raw))) :]
        elif width == 1:
            damaged[at] = int(rng.integers(0, 256))
        else:
            value = (0, 1, 9, 2**31, 2 ** (8 * width - 1), 2 ** (8 * width) - 1)[int(rng.integers(0, 6))]
            damaged[at : at + width] = value.to_bytes(width, "little")
        (tmp_path / "d.gguf").write_bytes(damaged)
        try:
            with rlx.open_weights(tmp_path / "d.gguf", on_nonfinite="ignore") as source:  # type: ignore[attr-defined]
                for key in source.keys():
                    source.read(key)
            outcomes["loads"] += 1
        except RlxError as error:
            assert len(str(error)) < 2048 and str(error).isprintable()
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10
