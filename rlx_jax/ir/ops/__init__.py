"""MIR: tensor ops, each defined once. `eval` is the meaning, and the shape rule unless `infer` is written.

Every op class is a name of this package too: `rlx_jax.ops.MatMul`.
"""

from typing import TYPE_CHECKING, Any

from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops import (  # noqa: F401, I001  # noqa: F401
    attention,
    control,
    conv,
    custom,
    experts,
    fused,
    index,
    linalg,
    norm,
    order,
    pointwise,
    recurrent,
    reduce,
    shape,
    vision,
)

OPS: tuple[type[Mir], ...] = tuple(cls for cls in Mir.__subclasses__() if cls.__module__.startswith(__name__))
"""Every tensor op. A new one is a class in a file of this folder."""

globals().update({cls.__name__: cls for cls in OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Any op class by its name."""
