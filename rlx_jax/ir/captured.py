"""What a user's function sees beside its arguments, copied when a model first sees it, as weights are.

A program traces the function again for every size, so that an array changed in place, or a variable bound anew, would
change the answers of a model from one size to the next.
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

MAX_CAPTURED = 2**20  # bytes that a function may capture
PLAIN = (bool, int, float, complex, str, bytes, np.generic)
LIBRARIES = ("jax", "numpy", "functools")
"""Their functions may be given arrays, and have none of the user's among their globals."""
_JITTED = type(jax.jit(lambda: None))


class Captured:
    """Copies of the arrays that the functions of one model capture, by the array that the user holds."""

    def __init__(self) -> None:
        self.closed = False  # the model was built: an array with other numbers has been changed since
        self._arrays: dict[int, tuple[Any, list[Any]]] = {}  # with the array itself, so that no other has its id
        self._holders: dict[int, tuple[Any, list[Any]]] = {}  # lists and dicts, likewise
        self._functions: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._open: set[int] = set()

    def own(self, value: Any) -> Any:
        """`value` over copies of the arrays that it holds or captures; itself where there are none.

        Larger arrays than a program may hold are left alone: a trace of the function refuses them.
        """
        if isinstance(value, np.ndarray):
            return self._array(value) if value.nbytes <= MAX_CAPTURED else value
        if id(value) in self._open:  # a function that calls itself
            return value
        self._open.add(id(value))
        try:
            return self._parts(value)
        finally:
            self._open.discard(id(value))

    def _array(self, array: Any) -> Any:
        _, copies = self._arrays.setdefault(id(array), (array, []))
        same = (
            c for c in copies if c.dtype == array.dtype and c.shape == array.shape and c.tobytes() == array.tobytes()
        )
        found = next(same, copies[-1] if self.closed and copies else None)
        if found is None:
            found = array.copy()
            found.flags.writeable = False
            copies.append(found)
        return found

    def _held(self, value: Any, made: Any, parts: Callable[[Any], list[Any]]) -> Any:
        """A list or dict of our own: the copy that was made before, if it holds the same."""
        _, copies = self._holders.setdefault(id(value), (value, []))
        new = parts(made)
        for known in copies:
            old = parts(known)
            if len(old) == len(new) and all(a is b or _is_same(a, b) for a, b in zip(old, new, strict=True)):
                return known
        if self.closed and copies:
            return copies[-1]
        copies.append(made)
        return made

    def _parts(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple:
            row = tuple(self.own(item) for item in value)
            return row if any(a is not b for a, b in zip(row, value, strict=True)) else value
        if kind is list:
            return self._held(value, [self.own(item) for item in value], list)
        if kind is dict:
            return self._held(
                value, {name: self.own(item) for name, item in value.items()}, lambda d: [*d, *d.values()]
            )
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            owner = self._object(value.__self__)
            return types.MethodType(value.__func__, owner) if owner is not value.__self__ else value
        if kind is functools.partial:
            func, args = self.own(value.func), self.own(value.args)
            keywords = {name: self.own(item) for name, item in value.keywords.items()}
            same = func is value.func and args is value.args
            same = same and all(keywords[name] is item for name, item in value.keywords.items())
            return value if same else functools.partial(func, *args, **keywords)
        if kind is _JITTED:  # what it wraps is traced into the program, with or without it
            inner = self.own(value.__wrapped__)
            return inner if inner is not value.__wrapped__ else value
        return self._object(value) if callable(value) or _is_users(value) else value

    def _object(self, value: Any) -> Any:
        """An object whose attributes are data, functions or other objects of the user."""
        if isinstance(value, type | types.ModuleType):
            return value
        kinds = (np.ndarray, list, tuple, dict, types.FunctionType)
        fields = {n: v for n, v in getattr(value, "__dict__", {}).items() if isinstance(v, kinds) or _is_users(v)}
        changed = self._changed(fields)
        if changed is None:
            return value
        made = copy.copy(value)
        vars(made).update(changed)
        return made

    def _changed(self, fields: dict[Any, Any]) -> dict[Any, Any] | None:
        """The entries over copies; None where none of them is another."""
        made = {name: self.own(item) for name, item in fields.items()}
        return made if any(made[name] is not item for name, item in fields.items()) else None

    def _function(self, fn: types.FunctionType) -> Any:
        code, free = fn.__code__, fn.__code__.co_freevars
        stored, used = _names(code, "STORE"), _names(code, "LOAD_GLOBAL")
        before = dict(zip(free, fn.__closure__ or (), strict=True))
        cells = {name: self._cell(cell) for name, cell in before.items() if name not in stored}
        defaults, keywords = self.own(fn.__defaults__), self.own(fn.__kwdefaults__)
        mine = (fn.__module__ or "").partition(".")[0] not in LIBRARIES
        seen = {n: v for n, v in fn.__globals__.items() if mine and n in used - stored and _is_bound(v, fn)}
        globals_ = {n: self.own(v) for n, v in seen.items()}
        plain = [n for n, v in seen.items() if isinstance(v, PLAIN)]
        same = all(cells.get(n, cell) is cell for n, cell in before.items())
        if same and defaults is fn.__defaults__ and keywords is fn.__kwdefaults__ and not plain:
            if all(globals_[n] is v for n, v in seen.items()):
                return fn
        parts = (defaults, keywords, *(c.cell_contents for c in cells.values() if _filled(c)), *globals_.values())
        key = (id(fn), *map(id, parts))
        if key not in self._functions:
            scope = {**fn.__globals__, **globals_} if globals_ else fn.__globals__
            closure = tuple(cells.get(name, before[name]) for name in free)
            made = types.FunctionType(code, scope, fn.__name__, defaults, closure)
            made.__kwdefaults__, made.__qualname__, made.__module__ = keywords, fn.__qualname__, fn.__module__
            made.__dict__.update(fn.__dict__)
            self._functions[key] = (made, fn, parts)  # they live as long as their ids stand in the key
        return self._functions[key][0]

    def _cell(self, cell: types.CellType) -> types.CellType:
        """The cell, or one of our own: a variable may be bound anew."""
        if not _filled(cell):
            return cell
        value = self.own(cell.cell_contents)
        return types.CellType(value) if value is not cell.cell_contents or isinstance(value, PLAIN) else cell


def _is_users(value: Any) -> bool:
    """Whether a value is an object of a class that is not of a library, and of no part of a flow that is traced."""
    home = (type(value).__module__ or "").partition(".")[0]
    return home not in (*LIBRARIES, "builtins", "jaxlib", "rlx_jax") and not isinstance(value, type | types.ModuleType)


def _is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its variable has no value
        return False


def _is_bound(value: Any, fn: types.FunctionType) -> bool:
    """Whether a global is data, or a function beside `fn`."""
    ours = isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__
    return ours or isinstance(value, (np.ndarray, list, tuple, dict, *PLAIN)) or _is_users(value)


@functools.cache
def _names(code: types.CodeType, what: str) -> frozenset[str]:
    """The variables that code, and code inside of it, reads as globals or writes around itself."""
    ops = ("STORE_DEREF", "STORE_GLOBAL", "DELETE_DEREF", "DELETE_GLOBAL") if what == "STORE" else (what, "LOAD_NAME")

    def walk(code: types.CodeType) -> Iterator[str]:
        own = set(code.co_cellvars)
        found = (i.argval for i in dis.get_instructions(code) if i.opname in ops)
        yield from (name for name in found if name not in own)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from (name for name in walk(inner) if name not in own)

    return frozenset(walk(code))


def is_consumed(array: Any) -> bool:
    """Whether an array was donated to an earlier call, or is traced by `jax.grad` or `jax.vmap` and stands for one that
    was. What `jax.jit` traces has no values to look for.
    """
    while isinstance(array, jax.core.Tracer):
        array = getattr(array, "primal", getattr(array, "val", None))
    return isinstance(array, jax.Array) and array.is_deleted()
