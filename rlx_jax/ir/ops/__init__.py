"""MIR, the tensor ops. The `eval` method of an op defines its meaning, and its shape rule unless it has `infer`.

Every op class is an attribute of this package: `rlx_jax.ops.MatMul`.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from rlx_jax.ir.graph import Mir

# Importing every module registers its op classes as subclasses of Mir.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

# Every tensor op. To add one, write a class in a module of this folder.
OPS: tuple[type[Mir], ...] = tuple(cls for cls in Mir.__subclasses__() if cls.__module__.startswith(__name__))

globals().update({cls.__name__: cls for cls in OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return an op class by its name."""
