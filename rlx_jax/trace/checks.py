"""What users give to the methods of `Builders`, held against what these take, and how a builder may be called.

A builder's own form names what could change places (`heads=`, `keepdims=`). The specification (IR 5.6) lists operands
and then attributes by position, with names of its own for some of them. Both write the same program. A call that fits
neither form is a `GraphError` with the name of the builder and its forms, never a bare `TypeError`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

import jax
import numpy as np

from rlx_jax.errors import GraphError, RlxError, ShapeError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Op
from rlx_jax.ir.initializers import INITS, Init
from rlx_jax.ir.types import TensorType, as_dim, is_static


def is_number(value: object) -> bool:
    """Whether an operand is a plain number, to stand beside a value."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


def check_count(value: Any, what: str, least: int = 1, error: type[RlxError] = GraphError) -> int:
    """Return a whole number of at least `least`; `what` says where it stands and what it is called.

    Raises:
        GraphError, or what `error` says: it is none.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise error(f"{what} is {shown(value)}; expected an integer of at least {least}")
    return int(value)


# What an attribute of one of these types may be.
PLAIN = {bool: bool, int: int, float: int | float, str: str, type(None): type(None)}


def items_of(value: Any, where: str, expected: str) -> tuple[Any, ...]:
    """The entries of a list; one entry alone is none.

    Raises:
        GraphError: it is no list.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise GraphError(f"{where}: expected {expected}, got {shown(value)}")
    return tuple(value)


def check_takes(
    fn: Callable[..., Any],
    arguments: tuple[str, ...],
    where: str,
    error: type[RlxError] = GraphError,
    *,
    named: bool = False,
) -> None:
    """A function of a user can be called with so many arguments by position, where `named` beside others by name.

    Raises:
        GraphError, or what `error` says: it cannot.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # what is written in C tells nothing
        return
    try:
        (signature.bind_partial if named else signature.bind)(*arguments)
    except TypeError as cause:
        name = getattr(fn, "__name__", type(fn).__name__)
        called = f"{name}({', '.join(arguments)})"
        raise error(f"{where}: the function is called as {called}, and it takes {signature}") from cause


def has_no(writer: object, name: str | None) -> str:
    """A name that `writer` does not have, and those close to it."""
    close = did_you_mean(name, (known for known in dir(writer) if not known.startswith("_")))
    return f"{quote(name)}{close or '; docs/graph.md lists what it has'}"


def check_attributes(op: Op) -> None:
    """The attributes of an op that could not be written are of their types, as far as those are plain.

    Raises:
        GraphError: names the first that is not.
    """
    hints = get_type_hints(type(op))
    for f in fields(op):  # type: ignore[arg-type]  # every op is a dataclass
        value, hint = getattr(op, f.name), hints[f.name]
        plain = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if all(p in PLAIN for p in plain) and not isinstance(value, tuple(PLAIN[p] for p in plain)):
            wanted = " or ".join("None" if p is type(None) else p.__name__ for p in plain)
            raise GraphError(f"{type(op).__name__}: {f.name} is {shown(value)}; expected {wanted}")


def check_init(init: Init, where: str) -> Init:
    """It, if it is one.

    Raises:
        GraphError: it is none of the names, and no function of these arguments.
    """
    if isinstance(init, str) and init not in INITS:
        raise GraphError(
            f"{where}: init {quote(init)}: expected one of {listing(INITS)}, or a function (key, shape, dtype) → array "
            f"such as jax.nn.initializers.normal(0.02){did_you_mean(init, INITS)}"
        )
    if not isinstance(init, str) and not callable(init):
        raise GraphError(f"{where}: init is {shown(init)}; expected one of {listing(INITS)}, or a function")
    if not isinstance(init, str):
        check_takes(init, ("key", "shape", "dtype"), f"{where}: init")
    return init


@dataclass(frozen=True)
class SpecForm:
    """The positional form of the specification.

    Args:
        order: the builder's own parameters in the order of the specification. `*name` takes all values up to the first
            number; `?name` is left out where a number stands in its place.
        place: an argument whose type decides where a call fits both forms; `own` is its type in the builder's own,
            and any other is meant for this one.
    """

    order: str
    place: int | None = None
    own: Any = str | int | float | None

    def is_meant(self, args: tuple[Any, ...]) -> bool:
        """Return whether the type of an argument says that a call which fits both forms is in this one."""
        return self.place is not None and len(args) > self.place and not isinstance(args[self.place], self.own)

    def by_name(self, args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Return the values of a `*name`, and all other arguments by name.

        Raises:
            TypeError: there are too many.
        """
        rest, values, keywords = list(args), list[Any](), dict[str, Any]()
        for word in self.order.split():
            if word[0] == "*":
                while rest and not is_number(rest[0]):
                    values.append(rest.pop(0))
            elif rest and not (word[0] == "?" and is_number(rest[0])):
                keywords[word.lstrip("?")] = rest.pop(0)
        if rest:
            raise TypeError("too many positional arguments")
        return values, keywords

    def __str__(self) -> str:
        return ", ".join(word.replace("?", "") for word in self.order.split())


