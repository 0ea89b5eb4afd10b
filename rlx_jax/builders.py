"""What a `GraphModule` is written with: blocks at HIR, tensor ops at every level.

Each builder is a plain function of the module and its values; `GraphModule` lists them as its methods. Shapes are
inferred; `out_shape` is optional and checked. All of them raise ShapeError, DTypeError or ArityError where the values
do not fit, and LevelError where the module is not at the level that the op needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from rlx_jax.errors import LevelError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, GraphStage, Mir, Op, Value
from rlx_jax.ir.ops.contract import LayerNormOp, product
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Unary, Where, small_constant
from rlx_jax.ir.ops.shaping import Concat, Cumsum, Gather, Narrow, Reduce, Softmax, Transpose, reshape_to
from rlx_jax.ir.types import TensorType, as_dim, as_dtype, is_static

Shape = Sequence[int | str]


class Module(Protocol):
    """What builders need of a `GraphModule`."""

    name: str
    stage: GraphStage
    builder: Builder

    def shape(self, value: Value) -> TensorType: ...

    def hand(self, value: Value) -> Value: ...

    def add_node(self, op: Op, *values: Value, out_shape: Shape | None = None) -> Value: ...


@contextmanager
def _block(m: Module, label: str) -> Iterator[None]:
    """Several nodes that are one block: HIR only, and all of them carry its label."""
    if m.stage != GraphStage.HIR:
        raise LevelError(f"{label} is a HIR block; module {m.name!r} is at {m.stage}")
    with m.builder.at(replace(m.builder.origin, label=label)):
        yield


# -- blocks ------------------------------------------------------------------------------------


def linear(
    m: Module, x: Value, w: Value, b: Value | None = None, activation: str = "", out_shape: Shape | None = None
) -> Value:
    """`act(x · w [+ b])`: x `[…, in]`, w `[in, out]`, b `[out]`."""
    op = hir.Linear(bias=b is not None, activation=activation)
    return m.add_node(op, x, w, *([b] if b is not None else []), out_shape=out_shape)


def linear_fused(
    m: Module, x: Value, w: Value, b: Value, activation: str = "", out_shape: Shape | None = None
) -> Value:
    """`act(x · w + b)`."""
    return linear(m, x, w, b, activation, out_shape)


def shared_linear_pair(m: Module, x: Value, w1: Value, w2: Value) -> tuple[Value, Value]:
    """`x · w₁` and `x · w₂`, each of its own width."""
    results = []
    for slot, w in enumerate((w1, w2)):
        with _block(m, f"shared_linear_pair[{slot}]"):
            results.append(linear(m, x, w))
    return results[0], results[1]


def swiglu_ffn(m: Module, x: Value, up: Value, gate: Value, down: Value, out_shape: Shape | None = None) -> Value:
    """`(silu(x · gate) ⊙ (x · up)) · down`: gate and up `[H, F]`, down `[F, H]`."""
    with _block(m, "swiglu_ffn"):
        inner = m.add_node(hir.GatedFfn(), linear(m, x, gate), linear(m, x, up))
        return linear(m, inner, down, out_shape=out_shape)


def rms_norm(
    m: Module, x: Value, gamma: Value, beta: Value | None = None, eps: float = 1e-5, out_shape: Shape | None = None
) -> Value:
    """`x · (mean(x²) + ε)^(−1/2) ⊙ γ [+ β]` over the last axis."""
    return m.add_node(hir.RmsNorm(eps), x, gamma, *([beta] if beta is not None else []), out_shape=out_shape)


def residual_rms_norm(
    m: Module, x: Value, residual: Value, gamma: Value, beta: Value | None = None, eps: float = 1e-5
) -> Value:
    """`rms_norm(x + residual)`."""
    with _block(m, "residual_rms_norm"):
        return rms_norm(m, add(m, x, residual), gamma, beta, eps)


def attention(
    m: Module,
    q: Value,
    k: Value,
    v: Value,
    heads: int,
    head_dim: int,
    mask: hir.MaskKind | str = "causal",
    mask_value: Value | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    out_shape: Shape | None = None,
) -> Value:
    """Attention over packed heads: q `[B, S, N·D]`, k and v `[B, T, K·D]`; K follows from the width of k.

    `mask_value` is the keep mask `[B, T]` of mask "custom", or the bias `[B, N, S, T]` of mask "bias".
    """
    width = m.shape(k).shape[-1:]
    if head_dim < 1 or not width or not is_static(width[0]) or width[0] % head_dim:
        raise ShapeError(f"attention: k is [B, T, K·{head_dim}], got {m.shape(k)}")
    op = hir.attention(heads, width[0] // head_dim, hir.mask_kind(mask), scale=scale, softcap=softcap)
    return m.add_node(op, q, k, v, *([mask_value] if mask_value is not None else []), out_shape=out_shape)


def attention_(m: Module, q: Value, k: Value, v: Value, mask: Value, heads: int, head_dim: int) -> Value:
    """`attention` with a keep mask `[B, T]`: 1 keeps a key, less than ½ drops it."""
    return attention(m, q, k, v, heads, head_dim, hir.MASK_KINDS["custom"], mask)


def rope(m: Module, x: Value, cos: Value, sin: Value, head_dim: int, out_shape: Shape | None = None) -> Value:
    """Rotary embedding of whole heads: x `[B, S, N·D]`, cos and sin `[B|1, S, D/2]`."""
    return rope_n(m, x, cos, sin, head_dim, head_dim, out_shape)


def rope_n(
    m: Module, x: Value, cos: Value, sin: Value, head_dim: int, n_rot: int, out_shape: Shape | None = None
) -> Value:
    """`rope` of the first `n_rot` columns of each head."""
    return m.add_node(hir.Rope(head_dim, n_rot), x, cos, sin, out_shape=out_shape)


def llama_decoder_block(
    m: Module,
    *operands: Value,
    heads: int,
    head_dim: int,
    kv_heads: int,
    eps: float = 1e-5,
    mask: hir.MaskKind | str = "causal",
) -> Value:
    """One Llama layer: the 14 operands of `hir.DECODER_OPERANDS`, weights `[in, out]`, then the mask's own operand."""
    return m.add_node(hir.LlamaDecoderBlock(heads, head_dim, kv_heads, eps, hir.mask_kind(mask)), *operands)


