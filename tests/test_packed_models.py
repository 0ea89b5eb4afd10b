"""Models over packed weights: the same as over their numbers, whether they stay packed on the device or not."""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.settings import settings_for
from rlx_jax.errors import RlxWarning, UnsupportedError, WeightError, WeightShapeError
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import Packed
from rlx_jax.ir.param import packed_parameter
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.packed import PackedWeight, decoding_bytes, dequant_gather, dequant_matmul
from rlx_jax.trace.parameters import WeightStack
from rlx_jax.weights.module_tensors import declare_scheme
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.packed import BLOCKS, damaged, meaning, packed
from tests.small import Own

SCHEMES = ("gguf_q4_0", "gguf_q8_0")
F32 = np.dtype(np.float32)


def mlp() -> rlx.ModelFlow:
    """Two products, of a weight of each scheme."""
    flow = rlx.ModelFlow("mlp").input("x", ("batch", 64)).linear("up", bias="up.b")
    return flow.custom(lambda emit, h: emit.tanh(h)).linear("down")


UP, DOWN = packed("gguf_q8_0", (96, 64), 5), packed("gguf_q4_0", (8, 96), 6)
MIXED: dict[str, Any] = {"up": UP, "up.b": np.ones(96, np.float32), "down": DOWN}
DENSE: dict[str, np.ndarray] = {"up": meaning(UP), "up.b": MIXED["up.b"], "down": meaning(DOWN)}
X = np.random.default_rng(7).standard_normal((3, 64)).astype(np.float32)


def assert_close(found: Any, want: Any, tolerance: float = 3e-6) -> None:
    """Sums in another order: relative to the largest number, as scales of very different sizes are mixed."""
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * np.abs(np.asarray(want)).max())


@pytest.mark.parametrize("compute, layout, rows", [("f32", "in_out", 3), ("bf16", "out_in", 3), ("f32", "auto", 40)])
def test_packed_on_the_device(compute: str, layout: str, rows: int) -> None:
    """The leaves are the arrays of the schemes, as many bytes as the blocks have; results and weights are the same."""
    tables: dict[str, Any] = {"precision": {"compute": compute}, "backend": {"cpu": {"weight_layout": layout}}}
    profile = rlx.CompileProfile().replace(**tables)
    one, other = (rlx.compile(mlp(), w, profile=profile) for w in (MIXED, DENSE))
    assert one.params is not None
    assert {name: str(leaf.dtype) for name, leaf in one.params.items() if name != "up.b"} == {
        "up": "int8", "up.scales": "uint16", "down": "uint8", "down.scales": "uint16",
    }  # fmt: skip
    assert sum(leaf.nbytes for name, leaf in one.params.items() if name != "up.b") == UP.data.nbytes + DOWN.data.nbytes
    x = np.random.default_rng(8).standard_normal((rows, 64)).astype(np.float32)
    assert_close(one(x), other(x), 3e-6 if compute == "f32" else 2e-2)
    assert {key: array.dtype for key, array in one.weights().items()} == dict.fromkeys(MIXED, np.dtype(np.float32))
    for key in ("up", "down"):
        np.testing.assert_array_equal(one.weights()[key], DENSE[key])
    report = one.report()
    assert report.packed == {"up": ("gguf_q8_0", UP.data.nbytes), "down": ("gguf_q4_0", DOWN.data.nbytes)}
    assert f"packed             1 parameters as gguf_q8_0, {UP.data.nbytes:,} bytes" in str(report)
    assert report.products == ("2 by tiles (packed, decoded tile by tile)",) and "7,008 parameters" in repr(one)


