"""`capture_reads` makes side outputs of the values that blocks read and no block returns.

Together with captures of all blocks they are all values between blocks: for example the heads that `o_proj` reads,
which ops of `self_attn` itself compute.
"""

from __future__ import annotations

import os.path

from rlx_jax.ir.graph import Leaf
from rlx_jax.ir.paths import Path, path_text
from rlx_jax.trace.emit import Emit

# Separates the block that computes a value from the block that reads it: `layers.0.self_attn→o_proj`.
READS = "→"


def capture_reads(emit: Emit, where: str) -> None:
    """Make each value that a block reads from outside a side output, unless it is one, an input, weight or constant.

    Args:
        emit: a flow after all edits, without marks of blocks.
        where: the name of the flow, which is the path of nodes outside of all blocks.
    """
    nodes, outputs = emit.builder.nodes, emit.state.outputs
    captured = {emit.unwrap(output) for output in outputs.values()}
    for reader in nodes:
        for value in reader.inputs:
            source, path = nodes[value.node], reader.origin.path
            # A block reads the value if the path of the value is outside of the block.
            is_read = path not in ((where,), source.origin.path[: len(path)])
            if is_read and value not in captured and not isinstance(source.op, Leaf):
                captured.add(value)
                name = _read_name(source.origin.path, path)
                outputs[name if name not in outputs else f"{name}[{value.node}]"] = emit.wrap(value)


def _read_name(source: Path, reader: Path) -> str:
    """Return the name of a value by the paths of the block that computes it and of the block that reads it."""
    shared = len(os.path.commonprefix([[*map(str, path)] for path in (source, reader)]))
    return f"{path_text(source)}{READS}{path_text(reader[shared:])}"
