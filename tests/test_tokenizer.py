"""Tokenizers and the sentence pipeline: against the native library, float64 NumPy and, live, sentence-transformers."""

import base64
import json
import pickle
import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from rlx_jax.demo import minilm_directory
from rlx_jax.errors import LimitError, RlxError, TokenIdError, TokenizerError
from rlx_jax.text import ascii_texts, tokenizer_checks
from rlx_jax.text import tokenizer as tokenizer_module
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.fuzzing import mutated

Json = dict[str, Any]

TEXTS = [
    "", " ", "hello", "Hello, WORLD!", "hello world " * 12, "naïve café Ångström e\u0301\u0302",
    "日本語 и русский 😀👩‍👩‍👧 \U00013000", "[CLS] [MASK] </s> <|end|> <pad>", "tab\tline\nnul\x00 zero\u200bwidth",
    "x" * 300,
]  # fmt: skip


def added(*tokens: tuple[int, str]) -> list[Json]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": i, "content": content, "special": True, **flags} for i, content in tokens]


KINDS = {file.stem: file.read_text("utf-8") for file in sorted((FIXTURES / "tokenizers").glob("*.json"))}
"""A small tokenizer.json for each kind of model."""


def write(directory: Path, **contents: Any) -> Path:
    """Files named by keyword (`tokenizer` is `tokenizer.json`); a str is written as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return directory


def loaded(directory: Path, doc: Json | str, **contents: Any) -> Tokenizer:
    found = load_tokenizer(write(directory, tokenizer=doc, **contents))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    found = load_tokenizer(minilm_directory())
    assert found is not None
    return found


def test_minilm(minilm: Tokenizer) -> None:
    """Truncation and padding that the file has baked in are ignored."""
    baked = json.loads((minilm_directory() / "tokenizer.json").read_text(encoding="utf-8"))
    assert baked["truncation"]["max_length"] == baked["padding"]["strategy"]["Fixed"] == 128
    assert len(minilm.encode("hello " * 300)) == 302
    assert [len(row) for row in minilm.encode_batch(["hello", "hello world"])] == [3, 4]
    assert (minilm.vocab_size, minilm.pad_id, minilm.eos_ids, minilm.bos_id) == (30522, 0, (), None)
    assert (minilm.model_max_length, minilm.truncation_side, minilm.special_count) == (512, "right", 2)
    assert minilm.encode("hello world") == [101, 7592, 2088, 102]
    assert minilm.decode([101, 7592, 2088, 102]) == "hello world"
    assert minilm.decode([101, 7592, 102], skip_special_tokens=False) == "[CLS] hello [SEP]"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_the_native_one(kind: str, side: str, tmp_path: Path) -> None:
    ours = loaded(tmp_path, KINDS[kind], tokenizer_config={"truncation_side": side})
    native = tokenizers.Tokenizer.from_str(KINDS[kind])
    native.no_padding()
    for special in (True, False):
        for length in (*range(max(1, ours.special_count), 12, 3), 1000):
            native.enable_truncation(length, direction=side)
            expected = [native.encode(text, add_special_tokens=special).ids for text in TEXTS]
            assert ours.encode_batch(TEXTS, add_special_tokens=special, max_length=length) == expected
            assert [ours.encode(t, add_special_tokens=special, max_length=length) for t in TEXTS] == expected
        native.no_truncation()
        expected = [native.encode(text, add_special_tokens=special).ids for text in TEXTS]
        assert ours.encode_batch(TEXTS, add_special_tokens=special) == expected
        assert all(0 <= i < ours.vocab_size for row in expected for i in row)


@pytest.mark.parametrize("kind", KINDS)
def test_ascii_texts_are_encoded_as_others(kind: str, tmp_path: Path) -> None:
    """Texts and pairs of capitals, white space, special tokens and other characters, with and without a normalizer."""
    ours, rng = loaded(tmp_path, KINDS[kind]), random.Random(0)
    parts = "Hello|WORLD| |  |[MASK]|[mask]|\u00e9|\u4e2d|\n|\t|\x00|\x0b|.|don't".split("|") + ["x" * 101]
    texts = ["".join(rng.choices(parts, k=rng.randrange(9))) for _ in range(60)]
    plain, pairs = replace(ours, _ascii=None), [*zip(texts, reversed(texts), strict=True)]
    for length in (None, 6):
        assert ours.encode_batch(texts, max_length=length) == plain.encode_batch(texts, max_length=length)
        for special in (True, False):
            found, expected = (
                [
                    [row.tolist() for row in rows]
                    for rows in t.encode_rows(pairs, add_special_tokens=special, max_length=length)
                ]
                for t in (ours, plain)
            )
            assert found == expected
    assert (ours._ascii is not None) == (kind in ("wordpiece", "word_level"))


@pytest.mark.parametrize("limits", [{}, {"_SLOT_BITS": 2}, {"_MAX_IDS": 60}])
def test_table_of_words(limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share it, words replace others in few slots, and it is emptied when it is full."""
    for name, value in limits.items():
        monkeypatch.setattr(ascii_texts, name, value)
    ours, rng = loaded(tmp_path, KINDS["wordpiece"]), random.Random(1)
    words = ["".join(rng.choices("abHelo.,-", k=rng.randrange(1, 20))) for _ in range(60)]
    batches = [[" ".join(rng.choices(words, k=rng.randrange(9))) for _ in range(40)] for _ in range(8)]
    expected = [replace(ours, _ascii=None).encode_batch(batch) for batch in batches]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            assert [*pool.map(ours.encode_batch, batches)] == expected
    assert pickle.loads(pickle.dumps(ours)).encode_batch(batches[0]) == expected[0]


