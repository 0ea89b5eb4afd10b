"""`rlx-jax completion`: what a shell needs to complete the command, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """An option as a shell sees it: `--json`, its help, whether a value follows it: one of `choices`, or a file where
    `files` says so. A number is neither."""

    name: str
    help: str
    values: bool
    choices: tuple[str, ...]
    files: bool


# Of each command, its help and its options.
Known = dict[str, tuple[str, tuple[Option, ...]]]


def known(parser: argparse.ArgumentParser) -> Known:
    """The commands of a parser."""
    commands = subparsers(parser)
    helps = {action.dest: str(action.help) for action in commands._choices_actions}
    return {name: (helps[name], options_of(sub)) for name, sub in commands.choices.items()}


def subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """The commands as argparse has them; `choices` are their parsers by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands


def options_of(parser: argparse.ArgumentParser) -> tuple[Option, ...]:
    """The long options of a command; a choice of its first argument stands for one, without a name."""
    found = []
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        said = parser._get_formatter()._expand_help(action) if action.help else ""
        choices = tuple(map(str, action.choices or ()))
        if names or choices:
            files = action.nargs != 0 and not choices and action.type is None
            found.append(Option(names[0] if names else "", said, action.nargs != 0, choices, files))
    return tuple(found)


def bash(commands: Known) -> Iterator[str]:
    """For `source <(rlx-jax completion bash)`."""
    yield "_rlx_jax() {\n"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"\n'
    yield "    COMPREPLY=()\n"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then\n'
    yield f'        COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word")); return\n    fi\n'
    yield '    case "${COMP_WORDS[1]} $before" in\n'
    for name, (_, options) in commands.items():
        for option in options:
            words = "compgen -f" if option.files else f'compgen -W "{" ".join(option.choices)}"'
            if option.values and option.name:
                yield f'        "{name} {option.name}") COMPREPLY=($({words} -- "$word")); return ;;\n'
    yield '    esac\n    case "${COMP_WORDS[1]}" in\n'
    for name, (_, options) in commands.items():
        flags = " ".join(option.name for option in options if option.name)
        places = " ".join(choice for option in options if not option.name for choice in option.choices)
        yield f'        {name}) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word"))'
        yield f' || COMPREPLY=($(compgen -W "{places}" -- "$word") ' if places else " || COMPREPLY=("
        yield ") ;;\n" if places else '$(compgen -f -- "$word")) ;;\n'
    yield "    esac\n}\ncomplete -o filenames -F _rlx_jax rlx-jax\n"


def zsh(commands: Known) -> Iterator[str]:
    """For a file `_rlx-jax` in a folder of `fpath`, or `source <(rlx-jax completion zsh)`."""
    yield "#compdef rlx-jax\n_rlx_jax() {\n    local -a commands\n    commands=(\n"
    for name, (said, _) in commands.items():
        yield f"        {_single(f'{name}:{said}')}\n"
    yield "    )\n    if (( CURRENT == 2 )); then _describe command commands; return; fi\n    case $words[2] in\n"
    for name, (_, options) in commands.items():
        yield f"        {name}) shift words; (( CURRENT-- )); _arguments \\\n"
        for option in options:
            if option.name:
                value = f":value:({' '.join(option.choices)})" if option.choices else ":value:"
                value += "_files" if option.files else "" if option.choices else " "
                text = f"{option.name}[{_bracketed(option.help)}]{value if option.values else ''}"
                yield f"            {_single(text)} \\\n"
        places = " ".join(choice for option in options if not option.name for choice in option.choices)
        yield f"            {_single(f'*:argument:({places})' if places else '*:argument:_files')} ;;\n"
    yield '    esac\n}\nif [ "$funcstack[1]" = "_rlx_jax" ]; then _rlx_jax "$@"; else compdef _rlx_jax rlx-jax; fi\n'


def fish(commands: Known) -> Iterator[str]:
    """For `rlx-jax completion fish | source`."""
    for name, (said, options) in commands.items():
        yield f"complete -c rlx-jax -n __fish_use_subcommand -f -a {name} -d {_single(said)}\n"
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for option in options:
            what = f"-a {_single(' '.join(option.choices))}" if option.choices else ""
            if option.name:
                needs = "" if not option.values else "-r" if option.files else "-x"
                line = f"complete -c rlx-jax {seen} -l {option.name[2:]} {needs} {what} -d {_single(option.help)}"
            else:
                line = f"complete -c rlx-jax {seen} -f {what}"
            yield " ".join(line.split(" ")).replace("  ", " ") + "\n"


def _single(text: str) -> str:
    """A word in single quotes, of all three shells."""
    return "'" + text.replace("\n", " ").replace("'", "’") + "'"


def _bracketed(text: str) -> str:
    """What may stand in the brackets of zsh's `_arguments`."""
    return text.replace("[", "(").replace("]", ")").replace(":", " -")


SHELLS: dict[str, Callable[[Known], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
