"""The name of one array of a program's state."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.ir.paths import Path, bind_path, path_text


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
