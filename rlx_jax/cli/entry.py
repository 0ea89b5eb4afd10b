"""`main`: parse the command line, run a command, and write its output.

Text goes to stdout as it comes; progress, figures, warnings and errors go to stderr. The exit status is 0, 1 for an
error, 2 for an invalid command line, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import io
import platform
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

import rlx_jax as rlx
from rlx_jax.cli.command import Command, Session, add_json, json_line, select_device, table
from rlx_jax.cli.convert import CONVERT, EXPORT
from rlx_jax.cli.inspect import DIFF, INSPECT, PLAN
from rlx_jax.cli.measure import BENCH, EXPLAIN, TUNE, VIEW
from rlx_jax.cli.requests import CHAT, EMBED, GENERATE, SCORE
from rlx_jax.cli.terminal import Interrupt, Status, discard_stdout, print_warning, write
from rlx_jax.device import describe_device
from rlx_jax.errors import RlxError, StorageError, did_you_mean, listing, quote
from rlx_jax.ir.text import format_bytes

# `rlx-jax completion`: shell scripts that complete commands and options, generated from the argument parser.


# The parsers of the commands, by name.
Parsers = dict[str, argparse.ArgumentParser]


def subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Return the `argparse` action of the commands; its `choices` are their parsers by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands


def long_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the long options of a command, by name, such as `--json`."""
    return {name: a for a in parser._actions for name in a.option_strings[-1:] if name.startswith("--")}


def is_file(action: argparse.Action) -> bool:
    """Whether the value of an option may be a file: it is neither a number nor one of some choices."""
    return action.nargs != 0 and not action.choices and action.type is None


def bash(parsers: Parsers) -> Iterator[str]:
    """Yield the script for bash: `source <(rlx-jax completion bash)`."""
    yield "_rlx_jax() {\n"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"\n'
    yield "    COMPREPLY=()\n"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then\n'
    yield f'        COMPREPLY=($(compgen -W "{" ".join(parsers)}" -- "$word")); return\n    fi\n'
    yield '    case "${COMP_WORDS[1]} $before" in\n'
    for name, parser in parsers.items():
        for option, action in long_options(parser).items():
            words = "compgen -f" if is_file(action) else f'compgen -W "{" ".join(map(str, action.choices or ()))}"'
            if action.nargs != 0:
                yield f'        "{name} {option}") COMPREPLY=($({words} -- "$word")); return ;;\n'
    yield '    esac\n    case "${COMP_WORDS[1]}" in\n'
    for name, parser in parsers.items():
        yield f'        {name}) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{" ".join(long_options(parser))}"'
        yield ' -- "$word")) || COMPREPLY=($(compgen -f -- "$word")) ;;\n'
    yield "    esac\n}\ncomplete -o filenames -F _rlx_jax rlx-jax\n"


def zsh(parsers: Parsers) -> Iterator[str]:
    """Yield the script for zsh, which runs the one for bash: `source <(rlx-jax completion zsh)`, after compinit."""
    yield "autoload -U +X bashcompinit && bashcompinit\n"
    yield from bash(parsers)


def fish(parsers: Parsers) -> Iterator[str]:
    """Yield the script for fish: `rlx-jax completion fish | source`."""
    for name, parser in parsers.items():
        yield f"complete -c rlx-jax -n __fish_use_subcommand -f -a {name}\n"
        for option, action in long_options(parser).items():
            needs = "" if action.nargs == 0 else " -r" if is_file(action) else " -x"
            choices = f" -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
            guard = f"-n '__fish_seen_subcommand_from {name}'"
            yield f"complete -c rlx-jax {guard} -l {option[2:]}{needs}{choices}\n"


