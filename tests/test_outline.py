"""What a flow and a model print: a table of blocks that a terminal of 80 columns shows, and the same for notebooks."""

from __future__ import annotations

import re

import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from tests.oracles import checkpoints, numpy_reference

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
    assert str(model) == str(model.outline())


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
