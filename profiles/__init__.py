"""This package defines compile profiles, the options of the compiler, as frozen tables read from `*.rlx.toml` files."""

from rlx_jax.profiles.check import Options as Options
from rlx_jax.profiles.check import Table as Table
from rlx_jax.profiles.profile import PRESETS as PRESETS
from rlx_jax.profiles.profile import Change as Change
from rlx_jax.profiles.profile import CompileProfile as CompileProfile
from rlx_jax.profiles.profile import ProfileDiff as ProfileDiff
from rlx_jax.profiles.profile import ProfileLike as ProfileLike
from rlx_jax.profiles.schema import *  # noqa: F403 (every table of settings)
