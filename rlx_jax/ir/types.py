"""Dimensions, dtypes and tensor types of the IR, and the checks of those that users give.

A dimension is an `int` or a symbolic dimension of `jax.export` (`batch`, `seq`, `seq + past`). All symbols live
in one process-wide scope, because JAX refuses to compare dimensions of two `symbolic_shape` calls.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import export

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import (
    DTypeError,
    GraphError,
    ShapeError,
    UnsupportedError,
    WeightShapeError,
    did_you_mean,
    integer_text,
    listing,
    quote,
    shown,
)

_SCOPE = export.SymbolicScope()
_SYMBOLS: dict[str, Any] = {}
# Limit of the size of one dimension.
MAX_DIM = 2**31 - 1
# Limit of the number of dimensions of a tensor.
MAX_RANK = 8
# Limit of the number of terms (symbols and numbers) of a dimension that is a sum.
MAX_TERMS = 4
# Limit of the number of elements of a tensor: XLA aborts the process where their product overflows.
MAX_ELEMENTS = 2**40
# Limit of the characters of a name (of a flow, an input, an output, a dimension): messages print names in full.
MAX_NAME = 120

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)

# An `int` or a symbolic dimension (jax's `_DimExpr`, which has no public name).
DimLike = Any
_DimMethod = Callable[["Dim", Any], "Dim | int"]

# Short names are what dumps print and profiles accept; the long ones are NumPy's.
DTYPE_NAMES: dict[str, str] = {
    "bool": "bool", "u8": "uint8", "i8": "int8", "i16": "int16", "u16": "uint16", "i32": "int32", "u32": "uint32",
    "i64": "int64", "u64": "uint64", "i4": "int4", "u4": "uint4", "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2", "f8_e4m3fnuz": "float8_e4m3fnuz", "f8_e5m2fnuz": "float8_e5m2fnuz", "bf16": "bfloat16",
    "f16": "float16", "f32": "float32", "f64": "float64", "c64": "complex64",
}  # fmt: skip
_SHORT = {long: short for short, long in DTYPE_NAMES.items()}
_BY_NAME = {**DTYPE_NAMES, **{long: long for long in DTYPE_NAMES.values()}}


def as_dtype(dtype: Any, where: str = "") -> np.dtype[Any]:
    """Return the NumPy dtype for a short name (`bf16`), a long name or anything that NumPy takes.

    Raises:
        DTypeError: the name is unknown or the dtype is not supported. The message begins with `where`.
    """
    if isinstance(dtype, str):
        if dtype not in _BY_NAME:
            choices = f"; known are {listing(DTYPE_NAMES, len(DTYPE_NAMES))}"
            raise DTypeError(f"{where}unknown dtype {quote(dtype)}{did_you_mean(dtype, _BY_NAME) or choices}")
        dtype = _BY_NAME[dtype]  # ml_dtypes adds its names to those of NumPy
    try:
        np_dtype: np.dtype[Any] = np.dtype(dtype if dtype is not None else "none")  # NumPy takes None for float64
    except TypeError as error:
        raise DTypeError(f"{where}{quote(dtype)} is not a dtype") from error
    if np_dtype.name not in _SHORT:
        raise DTypeError(f"{where}dtype {quote(np_dtype)} is not supported; supported are {', '.join(DTYPE_NAMES)}")
    return np_dtype


def short_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in dumps, such as `f32` for float32."""
    return _SHORT.get(dtype.name, str(dtype))


_IN_32_BITS = {"int64": np.dtype(np.int32), "uint64": np.dtype(np.uint32), "float64": np.dtype(np.float32)}


