"""`rlx-jax view`: write a page of where the time of a checkpoint goes, and what would reduce it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rlx_jax.cli.command import Command, Session, add_compute, add_json, add_model, json_line, load_model
from rlx_jax.cli.explain import explain_model, explain_options
from rlx_jax.inspection.page import check_target
from rlx_jax.ir.text import format_bytes
from rlx_jax.runtime.show import model_page


def view(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what `explain` shows as an HTML page, with the ops, kernels, passes and text of each program. The file
    needs no network, and any browser opens it."""
    check_target(args.output, args.overwrite)
    model = load_model(args, session)
    page = model_page(model.model, [*explain_model(model, args)])
    page.save(args.output, overwrite=args.overwrite)
    session.status.clear()
    size = len(page.html.encode())
    yield json_line({"written": args.output, "bytes": size}) if args.json else f"{args.output}: {format_bytes(size)}\n"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `view`."""
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the page, such as model.html")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


VIEW = Command(
    "view", "what explain shows, as an HTML page", (options, explain_options, add_compute, add_json, add_model), view
)
