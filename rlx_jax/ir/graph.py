"""The graph that HIR and MIR share: nodes, values, ops, the builder and its cache of types.

    graph  ::= inputs, nodes, outputs, writes
    node   ::= op(value, ...) : type, ...        origin = block path, label, pass
    value  ::= (node, index)
    write  ::= state leaf := value

Nodes are append-only, so their order is a topological order. Leaves (`Input`, `Param`, `Constant`,
`StateRead`) are global by identity and may stand inside a region; `BodyInput` is what a region is given.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

import numpy as np

from rlx_jax.errors import RlxError, wrong_arity
from rlx_jax.ir.operands import check_declared
from rlx_jax.ir.param import Program, Roles
from rlx_jax.ir.paths import Origin, Path, bind_path, path_text
from rlx_jax.ir.traits import BlockTraits, Initial, Normal, Traits, check_traits
from rlx_jax.ir.type_inference import arity, as_in_jit, kept_types, misfit, traced_types
from rlx_jax.ir.types import TensorType, check_elements

T = TypeVar("T")


class GraphStage(StrEnum):
    """The level of a program: blocks (HIR), tensor ops (MIR), tensor ops with sizes and a plan (LIR)."""

    HIR = "hir"
    MIR = "mir"
    LIR = "lir"


@dataclass(frozen=True)
class Value:
    """Result `index` of node number `node`. `owner`: the builder of the `GraphModule` that handed it out, if any."""

    node: int
    index: int = 0
    owner: Builder | None = field(default=None, compare=False, repr=False)


class Op:
    """What a node does. A frozen dataclass: attributes are fields and never hold a symbolic dimension.

    Subclasses are either `Mir` (they have `eval`) or `Hir` (they have `expand`), or one of the leaves below.
    """

    ids: ClassVar[tuple[int, int, int] | None] = None
    """(k, table, axis) where operand k numbers entries along `axis` of operand `table`: ids, checked on the host before
    a call."""

    choices: ClassVar[Mapping[str, Collection[str]]] = {}
    """The values that attributes may have which are names."""

    operands: ClassVar[str] = ""
    """What operands it takes (`rlx_jax.ir.operands`); empty where nothing is said of them."""

    def declaration(self) -> str:
        """Return `operands`, which may depend on the attributes."""
        return self.operands

    def check(self, *operands: TensorType) -> None:
        """Raise what is wrong beside what is declared, in the op's own words, before types are inferred."""

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """Result types from operand types; raises `ShapeError`, `DTypeError` or `GraphError`."""
        raise NotImplementedError(type(self).__name__)

    def text(self) -> str:
        """How dumps print the op: its name and the attributes that are not at their default."""
        fields = getattr(self, "__dataclass_fields__", {})
        values = {name: getattr(self, name) for name in fields}
        changed = {name: v for name, v in values.items() if not callable(v) and v != fields[name].default}
        shown = ", ".join(f"{name}={f'{v:g}' if isinstance(v, float) else v}" for name, v in changed.items())
        return f"{self.name()}({shown})" if shown else self.name()

    @classmethod
    def name(cls) -> str:
        """`RmsNorm` is printed `rms_norm`."""
        return re.sub(r"(?<=[^A-Z])(?=[A-Z])", "_", cls.__name__).lower()

    def initial(self, place: int, weight: TensorType) -> Initial:
        """How `init` draws a weight that the op reads as operand number `place`: in general a vector is ones, and a
        matrix normal, over what its last axis sums."""
        return 1.0 if weight.rank < 2 else Normal(int(weight.shape[-1]))

    def regions(self) -> tuple[Graph, ...]:
        """Graphs inside the op."""
        return ()

    def with_regions(self, regions: tuple[Graph, ...]) -> Op:
        return self

    def iterations(self) -> int:
        """How often the regions run."""
        return 1

    def carried(self) -> int:
        """How many of the operands that regions are given, from the first on, become their outputs when they run again;
        the others stay as they are."""
        return 0


class Mir(Op):
    """A tensor op. `eval` is its meaning: shape-polymorphic, device-free `jax.numpy`."""

    traits: ClassVar[Traits]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_traits(cls, Traits, "traits = ELEMENTWISE")

    def eval(self, *arrays: Any, **how: Any) -> Any:
        raise NotImplementedError(type(self).__name__)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """The types of `eval`, traced abstractly; operands of different dtypes or ranks are never promoted."""
        check_declared(self, operands)
        try:
            inspect.signature(self.eval).bind(*operands)
        except TypeError as error:
            raise wrong_arity(self.name(), arity(self.eval), len(operands)) from error
        self.check(*operands)
        # One whose attributes are no values may hold a user's function.
        return kept_types(self, operands) if self.traits.stored else traced_types(self, operands)


