"""Files of requests: a line for each request, exactly once and of the same value however often the job is killed."""

import fcntl
import json
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.io.jsonl import open_job
from tests.opening import load
from tests.oracles.chat_templates import BASE, format_checkpoint
from tests.oracles.checkpoints import FIXTURES

SENTENCE = FIXTURES / "sentence" / "base"


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    """The results, sorted by the index."""
    return sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda line: line["index"])


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    """What a command writes with `--json`, or the error."""
    assert cli.main([*map(str, words), "--json"]) == status
    out, problems = capsys.readouterr()
    return problems if status else json.loads(out)


def finish(source: Path, target: Path, unit: int, **options: Any) -> list[int]:
    """Run a job whose results are squares, and return the lines that it computes."""
    with open_job(str(source), str(target), {"model": "square"}, unit=unit, **options) as job:
        lines = [(index, int(line)) for index, line in job.pending()]
        for index, number in lines if unit > 1 else lines[::-1]:
            job.write(index, json.dumps({"square": number**2, "é": "ü\n"}, ensure_ascii=False) + "\n")
        assert job.num_done == job.total == 7
    return [index for index, _ in lines]


@pytest.mark.parametrize("unit", [1, 3])
def test_an_output_that_ends_anywhere(unit: int, tmp_path: Path) -> None:
    """Cut at every byte, as a killed process leaves it, and resumed: the same lines, of units in the same order."""
    source, target = write_lines(tmp_path / "in", *range(4), "", 8, 9, 10), tmp_path / "out"
    assert finish(source, target, unit) == [0, 1, 2, 3, 5, 6, 7]
    whole = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        target.write_bytes(whole[:cut])
        computed = finish(source, target, unit)
        complete = sum(end <= cut for end in ends)
        assert len(computed) == 7 - (complete if complete in (0, 7) else complete // unit * unit)
        assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())
        assert unit == 1 or target.read_bytes() == whole


