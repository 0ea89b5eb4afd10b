"""Fifty texts of many kinds for sentence embeddings."""

from __future__ import annotations

import random

WORDS = (
    "river stone lantern harvest engine window quiet orbit copper meadow signal paper thunder garden velvet bridge "
    "number castle winter pocket mirror salt distant teacher market ocean pencil violet story candle mountain circuit"
).split()


def words(count: int, seed: int) -> str:
    """`count` random words."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def fifty() -> list[str]:
    """The texts, in a fixed order."""
    return [
        "",
        " ",
        " \t\r\n  ",
        ".",
        "a",
        "Hello, world!",
        "hello world",
        "HELLO WORLD",
        "  leading and trailing spaces   ",
        "The quick brown fox jumps over the lazy dog.",
        "A man is playing a guitar on the stage.",
        "Someone performs music in front of an audience.",
        "The stock market fell sharply on Tuesday after the central bank raised its interest rate.",
        "How do I reset the password of my account?",
        "E = mc^2, and the integral of exp(-x^2) over the real line is sqrt(pi).",
        "3.14159 2,718,281 1e-12 0xDEADBEEF -7/8 50% $19.99 #42",
        "user.name+tag@example.com visited https://example.com/a/b?c=d&e=%20f#frag at 12:30:59",
        "It's the dogs' owners' friends who'd've said \"no\" — wouldn't they?",
        "!!!???...,,,;;;:::---___***///\\\\\\",
        "[brackets] {braces} <angles> (parentheses) `ticks` ~tilde~ ^caret^ |pipe| @at",
        "naïve café déjà vu coöperate Ångström Zürich piñata façade",
        "nai\u0308ve cafe\u0301 (combining marks: e\u0301\u0302\u0303\u0304)",
        "The ﬁrst ﬂower: Ⅷ ½ ² ™ ㎏ (compatibility characters)",
        "Straße, GROẞE, İstanbul, ıĞğŞş, Σίσυφος ΣΊΣΥΦΟΣ",
        "Русский язык очень богат и разнообразен.",
        "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
        "השועל החום המהיר קופץ מעל הכלב העצלן",
        "الثعلب البني السريع يقفز فوق الكلب الكسول",
        "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है",
        "快速的棕色狐狸跳过了懒狗。",
        "素早い茶色の狐がのろまな犬を飛び越える。カタカナ",
        "빠른 갈색 여우가 게으른 개를 뛰어넘습니다",
        "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
        "mixed 中文 and English и русский in one line",
        "😀 😃 👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️ emoji galore 🎉🎉🎉",
        "🦊",
        "zero\u200bwidth\u200cand\u200djoiners\ufeff soft\u00adhyphen no\u00a0break\u202fspaces\u3000ideographic",
        "control\x00characters\x01in\x1fthe\x7fmiddle\u0085of\u2028text\u2029here\ufffd",
        "line one\nline two\r\nline three\rline four\ttabbed",
        "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # exponential\n",
        '{"json": [1, 2.5, null, true], "nested": {"key": "value"}}',
        "SELECT name, COUNT(*) FROM users WHERE age >= 21 GROUP BY name ORDER BY 2 DESC;",
        "<html><body><p class='x'>markup &amp; entities</p></body></html>",
        "Pneumonoultramicroscopicsilicovolcanoconiosis and antidisestablishmentarianism",
        "x" * 100 + " " + "y" * 101,
        "supercalifragilistic" * 60,
        words(126, 1),
        words(254, 2) + " end",
        words(600, 3),
        ". ".join(words(12, seed).capitalize() for seed in range(40, 90)) + ".",
    ]
