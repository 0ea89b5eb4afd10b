"""A flow as a Flax module: `rlx_jax.nnx.FlowModule(flow, weights)`, to train, split, merge and save as in `nnx`.

It is the only module that imports flax; `import rlx_jax` does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from rlx_jax.errors import MissingWeightError
from rlx_jax.ir.types import is_float
from rlx_jax.program import Weights
from rlx_jax.runtime import compile_flow
from rlx_jax.runtime.model import CompiledModel


class FlowModule(nnx.Module):
    """A compiled flow with `nnx.Param`s as parameters. Calling it is `.apply` with its own parameters.

    `params` is one flat dict by leaf name, the same names and arrays as `rlx_jax.compile(…).params`:
    `module.params["model.norm.weight"]`. Names are not split at their dots, so that a path in `nnx.state` holds
    the checkpoint key as it is: `("params", "model.norm.weight")`. Leaves of integers or bools are plain
    `nnx.Variable`s: they are part of the state, and no filter on `nnx.Param` differentiates or updates them.

    Args:
        flow: as in `rlx_jax.compile`.
        weights: as in `rlx_jax.compile`.
        rngs: random source to initialize parameters with, if there are no weights: `nnx.Rngs` (its stream `params`), a
            key of `jax.random`, or a seed. It is not used if there are weights.
        options: of `rlx_jax.compile`, such as `profile` and `strict`. `program` is `forward` or `train`, which follows
            the profile's `layers.remat` and runs repeated layers as a scan.

    Raises:
        MissingWeightError: neither weights nor `rngs`. Others: as `rlx_jax.compile`.
    """

    def __init__(
        self, flow: Any, weights: Weights = None, *, rngs: nnx.Rngs | jax.Array | int | None = None, **options: Any
    ) -> None:
        compiled = compile_flow.compile(flow, weights, **options)
        params = compiled.params
        if params is None:
            if rngs is None:
                raise MissingWeightError(
                    f"{compiled.name}: FlowModule needs parameters; pass weights=, or rngs= to initialize them"
                )
            params = compiled.init(rngs.params() if isinstance(rngs, nnx.Rngs) else rngs)
        # The variables are the only copy of the parameters: nnx updates, splits and saves them.
        self.compiled = replace(compiled, params=None)
        self.params = nnx.data({name: make_variable(array) for name, array in params.items()})

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output for inputs by position or name; several outputs are a dict by output name."""
        return self.compiled.apply(self.arrays(), *inputs, **named)

    def arrays(self) -> dict[str, jax.Array]:
        """Return the parameters as plain arrays by name, as for `.apply` and `CompiledModel.replace`."""
        return {name: v.get_value() for name, v in self.params.items()}

    def to_model(self) -> CompiledModel:
        """Return the compiled model with these parameters: to call, to save, or to read `.weights()`."""
        return self.compiled.replace(params=self.arrays())


def make_variable(array: jax.Array) -> nnx.Variable[jax.Array]:
    """Return a `Param` for floats, which have a gradient, else a plain `Variable`."""
    return nnx.Param(array) if is_float(array.dtype) else nnx.Variable(array)