def hir_mir(m: Module, op: Mir, inputs: Sequence[Value], shape: Shape | None = None) -> Value:
    """A tensor op in a HIR module."""
    with _block(m, f"mir({op.text()})"):
        return m.add_node(op, *inputs, out_shape=shape)


# -- tensor ops --------------------------------------------------------------------------------


def constant(m: Module, value: Any, dtype: Any = "f32") -> Value:
    """A small array that belongs to the program: at most 1 MiB."""
    return m.hand(m.builder.leaf(small_constant(value, dtype)))


def mm(m: Module, a: Value, b: Value, out_shape: Shape | None = None) -> Value:
    """`a @ b`: `[…, M, K] × […, K, N]`."""
    return m.add_node(product(m.shape(a), m.shape(b)), a, b, out_shape=out_shape)


def binary(m: Module, kind: str, a: Value, b: Value, out_shape: Shape | None = None) -> Value:
    """`add`, `sub`, `mul`, `div`, `max`, `min` or `pow`, with NumPy broadcasting."""
    return m.add_node(Binary(kind), a, b, out_shape=out_shape)


def add(m: Module, a: Value, b: Value) -> Value:
    """a + b."""
    return binary(m, "add", a, b)


def sub(m: Module, a: Value, b: Value) -> Value:
    """a − b."""
    return binary(m, "sub", a, b)


def mul(m: Module, a: Value, b: Value) -> Value:
    """a · b, element by element."""
    return binary(m, "mul", a, b)


def div(m: Module, a: Value, b: Value) -> Value:
    """a / b."""
    return binary(m, "div", a, b)


def compare(m: Module, kind: str, a: Value, b: Value) -> Value:
    """`eq`, `ne`, `lt`, `le`, `gt` or `ge`, as bool."""
    return m.add_node(Compare(kind), a, b)


def eq(m: Module, a: Value, b: Value) -> Value:
    """a = b, as bool."""
    return compare(m, "eq", a, b)


