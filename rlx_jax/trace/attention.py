"""The methods for attention, rotary embeddings and positions.

Axis letters: B batch, S queries, T keys, N query heads, K key heads, D head width, E width of a head's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, ShapeError, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Value
from rlx_jax.ir.types import TensorType, is_float, is_static, symbol
from rlx_jax.trace.checks import items_of
from rlx_jax.trace.control import Control
from rlx_jax.trace.frequencies import Frequencies, axial_frequencies, frequencies
from rlx_jax.trace.parameters import WeightKey
from rlx_jax.trace.writer import V, is_integer, is_number

I32 = np.dtype(np.int32)
# Layouts of heads: packed in the last axis, `[B, S, N·D]`, or along a separate axis, `[B, S, N, D]`.
LAYOUTS = ("packed", "heads")

# Keys at less than this distance; or the numbers of keys before and after the query's position.
Window = int | tuple[int, int] | None


@dataclass(frozen=True)
class Rotary(Generic[V]):
    """A rotation at given positions, as returned by `rotary`.

    It has the tables cos and sin `[B|1, S, n_rot/2]` for the first `n_rot` columns of each head; `style` is the pairing
    of the columns.
    """

    cos: V
    sin: V
    n_rot: int
    style: str = "half"


class AttentionBuilders(Control[V]):
    """Attention, rotary embeddings and positions over the values `V` of a writer."""

    # -- positions and rotations -------------------------------------------------------------

    def positions(self, x: V) -> V:
        """Return the absolute position of each token of x `[B, S, …]`: i32 `[1, S]`, or `[B, S]` after a cache."""
        return self.add_node(hir.Positions(), x)

    def rotary(
        self, positions: V, *, head_dim: int, theta: float = 10000.0, n_rot: int | None = None, style: str = "half",
        scaling: Callable[[Frequencies], Frequencies] | None = None,
    ) -> Rotary[V]:  # fmt: skip
        """Return the rotation of heads of width `head_dim` at positions `[B|1, S]`, for `rope` and
        `attention(…, rope=)`.

        Args:
            theta: θ of the inverse frequencies θ^(−2i/R).
            n_rot: R, the number of rotated columns of each head; by default all.
            style: "half" pairs columns i and i + R/2 (Llama, NeoX), "interleaved" 2i and 2i + 1 (GPT-J).
            scaling: a function of the frequencies, such as `lambda f: blocks.linear_scaling(f, 8.0)`.
        """
        columns = head_dim if n_rot is None else n_rot
        if columns < 2 or columns % 2 or columns > head_dim:
            raise ShapeError(f"{self.path}: rotary: n_rot is even and at most head_dim {head_dim}, got {columns}")
        inv_freq = frequencies(columns, theta)
        if scaling is not None:
            inv_freq = items_of(scaling(inv_freq), f"{self.path}: rotary", "as many frequencies from scaling=")
            if len(inv_freq) != columns // 2:
                raise ShapeError(f"{self.path}: rotary: scaling returns {len(inv_freq)} frequencies for {columns // 2}")
        return Rotary(*self.rope_angles(positions, inv_freq), columns, style)

    def rope_angles(
        self, positions: V, inv_freq: Sequence[float], *, factor: float = 1.0, axes: Sequence[int] = ()
    ) -> tuple[V, V]:
        """Return cos and sin at positions `[B|1, S]`, times `factor`: two f32 `[B|1, S, R/2]` for R/2 frequencies.

        With `axes`, positions are `[B|1, S, A]`, and frequency i rotates by coordinate `axes[i]`;
        `rlx_jax.blocks.axial_frequencies` returns frequencies and axes for a width of each coordinate.
        """
        inv_freqs = items_of(inv_freq, f"{self.path}: rope_angles", "a list of inverse frequencies")
        coordinates = items_of(axes, f"{self.path}: rope_angles", "the coordinate of each frequency as axes")
        cos, sin = self.add_all(hir.RopeAngles(inv_freqs, factor, coordinates), positions)
        return cos, sin

    def sinusoids(self, t: V, channels: int, *, scale: float = 1.0, max_period: float = 10000.0) -> V:
        """Return the timestep embedding `[cos(scale · t f) ‖ sin(scale · t f)]` with `f_i = max_period^(−i/half)`.

        Times are `[B]` and the result is f32 `[B, channels]`. It is computed in f32 in programs of any dtype.
        """
        return self.add_node(hir.Sinusoids(channels, scale, max_period), t)

    def rope(
        self, x: V, at: V | Rotary[V], sin: V | None = None, *, head_dim: int, theta: float | None = None,
        n_rot: int | None = None, style: str | None = None, scaling: Callable[[Frequencies], Frequencies] | None = None,
    ) -> V:  # fmt: skip
        """Return x `[B, S, N·D]` or `[B, S, N, D]` with the rotary embedding applied to its heads.

        Args:
            at: positions `[B|1, S]`, with the options of `rotary`; or the result of `rotary`; or the table cos,
                followed by `sin`. Tables are `[B|1, S, W]`, or `[S, W]` with a row for each token of x, or `[rows, W]`
                with a row for each position; the first n_rot/2 columns are read.
            theta, scaling: as in `rotary`; only for positions, because tables already include them.
            n_rot, style: as in `rotary`; not with its result.
        """
        if (isinstance(at, Rotary) or sin is not None) and (theta, scaling) != (None, None):
            raise GraphError(f"{self.path}: rope: theta and scaling are for positions, but got tables")
        if isinstance(at, Rotary):
            if any(value is not None for value in (sin, style, n_rot)):
                raise GraphError(f"{self.path}: rope: sin, style and n_rot are part of the result of rotary")
        elif sin is not None:
            at = Rotary(at, sin, head_dim if n_rot is None else n_rot, style or "half")
        else:
            base = 10000.0 if theta is None else theta
            at = self.rotary(at, head_dim=head_dim, theta=base, n_rot=n_rot, style=style or "half", scaling=scaling)
        return self._rotate(x, at, head_dim)

    def _rotate(self, x: V, at: Rotary[V], head_dim: int) -> V:
        """Return x in its layout with the rotation applied to its heads."""
        packed = self._pack_heads("rope", x, head_dim)
        cos, sin = (self._token_table(packed, table) for table in (at.cos, at.sin))
        rotated = self.add_node(hir.Rope(head_dim, at.n_rot, at.style), packed, cos, sin)
        return rotated if self.type_of(x).rank == 3 else self._unpack_heads(rotated, head_dim)

    def _token_table(self, x: V, table: V) -> V:
        """Return a table of rotations as `[B|1, S, W]`.

        A table with a static number of rows has one for each position, so that tokens after a cache read later rows. A
        table as long as x has one row for each token of x, whatever its position is.
        """
        rows, tokens = self.type_of(table), self.type_of(x)
        if rows.rank != 2:
            return table
        if is_static(rows.shape[0]):
            return self.gather(table, self.positions(x))
        if tokens.rank < 2 or rows.shape[0] != tokens.shape[1]:
            raise ShapeError(
                f"{self.path}: rope: tables are [B, S, W], [S, W] or [rows, W] with a known number of rows for x "
                f"{tokens}; got {rows}"
            )
        return self.expand_dims(table, 0)

    def axial_rope_2d(
        self, x: V, *, end_x: int, end_y: int, head_dim: int, theta: float = 10000.0, repeat_factor: int = 1
    ) -> V:
        """Rotate the heads of an image's tokens by column and row: x `[B, end_x·end_y·repeat_factor, N·D]`.

        Column pairs are interleaved. The first D/2 columns of a head rotate by the token's column, the others by its
        row, each with frequencies θ^(−4c/D), c < D/4. Cells are in row-major order with `repeat_factor` tokens each.

        Raises:
            ShapeError: D is no multiple of 4, or x has another number of tokens.
        """
        tokens = end_x * end_y * repeat_factor
        x_type = self.type_of(x)
        if head_dim % 4 or head_dim < 4:
            raise ShapeError(f"{self.path}: axial_rope_2d: head_dim is a multiple of 4, got {head_dim}")
        if x_type.rank != 3 or not is_static(x_type.shape[1]) or x_type.shape[1] != tokens or tokens < 1:
            raise ShapeError(
                f"{self.path}: axial_rope_2d: x is [B, {tokens}, N·{head_dim}] for {end_x} x {end_y} cells of "
                f"{repeat_factor}, got {x_type}"
            )
        cell = np.arange(tokens, dtype=np.int32) // np.int32(repeat_factor)
        inv_freq, axes = axial_frequencies((head_dim // 2, head_dim // 2), theta)
        positions = self.constant(np.stack([cell % end_x, cell // end_x], axis=-1)[None])
        tables = self.rope_angles(positions, inv_freq, axes=axes)
        return self.rope(x, *tables, head_dim=head_dim, style="interleaved")

    # -- attention ---------------------------------------------------------------------------

    def attention(
        self, q: V, k: V, v: V, *, heads: int, kv_heads: int | None = None, head_dim: int | None = None,
        causal: bool | None = None, mask: V | hir.MaskKind | str | None = None, mask_value: V | None = None,
        bias: V | Callable[[V, V], V] | None = None, window: Window = None, softcap: float | None = None,
        scale: float | None = None, rope: Rotary[V] | tuple[V, V] | None = None, sinks: V | WeightKey | None = None,
        layout: str = "packed",
    ) -> V:  # fmt: skip
        """Return `softmax(mask(cap(scale · q kᵀ) + bias)) v` for each head, computed in f32.

        q is `[B, S, N·D]`, k `[B, T, K·D]`, v `[B, T, K·E]`, and the result `[B, S, N·E]`. Query head h reads key head
        h // (N/K). K and D follow from the widths; `kv_heads` and `head_dim` only check them. A key must pass
        causality, mask and window together; a query without any key returns zeros.

        Args:
            causal: queries read no later keys; with more keys than queries, the queries are the last positions. By
                default queries read all keys, unless `mask` names a causal mask kind.
            mask: the keys to keep, as bools, or as numbers, where less than ½ drops a key: `[T]`, `[B, T]`, `[S, T]`,
                `[B, S, T]` or `[B, N, S, T]`, where B, N and S may be 1.
            bias: added to the scores: `[B, N, S, T]`, 1 on any axis, and leading axes may be missing. Or a function of
                the positions of queries `[S, 1]` and keys `[1, T]`, both i32, that returns `[N, S, T]`, written with
                these methods: `lambda q, k: slopes * (k - q)`. A function works in every program, also for cached keys.
            window: read keys at a distance of less than this many tokens, on both sides unless causal; or a pair, the
                numbers of keys before and after the query's position.
            softcap: c in c · tanh(scores / c), applied before mask and bias.
            scale: by default D^(−1/2).
            sinks: `[N]`, an extra score of each head in the softmax, without a value; it is neither scaled nor capped.
            rope: rotates q and k: the result of `rotary`, or (cos, sin) for as many columns as they have, in halves.
            layout: "heads" if q, k and v have an axis of heads, `[B, S, N, D]`; so has the result.
            mask_value: only with the name of a mask kind, such as `mask="custom"`: see `attention_kind`.

        Raises:
            ShapeError, DTypeError: an operand does not fit. GraphError: contradictory options.
        """
        self._check_mask_options(causal, mask, mask_value)
        if isinstance(mask, hir.MaskKind | str):
            self._check_kind_options(
                causal=causal, bias=bias, window=window, rope=rope, sinks=sinks, kv_heads=kv_heads, layout=layout
            )  # fmt: skip
            return self.attention_kind(
                q, k, v, heads=heads, head_dim=head_dim, mask=mask, mask_value=mask_value, scale=scale, softcap=softcap
            )
        q, k, v = (self._to_packed(x, layout, n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        width, groups = self._head_counts(q, k, heads, head_dim, kv_heads)
        if rope is not None:
            q, k = (self._rotate(x, self._as_rotary(rope), width) for x in (q, k))
        past, ahead = self._window_counts(window, bool(causal))
        names, body, operands = self._score_operands(q, k, heads, mask, bias, sinks)
        op = hir.Attention(
            heads, groups, bool(causal), past, scale, softcap, names, ahead=ahead, bias_of=body, sinks=sinks is not None
        )  # fmt: skip
        result = self.add_node(op, q, k, v, *operands)
        return result if layout == "packed" else self._unpack_heads(result, self.type_of(result).shape[-1] // heads)

    cross_attention = attention
    """`attention` over the keys of another sequence. In a model that generates, keys and values that depend on no token
    of its text are computed once, in prefill."""

    def attention_kind(
        self, q: V, k: V, v: V, *, heads: int, head_dim: int | None, mask: hir.MaskKind | str = "causal",
        mask_value: V | None = None, scale: float | None = None, softcap: float | None = None,
    ) -> V:  # fmt: skip
        """Return `attention` with a named mask kind: q `[B, S, N·D]`, k and v `[B, T, K·D]`.

        Some kinds read `mask_value`: "custom" a keep mask `[B, T]` in addition to causality, "keep" only a keep mask (1
        keeps a key, less than ½ drops it), "bias" floats `[B, N, S, T]`, which are added to the scores. See `MaskKind`.
        """
        _, groups = self._head_counts(q, k, heads, head_dim, None)
        op = hir.attention(heads, groups, hir.mask_kind(mask), scale=scale, softcap=softcap)
        return self.add_node(op, q, k, v, *([] if mask_value is None else [mask_value]))

    # -- operands of attention ---------------------------------------------------------------

    def _check_mask_options(self, causal: object, mask: object, mask_value: object) -> None:
        """Check that `causal` is a bool, and that `mask_value` comes with the name of a mask kind."""
        if not (causal is None or isinstance(causal, bool | np.bool_)):
            raise GraphError(f"{self.path}: attention: causal is {shown(causal)}; expected True or False")
        if mask_value is not None and not isinstance(mask, hir.MaskKind | str):
            reason = "there is none" if mask is None else "this is mask="
            raise GraphError(f"{self.path}: attention: mask_value= goes with the name of a mask kind; {reason}")

    def _score_operands(
        self, q: V, k: V, heads: int, mask: V | None, bias: V | Callable[[V, V], V] | None, sinks: V | WeightKey | None
    ) -> tuple[tuple[str, ...], Graph | None, list[V]]:
        """Return the operands of the scores: the names of mask and bias operands, the body of a bias that is a function
        of positions, and all operands after q, k and v."""
        operands = {} if mask is None else {"keep": self._keep_mask(mask, q, k)}
        bias_body, captured = (None, ()) if not callable(bias) else self._trace_bias(bias, q, k, heads)
        operands |= {} if bias is None or callable(bias) else {"bias": self._as_bias(bias)}
        if is_number(sinks):
            raise GraphError(f"{self.path}: attention: sinks is {sinks!r}; expected a value [N], a key, or None")
        sink_scores = [] if sinks is None else [self.weight(sinks, ("heads",), shape=(heads,))]
        return tuple(operands), bias_body, [*operands.values(), *sink_scores, *captured]

    def _check_kind_options(self, *, layout: str, **options: object) -> None:
        """Refuse options that do not go with the name of a mask kind; heads must be packed."""
        for name, value in {**options, "layout": None if layout == "packed" else layout}.items():
            if value is not None:
                raise GraphError(
                    f"{self.path}: attention: {name}= does not go with a mask kind: pass the mask as a value, with "
                    "causal=, window= and bias="
                )

    def _head_counts(self, q: V, k: V, heads: int, head_dim: int | None, kv_heads: int | None) -> tuple[int, int]:
        """Return the width of heads, and the number of key heads, which follows from the width of k."""
        queries, keys = self.type_of(q), self.type_of(k)
        columns = queries.shape[2] if queries.rank == 3 else 0
        if not is_integer(heads) or heads < 1 or not is_static(columns) or not columns or columns % heads:
            raise ShapeError(f"{self.path}: attention: q is [B, S, N·D] with {shown(heads)} heads, got {queries}")
        width = int(columns) // int(heads)
        if head_dim not in (None, width) or keys.rank != 3 or not is_static(keys.shape[2]) or keys.shape[2] % width:
            raise ShapeError(
                f"{self.path}: attention: q is [B, S, {heads}·D] and k [B, T, K·D] with D = "
                f"{shown(width if head_dim is None else head_dim)}; got {queries} and {keys}"
            )
        k_heads = int(keys.shape[2]) // width
        if kv_heads not in (None, k_heads):
            raise ShapeError(
                f"{self.path}: attention: k {keys} has {k_heads} heads of width {width}; kv_heads is {shown(kv_heads)}"
            )
        return width, k_heads

    def _to_packed(self, x: V, layout: str, heads: int | None) -> V:
        """Return x with packed heads, after checking that it has the layout."""
        if layout not in LAYOUTS:
            raise GraphError(f"{self.path}: attention: layout is {quote(layout)}; expected {' or '.join(LAYOUTS)}")
        x_type = self.type_of(x)
        if x_type.rank != 3 + (layout == "heads"):
            forms = "[B, S, N·D]" if layout == "packed" else "[B, S, N, D]"
            other = f'; layout="{LAYOUTS[layout == "packed"]}" is for the other' if x_type.rank in (3, 4) else ""
            raise ShapeError(f"{self.path}: attention: q, k and v are {forms}, got {x_type}{other}")
        if layout == "packed":
            return x
        if heads is not None and x_type.shape[2] != heads:
            raise ShapeError(f"{self.path}: attention: {x_type} has {x_type.shape[2]} heads, expected {heads}")
        return self._pack_heads("attention", x, x_type.shape[3])

    def _pack_heads(self, op: str, x: V, head_dim: int) -> V:
        """Reshape `[B, S, N, D]` to `[B, S, N·D]`, and return packed heads as they are."""
        x_type = self.type_of(x)
        if x_type.rank != 4:
            return x
        if not (is_static(x_type.shape[2]) and is_static(x_type.shape[3])) or x_type.shape[3] != head_dim:
            raise ShapeError(f"{self.path}: {op}: heads are [B, S, N, {head_dim}] of known sizes, got {x_type}")
        return self.reshape(x, (*self.shape(x).shape[:2], int(x_type.shape[2]) * int(x_type.shape[3])))

    def _unpack_heads(self, x: V, head_dim: int) -> V:
        """Reshape `[B, S, N·D]` to `[B, S, N, D]`."""
        *lead, width = self.shape(x).shape
        return self.reshape(x, (*lead, int(width) // head_dim, head_dim))

    def _as_rotary(self, rope: Any) -> Rotary[V]:
        """Return the `rope` argument of `attention` as a Rotary; a pair (cos, sin) rotates in halves."""
        if isinstance(rope, Rotary):
            return rope
        tables = items_of(rope, f"{self.path}: attention: rope", "a result of rotary, or (cos, sin)")
        if len(tables) != 2:
            raise GraphError(
                f"{self.path}: attention: rope is a result of rotary, or (cos, sin); got {len(tables)} values"
            )
        width = self.type_of(tables[0]).shape[-1]  # half of the rotated columns
        return Rotary(*tables, 2 * int(width) if is_static(width) else 0)

    def _window_counts(self, window: Any, causal: bool) -> tuple[int | None, int]:
        """Return a window as two counts: keys up to and including the query's position, or None, and keys after it."""
        if window is None:
            return None, 0
        is_pair = isinstance(window, tuple | list)
        sizes = window if is_pair else (window,)
        if not all(map(is_integer, sizes)) or (is_pair and (len(sizes) != 2 or min(sizes) < 0)):
            expected = "a number of keys or two counts, (before, after)"
            raise GraphError(f"{self.path}: attention: window is {expected}, got {shown(window)}")
        if not is_pair:
            return int(window), 0 if causal else int(window) - 1
        before, after = map(int, sizes)
        if causal and after:
            raise GraphError(
                f"{self.path}: attention: window (before, after) is {shown(window)}, and a causal query reads no key "
                "after its own: leave out causal=True, or write 0 for after"
            )
        return before + 1, after  # the op also counts the query's own key

    def _keep_mask(self, mask: V, q: V, k: V) -> V:
        """Return a keep mask in the op's shape, `[B|1, T]` or `[B|1, N|1, S|1, T]`."""
        if is_number(mask):
            raise GraphError(f"{self.path}: attention: mask is {mask!r}; expected a value, the name of a kind, or None")
        m_type, (batch, queries, _), keys = self.type_of(mask), self.type_of(q).shape, self.type_of(k).shape[1]
        as_rows = m_type.rank == 2 and m_type.shape[0] in (1, batch)
        as_pairs = m_type.rank == 2 and m_type.shape[0] == queries
        fits = m_type.rank in (1, 3, 4) or as_rows or as_pairs
        if not fits or m_type.shape[-1] != keys:
            sizes = f"B = {batch}, S = {queries}, T = {keys}"
            raise ShapeError(
                f"{self.path}: attention: a mask is [T], [B, T], [S, T], [B, S, T] or [B, N, S, T] with {sizes}; "
                f"got {m_type}"
            )
        # With equal batch and sequence, `[B, T]` and `[S, T]` have the same shape, and a guess could be wrong.
        if as_rows and as_pairs and not (is_static(batch) and batch == 1):
            raise ShapeError(
                f"{self.path}: attention: the mask {m_type} may be [B, T] or [S, T], as B and S are both {batch}: "
                "add an axis of 1, mask[:, None] or mask[None]"
            )
        if m_type.rank == 1:
            return self.slice(mask, (None,))
        if m_type.rank == 3:
            return self.slice(mask, (slice(None), None))
        return self.slice(mask, (None, None)) if as_pairs and not as_rows else mask

    def _trace_bias(self, fn: Callable[[V, V], V], q: V, k: V, heads: int) -> tuple[Graph, tuple[V, ...]]:
        """Return a bias function of positions as a traced body, and the values that it captures."""
        where, rows, keys = f"{self.path}: attention: bias=", self.type_of(q), self.type_of(k)
        if rows.shape[1] != keys.shape[1]:
            raise ShapeError(
                f"{where} a function of positions needs as many queries as keys, got q {rows} and k {keys}; pass an "
                "array"
            )
        # Separate symbols for both sizes, so that one body serves every program, also with cached keys.
        position_types = [TensorType(shape, I32) for shape in ((symbol("queries"), 1), (1, symbol("keys")))]
        captures: dict[Value, int] = {}
        body, _ = self._trace("bias", fn, position_types, captures)
        types = body.output_types
        sizes = (heads, *position_types[0].shape[:1], *position_types[1].shape[1:])
        fits = len(types) == 1 and is_float(types[0].dtype) and types[0].rank <= 3
        if not fits or any(dim not in (1, size) for dim, size in zip(types[0].shape[::-1], sizes[::-1], strict=False)):
            raise ShapeError(
                f"{where} the function returns floats [N, S, T], 1 on any axis, with N = {heads}; got {types}"
            )
        for value in captures:
            if (t := self.builder.type(value)).symbols:
                raise GraphError(
                    f"{where} the function reads {t}, with a size of the request; it may read positions, "
                    "weights and numbers: pass an array"
                )
        return body, tuple(self._captured_values(captures))

    def _as_bias(self, bias: V) -> V:
        """Return a bias as `[B|1, N|1, S|1, T|1]`, with missing leading axes added."""
        if is_number(bias):
            raise GraphError(f"{self.path}: attention: bias is {bias!r}; expected a value, or None")
        rank = self.type_of(bias).rank
        return self.slice(bias, (None,) * (4 - rank)) if 0 < rank < 4 else bias
