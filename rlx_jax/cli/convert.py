"""`rlx-jax convert`: a checkpoint in another format or dtype."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_jax.cli.command import Command, Session, add_json, as_line
from rlx_jax.cli.terminal import in_bytes
from rlx_jax.errors import ConfigError, DTypeError, RequestError, RlxNumericsWarning, WeightError, quote
from rlx_jax.io import limits
from rlx_jax.io.folder import open_folder
from rlx_jax.ir.types import as_dtype, is_float, short_name
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.runtime.checkpoint_origin import BESIDE, CONFIG, in_dtype, whole_checkpoint
from rlx_jax.weights.format import Entry
from rlx_jax.weights.save import write_checkpoint
from rlx_jax.weights.source import open_weights

SENTENCES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json")


def convert(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write the checkpoint SRC into the new directory DST: the weights under the same keys, config and tokenizer beside
    them. A narrower dtype rounds. Tensors are read one by one, as they are written; orbax takes them together."""
    dtype = None if args.dtype is None else floating(args.dtype)
    if os.path.realpath(args.source) == os.path.realpath(args.target):
        raise RequestError(f"{quote(args.target)} is the checkpoint that is read; write to another directory")
    is_file = os.path.isfile(args.source)
    folder = None if is_file else open_folder(args.source, args.revision, progress=session.status)
    source = open_weights(args.source, revision=args.revision) if folder is None else open_weights(folder)
    beside = {} if folder is None else files_beside(folder, dtype)
    found = whole_checkpoint([], source, dtype)
    entries = [replace(e, values=told(source, e, session, i + 1, len(found) + 1)) for i, e in enumerate(found)]
    write_checkpoint(args.target, entries, args.format, args.overwrite, beside)
    session.status.clear()
    size, names = sum(e.type.nbytes for e in entries), sorted(beside)
    if args.json:
        yield as_line(
            {"written": args.target, "format": args.format, "tensors": len(entries), "bytes": size, "files": names}
        )
    else:
        more = f", and {', '.join(names)}" if names else ""
        yield f"{args.target}: {len(entries)} tensors, {in_bytes(size)}, as {args.format}{more}\n"


def floating(name: str) -> np.dtype[Any]:
    """A floating dtype by name.

    Raises:
        DTypeError: it is none.
    """
    dtype = as_dtype(name)
    if not is_float(dtype):
        raise DTypeError(f"--dtype {quote(name)}: expected a floating one, such as f32 or bf16")
    return dtype


def files_beside(folder: Any, dtype: np.dtype[Any] | None) -> dict[str, bytes]:
    """Config and tokenizer by path; the config with the dtype that the weights get."""
    found: dict[str, bytes] = {}
    for name in (CONFIG, *BESIDE, *SENTENCES):
        raw = folder.read(name, limits.MAX_INDEX_BYTES, "limits.MAX_INDEX_BYTES", ConfigError)
        if raw is not None:
            found[name] = raw
    config = folder.json(CONFIG)  # or it says that it is broken
    if dtype is not None and CONFIG in found:
        found[CONFIG] = json.dumps(in_dtype(config, dtype.name), indent=2).encode() + b"\n"
    return found


def told(source: WeightSource, entry: Entry, session: Session, done: int, total: int) -> Callable[[], Any]:
    """What gives the values of a weight: progress is told of it, and nothing becomes infinite.

    Raises (when called):
        WeightError: the dtype does not hold a value.
    """

    def values() -> Any:
        session.status("convert", done, total)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RlxNumericsWarning)  # what gets infinite is an error below
            array = entry.values()
        if is_float(array.dtype) and np.isinf(array).any() and not np.isinf(source.read(entry.key)).any():
            held = short_name(array.dtype)
            raise WeightError(f"weight {quote(entry.key)}: it has values that {held} does not hold; bf16 does")
        return array

    return values


def options(parser: argparse.ArgumentParser) -> None:
    """Of `convert`."""
    add = parser.add_argument
    add("source", metavar="SRC", help="a directory, a .safetensors file, an orbax directory, or a model of the Hub")
    add("target", metavar="DST", help="a new directory")
    add("--revision", metavar="REV", help="a branch, tag or commit of a model of the Hub")
    add("--format", choices=("safetensors", "orbax"), default="safetensors", help="to write (%(default)s)")
    add("--dtype", metavar="DTYPE", help="of floating weights: f32, bf16, f16; as they are without it")
    add("--overwrite", action="store_true", help="replace what was written to DST this way before")
    add("--quiet", action="store_true", help="no progress on stderr")


CONVERT = Command("convert", "a checkpoint in another format or dtype", (options, add_json), convert)
