"""`main`: parse the command line, run a command, and write its output.

Text goes to stdout as it comes; progress, figures, warnings and errors go to stderr. The exit status is 0, 1 for an
error, 2 for an invalid command line, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

import jax

import rlx_jax as rlx
from rlx_jax.cli.bench import BENCH
from rlx_jax.cli.command import Command, Session, select_device
from rlx_jax.cli.completion import SHELLS, command_options, long_options, subparsers
from rlx_jax.cli.convert import CONVERT
from rlx_jax.cli.diff import DIFF
from rlx_jax.cli.doctor import DOCTOR
from rlx_jax.cli.encode import EMBED, SCORE
from rlx_jax.cli.explain import EXPLAIN
from rlx_jax.cli.export import EXPORT
from rlx_jax.cli.generate import CHAT, GENERATE
from rlx_jax.cli.inspect import INSPECT
from rlx_jax.cli.plan import PLAN
from rlx_jax.cli.terminal import Interrupt, Status, discard_stdout, print_warning, write
from rlx_jax.cli.tune import TUNE
from rlx_jax.cli.view import VIEW
from rlx_jax.errors import RlxError, StorageError, did_you_mean, listing, quote


def completion(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write a script that completes this command in a shell. bash: source <(rlx-jax completion bash); zsh: the same,
    after compinit; fish: rlx-jax completion fish | source."""
    yield from SHELLS[args.shell](command_options(make_parser()))


def completion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `completion`."""
    parser.add_argument("shell", choices=tuple(SHELLS), help="which shell")


COMPLETION = Command("completion", "complete commands and options in a shell", (completion_options,), completion)

COMMANDS = (
    CHAT, GENERATE, EMBED, SCORE, BENCH, EXPLAIN, VIEW, INSPECT, PLAN, TUNE, DIFF, CONVERT, EXPORT, DOCTOR, COMPLETION,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    args = parse_arguments(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
        sys.stdout.reconfigure(errors="replace")  # the encoding of a terminal may not have all characters
    try:
        if sys.stdout is None:  # closed by a shell's `>&-`
            raise StorageError("stdout is closed, and results go there")
        with Interrupt() as interrupt, warnings.catch_warnings():
            warnings.showwarning = print_warning
            run_command(args, interrupt)
        return 0
    except KeyboardInterrupt:
        print()
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader stopped early, as `head` does
        discard_stdout()
        return 128 + getattr(signal, "SIGPIPE", 13)
    except RlxError as error:
        if args.debug:
            raise
        print(f"rlx-jax: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def run_command(args: argparse.Namespace, interrupt: Interrupt) -> None:
    """Run a command, write its text as it comes, and then print its figures."""
    status = Status(interrupt, enabled=sys.stderr.isatty() and not getattr(args, "quiet", False))
    session = Session(interrupt, status)
    try:
        with jax.default_device(select_device(getattr(args, "device", None), getattr(args, "devices", None))):
            for piece in args.command.run(args, session):
                status.clear()
                write(piece)
                status.note_output(piece)
                if not args.command.handles_interrupt:
                    interrupt.check()
    finally:
        status.clear()
    session.print_summary()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; texts may appear before, between and after options.

    Before Python 3.13, argparse assigns only the texts right after the directory; the rest is added here.
    """
    top, words = make_parser(), sys.argv[1:] if arguments is None else arguments
    check_words(top, words)
    args, rest = top.parse_known_args(words)
    texts = [word for word in rest if hasattr(args, "text") and not word.startswith("-")]
    if unknown := [word for word in rest if word not in texts]:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if texts:
        args.text = [*args.text, *texts]
    return args


def check_words(top: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit with status 2 if the command or one of its options is unknown.

    argparse would first report a required option that is missing because it is misspelt, and has no suggestions.
    """
    commands = subparsers(top).choices
    if not words or words[0].startswith("-"):
        return
    if words[0] not in commands:
        suggestion = did_you_mean(words[0], commands)
        top.error(f"there is no command {quote(words[0])}{suggestion or f'; there are {listing(commands)}'}")
    command = commands[words[0]]
    names = [name for option in long_options(command) if (name := option.name)]
    for word in words[1:] if "--" not in words else words[1 : words.index("--")]:
        name = word.partition("=")[0]
        if (
            name in ("-", *command._option_string_actions)
            or not is_option(word)
            or any(option_name.startswith(name) for option_name in names)
        ):
            continue
        suggestion = did_you_mean(f"--{name.lstrip('-')}", names)
        command.error(
            f"there is no option {quote(name)}{suggestion or '; a value that begins with - is written --option=VALUE'}"
        )


def is_option(word: str) -> bool:
    """Return whether argparse takes a word for an option: it begins with -, and is neither a number nor has spaces."""
    return word.startswith("-") and " " not in word and re.fullmatch(r"-\d+|-\d*\.\d+", word) is None


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser with all commands."""
    top = argparse.ArgumentParser("rlx-jax", description="Transformers in JAX, from checkpoints.")
    top.add_argument("--version", action="version", version=f"rlx-jax {rlx.__version__}, jax {jax.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.run.__doc__)
        for add_options in command.options:
            add_options(sub)
        sub.add_argument("--debug", action="store_true", help="show where an error comes from")
        sub.set_defaults(command=command)
    return top
