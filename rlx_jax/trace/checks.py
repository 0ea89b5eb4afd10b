"""Checks of the arguments of `Builders` methods, and the two forms in which a builder may be called.

A builder's own signature has keyword-only arguments where positions could be confused (`heads=`, `keepdims=`). The
specification (IR 5.6) passes operands and then attributes by position, and names some of them differently. Both forms
write the same program. A call that fits neither form raises a `GraphError` with the name of the builder and its forms,
never a bare `TypeError`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args, get_type_hints

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, fields
from rlx_jax.errors import GraphError, RlxError, ShapeError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Op
from rlx_jax.ir.types import INITS, Init, TensorType, as_dim, is_static


def is_number(value: object) -> bool:
    """Return whether an operand is a plain number, which ops accept in place of a value."""
    return isinstance(value, bool | int | float | np.number | np.bool_)


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number of Python or NumPy, and no bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


# The Python types of values that an attribute with one of these annotations accepts.
PLAIN_TYPES = {bool: bool, int: int, float: int | float, str: str, type(None): type(None)}


def items_of(value: Any, where: str, expected: str) -> tuple[Any, ...]:
    """Return the entries of a list or other iterable; a string is not accepted.

    Raises:
        GraphError: `value` is not iterable.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise GraphError(f"{where}: expected {expected}, got {shown(value)}")
    return tuple(value)


def check_signature(
    fn: Callable[..., Any], arguments: tuple[str, ...], where: str, error: type[RlxError] = GraphError, *,
    named: bool = False,
) -> None:  # fmt: skip
    """Check that a user's function takes these positional arguments; with `named` it may require keyword ones too.

    Raises:
        GraphError, or the class `error`: it does not take them.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # functions in C may have no signature
        return
    try:
        (signature.bind_partial if named else signature.bind)(*arguments)
    except TypeError as cause:
        name = getattr(fn, "__name__", type(fn).__name__)
        call = f"{name}({', '.join(arguments)})"
        raise error(f"{where}: the function is called as {call}, but its signature is {signature}") from cause


def missing_method_text(writer: object, name: str | None) -> str:
    """Return message text about a name that `writer` does not have, with a suggestion."""
    suggestion = did_you_mean(name, (method for method in dir(writer) if not method.startswith("_")))
    return f"{quote(name)}{suggestion or '; docs/graph.md lists what it has'}"


def check_attributes(op: Op) -> None:
    """Check the attributes of an op that failed to be written against their plain annotated types.

    Raises:
        GraphError: names the first attribute of another type.
    """
    hints = get_type_hints(type(op))
    for f in fields(op):  # type: ignore[arg-type]  # every op is a dataclass
        value, hint = getattr(op, f.name), hints[f.name]
        plain = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if all(p in PLAIN_TYPES for p in plain) and not isinstance(value, tuple(PLAIN_TYPES[p] for p in plain)):
            expected = " or ".join("None" if p is type(None) else p.__name__ for p in plain)
            raise GraphError(f"{type(op).__name__}: {f.name} is {shown(value)}; expected {expected}")


def check_init(init: Init, where: str) -> Init:
    """Return an initializer after checking it.

    Raises:
        GraphError: it is neither one of the names, nor a function of `(key, shape, dtype)`.
    """
    if isinstance(init, str) and init not in INITS:
        raise GraphError(
            f"{where}: init {quote(init)}: expected one of {listing(INITS)}, or a function (key, shape, dtype) → array "
            f"such as jax.nn.initializers.normal(0.02){did_you_mean(init, INITS)}"
        )
    if not isinstance(init, str) and not callable(init):
        raise GraphError(f"{where}: init is {shown(init)}; expected one of {listing(INITS)}, or a function")
    if not isinstance(init, str):
        check_signature(init, ("key", "shape", "dtype"), f"{where}: init")
    return init


@dataclass(frozen=True)
class SpecForm:
    """The positional form of a builder in the specification.

    Args:
        order: the builder's parameters in the order of the specification. `*name` takes all values up to the first
            number; `?name` is skipped if the argument at its position is a number.
        deciding_index: position of the argument that decides between the forms for a call that fits both. A value of
            type `builder_type` selects the builder's own form, any other type this form.
    """

    order: str
    deciding_index: int | None = None
    builder_type: Any = str | int | float | None

    def is_selected_by(self, args: tuple[Any, ...]) -> bool:
        """Return whether a call that fits both forms is in this one, by the type of the deciding argument."""
        index = self.deciding_index
        return index is not None and len(args) > index and not isinstance(args[index], self.builder_type)

    def to_keywords(self, args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        """Return the values of a `*name`, and all other arguments by name.

        Raises:
            TypeError: there are too many arguments.
        """
        remaining, values, keywords = list(args), list[Any](), dict[str, Any]()
        for word in self.order.split():
            if word[0] == "*":
                while remaining and not is_number(remaining[0]):
                    values.append(remaining.pop(0))
            elif remaining and not (word[0] == "?" and is_number(remaining[0])):
                keywords[word.lstrip("?")] = remaining.pop(0)
        if remaining:
            raise TypeError("too many positional arguments")
        return values, keywords

    def __str__(self) -> str:
        return ", ".join(word.replace("?", "") for word in self.order.split())


_NUMBER = int | float | None
_LAYER = SpecForm("*operands heads head_dim kv_heads eps mask")
_RESIDUAL = SpecForm("x residual bias gamma beta eps", 4, _NUMBER)
_ATTENTION = SpecForm("q k v ?mask_value heads head_dim mask scale softcap")

# The builders with another order of arguments, or with keyword-only arguments that the specification passes by
# position.
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
    "q_matmul": SpecForm("x w bias x_zp w_zp out_zp mult"),
    "q_conv2d": SpecForm(
        "x w bias kernel window_strides padding rhs_dilation feature_group_count x_zp w_zp out_zp mult"
    ),
    "cumsum": SpecForm("x axis exclusive"),
    "selective_scan": SpecForm("x dt a b c state_size"),
    "sample": SpecForm("logits top_k top_p temperature seed"),
    "input_batch_seq": SpecForm("name batch seq hidden dtype", 1, int),
}

# Names of arguments in the specification, with the equivalent names of builders.
SPEC_NAMES: dict[str, tuple[str, ...]] = {
    "act": ("activation",), "attn_logit_softcap": ("softcap",), "axes": ("axis",), "b": ("bias",),
    "batch_sym": ("batch",), "cos": ("at",), "dilation": ("rhs_dilation",), "dim": ("head_dim",),
    "groups": ("feature_group_count",), "keep_dim": ("keepdims",), "len": ("length",), "mask_kind": ("mask",),
    "new_shape": ("shape",), "num_groups": ("groups",), "num_heads": ("heads",), "score_scale": ("scale",),
    "seq_sym": ("seq",), "stride": ("window_strides", "strides"), "target_shape": ("shape",), "to": ("dtype",),
}  # fmt: skip


def _check_kernel(writer: Any, kernel: Any, others: Mapping[str, Any]) -> None:
    """Check that the kernel of a convolution has the sizes of its weight's spatial axes."""
    weight = writer.type_of(writer.weight(others["w"]))
    if tuple(items_of(kernel, f"{writer.path}: kernel", "the sizes of a window")) != weight.shape[2:]:
        raise ShapeError(f"{writer.path}: the kernel is {shown(kernel)}, and the weight is {weight}")


