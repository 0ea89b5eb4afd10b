"""What tests of small flows share: weights, a profile, and `compile` with the types of a user's script."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend as jex
import numpy as np

import rlx_jax as rlx

LLAMA = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""The sizes of a tiny Llama."""
TIED_LLAMA = LLAMA | {"hidden_act": "silu", "tie_word_embeddings": True}


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


def x_flow(width: int = 8) -> rlx.ModelFlow:
    """A flow over `x` `[batch, seq, width]`."""
    return rlx.ModelFlow("m").input("x", ("batch", "seq", width))


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


def read_by(flow: Any, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that the flow reads: the others would be an error."""
    return {key: weights[key] for key in flow.build(weights).keys_read}


def relative(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of nested jaxprs included."""

    def nested(value: Any) -> bool:
        return isinstance(value, jex.core.Jaxpr | jex.core.ClosedJaxpr)

    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=nested):
            if nested(inner):
                yield from equations(inner.jaxpr if isinstance(inner, jex.core.ClosedJaxpr) else inner)


def compiles_of(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the names of the programs that XLA compiled for it."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **named: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(str(named.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        return run(), names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
