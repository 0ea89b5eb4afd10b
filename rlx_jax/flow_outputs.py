"""`FlowOutputs` chooses which values of a flow its programs return, and under which names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, check_names, quote
from rlx_jax.ir.types import as_names
from rlx_jax.lowering.hir.explicit import collect_caches
from rlx_jax.trace.emit import Emit, FlowValue


class LabelHead(Protocol):
    """What the logits of a flow with labels mean; `rlx_jax.models.encoder.TaskHead` is one.

    Attributes:
        task: what the head is for, as in `architectures` of a config.json after `For`.
        problem: transformers' `problem_type`; empty if the config has none.
        pooling: the token of a text that its logits are read at: `cls` or `lasttoken`.
        padding_id: the id that `lasttoken` skips at the end of a text; None for none.
    """

    @property
    def task(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def pooling(self) -> str: ...
    @property
    def padding_id(self) -> int | None: ...


@dataclass(frozen=True)
class FlowOutputs:
    """The outputs of a flow by name.

    Attributes:
        primary: name of the first output, by default the last active value.
        side: names of the side outputs; None for every value that stages pass to `emit.output`.
        chooses_primary: the first output is the value registered under its name, if any, else the last active value.
        taps_caches: keys, values and states for later tokens are outputs too; see `ModelFlow.export_kv`.
        label_head: the meaning of the primary output, if it is logits of labels.
    """

    primary: str = "output"
    side: tuple[str, ...] | None = None
    chooses_primary: bool = False
    taps_caches: bool = False
    label_head: LabelHead | None = None

    def values(self, emit: Emit, last: FlowValue, captured: tuple[str, ...], where: str) -> dict[str, FlowValue]:
        """Return the outputs of a flow, after its stages have run, the primary output first.

        Args:
            last: its last active value.
            captured: names of the side outputs that edits added.
            where: name of the flow in errors.

        Raises:
            GraphError: a name has no value, or two.
        """
        taps = _tap_caches(emit, where) if self.taps_caches else ()
        side = self._side(emit, (*captured, *taps), where)
        if self.primary in side:
            raise GraphError(f"{where}: the output and a side output are both {quote(self.primary)}")
        return {self.primary: self._primary(emit, last, where)} | side

    def _primary(self, emit: Emit, last: FlowValue, where: str) -> FlowValue:
        """Return the value of the primary output."""
        named = _named_values(emit).get(self.primary)
        if named is None or self.chooses_primary:
            return last if named is None else named
        if named.value != last.value:
            raise GraphError(
                f"{where}: {quote(self.primary)} would name the last value, but a stream, register or side output "
                f"with another value has this name: outputs([{self.primary!r}]) chooses that value, another name keeps "
                "both"
            )
        return last

    def _side(self, emit: Emit, taps: tuple[str, ...], where: str) -> dict[str, FlowValue]:
        """Return the side outputs: all that stages emitted, or the ones that the flow names. The values of `taps` come
        last if the flow names none of them."""
        if self.side is None:
            return emit.state.outputs
        values = _named_values(emit)
        names = self.side if any(name in taps for name in self.side) else (*self.side, *taps)
        suffix = "; emit.output(name, value) and store_stream(name) make one; side outputs, registers and streams are"
        check_names(names, values, f"{where}: there is no output", suffix)
        return {name: values[name] for name in names}


def _named_values(emit: Emit) -> dict[str, FlowValue]:
    """Return the values that an output may refer to by name: streams, registers and side outputs."""
    return {**emit.state.streams, **emit.state.named, **emit.state.outputs}


def _tap_caches(emit: Emit, where: str) -> tuple[str, ...]:
    """Register keys, values and states for later tokens as side outputs, and return their names."""
    taps, states = collect_caches(emit.builder)
    if states:
        emit.state.repeats.clear()  # CSE can merge a state with ops of its block only outside of regions
        taps |= states
    if not taps:
        raise GraphError(
            f"{where}: export_kv: no stage has causal attention or carries a state, so there are no keys to export"
        )
    for name, value in taps.items():
        registered = emit.state.outputs.setdefault(name, emit.wrap(value))  # a layer may have tapped it already
        if registered.value != value:
            raise GraphError(
                f"{where}: export_kv exports {quote(name)}, and a stage has a side output of that name with another "
                "value: leave out export_kv, or the stage that taps them"
            )
    return tuple(taps)


def names_of(names: str | Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of outputs as a tuple, checked; `names` may be a single string."""
    return as_names((names,) if isinstance(names, str) else names, where)