@pytest.mark.parametrize(
    ("token", "text"), [("caf\u00e9", "cafe"), ("a b", "a\tb"), ("x\u200by", "xy"), ("\ufb01", "fi")]
)
def test_added_tokens_that_the_normalizer_makes_of_ascii_texts(token: str, text: str, tmp_path: Path) -> None:
    """Such a tokenizer has no form without the normalizer."""
    doc = json.loads(KINDS["wordpiece"])
    doc["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, doc["normalizer"]]}
    number = max([*doc["model"]["vocab"].values(), *(entry["id"] for entry in doc["added_tokens"])]) + 1
    doc["added_tokens"] += [entry | {"normalized": True} for entry in added((number, token))]
    assert loaded(tmp_path, doc).encode(text, add_special_tokens=False) == [number]


def test_threads_with_different_lengths(minilm: Tokenizer) -> None:
    texts = ["hello " * 40, "one two three four five six", "x y " * 200]
    expected = {n: minilm.encode_batch(texts, max_length=n) for n in range(2, 10)} | {0: minilm.encode_batch(texts)}
    wrong: list[object] = []
    barrier = threading.Barrier(len(expected))

    def work(length: int) -> None:
        barrier.wait()
        for _ in range(40):
            found = minilm.encode_batch(texts, max_length=length or None)
            if found != expected[length]:
                wrong.append((length, found))

    threads = [threading.Thread(target=work, args=(length,)) for length in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_special_tokens_in_a_text_are_special(tmp_path: Path) -> None:
    text = "hello <|end|>"
    parsed = loaded(tmp_path / "a", KINDS["byte_level"])
    assert parsed.encode(text)[-1] == parsed.vocab_size - 2
    plain = loaded(tmp_path / "b", KINDS["byte_level"], tokenizer_config={"split_special_tokens": True})
    assert parsed.vocab_size - 2 not in plain.encode(text)
    assert plain.decode(plain.encode(text, add_special_tokens=False)) == text


def test_lower_case(tmp_path: Path) -> None:
    text, lower = "HELLO", "hello"
    assert loaded(tmp_path / "a", KINDS["wordpiece"]).encode(text) == [2, 59, 3]
    cased = loaded(tmp_path / "b", KINDS["wordpiece"], tokenizer_config={"do_lower_case": False})
    assert cased.encode(text) == [2, 1, 3]
    generic = {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    assert loaded(tmp_path / "c", KINDS["wordpiece"], tokenizer_config=generic).encode(text) == [2, 59, 3]
    forced = load_tokenizer(tmp_path / "b", lowercase=True)
    assert forced is not None and forced.encode(text) == cased.encode(lower)
    write(tmp_path / "d", tokenizer=KINDS["byte_level"])
    folded = load_tokenizer(tmp_path / "d", lowercase=True)
    assert folded is not None and folded.encode(text) == folded.encode(lower)


def test_few_tokens(minilm: Tokenizer) -> None:
    assert minilm.encode("hello world", max_length=1, add_special_tokens=False) == [7592]
    assert minilm.encode_batch([]) == [] == minilm.encode_batch([], max_length=5)


def test_ids_to_decode(minilm: Tokenizer) -> None:
    ids, wrong = [7592, 2088], list[Any]()
    same: Any
    for same in (tuple(ids), iter(ids), np.array(ids, np.uint16), jnp.array(ids), [np.int64(7592), 2088]):
        assert minilm.decode(same) == "hello world"
    assert minilm.decode([7592, 30522, 2**32 - 1]) == "hello"  # the model may have rows that are padding
    wrong += [[-1], [2**32], [1.0], [True], [None], [[1]], np.ones((1, 1), np.int32), np.ones(2), 5, "12", None]
    for ids in wrong:
        with pytest.raises(TokenIdError):
            minilm.decode(ids)


def test_a_runaway_pattern_is_an_error_and_the_tokenizer_lives(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Removed", "invert": False}
    tokenizer = loaded(tmp_path, changed("word_level", "pre_tokenizer", to=split))
    with pytest.raises(TokenizerError, match="encoding failed"):
        tokenizer.encode("a" * 60 + "!")
    assert tokenizer.encode("hello") == [2]


def test_ids_of_special_tokens(tmp_path: Path) -> None:
    def ids(name: str, **contents: Any) -> tuple[object, object, object]:
        tokenizer = loaded(tmp_path / name, KINDS["sentencepiece_bpe"], **contents)
        return tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id

    assert ids("none") == (None, (), None)
    own = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    assert ids("own", tokenizer_config=own) == (1, (2,), None)
    assert ids("map", special_tokens_map=own | {"pad_token": ""}) == (1, (2,), None)
    assert ids("pad", tokenizer_config=own, config={"pad_token_id": 4}) == (1, (2,), 4)
    assert ids("both", tokenizer_config={"eos_token": "</s>"}, special_tokens_map={"eos_token": "<unk>"})[1] == (2,)
    config = {"eos_token_id": 7, "bos_token_id": 5, "pad_token_id": -1}
    assert ids("config", tokenizer_config=own | {"pad_token": "<unk>"}, config=config) == (5, (7,), 0)
    generation = {"eos_token_id": [9, 8, 9], "bos_token_id": None}
    assert ids("generation", tokenizer_config=own, config=config, generation_config=generation) == (5, (9, 8), None)


def changed(kind: str, *path: str | int, to: object) -> Json:
    """A small tokenizer.json with another value at one place."""
    doc: Json = json.loads(KINDS[kind])
    parent: Any = doc
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = to
    return doc


def with_charsmap(data: bytes | str | int) -> Json:
    stored = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return changed("unigram", "normalizer", "normalizers", 0, "precompiled_charsmap", to=stored)


def trie(*units: int) -> bytes:
    """A charsmap with these first units, of the 256 that a trie has at least, and the texts "é" and "x"."""
    return struct.pack("<257I", 1024, *units, *[0] * (256 - len(units))) + "é\0x\0".encode()


PANICS: dict[str, Json] = {
    "merge without a token": changed("byte_level", "model", "merges", 0, to=["hello", "wo"]),
    "merge as text": changed("byte_level", "model", "merges", to=["hello wo"]),
    "merge of numbers": changed("byte_level", "model", "merges", 0, to=[[1], [2]]),
    "prefix longer than a token": changed("byte_level", "model", "continuing_subword_prefix", to="####"),
    "charsmap not ASCII": with_charsmap("é"),
    "charsmap not base64": with_charsmap("A"),
    "charsmap missing": changed("unigram", "normalizer", to={"type": "Precompiled"}),
    "charsmap empty": with_charsmap(b""),
    "charsmap without a trie": with_charsmap(bytes(4)),
    "charsmap with a short trie": with_charsmap(struct.pack("<I", 512) + bytes(512)),
    "charsmap not UTF-8": with_charsmap(struct.pack("<I", 1024) + bytes(1024) + b"\xff"),
    "charsmap that leads out": with_charsmap(trie(1 << 18)),
    "charsmap that leads far out": with_charsmap(trie(1 << 10 | 512)),
    "charsmap with a text too far": with_charsmap(trie(0, 2**31 + 5)),
    "charsmap with half a text": with_charsmap(trie(0, 2**31 + 1)),
    "template without its token": changed("wordpiece", "post_processor", "special_tokens", to={}),
    "template with an odd token": changed("wordpiece", "post_processor", "single", 0, "SpecialToken", "id", to=[1]),
}


@pytest.mark.parametrize("data", [trie(), trie(0, 2**31), trie(0, 2**31 + 3), trie(255 << 10)])
def test_a_sound_charsmap(data: bytes, tmp_path: Path) -> None:
    use(loaded(tmp_path, with_charsmap(data)))


def test_what_looks_odd_and_is_sound(tmp_path: Path) -> None:
    """A piece given twice, ids with a gap, a truncation that names its side, and lengths that mean none."""
    doc = changed("unigram", "model", "vocab", 4, to=["a", -9.0])
    doc["model"]["vocab"][31] = ["a", -9.0]
    assert loaded(tmp_path / "a", doc).vocab_size == 32
    gaps = loaded(tmp_path / "b", tiktoken(listed=True))
    assert gaps.vocab_size == 7 and gaps.encode("hello <b>") == [2, 6]
    left = changed("wordpiece", "truncation", "direction", to="Left")
    assert loaded(tmp_path / "c", left).truncation_side == "left"
    assert loaded(tmp_path / "d", left, tokenizer_config={"truncation_side": "right"}).truncation_side == "right"
    for value, read in ((1, 1), (10**30, None), (1e30, None), (2**31, None)):
        made = loaded(tmp_path / "e", KINDS["word_level"], tokenizer_config={"model_max_length": value})
        assert made.model_max_length == read


def test_types_of_pairs_without_a_post_processor(tmp_path: Path) -> None:
    """As the native library has them, in fast batches as well, and for pairs that are truncated."""
    tokenizer = loaded(tmp_path, changed("word_level", "post_processor", to=None))
    for pairs, length in (([("a", "a a")], None), ([("a", "a a a")] * 40, 3)):
        assert tokenizer.encode_rows(pairs, max_length=length)[1][-1].tolist() == [0, 1, 1]


def test_a_merge_needs_the_prefix(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "##b": 1, "ab": 2, "<unk>": 3}
    model = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": vocabulary, "merges": [["a", "##b"]]}
    assert loaded(tmp_path / "a", {"added_tokens": [], "model": model}).encode("ab") == [2]
    model["merges"] = ["#version: 0.2", "a ##b"]
    assert loaded(tmp_path / "b", {"added_tokens": [], "model": model}).encode("ab") == [2]
    for wrong in (["a", "a"], ["a", "#b"]):
        with pytest.raises(TokenizerError, match=r"model.merges\[0\].*'##'") as caught:
            loaded(tmp_path / "c", {"added_tokens": [], "model": model | {"merges": [wrong]}})
        assert caught.value.__cause__ is None


def tiktoken(listed: bool) -> Json:
    """Special tokens with a gap between their ids; unless the model lists them too, the native code closes it."""
    doc: Json = json.loads(KINDS["word_level"])
    doc["model"]["vocab"] |= {"<a>": 4, "<b>": 6} if listed else {}
    doc["added_tokens"] += added((4, "<a>"), (6, "<b>"))
    return doc


@pytest.mark.parametrize("doc", PANICS.values(), ids=PANICS)
def test_what_would_panic_is_refused_before(doc: Json, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TokenizerError, match="tokenizer.json") as caught:
        loaded(tmp_path, doc)
    assert caught.value.__cause__ is None and not capfd.readouterr().err


@pytest.mark.parametrize("limit", ["MAX_TOKENIZER_BYTES", "MAX_TOKENIZER_VALUES", "MAX_VOCABULARY"])
def test_limits(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_checks if limit == "MAX_VOCABULARY" else tokenizer_module, limit, 3)
    with pytest.raises(LimitError, match=f"{limit} = 3"):
        loaded(tmp_path, KINDS["word_level"])


VALUES = (None, True, 0, -1, 1, 9, 2**31, 2**32, 2**63, 1.5, "", "a", "##", "[CLS]", "<unk>", "\\", "é", "\0")
VALUES += ([], {}, [1], ["hello", "world"], {"a": 1}, [[]])  # type: ignore[assignment]


def use(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        whole = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in whole)
        for length in range(max(1, tokenizer.special_count), 6):
            assert len(tokenizer.encode(text, max_length=length)) == min(length, len(whole))
    tokenizer.decode(range(8))


def check_mutants(count: int, seed: int, directory: Path) -> int:
    """How many of `count` mutants load and work; the others must raise an RlxError that names the file."""
    rng, good = random.Random(seed), 0
    originals = [json.loads(text) for text in KINDS.values()]
    for i in range(count):
        text = json.dumps(mutated(rng.choice(originals), rng, VALUES))
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
        try:
            tokenizer = load_tokenizer(directory)
        except RlxError as error:
            assert "tokenizer.json" in str(error) and len(str(error)) <= 2048 and str(error).isprintable(), (seed, i)
            continue
        assert tokenizer is not None
        use(tokenizer)
        good += 1
    return good


@pytest.mark.parametrize("count", [400, pytest.param(5_000, marks=pytest.mark.soak)])
def test_mutants(tmp_path: Path, capfd: pytest.CaptureFixture[str], count: int) -> None:
    assert count / 20 < check_mutants(count, 0, tmp_path) < count / 2
    assert "panicked" not in capfd.readouterr().err