class Hir(Op):
    """A block. `expand` is its meaning: the ops it stands for, written with a builder."""

    traits: ClassVar[BlockTraits]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_traits(cls, BlockTraits, "traits = BLOCK")

    def expand(self, b: Builder, *operands: Value) -> Value | tuple[Value, ...]:
        raise NotImplementedError(type(self).__name__)

    def packed(self, place: int | None) -> int | None:
        """How many heads stand side by side on the last axis of operand `place`, of the result for None; None: none."""
        return None

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        """The types of `expand`, run on a scratch graph."""
        check_declared(self, operands)
        self.check(*operands)
        scratch = Builder("scratch", types)
        inputs = [scratch.leaf(BodyInput(i, type=t)) for i, t in enumerate(operands)]
        return tuple(scratch.type(v) for v in as_values(self.expand(scratch, *inputs)))


# -- leaves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf(Op):
    """An op without operands whose type is known."""

    type: TensorType = field(kw_only=True)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        return (self.type,)


@dataclass(frozen=True)
class Input(Leaf):
    """A declared input of the program, by name."""

    input: str

    def text(self) -> str:
        return f'input("{self.input}")'


@dataclass(frozen=True)
class Param(Leaf):
    """A parameter. `programs` has one entry, or one for every iteration of the region around it."""

    programs: tuple[Program, ...]

    def __hash__(self) -> int:
        return hash(self.programs[0])

    def text(self) -> str:
        first = str(self.programs[0])
        return f'param("{first}"' + (f" … {len(self.programs)} layers)" if len(self.programs) > 1 else ")")

    @property
    def varies(self) -> bool:
        """Whether it is another array in some iteration."""
        return any(program != self.programs[0] for program in self.programs[1:])

    def at(self, iteration: int | None) -> Program:
        return self.programs[0] if len(self.programs) == 1 or iteration is None else self.programs[iteration]


@dataclass(frozen=True)
class Constant(Leaf):
    """A small array that belongs to the program: a scalar, a table of frequencies. Never a weight."""

    data: bytes

    def text(self) -> str:
        return str(self.array.item()) if self.array.ndim == 0 else f"constant({len(self.data)} bytes)"

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, self.type.dtype).reshape(self.type.shape)


def constant(value: Any, dtype: Any) -> Constant:
    """A `Constant` holding `value` as `dtype`."""
    array = np.asarray(value).astype(dtype)
    return Constant(array.tobytes(), type=TensorType(array.shape, array.dtype))


@dataclass(frozen=True)
class StateLeaf:
    """One array of the state, identified by the block it belongs to and its slot there.

    `every`: what it would be after each token, `[B, S, …]`: no part of the state. A program that can be taken back
    writes it, and nothing reads it.
    """

    path: Path
    slot: str
    every: bool = False

    def __str__(self) -> str:
        return every_key(self.slot) if self.every else self.slot

    def key(self, iteration: int | None) -> str:
        """The name that the array has in a state: `layers.3.self_attn.k`. Slots have no dots, so no two share one."""
        return path_text((*bind_path(self.path, iteration), str(self)))


def every_key(key: str) -> str:
    """The name of what the array of that name would be after each token."""
    return f"{key}/every"


@dataclass(frozen=True)
class StateRead(Leaf):
    """The value a state leaf has when the program starts. `roles`: what its axes are; empty where nobody said."""

    leaf: StateLeaf
    roles: Roles = ()

    def text(self) -> str:
        return f'state("{path_text(self.leaf.path)}", {self.leaf})'


@dataclass(frozen=True)
class BodyInput(Leaf):
    """Operand `index` of the region around it."""

    index: int

    def text(self) -> str:
        return f"body_input({self.index})"


