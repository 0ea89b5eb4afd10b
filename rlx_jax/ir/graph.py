"""The graph that HIR and MIR share: nodes, values, ops, the builder and its cache of inferred types.

    graph  ::= inputs, nodes, outputs, writes
    node   ::= op(value, ...) : type, ...        origin = block path, label, pass
    value  ::= (node, index)
    write  ::= state leaf := value

Nodes are append-only, so their order is topological. Leaves (`Input`, `Param`, `Constant`, `StateRead`) mean the same
value everywhere, so a region may contain them directly. `BodyInput` is an operand of the region.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import RlxError
from rlx_jax.ir import user_functions
from rlx_jax.ir.operands import BlockTraits, Initial, Normal, Traits, check_declared, check_traits, fill_notation
from rlx_jax.ir.param import Program, Roles
from rlx_jax.ir.paths import Origin, StateLeaf, path_text
from rlx_jax.ir.types import TensorType, check_elements

T = TypeVar("T")


class GraphStage(StrEnum):
    """The level of a program: blocks (HIR), tensor ops (MIR), tensor ops with sizes and a plan (LIR)."""

    HIR = "hir"
    MIR = "mir"
    LIR = "lir"


@dataclass(frozen=True)
class Value:
    """Result `index` of node number `node`.

    `owner` is the builder of the `GraphModule` that returned the value to the user, if there is one.
    """

    node: int
    index: int = 0
    owner: Builder | None = field(default=None, compare=False, repr=False)


class Op:
    """The operation of a node: a frozen dataclass with its attributes as fields, which never hold a symbolic dimension.

    Subclasses are either `Mir` (they have `eval`) or `Hir` (they have `expand`), or one of the leaves below.
    """

    ids: ClassVar[tuple[int, int, int] | None] = None
    """(k, table, axis): operand k holds ids that index `axis` of operand `table`. The host checks their range."""

    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """The allowed values of each attribute that is a name."""

    operands: ClassVar[str] = ""
    """The declaration of the operands (`rlx_jax.ir.operands`); empty if the op does not declare them."""

    notation: ClassVar[str] = ""
    """The template of the op's text (`rlx_jax.ir.operands`). If empty, dumps print its name and non-default values."""

    def declaration(self) -> str:
        """Return the declaration of the operands. Ops with operands that depend on attributes override it."""
        return self.operands

    def check(self, *operands: Any, **options: Any) -> None:
        """Raise an error if the attributes or operand types are invalid in a way that the declaration cannot express.

        Runs before type inference, so that the message is in terms of the op and not of JAX.
        """

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the result types for these operand types.

        Raises:
            ShapeError, DTypeError, GraphError: the operands do not fit the op.
        """
        raise NotImplementedError(type(self).__name__)

    def text(self) -> str:
        """Return the op as dumps print it: see `notation`. Ops that it cannot express override this method."""
        if self.notation:
            return fill_notation(self.notation, self)
        fields = getattr(self, "__dataclass_fields__", {})
        values = {name: getattr(self, name) for name in fields}
        non_defaults = {name: v for name, v in values.items() if not callable(v) and v != fields[name].default}
        attributes = ", ".join(f"{name}={f'{v:g}' if isinstance(v, float) else v}" for name, v in non_defaults.items())
        return f"{self.name()}({attributes})" if attributes else self.name()

    @classmethod
    def name(cls) -> str:
        """Return the name that dumps and messages use: `rms_norm` for `RmsNorm`."""
        return re.sub(r"(?<=[^A-Z])(?=[A-Z])", "_", cls.__name__).lower()

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return how `init` initializes a weight that the op reads as operand number `operand_index`.

        By default a vector is all ones, and a matrix is normal with the size of its last axis as fan-in.
        """
        return 1.0 if weight.rank < 2 else Normal(int(weight.shape[-1]))

    def regions(self) -> tuple[Graph, ...]:
        """Return the graphs nested inside the op."""
        return ()

    def with_regions(self, regions: tuple[Graph, ...]) -> Op:
        """Return the op with other regions, in the order of `regions()`."""
        return self

    def iterations(self) -> int:
        """Return how many times the regions run."""
        return 1

    def num_carries(self) -> int:
        """Return the number of carries: the leading operands that the region's outputs replace in its next iteration.

        The other operands are the same in every iteration.
        """
        return 0


