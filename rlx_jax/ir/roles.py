"""Roles of the axes of parameters, states and values, such as "heads". A sharding maps roles to axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlx_jax.errors import GraphError, did_you_mean, listing, shown
from rlx_jax.ir.param import Conflict, Key, Parts, Program, Role, Roles
from rlx_jax.ir.types import TensorType, is_static

R = TypeVar("R", bound=Role)

# Every role, and the axes that have it.
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
    """Check the roles that a user gives to the axes of `t`, and return them as a tuple.

    Args:
        roles: for each axis a role, None, or `Parts`.
        t: the type of the value.
        where: the beginning of messages.

    Raises:
        GraphError: there is not one role for each axis of `t`, a role is unknown or occurs twice, or the parts of an
            axis do not add up to its size.
    """
    if isinstance(roles, str) or not isinstance(roles, Sequence):
        raise GraphError(f"{where}: roles are one name, or None, for each axis; got {shown(roles)}")
    flat_roles = [role for axis in roles for role in ([r for _, r in axis.of] if isinstance(axis, Parts) else [axis])]
    for role in flat_roles:
        if role is not None and role not in ROLES:
            suggestion = did_you_mean(role, ROLES) if isinstance(role, str) else ""
            raise GraphError(
                f"{where}: there is no role {shown(role)}; roles are {listing(ROLES, len(ROLES))}{suggestion}"
            )
    axis_roles = [role for role in roles if role is not None]
    if len(roles) != t.rank or len(set(axis_roles)) < len(axis_roles):
        raise GraphError(f"{where}: {t} needs one role, or None, for each of its axes, each once; got {shown(roles)}")
    for axis, dim in zip(roles, t.shape, strict=True):
        if isinstance(axis, Parts) and is_static(dim) and sum(size for size, _ in axis.of) != dim:
            raise GraphError(f"{where}: {t}: the parts of an axis make up its {dim}; got {axis}")
    return tuple(roles)


def merge_roles(first: Roles, second: Roles) -> Roles:
    """Return the common roles of a weight's axes, given the roles by two of its uses.

    An embedding table that is also the output head has the role "vocab". If one use has "heads" and the other
    "kv_heads", which may happen if their numbers are equal, the result is "kv_heads". Other roles that differ become a
    `Conflict`, which matters only on a mesh that shards one of them.
    """
    merged: list[Role] = []
    for left, right in zip(first, second, strict=True):
        if {left, right} == {"embedding", "vocab"}:
            merged.append("vocab")
        elif {left, right} == {"heads", "kv_heads"}:
            merged.append("kv_heads")
        elif left == right or left is None or right is None:
            merged.append(left or right)
        else:
            role_lists = [role.of if isinstance(role, Conflict) else (role,) for role in (left, right)]
            merged.append(Conflict(tuple(dict.fromkeys(role for roles in role_lists for role in roles))))
    return tuple(merged)


def roles_of_bias(out: Role) -> Roles:
    """Return the roles of a bias, given the role `out` of the last axis of the product that it is added to."""
    return ("channel" if out == "hidden" else out,)


def program_roles(program: Program, key_roles: Mapping[str, Roles]) -> Roles:
    """Return the roles of a parameter's axes, given the roles of checkpoint tensors by key (`key_roles`)."""
    if isinstance(program, Key):
        return key_roles.get(program.key) or (("channel",) if program.type.rank == 1 else (None,) * program.type.rank)
    return program.roles(*(program_roles(part, key_roles) for part in program.parts))


def dim_roles(t: TensorType) -> tuple[str | None, ...]:
    """Return the roles of a value's axes by the names of its symbolic sizes: `batch` and `seq` have roles."""
    role_by_symbol = {"batch": "batch", "seq": "sequence"}
    return tuple(role_by_symbol.get(str(dim)) for dim in t.shape)
