"""What models print: `report()` of programs and requests, and the table of blocks of a flow or a model."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from tests import divided
from tests.oracles import checkpoints, numpy_reference


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
    assert max(map(len, str(report).splitlines())) <= 80 and "layers.*.self_attn: " in str(report)
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


def test_encoders() -> None:
    """What was embedded last, and how fast."""
    encoder = rlx.Encoder(divided.recipe("bert"), divided.weights("bert"))
    assert encoder.report().request is None
    encoder.embed([[1, 2, 3], [4, 5]])
    encoder.embed([[1, 2, 3], [4, 5]])
    report = encoder.report()
    told = report.request
    assert told is not None and (told.kind, told.rows, told.prompt_tokens, told.compiled) == ("texts", 2, 5, 0)
    assert str(told) in " ".join(str(report).split()) and report.embedding != ""
    sizes = {"batch": 7, "seq": 4}
    assert encoder.report(**sizes).flops == encoder.model.report(**sizes).flops != report.flops


# -- the table of blocks -------------------------------------------------------------------------


LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
WEIGHTS = numpy_reference.read_weights(LLAMA)
COUNT = sum(value.size for value in WEIGHTS.values())


@pytest.fixture(scope="module")
def model() -> rlx.CompiledModel:
    """Bound to a size, and not called."""
    return rlx.compile(rlx.recipe_for(LLAMA).assemble().with_weights({k: v.astype("f4") for k, v in WEIGHTS.items()}))


def test_numbers_of_a_model(model: rlx.CompiledModel) -> None:
    """Parameters are those of the checkpoint, FLOPs 2 · in · out for a token, and totals those of the report."""
    table = model.outline()
    rows = {".".join(map(str, row.path)): row for row in table.rows}
    assert table.params == COUNT
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        row = rows[f"layers.{{i}}.{name}"]
        stored = [v for key, v in WEIGHTS.items() if name in key]
        assert row.params == sum(v.size for v in stored)
        assert row.cost is not None and row.cost.flops == 2 * sum(v.size for v in stored if v.ndim == 2)
    layer, report = rows["layers.{i}"], model.report(batch=1, seq=1)
    assert layer.layers == 3 and layer.params == sum(v.size for key, v in WEIGHTS.items() if ".layers." in key)
    assert table.cost is not None and (table.cost.flops, table.cost.bytes) == (report.flops, report.bytes)
    bound = rlx.recipe_for(LLAMA).assemble().bind(batch=2, seq=5)._outline()
    assert bound.sizes == {"batch": 2, "seq": 5} and bound.cost is not None
    assert bound.cost.flops == model.report(batch=2, seq=5).flops


def test_what_is_printed(model: rlx.CompiledModel) -> None:
    """A small model as it stands on the screen; `repr` is one line."""
    flow = (
        rlx.ModelFlow("mlp").input("x", ("batch", 64))
        .repeat_layers(12, lambda i: blocks.Linear(f"l.{i}.w", shape=(64, 64))).linear("out", shape=(500, 64))
    )  # fmt: skip
    assert str(flow) == (
        "mlp\n"
        "  in   x f32[batch,64]\n"
        "  out  output f32[batch,500]\n"
        "\n"
        "block                          output                   params    FLOPs    bytes\n"
        "layers.{i} × 12                                          49.2K    98.3K     203K\n"
        "  w                            f32[batch,64]             49.2K    98.3K     203K\n"
        "out                            f32[batch,500]            32.0K    64.0K     130K\n"
        "total                                                    81.2K     162K     333K\n"
        "FLOPs and bytes of one call at batch 1"
    )
    assert repr(flow) == "ModelFlow(mlp: x f32[batch,64]; 2 stages)"
    assert repr(model) == f"CompiledModel(llama: forward, {COUNT:,} parameters)"
    assert repr(rlx.compile(flow)) == "CompiledModel(mlp: forward, 81,152 parameters, no numbers yet)"


def test_a_flow_that_cannot_be_built_prints_its_stages() -> None:
    """Printing is no error: shapes of weights may not be known yet."""
    flow = rlx.ModelFlow("m<1>").input("x", ("batch", 8)).linear("w").stage(rlx.blocks.Activation("relu"))
    text = str(flow)
    assert text.splitlines()[:3] == ["ModelFlow(m<1>: x f32[batch,8]; 2 stages)", "  0  Linear", "  1  Activation"]
    assert (
        "the shape of weight 'w' is not known" in re.sub(r"\s+", " ", text) and max(map(len, text.splitlines())) <= 80
    )
    assert flow._repr_html_().startswith("<pre>ModelFlow(m&lt;1&gt;")
    assert repr(rlx.ModelFlow("empty")) == "ModelFlow(empty: no inputs; 0 stages)"