def device_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that programs use for `dtype`: 32 bits instead of 64, which JAX disables by default."""
    return _IN_32_BITS.get(dtype.name, dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is a real floating dtype, including bf16 and f8."""
    return bool(jax.numpy.issubdtype(dtype, np.floating))


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is an integer dtype, including 4-bit integers."""
    return bool(jax.numpy.issubdtype(dtype, np.integer))


def is_lossless_cast(narrow: np.dtype[Any], wide: np.dtype[Any]) -> bool:
    """Return whether `wide` represents every value of `narrow` exactly.

    >>> is_lossless_cast(np.dtype("float16"), np.dtype("float32"))
    True
    >>> is_lossless_cast(np.dtype("float32"), np.dtype("float16"))
    False
    """
    if narrow == wide:
        return True
    if is_float(narrow) and is_float(wide):
        # numpy.finfo knows bf16 and f8 only through ml_dtypes.
        a, b = ml_dtypes.finfo(narrow), ml_dtypes.finfo(wide)
        return bool(
            a.nmant <= b.nmant
            and float(a.max) <= float(b.max)
            and float(a.smallest_subnormal) >= float(b.smallest_subnormal)
        )
    return bool(np.can_cast(narrow, wide, casting="safe"))


def symbol(name: str) -> DimLike:
    """Return the symbolic dimension `name`: the same object for every call with this name."""
    if name not in _SYMBOLS:
        if not name.isidentifier():
            raise ShapeError(f"a symbolic dimension is a plain identifier, got {quote(name)}")
        as_name(name, "a symbolic dimension")
        (_SYMBOLS[name],) = export.symbolic_shape(name, scope=_SCOPE)
    return _SYMBOLS[name]


def as_name(name: Any, where: str) -> str:
    """Check one name that a user gives, and return it.

    Raises:
        GraphError: it is not a printable, non-empty string of at most `MAX_NAME` characters.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise GraphError(f"{where}: a name is a printable string that is not empty, got {quote(name)}")
    if len(name) > MAX_NAME:
        raise GraphError(f"{where}: {quote(name)} has {len(name)} characters, over the limit MAX_NAME = {MAX_NAME}")
    return name


