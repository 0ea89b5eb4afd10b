"""The command `rlx-jax`: what it prints, where, and with which status; progress of loading and compiling."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.cli.entry import COMMANDS, make_parser
from rlx_jax.cli.requests import TimedAnswer, summary_line
from rlx_jax.cli.terminal import CONTROLS, read_line, read_stdin, write
from tests.oracles.chat_templates import BASE, checkpoint, format_checkpoint
from tests.oracles.checkpoints import FIXTURES, edited
from tests.terminal import Terminal

ROOT = Path(__file__).resolve().parents[1]
CASE: dict[str, Any] = json.loads((FIXTURES / "llama" / "chat.json").read_text("utf-8"))[0]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
# A shell's background jobs ignore Ctrl-C, and so would what they start.
WITH_INTERRUPT = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{WITH_INTERRUPT}; from rlx_jax.cli import main; sys.exit(main())"]


FIGURES = (
    r"prompt [\d,]+ tokens, [\d,]+/s; answer 24 tokens, [\d,.]+/s; first text after \d+\.\d\d s, "
    r"\d+ programs compiled in it; peak memory [\d.]+ [MG]B"
)


def interrupted(process: subprocess.Popen[bytes]) -> int | None:
    """The status of a process that Ctrl-C ends. It is pressed again where it has not counted in ten seconds: one that
    comes with the end of an answer ends that, and one between a prompt and Python's waiting for input is heard at the
    next key. (One that comes while Python ends kills it.)"""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=10)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["prompt", str(BASE)])
def test_drafts(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text, by drafts from itself or of another checkpoint."""
    words = ["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24"]
    assert cli.main([*words, "--speculative", source, "--draft-tokens", "3"]) == 0
    assert capsys.readouterr().out == CASE["text"] + "\n"


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


@pytest.mark.slow
def test_text_and_progress_share_a_terminal() -> None:
    """The recorded text, and progress with bytes and programs that is wiped: the loop compiles after the first token is
    out, and what it tells must not take that token away."""
    words = ["generate", str(BASE), "--prompt", CASE["prompt"], "--max-new-tokens", "24"]
    with Terminal([*COMMAND, *words], ENVIRONMENT) as terminal:
        written = terminal.rest()
        assert terminal.process.wait(timeout=120) == 0
    assert re.search(r"load [\d.]+ kB of 136\.45 kB", written), written
    assert "compile prefill of batch 1, context 64, seq 16 …" in written, written
    text, _, figures = screen(written).rpartition("\n")[0].rpartition("\n")
    assert text == CONTROLS.sub("\ufffd", CASE["text"]), written
    assert re.fullmatch(FIGURES, figures), figures


