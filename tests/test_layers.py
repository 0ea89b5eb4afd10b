"""Folders import upwards only, a name means one thing, and the names of the public interface that stay."""

import ast
import functools
import inspect
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.models.hooks import Recipe
from tests.oracles.checkpoints import FIXTURES

PACKAGE = Path(__file__).parents[1] / "rlx_jax"

ROOMS = (
    "errors", "io", "ir", "plugins", "profiles", "device", "weights", "trace", "blocks", "lowering", "program",
    "compiler", "inspection", "flow", "runtime", "losses", "train", "models", "text", "encode", "generate", "loading",
    "surface",
)  # fmt: skip
"""From the ground up: a module imports its own room and those before it."""

SURFACE = ("", "__main__", "cli", "compile_steps", "demo", "eval", "nnx", "public", "quantization")
ROOTS = {"dataclasses": "errors", "lru": "errors", "at": "flow", "flow_outputs": "flow", "layer_stack": "flow"}
SHARED = ROOTS | dict.fromkeys(SURFACE, "surface")
"""Files at the package's root that are no room of their own. "" is the package itself."""

STRANGERS = {
    "lowering": {"trace", "blocks"}, "trace": {"profiles", "weights"}, "blocks": {"profiles", "weights"},
    "models": {"ir", "lowering"},
}  # fmt: skip
"""Rooms that stand before another and are not entered: lowering knows no stage, a stage no profile and no file, and a
recipe no compiler internals."""


