"""`rlx-jax plan`: what a model will cost on a device, from config and headers, before its weights are downloaded."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from rlx_jax.cli.command import Command, Session, add_json, add_model, json_line
from rlx_jax.errors import RequestError, quote, shown
from rlx_jax.loading.load import with_compute_dtype
from rlx_jax.loading.model_plan import plan as plan_model


def plan(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint costs on a device: memory, time of a token and of a prompt, whether it fits, and what
    would make it fit. Reads config and headers, no weights, and compiles nothing."""
    profile = args.profile if args.dtype is None else with_compute_dtype(args.dtype, args.profile)
    result = plan_model(
        args.directory, device=args.plan_device, batch=args.batch, context=args.context, profile=profile,
        mesh=parse_mesh(args.mesh), revision=args.revision, ignore_fields=args.ignore_field, progress=session.status,
    )  # fmt: skip
    session.status.clear()
    yield json_line(result.record()) if args.json else f"{result}\n"


def parse_mesh(text: str | None) -> int | dict[str, int] | None:
    """Return the mesh of an option: a number of devices, or axes such as `data=2,tensor=4`.

    Raises:
        RequestError: it is neither, or has an axis twice.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if text.isascii() and text.isdigit():
        return int(text)
    if not all(name and size.isascii() and size.isdigit() for name, _, size in pairs):
        raise RequestError(f"--mesh {shown(text)}: expected a number of devices, or axes such as data=2,tensor=4")
    if twice := [name for name, count in Counter(name for name, _, _ in pairs).items() if count > 1]:
        raise RequestError(f"--mesh {shown(text)}: it has the axis {quote(twice[0])} twice")
    return {name: int(size) for name, _, size in pairs}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    add = parser.add_argument
    add(
        "--device", dest="plan_device", metavar="NAME",
        help="cpu (this machine), h100, h200, a100, l4, t4, rtx4090, v5e or v6e; by default the device of this machine",
    )  # fmt: skip
    add("--batch", type=int, default=1, metavar="N", help="rows (%(default)s)")
    add("--context", type=int, metavar="N", help="tokens of each row (2048, or as many as the model has positions)")
    add("--mesh", metavar="N|AXES", help="a number of devices, or axes such as data=2,tensor=4")
    add("--profile", metavar="NAME|FILE", help="compiled with this profile")
    add("--dtype", metavar="DTYPE", help="computed in bf16, f32 ...")


PLAN = Command("plan", "estimate memory and time on a device, before a download", (options, add_json, add_model), plan)
