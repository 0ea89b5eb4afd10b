"""`rlx-jax completion`: shell scripts that complete commands and options, generated from the argument parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """An option of a command, for completion.

    Attributes:
        name: such as `--json`; empty for the first positional argument.
        help: its help.
        takes_value: whether a value follows it.
        choices: the possible values, if they are limited.
        is_file: whether the value is a file. A number is neither a choice nor a file.
    """

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    is_file: bool


# Help and options of each command, by name.
CommandOptions = dict[str, tuple[str, tuple[Option, ...]]]


def command_options(parser: argparse.ArgumentParser) -> CommandOptions:
    """Return the commands of a parser."""
    commands = subparsers(parser)
    helps = {action.dest: str(action.help) for action in commands._choices_actions}
    return {name: (helps[name], long_options(sub)) for name, sub in commands.choices.items()}


def subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Return the `argparse` action of the commands; its `choices` are their parsers by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands


def long_options(parser: argparse.ArgumentParser) -> tuple[Option, ...]:
    """Return the long options of a command. A positional argument with choices is an option without a name."""
    options = []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        help_text = parser._get_formatter()._expand_help(action) if action.help else ""
        choices = tuple(map(str, action.choices or ()))
        if names or choices:
            is_file = action.nargs != 0 and not choices and action.type is None
            options.append(Option(names[0] if names else "", help_text, action.nargs != 0, choices, is_file))
    return tuple(options)


def bash(commands: CommandOptions) -> Iterator[str]:
    """Yield the script for bash: `source <(rlx-jax completion bash)`."""
    yield "_rlx_jax() {\n"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"\n'
    yield "    COMPREPLY=()\n"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then\n'
    yield f'        COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word")); return\n    fi\n'
    yield '    case "${COMP_WORDS[1]} $before" in\n'
    for name, (_, options) in commands.items():
        for option in options:
            words = "compgen -f" if option.is_file else f'compgen -W "{" ".join(option.choices)}"'
            if option.takes_value and option.name:
                yield f'        "{name} {option.name}") COMPREPLY=($({words} -- "$word")); return ;;\n'
    yield '    esac\n    case "${COMP_WORDS[1]}" in\n'
    for name, (_, options) in commands.items():
        flags = " ".join(option.name for option in options if option.name)
        arguments = " ".join(choice for option in options if not option.name for choice in option.choices)
        yield f'        {name}) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word"))'
        yield f' || COMPREPLY=($(compgen -W "{arguments}" -- "$word") ' if arguments else " || COMPREPLY=("
        yield ") ;;\n" if arguments else '$(compgen -f -- "$word")) ;;\n'
    yield "    esac\n}\ncomplete -o filenames -F _rlx_jax rlx-jax\n"


def zsh(commands: CommandOptions) -> Iterator[str]:
    """Yield the script for zsh: a file `_rlx-jax` in a folder of `fpath`, or `source <(rlx-jax completion zsh)`."""
    yield "#compdef rlx-jax\n_rlx_jax() {\n    local -a commands\n    commands=(\n"
    for name, (help_text, _) in commands.items():
        yield f"        {_single_quoted(f'{name}:{help_text}')}\n"
    yield "    )\n    if (( CURRENT == 2 )); then _describe command commands; return; fi\n    case $words[2] in\n"
    for name, (_, options) in commands.items():
        yield f"        {name}) shift words; (( CURRENT-- )); _arguments \\\n"
        for option in options:
            if option.name:
                value = f":value:({' '.join(option.choices)})" if option.choices else ":value:"
                value += "_files" if option.is_file else "" if option.choices else " "
                text = f"{option.name}[{_without_brackets(option.help)}]{value if option.takes_value else ''}"
                yield f"            {_single_quoted(text)} \\\n"
        arguments = " ".join(choice for option in options if not option.name for choice in option.choices)
        yield f"            {_single_quoted(f'*:argument:({arguments})' if arguments else '*:argument:_files')} ;;\n"
    yield '    esac\n}\nif [ "$funcstack[1]" = "_rlx_jax" ]; then _rlx_jax "$@"; else compdef _rlx_jax rlx-jax; fi\n'


def fish(commands: CommandOptions) -> Iterator[str]:
    """Yield the script for fish: `rlx-jax completion fish | source`."""
    for name, (help_text, options) in commands.items():
        yield f"complete -c rlx-jax -n __fish_use_subcommand -f -a {name} -d {_single_quoted(help_text)}\n"
        guard = f"-n '__fish_seen_subcommand_from {name}'"
        for option in options:
            choices = f"-a {_single_quoted(' '.join(option.choices))}" if option.choices else ""
            if option.name:
                needs = "" if not option.takes_value else "-r" if option.is_file else "-x"
                description = f"-d {_single_quoted(option.help)}"
                line = f"complete -c rlx-jax {guard} -l {option.name[2:]} {needs} {choices} {description}"
            else:
                line = f"complete -c rlx-jax {guard} -f {choices}"
            yield " ".join(line.split(" ")).replace("  ", " ") + "\n"


def _single_quoted(text: str) -> str:
    """Return text in single quotes, with a quoting that is valid in all three shells."""
    return "'" + text.replace("\n", " ").replace("'", "’") + "'"


def _without_brackets(text: str) -> str:
    """Return text without the characters that are special within the brackets of zsh's `_arguments`."""
    return text.replace("[", "(").replace("]", ")").replace(":", " -")


SHELLS: dict[str, Callable[[CommandOptions], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
