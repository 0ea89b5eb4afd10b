"""`rlx-jax export`: write a model as one file that loads without its checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rlx_jax.cli.command import (
    Command,
    Session,
    add_compute,
    add_json,
    add_model,
    json_line,
    load_model,
    named_size,
    sizes_by_name,
)
from rlx_jax.runtime.export_model import FORMATS, PLATFORMS


def export(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Export a checkpoint to DST, a .rlxa file with its programs as StableHLO, its weights, tokenizer and settings.
    rlx-jax generate, chat and embed take the file in place of the checkpoint; loading it needs flatbuffers."""
    model = load_model(args, session)
    session.status.clear()
    sizes = [sizes_by_name(args.size)] if args.size else []
    artifact = model.export(
        args.target, platforms=args.platforms, sizes=sizes, format=args.format, overwrite=args.overwrite
    )
    yield json_line(vars(artifact)) if args.json else f"{artifact}\n"


def platform_names(text: str) -> list[str]:
    """Parse the names of platforms, separated by commas."""
    return text.split(",")


def export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    add = parser.add_argument
    add(
        "--platforms", type=platform_names, metavar="NAME,NAME",
        help=f"of {', '.join(PLATFORMS)}; by default the one that JAX runs on",
    )  # fmt: skip
    add("--format", choices=FORMATS, default="rlxa", help="stablehlo: a directory for other runtimes (%(default)s)")
    add(
        "--size", action="append", default=[], type=named_size, metavar="NAME=N",
        help="export programs for this size of batch, seq, context ... in place of every size; give all of them",
    )  # fmt: skip
    add("--overwrite", action="store_true", help="replace an earlier artifact")


def target_options(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the file to write, after the checkpoint."""
    parser.add_argument("target", metavar="DST", help="a new .rlxa file; for --format stablehlo a new directory")


EXPORT = Command(
    "export",
    "a model as one file that loads without its checkpoint",
    (export_options, add_compute, add_json, add_model, target_options),
    export,
)
