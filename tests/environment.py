"""The environment of tests and of the processes that they start. Importing this module sets it.

What a developer has set of Hugging Face, JAX, XLA, the XDG directories and the locale is cleared, as a test must not
depend on it. `RLX_TEST_KEEP_ENV=JAX_PLATFORMS,XLA_FLAGS` leaves the variables with these names alone.

PYTHONDONTWRITEBYTECODE is cleared too: tests start dozens of interpreters, and without bytecode each compiles the
sources of JAX and of this package, 7.6 s of CPU time in place of 3.2.
"""

import os
import re
import sys
from collections.abc import Mapping

CLEARED = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS|JAX|XLA|XDG|LC|RLX_JAX)_\w+|LANG|LANGUAGE|PYTHONDONTWRITEBYTECODE")
# Nothing goes into ~/.cache. XLA's threads: those of a kernel in Mosaic's interpreter wait for each other. Several
# processes share the memory of a GPU.
DEFAULTS = {
    "JAX_PLATFORMS": "cpu", "LANG": "C.UTF-8", "RLX_JAX_CACHE": "off", "NPROC": "16",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}  # fmt: skip


def environment_of_tests(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the developer's settings, and with those that every test needs."""
    kept = set(re.split(r"[,\s]+", environment.get("RLX_TEST_KEEP_ENV", "")))
    rest = {name: text for name, text in environment.items() if name in kept or not CLEARED.fullmatch(name)}
    return DEFAULTS | rest


_environment = environment_of_tests(os.environ)
for _name in set(os.environ) - set(_environment):
    del os.environ[_name]
os.environ.update(_environment)
sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in _environment
