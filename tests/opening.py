"""Models whose programs can be looked at: no weights are read, and nothing is compiled."""

from __future__ import annotations

from typing import Any

from rlx_jax.profiles import CompileProfile
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.weights.format import OpenOptions


def opened(flow: Any, weights: Any = None, profile: CompileProfile | None = None, merge: bool = False) -> CompiledModel:
    """The model of a flow before its parameters are there."""
    programs = make_programs([flow], weights, OpenOptions(profile=profile), merge)
    (name,) = programs.flows
    return CompiledModel(programs, name)
