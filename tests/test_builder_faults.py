"""What a call gives is honoured, or refused by name: ids, sizes, caps, masks, biases, constants and dtypes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax import Graph, ModelFlow, errors
from tests.small import compiled, x_flow

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 8)).astype(np.float32)
H = 8


def test_a_row_of_each_sequence_is_one_of_them() -> None:
    """`last_token_idx` beyond the sequence, whose length the call decides."""
    model = compiled(x_flow().gather_last_token_dynamic())
    np.testing.assert_array_equal(model(X, last_token_idx=[2, 0])[:, 0], X[[0, 1], [2, 0]])
    for wrong in ([3, 0], [0, -1], [99, 0]):
        with pytest.raises(errors.TokenIdError, match=r"last_token_idx.*\[0, 3\)"):
            model(X, last_token_idx=wrong)


def test_a_constant_fits_its_dtype() -> None:
    """Or is refused: rows of the table of refusals."""
    m = Graph.hir("m")
    x = m.input("x", (1,))
    given = [([255], "u8"), ([-128], "i8"), ([1, 0], "bool"), ([65504.0], "f16"), ([math.inf], "f16"), ([3.0], "i32")]
    m.set_outputs([x, *(m.constant(v, d) for v, d in given)])
    for got, (value, _) in zip(list(compiled(m)(np.ones(1, np.float32)).values())[1:], given, strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), np.asarray(value, np.float64))


@pytest.mark.parametrize("dtype", ["i64", "f64"])
def test_a_parameter_of_64_bits_can_be_called(dtype: str) -> None:
    """It enters the program in 32 bits, as stage weights do; values that do not fit are a row of the table."""
    m = Graph.hir("m")
    x, w = m.input("x", (2,)), m.param("w", (2,), dtype)
    m.set_outputs([m.mul(x, m.cast(w, "f32"))])
    numpy_dtype = {"i64": np.int64, "u64": np.uint64, "f64": np.float64}[dtype]
    model = compiled(m, {"w": np.array([3, 5], numpy_dtype)})
    np.testing.assert_array_equal(model(np.ones(2, np.float32)), [3, 5])
    assert m.param("w", (2,), dtype) == w
    assert Graph.from_json(m.to_json()).to_json() == m.to_json()


SUMS: dict[tuple[str, str], str | None] = {
    ("sum", "bool"): None, ("mean", "bool"): None, ("prod", "bool"): None, ("max", "bool"): "bool", ("sum", "i8"): "i8",
    ("sum", "u8"): "u8", ("prod", "i16"): "i16", ("sum", "i32"): "i32", ("mean", "i32"): None, ("mean", "u8"): None,
    ("sum", "bf16"): "bf16", ("mean", "f16"): "f16", ("min", "i8"): "i8",
}  # fmt: skip


def test_a_reduction_keeps_its_dtype_or_is_refused() -> None:
    for (kind, dtype), want in SUMS.items():
        m = Graph.hir("m")
        x = m.input("x", (4,), dtype)
        if want is None:
            with pytest.raises(errors.DTypeError, match="cast"):
                m.reduce(kind, x)
        else:
            assert str(m.shape(m.reduce(kind, x))) == f"{want}[]"


def twice(emit: Any, x: Any) -> Any:
    return x * 2


def test_output_does_not_take_the_name_of_another_value() -> None:
    """`output` names the last value; another value has this name already."""
    flow = x_flow().store_stream("raw").custom(twice)
    with pytest.raises(errors.GraphError, match=r"outputs\(\['raw'\]\)"):
        flow.output("raw").build()
    np.testing.assert_array_equal(compiled(flow.store_stream("last").output("last"))(X), 2 * X)


def test_sizes_contradict_the_value_or_fit() -> None:
    """Names, numbers of a static value, and numbers that the flow is bound to; others are refused by rows."""
    static = ModelFlow("m").input("x", (2, 3, H))
    for flow in (x_flow(), static, x_flow().bind(batch=2, seq=3)):
        sizes: tuple[Any, Any] = (2, 3) if flow._binding or flow._inputs[0].type.is_static else ("batch", "seq")
        np.testing.assert_array_equal(compiled(flow.gather_last_token_at(*sizes))(X), X[:, -1:])
        np.testing.assert_array_equal(compiled(flow.attn_mask_ones(*sizes).cls_token_pool(sizes[0], H))(X), X[:, 0])
    np.testing.assert_array_equal(
        compiled(static.gather_last_token_dynamic())(X, last_token_idx=[1, 2])[:, 0], X[[0, 1], [1, 2]]
    )


ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "halves": lambda n: n // 2, "a rest": lambda n: n % 2, "both": lambda n: divmod(n, 2)[0] + divmod(n, 2)[1],
    "a square": lambda n: n**2, "of a whole": lambda n: 7 // n + 7 % n, "both of a whole": lambda n: sum(divmod(7, n)),
    "a sum": lambda n: 3 + n - 1, "a difference": lambda n: 9 - n, "a product": lambda n: 2 * n, "turned": lambda n: -n,
    "a size of a size": lambda n: (n * n) // n + n % n,
}  # fmt: skip


def test_sizes_have_the_arithmetic_of_whole_numbers() -> None:
    m = Graph.hir("m")
    n = m.shape(m.input("x", ("n",))).shape[0]
    for name, fn in ARITHMETIC.items():
        found = as_expression(fn(n))
        for size in (1, 2, 5, 8):
            assert found(size) == fn(size), name


def as_expression(dim: Any) -> Callable[[int], int]:
    """What a size is, as a function of `n`: read from what it prints."""
    names = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b}
    return lambda n: int(eval(str(dim).replace("^", "**"), {"n": n, **names}))


def test_weights_of_unknown_shape() -> None:
    """The message names what every stage takes; `shape=` is named only with those that have it."""
    with pytest.raises(errors.MissingWeightError, match=r"ShapeDtypeStruct") as error:
        compiled(x_flow().linear("w"))
    assert "shape= on the stage" not in str(error.value)
    specs = {"w": jax.ShapeDtypeStruct((4, H), jnp.float32)}
    assert compiled(x_flow().linear("w"), specs).init(0)["w"].shape == (4, H)
    assert compiled(x_flow().rms_norm("w")).init(0)["w"].shape == (H,)  # it follows from the input
    for flow in (x_flow().linear("w", shape=(4, H)), ModelFlow("m").input("i", (2,), "i32").embed("w", shape=(4, H))):
        assert compiled(flow).init(0)["w"].shape == (4, H)