class Mir(Op):
    """A tensor op. `eval` defines its semantics in shape-polymorphic `jax.numpy` that depends on no device."""

    traits: ClassVar[Traits]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_traits(cls, Traits, "traits = ELEMENTWISE")

    def eval(self, *arrays: Any, **options: Any) -> Any:
        """Return the result for these arrays: one array, or a tuple if the op has several results."""
        raise NotImplementedError(type(self).__name__)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the types of `eval`, traced abstractly; operands of different dtypes or ranks are never promoted."""
        check_declared(self, operands)
        user_functions.check_formula(self, operands)
        self.check(*operands)
        # The process-wide cache takes only ops with plain values as attributes: another op may hold a user's function,
        # which the cache would keep alive.
        if not self.traits.stored:
            return user_functions.traced_types(self, operands)
        return user_functions.cached_types(self, operands, user_functions.formula_key(self))


class Hir(Op):
    """A block. `expand` defines its semantics: it writes the equivalent ops with a builder."""

    traits: ClassVar[BlockTraits]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_traits(cls, BlockTraits, "traits = BLOCK")

    def expand(self, b: Builder, *operands: Any, **options: Any) -> Value | tuple[Value, ...]:
        """Append the ops of the block to `b` and return their results."""
        raise NotImplementedError(type(self).__name__)

    def packed_heads(self, operand_index: int | None) -> int | None:
        """Return the number of heads packed into the last axis of an operand; of the result if `operand_index` is None.

        None means that the axis has no packed heads.
        """
        return None

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Return the types of `expand`, run on a scratch graph."""
        check_declared(self, operands)
        self.check(*operands)
        scratch = Builder("scratch", types)
        inputs = [scratch.leaf(BodyInput(i, type=t)) for i, t in enumerate(operands)]
        return tuple(scratch.type(v) for v in as_values(self.expand(scratch, *inputs)))


# -- leaves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf(Op):
    """An op without operands, with its type as an attribute."""

    type: TensorType = field(kw_only=True)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        return (self.type,)


@dataclass(frozen=True)
class Input(Leaf):
    """A declared input of the program, by name."""

    notation = 'input("{input}")'

    input: str


@dataclass(frozen=True)
class Param(Leaf):
    """A parameter. `programs` has one entry, or one for every iteration of the enclosing region."""

    programs: tuple[Program, ...]

    def __hash__(self) -> int:  # the generated hash would cover every layer's program; one is distinctive enough
        return hash(self.programs[0])

    def text(self) -> str:
        first_program = str(self.programs[0])
        return f'param("{first_program}"' + (f" … {len(self.programs)} layers)" if len(self.programs) > 1 else ")")

    @property
    def varies(self) -> bool:
        """Whether some iteration reads another array than the first."""
        return any(program != self.programs[0] for program in self.programs[1:])

    def program_at(self, iteration: int | None) -> Program:
        """Return the program for one iteration of the enclosing region; None means the first."""
        return self.programs[0] if len(self.programs) == 1 or iteration is None else self.programs[iteration]


@dataclass(frozen=True)
class Constant(Leaf):
    """A small array that is part of the program, such as a scalar or a table of frequencies. Never a weight."""

    data: bytes

    def text(self) -> str:
        return str(self.array.item()) if self.array.ndim == 0 else f"constant({len(self.data)} bytes)"

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, self.type.dtype).reshape(self.type.shape)


def constant(value: Any, dtype: Any) -> Constant:
    """Return a `Constant` that holds `value` as `dtype`."""
    array = np.asarray(value).astype(dtype)
    return Constant(array.tobytes(), type=TensorType(array.shape, array.dtype))


@dataclass(frozen=True)
class StateRead(Leaf):
    """The value of a state leaf when the program starts. `roles` describes its axes; empty if they are unknown."""

    leaf: StateLeaf
    roles: Roles = ()

    def text(self) -> str:
        return f'state("{path_text(self.leaf.path)}", {self.leaf})'


@dataclass(frozen=True)
class BodyInput(Leaf):
    """Operand `index` of the enclosing region."""

    notation = "body_input({index})"

    index: int


