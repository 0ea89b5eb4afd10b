"""What passes look for, in random MIR graphs: the patterns and their near-misses, equal nodes, constants, regions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx_jax.ir import ops as o
from rlx_jax.ir.graph import Builder, Leaf, Op, TypeCache
from rlx_jax.ir.types import is_static
from tests.fuzz.sketch import BF16, F16, F32, I32, Case, Known, Sketch, plain
from tests.fuzz.tensor_ops import OPS, Grow, features, floating, norm_of, partner, product, weight_of

PALETTES = ((2, 3, 4), (3, 4, 2), ("batch", "seq", 4), (2, 4, 4), (1, 3, 6), ("batch", 3, 4))
"""Dimensions of the values of one graph."""


def watch(s: Sketch, k: Known | None) -> Known | None:
    """Now and then make an intermediate an output, or give it a second user."""
    if k is not None and s.coin(5):
        s.wanted.append(k)
    elif k is not None and s.coin(6):
        s.one(o.Unary("tanh"), k)
    return k


def bias_act(s: Sketch) -> object:
    """act(x · w + b); the bias may have rank 2, be a residual or one number, and stand first."""
    x, columns = features(s), s.choice((4, 2))
    y = watch(s, product(s, x, columns))
    if y is None:
        return None
    shape = s.choice(((columns,), (columns,), (columns,), (1, columns), (1,), (), (*x.array.shape[:-1], columns)))
    b = s.leaf(shape, x.type.dtype) if all(map(is_static, x.shape)) or len(shape) < 2 else partner(s, y)
    y = watch(
        s, s.one(o.Binary(s.choice(("add", "add", "add", "add", "sub", "mul"))), *((b, y) if s.coin(3) else (y, b)))
    )
    act = s.choice(("gelu", "silu", "", "relu", "tanh", "gelu_tanh"))
    return s.one(o.Unary(act), y) if act and y is not None else y


def add_norm(s: Sketch) -> object:
    """norm(x + residual [+ bias]); the residual may broadcast."""
    x = features(s)
    same = s.pick(lambda k: k.type == x.type)
    residual = same if same is not None and not s.coin(3) else partner(s, x)
    total = watch(s, s.one(o.Binary("add"), *((residual, x) if s.coin(3) else (x, residual))))
    if total is not None and s.coin(3):
        total = watch(s, s.one(o.Binary("add"), total, s.leaf((total.shape[-1],), x.type.dtype)))
    return norm_of(s, total) if total is not None else None


def swiglu_halves(s: Sketch) -> object:
    """act(half) ⊙ half of one tensor, in either order; the halves may overlap or leave something out."""
    y = features(s, even=True)
    half = y.shape[-1] // 2
    if y.shape[-1] % 2 or not half:
        return None
    rank = len(y.shape)
    starts = s.choice(((0, half), (half, 0), (0, half), (0, 0), (half, half)))
    gate, up = (watch(s, s.one(o.Narrow(rank - 1, start, half), y)) for start in starts)
    act = watch(s, s.one(o.Unary(s.choice(("silu", "silu", "gelu"))), gate))
    return s.one(o.Binary("mul"), *((up, act) if s.coin() else (act, up)))


def swiglu_products(s: Sketch) -> object:
    """act(x · g) ⊙ (x · u), in either order; u may read another value."""
    x, columns, contract = features(s), s.choice((4, 2)), s.draw(2)
    other = s.pick(lambda k: k.type == x.type) if s.coin(4) else x
    gate = watch(s, s.one(o.MatMul(contract), x, weight_of(s, x, contract, columns)))
    up = watch(s, s.one(o.MatMul(contract), other, weight_of(s, x, contract, columns)))
    act = watch(s, s.one(o.Unary(s.choice(("silu", "silu", "gelu_tanh"))), gate))
    return s.one(o.Binary("mul"), *((up, act) if s.coin() else (act, up)))


def shared_products(s: Sketch) -> object:
    """Several products of one value, with weights of different widths."""
    x, contract = features(s), s.draw(2)
    made = [s.one(o.MatMul(contract), x, weight_of(s, x, contract)) for _ in range(2 + s.draw(2))]
    return [watch(s, y) for y in made]


def chain(s: Sketch) -> object:
    """Pointwise ops in a row, each read once."""
    y: Known | None = floating(s, 1)
    for _ in range(3 + s.draw(3)):
        if y is None:
            return None
        way = s.draw(4)
        if way == 0:
            y = s.one(o.Unary(s.choice(("tanh", "silu", "sigmoid", "neg", "abs", "sin", "gelu"))), y)
        elif way == 1:
            y = s.one(o.Binary(s.choice(("mul", "sub", "add"))), y, s.scalar(s.choice((0.5, 2.0, -1.5)), y.type.dtype))
        elif way == 2:
            y = s.one(
                o.Binary(s.choice(("sub", "mul", "max"))), *((y, p) if (p := partner(s, y)) and s.coin() else (p, y))
            )
        else:
            y = s.one(o.CastTo(F32), s.one(o.CastTo(s.choice((BF16, F16))), y)) if y.type.dtype == F32 else y
    return y


def norm_reshape(s: Sketch) -> object:
    """A norm whose rows are then flattened."""
    x = features(s)
    y = watch(s, norm_of(s, x))
    return s.one(o.Reshape((-1, x.shape[-1])), y) if is_static(x.shape[-1]) else y


def constants(s: Sketch) -> object:
    """An expression of constants, in part cast, reduced or reshaped."""
    dtype = s.choice((F32, F32, I32, BF16, F16))
    shape = (2, s.choice((3, 4)))
    a, b = (s.leaf(shape, dtype, kind="constant") for _ in range(2))
    y = s.one(o.Binary(s.choice(("sub", "mul", "add", "max"))), a, b)
    for _ in range(1 + s.draw(2)):
        x = y if y is not None and len(y.shape) == 2 else a
        ops = (
            o.Transpose((1, 0)), o.Reduce("sum", (0,), True), o.CastTo(F32), o.CastTo(BF16), o.CastTo(I32), o.Iota(1),
            o.Reduce("mean" if x.is_float else "max", (1,), True), o.Unary("neg"), o.Narrow(1, 0, 1),
            o.Reshape((1, -1)),
        )  # fmt: skip
        y = s.one(s.choice(ops), x)
    return y


def nodes_of(s: Sketch) -> list[int]:
    """Numbers of the nodes that compute something."""
    return [i for i, node in enumerate(s.b.nodes) if not isinstance(node.op, Leaf) and not node.op.regions()]


def again(s: Sketch) -> object:
    """A node once more, exactly."""
    known = {k.value: k for k in s.values}
    numbers = [i for i in nodes_of(s) if all(v in known for v in s.b.nodes[i].inputs)]
    if not numbers:
        return None
    node = s.b.nodes[s.choice(numbers[::-1])]
    return s.add(node.op, *(known[v] for v in node.inputs))


def almost_again(s: Sketch) -> object:
    """A node once more with its operands swapped or another attribute."""
    known = {k.value: k for k in s.values}
    numbers = [i for i in nodes_of(s) if all(v in known for v in s.b.nodes[i].inputs)]
    if not numbers:
        return None
    node = s.b.nodes[s.choice(numbers[::-1])]
    operands = [known[v] for v in node.inputs]
    op = variation(s, node.op, operands)
    if isinstance(op, o.Binary | o.Compare | o.Concat) and op == node.op:
        operands = operands[::-1]
        if isinstance(op, o.Binary) and op.kind in ("div", "pow"):
            return None
    return s.add(op, *operands)


def variation(s: Sketch, op: Op, operands: list[Known]) -> Op:
    """The same op with another attribute that fits the same operands."""
    x = operands[0]
    match op:
        case o.Reduce(keepdims=keepdims):
            return replace(op, keepdims=not keepdims) if s.coin() else replace(op, kind=s.choice(("min", "max", "sum")))
        case o.RmsNormOp() | o.LayerNormOp():
            return replace(op, eps=s.choice((0.5, 1e-5, 2.0)))
        case o.Transpose(perm=perm):
            return o.Transpose(perm[::-1])
        case o.Softmax(axis=axis):
            return o.Softmax((axis + 1) % len(x.shape))
        case o.Cumsum(exclusive=exclusive):
            return replace(op, exclusive=not exclusive)
        case o.Unary():
            return o.Unary(s.choice(("tanh", "silu", "sigmoid", "gelu", "gelu_tanh"))) if x.is_float else op
        case o.FullLike(value=value):
            return replace(op, value=value + 1)
        case o.Iota(axis=axis):
            return o.Iota((axis + 1) % len(x.shape))
        case o.Narrow(axis=axis, start=start) if is_static(x.shape[axis]) and x.shape[axis] > 1:
            return replace(op, start=max(start - 1, 0) if start else 0, length=1)
        case o.AttentionOp(causal=causal, window=window, ahead=0):
            if "key_positions" in op.extra or s.coin():  # a window could leave a query without a key
                return replace(op, causal=not causal)
            return replace(op, window=None if window else 1)
        case o.FusedMatMulBiasAct(activation=activation):
            return replace(op, activation="gelu" if activation != "gelu" else "")
        case o.RopeOp(n_rot=n_rot) if n_rot > 2:
            return o.RopeOp(op.head_dim, 2)
    return op


def repeat(s: Sketch) -> object:
    """Layers that repeat: one or two carries (of one type, often), shared operands, parameters and state of each
    iteration, side outputs."""
    if s.iterations:
        return None
    first = floating(s, 1, lambda k: k.array.size <= 24)
    carried = [first]
    if s.coin():
        second = s.pick(lambda k: k.type == first.type and k != first)
        carried.append(second or (s.leaf(first.shape, first.type.dtype) if all(map(plain, first.shape)) else first))
    shared = [floating(s, 1)] if s.coin() else []
    operands = [*carried, *shared]
    inner = s.body(operands, 2 + s.draw(2))
    before = list(inner.values)
    for _ in range(1 + s.draw(4)):
        s_grow = inner.choice(BODY)
        s_grow(inner)
    outputs = []
    for k in before[: len(carried)]:
        made = inner.pick(lambda v, k=k: v.type == k.type and v not in before)  # type: ignore[misc]
        layer = inner.leaf((k.shape[-1] if is_static(k.shape[-1]) else 1,), k.type.dtype, kind="param")
        step = inner.one(o.Binary(inner.choice(("sub", "add"))), made or k, layer)
        outputs.append((inner.one(o.Unary(inner.choice(("tanh", "sin"))), step) if step else None) or k)
    if inner.coin():
        outputs = outputs[::-1] if len({k.type for k in outputs}) == 1 else outputs
    for _ in range(s.draw(3)):
        side = inner.pick(lambda v: v not in before)
        outputs += [side] if side else []
    s.repeat(inner, operands, len(carried), outputs)
    return None


PATTERNS: tuple[Grow, ...] = (
    bias_act, bias_act, add_norm, add_norm, swiglu_halves, swiglu_products, shared_products, chain, norm_reshape,
    constants, again, again, almost_again, almost_again,
)  # fmt: skip
BODY = (*OPS, *PATTERNS)
ALL: tuple[Grow, ...] = (*BODY, repeat, repeat)


def mir_case(seed: int, ops: int, types: TypeCache) -> Case:
    """A random MIR graph of about so many ops. Fewer ops of the same seed are a prefix, so a failure shrinks."""
    s = Sketch(np.random.default_rng(seed), Builder("fuzz", types))
    s.palette = s.choice(PALETTES)
    s.leaf(s.dims(1 + s.draw(3)), F32, kind="input")
    for _ in range(2 * ops):
        if len(nodes_of(s)) >= ops:
            break
        s.choice(ALL)(s)
    return s.finish()
