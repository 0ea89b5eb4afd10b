"""Prove that a function computes every position along one dimension independently and in the same way.

A stage without a rule may be copied into the incremental program only if it is token-wise, and two requests may share
a batch only if no stage mixes rows of the batch. Both are the same claim about one symbolic dim. This module proves it
instead of sampling it: a numeric slicing test misses a mixer that happens to have no effect on the sample.

The function is traced with the dim as a symbol, so that shapes show on which axis the dim is. One walk over the jaxpr
then maintains an invariant. A value without the dim in its shape depends neither on the dim's size nor on the entries
along it. A value with the dim has it on one axis, and entry t of that axis depends on entry t of the inputs only. Any
other value is `_Mixed` and carries a message that names the primitive that produced it. A mixed value fails the proof
only if it reaches an output, because JAX leaves unused reads of sizes in its jaxprs.

An equation keeps the invariant by its rule in `_RULES` or `_CONTROL`; a primitive without a rule mixes. Many rules need
no check: `reduce_sum` cannot sum over the dim and still have it in its result.

Limit of the trace: `x.shape[1] == 1` is plain False for a symbol. A branch on it, or a `squeeze()` without an axis, is
therefore proved for the other sizes only. (`<` and `>` on symbols fail to trace, so they are refused.)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend import core as jex

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import first_line
from rlx_jax.ir.graph import BodyInput, Graph, Leaf, Value
from rlx_jax.ir.types import short_name
from rlx_jax.ir.user_functions import cached_formula, formula_key


@dataclass(frozen=True)
class Verdict:
    """Result of a proof by `token_wise`.

    Attributes:
        token_wise: whether the function is proved to be token-wise.
        reason: why there is no proof; empty if there is one.
        out_axes: the axis of the dim in each output leaf, None for a leaf that does not depend on it; empty without a
            proof.
    """

    token_wise: bool
    reason: str
    out_axes: tuple[int | None, ...]


def token_wise(fn: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], dim: str) -> Verdict:
    """Prove that entry t of `fn`'s outputs along `dim` is the same function of entry t of its inputs for every t.

    Args:
        fn: the function, of as many arguments as there are `avals`.
        avals: shapes and dtypes of the inputs. Each has `dim` as one full axis, or does not have it and is shared by
            all positions.
        dim: the name of the symbolic dimension.

    Returns:
        The verdict, with the axis of `dim` in each output or the reason why the proof fails.

    Raises:
        Exception: any error of tracing that is not caused by the symbolic sizes.

    >>> batch, seq = jax.export.symbolic_shape("batch, seq")
    >>> x = jax.ShapeDtypeStruct((batch, seq, 64), "float32")
    >>> token_wise(jax.nn.softmax, [x], "seq")
    Verdict(token_wise=True, reason='', out_axes=(1,))
    >>> token_wise(lambda x: x - x.sum(1, keepdims=True), [x], "seq").reason
    "reduce_sum reduces over 'seq' (axis 1 of f32[batch,seq,64])"
    """
    symbolic_dim = _Dim(dim)
    leaves = jax.tree.leaves(list(avals))
    for i, aval in enumerate(leaves):
        if not symbolic_dim.has_full_axis(aval):
            return Verdict(False, f"input {i} does not have {dim!r} as one full axis: {_text(aval)}", ())
    try:
        closed = jax.make_jaxpr(fn)(*avals)
    except Exception as error:
        if not _is_about_symbols(error, leaves):
            raise  # a fault of the function itself, which the caller should see
        return Verdict(False, f"does not trace with symbolic sizes: {first_line(error)}", ())
    states = _run(closed, [symbolic_dim.state_of_input(aval) for aval in leaves], symbolic_dim)
    return _verdict(states, closed.out_avals, symbolic_dim)


def token_wise_graph(graph: Graph, dim: str) -> Verdict:
    """Prove the claim of `token_wise` for a graph of tensor ops with plain values as attributes.

    It walks the jaxprs that type inference has traced already, op by op.

    Args:
        graph: the graph; its inputs are `BodyInput`, and its other leaves constants.
        dim: the name of the symbolic dimension.
    """
    symbolic_dim = _Dim(dim)
    states: dict[Value, _State] = {}
    for number, node in enumerate(graph.nodes):
        if isinstance(node.op, BodyInput):
            if not symbolic_dim.has_full_axis(node.op.type):
                reason = f"input {node.op.index} does not have {dim!r} as one full axis: {_text(node.op.type)}"
                return Verdict(False, reason, ())
            states[Value(number)] = symbolic_dim.state_of_input(node.op.type)
        elif isinstance(node.op, Leaf):
            states[Value(number)] = None
        else:
            operands = tuple(map(graph.type, node.inputs))
            try:
                closed = cached_formula(node.op, operands, formula_key(node.op))
            except Exception as error:  # an op with type rules of its own is traced here for the first time
                if not _is_about_symbols(error, operands):
                    raise
                return Verdict(False, f"does not trace with symbolic sizes: {first_line(error)}", ())
            results = _run(closed, [states[v] for v in node.inputs], symbolic_dim)
            states.update({Value(number, i): state for i, state in enumerate(results)})
    return _verdict([states[v] for v in graph.outputs], graph.output_types, symbolic_dim)


def _verdict(states: Sequence[_State], avals: Sequence[Any], dim: _Dim) -> Verdict:
    """Return the verdict for the states and the types of all outputs."""
    for i, (state, aval) in enumerate(zip(states, avals, strict=True)):
        if isinstance(state, _Mixed):
            return Verdict(False, state.reason, ())
        if not dim.has_full_axis(aval):
            return Verdict(False, f"output {i} does not have {dim.name!r} as one full axis: {_text(aval)}", ())
    return Verdict(True, "", tuple(next(iter(dim.axes(aval)), None) for aval in avals))


def _is_about_symbols(error: Exception, leaves: Sequence[Any]) -> bool:
    """Return whether tracing failed because a size is a symbol, rather than because the function is wrong anyway."""
    if isinstance(error, jex.InconclusiveDimensionOperation):
        return True
    # JAX has no common class for these errors, so that the message has to name a symbol or JAX's type of symbols.
    names = {name for aval in leaves for size in aval.shape for name in re.findall(r"[A-Za-z_]\w*", str(size))}
    words = "|".join(["_DimExpr", "dim_as_value", *names])
    expected = isinstance(error, (TypeError, ValueError, IndexError, NotImplementedError))
    return expected and re.search(rf"\b({words})\b", str(error)) is not None


# -- state of a value --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Separate:
    """State of a value with positions separate on one axis: entry i of it belongs to position i // inner % dim.

    The size of that axis is outer * dim * inner. Both factors are 1 if the axis is the dim alone; the reshape
    `[b, s, h] -> [b * s, h]` makes outer b.
    """

    outer: Any
    inner: Any


@dataclass(frozen=True)
class _Mixed:
    """State of a value that may mix positions, with a message that names the primitive and the axis."""

    reason: str


_State = _Separate | _Mixed | None  # None: independent of the position; all entries along the dim, if any, are the same


def _join(a: _State, b: _State) -> _State:
    """Return the state of a value that is one of two values, or is computed from both entry by entry."""
    if isinstance(a, _Mixed) or b is None:
        return a
    if isinstance(b, _Mixed) or a is None or a == b:
        return b
    # Only branches and loops report this message; `_apply_rule` replaces it by one that names the equation.
    return _Mixed("a branch or loop has two layouts of positions")


@dataclass(frozen=True)
class _Dim:
    """The symbolic dimension of the proof, by name."""

    name: str

    def occurs_in(self, value: Any) -> bool:
        """Return whether a size, or any other parameter of an equation, mentions the dim in its printed form."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return False
        return re.search(rf"\b{re.escape(self.name)}\b", str(value)) is not None

    def axes(self, aval: Any) -> list[int]:
        """Return the axes of an array with sizes that mention the dim."""
        return [axis for axis, size in enumerate(getattr(aval, "shape", ())) if self.occurs_in(size)]

    def has_full_axis(self, aval: Any) -> bool:
        """Return whether an array has the dim as one full axis, or does not have it."""
        return [str(aval.shape[axis]) for axis in self.axes(aval)] in ([], [self.name])

    def state_of_input(self, aval: Any) -> _State:
        """Return the state of an input, which has the dim as one full axis or does not have it."""
        return _Separate(1, 1) if self.axes(aval) else None

    def layouts(self, state: _State, size: Any) -> list[_Separate]:
        """Return the layouts that positions may have on an axis of this size.

        A value with all entries equal along the dim fits two: the dim as the slowest or as the fastest factor.
        """
        if isinstance(state, _Separate):
            rest = _quotient(size, state.outer * state.inner)
            return [state] if str(rest) == self.name else []
        scope = getattr(size, "scope", None)
        rest = scope and _quotient(size, export.symbolic_shape(self.name, scope=scope)[0])
        return [] if rest is None or self.occurs_in(rest) else [_Separate(1, rest), _Separate(rest, 1)]