def test_what_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another input, an output of something else or with a line twice, and one that another process writes."""
    source, target, record = write_lines(tmp_path / "in", *range(7)), tmp_path / "out", tmp_path / "out.job"

    def refused(error: type[Exception], message: str, one: Path = source, other: Path = target) -> None:
        before = target.read_bytes()
        with pytest.raises(error, match=message):
            finish(one, other, 1)
        assert target.read_bytes() == before

    target.write_text("mine")
    refused(errors.TargetExistsError, "no output of a job")
    assert not record.exists()
    finish(source, target, 1, overwrite=True)
    whole, recorded = target.read_bytes(), record.read_bytes()
    twice, hole = whole + whole.splitlines(True)[0], whole.replace(b"square", b"squ\0re", 1)
    for content in (twice, hole, b"{}\n" + whole, b'{"index": 7, "a": 1}\n'):
        target.write_bytes(content)
        refused(errors.FormatError, "at byte")
    for content in (b"", b"{}", recorded[:-1], recorded.replace(b'"seed"', b'"sed"')):
        record.write_bytes(content)
        refused(errors.FormatError, r"out\.job")
    record.write_bytes(recorded)
    with open(record) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(errors.RequestError, "another process")
    refused(errors.RequestError, "same file", target, target)
    refused(errors.RequestError, "same file", record, target)
    reader, writer = os.pipe()
    os.close(writer)
    refused(errors.RequestError, "is a pipe", Path(f"/dev/fd/{reader}"), target)
    os.close(reader)
    refused(errors.MissingFileError, "No such file", tmp_path / "no", target)
    refused(errors.StorageError, "directory", tmp_path, target)
    refused(errors.SaveFailedError, "No such file", source, tmp_path / "no" / "out")
    refused(errors.RequestError, "another input", write_lines(source, *range(1, 8)), target)
    target.unlink()  # a new job
    assert len(finish(source, target, 1)) == 7 and target.read_bytes() != whole
    monkeypatch.setattr("rlx_jax.io.limits.MAX_LINE_BYTES", 1)
    refused(errors.LimitError, "line 2.*MAX_LINE_BYTES = 1", write_lines(source, "", "2"), target)


def test_a_full_disk(tmp_path: Path) -> None:
    """An error of a documented type, also of the close, and the job is resumed when there is space again."""
    source, target = write_lines(tmp_path / "in", *range(4), "", 8, 9, 10), tmp_path / "out"
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    finish(source, target, 3)
    expected = target.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len((tmp_path / "out.job").read_bytes()), limits[1]))
    try:
        target.write_bytes(expected[:9])
        with pytest.raises(errors.StorageError, match="complete lines are intact"):
            finish(source, target, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert finish(source, target, 3) and target.read_bytes() == expected


PROMPTS: list[Any] = [
    {"prompt": "It was", "id": 7, "metadata": {"a": [None]}},
    {"ids": [1, 2, 3], "max_new_tokens": 3, "temperature": 1.0, "logit_bias": {"5": -3.5}}, "",
    {"messages": [{"role": "user", "content": "Hi"}], "stop": ["e", 9], "temperature": 0.8, "seed": 3},
    {"prompt": "a b", "max_new_token": 3}, "not JSON", {"prompt": "a", "ids": [1]},
    {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, {"ids": [1], "max_new_tokens": "4"}, {"ids": [10**6]},
    {"prompt": "It was", "temperature": 0.9, "top_k": 40},
]  # fmt: skip


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line equals a call with its options; what is wrong with a line stands in its place, and the others go on."""
    lm, target = load(format_checkpoint(tmp_path / "m", "qwen")), tmp_path / "out"
    monkeypatch.setattr(rlx, "load", lambda *given, **named: lm)
    words = ["generate", tmp_path / "m", "--input", write_lines(tmp_path / "in", *PROMPTS), "--output", target]
    words += ["--max-new-tokens", 6, "--slots", 2, "--logprobs", 1]
    assert run(capsys, *words) == {"output": str(target), "lines": 10, "resumed": 0, "errors": 6}
    got = {line["index"]: line for line in read_lines(target)}
    seed, empty = json.loads((tmp_path / "out.job").read_text())["seed"], rlx.Sampler()
    samplers = [empty, rlx.Sampler(1.0, logit_bias={5: -3.5}), *[empty] * 8, rlx.Sampler(0.9, top_k=40)]
    ids = lm.tokenizer.encode("It was")
    rows = lm.generate([ids, [1, 2, 3], *[[1]] * 8, ids], [6, 3, *[1] * 8, 6], samplers, seed=seed, logprobs=1, slots=2)
    chat = lm.apply_chat_template(PROMPTS[3]["messages"])
    stop = [["e", 9], []]
    (rows[3], _) = lm.generate([chat, ids], 6, [rlx.Sampler(0.8), samplers[1]], stop, [3, 3], logprobs=1, slots=2)
    for i, as_text in ((0, True), (1, False), (3, True), (10, True)):
        want = lm.tokenizer.decode(rows[i].tokens) if as_text else None
        want = want.partition("e")[0] if want and i == 3 else want
        assert (got[i]["ids"], got[i].get("text")) == ([*rows[i].tokens], want)
        np.testing.assert_allclose(got[i]["token_logprobs"], rows[i].token_logprobs, atol=2e-5)
        assert got[i]["new_tokens"] == len(got[i]["top"]) and got[i]["finish_reason"] == rows[i].finish_reason
    assert (got[0]["id"], got[0]["metadata"], "metadata" in got[10]) == (7, {"a": [None]}, False)
    told = [
        "mean 'max_new_tokens'", "line 6: not JSON", "got 'prompt', 'ids'", "logit_bias", "max_new_tokens is '4'",
        "10000",
    ]  # fmt: skip
    assert all(part in got[index]["error"]["message"] for index, part in enumerate(told, 4))
    assert all(f"line {index + 1}" in line["error"]["message"] for index, line in got.items() if "error" in line)
    assert run(capsys, *words) == {"output": str(target), "lines": 10, "resumed": 10, "errors": 0}
    assert "another max_new_tokens, 6, and now it is 5" in run(capsys, *words, "--max-new-tokens", 5, status=1)
    assert "another seed, None, and now it is 3" in run(capsys, *words, "--seed", 3, status=1)
    name = next(iter(lm.model.params))
    lm.model = lm.model.replace({**lm.model.params, name: lm.model.params[name].at[0, 0].add(1e-3)})
    assert "another model" in run(capsys, *words, status=1)
    assert run(capsys, *words, "--overwrite")["resumed"] == 0


