"""Proof that a function treats every position of one dimension alone and alike.

A stage without a rule of its own may be copied into the incremental program only if it is token-wise, and two requests
may share a batch only if no stage looks across it. Both are the same claim about one symbolic dim, and here it is
proved, not sampled: a numeric slicing test misses a mixer whose effect happens to vanish on the sample.

The function is traced with the dim as a symbol, so that a shape tells where the dim is, and the jaxpr is walked once
to keep one invariant. A value whose shape does not mention the dim depends neither on its size nor on what lies along
it. A value that mentions it does so on one axis, and entry t of that axis depends on entry t of the inputs alone. Any
other value is `_Mixed`, with the sentence that says which primitive made it; it refuses only where it reaches an
output, as JAX leaves dead size reads in its jaxprs.

An equation keeps the invariant by its rule in `_RULES` or `_CONTROL`; a primitive without one mixes. Many rules need
no check of their own: `reduce_sum` cannot sum over the dim and still have it in its result.

What a trace cannot see: `x.shape[1] == 1` is plain False for a symbol, so a branch on it, or a `squeeze()` without an
axis, is proved for the other sizes only. (`<` and `>` are seen: they fail to trace.)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend import core as jex

from rlx_jax.errors import first_line
from rlx_jax.ir.types import short_name


@dataclass(frozen=True)
class Verdict:
    """Whether it is proved, with the axis of the dim in each output leaf (None: does not depend on it), or why not."""

    token_wise: bool
    reason: str
    out_axes: tuple[int | None, ...]


def token_wise(fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], dim: str) -> Verdict:
    """Prove that entry t of `fn`'s outputs along `dim` depends on entry t of its inputs alone, alike for every t.

    An input has `dim` as one whole axis, or does not have it and is shared by all positions.

    >>> batch, seq = jax.export.symbolic_shape("batch, seq")
    >>> x = jax.ShapeDtypeStruct((batch, seq, 64), "float32")
    >>> token_wise(jax.nn.softmax, [x], "seq")
    Verdict(token_wise=True, reason='', out_axes=(1,))
    >>> token_wise(lambda x: x - x.sum(1, keepdims=True), [x], "seq").reason
    "reduce_sum reduces over 'seq' (axis 1 of f32[batch,seq,64])"
    """
    symbol = _Dim(dim)
    leaves = jax.tree.leaves(list(avals))
    for i, aval in enumerate(leaves):
        if not symbol.is_whole(aval):
            return Verdict(False, f"input {i} does not hold {dim!r} as one whole axis: {_text(aval)}", ())
    try:
        closed = jax.make_jaxpr(fn)(*avals)
    except Exception as error:
        if not _is_about_symbols(error, leaves):
            raise
        return Verdict(False, f"does not trace with symbolic sizes: {first_line(error)}", ())
    states = _run(closed, [_Apart(1, 1) if symbol.axes(aval) else None for aval in leaves], symbol)
    for i, (state, aval) in enumerate(zip(states, closed.out_avals, strict=True)):
        if isinstance(state, _Mixed):
            return Verdict(False, state.reason, ())
        if not symbol.is_whole(aval):
            return Verdict(False, f"output {i} does not hold {dim!r} as one whole axis: {_text(aval)}", ())
    return Verdict(True, "", tuple(next(iter(symbol.axes(aval)), None) for aval in closed.out_avals))


def _is_about_symbols(error: Exception, leaves: Sequence[Any]) -> bool:
    """Whether tracing failed because a size is a symbol, rather than because the function is wrong at any size."""
    if isinstance(error, jex.InconclusiveDimensionOperation):
        return True
    names = {name for aval in leaves for size in aval.shape for name in re.findall(r"[A-Za-z_]\w*", str(size))}
    words = "|".join(["_DimExpr", "dim_as_value", *names])
    expected = isinstance(error, (TypeError, ValueError, IndexError, NotImplementedError))
    return expected and re.search(rf"\b({words})\b", str(error)) is not None


# -- what is known of a value ------------------------------------------------------------------


@dataclass(frozen=True)
class _Apart:
    """Positions lie apart on the one axis that mentions the dim: its entry i belongs to position i // inner % dim.

    The size of that axis is outer * dim * inner. Both are 1 on a whole axis; `[b, s, h] -> [b * s, h]` makes outer b.
    """

    outer: Any
    inner: Any


@dataclass(frozen=True)
class _Mixed:
    reason: str


_State = _Apart | _Mixed | None  # None: the same in every entry along the dim, if its shape mentions that at all


def _join(a: _State, b: _State) -> _State:
    """The state of a value that is one or the other, or made of both entry by entry."""
    if isinstance(a, _Mixed) or b is None:
        return a
    if isinstance(b, _Mixed) or a is None or a == b:
        return b
    return _Mixed("a branch or loop lays out positions in two ways")  # of operands, `_apply` says more


@dataclass(frozen=True)
class _Dim:
    name: str

    def within(self, value: Any) -> bool:
        """Whether a size, or any other parameter of an equation, mentions the dim. A jaxpr is read as printed."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return False
        return re.search(rf"\b{re.escape(self.name)}\b", str(value)) is not None

    def axes(self, aval: Any) -> list[int]:
        return [axis for axis, size in enumerate(getattr(aval, "shape", ())) if self.within(size)]

    def is_whole(self, aval: Any) -> bool:
        return [str(aval.shape[axis]) for axis in self.axes(aval)] in ([], [self.name])

    def layouts(self, state: _State, size: Any) -> list[_Apart]:
        """How positions may lie on an axis of this size. Where entries are all the same: slowest, or fastest."""
        if isinstance(state, _Apart):
            rest = _quotient(size, state.outer * state.inner)
            return [state] if str(rest) == self.name else []
        scope = getattr(size, "scope", None)
        rest = scope and _quotient(size, export.symbolic_shape(self.name, scope=scope)[0])
        return [] if rest is None or self.within(rest) else [_Apart(1, rest), _Apart(rest, 1)]


