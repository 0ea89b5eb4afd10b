"""The records through which the compiler reads a flow: `InputDecl`, `Built` and the protocol `Buildable`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from rlx_jax import plugins
from rlx_jax.dataclasses import dataclass, field
from rlx_jax.device import jax_settings
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Graph, GraphStage, Param, TypeCache
from rlx_jax.ir.param import Roles, keys_of, stored_keys
from rlx_jax.ir.paths import bind_path, path_text
from rlx_jax.ir.types import Init, TensorType
from rlx_jax.ir.user_functions import CapturedArrays
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.lowering.lir.plan import Plan
from rlx_jax.lru import LruCache
from rlx_jax.profiles import CompileProfile

# A mapping of arrays or `jax.ShapeDtypeStruct`, a WeightSource, or a path.
Weights = Any
T = TypeVar("T")

REQUIRED = "required"
POSITIONS = "positions"
# Programs of a built flow that are retained: a model has few, one for each program and set of optional inputs.
MAX_TEMPLATES = 32


@dataclass(frozen=True)
class InputDecl:
    """A declared input of a flow.

    Attributes:
        default: REQUIRED, POSITIONS (0, 1, 2 …), a number, or None (stages run without the input).
        rows_optional: a call may omit the first axis; the array is then a single row.
    """

    name: str
    type: TensorType
    default: float | str | None = REQUIRED
    rows_optional: bool = False

    def __post_init__(self) -> None:
        is_number = isinstance(self.default, int | float) and not isinstance(self.default, bool)
        is_finite = is_number and math.isfinite(self.default)  # type: ignore[arg-type]  # a number, see above
        if not (is_finite or self.default in (REQUIRED, POSITIONS, None)):
            raise GraphError(f"input {self.name}: default is {self.default!r}; expected a number, 'positions' or None")
        if self.rows_optional and not self.type.rank:
            raise GraphError(f"input {self.name}: rows_optional needs an input with axes, got {self.type}")

    @property
    def optional(self) -> bool:
        return self.default != REQUIRED


@runtime_checkable
class Buildable(Protocol):
    """Anything that can be compiled: a ModelFlow, a GraphModule, or the result of `build`."""

    @property
    def name(self) -> str: ...

    @property
    def _inputs(self) -> tuple[InputDecl, ...]: ...

    @property
    def _binding(self) -> Mapping[str, int]: ...

    def build(
        self, weights: Weights = None, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> Built: ...


# Function from the weights of a model to the flow of its drafting module: see `ModelFlow.with_mtp`.
MtpFactory = Callable[[WeightSource | None], Buildable]


@dataclass(frozen=True)
class Built:
    """A flow or a module after `build`: its graph and the facts that `build` collects. It reads no weight data.

    Attributes:
        hir: the graph; a MIR graph if the module is at that level.
        plan: the plan of a module at LIR.
        program: the program that the flow compiles to by default: `forward`, or `explicit` with cached keys and values.
        roles: roles of the axes of weights, as in the checkpoint, by key.
        unused_keys: keys and, with a final ".", prefixes of keys that the flow leaves unread on purpose.
        inits: initializers that stages or the flow declare, by key.
        missing_keys: keys of weights that no source has.
        max_positions: the longest sequence that the flow declares, in tokens.
        captures: the side outputs that edits by path added.
        seconds: how long the build took; 0 if an earlier load of the config has built it.
        since: when it was built, or taken from an earlier load.
        lowered: what the compiler made of the graph, such as its templates, without the weights.
    """

    name: str
    hir: Graph
    source: WeightSource | None
    profile: CompileProfile | None
    types: TypeCache = field(repr=False)
    flow: Buildable = field(repr=False)
    keys_read: tuple[str, ...] = ()
    unused_keys: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    binding: Mapping[str, int] = field(default_factory=dict)
    stage: GraphStage = GraphStage.HIR
    plan: Plan | None = None
    program: str = "forward"
    captured: CapturedArrays = field(default_factory=CapturedArrays, repr=False, compare=False)
    roles: Mapping[str, Roles] = field(default_factory=dict, repr=False)
    inits: Mapping[str, Init] = field(default_factory=dict, repr=False)
    missing_keys: tuple[str, ...] = ()
    max_positions: int | None = None
    captures: tuple[str, ...] = ()
    seconds: float = field(default=0.0, repr=False, compare=False)
    since: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    lowered: LruCache[Hashable, Any] = field(
        default_factory=functools.partial(LruCache, MAX_TEMPLATES), repr=False, compare=False
    )

    # -- as a flow ---------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """The declared inputs."""
        return self.flow._inputs

    _inputs = inputs

    @property
    def _binding(self) -> Mapping[str, int]:
        return self.binding

    def build(
        self, weights: Weights = None, given: Iterable[str] = (), captured: CapturedArrays | None = None
    ) -> Built:
        """Return a new build of the same flow, with other weights or other optional inputs."""
        return self.flow.build(self.source if weights is None else weights, given, captured or self.captured)

    def once(self, make: Callable[..., T], subject: Any, *options: Hashable) -> T:
        """Return `make(subject, *options)` for a subject that is made of this graph, once for each choice.

        The result is retained with the graph, so that it must not refer to weights.
        """
        surroundings = plugins.context_plugins.get(), jax_settings()
        key = (make, self.hir, self.program, self.max_positions, *options, *surroundings)
        result: T = self.lowered(key, lambda: make(subject, *options))
        return result

    # -- inspection --------------------------------------------------------------------------

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.hir.output_names

    @property
    def primary_shape(self) -> tuple[Any, ...]:
        """Shape of the first output."""
        return self.hir.output_types[0].shape

    def readers(self) -> dict[str, str]:
        """Return, for each checkpoint key, the path of the first block that reads it."""
        paths: dict[str, str] = {}
        for inner, node in self.hir.walk():
            ops = (inner.nodes[value.node].op for value in node.inputs)
            for i, program in ((i, p) for op in ops if isinstance(op, Param) for i, p in enumerate(op.programs)):
                for key in keys_of(program):
                    paths.setdefault(key, path_text(bind_path(node.origin.path, i)))
        return paths

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every weight that is read, by checkpoint key."""
        programs = (p for leaf in self.hir.params() for p in leaf.programs)
        return {k.key: k.type.spec for program in programs for k in stored_keys(program)}
