"""What ops say of themselves: every class says all of it, and says what the tables beside the passes said."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Hir, Mir, TypeCache
from rlx_jax.ir.hir import BLOCKS
from rlx_jax.ir.operands import ELEMENTWISE, Traits
from rlx_jax.ir.ops import OPS
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.models.llama import Llama32Flow, LlamaConfig
from tests.small import compiles_of
from tests.test_json import op_classes

COMPOSITES = {"LlamaDecoderBlock", "LinearFused", "SharedLinearPair", "SwiGLU", "ResidualRmsNorm", "Qwen35MtpHead"}
KEEP_F32 = {"Positions", "Rope", "RopeAngles", "RopeRows", "Sinusoids"}


def test_the_lists_are_whole() -> None:
    """Every class of the package stands in the one list of its kind."""
    ops, blocks = ({cls.__name__ for cls in op_classes(base)} for base in (Mir, Hir))
    groups = {f"{kind}Group" for kind in ("Attention", "Delta", "Expert", "Head", "Kernel")}
    assert {cls.__name__ for cls in OPS} | groups == ops, "OPS stands in rlx_jax/ir/ops/__init__.py"
    assert {cls.__name__ for cls in BLOCKS} == blocks >= COMPOSITES | KEEP_F32, (
        "BLOCKS stands in rlx_jax/ir/hir/__init__.py"
    )


def test_nothing_is_left_open() -> None:
    """An op without facts, or with some of them, is refused where it is defined; a subclass does not inherit them."""
    with pytest.raises(GraphError, match=r"Forgotten: .*Traits\(…\)"):
        type("Forgotten", (Mir,), {})
    with pytest.raises(GraphError, match=r"Forgotten: .*traits = BlockTraits\(…\)"):
        type("Forgotten", (Hir,), {"traits": ELEMENTWISE})
    with pytest.raises(GraphError, match="Narrower: "):
        type("Narrower", (Unary,), {})
    with pytest.raises(TypeError, match="missing"):
        Traits("compute")  # type: ignore[call-arg]


def types(*texts: str) -> list[TensorType]:
    """`f32 2 8` is `f32[2,8]`."""
    split = [text.split() for text in texts]
    return [TensorType(tuple(map(int, shape)), as_dtype(dtype)) for dtype, *shape in split]


W = np.ones((8, 6), "f4")
FUNCTIONS: dict[str, tuple[Any, int]] = {
    "no product": (jnp.tanh, 0), "a product": (lambda x: x @ W, 2 * 5 * 8 * 6),
    "one in a jit": (jax.jit(lambda x: x @ W), 2 * 5 * 8 * 6),
    "one in a loop": (lambda x: jax.lax.scan(lambda c, r: (c, r @ W), 0, x)[1], 2 * 5 * 8 * 6),
    "one of two": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: x[:, :6], x), 2 * 5 * 8 * 6),
    "an outer product of each row": (lambda x: jnp.einsum("ab,ac->abc", x, x), 2 * 5 * 8 * 8),
    "rows with rows": (lambda x: jnp.einsum("ab,cb->ac", x, x), 2 * 5 * 5 * 8),
}  # fmt: skip


def test_products_of_a_users_function_count() -> None:
    (x,) = types("f32 5 8")
    for case, (fn, want) in FUNCTIONS.items():
        op = JaxFn(fn)
        assert op.traits.flops(op, [x], TypeCache().infer(op, (x,))) == want, case


LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, tuple(5e5 ** (-2 * i / 128) for i in range(64)), 1e-5, 8192)
WEIGHTS_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
"""Entries of the matrices that a token is multiplied with."""


def test_an_8b_model_is_counted_without_a_compile() -> None:
    """FLOPs are 2 a weight and token, and those of attention; a step reads every weight. In a fraction of a second."""
    model = rlx.compile(Llama32Flow.for_prefill(LLAMA_8B), program="extend")
    model.text("mir")  # the template is there
    start = time.perf_counter()
    report, compiles = compiles_of(lambda: model.report(batch=1, seq=1, context=2048))
    seconds = time.perf_counter() - start
    assert compiles == [] and report.compiles == 0
    assert report.flops == 2 * WEIGHTS_8B + 32 * 4 * 4096 * 2048
    assert report.bytes is not None and 4 * WEIGHTS_8B < report.bytes < 1.05 * 4 * WEIGHTS_8B
    assert report.workspace == 3 * 4 * 32 * 2048
    assert seconds < 2, seconds  # 0.05 s on a machine of its own; this one may be shared
