"""The steps of a compile by name, for hosts that keep their own tables of programs; see docs/compile-steps.md."""

from rlx_jax.compiler.compile_pipeline import *  # noqa: F403 (here and below: the names in their __all__)
from rlx_jax.compiler.execution import *  # noqa: F403
from rlx_jax.compiler.manifest import *  # noqa: F403
from rlx_jax.runtime.aot_cache import *  # noqa: F403
from rlx_jax.runtime.model_compile_pipeline import *  # noqa: F403