def _quotient(size: Any, factor: Any) -> Any:
    """size / factor where that is exact for all sizes, else None."""
    try:
        quotient = size // factor
        return quotient if quotient * factor == size else None
    except (ZeroDivisionError, jex.InconclusiveDimensionOperation):
        return None


def _text(aval: Any) -> str:
    return f"{short_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"


# -- the walk ----------------------------------------------------------------------------------


def _run(jaxpr: Any, arguments: Sequence[_State], dim: _Dim) -> list[_State]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or open; from JAX 0.11 on the two are one class
    env: dict[Any, _State] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> _State:  # what the environment lacks is a captured constant
        return None if isinstance(atom, jex.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        states = [read(atom) for atom in eqn.invars]
        outputs = _CONTROL.get(eqn.primitive.name, _leaf)(eqn, states, dim)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class _Equation:
    """One equation as its rule sees it: where the dim is in each operand, and where it is first found at all."""

    def __init__(self, eqn: Any, dim: _Dim) -> None:
        self.name: str = eqn.primitive.name
        self.params: dict[str, Any] = eqn.params
        self.inputs = [atom.aval for atom in eqn.invars]
        self.outputs = [atom.aval for atom in eqn.outvars]
        self.dim = dim
        self.axes = [next(iter(dim.axes(aval)), None) for aval in self.inputs]
        # These two may lay something out along the dim where no operand has it; elsewhere that reads its size.
        places = self.inputs + (self.outputs if self.name in ("broadcast_in_dim", "iota") else [])
        self.where = next((aval for aval in places if dim.axes(aval)), None)

    def mixes(self, verb: str) -> _Mixed:
        """`NAME VERB 'seq' (axis 1 of f32[batch,seq,64])`"""
        place = _text(self.outputs[0])
        if self.where is not None:
            place = f"axis {self.dim.axes(self.where)[0]} of {_text(self.where)}"
        return _Mixed(f"{self.name} {verb} {self.dim.name!r} ({place})")


def _leaf(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """An equation without control flow: all its results have one state."""
    state: _State = next((state for state in states if isinstance(state, _Mixed)), None)
    if state is None and eqn.outvars:
        state = _apply(_Equation(eqn, dim), functools.reduce(_join, states, None), bool(eqn.effects))
    return [state] * len(eqn.outvars)


def _apply(eqn: _Equation, state: _State, has_effects: bool) -> _State:
    """The state of the results, given the one that the operands, none of them mixed, agree on."""
    verb, keeps = _RULES.get(eqn.name, ("is not known to keep apart", lambda eqn, axis: False))
    if has_effects:  # behind the data flow: a mutable array may take a value to another position
        return eqn.mixes("has effects, which may join positions of")
    if isinstance(state, _Mixed):
        return eqn.mixes("lays out in two ways")
    if eqn.where is not None and not keeps(eqn, eqn.dim.axes(eqn.where)[0]):
        return eqn.mixes(verb)
    for key, value in eqn.params.items():
        nested = isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))
        if (nested or eqn.where is None) and eqn.dim.within(value):
            return _Mixed(f"{eqn.name} depends on the size of {eqn.dim.name!r} ({key}={value})")
    if eqn.name == "reshape" and eqn.where is not None:
        state = _reshaped(eqn, state)
    for aval in eqn.outputs:
        axes = eqn.dim.axes(aval)
        if len(axes) > 1:
            return eqn.mixes("crosses positions of")
        if bool(axes) != (eqn.where is not None) or (axes and not eqn.dim.layouts(state, aval.shape[axes[0]])):
            return eqn.mixes(verb)
    return state


