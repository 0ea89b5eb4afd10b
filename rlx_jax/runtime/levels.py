"""This module prints one program of a model at a level: `model.text()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax

from rlx_jax.compiler.dumps import FORMATS, check_pass, graph_text, pipeline_text
from rlx_jax.compiler.pipeline import make_function
from rlx_jax.errors import GraphError, did_you_mean, quote
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.runtime.inputs import check_total_length
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs

# All levels; the first three have symbolic sizes if none are given, and the others need them.
SYMBOLIC_LEVELS = ("hir", "mir", "jaxpr")
LEVELS = ("hir", "mir", "lir", "jaxpr", "stablehlo", "hlo", "pipeline")


def check_text_arguments(level: str, after: str, diff: bool, format: str) -> None:
    """Check the arguments of `model.text` that do not depend on the model.

    Raises:
        GraphError: an unknown level, pass or format, or one that the level does not have.
    """
    for what, value, values in (("levels", level, LEVELS), ("formats", format, tuple(FORMATS))):
        if value not in values:
            raise GraphError(f"text: {what} are {', '.join(values)}; got {value!r}{did_you_mean(str(value), values)}")
    if after:
        check_pass(after, level)
    if diff and (level not in ("hir", "mir") or format != "text"):
        got = f"level {quote(level)}" if format == "text" else f"format {quote(format)}"
        raise GraphError(f"text: diff=True compares programs at hir or mir, as text; got {got}")
    if format != "text" and level not in ("hir", "mir", "lir"):
        raise GraphError(f"text: format={quote(format)} is for hir, mir and lir; got level {quote(level)}")


def key_with_sizes(programs: Programs, key: ProgramKey, sizes: Mapping[str, int]) -> ProgramKey:
    """Return the key of a program for these sizes; ring buffers get the sizes that follow from them.

    Raises:
        GraphError, ShapeError: a size is missing, unknown or not a number.
        SequenceLengthError: more tokens than the model has positions.
    """
    template = programs.template(key.symbolic)
    declared = {n: size for n, size in programs.flows[key.flow]._binding.items() if n in template.symbols}
    sizes = {**declared, **sizes}
    rings = {} if "context" in template.symbols - set(sizes) else programs.ring_sizes(template, sizes.get("context"))
    sizes = {**rings, **sizes}
    template.check_sizes(sizes)
    check_total_length(sizes, template.bounds, template.built.name)
    return replace(key, binding=tuple(sorted(sizes.items())))


def argument_specs(programs: Programs, key: ProgramKey) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Return the specs of a program's parameters, state and inputs by name."""
    template, sizes = programs.template(key.symbolic), dict(key.binding)
    groups = (programs.layout.types(), template.state, {i.input: i.type for i in template.mir.inputs})
    return [{name: t.bind(sizes).spec for name, t in types.items()} for types in groups]


def level_text(
    programs: Programs, key: ProgramKey, level: str, after: str = "", diff: bool = False, format: str = "text",
    compiles: bool = True,
) -> str:  # fmt: skip
    """Return the dump of a program at a level; see `CompiledModel.text`.

    Args:
        programs: the programs of the model.
        key: the program, with sizes unless the level is one of `SYMBOLIC_LEVELS`.
        level, after, diff, format: as `check_text_arguments` allows them.
        compiles: whether to compile a program that is not in the cache, for "stablehlo" and "hlo".

    Raises:
        GraphError: the pass does not run for this program, or the program is not in the cache.
    """
    template, sizes = programs.template(key.symbolic), dict(key.binding)
    if level in ("hir", "mir"):
        return graph_text(template, sizes, level, after, diff, format)
    params, state, inputs = argument_specs(programs, key)
    if level == "jaxpr":
        symbolic = template.symbols and not key.binding
        lir = Lir(template.mir, programs.settings.plan) if symbolic else programs.function(key).lir
        return str(jax.make_jaxpr(make_function(lir, programs.layout))(params, state, inputs))
    if level in ("lir", "pipeline"):
        lir = programs.function(key).lir
        if level == "pipeline":
            return pipeline_text(template, lir)
        return dump_lir(lir) if format == "text" else FORMATS[format](lir.graph, "mir", "")
    if not compiles and key not in programs.executables:
        raise GraphError(
            f"text({level!r}): this size was only traced through apply, or its program is not cached any more; pass "
            f"inputs: text({level!r}, x)"
        )
    executable = programs.executable(key, params, state, inputs)
    return str(executable.lowered.as_text()) if level == "stablehlo" else str(executable.call.as_text())
