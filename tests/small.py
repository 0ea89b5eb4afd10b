"""What tests of small flows share: weights, a profile, and `compile` with the types of a user's script."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import rlx_jax as rlx


def w(*shape: int, seed: int = 0) -> np.ndarray:
    """A weight that keeps the size of what it multiplies."""
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def llama_weights(layers: int, hidden: int, queries: int, keys: int, inner: int) -> dict[str, np.ndarray]:
    """Those of Llama layers with so many columns of queries and of keys, other numbers in each."""
    shapes = {f"self_attn.{n}_proj": s for n, s in zip("qkv", ((queries, hidden), *((keys, hidden),) * 2), strict=True)}
    shapes |= {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, inner)}
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden))
    found: dict[str, np.ndarray] = {}
    for i in range(layers):
        found |= {f"model.layers.{i}.{name}.weight": w(*shape, seed=i) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"model.layers.{i}.{name}.weight": 1 + w(hidden, seed=i) for name in norms}
    return found


def compiled(flow: Any, weights: Any = None, **options: Any) -> Any:
    """`rlx.compile`, untyped: `params` may be None to a type checker."""
    return rlx.compile(flow, weights, **options)


def profile(**tables: Any) -> rlx.CompileProfile:
    """The default profile with other settings."""
    return rlx.CompileProfile().replace(**tables)


def declared(stage: Any, width: int) -> dict[str, tuple[int, ...]]:
    """The weights that a stage reads, by key, as it declares them: for values `[batch, seq, width]`."""
    flow = rlx.ModelFlow("declared").input("x", ("batch", "seq", width)).stage(stage)
    return {key: spec.shape for key, spec in flow.build().params.items()}


class Own:
    """The least that a source of weights is: one array under the key `w`, which may be other than it says."""

    def __init__(self, array: Any, spec: Any = None) -> None:
        self.array, self.says = array, spec or jax.ShapeDtypeStruct((2, 3), np.float32)

    def keys(self) -> tuple[str, ...]:
        return ("w",)

    def has(self, key: str) -> bool:
        return key == "w"

    def where(self, key: str) -> str:
        return "mine"

    def spec(self, key: str) -> Any:
        return self.says

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> Any:
        return self.array if index is None else self.array[index]
