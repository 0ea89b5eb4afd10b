"""Programs over checkpoint keys: filled, read backwards, cast, named and drawn by the methods of each step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import WeightError
from rlx_jax.ir.graph import Graph, Node, Param
from rlx_jax.ir.param import (
    Cast,
    Joined,
    Key,
    Program,
    Sliced,
    Stack,
    Strided,
    Transposed,
    cast,
    is_lossy,
    packing_of,
    pad_axis,
    printed_name,
    slice_axis,
    stride_axis,
)
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.types import as_dtype, tensor_type
from rlx_jax.ir.weight_reads import with_source
from rlx_jax.lowering.lir.plan import layout_of
from rlx_jax.weights.execute import fill
from rlx_jax.weights.inverse import join_pieces, pieces
from rlx_jax.weights.mapping import MappingSource
from tests.opening import load_leaf

RNG = np.random.default_rng(0)
STORED = {name: RNG.normal(size=(2, 3, 4)).astype(np.float32) for name in ("a.w", "b.w", "c.w")}
STORED |= {name: RNG.normal(size=(6, 4)).astype(np.float32) for name in ("m.0", "m.1")}


def key(name: str) -> Key:
    return Key(name, tensor_type(STORED[name].shape, "f32", name))


A, B, C = key("a.w"), key("b.w"), key("c.w")
BF16 = as_dtype("bf16")
# A program, the same in NumPy, and its name.
PROGRAMS: list[tuple[Program, Any, str]] = [
    (A, lambda s: s["a.w"], "a.w"), (Transposed(key("m.0")), lambda s: s["m.0"].T, "m.0.T"),
    (Sliced(A, 1, 1, 3), lambda s: s["a.w"][:, 1:3], "a.w[:, 1:3]"),
    (Transposed(Sliced(key("m.0"), 0, 2, 5)), lambda s: s["m.0"][2:5].T, "m.0[2:5].T"),
    (Strided(A, 2, 1, 2), lambda s: s["a.w"][:, :, 1::2], "a.w[:, :, 1::2]"),
    (Stack((Strided(A, 1, 0, 3), Strided(B, 1, 2, 3))), lambda s: np.stack([s["a.w"][:, ::3], s["b.w"][:, 2::3]]),
        "{a.w[:, 0::3],b.w[:, 2::3]}"),
    (Joined((A, B), 1), lambda s: np.concatenate([s["a.w"], s["b.w"]], 1), "{a,b}.w"),
    (pad_axis(A, 1, 5), lambda s: np.pad(s["a.w"], ((0, 0), (0, 2), (0, 0))), "a.w"),
    (Transposed(pad_axis(Joined((key("m.0"), key("m.1")), 0), 0, 16)),
        lambda s: np.concatenate([s["m.0"], s["m.1"], np.zeros((4, 4), np.float32)]).T, "m.{0..1}.T"),
    (Joined(tuple(slice_axis(key(name), 0, *edges) for edges in ((0, 3), (3, 6)) for name in ("m.0", "m.1")), 0),
        lambda s: np.concatenate([s[name][half] for half in np.s_[:3, 3:] for name in ("m.0", "m.1")]), "m.{0..1}"),
    (Joined(tuple(slice_axis(Transposed(key(name)), 1, i, i + 2) for i in (4, 0, 2) for name in ("m.1", "m.0")), 1),
        lambda s: np.concatenate([s[name][i : i + 2].T for i in (4, 0, 2) for name in ("m.1", "m.0")], 1), "m.{1,0}.T"),
    (Stack((A, B, C)), lambda s: np.stack([s["a.w"], s["b.w"], s["c.w"]]), "{a,b,c}.w"),
    (Stack((key("m.0"), key("m.1"))), lambda s: np.stack([s["m.0"], s["m.1"]]), "m.{0..1}"),
    (Stack((Joined((A, B), 0), Joined((B, C), 0))),
        lambda s: np.stack([np.concatenate([s[a], s[b]]) for a, b in (("a.w", "b.w"), ("b.w", "c.w"))]),
        "{{a,b}.w,{b,c}.w}"),
]  # fmt: skip
IDS = [name for _, _, name in PROGRAMS]


@pytest.mark.parametrize(("program", "meaning", "name"), PROGRAMS, ids=IDS)
def test_a_program_is_what_numpy_says(program: Program, meaning: Any, name: str) -> None:
    """Filled into a leaf and into a part of something larger, joined as `init` does, and read backwards."""
    want, source = meaning(STORED), MappingSource(STORED)
    assert (program.type.shape, program.type.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(load_leaf(program, source), want)
    larger = np.zeros((*want.shape[:-1], want.shape[-1] + 2), np.float32)
    fill(larger[..., 1:-1], program, source)
    np.testing.assert_array_equal(larger[..., 1:-1], want)
    assert not larger[..., [0, -1]].any()
    assert printed_name(program) == name and with_source(program, source) == program and not is_lossy(program)
    for library in (np, jnp):
        for piece in pieces(program, library.asarray(want)):
            np.testing.assert_array_equal(piece.values, STORED[piece.key.key][piece.selection])

    def assembled(program: Any) -> jax.Array:
        if isinstance(program, Key):
            return program.join(jnp.asarray(STORED[program.key]))
        return program.join(*map(assembled, program.parts))

    np.testing.assert_array_equal(assembled(program), want)


@pytest.mark.parametrize(("program", "meaning", "name"), PROGRAMS, ids=IDS)
def test_a_program_in_another_dtype(program: Program, meaning: Any, name: str) -> None:
    """Is the cast of its value and loses bits; back again it is as it was, where the first cast was exact."""
    narrow = cast(program, BF16)
    assert is_lossy(narrow) and narrow.type.dtype == BF16
    np.testing.assert_array_equal(load_leaf(narrow, MappingSource(STORED)), meaning(STORED).astype(BF16))
    wide = cast(program, np.dtype(np.float64))
    assert not is_lossy(wide) and cast(wide, np.dtype(np.float32)) == program
    halves = {name: value.astype(BF16) for name, value in STORED.items()}
    read = with_source(program, MappingSource(halves))
    np.testing.assert_array_equal(load_leaf(read, MappingSource(halves)), meaning(halves).astype(np.float32))


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_interleaved_parts(library: Any) -> None:
    """All of them are what is stored, in whatever order; without one it is not known."""
    parts = [Transposed(stride_axis(cast(key("m.0"), BF16), 0, i, 3)) for i in (2, 0, 1)]
    held = [p for part in parts for p in pieces(part, library.asarray(load_leaf(part, MappingSource(STORED))))]
    np.testing.assert_array_equal(join_pieces(held), STORED["m.0"].astype(BF16))
    assert isinstance(join_pieces(held), np.ndarray) == (library is np)
    for some in (held[:2], [held[0], *pieces(Sliced(key("m.0"), 0, 0, 5), STORED["m.0"][:5])]):
        with pytest.raises(WeightError, match=r"'m.0'.*f32\[6,4\].*\[2::3\]"):
            join_pieces(some)


SLICED: list[tuple[Program, tuple[int, int, int], str]] = [
    (A, (1, 0, 3), "a.w"), (A, (1, 0, 2), "a.w[:, 0:2]"), (Sliced(A, 1, 1, 3), (1, 1, 2), "a.w[:, 2:3]"),
    (Sliced(A, 1, 1, 3), (0, 1, 2), "a.w[1:2][:, 1:3]"), (Cast(A, BF16), (2, 0, 2), "cast(a.w[:, :, 0:2], bf16)"),
    (Transposed(key("m.0")), (1, 2, 4), "transpose(m.0[2:4])"),
    (Stack((A, B, C)), (0, 1, 3), "stack(b.w, c.w)"), (Stack((A, B)), (1, 1, 2), "stack(a.w[1:2], b.w[1:2])"),
    (Joined((A, B), 1), (1, 2, 5), "concat(a.w[:, 2:3], b.w[:, 0:2]; axis=1)"),
    (Joined((A, B), 1), (1, 3, 5), "b.w[:, 0:2]"), (pad_axis(A, 1, 5), (1, 1, 3), "a.w[:, 1:3]"),
    (pad_axis(A, 1, 5), (1, 1, 4), "concat(a.w[:, 1:3], zeros(f32[2,1,4]); axis=1)"),
    (pad_axis(A, 1, 5), (0, 1, 2), "concat(a.w[1:2], zeros(f32[1,2,4]); axis=1)"),
    (pad_axis(A, 1, 5), (1, 3, 4), "zeros(f32[2,1,4])"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "part", "text"), SLICED, ids=[text for *_, text in SLICED])
def test_a_part_of_a_program(program: Program, part: tuple[int, int, int], text: str) -> None:
    """Is the same steps over parts of what it is made of, and its numbers are those of the whole."""
    axis, start, stop = part
    found, source = slice_axis(program, axis, start, stop), MappingSource(STORED)
    assert str(found) == text
    index = (slice(None),) * axis + (slice(start, stop),)
    np.testing.assert_array_equal(load_leaf(found, source), np.asarray(load_leaf(program, source))[index])


def test_leaves_of_one_name_stay_two() -> None:
    """A merge in the order of devices has the name of the plain one, and both may be leaves of a model."""
    a, b = key("m.0"), key("m.1")
    ordered = [Joined(tuple(slice_axis(k, 0, i, i + n) for i in range(0, 6, n) for k in (a, b)), 0) for n in (3, 2)]
    leaves = [Joined((a, b), 0), *ordered, cast(ordered[0], BF16)]
    nodes = tuple(Node(Param((p,), type=p.type), (), (p.type,), Origin(("g",))) for p in leaves)
    graph = Graph("g", nodes, ())
    found = list(layout_of([graph], scan=False, packed=False).params)
    assert found == [f"m.{{0..1}}{end}" for end in ("", " (f32)", " (2)", " (bf16)")]


def fused(parts: Sequence[tuple[int, int]], dtype: str = "f32") -> rlx.GraphModule:
    """A module that adds products with parts of one stored tensor `qkv` `[6, 4]`, rows `start` to `stop`."""
    stored = Key("qkv", tensor_type((6, 4), dtype, "qkv"))

    def build(m: rlx.GraphModule) -> Any:
        x = m.input("x", (2, 4))
        total: Any = None
        for start, stop in parts:
            program = Transposed(cast(Sliced(stored, 0, start, stop), np.dtype(np.float32)))
            product = m.linear(x, m.wrap(m.builder.leaf(Param((program,), type=program.type))))
            total = product if total is None else m.add(total, product)
        return total

    return rlx.GraphModule.define("fused", build)


@pytest.mark.parametrize(("dtype", "format"), [("f32", "orbax"), ("bf16", "safetensors")])
def test_parts_of_one_stored_tensor(tmp_path: Path, dtype: str, format: str) -> None:
    """Are read alone, trained apart, and one tensor again in `weights()` and in a checkpoint."""
    qkv = RNG.normal(size=(6, 4)).astype(as_dtype(dtype))
    module = fused([(0, 2), (2, 4), (4, 6)], dtype)
    module = rlx.GraphModule.from_json(module.to_json())
    model, x, rows = rlx.compile(module, {"qkv": qkv}), np.ones((2, 4), np.float32), qkv.astype(np.float32)
    np.testing.assert_allclose(model(x), x @ (rows[:2] + rows[2:4] + rows[4:]).T, rtol=1e-5)
    assert model.params is not None and set(model.params) == {"qkv[0:2].T", "qkv[2:4].T", "qkv[4:6].T"}
    np.testing.assert_array_equal(model.weights()["qkv"], qkv)
    trained = model.replace({name: 2 * leaf for name, leaf in model.params.items()})
    rlx.save(trained, tmp_path / "m", format)
    np.testing.assert_array_equal(rlx.open_weights(tmp_path / "m").read("qkv"), 2 * qkv)


def test_padding_in_a_model(tmp_path: Path) -> None:
    """Is drawn as zeros, kept in JSON, and in no checkpoint; JSON of earlier versions has a step for it."""

    def build(m: rlx.GraphModule) -> Any:
        program = pad_axis(key("m.0"), 0, 8)
        return m.linear(
            m.input("x", (2, 4)), m.wrap(m.builder.leaf(Param((program,), type=program.type))), transpose=True
        )

    text = rlx.GraphModule.define("padded", build).to_json()
    old = json.loads(text)
    param = old["graph"]["nodes"][1]["op"]["Param"]
    param["programs"] = [{"Padded": {"of": param["programs"][0]["Joined"]["parts"][0], "axis": 0, "size": 8}}]
    module = rlx.GraphModule.from_json(json.dumps(old))
    assert module.to_json() == text
    model, x = rlx.compile(module, {"m.0": STORED["m.0"]}), np.ones((2, 4), np.float32)
    np.testing.assert_allclose(model(x), np.pad(x @ STORED["m.0"].T, ((0, 0), (0, 2))), rtol=1e-5)
    drawn = model.init(0)
    assert drawn["m.0"].shape == (8, 4) and not drawn["m.0"][6:].any() and drawn["m.0"][:6].all()
    trained = model.replace({"m.0": drawn["m.0"] + 1})
    rlx.save(trained, tmp_path / "m", "safetensors")
    np.testing.assert_array_equal(rlx.open_weights(tmp_path / "m").read("m.0"), drawn["m.0"][:6] + 1)


def test_zeros_alone_are_not_packed() -> None:
    padding = slice_axis(pad_axis(A, 0, 4), 0, 2, 4)
    assert [packing_of(p) for p in (padding, Joined((padding, padding), 0), Stack((padding,)))] == [None] * 3


def test_a_cast_between_steps_is_kept() -> None:
    """It rounds before the next step, in another order than after it for none but itself."""
    program = Transposed(Cast(key("m.0"), BF16))
    np.testing.assert_array_equal(load_leaf(program, MappingSource(STORED)), STORED["m.0"].astype(BF16).T)
    assert is_lossy(program) and str(program) == "transpose(cast(m.0, bf16))"
