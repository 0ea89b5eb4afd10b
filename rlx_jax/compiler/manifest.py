"""`BindingManifest`: the inputs, parameters and outputs of a planned program, with types, bytes and offsets."""

from __future__ import annotations

from collections.abc import Iterator

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, check_integer, check_names
from rlx_jax.ir.graph import Graph, Param, Value
from rlx_jax.ir.param import Program, keys_of, printed_name
from rlx_jax.ir.text import TextTable, format_bytes
from rlx_jax.ir.types import TensorType, short_name
from rlx_jax.lowering.inspect.buffers import ALIGNMENT, BufferPlan, plan_buffers
from rlx_jax.lowering.lir.plan import Lir

__all__ = ["BindingManifest", "BoundArray", "ManifestDiff", "WeightBlock", "layout_from_lir"]

# Sizes of an array; symbolic ones are names.
ArrayShape = tuple[int | str, ...]


@dataclass(frozen=True)
class BoundArray:
    """An input, a parameter or an output of a program.

    Attributes:
        name: its name; of a parameter that is fused from several weights, a form that contains all of them.
        node: the number of its node; None for a parameter that only a repeated layer reads.
        dtype, shape: its type; symbolic sizes are names.
        elem_count, byte_size: 0 if a size is symbolic.
        arena_offset, arena_size: its place among the computed values, of an output; None for an argument of the
            program, which the arena does not contain.
        is_view: whether it shares the memory of another value, at that offset.
        keys: the keys of the checkpoint weights that a parameter is computed from.
    """

    name: str
    node: int | None
    dtype: str
    shape: ArrayShape
    elem_count: int
    byte_size: int
    arena_offset: int | None = None
    arena_size: int | None = None
    is_view: bool = False
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightBlock:
    """The parameters of one block, such as a layer, by the first part of their keys."""

    prefix: str
    params: tuple[str, ...]
    byte_size: int


