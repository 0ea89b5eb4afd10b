"""What `report()` tells: what compiling cost, what programs need, how fast the last request was."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.runtime.block_times import shortened
from rlx_jax.runtime.report import RequestReport, in_short, layers_once, per_second
from tests import divided


@pytest.fixture(scope="module")
def lm() -> Any:
    """A model that generates."""
    return rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))


def test_a_request_and_its_programs(lm: Any) -> None:
    """How fast it was, its tokens by count, and a row for each program with what it cost and needs."""
    assert lm.report().request is None and lm.report().programs == ()
    assert "request" not in str(lm.report()) and "\n\n" not in str(lm.report())
    answers = lm.generate([[1, 2, 3], [4, 5]], 9)
    first = lm.report().request
    assert first.compiled >= 2 and "were compiled in it" in str(first)
    lm.generate([[1, 2, 3], [4, 5]], 9)
    report = lm.report()
    told = report.request
    assert (told.kind, told.rows, told.prompt_tokens, told.compiled) == ("prompts", 2, 5, 0)
    assert (told.new_tokens, told.first_tokens) == (sum(map(len, answers)), 2)
    assert told.prompt_seconds < first.prompt_seconds and told.answer_seconds > 0
    assert told.prompt_rate == 5 / told.prompt_seconds and told.answer_rate == 16 / told.answer_seconds
    reader, loop = sorted(report.programs, key=lambda r: r.program.startswith("extend"))
    assert [reader.program, loop.program] == [
        "prefill of batch 2, context 64, seq 16", "extend of batch 2, context 64, seq 1",
    ]  # fmt: skip
    state = lm.model.as_program("extend").init_state(2, 64)
    held = sum(a.nbytes for a in jax.tree.leaves(state.arrays()))
    assert reader.cache_bytes == loop.cache_bytes == report.cache_bytes == held
    assert loop.donated_bytes == report.donated_bytes == held and loop.flops == report.flops
    assert loop.peak_bytes == report.peak_bytes and loop.bytes == report.bytes and report.program == loop.program
    made = {key.program: e for key, e in lm.model.programs.executables.items()}
    for row, name in ((reader, "prefill"), (loop, "extend")):
        seconds, template = made[name].seconds, lm.model.programs.template(
            next(k for k in lm.model.programs.executables if k.program == name).symbolic
        ).seconds  # fmt: skip
        assert row.prove == pytest.approx(template["derive"] + seconds["prove"]) and row.prove > 0
        assert row.lower == pytest.approx(sum(template.values()) - template["derive"] + seconds["plan"])
        assert (row.trace, row.compile) == (seconds["trace"], seconds["compile"])
        assert row.seconds == pytest.approx(sum(template.values()) + sum(seconds.values()))


def test_sizes_that_nothing_ran_with(lm: Any) -> None:
    """Of the whole forward pass, as the model's own report counts them."""
    small, large = lm.report(batch=1, seq=8), lm.report(batch=2, seq=8)
    assert large.flops == 2 * small.flops == 2 * lm.model.report(batch=1, seq=8).flops > 0


def test_the_text_is_read_in_80_columns(lm: Any) -> None:
    """Every line fits, steps that took no time share one, layers that are alike too, programs are a table."""
    lm.generate([[1, 2, 3], [4, 5]], 9)
    report = lm.report()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    seconds = [line for line in lines if line.endswith(" s") and not line.startswith(" ")]
    assert len(seconds) < len(report.seconds) and sum(" passes " in line for line in seconds) == 1
    total = sum(float(line.split()[-2]) for line in seconds)
    assert total == pytest.approx(sum(report.seconds.values()), abs=0.0006 * len(seconds))
    (attention,) = [line for line in lines if line.startswith("attention")]
    assert "layers.*.self_attn: " in attention and len(report.attention) == 2
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["programs", "prove", "lower", "trace", "compile", "FLOPs", "peak", "cache"]
    assert [line.split()[0] for line in table[1:]] == [r.program.split()[0] for r in report.programs]


