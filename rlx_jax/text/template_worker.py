"""A chat template rendered in a process of its own: `python -I -S template_worker.py DIRECTORY...`.

A template is a program that came with a checkpoint. Here it runs in Jinja's sandbox, with plain JSON values for its
only data, and under limits of the system for CPU time, memory and files, which nothing inside Python can lift. What
it does wrong ends this process and not the caller's.

This file is a script: it imports nothing of rlx_jax, so that it starts in milliseconds. One JSON object comes on
stdin: `template`, a list `variables`, and the limits `seconds`, `memory_bytes`, `output_chars`. A list goes to stdout,
for each of the variables an object: `text`, or `error` (`refused`, `failed`, `output`, `memory`) with a `message`. A
process that is killed says nothing.
The directories are those of jinja2 and markupsafe; they come last on the path.
"""

from __future__ import annotations

import json
import sys
import unicodedata  # noqa: F401  (Python imports it for "\N{BULLET}", and then no file can be opened)
from collections.abc import Iterator
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path.extend(sys.argv[1:])

import jinja2
import jinja2.debug  # noqa: F401  (jinja2 imports it when a template fails)
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE_NAME = "<template>"  # what jinja2 calls a template that came as text


class Refusal(Exception):
    """The template called `raise_exception`: it does not take these messages."""


class Overlong(Exception):
    """The text has more characters than it may have."""


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's text for training: here its body alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """What the templates of transformers count on: its settings, filters and functions."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
    return made


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` without the HTML escapes of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: object = "it called raise_exception without a message") -> None:
    """`raise_exception` of a template."""
    raise Refusal(message)


def strftime_now(format: str) -> str:
    """The date and time of this machine."""
    return datetime.now().strftime(format)


def limit(seconds: float, memory_bytes: int) -> None:
    """From here on: this much CPU time and memory, no file to open and none to write. Only Linux limits memory."""
    # What is imported or read when it is first used, codecs and the time zone's file, has to be there before.
    environment().from_string("{{ strftime_now('%d')|pprint }}{% if x is defined %}{% endif %}").render()
    if sys.platform != "win32":
        import resource
        import signal

        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends a process; the caller may have had it ignored
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if sys.platform == "linux":
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            memory_bytes = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def pieces(template: str, variables: dict[str, Any], most: int) -> Iterator[str]:
    """The rendered text, until it has more than `most` characters."""
    length = 0
    for piece in environment().from_string(template).generate(variables):
        length += len(piece)
        if length > most:
            raise Overlong
        yield piece


def answer(request: dict[str, Any], variables: dict[str, Any]) -> dict[str, str]:
    """The text, or what went wrong."""
    try:
        return {"text": "".join(pieces(request["template"], variables, request["output_chars"]))}
    except Refusal as error:
        return {"error": "refused", "message": str(error)[:2000]}
    except Overlong:
        return {"error": "output", "message": ""}
    except MemoryError:
        return {"error": "memory", "message": ""}
    except Exception as error:
        where = f"line {line}: " if (line := template_line(error)) else ""
        return {"error": "failed", "message": f"{where}{type(error).__name__}: {error}"[:2000]}


def template_line(error: Exception) -> int | None:
    """The line of the template that an error comes from."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    line, trace = None, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == FILE_NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.read())
    limit(request["seconds"], request["memory_bytes"])
    sys.stdout.write(json.dumps([answer(request, variables) for variables in request["variables"]]))


if __name__ == "__main__":
    main()