def _reshaped(eqn: _Equation, state: _State) -> _State:
    """The dim keeps its place in row-major order: as many entries vary slower, and as many faster, as before."""
    (old_axis,), new_axes = eqn.dim.axes(eqn.inputs[0]), eqn.dim.axes(eqn.outputs[0])
    old, new = eqn.inputs[0].shape, eqn.outputs[0].shape
    if len(new_axes) == 1 and eqn.params.get("dimensions") is None:
        for layout in eqn.dim.layouts(state, old[old_axis]):
            outer = _quotient(math.prod(old[:old_axis]) * layout.outer, math.prod(new[: new_axes[0]]))
            inner = _quotient(layout.inner * math.prod(old[old_axis + 1 :]), math.prod(new[new_axes[0] + 1 :]))
            if outer is not None and inner is not None:
                return _Apart(outer, inner)
    return eqn.mixes("does not keep apart")


# -- rules of equations ------------------------------------------------------------------------

# What the primitive does to the dim where it mixes, and whether it keeps it apart given the axis of the first operand
# that has it. A result without the dim, or with it twice, is refused in any case, by `_apply`.
_Check = Callable[[_Equation, int], bool]
_Rule = tuple[str, _Check]


def _always(eqn: _Equation, axis: int) -> bool:
    """No check but that of the result's shape: an operand that lacks the axis is the same for all positions."""
    return True


def _not_along(key: str) -> _Check:
    return lambda eqn, axis: axis not in np.ravel(eqn.params[key])


def _in_full(eqn: _Equation, axis: int, size: Any) -> bool:
    return bool(size == eqn.inputs[0].shape[axis])


def _slice(eqn: _Equation, axis: int) -> bool:
    start, limit, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    return start[axis] == 0 and _in_full(eqn, axis, limit[axis]) and (strides is None or strides[axis] == 1)


def _reduce_window(eqn: _Equation, axis: int) -> bool:
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(eqn.params[key][axis] == 1 for key in keys) and not any(eqn.params["padding"][axis])


def _gather(eqn: _Equation, axis: int) -> bool:
    """A position looks up its own index in a shared table, or in its own slice, or all of them look up the same one.

    A slice that is full along the dim starts at 0. If the indices had the dim as well, the result would have it twice.
    """
    numbers, operand_axis = eqn.params["dimension_numbers"], eqn.axes[0]
    if operand_axis is None or operand_axis in numbers.operand_batching_dims:
        return True
    full = _in_full(eqn, operand_axis, eqn.params["slice_sizes"][operand_axis])
    return full and operand_axis not in numbers.collapsed_slice_dims


def _scatter(eqn: _Equation, axis: int) -> bool:
    """A position writes at its own index into its own slice, or all of them write at the same index."""
    numbers, (operand_axis, indices_axis, updates_axis) = eqn.params["dimension_numbers"], eqn.axes
    if operand_axis is None or updates_axis is None:
        return False
    batching, windows = list(numbers.operand_batching_dims), list(numbers.update_window_dims)
    if operand_axis in batching:
        pair = numbers.scatter_indices_batching_dims[batching.index(operand_axis)]
        scattered = [a for a in range(eqn.inputs[2].ndim) if a not in windows]  # as the axes of indices but the last
        return bool(indices_axis == pair and updates_axis == scattered[pair])
    window = [a for a in range(eqn.inputs[0].ndim) if a not in (*numbers.inserted_window_dims, *batching)]
    alike = indices_axis is None and operand_axis in window and windows[window.index(operand_axis)] == updates_axis
    return alike and _in_full(eqn, operand_axis, eqn.inputs[2].shape[updates_axis])


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul name ne neg nextafter not one_minus_square or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""


