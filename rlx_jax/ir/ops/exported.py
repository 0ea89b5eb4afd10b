"""`ExportedCall`: a program that was exported as StableHLO, as one op of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ShapeError, UnsupportedError, wrong_arity
from rlx_jax.ir.graph import Graph, Mir, TypeCache
from rlx_jax.ir.operands import MOVEMENT, Types
from rlx_jax.ir.types import TensorType, is_static, terms_of

# Runs a program: `(parameters, state, inputs, sizes by symbol) → (outputs, state)`, arrays by name.
RunExported = Callable[[dict[str, Any], dict[str, Any], dict[str, Any], Mapping[str, int]], tuple[Any, dict[str, Any]]]


def unknown_flops(op: Any, operands: Types, results: Types) -> int:
    """Raise an error: StableHLO is not counted.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{op.text()}: an artifact has compiled programs without their ops, so FLOPs, bytes and times of blocks are "
        "not known: ask the model that was exported"
    )


@dataclass(frozen=True)
class ExportedCall(Mir):
    """Call an exported program: parameters, state arrays, inputs → outputs, new state arrays.

    Attributes:
        run: the program.
        params, state, inputs: the names of the operands, in this order.
        operand_types, result_types: the types with symbolic sizes.
        rings: the window of each ring buffer of the state, by the symbol of its size.
        rows_mix: why rows may influence each other; empty if they are independent.
        left_context: the block that reads all preceding tokens; empty if there is none.
    """

    traits = replace(MOVEMENT, flops=unknown_flops, stored=False)
    notation = "exported_call"

    run: RunExported
    params: tuple[str, ...]
    state: tuple[str, ...]
    inputs: tuple[str, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    rings: tuple[tuple[str, int], ...] = ()
    rows_mix: str = ""
    left_context: str = ""

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        sizes = self.sizes([t.shape for t in operands])
        for declared, t in zip(self.operand_types, operands, strict=True):
            if declared.bind(sizes) != t:
                raise ShapeError(f"{self.text()}: expected {declared}, got {t}")
        return tuple(t.bind(sizes) for t in self.result_types)

    def sizes(self, shapes: Sequence[tuple[Any, ...]]) -> dict[str, int]:
        """Return the size of each symbol of the operand types that these shapes of the operands determine."""
        if len(shapes) != len(self.operand_types):
            raise wrong_arity(self.text(), str(len(self.operand_types)), len(shapes))
        sizes: dict[str, int] = {}
        for declared, shape in zip(self.operand_types, shapes, strict=True):
            for dim, size in zip(declared.shape, shape, strict=False):
                if not is_static(dim) and is_static(size) and terms_of(dim) == (str(dim),):
                    sizes.setdefault(str(dim), int(size))
        return sizes

    def eval(self, *arrays: Any) -> tuple[Any, ...]:
        params, rest = arrays[: len(self.params)], arrays[len(self.params) :]
        state, inputs = rest[: len(self.state)], rest[len(self.state) :]
        outputs, new_state = self.run(
            dict(zip(self.params, params, strict=True)), dict(zip(self.state, state, strict=True)),
            dict(zip(self.inputs, inputs, strict=True)), self.sizes([array.shape for array in arrays]),
        )  # fmt: skip
        return (*outputs, *(new_state[name] for name in self.state))


def is_exported(graph: Graph) -> bool:
    """Return whether a graph calls an exported program, which it does not know the ops of."""
    return any(isinstance(node.op, ExportedCall) for node in graph.nodes)