@dataclass(frozen=True)
class BindingManifest:
    """The arrays that a planned program takes and returns.

    Attributes:
        graph_name: the name of the program.
        arena_size, alignment: bytes of the computed values, and of the steps in which they are placed. XLA allocates
            memory itself; this is the compiler's estimate from liveness.
        inputs, params, outputs: the arrays, in order. Parameters of repeated layers are listed one by one.
    """

    graph_name: str
    arena_size: int
    alignment: int
    inputs: tuple[BoundArray, ...]
    params: tuple[BoundArray, ...]
    outputs: tuple[BoundArray, ...]

    @staticmethod
    def from_lir(lir: Lir, alignment: int = ALIGNMENT) -> BindingManifest:
        """Return the manifest of a planned program; it may have symbolic sizes, as the LIR of a template has.

        Raises:
            GraphError: it is no planned program, or the alignment is not a positive number.
        """
        if not isinstance(lir, Lir):
            raise GraphError(f"expected a planned program, as into_lir returns it; got {type(lir).__name__}")
        check_integer("alignment", alignment, error_class=GraphError)
        graph, buffers = lir.graph, plan_buffers(lir.graph, lir.plan.donate_state, lir.plan.scan, alignment)
        return BindingManifest(
            graph.name,
            buffers.arena_size,
            alignment,
            tuple(_array(name, graph.type(value), value.node) for name, value in buffers.io["inputs"]),
            tuple(_params(graph)),
            tuple(_output(name, graph, value, buffers) for name, value in buffers.io["outputs"]),
        )

    @property
    def param_names(self) -> tuple[str, ...]:
        """Return the names of the parameters."""
        return tuple(param.name for param in self.params)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the inputs."""
        return tuple(array.name for array in self.inputs)

    @property
    def total_param_bytes(self) -> int:
        """Return the bytes of all parameters."""
        return sum(param.byte_size for param in self.params)

    def param_byte_size(self, name: str) -> int:
        """Return the bytes of a parameter.

        Raises:
            GraphError: there is none of that name; the message suggests one.
        """
        check_names([name], self.param_names, f"{self.graph_name}: no parameter", "; there are")
        return self.params[self.param_names.index(name)].byte_size

    def weight_blocks(self) -> tuple[WeightBlock, ...]:
        """Return the parameters by block, in order of their keys: a layer, or another part with its weight and bias.

        `model.layers.0.mlp.up_proj.weight` belongs to `model.layers.0`, `model.norm.weight` to `model.norm`, and
        `w1.weight` to `w1`.
        """
        blocks: dict[str, list[BoundArray]] = {}
        for param in self.params:
            blocks.setdefault(_block_prefix(next(iter(param.keys), param.name)), []).append(param)
        return tuple(
            WeightBlock(prefix, tuple(p.name for p in params), sum(p.byte_size for p in params))
            for prefix, params in sorted(blocks.items(), key=lambda item: _natural(item[0]))
        )

    def __str__(self) -> str:
        arrays = {"input": self.inputs, "param": self.params, "output": self.outputs}
        rows = [
            (kind, array.name, f"{array.dtype}{list(array.shape)}", format_bytes(array.byte_size))
            for kind, group in arrays.items()
            for array in group
        ]
        sizes = f"arena {format_bytes(self.arena_size)}, parameters {format_bytes(self.total_param_bytes)}"
        return f"{self.graph_name}: {sizes}\n{TextTable(rows, left=3)}"


layout_from_lir = BindingManifest.from_lir


@dataclass(frozen=True)
class ManifestDiff:
    """What differs between the manifests of a template and of a program with sizes.

    Attributes:
        template_arena, specialised_arena: their bytes of computed values.
        only_in_template, only_in_specialised: the names of parameters that one of them has.
    """

    template_arena: int
    specialised_arena: int
    only_in_template: tuple[str, ...]
    only_in_specialised: tuple[str, ...]

    @staticmethod
    def compare(template: BindingManifest, specialised: BindingManifest) -> ManifestDiff:
        """Return the difference of two manifests."""
        ours, theirs = dict.fromkeys(template.param_names), dict.fromkeys(specialised.param_names)
        return ManifestDiff(
            template.arena_size,
            specialised.arena_size,
            tuple(name for name in ours if name not in theirs),
            tuple(name for name in theirs if name not in ours),
        )


def shape_of(t: TensorType) -> ArrayShape:
    """Return the sizes of a type, with symbolic ones as text."""
    return tuple(dim if isinstance(dim, int) else str(dim) for dim in t.shape)


def _array(name: str, t: TensorType, node: int | None) -> BoundArray:
    """Return the entry of an array without a place among the computed values."""
    count, nbytes = (t.size, t.nbytes) if t.is_static else (0, 0)
    return BoundArray(name, node, short_name(t.dtype), shape_of(t), count, nbytes)


def _params(graph: Graph) -> Iterator[BoundArray]:
    """Yield each parameter that a graph or its regions read, once."""
    nodes = {node.op.programs: number for number, node in enumerate(graph.nodes) if isinstance(node.op, Param)}
    listed: set[Program] = set()
    for param in graph.params():
        for program in param.programs:
            if program not in listed:
                listed.add(program)
                array = _array(printed_name(program), program.type, nodes.get(param.programs))
                yield replace(array, keys=tuple(dict.fromkeys(keys_of(program))))


def _output(name: str, graph: Graph, value: Value, buffers: BufferPlan) -> BoundArray:
    """Return the entry of an output."""
    view = buffers.views.get(value)
    slot = buffers.slot(value if view is None else view.root)
    array = replace(_array(name, graph.type(value), value.node), is_view=view is not None)
    if slot is None:  # an argument that is returned, or a symbolic size
        return array
    offset = slot.offset + (0 if view is None else view.byte_offset)
    return replace(array, arena_offset=offset, arena_size=slot.life.size)


def _block_prefix(key: str) -> str:
    """Return the block that the weight of a key belongs to; see `weight_blocks`."""
    parts = key.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    if numbers:
        return ".".join(parts[: numbers[0] + 1])
    return ".".join(parts[:-1]) if len(parts) > 2 else parts[0]


def _natural(prefix: str) -> list[tuple[int, str]]:
    """Return a sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in prefix.split(".")]
