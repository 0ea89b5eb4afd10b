"""Tokenizers in the metadata of GGUF files, against the `tokenizer.json` of the same vocabulary."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_jax.errors import RlxError, RlxWarning, TokenizerError, UnsupportedError
from rlx_jax.text.gguf_pretokenizers import PRE_TOKENIZERS
from rlx_jax.text.gguf_tokenizer import tokenizer_files
from rlx_jax.text.tokenizer import load_tokenizer
from tests.oracles.checkpoints import FIXTURES

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["", " ", "Hello, world's 12345 end.\n\n  x", "it's ein Test: é \U0001f600 \u0301", "a<|user|>b", "ab  ab\tab"]


VARIED = [
    *TEXTS, "HelloWORLD camelCase XMLHttp", "I'M she'LL WE'RE don't", "नमस्ते दुनिया ก็ ñ n\u0303", "1234567 ½ ² ٣٤",
    "x=a/b//c\r\n\r\n\ty  \n z", "中文，テスト。한국어 текст Ελλ ნანა", "e.g. (a)[b]{c} <|x|> $5+~^|`@",
    "  lead  trail  ",
]  # fmt: skip


def vocabulary(document: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids, and their kinds: 3 special ones, 6 bytes."""
    added = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    ids = document["model"]["vocab"] | added
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    kinds = [2 if t == "<unk>" else 3 if t in added else 6 if t.startswith("<0x") else 1 for t in tokens]
    return tokens, kinds


def both(tmp_path: Path, document: dict[str, Any], metadata: dict[str, Any]) -> tuple[Any, Any]:
    """The tokenizer of a document, and the one of metadata."""
    files = tokenizer_files(metadata, "m.gguf")
    for name, contents in (("theirs", {"tokenizer.json": document}), ("ours", files)):
        (tmp_path / name).mkdir()
        for file, content in contents.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    return load_tokenizer(tmp_path / "theirs"), load_tokenizer(tmp_path / "ours")


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    document = json.loads((FIXTURES / "tokenizers/byte_level.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA3
    tokens, kinds = vocabulary(document)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.merges": tuple(merges),
        "tokenizer.ggml.bos_token_id": 264, "tokenizer.ggml.eos_token_id": 265, "tokenizer.chat_template": "{{ x }}",
    }  # fmt: skip
    theirs, ours = both(tmp_path, document, metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert ours.encode_plain(text) == theirs.encode_plain(text)
    assert ours.chat_templates == {"default": "{{ x }}"} and ours.bos_id == 264 and ours.eos_ids == (265,)
    ends = tokenizer_files(metadata | {"tokenizer.ggml.tokens": (*tokens[:-1], "<end_of_turn>")}, "m.gguf")[
        "config.json"
    ]
    assert ends["eos_token_id"] == [265, 266]  # the control token of that text ends a turn
    silent = tokenizer_files(metadata | {"tokenizer.ggml.add_bos_token": False}, "m.gguf")
    assert silent["tokenizer.json"]["post_processor"] is None
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre.*'llama-bp'.*'llama-bpe'"):
        tokenizer_files(metadata | {"tokenizer.ggml.pre": "llama-bp"}, "m.gguf")
    with pytest.raises(TokenizerError, match="expected a token id below"):
        tokenizer_files(metadata | {"tokenizer.ggml.eos_token_id": 10**6}, "m.gguf")
    with pytest.raises(TokenizerError, match="token_type"):
        tokenizer_files(metadata | {"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "m.gguf")


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """The scores define the merges, which a file does not have."""
    document = json.loads((FIXTURES / "tokenizers/sentencepiece_bpe.json").read_text())
    tokens, kinds = vocabulary(document)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in document["model"]["merges"]]
    scores = np.full(len(tokens), -1000.0, np.float32)
    for rank, (left, right) in enumerate(merges):
        scores[tokens.index(left + right)] = -rank
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tuple(tokens), "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    theirs, ours = both(tmp_path, document, metadata)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


SIGNS = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splits of the models' tokenizer.json; none: GPT-2's, of the library.
ORIGINAL: dict[str, list[str]] = {
    "gpt-2": [], "smollm": [], "mpt": [], "llama-bpe": [LLAMA3], "smaug-bpe": [LLAMA3],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [rf"{SIGNS}{UPPER}*{LOWER}+|{SIGNS}{UPPER}+{LOWER}*|\p{{N}}|{TAIL}"],
    "gpt-4o": [rf"{SIGNS}{UPPER}*{LOWER}+{ENGLISH}?|{SIGNS}{UPPER}+{LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}|{TAIL}"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}  # fmt: skip
COMPOSED = ("qwen35", "mpt")


@pytest.mark.parametrize("name", ORIGINAL)
def test_pre_tokenizers(name: str, tmp_path: Path) -> None:
    """The pieces of varied texts are those of the model's own file."""
    document = json.loads((FIXTURES / "tokenizers/byte_level.json").read_text())
    metadata = byte_level(document) | {"tokenizer.ggml.pre": name}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in ORIGINAL[name]
    ]
    digits = [{"type": "Digits", "individual_digits": True}] if name == "smollm" else []
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not splits}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*digits, *splits, last]}
    document["normalizer"] = {"type": "NFC"} if name in COMPOSED else None
    theirs, ours = both(tmp_path, document, metadata)
    for text in VARIED:
        pieces = [[piece for piece, _ in t._native.pre_tokenizer.pre_tokenize_str(text)] for t in (ours, theirs)]
        assert pieces[0] == pieces[1]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


