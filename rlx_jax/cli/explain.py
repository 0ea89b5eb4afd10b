"""`rlx-jax explain`: show where the time of a checkpoint goes on this machine, and what would reduce it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import rlx_jax as rlx
from rlx_jax.cli.command import Command, Session, add_compute, add_json, add_model, kind_with_article, load_model
from rlx_jax.errors import RequestError, quote
from rlx_jax.inspection.records import Inspection


def explain(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write, for each block of a checkpoint's programs, its time on random tokens, its work and its share of the
    roofline; then the largest losses with what would reduce them, and findings. A language model has two programs: a
    step of decoding, and prefill."""
    model = load_model(args, session)
    for i, inspection in enumerate(explain_model(model, args)):
        session.status.clear()
        separator = "\n" if i else ""
        yield f"{inspection.to_json()}\n" if args.json else f"{separator}{inspection.text()}\n"


def explain_model(model: object, args: argparse.Namespace) -> Iterator[Inspection]:
    """Yield what the programs of a model consist of, with the options of the command.

    Raises:
        RequestError: a kind of model, or an option of it, that is not explained. Others as `model.explain`.
    """
    batch = {} if args.batch is None else {"batch": args.batch}
    if isinstance(model, rlx.CausalLM):
        names = ("decode", "prefill") if args.program is None else (args.program,)
        yield from (
            model.explain(name, context=args.context, runs=args.runs, measure=not args.estimate, **batch)
            for name in names
        )
    elif isinstance(model, rlx.Encoder):
        if args.program or args.estimate:
            option = "--program" if args.program else "--estimate"
            raise RequestError(f"{option} is for language models; {quote(args.directory)} is an encoder")
        tokens = {} if args.context is None else {"tokens": args.context}
        yield model.explain(runs=args.runs, **batch, **tokens)
    elif isinstance(model, rlx.VisionEncoder):
        if args.program or args.estimate or args.context is not None:
            raise RequestError(f"images take --batch and --runs alone; {quote(args.directory)} is an encoder of images")
        yield model.explain(runs=args.runs, **batch)
    else:
        raise RequestError(
            f"{quote(args.directory)} is {kind_with_article(model)}; explain takes language models and encoders of "
            "texts or of images"
        )


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    add = parser.add_argument
    add("--program", choices=("decode", "prefill"), help="of a language model; by default both")
    add("--batch", type=int, metavar="N", help="rows or texts at a time (1, of an encoder 8)")
    add("--context", type=int, metavar="N", help="tokens of each row (512, of an encoder 128, or as many as fit)")
    add("--runs", type=int, default=3, metavar="N", help="number of traced runs; the mean counts (%(default)s)")
    add("--estimate", action="store_true", help="estimate times from the plan; compile and run nothing")


EXPLAIN = Command(
    "explain",
    "where the time goes, and what would reduce it",
    (explain_options, add_compute, add_json, add_model),
    explain,
)