@dataclass(frozen=True)
class Boundary(Op):
    """The active value of the block in whose path the node stands, as it enters (`input`) or leaves (`output`).

    Only a flow with edits by path has them, and only while it is built. A block's value has a name of its own this
    way: a residual or a stream that is the same value outside the block is not edited with it. An empty `role` marks
    nothing.
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
        return self.nodes[value.node].types[value.index]

    def roots(self) -> tuple[Value, ...]:
        """Everything that must be computed."""
        return (*self.outputs, *(v for _, v in self.writes))

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """All nodes, those of regions included, each with the graph it stands in."""
        for node in self.nodes:
            yield self, node
            for region in node.op.regions():
                yield from region.walk()

    def params(self) -> tuple[Param, ...]:
        """The distinct parameter leaves, in order of first use."""
        return tuple(dict.fromkeys(n.op for _, n in self.walk() if isinstance(n.op, Param)))

    def state_reads(self) -> tuple[StateRead, ...]:
        """The distinct state leaves of the program, in order of first use. Every leaf written is also read."""
        return tuple(dict.fromkeys(n.op for _, n in self.walk() if isinstance(n.op, StateRead)))


class TypeCache:
    """What is known of ops on operand types: results of `infer`, and whatever else is asked of them.

    Belongs to one build, whose programs share it: ops may hold user closures.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Op, tuple[TensorType, ...]], tuple[TensorType, ...]] = {}
        self.captured: dict[Op, tuple[Any, ...]] = {}  # arrays that the user's functions captured
        self._answers: dict[tuple[Hashable, ...], Any] = {}

    def ask(self, question: Callable[..., T], op: Op, operands: tuple[TensorType, ...], *more: Hashable) -> T:
        """`question(self, op, operands, *more)`, asked once."""
        if not self.is_known(question, op, operands, *more):
            with as_in_jit():
                self.tell(question(self, op, operands, *more), question, op, operands, *more)
        answer: T = self._answers[question, op, operands, *more]
        return answer

    def tell(
        self, answer: T, question: Callable[..., T], op: Op, operands: tuple[TensorType, ...], *more: Hashable
    ) -> None:
        """What `ask` will answer, for questions that are answered several at a time."""
        self._answers[question, op, operands, *more] = answer

    def is_known(self, *question: Hashable) -> bool:
        """Whether `ask` knows the answer already."""
        return question in self._answers

    def infer(self, op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        if isinstance(op, Leaf):
            return (op.type,)
        key = (op, operands)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._infer(op, operands)
        return found

    def _infer(self, op: Op, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        try:
            with as_in_jit():
                results = op.infer(self, *operands)
        except (RlxError, RecursionError):
            raise
        except Exception as error:  # whatever jax raises on shapes that do not fit
            raise misfit(op.text(), operands, error) from error
        for result in results:
            check_elements(result.shape, op.text())
        return results


class Builder:
    """Appends nodes, infers their types, and stamps them with the current block path."""

    def __init__(self, name: str, types: TypeCache, origin: Origin | None = None) -> None:
        self.name, self.types, self.origin = name, types, origin or Origin()
        self.nodes: list[Node] = []
        self.inputs: list[Input] = []
        self.writes: list[tuple[StateLeaf, Value]] = []
        self.marks_blocks = False  # whether `boundary` marks what enters and leaves a block
        self._leaves: dict[Op, Value] = {}

    @staticmethod
    def resume(graph: Graph, types: TypeCache) -> Builder:
        """A builder that goes on where `graph` ends."""
        b = Builder(graph.name, types)
        b.nodes, b.inputs, b.writes = list(graph.nodes), list(graph.inputs), list(graph.writes)
        b._leaves = {n.op: Value(i) for i, n in enumerate(graph.nodes) if isinstance(n.op, Leaf)}
        return b

    @property
    def here(self) -> Origin:
        """The origin of what is appended now: outside of all blocks the path is the name of the program."""
        return self.origin if self.origin.path else replace(self.origin, path=(self.name,))

    def add(self, op: Op, *inputs: Value) -> tuple[Value, ...]:
        """Append a node; all of its results."""
        types = self.types.infer(op, tuple(self.type(v) for v in inputs))
        self.nodes.append(Node(op, inputs, types, self.here))
        return tuple(Value(len(self.nodes) - 1, i) for i in range(len(types)))

    def __call__(self, op: Op, *inputs: Value) -> Value:
        """Append a node with one result."""
        (value,) = self.add(op, *inputs)
        return value

    def leaf(self, op: Leaf) -> Value:
        """The node of a leaf: equal leaves are one node."""
        value = self._leaves.get(op)
        if value is None:
            value = self._leaves[op] = self(op)
        return value

    def append(self, op: Op, *inputs: Value) -> tuple[Value, ...]:
        """Append a node, unless it is a leaf that is there; all of its results."""
        return (self.leaf(op),) if isinstance(op, Leaf) else self.add(op, *inputs)

    def boundary(self, role: str, value: Value) -> Value:
        """Mark a value as the active one of the current block; the value itself where blocks are not marked."""
        return self(Boundary(role), value) if self.marks_blocks else value

    def cut(self, length: int) -> None:
        """Remove the nodes after the first `length`."""
        del self.nodes[length:]
        self._leaves = {op: value for op, value in self._leaves.items() if value.node < length}

    def input(self, name: str, type: TensorType) -> Value:
        """Declare an input of the program."""
        op = Input(name, type=type)
        self.inputs.append(op)
        return self.leaf(op)

    def scalar(self, value: float, like: Value) -> Value:
        """A rank-0 constant in the dtype of `like`."""
        return self.leaf(constant(value, self.type(like).dtype))

    def type(self, value: Value) -> TensorType:
        return self.nodes[value.node].types[value.index]

    @contextlib.contextmanager
    def at(self, origin: Origin) -> Iterator[None]:
        """Stamp the nodes made inside with `origin`."""
        before, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = before

    def finish(self, outputs: Sequence[Value], output_names: Sequence[str] = ()) -> Graph:
        return Graph(
            self.name, tuple(self.nodes), tuple(outputs), tuple(self.inputs), tuple(output_names), tuple(self.writes)
        )


@contextlib.contextmanager
def located(origin: Origin) -> Iterator[None]:
    """Add the block path to an error that does not have one yet."""
    try:
        yield
    except RlxError as error:
        error.locate(path_text(origin.path))
        raise


# -- helpers -----------------------------------------------------------------------------------


def as_values(result: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    """One value or several, as a tuple."""
    return (result,) if isinstance(result, Value) else result
