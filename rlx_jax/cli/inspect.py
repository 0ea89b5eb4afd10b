"""Commands that read no weights: `inspect` describes a checkpoint or prints its programs, `plan` estimates its cost on
a device, and `diff` compares two checkpoints or profiles block by block."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlx_jax.cli.command import Command, Session, add_json, add_model, add_program, json_line, sizes_by_name, table
from rlx_jax.compiler.dumps import FORMATS
from rlx_jax.encode.checkpoint import Checkpoint, open_model_folder
from rlx_jax.errors import RequestError, quote, shown
from rlx_jax.ir.packed import PackedSpec, stored_bytes
from rlx_jax.ir.text import format_bytes
from rlx_jax.ir.types import short_name
from rlx_jax.loading.load import with_compute_dtype
from rlx_jax.loading.model_plan import plan as plan_model
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_program import LEVELS, SYMBOLIC_LEVELS, check_text_arguments
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.quantized import with_mxfp4_weights


def inspect(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint is: its config as interpreted, its weights, its tokenizer; with --level instead a program
    as text, at a level of the compiler. Reads no weights. `rlx-jax plan` estimates memory and time."""
    check_level_options(args)
    checkpoint = open_checkpoint(args, session)
    pretrained, source, tokenizer = checkpoint.pretrained, checkpoint.weights, checkpoint.tokenizer
    if args.level is not None:
        text = program_text(open_program(checkpoint, args), args)
        session.status.clear()
        yield f"{text}\n"
        return
    recipe: Any = pretrained.recipe
    specs, unpacked_weights = [source.spec(key) for key in source.keys()], with_mxfp4_weights(source)
    result: dict[str, Any] = {
        "recipe": type(recipe).__name__,
        "kind": pretrained.kind,
        "parameters": sum(unpacked_weights.spec(key).size for key in unpacked_weights.keys()),
        "tensors": len(specs),
        "weight_bytes": sum(map(stored_bytes, specs)),
        "dtypes": sorted({spec.scheme if isinstance(spec, PackedSpec) else short_name(spec.dtype) for spec in specs}),
        "tokenizer_tokens": None if tokenizer is None else tokenizer.vocab_size,
        "chat_templates": list(tokenizer.chat_templates) if tokenizer else [],
        "config": dict(vars(recipe.config)),
    }
    session.status.clear()
    yield from [json_line(result)] if args.json else table(table_rows(result))


def open_checkpoint(args: argparse.Namespace, session: Session) -> Checkpoint:
    """Return the checkpoint of a command; the shapes and packed schemes of its weights are in the headers of files."""
    root = open_model_folder(args.directory, args.revision, progress=session.status)
    return Checkpoint(root, ignore_fields=args.ignore_field, headers_only=True)


def chosen_profile(args: argparse.Namespace) -> Any:
    """Return the profile of a command, with its dtype."""
    return args.profile if args.dtype is None else with_compute_dtype(args.dtype, args.profile)


