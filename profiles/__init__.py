"""Compile profiles: what a compile may choose, as frozen tables that are read from `*.rlx.toml`."""

from rlx_jax.profiles.check import Options, Table
from rlx_jax.profiles.schema import (
    LATER,
    LATER_PRESETS,
    LATER_VALUES,
    PRESETS,
    AttentionTable,
    Backend,
    Backends,
    BucketTable,
    CompileProfile,
    Donation,
    Fusion,
    Layers,
    Passes,
    Precision,
    Sharding,
)

__all__ = [
    "LATER",
    "LATER_PRESETS",
    "LATER_VALUES",
    "PRESETS",
    "AttentionTable",
    "Backend",
    "Backends",
    "BucketTable",
    "CompileProfile",
    "Donation",
    "Fusion",
    "Layers",
    "Options",
    "Passes",
    "Precision",
    "Sharding",
    "Table",
]
