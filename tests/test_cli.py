"""The command `rlx-jax`: what it prints, where, and with which status; progress of loading and compiling."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.runtime.model import CompiledModel
from tests.oracles.chat_templates import BASE, checkpoint, format_checkpoint
from tests.oracles.checkpoints import FIXTURES, edit_json, edited

ROOT = Path(__file__).resolve().parents[1]
CASE: dict[str, Any] = json.loads((FIXTURES / "llama" / "chat.json").read_text("utf-8"))[0]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
# A shell's background jobs ignore Ctrl-C, and so would what they start.
WITH_INTERRUPT = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{WITH_INTERRUPT}; from rlx_jax.cli import main; sys.exit(main())"]


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=300, **options)


def read_all(descriptor: int) -> str:
    """What is written to a terminal until it closes."""
    text = b""
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # how Linux says that the other side is closed
            part = b""
        if not part:
            return text.decode("utf-8", "replace")
        text += part


def test_generate_in_a_terminal() -> None:
    """The recorded text of transformers on stdout; on a terminal, progress with bytes and programs that is wiped."""
    seen, terminal = pty.openpty()
    words = ["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24"]
    process = subprocess.Popen([*COMMAND, *words], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    status = read_all(seen)
    out = process.communicate(timeout=120)[0].decode()
    os.close(seen)
    assert process.returncode == 0
    assert out == CASE["text"] + "\n"
    assert re.search(r"load [\d.]+ kB of 136\.45 kB", status), status
    assert "compile prefill of batch 1, context 64, seq 16 …" in status, status
    assert "compile extend of batch 1, context 64, seq 1 …" in status
    assert status.endswith("\r\x1b[K") and "Traceback" not in status


@pytest.mark.parametrize("source", ["prompt", pytest.param(str(BASE), marks=pytest.mark.slow)])
def test_drafts(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text, by drafts from itself or of another checkpoint."""
    words = ["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24"]
    assert cli.main([*words, "--speculative", source, "--draft-tokens", "3"]) == 0
    assert capsys.readouterr().out == CASE["text"] + "\n"
    assert cli.main([*words, "--draft-tokens", "3"]) == 1
    assert "draft_tokens=3 without speculative=" in capsys.readouterr().err