def _check_num_heads(writer: Any, num_heads: Any, others: Mapping[str, Any]) -> None:
    """Check that the last axis of x has `num_heads` heads of width `head_dim`."""
    x, head_dim = writer.type_of(others["x"]), others["head_dim"]
    if x.rank < 1 or not is_static(x.shape[-1]) or x.shape[-1] != num_heads * head_dim:
        raise ShapeError(f"{writer.path}: {shown(num_heads)} heads of width {shown(head_dim)} do not make up x {x}")


def _check_state_size(writer: Any, state_size: Any, others: Mapping[str, Any]) -> None:
    """Check that the state of a selective scan is as wide as its A."""
    a = writer.type_of(others["a"])
    if a.shape[1:] != (state_size,):
        raise ShapeError(f"{writer.path}: the state size is {shown(state_size)}, and A is [H, n], got {a}")


# Arguments of the specification that are redundant given the operands: they are checked and not passed on.
REDUNDANT_ARGUMENTS: dict[str, Callable[[Any, Any, Mapping[str, Any]], None]] = {
    "kernel": _check_kernel, "num_heads": _check_num_heads, "state_size": _check_state_size,
}  # fmt: skip


# -- one call ------------------------------------------------------------------------------------

# Extra keyword arguments of every builder: the expected shape of its result, or one shape for each result.
SHAPE_KEYWORDS = ("out_shape", "out_shapes")

# Public methods of writers that only builders call; they need no checks of user calls.
INTERNAL = ("unwrap", "wrap", "weight", "type_of", "to_current_body", "lift")


def check_calls(cls: type[Any]) -> None:
    """Make every public method that a class of builders defines a `checked_call`."""
    for name, method in list(vars(cls).items()):
        if not name.startswith("_") and name not in INTERNAL and inspect.isfunction(method):
            unchecked = getattr(method, "unchecked", method)  # an alias may have another SpecForm than the original
            setattr(cls, name, checked_call(name, unchecked))


P = ParamSpec("P")
R = TypeVar("R")


