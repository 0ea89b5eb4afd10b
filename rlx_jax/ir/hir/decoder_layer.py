"""A decoder layer, written once: the block that stands for a whole layer and the stages of `rlx_jax.blocks` call these.

Values are of whatever kind the caller writes, `Value` or `FlowValue`; the arguments write the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")

Project = Callable[[str, V], V]
"""Write the projection of a name, `q`, `k`, `v`, `gate`, `up` or `down`, of a value."""


def write_layer(
    x: V,
    *,
    norm: Callable[[str, V], V],
    mixer: Callable[[V], V],
    mlp: Callable[[V], V],
    add: Callable[[V, V], V],
) -> V:
    """Write `h = x + after(mixer(before(x)))`, `y = h + after(mlp(before(h)))`.

    Args:
        x: the input `[B, S, H]`.
        norm: writes the norm of a name (`before_attention`, `after_attention`, `before_mlp`, `after_mlp`) of a value,
            or returns the value where the layer has no such norm.
        mixer: writes attention with its output projection, or what stands in its place.
        mlp: writes the feed-forward half.
        add: writes the residual sum of a value and its change.
    """
    h = add(x, norm("after_attention", mixer(norm("before_attention", x))))
    return add(h, norm("after_mlp", mlp(norm("before_mlp", h))))


def write_attention(
    x: V,
    *,
    project: Project[V],
    rotate: Callable[[dict[str, V]], dict[str, V]],
    attend: Callable[[V, V, V], V],
) -> V:
    """Write attention of a normalised `[B, S, H]` up to its context `[B, S, N·D]`.

    Args:
        x: what the projections read.
        project: writes q, k or v.
        rotate: writes what happens to the heads before attention, such as norms and the rotation of q and k.
        attend: writes attention over q, k and v.
    """
    heads = rotate({name: project(name, x) for name in "qkv"})
    return attend(heads["q"], heads["k"], heads["v"])


def write_gated_ffn(x: V, *, project: Project[V], gate: Callable[[V, V], V]) -> V:
    """Write `gate(x Wg, x Wu) Wd`."""
    return project("down", gate(project("gate", x), project("up", x)))