def _quotient(size: Any, factor: Any) -> Any:
    """Return size / factor if that is exact for all values of the symbols, else None."""
    try:
        quotient = size // factor
        return quotient if quotient * factor == size else None
    except (ZeroDivisionError, jex.InconclusiveDimensionOperation):
        return None


def _text(aval: Any) -> str:
    return f"{short_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"


# -- the walk ----------------------------------------------------------------------------------


def _run(jaxpr: Any, arguments: Sequence[_State], dim: _Dim) -> list[_State]:
    """Return the states of a jaxpr's outputs, given the states of its arguments."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # closed or open; from JAX 0.11 on the two are one class
    env: dict[Any, _State] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> _State:
        # A variable that the environment does not have is a captured constant, the same for all positions.
        return None if isinstance(atom, jex.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        states = [read(atom) for atom in eqn.invars]
        outputs = _CONTROL.get(eqn.primitive.name, _plain_equation)(eqn, states, dim)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class _Equation:
    """One equation for its rule: the axis of the dim in each operand, and the first value with the dim (`where`)."""

    def __init__(self, eqn: Any, dim: _Dim) -> None:
        self.name: str = eqn.primitive.name
        self.params: dict[str, Any] = eqn.params
        self.inputs = [atom.aval for atom in eqn.invars]
        self.outputs = [atom.aval for atom in eqn.outvars]
        self.dim = dim
        self.axes = [next(iter(dim.axes(aval)), None) for aval in self.inputs]
        # These two may create the dim in their result although no operand has it. Any other primitive that does so
        # has read the dim's size.
        candidates = self.inputs + (self.outputs if self.name in ("broadcast_in_dim", "iota") else [])
        self.where = next((aval for aval in candidates if dim.axes(aval)), None)

    def mixes(self, verb: str) -> _Mixed:
        """Return the state with the message `NAME VERB 'seq' (axis 1 of f32[batch,seq,64])`."""
        location = _text(self.outputs[0])
        if self.where is not None:
            location = f"axis {self.dim.axes(self.where)[0]} of {_text(self.where)}"
        return _Mixed(f"{self.name} {verb} {self.dim.name!r} ({location})")


def _plain_equation(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """Return the states of the results of an equation without control flow; all results have the same state."""
    state: _State = next((state for state in states if isinstance(state, _Mixed)), None)
    if state is None and eqn.outvars:
        state = _apply_rule(_Equation(eqn, dim), functools.reduce(_join, states, None), bool(eqn.effects))
    return [state] * len(eqn.outvars)


def _apply_rule(eqn: _Equation, state: _State, has_effects: bool) -> _State:
    """Return the state of an equation's results.

    Args:
        eqn: the equation; none of its operands is mixed.
        state: the state that its operands have in common, `_Mixed` if they lay out positions differently.
        has_effects: whether the equation reads or writes mutable arrays, or has other effects.
    """
    verb, keeps = _RULES.get(eqn.name, ("has no rule that proves independence along", lambda eqn, axis: False))
    if has_effects:  # invisible in the data flow: a mutable array may carry a value to another position
        return eqn.mixes("has effects, which may join positions of")
    if isinstance(state, _Mixed):
        return eqn.mixes("has operands with two layouts of")
    if eqn.where is not None and not keeps(eqn, eqn.dim.axes(eqn.where)[0]):
        return eqn.mixes(verb)
    for key, value in eqn.params.items():
        nested = isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))
        # Parameters may name the dim where they describe its axis. A nested jaxpr, or an equation on values without
        # the dim, computes with its size.
        if (nested or eqn.where is None) and eqn.dim.occurs_in(value):
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
    """Return the state of a reshape's result.

    Positions stay separate if the dim keeps its place in row-major order: as many entries vary slower, and as many
    faster, as in the operand.
    """
    (old_axis,), new_axes = eqn.dim.axes(eqn.inputs[0]), eqn.dim.axes(eqn.outputs[0])
    old, new = eqn.inputs[0].shape, eqn.outputs[0].shape
    if len(new_axes) == 1 and eqn.params.get("dimensions") is None:
        for layout in eqn.dim.layouts(state, old[old_axis]):
            outer = _quotient(math.prod(old[:old_axis]) * layout.outer, math.prod(new[: new_axes[0]]))
            inner = _quotient(layout.inner * math.prod(old[old_axis + 1 :]), math.prod(new[new_axes[0] + 1 :]))
            if outer is not None and inner is not None:
                return _Separate(outer, inner)
    return eqn.mixes("mixes positions of")


# -- rules of equations ------------------------------------------------------------------------

# A rule is a verb for the message (what the primitive does to the dim if it mixes) and a check: whether positions stay
# separate, given the axis of the first operand that has the dim. `_apply_rule` refuses in any case a result that lost
# the dim, or that has it twice.
_Check = Callable[[_Equation, int], bool]
_Rule = tuple[str, _Check]


def _always(eqn: _Equation, axis: int) -> bool:
    """Return True: the check of the result's shape suffices, as all positions share an operand without the dim."""
    return True


