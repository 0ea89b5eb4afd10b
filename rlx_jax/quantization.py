"""Quantization of programs written by hand: schemes, and rounding of values as integer hardware does.

The products with quantized weights are methods of `GraphModule` and `Emit`, such as `dequant_matmul`.
"""

from __future__ import annotations

from rlx_jax.compiler.fake_quant import Scale as Scale
from rlx_jax.compiler.fake_quant import insert_q_dq as insert_q_dq
from rlx_jax.compiler.fake_quant import quant_propagate as quant_propagate
from rlx_jax.compiler.graph_module import GraphModule
from rlx_jax.ir.graph import Param, Value
from rlx_jax.ir.param import packing_of
from rlx_jax.ir.quant_scheme import QuantScheme as QuantScheme

# The schemes of values of a graph; a table of the user that no pass reads.
QuantMap = dict[Value, QuantScheme]


def quant_map(module: GraphModule) -> QuantMap:
    """Return the schemes of the packed parameters of a module, by their values."""
    params = ((module.wrap(Value(i, 0)), n.op) for i, n in enumerate(module.builder.nodes) if isinstance(n.op, Param))
    schemes = ((value, packing_of(op.programs[0])) for value, op in params)
    return {value: QuantScheme(scheme) for value, scheme in schemes if scheme is not None}