def bind_kind(method: Callable[Concatenate[Any, str, P], R], kind: str, doc: str) -> Callable[Concatenate[Any, P], R]:
    """Return a builder that calls `method` with a fixed kind: `add(a, b)` is `binary("add", a, b)`."""

    def call(writer: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(writer, kind, *args, **kwargs)

    call.__doc__, call.base = doc, (method, (kind,))  # type: ignore[attr-defined]  # functions take attributes
    return call


def checked_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of a `Writer` extended by the specification's form of call, and by `out_shape=`.

    Raises:
        GraphError: a call fits no form. ShapeError: a result does not have its `out_shape`.
    """
    form, (body, kind) = SPEC_FORMS.get(name), getattr(method, "base", (method, ()))
    full_signature = inspect.signature(body)
    self_parameter, *parameters = full_signature.parameters.values()
    signature = full_signature.replace(parameters=[self_parameter, *parameters[len(kind) :]])

    @functools.wraps(method)
    def call(writer: Any, *args: Any, **kwargs: Any) -> Any:
        shape_keyword = next((key for key in SHAPE_KEYWORDS if key in kwargs and key not in signature.parameters), None)
        if shape_keyword is not None:
            out_shape = kwargs.pop(shape_keyword)
            return check_out_shape(writer, name, call(writer, *args, **kwargs), out_shape)
        # The builder's own form comes first, unless the type of an argument selects the specification's.
        reason: TypeError | None = None
        if form is None or not form.is_selected_by(args):
            try:
                return body(writer, *kind, *args, **kwargs)
            except TypeError as error:
                # A traceback with a second frame is an error inside the method; otherwise the arguments do not fit.
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                reason = error
        in_order = form if form is not None and (form.deciding_index is None or form.is_selected_by(args)) else None
        try:
            bound = _bound(writer, in_order, signature, args, kwargs)
        except TypeError as error:
            reason = error if kind or reason is None else reason  # Python's message would count the fixed kind
            raise GraphError(_call_error_text(writer, name, signature, kwargs, reason)) from reason
        return body(writer, *kind, *bound.args[1:], **bound.kwargs)

    call.__name__, call.__signature__, call.unchecked = name, signature, method  # type: ignore[attr-defined]
    return call


def _bound(
    writer: Any, form: SpecForm | None, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call bound to the builder's own parameters.

    Raises:
        TypeError: they do not fit the form of the specification either.
    """
    parameters = signature.parameters
    keywords = {(_builder_name(key, parameters) or key): value for key, value in kwargs.items()}
    if len(keywords) < len(kwargs):
        raise TypeError(f"got one argument under two names, {listing(kwargs)}")
    positional = list(args)
    if form is not None:
        positional, by_order = form.to_keywords(args)
        if duplicates := by_order.keys() & keywords.keys():
            raise TypeError(f"got multiple values for {listing(sorted(duplicates))}")
        keywords = by_order | keywords
    redundant = {key: keywords.pop(key) for key in REDUNDANT_ARGUMENTS if key in keywords and key not in parameters}
    bound = signature.bind(writer, *positional, **keywords)
    for key, value in redundant.items():
        REDUNDANT_ARGUMENTS[key](writer, value, keywords)
    return bound


def _builder_name(key: str, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the builder's own name of an argument that may have the specification's name, or None."""
    return key if key in parameters else next((n for n in SPEC_NAMES.get(key, ()) if n in parameters), None)


def _call_error_text(
    writer: Any, name: str, signature: inspect.Signature, kwargs: Mapping[str, Any], reason: TypeError
) -> str:
    """Return the error message of a call that fits no form of a builder, with all its forms."""
    parameters = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    spec = f", or by position {name}({SPEC_FORMS[name]})" if name in SPEC_FORMS else ""
    unknown_keyword = next((k for k in kwargs if k not in signature.parameters), None)
    suggestion = "" if unknown_keyword is None else did_you_mean(unknown_keyword, [p.name for p in parameters])
    detail = str(reason).rpartition("() ")[2]
    return f"{writer.path}: {name}: {detail}{suggestion}; expected {name}{plain}{spec}"


# -- out_shape -----------------------------------------------------------------------------------


def check_out_shape(writer: Any, name: str, result: Any, out_shape: Any) -> Any:
    """Return the result of a builder after checking `out_shape`: one shape for all results, or one for each."""
    if out_shape is None:
        return result
    values = jax.tree.leaves(result)
    where = f"{writer.path}: {name}"
    dims = items_of(out_shape, where, "a list of sizes as out_shape")
    several = isinstance(result, tuple | list | dict) and any(d is None or isinstance(d, tuple | list) for d in dims)
    shapes = dims if several else (dims,) * len(values)
    if len(shapes) != len(values):
        raise ShapeError(f"{where}: out_shape has {len(shapes)} shapes for {len(values)} results")
    for value, shape in zip(values, shapes, strict=True):
        inferred = writer.type_of(value)
        if shape is not None and (declared := tuple(as_dim(d, where) for d in shape)) != inferred.shape:
            raise ShapeError(f"{where}: declared {TensorType(declared, inferred.dtype)}, inferred {inferred}")
    return result
