"""This module defines `ModelProgram`: one program of a compiled flow, its inputs and outputs, without parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rlx_jax.compiler.dumps import FORMATS, check_pass, graph_text, pipeline_text
from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.manifest import BindingManifest
from rlx_jax.compiler.meshes import to_model_devices
from rlx_jax.compiler.pipeline import Template, make_function
from rlx_jax.compiler.settings import Settings
from rlx_jax.errors import GraphError, ShapeError, check_names, did_you_mean, quote, shown
from rlx_jax.inspection.diff import ModelDiff, block_diffs, block_facts, fact_changes, facts_of_program
from rlx_jax.inspection.work import block_work
from rlx_jax.ir.types import is_static
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.inspect.buffers import dump_lir
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.profiles import Change
from rlx_jax.profiles.profile import field_changes
from rlx_jax.program import Buildable, Built, InputDecl
from rlx_jax.runtime.block_times import BlockTimes
from rlx_jax.runtime.inputs import (
    as_row,
    bind_names,
    bind_sizes,
    check_new_tokens,
    check_required,
    check_rows,
    check_symbolic_length,
    check_total_length,
    refuse_unread,
    value_or_spec,
)
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import state_bytes
from rlx_jax.runtime.sequence_state import State, state_arrays

# This module prints one program of a model at a level: `model.text()`.


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
        raise GraphError(f"text: the difference of a pass is of hir or mir, as text; got {got}")
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


# This module compares one program of two models, for `model.diff()`.


def diff_programs(
    ours: tuple[Programs, ProgramKey], theirs: tuple[Programs, ProgramKey], sizes: Mapping[str, int],
    times: tuple[BlockTimes, BlockTimes] | None,
) -> ModelDiff:  # fmt: skip
    """Return the differences between two programs; see `ModelProgram.diff`.

    Args:
        ours, theirs: the programs of each model, and the key of the one to compare, without sizes.
        sizes: the sizes, each of at least one of the programs; empty to leave out what depends on them.
        times: the measured times of both.
    """
    models = (ours, theirs)
    templates = [programs.template(key) for programs, key in models]
    symbols = templates[0].symbols | templates[1].symbols
    check_names(sizes, sorted(symbols), f"diff: the program {ours[1].program} has no size", "; it has", GraphError)
    program_facts, facts, totals = [], [], []
    for (programs, key), template in zip(models, templates, strict=True):
        types, lir = programs.layout.types().values(), None
        total = {"parameters": programs.layout.num_parameters(), "parameter bytes": sum(t.nbytes for t in types)}
        if sizes or not symbols:
            sized = key_with_sizes(programs, key, {n: size for n, size in sizes.items() if n in template.symbols})
            lir = programs.function(sized).lir
            works = [work for each in block_work(lir).values() for work in each]
            total |= {"FLOPs": sum(w.flops for w in works), "bytes": sum(w.bytes for w in works)}
            total |= {"state bytes": state_bytes(template, sized)} if template.state else {}
        totals.append(total)
        settings, serves = programs.settings, programs.fuses_by_default
        program_facts.append(dict(facts_of_program(template, settings, key.program, serves, lir)))
        facts.append(block_facts(template, lir))
    return ModelDiff(
        ours[1].flow, theirs[1].flow, ours[1].program, dict(sizes),
        tuple(Change(name, *(f"{total.get(name, 0):,}" for total in totals)) for name in {**totals[0], **totals[1]}),
        tuple(field_changes(*(programs.settings.profile for programs, _ in models))),
        fact_changes(*program_facts), block_diffs(*facts), () if times is None else _time_changes(*times),
    )  # fmt: skip


def _time_changes(ours: BlockTimes, theirs: BlockTimes) -> tuple[Change, ...]:
    """Return the milliseconds of a run and of its blocks, layers together; the largest difference first."""
    seconds = []
    for times in (ours, theirs):
        by_path: Counter[str] = Counter()
        for row in times.folded().rows:
            by_path[row.path] += row.seconds  # type: ignore[assignment]  # a counter of seconds
        seconds.append(by_path)
    paths = sorted({*seconds[0], *seconds[1]}, key=lambda path: -abs(seconds[1][path] - seconds[0][path]))
    rows = [("a run", ours.seconds, theirs.seconds), *((path, seconds[0][path], seconds[1][path]) for path in paths)]
    return tuple(Change(name, f"{1000 * a:,.3f}", f"{1000 * b:,.3f}") for name, a, b in rows)


@dataclass(eq=False)
class ModelProgram:
    """One program of a compiled flow: its inputs, its outputs, and the check of the arguments of a call.

    Attributes:
        programs: the compiled programs of the model.
        name: the name of the flow.
        program: the name of the program, such as `forward`.
    """

    programs: Programs = field(repr=False)
    name: str
    program: str = "forward"

    @property
    def inputs(self) -> tuple[InputDecl, ...]:
        """Return the inputs of the program: first the inputs of the flow, then those added by stages or `derive`.

        Added ones are, for example, `lengths` and the arrays of an explicit cache. Required inputs that no output
        reads, or that the program has in its state, are left out.
        """
        return self._input_decls(frozenset())

    def _named_values(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[InputDecl, ...], dict[str, Any]]:
        """Return the inputs that a call may have, and the values that this call passes, by name.

        Which inputs the program reads depends on the optional ones that are passed.
        """
        decls = self.inputs
        if optional := frozenset(d.name for d in decls if d.optional and named.get(d.name) is not None):
            decls = self._input_decls(optional)
        unread = self._unread(optional)
        first_unread = next((d.name for d in self.flow._inputs[:1] if d.name in unread and not d.optional), "")
        return decls, bind_names(decls, args, named, self.flow.name, unread, first_unread)

    def _input_decls(self, optional_inputs: frozenset[str]) -> tuple[InputDecl, ...]:
        """Return the inputs of the program with the optional inputs `optional_inputs`; see `inputs`."""
        template = self._template(optional_inputs)
        read_names = {i.input for i in template.mir.inputs}
        flow_decls = tuple(d for d in self.flow._inputs if d.optional or d.name in read_names)
        names = {d.name for d in flow_decls}
        added = (i for i in template.mir.inputs if i.input not in names)
        optional = (InputDecl(i.input, i.type, None) for i in template.optional if i.input not in names)
        return (*flow_decls, *(InputDecl(i.input, i.type) for i in added), *optional)

    @property
    def first_input(self) -> str:
        """Return the name of the first input that an output reads; for a text model, its tokens."""
        return self.programs.first_input(self.name)

    @property
    def unread_inputs(self) -> frozenset[str]:
        """Return the inputs of the flow that no output reads, neither with all optional inputs nor without them."""
        optional = frozenset(d.name for d in self.flow._inputs if d.optional)
        # An optional input can change what is read, so both extremes are traced; without one, once is enough.
        unread = self.programs.unread_inputs(self.name, frozenset()) - optional
        return unread & self.programs.unread_inputs(self.name, optional) if unread and optional else unread

    @property
    def request_inputs(self) -> dict[str, InputDecl]:
        """Return the declarations, by name, of the inputs that a request passes in addition to its tokens.

        These are the inputs that some output reads and that have no dimension `seq`; the others are computed from the
        tokens.
        """
        others = self.unread_inputs | {self.first_input}
        return {d.name: d for d in self.flow._inputs if d.name not in others and "seq" not in d.type.symbols}

    @property
    def flow(self) -> Buildable:
        """Return the flow that was compiled."""
        return self.programs.flows[self.name]

    @property
    def built(self) -> Built:
        """Return the built flow, without optional inputs."""
        return self.programs.build(self.name, frozenset())

    @property
    def settings(self) -> Settings:
        """Return the profile, resolved for this model."""
        return self.programs.settings

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the outputs, the primary one first."""
        # `explicit` adds outputs; no other program is derived, as a request may derive it without some outputs.
        adds_outputs = "explicit" in (self.program, self.built.program)
        return self._template().mir.output_names if adds_outputs else self.built.output_names

    def template(self, program: str | None = None, *, last_only: bool = False) -> Template:
        """Return the template of a program, its form with symbolic sizes; by default of `self.program`."""
        return self.programs.template(ProgramKey(self.name, program or self.program, last_only=last_only))

    def diff(
        self, other: ModelProgram, *, sizes: Mapping[str, int] | None = None,
        times: tuple[BlockTimes, BlockTimes] | None = None,
    ) -> ModelDiff:  # fmt: skip
        """Return the differences between this model and another one, in this program. Nothing is compiled.

        Blocks are compared by path: their ops, types, weights and implementations.

        Args:
            other: a model with the same program; neither needs weights.
            sizes: the size of each symbolic dimension, such as `{"batch": 1, "seq": 128}`; None leaves out FLOPs, bytes
                and implementations.
            times: what `profile` returned for this model and for the other one, to compare them too.

        Raises:
            GraphError: `other` is no compiled model or has another program; a size is missing or unknown; `times` is
                something else.
        """
        if not isinstance(other, ModelProgram) or other.program != self.program:
            got = other.program if isinstance(other, ModelProgram) else shown(other)
            raise GraphError(
                f"diff: expected a compiled model with the program {self.program}, such as "
                f"compile(flow).as_program({self.program!r}) or the .model of a CausalLM; got {got}"
            )
        if times is not None and not (isinstance(times, tuple) and [*map(type, times)] == [BlockTimes, BlockTimes]):
            raise GraphError(f"diff: times is {shown(times)}; expected what profile returned for both models")
        return diff_programs((self.programs, self.key()), (other.programs, other.key()), sizes or {}, times)

    def manifest(self, **sizes: int) -> BindingManifest:
        """Return the arrays that the program takes and returns, with bytes; `weight_blocks()` has them by layer.

        Args:
            sizes: the size of each symbol, such as `batch=1, seq=16`; without them, arrays with symbolic sizes have no
                bytes.

        Raises:
            GraphError, ShapeError: a size is missing, unknown or not a number.
        """
        if not sizes and self._template().symbols:
            return BindingManifest.from_lir(Lir(self._template().mir, self.settings.plan))
        return BindingManifest.from_lir(self.programs.function(key_with_sizes(self.programs, self.key(), sizes)).lir)

    def _template(self, optional_inputs: frozenset[str] = frozenset()) -> Template:
        return self.programs.template(self.key(optional_inputs))

    def _unread(self, optional_inputs: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Return the inputs that no output reads; () for programs that the package calls, which pass no such input."""
        return self._template(optional_inputs).unread if self.program in ("forward", "train", "explicit") else ()

    def key(
        self, optional_inputs: frozenset[str] = frozenset(), outputs: tuple[str, ...] | None = None,
        last_only: bool = False,
    ) -> ProgramKey:  # fmt: skip
        """Return the key of this program, without sizes, for these optional inputs and outputs."""
        # All outputs by name and None mean the same program, and must have the same key.
        names = None if outputs is None or outputs == self.output_names else outputs
        return ProgramKey(self.name, self.program, optional_inputs, outputs=names, last_only=last_only)

    def _bind(
        self, args: tuple[Any, ...], named: Mapping[str, Any], state: State | None, allow_symbolic: bool = False
    ) -> tuple[dict[str, Any], ProgramKey, StateArrays]:
        """Check and normalize the inputs.

        Returns:
            The inputs by name, the key of the program for their sizes, and the arrays of the state. With symbolic sizes
            the key has none.
        """
        flow, decls, values_by_name = self.flow, *self._named_values(args, named)
        optional = frozenset(d.name for d in decls if d.optional and d.name in values_by_name)
        template = self._template(optional)
        refuse_unread(optional, self._unread(optional), flow.name)
        declared = {i.input: i.type for i in template.mir.inputs}
        check_required(declared, values_by_name, flow.name)
        bounds = template.bounds
        devices = self.settings.check_ids
        one_row = {d.name for d in decls if d.rows_optional}
        # Callers may pass the first input even if no output reads it: it is checked like the others, then dropped.
        unread = {d.name: d.type for d in flow._inputs[:1] if d.name in values_by_name and d.name not in declared}
        types = {**declared, **unread}
        values = {n: value_or_spec(n, values_by_name[n], t, bounds.ids.get(n), devices) for n, t in types.items()}
        values |= {n: as_row(v) for n, v in values.items() if n in one_row and v.ndim == types[n].rank - 1}
        sizes = bind_sizes(types, values, flow.name, allow_symbolic=allow_symbolic)
        if unread:
            symbols = {symbol for t in declared.values() for symbol in t.symbols}
            sizes = {symbol: size for symbol, size in sizes.items() if symbol in symbols}
        values = to_model_devices({n: values[n] for n in declared}, self.programs.model_sharding)
        if not all(map(is_static, sizes.values())):
            if template.state:
                raise ShapeError(
                    f"{flow.name}: program {self.program} has a state: model.export exports it for all sizes"
                )
            check_symbolic_length(sizes, bounds, flow.name)
            return values, self.key(optional), {}
        check_total_length(sizes, bounds, flow.name)
        check_rows(values, bounds, sizes, devices)
        arrays = state_arrays(self.program, template.state, state, sizes)
        if self.program in CACHED_PROGRAMS:
            low = 1 if self.program == "prefill" else 0
            check_new_tokens(values["lengths"], sizes["seq"], low, sizes.get("context"))
        key = ProgramKey(self.name, self.program, optional, binding=tuple(sorted(sizes.items())))
        return values, key, arrays