@pytest.mark.slow
def test_quiet_where_nobody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on a stderr that is no terminal; a prompt from stdin, a chat, choosing by a seed."""
    directory = format_checkpoint(tmp_path / "m", "qwen")
    drawn = "--temperature 0.9 --top-k 40 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.2"
    options = f"--max-new-tokens 12 --seed 3 {drawn}".split()
    sampler = rlx.Sampler(0.9, 40, 0.9, 0.01, 1.2)
    lm = rlx.load(directory)
    monkeypatch.setattr(rlx, "load", lambda *given, **named: lm)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Is it é?\n".encode())))
    assert cli.main(["generate", str(directory), "--prompt", "-", *options]) == 0
    assert capsys.readouterr() == (lm.generate("Is it é?\n", 12, sampler, seed=3) + "\n", "")
    options += ["--system", "Be brief.", "--stop", "zzzz", "--stop", "q"]
    assert cli.main(["generate", str(directory), "--prompt", "Hi", *options]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert capsys.readouterr() == (lm.chat(messages, 12, sampler, stop=["zzzz", "q"], seed=3) + "\n", "")


@pytest.mark.slow
def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`rlx-jax … | head -c 1`: no traceback."""
    reading, writing = os.pipe()
    words = [*COMMAND, "inspect", str(BASE)]
    os.close(reading)
    process = subprocess.run(words, env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_output_that_takes_no_letters(
    language_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed, on a full disk, or of an encoding that lacks some: one line; JSON has all letters. Nothing more is said
    when Python flushes at its end."""
    monkeypatch.setattr(rlx, "load", lambda *given, **named: language_model)
    words = ["score", str(BASE), "a € b", "--context", "€ x"]
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, "latin-1")
    for stdout, told in (
        (None, "rlx-jax: StorageError: stdout is closed, and results go there\n"),
        (narrow, "its encoding, latin-1, has no '€': set PYTHONIOENCODING=utf-8"),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(words) == 1 and told in capsys.readouterr().err
    assert cli.main([*words, "--json"]) == 0
    narrow.flush()
    found = json.loads(raw.getvalue())
    assert (found["text"], found["context"]) == ("a € b", "€ x")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["inspect", str(BASE)]) == 1
        full.flush()
    assert capsys.readouterr().err == "rlx-jax: StorageError: stdout: No space left on device\n"


@pytest.mark.parametrize(("words", "told"), [
    ("export nowhere -o m.rlxa", "there is no option '-o'; a value that begins with -"),
    ("generate nowhere --promt x", "generate: error: there is no option '--promt'; did you mean '--prompt'"),
    ("generate nowhere --prompt a --stop -x", "'-x'; a value that begins with - is written --option=VALUE"),
    ("generat nowhere", "rlx-jax: error: there is no command 'generat'; did you mean 'generate'?"),
    ("generate nowhere", "generate: error: one of the arguments TEXT --prompt --input is required"),
    ("generate nowhere a b", "one prompt is continued, got 2 texts"),
    ("generate nowhere a --prompt b", "argument TEXT: not allowed with argument --prompt or --input"),
    ("generate --prompt x --devices gpu", "--devices: expected a number or auto, got 'gpu'"),
    ("generate --prompt x --max-new-tokens many", "--max-new-tokens: invalid int value: 'many'"),
    ("generate --prompt x", "required: DIR"),
])  # fmt: skip
def test_a_command_that_is_not_understood(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names the word that is wrong before what is missing, and what was meant."""
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    assert left.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["generate", "--prom", "-1"], ["generate", "--prompt=--x"], ["embed", "- a dash"], ["embed", "--", "-x"]]
)
def test_words_that_are_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A beginning of an option, and values that look like one. `--debug` shows where an error comes from."""
    command, *rest = words
    assert cli.main([command, "./nowhere", *rest]) == 1
    assert "'./nowhere': no such directory" in capsys.readouterr().err
    with pytest.raises(errors.MissingFileError):
        cli.main(["generate", "./nowhere", "--prompt", "x", "--debug"])


def test_stdin_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert cli.main(["generate", str(BASE), "--prompt", "-"]) == 1
    assert "stdin: not UTF-8 at byte 2" in capsys.readouterr().err
    assert cli.main(["generate", str(BASE), "--prompt", "\udcff"]) == 1
    assert "RequestError: --prompt: not UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", None)  # a shell's <&-
    assert read_line("> ") == read_stdin("texts") == b""


def documented() -> dict[str, set[str]]:
    """The names of each kind of result in the page on the command: first column and second column of its table."""
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8").partition("| result | keys |")[2]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", page.partition("\n\n")[0], re.MULTILINE)
    return {result: set(re.findall(r"`(\w+)`", re.sub(r": [^`]*", "", names))) for result, names in rows}


NAMES = documented()


def lines(capsys: pytest.CaptureFixture[str], *words: object) -> list[Any]:
    """What a command writes with `--json`, and nothing on stderr; names are those of the page on the command."""
    assert cli.main([*map(str, words), "--json"]) == 0
    out, problems = capsys.readouterr()
    assert problems == ""
    found = [json.loads(line) for line in out.splitlines()]
    known = [names for result, names in NAMES.items() if re.search(rf"`{words[0]}\b", result)]
    assert known and all(set(line) in known for line in found), (found, known)
    return found


def test_every_result_is_documented() -> None:
    """What `lines` looks up; a row for each command that writes JSON."""
    for command in COMMANDS:
        written = any(re.search(rf"`{command.name}\b", result) for result in NAMES)
        assert written == (command.name != "completion"), command.name
    assert {"compiled", "prompt", "seed"} < NAMES["a text of `generate`, a reply of `chat`"]


@pytest.fixture(scope="module")
def language_model() -> Any:
    """A model that several commands share, as each of them would compile it anew."""
    return rlx.load(BASE)


def test_results_as_json(
    language_model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object for each result, with the text and its figures."""
    lm = language_model
    monkeypatch.setattr(rlx, "load", lambda *given, **named: lm)
    (found,) = lines(capsys, "generate", BASE, "--prompt", CASE["prompt"], "--max-new-tokens", 24)
    (again,) = lines(capsys, "generate", BASE, "--max-new-tokens", 24, CASE["prompt"])
    assert again["text"] == found["text"]
    assert (found["prompt"], found["text"], found["new_tokens"]) == (CASE["prompt"], CASE["text"], 24)
    assert found["seed"] is None and found["peak_bytes"] > 10**7
    assert 0 < found["seconds_to_first_text"] <= found["seconds"]
    assert found["prompt_tokens"] == len(lm.tokenizer.encode(CASE["prompt"]))
    scores = lines(capsys, "score", BASE, "It was", "a b")
    assert [s["logprob"] for s in scores] == [s.logprob for s in lm.score(["It was", "a b"])]
    for s in scores:
        assert s["perplexity"] == pytest.approx(np.exp(-np.mean(s["token_logprobs"])), rel=1e-6)
    (pair,) = lines(capsys, "score", BASE, " was", "--context", "It")
    assert pair["tokens"] == list(lm.score(("It", " was")).tokens) and pair["context"] == "It"
    assert lines(capsys, "score", BASE, "--context", "It", " was") == [pair]  # options may come first