def _each_of(names: str, verb: str, keeps: _Check = _always) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), (verb, keeps))


_RULES: dict[str, _Rule] = {
    **_each_of("broadcast_in_dim transpose stack" + _ELEMENTWISE, "joins"),
    **_each_of("reduce reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor", "reduces over"),
    **_each_of("argmax argmin", "reduces over"),
    **_each_of("reduce_window reduce_window_sum reduce_window_max reduce_window_min", "slides over", _reduce_window),
    **_each_of("cumsum cumprod cummax cummin cumlogsumexp", "accumulates along", _not_along("axis")),
    **_each_of("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max", "writes positions of", _scatter),
    "squeeze": ("removes", _always),
    "unstack": ("takes apart", _always),
    "dot_general": ("contracts", _always),
    "reshape": ("does not keep apart", _always),
    "iota": ("counts along", _not_along("dimension")),
    "sort": ("sorts along", _not_along("dimension")),
    "concatenate": ("concatenates along", _not_along("dimension")),
    "rev": ("reverses", _not_along("dimensions")),
    "top_k": ("ranks", _not_along("axis")),
    "approx_top_k": ("ranks", _not_along("reduction_dimension")),
    "split": ("splits", _not_along("axis")),
    "pad": ("pads", lambda eqn, axis: not any(eqn.params["padding_config"][axis])),
    "tile": ("repeats", lambda eqn, axis: bool(eqn.params["reps"][axis] == 1)),
    "fft": ("transforms along", lambda eqn, axis: axis < eqn.inputs[0].ndim - len(eqn.params["fft_lengths"])),
    "slice": ("takes a part of", _slice),
    # The start is clamped, so along an axis that is taken in full it is 0.
    "dynamic_slice": ("takes a part of", lambda eqn, axis: _in_full(eqn, axis, eqn.params["slice_sizes"][axis])),
    "dynamic_update_slice": ("writes a part of", lambda eqn, axis: _in_full(eqn, axis, eqn.inputs[1].shape[axis])),
    "gather": ("picks from", _gather),
    "conv_general_dilated": (
        "slides over or contracts",
        lambda eqn, axis: (
            eqn.axes == [eqn.params["dimension_numbers"].lhs_spec[0], None] and eqn.params["batch_group_count"] == 1
        ),
    ),
}


# -- control flow: operands and results have a state each, mixed or not ------------------------


def _call(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    return _run(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], states, dim)


def _cond(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    branches = [_run(branch, states[1:], dim) for branch in eqn.params["branches"]]
    results = [functools.reduce(_join, options) for options in zip(*branches, strict=True)]
    return [states[0] if isinstance(states[0], _Mixed) else result for result in results]


def _while(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body, carry = states[:num_cond], states[num_cond:][:num_body], states[num_cond + num_body :]
    carry = _settled(carry, lambda carry: _run(eqn.params["body_jaxpr"], [*body, *carry], dim))
    (again,) = _run(eqn.params["cond_jaxpr"], [*cond, *carry], dim)
    return [again] * len(carry) if isinstance(again, _Mixed) else carry


def _scan(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    params = eqn.params
    if dim.within(params["length"]):
        return [_Mixed(f"scan runs over {dim.name!r} (length={params['length']})")] * len(eqn.outvars)
    if "ft_in" in params:  # from JAX 0.11 on
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = states[:num_consts], states[num_consts:][:num_carry], states[num_consts + num_carry :]
    return _settled(carry, lambda carry: _run(params["jaxpr"], consts + carry + xs, dim))


def _settled(carry: list[_State], body: Callable[[list[_State]], list[_State]]) -> list[_State]:
    """The states of a loop's carry that hold before and after every step, then of what a step returns beside it."""
    while True:
        results = body(carry)
        joined = [_join(before, after) for before, after in zip(carry, results, strict=False)]
        if joined == carry:
            return carry + results[len(carry) :]
        carry = joined


_CONTROL: dict[str, Callable[[Any, list[_State], _Dim], list[_State]]] = {
    **dict.fromkeys("jit pjit call closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call".split(), _call),
    **dict.fromkeys("remat2 checkpoint composite".split(), _call),
    **dict.fromkeys(["optimization_barrier", "device_put"], lambda eqn, states, dim: states),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
