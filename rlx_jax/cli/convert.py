"""Commands that write a checkpoint in another form: `convert` in another format or dtype, and `export` as one file."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.cli import command
from rlx_jax.encode.checkpoint import Checkpoint, open_model_folder
from rlx_jax.encode.gguf_metadata import describe_checkpoint
from rlx_jax.errors import ConfigError, RequestError, RlxNumericsWarning, WeightError, quote
from rlx_jax.io import limits
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.ir.text import format_bytes
from rlx_jax.ir.types import short_name
from rlx_jax.runtime.checkpoint_origin import COMPANION_FILES, CONFIG, copied_entries, new_config
from rlx_jax.runtime.export_model import FORMATS, PLATFORMS
from rlx_jax.weights.format import Entry
from rlx_jax.weights.gguf import SUFFIX
from rlx_jax.weights.save import parse_dtype, write_checkpoint
from rlx_jax.weights.source import open_weights

SENTENCE_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


def convert(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Write the checkpoint SRC into the new directory DST: the weights under the same keys, the config and the
    tokenizer. A narrower dtype rounds. Tensors are read one by one as they are written; orbax needs them together."""
    is_gguf = args.target.lower().endswith(SUFFIX) if args.format is None else args.format == "gguf"
    format = args.format or ("gguf" if is_gguf else "safetensors")
    dtype, storage = parse_dtype(args.dtype, format, "--dtype ")
    if os.path.realpath(args.source) == os.path.realpath(args.target):
        raise RequestError(f"{quote(args.target)} is the source; write to another directory")
    # A GGUF file has a config and a tokenizer, other files have weights alone.
    is_bare = os.path.isfile(args.source) and not args.source.lower().endswith(SUFFIX)
    folder = None if is_bare else open_model_folder(args.source, args.revision, progress=session.status)
    if is_gguf and folder is not None:
        checkpoint = Checkpoint(folder, use_modules=False)
        recipe: Any = checkpoint.pretrained.recipe
        source = recipe.weights
        sources = copied_entries(source, recipe.shapes(), dtype)
    elif is_gguf:
        raise RequestError(f"{quote(args.source)} has weights alone; a GGUF file has a config and a tokenizer too")
    else:
        source = open_weights(args.source, revision=args.revision) if folder is None else open_weights(folder)
        sources = copied_entries(source, source.keys(), dtype, decodes=storage is not None)
    entries = [replace(e, values=checked_reader(e, session, i + 1, len(sources) + 1)) for i, e in enumerate(sources)]
    metadata: dict[str, Any] | None = None
    companion_files: dict[str, bytes] = {}
    if is_gguf:
        metadata, entries = describe_checkpoint(checkpoint, entries)
    elif folder is not None:
        unpacks = any(isinstance(source.spec(key), PackedSpec) for key in source.keys())
        companion_files = read_companion_files(folder, dtype, unpacks)
    if not is_gguf and storage is not None and CONFIG not in companion_files:
        raise RequestError(f"{quote(args.source)} has no {CONFIG}, which declares --dtype {storage}")
    written = write_checkpoint(
        args.target, entries, format, args.overwrite, companion_files, metadata=metadata, storage=storage
    )
    session.status.clear()
    size, names = sum(e.nbytes for e in written), sorted(companion_files)
    if args.json:
        yield command.json_line(
            {"written": args.target, "format": format, "tensors": len(written), "bytes": size, "files": names}
        )
    else:
        suffix = f", and {', '.join(names)}" if names else ""
        yield f"{args.target}: {len(written)} tensors, {format_bytes(size)}, as {format}{suffix}\n"


def read_companion_files(folder: Any, dtype: np.dtype[Any] | None, unpacks: bool) -> dict[str, bytes]:
    """Return the contents of config and tokenizer files by path; the config has the new dtype of the weights, and no
    quantization if they are unpacked."""
    files: dict[str, bytes] = {}
    for name in (CONFIG, *COMPANION_FILES, *SENTENCE_FILES):
        content = folder.read(name, limits.bound("MAX_INDEX_BYTES"), ConfigError)
        if content is not None:
            files[name] = content
    config = folder.json(CONFIG)  # also without a dtype, as this raises if the file is malformed
    return files | (new_config(CONFIG, config, dtype, unpacks) if CONFIG in files else {})


def checked_reader(entry: Entry, session: command.Session, done: int, total: int) -> Callable[[], Any]:
    """Return a function that reads the values of a weight, updates the progress line, and checks for overflow.

    Raises (when called):
        WeightError: a value overflows the dtype.
    """

    def values() -> Any:
        session.status("convert", done, total)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RlxNumericsWarning)
            warnings.filterwarnings("error", ".* values are over the range of ", RlxNumericsWarning)
            try:
                return entry.values()
            except RlxNumericsWarning as overflow:
                advice = "; bf16 has the range of f32" if short_name(entry.type.dtype) == "f16" else ""
                raise WeightError(f"{overflow}{advice}") from None

    return values


def convert_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `convert`."""
    add = parser.add_argument
    text = "a directory, a .safetensors or .gguf file, an orbax directory, or a model of the Hub"
    add("source", metavar="SRC", help=text)
    add("target", metavar="DST", help="a new directory, or a .gguf file")
    add("--revision", metavar="REV", help="a branch, tag or commit of a model of the Hub")
    add("--format", choices=("safetensors", "orbax", "gguf"), help="by default safetensors; gguf for a .gguf file")
    add("--dtype", metavar="DTYPE", help="of floating weights: f32, bf16, f16, q8_0 (gguf), fp8, int8 (safetensors)")
    add("--overwrite", action="store_true", help="replace what was written to DST this way before")
    add("--quiet", action="store_true", help="no progress on stderr")


CONVERT = command.Command(
    "convert", "a checkpoint in another format or dtype", (convert_options, command.add_json), convert
)


# -- export ------------------------------------------------------------------------------------


def export(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Export a checkpoint to DST, a .rlxa file with its programs as StableHLO, its weights, tokenizer and settings.
    rlx-jax generate, chat and embed take the file in place of the checkpoint; loading it needs flatbuffers."""
    model = command.load_model(args, session)
    session.status.clear()
    sizes = [command.sizes_by_name(args.size)] if args.size else None
    artifact = model.export(
        args.target, platforms=args.platforms, sizes=sizes, format=args.format, overwrite=args.overwrite
    )
    yield command.json_line(vars(artifact)) if args.json else f"{artifact}\n"


def export_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    add = parser.add_argument
    names = f"of {', '.join(PLATFORMS)}; by default the one that JAX runs on"
    add("--platforms", type=lambda text: text.split(","), metavar="NAME,NAME", help=names)
    add("--format", choices=FORMATS, default="rlxa", help="stablehlo: a directory for other runtimes (%(default)s)")
    add(
        "--size", action="append", default=[], type=command.named_size, metavar="NAME=N",
        help="export programs for this size of batch, seq, context ... in place of every size; give all of them",
    )  # fmt: skip
    add("--overwrite", action="store_true", help="replace an earlier artifact")


def target_options(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the file to write, after the checkpoint."""
    parser.add_argument("target", metavar="DST", help="a new .rlxa file; for --format stablehlo a new directory")


EXPORT_OPTIONS = (export_options, command.add_compute, command.add_json, command.add_model, target_options)
EXPORT = command.Command("export", "a model as one file that loads without its checkpoint", EXPORT_OPTIONS, export)
