"""Trees of parameters as weights, both ways; docs/bring_your_parameters.md has MaxText's and nnx's trees."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx

import rlx_jax as rlx
from rlx_jax.errors import MissingWeightError, WeightShapeError

RNG = np.random.default_rng(0)
LEAF = RNG.standard_normal((6, 3, 2, 4)).astype(np.float32)  # inputs, layer, heads, dim
TREE: dict[str, Any] = {
    "blocks": {"q": LEAF, "e": RNG.standard_normal((2, 3, 5)).astype(np.float32)},
    "norm": np.ones(6, np.float32),
}
NAMES: dict[str, Any] = {
    r"blocks\.q": rlx.TreeWeight("l.{layer}.q", "i layer h (half two) -> (h two half) i", {"two": 2}, 0.5),
    r"blocks\.e": rlx.TreeWeight("l.{layer}.e.{expert}", "expert layer o -> o"),
    "norm": None,
}


def test_values() -> None:
    """Each weight by plain indexing, whole and in part; and the tree again, also of arrays that are traced."""
    source: Any = rlx.open_weights(TREE, names=NAMES)
    assert len(source.keys()) == 3 + 6
    for layer in range(3):
        heads = [np.concatenate([LEAF[:, layer, h, ::2], LEAF[:, layer, h, 1::2]], 1).T for h in range(2)]
        want = np.concatenate(heads) * np.float32(0.5)
        np.testing.assert_array_equal(source.read(f"l.{layer}.q"), want)
        np.testing.assert_array_equal(source.read(f"l.{layer}.q", (slice(1, 7, 2), slice(2, 5))), want[1:7:2, 2:5])
        assert source.spec(f"l.{layer}.q") == jax.ShapeDtypeStruct((8, 6), np.float32)
        for expert in range(2):
            np.testing.assert_array_equal(source.read(f"l.{layer}.e.{expert}"), TREE["blocks"]["e"][expert, layer])
    weights = {key: source.read(key) for key in source.keys()}
    jax.tree.map(np.testing.assert_array_equal, source.to_tree(weights), TREE)
    doubled = jax.jit(source.to_tree)({key: 2 * value for key, value in weights.items()})
    np.testing.assert_array_equal(doubled["blocks"]["q"], 2 * LEAF)
    np.testing.assert_array_equal(doubled["norm"], TREE["norm"])
    with pytest.raises(MissingWeightError, match=r"l\.0\.e\.0"):
        source.to_tree({})
    with pytest.raises(WeightShapeError, match=r"expected shape \[8, 6\], got \[6, 8\]"):
        source.to_tree({key: value.T for key, value in weights.items()})


def test_flax_and_orbax(tmp_path: Path) -> None:
    """Linen's parameters, the variables of nnx with other state left out, and the same tree in a checkpoint."""
    names: dict[str, Any] = {
        r"(?:params\.)?(.*)kernel": rlx.TreeWeight(r"\1weight", "i o -> o i"), r"(?:params\.)?(.*)bias": r"\1bias",
        r".*rngs\..*": None,
    }  # fmt: skip
    params = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    dense = rlx.open_weights(params, names={k: v for k, v in names.items() if v is not None})
    np.testing.assert_array_equal(dense.read("weight"), params["params"]["kernel"].T)
    block = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    trees: tuple[Any, ...] = (nnx.state(block), block)
    for tree in trees:
        source: Any = rlx.open_weights(tree, names=names)
        assert set(source.keys()) == {"layers.0.weight", "layers.0.bias"}
        again = source.to_tree({"layers.0.weight": np.ones((3, 2), "f4"), "layers.0.bias": np.ones(3, "f4")})
        values: Any = nnx.state(again) if tree is block else again
        np.testing.assert_array_equal(values["layers"][0]["kernel"].get_value(), np.ones((2, 3)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", params)
    written = rlx.open_weights(tmp_path / "run", names={k: v for k, v in names.items() if v}, verify="metadata")
    np.testing.assert_array_equal(written.read("weight"), dense.read("weight"))