@dataclass(frozen=True)
class Boundary(Op):
    """The active value of the block at the node's path, as it enters (`role="input"`) or leaves (`"output"`) the block.

    These nodes exist only in a flow with edits by path, and only while it is built. They make the block's value
    distinct from the residual that carries the same value outside the block, so that an edit changes only the former.
    An empty `role` marks nothing.
    """

    role: str

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        return operands


# -- graphs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One op applied to values. `types` has an entry for each result."""

    op: Op
    inputs: tuple[Value, ...]
    types: tuple[TensorType, ...]
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False)
class Graph:
    """A program or a region. `inputs` is the declared signature, used or not."""

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    inputs: tuple[Input, ...] = ()
    output_names: tuple[str, ...] = ()
    writes: tuple[tuple[StateLeaf, Value], ...] = ()

    def type(self, value: Value) -> TensorType:
        """Return the type of a value of this graph."""
        return self.nodes[value.node].types[value.index]

    @functools.cached_property
    def output_types(self) -> tuple[TensorType, ...]:
        """Return the type of each output."""
        return tuple(map(self.type, self.outputs))

    def roots(self) -> tuple[Value, ...]:
        """Return all values that must be computed: the outputs and the written state."""
        return (*self.outputs, *(v for _, v in self.writes))

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """Return all nodes, including nodes in regions, each with the graph that contains it."""
        for node in self.nodes:
            yield self, node
            for region in node.op.regions():
                yield from region.walk()

    def params(self) -> tuple[Param, ...]:
        """Return the distinct parameter leaves, in order of first use."""
        return tuple(dict.fromkeys(n.op for _, n in self.walk() if isinstance(n.op, Param)))

    def state_reads(self) -> tuple[StateRead, ...]:
        """Return the distinct state leaves of the program, in order of first use. Every written leaf is also read."""
        return tuple(dict.fromkeys(n.op for _, n in self.walk() if isinstance(n.op, StateRead)))