@pytest.mark.parametrize("program, compute, layout", [("forward", "bf16", "in_out"), ("train", "f32", "out_in")])
def test_decoded_while_loading(program: str, compute: str, layout: str) -> None:
    """Computes what it does over the numbers: the same leaves, texts, results and gradients."""
    precision = {"compute": compute, "weights": "keep" if program == "train" else "f32"}
    tables: dict[str, Any] = {"precision": precision, "backend": {"cpu": {"weight_layout": layout}}}
    profile = rlx.CompileProfile().replace(**tables)
    one, other = (rlx.compile(mlp(), w, profile=profile, program=program) for w in (MIXED, DENSE))
    assert one.params is not None and other.params is not None and list(one.params) == list(other.params)
    for name, leaf in one.params.items():
        assert leaf.dtype == other.params[name].dtype
        np.testing.assert_array_equal(leaf, other.params[name])
    np.testing.assert_array_equal(one(X), other(X))
    for level in ("hir", "mir"):
        assert re.sub(r"dequantize\((\w+), gguf_q[48]_0\)", r"\1", one.text(level)) == other.text(level)
    assert one.report().parameter_bytes == other.report().parameter_bytes
    if program == "train":  # changes the numbers, not the bytes
        slopes = [
            jax.jit(jax.grad(lambda p, m=model: (m.apply(p, X) ** 2).sum()))(model.params) for model in (one, other)
        ]
        jax.tree.map(np.testing.assert_array_equal, *slopes)


def test_what_only_looks_sees_numbers() -> None:
    """Shapes by key and messages about shapes; `init` draws numbers of the logical shape. Summaries name the scheme."""
    assert re.sub(r" \(gguf_\w+, [\d,]+ bytes\)", "", mlp().summary(MIXED)).split() == mlp().summary(DENSE).split()
    assert f"up (gguf_q8_0, {UP.data.nbytes:,} bytes)" in mlp().summary(MIXED)
    assert mlp().build(MIXED).params == mlp().build(DENSE).params
    shapes = {"up": UP.spec, "down": DOWN.spec, "up.b": jax.ShapeDtypeStruct((96,), np.float32)}
    with pytest.raises(UnsupportedError, match="'up'.*precision.weights.*'f32'"):
        rlx.compile(mlp(), shapes).init(3)
    profile = rlx.CompileProfile().replace(precision={"weights": "f32"})
    empty = rlx.compile(mlp(), shapes, profile=profile)
    dense = rlx.compile(mlp(), {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in DENSE.items()}, profile=profile)
    assert empty.params is None and empty.param_specs() == dense.param_specs()
    for name, leaf in empty.init(3).items():
        np.testing.assert_array_equal(leaf, dense.init(3)[name])
    with pytest.raises(WeightShapeError, match=r"'up'.*\(mapping\).*\[any, 96\].*f32\[96,64\]"):
        rlx.ModelFlow("m").input("x", (2, 96)).linear("up").build(MIXED)
    with pytest.raises(WeightShapeError, match=r"'up'.*\(mapping\).*\[64, 96\].*f32\[96,64\]"):
        rlx.ModelFlow("m").input("x", (2, 96)).custom(lambda emit, x: emit.param("up", (64, 96))).build(MIXED)


def layers(count: int) -> rlx.ModelFlow:
    """`x = tanh(x Aᵀ + x Bᵀ) Cᵀ + x` for each layer: A and B are merged, and all may be stacked."""

    def layer(i: int) -> Any:
        def run(emit: Any, x: Any) -> Any:
            h = emit.tanh(emit.linear(x, f"{i}.a") + emit.linear(x, f"{i}.b"))
            return emit.linear(h, f"{i}.c") + x

        return rlx.blocks.Custom(run, "mix")

    return rlx.ModelFlow("layers").input("x", ("b", "s", 32)).repeat_layers(count, layer)


@pytest.mark.parametrize(("program", "roll", "count"), [
    ("train", "scan", 2), ("forward", "unroll", 12), ("forward", "scan", 3),
])  # fmt: skip
def test_merged_and_stacked(program: str, roll: str, count: int) -> None:
    """Weights of several schemes, and some that are not packed, side by side in one leaf where they are decoded.

    Packed, a and b are merged where their schemes agree, and layers are stacked where all of them have one scheme.
    """
    keys = [f"{i}.{name}" for i in range(3) for name in "abc"]
    numbers = {"train": "010101010", "unroll": "001110000", "scan": "000001001"}
    schemes = [SCHEMES[int(n)] for n in numbers["train" if program == "train" else roll]]
    mixed: dict[str, Any] = {k: packed(schemes[n], (32, 32), n) for n, k in enumerate(keys)}
    if program == "train":
        mixed["1.b"] = meaning(mixed["1.b"])
    dense = {k: v if isinstance(v, np.ndarray) else meaning(v) for k, v in mixed.items()}
    x = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)
    profile = rlx.CompileProfile().replace(backend={"cpu": {"merge": True}}, layers={"roll": roll})
    one, other = (rlx.compile(layers(3), w, program=program, profile=profile) for w in (mixed, dense))
    assert one.params is not None and len(one.params) == count
    assert_close(one(x), other(x))
    if roll == "scan" and program == "forward":  # c has two schemes: its layers are stacked decoded, and reported
        report = one.report()
        assert report.decoded == ("{0..2}.c",) and set(report.packed) == {"{0..2}.{a,b}"}
        assert {line.partition(" (")[0] for line in report.products} == {"1 by tiles", "1 by xla"}
    for key, array in one.weights().items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, dense[key])


