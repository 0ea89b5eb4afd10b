"""What the axes of parameters, states and values are. One table maps these roles to the axes of a mesh of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlx_jax.errors import GraphError, did_you_mean, listing, shown
from rlx_jax.ir.param import Conflict, Key, Parts, Program, Role, Roles
from rlx_jax.ir.types import TensorType, is_static

R = TypeVar("R", bound=Role)

# Every role, and what has it.
ROLES: Mapping[str, str] = {
    "batch": "rows of a request, or of a training batch",
    "sequence": "tokens of a row",
    "heads": "query heads, packed or not",
    "kv_heads": "key and value heads, packed or not",
    "groups": "heads of keys that heads with a state share, packed or not",
    "ffn": "inside of a feed-forward block",
    "vocab": "rows of an output head, and of an embedding that it is tied to",
    "embedding": "rows of a table that ids look up",
    "hidden": "width of the values between blocks, as an axis of a matrix",
    "experts": "experts of a mixture",
    "channel": "the only axis of a vector: norms, and biases of what is as wide as the values between blocks",
}


def check_roles(roles: Sequence[R], t: TensorType, where: str) -> tuple[R, ...]:
    """A role, or None, or several side by side, for every axis.

    Raises:
        GraphError: another number of axes than `t` has, an unknown role, or one that stands twice.
    """
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise GraphError(f"{where}: roles are one name, or None, for each axis; got {shown(roles)}")
    each = [role for axis in roles for role in ([r for _, r in axis.of] if isinstance(axis, Parts) else [axis])]
    for role in each:
        if role is not None and role not in ROLES:
            close = did_you_mean(role, ROLES) if isinstance(role, str) else ""
            raise GraphError(f"{where}: there is no role {shown(role)}; roles are {listing(ROLES, len(ROLES))}{close}")
    named = [role for role in roles if role is not None]
    if len(roles) != t.rank or len(set(named)) < len(named):
        raise GraphError(f"{where}: {t} needs one role, or None, for each of its axes, each once; got {shown(roles)}")
    for axis, dim in zip(roles, t.shape, strict=True):
        if isinstance(axis, Parts) and is_static(dim) and sum(size for size, _ in axis.of) != dim:
            raise GraphError(f"{where}: {t}: the parts of an axis make up its {dim}; got {axis}")
    return tuple(roles)


def agreed(first: Roles, second: Roles) -> Roles:
    """Merge the roles that two uses of one weight give to its axes.

    A table that ids look up, and that is the head too, is a head; keys and values that are as many as queries may be
    called after these. Other roles that differ are a `Conflict`, which matters only on a mesh that divides one of them.
    """
    found: list[Role] = []
    for one, other in zip(first, second, strict=True):
        if {one, other} == {"embedding", "vocab"}:
            found.append("vocab")
        elif {one, other} == {"heads", "kv_heads"}:
            found.append("kv_heads")
        elif one == other or one is None or other is None:
            found.append(one or other)
        else:
            both = [role.of if isinstance(role, Conflict) else (role,) for role in (one, other)]
            found.append(Conflict(tuple(dict.fromkeys(role for roles in both for role in roles))))
    return tuple(found)


def roles_of_bias(out: Role) -> Roles:
    """Of what is added to a product whose last axis is `out`."""
    return ("channel" if out == "hidden" else out,)


def of_program(program: Program, known: Mapping[str, Roles]) -> Roles:
    """The roles of a parameter's axes, from those of the tensors that it is made of: `known`, by checkpoint key."""
    if isinstance(program, Key):
        return known.get(program.key) or (("channel",) if program.type.rank == 1 else (None,) * program.type.rank)
    return program.roles(*(of_program(part, known) for part in program.parts))


def of_dims(t: TensorType) -> tuple[str | None, ...]:
    """The roles that the dims of a value have by their names: `batch` and `seq` have meaning."""
    meaning = {"batch": "batch", "seq": "sequence"}
    return tuple(meaning.get(str(dim)) for dim in t.shape)