def _not_the_axis(key: str) -> _Check:
    """Return a check that the primitive's parameter `key`, an axis or several, does not include the dim's axis."""
    return lambda eqn, axis: axis not in np.ravel(eqn.params[key])


def _is_full_size(eqn: _Equation, axis: int, size: Any) -> bool:
    """Return whether `size` is the full size of the first operand's axis."""
    return bool(size == eqn.inputs[0].shape[axis])


def _slice(eqn: _Equation, axis: int) -> bool:
    """Return whether a slice takes the axis in full and in order."""
    start, limit, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    return start[axis] == 0 and _is_full_size(eqn, axis, limit[axis]) and (strides is None or strides[axis] == 1)


def _reduce_window(eqn: _Equation, axis: int) -> bool:
    """Return whether the window covers one position at a time, without padding."""
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(eqn.params[key][axis] == 1 for key in keys) and not any(eqn.params["padding"][axis])


def _gather(eqn: _Equation, axis: int) -> bool:
    """Return whether every position gathers from a shared table, from its own slice, or at one index that all share.

    A slice that is full along the dim starts at 0. If the indices had the dim as well, the result would have it twice.
    """
    numbers, operand_axis = eqn.params["dimension_numbers"], eqn.axes[0]
    if operand_axis is None or operand_axis in numbers.operand_batching_dims:
        return True
    full = _is_full_size(eqn, operand_axis, eqn.params["slice_sizes"][operand_axis])
    return full and operand_axis not in numbers.collapsed_slice_dims


