"""What carries a state along the sequence, as methods: a step of one's own, and the last tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Constant, located
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.token_step import traced_step
from rlx_jax.ir.types import TensorType, is_float, is_static
from rlx_jax.trace.attention import Attending
from rlx_jax.trace.checks import check_count
from rlx_jax.trace.user_step import UsersStep
from rlx_jax.trace.weight_part import WeightKey
from rlx_jax.trace.writer import V, is_number

F32 = np.dtype(np.float32)


def wide(t: TensorType, lead: int = 0) -> TensorType:
    """What a step is given of a value: without its `lead` first axes, floats as f32."""
    return TensorType(t.shape[lead:], F32 if is_float(t.dtype) else t.dtype)


def step_name(step: Any) -> str:
    """What a step is called that was given no name."""
    return str(getattr(step, "__name__", "step")).replace("<lambda>", "step")


class Recurring(Attending[V]):
    """Blocks that carry a state, and all of `Attending`."""

    def recurrent(
        self, step: Callable[..., Any], x: Any, *params: Any, init: Any, unroll: int | None = None, label: str = ""
    ) -> Any:
        """`state, y_t = step(state, x_t, *params)` for each token of each row, from `init`; every y, `[B, S, …]`.

        The step is a JAX function of ONE row and ONE token, on arrays, and pure: it is traced once. It is given, and
        its state is, f32 where a value is a narrower float; floating y come in the dtype of x.

        Args:
            x: a value `[B, S, …]`, or a tuple, list or dict of them; the step gets `x_t` in the same form.
            params: weights by key or value, or values without batch and tokens, or pytrees of them.
            init: the state before the first token: an array or number, a value without batch (a learned start), or a
                pytree of them. Its form and types are those of every state.
            unroll: tokens that the loop takes in one turn; None: 1, and on GPUs 8 where the step is small.
            label: what dumps and messages call the step; its own name otherwise.

        Raises:
            GraphError: the step is not pure, gives a state of another form or type, or reads what another trace
                computes; the message names the stage and the leaf.
            ShapeError: an x is not `[B, S, …]`, or a parameter has the batch or the tokens as an axis.
        """
        name = label or step_name(step)
        where = f"{self.path}: recurrent({name})"
        if not callable(step):
            raise GraphError(f"{self.path}: recurrent takes a function step(state, x_t, *params), got {shown(step)}")
        if unroll is not None:
            check_count(unroll, f"{where}: unroll")
        xs, x_form = jax.tree.flatten(x)
        weights, weights_form = jax.tree.flatten(params)
        starts, state_form = jax.tree_util.tree_flatten_with_path(init)
        self._check_tokens(where, xs)
        weights = [self.weight(w) for w in weights]
        self._check_shared(where, "parameter", weights, xs[0])
        slots, learned = self._slots(where, starts, xs[0], len(xs) + len(weights))
        types = [self.type_of(v) for v in (*xs, *weights)]
        given = [s.type for s in slots] + [wide(t, 2 * (i < len(xs))) for i, t in enumerate(types)]
        forms = (state_form, x_form, weights_form)
        users = UsersStep(step, name, tuple(s.name for s in slots), len(xs), tuple(given), *forms)
        with located(self.builder.here):
            traced = traced_step(name, users, given)
        self.captured.record(where, tuple(given), (traced.text, traced.captured), step)
        block = hir.Recurrent(traced, slots, len(xs), unroll)
        return jax.tree.unflatten(traced.y_form, self.add_all(block, *xs, *weights, *learned))

    def gated_delta(
        self,
        q: V,
        k: V,
        v: V,
        g: V,
        beta: V,
        *,
        key_heads: int,
        value_heads: int,
        scale: float | None = None,
        unit: float | None = None,
    ) -> V:
        """Return the gated delta rule over packed heads: q, k `[B, S, Hk·K]`, v `[B, S, Hv·V]`, g and beta `[B, S, Hv]`
        → `[B, S, Hv·V]`. See `hir.GatedDelta`."""
        return self.add_node(hir.GatedDelta(key_heads, value_heads, scale, unit), q, k, v, g, beta)

    def causal_conv(self, x: V, w: V | WeightKey, bias: V | WeightKey | None = None) -> V:
        """Return each channel convolved with its own window of the last J tokens: x `[B, S, C]`, w `[C, J]` or
        `[C, 1, J]`, bias `[C]` → `[B, S, C]`. Rows before the first token are zeros; prefill and extend carry them."""
        weights = [self.weight(value) for value in (w, bias) if value is not None]
        return self.add_node(hir.CausalConv(bias is not None), x, *weights)

    def selective_scan(self, x: V, dt: V, a: V, b: V, c: V, *, groups: int = 1) -> V:
        """Return a selective scan over packed heads: x `[B, S, H·P]`, dt `[B, S, H]`, a `[H]` or `[H, n]`, b and c
        `[B, S, G·n]` → `[B, S, H·P]`. See `SelectiveScanOp`."""
        heads = self.type_of(dt).shape[-1] if self.type_of(dt).rank else 0
        if not is_static(heads):
            raise ShapeError(f"{self.path}: selective_scan: dt is [B, S, H] with known heads, got {self.type_of(dt)}")
        return self.add_node(hir.SelectiveScan(int(heads), groups), x, dt, a, b, c)

    def time_steps(self, t: V, bias: V, a_log: V, *, low: float = 0.0, high: float | None = None) -> tuple[V, V]:
        """Return `clip(softplus(t + bias), low, high)` `[B, S, H]` and `−exp(a_log)` `[H]`, both f32: t `[B, S, H]`,
        bias and a_log `[H]`. They are the dt and a of `selective_scan`, and their product is the g of `gated_delta`."""
        step, rate = self.add_all(hir.TimeSteps(low, high), t, bias, a_log)
        return step, rate

    def causal_window(self, x: V, width: int) -> V:
        """The last `width` tokens up to each, zeros before the first: x `[B, S, …]` → `[B, S, width, …]`.

        Raises:
            GraphError: the width is no int of at least 1. ShapeError: x is not `[B, S, …]`.
        """
        return self.add_node(hir.CausalWindow(check_count(width, f"{self.path}: width")), x)

    def _check_tokens(self, where: str, xs: Sequence[Any]) -> None:
        """What is read is values `[B, S, …]` of one batch and as many tokens."""
        if not xs:
            raise GraphError(f"{where}: x is a value [B, S, …], or a tuple or dict of them; there are none")
        types = [self.type_of(v) for v in xs]
        for t in types:
            if t.rank < 2 or t.shape[:2] != types[0].shape[:2]:
                raise ShapeError(f"{where}: x is [B, S, …], got {', '.join(map(str, types))}")
            _check_static(where, "x", t, t.shape[2:])

    def _check_shared(self, where: str, what: str, values: Sequence[Any], x: Any) -> None:
        """What every row and token reads has neither as an axis."""
        lead = {str(d) for d in self.type_of(x).shape[:2] if not isinstance(d, int)}
        for number, value in enumerate(values):
            t = self.type_of(value)
            if found := sorted(lead & t.symbols):
                raise ShapeError(
                    f"{where}: {what} {number} is {t}: every row and token reads the same one; give what has "
                    f"{' and '.join(found)} as an axis as a part of x, [B, S, …]"
                )
            _check_static(where, f"{what} {number}", t, t.shape)

    def _slots(
        self, where: str, starts: Sequence[Any], x: Any, first: int
    ) -> tuple[tuple[hir.StateSlot, ...], list[Any]]:
        """The slots of a state that starts so, and the values among the starts; those are operands from `first` on."""
        slots: list[hir.StateSlot] = []
        learned: list[Any] = []
        for path, start in starts:
            name = re.sub(r"\W+", "_", jax.tree_util.keystr(path)).strip("_") or "state"
            name = f"state_{name}" if name[0].isdigit() else name
            if is_number(start) or isinstance(start, np.ndarray | jax.Array):
                array = _start_array(f"{where}: init leaf {name}", start)
                zeros = not array.array.any()
                slots.append(hir.StateSlot(name, array.type, initial=None if zeros else array))
            elif isinstance(start, str):
                raise GraphError(f"{where}: init is {shown(start)}; expected arrays, such as np.zeros(8, 'f4')")
            else:
                self._check_shared(where, f"init leaf {name}, number", [start], x)
                slots.append(hir.StateSlot(name, wide(self.type_of(start)), initial=first + len(learned)))
                learned.append(start)
        if not slots:
            raise GraphError(f"{where}: init has no arrays; what carries no state treats tokens alone: use emit.jax")
        return tuple(slots), learned


def _check_static(where: str, what: str, t: TensorType, sizes: Sequence[Any]) -> None:
    """A step is traced once, for arrays of one size."""
    if not all(map(is_static, sizes)):
        raise ShapeError(f"{where}: {what} is {t}: beside batch and tokens every size is a number")


def _start_array(where: str, start: Any) -> Constant:
    """An initial value of the state, floats as f32."""
    try:
        found = small_constant(start)
    except GraphError as error:
        raise type(error)(f"{where}: {error}") from error
    return small_constant(found.array, F32) if is_float(found.type.dtype) else found
