"""`python -m rlx_jax`: the command `rlx-jax`."""

import sys

from rlx_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
