"""Parameters over devices: where they are kept, what training makes of them, what files have; flows of one's own; and
what is refused."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rlx_jax as rlx
from rlx_jax import errors, losses
from tests.divided import SIZES, V, mesh, recipe, weights
from tests.oracles.comparing import assert_close
from tests.oracles.packed import meaning, packed
from tests.small import profile

P = PartitionSpec
RNG = np.random.default_rng(2)
IDS = RNG.integers(0, V, (4, 11)).astype(np.int32)
LENGTHS = np.array([11, 5, 1, 8])


ONE = {"num_hidden_layers": 1}


def llama(family: str = "llama", **changes: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The recipe of a Llama of one layer, and its weights."""
    return recipe(family, **ONE | changes), weights(family, *(ONE | changes).items())


@functools.cache
def plain() -> np.ndarray:
    """Its logits on one device."""
    return np.asarray(rlx.compile(*llama())(IDS))


def check_resting(model: rlx.CompiledModel, params: Any) -> None:
    """Each leaf is where its division says."""
    model_sharding = model.programs.model_sharding
    assert model_sharding is not None and set(params) == set(model.programs.layout.params)
    for name, program in model.programs.layout.params.items():
        assert params[name].sharding.is_equivalent_to(model_sharding.storage_sharding(program), params[name].ndim), name


