"""Commands that measure a checkpoint on this machine: `bench`, `explain`, `view` and `tune`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import rlx_jax as rlx
from rlx_jax.cli import command
from rlx_jax.errors import RequestError, RlxWarning, SaveFailedError, quote
from rlx_jax.generate.explain import PROGRAMS
from rlx_jax.inspection.page import check_target, write_file
from rlx_jax.inspection.records import Inspection
from rlx_jax.ir.text import format_bytes
from rlx_jax.loading.load import with_compute_dtype
from rlx_jax.loading.tuning import Trial, Workload
from rlx_jax.loading.tuning import tune as tune_model
from rlx_jax.profiles import CompileProfile
from rlx_jax.runtime.explain import model_page

# -- bench -------------------------------------------------------------------------------------


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is timed."""
    add = parser.add_argument
    add("--batch", type=int, default=1, metavar="N", help="prompts or texts at a time (%(default)s)")
    add("--prompt-tokens", type=int, metavar="N", help=f"length of each in tokens ({Workload.prompt_tokens})")
    add("--new-tokens", type=int, metavar="N", help=f"to generate after the first ({Workload.new_tokens})")


def make_workload(args: argparse.Namespace) -> Workload:
    """Return what is timed. Call it before loading, so that invalid options fail early."""
    lengths = {name: value for name in ("prompt_tokens", "new_tokens") if (value := getattr(args, name)) is not None}
    return Workload(args.batch, runs=args.runs, **lengths)


