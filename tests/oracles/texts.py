"""Fifty texts of many kinds for sentence embeddings."""

import json
import random
from pathlib import Path

WORDS = (
    "river stone lantern harvest engine window quiet orbit copper meadow signal paper thunder garden velvet bridge "
    "number castle winter pocket mirror salt distant teacher market ocean pencil violet story candle mountain circuit"
).split()


def words(count: int, seed: int) -> str:
    """`count` random words."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def fifty() -> list[str]:
    """The texts, in the order in which their embeddings are recorded."""
    texts: list[str] = json.loads((Path(__file__).parents[1] / "fixtures" / "minilm50.json").read_text("utf-8"))
    return texts
