"""Why something is compiled after warm-up, in the words of who asked for it."""

from __future__ import annotations

from collections.abc import Iterable

from rlx_jax.compiler.executable import SaysArguments


def new_arguments(wanted: object, known: Iterable[object]) -> str:
    """Which arguments warm-up lacked for `wanted`, a loop or a function, beside those that it compiled, `known`; empty
    where one of them is for the same arguments, or `wanted` is for all."""
    if not isinstance(wanted, SaysArguments):
        return ""
    ours = wanted.arguments()
    others = [k.arguments() for k in known if isinstance(k, SaysArguments)]
    nearest = max(others, key=lambda theirs: len(ours.items() & theirs.items()), default={})
    differ = [name for name, value in ours.items() if nearest.get(name) != value]
    if not differ:
        return ""
    had = ", ".join(f"{name}={nearest[name]}" for name in differ if name in nearest)
    lacked = ", ".join(f"{name}={ours[name]}" for name in differ)
    return f"warm-up was {f'with {had}, not ' if had else 'without '}{lacked}"