TRAINED = [("llama tied", "data fsdp tensor", 8), ("mixtral", "fsdp expert", 4), ("mamba2", "fsdp tensor", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kinds", "devices"), TRAINED)
def test_gradients(family: str, kinds: str, devices: int) -> None:
    """Of the loss in pieces and of logits; a gradient is divided as its parameter."""
    chosen = profile(layers={"roll": "scan"})
    one, ours = (
        rlx.compile(recipe(family), weights(family), program="train", profile=chosen, mesh=m)
        for m in (None, mesh(kinds, devices))
    )

    def loss(model: rlx.CompiledModel, p: Any) -> Any:
        squares = jnp.square(model.apply(p, IDS)).mean()
        return losses.cross_entropy(model, p, IDS, lengths=LENGTHS, chunk=5) + squares

    (a, of_a), (b, of_b) = (jax.jit(jax.value_and_grad(lambda p, m=m: loss(m, p)))(m.params) for m in (one, ours))
    np.testing.assert_allclose(b, a, rtol=3e-6)
    check_resting(ours, of_b)
    got, want = ours.weights(of_b), one.weights(of_a)
    for key, gradient in want.items():
        assert_close(got[key], np.asarray(gradient))


def test_resting() -> None:
    """After compile, init, and replace by arrays of the host."""
    ours = rlx.compile(*llama(), mesh=mesh("data fsdp tensor", 8))
    check_resting(ours, ours.params)
    assert ours.params is not None
    assert {k: v.sharding.spec for k, v in ours.params.items() if ".0." in k or "lm_head" in k} == {
        "lm_head.weight": P("tensor", "fsdp"),
        "model.layers.0.input_layernorm.weight": P(),
        "model.layers.0.mlp.down_proj.weight": P("fsdp", "tensor"),
        "model.layers.0.mlp.gate_proj.weight": P("tensor", "fsdp"),
        "model.layers.0.mlp.up_proj.weight": P("tensor", "fsdp"),
        "model.layers.0.post_attention_layernorm.weight": P(),
        "model.layers.0.self_attn.k_proj.weight": P("tensor", "fsdp"),
        "model.layers.0.self_attn.o_proj.weight": P("fsdp", "tensor"),
        "model.layers.0.self_attn.q_proj.weight": P("tensor", "fsdp"),
        "model.layers.0.self_attn.v_proj.weight": P("tensor", "fsdp"),
    }
    drawn = ours.init(3)
    check_resting(ours, drawn)
    host = {name: np.asarray(a) for name, a in drawn.items()}
    check_resting(ours, ours.replace(host).params)
    one = rlx.compile(*llama())
    want = one.replace({n: jnp.asarray(a[:V] if n == "lm_head.weight" else a) for n, a in host.items()})(IDS)
    assert_close(ours.replace(host)(IDS), np.asarray(want))
    assert ours.report().leaf_bytes == sum(a.addressable_shards[0].data.nbytes for a in ours.params.values())


@pytest.mark.slow
def test_padded_words_are_never_seen(tmp_path: Path) -> None:
    """61 words over 4 devices: logits, tokens, losses, weights and files have no more, whatever stands behind."""
    (made, held), name = llama("llama tied"), "model.embed_tokens.weight"
    one, ours = rlx.CausalLM(made, held), rlx.CausalLM(made, held, mesh=mesh("tensor", 4))
    assert ours.model.params is not None and one.model.params is not None
    assert ours.model.params[name].shape == (64, SIZES["hidden_size"])
    high = np.asarray(ours.model.params[name]).copy()
    high[V:] = 100.0
    model = ours.model.replace({**ours.model.params, name: high})
    noisy = rlx.CausalLM(model)
    assert_close(noisy.logits(IDS), np.asarray(one.logits(IDS)))
    sampler = rlx.Sampler(temperature=30.0)
    assert max(map(max, noisy.generate([[1, 2], [3], [4, 5]], max_new_tokens=8, sampler=sampler, seed=0))) < V
    losses_of = [float(losses.cross_entropy(m, m.require_params("a loss"), IDS)) for m in (model, one.model)]
    np.testing.assert_allclose(losses_of[0], losses_of[1], rtol=3e-6)
    for form in ("safetensors", "orbax"):
        rlx.save(model, tmp_path / form, format=form)
        again = rlx.compile(made, tmp_path / form, mesh=mesh("fsdp tensor", 4) if form == "orbax" else None)
        for key, want in held.items():
            np.testing.assert_array_equal(model.weights()[key], want)
            np.testing.assert_array_equal(again.weights()[key], want)


def test_fewer_key_heads_than_devices() -> None:
    """Keys and values are whole on each device; what does not divide is refused by name."""
    made, held = llama(num_key_value_heads=2)
    one, ours = rlx.compile(made, held), rlx.compile(made, held, mesh=mesh("tensor", 8))
    assert_close(ours(IDS), np.asarray(one(IDS)))
    assert ours.params is not None and ours.params["model.layers.0.self_attn.k_proj.weight"].is_fully_replicated
    assert ours.params["model.layers.0.self_attn.q_proj.weight"].sharding.spec == P("tensor")
    report = ours.report()
    assert "model.layers.0.self_attn.v_proj.weight" in report.replicated
    merged = rlx.CausalLM(made, held, mesh=mesh("tensor", 8)).model
    assert [n for n in merged.param_specs() if "k_proj" in n] == ["model.layers.0.self_attn.k_proj.weight"]
    merged.lower(IDS)
    assert "collective-permute" not in merged.report().collectives


def test_packed_weights() -> None:
    """Blocks of 32 numbers that lie on two devices, and those that do not."""
    up, down = packed("gguf_q8_0", (96, 64), 5), packed("gguf_q4_0", (8, 96), 6)
    flow = (
        rlx.ModelFlow("mlp").input("x", ("batch", 64))
        .custom(lambda emit, x: emit.tanh(emit.linear(x, "up", roles=("ffn", "hidden"))))
        .custom(lambda emit, x: emit.linear(x, "down", roles=("hidden", "ffn")))
    )  # fmt: skip
    x = RNG.normal(size=(4, 64)).astype(np.float32)
    want = np.asarray(rlx.compile(flow, {"up": meaning(up), "down": meaning(down)})(x))
    for kinds, devices in (("tensor", 2), ("fsdp", 8)):
        ours = rlx.compile(flow, {"up": up, "down": down}, mesh=mesh(kinds, devices))
        assert_close(ours(x), want)
        for key, packed_one in (("up", up), ("down", down)):
            np.testing.assert_array_equal(ours.weights()[key], meaning(packed_one))
        # No group of 32 is cut: two devices do not divide the three groups of `down`, and eight not both of `up`.
        replicated = {name for name, a in ours.params.items() if a.sharding.is_fully_replicated}  # type: ignore[union-attr]
        whole = "down" if devices == 2 else "up"
        assert replicated == {whole, f"{whole}.scales"} == set(ours.report(batch=8).replicated)


OWN = {
    "w": RNG.normal(size=(24, 16)).astype(np.float32),
    "b": RNG.normal(size=(24,)).astype(np.float32),
    "v": RNG.normal(size=(16, 24)).astype(np.float32),
}
X = RNG.normal(size=(6, 16)).astype(np.float32)


def own(*roles: str | None) -> rlx.ModelFlow:
    """Two products in functions: one says its roles, with a value that does; the other is silent."""

    def into(emit: rlx.Emit, x: Any) -> Any:
        w = emit.param("w", roles=roles or None)
        x = emit.linear(x, w, emit.param("b"), transpose=True)
        return emit.shard(x, "batch", roles[0]) if roles else x

    flow = rlx.ModelFlow("own").input("x", ("batch", 16))
    return flow.custom(into).custom(lambda emit, x: emit.linear(emit.tanh(x), "v"))


def test_roles_divide_a_flow_of_ones_own() -> None:
    want = np.asarray(rlx.compile(own(), OWN)(X))
    for kinds, devices, spec in (("fsdp", 8, P(None, "fsdp")), ("data fsdp tensor", 8, P("tensor", "fsdp"))):
        ours = rlx.compile(own("ffn", "hidden"), OWN, mesh=mesh(kinds, devices))
        assert ours.params is not None and ours.params["w"].sharding.spec == spec
        for rows in (6, 3):
            assert_close(ours(X[:rows]), want[:rows])
        assert ours.report().replicated == ("v",) and ours.params["v"].is_fully_replicated
    silent = rlx.compile(own(), OWN, mesh=mesh("tensor", 4))
    assert_close(silent(X), want)
    assert silent.report().replicated == ("w", "v") and silent.report().collectives == {}


DOWN = "model.layers.0.mlp.down_proj.weight"
BASE = {
    "lm_head.weight": P("tensor"), "model.embed_tokens.weight": P(), "model.norm.weight": P(),
    "model.layers.0.self_attn.q_proj.weight": P("tensor"), "model.layers.0.self_attn.k_proj.weight": P("tensor"),
    DOWN: P(None, "tensor"),
}  # fmt: skip
FIELDS = {
    "heads": ([], {"model.layers.0.self_attn.q_proj.weight": P(), "model.layers.0.self_attn.k_proj.weight": P()}),
    "ffn": ([], {DOWN: P()}),
    "vocab": ([], {"lm_head.weight": P()}),
    "embedding": (["tensor"], {"model.embed_tokens.weight": P("tensor")}),
    "channel": (["tensor"], {"model.norm.weight": P("tensor")}),
    "hidden": (["tensor"], {"model.embed_tokens.weight": P(None, "tensor"), DOWN: P("tensor")}),
    "kv_heads": (["tensor", "none"], {}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_changes_a_division(field: str) -> None:
    axes, changed = FIELDS[field]
    tables: dict[str, Any] = {field: axes} | ({"kv_heads": []} if field == "heads" else {})
    ours = rlx.compile(*llama(), profile=profile(sharding=tables), mesh=mesh("tensor", 2))
    assert ours.params is not None
    assert {name: ours.params[name].sharding.spec for name in BASE} == BASE | changed
    if field in ("heads", "embedding", "hidden"):
        assert_close(ours(IDS), plain())


@pytest.mark.parametrize("axes", [["tensor"], []])
def test_what_heads_with_a_state_share(axes: list[str], tmp_path: Path) -> None:
    """Parts of what is stored as one are divided each by its role, and saved as one again."""
    tables: dict[str, Any] = {"groups": axes}
    ours = rlx.compile(recipe("mamba2"), weights("mamba2"), profile=profile(sharding=tables), mesh=mesh("tensor", 2))
    cut = P("tensor") if axes else P()
    edges = {"0:64": P("tensor"), "64:128": P("tensor"), "128:140": cut, "140:152": cut, "152:160": P("tensor")}
    key = "backbone.layers.1.mixer.in_proj.weight"
    assert ours.params is not None
    found = {name: a.sharding.spec for name, a in ours.params.items() if name.startswith(key)}
    assert found == {f"{key}[{part}]": spec for part, spec in edges.items()}
    rlx.save(ours, tmp_path / "saved")
    again = rlx.open_weights(tmp_path / "saved")
    for name in (key, "backbone.layers.1.mixer.conv1d.weight", "backbone.layers.1.mixer.conv1d.bias"):
        np.testing.assert_array_equal(again.read(name), weights("mamba2")[name])


def test_axes_of_other_names() -> None:
    """Rows, tokens and heads over axes that the profile names; several axes for one role."""
    table = {"batch": ["b"], "sequence": ["s"], "heads": ["m"], "kv_heads": ["m"], "ffn": ["m", "s"], "vocab": ["m"]}
    ours = rlx.compile(*llama(), profile=profile(sharding=table), mesh=mesh("b s m", 8))
    for length in (11, 8):  # tokens that the axis does not divide, and that it does
        assert_close(ours(IDS[:, :length]), plain()[:, :length])
    assert ours.params is not None
    assert ours.params["model.layers.0.mlp.down_proj.weight"].sharding.spec == P(None, ("m", "s"))
    ours = rlx.compile(*llama(hidden_size=30), mesh=mesh("fsdp", 4))  # what does not divide is whole
    assert len(ours.report().replicated) == 7 + 2 and ours.report().shardings == {}


def test_numbers_of_devices() -> None:
    """The axes follow from what the model is for."""
    assert rlx.CausalLM(*llama(), mesh="auto").report().mesh == "data 2 × tensor 4"
    assert rlx.CausalLM(*llama(), mesh=2).report().mesh == "data 1 × tensor 2"
    assert rlx.compile(*llama(), mesh=np.int64(3)).report().mesh == "data 3"
    assert rlx.compile(*llama(), mesh="auto", program="train").report().mesh == "fsdp 8"
    assert rlx.compile(*llama(), mesh=4, program="prefill").report().mesh == "data 1 × tensor 4"
    assert rlx.CausalLM(*llama(intermediate_size=50), mesh="auto").report().mesh == "data 4 × tensor 2"
    one = rlx.compile(*llama())
    assert one.report().mesh == ""
    with jax.set_mesh(mesh("data", 2)):  # the program of this call, without copies of the parameters, is the next's
        assert one(IDS).devices() == {jax.devices()[0]}
    assert one(IDS).devices() == {jax.devices()[0]}
    lm = rlx.CausalLM(*llama())
    with jax.set_mesh(mesh("data", 2, AxisType.Explicit)):
        around = lm.generate([[1, 2, 3]], 3)
        assert jax.jit(lambda x: one.programs.run_helper(jnp.sum, x))(jnp.ones(3)) == 3
    assert around == rlx.CausalLM(*llama()).generate([[1, 2, 3]], 3)
    with pytest.raises(errors.RequestError, match="llama is compiled already: leave out 'mesh'"):
        rlx.CausalLM(one, mesh=2)


def test_inputs_and_transformations() -> None:
    """Arrays of the host, of one device, of the mesh, of one with explicit axes; `jit` and `vmap`."""
    where, explicit = mesh("data tensor", 4), mesh("data tensor", 4, AxisType.Explicit)
    ours = rlx.compile(*llama(), mesh=explicit)
    want, params = plain(), ours.require_params("the test")
    inputs = [IDS, jnp.asarray(IDS), *(jax.device_put(IDS, NamedSharding(m, P("data"))) for m in (where, explicit))]
    for ids in inputs:
        assert_close(ours(ids), want)
    assert_close(jax.jit(ours.apply)(params, inputs[2]), want)
    assert_close(ours.apply(params, jax.device_put(IDS, jax.devices()[7])), want)
    assert_close(jax.vmap(lambda row: ours.apply(params, row[None])[0])(IDS), want)
    for around in (where, explicit):
        with jax.set_mesh(around):
            assert_close(ours.apply(params, IDS), want)