def modules() -> dict[str, Path]:
    """Every module of the package by its import name. The folders that stand beside the package are linked into it."""
    found = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for path in (Path(folder) / name for name in files if name.endswith(".py")):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def targets(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        if name in known:
            yield name


def room(module: str) -> str:
    """The room of a module: `rlx_jax.lowering.mir.small` stands in `lowering`."""
    name = module.partition(".")[2].partition(".")[0]
    return SHARED.get(name, name)


MODULES = modules()


def test_every_module_has_a_room() -> None:
    assert {room(name) for name in MODULES} <= set(ROOMS)
    assert len(MODULES) > 100 and room("rlx_jax.lowering.mir.small") == "lowering"  # the links were followed


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module's source, parsed by the first test that reads it and not when tests are collected."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


@functools.cache
def imports() -> dict[str, list[ast.Import | ast.ImportFrom]]:
    """Every module's import statements, wherever they stand."""
    return {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, tree in trees().items()
    }


def test_imports_point_upwards() -> None:
    """No exception is made: not for an import inside a function, and not for one that only types need."""
    wrong = []
    for name, statements in imports().items():
        own = room(name)
        for node in statements:
            for target in targets(node, MODULES):
                there = room(target)
                strange = there in STRANGERS.get(own, ())
                if ROOMS.index(there) > ROOMS.index(own) or strange:
                    wrong.append(f"{MODULES[name]}:{node.lineno}: {own} imports {target}")
    assert wrong == []


LAZY = {
    "rlx_jax": {"rlx_jax.eval", "rlx_jax.nnx", "rlx_jax.train", "rlx_jax.public"},
    "rlx_jax.loading.start": {"rlx_jax.flow", "rlx_jax.generate.causal"},
}
"""What is imported when it is first used: the modules that need lm_eval and flax, what only training needs, and what
`load` imports while the device starts."""


def test_no_import_of_the_package_hides() -> None:
    """Inside a function or under a condition an import hides a circle."""
    for name, tree in trees().items():
        hidden = {t for node in imports()[name] if node not in tree.body for t in targets(node, MODULES)}
        assert hidden <= LAZY.get(name, set()), name


PUBLIC = {"Graph": "rlx_jax.Graph is the spec's name for GraphModule"}
"""Names that users know by two meanings, with the reason."""


def definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names of a module's classes and capitalised aliases, each with what it is: `class`, or the alias's value."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            name, value = target.id, ast.unparse(node.value)
            if name[0].isupper() and not name.isupper() and not value.startswith("TypeVar"):
                yield name, value


def stage_and_block(modules: list[str]) -> bool:
    """A stage and the HIR block or region that it writes."""
    return sorted(map(room, modules)) == ["blocks", "ir"]


def test_no_two_classes_share_a_name() -> None:
    """But a stage and the block it writes. An alias of the same value means the same."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for module, tree in trees().items():
        for name, meaning in definitions(tree):
            found[name][module] = meaning
    for name, places in found.items():
        same = len(set(places.values())) == 1 and "class" not in places.values()
        assert len(places) == 1 or same or stage_and_block(list(places)) or name in PUBLIC, (name, places)


CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and c.__module__ == errors.__name__]


def test_every_exception_is_raised() -> None:
    """Or warned of: by name, in code that is not an import."""
    others = [tree for name, tree in trees().items() if name != "rlx_jax.errors"]
    nodes = [node for tree in others for node in ast.walk(tree)]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    named |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    leaves = {c.__name__ for c in CLASSES if issubclass(c, BaseException) and not c.__subclasses__()}
    assert len(leaves) > 10 and leaves <= named


FLOW = """
new input with_profile profile profile_file profile_prefill profile_decode profile_encoder stage raw_stage raw_stages
sequence output outputs hidden_states with_extra_outputs with_extensions from_recipe build build_with embed token_embed
gather_from_input gather_add rope_tables zero_beta zero_beta_named bind_decode_inputs attn_mask_ones repeat_layers
named_layer layer llama_prefill_layer llama_prefill_layer_composed llama_decoder_layer llama_decode_layer llama_kv_tap
linear residual_save residual_add swiglu swiglu_hf_mlp self_attn_prefill gdn_scan layer_norm rms_norm final_norm
gelu_ffn bert_encoder_layer repeat_bert_layers repeat_nomic_layers repeat_dinov2_layers repeat_vision_layers
repeat_siglip_layers cls_token_pool gather_last_token_dynamic gather_last_token_at lm_head store_stream load_stream
bind_inputs_to_streams dual_stream plugin plugin_named custom custom_named when patch
""".split()
RECIPES = """
BertFlow Dinov2Flow Flux2Flow GemmaFlow Llama32Flow MPNetFlow MistralFlow NomicFlow NomicVisionFlow Qwen2Flow Qwen35Flow
Qwen3Flow Qwen3MoeFlow SiglipFlow ViTFlow
""".split()
TOP = """
BuiltModel CausalLM CompileProfile DualEncoder Emit Encoder FlowValue Graph GraphModule GraphStage LayerStack ModelFlow
Packed Plugin RlxError Sampler VisionEncoder blocks compile errors from_pretrained init load lora losses open_weights
recipe_for save
""".split()


def test_builders() -> None:
    """They are there, and few other names."""
    public = {name for name in dir(rlx.ModelFlow.new("m")) if not name.startswith("_")}
    assert set(FLOW) <= public and len(public - set(FLOW)) <= 10, public ^ set(FLOW)


def test_the_top_level() -> None:
    assert set(TOP) <= set(rlx.__all__) and not set(RECIPES) & set(rlx.__all__)
    for name in RECIPES:
        assert getattr(rlx, name) is getattr(rlx.models, name)
    for name, meant in (("complie", "compile"), ("LlamaFlow", "Llama32Flow")):
        with pytest.raises(AttributeError, match=f"'{name}'; did you mean '{meant}'"):
            getattr(rlx, name)
    with pytest.raises(TypeError, match=r"Sampler\(\) .*'temp'.*'temperature'"):
        rlx.Sampler(temp=1.0)  # type: ignore[call-arg]


def test_types() -> None:
    """What mypy infers for code of users, and that `expect` is checked."""
    path = FIXTURES / "llama" / "gqa_tied_llama3_v5"
    lm = rlx.load(path)
    assert_type(lm, rlx.CausalLM)
    assert_type(lm.generate("Hello", max_new_tokens=1), str)
    assert_type(lm.generate([[1], [2]], max_new_tokens=1), list[list[int]])
    assert_type(lm.score([("a", "b")]), list[rlx.Score])
    assert_type(rlx.load(FIXTURES / "bert" / "bare_v5", expect=rlx.Encoder), rlx.Encoder)
    assert_type(rlx.recipe_for(path), Recipe[Any])
    assert_type(rlx.recipe_for(path, expect=rlx.Llama32Flow), rlx.Llama32Flow)
    for function, other in ((rlx.load, rlx.Encoder), (rlx.recipe_for, rlx.BertFlow)):
        with pytest.raises(rlx.errors.RequestError, match=f"of class .*; expected {other.__name__}"):
            function(path, expect=other)


def test_a_module_is_imported_before_all_names() -> None:
    """Its own imports from the package do not import it again."""
    forget = "[sys.modules.pop(n) for n in [*sys.modules] if 'rlx_jax' in n]"
    names = ("models.llama", "weights.save", "trace.emit", "models.siglip")
    code = "\n".join(["import sys", *(f"import rlx_jax.{name}\n{forget}" for name in names)])
    subprocess.run([sys.executable, "-c", code], check=True)
