"""`rlx-jax tune`: find the fastest profile of a checkpoint on this machine, and write it to a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from rlx_jax.cli.command import Command, Session, add_compute, add_json, add_model, json_line, load_model
from rlx_jax.errors import RequestError, SaveFailedError, TargetExistsError, quote
from rlx_jax.loading.load import with_compute_dtype
from rlx_jax.loading.tuning import Trial, Workload
from rlx_jax.loading.tuning import tune as tune_model
from rlx_jax.profiles import CompileProfile


def tune(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Try settings of the profile one after the other: dtypes, attention, scanned layers, fused projections, layouts,
    kernels, options of XLA. Keep those that are faster and compute the same numbers, and write the result as TOML, with
    the figures as comments. Each trial is reported on stderr as it ends. On a machine that has other work to do the
    figures mean little."""
    sizes = {name: getattr(args, name) for name in ("batch", "prompt_tokens", "new_tokens", "runs")}
    workload = Workload(**sizes)
    if args.tolerance is not None and not args.tolerance >= 0:
        raise RequestError(f"--tolerance {args.tolerance}: expected a number of at least 0")
    path = args.output or os.path.join(args.directory, "tuned.rlx.toml")
    if args.output is None and not os.path.isdir(args.directory):
        raise RequestError(f"--output: where to write the profile of {quote(args.directory)}, which is no directory?")
    if os.path.lexists(path) and not args.overwrite:
        raise TargetExistsError(f"{quote(path)} exists; --overwrite replaces it, --output FILE writes another file")
    if not os.path.isdir(parent := os.path.dirname(path) or "."):
        raise SaveFailedError(f"{quote(path)}: there is no directory {quote(parent)}")
    base = CompileProfile.of(args.profile or "auto")
    base = base if args.dtype is None else with_compute_dtype(args.dtype, base)
    args.dtype = None  # part of the profile now

    def open_model(profile: CompileProfile) -> object:
        args.profile = profile
        return load_model(args, session)

    def on_trial(trial: Trial) -> None:
        session.status.clear()
        if not args.quiet:
            print(trial, file=sys.stderr, flush=True)

    result = tune_model(open_model, base, workload, tolerance=args.tolerance, on_trial=on_trial)
    session.status.clear()
    yield from (json_line(vars(trial)) if args.json else f"{trial}\n" for trial in result.trials)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(result.to_toml())
    except OSError as error:
        raise SaveFailedError(f"{quote(path)}: not written: {error.strerror}") from error
    gain = f"{result.ratio:.3f} x the time of {result.base.name!r}" if result.ratio < 1 else "nothing was faster"
    yield json_line({"file": path, "ratio": result.ratio}) if args.json else f"{gain}; written to {path}\n"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    add = parser.add_argument
    add("--output", metavar="FILE", help="write the profile here (tuned.rlx.toml in the directory of the model)")
    add("--overwrite", action="store_true", help="replace a file that exists")
    add("--tolerance", type=float, metavar="ERROR", help="largest error of outputs, in units of the largest one")
    add("--batch", type=int, default=1, metavar="N", help="prompts or texts at a time (%(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="length of each in tokens (%(default)s)")
    add("--new-tokens", type=int, default=32, metavar="N", help="to generate (%(default)s)")
    add("--runs", type=int, default=5, metavar="N", help="runs of each profile (%(default)s)")


TUNE = Command(
    "tune", "find the fastest profile of a checkpoint here", (options, add_compute, add_json, add_model), tune
)
