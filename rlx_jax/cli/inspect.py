"""`rlx-jax inspect`: describe a checkpoint or print its programs, without reading its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rlx_jax.cli.command import Command, Session, add_json, add_model, add_program, json_line, sizes_by_name, table
from rlx_jax.compiler.dumps import FORMATS
from rlx_jax.encode.checkpoint import Checkpoint
from rlx_jax.encode.gguf_folder import open_model_folder
from rlx_jax.errors import RequestError
from rlx_jax.ir.packed import PackedSpec, stored_bytes
from rlx_jax.ir.text import format_bytes
from rlx_jax.ir.types import short_name
from rlx_jax.loading.load import with_compute_dtype
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.models.families import Pretrained
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_program import LEVELS, SYMBOLIC_LEVELS, check_text_arguments
from rlx_jax.runtime.model_setup import make_programs
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.quantized import with_mxfp4_weights


def inspect(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint is: its config as interpreted, its weights, its tokenizer; with --level instead a program
    as text, at a level of the compiler. Reads no weights. `rlx-jax plan` estimates memory and time."""
    check_level_options(args)
    root = open_model_folder(args.directory, args.revision, progress=session.status)
    checkpoint = Checkpoint(root, ignore_fields=args.ignore_field, headers_only=True)
    pretrained, source, tokenizer = checkpoint.pretrained, checkpoint.weights, checkpoint.tokenizer
    if args.level is not None:
        text = program_text(open_program(pretrained, args), args)
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


def check_level_options(args: argparse.Namespace) -> None:
    """Check, before anything is read, that the options fit together.

    Raises:
        RequestError: an option that applies to `--level` without it, or one that does not apply with it.
        GraphError: `--pass`, `--diff` or `--format` do not fit the level.
    """
    options = {"--pass": args.after, "--diff": args.diff, "--format": args.format, "--program": args.program}
    options |= {"--size": args.size, "--batch": args.batch, "--context": args.context, "--dtype": args.dtype}
    options |= {"--profile": args.profile}
    names = [name for name, value in options.items() if value not in (None, []) and value is not False]
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


def open_program(pretrained: Pretrained, args: argparse.Namespace) -> CompiledModel:
    """Return a program of the model, without weights: only their shapes are used.

    The programs are those of the model that `rlx_jax.load` returns, and `train` and `explicit` those of
    `rlx_jax.compile`. Without `--program` it is `prefill` of a language model, else `forward`.
    """
    profile = args.profile if args.dtype is None else with_compute_dtype(args.dtype, args.profile)
    flow = pretrained.recipe.assemble()
    causal = pretrained.kind == "causal"
    program = args.program or ("prefill" if causal else "forward")
    serves: tuple[str, ...] = ("forward", *CACHED_PROGRAMS) if causal else ("forward",)
    is_compiled_alone = program in ("train", "explicit")
    programs = make_programs(
        [flow], None, OpenOptions(profile=profile), merge=not is_compiled_alone,
        program=program if is_compiled_alone else "forward",
        max_positions=pretrained.max_positions, serves=() if is_compiled_alone else serves,
    )  # fmt: skip
    return CompiledModel(programs, flow.name, program)


def options(parser: argparse.ArgumentParser) -> None:
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


INSPECT = Command(
    "inspect", "describe a checkpoint, print its programs",
    (options, add_program, add_json, add_model), inspect,
)  # fmt: skip
