"""Names of several checkpoint keys together."""

from __future__ import annotations

import itertools
import re


def fold_names(names: list[str]) -> str:
    """Return one text for several names: those that differ in one word fold into `prefix{a,b}suffix`.

    Consecutive numbers become `{0..3}`. Names that differ in several words become a list in braces.

    >>> fold_names(["layers.0.q_proj", "layers.1.q_proj"]), fold_names(["a.q_proj", "a.k_proj"])
    ('layers.{0..1}.q_proj', 'a.{q,k}_proj')
    """
    if len(set(names)) == 1:
        return names[0]
    # Words split at underscores too, so that `q_proj` and `k_proj` fold. The separators
    # added for that are removed at the end.
    tokens = [re.findall(r"\w+|\W", name.replace("_", " _ ").replace(" ", "\0")) for name in names]
    columns = list(zip(*tokens, strict=False))
    varying_columns = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying_columns) != 1 or len({len(t) for t in tokens}) != 1:
        return "{" + ",".join(names) + "}"
    values = list(columns[varying_columns[0]])
    is_consecutive = all(v.isdigit() for v in values) and all(
        int(b) == int(a) + 1 for a, b in itertools.pairwise(values)
    )
    inner = f"{values[0]}..{values[-1]}" if is_consecutive else ",".join(values)
    parts = [f"{{{inner}}}" if i == varying_columns[0] else column[0] for i, column in enumerate(columns)]
    return "".join(parts).replace("\0", "")