_NUMBER = int | float | None
_LAYER = SpecForm("*operands heads head_dim kv_heads eps mask")
_RESIDUAL = SpecForm("x residual bias gamma beta eps", 4, _NUMBER)
_ATTENTION = SpecForm("q k v ?mask_value heads head_dim mask scale softcap")

# The builders whose own form has another order, or names what the specification gives by position.
SPEC_FORMS: dict[str, SpecForm] = {
    **dict.fromkeys(("linear", "linear_fused", "fused_matmul_bias_act"), SpecForm("x w bias activation")),
    **dict.fromkeys(("sum", "mean", "max", "min", "prod"), SpecForm("x axis keepdims")),
    **dict.fromkeys(("attention", "attention_kind", "attention_kind_opts"), _ATTENTION),
    **dict.fromkeys(("llama_decoder_block", "transformer_block"), _LAYER),
    **dict.fromkeys(("fused_residual_ln", "fused_residual_rms_norm"), _RESIDUAL),
    "qwen35_mtp_head": SpecForm("*operands heads kv_heads head_dim n_rot n_embd n_ff mtp_vocab eps"),
    "reduce": SpecForm("x kind axis keepdims", 0),
    "activation": SpecForm("x kind", 0),
    "swiglu_ffn": SpecForm("x up gate down"),
    **dict.fromkeys(("rope", "rope_n"), SpecForm("x at sin head_dim n_rot")),
    "axial_rope_2d": SpecForm("x end_x end_y head_dim num_heads theta repeat_factor"),
    "group_norm": SpecForm("x gamma beta groups eps", 1, _NUMBER),
    "conv2d": SpecForm("x w kernel window_strides padding rhs_dilation feature_group_count"),
    "conv_transpose2d": SpecForm("x w kernel strides padding rhs_dilation output_padding feature_group_count"),
    "lora_matmul": SpecForm("x w a b scale"),
    "cumsum": SpecForm("x axis exclusive"),
    "selective_scan": SpecForm("x dt a b c state_size"),
    "sample": SpecForm("logits top_k top_p temperature seed"),
    "input_batch_seq": SpecForm("name batch seq hidden dtype", 1, int),
}

# Names of arguments in the specification, and those of builders that mean the same.
SPEC_NAMES: dict[str, tuple[str, ...]] = {
    "act": ("activation",), "attn_logit_softcap": ("softcap",), "axes": ("axis",), "b": ("bias",),
    "batch_sym": ("batch",), "cos": ("at",), "dilation": ("rhs_dilation",), "dim": ("head_dim",),
    "groups": ("feature_group_count",), "keep_dim": ("keepdims",), "len": ("length",), "mask_kind": ("mask",),
    "new_shape": ("shape",), "num_groups": ("groups",), "num_heads": ("heads",), "score_scale": ("scale",),
    "seq_sym": ("seq",), "stride": ("window_strides", "strides"), "target_shape": ("shape",), "to": ("dtype",),
}  # fmt: skip


def _check_kernel(m: Any, kernel: Any, others: Mapping[str, Any]) -> None:
    """The kernel of a convolution is the size of its weight's spatial axes."""
    weight = m.type_of(m.weight(others["w"]))
    if tuple(items_of(kernel, f"{m.path}: kernel", "the sizes of a window")) != weight.shape[2:]:
        raise ShapeError(f"{m.path}: the kernel is {shown(kernel)}, and the weight is {weight}")


def _check_num_heads(m: Any, num_heads: Any, others: Mapping[str, Any]) -> None:
    """As many heads as the last axis of x has."""
    x, head_dim = m.type_of(others["x"]), others["head_dim"]
    if x.rank < 1 or not is_static(x.shape[-1]) or x.shape[-1] != num_heads * head_dim:
        raise ShapeError(f"{m.path}: {shown(num_heads)} heads of width {shown(head_dim)} are not x {x}")


def _check_state_size(m: Any, state_size: Any, others: Mapping[str, Any]) -> None:
    """The state of a selective scan is as wide as its A."""
    a = m.type_of(others["a"])
    if a.shape[1:] != (state_size,):
        raise ShapeError(f"{m.path}: the state size is {shown(state_size)}, and A is [H, n], got {a}")


# Arguments of the specification that follow from the operands: they are checked and not passed on.
CHECKED: dict[str, Callable[[Any, Any, Mapping[str, Any]], None]] = {
    "kernel": _check_kernel, "num_heads": _check_num_heads, "state_size": _check_state_size,
}  # fmt: skip


# -- one call ------------------------------------------------------------------------------------

# What every builder takes besides: the shape that its result is held against, or one for each of its results.
SHAPES = ("out_shape", "out_shapes")

# Methods of writers that builders call and users do not.
INTERNAL = ("own", "wrap", "weight", "type_of", "inside", "lift")


