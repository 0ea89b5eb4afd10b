"""Keys that are not one stored tensor: a part of one that holds several projections, and one tensor made of several."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.errors import GraphError, WeightShapeError, quote, shown
from rlx_jax.ir.param import Cast, Key, Program, Sliced, Strided, sliced, strided


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