def test_embed_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of one call, and after a cut those of the uninterrupted job; `embed_iter` gives them in order."""
    encoder, lm, target = load(SENTENCE), load(BASE), tmp_path / "out"
    monkeypatch.setattr(rlx, "load", lambda directory, **named: encoder if "sentence" in directory else lm)
    monkeypatch.setattr("rlx_jax.cli.files.LINES_PER_CALL", 2)
    monkeypatch.setattr("rlx_jax.encode.embedding.TEXTS_AT_ONCE", 3)
    texts = ["a b", "c", "a longer text", "d e f", "g"]
    source = write_lines(tmp_path / "in", *({"text": text, "id": text} for text in texts), {"text": 3})
    words: list[object] = ["embed", SENTENCE, "--input", source, "--output", target]
    assert run(capsys, *words)["errors"] == 1
    whole, got = target.read_bytes(), read_lines(target)
    want = encoder.embed(texts)
    np.testing.assert_allclose([line["embedding"] for line in got[:5]], want, atol=1e-6)
    np.testing.assert_allclose([*encoder.embed_iter(iter(texts))], want, atol=1e-6)
    assert got[0]["id"] == "a b" and got[5]["error"]["message"].startswith("line 6: text is 3")
    target.write_bytes(whole[: len(whole) // 2])
    assert run(capsys, *words)["resumed"] == 2 and target.read_bytes() == whole
    assert "another prompt" in run(capsys, *words, "--prompt", "x", status=1)
    with pytest.raises(errors.TokenIdError, match=r"texts\[4\]"):
        list(encoder.embed_iter([[1], [1], [1], [1], [10**6]]))
    scored = [{"text": " was", "context": "It"}, {"text": "a b"}, {"text": "", "id": 1}, {"context": "x"}]
    words = ["score", BASE, "--input", write_lines(tmp_path / "in", *scored), "--output", target, "--overwrite"]
    assert run(capsys, *words)["errors"] == 2
    got = read_lines(target)
    assert [line["logprob"] for line in got[:2]] == pytest.approx(
        [s.logprob for s in lm.score([("It", " was"), "a b"])]
    )
    assert got[2]["id"] == 1 and ["error" in line for line in got] == [False, False, True, True]
    assert [line["error"]["message"][:6] for line in got[2:]] == ["line 3", "line 4"]


@pytest.mark.slow
def test_killed_fifty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At random moments of its start or after new lines; the output equals a job's that was never killed.

    Each job is a process forked from one that has imported the package, which takes longer than the rest of a start."""
    rng, source, whole, target = random.Random(0), tmp_path / "in", tmp_path / "whole", tmp_path / "out"
    prompts = [{"ids": [1 + i % 90, 5], "max_new_tokens": 1 + i % 7, "temperature": i % 2} for i in range(600)]
    words = ["generate", str(BASE), "--input", str(write_lines(source, *prompts)), "--slots", "4", "--seed", "3"]
    monkeypatch.setenv("RLX_JAX_CACHE", str(tmp_path / "cache"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlx_jax.cli.entry", "rlx_jax.cli.requests", "rlx_jax.generate.causal"])

    def start(output: Path) -> Any:
        job = context.Process(target=cli.main, args=([*words, "--output", str(output)],))
        job.start()
        return job

    def finished(output: Path) -> list[Any]:
        start(output).join(timeout=600)
        return read_lines(output)

    lines = finished(whole)
    for _ in range(50):
        size, job = target.stat().st_size if target.exists() else 0, start(target)
        deadline = time.monotonic() + (rng.uniform(0, 2) if rng.random() < 0.2 else 300)
        while time.monotonic() < deadline and job.exitcode is None:
            if target.exists() and target.stat().st_size > size:
                time.sleep(rng.uniform(0, 0.02))
                break
            time.sleep(0.005)
        job.kill()
        job.join()
        assert job.exitcode == -signal.SIGKILL, "the job ended before it was killed often enough"
    assert finished(target) == lines and [line["index"] for line in lines] == [*range(600)]