def _scatter(eqn: _Equation, axis: int) -> bool:
    """Return whether every position writes at its own index into its own slice, or all write at the same index."""
    numbers, (operand_axis, indices_axis, updates_axis) = eqn.params["dimension_numbers"], eqn.axes
    if operand_axis is None or updates_axis is None:
        return False  # positions write to one shared array, or write updates that they share: no proof
    batching, windows = list(numbers.operand_batching_dims), list(numbers.update_window_dims)
    if operand_axis in batching:
        pair = numbers.scatter_indices_batching_dims[batching.index(operand_axis)]
        scattered = [a for a in range(eqn.inputs[2].ndim) if a not in windows]  # as the axes of indices but the last
        return bool(indices_axis == pair and updates_axis == scattered[pair])
    window = [a for a in range(eqn.inputs[0].ndim) if a not in (*numbers.inserted_window_dims, *batching)]
    shared = indices_axis is None and operand_axis in window and windows[window.index(operand_axis)] == updates_axis
    return shared and _is_full_size(eqn, operand_axis, eqn.inputs[2].shape[updates_axis])


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul name ne neg nextafter not one_minus_square or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta
"""


def _same_rule(names: str, verb: str, keeps: _Check = _always) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), (verb, keeps))


_RULES: dict[str, _Rule] = {
    **_same_rule("broadcast_in_dim transpose stack" + _ELEMENTWISE, "joins"),
    **_same_rule("reduce reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor", "reduces over"),
    **_same_rule("argmax argmin", "reduces over"),
    **_same_rule("reduce_window reduce_window_sum reduce_window_max reduce_window_min", "slides over", _reduce_window),
    **_same_rule("cumsum cumprod cummax cummin cumlogsumexp", "accumulates along", _not_the_axis("axis")),
    **_same_rule(
        "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max", "writes positions of", _scatter
    ),
    "squeeze": ("removes", _always),
    "unstack": ("unstacks", _always),
    "dot_general": ("contracts", _always),
    "reshape": ("mixes positions of", _always),
    "iota": ("counts along", _not_the_axis("dimension")),
    "sort": ("sorts along", _not_the_axis("dimension")),
    "concatenate": ("concatenates along", _not_the_axis("dimension")),
    "rev": ("reverses", _not_the_axis("dimensions")),
    "top_k": ("ranks", _not_the_axis("axis")),
    "approx_top_k": ("ranks", _not_the_axis("reduction_dimension")),
    "split": ("splits", _not_the_axis("axis")),
    "pad": ("pads", lambda eqn, axis: not any(eqn.params["padding_config"][axis])),
    "tile": ("repeats", lambda eqn, axis: bool(eqn.params["reps"][axis] == 1)),
    "fft": ("transforms along", lambda eqn, axis: axis < eqn.inputs[0].ndim - len(eqn.params["fft_lengths"])),
    "slice": ("takes a part of", _slice),
    # The start is clamped, so along an axis that is taken in full it is 0.
    "dynamic_slice": ("takes a part of", lambda eqn, axis: _is_full_size(eqn, axis, eqn.params["slice_sizes"][axis])),
    "dynamic_update_slice": ("writes a part of", lambda eqn, axis: _is_full_size(eqn, axis, eqn.inputs[1].shape[axis])),
    "gather": ("picks from", _gather),
    "conv_general_dilated": (
        "slides over or contracts",
        lambda eqn, axis: (
            eqn.axes == [eqn.params["dimension_numbers"].lhs_spec[0], None] and eqn.params["batch_group_count"] == 1
        ),
    ),
}


# -- control flow: each operand and each result has its state, mixed or not --------------------


def _call(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """Return the states of a call's results: the output states of the jaxpr that it calls."""
    return _run(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], states, dim)


