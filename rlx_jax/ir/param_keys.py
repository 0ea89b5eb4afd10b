"""What is asked of parameter programs: the keys they read, the names they have, and whether bits get lost."""

from __future__ import annotations

from collections.abc import Iterator

from rlx_jax.ir.param import Dequantized, Key, Program


def stored_keys(program: Program) -> Iterator[Key]:
    """The stored tensors a program reads, in order. Of a packed one the type is the logical one."""
    if isinstance(program, Dequantized):
        program = program.logical
    if isinstance(program, Key):
        yield program
    for part in program.parts:
        yield from stored_keys(part)


def keys_of(program: Program) -> Iterator[str]:
    """The checkpoint keys a program reads, in order."""
    return (stored.key for stored in stored_keys(program))


def packed_keys(program: Program) -> Iterator[tuple[str, str]]:
    """The packed tensors a program reads, in order: the key and the scheme of each."""
    if isinstance(program, Dequantized):
        yield from ((key, program.scheme) for key in keys_of(program))
    for part in program.parts:
        yield from packed_keys(part)


def key_kinds(program: Program) -> Iterator[tuple[str, str]]:
    """The keys that a program reads, and in words what each is: `f32[8,4]`, and how it is packed."""
    packed = dict(packed_keys(program))
    for stored in stored_keys(program):
        yield stored.key, f"{stored.type} packed as {packed[stored.key]}" if stored.key in packed else str(stored.type)


def narrows(program: Program) -> bool:
    """Whether running `program` may lose bits of a float."""
    return program.lossy or any(narrows(part) for part in program.parts)


def leaf_name(program: Program) -> str:
    """The printed name of a leaf: `model.layers.{0..3}.self_attn.{q,k,v}_proj.weight`. Never parsed.

    >>> from rlx_jax.ir.param import Joined
    >>> from rlx_jax.ir.types import tensor_type
    >>> t = tensor_type((2, 2), "f32", "doc")
    >>> leaf_name(Joined((Key("a.q_proj.weight", t), Key("a.k_proj.weight", t)), 0))
    'a.{q,k}_proj.weight'
    """
    return program.name(*map(leaf_name, program.parts))
