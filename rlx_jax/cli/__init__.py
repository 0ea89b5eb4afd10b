"""The command `rlx-jax`. A file for each of its commands; `entry` has the table of them."""

from rlx_jax.cli.entry import main as main
