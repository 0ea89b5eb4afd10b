"""The weights of a flow, by key: where each is from, and what stages and the flow say of it. No data is read.

A key may stand for less or more than one stored tensor: `WeightPart`, `WeightStack`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlx_jax.errors import GraphError, MissingWeightError, WeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.ir.initializers import Init as Init
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.param import Cast, Dequantized, Key, Program, Role, Roles, Sliced, Stack, Strided, cast, sliced, strided
from rlx_jax.ir.roles import agreed, check_roles
from rlx_jax.ir.types import DimLike, TensorType, device_dtype, is_float, is_static, tensor_type
from rlx_jax.ir.weight_reads import WeightSource, as_stored, shapes_only
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.checks import check_init

F32 = np.dtype(np.float32)

StoredShape = tuple[int, ...]
# What a stage knows of a stored shape, axis by axis; a size that is None or symbolic is not known.
AxisSizes = Sequence[DimLike | None]


@dataclass(frozen=True)
class WeightPart:
    """Part `index` of `count` along `axis` of the weight under `key`, wherever a key is expected. The parts stand one
    behind the other and are equal, or have the `sizes`; or they are `interleaved`, every `count`-th row of one part.

    >>> q, k, v = WeightPart.split("blocks.0.attn.qkv.weight", 3)
    >>> str(k)
    'blocks.0.attn.qkv.weight[1/3]'
    >>> WeightPart.split("layers.0.qkv_proj.weight", (64, 16, 16))[1].sizes
    (64, 16, 16)
    """

    key: str
    index: int
    count: int
    axis: int = 0
    interleaved: bool = False
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        numbers = (self.index, self.count, self.axis, *(self.sizes or ()))
        if not isinstance(self.key, str) or not all(type(n) is int for n in numbers):
            raise GraphError(f"WeightPart: expected a key and integers, got {shown(self.key)}, {numbers}")
        if not 0 <= self.index < self.count or self.axis < 0:
            raise GraphError(
                f"WeightPart: of {quote(self.key)} there is no part {self.index} of {self.count} along axis {self.axis}"
            )
        if self.sizes is not None and (len(self.sizes) != self.count or min(self.sizes) < 1 or self.interleaved):
            raise GraphError(
                f"WeightPart: of {quote(self.key)}: sizes are those of {self.count} parts side by side, each at least "
                f"1; got {shown(self.sizes)}"
            )

    @staticmethod
    def split(
        key: str, parts: int | tuple[int, ...], axis: int = 0, interleaved: bool = False
    ) -> tuple[WeightPart, ...]:
        """All parts, in order: so many equal ones, or of these sizes."""
        count, sizes = (parts, None) if isinstance(parts, int) else (len(parts), parts)
        return tuple(WeightPart(key, index, count, axis, interleaved, sizes) for index in range(count))

    def __str__(self) -> str:
        return f"{self.key}[{self.index}{'::' if self.interleaved else '/'}{self.count}]"

    def whole(self, shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
        """The shape that is stored, if a part has this one; None is a size that is not known."""
        if shape is None:
            return None
        full = None if self.sizes is None else sum(self.sizes)
        return tuple(
            (full or (size and size * self.count)) if axis == self.axis else size for axis, size in enumerate(shape)
        )

    def of(self, stored: Program, where: str) -> Program:
        """The program of the part.

        Raises:
            WeightShapeError: the stored tensor has no such axis, or no such parts along it.
        """
        total = stored.type.shape[self.axis] if self.axis < len(stored.type.shape) else 0
        sizes = self.sizes or (total // self.count,) * self.count
        if not total or sum(sizes) != total:
            parts = f"{self.count} equal parts" if self.sizes is None else f"parts of {list(sizes)}"
            raise WeightShapeError(f"{where} is {stored.type}: expected {parts} along axis {self.axis}")
        if self.interleaved:
            return strided(stored, self.axis, self.index, self.count)
        start = sum(sizes[: self.index])
        return sliced(stored, self.axis, start, start + sizes[self.index])


def part_read(program: Program) -> WeightPart | None:
    """The part of a stored weight that a program reads, in whatever dtype; None where it is no part of one."""
    while isinstance(program, Cast):
        program = program.of
    if isinstance(program, Strided) and isinstance(program.of, Key):
        return WeightPart(program.of.key, program.start, program.step, program.axis, interleaved=True)
    if not (isinstance(program, Sliced) and isinstance(program.of, Key)):
        return None
    sizes = (program.start, program.stop - program.start, int(program.of.type.shape[program.axis]) - program.stop)
    index = 0 if program.start == 0 else 1
    return WeightPart.split(program.of.key, tuple(size for size in sizes if size), program.axis)[index]


@dataclass(frozen=True)
class WeightStack:
    """The weights under the keys that `template` makes of 0, 1 … `count` − 1, as one with a leading axis: experts that
    a checkpoint stores one by one.

    >>> WeightStack("mlp.experts.{}.up_proj.weight", 2).keys
    ('mlp.experts.0.up_proj.weight', 'mlp.experts.1.up_proj.weight')
    """

    template: str
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.template, str) or self.template.count("{}") != 1:
            raise GraphError(f"WeightStack: expected a key with one {{}} for the number, got {shown(self.template)}")
        if type(self.count) is not int or self.count < 1:
            raise GraphError(f"WeightStack: of {quote(self.template)} there is at least 1, got {shown(self.count)}")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, in order."""
        first, last = self.template.split("{}")
        return tuple(f"{first}{number}{last}" for number in range(self.count))

    def __str__(self) -> str:
        return self.template.replace("{}", f"{{0..{self.count - 1}}}")


