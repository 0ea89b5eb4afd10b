"""Compile profiles: what a compile may choose, as frozen tables that are read from `*.rlx.toml`."""

from rlx_jax.profiles.check import Options, Table
from rlx_jax.profiles.diff import Change, ProfileDiff
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
    NumericClasses,
    Passes,
    Precision,
    ProfileLike,
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
    "Change",
    "CompileProfile",
    "Donation",
    "Fusion",
    "Layers",
    "NumericClasses",
    "Options",
    "Passes",
    "Precision",
    "ProfileLike",
    "ProfileDiff",
    "Sharding",
    "Table",
]