def table_rows(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `inspect --json` as rows of a table."""
    tokens, size = result["tokenizer_tokens"], format_bytes(result["weight_bytes"])
    return {
        "recipe": f"{result['recipe']}, {result['kind']}",
        "weights": f"{result['parameters']:,} in {result['tensors']} tensors, {size}",
        "dtypes": ", ".join(result["dtypes"]),
        "tokenizer": "none" if tokens is None else f"{tokens:,} tokens",
        "chat templates": ", ".join(result["chat_templates"]) or "none",
        **result["config"],
    }


# -- programs ----------------------------------------------------------------------------------


# The options that apply to `--level` alone.
LEVEL_OPTIONS = ("pass", "diff", "format", "program", "size", "batch", "context", "dtype", "profile")


def check_level_options(args: argparse.Namespace) -> None:
    """Check, before anything is read, that the options fit together.

    Raises:
        RequestError: an option that applies to `--level` without it, or one that does not apply with it.
        GraphError: `--pass`, `--diff` or `--format` do not fit the level.
    """
    values = {name: getattr(args, "after" if name == "pass" else name) for name in LEVEL_OPTIONS}
    names = [f"--{name}" for name, value in values.items() if value not in (None, []) and value is not False]
    if args.level is None and names:
        raise RequestError(
            f"{', '.join(names)}: for a program as text; pass --level, such as --level mir. For memory and time: "
            "rlx-jax plan"
        )
    if args.level is not None:
        if args.json:
            raise RequestError("--json: a program is written as text; leave out --level or --json")
        check_text_arguments(args.level, args.after or "", args.diff, args.format or "text")


def program_text(model: CompiledModel, args: argparse.Namespace) -> str:
    """Return the program of `--program` at the level of `--level`, with the sizes of the command line."""
    options = [(name, size) for name in ("batch", "context") if (size := getattr(args, name)) is not None]
    sizes = sizes_by_name([*args.size, *options])
    required = args.level not in SYMBOLIC_LEVELS
    if required and (missing := model.template().symbols - set(sizes) - set(model.template().rings)):
        raise RequestError(
            f"--level {args.level} needs sizes: pass {' '.join(f'--size {name}=N' for name in sorted(missing))}"
        )
    sized = sizes if sizes or required else None
    return model.text(args.level, after=args.after or "", diff=args.diff, format=args.format or "text", sizes=sized)


def open_program(checkpoint: Checkpoint, args: argparse.Namespace) -> CompiledModel:
    """Return a program of the model, without weights: only their shapes are used.

    The programs are those of the model that `rlx_jax.load` returns, and `train` and `explicit` those of
    `rlx_jax.compile`. Without `--program` it is `prefill` of a language model, else `forward`.
    """
    pretrained = checkpoint.pretrained
    flow, causal = checkpoint.flow(pretrained.recipe), pretrained.kind == "causal"
    program = args.program or ("prefill" if causal else "forward")
    serves: tuple[str, ...] = ("forward", *CACHED_PROGRAMS) if causal else ("forward",)
    is_compiled_alone = program in ("train", "explicit")
    programs = make_programs(
        [flow], None, OpenOptions(profile=chosen_profile(args)), merge=not is_compiled_alone,
        program=program if is_compiled_alone else "forward",
        max_positions=pretrained.max_positions, serves=() if is_compiled_alone else serves,
    )  # fmt: skip
    return CompiledModel(programs, flow.name, program)


def inspect_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `inspect`."""
    add = parser.add_argument
    add("--batch", type=int, metavar="N", help="with --level, for this many rows: --size batch=N")
    add("--context", type=int, metavar="N", help="with --level, for so many positions: --size context=N")
    add("--level", choices=LEVELS, help="write a program as text: blocks (hir), tensor ops (mir) ... or all of them")
    add("--pass", dest="after", metavar="PASS", help="with --level hir or mir, after this pass of the compiler")
    add("--diff", action="store_true", help="the difference that the pass made; without --pass, all of the level")
    add("--format", choices=tuple(FORMATS), help="of hir, mir and lir: text, counts, or a drawing (text)")
    add("--profile", metavar="NAME|FILE", help="with --level, compiled with this profile")
    add("--dtype", metavar="DTYPE", help="with --level, computed in bf16, f32 ...")
    add("--device", metavar="DEVICE", help="for this device: cpu, gpu, tpu, gpu:1")


INSPECT_OPTIONS = (inspect_options, add_program, add_json, add_model)
INSPECT = Command("inspect", "describe a checkpoint, print its programs", INSPECT_OPTIONS, inspect)


# -- plan --------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint costs on a device: memory, time of a token and of a prompt, whether it fits, and what
    would make it fit. Reads config and headers, no weights, and compiles nothing."""
    result = plan_model(
        args.directory, device=args.plan_device, batch=args.batch, context=args.context, profile=chosen_profile(args),
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


def plan_options(parser: argparse.ArgumentParser) -> None:
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


PLAN_OPTIONS = (plan_options, add_json, add_model)
PLAN = Command("plan", "estimate memory and time on a device, before a download", PLAN_OPTIONS, plan)


# -- diff --------------------------------------------------------------------------------------


def diff(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Compare two checkpoints block by block, in one program: parameters, ops, types, how they run; with --size also
    FLOPs, bytes and implementations. The same checkpoint twice compares --profile and --other-profile, or two
    revisions. Reads no weights."""
    other = argparse.Namespace(
        **vars(args)
        | {name: getattr(args, f"other_{name}") for name in ("directory", "revision")}
        | {name: getattr(args, f"other_{name}") or getattr(args, name) for name in ("profile", "dtype")}
    )
    args.program = other.program = args.program or "forward"
    models = [open_program(open_checkpoint(arguments, session), arguments) for arguments in (args, other)]
    result = models[0].diff(models[1], sizes=sizes_by_name(args.size))
    names = [f"{a.directory}@{a.revision}" if a.revision else a.directory for a in (args, other)]
    if names[0] == names[1]:
        names = [f"{name} ({a.profile or a.dtype or 'auto'})" for name, a in zip(names, (args, other), strict=True)]
    result = replace(result, ours=names[0], theirs=names[1])
    session.status.clear()
    yield json_line(vars(result)) if args.json else f"{result}\n"


def diff_options(parser: argparse.ArgumentParser) -> None:
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


DIFF = Command("diff", "compare two checkpoints or profiles", (diff_options, add_program, add_json), diff)
