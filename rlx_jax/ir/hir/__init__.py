"""HIR: the blocks that stages write. `expand` defines a block's semantics, its shape rule and its `fusable` lowering.

Every operation that depends on the sequence axis is a block, so that `derive` needs one rule for each. The package
exports all public names of its modules.
"""

from rlx_jax.ir.graph import Hir
from rlx_jax.ir.hir.composites import *  # noqa: F403
from rlx_jax.ir.hir.masks import *  # noqa: F403
from rlx_jax.ir.hir.recurrent import *  # noqa: F403
from rlx_jax.ir.hir.sequence import *  # noqa: F403
from rlx_jax.ir.hir.tokenwise_blocks import *  # noqa: F403

BLOCKS: tuple[type[Hir], ...] = tuple(cls for cls in Hir.__subclasses__() if cls.__module__.startswith(__name__))
