"""Settings of every test: CPU, no silent promotion of dtypes or ranks, examples that repeat in CI."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported, hence before it

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_num_cpu_devices", 8)  # what runs on one device runs on the first of them

# An op that leans on implicit promotion works here and fails in a user's strict program.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A first example compiles and later ones do not, so a deadline would measure XLA.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# JAX keeps millions of small objects of what it compiled; the collector would go over them again and again.
gc.set_threshold(100_000, 20, 100)


def pytest_configure(config: pytest.Config) -> None:
    """Tests compile without LLVM's optimiser and by XLA's older emitters, which halves the time of a compile; what XLA
    does to a program is the same. The comparisons with other implementations run what users run."""
    if config.option.markexpr != "oracle":
        flags = ["--xla_backend_optimization_level=0"]
        if jax.__version_info__ < (0, 11):
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ.setdefault("XLA_FLAGS", " ".join(flags))  # read at the first computation