def as_names(names: Any, where: str) -> tuple[str, ...]:
    """Check a list of names that a user gives, and return it as a tuple.

    Raises:
        GraphError: it is not a list of valid names, or contains one twice.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise GraphError(f"{where}: expected a list of names, got {shown(names)}")
    valid_names = tuple(as_name(name, where) for name in names)
    if len(set(valid_names)) < len(valid_names):
        raise GraphError(f"{where}: a name occurs twice in {listing(valid_names)}")
    return valid_names


def as_dim(dim: Any, where: str) -> DimLike:
    """Check one dimension that a user gives, and return it as an int or a symbolic dimension.

    Args:
        dim: an identifier, a sum such as `past + seq`, an int in 1 … 2³¹−1, a `Dim`, or a symbol of `jax.export`.
        where: the beginning of messages.

    Raises:
        ShapeError: it is none of these.
    """
    if isinstance(dim, Dim):
        return dim.expr
    if isinstance(dim, str):
        first_term, *other_terms = (term.strip() for term in dim.split("+"))
        # A repeated term would become `2*seq`, which is no sum.
        if len({first_term, *other_terms}) <= len(other_terms) or len(other_terms) >= MAX_TERMS:
            raise ShapeError(f"{where}: a sum has up to {MAX_TERMS} terms, each of them once; got {quote(dim)}")
        return sum((_term(term) for term in other_terms), start=symbol(first_term))
    if export.is_symbolic_dim(dim):
        return dim
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer):  # bool is a subclass of int
        tracer_hint = (
            "; a traced number is no size: call it outside of jax.jit" if isinstance(dim, jax.core.Tracer) else ""
        )
        hint = "; name a size that is not known, such as 'batch'" if dim is None else tracer_hint
        raise ShapeError(f"{where}: a dimension is an identifier or an int, got {shown(dim)}{hint}")
    if not 1 <= int(dim) <= MAX_DIM:
        raise ShapeError(f"{where}: a dimension is between 1 and {MAX_DIM}, got {integer_text(int(dim))}")
    return int(dim)


def _term(text: str) -> DimLike:
    return int(text) if text.isascii() and text.isdigit() else symbol(text)


def bind_dim(dim: DimLike, binding: Mapping[str, int]) -> DimLike:
    """Return the size of a dimension under `binding`, or the dimension itself if it is static or a symbol is unbound.

    Args:
        dim: an int, a symbol, or a sum of symbols and ints.
        binding: sizes by the name of the symbol.
    """
    if is_static(dim):
        return dim
    terms = [binding.get(term, _term(term)) if term.isidentifier() else _term(term) for term in terms_of(dim)]
    return sum(terms) if terms and all(is_static(t) for t in terms) else dim


def terms_of(dim: DimLike) -> tuple[str, ...]:
    """Return the terms of a sum of symbols and ints, such as `("past", "seq")` for `past + seq`.

    Return () if the dimension is another expression.
    """
    terms = tuple(str(dim).split(" + "))
    return terms if all(t.isidentifier() or t.isdigit() for t in terms) else ()


def is_static(dim: DimLike) -> bool:
    """Return whether a dimension is a plain int."""
    return not export.is_symbolic_dim(dim)


def symbols_of(dim: DimLike) -> frozenset[str]:
    """Return the names of the symbols in a dimension."""
    if is_static(dim):
        return frozenset()
    # JAX has no public way to list symbols. The text also contains function names such as `floordiv`.
    return frozenset(re.findall(r"[^\W\d]\w*", str(dim))) & _SYMBOLS.keys()


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a value. Types are always strong: JAX's weak types do not exist in the IR."""

    shape: tuple[DimLike, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{short_name(self.dtype)}[{','.join(str(d) for d in self.shape)}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return all(is_static(d) for d in self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        """Names of all symbols in the shape."""
        return frozenset().union(*(symbols_of(d) for d in self.shape))

    @property
    def size(self) -> int:
        """Number of elements; the shape must be static."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes; the shape must be static."""
        return self.size * self.dtype.itemsize

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """The type as `jax.eval_shape` and `jax.make_jaxpr` take it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle symbols by name, so that they become symbols of the process that unpickles them."""
        return _unpickle_type, (tuple(d if is_static(d) else dim_text(d) for d in self.shape), self.dtype)

    def __copy__(self) -> TensorType:  # immutable; a copy by way of `__reduce__` would refuse other expressions
        return self

    def __deepcopy__(self, memo: Any) -> TensorType:
        return self

    def with_dtype(self, dtype: Any) -> TensorType:
        """Return the type with the same shape and another dtype."""
        return TensorType(self.shape, as_dtype(dtype))

    def bind(self, binding: Mapping[str, int]) -> TensorType:
        """Return the type with sizes in place of the dimensions that are a bound symbol or a sum of bound symbols."""
        return TensorType(tuple(bind_dim(d, binding) for d in self.shape), self.dtype)


def _unpickle_type(shape: tuple[int | str, ...], dtype: np.dtype[Any]) -> TensorType:
    return TensorType(tuple(as_dim(d, "a pickled type") if isinstance(d, str) else d for d in shape), dtype)


def dim_text(dim: DimLike) -> str:
    """Return a symbolic dimension as text that `as_dim` reads.

    Raises:
        UnsupportedError: it is not a sum of symbols and ints.
    """
    if terms := terms_of(dim):
        return " + ".join(terms)
    raise UnsupportedError(f"dimension {dim}: only sizes, symbols and sums of them can be stored")


def tensor_type(shape: Sequence[Any], dtype: Any, where: str) -> TensorType:
    """Return the type of a shape and a dtype that a user gives.

    Raises:
        ShapeError: the rank is over 8, a dimension is out of range, or there are over 2⁴⁰ elements.
        DTypeError: the dtype is unknown.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise ShapeError(f"{where}: a shape is a tuple of identifiers and ints, got {quote(shape)}")
    if len(shape) > MAX_RANK:
        raise ShapeError(f"{where}: rank {len(shape)} is over the limit of {MAX_RANK}")
    dims = tuple(as_dim(d, where) for d in shape)
    check_elements(dims, where)
    return TensorType(dims, as_dtype(dtype))


def check_elements(shape: Sequence[DimLike], where: str) -> None:
    """Check that the static dimensions make at most 2⁴⁰ elements.

    XLA would abort the process where their product overflows.

    Raises:
        ShapeError: they make more; the message has the dimension or the number of elements, and the limit.
    """
    static_dims = [d for d in shape if is_static(d)]
    if max(static_dims, default=0) > MAX_DIM:
        raise ShapeError(f"{where}: dimension {integer_text(int(max(static_dims)))} is over the limit of {MAX_DIM}")
    elements = math.prod(static_dims)
    if elements > MAX_ELEMENTS:
        raise ShapeError(f"{where}: {elements} elements are over the limit of {MAX_ELEMENTS}")


def _arithmetic(op: Callable[[DimLike, DimLike], DimLike]) -> tuple[_DimMethod, _DimMethod]:
    """Return the two methods of `Dim` for an operator of two sizes: `dim op other` and `other op dim`."""
    return lambda dim, other: _apply_operator(op, dim, other), lambda dim, other: _apply_operator(op, other, dim)


def _apply_operator(op: Callable[[DimLike, DimLike], DimLike], left: Any, right: Any) -> Dim | int:
    """Return the result of JAX's own arithmetic of sizes.

    Raises:
        ShapeError: JAX does not define the operation for these operands. Python then never tries the reflected method
            of the other operand, as it would after `NotImplemented`.
    """
    sizes = (_expr(left), _expr(right))
    try:
        # JAX would accept some other operands, such as floats, and give a result that is no size.
        if any(not isinstance(s, int | np.integer) and is_static(s) for s in sizes):
            raise TypeError("sizes go with whole numbers and other sizes")
        result = op(*sizes)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        dim = left if isinstance(left, Dim) else right
        raise ShapeError(
            f"symbolic dimension {dim}: {op.__name__}({shown(left)}, {shown(right)}) is not a size while the "
            "flow is traced: sizes support +, -, *, //, %, divmod and whole powers, with integers and other "
            "sizes; or give the input a static size"
        ) from error
    return int(result) if is_static(result) else Dim(result)


class Dim:
    """A symbolic dimension as user code sees it: arithmetic works, and a comparison with a number is an error.

    In JAX `seq == 1` is silently False, and a program traced that way is wrong for length 1.
    """

    __slots__ = ("expr",)

    def __init__(self, expr: DimLike) -> None:
        self.expr = expr

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(operator.floordiv)
    __mod__, __rmod__ = _arithmetic(operator.mod)
    __pow__, __rpow__ = _arithmetic(operator.pow)
    __truediv__, __rtruediv__ = _arithmetic(operator.truediv)

    def __divmod__(self, other: Any) -> tuple[Dim | int, Dim | int]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Dim | int, Dim | int]:
        return other // self, other % self

    def __neg__(self) -> Dim | int:
        return 0 - self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            return bool(self.expr == other.expr)
        if isinstance(other, str):  # a comparison by name, such as `x.shape[0] == "batch"`, depends on no size
            return str(self.expr) == other
        raise ShapeError(self._comparison_error(other))

    def __hash__(self) -> int:
        return hash(self.expr)

    def __lt__(self, other: object) -> bool:
        raise ShapeError(self._comparison_error(other))

    __gt__ = __le__ = __ge__ = __lt__

    def __bool__(self) -> bool:
        raise ShapeError(self._comparison_error("a truth value"))

    def __index__(self) -> int:
        raise ShapeError(
            f"the size of symbolic dimension {self.expr} is not known while the flow is traced: JAX functions are "
            "called through emit.jax(fn, value), .reshape takes a size as it is; or give the input a static size"
        )

    __int__ = __index__

    def __repr__(self) -> str:
        return str(self.expr)

    def _comparison_error(self, other: object) -> str:
        return (
            f"symbolic dimension {self.expr} cannot be compared with {other!r} while the flow is traced: "
            "one program serves every size; declare the input with a static size to specialise"
        )


def _expr(value: Any) -> DimLike:
    return value.expr if isinstance(value, Dim) else value


# Custom initializers of weights that no checkpoint contains.


# `(key, shape, dtype) → array`, as the functions that `jax.nn.initializers` returns.
InitFunction = Callable[[jax.Array, tuple[int, ...], Any], Any]

# A name in `INITS`, or a function.
Init = str | InitFunction

# Zeros, ones, and rows or columns of length 1 that are orthogonal to each other (Saxe et al. 2013).
INITS: Mapping[str, InitFunction] = {
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
    "orthogonal": jax.nn.initializers.orthogonal(),
}


def init_weight(init: Init, key: jax.Array, stored: TensorType, where: str) -> jax.Array:
    """Return the initialized weight, in the dtype of `stored`, its type in a checkpoint.

    Raises:
        WeightShapeError: the function returned another shape, or a weight with fewer than 2 axes has the init
            "orthogonal". The message begins with `where`.
    """
    if init == "orthogonal" and len(stored.shape) < 2:
        raise WeightShapeError(f"{where}: init 'orthogonal' needs 2 axes or more; the weight is {list(stored.shape)}")
    # Initializers run in f32: some of them, such as the QR decomposition of "orthogonal", have no narrower dtype.
    weight = jnp.asarray((INITS[init] if isinstance(init, str) else init)(key, stored.shape, jnp.float32))
    if weight.shape != stored.shape:
        raise WeightShapeError(f"{where}: its init returned shape {list(weight.shape)}; expected {list(stored.shape)}")
    return weight.astype(jax.dtypes.canonicalize_dtype(stored.dtype))