def fit_workload(work: Workload, args: argparse.Namespace, model: rlx.CausalLM | rlx.Encoder) -> Workload:
    """Return what is timed, with the lengths that no option gives reduced to the positions of the model."""
    limit, prompt, new = model.max_positions, work.prompt_tokens, work.new_tokens
    generates = isinstance(model, rlx.CausalLM)
    if limit is None or prompt + (new + 1) * generates <= limit:
        return work
    if generates and args.new_tokens is None:
        new = max(1, min(new, limit // 4 if args.prompt_tokens is None else limit - prompt - 1))
    if args.prompt_tokens is None:
        prompt = max(1, limit - (new + 1) * generates)
    fitted = replace(work, prompt_tokens=prompt, new_tokens=new)
    if fitted != work:
        lengths = f"{prompt} tokens and {new} new ones" if generates else f"{prompt} tokens"
        warnings.warn(f"the model has {limit} positions: {lengths} are timed", RlxWarning, stacklevel=2)
    return fitted


def bench(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Measure a checkpoint on random tokens: for a language model, tokens per second of prefill and of generation; for
    an encoder, texts and tokens per second. Programs are compiled first; the fastest of several runs counts."""
    work = make_workload(args)
    kinds = rlx.CausalLM | rlx.Encoder
    model = command.load_kind(args, session, kinds, "; bench takes language models and text encoders")
    work = fit_workload(work, args, model)
    figures = (bench_language_model if isinstance(model, rlx.CausalLM) else bench_encoder)(model, work)
    session.status.clear()
    result = {"model": model.model.name, "device": str(model.model.settings.device), "batch": work.batch, **figures}
    result["peak_bytes"] = command.peak_memory()
    yield from [command.json_line(result)] if args.json else command.table(result)


def best_seconds(work: Workload, model: Any) -> float:
    """Return the shortest time of several runs in seconds, after one run that compiles."""
    work.run(model)
    return min(work.seconds(model) for _ in range(work.runs))


def bench_language_model(lm: rlx.CausalLM, work: Workload) -> dict[str, Any]:
    """Measure prefill up to the first new token, and the time of each new token after it."""
    prompt, new, ends = work.prompt_tokens, work.new_tokens, lm.eos_ids
    lm.eos_ids = ()  # so that no row ends early
    try:
        prefill_seconds, total_seconds = (best_seconds(replace(work, new_tokens=n), lm) for n in (1, new + 1))
    finally:
        lm.eos_ids = ends
    step_seconds = max(total_seconds - prefill_seconds, 0.0) / new
    return {
        "prompt_tokens": prompt,
        "new_tokens": new,
        "seconds_to_first_token": round(prefill_seconds, 5),
        "prompt_tokens_per_second": round(work.batch * prompt / prefill_seconds, 1),
        "seconds_per_token": round(step_seconds, 6),
        "new_tokens_per_second": round(work.batch / step_seconds, 1) if step_seconds else None,
    }


def bench_encoder(encoder: rlx.Encoder, work: Workload) -> dict[str, Any]:
    """Measure embedding texts."""
    seconds = best_seconds(work, encoder)
    return {
        "prompt_tokens": work.prompt_tokens,
        "seconds": round(seconds, 5),
        "texts_per_second": round(work.batch / seconds, 1),
        "tokens_per_second": round(work.batch * work.prompt_tokens / seconds, 1),
    }


def bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    text = "number of runs; the fastest counts (%(default)s)"
    parser.add_argument("--runs", type=int, default=3, metavar="N", help=text)


BENCH_OPTIONS = (add_workload, bench_options, command.add_compute, command.add_json, command.add_model)
BENCH = command.Command("bench", "how fast a checkpoint runs here", BENCH_OPTIONS, bench)


# -- explain and view ---------------------------------------------------------------------------


EXPLAINED = rlx.CausalLM | rlx.Encoder | rlx.VisionEncoder
EXPLAINED_ADVICE = "; explain takes language models and encoders of texts or of images"


def explain(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Write, for each block of a checkpoint's programs, its time on random tokens, its work and its share of the
    roofline; then the largest losses with what would reduce them, and findings. A language model has two programs: a
    step of decoding, and prefill."""
    model = command.load_kind(args, session, EXPLAINED, EXPLAINED_ADVICE)
    for i, inspection in enumerate(explain_model(model, args)):
        session.status.clear()
        separator = "\n" if i else ""
        yield f"{inspection.to_json()}\n" if args.json else f"{separator}{inspection.text()}\n"


def explain_model(model: object, args: argparse.Namespace) -> Iterator[Inspection]:
    """Yield what the programs of a model consist of, with the options of the command.

    Raises:
        RequestError: an option that is not for this kind of model. Others as `model.explain`.
    """
    options = {"runs": args.runs} | ({} if args.batch is None else {"batch": args.batch})
    if isinstance(model, rlx.CausalLM):
        names = PROGRAMS if args.program is None else (args.program,)
        yield from (model.explain(n, context=args.context, measure=not args.estimate, **options) for n in names)
    elif isinstance(model, rlx.Encoder):
        if args.program or args.estimate:
            option = "--program" if args.program else "--estimate"
            raise RequestError(f"{option} is for language models; {quote(args.directory)} is an encoder")
        yield model.explain(tokens=args.context, **options)
    elif isinstance(model, rlx.VisionEncoder):
        if args.program or args.estimate or args.context is not None:
            raise RequestError(f"images take --batch and --runs alone; {quote(args.directory)} is an encoder of images")
        yield model.explain(**options)


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    add = parser.add_argument
    add("--program", choices=PROGRAMS, help="of a language model; by default both")
    add("--batch", type=int, metavar="N", help="rows or texts at a time (1, of an encoder 8)")
    add("--context", type=int, metavar="N", help="tokens of each row (512, of an encoder 128, or as many as fit)")
    add("--runs", type=int, default=3, metavar="N", help="number of traced runs; the mean counts (%(default)s)")
    add("--estimate", action="store_true", help="estimate times from the plan; compile and run nothing")


EXPLAIN_OPTIONS = (explain_options, command.add_compute, command.add_json, command.add_model)
EXPLAIN = command.Command("explain", "where the time goes, and what would reduce it", EXPLAIN_OPTIONS, explain)


def view(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Write what `explain` shows as an HTML page, with the ops, kernels, passes and text of each program. The file
    needs no network, and any browser opens it."""
    check_target(args.output, args.overwrite)
    model = command.load_kind(args, session, EXPLAINED, EXPLAINED_ADVICE)
    page = model_page(model.model, lambda: [*explain_model(model, args)])
    page.save(args.output, overwrite=args.overwrite)
    session.status.clear()
    size = len(page.html.encode())
    yield (
        command.json_line({"written": args.output, "bytes": size})
        if args.json
        else f"{args.output}: {format_bytes(size)}\n"
    )


def view_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `view`."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the page, such as model.html")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


VIEW = command.Command("view", "what explain shows, as an HTML page", (view_options, *EXPLAIN_OPTIONS), view)


# -- tune --------------------------------------------------------------------------------------


def tune(args: argparse.Namespace, session: command.Session) -> Iterator[str]:
    """Try settings of the profile one after the other: dtypes, attention, scanned layers, fused projections, layouts,
    kernels, options of XLA. Keep those that are faster and compute the same numbers, and write the result as TOML, with
    the figures as comments. Each trial is reported on stderr as it ends. On a machine that has other work to do the
    figures mean little."""
    workload = make_workload(args)
    if args.tolerance is not None and not args.tolerance >= 0:
        raise RequestError(f"--tolerance {args.tolerance}: expected a number of at least 0")
    path = args.output or os.path.join(args.directory, "tuned.rlx.toml")
    if args.output is None and not os.path.isdir(args.directory):
        raise RequestError(f"--output: where to write the profile of {quote(args.directory)}, which is no directory?")
    check_target(path, args.overwrite)
    if not os.path.isdir(parent := os.path.dirname(path) or "."):
        raise SaveFailedError(f"{quote(path)}: there is no directory {quote(parent)}")
    base = CompileProfile.of(args.profile or "auto")
    base = base if args.dtype is None else with_compute_dtype(args.dtype, base)
    args.dtype = None  # part of the profile now

    def open_model(profile: CompileProfile) -> object:
        args.profile = profile
        return command.load_model(args, session)

    def on_trial(trial: Trial) -> None:
        session.status.clear()
        if not args.quiet:
            print(trial, file=sys.stderr, flush=True)

    result = tune_model(open_model, base, workload, tolerance=args.tolerance, on_trial=on_trial)
    session.status.clear()
    yield from (command.json_line(vars(trial)) if args.json else f"{trial}\n" for trial in result.trials)
    write_file(path, result.to_toml().encode(), args.overwrite)
    gain = f"{result.ratio:.3f} x the time of {result.base.name!r}" if result.ratio < 1 else "nothing was faster"
    yield command.json_line({"file": path, "ratio": result.ratio}) if args.json else f"{gain}; written to {path}\n"


def tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    add = parser.add_argument
    add("--output", metavar="FILE", help="write the profile here (tuned.rlx.toml in the directory of the model)")
    add("--overwrite", action="store_true", help="replace a file that exists")
    add("--tolerance", type=float, metavar="ERROR", help="largest error of outputs, in units of the largest one")
    add("--runs", type=int, default=5, metavar="N", help="runs of each profile (%(default)s)")


TUNE_OPTIONS = (tune_options, add_workload, command.add_compute, command.add_json, command.add_model)
TUNE = command.Command("tune", "find the fastest profile of a checkpoint here", TUNE_OPTIONS, tune)