SHELLS: dict[str, Callable[[Parsers], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}


# `rlx-jax doctor`: report installed versions and devices, and how to install what is missing.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


def doctor(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write versions, devices, and which extras are installed or missing. It downloads and changes nothing."""
    base, extras = requirements()
    versions: dict[str, str | None] = {"rlx-jax": rlx.__version__, "python": platform.python_version()}
    versions |= {name: installed_version(name) for name in base}
    devices = [
        {"kind": d.device_kind, "platform": d.platform, "id": d.id, "memory_bytes": describe_device(d).memory}
        for d in jax.devices()
    ]
    missing_by_extra = {extra: [n for n in names if installed_version(n) is None] for extra, names in extras.items()}
    advice = [
        *accelerator_advice(),
        *(f"{name} is missing: pip install {name}" for name in base if installed_version(name) is None),
    ]
    if args.json:
        yield json_line({"versions": versions, "devices": devices, "missing": missing_by_extra, "advice": advice})
        return
    yield from table({name: version or "missing" for name, version in versions.items()})
    yield "\n"
    for d in devices:
        memory = "memory not known" if d["memory_bytes"] is None else format_bytes(d["memory_bytes"])
        yield f"device  {d['kind']} ({d['platform']}:{d['id']}), {memory}\n"
    yield "\n"
    for extra, names in missing_by_extra.items():
        status = f"missing {', '.join(names)}: pip install 'rlx-jax[{extra}]'" if names else "installed"
        yield f"extra {extra:<8} {status}\n"
    yield from (f"\n{line}\n" for line in advice)


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the required packages, and of the packages of each extra, from the metadata of rlx-jax."""
    try:
        lines = importlib.metadata.requires("rlx-jax") or []
    except importlib.metadata.PackageNotFoundError:  # rlx_jax is imported from a checkout, without installation
        return ["jax", "jaxlib", "numpy", "safetensors", "tokenizers"], {}
    base: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in lines:
        name_match, extra = _NAME.match(line), _EXTRA.search(line)
        if name_match is not None:
            (base if extra is None else extras.setdefault(extra[1], [])).append(name_match[0])
    return base, extras


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator_advice() -> list[str]:
    """Return advice if the machine has a GPU or a TPU that JAX does not use; [] otherwise."""
    if any(d.platform != "cpu" for d in jax.devices()):
        return []
    if glob.glob("/dev/nvidia[0-9]*"):
        return ["This machine has an NVIDIA GPU, and JAX runs on the CPU: pip install 'jax[cuda13]'"]
    if glob.glob("/dev/kfd"):
        return ["This machine has an AMD GPU, and JAX runs on the CPU: see JAX's page on installation for ROCm"]
    if glob.glob("/dev/accel[0-9]*"):
        return ["This machine has a TPU, and JAX runs on the CPU: pip install 'jax[tpu]'"]
    return []


DOCTOR = Command("doctor", "what is installed, and what is missing", (add_json,), doctor)


def completion(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write a script that completes this command in a shell. bash: source <(rlx-jax completion bash); zsh: the same,
    after compinit; fish: rlx-jax completion fish | source."""
    yield from SHELLS[args.shell](dict(subparsers(make_parser()).choices))


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
    if args.command is GENERATE:
        take_prompt(args, subparsers(top).choices[GENERATE.name])
    return args


def take_prompt(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Take the text of `generate` as its prompt. Exit with status 2 unless there is one prompt, or a file of them."""
    if args.text and (args.prompt is not None or args.input is not None):
        parser.error("argument TEXT: not allowed with argument --prompt or --input")
    if len(args.text) > 1:
        parser.error(f"one prompt is continued, got {len(args.text)} texts; write a prompt of several words in quotes")
    if args.text:
        (args.prompt,) = args.text
    if args.prompt is None and args.input is None:
        parser.error("one of the arguments TEXT --prompt --input is required")


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
    names = list(long_options(command))
    for word in words[1:] if "--" not in words else words[1 : words.index("--")]:
        name = word.partition("=")[0]
        if (
            name in ("-", *command._option_string_actions)
            or not is_option(word)
            or any(option_name.startswith(name) for option_name in names)
        ):
            continue
        # The two hyphens of a one-letter option would make it similar to any option of few letters.
        suggestion = did_you_mean(f"--{name.lstrip('-')}", names) if len(name.lstrip("-")) > 1 else ""
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