def test_a_recipe() -> None:
    """Llama over a checkpoint that is packed wherever rows are whole blocks, the tied embedding too."""
    recipe: Any = rlx.recipe_for(FIXTURES / "llama" / "gqa_tied_llama3_v5")
    source = recipe.weights
    mixed: dict[str, Any] = {key: source.read(key) for key in source.keys()}
    for n, (key, value) in enumerate(mixed.items()):
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            mixed[key] = packed(SCHEMES[n % 2], value.shape, n)
            scales = mixed[key].data.reshape(-1, BLOCKS[SCHEMES[n % 2]][1])[:, :2]
            scales[:] = np.array([0.01], "<f2").view(np.uint8)
    assert sum(isinstance(v, Packed) for v in mixed.values()) > 8
    dense = {k: meaning(v) if isinstance(v, Packed) else v for k, v in mixed.items()}
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    one, other = (np.asarray(rlx.compile(recipe, w)(tokens)) for w in (mixed, dense))
    assert np.isfinite(other).all() and other.std() > 0
    assert_close(one, other)


@pytest.mark.parametrize("format, compute", [("safetensors", "bf16"), ("orbax", "f32")])
def test_saving(tmp_path: Path, format: str, compute: str) -> None:
    """Is an error that names the weights unless a dtype is asked for; then the numbers are written, with all bits."""
    profile = rlx.CompileProfile().replace(precision={"compute": compute})
    model = rlx.compile(mlp(), MIXED, profile=profile)
    with pytest.raises(WeightError, match="gguf_q8_0 and gguf_q4_0.* 'up', 'down'; dtype="):
        rlx.save(model, tmp_path / "m", format)
    assert not (tmp_path / "m").exists()
    rlx.save(model, tmp_path / "m", format, dtype="f32")  # of a model in bf16, too: nobody changed them
    saved = rlx.open_weights(tmp_path / "m")
    for key, value in DENSE.items():
        np.testing.assert_array_equal(saved.read(key), value)
    for key, array in model.weights().items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, DENSE[key])
    rlx.save(model, tmp_path / "half", format, dtype="f16")
    np.testing.assert_array_equal(rlx.open_weights(tmp_path / "half").read("up"), DENSE["up"].astype(np.float16))

    model = rlx.compile(mlp(), MIXED, profile=profile.replace(precision={"compute": compute, "weights": "f32"}))
    assert model.params is not None
    trained = model.replace({name: 2 * leaf for name, leaf in model.params.items()})
    rlx.save(trained, tmp_path / "trained", format, dtype="f32")
    for key, array in trained.weights().items():
        np.testing.assert_array_equal(rlx.open_weights(tmp_path / "trained").read(key), array)


TURNED = packed("gguf_q8_0", (64, 96), 8)


def product(packing: str | None) -> rlx.GraphModule:
    return rlx.GraphModule.define(
        "m", lambda m: m.linear(m.input("x", (3, 64)), m.param("w", (64, 96), packed=packing))
    )


@pytest.mark.parametrize("packing, value", [(SCHEMES[0], TURNED), (None, TURNED), (SCHEMES[1], meaning(TURNED))])
def test_a_declared_parameter(packing: str | None, value: Any) -> None:
    """Packed or not, the source says how it is stored; JSON keeps what was declared."""
    module = rlx.GraphModule.from_json(product(packing).to_json())
    assert module.to_json() == product(packing).to_json()
    assert_close(rlx.compile(module, {"w": value})(X), X @ meaning(TURNED))
    assert module.build().params == {"w": jax.ShapeDtypeStruct((64, 96), np.float32)}


FLOW = rlx.ModelFlow("m").input("x", (3, 64)).linear("w")


