"""Block paths: the position of a node in the user's model, with an index segment for the layers of a region."""

from __future__ import annotations

from collections.abc import Collection

from rlx_jax.dataclasses import dataclass


@dataclass(frozen=True)
class LayerIndex:
    """The path segment that numbers the layers of a region: `stride * iteration + offset`.

    The number follows `prefix` if the segment is a name such as `ffn3`.
    """

    stride: int
    offset: int
    prefix: str = ""

    def __str__(self) -> str:
        index = f"{'' if self.stride == 1 else self.stride}i{f'+{self.offset}' if self.offset else ''}"
        return f"{self.prefix}{{{index}}}"

    def segment_at(self, iteration: int) -> str | int:
        """Return the segment in one iteration."""
        number = self.stride * iteration + self.offset
        return f"{self.prefix}{number}" if self.prefix else number


# A position in the user's model: `("layers", 3, "self_attn")`, printed `layers.3.self_attn`.
Path = tuple[str | int | LayerIndex, ...]


def path_text(path: Path) -> str:
    """Return a path as text, such as `layers.3.self_attn`."""
    return ".".join(str(segment) for segment in path)


def unique_path(parent: Path, name: str, used_paths: Collection[Path]) -> Path:
    """Return the path of a new block `name` inside `parent`, or `name_2` and so on if the path is in `used_paths`."""
    path, number = (*parent, name), 1
    while path in used_paths:
        number += 1
        path = (*parent, f"{name}_{number}")
    return path


def bind_path(path: Path, iteration: int | None) -> Path:
    """Return the path with the number of one iteration in place of the layer index; unchanged if it is None."""
    if iteration is None:
        return path
    return tuple(s.segment_at(iteration) if isinstance(s, LayerIndex) else s for s in path)


@dataclass(frozen=True)
class Origin:
    """The origin of a node: the block path in the user's model, a label, and the pass that created the node (`by`)."""

    path: Path = ()
    label: str = ""
    by: str = ""
    token_wise: bool = False  # declared by the author of the stage; checked by slicing if it cannot be proved

    def __str__(self) -> str:
        parts = [path_text(self.path) or "—"]
        if self.label:
            parts.append(f'"{self.label}"')
        if self.by:
            parts.append(f"pass={self.by}")
        return ", ".join(parts)


# The name of one array of a program's state.


@dataclass(frozen=True)
class StateLeaf:
    """One array of the state, identified by the path of its block and its slot in that block.

    With `every` it is the array's value after each token, `[B, S, …]`. A program that can be rolled back to an earlier
    token writes this value. It is not part of the state, and no program reads it.
    """

    path: Path
    slot: str
    every: bool = False

    def __str__(self) -> str:
        return per_token_key(self.slot) if self.every else self.slot

    def key(self, iteration: int | None) -> str:
        """Return the array's key in a state, such as `layers.3.self_attn.k`.

        Slots have no dots, so the keys of two leaves always differ.
        """
        return path_text((*bind_path(self.path, iteration), str(self)))


def per_token_key(key: str) -> str:
    """Return the key of the values after each token of the state array `key`."""
    return f"{key}/every"
