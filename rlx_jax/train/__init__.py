"""Training: what a run needs beside its step. Imported when it is first used."""

from rlx_jax.train.checkpoints import Checkpoints as Checkpoints
