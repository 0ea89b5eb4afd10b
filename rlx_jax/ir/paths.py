"""Block paths: where in the user's model something stands, and the layers of a rolled region among them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerIndex:
    """The segment of a path that counts the layers of a rolled region: `stride * iteration + offset`, behind a prefix
    where the segment is a name such as `ffn3`."""

    stride: int
    offset: int
    prefix: str = ""

    def __str__(self) -> str:
        index = f"{'' if self.stride == 1 else self.stride}i{f'+{self.offset}' if self.offset else ''}"
        return f"{self.prefix}{{{index}}}"

    def at(self, iteration: int) -> str | int:
        number = self.stride * iteration + self.offset
        return f"{self.prefix}{number}" if self.prefix else number


# Where in the user's model: `("layers", 3, "self_attn")`, printed `layers.3.self_attn`.
Path = tuple[str | int | LayerIndex, ...]


def path_text(path: Path) -> str:
    """`layers.3.self_attn`."""
    return ".".join(str(segment) for segment in path)


def free_path(around: Path, name: str, taken: Collection[Path]) -> Path:
    """The block `name` inside of `around`; where that is taken, `name_2` and so on."""
    path, number = (*around, name), 1
    while path in taken:
        number += 1
        path = (*around, f"{name}_{number}")
    return path


def bind_path(path: Path, iteration: int | None) -> Path:
    """Replace the layer index by the number of one iteration."""
    if iteration is None:
        return path
    return tuple(s.at(iteration) if isinstance(s, LayerIndex) else s for s in path)


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: the block path in the user's model, and the pass that made it."""

    path: Path = ()
    label: str = ""
    by: str = ""
    token_wise: bool = False  # the author of the stage says so; checked by slicing where the proof gives up

    def __str__(self) -> str:
        parts = [path_text(self.path) or "—"]
        if self.label:
            parts.append(f'"{self.label}"')
        if self.by:
            parts.append(f"pass={self.by}")
        return ", ".join(parts)