def test_embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The vectors of `Encoder.embed`: as JSON, as numbers, and in a file, of texts or of the lines of stdin."""
    directory = FIXTURES / "sentence" / "base"
    encoder = rlx.load(directory, expect=rlx.Encoder)
    want = encoder.embed(["a b", "c"])
    monkeypatch.setattr(rlx, "load", lambda *given, **named: encoder)
    found = lines(capsys, "embed", directory, "a b", "c")
    assert [line["text"] for line in found] == ["a b", "c"]
    np.testing.assert_array_equal(np.array([line["embedding"] for line in found], np.float32), want)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a b\nc\n")))
    assert cli.main(["embed", str(directory)]) == 0
    np.testing.assert_array_equal(np.loadtxt(io.StringIO(capsys.readouterr().out), np.float32), want)
    (written,) = lines(capsys, "embed", directory, "a b", "c", "--output", tmp_path / "v.npy")
    assert written["shape"] == list(want.shape)
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), want)


@pytest.mark.slow
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """Rates are what was read, and what was generated, over the time of it; of encoders, too."""
    words = ["--prompt-tokens", 8, "--batch", 2, "--runs", 1]
    (found,) = lines(capsys, "bench", BASE, *words, "--new-tokens", 9, "--device", "cpu:3")
    assert (found["batch"], found["prompt_tokens"], found["new_tokens"]) == (2, 8, 9)
    assert found["prompt_tokens_per_second"] == pytest.approx(16 / found["seconds_to_first_token"], rel=0.05)
    if found["new_tokens_per_second"] is not None:  # a busy machine may take longer for the shorter request
        assert found["new_tokens_per_second"] == pytest.approx(2 / found["seconds_per_token"], rel=0.05)

    encoder = FIXTURES / "sentence" / "base"
    (found,) = lines(capsys, "bench", encoder, "--prompt-tokens", 5, "--batch", 2, "--runs", 1)
    assert found["texts_per_second"] == pytest.approx(2 / found["seconds"], rel=0.05)


@pytest.mark.filterwarnings("always::rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize(("directory", "options", "told"), [
    ("llama/gqa_tied_llama3_v5", [], "128 positions: 95 tokens and 32 new ones are timed"),
    ("llama/gqa_tied_llama3_v5", ["--prompt-tokens", "120"], "128 positions: 120 tokens and 7 new ones are timed"),
    ("sentence/base", [], "40 positions: 40 tokens are timed"),
])  # fmt: skip
def test_bench_fits_its_lengths(
    directory: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(FIXTURES / directory), "--runs", "1", *options]) == 0
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_replies_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Their names are in the page, too."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi\nAnd?\n")))
    first, second = lines(capsys, "chat", format_checkpoint(tmp_path / "m", "qwen"), "--max-new-tokens", 4)
    assert (first["prompt"], second["prompt"], second["new_tokens"]) == ("Hi", "And?", 4)
    assert first["compiled"] > 0


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters are put on the one that is named, or divided over several."""
    models, lines, load = list[Any](), list[str](), rlx.load

    def kept(*given: Any, **named: Any) -> Any:
        models.append(load(*given, **named))
        return models[-1]

    monkeypatch.setattr(rlx, "load", kept)
    for words in (["--device", "cpu:3"], ["--devices", "auto", "--tensor", "4"]):
        assert cli.main(["score", str(BASE), "It was", *words]) == 0
        lines += capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"-[\d.]+\t[\d.]+\tIt was", lines[0])
    assert [float(n) for n in lines[1].split("\t")[:2]] == pytest.approx([float(n) for n in lines[0].split("\t")[:2]])
    assert {d.id for p in models[0].model.params.values() for d in p.devices()} == {3}
    assert models[1].report().mesh == "data 2 × tensor 4"


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """safetensors to orbax and back: the same numbers; in bf16 they are rounded, and the config says so."""
    first, second = tmp_path / "a", tmp_path / "b"
    (done,) = lines(capsys, "convert", BASE, first, "--format", "orbax")
    assert done["tensors"] == 20 and "tokenizer.json" in done["files"]
    lines(capsys, "convert", first, second, "--dtype", "bf16")
    source, whole, rounded = (rlx.open_weights(path) for path in (BASE, first, second))
    for key in source.keys():
        np.testing.assert_array_equal(whole.read(key), source.read(key))
        np.testing.assert_array_equal(rounded.read(key), source.read(key).astype(ml_dtypes.bfloat16))
    assert json.loads((second / "config.json").read_text())["dtype"] == "bfloat16"
    assert rlx.load(second, dtype="f32").tokenizer is not None
    assert cli.main(["convert", str(first), str(second)]) == 1
    assert "TargetExistsError" in capsys.readouterr().err
    config = first / "config.json"
    config.write_text(config.read_text().replace("{", "{,", 1))
    assert cli.main(["convert", str(first), str(tmp_path / "c")]) == 1
    assert "a/config.json': not JSON" in capsys.readouterr().err and not (tmp_path / "c").exists()
    high = tmp_path / "high.safetensors"
    safetensors.numpy.save_file({"w": np.array([3.4e38, 1], np.float32)}, high)
    for dtype, advice in (("f16", "; bf16 has the range of f32"), ("bf16", "")):
        assert cli.main(["convert", str(high), str(tmp_path / "c"), "--dtype", dtype]) == 1
        want = f"'w': 1 of 2 values are over the range of {dtype}, now infinite{advice}\n"
        assert capsys.readouterr().err.endswith(want) and not (tmp_path / "c").exists()


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and devices; of an extra what is missing, and the command that gets it."""
    (found,) = lines(capsys, "doctor")
    assert found["versions"]["jax"] == importlib.metadata.version("jax") and len(found["devices"]) == 8
    assert set(found["devices"][3]) == NAMES["each of `devices` of `doctor`"]
    assert (found["devices"][3]["platform"], found["devices"][3]["id"]) == ("cpu", 3)
    assert found["missing"]["train"] == []
    version = importlib.metadata.version
    gone: Any = {"optax": "no-such-package"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: version(gone.get(name, name)))
    assert cli.main(["doctor"]) == 0
    assert "extra train    missing optax: pip install 'rlx-jax[train]'" in capsys.readouterr().out


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Options that mean the same have the same name; `--json` is everywhere but where a shell reads."""
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            make_parser().parse_args([command.name, "--help"])
        told = capsys.readouterr().out
        assert "--debug" in told and ("--json" in told or command.name == "completion")
        without = {"convert", "doctor", "completion"}
        assert ("--profile" in told) == (command.name not in without)
        assert ("--dtype" in told) == (command.name not in {"doctor", "completion"})


