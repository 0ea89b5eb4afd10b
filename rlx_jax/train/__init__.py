"""Training: `init` creates a state, `make_step` the function that updates it, and `Checkpoints` saves it.

`import rlx_jax` imports this package on first use only.
"""

from rlx_jax.train.checkpoints import Checkpoints as Checkpoints
from rlx_jax.train.step import Metrics as Metrics
from rlx_jax.train.step import TrainState as State
from rlx_jax.train.step import TrainStep as TrainStep
from rlx_jax.train.step import init as init
from rlx_jax.train.step import make_step as make_step
from rlx_jax.train.step import mask as mask

__all__ = ["Checkpoints", "Metrics", "State", "TrainStep", "init", "make_step", "mask"]
