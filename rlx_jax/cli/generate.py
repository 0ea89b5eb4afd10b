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
from rlx_jax.cli.terminal import in_terminal, next_line, whole_input
from rlx_jax.errors import RlxError, SequenceLengthError
from rlx_jax.runtime.inputs import whole_number
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


# What JSON says of a request: its names of the figures, and those of `RequestReport`.
REQUEST_FIGURES = {
    "prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "prompt_tokens_per_second": "prompt_rate",
    "new_tokens": "new_tokens", "new_tokens_per_second": "answer_rate", "compiled": "compiled",
}  # fmt: skip


def request_figures(report: Report) -> dict[str, Any]:
    """Tokens of the last request, and how many a second; None where there was none, as of no new tokens."""
    if report.request is None:
        return dict.fromkeys(REQUEST_FIGURES)
    return {name: round(getattr(report.request, field), 2) for name, field in REQUEST_FIGURES.items()}


def closing_line(timed: Timed, lm: rlx.CausalLM, most: int = 0) -> str:
    """The same on one line of stderr; of an answer of as many tokens as it might have, that it may not be whole."""
    report = lm.report()
    parts = [f"first text after {timed.first:.2f} s"]
    if (request := report.request) is not None:
        compiled = f", {request.compiled} programs compiled in it" if request.compiled else ""
        cut = ", all that --max-new-tokens allows" if request.new_tokens == most else ""
        new = f", {request.read_tokens:,} of them read" if request.cached_tokens else ""
        parts = [
            f"prompt {request.prompt_tokens:,} tokens{new}, {request.prompt_rate:,.0f}/s",
            f"answer {request.new_tokens:,} tokens{cut}, {request.answer_rate:,.1f}/s",
            f"{parts[0]}{compiled}",
        ]
    seed = [] if report.seed is None else [f"seed {report.seed}"]
    return "; ".join([*parts, peak_text(), *seed])


# -- generate ----------------------------------------------------------------------------------


def generate(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write the continuation of a prompt, token by token as they come."""
    sampler = sampler_of(args)
    check_texts({"--prompt": args.prompt, "--system": args.system or "", "--stop": args.stop})
    prompt = args.prompt
    if prompt == "-":
        prompt = text_of(session.interrupt.waits(lambda: whole_input("the prompt")))
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


GENERATE_OPTIONS = (generate_options, add_compute, add_json, add_model)
GENERATE = Command("generate", "continue a prompt, or answer it", GENERATE_OPTIONS, generate)


# Tokens of an answer in a talk, if nothing else is said.
LONG = 512


# -- chat --------------------------------------------------------------------------------------


def chat(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Talk with a model: each line of stdin is a message, answered by the checkpoint's chat template. /new begins
    another conversation; the end of the input (Ctrl-D) ends it. Ctrl-C ends an answer, and where none is being given
    the talk."""
    sampler = sampler_of(args)
    check_texts({"--system": args.system or "", "--stop": args.stop})
    if args.max_new_tokens is not None:
        whole_number("--max-new-tokens", args.max_new_tokens, 1)
    lm = language_model(args, session)
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    talk, read = lm.conversation(opening), 0  # tells now if there is no template
    most = args.max_new_tokens or min(LONG, max(1, (lm.max_positions or LONG * 4) // 4))
    request = request_of(args, session, sampler) | {"max_new_tokens": most}
    while line := _asked(session):
        timed = None
        try:
            first, read = read, read + len(line)
            asked = text_of(line, first).strip()
            if asked == "/new":
                talk = lm.conversation(opening)
            if asked in ("", "/new"):
                continue
            timed = Timed(functools.partial(talk.stream, asked, **request))
            for piece in timed:
                session.interrupt.check()
                if not args.json:
                    yield piece
        except (RlxError, KeyboardInterrupt) as left:  # who sits there says what to do; the input of a script ends
            if not in_terminal():
                raise
            if timed is not None and timed.text and not args.json:
                yield "\n"
            _say_left(session, left)
            continue
        yield as_line({"prompt": asked, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
        session.closing = closing_line(timed, lm, most)
        session.say()
        if in_terminal():
            session.interrupt.forget()  # it came with the last piece


def _say_left(session: Session, left: BaseException) -> None:
    """Tell why a message has no answer; the talk goes on without it."""
    session.status.clear()
    session.interrupt.forget()
    if isinstance(left, KeyboardInterrupt):
        told = "stopped; the talk goes on as if this had not been asked"
    else:
        more = "; /new begins another conversation" if isinstance(left, SequenceLengthError) else ""
        told = f"{type(left).__name__}: {left}{more}"
    print(f"rlx-jax: {told}", file=sys.stderr)


def _asked(session: Session) -> bytes:
    """The next message; empty at the end of the input."""
    session.status.clear()
    return session.interrupt.waits(lambda: next_line("> "))


def chat_options(parser: argparse.ArgumentParser) -> None:
    """Of `chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling(parser, None, f"{LONG}, or a quarter of the model's positions")


CHAT_OPTIONS = (chat_options, add_compute, add_json, add_model)
CHAT = Command("chat", "talk with a model, message by message", CHAT_OPTIONS, chat, hears=True)
