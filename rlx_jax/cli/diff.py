"""`rlx-jax diff`: compare two checkpoints, or one under two profiles, block by block, without reading weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from rlx_jax.cli.command import Command, Session, add_json, add_program, json_line, sizes_by_name
from rlx_jax.cli.inspect import open_program
from rlx_jax.encode.checkpoint import Checkpoint
from rlx_jax.encode.gguf_folder import open_model_folder
from rlx_jax.runtime.model import CompiledModel


def diff(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Compare two checkpoints block by block, in one program: parameters, ops, types, how they run; with --size also
    FLOPs, bytes and implementations. The same checkpoint twice compares --profile and --other-profile, or two
    revisions. Reads no weights."""
    other = argparse.Namespace(
        **vars(args)
        | {name: getattr(args, f"other_{name}") for name in ("directory", "revision")}
        | {name: getattr(args, f"other_{name}") or getattr(args, name) for name in ("profile", "dtype")}
    )
    models = [open_checkpoint_program(arguments, session) for arguments in (args, other)]
    result = models[0].diff(models[1], sizes=sizes_by_name(args.size))
    names = [f"{a.directory}@{a.revision}" if a.revision else a.directory for a in (args, other)]
    if names[0] == names[1]:
        names = [f"{name} ({a.profile or a.dtype or 'auto'})" for name, a in zip(names, (args, other), strict=True)]
    result = replace(result, ours=names[0], theirs=names[1])
    session.status.clear()
    yield json_line(vars(result)) if args.json else f"{result}\n"


def open_checkpoint_program(args: argparse.Namespace, session: Session) -> CompiledModel:
    """Return the program of a checkpoint, `forward` without `--program`; its weights are not read."""
    root = open_model_folder(args.directory, args.revision, progress=session.status)
    checkpoint = Checkpoint(root, ignore_fields=args.ignore_field, headers_only=True)
    args.program = args.program or "forward"
    # The shapes and packed schemes of the weights are in the headers of the files.
    return open_program(checkpoint.pretrained, args)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `diff`."""
    add = parser.add_argument
    for name, prefix, which in (("directory", "", "first"), ("other_directory", "other-", "second")):
        add(name, metavar="DIR|ORG/NAME", help=f"the {which} checkpoint, a directory or a model of the Hub")
        add(f"--{prefix}revision", metavar="REV", help=f"a branch, tag or commit of the {which} one")
        of = "compile with this profile" if not prefix else "the second one with this profile (--profile)"
        add(f"--{prefix}profile", metavar="NAME|FILE", help=of)
        of = "compute in bf16, f32 ..." if not prefix else "the second one in this dtype (--dtype)"
        add(f"--{prefix}dtype", metavar="DTYPE", help=of)
    add("--ignore-field", action="append", default=[], metavar="NAME", help="a field of config.json to ignore")
    add("--device", metavar="DEVICE", help="for this device: cpu, gpu, tpu, gpu:1")


DIFF = Command("diff", "compare two checkpoints or profiles", (options, add_program, add_json), diff)