def test_a_source_of_ones_own() -> None:
    model = rlx.compile(FLOW, Own(UP.data, UP.spec))
    assert_close(model(X), rlx.compile(FLOW, {"w": DENSE["up"]})(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rlx.compile(FLOW, Own(damaged("gguf_q8_0", np.inf).data[:1].repeat(96, 0), UP.spec))


RNG = np.random.default_rng(11)
FLOATS = {f"{i}.{name}": RNG.standard_normal((128, 128)).astype(np.float32) for i in range(2) for name in "abc"}


def stack() -> rlx.ModelFlow:
    """Two layers of three products: `x = tanh(x Aᵀ + x Bᵀ) C + x`, where C is stored `[in, out]`."""

    def layer(i: int) -> Any:
        def run(emit: Any, x: Any) -> Any:
            h = emit.tanh(emit.linear(x, f"{i}.a") + emit.linear(x, f"{i}.b"))
            return emit.linear(h, f"{i}.c", transpose=False) + x

        return rlx.blocks.Custom(run, "mix")

    return rlx.ModelFlow("stack").input("x", ("b", "s", 128)).repeat_layers(2, layer)


def rounded(values: np.ndarray, scheme: str) -> np.ndarray:
    """The values as the scheme has them, by float64 and loops over groups."""
    bits, size = (int(number) for number in scheme.removeprefix("int").split("/"))
    found = np.zeros(values.shape)
    for row, one in enumerate(values.astype(np.float64)):
        for at in range(0, len(one), size):
            group, most = one[at : at + size], 2 ** (bits - 1) - 1
            scale = np.float64(np.float16(np.float32(np.abs(group).max()) / np.float32(most)))
            found[row, at : at + size] = np.clip(np.rint(group / scale), -most, most) * scale
    return found


@pytest.mark.parametrize(("setting", "scheme", "error"), [
    ("int8", "int8/32", 0.006), ("int4", "int4/32", 0.11), ("int8/128", "int8/128", 0.008),
    ("int4/128", "int4/128", 0.13),
])  # fmt: skip
def test_quantized_on_load(setting: str, scheme: str, error: float) -> None:
    """The profile chooses integers for a checkpoint of floats: the formula, fewer bytes, a stated error."""
    x = RNG.standard_normal((2, 3, 128)).astype(np.float32)
    profile = rlx.CompileProfile().replace(precision={"weights": setting})
    model = rlx.compile(stack(), FLOATS, profile=profile)
    weights = {k: rounded(v.T, scheme).T if k.endswith("c") else rounded(v, scheme) for k, v in FLOATS.items()}
    for key, array in model.weights().items():
        np.testing.assert_allclose(array, weights[key], rtol=1e-6)
    assert_close(model(x), rlx.compile(stack(), {k: v.astype(np.float32) for k, v in weights.items()})(x))
    bits = int(scheme[3]) + 16 / int(scheme.partition("/")[2])
    assert {name for name, _ in model.report().packed.values()} == {scheme}
    assert model.report().parameter_bytes == 6 * 128 * 128 * bits / 8
    errors = model.quantization_errors()
    assert len(errors) == 6 and all(0.3 * error < found < error for found in errors.values())


@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_values_below_the_scales(setting: str) -> None:
    """A group of which float16 has no scale keeps its values as far as the least scale has them."""
    profile, flow = rlx.CompileProfile().replace(precision={"weights": setting}), rlx.ModelFlow("m")
    flow = flow.input("x", ("b", 64)).linear("w")
    values = np.concatenate([np.full((4, 32), 1e-7), np.ones((4, 32))], axis=1).astype(np.float32)
    found = np.asarray(rlx.compile(flow, {"w": values}, profile=profile).weights()["w"])
    np.testing.assert_allclose(found, values, rtol=0.2)
    with pytest.raises(WeightError, match="int./32.*6e-8"):
        rlx.compile(flow, {"w": values * 1e-8}, profile=profile)


def test_schemes_by_path(tmp_path: Path) -> None:
    """A table of globs; what none of them selects stays; TOML has it; a save writes the checkpoint's floats."""
    flow = rlx.ModelFlow("m").input("x", ("b", 64)).linear("up").custom(lambda emit, h: emit.tanh(h)).linear("down")
    weights = {"up": FLOATS["0.a"][:96, :64], "down": FLOATS["0.b"][:8, :96]}
    profile = rlx.CompileProfile().replace(precision={"weights": {"up": "int8", "d*": "keep"}})
    assert rlx.CompileProfile.from_toml_str(profile.to_toml()) == profile
    model = rlx.compile(flow, weights, profile=profile)
    assert {name: scheme for name, (scheme, _) in model.report().packed.items()} == {"up": "int8/32"}
    np.testing.assert_allclose(model.weights()["up"], rounded(weights["up"], "int8/32"), rtol=1e-6)
    np.testing.assert_array_equal(model.weights()["down"], weights["down"])
    rlx.save(model, tmp_path / "m", "safetensors")
    np.testing.assert_array_equal(rlx.open_weights(tmp_path / "m").read("up"), weights["up"])


def test_a_scheme_without_effect() -> None:
    profile = rlx.CompileProfile().replace(precision={"weights": "int8"})
    with pytest.warns(RlxWarning, match="precision.weights = 'int8' has no effect"):
        rlx.compile(rlx.ModelFlow("m").input("x", ("b", 30)).linear("w"), {"w": FLOATS["0.a"][:, :30]}, profile=profile)


def test_routers_stay() -> None:
    """Whatever follows their product, such as a bias of another op."""

    def run(emit: Any, x: Any) -> Any:
        weights, ids = emit.route(emit.linear(x, "router") + emit.param("bias", (128,)), top_k=2)
        return emit.linear(x, "up") * emit.sum(weights, axis=-1, keepdims=True)

    weights = {"router": FLOATS["0.a"], "bias": np.ones(128, np.float32), "up": FLOATS["0.b"]}
    profile = rlx.CompileProfile().replace(precision={"weights": "int8"})
    model = rlx.compile(rlx.ModelFlow("moe").input("x", ("b", 128)).custom(run), weights, profile=profile)
    assert set(model.report().packed) == {"up"}


@pytest.mark.parametrize(("keys", "run"), [
    (("w", "rows"), lambda emit, x: emit.linear(x, "w") + emit.linear(emit.param("rows", (2, 64)), "w")[:1]),
    (("w", "b"), lambda emit, x: emit.linear(x, "w", bias="b")),
    (("rows",), lambda emit, x: emit.param("rows", (2, 64))),
], ids=["rows", "bias", "output"])  # fmt: skip
def test_packed_operands_other_than_a_matrix(keys: tuple[str, ...], run: Any) -> None:
    """Rows that are multiplied, a bias and a result are decoded."""
    rows = {"b": packed("gguf_q8_0", (96,), 3), "rows": packed("gguf_q8_0", (2, 64), 4)}
    mixed = {key: {"w": UP, **rows}[key] for key in keys}
    flow = rlx.ModelFlow("m").input("x", ("b", 64)).custom(run)
    assert_close(rlx.compile(flow, mixed)(X), rlx.compile(flow, {k: meaning(v) for k, v in mixed.items()})(X))


def test_bytes_to_decode_a_vector() -> None:
    """Its temporaries are those of one row."""
    model = rlx.compile(rlx.ModelFlow("m").input("x", ("b", 64)).rms_norm("w"), {"w": packed("gguf_q8_0", (64,), 1)})
    (program,) = set(map(packed_parameter, model.programs.layout.params.values()))
    assert program is not None and decoding_bytes(program, "cpu") == 64 * 8 + 2 * 4


@pytest.mark.parametrize("experts", ["gathered", "looped", "blocked", "ragged", "dense"])
def test_packed_experts(experts: str) -> None:
    """Each implementation, over stacked experts of their own keys."""
    keys = {name: f"{{}}.{name}" for name in ("gate", "up", "down")}
    shapes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    mixed: dict[str, Any] = {
        keys[name].format(e): packed("gguf_q8_0", shape, 7 * e + len(name))
        for name, shape in shapes.items() for e in range(4)
    }  # fmt: skip
    for value in mixed.values():
        value.data.reshape(-1, 34)[:, :2] = np.array([0.01], "<f2").view(np.uint8)
    mixed["router"] = RNG.standard_normal((4, 64)).astype(np.float32)

    def run(emit: Any, x: Any) -> Any:
        weights, ids = emit.route(emit.linear(x, "router"), top_k=2)
        return emit.experts(x, weights, ids, **{name: WeightStack(key, 4) for name, key in keys.items()})

    flow = rlx.ModelFlow("moe").input("x", ("b", 64)).custom(run)
    profile = rlx.CompileProfile().replace(backend={"cpu": {"experts": experts}})
    dense = {k: meaning(v) if isinstance(v, Packed) else v for k, v in mixed.items()}
    x = RNG.standard_normal((5, 64)).astype(np.float32)
    one, other = (rlx.compile(flow, w, profile=profile) for w in (mixed, dense))
    assert_close(one(x), other(x))
    assert {scheme for scheme, _ in one.report().packed.values()} == {"gguf_q8_0"}


def test_packed_weights_compute_in_bf16_on_a_gpu() -> None:
    """Where most bytes are packed ones: as floats of 16 bits would."""
    profile = rlx.CompileProfile().replace(fusion={"target": "h200"})
    for weights, dtype in ((MIXED, "bf16"), (DENSE, "f32")):
        settings = settings_for(profile, rlx.open_weights(weights), weights, merge=False)
        assert short_name(settings.compute) == dtype


def blocks_of_rows(count: int) -> PackedWeight:
    """A matrix `[count, 256]` with a scale for each block of 128 × 128."""
    scheme = declare_scheme("fp8_e4m3", 8, 128, "f32", table="e4m3", rows=128)
    scales = RNG.uniform(0.5, 2, (-(-count // 128), 2)).astype(np.float32)
    arrays = {"codes": RNG.integers(0, 120, (count, 256), np.uint8), "scales": scales.view(np.uint32)}
    return PackedWeight(arrays, scheme.name, F32, F32)


@pytest.mark.parametrize("count", [389, 256, 100])
def test_look_ups_where_rows_share_scales(count: int) -> None:
    """Each id finds the scale of its block of 128 rows, also where the last block has fewer."""
    table, ids = blocks_of_rows(count), np.arange(count, dtype=np.int32)
    rows, whole = jax.jit(lambda table: (dequant_gather(Gather(), table, ids), table.decode()))(table)
    np.testing.assert_array_equal(rows, whole)


@pytest.mark.parametrize(("target", "count"), [("cuda", 389), ("cuda", 256), ("cuda", 100), ("cpu", 389)])
def test_products_by_tiles(target: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 rows, the last of them smaller: the product and its gradient are those of the decoded matrix."""
    monkeypatch.setattr("rlx_jax.lowering.lir.packed.DEFAULT_TILE_BYTES", 128 * 256 * 4)
    w, x = blocks_of_rows(count), RNG.standard_normal((3, 256)).astype(np.float32)
    multiply = partial(dequant_matmul, target, MatMul(contract=1))
    y, gradient = jax.jit(jax.value_and_grad(lambda x: (multiply(x, w) ** 2).sum()))(x)
    values = np.asarray(w.decode(), np.float64)
    assert_close(y, ((x @ values.T) ** 2).sum())
    assert_close(gradient, 2 * (x @ values.T) @ values)
    assert str(jax.make_jaxpr(multiply)(x, w)).count("scan") == (target == "cpu")


def test_boxes_of_arrays_with_an_incomplete_group() -> None:
    """A part of the inputs needs the scales of its groups alone."""
    scheme = declare_scheme("fp8_e4m3", 8, 128, "f32", table="e4m3", rows=128)
    for columns, groups in (((0, 128), (0, 1)), ((128, 256), (1, 2)), ((128, 300), (1, 3)), ((256, 300), (2, 3))):
        assert scheme.array_box("scales", (200, 300), ((128, 200), columns)) == ((1, 2), groups)
        assert scheme.array_box("codes", (200, 300), ((128, 200), columns)) == ((128, 200), columns)


def test_outputs_with_the_names_of_a_head() -> None:
    """They are decoded too."""
    rows = packed("gguf_q8_0", (2, 64), 4)

    def run(emit: Any, x: Any) -> Any:
        emit.output("weight", emit.param("rows", (2, 64)))
        return x

    flow = rlx.ModelFlow("m").input("x", ("b", 64)).custom(run).outputs(["hidden", "weight"])
    np.testing.assert_array_equal(rlx.compile(flow, {"rows": rows})(X)["weight"], meaning(rows))
