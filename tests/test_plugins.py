"""Plugins: an installed package gives stages, families, rules, lowerings and rewrites, and edits nothing."""

import importlib
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.errors import DeriveError, GraphError, UnsupportedError
from rlx_jax.ir.graph import Graph
from rlx_jax.models.families import FAMILIES
from tests.oracles.comparing import assert_close
from tests.oracles.numpy_reference import Array, Weights, linear, rms_norm, rotate, softmax

EXAMPLE = Path(__file__).parents[1] / "examples" / "token_shift"
H, N, D, F, V, LAYERS = 10, 2, 6, 14, 23, 2
CONFIG = {
    "model_type": "shifted_llama", "architectures": ["ShiftedLlamaForCausalLM"], "vocab_size": V, "hidden_size": H,
    "head_dim": D, "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": N,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-4, "rope_theta": 700.0, "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, V, (2, 7)).astype(np.int32)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as an installer leaves it: its module and its dist-info on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    info = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    rows = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
            for group, points in project["entry-points"].items()]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(rows))
    (info.parent / "rlx_token_shift.py").write_text((EXAMPLE / "rlx_token_shift.py").read_text("utf-8"))
    rlx.plugins.installed.cache_clear()
    assert rlx.plugins.installed() == ()
    monkeypatch.syspath_prepend(str(info.parent))
    rlx.plugins.installed.cache_clear()
    yield importlib.import_module("rlx_token_shift")
    monkeypatch.undo()
    sys.modules.pop("rlx_token_shift")
    rlx.plugins.installed.cache_clear()


def row_logits(w: Weights, ids: Any) -> Array:
    """Logits `[S, V]` of a row in float64."""
    s, eps = len(ids), 1e-4
    behind = np.subtract.outer(np.arange(s), np.arange(s))
    angles = np.arange(s)[:, None, None] * 700.0 ** (-np.arange(0, D, 2) / D)
    x = w["model.embed_tokens.weight"][np.asarray(ids)]
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        a = rms_norm(x, w[f"{p}.input_layernorm.weight"], eps)
        q, k, v = (linear(w, f"{p}.self_attn.{n}_proj", a).reshape(s, -1, D) for n in "qkv")
        q, k = (rotate(t, np.cos(angles), np.sin(angles)) for t in (q, k))
        scores = [np.where(behind < 0, -np.inf, q[:, n] @ k[:, 0].T / np.sqrt(D)) for n in range(N)]
        x = x + linear(w, f"{p}.self_attn.o_proj", np.concatenate([softmax(t) @ v[:, 0] for t in scores], -1))
        m = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        before = np.concatenate([np.zeros((1, H)), m[:-1]])
        inner = linear(w, f"{p}.mlp.up_proj", m + w[f"{p}.mlp.mix"] * (before - m))
        x = x + linear(w, f"{p}.mlp.down_proj", np.maximum(inner, 0) ** 2)
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def drawn(specs: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(0.2, 0.5, s.shape).astype("f4") for k, s in specs.items()}


def test_an_installed_package_is_all_that_a_family_needs(example: ModuleType, tmp_path: Path) -> None:
    """Loaded by its `model_type`; logits, ragged cached decode behind its own state, and both policies, by formula."""
    weights = drawn(example.ShiftedLlamaFlow.for_prefill(CONFIG).shapes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    lm = rlx.load(folder)
    wide = {key: value.astype(np.float64) for key, value in weights.items()}
    assert_close(lm.logits(TOKENS), np.stack([row_logits(wide, row) for row in TOKENS]).astype("f4"))
    prompts = [TOKENS[0].tolist(), TOKENS[1, :3].tolist()]
    want = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(4):
            ids.append(int(np.argmax(row_logits(wide, ids)[-1])))
        want.append(ids[len(prompt) :])
    assert lm.generate(prompts, max_new_tokens=4) == want
    with pytest.raises(DeriveError, match="token_shift.*speculative="):
        lm.generate(prompts, max_new_tokens=4, speculative="prompt")
    assert "shifted_llama" not in FAMILIES
    direct, fusable = (
        rlx.compile(rlx.from_pretrained(folder), profile=rlx.CompileProfile().replace(fusion={"policy": policy}))
        for policy in ("direct", "fusable")
    )
    assert "squared_relu_op" in direct.text("mir") and "squared_relu_op" not in fusable.text("mir")
    assert_close(direct(TOKENS), np.asarray(fusable(TOKENS)))


def test_without_it_the_names_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnsupportedError, match="'shifted_llama'.*llama"):
        rlx.load(tmp_path)
    with (
        rlx.plugins.using(rlx.Plugin("greedy", families={"llama": FAMILIES["qwen2"]})),
        pytest.raises(GraphError, match="'llama'.*rlx_jax"),
    ):
        rlx.load(tmp_path)