def _cond(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """Return the states of a cond's results: all mixed if the index is, else the joined states of the branches."""
    branches = [_run(branch, states[1:], dim) for branch in eqn.params["branches"]]
    results = [functools.reduce(_join, options) for options in zip(*branches, strict=True)]
    return [states[0] if isinstance(states[0], _Mixed) else result for result in results]


def _while(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """Return the states of a while loop's results: all are mixed if its condition is."""
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body, carry = states[:num_cond], states[num_cond:][:num_body], states[num_cond + num_body :]
    carry = _fixed_point(carry, lambda carry: _run(eqn.params["body_jaxpr"], [*body, *carry], dim))
    (condition,) = _run(eqn.params["cond_jaxpr"], [*cond, *carry], dim)
    return [condition] * len(carry) if isinstance(condition, _Mixed) else carry


def _scan(eqn: Any, states: list[_State], dim: _Dim) -> list[_State]:
    """Return the states of a scan's results: all are mixed if it runs over the dim itself."""
    params = eqn.params
    if dim.occurs_in(params["length"]):
        return [_Mixed(f"scan runs over {dim.name!r} (length={params['length']})")] * len(eqn.outvars)
    if "ft_in" in params:  # from JAX 0.11 on
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = states[:num_consts], states[num_consts:][:num_carry], states[num_consts + num_carry :]
    return _fixed_point(carry, lambda carry: _run(params["jaxpr"], consts + carry + xs, dim))


def _fixed_point(carry: list[_State], body: Callable[[list[_State]], list[_State]]) -> list[_State]:
    """Return the states of a loop's carry, valid before and after every step, then the states of its other results."""
    while True:  # ends: joining only moves a state from None to separate to mixed
        results = body(carry)
        joined = [_join(old, new) for old, new in zip(carry, results, strict=False)]
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
