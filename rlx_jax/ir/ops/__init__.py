"""MIR: tensor ops, each defined once. `eval` is the meaning, and the shape rule unless `infer` is written.

Every op class is a name of this package too: `rlx_jax.ops.MatMul`.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from rlx_jax.ir.graph import Mir

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

# Every tensor op. A new one is a class in a file of this folder.
OPS: tuple[type[Mir], ...] = tuple(cls for cls in Mir.__subclasses__() if cls.__module__.startswith(__name__))

globals().update({cls.__name__: cls for cls in OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Any op class by its name."""