def screen(written: str) -> str:
    """What a terminal shows in the end, of carriage returns and erased lines."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[K|[\r\n]|[^\x1b\r\n]+", written):
        line = lines[-1]
        if part == "\n":
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[K":
            lines[-1] = line[:column]
        else:
            lines[-1] = f"{line[:column]}{part}{line[column + len(part) :]}"
            column += len(part)
    return "\n".join(lines)


def test_text_and_progress_share_a_terminal() -> None:
    """The loop compiles after the first token is out: what it tells must not take that token away."""
    seen, terminal = pty.openpty()
    words = ["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24"]
    process = subprocess.Popen([*COMMAND, *words], env=ENVIRONMENT, stdout=terminal, stderr=terminal)
    os.close(terminal)
    written = read_all(seen)
    os.close(seen)
    assert process.wait(timeout=120) == 0
    assert "compile prefill of batch 1, context 64, seq 16 …" in written, written
    assert screen(written) == cli._CONTROLS.sub("\ufffd", CASE["text"]) + "\n", written


@pytest.mark.slow
def test_quiet_where_nobody_looks(tmp_path: Path) -> None:
    """Nothing on a stderr that is no terminal; a prompt from stdin, a chat, choosing by a seed."""
    directory = format_checkpoint(tmp_path / "m", "qwen")
    options = [
        "--max-new-tokens",
        12,
        "--temperature",
        0.9,
        "--top-k",
        40,
        "--top-p",
        0.9,
        "--min-p",
        0.01,
        "--seed",
        3,
    ]
    options += ["--repetition-penalty", 1.2]
    sampler = rlx.Sampler(0.9, 40, 0.9, 0.01, 1.2)
    lm = rlx.load(directory)
    done = run("generate", directory, "--prompt", "-", *options, input="Is it é?\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == lm.generate("Is it é?\n", 12, sampler, seed=3) + "\n"
    done = run(
        "generate", directory, "--prompt", "Hi", "--system", "Be brief.", *options, "--stop", "zzzz", "--stop", "q"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert done.stdout == lm.chat(messages, 12, sampler, stop=["zzzz", "q"], seed=3) + "\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_ctrl_c_ends_the_stream(tmp_path: Path) -> None:
    """Status 130 within moments, no traceback; what came before is on stdout."""
    changes = {"max_position_embeddings": 70000, "eos_token_id": None}
    directory = edited(BASE, tmp_path / "m", changes)
    edit_json(directory / "generation_config.json", changes)
    (directory / "tokenizer_config.json").write_text("{}", "utf-8")
    words = [*COMMAND, "generate", str(directory), "--prompt", "It was", "--max-new-tokens", "60000"]
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.perf_counter()
    out, problems = process.communicate(timeout=60)
    assert process.returncode == 130, problems
    assert time.perf_counter() - start < 30
    assert first and out.endswith(b"\n") and problems == b""


@pytest.mark.slow
def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`rlx-jax … | head -c 1`: no traceback."""
    reading, writing = os.pipe()
    words = [*COMMAND, "generate", str(BASE), "--prompt", "It was", "--max-new-tokens", "100"]
    os.close(reading)
    process = subprocess.run(words, env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing more when Python flushes at its end."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["inspect", str(BASE)]) == 1
        full.flush()
    assert capsys.readouterr().err == "rlx-jax: StorageError: stdout: No space left on device\n"


# -- without a model ---------------------------------------------------------------------------

WRONG: dict[str, tuple[list[object], int, str]] = {
    "no directory": (["/nowhere"], 1, "MissingFileError: '/nowhere': no such directory"),
    "encoder": ([FIXTURES / "bert" / "bare_v5"], 1, "is an encoder, which does not generate"),
    "top-p": ([BASE, "--top-p", "2"], 1, "SamplingParamError: top_p is 2.0"),
    "preset": ([BASE, "--profile", "llama32_decod"], 1, "did you mean 'llama32_decode'"),
    "profile file": ([BASE, "--profile", "nowhere.toml"], 1, "MissingFileError: .*nowhere.toml"),
    "dtype": ([BASE, "--dtype", "f33"], 1, "f33"),
    "bytes": ([BASE, "--prompt", "\udcff"], 1, "RequestError: --prompt: not UTF-8"),
    "bytes to stop at": ([BASE, "--stop", "\udcff"], 1, "RequestError: --stop: not UTF-8"),
    "too many devices": ([BASE, "--devices", "99"], 1, r"RequestError: --devices 99: expected 1 to 8, .* \(cpu\)"),
    "no device": ([BASE, "--devices", "0"], 1, "RequestError: --devices 0: expected 1 to 8"),
    "tensor that does not divide": (
        [BASE, "--devices", "8", "--tensor", "3"],
        1,
        "divides 8 devices, one of 1, 2, 4, 8",
    ),
    "tensor below 1": ([BASE, "--devices", "auto", "--tensor", "0"], 1, "--tensor 0: expected what divides 8 devices"),
    "tensor alone": ([BASE, "--tensor", "2"], 1, "RequestError: --tensor is .*; give --devices too"),
    "heads that do not divide": (
        [BASE, "--devices", "8", "--tensor", "8"],
        1,
        "4 query heads cannot be divided over 8",
    ),
    "devices by name": ([BASE, "--devices", "gpu"], 2, "--devices: expected a number or auto, got 'gpu'"),
    "not a number": ([BASE, "--max-new-tokens", "many"], 2, "--max-new-tokens: invalid int value: 'many'"),
    "unknown option": ([BASE, "--temprature", "1"], 2, "unrecognized arguments: --temprature"),
    "nothing": ([], 2, "required: DIR"),
}


@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (["--devices", "4"], "data 2 × tensor 2"),
        pytest.param(["--devices", "auto", "--tensor", "4"], "data 2 × tensor 4", marks=pytest.mark.slow),
    ],
)
def test_generate_over_devices(
    options: list[str], mesh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of one device, from a model that is divided."""
    models: list[Any] = []
    load = rlx.load

    def kept(*given: Any, **named: Any) -> Any:
        models.append(load(*given, **named))
        return models[0]

    monkeypatch.setattr(rlx, "load", kept)
    assert cli.main(["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24", *options]) == 0
    assert capsys.readouterr().out == CASE["text"] + "\n"
    assert models[0].report().mesh == mesh


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, and the status."""
    words, status, message = WRONG[case]
    try:
        got = cli.main(["generate", "--prompt", "x", *map(str, words)])
    except SystemExit as leaving:  # argparse does so
        got = int(str(leaving.code))
    out, problems = capsys.readouterr()
    assert (got, out) == (status, "")
    assert re.search(message, problems) and "Traceback" not in problems
    assert status == 2 or problems.startswith("rlx-jax: ") and problems.count("\n") == 1


def test_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.MissingFileError):
        cli.main(["generate", "/nowhere", "--prompt", "x", "--debug"])


