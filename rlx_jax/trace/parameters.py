"""The weights of one flow, by key: where each is from, and what stages and the flow say of it. No data is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, MissingWeightError, WeightError, WeightShapeError, quote, shown
from rlx_jax.ir.inits import Init
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.param import Dequantized, Key, Program, Role, Roles, Stack, cast
from rlx_jax.ir.reading import WeightSource, as_stored, shapes_only
from rlx_jax.ir.roles import agreed, check_roles
from rlx_jax.ir.types import DimLike, TensorType, device_dtype, is_float, is_static, tensor_type
from rlx_jax.trace.checks import check_init
from rlx_jax.trace.declared import WeightDecl, declared_init, says_shape
from rlx_jax.trace.weight_part import WeightKey, WeightPart, WeightStack, stored_key

F32 = np.dtype(np.float32)

StoredShape = tuple[int, ...]
# What a stage knows of a stored shape, axis by axis; a size that is None or symbolic is not known.
AxisSizes = Sequence[DimLike | None]


def size_text(sizes: Sequence[int | None]) -> str:
    """`[any, 64]`."""
    return f"[{', '.join('any' if size is None else str(size) for size in sizes)}]"


class Parameters:
    """Every weight that a flow reads, of `source` or of none.

    A stage declares the shape of a weight where it reads it, as far as it knows it. Sizes that it does not know come
    from the source, from `flow.param`, or from an earlier use of the weight.

    Attributes:
        read: the keys that were asked for. `fresh`: those of them that no source has.
        roles: what the axes of stored weights are. `inits`: how weights are drawn, where somebody says so.
        draws_missing: what a source has not is drawn.
        defers_missing: an edit may remove the block that reads a missing weight, so that its error waits in `deferred`.
    """

    def __init__(self, source: WeightSource | None, declared: Sequence[WeightDecl] = ()) -> None:
        self.source, self.declared = source, tuple(declared)
        self.read: dict[str, None] = {}
        self.fresh: dict[str, None] = {}
        self.roles: dict[str, Roles] = {}
        self.inits: dict[str, Init] = {}
        self.draws_missing = self.defers_missing = False
        self.deferred: dict[str, MissingWeightError] = {}
        self._absent: dict[str, TensorType] = {}  # what is in no source
        self._types: dict[tuple[StoredShape, np.dtype[Any]], TensorType] = {}

    # -- what is said of weights -------------------------------------------------------------

    def say_init(self, key: WeightKey | WeightStack, init: Init | None, path: str) -> None:
        """How a weight is drawn: as the flow says of its key, else as its stage says."""
        for name in key.keys if isinstance(key, WeightStack) else (stored_key(key),):
            where, chosen = f"{path}: weight {quote(name)}", declared_init(self.declared, name)
            said = init if init is None else check_init(init, where)
            said = said if chosen is None else chosen
            if said is not None and self.inits.setdefault(name, said) != said:
                raise GraphError(f"{where}: its init is {shown(self.inits[name])} elsewhere and {shown(said)} here")

    def say_roles(self, key: str, roles: Sequence[Role], t: TensorType, path: str) -> None:
        """What the axes of a weight are."""
        where = f"{path}: weight {quote(key)}"
        if key in self.fresh and isinstance(roles, tuple) and len(roles) != t.rank:
            axes = f"[{', '.join('any' if role is None else str(role) for role in roles)}]"
            raise WeightShapeError(f"{path}: {self.at(key)}: expected {len(roles)} axes, {axes}, got {list(t.shape)}")
        said = check_roles(roles, t, where)
        self.roles[key] = agreed(self.roles.get(key, said), said)

    def at(self, key: str) -> str:
        """A weight as messages name it, with the file that has it, or what says its shape."""
        if self.source is not None and self.source.has(key):
            return f"weight {quote(key)} ({self.source.where(key)})"
        said = says_shape(self.declared, key)
        return f"weight {quote(key)}" if said is None else f"weight {quote(key)}, of the shape that {said} says"

    def declared_shapes(self) -> dict[str, StoredShape]:
        """The shapes of weights that no source has, as stages declare them, by key."""
        return {key: tuple(map(int, t.shape)) for key, t in self._absent.items()}

    def refuse_missing(self, read: Iterable[str]) -> None:
        """Raise the error of a missing weight that the edited flow still reads, and forget the others."""
        for key in read:
            if key in self.deferred:
                raise self.deferred[key]
        for key in self.deferred:
            self.read.pop(key, None)
            self.fresh.pop(key, None)

    # -- programs ----------------------------------------------------------------------------

    def one(self, key: WeightKey, shape: AxisSizes | None, path: str) -> Program:
        """The weight under one key, or a part of it, in the dtype of flows; `shape` is what its stage knows of it."""
        part = key if isinstance(key, WeightPart) else None
        key = stored_key(key)
        if not isinstance(key, str):
            raise GraphError(f"{path}: a weight key is a string, got {shown(key)}")
        sizes = None if shape is None else tuple(d if d is not None and is_static(d) else None for d in shape)
        program: Program = self._stored(key, sizes if part is None else part.whole(sizes), path)
        if part is not None:
            program = part.of(program, f"{path}: {self.at(key)}")
        stored = program.type
        if stored.dtype.kind == "c":
            raise WeightError(
                f"{path}: {self.at(key)} is {stored}; expected floats, integers or bools: "
                "store the real and the imaginary part as two weights"
            )
        program = cast(program, F32 if is_float(stored.dtype) else device_dtype(stored.dtype))  # checked when they load
        self.read[key] = None
        return program

    def stacked(self, keys: WeightStack, shape: AxisSizes | None, roles: Sequence[Role] | None, path: str) -> Program:
        """The weights under all of the keys, as one."""
        if shape is not None and shape[0] not in (None, keys.count):
            raise WeightShapeError(f"{path}: weight {keys}: expected {list(shape)}, and there are {keys.count}")
        rows = {key: self.one(key, None if shape is None else shape[1:], path) for key in keys.keys}
        first = next(iter(rows.values())).type
        for key, row in rows.items():
            if row.type != first:
                raise WeightShapeError(f"{path}: {self.at(key)} is {row.type}, the first of {keys} {first}")
        found = Stack(tuple(rows.values()), None if roles is None else roles[0])
        if roles is not None:
            check_roles(roles, found.type, f"{path}: weight {keys}")
            for key in rows:
                self.say_roles(key, roles[1:], first, path)
        return found

    def _stored(self, key: str, sizes: tuple[int | None, ...] | None, path: str) -> Key | Dequantized:
        """A key as the source has it; where it has none, of the shape that is declared."""
        decl = says_shape(self.declared, key)
        said = None if decl is None else decl.shape
        if said is not None and sizes is not None and not _agree(sizes, said):
            raise WeightShapeError(
                f"{path}: weight {quote(key)}, of the shape that {decl} says: "
                f"expected {size_text(sizes)}, as stored, got {list(said)}"
            )
        if self.source is not None and self.source.has(key):
            return self._of_source(key, sizes if said is None else said, path)
        shape = said or self._completed(key, sizes)
        # Shapes alone are a whole model's, of which one that is missing was forgotten, unless the flow declares it.
        drawn = self.source is None or self.draws_missing or (said is not None and shapes_only(self.source))
        if shape is not None and drawn:
            return self._without_source(key, shape, path)
        missing = self._missing(key, shape, path)
        if shape is None or not self.defers_missing:
            raise missing  # of a size that is not known: what replaces the block is written at once (`run_as_block`)
        self.deferred.setdefault(key, missing)
        return self._without_source(key, shape, path)

    def _completed(self, key: str, sizes: tuple[int | None, ...] | None) -> StoredShape | None:
        """The whole shape of a weight that no source has, by an earlier use of it; None where a size is not known."""
        before = self._absent.get(key)
        if before is not None and (sizes is None or _agree(sizes, before.shape)):
            return tuple(map(int, before.shape))
        if sizes is None or None in sizes:
            return None
        return tuple(size for size in sizes if size is not None)

    def _missing(self, key: str, shape: StoredShape | None, path: str) -> MissingWeightError:
        """The error of a weight that is not there."""
        if self.source is None:
            return MissingWeightError(
                f"{path}: the shape of weight {quote(key)} is not known: compile with weights=, which may be a mapping "
                f"of jax.ShapeDtypeStruct while there is no data, or say it: flow.param({quote(key)}, shape=…)"
            )
        try:
            self.source.spec(key)
        except MissingWeightError as error:
            hint = "; missing='init' draws it with key=, if it is a new one" if shape is not None else ""
            hint = f"; to draw it, say its shape=: flow.param({quote(key)}, shape=…)" if self.draws_missing else hint
            return MissingWeightError(f"{path}: {error}{hint}")
        raise AssertionError(f"a source has no {key}, and gives its shape")

    def _of_source(self, key: str, sizes: Sequence[int | None] | None, path: str) -> Key | Dequantized:
        """A key as the source stores it, held against the sizes that are known."""
        assert self.source is not None
        spec = self.source.spec(key)
        if isinstance(spec, PackedSpec):
            stored: Key | Dequantized = as_stored(key, spec, f"{path}: {self.at(key)}")
        else:
            kind = (tuple(spec.shape), spec.dtype)
            stored = Key(key, self._types.get(kind) or self._types.setdefault(kind, tensor_type(*kind, key)))
        if sizes is not None and not _agree(sizes, stored.type.shape):
            turned = len(sizes) == 2 and _agree(sizes[::-1], stored.type.shape)
            hint = "; turned it fits: give the opposite transpose=" if turned else ""
            raise WeightShapeError(f"{path}: {self.at(key)}: expected {size_text(sizes)}, got {stored.type}{hint}")
        return stored

    def _without_source(self, key: str, shape: StoredShape, path: str) -> Key:
        declared = tensor_type(shape, F32, key)
        if self._absent.setdefault(key, declared) != declared:
            before, now = list(self._absent[key].shape), list(declared.shape)
            raise WeightShapeError(f"{path}: weight {quote(key)} is {before} elsewhere and {now} here")
        self.fresh[key] = None
        return Key(key, declared)


def _agree(sizes: Sequence[int | None], shape: Sequence[DimLike]) -> bool:
    """Whether a shape has the sizes that are known."""
    return len(sizes) == len(shape) and all(
        size is None or size == have for size, have in zip(sizes, shape, strict=True)
    )
