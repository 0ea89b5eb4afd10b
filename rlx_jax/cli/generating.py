"""`rlx-jax generate` and `rlx-jax chat`: text, token by token as it comes."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import rlx_jax as rlx
from rlx_jax.cli.command import (
    Command,
    Session,
    add_compute,
    add_json,
    add_model,
    add_sampling,
    as_line,
    check_texts,
    language_model,
    peak_memory,
    peak_text,
    request_of,
    sampler_of,
    text_of,
)
from rlx_jax.errors import SequenceLengthError
from rlx_jax.runtime.report import Report


@dataclass
class Timed:
    """The pieces of an answer as they come, and how long they took since they were asked for, template and tokens
    included."""

    ask: Callable[[], Iterable[str]]
    text: str = ""
    first: float = 0.0
    seconds: float = 0.0

    def __iter__(self) -> Iterator[str]:
        start = time.perf_counter()
        for piece in self.ask():
            self.first = self.first or time.perf_counter() - start
            self.text += piece
            yield piece
        self.seconds = time.perf_counter() - start

    def figures(self, lm: rlx.CausalLM) -> dict[str, Any]:
        """What is said of it, by name."""
        report: Report = lm.report()
        return {
            "seconds_to_first_text": round(self.first, 4),
            "seconds": round(self.seconds, 4),
            **request_figures(report),
            "peak_bytes": peak_memory(),
            "seed": report.seed,
        }


def request_figures(report: Report) -> dict[str, Any]:
    """Tokens of the last request, and how many a second."""
    request = report.request
    if request is None:
        return {}
    return {
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "prompt_tokens_per_second": round(request.prompt_rate, 2),
        "new_tokens": request.new_tokens,
        "new_tokens_per_second": round(request.answer_rate, 2),
        "compiled": request.compiled,
    }


def closing_line(timed: Timed, lm: rlx.CausalLM) -> str:
    """The same on one line of stderr."""
    report = lm.report()
    parts = [f"first text after {timed.first:.2f} s"]
    if (request := report.request) is not None:
        compiled = f", {request.compiled} programs compiled in it" if request.compiled else ""
        new = f", {request.read_tokens:,} of them read" if request.cached_tokens else ""
        parts = [
            f"prompt {request.prompt_tokens:,} tokens{new}, {request.prompt_rate:,.0f}/s",
            f"answer {request.new_tokens:,} tokens, {request.answer_rate:,.1f}/s",
            f"{parts[0]}{compiled}",
        ]
    seed = [] if report.seed is None else [f"seed {report.seed}"]
    return "; ".join([*parts, peak_text(), *seed])


# -- generate ----------------------------------------------------------------------------------


def generate(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write the continuation of a prompt, token by token as they come."""
    sampler = sampler_of(args)
    check_texts({"--prompt": args.prompt, "--system": args.system or "", "--stop": args.stop})
    prompt = text_of(sys.stdin.buffer.read()) if args.prompt == "-" else args.prompt
    lm = language_model(args, session)
    request = request_of(args, session, sampler)
    if args.chat or args.system is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        timed = Timed(lambda: lm.chat([*system, {"role": "user", "content": prompt}], stream=True, **request))
    else:
        timed = Timed(lambda: lm.stream(prompt, **request))
    for piece in timed:
        session.interrupt.check()
        if not args.json:
            yield piece
    yield as_line({"prompt": prompt, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
    session.closing = closing_line(timed, lm)


def generate_options(parser: argparse.ArgumentParser) -> None:
    """Of `generate`."""
    add = parser.add_argument
    add("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads it from stdin")
    add("--chat", action="store_true", help="answer it as one message, by the checkpoint's chat template")
    add("--system", metavar="TEXT", help="a system message before it; means --chat")
    add_sampling(parser)
    add_compute(parser)
    add_json(parser)
    add_model(parser)


GENERATE = Command("generate", "continue a prompt, or answer it", generate_options, generate)


# -- chat --------------------------------------------------------------------------------------


def chat(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Talk with a model: each line of stdin is a message, answered by the checkpoint's chat template. /new begins
    another conversation; the end of the input (Ctrl-D) ends it."""
    sampler = sampler_of(args)
    check_texts({"--system": args.system or "", "--stop": args.stop})
    lm = language_model(args, session)
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    talk, read = lm.conversation(opening), 0  # tells now if there is no template
    request = request_of(args, session, sampler)
    while line := _asked(session):
        asked, read = text_of(line, read).strip(), read + len(line)
        if asked == "/new":
            talk = lm.conversation(opening)
        if asked in ("", "/new"):
            continue
        timed = Timed(functools.partial(talk.stream, asked, **request))
        try:
            for piece in timed:
                session.interrupt.check()
                if not args.json:
                    yield piece
        except SequenceLengthError as full:  # who sits there says what to do; the input of a script ends
            if not _in_terminal():
                raise
            session.status.clear()
            print(f"rlx-jax: {full}; /new begins another conversation", file=sys.stderr)
            continue
        yield as_line({"prompt": asked, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
        session.closing = closing_line(timed, lm)
        session.say()


def _asked(session: Session) -> bytes:
    """The next message; empty at the end of the input."""
    session.status.clear()
    if _in_terminal():
        print("> ", end="", file=sys.stderr, flush=True)
    return session.interrupt.line()


def _in_terminal() -> bool:
    """Whether somebody reads and answers."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def chat_options(parser: argparse.ArgumentParser) -> None:
    """Of `chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling(parser)
    add_compute(parser)
    add_json(parser)
    add_model(parser)


CHAT = Command("chat", "talk with a model, message by message", chat_options, chat)
