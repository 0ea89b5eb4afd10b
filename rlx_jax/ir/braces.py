"""Names that differ in one place, as one."""

from __future__ import annotations

import re


def braced(names: list[str]) -> str:
    """Fold names that differ in one place into `prefix{a,b}suffix`; whole runs of numbers become `{0..3}`.

    >>> braced(["layers.0.q_proj", "layers.1.q_proj"]), braced(["a.q_proj", "a.k_proj"])
    ('layers.{0..1}.q_proj', 'a.{q,k}_proj')
    """
    if len(set(names)) == 1:
        return names[0]
    tokens = [re.findall(r"\w+|\W", name.replace("_", " _ ").replace(" ", "\0")) for name in names]
    if len({len(t) for t in tokens}) != 1:
        return "{" + ",".join(names) + "}"
    columns = list(zip(*tokens, strict=True))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1:
        return "{" + ",".join(names) + "}"
    values = list(columns[varying[0]])
    run = all(v.isdigit() for v in values) and [int(v) for v in values] == list(
        range(int(values[0]), int(values[0]) + len(values))
    )
    inner = f"{values[0]}..{values[-1]}" if run else ",".join(values)
    parts = [f"{{{inner}}}" if i == varying[0] else column[0] for i, column in enumerate(columns)]
    return "".join(parts).replace("\0", "")