PIECES = {
    "deepseek-llm": [" Hello", ",", " Мир", "12", "中文", "\n", "ნ"],
    "deepseek-coder": [" Hello", ",", " Мир", "1", "2"],
    "default": [" Hello", ",", " Мир", "123", "4", "$+"], "seed-coder": [" Hello", " Мир", "1", "2", "!?", "\n"],
    "qwen2": ["(Hello", "1", "2"], "exaone4": [" Hello", " 12", " !?"],
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    """A text made of pieces is split into them."""
    from tokenizers import pre_tokenizers

    steps = [step for step in PRE_TOKENIZERS[name].steps() if step["type"] == "Split"]
    split = pre_tokenizers.Sequence([native_split(step["pattern"]["Regex"]) for step in steps])
    assert [piece for piece, _ in split.pre_tokenize_str("".join(PIECES[name]))] == PIECES[name]


def native_split(pattern: str) -> Any:
    """A step of the library that isolates the matches of a pattern."""
    import tokenizers

    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def byte_level(document: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    tokens, kinds = vocabulary(document)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.merges": tuple(merges),
        "tokenizer.ggml.bos_token_id": 264, "tokenizer.ggml.eos_token_id": 265,
    }  # fmt: skip


def word_piece(document: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a WordPiece tokenizer, as the converter has its tokens."""
    tokens, kinds = vocabulary(document)
    kinds = [3 if token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") else 1 for token in tokens]
    spaced = [
        token if kind == 3 else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    ids = {
        "bos": "[CLS]", "eos": "[SEP]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]",
    }  # fmt: skip
    return {
        "tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tuple(spaced),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        **{f"tokenizer.ggml.{role}_token_id": tokens.index(text) for role, text in ids.items()},
    }  # fmt: skip


def unigram(document: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a Unigram tokenizer."""
    pieces, scores = zip(*document["model"]["vocab"], strict=True)
    charsmap = base64.b64decode(document["normalizer"]["normalizers"][0]["precompiled_charsmap"])
    kinds = [{"<unk>": 2, "<s>": 3, "</s>": 3}.get(piece, 1) for piece in pieces]
    return {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.scores": np.array(scores, np.float32), "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.remove_extra_whitespaces": True, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": pieces.index("<s>"), "tokenizer.ggml.eos_token_id": pieces.index("</s>"),
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(charsmap, np.int8),
    }  # fmt: skip


WORDS = [*VARIED, "abc cab", "ABC Äb", "[MASK] a [SEP]", "hello world", " a\u00a0b  ab", "ﬁ Ⅳ ａｂ"]


@pytest.mark.parametrize("name", ["tokenizers/wordpiece.json", "sentence/base/tokenizer.json"])
def test_word_piece_tokenizer(name: str, tmp_path: Path) -> None:
    document = json.loads((FIXTURES / name).read_text())
    metadata = word_piece(document)
    if document["normalizer"]["lowercase"]:  # although its vocabulary has capitals
        metadata["tokenizer.ggml.normalizer.lowercase"] = True
    theirs, ours = both(tmp_path, document, metadata)
    for text in WORDS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens["cls_token"] == "[CLS]" and ours.pad_id == theirs._native.token_to_id("[PAD]")


def test_unigram_tokenizer(tmp_path: Path) -> None:
    """Against the form of transformers 5, which splits at spaces before the model."""
    document = json.loads((FIXTURES / "tokenizers/unigram.json").read_text())
    metadata = unigram(document)
    document["normalizer"] = document["normalizer"]["normalizers"][0]
    document["pre_tokenizer"] = {
        "type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, document["pre_tokenizer"]],
    }  # fmt: skip
    theirs, ours = both(tmp_path, document, metadata)
    for text in WORDS:
        if not set(text) & set("\n\t\r\u00a0"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_special_ids() -> None:
    """Ends of gpt-oss's rows, ids that llama.cpp assumes, empty texts, and a file without token types."""
    tokens = ("a", "b", "<|return|>", "<|call|>", "<|end|>", "<|endoftext|>", "")
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1, 1, 3, 3, 3, 3, 1]), "tokenizer.ggml.merges": (),
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4,
    }  # fmt: skip
    files = tokenizer_files(metadata, "m.gguf")
    assert files["config.json"] == {"eos_token_id": [2, 3, 5]}
    assert "[EMPTY_6]" in files["tokenizer.json"]["model"]["vocab"]
    del metadata["tokenizer.ggml.token_type"]
    assert tokenizer_files(metadata, "m.gguf")["config.json"] == {"eos_token_id": [2, 4]}
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(RlxWarning, match="does not name a pre-tokenizer"):
        tokenizer_files(metadata, "m.gguf")
    with pytest.warns(RlxWarning, match="padding_token_id is 9.*7 tokens"):
        tokenizer_files(metadata | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.padding_token_id": 9}, "m.gguf")
    bert = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tuple(f"\u2581{i}" for i in range(110))}
    single = tokenizer_files(bert, "m.gguf")["tokenizer.json"]["post_processor"]["single"]
    assert [piece.get("SpecialToken", {}).get("id") for piece in single] == ["101", None, "102"]
    assert tokenizer_files(bert, "m.gguf")["tokenizer.json"]["normalizer"]["lowercase"] is True


