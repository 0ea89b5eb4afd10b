"""Render a chat template in a separate process: `python -I -S template_worker.py DIRECTORY...`.

A template is a program that came with a checkpoint. It runs in Jinja's sandbox, on plain JSON values, under limits of
the operating system for CPU time, memory and files, which no Python code can raise. A misbehaving template ends this
process and not the caller's.

This file is a script. It imports nothing of rlx_jax, so that it starts in milliseconds. It reads one JSON object from
stdin: `template`, a list `variables`, and the limits `seconds`, `memory_bytes`, `output_chars`. It writes a list to
stdout with one object for each of the variables: `text`, or `error` (`refused`, `failed`, `output`, `memory`) with a
`message`. A killed process writes nothing. The arguments are the directories of jinja2 and markupsafe, which are
appended to `sys.path`.
"""

from __future__ import annotations

import json
import sys
import unicodedata  # noqa: F401  (imported early: "\N{BULLET}" imports it when no file can be opened any more)
from collections.abc import Iterator
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

import jinja2
import jinja2.debug  # noqa: F401  (imported early: jinja2 imports it when a template fails)
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE_NAME = "<template>"  # the file name in tracebacks of a template that was passed as text


class TemplateRefusal(Exception):
    """The template called `raise_exception`: it refuses these messages."""


class OutputTooLong(Exception):
    """The rendered text is over its limit of characters."""


class GenerationTag(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks text for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates of transformers expect: its settings, filters and functions."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    env.filters["tojson"] = to_json
    env.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
    return env


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON text without HTML escapes, which Jinja's built-in `tojson` adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: object = "it called raise_exception without a message") -> None:
    """Implement a template's `raise_exception`: raise `TemplateRefusal`."""
    raise TemplateRefusal(message)


def strftime_now(format: str) -> str:
    """Return the local date and time in a format of `strftime`."""
    return datetime.now().strftime(format)


def set_limits(seconds: float, memory_bytes: int) -> None:
    """Limit the CPU time and memory of this process, and forbid it to open or write files. Only Linux limits memory."""
    # Render once before: codecs and the time zone's file are loaded at first use, which is impossible afterwards.
    make_environment().from_string("{{ strftime_now('%d')|pprint }}{% if x is defined %}{% endif %}").render()
    if sys.platform != "win32":
        import resource
        import signal

        # The default action ends the process; a parent that ignores or blocks the signal passes that on.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if sys.platform == "linux":
            hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
            memory_bytes = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def render_pieces(template: str, variables: dict[str, Any], max_chars: int) -> Iterator[str]:
    """Yield the rendered text in pieces; raise `OutputTooLong` once it has more than `max_chars` characters."""
    length = 0
    for piece in make_environment().from_string(template).generate(variables):
        length += len(piece)
        if length > max_chars:
            raise OutputTooLong
        yield piece


def render_answer(request: dict[str, Any], variables: dict[str, Any]) -> dict[str, str]:
    """Return an object with the rendered text, or with the error and its message."""
    try:
        return {"text": "".join(render_pieces(request["template"], variables, request["output_chars"]))}
    except TemplateRefusal as error:
        return {"error": "refused", "message": str(error)[:2000]}
    except OutputTooLong:
        return {"error": "output", "message": ""}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except Exception as error:
        where = f"line {line}: " if (line := template_line(error)) else ""
        return {"error": "failed", "message": f"{where}{type(error).__name__}: {error}"[:2000]}


def template_line(error: Exception) -> int | None:
    """Return the line of the template that raised an error; None if none did."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main() -> None:
    """Read a request from stdin and write the answers to stdout."""
    request = json.loads(sys.stdin.buffer.read())
    set_limits(request["seconds"], request["memory_bytes"])
    sys.stdout.write(json.dumps([render_answer(request, variables) for variables in request["variables"]]))


if __name__ == "__main__":
    main()