def test_programs_of_other_sizes_share_what_has_none() -> None:
    """Only one of them has it, so that all seconds are those that were spent; the rest is one line of the text."""
    flow = rlx.ModelFlow("m").input("x", ("n", 4)).linear("w")
    model = rlx.compile(flow, {"w": np.ones((4, 4), np.float32)})
    for n in range(1, 19):
        model.lower(jax.ShapeDtypeStruct((n, 4), np.float32))
    report = model.report()
    assert len(report.programs) == 18 and report.cache_bytes == 0
    shared = sum(model.programs.template(model.key()).seconds.values())
    spent = sum(sum(e.seconds.values()) for e in model.programs.executables.values())
    assert sum(r.seconds for r in report.programs) == pytest.approx(shared + spent)
    assert [r.seconds for r in report.programs] == sorted((r.seconds for r in report.programs), reverse=True)
    assert str(report).splitlines()[-1].startswith("2 others, ")
    assert {r.flops for r in report.programs} == {2 * n * 16 for n in range(1, 19)}


ENCODERS: dict[str, Any] = {
    "bert": (lambda made, weights: rlx.Encoder(made, weights), [[1, 2, 3], [4, 5]], ("texts", 2, 5)),
    "vit": (lambda made, weights: rlx.VisionEncoder(made, weights), np.ones((3, 3, 12, 12), "f4"), ("images", 3, 0)),
    "siglip": (
        lambda made, weights: rlx.DualEncoder(made.of("text"), made.of("vision"), weights),
        [[1, 2, 3]],
        ("texts", 1, 3),
    ),
}


@pytest.mark.parametrize("family", ["bert", *(pytest.param(f, marks=pytest.mark.slow) for f in ("vit", "siglip"))])
def test_encoders(family: str) -> None:
    """What was embedded last, and how fast."""
    make, given, wanted = ENCODERS[family]
    encoder = make(divided.recipe(family), divided.weights(family))
    assert encoder.report().request is None
    encoder.embed(given)
    compiled = encoder.report().request.compiled
    assert compiled >= 1 and compiled >= encoder.report().compiles > 0
    encoder.embed(given)
    report = encoder.report()
    told = report.request
    assert (told.kind, told.rows, told.prompt_tokens) == wanted and told.compiled == 0 and told.prompt_seconds > 0
    assert str(told) in " ".join(str(report).split()) and (report.embedding != "") == (told.kind == "texts")
    assert told.prompt_rate == (told.prompt_tokens or told.rows) / told.prompt_seconds
    sizes = {"batch": 7, "height": 12, "width": 12} if family == "vit" else {"batch": 7, "seq": 4}
    assert encoder.report(**sizes).flops == encoder.model.report(**sizes).flops != report.flops


def test_the_text_of_a_request() -> None:
    asked = RequestReport("prompts", 2, 5000, 0.5, 42, 2, 0.25)
    read = "2 prompts of 5,000 tokens read in 0.500 s, 10,000 tokens/s"
    assert str(asked) == f"{read}; 42 new tokens, in 0.250 s behind the first, 160 tokens/s"
    behind = RequestReport("prompts", 1, 60, 0.5, cached_tokens=50, reread="a reason")
    assert str(behind) == "1 prompts of 60 tokens, 10 of them read in 0.500 s, 20 tokens/s; a reason"
    images = RequestReport("images", 8, 0, 0.5, compiled=3)
    told = "8 images read in 0.500 s, 16 images/s; 3 programs and functions were compiled in it"
    assert str(images) == told and per_second(3, 0.0) == 0.0


NUMBERS = {0: "0", 7: "7", 999: "999", 1000: "1.0k", 9949: "9.9k", 9950: "10k", 999_499: "999k", 1_000_000: "1.0M"}


def test_numbers_and_names_in_short() -> None:
    """At most five characters; a name without its middle; layers that are alike once."""
    for number, text in (NUMBERS | {34_200_000_000: "34G", 5 * 10**15: "5.0P"}).items():
        assert in_short(number) == text and len(text) <= 5
    assert shortened("prefill batch 2 context 64 seq 16", 20) == "prefill … 64 seq 16"
    assert shortened("short", 20) == "short"
    alike = ["layers.0.attn: xla (a)", "layers.1.attn: xla (a)", "layers.2.attn: cudnn", "9 by xla (as any other)"]
    assert layers_once(alike) == [
        "layers.*.attn: xla (a) (2 of them)",
        "layers.*.attn: cudnn",
        "9 by xla (as any other)",
    ]
