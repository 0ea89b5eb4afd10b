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
    """The default suite compiles without LLVM's optimiser, which takes a third of the time of a compile. What XLA does
    to a program is the same. The slow tests and the comparisons run what users run."""
    if config.option.markexpr == "not oracle and not slow":
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # read at the first computation
