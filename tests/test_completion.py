"""`rlx-jax completion`: what is given to each shell, and what bash makes of it, asked in the shell itself."""

import os
import re
from pathlib import Path

import pytest

from rlx_jax import cli
from rlx_jax.cli.entry import COMMANDS
from tests.terminal import Terminal


def test_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command and option in the text for each shell."""
    texts = {}
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        texts[shell] = capsys.readouterr().out
        for command in COMMANDS:
            assert command.name in texts[shell]
    assert texts["zsh"].endswith(texts["bash"]) and "-l temperature -x\n" in texts["fish"]


TYPED = {
    "rlx-jax sc": "score", "rlx-jax generate --temp": "--temperature", "rlx-jax convert --format o": "orbax",
    "rlx-jax inspect a.txt --ba": "--batch", "rlx-jax inspect a.": "a.txt",
    "rlx-jax bench --profile a.": "a.txt",
}  # fmt: skip


def test_a_shell_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What bash makes of a word and a tab: commands, options, choices, files; no files for a number."""
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "a.txt").touch()
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "% ", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    with Terminal(["bash", "--norc", "--noprofile", "-i"], environment, tmp_path) as terminal:
        terminal.write(f"source {script}; echo rea''dy\n")
        terminal.until("ready\r\n")
        for typed, want in TYPED.items():
            terminal.write(f"{typed}\t")
            terminal.until(re.escape(f"{typed.rpartition(' ')[0]} {want} "))
            terminal.write("\x15")  # forget the line
        terminal.write("rlx-jax bench --batch a\t\x15echo do''ne\n")
        assert "a.txt" not in terminal.until("done\r\n")
