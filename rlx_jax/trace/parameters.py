"""`Parameters`: the weights that a flow reads, by key, with their sources, shapes, roles and initializers.

Only shapes are read here, never data. A weight may also be a part of a tensor of the checkpoint (`WeightPart`), or a
stack of several (`WeightStack`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, MissingWeightError, WeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.ir import param
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.roles import check_roles, merge_roles
from rlx_jax.ir.types import DimLike, TensorType, device_dtype, is_float, is_static, tensor_type
from rlx_jax.ir.types import Init as Init
from rlx_jax.ir.weight_reads import WeightSource, shapes_only, source_program
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.checks import check_init

F32 = np.dtype(np.float32)

StoredShape = tuple[int, ...]
# The sizes of a weight that a stage knows, axis by axis; None and symbolic sizes are unknown.
AxisSizes = Sequence[DimLike | None]


@dataclass(frozen=True)
class WeightPart:
    """Part `index` of `count` along `axis` of the weight under `key`; accepted wherever a key is.

    Parts are consecutive, of equal size or of the given `sizes`. `interleaved` parts consist of every `count`-th row.

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
                f"WeightPart: {quote(self.key)} has no part {self.index} of {self.count} along axis {self.axis}"
            )
        if self.sizes is not None and (len(self.sizes) != self.count or min(self.sizes) < 1 or self.interleaved):
            raise GraphError(
                f"WeightPart: {quote(self.key)}: expected {self.count} sizes of consecutive parts, each at least 1; "
                f"got {shown(self.sizes)}"
            )

    @staticmethod
    def split(
        key: str, parts: int | tuple[int, ...], axis: int = 0, interleaved: bool = False
    ) -> tuple[WeightPart, ...]:
        """Return all parts of a weight in order: `parts` equal ones, or parts of the sizes `parts`."""
        count, sizes = (parts, None) if isinstance(parts, int) else (len(parts), parts)
        return tuple(WeightPart(key, index, count, axis, interleaved, sizes) for index in range(count))

    def __str__(self) -> str:
        return f"{self.key}[{self.index}{'::' if self.interleaved else '/'}{self.count}]"

    def full_shape(self, shape: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
        """Return the shape of the full weight for the shape of a part; None is an unknown size."""
        if shape is None:
            return None
        total = None if self.sizes is None else sum(self.sizes)
        return tuple(
            (total or (size and size * self.count)) if axis == self.axis else size for axis, size in enumerate(shape)
        )

    def slice_program(self, stored: param.Program, where: str) -> param.Program:
        """Return the program that reads this part of the full weight.

        Raises:
            WeightShapeError: the full weight has no such axis, or no such parts along it.
        """
        total = stored.type.shape[self.axis] if self.axis < len(stored.type.shape) else 0
        sizes = self.sizes or (total // self.count,) * self.count
        if not total or sum(sizes) != total:
            parts = f"{self.count} equal parts" if self.sizes is None else f"parts of {list(sizes)}"
            raise WeightShapeError(f"{where} is {stored.type}: expected {parts} along axis {self.axis}")
        if self.interleaved:
            return param.stride_axis(stored, self.axis, self.index, self.count)
        start = sum(sizes[: self.index])
        part: param.Program = param.slice_axis(stored, self.axis, start, start + sizes[self.index])
        return part


def find_weight_part(program: param.Program) -> WeightPart | None:
    """Return the part of a weight that a program reads, ignoring casts, or None if it reads no part."""
    while isinstance(program, param.Cast):
        program = program.of
    if isinstance(program, param.Strided) and isinstance(program.of, param.Key):
        return WeightPart(program.of.key, program.start, program.step, program.axis, interleaved=True)
    if not (isinstance(program, param.Sliced) and isinstance(program.of, param.Key)):
        return None
    sizes = (program.start, program.stop - program.start, int(program.of.type.shape[program.axis]) - program.stop)
    index = 0 if program.start == 0 else 1
    return WeightPart.split(program.of.key, tuple(size for size in sizes if size), program.axis)[index]


@dataclass(frozen=True)
class WeightStack:
    """Several weights stacked along a new first axis, such as experts with one checkpoint key each.

    The keys are `template` with 0, 1 … `count` − 1 in place of `{}`.

    >>> WeightStack("mlp.experts.{}.up_proj.weight", 2).keys
    ('mlp.experts.0.up_proj.weight', 'mlp.experts.1.up_proj.weight')
    """

    template: str
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.template, str) or self.template.count("{}") != 1:
            raise GraphError(f"WeightStack: expected a key with one {{}} for the number, got {shown(self.template)}")
        if type(self.count) is not int or self.count < 1:
            raise GraphError(f"WeightStack: {quote(self.template)}: count is at least 1, got {shown(self.count)}")

    @property
    def keys(self) -> tuple[str, ...]:
        """The checkpoint keys, in order."""
        prefix, suffix = self.template.split("{}")
        return tuple(f"{prefix}{number}{suffix}" for number in range(self.count))

    def __str__(self) -> str:
        return self.template.replace("{}", f"{{0..{self.count - 1}}}")


# A checkpoint key, or a part of the weight under one.
WeightKey = str | WeightPart


def stored_key(key: WeightKey) -> str:
    """Return the checkpoint key of a weight or of a part."""
    return key.key if isinstance(key, WeightPart) else key


@dataclass(frozen=True)
class WeightDecl:
    """A declaration of `flow.param`: the shape in the checkpoint, the initializer, or both, of weights matching a glob.

    Raises:
        GraphError: it has neither, or an invalid shape or init.
    """

    keys: BlockPattern
    shape: tuple[int, ...] | None = None
    init: Init | None = None

    def __post_init__(self) -> None:
        if self.shape is None and self.init is None:
            raise GraphError(f"{self}: give shape=, init=, or both")
        sizes = self.shape if self.shape is not None else ()
        if not isinstance(sizes, tuple) or not all(type(size) is int and size > 0 for size in sizes):
            raise GraphError(f"{self}: shape is {shown(self.shape)}; expected a tuple of sizes, such as (64, 32)")
        if self.init is not None:
            check_init(self.init, str(self))

    @staticmethod
    def of(pattern: str, shape: Sequence[int] | None, init: Init | None) -> WeightDecl:
        """Return the declaration of a call of `flow.param`; the shape may be a list."""
        sizes: Any = tuple(shape) if isinstance(shape, list) else shape
        return WeightDecl(BlockPattern(pattern, "param"), sizes, init)

    def matches(self, key: str) -> bool:
        """Return whether the glob matches a checkpoint key."""
        return self.keys.matches(tuple(key.split(".")))

    def __str__(self) -> str:
        return f"param({self.keys.text!r})"


def last_declaration(declared: Sequence[WeightDecl], key: str, field: Literal["shape", "init"]) -> WeightDecl | None:
    """Return the last declaration for a key that sets `field`, or None."""
    return next((d for d in reversed(declared) if getattr(d, field) is not None and d.matches(key)), None)


def check_declared(declared: Sequence[WeightDecl], keys: Iterable[str], where: str) -> None:
    """Check that every declaration matches a weight that a stage reads.

    Raises:
        GraphError: one matches none; the message suggests keys.
    """
    key_list = list(keys) if declared else []
    for decl in declared:
        if not any(map(decl.matches, key_list)):
            suggestion = did_you_mean(decl.keys.text, key_list, cutoff=0.7)
            raise GraphError(f"{where}: {decl} matches no weight that a stage reads{suggestion}")


def size_text(sizes: Sequence[object]) -> str:
    """Return sizes, or the roles of axes, as text, such as `[any, 64]`, where None is `any`."""
    return f"[{', '.join('any' if size is None else str(size) for size in sizes)}]"


class Parameters:
    """All weights that a flow reads, from `source` or without a source.

    A stage that reads a weight declares the sizes that it knows. Unknown sizes come from the source, from `flow.param`,
    or from an earlier use of the weight.

    Attributes:
        read_keys: the checkpoint keys that stages read.
        fresh: the types of the weights among them that no source has, by key.
        roles: roles of the axes of weights in the checkpoint, by key.
        inits: declared initializers, by key.
        initializes_missing: weights that the source does not have are initialized.
        defers_missing: errors of missing weights wait in `deferred`, because an edit may remove the block.
    """

    def __init__(self, source: WeightSource | None, declared: Sequence[WeightDecl] = ()) -> None:
        self.source, self.declared = source, tuple(declared)
        self.read_keys: dict[str, None] = {}
        self.fresh: dict[str, TensorType] = {}
        self.roles: dict[str, param.Roles] = {}
        self.inits: dict[str, Init] = {}
        self.initializes_missing = self.defers_missing = False
        self.deferred: dict[str, MissingWeightError] = {}

    # -- declarations ------------------------------------------------------------------------

    def record_init(self, key: WeightKey | WeightStack, init: Init | None, path: str) -> None:
        """Record the initializer of a weight: the one that the flow declares for its key, else the one of its stage.

        Raises:
            GraphError: the init is invalid, or differs from an earlier use of the weight.
        """
        for name in key.keys if isinstance(key, WeightStack) else (stored_key(key),):
            where, decl = f"{path}: weight {quote(name)}", last_declaration(self.declared, name, "init")
            own_init = init if init is None else check_init(init, where)
            own_init = own_init if decl is None else decl.init
            if own_init is not None and self.inits.setdefault(name, own_init) != own_init:
                raise GraphError(f"{where}: its init is {shown(self.inits[name])} elsewhere and {shown(own_init)} here")

    def record_roles(self, key: str, roles: Sequence[param.Role], t: TensorType, path: str) -> None:
        """Record the roles of a weight's axes, merged with the roles of earlier uses.

        Raises:
            GraphError: invalid roles, or conflicting ones. WeightShapeError: a missing weight has another rank.
        """
        where = f"{path}: weight {quote(key)}"
        if key in self.fresh and isinstance(roles, tuple) and len(roles) != t.rank:
            expected = f"{len(roles)} axes, {size_text(roles)}"
            raise WeightShapeError(f"{path}: {self.describe(key)}: expected {expected}, got {list(t.shape)}")
        checked_roles = check_roles(roles, t, where)
        self.roles[key] = merge_roles(self.roles.get(key, checked_roles), checked_roles)

    def describe(self, key: str) -> str:
        """Return a weight's name for messages, with the file that has it, or the declaration of its shape."""
        if self.source is not None and self.source.has(key):
            return f"weight {quote(key)} ({self.source.where(key)})"
        decl = last_declaration(self.declared, key, "shape")
        return f"weight {quote(key)}" if decl is None else f"weight {quote(key)}, with the shape declared by {decl}"

    def declared_shapes(self) -> dict[str, StoredShape]:
        """Return the declared shapes of the weights that no source has, by key."""
        return {key: tuple(map(int, t.shape)) for key, t in self.fresh.items()}

    def raise_deferred(self, read: Iterable[str]) -> None:
        """Raise the deferred error of a missing weight that the edited flow still reads, and drop the other errors."""
        for key in read:
            if key in self.deferred:
                raise self.deferred[key]
        for key in self.deferred:
            self.read_keys.pop(key, None)
            self.fresh.pop(key, None)

    # -- programs ----------------------------------------------------------------------------

    def weight_program(self, key: WeightKey, shape: AxisSizes | None, path: str) -> param.Program:
        """Return the program that reads the weight under one key, or a part of it, in the dtype of flows.

        `shape` has the sizes that the stage knows; None is unknown.
        """
        part = key if isinstance(key, WeightPart) else None
        key = stored_key(key)
        if not isinstance(key, str):
            raise GraphError(f"{path}: a weight key is a string, got {shown(key)}")
        sizes = None if shape is None else tuple(d if d is not None and is_static(d) else None for d in shape)
        program: param.Program = self._full_weight(key, sizes if part is None else part.full_shape(sizes), path)
        if part is not None:
            program = part.slice_program(program, f"{path}: {self.describe(key)}")
        stored = program.type
        if stored.dtype.kind == "c":
            raise WeightError(
                f"{path}: {self.describe(key)} is {stored}; expected floats, integers or bools: "
                "store the real and the imaginary part as two weights"
            )
        program = param.cast(
            program, F32 if is_float(stored.dtype) else device_dtype(stored.dtype)
        )  # checked when they load
        self.read_keys[key] = None
        return program

    def stack_program(
        self, keys: WeightStack, shape: AxisSizes | None, roles: Sequence[param.Role] | None, path: str
    ) -> param.Program:
        """Return the program that stacks the weights under all of the keys."""
        if shape is not None and shape[0] not in (None, keys.count):
            raise WeightShapeError(f"{path}: weight {keys}: expected {list(shape)}, and there are {keys.count}")
        rows = {key: self.weight_program(key, None if shape is None else shape[1:], path) for key in keys.keys}
        row_type = next(iter(rows.values())).type
        for key, row in rows.items():
            if row.type != row_type:
                raise WeightShapeError(f"{path}: {self.describe(key)} is {row.type}, the first of {keys} {row_type}")
        stack = param.Stack(tuple(rows.values()), None if roles is None else roles[0])
        if roles is not None:
            check_roles(roles, stack.type, f"{path}: weight {keys}")
            for key in rows:
                self.record_roles(key, roles[1:], row_type, path)
        return stack

    def _full_weight(self, key: str, sizes: tuple[int | None, ...] | None, path: str) -> param.Key | param.Dequantized:
        """Return the full weight under a key: from the source, or, if the source has none, of the declared shape."""
        decl = last_declaration(self.declared, key, "shape")
        decl_shape = None if decl is None else decl.shape
        if decl_shape is not None and sizes is not None and not _sizes_agree(sizes, decl_shape):
            raise WeightShapeError(
                f"{path}: weight {quote(key)}, with the shape declared by {decl}: "
                f"expected {size_text(sizes)}, as stored, got {list(decl_shape)}"
            )
        if self.source is not None and self.source.has(key):
            return self._weight_from_source(key, sizes if decl_shape is None else decl_shape, path)
        shape = decl_shape or self._inferred_shape(key, sizes)
        # A source with shapes only should have all weights of the model, so that a missing one is an error unless the
        # flow declares it.
        is_declared = decl_shape is not None and self.source is not None and shapes_only(self.source)
        if shape is not None and (self.source is None or self.initializes_missing or is_declared):
            return self._new_weight(key, shape, path)
        missing = self._missing_error(key, shape, path)
        if shape is None or not self.defers_missing:
            raise missing  # `run_as_block` then writes the replacement of the block at once
        self.deferred.setdefault(key, missing)
        return self._new_weight(key, shape, path)

    def _inferred_shape(self, key: str, sizes: tuple[int | None, ...] | None) -> StoredShape | None:
        """Return the shape of a weight that no source has, with sizes of an earlier use; None if a size is unknown."""
        earlier = self.fresh.get(key)
        if earlier is not None and (sizes is None or _sizes_agree(sizes, earlier.shape)):
            return tuple(map(int, earlier.shape))
        if sizes is None or None in sizes:
            return None
        return tuple(size for size in sizes if size is not None)

    def _missing_error(self, key: str, shape: StoredShape | None, path: str) -> MissingWeightError:
        """Return the error of a missing weight, with advice on how to declare or initialize it."""
        if self.source is None:
            return MissingWeightError(
                f"{path}: the shape of weight {quote(key)} is not known: compile with weights=, which may be a mapping "
                f"of jax.ShapeDtypeStruct while there is no data, or declare it: flow.param({quote(key)}, shape=…)"
            )
        try:
            self.source.spec(key)
        except MissingWeightError as error:
            hint = "; missing='init' initializes it with key=, if it is new" if shape is not None else ""
            if self.initializes_missing:
                hint = f"; to initialize it, declare its shape: flow.param({quote(key)}, shape=…)"
            return MissingWeightError(f"{path}: {error}{hint}")
        raise AssertionError(f"a source without {key} returned its shape")

    def _weight_from_source(
        self, key: str, sizes: Sequence[int | None] | None, path: str
    ) -> param.Key | param.Dequantized:
        """Return the weight under a key of the source, after checking its shape against the known sizes."""
        assert self.source is not None
        spec = self.source.spec(key)
        if isinstance(spec, PackedSpec):
            stored: param.Key | param.Dequantized = source_program(key, spec, f"{path}: {self.describe(key)}")
        else:
            stored = param.Key(key, tensor_type(spec.shape, spec.dtype, key))
        if sizes is not None and not _sizes_agree(sizes, stored.type.shape):
            fits_transposed = len(sizes) == 2 and _sizes_agree(sizes[::-1], stored.type.shape)
            hint = "; transposed it fits: give the opposite transpose=" if fits_transposed else ""
            raise WeightShapeError(
                f"{path}: {self.describe(key)}: expected {size_text(sizes)}, got {stored.type}{hint}"
            )
        return stored

    def _new_weight(self, key: str, shape: StoredShape, path: str) -> param.Key:
        """Return a weight that no source has, in f32, after checking its shape against earlier uses."""
        declared = tensor_type(shape, F32, key)
        if (earlier := self.fresh.setdefault(key, declared)) != declared:
            shapes = f"{list(earlier.shape)} elsewhere and {list(shape)} here"
            raise WeightShapeError(f"{path}: weight {quote(key)} is {shapes}")
        return param.Key(key, declared)


def _sizes_agree(sizes: Sequence[int | None], shape: Sequence[DimLike]) -> bool:
    """Return whether a shape has the known sizes."""
    return len(sizes) == len(shape) and all(
        size is None or size == actual for size, actual in zip(sizes, shape, strict=True)
    )
