"""The command line program `rlx-jax`, with one module for each of its commands; `entry` has the table of commands."""

from rlx_jax.cli.entry import main as main
