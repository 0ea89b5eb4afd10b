"""Functions of rows as equations of their jaxpr, which run in a kernel on the entries that a program has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from rlx_jax.dataclasses import dataclass

AnyArray = Any


@dataclass(frozen=True)
class KernelTrace:
    """A JAX function of rows `[…, K]`, as equations that run in a kernel on rows of another shape.

    Attributes:
        jaxpr: the traced function. Each value has K entries, or is one number.
    """

    jaxpr: ClosedJaxpr

    def __call__(self, *rows: AnyArray, axis: int | None = None) -> list[AnyArray]:
        """Return the results for arrays of any one shape with as many entries.

        Args:
            rows: the arguments.
            axis: the first axis of a row, after those that number several rows; reductions reduce one axis after the
                other. None for a row alone: all its axes are reduced at once, but not in layouts that repeat entries.
        """
        constants = [number_of(c, c.dtype) for c in self.jaxpr.consts]
        return self.run(self.jaxpr.jaxpr, constants, rows, axis)

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[AnyArray], axis: int | None) -> list[AnyArray]:
        """Return the results of a jaxpr."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Any) -> AnyArray:
            return number_of(atom.val, dtype_of(atom)) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            name, inner = equation.primitive.name, inner_jaxpr(equation)
            if name in RESHAPES:
                results = operands[:1]
            elif name in REDUCTIONS:
                (total,), reduce = operands, REDUCTIONS[name]
                for _ in range(1 if axis is None else total.ndim - axis):
                    total = reduce(total, axis=axis)
                results = [total]
            elif name in CALLS:
                results = self.run(inner.jaxpr, inner.consts, operands, axis)
            elif name == "erf":
                results = [erf(*operands)]
            else:
                shape = max((x.shape for x in operands), key=len)
                operands = [x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in operands]
                results = [equation.primitive.bind(*operands, **equation.params)]
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def trace(function: Callable[..., AnyArray], operands: int, dtype: Any) -> KernelTrace:
    """Return an elementwise function of so many operands as equations."""
    arguments = [jax.ShapeDtypeStruct((1,), dtype)] * operands
    return KernelTrace(jax.make_jaxpr(lambda *a: (function(*a),))(*arguments))


def erf(x: AnyArray) -> AnyArray:
    """Return the error function, which Mosaic GPU lacks: a rational function, within 5e-7 of XLA's."""
    inner = jnp.minimum(jnp.maximum(x.astype(jnp.float32), -4.0), 4.0)
    square = inner * inner
    above, below = (functools.reduce(lambda total, c: total * square + c, part, 0 * square) for part in ERF)
    return (inner * above / below).astype(x.dtype)


# Coefficients of x² of the numerator and the denominator of erf(x) / x, the highest power first.
ERF: tuple[tuple[float, ...], ...] = (
    (
        -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
        -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
    ),
    (
        -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
        -1.42647390514189e-02,
    ),
)  # fmt: skip


def number_of(value: Any, dtype: Any) -> AnyArray:
    """Return an array of one number as a constant of the kernel, which cannot capture arrays."""
    return jnp.asarray(np.asarray(value).item(), dtype)


def inner_jaxpr(equation: Any) -> Any:
    """Return the function that an equation calls, if it has one."""
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def dtype_of(atom: Any) -> Any:
    """Return the dtype of a literal or variable of a jaxpr."""
    return atom.aval.dtype


# Primitives that change neither the entries nor their order; one number is broadcast where it is used.
RESHAPES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient")

# Primitives that call the function in their parameters once.
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")

# Reductions of a whole row to one number.
REDUCTIONS: dict[str, Callable[..., AnyArray]] = {"reduce_sum": jnp.sum, "reduce_max": jnp.max}

# Primitives of one entry at a time that the kernel has.
ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "convert_element_type", "div", "erf", "exp", "exp2", "integer_pow", "log", "logistic",
    "max", "min", "mul", "neg", "rsqrt", "select_n", "sign", "sqrt", "square", "sub", "tanh",
})  # fmt: skip


def unsupported_primitive(jaxpr: Any, size: int, reductions: bool) -> str:
    """Return the first primitive of a jaxpr that does not run in the kernel, or "".

    Args:
        jaxpr: the traced function.
        size: the number K of entries of a row; other values are one number.
        reductions: whether whole rows may be reduced.
    """
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, inner_jaxpr(equation)
        if name in CALLS:
            if found := unsupported_primitive(inner.jaxpr, size, reductions):
                return found
            continue
        sizes = {math.prod(v.aval.shape) for v in (*equation.invars, *equation.outvars)}
        is_reduction = reductions and name in REDUCTIONS and all(v.aval.size == 1 for v in equation.outvars)
        arrays = (v for v in equation.invars if isinstance(v, Literal) and np.size(v.val) != 1)
        if not sizes <= {1, size} or any(arrays) or not (name in RESHAPES or name in ELEMENTWISE or is_reduction):
            return str(name)
    return ""


def is_same_by_rows(whole: ClosedJaxpr, one: ClosedJaxpr, count: int) -> bool:
    """Return whether a function of several rows is a function of each row by itself.

    Its traces are then equal, except for sizes, and it reduces only whole rows.

    Args:
        whole: the trace for all rows.
        one: the trace for one row.
        count: the number of rows.
    """
    sides = whole.jaxpr, one.jaxpr
    lengths = [[len(j.constvars), len(j.eqns), *((len(e.invars), len(e.outvars)) for e in j.eqns)] for j in sides]
    if lengths[0] != lengths[1] or not all(map(np.array_equal, whole.consts, one.consts)):
        return False
    names = dict(zip(*((*j.constvars, *j.invars) for j in sides), strict=True))

    def is_same(x: Any, y: Any) -> bool:
        if isinstance(x, Literal) and isinstance(y, Literal):
            return bool(x.val == y.val)
        return not isinstance(x, Literal) and names.get(x) is y

    for a, b in zip(whole.eqns, one.eqns, strict=True):
        name = a.primitive.name
        if a.primitive is not b.primitive or not all(map(is_same, a.invars, b.invars)):
            return False
        if name in CALLS and not is_same_by_rows(inner_jaxpr(a), inner_jaxpr(b), count):
            return False
        if name in ELEMENTWISE and a.params != b.params:
            return False
        is_rows = any(x.aval.size != y.aval.size for x, y in zip(a.invars, b.invars, strict=True))
        if any(
            x.aval.size != y.aval.size * (count if is_rows else 1) for x, y in zip(a.outvars, b.outvars, strict=True)
        ):
            return False
        if name in REDUCTIONS and is_rows:
            ndim, axes = a.invars[0].aval.ndim, a.params["axes"]
            if tuple(axes) != tuple(range(ndim - len(axes), ndim)):
                return False
        names.update(zip(a.outvars, b.outvars, strict=True))
    return all(map(is_same, whole.jaxpr.outvars, one.jaxpr.outvars))