@pytest.mark.slow
def test_a_terminal_that_edits_lines(tmp_path: Path) -> None:
    """Lines that are pasted are one message, and a line may be longer than a terminal's own 4096 bytes. Ctrl-C ends an
    answer, and the talk goes on; where none is given, the talk."""
    directory = edited(format_checkpoint(tmp_path / "it", "qwen"), tmp_path / "m", {"max_position_embeddings": 9000})
    lm, pasted, long = rlx.load(directory), "one\ntwo", "word " * 1000
    command = [*COMMAND, "chat", str(directory), "--max-new-tokens", "3000"]
    with Terminal(command, ENVIRONMENT | {"TERM": "xterm"}) as terminal:
        terminal.until("> ")
        for typed, message in ((f"\x1b[200~{pasted}\x1b[201~\n", pasted), (f"{long}\n", long.strip())):
            terminal.write(typed)
            terminal.until(re.escape(CONTROLS.sub("\ufffd", lm.chat(message, 3).rstrip("\ufffd"))))
            terminal.process.send_signal(signal.SIGINT)
            terminal.until("interrupted; the conversation continues without this message.*> ")
        assert interrupted(terminal.process) == 130


@pytest.mark.slow
def test_a_message_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Ctrl-C in an answer, and an error, end neither the talk nor what was said; in a script they end the command. What
    was said before counts until /new."""
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, outer))
    lm = rlx.load(format_checkpoint(tmp_path / "m", "qwen"))
    first = lm.chat("Hi", 8)
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    second = lm.chat([*asked, {"role": "user", "content": "And?"}], 8)
    pieces: list[str] = []

    def written(piece: str) -> None:
        if pieces.count("\n") == 1 and pieces[-1] == "\n":  # the first piece of the second answer
            signal.raise_signal(signal.SIGINT)
        pieces.append(piece)

    monkeypatch.setattr("rlx_jax.cli.entry.write", written)
    monkeypatch.setattr("rlx_jax.cli.requests.load_language_model", lambda args, session: lm)
    for somebody, status in ((True, 0), (False, 130)):
        pieces.clear()
        lines = iter([b"Hi\n", b"left\n", b"\xff\n", b" \n", b"word " * 99 + b"\n", b"And?\n", b"/new\n", b"Hi\n", b""])
        monkeypatch.setattr("rlx_jax.cli.requests.read_line", lambda prompt, lines=lines: next(lines))
        monkeypatch.setattr("rlx_jax.cli.requests.is_interactive", lambda there=somebody: there)
        assert cli.main(["chat", "nowhere", "--max-new-tokens", "8"]) == status
        assert "".join(pieces).startswith(f"{first}\n") and pieces.count("\n") == (4 if somebody else 1)
        assert "".join(pieces).endswith(f"\n{second}\n{first}\n") == somebody
    problems = capsys.readouterr().err
    for told in (
        "interrupted; the conversation continues without this message",
        "RequestError: stdin: not UTF-8 at byte 8",
        "; /new begins another",
    ):
        assert problems.count(told) == 1
    lines = iter([b"Hi\n", b""])
    monkeypatch.setattr("rlx_jax.cli.requests.read_line", lambda prompt: next(lines))
    assert cli.main(["chat", "nowhere"]) == 0
    served = lm.report().request
    assert served is not None and served.new_tokens == 128 // 4 == (lm.max_positions or 0) // 4
    for most, noted in ((served.new_tokens, True), (served.new_tokens + 1, False)):
        assert ("tokens, all that --max-new-tokens allows, " in summary_line(TimedAnswer(list), lm, most)) == noted


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, weights and tokenizer of a checkpoint, from headers alone."""
    directory = checkpoint(tmp_path / "m", ["<|eot_id|>"], settings={"chat_template": "x"})
    (found,) = lines(capsys, "inspect", directory)
    assert (found["recipe"], found["kind"], found["parameters"]) == ("Llama32Flow", "causal", 34_112)
    assert (found["tensors"], found["weight_bytes"], found["dtypes"]) == (20, 136_448, ["f32"])
    assert (found["tokenizer_tokens"], found["chat_templates"]) == (362, ["default"])
    assert (found["config"]["hidden_size"], found["config"]["tie_word_embeddings"]) == (32, True)
    (nested,) = lines(capsys, "inspect", FIXTURES / "mamba2" / "groups_v5")
    assert nested["config"]["mixer"]["state_size"] == 7  # a record is an object, not its text
    assert cli.main(["inspect", str(directory)]) == 0
    rows = dict(re.findall(r"^([\w ]+?) {2,}(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert (rows["recipe"], rows["hidden_size"]) == ("Llama32Flow, causal", "32")
    assert rows["weights"] == "34,112 in 20 tensors, 136.45 kB"


def test_a_terminal_is_not_commanded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes that a model writes are shown as signs on a terminal, and kept for a file."""
    text = "a\x1b[2J\tb\nc\x9b1m\x07"
    write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write(text)
    assert capsys.readouterr().out == "a\ufffd[2J\tb\nc\ufffd1m\ufffd"