def test_stdin_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert cli.main(["generate", str(BASE), "--prompt", "-"]) == 1
    assert "stdin: not UTF-8 at byte 2" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--version"])
    assert leaving.value.code == 0 and f"rlx-jax {rlx.__version__}, jax " in capsys.readouterr().out


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, weights and tokenizer of a checkpoint, from headers alone."""
    directory = checkpoint(tmp_path / "m", ["<|eot_id|>"], settings={"chat_template": "x"})
    assert cli.main(["inspect", str(directory)]) == 0
    rows = dict(re.findall(r"^([\w ]+?) {2,}(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert rows["recipe"] == "Llama32Flow, causal"
    assert rows["weights"] == "34,112 in 20 tensors, 136.45 kB"
    assert (rows["tokenizer"], rows["chat templates"]) == ("362 tokens", "default")
    assert (rows["hidden_size"], rows["tie_word_embeddings"]) == ("32", "True")


def test_a_terminal_is_not_commanded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes that a model writes are shown as signs on a terminal, and kept for a file."""
    text = "a\x1b[2J\tb\nc\x9b1m\x07"
    cli._write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cli._write(text)
    assert capsys.readouterr().out == "a\ufffd[2J\tb\nc\ufffd1m\ufffd"


# -- Ctrl-C ------------------------------------------------------------------------------------


def test_ctrl_c_is_heard_where_the_work_may_stop() -> None:
    """The first one at the next check, the second one at once; afterwards all is as it was."""
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cli.Interrupt() as interrupt:
            interrupt.check()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
            with pytest.raises(KeyboardInterrupt):
                cli.Status(interrupt, shown=False)("load", 1, 2)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job in the background of a shell
        with cli.Interrupt() as interrupt:
            signal.raise_signal(signal.SIGINT)
            interrupt.check()
    finally:
        signal.signal(signal.SIGINT, outer)


# -- progress ----------------------------------------------------------------------------------


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


def test_progress_that_raises_ends_the_load() -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyError(what)

    with pytest.raises(KeyError, match="load"):
        rlx.CausalLM(*mlp(1), progress=stop)
    with pytest.raises(errors.RequestError, match="progress is 3; expected a function"):
        rlx.CausalLM(*mlp(1), progress=3)  # type: ignore[arg-type]


def test_ctrl_c_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt reaches the caller after the weight that is being read, not after all of them."""
    started, loaded = threading.Event(), []

    def slow(what: str, done: int, total: int) -> None:
        loaded.append(done)
        started.set()
        time.sleep(0.05)

    def interrupted(model: CompiledModel) -> None:
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledModel, "warm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rlx.CausalLM(*mlp(40), progress=slow)
    assert len(loaded) <= 3