class TypeCache:
    """Cache of facts about an op on given operand types: the results of `infer`, and of other functions.

    It belongs to one build, and the programs of that build share it. It is not global, because ops may hold user
    closures.
    """

    def __init__(self) -> None:
        self._result_types: dict[tuple[Op, tuple[TensorType, ...]], tuple[TensorType, ...]] = {}
        self.captured_arrays: dict[Op, tuple[Any, ...]] = {}  # arrays that the user's functions captured
        self._results: dict[tuple[Hashable, ...], Any] = {}

    def cached(self, fn: Callable[..., T], op: Op, operands: tuple[TensorType, ...], *args: Hashable) -> T:
        """Return `fn(self, op, operands, *args)`, computed once and cached."""
        if not self.is_cached(fn, op, operands, *args):
            with jax.disable_jit(False):  # in Python, loops would fail for symbolic sizes
                self.store(fn(self, op, operands, *args), fn, op, operands, *args)
        result: T = self._results[fn, op, operands, *args]
        return result

    def store(self, result: T, fn: Callable[..., T], op: Op, operands: tuple[TensorType, ...], *args: Hashable) -> None:
        """Store a result for later calls of `cached`, for code that computes several results at a time."""
        self._results[fn, op, operands, *args] = result

    def is_cached(self, *call: Hashable) -> bool:
        """Return whether the result of a call, `fn` and its arguments as in `cached`, is stored."""
        return call in self._results

    def infer(self, op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        """Return the result types of an op, cached by op and operand types."""
        if isinstance(op, Leaf):  # its type is an attribute, so there is nothing to cache
            return (op.type,)
        if (op, operands) not in self._result_types:
            self.store_types(op, operands, self._infer(op, operands))
        return self._result_types[op, operands]

    def store_types(self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> None:
        """Store the result types of an op for `infer`, for code that knows them without a trace."""
        self._result_types[op, operands] = results

    def _infer(self, op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        """Return the result types of an op, without the cache.

        Raises:
            RlxError: the operands do not fit, or a result has too many elements. Errors of JAX are converted.
        """
        try:
            with jax.disable_jit(False):
                results = op.infer(self, *operands)
        except (RlxError, RecursionError):
            raise
        except Exception as error:  # whatever jax raises on shapes that do not fit
            raise user_functions.trace_error(op.text(), operands, error) from error
        for result in results:
            check_elements(result.shape, op.text())
        return results


class Builder:
    """Appends nodes to a graph, infers their types, and records the current block path on each."""

    def __init__(self, name: str, types: TypeCache, origin: Origin | None = None) -> None:
        self.name, self.types, self.origin = name, types, origin or Origin()
        self.nodes: list[Node] = []
        self.inputs: list[Input] = []
        self.writes: list[tuple[StateLeaf, Value]] = []
        self.marks_blocks = False  # whether `boundary` marks the values that enter and leave a block
        self._leaves: dict[Op, Value] = {}  # equal leaves share one node

    @staticmethod
    def resume(graph: Graph, types: TypeCache) -> Builder:
        """Return a builder that continues where `graph` ends."""
        b = Builder(graph.name, types)
        b.nodes, b.inputs, b.writes = list(graph.nodes), list(graph.inputs), list(graph.writes)
        b._leaves = {n.op: Value(i) for i, n in enumerate(graph.nodes) if isinstance(n.op, Leaf)}
        return b

    @property
    def current_origin(self) -> Origin:
        """The origin of nodes appended now. Outside of all blocks, the path is the name of the program."""
        return self.origin if self.origin.path else replace(self.origin, path=(self.name,))

    def add(self, op: Op, *inputs: Value) -> tuple[Value, ...]:
        """Append a node and return all of its results."""
        types = self.types.infer(op, tuple(self.type(v) for v in inputs))
        self.nodes.append(Node(op, inputs, types, self.current_origin))
        return tuple(Value(len(self.nodes) - 1, i) for i in range(len(types)))

    def __call__(self, op: Op, *inputs: Value) -> Value:
        """Append a node with one result and return that result."""
        (value,) = self.add(op, *inputs)
        return value

    def leaf(self, op: Leaf) -> Value:
        """Return the value of a leaf; equal leaves share one node."""
        if op not in self._leaves:
            self._leaves[op] = self(op)
        return self._leaves[op]

    def append(self, op: Op, *inputs: Value) -> tuple[Value, ...]:
        """Append a node, or reuse the node of an equal leaf, and return all of its results."""
        return (self.leaf(op),) if isinstance(op, Leaf) else self.add(op, *inputs)

    def copy(self, node: Node, number: int, values: dict[Value, Value], op: Op | None = None) -> None:
        """Append node `number` of another graph, or `op` in its place, and add its results to `values`."""
        with self.origin_scope(node.origin):
            results = self.append(op or node.op, *(values[v] for v in node.inputs))
        values.update({Value(number, i): result for i, result in enumerate(results)})

    def boundary(self, role: str, value: Value) -> Value:
        """Return a value marked as the active one of the block; the value itself if this builder marks no blocks."""
        return self(Boundary(role), value) if self.marks_blocks else value

    def truncate(self, length: int) -> None:
        """Remove the nodes after the first `length`."""
        del self.nodes[length:]
        self._leaves = {op: value for op, value in self._leaves.items() if value.node < length}

    def input(self, name: str, type: TensorType) -> Value:
        """Declare an input of the program and return its value."""
        op = Input(name, type=type)
        self.inputs.append(op)
        return self.leaf(op)

    def scalar(self, value: float, like: Value) -> Value:
        """Return a rank-0 constant in the dtype of `like`."""
        return self.leaf(constant(value, self.type(like).dtype))

    def type(self, value: Value) -> TensorType:
        """Return the type of a value of this builder."""
        return self.nodes[value.node].types[value.index]

    @contextlib.contextmanager
    def origin_scope(self, origin: Origin) -> Iterator[None]:
        """Give `origin` to the nodes that are appended inside the `with` block."""
        previous, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = previous

    def finish(self, outputs: Sequence[Value], output_names: Sequence[str] = ()) -> Graph:
        """Return the graph of everything that was appended and declared."""
        return Graph(
            self.name, tuple(self.nodes), tuple(outputs), tuple(self.inputs), tuple(output_names), tuple(self.writes)
        )


@contextlib.contextmanager
def locate_errors(origin: Origin) -> Iterator[None]:
    """Add the block path to an error that does not have one yet."""
    try:
        yield
    except RlxError as error:
        error.locate(path_text(origin.path))
        raise


def as_values(result: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    """Return one value or several as a tuple."""
    return (result,) if isinstance(result, Value) else result