def check_calls(cls: type[Any]) -> None:
    """Make every public method that a class of builders defines a `checked_call`."""
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and name not in INTERNAL and inspect.isfunction(method):
            own = getattr(method, "unchecked", method)  # an alias has a form of its own
            setattr(cls, name, checked_call(name, own))


P = ParamSpec("P")
R = TypeVar("R")


def of_kind(method: Callable[Concatenate[Any, str, P], R], kind: str, doc: str) -> Callable[Concatenate[Any, P], R]:
    """Return the builder that is `method` for one kind: `add(a, b)` is `binary("add", a, b)`."""

    def call(m: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(m, kind, *args, **kwargs)

    call.__doc__, call.of = doc, (method, (kind,))  # type: ignore[attr-defined]  # functions take attributes
    return call


def checked_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of a `Writer`, callable in the form of the specification too, and with `out_shape=`.

    Raises:
        GraphError: a call fits no form. ShapeError: the results are not of `out_shape`.
    """
    form, (body, kind) = SPEC_FORMS.get(name), getattr(method, "of", (method, ()))
    whole = inspect.signature(body)
    first, *others = whole.parameters.values()
    signature = whole.replace(parameters=[first, *others[len(kind) :]])

    @functools.wraps(method)
    def call(m: Any, *args: Any, **kwargs: Any) -> Any:
        declared = next((key for key in SHAPES if key in kwargs and key not in signature.parameters), None)
        if declared is not None:
            out_shape = kwargs.pop(declared)
            return of_shape(m, name, call(m, *args, **kwargs), out_shape)
        reason: TypeError | None = None
        if form is None or not form.is_meant(args):
            try:
                return body(m, *kind, *args, **kwargs)
            except TypeError as error:
                # Raised by the call itself, not by a line of the method: the arguments do not fit.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                reason = error
        in_order = form if form is not None and (form.place is None or form.is_meant(args)) else None
        try:
            bound = _bound(m, in_order, signature, args, kwargs)
        except TypeError as error:
            reason = error if kind or reason is None else reason  # Python's own counts the kind
            raise GraphError(_refusal(m, name, signature, kwargs, reason)) from reason
        return body(m, *kind, *bound.args[1:], **bound.kwargs)

    call.__name__, call.__signature__, call.unchecked = name, signature, method  # type: ignore[attr-defined]
    return call


def _bound(
    m: Any, form: SpecForm | None, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments by the builder's own names.

    Raises:
        TypeError: they do not fit the specification either.
    """
    own = signature.parameters
    keywords = {(_own_name(key, own) or key): value for key, value in kwargs.items()}
    if len(keywords) < len(kwargs):
        raise TypeError(f"got one argument under two names, {listing(kwargs)}")
    positional = list(args)
    if form is not None:
        positional, by_order = form.by_name(args)
        if twice := by_order.keys() & keywords.keys():
            raise TypeError(f"got multiple values for {listing(sorted(twice))}")
        keywords = by_order | keywords
    implied = {key: keywords.pop(key) for key in CHECKED if key in keywords and key not in own}
    bound = signature.bind(m, *positional, **keywords)
    for key, value in implied.items():
        CHECKED[key](m, value, keywords)
    return bound


def _own_name(key: str, own: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the builder's own name of an argument."""
    return key if key in own else next((n for n in SPEC_NAMES.get(key, ()) if n in own), None)


def _refusal(m: Any, name: str, signature: inspect.Signature, kwargs: Mapping[str, Any], reason: TypeError) -> str:
    """Return a message with the forms of a builder."""
    own = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
    plain = signature.replace(parameters=own, return_annotation=signature.empty)
    spec = f", or by position {name}({SPEC_FORMS[name]})" if name in SPEC_FORMS else ""
    unknown = next((k for k in kwargs if k not in signature.parameters), None)
    close = "" if unknown is None else did_you_mean(unknown, [p.name for p in own])
    why = str(reason).rpartition("() ")[2]
    return f"{m.path}: {name}: {why}{close}; expected {name}{plain}{spec}"


# -- out_shape -----------------------------------------------------------------------------------


def of_shape(m: Any, name: str, result: Any, out_shape: Any) -> Any:
    """Return the result of a builder if it has the shape; of several results each has its own, or all have one."""
    if out_shape is None:
        return result
    values = jax.tree.leaves(result)
    where = f"{m.path}: {name}"
    dims = items_of(out_shape, where, "a list of sizes as out_shape")
    several = isinstance(result, tuple | list | dict) and any(d is None or isinstance(d, tuple | list) for d in dims)
    shapes = dims if several else (dims,) * len(values)
    if len(shapes) != len(values):
        raise ShapeError(f"{where}: out_shape has {len(shapes)} shapes for {len(values)} results")
    for value, shape in zip(values, shapes, strict=True):
        inferred = m.type_of(value)
        if shape is not None and (declared := tuple(as_dim(d, where) for d in shape)) != inferred.shape:
            raise ShapeError(f"{where}: declared {TensorType(declared, inferred.dtype)}, inferred {inferred}")
    return result
