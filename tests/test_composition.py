"""Compositions of layers: how a stack is put together, as a value."""

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import Homogeneous, LayerComposition, Pair, Single

KEY = 3126292069848458932
STACK = Pair(Single("embed"), Pair(Homogeneous("block", 3), Single("norm")))


def build(name: str, index: int) -> blocks.BlockStage:
    """Linears whose key says which layer asked."""
    return blocks.Linear(f"{name}.{index}.weight", shape=(8, 8))


def test_depth_and_stage() -> None:
    """The layers in order; equal ones are one region, under their own name."""
    assert [c.depth_hint() for c in (STACK, Single("a"), Homogeneous("a", 7))] == [5, 1, 7]
    built = rlx.ModelFlow("m").input("x", ("batch", 8)).stage(STACK.to_flow_stage(build)).build()
    keys = ("embed.0", "block.0", "block.1", "block.2", "norm.0")
    assert built.keys_read == tuple(f"{key}.weight" for key in keys)
    assert any(node.op.text().startswith("repeat(count=3") for node in built.hir.nodes)


def test_cache_keys() -> None:
    """Equal for equal compositions, in every process (hence the number); different for every change of structure."""
    others: list[LayerComposition] = [
        Single("a"), Single("b"), Homogeneous("a", 1), Homogeneous("a", 2), Pair(Single("a"), Single("b")),
        Pair(Single("b"), Single("a")), Pair(Homogeneous("a", 1), Single("b")), STACK,
    ]  # fmt: skip
    assert len({c.cache_key() for c in others}) == len(others)
    assert Pair(Single("a"), Single("b")).cache_key() == Pair(Single("a"), Single("b")).cache_key()
    assert Pair(Single("a"), Single("b")).cache_key() == KEY