def small() -> rlx.ModelFlow:
    return rlx.ModelFlow("f").input("x", ("batch", "seq", 3)).custom(lambda emit, x: emit.relu(x))


def shifted(example: ModuleType) -> tuple[rlx.ModelFlow, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = {"ffn.mix": (5,), "ffn.up_proj.weight": (7, 5), "ffn.down_proj.weight": (5, 7)}
    weights = {key: rng.normal(size=shape).astype("f4") for key, shape in sizes.items()}
    flow = rlx.ModelFlow("f").input("x", ("batch", "seq", 5)).stage(rlx.plugins.stage("token_shift.ffn", "ffn"))
    return flow, weights, rng.normal(size=(2, 4, 5)).astype("f4")


def test_its_stages_blocks_and_rewrites(example: ModuleType) -> None:
    """By name: a stage in a flow; a block out of JSON; a rewrite at the end of `build`, by default none."""
    flow, weights, x = shifted(example)
    up, down, mix = (weights[f"ffn.{n}"].astype("f8") for n in ("up_proj.weight", "down_proj.weight", "mix"))
    before = np.concatenate([np.zeros((2, 1, 5)), x[:, :-1]], 1)

    def meant(back: Array) -> Array:
        return (np.maximum((x + mix * (back - x)) @ up.T, 0) ** 2 @ down.T).astype("f4")

    off = flow.with_extensions(rlx.FlowExtensionPlan.only("token_shift.off"))
    assert_close(rlx.compile(flow, weights)(x), meant(before))
    assert_close(rlx.compile(off, weights)(x), meant(x))
    assert flow._extensions == rlx.FlowExtensionPlan() and rlx.FlowExtensionPlan.all().names() == ("token_shift.off",)
    module = flow.build(weights).into_graph_module()
    assert str(rlx.GraphModule.from_json(module.to_json())) == str(module) and "token_shift" in str(module)
    (contract,) = flow.build(weights).contracts
    assert (contract.stage, str(contract.intermediate), contract.path) == ("ShiftedFfn", "(batch, seq, 7)", "mlp")


def test_scoped_plugins() -> None:
    """`using` adds some for a while; what they give is what an installed one may."""

    def doubled(graph: Graph, types: Any) -> Graph:
        return graph

    mine = rlx.Plugin("mine", stages={"mine.norm": blocks.RmsNorm}, extensions={"keep": doubled})
    with rlx.plugins.using(mine):
        assert rlx.ModelFlow("f").stage(rlx.plugins.stage("mine.norm", "w", eps=0.5))._stages == (
            blocks.RmsNorm("w", 0.5),
        )
        with pytest.raises(GraphError, match="'mine.nrom'.*'mine.norm'"):
            rlx.ModelFlow("f").stage(rlx.plugins.stage("mine.nrom"))
        with pytest.raises(GraphError, match="'mine'.*'yours'.*'mine.norm'"):
            rlx.plugins.using(rlx.Plugin("yours", stages={"mine.norm": blocks.Linear})).__enter__()
    assert rlx.plugins.active_plugin().stages == {}


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for value, text in (
        ("no_such_module:PLUGIN", "of broken 1.0 .*does not import: ModuleNotFoundError"),
        ("json:dumps", "is <function dumps.*expected a rlx_jax.Plugin"),
    ):
        (info / "entry_points.txt").write_text(f"[rlx_jax.plugins]\nbroken = {value}\n")
        rlx.plugins.installed.cache_clear()
        with pytest.raises(GraphError, match=text):
            rlx.ModelFlow("f").stage(rlx.plugins.stage("x"))
    rlx.plugins.installed.cache_clear()


class Liar:
    """Says that it keeps three heads and writes two."""

    def emit(self, emit: Any, value: Any) -> Any:
        return emit.attention(value, value, value, heads=2, head_dim=4, mask="causal")

    def cache_contract(self, emit: Any, hidden: Any) -> blocks.KvCacheContract:
        return blocks.KvCacheContract.packed(hidden, 12)