MAKERS = {
    "tokenizers/byte_level.json": byte_level, "tokenizers/wordpiece.json": word_piece,
    "tokenizers/unigram.json": unigram,
}  # fmt: skip
OTHERS: list[Any] = [
    -1, 0, 2**40, 2.5, True, "a", (), ("a", "a"), np.zeros(3, np.int8), np.full(64, np.nan), np.zeros(0), "\udc80",
]  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.filterwarnings("ignore::rlx_jax.errors.RlxWarning")
def test_metadata_of_another_type(name: str, tmp_path: Path) -> None:
    """In place of each value of a tokenizer's metadata: an error of this package, or a tokenizer that encodes."""
    document = json.loads((FIXTURES / name).read_text())
    metadata = MAKERS[name](document)
    more = ("normalizer.lowercase", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "scores")
    for key in [*metadata, *(f"tokenizer.ggml.{field}" for field in more)]:
        for value in OTHERS:
            try:
                files = tokenizer_files(metadata | {key: value}, "m.gguf")
                for file, content in files.items():
                    (tmp_path / file).write_text(json.dumps(content))
                if files and (tokenizer := load_tokenizer(tmp_path)) is not None:
                    tokenizer.encode("Hello 12")
            except RlxError as error:
                assert len(str(error)) < 2048 and str(error).isprintable()
