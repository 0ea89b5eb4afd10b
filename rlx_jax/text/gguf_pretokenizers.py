"""The pre-tokenizers of byte-level BPE that GGUF files name in `tokenizer.ggml.pre`, one row each.

The patterns are those of the models' `tokenizer.json`, or llama.cpp's where it has its own.
"""

from __future__ import annotations

from typing import Any

from rlx_jax.dataclasses import dataclass

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words begin at a change from lower to upper case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# Letters of scripts with two cases, as DeepSeek's first tokenizer lists them. Letters that Unicode normalization would
# replace are escaped.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level tokenizer splits a text before BPE.

    Attributes:
        patterns: regular expressions of the pieces; each one splits the pieces of the one before it.
        splits_digits: each digit is a piece, before the patterns.
        composes: characters are composed first (Unicode NFC).
        takes_words: a piece that is a token itself is not merged from its bytes.
        adds_bos: a text starts with the begin token, unless the file says otherwise.
    """

    patterns: tuple[str, ...] = (_GPT2,)
    splits_digits: bool = False
    composes: bool = False
    takes_words: bool = False
    adds_bos: bool = False

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps of the pre-tokenizer in a `tokenizer.json`; the last one maps bytes to characters."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        digits = [{"type": "Digits", "individual_digits": True}] if self.splits_digits else []
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return [*digits, *splits, last]


_PLAIN = PreTokenizer()
_COMPOSED = PreTokenizer(composes=True)
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA3_PATTERN = rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = PreTokenizer((_LLAMA3_PATTERN,), takes_words=True, adds_bos=True)
_LLAMA3_PLAIN = PreTokenizer((_LLAMA3_PATTERN,))
_QWEN2 = PreTokenizer((rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_REST}",), composes=True)
_QWEN35 = PreTokenizer(
    (rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    composes=True,
)
_GPT4O = PreTokenizer(
    (rf"{_CASED[0]}{_ENGLISH}?|{_CASED[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",),
)
_TEKKEN = PreTokenizer((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}|{_SPACES}",), takes_words=True, adds_bos=True)
_DEEPSEEK = PreTokenizer(
    (
        r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
    )
)  # fmt: skip
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_SEED_CODER = PreTokenizer((rf"{_ENGLISH}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))
# The one of files that name none, which were written before the names.
DEFAULT = "default"
_DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    DEFAULT: _DEFAULT, "gpt-2": _PLAIN, "phi-2": _PLAIN, "roberta-bpe": _PLAIN, "jina-v1-en": _PLAIN,
    "jina-v2-code": _PLAIN, "jina-v2-de": _PLAIN, "jina-v2-es": _PLAIN, "modern-bert": _PLAIN, "exaone4": _PLAIN,
    "mellum": _PLAIN, "trillion": _PLAIN, "mpt": _COMPOSED, "olmo": _COMPOSED, "smollm": _DIGITS,
    "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS, "minerva-7b": _DIGITS, "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "pixtral": _LLAMA3, "lfm2": _LLAMA3,
    "midm-2.0": _LLAMA3, "smaug-bpe": _LLAMA3_PLAIN, "dbrx": _LLAMA3_PLAIN, "glm4": _LLAMA3_PLAIN,
    "chatglm-bpe": _LLAMA3_PLAIN, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2, "qwen35": _QWEN35,
    "gpt-4o": _GPT4O, "llama4": _GPT4O, "kanana2": _GPT4O, "tekken": _TEKKEN, "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER, "deepseek-v3": _DEEPSEEK3, "seed-coder": _SEED_CODER,
}  # fmt: skip
