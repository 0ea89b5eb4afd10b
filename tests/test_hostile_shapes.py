"""Sizes that make JAX abort the process, where it does not ask: each is one of our errors, and the process lives on."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import RlxError

FIXTURES = Path(__file__).resolve().parent / "fixtures"
F32 = jnp.float32
HUGE: list[tuple[Any, ...]] = [(2**62,), (2**63,), (2**31, 2**33), (2**20, 2**21), (2**31 - 1,) * 8, (10**4000,)]


def struct_of(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def view(shape: tuple[int, ...]) -> np.ndarray:
    """An array of any size in no memory."""
    return np.broadcast_to(np.float32(1), shape)


def a_file(directory: Path, shape: tuple[int, ...]) -> Path:
    """A safetensors file that claims `shape` and holds 4 bytes."""
    text = f'{{"w":{{"dtype":"F32","shape":[{",".join(map(str, shape))}],"data_offsets":[0,4]}}}}'.encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    return path


def config(directory: Path, **fields: Any) -> Path:
    """The tiny Llama's `config.json` with changes, and no weights."""
    content = json.loads((FIXTURES / "llama" / "gqa_tied_llama3_v5" / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps(content | fields), "utf-8")
    return directory


def attempts(directory: Path) -> Iterator[tuple[str, Callable[[Any], Any], list[Any]]]:
    """Every way for a hostile size to come in, with the sizes to try."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w")
    model = rlx.compile(flow, {"w": np.ones((4, 8), np.float32)})
    outer = rlx.compile(rlx.ModelFlow("m").input("x", ("n",)).custom(lambda e, x: x.reshape(-1, 1) * x.reshape(1, -1)))
    prefill = rlx.compile(rlx.from_pretrained(FIXTURES / "llama" / "gqa_tied_llama3_v5"), program="prefill")
    open_flow = rlx.ModelFlow("m").input("x", ("batch", 8))
    in_numpy = [shape for shape in HUGE if max(shape) < 2**63]
    yield "safetensors", lambda s: rlx.open_weights(a_file(directory, s)), HUGE
    yield "ModelFlow.input", lambda s: rlx.ModelFlow("m").input("x", s), HUGE
    yield "GraphModule.input", lambda s: rlx.GraphModule.define("g", lambda m: m.input("x", s)), HUGE
    yield "GraphModule.param", lambda s: rlx.GraphModule.define("g", lambda m: m.param("x", s)), HUGE
    yield "shape=", lambda s: rlx.compile(open_flow.linear("w", shape=s)), HUGE
    yield "ShapeDtypeStruct", lambda s: rlx.open_weights({"w": struct_of(s)}), in_numpy
    yield "a mapping of shapes", lambda s: rlx.compile(flow, {"w": struct_of(s)}), in_numpy
    sizes = [2**31, 2**40, 2**56]
    yield "lower", lambda n: model.lower(struct_of((n, 8))), sizes
    yield "a view", lambda n: model(view((n, 8))), sizes
    yield "ids", lambda n: prefill(np.broadcast_to(np.int32(0), (n, 4))), sizes
    yield "init_state batch", lambda n: prefill.init_state(n, 8), [*sizes, 2**31 - 1]
    yield "init_state context", lambda n: prefill.init_state(1, n), sizes
    yield "init_state", lambda n: prefill.init_state(n, n), sizes
    yield "an outer product over the limit", lambda n: outer.lower(struct_of((n,))), [2**21]
    yield "an outer product over the memory", lambda n: outer(view((n,))), [2**20]
    for field in ("hidden_size", "vocab_size", "intermediate_size", "head_dim", "max_position_embeddings"):
        numbers = [{field: n} for n in (2**40, 2**62, 10**99)]
        yield field, lambda fields: rlx.load(config(directory, **fields)), numbers


def main(directory: Path) -> None:
    """In a process of its own, which JAX may abort."""
    done = 0
    for what, attempt, hostile in attempts(directory):
        for size in hostile:
            print(what, str(size)[:100], file=sys.stderr, flush=True)
            try:
                attempt(size)
            except RlxError as error:
                assert len(str(error)) <= 2048 and str(error).isprintable(), what
                done += 1
            else:
                raise AssertionError(f"{what}: taken")
    print(done, "refused")


@pytest.mark.slow
def test_a_hostile_size_never_aborts_the_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from {__name__} import main; import pathlib; main(pathlib.Path({str(tmp_path)!r}))",
    ]
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), *sys.path])
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, f"after {ran.stderr[-2000:]}"
    assert int(ran.stdout.split()[0]) >= 70
