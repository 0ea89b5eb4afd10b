"""HIR: the blocks that stages write. `expand` is a block's meaning, its shape rule and its `fusable` lowering.

Whatever depends on the sequence is one of these blocks, so that `derive` has one rule for each. All public names of
these files are names of this package.
"""

from rlx_jax.ir.graph import Hir
from rlx_jax.ir.hir.composites import *  # noqa: F403
from rlx_jax.ir.hir.masks import *  # noqa: F403
from rlx_jax.ir.hir.recurrent import *  # noqa: F403
from rlx_jax.ir.hir.sequence import *  # noqa: F403
from rlx_jax.ir.hir.tokenwise_blocks import *  # noqa: F403

# Every block.
BLOCKS: tuple[type[Hir], ...] = tuple(cls for cls in Hir.__subclasses__() if cls.__module__.startswith(__name__))
