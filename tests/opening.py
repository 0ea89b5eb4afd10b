"""Models whose programs can be looked at: no weights are read, and nothing is compiled. And single parameters."""

import threading
from collections.abc import Callable
from typing import Any

import jax

import rlx_jax as rlx
from rlx_jax.ir.param import Program
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.profiles import CompileProfile
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.weights.execute import load_leaves
from rlx_jax.weights.format import OpenOptions

# For tests of models and recipes of all classes, which need no `expect` for mypy.
load: Callable[..., Any] = rlx.load
recipe_for: Callable[..., Any] = rlx.recipe_for


def opened(flow: Any, weights: Any = None, profile: CompileProfile | None = None, merge: bool = False) -> CompiledModel:
    """The model of a flow before its parameters are there."""
    programs = make_programs([flow], weights, OpenOptions(profile=profile), merge)
    (name,) = programs.flows
    return CompiledModel(programs, name)


def load_leaf(program: Program, source: WeightSource, device: Any = None) -> jax.Array:
    """The value of one parameter."""
    return load_leaves({"w": program}, source, device, lambda *_: None, threading.Event())["w"]
