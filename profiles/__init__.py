"""Compile profiles: what a compile may choose, as frozen tables that are read from `*.rlx.toml`."""

from rlx_jax.profiles.check import Options, Table
from rlx_jax.profiles.diff import Change, ProfileDiff
from rlx_jax.profiles.profile import PRESETS, CompileProfile, ProfileLike
from rlx_jax.profiles.schema import (
    AttentionTable,
    Backend,
    Backends,
    BucketTable,
    Donation,
    Fusion,
    Layers,
    NumericClasses,
    Passes,
    Precision,
    Sharding,
)

__all__ = [
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
