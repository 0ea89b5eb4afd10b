"""Ctrl-C and progress of what takes long; and what a shell completes of a command."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.cli.entry import COMMANDS
from rlx_jax.cli.terminal import Interrupt, Status
from rlx_jax.runtime import compile_flow
from rlx_jax.runtime.model import CompiledModel
from tests.terminal import Terminal


def test_ctrl_c_is_heard_where_the_work_may_stop() -> None:
    """The first one at the next check, the second one at once; afterwards all is as it was."""
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            interrupt.check()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
            with pytest.raises(KeyboardInterrupt):
                Status(interrupt, enabled=False)("load", 1, 2)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job in the background of a shell
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, outer)


def mlp(width: int) -> tuple[rlx.ModelFlow, dict[str, Any]]:
    """A stack of products, each with a weight of its own."""
    flow = rlx.ModelFlow("mlp").input("tokens", ("batch", "seq"), "int32").gather_from_input("tokens", "e")
    for i in range(width):
        flow = flow.linear(f"w{i}")
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=(4, 4)).astype("f4") for i in range(width)}
    return flow.linear("head"), weights | {"e": np.ones((8, 4), "f4"), "head": np.ones((8, 4), "f4")}


def test_progress_is_told() -> None:
    """Bytes up to all of them, in order; every compile once, before and after."""
    told: list[tuple[str, int, int]] = []
    lm = rlx.CausalLM(*mlp(3), progress=lambda *step: told.append(step))
    loads = [step for step in told if step[0] == "load"]
    assert loads == told and [done for _, done, _ in loads] == sorted({done for _, done, _ in loads})
    assert loads[-1][1:] == (total := (3 * 16 + 2 * 32) * 4, total)
    for _ in range(2):
        lm.logits([[1, 2, 3]])
    assert told[len(loads) :] == [
        ("compile forward of batch 1, seq 16", 0, 1),
        ("compile forward of batch 1, seq 16", 1, 1),
    ]


def test_ctrl_c_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt reaches the caller after the weight that is being read, not after all of them; and so does an error
    of the function that is told."""
    started, loaded = threading.Event(), []

    def slow(what: str, done: int, total: int) -> None:
        loaded.append(done)
        started.set()
        time.sleep(0.05)

    def interrupted(model: CompiledModel) -> None:
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_flow, "compile_if_static", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rlx.CausalLM(*mlp(40), progress=slow)
    assert len(loaded) <= 3
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        rlx.CausalLM(*mlp(1), progress=lambda *_: 1 / 0)


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