# What names a weight: a key of the checkpoint, or a part of what is stored there.
WeightKey = str | WeightPart


def stored_key(key: WeightKey) -> str:
    """The key of the checkpoint."""
    return key.key if isinstance(key, WeightPart) else key


@dataclass(frozen=True)
class WeightDecl:
    """Of every weight whose key a glob matches, the shape as it is stored, how it is drawn, or both.

    Raises:
        GraphError: it says nothing, or what is no shape or no init.
    """

    keys: BlockPattern
    shape: tuple[int, ...] | None = None
    init: Init | None = None

    def __post_init__(self) -> None:
        if self.shape is None and self.init is None:
            raise GraphError(f"{self}: say its shape=, its init=, or both")
        sizes = self.shape if self.shape is not None else ()
        if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise GraphError(f"{self}: shape is {shown(self.shape)}; expected a tuple of sizes, such as (64, 32)")
        if self.init is not None:
            check_init(self.init, str(self))

    @staticmethod
    def of(pattern: str, shape: Sequence[int] | None, init: Init | None) -> WeightDecl:
        """As `flow.param` takes it."""
        sizes: Any = tuple(shape) if isinstance(shape, list) else shape
        return WeightDecl(BlockPattern(pattern, "param"), sizes, init)

    def matches(self, key: str) -> bool:
        """Whether it is about the weight under a key."""
        return self.keys.matches(tuple(key.split(".")))

    def __str__(self) -> str:
        return f"param({self.keys.text!r})"


def last_declaration(declared: Sequence[WeightDecl], key: str, field: Literal["shape", "init"]) -> WeightDecl | None:
    """Return the last declaration of a weight that has its shape, or its init."""
    return next((d for d in reversed(declared) if getattr(d, field) is not None and d.matches(key)), None)


def check_declared(declared: Sequence[WeightDecl], keys: Iterable[str], where: str) -> None:
    """Every declaration is about a weight that is read.

    Raises:
        GraphError: one is not; the message has keys near it.
    """
    known = list(keys) if declared else []
    for decl in declared:
        if not any(map(decl.matches, known)):
            near = did_you_mean(decl.keys.text, known, alike=0.7)
            raise GraphError(f"{where}: {decl} matches no weight that a stage reads{near}")


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
            where, decl = f"{path}: weight {quote(name)}", last_declaration(self.declared, name, "init")
            said = init if init is None else check_init(init, where)
            said = said if decl is None else decl.init
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
        said = last_declaration(self.declared, key, "shape")
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
        decl = last_declaration(self.declared, key, "shape")
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
