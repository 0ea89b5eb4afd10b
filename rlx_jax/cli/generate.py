"""`rlx-jax generate` and `rlx-jax chat`: stream generated text to stdout, and print figures about it."""

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
    """A streamed answer with its timing.

    Times are in seconds since the start of the request; they include the chat template and tokenization.

    Attributes:
        ask: function that starts the request.
        text: the answer so far.
        first: time until the first text.
        seconds: time until the end.
    """

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
        """Return the figures about the answer, by name."""
        report: Report = lm.report()
        return {
            "seconds_to_first_text": round(self.first, 4),
            "seconds": round(self.seconds, 4),
            **request_figures(report),
            "peak_bytes": peak_memory(),
            "seed": report.seed,
        }


# The figures of a request in JSON, with the attributes of `RequestReport` that they come from.
REQUEST_FIGURES = {
    "prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "prompt_tokens_per_second": "prompt_rate",
    "new_tokens": "new_tokens", "new_tokens_per_second": "answer_rate", "compiled": "compiled",
}  # fmt: skip


def request_figures(report: Report) -> dict[str, Any]:
    """Return the tokens of the last request, and tokens per second; None without a request, as for no new tokens."""
    if report.request is None:
        return dict.fromkeys(REQUEST_FIGURES)
    return {name: round(getattr(report.request, field), 2) for name, field in REQUEST_FIGURES.items()}


def closing_line(timed: Timed, lm: rlx.CausalLM, most: int = 0) -> str:
    """Return the figures as a line for stderr.

    Args:
        most: limit of new tokens; an answer that reaches it may be incomplete, which the line mentions.
    """
    report = lm.report()
    parts = [f"first text after {timed.first:.2f} s"]
    if (request := report.request) is not None:
        compile_note = f", {request.compiled} programs compiled in it" if request.compiled else ""
        limit_note = ", all that --max-new-tokens allows" if request.new_tokens == most else ""
        prefill_note = f", {request.read_tokens:,} of them read" if request.cached_tokens else ""
        parts = [
            f"prompt {request.prompt_tokens:,} tokens{prefill_note}, {request.prompt_rate:,.0f}/s",
            f"answer {request.new_tokens:,} tokens{limit_note}, {request.answer_rate:,.1f}/s",
            f"{parts[0]}{compile_note}",
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
    """Add the options of `generate`."""
    add = parser.add_argument
    add("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads it from stdin")
    add("--chat", action="store_true", help="answer it as one message, by the checkpoint's chat template")
    add("--system", metavar="TEXT", help="a system message before it; means --chat")
    add_sampling(parser)


GENERATE_OPTIONS = (generate_options, add_compute, add_json, add_model)
GENERATE = Command("generate", "continue a prompt, or answer it", GENERATE_OPTIONS, generate)


# Default limit of new tokens for an answer in `chat`.
LONG = 512


# -- chat --------------------------------------------------------------------------------------


def chat(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Talk with a model: each line of stdin is a message, answered by the checkpoint's chat template. /new begins
    another conversation; the end of the input (Ctrl-D) ends the chat. Ctrl-C ends an answer, or between answers the
    chat."""
    sampler = sampler_of(args)
    check_texts({"--system": args.system or "", "--stop": args.stop})
    if args.max_new_tokens is not None:
        whole_number("--max-new-tokens", args.max_new_tokens, 1)
    lm = language_model(args, session)
    first_messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    # Start the conversation before the first message is read, as it raises if there is no template.
    conversation, num_read = lm.conversation(first_messages), 0
    max_new_tokens = args.max_new_tokens or min(LONG, max(1, (lm.max_positions or LONG * 4) // 4))
    request = request_of(args, session, sampler) | {"max_new_tokens": max_new_tokens}
    while line := _asked(session):
        timed = None
        try:
            offset, num_read = num_read, num_read + len(line)
            message = text_of(line, offset).strip()
            if message == "/new":
                conversation = lm.conversation(first_messages)
            if message in ("", "/new"):
                continue
            timed = Timed(functools.partial(conversation.stream, message, **request))
            for piece in timed:
                session.interrupt.check()
                if not args.json:
                    yield piece
        except (RlxError, KeyboardInterrupt) as error:
            if not in_terminal():  # a person can continue after an error, but a script should fail
                raise
            if timed is not None and timed.text and not args.json:
                yield "\n"
            _say_left(session, error)
            continue
        yield as_line({"prompt": message, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
        session.closing = closing_line(timed, lm, max_new_tokens)
        session.say()
        if in_terminal():
            session.interrupt.forget()  # a Ctrl-C during the last part of an answer must not end the chat


def _say_left(session: Session, left: BaseException) -> None:
    """Print why a message has no answer; the conversation continues without it."""
    session.status.clear()
    session.interrupt.forget()
    if isinstance(left, KeyboardInterrupt):
        message = "stopped; the talk goes on as if this had not been asked"
    else:
        hint = "; /new begins another conversation" if isinstance(left, SequenceLengthError) else ""
        message = f"{type(left).__name__}: {left}{hint}"
    print(f"rlx-jax: {message}", file=sys.stderr)


def _asked(session: Session) -> bytes:
    """Read the next message; empty at the end of the input."""
    session.status.clear()
    return session.interrupt.waits(lambda: next_line("> "))


def chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling(parser, None, f"{LONG}, or a quarter of the model's positions")


CHAT_OPTIONS = (chat_options, add_compute, add_json, add_model)
CHAT = Command("chat", "talk with a model, message by message", CHAT_OPTIONS, chat, hears=True)
