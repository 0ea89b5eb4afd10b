"""The text of programs does not change by itself: dumps at every level, kept in `tests/golden`.

A change of a lowering or a pass changes them on purpose. Look at the difference after

    RLX_UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, blocks
from rlx_jax.models.llama import LlamaConfig, weight_specs
from tests import small

GOLDEN = Path(__file__).parent / "golden"
LEVELS = ("hir", "mir", "lir")


def linear() -> GraphModule:
    """`x · w + b` by hand."""
    return Graph.define("linear", lambda m: m.linear(m.input("x", (2, 8)), m.param("w", (8, 8)), m.param("b", (8,))))


def llama() -> GraphModule:
    """Two layers of Llama, as the recipe writes them."""
    config = LlamaConfig.from_hf(small.LLAMA | {"vocab_size": 32})
    return rlx.Llama32Flow(config).assemble().build(weight_specs(config)).into_graph_module()


def bert() -> GraphModule:
    """One encoder layer of BERT."""
    spec = blocks.BertEncoderLayerSpec.hf("encoder.layer.0", 16, 2, 1e-12)
    flow = rlx.ModelFlow("bert_layer").input("x", ("batch", "seq", 16)).input("attention_mask", ("batch", "seq"))
    return flow.bert_encoder_layer(spec).build(bert_specs()).into_graph_module()


def bert_specs() -> dict[str, object]:
    """Shapes of the layer's weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
        shapes |= {f"{name}.weight": (16, 16), f"{name}.bias": (16,)}
    shapes |= {"intermediate.dense.weight": (32, 16), "intermediate.dense.bias": (32,)}
    shapes |= {"output.dense.weight": (16, 32), "output.dense.bias": (16,)}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        shapes |= {f"{name}.weight": (16,), f"{name}.bias": (16,)}
    return {f"encoder.layer.0.{k}": jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}


PROGRAMS: dict[str, tuple[Callable[[], GraphModule], dict[str, int]]] = {
    "linear": (linear, {}), "llama": (llama, {"batch": 2, "seq": 5}), "bert_layer": (bert, {"batch": 2, "seq": 5}),
}  # fmt: skip


def texts(name: str) -> dict[str, str]:
    """The dump of a program at every level; MIR is what the passes leave."""
    build, sizes = PROGRAMS[name]
    module = build()
    lir = Graph.from_lir(module.into_lir(rlx.CompileProfile().replace(fusion={"target": "cpu"}), **sizes))
    return {"hir": module.inspect(), "mir": module.lower().inspect(), "lir": lir.inspect(), "json": lir.to_json()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_dumps_are_as_recorded(name: str) -> None:
    """Whoever changes one looks at it."""
    found = texts(name)
    for level in LEVELS:
        path = GOLDEN / f"{name}.{level}.txt"
        if os.environ.get("RLX_UPDATE_GOLDEN"):
            path.write_text(found[level] + "\n")
        assert path.read_text() == found[level] + "\n", f"{path.name} differs; see the top of {Path(__file__).name}"


def digest() -> str:
    """One hash of all texts, JSON among them."""
    every = [text for name in PROGRAMS for text in texts(name).values()]
    return hashlib.sha256("\0".join(every).encode()).hexdigest()


@pytest.mark.slow
def test_two_processes_print_the_same() -> None:
    """Another hash seed than here, hence other orders of sets and other addresses."""
    here = Path(__file__).parent
    program = "import sys; sys.path[:0] = sys.argv[1:]; import test_golden; print(test_golden.digest())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", program, str(here), str(here.parent)]
    found = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    assert found.strip() == digest()