def lt(m: Module, a: Value, b: Value) -> Value:
    """a < b, as bool."""
    return compare(m, "lt", a, b)


def where(m: Module, condition: Value, on_true: Value, on_false: Value) -> Value:
    """`on_true` where `condition` is not zero, else `on_false`."""
    return m.add_node(Where(), condition, on_true, on_false)


def activation(m: Module, kind: str, x: Value) -> Value:
    """A function of one value, by its name in `UNARY`."""
    return m.add_node(Unary(kind), x)


def gelu(m: Module, x: Value) -> Value:
    """½x(1 + erf(x/√2))."""
    return activation(m, "gelu", x)


def gelu_approx(m: Module, x: Value) -> Value:
    """GELU by tanh."""
    return activation(m, "gelu_tanh", x)


def silu(m: Module, x: Value) -> Value:
    """x σ(x)."""
    return activation(m, "silu", x)


def relu(m: Module, x: Value) -> Value:
    """max(x, 0)."""
    return activation(m, "relu", x)


def exp(m: Module, x: Value) -> Value:
    """eˣ."""
    return activation(m, "exp", x)


def sqrt(m: Module, x: Value) -> Value:
    """√x."""
    return activation(m, "sqrt", x)


def neg(m: Module, x: Value) -> Value:
    """−x."""
    return activation(m, "neg", x)


def tanh(m: Module, x: Value) -> Value:
    """tanh x."""
    return activation(m, "tanh", x)


def cast(m: Module, x: Value, dtype: Any) -> Value:
    """The same values in another dtype."""
    return m.add_node(CastTo(as_dtype(dtype)), x)


def layer_norm(m: Module, x: Value, gamma: Value, beta: Value, eps: float = 1e-5) -> Value:
    """`(x − mean x)(var x + ε)^(−1/2) ⊙ γ + β` over the last axis."""
    op = hir.LayerNorm(eps) if m.stage == GraphStage.HIR else LayerNormOp(eps)
    return m.add_node(op, x, gamma, beta)


def softmax(m: Module, x: Value, axis: int = -1) -> Value:
    """Softmax along `axis`."""
    return m.add_node(Softmax(axis), x)


def cumsum(m: Module, x: Value, axis: int = -1, exclusive: bool = False) -> Value:
    """The running sum along `axis`; `exclusive` leaves each entry out of its own sum."""
    return m.add_node(Cumsum(axis, exclusive), x)


def reduce(m: Module, kind: str, x: Value, axes: int | Sequence[int], keepdims: bool = False) -> Value:
    """`sum`, `mean`, `max`, `min` or `prod` over `axes`."""
    return m.add_node(Reduce(kind, (axes,) if isinstance(axes, int) else tuple(axes), keepdims), x)


def sum(m: Module, x: Value, axes: int | Sequence[int], keepdims: bool = False) -> Value:
    """Sum over `axes`."""
    return reduce(m, "sum", x, axes, keepdims)


def mean(m: Module, x: Value, axes: int | Sequence[int], keepdims: bool = False) -> Value:
    """Mean over `axes`."""
    return reduce(m, "mean", x, axes, keepdims)


def reshape_(m: Module, x: Value, shape: Shape) -> Value:
    """Reshape to ints, one -1, or symbols of x by name; one product of symbols is -1."""
    dims = [-1 if d == -1 else as_dim(d, "reshape") for d in shape]
    return m.add_node(reshape_to(m.shape(x), dims), x)


def transpose_(m: Module, x: Value, perm: Sequence[int]) -> Value:
    """Permute the axes."""
    return m.add_node(Transpose(tuple(perm)), x)


def narrow_(m: Module, x: Value, axis: int, start: int, length: int) -> Value:
    """`length` elements of one axis from `start` on; a negative start counts from the end."""
    return m.add_node(Narrow(axis, start, length), x)


def concat_(m: Module, values: Sequence[Value], axis: int) -> Value:
    """Join values along `axis`."""
    return m.add_node(Concat(axis), *values)


def gather_(m: Module, table: Value, ids: Value) -> Value:
    """`table[ids]`: table `[V, …]`, ids `[…]` integers."""
    return m.add_node(Gather(), table, ids)
