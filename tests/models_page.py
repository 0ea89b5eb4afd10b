"""docs/models.md: the families of `FAMILIES`, with what the census compared.

python -m tests.models_page --write

The figures are those of tests/fixtures/census.json, which `python benchmarks/census.py --record` writes.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx_jax.models.families import FAMILIES, Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
RECORD = Path(__file__).parent / "fixtures" / "census.json"

# What else is compared with transformers, in tests with the mark `oracle`, of types that the census has no task for.
OTHERS = {
    "clip": "embeddings of texts and images, similarities (tests/test_dual.py)",
    "siglip": "embeddings of texts and images, similarities (tests/test_dual.py)",
    "siglip2_text_model": "the text tower of `siglip2`",
    "siglip2_vision_model": "hidden states and vectors, from pixels (tests/test_siglip2.py)",
    "llama_bidirec": "embeddings and logits, with a bidirectional Llama (tests/test_sentence_layers.py)",
    "Flux2Transformer2DModel": "one step, with diffusers (tests/test_flux2.py)",
}
RECORDED = "hidden states or embeddings, by recorded numbers of the reference"
# What a family leaves out, besides heads.
LIMITS = {
    "gemma3": "images: only the text model is loaded",
    "qwen3_5": "images: only the text model is loaded",
    "nomic_bert": "experts with a gate",
    "xlm-roberta": "jina-embeddings-v3 in the format of its own code, with a LoRA adapter for each task",
    "llama_bidirec": "other pooling than avg; a temperature of classifiers",
}

HEAD = """# Models

Which checkpoints `rlx.load` reads, what is compared with transformers, and what is not supported.

```python
import rlx_jax as rlx

print(type(rlx.load("path/to/classifier")).__name__)  # the class that `architectures` in config.json names
```

`model_type` in `config.json` names the family, `architectures` the class.

- A type that is not in the table is an error that names the nearest family and the fields in which it differs; for an
  architecture, the ones that the type has. [Adding a family](adding-a-family.md) shows how to add one.
- An unknown config field that may change the computation is an [error that names
  it](recipes.md#fields-of-configjson-that-are-not-handled).
- A head that is not supported is left out with a warning, and the model below it loads.

## Figures

`python benchmarks/census.py` makes a tiny random checkpoint of every model type that transformers {version} has for a
task, loads it, and compares the float32 logits of rows of different lengths. The error is the largest difference
divided by the largest logit; the limit is 3e-5.

{counts}

## Families

{families}
"""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def count_rows(counts: dict[str, dict[str, int]]) -> str:
    """The counts of each task."""
    rows = []
    for task, outcomes in counts.items():
        others = sum(n for name, n in outcomes.items() if name not in ("compared", "headless", "refused"))
        numbers = (sum(outcomes.values()), outcomes.get("compared", 0), outcomes.get("headless", 0))
        rows.append((f"`AutoModelFor{task}`", *map(str, (*numbers, outcomes.get("refused", 0), others))))
    return table(("class of transformers", "types", "equal", "without the head", "refused by name", "other"), rows)


def architectures(family: Family) -> str:
    """The architectures, the ones for tasks by the task alone."""
    tasks, plain = defaultdict[str, list[str]](list), []
    for name in family.architectures:
        match = re.fullmatch(r"(\w+)For([A-Z]\w*)", name)  # not "RoFormerModel"
        if match is None:
            plain.append(name)
        else:
            tasks[match[1]].append(match[2])
    return ", ".join([*(f"`{name}`" for name in plain), *(f"`{s}For` {', '.join(t)}" for s, t in tasks.items())])


def family_rows(loaded: list[dict[str, Any]]) -> str:
    """A row for each family."""
    compared, headless = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for row in loaded:
        if row["error"] is None:
            headless[row["type"]].append(row["task"])
        else:
            compared[row["type"]].append(f"{row['task']} {row['error']:.0e}".replace("e-0", "e-"))
    rows = []
    for kind, family in FAMILIES.items():
        equal = ", ".join(compared[kind]) or OTHERS.get(kind, RECORDED)
        limits = [*(f"head of {task}" for task in headless[kind]), *([LIMITS[kind]] if kind in LIMITS else [])]
        rows.append((f"`{kind}`", architectures(family), equal, ", ".join(limits)))
    return table(("`model_type`", "architectures", "compared: task and error", "not supported"), rows)


def page() -> str:
    """The text of the page."""
    record = json.loads(RECORD.read_text("utf-8"))
    counts, families = count_rows(record["counts"]), family_rows(record["loaded"])
    text = HEAD.format(version=record["transformers"], counts=counts, families=families)
    return re.sub(r" +\|", " |", text)


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    PAGE.write_text(page(), "utf-8")
